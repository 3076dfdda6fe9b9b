"""Means over ranks, plain or with fewer bytes on the wire: the exchange, hooks without a memory, and wrappers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.ordering import completed, submit
from lockstep.parallel.hooks.torch_hooks import future_of, tensor_of

# -- exchange ------------------------------------------------------------------------------------------------


CHUNK = 256
"""Numbers that share a scale in `Bytes`."""


class Code(Protocol):
    """How numbers travel: rows of numbers to rows of bytes, and back."""

    def encode(self, rows: Tensor) -> Tensor:
        """``rows``: 2-D, floating point. Returns 2-D uint8, a row a row."""
        ...

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        """The ``numbers`` numbers of each row, in float32."""
        ...


class Halves:
    """Two bytes a number.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``. What is too large for it becomes infinite.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, rows: Tensor) -> Tensor:
        """Rounded to the 16-bit type."""
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        """Exact."""
        return message.view(self._dtype).to(torch.float32)


class Bytes:
    """One byte a number and a float32 scale for each `CHUNK` of them: 0.254 of float32.

    A chunk's scale is its largest absolute value over 127; numbers are rounded to the nearest of its 255 multiples. A
    chunk that holds inf or NaN arrives as inf and NaN.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """Scales first, then the rounded multiples."""
        count, numbers = rows.shape
        chunks = _chunks(rows.float())
        scales = chunks.abs().amax(dim=2) / 127
        codes = (chunks / scales.masked_fill(scales == 0, 1).unsqueeze(2)).round_().clamp_(-127, 127)
        codes = codes.nan_to_num_(0).to(torch.int8).view(count, -1)[:, :numbers]
        return torch.cat([scales.view(torch.uint8), codes.contiguous().view(torch.uint8)], dim=1)

    def decode(self, message: Tensor, numbers: int) -> Tensor:
        """Multiples times scales."""
        count = message.shape[0]
        bytes_of_scales = -(-numbers // CHUNK) * 4
        scales = message[:, :bytes_of_scales].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = message[:, bytes_of_scales:].contiguous().view(torch.int8).float()
        return (_chunks(codes) * scales.unsqueeze(2)).view(count, -1)[:, :numbers]


def _chunks(rows: Tensor) -> Tensor:
    """``rows`` in chunks, the last filled up with zeros."""
    count, numbers = rows.shape
    lacking = -numbers % CHUNK
    if lacking:
        rows = torch.nn.functional.pad(rows, (0, lacking))
    return rows.reshape(count, -1, CHUNK)


def mean(flat: Tensor, group: comm.Group) -> None:
    """Overwrite ``flat`` (contiguous, real) with its mean over the ranks; one all-reduce in its dtype."""
    world = comm.world_size(group)
    if world > 1:
        flat.mul_(1 / world)
        dist.all_reduce(flat, group=group)


def coded_mean(flat: Tensor, code: Code, group: comm.Group, error: Tensor | None = None) -> None:
    """Overwrite ``flat`` with its mean over the ranks, which travels as ``code`` says.

    Args:
        flat: 1-D, real floating point, of the same length on all ranks.
        code: what is sent.
        group: the ranks.
        error: what rounding took away so far and is owed to the mean, of ``flat``'s length, in float32; it is added
            to ``flat`` first, and holds what is owed now afterwards. The errors of all ranks together make good for
            both roundings: that of a rank's own numbers, and that of the mean, which the rank that made it keeps.
            Where the mean is not finite the error stays as it was: nobody will use that mean.
    """
    if flat.numel() == 0:
        return
    world, rank, length = comm.world_size(group), comm.rank(group), flat.numel()
    numbers = -(-length // world)
    if error is not None:
        flat.add_(error)
    rows = flat if numbers * world == length else torch.nn.functional.pad(flat, (0, numbers * world - length))
    rows = rows.view(world, numbers)
    message = code.encode(rows)
    owed = None if error is None else rows.float() - code.decode(message, numbers)
    arrived = message
    if world > 1:
        arrived = torch.empty_like(message)
        dist.all_to_all_single(arrived, message, group=group)
    total = code.decode(arrived[:1], numbers)
    for other in range(1, world):
        total += code.decode(arrived[other : other + 1], numbers)
    total.mul_(1 / world)
    message = code.encode(total)
    if owed is not None:
        owed[rank] += (total - code.decode(message, numbers)).view(-1) * world
    if world > 1:
        arrived = message.new_empty((world, message.shape[1]))
        _all_gather(arrived, message, group)
    else:
        arrived = message
    flat.copy_(code.decode(arrived, numbers).reshape(-1)[:length])
    if error is not None and owed is not None:
        torch.where(flat.isfinite(), owed.view(-1)[:length], error, out=error)


def _all_gather(gathered: Tensor, tensor: Tensor, group: comm.Group) -> None:
    # the second name is deprecated where there is the first
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered.view(-1), tensor.view(-1), group=group)


def real(tensor: Tensor) -> Tensor:
    """A 1-D tensor's numbers as real ones, in place: two for each complex one."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)


# -- means ---------------------------------------------------------------------------------------------------


def allreduce(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over the ranks, by one all-reduce in the gradients' dtype: what is done without a hook.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any dtype.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(None, allreduce)
    """
    buffer, world = bucket.buffer(), comm.world_size(state)
    if world == 1:
        return completed(buffer)
    flat = real(buffer)
    flat.mul_(1 / world)
    return dist.all_reduce(flat, group=state, async_op=True).get_future().then(lambda _: buffer)


def fp16(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, sent as float16 and summed in float32: half the bytes of float32.

    Each gradient is rounded once before it is sent, and the mean once after it was summed; with a 16-bit all-reduce
    each of the W - 1 sums on the way would be rounded too. (`lockstep.parallel.hooks.compress` has the messages:
    slices all-to-all, then an all-gather of the slices of the mean.) What is above 65504 arrives as inf, on all ranks.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any floating point dtype; complex ones travel as pairs of real numbers, and those of 16
            bits as they are. float64 has the precision of float16 afterwards.
    """
    return _in_halves(state, bucket, torch.float16)


def bf16(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, sent as bfloat16 and summed in float32: as `fp16`, with float32's range and 8 bits of precision."""
    return _in_halves(state, bucket, torch.bfloat16)


def _in_halves(group: comm.Group, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    flat = real(buffer)
    code = Halves(flat.dtype if flat.element_size() == 2 else dtype)

    def reduce(own: comm.Group) -> Tensor:
        coded_mean(flat, code, own)
        return buffer

    return submit(group, buffer.device, reduce)


# -- wrappers ------------------------------------------------------------------------------------------------


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


def fp16_wrapper(hook: Hook) -> Hook:
    """``hook``, called with the gradients cast to float16, its result cast back.

    A hook that sends what it is given sends half the bytes. `allreduce` in this wrapper sums in float16 on the way
    (with NCCL; gloo does too), which `lockstep.parallel.hooks.compress.fp16` does not.

    Args:
        hook: any communication hook.

    Returns:
        A hook with the same state.

    Example::

        model.register_comm_hook(PowerSGDState(rank=4), fp16_wrapper(power_sgd))
    """
    return _wrapped(hook, torch.float16)


def bf16_wrapper(hook: Hook) -> Hook:
    """``hook``, called with the gradients cast to bfloat16, its result cast back: as `fp16_wrapper`."""
    return _wrapped(hook, torch.bfloat16)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    def wrapped(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():
            raise TypeError(
                f"{wrapped.__qualname__}: the gradients are {buffer.dtype}, and no 16-bit dtype is complex; take the "
                "hooks fp16, bf16 or int8, which send pairs of real numbers"
            )
        narrow = buffer.to(dtype)
        starts = [gradient.storage_offset() - buffer.storage_offset() for gradient in bucket.gradients()]
        parts = [
            narrow.as_strided(gradient.shape, gradient.stride(), start)
            for gradient, start in zip(bucket.gradients(), starts, strict=True)
        ]
        small = GradBucket(bucket.index(), narrow, parts, bucket.parameters(), bucket.is_last(), bucket.absent)

        def widen(future: torch.futures.Future[Any]) -> Tensor:
            return buffer.copy_(tensor_of(future.value(), small, hook))

        return future_of(hook(state, small), hook).then(widen)

    wrapped.wrapped_hook = hook  # type: ignore[attr-defined]
    name = f"{'fp16' if dtype is torch.float16 else 'bf16'}_wrapper({getattr(hook, '__qualname__', hook)})"
    wrapped.__qualname__ = wrapped.__name__ = name
    return wrapped
