"""What the rows of the table look at: which difference of which program they explain, or take out of the records."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    return "accumulate_grad_batches" in program.flags


def averages(program: Program) -> bool:
    return has(program, "EMAWeightAveraging") or has(program, "WeightAveraging")


def acts(program: Program, *kinds: str) -> bool:
    return any(act.kind in kinds for act in program.acts)


def validates_nothing(program: Program) -> bool:
    return not program.val_loaders or program.flags.get("limit_val_batches") == 0


def refused(ours: Record, *words: str) -> bool:
    return any(part in str(end.get("message")) for _, end in ours.ends for part in words)


REAL = re.compile(r"(?<=[=/-])\d+\.\d+")  # in the name of a file


def begins(events: list[str], *hooks: str) -> bool:
    """Whether the first of some events is one of these hooks."""
    return isinstance(events, list) and bool(events) and str(events[0]).endswith(hooks)


BATCH = re.compile(r"train_batch|training_step|backward|optimizer\.|optimizer_step|zero_grad|clip")


def end(record: Record, call: str) -> dict[str, Any]:
    return next((end for label, end in record.ends if label == call), {})


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
    fewer = len(kept) < len(ours.events)
    ours.events = kept
    return "callback.on_save_checkpoint" if fewer else ""


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


def refused_call(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return refused(ours, "no data: pass", 'ckpt_path="best"', 'ckpt_path="last"', "ckpt_path='best'", "'last'")


def of_averaging(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    return averages(program) and "resume" in d.call and d.name in ("weights", "arguments")


def before_average(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is seen before the first update of the average, which comes late or is not of the type of the weights."""
    by_steps = any(part.keys() & {"update_starting_at_step", "update_every_n_steps"} for _, part in program.callbacks)
    of_type = by_steps or program.flags.get("precision", "32-true") != "32-true"
    late = of_type or accumulates(program)
    if not averages(program) or not late or d.name != "weights":
        return False
    # The average may be put in behind the recorder's own on_train_end.
    ends = d.where.endswith(("on_train_end", "on_fit_end", "teardown", "on_save_checkpoint"))
    return "validation" in d.where or d.kind == "checkpoint" or (of_type and ends)


def waits_for_metric(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    waits = any(
        kind == "ModelCheckpoint" and part.get("monitor") and "every_n_train_steps" in part
        for kind, part in program.callbacks
    )
    if waits and d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:2], d.ours[:2]]):
        return True
    of_epoch = waits and any(str(part.get("monitor")).endswith("_epoch") for _, part in program.callbacks)
    saved = d.kind == "rows" and "saved" in [*d.theirs[:1], *d.ours[:1]]
    return of_epoch and (saved or d.kind == "files" or d.name == "ModelCheckpoint")


def rate_of_window(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if not has(program, "LearningRateMonitor") or not (accumulates(program)):
        return False
    return d.name in ("LearningRateMonitor", "content") or d.kind == "rows"


def newest_as_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if warned(d, "no last checkpoint"):
        return bool(d.theirs)
    return d.call.endswith(" last") and d.kind == "order" and "load_checkpoint" in str(d.ours[:1])


def stopped_at_boundary(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A stop that is asked for within a window: Lightning validates or ends, and ours plays the next micro-batch."""
    stops = acts(program, "stop") or has(program, "EarlyStopping") or has(program, "Timer")
    if d.kind != "order" or not stops or not accumulates(program):
        return False
    starts = ("on_train_batch_start", "on_before_batch_transfer")
    return begins(d.ours, *starts) and not begins(d.theirs, *starts)


def named_by_known(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Names of files with a metric, and rows with values, that only a resumed fit of ours knows."""
    if not any("resume" in call for call in program.calls):
        return False
    # What is thawed in one of the two alone leads to other values.
    exact = not has(program, "BackboneFinetuning")
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


def only_last(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    lasts = [part for kind, part in program.callbacks if kind == "ModelCheckpoint" and part.get("save_last")]
    saves = d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:3], d.ours[:3]])
    saves = saves or (d.kind == "checkpoint" and d.where.endswith("last.ckpt"))
    return saves and any(part.get("save_top_k") == 0 for part in lasts)


def without_early_configure_model(program: Program, theirs: Record, ours: Record) -> str:
    """Lightning's averaging callbacks call configure_model in their setup."""
    if not averages(program):
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
    if not averages(program):
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
    tunes = has(program, "BackboneFinetuning")
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


def average_judged(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The weights that an evaluation takes out of a checkpoint of its own Trainer's fit."""
    judges = d.call.endswith(("best", "last", "path", "untold"))
    return averages(program) and judges and d.name in ("weights", "arguments", "returned")


def of_sanity_check(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a resumed fit does whose sanity check raises in Lightning."""
    written = d.kind in ("rows", "files")
    raised = [call for call, facts in theirs.ends if "`on_validation" in str(facts.get("message"))]
    return any("resume" in call for call in raised) and ("resume" in d.call or written or d.kind == "warnings")


def path_from_start(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Also where a call ends before Lightning's has looked for the checkpoint, or finds none and Lightning has that of
    the call before."""
    if d.kind == "fact" and d.name == "ckpt_path" and d.ours is None:
        return d.call.endswith(" last") and end(theirs, d.call).get("ckpt_path") is None
    early = d.kind == "end" and d.theirs is None and "raised" in end(theirs, d.call)
    return d.name == "ckpt_path" and (d.kind == "fact" or early) and d.ours is not None


SAVES = ("callback.on_save_checkpoint", "module.on_save_checkpoint")


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


def waits_for_mean(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A fit that Lightning's ModelCheckpoint ends at a validation, as the mean of the epoch's training is not there."""
    monitors = [str(part.get("monitor")) for kind, part in program.callbacks if kind == "ModelCheckpoint"]
    if d.kind == "order" and "on_save_checkpoint" in str([d.theirs[:2], d.ours[:2]]):
        return any(name.endswith("_epoch") for name in monitors)
    ended = end(theirs, d.call).get("message") if d.call else str(theirs.ends)
    return bool(monitors) and "could not find the monitored key" in str(ended)


def without_loss(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Two errors for one cause."""
    return d.name == "raised" and "needs a loss" in str(d.ours) and str(d.theirs).startswith("['TypeError']")


def ranked_behind(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What is kept of saves by steps or time where a validation of other weights has given the value."""
    told = any("is ranked by the value of" in text for _, text in ours.warned)
    kept = d.name == "ModelCheckpoint" or d.where == "names" or "on_save_checkpoint" in str([d.theirs, d.ours])
    return warned(d, "earlier weights") or (told and (kept or d.call.endswith("best")))


def all_kept(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Files of a ModelCheckpoint that keeps all and looks at no value, where some have the same name."""
    kept = [part for kind, part in program.callbacks if kind == "ModelCheckpoint" and part.get("save_top_k") == -1]
    versions = [name for name in ours.files if re.search(r"-v\d+\.ckpt$", name) and name not in theirs.files]
    alike = versions and any("monitor" not in part for part in kept)
    return bool(alike) and (d.kind in ("files", "checkpoint") or d.name == "ModelCheckpoint")


def waits_for_no_validation(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What callbacks save or stop at the end of an epoch, of which Lightning's wait for a validation."""
    if not validates_nothing(program):
        return False
    saves = program.flags.get("check_val_every_n_epoch", 1) != 1
    stops = has(program, "EarlyStopping") and program.flags.get("val_check_interval", 1.0) != 1.0
    return saves or stops
