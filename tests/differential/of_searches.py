"""The rows of the table for programs that search for a learning rate or a batch size, and what they look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential.causes import PAGE, Row, accumulates, by_call, has, later, warned
from tests.differential.parts import FINDERS, SEARCHES
from tests.differential.program import PLAIN, Program

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.record import Event, Record

STARTED = ("fit", "validation", "test", "predict")
OF_SEARCH = ("returned", "raised", "message", "found", "weights", "attributes", "rates")
"""What is compared where a call of the Tuner has ended."""


def searches(program: Program) -> bool:
    return program.search is not None or any(has(program, kind) for kind in FINDERS)


def without_search(program: Program, theirs: Record, ours: Record) -> str:
    """The steps of searches: all events of a Tuner's, those before the callbacks' first hook of a finder's."""
    if not searches(program):
        return ""
    for record in (theirs, ours):
        calls = by_call(record.events)
        record.events = [event for call, events in calls.items() for event in _outside(program, call, events)]
        for call, facts in record.ends:
            if call.endswith(SEARCHES):
                for name in set(facts) - set(OF_SEARCH):
                    del facts[name]
    for call, _ in theirs.ends:  # Lightning's fit in a fit ends by itself
        if call.endswith(SEARCHES) and theirs.rows and theirs.rows[0][0] == "finalize":
            del theirs.rows[0]
    return "steps of a search"


def _outside(program: Program, call: str, events: list[Event]) -> list[Event]:
    if call.endswith(SEARCHES):
        return events[:1]
    if not any(has(program, kind) for kind in FINDERS):
        return events
    labels = [label for label, _ in events]
    starts = ("callback.on_exception", *(f"callback.on_{stage}_start" for stage in STARTED))
    after = next((place for place, label in enumerate(labels) if label in starts), len(labels))
    kept = [place for place, label in enumerate(labels[:after]) if label.endswith(("configure_model", "setup"))]
    asked = [place for place, label in enumerate(labels[:after]) if label.endswith("configure_optimizers")]
    before = asked[0] if asked else kept[-1] if kept else 0
    kept_events = [*events[: before + 1], *events[after:]]
    return [event for event in kept_events if not event[0].endswith("_dataloader")]  # asked for by the search


def left_by_search(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search leaves in Lightning: the path of its own checkpoint, gradients, loaders, metrics, modes."""
    if not searches(program):
        return False
    own = d.name == "ckpt_path" and any(f".{name}_" in str(d.theirs) for name in SEARCHES)
    loaders = any(has(program, kind) for kind in FINDERS) and d.name.endswith(("_dataloader", "_dataloaders"))
    if d.name.endswith("_metrics") and "-" not in (d.theirs, d.ours):
        return d.ours.keys() < d.theirs.keys()
    there = "-" not in (d.theirs, d.ours)
    gradients = there and d.name == "gradients" and (later(d, theirs) or (True in d.theirs and True not in d.ours))
    if d.name == "mode" and has(program, "BatchSizeFinder"):  # of an evaluation
        return not d.call.endswith("fit")
    return own or loaders or gradients or warned(d, "log_every_n_steps", "scheduler without a metric")


def looks_for_rate(program: Program) -> bool:
    return has(program, "LearningRateFinder") or "lr_find" in program.calls


LED = ("found", "LearningRateFinder", "attributes", "rates", "weights")


def found_in_windows(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search for a rate has found where a step has several micro-batches."""
    return looks_for_rate(program) and accumulates(program) and d.name in LED


def ends_with_epochs(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search has found that has taken fewer steps in Lightning, where the fit has no more epochs."""
    if not looks_for_rate(program) or d.name not in LED:
        return False
    pairs = zip(_tried(theirs), _tried(ours), strict=False)
    return any(len(mine) < len(other) and other[: len(mine)] == mine for mine, other in pairs)


def _tried(record: Record) -> list[list[float]]:
    """The rates that each search has tried."""
    ends = [facts for _, facts in record.ends]
    found: list[Any] = [facts.get("found") or (facts.get("LearningRateFinder") or {}).get("found") for facts in ends]
    return [list(each["tried"]["lr"]) for each in found if isinstance(each, dict)]


def above_most(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A batch size above the largest to try."""
    most = [part["max_val"] for kind, part in program.callbacks if kind == "BatchSizeFinder" and "max_val" in part]
    most += [program.search["max_val"]] if program.search is not None and "max_val" in program.search else []
    if not most:
        return False
    if d.name in ("found", "BatchSizeFinder"):
        sizes = [each.get("optimal_batch_size") if isinstance(each, dict) else each for each in (d.theirs, d.ours)]
        return all(isinstance(size, int) for size in sizes) and sizes[0] > most[0] >= sizes[1]
    return d.name == "attributes" and d.ours != "-" and d.theirs[1] > most[0] >= d.ours[1]  # "-": refused before


def kept_rate(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """The state of a LearningRateFinder, and what a resumed fit does not search again."""
    if not has(program, "LearningRateFinder"):
        return False
    return (d.kind == "checkpoint" and d.name == "callbacks") or "resume" in d.call


SEARCH = Row(
    "A search has steps of its own, and leaves all as it was; in Lightning it is a fit, whose loaders, gradients "
    "and path of a checkpoint stay.",
    PAGE,
    replace(PLAIN, calls=("lr_find", "fit"), search={"num_training": 14}),
    left_by_search,
    take=without_search,
)
OF_SEARCHES = [
    Row(
        "A LearningRateFinder keeps in checkpoints what it has found, and a resumed fit goes on with it; Lightning's "
        "tests again.",
        PAGE,
        replace(PLAIN, calls=("fit", "resume"), callbacks=(("LearningRateFinder", {"num_training_steps": 14}),)),
        kept_rate,
        then="all",
    ),
    Row(
        "Where a search has several micro-batches in a step, a rate has the mean of their losses; in Lightning the "
        "last one's.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "accumulate_grad_batches": 2, "max_epochs": 9},
            calls=("lr_find", "fit"),
            search={"num_training": 12},
        ),
        found_in_windows,
        then="numbers",
    ),
    Row(
        "A search for a rate takes all its steps; Lightning's ends with the fit's epochs.",
        PAGE,
        replace(PLAIN, calls=("lr_find", "fit"), search={"num_training": 14}),
        ends_with_epochs,
        then="numbers",
    ),
    Row(
        "max_val is the largest batch size of a search; Lightning's power mode goes above it.",
        PAGE,
        replace(
            PLAIN, calls=("scale_batch_size", "fit"), search={"max_val": 5, "max_trials": 3}, train_samples=(40, 4)
        ),
        above_most,
        then="all",
    ),
]
