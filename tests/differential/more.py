"""What random programs have besides: averages, finetuning, writers of predictions, checkpoints by name, and times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.differential.program import COMBINED, Act, Program, draw, some
from tests.golden.recorder import CALLBACK_HOOKS, MODULE_HOOKS

PATHS = (
    "validate best",
    "test best",
    "test last",
    "predict best",
    "test path",
    "predict path",
    "test untold",
    "validate untold",
)
MID_EPOCH = {
    "max_steps",
    "val_check_interval",
    "fast_dev_run",
    "check_val_every_n_epoch",
    "reload_dataloaders_every_n_epochs",
}
"""Flags with which a fit may resume elsewhere than in Lightning."""


def _averaging(p: Program, r: random.Random) -> Program:
    if r.random() < 0.3:
        kind, settings = "StochasticWeightAveraging", {"swa_lrs": 0.02, **some(r, 0.5, swa_epoch_start=(1, 0.5))}
    else:
        kind = r.choice(("EMAWeightAveraging", "EMAWeightAveraging", "WeightAveraging"))
        settings = some(r, 0.3, use_buffers=(True, False))
        if kind == "EMAWeightAveraging":
            settings |= {"decay": r.choice((0.5, 0.9))}
            settings |= some(r, 0.1, update_every_n_steps=(2, 3), update_starting_at_step=(2,))
    shorter = ("limit_train_batches", "accumulate_grad_batches", "max_steps")  # what an average sees of it is explained
    p = replace(p, flags={name: value for name, value in p.flags.items() if name not in shorter})
    kept = tuple(part for part in p.callbacks if part[0] == "ModelCheckpoint") or (
        ("ModelCheckpoint", some(r, 0.5, monitor=("loss",), save_top_k=(1, -1), save_last=(True,))),
    )
    calls = r.choice((("fit", "test best"), ("fit", "test"), ("fit", "resume")))
    p = replace(p, callbacks=((kind, settings), *kept), calls=calls, manual=False, acts=())
    return replace(p, optimizers=(r.choice(("sgd", "adam")),), schedulers=p.schedulers[:1])


def _two_of_a_class(p: Program, r: random.Random) -> Program:
    stopping = [("EarlyStopping", {"monitor": "loss", **some(r, 0.5, patience=(0, 1), mode=("min", "max"))})]
    stopping.append(("EarlyStopping", {"monitor": r.choice(("loss_epoch", "loss")), "mode": r.choice(("min", "max"))}))
    rates = [("LearningRateMonitor", {"logging_interval": each}) for each in ("step", "epoch")]
    found = r.choice((stopping, stopping, rates))
    rest = tuple(part for part in p.callbacks if part[0] != found[0][0])
    return replace(p, callbacks=(*found, *rest), calls=r.choice((p.calls, ("fit", "resume"))))


def _interrupted_anywhere(p: Program, r: random.Random) -> Program:
    hooks = [f"callback.{name}" for name in CALLBACK_HOOKS if name not in ("on_exception",)]
    hooks += [name for name in MODULE_HOOKS if name not in ("backward", "lr_scheduler_step")]
    hooks += ["training_step", "validation_step", "test_step", "predict_step", "val_dataloader", "test_dataloader"]
    act = Act(r.choice(("interrupt", "interrupt", "raise")), r.choice(hooks), r.choice((1, 1, 2)))
    return replace(p, acts=(act,))


def _late_layers(p: Program, r: random.Random) -> Program:
    precision = r.choice(("64-true", "bf16-true", "32-true", "bf16-mixed"))
    optimizers = tuple("sgd" if each == "lbfgs" else each for each in p.optimizers)
    return replace(p, late=r.random() < 0.7, flags={**p.flags, "precision": precision}, optimizers=optimizers)


def _triggers(p: Program, r: random.Random) -> Program:
    settings = some(
        r,
        0.4,
        monitor=("loss", "val", "loss_epoch"),
        save_top_k=(1, 2, -1),
        save_last=(True, "link"),
        every_n_train_steps=(1, 2),
        every_n_epochs=(1, 2),
        save_on_train_epoch_end=(True, False),
        filename=("{epoch}-{val:.1f}", "{step:03d}", "{epoch}/{step}"),
    )
    if {"every_n_train_steps", "every_n_epochs"} <= settings.keys():
        del settings["every_n_epochs"]
    return replace(p, callbacks=(*p.callbacks, ("ModelCheckpoint", settings)))


def _finetuned(p: Program, r: random.Random) -> Program:
    settings = {"unfreeze_backbone_at_epoch": r.choice((1, 2))}
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
    optimizers = tuple("sgd" if each in ("none", "lbfgs") else each for each in p.optimizers[:1])
    others = tuple(part for part in p.callbacks if part[0] != "StochasticWeightAveraging")
    flags = {**p.flags, "max_epochs": r.choice((2, 3)), "log_every_n_steps": 1}
    calls = r.choice((p.calls, ("fit", "resume")))
    p = replace(p, calls=calls, callbacks=(*others, ("BackboneFinetuning", settings)), flags=flags, late=False)
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
    return replace(p, callbacks=(*callbacks, ("ModelCheckpoint", kept)), calls=("fit", r.choice(PATHS)))


def _writer(p: Program, r: random.Random) -> Program:
    writer = ("Writer", {"interval": r.choice(("batch", "epoch", "batch_and_epoch"))})
    calls = r.choice((("predict",), ("fit", "predict"), ("predict", "predict")))
    return replace(p, calls=calls, callbacks=(*p.callbacks, writer), returns=r.choice((None, True, False)))


def _times(p: Program, r: random.Random) -> Program:
    kind = r.choice(("across", "across", "part", "reload", "reload", "no inference"))
    more: dict[str, Any] = {"inference_mode": False}
    if kind == "across":
        more = {"check_val_every_n_epoch": None, "val_check_interval": r.choice((2, 3, 5, 7)), "max_epochs": 3}
    if kind == "part":
        more = {"val_check_interval": r.choice((0.25, 0.4, 0.5, 0.75)), "check_val_every_n_epoch": 1}
        p = replace(p, train=r.choice(COMBINED), train_samples=(r.randint(4, 11), r.randint(4, 11)))
    if kind == "reload":
        more = {"reload_dataloaders_every_n_epochs": r.choice((1, 2)), "max_epochs": 3}
        more |= some(r, 0.3, check_val_every_n_epoch=(2,), num_sanity_val_steps=(1,))
        p = replace(p, data=r.choice(("module", "data module")))
    if kind == "no inference":
        p = replace(p, calls=r.choice((("fit", "test"), ("validate",), ("predict", "fit"), ("test", "validate"))))
    return replace(p, flags={**p.flags, **more})


WAYS: list[Callable[[Program, random.Random], Program]] = [
    *[_averaging] * 3,
    *[_finetuned] * 3,
    *[_interrupted_anywhere] * 2,
    *[_now_and_then] * 3,
    *[_paths] * 3,
    *[_times] * 3,
    *[_triggers] * 3,
    *[_writer] * 2,
    _late_layers,
    _two_of_a_class,
    lambda p, r: replace(p, manual=False, optimizers=("closure",), schedulers=p.schedulers[:1]),
    lambda p, r: replace(p, calls=("fit", r.choice(("resume edited", "resume rewritten")))),
]


def program_of(seed: int) -> Program:
    """The program of a seed: one that is drawn, with up to two of the parts above."""
    program, r = draw(seed), random.Random(f"more of {seed}")
    for way in r.sample(WAYS, r.choice((0, 1, 1, 1, 2))):
        program = way(program, r)
    return _comparable(program)


def _comparable(p: Program) -> Program:
    """The program without calls before which Lightning has ended up elsewhere: nothing of them could be compared."""
    kinds = {kind for kind, _ in p.callbacks}
    if any(" " in call or call == "resume" for call in p.calls):  # it loads whole checkpoints
        whole = [(kind, {k: v for k, v in part.items() if k != "save_weights_only"}) for kind, part in p.callbacks]
        savers = [part for part in whole if part[0] == "ModelCheckpoint"]
        p = replace(p, callbacks=tuple(part for part in whole if part not in savers[1:]))
    fails = p.backbone and p.schedulers  # where a scheduler has fewer groups than the thawed optimizer
    elsewhere = MID_EPOCH & p.flags.keys() or kinds & {"Timer", "EarlyStopping"} or p.train == "shuffled" or fails
    if elsewhere and any("resume" in call for call in p.calls):
        p = replace(p, calls=p.calls[:1])
    if p.acts or "StochasticWeightAveraging" in kinds:
        p = replace(p, calls=p.calls[:1])
    if kinds & {"EMAWeightAveraging", "WeightAveraging", "BackboneFinetuning"}:
        p = replace(p, late=False)
    if p.manual and len(p.optimizers) != len(p.schedulers):
        p = replace(p, schedulers=())
    return p
