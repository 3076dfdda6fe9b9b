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
        "The summary of a model has the bytes of every precision.",
        replace(PLAIN, flags={**PLAIN.flags, "precision": "bf16-mixed"}, callbacks=(("ModelSummary", {}),)),
    ),
    "batch size": (
        "Batches weigh by the samples that the loader drew: no size is guessed from tensors, so no warning about it.",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
    ),
    "hooks of transfer": (
        "No warning if both the module and a data module define transfer hooks; the data module's come first.",
        replace(PLAIN, data="data module", hooks="working"),
    ),
    "averaging of made layers": (
        "No warning from WeightAveraging about layers of configure_model: they are copied when training starts.",
        AVERAGED,
    ),
    "monitor of a manual scheduler": (
        "No warning about a scheduler's monitor in manual optimization, since its configuration keeps it.",
        replace(PLAIN, manual=True, schedulers=(Scheduler("plateau", {"monitor": "loss"}),)),
    ),
    "saves in manual optimization": (
        "No warning about saves in manual optimization: they hold the weights after the step, as any other.",
        replace(PLAIN, manual=True, callbacks=(SAVED_MID_EPOCH,)),
    ),
    "folder of checkpoints": (
        "No warning about a folder that holds checkpoints, since none of them is overwritten.",
        replace(PLAIN, calls=("fit", "fit on"), callbacks=(("ModelCheckpoint", {}),)),
    ),
    "resumed mid epoch": (
        "No warning about a resume within an epoch, since it is exact.",
        replace(PLAIN, train_samples=(8, 4), calls=("fit", "resume mid"), callbacks=(SAVED_MID_EPOCH,)),
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
    "nothing to clip": (
        "No warning about clipping without gradients.",
        replace(PLAIN, optimizers=("none",), flags={**PLAIN.flags, "gradient_clip_val": 0.1}),
    ),
    "hooks of windows": (
        "No warning about GradientAccumulationScheduler with a module that overrides optimizer_step.",
        replace(PLAIN, hooks="working", callbacks=(("GradientAccumulationScheduler", {"scheduling": {0: 2}}),)),
    ),
    "best of several": (
        "A call without a module logs its checkpoint as information, also with several ModelCheckpoints.",
        replace(
            PLAIN,
            calls=("fit", "test untold"),
            callbacks=(("ModelCheckpoint", {}), ("ModelCheckpoint", {"every_n_train_steps": 1})),
        ),
    ),
    "no momentum": (
        "No warning about log_momentum with an SGD and an Adam: each has one, as momentum or as betas.",
        replace(
            PLAIN, manual=True, optimizers=("sgd", "adam"), callbacks=(("LearningRateMonitor", {"log_momentum": True}),)
        ),
    ),
    "dataloader_iter": (
        "A module whose `training_step` takes dataloader_iter is refused in a fit; other calls do not warn about it.",
        replace(PLAIN, iter_step=True, calls=("test",)),
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
    "average begins anew": (
        "WeightAveraging saves nothing before training, and warns if a fit resumes from such a checkpoint.",
        replace(
            PLAIN,
            acts=(Act("raise", "on_fit_start", 1),),
            calls=("fit", "resume"),
            callbacks=(("EMAWeightAveraging", {"decay": 0.5}),),
        ),
    ),
    "checkpoint without its metric": (
        "A save by steps whose metric is never logged gives a warning; Lightning's waits in silence.",
        program_of(1091),
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
