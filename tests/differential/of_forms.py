"""The rows of the table for the forms in which programs are written, and what they look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential.causes import PAGE, SHOWN, Row, acts, begins, ended_before, refused, warned
from tests.differential.forms import PAST_WRAPPER, program_in_forms
from tests.differential.program import LOSS, PLAIN, VAL, Act, Program, Scheduler

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def stepped_past(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Steps of an optimizer that Lightning does not see, and so does not count."""
    return (
        program.by_hand in PAST_WRAPPER
        and d.name == "global_step"
        and "-" not in (d.theirs, d.ours)
        and d.theirs < d.ours
    )


def ranked_behind(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is kept of saves by steps or time where a validation of other weights has given the value."""
    told = any("are ranked by" in text for _, text in ours.warned)
    kept = d.name == "ModelCheckpoint" or d.where == "names" or "on_save_checkpoint" in str([d.theirs, d.ours])
    return warned(d, "earlier weights") or (told and (kept or d.call.endswith("best")))


def in_no_attribute(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Metric objects that Lightning does not find in the module."""
    return program.metrics == "hidden" and refused(theirs, "Could not find the `LightningModule` attribute")


def of_whole_epoch(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Means of an epoch that was gone on with."""
    logged = d.kind in ("rows", "files") or d.name.endswith("_metrics")
    return program.train.startswith("with state") and "resume" in d.call + str(program.calls) and logged


def of_each_loader(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A metric object that is logged for several loaders."""
    logged = d.kind in ("rows", "files") or d.name.endswith("_metrics")
    return program.metrics == "in validation" and len(program.val_loaders) > 1 and logged


def by_updates(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Schedulers by step where a batch is None, or ended by its first hook."""
    by_step = any(each.settings.get("interval") == "step" for each in program.schedulers)
    if not by_step or not (program.train == "some None" or acts(program, "end epoch")):
        return False
    told = warned(d, "order of schedulers and optimizers")
    return told or d.name in ("rates", "schedulers", "LearningRateMonitor") or begins(d.theirs, "lr_scheduler_step")


def counts_ended(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Validations that come by a count of batches over all epochs, of which a hook or an exception has ended one."""
    over_epochs = program.flags.get("check_val_every_n_epoch", 1) is None
    ended = acts(program, "end epoch") or ended_before(theirs, d)
    if not over_epochs or not ended or d.kind != "order":
        return False
    validates = ("on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_start")
    return begins(d.theirs, *validates) is not begins(d.ours, *validates)


def logged_at(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Steps at which values were logged where a run goes on that an exception had ended."""
    if d.kind != "rows" or not isinstance(d.theirs, list) or len(program.calls) < 2 or not ended_before(theirs, d):
        return False
    if [list(row)[1:] for row in d.theirs] == [list(row)[1:] for row in d.ours]:
        return True
    mine, other = of_epochs(theirs.rows), of_epochs(ours.rows)
    return len(mine) == len(other) and all(there - here in (0, 1) for there, here in zip(mine, other, strict=True))


def of_epochs(rows: list[Any]) -> list[int]:
    """The steps of the rows that hold an epoch's values."""
    return [row[0] for row in rows if isinstance(row[0], int) and any(name.endswith("_epoch") for name in row[1])]


def metrics_go_on(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Values of a metric object that is computed by hand."""
    if program.metrics not in ("computed", "in a callback") or not any("resume" in call for call in program.calls):
        return False
    told = d.kind == "warnings" and d.where.startswith("The ``compute`` method of metric") and not d.ours
    return told or ("resume" in d.call and d.name in SHOWN and "metric" in d.theirs and "metric" in d.ours)


def gradients_kept(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Gradients that a module with manual optimization has where it goes on."""
    if not program.manual or "resume" not in d.call or d.name != "gradients" or "-" in (d.theirs, d.ours):
        return False
    return all(here or not there for there, here in zip(d.theirs, d.ours, strict=True))


def beside(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Batches of a resumed run whose loaders go side by side."""
    return program.train.startswith("with state beside") and "resume" in d.call and d.name == "arguments"


EACH_STEP = ("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1})
OF_FORMS = [
    Row(
        "A metric object that is computed by hand goes on from its checkpoint; Lightning's begins anew.",
        PAGE,
        replace(PLAIN, train_samples=(8, 4), metrics="computed", calls=("fit", "resume mid"), callbacks=(EACH_STEP,)),
        metrics_go_on,
        then="numbers",
    ),
    Row(
        "A run that goes on in manual optimization has the gradients of its checkpoint.",
        PAGE,
        program_in_forms(3189),
        gradients_kept,
        then="numbers",
    ),
    Row(
        "Loaders side by side go on where they were, whether they have a state or not; Lightning's begin anew where "
        "they have none.",
        PAGE,
        program_in_forms(3207),
        beside,
        then="all",
    ),
    Row(
        "A fit that goes on after an exception logs at the steps that were taken; Lightning's count may be one ahead.",
        PAGE,
        program_in_forms(3081),
        logged_at,
    ),
    Row(
        "A metric object that is logged for several loaders has a value of each; Lightning's second value holds the "
        "first loader's samples, too.",
        PAGE,
        replace(PLAIN, metrics="in validation", val_loaders=(3, 5)),
        of_each_loader,
        then="numbers",
    ),
    Row(
        "Schedulers by step advance where an optimizer steps; Lightning's on a batch that is None, or that "
        "on_train_batch_start has ended, too.",
        PAGE,
        replace(
            PLAIN,
            train="some None",
            train_samples=(9, 4),
            schedulers=(Scheduler("exponential", {"interval": "step"}),),
        ),
        by_updates,
        then="all",
    ),
    Row(
        "Where validations come by a count over all epochs, a batch that on_train_batch_start has ended is none of it, "
        "nor one of an epoch that an exception has ended and that begins anew; Lightning counts them.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "check_val_every_n_epoch": None, "val_check_interval": 2},
            acts=(Act("end epoch", "on_train_batch_start", 2),),
        ),
        counts_ended,
        then="all",
    ),
    Row(
        "Steps of a plain optimizer in manual optimization are counted; Lightning's global_step stays.",
        PAGE,
        replace(PLAIN, manual=True, by_hand="raw"),
        stepped_past,
        then="all",
    ),
    Row(
        "A save by steps or time that no validation precedes says of which step its value is, and is ranked behind "
        "those whose value is their own.",
        PAGE,
        replace(
            PLAIN,
            logs=(LOSS, VAL),
            callbacks=(("ModelCheckpoint", {"monitor": "val", "every_n_train_steps": 2, "filename": "{step}"}),),
        ),
        ranked_behind,
        then="all",
    ),
    Row(
        "A metric object is logged wherever it is kept, in a list, too; Lightning wants an attribute of the module.",
        PAGE,
        replace(PLAIN, metrics="hidden"),
        in_no_attribute,
        then="all",
    ),
    Row(
        "A loader with a state: the means of an epoch that is gone on with are of all its batches; Lightning's of "
        "those that were to come.",
        PAGE,
        replace(
            PLAIN,
            train="with state",
            train_samples=(8, 4),
            calls=("fit", "resume mid"),
            callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1}),),
        ),
        of_whole_epoch,
        then="numbers",
    ),
]
