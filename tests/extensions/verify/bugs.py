"""Texts of wrong scripts, each a change of one script: bugs with a known cause, and scripts that prove nothing."""

from __future__ import annotations

from dataclasses import dataclass

from tests.extensions.verify.small_script import SCRIPTS, Changes, replaced

BASE = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_dataset(n=96):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(n))
    return TensorDataset(x, 2 * x[:, :1] * x[:, 1:2] + x[:, 2:3])


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DDP(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
MAIN = "def main():\n"
DDP = "    model = DDP(make_model())\n"
SEED = "    torch.manual_seed(0)\n"
LAYERS = "    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))\n"
OPTIMIZER = "    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n"
LOADER = "    loader = DataLoader(dataset, batch_size=8, sampler=sampler)\n"
EPOCHS = "    for epoch in range(3):\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
LOSS = "            loss = F.mse_loss(model(x), y)\n"
CLEAR = "            optimizer.zero_grad()\n"
BACKWARD = "            loss.backward()\n"
STEP = "            optimizer.step()\n"

SHORT_EPOCHS = (("n=96", "n=48"), ("range(3)", "range(6)"))
SHARDED = (
    ("from torch.nn.parallel import DistributedDataParallel as DDP", "from torch.distributed.fsdp import fully_shard"),
    (DDP, "    model = make_model()\n    fully_shard(model[0])\n    fully_shard(model[2])\n    fully_shard(model)\n"),
)


def accumulated(number: int, backward: str = BACKWARD) -> Changes:
    """Steps of a number of micro-batches, each of which has a part of the loss."""
    return (
        (CLEAR, ""),
        (BACKWARD, f"            loss = loss / {number}\n{backward}"),
        (STEP, f"            if i % {number} == {number - 1}:\n    {STEP}    {CLEAR}"),
    )


AVERAGE = """\
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


"""
SUM = """\
            for p in model.parameters():
                dist.all_reduce(p.grad)
"""
DIVIDE = """\
                for p in model.parameters():
                    p.grad /= world_size
"""
LOCAL_NORM = """\
@torch.no_grad()
def clip_gradients(parameters, max_norm):
    grads = [p.grad.to_local() for p in parameters]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    for g in grads:
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))


"""
SUMMED_NORM = """\
def clip_gradients(parameters, max_norm):
    grads = [p.grad for p in parameters]
    total = sum(g.pow(2).sum() for g in grads)
    dist.all_reduce(total)
    for g in grads:
        g.mul_((max_norm / (total.sqrt() + 1e-6)).clamp(max=1.0))


"""
CLIP = "            clip_gradients(list(model.parameters()), 0.1)\n"
LAST_WINDOW = """\
            update = i % 4 == 3 or i == len(loader) - 1
            with contextlib.nullcontext() if update else model.no_sync():
                loss = F.mse_loss(model(x), y)
                loss = loss / 4
                loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
"""
MUON = """\
def newton_schulz(matrix, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    if x.size(0) > x.size(1):
        return newton_schulz(matrix.T, steps).T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz(buffer.to_local())
                p.to_local().sub_(group["lr"] * update)


"""
EVALUATE = """\
@torch.no_grad()
def evaluate(model, loader):
    sums = torch.zeros(2)
    for x, y in loader:
        sums += torch.stack([F.mse_loss(model(x), y, reduction="sum"), torch.tensor(float(len(y)))])
    dist.all_reduce(sums)
    error, samples = sums.tolist()
    return f"error {error / samples:.4f} on {samples:.0f} samples"


"""
RANK_READ = """\
class Net(nn.Sequential):
    def forward(self, x):
        temperature = 1.0 + 0.5 * dist.get_rank()
        return super().forward(x) / temperature


def make_model"""
SAVE = """\
def save(path, model, optimizer, done):
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epochs": done}
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()


"""
ARGUMENTS = """\
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    args = parser.parse_args()
"""
RESUME = """\
    done = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]
    for epoch in range(args.epochs - done):
"""
SCHEDULER = """\
class PreparedScheduler:
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self):
        for _ in range(dist.get_world_size()):
            self.scheduler.step()


"""
DECAY = "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=18)"


@dataclass(frozen=True)
class Bug:
    """A wrong script.

    Attributes:
        cause: the line that is wrong.
        text: the script.
        first_step: first step whose parameters are not those of one process; None if the weights do not show it.
        one_process_is_right: True if one rank trains what it should.
    """

    cause: str
    text: str
    first_step: int | None = 0
    one_process_is_right: bool = True


def bug(cause: str, *changes: tuple[str, str], first_step: int | None = 0, one_process_is_right: bool = True) -> Bug:
    return Bug(cause, replaced(BASE, *changes), first_step, one_process_is_right)


BUGS = {
    # each rank's loss is a mean over its own count, and DDP takes the mean of these means
    "mean_of_means": bug(
        "loss = F.mse_loss(model(x)[seen], y[seen])",
        (LOSS, "            seen = x[:, 0] > 0.3\n            loss = F.mse_loss(model(x)[seen], y[seen])\n"),
    ),
    # the last window of an epoch has two micro-batches, but their losses are divided by four
    "last_window": bug(
        "loss = loss / 4",
        ("import os", "import contextlib"),
        (LOSS + CLEAR + BACKWARD + STEP, LAST_WINDOW),
        first_step=1,
    ),
    # 29 validation samples: DistributedSampler repeats one, which the metric counts twice
    "padded_metrics": bug(
        "valid_sampler = DistributedSampler(valid_set, shuffle=False)",
        *SHORT_EPOCHS,
        (MAIN, EVALUATE + MAIN),
        (
            "    sampler = ",
            "    valid_set = make_dataset(29)\n    valid_sampler = DistributedSampler(valid_set, shuffle=False)\n"
            "    sampler = ",
        ),
        (LOADER, LOADER + "    valid_loader = DataLoader(valid_set, batch_size=8, sampler=valid_sampler)\n"),
        ("        if rank", "        found = evaluate(model.module, valid_loader)\n        if rank"),
        (" {loss.item():.4f}", " {loss.item():.4f}, {found}"),
        first_step=None,
    ),
    # gradients that are accumulated so far are reduced again after each micro-batch
    "doubled_gradients": bug(
        "dist.all_reduce(p.grad)",
        (DDP, "    model = make_model()\n"),
        *accumulated(3, BACKWARD + SUM),
        (
            f"    {STEP}",
            f"                for p in model.parameters():\n                    p.grad /= world_size\n    {STEP}",
        ),
    ),
    # each rank clips by the norm of its own shards
    "clip_local_norm": bug(
        "norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))",
        *SHARDED,
        (MAIN, LOCAL_NORM + MAIN),
        (STEP, CLIP + STEP),
    ),
    # the squares of averaged gradients are summed over the ranks
    "clip_sqrt_ranks": bug("dist.all_reduce(total)", (MAIN, SUMMED_NORM + MAIN), (STEP, CLIP + STEP)),
    # the module is called, and not its wrapper
    "sync_off": bug("loss = F.mse_loss(model.module(x), y)", ("model(x)", "model.module(x)")),
    # every backward is under no_sync, the last one of a window as well
    "no_sync_everywhere": bug(
        "with model.no_sync():",
        *accumulated(2),
        (LOSS, f"            with model.no_sync():\n    {LOSS}"),
        ("            loss = loss / 2\n" + BACKWARD, "                (loss / 2).backward()\n"),
    ),
    # no DistributedSampler, and the same seed on all ranks
    "same_data": bug(
        "loader = DataLoader(dataset, batch_size=8, shuffle=True)",
        ("    sampler = DistributedSampler(dataset)\n", ""),
        ("sampler=sampler", "shuffle=True"),
        (SET_EPOCH, ""),
    ),
    # each epoch has the order of the first
    "no_set_epoch": bug(
        "for epoch in range(6):", *SHORT_EPOCHS, (SET_EPOCH, ""), first_step=3, one_process_is_right=False
    ),
    # epochs are counted from zero again after a resume
    "resume_first_order": bug(
        "for epoch in range(args.epochs - done):",
        SHORT_EPOCHS[0],
        ("import os", "import argparse\nimport os"),
        (MAIN, SAVE + MAIN + ARGUMENTS),
        (EPOCHS, RESUME),
        ("        if rank", "        save(args.checkpoint, model, optimizer, done + epoch + 1)\n        if rank"),
        ("epoch {epoch}", "epoch {done + epoch}"),
        ("lr=0.05", "lr=0.05, momentum=0.9"),
        first_step=None,
    ),
    # the update of a matrix is computed from its shards
    "muon_on_shards": bug(
        "update = newton_schulz(buffer.to_local())",
        *SHARDED,
        (LAYERS, "    return nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))\n"),
        (MAIN, MUON + MAIN),
        (OPTIMIZER, "    optimizer = Muon(model.parameters())\n"),
        (LOSS, "            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))\n"),
    ),
    # the forward depends on the rank
    "rank_in_model": bug(
        "return super().forward(x) / temperature",
        ("def make_model", RANK_READ),
        ("return nn.Sequential(", "return Net("),
    ),
    # nothing broadcasts the first weights
    "different_seeds": bug(
        "torch.manual_seed(rank)",
        (SEED, ""),
        (DDP, "    torch.manual_seed(rank)\n    model = make_model()\n"),
        (MAIN, AVERAGE + MAIN),
        (STEP, "            average_gradients(model)\n" + STEP),
    ),
    # the scheduler is stepped once for each rank
    "scheduler_times_ranks": bug(
        "self.scheduler.step()",
        (MAIN, SCHEDULER + MAIN),
        (OPTIMIZER, f"{OPTIMIZER}    scheduler = PreparedScheduler({DECAY})\n"),
        (STEP, STEP + "            scheduler.step()\n"),
        first_step=1,
    ),
    # the loss is divided by the ranks, and DDP divides again
    "loss_reduced": bug(
        "loss = loss / world_size",
        (LOSS, f"{LOSS}            dist.all_reduce(loss.data)\n            loss = loss / world_size\n"),
    ),
    # only some ranks augment
    "rank_augmentation": bug(
        "x = 1.5 * x.flip(-1)", (LOSS, f"            if rank != 0:\n                x = 1.5 * x.flip(-1)\n{LOSS}")
    ),
}

WAIT = '    while not os.path.exists("there-is-no-such-file"):\n        time.sleep(0.2)\n'
REQUIRED = """\
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="the name of the data")
    parser.add_argument("--width", type=int, required=True)
    args = parser.parse_args()
"""
BAD = {
    "endless": replaced(BASE, ("import os", "import itertools"), ("range(3)", "itertools.count()")),
    "endless_without_step": replaced(BASE, ("import os", "import os\nimport time"), (DDP, WAIT + DDP)),
    "needs_arguments": replaced(BASE, ("import os", "import argparse"), (MAIN, MAIN + REQUIRED)),
    "needs_gpu": replaced(BASE, (MAIN, MAIN + "    torch.zeros(1).cuda()\n"), ('"gloo"', '"nccl"')),
    "no_step": replaced(BASE, (BACKWARD, ""), (STEP, "")),
    "three_samples": replaced(BASE, ("n=96", "n=3")),
    **{name: (SCRIPTS / f"bad/{name}.py").read_text() for name in ("not_replayable", "too_large")},
}
"""Scripts that cannot be verified, or that end otherwise than others do."""
