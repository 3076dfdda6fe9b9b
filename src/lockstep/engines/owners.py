"""Parameters that have an owner among the ranks, which alone updates them: which optimizers let ranks share out their
work so, and how an optimizer becomes one of which every rank has a part."""

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

# -- optimizers that work parameter by parameter -------------------------------------------------------------


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
"""Torch's optimizers that update each element by itself: a part of a parameter is enough for them."""

WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""Torch's optimizers that update each parameter by itself, and need the whole of it."""

WHOLE_ELSEWHERE = ("transformers.optimization.Adafactor",)
"""Such of other packages."""

TOGETHER = {
    "LBFGS": "its line search works on all parameters together",
    "SparseAdam": "its gradients are sparse",
}
"""Torch's other optimizers, and why one parameter is not enough for them."""

NOT_ELEMENTWISE = (*TOGETHER, *(kind.__name__ for kind in WHOLE))
"""Names of optimizers that mix the elements of a parameter, or several parameters."""

NAME = "lockstep.parameter_wise"
"""What declares a class."""

DECLARED = "_lockstep_needs_whole"
"""The attribute of a declared class, which goes with it where it is pickled: whether it needs whole parameters."""

Kind = TypeVar("Kind", bound=type)


@overload
def parameter_wise(kind: Kind) -> Kind: ...


@overload
def parameter_wise(*, whole: bool = False) -> Callable[[Kind], Kind]: ...


def parameter_wise(kind: Kind | None = None, *, whole: bool = False) -> Kind | Callable[[Kind], Kind]:
    """Declare that a class of optimizers works parameter by parameter, so that ranks may share its work; a decorator.

    Its update of a parameter must depend on nothing but that parameter's value, gradient, state and group, and it must
    pass over parameters without a gradient. A norm over all gradients, a line search, or two steps on one batch (LAMB
    of some libraries, Prodigy, LBFGS, SAM) do not qualify.

    Args:
        kind: the class.
        whole: its update mixes the elements of a parameter (a product of matrices, a norm of rows). Where ranks hold
            parts of parameters, one of them gathers the whole; else each updates its part.

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
    """What was said of a class, or of one whose update is its own."""
    for base in kind.__mro__:
        if DECLARED in vars(base):
            said: bool = vars(base)[DECLARED]
            return said if _updates_as(kind, [base]) else None
    return None


def check_parameter_wise(optimizers: Iterable[Optimizer]) -> None:
    """Make sure that ranks may share the work of every optimizer.

    Raises:
        ValueError: with the class of the first one whose work they may not, the reason and the way out.
    """
    for optimizer in with_parameters(optimizers):
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer) or not _is_parameter_wise(type(optimizer)):
            reason = TOGETHER.get(name, "it is not known to work parameter by parameter")
            raise ValueError(
                f"the ranks cannot share out the states of {name}: {reason}; leave shard_optimizer out, or, where its "
                f"update of a parameter depends on that parameter alone, declare its class by `{NAME}`"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"the ranks cannot share out the states of {name}(differentiable=True): no graph leads through an "
                "update of another rank; leave shard_optimizer out"
            )


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known to need whole parameters, and to need no more."""
    kind = type(optimizer)
    said = _declared(kind)
    return said if said is not None else _updates_as(kind, WHOLE) or _is_whole_elsewhere(kind)


def _is_parameter_wise(kind: type) -> bool:
    return _declared(kind) is not None or _updates_as(kind, (*ELEMENTWISE, *WHOLE)) or _is_whole_elsewhere(kind)


def _is_whole_elsewhere(kind: type) -> bool:
    known = tuple(base for base in kind.__mro__ if f"{base.__module__}.{base.__qualname__}" in WHOLE_ELSEWHERE)
    return _updates_as(kind, known)


def _updates_as(kind: type, bases: Iterable[type]) -> bool:
    """Whether it is one of them, or a subclass that brings nothing of its own into the update."""
    for base in bases:
        if issubclass(kind, base):
            return all(_function(kind, name) is _function(base, name) for name in ("step", "_init_group"))
    return False


def _function(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    # torch wraps the `step` of each class for its profiler when one is first made
    return found if found is None else inspect.unwrap(found)


# -- parameters, and who gets them ---------------------------------------------------------------------------


def with_parameters(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that have some, of combined ones the parts: what stands for no optimizer has none."""
    every = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return [optimizer for optimizer in every if next(parameters_of(optimizer), None) is not None]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Its parameters, in the order of its groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def owners_of(sizes: Sequence[int], load: list[int]) -> list[int]:
    """The owner of each of some parameters: the largest first, each to the rank that has least.

    Args:
        sizes: of the parameters.
        load: what each rank has so far; what it gets is added.

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
    """Inside, these parameters have no gradient: an optimizer passes over them."""
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
    """Inside, call the optimizer's own ``step``: its update, and nothing else, runs in ``context``.

    Hooks before the step (``register_step_pre_hook``, those of all optimizers, too) run before it is entered, hooks
    after the step when it is left.

    Args:
        optimizer: the one.
        context: entered once.
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
    """Optimizers of which every rank updates the parameters that it owns; a subclass says how values travel.

    Their ``step``, ``state_dict`` and ``load_state_dict`` become this object's. The owners follow from the order of the
    parameters: all ranks find the same ones without a message.

    Args:
        optimizers: over the same parameters on all ranks.
        group: the ranks.
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
            self._adopt(optimizer)
        self._assign([p for o in self._every for p in parameters_of(o) if p.requires_grad])
        for optimizer in self._every:
            self._take_over(optimizer)
            self._drop(optimizer)

    def _adopt(self, optimizer: Optimizer) -> None:
        """Keep the owners of an earlier fit, which have the states."""
        earlier = vars(optimizer).get("_owned")
        if isinstance(earlier, Owners) and earlier._world == self._world:
            for parameter in parameters_of(optimizer):
                if parameter in earlier._owners and parameter not in self._owners:
                    self._owners[parameter] = owner = earlier._owners[parameter]
                    self._load[owner] += self._size(parameter)

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
        """What a rank takes upon itself with a parameter."""
        return parameter.nbytes

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        """Give those an owner that have none; parameters in one memory have the same one."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        places = {parameter.data_ptr(): owner for parameter, owner in self._owners.items()}
        firsts = {p.data_ptr(): p for p in reversed(new) if p.data_ptr() not in places}
        places |= zip(firsts, owners_of([self._size(p) for p in firsts.values()], self._load), strict=True)
        for parameter in new:
            self._owners[parameter] = places[parameter.data_ptr()]

    def _is_anothers(self, parameter: Tensor) -> bool:
        return bool(self._owners.get(parameter, self._rank) != self._rank)

    def _drop(self, optimizer: Optimizer) -> None:
        """Forget states of other ranks' parameters: Adagrad makes all when it is made."""
        for key in [key for key in optimizer.state if isinstance(key, Tensor) and self._is_anothers(key)]:
            del optimizer.state[key]

    # -- a step

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
        """Update this rank's parameters, and take the others' new values. Collective.

        Returns:
            what ``closure`` gives, which runs once, before the hooks of the step; else what the optimizer's step does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with update_within(optimizer, self._updating(optimizer)):
            result = self._own[id(optimizer)]["step"](**options)
        return result if closure is None else loss

    def _updating(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Around the optimizer's own update, which sees what this rank shall update; values travel when it is left."""
        raise NotImplementedError

    def _with_gradient(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters that are updated now; all have owners."""
        found = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if any(parameter not in self._owners for parameter in found):
            self._assign(found)
            self._drop(optimizer)
        return found

    # -- states

    def part_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the state, by the places of parameters in the groups, with the groups as they are."""
        for parameter in [p for p, state in optimizer.state.items() if not state]:
            del optimizer.state[parameter]  # somebody looked: a defaultdict
        own = self._own.get(id(optimizer))
        saved: dict[str, Any] = optimizer.state_dict() if own is None else own["state_dict"]()
        return saved

    def state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state in its ordinary form, on the CPU. Collective: all ranks get it."""
        part = self.part_of(optimizer)
        host = tree_map(lambda tensor: tensor.detach().cpu(), part["state"], Tensor)
        return union([{**part, "state": state} for state in comm.all_gather_object(host, self._group)])

    def load_state_dict(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Take over this rank's part of a state in its ordinary form, of any run, with owners or without.

        Raises:
            ValueError: for parameter groups of another number or length.
        """
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        by_number = dict(zip(numbers, parameters_of(optimizer), strict=False))
        self._assign([by_number[number] for number in saved["state"] if number in by_number])
        mine = {}
        for number, state in saved["state"].items():
            whole = self._whole(state)
            if number not in by_number or not self._is_anothers(by_number[number]):
                mine[number] = whole
        self._own[id(optimizer)]["load_state_dict"]({**saved, "state": mine})

    def _whole(self, state: Any) -> Any:
        """What a parameter's owner keeps, of what was read. Collective."""
        return state


def union(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks' parts, as `Owners.part_of` gives them; its groups are the first one's. Of none: empty."""
    if not parts:
        return {"state": {}, "param_groups": []}
    state = {number: value for part in parts for number, value in part["state"].items()}
    return {**parts[0], "state": {number: state[number] for number in sorted(state)}}
