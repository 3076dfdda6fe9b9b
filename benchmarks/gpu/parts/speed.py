"""Steps of several models, taken in turns by hand, in containers, by Trainers and with Accelerate."""

from __future__ import annotations

import copy
import gc
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import mse_loss

from benchmarks.engine.language import GPT, GPT2, TINY
from benchmarks.engine.pairs import ratios, turns
from benchmarks.engine.race import Tower
from benchmarks.gpu.checks import Numbers, Part, expect
from benchmarks.gpu.devices import MIB, Clock, clear, counted_waits, in_use, peak, settle
from benchmarks.gpu.groups import one_rank_group
from benchmarks.gpu.kernel_times import profiled
from benchmarks.gpu.models import ResNet, image_loss, language_loss, resnet50
from benchmarks.gpu.ways import (
    ACCELERATE,
    CONTAINER,
    HAND,
    LIGHTNING,
    OWN_MODEL,
    SHARDED,
    TORCH,
    TORCH_HOOK,
    TRAINER,
    TRAINER_SHARDED,
    WAYS,
    Work,
    quiet_libraries,
)
from lockstep.utilities.throughput import get_available_flops, measure_flops

AS_FAST, NOT_SLOWER, LIKE_TORCH, IN_SHARDS = 1.02, 1.0, 1.10, 1.05
"""Goals: the Trainer over the loop where the device is the limit, over Lightning, the container over torch's, the
Trainer's fsdp over ``fully_shard`` by hand."""
SECONDS = 205.0
"""Of the part, for which the cases' own are made: most goes into compiling, profiles, and steps that do not count."""
WHOLE = (HAND, TORCH, TORCH_HOOK, CONTAINER, TRAINER, LIGHTNING, ACCELERATE)
WITHOUT_CONTAINERS = (HAND, TRAINER, LIGHTNING, ACCELERATE)
NOISE = 0.02
"""How far two medians of the same may lie apart."""


@dataclass
class Case:
    """A model to train.

    Attributes:
        name: for people.
        make: gives the model.
        batch: gives what the loss gets beside it.
        loss: of model and batch.
        optimizer: makes it for parameters.
        unit: of which a step handles so many.
        count: units in a step.
        precision: as in ``Trainer(precision=...)``.
        ways: that take part, where what they need is installed; the first is a hand-written loop.
        compiled: what is compiled: nothing, each block, or the loss with all of the model.
        device_bound: whether the device is the limit, not the program.
        rounds: each takes every way once.
        seconds: for all of it.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    unit: str
    count: int
    precision: str = "32-true"
    ways: tuple[str, ...] = WHOLE
    compiled: Literal["", "blocks", "whole"] = ""
    device_bound: bool = True
    rounds: int = 3
    seconds: float = 20.0


def run(part: Part) -> None:
    """A check for each case."""
    each_measured(part, cases(part.device, part.small, part.limit / SECONDS))


def each_measured(part: Part, chosen: list[Case]) -> None:
    """A check for each case, on one rank."""
    for library, package in (("lightning", "lightning.pytorch"), ("accelerate", "accelerate")):
        if part.has(library):
            importlib.import_module(package)
    quiet_libraries()
    torch.manual_seed(0)
    with one_rank_group(part.device):
        for case in chosen:
            part.check(case.name, measured, part, case)


# -- the cases -----------------------------------------------------------------------------------------------


def cases(device: str, small: bool, stretch: float = 1.0) -> list[Case]:
    """The models; ``stretch`` lengthens and shortens all times alike."""
    found = [images(device, small), *language(device, small), launches(device, small)]
    return [sized(case, small, stretch) for case in found]


def sized(case: Case, small: bool, stretch: float) -> Case:
    """With its time stretched, or as a small stand-in."""
    if small:
        return replace(case, name=f"{case.name} (small stand-in)", rounds=1, seconds=0.1)
    return replace(case, seconds=case.seconds * stretch)


def launches(device: str, small: bool) -> Case:
    """Half a thousand small layers: as many kernels as can be, with next to nothing to compute."""
    layers = 4 if small else 500

    def batch() -> tuple[torch.Tensor, ...]:
        x = torch.randn(32, 64, device=device)
        return x, x.flip(0)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(model(x), y)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3)

    title = f"MLP bound by launches, {2 * layers} parameters"
    return Case(title, lambda: Tower(64, layers), batch, loss, optimizer, "samples", 32, device_bound=False, seconds=18)


def images(device: str, small: bool) -> Case:
    """ResNet-50 in channels_last."""
    count, size = (2, 32) if small else (128, 224)

    def make() -> nn.Module:
        net = ResNet((1, 1), 8, 10) if small else resnet50()
        return net.to(memory_format=torch.channels_last)

    def batch() -> tuple[torch.Tensor, ...]:
        x = torch.randn(count, 3, size, size, device=device).to(memory_format=torch.channels_last)
        return x, torch.randint(10, (count,), device=device)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)

    return Case("ResNet-50", make, batch, image_loss, optimizer, "images", count, "bf16-mixed", seconds=26)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW in one kernel where the device has it."""
    parameters = list(parameters)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=parameters[0].device.type == "cuda")


def tokens_of(device: str, known: int, count: int, length: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Makes tokens and those that follow them."""

    def batch() -> tuple[torch.Tensor, ...]:
        text = torch.randint(known, (count, length + 1), device=device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def language(device: str, small: bool) -> list[Case]:
    """GPT-2 of 124 million parameters on 1,024 tokens, eager and compiled."""
    size, count = (TINY, 2) if small else (GPT2, 16)
    batch = tokens_of(device, size.tokens, count, size.context)
    whole = count * size.context
    eager = Case(
        "GPT-2 124M, eager", lambda: GPT(size), batch, language_loss, adamw, "tokens", whole, "bf16-mixed", seconds=26
    )
    return [eager, replace(eager, name="GPT-2 124M, compiled", ways=WITHOUT_CONTAINERS, compiled="whole", seconds=16)]


# -- measuring -----------------------------------------------------------------------------------------------


def measured(part: Part, case: Case) -> Numbers:
    """All ways through a case, in turns, and whether they reach the goals."""
    works = made(part, case)
    flops = flops_of(replace(next(iter(works.values())), loss=case.loss))
    times = raced(part, case, works)
    numbers: Numbers = {
        "unit": case.unit,
        "ways": {name: row(part, case, name, work, times, flops) for name, work in works.items()},
    }
    if part.is_cuda and not case.compiled:
        for name in (HAND, TRAINER):
            numbers |= {f"{name}: {key}": value for key, value in profiled(WAYS[name], works[name]).items()}
    works.clear()
    clear(part.device)
    missed = [] if part.on_cpu or part.small else goals_missed(case, times)
    expect(not missed, "; ".join(missed), numbers)
    return numbers


def made(part: Part, case: Case) -> dict[str, Work]:
    """What each way trains: copies where it changes the model, else one and the same."""
    missing = [
        name for name, library in ((LIGHTNING, "lightning"), (ACCELERATE, "accelerate")) if not part.has(library)
    ]
    torch.manual_seed(0)
    with torch.device(part.device):
        origin = case.make()
    loss = torch.compile(case.loss) if case.compiled == "whole" and not part.small else case.loss
    shared = Work(origin, case.batch(), loss, case.optimizer, case.precision, part.device)
    works = {}
    for name in case.ways:
        if name not in missing:
            works[name] = replace(shared, model=copy.deepcopy(origin)) if name in OWN_MODEL else shared
    if case.compiled == "blocks" and not part.small:
        for model in {id(work.model): work.model for work in works.values()}.values():
            for block in model.blocks:  # type: ignore[union-attr]
                block.compile()
    return works


def raced(part: Part, case: Case, works: dict[str, Work]) -> dict[str, list[float]]:
    """Milliseconds a step of each way, the median of each round."""
    warm = 1 if part.small else 4
    times: dict[str, list[float]] = {name: [] for name in works}
    loop = case.ways[0]
    first = timed(part, works[loop], loop, 3, warm)
    for name in works:  # compiles, lays buckets out, chooses algorithms
        timed(part, works[name], name, 1, warm)
    steps = max(3, min(60, int(1e3 * case.seconds / (len(works) * case.rounds * first)) - warm))
    for order in turns(list(works), case.rounds):
        for name in order:
            times[name].append(timed(part, works[name], name, steps, warm))
    return times


def timed(part: Part, work: Work, name: str, steps: int, warm: int) -> float:
    """Milliseconds: the median of so many steps behind some that do not count."""
    work.model.to(part.device)  # a Trainer may have brought it to the CPU
    gc.collect()
    settle(part.device)
    clock = Clock(part.device)
    WAYS[name](work, steps + warm, clock.tick)
    found = clock.intervals()[warm - 1 :]
    work.model.zero_grad()
    return median(found)


def row(part: Part, case: Case, name: str, work: Work, times: dict[str, list[float]], flops: int) -> Numbers:
    """What is told of a way: time, throughput, share of the device's peak, memory, waits."""
    took = median(times[name])
    most = peak_flops(case, part.device)
    used, waits = memory_and_waits(part, name, work)
    return {
        "ms a step": round(took, 4),
        "ms by round": [round(each, 3) for each in times[name]],
        "over the loop": round(ratios(times[name], times[case.ways[0]]).median, 4),
        "units/s": round(case.count / took * 1e3, 1),
        "MFU": round(flops / (took / 1e3) / most, 4) if flops and most else None,
        "peak MiB": used,
        "waits a step": waits,
    }


def memory_and_waits(part: Part, name: str, work: Work) -> tuple[float | None, float | None]:
    """MiB at the peak of some steps, other ways' models left out; and waits a step behind the first ones."""
    warm, steps = (1, 2) if part.small else (4, 6)
    work.model.to(part.device)
    clear(part.device)
    before, own = in_use(part.device), sum(p.numel() * p.element_size() for p in work.model.parameters()) / MIB
    with counted_waits(part.device, armed=False) as waits:
        done = 0

        def tick() -> None:
            nonlocal done
            done += 1
            waits.armed = warm <= done < warm + steps

        WAYS[name](work, steps + warm, tick)
    most = peak(part.device)
    work.model.zero_grad()
    return None if most is None or before is None else round(most - before + own, 1), waits.a_step(steps)


def flops_of(work: Work) -> int:
    """Operations of a step, counted without computing them."""
    model = copy.deepcopy(work.model).to("meta")
    inputs = tuple(each.to("meta") for each in work.batch)
    return measure_flops(model, lambda: work.loss(model, *inputs), lambda value: value)


def peak_flops(case: Case, device: str) -> int | None:
    """Operations a second that the device can make; None where that is not known."""
    dtype = torch.float32 if case.precision == "32-true" else torch.bfloat16
    return None if device == "cpu" else get_available_flops(torch.device(device, 0), dtype)


def goals_missed(case: Case, times: dict[str, list[float]]) -> list[str]:
    """Goals that were missed, each as a sentence."""
    goals = [(TRAINER, HAND, AS_FAST)] if case.device_bound else []
    goals += [(TRAINER, LIGHTNING, NOT_SLOWER + NOISE), (CONTAINER, TORCH, LIKE_TORCH)]
    goals += [(TRAINER_SHARDED, SHARDED, IN_SHARDS)]
    missed = []
    for ours, theirs, goal in goals:
        if ours in times and theirs in times:
            found = ratios(times[ours], times[theirs]).median
            if found > goal:
                missed.append(f"{ours} takes {found:.3f} times {theirs}, more than {goal:g}")
    return missed
