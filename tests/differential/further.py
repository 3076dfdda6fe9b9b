"""What random programs have besides: finetuning, writers of predictions, checkpoints by name, and times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.differential.more import widen
from tests.differential.program import Program, draw, some

PATHS = (
    "validate best",
    "test best",
    "test last",
    "predict best",
    "test path",
    "predict path",
    "test untold",
    "validate untold",
    "resumed by last",
    "resumed by path",
    "resumed by missing",
    "test missing",
)
OFF = ("log_every_n_steps", "num_sanity_val_steps", "fast_dev_run", "detect_anomaly")
"""Flags that contradict ``barebones``."""


def _finetuned(p: Program, r: random.Random) -> Program:
    kind, settings = "Unfreezing", {"epoch": r.choice((0, 1, 2)), "train_bn": r.random() < 0.5}
    if r.random() < 0.6:
        kind, settings = "BackboneFinetuning", {"unfreeze_backbone_at_epoch": r.choice((0, 1, 1, 2))}
        settings |= some(
            r,
            0.4,
            backbone_initial_ratio_lr=(0.5,),
            backbone_initial_lr=(0.001,),
            should_align=(False,),
            initial_denom_lr=(2.0,),
            train_bn=(False,),
            verbose=(True,),
        )
    calls = r.choice((p.calls, ("fit", "resume"), ("fit", "resume mid")))
    optimizers = tuple("sgd" if each == "none" else each for each in p.optimizers[:1])
    whole = tuple(
        (name, {key: value for key, value in part.items() if key != "save_weights_only"})
        for name, part in p.callbacks
        if name != "StochasticWeightAveraging"
    )
    flags = {**p.flags, "max_epochs": r.choice((2, 3))}
    p = replace(p, calls=calls, callbacks=(*whole, (kind, settings)), flags=flags, late=False)
    return replace(p, backbone=True, manual=False, optimizers=optimizers, schedulers=p.schedulers[:1])


def _now_and_then(p: Program, r: random.Random) -> Program:
    logs = tuple(replace(log, every=r.choice((1, 2, 2, 3))) for log in p.logs)
    return replace(p, logs=logs)


def _paths(p: Program, r: random.Random) -> Program:
    kept = some(
        r,
        0.5,
        monitor=("loss",),
        save_top_k=(1, -1),
        save_last=(True, "link"),
        dirpath=("kept",),
        every_n_epochs=(1, 2),
    )
    callbacks = tuple(part for part in p.callbacks if part[0] != "ModelCheckpoint")
    if r.random() < 0.8:
        callbacks = (*callbacks, ("ModelCheckpoint", kept))
    if r.random() < 0.15:
        callbacks = (*callbacks, ("ModelCheckpoint", {"every_n_train_steps": 1}))
    return replace(p, callbacks=callbacks, calls=("fit", *r.sample(PATHS, r.choice((1, 2)))))


def _writer(p: Program, r: random.Random) -> Program:
    writer = ("Writer", {"interval": r.choice(("batch", "epoch", "batch_and_epoch"))})
    calls = r.choice((("predict",), ("fit", "predict"), ("predict", "predict")))
    return replace(p, calls=calls, callbacks=(*p.callbacks, writer), returns=r.choice((None, True, False)))


def _barebones(p: Program, r: random.Random) -> Program:
    flags = {name: value for name, value in p.flags.items() if name not in OFF or r.random() < 0.05}
    callbacks = p.callbacks if r.random() < 0.15 else ()
    loggers = p.loggers if r.random() < 0.15 else ()
    return replace(p, flags={**flags, "barebones": True}, callbacks=callbacks, loggers=loggers, profiler=None)


def _times(p: Program, r: random.Random) -> Program:
    kind = r.choice(("across", "across", "part", "reload", "reload", "dry", "no inference"))
    more: dict[str, Any] = {"fast_dev_run": r.choice((True, 1, 3))}
    if kind == "across":
        more = {"check_val_every_n_epoch": None, "val_check_interval": r.choice((2, 3, 5, 7)), "max_epochs": 3}
    if kind == "part":
        more = {"val_check_interval": r.choice((0.25, 0.4, 0.5, 0.75))}
        loaders = ("dict max_size_cycle", "dict min_size", "dict max_size", "list min_size")
        p = replace(p, train=r.choice(loaders), train_samples=(r.randint(4, 11), r.randint(4, 11)))
    if kind == "reload":
        more = {"reload_dataloaders_every_n_epochs": r.choice((1, 2)), "max_epochs": 3}
        more |= some(r, 0.3, check_val_every_n_epoch=(2,), num_sanity_val_steps=(1,))
        p = replace(p, data=r.choice(("module", "data module")))
    if kind == "no inference":
        more = {"inference_mode": False}
        p = replace(p, calls=r.choice((("fit", "test"), ("validate",), ("predict", "fit"), ("test", "validate"))))
    return replace(p, flags={**p.flags, **more})


WAYS: list[Callable[[Program, random.Random], Program]] = [
    _finetuned,
    _paths,
    _now_and_then,
    _times,
    _writer,
    _finetuned,
    _finetuned,
    _now_and_then,
    _now_and_then,
    _paths,
    _paths,
    _writer,
    _barebones,
    _times,
    _times,
]


def reach(program: Program) -> Program:
    """The program with one of the parts above, in two of five programs; the others are as they were."""
    r = random.Random(f"further than {program.seed}")
    if r.random() < 0.6:
        return program
    program = r.choice(WAYS)(program, r)
    if program.manual and len(program.optimizers) != len(program.schedulers):
        program = replace(program, schedulers=())
    return program


def program_of(seed: int) -> Program:
    """The program of a seed, with all that a program may have."""
    return reach(widen(draw(seed)))
