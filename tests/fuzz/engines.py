"""Random programs on every engine: what a fit shows, whether it runs through or goes on under another engine, beside
what one process shows of it."""

from __future__ import annotations

import logging
import os
import random
import tempfile
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule, Trainer, callbacks, strategies
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from tests.equivalence.models import cut_by_mesh
from tests.fuzz.compare import Verdict, differences, failed
from tests.fuzz.program import QUIET, Rows, Shown, optimizer_of, samples, scheduled, training_loader
from tests.tools.extensions import is_there
from tests.tools.pool import RankFailure, RankPool, RankTimeout

ENGINES: dict[str, tuple[int, int]] = {
    "auto": (1, 1),
    "ddp": (2, 2),
    "ddp over TCP": (2, 2),
    "sharded optimizer": (2, 2),
    "fsdp": (2, 2),
    "fsdp, whole between": (2, 2),
    **({"balanced": (2, 1), "one process balanced": (1, 1)} if is_there("balancing") else {}),
    **({"dp": (1, 1)} if is_there("parallel") else {}),
    "tensor parallel": (2, 1),
    "rows": (2, 2),
    "deepspeed 1": (2, 2),
    "deepspeed 2": (2, 2),
    "deepspeed 3": (2, 2),
}
"""Ranks and replicas of each."""
CHAINS = ("balanced", "one process balanced")
AVERAGES = ("", "", "", "ema", "average", "swa") if is_there("extras") else ("",)
ROUNDED = 2e-4
"""How much float32, in which DeepSpeed trains, may differ from float64, beside the largest weight."""


@dataclass(frozen=True)
class Program:
    """A program; ``batch`` is the global one, of a micro-batch."""

    seed: int
    engine: str
    on: str
    """The engine that goes on with the fit; "": it runs through."""
    at: int
    """Behind which micro-batch it is saved: 4 x the epoch + its number there."""
    style: str
    samples: int
    batch: int
    accumulate: int
    epochs: int
    loader: str
    optimizer: str
    schedule: str
    clip: tuple[str, float] | None
    average: str
    validation: int
    groups: bool
    frozen: bool
    manual: bool


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(f"engines {seed}")
    has_deepspeed = is_there("deepspeed") and find_spec("deepspeed")
    engines = [name for name in ENGINES if name != "auto" and ("deepspeed" not in name or has_deepspeed)]
    engine = r.choice(engines)
    deep = "deepspeed" in engine
    manual = r.random() < 0.15 and engine not in (*CHAINS, "dp") and not deep
    goes_on = r.random() < 0.35 and not deep
    others = [name for name in ENGINES if "deepspeed" not in name and not (manual and name in (*CHAINS, "dp"))]
    count, batch = r.randint(4, 25), r.choice((2, 4, 6))
    return Program(
        seed=seed,
        engine=engine,
        on=r.choice(others) if goes_on else "",
        at=r.randint(0, 6),
        style=r.choice(("forward", "submodules")),
        samples=count,
        batch=batch,
        accumulate=1 if manual else r.choice((1, 1, 2, 3)),
        epochs=r.choice((2, 3)),
        loader=r.choice(("shuffled", "in order", "drop_last", "iterable")),
        optimizer=r.choice(("sgd", "sgd", "adam")),
        schedule=r.choice(("none", "step", "epoch", "plateau")),
        clip=None if manual else r.choice((None, ("norm", 0.3), ("value", 0.05))),
        average="" if goes_on or deep else r.choice(AVERAGES),
        validation=r.choice((0, 3, 5, 8)),
        groups=r.random() < 0.3,
        frozen=r.random() < 0.2,
        manual=manual,
    )


def strategy_of(name: str) -> Any:
    made = {
        "ddp over TCP": lambda: DDPStrategy(shared_memory=False),
        "sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
        "fsdp, whole between": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
        "balanced": lambda: strategies.BalancedStrategy(),
        "one process balanced": lambda: strategies.BalancedStrategy(one_process=True, split="equal"),
        "tensor parallel": lambda: ModelParallelStrategy(1, 2, save_distributed_checkpoint=False),
        "rows": lambda: ModelParallelStrategy(2, 1, save_distributed_checkpoint=False),
        **{f"deepspeed {stage}": lambda stage=stage: strategies.DeepSpeedStrategy(stage=stage) for stage in (1, 2, 3)},
    }
    return made[name]() if name in made else name


class Net(LightningModule):
    """A chain of layers; steps call the module, or the chain, as the program's style is."""

    def __init__(self, program: Program, shown: Shown, rank: int) -> None:
        super().__init__()
        self.program, self.shown = program, shown
        self.automatic_optimization = not program.manual
        torch.manual_seed(program.seed + 1000 * rank)  # rank 0's count
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
        if program.frozen:
            self.net[2].requires_grad_(False)

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or isinstance(self.net[0].weight, DTensor):
            return
        cut_by_mesh(self.net, mesh, {"0": ColwiseParallel(output_layouts=Replicate())})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def losses(self, batch: Any) -> Tensor:
        x = batch[0].to(next(self.parameters()).dtype)
        out = self(x) if self.program.style == "forward" else self.net(x)
        return (out.squeeze(1) - x.sum(1)).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shown.note("training_step", self.current_epoch, batch)
        each = self.losses(batch)
        loss = each.mean()
        self.log("loss", loss, on_step=self.program.engine != "dp", on_epoch=True, batch_size=len(each))
        self.log("largest", each.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
        if not self.program.manual:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.shown.note("validation_step", self.current_epoch, batch)
        self.log("val", self.losses(batch).mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        program = self.program
        kept = [p for p in self.parameters() if p.requires_grad]
        parts: Any = [{"params": kept[:2]}, {"params": kept[2:], "lr": 0.02}] if program.groups else kept
        return scheduled(optimizer_of(program.optimizer, parts), "none" if program.manual else program.schedule)

    def on_train_epoch_end(self) -> None:
        optimizers: Any = self.optimizers()
        self.shown.rates.append(optimizers.param_groups[0]["lr"])


class SaveAt(Callback):
    """Saves the run behind one micro-batch, and ends it."""

    def __init__(self, place: int, path: str) -> None:
        self.epoch, self.batch_idx = divmod(place, 4)
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (self.epoch, self.batch_idx):
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def averaging(name: str) -> list[Any]:
    if not name:
        return []
    if name == "swa":
        return [callbacks.StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=1)]
    return [callbacks.EMAWeightAveraging(decay=0.8) if name == "ema" else callbacks.WeightAveraging()]


def run(program: Program, engine: str, path: str = "", save: bool = False) -> Shown:
    """Fit on the ranks that are there; gives what this rank shows."""
    logging.getLogger("lockstep").setLevel(logging.WARNING)
    ranks, replicas = ENGINES[engine]
    shown = Shown()
    algorithm, value = program.clip or (None, None)
    deep = "deepspeed" in engine
    callbacks: list[Any] = averaging(program.average)
    if save:
        callbacks.append(SaveAt(program.at, path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu",
            devices=2 if engine in ("one process balanced", "dp") else ranks,
            strategy=strategy_of(engine),
            precision="32-true" if deep else "64-true",
            max_epochs=program.epochs,
            accumulate_grad_batches=program.accumulate,
            gradient_clip_val=value,
            gradient_clip_algorithm=algorithm,
            callbacks=callbacks,
            logger=Rows(shown),
            num_sanity_val_steps=0,
            **QUIET,
        )
        trainer.seed = program.seed
        module = Net(program, shown, int(os.environ.get("RANK", "0")) if ranks > 1 else 0)
        validation = None
        if program.validation:
            validation = DataLoader(samples(program.seed + 2, program.validation, first=200), program.batch // replicas)
        trainer.fit(
            module,
            training_loader(program, program.batch // replicas),
            validation,
            ckpt_path=path if path and not save else None,
        )
        if save:
            return shown
        shown.metrics = {name: float(found) for name, found in trainer.callback_metrics.items()}
        whole = {name: found for name, found, _ in trainer.strategy.whole_parameters()}
    shown.parameters = {name: found.detach().clone().double() for name, found in whole.items()}
    return shown


def count_once(ranks: list[Shown], engine: str) -> list[Shown]:
    """Samples that the ranks of one replica see together count once."""
    size, replicas = ENGINES[engine]
    if size > replicas:
        for shown in ranks[1:]:
            shown.seen.clear()
    return ranks


def compare(pool: RankPool, program: Program) -> Verdict:
    """Run a program on one process and on its engines."""
    last = program.on or program.engine
    with tempfile.TemporaryDirectory(prefix="engines") as folder:
        try:
            expected = pool.run(run, program, "auto", world=1, group=False, timeout=60)[0]
        except RankFailure as error:
            return Verdict(program, "impossible", (str(error.__cause__ or error),))
        try:
            path = os.path.join(folder, "saved.ckpt") if program.on else ""
            if path:
                size = ENGINES[program.engine][0]
                pool.run(run, program, program.engine, path, True, world=size, group=False, timeout=90)
            if path and not os.path.exists(path):
                return Verdict(program, "impossible", ("the fit ends before it is saved",))
            ranks = pool.run(run, program, last, path, world=ENGINES[last][0], group=False, timeout=90)
        except (RankTimeout, RankFailure) as error:
            return failed(program, error)
    found = unlike(program, expected, count_once(ranks, last), last)
    return Verdict(program, "different" if found else "equal", tuple(found))


def unlike(program: Program, expected: Shown, ranks: list[Shown], engine: str) -> list[str]:
    """Where the ranks show something else than one process."""
    if "deepspeed" in engine:
        scale = max(float(value.abs().max()) for value in expected.parameters.values())
        return [
            f"{name!r} is off by {float((value - ranks[0].parameters[name]).abs().max()):.3g}"
            for name, value in expected.parameters.items()
            if not float((value - ranks[0].parameters[name]).abs().max()) <= ROUNDED * scale
        ]
    if program.on:  # what the first fit saw and told is not there
        for shown in (expected, *ranks):
            shown.seen.clear()
            shown.rows.clear()
            shown.rates = shown.rates[-1:]
    if engine in ("dp", *CHAINS):  # steps run on parts of a batch
        for shown in (expected, *ranks):
            shown.seen.update({name: sorted(set(ids)) for name, ids in shown.seen.items()})
    return differences(expected, ranks)
