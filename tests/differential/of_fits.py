"""The rows of the table for fits that go on, for flags and for names that are logged, and what they look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential.causes import BATCH, PAGE, SHOWN, Row, acts, begins, end, ended_before, refused, warned
from tests.differential.further import program_of
from tests.differential.program import LOSS, PLAIN, VAL, Act, Log, Program, Scheduler
from tests.differential.record import same

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def waits_for_mean(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A fit that Lightning's ModelCheckpoint ends at a validation, as the mean of the epoch's training is not there."""
    monitors = [str(part.get("monitor")) for kind, part in program.callbacks if kind == "ModelCheckpoint"]
    if d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:2], d.ours[:2]]):
        return any(name.endswith("_epoch") for name in monitors)
    ended = end(theirs, d.call).get("message") if d.call else str(theirs.ends)
    return bool(monitors) and "could not find the monitored key" in str(ended)


def metric_of_checkpoint(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A resumed fit that Lightning's EarlyStopping ends by an error, as the monitored name has no value yet."""
    if d.kind == "order" and not begins(d.theirs, "on_exception"):
        return False
    ended = end(theirs, d.call).get("message") if d.call else str(theirs.ends)
    return "resume" in str(d.call or program.calls) and "Early stopping conditioned on metric" in str(ended)


def accumulates_in_resumed(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Steps of a resumed epoch, which Lightning plays without the scheduler's windows."""
    scheduled = any(kind == "GradientAccumulationScheduler" for kind, _ in program.callbacks)
    return scheduled and "resume" in d.call and d.kind == "order" and begins(d.theirs, "on_before_optimizer_step")


def plateau_by_step(program: Program) -> bool:
    return any(each.kind == "plateau" and each.settings.get("interval") == "step" for each in program.schedulers)


def plateau_was_due(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A count of a plateau that is behind ours by the step that was due when the run was saved, and its rates."""
    resumes = any("resume" in call for call in program.calls)
    plateau = any(each.kind == "plateau" for each in program.schedulers)
    if not resumes or not plateau or "-" in (d.theirs, d.ours):
        return False
    if d.kind == "checkpoint" and d.name == "schedulers" and len(d.theirs) == len(d.ours):
        behind = [other - mine for mine, other in zip(d.theirs, d.ours, strict=True)]
        return set(behind) <= {0, 1}
    if "resume" not in d.call or d.name != "rates" or len(d.theirs) != len(d.ours):
        return False
    return all(mine >= other for mine, other in zip(d.theirs, d.ours, strict=True))


def loader_made_anew(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A training loader that a resumed fit asks for again in its first epoch, and nothing else."""
    if "resume" not in d.call or d.kind != "order" or "reload_dataloaders_every_n_epochs" not in program.flags:
        return False
    return begins(d.ours, "train_dataloader") and d.ours[1:] == d.theirs[: len(d.ours) - 1]


def epoch_of_a_loader(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A loader that a resumed fit asks for, as the run that is resumed had."""
    resumed = "resume" in d.call and "reload_dataloaders_every_n_epochs" in program.flags
    return resumed and d.where.endswith("_dataloader") and d.name == "current_epoch" and d.ours < d.theirs


def contradicted_in_dry_run(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return bool(program.flags.get("fast_dev_run")) and refused(theirs, "`val_check_interval` should be an integer")


def without_loss(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Two errors for one cause."""
    return d.name == "raised" and "needs the loss" in str(d.ours) and str(d.theirs).startswith("['TypeError']")


def logged_by_two(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Values of a name of two hooks: between those of a step, or where a plateau has looked at a step's."""
    if d.name not in SHOWN or "-" in (d.theirs, d.ours) or d.theirs.keys() != d.ours.keys():
        return False
    hooks = {(log.name, log.hook) for log in program.logs}
    names = [name for name, _ in hooks]
    several = {name for name in names if names.count(name) > 1}
    in_step = {name for name in several if sum(each == name and bool(BATCH.search(hook)) for each, hook in hooks) > 1}
    unlike = {name for name in d.ours if not same(d.theirs[name], d.ours[name])}
    in_step |= {f"{name}_step" for name in in_step}
    if unlike <= in_step and d.kind == "fact" and BATCH.search(d.where):
        return True
    now_and_then = any(log.every > 1 for log in program.logs if log.name in unlike)
    return unlike <= several and (plateau_by_step(program) or now_and_then)


def ranked_behind(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is kept of saves by steps or time where a validation of other weights has given the value."""
    told = any("is ranked by the value of" in text for _, text in ours.warned)
    kept = d.name == "ModelCheckpoint" or d.where == "names" or "on_save_checkpoint" in str([d.theirs, d.ours])
    return warned(d, "earlier weights") or (told and (kept or d.call.endswith("best")))


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


OF_FITS = [
    Row(
        "Values that a step logged before it fails can be read after the failure; in Lightning, those of the step "
        "before.",
        PAGE,
        replace(PLAIN, acts=(Act("raise", "on_after_backward", 2),)),
        lambda program, d, theirs, ours: (
            d.kind == "end" and d.name in SHOWN and "raised" in end(theirs, d.call) and d.ours != {}
        ),
    ),
    Row(
        "A save at the validation that ends an epoch waits for the epoch's training mean, and a missing name is "
        "reported there; Lightning uses an older mean, or raises.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss_epoch", "save_on_train_epoch_end": False}),)),
        waits_for_mean,
        then="all",
    ),
    Row(
        "EarlyStopping has the metrics of the checkpoint if a run resumes at an epoch's end; Lightning's raises.",
        PAGE,
        program_of(80196),
        metric_of_checkpoint,
        then="all",
    ),
    Row(
        "GradientAccumulationScheduler also applies in the epoch in which a run resumes; in Lightning, windows "
        "there have one batch.",
        PAGE,
        replace(
            PLAIN,
            train_samples=(12, 4),
            calls=("fit", "resume mid"),
            callbacks=(
                ("GradientAccumulationScheduler", {"scheduling": {0: 2}}),
                ("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1}),
            ),
        ),
        accumulates_in_resumed,
        then="all",
    ),
    Row(
        "A plateau scheduler that was due when a run was saved is stepped on resume; Lightning skips that step.",
        PAGE,
        replace(
            PLAIN,
            train_samples=(8, 4),
            calls=("fit", "resume mid"),
            schedulers=(Scheduler("plateau", {"interval": "step", "monitor": "loss"}),),
            callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1}),),
        ),
        plateau_was_due,
        then="numbers",
    ),
    Row(
        "A fit that resumes after an epoch's end creates its loader again if reload_dataloaders_every_n_epochs is "
        "due in the next epoch; Lightning has created it once in that epoch.",
        PAGE,
        program_of(40717),
        loader_made_anew,
    ),
    Row(
        "A fit that resumes with reload_dataloaders_every_n_epochs creates a loader with current_epoch set to the "
        "epoch in which it was created originally; Lightning uses the epoch of the resume.",
        PAGE,
        program_of(40717),
        epoch_of_a_loader,
    ),
    Row(
        "fast_dev_run sets the flags of validation before they are compared; Lightning refuses "
        "check_val_every_n_epoch=None with a fraction even then.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "fast_dev_run": 1, "check_val_every_n_epoch": None, "val_check_interval": 0.5},
        ),
        contradicted_in_dry_run,
        then="all",
    ),
    Row(
        "An optimizer that needs the loss is an error that names it if training_step returned None; Lightning "
        "raises a TypeError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), acts=(Act("skip", "training_step", 2),)),
        without_loss,
    ),
    Row(
        "If two hooks log the same name, the last logged value is shown; Lightning shows the value of the other "
        "hook again.",
        PAGE,
        replace(
            PLAIN,
            logs=(
                LOSS,
                Log("training_step", "a", "module", {}),
                Log("on_train_batch_end", "a", "module", {"on_epoch": False}),
            ),
        ),
        logged_by_two,
    ),
    Row(
        "A fit that resumes after an exception logs at the steps that were taken; Lightning's count may be one ahead.",
        PAGE,
        replace(
            PLAIN,
            acts=(Act("raise", "callback.on_validation_batch_end", 2),),
            flags={**PLAIN.flags, "val_check_interval": 3},
            train_samples=(12, 4),
            calls=("fit", "fit on"),
            logs=(LOSS, VAL, Log("on_train_batch_end", "e", "module", {"on_step": True})),
        ),
        logged_at,
    ),
    Row(
        "Step schedulers advance when an optimizer steps; Lightning's also advance on a batch that is None, or that "
        "on_train_batch_start ended.",
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
        "If validations are counted over all epochs, batches that on_train_batch_start ended, or of an epoch that "
        "an exception ended, do not count; in Lightning they do.",
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
        "A save by steps or time without a preceding validation records the step of its value, and ranks below "
        "saves with a value of their own.",
        PAGE,
        replace(
            PLAIN,
            logs=(LOSS, VAL),
            callbacks=(("ModelCheckpoint", {"monitor": "val", "every_n_train_steps": 2, "filename": "{step}"}),),
        ),
        ranked_behind,
        then="all",
    ),
]
