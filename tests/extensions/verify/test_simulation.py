"""`lockstep verify --simulate`: ranks without others call the same collectives, or the difference is named."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate
from lockstep.extensions.verify.processes import Ending, Server
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Request, Runs
from lockstep.extensions.verify.simulation import Simulation
from tests.extensions.verify.small_script import LOCKSTEP, LOSS, MODEL, STEP, Certify, Changes, changed

Events = list[dict[str, object]]
STEPPED: Events = [{"kind": "step", "update": update} for update in (0, 1)]


def call(name: str, line: int, shape: list[int]) -> dict[str, object]:
    where = f"train.py:{line}"
    return {"kind": "collective", "name": name, "shape": shape, "whole": True, "where": where, "stack": [where]}


class Noted(Runs):
    """Runs whose ranks have noted given events, and where one rank by itself makes its steps."""

    def __init__(self, folder: Path, by_rank: list[Events], endings: list[Ending]) -> None:
        super().__init__(Request(("train.py",), len(by_rank)), folder, Mock(Server))
        self.by_rank = by_rank
        self.endings = endings

    def on_simulated(self, world: int, steps: int) -> Recording:
        if world == 1:
            return Recording((RankRecording(self.folder, Ending("done")),))
        ranks = []
        for number, (events, ending) in enumerate(zip(self.by_rank, self.endings, strict=True)):
            folder = self.folder / f"rank-{number}"
            folder.mkdir()
            (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
            for update in (0, 1):
                (folder / f"parameters-{update}.pt").touch()
            ranks.append(RankRecording(folder, ending))
        return Recording(tuple(ranks))


def simulated(folder: Path, by_rank: list[Events], endings: list[Ending] | None = None) -> Certificate:
    noted = Noted(folder, by_rank, endings or [Ending("done")] * len(by_rank))
    return Simulation(noted.request, noted).certify()


def test_ranks_that_make_the_same_collectives_are_alike(tmp_path: Path) -> None:
    certificate = simulated(tmp_path, [[call("all_reduce", 5, [4]), *STEPPED]] * 3)
    assert certificate.verdict == ALIKE
    assert "3 simulated ranks, 2 steps" in str(certificate)
    assert (certificate.rows[0].what, certificate.rows[0].number) == ("collectives of all ranks", "1")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([call("all_reduce", 5, [3])], "ranks 0, 1: all_reduce [4] at train.py:5; rank 2: all_reduce [3]"),
        ([call("barrier", 7, [])], "rank 2: barrier None at train.py:7"),
        ([], "rank 2: none"),
    ],
)
def test_a_rank_that_makes_another_collective_is_named(other: Events, words: str, tmp_path: Path) -> None:
    usual = [call("all_reduce", 5, [4]), *STEPPED]
    certificate = simulated(tmp_path, [usual, usual, [*other, *STEPPED]])
    assert certificate.verdict == DIFFERENT
    assert words in certificate.first_difference
    assert "train.py:5" in certificate.cause


def test_a_rank_that_fails_where_one_does_not_is_named(tmp_path: Path) -> None:
    ends = [Ending("done"), Ending("failed", "RuntimeError: shape '[3, -1]' is invalid", "train.py:9")]
    certificate = simulated(tmp_path, [[], []], ends)
    assert certificate.verdict == DIFFERENT
    assert certificate.first_difference.startswith("rank 1 of 2 failed: RuntimeError: shape '[3, -1]'")
    assert certificate.cause == "the script does not support 2 ranks (train.py:9)"


def test_ranks_that_never_meet_are_no_pass(tmp_path: Path) -> None:
    certificate = simulated(tmp_path, [STEPPED, STEPPED])
    assert certificate.verdict == UNKNOWN
    assert "no rank calls a collective: create a process group" in certificate.reasons[0]


SHARDED = """\
make_model()
from torch.distributed.fsdp import fully_shard
fully_shard(model)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("changes", "verdict", "words"),
    [
        ((), ALIKE, "the same on all ranks"),
        (((MODEL + "\n", SHARDED),), ALIKE, "the same on all ranks"),
        (((STEP, STEP + "        if rank == 5:\n            dist.barrier()\n"),), DIFFERENT, "rank 5: barrier"),
        (((LOSS, "F.mse_loss(model(x).view(world, -1), y.view(world, -1))"),), DIFFERENT, "6 ranks"),
        (((LOSS, "F.mse_loss(model(x).view(3, -1), y)"),), UNKNOWN, "failed at train.py:"),
    ],
)
def test_six_ranks_are_simulated(changes: Changes, verdict: str, words: str, certify: Certify) -> None:
    certificate = certify(changed(*changes), Simulation, devices=6)
    assert certificate.verdict == verdict, str(certificate)
    assert words in str(certificate)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_a_trainer_are_simulated(certify: Certify) -> None:
    """They read what rank 0 has broadcast: ranks that ran at the same time found nothing."""
    certificate = certify(LOCKSTEP, Simulation, devices=4)
    assert certificate.verdict == ALIKE, str(certificate)
