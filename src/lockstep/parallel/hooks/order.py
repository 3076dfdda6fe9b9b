"""Hooks of others, called so that their messages go out in one order on all ranks.

A gloo group carries messages in the order in which a rank hands them over. torch's PowerSGD sends its second message
from one of gloo's threads when the first has arrived, at the same time as the backward sends the next bucket's first:
which of them is earlier is chance, and differs from rank to rank. NCCL has no such threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.identity import innermost, torch_name
from lockstep.parallel.hooks.lane import carrier, submit

Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]

_ONE_MESSAGE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "post_localSGD_hook", "noop_hook"}
_OWN = "lockstep.parallel.hooks."


def keeps_order(hook: Any) -> bool:
    """Whether ``hook`` may be called for a bucket while what it does for the last one is under way.

    That is so where it hands over all of its messages before it returns, or keeps them in order by itself: lockstep's
    hooks, those of torch's that send one message, and a hook with a true attribute ``overlaps``, which says so of
    itself; in wrappers too. Of others nothing is known: on gloo, they are called when the last future is done.
    """
    inner = innermost(hook)
    if getattr(hook, "overlaps", False) or getattr(inner, "overlaps", False):
        return True
    return str(getattr(inner, "__module__", "")).startswith(_OWN) or torch_name(inner) in _ONE_MESSAGE


def in_order(hook: Hook, group: comm.Group = None) -> Hook:
    """``hook``; but torch's PowerSGD, wrapped or not, so that it runs in a lane on gloo, beside the backward.

    Args:
        hook: a communication hook of anybody.
        group: the ranks, where ``hook``'s state does not name them.
    """
    if isinstance(hook, _InLane) or torch_name(innermost(hook)) != "powerSGD_hook":
        return hook
    return _InLane(hook, group)


class _InLane:
    """Runs torch's PowerSGD in a lane, over the lane's group."""

    overlaps = True

    def __init__(self, hook: Hook, group: comm.Group) -> None:
        self.wrapped_hook = hook
        self._group = group
        self._seen: dict[int, list[int]] = {}
        self._home: tuple[Any, comm.Group] | None = None
        self._own: comm.Group = None

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        if self._home is None or self._home[0] is not state:
            self._home = state, state.process_group  # read once: while the lane runs it is the lane's
        self._forget_others(state, bucket)
        home = self._home[1]
        group = self._group if home is None else home
        if not _one_by_one(group, bucket):
            return self.wrapped_hook(state, bucket)

        def run(own: comm.Group) -> Tensor:
            # One of gloo's threads still holds the group when the result is there; was it the last to let go of it, it
            # would wait for its own end, which aborts the process.
            self._own = own
            state.process_group = own
            try:
                return self.wrapped_hook(state, bucket).wait()
            finally:
                state.process_group = home

        return submit(group, bucket.buffer().device, run)

    def _forget_others(self, state: Any, bucket: GradBucket) -> None:
        """Drop what torch's state remembers of a bucket that held other parameters: it knows buckets by number only."""
        index, parameters = bucket.index(), [id(parameter) for parameter in bucket.parameters()]
        if self._seen.setdefault(index, parameters) != parameters:
            self._seen[index] = parameters
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.pop(index, None)


def _one_by_one(group: comm.Group, bucket: GradBucket) -> bool:
    return comm.world_size(group) > 1 and carrier(group, bucket.buffer().device) == "gloo"
