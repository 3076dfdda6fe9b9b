"""The watch over ranks: whom it lets be, whom it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lockstep.supervise import hang_monitor, monitor, stack_proof, stack_request
from lockstep.supervise.causes import Cause, Divergence
from lockstep.supervise.mailbox import JOINED, Mailbox, leave_note
from lockstep.supervise.monitor import RankMonitor, Verdict
from lockstep.supervise.snapshot import RankPosition
from lockstep.supervise.stack import LOCKSTEP, TORCH, Frame, Stack

IN_BARRIER = Stack(
    (
        Frame(f"{TORCH}distributed/distributed_c10d.py", 1, "barrier"),
        Frame(f"{LOCKSTEP}engines/collectives.py", 2, "barrier"),
    )
)
WORKING = Stack((Frame("train.py", 3, "training_step"),))

pytestmark = pytest.mark.skipif(stack_request.ASK is None, reason="needs /proc")


class Scene:
    """Two ranks, played: where they stand, what they answer, whether they work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes = Mailbox()
        self.verdicts: list[Verdict] = []
        self.answers = {0: WORKING, 1: WORKING}
        self.still = {0, 1}
        self.ended: dict[int, float] = {}
        self.watch = RankMonitor(self.notes, self.verdicts.append, lambda: self.ended, 2)
        for module in (monitor, hang_monitor):
            monkeypatch.setattr(module, "ask", lambda process, answers: self.answers[process])
        monkeypatch.setattr(hang_monitor, "_state", lambda process: "sleeps")
        monkeypatch.setattr(hang_monitor, "_runs", lambda process: process not in self.still)
        monkeypatch.setattr(
            monitor._Stillness, "seconds", lambda stillness, process, now: 5.0 if process in self.still else 0.0
        )
        for name in ("PERIOD", "QUIET", "LEAVE_TIMEOUT", "AT_ONCE", "REPORT_TIMEOUT"):
            monkeypatch.setattr(monitor, name, 0.05)
        monkeypatch.setattr(stack_proof, "AGAIN", 0.05)

    def position(self, rank: int, call: int = 1, inside: bool = True) -> None:
        leave_note(self.notes.address, RankPosition(rank, time.monotonic(), call, inside, f"fit.py:{call}", rank))

    def verdict(self, seconds: float = 2.0) -> Verdict | None:
        """What the watch says, in that time."""
        until = time.monotonic() + seconds
        while not self.verdicts and time.monotonic() < until:
            time.sleep(0.02)
        return self.verdicts[0] if self.verdicts else None


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    monkeypatch.setattr(monitor.signals, "pass_on", lambda process: None)
    made.position(0)
    made.position(1)
    made.notes.leave({JOINED: 0})
    made.watch.start()
    yield made
    made.watch.stop()
    made.notes.close()


def test_a_rank_that_waits_for_one_that_works_is_let_be(scene: Scene) -> None:
    scene.answers[0] = IN_BARRIER
    scene.still = {0}
    assert scene.verdict(0.5) is None


def test_all_that_wait_at_the_same_place_are_let_be_until_ctrl_c(scene: Scene) -> None:
    scene.answers = {0: IN_BARRIER, 1: IN_BARRIER}
    assert scene.verdict(0.5) is None
    scene.watch.interrupt()
    found = scene.verdict()
    assert found is not None
    assert found.interrupted
    assert "ranks 0, 1 waited in strategy.barrier (fit.py:1)" in str(found.cause)


def test_the_signal_that_passes_ctrl_c_on_is_no_work(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes a rank for a moment: ranks that wait for ever were ended after 10 to 30 s, in place of 5."""
    scene.answers = {0: IN_BARRIER, 1: IN_BARRIER}
    woken: set[int] = set()
    seconds = monitor._Stillness.seconds

    def at_a_look(stillness: Any, process: int, now: float) -> float:
        still = seconds(stillness, process, now)
        return 0.0 if process in woken else still

    monkeypatch.setattr(monitor._Stillness, "seconds", at_a_look)
    monkeypatch.setattr(monitor, "is_there", lambda answers: True)
    monkeypatch.setattr(monitor.signals, "pass_on", woken.add)
    monkeypatch.setattr(monitor.select, "select", lambda *_: (woken.clear(), time.sleep(0.02), [[]])[-1])
    scene.watch.interrupt()
    found = scene.verdict()
    assert found is not None
    assert found.interrupted


@pytest.mark.parametrize("heard", [False, True])
def test_a_rank_whose_handler_cannot_run_has_its_ctrl_c_told(
    scene: Scene, heard: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """A main thread that waits for a GPU runs no handler: the first Ctrl-C was not answered with a word."""
    scene.still = {0}
    if heard:
        leave_note(scene.notes.address, {"heard": 0, "call": 1})
    scene.watch.interrupt()
    assert scene.verdict(0.5) is None
    told = "rank 0 is still in its own code (train.py:3); a second Ctrl-C ends them at once."
    assert capfd.readouterr().err.count(told) == (0 if heard else 1)


def test_ctrl_c_before_the_ranks_have_met_ends_them(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that had died while it started never came, and a second Ctrl-C was not heeded."""
    monkeypatch.setattr(scene.notes, "has_joined", lambda: False)
    scene.watch.interrupt()
    assert scene.verdict() == Verdict(None, interrupted=True)
    assert capfd.readouterr().err == ""


def test_ctrl_c_lets_a_rank_come_to_its_boundary(scene: Scene) -> None:
    scene.answers[0] = IN_BARRIER
    scene.still = {0}
    scene.watch.interrupt()
    assert scene.verdict(0.5) is None
    scene.watch.interrupt()
    found = scene.verdict()
    assert found == Verdict(None, interrupted=True)


@pytest.mark.parametrize("how", ["left", "ended"])
def test_who_waits_for_one_that_left_is_ended(scene: Scene, how: str) -> None:
    scene.answers[0] = IN_BARRIER
    scene.position(1, inside=False)
    if how == "ended":
        scene.ended[1] = time.monotonic()
    found = scene.verdict()
    assert found is not None
    assert isinstance(found.cause, Divergence)
    assert "rank 1 left the call at fit.py:1" in str(found.cause)


def failed(scene: Scene, rank: int) -> Cause:
    cause = Cause(rank, time.monotonic(), "ValueError: no", "train.py:3", "trace", call=1)
    leave_note(scene.notes.address, cause)
    return cause


def test_a_rank_that_failed_and_waits_in_a_hook_is_ended(scene: Scene) -> None:
    """A barrier in ``on_exception`` waited for ranks that waited for the one that had failed."""
    scene.answers = {0: IN_BARRIER, 1: IN_BARRIER}
    cause = failed(scene, 1)
    assert scene.verdict() == Verdict(cause)


def test_a_rank_that_failed_may_save_what_it_has(scene: Scene) -> None:
    scene.still = set()
    failed(scene, 1)
    assert scene.verdict(0.5) is None


def test_an_exception_that_was_caught_is_why_another_waits(scene: Scene) -> None:
    cause = failed(scene, 1)
    scene.answers[0] = IN_BARRIER
    scene.position(1, inside=False)
    assert scene.verdict() == Verdict(cause)


def test_an_exception_whose_script_went_on_is_why_the_calls_do_not_match(scene: Scene) -> None:
    """A sweep that catches errors went on on one rank: that its next call does not match was told, and not why."""
    cause = failed(scene, 1)
    scene.answers = {0: IN_BARRIER, 1: IN_BARRIER}
    scene.position(1, call=2)
    assert scene.verdict() == Verdict(cause)


def test_calls_after_one_whose_exception_was_caught_are_looked_at(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the note on that exception was there, no hang of any later call was named."""
    endings: list[bool] = []
    look = scene.watch.hangs.check

    def watched(*args: Any) -> Divergence | None:
        endings.append(args[-1])
        return look(*args)

    failed(scene, 1)
    for rank in range(2):
        scene.position(rank, call=2)
    monkeypatch.setattr(scene.watch.hangs, "check", watched)
    assert scene.verdict(0.5) is None
    assert endings
    assert not any(endings)


def test_ranks_of_a_node_that_has_said_farewell_are_not_looked_at_here(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that had been ended in its call was said to be gone by another node, behind the first cause."""
    looked: list[set[int]] = []
    monkeypatch.setattr(scene.watch, "positions", lambda: {2: RankPosition(2, 0.0, 1, True, "fit.py:1", 2)})
    monkeypatch.setattr(scene.watch.hangs, "check", lambda inside, *args: looked.append(set(inside)))
    assert scene.verdict(0.5) is None
    assert looked
    assert all(ranks == {0, 1} for ranks in looked)


def test_this_process_works_and_one_that_is_gone_cannot_be_told() -> None:
    stillness = monitor._Stillness()
    assert stillness.seconds(os.getpid(), time.monotonic()) == 0
    assert monitor._Stillness().seconds(2**22 + 1, 5.0) == 0


def test_a_rank_that_slept_at_the_first_look_was_said_to_have_waited_since_the_machine_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor, "_processor_time", lambda process: (1.5, True))
    stillness = monitor._Stillness()
    assert [stillness.seconds(1, now) for now in (40_000.0, 40_001.0, 40_003.5)] == [0.0, 1.0, 3.5]
