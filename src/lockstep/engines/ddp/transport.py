"""Transports that average buckets over the ranks: the protocol, an all-reduce, and flags for used parameters."""

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
"""Returns the group of the round that starts; False if each rank keeps its own gradients."""


class Transport(Protocol):
    """Protocol of the objects that carry a reducer's buckets.

    Order of calls by the reducer, the same on all ranks: `buffers` at each layout; in a round `start` for each
    bucket in order, during the backward, then `wait` for each; `close` at the end.

    Attributes:
        inline_used: True if the used flags may be at the end of a buffer and are summed with it.
        alignment: alignment of gradients in a buffer, in bytes.
        divides: True if gradients are divided before they are summed.
    """

    divides: bool
    inline_used: bool
    alignment: int

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor] | None:
        """Return a flat buffer of zeros for each bucket; None, on all ranks, if that is impossible."""
        ...

    def start(self, bucket: Bucket, scale: float) -> None:
        """Start to sum ``bucket.flat`` times ``scale`` over the ranks.

        The buffer has this rank's gradients; with ``scale`` 1 they are already divided.
        """
        ...

    def flush(self) -> None:
        """Wait until the started buckets will send no further messages, so that others may be sent."""
        ...

    def wait(self, bucket: Bucket) -> None:
        """Wait until ``bucket.flat`` has the sum."""
        ...

    def close(self) -> None:
        """Release all resources: no bucket will follow."""
        ...


class AllReduce:
    """Transport with one asynchronous all-reduce per bucket."""

    divides = True
    inline_used = True
    alignment = ALIGNMENT

    def __init__(self, group: comm.Group) -> None:
        self._group = group

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor]:
        """Yield the buffers one by one, as they are requested."""
        return (torch.zeros(length, dtype=dtype, device=device) for length, dtype, device in sizes)

    def start(self, bucket: Bucket, scale: float) -> None:
        """Scale the buffer, and start its all-reduce."""
        if scale != 1:
            bucket.flat.mul_(scale)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """Do nothing: messages are sent when a bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        bucket.work.wait()

    def close(self) -> None:
        pass


def all_gather(flat: Tensor, part: Tensor, group: comm.Group) -> Any:
    """Start to fill ``flat`` with all ranks' ``part``, which may be a part of it; return the work to wait for."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    # as bytes: gloo does not support every dtype
    return call(flat.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)


# -- who used what -------------------------------------------------------------------------------------------


_HOST = torch.device("cpu")


class Flags:
    """One byte for each of several flags, on their way over ``group``; the maximum over the ranks counts.

    Only `of_all` waits for them. If the group carries CPU tensors, no device is involved.

    Args:
        flags: this rank's flags.
        group: the ranks that agree.
        device: the model's device, which carries the flags if only devices can send.

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

    def of_all(self) -> list[int]:
        """Wait, and return the maximum of each flag over the ranks."""
        if self.work is not None:
            self.work.wait()
        found: list[int] = self._flags.tolist()
        return found


class UsedParameters:
    """The used flags of all buckets of a round, one byte for each parameter, on their way over ``group``.

    Args:
        buckets: the buckets of the round, all launched.
        willing: True if this rank can use this backward as the pattern of later ones.
        group: the ranks that agree.
        arrived: names of the parameters that got gradients in this backward, if ``willing``; other gradients are
            older.
        device: device of the gradients.

    Attributes:
        nbytes: bytes that this rank sends.
        work: the collective; None if there is no other rank.
    """

    ARRIVED = 2
    """Flag of a gradient of this backward, if ranks are willing; an older one's is 1, and the maximum counts."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        willing: bool,
        group: comm.Group,
        arrived: Collection[str] = (),
        device: torch.device = _HOST,
    ) -> None:
        self._own = [bytes(bucket.used) for bucket in buckets]
        # A rank that used everything and is not willing knows the result. Reading it would make a GPU wait for its
        # whole
        # backward, in each round.
        self._looks = willing or any(0 in used for used in self._own)
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
        """Return the used flags of all ranks for each bucket, and True if all ranks were willing."""
        if not self._looks:
            if self._waits and self.work is not None:
                self.work.wait()
            return list(self._own), False
        unwilling, *found = self._flags.of_all()
        parts: list[Sequence[Any] | None] = []
        start = 0
        for own in self._own:
            parts.append(found[start : start + len(own)])
            start += len(own)
        return parts, not unwilling
