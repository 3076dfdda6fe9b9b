"""Snapshots of ranks between nodes: a message tells what has changed since the one before."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from lockstep.supervise.causes import Stand
from lockstep.supervise.snapshot import RankSnapshot
from lockstep.supervise.stack import Frame, Stack
from lockstep.supervise.trace_memory import Members, Note, shared

CLOCKS = ("at", "still", "stopped", "held")
"""What of a snapshot goes on by itself."""

TOLERANCE = 0.5
"""Seconds by which those may differ from what is expected of them before they are told again."""


def later(snapshot: RankSnapshot, at: float) -> RankSnapshot:
    """A rank that goes on doing what it does, at a later moment."""
    more = at - snapshot.at
    on = {name: value + more for name in CLOCKS[1:] if (value := getattr(snapshot, name))}
    return replace(snapshot, at=at, **on)


class Changes:
    """What the next message on some ranks has to tell whoever has taken in all before it (`taken_in`)."""

    def __init__(self) -> None:
        self._known: dict[int, RankSnapshot] = {}  # as they were last told
        self._next: dict[int, RankSnapshot] = {}

    def of(self, snapshots: Sequence[RankSnapshot], at: float) -> dict[str, Any]:
        """The message, as JSON knows it: the ranks that have changed, with what has, and those that are no more.

        Args:
            snapshots: as they are now. A stack stays until there is another.
            at: the moment.
        """
        told = []
        self._next = {}
        for now in snapshots:
            before = self._known.get(now.rank)
            change = self._change(before, now)
            known = now if before is None else replace(now, stack=now.stack or before.stack)
            self._next[now.rank] = known if change or before is None else before
            if change:
                told.append({"rank": now.rank, **change})
        return {"at": at, "ranks": told, "gone": sorted(self._known.keys() - self._next.keys())}

    def keep(self) -> None:
        """The last message has been sent."""
        self._known = self._next

    @staticmethod
    def _change(before: RankSnapshot | None, now: RankSnapshot) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for field in fields(RankSnapshot):
            name, value = field.name, getattr(now, field.name)
            if name in ("rank", *CLOCKS) or (before is not None and value == getattr(before, name)):
                continue
            if name == "stack" and value is None:
                continue
            told[name] = _plain(name, value)
        expected = None if before is None else later(before, now.at)
        if not told and expected is not None:
            strays = any(abs(getattr(now, name) - getattr(expected, name)) > TOLERANCE for name in CLOCKS)
            if not strays:
                return {}
        return {**told, **{name: getattr(now, name) for name in CLOCKS}}


def taken_in(before: Mapping[int, RankSnapshot], told: Mapping[str, Any]) -> dict[int, RankSnapshot]:
    """The ranks of a node after a message of `Changes`, by rank.

    Args:
        before: as they were known.
        told: the message.
    """
    gone = set(told["gone"])
    found = {rank: later(known, told["at"]) for rank, known in before.items() if rank not in gone}
    for each in told["ranks"]:
        values = {name: _value(name, value) for name, value in each.items()}
        known = before.get(each["rank"])
        found[each["rank"]] = RankSnapshot(**values) if known is None else replace(known, **values)
    return found


_OF_A_NOTE = tuple(field.name for field in fields(Note))


def plain_notes(notes: Iterable[Note]) -> list[dict[str, Any]]:
    """Notes as JSON knows them."""
    return [
        {name: getattr(note, name) for name in _OF_A_NOTE} | {"members": ranges(shared(note.members))} for note in notes
    ]


def notes_of(plain: Iterable[dict[str, Any]]) -> tuple[Note, ...]:
    """The notes of which `plain_notes` made these."""
    return tuple(Note(**{**note, "members": members(tuple(map(tuple, note["members"])))}) for note in plain)


def _plain(name: str, value: Any) -> Any:
    if name == "notes":
        return plain_notes(value)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _value(name: str, plain: Any) -> Any:
    if name == "notes":
        return notes_of(plain)
    if name == "stand":
        return Stand(**plain)
    if name in ("stack", "worker"):
        return None if plain is None else Stack(tuple(Frame(**frame) for frame in plain["frames"]))
    return plain


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
