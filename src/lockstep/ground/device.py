"""Devices: the kinds that a run can use, and which of them it uses.

Beside them: the torch that drives them, how a batch gets there, memory that runs out, where tensors are made.
"""

from __future__ import annotations

import gc
import multiprocessing
import platform
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.ground.cuda_driver import cuda_driver_version
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once
from lockstep.ground.tree import tree_map

# -- torch ---------------------------------------------------------------------------------------------------


TRIED = (2, 15)
"""The newest torch that this release was tested with; a test holds it to constraints.txt and pyproject.toml."""


def warn_of_untried_torch(version: str = torch.__version__) -> None:
    """Warn, once and on rank 0, of a torch that is newer than all that were tried.

    Args:
        version: as torch writes its own, ``"2.13.0+cpu"``.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > TRIED and multiprocessing.parent_process() is None:  # not in loader workers
        tried = ".".join(map(str, TRIED))
        warn_once(
            f"torch {version} is newer than {tried}, the newest that this release of lockstep was tested with: should "
            f"something be wrong, `pip install 'torch=={tried}.*'` takes that one."
        )


# -- what a device has ---------------------------------------------------------------------------------------


def device_module(device: torch.device | str) -> Any:
    """torch's module for a kind of device: ``torch.cuda``, ``torch.mps``, ``torch.cpu``.

    Raises:
        RuntimeError: this torch has none of that name.
    """
    return torch.get_device_module(torch.device(device).type)


def in_bad_fork() -> bool:
    """Whether this process is a copy of one that had started an accelerator, which cannot be used here."""
    return any(getattr(device_module(kind), "_is_in_bad_fork", bool)() for kind in accelerator_kinds())


def is_there(kind: str) -> bool:
    """Whether this machine has a device of a kind, and this torch was built for it."""
    try:
        return kind == "cpu" or bool(device_module(kind).is_available())
    except RuntimeError:  # torch knows of no such kind, or has no module for it
        return False


def make_current(device: torch.device) -> None:
    """Let ``device`` be the one that its kind's name stands for in this process, where the kind can have several."""
    choose = getattr(device_module(device), "set_device", None)
    if device.type != "cpu" and choose is not None:
        choose(device)


def current_of(kind: str) -> torch.device:
    """The device that the name of a kind stands for in this process."""
    asks = getattr(device_module(kind), "current_device", None)
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0 if asks is None else int(asks()))


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, an accelerator is the current one, for kernels and events that do not ask where their tensors are."""
    made = None if device.type == "cpu" else getattr(device_module(device), "device", None)
    return nullcontext() if made is None else made(device)


def accelerator_kinds() -> list[str]:
    """The kinds of accelerators that this torch knows of, whether one is here or not; asking starts none."""
    found = torch.accelerator.current_accelerator()
    return list(dict.fromkeys(["cuda"] if found is None else ["cuda", found.type]))


def devices_of(kind: str, started: bool = False) -> list[torch.device]:
    """All devices of a kind, by their numbers.

    Args:
        kind: "cuda", "mps".
        started: none where this process has not begun to use them; asking then does not, either.
    """
    module = device_module(kind)
    there = getattr(module, "is_initialized", module.is_available) if started else module.is_available
    return [torch.device(kind, index) for index in range(module.device_count())] if there() else []


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type != "cpu":
        # `torch.mps` has one device and takes no argument
        device_module(device).synchronize(*[device][: device.type != "mps"])


@cache
def has_pinned_memory(kind: str) -> bool:
    """Whether the host's memory can be pinned for a kind of device, which then reads it while the host goes on."""
    if kind in ("cpu", "meta", "mps"):  # mps: its copies race with the host (pytorch issue 83015)
        return False
    if kind in ("cuda", "xpu"):  # known, so that nothing is started in a process that only asks
        return True
    try:
        return bool(torch.empty(1).pin_memory().is_pinned())
    except RuntimeError:
        return False


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU in memory that ``device`` reads while the host goes on, where there is such memory."""
    return tensor.pin_memory() if has_pinned_memory(device.type) else tensor


@cache
def has_float64(kind: str) -> bool:
    """Whether a kind of device computes in double precision."""
    if kind in ("cpu", "cuda", "meta"):
        return True
    try:
        torch.ones((), dtype=torch.float64, device=kind) + 1
    except (RuntimeError, TypeError, AssertionError):  # the last one: torch was built without such devices
        return False
    return True


def widest(device: torch.device) -> torch.dtype:
    """The dtype in which sums are taken on a device: float64, or float32 where it has no such."""
    return torch.float64 if has_float64(device.type) else torch.float32


def plus(total: Tensor | float, lost: Tensor | float, value: Tensor) -> tuple[Tensor, Tensor]:
    """``total + value``, and what rounding takes from it, for the next value: sums in float32 that stay exact to a bit.

    Args:
        total: so far.
        lost: what the last sum gave; 0 at first.
        value: to be added.
    """
    rest = value - lost
    found = total + rest
    return found, (found - total) - rest


def has_autocast(kind: str, dtype: torch.dtype) -> bool:
    """Whether a kind of device has ``torch.autocast`` to a dtype."""
    if kind == "cuda" or not torch.amp.is_autocast_available(kind):
        return kind == "cuda"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # by which torch says that it leaves autocast off
        try:
            torch.autocast(kind, dtype=dtype)
        except (UserWarning, RuntimeError):
            return False
    return True


# -- streams and events


def has_streams(device: torch.device) -> bool:
    """Whether work on a device can be put into several streams, which wait for one another by events."""
    return device.type != "cpu" and all(hasattr(device_module(device), name) for name in ("Stream", "stream", "Event"))


def new_stream(device: torch.device) -> Any:
    """A stream of a device that has such."""
    return device_module(device).Stream(device)


def current_stream(device: torch.device) -> Any:
    """The stream into which this thread puts what it computes on a device that has streams."""
    return device_module(device).current_stream(device)


def in_stream(stream: Any) -> AbstractContextManager[Any]:
    """Inside, what is computed goes into ``stream``."""
    made: AbstractContextManager[Any] = device_module(stream.device).stream(stream)
    return made


@cache
def has_futures(kind: str) -> bool:
    """Whether ``torch.futures`` knows a kind of device: the stream of who waits for one waits for that of who set."""
    if kind in ("cpu", "cuda"):
        return kind == "cuda"
    try:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[current_of(kind)])
        future.set_result(torch.empty(1, device=current_of(kind)))
        future.wait()
    except RuntimeError:
        return False
    return True


def has_timed_events(device: torch.device) -> bool:
    """Whether a device notes the time at which it comes to an event, so that nobody waits for it."""
    return device.type != "cpu" and hasattr(device_module(device), "Event")


class TimedEvent(Protocol):
    """A point in the work of a device: see `torch.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds to a later one."""
        ...


def timed_event(device: torch.device) -> TimedEvent:
    """An event that knows its time, of a device that has such; it belongs to the current one of the kind."""
    return device_module(device).Event(enable_timing=True)


# -- memory of a device


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


def device_name(device: torch.device) -> str:
    """The name that its maker gave a device, or its kind where nobody tells."""
    if device.type == "cpu":
        return platform.processor() or "cpu"
    named = getattr(device_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


# -- accelerators --------------------------------------------------------------------------------------------


Devices = int | str | list[int] | tuple[int, ...]


class Accelerator:
    """A kind of device: whether it is here, and which of them ``Trainer(devices=...)`` stands for.

    One that is to come derives from this class and gets a row in ``ACCELERATORS``.
    """

    name: str = ""
    """As in ``Trainer(accelerator=...)``."""
    device_type: str = ""
    """As in ``torch.device(type)``."""
    process_group_backend: str = ""
    """What carries the tensors of several ranks, as torch writes it; "": torch's own for the kind of device."""

    @staticmethod
    def is_available() -> bool:
        """Whether this machine has such a device."""
        raise NotImplementedError

    @staticmethod
    def auto_device_count() -> int:
        """How many devices ``devices="auto"`` takes."""
        raise NotImplementedError

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """This node's devices, one for each rank.

        Args:
            devices: as in ``Trainer(devices=...)``.

        Raises:
            MisconfigurationException: devices that are not there, or a value that names none.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CPUAccelerator(Accelerator):
    """The processor; ``devices`` is the number of processes."""

    name = device_type = "cpu"

    @staticmethod
    def is_available() -> bool:
        """Always."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """One process."""
        return 1

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """The processor, once for each process."""
        count = 1 if devices == "auto" else _number(devices)
        if count is None or count < 1:
            raise MisconfigurationException(
                f"devices={devices!r} with accelerator='cpu': give the number of processes, 1 or more, or 'auto'"
            )
        return [torch.device("cpu")] * count


class TorchAccelerator(Accelerator):
    """A kind of accelerator by the interface that torch has for all: ``torch.xpu``, or the module that a package of its
    maker's brings (``torch_tpu``, say: a backend out of torch's tree).

    Args:
        kind: as in ``torch.device(kind)``.
    """

    def __init__(self, kind: str) -> None:
        self.name = self.device_type = kind

    def is_available(self) -> bool:  # type: ignore[override]  # a static method of classes that are for one kind
        """Whether torch finds one."""
        return bool(device_module(self.device_type).is_available())

    def auto_device_count(self) -> int:  # type: ignore[override]
        """All that torch sees, where a backend of process groups carries their tensors; else one."""
        present = int(device_module(self.device_type).device_count())
        return present if carries(None, self.device_type) else min(present, 1)

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """The devices of these numbers, in the order given."""
        kind = self.device_type
        present = self.auto_device_count() if devices == "auto" else int(device_module(kind).device_count())
        return [torch.device(kind, index) for index in _indices(devices, present, kind)]


class CUDAAccelerator(TorchAccelerator):
    """NVIDIA's GPUs, and AMD's under a ROCm build of torch, which has the same name there."""

    def __init__(self) -> None:
        super().__init__("cuda")

    @staticmethod
    def is_available() -> bool:
        """Whether torch finds one."""
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """All that torch sees, which ``CUDA_VISIBLE_DEVICES`` may limit."""
        return torch.cuda.device_count()


class MPSAccelerator(TorchAccelerator):
    """Apple's GPU."""

    def __init__(self) -> None:
        super().__init__("mps")

    @staticmethod
    def is_available() -> bool:
        """Whether torch finds one."""
        return torch.backends.mps.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """It is one."""
        return 1


ACCELERATORS: dict[str, Callable[[], Accelerator]] = {
    "cpu": CPUAccelerator,
    "xpu": partial(TorchAccelerator, "xpu"),
    "mps": MPSAccelerator,
    "cuda": CUDAAccelerator,
}
"""Name to what makes one. ``"auto"`` is the backend that is not in torch itself, else the last of these that is
available, ``"gpu"`` the last of ``GPUS`` that is."""
GPUS = ("xpu", "mps", "cuda")

PACKAGES = {
    "tpu": "the package torch_tpu brings it, for the version of torch that it names: install both, and leave "
    "TORCH_DEVICE_BACKEND_AUTOLOAD on, by which torch finds it",
    "xla": "tensors of torch_xla are not torch's own, and its steps run when they are asked for: on TPUs, install "
    "torch_tpu and give accelerator='tpu'",
    "hpu": "Intel's package brings it: import it before the Trainer is made",
    "ipu": "the maker's package for torch has ended",
}
"""Kinds of devices of which users know, and where they come from."""

RAN = ("cpu", "cuda")
"""Kinds of devices on which this release has run: the README's table says when, and a test holds the two together."""
RAN_ON_SEVERAL = ("cpu",)
"""The same of ranks with a device each."""


def find_accelerator(asked: str | Accelerator = "auto") -> Accelerator:
    """The accelerator for a name or an object.

    Args:
        asked: ``"auto"`` (an accelerator if there is one), ``"gpu"`` (NVIDIA's or AMD's, Apple's or Intel's),
            ``"cpu"``, ``"cuda"``, ``"mps"``, ``"xpu"``, ``"tpu"``, the name of any device that torch has, or an
            Accelerator.

    Raises:
        MisconfigurationException: one that torch does not have, or that is not here.
    """
    if isinstance(asked, Accelerator):
        found = asked
    elif asked == "auto":
        return next(made for made in _all_made() if made.is_available())
    elif asked == "gpu":
        of_gpus = [_make(name) for name in reversed(GPUS)]
        found = next((made for made in of_gpus if made.is_available()), of_gpus[0])
    else:
        found = _by_name(asked)
    if not found.is_available():
        raise MisconfigurationException(
            f"accelerator={asked!r}, but torch {torch.__version__} finds no such device here{_old_driver()}: "
            "use accelerator='auto' or 'cpu', or install a build of torch for your GPU"
        )
    return found


def _all_made() -> Iterator[Accelerator]:
    """One of each kind, in the order in which ``"auto"`` asks them."""
    outside = torch.accelerator.current_accelerator()
    if outside is not None and outside.type not in ACCELERATORS:
        yield TorchAccelerator(outside.type)
    yield from map(_make, reversed(ACCELERATORS))


def _by_name(asked: object) -> Accelerator:
    """The accelerator of a name that is one kind's.

    Raises:
        MisconfigurationException: torch has no device of the name, or no module for it.
    """
    if isinstance(asked, str) and asked in ACCELERATORS:
        return _make(asked)
    try:
        made = TorchAccelerator(torch.device(asked).type if isinstance(asked, str) and asked != "meta" else "")
        there = made.name == asked and all(
            hasattr(device_module(made.name), needed) for needed in ("is_available", "device_count")
        )
    except RuntimeError:  # no such device, or no module for it
        there = False
    if there:
        return made
    if isinstance(asked, str) and asked in PACKAGES:
        raise MisconfigurationException(
            f"accelerator={asked!r}: torch {torch.__version__} has no such device here: {PACKAGES[asked]}; or use "
            "accelerator='auto' or 'cpu'"
        )
    raise MisconfigurationException(
        f"accelerator={asked!r} is not known: use 'auto', {', '.join(map(repr, ACCELERATORS))}, 'gpu', 'tpu', or the "
        "name of a device that a package has added to torch (import it before the Trainer is made)"
    )


def untried(kind: str, several: bool = False) -> str | None:
    """What to say at the start of a run on devices on which this release never ran; None where it did.

    Args:
        kind: of the devices.
        several: whether ranks have one each.
    """
    if kind in (RAN_ON_SEVERAL if several else RAN):
        return None
    where, reference = ("such a device", "the CPU") if kind not in RAN else ("several such devices", "one")
    return (
        f'accelerator={kind!r}: this release of lockstep has not run on {where} yet (README, "Where it has '
        f'run"): compare the first losses with a run on {reference}, and report what differs.'
    )


def carries(backend: str | None, kind: str) -> bool:
    """Whether a backend of process groups carries tensors of a kind of device.

    Args:
        backend: as torch writes it, "gloo" or "cpu:gloo,cuda:nccl"; None: the kind's own.
        kind: "cpu", "mps".
    """
    if not dist.is_available():
        return False
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(kind, "undefined")
    if ":" in backend:
        return any(entry.startswith(f"{kind}:") for entry in backend.split(","))
    return kind in dist.Backend.backend_capability.get(backend, ())


def _old_driver() -> str:
    """What to add where the driver is older than the CUDA that torch was built for."""
    built = torch.version.cuda
    driver = cuda_driver_version()  # 0: there is none
    if built is None or not 0 < driver < 1000 * int(built.partition(".")[0]):
        return ""
    known = f"{driver // 1000}.{driver % 1000 // 10}"
    return f" (it was built for CUDA {built}, and the driver of this machine knows CUDA {known}: update the driver)"


def _make(name: str) -> Accelerator:
    return ACCELERATORS[name]()


def _asked(devices: Devices, present: int) -> list[int]:
    """The devices that a value of the flag names; none where it is no such value."""
    count = -1 if devices == "auto" else _number(devices)
    if count is not None:
        return list(range(present if count == -1 else count))
    if isinstance(devices, str):
        try:
            return [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            return []
    return list(devices) if isinstance(devices, list | tuple) else []


def _indices(devices: Devices, present: int, kind: str) -> list[int]:
    """Which of the devices 0 .. present - 1 were asked for."""
    indices = _asked(devices, present)
    if not indices or any(type(index) is not int or index < 0 for index in indices):
        raise MisconfigurationException(
            f"devices={devices!r}: give a number, a list such as [0, 2], a string such as '0,2', -1 for all, or 'auto'"
        )
    if len(set(indices)) < len(indices):
        raise MisconfigurationException(
            f"devices={devices!r} names a device twice: give each one once, one rank works on each. Tests of several "
            "ranks on one card take Trainer(accelerator=lockstep.testing.SharedCard(), devices=2)"
        )
    if max(indices) >= present:
        raise MisconfigurationException(
            f"devices={devices!r}, but this machine has {present} {kind} device(s), numbered from 0: "
            f"use devices={present} or less, or -1 for all"
        )
    return indices


def _number(devices: object) -> int | None:
    """The count that ``2`` or ``"2"`` stands for; None for lists, ``"0,2"`` and everything else."""
    if isinstance(devices, bool):
        return None
    if isinstance(devices, str):
        try:
            return int(devices)
        except ValueError:
            return None
    return devices if isinstance(devices, int) else None


# -- devices and batches -------------------------------------------------------------------------------------


class _Movable(metaclass=ABCMeta):  # noqa: B024, a class by which `isinstance` asks for a method
    """Anything with a method ``to``: tensors, packed sequences, a user's own batch class."""

    @classmethod
    def __subclasshook__(cls, subclass: type) -> Any:
        return True if callable(getattr(subclass, "to", None)) else NotImplemented


def move_data_to_device(batch: object, device: torch.device | str | int) -> Any:
    """A copy of ``batch`` with everything that has a method ``to(device)`` on ``device``.

    Goes through nested collections and dataclasses as `tree_map` does. Copies to CUDA do not block the host
    where the source lies in pinned memory.

    Args:
        batch: tensors, nested collections of them, objects with ``to``.
        device: where to.
    """
    device = torch.device(device)
    # cpu: the copy would return before the data is there; mps: it races with the host (pytorch issue 83015)
    non_blocking = device.type not in ("cpu", "mps")

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        moved = leaf.to(device)
        return leaf if moved is None else moved  # a `to` that works in place may forget to return itself

    return tree_map(move, batch, (torch.Tensor, _Movable))  # tensors first: the quicker question


def resolve_accelerator(
    accelerator: str | Accelerator = "auto", devices: Devices = "auto"
) -> tuple[str, list[torch.device]]:
    """The device type and this node's devices, one for each rank.

    Args:
        accelerator: as in `find_accelerator`.
        devices: how many (``2``, ``"2"``), which (``[0, 2]``, ``"0,2"``), all (``-1``, ``"-1"``), or
            ``"auto"``, which is all of an accelerator. On the CPU the number of processes; ``"auto"`` is one.

    Returns:
        ``("cuda", [cuda:0, cuda:2])``, ``("cpu", [cpu, cpu])``.

    Raises:
        MisconfigurationException: an unknown accelerator, devices that are not there.

    Example:
        >>> resolve_accelerator("cpu", 2)
        ('cpu', [device(type='cpu'), device(type='cpu')])
    """
    found = find_accelerator(accelerator)
    return found.device_type, found.get_parallel_devices(devices)


def forked_random_numbers(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Inside, random numbers are drawn that will be drawn again: of the CPU and of devices, all of one type."""
    gpus = sorted({device for device in devices if device.type != "cpu"}, key=str)
    return torch.random.fork_rng(gpus, device_type=gpus[0].type if gpus else "cpu")


# -- memory --------------------------------------------------------------------------------------------------


_SAYINGS = (
    "DefaultCPUAllocator",  # the host's memory
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # what cuDNN answers where its workspace does not fit
)
"""What errors say that come as plain RuntimeErrors where memory is used up."""


def recursive_detach(in_dict: object, to_cpu: bool = False) -> Any:
    """A copy of a nested collection with its tensors detached from their graphs.

    Args:
        in_dict: a dict, or anything that `lockstep.ground.tree.tree_map` goes through.
        to_cpu: also bring them to the CPU.
    """
    return tree_map(lambda t: t.detach().cpu() if to_cpu else t.detach(), in_dict, Tensor)


def is_oom_error(exception: BaseException) -> bool:
    """Whether an exception says that a device's memory, or the host's, is used up."""
    return isinstance(exception, torch.OutOfMemoryError | MemoryError) or (
        isinstance(exception, RuntimeError) and any(saying in str(exception) for saying in _SAYINGS)
    )


def garbage_collection_cuda() -> None:
    """Collect Python's garbage and give the cached memory of accelerators back to them."""
    gc.collect()
    for kind in accelerator_kinds():
        for device in devices_of(kind, started=True)[:1]:
            empty_cache(device)


# -- where tensors are made -----------------------------------------------------------------------------------


class _Uninitialized(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


@contextmanager
def creating(
    device: torch.device, dtype: torch.dtype | None = None, empty: bool = False, in_parts: bool = False
) -> Iterator[None]:
    """Within the block, modules and tensors are made on ``device``.

    Args:
        device: of what names none itself.
        dtype: of floating tensors that name none themselves; None: torch's default.
        empty: leave the memory of parameters as it is, where ``torch.nn.init`` would fill it; for weights that a
            checkpoint brings.
        in_parts: this rank will have parts of the module only: with ``empty`` it gets no memory at all (meta).
    """
    if empty and in_parts:
        device, empty = torch.device("meta"), False
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(device)
        if empty:
            stack.enter_context(_Uninitialized())
        if dtype is not None:
            torch.set_default_dtype(dtype)
            stack.callback(torch.set_default_dtype, before)
        yield
