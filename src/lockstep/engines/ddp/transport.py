"""How a bucket's mean over the ranks is made: the seam, an all-reduce, and which parameters the ranks used."""

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
"""Gives the group of the round that begins; False where each rank keeps its own gradients."""


class Transport(Protocol):
    """What the reducer asks of whoever carries its buckets.

    Order of calls, by the reducer, alike on all ranks: `buffers` at each layout; in a round `start` for each
    bucket in order, from inside the backward, then `wait` for each; `close` at the end.

    Attributes:
        inline_used: whether the used flags may stand at a buffer's end and are summed with it.
        alignment: bytes at whose multiples a gradient starts in a buffer.
        divides: whether gradients are divided before they are summed.
    """

    divides: bool
    inline_used: bool
    alignment: int

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor] | None:
        """A flat buffer of zeros for each bucket; None, on all ranks, if they cannot be had."""
        ...

    def start(self, bucket: Bucket, scale: float) -> None:
        """``bucket.flat`` holds this rank's gradients, or (``scale`` 1) what is left of them after the division; begin
        to sum ``scale`` times them over the ranks."""
        ...

    def flush(self) -> None:
        """Return when no message of the buckets that were started will be begun any more, and others may be."""
        ...

    def wait(self, bucket: Bucket) -> None:
        """Return when ``bucket.flat`` holds that sum."""
        ...

    def close(self) -> None:
        """No bucket will come any more."""
        ...


class AllReduce:
    """One asynchronous all-reduce a bucket."""

    divides = True
    inline_used = True
    alignment = ALIGNMENT

    def __init__(self, group: comm.Group) -> None:
        self._group = group

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor]:
        """One by one, as they are asked for."""
        return (torch.zeros(length, dtype=dtype, device=device) for length, dtype, device in sizes)

    def start(self, bucket: Bucket, scale: float) -> None:
        """Scale, and hand over to the group."""
        if scale != 1:
            bucket.flat.mul_(scale)
        bucket.work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)

    def flush(self) -> None:
        """A message begins when its bucket is started."""

    def wait(self, bucket: Bucket) -> None:
        bucket.work.wait()

    def close(self) -> None:
        pass


def all_gather(flat: Tensor, part: Tensor, group: comm.Group) -> Any:
    """Begin to fill ``flat`` with all ranks' ``part``, which may be a part of it; gives the work to wait for."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    # as bytes: gloo does not know every dtype
    return call(flat.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True)


# -- who used what -------------------------------------------------------------------------------------------


_HOST = torch.device("cpu")


class Flags:
    """Flags of a byte for each of several things, on their way over ``group``; the largest of all ranks counts.

    Nobody waits for them but who asks. Where the host's tensors are carried they do not touch the device.

    Args:
        flags: this rank's.
        group: the ranks that are to agree.
        device: where the model is, by which flags travel where only devices send.

    Attributes:
        nbytes: what this rank sends.
        work: the collective; None where there is nobody to tell.
    """

    def __init__(self, flags: bytes | bytearray, group: comm.Group, device: torch.device) -> None:
        self._flags = torch.tensor(list(flags), dtype=torch.uint8)
        self.nbytes = 0
        self.work: Any = None
        if flags and comm.world_size(group) > 1:
            by = comm.carrier(group, self._flags.device)
            if by.type != "cpu":
                # from pinned memory, so that this process does not wait for the kernels of the backward
                by = device if device.type == by.type else by
                self._flags = pinned(self._flags, by).to(by, non_blocking=True)
            self.nbytes = self._flags.nbytes
            self.work = dist.all_reduce(self._flags, dist.ReduceOp.MAX, group, async_op=True)

    def of_all(self) -> list[int]:
        """The largest of each over the ranks."""
        if self.work is not None:
            self.work.wait()
        found: list[int] = self._flags.tolist()
        return found


class UsedParameters:
    """The used flags of all buckets of a round, one byte for each parameter, on their way over ``group``.

    Args:
        buckets: of the round, all launched.
        willing: whether this rank could hold later backwards to this one.
        group: the ranks that are to agree.
        arrived: names of the parameters to which this backward gave gradients, where ``willing``; other gradients were
            there before.
        device: of the gradients.

    Attributes:
        nbytes: what this rank sends.
        work: the collective; None where there is nobody to tell.
    """

    ARRIVED = 2
    """The flag of a gradient of this backward, where ranks are willing: that of an older one is 1, and MAX tells."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        willing: bool,
        group: comm.Group,
        arrived: Collection[str] = (),
        device: torch.device = _HOST,
    ) -> None:
        self._own = [bytes(bucket.used) for bucket in buckets]
        # A rank that used everything and is not willing knows what comes of it. A GPU would wait here for all of its
        # backward, in each round.
        self._looks = willing or any(0 in used for used in self._own)
        flags = bytearray([not willing]) + b"".join(bucket.used for bucket in buckets)
        if willing and arrived:
            names = (name for bucket in buckets for name in bucket.names)
            flags[1:] = bytes(
                self.ARRIVED if flag and name in arrived else flag for flag, name in zip(flags[1:], names, strict=True)
            )
        self._waits = device.type == "cpu"  # so that a lost rank is told where it is lost
        self._flags = Flags(flags, group, device)
        self.nbytes, self.work = self._flags.nbytes, self._flags.work

    def wait(self) -> tuple[list[Sequence[Any] | None], bool]:
        """For each bucket who got a gradient on any rank; and whether all ranks were willing."""
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
