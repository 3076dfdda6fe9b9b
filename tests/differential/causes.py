"""What the rows of the table look at: which difference of which program they explain, or take out of the records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.differential.play import STAGES_OF
from tests.differential.program import Program
from tests.differential.record import same

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Event, Record


PAGE = "docs/lightning.md"


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


def warned(d: Difference, *topics: str) -> bool:
    """Whether the difference is a warning about one of these."""
    return d.kind == "warnings" and d.where.startswith(tuple(f"{topic} (" for topic in topics))


def has(program: Program, kind: str) -> bool:
    return any(name == kind for name, _ in program.callbacks)


def accumulates(program: Program) -> bool:
    return "accumulate_grad_batches" in program.flags or has(program, "GradientAccumulationScheduler")


def acts(program: Program, *kinds: str) -> bool:
    return any(act.kind in kinds for act in program.acts)


def validates_nothing(program: Program) -> bool:
    return not program.val_loaders or program.flags.get("limit_val_batches") == 0


def saved_besides(d: Difference) -> bool:
    """Whether Lightning saves, and nothing else differs."""
    rest = [label for label in d.theirs if not label.endswith("on_save_checkpoint")]
    return begins(d.theirs, "on_save_checkpoint") and d.ours in ([], rest)


def refused(ours: Record, *words: str) -> bool:
    return any(part in str(end.get("message")) for _, end in ours.ends for part in words)


REAL = re.compile(r"(?<=[=/-])\d+\.\d+")  # in the name of a file


def begins(events: list[str], *hooks: str) -> bool:
    """Whether the first of some events is one of these hooks."""
    return isinstance(events, list) and bool(events) and str(events[0]).endswith(hooks)


BATCH = re.compile(r"train_batch|training_step|backward|optimizer\.|optimizer_step|zero_grad|clip")


def end(record: Record, call: str) -> dict[str, Any]:
    return next((end for label, end in record.ends if label == call), {})


def ended_before(record: Record, d: Difference, kind: str = "") -> bool:
    """Whether a call before that of the difference has raised something of this kind."""
    calls = [label for label, _ in record.ends]
    before = record.ends[: calls.index(d.call)] if d.call in calls else record.ends
    return any("raised" in facts and kind in str(facts["raised"]) for _, facts in before)


def later(d: Difference, record: Record) -> bool:
    """Whether a difference is of another call than the first."""
    calls = [label for label, _ in record.ends if label[0].isdigit()]
    return d.call in calls[1:]


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


def without_sanity_of_resumed(program: Program, theirs: Record, ours: Record) -> str:
    """The sanity check that Lightning runs in a resumed fit, and when each of them asks for the validation loader."""
    kept: list[Event] = []
    taken = ""
    loaders = ("data.val_dataloader", "module.val_dataloader")
    for call, events in by_call(theirs.events).items():
        labels = [label for label, _ in events]
        both = "callback.on_sanity_check_start" in [label for label, _ in by_call(ours.events).get(call, [])]
        if "resume" in call and not both and "callback.on_sanity_check_start" in labels:
            taken = call
            first = min(i for i, label in enumerate(labels) if label.endswith(".on_sanity_check_start"))
            last = max((i for i, label in enumerate(labels) if label.endswith(".on_sanity_check_end")), default=10**6)
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


def without_saves_of_weights(program: Program, theirs: Record, ours: Record) -> str:
    """Callbacks' on_save_checkpoint of files that hold weights alone: before the module's, where Lightning has none."""
    if not any(settings.get("save_weights_only") for _, settings in program.callbacks):
        return ""
    whole = "optimizer_states"
    kept = [
        (label, facts)
        for label, facts in ours.events
        if label != "callback.on_save_checkpoint" or whole in facts["arguments"]["checkpoint"]
    ]
    if len(kept) < len(ours.events) and any(
        "on_save_checkpoint" in part.get("hooks", ()) for _, part in program.callbacks
    ):
        for record, events in ((theirs, theirs.events), (ours, kept)):
            record.events = [event for event in events if event[0] != "lambda.on_save_checkpoint"]
        return "callbacks' on_save_checkpoint"
    fewer = len(kept) < len(ours.events)
    ours.events = kept
    return "callback.on_save_checkpoint" if fewer else ""


def trains_nothing(program: Program) -> bool:
    overruled = program.flags.get("overfit_batches") or program.flags.get("fast_dev_run")
    return program.flags.get("limit_train_batches") == 0 and not overruled


def without_loader_of_nothing(program: Program, theirs: Record, ours: Record) -> str:
    if not trains_nothing(program):
        return ""
    count = len(ours.events)
    ours.events = [event for event in ours.events if not event[0].endswith(".train_dataloader")]
    return "train_dataloader" if len(ours.events) < count else ""


def monitor_kept(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not program.manual or d.kind == "checkpoint" or d.name != "schedulers" or len(d.theirs) != len(d.ours):
        return False
    if "-" in (d.theirs, d.ours):
        return False
    return all(
        [*mine[:3], mine[4]] == [*other[:3], other[4]] and mine[3] is None
        for mine, other in zip(d.theirs, d.ours, strict=True)
        if mine != other
    )


def algorithm(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    key = "gradient_clip_algorithm"
    if d.where != "module.configure_gradient_clipping" or d.name != "arguments":
        return False
    return d.theirs.get(key) is None and d.ours.get(key) == "norm" and same({**d.theirs, key: "norm"}, d.ours)


def without_epoch(rows: Any) -> Any:
    """Rows of a logger without the epoch's number."""
    if isinstance(rows, dict):
        return {name: value for name, value in rows.items() if name != "epoch"}
    return [without_epoch(row) for row in rows] if isinstance(rows, (list, tuple)) else rows


def unfinished(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The end of a fit that somebody or something has ended within an epoch, and what comes after it."""
    ended_early = (
        acts(program, "stop", "interrupt", "raise")
        or has(program, "Timer")
        or has(program, "EarlyStopping")
        or program.flags.get("max_steps", -1) != -1
        or program.flags.get("fast_dev_run")
        or any("raised" in facts for _, facts in theirs.ends)
    )
    if ended_early and (d.kind == "rows" or d.name == "content"):
        return same(without_epoch(d.theirs), without_epoch(d.ours))
    return bool(
        d.name in ("current_epoch", "epoch") and ended_early and isinstance(d.ours, int) and d.theirs == d.ours + 1
    )


def interrupted(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Lightning leaves the stage as it was."""
    stage = ("state", "training", "validating", "testing", "predicting", "evaluating", "sanity_checking")
    between = "on_save_checkpoint" in d.where or (d.kind == "end" and later(d, theirs))
    if between and ended_before(theirs, d, "SystemExit") and d.name != "raised":  # of the user's, between two calls
        return d.name in stage or d.name in STAGES_OF  # those are looked at in their stages
    if d.kind != "end" or "SystemExit" not in str(end(theirs, d.call).get("raised")):
        return False
    shown = d.name in ("raised", *stage) or d.name.endswith("_metrics")
    return shown and "KeyboardInterrupt" in str(end(ours, d.call).get("raised"))


def ends_before_limit(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    limits = ("fast_dev_run", "limit_train_batches", "overfit_batches")
    limit = next((program.flags[name] for name in limits if program.flags.get(name)), None)
    batches = math.ceil(program.train_samples[0] / program.batch_size)
    return (
        program.train == "iterable"
        and type(limit) is int
        and batches < limit
        and d.name in ("is_last_batch", "weights")
    )


def saved_on_exception(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not any(settings.get("save_on_exception") for _, settings in program.callbacks) or "raised" not in str(
        ours.ends
    ):
        return False
    if d.kind == "files" and d.where == "names":
        return not d.theirs and all(re.search(r"-v\d+\.ckpt$", name) for name in d.ours)
    return d.kind == "checkpoint" and any(f"{d.where[:-5]}-v1.ckpt" == name for name in ours.files)


def refused_call(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return refused(ours, "no data: pass", 'ckpt_path="best"', 'ckpt_path="last"', "ckpt_path='best'", "'last'")


def of_averaging(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    averages = has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")
    if averages and d.kind == "checkpoint" and d.name == "keys":
        return set(d.theirs) - set(d.ours) == {"averaging_state", "current_model_state"} and "raised" in str(ours.ends)
    fits = "resume" in d.call and not d.call.endswith("best")
    return averages and fits and d.name in ("weights", "arguments")


def before_average(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is seen before the first update of the average, which comes late or is not of the type of the weights."""
    averages = [part for kind, part in program.callbacks if kind in ("EMAWeightAveraging", "WeightAveraging")]
    by_steps = any(part.keys() & {"update_starting_at_step", "update_every_n_steps"} for part in averages)
    of_type = by_steps or program.flags.get("precision", "32-true") != "32-true"
    late = of_type or accumulates(program)
    if not averages or not late or d.name != "weights":
        return False
    # The average may be put in behind the recorder's own on_train_end.
    ends = d.where.endswith(("on_train_end", "on_fit_end", "teardown", "on_save_checkpoint"))
    return "validation" in d.where or d.kind == "checkpoint" or (of_type and ends)


def average_put_back(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The weights when an exception has ended a validation."""
    averages = has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")
    raised = "raised" in end(theirs, d.call)
    return averages and raised and d.name == "weights" and ("exception" in d.where or d.kind == "end")


def after_exception(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Where a run goes on whose first call has ended by an exception: before its first whole batch."""
    if d.kind == "checkpoint" and has(program, "OnExceptionCheckpoint"):
        return "resume" in str(program.calls) and ended_before(theirs, d)
    goes_on = "resume" in d.call or "fit on" in d.call
    number = d.name == "arguments" and "epoch" in d.theirs
    raised = d.kind == "end" and d.name == "raised"
    if not goes_on or not ended_before(theirs, d) or not (d.kind == "order" or number or raised):
        return False
    before = [label for label, _ in by_call(ours.events).get(d.call, [])[: d.place]]
    message = end(ours, d.call).get("message")
    fails_again = message is not None and message in [facts.get("message") for _, facts in ours.ends[:-1]]
    if raised:
        return fails_again
    return fails_again or before.count("callback.on_train_batch_end") <= 1


def waits_for_metric(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    waits = any(
        kind == "ModelCheckpoint"
        and part.get("monitor")
        and part.keys() & {"every_n_train_steps", "train_time_interval"}
        for kind, part in program.callbacks
    )
    if waits and d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:2], d.ours[:2]]):
        return True
    if waits and counted_validation(program) and d.kind in ("files", "checkpoint"):
        return True
    of_epoch = waits and any(str(part.get("monitor")).endswith("_epoch") for _, part in program.callbacks)
    saved = d.kind == "rows" and "saved" in [*d.theirs[:1], *d.ours[:1]]
    return of_epoch and (saved or d.kind == "files" or d.name == "ModelCheckpoint")


def counted_validation(program: Program) -> bool:
    """Whether a ModelCheckpoint ranks by a counter, and Lightning waits at an epoch's end for a validation not due."""
    by_counter = any(part.get("monitor") in ("step", "epoch") for _, part in program.callbacks)
    return by_counter and program.flags.get("check_val_every_n_epoch", 1) is None


def by_time(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    by_time = any("train_time_interval" in part for _, part in program.callbacks)
    return program.manual and by_time and d.kind == "order" and "on_save_checkpoint" in str(d.ours[:2])


def rate_of_window(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not has(program, "LearningRateMonitor") or not (accumulates(program) or acts(program, "end epoch")):
        return False
    return d.name in ("LearningRateMonitor", "content") or d.kind == "rows"


def newest_as_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if warned(d, "no last checkpoint"):
        return bool(d.theirs)
    return d.call.endswith(" last") and d.kind == "order" and "load_checkpoint" in str(d.ours[:1])


def saved_again(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return (
        "resume" in d.call
        and has(program, "ModelCheckpoint")
        and d.kind == "order"
        and "save_checkpoint" in str(d.theirs[:1])
    )


def validated_by_number(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    every = program.flags.get("check_val_every_n_epoch", 1) not in (None, 1)
    return "resume" in d.call and every and d.kind == "order" and "val_dataloader" in str([d.theirs[:1], d.ours[:1]])


def stopped_at_boundary(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A stop that is asked for within a window: Lightning validates or ends, and ours plays the next micro-batch."""
    stops = acts(program, "stop") or has(program, "EarlyStopping") or has(program, "Timer")
    if d.kind != "order" or not stops or not accumulates(program):
        return False
    starts = ("on_train_batch_start", "on_before_batch_transfer")
    return begins(d.ours, *starts) and not begins(d.theirs, *starts)


def made_early(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is there of layers that Lightning's averaging callbacks have made in their setup."""
    averages = has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")
    shown = d.name in ("weights", "trained", "mode", "gradients")
    return averages and program.late and shown and d.where.endswith(("setup", "configure_model"))


def named_by_known(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Names of files with a metric, and rows with values, that only a resumed fit of ours knows."""
    if not any("resume" in call for call in program.calls):
        return False
    # what is thawed in one of the two alone, or another order, leads to other values besides
    exact = not (has(program, "BackboneFinetuning") or has(program, "Unfreezing") or program.train == "shuffled")
    if d.kind == "rows":
        return holds_more(theirs.rows, ours.rows, exact)
    if d.name == "content":
        return holds_more(theirs.files[d.where], ours.files[d.where], exact)
    if not (d.where == "names" or d.name == "ModelCheckpoint"):
        return False
    mine, other = (REAL.sub("", str(value)) for value in (d.theirs, d.ours))
    return mine == other


def holds_more(theirs: list[Any], ours: list[Any], exact: bool = True) -> bool:
    """Whether a logger's rows hold others in their order, which may have fewer values, or other ones."""
    rest = iter(ours)
    return all(any(_holds(row, other, exact) for other in rest) for row in theirs)


def _holds(theirs: Any, ours: Any, exact: bool) -> bool:
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)) and isinstance(theirs[1], dict):
        return same(theirs[0], ours[0]) and isinstance(ours[1], dict) and _holds(theirs[1], ours[1], exact)
    if isinstance(theirs, dict) and isinstance(ours, dict):
        counts = ("epoch", "step")
        alike = ((name, value) for name, value in theirs.items() if exact or name in counts)
        return theirs.keys() <= ours.keys() and all(same(value, ours[name]) for name, value in alike)
    return same(theirs, ours)


FIRST = "callback.on_train_batch_start"


def first_batch(record: Record, call: str) -> int:
    """The number of the first training batch of a call; 0 where there is none."""
    events = by_call(record.events).get(call, [])
    started = (facts for label, facts in events if label == FIRST)
    return int(next((facts["arguments"]["batch_idx"] for facts in started), 0))


def no_least(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    least = program.flags.get("min_steps") or program.flags.get("min_epochs")
    return bool(program.flags.get("fast_dev_run") and least and d.kind == "order")


def mixed_with_interrupted(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Metrics of a call after one that was ended within a validation."""
    if not later(d, theirs) or not d.name.endswith("_metrics") or "-" in (d.theirs, d.ours):
        return False
    if ended_before(theirs, d, "SystemExit"):
        return True
    names = tuple(log.name for log in program.logs if "validation" in log.hook)
    other = [name for name, value in d.theirs.items() if name not in d.ours or not same(value, d.ours[name])]
    return ended_before(theirs, d) and d.theirs.keys() >= d.ours.keys() and all(n.startswith(names) for n in other)


def of_none(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return program.train == "some None" and (
        d.kind in ("rows", "files") or d.name.endswith("_metrics") or accumulates(program)
    )


def again(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return any("GradientAccumulationScheduler" in str(end.get("message")) for _, end in theirs.ends)


def swa_resumed(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The number of the epoch, and so the number of epochs, of a fit after one with SWA."""
    if not has(program, "StochasticWeightAveraging") or not later(d, theirs):
        return False
    numbers = d.name in ("current_epoch", "epoch", "max_epochs") and d.theirs != d.ours
    return numbers or d.kind == "order" or (d.name == "arguments" and "epoch" in d.theirs)


def dry_run_saves(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What save_last writes in on_train_end."""
    lasts = any(kind == "ModelCheckpoint" and part.get("save_last") for kind, part in program.callbacks)
    if not program.flags.get("fast_dev_run") or not lasts:
        return False
    return (
        (d.kind == "order" and "save_checkpoint" in str(d.theirs[:2]))
        or d.name == "ModelCheckpoint"
        or d.where == "names"
    )


def newest_is_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    lasts = any(
        kind == "ModelCheckpoint" and part.get("save_last") and part.get("monitor") for kind, part in program.callbacks
    )
    saves = "on_save_checkpoint"
    return lasts and d.kind == "order" and saves in str(d.ours[:1]) and saves not in str(d.theirs[:1])


def goes_on(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The same number of a batch, and another batch, where the run goes on within an epoch; with max_steps Lightning
    counts on from the last epoch's batches, and may have none to come."""
    if before_batch(program, d, theirs, ours):
        return True
    counts_on = program.flags.get("max_steps", -1) != -1 and "resume" in d.call
    if counts_on and d.kind == "order" and begins(d.theirs, "on_train_epoch_end"):
        return not begins(d.ours, "on_train_epoch_end")
    if "resume" not in d.call or d.name != "arguments" or "batch" not in d.theirs or program.train == "shuffled":
        return False
    within = first_batch(ours, d.call) > 0
    same_number = d.theirs.get("batch_idx") == d.ours.get("batch_idx")
    return "train" in d.where and (within if same_number else counts_on)


def before_batch(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is seen of the same before the first batch, held gradients say."""
    if "resume" not in d.call:
        return False
    if d.kind == "order":
        return left_epoch(d, ours)
    if d.where.endswith("on_train_start"):
        return d.name == "current_epoch" and ends_at_once(program, theirs, d.call) and bool(d.ours == d.theirs + 1)
    if not d.where.endswith("on_train_batch_start"):
        return False
    if d.name == "gradients":
        return accumulates(program) and first_batch(ours, d.call) > 0 and not any(d.theirs)
    counts_on = program.flags.get("max_steps", -1) != -1 and other_batch(theirs, ours, d.call)
    return d.name == "is_last_batch" and counts_on and d.theirs is True


def other_batch(theirs: Record, ours: Record, call: str) -> bool:
    """Whether a call begins with another training batch."""
    mine, other = (
        next((facts["arguments"] for label, facts in by_call(record.events)[call] if label == FIRST), None)
        for record in (theirs, ours)
    )
    return not same(mine, other)


def ends_at_once(program: Program, record: Record, call: str) -> bool:
    """Whether a call of Lightning's with max_steps ends its epoch where it begins."""
    labels = [label for label, _ in by_call(record.events)[call]]
    if program.flags.get("max_steps", -1) == -1 or "module.on_train_start" not in labels:
        return False
    return begins(labels[labels.index("module.on_train_start") + 1 :], "on_train_epoch_end")


def left_epoch(d: Difference, ours: Record) -> bool:
    """An epoch that Lightning takes for ended, and leaves."""
    leaves = begins(d.theirs, "on_train_epoch_start") and begins(d.ours, "on_train_batch_start")
    return leaves and first_batch(ours, d.call) > 0


def only_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    lasts = [part for kind, part in program.callbacks if kind == "ModelCheckpoint" and part.get("save_last")]
    saves = d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:3], d.ours[:3]])
    saves = saves or (d.kind == "checkpoint" and d.where.endswith("last.ckpt"))
    return saves and any(part.get("save_top_k") == 0 for part in lasts)


def kept_on_exception(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    places = {
        f"{part['dirpath']}/{part.get('filename', 'on_exception')}.ckpt"
        for kind, part in program.callbacks
        if kind == "OnExceptionCheckpoint"
    }
    return d.kind == "files" and d.where == "names" and not d.theirs and bool(places) and set(d.ours) <= places


def without_early_configure_model(program: Program, theirs: Record, ours: Record) -> str:
    """Lightning's averaging callbacks call configure_model in their setup."""
    if not (has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")):
        return ""
    taken, kept = "", []
    for _, events in by_call(theirs.events).items():
        places = [i for i, event in enumerate(events) if event[0] == "module.configure_model"]
        if len(places) > 1:
            taken = "module.configure_model"
        kept += [event for i, event in enumerate(events) if len(places) < 2 or i != places[0]]
    theirs.events = kept
    return taken


def without_load_of_trained_weights(program: Program, theirs: Record, ours: Record) -> str:
    """The module's hook on the weights that train beside an average, behind its call on the average."""
    if not (has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")):
        return ""
    hook, kept = "module.on_load_checkpoint", ours.events[:1]
    for event in ours.events[1:]:
        if event[0] != hook or kept[-1][0] != hook:
            kept.append(event)
    taken = hook if len(kept) < len(ours.events) else ""
    ours.events = kept
    return taken


SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def without_restored_metrics(program: Program, theirs: Record, ours: Record) -> str:
    """Metrics of the checkpoint, which our three dicts have and theirs do not."""
    taken = ""
    labels = [label for label, _ in ours.events]
    for place, (label, facts) in enumerate(ours.events):
        there = theirs.events[place][1] if place < len(theirs.events) and theirs.events[place][0] == label else {}
        if SHOWN[0] in facts and SHOWN[0] in there and "resume" in call_at(labels, place):
            taken = drop_more(facts, there) or taken
    for (label, end), (_, other) in zip(ours.ends, theirs.ends, strict=False):
        if "resume" in label and SHOWN[0] in end and SHOWN[0] in other:
            taken = drop_more(end, other) or taken
    return taken


def call_at(labels: list[str], place: int) -> str:
    return next((label for label in reversed(labels[: place + 1]) if label.startswith("call ")), "")


def drop_more(facts: dict[str, Any], there: dict[str, Any]) -> str:
    fewer = ""
    for name in SHOWN:
        shown = facts[name]
        facts[name] = {key: value for key, value in shown.items() if key in there[name]}
        fewer = name if len(facts[name]) < len(shown) else fewer
    return fewer


def kept_thawed(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Layers that a fit which goes on trains, and their group of the optimizer."""
    tunes = has(program, "BackboneFinetuning") or has(program, "Unfreezing")
    goes_on = any("resume" in call or "fit on" in call for call in ([d.call] if d.call else program.calls))
    if not tunes or not goes_on or "-" in (d.theirs, d.ours):
        return False
    if d.name == "rates":
        return sum(map(len, d.theirs)) < sum(map(len, d.ours))
    shown = d.name in ("trained", "gradients") and len(d.theirs) == len(d.ours)
    return shown and all(ours or not theirs for theirs, ours in zip(d.theirs, d.ours, strict=True))


def without_repeated(program: Program, theirs: Record, ours: Record) -> str:
    """Values of names that are logged now and then, in rows of Lightning's for steps that did not log them."""
    names = {f"{log.name}{end}" for log in program.logs if log.every > 1 for end in ("", "_step")}
    if not names:
        return ""
    pairs = [(theirs.rows, ours.rows)]
    pairs += [(rows, ours.files.get(name)) for name, rows in theirs.files.items() if isinstance(rows, list)]
    taken = [_without_repeated(names, mine, other) for mine, other in pairs if isinstance(other, list)]
    return "rows" if any(taken) else ""


def _without_repeated(names: set[str], theirs: list[Any], ours: list[Any]) -> bool:
    taken, place = False, 0
    for row in list(theirs):
        values = row[1] if isinstance(row, (list, tuple)) else row
        other = ours[place] if place < len(ours) else None
        shown = other[1] if isinstance(other, (list, tuple)) else other
        if not isinstance(values, dict):
            place += 1
            continue
        step = row[0] if isinstance(row, (list, tuple)) else row.get("step")
        same_step = isinstance(shown, dict) and step == (
            other[0] if isinstance(other, (list, tuple)) else other["step"]
        )
        now_and_then = {name for name in values if str(name).partition("/dataloader_idx_")[0] in names}
        repeated = {name for name in now_and_then if not same_step or name not in shown}
        if not same_step and not values.keys() <= {*repeated, "epoch", "step"}:
            repeated = set()
        for name in repeated:
            del values[name]
            taken = True
        if repeated and not values.keys() - {"epoch", "step"}:
            theirs.remove(row)
        else:
            place += 1
    return taken


def ends_epoch(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Where a run goes on that was saved at the last batch of an epoch."""
    if "resume" not in d.call or d.kind != "order":
        return False
    ends = (
        "lr_scheduler_step",
        "on_train_epoch_end",
        "on_validation_model_eval",
        "on_validation_start",
        "val_dataloader",
    )
    if begins(d.ours, "on_train_start") and begins(d.theirs, "on_fit_end"):  # nothing is left but that end
        return "on_train_epoch_start" not in str(d.ours)
    return begins(d.ours, *ends) and not begins(d.theirs, *ends)


def average_judged(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The weights that an evaluation takes out of a checkpoint of its own Trainer's fit."""
    averages = has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")
    judges = d.call.endswith(("best", "last", "path", "untold")) and not any(each in d.call for each in ("fit", "by "))
    return averages and judges and d.name in ("weights", "arguments", "returned")


def nothing_to_save(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What Lightning's OnExceptionCheckpoint saves of a fit whose training has not begun."""
    began = "callback.on_train_epoch_start" in [label for label, _ in by_call(ours.events).get(d.call, [])]
    if d.kind != "order" or not has(program, "OnExceptionCheckpoint") or began:
        return False
    return saved_besides(d)


def one_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A second last.ckpt of a run that goes on from the first."""
    named = d.where == "names" or d.name == "ModelCheckpoint"
    resumes = any("resume" in call for call in program.calls)
    if resumes and d.kind == "checkpoint" and d.where.endswith("/last.ckpt"):
        return d.where.replace("last", "last-v1") in theirs.files.keys() - ours.files.keys()
    return resumes and named and "last-v" in str(d.theirs) and "last-v" not in str(d.ours)


def of_sanity_check(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a resumed fit does whose sanity check raises in Lightning, and what DeviceStatsMonitor logs of the check."""
    written = d.kind in ("rows", "files")
    if written and has(program, "DeviceStatsMonitor") and any("resume" in call for call in program.calls):
        return d.where != "names" and len(d.theirs) >= len(d.ours)
    raised = [call for call, facts in theirs.ends if "`on_validation" in str(facts.get("message"))]
    return any("resume" in call for call in raised) and ("resume" in d.call or written or d.kind == "warnings")


def path_from_start(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Also where a call ends before Lightning's has looked for the checkpoint, or finds none and Lightning has that of
    the call before."""
    if d.kind == "fact" and d.name == "ckpt_path" and d.ours is None:
        return d.call.endswith(" last") and end(theirs, d.call).get("ckpt_path") is None
    early = d.kind == "end" and d.theirs is None and "raised" in end(theirs, d.call)
    return d.name == "ckpt_path" and (d.kind == "fact" or early) and d.ours is not None


SAVES = ("callback.on_save_checkpoint", "lambda.on_save_checkpoint", "module.on_save_checkpoint")


def saved_before_own(program: Program, theirs: Record, ours: Record) -> str:
    """Puts the module's `on_train_batch_end` before the saves that come before it in Lightning."""
    moved = False
    for place, (label, _) in enumerate(theirs.events):
        first = place
        while label == "module.on_train_batch_end" and theirs.events[first - 1][0] in SAVES:
            first -= 1
        if first < place:
            theirs.events.insert(first, theirs.events.pop(place))
            moved = True
    return "order" if moved else ""


def ends_in_batch_end(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What Lightning has saved before the module's `on_train_batch_end` ended the run."""
    ended = any(act.hook == "on_train_batch_end" and act.kind in ("raise", "interrupt") for act in program.acts)
    return ended and d.kind in ("files", "checkpoint", "order", "rows") and "save" in str((d.theirs, d.where)).lower()


def without_empty_hyperparameters(program: Program, theirs: Record, ours: Record) -> str:
    """Files of hyperparameters that have none."""
    more = [name for name in ours.files.keys() - theirs.files.keys() if name.endswith("/hparams.yaml")]
    for name in more if not program.hyperparameters else ():
        del ours.files[name]
    return "hparams.yaml" if more and not program.hyperparameters else ""
