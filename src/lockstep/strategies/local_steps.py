"""Local steps of a fit: which rounds stay within a node, when the ranks' weights meet, what is saved of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.parallel.averaging import ParameterAverager
from lockstep.parallel.outer import OuterOptimizer
from lockstep.strategies.apart import Apart


class LocalSteps:
    """Post-local SGD in a fit: counts rounds with the hook's state, and averages after steps.

    Args:
        state: of the hook, lockstep's or torch's; its subgroup is made.
        module, optimizers: of the fit.
        period: steps from one average to the next.
        outer: arguments of an outer optimizer in place of the averages, or None.
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
        module: Any,
        optimizers: list[Any],
        period: int | Mapping[int, int],
        outer: Mapping[str, Any] | None,
        *,
        scaler: Any,
        take_buffers: Any,
    ) -> None:
        for optimizer in optimizers:
            if type(optimizer).__module__.startswith("torch.distributed"):
                raise MisconfigurationException(
                    f"DDPStrategy(model_averaging_period={period}) with {type(optimizer).__name__}: that optimizer "
                    "averages or shards over the ranks by itself; return the plain one from `configure_optimizers`."
                )
        self._state, self._module = state, module
        self._period, self._outer = period, outer
        self._take_buffers = take_buffers
        together = getattr(state, "local_allreduce", getattr(state, "post_local_gradient_allreduce", True))
        members = [comm.rank()]
        if together:
            members = sorted(dist.get_process_group_ranks(state.subgroup)) if state.subgroup is not None else members
        self.leader = members[0]
        self._members = members
        self._parts = len(members) < comm.world_size()  # else all ranks still take every step together
        self.apart = Apart(module, optimizers, scaler, take_buffers is not None)
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

    def take_in(self, parameters: Iterable[Tensor]) -> None:
        """Average these parameters, too, from now on."""
        self._averager.take_in(parameters)

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

    def load_rank_states(self, states: list[dict[str, Any]]) -> None:
        """Take this rank's own weights; with none to take, all go on from the checkpoint's, which are the mean."""
        if states:
            self.apart.load_state_dict(states)
        elif isinstance(self._averager, ParameterAverager):
            self._averager.agreed = True
