"""Memory that is in use and that is free.

Of a device: what tensors hold of it, what torch's allocator keeps, and whether it is used up. Of this process: how much
more it may use, of the host, within its limits, and of an accelerator.
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import torch

from lockstep.ground.device import accelerator_kinds, device_module, devices_of
from lockstep.ground.errors import words_of

_SAYINGS = (
    "DefaultCPUAllocator",  # the host's memory
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers where its workspace does not fit
)
"""What errors say that come as plain RuntimeErrors where memory is used up."""


def memory_stats(device: torch.device) -> dict[str, int]:
    """What torch's allocator says of a device's memory, by the names of ``torch.cuda.memory_stats``; empty where it
    says nothing."""
    if device.type == "cpu":
        return {}
    module = device_module(device)
    if hasattr(module, "memory_stats"):
        return dict(module.memory_stats(device))
    if hasattr(module, "driver_allocated_memory"):  # torch.mps
        return {
            "allocated_bytes.all.current": module.current_allocated_memory(),
            "reserved_bytes.all.current": module.driver_allocated_memory(),
        }
    return {}


def _bytes(device: torch.device, name: str, key: str) -> int | None:
    """One of the figures, by the module's function of this name, or of its statistics; None where nobody tells."""
    ask = None if device.type == "cpu" else getattr(device_module(device), name, None)
    return memory_stats(device).get(key) if ask is None else int(ask(device))


def memory_held(device: torch.device) -> int | None:
    """Bytes of a device that tensors of this process hold; None where nobody tells."""
    return _bytes(device, "memory_allocated", "allocated_bytes.all.current")


def memory_peak(device: torch.device) -> int | None:
    """The most bytes that they have held since `forget_memory_peak`; None where nobody tells."""
    return _bytes(device, "max_memory_allocated", "allocated_bytes.all.peak")


def forget_memory_peak(device: torch.device) -> None:
    """Let the peak begin with what is held now."""
    forget = None if device.type == "cpu" else getattr(device_module(device), "reset_peak_memory_stats", None)
    if forget is not None:
        forget(device)


def memory_cached(device: torch.device) -> int:
    """Bytes that torch's allocator has taken from a device and no tensor holds."""
    return max(0, (_bytes(device, "memory_reserved", "reserved_bytes.all.current") or 0) - (memory_held(device) or 0))


def empty_cache(device: torch.device) -> None:
    """Give back what torch's allocator has taken from devices of this kind and no tensor holds."""
    give = None if device.type == "cpu" else getattr(device_module(device), "empty_cache", None)
    if give is not None:
        give()


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Bytes of an accelerator's memory that no process has taken, and all of them; None where nobody tells."""
    if device.type == "cpu":
        return None
    module = device_module(device)
    if hasattr(module, "recommended_max_memory"):  # torch.mps: its memory is the host's
        most = int(module.recommended_max_memory())
        return max(0, most - int(module.driver_allocated_memory())), most
    if not hasattr(module, "mem_get_info"):
        return None
    free, total = module.mem_get_info(device)
    return int(free), int(total)


def total_memory(device: torch.device) -> int | None:
    """All bytes of an accelerator's memory; None where nobody tells."""
    ask = None if device.type == "cpu" else getattr(device_module(device), "get_device_properties", None)
    total = None if ask is None else getattr(ask(device), "total_memory", None)
    known = memory_info(device) if total is None else None
    return known[1] if known is not None else total


def is_oom_error(exception: BaseException) -> bool:
    """Whether an exception says that a device's memory, or the host's, is used up."""
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(saying in words_of(exception) for saying in _SAYINGS)
    )


def garbage_collection_cuda() -> None:
    """Collect Python's garbage and give the cached memory of accelerators back to them."""
    gc.collect()
    for kind in accelerator_kinds():
        for device in devices_of(kind, started=True)[:1]:
            empty_cache(device)


_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, ranks: int = 1) -> int | None:
    """Bytes that are free for this process on a device; None where nobody tells.

    Args:
        device: an accelerator, or the CPU.
        ranks: processes of this host that share the CPU's.
    """
    if device.type != "cpu":
        known = memory_info(device)
        return None if known is None else known[0] + memory_cached(device)
    found = [free for free in (_of_host(ranks), *_within_limits(), _of_container(ranks)) if free is not None]
    return max(0, min(found)) if found else None


def host_memory() -> int | None:
    """Bytes of the host, in use or not; None where nobody tells."""
    return _kilobytes("/proc/meminfo", "MemTotal")


def _of_host(ranks: int) -> int | None:
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    return None if free is None else free // ranks


def _within_limits() -> list[int]:
    found = []
    for limit, name in _LIMITS:
        most, used = resource.getrlimit(limit)[0], _kilobytes("/proc/self/status", name)
        if most != resource.RLIM_INFINITY and used is not None:
            found.append(most - used)
    return found


def _of_container(ranks: int) -> int | None:
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        return None if most == "max" else (int(most) - int(used)) // ranks
    except (OSError, ValueError):
        return None


def _kilobytes(file: str, name: str) -> int | None:
    """The bytes of a line ``name:   12345 kB``."""
    try:
        with open(file) as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except (OSError, ValueError, IndexError):
        return None
