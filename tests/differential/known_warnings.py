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
        "No warning from WeightAveraging about layers of configure_model: they are copied when training starts.",
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
    ),
    "batch size": (
        "Batches weigh by the samples that the loader drew: no size is guessed from tensors, so no warning about it.",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
    ),
    "hooks of transfer": (
        "No warning if both the module and a data module define transfer hooks; the data module's come first.",
        replace(PLAIN, data="data module", hooks="working"),
    ),
    "saves in manual optimization": (
        "No warning about saves in manual optimization: they hold the weights after the step, as any other.",
        replace(PLAIN, manual=True, callbacks=(SAVED_MID_EPOCH,)),
    ),
    "folder of checkpoints": (
        "No warning about a folder that holds checkpoints, since none of them is overwritten.",
        replace(PLAIN, calls=("fit", "fit on"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "scheduler of SWA": (
        "No warning if SWA replaces a scheduler by step.",
        replace(
            PLAIN,
            schedulers=(Scheduler("step", {"interval": "step"}),),
            callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),),
        ),
    ),
    "no module": (
        "A call without a module logs its choice of weights as information, not as a warning.",
        replace(PLAIN, calls=("fit", "test untold"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "overfit and shuffled": (
        "No warning about shuffling with overfit_batches and an iterable data set, which does not shuffle.",
        replace(PLAIN, train="iterable", flags={**PLAIN.flags, "overfit_batches": 1}),
    ),
    "no momentum": (
        "No warning about log_momentum with an SGD and an Adam: each has one, as momentum or as betas.",
        replace(
            PLAIN, manual=True, optimizers=("sgd", "adam"), callbacks=(("LearningRateMonitor", {"log_momentum": True}),)
        ),
    ),
}
MORE: dict[str, tuple[str, Program]] = {
    "nothing left to train": (
        "A resumed fit that has nothing left to train warns.",
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
        "reload_dataloaders_every_n_epochs warns if the loaders are objects, which stay the same.",
        replace(PLAIN, data="arguments", flags={**PLAIN.flags, "reload_dataloaders_every_n_epochs": 1}),
    ),
    "no effect": (
        "A flag without effect next to another flag gives a warning.",
        replace(PLAIN, flags={**PLAIN.flags, "overfit_batches": 1, "limit_train_batches": 2}),
    ),
}
WARNINGS = [
    *(Row(sentence, PAGE, program, partial(_theirs, topic)) for topic, (sentence, program) in FEWER.items()),
    *(Row(sentence, PAGE, program, partial(_ours, topic)) for topic, (sentence, program) in MORE.items()),
]
