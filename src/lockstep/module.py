"""LightningModule, a torch module with methods for training, validation, test and prediction."""

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


class LightningModule(ModuleHooks, HyperparametersMixin, nn.Module):
    """Base class for models: a ``torch.nn.Module`` with the code for its training.

    Define ``training_step`` and ``configure_optimizers``; all other methods have defaults. The same class runs on one
    process and on many.

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
    # Names of properties that TorchScript must not compile; filled below the class with all of them.
    __jit_unused_properties__: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trainer: Trainer | None = None
        self._automatic_optimization = True
        self._strict_loading: bool | None = None
        self._example_input_array: Any = None
        self._toggled: dict[nn.Parameter, bool] = {}
        self._compiler_ctx: dict[str, Any] | None = None  # set by torch.compile of the module; see loop/compiled.py

    # -- where it runs -------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """Trainer of this module.

        Raises:
            RuntimeError: no call of a Trainer has been made with this module.
        """
        if self._trainer is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`: call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        for module in self.modules():
            if isinstance(module, LightningModule):  # also within another one: it may log
                module._trainer = trainer

    @property
    def device(self) -> torch.device:
        """Device of the parameters; if they are on several devices, the device on which steps run."""
        strategy = getattr(self._trainer, "strategy", None)  # `_seen_by_torchscript` sets a plain object as Trainer
        device: torch.device | None = getattr(strategy, "step_device", None)
        if strategy is not None and device is not None and strategy.module is self:
            return device
        first = next(self.parameters(), None)
        if first is not None:
            return first.device
        return self._trainer.strategy.root_device if self._trainer is not None else torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter; torch's default dtype if there is no such parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """True if the parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def current_epoch(self) -> int:
        """Current epoch, counted from 0; 0 without a Trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far; 0 without a Trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process among all processes; 0 without a Trainer."""
        return self._trainer.global_rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process among the processes on its node; 0 without a Trainer."""
        return self._trainer.local_rank if self._trainer is not None else 0

    @property
    def logger(self) -> Logger | None:
        """First logger of the Trainer, or None."""
        return self._trainer.logger if self._trainer is not None else None

    @property
    def loggers(self) -> list[Logger]:
        """Loggers of the Trainer; an empty list without a Trainer."""
        return self._trainer.loggers if self._trainer is not None else []

    @property
    def fabric(self) -> None:
        """None: lockstep has no Fabric."""
        return None

    @property
    def device_mesh(self) -> Any:
        """``DeviceMesh`` of the strategy, or None."""
        return getattr(self.trainer.strategy, "device_mesh", None)

    @property
    def automatic_optimization(self) -> bool:
        """True (default) if the loop runs backward and steps the optimizer; if False, ``training_step`` must do both.

        Example::

            def __init__(self):
                super().__init__()
                self.automatic_optimization = False

            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        """
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self._automatic_optimization = automatic

    @property
    def strict_loading(self) -> bool:
        """True (default) if a checkpoint must have exactly the module's weight names."""
        return True if self._strict_loading is None else self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self._strict_loading = strict

    @property
    def example_input_array(self) -> Any:
        """Example input for ``forward``, or a tuple of its arguments; for the model summary, loggers and exports."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: object) -> None:
        self._example_input_array = example

    # -- what it does --------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Compute the loss of one micro-batch. Define it as ``training_step(batch, batch_idx)``.

        Returns:
            a scalar loss, the mean over the samples of the batch; a dict with such a ``"loss"``; or None to skip the
            micro-batch. A dict may have a ``"weight"``, such as the number of target tokens: losses are then averaged
            over the window and the ranks with these weights. By default the weight is the number of samples. With
            several loaders the loss may be a dict or list with the structure of the batch,
            ``{"loss": {"a": loss_a, "b": loss_b}}``: each loss is weighted by the samples of its own loader.

        Example::

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = nn.functional.cross_entropy(self.net(x), y)
                self.log("train_loss", loss)
                return loss
        """
        raise NotImplementedError("`training_step` is not defined")

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Evaluate one batch. Define it as ``validation_step(batch, batch_idx, dataloader_idx=0)``.

        It runs in eval mode and without gradients. Values logged here are averaged over the epoch.

        The return value is only passed to ``on_validation_batch_end``.

        Example::

            def validation_step(self, batch, batch_idx):
                x, y = batch
                self.log("val_acc", (self.net(x).argmax(dim=-1) == y).float().mean(), prog_bar=True)
        """
        raise NotImplementedError("`validation_step` is not defined")

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Evaluate one batch. Define it as ``test_step(batch, batch_idx, dataloader_idx=0)``; see `validation_step`."""
        raise NotImplementedError("`test_step` is not defined")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch. Define it as ``predict_step(batch, batch_idx, dataloader_idx=0)``.

        The default returns ``self(batch)``.

        Example::

            def predict_step(self, batch, batch_idx):
                return self.net(batch[0]).argmax(dim=-1)
        """
        return self(kwargs.get("batch", args[0] if args else None))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create the optimizers and schedulers. Called once per fit, when the parameters are on their device.

        Returns:
            an optimizer; a list of them; a pair of lists (optimizers, schedulers); or a dict with ``"optimizer"`` and
            ``"lr_scheduler"``, which is a scheduler or a dict with ``"scheduler"``, ``"interval"`` ("epoch", the
            default, or "step"), ``"frequency"`` and ``"monitor"``.

        Example::

            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        """
        raise NotImplementedError("`configure_optimizers` is not defined")

    def configure_callbacks(self) -> Any:
        """Return a callback or a list of callbacks. Each callback replaces the Trainer's callbacks of the same type.

        Example::

            def configure_callbacks(self):
                return [EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss")]
        """
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
        """Log a value. A mean over the epoch or over the ranks is weighted by the number of samples.

        Args:
            name: key in loggers and ``callback_metrics``. With both on_step and on_epoch, the suffix ``_step`` or
                ``_epoch`` is added.
            value: number, tensor of one element, or torchmetrics object.
            prog_bar, logger: show the value in the progress bar (default False), send it to the loggers (default True).
            on_step: log the newest value; default: True in training hooks.
            on_epoch: log the reduction over the epoch; default: True in evaluation and epoch hooks.
            reduce_fx: reduction over steps and ranks: "mean", "sum", "min" or "max".
            sync_dist: reduce on_step values over the ranks before each ``on_train_batch_end``. By default they are
                reduced when they go to loggers. Values of an epoch are always reduced.
            add_dataloader_idx: with several evaluation loaders, add ``/dataloader_idx_N`` to the name.
            batch_size: weight of this value, in place of the number of samples.
            rank_zero_only: use the value of rank 0 alone.
            enable_graph, sync_dist_group, metric_attribute: unused; for scripts written for Lightning.

        Raises:
            MisconfigurationException: another kind of value, or a hook in which nothing can be logged.

        Example::

            self.log("val_loss", loss, prog_bar=True)
        """
        trainer = self._trainer
        if trainer is None:
            warn_once(f"self.log({name!r}, ...) has no effect without a Trainer.", key="log without trainer")
            return
        if sync_dist_group is not None:
            warn_once(
                f"self.log({name!r}, sync_dist_group=...) has no effect: values are reduced over all ranks.",
                key="log sync_dist_group",
            )
        elif enable_graph:
            warn_once(
                f"self.log({name!r}, enable_graph=...) has no effect: values are detached from the graph.",
                key="log enable_graph",
            )
        options = (prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist)
        results, kind = trainer.session.results, type(value)
        table = results.table
        sized = not STATE.recomputing and (batch_size is None or (type(batch_size) is int and batch_size > 0))
        if sized and (kind is Tensor or kind is float) and table is not None and not results.muted:
            entry = table.get(name)
            quick = value.dtype if kind is Tensor else float  # type: ignore[union-attr]
            if entry is not None and quick is entry.quick and entry.options == options:
                # Most values end here, without another call, which costs 1 µs when the processor's cache is cold.
                try:
                    number = value.item() if kind is Tensor else value  # type: ignore[union-attr]
                except RuntimeError:  # more than one element: `results.log` explains it
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
        """Log every item in a dict or torchmetrics ``MetricCollection``; options are those of :meth:`log`.

        Args:
            dictionary: values by name, each as in :meth:`log`.

        Example::

            self.log_dict({"loss": loss, "accuracy": accuracy}, on_epoch=True)
        """
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on rank 0 only, above the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    def all_gather(self, data: object, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Gather the tensors of ``data`` from all ranks. Collective: call it on every rank.

        Args:
            data: tensor, number, or nested collection of them, with the same shapes on all ranks.
            group: process group; None: all ranks.
            sync_grads: let gradients flow back to the rank that a slice comes from.

        Returns:
            a collection like ``data``, with tensors of shape ``(world_size, *shape)``; on one process tensors of
            their own shape.

        Example::

            scores = self.all_gather(scores)  # (world_size, batch, classes); on one process (batch, classes)
        """
        strategy = self.trainer.strategy

        def gather(value: Tensor | float) -> Tensor:
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, device=strategy.root_device)
            return strategy.all_gather(tensor, group=group, sync_grads=sync_grads)

        return tree_map(gather, data, (Tensor, bool, int, float))

    # -- optimization --------------------------------------------------------------------------------------

    def optimizers(self, use_pl_optimizer: bool = True) -> OneOptimizerOrSeveral:
        """Return the optimizer from ``configure_optimizers``; a list if there are several.

        Args:
            use_pl_optimizer: True: wrappers whose ``step`` runs the hooks and is counted; False: torch's optimizers.
        """
        found: list[Any] = list(self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers)
        either: Any = found[0] if len(found) == 1 else found
        # a type that checkers accept both as an optimizer and as a list: a union would be an error in either use
        return cast("OneOptimizerOrSeveral", either)

    def lr_schedulers(self) -> LRSchedulerTypeUnion | list[LRSchedulerTypeUnion] | None:
        """Return the scheduler from ``configure_optimizers``; a list if there are several; None if there is none."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization, with the precision's loss scale and the reduction over the ranks.

        Args:
            loss: scalar to differentiate.
            args: further arguments of ``torch.Tensor.backward``.
            kwargs: further arguments of ``torch.Tensor.backward``, such as ``retain_graph=True``.

        Raises:
            MisconfigurationException: ``automatic_optimization`` is True.
        """
        if self.automatic_optimization:
            raise MisconfigurationException(
                "manual_backward() was called under automatic optimization; set `self.automatic_optimization = False`, "
                "or remove the call and return the loss."
            )
        self.trainer.fit_loop.step.manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``. Override it to replace ``loss.backward()``.

        Args:
            loss: scalar tensor, already multiplied by the micro-batch's share of the window and, under "16-mixed", by
                the loss scale.
            args, kwargs: further arguments of ``torch.Tensor.backward``.
        """
        loss.backward(*args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Set ``requires_grad=False`` for parameters of other optimizers, until :meth:`untoggle_optimizer`.

        Args:
            optimizer: optimizer whose parameters stay as they are.
        """
        wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in wanted:
                        # the first value counts: a second toggle must not record the False of the first
                        self._toggled.setdefault(parameter, parameter.requires_grad)
                        self.trainer.strategy.set_requires_grad(parameter, False)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Restore ``requires_grad`` of the parameters that :meth:`toggle_optimizer` has changed.

        Args:
            optimizer: unused, because all changes are undone; for scripts written for Lightning.
        """
        for parameter, needed in self._toggled.items():
            self.trainer.strategy.set_requires_grad(parameter, needed)
        self._toggled = {}

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Run a ``with`` block between :meth:`toggle_optimizer` and :meth:`untoggle_optimizer`.

        Args:
            optimizer: as in :meth:`toggle_optimizer`.

        Example::

            with self.toggled_optimizer(generator_optimizer):
                self.manual_backward(self.generator_loss(batch))
                generator_optimizer.step()
        """
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
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: optimizer of the parameters.
            gradient_clip_val: bound; None: the Trainer's, if it has one; 0: no clipping.
            gradient_clip_algorithm: "norm" (total 2-norm over all parameters) or "value" (each element); None: the
                Trainer's.
        """
        self.trainer.fit_loop.step.update.clip(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients at the end of an accumulation window. Override it for another kind of clipping.

        The arguments are those of :meth:`clip_gradients`, with the values of the Trainer's flags.

        Example::

            def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
                self.clip_gradients(optimizer, 1.0 if self.current_epoch < 5 else 0.5, "norm")
        """
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer at the end of an accumulation window.

        An override must run ``optimizer_closure``, which runs the last forward and backward of the window, or pass it
        to ``optimizer.step``.

        Args:
            epoch: current epoch, from 0.
            batch_idx: number of the window's last batch in the epoch, from 0.
            optimizer: optimizer to step.
            optimizer_closure: function without arguments that returns the loss.

        Example::

            def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
                for group in optimizer.param_groups:
                    group["lr"] = 1e-3 * min(1.0, (self.global_step + 1) / 500)
                optimizer.step(closure=optimizer_closure)
        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Set the gradients of the last accumulation window to None.

        Args:
            epoch: current epoch, from 0.
            batch_idx: number of the batch in the epoch, from 0.
            optimizer: optimizer whose gradients are set to None.
        """
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: LRSchedulerTypeUnion, metric: SupportsFloat | None) -> None:
        """Step a scheduler; ``metric`` is the value that the scheduler monitors, or None.

        Args:
            scheduler: scheduler from ``configure_optimizers``.
            metric: number or scalar tensor; None without a ``"monitor"``.
        """
        if metric is None and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        else:
            scheduler.step(metric)  # type: ignore[arg-type]  # schedulers other than ReduceLROnPlateau may take one too

    def freeze(self) -> Self:
        """Set ``requires_grad=False`` for all parameters, switch to eval mode, and return the module."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Set ``requires_grad=True`` for all parameters, switch to train mode, and return the module."""
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
        """Create a module from the hyperparameters and weights of a checkpoint.

        Args:
            checkpoint_path: file or folder written by lockstep or by Lightning 2.x, or a binary file object.
            map_location: device of the checkpoint's tensors and of the module, as in ``torch.load``. By default the
                device that the tensors were saved from, or the CPU if there is no such device.
            hparams_file: YAML or CSV file of hyperparameters, in place of the checkpoint's.
            strict: True if names of weights must match exactly; default: the module's ``strict_loading``.
            weights_only: False: unpickle any object in the file, which may run code; only for files you trust.
            **kwargs: arguments of ``__init__``, which override or complete the saved arguments.

        Raises:
            CorruptCheckpoint: the file is truncated, altered, or not a checkpoint.
            MisconfigurationException: ``__init__`` needs an argument that neither the file nor ``kwargs`` has; or
                `strict` contradicts the module's ``strict_loading``.
            FileNotFoundError: the file does not exist.
            RuntimeError: `strict` applies, and names or shapes of weights differ.

        Example::

            model = Classifier.load_from_checkpoint("best.ckpt", map_location="cpu", lr=1e-4)
        """
        from lockstep.checkpoint.sharded import load  # a run that loads none does without folders of parts

        checkpoint = load(checkpoint_path, map_location or where_there_is_a_device, weights_only)
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
        """Export ``forward`` to ONNX, in eval mode.

        Args:
            file_path: path or buffer to write to; None: nothing is written.
            input_sample: input of ``forward``, a tuple for several; None: ``example_input_array``. The batch transfer
                hooks of the module are applied to it.
            **kwargs: further arguments of ``torch.onnx.export``.

        Returns:
            torch's ``ONNXProgram``; None with ``dynamo=False``.

        Raises:
            ModuleNotFoundError: `onnx` or `onnxscript` is not installed.
            MisconfigurationException: there is no input to export with.

        Example::

            model.to_onnx("model.onnx", input_sample=torch.zeros(1, 64))
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
            # the default exporter of torch takes a path, but no buffer
            program: Any = torch.onnx.export(self, sample, None, **kwargs)
            file_path.write(program.model_proto.SerializeToString())
            return program
        finally:
            self.train(training)

    @torch.no_grad()
    @contextmanager
    def _seen_by_torchscript(self) -> Iterator[None]:
        """Let TorchScript read all properties in the ``with`` block, also those that raise without a Trainer."""
        # properties that need a Trainer now raise AttributeError, which torch skips, and not RuntimeError
        trainer, self._trainer = self._trainer, object()  # type: ignore[assignment]
        try:
            yield
        finally:
            self._trainer = trainer

    def to_torchscript(self, *args: object, **kwargs: object) -> Any:
        """Raise an error, because torch has deprecated TorchScript. Use ``torch.export.export`` or :meth:`to_onnx`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.to_torchscript(): torch has deprecated TorchScript; use "
            "torch.export.export(module, args), or to_onnx(path)."
        )

    def to_tensorrt(self, *args: object, **kwargs: object) -> Any:
        """Raise an error, because TensorRT is not supported. TensorRT can read the files that :meth:`to_onnx` writes.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.to_tensorrt(): lockstep does not export to TensorRT; call `to_onnx(path)`, whose "
            "file TensorRT reads, or torch_tensorrt.compile(module, ...)."
        )

    def _sample(self, given: object) -> Any:
        """Return an example input for ``forward``, moved to the module's device by the batch transfer hooks."""
        sample = self.example_input_array if given is None else given
        if sample is None:
            raise MisconfigurationException(
                f"{type(self).__name__}.to_onnx(path, input_sample): there is no input to export with; pass one, or "
                "set `self.example_input_array`."
            )
        sample = self.on_before_batch_transfer(sample, 0)
        sample = self.transfer_batch_to_device(sample, self.device, 0)
        return self.on_after_batch_transfer(sample, 0)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_trainer"] = None
        return state


# Properties of the Trainer's state are not part of a model's forward, and TorchScript could not compile them.
LightningModule.__jit_unused_properties__ = [
    name for kind in LightningModule.__mro__ for name, value in vars(kind).items() if isinstance(value, property)
]


def check_weights(checkpoint: dict[str, Any], path: str | PathLike[str]) -> None:
    """Raise CorruptCheckpoint if ``checkpoint``, which torch read from ``path``, has no "state_dict"."""
    if "state_dict" not in checkpoint:
        raise CorruptCheckpoint(
            f"{str(path)!r} is not a checkpoint of lockstep or Lightning: it has no 'state_dict' (its keys: "
            f"{sorted(map(str, checkpoint))[:8]}). Load weights alone with `module.load_state_dict(torch.load(path))`."
        )


def _load_weights(module: LightningModule, checkpoint: dict[str, Any], strict: bool | None) -> None:
    """Load a checkpoint's weights. If ``strict`` is False, warn about names that the module or the file lacks.

    Args:
        module: module to load into.
        checkpoint: loaded checkpoint.
        strict: True if names must match exactly; None: the module's ``strict_loading``.
    """
    if strict is not None and module._strict_loading not in (None, strict):
        raise MisconfigurationException(
            f"load_from_checkpoint(strict={strict}): {type(module).__name__} has set strict_loading = "
            f"{module._strict_loading}; omit `strict`, or set both to the same value."
        )
    strict = module.strict_loading if strict is None else strict
    weights, absent = checkpoint["state_dict"], frozen.absent_of(checkpoint, module)
    if strict and absent is not None:
        # a checkpoint with trainable_only has no frozen weights: check that the module's are those that it belongs to
        named = dict(module.named_parameters())
        frozen.check(checkpoint, module, named, f"{type(module).__name__}.load_from_checkpoint")
        weights = {**weights, **{name: named[name].detach() for name in absent if name in named}}
    keys = module.load_state_dict(weights, strict=strict)
    if not strict and keys is not None:
        for names, where in (
            (keys.missing_keys, "in the module but not in the checkpoint, and keep their initial values"),
            (keys.unexpected_keys, "in the checkpoint but not in the module, and are ignored"),
        ):
            if names:
                rank_zero_warn(f"{type(module).__name__}: weights that are {where}: {', '.join(names)}.")
