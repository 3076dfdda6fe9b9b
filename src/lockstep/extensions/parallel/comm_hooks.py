"""Communication hooks of a fit, and the local steps of post-local SGD, after which ranks' weights differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint.io import snapshot
from lockstep.engines.collectives import gather_on_zero
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.strategy import AttachableHook, CountedLocalSteps
from lockstep.extensions.parallel.averaging import OuterOptimizer, ParameterAverager, average
from lockstep.extensions.parallel.hooks.check import check_hook, check_pair, prepare_state
from lockstep.extensions.parallel.hooks.error_feedback import load_state, save_state, share_states
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook, name_of, torch_name
from lockstep.extensions.parallel.hooks.local_sgd import averages_locally, group_of, marks_of, rounds_of
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import parameters_outside
from lockstep.ground.rank import rank_zero_warn
from lockstep.precision.base import LossScaler

# -- weights that differ between ranks -----------------------------------------------------------------------


class DivergedWeights:
    """Switch that replaces this rank's own weights with the mean over the ranks, and back, while weights differ.

    Args:
        module: the fit's module.
        optimizers: the fit's optimizers. Their states start to differ with the weights, and stay different.
        scaler: the loss scaler of 16-bit precision, or None; it follows this rank's overflows.
        share_buffers: if True, the mean has rank 0's buffers; else each rank keeps its own.

    Attributes:
        differ: True if the ranks' weights may differ now.
        has_diverged: True if the weights ever differed, in this or the resumed fit; optimizers differ since then.
    """

    def __init__(
        self, module: nn.Module, optimizers: list[Optimizer], scaler: LossScaler | None, share_buffers: bool
    ) -> None:
        self.differ = self.has_diverged = False
        self._module = module
        self._optimizers = optimizers
        self._scaler = scaler
        self._share_buffers = share_buffers
        self._trained: set[str] = set()
        self._own: dict[str, Tensor] | None = None

    @property
    def shown(self) -> bool:
        """True while the module has the ranks' mean instead of the rank's own weights."""
        return self._own is not None

    def step(self) -> None:
        """Mark the ranks' weights as different, because a step uses the gradients of this rank or node only."""
        self.differ = self.has_diverged = True

    # -- the mean

    def show_mean(self) -> None:
        """Replace the module's weights and buffers with the ranks' mean, until `show_own`. Collective."""
        if self._own is None:
            parameters, buffers = self._parameters(), dict(self._module.named_buffers())
            self._own = {name: tensor.detach().clone() for name, tensor in {**parameters, **buffers}.items()}
            average(list(parameters.values()))
            if self._share_buffers:
                comm.broadcast_tensors(buffers.values())

    @torch.no_grad()
    def show_own(self) -> None:
        """Restore the rank's own weights and buffers after `show_mean`."""
        if self._own is not None:
            _copy(self._own, self._tensors())
            self._own = None

    def named_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name: those of the module, and those that are only in the optimizers."""
        return {**dict(self._module.named_parameters()), **parameters_outside(self._module, self._optimizers)}

    def _parameters(self) -> dict[str, Tensor]:
        """Return, by name, the parameters that have been trainable in any local step so far."""
        named = self.named_parameters()
        # not frozen ones: they are equal on all ranks, and the mean of equal numbers may round
        self._trained.update(name for name, parameter in named.items() if parameter.requires_grad)
        return {name: parameter for name, parameter in named.items() if name in self._trained}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.named_parameters(), **dict(self._module.named_buffers())}

    # -- saving

    def state_dict(self, leader: int) -> dict[str, Any]:
        """Return a copy of this rank's state on the CPU, from which a resumed run continues bit for bit.

        Args:
            leader: the first of the ranks with the same parameters and optimizers; only this one saves them.
        """
        if not self.has_diverged:
            return {}
        state: dict[str, Any] = {"leader": leader, "differ": self.differ}
        if self.differ:
            own = self._own or {**self._parameters(), **dict(self._module.named_buffers())}
            buffers = {name for name, _ in self._module.named_buffers()}
            # ranks of a node have the same parameters, but each has its own buffers
            mine = comm.rank() == leader
            state["tensors"] = {name: tensor.detach() for name, tensor in own.items() if mine or name in buffers}
        if comm.rank() == leader:
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
            if self._scaler is not None:
                state["scaler"] = self._scaler.state_dict()
        return snapshot(state)

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Load this rank's state from the `state_dict` of all ranks, saved by a run with the same number of ranks."""
        mine = states[comm.rank()]
        if not mine:
            return
        leader = states[mine["leader"]]
        self.has_diverged, self.differ = True, mine["differ"]
        if self.differ:
            _copy({**leader["tensors"], **mine["tensors"]}, self._tensors())
            self._trained.update(leader["tensors"])
        for optimizer, saved in zip(self._optimizers, leader["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self._scaler is not None:
            self._scaler.load_state_dict(leader["scaler"])


def _copy(saved: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    for name, tensor in saved.items():
        tensors[name].detach().copy_(tensor)


# -- local steps ---------------------------------------------------------------------------------------------


class HookedLocalSteps:
    """Tracker of a fit's local steps (post-local SGD) that averages the parameters at the end of each period.

    Args:
        state: the hook's state, lockstep's or torch's, with its subgroup.
        module, optimizers: the fit's module and optimizers.
        period: steps between two averages.
        outer: arguments of an outer optimizer that replaces the averages, or None.
        reducer: the fit's reducer.
        scaler: the loss scaler of 16-bit precision, or None.
        take_buffers: broadcasts rank 0's buffers; None if each rank keeps its own.

    Attributes:
        apart: this rank's own weights.
        leader: the first of the ranks whose gradients are averaged with this rank's in a local step.

    Raises:
        MisconfigurationException: an optimizer averages or shards over the ranks itself.
    """

    def __init__(
        self,
        state: Any,
        module: nn.Module,
        optimizers: list[Optimizer],
        period: int | Mapping[int, int],
        outer: Mapping[str, Any] | None,
        *,
        reducer: Reducer,
        scaler: LossScaler | None,
        take_buffers: Callable[[], object] | None,
    ) -> None:
        for optimizer in optimizers:
            if type(optimizer).__module__.startswith("torch.distributed"):
                raise MisconfigurationException(
                    f"DDPStrategy(model_averaging_period={period}) with {type(optimizer).__name__}: this optimizer "
                    "averages or shards over the ranks itself. Return the wrapped optimizer from "
                    "`configure_optimizers`."
                )
        self._state, self._module, self._reducer = state, module, reducer
        self._period, self._outer = period, outer
        self._take_buffers = take_buffers
        members = [comm.rank()]
        if averages_locally(state) and state.subgroup is not None:
            members = sorted(dist.get_process_group_ranks(state.subgroup))
        self.leader = members[0]
        self._members = members
        self._diverges = len(members) < comm.world_size()  # False: all ranks still average every step's gradients
        self.apart = DivergedWeights(module, optimizers, scaler, take_buffers is not None)
        self._start_averaging(max(0, state.start_localSGD_iter - rounds_of(state)))

    def _start_averaging(self, start: int) -> None:
        parameters, self._start = list(self.apart.named_parameters().values()), start
        if self._outer is None:
            self._averager: Any = ParameterAverager(parameters, self._period, start)
        else:
            self._averager = OuterOptimizer(parameters, self._period, start, **self._outer)  # type: ignore[arg-type]

    @property
    def _is_local(self) -> bool:
        """True if the next round of gradient reduction belongs to a local step."""
        return rounds_of(self._state) >= int(self._state.start_localSGD_iter)

    @property
    def differ(self) -> bool:
        """True if the ranks' weights may differ now."""
        return self.apart.differ

    # -- a window

    def round(self) -> None:
        """Record that a round of gradient reduction starts."""
        if self._diverges and self._is_local:
            self.apart.step()

    def averaged_ranks(self) -> Sequence[int]:
        """Return the ranks over which the next round's gradients are averaged."""
        return self._members if self._is_local else range(comm.world_size())

    def summed_weight(self, weight: Tensor) -> tuple[Tensor, int]:
        """Sum ``weight`` over the ranks whose gradients were averaged. Return the sum and the number of these ranks.

        Collective.
        """
        over = self._reducer.round_group
        if over is False:
            return weight, 1
        return comm.all_reduce(weight, "sum", over), comm.world_size(over)

    def step(self) -> None:
        """Record an optimizer's step. At the end of a period, average the parameters (a collective operation)."""
        if self._averager.step() and self._averager.agreed and self.apart.differ:
            self.apart.differ = False
            if self._take_buffers is not None:
                self._take_buffers()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, such as the number of steps and the outer optimizer."""
        return {"start": self._start, "averager": self._averager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._start_averaging(state["start"])
        self._averager.load_state_dict(state["averager"])

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank, with the weights and optimizers that differ from other ranks."""
        return self.apart.state_dict(self.leader)

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Load this rank's own weights. Without ``states`` all ranks continue from the mean in the checkpoint."""
        if states:
            self.apart.load_state_dict(states)
        elif isinstance(self._averager, ParameterAverager):
            self._averager.agreed = True


# -- the hook of a fit ---------------------------------------------------------------------------------------


POST_LOCAL = "start_localSGD_iter"
"""Attribute of post-local SGD's states, torch's and lockstep's: the first round with local steps."""


class _TorchState(NamedTuple):
    """State of one of torch's hooks, in a form that can be pickled."""

    kind: type[Any]
    found: dict[str, Any]


class CommunicationHook(AttachableHook):
    """Communication hook of ``DDPStrategy(ddp_comm_hook=..., ddp_comm_state=..., ...)``.

    Args:
        hook, state, wrapper: as in `lockstep.engines.ddp.strategy.DDPStrategy`.
        period: steps between two averages of the parameters, under post-local SGD.
        outer: arguments of an `OuterOptimizer` that replaces the averages, or None.

    Raises:
        MisconfigurationException: an argument needs another one that is missing, or two do not fit.
        TypeError, ValueError: ``hook`` has the wrong signature.
    """

    def __init__(
        self,
        hook: Callable[..., Any] | None,
        state: Any,
        wrapper: Callable[..., Any] | None,
        period: int | Mapping[int, int] | None,
        outer: Mapping[str, Any] | None,
    ) -> None:
        outer = _check_outer(outer)
        if hook is None:
            for name, value in (("ddp_comm_wrapper", wrapper), ("ddp_comm_state", state)):
                if value is not None:
                    shown = name_of(value) if callable(value) else type(value).__qualname__
                    raise MisconfigurationException(
                        f"DDPStrategy({name}={shown}) without ddp_comm_hook has no effect. Pass both arguments."
                    )
        elif not callable(hook):
            raise MisconfigurationException(
                f"DDPStrategy(ddp_comm_hook={type(hook).__qualname__}(...)): a hook is a function of a state and a "
                "bucket, but this object cannot be called. Pass a hook's state as ddp_comm_state."
            )
        else:
            hook = _wrap(hook, wrapper)
            check_pair(state, hook)
        self.is_local = hasattr(state, POST_LOCAL)
        if self.is_local and period is None:
            raise MisconfigurationException(
                f"DDPStrategy(ddp_comm_state={type(state).__qualname__}(...)) without model_averaging_period: from "
                f"round {getattr(state, POST_LOCAL)} on, each node trains its own parameters, which would never be "
                "averaged. Pass the number of steps between averages, for example model_averaging_period=4."
            )
        is_steps = isinstance(period, int) and not isinstance(period, bool) and period > 0
        if not is_steps and period is not None and not isinstance(period, Mapping):
            raise MisconfigurationException(
                f"DDPStrategy(model_averaging_period={period!r}): pass a number of steps above 0, or a mapping of "
                "numbers of steps to numbers of ranks."
            )
        needs = "PostLocalSGDState(...) as ddp_comm_state and post_local_sgd as ddp_comm_hook"
        if not self.is_local and outer is not None:
            raise MisconfigurationException(
                f"DDPStrategy(outer_optimizer={dict(outer)}) works only with local steps. Pass {needs} as well."
            )
        if not self.is_local and period is not None:
            rank_zero_warn(
                f"DDPStrategy(model_averaging_period={period}) has no effect: without {needs}, gradients are averaged "
                "in every step."
            )
        self.hook = hook
        self.state = state
        self._period, self._outer = period, outer
        self._nodes: tuple[Any, Any] | None = None  # the default group, and the subgroup of this node
        self._owns_subgroup = False

    # -- a fit

    def attach(
        self, reducer: Reducer, module: nn.Module, optimizers: list[Optimizer], node_rank: int, **of_steps: Any
    ) -> HookedLocalSteps | None:
        """Make the hook reduce the buckets of ``reducer``. Collective.

        Args:
            reducer: this fit's reducer, before its first round.
            module, optimizers: the fit's module and optimizers.
            node_rank: index of this process's node, from the launcher or the cluster.
            **of_steps: further arguments of `lockstep.extensions.parallel.comm_hooks.HookedLocalSteps`.

        Returns:
            the fit's local steps under post-local SGD, else None.
        """
        assert self.hook is not None
        check_hook(self.state, self.hook, [p for p in module.parameters() if p.requires_grad])
        if self.is_local:
            self._find_subgroup(node_rank)
        state = prepare_state(self.state, None, self.hook)
        attach_hook(reducer, state, self.hook, marks_of(self.hook, state))
        if not self.is_local or self._period is None:
            return None
        return HookedLocalSteps(self.state, module, optimizers, self._period, self._outer, reducer=reducer, **of_steps)

    def _find_subgroup(self, node_rank: int) -> None:
        """Assign a group of this node's ranks to the hook's state if it has no subgroup."""
        state = self.state
        if state.subgroup is not None or not averages_locally(state) or comm.world_size() == 1:
            return
        # a second fit in the same default group uses the same subgroup
        if self._nodes is None or self._nodes[0] is not dist.group.WORLD:
            nodes = comm.all_gather_object(node_rank)
            mine = [rank for rank, node in enumerate(nodes) if node == node_rank]
            self._nodes = dist.group.WORLD, group_of(mine)
        state.subgroup, self._owns_subgroup = self._nodes[1], True

    def detach(self) -> None:
        """Remove the subgroup that `attach` set in the hook's state. Other values are kept for the next fit."""
        if self._owns_subgroup:
            self.state.subgroup, self._owns_subgroup = None, False

    def __getstate__(self) -> dict[str, Any]:
        kept = {**vars(self), "_nodes": None}  # a group belongs to its process
        state = self.state
        if any(torch_name(kind) is not None for kind in type(state).__mro__):
            # torch's PowerSGDState looks up the default group when it is unpickled, and a new process has none yet
            slots = [name for kind in type(state).__mro__ for name in vars(kind).get("__slots__", ())]
            found = {name: getattr(state, name) for name in slots if hasattr(state, name)}
            found.update(getattr(state, "__dict__", {}))
            if found.get("process_group") is dist.group.WORLD:
                found["process_group"] = None
            kept["state"] = _TorchState(type(state), found)
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        if isinstance(self.state, _TorchState):
            kind, found = self.state
            self.state = object.__new__(kind)
            for name, value in found.items():
                setattr(self.state, name, value)

    # -- checkpoints

    def rank_states(self, local: CountedLocalSteps | None, alone: bool) -> list[dict[str, Any]]:
        """Gather on rank 0 each rank's state: the hook's memory, and the rank's own weights and optimizers.

        Collective, unless ``alone``.

        Args:
            local: the fit's local steps.
            alone: return only this rank's state without weights and optimizers, which are then the checkpoint's.
        """
        own = local.rank_state() if local is not None and not alone else {}
        mine = snapshot({"hook": save_state(self.state), **({"apart": own} if own else {})})
        return [mine] if alone else gather_on_zero(mine)

    def load_rank_states(
        self, local: CountedLocalSteps | None, states: Sequence[dict[str, Any]], device: torch.device
    ) -> None:
        """Load this rank's state from the saved states of all ranks, even if the number of ranks has changed."""
        world, rank = comm.world_size(), comm.rank()
        memories = share_states([state["hook"] for state in states], world)
        if memories:
            load_state(self.state, memories[rank], device)
        if local is not None:
            local.load_rank_states([state.get("apart", {}) for state in states] if len(states) == world else [])


def communication_hook(*arguments: Any) -> CommunicationHook | None:
    """Return a `CommunicationHook` with the given arguments, or None if the arguments contain no hook."""
    made = CommunicationHook(*arguments)
    return None if made.hook is None else made


def _wrap(hook: Callable[..., Any], wrapper: Callable[..., Any] | None) -> Any:
    if wrapper is None:
        return hook
    try:
        return wrapper(hook)
    except TypeError as error:
        raise MisconfigurationException(
            f"DDPStrategy(ddp_comm_wrapper={name_of(wrapper)}) failed ({error}). Pass a function that takes a hook and "
            "returns another one, for example fp16_wrapper."
        ) from None


def _check_outer(outer: object) -> dict[str, Any] | None:
    """Check and return the argument ``outer_optimizer`` as keyword arguments for `OuterOptimizer`.

    Raises:
        MisconfigurationException: it is not a dict of such arguments.
    """
    if outer is None:
        return None
    named = inspect.signature(OuterOptimizer).parameters.items()
    names = [name for name, one in named if one.kind is inspect.Parameter.KEYWORD_ONLY and name != "buffers"]
    if not isinstance(outer, Mapping) or not set(outer) <= set(names):
        raise MisconfigurationException(
            f"DDPStrategy(outer_optimizer={outer!r:.100}): pass a dict of arguments of lockstep's OuterOptimizer "
            f"({', '.join(names)}); an empty dict uses DiLoCo's settings."
        )
    return dict(outer)
