"""Process groups as a rank's trace of collectives knows them: who counts what they make, and where a call returns."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.supervise.trace_memory import passed


class TracedGroup:
    """A process group as this rank has used it, or of one with several backends what one of them carries.

    Every backend counts its collectives by itself, those too that do not come by the gate: torch's FSDP and
    checkpoints call some from C++. Numbers of ranks may be compared where the same has passed by the gate at the same
    places on both: the notes say what has.

    Attributes:
        device: the device whose backend counts; None: there is one backend.
        queue: the type of the device in whose queue collectives are when their calls return; "": there is none, they
            are complete then.
        parts: where there are several backends, what each carries, by the type of the device.
    """

    __slots__ = ("counts", "device", "number", "parts", "passed", "queue", "sequence", "whole", "word")

    def __init__(
        self, word: int, sequence: int | None, whole: bool, queue: str, device: torch.device | None = None
    ) -> None:
        self.word = word
        self.number = 0
        self.passed = 0
        self.counts = sequence is not None
        self.sequence = sequence
        self.whole = self.counts
        self.queue = queue
        self.device = device
        self.parts: dict[str, TracedGroup] = {}
        if sequence and not whole:
            self.passes(sequence)

    def sequence_of(self, group: Any) -> Any:
        """How many collectives the backend has counted."""
        return sequence_of(group, self.device)

    def follow(self, group: Any) -> None:
        """A collective is about to be made: note what the backend has counted since the last one, and count this."""
        sequence = group._get_sequence_number_for_group() if self.device is None else sequence_of(group, self.device)
        if sequence is None:  # another group, which does not count, at the address of one that is gone
            self.counts = self.whole = False
            return
        if sequence != self.sequence:
            self.passes(sequence - (self.sequence or 0))
        self.sequence = sequence + 1

    def passes(self, count: int) -> None:
        """So many have not come by the gate, since the last one that has."""
        self.passed = passed(self.passed, self.number, count)


def sequence_of(group: Any, device: torch.device | None) -> int | None:
    """How many collectives a group has made, or its backend for a device; None where nobody counts."""
    try:
        backend = group if device is None else group._get_backend(device)
        sequence: int = backend._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    return sequence


def kinds_by_backend(group: Any) -> list[list[str]]:
    """Types of devices that a group carries, those together that one backend carries."""
    found: list[tuple[Any, list[str]]] = []
    try:
        for device in group._device_types:
            backend = group._get_backend(device)
            kinds = next((kinds for other, kinds in found if other is backend), None)
            if kinds is None:
                kinds = []
                found.append((backend, kinds))
            kinds.append(device.type)
    except (AttributeError, RuntimeError):
        return []
    return [kinds for _, kinds in found]


def kind_of_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> str:
    """The type of the device whose backend carries a call, of a group with several."""
    if "object" in name:
        return dist.distributed_c10d._get_object_coll_device(group)
    if name == "barrier":  # torch asks in this order
        if kwargs.get("device_ids"):
            return torch._C._get_accelerator().type
        bound = getattr(group, "bound_device_id", None)
        return dist.distributed_c10d._get_object_coll_device(group) if bound is None else bound.type
    for given in (*args, *kwargs.values()):
        first = given[0] if isinstance(given, list | tuple) and given else given
        if isinstance(first, Tensor):
            return first.device.type
    return "cpu"
