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
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground.cuda_driver import cuda_driver_version
from lockstep.ground.errors import MisconfigurationException

# -- variables -----------------------------------------------------------------------------------------------


PREFIX = "NCCL_"
CLUSTER_FILE = "/etc/nccl.conf"
USER_FILE = "~/.nccl.conf"

NAMES = frozenset(
    """
    ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CE_INTRA_GPU_MEMCPY_ENABLE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_POINTERS
    COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID CONF_FILE CONNECT_ROUND_MAX_PEERS CROSS_NIC CTA_POLICY
    CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS
    DMABUF_ENABLE ELASTIC_BUFFER_REGISTER ENV_PLUGIN GDRCOPY_ENABLE GDRCOPY_FLUSH_ENABLE GDRCOPY_SYNC_ENABLE
    GDR_FLUSH_DISABLE GIN_ENABLE GIN_PLUGIN GIN_TYPE GRAPH_DUMP_FILE GRAPH_FILE GRAPH_HELPER_DISABLE
    GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD
    IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_MERGE_VFS
    IB_MLX_VENDOR_ID IB_MQP_RETRY_ALL IB_MQP_RETRY_CNT IB_MQP_RETRY_SLEEP_MSEC IB_OOO_RQ IB_PCI_RELAXED_ORDERING
    IB_PKEY IB_PREPOST_RECEIVE_WORK_REQUESTS IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
    IB_ROCE_VERSION_NUM IB_SL IB_SORT_MERGE_NICS IB_SPLIT_DATA_ON_QPS IB_SUBNET_AWARE_ROUTING IB_TC IB_TIMEOUT
    IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P
    IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET L1_SHARED_MEMORY_CARVEOUT LAUNCH_MODE LAUNCH_ORDER_IMPLICIT
    LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL128_BUFFSIZE LL128_C2C LL128_NTHREADS LL_BUFFSIZE LL_THRESHOLD
    LOCAL_REGISTER MAX_CTAS MAX_NCHANNELS MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS
    MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_RAIL_PER_HOST MNNVL_SCATTER_NETS_ENABLE MNNVL_UUID
    MULTI_RANK_GPU_ENABLE MULTI_SEGMENT_REGISTER NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_DISABLE_INTRA
    NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ NET_MERGE_LEVEL NET_MERGE_POLICY
    NET_OPTIONAL_RECV_COMPLETION NET_OVERHEAD NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NO_CACHE NSOCKS_PERTHREAD
    NTHREADS NVB_DISABLE NVB_PRECONNECT NVLSTREE_MAX_CHUNKSIZE NVLS_CHUNKSIZE NVLS_ENABLE NVLS_NCHANNELS NVLS_UB_SIZE
    NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_EPOCH_ENABLE P2P_LEVEL
    P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE
    P2P_USE_CUDA_MEMCPY PAT_ENABLE PROFILER_PLUGIN PROGRESS_APPENDOP_FREQ PROTO PROXY_APPEND_BATCH_SIZE PROXY_CPUSET
    PROXY_DUMP_SIGNAL PXN_C2C PXN_DISABLE RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RINGS
    RMA_DISABLE RMA_PLUGIN RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE SHM_LOCALITY
    SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_INLINE
    SOCKET_MIN_TASKSIZE SOCKET_NTHREADS SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT
    SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF SYM_CE_THRESHOLD SYM_CTAS SYM_GIN_KERNELS_ENABLE THREAD_THRESHOLDS
    TOPO_DUMP_FILE TOPO_FILE TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD
    UNPACK_DOUBLE_NCHANNELS WARN_ENABLE_DEBUG_INFO WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
    WORK_FIFO_DEPTH
    """.split()  # noqa: SIM905
)
"""The variables that NCCL's page documents, and others that its library (2.32) reads; without their prefix."""


@dataclass
class NcclVariables:
    """NCCL's variables as a run wants them.

    Args:
        asked: names, with or without ``NCCL_``, and values: text, whole numbers, or booleans (1 and 0).

    Raises:
        MisconfigurationException: for a name that NCCL does not have, or a value of another kind.

    Example:
        >>> NcclVariables({"NSOCKS_PERTHREAD": 4, "IB_DISABLE": True}).wanted
        {'NCCL_NSOCKS_PERTHREAD': '4', 'NCCL_IB_DISABLE': '1'}
    """

    asked: Mapping[str, Any]
    wanted: dict[str, str] = field(init=False)
    """Variables and values as NCCL reads them."""
    _set: list[str] = field(init=False, default_factory=list)
    _in_force: bool = field(init=False, default=False)
    _told: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if not isinstance(self.asked, Mapping):
            raise MisconfigurationException(
                f'DDPStrategy(nccl={self.asked!r:.100}): give a dict of names and values, {{"MIN_NCHANNELS": 8}}.'
            )
        self.wanted = {}
        for name, value in self.asked.items():
            variable = _variable(name)
            if variable in self.wanted:
                raise MisconfigurationException(f"DDPStrategy(nccl={dict(self.asked)}): {variable} is there twice.")
            self.wanted[variable] = _text(name, value)

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
        return f"DDPStrategy(nccl={dict(self.asked)}): {told}" if first else None

    def set(self) -> str:
        """Set what nobody else has set, until `restore`; tells what is in force, and who said so."""
        files = _files()
        ours, theirs = [], []
        for variable, value in self.wanted.items():
            if variable in os.environ and variable not in self._set:
                source, found = "the environment", os.environ[variable]
            elif variable in files:
                source, found = files[variable]
            else:
                os.environ[variable] = value
                self._set += [variable] if variable not in self._set else []
                ours.append(f"{variable}={value}")
                continue
            theirs.append(f"{variable}={found} (from {source}; asked: {value})")
        asked = {*self.wanted, PREFIX + "CONF_FILE"}
        others = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _is_other(name, asked)]
        told = [
            f"{what} {', '.join(those)}"
            for what, those in (
                ("set", ours),
                ("kept as set before", theirs),
                ("besides, in the environment", others),
            )
            if those
        ]
        return f"NCCL's variables in force: {'; '.join(told)}."

    def restore(self) -> None:
        """Take back what `set` has set."""
        while self._set:
            os.environ.pop(self._set.pop(), None)


def _is_other(name: str, asked: set[str]) -> bool:
    return name.startswith(PREFIX) and name not in asked


def _variable(name: object) -> str:
    """The variable that ``name`` stands for."""
    bare = name.removeprefix(PREFIX) if isinstance(name, str) else ""
    if bare in NAMES:
        return PREFIX + bare
    near = difflib.get_close_matches(bare.upper().removeprefix(PREFIX), sorted(NAMES), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise MisconfigurationException(
        f"DDPStrategy(nccl={{{name!r}: ...}}): NCCL has no variable of this name.{hint} One that is newer than "
        "lockstep's list takes effect when it is exported in the shell."
    )


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int) or (isinstance(value, str) and value and "\0" not in value):
        return str(value)
    raise MisconfigurationException(
        f"DDPStrategy(nccl={{{name!r}: {value!r:.100}}}): a variable's value is text, a whole number, True or False."
    )


def _files() -> dict[str, tuple[str, str]]:
    """What NCCL's configuration files say: variable -> file and value; the user's goes before the cluster's."""
    found: dict[str, tuple[str, str]] = {}
    for name in (CLUSTER_FILE, os.environ.get(PREFIX + "CONF_FILE", USER_FILE)):
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):  # there is none, or no home
            continue
        for line in text.splitlines():
            variable, is_set, value = line.partition("=")
            if is_set and not variable.lstrip().startswith("#"):
                found[variable.strip()] = (name, value.strip())
    return found


# -- whether it can carry a run's messages -------------------------------------------------------------------


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
    driver = cuda_driver_version() if built is not None else 0
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
