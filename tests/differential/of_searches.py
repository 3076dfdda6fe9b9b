"""The rows of the table for programs that search for a learning rate or a batch size, and what they look at."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.differential.causes import PAGE, Row, accumulates, begins, by_call, end, has, later, warned
from tests.differential.forms import program_in_forms
from tests.differential.further import program_of
from tests.differential.parts import FINDERS, SEARCHES
from tests.differential.program import COMBINED, PLAIN, Program

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


def stopped_by_metric_of_search(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A fit of ours that ends where EarlyStopping looks for a metric which Lightning's search has left."""
    if not searches(program) or d.kind != "order" or not begins(d.ours, "on_exception"):
        return False
    return "no metric of that name was logged" in str(end(ours, d.call).get("message"))


def begun_anew(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A call after a fit whose search has put the state of its own checkpoint back."""
    if not any(has(program, kind) for kind in FINDERS) or not later(d, theirs):
        return False
    if d.kind == "order":  # nothing is left to train
        return begins(d.theirs, "on_train_start") and begins(d.ours, "on_fit_end")
    if d.name == "rates":  # the optimizer's state of an edited checkpoint
        return "edited" in d.call
    return d.name in ("current_epoch", "global_step") and bool(d.theirs < d.ours)


def failed_search(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search that has raised leaves in Lightning."""
    failed = [call for call, facts in theirs.ends if "raised" in facts and call.endswith(SEARCHES)]
    if any(has(program, kind) for kind in FINDERS):
        raised = [call for call, facts in theirs.ends if "raised" in facts]
        failed += [call for call in raised if not any(f"callback.on_{s}_start" in _of(theirs, call) for s in STARTED)]
    return bool(failed) and (d.call >= failed[0] or not d.call)


def limited(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A search in which ours heeds the limit of validation, of which there is less than a batch."""
    words = "limit_val_batches="
    failed = [call for call, facts in ours.ends if searches(program) and words in str(facts.get("message"))]
    if not failed:
        return False
    if end(theirs, failed[0]).get("raised"):  # by the fit itself, once it has begun
        return d.kind == "order" and d.call == failed[0] and begins(d.ours, "on_exception")
    return d.call >= failed[0] or not d.call


def monitors_what_it_logged(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A call that ends in a monitored name without a value, which in Lightning a search has left there."""
    words = "no such metric was logged"
    failed = [call for call, facts in ours.ends if searches(program) and words in str(facts.get("message"))]
    return bool(failed) and not end(theirs, failed[0]).get("raised") and (d.call >= failed[0] or not d.call)


def _of(record: Record, call: str) -> list[str]:
    return [label for label, _ in by_call(record.events).get(call, [])]


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


def stopped_below_least(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search has found that has taken more steps in Lightning, where min_epochs or min_steps forbade its end."""
    if not looks_for_rate(program) or d.name not in LED or not {"min_epochs", "min_steps"} & program.flags.keys():
        return False
    pairs = zip(_tried(theirs), _tried(ours), strict=False)
    return any(len(mine) > len(other) and mine[: len(other)] == other for mine, other in pairs)


def without_none(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """What a search has found where batches are None."""
    told = warned(d, "order of schedulers and optimizers") and d.theirs
    led = looks_for_rate(program) and d.name in LED
    return program.train == "some None" and searches(program) and bool(told or led)


def small_batches(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A search that raises for batches of one sample, where Lightning's first trial has those of before."""
    words = "Expected more than 1 value"
    failed = [call for call, facts in ours.ends if searches(program) and words in str(facts.get("message"))]
    return bool(failed) and (d.call >= failed[0] or not d.call)


def _tried(record: Record) -> list[list[float]]:
    """The rates that each search has tried."""
    ends = [facts for _, facts in record.ends]
    found: list[Any] = [facts.get("found") or (facts.get("LearningRateFinder") or {}).get("found") for facts in ends]
    return [list(each["tried"]["lr"]) for each in found if isinstance(each, dict)]


def computed_behind(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Values of a metric object that is computed by hand, which the steps of a search have updated."""
    if not searches(program) or program.metrics not in ("computed", "in a callback") or not d.name.endswith("_metrics"):
        return False
    return "metric" in d.theirs and "metric" in d.ours


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


def above_data(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A batch size that holds a whole data set before a search begins, which Lightning leaves alone."""
    sizes = has(program, "BatchSizeFinder") or "scale_batch_size" in program.calls
    trained = program.train_samples if program.train in COMBINED else program.train_samples[:1]
    least = min(*trained, *(program.val_loaders or (4,)))
    return sizes and program.batch_size >= least and d.name in ("found", "BatchSizeFinder", "attributes")


def beyond_data(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A batch size that Lightning has found which is larger than any data set."""
    if d.name == "BatchSizeFinder" and "-" not in (d.theirs, d.ours):
        mine, other = d.theirs.get("optimal_batch_size"), d.ours.get("optimal_batch_size")
    elif d.name == "attributes" and has(program, "BatchSizeFinder"):
        mine, other = d.theirs[1], d.ours[1]
    else:
        return False
    most = max(*program.train_samples, *(program.val_loaders or (4,)))
    return isinstance(mine, int) and isinstance(other, int) and mine > most >= other


def no_sanity_check(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """A fit after a search that goes without its sanity check in Lightning."""
    sizes = has(program, "BatchSizeFinder") or "scale_batch_size" in program.calls
    if not sizes or d.kind != "order":
        return False
    return begins(d.ours, "on_sanity_check_start") and not begins(d.theirs, "on_sanity_check_start")


def drawn_by_search(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    """Batches of a fit whose loader a search has drawn from."""
    return searches(program) and program.train == "shuffled" and d.name == "arguments" and "batch" in d.theirs


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
        program_in_forms(66),
        kept_rate,
        then="all",
    ),
    Row(
        "A search in an evaluation leaves BatchNorm's statistics as they were; Lightning's trains them.",
        PAGE,
        program_of(81272),
        lambda program, d, theirs, ours: (
            has(program, "BatchSizeFinder") and program.norm and "fit" not in d.call and d.name == "weights"
        ),
        then="numbers",
    ),
    Row(
        "A search for a batch size ends where one batch holds the data; Lightning's may go on beyond it.",
        PAGE,
        program_in_forms(85510),
        beyond_data,
        then="numbers",
    ),
    Row(
        "A metric object that is computed by hand is behind a search as it was; Lightning's holds the search's steps.",
        PAGE,
        program_in_forms(85113),
        computed_behind,
        then="numbers",
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
        "A search for a rate ends at early_stop_threshold; Lightning's goes on where min_epochs or min_steps asks.",
        PAGE,
        program_of(655),
        stopped_below_least,
        then="numbers",
    ),
    Row(
        "A call with a finder that follows a fit knows its counters; Lightning's search puts back those of its own "
        "checkpoint.",
        PAGE,
        replace(
            PLAIN,
            calls=("fit", "resume"),
            callbacks=(("BatchSizeFinder", {"max_trials": 2}),),
            loggers=(),
            data="module",
        ),
        begun_anew,
        then="all",
    ),
    Row(
        "EarlyStopping knows nothing of what a search's steps have logged; Lightning's takes it for the fit's.",
        PAGE,
        program_in_forms(310246),
        stopped_by_metric_of_search,
        then="all",
    ),
    Row(
        "A search that raises leaves all as it was; Lightning's leaves callbacks, flags and weights of its steps.",
        PAGE,
        program_of(65),
        failed_search,
        then="all",
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
    Row(
        "A fit after a search draws what it draws without one; Lightning's has drawn from the loader's generator.",
        PAGE,
        program_of(13),
        drawn_by_search,
        then="numbers",
    ),
    Row(
        "A search for a batch size begins with init_val; Lightning's leaves a size alone that holds all the data.",
        PAGE,
        replace(
            PLAIN,
            calls=("scale_batch_size", "fit"),
            train_samples=(2, 4),
            batch_size=4,
            search={"max_trials": 3, "init_val": 1},
        ),
        above_data,
        then="all",
    ),
    Row(
        "A search validates by limit_val_batches, and raises where a fit would; Lightning's by its number of steps.",
        PAGE,
        replace(
            PLAIN,
            flags={**PLAIN.flags, "limit_val_batches": 0.5},
            batch_size=4,
            calls=("lr_find", "fit"),
            search={"num_training": 2},
        ),
        limited,
        then="all",
    ),
    Row(
        "A monitored name that only a search has logged is an error; Lightning's search leaves its value there.",
        PAGE,
        program_of(10495),
        monitors_what_it_logged,
        then="all",
    ),
    Row(
        "A batch that is None is no step of a search for a rate; in Lightning it is one without a rate.",
        PAGE,
        program_of(1018),
        without_none,
        then="numbers",
    ),
    Row(
        "A search for a batch size tries init_val; Lightning's first trial has the batches of before.",
        PAGE,
        program_of(986),
        small_batches,
        then="all",
    ),
    Row(
        "A fit has its sanity check after a search for a batch size; Lightning's may have none.",
        PAGE,
        program_of(1844),
        no_sanity_check,
        then="all",
    ),
]
