"""The table of known differences between Lightning 2.6.6 and lockstep, in what programs show."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential.causes import (
    BATCH,
    PAGE,
    Row,
    accumulates,
    acts,
    after_exception,
    again,
    algorithm,
    average_judged,
    average_put_back,
    before_average,
    by_time,
    dry_run_saves,
    end,
    ends_before_limit,
    ends_epoch,
    ends_in_batch_end,
    goes_on,
    has,
    interrupted,
    kept_on_exception,
    kept_thawed,
    made_early,
    mixed_with_interrupted,
    monitor_kept,
    named_by_known,
    newest_as_last,
    newest_is_last,
    no_least,
    nothing_to_save,
    of_averaging,
    of_none,
    of_sanity_check,
    one_last,
    only_last,
    path_from_start,
    rate_of_window,
    refused,
    refused_call,
    saved_again,
    saved_before_own,
    saved_on_exception,
    stopped_at_boundary,
    swa_resumed,
    trains_nothing,
    unfinished,
    validated_by_number,
    validates_nothing,
    waits_for_metric,
    warned,
    without_early_configure_model,
    without_empty_hyperparameters,
    without_load_of_trained_weights,
    without_loader_of_nothing,
    without_repeated,
    without_restored_metrics,
    without_sanity_of_resumed,
    without_saves_of_weights,
)
from tests.differential.further import program_of
from tests.differential.known_warnings import WARNINGS
from tests.differential.more import widen
from tests.differential.of_callbacks import OF_CALLBACKS
from tests.differential.of_fits import OF_FITS
from tests.differential.program import COMBINED, LOSS, PLAIN, VAL, Act, Log, Program, Scheduler, draw
from tests.differential.record import same

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Record


def _flags(**flags: Any) -> dict[str, Any]:
    return {**PLAIN.flags, **flags}


TAKEN_OUT = [
    Row(
        "ModelCheckpoint saves a step after the module's on_train_batch_end, so that the checkpoint holds what the "
        "hook changes; Lightning's saves before it.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1}),)),
        ends_in_batch_end,
        take=saved_before_own,
    ),
    Row(
        "A name that only some steps log is shown for those steps; Lightning repeats its last value.",
        PAGE,
        replace(PLAIN, logs=(LOSS, Log("training_step", "a", "module", {}, every=2))),
        take=without_repeated,
    ),
    Row(
        "limit_train_batches=0: the loader is still created, and the log reports that there is nothing to train.",
        PAGE,
        replace(PLAIN, flags=_flags(limit_train_batches=0)),
        lambda program, d, theirs, ours: (
            trains_nothing(program)
            and (
                d.name in ("num_training_batches", "train_dataloader", "val_check_batch")
                or warned(d, "log_every_n_steps")
            )
        ),
        take=without_loader_of_nothing,
    ),
    Row(
        "A resumed fit has no sanity check; Lightning runs one if the checkpoint is from an epoch's end.",
        PAGE,
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1), calls=("fit", "resume")),
        of_sanity_check,
        take=without_sanity_of_resumed,
    ),
    Row(
        "The on_save_checkpoint of callbacks also runs for files that hold only weights, since it may replace the "
        "weights.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"save_weights_only": True}),)),
        lambda program, d, theirs, ours: (
            d.kind == "checkpoint"
            and d.name in ("keys", "weights")
            and any(settings.get("save_weights_only") for _, settings in program.callbacks)
            and (has(program, "EMAWeightAveraging") or has(program, "WeightAveraging"))
        ),
        take=without_saves_of_weights,
    ),
    Row(
        "WeightAveraging copies the layers when training starts; Lightning calls configure_model in its setup for it.",
        PAGE,
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        made_early,
        take=without_early_configure_model,
    ),
    Row(
        "A module's on_load_checkpoint is also called for the weights that train next to an average.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        take=without_load_of_trained_weights,
    ),
    Row(
        "A resumed fit has the metrics of its checkpoint.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), logs=(LOSS, Log("on_train_epoch_end", "a", "module", {}))),
        named_by_known,
        take=without_restored_metrics,
    ),
    Row(
        "CSVLogger also writes an empty hparams.yaml if there are no hyperparameters; in Lightning only "
        "TensorBoardLogger does.",
        PAGE,
        replace(PLAIN, loggers=("csv",)),
        take=without_empty_hyperparameters,
    ),
]


ROWS = [
    *TAKEN_OUT,
    *OF_CALLBACKS,
    *OF_FITS,
    Row(
        "A resumed fit trains what was thawed; Lightning's finetuning freezes it again for good.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "resume"),
            backbone=True,
            callbacks=(("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1}),),
        ),
        kept_thawed,
        then="numbers",
    ),
    Row(
        "WeightAveraging keeps the current weights for a checkpoint that is saved after the fit, and saves nothing "
        "before training; Lightning saves the average as both, and the first weights.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        of_averaging,
        then="numbers",
    ),
    Row(
        "If a training batch is None, nothing is logged; Lightning logs the last values again. A window with other "
        "batches is stepped with those.",
        PAGE,
        replace(PLAIN, train="some None", train_samples=(9, 4)),
        of_none,
        then="all",
    ),
    Row(
        "A second fit with GradientAccumulationScheduler works.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "fit on"),
            callbacks=(("GradientAccumulationScheduler", {"scheduling": {0: 2}}),),
            train_samples=(8, 4),
        ),
        again,
        then="all",
    ),
    Row(
        "OnExceptionCheckpoint keeps its file until a fit ends without an exception; in Lightning any other call "
        "deletes it.",
        PAGE,
        widen(draw(1093)),
        kept_on_exception,
    ),
    Row(
        "OnExceptionCheckpoint saves nothing before training has started.",
        PAGE,
        replace(
            PLAIN,
            acts=(Act("raise", "on_fit_start", 1),),
            callbacks=(("OnExceptionCheckpoint", {"dirpath": "kept"}), ("ModelCheckpoint", {})),
        ),
        nothing_to_save,
        then="all",
    ),
    Row(
        "`training_step(dataloader_iter)` is refused by name.",
        PAGE,
        replace(PLAIN, iter_step=True),
        lambda program, d, theirs, ours: program.iter_step and refused(ours, "dataloader_iter"),
        then="all",
    ),
    Row(
        "With 64-true and 16-bit precision, the weights of a checkpoint keep their bits; Lightning loads them into "
        "float32 and casts them afterwards.",
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
            program.optimizers in (("lbfgs",), ("closure twice",))
            and (d.name.endswith("_metrics") or d.name == "EarlyStopping" or accumulates(program))
        ),
        then="numbers",
    ),
    Row(
        "Several loaders: a batch weighs the samples that lockstep's loaders drew for it; in Lightning the length "
        "of its first tensor.",
        "docs/architecture.md: Micro-batches weigh their samples",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
        lambda program, d, theirs, ours: program.train in COMBINED and d.name.endswith("_metrics"),
        then="numbers",
    ),
    Row(
        "A resumed run continues with the order of data of its own epoch; Lightning draws the first epoch's again.",
        "README.md",
        replace(
            PLAIN,
            train="shuffled",
            calls=("fit", "resume mid"),
            callbacks=(("ModelCheckpoint", {"every_n_train_steps": 2, "save_top_k": -1}),),
        ),
        lambda program, d, theirs, ours: (
            "resume" in d.call and program.train == "shuffled" and d.name == "arguments" and "batch" in d.theirs
        ),
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
        "trainer.accumulate_grad_batches is that of the current epoch from the start, and 1 again after the fit.",
        f"{PAGE}: GradientAccumulationScheduler",
        replace(PLAIN, callbacks=(("GradientAccumulationScheduler", {"scheduling": {0: 2}}),)),
        lambda program, d, theirs, ours: (
            d.name in ("accumulate_grad_batches", "estimated_stepping_batches")
            and has(program, "GradientAccumulationScheduler")
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
            and accumulates(program)
        ),
        then="numbers",
    ),
    Row(
        "A fraction as a limit on several training loaders applies to their combined batches; Lightning refuses it "
        "if one of them has no batch in it.",
        PAGE,
        replace(
            PLAIN,
            train="dict max_size_cycle",
            train_samples=(9, 3),
            batch_size=3,
            flags=_flags(limit_train_batches=0.5),
        ),
        lambda program, d, theirs, ours: program.train.startswith("dict") and refused(theirs, "You requested to check"),
        then="all",
    ),
    Row(
        "A training loader without batches is refused by name; Lightning's fit ends without a step.",
        PAGE,
        replace(PLAIN, train="drop_last", train_samples=(1, 1)),
        lambda program, d, theirs, ours: refused(ours, "has no batches"),
        then="all",
    ),
    Row(
        "is_last_batch is False before the first batch of a fit, and if a user ends the epoch before the loader does.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.name == "is_last_batch"
            and d.theirs is True
            and (d.state[2] != "train" or acts(program, "end epoch") or not BATCH.search(d.where))
        ),
    ),
    Row(
        "The last batch of a loader without a length is recognized, and its window is stepped; with a limit, "
        "Lightning waits for that limit.",
        PAGE,
        replace(PLAIN, train="iterable", flags=_flags(limit_train_batches=5)),
        ends_before_limit,
        then="all",
    ),
    Row(
        "In manual optimization, the configuration of a plateau scheduler keeps its monitor; Lightning drops it.",
        PAGE,
        replace(PLAIN, manual=True, schedulers=(Scheduler("plateau", {"monitor": "loss"}),)),
        monitor_kept,
    ),
    Row(
        "trainer.ckpt_path is set from the start of the call.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume")),
        path_from_start,
    ),
    Row(
        "The pass for SWA's BatchNorm statistics does not count as an epoch.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: (
            d.name in ("max_epochs", "estimated_stepping_batches", "schedulers")
            and has(program, "StochasticWeightAveraging")
        ),
        then="all",
    ),
    Row(
        "configure_gradient_clipping gets 'norm' if no algorithm was chosen; in Lightning None.",
        f"{PAGE}: gradient_clip_algorithm",
        replace(PLAIN, hooks="working", flags=_flags(gradient_clip_val=0.1)),
        algorithm,
    ),
    Row(
        "Numbers of batches belong to the current call: they are infinite or empty until its loaders are created.",
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
        refused_call,
        then="all",
    ),
    Row(
        "A call without a module uses the weights of the last fit if no checkpoint was kept; Lightning raises.",
        PAGE,
        replace(PLAIN, calls=("fit", "test untold")),
        lambda program, d, theirs, ours: d.call.endswith("untold") and "raised" in end(theirs, d.call),
        then="all",
    ),
    Row(
        "A run that was saved at the last batch of an epoch resumes with the end of that epoch; Lightning skips it.",
        PAGE,
        program_of(421),
        ends_epoch,
        then="all",
    ),
    Row(
        "A call that fails before its loop, because its checkpoint is missing, shows no metrics of the previous call.",
        PAGE,
        program_of(849),
        lambda program, d, theirs, ours: (
            d.kind == "end" and "raised" in end(theirs, d.call) and d.name.endswith("_metrics") and d.ours == {}
        ),
    ),
    Row(
        "Flags that contradict each other are refused by name: min_epochs above max_epochs, min_steps above max_steps.",
        PAGE,
        replace(PLAIN, flags=_flags(min_epochs=3)),
        lambda program, d, theirs, ours: refused(ours, "the minimum exceeds the maximum"),
        then="all",
    ),
    Row(
        "A monitored name that was never logged is an error, also if there are no validation batches (with "
        "limit_val_batches=0 a warning) or a save by steps or time waits for it; Lightning warns and saves nothing.",
        PAGE,
        replace(PLAIN, val_loaders=(), callbacks=(("ModelCheckpoint", {"monitor": "val"}),)),
        lambda program, d, theirs, ours: (
            refused(ours, "no metric with this name was logged")
            and (
                validates_nothing(program)
                or any(part.keys() & {"train_time_interval", "every_n_train_steps"} for _, part in program.callbacks)
            )
        ),
        then="all",
    ),
    Row(
        "LearningRateMonitor omits what an optimizer does not have; Lightning's raises a KeyError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), callbacks=(("LearningRateMonitor", {"log_weight_decay": True}),)),
        lambda program, d, theirs, ours: has(program, "LearningRateMonitor") and "KeyError" in str(theirs.ends),
        then="all",
    ),
    Row(
        "A fit after one with SWA starts with the epoch that trainer.current_epoch reports; Lightning has counted "
        "the pass for BatchNorm.",
        PAGE,
        program_of(510),
        swa_resumed,
        then="all",
    ),
    Row(
        "Until on_train_start, current_epoch is that of the checkpoint; in Lightning it is the next one if the "
        "checkpoint is from an epoch's end.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "resume mid"),
            data="data module",
            callbacks=(("ModelCheckpoint", {}),),
        ),
        lambda program, d, theirs, ours: (
            "resume" in d.call
            and d.where.endswith(("_dataloader", "on_train_start"))
            and d.name == "current_epoch"
            and d.theirs == d.ours + 1
        ),
    ),
    Row(
        "A run that resumes within an epoch continues with the next batch; Lightning restarts the loader, and also "
        "continues the count with max_steps in the next epoch.",
        "README.md",
        replace(
            PLAIN,
            train_samples=(8, 4),
            calls=("fit", "resume mid"),
            callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1, "save_top_k": -1}),),
        ),
        goes_on,
        then="all",
    ),
    Row(
        "save_top_k=0 with save_last: last.ckpt is written when training ends.",
        PAGE,
        widen(draw(2157)),
        only_last,
        then="all",
    ),
    Row(
        "An evaluation of a checkpoint with an average uses the average; Lightning's, in the Trainer of the fit, "
        "uses the current weights.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "test best"),
            callbacks=(("EMAWeightAveraging", {"decay": 0.5}), ("ModelCheckpoint", {})),
        ),
        average_judged,
        then="numbers",
    ),
    Row(
        "Before the first update of an average, validation, checkpoints and the end of training use the current "
        "weights; in Lightning, those at the start of the fit.",
        PAGE,
        widen(draw(328)),
        before_average,
        then="numbers",
    ),
    Row(
        "After an exception in a validation the module has the current weights; in Lightning, the average.",
        PAGE,
        replace(
            PLAIN,
            acts=(Act("raise", "validation_step", 2),),
            callbacks=(("EMAWeightAveraging", {"decay": 0.5}),),
        ),
        average_put_back,
        then="numbers",
    ),
    Row(
        "A run that an exception ended resumes at the hook at which it was saved; Lightning repeats some hooks.",
        PAGE,
        replace(PLAIN, acts=(Act("raise", "on_validation_epoch_end", 1),), calls=("fit", "resume")),
        after_exception,
        then="all",
    ),
    Row(
        "A save by steps or time that waits for its metric happens when the metric is available; Lightning's at a "
        "validation.",
        PAGE,
        replace(
            PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss_epoch", "every_n_train_steps": 1}),), val_loaders=()
        ),
        waits_for_metric,
        then="all",
    ),
    Row(
        "train_time_interval also works in manual optimization.",
        PAGE,
        replace(PLAIN, manual=True, callbacks=(("ModelCheckpoint", {"train_time_interval": "at once"}),)),
        by_time,
        then="all",
    ),
    Row(
        "LearningRateMonitor logs once per update; Lightning's once per micro-batch of the window.",
        PAGE,
        replace(
            PLAIN,
            flags=_flags(accumulate_grad_batches=2),
            train_samples=(8, 4),
            schedulers=(Scheduler("step", {"interval": "step"}),),
            callbacks=(("LearningRateMonitor", {"logging_interval": "step"}),),
        ),
        rate_of_window,
    ),
    Row(
        "A fit that is stopped within an accumulation window ends with the window; Lightning drops its gradients.",
        PAGE,
        replace(PLAIN, flags=_flags(accumulate_grad_batches=3), acts=(Act("stop", "training_step", 2),)),
        stopped_at_boundary,
        then="all",
    ),
    Row(
        "Metrics of a call include nothing of an interrupted one before; Lightning adds to the results of its "
        "validation.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "fit on"),
            acts=(Act("interrupt", "on_validation_end", 1),),
            logs=(LOSS, VAL),
        ),
        mixed_with_interrupted,
        then="numbers",
    ),
    Row(
        'ckpt_path="last" takes the newest checkpoint if none is called last; Lightning starts from the beginning.',
        PAGE,
        replace(PLAIN, calls=("fit", "resume last"), callbacks=(("ModelCheckpoint", {"dirpath": "kept"}),)),
        newest_as_last,
        then="all",
    ),
    Row(
        "A run that resumes from last.ckpt overwrites it; Lightning writes another file.",
        PAGE,
        program_of(1353),
        one_last,
    ),
    Row(
        "A resumed run does not save again the state that it was resumed from.",
        PAGE,
        widen(draw(741)),
        saved_again,
        then="all",
    ),
    Row(
        "check_val_every_n_epoch decides by the number of the epoch in which a fit resumes; in Lightning, by the "
        "next one.",
        PAGE,
        widen(draw(859)),
        validated_by_number,
        then="all",
    ),
    Row(
        "fast_dev_run ignores min_epochs and min_steps.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=2, min_steps=2), acts=(Act("stop", "training_step", 1),)),
        no_least,
        then="all",
    ),
    Row(
        "fast_dev_run saves nothing; Lightning's save_last writes a file at the end of training.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=1), callbacks=(("ModelCheckpoint", {"save_last": True}),)),
        dry_run_saves,
        then="all",
    ),
    Row(
        "Without gradients nothing is clipped; Lightning's clipping by value raises.",
        PAGE,
        replace(PLAIN, optimizers=("none",), flags=_flags(gradient_clip_val=0.1, gradient_clip_algorithm="value")),
        lambda program, d, theirs, ours: "nested_tensorlist" in str(theirs.ends),
        then="all",
    ),
    Row(
        "last.ckpt is the newest state at each save; in Lightning only if that state is among the best.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss", "mode": "max", "save_last": True}),)),
        newest_is_last,
        then="all",
    ),
    Row(
        "Without validation, Lightning's pass for SWA ends with a step along the last epoch's gradient.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, val_loaders=(), norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: d.name == "weights" and has(program, "StochasticWeightAveraging"),
        then="all",
    ),
    Row(
        "current_epoch counts finished epochs: an epoch in which a fit ended is not counted.",
        f"{PAGE}: current_epoch",
        replace(PLAIN, flags=_flags(max_steps=1)),
        unfinished,
    ),
    Row(
        "A KeyboardInterrupt raised in a hook leaves the call; Lightning exits the process with code 1.",
        PAGE,
        replace(PLAIN, acts=(Act("interrupt", "training_step", 2),)),
        interrupted,
    ),
    Row(
        "ModelCheckpoint(save_on_exception=True) overwrites no existing file: it uses the next version.",
        PAGE,
        replace(
            PLAIN,
            acts=(Act("raise", "on_train_epoch_end", 1),),
            callbacks=(
                ("ModelCheckpoint", {"every_n_train_steps": 1}),
                ("ModelCheckpoint", {"save_on_exception": True}),
            ),
        ),
        saved_on_exception,
    ),
    Row(
        "Values that were logged before on_train_batch_start ended a batch are shown.",
        PAGE,
        replace(
            PLAIN,
            acts=(Act("end epoch", "on_train_batch_start", 2),),
            logs=(LOSS, Log("on_train_batch_start", "a", "callback", {})),
        ),
        lambda program, d, theirs, ours: (
            acts(program, "end epoch")
            and d.name.endswith("_metrics")
            and "-" not in (d.theirs, d.ours)
            and d.theirs.keys() <= d.ours.keys()
            and {name for name in d.ours if not same(d.theirs.get(name), d.ours[name])}
            <= {
                f"{log.name}{end}"
                for log in program.logs
                for end in ("", "_step")
                if log.hook == "on_train_batch_start"
            }
        ),
    ),
    *WARNINGS,
]


def explain(program: Program, difference: Difference, theirs: Record, ours: Record) -> Row | None:
    """The row that explains a difference, if one does."""
    return next((row for row in ROWS if row.holds(program, difference, theirs, ours)), None)
