"""The code blocks of a guide to distributed training on DeepSpeed, with import and devices changed, run."""

from __future__ import annotations

import json
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import LightningModule
from lockstep.utilities.exceptions import MisconfigurationException
from tests.documents import guide
from tests.equivalence.models import rows
from tests.loop.pieces import QUIET
from tests.tools.pool import RankPool

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = x + self.linear(self.norm(x)).relu()
        return out


class Deep(LightningModule):
    """What the guide leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = x.square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def run(block: str, replaced: dict[str, Any], folder: str | None = None) -> Any:
    """The steps of a short fit by a block, the runs of a layer, and the error that it ended with."""
    import lockstep

    def trainer(**flags: Any) -> lockstep.Trainer:
        flags = {**QUIET, "max_steps": 2, **flags, "accelerator": "cpu", "devices": dist.get_world_size(), **replaced}
        return lockstep.Trainer(**flags)

    names: dict[str, Any] = {"Trainer": trainer, "DeepSpeedStrategy": lockstep.strategies.DeepSpeedStrategy}
    text = textwrap.dedent(block).replace("lightning.pytorch", "lockstep")
    if folder is not None:
        text = text.replace("deepspeed_config.json", f"{folder}/deepspeed_config.json")
    module = Deep()
    try:
        exec(text, names)
        made = names["trainer"] if "trainer" in names else trainer(strategy=names["strategy"])
        made.fit(module, rows(8)(2))
    except MisconfigurationException as error:
        return 0, 0, str(error)
    norm = None if made.strategy._zero is None else made.strategy._zero._clips_by
    return made.global_step, module.layers[0].runs, norm


def test_sixteen_bits_are_refused_on_a_cpu(ranks: RankPool) -> None:
    for _, _, error in ranks(2).run(run, guide.DEEPSPEED, {}, timeout=200):
        assert "does not compute in float16 on a CPU" in error
        assert 'precision="bf16-mixed"' in error
    for steps, _, _ in ranks(2).run(run, guide.DEEPSPEED, {"precision": "bf16-mixed"}, timeout=200):
        assert steps == 2


@pytest.mark.parametrize("block", [guide.DEEPSPEED_CONFIGURED, guide.DEEPSPEED_OFFLOAD])
def test_offload(ranks: RankPool, block: str) -> None:
    for steps, _, _ in ranks(2).run(run, block, {}, timeout=200):
        assert steps == 2


def test_the_config_file(ranks: RankPool, tmp_path: Path) -> None:
    """With its 16 bits it is refused here; with bfloat16 it runs, clips by its bound and recomputes layers."""
    file = tmp_path / "deepspeed_config.json"
    file.write_text(textwrap.dedent(guide.DEEPSPEED_FILE))
    for _, _, error in ranks(2).run(run, guide.DEEPSPEED_BY_FILE, {}, str(tmp_path), timeout=200):
        assert '"fp16": {"enabled": true}: DeepSpeed does not compute in float16 on a CPU' in error
    config = json.loads(guide.DEEPSPEED_FILE)
    config["bf16"] = config.pop("fp16")
    file.write_text(json.dumps(config))
    for steps, runs, bound in ranks(2).run(
        run, guide.DEEPSPEED_BY_FILE, {"precision": "bf16-true"}, str(tmp_path), timeout=200
    ):
        assert (steps, runs, bound) == (2, 4, 1.0)
