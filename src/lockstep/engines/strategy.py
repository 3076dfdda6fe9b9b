"""A strategy: an engine, the collectives and the checkpoint writer of a run put together, by Lightning's names."""

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
from lockstep.ground.parameters import beside, state_dicts_without
from lockstep.ground.tree import tensors_in
from lockstep.memory.recompute import Layers, Policy, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision, multiply

SYNCHRONIZED = "Where BatchNorm is synchronized (sync_batchnorm=True), all ranks go through it together"
GAP = (
    "{together}, and rank {rank} has no samples of loader {loader} in a micro-batch of which others have some: give "
    "loaders side by side equal numbers of samples and batch sizes, or drop_last=True, or use "
    'CombinedLoader(mode="min_size") with such.'
)
NO_LOSS = (
    "`training_step` returned None on rank {rank}. {together}, forwards and backwards, and the others would wait for "
    "this one. Return a loss on each, if only `0.0 * loss`."
)


class Strategy(Engine):
    """What a run has of devices and ranks: the base of all, and one process.

    A strategy of one's own overrides the methods of `lockstep.engines.engine.Engine`, and by
    `lockstep.engines.ranks.RankedStrategy` its ranks are joined. Everything here has an answer that fits an engine
    which holds whole parameters; `docs/architecture.md` lists what others override of it.

    Attributes:
        collectives: how ranks talk to each other.
        checkpoints: who writes files.
        gradients: what backwards have left.
        copies: what the ranks' copies of the model have beside parameters.
        replicas: the ranks by the samples that they see.
        engine: its name in messages; "": that of the class.
        peers: a rank of each replica, this one among them, as a process group; None: all ranks.
        members: the ranks of this replica, as a process group; None: this one alone.
        undoes_steps: on several ranks, too, all that steps have changed can be put back by its values: weights,
            buffers, optimizer states.
        devices: of this node, by local rank.
        rounds: reductions over all ranks so far.
        sync_batchnorm: whether BatchNorm takes its statistics over all ranks while training; the Trainer sets it.
        planned: the saved plan by which it was made, and its file.
        plugins: a cluster, a CheckpointIO or a precision that came with it; the Trainer takes them as its own.
        instead: the strategy that the Trainer takes when it is given this one; None: this one.
        traffic: reductions of gradients in this fit so far, and the bytes that this rank gave to them.
        waits_in: methods, by owner and name, in which this rank waits for others past torch's collectives.
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
        """Take in where this process stands; nothing is started or allocated yet."""
        self._root_device, self.precision, self.context = device, precision, precision.context
        self.collectives.world = world
        self.collectives.device = self.root_device
        self.replicas = ReplicaMap.each(world)

    @property
    def own_devices(self) -> list[torch.device]:
        """The devices that this rank works with."""
        return self.devices if self.drives_all_devices else [self.root_device]

    def setup_environment(self) -> None:
        """Join the other ranks; afterwards collectives work."""
        make_current(self.root_device)
        if self.root_device.type != "cpu":
            protect_forks()  # a loader worker that freed pinned memory of this process would be aborted

    @contextmanager
    def building(self, module: LightningModule) -> Iterator[None]:
        """Around the module's ``configure_model``; what it leaves on the meta device gets values. Collective."""
        with nullcontext() if self.init_device is None else self.init_device:
            yield
        if self.init_device != torch.device("meta") or is_planned(module):  # else the engine gives values itself
            fill_whole(module, self.root_device)

    def whole_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value, on the CPU, of each buffer that a checkpoint has. Collective."""
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        with state_dicts_without(self.module, parameters.__contains__):
            saved = self.save(weights_only=True).module or {}
        yield from self.broadcast(
            {name: value.cpu() for name, value in saved.items() if isinstance(value, Tensor)}
        ).items()

    def change_optimizers(self) -> None:
        """Others have taken the place of the optimizers in the middle of a fit."""
        self.check_trained(replaced=True)

    def check_trained(self, replaced: bool = False) -> None:
        """Refuse what came into the module or its optimizers and would not be trained alike on all ranks. Collective.

        Args:
            replaced: others have taken the place of the optimizers; else an epoch begins, or goes on after a resume,
                and its first hooks have run.
        """

    # -- micro-batches for which ranks have no samples

    def _together(self) -> str:
        """Through what all ranks go together in a forward, as the beginning of a message; "" where through nothing."""
        if self.runs_padding:
            return f"Under {self.engine or type(self).__name__} ranks go through each layer together"
        return SYNCHRONIZED if self.copies.norms is not None else ""

    def check_gap(self, rank: int, loader: int) -> None:
        """Refuse a micro-batch of which a rank has samples, but none of one of its loaders, where others would wait."""
        if self._together():
            raise MisconfigurationException(GAP.format(together=self._together(), rank=rank, loader=loader))

    def skip_loss(self) -> None:
        """Go on without a loss of ``training_step``; refuse it where others would wait in their backwards."""
        if self._together():
            raise MisconfigurationException(NO_LOSS.format(together=self._together(), rank=self.world.rank))
        self.skip()

    @contextmanager
    def leaving_out(self, absent: tuple[int, ...]) -> Iterator[None]:
        """A micro-batch for which these ranks have no samples: layers that communicate do so without them.

        Collective, for these ranks, too; they take part in what a training forward begins with.
        """
        norms = None if self.runs_padding else self.copies.norms
        with nullcontext() if norms is None else norms.leaving_out(absent):
            if self.world.rank in absent and torch.is_grad_enabled():
                # no forward of theirs does it, or it does so behind the copy of their buffers that the loop puts back
                self.copies.forward_begins()
            yield

    @contextmanager
    def zero_weight(self) -> Iterator[list[Tensor]]:
        """Around a step on a padding batch: its gradients are dropped, its samples in no statistics.

        Gives:
            the module's buffers that a forward changes by this rank's samples alone.
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

    # -- when users look

    def steps_end(self) -> None:
        """Steps of an evaluation, or a forward, are over, and hooks that may look at the module come next."""

    # -- gradients

    @contextmanager
    def synchronize(self, sync: bool) -> Iterator[None]:
        """Switch the reduction of backwards on or off for the length of a ``with`` block."""
        before, self.sync_gradients = self.sync_gradients, sync
        try:
            yield
        finally:
            self.sync_gradients = before

    def set_requires_grad(self, parameter: Tensor, needed: bool) -> None:
        """Say whether a parameter of an optimizer needs gradients, from the forwards to come on."""
        parameter.requires_grad = needed

    def whole_gradients(self) -> AbstractContextManager[None]:
        """Inside, ``.grad`` of each parameter is its whole gradient, also where ranks have parts of it. Collective."""
        self.check_present("strategy.whole_gradients()")
        return self.gradients.whole()

    def window_state(self) -> dict[str, Any]:
        """Return this rank's state of an unfinished window, for a checkpoint: gradients and buffers. Collective."""
        return {**self.gradients.window_state(), "buffers": self.copies.window_state()}

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Restore the result of :meth:`window_state`. Collective."""
        self.gradients.load_window_state(saved)
        self.copies.load_window_state(saved.get("buffers", {}))

    def divide_gradients(self, weight: float | Tensor) -> float | Tensor:
        """Divide the window's gradients by the weights that all ranks' training steps returned; gives the factor."""
        local, own = self.copies.local_steps, self._on_device(weight)
        if local is not None:
            total, ranks = local.summed_weight(own)
        else:
            total = self.collectives.reduce(own, reduce_op="sum")
            # an engine that plays windows sees losses on one rank of each replica
            ranks = self.world.size if self.window is None else self.replicas.count
        factor = _part(ranks, total)
        multiply(self.gradients.local(stepped=True), factor)
        return factor

    def _on_device(self, weight: float | Tensor) -> Tensor:
        """A weight on this rank's device, for which nobody waits."""
        device, dtype = self.root_device, widest(self.root_device)
        if isinstance(weight, Tensor) and weight.device == device:
            return weight.detach().to(dtype)
        return torch.full((), float(weight), dtype=dtype, device=device)

    # -- memory

    def held(self) -> dict[str, list[Tensor]]:
        """What this rank holds, by kind as in `lockstep.memory.meter.KINDS`; may be asked for at any time."""
        parameters: list[Tensor] = [*self.module.parameters(), *beside(self.module, self.optimizers).values()]
        return {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer_states": list(tensors_in([optimizer.state for optimizer in self.optimizers])),
            "buffers": list(self.module.buffers()),
        }

    # -- Lightning's names: of the ranks

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self.collectives.world

    @property
    def absent(self) -> tuple[int, ...]:
        """While user code runs that ranks without samples for the micro-batch do not run: those ranks."""
        return self.collectives.absent

    @absent.setter
    def absent(self, ranks: tuple[int, ...]) -> None:
        self.collectives.absent = ranks

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.world.rank == 0

    @property
    def has_met(self) -> bool:
        """Return True once this rank has joined the others; before that a signal ends it at once."""
        return self.world_size == 1 or dist.is_initialized()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""
        return self.world.local_rank

    @property
    def node_rank(self) -> int:
        """This node."""
        return self.world.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world.num_nodes

    @property
    def precision_plugin(self) -> Precision:
        """The run's precision, by Lightning's name; the same as ``trainer.precision_plugin``."""
        return self.precision

    @property
    def model(self) -> LightningModule:
        """The user's module; lockstep wraps it in nothing."""
        return self.module

    @property
    def lightning_module(self) -> LightningModule:
        """The user's module."""
        return self.module

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Inside, backwards are not reduced: each rank adds up its own gradients, until one outside reduces them."""
        return self.synchronize(False)

    # -- Lightning's names: of the collectives, each overridable

    def make_agreement(self) -> ConsensusFlags:
        """The flags that this run's ranks share."""
        return self.collectives.make_agreement()

    def check_present(self, call: str, group: comm.Group = None) -> None:
        """Refuse a collective that user code calls where ranks without samples cannot join it."""
        self.collectives.check_present(call, group)

    def with_all_ranks(self) -> AbstractContextManager[None]:
        """Inside, collectives are allowed: the ranks without samples take part."""
        return self.collectives.with_all_ranks()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.collectives.barrier()

    def broadcast(self, obj: object, src: int = 0) -> Any:
        """The object of rank ``src``, on every rank."""
        return self.collectives.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: comm.Group = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: ``(world_size, *shape)``; on one process the tensor as it is."""
        return self.collectives.all_gather(tensor, group, sync_grads)

    def reduce(self, tensor: Tensor | float, group: comm.Group = None, reduce_op: object = "mean") -> Any:
        """The tensor reduced over all ranks by "mean", "sum", "min" or "max"; the given one is not changed."""
        return self.collectives.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decided for it, or (``all=False``) any of them."""
        return self.collectives.decide(decision, all)

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """A CPU vector of equal length from all ranks: ``(world_size, n)``."""
        return self.collectives.gather_stacked(vector)

    def gather_objects(self, obj: object) -> list[Any]:
        """A small picklable object from all ranks, by rank."""
        return self.collectives.gather_objects(obj)

    # -- Lightning's names: of checkpoints

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes, reads and removes checkpoints; set it before a call of the Trainer."""
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
        """Write a checkpoint: on rank 0, on the rank that calls ``alone``, or on all ranks, each its part."""
        if self.world.is_zero or alone or sharded:
            self.checkpoints.save(checkpoint, filepath, storage_options, sharded=sharded)

    def load_checkpoint(self, filepath: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, on every rank, to the CPU."""
        return self.checkpoints.load(filepath, weights_only)

    def remove_checkpoint(self, filepath: Path) -> None:
        """Delete a checkpoint, on rank 0."""
        if self.world.is_zero:
            self.checkpoints.remove(filepath)

    def state_dict(self) -> dict[str, Any]:
        """What the engine needs to go on with the same bits (the bucket plan)."""
        return self.save().own or {}


class SingleDeviceStrategy(Strategy):
    """Everything on one device.

    Args:
        device: the one that the run shall have, "cpu" or "cuda:0" say; None: the one that the Trainer's flags choose.
        accelerator: None; the Trainer's flag chooses it.
        checkpoint_io: what writes checkpoints.
        precision_plugin: the run's precision.
        activation_checkpointing: compute activations again in the backward, in place of keeping them: True (of the
            repeated blocks), or classes of layers.
        activation_checkpointing_policy: the same by classes or a policy function.
        activation_checkpointing_save: what is kept of such layers all the same: "matmuls", operators of torch, or a
            policy function of ``torch.utils.checkpoint``.

    Raises:
        MisconfigurationException: for arguments that do not go together; when a call begins, if the Trainer's flags
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
                f"SingleDeviceStrategy({offload_optimizer=}): the states stay beside their parameters; take "
                'strategy="fsdp_cpu_offload".'
            )
        self._recompute(activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        self._asked = None if device is None else torch.device(device)
        self.plugins = [plugin for plugin in (checkpoint_io, precision_plugin) if plugin is not None]

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """As the base does it, on the device that was asked for."""
        asked = self._asked
        if asked is not None and (asked.type != device.type or asked.index not in (None, device.index or 0)):
            place = f", devices=[{asked.index}]" if asked.index else ""
            raise MisconfigurationException(
                f"SingleDeviceStrategy(device={str(asked)!r}): the Trainer's flags choose {str(device)!r}: give "
                f"Trainer(accelerator={asked.type!r}{place}), or leave the strategy's device out."
            )
        super().connect(world, device, precision)


def _part(ranks: int, total: Tensor) -> float | Tensor:
    """The factor by which a sum over weights becomes a mean; on a device nobody waits for it."""
    if total.device.type == "cpu":
        weight = total.item()
        return ranks / weight if weight else 0.0
    return torch.where(total != 0, ranks / total, 0.0)
