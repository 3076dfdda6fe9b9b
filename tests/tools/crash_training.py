"""The training that `crash_tries` kills: one setting of strategy, data and accumulation, told by its words.

python tests/tools/crash_training.py FOLDER "strategy=ddp data=batch workers=2 accumulate=2" --kill step=9
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

from lockstep import Callback, LightningModule, Trainer, seed_everything, strategies
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from lockstep.ground.extensions import is_there
from lockstep.strategies import DDPStrategy, FSDPStrategy, Strategy
from tests.tools.crash import Kill, KillAt, report

BATCH, BATCHES, EPOCHS, EVERY = 4, 12, 3, 3
"""Samples of a micro-batch, micro-batches of an epoch on each rank, epochs, and steps between two checkpoints."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {},
    "ddp_spawn": {"start_method": "spawn"},
    "ddp_fork": {"start_method": "fork"},
    "shard_optimizer": {"shard_optimizer": True},
    "static_graph": {"static_graph": True},
    "fsdp": {},
    "fsdp_in_parts": {"state_dict_type": "sharded"},
    "fsdp_async": {"state_dict_type": "sharded", "async_save": True},
}
"""Names of strategies, and arguments of the class that each begins with; a hook's state is made anew."""
if is_there("balancing"):
    STRATEGIES["balanced"] = {"split": [2, 3]}
    STRATEGIES["balanced_zero_bubble"] = {"schedule": "zero-bubble", "stages_per_rank": 2, "split": [1, 1, 1, 2]}
if is_there("parallel"):
    from lockstep.engines.ddp.hooks import PostLocalSGDState, PowerSGDState, post_local_sgd, power_sgd

    STRATEGIES["local_steps"] = {
        "ddp_comm_hook": post_local_sgd,
        "model_averaging_period": 4,
        "ddp_comm_state": lambda: PostLocalSGDState(start=5, local_allreduce=False),
    }
    STRATEGIES["power_sgd"] = {
        "ddp_comm_hook": power_sgd,
        "ddp_comm_state": lambda: PowerSGDState(rank=2, start=2),
    }

DATA = ("keyed", "torch", "random", "weighted", "numpy", "batch", "stream", "stateful")
"""Where the order comes from: lockstep's own, torch's, a sampler of torch's with a generator, one that draws with
replacement, one of the user's, a batch sampler of the user's, an iterable data set that is read again, one that has a
state."""


@dataclass(frozen=True)
class Setting:
    """One training."""

    strategy: str = "single"
    data: str = "keyed"
    workers: int = 0
    accumulate: int = 1

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @classmethod
    def parse(cls, text: str) -> Setting:
        """The setting that ``str`` made ``text`` of."""
        words = dict(word.split("=", 1) for word in text.split())
        given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in words.items()}
        return cls(**given)

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return 1 if self.strategy == "single" else 2

    @property
    def readers(self) -> int:
        """Ranks that see samples of their own, the first ones; the stages of a pipeline see the same."""
        return 1 if self.strategy.startswith("balanced") else self.devices

    @property
    def samples(self) -> int:
        """Length of the data set; the last global batch of a map-style one is not full."""
        whole = BATCH * BATCHES * self.readers
        if self.data in ("stream", "stateful"):
            return whole
        return whole - (3 if self.readers > 1 and self.data != "batch" else 2)  # BatchNorm needs two in each batch

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return EPOCHS * BATCHES // self.accumulate


def _sample(rows: Tensor, index: int) -> tuple[Tensor, Tensor, int]:
    """A row with noise from all generators, its label, and its number."""
    row = rows[index]
    label = (row.sum() > 0).long()
    row = row + 0.1 * torch.randn(8) + 0.1 * torch.from_numpy(np.random.randn(8)).float()
    return (row.flip(0) if random.random() < 0.5 else row), label, index


def _rows(length: int) -> Tensor:
    return torch.randn(length, 8, generator=torch.Generator().manual_seed(1))


class Noisy(Dataset[Any]):
    """Samples by number."""

    def __init__(self, length: int) -> None:
        self.rows = _rows(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return _sample(self.rows, int(index))


class Streamed(IterableDataset[Any]):
    """The same samples, shuffled by each pass."""

    def __init__(self, length: int) -> None:
        self.rows = _rows(length)

    def __iter__(self) -> Iterator[Any]:
        return (_sample(self.rows, index) for index in torch.randperm(len(self.rows)).tolist())


class Stateful(IterableDataset[Any]):
    """The same samples in an order of the epoch, going on from its state."""

    def __init__(self, length: int) -> None:
        self.rows = _rows(length)
        self.epoch = self.number = 0

    def set_epoch(self, epoch: int) -> None:
        """Another order, from its beginning."""
        self.epoch, self.number = epoch, 0

    def __iter__(self) -> Iterator[Any]:
        order = list(range(len(self.rows)))
        random.Random(self.epoch).shuffle(order)
        while self.number < len(order):
            self.number += 1
            yield _sample(self.rows, order[self.number - 1])

    def state_dict(self) -> dict[str, int]:
        """The epoch, and what was read of it."""
        return {"epoch": self.epoch, "number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.number = state["epoch"], state["number"]


class ByNumpy(Sampler[int]):
    """A permutation of a generator of NumPy's."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = np.random.default_rng(5)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.generator.permutation(self.length).tolist())


class Batches(Sampler[list[int]]):
    """Batches of neighbours, shuffled."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return -(-self.length // BATCH)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self)).tolist()
        return (list(range(at * BATCH, min(self.length, (at + 1) * BATCH))) for at in order)


def loader(setting: Setting) -> DataLoader[Any]:
    """The training data."""
    n, workers = setting.samples, setting.workers
    if setting.data in ("stream", "stateful"):
        streamed = Streamed(n) if setting.data == "stream" else Stateful(n)
        return DataLoader(streamed, batch_size=BATCH, num_workers=workers)
    data = Noisy(n)
    if setting.data == "batch":
        return DataLoader(data, batch_sampler=Batches(n), num_workers=workers)
    sampler: Sampler[int] | None = None
    if setting.data == "random":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(3))
    elif setting.data == "weighted":
        weights = [1.0 + number % 3 for number in range(n)]
        sampler = WeightedRandomSampler(weights, n, generator=torch.Generator().manual_seed(3))
    elif setting.data == "numpy":
        sampler = ByNumpy(n)
    return DataLoader(data, batch_size=BATCH, shuffle=sampler is None, sampler=sampler, num_workers=workers)


class Net(LightningModule):
    """Two layers with a norm and dropout, AdamW, a learning rate that changes with every step."""

    def __init__(self, steps: int, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), norm(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
        self.steps = steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=self.steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Witness(Callback):
    """Writes down which samples each rank trained on, and what the fit ended with.

    Args:
        folder: for the files.
        readers: ranks that see samples of their own.
    """

    def __init__(self, folder: Path, readers: int) -> None:
        self.folder, self.readers = folder, readers

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_rank >= self.readers:
            return
        numbers = ",".join(map(str, batch[2].tolist()))
        with open(self.folder / f"seen-{trainer.global_rank}", "a") as file:  # the line before may be half a one
            file.write(f"\n{trainer.current_epoch} {batch_idx} {numbers}.")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.strategy.save().optimizers
        if trainer.is_global_zero:
            report(
                weights=pl_module.state_dict(),
                optimizer=optimizers,
                metrics=(trainer.callback_metrics, trainer.current_epoch, trainer.global_step),
            )


def seen(folder: Path, ranks: int) -> dict[int, list[int]]:
    """The samples of each epoch, as the lives of a run together trained on them: a later life's word counts."""
    batches: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(ranks):
        path = folder / f"seen-{rank}"
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.endswith("."):
                words = line[:-1].split(" ")
                batches[int(words[0]), int(words[1]), rank] = [int(number) for number in words[2].split(",")]
    found: dict[int, list[int]] = {}
    for (epoch, _, _), samples in sorted(batches.items()):
        found.setdefault(epoch, []).extend(samples)
    return {epoch: sorted(samples) for epoch, samples in found.items()}


def _strategy(name: str, options: dict[str, Any]) -> Strategy | str:
    if name == "single":
        return "auto"
    if name.startswith("balanced"):
        return strategies.BalancedStrategy(**options)
    return FSDPStrategy(**options) if name.startswith("fsdp") else DDPStrategy(**options)


def train(folder: Path, setting: Setting, kill: Kill | None) -> None:
    """The fit, which goes on where an earlier life has left it."""
    seed_everything(7, verbose=False)
    options = dict(STRATEGIES[setting.strategy])
    state = options.pop("ddp_comm_state", None)
    if state is not None:
        options["ddp_comm_state"] = state()
    saving = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last=True, save_top_k=1)
    trainer = Trainer(
        accelerator="cpu",
        devices=setting.devices,
        strategy=_strategy(setting.strategy, options),
        max_epochs=EPOCHS,
        accumulate_grad_batches=setting.accumulate,
        order="torch" if setting.data == "torch" else "lockstep",
        callbacks=[
            EarlyStopping("val_loss", patience=99),
            Witness(folder, setting.readers),
            saving,
            *([KillAt(kill)] if kill else []),
        ],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held = DataLoader(Noisy(13), batch_size=BATCH)
    # a pipeline has no statistics of whole batches
    norm = nn.LayerNorm if setting.strategy.startswith("balanced") else nn.BatchNorm1d
    trainer.fit(Net(setting.steps, norm), loader(setting), held, ckpt_path="last")


def main(words: Sequence[str] | None = None) -> None:
    """Train as the words of the command line say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("setting", type=Setting.parse)
    parser.add_argument("--kill", type=Kill.parse)
    args = parser.parse_args(words)
    args.folder.mkdir(exist_ok=True)
    train(args.folder, args.setting, args.kill)


if __name__ == "__main__":
    main()
