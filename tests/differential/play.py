"""Runs a program on Lightning or on lockstep, the same code on both, and writes down all that a user can observe."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.differential import parts
from tests.differential.made_of import Batches, NeedsClosure, Stream, late_layers, samples
from tests.differential.program import Log, Program
from tests.differential.record import Planted, Record, digest, kinds, look_at_files, plain
from tests.differential.warned import quiet
from tests.golden.recorder import CALLBACK_HOOKS, DATA_HOOKS, MODULE_HOOKS, WORKING_HOOKS

STATE = (
    "current_epoch",
    "global_step",
    "callback_metrics",
    "logged_metrics",
    "progress_bar_metrics",
    "num_training_batches",
    "num_val_batches",
    "num_sanity_val_batches",
    "num_test_batches",
    "num_predict_batches",
    "is_last_batch",
    "should_stop",
    "interrupted",
    "sanity_checking",
    "training",
    "validating",
    "testing",
    "predicting",
    "evaluating",
    "received_sigterm",
    "ckpt_path",
    "train_dataloader",
    "val_dataloaders",
    "test_dataloaders",
    "predict_dataloaders",
    "estimated_stepping_batches",
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "val_check_interval",
    "val_check_batch",
    "global_rank",
    "log_dir",
)
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
LOOKED_AT = re.compile(r"on_(train|validation|test)_(batch_end|epoch_end|end)$|on_fit_end|^end$")
"""Where metrics are looked at: Lightning reduces what was logged so far when somebody looks."""
STAGES_OF = {
    "num_training_batches": ("train",),
    "train_dataloader": ("train",),
    "val_check_batch": ("train",),
    "num_sanity_val_batches": ("sanity_check",),
    "num_val_batches": ("sanity_check", "validate"),
    "val_dataloaders": ("sanity_check", "validate"),
    "num_test_batches": ("test",),
    "test_dataloaders": ("test",),
    "num_predict_batches": ("predict",),
    "predict_dataloaders": ("predict",),
}
"""What is looked at only in some stages; what an earlier one has left is nobody's."""
DEAR = ("estimated_stepping_batches", "log_dir")
"""Attributes that do something when they are read: looked at only in on_train_start and at the end."""


signature_of = lru_cache(inspect.signature)
"""Of a hook, which each program overrides anew."""


class Player:
    """One program on one package."""

    def __init__(self, package: str, program: Program, root: Path) -> None:
        self.package, self.program, self.root = package, program, root
        self.pl: Any = importlib.import_module(package)
        self.record = Record()
        self.trainer: Any = None
        self.module: Any = None
        self.counts: Counter[str] = Counter()

    def part(self, name: str) -> ModuleType:
        return importlib.import_module(f"{self.package}.{name}")

    # -- looking

    def state(self, label: str) -> dict[str, Any]:
        """What can be seen of the Trainer and the module now."""
        seen: dict[str, Any] = {}
        trainer, module = self.trainer, self.module
        if trainer is not None:
            for name in STATE:
                if name in DEAR and label not in ("module.on_train_start", "end"):
                    continue
                if name == "estimated_stepping_batches" and label == "end":
                    continue
                stage = STAGES_OF.get(name)
                if stage is not None and (
                    "exception" in label
                    or label == "end"
                    or trainer.state.stage is None
                    or trainer.state.stage.value not in stage
                ):
                    continue
                if name in METRICS and not LOOKED_AT.search(label):
                    continue
                try:
                    seen[name] = plain(getattr(trainer, name), str(self.root))
                except Exception as error:
                    seen[name] = f"raises {type(error).__name__}"
            seen["state"] = [plain(getattr(trainer.state, name)) for name in ("fn", "status", "stage")]
            optimizers = trainer.optimizers
            seen["rates"] = [
                [group["lr"] for group in optimizer.param_groups if "lr" in group] for optimizer in optimizers
            ]
            seen["schedulers"] = [
                [type(c.scheduler).__name__, c.interval, c.frequency, c.monitor, c.name]
                for c in trainer.lr_scheduler_configs
            ]
        if module is not None:
            seen["weights"] = digest(module)
            seen["trained"] = [p.requires_grad for p in module.parameters()]
            seen["mode"] = [part.training for part in module.modules()]
            seen["gradients"] = [p.grad is not None for p in module.parameters()]
        seen["grad mode"] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        return seen

    def note(self, label: str, arguments: dict[str, Any] | None = None) -> None:
        """One event."""
        facts = self.state(label)
        if arguments is not None:
            facts["arguments"] = {name: self.argument(name, value) for name, value in arguments.items()}
        self.record.events.append((label, facts))

    def argument(self, name: str, value: Any) -> Any:
        if name == "checkpoint" and isinstance(value, dict):
            return sorted(set(value) & {"epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers"})
        return plain(value, str(self.root))

    def act(self, hook: str) -> str | None:
        """Play what the program planted at this call of a hook of the module."""
        self.counts[hook] += 1
        for act in self.program.acts:
            if act.hook == hook and act.nth == self.counts[hook]:
                if act.kind == "raise":
                    raise Planted(hook)
                if act.kind == "interrupt":
                    raise KeyboardInterrupt
                if act.kind == "stop":
                    self.trainer.should_stop = True
                return act.kind
        return None

    def logs(self, owner: str, hook: str, target: Any, value: Tensor | None = None, batch: int | None = None) -> None:
        """The calls of ``log`` of one hook, in the batch of this number."""
        for log in self.program.logs:
            if log.owner == owner and log.hook == hook and (batch or 0) % log.every == 0:
                self.log(log, target, value)

    def log(self, log: Log, target: Any, value: Tensor | float | None) -> None:
        counted = f"log {log.name}" + (" in the sanity check" if self.trainer.sanity_checking else "")
        self.counts[counted] += 1
        number = value if value is not None else float(self.counts[counted])
        target.log(log.name, number, **log.settings)

    # -- making

    def overridden(self, base: type, owner: str, names: list[str]) -> dict[str, Any]:
        """Methods that record the call, act, log and go on to the base's."""

        def method(name: str) -> Callable[..., Any]:
            original = getattr(base, name)
            signature = signature_of(original)

            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                bound = signature.bind(this, *args, **kwargs)
                bound.apply_defaults()
                left_out = ("self", "trainer", "pl_module", "args", "kwargs")
                given = {key: value for key, value in bound.arguments.items() if key not in left_out}
                self.note(f"{owner}.{name}", given)
                if owner == "module":
                    self.act(name)
                if owner == "callback":
                    self.act(f"callback.{name}")
                if owner != "data":
                    self.logs(owner, name, this, batch=given.get("batch_idx"))
                return original(this, *args, **kwargs)

            call.__name__ = name
            call.__signature__ = signature  # type: ignore[attr-defined]
            return call

        return {name: method(name) for name in names}

    def loader_methods(self, owner: str) -> dict[str, Any]:
        def method(stage: str) -> Callable[[Any], Any]:
            def loader(this: Any) -> Any:
                self.note(f"{owner}.{stage}_dataloader")
                self.act(f"{stage}_dataloader")
                return self.loaders(stage)

            loader.__name__ = f"{stage}_dataloader"
            return loader

        stages = ("train", "val", "test", "predict") if self.program.val_loaders else ("train", "test", "predict")
        return {f"{stage}_dataloader": method(stage) for stage in stages}

    def loaders(self, stage: str) -> Any:
        """The loaders of a stage."""
        program = self.program
        if stage == "train":
            return self.training_loaders()
        sizes = program.val_loaders or (4,)
        made = [
            DataLoader(samples(program.seed + 10 + place, size), batch_size=program.batch_size)
            for place, size in enumerate(sizes)
        ]
        return made if len(made) > 1 else made[0]

    def training_loaders(self) -> Any:
        program = self.program
        first, second = (samples(program.seed + place, size) for place, size in enumerate(program.train_samples))
        size, kind = program.batch_size, program.train
        if kind == "iterable":
            return DataLoader(Stream(first), batch_size=size)
        if kind == "batches":
            return Batches([torch.stack(first[place : place + size]) for place in range(0, len(first), size)])
        if kind in ("in order", "shuffled", "drop_last"):
            source = torch.Generator().manual_seed(program.seed) if kind == "shuffled" else None
            return DataLoader(
                first, batch_size=size, shuffle=source is not None, drop_last=kind == "drop_last", generator=source
            )
        pair: Any = [DataLoader(first, batch_size=size), DataLoader(second, batch_size=size)]
        if kind.startswith("dict"):
            pair = dict(zip("ab", pair, strict=True))
        combined = self.part("utilities.combined_loader").CombinedLoader
        return combined(pair, mode=kind.split()[-1])

    def make_module(self) -> Any:
        program, player = self.program, self
        base = self.pl.LightningModule

        class Module(base):  # type: ignore[misc]
            def __init__(self, width: int = 4) -> None:
                super().__init__()
                if program.hyperparameters:
                    self.save_hyperparameters()
                self.width = width
                self.lr = 0.05
                if not program.late:
                    self.layers()
                self.automatic_optimization = not program.manual

            def layers(self) -> None:
                self.first = nn.Linear(3, self.width)
                if program.backbone:
                    self.backbone = self.first
                self.norm = nn.BatchNorm1d(self.width) if program.norm else nn.Identity()
                self.last = nn.Linear(self.width, 1)

            def loss(self, batch: Any) -> Tensor:
                if isinstance(batch, (dict, list, tuple)):
                    parts = batch.values() if isinstance(batch, dict) else batch
                    batch = torch.cat([part for part in parts if isinstance(part, Tensor)])
                batch = batch.to(self.first.weight.dtype)
                return (self.last(torch.tanh(self.norm(self.first(batch)))) - 1).square().mean()

            def evaluate(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> Tensor:
                player.note(
                    f"module.{name}", {"batch": batch, "batch_idx": batch_idx, "dataloader_idx": dataloader_idx}
                )
                player.act(name)
                loss = self.loss(batch)
                if name != "predict_step":
                    player.logs("module", name, self, loss, batch_idx)
                return loss

            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
                return self.evaluate("validation_step", batch, batch_idx, dataloader_idx)

            def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
                return self.evaluate("test_step", batch, batch_idx, dataloader_idx)

            def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
                return self.evaluate("predict_step", batch, batch_idx, dataloader_idx)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                player.note("module.training_step", {"batch": batch, "batch_idx": batch_idx})
                act = player.act("training_step")
                loss = self.loss(batch)
                player.logs("module", "training_step", self, loss, batch_idx)
                if program.manual:
                    player.step_by_hand(self, batch)
                    return None
                if act == "skip":
                    return None
                return loss if program.outputs == "tensor" else {"loss": loss, "more": loss.detach() * 2}

            def configure_optimizers(self) -> Any:
                player.note("module.configure_optimizers")
                player.act("configure_optimizers")
                return player.configure(self)

        methods: dict[str, Any] = {}
        if program.hooks != "callback":
            methods |= self.overridden(base, "module", MODULE_HOOKS)
        if program.hooks == "working":
            methods |= self.overridden(base, "module", WORKING_HOOKS)
        if program.late:
            methods |= {"configure_model": late_layers(methods.get("configure_model"))}
        if program.data == "module":
            methods |= self.loader_methods("module")
        torch.manual_seed(program.seed)
        return type("Module", (Module,), methods)()

    def step_by_hand(self, module: Any, batch: Any) -> None:
        """One batch of a manual ``training_step``."""
        given = module.optimizers()
        several = isinstance(given, list)
        for optimizer in given if several else [given]:
            module.toggle_optimizer(optimizer) if several else None
            module.manual_backward(module.loss(batch))
            if self.program.seed % 3 == 0:
                module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            module.untoggle_optimizer(optimizer) if several else None
        if not (self.program.manual_steps and self.program.schedulers):
            return
        schedulers = module.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()

    def configure(self, module: Any) -> Any:
        """What ``configure_optimizers`` returns."""
        program = self.program
        if program.optimizers == ("none",):
            return None
        parameters = [each for each in module.parameters() if each.requires_grad or not program.backbone]
        count = len(program.optimizers)
        made = [
            self.optimizer(kind, parameters[place::count] if count > 1 else parameters, module.lr)
            for place, kind in enumerate(program.optimizers)
        ]
        if not program.schedulers:
            return made if count > 1 else made[0]
        found = []
        module_of = torch.optim.lr_scheduler
        for optimizer, scheduler in zip(made, program.schedulers, strict=True):
            thing: Any = {
                "step": lambda o: module_of.StepLR(o, 2, 0.5),
                "exponential": lambda o: module_of.ExponentialLR(o, 0.9),
                "cosine": lambda o: module_of.CosineAnnealingLR(o, 4),
                "plateau": lambda o: module_of.ReduceLROnPlateau(o, patience=0, threshold=0.5),
            }[scheduler.kind](optimizer)
            found.append({"optimizer": optimizer, "lr_scheduler": {"scheduler": thing, **scheduler.settings}})
        return tuple(found) if count > 1 else found[0]

    def optimizer(self, kind: str, parameters: list[Any], rate: float) -> torch.optim.Optimizer:
        base: Any = {
            "sgd": torch.optim.SGD,
            "adam": torch.optim.Adam,
            "lbfgs": torch.optim.LBFGS,
            "closure": NeedsClosure,
        }[kind]
        player = self

        class Watched(base):  # type: ignore[misc]
            def zero_grad(self, set_to_none: bool = True) -> None:
                super().zero_grad(set_to_none)
                player.note("optimizer.zeroed")

        settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01} if kind == "sgd" else {}
        if kind == "lbfgs":
            settings["max_iter"] = 2
        optimizer = Watched(parameters, lr=rate, **settings)
        optimizer.register_step_post_hook(lambda *_: player.note("optimizer.updated"))
        return optimizer  # type: ignore[no-any-return]

    def make_callbacks(self) -> list[Any]:
        recording = type(
            "Recording",
            (self.pl.Callback,),
            {
                **self.overridden(self.pl.Callback, "callback", CALLBACK_HOOKS),
                "state_dict": lambda _: {"calls": 1},
                "load_state_dict": lambda _, state: self.note("callback.load_state_dict", {"state": state}),
            },
        )
        made = [recording()]
        for kind, settings in self.program.callbacks:
            given = dict(settings)
            if "dirpath" in given:
                given["dirpath"] = str(self.root / given["dirpath"])
            made.append(
                parts.writer(self, **given) if kind == "Writer" else getattr(self.part("callbacks"), kind)(**given)
            )
        return made

    def make_loggers(self) -> Any:
        made: list[Any] = []
        for kind in self.program.loggers:
            if kind == "csv":
                made.append(self.part("loggers").CSVLogger(str(self.root / "logs")))
            else:
                made.append(self.rows_logger())
        return made or False

    def rows_logger(self) -> Any:
        base, record, root = self.part("loggers").Logger, self.record, str(self.root)

        class Rows(base):  # type: ignore[misc]
            name = "rows"
            version = "one"

            def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
                record.rows.append(("hyperparameters", plain(dict(params), root)))

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                record.rows.append((step, plain(metrics)))

            def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
                record.rows.append("saved")

            def finalize(self, status: str) -> None:
                record.rows.append(("finalize", status))

        return Rows()

    def make_trainer(self, **more: Any) -> None:
        flags = {**self.program.flags, **more}
        if self.package == "lockstep":
            flags["order"] = "torch"
            flags["non_finite"] = "ignore"  # Lightning trains on, and what it then does is compared
        self.trainer = self.pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=self.make_loggers(),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=any(kind == "ModelCheckpoint" for kind, _ in self.program.callbacks),
            default_root_dir=str(self.root),
            callbacks=self.make_callbacks(),
            **flags,
        )

    def make_data(self) -> dict[str, Any]:
        if self.program.data != "data module":
            return {}
        base = self.pl.LightningDataModule
        methods = self.overridden(base, "data", DATA_HOOKS) | self.loader_methods("data")
        return {"datamodule": type("Data", (base,), methods)()}

    # -- running

    def play(self) -> Record:
        torch.manual_seed(self.program.seed)
        try:
            self.module = self.make_module()
            self.make_trainer()
            data = self.make_data()
        except Exception as error:
            self.record.ends.append(("construction", {"raised": kinds(error), "message": str(error)}))
            return self.record
        for number, call in enumerate(self.program.calls):
            self.play_call(f"{number} {call}", call, data)
        look_at_files(self.record, self.root)
        return self.record

    def play_call(self, label: str, call: str, data: dict[str, Any]) -> None:
        end: dict[str, Any] = {}
        self.record.events.append((f"call {label}", {}))
        try:
            method, given = self.prepared(call, data)
            if self.program.data == "arguments":
                given.update(self.arguments(method))
            model = None if call.endswith("untold") else self.module
            end["returned"] = plain(getattr(self.trainer, method)(model, **given))
            if method == "fit":
                end["returned"] = None
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            end["raised"] = kinds(error)
            end["message"] = str(error)
        end.update(self.state("end"))
        for callback in self.trainer.callbacks if self.trainer is not None else ():
            end[type(callback).__name__] = self.callback_facts(callback)
        self.record.ends.append((label, end))

    def callback_facts(self, callback: Any) -> dict[str, Any]:
        names = {
            "ModelCheckpoint": (
                "best_model_path",
                "best_model_score",
                "last_model_path",
                "kth_best_model_path",
                "kth_value",
                "current_score",
                "best_k_models",
                "dirpath",
            ),
            "EarlyStopping": ("wait_count", "stopped_epoch", "best_score", "patience"),
            "LearningRateMonitor": ("lrs",),
        }.get(type(callback).__name__, ())
        root = str(self.root)
        found = {name: plain(getattr(callback, name), root) for name in names}
        if "best_k_models" in found:
            found["best_k_models"] = {key.replace(root, "<root>"): v for key, v in found["best_k_models"].items()}
        return found

    def arguments(self, method: str) -> dict[str, Any]:
        if method == "fit":
            given = {"train_dataloaders": self.loaders("train")}
            return given | ({"val_dataloaders": self.loaders("val")} if self.program.val_loaders else {})
        stage = {"validate": "val"}.get(method, method)
        return {"dataloaders": self.loaders(stage)}

    def prepared(self, call: str, data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The Trainer's method of a call, and its arguments."""
        if call == "fit on":
            self.trainer.fit_loop.max_epochs = (self.program.flags["max_epochs"] or 0) + 1
            return "fit", dict(data)
        if call == "predict" and self.program.returns is not None:
            return call, {**data, "return_predictions": self.program.returns}
        if not call.startswith("resume ") and call != "resume":
            method, _, asked = call.partition(" ")
            if asked == "path":
                asked = str(self.root / "here.ckpt")
                self.trainer.save_checkpoint(asked)
            return method, {**data, **({"ckpt_path": asked} if asked not in ("", "untold") else {})}
        path = "last"
        if call != "resume last":
            path = str(self.root / "end.ckpt")
            self.trainer.save_checkpoint(path)
            parts.edit(call, path)
        self.module = self.make_module()
        self.make_trainer(max_epochs=self.program.flags["max_epochs"] + 1)
        return "fit", {**data, "ckpt_path": path}


def play(package: str, program: Program, root: Path) -> Record:
    """Run a program in a folder that is there and empty."""
    player = Player(package, program, root)
    with quiet(player.record):
        player.play()
    return player.record
