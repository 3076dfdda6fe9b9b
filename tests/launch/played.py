"""Ranks and the way between nodes, played within one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack import LOCKSTEP, TORCH, Frame, Stack
from lockstep.supervise.trace_memory import Note

FIT = Frame("/me/fit.py", 7, "<module>")
WORKING = Stack((Frame("/me/train.py", 31, "training_step"), FIT))
REDUCING = Stack((Frame(f"{LOCKSTEP}engines/ddp/reducer.py", 2, "finish"), FIT))
IN_BARRIER = Stack((Frame(f"{TORCH}distributed/distributed_c10d.py", 9, "barrier"), FIT))

_NOTE = Note(0, 0, "", "0", (0, 1, 2), "", -1, "", "training_step", "", -1, -1, 40.0, None, None, True)


def note(number: int, operation: str = "all_reduce", **changed: Any) -> Note:
    """A rank's collective, which it has not left."""
    changed.setdefault("location", f"/me/train.py:{number}")
    return replace(_NOTE, index=number, number=number, operation=operation, **changed)


def past(number: int, operation: str = "all_reduce", **changed: Any) -> Note:
    return note(number, operation, **{"left": 41.0, "done": 41.0, **changed})


def position(rank: int, call: int = 1, inside: bool = True, **changed: Any) -> RankPosition:
    return RankPosition(rank, 0.0, call, inside, "/me/fit.py:7", **changed)


class End:
    """One end of the way between nodes, played."""

    def __init__(self, ends: list[End]) -> None:
        self.ends, self.node = ends, len(ends)
        self.hears: dict[str, Callable[[int, Any], None]] = {}
        self.sent: list[str] = []
        ends.append(self)

    @property
    def nodes(self) -> list[int]:
        return [end.node for end in self.ends if end is not self]

    def send(self, topic: str, body: Any, to: int | None = None, newest: bool = False) -> bool:
        self.sent.append(topic)
        for end in self.ends:
            if end is not self and to in (None, end.node):
                end.hears[topic](self.node, json.loads(json.dumps(body)))
        return True

    def listen(self, topic: str, callback: Callable[[int, Any], None]) -> None:
        self.hears[topic] = callback
