"""What a communication hook must give back, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.identity import name_of

EXAMPLE = (
    "return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()"
    ".then(lambda done: bucket.buffer())"
)


def future_of(returned: Any, hook: Any) -> torch.futures.Future[Any]:
    """What ``hook`` returned, if it is a future.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(returned, torch._C.Future):
        return returned  # type: ignore[return-value]
    raise TypeError(
        f"rank {comm.rank()}: the communication hook {name_of(hook)} returned {type(returned).__name__}; it must "
        f"return a torch.futures.Future of the reduced gradients, as in `{EXAMPLE}`"
    )


def tensor_of(value: Any, bucket: GradBucket, hook: Any) -> Tensor:
    """The reduced gradients in a future's value, 1-D.

    Args:
        value: what the future of ``hook`` holds: a tensor of the bucket's size, or a list of one. Its dtype may be
            another, as torch's wrappers leave it.
        bucket: what ``hook`` was given.
        hook: who gave ``value``.

    Raises:
        TypeError: no tensor, or one of another size, another device, or of whole numbers; one of real numbers for
            complex gradients, whose imaginary parts would be lost.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    buffer = bucket.buffer()
    who = f"rank {comm.rank()}: the future of the communication hook {name_of(hook)} holds {_described(value)}"
    wanted = f"for bucket {bucket.index()} it must hold {_described(buffer)}, as in `{EXAMPLE}`"
    if not isinstance(value, Tensor):
        raise TypeError(f"{who}; {wanted}")
    numbers = value.is_floating_point() or value.is_complex()
    fits = value.numel() == buffer.numel() and value.device == buffer.device and numbers and not value.is_sparse
    if not fits or value.is_complex() != buffer.is_complex():
        raise TypeError(f"{who}; {wanted}")
    return value.detach().reshape(-1)


def _described(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of {thing.numel()} elements ({thing.dtype} on {thing.device})"
    if isinstance(thing, (list, tuple)):
        return f"a {type(thing).__name__} of {len(thing)}"
    return "None" if thing is None else f"a {type(thing).__name__}"
