"""Supervisors of several nodes: what one says reaches the others, and one that is gone is noticed."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.supervise.causes import Cause
from lockstep.supervise.channel import Channel
from lockstep.supervise.hub import SILENCE, Hub
from lockstep.supervise.nodes import Decision, Nodes

SECONDS = 20


class Node:
    """One node's end, and what it heard."""

    def __init__(self, number: int) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[tuple[int, str, str]] = queue.Queue()
        self.hub = Hub(number, f"host{number}", lambda *what: self.lost.put(what))
        self.hub.listen("news", lambda node, body: self.heard.put((node, body)))

    @property
    def place(self) -> tuple[str, int, str]:
        """Where others join it."""
        assert self.hub._server is not None
        return "127.0.0.1", self.hub._server.getsockname()[1], self.hub._token


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node(number) for number in range(3)]
    port, token = made[0].hub.open()
    for node in made[1:]:
        assert node.hub.join("127.0.0.1", port, token)
    assert made[0].hub.nodes == [1, 2]
    yield made
    for node in made:
        node.hub.close()


def test_what_one_says_reaches_all_others(nodes: list[Node]) -> None:
    for sender in range(3):
        nodes[sender].hub.send("news", {"from": sender})
        for receiver in range(3):
            if receiver != sender:
                assert nodes[receiver].heard.get(timeout=SECONDS) == (sender, {"from": sender})
    assert all(node.heard.empty() for node in nodes)


def test_who_says_farewell_is_not_lost_and_who_is_killed_is(nodes: list[Node]) -> None:
    nodes[1].hub.close()
    nodes[2].hub._connections[0].socket.shutdown(socket.SHUT_RDWR)  # as the system does for a process that is killed
    assert nodes[0].lost.get(timeout=SECONDS) == (2, "host2", "ended without reporting why")
    assert nodes[0].lost.empty()


def test_a_stranger_is_not_let_in(nodes: list[Node]) -> None:
    stranger = Channel(socket.create_connection(nodes[0].place[:2]))
    assert stranger.send({"token": "guessed", "node": 7, "host": "x"})
    assert stranger.receive() is None
    stranger.close()
    assert nodes[0].hub.nodes == [1, 2]


def test_a_hub_that_cannot_be_reached() -> None:
    node = Node(1)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    assert not node.hub.join("127.0.0.1", port, "token")
    node.hub.send("news", 1)  # lost, and no error
    node.hub.close()


def test_the_system_asks_a_silent_machine_for_half_a_minute(nodes: list[Node]) -> None:
    """A message of one's own now and then took a loaded machine for dead."""
    connection = nodes[1].hub._connections[0].socket
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    if hasattr(socket, "TCP_KEEPIDLE"):
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, 5, 4]
    assert SILENCE == 30


def test_the_first_claim_is_believed_by_all() -> None:
    events: list[queue.Queue[tuple[str, Any]]] = [queue.Queue(), queue.Queue()]
    followed: list[list[Decision]] = [[], []]
    zero, one = (
        Nodes(number, 2, lambda *event, number=number: events[number].put(event), followed[number].append)
        for number in (0, 1)
    )
    assert zero.hub is not None
    assert one.hub is not None
    try:
        port, token = zero.open("127.0.0.1")
        assert one.hub.join("127.0.0.1", port, token)
        one.hub.listen("first", lambda node, body: events[1].put(("first", body)))
        one.claim(Cause(3, 1.0, "ValueError: no", "train.py:3", ""))
        name, what = events[0].get(timeout=SECONDS)
        assert name == "claim"
        zero.handle_claim(what)
        zero.claim(Cause(0, 0.5, "KeyError: later heard", "train.py:4", ""))
        name, body = events[1].get(timeout=SECONDS)
        assert name == "first"
        one.accept(body)
        words = f"rank 3 on {socket.gethostname()} failed first, at train.py:3: ValueError: no"
        assert [said.words for said in followed[0] + followed[1]] == [words, words]
        assert (zero.is_elsewhere, one.is_elsewhere) == (True, False)
    finally:
        one.close()
        zero.close()


def test_a_second_node_of_the_same_number_is_sent_away_and_the_run_goes_on(
    nodes: list[Node], capfd: pytest.CaptureFixture[str]
) -> None:
    """It took the place of the first, which then believed that node 0 was gone, and ended the run."""
    second = Nodes(1, 3, lambda event, what: None, lambda first: None)
    assert second.hub is not None
    second.hub.host = "another"
    second._call(*nodes[0].place)
    told = "lockstep: another connected as node 1, but host1 has this number already: the run continues with that node"
    said, end = capfd.readouterr().err, time.monotonic() + SECONDS
    while told not in said and time.monotonic() < end:  # node 0 says it in a thread of its own
        time.sleep(0.01)
        said += capfd.readouterr().err
    assert told in said
    assert "another node has this number" in said
    second.close()
    nodes[1].hub.send("news", "still there", to=0)
    assert nodes[0].heard.get(timeout=SECONDS) == (1, "still there")
    assert nodes[0].lost.empty()
    assert nodes[1].lost.empty()


def test_a_node_that_calls_again_is_let_in_again(nodes: list[Node]) -> None:
    """Its first call may have come to nothing on its side alone."""
    assert nodes[1].hub.join(*nodes[0].place)
    nodes[1].hub.send("news", "again", to=0)
    assert nodes[0].heard.get(timeout=SECONDS) == (1, "again")
    assert nodes[0].lost.empty()


# -- broken lines: whoever sends them is sent away, and everybody else is served on

VALUES: list[Any] = [
    *("", "é", "\x1b[2J", "x" * 5000, "\0", "node", 0, 1, -1, 1.5, 10**30, float("nan"), float("inf"), True),
    *(None, [], {}, ["a"], {"a": {}}, [[[[[]]]]], [None, {}]),
]


def is_served(nodes: list[Node]) -> None:
    zero, one, _ = nodes
    assert one.hub.send("news", "and now", to=0)
    while zero.heard.get(timeout=SECONDS) != (1, "and now"):
        pass
    late = Hub(7, "late", lambda *what: None)
    assert late.join(*zero.place)
    late.close()
    assert zero.lost.empty()


def test_a_token_that_is_not_ascii_ended_the_supervision(nodes: list[Node]) -> None:
    """One line of a stranger ended the thread that serves all connections."""
    for value in ("é", "\ud800", ["a"], None, 1):
        with socket.create_connection(nodes[0].place[:2]) as stranger:
            stranger.sendall(json.dumps({"token": value, "node": 2}).encode() + b"\n")
            assert stranger.recv(1) == b""
    is_served(nodes)


def test_messages_without_sense_of_a_node_change_nothing(nodes: list[Node], capfd: pytest.CaptureFixture[str]) -> None:
    """One that another version has sent, say. It is told once."""
    zero, one, _ = nodes
    zero.hub.listen("numbers", lambda node, body: body["number"])
    for value in VALUES:
        one.hub.send("numbers", value, to=0)
        one.hub._pass("x", json.dumps({"topic": value, "to": 0}).encode() + b"\n", 0)
        one.hub._pass("x", json.dumps({"node": value, "topic": "news", "to": 0}).encode() + b"\n", 0)
    is_served(nodes)
    assert capfd.readouterr().err.count("could not be read") == 1
    assert zero.hub.nodes[:1] == [1]


def test_a_stranger_who_never_ends_his_line_is_sent_away(nodes: list[Node]) -> None:
    with socket.create_connection(nodes[0].place[:2]) as stranger:
        stranger.settimeout(SECONDS)
        try:
            for _ in range(64):
                stranger.sendall(b"x" * 2**16)
            assert stranger.recv(1) == b""
        except ConnectionError:  # which is the same
            pass
    is_served(nodes)
