"""A communication hook given to ``DDPStrategy``: checked at once, attached for a fit, its state saved and resumed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.checkpoint.snapshot import snapshot
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn
from lockstep.parallel.hooks.check import check_hook, check_pair, prepare_state
from lockstep.parallel.hooks.identity import name_of
from lockstep.parallel.hooks.local_steps import marks_of
from lockstep.parallel.hooks.nodes import group_of
from lockstep.parallel.hooks.saved import load_state, save_state, share_states
from lockstep.parallel.outer import OuterOptimizer
from lockstep.parallel.reducer import Reducer
from lockstep.strategies.apart import gathered
from lockstep.strategies.local_steps import LocalSteps

POST_LOCAL = "start_localSGD_iter"
"""What the states of post-local SGD have, torch's and lockstep's: the round from which on steps are local."""


class CommunicationHook:
    """What ``DDPStrategy(ddp_comm_hook=..., ddp_comm_state=..., ...)`` stands for.

    Args:
        hook, state, wrapper: as in `lockstep.strategies.ddp.DDPStrategy`.
        period: steps from one average of the parameters to the next, under post-local SGD.
        outer: arguments of `lockstep.parallel.outer.OuterOptimizer`, which takes the averages' place; None: no such.

    Raises:
        MisconfigurationException: for arguments that lack each other, or do not go together.
        TypeError, ValueError: ``hook`` cannot be one, by its signature.
    """

    def __init__(self, hook: Any, state: Any, wrapper: Any, period: Any, outer: Any) -> None:
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
        if isinstance(period, bool) or (period is not None and not isinstance(period, (int, Mapping))) or period == 0:
            raise MisconfigurationException(
                f"DDPStrategy(model_averaging_period={period!r}): a number of steps above 0, or a mapping of such to "
                "numbers of ranks."
            )
        if isinstance(period, int) and period < 1:
            raise MisconfigurationException(f"DDPStrategy(model_averaging_period={period}): a number of steps above 0.")
        if not self.is_local:
            self._say_unused(period, outer)
        self.hook = hook
        self.state = state
        self._period, self._outer = period, outer
        self._nodes: tuple[Any, Any] | None = None  # the default group, and the group of this node in it
        self._lent = False

    def _say_unused(self, period: Any, outer: Any) -> None:
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
        self, reducer: Reducer, module: Any, optimizers: list[Any], node_rank: int, **of_steps: Any
    ) -> LocalSteps | None:
        """Let the hook carry ``reducer``'s buckets. Collective.

        Args:
            reducer: of this fit, before its first round.
            module, optimizers: of the fit.
            node_rank: this process's node, as the launcher or the cluster tells it.
            **of_steps: further arguments of `lockstep.strategies.local_steps.LocalSteps`.

        Returns:
            the local steps of this fit, under post-local SGD.
        """
        check_hook(self.state, self.hook, [p for p in module.parameters() if p.requires_grad])
        if self.is_local:
            self._lend_node_group(node_rank)
        state = prepare_state(self.state, None, self.hook)
        reducer.register_comm_hook(state, self.hook, marks_of(self.hook, state))
        if not self.is_local or self._period is None:
            return None
        return LocalSteps(self.state, module, optimizers, self._period, self._outer, **of_steps)

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

    def rank_states(self, local: LocalSteps | None, alone: bool) -> list[dict[str, Any]]:
        """What each rank alone needs: the hook's memory, its own weights and optimizers; by rank, on rank 0.

        Collective, unless ``alone``.

        Args:
            local: of the fit.
            alone: ask no other rank, and leave out weights and optimizers, which are those of the checkpoint then.
        """
        own = local.apart.state_dict(local.leader) if local is not None and not alone else {}
        mine = snapshot({"hook": save_state(self.state), **({"apart": own} if own else {})})
        return [mine] if alone else gathered(mine)

    def load_rank_states(
        self, local: LocalSteps | None, states: Sequence[dict[str, Any]], device: torch.device
    ) -> None:
        """Take this rank's part, of as many ranks or of another number of them."""
        world, rank = comm.world_size(), comm.rank()
        memories = share_states([state["hook"] for state in states], world)
        if memories:
            load_state(self.state, memories[rank], device)
        if local is not None:
            local.load_rank_states([state.get("apart", {}) for state in states] if len(states) == world else [])


def _wrapped(hook: Any, wrapper: Any) -> Any:
    if wrapper is None:
        return hook
    try:
        return wrapper(hook)
    except TypeError as error:
        raise MisconfigurationException(
            f"DDPStrategy(ddp_comm_wrapper={name_of(wrapper)}): a wrapper is a function that is given the hook and "
            f"returns another, fp16_wrapper for instance; {error}."
        ) from None


def _checked_outer(outer: Any) -> dict[str, Any] | None:
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
