"""``lockstep submit``: the script that it makes of a command, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.cli.run import main, planned
from lockstep.ground.extensions import commands
from tests.extensions.search.fake_slurm import FakeSlurm


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print(1)\n")
    return tmp_path / "train.py"


def test_the_batch_script_of_a_command(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.py", "--nodes", "2", "--gpus-per-node", "8", "--time", "2:00:00", "--lr", "0.1", "--x", "a 'b'"]
    front = [
        "--print",
        "--python",
        "python3",
        "--partition",
        "long",
        "--sbatch",
        "exclusive",
        "--sbatch",
        "comment=a=b",
    ]
    assert main(["submit", *front, "--module", "cuda/12", "--command", "export A=$HOME", *words]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=train",
        "#SBATCH --output=slurm-%j.out",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gres=gpu:8",
        "#SBATCH --time=2:00:00",
        "#SBATCH --signal=USR1@300",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
        "#SBATCH --comment=a=b",
        "#SBATCH --partition=long",
        "",
        f"cd -- {script.parent} || exit 1",
        "module load cuda/12 || { echo 'lockstep: the module cuda/12 could not be loaded' >&2; exit 1; }",
        "export A=$HOME",
        "srun --kill-on-bad-exit=1 --export=ALL python3 train.py --lr 0.1 --x 'a '\"'\"'b'\"'\"''",
    ]


def test_a_module_in_place_of_a_script(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--print", "--python", "python3", "-m", "json.tool", "--", "--nodes", "x"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("srun --kill-on-bad-exit=1 --export=ALL python3 -m json.tool --nodes x\n")
    assert "#SBATCH --job-name=json.tool\n" in out


def test_what_follows_a_module_and_dashes_is_the_modules() -> None:
    """`lockstep run -m MODULE -- --devices 2` took the 2 for its own devices."""
    planned_words = planned(["-m", "json.tool", "--", "--devices", "2"]).words
    assert planned_words == ("-m", "json.tool", "--devices", "2")


def test_the_script_goes_to_sbatch(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    (slurm.folder / "bin" / "sbatch").write_text(f"#!/bin/sh\ncat >{tmp_path}/given\necho 77\n")
    assert main(["submit", "train.py"]) == 0
    assert capsys.readouterr().out == "submitted: job 77\n"
    assert "srun --kill-on-bad-exit=1" in (tmp_path / "given").read_text()
    (slurm.folder / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert main(["submit", "train.py"]) == 1
    assert capsys.readouterr().err == "lockstep submit: sbatch: error: invalid partition\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian.py"], "lockstep submit: trian.py does not exist (working directory: {here})"),
        ([], "lockstep submit: no script is given. Example: lockstep submit train.py"),
        (["train.py", "--nodes", "0"], "--nodes: '0' is not a whole number of at least 1"),
        (["--nods", "2", "train.py"], "lockstep submit: --nods is not an option"),
        (
            ["train.py", "--time", "5"],
            "is not longer than minutes_to_checkpoint_before_walltime (lockstep submit: --save-before) 5, in minutes",
        ),
        (["train.py", "--gpus-per-node", "2", "--tasks-per-node", "4"], "--tasks-per-node 4 contradicts"),
        (["train.py", "--sbatch", "nodes=3"], "--nodes=3 of sbatch contradicts --nodes=1 of the script: set"),
        (["train.py", "--sbatch", "a b=3"], "option --a b=3 of sbatch is not a long name"),
        (["--nodes", "2", "train.py", "--nodes", "3"], "lockstep submit: --nodes is given both before and after train"),
        (["train.py", "--command", "a\0b", "x\0y"], "'x\\x00y' contains a NUL"),
    ],
)
def test_what_cannot_be_submitted(
    script: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["submit", *words]) == 2
    assert said.format(here=os.getcwd()) in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "--help"])
    assert "--gpus-per-node N" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["trials", "--help"])
    assert "--resubmit failed|preempted|unsubmitted|TRIAL" in capsys.readouterr().out
    assert {"submit", "trials"} <= set(commands())
