"""Detection of parameters and buffers that are added after set-up, since ranks would train them differently."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.engines.ddp.consistency import check_alike
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.installed import MODULE_HOOKS
from lockstep.ground.parameters import listed, parameters_outside, plain_name

# -- additions ------------------------------------------------------------------------------------------------


class LateParameters:
    """Recorder of parameters and buffers that are later added to ``module``. Forwards are not slowed down.

    torch's registration hooks report additions. Changes that bypass registration (``ModuleList.insert``) are missed.

    Args:
        module: the model.
        ignored: names of parameters that may be added.
        accepted: class of parameters that may be added, because each represents one of ``module``.

    Attributes:
        found: full name of the first added parameter; None if no parameter was added.
        buffer, norm: the same for buffers, except torch's pruning masks, and for BatchNorm layers.
        changed: True if submodules were added.
        has_additions: True if anything was added; the code that handles additions resets it to False.
    """

    def __init__(
        self, module: nn.Module, ignored: Collection[str] = (), accepted: type[Parameter] | None = None
    ) -> None:
        self._ignored, self._accepted = frozenset(ignored), accepted
        self.found: str | None = None
        self.buffer: str | None = None
        self.norm: str | None = None
        self.changed = False
        self.has_additions = False
        self._names = weakref.WeakKeyDictionary({part: name for name, part in module.named_modules()})
        # weak references: the id of a deleted parameter may be reused by a late one
        known = {parameter: name for name, parameter in module.named_parameters() if name not in self._ignored}
        self._known = WeakIdKeyDictionary(known)
        # Installed once, until the process ends. A hook for each model would have to be removed with the model, which
        # the garbage collector may do in the middle of torch's loop over the hooks.
        MODULE_HOOKS.install(_install_hooks)
        _watching.add(self)

    def close(self) -> None:
        _watching.discard(self)

    def renew(self, module: nn.Module) -> None:
        """Forget all additions so far: treat everything that is in ``module`` now as known."""
        self._names.update({part: name for name, part in module.named_modules()})
        self._known.update({parameter: name for name, parameter in module.named_parameters()})
        self.found = self.buffer = self.norm = None
        self.has_additions = False

    def _add_module(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        if part is None or module not in self._names:
            return
        self.changed = self.has_additions = True
        for inner, submodule in part.named_modules(prefix=f"{self._names[module]}.{name}".lstrip(".")):
            if submodule not in self._names:
                self._names[submodule] = inner
                buffers = (f"{inner}.{name}" for name, _ in submodule.named_buffers(recurse=False))
                self.buffer = self.buffer or next(buffers, None)
                self.norm = self.norm or (inner if isinstance(submodule, _BatchNorm) else None)
        for inner, parameter in part.named_parameters():
            if not self._is_known(parameter):
                self._note(f"{self._names[part]}.{inner}")

    def _is_known(self, parameter: Parameter) -> bool:
        return parameter in self._known or (self._accepted is not None and isinstance(parameter, self._accepted))

    def _note(self, name: str) -> None:
        if name in self._ignored:
            return
        self.has_additions = True
        if not self.found:
            self.found = name


def _parameters_of(optimizer: Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from listed(group["params"])


_watching: weakref.WeakSet[LateParameters] = weakref.WeakSet()


def _install_hooks() -> Callable[[], object]:
    # torch calls these for every module of the process, so each looks for the module among the watched ones first

    def parameter_added(module: nn.Module, name: str, parameter: Parameter | None) -> None:
        for late in list(_watching):
            if parameter is not None and module in late._names and not late._is_known(parameter):
                late._note(f"{late._names[module]}.{name}".lstrip("."))

    def buffer_added(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        # `self.count = self.count + 1` registers a buffer in each step, in place of the previous one
        if buffer is None or module._buffers.get(name) is not None:
            return
        for late in list(_watching):
            # torch.nn.utils.prune has moved the parameter to NAME_orig before it registers NAME_mask
            if module in late._names and f"{name.removesuffix('_mask')}_orig" not in module._parameters:
                late.has_additions = True
                late.buffer = late.buffer or f"{late._names[module]}.{name}".lstrip(".")

    def module_added(module: nn.Module, name: str, part: nn.Module | None) -> None:
        for late in list(_watching):
            late._add_module(module, name, part)

    handles = [
        registration.register_module_parameter_registration_hook(parameter_added),
        registration.register_module_buffer_registration_hook(buffer_added),
        registration.register_module_module_registration_hook(module_added),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


# -- refusal ---------------------------------------------------------------------------------------------------


def refuse(rank: int, kind: str, name: str) -> NoReturn:
    """Raise the error for a ``kind`` ("parameter", "buffer", "normalization layer") that was added too late.

    Raises:
        MisconfigurationException: always.
    """
    raise MisconfigurationException(
        f"rank {rank}: {kind} {name!r} was added after set-up, and would not be the same on all ranks. Create it in "
        "`__init__`, `configure_model` or `configure_optimizers` (and freeze it until it is used), or train in one "
        "process"
    )


class LateRefusal:
    """Check that no parameters are added to the module or its optimizers, since ranks would train them differently.

    A parameter is refused if it requires a gradient or if an optimizer has it: a new head, a parameter of
    ``weight_norm``, one that ``load_state_dict(assign=True)`` has replaced, a tensor of ``add_param_group``. Frozen
    parameters outside of optimizers may be added. Of buffers, only the masks of ``torch.nn.utils.prune`` may be added.

    Args:
        module: the module of the run.
        rank: rank of this process.
    """

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._module, self._rank = module, rank
        self._optimizers: Sequence[Optimizer] = ()
        self._watch = LateParameters(module)
        self._known = WeakIdKeyDictionary(dict.fromkeys((*module.parameters(), *module.buffers()), True))
        self._sizes: list[tuple[Optimizer, int, int, int]] = []

    def new(self, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
        """Return the tensors added to module and optimizers so far, by name, and accept them from now on."""
        self._optimizers = optimizers
        named = {**self._parameters(), **dict(self._module.named_buffers())}
        late = {name: tensor for name, tensor in named.items() if tensor not in self._known}
        self._known.update(dict.fromkeys(late.values(), True))
        self._watch.renew(self._module)
        self._count()
        return late

    def check(self, frozen: Sequence[Tensor] = ()) -> None:
        """Raise an error if parameters or buffers were added. This cheap check runs before each forward and backward.

        If an optimizer's groups have changed, or some of the ``frozen`` parameters now require gradients, the ranks
        compare the parameters they train. If only some ranks see such a change, they wait for the others.

        Raises:
            MisconfigurationException: something was added.
        """
        changed = bool(frozen) and any(parameter.requires_grad for parameter in frozen)
        for optimizer, count, first, last in self._sizes:  # a new group, or another length of its first or last one
            groups = optimizer.param_groups
            if len(groups) != count or len(groups[0]["params"]) != first or len(groups[-1]["params"]) != last:
                changed = True
        if changed or self._watch.has_additions:
            self._refuse()
        if changed:
            self.compare()

    def check_thoroughly(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise an error if parameters or buffers were added. This thorough check runs between epochs. Collective.

        Also called after optimizers were replaced.

        Raises:
            MisconfigurationException: something was added, or ranks step different parameters.
        """
        self._optimizers = optimizers
        self._refuse()
        self.compare()

    def compare(self) -> None:
        """Check that all ranks train the same parameters. Collective."""
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        lines = [name for name, parameter in self._parameters().items() if parameter.requires_grad]
        for optimizer in self._optimizers:
            stepped = ", ".join(names.get(id(parameter), "another") for parameter in _parameters_of(optimizer))
            lines.append(f"{type(optimizer).__name__} of {stepped}")
        check_alike("What is trained", lines)
        self._count()

    def _refuse(self) -> None:
        stepped = {id(parameter) for optimizer in self._optimizers for parameter in _parameters_of(optimizer)}
        for name, parameter in self._parameters().items():
            if parameter not in self._known and (parameter.requires_grad or id(parameter) in stepped):
                refuse(self._rank, "parameter", name)
        for kind, found in (("buffer", self._watch.buffer), ("normalization layer", self._watch.norm)):
            if found is not None:
                refuse(self._rank, kind, found)
        self._watch.has_additions = False

    def _parameters(self) -> dict[str, Tensor]:
        own = {plain_name(name): parameter for name, parameter in self._module.named_parameters()}
        return {**own, **parameters_outside(self._module, self._optimizers)}

    def _count(self) -> None:
        self._sizes = [
            (optimizer, len(groups), len(groups[0]["params"]), len(groups[-1]["params"]))
            for optimizer, groups in ((optimizer, optimizer.param_groups) for optimizer in self._optimizers)
            if groups
        ]

    def close(self) -> None:
        self._watch.close()
