"""Steps of a Trainer beside those of a loop by hand, of ``fully_shard`` or DeepSpeed: pair by pair, inside one fit."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lockstep import LightningModule, Trainer
from lockstep.callbacks import Callback
from lockstep.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from .race import common_start, task

LIMIT = 10**6
STRATEGIES: dict[str, Callable[[], Any]] = {
    "FULL_SHARD": FSDPStrategy,
    "SHARD_GRAD_OP": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
    "deepspeed_stage_1": lambda: DeepSpeedStrategy(stage=1),
    "deepspeed_stage_2": lambda: DeepSpeedStrategy(stage=2),
    "deepspeed_stage_3": lambda: DeepSpeedStrategy(stage=3),
    "ddp, sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
    "ddp, sharded optimizer, TCP": lambda: DDPStrategy(shard_optimizer=True, shared_memory=False),
}


class Steps(Dataset[Tensor]):
    """The batches of a task, by step; both contestants take them from a loader."""

    def __init__(self, batch: Callable[..., Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return LIMIT

    def __getitem__(self, step: int) -> Tensor:
        return self.batch(step)


class Task(LightningModule):
    """A task's model as a user writes it."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], batch: Any) -> None:
        super().__init__()
        self.model, self._loss, self._batch = model, loss, batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(self.model, batch)

    def train_dataloader(self) -> Any:
        return DataLoader(Steps(self._batch), batch_size=None)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Loop:
    """Steps by hand, of a model that is placed already: AdamW, and the batches of a task from a loader.

    Args:
        model: compiled, in a container or in shards.
        loss: of the task.
        batch: of the task.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], batch: Any) -> None:
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.batches: Iterator[Tensor] = iter(DataLoader(Steps(batch), batch_size=None))

    def step(self) -> None:
        """One of the loop."""
        batch = next(self.batches)
        self.optimizer.zero_grad()
        self.loss(self.model, batch).backward()
        self.optimizer.step()


def shard_by_hand(model: nn.Module, blocks: Iterable[nn.Module], again: bool) -> None:
    """Shard blocks and the model by torch's ``fully_shard``.

    Args:
        model: on the CPU.
        blocks: of it.
        again: let go of a block's parameters behind its forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that the Trainer's strategy chooses."""
    found = next((each for each in model.children() if isinstance(each, nn.ModuleList)), [])
    return [block for block in found if any(True for _ in block.children())]


class ByDeepSpeed:
    """The same, by ``deepspeed.initialize`` alone, with buckets as large as the Trainer's and nothing compiled."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], batch: Any, stage: int) -> None:
        import deepspeed
        from deepspeed import ops

        ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        size = sum(parameter.numel() for parameter in model.parameters())
        zero = {"stage": stage, "reduce_bucket_size": size, "allgather_bucket_size": size}
        config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": 1}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.loss = loss
        self.batches: Iterator[Tensor] = iter(DataLoader(Steps(batch), batch_size=None))

    def step(self) -> None:
        """One of the loop."""
        loss = self.loss(self.engine, next(self.batches))
        self.engine.backward(loss)
        self.engine.step()


def by_hand(kind: str, model: str) -> Loop | ByDeepSpeed:
    """The loop of a kind, "FULL_SHARD" or "deepspeed_stage_2" say, for a task."""
    if kind.startswith("deepspeed"):
        return ByDeepSpeed(*task(model), int(kind[-1]))
    made, loss, batch = task(model)
    shard_by_hand(made, repeated_blocks(made), kind == "FULL_SHARD")
    return Loop(made, loss, batch)


class Pairs(Callback):
    """Between two steps of the Trainer, a step by hand; each from a common start.

    Args:
        other: the loop by hand.
        rounds, warmup: pairs, and pairs before.

    Attributes:
        measured: seconds of a step of the "trainer" and by "hand", by the clock, and of the processor in all threads.
    """

    def __init__(self, other: Loop | ByDeepSpeed, rounds: int, warmup: int) -> None:
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


def raced(model: str, other: Loop | ByDeepSpeed, rounds: int, warmup: int, **flags: Any) -> dict[str, list[float]]:
    """What `Pairs` measures of each round, of the slower rank.

    Args:
        model: name of a task of `engine.race`.
        other: the loop by hand.
        rounds, warmup: pairs, and pairs before.
        flags: of the Trainer.
    """
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update(variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})  # the group is there already
    warnings.simplefilter("ignore")
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    pairs = Pairs(other, rounds, warmup)
    trainer = Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        callbacks=[pairs],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **flags,
    )
    trainer.fit(Task(*task(model)))
    mine = {name: seconds[:rounds] for name, seconds in pairs.measured.items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {name: [max(times) for times in zip(*(found[name] for found in every), strict=True)] for name in mine}


def race(model: str, strategy: str, other: str, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, of the slower rank, as `raced` gives them.

    Args:
        model: name of a task of `engine.race`.
        strategy: of the Trainer, a key of `STRATEGIES`.
        other: the loop by hand: "FULL_SHARD", "SHARD_GRAD_OP", or "deepspeed_stage_N".
        rounds, warmup: pairs, and pairs before.
    """
    return raced(model, by_hand(other, model), rounds, warmup, strategy=STRATEGIES[strategy]())
