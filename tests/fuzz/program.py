"""Random user programs: a module, a callback, data and settings, drawn from one seed, and what a run of them shows.

A program is written so that its result must not depend on the number of ranks: its losses are means over samples,
its logged values are reduced by what they are, and its counters hold the ids of samples. Ranks begin with different
weights; rank 0's are those of the one process.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from lockstep import Callback, LightningModule, Trainer
from lockstep.loggers import Logger
from lockstep.strategies import DDPStrategy, FSDPStrategy
from tests.tools.hooked import hooked

ENGINES: dict[str, dict[str, Any]] = {
    "in shared memory": {},
    "over TCP": {"shared_memory": False},
    "static graph": {"static_graph": True},
    "without views": {"gradient_as_bucket_view": False},
    "many buckets": {"bucket_cap_mb": 1e-4},
    "sharded optimizer": {"shard_optimizer": True},
    **hooked("communication hook"),
    "check_reduction": {"check_reduction": True},
    "shards": {"auto_wrap_policy": {nn.Linear}},
    "shards, whole between": {"sharding_strategy": "SHARD_GRAD_OP"},
}
LATE_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)
QUIET: dict[str, Any] = {
    "log_every_n_steps": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
EVENTS = ("thaw", "freeze")
LATE = {
    "add parameter": "parameter 'extra0' was added after set-up",
    "replace head": "parameter 'head.weight' was added after set-up",
    "weight norm": "parameter 'first.parametrizations.weight.original0' was added after set-up",
    "add buffer": "buffer 'shift0' was added after set-up",
    "assign state": "parameter 'first.weight' was added after set-up",
}
"""Events that are refused on several ranks."""
TRAITS = ("shared", "frozen", "unused", "norm", "checkpointed", "0-d", "hidden", "scaled gradients", "complex")
LOADERS = ("shuffled", "in order", "drop_last", "iterable", "weighted sampler", "two loaders", "two uneven loaders")
LOSSES = ("mean", "mean", "own weight", "none in some")


@dataclass(frozen=True)
class Event:
    """A change of the model in the middle of a run."""

    kind: str
    hook: str
    epoch: int
    by_callback: bool


@dataclass(frozen=True)
class Program:
    """One user's program; ``batch_size`` is that of each rank."""

    seed: int
    world: int
    samples: int
    batch_size: int
    accumulate: int
    epochs: int
    loader: str
    engine: str
    optimizer: str
    schedule: str
    clip: tuple[str, float] | None
    manual: bool
    loss: str
    traits: frozenset[str]
    events: tuple[Event, ...]
    validation: int
    """Samples to validate on; 0: no validation."""


def draw(seed: int) -> Program:
    """The program of a seed."""
    chance = random.Random(seed)
    world = chance.choice((1, 2, 2, 3, 3))
    manual = chance.random() < 0.15
    epochs = chance.choice((2, 3))
    some = [trait for trait in TRAITS if chance.random() < 0.15]
    loss = "mean" if manual else chance.choice(LOSSES)
    if loss == "none in some" and "scaled gradients" in some:
        loss = "mean"  # on_after_backward does not run where there is no loss, which is said
    loader = chance.choice(LOADERS)
    if loader == "two uneven loaders" and manual:
        loader = "two loaders"  # one loss for all cannot be right there, which is said
    events = [
        Event(chance.choice(EVENTS), chance.choice(LATE_HOOKS), chance.randrange(epochs), chance.random() < 0.5)
        for _ in range(chance.choice((0, 0, 1, 1, 2)))
    ]
    return Program(
        seed=seed,
        world=world,
        samples=chance.randint(2, 26),
        batch_size=chance.randint(1, 4),
        accumulate=1 if manual else chance.choice((1, 1, 2, 3)),
        epochs=epochs,
        loader=loader,
        engine=chance.choice(list(ENGINES)),
        optimizer=chance.choice(("sgd", "sgd", "adam")),
        schedule=chance.choice(("none", "step", "epoch", "plateau")),
        clip=None if manual else chance.choice((None, None, ("norm", 0.3), ("value", 0.05))),
        manual=manual,
        loss=loss,
        traits=frozenset(some),
        events=tuple(events),
        validation=chance.choice((0, 0, 1, 5, 9)),
    )


def alone(program: Program) -> Program:
    """The same program on one process, whose batches are those of all ranks."""
    return replace(program, world=1, batch_size=program.batch_size * program.world, engine="in shared memory")


# -- data ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Samples one after the other, without a length."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __iter__(self) -> Iterator[Any]:
        return (self._data[i] for i in range(len(self._data)))


def samples(seed: int, count: int, first: int = 0) -> TensorDataset:
    """``count`` samples of four numbers and an id, which counts from ``first``."""
    source = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=source), torch.arange(first, first + count))


def training_loader(program: Any, size: int) -> Any:
    data = samples(program.seed, program.samples)
    if program.loader == "iterable":
        return DataLoader(Stream(data), size)
    if program.loader == "weighted sampler":
        weights = torch.linspace(0.1, 1.0, len(data)).tolist()
        return DataLoader(data, size, sampler=WeightedRandomSampler(weights, len(data)))
    if program.loader.startswith("two"):
        more = 3 if "uneven" in program.loader else 0
        other = samples(program.seed + 1, program.samples + more, first=100)
        return {"a": DataLoader(data, size, shuffle=True), "b": DataLoader(other, size)}
    return DataLoader(data, size, shuffle=program.loader == "shuffled", drop_last=program.loader == "drop_last")


# -- optimizers ----------------------------------------------------------------------------------------------


def optimizer_of(kind: str, parameters: Any) -> Any:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-2)


def scheduled(optimizer: Any, schedule: str) -> Any:
    """What `configure_optimizers` returns for an optimizer and the schedule of a program."""
    if schedule == "none":
        return optimizer
    if schedule == "plateau":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "largest"}}
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": schedule}}


# -- what a run shows ----------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What one rank shows of a run."""

    seen: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Ids of the samples that user code saw, by place and epoch."""
    totals: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """What metrics that user code updates by itself say, by name, epoch by epoch."""
    rows: list[tuple[int | None, dict[str, float]]] = field(default_factory=list)
    """What the logger was given, on rank 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """Warnings."""

    def note(self, place: str, epoch: int, batch: Any) -> None:
        """Count the samples of a batch at one place of the user's code."""
        for _, ids in _parts(batch).values():
            self.seen[f"{place}, epoch {epoch}"] += ids.tolist()


class Rows(Logger):
    """Keeps what it is given."""

    def __init__(self, shown: Shown) -> None:
        super().__init__()
        self._shown = shown

    name = "rows"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is kept of them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._shown.rows.append((step, dict(metrics)))


# -- the program itself --------------------------------------------------------------------------------------


class Fuzzed(LightningModule):
    """The module of a program."""

    def __init__(self, program: Program, shown: Shown) -> None:
        super().__init__()
        from torchmetrics import MaxMetric, MeanMetric, SumMetric

        self.program, self.shown = program, shown
        self.automatic_optimization = not program.manual
        self._rank = int(os.environ.get("RANK", "0")) if program.world > 1 else 0
        torch.manual_seed(program.seed + 1000 * self._rank)  # rank 0 has what one process has
        traits = program.traits
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5) if "norm" in traits else nn.Identity()
        self.middle = nn.Linear(5, 5)
        self.last = self.middle if "shared" in traits else nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)
        if "frozen" in traits:
            self.middle.requires_grad_(False)
        if "unused" in traits:
            self.idle = nn.Linear(2, 3)
        if "0-d" in traits:
            self.factor = nn.Parameter(torch.tensor(1.5) + self._rank)
        if "complex" in traits:
            self.waves = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.hidden = [nn.Parameter(torch.randn(5).double())] if "hidden" in traits else []
        self.extras: list[str] = []
        self.shifts: list[str] = []
        self.logged_mean = MeanMetric()
        self.counted_sum = SumMetric()  # updated by hooks, never logged
        self.counted_max = MaxMetric()

    # -- model and loss

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.norm(self.first(x)))
        if "checkpointed" in self.program.traits and self.training:
            z = checkpoint(lambda t: torch.tanh(self.middle(t)), z, use_reentrant=False)  # type: ignore[assignment]
        else:
            z = torch.tanh(self.middle(z))
        z = torch.tanh(self.last(z))
        if "0-d" in self.program.traits:
            z = z * self.factor
        if "complex" in self.program.traits:
            z = torch.view_as_real(z * self.waves).sum(-1)
        for name in self.extras:
            z = z * getattr(self, name)
        for hidden in self.hidden:
            z = z + hidden
        out = self.head(z).squeeze(1)
        for name in self.shifts:
            out = out + getattr(self, name)
        return out

    def losses(self, part: Any) -> Tensor:
        x, _ = part
        return (self(x) - x.sum(1)).square()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("training_step", batch)
        parts = _parts(batch)
        each = {name: self.losses(part) for name, part in parts.items()}
        loss = torch.stack([part.mean() for part in each.values()]).sum()
        joined = torch.cat(list(each.values())).detach()
        if self.program.loader == "two uneven loaders":  # each loader has its own number of samples
            for name, part in each.items():
                self.log(f"loss {name}", part.mean(), on_step=True, on_epoch=True, batch_size=len(part))
        else:
            self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", joined.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", joined.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("samples", float(len(joined)), on_step=False, on_epoch=True, reduce_fx="sum")
        odd = torch.where(_ids(batch) == 3, float("nan"), joined)
        self.log("with NaN", odd.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.logged_mean.update(joined)
        self.log("metric", self.logged_mean, on_step=False, on_epoch=True)
        if self.program.manual:
            return self._by_hand(loss)
        if self.program.loss == "none in some" and batch_idx % 3 == 1:
            return None
        if self.program.loader == "two uneven loaders":
            return {"loss": {name: each[name].mean() if name in each else None for name in batch}}
        if self.program.loss == "own weight":
            chosen = _ids(batch) % 3 != 0
            own = torch.cat(list(each.values()))[chosen].sum() / max(1, int(chosen.sum()))
            return {"loss": own, "weight": float(chosen.sum())}
        return loss

    def _by_hand(self, loss: Tensor) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation_step", batch)
        each = self.losses(batch)
        self.log("val_loss", each.mean())
        self.log("val_largest", each.max(), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        program, everything = self.program, [*self.parameters(), *self.hidden]
        make = partial(optimizer_of, program.optimizer)
        if program.manual:
            head = {id(p) for p in self.head.parameters()}
            return [make([p for p in everything if id(p) not in head]), make([p for p in everything if id(p) in head])]
        return scheduled(make(everything), program.schedule)

    # -- counting, and changes in the middle of the run

    def note(self, place: str, batch: Any) -> None:
        if not self.trainer.sanity_checking:
            self.shown.note(place, self.current_epoch, batch)

    def change(self, hook: str, by_callback: bool = False, *, first: bool = True) -> None:
        """Play the events of one hook; ``first``: whether this is the hook's first call in the epoch."""
        if self.trainer.sanity_checking or not first:
            return
        for number, event in enumerate(self.program.events):
            before_epochs = hook in ("on_fit_start", "on_train_start")
            if (event.hook, event.by_callback) == (hook, by_callback) and (
                before_epochs or event.epoch == self.current_epoch
            ):
                self._play(event.kind, number)

    def _fresh(self, *shape: int, seed: int) -> Tensor:
        """Values that differ between ranks, rank 0's being those of one process."""
        source = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=source).double() * 0.5 + 1 + 0.1 * self._rank

    def _play(self, kind: str, number: int) -> None:
        seed = self.program.seed + number
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
        if kind == "add parameter":
            setattr(self, f"extra{number}", nn.Parameter(self._fresh(5, seed=seed)))
            self.extras.append(f"extra{number}")
            optimizer.add_param_group({"params": [getattr(self, f"extra{number}")]})
        elif kind == "replace head":
            head = nn.Linear(5, 1).double()
            with torch.no_grad():
                head.weight.copy_(self._fresh(1, 5, seed=seed))
                head.bias.copy_(self._fresh(1, seed=seed))
            self.head = head
            optimizer.add_param_group({"params": list(head.parameters())})
        elif kind == "thaw":
            self.requires_grad_(True)
        elif kind == "freeze":
            self.first.requires_grad_(False)
        elif kind == "weight norm":
            if not hasattr(self.first, "parametrizations"):
                parametrizations.weight_norm(self.first)
                late = [p for name, p in self.first.named_parameters() if "original" in name]
                optimizer.add_param_group({"params": late})
        elif kind == "add buffer":
            self.register_buffer(f"shift{number}", self._fresh(1, seed=seed))
            self.shifts.append(f"shift{number}")
        elif kind == "assign state":
            # of buffers that ranks change within a window, rank 0's count from the next window on, as under torch's DDP
            alike = {name for name, _ in self.named_buffers()} if self.program.accumulate > 1 else set()
            state = {name: value.clone() for name, value in self.state_dict().items()}
            # between forward and backward: what is computed again uses the new values of its rank
            in_use = self.program.events[number].hook == "on_before_zero_grad"
            if not (in_use and "checkpointed" in self.program.traits):
                state |= {name: value + 0.01 * self._rank for name, value in state.items() if name not in alike}
            self.load_state_dict(state, assign=True)

    def on_after_backward(self) -> None:
        if "scaled gradients" in self.program.traits:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.note("on_after_batch_transfer", batch)
        return batch

    def on_fit_start(self) -> None:
        self.change("on_fit_start")

    def on_train_start(self) -> None:
        self.change("on_train_start")

    def on_train_epoch_start(self) -> None:
        self._updates = 0
        self._zeroed = 0
        self.change("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start", batch)
        self.counted_max.update(_ids(batch).max())
        self.change("on_train_batch_start", first=batch_idx == 0)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.change("on_before_zero_grad", first=self._zeroed == 0)
        self._zeroed += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.change("on_before_optimizer_step", first=self._updates == 0)
        self._updates += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end", batch)
        self.counted_sum.update(_ids(batch).double())
        self.change("on_train_batch_end", first=batch_idx == 0)

    def on_validation_epoch_end(self) -> None:
        self.change("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        for name in ("counted_sum", "counted_max"):
            metric = getattr(self, name)
            self.shown.totals[name].append(float(metric.compute()))
            metric.reset()
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        first = optimizers[0] if isinstance(optimizers, list) else optimizers
        self.shown.rates.append(first.param_groups[0]["lr"])
        self.change("on_train_epoch_end")


def _parts(batch: Any) -> dict[str, Any]:
    """The loaders' parts of a batch, without those of which this rank has no samples."""
    return {name: part for name, part in batch.items() if part} if isinstance(batch, dict) else {"": batch}


def _ids(batch: Any) -> Tensor:
    return torch.cat([ids for _, ids in _parts(batch).values()])


class Counter(Callback):
    """A user's callback: it counts samples, logs, and changes the model."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.change("on_fit_start", True)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.change("on_train_start", True)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._zeroed = self._updates = 0
        pl_module.change("on_train_epoch_start", True)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.shown.note("callback, on_train_batch_start", trainer.current_epoch, batch)
        pl_module.change("on_train_batch_start", True, first=batch_idx == 0)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.change("on_before_zero_grad", True, first=self._zeroed == 0)
        self._zeroed += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.change("on_before_optimizer_step", True, first=self._updates == 0)
        self._updates += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shown.note("callback, on_train_batch_end", trainer.current_epoch, batch)
        pl_module.log("callback's samples", float(len(_ids(batch))), on_step=False, on_epoch=True, reduce_fx="sum")
        pl_module.change("on_train_batch_end", True, first=batch_idx == 0)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not trainer.sanity_checking:
            self.shown.note("callback, on_validation_batch_end", trainer.current_epoch, batch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.change("on_validation_epoch_end", True)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.change("on_train_epoch_end", True)


def run(program: Program) -> Shown:
    """Fit the program on the ranks that are there; gives what this rank shows."""
    logging.getLogger("lockstep").setLevel(logging.WARNING)
    shown = Shown()
    validation = None
    if program.validation:
        validation = DataLoader(samples(program.seed + 2, program.validation, first=200), program.batch_size)
    algorithm, value = program.clip or (None, None)
    kind = FSDPStrategy if program.engine.startswith("shards") else DDPStrategy
    strategy = kind(**ENGINES[program.engine]) if program.world > 1 else "auto"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = Trainer(
            accelerator="cpu",
            devices=program.world,
            strategy=strategy,
            precision="64-true",
            max_epochs=program.epochs,
            accumulate_grad_batches=program.accumulate,
            gradient_clip_val=value,
            gradient_clip_algorithm=algorithm,
            sync_batchnorm="norm" in program.traits and program.world > 1,
            callbacks=[Counter(shown)],
            logger=Rows(shown),
            **QUIET,
        )
        trainer.seed = program.seed
        module = Fuzzed(program, shown)
        trainer.fit(module, training_loader(program, program.batch_size), validation)
    shown.said = [str(warning.message) for warning in caught]
    shown.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    whole = {name: value for name, value, _ in trainer.strategy.whole_parameters()}
    shown.parameters = {name: whole[name].clone() for name, _ in module.named_parameters()}
    shown.parameters.update({f"hidden {i}": p.detach().clone() for i, p in enumerate(module.hidden)})
    shown.buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    return shown
