"""Which hook a hook is, below its wrappers, and whether it is one of torch's: told by names, nothing is imported."""

from __future__ import annotations

import functools
from typing import Any

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
