"""Runs small scenarios through a trainer, Lightning's or ours, and writes down every hook that was called.

Each call is one line: who and what, then what could be seen at that moment. For example::

    callback.on_train_batch_start batch=1 | step=1 epoch=0 grad=yes train

``step`` and ``epoch`` are the trainer's counters, ``grad`` says whether any parameter of the module has a
gradient, ``train`` or ``eval`` is the module's mode; ``no_grad``, ``last`` (``trainer.is_last_batch``) and
``sanity`` stand there when they hold.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

STAGES = ("train", "validation", "test", "predict")

# Called at the same points on a module and on a callback.
SHARED_HOOKS = [
    *("setup", "teardown", "on_fit_start", "on_fit_end"),
    *(f"on_{stage}_{point}" for stage in STAGES for point in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{point}" for stage in STAGES for point in ("start", "end")),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *("on_save_checkpoint", "on_load_checkpoint"),
]
CALLBACK_HOOKS = [*SHARED_HOOKS, "on_sanity_check_start", "on_sanity_check_end", "on_exception"]
MODULE_HOOKS = [*SHARED_HOOKS, "prepare_data", "configure_model", "configure_callbacks", "on_predict_model_eval"]
MODULE_HOOKS += [f"on_{stage}_model_{mode}" for stage in ("validation", "test") for mode in ("eval", "train")]
# Methods that do work, which may go another way where nobody overrides them: overridden in some scenarios.
WORKING_HOOKS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward"]
WORKING_HOOKS += ["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"]
DATA_HOOKS = ["prepare_data", "setup", "teardown", "on_exception"]


@dataclass(frozen=True)
class Scenario:
    """One way of training: the Trainer's flags and the shape of the module."""

    flags: dict[str, Any] = field(default_factory=dict)
    calls: tuple[str, ...] = ("fit",)
    overrides: bool = False  # the module overrides WORKING_HOOKS
    manual: bool = False  # manual optimization with two optimizers
    lbfgs: bool = False
    scheduler: str | None = None  # "epoch", "step" or "plateau"
    datamodule: bool = False
    loaders: int = 1  # of each evaluation stage
    train_loaders: int = 1
    iterable: bool = False  # training data without a length
    checkpoint_every: int = 0  # ModelCheckpoint(every_n_train_steps=...)
    act: str | None = None  # in training batch 2: "raise", "stop", "skip" (return None) or "end_epoch" (return -1)


SCENARIOS = {
    "fit": Scenario({"max_epochs": 2}),
    "fit_overridden": Scenario({"max_epochs": 2}, overrides=True, scheduler="step"),
    "accumulate_2": Scenario({"max_epochs": 2, "accumulate_grad_batches": 2}),
    "accumulate_2_overridden": Scenario({"accumulate_grad_batches": 2}, overrides=True, scheduler="epoch"),
    "accumulate_by_epoch": Scenario({"max_epochs": 2, "accumulate_grad_batches": {0: 3, 1: 2}}),
    "clip": Scenario({"gradient_clip_val": 0.1}, overrides=True),
    "validation_every_2_batches": Scenario({"max_epochs": 2, "val_check_interval": 2}),
    "validation_every_half": Scenario({"val_check_interval": 0.5, "accumulate_grad_batches": 2}),
    "validation_across_epochs": Scenario({"max_epochs": 2, "val_check_interval": 3, "check_val_every_n_epoch": None}),
    "validation_every_2_epochs": Scenario({"max_epochs": 4, "check_val_every_n_epoch": 2}),
    "validation_several_loaders": Scenario(loaders=2),
    "no_validation": Scenario({"limit_val_batches": 0}),
    "sanity_check": Scenario({"num_sanity_val_steps": 1}),
    "manual": Scenario({"max_epochs": 2}, manual=True),
    "manual_overridden": Scenario(manual=True, overrides=True),
    "lbfgs": Scenario(lbfgs=True),
    "scheduler_by_epoch": Scenario({"max_epochs": 2}, scheduler="epoch"),
    "scheduler_by_step": Scenario({"accumulate_grad_batches": 2}, scheduler="step"),
    "scheduler_on_plateau": Scenario({"max_epochs": 2}, scheduler="plateau"),
    "datamodule": Scenario(calls=("fit", "validate", "test", "predict"), datamodule=True),
    "train_several_loaders": Scenario(train_loaders=2),
    "iterable": Scenario({"accumulate_grad_batches": 2}, iterable=True),
    "max_steps": Scenario({"max_epochs": -1, "max_steps": 7}),
    "max_steps_accumulate": Scenario({"max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 2}),
    "stop_in_epoch": Scenario({"max_epochs": 2}, act="stop"),
    "skip_batch": Scenario(act="skip"),
    "end_epoch": Scenario({"max_epochs": 2}, act="end_epoch"),
    "exception": Scenario(act="raise"),
    "fast_dev_run": Scenario({"fast_dev_run": 2}),
    "limits": Scenario({"limit_train_batches": 3, "limit_val_batches": 1}),
    "validate": Scenario(calls=("validate",), loaders=2),
    "test": Scenario(calls=("test",), loaders=2),
    "predict": Scenario(calls=("predict",), loaders=2),
    "test_overridden": Scenario(calls=("test", "predict"), overrides=True),
    "checkpoints": Scenario({"max_epochs": 2}, checkpoint_every=2),
    "checkpoints_accumulate": Scenario({"accumulate_grad_batches": 2}, checkpoint_every=1),
    "resume": Scenario({"max_epochs": 1}, calls=("fit", "resume")),
}


class Recorder:
    """The lines written so far, and what is needed to write the next."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.trainer: Any = None
        self.module: nn.Module | None = None

    def note(self, what: str, arguments: dict[str, Any] | None = None) -> None:
        """Write one line; of ``arguments`` only the indices are kept."""
        shown = {"batch_idx": "batch", "dataloader_idx": "loader", "stage": "stage"}
        given = {shown[name]: value for name, value in (arguments or {}).items() if name in shown}
        words = [what, *(f"{name}={getattr(value, 'value', value)}" for name, value in given.items()), "|"]
        if self.trainer is not None:
            words += [f"step={self.trainer.global_step}", f"epoch={self.trainer.current_epoch}"]
        if self.module is not None:
            grads = any(parameter.grad is not None for parameter in self.module.parameters())
            words += [f"grad={'yes' if grads else 'no'}", "train" if self.module.training else "eval"]
        if not torch.is_grad_enabled():
            words.append("no_grad")
        if self.trainer is not None:
            words += ["last"] * bool(self.trainer.is_last_batch) + ["sanity"] * bool(self.trainer.sanity_checking)
        self.lines.append(" ".join(words))


def overridden(base: type, owner: str, names: list[str], recorder: Recorder) -> dict[str, Any]:
    """Methods that write a line and go on to ``base``'s, for the body of a class derived from it."""

    def method(name: str) -> Callable[..., Any]:
        original = getattr(base, name)
        signature = inspect.signature(original)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            recorder.note(f"{owner}.{name}", bound.arguments)
            return original(self, *args, **kwargs)

        call.__name__ = name
        call.__signature__ = signature  # type: ignore[attr-defined]  # a trainer may look at what a hook takes
        return call

    return {name: method(name) for name in names}


class Stream(IterableDataset[Tensor]):
    """Five samples and no length."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(10, 4)


def training_data(scenario: Scenario) -> Any:
    """Five batches of two samples; a dict of loaders of five and three batches where two are asked for."""
    first: DataLoader[Tensor] = DataLoader(Stream() if scenario.iterable else torch.ones(10, 4), batch_size=2)  # type: ignore[arg-type]
    if scenario.train_loaders == 1:
        return first
    return {"a": first, "b": DataLoader(torch.ones(6, 4), batch_size=2)}  # type: ignore[arg-type]


def evaluation_data(scenario: Scenario) -> Any:
    """Two batches of two samples, once or several times."""
    loaders = [DataLoader(torch.ones(4, 4), batch_size=2) for _ in range(scenario.loaders)]  # type: ignore[arg-type]
    return loaders if scenario.loaders > 1 else loaders[0]


def make_module(package: Any, scenario: Scenario, recorder: Recorder) -> Any:
    """A linear layer whose hooks are recorded."""
    base: type = package.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            nn.init.constant_(self.layer.weight, 0.5)
            self.automatic_optimization = not scenario.manual

        def step(self, name: str, batch: Any, **indices: int) -> Tensor:
            recorder.note(f"module.{name}", indices)
            if isinstance(batch, dict):
                batch = torch.cat([part for part in batch.values() if part is not None])
            loss: Tensor = self.layer(batch).square().mean()
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.step("training_step", batch, batch_idx=batch_idx)
            if scenario.manual:
                for optimizer in self.optimizers():
                    self.manual_backward(self.layer(torch.ones(2, 4)).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                return None
            if scenario.act == "stop" and batch_idx == 2:
                self.trainer.should_stop = True
            if scenario.act == "raise" and batch_idx == 2:
                raise RuntimeError("planted")
            return None if scenario.act == "skip" and batch_idx == 2 else loss

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            recorder.note("module.on_train_batch_start", {"batch_idx": batch_idx})
            return -1 if scenario.act == "end_epoch" and batch_idx == 2 else None

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            loss = self.step("validation_step", batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)
            self.log("loss", loss, add_dataloader_idx=False) if scenario.loaders == 1 else None

        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.step("test_step", batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
            return self.step("predict_step", batch, batch_idx=batch_idx, dataloader_idx=dataloader_idx)

        def configure_optimizers(self) -> Any:
            recorder.note("module.configure_optimizers")
            return make_optimizers(self, scenario, recorder)

    names = [*MODULE_HOOKS, *(WORKING_HOOKS if scenario.overrides else [])]
    methods = overridden(base, "module", [name for name in names if name != "on_train_batch_start"], recorder)
    if not scenario.datamodule:
        methods |= loader_methods("module", scenario, recorder)
    return type("RecordedModule", (Module,), methods)()


def make_optimizers(module: Any, scenario: Scenario, recorder: Recorder) -> Any:
    """What ``configure_optimizers`` returns; updates, zeroing and scheduler steps are recorded."""

    def watched(kind: type[torch.optim.Optimizer], parameters: Any, **settings: Any) -> torch.optim.Optimizer:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def zero_grad(self, set_to_none: bool = True) -> None:
                super().zero_grad(set_to_none)
                recorder.note("optimizer zeroed")

        optimizer = Watched(parameters, lr=0.01, **settings)
        optimizer.register_step_post_hook(lambda *_: recorder.note("optimizer updated"))
        return optimizer

    if scenario.manual:
        return [watched(torch.optim.SGD, [part]) for part in module.layer.parameters()]
    if scenario.lbfgs:
        return watched(torch.optim.LBFGS, module.parameters(), max_iter=2)
    optimizer = watched(torch.optim.SGD, module.parameters())
    if scenario.scheduler is None:
        return optimizer
    scheduler: Any
    if scenario.scheduler == "plateau":
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    else:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    step = scheduler.step

    def stepped(*args: Any, **kwargs: Any) -> None:
        recorder.note("scheduler stepped")
        step(*args, **kwargs)

    scheduler.step = stepped
    interval = "step" if scenario.scheduler == "step" else "epoch"
    config = {"scheduler": scheduler, "interval": interval, "monitor": "loss"}
    return {"optimizer": optimizer, "lr_scheduler": config}


def loader_methods(owner: str, scenario: Scenario, recorder: Recorder) -> dict[str, Any]:
    """The four methods that give data, for the body of a module or a data module."""

    def method(name: str, make: Callable[[Scenario], Any]) -> Callable[[Any], Any]:
        def loader(self: Any) -> Any:
            recorder.note(f"{owner}.{name}")
            return make(scenario)

        return loader

    makers = {"train": training_data, **dict.fromkeys(("val", "test", "predict"), evaluation_data)}
    return {f"{stage}_dataloader": method(f"{stage}_dataloader", make) for stage, make in makers.items()}


def make_trainer(package: Any, scenario: Scenario, recorder: Recorder, folder: str, **flags: Any) -> Any:
    """A quiet Trainer with one recording callback, and ModelCheckpoint where the scenario saves."""
    methods = overridden(package.Callback, "callback", CALLBACK_HOOKS, recorder)
    callback = type("RecordedCallback", (package.Callback,), methods)
    callbacks = [callback()]
    if scenario.checkpoint_every:
        checkpoint = importlib.import_module(f"{package.__name__}.callbacks").ModelCheckpoint
        callbacks.append(checkpoint(folder, every_n_train_steps=scenario.checkpoint_every, save_top_k=-1))
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0, **scenario.flags, **flags}
    if isinstance(settings.get("accumulate_grad_batches"), dict) and package.__name__ != "lockstep":
        # Lightning 2 has the dict of its early days as a callback.
        by_epoch = importlib.import_module(f"{package.__name__}.callbacks").GradientAccumulationScheduler
        callbacks.append(by_epoch(settings.pop("accumulate_grad_batches")))
    recorder.trainer = None  # a line written while the next Trainer is made must not show the last one's counters
    recorder.trainer = package.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(scenario.checkpoint_every),
        default_root_dir=folder,
        callbacks=callbacks,
        **settings,
    )
    return recorder.trainer


def record(package_name: str, scenario: Scenario) -> list[str]:
    """Every hook that the package calls in ``scenario``, in order.

    Args:
        package_name: ``"lightning.pytorch"`` or ``"lockstep"``.
        scenario: what to run.
    """
    package = importlib.import_module(package_name)
    recorder = Recorder()
    module = recorder.module = make_module(package, scenario, recorder)
    data = None
    if scenario.datamodule:
        base = package.LightningDataModule
        methods = overridden(base, "data", DATA_HOOKS, recorder) | loader_methods("data", scenario, recorder)
        data = type("RecordedData", (base,), methods)()
    with tempfile.TemporaryDirectory() as folder:
        for call in scenario.calls:
            if call == "resume":
                path = f"{folder}/end.ckpt"
                recorder.trainer.save_checkpoint(path)
                make_trainer(package, scenario, recorder, folder, max_epochs=2).fit(module, ckpt_path=path)
                continue
            trainer = make_trainer(package, scenario, recorder, folder)
            try:
                getattr(trainer, call)(module, datamodule=data)
            except RuntimeError as error:
                if str(error) != "planted":
                    raise
                recorder.note(f"{call} raised")
    return recorder.lines
