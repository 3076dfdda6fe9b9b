"""Whether NCCL can carry a run's messages, said before any rank is started; NCCL itself says it after a minute."""

from __future__ import annotations

import contextlib
import mmap
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.ground.errors import MisconfigurationException

_MARK = re.compile(rb"NCCL version [0-9.]+[^+\0]{0,20}\+cuda([0-9]+)\.([0-9]+)")


def check_nccl(device_type: str) -> None:
    """Refuse a run over NCCL that cannot work here.

    Args:
        device_type: of this rank: "cuda", "cpu".

    Raises:
        MisconfigurationException: NCCL is missing, is of no use for the device, or was built for another CUDA.
    """
    built = torch.version.cuda  # None: without CUDA, or ROCm, whose RCCL comes with it
    available = dist.is_available() and dist.is_nccl_available()
    nccl = None
    if available and built is not None and not _of_the_same_cuda(built):
        file = mapped(_read("/proc/self/maps"))
        nccl = None if file is None else built_for(file)
    driver = getattr(torch._C, "_cuda_getDriverVersion", int)() if built is not None else 0
    reason = obstacle(device_type, available, built, nccl, driver)
    if reason is not None:
        raise MisconfigurationException(f"process_group_backend='nccl': {reason}.")


def obstacle(
    device_type: str, available: bool, built: str | None, nccl: tuple[int, int] | None, driver: int
) -> str | None:
    """Why NCCL cannot carry messages; None if nothing is known against it.

    Args:
        device_type: of this rank.
        available: whether torch was built with it.
        built: the CUDA that torch was built for, "13.0".
        nccl: the CUDA that the NCCL in use was built for; None: as torch, or not known.
        driver: the newest CUDA that the driver knows, as it numbers them: 12040 is 12.4; 0: not known.
    """
    if device_type != "cuda":
        return (
            f"NCCL works between GPUs, and this run's devices are {device_type}: leave the backend to lockstep, or "
            "use process_group_backend='gloo'"
        )
    if not available:
        return (
            f"torch {torch.__version__} was built without NCCL: install a build of torch for CUDA, or use "
            "process_group_backend='gloo', which is slower and works between GPUs, too"
        )
    if built is None or nccl is None:
        return None
    theirs = f"{nccl[0]}.{nccl[1]}"
    if nccl[0] != int(built.partition(".")[0]):
        return (
            f"the NCCL that is loaded was built for CUDA {theirs}, and torch {torch.__version__} for CUDA {built}: "
            f"install nvidia-nccl-cu{built.partition('.')[0]} again, and take other ones out of the environment "
            "(pip list, LD_LIBRARY_PATH, LD_PRELOAD)"
        )
    if 0 < driver < 1000 * nccl[0]:
        known = f"{driver // 1000}.{driver % 1000 // 10}"
        return (
            f"the NCCL that is loaded was built for CUDA {theirs}, and the driver of this machine knows CUDA {known}: "
            "update the driver, or install a build of torch for that CUDA"
        )
    return None


def mapped(maps: str) -> Path | None:
    """The NCCL that a process has loaded, from its ``/proc/.../maps``; None where it has none of its own.

    Example:
        >>> mapped("7f00-7f01 r-xp 00000000 08:01 42    /opt/nccl/lib/libnccl.so.2.27.5\\n")
        PosixPath('/opt/nccl/lib/libnccl.so.2.27.5')
    """
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and Path(path[0]).name.startswith("libnccl.so"):
            return Path(path[0])
    return None


def built_for(library: Path) -> tuple[int, int] | None:
    """The CUDA for which a library file of NCCL says that it was built; None if it does not say."""
    with contextlib.suppress(OSError, ValueError):  # an empty file cannot be mapped
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = _MARK.search(content)
            return None if found is None else (int(found[1]), int(found[2]))
    return None


def _of_the_same_cuda(built: str) -> bool:
    """Whether the one package of NCCL that is installed is the one that goes with torch: then its file, of some 200
    MiB, need not be searched."""
    major = int(built.partition(".")[0])
    return [cuda for cuda in range(11, 20) if _is_installed(f"nvidia-nccl-cu{cuda}")] == [major]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""
