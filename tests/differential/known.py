"""The table of known differences between Lightning 2.6.6 and lockstep, in what programs show."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential import causes
from tests.differential.causes import PAGE, Row
from tests.differential.known_warnings import WARNINGS
from tests.differential.program import COMBINED, LOSS, PLAIN, VAL, Act, Log, Program, Scheduler
from tests.differential.record import same

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def _flags(**flags: Any) -> dict[str, Any]:
    return {**PLAIN.flags, **flags}


TAKEN_OUT = [
    Row(
        "ModelCheckpoint saves after the module's on_train_batch_end, so the checkpoint contains the changes of the "
        "hook; in Lightning it saves before the hook.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1}),)),
        causes.ends_in_batch_end,
        take=causes.saved_before_own,
    ),
    Row(
        "A value that is logged only in some steps is reported only for these steps; Lightning repeats the last value.",
        PAGE,
        replace(PLAIN, logs=(LOSS, Log("training_step", "a", "module", {}, every=2))),
        take=causes.without_repeated,
    ),
    Row(
        "A resumed fit has no sanity check; Lightning runs one if the checkpoint is from an epoch's end.",
        PAGE,
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1), calls=("fit", "resume")),
        causes.of_sanity_check,
        take=causes.without_sanity_of_resumed,
    ),
    Row(
        "on_save_checkpoint of callbacks also runs for files that contain only weights, because it may replace the "
        "weights.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"save_weights_only": True}),)),
        lambda program, d, theirs, ours: (
            d.kind == "checkpoint"
            and d.name in ("keys", "weights")
            and any(settings.get("save_weights_only") for _, settings in program.callbacks)
            and causes.averages(program)
        ),
        take=causes.without_saves_of_weights,
    ),
    Row(
        "WeightAveraging copies the layers when training starts; in Lightning, its setup calls configure_model.",
        PAGE,
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        take=causes.without_early_configure_model,
    ),
    Row(
        "With WeightAveraging, a module's on_load_checkpoint is also called for the current (not averaged) weights.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        take=causes.without_load_of_trained_weights,
    ),
    Row(
        "After a resume, callback_metrics contains the metrics of the checkpoint.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), logs=(LOSS, Log("on_train_epoch_end", "a", "module", {}))),
        causes.named_by_known,
        take=causes.without_restored_metrics,
    ),
    Row(
        "CSVLogger also writes an empty hparams.yaml if there are no hyperparameters; in Lightning only "
        "TensorBoardLogger does.",
        PAGE,
        replace(PLAIN, loggers=("csv",)),
        take=causes.without_empty_hyperparameters,
    ),
]


ROWS = [
    *TAKEN_OUT,
    Row(
        "A resumed fit trains layers that a finetuning callback has unfrozen; in Lightning, they are frozen again and "
        "stay frozen.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "resume"),
            backbone=True,
            callbacks=(("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1}),),
        ),
        causes.kept_thawed,
        then="numbers",
    ),
    Row(
        "With WeightAveraging, a checkpoint that is saved after the fit also contains the current weights; in "
        "Lightning, it contains the average instead. Before training, no average is saved; Lightning saves the first "
        "weights.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        causes.of_averaging,
        then="numbers",
    ),
    Row(
        "With 64-true and 16-bit precision, the weights of a checkpoint are loaded bit for bit; Lightning loads them "
        "into float32 and casts them afterwards.",
        PAGE,
        replace(PLAIN, flags=_flags(precision="64-true"), calls=("fit", "resume")),
        lambda program, d, theirs, ours: (
            program.flags.get("precision") in ("64-true", "bf16-true", "16-true")
            and "resume" in d.call
            and d.name == "weights"
        ),
        then="numbers",
    ),
    Row(
        "A closure that LBFGS calls again runs all micro-batches of its window, and each of them is logged once.",
        "docs/architecture.md: One step",
        replace(PLAIN, optimizers=("lbfgs",)),
        lambda program, d, theirs, ours: (
            program.optimizers == ("lbfgs",)
            and (d.name.endswith("_metrics") or d.name == "EarlyStopping" or causes.accumulates(program))
        ),
        then="numbers",
    ),
    Row(
        "Several loaders: a batch weighs the samples that lockstep's loaders drew for it; in Lightning the length "
        "of its first tensor.",
        "docs/architecture.md: Micro-batches are weighted by their samples",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
        lambda program, d, theirs, ours: program.train in COMBINED and d.name.endswith("_metrics"),
        then="numbers",
    ),
    Row(
        "A fit that resumes, or creates its loader again, shuffles once per epoch; Lightning starts with the second "
        "permutation of the loader's generator.",
        PAGE,
        replace(PLAIN, train="shuffled", calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            ("fit on" in d.call or "reload_dataloaders_every_n_epochs" in program.flags)
            and program.train == "shuffled"
            and d.name == "arguments"
            and "batch" in d.theirs
        ),
        then="numbers",
    ),
    Row(
        "Loaders are created before gradients are switched off; in Lightning afterwards.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1)),
        lambda program, d, theirs, ours: (
            d.name == "grad mode" and d.where.endswith("_dataloader") and d.ours == [True, False]
        ),
    ),
    Row(
        "estimated_stepping_batches is infinite for a loader without a length if max_steps is not set.",
        f"{PAGE}: estimated_stepping_batches",
        replace(PLAIN, train="iterable"),
        lambda program, d, theirs, ours: (
            d.name == "estimated_stepping_batches" and program.train == "iterable" and d.ours == math.inf
        ),
    ),
    Row(
        "The last, partial window is divided by the samples that are there.",
        f"{PAGE}: accumulate_grad_batches",
        replace(PLAIN, flags=_flags(accumulate_grad_batches=2)),
        lambda program, d, theirs, ours: (
            d.where.endswith(("on_before_backward", "module.backward", "on_train_batch_end", "optimizer.updated"))
            and d.name in ("arguments", "weights")
            and causes.accumulates(program)
        ),
        then="numbers",
    ),
    Row(
        "A training loader without batches is an error that names the loader; in Lightning, the fit ends without a "
        "step.",
        PAGE,
        replace(PLAIN, train="drop_last", train_samples=(1, 1)),
        lambda program, d, theirs, ours: causes.refused(ours, "has no batches"),
        then="all",
    ),
    Row(
        "is_last_batch is False before the first batch of a fit.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.name == "is_last_batch"
            and d.theirs is True
            and (d.state[2] != "train" or not causes.BATCH.search(d.where))
        ),
    ),
    Row(
        "The last batch of a loader without a length is recognized, and the optimizer steps after it; with a limit of "
        "batches, Lightning steps only at the limit.",
        PAGE,
        replace(PLAIN, train="iterable", flags=_flags(limit_train_batches=5)),
        causes.ends_before_limit,
        then="all",
    ),
    Row(
        "trainer.ckpt_path is set from the start of the call.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume")),
        causes.path_from_start,
    ),
    Row(
        "The pass for SWA's BatchNorm statistics does not count as an epoch.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: (
            d.name in ("max_epochs", "estimated_stepping_batches", "schedulers")
            and causes.has(program, "StochasticWeightAveraging")
        ),
        then="all",
    ),
    Row(
        "configure_gradient_clipping gets 'norm' if no algorithm was chosen; in Lightning None.",
        f"{PAGE}: gradient_clip_algorithm",
        replace(PLAIN, hooks="working", flags=_flags(gradient_clip_val=0.1)),
        causes.algorithm,
    ),
    Row(
        "trainer.num_training_batches and similar attributes belong to the current call: they are infinite or empty "
        "until the loaders of the call are created.",
        PAGE,
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.kind == "fact" and d.name.startswith(("num_", "val_check_batch")) and d.ours in (math.inf, [], None)
        ),
    ),
    Row(
        "A call without data, or with a missing checkpoint, is refused before its first hook.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume last")),
        causes.refused_call,
        then="all",
    ),
    Row(
        "A call without a module uses the weights of the last fit if there is no checkpoint; Lightning raises an "
        "error.",
        PAGE,
        replace(PLAIN, calls=("fit", "test untold")),
        lambda program, d, theirs, ours: d.call.endswith("untold") and "raised" in causes.end(theirs, d.call),
        then="all",
    ),
    Row(
        "Flags that contradict each other are an error that names both: min_epochs above max_epochs, min_steps above "
        "max_steps.",
        PAGE,
        replace(PLAIN, flags=_flags(min_epochs=3)),
        lambda program, d, theirs, ours: causes.refused(ours, "the minimum exceeds the maximum"),
        then="all",
    ),
    Row(
        "A monitored name that was never logged is an error, also if there are no validation batches (with "
        "limit_val_batches=0 a warning), or if a save by steps or time waits for the value; Lightning gives a warning "
        "and saves nothing.",
        PAGE,
        replace(PLAIN, val_loaders=(), callbacks=(("ModelCheckpoint", {"monitor": "val"}),)),
        lambda program, d, theirs, ours: (
            causes.refused(ours, "could not find the monitored key")
            and (
                causes.validates_nothing(program) or any("every_n_train_steps" in part for _, part in program.callbacks)
            )
        ),
        then="all",
    ),
    Row(
        "LearningRateMonitor omits values that an optimizer does not have; in Lightning, it raises a KeyError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), callbacks=(("LearningRateMonitor", {"log_weight_decay": True}),)),
        lambda program, d, theirs, ours: causes.has(program, "LearningRateMonitor") and "KeyError" in str(theirs.ends),
        then="all",
    ),
    Row(
        "save_top_k=0 with save_last: last.ckpt is written when training ends.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"save_top_k": 0, "save_last": True}),)),
        causes.only_last,
        then="all",
    ),
    Row(
        "An evaluation of a checkpoint with an average uses the average; in Lightning, it uses the current weights if "
        "the same Trainer ran the fit.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "test best"),
            callbacks=(("EMAWeightAveraging", {"decay": 0.5}), ("ModelCheckpoint", {})),
        ),
        causes.average_judged,
        then="numbers",
    ),
    Row(
        "Before the first update of an average, validation, checkpoints and the end of training use the current "
        "weights; in Lightning, those at the start of the fit.",
        PAGE,
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5, "update_starting_at_step": 4}),)),
        causes.before_average,
        then="numbers",
    ),
    Row(
        "A save by steps or time that waits for its metric happens when the metric is available; in Lightning, at a "
        "validation.",
        PAGE,
        replace(
            PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss_epoch", "every_n_train_steps": 1}),), val_loaders=()
        ),
        causes.waits_for_metric,
        then="all",
    ),
    Row(
        "LearningRateMonitor logs once per update; in Lightning, once per micro-batch of the window.",
        PAGE,
        replace(
            PLAIN,
            flags=_flags(accumulate_grad_batches=2),
            train_samples=(8, 4),
            schedulers=(Scheduler("step", {"interval": "step"}),),
            callbacks=(("LearningRateMonitor", {"logging_interval": "step"}),),
        ),
        causes.rate_of_window,
    ),
    Row(
        "A fit that is stopped within an accumulation window ends at the end of the window; Lightning discards the "
        "gradients of the window.",
        PAGE,
        replace(PLAIN, flags=_flags(accumulate_grad_batches=3), acts=(Act("stop", "training_step", 2),)),
        causes.stopped_at_boundary,
        then="all",
    ),
    Row(
        'With ckpt_path="last", the newest checkpoint is used if none is called last; Lightning starts from the '
        "beginning.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume last"), callbacks=(("ModelCheckpoint", {"dirpath": "kept"}),)),
        causes.newest_as_last,
        then="all",
    ),
    Row(
        "With fast_dev_run nothing is saved; in Lightning, save_last writes a file at the end of training.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=1), callbacks=(("ModelCheckpoint", {"save_last": True}),)),
        causes.dry_run_saves,
        then="all",
    ),
    Row(
        "last.ckpt is updated at each save; in Lightning, only if the checkpoint is among the best.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss", "mode": "max", "save_last": True}),)),
        causes.newest_is_last,
        then="all",
    ),
    Row(
        "Without validation, Lightning's pass for SWA ends with a step along the last epoch's gradient.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, val_loaders=(), norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: d.name == "weights" and causes.has(program, "StochasticWeightAveraging"),
        then="all",
    ),
    Row(
        "current_epoch counts finished epochs: an epoch in which a fit ended is not counted.",
        f"{PAGE}: current_epoch",
        replace(PLAIN, flags=_flags(max_steps=1)),
        causes.unfinished,
    ),
    Row(
        "A KeyboardInterrupt that a hook raises is raised from the call; Lightning exits the process with code 1.",
        PAGE,
        replace(PLAIN, acts=(Act("interrupt", "training_step", 2),)),
        causes.interrupted,
    ),
    Row(
        "With save_top_k=-1 every file is kept, and a version is added to equal names; if nothing is monitored, "
        "Lightning overwrites one file.",
        PAGE,
        replace(
            PLAIN, callbacks=(("ModelCheckpoint", {"save_top_k": -1, "filename": "best", "every_n_train_steps": 2}),)
        ),
        causes.all_kept,
    ),
    Row(
        "Without validation, ModelCheckpoint and EarlyStopping act at the end of each epoch, also with "
        "check_val_every_n_epoch and val_check_interval; in Lightning, they do nothing.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "check_val_every_n_epoch": 2},
            callbacks=(("ModelCheckpoint", {}),),
            val_loaders=(),
        ),
        causes.waits_for_no_validation,
        then="all",
    ),
    Row(
        "If a step fails, callback_metrics contains the values that it logged before the failure; in Lightning, those "
        "of the preceding step.",
        PAGE,
        replace(PLAIN, acts=(Act("raise", "on_after_backward", 2),)),
        lambda program, d, theirs, ours: (
            d.kind == "end" and d.name in causes.SHOWN and "raised" in causes.end(theirs, d.call) and d.ours != {}
        ),
    ),
    Row(
        "If a save monitors an epoch's training mean at the last validation of the epoch, it waits for this mean. "
        "If the name was never logged, this is reported at the end of the epoch; Lightning uses an older mean, or "
        "raises an error.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss_epoch", "save_on_train_epoch_end": False}),)),
        causes.waits_for_mean,
        then="all",
    ),
    Row(
        "If training_step returns None and the optimizer needs the loss, an error names the optimizer; Lightning "
        "raises a TypeError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), acts=(Act("skip", "training_step", 2),)),
        causes.without_loss,
    ),
    Row(
        "A save by steps or time without a preceding validation records the step at which its value was measured. It "
        "ranks below saves whose value was measured with their own weights.",
        PAGE,
        replace(
            PLAIN,
            logs=(LOSS, VAL),
            callbacks=(("ModelCheckpoint", {"monitor": "val", "every_n_train_steps": 2, "filename": "{step}"}),),
        ),
        causes.ranked_behind,
        then="all",
    ),
    Row(
        "An evaluation does not change ModelCheckpoint.last_model_path; Lightning sets it to the value that is saved "
        "in the evaluated checkpoint.",
        PAGE,
        replace(
            PLAIN,
            flags=_flags(max_epochs=1),
            calls=("fit", "test best"),
            callbacks=(("ModelCheckpoint", {"save_last": True}),),
        ),
        lambda program, d, theirs, ours: (
            d.name == "ModelCheckpoint" and same(d.theirs, {**d.ours, "last_model_path": d.theirs["last_model_path"]})
        ),
    ),
    *WARNINGS,
]


def explain(program: Program, difference: Difference, theirs: Record, ours: Record) -> Row | None:
    """The row that explains a difference, if one does."""
    return next((row for row in ROWS if row.holds(program, difference, theirs, ours)), None)
