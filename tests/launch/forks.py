"""A script that trains by strategy="ddp_fork" after all that may make a fork hang; it prints what came of it."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lockstep.callbacks.base import Callback
from lockstep.loggers.csv import CSVLogger
from lockstep.module import LightningModule
from lockstep.trainer import Trainer
from tests.loop.pieces import QUIET
from tests.tools.leaks import child_processes, shared_memory_files

WIDTH = 300  # wide enough for parallel regions


class Net(LightningModule):
    """It holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.doubled = lambda x: x * 2
        self.lock = threading.Lock()
        self.seen: list[int] = []
        self.threads = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.lock:
            self.seen.append(batch_idx)
        self.threads = torch.get_num_threads()
        loss = self.doubled(self.layer(batch[0])).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch[0][:, 0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Locked(Callback):
    """It cannot be pickled either; what of it can comes back."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rank = -1

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.rank = trainer.global_rank


class Fails(Net):
    """Rank 1 fails in its second batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 1:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a bad batch")
        return super().training_step(batch, batch_idx)


class Interrupted(Net):
    """Ctrl-C reaches the calling process alone, in the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)


def data(count: int = 20, shuffle: bool = True) -> Any:
    """Rows of numbers, the first of each its own index."""
    rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5))
    rows[:, 0] = torch.arange(count)
    return DataLoader(TensorDataset(rows), batch_size=2, shuffle=shuffle, num_workers=0)


def trained(strategy: str, root: str, threads: int, **flags: Any) -> Any:
    """Train on two ranks with so many threads each; gives the module and the Trainer."""
    torch.set_num_threads(threads)
    torch.manual_seed(3)
    module = Net()
    trainer = Trainer(
        **{**QUIET, "devices": 2, "strategy": strategy, "max_epochs": 2, **flags},
        default_root_dir=root,
    )
    trainer.fit(module, data())
    return module, trainer


def weights_of_a_rank(root: str) -> dict[str, Any]:
    """In a rank that is there: the weights after the same training by strategy="ddp"."""
    before = torch.get_num_threads()
    try:
        return trained("ddp", root, 2)[0].cpu().state_dict()
    finally:
        torch.set_num_threads(before)


def ended(module: Any) -> list[str]:
    """What a fit that goes wrong says in the end."""
    try:
        trainer = Trainer(**{**QUIET, "devices": 2, "strategy": "ddp_fork", "max_epochs": 50})
        result = trainer.fit(module, data(2000))
    except BaseException as error:
        return [type(error).__name__, *str(error).strip().splitlines()[-1:]]
    return [f"interrupted={result.interrupted}", f"{result.epochs} epochs"]


def opened(descriptor: str) -> str:
    """What it is."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "closed"


def main(root: str) -> None:
    """All of it, one after the other."""
    found: dict[str, Any] = {}
    os.environ.pop("OMP_NUM_THREADS", None)  # it would keep the ranks from their share of the cores
    torch.set_num_threads(2)
    made = torch.nn.Linear(WIDTH, WIDTH)  # parallel regions, and a backward
    made(torch.randn(2000, WIDTH)).square().mean().backward()
    torch.optim.SGD(made.parameters(), 0.1)  # imports torch's compiler, here and not in each of a dozen ranks
    atexit.register(lambda: print("the script ends"))
    signal.signal(signal.SIGTERM, lambda *_: print("the script's handler"))
    print("said before the fork")  # and not yet written
    before = child_processes(), shared_memory_files(), set(os.listdir("/proc/self/fd")), threading.active_count()

    os.environ["OMP_NUM_THREADS"] = "2"  # as somebody chose who wants two threads in each rank
    callback, logger = Locked(), CSVLogger(root, name="forked")
    logger.log_metrics({"before": 1.0}, step=0)
    module, trainer = trained("ddp_fork", root, 2, callbacks=callback, logger=logger)
    torch.save(module.state_dict(), os.path.join(root, "forked.pt"))
    found["metrics"] = sorted(trainer.callback_metrics)
    found["seen"], found["threads"], found["rank"] = len(module.seen), module.threads, callback.rank
    with open(os.path.join(logger.log_dir, "metrics.csv")) as file:
        found["rows"] = len(file.read().splitlines())
    found["usable"] = module.lock.acquire(timeout=1) and callback.lock.acquire(timeout=1)
    found["predicted"] = [part.tolist() for part in trainer.predict(module, data(7, shuffle=False))]
    two = trainer.predict(module, [data(3, shuffle=False), data(5, shuffle=False)])
    found["predicted by loader"] = [torch.cat(parts).tolist() for parts in two]

    found["raised"], found["killed"] = ended(Fails("raised")), ended(Fails("killed"))
    found["interrupted"] = ended(Interrupted())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found["group"] = ended(Net())
    dist.destroy_process_group()
    gc.collect()
    after = child_processes(), shared_memory_files(), set(os.listdir("/proc/self/fd")), threading.active_count()
    found["left"] = [
        *map(str, after[0] - before[0]),
        *(name for name in after[1] - before[1] if str(os.getpid()) in name),
        *(f"{name}: {opened(name)}" for name in after[2] - before[2] if len(after[2]) > len(before[2])),
        *(f"{after[3]} threads" for _ in range(after[3] > before[3])),
    ]
    print("found:", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
