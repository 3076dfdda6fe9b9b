"""A training script on two ranks that do not do the same, in one of twelve ways; runs with lockstep and with Lightning.

    python strays.py CASE --timeout 3 --devices 2 --strategy ddp

The file named by the variable EVENT gets the time (of `time.monotonic`) at which it happens.
"""

import argparse
import importlib
import inspect
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset

library = importlib.import_module(os.environ.get("LIBRARY", "lockstep"))


def happens():
    """The benchmark measures from here."""
    event = Path(os.environ["EVENT"])
    if not event.exists():
        event.write_text(f"{time.monotonic():.4f}")


class Samples(Dataset):
    """Vectors of 8 numbers; from one on they take for ever."""

    def __init__(self, slow):
        self.slow = slow

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        if index >= self.slow:
            happens()
            time.sleep(3600)  # loader
        return torch.full((8,), index / 4000)


class Net(library.LightningModule):
    """A model of 80 parameters."""

    def __init__(self, case):
        super().__init__()
        self.case = case
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    @property
    def is_now(self):
        return self.global_step == 20

    def train_dataloader(self):
        return DataLoader(Samples(160 if self.case == "loader" and self.global_rank == 1 else 4000), batch_size=4)

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        loss = self.net(batch).square().mean()
        if self.is_now:
            self.stray(self.global_rank, loss.detach())
        return loss

    def stray(self, rank, value):
        if self.case == "log" and rank == 0:
            happens()
            self.logged = value.item()
            self.log("loss", value, sync_dist=True)  # log
        if self.case == "barrier" and rank == 0:
            happens()
            self.trainer.strategy.barrier()  # barrier
        if self.case == "break":
            for number in range(3):
                if number == 2 and rank == 1:
                    happens()
                    break
                dist.all_reduce(value)  # break
        if self.case == "shape":
            happens()
            counts = torch.zeros(8 + rank)
            dist.all_reduce(counts)  # shape
        if self.case == "order":
            happens()
            if rank == 0:
                dist.all_reduce(value)  # order on rank 0
                dist.broadcast(value, 0)
            else:
                dist.broadcast(value, 0)  # order on rank 1
                dist.all_reduce(value)
        if self.case == "zero" and self.trainer.is_global_zero:
            happens()
            print("losses", self.all_gather(value))  # zero
        if self.case == "stopped" and rank == 1:
            happens()
            os.kill(os.getpid(), signal.SIGSTOP)  # stopped
        if self.case == "save" and rank == 0:
            happens()
            self.trainer.save_checkpoint("best.ckpt")  # save
        if self.case == "own" and rank == 1:
            happens()
            dist.all_reduce(value)  # own

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Sharded(library.LightningModule):
    """Layers whose weights are cut up by torch's FSDP2, by hand: no parameters of this module's own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.hold = nn.Parameter(torch.zeros(1))  # what the strategy sees
        self.layers = []

    def train_dataloader(self):
        return DataLoader(Samples(4000), batch_size=4)

    def on_fit_start(self):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        self.layers = [fully_shard(nn.Linear(8, 8), mesh=mesh) for _ in range(3)]
        parameters = [parameter for layer in self.layers for parameter in layer.parameters()]
        self.sgd = torch.optim.SGD(parameters, lr=0.01)

    def training_step(self, batch, batch_idx):
        for number, layer in enumerate(self.layers):
            if number == 1 and batch_idx == 20 and self.global_rank == 1:
                happens()
                continue
            batch = layer(batch)  # fsdp on rank 0
        self.manual_backward(batch.square().mean())  # fsdp on rank 1
        self.sgd.step()
        self.sgd.zero_grad()
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD([self.hold], lr=0.01)


class Counts(library.Callback):
    """Adds up losses over the ranks; rank 1 has nothing to add."""

    def on_train_batch_end(self, trainer, module, outputs, *args):
        if module.case != "callback" or not module.is_now:
            return
        if trainer.global_rank == 1:
            happens()
            return
        dist.all_reduce(outputs["loss"].detach())  # callback


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("--timeout", type=float, default=3)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    flags = {"hang_timeout": args.timeout}
    trainer = library.Trainer(
        accelerator=os.environ.get("LOCKSTEP_TEST_ACCELERATOR", "cpu"),
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=args.strategy,
        max_epochs=1,
        max_steps=40 if args.case == "log" else -1,  # where nobody has to wait, it goes on to its end
        logger=False,
        enable_checkpointing=False,
        callbacks=[] if args.case == "fsdp" else [Counts()],
        **{name: value for name, value in flags.items() if name in inspect.signature(library.Trainer).parameters},
    )
    net = Sharded() if args.case == "fsdp" else Net(args.case)
    trainer.fit(net)  # fit
    if args.case == "log" and trainer.is_global_zero:
        print("logged", net.logged, "and kept", trainer.callback_metrics["loss"].item())


if __name__ == "__main__":
    main()
