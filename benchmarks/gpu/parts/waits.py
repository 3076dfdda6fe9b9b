"""Where a step waits for the device, by `torch.cuda.set_sync_debug_mode`: places and counts a step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.devices import Waits, accelerator_of, counted_waits
from benchmarks.gpu.modules import QUIET, Classifier, Stream, perceptron, rows
from lockstep import Callback, Trainer
from lockstep import callbacks as all_callbacks
from lockstep.callbacks import ModelCheckpoint
from lockstep.ground.extensions import is_there
from lockstep.strategies import DDPStrategy, FSDPStrategy

Made = tuple[Classifier, Any, dict[str, Any]]
"""A module, its loader, flags of the Trainer."""


class Watch(Callback):
    """Counts waits from a step on, once buckets are laid out and memory is there, to the end of training."""

    def __init__(self, waits: Waits, begin: int) -> None:
        self.waits, self.begin, self.steps = waits, begin, 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += self.waits.armed
        self.waits.armed = batch_idx + 1 >= self.begin and not trainer.is_last_batch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.waits.armed = False


class Logged(Classifier):
    """Logs with these flags."""

    options: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.options:
            self.log("loss", loss, **self.options)
        return loss


class Weighted(Logged):
    """Returns a weight that lies on the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "weight": (batch[1] >= 0).sum()}


class Unused(Logged):
    """A layer of it is never used."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net, metric=False)
        self.idle = nn.Linear(3, 3)


def plain(**options: Any) -> Classifier:
    """A perceptron whose step logs with these options, or nothing."""
    module = Logged(perceptron(), metric=False)
    module.options = options
    return module


def cases(steps: int) -> dict[str, tuple[Callable[[], Made], float | None]]:
    """Name -> what makes it, and the waits a step that are allowed (None: any, they are only told)."""

    def of(module: Callable[[], Classifier], loader: Any = None, **flags: Any) -> Callable[[], Made]:
        return lambda: (module(), rows(4 * steps, 4) if loader is None else loader(), flags)

    each_step = {"on_step": True, "on_epoch": True}
    found: dict[str, tuple[Callable[[], Made], float | None]] = {
        "plain": (of(plain), 0),
        "logs, step and epoch": (of(lambda: plain(**each_step)), 0),
        "clipping": (of(plain, gradient_clip_val=0.5), 0),
        "bf16-mixed": (of(plain, precision="bf16-mixed"), 0),
        "16-mixed": (of(plain, precision="16-mixed"), 1),
        "ModelCheckpoint, no save": (
            of(plain, enable_checkpointing=True, callbacks=lambda: ModelCheckpoint()),
            0,
        ),
        "progress bar": (of(lambda: plain(prog_bar=True), enable_progress_bar=True), None),
        "IterableDataset": (of(plain, lambda: DataLoader(Stream(4 * steps), 4)), 0),
        "weight on the device": (of(lambda: Weighted(perceptron(), metric=False)), None),
    }
    if is_there("extras"):
        found["average of weights"] = (of(plain, callbacks=lambda: all_callbacks.EMAWeightAveraging()), 0)
    for name, strategy in (("ddp", DDPStrategy), ("sharded optimizer", lambda: DDPStrategy(shard_optimizer=True))):
        found[f"{name}, 1 rank"] = (of(plain, strategy=strategy, gradient_clip_val=0.5), 0)
    found |= {
        "sync_dist": (of(lambda: plain(sync_dist=True, **each_step), strategy=DDPStrategy), 0),
        "IterableDataset, ddp": (of(plain, lambda: DataLoader(Stream(4 * steps), 4), strategy=DDPStrategy), 0),
        "weight on the device, ddp": (of(lambda: Weighted(perceptron(), metric=False), strategy=DDPStrategy), None),
        "unused parameter, ddp": (of(lambda: Unused(perceptron()), strategy=DDPStrategy), 0),
        "fsdp, 1 rank": (of(plain, strategy=FSDPStrategy), 0),
    }
    return found


def run(part: Part) -> None:
    """A check for each case; those with a group of ranks run in a process of the pool, which a group leaves with it."""
    steps = 4 if part.small else 30
    for name, (make, _) in cases(steps).items():
        if "strategy" in make()[2]:
            part.check(name, lambda name=name: part.ranks(1, waited, part.device, name, steps, group=False)[0])
        else:
            part.check(name, waited, part.device, name, steps)


def waited(device: str, name: str, steps: int) -> Numbers:
    """Waits a step, with their places."""
    make, allowed = cases(steps)[name]
    module, loader, flags = make()
    flags = {name: value() if callable(value) else value for name, value in flags.items()}
    given = flags.pop("callbacks", None)
    with counted_waits(device, armed=False) as waits, tempfile.TemporaryDirectory() as folder:
        watch = Watch(waits, steps // 3)
        own = {**QUIET, "accelerator": accelerator_of(device), "devices": 1, "max_epochs": 1, "limit_val_batches": 0}
        own["default_root_dir"] = folder
        Trainer(**{**own, **flags}, callbacks=[watch, *([] if given is None else [given])]).fit(module, loader)
    total = waits.a_step(max(1, watch.steps))
    numbers: Numbers = {"steps": watch.steps, "waits a step": total}
    if waits.places:
        numbers["places"] = ", ".join(f"{place} x{count}" for place, count in waits.places.most_common(5))
    if total is not None and allowed is not None:
        expect(total <= allowed, f"{total} waits a step, allowed {allowed}", numbers)
    return numbers
