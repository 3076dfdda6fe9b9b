"""Hooks of torch and of users: which hook one is, below its wrappers, and what it must give back."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.ground import comm
from lockstep.parallel.grad_bucket import GradBucket

TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_TORCH_WRAPPERS = ("fp16_compress_wrapper_hook", "bf16_compress_wrapper_hook")


def innermost(hook: Any) -> Any:
    """The hook inside of fp16 and bf16 wrappers (torch's and lockstep's) and ``functools.partial``."""
    while True:
        inside = getattr(hook, "wrapped_hook", None)
        if inside is None and isinstance(hook, functools.partial):
            inside = hook.func
        if inside is None and torch_name(hook) in _TORCH_WRAPPERS:
            names = hook.__code__.co_freevars
            inside = hook.__closure__[names.index("hook")].cell_contents
        if inside is None:
            return hook
        hook = inside


def torch_name(thing: Any) -> str | None:
    """The name of a hook, or of the class of a hook's state, of torch's; None if it is not torch's.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> torch_name(fp16_compress_hook)
        'fp16_compress_hook'
        >>> torch_name(print) is None
        True
    """
    home = getattr(thing, "__module__", None)
    if not isinstance(home, str) or not home.startswith(TORCH_HOOKS):
        return None
    return getattr(thing, "__name__", None) or type(thing).__name__


def name_of(hook: Any) -> str:
    """What a hook is called in messages."""
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


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
