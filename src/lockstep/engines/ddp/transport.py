"""Transports that average buckets over the ranks, and flags that record which parameters have gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.bucket import ALIGNMENT, Bucket
from lockstep.ground import comm
from lockstep.ground.transfer import pinned

Size = tuple[int, torch.dtype, torch.device]
RoundGroup = Callable[[], "comm.Group | Literal[False]"]
"""Function that returns the group for the next gradient reduction; False if each rank keeps its own gradients."""


class Transport(Protocol):
    """Protocol of objects that sum a reducer's buckets over the ranks.

    The reducer makes these calls, in the same order on all ranks: `buffers` for each layout; in a round `start` for
    each bucket in order, during the backward, then `wait` for each; `close` at the end.

    Attributes:
        inline_used: True if the used flags may be at the end of a buffer and are summed with it.
        alignment: alignment of gradients in a buffer, in bytes.
        divides: True if gradients are divided before they are summed.
    """

    divides: bool
    inline_used: bool
    alignment: int

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor] | None:
        """Return a flat buffer of zeros for each bucket; None on all ranks if the transport cannot create buffers.

        Args:
            sizes: number of elements, dtype and device of each bucket.
        """
        ...

    def start(self, bucket: Bucket, scale: float) -> None:
        """Start summing ``bucket.flat``, multiplied by ``scale``, over the ranks.

        The buffer contains this rank's gradients; with ``scale`` 1 they are already divided.
        """
        ...

    def flush(self) -> None:
        """Wait until buckets passed to `start` send no further messages, so that other collectives may follow."""
        ...

    def wait(self, bucket: Bucket) -> None:
        """Wait until ``bucket.flat`` contains the sum over the ranks."""
        ...

    def close(self) -> None:
        """Release all resources. No method may be called afterwards."""
        ...


class AllReduce:
    """Transport with one asynchronous all-reduce per bucket."""

    divides = True
    inline_used = True
    alignment = ALIGNMENT

    def __init__(self, group: comm.Group) -> None:
        self._group = group

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor]:
        """Yield the buffers lazily, one by one."""
        return (torch.zeros(length, dtype=dtype, device=device) for length, dtype, device in sizes)

    def start(self, bucket: Bucket, scale: float) -> None:
        """Scale the buffer, and start its all-reduce."""
        if scale != 1:
            bucket.flat.mul_(scale)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """Do nothing, because `start` already starts all communication for a bucket."""

    def wait(self, bucket: Bucket) -> None:
        bucket.work.wait()

    def close(self) -> None:
        pass


def all_gather(flat: Tensor, part: Tensor, group: comm.Group) -> Any:
    """Start an all-gather of ``part`` into ``flat``, and return its handle. ``part`` may be a view of ``flat``."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    # as bytes: gloo does not support every dtype
    return call(flat.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)


# -- used parameters -----------------------------------------------------------------------------------------


_HOST = torch.device("cpu")


class Flags:
    """Asynchronous reduction of one-byte flags to their maximum over the ranks of ``group``.

    Only `maxima` waits for them. If the group carries CPU tensors, no device is involved.

    Args:
        flags: this rank's flags.
        group: process group of the ranks.
        device: the model's device, which sends the flags if the group does not support CPU tensors.

    Attributes:
        nbytes: bytes that this rank sends.
        work: the collective; None if there is no other rank.
    """

    def __init__(self, flags: bytes | bytearray, group: comm.Group, device: torch.device) -> None:
        self._flags = torch.tensor(list(flags), dtype=torch.uint8)
        self.nbytes = 0
        self.work: Any = None
        if flags and comm.world_size(group) > 1:
            by = comm.carrier(group, self._flags.device)
            if by.type != "cpu":
                # from pinned memory, so that this process does not wait for the backward's kernels
                by = device if device.type == by.type else by
                self._flags = pinned(self._flags, by).to(by, non_blocking=True)
            self.nbytes = self._flags.nbytes
            self.work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group, async_op=True)

    def maxima(self) -> list[int]:
        """Wait for the reduction, and return the maximum of each flag over the ranks."""
        if self.work is not None:
            self.work.wait()
        found: list[int] = self._flags.tolist()
        return found


class UsedParameters:
    """Asynchronous exchange over ``group`` of flags that mark the parameters with gradients.

    Args:
        buckets: all buckets of a gradient reduction, which were launched.
        willing: True if this rank can use this backward as the pattern of later ones.
        group: process group of the ranks.
        arrived: if ``willing``, names of the parameters that got gradients in this backward; other parameters have
            gradients from earlier backwards.
        device: device of the gradients.

    Attributes:
        nbytes: bytes that this rank sends.
        work: the collective; None if there is no other rank.
    """

    ARRIVED = 2
    """Flag for a gradient from this backward, if ``willing``; a gradient from an earlier backward has the flag 1."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        willing: bool,
        group: comm.Group,
        arrived: Collection[str] = (),
        device: torch.device = _HOST,
    ) -> None:
        self._own = [bytes(bucket.used) for bucket in buckets]
        # A rank that used everything and is not willing does not need the result. Reading it would make a GPU wait
        # for its whole backward, in each round.
        self._needs_result = willing or any(0 in used for used in self._own)
        flags = bytearray([not willing]) + b"".join(bucket.used for bucket in buckets)
        if willing and arrived:
            names = (name for bucket in buckets for name in bucket.names)
            flags[1:] = bytes(
                self.ARRIVED if flag and name in arrived else flag for flag, name in zip(flags[1:], names, strict=True)
            )
        self._waits = device.type == "cpu"  # so that a lost rank is reported where it is lost
        self._flags = Flags(flags, group, device)
        self.nbytes, self.work = self._flags.nbytes, self._flags.work

    def wait(self) -> tuple[list[Sequence[Any] | None], bool]:
        """Return (each bucket's flags as maxima over the ranks, True if every rank passed ``willing=True``)."""
        if not self._needs_result:
            if self._waits and self.work is not None:
                self.work.wait()
            return list(self._own), False
        unwilling, *found = self._flags.maxima()
        parts: list[Sequence[Any] | None] = []
        start = 0
        for own in self._own:
            parts.append(found[start : start + len(own)])
            start += len(own)
        return parts, not unwilling
