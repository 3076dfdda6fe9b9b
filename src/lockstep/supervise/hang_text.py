"""Messages about hangs. They describe ranks that wait, that are stopped, or whose calls do not match."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from lockstep.supervise.snapshot import GONE, STOPPED, RankPosition, RankSnapshot
from lockstep.supervise.stack import LOCKSTEP, TORCH, Stack
from lockstep.supervise.trace_memory import Note

RULE = "All ranks must make the same calls."

SHORT = 6
"""Maximum number of printed frames of a stack."""
STACKS = 3
"""Maximum number of different stacks that are printed."""

_NOT_PRINTED = (f"{LOCKSTEP}launch/", f"{TORCH}distributed/c10d_logger.py")


# -- groups of ranks


def group_ranks(texts: Iterable[tuple[int, str]]) -> list[tuple[str, list[int]]]:
    """Group ranks by text. Return a list of (text, ranks with this text)."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def smallest_first(groups: list[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
    """Sort groups by their number of ranks, the smallest group first."""
    # of many ranks, the few that differ are the ones to look at
    return sorted(groups, key=lambda group: len(group[1]))


def rank_list(ranks: Sequence[int]) -> str:
    """Format ranks as text, such as ``"rank 3"``, ``"ranks 0, 2"`` or ``"ranks 0-2, 7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}"


# -- ranks and what they do


def describe(snapshot: RankSnapshot) -> str:
    """Describe a rank's activity: ``"waits in all_reduce #417, train.py:88 (on_train_epoch_end)"``."""
    inside, queued, stack = snapshot.inside, snapshot.queued, snapshot.stack
    activity = "" if stack is None else stack.doing
    if snapshot.state in (STOPPED, GONE):
        text = snapshot.state if inside is None else f"{snapshot.state} in {inside.name}"
    elif inside is not None:
        text = f"waits in {inside.name}"
        if activity not in ("", inside.operation):
            text += f" ({activity})"
    elif queued is not None:
        text = f"waits in {queued.name} (queued on its device)"
    elif stack is None:
        text = snapshot.state
    elif stack.loads:
        text = "is in its data loader"
    elif stack.waits:
        # a rank in Work.wait waits for its oldest asynchronous collective
        pending = [note for note in snapshot.notes if note.left is not None and note.done is None and not note.aside]
        text = f"waits in {pending[-1].name if pending and activity == 'wait' else activity or 'a collective'}"
    else:
        text = f"is in {activity or 'its own code'}"
    note = snapshot.awaited
    if note is not None:
        since = phase_of(note)
    elif stack is not None:
        # while it loads data, the hook is that of the last step
        since = _in_brackets(
            "" if stack.loads else stack.phase, f"since batch {stack.batch}" if stack.batch >= 0 else ""
        )
    else:
        since = ""
    return f"{text}, {snapshot.location}{since}"


def phase_of(note: Note) -> str:
    """Return, in brackets, the hook or function that called a collective, and the index of the batch."""
    function = "" if note.function == "<module>" else note.function
    return _in_brackets(note.phase or function, f"batch {note.batch}" if note.batch >= 0 else "")


def _in_brackets(*words: str) -> str:
    text = ", ".join(filter(None, words))
    return f" ({text})" if text else ""


def describe_all(snapshots: Iterable[RankSnapshot]) -> str:
    """Describe the activities of several ranks. Ranks with the same activity are grouped."""
    ordered = sorted(snapshots, key=lambda snapshot: snapshot.rank)
    parts = []
    for text, ranks in group_ranks((snapshot.rank, describe(snapshot)) for snapshot in ordered):
        if len(ranks) > 1:
            verb, _, rest = text.partition(" ")
            # a state alone, such as "sleeps, train.py:7"
            comma = "," if verb.endswith(",") else ""
            verb = verb.rstrip(",")
            plural = {"is": "are", "waits": "wait", "runs": "run", "sleeps": "sleep"}.get(verb, verb)
            text = f"{plural}{comma} {rest}".replace(" its ", " their ", 1)
        parts.append(f"{rank_list(ranks)} {text}")
    return "; ".join(parts)


def stacks_of(snapshots: Iterable[RankSnapshot]) -> str:
    """Return the ranks' Python stacks, each in a few lines. Equal stacks appear once."""
    groups = group_ranks(
        (snapshot.rank, f"{whose}:\n{brief(stack)}")
        for snapshot in snapshots
        for stack, whose in ((snapshot.stack, ""), (snapshot.worker, ", a worker of its data loader"))
        if stack is not None
    )
    printed = sorted(groups, key=lambda group: (len(group[1]), group[1]))[:STACKS]
    return "\n".join(f"{rank_list(ranks)}{text}" for text, ranks in printed)


def brief(stack: Stack, most: int = SHORT) -> str:
    """Format a stack in at most ``most`` lines, the innermost call last. Prefer lines of the user's code."""
    frames = [frame for frame in stack.frames if not frame.file.startswith(_NOT_PRINTED)]
    users = [index for index, frame in enumerate(frames) if frame.is_users][: most - 2]
    kept = sorted({*range(min(2, len(frames))), *users})
    kept = sorted({*kept, *[index for index in range(len(frames)) if index not in kept][: max(0, most - len(kept))]})
    lines = []
    for index in reversed(kept):
        frame = frames[index]
        file = frame.file.replace(LOCKSTEP, "lockstep/").replace(TORCH, "torch/")
        lines.append(f"    {file}:{frame.line} in {frame.function}")
    return "\n".join(lines)


# -- verdicts


def has_left_call(position: RankPosition, waiting: Sequence[int], where: str) -> str:
    """Describe a rank that has left a Trainer call or never made one, while other ranks wait for that rank."""
    did = f"left the call at {position.location}" if position.call else "made no call"
    if position.ended:
        did += " and ended"
    return f"rank {position.rank} {did}, and {rank_list(waiting)} waits for it in {where}. {RULE}"


def different_places(places: Mapping[int, str]) -> str:
    """Describe ranks that wait for each other at different source lines. Return "" if all wait at the same line.

    Args:
        places: activity and line of each rank, by rank.
    """
    groups = group_ranks(sorted(places.items()))
    if len(groups) < 2:
        return ""
    parts = [f"{rank_list(ranks)} in {place}" for place, ranks in smallest_first(groups)]
    return f"the ranks wait for one another at different places: {'; '.join(parts)}. {RULE}"


def different_calls(calls: Iterable[tuple[int, str, Note]]) -> str:
    """Describe ranks whose calls in one collective do not match.

    Args:
        calls: rank, line of the user's code, and note of each call.
    """
    texts = []
    for rank, location, note in sorted(calls, key=lambda call: call[0]):
        verb = "waits in" if note.inside else "called"
        payload = f" of {note.payload}" if note.payload else ""
        root = f" with rank {note.root}" if note.root >= 0 else ""
        texts.append((rank, f"{verb} {note.name}{payload}{root}, {location}{phase_of(note)}"))
    parts = "; ".join(f"{rank_list(ranks)} {text}" for text, ranks in smallest_first(group_ranks(texts)))
    return f"the ranks' calls do not match: {parts}. {RULE}"


def stopped_ranks(stopped: Iterable[RankSnapshot], waiting: Iterable[RankSnapshot]) -> str:
    """Describe ranks that are stopped by SIGSTOP, and the ranks that wait for them."""
    return f"{describe_all(stopped)} (SIGSTOP), and {describe_all(waiting)}"


def missing_ranks(missing: Iterable[RankSnapshot], waiting: Iterable[RankSnapshot]) -> str:
    """Describe ranks that have not reached a collective in which other ranks' devices wait."""
    return f"{describe_all(missing)}, and others cannot continue: {describe_all(waiting)}. {RULE}"


def long_wait(seconds: float, others: Iterable[RankSnapshot], waiting: Iterable[RankSnapshot]) -> str:
    """Describe a long wait: ranks ``waiting`` have waited for ``seconds``, and ranks ``others`` may be the cause."""
    return f"for {seconds:.0f} s, {'; '.join(filter(None, [describe_all(others), describe_all(waiting)]))}"


def ended_by_limit(wait: object, hang_kill: float) -> str:
    """Return the message for a run that ends because ranks have waited longer than ``hang_kill``."""
    return f"{wait}; ended after hang_kill={hang_kill:g} s of waiting"


def continues(wait: str, hang_kill: float) -> str:
    """Return the warning about a long wait that does not end the run."""
    then = "the run continues" + (
        "" if hang_kill == math.inf else f", and ends after hang_kill={hang_kill:g} s of waiting"
    )
    return f"{wait}; {then}"


def cannot_stop(ranks: Sequence[int], where: str) -> str:
    """Describe ranks that still wait in a collective after Ctrl-C, and so cannot stop at a boundary."""
    return f"{rank_list(ranks)} waited in {where} and could not be stopped at a boundary"


def after_ctrl_c(where: str) -> str:
    """Return the message about Ctrl-C that the supervisor prints for rank 0, whose main thread is blocked."""
    return (
        f"lockstep: Ctrl-C: the ranks end at their next boundary, and rank 0 is still in {where}; a second Ctrl-C ends "
        "them at once."
    )
