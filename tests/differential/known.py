"""The table of known differences between Lightning 2.6.6 and lockstep, in what programs show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.differential.play import same
from tests.differential.program import COMBINED, LOSS, PLAIN, VAL, Act, Log, Program, Scheduler

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.play import Event, Record


@dataclass(frozen=True)
class Row:
    """A difference on purpose.

    Attributes:
        sentence: what differs, and why.
        where: the file of the docs that tells it, and the name of its row there.
        shown_by: a program that shows it.
        holds: whether it explains a difference of a program.
        then: what may follow from it later in the run: "" nothing, "numbers" other values in the same places, "all"
            another run.
        take: takes what it explains out of both records before they are compared, and says where it found that.
    """

    sentence: str
    where: str
    shown_by: Program
    holds: Callable[[Program, Difference, Record, Record], bool] = lambda *_: False
    then: str = ""
    take: Callable[[Program, Record, Record], str] = lambda *_: ""


PAGE = "docs/lightning.md"


def _flags(**flags: Any) -> dict[str, Any]:
    return {**PLAIN.flags, **flags}


def _has(program: Program, kind: str) -> bool:
    return any(name == kind for name, _ in program.callbacks)


def _accumulates(program: Program) -> bool:
    return "accumulate_grad_batches" in program.flags or _has(program, "GradientAccumulationScheduler")


def _acts(program: Program, *kinds: str) -> bool:
    return any(act.kind in kinds for act in program.acts)


def _refused(ours: Record, *words: str) -> bool:
    return any(part in str(end.get("message")) for _, end in ours.ends for part in words)


BATCH = re.compile(r"train_batch|training_step|backward|optimizer\.|optimizer_step|zero_grad|clip")
"""Hooks that are called in a training batch."""


def _end(record: Record, call: str) -> dict[str, Any]:
    return next((end for label, end in record.ends if label == call), {})


# -- what is taken out of the records --------------------------------------------------------------------------------


def by_call(events: list[Event]) -> dict[str, list[Event]]:
    """The events of each call of the Trainer."""
    found: dict[str, list[Event]] = {"": []}
    call = ""
    for event in events:
        if event[0].startswith("call "):
            call = event[0].removeprefix("call ")
            found[call] = []
        found[call].append(event)
    return found


def _without_sanity_of_resumed(program: Program, theirs: Record, ours: Record) -> str:
    """The sanity check that Lightning runs in a resumed fit, and when each of them asks for the validation loader."""
    kept: list[Event] = []
    taken = ""
    loaders = ("data.val_dataloader", "module.val_dataloader")
    for call, events in by_call(theirs.events).items():
        labels = [label for label, _ in events]
        if "resume" in call and "callback.on_sanity_check_start" in labels:
            taken = call
            first = labels.index("callback.on_sanity_check_start")
            last = labels.index("callback.on_sanity_check_end") if "callback.on_sanity_check_end" in labels else 10**6
            events = [event for i, event in enumerate(events) if not first <= i <= last and event[0] not in loaders]
        kept += events
    if taken:
        theirs.events = kept
        ours.events = [
            event
            for call, events in by_call(ours.events).items()
            for event in events
            if "resume" not in call or event[0] not in loaders
        ]
    return taken


def _without_saves_of_weights(program: Program, theirs: Record, ours: Record) -> str:
    """Callbacks' on_save_checkpoint of files that hold weights alone: before the module's, where Lightning has none."""
    if not any(settings.get("save_weights_only") for _, settings in program.callbacks):
        return ""
    kept: list[Event] = []
    taken = ""
    for call, events in by_call(ours.events).items():
        expected = [label for label, _ in by_call(theirs.events).get(call, [])]
        place = 0
        for event in events:
            if event[0] == "callback.on_save_checkpoint" and expected[place : place + 1] != [event[0]]:
                taken = event[0]
            else:
                place += 1
                kept.append(event)
    ours.events = kept
    return taken


def _without_loader_of_nothing(program: Program, theirs: Record, ours: Record) -> str:
    if program.flags.get("limit_train_batches") != 0:
        return ""
    count = len(ours.events)
    ours.events = [event for event in ours.events if not event[0].endswith(".train_dataloader")]
    return "train_dataloader" if len(ours.events) < count else ""


TAKEN_OUT = [
    Row(
        "limit_train_batches=0: the loader is asked for, and the log says that there is nothing to train.",
        PAGE,
        replace(PLAIN, flags=_flags(limit_train_batches=0)),
        lambda program, d, theirs, ours: (
            program.flags.get("limit_train_batches") == 0
            and (d.name in ("num_training_batches", "train_dataloader", "val_check_batch") or d.kind == "warnings")
        ),
        take=_without_loader_of_nothing,
    ),
    Row(
        "A resumed fit has no sanity check; Lightning has one where the checkpoint is of an epoch's end.",
        PAGE,
        replace(PLAIN, flags=_flags(num_sanity_val_steps=1), calls=("fit", "resume")),
        lambda program, d, theirs, ours: (
            "resume" in d.call and "`on_validation" in str(_end(theirs, d.call).get("message"))
        ),
        take=_without_sanity_of_resumed,
    ),
    Row(
        "Callbacks' on_save_checkpoint runs for files that hold weights only, too: it may put other weights in.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"save_weights_only": True}),)),
        take=_without_saves_of_weights,
    ),
]


# -- what explains a difference --------------------------------------------------------------------------------------


def _monitor_kept(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not program.manual or d.name != "schedulers" or len(d.theirs) != len(d.ours):
        return False
    return all(
        [*mine[:3], mine[4]] == [*other[:3], other[4]] and mine[3] is None
        for mine, other in zip(d.theirs, d.ours, strict=True)
        if mine != other
    )


def _algorithm(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    key = "gradient_clip_algorithm"
    if d.where != "module.configure_gradient_clipping" or d.name != "arguments":
        return False
    return d.theirs.get(key) is None and d.ours.get(key) == "norm" and same({**d.theirs, key: "norm"}, d.ours)


def _unfinished(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The end of a fit that somebody or something has ended within an epoch, and what comes after it."""
    ended_early = (
        _acts(program, "stop", "interrupt", "raise")
        or _has(program, "Timer")
        or _has(program, "EarlyStopping")
        or program.flags.get("max_steps", -1) != -1
        or program.flags.get("fast_dev_run")
    )
    return bool(
        d.name in ("current_epoch", "epoch") and ended_early and isinstance(d.ours, int) and d.theirs == d.ours + 1
    )


def _interrupted(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Lightning leaves the stage as it was."""
    stage = ("state", "training", "validating", "testing", "predicting", "evaluating", "sanity_checking")
    if d.kind != "end" or "SystemExit" not in str(_end(theirs, d.call).get("raised")):
        return False
    return "KeyboardInterrupt" in str(_end(ours, d.call).get("raised")) and d.name in ("raised", *stage)


def _ends_before_limit(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    limit = program.flags.get("fast_dev_run") or program.flags.get("limit_train_batches")
    batches = math.ceil(program.train_samples[0] / program.batch_size)
    return (
        program.train == "iterable" and type(limit) is int and batches < limit and d.name in ("is_last_batch", "weights")
    )


def _saved_on_exception(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not any(settings.get("save_on_exception") for _, settings in program.callbacks) or "raised" not in str(ours.ends):
        return False
    if d.kind == "files" and d.where == "names":
        return not d.theirs and all(re.search(r"-v\d+\.ckpt$", name) for name in d.ours)
    return d.kind == "checkpoint" and any(f"{d.where[:-5]}-v1.ckpt" == name for name in ours.files)


def _refused_call(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return _refused(ours, "no data: pass", 'ckpt_path="best"', 'ckpt_path="last"', "ckpt_path='best'", "'last'")


def _environments(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Another exception, or another answer to whether ranks are there."""
    if d.call != "environment" or program.environment is None:
        return False
    kind, given = program.environment
    if ("Elastic" in kind and d.name == "detect") or ("SLURM" in kind and d.name == "main_port"):
        return True
    if kind == "LightningEnvironment" and d.name == "creates_processes_externally":
        return d.ours is False
    missing = str(d.theirs).startswith("raises KeyError") or "RANK" not in given
    return missing and str(d.ours).startswith("raises Misconf")


def _of_averaging(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    averages = _has(program, "EMAWeightAveraging") or _has(program, "WeightAveraging")
    return averages and "resume" in d.call and d.name in ("weights", "arguments")


def _of_none(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return program.train == "some None" and (d.kind in ("rows", "files") or _accumulates(program))


def _again(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return any("GradientAccumulationScheduler" in str(end.get("message")) for _, end in theirs.ends)


def _swa_resumed(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return _has(program, "StochasticWeightAveraging") and d.call.startswith("1 ")


def _dry_run_saves(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What save_last writes in on_train_end."""
    lasts = any(kind == "ModelCheckpoint" and part.get("save_last") for kind, part in program.callbacks)
    if not program.flags.get("fast_dev_run") or not lasts:
        return False
    return (
        (d.kind == "order" and "save_checkpoint" in str(d.theirs[:2]))
        or d.name == "ModelCheckpoint"
        or d.where == "names"
    )


def _newest_is_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    lasts = any(
        kind == "ModelCheckpoint" and part.get("save_last") and part.get("monitor") for kind, part in program.callbacks
    )
    saves = "on_save_checkpoint"
    return lasts and d.kind == "order" and saves in str(d.ours[:1]) and saves not in str(d.theirs[:1])


def _better_pickles(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if d.name != "pickled" or "-" in (d.theirs, d.ours):
        return False
    unlike = [name for name in d.theirs if d.theirs[name] != d.ours.get(name)]
    return all(d.theirs[name].startswith("raises") for name in unlike)


def _kept_on_exception(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    places = {
        f"{part['dirpath']}/{part.get('filename', 'on_exception')}.ckpt"
        for kind, part in program.callbacks
        if kind == "OnExceptionCheckpoint"
    }
    return d.kind == "files" and d.where == "names" and not d.theirs and bool(places) and set(d.ours) <= places


def _without_early_configure_model(program: Program, theirs: Record, ours: Record) -> str:
    """Lightning's averaging callbacks call configure_model in their setup."""
    if not (_has(program, "EMAWeightAveraging") or _has(program, "WeightAveraging")):
        return ""
    taken, kept = "", []
    for _, events in by_call(theirs.events).items():
        places = [i for i, event in enumerate(events) if event[0] == "module.configure_model"]
        if len(places) > 1:
            taken = "module.configure_model"
        kept += [event for i, event in enumerate(events) if len(places) < 2 or i != places[0]]
    theirs.events = kept
    return taken


def _without_restored_metrics(program: Program, theirs: Record, ours: Record) -> str:
    """Metrics of the checkpoint, which our callback_metrics have and theirs do not."""
    taken = ""
    labels = [label for label, _ in ours.events]
    for place, (label, facts) in enumerate(ours.events):
        there = theirs.events[place][1] if place < len(theirs.events) and theirs.events[place][0] == label else {}
        if "callback_metrics" in facts and "callback_metrics" in there and _call_at(labels, place).count("resume"):
            taken = _drop_more(facts, there) or taken
    for (label, end), (_, other) in zip(ours.ends, theirs.ends, strict=False):
        if "resume" in label and "callback_metrics" in end and "callback_metrics" in other:
            taken = _drop_more(end, other) or taken
    return taken


def _call_at(labels: list[str], place: int) -> str:
    return next((label for label in reversed(labels[: place + 1]) if label.startswith("call ")), "")


def _drop_more(facts: dict[str, Any], there: dict[str, Any]) -> str:
    shown = facts["callback_metrics"]
    facts["callback_metrics"] = {name: shown[name] for name in shown if name in there["callback_metrics"]}
    return "callback_metrics" if len(facts["callback_metrics"]) < len(shown) else ""


TAKEN_OUT += [
    Row(
        "A resumed fit knows the metrics of its checkpoint.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), logs=(LOSS, Log("on_train_epoch_end", "a", "module", {}))),
        take=_without_restored_metrics,
    ),
    Row(
        "WeightAveraging copies the layers when training starts; Lightning calls configure_model in its setup for it.",
        PAGE,
        replace(PLAIN, callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        take=_without_early_configure_model,
    ),
]


ROWS = [
    *TAKEN_OUT,
    Row(
        "WeightAveraging keeps the current weights for a checkpoint that is taken after the fit; Lightning saves the "
        "average for both.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("EMAWeightAveraging", {"decay": 0.5}),)),
        _of_averaging,
        then="numbers",
    ),
    Row(
        "Environments that lack a variable raise MisconfigurationException, Lightning's a KeyError; RANK and LOCAL_RANK "
        "are enough for TorchElasticEnvironment; LightningEnvironment never says that others start the ranks; the port of "
        "a SLURM job follows from step and attempt, too.",
        PAGE,
        replace(PLAIN, environment=("TorchElasticEnvironment", {"LOCAL_RANK": "0", "WORLD_SIZE": "1"})),
        _environments,
    ),
    Row(
        "Where a training batch is None, nothing is logged; Lightning logs the last values again. A window that has "
        "other batches is stepped with those.",
        PAGE,
        replace(PLAIN, train="some None", train_samples=(9, 4)),
        _of_none,
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
        _again,
        then="all",
    ),
    Row(
        "Callbacks and profilers that hold the Trainer or the module weakly can be pickled after a fit.",
        PAGE,
        replace(PLAIN, pickles=True, callbacks=(("Timer", {}),)),
        _better_pickles,
    ),
    Row(
        "OnExceptionCheckpoint keeps its file until a fit ends well; in Lightning any other call deletes it.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "validate"),
            acts=(Act("raise", "training_step", 2),),
            callbacks=(("OnExceptionCheckpoint", {"dirpath": "kept"}),),
        ),
        _kept_on_exception,
    ),
    Row(
        "`training_step(dataloader_iter)` is refused by name.",
        PAGE,
        replace(PLAIN, iter_step=True),
        lambda program, d, theirs, ours: program.iter_step and _refused(ours, "dataloader_iter"),
        then="all",
    ),
    Row(
        "With 64-true Lightning loads a checkpoint's weights into float32 and casts them after it; here they keep "
        "their bits.",
        PAGE,
        replace(PLAIN, flags=_flags(precision="64-true"), calls=("fit", "resume")),
        lambda program, d, theirs, ours: (
            program.flags.get("precision") == "64-true" and "resume" in d.call and d.name == "weights"
        ),
        then="numbers",
    ),
    Row(
        "A closure that LBFGS calls again runs all micro-batches of its window, and each of them is logged once.",
        "docs/architecture.md: One step",
        replace(PLAIN, optimizers=("lbfgs",)),
        lambda program, d, theirs, ours: (
            program.optimizers in (("lbfgs",), ("closure twice",)) and (d.name.endswith("_metrics") or _accumulates(program))
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
        "A fit that goes on shuffles once an epoch; Lightning begins with the second permutation of the loader's "
        "generator.",
        PAGE,
        replace(PLAIN, train="shuffled", calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            "fit on" in d.call and program.train == "shuffled" and d.name == "arguments" and "batch" in d.theirs
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
            and _has(program, "GradientAccumulationScheduler")
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
            and _accumulates(program)
        ),
        then="numbers",
    ),
    Row(
        "A training loader without batches is refused by name; Lightning's fit ends without a step.",
        PAGE,
        replace(PLAIN, train="drop_last", train_samples=(1, 1)),
        lambda program, d, theirs, ours: _refused(ours, "has no batches"),
        then="all",
    ),
    Row(
        "is_last_batch is false before the first batch of a fit, and where a user ends the epoch before the loader.",
        "tests/golden/test_hook_order.py",
        replace(PLAIN, calls=("fit", "fit on")),
        lambda program, d, theirs, ours: (
            d.name == "is_last_batch"
            and d.theirs is True
            and (d.state[2] != "train" or _acts(program, "end epoch") or not BATCH.search(d.where))
        ),
    ),
    Row(
        "The last batch of a loader without length is known as such, and its window stepped; where there is a limit "
        "Lightning waits for that one.",
        PAGE,
        replace(PLAIN, train="iterable", flags=_flags(limit_train_batches=5)),
        _ends_before_limit,
        then="all",
    ),
    Row(
        "In manual optimization the entry of a plateau scheduler keeps its monitor; Lightning drops it.",
        PAGE,
        replace(PLAIN, manual=True, schedulers=(Scheduler("plateau", {"monitor": "loss"}),)),
        _monitor_kept,
    ),
    Row(
        "ckpt_path is there from the start of the call.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume")),
        lambda program, d, theirs, ours: d.name == "ckpt_path" and d.theirs is None and d.ours is not None,
    ),
    Row(
        "The pass for SWA's BatchNorm statistics is no epoch of its own.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: (
            d.name in ("max_epochs", "estimated_stepping_batches", "schedulers")
            and _has(program, "StochasticWeightAveraging")
        ),
        then="all",
    ),
    Row(
        "configure_gradient_clipping is given 'norm' where no algorithm was chosen, in Lightning None.",
        f"{PAGE}: gradient_clip_algorithm",
        replace(PLAIN, hooks="working", flags=_flags(gradient_clip_val=0.1)),
        _algorithm,
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
        _refused_call,
        then="all",
    ),
    Row(
        "Flags that contradict each other are refused by name: min_epochs above max_epochs, min_steps above max_steps.",
        PAGE,
        replace(PLAIN, flags=_flags(min_epochs=3)),
        lambda program, d, theirs, ours: _refused(ours, "the least is above the most"),
        then="all",
    ),
    Row(
        "A monitored name that no fit has logged, where there is no validation either, is an error; Lightning warns, "
        "and saves nothing.",
        PAGE,
        replace(PLAIN, val_loaders=(), callbacks=(("ModelCheckpoint", {"monitor": "val"}),)),
        lambda program, d, theirs, ours: _refused(ours, "no such metric was logged") and not program.val_loaders,
        then="all",
    ),
    Row(
        "LearningRateMonitor leaves out what an optimizer does not have; Lightning raises a KeyError.",
        PAGE,
        replace(PLAIN, optimizers=("lbfgs",), callbacks=(("LearningRateMonitor", {"log_weight_decay": True}),)),
        lambda program, d, theirs, ours: _has(program, "LearningRateMonitor") and "KeyError" in str(theirs.ends),
        then="all",
    ),
    Row(
        "A fit after one with SWA begins with the epoch that it says; Lightning has counted the pass for BatchNorm.",
        PAGE,
        replace(PLAIN, calls=("fit", "fit on"), callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        _swa_resumed,
        then="all",
    ),
    Row(
        "Every rewind of ModelPruning goes to the initial values; Lightning's copy of them is trained along.",
        f"{PAGE}: ModelPruning",
        replace(PLAIN, callbacks=(("ModelPruning", {"pruning_fn": "l1_unstructured", "amount": 0.5}),)),
        lambda program, d, theirs, ours: d.name in ("weights", "gradients") and _has(program, "ModelPruning"),
        then="numbers",
    ),
    Row(
        "A fit that goes on within an accumulation window logs at the steps of the unbroken one; Lightning counts the "
        "window anew.",
        PAGE,
        replace(
            PLAIN,
            flags=_flags(accumulate_grad_batches=4, log_every_n_steps=2),
            train_samples=(18, 4),
            calls=("fit", "resume"),
            callbacks=(("Timer", {"duration": {"seconds": 0}}),),
        ),
        lambda program, d, theirs, ours: (
            (d.kind == "rows" or d.name == "content") and "resume" in program.calls[-1] and _accumulates(program)
        ),
    ),
    Row(
        "fast_dev_run saves nothing; Lightning's save_last does at the end of training.",
        PAGE,
        replace(PLAIN, flags=_flags(fast_dev_run=1), callbacks=(("ModelCheckpoint", {"save_last": True}),)),
        _dry_run_saves,
        then="all",
    ),
    Row(
        "Where there is no optimizer, nothing is clipped; Lightning's clipping by value raises.",
        PAGE,
        replace(
            PLAIN, optimizers=("none",), flags=_flags(gradient_clip_val=0.1, gradient_clip_algorithm="value")
        ),
        lambda program, d, theirs, ours: program.optimizers == ("none",) and "nested_tensorlist" in str(theirs.ends),
        then="all",
    ),
    Row(
        "WeightAveraging with a callback that changes the module's parameters (ModelPruning) is refused.",
        PAGE,
        replace(
            PLAIN,
            callbacks=(
                ("WeightAveraging", {}),
                ("ModelPruning", {"pruning_fn": "l1_unstructured", "amount": 0.5}),
            ),
        ),
        lambda program, d, theirs, ours: _refused(ours, "have changed since training began"),
        then="all",
    ),
    Row(
        "last.ckpt is the newest state at each occasion to save; Lightning's only where that is among the best.",
        PAGE,
        replace(PLAIN, callbacks=(("ModelCheckpoint", {"monitor": "loss", "mode": "max", "save_last": True}),)),
        _newest_is_last,
        then="all",
    ),
    Row(
        "Without validation Lightning's pass for SWA ends with a step along the last epoch's gradient.",
        f"{PAGE}: StochasticWeightAveraging",
        replace(PLAIN, val_loaders=(), norm=True, callbacks=(("StochasticWeightAveraging", {"swa_lrs": 0.02}),)),
        lambda program, d, theirs, ours: d.name == "weights" and _has(program, "StochasticWeightAveraging"),
        then="all",
    ),
    Row(
        "current_epoch counts finished epochs: a fit that ended within one has not finished it.",
        f"{PAGE}: current_epoch",
        replace(PLAIN, flags=_flags(max_steps=1)),
        _unfinished,
    ),
    Row(
        "KeyboardInterrupt raised in a hook comes out of the call; Lightning exits the process with 1.",
        PAGE,
        replace(PLAIN, acts=(Act("interrupt", "training_step", 2),)),
        _interrupted,
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
        _saved_on_exception,
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
            _acts(program, "end epoch")
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
    Row(
        "Batches weigh by the samples that our loader drew, so that no size is guessed from tensors, or warned of.",
        "docs/architecture.md: Micro-batches weigh their samples",
        replace(PLAIN, train="list min_size", train_samples=(3, 5)),
        lambda program, d, theirs, ours: d.kind == "warnings" and d.where == "batch size" and d.theirs,
    ),
]


def explain(program: Program, difference: Difference, theirs: Record, ours: Record) -> Row | None:
    """The row that explains a difference, if one does."""
    return next((row for row in ROWS if row.holds(program, difference, theirs, ours)), None)
