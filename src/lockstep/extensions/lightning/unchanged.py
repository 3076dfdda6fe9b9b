"""Lightning's import names, resolved to lockstep, so that a script that imports ``lightning`` runs unchanged.

::

    lockstep run --lightning train.py --devices 2
    python -m lockstep.lightning train.py            # also: -m package.train
    %load_ext lockstep.lightning                     # the first cell of a notebook

From then on, in this process and in every Python process that it starts, ``lightning``, ``pytorch_lightning``,
``lightning.fabric``, ``lightning_fabric`` and ``test_tube`` are resolved by `lockstep.names.finder`, which also
explains names that lockstep refuses. This file adds names that only third-party packages read.

The classes are lockstep's own. Pickles do not depend on the import names, and pickles of Lightning's classes load.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import FrameType
from typing import IO, Any

import torch

from lockstep.ground.accelerators import resolve_accelerator
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import arguments_of_init
from lockstep.ground.installed import LIGHTNING
from lockstep.ground.rank import LIGHTNINGS, log, rank_zero_deprecation, rank_zero_info, rank_zero_only, rank_zero_warn
from lockstep.launch.environment import hand_down_names
from lockstep.names.finder import FINDER, TEST_TUBE, put_first
from lockstep.names.finder import LIGHTNINGS as ROOTS

# -- names that third parties read -----------------------------------------------------------------------------


_PATH = str | os.PathLike[str]
_DEVICE = torch.device | str | int
_MAP_LOCATION_TYPE = Any
FLOAT16_EPSILON, FLOAT32_EPSILON, FLOAT64_EPSILON = (
    torch.finfo(kind).eps for kind in (torch.float16, torch.float32, torch.float64)
)


class LightningEnum(str, Enum):
    """Enum of strings, in which each member equals its string."""


class GradClipAlgorithmType(LightningEnum):
    """Methods of gradient clipping."""

    VALUE = "value"
    NORM = "norm"


class WarningCache(set[str]):
    """Set of issued messages, which issues each message only once."""

    def warn(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Issue a warning on rank 0, unless the message has been issued before."""
        self._once(message, functools.partial(rank_zero_warn, stacklevel=stacklevel, **kwargs))

    def deprecation(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Issue a deprecation warning on rank 0, unless the message has been issued before."""
        self._once(message, functools.partial(rank_zero_deprecation, stacklevel=stacklevel, **kwargs))

    def info(self, message: str, stacklevel: int = 5, **kwargs: Any) -> None:
        """Log a message on rank 0, unless the message has been issued before."""
        self._once(message, functools.partial(rank_zero_info, **kwargs))

    def _once(self, message: str, issue: Callable[[str], object]) -> None:
        if message not in self:
            self.add(message)
            issue(message)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` that runs in a frame, by name; an empty dict for other frames."""
    first = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
    return arguments_of_init(frame.f_locals.get(first), frame) or {}


def disable_possible_user_warnings(module: str = "") -> None:
    """Do nothing, because lockstep does not issue the warnings that Lightning would disable."""


def cli_lightning_logo() -> None:
    """Do nothing; Lightning's function of this name prints its logo."""


_TORCHVISION_AVAILABLE = importlib.util.find_spec("torchvision") is not None
_PRECISION_INPUT = Any
_EVALUATE_OUTPUT = list[Mapping[str, float]]
_PREDICT_OUTPUT = list[Any] | list[list[Any]]


class _AcceleratorConnector:
    """Record of the accelerator and the devices that the flags of a Trainer select.

    Args:
        accelerator, devices: flags of a Trainer.
        others: other flags of a Trainer, which are ignored.
    """

    def __init__(self, accelerator: Any = "auto", devices: Any = "auto", **others: object) -> None:
        self._accelerator_flag, found = resolve_accelerator(accelerator, devices)
        self._devices_flag = len(found) if self._accelerator_flag == "cpu" else [device.index for device in found]


def _load_from_checkpoint(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Call lockstep's ``load_from_checkpoint`` for a class that defines a ``load_from_checkpoint`` of its own."""
    method = vars(import_module("lockstep.module").LightningModule)["load_from_checkpoint"]
    return method.__get__(None, cls)(*args, **kwargs)


class _Registry:
    """Registry that ignores registrations by packages at import; lockstep's Trainer accepts instances, not names."""

    @staticmethod
    def register(*args: object, **kwargs: object) -> None:
        """Do nothing: registrations are ignored."""


AcceleratorRegistry = StrategyRegistry = _Registry()


def get_filesystem(path: _PATH, **kwargs: Any) -> Any:
    """Return the fsspec file system of a path."""
    return import_module("fsspec.core").url_to_fs(str(path), **kwargs)[0]


def _load(path_or_url: _PATH | IO[bytes], map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Call `torch.load` with a path or an open file."""
    return torch.load(path_or_url, map_location=map_location, weights_only=weights_only)


def _get_rank() -> int:
    """Return the global rank of this process."""
    return rank_zero_only.rank


# -- the switch ---------------------------------------------------------------------------------------------


def enter() -> None:
    """Resolve Lightning's import names to lockstep, in this process and in processes that it starts.

    Raises:
        MisconfigurationException: Lightning itself was imported before.
    """
    if LIGHTNING.is_installed:
        return
    strangers = [name for name in ROOTS if name in sys.modules]
    if strangers:
        raise MisconfigurationException(
            f"lockstep.lightning: `{strangers[0]}` is imported already (from "
            f"{getattr(sys.modules[strangers[0]], '__file__', 'an unknown place')}), so its classes cannot be "
            f"replaced. Switch before its first import, with `lockstep run --lightning script.py`, or with "
            "`%load_ext lockstep.lightning` in the first cell of a new kernel"
        )
    if sys.flags.ignore_environment or sys.flags.no_site:
        warnings.warn(
            "lockstep.lightning: Python was started with -E, -I or -S, so processes started from here cannot import "
            "Lightning's names. Remove the option",
            stacklevel=2,
        )
    LIGHTNING.install(_install_names)


class _Quiet(logging.Filter):
    """Filter that drops lockstep's messages below the level that a script has set for Lightning's logger."""

    def filter(self, record: logging.LogRecord) -> bool:
        return all(record.levelno >= logging.getLogger(name).level for name in LIGHTNINGS)


def leave() -> None:
    """Undo `enter`. Names that have been imported already remain usable."""
    LIGHTNING.remove()


def _install_names() -> Callable[[], None]:
    FINDER.version, take_back = hand_down_names()
    put_first()
    quiet = _Quiet()
    log.addFilter(quiet)

    def undo() -> None:
        FINDER.version = None
        log.removeFilter(quiet)
        for name in [name for name in sys.modules if name.partition(".")[0] in (*ROOTS, TEST_TUBE)]:
            del sys.modules[name]
        take_back()

    return undo


def load_ipython_extension(shell: object) -> None:
    """Run `enter`; IPython calls this function for ``%load_ext lockstep.lightning``."""
    enter()


def unload_ipython_extension(shell: object) -> None:
    """Run `leave`; IPython calls this function for ``%unload_ext lockstep.lightning``."""
    leave()


# -- the command --------------------------------------------------------------------------------------------


USAGE = """\
usage: python -m lockstep.lightning script.py [arguments]
       python -m lockstep.lightning -m module [arguments]

Runs a script written for Lightning, unchanged: its lightning and pytorch_lightning are lockstep. Several ranks are
started by strategy="ddp" in the script, by torchrun -m lockstep.lightning, or by lockstep run --lightning script.py."""


def main(words: Sequence[str]) -> None:
    """Run a script or a module as ``__main__``, with Lightning's import names resolved to lockstep.

    Args:
        words: arguments after ``python -m lockstep.lightning``.
    """
    is_module = list(words[:1]) == ["-m"]
    words = list(words[is_module:])
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        sys.exit(0 if words else 2)
    if not is_module and not os.path.exists(words[0]):
        sys.exit(f"lockstep.lightning: {words[0]} does not exist (in {os.getcwd()})")
    try:
        enter()
    except MisconfigurationException as error:
        sys.exit(str(error))
    sys.argv[:] = words
    # The script must find `__main__` empty, as under `python script.py`.
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if name not in ("__name__", "__builtins__")]:
        del names[name]
    as_main: Callable[..., object] = vars(runpy)["_run_module_as_main"]  # the function of `python -m`
    if is_module:
        as_main(words[0])
    else:
        _run_script(words[0], names, as_main)


def _run_script(script: str, names: dict[str, Any], as_main: Callable[..., object]) -> None:
    """Run a file, or a folder that contains a ``__main__.py``, in the module ``__main__``, as Python does."""
    folder = script if os.path.isdir(script) else os.path.dirname(os.path.realpath(script))
    if not getattr(sys.flags, "safe_path", False) or folder == script:
        sys.path[0] = folder
    if os.path.isdir(script):
        as_main("__main__", alter_argv=False)
        return
    path = os.path.abspath(script)
    loader = SourceFileLoader("__main__", path)
    names.update(__file__=path, __loader__=loader, __spec__=None, __package__=None, __doc__=None, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), names)


if __name__ == "__main__":
    import_module("lockstep.lightning").main(sys.argv[1:])  # imported, because the script takes over `__main__`
