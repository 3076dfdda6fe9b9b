"""Data parallel over processes: every rank holds the module, gradients are averaged while backward runs."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.agreement import Agreement
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.fork import protect_forks
from lockstep.parallel.ddp import broadcast_module_state, check_same_module, sync_buffers
from lockstep.parallel.reducer import Reducer
from lockstep.strategies.base import Strategy
from lockstep.strategies.norms import SynchronizedNorms

NO_LOSS = (
    "`training_step` returned None on rank {rank}. Where BatchNorm is synchronized (sync_batchnorm=True), "
    "all ranks go back through it together, and the others would wait for this one. Return a loss on each, if only "
    "`0.0 * loss`."
)


class DDPStrategy(Strategy):
    """One process per device, over lockstep's own reducer, which is attached to the module's parameters.

    Args:
        process_group_backend: "gloo" or "nccl"; default: nccl on CUDA devices, gloo elsewhere.
        timeout: how long a collective waits for the other ranks.
        start_method: "popen" (this script once per rank) or "spawn" (the call, in fresh processes).
        bucket_cap_mb: size of a gradient bucket, in MiB.
        broadcast_buffers: take rank 0's buffers (BatchNorm statistics, say) before the forward of each window.
        gradient_as_bucket_view: let ``.grad`` be views of the buckets, which saves a copy of the gradients.
        find_unused_parameters: accepted; unused parameters need no flag here.
    """

    def __init__(
        self,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        start_method: str = "popen",
        *,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        super().__init__()
        if start_method not in ("popen", "spawn"):
            raise MisconfigurationException(
                f'DDPStrategy(start_method={start_method!r}): choose "popen" (this script once per rank) or "spawn".'
            )
        self.launcher = "script" if start_method == "popen" else "spawn"
        self._backend = process_group_backend
        self._timeout = timeout
        self._bucket_cap_mb = bucket_cap_mb
        self._broadcast_buffers = broadcast_buffers
        self._views = gradient_as_bucket_view
        self._reducer: Reducer | None = None
        self._plan: Any = None
        self._has_buffers = self._buffers_differ = False
        self._muted = False
        self._norms: SynchronizedNorms | None = None
        self._norms_group: tuple[Any, Any] | None = None  # the default group, and that of the layers

    def setup_environment(self) -> None:
        """Join the process group, making it where it is not there."""
        super().setup_environment()
        protect_forks()
        world = self.world
        if not dist.is_initialized():
            self._make_group()
        if dist.get_world_size() != world.size:
            raise MisconfigurationException(
                f"A process group of {dist.get_world_size()} ranks is there already, and this run has {world.size}: "
                "give Trainer `devices` and `num_nodes` to match, or let lockstep make the group."
            )

    def _make_group(self) -> None:
        # The functions of this module have the default group for a default argument, taken when it is imported (torch's
        # optimizers do so). Imported after the group is made they would hold it beyond its destruction, with gloo's
        # threads running into the end of the interpreter, which aborts one process in five.
        import torch.distributed.nn.functional  # noqa: F401

        world = self.world
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        meeting: dict[str, Any] = {"init_method": f"tcp://{world.address}:{world.port}"}
        if world.size == 1:  # nobody to meet, so no port is needed
            meeting = {"store": dist.HashStore()}
        device = self.root_device if backend == "nccl" else None
        dist.init_process_group(
            backend, rank=world.rank, world_size=world.size, timeout=self._timeout, device_id=device, **meeting
        )
        atexit.register(_leave_group)
        # a rank that fails before the others have connected to it would break their connecting, which hides its error
        comm.barrier()

    def setup_module(self, module: Any, own_backward: Callable[..., Any] | None) -> None:
        """As on one process, then rank 0's weights and buffers everywhere."""
        super().setup_module(module, own_backward)
        check_same_module(module, None)
        broadcast_module_state(module, None)
        self._has_buffers = self._broadcast_buffers and self.world.size > 1 and any(True for _ in module.buffers())

    def setup_optimizers(self, optimizers: list[Any], configs: list[Any]) -> None:
        """Attach the reducer to the parameters, and synchronize BatchNorm where asked to."""
        super().setup_optimizers(optimizers, configs)
        self._synchronize_norms()
        self._reducer = Reducer(
            self.module.named_parameters(),  # frozen ones too: those that are thawed later are taken in then
            bucket_cap_mb=self._bucket_cap_mb,
            gradient_as_bucket_view=self._views,
            plan=self._plan,
        )

    def _synchronize_norms(self) -> None:
        if self.world.size == 1:
            return
        default, group = self._norms_group or (None, None)
        known = group if default is dist.group.WORLD else None
        norms = SynchronizedNorms(self.module, self.sync_batchnorm, known, self._timeout)
        self._norms_group = dist.group.WORLD, norms.group
        if norms.layers:
            self._norms = norms
            self._has_buffers = self._has_buffers and bool(self.own_buffers())

    def make_agreement(self) -> Agreement:
        """Shared flags: a word in shared memory on one host, an asynchronous message across hosts."""
        return Agreement()

    def teardown(self) -> None:
        """Detach the reducer from the parameters; the process group stays for the next call."""
        super().teardown()
        if self._norms is not None:
            self._norms.put_back()
            self._norms = None
        if self._reducer is not None:
            self._plan = self._reducer.plan()
            self._reducer.detach()
            self._reducer = None

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """As on one process, with rank 0's buffers taken before the first training forward of a window."""
        if self._buffers_differ and torch.is_grad_enabled():
            self.align_buffers()
        if self.context is None:
            return fn(*args)
        with self.context():
            return fn(*args)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward with the buckets reduced as they fill, while it still runs."""
        reducer = self._reducer
        assert reducer is not None
        reducer.sync, reducer.muted = self.sync_gradients, self._muted
        reducer.prepare()
        if self._own_backward is not None:
            self._own_backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)
        reducer.finish()
        self.rounds = reducer.rounds
        self._buffers_differ = self._has_buffers and self.sync_gradients

    def skip_backward(self) -> None:
        """Reduce what this rank accumulated before in the window."""
        assert self._reducer is not None
        if self._norms is not None:
            raise MisconfigurationException(NO_LOSS.format(rank=self.world.rank))
        if self.sync_gradients:
            self._reducer.sync = True
            self._reducer.prepare()
            self._reducer.finish()
            self.rounds = self._reducer.rounds
            self._buffers_differ = self._has_buffers

    def align_buffers(self) -> None:
        """Take rank 0's buffers, where a training forward has changed them since the last time."""
        if self._buffers_differ:
            sync_buffers(self.module, None)
            self._buffers_differ = False

    def mute(self, muted: bool) -> None:
        """Let the reducer drop this rank's fresh gradients, and synchronized layers its samples."""
        self._muted = muted
        if self._norms is not None:
            self._norms.mute(muted)

    def own_buffers(self) -> list[Tensor]:
        """All but the statistics of synchronized layers, which all ranks change alike."""
        return super().own_buffers() if self._norms is None else self._norms.others_buffers(self.module)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        comm.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of rank ``src``, on every rank."""
        return comm.broadcast_object(obj, src)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked: ``(world_size, *shape)``; on one process the tensor as it is."""
        if self.world.size == 1:
            return tensor
        return (comm.all_gather_with_grad if sync_grads else comm.all_gather_tensor)(tensor, group)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """The tensor reduced over all ranks; the given one is not changed."""
        value = torch.as_tensor(tensor, device=self.root_device)
        return comm.all_reduce(value, reduce_op, group)  # type: ignore[arg-type]  # checked there

    def gather_stacked(self, vector: Tensor) -> Tensor:
        """A CPU vector of equal length from all ranks: ``(world_size, n)``."""
        return comm.all_gather_tensor(vector.to(self.root_device)).cpu()

    def gather_objects(self, obj: Any) -> list[Any]:
        """A small picklable object from all ranks, by rank."""
        return comm.all_gather_object(obj)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_norms_group": None}  # a group belongs to its process

    def state_dict(self) -> dict[str, Any]:
        """The bucket plan: sums over three and more ranks depend on it."""
        plan = self._plan if self._reducer is None else self._reducer.plan()
        return {} if plan is None else {"plan": plan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lay the buckets out as the checkpointed run had them."""
        self._plan = state.get("plan")
        if self._reducer is not None and self._plan is not None:
            self._reducer.replan(self._plan)


def _leave_group() -> None:
    if dist.is_initialized():
        # gloo's threads need the interpreter's lock to let go of the last collective's tensors; destroying the group
        # waits for them and holds it, so they get a moment first
        time.sleep(0.1)
        dist.destroy_process_group()
