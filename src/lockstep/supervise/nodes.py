"""Agreement of several nodes on which failure came first. Each node reports its first failure, and node 0 decides."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.supervise.causes import Divergence, First, with_host
from lockstep.supervise.screen_text import print_line

if TYPE_CHECKING:
    from lockstep.supervise.hub import Hub

JOIN_TIMEOUT = 60.0
"""Seconds for which a node tries to connect to the hub."""

LEAVE_TIMEOUT = 15.0
"""Seconds for which a node whose ranks left a call waits for others to notice. A proof takes 5 s."""

NOT_REPORTED = "this node will not report failures of other nodes"
"""Consequence for a node that cannot reach the others, for messages."""


@dataclass(frozen=True)
class Decision:
    """Result of the agreement: the failure that all nodes accept as the first failure of the run."""

    words: str
    node: int  #: node of the cause
    rank: int = -1  #: rank of the cause; -1: not a single rank
    proved: bool = False  #: whether ranks of several nodes did not make the same calls


class Nodes:
    """Agreement of this node with the other nodes on which failure came first. Node 0 decides, other nodes accept.

    Args:
        node: number of this node.
        count: number of nodes.
        put: called in threads with the name and the argument of an event, for `handle_claim`, `accept` and
            `handle_loss`.
        follow: called when the first cause of all nodes is known.
        scheduled: whether a scheduler handles nodes that do not answer. It may restart the run elsewhere, but not if
            the run ended by itself.

    Attributes:
        host: name of this machine; "" on a single node.
        hub: connection to the other nodes; None on a single node.
        decided: the first cause; None until it is known.
        compares: on node 0, returns the mismatch among all ranks in the noted collectives, if any. It may block.
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
        self._leaving = set[int]()  # nodes whose ranks left a call by sys.exit() and that wait for the others
        self._leaves_until = 0.0  # for this node; 0: it is not waiting
        self.hub: Hub | None = None
        if count > 1:
            # importing asyncio takes 0.1 s, which a single node does not need
            from lockstep.supervise.hub import Hub

            self.hub = Hub(node, self.host, self._report_loss)
            self.hub.listen("asked", lambda node, body: put("asked", body))
            self.hub.listen("leaves", lambda node, body: self._leaving.add(node))
        self.decided: Decision | None = None
        self.compares: Callable[[list[dict[str, Any]]], Divergence | None] = lambda notes: None
        self._is_comparing = False

    def open(self, address: str) -> tuple[int, str]:
        """Listen for the other nodes. Return the port and the token that the nodes need to connect."""
        assert self.hub is not None
        self.hub.listen("claim", lambda node, body: self._put("claim", (node, body)))
        return self.hub.open(address)

    def join(self, address: str, port: int, token: str) -> None:
        """Connect to the first node, in a thread that retries until the connection succeeds."""
        assert self.hub is not None
        self.hub.listen("first", lambda node, body: self._put("first", body))
        thread = threading.Thread(target=self._call, args=(address, port, token), name="lockstep-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # thread limit reached: the run works without the connection
            print_line(f"node {self._node} ({self.host}) cannot start more threads: {NOT_REPORTED}. Raise `ulimit -u`")

    def _call(self, address: str, port: int, token: str) -> None:
        assert self.hub is not None
        until = time.monotonic() + JOIN_TIMEOUT
        while not self.hub.join(address, port, token):
            if self.hub.is_refused:
                return
            if time.monotonic() >= until:
                node = f"node {self._node} ({self.host})"
                print_line(f"{node} could not reach the supervisor of node 0 at {address}:{port}: {NOT_REPORTED}")
                return
            time.sleep(1.0)

    def claim(self, cause: First, notes: Sequence[dict[str, Any]] = ()) -> None:
        """Report the first failure on this node to node 0, which decides which node's failure counts.

        Args:
            cause: the first cause.
            notes: the newest collectives of a rank that gloo may have aborted, if another rank passed other sizes.
        """
        if self.hub is None:
            return
        body = {"words": with_host(cause, self.host), "rank": getattr(cause, "rank", -1), "notes": [*notes]}
        if self._node == 0:
            self.handle_claim((0, body))
        else:
            self.hub.send("claim", body, to=0)

    def query(self, body: dict[str, Any]) -> None:
        """Send a query to all other nodes: have their ranks caused the lost connections of a rank on this node?

        The ranks of those nodes may have failed, or may have left the rank's call.
        """
        if self.hub is not None:
            self.hub.send("asked", body)

    def has_to_wait(self) -> bool:
        """Return True while this node must keep running, because ranks of other nodes may still wait for its ranks.

        This node's ranks have left a call by ``sys.exit()``.

        This node ends as soon as all others have ended or left in the same way, at the latest after `LEAVE_TIMEOUT`.
        """
        if self.hub is None:
            return False
        if not self._leaves_until:
            self._leaves_until = time.monotonic() + LEAVE_TIMEOUT
            self.hub.send("leaves", None)
        there = set(self.hub.nodes)
        # other nodes cannot see who is connected; they follow when this one ends
        if self._node == 0:
            there -= self._leaving
        return bool(there) and time.monotonic() < self._leaves_until

    @property
    def is_elsewhere(self) -> bool:
        """True if the run's first failure is decided, and is not on this node alone."""
        decided = self.decided
        return decided is not None and (decided.node != self._node or decided.proved)

    def close(self, last: object = None) -> None:
        """Send a farewell to the other nodes, and close the connections."""
        if self.hub is not None:
            self.hub.close(last)

    def handle_claim(self, what: tuple[int, Any]) -> None:
        """On node 0, handle a node's claim that a failure came first. The claim that arrives first wins."""
        node, body = what
        if self.decided is not None or self._is_comparing:
            return
        decision = Decision(body["words"], node, body["rank"])
        if not body["notes"]:
            self.decide(decision)
            return
        self._is_comparing = True
        thread = threading.Thread(
            target=self._compare, args=(decision, body["notes"]), name="lockstep-compare", daemon=True
        )
        thread.start()

    def _compare(self, claim: Decision, notes: list[dict[str, Any]]) -> None:
        """On node 0, compare an aborted rank's collectives with those of all ranks. Then confirm or correct the claim.

        Runs in a thread.
        """
        proof = None
        with contextlib.suppress(Exception):  # on any error, the claim counts
            proof = self.compares(notes)
        self._put("compared", claim if proof is None else Decision(str(proof), claim.node, proved=True))

    def decide(self, decision: Decision) -> None:
        """On node 0, decide which failure came first, and send the decision to the other nodes."""
        if self.decided is None:
            assert self.hub is not None
            self.hub.send("first", asdict(decision))
            self._decide(decision)

    def accept(self, body: dict[str, Any]) -> None:
        """On the other nodes, accept the decision of node 0."""
        if self.decided is None:
            self._decide(Decision(**body))

    def _decide(self, decision: Decision) -> None:
        self.decided = decision
        self._follow(decision)

    def handle_loss(self, what: tuple[int, str]) -> None:
        """Handle the loss of a node whose supervisor disappeared without a farewell. The loss counts as a failure."""
        node, words = what
        if node:
            self.handle_claim((node, {"words": words, "rank": -1, "notes": []}))
        elif self.decided is None:  # the deciding node is gone
            self._decide(Decision(words, node))

    def _report_loss(self, node: int, host: str, reason: str) -> None:
        from lockstep.supervise.hub import SILENT

        words = f"node {node} ({host}) {reason}"
        if self._scheduled and reason == SILENT:
            self._put("silent", words)
        else:
            self._put("lost", (node, words))
