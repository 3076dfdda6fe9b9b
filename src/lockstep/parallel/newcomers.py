"""Parameters that come into a model after it has been wrapped, or become others in its place."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from functools import cache

from torch import nn
from torch.nn.modules import module as registration
from torch.nn.parameter import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.parallel.bucket import Bucket


class Newcomers:
    """Notices parameters that come into ``module`` from now on; costs nothing in a forward.

    Args:
        module: the model.
        ignored: names that may come.

    Attributes:
        found: name of the first parameter that came, below the submodule that got it; None while none has.
        changed: whether submodules have come.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self.found: str | None = None
        self.changed = False
        self._names = weakref.WeakKeyDictionary({part: name for name, part in module.named_modules()})
        # weakly: the id of one that is gone may be a newcomer's
        known = {parameter: name for name, parameter in module.named_parameters() if name not in self._ignored}
        self._known = WeakIdKeyDictionary(known)
        _hear()
        _watching.add(self)

    def _parameter_comes(self, module: nn.Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and parameter not in self._known and module in self._names:
            self._note(f"{self._names[module]}.{name}".lstrip("."))

    def _module_comes(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is None or module not in self._names:
            return
        self.changed = True
        for inner, submodule in part.named_modules(prefix=f"{self._names[module]}.{name}".lstrip(".")):
            self._names[submodule] = inner
        for inner, parameter in part.named_parameters():
            if parameter not in self._known:
                self._note(f"{self._names[part]}.{inner}")

    def _note(self, name: str) -> None:
        if not self.found and name not in self._ignored:
            self.found = name


def find_changed(frozen: Mapping[str, Parameter], newcomers: Newcomers | None) -> str | None:
    """Whose gradient would not be averaged, if anybody's: a sentence without its beginning, the rank.

    Args:
        frozen: parameters that were so when the model was wrapped.
        newcomers: those since then; None where nobody minds.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            return (
                f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now: wrap the model "
                "with the parameter unfrozen (requires_grad may be switched off, and on again, afterwards), or wrap it "
                "again now"
            )
    if newcomers is not None and newcomers.found is not None:
        return (
            f"parameter {newcomers.found!r} was added to the model after it was wrapped, and its gradient would not be "
            "averaged: add it before, or wrap model.module again"
        )
    return None


def find_cast(buckets: Iterable[Bucket]) -> str | None:
    """Which parameter no longer fits into its bucket, if any: a sentence without its beginning, the rank."""
    for bucket in buckets:
        for name, parameter, view in zip(bucket.names, bucket.parameters, bucket.views, strict=False):
            before, now = [(t.dtype, tuple(t.shape), t.device) for t in (view, parameter)]
            if now != before:
                return (
                    f"parameter {name!r} has become {now[0]} of shape {now[1]} on {now[2]} since the model was "
                    f"wrapped, and was {before[0]} of shape {before[1]} on {before[2]}: cast or move the container, "
                    "which follows, and not the module in it"
                )
    return None


_watching: weakref.WeakSet[Newcomers] = weakref.WeakSet()


@cache
def _hear() -> None:
    """Be told by torch, from now on until the process ends.

    A hook for each model would have to go with it: in the middle of torch's loop over the hooks, it may be, which the
    garbage collector does not ask about.
    """
    registration.register_module_parameter_registration_hook(_tell_parameter)
    registration.register_module_module_registration_hook(_tell_module)


def _tell_parameter(module: nn.Module, name: str, parameter: Parameter | None) -> None:
    for newcomers in list(_watching):
        newcomers._parameter_comes(module, name, parameter)


def _tell_module(module: nn.Module, name: str, part: nn.Module | None) -> None:
    for newcomers in list(_watching):
        newcomers._module_comes(module, name, part)
