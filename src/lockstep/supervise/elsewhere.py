"""What ranks of other nodes do: each node tells node 0, which compares all of them and asks for what it lacks.

While nobody waits, nothing is told. Once a rank has waited for `soon` seconds, each node tells node 0 what has changed
of its ranks, and every 2 s that nothing has. Where all seem to wait, or wait for one that has left the call, node 0
asks all nodes twice for the stacks of those that wait. If these are the same both times, they prove what they say: all
of the first answers were there before the second question was put.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from lockstep.supervise.causes import Divergence, Stand
from lockstep.supervise.changes import Changes, taken_in
from lockstep.supervise.hang import HALTED, stopped
from lockstep.supervise.snapshot import STOPPED, RankSnapshot, told
from lockstep.supervise.stack_proof import AGAIN, StackProof, is_idle

PATIENCE = 5.0
"""Seconds for which what was heard from another node counts."""
STEADY = 1.9
"""Seconds from one message between nodes to the next, where nothing changes: less than two looks."""
SHOWN = 10.0
"""Seconds from one time to the next at which ranks are asked for their stacks since another node wants to know."""
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


Ask = Callable[[RankSnapshot, float, bool], RankSnapshot]
"""Gives a rank with its stack, at a moment; if it is asked for a proof, only where none of its threads could go on."""


def soon(limit: float, size: int) -> float:
    """Seconds of waiting after which nodes tell of their ranks: node 0 of very many has enough to do with long waits.

    Args:
        limit: seconds after which a wait is told to the user.
        size: ranks of all nodes.
    """
    return min(limit / 2, SUSPECT + size / CROWD)


def _answer(own: Sequence[RankSnapshot], asked: int, caught: str) -> dict[str, Any]:
    """What node 0 is told when it has asked for stacks."""
    heard = sorted(each.rank for each in own if each.stack is not None)
    return {"round": asked, "heard": heard, "caught": caught}


def _waiting(everybody: Sequence[RankSnapshot]) -> list[RankSnapshot]:
    """The ranks that wait for those that are stopped."""
    return [each for each in everybody if each.state != STOPPED and each.waited >= HALTED / 2]


class OtherRanks:
    """Tells node 0 of this node's ranks, and knows on node 0 those of all nodes.

    Args:
        hub: the way to the other nodes.
        size: ranks of all nodes; 0: nobody knows.
        wake: has this node look at once.

    Attributes:
        ended: ranks of nodes that have said farewell, as they stood.
        caught_at_end: what had ended a call on such a node, and was no failure there.
    """

    def __init__(self, hub: OtherNodes, size: int = 0, wake: Callable[[], None] = lambda: None) -> None:
        self._hub, self._size, self._wake = hub, size, wake
        self._lock = threading.Lock()
        self._elsewhere: dict[int, tuple[float, dict[int, RankSnapshot]]] = {}
        self._caught: dict[int, str] = {}
        self.ended: dict[int, Stand] = {}
        self.caught_at_end = ""
        self._changes = Changes()
        self._shown: dict[int, RankSnapshot] = {}  # own ranks as they were when they were last asked
        self._wanted_at, self._shown_at, self._halted_at = -PATIENCE, -SHOWN, 0.0
        self._shows, self._waits = False, ("", -PATIENCE)  # what node 0 has said of the waits
        self._urges, self._idle, self._sent_at = 0, set[int](), -PATIENCE  # what node 0 was last sent
        self.looked_at = self._watched_at = -PATIENCE  # on node 0, on another node
        self._round = self._done = 0  # question for stacks: the newest, and the newest that is answered here
        self._proof = StackProof(size)
        self._own: set[int] = set()  # ranks of this node that are in a call, or were
        self._exchanged_at = -PATIENCE
        hub.listen("snapshots", self._hear)
        hub.listen("wanted", self._answer)
        hub.listen("farewell", self._hear_end)

    # -- all nodes

    @property
    def is_watched(self) -> bool:
        """Whether node 0 sees to who waits for whom; not where its own ranks are in no call."""
        return time.monotonic() - self._watched_at < PATIENCE and 0 in self._hub.nodes

    @property
    def is_proving(self) -> bool:
        """Whether a proof is under way."""
        return self._proof.is_pending or (self._round > self._done and self._hub.node > 0)

    def _shows_again(self, now: float) -> bool:
        """Whether stacks are to be shown, which is not done each second."""
        if not self._shows or now - self._shown_at <= SHOWN:
            return False
        self._shown_at = now
        return True

    def exchange(
        self, own: Sequence[RankSnapshot], limit: float, now: float, ask: Ask, caught: str = ""
    ) -> list[RankSnapshot]:
        """Tell node 0 of this node's ranks; there, those of all nodes, those included that are in no call.

        Args:
            own: the ranks of this node.
            limit: seconds after which a wait is told to the user.
            now: the moment.
            ask: gives one with its stack.
            caught: what ended a call on this node, and a script has caught.
        """
        self._exchanged_at = now
        urges = max((self._urgency(snapshot, limit) for snapshot in own), default=0)
        with self._lock:
            if self._hub.node == 0 and urges:
                self._ask_others(now, urges)
            wanted = now - self._wanted_at < PATIENCE
            shows = wanted and self._shows_again(now)
            asked = self._round
        quest = asked > self._done and self._hub.node > 0
        self._own = {each.rank for each in own}
        own = [self._with_stack(each, shows, quest, now, ask) for each in own]
        self._done = asked
        if self._hub.node == 0:
            return [*own, *self._known(now)]
        if urges or wanted:
            self._tell(own, urges, now, _answer(own, asked, caught) if quest else {})
        return list(own)

    def waits(self) -> str:
        """Which ranks of other nodes wait while one of this node's is stopped, as node 0 has said; ""."""
        with self._lock:
            words, at = self._waits
            return words if time.monotonic() - at < PATIENCE else ""

    def _urgency(self, snapshot: RankSnapshot, limit: float) -> int:
        """0: all is well; 1: it may be waiting for what cannot come; 2: soon it is to be told who waits for whom."""
        if not snapshot.stand.inside:
            return 0
        waits = max(snapshot.waited, snapshot.still)
        if waits >= limit / 2:
            return 2
        return int(waits >= soon(limit, self._size) or snapshot.stopped >= HALTED)

    def _with_stack(self, each: RankSnapshot, shows: bool, quest: bool, now: float, ask: Ask) -> RankSnapshot:
        """With its stack, where that is asked for; on node 0 with the one that it had when it was last asked."""
        if each.stand.inside and each.stack is None and (shows or (quest and is_idle(each))):
            each = ask(each, now, not shows)
        if self._hub.node == 0 and each.stand.inside:
            if each.stack is not None:
                self._shown[each.rank] = each
            elif now - self._wanted_at < PATIENCE and each.rank in self._shown:
                each = replace(each, stack=self._shown[each.rank].stack)
        return each

    def _tell(self, own: Sequence[RankSnapshot], urges: int, now: float, answer: Mapping[str, Any]) -> None:
        body = {"urges": urges, **self._changes.of(own, now), **answer}
        idle = {each.rank for each in own if is_idle(each)}
        news = (urges, idle) != (self._urges, self._idle) or bool(body["ranks"] or body["gone"] or answer)
        if not news and now - self._sent_at < STEADY:
            return
        if self._hub.send("snapshots", body, to=0, newest=not answer):
            self._changes.keep()
            self._urges, self._idle, self._sent_at = urges, idle, now

    def _answer(self, node: int, body: Mapping[str, Any]) -> None:
        """Node 0 wants to know; the next look tells it."""
        with self._lock:
            self._wanted_at = time.monotonic()
            self._shows = bool(body["shows"])
            if body["looks"]:
                self._watched_at = self._wanted_at
            if body["waits"]:
                self._waits = str(body["waits"]), self._wanted_at
            wakes = body["round"] > self._round or bool(body["waits"])
            self._round = max(self._round, int(body["round"]))
        if wakes:
            self._wake()

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

    # -- node 0

    def _ask_others(self, now: float, urges: int, waits: str = "") -> None:
        """On node 0, which holds the lock: let all nodes tell of their ranks; one of them waits long."""
        self._shows = urges > 1 or (self._shows and now - self._wanted_at < STEADY)
        if now - self._wanted_at >= STEADY or waits:
            self._wanted_at = now
            looks = now - self.looked_at < PATIENCE
            body = {"looks": looks, "shows": self._shows, "round": self._round, "waits": waits}
            self._hub.send("wanted", body, newest=not waits)

    def _hear(self, node: int, body: Mapping[str, Any]) -> None:
        """On node 0: what a node's ranks do."""
        with self._lock:
            now = time.monotonic()
            before = self._elsewhere.get(node, (0.0, {}))[1]
            known = taken_in(before, body)
            self._elsewhere[node] = now, known
            if body["urges"]:
                self._ask_others(now, int(body["urges"]))
            answered = body.get("round", 0) == self._round and body.get("heard") is not None
            if answered:
                self._caught[node] = str(body["caught"])
                self._proof.take(node, {rank: known[rank] for rank in body["heard"]})
            wakes = answered and self._proof.is_answered(self._nodes(now))
            wakes = wakes or any(each.stopped >= HALTED for each in known.values())
            turned = any(is_idle(each) != (rank in before and is_idle(before[rank])) for rank, each in known.items())
            wakes = wakes or (turned and now - self._exchanged_at > AGAIN)
        if wakes:
            self._wake()

    def _nodes(self, now: float) -> set[int]:
        return {0, *(node for node, (at, _) in self._elsewhere.items() if now - at < PATIENCE)}

    def _known(self, now: float) -> list[RankSnapshot]:
        with self._lock:
            known = [found for at, found in self._elsewhere.values() if now - at < PATIENCE]
        return [snapshot for found in known for snapshot in found.values()]

    def halted_elsewhere(self, everybody: Sequence[RankSnapshot], own: Iterable[int], now: float) -> Divergence | None:
        """On node 0: that a rank of another node is stopped. Its own node is told first that others wait for it: it can
        say at which line the rank is.
        """
        found = stopped(everybody)
        halted = [each for each in everybody if each.state == STOPPED]
        if found is None or not {each.rank for each in halted}.isdisjoint(own):
            self._halted_at = 0.0
            if halted and found is None and self._hub.node == 0:
                with self._lock:
                    self._ask_others(now, 2)  # ranks of a third node may wait for it
            return found
        self._halted_at = self._halted_at or now
        if now - self._halted_at >= HALTED or self._hub.node:
            return found
        with self._lock:
            self._ask_others(now, 1, told(_waiting(everybody)))
        return None

    def strayed(self, everybody: Sequence[RankSnapshot], now: float, ask: Ask, caught: str = "") -> Divergence | None:
        """On node 0: whether ranks of any nodes wait for what cannot come.

        Args:
            everybody: as `exchange` has told.
            now: the moment.
            ask: gives one of this node's with its stack.
            caught: what ended a call on this node, and a script has caught.
        """
        if self._hub.node:
            return None

        def question() -> dict[int, RankSnapshot]:
            with self._lock:
                self._round += 1
                body = {"looks": now - self.looked_at < PATIENCE, "shows": self._shows, "round": self._round}
                self._hub.send("wanted", {**body, "waits": ""})
            return {each.rank: ask(each, now, True) for each in everybody if each.rank in self._own and is_idle(each)}

        every = [*everybody, *(RankSnapshot(stand.rank, now, stand) for stand in self.ended.values())]
        with self._lock:
            nodes = self._nodes(now)
        found = self._proof.seek(every, now, nodes, question)
        if found is None:
            return None
        with self._lock:
            words = [said for said in [caught, *self._caught.values()] if said]
        return Divergence(words[0]) if words else found
