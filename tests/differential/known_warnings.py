"""The table of warnings that only one of the two gives, each with its reason."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tests.differential.causes import PAGE, Row, warned
from tests.differential.program import PLAIN, Program, Scheduler

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def _theirs(topic: str, program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return warned(d, topic) and bool(d.theirs)


def _ours(topic: str, program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return warned(d, topic) and bool(d.ours)


SAVED_MID_EPOCH = ("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1})
FEWER: dict[str, tuple[str, Program]] = {
    "averaging of made layers": (
        "WeightAveraging gives no warning about layers of configure_model, because they are copied when training "
        "starts.",
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
    ),
    "batch size": (
        "Batches are weighted by the samples that the loader drew. No batch size is guessed, so there is no warning "
        "about it.",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
    ),
    "hooks of transfer": (
        "No warning if both the module and a data module define transfer hooks; those of the data module take "
        "precedence.",
        replace(PLAIN, data="data module", hooks="working"),
    ),
    "saves in manual optimization": (
        "No warning about saves in manual optimization, because they contain the weights after the step, as all saves "
        "do.",
        replace(PLAIN, manual=True, callbacks=(SAVED_MID_EPOCH,)),
    ),
    "folder of checkpoints": (
        "No warning about a folder that contains checkpoints, because none of them is overwritten.",
        replace(PLAIN, calls=("fit", "fit on"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "scheduler of SWA": (
        "No warning if StochasticWeightAveraging replaces a scheduler that steps in every step.",
        replace(
            PLAIN,
            schedulers=(Scheduler("step", {"interval": "step"}),),
            callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),),
        ),
    ),
    "no module": (
        "A call without a module logs which weights it uses, and gives no warning.",
        replace(PLAIN, calls=("fit", "test untold"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "overfit and shuffled": (
        "No warning about shuffling with overfit_batches and an iterable data set, because it is not shuffled.",
        replace(PLAIN, train="iterable", flags={**PLAIN.flags, "overfit_batches": 1}),
    ),
    "no momentum": (
        "No warning about log_momentum with SGD and Adam, because each of them has a momentum (momentum or betas).",
        replace(
            PLAIN, manual=True, optimizers=("sgd", "adam"), callbacks=(("LearningRateMonitor", {"log_momentum": True}),)
        ),
    ),
}
MORE: dict[str, tuple[str, Program]] = {
    "nothing left to train": (
        "A resumed fit without any steps left gives a warning.",
        replace(PLAIN, flags={**PLAIN.flags, "max_steps": 2}, calls=("fit", "resume")),
    ),
    "uneven loaders": (
        "Several loaders whose batches have different sizes give one warning.",
        replace(
            PLAIN,
            train="dict max_size_cycle",
            train_samples=(9, 3),
            flags={**PLAIN.flags, "accumulate_grad_batches": 2},
        ),
    ),
    "loaders that stay": (
        "reload_dataloaders_every_n_epochs gives a warning if the loaders were passed as objects, because they stay "
        "the same.",
        replace(PLAIN, data="arguments", flags={**PLAIN.flags, "reload_dataloaders_every_n_epochs": 1}),
    ),
    "no effect": (
        "A flag that has no effect because of another flag gives a warning.",
        replace(PLAIN, flags={**PLAIN.flags, "overfit_batches": 1, "limit_train_batches": 2}),
    ),
}
WARNINGS = [
    *(Row(sentence, PAGE, program, partial(_theirs, topic)) for topic, (sentence, program) in FEWER.items()),
    *(Row(sentence, PAGE, program, partial(_ours, topic)) for topic, (sentence, program) in MORE.items()),
]
