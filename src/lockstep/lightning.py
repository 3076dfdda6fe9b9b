"""Lightning's import names, answered by lockstep: a script that imports ``lightning`` runs unchanged.

::

    lockstep run --lightning train.py --devices 2
    python -m lockstep.lightning train.py            # also: -m package.train
    %load_ext lockstep.lightning                     # the first cell of a notebook

From then on, in this process and in every Python process that is started from it, ``lightning``, ``pytorch_lightning``,
``lightning.fabric``, ``lightning_fabric`` and ``test_tube`` are found by one finder. It makes each of their modules
from the table of `lockstep.aliases`, or from the rows below: names of Fabric's side, of test_tube, and what third
parties read besides.
A name that lockstep refuses is

- a class that can be imported, derived from and asked for by ``isinstance``, where it is spelt like a class. Making an
  object of it raises the reason;
- else an error that names the file and line which imports it.

The classes are lockstep's own, so pickles do not depend on the names, and pickles of Lightning's classes find them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType, ModuleType
from typing import IO, TYPE_CHECKING, Any

import torch

from lockstep.aliases import (
    ENGINES,
    INNER,
    MODULES,
    PLUGIN_IO,
    PLUGIN_PRECISION,
    Refused,
    Rows,
    _all,
    resolve,
)
from lockstep.aliases import TEST_TUBE as EXPERIMENT
from lockstep.ground.errors import MisconfigurationException, asked_by, refused_class
from lockstep.ground.hyperparameters import arguments_of_init
from lockstep.ground.installed import LIGHTNING
from lockstep.ground.rank import LIGHTNINGS, log, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
from lockstep.launch.environment import hand_down_names

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")
TEST_TUBE = "test_tube"
"""The package of 2019 whose parser and cluster scripts for Lightning used; its names are answered, too."""

# -- names that the table of lockstep.aliases has not ---------------------------------------------------------


FABRIC = Refused(
    "lockstep has no Fabric. Keep your loop, and take lockstep.DistributedDataParallel and lockstep.precision for it, "
    "or give it to a Trainer; or run this script with Lightning itself, without --lightning."
)
LOGGING = Refused("an inner part of Fabric's loggers; take those of lightning.pytorch.loggers.")

FABRICS: dict[str, Rows | Refused] = {
    "": {"seed_everything": "ground.seed", **_all("Fabric is_wrapped", FABRIC)},
    "accelerators": ENGINES["accelerators"],
    "accelerators.accelerator": ENGINES["accelerators.accelerator"],
    "accelerators.cpu": {"CPUAccelerator": "ground.device"},
    "accelerators.cuda": {"CUDAAccelerator": "ground.device"},
    "accelerators.mps": {"MPSAccelerator": "ground.device"},
    "accelerators.xla": ENGINES["accelerators.xla"],
    "cli": FABRIC,
    "connector": FABRIC,
    "fabric": FABRIC,
    "loggers": {"Logger": "loggers.base", **_all("CSVLogger TensorBoardLogger", "loggers")},
    "loggers.csv_logs": {"CSVLogger": "loggers"},
    "loggers.logger": _all("Logger rank_zero_experiment", "loggers.base"),
    "loggers.tensorboard": {"TensorBoardLogger": "loggers"},
    "plugins": {**PLUGIN_PRECISION, **PLUGIN_IO, "ClusterEnvironment": "cluster.environments"},
    "plugins.collectives": INNER,
    "plugins.environments": MODULES["plugins.environments"],
    "plugins.environments.cluster_environment": {"ClusterEnvironment": "cluster.environments"},
    "plugins.environments.kubeflow": {"KubeflowEnvironment": "cluster.environments"},
    "plugins.environments.lightning": {
        "LightningEnvironment": "cluster.environments",
        "find_free_network_port": "launch.environment:free_port",
    },
    "plugins.environments.lsf": {"LSFEnvironment": "cluster.environments"},
    "plugins.environments.mpi": {"MPIEnvironment": "cluster.environments"},
    "plugins.environments.slurm": {"SLURMEnvironment": "cluster.environments"},
    "plugins.environments.torchelastic": {"TorchElasticEnvironment": "cluster.environments"},
    "plugins.environments.xla": ENGINES["accelerators.xla"],
    "plugins.io": PLUGIN_IO,
    "plugins.io.checkpoint_io": {"CheckpointIO": "checkpoint.io"},
    "plugins.io.torch_io": {"TorchCheckpointIO": "checkpoint.io"},
    "plugins.precision": PLUGIN_PRECISION,
    "strategies": FABRIC,
    "utilities": {
        **_all("LightningEnum disable_possible_user_warnings", "lightning"),
        "AttributeDict": "ground.hyperparameters",
        **_all("Throughput measure_flops", "ground.throughput"),
        "ThroughputMonitor": "callbacks",
        "is_shared_filesystem": INNER,
        "move_data_to_device": "ground.device",
        **_all("rank_zero_deprecation rank_zero_info rank_zero_only rank_zero_warn", "ground.rank"),
        "suggested_max_num_workers": "data.workers",
    },
    "utilities.apply_func": {"move_data_to_device": "ground.device"},
    "utilities.cloud_io": _all("_load get_filesystem", "lightning"),
    "utilities.consolidate_checkpoint": FABRIC,
    "utilities.data": {"AttributeDict": "ground.hyperparameters", "suggested_max_num_workers": "data.workers"},
    "utilities.device_dtype_mixin": INNER,
    "utilities.device_parser": INNER,
    "utilities.distributed": INNER,
    "utilities.enums": {"LightningEnum": "lightning"},
    "utilities.exceptions": {"MisconfigurationException": "ground.errors"},
    "utilities.imports": INNER,
    "utilities.init": INNER,
    "utilities.load": INNER,
    "utilities.logger": LOGGING,
    "utilities.optimizer": INNER,
    "utilities.rank_zero": {
        **_all("rank_prefixed_message rank_zero_debug rank_zero_deprecation", "ground.rank"),
        **_all("rank_zero_info rank_zero_only rank_zero_warn", "ground.rank"),
        **_all("WarningCache _get_rank", "lightning"),
    },
    "utilities.registry": INNER,
    "utilities.seed": {"seed_everything": "ground.seed"},
    "utilities.spike": {"SpikeDetection": "callbacks", "TrainingSpikeException": "callbacks"},
    "utilities.throughput": {
        **_all("Throughput get_available_flops measure_flops", "ground.throughput"),
        "ThroughputMonitor": "callbacks",
    },
    "utilities.types": {
        **_all("_DEVICE _MAP_LOCATION_TYPE _PATH", "lightning"),
        **_all("LRScheduler ReduceLROnPlateau", "torch.optim.lr_scheduler"),
    },
    "utilities.warnings": {"disable_possible_user_warnings": "lightning", "PossibleUserWarning": INNER},
    "wrappers": FABRIC,
}
"""Modules of ``lightning.fabric`` and ``lightning_fabric``, as in `lockstep.aliases.MODULES`."""

BESIDES: dict[str, Rows] = {
    "": {"disable_possible_user_warnings": "lightning"},
    "utilities": _all("GradClipAlgorithmType LightningEnum disable_possible_user_warnings", "lightning")
    | {name: f"lightning:{name}" for name in ("FLOAT16_EPSILON", "FLOAT32_EPSILON", "FLOAT64_EPSILON")},
    "utilities.enums": {"GradClipAlgorithmType": "lightning", "LightningEnum": "lightning"},
    "utilities.parsing": {"get_init_args": "lightning"},
    "utilities.rank_zero": _all("WarningCache _get_rank", "lightning"),
}
"""Names of ``lightning.pytorch`` that third parties read, by module; here, since a script of one's own needs none."""

TEST_TUBES: dict[str, Rows] = {
    "": {
        "HyperOptArgumentParser": "hpc.parser",
        "SlurmCluster": "hpc.cluster",
        **_all("AbstractCluster Experiment", EXPERIMENT),
    },
    "argparse_hopt": {"HyperOptArgumentParser": "hpc.parser", "TTNamespace": "hpc.parser:Hyperparameters"},
    "hpc": {"SlurmCluster": "hpc.cluster", "HyperOptArgumentParser": "hpc.parser", "AbstractCluster": EXPERIMENT},
    "log": {"Experiment": EXPERIMENT},
}
"""Modules of ``test_tube``."""

_PATH = str | os.PathLike[str]
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = Any
FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON = (
    torch.finfo(kind).eps for kind in (torch.float16, torch.float32, torch.float64)
)


class LightningEnum(str, Enum):
    """A word that is equal to its text."""


class GradClipAlgorithmType(LightningEnum):
    """How gradients are clipped."""

    VALUE = "value"
    NORM = "norm"


class WarningCache(set[str]):
    """Messages that were given already: each is given once."""

    def warn(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Warn on rank 0."""
        self._once(message, functools.partial(rank_zero_warn, stacklevel=stacklevel, **kwargs))

    def deprecation(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Warn on rank 0 of what goes out of use."""
        self._once(message, functools.partial(rank_zero_deprecation, stacklevel=stacklevel, **kwargs))

    def info(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Say so on rank 0."""
        self._once(message, functools.partial(rank_zero_info, **kwargs))

    def _once(self, message: str, give: Callable[[str], object]) -> None:
        if message not in self:
            self.add(message)
            give(message)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """The arguments of the ``__init__`` that runs in a frame, by name; empty where none runs there."""
    first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
    return arguments_of_init(frame.f_locals.get(first), frame) or {}


def disable_possible_user_warnings(module: str = "") -> None:
    """Nothing is left to do: lockstep gives none of these warnings."""


def get_filesystem(path: _PATH, **kwargs: Any) -> Any:
    """The file system of a path, by fsspec."""
    return import_module("fsspec.core").url_to_fs(str(path), **kwargs)[0]


def _load(path_or_url: _PATH | IO[bytes], map_location: Any = None, weights_only: bool | None = None) -> Any:
    """`torch.load`, of a path or an open file."""
    return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)


def _get_rank() -> int:
    """The global rank of this process."""
    return rank_zero_only.rank


# -- the modules --------------------------------------------------------------------------------------------


CLASS = re.compile(r"_*[A-Z]\w*[a-z]\w*")
"""How the name of a class is spelt."""


def fill(module: ModuleType, home: ModuleType | None, rows: Rows | Refused) -> None:
    """Have a module by one of Lightning's names answer for them. It stays a plain module, which travels by its name.

    Args:
        module: new.
        home: lockstep's module with the same names; None where there is none.
        rows: names that are not there, or are refused; a reason: all are.
    """
    names = vars(module)

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        row = rows if isinstance(rows, Refused) else rows.get(name)
        if _find(f"{module.__name__}.{name}") is not None:
            return import_module(f"{module.__name__}.{name}")
        if isinstance(row, Refused):
            if not CLASS.fullmatch(name):
                raise AttributeError(_refusal(module.__name__, name, row))
            value = refused_class(name, row)
        elif row is not None:
            value = resolve(row, name)
        elif hasattr(home, name):
            value = getattr(home, name)
        else:
            raise AttributeError(_refusal(module.__name__, name, None))
        names[name] = value
        return value

    def __dir__() -> list[str]:
        listed = () if isinstance(rows, Refused) else rows
        return sorted({*names, *listed, *(() if home is None else dir(home))})

    names["__getattr__"], names["__dir__"] = __getattr__, __dir__
    known = () if isinstance(rows, Refused) else (name for name, row in rows.items() if not isinstance(row, Refused))
    names["__all__"] = sorted(name for name in {*getattr(home, "__all__", ()), *known} if not name.startswith("_"))


def _refusal(module: str, name: str, reason: str | None) -> str:
    """Who asks for a name that is not there, and what to do."""
    return f"{module}.{name}, which {asked_by()} asks for: {reason or UNKNOWN}"


UNKNOWN = (
    "lockstep has nothing by this name. Do without it there, or run the script with Lightning itself, without "
    "--lightning."
)


# -- the finder ---------------------------------------------------------------------------------------------


class LightningFinder(MetaPathFinder):
    """Finds Lightning's modules and packages.

    Args:
        version: of Lightning, that it stands for.
    """

    lightnings = True

    def __init__(self, version: str) -> None:
        self.version = version

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of Lightning's; None for any other.

        Raises:
            ModuleNotFoundError: there is nothing by this name; says who asks for it.
        """
        if fullname.partition(".")[0] not in (*ROOTS, TEST_TUBE):
            return None
        found = _find(fullname)
        if found is None:
            module, _, name = fullname.rpartition(".")
            _, rows = _find(module) or (None, {})
            row = rows if isinstance(rows, Refused) else rows.get(name)
            # without its name: `from lightning import x` would drop an error that says which module is missing
            raise ModuleNotFoundError(_refusal(module, name, row if isinstance(row, Refused) else None))
        return ModuleSpec(fullname, _NamesLoader(*found, self.version), is_package=True)

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        """What ``importlib.metadata`` is told of Lightning's packages, where it asks for one of them by name."""
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("-", "_") not in ROOTS:
            return ()
        return (_distribution(name.replace("_", "-"), self.version),)


def _find(fullname: str) -> tuple[str | None, Rows | Refused] | None:
    """Lockstep's module with the names of one of Lightning's, and its rows; None where the tables do not have it."""
    root, _, path = fullname.partition(".")
    if root == "lightning":
        root, _, path = path.partition(".")
        if not root:
            return "lockstep", {"Fabric": FABRIC}
    if root in ("pytorch", "pytorch_lightning"):
        found = MODULES.get(path)
        if path and found is None:
            return None
        home = None if isinstance(found, Refused) else f"lockstep.{path}".rstrip(".")
        besides: Rows = {"Fabric": FABRIC, **BESIDES[""]} if not path else BESIDES.get(path, {})
        if isinstance(found, Refused):
            return (None, {**besides}) if besides else (None, found)
        return home, {**(found or {}), **besides}
    if root == TEST_TUBE and path in TEST_TUBES:
        return None, TEST_TUBES[path]
    if root in ("fabric", "lightning_fabric") and path in FABRICS:
        return None, FABRICS[path]
    return None


def _distribution(name: str, version: str) -> Distribution:
    from importlib.metadata import Distribution

    class Lightnings(Distribution):
        def read_text(self, filename: str) -> str | None:
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            return text if filename in ("METADATA", "PKG-INFO") else None

        def locate_file(self, path: Any) -> Path:
            return Path(__file__).parent / path

    return Lightnings()


class _NamesLoader(Loader):
    def __init__(self, home: str | None, rows: Rows | Refused, version: str) -> None:
        self._home, self._rows, self._version = home, rows, version

    def exec_module(self, module: ModuleType) -> None:
        fill(module, None if self._home is None else import_module(self._home), self._rows)
        module.__doc__ = f"lockstep's names, by those of {module.__name__}."
        if module.__name__ in (*ROOTS, "lightning.pytorch", "lightning.fabric"):
            vars(module)["__version__"] = self._version


# -- the switch ---------------------------------------------------------------------------------------------


COMMAND = "lockstep run --lightning"


def enter() -> None:
    """Have Lightning's names answered by lockstep, in this process and in those that it starts.

    Raises:
        MisconfigurationException: Lightning itself is imported already.
    """
    if LIGHTNING.is_installed:
        return
    strangers = [name for name in ROOTS if name in sys.modules]
    if strangers:
        raise MisconfigurationException(
            f"lockstep.lightning: `{strangers[0]}` is imported already (from "
            f"{getattr(sys.modules[strangers[0]], '__file__', 'somewhere')}), and its classes cannot be exchanged any "
            f"more: switch before its first import, by `{COMMAND} script.py`, or in the first cell of a new kernel by "
            "`%load_ext lockstep.lightning`"
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        warnings.warn(
            "lockstep.lightning: Python was started with -E, -I or -S, so that processes that are started from here "
            "do not have Lightning's names: leave the option out",
            stacklevel=2,
        )
    LIGHTNING.install(_put)


class _Quiet(logging.Filter):
    """Leaves out messages of lockstep's below the level that a script has given Lightning's logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        return all(record.levelno >= logging.getLogger(name).level for name in LIGHTNINGS)


def leave() -> None:
    """Undo `enter`; who has imported names keeps them."""
    LIGHTNING.remove()


def _put() -> Callable[[], None]:
    version, take_back = hand_down_names()
    finder = LightningFinder(version)
    sys.meta_path.insert(0, finder)
    quiet = _Quiet()
    log.addFilter(quiet)

    def undo() -> None:
        sys.meta_path.remove(finder)
        log.removeFilter(quiet)
        for name in [name for name in sys.modules if name.partition(".")[0] in (*ROOTS, TEST_TUBE)]:
            del sys.modules[name]
        take_back()

    return undo


def load_ipython_extension(shell: object) -> None:
    """``%load_ext lockstep.lightning``."""
    enter()


def unload_ipython_extension(shell: object) -> None:
    """``%unload_ext lockstep.lightning``."""
    leave()


# -- the command --------------------------------------------------------------------------------------------


USAGE = """\
usage: python -m lockstep.lightning script.py [arguments]
       python -m lockstep.lightning -m module [arguments]

Runs a script written for Lightning, unchanged: lightning and pytorch_lightning are lockstep there. Several ranks are
started by the script's own strategy="ddp", by torchrun in front of -m lockstep.lightning, or by
lockstep run --lightning script.py."""


def main(words: Sequence[str]) -> None:
    """Run a script or a module as ``__main__``, with Lightning's names.

    Args:
        words: the command, behind ``python -m lockstep.lightning``.
    """
    is_module = list(words[:1]) == ["-m"]
    words = list(words[is_module:])
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    if not is_module and not os.path.exists(words[0]):
        sys.exit(f"lockstep.lightning: {words[0]} is not there (this is {os.getcwd()})")
    try:
        enter()
    except MisconfigurationException as error:
        sys.exit(str(error))
    sys.argv[:] = words
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if name not in ("__name__", "__builtins__")]:
        del names[name]  # what is left there is the script's own
    as_main: Callable[..., object] = vars(runpy)["_run_module_as_main"]  # what `python -m` does
    if is_module:
        as_main(words[0])
        return
    folder = words[0] if os.path.isdir(words[0]) else os.path.dirname(os.path.realpath(words[0]))
    if not getattr(sys.flags, "safe_path", False) or folder == words[0]:
        sys.path[0] = folder
    if os.path.isdir(words[0]):
        as_main("__main__", alter_argv=False)
        return
    path = os.path.abspath(words[0])
    loader = SourceFileLoader("__main__", path)
    names.update(__file__=path, __loader__=loader, __spec__=None, __package__=None, __doc__=None, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), names)


if __name__ == "__main__":
    import_module("lockstep.lightning").main(sys.argv[1:])  # by its name, for `__main__` becomes the script's
