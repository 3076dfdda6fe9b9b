"""Functions that report used and free memory, in bytes.

For a device they report the memory of tensors and the cache of torch's allocator. For this process they report the
memory that it may still use on the host (within its limits) and on an accelerator.
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
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error if its workspace does not fit
)
"""Text fragments that identify a plain RuntimeError as an out-of-memory error."""


def memory_stats(device: torch.device) -> dict[str, int]:
    """Return the statistics of torch's allocator for a device, with the keys of ``torch.cuda.memory_stats``.

    Return an empty dict if the device has no statistics.
    """
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
    """Return the result of the function ``name`` of the device's module, or else `memory_stats`' entry ``key``."""
    ask = None if device.type == "cpu" else getattr(device_module(device), name, None)
    return memory_stats(device).get(key) if ask is None else int(ask(device))


def memory_held(device: torch.device) -> int | None:
    """Return how many bytes the tensors of this process occupy on a device; None if unknown."""
    return _bytes(device, "memory_allocated", "allocated_bytes.all.current")


def memory_peak(device: torch.device) -> int | None:
    """Return the largest number of bytes that tensors have occupied on a device; None if unknown.

    The period starts with the last call of `forget_memory_peak`.
    """
    return _bytes(device, "max_memory_allocated", "allocated_bytes.all.peak")


def forget_memory_peak(device: torch.device) -> None:
    """Reset the result of `memory_peak` to the number of bytes that are in use now."""
    forget = None if device.type == "cpu" else getattr(device_module(device), "reset_peak_memory_stats", None)
    if forget is not None:
        forget(device)


def memory_cached(device: torch.device) -> int:
    """Return how many bytes of a device torch's allocator has reserved without using them for tensors."""
    return max(0, (_bytes(device, "memory_reserved", "reserved_bytes.all.current") or 0) - (memory_held(device) or 0))


def empty_cache(device: torch.device) -> None:
    """Release memory that torch's allocator has cached but no tensor uses, on all devices of the same kind."""
    give = None if device.type == "cpu" else getattr(device_module(device), "empty_cache", None)
    if give is not None:
        give()


def memory_info(device: torch.device) -> tuple[int, int] | None:
    """Return (free, total) bytes of an accelerator's memory. Return None if they are unknown."""
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
    """Return the size of an accelerator's memory in bytes; None if unknown."""
    ask = None if device.type == "cpu" else getattr(device_module(device), "get_device_properties", None)
    total = None if ask is None else getattr(ask(device), "total_memory", None)
    known = memory_info(device) if total is None else None
    return known[1] if known is not None else total


def is_oom_error(exception: BaseException) -> bool:
    """Return True if an exception means that a device or the host is out of memory.

    Args:
        exception: any exception, for example from a forward or backward.

    Example::

        try:
            trainer.fit(model)
        except Exception as error:
            if not is_oom_error(error):
                raise
    """
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(saying in words_of(exception) for saying in _SAYINGS)
    )


def garbage_collection_cuda() -> None:
    """Collect Python's garbage and release the cached memory of accelerators."""
    gc.collect()
    for kind in accelerator_kinds():
        for device in devices_of(kind, started=True)[:1]:
            empty_cache(device)


_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device, ranks: int = 1) -> int | None:
    """Return how many more bytes this process may use on a device; None if unknown.

    Args:
        device: an accelerator, or the CPU.
        ranks: number of processes that share this host's memory.
    """
    if device.type != "cpu":
        known = memory_info(device)
        return None if known is None else known[0] + memory_cached(device)
    available = _kilobytes("/proc/meminfo", "MemAvailable")
    found = [] if available is None else [available // ranks]
    # The limits of `ulimit` hold for each process, those of the host and a container for all of them together.
    for limit, name in _LIMITS:
        most, used = resource.getrlimit(limit)[0], _kilobytes("/proc/self/status", name)
        if most != resource.RLIM_INFINITY and used is not None:
            found.append(most - used)
    of_container = _of_container(ranks)
    if of_container is not None:
        found.append(of_container)
    return max(0, min(found)) if found else None


def host_memory() -> int | None:
    """Return the size of the host's memory in bytes; None if unknown."""
    return _kilobytes("/proc/meminfo", "MemTotal")


def _of_container(ranks: int) -> int | None:
    try:
        most, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        return None if most == "max" else (int(most) - int(used)) // ranks
    except (OSError, ValueError):
        return None


def _kilobytes(file: str, name: str) -> int | None:
    """Return the value, in bytes, of the line ``name:   12345 kB`` in a file; None if there is no such line."""
    try:
        with open(file) as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
    except (OSError, ValueError, IndexError):
        return None
