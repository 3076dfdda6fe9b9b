"""NCCL: its variables, set where neither the shell nor the cluster has, and whether it can carry a run's messages.

NCCL takes a variable from the environment, else from the user's file (``~/.nccl.conf``, or what ``NCCL_CONF_FILE``
names), else from the cluster's (``/etc/nccl.conf``), when it makes its first communicator.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import contextlib
import difflib
import mmap
import os
import re
from collections.abc import Collection, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground.accelerators import cuda_driver_version
from lockstep.ground.errors import MisconfigurationException

# -- variables -----------------------------------------------------------------------------------------------


PREFIX = "NCCL_"
CLUSTER_FILE = "/etc/nccl.conf"
USER_FILE = "~/.nccl.conf"
NEAR = 0.85
"""How alike a name and one of NCCL's are, so that the second is meant; network plugins have names of their own."""


class NcclVariables:
    """NCCL's variables as a run wants them.

    Args:
        asked: names, with or without ``NCCL_``, and values: text, whole numbers, or booleans (1 and 0).

    Attributes:
        wanted: variables and values as NCCL reads them.

    Raises:
        MisconfigurationException: for a name that no variable has, one that the NCCL which is loaded has spelt in
            another way, or a value of another kind.

    Example:
        >>> NcclVariables({"NSOCKS_PERTHREAD": 4, "IB_DISABLE": True}).wanted
        {'NCCL_NSOCKS_PERTHREAD': '4', 'NCCL_IB_DISABLE': '1'}
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        if not isinstance(asked, Mapping):
            raise MisconfigurationException(
                f'DDPStrategy(nccl={asked!r:.100}): give a dict of names and values, {{"MIN_NCHANNELS": 8}}.'
            )
        library = _loaded()
        known = [] if library is None else [each.decode() for each in _found(library, rb"NCCL_([A-Z][A-Z0-9_]+)")]
        self.asked = dict(asked)
        self.wanted = {_variable(name, known): _text(name, value) for name, value in asked.items()}
        if len(self.wanted) < len(asked):
            raise MisconfigurationException(f"DDPStrategy(nccl={self.asked}): a variable is there twice, with NCCL_.")
        self._set: list[str] = []
        self._in_force = self._told = False

    def apply(self, backend: str, group_is_there: bool) -> str | None:
        """Set them for a run; gives what there is to tell of it, the first time.

        Args:
            backend: of the process group, "nccl" or "gloo", say.
            group_is_there: whether the group has been made already.
        """
        if "nccl" not in backend:
            told = f"they have no effect: the ranks' messages go by {backend}."
        elif group_is_there and not self._in_force:
            told = "they come too late: the process group was there. Set them in the shell, or let lockstep make it."
        else:
            told = self.set()
            self._in_force = True
        first, self._told = not self._told, True
        return f"DDPStrategy(nccl={self.asked}): {told}" if first else None

    def set(self) -> str:
        """Set what nobody else has set, until `restore`; tells what is in force, and who said so."""
        files, told = _files(), []
        for variable, value in self.wanted.items():
            if variable in os.environ and variable not in self._set:
                told.append(f"{variable}={os.environ[variable]} (from the environment; asked: {value})")
            elif variable in files:
                told.append("{1} (from {0}; asked: {2})".format(*files[variable], value))
            else:
                os.environ[variable] = value
                self._set += [variable] if variable not in self._set else []
                told.append(f"{variable}={value}")
        others = sorted({name for name in os.environ if name.startswith(PREFIX)} - {*self.wanted, PREFIX + "CONF_FILE"})
        told += [f"{name}={os.environ[name]} (from the environment)" for name in others]
        return f"NCCL's variables in force: {', '.join(told)}."

    def restore(self) -> None:
        """Take back what `set` has set."""
        while self._set:
            os.environ.pop(self._set.pop(), None)


def _variable(name: object, known: Collection[str]) -> str:
    """The variable that ``name`` stands for; ``known`` are NCCL's, where they are known."""
    found = re.fullmatch(rf"(?:{PREFIX})?((?!.*NCCL)[A-Z][A-Z0-9_]*)", name) if isinstance(name, str) else None
    if found is None:
        raise MisconfigurationException(
            f'DDPStrategy(nccl={{{name!r}: ...}}): give a name in capitals, with or without {PREFIX}: "MIN_NCHANNELS".'
        )
    near = difflib.get_close_matches(found[1], known, n=1, cutoff=NEAR) if found[1] not in known else []
    if near:
        raise MisconfigurationException(
            f"DDPStrategy(nccl={{{name!r}: ...}}): NCCL has no variable of this name. Did you mean {near[0]!r}? If "
            "not, export it in the shell."
        )
    return PREFIX + found[1]


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) or (isinstance(value, str) and value and "\0" not in value):
        return str(value)
    raise MisconfigurationException(
        f"DDPStrategy(nccl={{{name!r}: {value!r:.100}}}): a variable's value is text, a whole number, True or False."
    )


def _files() -> dict[str, tuple[str, str]]:
    """What NCCL's configuration files say: variable -> file and line; the user's goes before the cluster's."""
    found: dict[str, tuple[str, str]] = {}
    for name in (CLUSTER_FILE, os.environ.get(PREFIX + "CONF_FILE", USER_FILE)):
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):  # there is none, or no home
            continue
        for line in text.splitlines():
            variable, is_set, value = line.partition("=")
            if is_set and not variable.lstrip().startswith("#"):
                found[variable.strip()] = name, f"{variable.strip()}={value.strip()}"
    return found


# -- whether it can carry a run's messages -------------------------------------------------------------------


def check_nccl(device_type: str) -> None:
    """Refuse a run over NCCL that cannot work here.

    Args:
        device_type: of this rank: "cuda", "cpu".

    Raises:
        MisconfigurationException: NCCL is missing, is of no use for the device, or was built for another CUDA.
    """
    built = torch.version.cuda  # None: without CUDA, or ROCm, whose RCCL comes with it
    available = dist.is_available() and dist.is_nccl_available()
    library = _loaded() if available and built is not None and not _of_the_same_cuda(built) else None
    driver = cuda_driver_version() if built is not None else 0
    reason = obstacle(device_type, available, built, None if library is None else built_for(library), driver)
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
    found = re.search(r"(/\S.*/libnccl\.so\S*)", maps)
    return None if found is None else Path(found[1])


def built_for(library: Path) -> tuple[int, int] | None:
    """The CUDA for which a library file of NCCL says that it was built; None if it does not say."""
    found = _found(library, rb"NCCL version [0-9.]+[^+\0]{0,20}\+cuda([0-9]+)\.([0-9]+)")
    return (int(found[0][0]), int(found[0][1])) if found else None


def _found(library: Path, pattern: bytes) -> list[Any]:
    """What a pattern finds in a file, of some 200 MiB."""
    with contextlib.suppress(OSError, ValueError):  # an empty file cannot be mapped
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return re.findall(pattern, content)
    return []


def _loaded() -> Path | None:
    with contextlib.suppress(OSError):
        return mapped(Path("/proc/self/maps").read_text(errors="replace"))
    return None


def _of_the_same_cuda(built: str) -> bool:
    """Whether the one package of NCCL that is installed is the one that goes with torch: then its file need not be
    searched."""
    major = int(built.partition(".")[0])
    return [cuda for cuda in range(11, 20) if any(distributions(name=f"nvidia-nccl-cu{cuda}"))] == [major]
