"""Random programs for Lightning and lockstep, each drawn from one seed: data only, ``play.py`` runs them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TRAIN_LOADERS = ("in order", "in order", "shuffled", "drop_last", "iterable", "batches")
COMBINED = ("dict max_size_cycle", "dict min_size", "dict max_size", "list min_size")
LOG_HOOKS = (
    "training_step",
    "training_step",
    "training_step",
    "validation_step",
    "validation_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_start",
    "on_before_zero_grad",
    "on_after_backward",
    "on_validation_epoch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_start",
    "test_step",
    "on_test_epoch_end",
)
ACT_HOOKS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "training_step",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_train_end",
    "configure_optimizers",
    "train_dataloader",
    "teardown",
)


@dataclass(frozen=True)
class Log:
    """One call of ``self.log``; ``owner`` is "module" or "callback"."""

    hook: str
    name: str
    owner: str
    settings: dict[str, Any]
    every: int = 1  # in a hook of batches only in each so manieth, the first included


@dataclass(frozen=True)
class Act:
    """What user code does when ``hook`` of the module (of a callback: "callback.x") is called for the ``nth`` time."""

    kind: str  # "raise", "interrupt", "stop" (should_stop), "skip" (training_step returns None)
    hook: str
    nth: int


@dataclass(frozen=True)
class Scheduler:
    """A learning rate scheduler and what ``configure_optimizers`` says of it."""

    kind: str  # "step", "exponential", "plateau", "cosine"
    settings: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """One user's program: the module, its data, its callbacks and loggers, the Trainer's flags and calls."""

    seed: int
    flags: dict[str, Any]
    calls: tuple[str, ...]
    train: str = "in order"
    train_samples: tuple[int, int] = (6, 4)
    batch_size: int = 2
    val_loaders: tuple[int, ...] = (4,)  # samples of each
    data: str = "module"  # who gives the loaders: "module", "data module", "arguments"
    optimizers: tuple[str, ...] = ("sgd",)
    schedulers: tuple[Scheduler, ...] = ()
    manual: bool = False
    manual_steps: bool = False  # a manual module steps its schedulers
    hooks: str = "all"  # which hooks are overridden and recorded: "all", "callback", "working" (those that do work too)
    logs: tuple[Log, ...] = ()
    callbacks: tuple[tuple[str, dict[str, Any]], ...] = ()
    loggers: tuple[str, ...] = ("rows",)
    acts: tuple[Act, ...] = ()
    norm: bool = False
    hyperparameters: bool = False
    outputs: str = "tensor"  # what training_step returns: "tensor", "dict"
    late: bool = False  # layers are made in configure_model
    backbone: bool = False  # the first layer has another name, and the optimizer is given what is trainable alone
    returns: bool | None = None  # ``return_predictions``


LOSS = Log("training_step", "loss", "module", {"on_step": True, "on_epoch": True})
VAL = Log("validation_step", "val", "module", {})
PLAIN = Program(
    seed=0, flags={"max_epochs": 2, "num_sanity_val_steps": 0, "log_every_n_steps": 1}, calls=("fit",), logs=(LOSS,)
)


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    focus = r.choice(("loop", "loop", "logs", "logs", "callbacks", "callbacks", "manual", "acts", "calls", "resume"))
    epochs = r.choice((1, 2, 2, 3))
    flags = _flags(r, epochs, plain=focus not in ("loop", "acts", "resume") and r.random() < 0.6)
    manual = focus == "manual" or (focus != "loop" and r.random() < 0.08)
    if manual:
        for name in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"):
            flags.pop(name, None)
    optimizers = _optimizers(r, manual)
    if optimizers == ("none",):
        flags.pop("gradient_clip_val", None)
    train = r.choice(COMBINED) if r.random() < 0.15 else r.choice(TRAIN_LOADERS)
    validates = r.choice(((), (4,), (4,), (3, 5), (2, 4, 3)))
    if isinstance(flags.get("val_check_interval"), float) and train == "iterable":
        flags["val_check_interval"] = 2
    if train in COMBINED:
        flags.pop("limit_train_batches", None)
    norm, sizes, batch_size = r.random() < 0.15, (r.randint(2, 11), r.randint(2, 9)), r.randint(1, 4)
    if norm:
        sizes, batch_size = (8, 6), 2  # no batch of one sample
    logs = _logs(r, r.randint(3, 7) if focus == "logs" else r.randint(1, 3), bool(validates))
    schedulers = _schedulers(r, optimizers, manual) if focus in ("loop", "resume") or r.random() < 0.4 else ()
    return Program(
        seed=seed,
        flags=flags,
        calls=_calls(r, focus),
        train=train,
        train_samples=sizes,
        batch_size=batch_size,
        val_loaders=validates,
        data=r.choice(("module", "data module", "arguments")),
        optimizers=optimizers,
        schedulers=schedulers,
        manual=manual,
        manual_steps=r.random() < 0.5,
        hooks=r.choice(("all", "all", "callback", "working")),
        logs=tuple(logs),
        callbacks=_callbacks(r, r.randint(1, 3) if focus in ("callbacks", "resume") else r.randint(0, 1), manual),
        loggers=r.choice((("rows",), ("rows",), ("csv",), ("csv", "rows"), ())),
        acts=_acts(r) if focus == "acts" else (),
        norm=norm,
        hyperparameters=r.random() < 0.3,
        outputs=r.choice(("tensor", "dict")),
    )


def _flags(r: random.Random, epochs: int, plain: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {"max_epochs": epochs, "log_every_n_steps": r.choice((1, 1, 2, 3, 50))}
    flags["num_sanity_val_steps"] = r.choice((0, 0, 1, 2, -1))
    if plain:
        return flags
    maybe: list[tuple[float, str, tuple[Any, ...]]] = [
        (0.4, "accumulate_grad_batches", (2, 3, 4)),
        (0.25, "gradient_clip_val", (0.1, 0.01)),
        (0.25, "limit_train_batches", (1, 2, 3, 0.5, 1.0)),
        (0.25, "limit_val_batches", (0, 1, 2, 0.5)),
        (0.15, "limit_test_batches", (0, 1, 0.5)),
        (0.1, "limit_predict_batches", (1, 0.5)),
        (0.25, "val_check_interval", (1, 2, 0.5, 0.34)),
        (0.15, "check_val_every_n_epoch", (2, 3)),
        (0.15, "max_steps", (1, 2, 3, 5)),
        (0.1, "min_epochs", (1, 2)),
        (0.1, "min_steps", (2, 4)),
        (0.06, "overfit_batches", (1, 2, 0.5)),
        (0.05, "fast_dev_run", (True, 2)),
        (0.08, "reload_dataloaders_every_n_epochs", (1, 2)),
        (0.06, "inference_mode", (False,)),
        (0.05, "precision", ("64-true", "bf16-true")),
        (0.04, "detect_anomaly", (True,)),
    ]
    for odds, name, values in maybe:
        if r.random() < odds:
            flags[name] = r.choice(values)
    if "gradient_clip_val" in flags and r.random() < 0.5:
        flags["gradient_clip_algorithm"] = r.choice(("value", "norm"))
    if "val_check_interval" in flags and r.random() < 0.2:
        flags["val_check_interval"] = r.choice((2, 3, 5))
        flags["check_val_every_n_epoch"] = None
    if "fast_dev_run" in flags:
        flags = {name: value for name, value in flags.items() if not name.startswith("min_")}
    return flags


def _optimizers(r: random.Random, manual: bool) -> tuple[str, ...]:
    if manual:
        return tuple(r.choice(("sgd", "adam")) for _ in range(r.choice((1, 2, 2, 3))))
    return (r.choice(("sgd", "sgd", "sgd", "adam", "adam", "lbfgs", "closure", "none")),)


def _schedulers(r: random.Random, optimizers: tuple[str, ...], manual: bool) -> tuple[Scheduler, ...]:
    if optimizers == ("none",):
        return ()
    found = []
    for _ in optimizers:
        kind = r.choice(("step", "exponential", "cosine") if manual else ("step", "exponential", "cosine", "plateau"))
        settings: dict[str, Any] = {"interval": r.choice(("epoch", "step"))}
        if r.random() < 0.4:
            settings["frequency"] = r.choice((1, 2, 3))
        if r.random() < 0.2:
            settings["name"] = "rate"
        if kind == "plateau":
            settings["monitor"] = r.choice(("loss", "val", "loss") if r.random() < 0.3 else ("loss",))
            if r.random() < 0.5:
                settings["strict"] = False
        found.append(Scheduler(kind, settings))
    return tuple(found)


def _logs(r: random.Random, count: int, validates: bool) -> list[Log]:
    logs = [Log("training_step", "loss", "module", {"on_step": True, "on_epoch": True, "prog_bar": True})]
    if validates:
        logs.append(VAL)
    for _ in range(count):
        hook = r.choice(LOG_HOOKS)
        settings: dict[str, Any] = {}
        by_epoch = "batch" not in hook and ("start" in hook or "end" in hook)
        for name in ("on_step", "on_epoch") if not by_epoch else ():
            if r.random() < 0.45:
                settings[name] = r.random() < 0.7
        if not settings.get("on_step", True):
            settings["on_epoch"] = True
        if not settings.get("on_epoch", True):
            settings["on_step"] = True
        if r.random() < 0.3:
            settings["prog_bar"] = True
        if r.random() < 0.2:
            settings["logger"] = False
        if r.random() < 0.25:
            settings["reduce_fx"] = r.choice(("max", "min", "sum", "mean"))
        if r.random() < 0.2:
            settings["batch_size"] = r.choice((1, 3))
        owner = "callback" if not hook.endswith("_step") and r.random() < 0.5 else "module"
        name = r.choice(("a", "b", "c/d", "f_epoch", "g_step", "e"))
        if any(log.name == name for log in logs):
            name = f"{name}{len(logs)}"
        logs.append(Log(hook, name, owner, settings))
    return logs


def _callbacks(r: random.Random, count: int, manual: bool) -> tuple[tuple[str, dict[str, Any]], ...]:
    found: list[tuple[str, dict[str, Any]]] = []
    kinds = ["EarlyStopping", "ModelCheckpoint", "ModelCheckpoint", "ModelCheckpoint", "LearningRateMonitor", "Timer"]
    if not manual:
        kinds += ["StochasticWeightAveraging"]
    for _ in range(count):
        kind = r.choice(kinds)
        if kind != "ModelCheckpoint" and any(kind == other for other, _ in found):
            continue
        found.append((kind, _callback(r, kind)))
    return tuple(found)


def some(r: random.Random, odds: float, **choices: tuple[Any, ...]) -> dict[str, Any]:
    """Some of the arguments, each by its odds, with one of its values."""
    return {name: r.choice(values) for name, values in choices.items() if r.random() < odds}


def _callback(r: random.Random, kind: str) -> dict[str, Any]:
    if kind == "EarlyStopping":
        given = {"monitor": r.choice(("loss", "val", "loss_epoch") if r.random() < 0.4 else ("loss",))}
        return given | some(
            r,
            0.35,
            patience=(0, 1, 2),
            mode=("min", "max"),
            min_delta=(0.0, 0.5, 10.0),
            strict=(False,),
            check_on_train_epoch_end=(True, False),
            stopping_threshold=(0.0, 100.0),
            divergence_threshold=(0.0, 100.0),
            log_rank_zero_only=(True,),
        )
    if kind == "ModelCheckpoint":
        given = some(
            r,
            0.3,
            monitor=("loss", "val", "loss_epoch", "step"),
            mode=("min", "max"),
            save_top_k=(0, 1, 2, -1),
            save_last=(True, "link", False),
            filename=("{epoch}-{step}", "{epoch:02d}-{loss:.2f}", "a/{epoch}"),
            auto_insert_metric_name=(False,),
            save_weights_only=(True,),
            save_on_train_epoch_end=(True, False),
            enable_version_counter=(False,),
            verbose=(True,),
            dirpath=("kept",),
        )
        every = r.choice((None, "every_n_train_steps", "every_n_epochs"))
        if every is not None:
            given[every] = r.choice((1, 2, 3))
        return given
    if kind == "LearningRateMonitor":
        return some(
            r,
            0.5,
            logging_interval=("step", "epoch"),
            log_momentum=(True,),
            log_weight_decay=(True,),
        )
    if kind == "Timer":
        return {"duration": r.choice(({"hours": 5}, {"seconds": 0}))} | some(r, 0.5, interval=("step", "epoch"))
    return {"swa_lrs": 0.02} | some(
        r, 0.5, swa_epoch_start=(1, 2, 0.5), annealing_epochs=(1, 2), annealing_strategy=("cos", "linear")
    )


def _acts(r: random.Random) -> tuple[Act, ...]:
    kind = r.choice(("raise", "interrupt", "stop", "skip"))
    hook = r.choice(ACT_HOOKS)
    if kind == "stop":
        hook = r.choice(("training_step", "on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"))
    if kind == "skip":
        hook = "training_step"
    return (Act(kind, hook, r.choice((1, 1, 2, 3, 4))),)


def _calls(r: random.Random, focus: str) -> tuple[str, ...]:
    if focus == "calls":
        return tuple(r.choice(("fit", "validate", "test", "predict", "test")) for _ in range(r.randint(1, 3)))
    if focus == "resume":
        return ("fit", r.choice(("resume", "resume", "test best", "fit on")))
    return r.choice((("fit",), ("fit",), ("fit", "test"), ("fit", "validate"), ("fit", "predict"), ("fit", "fit on")))
