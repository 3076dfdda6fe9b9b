"""Killed with SIGKILL anywhere, resumed from the last checkpoint: the same bits as a run that nobody disturbed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest

from lockstep.testing.crash import Kill, Life, live, survive

SCRIPT = Path(__file__).with_name("train.py")
SEEDS = range(20)


def command(folder: Path, devices: int, batches: int = 25, *more: str) -> list[str]:
    return [sys.executable, str(SCRIPT), str(folder), f"--devices={devices}", f"--batches={batches}", *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Life]:
    """What a run ends with that nobody disturbs; how it keeps its checkpoints must not matter."""

    @lru_cache
    def lived(devices: int, batches: int = 25, *more: str) -> Life:
        return live(command(tmp_path_factory.mktemp("whole"), devices, batches, *more))

    return lived


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_killed_in_its_first_save_a_run_starts_anew_and_ends_with_the_same_bits(
    tmp_path: Path, whole: Callable[..., Life]
) -> None:
    short = (1, 15, "--epochs=2")
    survive(command(tmp_path, *short), [Kill(moment="rename")], whole(*short))
    assert unfinished(tmp_path) == []


def test_when_a_rank_is_killed_two_processes_resume_to_the_same_bits(
    tmp_path: Path, whole: Callable[..., Life]
) -> None:
    short = (2, 15, "--epochs=2")
    _, resumed = survive(command(tmp_path, *short), [Kill(rank=1, step=8, delay=0.004)], whole(*short), timeout=55)
    assert "restoring from" in resumed.output


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_killed_before_there_is_a_checkpoint_a_run_starts_anew(
    devices: int, tmp_path: Path, whole: Callable[..., Life]
) -> None:
    kills = [Kill(rank=devices - 1), Kill(worker=1, step=1), Kill(moment="save")]
    *_, last = survive(command(tmp_path, devices), kills, whole(devices))
    assert "restoring from" not in last.output


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "keep"), [(1, "all"), (2, "last")])
def test_killed_at_each_stage_of_a_save_a_run_resumes_from_the_save_before(
    devices: int, keep: str, tmp_path: Path, whole: Callable[..., Life]
) -> None:
    """With ``"last"`` there is but one checkpoint, which each save replaces."""
    kills = [Kill(step=8, moment="write"), Kill(step=8, moment="rename"), Kill(rank=devices - 1, step=8, moment="save")]
    *_, last = survive(command(tmp_path, devices, 25, f"--keep={keep}"), kills, whole(devices))
    assert "restoring from" in last.output
    assert unfinished(tmp_path) == []


def fate(seed: int) -> tuple[int, int, str, list[Kill]]:
    """(devices, micro-batches of an epoch, which checkpoints to keep, deaths) of a try.

    The shortest run has 21 steps, and the last of them is saved: every death finds its moment.
    """
    draw = random.Random(seed)
    devices, batches = 1 + seed % 3, draw.choice([20, 25])
    kills = []
    for latest in draw.choice([[20], [9, 16]]):
        moment = draw.choice(["batch", "batch", "batch", "save", "write", "rename"])
        step = draw.randint(0, latest)
        if moment in ("write", "rename"):
            kills.append(Kill(step=step, moment=moment))
            continue
        victim = {"rank": draw.randrange(devices), "moment": moment}
        if draw.random() < 0.4:  # a worker, who is gone when the last epoch's data has been fetched
            kills.append(Kill(**victim, worker=draw.randrange(2), step=min(step, 16)))
        else:
            kills.append(Kill(**victim, step=step, delay=draw.choice([0.0, round(draw.uniform(0.0, 0.02), 4)])))
    return devices, batches, draw.choice(["all", "one", "link", "last"]), kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_a_run_resumes_to_the_same_bits(seed: int, tmp_path: Path, whole: Callable[..., Life]) -> None:
    devices, batches, keep, kills = fate(seed)
    lives = survive(command(tmp_path, devices, batches, f"--keep={keep}"), kills, whole(devices, batches))
    seconds = ", ".join(f"{life.seconds:.1f}" for life in lives)
    print(f"seed {seed}: {devices} processes, keep {keep}, [{'; '.join(map(str, kills))}], lives of {seconds} s")
