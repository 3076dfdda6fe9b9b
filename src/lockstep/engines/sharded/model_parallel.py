"""Tensor parallelism combined with data parallelism, for modules that split their layers in ``configure_model``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from lockstep.checkpoint.io import CheckpointIO
from lockstep.cluster.world import World
from lockstep.engines.collectives import ReplicaMap
from lockstep.engines.ranks import HALF_AN_HOUR
from lockstep.engines.sharded.fsdp import FSDPStrategy
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import is_split
from lockstep.ground.rank import does
from lockstep.ground.seed import random_states_of, set_random_states_of
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""Names of the mesh dimensions, as in Lightning."""

SIZES = (
    "ModelParallelStrategy(data_parallel_size={data!r}, tensor_parallel_size={tensor!r}) does not fit the run's "
    '{world} ranks, {local} on each node. Pass two sizes with the product {world}, or "auto" for one of them.'
)
NO_PLAN = (
    "ModelParallelStrategy: {module} has no `configure_model`. Split its layers there: "
    'parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan), and fully_shard(self.net, '
    'mesh=self.device_mesh["data_parallel"]).'
)
NOTHING_SPLIT = (
    "ModelParallelStrategy: after `configure_model`, each of the {world} ranks still has all of {module}. Split its "
    'layers there with parallelize_module or fully_shard, or use strategy="ddp".'
)
TOO_SMALL = (
    "`configure_model` splits {name!r} along dimension {dim}, which has size {size}, over {ranks} ranks. Some ranks "
    "have no elements of it, which `fully_shard` does not support. Split it along another dimension (RowwiseParallel "
    "instead of ColwiseParallel), or omit that layer from `parallelize_module`."
)
NOT_REDUCED = (
    "ModelParallelStrategy: {name!r} is split over the tensor_parallel ranks, but its gradient is not reduced over the "
    "{data} data_parallel ranks. After parallelize_module, call fully_shard on a layer that contains it, with "
    'mesh=self.device_mesh["data_parallel"].'
)
SPLIT_ALREADY = (
    "ModelParallelStrategy: an earlier call of the Trainer has already split {module}, and `configure_model` runs at "
    "the start of each call. Return from it if isinstance(parameter, DTensor). torch's error: {error}"
)


class ModelParallelStrategy(FSDPStrategy):
    """Strategy with a 2-D mesh of ranks: the ranks in a row split one model, and each row gets its own samples.

    The module's ``configure_model`` splits it by torch's own functions: ``parallelize_module`` with plans over
    ``self.device_mesh["tensor_parallel"]``, and ``fully_shard`` over ``self.device_mesh["data_parallel"]``. Parameters
    that are not split are replicated, and their gradients are averaged over the rows. The results are those of
    one process. CPUs are supported (gloo).

    Before ``configure_model`` all ranks get rank 0's weights, and inside it they draw rank 0's random numbers. Layers
    that it leaves on the meta device get the values of their ``reset_parameters``. From then on the ranks of a row draw
    the same random numbers.

    Args:
        data_parallel_size: number of rows; "auto": the number of nodes, or world size / ``tensor_parallel_size``.
        tensor_parallel_size: ranks per row; "auto": the ranks per node, or world size / ``data_parallel_size``.
        save_distributed_checkpoint: True: a checkpoint is a folder, to which each rank writes its part; any strategy
            reads it. False: it is one file, gathered by rank 0.
        process_group_backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; default: the last on CUDA, gloo on CPUs.
        timeout: time that a collective waits for the other ranks, a ``datetime.timedelta``; None: 30 minutes.
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        async_save: ranks copy their parts and continue training, while a thread of each writes them.
        nccl: NCCL's variables, as in ``DDPStrategy``.
        start_method: as in ``DDPStrategy``; "spawn" and "fork" return the module unsharded.

    Raises:
        MisconfigurationException: at the start of a run, if the sizes do not fit the ranks, or the module splits
            nothing.

    Example::

        class Wide(LightningModule):
            def configure_model(self):
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        Trainer(devices=4, strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)).fit(Wide())
    """

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int | str = "auto",
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        *,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        async_save: bool = False,
        nccl: Mapping[str, Any] | None = None,
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            state_dict_type="sharded" if save_distributed_checkpoint else "full",
            async_save=async_save,
            nccl=nccl,
            start_method=start_method,
        )
        for name, size in (("data_parallel_size", data_parallel_size), ("tensor_parallel_size", tensor_parallel_size)):
            if size != "auto" and (isinstance(size, (bool, str)) or size < 1):
                raise MisconfigurationException(
                    f'ModelParallelStrategy({name}={size!r:.100}) must be a number of ranks above 0, or "auto".'
                )
        self._given_sizes = (data_parallel_size, tensor_parallel_size)
        self._mesh_of_both: DeviceMesh | None = None

    # -- set up

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Store world, device and precision. Treat the ranks in a row of the mesh as one replica with the same samples.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.

        Raises:
            MisconfigurationException: the sizes do not make up the number of ranks.
        """
        super().connect(world, device, precision)
        data, tensor = self._sizes(world)
        of_rank = tuple(rank // tensor for rank in range(world.size))
        self.replicas = ReplicaMap(of_rank[world.rank], data, of_rank)

    def _sizes(self, world: World) -> tuple[int, int]:
        data, tensor = self._given_sizes
        if data == "auto":
            data = world.num_nodes if tensor == "auto" else world.size // int(tensor)
        if tensor == "auto":
            tensor = world.size // int(data)
        if int(data) * int(tensor) != world.size:
            of_data, of_tensor = self._given_sizes
            raise MisconfigurationException(
                SIZES.format(data=of_data, tensor=of_tensor, world=world.size, local=world.local_size)
            )
        return int(data), int(tensor)

    def setup_environment(self) -> None:
        """Connect this rank to the others, and create the mesh."""
        from torch.distributed.device_mesh import init_device_mesh

        super().setup_environment()
        if self._mesh_of_both is None:
            sizes = self._sizes(self.world)
            self._mesh_of_both = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=(DATA, TENSOR))

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh with the dimensions "data_parallel" and "tensor_parallel"; the module has it as ``self.device_mesh``.

        Raises:
            MisconfigurationException: the ranks are not connected yet.
        """
        if self._mesh_of_both is None:
            raise MisconfigurationException(
                "device_mesh does not exist before the ranks are connected. Use it in `configure_model`."
            )
        return self._mesh_of_both

    @contextmanager
    def building(self, module: LightningModule) -> Iterator[None]:
        """Make all ranks split rank 0's weights when ``configure_model`` runs in the ``with`` block. Collective.

        Raises:
            MisconfigurationException: the module has no ``configure_model``, or is already split; or the precision is
                "fp8-mixed".
            ValueError: on every rank, the ranks' modules differ.
        """
        from torch.distributed.tensor import DTensor

        from lockstep.checkpoint.first_values import fill, leave_meta
        from lockstep.engines.ddp.consistency import check_same_module
        from lockstep.engines.sharded.sharded_init import rank_0_draws

        if type(module).configure_model is LightningModule.configure_model:
            raise MisconfigurationException(NO_PLAN.format(module=type(module).__name__))
        if self.precision.name == "fp8-mixed":
            raise MisconfigurationException(
                "ModelParallelStrategy does not support precision='fp8-mixed', because torchao's float8 layers "
                "can only be split with torchao's own plans. Use precision='bf16-mixed', or strategy=\"fsdp\"."
            )
        self._refuse_parts(module, "fsdp")
        self.precision.convert_module(module)
        check_same_module(module)
        tensors = chain(module.parameters(), module.buffers())
        comm.broadcast_tensors([t.detach() for t in tensors if not t.is_meta and not isinstance(t, DTensor)], 0, None)
        was_split = is_split(module)
        with rank_0_draws(self.own_devices):
            try:
                yield
                leave_meta(module, self.root_device)
            except (RuntimeError, ValueError, AssertionError) as error:
                if not was_split:
                    raise
                # torch's error for a module that is already split does not name the cause
                text = SPLIT_ALREADY.format(module=type(module).__name__, error=error)
                raise MisconfigurationException(text) from error
        fill(module, self.root_device)

    @does("splitting the module")
    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Check how ``configure_model`` has split the module, and move unsplit parameters to the device. Collective.

        Raises:
            MisconfigurationException: a split parameter is not reduced over the rows, a dimension is smaller than the
                number of ranks that share it, or nothing is split.
        """
        from torch.distributed.tensor import DTensor, Shard

        from lockstep.engines.sharded.fully_shard import ShardedModule

        self.module, self._own_backward = module, own_backward
        self._begin_recomputation()
        self._place(module)
        shards = ShardedModule(module)
        by_torch, ranks = shards.reduced_by_torch, self.device_mesh[TENSOR].size()
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in by_torch:
                if self.replicas.count > 1:
                    raise MisconfigurationException(NOT_REDUCED.format(name=name, data=self.replicas.count))
                continue
            # `fully_shard` cannot shard a parameter that tensor parallelism leaves empty on a rank
            names = parameter.device_mesh.mesh_dim_names or ()
            place = parameter.placements[names.index(TENSOR)] if TENSOR in names else None
            if isinstance(place, Shard) and parameter.shape[place.dim] < ranks:
                size = parameter.shape[place.dim]
                raise MisconfigurationException(TOO_SMALL.format(name=name, dim=place.dim, size=size, ranks=ranks))
        self._take_shards(shards)

    def _place(self, module: LightningModule) -> None:
        from torch.distributed.tensor import DTensor

        tensors = [t for t in chain(module.parameters(), module.buffers()) if not isinstance(t, DTensor)]
        if self.world.size > 1 and not any(isinstance(p, DTensor) for p in module.parameters()):
            raise MisconfigurationException(NOTHING_SPLIT.format(world=self.world.size, module=type(module).__name__))
        for tensor in tensors:
            tensor.data = tensor.data.to(self.root_device)
        comm.broadcast_tensors([tensor.detach() for tensor in tensors], 0, None)
        if self.members is not None:
            of_first = comm.broadcast_object(random_states_of(self.own_devices), 0, self.members)
            set_random_states_of(of_first, self.own_devices)

    def _autocast_dtype(self) -> None:
        """Return None, because the user's own calls of ``fully_shard`` decide the dtypes."""
