"""The monitor of hangs: traces are compared as they grow, and long waits are told once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.supervise import elsewhere, hang_monitor
from lockstep.supervise.causes import Divergence
from lockstep.supervise.hang_monitor import HangMonitor
from lockstep.supervise.snapshot import SLEEPS, STOPPED
from lockstep.supervise.stack import Stack
from lockstep.supervise.trace_memory import WHOLE, TraceMemory
from lockstep.supervise.traces import MOST
from tests.launch.played import REDUCING, WORKING, End, position

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


class Rank:
    """A rank, played by this process: what it writes into its trace, and answers."""

    def __init__(self, rank: int, timeout: float | None, kill: float | None) -> None:
        self.collectives = TraceMemory()
        self.words = {name: self.collectives.word("operation", name) for name in ("all_reduce", "broadcast", "barrier")}
        self.group = self.collectives.word("group", "0", [0, 1])
        self.number = 0
        self.stack = WORKING
        self.still = 0.0
        address = self.collectives.address
        limits: dict[str, Any] = {"hang_timeout": timeout, "hang_kill": kill}
        self.position = position(rank, process=os.getpid(), answers=str(rank), collectives=address, **limits)

    def enter(self, operation: str = "all_reduce") -> int:
        self.number += 1
        location = self.collectives.word("location", "/me/train.py", self.number, "training_step")
        return self.collectives.enter(self.number, 0, location, self.words[operation], self.group, 0, WHOLE, -1, -1)

    def queue(self, operation: str = "all_reduce") -> int:
        """The call returns, and the device is not done."""
        index = self.enter(operation)
        self.collectives.leave(index, complete=False)
        self.collectives.queue(index)
        return index

    def make(self, operation: str = "all_reduce") -> None:
        self.collectives.leave(self.enter(operation), complete=True)


class Scene:
    """Two ranks and who looks at them."""

    def __init__(self, timeout: float | None = 3.0, kill: float | None = 1800.0, channel: Any = None) -> None:
        self.ranks = [Rank(rank, timeout, kill) for rank in range(2)]
        self.lookout = HangMonitor(channel)
        self.later = 0.0

    def look(self, later: float = 0.0) -> Divergence | None:
        """What is seen, so many seconds from now."""
        self.later = later
        inside = {rank.position.rank: rank.position for rank in self.ranks}
        still = {rank.position.rank: rank.still for rank in self.ranks}
        return self.lookout.check(inside, still, time.monotonic() + later)

    def ask(self, process: int, answers: str) -> Stack:
        return self.ranks[int(answers)].stack


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    def play(*args: Any, **kwargs: Any) -> Scene:
        made = Scene(*args, **kwargs)
        monkeypatch.setattr(hang_monitor, "ask", made.ask)
        return made

    return play


def test_calls_that_fit_are_let_be(scene: Callable[..., Scene]) -> None:
    played = scene()
    for operation in ("all_reduce", "barrier"):
        for rank in played.ranks:
            rank.make(operation)
            assert played.look() is None
    assert played.lookout.divergence() is None


def test_swapped_calls_are_found_after_the_fact(scene: Callable[..., Scene]) -> None:
    """Of one size they are silent garbage on gloo."""
    played = scene()
    for rank, order in zip(played.ranks, [("all_reduce", "broadcast"), ("broadcast", "all_reduce")], strict=True):
        for operation in order:
            rank.make(operation)
    found = str(played.look())
    assert "rank 0 called all_reduce #1, /me/train.py:1 (training_step); rank 1 called broadcast #1" in found
    assert str(played.lookout.divergence()) == found


def test_more_calls_than_are_compared_in_a_look_are_compared_at_the_end(scene: Callable[..., Scene]) -> None:
    played = scene()
    for rank in played.ranks:
        rank.make("barrier" if rank.position.rank else "all_reduce")
        for _ in range(MOST):
            rank.make()
    assert played.look() is None
    assert "barrier #1" in str(played.lookout.divergence())


def test_since_when_a_rank_waits_is_that_of_its_newest_collective(scene: Callable[..., Scene]) -> None:
    played = scene()
    rank, since = played.ranks[1], played.lookout.traces.waits_since
    assert since(1) is None  # its trace is not open
    played.lookout.traces.open({1: rank.position})
    rank.make("barrier")
    assert since(1) is None
    before = time.monotonic()
    index = rank.enter()
    assert before <= (since(1) or 0.0) <= time.monotonic()
    rank.collectives.leave(index, complete=True)
    assert since(1) is None


def test_a_rank_that_keeps_others_waiting_is_told_once(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    played = scene()
    played.ranks[0].enter()
    assert played.look(2.0) is None
    assert capsys.readouterr().err == ""
    for seconds in (4.0, 5.0, 20.0):
        assert played.look(seconds) is None
    said = capsys.readouterr().err
    assert said.count("lockstep: ") == 1
    assert "rank 1 is in its own code, /me/train.py:31; rank 0 waits in all_reduce #1, /me/train.py:1" in said
    assert "the run continues, and ends after hang_kill=1800 s of waiting" in said


def test_a_rank_that_keeps_others_devices_waiting_is_told(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    """A collective of a device returns when it is queued. The rank turns round in a line of the user's then, which does
    not look like waiting: nothing was said."""
    played = scene()
    for rank in played.ranks:
        rank.make()
    index = played.ranks[0].queue()
    played.ranks[0].queue()
    assert played.look(4.1) is None
    assert capsys.readouterr().err == ""  # nobody looks what the device is done with
    played.ranks[0].collectives.watched()
    assert played.look(4.2) is None
    assert capsys.readouterr().err == ""
    assert played.look(6.0) is None
    said = capsys.readouterr().err
    assert "rank 1 is in its own code, /me/train.py:31; rank 0 waits in all_reduce #2 (queued on its device)" in said
    found = str(played.lookout.divergence())  # where the device's backend aborts rank 0
    assert found.startswith("rank 1 is in its own code, /me/train.py:31, and others cannot continue: rank 0 waits")
    played.ranks[1].make()
    played.ranks[0].collectives.complete(index)
    assert "all_reduce #3" in str(played.lookout.divergence())
    played.ranks[1].make()
    assert played.lookout.divergence() is None


def test_ranks_whose_stacks_alone_wait_are_told(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    played = scene()
    played.ranks[1].stack, played.ranks[1].still = REDUCING, 3.5
    assert played.look(3.5) is None
    assert "rank 0 is in its own code, /me/train.py:31; rank 1 waits in reducing" in capsys.readouterr().err


def test_a_rank_that_rests_while_nobody_waits_is_no_news(
    scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]
) -> None:
    played = scene()
    played.ranks[0].still = played.ranks[1].still = 100.0
    for seconds in (0.0, 50.0, 2000.0):
        assert played.look(seconds) is None
    assert capsys.readouterr().err == ""


def test_a_run_that_waits_for_ever_is_ended(scene: Callable[..., Scene]) -> None:
    played = scene(kill=30.0)
    played.ranks[0].enter()
    assert played.look(29.0) is None
    found = played.look(31.0)
    assert "rank 0 waits in all_reduce #1" in str(found)
    assert str(found).endswith("ended after hang_kill=30 s of waiting")


def test_what_was_rest_before_it_was_a_wait_does_not_count(scene: Callable[..., Scene]) -> None:
    """A rank that slept for long and has just begun to wait is not ended."""
    played = scene(kill=30.0)
    played.ranks[1].still = 100.0
    assert played.look(100.0) is None
    played.ranks[1].stack = REDUCING
    assert played.look(101.0) is None
    assert played.look(112.0) is None
    assert played.look(113.0) is None
    assert played.look(143.0) is not None


def test_both_flags_off_is_all_off(scene: Callable[..., Scene], capsys: pytest.CaptureFixture[str]) -> None:
    played = scene(None, None)
    played.ranks[0].enter()
    played.ranks[1].make("barrier")
    assert played.look(1e6) is None
    assert capsys.readouterr().err == ""


def two_nodes(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, *limits: float) -> list[Scene]:
    """Rank 0 is on node 0, and rank 1 on node 1."""
    ends: list[End] = []
    nodes = [scene(*limits, channel=End(ends)), scene(*limits, channel=End(ends))]
    nodes[0].ranks.pop()
    nodes[1].ranks.pop(0)
    monkeypatch.setattr(hang_monitor, "ask", lambda process, answers: nodes[int(answers)].ranks[0].stack)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + max(node.later for node in nodes))
    monkeypatch.setattr(elsewhere, "time", clock)
    return nodes


def test_hang_kill_ends_a_wait_that_only_a_stack_of_another_node_tells(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 looked at its own ranks, and the other node left it to node 0."""
    zero, one = two_nodes(scene, monkeypatch, 3.0, 20.0)
    one.ranks[0].stack = REDUCING
    for second in range(40):
        one.ranks[0].still = float(second)
        found = [each for each in (one.look(second), zero.look(second)) if each is not None]
        if found:
            break
    assert 20 <= second < 32
    assert "rank 1 waits in reducing gradients in backward" in str(found[0])
    assert "ended after hang_kill=20 s" in str(found[0])


@pytest.mark.parametrize("halted", [0, 1])
def test_a_stopped_rank_is_named_with_its_line_by_its_own_node(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, halted: int
) -> None:
    nodes = two_nodes(scene, monkeypatch, 3.0, 20.0)
    nodes[halted].ranks[0].position = replace(nodes[halted].ranks[0].position, process=1)
    monkeypatch.setattr(hang_monitor, "_state", lambda process: STOPPED if process == 1 else SLEEPS)
    monkeypatch.setattr(hang_monitor, "ask_stopped", lambda process, answers: WORKING)
    other = nodes[1 - halted].ranks[0]
    other.stack, other.still = REDUCING, 3.0
    looks = (node.look(number / 4) for number in range(20) for node in reversed(nodes))
    found = str(next(each for each in looks if each is not None))
    assert f"rank {halted} is stopped, /me/train.py:31 (SIGSTOP), and rank {1 - halted} waits in reducing" in found


def test_node_0_compares_the_ranks_of_all(scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch) -> None:
    zero, one = two_nodes(scene, monkeypatch)
    zero.ranks[0].enter("all_reduce")
    one.ranks[0].enter("barrier")
    for later in (1.0, 2.0):
        assert zero.look(later) is None
        assert one.look(later) is None
    found = zero.look(2.0)
    assert "rank 0 waits in all_reduce #1, /me/train.py:1 (training_step); rank 1 waits in barrier #1" in str(found)
    assert zero.lookout.others._hub.sent == ["wanted"]  # type: ignore[union-attr]
    assert one.lookout.others._hub.sent == ["snapshots"]  # type: ignore[union-attr]


def test_a_wait_is_told_by_node_0_alone_and_by_another_where_node_0_does_not_look(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    zero, one = two_nodes(scene, monkeypatch, 2.0)
    one.ranks[0].enter("all_reduce")
    for later in (1.0, 2.0):
        zero.look(later)
        one.look(later)
    assert capfd.readouterr().err == ""
    one.look(4.0)
    zero.look(4.5)
    said = capfd.readouterr().err
    assert "rank 0 is in its own code, /me/train.py:31; rank 1 waits in all_reduce #1, /me/train.py:1" in said
    one.look(4.5)
    assert capfd.readouterr().err == ""
    assert one.lookout.others is not None
    one.lookout.others._requested_at -= 60.0
    one.look(20.0)
    assert "rank 1 waits in all_reduce #1" in capfd.readouterr().err
