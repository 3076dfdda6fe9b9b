"""The way between nodes, played within one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


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
