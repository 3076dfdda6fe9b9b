"""Base classes of loggers, and shared functions for versions, prefixes, checkpoint uploads and hyperparameters."""

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
    """Base class of loggers, which record metrics and hyperparameters. Subclass it for another service.

    The Trainer calls on all ranks: :meth:`share` before any other method, :meth:`log_hyperparams` and
    :meth:`log_graph` once when a fit starts, :meth:`log_metrics` every ``log_every_n_steps`` steps and at epoch
    ends, :meth:`save` after each epoch, and :meth:`finalize` at the end. Decorate methods that write with
    ``@rank_zero_only``, and the property ``experiment`` with ``@rank_zero_experiment``.

    Example::

        class PrintLogger(Logger):
            name, version = "print", 0

            @rank_zero_only
            def log_metrics(self, metrics, step=None):
                print(step, metrics)

            @rank_zero_only
            def log_hyperparams(self, params):
                print(params)
    """

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Version of the experiment, which identifies one run."""

    @property
    def save_dir(self) -> str | None:
        """Folder of all experiments; None if the logger writes no files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of all versions of the experiment; None if the logger writes no files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Folder of this version; None if the logger writes no files."""
        return None

    @property
    def group_separator(self) -> str:
        """Separator between the group and the name of a metric."""
        return "/"

    def share(self, broadcast: Callable[[Any], Any]) -> None:  # noqa: B027, optional
        """Set this rank's values, such as the version, to those that rank 0 has chosen. By default do nothing.

        Args:
            broadcast: function that returns, on all ranks, the value that rank 0 passes.
        """

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record metrics by name, for the optimizer step `step`.

        Args:
            metrics: numbers by name.
            step: number on the horizontal axis of charts; the Trainer passes optimizer steps.
        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record hyperparameters.

        Args:
            params: hyperparameters by name; values may be nested dicts.
            args, kwargs: further arguments of a subclass; the Trainer passes none.
        """

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:  # noqa: B027, optional
        """Record the model's graph, traced with `input_array` or ``model.example_input_array``.

        Args:
            model: module to trace.
            input_array: input of the module's ``forward``: a tensor with a batch dimension, or a tuple of all
                arguments; None: ``model.example_input_array``.
        """

    # Any: an import of ModelCheckpoint would be a circle, since its file imports the module, which imports this one.
    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:  # noqa: B027, optional
        """Run on rank 0 after the ModelCheckpoint `checkpoint_callback` has saved a file."""

    def save(self) -> None:  # noqa: B027, optional
        """Write buffered values."""

    def finalize(self, status: str) -> None:
        """End the experiment; `status` is ``"success"``, ``"failed"`` or ``"finished"``."""
        self.save()


class DummyExperiment:
    """Placeholder for the experiment on ranks other than 0. It accepts any call and any index, and does nothing."""

    def nop(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle would call a `__reduce__` or `__deepcopy__` that they find
            raise AttributeError(name)
        return self.nop

    def __getitem__(self, index: object) -> DummyExperiment:
        return self

    def __setitem__(self, index: object, value: object) -> None: ...


def rank_zero_experiment(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorate an ``experiment`` getter so that ranks other than 0 get a :class:`DummyExperiment`.

    Args:
        fn: function of a property, which takes the logger and returns its experiment object.

    Example::

        @property
        @rank_zero_experiment
        def experiment(self):
            return self._client
    """

    @functools.wraps(fn)
    def experiment(self: Logger) -> Any:
        return fn(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment


class DummyLogger(Logger):
    """Logger that records nothing; replaces the user's loggers in a ``fast_dev_run``."""

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def experiment(self) -> DummyExperiment:
        """Object that accepts any call and does nothing."""
        return DummyExperiment()

    def log_metrics(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    def __getitem__(self, index: object) -> DummyLogger:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return DummyExperiment().nop


class FolderLogger(Logger):
    """Base class of loggers that write files to ``save_dir/name/version_N``.

    Args:
        save_dir: local folder.
        name: name of the experiment; ``""`` or None: versions are in `save_dir` itself.
        version: number, or a string that is the whole name of the folder; None: the next free number.
        prefix: prefix of the names of metrics, followed by ``-``.

    Raises:
        MisconfigurationException: `save_dir` is a URL; or, when the version is chosen or something is written, the
            folder is not writable.
    """

    LOGGER_JOIN_CHAR = "-"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self, save_dir: str | os.PathLike[str], name: str | None, version: int | str | None, prefix: str
    ) -> None:
        self._save_dir = os.path.expandvars(os.path.expanduser(os.fspath(save_dir)))
        if "://" in self._save_dir:
            raise MisconfigurationException(
                f"{type(self).__name__}(save_dir={self._save_dir!r}): logs cannot be written to a URL. Pass a local "
                "folder."
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
            if rank_zero_only.rank != 0:  # a guess, until `share` brings the version that rank 0 has claimed
                return _next_version(Path(self.root_dir))
            with self._named_errors():
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
        """Write the hyperparameters file if it does not exist, even if there are no hyperparameters to write.

        Raises:
            MisconfigurationException: the folder is not writable.
        """
        # scripts for Lightning pass its name to `load_from_checkpoint`, also for modules without hyperparameters
        if not os.path.exists(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)):
            self._write_hparams()

    def _write_hparams(self) -> None:
        with self._named_errors():
            write_hparams(self.log_dir, self.hparams)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Convert an OSError to a MisconfigurationException that names the logger and its folder."""
        try:
            yield
        except OSError as error:
            raise MisconfigurationException(
                f"{type(self).__name__}(save_dir={self._save_dir!r}): the folder is not writable ({error}). Pass a "
                "different folder."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        # Open files stay in this process. A copy in another process logs to the same version: choose it now.
        return {**self.__dict__, "_version": self.version, "_experiment": None}


def _next_version(root: Path) -> int:
    taken = [re.fullmatch(r"version_(\d+)", name) for name in (os.listdir(root) if root.is_dir() else [])]
    return max((int(match[1]) + 1 for match in taken if match), default=0)


def claim_version(root: str | os.PathLike[str], kind: str = "") -> int:
    """Create the folder ``root/version_N`` with the next free number N, and return N.

    Loggers of several kinds in one run share a folder.
    """
    folder = Path(root).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    version = _next_version(folder)
    latest = folder / f"version_{version - 1}"
    # made by this process, still empty, and without a logger of this kind: it belongs to the same run
    if kind not in _made.get(latest, {kind}) and not os.listdir(latest):
        _made[latest].add(kind)
        return version - 1
    while True:
        try:
            # only one process can make it, so that two runs that start at once get two versions
            (folder / f"version_{version}").mkdir()
        except FileExistsError:
            version += 1
        else:
            _made[folder / f"version_{version}"] = {kind}
            return version


#: folders that this process has made, and the kinds of loggers that keep files in each
_made: dict[Path, set[str]] = {}


def prefixed(metrics: Mapping[str, Any], prefix: str, join: str) -> dict[str, Any]:
    """Return a copy of `metrics` with `prefix` and `join` in front of each name, if `prefix` is not empty."""
    return {f"{prefix}{join}{name}": value for name, value in metrics.items()} if prefix else dict(metrics)


# -- uploads of checkpoints ----------------------------------------------------------------------------------


#: settings of a ModelCheckpoint that are uploaded with its files
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
    """A checkpoint file to upload, with its metadata.

    Attributes:
        path: the file.
        score: value of the monitored metric; None without one.
        aliases: ``"latest"``, and ``"best"`` for the best checkpoint of the callback.
        kind: class name of the callback.
        settings: settings of the callback, by name.
    """

    path: str
    score: float | None
    aliases: list[str]
    kind: str
    settings: dict[str, Any]

    def metadata(self, kind: str) -> dict[str, Any]:
        """Return metadata for the upload as plain values, with the callback's settings under the key `kind`."""
        return {"score": self.score, "original_filename": Path(self.path).name, kind: self.settings}


class SavesCheckpoints(Protocol):
    """The attributes of a ModelCheckpoint that loggers read."""

    dirpath: str | None
    save_top_k: int
    last_model_path: str
    best_model_path: str
    current_score: Tensor | None
    best_model_score: Tensor | None
    best_k_models: dict[str, Tensor]


class Uploads:
    """Scheduler of a logger's checkpoint uploads, which records the uploaded files.

    Args:
        when: False: never. ``"all"``: each checkpoint as soon as it is saved. True: the checkpoints that exist at
            the end of the run; but each as soon as it is saved if all are kept (``save_top_k=-1``).
    """

    def __init__(self, when: Literal["all"] | bool) -> None:
        self.when = when
        self._done: dict[str, float] = {}  # path -> time of its last change: last.ckpt keeps its name
        self._at_end: dict[int, SavesCheckpoints] = {}

    def after_save(self, callback: SavesCheckpoints) -> list[Upload]:
        """Return the checkpoints to upload now. Call this after `callback` has saved a checkpoint."""
        if self.when == "all" or (self.when is True and callback.save_top_k == -1):
            return self.new(callback)
        if self.when is True:
            self._at_end[id(callback)] = callback
        return []

    def at_end(self) -> list[Upload]:
        """Return the checkpoints to upload at the end of a run."""
        return [upload for callback in self._at_end.values() for upload in self.new(callback)]

    def new(self, callback: SavesCheckpoints) -> list[Upload]:
        """Return the callback's files that changed since the last upload, oldest first, and record them as uploaded."""
        scores = {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
        scores.update(callback.best_k_models)
        found = []
        for path, score in scores.items():
            # Paths may come from a checkpoint of another author: upload no file from outside the callback's folder.
            if not (path and callback.dirpath and storage.lies_in(path, callback.dirpath)):
                continue
            if Path(path).is_dir():
                warn_once(
                    f"log_model={self.when!r}: the checkpoint {path!r} is a folder and is not uploaded. "
                    "Only checkpoints in one file are uploaded.",
                    key="a checkpoint in parts is not uploaded",
                )
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
                callback.__class__.__name__,  # not type(): the callback may be a weak proxy
                settings,
            )
            for _, path, score in sorted(found, key=lambda each: each[:2])
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_end": {}}  # callbacks belong to their own process


# -- hyperparameters as dicts, as JSON's values and as YAML ---------------------------------------------------


def as_dict(params: Mapping[str, Any] | Namespace | None) -> dict[str, Any]:
    """Copy a mapping or Namespace to a dict; None becomes an empty dict."""
    return dict(vars(params) if isinstance(params, Namespace) else params or {})


def flattened(params: Mapping[Any, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested mappings and lists of mappings: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{above}/{key}" if above else str(key)
        inner = _nested(value)
        if isinstance(inner, list) and inner and all(isinstance(item, Mapping) for item in inner):
            inner = dict(enumerate(inner))
        flat.update(flattened(inner, name) if isinstance(inner, Mapping) else {name: value})
    return flat


def _nested(value: object) -> Any:
    """Convert a Namespace or dataclass to a dict; return any other value unchanged."""
    if isinstance(value, Namespace):
        return vars(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_json(value: object) -> Any:
    """Convert a value to types that JSON supports.

    Scalars of NumPy and torch become numbers, functions and classes their names, other objects ``str(value)``.
    """
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
    """Write `params` to the YAML file `name` in `folder`; create the folder if needed."""
    os.makedirs(folder, exist_ok=True)
    Path(folder, name).write_text(as_yaml(params), encoding="utf-8")


def as_yaml(params: Mapping[Any, Any]) -> str:
    """Format `params` as YAML, without PyYAML; objects without a YAML type become ``str(value)``."""
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


#: strings that YAML 1.1 reads as strings without quotes
_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|true|false|null|none)$)[A-Za-z_][\w./-]*", re.IGNORECASE | re.ASCII)


def _yaml_scalar(value: object) -> str:
    if isinstance(value, Enum):
        # a combination of flags has no member, only a value
        value = value.name if value.name in type(value).__members__ else value.value
    elif getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a number of NumPy or torch
        value = value.item()
    if value is None or isinstance(value, (bool, int)):
        return json.dumps(value)
    if isinstance(value, float):
        text = repr(float(value))
        if text in ("inf", "-inf", "nan"):
            return text.replace("inf", ".inf").replace("nan", ".nan")
        # YAML 1.1 reads 1e-05 as a string
        return text if "." in text else text.replace("e", ".0e")
    text = value if isinstance(value, str) else str(value)
    if _PLAIN.fullmatch(text):
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
