"""Snapshots of ranks between nodes, as JSON: a message tells the ranks that have changed since the one before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from lockstep.supervise.causes import Stand
from lockstep.supervise.snapshot import RankSnapshot
from lockstep.supervise.stack import Frame, Stack
from lockstep.supervise.trace_memory import Members, Note, shared

CLOCKS = ("still", "stopped", "held")
"""What of a snapshot goes on by itself, where it has begun."""

TOLERANCE = 0.5
"""Seconds by which those may differ from what is expected of them before they are told again."""


def later(snapshot: RankSnapshot, seconds: float) -> RankSnapshot:
    """A rank that goes on doing what it does, so many seconds later."""
    clocks = {name: value + seconds for name in CLOCKS if (value := getattr(snapshot, name))}
    return replace(snapshot, at=snapshot.at + seconds, **clocks)


class Changes:
    """What the next message on some ranks has to tell whoever has taken in all before it (`taken_in`)."""

    def __init__(self) -> None:
        self._known: dict[int, RankSnapshot] = {}  # as they were last told
        self._next: dict[int, RankSnapshot] = {}

    def of(self, snapshots: Sequence[RankSnapshot], at: float) -> dict[str, Any]:
        """The message: the ranks that have changed, and those that are no more.

        Args:
            snapshots: as they are now.
            at: the moment.
        """
        told = [now for now in snapshots if self._is_news(now)]
        self._next = {now.rank: self._known.get(now.rank, now) for now in snapshots}
        self._next |= {now.rank: now for now in told}
        gone = sorted(self._known.keys() - self._next.keys())
        return {"at": at, "ranks": [plain(now) for now in told], "gone": gone}

    def keep(self) -> None:
        """The last message has been sent."""
        self._known = self._next

    def _is_news(self, now: RankSnapshot) -> bool:
        known = self._known.get(now.rank)
        if known is None:
            return True
        expected = later(known, now.at - known.at)
        clocks = {name: getattr(expected, name) for name in CLOCKS}
        if any(abs(getattr(now, name) - clock) > TOLERANCE for name, clock in clocks.items()):
            return True
        return replace(now, at=expected.at, **clocks) != expected


def taken_in(before: Mapping[int, RankSnapshot], told: Mapping[str, Any]) -> dict[int, RankSnapshot]:
    """The ranks of a node after a message of `Changes`, by rank.

    Args:
        before: as they were known.
        told: the message.
    """
    gone = set(told["gone"])
    found = {rank: later(known, told["at"] - known.at) for rank, known in before.items() if rank not in gone}
    return found | {each["rank"]: snapshot_of(each) for each in told["ranks"]}


def plain(snapshot: RankSnapshot) -> dict[str, Any]:
    """A snapshot as JSON knows it."""
    notes, stacks = plain_notes(snapshot.notes), {"stack": snapshot.stack, "worker": snapshot.worker}
    told = {name: None if stack is None else asdict(stack) for name, stack in stacks.items()}
    return {**vars(snapshot), "stand": vars(snapshot.stand), "notes": notes, **told}


def snapshot_of(plain: Mapping[str, Any]) -> RankSnapshot:
    """The snapshot of which `plain` made this."""
    stand, notes = Stand(**plain["stand"]), notes_of(plain["notes"])
    stack, worker = _stack_of(plain["stack"]), _stack_of(plain["worker"])
    return RankSnapshot(**{**plain, "stand": stand, "notes": notes, "stack": stack, "worker": worker})


def _stack_of(plain: Mapping[str, Any] | None) -> Stack | None:
    if plain is None:
        return None
    return Stack(**{**plain, "frames": tuple(Frame(**frame) for frame in plain["frames"])})


_OF_A_NOTE = tuple(field.name for field in fields(Note))


def plain_notes(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Notes as JSON knows them."""
    return [
        {name: getattr(note, name) for name in _OF_A_NOTE} | {"members": ranges(shared(note.members))} for note in notes
    ]


def notes_of(plain: Iterable[dict[str, Any]]) -> tuple[Note, ...]:
    """The notes of which `plain_notes` made these."""
    return tuple(Note(**{**note, "members": members(tuple(map(tuple, note["members"])))}) for note in plain)


@functools.lru_cache(maxsize=4096)
def ranges(ranks: tuple[int, ...]) -> list[list[int]]:
    """Numbers as runs of equal steps, ``[[first, last, step], ...]``: a group of thousands of ranks is one or few."""
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
    """The numbers of which `ranges` made these."""
    return shared(tuple(rank for first, last, step in runs for rank in range(first, last + 1, step)))
