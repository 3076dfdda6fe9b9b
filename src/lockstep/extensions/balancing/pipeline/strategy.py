"""Strategy "balanced": a pipeline whose stages run on several ranks, or on the devices of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.checkpoint import pretrained
from lockstep.checkpoint.first_values import leave_meta, stand_in
from lockstep.checkpoint.io import CheckpointIO
from lockstep.cluster.world import World
from lockstep.engines.collectives import ReplicaMap
from lockstep.engines.ddp.consistency import check_same_module
from lockstep.engines.engine import EngineState, MicroBatch
from lockstep.engines.ranks import HALF_AN_HOUR, RankedStrategy
from lockstep.extensions.balancing.pipeline import gradients
from lockstep.extensions.balancing.pipeline.block_random import BlockRandom
from lockstep.extensions.balancing.pipeline.chain import Chain
from lockstep.extensions.balancing.pipeline.control import Resplit
from lockstep.extensions.balancing.pipeline.layout import Layout, Ownership, StagePlacement, equal_split, find_torn
from lockstep.extensions.balancing.pipeline.measured_split import MeasuredSplit
from lockstep.extensions.balancing.pipeline.micro_batches import cut
from lockstep.extensions.balancing.pipeline.moves import move
from lockstep.extensions.balancing.pipeline.stages import SCHEDULES, SPLITS_BACKWARD, Stages, Turn, goes_in_rounds
from lockstep.extensions.balancing.pipeline.times import StageTimes
from lockstep.extensions.balancing.pipeline.weights import WholeModule
from lockstep.extensions.balancing.planner.timeline import IN_ROUNDS, STAGES_OF_RANK
from lockstep.extensions.balancing.torch_parts import ONE_PROCESS, PARTS, PIPELINES
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import has_compiled, innermost
from lockstep.ground.parameters import clip_by_value, is_placeholder, parameters_outside
from lockstep.ground.rank import does, rank_zero_info, warn_once
from lockstep.ground.torch_support import refuse_without
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.recompute import Layers, Policy, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

ONE_DEVICE = (
    "BalancedStrategy splits a model over devices, and this run has one: pass devices=2 or more, or remove the "
    "strategy."
)
STAGES = (
    "BalancedStrategy(stages={stages!r}): the run has {world} ranks, which is not divisible by {stages}: pass a "
    "number above 1 that divides {world}."
)
ONE_PIPELINE = (
    "BalancedStrategy(stages={stages!r}, one_process=True): one process has one pipeline of its {devices} devices, "
    "without replicas: omit `stages`, or omit one_process for one rank on each device."
)
SEVERAL_RANKS = (
    "BalancedStrategy(one_process=True): one process drives the devices of one node, and this run has {ranks} ranks on "
    "{nodes} node(s): pass num_nodes=1 and start one process only, or omit one_process."
)
TORN = (
    "BalancedStrategy(one_process=True): {one!r} and {other!r} are the same tensor, which must stay on one device, "
    "{why}. Pass a `split` that keeps both on one device (layers outside the chain are on {root}, with the last "
    "stage), untie them, or omit one_process: with one process per device, stages can share parameters."
)
TWO_DEVICES = "but would be on {one} and on {other}"
MAY_MOVE = 'but with split="measured" their blocks may move to different devices'
KINDS = ("measured", "equal")
ROUNDS = (
    "BalancedStrategy(micro_batches={count}, schedule={schedule!r}): micro-batches go through {ranks} ranks in rounds "
    "of equal size: pass a multiple of {ranks}, or None."
)
SPLIT = (
    'BalancedStrategy(split={split!r:.100}): pass "measured", "equal", or the number of blocks of each stage: {stages} '
    "numbers above 0, whose sum is {blocks}, the blocks of the chain {chain!r}."
)
NO_FIT = (
    "BalancedStrategy: {why}, according to the memory that was measured before the first step. The blocks are split by "
    "speed alone."
)
NOT_IN_A_FIT = (
    "BalancedStrategy.resplit: blocks can only move while a fit runs, between two accumulation windows: call it in a "
    "hook such as on_train_batch_start."
)
FEW_BLOCKS = (
    "BalancedStrategy: the chain {chain!r} has {blocks} blocks for {stages} stages: use fewer ranks or "
    "stages_per_rank, or divide its blocks into smaller ones."
)
NO_MANUAL = (
    "BalancedStrategy runs the micro-batches of a window by a schedule, and {module} has "
    'automatic_optimization=False: use automatic optimization, or strategy="ddp".'
)
BATCH_NORM = (
    "BalancedStrategy: {name!r} ({kind}) would compute its statistics over micro-batches, with padding samples in "
    'the last one: use GroupNorm or LayerNorm, call its eval(), or use strategy="ddp" and sync_batchnorm=True.'
)
COMPILED = (
    "BalancedStrategy(schedule='zero-bubble') runs the backward of a block in two parts, but the backward of "
    '{name!r}, which is compiled, has only one: remove torch.compile, or use schedule="interleaved".'
)
STRANGE = (
    "{optimizer} has a parameter of shape {shape} that is not in the module, so its stage is unknown: register "
    "the parameter in the module."
)
ELSEWHERE = (
    "A step used {name!r} outside of its block, which is on another rank: share the parameter with a layer outside "
    "the chain, for example `self.head.weight = self.layers[0].weight`, and use the parameter of that layer."
)
OWN_BACKWARD = (
    "BalancedStrategy does not call the `backward` that the module overrides: change the loss in `training_step`."
)
ALONE = (
    "rank {rank} cannot save a checkpoint alone: each rank has only the weights of its own blocks, and after a "
    "failure the other ranks do not save their blocks. Save regularly, with ModelCheckpoint(every_n_train_steps=...)."
)


class BalancedStrategy(RankedStrategy):
    """A strategy that splits a chain of blocks over ``stages`` ranks as a pipeline. Each rank stores its own blocks.

    The chain is an ``nn.Sequential`` or ``nn.ModuleList`` of the module, in which each block takes the output of the
    previous one. ``training_step`` stays as it is and calls the chain once. The first stage runs the step up to that
    call. The last stage runs the full step, and the call returns the output of the chain. The same applies to
    ``validation_step``, ``test_step`` and ``predict_step``. A run has stages x replicas ranks. The last stage of a
    replica is on its first rank.

    Args:
        stages: ranks of a pipeline; "all": one pipeline of all ranks.
        micro_batches: number of parts into which each batch of a loader is split. The parts of all batches in an
            accumulation window go through the stages one after another. Default: twice the stages.
        schedule: "1f1b" (a stage holds activations of as many micro-batches as stages follow it), "gpipe" (of all
            micro-batches), "interleaved" (1F1B with several stages on each rank, which wait less for one another) or
            "zero-bubble" (the backward is in two parts, and the previous stage waits for the first one only).
        split: "measured" splits by the seconds of each block on each rank, within their memory, and moves blocks when
            the speed of ranks changes. "equal", or the number of blocks of each stage such as [3, 5], is fixed.
        chain: name of the chain in the module, such as "model.layers"; None: the only chain that the module has.
        stages_per_rank: with "interleaved" (default: 2) and "zero-bubble" (default: 1); the stages go round the ranks.
        one_process: this process drives all devices of its node, one place in the pipeline each. No other process is
            started. Layers outside the chain are on the first device.
        activation_checkpointing: recompute activations in the backward: True (of the repeated blocks), or classes.
        activation_checkpointing_policy: the same by classes or a policy function.
        activation_checkpointing_save: activations of such layers that are kept nevertheless: "matmuls", operators of
            torch, or a policy function of ``torch.utils.checkpoint``.
        cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout, start_method, nccl: see
            `lockstep.engines.ranks.RankedStrategy`.

    Raises:
        MisconfigurationException: arguments do not fit together; or, when a call starts, the module cannot be split.

    Attributes:
        decisions: changes of the split, and decisions to keep it, of the fits so far.
        times: measurement of windows on the devices of this rank, by place in the pipeline, while a call runs.

    Example::

        trainer = Trainer(devices=4, strategy=BalancedStrategy(stages=2, micro_batches=8))
    """

    def __init__(
        self,
        stages: int | Literal["all"] = "all",
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        split: str | Sequence[int] = "measured",
        chain: str | None = None,
        *,
        stages_per_rank: int | None = None,
        one_process: bool = False,
        activation_checkpointing: Layers | Literal[False] | None = None,
        activation_checkpointing_policy: Policy | None = None,
        activation_checkpointing_save: Save = None,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        start_method: str = "popen",
        nccl: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout, start_method, nccl
        )
        _check_arguments(stages, micro_batches, schedule, split, stages_per_rank, one_process)
        self._recompute(activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        self.drives_all_devices = one_process
        self._stages_per_rank = stages_per_rank or STAGES_OF_RANK.get(schedule, 1)
        self._stages_argument, self._split_argument, self._chain_name = stages, split, chain
        self._micro_batches, self._schedule = micro_batches, schedule
        self._chain: Chain | None = None
        self._stages: Stages | None = None
        self._owned: Ownership | None = None
        self._whole: WholeModule | None = None
        self._random: BlockRandom | None = None
        self._measured: MeasuredSplit | None = None
        self._split: tuple[int, ...] = ()
        self.times: dict[int, StageTimes] = {}
        self.decisions: list[Resplit] = []

    # -- set up

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Set rank, device and precision. The ranks of one pipeline are one replica and see the same samples.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.

        Raises:
            MisconfigurationException: the number of ranks or devices is not a multiple of ``stages``, or is 1.
        """
        super().connect(world, device, precision)
        size = self._size(world)
        if not self.drives_all_devices:
            # the ranks of one pipeline are one replica
            of_rank = tuple(rank // size for rank in range(world.size))
            self.replicas = ReplicaMap(of_rank[world.rank], world.size // size, of_rank)

    @property
    def split(self) -> tuple[int, ...]:
        """Current number of blocks in each stage; empty until the module is set up."""
        return self._split

    def _size(self, world: World) -> int:
        """Return the number of ranks in a pipeline, or the number of devices if one process drives all devices."""
        if self.drives_all_devices and world.size > 1:
            raise MisconfigurationException(SEVERAL_RANKS.format(ranks=world.size, nodes=world.num_nodes))
        size = len(self.devices) if self.drives_all_devices else world.size
        if size == 1:
            raise MisconfigurationException(ONE_DEVICE)
        stages = size if self._stages_argument == "all" else int(self._stages_argument)
        if self.drives_all_devices and stages != size:
            raise MisconfigurationException(ONE_PIPELINE.format(stages=stages, devices=size))
        if size % stages:
            raise MisconfigurationException(STAGES.format(stages=self._stages_argument, world=size))
        count = self._micro_batches
        if count is not None and self._schedule in IN_ROUNDS and not goes_in_rounds(count, stages):
            raise MisconfigurationException(ROUNDS.format(count=count, schedule=self._schedule, ranks=stages))
        return stages

    def _depth(self) -> int:
        """Return the number of stages of a pipeline."""
        return self._size(self.world) * self._stages_per_rank

    @contextmanager
    def building(self, module: LightningModule) -> Iterator[None]:
        """Move new layers off the meta device after ``configure_model``.

        Pretrained weights are read later, when it is decided which rank has them.
        """
        yield
        leave_meta(module, torch.device("cpu"))

    @does("splitting the module into stages")
    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Broadcast rank 0's weights, and split the module into the stages of a pipeline.

        Until a fit starts, each rank has all weights, those of other ranks on the CPU.

        Raises:
            MisconfigurationException: the module cannot be split, or overrides ``backward``.
            ValueError: on every rank, the ranks' modules differ.
        """
        # planned weights are missing because they are still in their folder
        if not pretrained.is_planned(module):
            self._refuse_parts(module)
        if own_backward is not None and innermost(own_backward) is not LightningModule.backward:
            raise MisconfigurationException(OWN_BACKWARD)
        self.module = self.precision.convert_module(module)  # type: ignore[assignment]  # the same object
        sources = stand_in(module)
        check_same_module(module)
        made = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in sources]
        comm.broadcast_tensors([tensor.detach() for tensor in made], 0, None)
        self._begin_recomputation()
        self._close()
        self._chain = chain = Chain(module, self._chain_name)
        self.step_device = self.root_device
        for name, block in zip(chain.names, chain.blocks, strict=True):
            # a compiled graph has one backward, which computes all gradients at once
            if self._schedule == SPLITS_BACKWARD and has_compiled(block):
                raise MisconfigurationException(COMPILED.format(name=name))
        self.times = {place: StageTimes(device) for place, device in self._places().items()}
        self._measured = None
        self._random = BlockRandom(self._places())
        placement = self._lay_out(self._first_split(chain))
        self._whole = self.copies.parts = WholeModule(module, self._ownership, self.members, placement)
        self.gradients = gradients.StageGradients(self, self._whole)
        if sources:
            self._whole.read(sources)
        self._whole.place()
        chain.attach()

    def _places(self) -> dict[int, torch.device]:
        """Return a dict from positions in the pipeline to the devices of this process at these positions."""
        return dict(enumerate(self.devices)) if self.drives_all_devices else {comm.rank(self.members): self.root_device}

    def _lay_out(self, counts: tuple[int, ...]) -> StagePlacement:
        """Assign the next ``counts[i]`` blocks to each stage i, and create the stages on their ranks and devices."""
        assert self._chain is not None
        layout, places = Layout(counts, self._size(self.world)), self._places()
        placement = StagePlacement(self._chain, layout, places)
        if len(set(places.values())) > 1:
            self._refuse_torn(self._chain, placement)
        self._split = counts
        # a process that drives all devices owns all blocks
        of_ranks = Layout(counts, 1) if self.drives_all_devices else layout
        self._owned = Ownership(self.module, self._chain, of_ranks, comm.rank(self.members))
        if self._stages is not None:
            self._stages.close()
        self._stages = Stages(
            self._chain,
            layout,
            self.members,
            places,
            self._schedule,
            self.precision.context,
            self.times,
            self._owned.local,
            self._random,
        )
        return placement

    def _refuse_torn(self, chain: Chain, placement: StagePlacement) -> None:
        """Raise an error if one process would need a tensor on two devices, now or after a change of the split."""
        torn, moves = find_torn(self.module, placement.device_of), self._split_argument == "measured"
        if torn is not None:
            one, other = (str(placement.device_of(name)) for name in torn)
            why = TWO_DEVICES.format(one=one, other=other)
            raise MisconfigurationException(TORN.format(one=torn[0], other=torn[1], why=why, root=placement.root))
        torn = find_torn(self.module, chain.block_of) if moves else None
        if torn is not None:
            raise MisconfigurationException(TORN.format(one=torn[0], other=torn[1], why=MAY_MOVE, root=placement.root))

    def _first_split(self, chain: Chain) -> tuple[int, ...]:
        stages, blocks, split = self._depth(), len(chain.blocks), self._split_argument
        if blocks < stages:
            raise MisconfigurationException(FEW_BLOCKS.format(chain=chain.name, blocks=blocks, stages=stages))
        # a second call continues with the split that the first one measured
        if split == "measured" and (len(self._split), sum(self._split)) == (stages, blocks):
            return self._split
        if isinstance(split, str):
            return equal_split(blocks, stages)
        if len(split) != stages or sum(split) != blocks:
            raise MisconfigurationException(SPLIT.format(split=split, stages=stages, blocks=blocks, chain=chain.name))
        return tuple(split)

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Check and store the optimizers, and free the weights of other ranks' blocks."""
        module = self.module
        if not module.automatic_optimization:
            raise MisconfigurationException(NO_MANUAL.format(module=type(module).__name__))
        for name, layer in module.named_modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
                raise MisconfigurationException(BATCH_NORM.format(name=name, kind=type(layer).__name__))
        for optimizer in optimizers:
            for parameter in parameters_outside(module, [optimizer]).values():
                shape, name = tuple(parameter.shape), type(optimizer).__name__
                raise MisconfigurationException(STRANGE.format(optimizer=name, shape=shape))
        super().setup_optimizers(optimizers, configs)
        pretrained.forget(module)
        self._parts.free(optimizers)
        if self.precision.scaler is not None:
            # a scaler is set up by its first loss, and only the last stage has losses
            self.precision.scaler.scale(torch.zeros((), device=self.root_device))
        # with one block in each stage there is only one split
        if self._split_argument == "measured" and max(self._split) > 1:
            size = self._size(self.world)
            self._measured = MeasuredSplit(self.times, size, size if self.drives_all_devices else self.world.local_size)

    @property
    def _ownership(self) -> Ownership:
        assert self._owned is not None  # set by setup_module
        return self._owned

    @property
    def _parts(self) -> WholeModule:
        assert self._whole is not None  # set by setup_module
        return self._whole

    def _close(self) -> None:
        if self._stages is not None:
            self._stages.close()
        if self._chain is not None:
            self._chain.detach()
        if self._measured is not None:
            self._measured.close()
        self._chain = self._stages = self._measured = self.step_device = None

    def teardown(self) -> None:
        """Restore the original methods of the module's blocks."""
        self._close()
        super().teardown()

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Run a step of an evaluation through all stages. The output of ``predict_step`` is sent to all ranks."""
        assert self._stages is not None
        output = self._stages.evaluate(partial(fn, *args))
        if getattr(fn, "__name__", "") == "predict_step":
            output = comm.broadcast_object(output, 0, self.members)
        return output

    def _turns(
        self, step: Callable[..., Any], micro_batches: Sequence[MicroBatch], count: int
    ) -> list[tuple[int, Turn]]:
        """Split each non-empty batch of a window into ``count`` parts, and return pairs (index of the batch, part)."""
        # frozen parameters change what stages send, as shapes do
        needed = tuple(parameter.requires_grad for parameter in self.module.parameters())
        turns: list[tuple[int, Turn]] = []
        for number, each in enumerate(micro_batches):
            if each.empty or each.args[0] is None:
                continue
            batch, *others = each.args
            for part in cut(batch, count):
                turn = Turn(
                    partial(each.enter, part.part),
                    partial(step, part.filled, *others),
                    partial(step, part.batch, *others),
                    partial(each.loss, part=part.part),
                    part.samples,
                    part.rows,
                    (gradients.shapes_of(part.filled), needed),
                )
                turns.append((number, turn))
        return turns

    def window(self, step: Callable[..., Any], micro_batches: Sequence[MicroBatch]) -> list[Any]:
        """Run all forwards and backwards of an accumulation window, reduce the gradients, and return the outputs.

        Args:
            step: the module's ``training_step``.
            micro_batches: the micro-batches of the window.

        Returns:
            the outputs of ``step``, one per micro-batch.

        Raises:
            MisconfigurationException: a parameter of another rank's stage has a gradient on this rank.
        """
        count = self._micro_batches or 2 * self._size(self.world)
        turns = self._turns(step, micro_batches, count)
        # before anything of this window is computed: blocks may move
        self._follow_measurements([turn for _, turn in turns])
        owned, stages = self._ownership, self._stages
        assert stages is not None
        if self.replicas.count > 1 or owned.outside_buffers:
            self._parts.align_buffers(self.peers if self.replicas.count > 1 else None)
        outputs: list[list[Any]] = [[] for _ in micro_batches]
        with ExitStack() as windows:
            for times in self.times.values():
                windows.enter_context(times.window(len(turns)))
            for run in (list(run) for _, run in groupby(turns, key=lambda each: each[1].shape)):
                for (number, _), returned in zip(run, stages.train([turn for _, turn in run]), strict=True):
                    outputs[number].append(returned)
        # a parameter of another rank's stage has no memory here: its gradient would be lost
        if any(parameter.grad is not None for parameter in owned.remote):
            name = next(n for n, p in self.module.named_parameters() if p.grad is not None and is_placeholder(p))
            raise MisconfigurationException(ELSEWHERE.format(name=name))
        gradients.reduce(owned, self.members, self.peers, self.replicas.count)
        self.rounds += 1
        return [_join_outputs(each) for each in outputs]

    def _follow_measurements(self, turns: Sequence[Turn]) -> None:
        """Change the split before a window, if the ranks' measurements favor a different split."""
        measured, stages = self._measured, self._stages
        if measured is None:
            return
        assert stages is not None
        found = measured.at_boundary(stages, self._ownership, self.optimizers, turns)
        if found is None:
            return
        assert measured.control is not None
        if measured.control.warning:
            warn_once(NO_FIT.format(why=measured.control.warning), key="stages do not fit")
        found = replace(found, step=self.module.global_step)
        self.decisions.append(found)
        rank_zero_info(f"balanced: step {found.step}: {found}.")
        if found.after != found.before:
            size = measured.control.moved_between(found.before, found.after)
            measured.control.record_move(size, self.resplit(found.after))

    @does("moving blocks to other ranks")
    def resplit(self, split: Sequence[int]) -> float:
        """Change the split of the chain. Blocks move to their new ranks with their gradients and optimizer states.

        Collective. Call it on all ranks between two windows of a fit, for example in ``on_train_batch_start``.

        Args:
            split: number of blocks of each stage.

        Returns:
            the seconds of the slowest rank.

        Raises:
            MisconfigurationException: the numbers are not a split of the chain, or no fit is running.
        """
        if self._chain is None or not self._parts.is_freed:
            raise MisconfigurationException(NOT_IN_A_FIT)
        blocks, stages = len(self._chain.blocks), self._depth()
        if len(split) != stages or sum(split) != blocks or min(split) < 1:
            raise MisconfigurationException(
                SPLIT.format(split=split, stages=stages, blocks=blocks, chain=self._chain.name)
            )
        begin, before = time.perf_counter(), self._ownership
        placement = self._lay_out(tuple(split))
        move(self.module, before, self._ownership, self.optimizers, self.members, self.root_device)
        self._parts.change_owners(self._ownership, placement, self.optimizers)
        if self._measured is not None and self._measured.control is not None:
            self._measured.control.adopt(self._split)
        took = torch.tensor(time.perf_counter() - begin, dtype=torch.float32, device=self.root_device)
        return comm.all_reduce(took, "max").item()

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """Clip gradients by value, or by the norm of the full model's gradient. Collective."""
        assert self._owned is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            return gradients.clip_by_norm(parameters, self._owned, value, self.members, self.root_device)
        clip_by_value(parameters, value)
        return None

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's parameters."""
        # with a loss scale, all ranks skip a step in which one of them has an overflow
        if self.precision.scaler is not None:
            self.precision.scaler.share_overflow(optimizer, partial(comm.all_reduce, op="max"), self.root_device)
        return super().step(optimizer, closure, **options)

    # -- state

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield (name, full value, full gradient) for each parameter. Collective."""
        return self._parts.whole_parameters()

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """Return the full state of module and optimizers on rank 0, as one process would save it. Collective.

        Raises:
            MisconfigurationException: ``alone`` is True on several ranks, each with a part of the states only.
        """
        if alone and self.world.size > 1:
            raise MisconfigurationException(ALONE.format(rank=self.world.rank))
        sends = self.replicas.index == 0
        module = self._parts.state_dict(sends, self.collectives.gather_on_zero)
        if weights_only:
            return EngineState(module)
        states: list[dict[str, Any] | None] = [
            self._parts.optimizer_state(o, sends, self.collectives.gather_on_zero) for o in self.optimizers
        ]
        random = None if self._random is None else self._random.state_dict()
        by_rank = [random] if alone else self.collectives.gather_on_zero(random)
        return EngineState(module, states, {"split": list(self._split)}, by_rank)

    def load(self, state: EngineState) -> None:
        """Load this rank's part of a full state. With ``split="measured"``, use the saved split if possible."""
        if state.module is not None:
            self._parts.load_state_dict(state.module, self.module.strict_loading)
        for optimizer, saved in zip(self.optimizers, state.optimizers or (), strict=False):
            if saved is not None:
                self._parts.load_optimizer(optimizer, saved)
        split = (state.own or {}).get("split", ())
        fits = (len(split), sum(split)) == (len(self._split), sum(self._split))
        if self._split_argument == "measured" and fits and tuple(split) != self._split:
            self.resplit(split)
        # other ranks have other blocks, and with them other random numbers
        if self._random is not None and len(state.by_rank) == self.world.size:
            self._random.load_state_dict(state.by_rank[self.world.rank])


def _is_number(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_arguments(
    stages: object, micro_batches: object, schedule: object, split: object, stages_per_rank: object, one_process: object
) -> None:
    counts = isinstance(split, Sequence) and not isinstance(split, str) and all(_is_number(n, 1) for n in split)
    of_split = 'pass "measured", "equal", or the number of blocks of each stage, each above 0, such as [3, 5]'
    of_parts = "pass a number above 0, or None for twice the stages"
    of_rank = stages_per_rank is None or _is_number(stages_per_rank, 1)
    for name, value, is_valid, way in (
        ("stages", stages, stages == "all" or _is_number(stages, 2), 'pass a number of ranks above 1, or "all"'),
        ("micro_batches", micro_batches, micro_batches is None or _is_number(micro_batches, 1), of_parts),
        ("schedule", schedule, schedule in SCHEDULES, f"choose {', '.join(map(repr, SCHEDULES))}"),
        ("stages_per_rank", stages_per_rank, of_rank, "pass a number above 0"),
        ("split", split, split in KINDS or counts, of_split),
        ("one_process", one_process, isinstance(one_process, bool), "pass True or False"),
    ):
        if not is_valid:
            raise MisconfigurationException(f"BalancedStrategy({name}={value!r:.100}): {way}.")
    if stages_per_rank not in (None, 1) and schedule not in IN_ROUNDS:
        raise MisconfigurationException(
            f"BalancedStrategy(stages_per_rank={stages_per_rank}, schedule={schedule!r}): this schedule supports only "
            f"one stage per rank. For several stages, use schedule={' or '.join(map(repr, IN_ROUNDS))}."
        )
    refuse_without(PIPELINES, "BalancedStrategy", "use DDPStrategy(shard_optimizer=True)", PARTS)
    if one_process:
        refuse_without(ONE_PROCESS, "BalancedStrategy(one_process=True)", "omit one_process", PARTS)


def _join_outputs(returned: list[Any]) -> Any:
    """Combine the outputs of a batch's parts for ``on_train_batch_end``. Dicts get a list of values for each key."""
    if len(returned) == 1:
        return returned[0]
    if returned and all(isinstance(each, dict) for each in returned):
        return {key: [each.get(key) for each in returned] for key in returned[0]}
    return None
