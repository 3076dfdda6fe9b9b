"""Import of the package `deepspeed` for this run's device and process group, without building its kernels."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.installed import Installation
from lockstep.ground.rank import log

DEEPSPEED_BUILDS = Installation(
    "DeepSpeed's OpBuilder.jit_load",
    ("extensions/deepspeed/package.py",),
    "logs builds, and keeps them from waiting for one that was killed",
    stays=False,
)
DEEPSPEED_WARNINGS = Installation(
    "warnings.filters",
    ("extensions/deepspeed/package.py",),
    "hides torch's warnings on old names of functions at each of DeepSpeed's collectives",
    stays=False,
)

OLDEST = (0, 19, 8)
"""The oldest version of DeepSpeed whose gradients were compared with those of one process."""

SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's all-reduce within a host. It is compiled at the first start unless it is switched off."""


def is_installed() -> bool:
    """Return True if the package is installed, without importing it."""
    return importlib.util.find_spec("deepspeed") is not None


def check_installed(what: str) -> None:
    """Raise an error if DeepSpeed is missing or too old.

    Args:
        what: the class or option that needs it, for the error.

    Raises:
        MissingExtra: DeepSpeed is not installed.
        MisconfigurationException: the installed version is older than `OLDEST`.
    """
    if not is_installed():
        raise missing_extra("deepspeed", "deepspeed", what)
    version = importlib.metadata.version("deepspeed")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MisconfigurationException(
            f"{what} needs deepspeed {oldest} or newer, but {version} is installed. lockstep does not test the "
            'gradients of older versions. Run `pip install "torch-lockstep[deepspeed]"`.'
        )


def import_quietly() -> None:
    """Import DeepSpeed without its log lines and its optional dependencies."""
    # its autotuner imports mlflow, if it is installed; that takes half of the time
    with _quiet(), _without("mlflow"):
        importlib.import_module("deepspeed")
    with _delay_compile():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


@contextmanager
def import_for(device: torch.device, level: int) -> Iterator[None]:
    """Import DeepSpeed for the type of ``device``, and connect it to the current process group.

    Nothing is compiled: DeepSpeed's shared-memory all-reduce, which needs a compiler, is disabled. Extensions that the
    user needs (for example ``DeepSpeedCPUAdam``) are built on first use, with a log line.

    Args:
        device: this rank's device.
        level: level of DeepSpeed's log on rank 0; other ranks log errors only.
    """
    import_quietly()
    with _quiet():
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.utils import logger

        if get_accelerator().device_name() != device.type:
            # it chooses CUDA if there is a GPU, also for a run on CPUs
            if device.type == "cpu":
                from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator as Accelerator
            else:
                from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator as Accelerator
            set_accelerator(Accelerator())
    before = logger.level
    logger.setLevel(level if dist.get_rank() == 0 else max(level, logging.ERROR))
    _drop_dead_groups()
    with _quiet(), _without_shared_memory():
        deepspeed.init_distributed(comm.backend_of(None, device.type), auto_mpi_discovery=False, verbose=False)
    try:
        with _log_builds(), hide_rename_warnings():
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _without(name: str) -> Iterator[None]:
    """In the context, make imports of a package fail, unless the package is imported already."""
    if name in sys.modules:
        yield
        return
    # Python raises ModuleNotFoundError for an entry that is None
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop(name, None)


@contextmanager
def _delay_compile() -> Iterator[None]:
    """In the context, delay ``torch.compile`` of a decorated function to the function's first call.

    DeepSpeed always imports its optimizer Muon, which has decorated functions, and torch's compiler takes seconds to
    import.
    """
    own = torch.compile

    def later(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(later, **options)
        made: list[Any] = []

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not made:
                made.append(own(function, **options))
            return made[0](*args, **kwargs)

        return call

    torch.compile = later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = own


@contextmanager
def _without_shared_memory() -> Iterator[None]:
    """In the context, mark DeepSpeed's shared-memory all-reduce as incompatible, so that it is not built.

    This also avoids DeepSpeed's slow check of all extensions.
    """
    from deepspeed import ops

    names = vars(ops)
    known = names.get("__compatible_ops__")
    names["__compatible_ops__"] = {**(known or {}), SHARED_MEMORY: False}
    try:
        yield
    finally:
        if known is None:
            del names["__compatible_ops__"]
        else:
            names["__compatible_ops__"] = known


@contextmanager
def hide_rename_warnings() -> Iterator[None]:
    """In the context, hide torch's deprecation warnings for collectives that DeepSpeed calls by old names."""
    with DEEPSPEED_WARNINGS.inside():
        before = list(warnings.filters)
        message = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
        added = warnings.filters[0]
        try:
            yield
        finally:
            # an outer use of this context still needs the filter
            if added in warnings.filters and added not in before:
                warnings.filters.remove(added)  # type: ignore[attr-defined]


def zero_keys() -> list[str]:
    """Return the keys that the installed version of DeepSpeed accepts in the config's "zero_optimization"."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields
    return sorted({name for key, field in fields.items() for name in (key, field.alias) if name})


def uses_checkpointing(module: torch.nn.Module) -> bool:
    """Return True if the code of any layer's ``forward`` refers to ``deepspeed.checkpointing``."""
    import deepspeed

    # by the names in its code: a run to find out would need a batch
    own = (deepspeed.checkpointing, deepspeed.checkpointing.checkpoint)
    for layer in module.modules():
        forward = type(layer).forward
        code = getattr(forward, "__code__", None)
        if code is None:
            continue
        if {"deepspeed", "checkpointing"} <= set(code.co_names):
            return True
        known = forward.__globals__
        if any(known.get(name) is each for name in code.co_names for each in own):
            return True
    return False


def configure_checkpointing(block: Mapping[str, Any]) -> None:
    """Configure ``deepspeed.checkpointing`` from the config's "activation_checkpointing".

    Activations are not partitioned, which would need model parallelism.
    """
    import deepspeed

    deepspeed.checkpointing.configure(
        None,
        partition_activations=False,
        checkpoint_in_cpu=bool(block.get("cpu_checkpointing")),
        synchronize=bool(block.get("synchronize_checkpoint_boundary")),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """In the context, log errors only, since importing DeepSpeed logs its device and other details."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


_known_group: object = None


def _drop_dead_groups() -> None:
    """Drop process groups that DeepSpeed created in a default group that has been destroyed."""
    global _known_group
    here = dist.group.WORLD
    if here is _known_group:
        return
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name in ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_ALL_TO_ALL_GROUP", "_DATA_PARALLEL_GROUP"):
        if isinstance(getattr(groups, name, None), dict):
            setattr(groups, name, {})
        elif hasattr(groups, name):
            setattr(groups, name, None)
    _known_group = here


# -- builds of extensions -------------------------------------------------------------------------------------


@contextmanager
def _log_builds() -> Iterator[None]:
    """In the context, log builds of DeepSpeed's extensions, and remove locks of builds that were killed."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    own = OpBuilder.jit_load

    def jit_load(self: Any, verbose: bool = True) -> Any:
        folder = build_folder(self.name)
        if folder is not None:
            remove_stale_lock(folder)
            if not any(folder.glob("*.so")):
                check_compiler(self.name)
                log.info(f"DeepSpeed builds its extension {self.name!r}. This takes about half a minute, once.")
        return own(self, verbose)

    with DEEPSPEED_BUILDS.inside():
        OpBuilder.jit_load = jit_load
        try:
            yield
        finally:
            OpBuilder.jit_load = own


def check_compiler(name: str) -> None:
    """Raise an error if an extension cannot be built.

    Raises:
        MisconfigurationException: torch finds no C++ compiler.
    """
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise MisconfigurationException(
            f"DeepSpeed must build its extension {name!r}, but found no C++ compiler ({compiler!r}). Install one "
            "(g++), or use torch.optim.AdamW instead of DeepSpeed's own optimizers."
        )


def can_use_disks() -> bool:
    """Return True if DeepSpeed can offload to a disk. Its extension for disks needs libaio and libaio's headers."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with _quiet():
        return bool(AsyncIOBuilder().is_compatible(verbose=False))


def build_folder(name: str) -> Path | None:
    """Return the folder in which torch builds an extension, or None if this release of torch cannot report it."""
    from torch.utils import cpp_extension

    # private in torch, so it may be missing
    find: Callable[[str, bool], str] | None = getattr(cpp_extension, "_get_build_directory", None)
    return None if find is None else Path(find(name, False))


def remove_stale_lock(folder: Path) -> bool:
    """Remove the lock of a build that was killed, since later builds would wait for the lock forever.

    A running build has its lock file open, so a lock that no process has open is stale. This is only checked on
    Linux, by ``/proc``.

    Returns:
        True if a lock was removed.
    """
    lock = folder / "lock"
    processes = Path("/proc")
    if not lock.exists() or not processes.is_dir() or sys.platform != "linux":
        return False
    target = lock.resolve()
    for descriptor in processes.glob("[0-9]*/fd/*"):
        try:
            if Path(os.readlink(descriptor)) == target:
                return False
        except OSError:  # another user's process, or one that has ended
            continue
    lock.unlink(missing_ok=True)
    log.info(f"A build of a DeepSpeed extension was killed earlier. Its lock {str(lock)!r} is removed.")
    return True
