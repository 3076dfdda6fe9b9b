"""A training script with one bad sample: the runs that `test_planted.py` replays.

python planted.py --kind image --place 118223 --samples 1000000 --ranks 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import LightningModule, Trainer, seed_everything
from lockstep.callbacks import ModelCheckpoint

KINDS = ("pixel", "label", "text")


def sample_of(kind: str, index: int, is_bad: bool) -> tuple[Tensor, Tensor]:
    """Sample ``index``, a function of the index, so that data sets of any length cost nothing."""
    generator = torch.Generator().manual_seed(index)
    if kind == "text":
        length = 0 if is_bad else 1 + int(torch.randint(6, (), generator=generator))
        tokens = torch.zeros(8, dtype=torch.int64)
        tokens[:length] = torch.randint(1, 20, (length,), generator=generator)
        return tokens, torch.tensor(length % 2)
    image = torch.randn(1, 6, 6, generator=generator, dtype=torch.float64)
    label = image.mean()
    if is_bad and kind == "pixel":
        image[0, 2, 3] = torch.inf
    return image, label * 1e4 + 1e4 if is_bad and kind == "label" else label


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, kind: str, count: int, place: int) -> None:
        self.kind, self.count, self.place = kind, count, place

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return sample_of(self.kind, index, index == self.place)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.samples[index] for index in range(len(self.samples)))


class Model(LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(20, 8)
        self.convolution = nn.Conv2d(1, 4, 3)
        self.head = nn.Sequential(nn.Linear(8 if kind == "text" else 64, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        if self.kind == "text":
            known = (inputs > 0)[..., None]
            mean = (self.words(inputs) * known).sum(1) / known.sum(1)
            loss = nn.functional.cross_entropy(self.head(mean), target)
        else:
            features = self.convolution(inputs).relu().flatten(1)
            loss = nn.functional.mse_loss(self.head(features)[:, 0], target)
        with Path(f"losses-{self.global_rank}.txt").open("a") as file:
            file.write(f"{self.trainer.fit_loop.progress.windows} {loss.item()}\n")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="pixel")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--place", type=int, default=-1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    seed_everything(1)
    samples = Samples(options.kind, options.samples, options.place)
    # global batches of 8 samples
    loader = DataLoader(
        Stream(samples) if options.stream else samples,
        batch_size=8 // options.ranks // options.accumulate,
        shuffle=not options.stream,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=options.strategy,
        precision="64-true",
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=5, save_top_k=-1, save_on_exception=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        record="hashes" if options.record else None,
    )
    trainer.fit(Model(options.kind), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
