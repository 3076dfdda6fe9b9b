"""Functions that replace methods temporarily, and the class that compiles a layer's ``forward``.

This file also checks if a module has compiled layers, and selects the attributes that copies of an object keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn


def replace_until(end: ExitStack, owner: object, name: str, value: object) -> None:
    """Replace an attribute of an object. Closing the exit stack ``end`` restores the former attribute.

    Args:
        end: restores the attribute.
        owner: the object.
        name: name of the attribute.
        value: the temporary value.
    """
    own = vars(owner)
    if name in own:
        end.callback(setattr, owner, name, own[name])
    else:
        end.callback(own.pop, name, None)
    setattr(owner, name, value)


def innermost(method: Any) -> Any:
    """Return the plain function inside a bound method, a `partial`, a mock or a decorated function."""
    while True:
        if isinstance(method, partial):
            method = method.func
        elif getattr(method, "_mock_wraps", None) is not None:
            method = method._mock_wraps
        elif hasattr(method, "__func__"):
            method = method.__func__
        elif hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        else:
            return method


def kept(part: object, *of_the_call: str) -> dict[str, Any]:
    """Return the attributes of an object that are copied and pickled, as the result of its `__getstate__`.

    Methods that the running Trainer call has replaced, to measure them, are omitted, because they refer to this object.

    Args:
        part: the object.
        of_the_call: names of attributes that belong to the running Trainer call; they are None in a copy.
    """
    state = dict(vars(part))
    for name, value in vars(part).items():
        is_method = callable(getattr(type(part), name, None)) and callable(value)
        if is_method and str(getattr(value, "__module__", "")).startswith("lockstep."):
            del state[name]
    return state | dict.fromkeys(state.keys() & set(of_the_call))


class CompiledForward:
    """Replacement for a layer's ``forward`` that runs a compiled version. The layer's hooks are not compiled.

    A copy of the layer is compiled again at its first call.

    Args:
        layer: the layer.
        options: options of ``torch.compile``.

    Attributes:
        own: a ``forward`` that was assigned to the layer earlier, or None.
    """

    def __init__(self, layer: nn.Module, options: Mapping[str, Any]) -> None:
        self.layer, self.options = layer, options
        self.own: Callable[..., Any] | None = vars(layer).get("forward")
        self._compiled: Callable[..., Any] | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # an outer layer is being compiled, and includes this one
            return self._plain()(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._plain(), **self.options)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}

    def put_back(self) -> None:
        """Restore the layer's original ``forward``."""
        if vars(self.layer).get("forward") is self:
            del vars(self.layer)["forward"]
            if self.own is not None:
                vars(self.layer)["forward"] = self.own

    def _plain(self) -> Callable[..., Any]:
        return self.own or type(self.layer).forward.__get__(self.layer)


def has_compiled(module: nn.Module) -> bool:
    """Return True if any layer of a module has been compiled, by lockstep, ``torch.compile`` or ``torch.jit``.

    Hooks and modes that observe the module cannot see into a compiled layer.
    """
    return any(is_compiled_layer(layer) for layer in module.modules())


def is_compiled_layer(layer: nn.Module) -> bool:
    """Return True if the layer itself is compiled. Compiled layers inside the layer do not count."""
    if isinstance(layer, torch.jit.ScriptModule) or type(layer).__name__ == "OptimizedModule":
        return True
    if getattr(layer, "_compiled_call_impl", None) is not None:  # torch.compile in place, `layer.compile()`
        return True
    forward = vars(layer).get("forward")
    while forward is not None and not isinstance(forward, CompiledForward):
        forward = getattr(forward, "own", None)  # recomputation wraps it
    return forward is not None
