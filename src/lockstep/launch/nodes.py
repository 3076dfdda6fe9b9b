"""The first cause of a run on several nodes: what each supervisor claims, and the one that the first node believes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.launch.hub import SILENT, Hub
from lockstep.launch.judge import First, located


class Nodes:
    """This node among the others.

    Args:
        node: its number; node 0 decides.
        count: how many there are.
        put: called in threads with the name of an event and what belongs to it, for `claimed`, `heard` and `lost`.
        follow: called when the first cause of all nodes is known.
        scheduled: whether a scheduler looks after nodes that do not answer: it may start the run elsewhere, and would
            not if it ended by itself.

    Attributes:
        host: the name of this machine; "" where there is no other.
        hub: to the other nodes; None where there are none.
        decided: the first cause: ``words``, and the ``node`` that it is of.
    """

    def __init__(
        self,
        node: int,
        count: int,
        put: Callable[[str, Any], None],
        follow: Callable[[dict[str, Any]], None],
        scheduled: bool = False,
    ) -> None:
        self._node = node
        self._put = put
        self._follow = follow
        self._scheduled = scheduled
        self.host = socket.gethostname() if count > 1 else ""
        self.hub = Hub(node, self.host, self._lose) if count > 1 else None
        self.decided: dict[str, Any] | None = None

    def open(self) -> tuple[int, str]:
        """Let the others call; gives the port and the word that they need."""
        assert self.hub is not None
        self.hub.listen("claim", lambda node, body: self._put("claim", (node, body)))
        return self.hub.open()

    def join(self, address: str, port: int, token: str) -> None:
        """Call the first node, in a thread."""
        assert self.hub is not None
        self.hub.listen("first", lambda node, body: self._put("first", body))
        threading.Thread(target=self.hub.join, args=(address, port, token), name="lockstep-call", daemon=True).start()

    def say(self, cause: First) -> None:
        """Tell the others the first cause of this node."""
        if self.hub is None:
            return
        body = {"words": located(cause, self.host), "rank": getattr(cause, "rank", -1), "cause": asdict(cause)}
        if self._node == 0:
            self.claimed((0, body))
        else:
            self.hub.send("claim", body)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the first cause is known, and another node's."""
        return self.decided is not None and self.decided["node"] != self._node

    def close(self) -> None:
        """Say farewell."""
        if self.hub is not None:
            self.hub.close()

    def claimed(self, what: tuple[int, Any]) -> bool:
        """On the first node: one knows a cause. The first to say so is believed."""
        node, body = what
        if self.decided is None:
            self.decided = {**body, "node": node}
            assert self.hub is not None
            self.hub.send("first", self.decided)
            self._follow(self.decided)
        return False

    def heard(self, body: dict[str, Any]) -> bool:
        """On another one: the first node has decided."""
        if self.decided is None:
            self.decided = body
            self._follow(body)
        return False

    def lost(self, what: tuple[int, str]) -> bool:
        """A node's supervisor is gone, and has not said farewell."""
        node, words = what
        if node == 0:  # nobody is there to decide
            return self.heard({"words": words, "node": node})
        return self.claimed((node, {"words": words}))

    def _lose(self, node: int, host: str, reason: str) -> None:
        words = f"node {node} ({host}) {reason}"
        if self._scheduled and reason == SILENT:
            self._put("silent", words)
        else:
            self._put("lost", (node, words))
