"""JSON messages that send ranks' snapshots between nodes. A message contains only the ranks that changed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from lockstep.supervise.snapshot import RankPosition, RankSnapshot
from lockstep.supervise.stack import Frame, Stack
from lockstep.supervise.trace_memory import Members, Note, shared

CLOCKS = ("still", "stopped", "held")
"""Fields of a snapshot that grow with time once they are nonzero."""

TOLERANCE = 0.5
"""Seconds by which a clock may deviate from its expected value before it is sent again."""


def later(snapshot: RankSnapshot, seconds: float) -> RankSnapshot:
    """Return a rank's snapshot as it would be ``seconds`` later if the rank's activity does not change."""
    clocks = {name: value + seconds for name in CLOCKS if (value := getattr(snapshot, name))}
    return replace(snapshot, at=snapshot.at + seconds, **clocks)


class Changes:
    """Builder of messages that contain only changed snapshots, for a receiver that has applied all earlier messages."""

    def __init__(self) -> None:
        self._known: dict[int, RankSnapshot] = {}  # as they were last sent
        self._next: dict[int, RankSnapshot] = {}

    def of(self, snapshots: Sequence[RankSnapshot], at: float) -> dict[str, Any]:
        """Return the next message. It contains the changed snapshots and the numbers of ranks that no longer exist.

        Args:
            snapshots: current snapshots.
            at: current time, on the clock of ``time.monotonic``.
        """
        changed = []
        for now in snapshots:
            known = self._known.get(now.rank)
            if known is not None:
                # the receiver advances the clocks by itself
                expected = later(known, now.at - known.at)
                clocks = {name: getattr(expected, name) for name in CLOCKS}
                deviates = any(abs(getattr(now, name) - clock) > TOLERANCE for name, clock in clocks.items())
                if not deviates and replace(now, at=expected.at, **clocks) == expected:
                    continue
            changed.append(now)
        self._next = {now.rank: self._known.get(now.rank, now) for now in snapshots}
        self._next |= {now.rank: now for now in changed}
        gone = sorted(self._known.keys() - self._next.keys())
        return {"at": at, "ranks": [plain(now) for now in changed], "gone": gone}

    def keep(self) -> None:
        """Record that the message from `of` was sent, so that the next message contains only later changes."""
        self._known = self._next


def apply(before: Mapping[int, RankSnapshot], message: Mapping[str, Any]) -> dict[int, RankSnapshot]:
    """Return a node's snapshots, by rank, updated by a message from `Changes`.

    Args:
        before: the snapshots before the message.
        message: the message.
    """
    gone = set(message["gone"])
    found = {rank: later(known, message["at"] - known.at) for rank, known in before.items() if rank not in gone}
    return found | {each["rank"]: snapshot_of(each) for each in message["ranks"]}


def plain(snapshot: RankSnapshot) -> dict[str, Any]:
    """Convert a rank's snapshot to JSON data."""
    notes, stacks = plain_notes(snapshot.notes), {"stack": snapshot.stack, "worker": snapshot.worker}
    plain_stacks = {name: None if stack is None else asdict(stack) for name, stack in stacks.items()}
    return {**vars(snapshot), "position": vars(snapshot.position), "notes": notes, **plain_stacks}


def snapshot_of(plain: Mapping[str, Any]) -> RankSnapshot:
    """Convert the JSON data that `plain` returned back to a snapshot."""
    position, notes = RankPosition(**plain["position"]), notes_of(plain["notes"])
    stack, worker = _stack_of(plain["stack"]), _stack_of(plain["worker"])
    return RankSnapshot(**{**plain, "position": position, "notes": notes, "stack": stack, "worker": worker})


def _stack_of(plain: Mapping[str, Any] | None) -> Stack | None:
    if plain is None:
        return None
    return Stack(**{**plain, "frames": tuple(Frame(**frame) for frame in plain["frames"])})


_OF_A_NOTE = tuple(field.name for field in fields(Note))


def plain_notes(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Convert notes, which are records of collectives, to JSON data."""
    return [
        {name: getattr(note, name) for name in _OF_A_NOTE} | {"members": ranges(shared(note.members))} for note in notes
    ]


def notes_of(plain: Iterable[dict[str, Any]]) -> tuple[Note, ...]:
    """Convert the JSON data that `plain_notes` returned back to notes."""
    return tuple(Note(**{**note, "members": members(tuple(map(tuple, note["members"])))}) for note in plain)


@functools.lru_cache(maxsize=4096)
def ranges(ranks: tuple[int, ...]) -> list[list[int]]:
    """Compress ranks into ranges ``[[first, last, step], ...]``, since a group may have thousands of ranks."""
    found: list[list[int]] = []
    for rank in ranks:
        run = found[-1] if found else None
        if run is not None and run[0] == run[1] and rank > run[1]:
            run[1], run[2] = rank, rank - run[0]
        elif run is not None and rank == run[1] + run[2] and run[0] != run[1]:
            run[1] = rank
        else:
            found.append([rank, rank, 1])
    return found


@functools.lru_cache(maxsize=4096)
def members(runs: tuple[tuple[int, int, int], ...]) -> Members:
    """Expand the ranges that `ranges` returned into all their ranks."""
    return shared(tuple(rank for first, last, step in runs for rank in range(first, last + 1, step)))
