"""Optimizers whose states the ranks share out: each parameter has one owner, which alone updates it (ZeRO stage 1).

Gradients are averaged and clipped as always, and every rank sees all of them. In ``step`` a rank updates the parameters
that it owns, and broadcasts their new values to the others before ``step`` returns.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from itertools import zip_longest
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.engines.ddp.averaging import numbers_of, pieces
from lockstep.engines.ddp.consistency import sparse_names
from lockstep.ground import comm
from lockstep.ground.rank import warn_once
from lockstep.ground.tree import tree_map

if TYPE_CHECKING:
    from lockstep.engines.ddp.container import DistributedDataParallel

# -- optimizers that work parameter by parameter -------------------------------------------------------------


PARAMETER_WISE: tuple[type[Optimizer], ...] = (
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
    torch.optim.Adafactor,
    torch.optim.Muon,
)
"""Torch's optimizers whose update of a parameter depends on nothing but its value, gradient, state and group."""

TOGETHER = {
    "LBFGS": "its line search works on all parameters together",
    "SparseAdam": "its gradients are sparse",
}
"""Torch's other optimizers, and why one parameter is not enough for them."""

UNEVEN = 1.5
"""Times its even share that the fullest rank may have without a warning."""

_declared: set[type] = set()

Kind = TypeVar("Kind", bound=type)


def parameter_wise(kind: Kind) -> Kind:
    """Declare that a class of optimizers works parameter by parameter, so that ranks may share its work; a decorator.

    Its update of a parameter must depend on nothing but that parameter's value, gradient, state and group, and it must
    pass over parameters without a gradient. A norm over all gradients, a line search, or two steps on one batch (LAMB
    of some libraries, Prodigy, LBFGS, SAM) do not qualify.

    Example::

        @parameter_wise
        class Lion(torch.optim.Optimizer): ...
    """
    _declared.add(kind)
    return kind


def with_parameters(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those that have some: what stands for no optimizer has none."""
    return [optimizer for optimizer in optimizers if next(_parameters(optimizer), None) is not None]


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
                "update of a parameter depends on that parameter alone, declare its class by "
                "`lockstep.engines.ddp.owned_optimizer.parameter_wise`"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ValueError(
                f"the ranks cannot share out the states of {name}(differentiable=True): no graph leads through an "
                "update of another rank; leave shard_optimizer out"
            )


def _is_parameter_wise(kind: type) -> bool:
    if kind in _declared or kind in PARAMETER_WISE:
        return True
    # a subclass that brings nothing of its own into the update
    for base in PARAMETER_WISE:
        if issubclass(kind, base):
            return all(_function(kind, name) is _function(base, name) for name in ("step", "_init_group"))
    return False


def _function(kind: type, name: str) -> Any:
    found = getattr(kind, name, None)
    # torch wraps the `step` of each class for its profiler when one is first made
    return found if found is None else inspect.unwrap(found)


@contextmanager
def update_within(
    optimizer: Optimizer, context: AbstractContextManager[Any], then: Callable[[], None]
) -> Iterator[None]:
    """Inside, call the optimizer's own ``step``: its update, and nothing else, runs in ``context``.

    Hooks before the step (``register_step_pre_hook``, those of all optimizers, too) run before it is entered, hooks
    after the step when it is left and ``then`` was called.

    Args:
        optimizer: the one.
        context: entered once.
        then: called after the update; not if that raises.
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
            then()

    with entered:
        hooks = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
        # an OrderedDict by its id
        optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# -- owners --------------------------------------------------------------------------------------------------


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


class OwnedOptimizers:
    """Optimizers of which every rank updates the parameters that it owns.

    Their ``step``, ``state_dict`` and ``load_state_dict`` become this object's. Parameters that were frozen get their
    owner with their first gradient. The owners follow from the order of the parameters: all ranks find the same ones
    without a message.

    Args:
        optimizers: that work parameter by parameter, over the same parameters on all ranks.
        group: the ranks.

    Raises:
        ValueError: for an optimizer that does not, see `check_parameter_wise`.
    """

    def __init__(self, optimizers: Iterable[Optimizer], group: comm.Group = None) -> None:
        self._group, self._rank, self._world = group, comm.rank(group), comm.world_size(group)
        self._owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._load = [0] * self._world
        self._own: dict[int, dict[str, Callable[..., Any]]] = {}  # the optimizers' methods, by their id
        every = with_parameters(optimizers)
        check_parameter_wise(every)
        if self._world == 1:
            return
        for optimizer in every:
            self._adopt(optimizer)
        self._assign([p for o in every for p in _parameters(o) if p.requires_grad])
        for optimizer in every:
            self._take_over(optimizer)
            self._drop(optimizer)
        fullest, whole = max(self._load), sum(self._load)
        if fullest * self._world > UNEVEN * whole:
            warn_once(
                f"shard_optimizer=True: no parameter is cut, and the largest are so large that a rank keeps "
                f"{fullest / whole:.0%} of the optimizer states, for {1 / self._world:.0%} if they could be shared out "
                'evenly. strategy="fsdp" cuts parameters.'
            )

    def _adopt(self, optimizer: Optimizer) -> None:
        """Keep the owners of an earlier fit, which have the states."""
        earlier = vars(optimizer).get("_owned")
        if isinstance(earlier, OwnedOptimizers) and earlier._world == self._world:
            for parameter in _parameters(optimizer):
                if parameter in earlier._owners and parameter not in self._owners:
                    self._owners[parameter] = owner = earlier._owners[parameter]
                    self._load[owner] += parameter.nbytes

    def _take_over(self, optimizer: Optimizer) -> None:
        earlier = vars(optimizer).get("_owned")
        names = ("step", "state_dict", "load_state_dict")
        own = {name: getattr(optimizer, name) for name in names} if earlier is None else earlier._own[id(optimizer)]
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

    def _assign(self, parameters: Iterable[Tensor]) -> None:
        """Give those an owner that have none; parameters in one memory have the same one."""
        new = [parameter for parameter in parameters if parameter not in self._owners]
        places = {parameter.data_ptr(): owner for parameter, owner in self._owners.items()}
        firsts = {p.data_ptr(): p for p in reversed(new) if p.data_ptr() not in places}
        places |= zip(firsts, owners_of([p.nbytes for p in firsts.values()], self._load), strict=True)
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
        updated: list[Tensor] = []
        with update_within(optimizer, self._hiding_others(optimizer, updated), lambda: self._exchange(updated)):
            result = self._own[id(optimizer)]["step"](**options)
        return result if closure is None else loss

    @contextmanager
    def _hiding_others(self, optimizer: Optimizer, updated: list[Tensor]) -> Iterator[None]:
        """Inside, other ranks' parameters have no gradient; ``updated`` gets all that have one."""
        updated += [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
        if any(parameter not in self._owners for parameter in updated):
            self._assign(updated)
            self._drop(optimizer)
        hidden = [(parameter, parameter.grad) for parameter in updated if self._is_anothers(parameter)]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in hidden:
                parameter.grad = gradient

    @torch.no_grad()
    def _exchange(self, parameters: Sequence[Tensor]) -> None:
        """Broadcast each parameter from its owner, many of them in one message; a message of each rank at a time."""
        members = comm.ranks_of(self._group)
        of_owner = [[p for p in parameters if self._owners[p] == owner] for owner in range(self._world)]
        under_way: deque[tuple[Any, Tensor, list[Tensor]]] = deque()
        for row in zip_longest(*map(pieces, of_owner)):
            for owner, piece in enumerate(row):
                if piece is None:
                    continue
                total = sum(map(_count, piece))
                device = comm.carrier(self._group, piece[0].device)
                mine = owner == self._rank
                flat = torch.cat([numbers_of(p) for p in piece]).to(device) if mine else None
                dtype = piece[0].real.dtype if piece[0].is_complex() else piece[0].dtype
                flat = torch.empty(total, dtype=dtype, device=device) if flat is None else flat
                work = dist.broadcast(comm.as_bytes(flat), members[owner], group=self._group, async_op=True)
                under_way.append((work, flat, [] if mine else piece))
                if len(under_way) > self._world:
                    _arrive(*under_way.popleft())
        while under_way:
            _arrive(*under_way.popleft())

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
        by_number = dict(zip(numbers, _parameters(optimizer), strict=False))
        self._assign([by_number[number] for number in saved["state"] if number in by_number])
        mine = {
            number: state
            for number, state in saved["state"].items()
            if number not in by_number or not self._is_anothers(by_number[number])
        }
        self._own[id(optimizer)]["load_state_dict"]({**saved, "state": mine})


def union(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks' parts, as `OwnedOptimizers.part_of` gives them; its groups are the first one's."""
    state = {number: value for part in parts for number, value in part["state"].items()}
    return {**parts[0], "state": {number: state[number] for number in sorted(state)}}


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _count(parameter: Tensor) -> int:
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _arrive(work: Any, flat: Tensor, parameters: Sequence[Tensor]) -> None:
    """Wait for a message, and give the parameters their values."""
    work.wait()
    start = 0
    for parameter in parameters:
        values = flat[start : start + _count(parameter)]
        start += len(values)
        real = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        real.copy_(values.view(real.shape))


def shard_optimizers(container: DistributedDataParallel, *optimizers: Optimizer) -> OwnedOptimizers:
    """Share out the states of ``optimizers`` among the ranks of a container, in a loop of your own.

    The loop stays as it is. All ranks step together, and call ``optimizer.state_dict()`` together.

    Args:
        container: whose module's parameters they update.
        *optimizers: that work parameter by parameter.

    Returns:
        the owners.

    Raises:
        ValueError: for an optimizer that does not, or sparse gradients.

    Example::

        model = DistributedDataParallel(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        shard_optimizers(model, optimizer)
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            optimizer.step()
    """
    sparse = sparse_names(container.module)
    if sparse:
        raise ValueError(
            f"shard_optimizers(): the gradients of {sorted(sparse)} are sparse: build the layers with sparse=False, or "
            "leave the optimizer's states on each rank"
        )
    container.steps_together = True
    return OwnedOptimizers(optimizers, container.process_group)
