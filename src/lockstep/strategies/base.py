"""How a run uses its devices: the seam between the loops and one process, many, or a sharding engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.checkpoint.io import CheckpointIO, TorchCheckpointIO
from lockstep.cluster.world import World
from lockstep.ground import comm
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.gradients import clip_by_value
from lockstep.parallel.late_parameters import beside
from lockstep.precision.base import Precision

# -- the seam ------------------------------------------------------------------------------------------------


class Strategy:
    """One process on one device, and the seam that others override.

    Order of calls, by the loops: :meth:`connect` (Trainer's constructor) → :meth:`setup_environment` →
    :meth:`setup_module` → :meth:`setup_optimizers` → per window :meth:`run`, :meth:`backward`, :meth:`clip`,
    :meth:`step` → :meth:`teardown`.

    Attributes:
        world: this process among the ranks.
        root_device: where the module and its batches go.
        launcher: how ranks are started: None (nothing to start), "script", "spawn" or "fork".
        sync_gradients: whether the next backward reduces over the ranks; the loops set it before each forward.
        rounds: reductions over all ranks so far.
        sync_batchnorm: whether BatchNorm takes its statistics over all ranks while training; Trainer sets it.
        drives_all_devices: one process works with all devices of its node; else each rank has one.
        devices: of this node, by local rank.
        absent: while user code runs that ranks without samples for the micro-batch do not run: those ranks.
        plugins: a cluster, a CheckpointIO or a precision that came with it; Trainer takes them as its own.
    """

    launcher: str | None = None
    drives_all_devices: bool = False

    def __init__(self) -> None:
        self.world = World.single()
        self.plugins: list[Any] = []
        self.root_device = torch.device("cpu")
        self.devices = [self.root_device]
        self.precision: Precision = Precision()
        self.module: Any = None
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.sync_gradients = True
        self.sync_batchnorm = False
        self.rounds = 0
        self.absent: tuple[int, ...] = ()
        self.context: Callable[[], Any] | None = None
        self._own_backward: Callable[..., Any] | None = None
        self._torch_io = TorchCheckpointIO()
        self._given_io: CheckpointIO | None = None
        self._io_is_open = False
        self._saved: set[str] = set()
        self.before_touching: Callable[[], Any] | None = None  # of checkpoints: raises if they are no longer this run's
        self.after_saving: Callable[[str], None] | None = None  # told of one that a fit can go on from

    # -- set up --------------------------------------------------------------------------------------------

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Take in where this process stands; nothing is started or allocated yet."""
        self.world, self.root_device, self.precision = world, device, precision
        self.context = precision.context

    def setup_environment(self) -> None:
        """Join the other ranks; afterwards collectives work."""
        if self.root_device.type == "cuda":
            torch.cuda.set_device(self.root_device)

    def setup_module(self, module: Any, own_backward: Callable[..., Any] | None) -> None:
        """Put the module on its device and in its precision; ``own_backward``: the module's override of backward."""
        self.module = self.precision.convert_module(module).to(self.root_device)
        self._own_backward = own_backward

    def setup_optimizers(self, optimizers: list[Any], configs: list[Any]) -> None:
        """Take over what ``configure_optimizers`` made; training begins after this."""
        self.optimizers, self.lr_scheduler_configs = optimizers, configs

    def make_agreement(self) -> ConsensusFlags:
        """The flags that this run's ranks share."""
        return ConsensusFlags(mode="alone")

    def change_optimizers(self) -> None:
        """Others have taken the place of the optimizers in the middle of a fit."""

    def teardown(self) -> None:
        """The run is over; ranks stay connected, and the optimizers can still be saved."""

    # -- one window ----------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The one door to the user's step methods: in the run's precision, through the engine's forward."""
        if self.context is None:
            return fn(*args)
        with self.context():
            return fn(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward of one micro-batch; where ``sync_gradients`` the gradients are reduced when it returns."""
        if self._own_backward is not None:
            self._own_backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def skip_forward(self) -> None:
        """Take part in what :meth:`run` does with the other ranks, where this one has no samples for a micro-batch."""

    def skip_backward(self, absent: bool = False) -> None:
        """Take part in the reduction of a micro-batch that has no loss on this rank.

        Args:
            absent: this rank has no samples for it, and no forward was run; else ``training_step`` gave no loss.
        """

    def check_gap(self, rank: int, loader: int) -> None:
        """Refuse a micro-batch of which a rank has samples, but none of one of its loaders, if the engine cannot."""

    @contextmanager
    def leaving_out(self, absent: tuple[int, ...]) -> Iterator[None]:
        """A micro-batch for which these ranks have no samples: layers that communicate do so without them.

        Collective, for these ranks, too.
        """
        yield

    def epoch_begins(self) -> None:
        """An epoch of training begins, or goes on after a resume; its first hooks have run. Collective."""

    def align_buffers(self) -> None:
        """Let every rank have rank 0's buffers (BatchNorm statistics, say), before the module is evaluated."""

    @contextmanager
    def one_model(self) -> Iterator[None]:
        """For an evaluation: let every rank have the model that a checkpoint holds, and afterwards its own again."""
        self.align_buffers()
        yield

    def end_training(self) -> None:
        """No step follows in this fit: leave every rank with the model that a checkpoint holds. Collective."""

    def named_parameters(self) -> dict[str, Any]:
        """The module's parameters by name, and those that the optimizers alone have (in a plain list, say)."""
        return {**dict(self.module.named_parameters()), **beside(self.module, self.optimizers)}

    def own_buffers(self) -> list[Tensor]:
        """The module's buffers that a forward changes by this rank's samples alone."""
        return list(self.module.buffers())

    @property
    def steps_apart(self) -> bool:
        """Whether some steps of this fit are made with the gradients of a part of the ranks (local steps)."""
        return False

    def averaged_ranks(self) -> Sequence[int]:
        """The ranks, this one among them, over which gradients are averaged in the next round."""
        return range(self.world.size)

    def set_zero_weight(self, zero_weight: bool) -> None:
        """Drop the gradients of the backwards to come: this rank's share of the data is empty."""

    @property
    def traffic(self) -> tuple[int, int]:
        """Reductions of gradients in this fit so far, and the bytes that this rank gave to them."""
        return 0, 0

    @contextmanager
    def synchronize(self, sync: bool) -> Iterator[None]:
        """Switch the reduction of backwards on or off for the length of a ``with`` block."""
        before, self.sync_gradients = self.sync_gradients, sync
        try:
            yield
        finally:
            self.sync_gradients = before

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, backwards are not reduced: each rank adds up its own gradients, until one outside reduces them."""
        with self.synchronize(False):
            yield

    def gradients_of(self, optimizer: Any) -> list[Tensor]:
        """The gradients with which this rank updates an optimizer's parameters; changed in place, they count."""
        return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]

    @contextmanager
    def whole_gradients(self) -> Iterator[None]:
        """Inside, ``.grad`` of each parameter is its whole gradient, also where ranks have parts of it. Collective."""
        yield

    def held_gradients(self) -> dict[str, Any]:
        """What backwards have left for steps to come, as a checkpoint takes it. Collective."""
        named = self.named_parameters()
        return {"gradients": {name: p.grad.detach().cpu().clone() for name, p in named.items() if p.grad is not None}}

    def hold_gradients(self, saved: dict[str, Any]) -> None:
        """Put back what :meth:`held_gradients` gave."""
        parameters = self.named_parameters()
        for name, gradient in saved.get("gradients", {}).items():
            parameters[name].grad = gradient.to(parameters[name].device)

    def divide_gradients(self, weight: float | Tensor) -> float:
        """Divide the window's gradients by the weights that all ranks' training steps returned; gives the factor."""
        total, size = self._total_weight(torch.as_tensor(weight, dtype=torch.float64, device=self.root_device))
        factor = size / total if total else 0.0
        grads = [grad for optimizer in self.optimizers for grad in self.gradients_of(optimizer)]
        if grads:
            torch._foreach_mul_(grads, factor)
        return factor

    def _total_weight(self, weight: Tensor) -> tuple[float, int]:
        """The sum of ``weight`` over the ranks whose gradients were averaged, and their number. Collective."""
        return self.reduce(weight, reduce_op="sum").item(), self.world.size

    def clip(self, optimizer: Any, value: float, algorithm: str) -> None:
        """Clip the whole (reduced) gradient of an optimizer's parameters by its 2-norm or by value."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, value)
        else:
            clip_by_value(parameters, value)

    def step(self, optimizer: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update the parameters of one optimizer."""
        scaler = self.precision.scaler
        if scaler is not None:
            result = closure() if closure is not None else None
            scaler.step(optimizer)
            scaler.update()
            return result
        if closure is None:
            return optimizer.step(**options)
        return optimizer.step(closure=closure, **options)

    # -- ranks ---------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.world.rank == 0

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
    def model(self) -> Any:
        """The user's module; lockstep wraps it in nothing."""
        return self.module

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self.module

    def check_present(self, call: str, group: Any = None) -> None:
        """Refuse a collective that user code calls where ranks without samples cannot join it.

        Args:
            call: what the user called.
            group: the ranks that it takes; None: all.

        Raises:
            MisconfigurationException: it would wait for a rank that does not run this code.
        """
        missing = [rank for rank in self.absent if group is None or rank in comm.ranks_of(group)]
        if missing:
            which = f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"
            raise MisconfigurationException(
                f"{call} was called for a micro-batch of which {which} no samples (the data set does not go round), "
                "so that this code does not run there and all would wait: call it in a hook that runs on every rank "
                "(`on_before_optimizer_step`, `on_train_epoch_end`), leave the last batch out "
                "(DataLoader(drop_last=True)), or have `self.log(..., sync_dist=True)` reduce the value."
            )

    @contextmanager
    def with_all_ranks(self) -> Iterator[None]:
        """Inside, collectives are allowed: the ranks without samples take part."""
        before, self.absent = self.absent, ()
        try:
            yield
        finally:
            self.absent = before

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``, on every rank."""
        return obj

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: ``(world_size, *shape)``; on one process the tensor as it is."""
        return tensor

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The tensor reduced over all ranks by "mean", "sum", "min" or "max"; the given one is not changed."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decided for it, or (``all=False``) any of them."""
        agreed = self.reduce(torch.tensor(bool(decision)).int(), reduce_op="min" if all else "max")
        return bool(agreed)

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """A CPU vector of equal length from all ranks: ``(world_size, n)``."""
        return vector.unsqueeze(0)

    def gather_objects(self, obj: Any) -> list[Any]:
        """A small picklable object from all ranks, by rank."""
        return [obj]

    # -- checkpoints ---------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What writes, reads and removes checkpoints; set it before a call of the Trainer."""
        return self._torch_io if self._given_io is None else self._given_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._given_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None, *, alone: bool = False
    ) -> None:
        """Write a checkpoint on rank 0, or (``alone``) on the rank that calls."""
        if self.is_global_zero or alone:
            self._io_is_open = True
            if self.before_touching is not None:
                self.before_touching()
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            if self._given_io is not None:
                self._saved.add(str(filepath))
            if self.after_saving is not None and "optimizer_states" in checkpoint:
                self.checkpoint_io.then(partial(self.after_saving, str(filepath)))

    def load_checkpoint(self, filepath: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint, on every rank, to the CPU."""
        self._io_is_open = True
        if weights_only is None:  # which a CheckpointIO of earlier years does not know
            return self.checkpoint_io.load_checkpoint(filepath, map_location="cpu")
        return self.checkpoint_io.load_checkpoint(filepath, map_location="cpu", weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint, on rank 0."""
        if self.is_global_zero:
            self._saved.discard(str(filepath))
            if self.before_touching is not None:
                self.before_touching()
            self.checkpoint_io.remove_checkpoint(filepath)

    def has_checkpoint(self, filepath: Any) -> bool:
        """Whether something has this name here, or a checkpoint is on its way there."""
        return str(filepath) in self._saved or storage.exists(filepath)

    def close_checkpoints(self) -> None:
        """Let :attr:`checkpoint_io` end what it has begun; nothing happens if it has begun nothing."""
        if self._io_is_open:
            self._io_is_open = False
            self.checkpoint_io.teardown()

    def optimizer_states(self, alone: bool) -> list[dict[str, Any]] | None:
        """The optimizers' states, on rank 0 at least; None where there are none to be had ``alone``. Collective."""
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def module_state(self, module: Any, alone: bool) -> dict[str, Any]:
        """The module's state dict as a checkpoint holds it. Collective, unless ``alone``."""
        state: dict[str, Any] = module.state_dict()
        return state

    def rank_states(self, alone: bool = False) -> list[Any]:
        """What each rank alone needs to go on with the same bits, by rank, on rank 0; empty if nothing.

        Collective, unless ``alone``: then it is of this rank, and its weights are those of the module.
        """
        return []

    def load_rank_states(self, states: list[Any]) -> None:
        """Take this rank's part of :meth:`rank_states`, perhaps of another number of ranks, before the first window."""

    def state_dict(self) -> dict[str, Any]:
        """What the engine needs to go on with the same bits (the bucket plan).

        And the values of parameters that no module has, so that they are in no state dict of one.
        """
        others = beside(self.module, self.optimizers)
        return {"other parameters": {name: p.detach().cpu().clone() for name, p in others.items()}} if others else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over :meth:`state_dict`, before the first window."""
        others = beside(self.module, self.optimizers)
        with torch.no_grad():
            for name, value in state.get("other parameters", {}).items():
                if name in others:
                    others[name].copy_(value)


# -- one process ---------------------------------------------------------------------------------------------


class SingleDeviceStrategy(Strategy):
    """Everything on one device; the base class does it all."""
