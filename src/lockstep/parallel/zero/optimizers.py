"""The optimizers of a sharded reducer: they step on fragments of parameters, and save whole states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from functools import partial, wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim.optimizer import Optimizer

from lockstep.ground import comm
from lockstep.ground.compiled import has_compiled
from lockstep.ground.device import widest
from lockstep.ground.parameters import clip_by_value
from lockstep.parallel.bucket import Bucket
from lockstep.parallel.zero.exchange import SharedBuffer
from lockstep.parallel.zero.flat_parameters import (
    AwaitedList,
    FlatBuffer,
    ParamShard,
    PrefetchWait,
    SlicedGradient,
    cut_state,
    find_aliases,
    whole_states,
)

# -- a step on a shard ---------------------------------------------------------------------------------------


@contextmanager
def update_within(
    optimizer: Optimizer, context: AbstractContextManager[Any], then: Callable[[], None]
) -> Iterator[None]:
    """Inside, call the optimizer's own ``step``: its update, and nothing else, runs in ``context``.

    Hooks before the step (``register_step_pre_hook``, those of all optimizers, too) run before it is entered, hooks
    after the step when it is left and ``then`` was called.

    Args:
        optimizer: one that is no ``torch.optim.Optimizer`` has no hooks.
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
        if not isinstance(optimizer, Optimizer):
            enter()
            yield
            leave()
            return
        hooks = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
        # an OrderedDict by its id
        optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# -- elementwise optimizers ----------------------------------------------------------------------------------


ELEMENTWISE = (
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
"""Torch's optimizers whose update of an element depends on nothing but that element's value, gradient and state."""

WHOLE = {
    "LBFGS": "its line search works on all parameters together",
    "Muon": "it orthogonalises each matrix as a whole",
    "Adafactor": "it keeps row and column sums of each matrix",
    "SparseAdam": "it updates the rows that a sparse gradient names",
}
"""Torch's other optimizers, and why a slice of a parameter is not enough for them."""

_WAY_OUT = (
    "leave it unsharded (shard_optimizer=False); or, where its update of an element depends on that element's "
    "value, gradient and state alone, declare its class by `lockstep.parallel.zero.optimizers.elementwise`"
)

_declared: set[type] = set()

Kind = TypeVar("Kind", bound=type)


def elementwise(kind: Kind) -> Kind:
    """Declare a class of optimizers as elementwise, so that its work may be split; usable as a decorator.

    Its update of an element must depend on nothing but that element's value, gradient and state, and on numbers
    that are the same for the whole parameter (a count of steps). State tensors must have the parameter's shape or
    no dimension. Norms of a parameter (LARS, LAMB), factored statistics and line searches do not qualify.

    Example::

        @elementwise
        class Lion(torch.optim.Optimizer): ...
    """
    _declared.add(kind)
    return kind


def concerned(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Those of ``optimizers`` that have some of ``parameters``."""
    own = {id(parameter) for parameter in parameters}
    return [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]


def check_elementwise(optimizers: Iterable[Optimizer]) -> None:
    """Make sure that every optimizer may work on slices.

    Raises:
        ValueError: with the class of the first one that may not, the reason and the way out.
    """
    for optimizer in optimizers:
        if not _is_elementwise(type(optimizer)):
            name = type(optimizer).__name__
            reason = WHOLE.get(name, "it is not known to treat each element of a parameter by itself")
            raise ValueError(f"a sharded optimizer cannot be {name}: {reason}; {_WAY_OUT}")
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                raise ValueError(
                    f"a sharded optimizer cannot be {type(optimizer).__name__}(differentiable=True): a graph does not "
                    "lead through slices that other ranks update; leave it unsharded (shard_optimizer=False)"
                )


def _is_elementwise(kind: type) -> bool:
    if kind in _declared or kind in ELEMENTWISE:
        return True
    # a subclass that brings nothing of its own into the update
    for base in ELEMENTWISE:
        if issubclass(kind, base):
            names = ("step", "_init_group")
            return all(_function(kind, name) is _function(base, name) for name in names)
    return False


def _function(kind: type, name: str) -> Any:
    # torch wraps the `step` of each class for its profiler when one is first made
    return inspect.unwrap(getattr(kind, name))


# -- sharded optimizers --------------------------------------------------------------------------------------


_OWN = ("step", "zero_grad", "state_dict", "load_state_dict")


class ShardedOptimizers:
    """Optimizers of which every rank runs its part; made by a `ShardedReducer`.

    Args:
        module: in whose forwards parameters are waited for.
        parameters: those that are reduced.
        optimizers: elementwise ones (checked by the reducer); one without any of ``parameters`` stays as it is.
        group: the ranks.
        shared_buffer: over which new parameters are exchanged; None: through the group.

    Raises:
        ValueError: for an optimizer that another reducer has sharded, and still holds.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[Tensor],
        optimizers: Sequence[Optimizer],
        group: comm.Group = None,
        shared_buffer: SharedBuffer | None = None,
    ) -> None:
        self._module = module
        self._optimizers = concerned(parameters, optimizers)
        self._group, self._shared_buffer = group, shared_buffer
        self._flats: list[FlatBuffer] = []
        self._shards: dict[int, ParamShard] = {}  # by the id of the parameter
        # parameters in the memory of another one, which is cut
        self._aliases: dict[int, tuple[Parameter, ParamShard]] = {}
        self._under_way: list[FlatBuffer] = []
        self._kept = self._detached = False
        self._prefetch_wait: PrefetchWait | None = None
        self._methods: dict[int, dict[str, Callable[..., Any]]] = {}  # the optimizers' own, by their id
        for optimizer in self._optimizers:
            self._take_over(optimizer)

    def _take_over(self, optimizer: Optimizer) -> None:
        earlier: ShardedOptimizers | None = getattr(optimizer, "_shards", None)
        if earlier is not None:
            if not earlier._detached and earlier._flats:
                raise ValueError(
                    f"this {type(optimizer).__name__} is sharded already, by a reducer that is attached: detach that "
                    "one first, or give each reducer optimizers of its own"
                )
            earlier.restore()
        own = self._methods[id(optimizer)] = {name: getattr(optimizer, name) for name in _OWN}

        @wraps(own["step"])
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
            return self.step(optimizer, closure, **options)

        vars(optimizer).update(
            _shards=self,
            step=MethodType(step, optimizer),  # a method, which lr schedulers wrap
            zero_grad=wraps(own["zero_grad"])(partial(self._zero_grad, optimizer)),
            state_dict=partial(self.state_dict, optimizer),
            load_state_dict=partial(self.load_state_dict, optimizer),
        )

    # -- layout --------------------------------------------------------------------------------------------

    def lay_out(self, buckets: Iterable[Bucket], padded: Sequence[Tensor]) -> None:
        """Take the parameters into buffers as ``buckets`` are, with what there is of state. A collective."""
        self.wait()
        if self._prefetch_wait is not None:
            self._prefetch_wait.remove()
        spread = [shard.parameter for shard in self._shards.values() if shard.parameter.grad is shard.shown]
        for parameter in spread:
            self._shards[id(parameter)].keep()
        states = [self._whole_state(optimizer) for optimizer in self._optimizers]
        kept = [one for flat in self._flats for one in flat.gather_kept()]
        if self._shared_buffer is not None and not self._shared_buffer.lay_out([buffer.nbytes for buffer in padded]):
            self._shared_buffer.close()
            self._shared_buffer = None
        buckets = list(buckets)
        aliases = find_aliases(buckets, self._module)
        shared = self._shared_memory()
        pairs = zip(buckets, padded, strict=True)
        before = self._flats
        self._flats = [
            FlatBuffer(bucket, buffer, self._group, self._shared_buffer, aliases) for bucket, buffer in pairs
        ]
        self._shards = {id(p.parameter): p for flat in self._flats for p in flat.shards}
        for optimizer, state in zip(self._optimizers, states, strict=True):
            if state:
                self._cut_state(optimizer, state)
        for flat in before:  # what is frozen by now is whole on every rank again
            flat.release()
        for parameter, old in shared:
            if id(parameter) not in self._shards and id(old.parameter) not in self._shards:
                parameter.data = old.parameter.data
        self._aliases = {key: (alias, self._shards[id(owner)]) for key, (alias, owner) in aliases.items()}
        for alias, owner in self._aliases.values():
            alias.data = owner.parameter.data
        for parameter, gradient in kept:
            shard = self._shards.get(id(parameter))
            if shard is None:
                parameter.grad = gradient
            else:
                shard.is_kept, shard.kept = True, shard.cut(gradient).clone()
        for parameter in spread:
            if id(parameter) in self._shards:
                self._shards[id(parameter)].show_kept()
        # compiled code looks at parameters without asking
        waits = not has_compiled(self._module)
        self._prefetch_wait = PrefetchWait(self._module, self._wait_for) if waits else None
        for optimizer in self._optimizers:
            self._await_groups(optimizer)

    def _shared_memory(self) -> list[tuple[Parameter, ParamShard]]:
        """The parameters that still lie where another one does, each with that one."""
        return [(p, shard) for p, shard in self._aliases.values() if p.data_ptr() == shard.parameter.data_ptr()]

    def detach(self, patience: timedelta | None = None) -> None:
        """Give the parameters memory of their own again. No collective.

        The optimizers' state stays in fragments, from which ``state_dict`` still makes the ordinary form.

        Args:
            patience: how long to wait for parameters that are on their way; None: as long as the group does.

        Raises:
            RuntimeError: those of the last step did not come; everything is put back all the same.
        """
        try:
            self.wait(patience)
        finally:
            self._under_way.clear()
            if self._prefetch_wait is not None:
                self._prefetch_wait.remove()
                self._prefetch_wait = None
            for optimizer in self._optimizers:
                self._await_groups(optimizer)
            shared = self._shared_memory()
            for flat in self._flats:
                flat.release()
            for parameter, shard in shared:
                parameter.data = shard.parameter.data
            if self._shared_buffer is not None:
                self._shared_buffer.close()
                self._shared_buffer = None
            self._detached = bool(self._flats)

    def restore(self) -> None:
        """Make the optimizers ordinary ones again, with all state on every rank. A collective; after `detach`."""
        for optimizer in self._optimizers:
            whole = self._whole_state(optimizer)
            own = self._methods.pop(id(optimizer))
            for name in (*_OWN, "_shards"):
                vars(optimizer).pop(name)
            if hasattr(own["step"], "_wrapped_by_lr_sched"):
                vars(optimizer)["step"] = own["step"]
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            _replace_state(optimizer, {p: whole[id(p)] for p in parameters if id(p) in whole})
            if not all(shard.is_of_its_kind() for shard in self._shards.values()):  # the module was cast, or moved
                optimizer.load_state_dict(optimizer.state_dict())
        self._optimizers, self._flats, self._shards, self._aliases = [], [], {}, {}

    # -- parameters on their way -----------------------------------------------------------------------------

    def wait(self, patience: timedelta | None = None) -> None:
        """Return when all parameters are up to date on this rank.

        Args:
            patience: for how long at most; None: as long as the group waits.
        """
        while self._under_way:
            self._finish(self._under_way[0], patience)

    def _wait_for(self, parameters: Iterable[Parameter | None]) -> None:
        if self._under_way:
            for parameter in parameters:
                shard = self._shards.get(id(parameter))
                if shard is None and id(parameter) in self._aliases:
                    shard = self._aliases[id(parameter)][1]
                if shard is not None and shard.flat.work is not None:
                    self._finish(shard.flat)

    def _await_groups(self, optimizer: Optimizer) -> None:
        """Let whoever reads parameters in the optimizer's groups wait for them, too; or no longer."""
        for group in optimizer.param_groups:
            parameters = group["params"]
            if self._prefetch_wait is None:
                group["params"] = list(parameters)
            elif type(parameters) is not AwaitedList:
                group["params"] = AwaitedList(parameters, self._wait_for)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        own = self._methods[id(optimizer)]["zero_grad"]
        under_way, self._under_way = self._under_way, []  # gradients alone are looked at
        try:
            own(set_to_none)
        finally:
            self._under_way = under_way

    def _finish(self, flat: FlatBuffer, patience: timedelta | None = None) -> None:
        if patience is None:
            flat.work.wait()
        else:
            flat.work.wait(patience)
        flat.work = None
        self._under_way.remove(flat)

    # -- gradients -------------------------------------------------------------------------------------------

    def set_aside(self) -> None:
        """Before a backward: gradients that were reduced and not zeroed wait until the next round adds to them."""
        for shard in self._shards.values():
            grad = shard.parameter.grad
            if grad is shard.shown:
                shard.keep()
                self._kept = True
            elif shard.is_kept and grad is None:  # zeroed since
                shard.is_kept, shard.kept = False, None

    def take(self, reduced: bool) -> None:
        """After a backward: where it was reduced, let placeholders stand for the gradients."""
        if not (reduced or self._kept):
            return
        for flat in self._flats:
            if reduced and any(parameter.grad is view for parameter, view in flat.aliased):
                flat.gather_gradients()
        for shard in self._shards.values():
            grad = shard.parameter.grad
            if grad is None:
                if not shard.is_kept:
                    continue
                shard.show_kept()
                continue
            if not reduced:
                continue  # what this rank has added waits beside it
            if grad is not shard.whole_gradient:  # of the layout before
                shard.gradient.copy_(shard.cut(grad))
            if shard.kept is not None:
                shard.gradient.add_(shard.kept)
            shard.parameter.grad = shard.shown
            shard.is_kept, shard.kept = False, None
        self._kept = any(shard.is_kept for shard in self._shards.values()) if self._kept else False

    @contextmanager
    def whole_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` of every parameter is its whole gradient, and what is done to it counts. A collective.

        It lies where the rank's own gradients lay before they were reduced, and takes no memory.
        """
        shown = [shard for shard in self._shards.values() if shard.parameter.grad is shard.shown]
        for flat in self._flats:
            if any(shard.parameter.grad is shard.shown for shard in flat.shards):
                flat.gather_gradients()
        for shard in shown:
            shard.parameter.grad = shard.whole_gradient
        try:
            yield
        finally:
            for shard in shown:
                grad = shard.parameter.grad
                if grad is not None:
                    if grad is not shard.whole_gradient:
                        shard.whole_gradient.copy_(grad)
                    shard.parameter.grad = shard.shown

    def reduced_names(self) -> list[str]:
        """Names of the parameters whose gradients are spread over the ranks now."""
        return [name for name, p in self._module.named_parameters() if self._is_spread(p)]

    def hold(self, parameter: Parameter, gradient: Tensor) -> None:
        """Let ``gradient``, whole and the same on all ranks, be the reduced gradient of ``parameter``."""
        shard = self._shards.get(id(parameter))
        if shard is None:
            parameter.grad = gradient
        else:
            shard.gradient.copy_(shard.cut(gradient))
            parameter.grad = shard.shown

    def _is_spread(self, parameter: Parameter) -> bool:
        shard = self._shards.get(id(parameter))
        return shard is not None and parameter.grad is shard.shown

    @contextmanager
    def lent(self, optimizer: Optimizer) -> Iterator[None]:
        """Inside, ``optimizer`` holds this rank's fragments, with their gradients."""
        wholes = [group["params"] for group in optimizer.param_groups]
        try:
            for group, parameters in zip(optimizer.param_groups, wholes, strict=True):
                group["params"] = fragments = []
                for parameter in list.__iter__(parameters):
                    shard = self._shards.get(id(parameter))
                    if shard is None:  # frozen, or none of the module's: updated on every rank
                        fragments.append(parameter)
                    elif shard.value is not None:
                        shard.lend_gradient()
                        fragments.append(shard.value)
            yield
        finally:  # `load_state_dict` makes new groups
            for group, parameters in zip(optimizer.param_groups, wholes, strict=True):
                group["params"] = parameters

    def gradients_of(self, optimizer: Optimizer) -> list[Tensor]:
        """The gradients that this rank updates with; changed in place, they count."""
        with self.lent(optimizer):
            return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    def parts_of(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """This rank's memory of what stands in ``.grad``, and of the slices that wait beside it."""
        slices = [shard.kept for shard in self._shards.values() if shard.kept is not None]
        return slices + [grad.shard.gradient if isinstance(grad, SlicedGradient) else grad for grad in gradients]

    def clip(self, optimizer: Optimizer, value: float, algorithm: str = "norm") -> Tensor | None:
        """Clip the gradient of an optimizer's parameters by its 2-norm or by value. A collective.

        Args:
            optimizer: one of those that are sharded.
            value: the largest norm, or the largest absolute value.
            algorithm: "norm" or "value".

        Returns:
            the norm of the whole gradient, before it is clipped, the same on all ranks; None for "value".
        """
        cut = {id(shard.value) for shard in self._shards_of(optimizer)}
        with self.lent(optimizer):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if algorithm == "value":
                clip_by_value(parameters, value)  # of a small model a rank may have nothing
                return None
            square = self._square([p.grad for p in parameters if id(p) in cut])
            square += self._square([p.grad for p in parameters if id(p) not in cut]) / comm.world_size(self._group)
            total = comm.all_reduce(square, "sum", self._group).sqrt()
            dtypes = {flat.dtype for flat in self._flats} or {torch.float64}
            if len(dtypes) == 1:
                total = total.to(next(iter(dtypes)).to_real())
            torch.nn.utils.clip_grads_with_norm_(parameters, value, total)
        return total

    def _square(self, gradients: list[Tensor]) -> Tensor:
        """The sum of their elements' squares: a double, as squares of the largest float32 numbers are, where it can."""
        device = next((flat.device for flat in self._flats), torch.device("cpu"))
        if not gradients:
            return torch.zeros((), dtype=widest(device), device=device)
        norms = [norm.to(device) for norm in torch._foreach_norm(gradients)]
        return torch.linalg.vector_norm(torch.stack(norms).to(widest(device))).square()

    def unscale(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        """``scaler.unscale_(optimizer)`` for a ``torch.amp.GradScaler``, all ranks seeing what is not finite on any."""
        with self.lent(optimizer):
            scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not found:  # no fragment of it is here
            device = self._flats[0].device
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        for tensor in found.values():
            tensor.copy_(comm.all_reduce(tensor, "max", self._group))

    # -- the step --------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: object) -> Any:
        """Update this rank's slices, and begin to exchange them. A collective."""
        if self._detached:
            raise RuntimeError(
                "this optimizer was sharded by a reducer that is detached: make a new one, or let `shards.restore()` "
                "of that reducer give every rank the whole state, on all ranks together"
            )
        own = self._methods[id(optimizer)]["step"]
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            options["closure"] = lambda: loss
        with update_within(optimizer, self._updating(optimizer), partial(self._send, optimizer)):
            return own(**options)

    @contextmanager
    def _updating(self, optimizer: Optimizer) -> Iterator[None]:
        for shard in self._shards_of(optimizer):
            if shard.flat.work is not None:
                self._finish(shard.flat)
            if not shard.is_bound():
                shard.bind()
        if self._aliases:
            self._wait_for(p for group in optimizer.param_groups for p in list.__iter__(group["params"]))
        with self.lent(optimizer):
            yield

    def _send(self, optimizer: Optimizer) -> None:
        self._await_groups(optimizer)  # one may have been added
        shards = self._shards_of(optimizer)
        flats = {shard.flat.index: shard.flat for shard in shards}
        for index in sorted(flats, reverse=True):  # the forward's order
            flats[index].send()
            self._under_way.append(flats[index])
        if self._prefetch_wait is None:
            self.wait()
        torch.autograd.graph.increment_version([shard.parameter for shard in shards])

    def _shards_of(self, optimizer: Optimizer) -> list[ParamShard]:
        parameters = (p for group in optimizer.param_groups for p in list.__iter__(group["params"]))
        found = (self._shards.get(id(parameter)) for parameter in parameters)
        return [shard for shard in found if shard is not None]

    # -- state -----------------------------------------------------------------------------------------------

    def state_dict(self, optimizer: Optimizer, only: int | None = None) -> dict[str, Any]:
        """The optimizer's state in its ordinary form, as without sharding. A collective.

        Args:
            optimizer: one of those that are sharded.
            only: the rank that gets the whole state, on the CPU; the others get none of it, and keep the memory.
                None: all ranks get it, on their devices.
        """
        if id(optimizer) not in self._methods:
            return optimizer.state_dict()
        groups = optimizer.param_groups
        places = {id(p): place for place, p in enumerate(p for group in groups for p in group["params"])}
        for parameter in [p for p, state in optimizer.state.items() if id(p) in places and not state]:
            del optimizer.state[parameter]  # somebody looked: a defaultdict
        with self.lent(optimizer):
            saved: dict[str, Any] = self._own(optimizer, "state_dict")()
            held = [p for group in optimizer.param_groups for p in group["params"]]
        here = only is None or only == comm.rank(self._group)
        state: dict[int, Any] = {}
        for number, parameter in enumerate(held):  # those that are not cut
            if id(parameter) in places and number in saved["state"]:
                state[places[id(parameter)]] = saved["state"][number]
        for parameter, key, value in self._joined(optimizer, only):
            if here:
                moved = value.cpu() if only is not None and isinstance(value, Tensor) else value
                state.setdefault(places[id(parameter)], {})[key] = moved
        saved["state"] = {place: state[place] for place in sorted(state)} if here else {}
        numbers = iter(range(len(places)))
        for group, packed in zip(groups, saved["param_groups"], strict=True):
            packed["params"] = [next(numbers) for _ in group["params"]]
        return saved

    def load_state_dict(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        """Take over the state of ``optimizer`` in its ordinary form, of any run, sharded or not.

        Raises:
            ValueError: for parameter groups of another number or length, or a state that cannot be cut.
        """
        groups, theirs = optimizer.param_groups, saved["param_groups"]
        if len(groups) != len(theirs):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(ours["params"]) != len(packed["params"]) for ours, packed in zip(groups, theirs, strict=True)):
            raise ValueError("loaded state dict contains a parameter group of another size than the optimizer's")
        pairs = [
            (parameter, saved["state"].get(number, {}))
            for group, packed in zip(groups, theirs, strict=True)
            for parameter, number in zip(group["params"], packed["params"], strict=True)
        ]
        self._put_state(optimizer, {id(parameter): state for parameter, state in pairs if state}, theirs)

    def _put_state(
        self, optimizer: Optimizer, wholes: Mapping[int, Mapping[str, Any]], settings: Iterable[Mapping[str, Any]]
    ) -> None:
        """Give the optimizer its part of whole states (by the id of the parameter), through its own loading."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        number = 0
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            first = number
            for parameter in group["params"]:
                shard, whole = self._shards.get(id(parameter)), wholes.get(id(parameter))
                if shard is not None and shard.value is None:
                    continue
                if whole is not None:
                    state[number] = whole if shard is None else cut_state(shard, whole, optimizer)
                number += 1
            groups.append({**setting, "params": list(range(first, number))})
        with self.lent(optimizer):
            self._own(optimizer, "load_state_dict")({"state": state, "param_groups": groups})

    def _cut_state(self, optimizer: Optimizer, wholes: Mapping[int, dict[str, Any]]) -> None:
        """The same for another layout: as it is, where loading would cast it to the parameters' dtype."""
        state: dict[Tensor, Any] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            shard, whole = self._shards.get(id(parameter)), wholes.get(id(parameter))
            if whole is not None and shard is None:
                state[parameter] = whole
            elif whole is not None and shard is not None and shard.value is not None:
                state[shard.value] = cut_state(shard, whole, optimizer)
        _replace_state(optimizer, state)

    def _own(self, optimizer: Optimizer, name: str) -> Callable[..., Any]:
        own = self._methods.get(id(optimizer))
        return getattr(optimizer, name) if own is None else own[name]

    def _joined(self, optimizer: Optimizer, only: int | None = None) -> Iterator[tuple[Parameter, str, Any]]:
        members = {id(shard): shard for shard in self._shards_of(optimizer)}

        def state_of(shard: ParamShard) -> Mapping[str, Any]:
            return optimizer.state.get(shard.value, {}) if shard.value is not None and id(shard) in members else {}

        for shard, key, value in whole_states(self._flats, state_of, optimizer, self._group, only):
            yield shard.parameter, key, value

    def _whole_state(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """All of an optimizer's state, by the id of the parameter, for another layout."""
        whole: dict[int, dict[str, Any]] = {
            id(p): dict(state) for p, state in optimizer.state.items() if isinstance(p, Tensor) and state
        }
        if self._flats:
            fragments = {id(shard.value) for shard in self._shards.values() if shard.value is not None}
            whole = {key: state for key, state in whole.items() if key not in fragments}
            for parameter, key, value in self._joined(optimizer):
                whole.setdefault(id(parameter), {})[key] = value
        return whole


def _replace_state(optimizer: Optimizer, state: Mapping[Tensor, Any]) -> None:
    """Let it be all the optimizer's state of parameters."""
    for key in [key for key in optimizer.state if isinstance(key, Tensor)]:
        del optimizer.state[key]
    optimizer.state.update(state)
