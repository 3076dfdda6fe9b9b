"""LightningModule: a torch module that says how it is trained, validated, tested and used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from typing_extensions import Self, Unpack

from lockstep.checkpoint import frozen
from lockstep.checkpoint.arguments import init_arguments, restricted_classmethod, where_there_is_a_device
from lockstep.checkpoint.first_values import fill_whole
from lockstep.checkpoint.sharded import load as load_checkpoint
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, missing_extra
from lockstep.ground.hyperparameters import HyperparametersMixin
from lockstep.ground.rank import rank_zero_warn, warn_once
from lockstep.ground.tree import tree_map
from lockstep.ground.types import STEP_OUTPUT, LogOptions, LRSchedulerTypeUnion, OptimizerLRScheduler
from lockstep.hooks import ModuleHooks
from lockstep.memory.recompute import STATE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.serialization import MAP_LOCATION
    from torchmetrics import Metric, MetricCollection

    from lockstep.ground.types import OneOptimizerOrSeveral
    from lockstep.loggers.base import Logger
    from lockstep.trainer import Trainer


_KEPT = {"sync_dist_group": "reduced over all ranks", "enable_graph": "kept without their graph"}


def _say_ignored(name: str, argument: str) -> None:
    """An argument of `self.log` has no effect."""
    warn_once(f"self.log({name!r}, {argument}=...) has no effect: values are {_KEPT[argument]}.", key=f"log {argument}")


class LightningModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """A model together with its training.

    Write ``training_step`` and ``configure_optimizers``; everything else has a default. One such class runs
    unchanged on one process and on many.

    Example::

        class Classifier(LightningModule):
            def __init__(self, lr: float = 1e-3):
                super().__init__()
                self.save_hyperparameters()
                self.net = nn.Linear(64, 10)

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = nn.functional.cross_entropy(self.net(x), y)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    # TorchScript compiles properties too, unless they are named here; these are none of a model's forward.
    __jit_unused_properties__: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._automatic_optimization = True
        self._strict_loading: bool | None = None
        self._example_input_array: Any = None
        self._toggled: dict[nn.Parameter, bool] = {}
        self._compiler_ctx: dict[str, Any] | None = None  # after torch.compile; see loop/compiled.py

    # -- where it runs -------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module.

        Raises:
            RuntimeError: while no Trainer does.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`: call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, LightningModule):  # of one in another, too: it may log
                module._trainer = trainer

    @property
    def device(self) -> torch.device:
        """The device of the parameters; where they are on several, the one on which steps run."""
        strategy = getattr(self._trainer, "strategy", None)  # while TorchScript looks, another object stands there
        device: torch.device | None = getattr(strategy, "step_device", None)
        if strategy is not None and device is not None and strategy.module is self:
            return device
        first = next(self.parameters(), None)
        if first is not None:
            return first.device
        return self._trainer.strategy.root_device if self._trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the floating parameters."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, counted from 0; 0 without a Trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Optimizer steps so far; 0 without a Trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """This process among all; 0 without a Trainer."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """This process among those of its node; 0 without a Trainer."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """The first logger of the Trainer, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        """The loggers of the Trainer."""
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def fabric(self) -> None:
        """None: lockstep has no Fabric."""
        return None

    @property
    def device_mesh(self) -> Any:
        """The mesh of the strategy's devices, where it has one; else None."""
        return getattr(self.trainer.strategy, "device_mesh", None)

    @property
    def automatic_optimization(self) -> bool:
        """Whether the loop calls backward and the optimizer; set it to False to do so in ``training_step``."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self._automatic_optimization = automatic

    @property
    def strict_loading(self) -> bool:
        """Whether a checkpoint's weights must match this module's names exactly."""
        return True if self._strict_loading is None else self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self._strict_loading = strict

    @property
    def example_input_array(self) -> Any:
        """An input of ``forward``, for sizes in the model summary."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: object) -> None:
        self._example_input_array = example

    # -- what it does --------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Compute the loss of one micro-batch: ``training_step(batch, batch_idx)``.

        Return the loss, a dict with ``"loss"``, or None to skip the micro-batch. A dict may say by ``"weight"``
        how much the micro-batch counts in its window (target tokens, say): weights are summed over the window
        and the ranks, and divided out of the gradient. Without it a micro-batch counts by its samples. Of several
        loaders side by side return one loss each, ``{"loss": {"a": loss_a, "b": loss_b}}`` in the nest of the batch:
        each counts by its own loader's samples, also where one has more of them than another.
        """
        raise NotImplementedError("`training_step` is not defined")

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Measure one batch: ``validation_step(batch, batch_idx, dataloader_idx=0)``."""
        raise NotImplementedError("`validation_step` is not defined")

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Measure one batch: ``test_step(batch, batch_idx, dataloader_idx=0)``."""
        raise NotImplementedError("`test_step` is not defined")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Answer one batch: ``predict_step(batch, batch_idx, dataloader_idx=0)``; the default calls ``forward``."""
        return self(kwargs.get("batch", args[0] if args else None))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer and its schedulers; called once per fit, with the parameters on their device."""
        raise NotImplementedError("`configure_optimizers` is not defined")

    def configure_callbacks(self) -> Any:
        """Callbacks that come with the model; one replaces the Trainer's of the same type."""
        return []

    # -- logging -------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Metric | Tensor | int | float,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Keep one number under ``name``; averages weigh by samples, and are reduced over the ranks (``sync_dist``).

        Args:
            name: key in loggers and ``callback_metrics``; with on_step and on_epoch, ``_step`` or ``_epoch`` follows.
            value: number, tensor of one element or torchmetrics object; ``MisconfigurationException`` for all others,
                and in a hook where nothing can be logged.
            prog_bar, logger: show it in the progress bar (default False), send it to the loggers (default True).
            on_step: keep the newest value (default: in training hooks).
            on_epoch: keep the reduction over the epoch (default: in evaluation and epoch hooks).
            reduce_fx: over steps and ranks: "mean", "sum", "min" or "max".
            sync_dist: reduce on_step values before each ``on_train_batch_end``; else when loggers get them.
            add_dataloader_idx: with several evaluation loaders, add ``/dataloader_idx_N`` to the name.
            batch_size: the weight of this value in place of the number of samples.
            rank_zero_only: only rank 0's value counts.
            enable_graph, sync_dist_group, metric_attribute: nothing reads them.
        """
        trainer = self._trainer
        if trainer is None:
            warn_once(f"self.log({name!r}, ...) without a Trainer keeps nothing.", key="log without trainer")
            return
        if enable_graph or sync_dist_group is not None:
            _say_ignored(name, "enable_graph" if sync_dist_group is None else "sync_dist_group")
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist)
        results, kind = trainer.session.results, type(value)
        table = results.table
        sized = not STATE.recomputing and (batch_size is None or (type(batch_size) is int and batch_size > 0))
        if sized and (kind is Tensor or kind is float) and table is not None and not results.muted:
            entry = table.get(name)
            quick = value.dtype if kind is Tensor else float  # type: ignore[union-attr]
            if entry is not None and quick is entry.quick and entry.options == options:
                try:  # most values, in this frame: with nothing of ours in the processor's cache a call costs 1 µs
                    number = value.item() if kind is Tensor else value  # type: ignore[union-attr]
                except RuntimeError:  # more numbers than one
                    results.log(name, value, options, batch_size)
                    return
                weight = results.weight if batch_size is None else batch_size
                if entry.on_step:
                    entry.last, entry.last_weight, entry.step_fresh = number, weight, results.micro_batch
                if entry.on_epoch:
                    entry.total += number * weight
                    entry.weight, entry.epoch_fresh = entry.weight + weight, True
                return
        results.log(name, value, options, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any] | MetricCollection, **options: Unpack[LogOptions]) -> None:
        """:meth:`log` every item of a dict or of a torchmetrics ``MetricCollection``, all with the same options."""
        # a torchmetrics collection gives its metrics' full names only on request
        collection = hasattr(dictionary, "compute_groups")
        items = dictionary.items(keep_base=False) if collection else dictionary.items()  # type: ignore[call-arg]
        for name, value in items:
            self.log(name, value, **options)

    def print(self, *args: object, **kwargs: Any) -> None:
        """``print`` on rank 0 only, without tearing the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def all_gather(self, data: object, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """The tensors of ``data`` from all ranks: each of shape ``(world_size, *shape)``; as it is on one process.

        Args:
            data: a tensor, a number or a nested collection of such; shapes equal on all ranks.
            group: a process group in place of all ranks.
            sync_grads: let gradients flow back to the rank that a slice came from.
        """
        strategy = self.trainer.strategy

        def gather(value: Tensor | float) -> Tensor:
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, device=strategy.root_device)
            return strategy.all_gather(tensor, group=group, sync_grads=sync_grads)

        return tree_map(gather, data, (Tensor, bool, int, float))

    # -- optimization --------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> OneOptimizerOrSeveral:
        """The optimizer, or the list of them, that ``configure_optimizers`` made; type checkers take it for either.

        Args:
            use_pl_optimizer: give wrappers whose ``step`` runs the hooks and counts; else the plain optimizers.
        """
        found: list[Any] = list(self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers)
        either: Any = found[0] if len(found) == 1 else found
        return cast("OneOptimizerOrSeveral", either)

    def lr_schedulers(self) -> LRSchedulerTypeUnion | list[LRSchedulerTypeUnion] | None:
        """The scheduler, the list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call this in place of ``loss.backward()`` in manual optimization: precision and ranks are seen to."""
        if self.automatic_optimization:
            raise MisconfigurationException(
                "manual_backward() was called under automatic optimization: set `self.automatic_optimization = False`."
            )
        self.trainer.fit_loop.step.manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients; override it for another backward than ``loss.backward()``."""
        loss.backward(*args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only ``optimizer``'s parameters need gradients, until :meth:`untoggle_optimizer`."""
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in wanted:
                        self._toggled.setdefault(parameter, parameter.requires_grad)
                        self.trainer.strategy.set_requires_grad(parameter, False)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Give the parameters their ``requires_grad`` back."""
        for parameter, needed in self._toggled.items():
            self.trainer.strategy.set_requires_grad(parameter, needed)
        self._toggled = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """:meth:`toggle_optimizer` for the length of a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters, as a rule with the Trainer's own settings.

        Args:
            optimizer: whose parameters.
            gradient_clip_val: bound; None for the Trainer's, or for no clipping where it has none; 0 for none.
            gradient_clip_algorithm: "norm" (total 2-norm over all parameters) or "value" (each element).
        """
        self.trainer.fit_loop.step.update.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip at the end of a window; override it to clip otherwise."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer; an override must run ``optimizer_closure`` (the forward and backward) itself or by it."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of the last window."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: SupportsFloat | None) -> None:
        """Step a scheduler, with the metric that it monitors if it does."""
        if metric is None and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        else:
            scheduler.step(metric)  # type: ignore[arg-type]  # another scheduler may take a metric, too

    def freeze(self) -> Self:
        """No parameter needs gradients; eval mode. Gives the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """All parameters need gradients; train mode. Gives the module."""
        self.requires_grad_(True)
        return self.train()

    # -- checkpoints ---------------------------------------------------------------------------------------

    @restricted_classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PathLike[str],
        map_location: MAP_LOCATION = None,
        hparams_file: str | PathLike[str] | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a module from a checkpoint: its hyperparameters, overridden by ``kwargs``, and its weights.

        Args:
            checkpoint_path: file or folder written by lockstep or by Lightning 2.x, or a file that is open for reading
                bytes.
            map_location: where its tensors go, as in ``torch.load``; the module goes with them. By default where they
                were, or to the CPU where there is no such device.
            hparams_file: YAML or CSV file of hyperparameters in place of the checkpoint's.
            strict: whether names of weights must match; default: the module's ``strict_loading``.
            weights_only: False to unpickle whatever the file holds, for files that you trust.
            **kwargs: arguments of ``__init__`` that replace or complete the saved ones.

        Raises:
            CorruptCheckpoint: for a file that is truncated, altered or no checkpoint.
            MisconfigurationException: ``__init__`` needs an argument that neither the file nor ``kwargs`` has.
        """
        checkpoint = load_checkpoint(checkpoint_path, map_location or where_there_is_a_device, weights_only)
        check_weights(checkpoint, checkpoint_path)
        module: Self = cls(**init_arguments(cls, checkpoint, hparams_file, kwargs))
        module.configure_model()
        fill_whole(module)
        module.on_load_checkpoint(checkpoint)
        _load_weights(module, checkpoint, strict)
        first = next((value for value in checkpoint["state_dict"].values() if isinstance(value, Tensor)), None)
        return module if first is None else module.to(first.device)

    # -- exports -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def to_onnx(
        self, file_path: str | PathLike[str] | BytesIO | None = None, input_sample: object = None, **kwargs: Any
    ) -> Any:
        """Export ``forward`` to ONNX.

        Args:
            file_path: a path, or a buffer to write to; None: nothing is written.
            input_sample: an input of ``forward``, a tuple for several; None: ``example_input_array``. It goes
                through the module's batch transfer hooks, to the module's device.
            **kwargs: of ``torch.onnx.export``.

        Returns:
            torch's ``ONNXProgram``; None from the exporter of old (``dynamo=False``).

        Raises:
            ModuleNotFoundError: `onnx` or `onnxscript` is not installed.
            MisconfigurationException: there is no input to export with.
        """
        needed = ("onnx", "onnxscript") if kwargs.get("dynamo", True) else ("onnx",)
        for package in needed:
            if find_spec(package) is None:
                raise missing_extra(package, "onnx", f"{type(self).__name__}.to_onnx()")
        sample = self._sample(input_sample)
        training = self.training
        self.eval()
        try:
            if not isinstance(file_path, BytesIO):
                path = None if file_path is None else fspath(file_path)
                return torch.onnx.export(self, sample, path, **kwargs)
            if not kwargs.get("dynamo", True):
                return torch.onnx.export(self, sample, file_path, **kwargs)  # type: ignore[arg-type]
            program: Any = torch.onnx.export(self, sample, None, **kwargs)
            file_path.write(program.model_proto.SerializeToString())
            return program
        finally:
            self.train(training)

    @torch.no_grad()
    @contextmanager
    def _seen_by_torchscript(self) -> Iterator[None]:
        """Inside, torch may look at every property: what needs a Trainer is missing then, and does not raise."""
        trainer, self._trainer = self._trainer, object()  # type: ignore[assignment]
        try:
            yield
        finally:
            self._trainer = trainer

    def to_torchscript(self, *args: object, **kwargs: object) -> Any:
        """Refused: torch has deprecated TorchScript.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.to_torchscript(): torch has deprecated TorchScript; use "
            "torch.export.export(module, args), or to_onnx(path)."
        )

    def to_tensorrt(self, *args: object, **kwargs: object) -> Any:
        """Refused: export to ONNX, which TensorRT reads.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.to_tensorrt(): lockstep does not export to TensorRT; write `to_onnx(path)`, which "
            "TensorRT reads, or call torch_tensorrt.compile(module, ...) yourself."
        )

    def _sample(self, given: object) -> Any:
        """An input of ``forward`` as a batch would come: through the transfer hooks, on the module's device."""
        sample = self.example_input_array if given is None else given
        if sample is None:
            raise MisconfigurationException(
                f"{type(self).__name__}.to_onnx(path, input_sample): there is no input to export with; give one, or "
                "set `self.example_input_array`."
            )
        sample = self.on_before_batch_transfer(sample, 0)
        sample = self.transfer_batch_to_device(sample, self.device, 0)
        return self.on_after_batch_transfer(sample, 0)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_trainer"] = None
        return state


LightningModule.__jit_unused_properties__ = [
    name for kind in LightningModule.__mro__ for name, value in vars(kind).items() if isinstance(value, property)
]


def check_weights(checkpoint: dict[str, Any], path: str | PathLike[str]) -> None:
    """Refuse a file that torch can read and that is no checkpoint of a run.

    Raises:
        CorruptCheckpoint: there is no ``state_dict`` in it.
    """
    if "state_dict" not in checkpoint:
        raise CorruptCheckpoint(
            f"{str(path)!r} is no checkpoint of lockstep or Lightning: it has no 'state_dict' (its keys: "
            f"{sorted(map(str, checkpoint))[:8]}). Load weights alone by `module.load_state_dict(torch.load(path))`."
        )


def _load_weights(module: LightningModule, checkpoint: dict[str, Any], strict: bool | None) -> None:
    """Load weights; without ``strict`` (None: the module's ``strict_loading``) tell what is on one side only."""
    if strict is not None and module._strict_loading not in (None, strict):
        raise MisconfigurationException(
            f"load_from_checkpoint(strict={strict}): {type(module).__name__} has set strict_loading = "
            f"{module._strict_loading}; leave `strict` out, or set both to the same."
        )
    strict = module.strict_loading if strict is None else strict
    weights, absent = checkpoint["state_dict"], frozen.absent_of(checkpoint, module)
    if strict and absent is not None:
        named = dict(module.named_parameters())
        frozen.check(checkpoint, module, named, f"{type(module).__name__}.load_from_checkpoint")
        weights = {**weights, **{name: named[name].detach() for name in absent if name in named}}
    keys = module.load_state_dict(weights, strict=strict)
    if not strict and keys is not None:
        for names, where in (
            (keys.missing_keys, "in the module and not in the checkpoint, and stay as they were made"),
            (keys.unexpected_keys, "in the checkpoint and not in the module, and are left out"),
        ):
            if names:
                rank_zero_warn(f"{type(module).__name__}: weights that are {where}: {', '.join(names)}.")
