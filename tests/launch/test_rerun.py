"""The file of a run that `lockstep run` starts anew: attempts, agents, checkpoints, ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch import attempts
from lockstep.launch.attempts import Run, Superseded, remove_records


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    attempts._entered.clear()
    yield
    attempts._entered.clear()


def attempt(folder: Path, agents: list[str], **environ: str) -> Run:
    """Rank 0 of another attempt, in a process of its own."""
    attempts._entered.clear()
    run = Run(str(folder), None, {"LOCKSTEP_RUN": "train-1", "LOCKSTEP_AGENT": agents[0], **environ})
    run.enter(agents)
    return run


def checkpoint(folder: Path, name: str) -> str:
    path = folder / name
    path.touch()
    return str(path)


def test_an_attempt_goes_on_from_what_the_one_before_has_saved_last(tmp_path: Path) -> None:
    first = attempt(tmp_path, ["a", "a"])
    assert (first.attempt, first.newest(1)) == (1, None)
    first.saved(checkpoint(tmp_path, "1.ckpt"), 1)
    first.saved(checkpoint(tmp_path, "2.ckpt"), 1)
    assert first.newest(1) is None  # it has written that itself
    second = attempt(tmp_path, ["a", "a"])
    assert (second.attempt, second.path) == (2, first.path)
    assert second.newest(1) == str(tmp_path / "2.ckpt")
    assert second.newest(2) is None


def test_agents_of_several_nodes_belong_to_one_run_as_long_as_one_of_them_stays(tmp_path: Path) -> None:
    """Rank 0 may move to another node, whose agent has restarted nothing."""
    first = attempt(tmp_path, ["a", "b"])
    first.saved(checkpoint(tmp_path, "1.ckpt"), 1)
    second = attempt(tmp_path, ["b", "c"])
    third = attempt(tmp_path, ["c", "d"])
    assert [run.attempt for run in (first, second, third)] == [1, 2, 3]
    assert third.newest(1) == str(tmp_path / "1.ckpt")
    assert attempt(tmp_path, ["e"]).newest(1) is None


def test_the_same_command_started_beside_it_is_another_run(tmp_path: Path) -> None:
    first, other = attempt(tmp_path, ["a"]), attempt(tmp_path, ["b"])
    first.saved(checkpoint(tmp_path, "1.ckpt"), 1)
    other.saved(checkpoint(tmp_path, "other.ckpt"), 1)
    assert first.path != other.path
    assert attempt(tmp_path, ["a"]).newest(1) == str(tmp_path / "1.ckpt")


def test_resume_takes_the_newest_run_that_has_left_something(tmp_path: Path) -> None:
    first, second, empty = attempt(tmp_path, ["a"]), attempt(tmp_path, ["b"]), attempt(tmp_path, ["c"])
    first.saved(checkpoint(tmp_path, "1.ckpt"), 1)
    second.saved(checkpoint(tmp_path, "2.ckpt"), 1)
    os.utime(first.path, (1, 1))
    os.utime(empty.path, (2**32, 2**32))
    resumed = attempt(tmp_path, ["d"], LOCKSTEP_RESUME="1")
    assert (resumed.path, resumed.attempt, resumed.newest(1)) == (second.path, 2, str(tmp_path / "2.ckpt"))


def test_an_earlier_attempt_is_refused(tmp_path: Path) -> None:
    """Its ranks may live on, on a node that was cut off."""
    first = attempt(tmp_path, ["a"])
    first.check()
    attempt(tmp_path, ["a"])
    for touch in (first.check, first.enter, lambda: first.saved("a", 1)):
        with pytest.raises(Superseded, match=r"restarted .* is at attempt 2; this process belongs to attempt 1"):
            touch()


def test_the_other_ranks_are_told(tmp_path: Path) -> None:
    first = attempt(tmp_path, ["a", "b"])
    attempts._entered.clear()
    other = Run(str(tmp_path), None, {"LOCKSTEP_RUN": "train-1", "LOCKSTEP_AGENT": "b"})
    assert other.check() == {}
    other.join(first.claim())
    attempt(tmp_path, ["a"])
    with pytest.raises(Superseded):
        other.check()


def test_the_agent_leaves_nothing_of_a_run_that_is_done(tmp_path: Path) -> None:
    run, other = attempt(tmp_path, ["a"]), attempt(tmp_path, ["b"])
    run.saved(run.checkpoint(1), 1)
    kept = {checkpoint(tmp_path, "epoch=1.ckpt"), checkpoint(tmp_path, Path(other.checkpoint(1)).name), other.path}
    Path(run.checkpoint(1)).touch()
    remove_records(run.path, done=False)  # it may be resumed
    assert Path(run.checkpoint(1)).exists()
    remove_records(run.path, done=True)
    assert {str(path) for path in tmp_path.iterdir()} == kept
    remove_records(other.path, done=False)  # of this one there is nothing to go on from
    assert not Path(other.path).exists()
