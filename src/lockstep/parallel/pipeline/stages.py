"""A stage of a pipeline: forwards and backwards of micro-batches by torch's schedules, and forwards alone.

torch's stages send tensors of one shape. So there is a stage and a schedule for each shape, made when it is first seen
and kept. Its first micro-batch goes through the stages once more, to find out what each of them will receive.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.parallel.pipeline.chain import Chain
from lockstep.parallel.pipeline.layout import Layout
from lockstep.parallel.pipeline.times import BACKWARD, BEFORE, BEHIND, BLOCKS, StageTimes

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

SCHEDULES = ("1f1b", "gpipe")
KEPT = 16
"""Shapes whose stages are kept; each keeps the buffers that it receives into."""
DIMENSIONS = 12
"""Of a tensor that goes from stage to stage, at most."""
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


class _Blocks(nn.Module):
    """The blocks of a stage, as torch calls them: the first stage gets the number of a micro-batch."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()
        self._forward: Callable[[Tensor], Tensor] = stages.forward_of_turn

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)


@dataclass
class _Plan:
    """Of a shape: torch's schedule, and the shape of what the stage sends."""

    schedule: PipelineScheduleSingle
    sends: torch.Size


class Stages:
    """The stages of one pipeline, as one of its ranks sees them.

    Args:
        chain: whose blocks run here and elsewhere.
        layout: of the blocks.
        group: the ranks of the pipeline.
        device: of this rank.
        schedule: one of `SCHEDULES`; with fewer micro-batches than stages it is "gpipe".
        context: around forwards, of the run's precision; None: nothing.
        times: measures the windows; None: nobody does.
    """

    def __init__(
        self,
        chain: Chain,
        layout: Layout,
        group: comm.Group,
        device: torch.device,
        schedule: str = "1f1b",
        context: Callable[[], AbstractContextManager[Any]] | None = None,
        times: StageTimes | None = None,
    ) -> None:
        self.chain, self.layout, self.group, self.device, self.schedule = chain, layout, group, device, schedule
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext if context is None else context
        self.stage = layout.place_of(comm.rank(group))
        self.is_first, self.is_last = self.stage == 0, self.stage == layout.stages - 1
        self.own = [chain.blocks[place] for place in layout.blocks_of(self.stage)]
        # what a stage receives is a leaf, which no block may change in place
        self._in_place = not self.is_first and any(
            getattr(m, "inplace", False) for b in self.own[:1] for m in b.modules()
        )
        self._plans: dict[Hashable, _Plan] = {}
        self._turns: Sequence[Turn] = ()
        self._returned: list[Any] = []
        self._error: BaseException | None = None
        self._expected: torch.Size | None = None
        self._under_way: list[tuple[Any, Tensor]] = []
        self._timed = _untimed if times is None else times.wrapped
        self._run_begin = self._timed(BEFORE, self.begin)
        self._run_blocks = self._timed(BLOCKS, self._through)
        self._run_end = self._timed(BEHIND, self._end)

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
        self._expected = plan.sends
        try:
            self._play(plan.schedule, torch.arange(len(turns), device=self.device))
        except Exception:
            if self._error is not None:  # torch wraps it into one that shows whole tensors
                raise self._error from None
            raise
        finally:
            self._turns, self._expected, self._error = (), None, None
        return self._returned

    def _play(self, schedule: PipelineScheduleSingle, numbers: Tensor) -> None:
        # the first stage and the last one get the numbers of micro-batches, and look up what belongs to them
        if self.is_first:
            schedule.step(numbers, return_outputs=False)
        else:
            schedule.step(target=numbers if self.is_last else None, return_outputs=False)

    def forward_of_turn(self, x: Tensor) -> Tensor:
        """This stage's part of a forward."""
        try:
            if self.is_first:
                turn = self._turns[int(x)]
                turn.enter()
                x = self._run_begin(turn)
            out: Tensor = self._run_blocks(x)
            if self._expected is not None and not self.is_last and out.shape != self._expected:
                block = self.layout.blocks_of(self.stage)[-1]
                found, expected = tuple(out.shape), tuple(self._expected)
                raise MisconfigurationException(
                    OTHER_SHAPE.format(chain=self.chain.name, block=block, found=found, expected=expected)
                )
            return out
        except BaseException as error:
            self._error = error
            raise

    def begin(self, turn: Turn) -> Tensor:
        """What a step calls the chain with."""
        with self.context():
            x, _ = self.chain.input_of(turn.take)
        if x is None:
            raise MisconfigurationException(NEVER_CALLED.format(chain=self.chain.name))
        return x

    def _through(self, x: Tensor) -> Tensor:
        with self.context(), self.chain.running():
            out: Any = x.clone() if self._in_place else x
            for block, place in zip(self.own, self.layout.blocks_of(self.stage), strict=True):
                out = block(out)
                self.check(out, place)
        return out if self.is_last else out.contiguous()

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
            loss: Tensor = self._run_end(output, int(number))
        except BaseException as error:
            self._error = error
            raise
        return loss

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
            returned = self._returned[number] = self.chain.with_output(turn.give, counted)
        loss = turn.loss(returned)
        if loss is None:
            raise MisconfigurationException(NO_LOSS)
        return loss

    # -- stages for a shape

    def _make(self, count: int) -> _Plan:
        """torch's stage and schedule for micro-batches like the first of these."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        received, sent = self._shapes()
        blocks = _Blocks(self)
        stage: PipelineStage = PipelineStage(
            blocks,
            self.stage,
            self.layout.stages,
            self.device,
            input_args=received,
            output_args=sent,
            group=self.group,
        )
        # its own method alone: what it calls waits for nobody
        vars(stage)["backward_one_chunk"] = self._timed(BACKWARD, stage.backward_one_chunk)
        stage.stage_index_to_group_rank = {s: self.layout.place_of(s) for s in range(self.layout.stages)}
        kind = Schedule1F1B if self.schedule == "1f1b" and count >= self.layout.stages else ScheduleGPipe
        # losses are weighed by their shares, and so added up
        return _Plan(kind(stage, count, loss_fn=self._loss, scale_grads=False), sent.shape)

    def _shapes(self) -> tuple[Tensor, Tensor]:
        """What this stage gets and gives: tensors without values, of one micro-batch that goes through all stages."""
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type), torch.enable_grad():
            if self.is_first:
                received: Tensor = torch.zeros(1, dtype=torch.int64)
                x = self.begin(self._turns[0])
                self.check(x, 0)
            else:
                arrived = self._receive()
                assert arrived is not None  # each training step calls the chain
                received = x = arrived
            out = self._through(x)
            if not self.is_last:
                self._send(out)
                self._wait()
        return _valueless(received), _valueless(out)

    # -- forwards alone

    def evaluate(self, step: Callable[[], Any]) -> Any:
        """A step without gradients, through all stages.

        Returns:
            what it returned, on the rank of the last stage; None elsewhere.
        """
        x: Tensor | None
        if self.is_first:
            with self.context():
                x, _ = self.chain.input_of(step)
        else:
            x = self._receive()
        out = None if x is None else self._through(x)
        if not self.is_last:
            self._send(out)
            return None
        with self.context():
            return step() if out is None else self.chain.with_output(step, out)

    def _peer(self, stage: int) -> int:
        return comm.ranks_of(self.group)[self.layout.place_of(stage)]

    def _send(self, tensor: Tensor | None) -> None:
        """To the next stage; None: the step did not call the chain."""
        self._wait()
        head = torch.full((DIMENSIONS + 3,), -1, dtype=torch.int64)
        if tensor is not None:
            told = [DTYPES.index(tensor.dtype), int(tensor.requires_grad), tensor.ndim, *tensor.shape]
            head[: len(told)] = torch.tensor(told)
        peer = self._peer(self.stage + 1)
        for each in (head.to(self.device), *([] if tensor is None else [tensor.detach()])):
            self._under_way.append((dist.isend(each, peer, group=self.group), each))

    def _wait(self) -> None:
        """Until what was sent has been taken."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _receive(self) -> Tensor | None:
        peer = self._peer(self.stage - 1)
        head = torch.empty(DIMENSIONS + 3, dtype=torch.int64, device=self.device)
        dist.recv(head, peer, group=self.group)
        kind, needed, dimensions, *shape = head.tolist()
        if kind < 0:
            return None
        tensor = torch.empty(shape[:dimensions], dtype=DTYPES[kind], device=self.device)
        dist.recv(tensor, peer, group=self.group)
        return tensor.requires_grad_() if needed and torch.is_grad_enabled() else tensor

    def close(self) -> None:
        """Wait for what is under way, and let go of all buffers."""
        self._wait()
        self._plans.clear()


def _untimed(part: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _valueless(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
