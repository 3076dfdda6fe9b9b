"""Says why a run tells nothing, with the way out; and what runs that came to no end differ in."""

from __future__ import annotations

import re
from itertools import zip_longest

from lockstep.verify.causes import Reason
from lockstep.verify.compare import COLLECTIVES, GRADIENTS, Difference
from lockstep.verify.processes import Ending
from lockstep.verify.recordings import Event, RankRecording, Recording

_TYPES = re.compile(r"dtype|expected (scalar|m1|mat)|must have the same|ouble|same type|float64", re.IGNORECASE)
_OTHERS = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|[Tt]imed? ?out|peer|connectFullMesh")
_GPU = re.compile(r"CUDA|cuda|NVIDIA|nvidia|NCCL|HIP ")
_MEMORY = re.compile(r"DefaultCPUAllocator|MemoryError|out of memory|can't allocate")


def is_of_types(ranks: Recording) -> bool:
    """Whether a run in float64 failed since something is of another type."""
    return any(rank.ending.status == "failed" and _TYPES.search(rank.ending.message) for rank in ranks.ranks)


def of_ranks(ranks: Recording, steps: int) -> str:
    """Why the run on ranks tells nothing, and what helps; "" where it does."""
    for number, rank in enumerate(ranks.ranks):
        if rank.ending.status in ("failed", "killed") and not _OTHERS.search(rank.ending.message):
            return _of_failure(f"rank {number}", rank)
    for number, rank in enumerate(ranks.ranks):
        if rank.ending.status in ("failed", "killed"):
            return _of_failure(f"rank {number}", rank)
        if rank.ending.status == "stuck":
            return _of_silence(f"rank {number}", rank)
    if not any(rank.steps for rank in ranks.ranks):
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


NO_LOADER = (
    "the data come from no torch DataLoader, so that one process cannot be fed what the ranks got, and by its own "
    "choice it trains something else: put them behind a DataLoader"
)


def of_one(whole: Recording) -> str:
    """Why the run of one process tells nothing, and what helps; "" where it does."""
    rank = whole.first
    if rank.ending.status in ("failed", "killed"):
        return _of_failure("one process that is fed the samples of all ranks", rank)
    if rank.ending.status == "stuck":
        return _of_silence("one process", rank)
    if not rank.steps:
        return "as one process (WORLD_SIZE=1) the script makes no optimizer step: let it train there, too"
    return ""


def _of_failure(who: str, rank: RankRecording) -> str:
    ending = rank.ending
    errors = rank.folder / "stderr"
    text = errors.read_text(errors="replace") if errors.exists() else ""
    where = f" at {ending.where}" if ending.where else ""
    if "usage:" in text and "exit code 2" in ending.message:
        told = text.strip().splitlines()[-1]
        return f"the script needs arguments ({told}): give them behind --: lockstep verify script.py -- --name value"
    if ending.status == "killed" or _MEMORY.search(ending.message):
        return (
            f"{who} was ended by the system or ran out of memory ({ending.message}): all ranks run on this machine at "
            "once; give a smaller model or batch by the script's arguments, or fewer --devices"
        )
    if _GPU.search(ending.message):
        return (
            f"the script needs a GPU{where} ({_short(ending)}), and is verified on the CPU: let it take the CPU where "
            "torch.cuda.is_available() is False"
        )
    if ending.message.startswith("exit code"):
        last = text.strip().splitlines()[-1:] or ["nothing was said"]
        return f"{who} ended with {ending.message}: {last[0]}"
    return f"{who} failed{where}: {_short(ending)}"


def _of_silence(who: str, rank: RankRecording) -> str:
    steps = len(rank.steps)
    at = rank.events[-1]["kind"] if rank.events else "nothing"
    return (
        f"{who} went on without end after {steps} optimizer step(s) (last seen: {at}): let the script train sooner, or "
        "allow more time by --patience"
    )


def _short(ending: Ending) -> str:
    line = ending.message.strip().splitlines()[0] if ending.message.strip() else "without a message"
    return line[:200]


# -- runs that came to no end ------------------------------------------------------------------------------


def deadlock(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Where ranks make collectives that do not fit together, or wait for one that makes none any more."""
    endings = [rank.ending for rank in ranks.ranks]
    for ending in endings:
        if ending.status == "failed" and not _OTHERS.search(ending.message):
            return None  # that is the failure from which others follow
    if all(ending.status in ("done", "ended") for ending in endings):
        return _other_order(ranks)
    uneven = _uneven(ranks)
    if uneven is not None:
        return uneven
    return _other_order(ranks)


def _other_order(ranks: Recording) -> tuple[Difference, Reason] | None:
    """The first place where ranks make other collectives."""
    calls = [[event for event in rank.of("collective") if event["whole"]] for rank in ranks.ranks]
    finished = all(rank.ending.status in ("done", "ended") for rank in ranks.ranks)
    for events in zip_longest(*calls):
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
    step = min(len(rank.steps) for rank in ranks.ranks)
    difference = Difference(COLLECTIVES, step, step, "", tuple(range(len(events))), text="; ".join(texts))
    text = "ranks make other collectives: a call that only some ranks make, or in another order, makes the others wait"
    return difference, Reason(text, there[0]["where"])


def _uneven(ranks: Recording) -> tuple[Difference, Reason] | None:
    """Ranks that have no more batches while others wait for them."""
    counts = [len(rank.of("batch")) for rank in ranks.ranks]
    if len(set(counts)) == 1 or not any(rank.of("iterated") for rank in ranks.ranks):
        return None
    least = min(counts)
    few = tuple(rank for rank, count in enumerate(counts) if count == least)
    step = min(len(rank.steps) for rank in ranks.ranks)
    told = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
    text = f"batches by rank: {told}; the others wait for rank {few[0]}, which has no more"
    where = next((event["where"] for _, event in ranks.of("iteration")), "")
    cause = "ranks get several numbers of batches: give all as many (DistributedSampler), or train within Join"
    return Difference(COLLECTIVES, step, step, "", few, text=text), Reason(cause, where)


# -- windows -------------------------------------------------------------------------------------------------


def short_window(ranks: Recording) -> tuple[Difference, Reason] | None:
    """A window of fewer micro-batches whose loss is divided by the number of a full one."""
    rank = ranks.first
    backwards: dict[int, list[Event]] = {}
    for event in rank.of("backward"):
        backwards.setdefault(event["update"], []).append(event)
    full = {len(events) for events in backwards.values() if _is_full(events)}
    for step in rank.steps:
        events = backwards.get(step["update"], [])
        divisors = {event["divisor"] for event in events}
        if len(divisors) != 1 or len(events) < 1:
            continue
        divisor = divisors.pop()
        if divisor in full and len(events) < divisor:
            name = next(iter(step["names"].values()), "")
            text = (
                f"the gradient of {name} is {len(events)} of {divisor:g} parts of the mean over its window: that has "
                f"{len(events)} micro-batch{'es' * (len(events) > 1)}"
            )
            cause = f"the last accumulation window of an epoch has {len(events)} micro-batches, and its loss is "
            return (
                Difference(GRADIENTS, step["number"], step["update"], name, tuple(range(len(ranks.ranks))), text=text),
                Reason(cause + f"divided by the full number {divisor:g}", events[-1]["where"]),
            )
    return None


def left_out(ranks: Recording) -> tuple[Difference, Reason] | None:
    """A step of sharded parameters before which the last backward was not synchronized: its gradients are left out."""
    if not ranks.has("sharded data parallel"):
        return None
    backwards = ranks.first.of("backward")
    for step in ranks.first.steps:
        own = [event for event in backwards if event["update"] == step["update"]]
        if not own or own[-1]["synchronizes"]:
            continue
        name = next(iter(step["names"].values()), "")
        text = f"the gradient of {name} lacks the last of {len(own)} backward(s), which is not synchronized"
        cause = Reason(
            "fully_shard leaves gradients in the unsharded parameters: set_requires_gradient_sync(True) is to stand "
            "before the last backward of a window",
            own[-1]["where"],
            "backwards that are synchronized: " + ", ".join("yes" if event["synchronizes"] else "no" for event in own),
        )
        everywhere = tuple(range(len(ranks.ranks)))
        return Difference(GRADIENTS, step["number"], step["update"], name, everywhere, text=text), cause
    return None


def _is_full(events: list[Event]) -> bool:
    divisors = {event["divisor"] for event in events}
    return len(divisors) == 1 and len(events) > 1 and divisors == {float(len(events))}
