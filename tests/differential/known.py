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
        "ModelCheckpoint saves a step behind the module's on_train_batch_end, so that what the hook changes is in the "
        "checkpoint; Lightning's saves before it, and a resume loses that.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"every_n_train_steps": 1}),)),
        ends_in_batch_end,
        take=saved_before_own,
    ),
    Row(
        "A name that is logged in some steps only is shown in those; Lightning repeats its last value.",
        PAGE,
        replace(PLAIN, logs=(LOSS, Log("training_step", "a", "module", {}, every=2))),
        take=without_repeated,
    ),
    Row(
        "limit_train_batches=0: the loader is asked for, and the log says that there is nothing to train.",
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
        "A resumed fit has no sanity check; Lightning has one where the checkpoint is of an epoch's end.",
        PAGE,
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1), calls=("fit", "resume")),
        of_sanity_check,
        take=without_sanity_of_resumed,
    ),
    Row(
        "Callbacks' on_save_checkpoint runs for files that hold weights only, too: it may put other weights in.",
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
        "A module's on_load_checkpoint is called for the weights that train beside an average, too.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        take=without_load_of_trained_weights,
    ),
    Row(
        "A resumed fit knows the metrics of its checkpoint.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), logs=(LOSS, Log("on_train_epoch_end", "a", "module", {}))),
        named_by_known,
        take=without_restored_metrics,
    ),
    Row(
        "CSVLogger writes hparams.yaml, an empty one, where there are no hyperparameters, too; Lightning's "
        "TensorBoardLogger alone.",
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
        "A fit that goes on trains what was thawed; Lightning's finetuning freezes it again, for good.",
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
        "WeightAveraging keeps the current weights for a checkpoint that is taken after the fit, and has nothing to "
        "save before training; Lightning saves the average for both, and the first weights.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        of_averaging,
        then="numbers",
    ),
    Row(
        "Where a training batch is None, nothing is logged; Lightning logs the last values again. A window that has "
        "other batches is stepped with those.",
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
        "OnExceptionCheckpoint keeps its file until a fit ends well; in Lightning any other call deletes it.",
        PAGE,
        widen(draw(1093)),
        kept_on_exception,
    ),
    Row(
        "OnExceptionCheckpoint saves what has been trained, and nothing before training.",
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
        "With 64-true and 16 bits Lightning loads a checkpoint's weights into float32 and casts them after it; here "
        "they keep their bits.",
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
        "Loaders side by side: a batch weighs what our loader drew for it, in Lightning as much as its first tensor.",
        "docs/architecture.md: Micro-batches weigh their samples",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
        lambda program, d, theirs, ours: program.train in COMBINED and d.name.endswith("_metrics"),
        then="numbers",
    ),
    Row(
        "A resumed run goes on with the order of data of its own epoch; Lightning draws the first epoch's again.",
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
        "A fit that goes on, or makes its loader anew, shuffles once an epoch; Lightning begins with the second "
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
        "Loaders are asked for before gradients are switched off, in Lightning after it.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1)),
        lambda program, d, theirs, ours: (
            d.name == "grad mode" and d.where.endswith("_dataloader") and d.ours == [True, False]
        ),
    ),
    Row(
        "accumulate_grad_batches is that of the epoch from the start; 1 again after the fit.",
        f"{PAGE}: GradientAccumulationScheduler",
        replace(PLAIN, callbacks=(("GradientAccumulationScheduler", {"scheduling": {0: 2}}),)),
        lambda program, d, theirs, ours: (
            d.name in ("accumulate_grad_batches", "estimated_stepping_batches")
            and has(program, "GradientAccumulationScheduler")
        ),
    ),
    Row(
        "estimated_stepping_batches is infinite for a loader without length and no max_steps.",
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
        "A fraction of several training loaders is one of their batches together; Lightning refuses it where it is no "
        "batch of one of them.",
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
        "is_last_batch is false before the first batch of a fit, and where a user ends the epoch before the loader.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.name == "is_last_batch"
            and d.theirs is True
            and (d.state[2] != "train" or acts(program, "end epoch") or not BATCH.search(d.where))
        ),
    ),
    Row(
        "The last batch of a loader without length is known as such, and its window stepped; where there is a limit "
        "Lightning waits for that one.",
        PAGE,
        replace(PLAIN, train="iterable", flags=_flags(limit_train_batches=5)),
        ends_before_limit,
        then="all",
    ),
    Row(
        "In manual optimization the entry of a plateau scheduler keeps its monitor; Lightning drops it.",
        PAGE,
        replace(PLAIN, manual=True, schedulers=(Scheduler("plateau", {"monitor": "loss"}),)),
        monitor_kept,
    ),
    Row(
        "ckpt_path is there from the start of the call.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume")),
        path_from_start,
    ),
    Row(
        "The pass for SWA's BatchNorm statistics is no epoch of its own.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: (
            d.name in ("max_epochs", "estimated_stepping_batches", "schedulers")
            and has(program, "StochasticWeightAveraging")
        ),
        then="all",
    ),
    Row(
        "configure_gradient_clipping is given 'norm' where no algorithm was chosen, in Lightning None.",
        f"{PAGE}: gradient_clip_algorithm",
        replace(PLAIN, hooks="working", flags=_flags(gradient_clip_val=0.1)),
        algorithm,
    ),
    Row(
        "Numbers of batches are those of this call: infinite or empty until its loaders are asked for.",
        PAGE,
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.kind == "fact" and d.name.startswith(("num_", "val_check_batch")) and d.ours in (math.inf, [], None)
        ),
    ),
    Row(
        "A call that lacks data or a checkpoint is refused before its first hook.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume last")),
        refused_call,
        then="all",
    ),
    Row(
        "A call without a module takes the weights of the last fit where no checkpoint was kept; Lightning raises.",
        PAGE,
        replace(PLAIN, calls=("fit", "test untold")),
        lambda program, d, theirs, ours: d.call.endswith("untold") and "raised" in end(theirs, d.call),
        then="all",
    ),
    Row(
        "A run that was saved at the last batch of an epoch goes on with that epoch's end; Lightning leaves it out.",
        PAGE,
        program_of(421),
        ends_epoch,
        then="all",
    ),
    Row(
        "A call that fails before its loop, as its checkpoint is not there, shows no metrics of the call before.",
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
        lambda program, d, theirs, ours: refused(ours, "the minimum is above the maximum"),
        then="all",
    ),
    Row(
        "A monitored name that no fit has logged is an error, where there are no validation's batches either (with "
        "limit_val_batches=0 a warning), or where a save by steps or time waits for it; Lightning warns, and saves "
        "nothing.",
        PAGE,
        replace(PLAIN, val_loaders=(), callbacks=(("ModelCheckpoint", {"monitor": "val"}),)),
        lambda program, d, theirs, ours: (
            refused(ours, "no such metric was logged")
            and (
                validates_nothing(program)
                or any(part.keys() & {"train_time_interval", "every_n_train_steps"} for _, part in program.callbacks)
            )
        ),
        then="all",
    ),
    Row(
        "LearningRateMonitor leaves out what an optimizer does not have; Lightning raises a KeyError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), callbacks=(("LearningRateMonitor", {"log_weight_decay": True}),)),
        lambda program, d, theirs, ours: has(program, "LearningRateMonitor") and "KeyError" in str(theirs.ends),
        then="all",
    ),
    Row(
        "A fit after one with SWA begins with the epoch that it says; Lightning has counted the pass for BatchNorm.",
        PAGE,
        program_of(510),
        swa_resumed,
        then="all",
    ),
    Row(
        "In on_train_start and before, current_epoch is that of the checkpoint; in Lightning the one after, where the "
        "checkpoint is of an epoch's end.",
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
        "A run that goes on within an epoch begins with the batch that follows; Lightning begins the loader anew, and "
        "counts on with max_steps in the next epoch, too.",
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
        "save_top_k=0 with save_last: last.ckpt is written where training ends.",
        PAGE,
        widen(draw(2157)),
        only_last,
        then="all",
    ),
    Row(
        "An evaluation of a checkpoint with an average takes the average; Lightning's, in the Trainer of the fit, the "
        "current weights.",
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
        "Before the first update of an average, validation, a checkpoint and the end of training see the current "
        "weights; in Lightning those that the fit began with.",
        PAGE,
        widen(draw(328)),
        before_average,
        then="numbers",
    ),
    Row(
        "An exception in a validation leaves the current weights in the module; in Lightning the average.",
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
        "A run that an exception has ended goes on at the hook where it was saved; Lightning repeats some.",
        PAGE,
        replace(PLAIN, acts=(Act("raise", "on_validation_epoch_end", 1),), calls=("fit", "resume")),
        after_exception,
        then="all",
    ),
    Row(
        "A save by steps or time that waits for its metric is made when that is there; Lightning's at a validation.",
        PAGE,
        replace(
            PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss_epoch", "every_n_train_steps": 1}),), val_loaders=()
        ),
        waits_for_metric,
        then="all",
    ),
    Row(
        "train_time_interval works under manual optimization, too.",
        PAGE,
        replace(PLAIN, manual=True, callbacks=(("ModelCheckpoint", {"train_time_interval": "at once"}),)),
        by_time,
        then="all",
    ),
    Row(
        "LearningRateMonitor logs once an update; Lightning's for each micro-batch of the window.",
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
        "A fit that is asked to stop within an accumulation window ends with the window; Lightning drops what it has.",
        PAGE,
        replace(PLAIN, flags=_flags(accumulate_grad_batches=3), acts=(Act("stop", "training_step", 2),)),
        stopped_at_boundary,
        then="all",
    ),
    Row(
        "Metrics of a call have nothing of an interrupted one before; Lightning adds to the results of its validation.",
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
        'ckpt_path="last" takes the newest checkpoint where none is called last; Lightning begins anew.',
        PAGE,
        replace(PLAIN, calls=("fit", "resume last"), callbacks=(("ModelCheckpoint", {"dirpath": "kept"}),)),
        newest_as_last,
        then="all",
    ),
    Row(
        "A run that goes on from last.ckpt writes it again; Lightning, whose file does not know its name, another.",
        PAGE,
        program_of(1353),
        one_last,
    ),
    Row(
        "A resumed run does not save the state again that it was resumed from.",
        PAGE,
        widen(draw(741)),
        saved_again,
        then="all",
    ),
    Row(
        "Whether the epoch that a resumed fit begins with is validated is asked of its own number; in Lightning of the "
        "next one.",
        PAGE,
        widen(draw(859)),
        validated_by_number,
        then="all",
    ),
    Row(
        "fast_dev_run has no least length.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=2, min_steps=2), acts=(Act("stop", "training_step", 1),)),
        no_least,
        then="all",
    ),
    Row(
        "fast_dev_run saves nothing; Lightning's save_last does at the end of training.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=1), callbacks=(("ModelCheckpoint", {"save_last": True}),)),
        dry_run_saves,
        then="all",
    ),
    Row(
        "Where there is no gradient, nothing is clipped; Lightning's clipping by value raises.",
        PAGE,
        replace(PLAIN, optimizers=("none",), flags=_flags(gradient_clip_val=0.1, gradient_clip_algorithm="value")),
        lambda program, d, theirs, ours: "nested_tensorlist" in str(theirs.ends),
        then="all",
    ),
    Row(
        "last.ckpt is the newest state at each occasion to save; Lightning's only where that is among the best.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss", "mode": "max", "save_last": True}),)),
        newest_is_last,
        then="all",
    ),
    Row(
        "Without validation Lightning's pass for SWA ends with a step along the last epoch's gradient.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, val_loaders=(), norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: d.name == "weights" and has(program, "StochasticWeightAveraging"),
        then="all",
    ),
    Row(
        "current_epoch counts finished epochs: a fit that ended within one has not finished it.",
        f"{PAGE}: current_epoch",
        replace(PLAIN, flags=_flags(max_steps=1)),
        unfinished,
    ),
    Row(
        "KeyboardInterrupt raised in a hook comes out of the call; Lightning exits the process with 1.",
        PAGE,
        replace(PLAIN, acts=(Act("interrupt", "training_step", 2),)),
        interrupted,
    ),
    Row(
        "ModelCheckpoint(save_on_exception=True) overwrites no file that is there: it takes the next version.",
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
        "Of a batch that on_train_batch_start has ended, what was logged before it is shown.",
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
