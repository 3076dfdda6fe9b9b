"""Periodic averaging of parameters over ranks, for training with local steps between the averages.

`OuterOptimizer` makes an outer step at each average (DiLoCo: Douillard et al., 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.extensions.parallel.hooks.compress import mean, mean_in_halves
from lockstep.extensions.parallel.hooks.local_sgd import group_of
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException

_TORCH_AVERAGERS = "torch.distributed.algorithms.model_averaging."
_AVERAGERS = ("PeriodicModelAverager", "HierarchicalModelAverager")


class ParameterAverager:
    """Averager of parameters over ranks after every ``period``-th optimizer step, starting with step ``start``.

    Use it with `lockstep.engines.ddp.hooks.post_local_sgd` and the same ``start``: the first ``start`` steps average
    gradients over all ranks, later ones only within a node, and this class averages the nodes' parameters. Steps are
    counted from 0. An average follows the steps ``start``, ``start + period``, ``start + 2 * period``, ..., as in
    torch's ``PeriodicModelAverager``. After it the ranks' parameters have the same bits.

    It averages all parameters that have required a gradient in some step, even if they have none now. There is one
    message for each dtype, device and 16 MiB. 16-bit parameters are sent in 16 bits and summed in float32.

    Args:
        parameters: the same on every rank, in the same order.
        period: steps between two averages. A mapping ``{period: ranks}`` averages in a hierarchy: if a step's distance
            from ``start`` is a multiple of several periods, the largest of them counts, and parameters are averaged
            over its number of neighboring ranks. Larger periods have more ranks, and the largest has all. Torch's
            ``PeriodicModelAverager`` and ``HierarchicalModelAverager`` bring their periods, groups and
            ``warmup_steps``.
        start: step of the first average.
        group: process group of the ranks; ``None`` is the default group.
        buffers: tensors that are averaged as well, such as BatchNorm's running statistics, which differ after local
            steps. Integer tensors are ignored.

    Attributes:
        steps: optimizer steps so far.
        agreed: True if all ranks' parameters are equal now, as far as this averager knows.
        collectives: messages so far.
        bytes: bytes that this rank has sent in them.

    Raises:
        MisconfigurationException: for a period below 1, a negative start, or a hierarchy that does not fit the ranks.

    Example::

        averager = ParameterAverager(model.parameters(), period=4, start=100)
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            averager.step()
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        period: int | Mapping[int, int] | Any,
        start: int = 0,
        group: comm.Group = None,
        *,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self._frozen = list(parameters)
        self._trained: list[Tensor] = []
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        self._torchs: Any = None
        self.steps = 0
        self.agreed = True
        self.collectives = 0
        self.bytes = 0
        self._start = start
        self._origin = start  # multiples are counted from here
        if isinstance(period, (int, Mapping)) and not isinstance(period, bool):
            periods = period if isinstance(period, Mapping) else {period: comm.world_size(group)}
            _check_periods(periods, start, comm.world_size(group))
            self._groups = dict(_groups(periods, group))
        else:
            self._groups = self._read_torch_averager(period)
        self._world = comm.world_size(group if self._torchs is None else self._torchs.process_group)

    def _read_torch_averager(self, averager: Any) -> dict[int, Any]:
        """Read the settings of torch's averager, and return its process groups by period, smallest period first."""
        name = type(averager).__name__
        if name not in _AVERAGERS or not type(averager).__module__.startswith(_TORCH_AVERAGERS):
            raise MisconfigurationException(
                f"ParameterAverager(period={averager!r}): pass a number of steps, a mapping of numbers of steps to "
                f"numbers of ranks, or torch's {' or '.join(_AVERAGERS)}"
            )
        self._torchs = averager
        self.steps = averager.step
        self._start = self._origin = averager.warmup_steps
        if name == "PeriodicModelAverager":
            return {averager.period: averager.process_group}
        self._origin = 0  # torch's hierarchical averager counts multiples from step 0, also with a warmup
        return dict(averager.period_process_group_dict)

    def step(self) -> bool:
        """Count an optimizer step. At the end of a period, average the parameters (a collective operation).

        Returns:
            True if parameters were averaged, over all ranks or some of them.
        """
        # a parameter that is unfrozen later takes part from then on, and stays if it is frozen again
        if self._frozen:
            self._trained += [parameter for parameter in self._frozen if parameter.requires_grad]
            self._frozen = [parameter for parameter in self._frozen if not parameter.requires_grad]
        step = self.steps
        self.steps += 1
        if self._torchs is not None:
            self._torchs.step = self.steps
        if step < self._start:
            return False
        self.agreed = False
        for period, group in reversed(self._groups.items()):
            if (step - self._origin) % period == 0:
                collectives, sent = average([*self._trained, *self._buffers], group)
                self.collectives += collectives
                self.bytes += sent
                self.agreed = comm.world_size(group) == self._world
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and True under "agreed" if all ranks' parameters are equal now."""
        return {"steps": self.steps, "agreed": self.agreed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`.

        Args:
            state: a saved state, from any rank.
        """
        self.steps = state["steps"]
        self.agreed = state["agreed"]
        if self._torchs is not None:
            self._torchs.step = self.steps


def _check_periods(periods: Mapping[int, int], start: int, world: int) -> None:
    shown = f"ParameterAverager(period={dict(periods)}, start={start!r})"
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in [*periods, start])
    if not periods or not whole or min(periods) < 1 or start < 0:
        raise MisconfigurationException(f"{shown}: pass periods of at least 1 step, and a start of at least 0")
    sizes = [size for _, size in sorted(periods.items())]
    if sizes != sorted(sizes) or sizes[-1] != world or any(size < 1 or world % size for size in sizes):
        raise MisconfigurationException(
            f"{shown} for {world} ranks: each number of ranks must divide {world}, a larger period must not have "
            f"fewer ranks, and the largest period must have all {world}. For example {{4: 2, 16: {world}}} averages "
            "over pairs of ranks every 4 steps and over all ranks every 16"
        )


def _groups(periods: Mapping[int, int], group: comm.Group) -> Iterator[tuple[int, Any]]:
    """Create the process groups, and yield (period, process group), smallest period first. Collective."""
    made: dict[int, Any] = {comm.world_size(group): group}
    rank = comm.rank(group)
    for period, size in sorted(periods.items()):
        if size not in made:
            first = rank // size * size
            made[size] = group_of(list(range(first, first + size)), group)
        yield period, made[size]


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: comm.Group = None, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Overwrite ``tensors`` with their means over the ranks. Several tensors are sent in one message. Collective.

    Args:
        tensors: floating point or complex tensors, with the same shapes and dtypes in the same order on all ranks;
            they need not be contiguous.
        group: process group of the ranks; ``None`` is the default group.
        dtype: a 16-bit dtype to send in; sums are made in float32. Default: the tensors' own dtype. Tensors with 16
            bits are always summed in float32.

    Returns:
        the number of messages, and the number of bytes that this rank sent in them.
    """
    world = comm.world_size(group)
    if world == 1:
        return 0, 0
    collectives = sent = 0
    for piece in comm.pieces(tensors):
        flat = torch.cat([comm.numbers_of(tensor) for tensor in piece])
        device = comm.carrier(group, flat.device)
        moved = flat.to(device)
        sent_in = moved.dtype if dtype is None and moved.element_size() == 2 else dtype
        if sent_in is None:
            mean(moved, group)
            collectives, sent = collectives + 1, sent + moved.nbytes
        else:
            mean_in_halves(moved, sent_in, group)
            slice_ = 2 * -(-moved.numel() // world)
            collectives, sent = collectives + 2, sent + slice_ * (world + 1)
        start = 0
        for tensor in piece:
            numbers = tensor.numel() * (2 if tensor.is_complex() else 1)
            part = moved[start : start + numbers]
            start += numbers
            part = torch.view_as_complex(part.view(-1, 2)) if tensor.is_complex() else part
            tensor.detach().copy_(part.view(tensor.shape))
    return collectives, sent


# -- the outer optimizer --------------------------------------------------------------------------------------


_SENT_IN: dict[str | None, torch.dtype | None] = {None: None, "fp16": torch.float16, "bf16": torch.bfloat16}


class OuterOptimizer:
    """Optimizer that makes one outer step with the ranks' mean parameter change after every ``period`` local steps.

    The outer gradient is the difference between the parameters at the last outer step and the ranks' current mean
    parameters. The outer optimizer steps from the former, and all ranks continue from its result, bit for bit. With
    ``lr=1, momentum=0`` this is plain averaging.

    Gradients must stay local between outer steps: use `lockstep.engines.ddp.hooks.post_local_sgd` with
    ``PostLocalSGDState(start, local_allreduce=False)`` (without that argument they are averaged within a node), or no
    reducer at all. Inner optimizers keep their states.

    It needs twice the memory of the parameters, for their values at the last outer step and for the momentum; in
    float32 if the parameters have 16 bits.

    Args:
        parameters: the same on every rank, in the same order, and with the same values at the first local step. All
            are stepped; frozen ones do not change.
        period: local steps per outer step; 500 in DiLoCo.
        start: steps before the first local one; their gradients are averaged over all ranks.
        lr, momentum, nesterov: settings of the outer SGD; the defaults are DiLoCo's.
        optimizer: a function that makes another outer optimizer from parameters.
        compression: dtype in which differences are sent: "fp16" or "bf16" (summed in float32), or None for their own.
        group: process group of the ranks; ``None`` is the default group.
        buffers: tensors that are averaged at each outer step, such as BatchNorm's running statistics. Integer tensors
            are ignored.

    Attributes:
        optimizer: the outer optimizer; None before the first local step. Its learning rate may be scheduled.
        steps: inner steps so far.
        agreed: True if all ranks' parameters are equal now.
        collectives: messages so far.
        bytes: bytes that this rank has sent in them.

    Raises:
        MisconfigurationException: for a period below 1, a negative start, or another compression.

    Example::

        model = DistributedDataParallel(net)
        model.register_comm_hook(PostLocalSGDState(0, local_allreduce=False), post_local_sgd)
        outer = OuterOptimizer(model.parameters(), period=100)
        for batch in loader:
            inner.zero_grad()
            loss(model, batch).backward()
            inner.step()
            outer.step()
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        period: int,
        start: int = 0,
        group: comm.Group = None,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None,
        compression: Literal["fp16", "bf16"] | None = None,
        buffers: Iterable[Tensor] = (),
    ) -> None:
        whole = isinstance(period, int) and isinstance(start, int) and not isinstance(period, bool)
        if not whole or period < 1 or start < 0:
            raise MisconfigurationException(
                f"OuterOptimizer(period={period!r}, start={start!r}): pass a period of at least 1 step, and a start of "
                "at least 0"
            )
        if compression not in _SENT_IN:
            raise MisconfigurationException(
                f'OuterOptimizer(compression={compression!r}): choose "fp16", "bf16", or None'
            )
        self.period = period
        self.start = start
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0
        self.collectives = 0
        self.bytes = 0
        self._parameters = list(parameters)
        self._buffers = [buffer for buffer in buffers if buffer.is_floating_point() or buffer.is_complex()]
        self._group = group
        self._sent_in = _SENT_IN[compression]
        # torch's SGD refuses nesterov without momentum
        sgd = partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
        self._make = sgd if optimizer is None else optimizer
        self._origins: list[Parameter] = []  # the parameters at the last outer step
        if start == 0:
            self._start_local()

    @property
    def agreed(self) -> bool:
        """True if all ranks' parameters are equal now."""
        return self.steps <= self.start or (self.steps - self.start) % self.period == 0

    def step(self) -> bool:
        """Count a step of the inner optimizer. At the end of a period, make an outer step (a collective operation).

        Returns:
            True if an outer step was made.
        """
        self.steps += 1
        if self.steps < self.start:
            return False
        if self.steps == self.start:
            self._start_local()
            return False
        if (self.steps - self.start) % self.period:
            return False
        assert self.optimizer is not None
        with torch.no_grad():
            # differences are small numbers, so 16 bits lose less of them than of the parameters
            for origin, parameter in zip(self._origins, self._parameters, strict=True):
                origin.grad = origin.detach() - parameter.detach()
            gradients = [origin.grad for origin in self._origins if origin.grad is not None]
            for tensors, dtype in ((gradients, self._sent_in), (self._buffers, None)):
                collectives, sent = average(tensors, self._group, dtype)
                self.collectives += collectives
                self.bytes += sent
            self.optimizer.step()
            for origin, parameter in zip(self._origins, self._parameters, strict=True):
                origin.grad = None
                parameter.detach().copy_(origin)
        return True

    @torch.no_grad()
    def _start_local(self) -> None:
        """Record the current parameters, which are equal on all ranks, as the origin of the next outer step."""
        self._origins = [
            Parameter(parameter.detach().to(_wide(parameter), copy=True)) for parameter in self._parameters
        ]
        self.optimizer = self._make(self._origins)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the parameters at the last outer step, and the outer optimizer's state.

        The result has tensors and plain types, and is the same on all ranks.
        """
        return {
            "steps": self.steps,
            "begun": [parameter.detach().clone() for parameter in self._origins],
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`.

        Raises:
            ValueError: the state has another number of parameters.
        """
        self.steps = state["steps"]
        if state["optimizer"] is None:
            self._origins, self.optimizer = [], None
            return
        if len(state["begun"]) != len(self._parameters):
            raise ValueError(
                f"the outer optimizer's state has {len(state['begun'])} parameters, but the model has "
                f"{len(self._parameters)}. Load the state of the same model"
            )
        # a run that starts with averaged steps has no outer optimizer yet
        self._start_local()
        assert self.optimizer is not None
        for origin, saved in zip(self._origins, state["begun"], strict=True):
            origin.detach().copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.element_size() == 2 and tensor.is_floating_point() else tensor.dtype
