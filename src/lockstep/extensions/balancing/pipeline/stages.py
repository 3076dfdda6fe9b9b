"""The stages of a pipeline on one rank: micro-batches go through them by torch's schedules, or forward alone.

torch's stages send tensors of one shape. So there are stages and a schedule for each shape, made when it is first seen
and kept. Its first micro-batch goes through the stages once more, to find out what each of them will receive.

A rank has the stages of one place in the pipeline and sends to the others; or one process has those of all places, a
device for each, and does the actions of all in one row. GPUs compute meanwhile: it only starts their kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from lockstep.extensions.balancing.pipeline.times import BACKWARD, BEFORE, BEHIND, BLOCKS, StageTimes
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
"""Shapes whose stages are kept; each keeps the buffers that it receives into."""
DIMENSIONS = 12
"""Of a tensor that goes from stage to stage, at most."""
HEAD = 4
"""Numbers that are sent ahead of it, beside its shape."""
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NOT_FLOATING = (
    "Block {block} of the chain {chain!r} {verb} {what}: between the blocks goes one tensor of floating-point numbers, "
    f"of at most {DIMENSIONS} dimensions. Let the block give one, or move it out of the chain."
)
OTHER_SHAPE = (
    "The chain {chain!r} gave a tensor of shape {found} after block {block}, and for a batch of the same shapes one of "
    "{expected} before: between the stages goes what the shapes of the batch decide, and not its values. Pad the batch "
    "in the `collate_fn`."
)
NOT_ROWS = (
    "The chain {chain!r} gives a tensor of shape {shape} for a micro-batch of {rows} samples, of which {samples} count "
    "(the last one of a batch is filled up): its first dimension has to be the samples. Or give sizes that "
    "micro_batches={count} divides, by drop_last=True."
)
OTHER_ARGUMENTS = (
    "The blocks of the chain {chain!r} were called with one tensor alone for one batch and with more for another of "
    "the same shapes: call them with the same arguments each time."
)
NO_LOSS = (
    "`training_step` returned None. The stages before the last one wait for a gradient of each micro-batch: return a "
    "loss, if only `0.0 * loss`."
)
NEVER_CALLED = (
    "`training_step` did not call the chain {chain!r}: the strategy has nothing to split. Call it there once."
)


@dataclass(frozen=True)
class Turn:
    """A micro-batch on its way through the stages.

    Attributes:
        enter: called before the step runs.
        take: runs the step on the samples that fill a micro-batch; of it what comes before the chain counts.
        give: runs the step on the samples that count.
        loss: what backward begins from, of what the step returned; None is refused.
        samples, rows: that count, and that fill it; None: the same.
        shape: equal where stages send equal shapes.
    """

    enter: Callable[[], None]
    take: Callable[[], Any]
    give: Callable[[], Any]
    loss: Callable[[Any], Tensor | None]
    samples: int | None
    rows: int | None
    shape: Hashable


class _Stage:
    """One of the stages of this rank.

    Attributes:
        number: among all stages.
        device: of it.
        times: measures what it does.
        run: the blocks' forward, measured.
        blocks: of the chain.
        places: of these blocks in the chain.
        expected: shape of what it sends, where that is known.
        done: forwards of the micro-batches that go through it now: schedules run them in their order.
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
        self.run: Callable[[Tensor, Extras], Tensor] = _timed(times, BLOCKS, partial(through, self))
        # what a stage receives is a leaf, which no block may change in place
        self.changes_input = not self.is_first and any(
            getattr(layer, "inplace", False) for layer in self.blocks[0].modules()
        )

    def moved(self, x: Tensor) -> Tensor:
        """What it is given, on its device; the gradient goes back to where that comes from."""
        return x.to(self.device, non_blocking=True)


class _Blocks(nn.Module):
    """The blocks of a stage, as torch calls them: the first stage gets the number of a micro-batch.

    Args:
        forward: of the stage.
        weights: that its forward and its loss may use.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], weights: Sequence[Parameter]) -> None:
        super().__init__()
        self._forward = forward
        self._weights = list(weights)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """What torch looks for in the graph of a backward in two parts."""
        return iter(self._weights)

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


@dataclass
class _Plan:
    """Of a shape: torch's schedule, and the shape of what each stage of this rank sends.

    Attributes:
        takes_more: blocks are called with more than the output of the block before them.
    """

    schedule: Schedule
    sends: list[torch.Size]
    takes_more: bool


def round_size(micro_batches: int, ranks: int) -> int:
    """Micro-batches of a round, by a schedule of `IN_ROUNDS`."""
    return micro_batches // max(1, micro_batches // ranks)


def goes_in_rounds(micro_batches: int, ranks: int) -> bool:
    """Whether a schedule of `IN_ROUNDS` takes so many micro-batches."""
    return micro_batches % round_size(micro_batches, ranks) == 0


class Stages:
    """The stages of one pipeline, as one of its ranks sees them.

    Args:
        chain: whose blocks run here and elsewhere.
        layout: of the blocks.
        group: the ranks of the pipeline.
        devices: of this process, by their place in the pipeline: one, or those of all places. What is outside of the
            chain runs on the first.
        schedule: one of `SCHEDULES`. A window that has too few micro-batches for it, or a number that does not divide
            into rounds, has all its forwards before its backwards, as by "gpipe".
        context: around forwards, of the run's precision; None: nothing.
        times: measure the windows, by place; None: nobody does.
        held: this rank's parameters.
        random: what blocks draw from in training.

    Attributes:
        root: the place of what is outside of the chain.
        device: of the root.
        has_all: no other process has a stage.
        has_first, has_last: whether those stages are here.
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
        held: Sequence[Parameter] = (),
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
        self._held = held
        self._splits = schedule == SPLITS_BACKWARD
        self._plans: dict[Hashable, _Plan] = {}
        self._turns: Sequence[Turn] = ()
        self._returned: list[Any] = []
        self._takes_more = False
        self._error: BaseException | None = None
        self._under_way: list[tuple[Any, Tensor]] = []
        self._run_begin = _timed(times.get(self.root), BEFORE, self.begin)
        self._run_end = _timed(times.get(self.root), BEHIND, self._end)

    # -- training

    def train(self, turns: Sequence[Turn]) -> list[Any]:
        """Forwards and backwards of micro-batches of one shape; gradients are added to the parameters' own.

        Returns:
            what the step returned for each, on the rank of the last stage; elsewhere Nones.
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
            self._play(plan.schedule, torch.arange(len(turns)))  # on the CPU: to read them waits for no device
        except Exception:
            if self._error is not None:  # torch wraps it into one that shows whole tensors
                raise self._error from None
            raise
        finally:
            self._turns, self._error = (), None
            for stage in self._own:
                stage.expected = None
        return self._returned

    def _play(self, schedule: Schedule, numbers: Tensor) -> None:
        # the first stage and the last one get the numbers of micro-batches, and look up what belongs to them
        target = numbers if self.has_last else None
        with _without_schedules_in_the_log():
            if self.has_first:
                schedule.step(numbers, target=target, return_outputs=False)
            else:
                schedule.step(target=target, return_outputs=False)

    def _forward(self, stage: _Stage, x: Tensor) -> Tensor:
        """A stage's part of a forward."""
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
        """What a step calls the chain with."""
        x, extras = self._input_of(turn.take)
        if x is None:
            raise MisconfigurationException(NEVER_CALLED.format(chain=self.chain.name))
        return x, extras

    def _input_of(self, step: Callable[[], Any]) -> tuple[Tensor | None, Extras]:
        # where the last stage is here, too, it runs the whole step, and what that logs counts
        with self.context(), running_again() if self.has_last else nullcontext():
            return self.chain.input_of(step)

    def extras_of(self, step: Callable[[], Any]) -> Extras:
        """What a step calls the blocks with beside the output of the one before: the first stage knows it, too."""
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
        """Refuse what cannot go from stage to stage.

        Raises:
            MisconfigurationException: with the block that gives it.
        """
        told = {"block": block, "chain": self.chain.name, "verb": "gives"}
        if not isinstance(out, Tensor):
            raise MisconfigurationException(NOT_FLOATING.format(what=type(out).__name__, **told))
        if out.dtype not in DTYPES or out.ndim > DIMENSIONS:
            what = f"a tensor of {out.dtype} and {out.ndim} dimensions"
            raise MisconfigurationException(NOT_FLOATING.format(what=what, **told))

    def _loss(self, output: Tensor, number: Tensor) -> Tensor:
        """The last stage's: the user's step goes on with what the chain gave."""
        try:
            loss: Tensor = self._run_end(output.view_as(output) if self._splits else output, int(number))
        except BaseException as error:
            self._error = error
            raise
        return self._detachable(loss)

    def _detachable(self, tensor: Tensor) -> Tensor:
        """A copy, where torch detaches in place what a backward in two parts begins with."""
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
        """torch's stages and schedule for micro-batches like the first of these."""
        from torch.distributed.pipelining import schedules

        shapes, takes_more = self._shapes()
        stages: list[Any] = [self._stage(own, *shape) for own, shape in zip(self._own, shapes, strict=True)]
        sends = [sent.shape for _, sent in shapes]
        # losses are weighed by their shares, and so added up
        given: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        schedule: Schedule
        if self.has_all:
            schedule = schedules._PipelineScheduleRuntime(stages, count, **given)
            row = [
                schedules._Action(action.stage, schedules._ComputationType(action.letter), action.number)
                for action in in_one_row(self.actions(count))
            ]
            schedule._prepare_schedule_with_comms({0: list(row)})
            _begins_on_any_devices(schedule, stages)
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
        # torch's first stage is on rank 0, and here the last one is
        schedule._prepare_schedule_with_comms(
            {self.layout.ranks - 1 - rank: actions for rank, actions in schedule.pipeline_order.items()}
        )
        return _Plan(schedule, sends, takes_more)

    def actions(self, count: int) -> list[list[Action]]:
        """What each place of the pipeline computes for so many micro-batches, in its order."""
        ranks, stages = self.layout.ranks, self.layout.stages
        if self.schedule in IN_ROUNDS and not goes_in_rounds(count, ranks):
            return actions_of("gpipe", stages, count)
        return actions_of(self.schedule, ranks, count, stages // ranks)

    def _stage(self, own: _Stage, received: Tensor, sent: Tensor) -> PipelineStage:
        """One of torch's."""
        from torch.distributed.pipelining import PipelineStage

        # what comes behind the chain may use all that is here
        weights = self._held if own.is_last else [each for block in own.blocks for each in block.parameters()]
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
            _on_several_devices(stage, sent)
        elif not hasattr(stage, "_get_grad_send_meta"):  # since torch 2.13 it sends zeros itself
            _sends_zeros(stage, received)
        if self._splits and not own.is_first:  # torch does not split the backward of the first
            SplitCheck(stage, weights, {self.chain.names[place]: self.chain.blocks[place] for place in own.places})
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):  # what calls these waits for others
            vars(stage)[name] = _timed(own.times, BACKWARD, getattr(stage, name))
        return stage

    def _shapes(self) -> tuple[list[tuple[Tensor, Tensor]], bool]:
        """What each stage here gets and gives: tensors without values, of one micro-batch through all stages.

        And whether blocks take more than that.
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
                    assert arrived is not None  # each training step calls the chain
                    received = x = arrived
                out = self._through(stage, stage.moved(x), extras)
                self._send(stage, out, extras)
                found.append((_valueless(received), _valueless(out)))
            self._wait()
        return found, bool(extras)

    # -- forwards alone

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """A step without gradients, through all stages.

        Returns:
            what it returned, on the rank of the last stage; None elsewhere.
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
        """To the next stage, if it is elsewhere; None: the step did not call the chain."""
        if stage.is_last or self.has_all:
            return
        self._wait()
        head = torch.full((HEAD + DIMENSIONS,), -1, dtype=torch.int64)
        if tensor is not None:
            flags = int(tensor.requires_grad), int(bool(extras))
            told = [DTYPES.index(tensor.dtype), *flags, tensor.ndim, *tensor.shape]
            head[: len(told)] = torch.tensor(told)
        peer = self._peer(stage.number + 1)
        for each in (head.to(self.device), *([] if tensor is None else [tensor.detach()])):
            self._under_way.append((dist.isend(each, peer, group=self.group), each))

    def _wait(self) -> None:
        """Until what was sent has been taken."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _receive(
        self, stage: _Stage, before: Tensor | None, extras: Extras, step: Callable[[], Any]
    ) -> tuple[Tensor | None, Extras]:
        """From the stage before; where that is here, too, ``before`` is what it gave, and ``extras`` what it took.

        Else the step says what blocks take besides, if they do.
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
        given = tensor.requires_grad_() if needed and torch.is_grad_enabled() else tensor
        return given, self.extras_of(step) if takes_more else ()

    def close(self) -> None:
        """Wait for what is under way, and let go of all buffers."""
        self._wait()
        self._plans.clear()


@contextmanager
def _without_schedules_in_the_log() -> Iterator[None]:
    """Inside, torch does not log a whole schedule when a step of the user's raises."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def extra_on(device: torch.device, extras: Extras, place: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block takes besides, on its device."""
    if not extras:
        return (), {}
    args, kwargs = extras[place].args, dict(extras[place].kwargs)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    return tree_map(moved, args, Tensor), tree_map(moved, kwargs, Tensor)


def _without_memory(returned: Any) -> Any:
    """What a step returned, of a dict's values too, for the end of the window: without the graphs of its tensors.

    A number is copied: on a CPU the mean of a loss lies in the memory of all that it is the mean of.
    """
    if isinstance(returned, dict):
        return {key: _without_memory(value) for key, value in returned.items()}
    if not isinstance(returned, Tensor):
        return returned
    return returned.detach() if returned.ndim else returned.detach().clone()


def _timed(times: StageTimes | None, part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn if times is None else times.wrapped(part, fn)


def _begins_on_any_devices(schedule: Schedule, stages: list[PipelineStage]) -> None:
    """Let torch set up stages of several devices; from 2.15 on it asks for one, by which ranks would connect."""
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


def _sends_zeros(stage: PipelineStage, received: Tensor) -> None:
    """Let a stage without a gradient for what it received send zeros, which the stage before waits for."""
    send = stage.get_bwd_send_ops

    def filled(number: int) -> list[Any]:
        found = stage.bwd_cache.get(number)
        if found is None or stage.is_first:
            return send(number)
        if not _is_waited_for(stage, received):
            del stage.bwd_cache[number]
            return []
        zeros = torch.zeros(received.shape, dtype=received.dtype, device=stage.device)
        stage.bwd_cache[number] = tuple(zeros if gradient is None else gradient for gradient in found)
        return send(number)

    vars(stage)["get_bwd_send_ops"] = filled


def _is_waited_for(stage: PipelineStage, passed: Tensor) -> bool:
    """Whether a stage waits for a gradient of what it has passed on: in torch 2.11 also where it needs none."""
    return passed.requires_grad or not hasattr(stage, "_user_meta")


def _on_several_devices(stage: PipelineStage, sent: Tensor) -> None:
    """Let a stage of torch's take what the others of this process give it, from their devices.

    It is copied when it is there, and not when the stage runs: a GPU copies behind all that it has been given to do.

    Args:
        stage: torch's.
        sent: of the shape and dtype of what it sends.
    """
    takes, takes_gradients = stage.set_local_fwd_input, stage.set_local_bwd_input

    def here(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(stage.device, non_blocking=True)

    # torch 2.11 refuses no gradient, and 2.12 takes the last one for it
    fills = not hasattr(stage, "_get_grad_send_meta") and _is_waited_for(stage, sent)

    def gradient(tensor: Tensor | None) -> Tensor | None:
        if tensor is None and fills:
            return torch.zeros(sent.shape, dtype=sent.dtype, device=stage.device)
        return here(tensor)

    vars(stage)["_get_init_p2p_neighbors_ops"] = list  # torch 2.11 has each stage write to its neighbors first
    vote = getattr(stage, "_warmup_forward_vote", None)
    if vote is not None:  # since torch 2.13, stages multiply votes before they run
        vars(stage)["_warmup_forward_vote"] = lambda has_backward, received_acc=None: vote(
            has_backward, here(received_acc)
        )
    vars(stage)["set_local_fwd_input"] = lambda output, number: takes(here(output), number)
    vars(stage)["set_local_bwd_input"] = lambda gradients, number: takes_gradients(
        tuple(map(gradient, gradients)), number
    )


def _valueless(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
