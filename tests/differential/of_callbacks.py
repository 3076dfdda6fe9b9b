"""The rows of the table for what single callbacks and profilers do, and what they look at."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.differential.causes import (
    PAGE,
    Row,
    end,
    has,
    later,
    refused,
    saved_besides,
    validates_nothing,
)
from tests.differential.further import program_of
from tests.differential.program import PLAIN, Program
from tests.differential.record import same

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def all_kept(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Files of a ModelCheckpoint that keeps all and looks at no value, where some have the same name."""
    kept = [part for kind, part in program.callbacks if kind == "ModelCheckpoint" and part.get("save_top_k") == -1]
    versions = [name for name in ours.files if re.search(r"-v\d+\.ckpt$", name) and name not in theirs.files]
    alike = versions and any("monitor" not in part for part in kept)
    return bool(alike) and (d.kind in ("files", "checkpoint") or d.name == "ModelCheckpoint")


def logged_at_end(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Metrics of a call that a hook at an epoch's end has ended, of which ours has more."""
    if "raised" not in end(theirs, d.call) or not d.name.endswith("_metrics") or "-" in (d.theirs, d.ours):
        return False
    return d.kind == "end" and d.theirs.keys() < d.ours.keys()


def saved_behind_another(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a checkpoint has of an average whose Trainer has loaded other weights since the fit, for an evaluation."""
    averages = any(kind in ("EMAWeightAveraging", "WeightAveraging") for kind, _ in program.callbacks)
    judged = any(call.split()[0] in JUDGES and call.endswith(LOADS) for call in program.calls[:-1])
    if not averages or not judged or d.kind != "checkpoint" or d.name != "keys":
        return False
    return set(d.theirs) - set(d.ours) == {"averaging_state", "current_model_state"}


def waits_for_no_validation(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What callbacks save or stop at the end of an epoch, of which Lightning's wait for a validation."""
    if not validates_nothing(program):
        return False
    saves = program.flags.get("check_val_every_n_epoch", 1) != 1
    stops = has(program, "EarlyStopping") and program.flags.get("val_check_interval", 1.0) != 1.0
    return saves or stops


def stopped_before(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The epoch in which an earlier fit was stopped, and nothing else."""
    if d.name != "EarlyStopping" or not later(d, theirs) or "-" in (d.theirs, d.ours):
        return False
    return d.ours["stopped_epoch"] == 0 and same({**d.theirs, "stopped_epoch": 0}, d.ours)


def saved_in_evaluation(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What save_on_exception writes where an evaluation has raised."""
    if not any(part.get("save_on_exception") for _, part in program.callbacks):
        return False
    raised = [call for call, facts in theirs.ends if "raised" in facts and call.split()[-1] in JUDGES]
    if d.kind == "order":
        return d.call in raised and saved_besides(d)
    return bool(raised) and d.where == "names" and not d.ours and all(name.endswith(".ckpt") for name in d.theirs)


def cut_without_metric(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """An epoch that ended before its last batch, in which Lightning's EarlyStopping misses its metric."""
    cut = any("The epoch ended before its last batch" in text for _, text in ours.warned)
    missed = any("Early stopping conditioned on metric" in str(facts.get("message")) for _, facts in theirs.ends)
    return cut and missed


JUDGES, LOADS = ("validate", "test", "predict"), ("best", "last", "path", "untold")

OF_CALLBACKS = [
    Row(
        "A scheduler that was created for fewer parameter groups than a finetuning callback leaves is an error that "
        "names it; Lightning raises torch's error, or does not add the group on resume.",
        PAGE,
        program_of(80508),
        lambda program, d, theirs, ours: refused(ours, "parameter groups by now, and the lr scheduler"),
        then="all",
    ),
    Row(
        "save_top_k=-1 keeps every file and adds a version to equal names; Lightning, if nothing is monitored, "
        "overwrites one file.",
        PAGE,
        replace(
            PLAIN, callbacks=(("ModelCheckpoint", {"save_top_k": -1, "filename": "best", "every_n_train_steps": 2}),)
        ),
        all_kept,
    ),
    Row(
        "If an epoch ended before its last batch, EarlyStopping reports that it skips the check; Lightning raises "
        "an error for the missing metric.",
        PAGE,
        program_of(20087),
        cut_without_metric,
        then="all",
    ),
    Row(
        "A checkpoint that is saved after the evaluation of another one holds the weights that the module has since "
        "then; Lightning's also holds the average of the fit.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "validate best", "test path"),
            callbacks=(("WeightAveraging", {}), ("ModelCheckpoint", {})),
        ),
        saved_behind_another,
    ),
    Row(
        "Without validation, ModelCheckpoint and EarlyStopping act at the end of each epoch, also with "
        "check_val_every_n_epoch and val_check_interval; Lightning's do nothing.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "check_val_every_n_epoch": 2},
            callbacks=(("ModelCheckpoint", {}),),
            val_loaders=(),
        ),
        waits_for_no_validation,
        then="all",
    ),
    Row(
        "EarlyStopping.stopped_epoch belongs to the last fit, and is 0 if that fit was not stopped; Lightning keeps "
        "the one of an earlier fit.",
        PAGE,
        program_of(40157),
        stopped_before,
    ),
    Row(
        "ModelCheckpoint(save_on_exception=True) saves in a fit; Lightning's also saves if an evaluation raises.",
        PAGE,
        program_of(40688),
        saved_in_evaluation,
    ),
    Row(
        "Values that an epoch's last hooks logged are available even if one of the hooks raises.",
        PAGE,
        program_of(10374),
        logged_at_end,
    ),
]
