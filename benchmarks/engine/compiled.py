"""Compiled steps of a Trainer beside those of a loop by hand with ``torch.compile``: pair by pair, inside one fit."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lockstep import Trainer
from lockstep.callbacks import Callback

from .race import common_start, task
from .sharded import Steps, Task

KINDS = ("whole", "blocks", "ddp", "fsdp")
"""One process whose model, or whose blocks, are compiled; two ranks and their blocks, by each strategy."""


class ByHand:
    """The same, by torch's functions alone: the model or its blocks compiled, DDP or ``fully_shard``, AdamW."""

    def __init__(self, kind: str, model: str) -> None:
        made, self._loss, batch = task(model)
        self.model = _compiled(kind, made)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._batches: Iterator[Tensor] = iter(DataLoader(Steps(batch), batch_size=None))

    def step(self) -> None:
        """One of the loop."""
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self._loss(self.model, batch).backward()
        self.optimizer.step()


def _compiled(kind: str, model: nn.Module) -> nn.Module:
    if kind == "whole":
        whole: Any = torch.compile(model)
        return whole  # type: ignore[no-any-return]
    blocks: Any = model.blocks
    for block in blocks:
        block.compile()
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return model


class CompiledPairs(Callback):
    """Between two steps of the Trainer, a step by hand; each from a common start, in turns by the clock's reading."""

    def __init__(self, other: ByHand, rounds: int, warmup: int) -> None:
        self._other, self._rounds, self._warmup = other, rounds, warmup
        self.measured: dict[str, list[float]] = {name: [] for name in ("trainer", "hand", "trainer, cpu", "hand, cpu")}
        self._start = self._cpu = 0.0

    def _begin(self) -> None:
        self._start, self._cpu = common_start(), time.process_time()

    def _note(self, name: str) -> None:
        self.measured[f"{name}, cpu"].append(time.process_time() - self._cpu)
        self.measured[name].append(time.perf_counter() - self._start)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """A step of the Trainer goes from here to here: the batch's end and the fetching of the next are in it."""
        if batch_idx > self._warmup:
            self._note("trainer")
        self._begin()
        self._other.step()
        if batch_idx >= self._warmup:
            self._note("hand")
        trainer.should_stop = batch_idx >= self._rounds + self._warmup
        self._begin()


def race(kind: str, model: str, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, of the slower rank: by the clock, and of the processor in all threads.

    Args:
        kind: one of `KINDS`.
        model: name of a task of `engine.race`.
        rounds, warmup: pairs, and pairs before, in which all is compiled.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})  # the group is there already
    warnings.simplefilter("ignore")
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    pairs = CompiledPairs(ByHand(kind, model), rounds, warmup)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=kind if kind in ("ddp", "fsdp") else "auto",
        compile={"blocks": kind != "whole"},
        max_epochs=1,
        callbacks=[pairs],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Task(*task(model)))
    mine = {name: seconds[:rounds] for name, seconds in pairs.measured.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: [max(times) for times in zip(*(found[name] for found in every), strict=True)] for name in mine}
