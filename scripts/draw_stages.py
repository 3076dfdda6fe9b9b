"""Draws docs/balanced.png: a fit in two stages, of which one becomes slower, from the file that StageTimeline writes.

    python scripts/draw_stages.py            # trains, and draws docs/balanced.png
    python scripts/draw_stages.py a.csv a.png  # draws the file of another fit

The fit is a real one on two processes. Its blocks take 4 ms forwards and 8 ms backwards by sleeping, so that other work
on the machine hardly shows; from step 50 on those of rank 1 take three times as long.
"""

from __future__ import annotations

import csv
import itertools
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import StageTimeline
from lockstep.strategies import BalancedStrategy

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "balanced.png"
BLOCKS, STEPS, SLOW_FROM, FACTOR = 8, 120, 50, 3
FORWARD, BACKWARD = 0.004, 0.008
MOST_DRAWN = 4
"""Windows that are drawn by their parts: of the first split and of the last ones."""
OUTSIDE = "before and after the chain"
COLORS = {"blocks forward": "#4477aa", "backward": "#ee8866", OUTSIDE: "#ccbb44"}
"""Told apart by the colour-blind, too."""
WAITING = "#e4e4e4"

Rows = list[dict[str, str]]


class Asleep(nn.Module):
    """A block that takes as long as a device of made-up speed needs."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.factor * FORWARD)
        out = x * self.weight
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(self.factor * BACKWARD))
        return out


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(Asleep() for _ in range(BLOCKS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.chain(batch[0]).square().mean()
        return loss

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        Asleep.factor = float(FACTOR if self.global_rank == 1 and batch_idx >= SLOW_FROM else 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


# -- the picture -----------------------------------------------------------------------------------------------


def draw(rows: Rows, path: Path) -> None:
    """Draw what a micro-batch takes each rank's stages, step by step; below single windows, who computes what when."""
    seconds = [row for row in rows if row["part"] == "a micro-batch"]
    windows: dict[str, Rows] = defaultdict(list)
    for row in rows:
        if row["part"] != "a micro-batch":
            windows[row["step"]].append(row)
    steps = sorted(windows, key=int)
    steps = steps if len(steps) <= MOST_DRAWN else [steps[0], *steps[1 - MOST_DRAWN :]]
    ranks = list(dict.fromkeys(row["stages"] for row in rows))
    figure = Figure(figsize=(11, 3.4 + (0.9 + 0.5 * len(ranks)) * len(steps)), layout="constrained")
    heights = [3.0, *([0.5 + 0.5 * len(ranks)] * len(steps))]
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for stages in ranks:
        mine = [row for row in seconds if row["stages"] == stages]
        took = [1e3 * float(row["seconds"]) for row in mine]
        axes[0].plot([int(row["step"]) for row in mine], took, label=f"stage {stages}")
    took = sorted(1e3 * float(row["seconds"]) for row in seconds)
    axes[0].set_ylim(0, 1.25 * took[int(0.98 * (len(took) - 1))])  # a hiccup of the machine may go beyond
    for before, after in itertools.pairwise(seconds):
        if before["split"] != after["split"] and before["stages"] == after["stages"]:
            axes[0].axvline(int(after["step"]), color="black", linestyle="--", linewidth=0.8)
            said = f" {before['split']} to {after['split']}"
            axes[0].text(int(after["step"]), 0.98, said, transform=axes[0].get_xaxis_transform(), va="top")
    axes[0].set_xlabel("step")
    axes[0].set_ylabel("ms of a micro-batch,\nwithout waiting")
    axes[0].legend(loc="lower right", fontsize="small")
    for place, step in zip(axes[1:], steps, strict=True):
        draw_window(place, windows[step], ranks)
    parts = [Patch(color=color, label=part) for part, color in {**COLORS, "waiting": WAITING}.items()]
    figure.legend(handles=parts, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=110)


def draw_window(axes: Axes, rows: Rows, ranks: list[str]) -> None:
    """A row for each rank, the first on top; where nothing is computed, it waits."""
    first = min(float(row["begin"]) for row in rows)
    whole = max(float(row["begin"]) + float(row["seconds"]) for row in rows) - first
    names = []
    for at, stages in enumerate(ranks):
        mine = [row for row in rows if row["stages"] == stages]
        axes.barh(at, 1e3 * whole, height=0.8, color=WAITING)
        for row in mine:
            left, width = 1e3 * (float(row["begin"]) - first), 1e3 * float(row["seconds"])
            axes.barh(
                at, width, left=left, height=0.8, color=COLORS.get(row["part"], COLORS[OUTSIDE]), edgecolor="white"
            )
        blocks = " + ".join(rows[0]["split"].split()[int(stage)] for stage in stages.split())
        busy = sum(float(row["seconds"]) for row in mine) / whole
        names.append(f"stage {stages}: {blocks} blocks\n{busy:.0%} computing")
    axes.set_yticks(range(len(ranks)), names)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1e3 * whole)
    axes.set_title(f"step {rows[0]['step']}", loc="left", fontsize="medium")


def main() -> None:
    if len(sys.argv) > 1:
        source, picture = map(Path, sys.argv[1:])
    else:
        source, picture = Path(tempfile.gettempdir(), "lockstep-stages.csv"), PICTURE
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=BalancedStrategy(micro_batches=4),
            max_steps=STEPS,
            callbacks=StageTimeline(source),
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(8 * STEPS, 4)), batch_size=8))
        if not trainer.is_global_zero:
            return
    with open(source, newline="") as file:
        draw(list(csv.DictReader(file)), picture)


if __name__ == "__main__":
    main()
