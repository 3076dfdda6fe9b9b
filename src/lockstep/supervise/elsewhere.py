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

from lockstep.supervise.causes import Divergence, Stand, has_left, strayed
from lockstep.supervise.changes import Changes, taken_in
from lockstep.supervise.hang import HALTED, stopped
from lockstep.supervise.snapshot import SLEEPS, STOPPED, RankSnapshot, told
from lockstep.supervise.stack import Stack

PATIENCE = 5.0
"""Seconds for which what was heard from another node counts."""
STEADY = 1.9
"""Seconds from one message between nodes to the next, where nothing changes: less than two looks."""
SHOWN = 10.0
"""Seconds from one time to the next at which ranks are asked for their stacks since another node wants to know."""
SUSPECT, CROWD = 2.0, 256
"""Seconds of waiting after which a node tells of its ranks, and ranks for which it lets one second more pass."""
AGAIN = 0.3
"""Seconds from the answers to one question for stacks to the next question."""
LONGEST = 60.0
"""Seconds from one proof that failed to the next at the most."""

QUIET = 2.0
"""Seconds without any work of the processor after which a rank is asked where it is."""

QUIET_AT_FIRST = 3.0
"""The same while ranks connect to one another, which a signal disturbs, and where nobody looks for hangs."""


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


Ask = Callable[[RankSnapshot, float], RankSnapshot]
"""Gives a rank with its stack."""


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


def is_idle(snapshot: RankSnapshot) -> bool:
    """Whether a rank in a call has done nothing for so long that it may wait for another."""
    stand = snapshot.stand
    connects = stand.hang_timeout is None and stand.hang_kill is None
    quiet = QUIET_AT_FIRST if connects else QUIET
    return stand.inside and snapshot.state == SLEEPS and snapshot.still >= quiet


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
        self._proof = Proof()
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
    def is_alarmed(self) -> bool:
        """Whether a proof is under way."""
        return self._proof.is_pending or self._round > self._done

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
        quest = asked > self._done
        if quest and self._hub.node == 0:
            self._proof.take(0, {})
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
            each = ask(each, now)
        if self._hub.node == 0 and each.stand.inside:
            if each.stack is not None:
                self._shown[each.rank] = each
                if quest:
                    self._proof.take(0, {each.rank: each})
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

    def strayed(self, everybody: Sequence[RankSnapshot], now: float, caught: str = "") -> Divergence | None:
        """On node 0: whether ranks of any nodes wait for what cannot come.

        Args:
            everybody: as `exchange` has told.
            now: the moment.
            caught: what ended a call on this node, and a script has caught.
        """
        every = [*everybody, *(RankSnapshot(stand.rank, now, stand) for stand in self.ended.values())]
        if self._hub.node or not self._is_suspect(every):
            self._proof.give_up()
            return None
        with self._lock:
            nodes = self._nodes(now)
            if self._proof.is_due(now, nodes):
                self._round += 1
                body = {"looks": now - self.looked_at < PATIENCE, "shows": self._shows, "round": self._round}
                self._hub.send("wanted", {**body, "waits": ""})
                return None
            if not self._proof.is_answered(nodes):
                return None
            everyone = len({each.rank for each in every}) >= self._size > 0
            found = self._proof.conclude(every, everyone, now)
            words = [said for said in [caught, *self._caught.values()] if said]
        return Divergence(words[0]) if found is not None and words else found

    def _is_suspect(self, every: Sequence[RankSnapshot]) -> bool:
        """Whether all ranks may be waiting, or some for one that has left."""
        idle = [each.stand.call for each in every if is_idle(each)]
        if not idle:
            return False
        first = min(idle)
        return len(idle) == len(every) >= self._size > 0 or any(has_left(each.stand, first) for each in every)


class Proof:
    """Two questions for stacks, and what was answered.

    Attributes:
        is_open: a question has been put, and its answers are not there yet.
        is_pending: the same, or the next question is to be put.
    """

    def __init__(self) -> None:
        self.is_open = False
        self._answers: dict[int, dict[int, RankSnapshot]] = {}
        self._before: dict[int, tuple[int, Stack | None]] | None = None
        self._next_at = self._began_at = self._wait = 0.0

    @property
    def is_pending(self) -> bool:
        return self.is_open or self._before is not None

    def is_due(self, now: float, nodes: set[int]) -> bool:
        """Whether to put a question; if so, it is put."""
        if self.is_open and not self.is_answered(nodes) and now - self._began_at < PATIENCE:
            return False
        if (self.is_open and self.is_answered(nodes)) or now < self._next_at:
            return False
        self.is_open, self._began_at, self._answers = True, now, {}
        return True

    def take(self, node: int, answers: Mapping[int, RankSnapshot]) -> None:
        """The ranks of a node that have answered."""
        self._answers.setdefault(node, {}).update(answers)

    def is_answered(self, nodes: set[int]) -> bool:
        """Whether all nodes have answered the question of now."""
        return self.is_open and self._answers.keys() >= nodes

    def give_up(self) -> None:
        """Somebody works: nothing is to be proved."""
        self.is_open, self._before, self._wait = False, None, 0.0

    def conclude(self, every: Sequence[RankSnapshot], everyone: bool, now: float) -> Divergence | None:
        """What two answers prove that are alike; if there was one, the next question is due soon."""
        answers = {rank: found for node in self._answers.values() for rank, found in node.items()}
        stands = {each.rank: each.stand for each in every}
        stacks = {rank: each.stack for rank, each in answers.items() if each.stack is not None}
        found = strayed(stands, stacks, everyone)
        seen = {rank: (each.stand.call, each.stack) for rank, each in answers.items()}
        self.is_open = False
        if found is not None and self._before == seen:
            return found
        self._before = None if found is None else seen
        if found is None:
            self._wait = min(LONGEST, 2 * self._wait + 1)
        self._next_at = now + (self._wait if found is None else AGAIN)
        return None
