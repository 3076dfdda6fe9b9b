"""`lockstep checkpoint`: what it shows, what it converts to and back, what it finds different."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint import format, sharded
from lockstep.cli.run import main
from tests.checkpoint.test_sharded import Adam, fit_to
from tests.tools.pool import RankPool


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "two.ckpt"
    ranks(2).run(fit_to, 2, "fsdp", None, str(path), timeout=60)
    return path


def test_show(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(folder)]) == 0
    said = capsys.readouterr().out
    for words in (
        "kind: folder of 7 files",
        "written by: FSDPStrategy on 2 rank(s), torch",
        "hashes: valid",
        "global_step: 2",
        "into.weight",
        "(7, 6)           float64    336 bytes",
        "AdamW: states of",
    ):
        assert words in said, said


def test_show_of_a_damaged_one(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    copy = shutil.copytree(folder, tmp_path / "copy.ckpt")
    os.truncate(copy / "__0_0.distcp", 50)
    assert main(["checkpoint", "show", str(copy), str(folder)]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_to_a_file_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, back = str(tmp_path / "one.ckpt"), str(tmp_path / "back.ckpt")
    assert main(["checkpoint", "convert", str(folder), file]) == 0
    assert main(["checkpoint", "convert", file, back]) == 0
    assert os.path.isfile(file)
    assert os.path.isdir(back)
    capsys.readouterr()
    for path in (file, back):
        assert main(["checkpoint", "diff", "--all", str(folder), path]) == 0
        assert capsys.readouterr().out == "equal\n"
    assert main(["checkpoint", "convert", file, back]) == 2
    assert "exists already" in capsys.readouterr().err


def test_to_safetensors_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("safetensors")
    weights, back = str(tmp_path / "w.safetensors"), str(tmp_path / "back.ckpt")
    assert main(["checkpoint", "convert", str(folder), weights]) == 0
    assert main(["checkpoint", "convert", weights, back]) == 0
    assert main(["checkpoint", "show", weights]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "diff", back, str(folder)]) == 0
    assert capsys.readouterr().out == "equal\n"
    module = Adam()
    module.load_state_dict(sharded.load(back)["state_dict"])


def test_diff_names_what_differs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = sharded.load(folder)
    found["state_dict"]["into.weight"][0, 1] += 0.5
    found["state_dict"]["more"] = torch.zeros(3)
    found["state_dict"]["seen"] = torch.arange(4)
    found["epoch"] = 7
    path = str(tmp_path / "changed.ckpt")
    format.save(found, path)
    assert main(["checkpoint", "diff", str(folder), path]) == 1
    said = capsys.readouterr().out
    assert "state_dict.into.weight: 1 of 42 values differ, by 0.5 at most" in said
    assert "state_dict.more: only in the second" in said
    assert "state_dict.seen: shape (5,) and (4,)" in said
    assert "epoch: 1 and 7" in said
    assert len(said.splitlines()) == 4
    found["state_dict"]["into.weight"][1, 0] = torch.nan
    format.save({**sharded.load(folder), "state_dict": {**found["state_dict"]}}, path)
    main(["checkpoint", "diff", str(folder), path])
    assert "2 of 42 values differ, by nan at most" in capsys.readouterr().out
    found["state_dict"]["into.weight"][1, 0] = 0.0
    format.save({**sharded.load(folder), "state_dict": {**found["state_dict"]}}, path)
    assert main(["checkpoint", "diff", "--atol", "1", str(folder), path]) == 1
    assert "into.weight" not in capsys.readouterr().out
