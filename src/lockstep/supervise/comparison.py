"""Comparison of an aborted rank's collectives with those of other nodes. Gloo aborts a process if sizes differ.

Node 0 sends the rank's newest notes to all nodes. Each node answers with what its ranks did as the same collectives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lockstep.supervise.causes import Divergence
from lockstep.supervise.changes import notes_of, plain_notes
from lockstep.supervise.elsewhere import OtherNodes
from lockstep.supervise.hang import CollectiveKey, key_of, mismatched
from lockstep.supervise.traces import Made

ANSWERS = 0.4
"""Seconds that the nodes have to answer."""


class NotesOfAll:
    """Exchange of what ranks did in given collectives. Node 0 asks, and every node answers for its ranks.

    Args:
        hub: connection to the other nodes.
        own: returns what this node's ranks did as the given collectives.
    """

    def __init__(self, hub: OtherNodes, own: Callable[[Collection[CollectiveKey]], list[Made]]) -> None:
        self._hub, self._own = hub, own
        self._made: list[Made] = []
        self._answered: set[int] = set()
        self._heard = threading.Condition()
        hub.listen("compare", self._answer)
        hub.listen("compared", self._take)

    def ask(self, notes: list[dict[str, Any]]) -> Divergence | None:
        """On node 0, return the mismatch of all ranks in the noted collectives, if any. May wait `ANSWERS` seconds."""
        with self._heard:
            self._made, self._answered = self._own(_keys(notes)), set()
        self._hub.send("compare", {"notes": notes})
        with self._heard:
            self._heard.wait_for(lambda: self._answered.issuperset(self._hub.nodes), ANSWERS)
            return mismatched([(rank, where, note) for ranks, where, note in self._made for rank in ranks])

    def _answer(self, node: int, body: Mapping[str, Any]) -> None:
        made = self._own(_keys(body["notes"]))
        told = [{"ranks": ranks, "where": where, "note": plain_notes([note])[0]} for ranks, where, note in made]
        self._hub.send("compared", {"made": told}, to=0)

    def _take(self, node: int, body: Mapping[str, Any]) -> None:
        made = [(list(each["ranks"]), str(each["where"]), notes_of([each["note"]])[0]) for each in body["made"]]
        with self._heard:
            self._made += made
            self._answered.add(node)
            self._heard.notify_all()


def _keys(notes: list[dict[str, Any]]) -> set[CollectiveKey]:
    return {key_of(note) for note in notes_of(notes) if note.whole and note.number}
