"""Killed with SIGKILL anywhere, resumed from the last checkpoint: the same bits as a run that nobody disturbed."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.crash import Kill, Life, live, survive
from tests.tools.pool import RankPool

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


# Every day on ranks of the pool, which have torch imported; marked slow, with processes that lockstep starts.
SHORT = ("--batches=15", "--epochs=2")


def ends(ranks: RankPool, folder: Path, devices: int, *more: str) -> list[CompletedProcess[str]]:
    folder.mkdir(exist_ok=True)
    words = (str(folder), f"--devices={devices}", *SHORT, *more)
    return run_script(ranks, SCRIPT, *words, folder=folder, world=devices, launched=devices > 1)


def digests(done: list[CompletedProcess[str]]) -> list[str]:
    assert [each.returncode for each in done] == [0] * len(done), done[0].stderr
    found = [line for line in done[0].stdout.splitlines() if line.startswith("digest of ")]
    assert len(found) == 3
    return found


def test_killed_in_its_first_save_a_run_starts_anew_and_ends_with_the_same_bits(
    ranks: RankPool, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    (killed,) = ends(ranks, folder, 1, "--kill", str(Kill(moment="rename")))
    assert killed.returncode == -signal.SIGKILL
    assert len(unfinished(folder)) == len([*folder.iterdir()]) == 1
    resumed = ends(ranks, folder, 1)
    assert "restoring from" not in resumed[0].stdout + resumed[0].stderr
    assert unfinished(folder) == []
    assert digests(resumed) == digests(ends(ranks, tmp_path / "whole", 1))


def test_when_a_rank_is_killed_two_processes_resume_to_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    first, second = ends(ranks, folder, 2, "--kill", str(Kill(rank=1, step=8, delay=0.004)))
    assert first.returncode != 0
    assert second.returncode == -signal.SIGKILL
    resumed = ends(ranks, folder, 2)
    assert "restoring from" in resumed[0].stdout + resumed[0].stderr
    assert digests(resumed) == digests(ends(ranks, tmp_path / "whole", 2))


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
