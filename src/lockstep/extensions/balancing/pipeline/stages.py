"""Stages of a pipeline on one rank: training with torch's schedules, and evaluation.

A rank has the stages of one place in the pipeline and sends to the others. Or one process has the stages of all
places, one device for each, and runs the actions of all in one order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.extensions.balancing.pipeline.block_random import BlockRandom
from lockstep.extensions.balancing.pipeline.chain import Chain, Extras
from lockstep.extensions.balancing.pipeline.layout import Layout
from lockstep.extensions.balancing.pipeline.split_check import SplitCheck
from lockstep.extensions.balancing.pipeline.times import AFTER, BACKWARD, BEFORE, BLOCKS, StageTimes
from lockstep.extensions.balancing.planner.timeline import IN_ROUNDS, Action, actions_of, in_one_row
from lockstep.ground import comm
from lockstep.ground.device import current_device
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.seed import forked_random_numbers
from lockstep.ground.tree import tree_map
from lockstep.memory.recompute import running_again

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    Schedule = PipelineScheduleSingle | PipelineScheduleMulti

SPLITS_BACKWARD = "zero-bubble"
SCHEDULES = ("1f1b", "gpipe", *IN_ROUNDS)
KEPT = 16
"""Maximum number of shapes whose stages are kept, with their receive buffers."""
DIMENSIONS = 12
"""Maximum number of dimensions of a tensor that is sent from stage to stage."""
HEAD = 4
"""Numbers that are sent ahead of a tensor, next to its shape."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NOT_FLOATING = (
    "Block {block} of the chain {chain!r} returns {what}. Blocks pass one tensor of floating-point numbers with at "
    f"most {DIMENSIONS} dimensions to the next block. Return one, or move the block out of the chain."
)
OTHER_SHAPE = (
    "Block {block} of the chain {chain!r} returned a tensor of shape {found}, but one of shape {expected} for an "
    "earlier batch of the same shapes. Shapes between the stages must follow from the shapes of the batch, not from "
    "its values: pad the batch in the `collate_fn`."
)
NOT_ROWS = (
    "The chain {chain!r} returns a tensor of shape {shape} for a micro-batch of {samples} samples that "
    "was padded to {rows}: the first dimension of the tensor must be the samples. Or use batch sizes that "
    "micro_batches={count} divides, with drop_last=True."
)
OTHER_ARGUMENTS = (
    "The blocks of the chain {chain!r} were called with one tensor for one batch, and with more arguments for another "
    "batch of the same shapes: call them with the same arguments each time."
)
NO_LOSS = (
    "`training_step` returned None. The stages before the last one wait for a gradient of each micro-batch: return a "
    "loss, if only `0.0 * loss`."
)
NEVER_CALLED = (
    "`training_step` did not call the chain {chain!r}, so there is nothing to split: call the chain once in each step."
)


@dataclass(frozen=True)
class Turn:
    """A micro-batch, with functions that run the user's step on its samples.

    Attributes:
        enter: called before the step runs.
        take: runs the step on the filled micro-batch, up to the chain.
        give: runs the step on the samples that count.
        loss: returns the loss of the backward from the step's return value; None is refused.
        samples: number of samples that count; None: all.
        rows: number of samples of the filled micro-batch; None: all.
        shape: equal for micro-batches for which stages send equal shapes.
    """

    enter: Callable[[], None]
    take: Callable[[], Any]
    give: Callable[[], Any]
    loss: Callable[[Any], Tensor | None]
    samples: int | None
    rows: int | None
    shape: Hashable


class _Stage:
    """One stage of this rank, with its blocks, device and timer.

    Attributes:
        number: among all stages.
        device: on which it runs.
        times: measures it.
        run: the measured forward of the blocks.
        blocks: the stage's part of the chain.
        places: indices of these blocks in the chain.
        expected: shape of the tensor that the stage sends, if known.
        done: number of micro-batches whose forward has run in this call.
    """

    def __init__(
        self,
        number: int,
        chain: Chain,
        layout: Layout,
        device: torch.device,
        times: StageTimes | None,
        through: Callable[[_Stage, Tensor, Extras], Tensor],
    ) -> None:
        self.number, self.places = number, layout.blocks_of(number)
        self.device, self.times = device, times
        self.is_first, self.is_last = number == 0, number == layout.stages - 1
        self.blocks = [chain.blocks[place] for place in self.places]
        self.expected: torch.Size | None = None
        self.done = 0
        self.run: Callable[[Tensor, Extras], Tensor] = _with_timer(times, BLOCKS, partial(through, self))
        # a stage receives leaves, which a block must not change in place
        self.changes_input = not self.is_first and any(
            getattr(layer, "inplace", False) for layer in self.blocks[0].modules()
        )

    def moved(self, x: Tensor) -> Tensor:
        """Copy an input to the stage's device. Gradients flow back through the copy."""
        return x.to(self.device, non_blocking=True)


class _Blocks(nn.Module):
    """Module that torch's schedule calls to run the blocks of a stage.

    The first stage receives the number of a micro-batch as its input.

    Args:
        forward: runs the forward of the stage.
        weights: parameters that its forward and its loss may use.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], weights: Sequence[Parameter]) -> None:
        super().__init__()
        self._forward = forward
        self._weights = list(weights)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Iterate over the parameters whose gradients torch computes in the second part of a split backward."""
        return iter(self._weights)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


@dataclass
class _Plan:
    """torch's schedule for micro-batches of one shape, and the shapes of the tensors that this rank sends.

    Attributes:
        takes_more: True if blocks have other arguments than the output of the previous block.
    """

    schedule: Schedule
    sends: list[torch.Size]
    takes_more: bool


def round_size(micro_batches: int, ranks: int) -> int:
    """Return the number of micro-batches that form one round in the schedules in `IN_ROUNDS`."""
    return micro_batches // max(1, micro_batches // ranks)


def goes_in_rounds(micro_batches: int, ranks: int) -> bool:
    """Return True if the micro-batches divide into equal rounds, as the schedules in `IN_ROUNDS` require."""
    return micro_batches % round_size(micro_batches, ranks) == 0


class Stages:
    """Runner of one rank's pipeline stages in training and evaluation, together with the stages of the other ranks.

    Args:
        chain: blocks of all stages.
        layout: layout of the blocks.
        group: the ranks of the pipeline.
        devices: of this process, by their place in the pipeline: one, or those of all places. Layers outside the chain
            run on the first.
        schedule: one of `SCHEDULES`. A window with too few micro-batches for it, or a number that does not divide into
            rounds, runs as by "gpipe".
        context: returns the context of the run's precision around forwards; None: no context.
        times: measure the windows, by place; None: they are not measured.
        local: this rank's parameters.
        random: generators of the blocks in training.

    Attributes:
        root: the place of the layers outside the chain.
        device: device of the root.
        has_all: True if no other process has a stage.
        has_first: True if the first stage is here.
        has_last: True if the last stage is here.
    """

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        group: comm.Group,
        devices: Mapping[int, torch.device],
        schedule: str = "1f1b",
        context: Callable[[], AbstractContextManager[Any]] | None = None,
        times: Mapping[int, StageTimes] | None = None,
        local: Sequence[Parameter] = (),
        random: BlockRandom | None = None,
    ) -> None:
        self._random = random or BlockRandom(devices)
        self.chain, self.layout, self.group, self.devices, self.schedule = chain, layout, group, devices, schedule
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext if context is None else context
        self.root = min(devices)
        self.device, times = devices[self.root], times or {}
        self._own = [
            _Stage(number, chain, layout, devices[place], times.get(place), self._through)
            for number, place in enumerate(map(layout.place_of, range(layout.stages)))
            if place in devices
        ]
        self.has_all = len(self._own) == layout.stages
        self.has_first, self.has_last = self._own[0].is_first, self._own[-1].is_last
        self._local = local
        self._splits = schedule == SPLITS_BACKWARD
        # torch's stages send tensors of one shape: each shape has stages and a schedule of its own
        self._plans: dict[Hashable, _Plan] = {}
        self._turns: Sequence[Turn] = ()
        self._returned: list[Any] = []
        self._takes_more = False
        self._error: BaseException | None = None
        self._under_way: list[tuple[Any, Tensor]] = []
        self._run_begin = _with_timer(times.get(self.root), BEFORE, self.begin)
        self._run_end = _with_timer(times.get(self.root), AFTER, self._end)

    # -- training

    def train(self, turns: Sequence[Turn]) -> list[Any]:
        """Run forwards and backwards of micro-batches of one shape, and accumulate gradients.

        Returns:
            the step's return value for each, on the rank of the last stage; None for each on other ranks.
        """
        self._turns, self._returned = turns, [None] * len(turns)
        key = (len(turns), turns[0].shape)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make(len(turns))
            while len(self._plans) >= KEPT:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
        self._takes_more = plan.takes_more
        for stage, sends in zip(self._own, plan.sends, strict=True):
            stage.expected, stage.done = sends, 0
        try:
            self._play(plan.schedule, torch.arange(len(turns)))  # on the CPU, where reading them does not wait
        except Exception:
            # torch wraps it into an error that prints whole tensors
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            self._turns, self._error = (), None
            for stage in self._own:
                stage.expected = None
        return self._returned

    def _play(self, schedule: Schedule, numbers: Tensor) -> None:
        # the first and the last stage receive the numbers of micro-batches, and look up their turns
        target = numbers if self.has_last else None
        log = logging.getLogger("torch.distributed.pipelining.schedules")
        # torch logs the whole schedule when the user's step raises
        before, log.disabled = log.disabled, True
        try:
            if self.has_first:
                schedule.step(numbers, target=target, return_outputs=False)
            else:
                schedule.step(target=target, return_outputs=False)
        finally:
            log.disabled = before

    def _forward(self, stage: _Stage, x: Tensor) -> Tensor:
        """Run a stage's forward on the next micro-batch. torch's schedule calls this method for each micro-batch."""
        try:
            extras: Extras = ()
            turn = self._turns[stage.done]
            stage.done += 1
            if stage.is_first:
                turn.enter()
                x, extras = self._run_begin(turn)
                if bool(extras) != self._takes_more:
                    raise MisconfigurationException(OTHER_ARGUMENTS.format(chain=self.chain.name))
            elif self._takes_more:
                extras = self.extras_of(turn.take)
            x = stage.moved(x)
            with self._random.at(self.layout.place_of(stage.number)):
                out: Tensor = stage.run(x, extras)
            if stage.expected is not None and not stage.is_last and out.shape != stage.expected:
                found, expected = tuple(out.shape), tuple(stage.expected)
                raise MisconfigurationException(
                    OTHER_SHAPE.format(chain=self.chain.name, block=stage.places[-1], found=found, expected=expected)
                )
            return self._detachable(out)
        except BaseException as error:
            self._error = error
            raise

    def begin(self, turn: Turn) -> tuple[Tensor, Extras]:
        """Run a step up to the chain of blocks. Return (input of the chain, other arguments of the blocks)."""
        x, extras = self._input_of(turn.take)
        if x is None:
            raise MisconfigurationException(NEVER_CALLED.format(chain=self.chain.name))
        return x, extras

    def _input_of(self, step: Callable[[], Any]) -> tuple[Tensor | None, Extras]:
        # if the last stage is here as well, it runs the whole step, and only the values that it logs count
        with self.context(), running_again() if self.has_last else nullcontext():
            return self.chain.input_of(step)

    def extras_of(self, step: Callable[[], Any]) -> Extras:
        """Run a step up to the chain of blocks. Return the blocks' arguments other than the previous block's output."""
        with self.context(), running_again(), torch.no_grad():
            return self.chain.input_of(step)[1]

    def _through(self, stage: _Stage, x: Tensor, extras: Extras) -> Tensor:
        with current_device(stage.device), self.context(), self.chain.running():
            out: Any = x.clone() if stage.changes_input else x
            for block, place in zip(stage.blocks, stage.places, strict=True):
                args, kwargs = extra_on(stage.device, extras, place)
                out = block(out, *args, **kwargs)
                self.check(out, place)
        return out if stage.is_last else out.contiguous()

    def check(self, out: object, block: int) -> None:
        """Raise an error if the output of a block cannot be sent from stage to stage.

        Raises:
            MisconfigurationException: with the number of the block.
        """
        if isinstance(out, Tensor) and out.dtype in DTYPES and out.ndim <= DIMENSIONS:
            return
        what = type(out).__name__
        if isinstance(out, Tensor):
            what = f"a tensor of {out.dtype} and {out.ndim} dimensions"
        raise MisconfigurationException(NOT_FLOATING.format(what=what, block=block, chain=self.chain.name))

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        """Return the loss of the user's step for the chain's output. torch calls this method on the last stage."""
        try:
            loss: Tensor = self._run_end(output.view_as(output) if self._splits else output, int(number))
        except BaseException as error:
            self._error = error
            raise
        return self._detachable(loss)

    def _detachable(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` if torch will detach the tensor in place, as in a two-part backward."""
        return tensor.clone() if self._splits else tensor

    def _end(self, output: Tensor, number: int) -> Tensor:
        turn = self._turns[number]
        turn.enter()
        if turn.samples != turn.rows and (not output.ndim or output.shape[0] != turn.rows):
            raise MisconfigurationException(
                NOT_ROWS.format(
                    chain=self.chain.name,
                    shape=tuple(output.shape),
                    rows=turn.rows,
                    samples=turn.samples,
                    count=len(self._turns),
                )
            )
        counted = output if turn.samples == turn.rows else output[: turn.samples]
        with self.context():
            returned = self.chain.with_output(turn.give, counted)
        loss = turn.loss(returned)
        if loss is None:
            raise MisconfigurationException(NO_LOSS)
        self._returned[number] = _without_memory(returned)
        return loss

    # -- stages for a shape

    def _make(self, count: int) -> _Plan:
        """Create torch's stages and schedule for the shape of the current micro-batches."""
        from torch.distributed.pipelining import schedules

        shapes, takes_more = self._shapes()
        stages: list[Any] = [self._stage(own, *shape) for own, shape in zip(self._own, shapes, strict=True)]
        sends = [sent.shape for _, sent in shapes]
        # losses are weighted by their shares, so gradients are summed, not averaged
        given: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        schedule: Schedule
        if self.has_all:
            schedule = schedules._PipelineScheduleRuntime(stages, count, **given)
            row = [
                schedules._Action(action.stage, schedules._ComputationType(action.letter), action.number)
                for action in in_one_row(self.actions(count))
            ]
            schedule._prepare_schedule_with_comms({0: list(row)})
            _initialize_on_one_device(schedule, stages)
            return _Plan(schedule, sends, takes_more)
        if self.schedule not in IN_ROUNDS:
            one_by_one = self.schedule == "1f1b" and count >= self.layout.stages
            kind = schedules.Schedule1F1B if one_by_one else schedules.ScheduleGPipe
            schedule = kind(stages[0], count, **given)
            stages[0].stage_index_to_group_rank = {s: self.layout.place_of(s) for s in range(self.layout.stages)}
            return _Plan(schedule, sends, takes_more)
        many = schedules.ScheduleInterleavedZeroBubble if self._splits else schedules.ScheduleInterleaved1F1B
        kind_of_rounds = many if goes_in_rounds(count, self.layout.ranks) else schedules.ScheduleLoopedBFS
        schedule = kind_of_rounds(stages, count, **given)
        # torch has the first stage on rank 0; here the last one is, since rank 0 logs losses
        schedule._prepare_schedule_with_comms(
            {self.layout.ranks - 1 - rank: actions for rank, actions in schedule.pipeline_order.items()}
        )
        return _Plan(schedule, sends, takes_more)

    def actions(self, count: int) -> list[list[Action]]:
        """Return, for each rank of the pipeline, the ordered list of its actions for ``count`` micro-batches."""
        ranks, stages = self.layout.ranks, self.layout.stages
        if self.schedule in IN_ROUNDS and not goes_in_rounds(count, ranks):
            return actions_of("gpipe", stages, count)
        return actions_of(self.schedule, ranks, count, stages // ranks)

    def _stage(self, own: _Stage, received: Tensor, sent: Tensor) -> PipelineStage:
        """Create torch's `PipelineStage` for a stage of this rank."""
        from torch.distributed.pipelining import PipelineStage

        # the code after the chain may use any parameter of this rank
        weights = self._local if own.is_last else [each for block in own.blocks for each in block.parameters()]
        stage: PipelineStage = PipelineStage(
            _Blocks(partial(self._forward, own), weights),
            own.number,
            self.layout.stages,
            own.device,
            input_args=received,
            output_args=sent,
            group=self.group,
        )
        if self.has_all:
            _copy_between_devices(stage, sent)
        elif not hasattr(stage, "_get_grad_send_meta"):  # since torch 2.13 it sends zeros itself
            _send_zeros(stage, received)
        if self._splits and not own.is_first:  # torch does not split the backward of the first stage
            SplitCheck(stage, weights, {self.chain.names[place]: self.chain.blocks[place] for place in own.places})
        # these compute only; their callers in torch also wait for other stages
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            vars(stage)[name] = _with_timer(own.times, BACKWARD, getattr(stage, name))
        return stage

    def _shapes(self) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """Run one micro-batch through all stages to find the shapes of the tensors that each receives and sends.

        Returns:
            (received, sent) of each stage of this rank as tensors without values, and whether blocks take more
            arguments.
        """
        found, out = [], None
        extras: Extras = ()
        with forked_random_numbers(self.devices.values()), torch.enable_grad():
            for stage in self._own:
                if stage.is_first:
                    received: Tensor = torch.zeros(1, dtype=torch.int64)
                    x, extras = self.begin(self._turns[0])
                    self.check(x, 0)
                else:
                    arrived, extras = self._receive(stage, out, extras, self._turns[0].take)
                    assert arrived is not None  # the first stage refuses a training step without the chain
                    received = x = arrived
                out = self._through(stage, stage.moved(x), extras)
                self._send(stage, out, extras)
                found.append((_without_values(received), _without_values(out)))
            self._wait()
        return found, bool(extras)

    # -- forwards alone

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """Run a step of an evaluation through all stages.

        Returns:
            its return value on the rank of the last stage; None on others.
        """
        out: Tensor | None = None
        extras: Extras = ()
        for stage in self._own:
            x, extras = self._input_of(step) if stage.is_first else self._receive(stage, out, extras, step)
            out = None if x is None else self._through(stage, stage.moved(x), extras)
            self._send(stage, out, extras)
        if not self.has_last:
            return None
        with self.context():
            return step() if out is None else self.chain.with_output(step, out)

    def _peer(self, stage: int) -> int:
        return comm.ranks_of(self.group)[self.layout.place_of(stage)]

    def _send(self, stage: _Stage, tensor: Tensor | None, extras: Extras) -> None:
        """Send a tensor (None if the step did not call the chain) to the next stage if another rank runs that stage."""
        if stage.is_last or self.has_all:
            return
        # at most one tensor is under way, so that an evaluation's memory does not grow
        self._wait()
        head = torch.full((HEAD + DIMENSIONS,), -1, dtype=torch.int64)
        if tensor is not None:
            flags = int(tensor.requires_grad), int(bool(extras))
            numbers = [DTYPES.index(tensor.dtype), *flags, tensor.ndim, *tensor.shape]
            head[: len(numbers)] = torch.tensor(numbers)
        peer = self._peer(stage.number + 1)
        for each in (head.to(self.device), *([] if tensor is None else [tensor.detach()])):
            self._under_way.append((dist.isend(each, peer, group=self.group), each))

    def _wait(self) -> None:
        """Wait until all sent tensors have been received."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _receive(
        self, stage: _Stage, before: Tensor | None, extras: Extras, step: Callable[[], Any]
    ) -> tuple[Tensor | None, Extras]:
        """Receive the output of the previous stage. Return (that output, the blocks' other arguments).

        Args:
            stage: the receiving stage.
            before: output of the previous stage, if this process runs that stage.
            extras: other arguments, if this process runs the previous stage.
            step: computes the other arguments if another process runs the previous stage.
        """
        if self.has_all:
            return None if before is None else before.detach().requires_grad_(before.requires_grad), extras
        peer = self._peer(stage.number - 1)
        head = torch.empty(HEAD + DIMENSIONS, dtype=torch.int64, device=self.device)
        dist.recv(head, peer, group=self.group)
        kind, needed, takes_more, dimensions, *shape = head.tolist()
        if kind < 0:
            return None, ()
        tensor = torch.empty(shape[:dimensions], dtype=DTYPES[kind], device=self.device)
        dist.recv(tensor, peer, group=self.group)
        tensor = tensor.requires_grad_() if needed and torch.is_grad_enabled() else tensor
        return tensor, self.extras_of(step) if takes_more else ()

    def close(self) -> None:
        """Wait for pending messages, and free all buffers."""
        self._wait()
        self._plans.clear()


def extra_on(device: torch.device, extras: Extras, place: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a block, copied to ``device``, without the previous block's output."""
    if not extras:
        return (), {}
    args, kwargs = extras[place].args, dict(extras[place].kwargs)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return tree_map(moved, args, Tensor), tree_map(moved, kwargs, Tensor)


def _without_memory(returned: Any) -> Any:
    """Return a step's return value with all tensors detached, so that their graphs are freed."""
    if isinstance(returned, dict):
        return {key: _without_memory(value) for key, value in returned.items()}
    if not isinstance(returned, Tensor):
        return returned
    # on a CPU, the mean of a loss shares the storage of all values that it is the mean of
    return returned.detach() if returned.ndim else returned.detach().clone()


def _with_timer(times: StageTimes | None, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn if times is None else times.wrapped(part, fn)


def _initialize_on_one_device(schedule: Schedule, stages: list[PipelineStage]) -> None:
    """Let torch initialize stages on several devices. Since 2.15 torch requires one device for all stages."""
    connect = getattr(schedule, "_initialize_pipeline_distributed_state", None)
    if connect is None:
        return

    def as_if_on_one(*args: Any, **kwargs: Any) -> None:
        devices = [stage.device for stage in stages]
        for stage in stages:
            stage.device = devices[0]
        try:
            connect(*args, **kwargs)
        finally:
            for stage, device in zip(stages, devices, strict=True):
                stage.device = device

    vars(schedule)["_initialize_pipeline_distributed_state"] = as_if_on_one


def _send_zeros(stage: PipelineStage, received: Tensor) -> None:
    """Make a stage send zeros if its input has no gradient, since the previous stage waits for a message."""
    send = stage.get_bwd_send_ops

    def filled(number: int) -> list[Any]:
        found = stage.bwd_cache.get(number)
        if found is None or stage.is_first:
            return send(number)
        if not _expects_gradient(stage, received):
            del stage.bwd_cache[number]
            return []
        zeros = torch.zeros(received.shape, dtype=received.dtype, device=stage.device)
        stage.bwd_cache[number] = tuple(zeros if gradient is None else gradient for gradient in found)
        return send(number)

    vars(stage)["get_bwd_send_ops"] = filled


def _expects_gradient(stage: PipelineStage, passed: Tensor) -> bool:
    """Return True if torch's stage waits for the gradient of its output. In torch 2.11 every stage waits."""
    return passed.requires_grad or not hasattr(stage, "_user_meta")


def _copy_between_devices(stage: PipelineStage, sent: Tensor) -> None:
    """Let torch's stage copy inputs and gradients from the devices of this process's other stages.

    Args:
        stage: torch's.
        sent: a tensor with the shape and dtype of its output.
    """
    takes, takes_gradients = stage.set_local_fwd_input, stage.set_local_bwd_input

    # called as soon as the tensor exists: a GPU copies only after all work that was launched before
    def here(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(stage.device, non_blocking=True)

    # torch 2.11 fails on a missing gradient, and 2.12 uses the last one instead
    fills = not hasattr(stage, "_get_grad_send_meta") and _expects_gradient(stage, sent)

    def gradient(tensor: Tensor | None) -> Tensor | None:
        if tensor is None and fills:
            return torch.zeros(sent.shape, dtype=sent.dtype, device=stage.device)
        return here(tensor)

    # torch 2.11 lets each stage send a message to its neighbors first, which would be this process itself
    vars(stage)["_get_init_p2p_neighbors_ops"] = list
    vote = getattr(stage, "_warmup_forward_vote", None)
    if vote is not None:  # since torch 2.13, stages multiply votes, which are on their devices, before they run
        vars(stage)["_warmup_forward_vote"] = lambda has_backward, received_acc=None: vote(
            has_backward, here(received_acc)
        )
    vars(stage)["set_local_fwd_input"] = lambda output, number: takes(here(output), number)
    vars(stage)["set_local_bwd_input"] = lambda gradients, number: takes_gradients(
        tuple(map(gradient, gradients)), number
    )


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
