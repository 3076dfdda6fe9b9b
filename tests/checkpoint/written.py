"""Checkpoints that are kept: each strategy's, at the moments at which a run can be saved, and where the run ended.

    python -m tests.checkpoint.write FORMAT

writes data/FORMAT.tar.xz and data/FORMAT.json with the tree of today. A format gets its files once: when it is raised,
the new one gets files of its own, and those of the old one stay as long as it is read. test_written.py resumes them.

The runs are alike for all strategies: N ranks train what one process trains, so one end is right for all of them.
"""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningModule, Trainer, seed_everything, strategies
from lockstep.callbacks import EarlyStopping
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.equivalence.models import cut_by_mesh
from tests.loop.pieces import quiet

BOUNDARY, WINDOW, VALIDATION, END = "at a boundary", "in a window", "in a validation", "at an epoch's end"
MOMENTS = (BOUNDARY, WINDOW, VALIDATION, END)
RESUMED = "behind a resume"
DATA = Path(__file__).with_name("data")
SAMPLES, BATCH, ACCUMULATE = 30, 4, 3  # 8 micro-batches, the last of 2 samples: windows of 3, 3 and 2


@dataclass(frozen=True)
class Run:
    """How a strategy's checkpoints are made.

    Attributes:
        ranks, replicas: the processes, and how many of them see different samples.
        strategy: makes it.
        epochs: of the whole run, in the second last of which it is saved.
        flags: of the Trainer, besides.
        single: in float32, to 1e-5.
        pickled: its checkpoints hold code, and are read where one trusts their author.
        slow: seconds that a sample takes on the last rank.
        moments: at which it is saved; DeepSpeed refuses a checkpoint in a window.
        after: another run, from whose checkpoint at a boundary it goes on, with the batch size as it was there. Else
            all replicas together have as many samples as was planned.
    """

    ranks: int
    replicas: int
    strategy: Callable[[], Any]
    epochs: int = 3
    flags: dict[str, Any] = field(default_factory=dict)
    single: bool = False
    pickled: bool = False
    slow: float = 0.0
    moments: tuple[str, ...] = MOMENTS
    after: str = ""


def deepspeed(stage: int, checkpoint_format: str) -> Run:
    return Run(
        2,
        2,
        lambda: strategies.DeepSpeedStrategy(stage=stage, checkpoint_format=checkpoint_format),
        single=True,
        pickled=checkpoint_format == "deepspeed",
        moments=(BOUNDARY, END),
    )


RUNS = {
    "one process": Run(1, 1, lambda: "auto"),
    "ddp": Run(2, 2, lambda: "ddp"),
    # windows of 12 samples in micro-batches of 6: the first of a window is saved
    "ddp, then 3 ranks": Run(3, 3, lambda: "ddp", moments=(RESUMED,), after="ddp"),
    "shard_optimizer": Run(2, 2, lambda: DDPStrategy(shard_optimizer=True)),
    # two looks at the ranks' times, of 8 windows each, lie before the checkpoint: shares are uneven by then
    "balance": Run(2, 2, lambda: "ddp", epochs=8, flags={"balance": True}, slow=0.01),
    "fsdp": Run(2, 2, FSDPStrategy),
    "fsdp in parts": Run(2, 2, lambda: FSDPStrategy(state_dict_type="sharded")),
    "tensor parallel": Run(2, 1, lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False)),
    "2 x 2 in parts": Run(4, 2, lambda: ModelParallelStrategy(2, 2)),
    "pipeline": Run(2, 1, lambda: strategies.BalancedStrategy(stages=2)),
    "deepspeed 2 in parts": deepspeed(2, "sharded"),
    "deepspeed 3": deepspeed(3, "full"),
    "deepspeed 2's own": deepspeed(2, "deepspeed"),
}


class Net(LightningModule):
    """A chain of layers under AdamW and a schedule, which logs what can be logged."""

    calls: Tensor

    def __init__(self, width: int = 4, single: bool = False, slow: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters("width", "single")
        torch.manual_seed(5)
        self.chain = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.float64))
        self.to(torch.float32 if single else torch.float64)
        self.average = torchmetrics.MeanMetric()
        self.slow, self.is_cut = slow, False

    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, ModelParallelStrategy) or self.is_cut:
            return
        cut_by_mesh(self.chain, self.device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        self.is_cut = True

    def loss(self, x: Tensor) -> Tensor:
        error: Tensor = self.chain(x).squeeze(1) - x[:, 0]
        return error.square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, number = batch
        if self.slow and self.global_rank == self.trainer.world_size - 1:
            time.sleep(self.slow * len(x))
        with torch.no_grad():
            self.calls.add_(1)
        loss = self.loss(x)
        seen = number.double()
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(x))
        self.log("sum", seen.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", seen.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.average.update(seen)
        self.log("average", self.average, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", self.loss(batch[0]), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-3, foreach=False)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Diary(Callback):
    """Keeps what each epoch said; its state is in the checkpoint."""

    def __init__(self) -> None:
        self.epochs: dict[int, dict[str, float]] = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        said = {name: float(value) for name, value in trainer.callback_metrics.items()}
        said["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        said["global_step"] = float(trainer.global_step)
        self.epochs[trainer.current_epoch] = said

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": dict(self.epochs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs.update(state["epochs"])


class SaveAtMoments(Callback):
    """Saves at some of the moments, in the second last epoch."""

    def __init__(self, folder: Path, moments: tuple[str, ...]) -> None:
        self.folder, self.moments = folder, moments

    def save(self, trainer: Trainer, moment: str) -> None:
        if trainer.current_epoch == (trainer.max_epochs or 0) - 2 and moment in self.moments:
            trainer.save_checkpoint(self.folder / moment)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if RESUMED in self.moments:
            self.save(trainer, RESUMED)
            self.moments = ()
        elif batch_idx == 2:
            self.save(trainer, BOUNDARY)
        elif batch_idx == 4:
            self.save(trainer, WINDOW)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_last_batch:
            self.save(trainer, VALIDATION)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer, END)


@dataclass
class End:
    """Where a run ended: weights, and what each epoch said."""

    weights: dict[str, list[Any]]
    epochs: dict[int, dict[str, float]]

    @classmethod
    def of(cls, read: dict[str, Any]) -> End:
        return cls(read["weights"], {int(number): said for number, said in read["epochs"].items()})


def loader(batch_size: int, single: bool, shuffle: bool) -> DataLoader[Any]:
    x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x.float() if single else x, torch.arange(SAMPLES)), batch_size, shuffle=shuffle)


def play(run: Run, of: Run, folder: Path | None = None, load: Path | None = None) -> End:
    """Train as one run does, with the epochs and the precision of another: it may go on from that one's checkpoint.

    Args:
        folder: where checkpoints are written to, or nothing.
        load: a checkpoint to go on from.
    """
    seed_everything(7, verbose=False)
    diary = Diary()
    module = Net(single=of.single, slow=of.slow if folder else 0.0)
    trainer = quiet(
        strategy=run.strategy(),
        devices=run.ranks,
        max_epochs=of.epochs,
        accumulate_grad_batches=ACCUMULATE,
        precision="32-true" if of.single else "64-true",
        val_check_interval=4,
        num_sanity_val_steps=0,
        callbacks=[
            diary,
            EarlyStopping("validation", patience=100),
            *([SaveAtMoments(folder, of.moments)] if folder else []),
        ],
        **run.flags,
    )
    planned = RUNS[of.after] if of.after else of
    batch_size = BATCH // (planned if run.after else run).replicas
    training, validation = (loader(batch_size, of.single, shuffle) for shuffle in (True, False))
    trainer.fit(module, training, validation, ckpt_path=load, weights_only=False if of.pickled and load else None)
    weights = {name: value.tolist() for name, value, _ in trainer.strategy.whole_parameters()}
    return End(weights, diary.epochs)


def differs(found: End, right: End, single: bool) -> str | None:
    """The first value that is another one, if there is any."""
    for name, values in right.weights.items():
        there, here = torch.tensor(values, dtype=torch.float64), torch.tensor(found.weights[name], dtype=torch.float64)
        worst = (there - here).abs().max().item()
        if not worst <= (1e-5 if single else 1e-12):
            return f"{name} is {worst} away"
    for epoch, said in right.epochs.items():
        for name, value in said.items():
            own = found.epochs.get(epoch, {}).get(name, float("nan"))
            if not abs(own - value) <= (1e-4 if single else 1e-6) * max(1.0, abs(value)):  # logged in float32
                return f"{name} of epoch {epoch} is {own}, not {value}"
    return None


def kind(run: Run) -> str:
    """By what runs end alike."""
    return f"{'float32' if run.single else 'float64'}, {run.epochs} epochs"


def ends(runs: Iterable[Run] = RUNS.values()) -> dict[str, End]:
    """Where one process ends, which nobody stops, by kind of run."""
    alone = RUNS["one process"]
    return {kind(run): play(alone, run) for run in {kind(run): run for run in runs}.values()}


def unpack(format: str, folder: Path) -> dict[str, End]:
    """Put the checkpoints of a format into a folder, as RUN/MOMENT; gives where its runs end."""
    with tarfile.open(DATA / f"{format}.tar.xz") as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    read = json.loads((DATA / f"{format}.json").read_text())
    return {name: End.of(end) for name, end in read.items()}


def play_of(run: str, of: str, *places: Any) -> End:
    """`play` by names, for ranks: functions in a table do not travel."""
    return play(RUNS[run], RUNS[of], *places)
