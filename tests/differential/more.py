"""What random programs have besides: parts of Lightning that most programs do not use, some of them in one program."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.differential.program import Act, Program, some
from tests.golden.recorder import CALLBACK_HOOKS, MODULE_HOOKS


def _profiler(p: Program, r: random.Random) -> Program:
    kind = r.choice(("simple", "advanced", "SimpleProfiler", "AdvancedProfiler", "PassThroughProfiler"))
    places = some(r, 0.5, dirpath=("profiles", "profiles/deep"), filename=("perf", "a.b"))
    if kind == "PassThroughProfiler":
        places.pop("filename", None)
    if kind == "SimpleProfiler":
        places |= some(r, 0.5, extended=(True, False))
    if kind == "AdvancedProfiler":
        places |= some(r, 0.5, line_count_restriction=(1.0, 5))
    return replace(p, profiler=(kind, places if kind[0].isupper() else {}))


def _averaging(p: Program, r: random.Random) -> Program:
    if r.random() < 0.3:
        kind, settings = "StochasticWeightAveraging", {"swa_lrs": 0.02, **some(r, 0.5, swa_epoch_start=(1, 0.5))}
    else:
        kind = r.choice(("EMAWeightAveraging", "EMAWeightAveraging", "WeightAveraging"))
        settings = some(r, 0.3, use_buffers=(True, False))
        if kind == "EMAWeightAveraging":
            settings |= {"decay": r.choice((0.5, 0.9))}
            settings |= some(r, 0.3, update_every_n_steps=(2, 3), update_starting_at_step=(2,))
    p = replace(p, flags={name: value for name, value in p.flags.items() if name != "limit_train_batches"})
    kept = tuple(part for part in p.callbacks if part[0] == "ModelCheckpoint") or (
        ("ModelCheckpoint", some(r, 0.5, monitor=("loss",), save_top_k=(1, 2), save_last=(True,))),
    )
    calls = r.choice((("fit", "resume best"), ("fit", "test"), ("fit", "resume"), ("fit", "resume mid")))
    return replace(p, callbacks=((kind, settings), *kept), calls=calls, manual=False)


def _two_of_a_class(p: Program, r: random.Random) -> Program:
    stopping = [("EarlyStopping", {"monitor": "loss", **some(r, 0.5, patience=(0, 1), mode=("min", "max"))})]
    stopping.append(("EarlyStopping", {"monitor": r.choice(("loss_epoch", "loss")), "mode": r.choice(("min", "max"))}))
    timers = [("Timer", {"duration": {"hours": 5}}), ("Timer", {"duration": {"hours": 6}, "interval": "epoch"})]
    rates = [("LearningRateMonitor", {"logging_interval": each}) for each in ("step", "epoch")]
    found = r.choice((stopping, stopping, timers, rates))
    rest = tuple(part for part in p.callbacks if part[0] != found[0][0])
    return replace(p, callbacks=(*found, *rest), calls=r.choice((p.calls, ("fit", "resume"))))


def _other_callbacks(p: Program, r: random.Random) -> Program:
    kind = r.choice(("DeviceStatsMonitor", "OnExceptionCheckpoint", "ModelSummary", "LambdaCallback", "ModelSummary"))
    settings: dict[str, Any] = {}
    if kind == "DeviceStatsMonitor":
        settings = {"cpu_stats": r.choice((None, False))}
    if kind == "OnExceptionCheckpoint":
        settings = {"dirpath": "kept", **some(r, 0.5, filename=("crash", "{epoch}"))}
        p = replace(p, acts=(Act("raise", r.choice(("training_step", "validation_step", "on_train_epoch_end")), 2),))
    if kind == "LambdaCallback":
        settings = {"hooks": tuple(r.sample(("setup", "on_train_start", "on_train_batch_end", "teardown"), 2))}
    if kind == "ModelSummary":
        settings = {"max_depth": r.choice((0, 1, -1))}
    return replace(p, callbacks=(*p.callbacks, (kind, settings)))


def _interrupted_anywhere(p: Program, r: random.Random) -> Program:
    hooks = [f"callback.{name}" for name in CALLBACK_HOOKS if name not in ("on_exception",)]
    hooks += [name for name in MODULE_HOOKS if name not in ("backward", "lr_scheduler_step")]
    hooks += ["training_step", "validation_step", "test_step", "predict_step", "val_dataloader", "test_dataloader"]
    act = Act(r.choice(("interrupt", "interrupt", "raise")), r.choice(hooks), r.choice((1, 1, 2)))
    return replace(p, acts=(act,))


def _late_layers(p: Program, r: random.Random) -> Program:
    precision = r.choice(("64-true", "bf16-true", "16-true", "32-true", "bf16-mixed"))
    optimizers = tuple("sgd" if each == "lbfgs" else each for each in p.optimizers)
    return replace(p, late=r.random() < 0.7, flags={**p.flags, "precision": precision}, optimizers=optimizers)


def _odd_closures(p: Program, r: random.Random) -> Program:
    kind = r.choice(("closure twice", "closure", "closure", "closure"))
    schedulers = p.schedulers[:1]
    return replace(p, manual=False, optimizers=(kind,), schedulers=schedulers)


def _triggers(p: Program, r: random.Random) -> Program:
    settings = some(
        r,
        0.4,
        monitor=("loss", "val", "loss_epoch"),
        save_top_k=(1, 2, -1),
        save_last=(True, "link"),
        train_time_interval=("at once",),
        every_n_train_steps=(1, 2),
        every_n_epochs=(1, 2),
        save_on_train_epoch_end=(True, False),
        filename=("{epoch}-{val:.1f}", "{step:03d}", "{epoch}/{step}"),
    )
    if {"train_time_interval", "every_n_train_steps", "every_n_epochs"} <= settings.keys() and r.random() < 0.8:
        del settings["every_n_epochs"]
    return replace(p, callbacks=(*p.callbacks, ("ModelCheckpoint", settings)))


WAYS: list[Callable[[Program, random.Random], Program]] = [
    _profiler,
    _averaging,
    _averaging,
    _two_of_a_class,
    _other_callbacks,
    _other_callbacks,
    _interrupted_anywhere,
    _interrupted_anywhere,
    _late_layers,
    _averaging,
    _odd_closures,
    _triggers,
    _triggers,
    _triggers,
    lambda p, r: replace(p, train="some None", train_samples=(r.randint(4, 11), 4)),
    lambda p, r: replace(p, calls=("fit", r.choice(("resume edited", "resume edited", "resume rewritten")))),
    lambda p, r: replace(p, single_device=r.choice(("cpu", "cpu:0"))),
    lambda p, r: replace(
        p, loggers=("csv",), acts=(Act("write row", r.choice(("on_train_start", "training_step", "on_fit_end")), 1),)
    ),
]


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "save_weights_only"}


def widen(program: Program) -> Program:
    """The program with up to two of the parts above, in two of three programs."""
    r = random.Random(f"more of {program.seed}")
    for way in r.sample(WAYS, r.choice((0, 1, 1, 2, 1, 0))):
        program = way(program, r)
    if any("resume" in call for call in program.calls):  # a fit goes on from whole checkpoints
        program = replace(program, callbacks=tuple((kind, _whole(part)) for kind, part in program.callbacks))
    if any("WeightAveraging" in kind for kind, _ in program.callbacks):
        program = replace(program, late=False)
    if program.manual and len(program.optimizers) != len(program.schedulers):
        program = replace(program, schedulers=())
    return program
