"""Ranks that wait for one another: which one strays, and where, is said in time; who is only slow is let be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launch.sessions import Watched, marked

SCRIPT = Path(__file__).with_name("hangs.py")
SECONDS = 12.0
"""From the event to the last word: 5 where nobody else needs the processors."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def location(mark: str) -> str:
    """The line of the script that a comment marks."""
    return marked(SCRIPT, rf"{mark}\b")


def play(folder: Path, what: str, strategy: str = "ddp", workers: int = 0, *more: str) -> Watched:
    return Watched(SCRIPT, folder, what, strategy, str(workers), *more)


@pytest.mark.parametrize(
    ("what", "strategy"),
    [  # every day: tests/launch/test_last_line.py, by ranks that gather other sizes; and test_hang.py
        pytest.param("order", "ddp", marks=pytest.mark.slow),
        pytest.param("order", "ddp_spawn", marks=pytest.mark.slow),
        pytest.param("operation", "ddp", marks=pytest.mark.slow),
        pytest.param("shape", "ddp", marks=pytest.mark.slow),
        pytest.param("later", "ddp", marks=pytest.mark.slow),
    ],
)
def test_calls_that_do_not_match_end_the_run(tmp_path: Path, what: str, strategy: str) -> None:
    """On gloo they were silent garbage, an abort without a line, or half an hour's wait."""
    run = play(tmp_path, what, strategy)
    first, second = (location(f"{what} {rank}") for rank in range(2))
    assert run.says("the ranks' calls do not match: rank 0", first, "; rank 1", second) < SECONDS
    assert run.code not in (0, None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_stopped_rank_is_named(tmp_path: Path, strategy: str) -> None:
    run = play(tmp_path, "stopped", strategy)
    assert run.says("rank 1", "stopped") < SECONDS
    assert run.code not in (0, None)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "workers"), [("loader", 0), ("loader", 2), ("long", 0)])
def test_a_rank_that_takes_its_time_is_told_and_let_be(tmp_path: Path, what: str, workers: int) -> None:
    run = play(tmp_path, what, "ddp", workers)
    where = "data loader" if what == "loader" else "its own code"
    assert (
        run.says("rank 0 is in", where, location("loader" if what == "loader" else "long 0"), "; rank 1 waits")
        < SECONDS
    )
    assert run.code == 0, "\n".join(run.lines)
    assert sum("the run continues" in line for line in run.lines) == 1


@pytest.mark.slow
def test_a_wait_that_is_too_long_ends_the_run(tmp_path: Path) -> None:
    run = play(tmp_path, "long", "ddp", 0, "ended")
    assert run.says("rank 0 is in its own code", location("long 0"), "ended after hang_kill=4 s") < SECONDS
    assert run.code not in (0, None)
