"""Several devices over NCCL: the numbers of one process, equal bits, scaling, other device numbers, a rank asleep."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine.language import GPT, LARGE, TINY
from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.devices import Clock, accelerator_of
from benchmarks.gpu.equal import run_alike, run_equal
from benchmarks.gpu.groups import join
from benchmarks.gpu.modules import QUIET, Classifier, Language, perceptron, rows, text
from benchmarks.gpu.parts.life import asleep


def run(part: Part) -> None:
    """All checks where there are several devices, or on a CPU, whose ranks need none; else NCCL's own switch."""
    if not part.on_cpu and part.count < 2:
        part.check("two ranks of NCCL on one device", two_on_one, part)
        return
    world = 2 if part.on_cpu else part.count
    accelerator = accelerator_of(part.device)
    for ranks in [size for size in (1, 2, 4, 8) if size <= world]:
        part.check(f"{ranks} ranks: a transformer under ddp", scaled, part, ranks)
    run_alike(part, world, accelerator, group=False)
    if not part.small:
        run_equal(part, world, accelerator, group=False)
    part.check("resumed on another device: the same bits", moved, part)
    part.check("dp: two runs end in the same bits", replicated, part)
    part.check("a checkpoint with a metric opens no other device", contexts, part, world)
    if part.is_cuda:
        part.check("a rank that is asleep is named, over NCCL", asleep, part, "--own")


# -- ranks -----------------------------------------------------------------------------------------------------


def two_on_one(part: Part) -> Numbers:
    """Some releases of NCCL take it where a variable is set."""
    if not part.is_cuda:
        raise Skip(f"there is one {part.device} device")
    try:
        sums = part.ranks(2, summed, group=False)
    except Exception as error:
        raise Skip(f"there is one device, and its NCCL takes one rank on it ({type(error).__name__})") from error
    expect(sums == [3.0, 3.0], f"sums {sums}")
    return {"ranks": 2}


def summed() -> float:
    """On a rank: the sum of all ranks' numbers, on the one device."""
    import os

    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    value = torch.full((1,), dist.get_rank() + 1.0, device="cuda")
    dist.all_reduce(value)
    return value.item()


def scaled(part: Part, world: int) -> Numbers:
    """Tokens a second, and what the reduction adds to a step that accumulates."""
    found = part.ranks(world, steps_of, part.device, world, part.small, group=False)
    slowest = max(ms for ms, _, _ in found)
    numbers: Numbers = {
        "ms a step": round(slowest, 3),
        "ms without reduction": round(max(alone for _, alone, _ in found), 3),
        "tokens/s": round(sum(tokens for _, _, tokens in found) / slowest * 1e3),
    }
    one = next(
        (check["numbers"] for check in part.found if check["name"].startswith("1 ranks") and "numbers" in check), None
    )
    if one is not None and one.get("tokens/s"):
        numbers["over one rank"] = round(numbers["tokens/s"] / one["tokens/s"], 2)
    return numbers


def steps_of(device: str, world: int, small: bool) -> tuple[float, float, int]:
    """On a rank: milliseconds of a step that reduces and of one that does not, and tokens of a step."""
    from lockstep import Callback, Trainer

    join(device)
    size, count, steps = (TINY, 2, 4) if small else (LARGE, 64, 30)

    class Times(Callback):
        def __init__(self) -> None:
            self.clock = Clock(device)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.clock.tick()

    found = []
    for accumulate in (1, steps):
        times = Times()
        flags: dict[str, Any] = {**QUIET, "accelerator": accelerator_of(device), "devices": world, "callbacks": times}
        flags |= {"precision": "bf16-mixed", "max_epochs": 1, "accumulate_grad_batches": accumulate}
        trainer = Trainer(**flags, strategy="ddp", limit_val_batches=0)
        trainer.fit(Language(GPT(size), metric=False), text(steps * count * world, count, size.context))
        found.append(median(times.clock.intervals()[steps // 3 : -1]))
    return found[0], found[1], count * size.context


# -- device numbers ----------------------------------------------------------------------------------------------


def fitted(
    part: Part, devices: Any, steps: int, folder: str, resumed: str | None = None, dropout: float = 0.5, **flags: Any
) -> list[torch.Tensor]:
    """The weights at the end of a fit."""
    from lockstep import Trainer, seed_everything
    from lockstep.callbacks import ModelCheckpoint

    seed_everything(3, verbose=False)
    module = Classifier(perceptron(dropout), metric=False)
    saved = ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=4)
    own = {
        **QUIET,
        "accelerator": accelerator_of(part.device),
        "devices": devices,
        "max_steps": steps,
        "max_epochs": -1,
    }
    own |= {"deterministic": True, "enable_checkpointing": True, "callbacks": saved, "limit_val_batches": 0}
    path = None if resumed is None else Path(resumed) / "last.ckpt"
    Trainer(**{**own, **flags}).fit(module, rows(32, 4), ckpt_path=path)
    return [value.detach().cpu().clone() for value in module.state_dict().values()]


def moved(part: Part) -> Numbers:
    """The second half of a run on the last device ends as the whole run on the first."""
    first, last = (1, 1) if part.on_cpu else ([0], [part.count - 1])
    whole = fitted(part, first, 8, "whole")
    fitted(part, first, 4, "half")
    rest = fitted(part, last, 8, "rest", "half")
    numbers = {"tensors that differ": sum(not torch.equal(*pair) for pair in zip(whole, rest, strict=True))}
    expect(numbers["tensors that differ"] == 0, "the bits differ", numbers)
    return numbers


def replicated(part: Part) -> Numbers:
    """One process on all devices, twice."""
    devices = 2 if part.on_cpu else part.count
    ends = [fitted(part, devices, 8, f"dp-{number}", dropout=0.0, strategy="dp") for number in (1, 2)]
    numbers = {"devices": devices, "differ": sum(not torch.equal(*pair) for pair in zip(*ends, strict=True))}
    expect(numbers["differ"] == 0, "the bits differ", numbers)
    return numbers


def contexts(part: Part, world: int) -> Numbers:
    """Each rank has a context on its own device alone."""
    found = part.ranks(world, opened, part.device, world, group=False)
    numbers: Numbers = {"ranks": world, "contexts of a rank at most": max(found)}
    expect(max(found) <= 1, "a rank has opened other devices", numbers)
    return numbers


def opened(device: str, world: int) -> int:
    """On a rank: on how many devices it has a context after a save."""
    from lockstep import Trainer
    from lockstep.callbacks import ModelCheckpoint

    join(device)
    saved = ModelCheckpoint(dirpath=f"contexts-{time.time():.0f}", every_n_train_steps=2)
    flags: dict[str, Any] = {**QUIET, "accelerator": accelerator_of(device), "devices": world, "max_epochs": 1}
    flags |= {"enable_checkpointing": True, "callbacks": saved, "strategy": "ddp"}
    Trainer(**flags).fit(Classifier(perceptron()), rows(32, 4), rows(16, 4))
    has: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if device != "cuda" or has is None:
        return 0
    return sum(bool(has(number)) for number in range(torch.cuda.device_count()))
