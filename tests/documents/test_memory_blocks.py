"""The code blocks of a guide to distributed training on memory and precision, with the import changed, run."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import LightningModule
from tests.documents import guide
from tests.equivalence.models import rows
from tests.loop.pieces import QUIET
from tests.tools.pool import RankPool

BLOCKS = {
    "accumulation": guide.ACCUMULATION,
    "accumulation by epoch": guide.ACCUMULATION_BY_EPOCH,
    "checkpointing": guide.CHECKPOINTING,
    "16 bits": guide.SIXTEEN_BITS,
    "bfloat16": guide.BFLOAT16,
    "offload": guide.FSDP_OFFLOAD,
    "none": "",
}


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.2)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + self.drop(self.linear(self.norm(x)).relu())


class MyTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(6, 8), nn.ModuleList(TransformerBlock() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for layer in self.layers:
            x = layer(x)
        return x


class Steps(LightningModule):
    """What the guide's classes leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = MyTransformer()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(block: str, strategy: Any = "auto") -> Any:
    import lockstep

    names: dict[str, Any] = {"L": lockstep, "MyTransformer": MyTransformer, "TransformerBlock": TransformerBlock}

    def trainer(**flags: Any) -> lockstep.Trainer:
        world = dist.get_world_size() if dist.is_initialized() else 1
        flags = {**QUIET, "max_epochs": 6, "limit_train_batches": 8, "devices": world, **flags}
        return lockstep.Trainer(**{"strategy": names.get("strategy", strategy), **flags})

    names["Trainer"] = trainer
    exec(textwrap.dedent(BLOCKS[block]).replace("lightning.pytorch", "lockstep"), names)
    made = names.get("trainer") or trainer()
    torch.manual_seed(2)
    module = type("Mine", (names["MyModule"], Steps), {})() if "MyModule" in names else Steps()
    made.fit(module, rows(32)(2))
    weights = {name: value.clone() for name, value, _ in made.strategy.whole_parameters()}
    return made.global_step, weights, list(module.state_dict()), module.model.layers[0].runs


@pytest.mark.parametrize(("block", "steps"), [("accumulation", 12), ("accumulation by epoch", 7)])
def test_accumulation(block: str, steps: int) -> None:
    assert run(block)[0] == steps


@pytest.mark.parametrize("block", ["16 bits", "bfloat16"])
def test_precision(block: str) -> None:
    assert run(block)[0] > 40


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_checkpointing(ranks: RankPool, strategy: str) -> None:
    plain, again = (ranks(2).run(run, block, strategy)[0] for block in ("none", "checkpointing"))
    assert (plain[0], plain[2]) == (again[0], again[2])
    assert all(torch.equal(value, again[1][name]) for name, value in plain[1].items())
    assert again[3] == 2 * plain[3]


def test_offload(ranks: RankPool) -> None:
    for steps, *_ in ranks(2).run(run, "offload"):
        assert steps == 48
