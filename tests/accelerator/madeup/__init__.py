"""A made-up accelerator: plain tensors on ``madeup:0``, ``madeup:1`` and so on, with queues as CUDA's.

Their memory is the host's and their operators are the CPU's; what a program sees is a device. Tensors of two devices do
not mix. Each device number has random numbers of its own, and a memory that is counted and has a limit. Operators are
queued behind what is queued, on streams that know nothing of each other; the host waits in ``.item()``, ``.cpu()``,
blocking copies and ``synchronize``, which are counted. The process group's collectives return when they are queued.

`register` brings it into a process, once; the folder ``autoload`` beside this package, in ``PYTHONPATH``, into each
process that imports torch, as an out-of-tree device's package does. It needs a torch that takes a device written in
Python (2.10 and newer): see `missing`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.accelerator.madeup.settings import BACKEND, NAME, VARIABLE, having, settings

__all__ = ["AUTOLOAD", "BACKEND", "NAME", "VARIABLE", "having", "missing", "register", "registered", "settings"]

AUTOLOAD = str(Path(__file__).parents[1] / "autoload")
"""The folder for ``PYTHONPATH``."""

_registered = False


def missing() -> str:
    """What this torch lacks for the device, or nothing."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} takes no device written in Python (2.10 and newer do)"
    return ""


def registered() -> bool:
    """Whether this process has the device."""
    return _registered


def register() -> None:
    """Bring the device into this process; harmless when repeated."""
    global _registered
    if _registered:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from tests.accelerator.madeup import casts, group, kernels, own, patches
    from tests.accelerator.madeup.module import module

    _setup_privateuseone_for_python_backend(NAME, backend_module=module, device_guard=patches.Guard())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(kernels.kernel, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    _libraries.extend((fallback, library))
    for name in kernels.OVERRIDABLE:  # they have kernels for every device, which refuse
        library.impl(name, own.overridable(name), "PrivateUse1")
    kinds = {
        "empty.memory_format": own.empty,
        "empty_strided": own.empty_strided,
        "resize_": own.resize_,
        "_copy_from": own.copy_from,
        "_copy_from_and_resize": own.copy_from,
        "_to_copy": own.to_copy,
        "native_dropout": own.native_dropout,
    }
    for name, function in kinds.items():
        library.impl(name, function, "PrivateUse1")
    library.impl("_pin_memory", own.pin_memory, "CPU")
    for key in ("Conjugate", "Negative"):  # as for `copy_`: else the fallback copies for the copy, without end
        for name in ("_copy_from", "_copy_from_and_resize"):
            library.impl(name, torch.library.fallthrough_kernel, key)
    for name in kernels.WHOLE:
        library.impl(name, own.whole(name), "PrivateUse1")
    for name, function in casts.casts().items():
        library.impl(name, function, "AutocastPrivateUse1")
    patches.apply()
    group.register()
    _registered = True


_libraries: list[torch.library.Library] = []
