"""Exchange of reports about ranks. Each node sends them to node 0, which compares the ranks of all nodes.

Nothing is sent while nobody waits. Once a rank has waited for `soon` seconds, node 0 requests reports from all nodes.
They report their ranks' changes, and every 2 s that nothing has changed. They send stacks where node 0 requests them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from lockstep.supervise.causes import Divergence
from lockstep.supervise.changes import Changes, apply, later, notes_of, plain, plain_notes, snapshot_of
from lockstep.supervise.hang import HALTED, CollectiveKey, key_of, mismatched
from lockstep.supervise.snapshot import RankPosition, RankSnapshot
from lockstep.supervise.stack_proof import StackQuestion
from lockstep.supervise.traces import RankCalls

REPORT_AGE = 5.0
"""Maximum age of a report from another node in seconds."""
STEADY = 1.9
"""Seconds between messages of a node without changes. Less than two checks."""
SUSPECT, CROWD = 2.0, 256
"""Seconds of waiting after which a node reports its ranks, and the number of ranks that adds one second."""


class OtherNodes(Protocol):
    """Interface of a node's connection to the supervisors on other nodes. `Hub` implements it."""

    node: int

    @property
    def nodes(self) -> list[int]:
        """Numbers of the other nodes to which this node is connected."""
        ...

    def send(self, topic: str, body: object, to: int | None = None, newest: bool = False) -> bool:
        """Send a message to one node or to all other nodes. Return True if the message was accepted.

        Args:
            topic: topic of the message.
            body: content, as JSON data.
            to: the node; None: all.
            newest: drop the message if the previous one on this topic still waits.
        """
        ...

    def listen(self, topic: str, callback: Callable[[int, Any], None]) -> None:
        """Call ``callback(node, body)`` for each message on a topic that another node sends."""
        ...


AnswerQuestion = Callable[[bool], Iterable[RankSnapshot]]
"""Returns this node's ranks with their stacks: the stopped ranks if True, all others if False."""


def soon(limit: float, size: int) -> float:
    """Return the number of seconds that a rank must have waited before its node sends a report to node 0.

    The time grows with the number of ranks, to limit the load on node 0.

    Args:
        limit: seconds of waiting after which the user gets a report.
        size: number of ranks of all nodes.
    """
    return min(limit / 2, SUSPECT + size / CROWD)


class OtherRanks:
    """Sender of reports about this node's ranks to node 0. On node 0, receiver of the reports from all other nodes.

    Args:
        hub: connection to the other nodes.
        question: on node 0, collects the answers of the nodes.
        size: number of ranks of all nodes; 0: unknown.
        wake: makes this node check at once.

    Attributes:
        caught: on node 0, the caught exceptions that ended calls on other nodes, by node.
        ended: positions of the ranks of nodes that have ended.
        caught_at_end: the caught exception that ended a call on a node that has ended; "" without one.
    """

    def __init__(
        self, hub: OtherNodes, question: StackQuestion, size: int = 0, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._hub, self._question, self._size, self._check_soon = hub, question, size, wake
        self._lock = threading.Lock()
        self._elsewhere: dict[int, tuple[float, dict[int, RankSnapshot]]] = {}
        self.caught: dict[int, str] = {}
        self.ended: dict[int, RankPosition] = {}
        self.caught_at_end = ""
        self._changes = Changes()
        self._was_urgent, self._sent_at = False, -REPORT_AGE  # state of the last message to node 0
        self._requested_at = self._urgent_at = -REPORT_AGE
        # the newest question of node 0, and the newest answer sent
        self._newest_question, self._answered = (0, False), 0
        hub.listen("snapshots", self._receive_report)
        hub.listen("wanted", self._receive_request)
        hub.listen("farewell", self._receive_farewell)

    @property
    def nodes(self) -> set[int]:
        """Nodes that have to reply when this node requests stacks: all nodes if it is node 0, else only this node."""
        return {0, *self._hub.nodes} if self._hub.node == 0 else {self._hub.node}

    def exchange(
        self, own: Sequence[RankSnapshot], limit: float, now: float, ask: AnswerQuestion, caught: str
    ) -> list[RankSnapshot]:
        """Report this node's ranks to node 0, if a report is due. Return all available snapshots.

        Node 0 has snapshots of the ranks of all nodes, inside or outside a call. Other nodes have those of their own.

        Args:
            own: snapshots of this node's ranks.
            limit: seconds of waiting after which the user gets a report.
            now: current time, on the clock of ``time.monotonic``.
            ask: returns the reply to node 0's request for stacks.
            caught: a caught exception that ended a call on this node; "" without one.
        """
        # a rank may be waiting for something that can never happen
        urgent = any(
            each.position.inside and (max(each.waited, each.still) >= soon(limit, self._size) or each.stopped >= HALTED)
            for each in own
        )
        if self._hub.node:
            answer = self._reply_to_question(ask, caught) if self.has_question else {}
            if answer or urgent or now - self._requested_at < REPORT_AGE:
                self._report(own, urgent, now, answer)
            return list(own)
        if (urgent or now - self._urgent_at < 2 * STEADY) and now - self._requested_at >= STEADY:
            self.request(now)
        with self._lock:
            reports = [(at, ranks) for at, ranks in self._elsewhere.values() if now - at < REPORT_AGE]
            others = [later(each, now - at) for at, ranks in reports for each in ranks.values()]
        return [*own, *others, *(RankSnapshot(position.rank, now, position) for position in [*self.ended.values()])]

    # -- node 0

    def request(self, now: float, is_new: bool = False) -> None:
        """On node 0, request reports from all nodes, and stacks from nodes that have not replied to the newest request.

        Args:
            now: current time.
            is_new: whether the request for stacks is new. If not, the message is dropped while the previous one is
                buffered.
        """
        if self._hub.node == 0:
            self._requested_at = now
            body = {"question": self._question.number, "wakes": self._question.wakes}
            self._hub.send("wanted", body, newest=not is_new)

    def _receive_report(self, node: int, body: Mapping[str, Any]) -> None:
        """On node 0, store another node's snapshots, and its reply to the newest request for stacks if there is one."""
        now = time.monotonic()
        with self._lock:
            before = self._elsewhere.get(node, (0.0, {}))[1]
            self._elsewhere[node] = now, apply(before, body)
        if body["urgent"]:
            self._urgent_at = now
            if now - self._requested_at >= STEADY:
                self._check_soon()
        if "question" in body:
            self.caught[node] = str(body["caught"])
            self._question.take(node, body["question"], {each["rank"]: snapshot_of(each) for each in body["asked"]})
            if self._question.is_answered(self.nodes):
                self._check_soon()

    # -- other nodes

    @property
    def is_watched(self) -> bool:
        """True if node 0 also checks this node's ranks, because it is connected and has recently requested reports."""
        return self._hub.node > 0 and time.monotonic() - self._requested_at < REPORT_AGE and 0 in self._hub.nodes

    @property
    def has_question(self) -> bool:
        """True if node 0 has requested stacks and this node has not replied yet."""
        return self._hub.node > 0 and self._newest_question[0] > self._answered

    def _report(self, own: Sequence[RankSnapshot], urgent: bool, now: float, answer: Mapping[str, Any]) -> None:
        body = {"urgent": urgent, **self._changes.of(own, now), **answer}
        has_changed = urgent != self._was_urgent or body["ranks"] or body["gone"] or answer
        if not has_changed and now - self._sent_at < STEADY:
            return
        if self._hub.send("snapshots", body, to=0, newest=not answer):
            # only now: a dropped message is not known to node 0
            self._changes.keep()
            self._was_urgent, self._sent_at = urgent, now

    def _receive_request(self, node: int, body: Mapping[str, Any]) -> None:
        """Receive node 0's request for reports and stacks, to which this node replies at its next check."""
        self._requested_at = time.monotonic()
        if body["question"] > self._newest_question[0]:
            self._newest_question = int(body["question"]), bool(body["wakes"])
            self._check_soon()

    def _reply_to_question(self, ask: AnswerQuestion, caught: str) -> dict[str, Any]:
        """Return the reply to node 0's newest request for stacks: snapshots of this node's ranks, with stacks."""
        self._answered, wakes = self._newest_question
        return {"question": self._answered, "asked": [plain(each) for each in ask(wakes)], "caught": caught}

    # -- end

    def farewell(self, positions: Iterable[RankPosition], caught: str = "") -> dict[str, Any]:
        """Return the content of the message that this node sends before its supervisor ends."""
        return {"at": time.monotonic(), "positions": [asdict(position) for position in positions], "caught": caught}

    def _receive_farewell(self, node: int, body: Mapping[str, Any] | None) -> None:
        """Store the last positions of the ranks on another node, whose supervisor has ended."""
        if not body:
            return
        # each machine has a monotonic clock of its own
        off = time.monotonic() - body["at"]
        for each in body["positions"]:
            position = RankPosition(**each)
            self.ended[position.rank] = replace(position, at=position.at + off)
        self.caught_at_end = self.caught_at_end or str(body["caught"])


# -- collectives of an aborted rank


COMPARE_TIMEOUT = 0.4
"""Seconds that the nodes have to reply to a comparison."""


class NotesOfAll:
    """Check that all ranks' calls match in the newest collectives of an aborted rank.

    Node 0 sends the rank's newest notes to all nodes. Each replies with its ranks' calls in the same collectives.

    Args:
        hub: connection to the other nodes.
        own: returns the calls of this node's ranks in the given collectives.
    """

    def __init__(self, hub: OtherNodes, own: Callable[[Collection[CollectiveKey]], list[RankCalls]]) -> None:
        self._hub, self._own = hub, own
        self._calls: list[RankCalls] = []
        self._answered: set[int] = set()
        self._has_answers = threading.Condition()
        hub.listen("compare", self._reply)
        hub.listen("compared", self._receive_reply)

    def compare(self, notes: list[dict[str, Any]]) -> Divergence | None:
        """On node 0, compare all ranks' calls in the collectives of ``notes``. Return the mismatch, or None.

        May block for a moment.
        """
        with self._has_answers:
            self._calls, self._answered = self._own(_complete(notes)), set()
        self._hub.send("compare", {"notes": notes})
        with self._has_answers:
            self._has_answers.wait_for(lambda: self._answered.issuperset(self._hub.nodes), COMPARE_TIMEOUT)
            return mismatched([(rank, where, note) for ranks, where, note in self._calls for rank in ranks])

    def _reply(self, node: int, body: Mapping[str, Any]) -> None:
        made = self._own(_complete(body["notes"]))
        answer = [{"ranks": ranks, "where": where, "note": plain_notes([note])[0]} for ranks, where, note in made]
        self._hub.send("compared", {"made": answer}, to=0)

    def _receive_reply(self, node: int, body: Mapping[str, Any]) -> None:
        made = [(list(each["ranks"]), str(each["where"]), notes_of([each["note"]])[0]) for each in body["made"]]
        with self._has_answers:
            self._calls += made
            self._answered.add(node)
            self._has_answers.notify_all()


def _complete(notes: list[dict[str, Any]]) -> set[CollectiveKey]:
    return {key_of(note) for note in notes_of(notes) if note.whole and note.number}
