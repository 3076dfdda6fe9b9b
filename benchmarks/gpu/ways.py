"""Ways to take the same training steps: by hand, in containers of DDP, by Trainers, with Accelerate."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.devices import accelerator_of
from benchmarks.overhead import QUIET

Tick = Callable[[], None]
Loss = Callable[..., Tensor]
HAND, TORCH, TORCH_HOOK, CONTAINER = "by hand", "torch's DDP", "torch's DDP, a hook", "lockstep's DDP"
TRAINER, LIGHTNING, ACCELERATE = "lockstep's Trainer", "Lightning's Trainer", "Accelerate"
SHARDED, TRAINER_SHARDED = "fully_shard by hand", "lockstep's Trainer, fsdp"
OWN_MODEL = (TORCH, TORCH_HOOK, CONTAINER, ACCELERATE, SHARDED, TRAINER_SHARDED)
"""Ways that change the model that they are given, so that each has a copy."""


@dataclass
class Work:
    """What is trained.

    Attributes:
        model: on the device.
        batch: what the loss gets beside the model, on the device.
        loss: of the model and a batch.
        optimizer: makes it for parameters.
        precision: as in ``Trainer(precision=...)``.
        device: its type.
        module: what the Trainer's fsdp has in shards, and goes on with.
    """

    model: nn.Module
    batch: tuple[Tensor, ...]
    loss: Loss
    optimizer: Callable[[Any], torch.optim.Optimizer]
    precision: str
    device: str
    module: Any = None

    def autocast(self) -> AbstractContextManager[object]:
        """What a forward runs in."""
        return torch.autocast(self.device, torch.bfloat16) if self.precision == "bf16-mixed" else nullcontext()


class Repeated:
    """A loader that gives the same batch a number of times."""

    def __init__(self, batch: tuple[Tensor, ...], steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for _ in range(self.steps):
            yield self.batch


def loop(work: Work, model: nn.Module, steps: int, tick: Tick) -> None:
    """The hand-written loop, over a model that may lie in a container."""
    optimizer = work.optimizer(model.parameters())
    for batch in Repeated(work.batch, steps):
        with work.autocast():
            loss = work.loss(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tick()


def by_hand(work: Work, steps: int, tick: Tick) -> None:
    """The loop over the model itself."""
    loop(work, work.model, steps, tick)


def in_torchs_container(work: Work, steps: int, tick: Tick, hook: bool = False) -> None:
    """The loop over torch's container, with a hook that does what torch does without, where asked for."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    container = DistributedDataParallel(work.model, gradient_as_bucket_view=True)
    if hook:
        container.register_comm_hook(None, allreduce_hook)
    loop(work, container, steps, tick)


def in_our_container(work: Work, steps: int, tick: Tick) -> None:
    """The loop over lockstep's container."""
    from lockstep import DistributedDataParallel

    loop(work, DistributedDataParallel(work.model), steps, tick)


def in_shards(work: Work, steps: int, tick: Tick) -> None:
    """The loop over a model whose blocks are cut by torch's ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(work.model, FSDPModule):
        for block in work.model.blocks:  # type: ignore[union-attr]  # the models of this way have a list of them
            fully_shard(block)
        fully_shard(work.model)
    loop(work, work.model, steps, tick)


def by_trainer(package_name: str, work: Work, steps: int, tick: Tick, **flags: Any) -> None:
    """The steps of a Trainer, which writes nothing."""
    package: Any = importlib.import_module(package_name)

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        tick: Tick

        def __init__(self) -> None:
            super().__init__()
            self.net = work.model

        def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
            return work.loss(self.net, *batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimizer(self.net.parameters())

        def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
            self.tick()

    module = work.module or Module()
    module.tick = tick
    if "strategy" in flags:
        work.module = module
    own = {"accelerator": accelerator_of(work.device), "devices": 1, "precision": work.precision}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package.Trainer(**{**QUIET, **own, **flags}).fit(module, Repeated(work.batch, steps))


def by_accelerate(work: Work, steps: int, tick: Tick) -> None:
    """The loop by Accelerate's rules."""
    package: Any = importlib.import_module("accelerate")
    precision = "bf16" if work.precision == "bf16-mixed" else "no"
    importlib.import_module("accelerate.state").AcceleratorState._reset_state(
        True
    )  # it keeps the first one's precision
    accelerator = package.Accelerator(mixed_precision=precision, cpu=work.device == "cpu")
    model, optimizer = accelerator.prepare(work.model, work.optimizer(work.model.parameters()))
    for batch in Repeated(work.batch, steps):
        with accelerator.autocast():
            loss = work.loss(model, *batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        tick()
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)


WAYS: dict[str, Callable[[Work, int, Tick], None]] = {
    HAND: by_hand,
    TORCH: in_torchs_container,
    TORCH_HOOK: lambda work, steps, tick: in_torchs_container(work, steps, tick, hook=True),
    CONTAINER: in_our_container,
    TRAINER: lambda work, steps, tick: by_trainer("lockstep", work, steps, tick),
    LIGHTNING: lambda work, steps, tick: by_trainer("lightning.pytorch", work, steps, tick),
    ACCELERATE: by_accelerate,
    SHARDED: in_shards,
    TRAINER_SHARDED: lambda work, steps, tick: by_trainer("lockstep", work, steps, tick, strategy="fsdp"),
}


def quiet_libraries() -> None:
    """Libraries say nothing below an error; they set their level when they are imported, so this comes behind it."""
    for name in ("lockstep", "lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
