"""Process groups in a rank's trace, with the number of collectives each has run and the device that queues them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.supervise.trace_memory import passed


class TracedGroup:
    """A process group in this rank's trace, or one backend of a group with several backends.

    Every backend counts its collectives, including collectives that bypass the trace. Torch's FSDP and checkpoints call
    some from C++. Numbers on two ranks are comparable if equal numbers of collectives bypassed the trace at the same
    places, which the notes record.

    Attributes:
        device: the device of the backend that counts; None if there is only one backend.
        queue: type of the device that queues the collectives, whose calls return early; "" if they are complete when
            their calls return.
        parts: the part of each backend by device type, if there are several.
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
        """Return how many collectives this backend of the group has run; None if the backend does not count them."""
        return sequence_of(group, self.device)

    def follow(self, group: Any) -> None:
        """Count the group's next collective, and record how many bypassed the trace since the last call."""
        sequence = group._get_sequence_number_for_group() if self.device is None else sequence_of(group, self.device)
        # another group, which does not count, at the address of a freed one
        if sequence is None:
            self.counts = self.whole = False
            return
        if sequence != self.sequence:
            self.passes(sequence - (self.sequence or 0))
        self.sequence = sequence + 1

    def passes(self, count: int) -> None:
        """Record that ``count`` collectives of the group have bypassed the trace since the last recorded one."""
        self.passed = passed(self.passed, self.number, count)


def sequence_of(group: Any, device: torch.device | None) -> int | None:
    """Return the number of collectives that a group (or its backend for ``device``) has run; None if it is unknown."""
    try:
        backend = group if device is None else group._get_backend(device)
        sequence: int = backend._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return None
    return sequence


def kinds_by_backend(group: Any) -> list[list[str]]:
    """Return the device types that a group supports, as one list for each of its backends."""
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
    """Return the device type that selects the backend for a call, in a group with several backends."""
    if "object" in name:
        return dist.distributed_c10d._get_object_coll_device(group)
    if name == "barrier":  # the same order as in torch
        if kwargs.get("device_ids"):
            return torch._C._get_accelerator().type
        bound = getattr(group, "bound_device_id", None)
        return dist.distributed_c10d._get_object_coll_device(group) if bound is None else bound.type
    for given in (*args, *kwargs.values()):
        first = given[0] if isinstance(given, list | tuple) and given else given
        if isinstance(first, Tensor):
            return first.device.type
    return "cpu"
