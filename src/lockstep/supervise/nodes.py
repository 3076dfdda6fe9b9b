"""This node among the others: nodes claim what they know of the first cause, and node 0 decides."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.supervise.causes import Divergence, First, located
from lockstep.supervise.screen_text import say

if TYPE_CHECKING:
    from lockstep.supervise.hub import Hub

MEETING = 60.0
"""Seconds for which a node calls the hub again and again."""

LEAVING = 15.0
"""Seconds for which a node whose ranks have left a call waits for others to miss them; a proof of it takes 5."""

UNTOLD = "failures of other nodes are not told here"
"""What follows for a node that cannot reach the others."""


@dataclass(frozen=True)
class Decision:
    """The first cause of all nodes."""

    words: str
    node: int  #: of which it is
    rank: int = -1  #: of which it is; -1: of none alone
    proved: bool = False  #: whether it is that ranks of several nodes did not make the same calls


class Nodes:
    """This node among the others, for the first cause of all: each claims what it knows, and node 0 decides.

    Args:
        node: its number.
        count: how many there are.
        put: called in threads with the name of an event and what belongs to it, for `claimed`, `heard` and `lost`.
        follow: called when the first cause of all nodes is known.
        scheduled: whether a scheduler looks after nodes that do not answer: it may start the run elsewhere, and would
            not if it ended by itself.

    Attributes:
        host: the name of this machine; "" where there is no other.
        hub: to the other nodes; None where there are none.
        decided: the first cause; None: nobody knows it yet.
        compares: on node 0: whether ranks did different things as the collectives of these notes; it may wait.
    """

    def __init__(
        self,
        node: int,
        count: int,
        put: Callable[[str, Any], None],
        follow: Callable[[Decision], None],
        scheduled: bool = False,
    ) -> None:
        self._node = node
        self._put = put
        self._follow = follow
        self._scheduled = scheduled
        self.host = socket.gethostname() if count > 1 else ""
        self._leaving = set[int]()  # nodes whose ranks have left a call by sys.exit(), and that wait for the others
        self._leaves_until = 0.0  # for this node; 0: it does not wait
        self.hub: Hub | None = None
        if count > 1:
            # asyncio takes a tenth of a second to import, which one node has no use for
            from lockstep.supervise.hub import Hub

            self.hub = Hub(node, self.host, self._lose)
            self.hub.listen("asked", lambda node, body: put("asked", body))
            self.hub.listen("leaves", lambda node, body: self._leaving.add(node))
        self.decided: Decision | None = None
        self.compares: Callable[[list[dict[str, Any]]], Divergence | None] = lambda notes: None
        self._is_comparing = False

    def open(self, address: str) -> tuple[int, str]:
        """Let the others call by an address; gives the port and the word that they need."""
        assert self.hub is not None
        self.hub.listen("claim", lambda node, body: self._put("claim", (node, body)))
        return self.hub.open(address)

    def join(self, address: str, port: int, token: str) -> None:
        """Call the first node, in a thread, until it answers."""
        assert self.hub is not None
        self.hub.listen("first", lambda node, body: self._put("first", body))
        thread = threading.Thread(target=self._call, args=(address, port, token), name="lockstep-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started: the run can do without
            say(f"node {self._node} ({self.host}) may start no more threads (`ulimit -u`): {UNTOLD}")

    def _call(self, address: str, port: int, token: str) -> None:
        assert self.hub is not None
        until = time.monotonic() + MEETING
        while not self.hub.join(address, port, token):
            if self.hub.is_refused:
                return
            if time.monotonic() >= until:
                told = f"node {self._node} ({self.host}) could not reach the supervisor of node 0 at {address}:{port}"
                say(f"{told}: {UNTOLD}")
                return
            time.sleep(1.0)

    def say(self, cause: First, notes: Sequence[dict[str, Any]] = ()) -> None:
        """Tell the others the first cause of this node.

        Args:
            cause: it.
            notes: the newest collectives of a rank that may have been aborted since another brought other sizes.
        """
        if self.hub is None:
            return
        body = {"words": located(cause, self.host), "rank": getattr(cause, "rank", -1), "notes": [*notes]}
        if self._node == 0:
            self.claimed((0, body))
        else:
            self.hub.send("claim", body, to=0)

    def ask(self, body: dict[str, Any]) -> None:
        """A rank of this node has lost others: ask all other nodes who has left it, or failed."""
        if self.hub is not None:
            self.hub.send("asked", body)

    def misses(self) -> bool:
        """Whether others may still wait for this node's ranks, which have left a call by ``sys.exit()`` and would end.

        They end as soon as all others have, or have left in the same way, and after `LEAVING` at the latest.
        """
        if self.hub is None:
            return False
        if not self._leaves_until:
            self._leaves_until = time.monotonic() + LEAVING
            self.hub.send("leaves", None)
        there = set(self.hub.nodes)
        if self._node == 0:  # others cannot see who is there, and follow when this one goes
            there -= self._leaving
        return bool(there) and time.monotonic() < self._leaves_until

    @property
    def is_elsewhere(self) -> bool:
        """Whether the first cause is known, and another node's, or not of one node alone."""
        decided = self.decided
        return decided is not None and (decided.node != self._node or decided.proved)

    def close(self, last: object = None) -> None:
        """Say farewell, with a last word."""
        if self.hub is not None:
            self.hub.close(last)

    def claimed(self, what: tuple[int, Any]) -> None:
        """On the first node: one knows a cause. The first to say so is believed."""
        node, body = what
        if self.decided is not None or self._is_comparing:
            return
        decision = Decision(body["words"], node, body["rank"])
        if not body["notes"]:
            self.compared(decision)
            return
        self._is_comparing = True
        thread = threading.Thread(
            target=self._compare, args=(decision, body["notes"]), name="lockstep-compare", daemon=True
        )
        thread.start()

    def _compare(self, claim: Decision, notes: list[dict[str, Any]]) -> None:
        """In a thread: what other nodes' ranks did, beside one that has been aborted."""
        proof = None
        with contextlib.suppress(Exception):  # of whatever kind it is: the claim counts
            proof = self.compares(notes)
        self._put("compared", claim if proof is None else Decision(str(proof), claim.node, proved=True))

    def compared(self, decision: Decision) -> None:
        """On the first node: a claim has been compared with what other nodes' ranks did."""
        if self.decided is None:
            assert self.hub is not None
            self.hub.send("first", asdict(decision))
            self._decide(decision)

    def heard(self, body: dict[str, Any]) -> None:
        """On another one: the first node has decided."""
        if self.decided is None:
            self._decide(Decision(**body))

    def _decide(self, decision: Decision) -> None:
        self.decided = decision
        self._follow(decision)

    def lost(self, what: tuple[int, str]) -> None:
        """A node's supervisor is gone, and has not said farewell."""
        node, words = what
        if node:
            self.claimed((node, {"words": words, "rank": -1, "notes": []}))
        elif self.decided is None:  # nobody is there to decide
            self._decide(Decision(words, node))

    def _lose(self, node: int, host: str, reason: str) -> None:
        from lockstep.supervise.hub import SILENT

        words = f"node {node} ({host}) {reason}"
        if self._scheduled and reason == SILENT:
            self._put("silent", words)
        else:
            self._put("lost", (node, words))
