"""The language model example: its corpus, its model, and that its loss falls."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.accelerator.left_out import strategies
from tests.scripts.in_rank import run_script
from tests.tools.extensions import is_there
from tests.tools.pool import RankPool

if not is_there("balancing"):
    pytest.skip("needs the extension balancing", allow_module_level=True)

from examples.language_model import build_gpt

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"


def test_no_byte_is_predicted_from_a_later_one() -> None:
    gpt = build_gpt(layers=2, heads=2, width=16, block=8)
    bytes_in = torch.randint(256, (2, 8))
    changed = bytes_in.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 256
    before, after = gpt(bytes_in), gpt(changed)
    assert before.shape == (2, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_the_loss_falls(ranks: RankPool, tmp_path: Path) -> None:
    flags = ["--steps=60", "--layers=1", "--heads=2", "--width=32", "--block=32", "--lr=1e-2"]
    (done,) = run_script(ranks, SCRIPT, *flags, folder=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"val_loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 6, done.stdout
    assert losses[-1] < min(3.0, losses[0] - 0.2)


SHARDED = ("fsdp", "fsdp:SHARD_GRAD_OP", "fsdp:HYBRID_SHARD", "fsdp:NO_SHARD", "fsdp_cpu_offload", "model_parallel")
STAGES = ("stage_1", "stage_2", "stage_3", "stage_2_offload", "stage_3_offload")
OF_DEEPSPEED = strategies(*(f"deepspeed_{stage}" for stage in STAGES)) if find_spec("deepspeed") else []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", [*SHARDED, *OF_DEEPSPEED])
def test_the_loss_is_that_of_ddp(ranks: RankPool, tmp_path: Path, strategy: str) -> None:
    flags = ["--steps=12", "--layers=2", "--width=64", "--block=64", "--batch-size=8"]
    found = []
    for name, world in (("ddp", 2), (strategy, 4 if strategy == "model_parallel" else 2)):
        own = [f"--strategy={name}", f"--devices={world}", *flags]
        done = run_script(ranks, SCRIPT, *own, folder=tmp_path, world=world, launched=True, timeout=200)
        assert [each.returncode for each in done] == [0] * world, [each.stderr for each in done]
        found.append(re.findall(r"^step 12: .*", done[0].stdout, re.MULTILINE))
    assert found[0] == found[1]
    assert len(found[0]) == 1
