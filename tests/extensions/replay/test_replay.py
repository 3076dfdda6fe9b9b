"""`lockstep replay`: it trains what the run trained, and says what it cannot do."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.cli.run import main
from lockstep.extensions.replay.recording import read
from lockstep.extensions.replay.report import ReplayReport
from lockstep.extensions.replay.request import Findings, LayerNorms, ReplayRequest, SampleNorms, Script
from lockstep.extensions.replay.run_checkpoints import find
from lockstep.ground.errors import MisconfigurationException

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).with_name("planted.py")


def run_of(folder: Path, *words: str) -> None:
    command = [sys.executable, str(SCRIPT), "--record", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def losses(folder: Path) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for file in folder.glob("losses-*.txt"):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            found.setdefault(int(step), []).append(float(loss))
    return {step: sum(values) / len(values) for step, values in found.items()}


@pytest.mark.everyday(1)
@pytest.mark.parametrize(
    "words",
    [["--ranks", "2", "--strategy", "ddp"], ["--accumulate", "2"], ["--ranks", "2", "--strategy", "fsdp"]],
)
def test_a_replay_trains_what_the_run_trained(words: list[str], tmp_path: Path) -> None:
    run_of(tmp_path, *words)
    of_run, recorded = losses(tmp_path), read(tmp_path / "checkpoints")
    saved = find(str(tmp_path / "checkpoints"), 13)
    assert saved.step == 10
    devices = 2 if "--ranks" in words else 1
    request = ReplayRequest(str(tmp_path / "again"), saved.path, 13, 16, devices=devices, kind="hashes", threads=1)
    script = Script(saved.command([]), str(tmp_path), saved.started["variables"])
    script.run(request, "replay")
    again = read(request.folder)
    assert (again[10:17] == recorded[10:17]).all()
    if devices == 2:  # on another number of ranks, sums are rounded in another order
        request = replace(request, devices=1, folder=str(tmp_path / "one"))
        (found,) = script.run(request, "replay")
        for step in range(10, 17):
            assert math.isclose(found.losses[step], of_run[step], rel_tol=1e-12)
    # the run's own files are as they were
    assert (read(tmp_path / "checkpoints") == recorded).all()
    assert len([*(tmp_path / "checkpoints").glob("*.ckpt")]) == 4


OTHER = """\
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.automatic_optimization = sys.argv[1] != "manual"

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch["a"][0]).mean() + self.layer(batch["b"][0]).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


seed_everything(1)
loaders = {name: DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=4, shuffle=True) for name in "ab"}
saver = ModelCheckpoint("checkpoints", every_n_train_steps=4, save_top_k=-1)
Trainer(accelerator="cpu", max_epochs=1, logger=False, record="hashes", callbacks=saver).fit(Model(), loaders)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["manual", "several loaders"])
def test_manual_optimization_and_several_loaders(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OTHER)
    subprocess.run([sys.executable, "train.py", kind], check=True, timeout=60)
    capfd.readouterr()
    assert main(["replay", "checkpoints", "--step", "6", "--until", "7", "--without", "70"]) == 0
    out = capfd.readouterr().out
    assert "Steps 4 to 7 have the bits of the run." in out
    assert "Not in these steps: 70 of --without." in out
    if kind == "manual":
        assert "only `training_step` knows the losses" in out
        assert "without these samples" not in out
    else:
        # the places of a sample in both data sets
        assert re.search(r"^ +\[\d+, \d+\] ", out, re.MULTILINE)


@pytest.mark.slow
def test_samples_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, "--kind", "label", "--place", "77", "--stream")
    monkeypatch.chdir(tmp_path)
    words = ["replay", ".", "--step", "9", "--until", "11", "--without", "77,500", "--picture", "window.png"]
    assert main(words) == 0
    out = capfd.readouterr().out
    assert "Not in these steps: 500" in out
    rows = [line.split() for line in out.partition("without these samples\n")[2].splitlines()[:3]]
    assert [row[0] for row in rows] == ["9", "10", "11"]
    assert float(rows[0][1]) > 1e6
    assert float(rows[0][2]) < 1e2
    assert Path("window.png").stat().st_size > 10_000


@pytest.mark.slow
def test_what_a_replay_refuses_in_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path)
    monkeypatch.chdir(tmp_path)

    def error(*words: str) -> str:
        assert main(["replay", "checkpoints", *words]) == 2
        return capfd.readouterr().err.strip().splitlines()[-1]

    assert "the fit ended before step 30: max_steps=20 reached" in error("--step", "30")
    longer = ["--", str(SCRIPT), "--record", "--samples", "1001"]
    assert "1001 samples, but that of the run had 1000" in error("--step", "13", *longer)
    assert "failed with exit code 2 before step 13" in error("--step", "13", "--", str(SCRIPT), "--unknown")
    (tmp_path / "other.py").write_text("print('no training')")
    assert "ended without a fit" in error("--step", "13", "--", "other.py")


def checkpoint(file: Path, windows: int, **started: object) -> None:
    """A file with what `find` reads of a checkpoint."""
    own = {"ranks": [], "progress": {"windows": windows, "phase": "window_end"}, "started": started, "plan": {}}
    torch.save({"lockstep": {**own, "writer": {"world": 1}}, "global_step": windows}, file)


def test_the_checkpoint_before_a_step(tmp_path: Path) -> None:
    for windows in (5, 10, 15):
        checkpoint(tmp_path / f"{windows}.ckpt", windows)
    (tmp_path / "broken.ckpt").write_bytes(b"PK")
    assert find(str(tmp_path), 12).step == 10
    assert find(str(tmp_path), 10).step == 10
    assert find(str(tmp_path / "5.ckpt"), 100).step == 5
    with pytest.raises(MisconfigurationException, match="first checkpoint is at step 5"):
        find(str(tmp_path), 4)
    with pytest.raises(MisconfigurationException, match="no such file"):
        find(str(tmp_path / "absent"), 4)
    (tmp_path / "empty").mkdir()
    with pytest.raises(MisconfigurationException, match="no checkpoint of lockstep"):
        find(str(tmp_path / "empty"), 4)


def test_the_command_of_a_run(tmp_path: Path) -> None:
    def command(*words: str) -> list[str]:
        checkpoint(tmp_path / "a.ckpt", 5, command=list(words))
        return find(str(tmp_path), 5).command([])

    assert command("-u", "train.py", "--lr", "0.1") == ["train.py", "--lr", "0.1"]
    assert command("-m", "project.train", "x") == ["-m", "project.train", "x"]
    with pytest.raises(MisconfigurationException, match="secret"):
        command("train.py", "--token", "(not shown)")
    with pytest.raises(MisconfigurationException, match=r"-- train\.py arguments"):
        command()


def test_changed_code_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("one")
    code = {"train.py": "0" * 16, "gone.py": "1" * 16}
    checkpoint(tmp_path / "a.ckpt", 5, folder=str(tmp_path), code=code, commit="abcdef0123456789")
    (change,) = find(str(tmp_path), 5).changes()
    assert change == "Other code than in the run: train.py, gone.py (missing). The run was at commit abcdef012345."


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in [
        (["run"], "--step"),
        (["run", "--step", "-1"], "whole number"),
        (["run", "--step", "5", "--until", "4"], "at least 5"),
        (["run", "--step", "5", "--without", "a,b"], "list of places"),
    ]:
        assert main(["replay", *words]) == 2
        assert text in capsys.readouterr().err


def test_the_report() -> None:
    request = ReplayRequest("", "last.ckpt", 7, 8)
    samples = [
        SampleNorms(12, 0.5, 1.0, 0.5, 0, 0),
        SampleNorms(30, math.nan, math.nan, 0.5, 0, 1),
        SampleNorms(5, 9.0, 9.0, 0.5, 0, 2),
    ]
    layers = [LayerNorms("net.0", "Linear", 1.5, 0.25, 2.0), LayerNorms("net.1", "Tanh", 1.0, 0.5)]
    found = Findings({6: 1.0, 7: 2.0, 8: 3.0}, samples, layers, 4.0, 0.0, "div makes NaN in 'net.0', a.py:3")
    text = str(ReplayReport(request, [found]))
    places = [line.split()[0] for line in text.splitlines() if line.startswith("     ")]
    assert places[:3] == ["30", "5", "12"]
    assert "first not finite: div makes NaN in 'net.0', a.py:3" in text
    assert "net.1  Tanh" in text
    assert text.splitlines()[-2:] == ["     7     2", "     8     3"]
