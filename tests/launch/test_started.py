"""What checkpoints contain about how their run was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch.started import how_started, without_secrets
from tests.loop.pieces import Slope, numbers, quiet

PRINT = """
import json, helper
from lockstep.launch.started import how_started
print(json.dumps(how_started()))
"""


def test_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(PRINT)
    (tmp_path / "helper.py").write_text("")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "3")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    command = [sys.executable, "train.py", "--lr", "0.1", "--api-key", "secret"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["command"] == ["train.py", "--lr", "0.1", "--api-key", "(not shown)"]
    assert found["folder"] == str(tmp_path)
    # files elsewhere are those of the made-up device, where the tests run on it
    assert [file for file in found["code"] if not os.path.isabs(file)] == ["helper.py", "train.py"]
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["variables"]["PL_TRAINER_MAX_EPOCHS"] == "3"
    assert "secret" not in done.stdout


@pytest.mark.parametrize(
    ("words", "stored"),
    [
        (["train.py", "--password=x", "--lr=1"], ["train.py", "--password=(not shown)", "--lr=1"]),
        (["train.py", "--token", "x", "key"], ["train.py", "--token", "(not shown)", "key"]),
        (["train.py", "--use-token", "--lr", "1"], ["train.py", "--use-token", "--lr", "1"]),
    ],
)
def test_values_that_may_be_secret_are_not_stored(words: list[str], stored: list[str]) -> None:
    assert without_secrets(words) == stored


def test_a_checkpoint_has_it(tmp_path: Path) -> None:
    trainer = quiet(max_steps=2)
    trainer.fit(Slope(), numbers(4))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved: dict[str, Any] = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["lockstep"]["started"] == how_started()
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "started" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)["lockstep"]
