"""How much more memory this process may use: of the host, within its limits, and of an accelerator."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from lockstep.ground.device_memory import memory_cached, memory_info

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
