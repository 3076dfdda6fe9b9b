"""Methods in the place of others: replaced for a while, seen through, left behind by copies, compiled.

A compiled layer has another ``forward``; whether a module has such a layer is answered here, too. What a copy of a part
of a run has, in this process or in another one, is what a call of the Trainer leaves behind.
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
    """Give an object another attribute; when the stack is closed, it has its own again, or its class's.

    Args:
        end: puts back what was there.
        owner: the object.
        name: of the attribute.
        value: that it has meanwhile.
    """
    own = vars(owner)
    if name in own:
        end.callback(setattr, owner, name, own[name])
    else:
        end.callback(own.pop, name, None)
    setattr(owner, name, value)


def innermost(method: Any) -> Any:
    """The function behind a bound method, and behind whatever wraps it."""
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
    """The attributes of a part that its copies have; what `__getstate__` gives.

    Methods that a call has put in the place of the class's own, to measure them, stay behind: they work on this object.

    Args:
        part: the object.
        of_the_call: names of attributes that belong to the call that runs; they are None in a copy.
    """
    state = {name: value for name, value in vars(part).items() if not _stands_in(part, name, value)}
    return state | dict.fromkeys(state.keys() & set(of_the_call))


def _stands_in(part: object, name: str, value: object) -> bool:
    own = getattr(type(part), name, None)
    return callable(own) and callable(value) and str(getattr(value, "__module__", "")).startswith("lockstep.")


class CompiledForward:
    """Stands in the place of a layer's ``forward``, an attribute of the layer: hooks of the layer stay outside.

    A copy of the layer is compiled anew, when it is first called.

    Args:
        layer: whose forward it is.
        options: of ``torch.compile``.

    Attributes:
        own: a ``forward`` that the layer had been given before, beside that of its class.
    """

    def __init__(self, layer: nn.Module, options: Mapping[str, Any]) -> None:
        self.layer, self.options = layer, options
        self.own: Callable[..., Any] | None = vars(layer).get("forward")
        self._compiled: Callable[..., Any] | None = None

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a layer around this one is compiled, and takes it along
            return self._plain()(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self._plain(), **self.options)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}

    def put_back(self) -> None:
        """Let the layer have the ``forward`` that it had before."""
        if vars(self.layer).get("forward") is self:
            del vars(self.layer)["forward"]
            if self.own is not None:
                vars(self.layer)["forward"] = self.own

    def _plain(self) -> Callable[..., Any]:
        return self.own or type(self.layer).forward.__get__(self.layer)


def has_compiled(module: nn.Module) -> bool:
    """Whether a layer of a module is compiled: by the run, ``torch.compile``, ``Module.compile`` or ``torch.jit``.

    Code that watches a compiled layer, or its graph, sees nothing.
    """
    return any(is_compiled_layer(layer) for layer in module.modules())


def is_compiled_layer(layer: nn.Module) -> bool:
    """Whether this layer itself is compiled."""
    if isinstance(layer, torch.jit.ScriptModule) or type(layer).__name__ == "OptimizedModule":
        return True
    return getattr(layer, "_compiled_call_impl", None) is not None or _is_compiled(vars(layer).get("forward"))


def _is_compiled(forward: object) -> bool:
    while forward is not None:
        if isinstance(forward, CompiledForward):
            return True
        forward = getattr(forward, "own", None)  # of recomputation, which lies around it
    return False
