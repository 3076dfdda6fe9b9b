"""`lockstep verify --simulate`: ranks that have no others to talk to make the same collectives, or are named."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from lockstep.cli.run import main
from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate
from lockstep.extensions.verify.processes import Ending, Patience, Server
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.runs import Request, Runs
from lockstep.extensions.verify.simulation import Simulation
from lockstep.extensions.verify.verification import verify
from tests.extensions.verify.small_script import LOCKSTEP, LOSS, MODEL, STEP, changed

Events = list[dict[str, object]]
GROUP: dict[str, object] = {"kind": "group", "where": "train.py:1"}
STEPPED: Events = [{"kind": "step", "update": update} for update in (0, 1)]


def call(name: str, line: int, shape: list[int]) -> dict[str, object]:
    return {"kind": "collective", "name": name, "shape": shape, "whole": True, "where": f"train.py:{line}"}


class Noted(Runs):
    """Stands for runs: gives what ranks are said to have noted, and of one rank alone that it made its steps."""

    def __init__(self, folder: Path, by_rank: list[Events], endings: list[Ending]) -> None:
        super().__init__(Request(("train.py",), len(by_rank)), folder, Mock(Server))
        self.by_rank = by_rank
        self.endings = endings

    def on_simulated(self, world: int, steps: int) -> Recording:
        if world == 1:
            return Recording((RankRecording(self.folder, Ending("done", steps)),))
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
    noted = Noted(folder, by_rank, endings or [Ending("done", 2)] * len(by_rank))
    return Simulation(noted.request, noted).certify()


def test_ranks_that_make_the_same_collectives_are_alike(tmp_path: Path) -> None:
    certificate = simulated(tmp_path, [[GROUP, call("all_reduce", 5, [4]), *STEPPED]] * 3)
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
    usual = [GROUP, call("all_reduce", 5, [4]), *STEPPED]
    certificate = simulated(tmp_path, [usual, usual, [GROUP, *other, *STEPPED]])
    assert certificate.verdict == DIFFERENT
    assert words in certificate.first
    assert "train.py:5" in certificate.cause


def test_a_rank_that_fails_where_one_does_not_is_named(tmp_path: Path) -> None:
    ends = [Ending("done", 2), Ending("failed", 0, "RuntimeError: shape '[3, -1]' is invalid", "train.py:9")]
    certificate = simulated(tmp_path, [[GROUP], [GROUP]], ends)
    assert certificate.verdict == DIFFERENT
    assert certificate.first.startswith("rank 1 of 2 failed: RuntimeError: shape '[3, -1]'")
    assert certificate.cause == "the script does not work out on 2 ranks (train.py:9)"


def test_ranks_that_never_meet_are_no_pass(tmp_path: Path) -> None:
    certificate = simulated(tmp_path, [STEPPED, STEPPED])
    assert certificate.verdict == UNKNOWN
    assert "makes no process group" in certificate.reasons[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--simulate", "1"], "--simulate: '1': give a number from 2"),
        (["--simulate", "8", "--resume"], "--simulate 8 --resume: give each in a command of its own"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["verify", "train.py", *words]) == 2
    assert sentence in capsys.readouterr().err


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
def test_six_ranks_are_simulated(
    changes: tuple[tuple[str, str], ...],
    verdict: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Server,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(changed(*changes))
    request = Request(("train.py",), 6, patience=Patience(60.0, 300.0))
    certificate = verify(request, Simulation, server)
    assert certificate.verdict == verdict, str(certificate)
    assert words in str(certificate)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_of_a_trainer_are_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """They read what rank 0 has broadcast: ranks that ran beside it found nothing."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LOCKSTEP)
    certificate = verify(Request(("train.py",), 4, patience=Patience(60.0, 300.0)), Simulation, server)
    assert certificate.verdict == ALIKE, str(certificate)
