"""What ranks of other nodes do: each node tells node 0, which judges all of them and asks for what it lacks.

While nobody waits, nothing is told. Once a rank has waited for `soon` seconds, node 0 has all nodes tell what has
changed of their ranks, and every 2 s that nothing has. Stacks are told where node 0 asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from lockstep.supervise.causes import Stand
from lockstep.supervise.changes import Changes, later, plain, snapshot_of, taken_in
from lockstep.supervise.hang import HALTED
from lockstep.supervise.snapshot import RankSnapshot
from lockstep.supervise.stack_proof import StackQuestion

PATIENCE = 5.0
"""Seconds for which what was heard from another node counts."""
STEADY = 1.9
"""Seconds from one message between nodes to the next, where nothing changes: less than two looks."""
SUSPECT, CROWD = 2.0, 256
"""Seconds of waiting after which a node tells of its ranks, and ranks for which it lets one second more pass."""


class OtherNodes(Protocol):
    """The way to the supervisors of other nodes; of those, node 0 compares what the ranks of all do."""

    node: int

    @property
    def nodes(self) -> list[int]:
        """Those to which there is a way."""
        ...

    def send(self, topic: str, body: object, to: int | None = None, newest: bool = False) -> bool:
        """To one of them, or all; ``newest``: unless the one before on this topic waits. Whether it goes out."""
        ...

    def listen(self, topic: str, callback: Callable[[int, Any], None]) -> None:
        """``callback(node, body)`` for what comes from others."""
        ...


Ask = Callable[[bool], Iterable[RankSnapshot]]
"""Gives this node's ranks with their stacks: those that are stopped, or all others."""


def soon(limit: float, size: int) -> float:
    """Seconds of waiting after which nodes tell of their ranks: node 0 of very many has enough to do with long waits.

    Args:
        limit: seconds after which a wait is told to the user.
        size: ranks of all nodes.
    """
    return min(limit / 2, SUSPECT + size / CROWD)


class OtherRanks:
    """Tells node 0 of this node's ranks, and knows on node 0 those of all nodes.

    Args:
        hub: the way to the other nodes.
        question: on node 0, takes what they answer.
        size: ranks of all nodes; 0: nobody knows.
        wake: has this node look at once.

    Attributes:
        caught: on node 0, what ended a call on other nodes, and was no failure there, as they have answered.
        ended: ranks of nodes that have said farewell, as they stood.
        caught_at_end: what had ended a call on such a node.
    """

    def __init__(
        self, hub: OtherNodes, question: StackQuestion, size: int = 0, wake: Callable[[], None] = lambda: None
    ) -> None:
        self._hub, self._question, self._size, self._wake = hub, question, size, wake
        self._lock = threading.Lock()
        self._elsewhere: dict[int, tuple[float, dict[int, RankSnapshot]]] = {}
        self.caught: dict[int, str] = {}
        self.ended: dict[int, Stand] = {}
        self.caught_at_end = ""
        self._changes = Changes()
        self._was_urgent, self._sent_at = False, -PATIENCE  # in what node 0 was last sent
        self._wanted_at = self._urged_at = -PATIENCE
        self._asked, self._answered = (0, False), 0  # the newest question, whether it wakes; what is answered here
        hub.listen("snapshots", self._hear)
        hub.listen("wanted", self._be_asked)
        hub.listen("farewell", self._hear_end)

    @property
    def nodes(self) -> set[int]:
        """Those that have to answer a question which this node puts, itself included."""
        return {0, *self._hub.nodes} if self._hub.node == 0 else {self._hub.node}

    def exchange(
        self, own: Sequence[RankSnapshot], limit: float, now: float, ask: Ask, caught: str
    ) -> list[RankSnapshot]:
        """Tell node 0 of this node's ranks; there, those of all nodes, those included that are in no call.

        Args:
            own: the ranks of this node.
            limit: seconds after which a wait is told to the user.
            now: the moment.
            ask: what node 0's question is answered with.
            caught: what ended a call on this node, and a script has caught.
        """
        urgent = any(self._is_urgent(each, limit) for each in own)
        if self._hub.node:
            answer = self._answer(ask, caught) if self.is_asked else {}
            if answer or urgent or now - self._wanted_at < PATIENCE:
                self._tell(own, urgent, now, answer)
            return list(own)
        if (urgent or now - self._urged_at < 2 * STEADY) and now - self._wanted_at >= STEADY:
            self.put(now)
        with self._lock:
            told = [later(each, now - at) for at, ranks in self._heard(now) for each in ranks.values()]
        return [*own, *told, *(RankSnapshot(stand.rank, now, stand) for stand in [*self.ended.values()])]

    def _is_urgent(self, snapshot: RankSnapshot, limit: float) -> bool:
        """Whether a rank may be waiting for what cannot come."""
        long = max(snapshot.waited, snapshot.still) >= soon(limit, self._size) or snapshot.stopped >= HALTED
        return snapshot.stand.inside and long

    # -- node 0

    def put(self, now: float, is_new: bool = False) -> None:
        """Have all nodes tell of their ranks, and answer the newest question for stacks.

        Args:
            now: the moment.
            is_new: whether the question is new; else the message may be left out where the one before still waits.
        """
        if self._hub.node == 0:
            self._wanted_at = now
            body = {"question": self._question.number, "wakes": self._question.wakes}
            self._hub.send("wanted", body, newest=not is_new)

    def _heard(self, now: float) -> list[tuple[float, dict[int, RankSnapshot]]]:
        return [(at, ranks) for at, ranks in self._elsewhere.values() if now - at < PATIENCE]

    def _hear(self, node: int, body: Mapping[str, Any]) -> None:
        """What a node's ranks do."""
        now = time.monotonic()
        with self._lock:
            before = self._elsewhere.get(node, (0.0, {}))[1]
            self._elsewhere[node] = now, taken_in(before, body)
        if body["urgent"]:
            self._urged_at = now
            if now - self._wanted_at >= STEADY:
                self._wake()
        if "question" in body:
            self.caught[node] = str(body["caught"])
            self._question.take(node, body["question"], {each["rank"]: snapshot_of(each) for each in body["asked"]})
            if self._question.is_answered(self.nodes):
                self._wake()

    # -- another node

    @property
    def is_watched(self) -> bool:
        """Whether node 0 looks at this node's ranks, too."""
        return self._hub.node > 0 and time.monotonic() - self._wanted_at < PATIENCE and 0 in self._hub.nodes

    @property
    def is_asked(self) -> bool:
        """Whether node 0 waits for an answer of this node."""
        return self._hub.node > 0 and self._asked[0] > self._answered

    def _tell(self, own: Sequence[RankSnapshot], urgent: bool, now: float, answer: Mapping[str, Any]) -> None:
        body = {"urgent": urgent, **self._changes.of(own, now), **answer}
        news = urgent != self._was_urgent or body["ranks"] or body["gone"] or answer
        if not news and now - self._sent_at < STEADY:
            return
        if self._hub.send("snapshots", body, to=0, newest=not answer):
            self._changes.keep()
            self._was_urgent, self._sent_at = urgent, now

    def _be_asked(self, node: int, body: Mapping[str, Any]) -> None:
        """Node 0 wants to know; the next look tells it."""
        self._wanted_at = time.monotonic()
        if body["question"] > self._asked[0]:
            self._asked = int(body["question"]), bool(body["wakes"])
            self._wake()

    def _answer(self, ask: Ask, caught: str) -> dict[str, Any]:
        """The answer to node 0's question."""
        self._answered, wakes = self._asked
        return {"question": self._answered, "asked": [plain(each) for each in ask(wakes)], "caught": caught}

    # -- the end

    def last(self, stands: Iterable[Stand], caught: str = "") -> dict[str, Any]:
        """What is to be said of this node's ranks in its farewell."""
        return {"at": time.monotonic(), "stands": [asdict(stand) for stand in stands], "caught": caught}

    def _hear_end(self, node: int, body: Mapping[str, Any] | None) -> None:
        if not body:
            return
        off = time.monotonic() - body["at"]  # of clocks
        for each in body["stands"]:
            stand = Stand(**each)
            self.ended[stand.rank] = replace(stand, at=stand.at + off)
        self.caught_at_end = self.caught_at_end or str(body["caught"])
