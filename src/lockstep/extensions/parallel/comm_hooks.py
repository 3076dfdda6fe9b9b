"""Communication hooks of a fit: checked, attached, saved and resumed; local steps, after which weights differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from lockstep.extensions.parallel.hooks.hook_transport import attach_hook, name_of
from lockstep.extensions.parallel.hooks.local_sgd import group_of, marks_of
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import beside
from lockstep.ground.rank import rank_zero_warn
from lockstep.precision.base import LossScaler

# -- weights that differ between ranks -----------------------------------------------------------------------


class DivergedWeights:
    """This rank's own weights and optimizers, beside the mean that others are shown.

    Args:
        module: of the fit.
        optimizers: whose states part with the weights, and do not meet again.
        scaler: of 16-bit precision, or None: it follows this rank's overflows.
        share_buffers: whether the mean comes with rank 0's buffers; else each rank keeps its own.

    Attributes:
        differ: whether the ranks' weights may differ now.
        parted: whether they ever did, in this fit or the one that it goes on from: optimizers differ since then.
    """

    def __init__(
        self, module: nn.Module, optimizers: list[Optimizer], scaler: LossScaler | None, share_buffers: bool
    ) -> None:
        self.differ = self.parted = False
        self._module = module
        self._optimizers = optimizers
        self._scaler = scaler
        self._share_buffers = share_buffers
        self._trained: set[str] = set()
        self._own: dict[str, Tensor] | None = None

    @property
    def shown(self) -> bool:
        """Whether the module holds the mean now, and this rank's own weights are put aside."""
        return self._own is not None

    def step(self) -> None:
        """A step is made with this rank's or node's gradients alone."""
        self.differ = self.parted = True

    def meet(self) -> None:
        """All ranks have taken the same parameters."""
        self.differ = False

    # -- looking

    def show_mean(self) -> None:
        """Put the mean in the place of this rank's weights and buffers, until `show_own`. Collective."""
        if self._own is None:
            parameters, buffers = self._parameters(), dict(self._module.named_buffers())
            self._own = {name: tensor.detach().clone() for name, tensor in {**parameters, **buffers}.items()}
            average(list(parameters.values()))
            if self._share_buffers:
                comm.broadcast_tensors(buffers.values())

    @torch.no_grad()
    def show_own(self) -> None:
        """Put this rank's weights and buffers back."""
        if self._own is not None:
            _copy(self._own, self._tensors())
            self._own = None

    def named_parameters(self) -> dict[str, Tensor]:
        """The module's, and those that the optimizers alone have."""
        return {**dict(self._module.named_parameters()), **beside(self._module, self._optimizers)}

    def _parameters(self) -> dict[str, Tensor]:
        """Those that were trained: a frozen one is alike on all ranks, and the mean of equals may round."""
        named = self.named_parameters()
        self._trained.update(name for name, parameter in named.items() if parameter.requires_grad)
        return {name: parameter for name, parameter in named.items() if name in self._trained}

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.named_parameters(), **dict(self._module.named_buffers())}

    # -- saving

    def state_dict(self, leader: int) -> dict[str, Any]:
        """What this rank alone needs to go on with the same bits, on the CPU.

        Args:
            leader: the first of the ranks that have the same parameters and optimizers, who alone saves them.
        """
        if not self.parted:
            return {}
        state: dict[str, Any] = {"leader": leader, "differ": self.differ}
        if self.differ:
            own = self._own or {**self._parameters(), **dict(self._module.named_buffers())}
            buffers = {name for name, _ in self._module.named_buffers()}
            mine = comm.rank() == leader
            state["tensors"] = {name: tensor.detach() for name, tensor in own.items() if mine or name in buffers}
        if comm.rank() == leader:
            state["optimizers"] = [optimizer.state_dict() for optimizer in self._optimizers]
            if self._scaler is not None:
                state["scaler"] = self._scaler.state_dict()
        return snapshot(state)

    @torch.no_grad()
    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's part of what `state_dict` gave on all ranks, which are as many now."""
        mine = states[comm.rank()]
        if not mine:
            return
        leader = states[mine["leader"]]
        self.parted, self.differ = True, mine["differ"]
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
    """Post-local SGD in a fit: counts rounds with the hook's state, and averages after steps.

    Args:
        state: of the hook, lockstep's or torch's; its subgroup is made.
        module, optimizers: of the fit.
        period: steps from one average to the next.
        outer: arguments of an outer optimizer in place of the averages, or None.
        reducer: of the fit.
        scaler: of 16-bit precision, or None.
        take_buffers: gives all ranks rank 0's buffers; None where each keeps its own.

    Attributes:
        apart: this rank's own weights.
        leader: the first of the ranks whose gradients are averaged with this one's in a local step.

    Raises:
        MisconfigurationException: for an optimizer that averages or shards by itself.
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
                    f"DDPStrategy(model_averaging_period={period}) with {type(optimizer).__name__}: that optimizer "
                    "averages or shards over the ranks by itself; return the plain one from `configure_optimizers`."
                )
        self._state, self._module, self._reducer = state, module, reducer
        self._period, self._outer = period, outer
        self._take_buffers = take_buffers
        together = getattr(state, "local_allreduce", getattr(state, "post_local_gradient_allreduce", True))
        members = [comm.rank()]
        if together:
            members = sorted(dist.get_process_group_ranks(state.subgroup)) if state.subgroup is not None else members
        self.leader = members[0]
        self._members = members
        self._parts = len(members) < comm.world_size()  # else all ranks still take every step together
        self.apart = DivergedWeights(module, optimizers, scaler, take_buffers is not None)
        self._start_averaging(max(0, state.start_localSGD_iter - self._rounds))

    def _start_averaging(self, start: int) -> None:
        parameters, self._start = list(self.apart.named_parameters().values()), start
        if self._outer is None:
            self._averager: Any = ParameterAverager(parameters, self._period, start)
        else:
            self._averager = OuterOptimizer(parameters, self._period, start, **self._outer)  # type: ignore[arg-type]

    @property
    def _rounds(self) -> int:
        state = self._state
        return int(state.iter if hasattr(state, "iter") else state.iteration)

    @property
    def differ(self) -> bool:
        """Whether the ranks' weights may differ now."""
        return self.apart.differ

    # -- a window

    def round(self) -> None:
        """A round of gradients begins; the hook counts it while it runs."""
        if self._parts and self._rounds >= self._state.start_localSGD_iter:
            self.apart.step()

    def averaged_ranks(self) -> Sequence[int]:
        """The ranks over which gradients are averaged in the next round."""
        local = self._rounds >= self._state.start_localSGD_iter
        return self._members if local else range(comm.world_size())

    def summed_weight(self, weight: Tensor) -> tuple[Tensor, int]:
        """The sum of ``weight`` over the ranks whose gradients were averaged, and their number. Collective."""
        over = self._reducer.round_group
        if over is False:
            return weight, 1
        return comm.all_reduce(weight, "sum", over), comm.world_size(over)

    def step(self) -> None:
        """An optimizer has stepped: average if it is time. Collective then."""
        if self._averager.step() and self._averager.agreed and self.apart.differ:
            self.apart.meet()
            if self._take_buffers is not None:
                self._take_buffers()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have alike: the count of steps, and the outer optimizer."""
        return {"start": self._start, "averager": self._averager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was saved."""
        self._start_averaging(state["start"])
        self._averager.load_state_dict(state["averager"])

    def rank_state(self) -> dict[str, Any]:
        """What this rank alone needs: its own weights and optimizers."""
        return self.apart.state_dict(self.leader)

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's own weights; with none to take, all go on from the checkpoint's, which are the mean."""
        if states:
            self.apart.load_state_dict(states)
        elif isinstance(self._averager, ParameterAverager):
            self._averager.agreed = True


# -- the hook of a fit ---------------------------------------------------------------------------------------


POST_LOCAL = "start_localSGD_iter"
"""What the states of post-local SGD have, torch's and lockstep's: the round from which on steps are local."""


class CommunicationHook(AttachableHook):
    """What ``DDPStrategy(ddp_comm_hook=..., ddp_comm_state=..., ...)`` stands for.

    Args:
        hook, state, wrapper: as in `lockstep.engines.ddp.strategy.DDPStrategy`.
        period: steps from one average of the parameters to the next, under post-local SGD.
        outer: arguments of `OuterOptimizer`, which takes the place of the averages; None: no such.

    Raises:
        MisconfigurationException: for arguments that lack each other, or do not go together.
        TypeError, ValueError: ``hook`` cannot be one, by its signature.
    """

    def __init__(
        self,
        hook: Callable[..., Any] | None,
        state: Any,
        wrapper: Callable[..., Any] | None,
        period: int | Mapping[int, int] | None,
        outer: Mapping[str, Any] | None,
    ) -> None:
        outer = _checked_outer(outer)
        if hook is None:
            for name, value in (("ddp_comm_wrapper", wrapper), ("ddp_comm_state", state)):
                if value is not None:
                    shown = name_of(value) if callable(value) else type(value).__qualname__
                    raise MisconfigurationException(
                        f"DDPStrategy({name}={shown}) without ddp_comm_hook: there is no hook to use it; give both."
                    )
        elif not callable(hook):
            raise MisconfigurationException(
                f"DDPStrategy(ddp_comm_hook={type(hook).__qualname__}(...)): a hook is a function of a state and a "
                "bucket; what it remembers is ddp_comm_state."
            )
        else:
            hook = _wrapped(hook, wrapper)
            check_pair(state, hook)
        self.is_local = hasattr(state, POST_LOCAL)
        if self.is_local and period is None:
            raise MisconfigurationException(
                f"DDPStrategy(ddp_comm_state={type(state).__qualname__}(...)) without model_averaging_period: from "
                f"round {getattr(state, POST_LOCAL)} on nodes train parameters of their own, which would never meet "
                "again; give the number of steps between averages, model_averaging_period=4 for instance."
            )
        _check_period(period)
        if not self.is_local:
            self._say_unused(period, outer)
        self.hook = hook
        self.state = state
        self._period, self._outer = period, outer
        self._nodes: tuple[Any, Any] | None = None  # the default group, and the group of this node in it
        self._lent = False

    def _say_unused(self, period: int | Mapping[int, int] | None, outer: Mapping[str, Any] | None) -> None:
        needs = "PostLocalSGDState(...) as ddp_comm_state and post_local_sgd as ddp_comm_hook"
        if outer is not None:
            raise MisconfigurationException(
                f"DDPStrategy(outer_optimizer={dict(outer)}) is for local steps, which need {needs}."
            )
        if period is not None:
            rank_zero_warn(
                f"DDPStrategy(model_averaging_period={period}) has no effect: without {needs} all ranks take every "
                "step together."
            )

    @property
    def is_there(self) -> bool:
        """Whether there is a hook at all."""
        return self.hook is not None

    # -- a fit

    def attach(
        self, reducer: Reducer, module: nn.Module, optimizers: list[Optimizer], node_rank: int, **of_steps: Any
    ) -> HookedLocalSteps | None:
        """Let the hook carry ``reducer``'s buckets. Collective.

        Args:
            reducer: of this fit, before its first round.
            module, optimizers: of the fit.
            node_rank: this process's node, as the launcher or the cluster tells it.
            **of_steps: further arguments of `lockstep.extensions.parallel.comm_hooks.HookedLocalSteps`.

        Returns:
            the local steps of this fit, under post-local SGD.
        """
        assert self.hook is not None
        check_hook(self.state, self.hook, [p for p in module.parameters() if p.requires_grad])
        if self.is_local:
            self._lend_node_group(node_rank)
        state = prepare_state(self.state, None, self.hook)
        attach_hook(reducer, state, self.hook, marks_of(self.hook, state))
        if not self.is_local or self._period is None:
            return None
        return HookedLocalSteps(self.state, module, optimizers, self._period, self._outer, reducer=reducer, **of_steps)

    def _lend_node_group(self, node_rank: int) -> None:
        """Give the state a subgroup of the ranks of one node, where it names none."""
        state = self.state
        together = getattr(state, "local_allreduce", getattr(state, "post_local_gradient_allreduce", True))
        if state.subgroup is not None or not together or comm.world_size() == 1:
            return
        if self._nodes is None or self._nodes[0] is not dist.group.WORLD:
            nodes = comm.all_gather_object(node_rank)
            mine = [rank for rank, node in enumerate(nodes) if node == node_rank]
            self._nodes = dist.group.WORLD, group_of(mine)
        state.subgroup, self._lent = self._nodes[1], True

    def detach(self) -> None:
        """The fit is over: take back what was lent to the state. What it remembers stays."""
        if self._lent:
            self.state.subgroup, self._lent = None, False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_nodes": None}  # a group belongs to its process

    # -- checkpoints

    def rank_states(self, local: CountedLocalSteps | None, alone: bool) -> list[dict[str, Any]]:
        """What each rank alone needs: the hook's memory, its own weights and optimizers; by rank, on rank 0.

        Collective, unless ``alone``.

        Args:
            local: of the fit.
            alone: ask no other rank, and leave out weights and optimizers, which are those of the checkpoint then.
        """
        own = local.rank_state() if local is not None and not alone else {}
        mine = snapshot({"hook": save_state(self.state), **({"apart": own} if own else {})})
        return [mine] if alone else gather_on_zero(mine)

    def load_rank_states(
        self, local: CountedLocalSteps | None, states: Sequence[dict[str, Any]], device: torch.device
    ) -> None:
        """Take this rank's part, of as many ranks or of another number of them."""
        world, rank = comm.world_size(), comm.rank()
        memories = share_states([state["hook"] for state in states], world)
        if memories:
            load_state(self.state, memories[rank], device)
        if local is not None:
            local.load_rank_states([state.get("apart", {}) for state in states] if len(states) == world else [])


def communication_hook(*arguments: Any) -> CommunicationHook | None:
    """Return the hook that the arguments of `CommunicationHook` make; None where they name none."""
    made = CommunicationHook(*arguments)
    return made if made.is_there else None


def _wrapped(hook: Callable[..., Any], wrapper: Callable[..., Any] | None) -> Any:
    if wrapper is None:
        return hook
    try:
        return wrapper(hook)
    except TypeError as error:
        raise MisconfigurationException(
            f"DDPStrategy(ddp_comm_wrapper={name_of(wrapper)}): a wrapper is a function that is given the hook and "
            f"returns another, fp16_wrapper for instance; {error}."
        ) from None


def _check_period(period: object) -> None:
    """Refuse a ``model_averaging_period`` that is no number of steps, nor a mapping of such."""
    if isinstance(period, bool) or (period is not None and not isinstance(period, (int, Mapping))) or period == 0:
        raise MisconfigurationException(
            f"DDPStrategy(model_averaging_period={period!r}): a number of steps above 0, or a mapping of such to "
            "numbers of ranks."
        )
    if isinstance(period, int) and period < 1:
        raise MisconfigurationException(f"DDPStrategy(model_averaging_period={period}): a number of steps above 0.")


def _checked_outer(outer: object) -> dict[str, Any] | None:
    """``outer_optimizer`` as arguments of `OuterOptimizer`.

    Raises:
        MisconfigurationException: for anything but a dict of its arguments.
    """
    if outer is None:
        return None
    named = inspect.signature(OuterOptimizer).parameters.items()
    names = [name for name, one in named if one.kind is inspect.Parameter.KEYWORD_ONLY and name != "buffers"]
    if not isinstance(outer, Mapping) or not set(outer) <= set(names):
        raise MisconfigurationException(
            f"DDPStrategy(outer_optimizer={outer!r:.100}): a dict of arguments of lockstep's OuterOptimizer "
            f"({', '.join(names)}); {{}} takes DiLoCo's."
        )
    return dict(outer)
