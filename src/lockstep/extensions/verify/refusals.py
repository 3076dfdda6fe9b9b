"""Says why a run tells nothing, with the way out; and what runs that came to no end differ in."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from lockstep.extensions.verify.compare import COLLECTIVES, GRADIENTS, Difference, Reason, told_by_rank, uneven
from lockstep.extensions.verify.recordings import Event, RankRecording, Recording

_TYPES = re.compile(r"dtype|expected (scalar|m1|mat)|must have the same|ouble|same type|float64", re.IGNORECASE)
_OTHERS = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|[Tt]imed? ?out|peer|connectFullMesh")
_GPU = re.compile(r"CUDA|cuda|NVIDIA|nvidia|NCCL|HIP |\bGPUs?\b")
_ARGUMENTS = re.compile(r"\busage:|sys\.argv", re.IGNORECASE)
_MEMORY = re.compile(
    r"DefaultCPUAllocator|MemoryError|out of memory|can't allocate|annot allocate memory|bad_alloc|start new thread"
)


def is_of_types(ranks: Recording) -> bool:
    """Whether a run in float64 failed since something is of another type."""
    return any(rank.ending.status == "failed" and _TYPES.search(rank.ending.message) for rank in ranks.ranks)


def of_memory(error: Exception) -> str:
    """Why a comparison tells nothing that this process has no memory for, and what helps; "" for another error."""
    if not _MEMORY.search(f"{type(error).__name__}: {error}"):
        return ""
    return (
        "the comparison itself ran out of memory, which has the parameters and gradients of a step of all runs: give a "
        "smaller model by the script's arguments, or fewer --devices"
    )


def of_ranks(ranks: Recording, steps: int) -> str:
    """Why the run on ranks tells nothing, and what helps; "" where it does."""
    named = [(f"rank {number}", rank) for number, rank in enumerate(ranks.ranks)]
    first = [(name, rank) for name, rank in named if rank.ending.has_failed and not _follows(rank)]
    for name, rank in first + named:
        reason = _of_ending(name, rank)
        if reason:
            return reason
    if not any(rank.steps for rank in ranks.ranks):
        started = ranks.first.where("process")
        if started:
            return f"the script trains in processes that it starts ({started}), and no other is watched: {_PROCESSES}"
        if ranks.has("backward"):
            return (
                "the script calls backward and never the step() of a torch.optim.Optimizer: nothing can be compared; "
                "let a torch optimizer update the parameters"
            )
        return (
            "the script ended without an optimizer step: give a script that trains, with the arguments that make it do "
            "so behind --"
        )
    unwritten = next((event for _, event in ranks.of("batch") if event["unwritten"]), None)
    if unwritten is not None:
        return (
            f"samples cannot be written down and so not be replayed ({unwritten['unwritten'][:120]}): let the data set "
            "give tensors, numbers, or what pickle takes"
        )
    return ""


def cut_twice(ranks: Recording) -> str:
    """Why samples that come on several ranks may be meant so: ranks hold parts of a model in two ways; "" for one."""
    event = next((event for _, event in ranks.of("sharded in groups")), None)
    if event is None:
        return ""
    return (
        f"fully_shard gets a mesh of {event['size']} of {len(ranks.ranks)} ranks ({event['where']}), and ranks train "
        "on the same samples, as they do where tensor parallelism cuts the model besides: both at once cannot be told "
        "yet; verify each alone, by a mesh of one dimension"
    )


_TO_RUN = "mend what fails, or give the arguments with which the script trains behind --"
_PROCESSES = "verify the script that they run, with their arguments"
NO_LOADER = (
    "the data come from no torch DataLoader, so that one process cannot be fed what the ranks got, and by its own "
    "choice it trains something else: put them behind a DataLoader"
)


def of_one(whole: Recording) -> str:
    """Why the run of one process tells nothing, and what helps; "" where it does."""
    rank = whole.first
    reason = _of_ending("one process that is fed the samples of all ranks", rank)
    if not reason and not rank.steps:
        return "as one process (WORLD_SIZE=1) the script makes no optimizer step: let it train there, too"
    return reason


def _follows(rank: RankRecording) -> bool:
    """Whether a rank failed since another one did."""
    return _OTHERS.search(rank.ending.message) is not None


def _of_ending(who: str, rank: RankRecording) -> str:
    """What a process failed of, or that it goes on without end; "" where it did neither."""
    if rank.ending.has_failed:
        return _of_failure(who, rank)
    return _of_silence(who, rank) if rank.ending.status == "stuck" else ""


def _of_failure(who: str, rank: RankRecording) -> str:
    ending, told = rank.ending, rank.complaints
    where = f" at {ending.where}" if ending.where else ""
    if _ARGUMENTS.search(ending.message) or ("exit code 2" in ending.message and any(map(_ARGUMENTS.search, told))):
        said = told[-1] if "exit code 2" in ending.message and told else ending.short
        return f"the script needs arguments ({said}): give them behind --: lockstep verify script.py -- --name value"
    if ending.status == "killed" or _MEMORY.search(ending.message):
        return (
            f"{who} was ended by the system or ran out of memory ({ending.short}): all ranks run on this machine at "
            "once; give a smaller model or batch by the script's arguments, or fewer --devices"
        )
    if _GPU.search(ending.message):
        return (
            f"the script needs a GPU{where} ({ending.short}), and is verified on the CPU: let it take the CPU where "
            "torch.cuda.is_available() is False"
        )
    started = rank.where("process")
    if started:
        return (
            f"{who} failed{where}: {ending.short}: it starts processes ({started}), and does so as a rank: {_PROCESSES}"
        )
    if ending.message.startswith("exit code"):
        return f"{who} ended{where} with {ending.message} ({told[-1] if told else 'nothing was said'}): {_TO_RUN}"
    return f"{who} failed{where}: {ending.short}: {_TO_RUN}"


def _of_silence(who: str, rank: RankRecording) -> str:
    steps = len(rank.steps)
    at = rank.events[-1]["kind"] if rank.events else "nothing"
    return (
        f"{who} went on without end after {steps} optimizer step(s) (last seen: {at}): let the script train sooner, or "
        "allow more time by --patience"
    )


# -- runs that came to no end ------------------------------------------------------------------------------


def deadlock(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Where ranks make collectives that do not fit together, or wait for one that makes none any more."""
    if any(rank.ending.status == "failed" and not _follows(rank) for rank in ranks.ranks):
        return None  # that is the failure from which others follow
    finished = all(rank.ending.has_finished for rank in ranks.ranks)
    found = None if finished else _out_of_batches(ranks)
    return found or _other_order(ranks, finished)


def _other_order(ranks: Recording, finished: bool) -> tuple[Difference, Reason] | None:
    """The first place where ranks make other collectives."""
    for events in zip_longest(*(rank.of("collective", whole=True) for rank in ranks.ranks)):
        there = [event for event in events if event is not None]
        if len(there) < len(events) and finished:
            return None
        if len({described(event) for event in there}) > 1 or len(there) < len(events):
            return _told(ranks, events)
    return None


def described(event: Event) -> str:
    """A collective by what must be the same on all ranks."""
    shape = event["shape"] if event["name"] in ("all_reduce", "broadcast", "all_gather") else None
    return f"{event['name']} {shape}"


def _told(ranks: Recording, events: tuple[Event | None, ...]) -> tuple[Difference, Reason]:
    texts = [
        f"rank {rank} makes none" if event is None else f"rank {rank} calls {described(event)} at {event['where']}"
        for rank, event in enumerate(events)
    ]
    there = [event for event in events if event is not None]
    step = ranks.fewest_steps
    difference = Difference(COLLECTIVES, step, step, "", tuple(range(len(events))), text="; ".join(texts))
    text = "ranks make other collectives: a call that only some ranks make, or in another order, makes the others wait"
    return difference, Reason(text, there[0]["where"])


def _out_of_batches(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Ranks that have no more batches while others wait for them."""
    by_rank = [Counter((event["loader"], event["iteration"]) for event in rank.of("batch")) for rank in ranks.ranks]
    for few, event in ranks.of("iterated"):
        loader, iteration = event["loader"], event["iteration"]
        counts = [batches[loader, iteration] for batches in by_rank]
        if max(counts) > counts[few]:
            step = ranks.fewest_steps
            told = told_by_rank(enumerate(counts))
            text = f"batches by rank: {told}; the others wait for rank {few}, which has no more"
            where = ranks.ranks[few].where("iteration", loader=loader)
            return Difference(COLLECTIVES, step, step, "", (few,), text=text), uneven(where)
    return None


# -- windows -------------------------------------------------------------------------------------------------


def short_window(ranks: Recording) -> tuple[Difference, Reason] | None:
    """A window of fewer micro-batches whose loss is divided by the number of a full one."""
    backwards: dict[int, list[Event]] = defaultdict(list)
    for event in ranks.first.of("backward"):
        backwards[event["update"]].append(event)
    full = {len(events) for events in backwards.values() if _divisor(events) == len(events)}
    for step in ranks.first.steps:
        events = backwards[step["update"]]
        divisor = _divisor(events)
        if divisor is None or divisor not in full or len(events) >= divisor:
            continue
        batches = f"{len(events)} micro-batch{'es' * (len(events) > 1)}"
        text = f"is {len(events)} of {divisor:g} parts of the mean over its window: that has {batches}"
        cause = f"the last accumulation window of an epoch has {batches}, and its loss is divided by the full number"
        return _of_windows(ranks, step, text), Reason(f"{cause} {divisor:g}", events[-1]["where"])
    return None


def left_out(ranks: Recording) -> tuple[Difference, Reason] | None:
    """A step of sharded parameters before which the last backward was not synchronized: its gradients are left out."""
    if not ranks.has("sharded data parallel"):
        return None
    for step in ranks.first.steps:
        own = ranks.first.of("backward", update=step["update"])
        if not own or own[-1]["synchronizes"]:
            continue
        cause = Reason(
            "fully_shard leaves gradients in the unsharded parameters: set_requires_gradient_sync(True) is to stand "
            "before the last backward of a window",
            own[-1]["where"],
            "backwards that are synchronized: " + ", ".join("yes" if event["synchronizes"] else "no" for event in own),
        )
        text = f"lacks the last of {len(own)} backward(s), which is not synchronized"
        return _of_windows(ranks, step, text), cause
    return None


def _of_windows(ranks: Recording, step: Event, text: str) -> Difference:
    """A difference of all ranks' gradients at a step."""
    name = next(iter(step["names"].values()), "")
    everywhere = tuple(range(len(ranks.ranks)))
    text = f"the gradient of {name} {text}"
    return Difference(GRADIENTS, step["number"], step["update"], name, everywhere, text=text)


def _divisor(events: Sequence[Event]) -> float | None:
    """The number by which all losses of a window are divided, from 2; None for none."""
    divisors = {event["divisor"] for event in events}
    divisor = divisors.pop() if len(divisors) == 1 else None
    return divisor if divisor is not None and divisor > 1 else None
