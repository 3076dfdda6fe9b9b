"""Steps while a checkpoint is written in the background, and steps in float8."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine.language import GPT, GPT2, TINY
from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.devices import MIB, Clock, accelerator_of, clear
from benchmarks.gpu.models import Llama, Shape, language_loss
from benchmarks.gpu.modules import QUIET
from benchmarks.gpu.parts.speed import adamw, timed, tokens_of
from benchmarks.gpu.ways import TRAINER, Repeated, Work
from lockstep import Callback, LightningModule, Trainer
from lockstep.checkpoint.io import AsyncCheckpointIO


def run(part: Part) -> None:
    part.check("GPT-2 124M: steps while a checkpoint is written", saving, part)
    part.check("Llama-shaped 0.75B, compiled: fp8-mixed compared with bf16-mixed", float8, part)


# -- an asynchronous save --------------------------------------------------------------------------------------


class Net(LightningModule):
    """A language model that AdamW trains, so that a checkpoint has three times the size of the weights."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[torch.Tensor, ...], batch_idx: int) -> torch.Tensor:
        return language_loss(self.net, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


class SaveOnce(Callback):
    """Saves one checkpoint in the middle of a fit, and records the end of each step.

    Attributes:
        pause: milliseconds for which `Trainer.save_checkpoint` kept the training thread.
        last: the step in which the file was complete; None if the write outlasted the fit.
    """

    def __init__(self, device: str, path: Path, step: int) -> None:
        self.clock, self.path, self.step = Clock(device), path, step
        self.pause: float | None = None
        self.last: int | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.tick()
        if trainer.global_step == self.step:
            start = time.perf_counter()
            trainer.save_checkpoint(self.path)
            self.pause = 1e3 * (time.perf_counter() - start)
        elif self.pause is not None and self.last is None and self.path.exists():
            self.last = trainer.global_step


def saving(part: Part) -> Numbers:
    """Milliseconds of a step before and during the write, and of the step that starts it."""
    size, count, steps, step = (TINY, 2, 12, 4) if part.small else (GPT2, 16, 90, 20)
    batch = tokens_of(part.device, size.tokens, count, size.context)()
    clear(part.device)
    with tempfile.TemporaryDirectory() as folder:
        saved = SaveOnce(part.device, Path(folder) / "step.ckpt", step)
        trainer = Trainer(
            accelerator=accelerator_of(part.device),
            devices=1,
            precision="bf16-mixed",
            max_steps=steps,
            callbacks=saved,
            plugins=[AsyncCheckpointIO()],
            **QUIET,
        )
        trainer.fit(Net(GPT(size)), Repeated(batch, steps))
        mib = saved.path.stat().st_size / MIB
    times = saved.clock.intervals()  # times[n] is the time of step n + 2, in global steps
    warm = step // 2
    before, during = times[warm : step - 1], times[step : (saved.last or steps) - 1]
    numbers: Numbers = {
        "ms a step, before": round(median(before), 2),
        "ms a step, during the write": round(median(during), 2) if during else None,
        "steps during the write": len(during),
        "ms of the step after the save": round(times[step - 1], 2),
        "ms in save_checkpoint": saved.pause and round(saved.pause, 2),
        "MiB": round(mib, 1),
    }
    expect(saved.pause is not None, "no checkpoint was saved", numbers)
    return numbers


# -- float8 ----------------------------------------------------------------------------------------------------


def float8(part: Part) -> Numbers:
    """Milliseconds of a step under the Trainer, the blocks compiled; bf16-mixed is timed twice, for its scatter."""
    if not part.has("torchao"):
        raise Skip("torchao is not installed")
    if not part.is_cuda and not part.small:
        raise Skip("float8 is for CUDA devices")
    shape, count = (Shape(64, 2, 4, 2, 128, 256, 32), 2) if part.small else (Shape(layers=8), 4)
    steps, warm = (2, 1) if part.small else (20, 5)
    batch = tokens_of(part.device, shape.tokens, count, shape.context)()
    numbers: Numbers = {}
    for name in ("bf16-mixed", "fp8-mixed", "bf16-mixed again"):
        clear(part.device)
        torch.manual_seed(0)
        with torch.device(part.device):
            model = Llama(shape)
        if not part.small:
            for block in model.blocks:
                block.compile()
        work = Work(model, batch, language_loss, adamw, name.removesuffix(" again"), part.device)
        numbers[f"ms a step, {name}"] = round(timed(part, work, TRAINER, steps, warm), 3)
        del model, work
        gc.collect()
    numbers["fp8-mixed over bf16-mixed"] = round(numbers["ms a step, fp8-mixed"] / numbers["ms a step, bf16-mixed"], 3)
    return numbers
