"""Checks that find out why a script cannot be verified, and the causes of deadlocks and incomplete windows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest

from torch import Tensor

from lockstep.extensions.verify.compare import (
    COLLECTIVES,
    GRADIENTS,
    SAMPLES,
    STEPS,
    Difference,
    Reason,
    by_rank,
    several,
    uneven,
)
from lockstep.extensions.verify.own_batches import JOINED, ORDERS, PART, SAME_CHOICE
from lockstep.extensions.verify.recordings import Event, RankRecording, Recording
from lockstep.extensions.verify.settings import call_lines

_TYPES = re.compile(r"dtype|expected (scalar|m1|mat)|must have the same|ouble|same type|float64", re.IGNORECASE)
_OTHERS = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|[Tt]imed? ?out|peer|connectFullMesh")
_GPU = re.compile(r"CUDA|cuda|NVIDIA|nvidia|NCCL|HIP |\bGPUs?\b")
_USAGE = re.compile(r"\busage:", re.IGNORECASE)
_MEMORY = re.compile(
    r"DefaultCPUAllocator|MemoryError|out of memory|can't allocate|annot allocate memory|bad_alloc|start new thread"
)

_TO_RUN = "fix the error, or pass the arguments of the script after --"


def is_type_error(ranks: Recording) -> bool:
    """Return True if a run in float64 failed because of a dtype."""
    return any(rank.ending.status == "failed" and _TYPES.search(rank.ending.message) for rank in ranks.ranks)


def check_ranks(ranks: Recording) -> str:
    """Explain why the run on several ranks cannot be verified, and suggest a remedy. Return "" if it can."""
    named = [(f"rank {number}", rank) for number, rank in enumerate(ranks.ranks)]
    idle = [name for name, rank in named if not rank.steps]
    if idle and any(rank.ending.status == "done" for _, rank in named):
        return f"{', '.join(idle)} made no optimizer step, but others did: let each rank step an optimizer of its own"
    started = ranks.first.line_of("process")
    if started and not any(rank.steps or rank.ending.status == "stuck" for rank in ranks.ranks):
        return f"the script trains in processes that it starts ({started}): verify the script that these run"
    # the failures that are not caused by another rank's come first
    first = [(name, rank) for name, rank in named if rank.ending.has_failed and not _follows_other(rank)]
    for name, rank in first + named:
        reason = _explain_ending(name, rank)
        if reason:
            return reason
    if not any(rank.steps for rank in ranks.ranks):
        return (
            "the script ended without a step of a torch.optim.Optimizer: verify a script that trains with one, and "
            "pass the arguments that it needs for training after --"
        )
    return ""


def check_mesh(ranks: Recording) -> str:
    """Explain why a model that is sharded over two mesh dimensions cannot be verified. Return "" for other models."""
    event = next((event for _, event in ranks.find("sharded in groups")), None)
    if event is None:
        return ""
    return (
        f"fully_shard uses a mesh of {event['size']} of {len(ranks.ranks)} ranks ({event['where']}), together with "
        "tensor parallelism, which is not supported: verify each of them alone, with a mesh of one dimension"
    )


def check_single(single: Recording) -> str:
    """Explain why the single-process run cannot serve as the reference, and suggest a remedy. Return "" if it can."""
    rank = single.first
    reason = _explain_ending("one process that is fed the samples of all ranks", rank)
    if not reason and not rank.steps:
        return (
            "with one process (WORLD_SIZE=1) the script makes no optimizer step: let it train with one process as well"
        )
    return reason


def check_parts(ranks: Recording, single: Recording) -> str:
    """Explain why parts of parameters, whose places in the parameters are unknown, cannot be compared. Return "" else.

    DeepSpeed's ZeRO stage 3 steps such parts: an optimizer's parameter has the parts of many parameters of the model.
    """
    step = ranks.first.steps[0]
    own, whole = (run.first.load("first", step["optimizer"]) for run in (ranks, single))
    pairs = [(own.get(key), whole.get(key)) for key in step["unknown"]]
    if not any(isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape for a, b in pairs):
        return ""
    return (
        "the optimizer steps parts of the parameters that belong to no module, so their places in the parameters are "
        "unknown, as with ZeRO stage 3: verify the script with stage 2, or with fully_shard"
    )


def without_loader(single: Recording) -> str:
    """Explain why a difference is not certain in a script without a DataLoader, and suggest a remedy."""
    lines = dict.fromkeys(event["where"] for event in single.first.find(JOINED))
    seen = f"one process was fed the ranks' batches of {', '.join(lines)}, but its gradients do not show it"
    return (
        "the data do not come from a torch DataLoader, and "
        + (seen if lines else "no batches of the ranks were seen that one process could be fed")
        + ", so that it may train on different samples: read the data with a DataLoader"
    )


def _follows_other(rank: RankRecording) -> bool:
    """Return True if a rank failed because it lost its connection to another rank."""
    return _OTHERS.search(rank.ending.message) is not None


def _explain_ending(who: str, rank: RankRecording) -> str:
    """Explain why a process failed or did not end. Return "" if it ended without an error.

    Args:
        who: the process, as the subject of a sentence.
        rank: recording of the process.
    """
    ending, errors = rank.ending, rank.errors
    if ending.status == "stuck":
        last = rank.events[-1]["kind"] if rank.events else "nothing"
        return (
            f"{who} did not end after {len(rank.steps)} optimizer step(s) (last event: {last}): let the script train "
            "earlier, or increase --patience"
        )
    if not ending.has_failed:
        return ""
    where = f" at {ending.where}" if ending.where else ""
    # argparse prints its error and exits with code 2
    is_usage = "exit code 2" in ending.message and any(map(_USAGE.search, errors))
    if is_usage or _USAGE.search(ending.message):
        text = errors[-1] if "exit code 2" in ending.message and errors else ending.short
        return f"the script needs arguments ({text}): pass them after --: lockstep verify script.py -- --name value"
    if ending.status == "killed" or _MEMORY.search(ending.message):
        return (
            f"{who} was killed by the system or ran out of memory ({ending.short}), since all ranks run on this "
            "machine at once: choose a smaller model or batch with the script's arguments, or fewer --devices"
        )
    if _GPU.search(ending.message):
        return (
            f"the script needs a GPU{where} ({ending.short}), but is verified on the CPU: let it use the CPU if "
            "torch.cuda.is_available() is False"
        )
    if ending.message.startswith("exit code"):
        return f"{who} ended{where} with {ending.message} ({errors[-1] if errors else 'no output'}): {_TO_RUN}"
    return f"{who} failed{where}: {ending.short}: {_TO_RUN}"


# -- runs that could not end -------------------------------------------------------------------------------


def deadlock(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Find the cause of a deadlock: a rank without more batches, a step that only some ranks make, or a collective."""
    if any(rank.ending.status == "failed" and not _follows_other(rank) for rank in ranks.ranks):
        return None  # the others stopped because of that failure
    has_finished = all(rank.ending.has_finished for rank in ranks.ranks)
    found = None if has_finished else _out_of_batches(ranks) or _skipped_step(ranks)
    if found is not None:
        return found
    mismatch = first_mismatch(ranks)
    if mismatch is None:
        return None
    # ranks are stopped after their steps, which may be at different places, and perhaps not all ranks make steps
    without = [rank for rank, event in zip(ranks.ranks, mismatch[1], strict=True) if event is None]
    if (without and has_finished) or any(rank.ending.status == "done" for rank in without):
        return None
    return other_collectives(*mismatch, ranks.fewest_steps)


def first_mismatch(ranks: Recording) -> tuple[int, tuple[Event | None, ...]] | None:
    """Return (number, each rank's call) of the first collective that is not the same on all ranks, or None."""
    calls = zip_longest(*(rank.find("collective", whole=True) for rank in ranks.ranks))
    return next(((at, each) for at, each in enumerate(calls) if len(set(map(_describe, each))) > 1), None)


def other_collectives(number: int, calls: Sequence[Event | None], step: int) -> tuple[Difference, Reason]:
    """Return the difference of ranks that call different collectives, and its cause.

    Args:
        number: number of the collective.
        calls: call of each rank; None: it makes fewer calls.
        step: step in which they are called; -1: unknown.
    """
    callers: dict[str, list[int]] = defaultdict(list)
    for rank, event in enumerate(calls):
        callers[_describe(event)].append(rank)
    # the same call may come from different lines: the first one is shown
    lines = {_describe(event): f" at {event['where']}" for event in reversed(calls) if event}
    text = "; ".join(f"rank{several(who)}: {call}{lines.get(call, '')}" for call, who in callers.items())
    cause = (
        "ranks call different collectives: a call that only some ranks make, or in a different order or with a "
        "different shape, makes the other ranks wait or mixes up the data sent"
    )
    difference = Difference(COLLECTIVES, step, max(step, 0), "", text=f"collective {number}: {text}")
    return difference, Reason(cause, next(call_lines(event["stack"]) for event in calls if event))


def _describe(event: Event | None) -> str:
    """Format a collective's name, and its tensor's shape if that must be the same on all ranks."""
    if event is None:
        return "none"
    shape = event["shape"] if event["name"] in ("all_reduce", "broadcast", "all_gather") else None
    return f"{event['name']} {shape}"


def _out_of_batches(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Find a rank that has run out of batches while others wait for it."""
    counts_by_rank = [
        Counter((event["loader"], event["iteration"]) for event in rank.find("batch")) for rank in ranks.ranks
    ]
    for few, event in ranks.find("iterated"):
        # within one iteration of one loader: a rank may evaluate by itself
        loader, iteration = event["loader"], event["iteration"]
        counts = [batches[loader, iteration] for batches in counts_by_rank]
        if max(counts) > counts[few]:
            step = ranks.fewest_steps
            text = f"batches by rank: {by_rank(enumerate(counts))}; the others wait for rank {few}, which has no more"
            where = ranks.ranks[few].line_of("iteration", loader=loader)
            return Difference(COLLECTIVES, step, step, "", (few,), text=text), uneven(where)
    return None


def _skipped_step(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Find an optimizer step that some ranks make after a backward, and others, which also make steps, do not."""
    if not all(rank.steps for rank in ranks.ranks):
        return None
    for events in zip(*(rank.find("backward", "step") for rank in ranks.ranks), strict=False):
        stepping = tuple(rank for rank, event in enumerate(events) if event["kind"] == "step")
        if 0 < len(stepping) < len(events):
            step = events[stepping[0]]
            words = by_rank((rank, "step" if rank in stepping else "no step") for rank in range(len(events)))
            text = f"after a backward {words}"
            difference = Difference(STEPS, step["number"], step["update"], "", stepping, text=text)
            cause = "ranks skip different steps, because the condition uses a rank's own values (such as its loss)"
            return difference, Reason(f"{cause}: use values that are the same on all ranks", step["where"])
    return None


def own_choices(ranks: Recording, single: Recording, shares_inputs: bool) -> tuple[Difference, Reason] | None:
    """Find random numbers that choose batches without a loader, and with which ranks train on the same samples.

    Args:
        ranks: the run on ranks.
        single: the run of one process.
        shares_inputs: True if all ranks computed with the same inputs.
    """
    parts = [[event["key"] for event in rank.find(PART)][:1] for rank in ranks.ranks]
    if shares_inputs and single.has(SAME_CHOICE):
        text, where = "all ranks train on the same batch", single.first.line_of(SAME_CHOICE)
        cause = "the random numbers that choose a batch are the same on all ranks: seed each rank with another number"
    elif single.has(ORDERS) and any(each != parts[0] for each in parts):
        text = "ranks take their parts from permutations that differ, so that several ranks get the same sample"
        cause, where = "each rank draws its own permutation: use the same seed", single.first.line_of(ORDERS)
    else:
        return None
    return Difference(SAMPLES, 0, 0, "", tuple(range(len(parts))), text=text), Reason(cause, where)


def unsynchronized_shards(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Find an optimizer step on shards that lacks the last backward's gradients, which were not synchronized."""
    if not ranks.has("sharded data parallel"):
        return None
    for step in ranks.first.steps:
        own = ranks.first.find("backward", update=step["update"])
        if not own or own[-1]["synchronizes"]:
            continue
        cause = Reason(
            "fully_shard keeps unsynchronized gradients in the unsharded parameters: call "
            "set_requires_gradient_sync(True) before the last backward of a window",
            own[-1]["where"],
            "synchronized backwards: " + ", ".join("yes" if event["synchronizes"] else "no" for event in own),
        )
        name = next(iter(step["names"].values()), "")
        text = f"the gradient of {name} lacks the last of {len(own)} backward(s), which is not synchronized"
        everywhere = tuple(range(len(ranks.ranks)))
        return Difference(GRADIENTS, step["number"], step["update"], name, everywhere, text=text), cause
    return None
