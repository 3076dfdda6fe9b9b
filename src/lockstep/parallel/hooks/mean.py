"""Hooks without a memory: the plain mean, and the mean in 16 bits on the wire.

Their state is the process group, or ``None`` for the default group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.exchange import Halves, coded_mean, real
from lockstep.parallel.hooks.lane import completed, submit


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
    each of the W - 1 sums on the way would be rounded too. (`lockstep.parallel.hooks.exchange` has the messages:
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
