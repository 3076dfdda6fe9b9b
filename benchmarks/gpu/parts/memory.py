"""Memory of the device: peaks of the first steps, what stays behind a fit, recomputation, predictions."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.engine.language import GPT, Size
from benchmarks.gpu.checks import Numbers, Part, Skip, expect
from benchmarks.gpu.devices import MIB, Clock, accelerator_of, clear, in_use, peak
from benchmarks.gpu.groups import one_rank_group
from benchmarks.gpu.modules import QUIET, Language, text
from lockstep import Callback, Trainer
from lockstep.strategies import SingleDeviceStrategy

LEFT = 50.0
"""MiB that may stay behind a fit."""
WITHIN = 0.10
"""How far a plan's memory and time may be off."""


def run(part: Part) -> None:
    """Each check begins with nothing cached."""
    part.check("gradients are stored once in the first steps", held_once, part)
    part.check("memory left after a fit", left_behind, part)
    plain = part.found[-1].get("numbers", {})
    part.check("recomputed activations", changed, part, plain, {"activation_checkpointing": True})
    part.check("predictions of a plan, compared with a fit", predicted, part)


def size(part: Part) -> tuple[Size, int]:
    """Measures of the model, and samples of a batch."""
    return (Size(32, 2, context=16), 4) if part.small else (Size(1024, 12, heads=16, context=512), 8)


# -- gradients -------------------------------------------------------------------------------------------------


def held_once(part: Part) -> Numbers:
    """MiB at the peak of an update beside the loop's, in steps 1 and 5, in units of the gradients."""
    found = {}
    with one_rank_group(part.device):
        for name, averaged in (("by hand", False), ("by the reducer", True)):
            found[name] = updates(part, averaged)
    numbers: Numbers = {f"{name}, step {step}": value for name, both in found.items() for step, value in both.items()}
    gradients = found["by hand"].pop("gradients")
    numbers.pop("by hand, step gradients"), numbers.pop("by the reducer, step gradients")
    if gradients is None or any(value is None for value in numbers.values()):
        return numbers
    more = {
        f"more, step {step}": (found["by the reducer"][step] - found["by hand"][step]) / gradients for step in (1, 5)
    }
    numbers |= {name: round(value, 2) for name, value in more.items()}
    expect(all(value < 0.1 for value in more.values()), "gradients are held more than once", numbers)
    return numbers


def updates(part: Part, averaged: bool) -> dict[Any, Any]:
    """MiB at the peak of the first and the fifth update."""
    from lockstep.engines.ddp.reducer import Reducer
    from lockstep.engines.ddp.transport import AllReduce

    width, layers = (16, 4) if part.small else (2048, 16)
    clear(part.device)
    before = in_use(part.device)
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(part.device)
    gradients = None if before is None else sum(p.numel() * p.element_size() for p in net.parameters()) / MIB
    reducer = Reducer(net.named_parameters(), transport=AllReduce(None)) if averaged else None
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, found = torch.randn(8, width, device=part.device), {}
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if reducer is not None:
            reducer.prepare()
        loss.backward()
        if reducer is not None:
            reducer.finish()
        clear(part.device)
        optimizer.step()
        most = peak(part.device)
        if step in (1, 5):
            found[step] = None if most is None or before is None else round(most - before, 1)
    if reducer is not None:
        reducer.detach()
    return {**found, "gradients": gradients}


# -- a fit -----------------------------------------------------------------------------------------------------


class Adam(Language):
    """With two states for each parameter, and a chain of blocks for a plan."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(Callback):
    """Milliseconds of each step."""

    def __init__(self, device: str) -> None:
        self.clock = Clock(device)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.tick()


def fit(part: Part, strategy: Any, steps: int, **flags: Any) -> tuple[Adam, Times, Trainer]:
    """A fit of a GPT."""
    measures, count = size(part)
    times, module = Times(part.device), Adam(GPT(measures), metric=False)
    own = {**QUIET, "accelerator": accelerator_of(part.device), "devices": 1, "max_steps": steps, "max_epochs": -1}
    trainer = Trainer(**{**own, "callbacks": times, "limit_val_batches": 0, **flags}, strategy=strategy)
    trainer.fit(module, text(steps * count, count, measures.context))
    return module, times, trainer


def measured(part: Part, strategy: Any) -> Numbers:
    """Peak of a fit, milliseconds of a step, memory of the host; and what stays behind it."""
    steps = 4 if part.small else 8
    clear(part.device)
    before = in_use(part.device)
    module, times, trainer = fit(part, strategy, steps)
    took = sorted(times.clock.intervals()[steps // 3 :])
    numbers: Numbers = {
        "peak MiB": peak(part.device),
        "ms a step": round(took[len(took) // 2], 2),
        "host MiB": resident(),
    }
    numbers["weights are on"] = str(next(module.parameters()).device.type)
    numbers["gradients are left"] = sum(p.grad is not None for p in module.parameters())
    del module, times, trainer
    gc.collect()
    after = in_use(part.device)
    numbers["left MiB"] = None if after is None or before is None else round(after - before, 1)
    return numbers


def left_behind(part: Part) -> Numbers:
    """The module is on the CPU afterwards, and the device has its memory back."""
    numbers = measured(part, "auto")
    expect(numbers["weights are on"] == "cpu", "the weights stay on the device", numbers)
    expect((numbers["left MiB"] or 0) < LEFT, f"more than {LEFT:g} MiB stay", numbers)
    return numbers


def changed(part: Part, plain: Numbers, options: dict[str, Any]) -> Numbers:
    """The peak with an option of the strategy, which has to be less than without."""
    numbers = measured(part, SingleDeviceStrategy(**options))
    before, now = plain.get("peak MiB"), numbers["peak MiB"]
    if before is not None and now is not None:
        numbers["peak MiB without"] = before
        expect(now < before, "it needs no less memory", numbers)
    return numbers


def resident() -> float | None:
    """MiB that this process has of the host's memory; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1)


# -- a plan ----------------------------------------------------------------------------------------------------


def predicted(part: Part) -> Numbers:
    """Peak and milliseconds of a plan on one device beside those of a fit."""
    measures, count = size(part)
    with tempfile.TemporaryDirectory() as folder, variable("XDG_CACHE_HOME", folder):
        trainer = Trainer(**QUIET, accelerator=accelerator_of(part.device), devices=1)
        plan = trainer.plan(Adam(GPT(measures), metric=False), text(count, count, measures.context))
    single = [row for row in plan.rows if row.candidate.kind == "single"]
    if not single:
        raise Skip("the plan has no row for one device")
    plainest = next(one for one in single if not one.candidate.recomputed)
    found = measured(part, "auto")
    numbers: Numbers = {
        "peak MiB, predicted": round(plainest.memory / MIB, 1),
        "peak MiB, measured": found["peak MiB"],
        "ms, predicted": round(1e3 * plainest.seconds, 2),
        "ms, measured": found["ms a step"],
        "TFLOP/s": round(plan.hardware.speed("32-true") / 1e12, 3),
    }
    if found["peak MiB"] is not None and not part.small:
        off: Callable[[str], float] = lambda unit: numbers[f"{unit}, predicted"] / numbers[f"{unit}, measured"] - 1  # noqa: E731
        numbers |= {"memory off by": round(off("peak MiB"), 3), "time off by": round(off("ms"), 3)}
        expect(abs(numbers["memory off by"]) <= WITHIN, "memory is predicted otherwise", numbers)
        expect(abs(numbers["time off by"]) <= WITHIN, "time is predicted otherwise", numbers)
    return numbers


class variable:
    """Inside, an environment variable has another value."""

    def __init__(self, name: str, value: str) -> None:
        self.name, self.value = name, value

    def __enter__(self) -> None:
        self.before = os.environ.get(self.name)
        os.environ[self.name] = self.value

    def __exit__(self, *error: object) -> None:
        if self.before is None:
            del os.environ[self.name]
        else:
            os.environ[self.name] = self.before
