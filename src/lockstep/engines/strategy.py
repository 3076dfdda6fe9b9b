"""Strategies, which combine a run's engine, collectives and checkpoint writer under Lightning's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint.first_values import fill_whole
from lockstep.checkpoint.io import CheckpointIO, CheckpointWriter, Path
from lockstep.checkpoint.pretrained import is_planned
from lockstep.cluster.world import World
from lockstep.engines.collectives import Collectives, ReplicaMap
from lockstep.engines.copies import ModelCopies
from lockstep.engines.engine import Engine, Gradients
from lockstep.ground import comm
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.device import make_current, widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork_and_exit import protect_forks
from lockstep.ground.parameters import parameters_outside, state_dicts_without
from lockstep.ground.tree import tensors_in
from lockstep.memory.recompute import Layers, Policy, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision, multiply

SYNCHRONIZED = "With synchronized BatchNorm (sync_batchnorm=True) all ranks run its layers together"
GAP = (
    "{together}, but rank {rank} has no samples from loader {loader} for a micro-batch in which other ranks have some. "
    "Use loaders with equal numbers of samples and equal batch sizes, DataLoader(drop_last=True), or "
    'CombinedLoader(mode="min_size").'
)
NO_LOSS = (
    "`training_step` returned None on rank {rank}. {together}, so the other ranks would wait for this rank's "
    "backward. Return a loss on every rank, such as `0.0 * loss`."
)


class Strategy(Engine):
    """Base class of all strategies, which manage a run's devices, ranks and checkpoint files. Supports one process.

    A user's strategy overrides the methods of `lockstep.engines.engine.Engine`; one with several ranks derives from
    `lockstep.engines.ranks.RankedStrategy`. The methods here fit engines with full parameters on each rank.
    `docs/architecture.md` lists the methods that subclasses override.

    Attributes:
        collectives: communication between the ranks.
        checkpoints: writer of files.
        gradients: access to the gradients after a backward.
        copies: differences between the ranks' replicas of the model, such as buffers.
        replicas: the replica of each rank.
        engine: name of the engine in messages; "": the name of the class.
        peers: process group of one rank of each replica, including this one; None: all ranks.
        members: process group of the ranks of this replica; None: this rank alone.
        undoes_steps: True if restoring weights, buffers and optimizer states undoes steps, also on several ranks.
        devices: devices of this node, by local rank.
        rounds: number of reductions over all ranks so far.
        sync_batchnorm: let BatchNorm use the statistics of all ranks in training; the Trainer sets it.
        planned: the saved plan from which the strategy was created, and its file.
        plugins: cluster, CheckpointIO and precision among the strategy's arguments; the Trainer uses them.
        instead: strategy that the Trainer uses instead of this one; None: this one.
        traffic: number of gradient reductions in this fit so far, and the bytes that this rank passed to them.
        waits_in: methods (owner, name) in which this rank waits for others outside of torch's collectives.
    """

    undoes_steps: bool = False
    engine: str = ""

    def __init__(self) -> None:
        super().__init__()
        self.collectives = Collectives()
        self.checkpoints = CheckpointWriter()
        self.gradients: Gradients[object] = Gradients(self, None)
        self.copies = ModelCopies()
        self.replicas = ReplicaMap.each(World.single())
        self.peers: comm.Group = None
        self.members: comm.Group = None
        self.planned: tuple[object, str] | None = None
        self.plugins: list[object] = []
        self.devices = [self.root_device]
        self.accelerator_backend = ""
        self.instead: Strategy | None = None
        self.rounds = 0
        self.traffic = (0, 0)
        self.waits_in: list[tuple[object, str]] = []
        self.sync_batchnorm = False

    # -- set up

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Store this process's rank, device and precision, without starting or allocating anything.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.
        """
        self._root_device, self.precision, self.context = device, precision, precision.context
        self.collectives.world = world
        self.collectives.device = self.root_device
        self.replicas = ReplicaMap.each(world)

    @property
    def own_devices(self) -> list[torch.device]:
        """Devices that this rank uses."""
        return self.devices if self.drives_all_devices else [self.root_device]

    def setup_environment(self) -> None:
        """Connect this rank to the other ranks. Collectives work afterwards."""
        make_current(self.root_device)
        if self.root_device.type != "cpu":
            protect_forks()  # a loader worker that freed pinned memory of this process would be aborted

    @contextmanager
    def building(self, module: LightningModule) -> Iterator[None]:
        """Inside the block, ``configure_model`` creates layers. On exit, fill meta-device parameters. Collective.

        Args:
            module: module whose ``configure_model`` runs in the block.
        """
        with nullcontext() if self.init_device is None else self.init_device:
            yield
        # an engine with `init_device` meta fills parameters itself
        if self.init_device != torch.device("meta") or is_planned(module):
            fill_whole(module, self.root_device)

    def whole_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, value on the CPU) for each buffer that checkpoints contain. Collective."""
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        with state_dicts_without(self.module, parameters.__contains__):
            saved = self.save(weights_only=True).module or {}
        yield from self.broadcast(
            {name: value.cpu() for name, value in saved.items() if isinstance(value, Tensor)}
        ).items()

    def change_optimizers(self) -> None:
        """Check that the strategy supports the optimizers that have replaced the previous ones during a fit."""
        self.check_trained(replaced=True)

    def check_trained(self, replaced: bool = False) -> None:
        """Raise if the module or the optimizers have new parameters that ranks would train differently. Collective.

        Args:
            replaced: True if new optimizers replaced the previous ones; False after the first hooks of an epoch, also
                after a resume.

        Raises:
            MisconfigurationException: a subclass cannot train the new parameters or optimizers; this class never
                raises.
        """

    # -- micro-batches for which ranks have no samples

    def _together(self) -> str:
        """Return the start of an error message if all ranks must run layers together; "" if no layer communicates."""
        if self.runs_padding:
            return f"Under {self.engine or type(self).__name__} ranks run each layer together"
        return SYNCHRONIZED if self.copies.norms is not None else ""

    def check_gap(self, rank: int, loader: int) -> None:
        """Raise if other ranks would wait for ``rank``, which lacks samples from ``loader`` for a micro-batch.

        Args:
            rank: rank without samples.
            loader: number of the loader, from 0.

        Raises:
            MisconfigurationException: all ranks must run the layers together, as under FSDP or with synchronized
                BatchNorm.
        """
        if self._together():
            raise MisconfigurationException(GAP.format(together=self._together(), rank=rank, loader=loader))

    def skip_loss(self) -> None:
        """Skip a ``training_step`` that returned no loss. Raise if other ranks would wait for this rank's backward.

        Raises:
            MisconfigurationException: all ranks must run the layers together, as under FSDP or with synchronized
                BatchNorm.
        """
        if self._together():
            raise MisconfigurationException(NO_LOSS.format(together=self._together(), rank=self.world.rank))
        self.skip()

    @contextmanager
    def without_ranks(self, absent: tuple[int, ...]) -> Iterator[None]:
        """Inside the block, layers communicate without the ``absent`` ranks, which have no samples for a micro-batch.

        Collective, also for the absent ranks, which join the synchronization of buffers before a training forward.
        """
        norms = None if self.runs_padding else self.copies.norms
        with nullcontext() if norms is None else norms.without_ranks(absent):
            if self.world.rank in absent and torch.is_grad_enabled():
                # no forward does it there, or only after the loop has copied the buffers that it restores
                self.copies.forward_begins()
            yield

    @contextmanager
    def zero_weight(self) -> Iterator[list[Tensor]]:
        """Ignore gradients and BatchNorm statistics from a padding batch that runs inside the block.

        Yields:
            The module's buffers that a forward computes from this rank's samples alone.
        """
        norms, self.drops_gradients = self.copies.norms, True
        if norms is not None:
            norms.set_zero_weight(True)
        try:
            yield self.copies.own_buffers(self.module)
        finally:
            self.drops_gradients = False
            if norms is not None:
                norms.set_zero_weight(False)

    # -- before users' hooks

    def steps_end(self) -> None:
        """Prepare the module, after a training forward or an evaluation's steps, so that users' hooks can read it."""

    # -- gradients

    @contextmanager
    def synchronize(self, sync: bool) -> Iterator[None]:
        """Inside the block, enable or disable the reduction of gradients in the backward.

        Args:
            sync: True: backwards reduce gradients; False: gradients accumulate on each rank.
        """
        before, self.sync_gradients = self.sync_gradients, sync
        try:
            yield
        finally:
            self.sync_gradients = before

    def set_requires_grad(self, parameter: Tensor, needed: bool) -> None:
        """Set ``requires_grad`` of a parameter, for later forwards.

        Args:
            parameter: parameter of the module.
            needed: new value of ``requires_grad``.
        """
        parameter.requires_grad = needed

    def whole_gradients(self) -> AbstractContextManager[None]:
        """Gather sharded gradients, so that each parameter's ``.grad`` is unsharded inside the block. Collective.

        Returns:
            a context manager. Outside its block, ``.grad`` has this rank's shard again.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.

        Example::

            with self.trainer.strategy.whole_gradients():
                norm = self.head.weight.grad.norm()
        """
        self.check_present("strategy.whole_gradients()")
        return self.gradients.whole()

    def window_state(self) -> dict[str, Any]:
        """Return this rank's gradients and buffers within an unfinished window, for a checkpoint. Collective."""
        return {**self.gradients.window_state(), "buffers": self.copies.window_state()}

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Restore the gradients and buffers that :meth:`window_state` returned. Collective.

        Args:
            saved: state that this rank saved.
        """
        self.gradients.load_window_state(saved)
        self.copies.load_window_state(saved.get("buffers", {}))

    def divide_gradients(self, weight: float | Tensor) -> float | Tensor:
        """Divide the gradients by the total weight that all ranks' training steps returned. Return the applied factor.

        The factor is the number of ranks (of replicas in a pipeline) / the sum, since gradients are means over these;
        0 if the sum is 0.

        Args:
            weight: sum of this rank's weights in the window: a number or a scalar tensor.

        Returns:
            the factor: a scalar tensor on the device, or a float on the CPU.
        """
        device, dtype = self.root_device, widest(self.root_device)
        if isinstance(weight, Tensor) and weight.device == device:
            own = weight.detach().to(dtype)  # stays on the device, without a wait
        else:
            own = torch.full((), float(weight), dtype=dtype, device=device)
        local = self.copies.local_steps
        if local is not None:
            total, ranks = local.summed_weight(own)
        else:
            total = self.collectives.reduce(own, reduce_op="sum")
            # an engine that runs whole windows has losses on one rank of each replica
            ranks = self.world.size if self.window is None else self.replicas.count
        factor: float | Tensor
        if total.device.type == "cpu":
            divisor = total.item()
            factor = ranks / divisor if divisor else 0.0
        else:  # `.item()` would wait for the device
            factor = torch.where(total != 0, ranks / total, 0.0)
        multiply(self.gradients.local(stepped=True), factor)
        return factor

    # -- memory

    def held(self) -> dict[str, list[Tensor]]:
        """Return the model's tensors in this rank's memory, grouped by the kinds in `lockstep.memory.meter.KINDS`.

        Returns:
            lists of the tensors themselves, of any shapes and dtypes, not copies.
        """
        parameters: list[Tensor] = [
            *self.module.parameters(),
            *parameters_outside(self.module, self.optimizers).values(),
        ]
        return {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer_states": list(tensors_in([optimizer.state for optimizer in self.optimizers])),
            "buffers": list(self.module.buffers()),
        }

    # -- Lightning's names: of the ranks

    @property
    def world(self) -> World:
        """This process's rank, local rank and node, and the numbers of ranks and nodes in the run."""
        return self.collectives.world

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks without samples for the current micro-batch, while the other ranks run user code; otherwise empty."""
        return self.collectives.absent

    @absent.setter
    def absent(self, ranks: tuple[int, ...]) -> None:
        self.collectives.absent = ranks

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.world.rank == 0

    @property
    def has_met(self) -> bool:
        """True if this rank is connected to the other ranks. Until then, a signal ends the process immediately."""
        return self.world_size == 1 or dist.is_initialized()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process within its node."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """Index of this process's node."""
        return self.world.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world.num_nodes

    @property
    def precision_plugin(self) -> Precision:
        """Precision of the run, as in ``trainer.precision_plugin``."""
        return self.precision

    @property
    def model(self) -> LightningModule:
        """The user's module, which lockstep does not wrap."""
        return self.module

    @property
    def lightning_module(self) -> LightningModule:
        """The user's module."""
        return self.module

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without reduction inside the block; the next backward after the block reduces them.

        Returns:
            a context manager.
        """
        return self.synchronize(False)

    # -- Lightning's names: of the collectives, each overridable

    def make_agreement(self) -> ConsensusFlags:
        """Create this run's flags. Any rank can request a flag, and all ranks see it set at the same boundary."""
        return self.collectives.make_agreement()

    def check_present(self, call: str, group: comm.Group = None) -> None:
        """Raise if user code calls a collective that ranks without samples cannot join.

        Args:
            call: the call, for the message.
            group: process group of the collective; None: all ranks.

        Raises:
            MisconfigurationException: the collective would wait for a rank that does not run this code.
        """
        self.collectives.check_present(call, group)

    def with_all_ranks(self) -> AbstractContextManager[None]:
        """Allow collectives inside a block that all ranks run, including ranks without samples.

        Returns:
            a context manager.
        """
        return self.collectives.with_all_ranks()

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called `barrier`.

        Args:
            name: unused; for scripts written for Lightning.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.
        """
        self.collectives.barrier()

    def broadcast(self, obj: object, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank.

        Args:
            obj: any picklable object; ignored on other ranks than ``src``.
            src: rank that sends.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.
        """
        return self.collectives.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: comm.Group = None, sync_grads: bool = False) -> Tensor:
        """Return the stacked tensors of all ranks: ``(world_size, *shape)``; on one process the tensor itself.

        Args:
            tensor: tensor of the same shape and dtype on all ranks.
            group: process group; None: all ranks.
            sync_grads: let gradients flow back to the rank that a slice comes from.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.
        """
        return self.collectives.all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor | float, group: comm.Group = None, reduce_op: object = "mean") -> Any:
        """Return the tensor reduced over all ranks by "mean", "sum", "min" or "max". The argument is not changed.

        Args:
            tensor: number, or tensor of the same shape and dtype on all ranks.
            group: process group; None: all ranks.
            reduce_op: one of these names, or the ``ReduceOp`` of that name.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.
        """
        return self.collectives.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if ``decision`` is True on all ranks; with ``all=False``, if it is True on any rank.

        Raises:
            MisconfigurationException: ranks without samples for the current micro-batch would not join the collective.
        """
        return self.collectives.decide(decision, all)

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """Gather CPU vectors of equal length from all ranks into one tensor of shape ``(world_size, n)``.

        Args:
            vector: tensor of shape ``(n,)`` on the CPU, of the same dtype on all ranks.

        Returns:
            a tensor on the CPU.
        """
        return self.collectives.gather_stacked(vector)

    def gather_objects(self, obj: object) -> list[Any]:
        """Gather a small picklable object from each rank into a list, in the order of the ranks.

        Args:
            obj: object of this rank.

        Returns:
            a list of ``world_size`` objects, the same on all ranks.
        """
        return self.collectives.gather_objects(obj)

    # -- Lightning's names: of checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Object that writes, reads and removes checkpoints; assign it before calling a method of the Trainer."""
        return self.checkpoints.io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self.checkpoints.io = io

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: Path,
        storage_options: object = None,
        *,
        alone: bool = False,
        sharded: bool = False,
    ) -> None:
        """Write a checkpoint: on rank 0, on the only rank that calls (``alone``), or each rank's part (``sharded``).

        Args:
            checkpoint: state of the run, by name.
            filepath: path or URL of the file or folder.
            storage_options: options of the CheckpointIO.
            alone: True if other ranks do not call the method.
            sharded: True if ``checkpoint`` has this rank's part only.
        """
        if self.world.is_zero or alone or sharded:
            self.checkpoints.save(checkpoint, filepath, storage_options, sharded=sharded)

    def load_checkpoint(self, filepath: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint to the CPU on every rank.

        Args:
            filepath: path or URL of a file or folder.
            weights_only: as in ``trainer.fit``.

        Returns:
            the state of the run, by name.

        Raises:
            CorruptCheckpoint: the checkpoint is truncated, altered, or not a checkpoint.
            FileNotFoundError: the checkpoint does not exist.
        """
        return self.checkpoints.load(filepath, weights_only)

    def remove_checkpoint(self, filepath: Path) -> None:
        """Delete a checkpoint. Does nothing on ranks other than 0.

        Args:
            filepath: path or URL of a file or folder.
        """
        if self.world.is_zero:
            self.checkpoints.remove(filepath)

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state (the bucket plan). Without it, a resumed run may differ in the last bits."""
        return self.save().own or {}


class SingleDeviceStrategy(Strategy):
    """Strategy that trains in one process on one device.

    Args:
        device: device of the run, such as "cpu" or "cuda:0"; None: chosen by the Trainer's flags.
        accelerator: None; chosen by the Trainer's flag.
        checkpoint_io: writer of checkpoints.
        precision_plugin: precision of the run.
        activation_checkpointing: recompute activations in the backward instead of keeping them: True (in the
            repeated blocks), or classes of layers.
        activation_checkpointing_policy: classes or a policy function that select the layers to recompute.
        activation_checkpointing_save: activations of these layers to keep instead of recomputing them: "matmuls", torch
            operators, or a policy function of ``torch.utils.checkpoint``.
        offload_optimizer: only False.

    Raises:
        MisconfigurationException: arguments contradict each other; or, at the start of a call, the Trainer's flags
            choose another device.
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        accelerator: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        activation_checkpointing: Layers | Literal[False] | None = None,
        activation_checkpointing_policy: Policy | None = None,
        activation_checkpointing_save: Save = None,
        offload_optimizer: Literal[False] = False,
    ) -> None:
        super().__init__()
        if offload_optimizer:
            raise MisconfigurationException(
                f"SingleDeviceStrategy({offload_optimizer=}) is not supported: optimizer states stay on the device of "
                'their parameters. Use strategy="fsdp_cpu_offload".'
            )
        self._recompute(activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        self._device = None if device is None else torch.device(device)
        self.plugins = [plugin for plugin in (checkpoint_io, precision_plugin) if plugin is not None]

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Store rank, device and precision. Raise if the strategy was created for another device.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.

        Raises:
            MisconfigurationException: the strategy was created for another device.
        """
        own = self._device
        if own is not None and (own.type != device.type or own.index not in (None, device.index or 0)):
            place = f", devices=[{own.index}]" if own.index else ""
            raise MisconfigurationException(
                f"SingleDeviceStrategy(device={str(own)!r}) contradicts the Trainer's flags, which choose "
                f"{str(device)!r}. Pass Trainer(accelerator={own.type!r}{place}), or omit the strategy's device."
            )
        super().connect(world, device, precision)
