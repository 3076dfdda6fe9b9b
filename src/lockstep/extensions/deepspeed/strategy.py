"""Strategy that trains with DeepSpeed's engine, ZeRO stages 1 to 3."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint import pretrained
from lockstep.checkpoint.first_values import fill, stand_in
from lockstep.checkpoint.flat_part import FlatPart
from lockstep.checkpoint.io import CheckpointIO, CheckpointWriter, Path
from lockstep.checkpoint.sharded import Place, is_engines
from lockstep.cluster.local import local_rank_set
from lockstep.cluster.world import World
from lockstep.engines.ddp.consistency import broadcast_buffers, check_same_module
from lockstep.engines.engine import EngineState
from lockstep.engines.ranks import HALF_AN_HOUR
from lockstep.engines.sharded.strategy import ShardedStrategy, bring_states, generate_together
from lockstep.extensions.deepspeed import config as settings
from lockstep.extensions.deepspeed import folder as deepspeed_folder
from lockstep.extensions.deepspeed import package
from lockstep.extensions.deepspeed.partition import partition, put, span
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.optimizers import CombinedOptimizer
from lockstep.ground.parameters import is_partitioned, whole_shape
from lockstep.ground.rank import does, rank_zero_info
from lockstep.ground.types import LRSchedulerConfig
from lockstep.memory.recompute import Layers, Policy, Save
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

if TYPE_CHECKING:
    from lockstep.extensions.deepspeed.engine import ZeroEngine

THAWED = (
    "DeepSpeed: parameter {name!r} would not be trained: it was frozen, or not in the optimizer, when the fit started "
    "and the engine was made. Let it require gradients from the start, for example in a group with lr=0.0, or use "
    'strategy="fsdp".'
)
FORMATS = ("sharded", "full", "deepspeed")
NO_EFFECT = {
    "load_full_weights": "whole weights can be read from all checkpoints",
    "logging_batch_size_per_gpu": "the batch size is the loader's",
    "remote_device": "`offload_params_device` sets the device of parameters",
}
"""Arguments of Lightning's strategy without an effect, and the reasons."""


class DeepSpeedStrategy(ShardedStrategy):
    """Strategy with one process per device and DeepSpeed's engine, ZeRO stage 1, 2 or 3. CPUs are supported (gloo).

    The arguments are those of Lightning's strategy. An argument that is None has its value from ``config``, or else
    its default. See `docs/deepspeed.md`.

    Args:
        accelerator, parallel_devices: None; choose devices by ``Trainer(accelerator=..., devices=...)``.
        zero_optimization: must be True.
        stage: ZeRO's stage: 1 shards optimizer states over the ranks, 2 also gradients, 3 also parameters. Default: 2.
        offload_optimizer: keep optimizer states on ``offload_optimizer_device`` ("cpu"), and step there.
        offload_parameters: keep parameters on ``offload_params_device`` ("cpu"); for stage 3.
        offload_params_device, offload_optimizer_device: "cpu" or "nvme".
        nvme_path: a folder on a fast disk, for the device "nvme".
        params_buffer_count, params_buffer_size, max_in_cpu, optimizer_buffer_count, pin_memory: settings of offload;
            the sizes ``params_buffer_size`` and ``max_in_cpu`` are numbers of elements.
        block_size, queue_depth, single_submit, overlap_events, thread_count: settings of the disk; ``block_size`` is in
            bytes.
        sub_group_size, contiguous_gradients, overlap_comm, allgather_partitions, reduce_scatter: settings of ZeRO;
            ``sub_group_size`` is in elements.
        allgather_bucket_size, reduce_bucket_size: size of a bucket, in elements; at most 2e8 by default.
        zero_allow_untested_optimizer: if False, refuse optimizers that DeepSpeed does not list as tested.
        config: DeepSpeed's config: a JSON file, or a dict. Settings of the Trainer may be repeated in it with the same
            value.
        logging_level: level of DeepSpeed's log on rank 0.
        loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: loss scaling with
            precision="16-mixed".
        partition_activations, cpu_checkpointing, contiguous_memory_optimization, synchronize_checkpoint_boundary:
            settings of ``deepspeed.checkpointing``, if the model uses it.
        cluster_environment, checkpoint_io, precision_plugin: as in ``Trainer(plugins=[...])``.
        process_group_backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl"; default: the last on CUDA, gloo on CPUs.
        timeout: time that a collective waits for the other ranks, a ``datetime.timedelta``; None: 30 minutes.
        nccl: NCCL's variables, as in ``DDPStrategy``.
        activation_checkpointing: recompute activations in the backward: True (in the repeated blocks), or classes.
        activation_checkpointing_policy: layers to recompute, as classes or a policy function.
        activation_checkpointing_save: results that are kept in such layers.
        checkpoint_format: "sharded": a folder in which each rank writes its shards; any strategy reads it on any number
            of ranks. "full": the same in one file, gathered by rank 0. "deepspeed": the engine's own folder.
        async_save: with "sharded": each rank copies its shards and continues to train while a thread writes them.
        **others: further arguments of Lightning's strategy, accepted if they have no effect.

    Raises:
        MisconfigurationException: an argument is unknown or not supported, or has a different value than the config.
        ModuleNotFoundError: DeepSpeed is not installed.

    Example::

        Trainer(devices=8, strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True))
    """

    steps_itself = True
    engine = "DeepSpeed"

    def __init__(
        self,
        accelerator: object = None,
        zero_optimization: bool = True,
        stage: int | None = None,
        *,
        offload_optimizer: bool | None = None,
        offload_parameters: bool | None = None,
        offload_params_device: str | None = None,
        offload_optimizer_device: str | None = None,
        nvme_path: str | None = None,
        params_buffer_count: int | None = None,
        params_buffer_size: int | None = None,
        max_in_cpu: int | None = None,
        optimizer_buffer_count: int | None = None,
        pin_memory: bool | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        thread_count: int | None = None,
        sub_group_size: int | None = None,
        contiguous_gradients: bool | None = None,
        overlap_comm: bool | None = None,
        allgather_partitions: bool | None = None,
        reduce_scatter: bool | None = None,
        allgather_bucket_size: float | None = None,
        reduce_bucket_size: float | None = None,
        zero_allow_untested_optimizer: bool | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        logging_level: int = logging.WARNING,
        loss_scale: float | None = None,
        initial_scale_power: int | None = None,
        loss_scale_window: int | None = None,
        hysteresis: int | None = None,
        min_loss_scale: float | None = None,
        partition_activations: bool | None = None,
        cpu_checkpointing: bool | None = None,
        contiguous_memory_optimization: bool | None = None,
        synchronize_checkpoint_boundary: bool | None = None,
        parallel_devices: object = None,
        cluster_environment: object = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: object = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = HALF_AN_HOUR,
        nccl: Mapping[str, Any] | None = None,
        activation_checkpointing: Layers | Literal[False] | None = None,
        activation_checkpointing_policy: Policy | None = None,
        activation_checkpointing_save: Save = None,
        checkpoint_format: str = "sharded",
        async_save: bool = False,
        **others: object,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OF_CONFIG and value is not None}
        package.check_installed("DeepSpeedStrategy")
        super().__init__(
            cluster_environment, checkpoint_io, precision_plugin, process_group_backend, timeout, nccl=nccl
        )
        others = {"accelerator": accelerator, "parallel_devices": parallel_devices, **others}
        self._take_others(DeepSpeedStrategy, others, NO_EFFECT)
        if zero_optimization is not True:
            raise MisconfigurationException(
                f"DeepSpeedStrategy(zero_optimization={zero_optimization!r}): ZeRO cannot be switched off. Without it "
                'use strategy="ddp", which reduces full gradients faster.'
            )
        self._recompute(activation_checkpointing, activation_checkpointing_policy, activation_checkpointing_save)
        self._select_writer(checkpoint_format, async_save)
        self._user = settings.read(config)
        self._config = settings.merge(settings.with_integers(given), self._user)
        zero = self._config[settings.ZERO]
        self._stage = int(zero["stage"])
        if offload_parameters and self._stage != 3:
            rank_zero_info(
                f"DeepSpeedStrategy(offload_parameters=True, stage={self._stage}) has no effect: parameters are "
                "sharded in stage 3 only; in stages 1 and 2 each device has all parameters."
            )
        self._level = logging_level
        self._exact: dict[int, Tensor] = {}
        self._zero: ZeroEngine | None = None
        self._evaluates: Any = None
        self._config_sizes: dict[str, int] = {}
        self._is_over = False
        self._call = ExitStack()  # contexts that last for one call of fit, validate, test or predict

    def _select_writer(self, checkpoint_format: str, async_save: bool) -> None:
        """Select the checkpoint writer for the arguments ``checkpoint_format`` and ``async_save``."""
        self._format = checkpoint_format
        if checkpoint_format not in FORMATS:
            raise MisconfigurationException(
                f"DeepSpeedStrategy(checkpoint_format={checkpoint_format!r:.100}): choose "
                f"{', '.join(repr(name) for name in FORMATS)}."
            )
        if checkpoint_format == "sharded":
            self._save_in_parts(async_save)
        elif async_save:
            raise MisconfigurationException(
                f"DeepSpeedStrategy(async_save=True, checkpoint_format={checkpoint_format!r}): only "
                'checkpoint_format="sharded" can be written in the background. Use it, or async_save=False.'
            )
        elif checkpoint_format == "deepspeed":
            self.saves_shards = True
            writer = deepspeed_folder.EngineCheckpointIO()
            writer.save = self._engine_saves
            self.checkpoints = CheckpointWriter(writer)

    def _engine_saves(self, folder: os.PathLike[str], rest: dict[str, Any]) -> None:
        if self._zero is None:
            raise MisconfigurationException(
                'DeepSpeedStrategy(checkpoint_format="deepspeed"): the engine writes the file, but does not exist '
                'before a fit. Save during or after a fit, or use checkpoint_format="sharded".'
            )
        # `save_checkpoint` may be called after the fit, when the context of the call has ended
        with package.hide_rename_warnings():
            self._zero.save(folder, deepspeed_folder.TAG, rest)

    # -- set up

    def connect(self, world: World, device: torch.device, precision: Precision) -> None:
        """Check that DeepSpeed supports the precision, and let the engine scale a float16 loss.

        Args:
            world: ranks and nodes of the run, and the place of this process among them.
            device: device of this rank.
            precision: precision of the run.

        Raises:
            MisconfigurationException: DeepSpeed does not support the precision.
        """
        if precision.name not in settings.PRECISIONS:
            raise MisconfigurationException(
                f'Trainer(precision="{precision.name}", strategy="deepspeed"): DeepSpeed keeps its weights in float32 '
                f"and does not support this precision. Choose one of {', '.join(settings.PRECISIONS)}."
            )
        settings.set_precision(self._config, precision.name, device.type)
        # a copy: the user may pass the same plugin to another Trainer
        if precision.scaler is not None:
            precision = copy(precision)
            precision.scaler = None
        super().connect(world, device, precision)

    def setup_environment(self) -> None:
        """Join the process group, and import DeepSpeed.

        Raises:
            MisconfigurationException: the config has an unknown key, or a disk is to be used and libaio is missing.
        """
        super().setup_environment()
        # DeepSpeed reads LOCAL_RANK from the environment when its process group is initialized
        self._call.close()
        self._call.enter_context(local_rank_set(self.world.local_rank))
        self._call.enter_context(package.import_for(self.root_device, self._level))
        settings.check_keys(self._user, package.zero_keys())
        path = settings.find_disk(self._config)
        if path is not None and not package.can_use_disks():
            raise MisconfigurationException(
                f"DeepSpeedStrategy(nvme_path={path!r}): DeepSpeed needs libaio to offload to a disk, and it is not "
                'installed. Install it with its headers (libaio-dev), or offload to the "cpu".'
            )

    @does("taking rank 0's weights")
    def setup_module(self, module: LightningModule, own_backward: Callable[..., Any] | None) -> None:
        """Load rank 0's weights and buffers on all ranks; in stage 3 each rank keeps its shard of the weights.

        Raises:
            MisconfigurationException: the module has no parameters, or another engine has left it partitioned.
            ValueError: on every rank, the ranks' modules differ.
        """
        self._refuse_parts(module, "deepspeed" if self._stage == 3 else "")
        if self._zero is not None and not self._is_over:
            self._zero.end()
        self._zero = None
        self.module, self._own_backward = module, own_backward
        self._is_over = False
        self.precision.convert_module(module)
        # in stage 3 `partition` fills layer by layer, so that a model fits that is too large for one device
        if self._stage != 3:
            fill(module, self.root_device)
        sources = stand_in(module)
        check_same_module(module)
        gather = list if self._built is None else self._built.gather
        buffers = list(module.buffers())
        gather(buffers)
        for buffer in buffers:
            buffer.data = buffer.data.to(self.root_device)
        bring_states(module, self.root_device)
        broadcast_buffers(buffers, 0, None)
        if self._stage == 3:
            self._exact = partition(module, self._engine_config(), self._dtype, self.root_device, gather, sources)
            pretrained.forget(module)
            generate_together(module)
        else:
            parameters = list(module.parameters())
            gather(parameters)
            for parameter in parameters:
                parameter.data = parameter.data.to(self.root_device)
            comm.broadcast_tensors([parameter.data for parameter in parameters], 0, None)
        self._built = None
        self._choose_recomputation()
        self._begin_recomputation()
        self._watch(module)

    def _choose_recomputation(self) -> None:
        """Recompute activations as the config's "activation_checkpointing" requires.

        It applies to ``deepspeed.checkpointing`` if the model calls that, or else to repeated blocks.
        """
        block = self._config.get("activation_checkpointing", {})
        on = [key for key in ("partition_activations", "cpu_checkpointing") if block.get(key)]
        if not on:
            return
        if package.uses_checkpointing(self.module):
            package.configure_checkpointing(block)
            rank_zero_info(f"DeepSpeed: layers that call deepspeed.checkpointing are recomputed ({', '.join(on)}).")
        elif not self._recomputation.is_on:
            self._recompute(True, None, None)
            rank_zero_info(
                f"DeepSpeed: {', '.join(on)}: no layer calls deepspeed.checkpointing. The repeated blocks are "
                "recomputed instead, as with activation_checkpointing=True."
            )
        if "partition_activations" in on:
            rank_zero_info("DeepSpeed: partition_activations has no effect without model parallelism.")

    @property
    def _dtype(self) -> torch.dtype | None:
        """Dtype of the engine's parameters, or None for float32."""
        blocks = {"bf16": torch.bfloat16, "fp16": torch.float16}
        return next((dtype for block, dtype in blocks.items() if block in self._config), None)

    def _engine_config(self) -> dict[str, Any]:
        """Return the engine's config: the user's without the optimizer, with defaults for required settings."""
        made = {key: dict(value) if isinstance(value, dict) else value for key, value in self._config.items()}
        made.pop("optimizer", None)
        self._config_sizes = settings.take_batch_sizes(made)
        # the loop decides both: it reports the last backward of a window, and sets the norm before a step
        made["gradient_accumulation_steps"] = 1
        made["gradient_clipping"] = 0.0
        numel = sum(whole_shape(parameter).numel() for parameter in self.module.parameters())
        if not numel:
            raise MisconfigurationException(
                f"{type(self.module).__name__} has no parameters. Layers in a plain list or dict are not registered: "
                "use nn.ModuleList or nn.ModuleDict."
            )
        settings.set_defaults(made, self.root_device.type, numel)
        return made

    @does("starting DeepSpeed's engine")
    def setup_optimizers(self, optimizers: list[Optimizer], configs: list[LRSchedulerConfig]) -> None:
        """Create DeepSpeed's engine for the module and its optimizer.

        Args:
            optimizers: optimizers of the fit.
            configs: schedulers of the fit, with the interval and frequency of their steps.

        Raises:
            MisconfigurationException: the module, an optimizer or a callback requires a feature that DeepSpeed does not
                support.
        """
        from lockstep.extensions.deepspeed.engine import ZeroEngine, ZeroGradients

        super().setup_optimizers(optimizers, configs)
        optimizer = self._check_fit(optimizers)
        made = self._engine_config()
        trainer = self.module.trainer
        settings.check_optimizer(dict(self._config), optimizer)
        settings.set_accumulation({**self._config}, trainer.config.accumulate_grad_batches)
        clipping = {"gradient_clipping": self._config.get("gradient_clipping", 0.0)}
        settings.set_clipping(clipping, trainer.config.gradient_clip_val, trainer.config.gradient_clip_algorithm)
        made.update(clipping)
        self.copies.synchronize_norms(self.module, self.sync_batchnorm, self._timeout, self.replicas)
        self._end_evaluation()
        self._zero = ZeroEngine(self.module, optimizer, made, self._exact)
        self.gradients = ZeroGradients(self, self._zero)
        self._exact = {}
        # the engine's buffers have the gradients, so the optimizer's own method would clear nothing
        vars(optimizer)["zero_grad"] = self._zero_grad

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if self._zero is not None:
            self._zero.zero_grad()

    def _check_fit(self, optimizers: list[Optimizer]) -> Optimizer:
        """Return the module's only optimizer, or raise an error if the engine cannot train the module."""
        module = self.module
        kind = type(module).__name__
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"{kind} has automatic_optimization=False, so DeepSpeed's engine cannot detect which backward is the "
                'last before a step. Use automatic optimization, or strategy="fsdp".'
            )
        if len(optimizers) != 1 or isinstance(optimizers[0], CombinedOptimizer):
            what = "a CombinedOptimizer" if len(optimizers) == 1 else f"{len(optimizers)} optimizers"
            raise MisconfigurationException(
                f"{kind}.configure_optimizers returned {what}: DeepSpeed's engine steps one optimizer. "
                'Use parameter groups of one optimizer, or strategy="fsdp".'
            )
        for name, way in (
            ("configure_gradient_clipping", "use Trainer(gradient_clip_val=...)"),
            ("optimizer_step", "use the hooks on_before_optimizer_step and on_before_zero_grad"),
        ):
            if getattr(type(module), name) is not getattr(LightningModule, name):
                raise MisconfigurationException(
                    f"{kind} overrides `{name}`: DeepSpeed's engine clips and steps in one call, on this rank's shard "
                    f'of the gradients. Instead {way}, or use strategy="fsdp".'
                )
        optimizer = optimizers[0]
        if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
            raise MisconfigurationException(
                f"{type(optimizer).__name__}: none of its parameters requires a gradient, so nothing can be trained. "
                "Set requires_grad=True on the parameters to train."
            )
        for parameter_name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise MisconfigurationException(
                    f"{kind}: parameter {parameter_name!r} is {parameter.dtype}: DeepSpeed keeps weights in float32. "
                    'Convert it by module.float(), or use strategy="fsdp".'
                )
        trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        of_dtype: dict[torch.dtype, str] = {}
        for name, parameter in module.named_parameters():
            if id(parameter) in trained:
                of_dtype.setdefault(parameter.dtype, name)
        # the engine would concatenate parameters of several dtypes in one of them
        if len(of_dtype) > 1 and self._dtype is None:
            some = " and ".join(f"{name!r} is {dtype}" for dtype, name in of_dtype.items())
            raise MisconfigurationException(
                f"{kind}: parameter {some}, but DeepSpeed trains parameters of one dtype. Freeze the others "
                '(`requires_grad_(False)`), convert them by module.float(), or use strategy="fsdp".'
            )
        self._check_callbacks()
        return optimizer

    def _check_callbacks(self) -> None:
        """Raise an error for callbacks that change the module's parameters, if the engine trains different tensors."""
        callbacks = getattr(self.module.trainer, "callbacks", ())
        where = way = None
        if self._stage == 3:
            where, way = "in stage 3 the module's parameters are empty between forwards", "stage 1 or 2"
        elif self._dtype is not None:
            where = f"with precision={self.precision.name!r} the engine trains float32 weights, not the module's"
            way = 'precision="32-true" or "bf16-mixed"'
        for callback in callbacks:
            name = type(callback).__name__
            if callback.replaces_parameters is True:
                raise MisconfigurationException(
                    f"DeepSpeedStrategy with {name}: the callback replaces the parameters that the engine trains. Use "
                    'strategy="ddp".'
                )
            if where is not None and callback.averages_weights is True:
                raise MisconfigurationException(
                    f'DeepSpeedStrategy with {name}, which changes parameters: {where}. Use {way}, or strategy="fsdp".'
                )

    def check_trained(self, replaced: bool = False) -> None:
        """Raise an error for a parameter that was unfrozen or added to the optimizer after the engine's creation.

        Raises:
            MisconfigurationException: a parameter was unfrozen or added, or optimizers were replaced.
        """
        super().check_trained(replaced)
        name = None if self._zero is None else self._zero.find_untrained()
        if name is not None:
            raise MisconfigurationException(THAWED.format(name=name))

    def teardown(self) -> None:
        """Remove the engine's hooks. In stage 3 the module's parameters stay partitioned."""
        super().teardown()
        self._end_evaluation()
        if self._zero is not None and not self._is_over:
            self._zero.end()
            self._is_over = True
        self._call.close()

    def _end_evaluation(self) -> None:
        if self._evaluates is not None:
            self._evaluates.end()
            self._evaluates = None

    # -- one window

    def run(self, fn: Callable[..., Any], *args: object) -> Any:
        """Call a method of the module inside the engine's hooks, which gather parameters in stage 3."""
        # here and not at setup: the loader exists only from the first training step on
        if self._config_sizes and torch.is_grad_enabled():
            trainer = self.module.trainer
            size = getattr(trainer.train_dataloader, "batch_size", None)
            if isinstance(size, int):
                settings.check_batches(self._config_sizes, size, trainer.accumulate_grad_batches, self.world.size)
            self._config_sizes = {}
        return super().run(fn, *args)

    def _through(self, fn: Callable[..., Any], *args: object) -> Any:
        if self._zero is not None and not self._is_over and (self._stage == 3 or torch.is_grad_enabled()):
            return self._zero.run(fn, *args)
        if self._stage != 3:
            return fn(*args)
        # only an engine's hooks gather parameters; one without an optimizer does it outside a fit
        if self._evaluates is None:
            from lockstep.extensions.deepspeed.engine import evaluation

            self._evaluates = evaluation(self.module, self._engine_config())
        return self._evaluates(fn, *args)

    def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run the engine's backward, which averages gradients over the ranks and shards them."""
        assert self._zero is not None
        self._zero.backward(loss, self.sync_gradients, self.drops_gradients, self._own_backward)
        self._backward_ends()

    def clip(self, optimizer: Optimizer, value: float, algorithm: str) -> None:
        """Let the engine clip the full gradient by its 2-norm in the next step."""
        assert self._zero is not None
        if algorithm != "norm":
            settings.set_clipping({}, value, algorithm)
        self._zero.clip(value)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Let the engine update the parameters.

        Raises:
            MisconfigurationException: ``closure`` is given.
        """
        assert self._zero is not None
        if closure is not None:
            raise MisconfigurationException(
                f"DeepSpeedStrategy: {type(optimizer).__name__}.step(closure) is not supported, because the engine "
                'cannot compute gradients within a step. Use an optimizer without a closure, or strategy="ddp".'
            )
        self._zero.step()
        self.left_out = bool(getattr(self._zero.zero, "overflow", False))

    # -- states

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by kind; the engine's float32 weights count as optimizer states."""
        held = super().held()
        if self._zero is None or self._is_over:
            parts = [getattr(parameter, "ds_tensor", parameter) for parameter in self.module.parameters()]
            return {**held, "parameters": parts}
        return {**held, **self._zero.held()}

    def whole_parameters(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Yield (name, float32 value, gradient) for each parameter, gathered one by one. Collective."""
        if self._zero is not None:
            self._zero.copy_changes()
        for name, parameter in self.named_parameters().items():
            gradient = None if self._zero is None else self._zero.whole_gradient(parameter)
            yield name, self._whole(parameter), gradient

    def _whole(self, parameter: Parameter) -> Tensor:
        return self._gather(self._part(parameter))

    def _gather(self, value: Tensor) -> Tensor:
        return value.whole(self.root_device) if isinstance(value, FlatPart) else value

    def _part(self, parameter: Any) -> Tensor:
        """Return this rank's shard of a parameter: for a trained parameter, the engine's float32 elements."""
        if self._zero is not None and self._zero.trains(parameter):
            return self._zero.part(parameter)
        if is_partitioned(parameter):
            return FlatPart.of_span(parameter.ds_shape, parameter.dtype, parameter.ds_tensor)
        value: Tensor = parameter.detach()
        return value

    def _for_checkpoint(self, value: Tensor) -> Tensor:
        """Return the shard ``value`` for a sharded checkpoint, or gather the full tensor, which rank 0 writes."""
        if self.saves_shards:
            return value
        # gathered one by one, and only rank 0 keeps the result, in CPU memory
        whole = self._gather(value)
        return whole.cpu() if self.world.is_zero else torch.empty_like(whole, device="meta")

    def save(self, alone: bool = False, weights_only: bool = False) -> EngineState:
        """Return the states of module and optimizer for a checkpoint. Collective.

        With "sharded" these are this rank's shards. With "full" rank 0 has whole tensors, and the other ranks have
        tensors on the meta device. With "deepspeed" the engine writes states itself, and this contains only names and
        settings.
        """
        self._refuse_alone(alone)
        zero = self._zero
        if zero is not None:
            zero.copy_changes()
        if self._format == "deepspeed":
            if zero is None or weights_only:
                return EngineState(self.module.state_dict())
            groups = {**zero.optimizer.state_dict(), "state": {}}
            return EngineState(self.module.state_dict(), [groups], {deepspeed_folder.NAMES: zero.names()})
        module = self._module_state()
        if weights_only or zero is None:
            return EngineState(module)
        return EngineState(module, [zero.optimizer_state(self._for_checkpoint)], {deepspeed_folder.NAMES: zero.names()})

    def _module_state(self) -> dict[str, Any]:
        """Return the module's state dict, with the engine's values for the parameters."""
        made = self.module.state_dict()
        # a shared parameter has several names and is gathered once
        done: dict[int, Tensor] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if name not in made:
                continue
            if id(parameter) not in done:
                done[id(parameter)] = self._for_checkpoint(self._part(parameter))
            made[name] = done[id(parameter)]
        return made

    def _reads_into(self) -> Place:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        shapes = {whole_shape(parameter) for parameter in parameters.values()}

        def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            if name.startswith("model."):
                parameter = parameters.get(name.removeprefix("model."))
                in_parts = parameter is not None and is_partitioned(parameter) and whole_shape(parameter) == shape
            else:
                in_parts = name.startswith("optimizer_") and len(shape) > 0 and shape in shapes
            return FlatPart.of_span(shape, dtype) if in_parts else torch.empty(shape, dtype=dtype)

        return place

    def load_checkpoint(self, filepath: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint. Log a message if it is an engine's folder from a different number of ranks."""
        found = super().load_checkpoint(filepath, weights_only)
        if is_engines(filepath) and deepspeed_folder.count_ranks(filepath) != self.world.size:
            rank_zero_info(
                f"DeepSpeed: {os.fspath(filepath)!r} was written by {deepspeed_folder.count_ranks(filepath)} ranks and "
                f"is read by {self.world.size}, parameter by parameter."
            )
        return found

    def load(self, state: EngineState) -> None:
        """Load this rank's shards of a state. Tensors on the meta device, as `save` returns them, are skipped.

        Raises:
            RuntimeError: the module's ``strict_loading`` is True, and names of weights differ.
        """
        if state.module is not None:
            self._load_module(state.module)
        for saved in state.optimizers or ():
            if saved is not None and self._zero is not None:
                self._zero.load_optimizer_state(saved)

    def _load_module(self, given: dict[str, Any]) -> None:
        kept = {name for name, value in given.items() if isinstance(value, Tensor) and value.is_meta}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        cut = {name for name, p in parameters.items() if is_partitioned(p) and name in given}
        saved = {name: value if name in cut else self._gather(value) for name, value in given.items()}
        others, strict = cut | kept, self.module.strict_loading
        rest = {name: value for name, value in saved.items() if name not in others}
        # torch's own strict check would report the names in `others`, which are not loaded by it
        found = self.module.load_state_dict(rest, strict=strict and not others)
        missing = [name for name in found.missing_keys if name not in others]
        if strict and (missing or found.unexpected_keys):
            raise RuntimeError(
                f"The checkpoint does not fit: missing keys {missing}, unexpected keys {found.unexpected_keys}. "
                "Set strict_loading = False on the module to ignore them."
            )
        for name in cut - kept:
            put(parameters[name], _elements(saved[name]))
        for name in (name for name in saved if name in parameters and name not in kept):
            if self._zero is not None:
                self._zero.load_parameter(parameters[name], saved[name])
            elif self._dtype is not None:
                self._exact[id(parameters[name])] = self._own_part(parameters[name], saved[name])

    def _own_part(self, parameter: Parameter, value: Tensor) -> Tensor:
        """Convert a loaded parameter to float32 values for the engine; in stage 3, only this rank's elements."""
        flat = _elements(value).flatten()
        if is_partitioned(parameter) and flat.numel() == value.numel():
            start, size = span(value.numel(), self.world.rank, self.world.size)
            flat = flat[start : start + size]
        return flat.to(self.root_device, torch.float32, copy=True)


def _elements(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, FlatPart) else value


# -- arguments -------------------------------------------------------------------------------------------------

_OF_CONFIG = frozenset(
    {
        *settings.PLACES,
        *settings.OFFLOAD_OPTIMIZER,
        *settings.OFFLOAD_PARAMETERS,
        *("offload_optimizer", "offload_parameters", "offload_params_device", "offload_optimizer_device"),
    }
)
