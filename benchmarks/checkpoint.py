"""What a checkpoint in parts costs: saving against writing the same bytes raw, and how long training stops for one.

    python benchmarks/checkpoint.py                  # 1 GB from two ranks, 9 rounds
    python benchmarks/checkpoint.py --megabytes 128 --rounds 3

Each round measures all rows, one after the other, in turns. "raw" is open, write and fsync of each rank's bytes (module
and optimizer states); "save" is ``trainer.save_checkpoint`` from its call to its return, with hashes, index and
agreement. "memcpy" copies each rank's bytes into memory that is there; "stop" is ``trainer.save_checkpoint`` with
``async_save=True`` from the second one on, when the one before has been written. The slower rank counts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if str(Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engine.pairs import ratios, turns
from lockstep import LightningModule, Trainer
from lockstep.strategies import FSDPStrategy
from tests.tools.pool import RankPool

WIDTH = 2048
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Layers(LightningModule):
    """Linear layers of 16 MiB, with Adam: three times its parameters are saved."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        count = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-5)


def fitted(megabytes: int, async_save: bool) -> Trainer:
    """A run that has made a step."""
    strategy = FSDPStrategy(state_dict_type="sharded", async_save=async_save)
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_steps=1)
    trainer.fit(Layers(megabytes), [torch.ones(1, WIDTH)])
    return trainer


def held(trainer: Trainer) -> list[Tensor]:
    """This rank's parts of the module and of its optimizer's states."""
    states = [value for each in trainer.optimizers[0].state.values() for value in each.values()]
    return [getattr(each, "_local_tensor", each).detach() for each in (*trainer.strategy.module.parameters(), *states)]


def write_raw(parts: list[Tensor], path: str) -> None:
    with open(path, "wb") as file:
        for part in parts:
            file.write(memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def timed(act: Callable[[], object]) -> float:
    """Seconds until the slower rank has done it."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    took = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measured(folder: str, megabytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each row, by round."""
    at_once, later = fitted(megabytes, False), fitted(megabytes, True)
    parts, rank = held(at_once), dist.get_rank()
    into = [torch.empty_like(part) for part in parts]
    status = later.state.status
    later.state.status = type(status).RUNNING  # a save outside of a call would be waited for
    later.save_checkpoint(f"{folder}/later.ckpt")

    def copy() -> None:
        for part, there in zip(parts, into, strict=True):
            there.copy_(part)

    rows: dict[str, Callable[[], object]] = {
        "raw": lambda: write_raw(parts, f"{folder}/raw-{rank}"),
        "save": lambda: at_once.save_checkpoint(f"{folder}/at_once.ckpt"),
        "memcpy": copy,
        "stop": lambda: later.save_checkpoint(f"{folder}/later.ckpt"),
    }
    copy()
    found: dict[str, list[float]] = {name: [] for name in rows}
    for names in turns(list(rows), rounds):
        for name in names:
            later.strategy.checkpoint_io.wait()
            found[name].append(timed(rows[name]))
            dist.barrier()
            if name == "raw":
                os.unlink(f"{folder}/raw-{rank}")
            elif name == "save" and rank == 0:
                shutil.rmtree(f"{folder}/at_once.ckpt")
    later.strategy.checkpoints.close()
    later.state.status = status
    found["bytes"] = [float(sum(part.nbytes for part in parts))]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=1000, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to measure; default: the system's for temporary files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, RankPool(2) as pool:
        found = pool.run(measured, folder, given.megabytes, given.rounds, timeout=1800)[0]
    print(f"{2 * found['bytes'][0] / 1e6:.0f} MB from two ranks, {given.rounds} rounds: medians, ratios of pairs\n")
    print("| | seconds | ratio (interval) |\n|---|---|---|")
    for name, base in (("raw", ""), ("save", "raw"), ("memcpy", ""), ("stop", "memcpy")):
        against = f"{ratios(found[name], found[base]):.2f} of {base}" if base else ""
        print(f"| {name} | {median(found[name]):.3f} | {against} |")


if __name__ == "__main__":
    main()
