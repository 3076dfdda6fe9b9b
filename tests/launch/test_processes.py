"""Started processes: one fails, the others are ended."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch import processes
from lockstep.launch.parent_death import PARENT
from lockstep.launch.processes import GRACE, Foreign, RankProcesses
from lockstep.supervise.channel import Channel
from lockstep.supervise.mailbox import Mailbox
from lockstep.supervise.supervisor import Supervisor

SLEEP = "import time; time.sleep(60)"


def command(code: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code]


@pytest.fixture
def children() -> Iterator[RankProcesses]:
    made = RankProcesses()
    yield made
    made.stop()


def start(children: RankProcesses, *codes: str) -> None:
    for rank, code in enumerate(codes, start=1):
        children.start(rank, command(code), os.environ)
    children.watch()


def test_a_further_ctrl_c_leaves_no_rank_behind(
    children: RankProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A third one, while ranks were being stopped, left them training until the notebook's kernel ended."""
    ready = tmp_path / "ready"
    stays = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w')\n{SLEEP}"
    start(children, stays)
    while not ready.exists():
        time.sleep(0.01)

    def interrupted(*args: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(processes, "is_stopped", interrupted)  # while it waits for the first rank
        with pytest.raises(KeyboardInterrupt):
            children.stop(60)
    assert children.wait(20)


def test_a_wait_that_ctrl_c_interrupted_still_waits_for_all(children: RankProcesses) -> None:
    """A fit with ddp_fork read rank 0's result before it was there, where rank 1 had ended first: EOFError."""
    start(children, SLEEP, "pass")
    pressing = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        children.wait(60)
    pressing.join()
    assert not children.wait(1.0)
    assert children.running[:1] == [1]


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        ("raise SystemExit(3)", 3, r"rank 2 \(process \d+\) ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", -9, r"rank 2 \(process \d+\) was killed by SIGKILL"),
    ],
)
def test_one_fails_and_the_others_are_ended(children: RankProcesses, code: str, exit_code: int, text: str) -> None:
    began = time.monotonic()
    start(children, SLEEP, code, SLEEP)
    assert children.wait(30)
    assert time.monotonic() - began < 10
    assert [(end.rank, end.code) for end in children.failed] == [(2, exit_code)]
    assert re.match(text, str(children.failed[0]))


NEW_LINUX = sys.platform.startswith("linux") and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)


@pytest.mark.skipif(not NEW_LINUX, reason="older systems forget the code when the parent has asked for it")
@pytest.mark.parametrize(("end", "code"), [("os._exit(7)", 7), ("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", -9)])
def test_the_code_of_a_process_that_another_parent_has_buried_is_known(end: str, code: int) -> None:
    """Where the shell was faster, `os._exit(0)` was told as "is gone: it was killed, or ended by os._exit"."""
    process = subprocess.Popen(command(f"import os; os.read(0, 1); {end}"), stdin=subprocess.PIPE)
    watched = Foreign(process.pid, lambda: 99)
    process.communicate(b"x")
    assert process.returncode == code
    assert watched.end() == code
    watched.close()


def test_a_good_exit_code_in_the_middle_of_something_is_a_failure() -> None:
    """``os._exit(0)`` passed for the end of the script, and another rank was blamed."""
    watched = RankProcesses(is_busy=lambda rank: rank == 2)
    start(watched, "pass", "pass", SLEEP)
    assert watched.wait(30)
    assert [(end.rank, end.code) for end in watched.failed] == [(2, 0)]
    assert re.match(r"rank 2 \(process \d+\) ended in the middle of the run with exit code 0", str(watched.failed[0]))
    assert 1 in watched.ended


def test_one_that_ignores_sigterm_is_killed(children: RankProcesses) -> None:
    read, write = os.pipe()
    with os.fdopen(read) as ready:
        code = f"import os, signal; signal.signal(15, signal.SIG_IGN); os.write({write}, b'x'); {SLEEP}"
        children.start(1, command(code), os.environ, handed=(write,))
        os.close(write)
        assert ready.read(1) == "x"
    children.watch()
    children.stop(grace=0.2)
    assert children.wait(5)
    assert children.failed == []


def test_what_follows_a_failure_is_done_once_and_after_the_end_of_all() -> None:
    calls: list[list[int]] = []
    watched = RankProcesses(lambda: calls.append(watched.running))
    start(watched, "raise SystemExit(1)", "raise SystemExit(1)", SLEEP)
    assert watched.wait(30)
    assert calls == [[]]


class Clock:
    """In the place of `time`: only sleep lets time pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("since", "said", "hurries", "seconds"),
    [
        ([90.0, 99.9], None, True, GRACE / 4),  # both wait in a collective
        ([90.0, None], None, True, GRACE),  # one may raise, and save what it has
        ([90.0, 100.4], None, True, GRACE / 4 + 0.4),  # it has come out of a collective, and waits in another
        ([90.0, None], 100.3, True, GRACE / 4 + 0.3),  # what waits for that one gets as long as it does
        ([90.0, 99.9], None, False, GRACE),  # a launcher
    ],
)
def test_ranks_that_wait_behind_one_that_failed_are_ended_after_half_a_second(
    monkeypatch: pytest.MonkeyPatch, since: list[float | None], said: float | None, hurries: bool, seconds: float
) -> None:
    """gloo lets go of the neighbours of a rank that is gone; 22 of 24 ranks waited for their end for 2 seconds."""
    clock = Clock()

    def failed_at(rank: int) -> float | None:
        return said if rank == 2 and said is not None and clock.now >= said else None

    def waits_since(rank: int) -> float | None:
        at = since[rank - 1]
        return at if at is not None and clock.now >= at else None

    watched = RankProcesses(failed_at=failed_at, waits_since=waits_since)
    watched.hurries = hurries
    start(watched, SLEEP, SLEEP)
    monkeypatch.setattr(processes, "time", clock)
    watched.wind_up(100.0)
    assert clock.now - 100.0 == pytest.approx(seconds, abs=2.5 * processes.LOOK)
    assert watched.wait(30)
    assert watched.failed == []


def one_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more process may be started, and then none."""
    start, left = subprocess.Popen, [1]

    def popen(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)


@contextlib.contextmanager
def a_supervisor(size: int) -> Iterator[tuple[Supervisor, Channel, subprocess.Popen[bytes]]]:
    """A supervisor in this process, of ranks that sleep; what rank 0 has of it; and rank 0."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    zero = subprocess.Popen(sleep)
    here, there = map(Channel, socket.socketpair())
    counts = {"rank": 0, "size": size, "local_size": size, "node": 0, "nodes": 1, "process": zero.pid}
    others = {"environ": dict(os.environ), "parent": PARENT, "folder": os.getcwd(), "name": "", "scheduled": False}
    order = {**counts, **others, "command": sleep, "one_screen": False}
    heard, hears = os.pipe()
    supervisor = Supervisor(there, Mailbox(), heard, order)
    try:
        yield supervisor, here, zero
    finally:
        zero.kill()
        zero.wait()
        supervisor._processes.wait()
        supervisor.close()
        here.close()
        os.close(hears)  # the thread that reads signals ends
        for thread in threading.enumerate():
            if thread.name == "lockstep-receive_signals":
                thread.join(30)
        os.close(heard)


def test_the_cause_is_told_if_the_last_rank_has_ended_and_the_failures_event_is_still_to_come(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The supervisor looked between the two, saw no rank, and ended in silence: once in a hundred runs."""
    monkeypatch.setattr(processes, "GRACE", 0.1)
    with a_supervisor(2) as (supervisor, _, zero):
        supervisor._processes._on_failure = lambda: None  # as late as can be
        assert supervisor.starts()
        zero.kill()
        supervisor.run()
        assert capfd.readouterr().err == (
            f"lockstep: rank 0 (process {zero.pid}) was killed by SIGKILL (exit code -9)\n"
        )


def test_a_supervisor_that_may_start_no_more_ranks_says_why_and_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was told that the supervisor had ended with exit code 1, and before "[Errno 11]"; to end others hung."""
    with a_supervisor(3) as (supervisor, here, _):
        one_start(monkeypatch)
        assert not supervisor.starts()
        message = here.receive()
        assert message is not None
        assert message["do"] == "end"
        assert re.match(r"lockstep: rank 2 could not be started .* limit of processes \(`ulimit -u`", message["text"])
        assert list(supervisor._processes.running) == [0]
