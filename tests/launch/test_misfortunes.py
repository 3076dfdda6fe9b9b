"""A rank fails or strays, or Ctrl-C comes: all ends within seconds, and the last line is the first cause."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.sessions import Watched, marked
from tests.load import at_most

SCRIPT = Path(__file__).with_name("misfortunes.py")
SECONDS = 15.0
"""From the misfortune to the end of the last process: 5 where nobody else needs the processors."""


def line(word: str) -> str:
    """The place in the script that a comment marks, as a pattern."""
    return re.escape(marked(SCRIPT, rf"\b{word}\b"))


def run(folder: Path, what: str, strategy: str = "ddp", workers: int = 0, **more: Any) -> Watched:
    return Watched(SCRIPT, folder, what, strategy, str(workers), **more)


def ends_with(run: Watched, last: str, code: int = 1) -> None:
    """All is gone in time, and the last line says why."""
    said = "\n".join(run.lines)
    assert re.search(last, [text for text in run.lines if text.strip()][-1]), said
    assert (run.code, run.left) == (code, []), said
    assert run.seconds < at_most(SECONDS)
    assert not any("closed by peer" in text or "reset by peer" in text for text in run.lines[:-1]), said


@pytest.mark.parametrize(
    ("what", "last", "strategy", "workers"),
    [
        pytest.param(  # every day, of processes without torch: tests/launch/test_processes.py
            "exit", r"rank 1 failed first, at {}: sys.exit\(0\) in the middle", "ddp", 2, marks=pytest.mark.slow
        ),
        pytest.param("exit", r"rank 1 failed first, at {}: sys.exit\(0\)", "ddp_spawn", 0, marks=pytest.mark.slow),
        pytest.param(
            "hard exit", r"rank 1 .*in the middle of the run with exit code 0", "ddp", 2, marks=pytest.mark.slow
        ),
        pytest.param("bad sample", "rank 0 failed first, at {}: ValueError: no such", "ddp", 0, marks=pytest.mark.slow),
        pytest.param(
            "bad sample", "rank 0 failed first, at {}: ValueError: .* worker", "ddp", 2, marks=pytest.mark.slow
        ),
        pytest.param("raise", "rank 1 failed first, at {}: KeyError", "ddp_spawn", 2, marks=pytest.mark.slow),
        pytest.param("killed", r"rank 1 .*killed by SIGKILL", "ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_one_rank_leaves_in_the_middle(tmp_path: Path, what: str, last: str, strategy: str, workers: int) -> None:
    """With exit code 0 the other one was blamed, for the connection that it had lost; workers lived on for seconds."""
    where = line(what) if "{}" in last else ""
    ends_with(run(tmp_path, what, strategy, workers), last.format(where))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "last"), [("killed", r"rank 1 .*killed by SIGKILL"), ("raise", "rank 1 failed first, at {}: KeyError")]
)
def test_under_torchrun_the_first_cause_is_the_last_that_is_said_before_its_report(
    tmp_path: Path, what: str, last: str
) -> None:
    """Rank 0 said that it had lost the others, after the line that says why."""
    agent = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = run(tmp_path, what, command=agent)
    own = [text for text in ended.lines if text.startswith(("lockstep: ", "[rank", "trainer.fit ended"))]
    assert re.search(last.format(line(what) if "{}" in last else ""), own[-1]), "\n".join(ended.lines)
    assert (ended.code, ended.left) == (1, [])


# -- Ctrl-C ------------------------------------------------------------------------------------------------


def to_all(session: int) -> None:
    """As a terminal does: loader workers, too."""
    os.killpg(session, signal.SIGINT)


def to_first(process: int) -> None:
    """As ``kill -INT`` does."""
    os.kill(process, signal.SIGINT)


@pytest.mark.parametrize(
    ("strategy", "workers", "press"),
    [
        ("ddp_fork", 2, to_first),
        pytest.param("ddp_spawn", 2, to_first, marks=pytest.mark.slow),
        pytest.param("ddp_spawn", 2, to_all, marks=pytest.mark.slow),
        pytest.param("ddp", 2, to_all, marks=pytest.mark.slow),
        pytest.param("ddp", 0, to_first, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_a_fit_with_its_result(
    tmp_path: Path, strategy: str, workers: int, press: Callable[[int], None]
) -> None:
    """One that only the parent got killed the ranks of ddp_spawn after 10 s; from a terminal, workers died of it."""
    ended = run(tmp_path, "nothing", strategy, workers, meets=press, moments=2)
    assert ended.code == 0, "\n".join(ended.lines)
    assert ended.lines.count("result interrupted by Ctrl-C") == (2 if strategy == "ddp" else 1)
    assert sum("a second Ctrl-C ends it at once" in text for text in ended.lines) == 1
    assert (ended.left, ended.seconds < at_most(SECONDS)) == ([], True)


@pytest.mark.slow  # every day in one process: tests/launch/test_ctrl_c.py, by what the main thread cannot handle
def test_ctrl_c_ends_ranks_that_wait_for_one_another_for_ever(tmp_path: Path) -> None:
    """No handler of Python's runs in a process that waits in a collective: Ctrl-C had no effect, however often."""

    def press(session: int) -> None:
        time.sleep(0.5)  # both are in the call: a handler that runs just before it tells of the Ctrl-C in other words
        to_all(session)

    ended = run(tmp_path, "deadlock", meets=press, moments=2)
    ends_with(ended, f"lockstep: interrupted by Ctrl-C: ranks 0, 1 waited in recv .{line('deadlock')}.", code=130)
    assert any("rank 0 is still in recv" in text for text in ended.lines)
