"""Every strategy with every precision: what a test runs, and the table in docs/precision.md that is made from it.

``python -m tests.engines.precisions`` writes the table into the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lockstep import LightningModule
from lockstep.ground.extensions import is_there
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from tests.equivalence.models import rows
from tests.loop.pieces import quiet

PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
BEGIN, END = "<!-- table: begins -->\n", "<!-- table: ends -->\n"

STRATEGIES: dict[str, tuple[Any, int]] = {
    "one device": (SingleDeviceStrategy, 1),
    **({"`dp`": (lambda: "dp", 1)} if is_there("parallel") else {}),
    "`ddp`": (DDPStrategy, 2),
    "`ddp`, sharded optimizer": (lambda: DDPStrategy(shard_optimizer=True), 2),
    "`fsdp`": (FSDPStrategy, 2),
    "`fsdp`, `SHARD_GRAD_OP`": (lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), 2),
    "`fsdp_cpu_offload`": (lambda: "fsdp_cpu_offload", 2),
    "`ModelParallelStrategy`, 1 x 2": (lambda: ModelParallelStrategy(1, 2), 2),
    "`ModelParallelStrategy`, 2 x 1": (lambda: ModelParallelStrategy(2, 1), 2),
}
"""What makes a strategy, and the number of ranks on which it is tried."""

NEAR = {"64-true": 1e-12, "32-true": 1e-5, "bf16-mixed": 0.02, "16-mixed": 0.005, "bf16-true": 0.1, "16-true": 0.02}
"""By how much the change of the weights in four steps may differ from one process's, relative to its norm."""

PAIRS = [(strategy, precision) for strategy in STRATEGIES for precision in NEAR]


class Blocks(LightningModule):
    """Linear layers, a layer norm and an embedding, in repeated blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.table = nn.Linear(6, 16), nn.Embedding(4, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or isinstance(self.blocks[0][1].weight, DTensor):
            return
        row, rows = mesh["tensor_parallel"], mesh["data_parallel"]
        for block in self.blocks:
            if row.size() > 1:
                parallelize_module(block, row, {"1": ColwiseParallel(output_layouts=Replicate())})
            if rows.size() > 1:
                fully_shard(block, mesh=rows)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.into(batch[0].to(self.into.weight.dtype)) + self.table(
            torch.arange(len(batch[0]), device=self.device) % 4
        )
        for block in self.blocks:
            x = x + block(x)
        return (x.float() - 3.0).square().mean() / 64  # so that float16 does not overflow at the first scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 64 * 0.3)


def change(strategy: str, precision: str, given: FSDPStrategy | None = None) -> Tensor:
    """The change of all weights in four steps, as one vector in float64; ``given``: in the place of a plain object."""
    make, _ = STRATEGIES[strategy]
    torch.manual_seed(3)
    module = Blocks()
    before = torch.cat([parameter.detach().flatten().double() for parameter in module.parameters()])
    world = dist.get_world_size() if dist.is_initialized() else 1
    devices = 2 if strategy == "`dp`" else world
    trainer = quiet(strategy=given or make(), devices=devices, max_steps=4, precision=precision)
    trainer.seed = 5  # of the order of data
    trainer.fit(module, rows(32)(8 // trainer.strategy.replicas.count))
    after = [value.flatten().double().cpu() for _, value, _ in trainer.strategy.whole_parameters()]
    return torch.cat(after) - before


def table() -> str:
    """The table as Markdown."""
    names = list(NEAR)
    lines = ["| | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for strategy in STRATEGIES:
        cells = [f"{NEAR[name]:g}" if (strategy, name) in PAIRS else "" for name in names]
        lines.append(f"| {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
