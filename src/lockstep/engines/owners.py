"""Division of optimizer updates: one rank, the owner, updates each parameter. Checks that optimizers allow this."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.ground import comm
from lockstep.ground.optimizers import parts_of
from lockstep.ground.tree import tree_map

# -- optimizers that update each parameter independently -----------------------------------------------------


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Torch's optimizers that update each element independently, so that they can update a shard of a parameter."""

WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""Torch's optimizers that update each parameter independently, but need the full parameter."""

WHOLE_ELSEWHERE = ("transformers.optimization.Adafactor",)
"""Qualified names of optimizers in other packages that need full parameters."""

TOGETHER = {
    "LBFGS": "its line search works on all parameters together",
    "SparseAdam": "its gradients are sparse",
}
"""Torch's other optimizers -> the reason why they cannot update parameters independently."""

NOT_ELEMENTWISE = (*TOGETHER, *(kind.__name__ for kind in WHOLE))
"""Names of optimizers that mix the elements of a parameter, or several parameters."""

NAME = "lockstep.parameter_wise"
"""Name of the decorator in messages."""

DECLARED = "_lockstep_needs_whole"
"""Attribute that the decorator adds to a class: True if the class needs full parameters. Survives pickling."""

Kind = TypeVar("Kind", bound=type)


@overload
def parameter_wise(kind: Kind) -> Kind: ...


@overload
def parameter_wise(*, whole: bool = False) -> Callable[[Kind], Kind]: ...


def parameter_wise(kind: Kind | None = None, *, whole: bool = False) -> Kind | Callable[[Kind], Kind]:
    """Declare that an optimizer class updates each parameter independently, so that ranks may divide its work.

    For use as a decorator. The update of a parameter must depend on nothing but that parameter's value, gradient, state
    and group, and the optimizer must skip parameters without a gradient. A norm over all gradients, a line search, or
    two steps on one batch (LAMB of some libraries, Prodigy, LBFGS, SAM) do not qualify.

    Args:
        kind: the optimizer class.
        whole: True if the update mixes the elements of a parameter (a product of matrices, a norm of rows). Matters if
            parameters are sharded: with True one rank gathers each parameter and updates it, with False each rank
            updates its shard.

    Example::

        @parameter_wise
        class Lion(torch.optim.Optimizer): ...


        @parameter_wise(whole=True)
        class Shampoo(torch.optim.Optimizer): ...
    """
    if kind is None:
        return partial(_declare, whole)
    return _declare(whole, kind)


def _declare(whole: bool, kind: Kind) -> Kind:
    setattr(kind, DECLARED, whole)
    return kind


def _declared(kind: type) -> bool | None:
    """Return ``whole`` as declared for ``kind`` or a base; None if undeclared, or if ``kind`` overrides the update."""
    for base in kind.__mro__:
        if DECLARED in vars(base):
            value: bool = vars(base)[DECLARED]
            return value if _updates_as(kind, [base]) else None
    return None


def check_parameter_wise(optimizers: Iterable[Optimizer]) -> None:
    """Raise unless every optimizer updates each parameter independently, so that ranks may divide its work.

    Raises:
        ValueError: an optimizer does not; the message names its class, the reason and an alternative.
    """
    for optimizer in with_parameters(optimizers):
        kind = type(optimizer)
        is_known = _declared(kind) is not None or _updates_as(kind, (*ELEMENTWISE, *WHOLE)) or _is_whole_elsewhere(kind)
        if not isinstance(optimizer, Optimizer) or not is_known:
            reason = TOGETHER.get(kind.__name__, "it is not known to update each parameter independently")
            raise ValueError(
                f"the states of {kind.__name__} cannot be sharded, because {reason}. Omit shard_optimizer; or, if the "
                f"optimizer updates each parameter independently of the others, decorate its class with `@{NAME}`"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"the states of {kind.__name__}(differentiable=True) cannot be sharded, because autograd cannot "
                "differentiate through another rank's update. Omit shard_optimizer"
            )


def needs_whole(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is known to update each parameter independently, but needs it as a full tensor."""
    kind = type(optimizer)
    declared = _declared(kind)
    return declared if declared is not None else _updates_as(kind, WHOLE) or _is_whole_elsewhere(kind)


def _is_whole_elsewhere(kind: type) -> bool:
    known = tuple(base for base in kind.__mro__ if f"{base.__module__}.{base.__qualname__}" in WHOLE_ELSEWHERE)
    return _updates_as(kind, known)


def _updates_as(kind: type, bases: Iterable[type]) -> bool:
    """Return True if ``kind`` is one of ``bases``, or a subclass that does not override the update."""
    for base in bases:
        if issubclass(kind, base):
            return all(_function(kind, name) is _function(base, name) for name in ("step", "_init_group"))
    return False


def _function(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    # torch wraps the `step` of each class for its profiler when one is first made
    return found if found is None else inspect.unwrap(found)


# -- parameters and their owners -----------------------------------------------------------------------------


def with_parameters(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that have parameters, with combined optimizers replaced by their parts."""
    every = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return [optimizer for optimizer in every if next(parameters_of(optimizer), None) is not None]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Return the parameters of an optimizer, in the order of its groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def owners_of(sizes: Sequence[int], load: list[int]) -> list[int]:
    """Assign each parameter, in order of decreasing size, to the rank with the least load. Return the owner of each.

    Args:
        sizes: sizes of the parameters, in any unit.
        load: load of each rank so far; the sizes are added in place.

    >>> owners_of([2, 9, 4, 4, 1], [0, 0])
    [0, 0, 1, 1, 1]
    """
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        found[index] = owner = load.index(min(load))
        load[owner] += sizes[index]
    return found


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Set ``.grad`` of ``parameters`` to None inside the block, so that optimizers skip them."""
    hidden = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


@contextmanager
def update_within(optimizer: Optimizer, context: AbstractContextManager[None]) -> Iterator[None]:
    """Enter ``context`` only around the update of an optimizer ``step`` that is called inside the block.

    Hooks of ``register_step_pre_hook``, also those of all optimizers, run before ``context`` is entered; post-hooks run
    after it is left.

    Args:
        optimizer: the optimizer.
        context: entered once, even if steps nest.
    """
    entered = ExitStack()
    depth = 0  # a subclass's step may call that of its base, which runs all hooks once more

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            entered.enter_context(context)

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            entered.close()

    with entered:
        hooks = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
        # an OrderedDict by its id
        optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# -- optimizers whose parameters have owners -----------------------------------------------------------------


class Owners:
    """Base class that makes each rank update only the parameters that it owns. Subclasses exchange the new values.

    The optimizers' ``step``, ``state_dict`` and ``load_state_dict`` are replaced by this object's.
    The owners follow from the order of the parameters, so all ranks compute the same ones without a message.

    Args:
        optimizers: optimizers over the same parameters on all ranks.
        group: process group of the ranks.
    """

    METHODS = ("step", "state_dict", "load_state_dict")

    def __init__(self, optimizers: Iterable[Optimizer], group: comm.Group = None) -> None:
        self._group, self._rank, self._world = group, comm.rank(group), comm.world_size(group)
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._load = [0] * self._world
        self._own: dict[int, dict[str, Callable[..., Any]]] = {}  # the optimizers' methods, by their id
        self._every = with_parameters(optimizers)

    def _take_all(self) -> None:
        for optimizer in self._every:
            # owners of an earlier fit have the states, and stay
            earlier = vars(optimizer).get("_owned")
            if isinstance(earlier, Owners) and earlier._world == self._world:
                for parameter in parameters_of(optimizer):
                    if parameter in earlier._owners and parameter not in self._owners:
                        self._owners[parameter] = owner = earlier._owners[parameter]
                        self._load[owner] += self._size(parameter)
        self._assign([p for o in self._every for p in parameters_of(o) if p.requires_grad])
        for optimizer in self._every:
            self._take_over(optimizer)
            self._drop(optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        earlier = vars(optimizer).get("_owned")
        methods = {name: getattr(optimizer, name) for name in self.METHODS}
        own = methods if earlier is None else earlier._own[id(optimizer)]
        self._own[id(optimizer)] = own

        @wraps(own["step"])
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
            return self.step(optimizer, closure, **options)

        vars(optimizer).update(
            _owned=self,
            step=MethodType(step, optimizer),  # a method, which lr schedulers wrap
            state_dict=partial(self.state_dict, optimizer),
            load_state_dict=partial(self.load_state_dict, optimizer),
        )

    def _size(self, parameter: Tensor) -> int:
        """Return the load that a parameter adds to its owner."""
        return parameter.nbytes

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        """Assign an owner to parameters without one. Parameters that share storage share their owner."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        places = {parameter.data_ptr(): owner for parameter, owner in self._owners.items()}
        firsts = {p.data_ptr(): p for p in reversed(new) if p.data_ptr() not in places}
        places |= zip(firsts, owners_of([self._size(p) for p in firsts.values()], self._load), strict=True)
        for parameter in new:
            self._owners[parameter] = places[parameter.data_ptr()]

    def _is_remote(self, parameter: Tensor) -> bool:
        return bool(self._owners.get(parameter, self._rank) != self._rank)

    def _drop(self, optimizer: Optimizer) -> None:
        """Delete states of other ranks' parameters, which optimizers such as Adagrad create in their constructor."""
        for key in [key for key in optimizer.state if isinstance(key, Tensor) and self._is_remote(key)]:
            del optimizer.state[key]

    # -- a step

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
        """Update this rank's parameters, and receive the other parameters' new values. Collective.

        Returns:
            The result of ``closure``, which runs once, before the hooks of the step; without a closure, the result
            of the optimizer's step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with update_within(optimizer, self._updating(optimizer)):
            result = self._own[id(optimizer)]["step"](**options)
        return result if closure is None else loss

    def _updating(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Return a context manager for the update, to hide other ranks' parameters and exchange new values on exit."""
        raise NotImplementedError

    def _with_gradient(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the parameters that have a gradient now, after assigning owners to those without an owner."""
        found = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if any(parameter not in self._owners for parameter in found):
            self._assign(found)
            self._drop(optimizer)
        return found

    # -- states

    def part_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict with all parameter groups, but only the states on this rank."""
        for parameter in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]  # read by other code: the defaultdict then creates an empty one
        own = self._own.get(id(optimizer))
        saved: dict[str, Any] = optimizer.state_dict() if own is None else own["state_dict"]()
        return saved

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's complete state dict on every rank, with tensors on the CPU. Collective."""
        part = self.part_of(optimizer)
        host = tree_map(lambda tensor: tensor.detach().cpu(), part["state"], Tensor)
        return union([{**part, "state": state} for state in comm.all_gather_object(host, self._group)])

    def load_state_dict(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Load this rank's part of a complete state dict, from a run with or without owners.

        Raises:
            ValueError: the parameter groups differ in number or length.
        """
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters_of(optimizer), strict=False))
        self._assign([by_number[number] for number in saved["state"] if number in by_number])
        mine = {}
        for number, state in saved["state"].items():
            whole = self._whole(state)  # on all ranks: a state that was read in shards is gathered
            if number not in by_number or not self._is_remote(by_number[number]):
                mine[number] = whole
        self._own[id(optimizer)]["load_state_dict"]({**saved, "state": mine})

    def _whole(self, state: Any) -> Any:
        """Return a parameter's state with full tensors, as the owner stores it. Collective."""
        return state


def union(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' results of `Owners.part_of` into one state dict with the first rank's parameter groups.

    The state dict is empty if there are no parts.
    """
    if not parts:
        return {"state": {}, "param_groups": []}
    state = {number: value for part in parts for number, value in part["state"].items()}
    return {**parts[0], "state": {number: state[number] for number in sorted(state)}}
