"""Communication hooks for the mean over ranks, plain or sent in 16 bits, and wrappers for other hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.transport import all_gather
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import Hook, completed, future_of, submit, tensor_of
from lockstep.ground import comm

# -- exchange ------------------------------------------------------------------------------------------------


def mean(flat: Tensor, group: comm.Group) -> None:
    """Overwrite ``flat`` (contiguous, real) with its mean over the ranks, by one all-reduce in its dtype."""
    world = comm.world_size(group)
    # divided before the sum, which could overflow in float16
    if world > 1:
        flat.mul_(1 / world)
        dist.all_reduce(flat, group=group)


def mean_in_halves(flat: Tensor, dtype: torch.dtype, group: comm.Group, owed: Tensor | None = None) -> None:
    """Overwrite ``flat`` with its mean over the ranks, sent in 16 bits and summed in float32.

    Args:
        flat: a 1-D tensor, real floating point, with the same length on all ranks.
        dtype: dtype that is sent: ``torch.float16`` or ``torch.bfloat16``. Numbers too large for it become infinite.
        group: process group of the ranks.
        owed: a float32 tensor with ``flat``'s length. It is overwritten with this rank's rounding errors: those of its
            numbers, and those of the slice of the mean that it computed. They are zero where the mean is not finite,
            since such a mean is not used.
    """
    if flat.numel() == 0:
        return
    world, rank, length = comm.world_size(group), comm.rank(group), flat.numel()
    numbers = -(-length // world)
    lacking = numbers * world - length
    rows = (torch.nn.functional.pad(flat, (0, lacking)) if lacking else flat).view(world, numbers)
    # rank r sums row r of all ranks, so each number is rounded once before the sum and the mean once after it
    message = rows.to(dtype)
    lost = rows.float() - message.float() if owed is not None else None
    arrived = message
    if world > 1:
        arrived = torch.empty_like(message)
        dist.all_to_all_single(_bytes(arrived), _bytes(message), group=group)
    total = arrived[0].float()
    for other in range(1, world):
        total += arrived[other].float()
    total.mul_(1 / world)
    message = total.to(dtype)
    if lost is not None:
        # times world: the error is added to one rank's gradient, which the next mean divides
        lost[rank] += (total - message.float()) * world
    arrived = message
    if world > 1:
        arrived = message.new_empty((world, numbers))
        all_gather(_bytes(arrived), _bytes(message), group).wait()
    flat.copy_(arrived.view(-1)[:length])
    if owed is not None and lost is not None:
        owed.copy_(lost.view(-1)[:length].where(flat.isfinite(), 0))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def real(tensor: Tensor) -> Tensor:
    """Return a 1-D real view of a tensor, with two numbers for each complex number."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor.view(-1)


# -- means ---------------------------------------------------------------------------------------------------


def allreduce(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over the ranks with one all-reduce in their dtype, as without a hook.

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
    """Average gradients over the ranks, sent as float16 (half the bytes of float32) and summed in float32.

    Each gradient is rounded once before it is sent, and the mean once after the sum; a 16-bit all-reduce would also
    round each of the W - 1 partial sums. There are two messages: slices all-to-all, then an all-gather of the slices
    of the mean. Values above 65504 become inf on all ranks.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any floating point dtype. Complex ones are sent as pairs of real numbers, and those of 16
            bits in their own dtype. float64 gradients have the precision of float16 afterwards.
    """
    return _in_halves(state, bucket, torch.float16)


def bf16(state: comm.Group, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over the ranks, sent as bfloat16 and summed in float32.

    Like `fp16`, with float32's range and 8 bits of precision.

    Args:
        state: the process group; ``None`` is the default group.
        bucket: gradients of any floating point dtype, as for `fp16`.
    """
    return _in_halves(state, bucket, torch.bfloat16)


def _in_halves(group: comm.Group, bucket: GradBucket, dtype: torch.dtype) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    flat = real(buffer)
    sent = flat.dtype if flat.element_size() == 2 else dtype

    def reduce(own: comm.Group) -> Tensor:
        mean_in_halves(flat, sent, own)
        return buffer

    return submit(group, buffer.device, reduce)


# -- wrappers ------------------------------------------------------------------------------------------------


def fp16_wrapper(hook: Hook) -> Hook:
    """Wrap a hook: cast gradients to float16 before the hook, and cast the hook's result back.

    A hook that sends its gradients as they are then sends half the bytes. `allreduce` in this wrapper also sums in
    float16, unlike `lockstep.engines.ddp.hooks.compress.fp16`.

    Args:
        hook: any communication hook.

    Returns:
        a hook with the same state.

    Raises:
        TypeError: when the hook runs, gradients are complex.

    Example::

        model.register_comm_hook(PowerSGDState(rank=4), fp16_wrapper(power_sgd))
    """
    return _wrap(hook, torch.float16)


def bf16_wrapper(hook: Hook) -> Hook:
    """Wrap a hook: cast gradients to bfloat16 before the hook, and the hook's result back. See `fp16_wrapper`."""
    return _wrap(hook, torch.bfloat16)


def _wrap(hook: Hook, dtype: torch.dtype) -> Hook:
    def wrapped(state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        if buffer.is_complex():
            raise TypeError(
                f"{wrapped.__qualname__}: the gradients are {buffer.dtype}, and no 16-bit dtype is complex. Use the "
                "hook fp16 or bf16, which sends pairs of real numbers"
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
