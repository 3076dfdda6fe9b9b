"""Fully sharded data parallel training, where each rank has a shard of parameters, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint.io import CheckpointIO
from lockstep.checkpoint.sharded import Place
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.engine import EngineState, Gradients
from lockstep.engines.owners import needs_whole, with_parameters
from lockstep.engines.ranks import HALF_AN_HOUR
from lockstep.engines.sharded.strategy import ShardedStrategy, bring_states, generate_together
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.optimizers import CombinedOptimizer, by_parts
from lockstep.ground.parameters import clip_by_value, loads_by_name, local_part
from lockstep.ground.rank import does
from lockstep.ground.torch_support import FSDP, refuse_without
from lockstep.ground.transfer import has_pinned_memory
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.blocks import Policy, blocks_by, find_blocks
from lockstep.memory.recompute import Layers, Save
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.engines.sharded.fully_shard import ShardedModule
    from lockstep.engines.sharded.whole_updates import WholeUpdates

OUTSIDE_OF_AUTOCAST = (
    "A layer failed: {error}. With precision={precision!r}, FSDP gathers weights of linear layers and convolutions in "
    "{dtype}, which layers under torch.autocast(enabled=False) do not support. To gather float32, use "
    "FSDPStrategy(mixed_precision=torch.distributed.fsdp.MixedPrecisionPolicy())."
)
NAMES = {torch.bfloat16: "BFloat16", torch.float16: "Half"}
"""Names of dtypes in torch's error messages."""

NO_EFFECT = {
    "limit_all_gathers": "torch's FSDP2 always limits the memory of all-gathers",
    "use_orig_params": "parameters always keep their names and shapes",
    "sync_module_states": "all ranks always start with rank 0's weights",
    "forward_prefetch": "torch's FSDP2 always gathers the next block in advance",
}
"""Arguments of torch's first FSDP without effect in FSDPStrategy -> the reason."""

MODES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class FSDPStrategy(ShardedStrategy):
    """Strategy that shards every parameter over the ranks with ``fully_shard`` (FSDP2), with one process per device.

    A block's parameters are gathered for its forward and its backward, and freed after each. Gradients are averaged
    and sharded by reduce-scatter. Optimizers update shards. The results are those of one process. CPUs are supported
    (gloo).

    The arguments are those of Lightning's strategy and of torch's first FSDP, with the same names.

    Args:
        accelerator, parallel_devices: must be None; choose devices with ``Trainer(accelerator=..., devices=...)``.
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        process_group_backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; default: the last on CUDA, gloo on CPUs.
        timeout: time that a collective waits for the other ranks, a ``datetime.timedelta``; None: 30 minutes.
        cpu_offload: keep shards, their gradients and optimizer states on the CPU: True, or torch's ``CPUOffload``
            or ``CPUOffloadPolicy``.
        mixed_precision: a dtype, torch's ``MixedPrecision`` or ``MixedPrecisionPolicy``: layers compute in it, their
            inputs are cast, and gradients are reduced in float32 unless the policy differs. None:
            ``Trainer(precision=...)`` alone decides; parameters that its autocast would cast are gathered in that
            dtype.
        auto_wrap_policy: the layers that are gathered separately: classes, or a policy function of torch's; None:
            repeated blocks are found.
        activation_checkpointing: recompute activations in the backward: True (in the layers above), or classes.
        activation_checkpointing_policy: classes or a policy function that select the layers to recompute.
        activation_checkpointing_save: activations of these layers to keep instead of recomputing them: "matmuls",
            torch operators, or a policy function of ``torch.utils.checkpoint``.
        sharding_strategy: "FULL_SHARD"; "SHARD_GRAD_OP" keeps parameters gathered from forward to backward; "NO_SHARD"
            is ``DDPStrategy``; "HYBRID_SHARD" shards within a node and replicates over nodes. Or torch's enum.
        state_dict_type: "full": a checkpoint is one file, as with any strategy, gathered by rank 0. "sharded": a folder
            to which each rank writes its part. Any strategy on any number of ranks reads either.
        device_mesh: for "HYBRID_SHARD": (replicas, ranks of a replica), or a mesh of two dimensions.
        accumulate_shards: reduce after each backward, and accumulate shards. False: each rank accumulates unsharded
            gradients, separate from ``.grad``, and reduces them once at the end of an accumulation window.
        async_save: with "sharded": ranks copy their parts and continue training, while a thread of each writes them.
        ignored_modules: modules whose parameters are not sharded.
        backward_prefetch: "BACKWARD_PRE", which is what FSDP2 does.
        nccl: NCCL's variables, as in ``DDPStrategy``.
        start_method: as in ``DDPStrategy``; "spawn" and "fork" return the module unsharded. In a notebook
            ``strategy="fsdp"`` spawns.
        **others: further arguments of torch's first FSDP, accepted if they have no effect.

    Raises:
        MisconfigurationException: an argument is unsupported or unknown.

    Example::

        Trainer(devices=8, strategy=FSDPStrategy(auto_wrap_policy={TransformerBlock}, state_dict_type="sharded"))
    """

    cuts_parameters = True
    gathers_updates = True
    engine = "FSDP"

    def __init__(
        self,
        accelerator: object = None,
        parallel_devices: object = None,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        cpu_offload: object = None,
        mixed_precision: object = None,
        auto_wrap_policy: Policy | None = None,
        activation_checkpointing: Layers | Literal[False] | None = None,
        activation_checkpointing_policy: Policy | None = None,
        sharding_strategy: object = "FULL_SHARD",
        state_dict_type: str = "full",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        *,
        accumulate_shards: bool = True,
        async_save: bool = False,
        ignored_modules: Iterable[nn.Module] | None = None,
        backward_prefetch: object = "BACKWARD_PRE",
        nccl: Mapping[str, Any] | None = None,
        activation_checkpointing_save: Save = None,
        start_method: str = "popen",
        **others: object,
    ) -> None:
        super().__init__(
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout, start_method, nccl
        )
        others = {"accelerator": accelerator, "parallel_devices": parallel_devices, **others}
        self._take_others(FSDPStrategy, others, NO_EFFECT)
        self._mode = _name_of("sharding_strategy", sharding_strategy, MODES)
        if self._mode != "NO_SHARD":
            refuse_without(FSDP, type(self).__name__, "use DDPStrategy(shard_optimizer=True)")
        _name_of("backward_prefetch", backward_prefetch, ("BACKWARD_PRE", "NONE"))
        self._save_by(_name_of("state_dict_type", state_dict_type, ("FULL", "SHARDED")), async_save)
        if device_mesh is not None and "HYBRID" not in self._mode:
            raise MisconfigurationException(
                f"FSDPStrategy(device_mesh=..., sharding_strategy={self._mode!r}): device_mesh needs "
                'sharding_strategy="HYBRID_SHARD", which replicates shards.'
            )
        self._given_mesh = device_mesh
        self._offloads = self.keeps_parameters_on_cpu = _is_on("cpu_offload", cpu_offload, "offload_params")
        self._mixed = mixed_precision
        if mixed_precision is not None:
            _mixed_policy(mixed_precision)  # raises for unsupported values
        self._policy = auto_wrap_policy
        layers = auto_wrap_policy if activation_checkpointing is True and auto_wrap_policy else activation_checkpointing
        self._recompute(layers, activation_checkpointing_policy, activation_checkpointing_save)
        self._accumulates_shards = _is_on("accumulate_shards", accumulate_shards, "")
        self._ignored = list(ignored_modules or ())
        self._sharded: ShardedModule | None = None
        self._reducer: Reducer | None = None
        self._whole: WholeUpdates | None = None
        self._ends_calls: Callable[[], None] | None = None
        self._frees: list[Any] = []
        if self._mode == "NO_SHARD":
            if self._offloads:
                raise MisconfigurationException(
                    'FSDPStrategy(cpu_offload=True, sharding_strategy="NO_SHARD"): only shards can be offloaded. Use '
                    "a different sharding_strategy, or omit cpu_offload."
                )
            self.instead = unsharded = DDPStrategy(process_group_backend=self._backend, timeout=self._timeout)
            unsharded.launcher, unsharded.plugins = self.launcher, self.plugins
            unsharded._nccl, unsharded._recomputation = self._nccl, self._recomputation

    def _save_by(self, state_dict_type: str, async_save: bool) -> None:
        """Choose how checkpoints are written, from ``state_dict_type`` and ``async_save``."""
        if state_dict_type == "FULL":
            if async_save:
                raise MisconfigurationException(
                    'FSDPStrategy(async_save=True) needs state_dict_type="sharded". To write one file in the '
                    "background, use Trainer(plugins=[AsyncCheckpointIO()])."
                )
            return
        if self._mode == "NO_SHARD":
            raise MisconfigurationException(
                'FSDPStrategy(state_dict_type="sharded", sharding_strategy="NO_SHARD"): each rank has the full model, '
                'so use state_dict_type="full".'
            )
        self._save_in_parts(async_save)

    # -- set up

    @does("sharding the module")
    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Shard rank 0's weights over the ranks, unless the module is already sharded. Collective.

        Raises:
            MisconfigurationException: the module cannot be sharded: it has lazy layers, another engine has left it
                partitioned, or ``auto_wrap_policy`` selects no layer.
        """
        from lockstep.engines.sharded.fully_shard import ShardedModule, is_sharded

        self._refuse_parts(module, "fsdp")
        self.module, self._own_backward = module, own_backward
        # a later call of the Trainer gets the module in shards
        if not is_sharded(module):
            self.precision.convert_module(module)
            self._shard(module)
        self._begin_recomputation()
        self._built = None
        self._take_shards(ShardedModule(module))

    def _take_shards(self, shards: ShardedModule) -> None:
        from lockstep.engines.sharded.gathered_parameter import GatheredParameter

        bring_states(self.module, self.root_device)
        self._sharded, self.gradients = shards, ShardedGradients(self, shards)
        # a hang is found by what ranks wait in; on the CPU all waits are in torch's collectives
        if self.root_device.type != "cpu":
            waits = ("wait_for_unshard", "finalize_backward")  # for gathered parameters
            self.waits_in = [(group, name) for group in shards.groups() for name in waits]
        self._ends_calls = shards.serve_calls(within=not self.module.automatic_optimization)
        generate_together(self.module)
        self._watch(self.module, GatheredParameter)

    def _shard(self, module: LightningModule) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        from lockstep.checkpoint.first_values import fill
        from lockstep.engines.sharded.fully_shard import (
            compute_in_own_dtype,
            find_norms,
            find_odd,
            refuse_unmanaged,
            shard,
            with_memory,
        )

        refuse_unmanaged(module)

        if self._offloads and not comm.backend_of(None, "cpu"):
            raise MisconfigurationException(
                f"FSDPStrategy(cpu_offload=True) keeps shards on the CPU, but the process group "
                f"({dist.get_backend_config()}) does not support CPU tensors. Omit process_group_backend, or create "
                'the group with init_process_group("cpu:gloo,cuda:nccl").'
            )
        with _named("auto_wrap_policy", self._policy):
            blocks = find_blocks(module) if self._policy is None else blocks_by(self._policy, module)
        policy = _mixed_policy(self._mixed)
        norms = find_norms(module) if policy.param_dtype is not None else []
        for norm in norms:
            compute_in_own_dtype(norm)
        stays_whole = {p for layer in (*self._ignored, *norms) for p in layer.parameters()} | set(
            find_odd(module, blocks)
        )
        whole = [parameter for parameter in module.parameters() if parameter in stays_whole]
        gather: Callable[[Iterable[Tensor]], object] = list if self._built is None else self._built.gather
        made = with_memory(whole)
        gather(made)
        for parameter in made:
            parameter.data = parameter.data.to(self.root_device)
        comm.broadcast_tensors([parameter.data for parameter in made], 0, None)
        pins = has_pinned_memory(self.root_device.type)
        shard(
            module,
            blocks,
            mesh=self._mesh(),
            device=self.root_device,
            whole=set(whole),
            reshard_after_forward=self._mode in ("FULL_SHARD", "HYBRID_SHARD"),
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=pins) if self._offloads else OffloadPolicy(),
            gather=gather,
            autocast_dtype=self._autocast_dtype(),
        )
        fill(module, self.root_device, torch.device("cpu") if self._offloads else None)

    def _mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        kind, world, mesh = self.root_device.type, self.world, self._given_mesh
        if "HYBRID" not in self._mode:
            return init_device_mesh(kind, (world.size,))
        if mesh is None:
            mesh = (world.num_nodes, world.size // world.num_nodes)
        shape: tuple[int, ...] = tuple(mesh) if isinstance(mesh, (tuple, list)) else tuple(mesh.shape)
        if len(shape) != 2 or shape[0] * shape[1] != world.size:
            raise MisconfigurationException(
                f"FSDPStrategy(device_mesh={shape}) does not fit the run's {world.size} ranks. Pass (replicas, ranks "
                f"per replica) with the product {world.size}."
            )
        if not isinstance(mesh, (tuple, list)):
            return mesh
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Check that the optimizers can update shards, and create a reducer for unsharded parameters' gradients."""
        from lockstep.engines.sharded.fully_shard import unscale

        super().setup_optimizers(optimizers, configs)
        assert self._sharded is not None
        need_whole = [optimizer for optimizer in with_parameters(optimizers) if needs_whole(optimizer)]
        self._whole = None
        if need_whole:  # each whole parameter is updated on one rank
            from lockstep.engines.sharded.whole_updates import WholeUpdates

            self._whole = WholeUpdates(need_whole)
        for optimizer in optimizers:
            self._forget_with(optimizer, self._sharded)
            self._frees.append(optimizer.register_step_pre_hook(self._free))
        self.copies.synchronize_norms(self.module, self.sync_batchnorm, self._timeout, self.replicas)
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_gradients = unscale
        # the gradients of these are not reduced by `fully_shard`
        whole = [(n, p) for n, p in self.named_parameters().items() if n not in self._sharded.parameters]
        self._reducer = Reducer(whole, self.peers, shared_memory=False) if whole and self.replicas.count > 1 else None

    @staticmethod
    def _forget_with(optimizer: Optimizer, shards: ShardedModule) -> None:
        """Make the optimizer's ``zero_grad`` also drop unsharded gradients that are not reduced yet."""
        own = type(optimizer).zero_grad

        @wraps(own)
        def zero_grad(set_to_none: bool = True) -> None:
            own(optimizer, set_to_none)
            shards.forget(p for group in optimizer.param_groups for p in group["params"])

        vars(optimizer)["zero_grad"] = zero_grad

    def _free(self, *_: object) -> None:
        """Free parameters that a forward in a hook or after a backward has gathered, before the copies become stale."""
        assert self._sharded is not None
        self._sharded.free()

    def teardown(self) -> None:
        """Free gathered parameters. The module remains sharded."""
        super().teardown()
        if self.precision.scaler is not None:
            self.precision.scaler.unscale_gradients = None
        for handle in self._frees:
            handle.remove()
        self._frees = []
        if self._ends_calls is not None:
            self._ends_calls()
            self._ends_calls = None
        if self._reducer is not None:
            self._reducer.detach()
            self._reducer = None
        if self._sharded is not None:
            self._sharded.reshard()

    # -- one window

    def _through(self, fn: Callable[..., Any], *args: object) -> Any:
        assert self._sharded is not None
        try:
            return self._sharded.run(fn, *args)
        except RuntimeError as error:
            low = self._autocast_dtype()
            if low is None or NAMES.get(low, "no such") not in str(error):
                raise
            text = OUTSIDE_OF_AUTOCAST.format(error=error, precision=self.precision.name, dtype=low)
            raise MisconfigurationException(text) from error

    def _autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype in which to gather parameters that autocast would cast; None under ``mixed_precision``."""
        return self.precision.autocast_dtype if self._mixed is None else None

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the backward, and reduce each block's gradients as soon as they are complete."""
        assert self._sharded is not None
        reducer, sync = self._reducer, self.sync_gradients or self._accumulates_shards
        if reducer is not None:
            reducer.sync, reducer.zero_weight = sync, self.drops_gradients
            reducer.prepare()
        with self._sharded.backward(loss, sync, drops=self.drops_gradients):
            super().backward(loss, *args, **kwargs)
        if reducer is not None:
            reducer.finish()
        self._backward_ends()

    def steps_end(self) -> None:
        """Free parameters that are still gathered after forwards, so that hooks read and write shards."""
        if self._sharded is not None:
            self._sharded.free()

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> Tensor | None:
        """Clip an optimizer's sharded gradients by their 2-norm over all ranks, or by value. Collective."""
        from lockstep.engines.sharded.fully_shard import clip_norm, part_with_gradient

        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if algorithm == "norm":
            return clip_norm(parameters, value)
        clip_by_value([part_with_gradient(parameter) for parameter in parameters], value)
        return None

    def set_requires_grad(self, parameter: Tensor, needed: bool) -> None:
        """Set ``requires_grad`` of a shard, and of the gathered parameter if there is one now.

        Args:
            parameter: parameter of the module.
            needed: new value of ``requires_grad``.
        """
        assert self._sharded is not None
        super().set_requires_grad(parameter, needed)
        self._sharded.set_requires_grad(parameter, needed)

    # -- states

    def named_parameters(self) -> dict[str, Parameter]:
        """Return the module's parameters by name; sharded parameters as DTensors."""
        if self._sharded is not None:
            self._sharded.reshard()
        return super().named_parameters()

    def held(self) -> dict[str, list[Tensor]]:
        """Return the tensors in this rank's memory: shards, unsharded parameters, and parameters gathered now."""
        shards, held = self._sharded, super().held()
        if shards is None:
            held["parameters"] += [] if self._built is None else self._built.slices()
            return held
        sharded = list(shards.parameters.values())
        gathered, waiting = shards.gathered()
        known = {id(parameter) for parameter in (*sharded, *gathered)}
        held["parameters"] = sharded + [p for p in held["parameters"] if id(p) not in known]
        held["gradients"] = [p.grad for p in held["parameters"] if p.grad is not None] + waiting
        held["buckets"] = [] if self._reducer is None else self._reducer.memory()
        held["gathered"] = gathered
        return held

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield (name, value, gradient) for each parameter, gathered one by one. Collective."""
        from lockstep.engines.sharded.fully_shard import whole_of

        for name, parameter in self.named_parameters().items():
            gradient = None if parameter.grad is None else whole_of(parameter.grad)
            yield name, whole_of(parameter.detach()), gradient

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """Gather the full states of module and optimizers on rank 0. Collective.

        Other ranks get tensors on the meta device, or none. With sharded checkpoints, each rank returns its own shards.
        """
        from lockstep.engines.sharded.fully_shard import gathered

        self._refuse_alone(alone)
        parts = self.saves_shards
        module = self.module.state_dict() if parts else gathered(self.module.state_dict(), self.world.is_zero)
        if weights_only:
            return EngineState(module)
        states: list[dict[str, Any] | None] = [by_parts(optimizer, self._state_of) for optimizer in self.optimizers]
        return EngineState(module, states, self._other_parameters() if parts else {})

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict: shards for a sharded checkpoint, otherwise full tensors on rank 0."""
        from lockstep.engines.owners import union
        from lockstep.engines.sharded.fully_shard import optimizer_state

        whole = self._whole
        if whole is None or optimizer not in whole:
            return optimizer.state_dict() if self.saves_shards else optimizer_state(optimizer, self.world.is_zero)
        if self.saves_shards:
            return whole.state_in_parts(optimizer)
        return union(self.collectives.gather_on_zero(whole.part_of(optimizer)))

    def _reads_into(self) -> Place:
        from lockstep.engines.sharded.fully_shard import place_like

        # its own hook may read, drop or change the loaded tensors, and other names may be other parameters
        hook = getattr(self.module.on_load_checkpoint, "__func__", None)
        looks = hook is not LightningModule.on_load_checkpoint
        in_place = not looks and self.module.strict_loading and loads_by_name(self.module)
        return place_like(self.module, in_place)

    def load(self, state: EngineState) -> None:
        """Load this rank's shards from a state with full tensors, or with tensors that were read as shards."""
        from lockstep.engines.sharded.fully_shard import shard_like

        if state.module is not None:
            own = self.module.state_dict()
            parts = {name: shard_like(own.get(name), value) for name, value in state.module.items()}
            self.module.load_state_dict(parts, strict=self.module.strict_loading)
        for optimizer, saved in zip(self.optimizers, state.optimizers or (), strict=False):
            if saved is not None:
                self._load_state(optimizer, saved)

    def _load_state(self, optimizer: Optimizer, saved: dict[str, Any]) -> None:
        from lockstep.engines.sharded.fully_shard import load_optimizer_state

        if isinstance(optimizer, CombinedOptimizer):
            for each, part in zip(optimizer.optimizers, optimizer.split(saved), strict=True):
                self._load_state(each, part)
        elif self._whole is not None and optimizer in self._whole:
            optimizer.load_state_dict(saved)
        else:
            load_optimizer_state(optimizer, saved)


class ShardedGradients(Gradients["ShardedModule"]):
    """Access to the gradients of a module in which most parameters are sharded, and some are not."""

    def local(self, stepped: bool = False) -> list[Tensor]:
        """Return this rank's gradient shards and, unless ``stepped``, unsharded gradients that are not reduced yet."""
        found = [*super().local(stepped), *([] if stepped else self.holder.gathered()[1])]
        return list({id(gradient): local_part(gradient) for gradient in found}.values())

    def window_state(self) -> dict[str, Any]:
        """Return gradients of unsharded parameters and, under the key ``"sharded"``, this rank's gradient shards."""
        named, shards = self.engine.named_parameters(), self.holder
        whole = {name: p.grad for name, p in named.items() if name not in shards.parameters and p.grad is not None}
        copies = {name: gradient.detach().cpu().clone() for name, gradient in whole.items()}
        return {"gradients": copies, "sharded": shards.window_state()}

    def load_window_state(self, saved: dict[str, Any]) -> None:
        """Restore gradients from `window_state`. From a full gradient of a sharded parameter, load this rank's part."""
        from lockstep.engines.sharded.fully_shard import shard_like

        given, parts = saved.get("gradients", {}), self.holder.parameters
        super().load_window_state({"gradients": {name: each for name, each in given.items() if name not in parts}})
        for name, gradient in given.items():
            if name in parts:
                parts[name].grad = shard_like(parts[name], gradient.to(parts[name].dtype))
        self.holder.load_window_state(saved.get("sharded", {}))


# -- arguments -------------------------------------------------------------------------------------------------


@contextmanager
def _named(argument: str, value: object) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise MisconfigurationException(f"FSDPStrategy({argument}={value!r:.100}): {error}.") from None


def _name_of(argument: str, value: object, names: Sequence[str]) -> str:
    """Return the name of an option's ``value`` (a string or a member of torch's enum); raise if not in ``names``."""
    name = str(getattr(value, "name", value)).upper()
    if name not in names:
        choices = ", ".join(f'"{each}"' for each in names if not each.startswith("_"))
        raise MisconfigurationException(f"FSDPStrategy({argument}={value!r:.100}) must be one of {choices}.")
    return name


def _is_on(argument: str, value: object, field: str) -> bool:
    """Return True if an option is on. Its value is a bool, None, or torch's options object, such as ``CPUOffload``."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if type(value).__name__ == "CPUOffloadPolicy":
        return True
    if field and hasattr(value, field):
        return bool(getattr(value, field))
    raise MisconfigurationException(f"FSDPStrategy({argument}={value!r:.100}) must be True or False.")


def _mixed_policy(given: object) -> Any:
    """Return torch's ``MixedPrecisionPolicy`` for the user's ``mixed_precision``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, torch.dtype):
        return MixedPrecisionPolicy(param_dtype=given, reduce_dtype=torch.float32)
    if hasattr(given, "param_dtype") and hasattr(given, "reduce_dtype"):
        casts = bool(getattr(given, "cast_forward_inputs", True))
        return MixedPrecisionPolicy(given.param_dtype, given.reduce_dtype, cast_forward_inputs=casts)
    raise MisconfigurationException(
        f"FSDPStrategy(mixed_precision={given!r:.100}) must be a dtype (torch.bfloat16), or torch's MixedPrecision "
        "or MixedPrecisionPolicy."
    )
