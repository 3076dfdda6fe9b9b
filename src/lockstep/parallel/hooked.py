"""A communication hook in the place of the all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lockstep.ground import comm
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.order import in_order, keeps_order
from lockstep.parallel.hooks.result import future_of, tensor_of
from lockstep.parallel.transport import AllReduce


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
        buckets: how many buckets a round has at the moment.
    """

    divides = False
    inline_marks = False
    alignment = 1  # as torch lays gradients out: a hook may rely on there being no gaps

    def __init__(self, group: comm.Group, state: Any, hook: Callable[..., Any], buckets: Callable[[], int]) -> None:
        super().__init__(group)
        self._state, self._hook, self._buckets = state, in_order(hook, group), buckets
        self._shown: dict[int, GradBucket] = {}
        self._one_by_one = comm.world_size(group) > 1 and "gloo" in dist.get_backend_config(group)
        self._one_by_one = self._one_by_one and not keeps_order(self._hook)
        self._last: Any = None

    def start(self, bucket: Bucket, scale: float) -> None:
        """Call the hook."""
        if bucket.is_sparse:
            super().start(bucket, 1 / comm.world_size(self._group))
            return
        self.flush()
        last = bucket.index + 1 == self._buckets()
        shown = GradBucket(bucket.index, bucket.buffer, bucket.views, bucket.parameters, last)
        self._shown[bucket.index] = shown
        bucket.work = self._last = future_of(self._hook(self._state, shown), self._hook)

    def flush(self) -> None:
        """Return when the hooks called so far have started all the collectives that they will."""
        if self._one_by_one and self._last is not None:
            self._last.wait()

    def wait(self, bucket: Bucket) -> None:
        """Wait for what the hook promised, and take it into the buffer."""
        value = bucket.work.wait()
        if bucket.is_sparse:
            return
        self._last = None
        result = tensor_of(value, self._shown.pop(bucket.index), self._hook)
        if result.data_ptr() != bucket.buffer.data_ptr():
            bucket.buffer.copy_(result)
