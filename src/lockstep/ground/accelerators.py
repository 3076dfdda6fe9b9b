"""Accelerators that a run can use, and the values of ``Trainer(accelerator=..., devices=...)``."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from functools import partial

import torch
import torch.distributed as dist

from lockstep.ground.device import device_module
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.numbers import whole_number


class Accelerator:
    """Base class of accelerators, which report the available devices and parse the value of ``Trainer(devices=...)``.

    A new kind derives from this class and gets an entry in ``ACCELERATORS``.
    """

    name: str = ""
    """The name in ``Trainer(accelerator=...)``."""
    device_type: str = ""
    """The type in ``torch.device(type)``."""
    process_group_backend: str = ""
    """Backend of process groups on these devices, as torch writes it; "" for torch's default."""

    @staticmethod
    def is_available() -> bool:
        """Return True if this machine has a device of this accelerator."""
        raise NotImplementedError

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of devices that ``devices="auto"`` selects."""
        raise NotImplementedError

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """Return this node's devices, one for each rank.

        Args:
            devices: the value of ``Trainer(devices=...)``.

        Raises:
            MisconfigurationException: a device does not exist, or the value is malformed.
        """
        raise NotImplementedError

    @classmethod
    def parse_devices(cls, devices: Devices) -> int | list[int]:
        """Return the device indices that ``devices`` selects; on the CPU, the number of processes.

        Raises:
            MisconfigurationException: a device does not exist, or the value is malformed.
        """
        found = cls().get_parallel_devices(devices)
        return len(found) if cls.device_type == "cpu" else [device.index for device in found]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class CPUAccelerator(Accelerator):
    """The CPU as an accelerator. ``devices`` is the number of processes on a node."""

    name = device_type = "cpu"

    @staticmethod
    def is_available() -> bool:
        """Return True, because every machine has a CPU."""
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Return 1, because ``devices="auto"`` means one process on the CPU."""
        return 1

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """Return a list with one CPU device for each requested process.

        Args:
            devices: number of processes, or "auto" for one.

        Raises:
            MisconfigurationException: the number is below 1 or malformed.
        """
        count = 1 if devices == "auto" else count_of(devices)
        if count is None or count < 1:
            raise (WrongType if count is None else MisconfigurationException)(
                f"devices={devices!r} is not valid with accelerator='cpu': pass the number of processes (1 or more) or "
                "'auto'"
            )
        return [torch.device("cpu")] * count


class TorchAccelerator(Accelerator):
    """An accelerator with a device module in torch, such as ``torch.xpu``.

    Another package may register such a module, for example ``torch_tpu``.

    Args:
        kind: the type in ``torch.device(kind)``.

    Raises:
        RuntimeError: a method is called, and torch has no module for this kind.

    Example::

        Trainer(accelerator=TorchAccelerator("xpu"), devices=2)
    """

    def __init__(self, kind: str) -> None:
        self.name = self.device_type = kind

    def is_available(self) -> bool:  # type: ignore[override]  # a static method of classes that are for one kind
        """Return True if torch finds a device of this kind."""
        return bool(device_module(self.device_type).is_available())

    def auto_device_count(self) -> int:  # type: ignore[override]
        """Return the number of visible devices, or 1 if no process group can send tensors on these devices."""
        present = int(device_module(self.device_type).device_count())
        return present if carries(None, self.device_type) else min(present, 1)

    def get_parallel_devices(self, devices: Devices) -> list[torch.device]:
        """Return the devices that ``devices`` selects, in the given order."""
        kind = self.device_type
        present = self.auto_device_count() if devices == "auto" else int(device_module(kind).device_count())
        return [torch.device(kind, index) for index in indices_of(devices, present, kind)]


class CUDAAccelerator(TorchAccelerator):
    """NVIDIA GPUs. In a ROCm build of torch, AMD GPUs, which torch also calls "cuda"."""

    def __init__(self) -> None:
        super().__init__("cuda")

    @staticmethod
    def is_available() -> bool:
        """Return True if torch finds a GPU."""
        return torch.cuda.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of visible GPUs, which ``CUDA_VISIBLE_DEVICES`` may limit."""
        return torch.cuda.device_count()


class MPSAccelerator(TorchAccelerator):
    """The GPU of an Apple machine."""

    def __init__(self) -> None:
        super().__init__("mps")

    @staticmethod
    def is_available() -> bool:
        """Return True if torch finds Apple's GPU."""
        return torch.backends.mps.is_available()

    @staticmethod
    def auto_device_count() -> int:
        """Return 1, because an Apple machine has one GPU."""
        return 1


ACCELERATORS: dict[str, Callable[[], Accelerator]] = {
    "cpu": CPUAccelerator,
    "xpu": partial(TorchAccelerator, "xpu"),
    "mps": MPSAccelerator,
    "cuda": CUDAAccelerator,
}
"""Factory of each accelerator, by name.

``"auto"`` prefers a backend outside of torch, then the last available one of these. ``"gpu"`` is the last available one
of ``GPUS``.
"""
GPUS = ("xpu", "mps", "cuda")


def find_accelerator(asked: str | Accelerator = "auto") -> Accelerator:
    """Return the `Accelerator` with a name. An `Accelerator` is returned unchanged.

    Args:
        asked: ``"auto"`` (an accelerator if there is one), ``"gpu"`` (of NVIDIA, AMD, Apple or Intel), ``"cpu"``,
            ``"cuda"``, ``"mps"``, ``"xpu"``, ``"tpu"``, the name of any device that torch has, or an Accelerator.

    Raises:
        MisconfigurationException: torch does not know the accelerator, or the machine does not have it.
    """
    if isinstance(asked, Accelerator):
        found = asked
    elif asked == "auto":
        # A backend that another package has registered is preferred: it was installed for this machine.
        outside = torch.accelerator.current_accelerator()
        if outside is not None and outside.type not in ACCELERATORS:
            found = TorchAccelerator(outside.type)
            if found.is_available():
                return found
        return next(made for made in map(_make, reversed(ACCELERATORS)) if made.is_available())
    elif asked == "gpu":
        of_gpus = [_make(name) for name in reversed(GPUS)]
        found = next((made for made in of_gpus if made.is_available()), of_gpus[0])
    else:
        found = _by_name(asked)
    if not found.is_available():
        raise MisconfigurationException(
            f"accelerator={asked!r} was requested, but torch {torch.__version__} finds no such device on this machine: "
            "use accelerator='auto' or 'cpu', or install a build of torch for your GPU"
        )
    return found


def resolve_accelerator(
    accelerator: str | Accelerator = "auto", devices: Devices = "auto"
) -> tuple[str, list[torch.device]]:
    """Return the device type and the devices of this node, with one device for each rank.

    Args:
        accelerator: as in `find_accelerator`.
        devices: how many (``2``, ``"2"``), which (``[0, 2]``, ``"0,2"``), all (``-1``, ``"-1"``), or ``"auto"``: all
            of an accelerator. On the CPU it is the number of processes; ``"auto"`` is one.

    Returns:
        ``("cuda", [cuda:0, cuda:2])``, ``("cpu", [cpu, cpu])``.

    Raises:
        MisconfigurationException: the accelerator is unknown, or a device does not exist.

    Example:
        >>> resolve_accelerator("cpu", 2)
        ('cpu', [device(type='cpu'), device(type='cpu')])
    """
    found = find_accelerator(accelerator)
    return found.device_type, found.get_parallel_devices(devices)


def carries(backend: str | None, kind: str) -> bool:
    """Return True if a backend of process groups can send tensors on a kind of device.

    Args:
        backend: as torch writes it: "gloo" or "cpu:gloo,cuda:nccl". None: the default backend of the kind.
        kind: type of the device: "cpu", "mps".
    """
    if not dist.is_available():
        return False
    if backend is None:
        backend = dist.Backend.default_device_backend_map.get(kind, "undefined")
    if ":" in backend:
        return any(entry.startswith(f"{kind}:") for entry in backend.split(","))
    return kind in dist.Backend.backend_capability.get(backend, ())


def _by_name(asked: object) -> Accelerator:
    """Return the accelerator for a name from ``ACCELERATORS``, or for the name of another device type of torch.

    Raises:
        MisconfigurationException: torch has no device of this name, or no module for it.
    """
    if isinstance(asked, str) and asked in ACCELERATORS:
        return _make(asked)
    try:
        # "meta" is a device of torch without memory, on which nothing can train.
        made = TorchAccelerator(torch.device(asked).type if isinstance(asked, str) and asked != "meta" else "")
        there = made.name == asked and all(
            hasattr(device_module(made.name), needed) for needed in ("is_available", "device_count")
        )
    except RuntimeError:  # no such device, or no module for it
        there = False
    if there:
        return made
    raise MisconfigurationException(
        f"accelerator={asked!r} is unknown: use 'auto', {', '.join(map(repr, ACCELERATORS))}, 'gpu', or the name of a "
        "device that a package adds to torch ('tpu' by torch_tpu; import it before you create the Trainer)"
    )


def _make(name: str) -> Accelerator:
    return ACCELERATORS[name]()


Devices = int | str | list[int] | tuple[int, ...]


def count_of(devices: object) -> int | None:
    """Return the integer that a value of ``devices`` such as ``2`` or ``"2"`` represents. Return None for other values.

    Lists and ``"0,2"``, for example, represent indices.
    """
    if isinstance(devices, str):
        try:
            return int(devices)
        except ValueError:
            return None
    return whole_number(devices)


def _named(devices: Devices, present: int) -> list[int]:
    """Return the device indices that a value of ``devices`` denotes; an empty list if the value is malformed."""
    count = -1 if devices == "auto" else count_of(devices)
    if count is not None:
        return list(range(present if count == -1 else count))
    if isinstance(devices, str):
        try:
            return [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            return []
    # MutableSequence includes the list classes of configs, such as omegaconf's ListConfig.
    return list(devices) if isinstance(devices, MutableSequence | tuple) else []


def indices_of(devices: Devices, present: int, kind: str) -> list[int]:
    """Return the device indices that ``devices`` selects from ``range(present)``.

    Raises:
        MisconfigurationException: the value is malformed, has duplicates, or an index does not exist.
    """
    indices = _named(devices, present)
    if not indices or any(type(index) is not int or index < 0 for index in indices):
        raise MisconfigurationException(
            f"devices={devices!r} is not valid: pass a number, a list such as [0, 2], a string such as '0,2', -1 for "
            "all devices, or 'auto'"
        )
    if len(set(indices)) < len(indices):
        raise MisconfigurationException(
            f"devices={devices!r} contains a device twice, but each device gets one rank: list each device once. To "
            "test several ranks on one card, use Trainer(accelerator=lockstep.testing.SharedCard(), devices=2)"
        )
    if max(indices) >= present:
        raise MisconfigurationException(
            f"devices={devices!r} was requested, but this machine has {present} {kind} device(s), numbered from 0: "
            f"use devices={present} or less, or -1 for all"
        )
    return indices
