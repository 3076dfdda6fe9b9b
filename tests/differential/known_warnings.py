"""The table of warnings that only one of the two gives, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.differential.causes import PAGE, Row, warned
from tests.differential.further import program_of
from tests.differential.program import PLAIN, Act, Program, Scheduler

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def _theirs(topic: str, program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return warned(d, topic) and bool(d.theirs)


def _ours(topic: str, program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return warned(d, topic) and bool(d.ours)


SAVED_MID_EPOCH = ("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1})
AVERAGED = replace(PLAIN, late=True, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),))
FEWER: dict[str, tuple[str, Program]] = {
    "summary's precision": (
        "The summary of a model knows the bytes of every precision.",
        replace(PLAIN, flags={**PLAIN.flags, "precision": "bf16-mixed"}, callbacks=(("ModelSummary", {}),)),
    ),
    "batch size": (
        "Batches weigh by the samples that our loader drew, so that no size is guessed from tensors, or warned of.",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
    ),
    "hooks of transfer": (
        "Nothing is said where the module moves batches and there is a data module, too, whose hooks come first.",
        replace(PLAIN, data="data module", hooks="working"),
    ),
    "averaging of made layers": (
        "WeightAveraging copies layers that are made in configure_model when training starts; Lightning warns of it.",
        AVERAGED,
    ),
    "monitor of a manual scheduler": (
        "In manual optimization nothing is said of a scheduler's monitor, which its entry keeps.",
        replace(PLAIN, manual=True, schedulers=(Scheduler("plateau", {"monitor": "loss"}),)),
    ),
    "saves in manual optimization": (
        "A save in manual optimization holds the weights after the step, as any other; Lightning warns of it.",
        replace(PLAIN, manual=True, callbacks=(SAVED_MID_EPOCH,)),
    ),
    "folder of checkpoints": (
        "A folder may hold checkpoints, which no other overwrites; Lightning warns of it.",
        replace(PLAIN, calls=("fit", "fit on"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "resumed mid epoch": (
        "A resume within an epoch is exact, and nothing is said of it.",
        replace(PLAIN, train_samples=(8, 4), calls=("fit", "resume mid"), callbacks=(SAVED_MID_EPOCH,)),
    ),
    "scheduler of SWA": (
        "Nothing is said where SWA takes the place of a scheduler by step.",
        replace(
            PLAIN,
            schedulers=(Scheduler("step", {"interval": "step"}),),
            callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),),
        ),
    ),
    "no module": (
        "Which weights a call without a module takes is information, not a warning.",
        replace(PLAIN, calls=("fit", "test untold"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "overfit and shuffled": (
        "overfit_batches with an iterable data set: it does not shuffle, and is not said to.",
        replace(PLAIN, train="iterable", flags={**PLAIN.flags, "overfit_batches": 1}),
    ),
    "nothing to clip": (
        "Where there is no gradient, nothing is clipped, and nothing is said.",
        replace(PLAIN, optimizers=("none",), flags={**PLAIN.flags, "gradient_clip_val": 0.1}),
    ),
    "hooks of windows": (
        "GradientAccumulationScheduler with a module that overrides optimizer_step: nothing is said of when it is "
        "called, which accumulate_grad_batches decides as ever.",
        replace(PLAIN, hooks="working", callbacks=(("GradientAccumulationScheduler", {"scheduling": {0: 2}}),)),
    ),
    "best of several": (
        "A call without a module says which checkpoint it takes as information, with several ModelCheckpoints, too.",
        replace(
            PLAIN,
            calls=("fit", "test untold"),
            callbacks=(("ModelCheckpoint", {}), ("ModelCheckpoint", {"every_n_train_steps": 1})),
        ),
    ),
    "no momentum": (
        "log_momentum with an SGD and an Adam: each has one, as momentum or as betas; Lightning warns of it.",
        replace(
            PLAIN, manual=True, optimizers=("sgd", "adam"), callbacks=(("LearningRateMonitor", {"log_momentum": True}),)
        ),
    ),
    "dataloader_iter": (
        "A module whose `training_step` takes dataloader_iter is refused in a fit; elsewhere nothing is said of it.",
        replace(PLAIN, iter_step=True, calls=("test",)),
    ),
}
MORE: dict[str, tuple[str, Program]] = {
    "nothing left to train": (
        "A resumed fit that has nothing left to train says so.",
        replace(PLAIN, flags={**PLAIN.flags, "max_steps": 2}, calls=("fit", "resume")),
    ),
    "uneven loaders": (
        "Loaders side by side that give parts of other sizes are told of once.",
        replace(
            PLAIN,
            train="dict max_size_cycle",
            train_samples=(9, 3),
            flags={**PLAIN.flags, "accumulate_grad_batches": 2},
        ),
    ),
    "loaders that stay": (
        "reload_dataloaders_every_n_epochs with loaders that are given as objects, which stay the same, says so.",
        replace(PLAIN, data="arguments", flags={**PLAIN.flags, "reload_dataloaders_every_n_epochs": 1}),
    ),
    "average begins anew": (
        "WeightAveraging has nothing to save before training, and says so where a fit goes on from that.",
        replace(
            PLAIN,
            acts=(Act("raise", "on_fit_start", 1),),
            calls=("fit", "resume"),
            callbacks=(("EMAWeightAveraging", {"decay": 0.5}),),
        ),
    ),
    "checkpoint without its metric": (
        "A save by steps whose metric is never logged is told of; Lightning's waits for it in silence.",
        program_of(1091),
    ),
    "no effect": (
        "What has no effect beside another flag is said.",
        replace(PLAIN, flags={**PLAIN.flags, "overfit_batches": 1, "limit_train_batches": 2}),
    ),
}
WARNINGS = [
    *(Row(sentence, PAGE, program, partial(_theirs, topic)) for topic, (sentence, program) in FEWER.items()),
    *(Row(sentence, PAGE, program, partial(_ours, topic)) for topic, (sentence, program) in MORE.items()),
]
