"""A communication hook in the place of the all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.callbacks import CallbackErrors
from lockstep.parallel.hooks.ordering import carrier, completed, in_order, keeps_order
from lockstep.parallel.hooks.torch_hooks import future_of, tensor_of
from lockstep.parallel.transport import AllReduce, Size


class Hooked(AllReduce):
    """A communication hook in place of the all-reduce: it gets the gradients as they are, and divides itself.

    On gloo, what a hook does in a future's callback runs in a thread of its own, at a moment of chance; a hook that
    starts another collective there (torch's PowerSGD) would start those of two buckets in one order here and in
    another there. So a bucket's hook is called when the last bucket's future is done, unless the hook says
    ``overlaps = True``: it starts all its collectives before it returns.

    Args:
        group: the ranks.
        state: the hook's first argument.
        hook: ``(state, GradBucket) -> Future`` of a tensor of the buffer's size (or a list of one).
        buckets: those of a round at the moment; sparse gradients, the last ones, travel as they are.
        over: the group of the round, for those; False where it is left to each rank.
    """

    divides = False
    inline_marks = False
    alignment = 1  # as torch lays gradients out: a hook may rely on there being no gaps

    def __init__(
        self,
        group: comm.Group,
        state: Any,
        hook: Callable[..., Any],
        buckets: Callable[[], Sequence[Bucket]],
        over: Callable[[], comm.Group | Literal[False]],
    ) -> None:
        super().__init__(group)
        self._state, self._hook, self._buckets, self._over = state, in_order(hook, group), buckets, over
        self._shown: dict[int, GradBucket] = {}
        self._one_by_one = False
        self._last: Any = None
        self._error: Exception | None = None
        self._callbacks = CallbackErrors()

    def buffers(self, sizes: list[Size]) -> list[Tensor]:
        """Tensors of this process."""
        several = comm.world_size(self._group) > 1 and not keeps_order(self._hook)
        self._one_by_one = several and any(carrier(self._group, device) == "gloo" for _, _, device in sizes)
        return super().buffers(sizes)

    def start(self, bucket: Bucket, scale: float) -> None:
        """Call the hook. What it raises, `flush` and `wait` raise, when the backward has ended."""
        if self._error is not None:
            return
        if bucket.is_sparse:
            self._start_sparse(bucket)
            return
        following = self._buckets()[bucket.index + 1 :]
        last = not following or following[0].is_sparse
        absent = () if 0 not in bucket.used else [place for place, used in enumerate(bucket.used) if not used]
        shown = GradBucket(bucket.index, bucket.buffer, bucket.views, bucket.parameters, last, absent)
        self._shown[bucket.index] = shown
        try:
            self.flush()
            self._callbacks.raise_error()  # of the last round, too
            with self._callbacks.heard():
                returned = self._hook(self._state, shown)
            bucket.work = self._last = future_of(returned, self._hook)
        except Exception as error:
            self._error = error

    def _start_sparse(self, bucket: Bucket) -> None:
        group = self._over()
        if group is False or comm.world_size(group) == 1:
            bucket.work = completed(bucket.flat)
            return
        bucket.flat.mul_(1 / comm.world_size(group))
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    def flush(self) -> None:
        """Return when the hooks called so far have started all the collectives that they will."""
        if self._error is not None:
            raise self._error
        if self._one_by_one and self._last is not None:
            self._callbacks.wait(self._last)

    def wait(self, bucket: Bucket) -> None:
        """Wait for what the hook promised, and take it into the buffer."""
        if self._error is not None:
            raise self._error
        if bucket.is_sparse:
            bucket.work.wait()
            return
        value = self._callbacks.wait(bucket.work)
        self._last = None
        result = tensor_of(value, self._shown.pop(bucket.index), self._hook)
        if result.data_ptr() != bucket.buffer.data_ptr():
            bucket.buffer.copy_(result)
