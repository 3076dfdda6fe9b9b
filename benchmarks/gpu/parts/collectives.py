"""What goes over NCCL with one rank; over another device's backend, or gloo, with two."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.devices import accelerator_of
from benchmarks.gpu.groups import backend_of
from benchmarks.gpu.modules import QUIET, Classifier, perceptron, rows

HOOKS = ("allreduce", "fp16", "bf16", "power_sgd")
"""PowerSGD keeps an approximation of low rank: of that only the size is looked at."""
MATRICES = "fsdp, Muon for matrices"


def run(part: Part) -> None:
    """Each check with each backend."""
    for backend in ("nccl", backend_of(part.device)) if part.is_cuda else (backend_of(part.device),):
        for function in (reduced, *(hooked(name) for name in HOOKS), objects, exchanged):
            part.check(f"{function.__doc__} [{backend}]", on_ranks, part, function, backend)
        for name in ("sharded optimizer", "fsdp, clipped and saved", MATRICES):
            part.check(f"{name} [{backend}]", on_ranks, part, fitted, backend, name)
    on_cpu = "fsdp on the CPU, clipped and saved"  # of which NCCL alone carries nothing
    part.check(f"{on_cpu} [{backend_of(part.device)}]", on_ranks, part, fitted, backend_of(part.device), on_cpu)


def on_ranks(part: Part, function: Any, backend: str, *arguments: Any) -> Numbers:
    """What a function returns on the first of the ranks."""
    world = 1 if part.is_cuda else 2
    found: Numbers = part.ranks(world, in_group, function, part.device, backend, *arguments, group=not part.is_cuda)[0]
    return found


def in_group(function: Any, device: str, backend: str, *arguments: Any) -> Numbers:
    """On a rank: the function, in a group of this backend."""
    if not dist.is_initialized():
        where = torch.device("cuda", 0)
        torch.cuda.set_device(where)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=where)
    start = time.perf_counter()
    numbers: Numbers = function(device, *arguments)
    return {"ranks": dist.get_world_size(), **numbers, "ms": round(1e3 * (time.perf_counter() - start), 1)}


# -- in a loop of one's own ------------------------------------------------------------------------------------


def network(device: str) -> nn.Module:
    """Two sizes of gradients."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(70, 70), nn.Tanh(), nn.Linear(70, 5)).to(device)


def batch(step: int, rank: int, device: str) -> Tensor:
    """That of a rank's step."""
    return torch.randn(6, 70, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)


def gradients(net: nn.Module) -> list[Tensor]:
    """Copies."""
    return [p.grad.detach().clone() for p in net.parameters() if p.grad is not None]


def averaged(device: str, hook: str | None, tolerance: float) -> Numbers:
    """The largest difference of averaged gradients from those of one process, over some steps."""
    from lockstep.engines.ddp.reducer import Reducer
    from lockstep.engines.ddp.transport import AllReduce
    from lockstep.extensions.parallel import hooks
    from lockstep.extensions.parallel.hooks.hook_transport import attach_hook

    net, plain = network(device), network(device)
    reducer = Reducer(net.named_parameters(), bucket_cap_mb=0.01, transport=AllReduce(None))
    if hook is not None:
        state = {"power_sgd": lambda: hooks.PowerSGDState(rank=5, start=2)}.get(hook)
        attach_hook(reducer, state() if state else None, getattr(hooks, hook))
    world, largest = dist.get_world_size(), 0.0
    for step in range(4):
        plain.zero_grad()
        for rank in range(world):
            (plain(batch(step, rank, device)).square().mean() / world).backward()
        net.zero_grad()
        loss = net(batch(step, dist.get_rank(), device)).square().mean()
        reducer.prepare()
        loss.backward()
        reducer.finish()
        right = gradients(plain)
        scale = max(float(each.abs().max()) for each in right)
        pairs = zip(gradients(net), right, strict=True)
        largest = max(largest, *(float((one - other).abs().max()) / scale for one, other in pairs))
    reducer.detach()
    numbers = {"largest difference": largest}
    expect(largest <= tolerance, "the gradients differ", numbers)
    return numbers


def reduced(device: str) -> Numbers:
    """gradients by the reducer"""
    return averaged(device, None, 1e-5)


def hooked(name: str) -> Any:
    """A check of one communication hook."""

    def one(device: str) -> Numbers:
        return averaged(device, name, {"allreduce": 1e-5, "power_sgd": 2.0}.get(name, 0.05))

    one.__doc__ = f"gradients by the hook {name}"
    return one


def objects(device: str) -> Numbers:
    """objects with tensors of the device"""
    from lockstep.ground import comm

    rank, world = dist.get_rank(), dist.get_world_size()
    told = {"rank": rank, "tensor": torch.full((3,), float(rank), device=device).cpu()}
    gathered = comm.all_gather_object(told)
    broadcast = comm.broadcast_object(told, 0)
    reduced = comm.all_reduce(torch.tensor([float(rank + 1)]), "sum")
    expect([each["rank"] for each in gathered] == list(range(world)), "gathered objects are not those of the ranks")
    expect(broadcast["rank"] == 0 and float(broadcast["tensor"].sum()) == 0, "the broadcast object is another")
    expect(float(reduced) == world * (world + 1) / 2, "the sum of CPU tensors is wrong")
    return {}


def exchanged(device: str) -> Numbers:
    """numbers and maxima exchanged by all ranks"""
    from lockstep.ground import comm
    from lockstep.ground.agreement import HostMaximum

    rank, world = dist.get_rank(), dist.get_world_size()
    heard = comm.RowExchange([float(rank), 1.0]).read()
    maximum = HostMaximum(1)
    maximum.begin([rank])
    maximum.start()
    largest = maximum.finish()
    maximum.close()
    expect(heard == [[float(each), 1.0] for each in range(world)], f"rows {heard}")
    expect(largest == [world - 1], f"maximum {largest}")
    return {}


# -- by the Trainer --------------------------------------------------------------------------------------------


class ByMatrices(Classifier):
    """Muon updates its matrices, which no rank holds whole, and AdamW the rest."""

    def configure_optimizers(self) -> Any:
        from lockstep import CombinedOptimizer

        matrices = [parameter for parameter in self.parameters() if parameter.ndim == 2]
        rest = [parameter for parameter in self.parameters() if parameter.ndim != 2]
        return CombinedOptimizer(torch.optim.Muon(matrices), torch.optim.AdamW(rest))


def fitted(device: str, name: str) -> Numbers:
    """On a rank: a fit that clips by the norm and saves a checkpoint of the whole model."""
    from lockstep import Trainer
    from lockstep.callbacks import ModelCheckpoint
    from lockstep.strategies import DDPStrategy, FSDPStrategy

    strategies: dict[str, Any] = {
        "sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
        "fsdp, clipped and saved": FSDPStrategy,
        "fsdp on the CPU, clipped and saved": lambda: FSDPStrategy(cpu_offload=True),
        MATRICES: FSDPStrategy,
    }
    folder = Path(f"saved-{name}").resolve()
    saved = ModelCheckpoint(dirpath=folder, save_last=True)
    flags: dict[str, Any] = {**QUIET, "accelerator": accelerator_of(device), "devices": dist.get_world_size()}
    flags |= {"enable_checkpointing": True, "callbacks": saved, "gradient_clip_val": 0.5, "max_epochs": 1}
    trainer = Trainer(**flags, strategy=strategies[name]())
    make = ByMatrices if name == MATRICES else Classifier
    trainer.fit(make(perceptron()), rows(16, 4), rows(8, 4))
    numbers = {"loss": float(trainer.callback_metrics["loss"])}
    expect((folder / "last.ckpt").exists(), "no checkpoint was saved", numbers)
    return numbers
