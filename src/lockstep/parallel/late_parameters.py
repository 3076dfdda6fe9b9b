"""Parameters and buffers that come into a model after it was set up, or take the place of others there."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.nn.parameter import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.parallel.bucket import Bucket


class LateParameters:
    """Notices parameters and buffers that come into ``module`` from now on; costs nothing in a forward.

    Torch tells of each registration. What goes around it (``ModuleList.insert``) is not noticed.

    Args:
        module: the model.
        ignored: names that may come.

    Attributes:
        found: name of the first parameter that came, below the submodule that got it; None while none has.
        changed: whether submodules have come.
        noticed: whether a parameter, a buffer or a submodule has come; whoever has dealt with it sets it to False.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._ignored = frozenset(ignored)
        self.found: str | None = None
        self.changed = False
        self.noticed = False
        self._names = weakref.WeakKeyDictionary({part: name for name, part in module.named_modules()})
        # weakly: the id of one that is gone may be that of a late one
        known = {parameter: name for name, parameter in module.named_parameters() if name not in self._ignored}
        self._known = WeakIdKeyDictionary(known)
        _hear()
        _watching.add(self)

    def close(self) -> None:
        """Notice nothing any more."""
        _watching.discard(self)

    def renew(self, module: nn.Module) -> None:
        """From now on take for late what is not in ``module`` now."""
        self._names.update({part: name for name, part in module.named_modules()})
        self._known.update({parameter: name for name, parameter in module.named_parameters()})
        self.found, self.noticed = None, False

    def _parameter_comes(self, module: nn.Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and parameter not in self._known and module in self._names:
            self._note(f"{self._names[module]}.{name}".lstrip("."))

    def _buffer_comes(self, module: nn.Module) -> None:
        if module in self._names:
            self.noticed = True

    def _module_comes(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is None or module not in self._names:
            return
        self.changed = self.noticed = True
        for inner, submodule in part.named_modules(prefix=f"{self._names[module]}.{name}".lstrip(".")):
            self._names[submodule] = inner
        for inner, parameter in part.named_parameters():
            if parameter not in self._known:
                self._note(f"{self._names[part]}.{inner}")

    def _note(self, name: str) -> None:
        if name in self._ignored:
            return
        self.noticed = True
        if not self.found:
            self.found = name


def find_changed(frozen: Mapping[str, Parameter], late: LateParameters | None) -> str | None:
    """Whose gradient would not be averaged, if anybody's: a sentence without its beginning, the rank.

    Args:
        frozen: parameters that were so when the model was wrapped.
        late: those since then; None where nobody minds.
    """
    for name, parameter in frozen.items():
        if parameter.requires_grad:
            return (
                f"parameter {name!r} was frozen when the model was wrapped and requires a gradient now: wrap the model "
                "with the parameter unfrozen (requires_grad may be switched off, and on again, afterwards), or wrap it "
                "again now"
            )
    if late is not None and late.found is not None:
        return (
            f"parameter {late.found!r} was added to the model after it was wrapped, and its gradient would not be "
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


def beside(module: nn.Module, optimizers: Iterable[Any]) -> dict[str, Tensor]:
    """What ``optimizers`` train and ``module`` does not have (parameters in a plain list), by its place there."""
    seen = {id(parameter) for parameter in module.parameters()}
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            parameters = group["params"]
            # the list's own iterator: one of a sharded optimizer would wait for what is under way
            plain = list.__iter__(parameters) if isinstance(parameters, list) else parameters
            for index, parameter in enumerate(plain):
                trained = isinstance(parameter, Parameter) or parameter.requires_grad
                if trained and id(parameter) not in seen:
                    seen.add(id(parameter))
                    found[f"optimizers[{number}].param_groups[{place}]['params'][{index}]"] = parameter
    return found


_watching: weakref.WeakSet[LateParameters] = weakref.WeakSet()


@cache
def _hear() -> None:
    """Be told by torch, from now on until the process ends.

    A hook for each model would have to go with it: in the middle of torch's loop over the hooks, it may be, which the
    garbage collector does not ask about.
    """
    registration.register_module_parameter_registration_hook(_tell_parameter)
    registration.register_module_buffer_registration_hook(_tell_buffer)
    registration.register_module_module_registration_hook(_tell_module)


def _tell_parameter(module: nn.Module, name: str, parameter: Parameter | None) -> None:
    for late in list(_watching):
        late._parameter_comes(module, name, parameter)


def _tell_buffer(module: nn.Module, name: str, buffer: Tensor | None) -> None:
    # `self.count = self.count + 1` registers a buffer in each step, in the place of the one before
    if buffer is None or module._buffers.get(name) is not None:
        return
    for late in list(_watching):
        late._buffer_comes(module)


def _tell_module(module: nn.Module, name: str, part: nn.Module | None) -> None:
    for late in list(_watching):
        late._module_comes(module, name, part)
