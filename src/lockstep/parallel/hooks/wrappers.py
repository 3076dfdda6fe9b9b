"""Wrappers: a hook that gets its gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.result import future_of, tensor_of

Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]


def fp16_wrapper(hook: Hook) -> Hook:
    """``hook``, called with the gradients cast to float16, its result cast back.

    A hook that sends what it is given sends half the bytes. `allreduce` in this wrapper sums in float16 on the way
    (with NCCL; gloo does too), which `lockstep.parallel.hooks.mean.fp16` does not.

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
