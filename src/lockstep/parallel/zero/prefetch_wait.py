"""Parameters that are on their way: whoever reads one waits for it, and only for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import Parameter

Arrive = Callable[[Iterable["Parameter | None"]], None]


class AwaitedParameters(dict[str, "Parameter | None"]):
    """A module's ``_parameters``: reading a value waits until it is there.

    Copies and pickles of it are plain dicts.
    """

    def __init__(self, parameters: dict[str, Parameter | None], arrive: Arrive) -> None:
        super().__init__(parameters)
        self._arrive = arrive

    def __getitem__(self, name: str) -> Parameter | None:
        parameter = dict.__getitem__(self, name)
        self._arrive((parameter,))
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter, when it is there."""
        return self[name] if name in self else default  # noqa: SIM401  # its own `__getitem__` waits

    def items(self) -> Any:
        """Names and parameters, when all are there."""
        self._arrive(dict.values(self))
        return dict.items(self)

    def values(self) -> Any:
        """The parameters, when all are there."""
        self._arrive(dict.values(self))
        return dict.values(self)

    def copy(self) -> dict[str, Parameter | None]:
        """A plain dict."""
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class AwaitedList(list[Parameter]):
    """The parameters of an optimizer's group: reading one waits until it is there. Copies of it are plain lists."""

    def __init__(self, parameters: Iterable[Parameter], arrive: Arrive) -> None:
        super().__init__(parameters)
        self._arrive = arrive

    def __iter__(self) -> Any:
        self._arrive(self.unawaited())
        return list.__iter__(self)

    def __getitem__(self, place: Any) -> Any:
        found = list.__getitem__(self, place)
        self._arrive(found if isinstance(place, slice) else (found,))
        return found

    def unawaited(self) -> list[Parameter]:
        """As they are; not to be read."""
        return list(list.__iter__(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class _BeforeForward:
    """A forward pre-hook that waits for the module's own parameters; a copy of it does nothing."""

    def __init__(self, parameters: Sequence[Parameter | None], arrive: Arrive) -> None:
        self._parameters, self._arrive = parameters, arrive

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._arrive(self._parameters)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Nothing, ()


class _Nothing:
    """What becomes of the hook in a copied or pickled module."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass


class Arrivals:
    """Has every module under ``module`` wait for its own parameters.

    Args:
        module: whose parameters are exchanged while others are already used.
        arrive: waits for those of the given parameters that are under way.
    """

    def __init__(self, module: nn.Module, arrive: Arrive) -> None:
        self._modules: list[nn.Module] = []
        self._hooks: list[Any] = []
        for owner in module.modules():
            if owner._parameters:
                parameters = tuple(owner._parameters.values())
                self._hooks.append(owner.register_forward_pre_hook(_BeforeForward(parameters, arrive), prepend=True))
                vars(owner)["_parameters"] = AwaitedParameters(owner._parameters, arrive)
                self._modules.append(owner)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()
        for owner in self._modules:
            vars(owner)["_parameters"] = dict(dict.items(owner._parameters))
        self._hooks, self._modules = [], []


def can_wait(module: nn.Module) -> bool:
    """Whether parameters of ``module`` can be waited for one by one: nothing in it is compiled, which would look
    at them without asking."""
    return not any(
        isinstance(part, torch.jit.ScriptModule)
        or getattr(part, "_compiled_call_impl", None) is not None
        or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )
