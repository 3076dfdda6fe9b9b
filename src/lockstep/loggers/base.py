"""The base classes of loggers, and what they share: versions, names of metrics, uploads."""

from __future__ import annotations

import functools
import json
import os
import re
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.nn import Module

from lockstep.checkpoint import storage
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only, warn_once

# -- the base class ------------------------------------------------------------------------------------------


class Logger(ABC):
    """Where metrics and hyperparameters go. Subclass it for a service of your own.

    The Trainer calls, on all ranks: :meth:`share` before anything else, :meth:`log_hyperparams` and
    :meth:`log_graph` once when a fit begins, :meth:`log_metrics` every ``log_every_n_steps`` steps and at
    epoch ends, :meth:`save` after each epoch, :meth:`finalize` at the end. Decorate methods that write by
    ``@rank_zero_only``, and the property ``experiment`` by ``@rank_zero_experiment``.
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """The name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """The version of the experiment: one run of it."""

    @property
    def save_dir(self) -> str | None:
        """The folder that holds all experiments; None if nothing is kept in files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """The folder that holds all versions of the experiment; None if nothing is kept in files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this version; None if nothing is kept in files."""
        return None

    @property
    def group_separator(self) -> str:
        """What stands between the group and the name of a metric."""
        return "/"

    def share(self, broadcast: Callable[[Any], Any]) -> None:  # noqa: B027, optional
        """Take over what rank 0 has chosen, such as the version; nothing by default.

        Args:
            broadcast: gives, on all ranks, what rank 0 called it with.
        """

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record numbers by name, as of `step`."""

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters."""

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:  # noqa: B027, optional
        """Record the graph of `model`, as run on `input_array` or on its ``example_input_array``."""

    # Any: overrides name the ModelCheckpoint, whose file names the module, whose file names this one.
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:  # noqa: B027, optional
        """Called on rank 0 after a ModelCheckpoint (that it is given) has saved a file."""

    def save(self) -> None:  # noqa: B027, optional
        """Write what is held back."""

    def finalize(self, status: str) -> None:
        """End the experiment; `status` is ``"success"``, ``"failed"`` or ``"finished"``."""
        self.save()


class DummyExperiment:
    """Takes any call and any index, and does nothing: the experiment of ranks other than 0."""

    def nop(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle ask for methods that change what they do
            raise AttributeError(name)
        return self.nop

    def __getitem__(self, index: object) -> DummyExperiment:
        return self

    def __setitem__(self, index: object, value: object) -> None: ...


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorator of an ``experiment`` getter: the real one on rank 0, a :class:`DummyExperiment` elsewhere."""

    @functools.wraps(fn)
    def experiment(self: Logger) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment


class DummyLogger(Logger):
    """Takes all calls and keeps nothing; stands in for the user's logger in a ``fast_dev_run``."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> DummyExperiment:
        """Takes any call."""
        return DummyExperiment()

    def log_metrics(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def __getitem__(self, index: object) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return DummyExperiment().nop


class FolderLogger(Logger):
    """A logger that keeps its files in ``save_dir/name/version_N``.

    Without a `version`, the next free number is taken by *making* the folder, so that two runs that start at
    once do not get the same one. Rank 0 does so, the others are told by :meth:`share`.

    Args:
        save_dir: a local folder.
        name: the experiment; ``""`` or None: versions lie in `save_dir` itself.
        version: a number, or a string that is the folder's whole name. None: the next free number.
        prefix: put in front of the names of metrics, with ``-`` between.
    """

    LOGGER_JOIN_CHAR = "-"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        self._save_dir = os.path.expandvars(os.path.expanduser(os.fspath(save_dir)))
        if "://" in self._save_dir:
            raise MisconfigurationException(
                f"{type(self).__name__}(save_dir={self._save_dir!r}): logs are kept in a local folder, "
                "not at a URL; choose one."
            )
        self._name = name or ""
        self._version = version
        self._prefix = prefix
        self._experiment: Any = None
        self.hparams: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int | str:
        if self._version is None:
            if rank_zero_only.rank != 0:  # only a guess, until rank 0 has made the folder and told
                return _next_version(Path(self.root_dir))
            with self._writing():
                self._version = claim_version(self.root_dir, type(self).__qualname__)
        return self._version

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def _root_dir(self) -> str:  # Lightning's names, which subclasses in other packages read
        return self.save_dir

    @property
    def _fs(self) -> Any:
        return import_module("fsspec.core").url_to_fs(self.save_dir)[0]

    @property
    def root_dir(self) -> str:
        return os.path.join(self.save_dir, self.name)

    @property
    def log_dir(self) -> str:
        version = self.version
        return os.path.join(self.root_dir, version if isinstance(version, str) else f"version_{version}")

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        chosen = (self.name, self.version) if rank_zero_only.rank == 0 else None
        self._name, self._version = broadcast(chosen)

    def _prefixed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR)

    @rank_zero_only
    def begin_hparams_file(self) -> None:
        """Have a file of hyperparameters, if an empty one: scripts hand its name to ``load_from_checkpoint``."""
        if not os.path.exists(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)):
            self._write_hparams()

    def _write_hparams(self) -> None:
        with self._writing():
            write_hparams(self.log_dir, self.hparams)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Says of a folder that cannot be written whose it is, and what to do."""
        try:
            yield
        except OSError as error:
            raise MisconfigurationException(
                f"{type(self).__name__}(save_dir={self._save_dir!r}): nothing can be written there ({error}); choose "
                "another folder."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay in this process. A copy in another one logs to the same version, so it is chosen now.
        return {**self.__dict__, "_version": self.version, "_experiment": None}


def _next_version(root: Path) -> int:
    taken = [re.fullmatch(r"version_(\d+)", name) for name in (os.listdir(root) if root.is_dir() else [])]
    return max((int(match[1]) + 1 for match in taken if match), default=0)


def claim_version(root: str | os.PathLike[str], kind: str = "") -> int:
    """The next free N, taken by making the folder ``root/version_N``, which only one process can.

    Loggers of several kinds in one run get the same folder: one that this process has made, in which no file
    is yet and no logger of this `kind`.
    """
    folder = Path(root).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    version = _next_version(folder)
    latest = folder / f"version_{version - 1}"
    if kind not in _made.get(latest, {kind}) and not os.listdir(latest):
        _made[latest].add(kind)
        return version - 1
    while True:
        try:
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            version += 1
        else:
            _made[folder / f"version_{version}"] = {kind}
            return version


#: the folders that this process has made, and the kinds of loggers that keep their files in each
_made: dict[Path, set[str]] = {}


def prefixed(metrics: Mapping[str, Any], prefix: str, join: str) -> dict[str, Any]:
    """`metrics` with `prefix` and `join` in front of each name; without a prefix a copy."""
    return {f"{prefix}{join}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


# -- uploads of checkpoints ----------------------------------------------------------------------------------


#: the settings of a ModelCheckpoint that are uploaded along with its files
_SETTINGS = (
    "monitor",
    "mode",
    "save_last",
    "save_top_k",
    "save_weights_only",
    "_every_n_train_steps",
    "_every_n_epochs",
)


@dataclass(frozen=True)
class Upload:
    """A checkpoint to be uploaded.

    Attributes:
        path: the file.
        score: its value of the monitored metric, None without one.
        aliases: ``"latest"``, and ``"best"`` for the callback's best.
        kind: the class of the callback.
        settings: the callback's settings by name.
    """

    path: str
    score: float | None
    aliases: list[str]
    kind: str
    settings: dict[str, Any]

    def metadata(self, kind: str) -> dict[str, Any]:
        """What is kept beside the file, as plain values: the settings under `kind`."""
        return {"score": self.score, "original_filename": Path(self.path).name, kind: self.settings}


class SavesCheckpoints(Protocol):
    """What a logger reads of a ModelCheckpoint."""

    dirpath: str | None
    save_top_k: int
    last_model_path: str
    best_model_path: str
    current_score: Tensor | None
    best_model_score: Tensor | None
    best_k_models: dict[str, Tensor]


class Uploads:
    """What ``log_model`` means, and which files have been uploaded.

    Args:
        when: False: never; True: what there is at the end, or at once where every checkpoint is kept
            (``save_top_k=-1``); ``"all"``: each as soon as it is saved.
    """

    def __init__(self, when: Literal["all"] | bool) -> None:
        self.when = when
        self._done: dict[str, float] = {}  # path -> time of its last change: last.ckpt keeps its name
        self._at_end: dict[int, SavesCheckpoints] = {}

    def after_save(self, callback: SavesCheckpoints) -> list[Upload]:
        """What to upload now that `callback` has saved a file."""
        if self.when == "all" or (self.when is True and callback.save_top_k == -1):
            return self.new(callback)
        if self.when is True:
            self._at_end[id(callback)] = callback
        return []

    def at_end(self) -> list[Upload]:
        """What is left to upload when a run has ended."""
        return [upload for callback in self._at_end.values() for upload in self.new(callback)]

    def new(self, callback: SavesCheckpoints) -> list[Upload]:
        """The files of `callback` that have not been uploaded as they are now, oldest first; they then count so."""
        scores = {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
        scores.update(callback.best_k_models)
        found = []
        for path, score in scores.items():
            # a path may come from a checkpoint, which anybody may have made: what lies elsewhere is not sent away
            if not (path and callback.dirpath and storage.lies_in(path, callback.dirpath)):
                continue
            if Path(path).is_dir():
                said = f"log_model={self.when!r}: checkpoints in parts are not uploaded: {path!r} is a folder."
                warn_once(said, key="a checkpoint in parts is not uploaded")
            if not Path(path).is_file():
                continue
            changed = Path(path).stat().st_mtime
            if self._done.get(path, float("-inf")) < changed:
                self._done[path] = changed
                found.append((changed, path, score))
        settings = {name: getattr(callback, name) for name in _SETTINGS if hasattr(callback, name)}
        best = callback.best_model_path
        return [
            Upload(
                path,
                score.item() if isinstance(score, Tensor) else score,
                ["latest", "best"] if path == best else ["latest"],
                callback.__class__.__name__,  # not type(): a weak proxy stands for the callback
                settings,
            )
            for _, path, score in sorted(found, key=lambda each: each[:2])
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_end": {}}  # callbacks belong to their own process


# -- hyperparameters as dicts, as JSON's values and as YAML ---------------------------------------------------


def as_dict(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """`params` (a mapping, Namespace or None) as a new dict."""
    return dict(vars(params) if isinstance(params, Namespace) else params or {})


def flattened(params: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """A nested mapping as a flat one: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``; lists of mappings too."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{above}/{key}" if above else str(key)
        inner = _nested(value)
        if isinstance(inner, list) and inner and all(isinstance(item, Mapping) for item in inner):
            inner = dict(enumerate(inner))
        flat.update(flattened(inner, name) if isinstance(inner, Mapping) else {name: value})
    return flat


def _nested(value: object) -> Any:
    """Namespaces and dataclasses as dicts, all else as it is."""
    if isinstance(value, Namespace):
        return vars(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_json(value: object) -> Any:
    """`value` in JSON's words: numbers of NumPy and torch as numbers, functions and classes by name, else ``str``."""
    inner = _nested(value)
    if isinstance(inner, Mapping):
        return {str(key): as_json(item) for key, item in inner.items()}
    if isinstance(inner, (list, tuple, set, frozenset)):
        return [as_json(item) for item in inner]
    if getattr(inner, "ndim", None) == 0 and hasattr(inner, "item"):
        inner = inner.item()
    if inner is None or type(inner) in (bool, int, float, str):
        return inner
    if callable(inner) and hasattr(inner, "__name__"):
        return inner.__name__
    return str(inner)


def write_hparams(folder: str, params: Mapping[Any, Any], name: str = "hparams.yaml") -> None:
    """Write `params` to the YAML file `name` in `folder`, which is made."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, name).write_text(as_yaml(params), encoding="utf-8")


def as_yaml(params: Mapping[Any, Any]) -> str:
    """`params` as YAML; what YAML has no word for is written as ``str`` of it. PyYAML is not needed."""
    return "".join(f"{line}\n" for line in _yaml_lines(params)) or "{}\n"


def _yaml_lines(params: Mapping[Any, Any]) -> list[str]:
    lines = []
    for key, value in params.items():
        inner = _nested(value)
        if isinstance(inner, Mapping) and inner:
            lines += [f"{_yaml_scalar(key)}:", *(f"  {line}" for line in _yaml_lines(inner))]
        else:
            lines.append(f"{_yaml_scalar(key)}: {_yaml_flow(inner)}")
    return lines


def _yaml_flow(value: object) -> str:
    inner = _nested(value)
    if isinstance(inner, Mapping):
        return "{" + ", ".join(f"{_yaml_scalar(key)}: {_yaml_flow(item)}" for key, item in inner.items()) + "}"
    if isinstance(inner, (list, tuple, set, frozenset)):
        return "[" + ", ".join(map(_yaml_flow, inner)) + "]"
    return _yaml_scalar(inner)


#: strings that need no quotes: they begin with a letter and are no other word of YAML's
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null|none)$)[A-Za-z_][\w./-]*", re.IGNORECASE | re.ASCII)


def _name_of(member: Enum) -> Any:
    """The name of a member; the value of several flags together, which are no member."""
    return member.name if member.name in type(member).__members__ else member.value


def _yaml_scalar(value: object) -> str:
    if isinstance(value, Enum):
        value = _name_of(value)
    elif getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(float(value))
        if text in ("inf", "-inf", "nan"):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        # to YAML 1.1, 1e-05 is a string
        return text if "." in text else text.replace("e", ".0e")
    text = value if isinstance(value, str) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
