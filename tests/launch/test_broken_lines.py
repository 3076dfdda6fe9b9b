"""Broken lines at the doors of a supervisor: whoever sends them is sent away, and everybody else is served on."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.supervise.hub import Hub

SECONDS = 20
VALUES: list[Any] = [
    *("", "é", "\ud800", "\x1b[2J", "x" * 5000, "\0", "node", 0, 1, -1, 1.5, 10**30, float("nan"), float("inf"), True),
    *(None, [], {}, ["a"], {"a": {}}, [[[[[]]]]], [None, {}]),
]


class Heard:
    """A node's end, and what it heard."""

    def __init__(self, number: int) -> None:
        self.hub = Hub(number, f"host{number}", lambda *what: self.lost.append(what))
        self.lost: list[Any] = []
        self.bodies: list[Any] = []
        self.news = threading.Semaphore(0)
        self.hub.listen("news", self._take)

    def _take(self, node: int, body: Any) -> None:
        self.bodies.append((node, body["number"]))  # a body without it raises
        self.news.release()


@pytest.fixture
def nodes() -> Iterator[tuple[Heard, Heard, int, str]]:
    zero, one = Heard(0), Heard(1)
    port, token = zero.hub.open("127.0.0.1")
    assert one.hub.join("127.0.0.1", port, token)
    yield zero, one, port, token
    one.hub.close()
    zero.hub.close()


def is_served(nodes: tuple[Heard, Heard, int, str], number: int) -> None:
    zero, one, port, token = nodes
    assert one.hub.send("news", {"number": number}, to=0)
    assert zero.news.acquire(timeout=SECONDS)
    assert zero.bodies[-1] == (1, number)
    late = Hub(7, "late", lambda *what: None)
    assert late.join("127.0.0.1", port, token)
    late.close()
    assert zero.lost == []


def test_a_token_that_is_not_ascii_ended_the_supervision(nodes: tuple[Heard, Heard, int, str]) -> None:
    """One line of a stranger ended the thread that serves all connections."""
    for value in ("é", "\ud800", ["a"], None, 1):
        with socket.create_connection(("127.0.0.1", nodes[2])) as stranger:
            stranger.sendall(json.dumps({"token": value, "node": 2}).encode() + b"\n")
            assert stranger.recv(1) == b""
    is_served(nodes, 1)


def test_messages_without_sense_of_a_node_change_nothing(
    nodes: tuple[Heard, Heard, int, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """One that another version has sent, say. It is told once."""
    zero, one, *_ = nodes
    for value in VALUES:
        if value == "\ud800":
            continue
        one.hub.send("news", value, to=0)
        one.hub._pass("x", json.dumps({"topic": value, "to": 0}).encode() + b"\n", 0)
        one.hub._pass("x", json.dumps({"node": value, "topic": "news", "to": 0}).encode() + b"\n", 0)
    is_served(nodes, 3)
    assert capfd.readouterr().err.count("could not be read") == 1
    assert zero.hub.nodes[:1] == [1]


def test_a_stranger_who_never_ends_his_line_is_sent_away(nodes: tuple[Heard, Heard, int, str]) -> None:
    with socket.create_connection(("127.0.0.1", nodes[2])) as stranger:
        stranger.settimeout(SECONDS)
        try:
            for _ in range(64):
                stranger.sendall(b"x" * 2**16)
            assert stranger.recv(1) == b""
        except ConnectionError:  # which is the same
            pass
    is_served(nodes, 4)
