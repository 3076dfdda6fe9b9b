"""Profiles of a model's training step: bytes of each block from a trace, and seconds from a clock."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.engines.owners import NOT_ELEMENTWISE, TOGETHER
from lockstep.extensions.balancing.planner.trace import (
    BACKWARD,
    FORWARD,
    REST,
    OperationWork,
    StepTrace,
    TracedAllocation,
    TracedStep,
    fake,
    run_step,
    trace_step,
)
from lockstep.extensions.balancing.torch_parts import PARTS, PLAN
from lockstep.ground.device import current_device, has_timed_events, synchronize, timed_event
from lockstep.ground.optimizers import parts_of
from lockstep.ground.seed import isolate_rng
from lockstep.ground.torch_support import refuse_without
from lockstep.ground.tree import tensors_in
from lockstep.memory.blocks import find_blocks
from lockstep.memory.recompute import recompute

# -- blocks ------------------------------------------------------------------------------------------------------


def find_units(module: nn.Module, named: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Return a model's blocks by name: the submodules in ``named``, else its repeated blocks, else its children.

    Args:
        module: the model.
        named: names of submodules, as in ``named_modules``.

    Raises:
        ValueError: the model has no submodule of a name.

    Example:
        >>> list(find_units(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
        ['0', '2']
    """
    there = dict(module.named_modules())
    for name in named:
        if name not in there or not name:
            raise ValueError(f"blocks: {type(module).__name__} has no submodule {name!r}: see named_modules()")
    if named:
        return {name: there[name] for name in named}
    found = find_blocks(module)
    if not found:
        # a module with one child is only a wrapper
        found = [module]
        while len(found) == 1:
            found = [layer for layer in found[0].children() if list(layer.parameters())]
    names = {id(layer): name for name, layer in there.items()}
    return {names[id(layer)]: layer for layer in found}


def kind_of(layer: nn.Module) -> str:
    """Return a key that is the same for blocks of equal class, parameter shapes and configuration."""
    shapes = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in layer.named_parameters()]
    text = f"{type(layer).__qualname__} {shapes} {layer}"
    return f"{type(layer).__name__} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


# -- the profile ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterProfile:
    """Size, block and optimizer states of a parameter. Tied parameters have one profile.

    Attributes:
        name: the parameter's first name.
        shape: shape of the full parameter.
        itemsize: bytes of an element.
        trainable: True if it gets gradients.
        unit: number of its block, or REST.
        like: bytes for each element of optimizer states of its shape.
        fixed: bytes of other optimizer states, such as counts of steps.
        arrival: the place of its gradient in the order in which gradients arrive; -1: it has none.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    unit: int
    like: int = 0
    fixed: int = 0
    arrival: int = -1

    @property
    def elements(self) -> int:
        """Number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the full parameter."""
        return self.elements * self.itemsize


@dataclass(frozen=True)
class SpanProfile:
    """Memory and work of consecutive operations of a training step, in one block or outside all blocks.

    Only memory that is allocated within the step counts.

    Attributes:
        phase: see `lockstep.extensions.balancing.planner.trace.Span`.
        unit: see `lockstep.extensions.balancing.planner.trace.Span`.
        peak: largest number of bytes, without gradients of parameters.
        grown: largest number of bytes, with the gradients that exist by then.
        added: as ``grown``, if each gradient is added to memory that exists already, and is freed.
        work: work of the span's operations.
        seconds: measured seconds, or None.
    """

    phase: str
    unit: int
    peak: int
    grown: int
    added: int
    work: OperationWork
    seconds: float | None = None


@dataclass(frozen=True)
class BlockProfile:
    """A block of a model, with the bytes that its forward keeps and sends.

    Attributes:
        name: name of the block's module.
        kind: see `kind_of`.
        repeated: True for the blocks that FSDP gathers, and recomputation recomputes, one by one.
        kept: bytes that its forward keeps for its backward.
        sends: bytes of its output.
    """

    name: str
    kind: str
    repeated: bool
    kept: int
    sends: int


@dataclass(frozen=True)
class StepProfile:
    """Profile of a training step: a sequence of spans with their memory, work and seconds.

    Attributes:
        spans: the spans, in the order in which they run.
    """

    spans: tuple[SpanProfile, ...]

    def seconds(self, phase: str, unit: int | None = None) -> float | None:
        """Return the measured seconds of a phase, or of one block in the phase; None if they were not measured."""
        found = [s.seconds for s in self.spans if s.phase == phase and unit in (None, s.unit)]
        return None if None in found else float(sum(value or 0.0 for value in found))

    def work(self, phase: str, unit: int | None = None) -> OperationWork:
        """Return the work of all operations in a phase, or of one block in the phase."""
        total = OperationWork()
        for span in self.spans:
            if span.phase == phase and unit in (None, span.unit):
                total.add(span.work)
        return total


@dataclass(frozen=True)
class ModelProfile:
    """Profile of a model, its batch, its optimizers and its precision.

    Attributes:
        name: name of the model's class.
        samples: number of samples in the batch of one device.
        precision: as in ``Trainer(precision=...)``.
        parameters: all of them.
        buffers: bytes.
        batch: bytes.
        blocks: the blocks, in the order of the chain.
        steps: "kept", and "recomputed" if the model has repeated blocks, which are recomputed there.
        elementwise: True if optimizers can update slices of parameters.
        parameter_wise: True if optimizers can update each parameter by itself.
        device: type of the device on which seconds were measured, or "".
        outside: bytes that the forward keeps from code before the first block, and after the last one.
    """

    name: str
    samples: int
    precision: str
    parameters: tuple[ParameterProfile, ...]
    buffers: int
    batch: int
    blocks: tuple[BlockProfile, ...]
    steps: dict[str, StepProfile] = field(default_factory=dict)
    elementwise: bool = True
    parameter_wise: bool = True
    device: str = ""
    outside: tuple[int, int] = (0, 0)

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(parameter.elements for parameter in self.parameters)

    @property
    def size(self) -> int:
        """Bytes of all parameters."""
        return sum(parameter.size for parameter in self.parameters)

    def step(self, recomputed: bool) -> StepProfile:
        """Return the step's profile, with recomputation if ``recomputed`` and the model has repeated blocks."""
        return self.steps["recomputed" if recomputed and "recomputed" in self.steps else "kept"]

    @property
    def key(self) -> str:
        """Key that identifies the model by its parameters; see `key_of`."""
        return key_of((p.name, p.shape, p.trainable) for p in self.parameters)


def key_of(parameters: Iterable[tuple[str, tuple[int, ...], bool]]) -> str:
    """Return a hash of names, shapes and ``requires_grad`` of a model's parameters, which identifies the model."""
    return hashlib.sha256(repr([(name, tuple(shape), t) for name, shape, t in parameters]).encode()).hexdigest()[:16]


# -- from a trace ---------------------------------------------------------------------------------------------------


def _timeline(trace: StepTrace, counted: Iterable[tuple[TracedAllocation, float]]) -> list[int]:
    """Return the bytes in use during each operation, from (allocation, index of its last operation) pairs."""
    change = [0] * (trace.operations + 3)
    for made, end in counted:
        change[made.born] += made.size
        change[int(min(end, trace.operations + 1)) + 1] -= made.size
    return list(accumulate(change))


def spans_of(trace: StepTrace) -> tuple[SpanProfile, ...]:
    """Return the profiles of a trace's spans, with their memory."""

    def dies(made: TracedAllocation) -> float:
        """Return the index of an allocation's last operation, assuming that gradients are freed once computed."""
        end = made.born
        if made.kind != "gradient":
            return made.died
        while end + 1 < len(trace.nodes) and trace.nodes[end + 1] == made.node:
            end += 1
        return end

    lines = [
        _timeline(trace, [(made, made.died) for made in trace.allocations if not made.kind]),
        _timeline(trace, [(made, made.died) for made in trace.allocations if made.kind != "state"]),
        _timeline(trace, [(made, dies(made)) for made in trace.allocations if made.kind != "state"]),
    ]
    found = []
    for span in trace.spans:
        if span.stop > span.start:
            peak, most, once = (max(line[span.start + 1 : span.stop + 1]) for line in lines)
            found.append(SpanProfile(span.phase, span.unit, peak, most, once, span.work))
    return tuple(found)


AFTER = -2
"""Number of the code after the last block in :func:`_kept`. `REST` is the code before the first and between blocks."""


def _kept(trace: StepTrace) -> dict[int, int]:
    """Return {index of a block: bytes that its forward keeps for the backward}."""
    forwards = [at for at, span in enumerate(trace.spans) if span.phase == FORWARD]
    end = max(trace.spans[at].stop for at in forwards)
    last = max((at for at in forwards if trace.spans[at].unit != REST), default=-1)
    over = max((span.stop for span in trace.spans if span.phase == BACKWARD), default=end)
    kept: dict[int, int] = {}
    for made in trace.allocations:
        span = trace.spans[made.span]
        if span.phase == FORWARD and made.died > end:
            unit = AFTER if made.span > last else span.unit
            # the loss, which outlives the backward
            if unit == AFTER and made.died >= over:
                continue
            kept[unit] = kept.get(unit, 0) + made.size
    return kept


def _parameters(
    module: nn.Module, units: dict[str, nn.Module], optimizers: Sequence[Optimizer], trace: StepTrace
) -> list[ParameterProfile]:
    owners = {id(p): number for number, unit in enumerate(units.values()) for p in unit.parameters()}
    states: dict[int, tuple[int, int]] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            like = [v for v in tensors_in(list(state.values()), 6) if v.shape == parameter.shape and v.dim()]
            every = sum(v.numel() * v.element_size() for v in tensors_in(list(state.values()), 6))
            shaped = sum(v.element_size() for v in like)
            states[id(parameter)] = shaped, every - shaped * parameter.numel()
    return [
        ParameterProfile(
            name,
            tuple(p.shape),
            p.element_size(),
            p.requires_grad,
            owners.get(id(p), REST),
            *states.get(id(p), (0, 0)),
            trace.arrivals.get(id(p), -1),
        )
        for name, p in module.named_parameters()
    ]


def profile_step(
    step: TracedStep,
    *,
    samples: int,
    batch: object = None,
    precision: str = "32-true",
    named: Sequence[str] = (),
) -> ModelProfile:
    """Profile memory and operations of a step by tracing the step with fake tensors, which have no memory.

    Args:
        step: the step. Its module is restored afterwards; it may be on the meta device.
        samples: number of samples in the batch.
        batch: input of the step, whose memory does not count.
        precision: name for the profile; the step's context applies it.
        named: names of the blocks.

    Raises:
        ValueError: there is no submodule of a name, or the control flow of the step depends on values.

    Example::

        step = TracedStep(model, lambda: model(x).sum(), lambda: [torch.optim.Adam(model.parameters())], nullcontext)
        profile = profile_step(step, samples=16)
    """
    units = find_units(step.module, named)
    repeated = {id(block) for block in find_blocks(step.module)}
    kept = _trace(step, units, batch, again=False)
    steps = {"kept": StepProfile(spans_of(kept.trace))}
    if repeated:
        steps["recomputed"] = StepProfile(spans_of(_trace(step, units, batch, again=True).trace))
    order = list(dict.fromkeys(span.unit for span in kept.trace.spans if span.unit != REST))
    sizes = _kept(kept.trace)
    place = {unit: number for number, unit in enumerate(order)}
    buffers = {id(buffer): buffer for buffer in step.module.buffers()}
    return ModelProfile(
        type(step.module).__name__,
        samples,
        precision,
        tuple(replace(p, unit=place.get(p.unit, REST)) for p in kept.parameters),
        sum(b.numel() * b.element_size() for b in buffers.values()),
        sum(t.numel() * t.element_size() for t in tensors_in(batch, 6)),
        tuple(_blocks(kept.trace, units, order, repeated, sizes)),
        {
            name: StepProfile(tuple(replace(span, unit=place.get(span.unit, REST)) for span in found.spans))
            for name, found in steps.items()
        },
        elementwise=not set(kept.optimizers) & set(NOT_ELEMENTWISE),
        parameter_wise=not set(kept.optimizers) & set(TOGETHER),
        outside=(sizes.get(REST, 0), sizes.get(AFTER, 0)),
    )


class _Traced(NamedTuple):
    """A trace, the profiles of the parameters, and the names of the optimizers' classes."""

    trace: StepTrace
    parameters: list[ParameterProfile]
    optimizers: list[str]


def _trace(step: TracedStep, units: dict[str, nn.Module], batch: object, again: bool) -> _Traced:
    """Trace a step on fake tensors, and restore the step's module afterwards."""
    refuse_without(PLAN, "a plan", "name a strategy", PARTS)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with isolate_rng(), FakeTensorMode(allow_non_fake_inputs=True) as mode, ExitStack() as after:
        after.callback(fake(step.module, step.dtype))
        if again:
            after.callback(recompute(step.module))
        # views of the batch are views of these, so that they do not count as memory of the step
        stand_ins = [mode.from_tensor(tensor) for tensor in tensors_in(batch, 6)]
        trace, optimizers = trace_step(step, list(units.values()), [batch, stand_ins])
        parameters = _parameters(step.module, units, optimizers, trace)
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return _Traced(trace, parameters, [type(part).__name__ for part in parts])


def _blocks(
    trace: StepTrace, units: dict[str, nn.Module], order: Sequence[int], repeated: set[int], kept: dict[int, int]
) -> Iterator[BlockProfile]:
    """Yield the profile of each block, in the order in which the blocks run."""
    names = list(units)
    for unit in order:
        layer = units[names[unit]]
        sends = trace.sends.get(unit, 0)
        yield BlockProfile(names[unit], kind_of(layer), id(layer) in repeated, kept.get(unit, 0), sends)


# -- from a clock ---------------------------------------------------------------------------------------------------


class _Clock:
    """Observer that records when the forwards and backwards of blocks start and end in one training step."""

    def __init__(self, units: Sequence[nn.Module], device: torch.device) -> None:
        self.units, self.device = {id(unit): number for number, unit in enumerate(units)}, device
        self.moments: list[tuple[str, int, Any]] = []
        # events on the device: synchronizing at each block would add the launches of its kernels to its time
        self._by_events = has_timed_events(device)
        self._forward = False

    def now(self) -> Any:
        if not self._by_events:
            return time.perf_counter()
        event = timed_event(self.device)
        event.record()
        return event

    def record(self, phase: str, unit: int) -> None:
        """Record the time at which ``unit``, a block or the code outside the blocks, starts to run in a phase."""
        self.moments.append((phase, unit, self.now()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record start and end of a phase that runs within the ``with`` block."""
        self._forward = name == FORWARD
        self.record(name, REST)
        yield
        self.record(name, REST)

    def enter(self, layer: nn.Module, args: object) -> None:
        """Record the start of a block's forward, as a forward pre-hook."""
        # a recomputed forward counts as part of the backward
        if self._forward:
            self.record(FORWARD, self.units[id(layer)])

    def leave(self, layer: nn.Module, args: object, output: object) -> None:
        """Record the end of a block's forward, as a forward hook."""
        if not self._forward:
            return
        unit = self.units[id(layer)]
        self.record(FORWARD, REST)
        for tensor in tensors_in(output, 3):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.record(BACKWARD, unit))
                return

    def seconds(self) -> dict[tuple[str, int], float]:
        """Return {(phase, index of a block): measured seconds}."""
        found: dict[tuple[str, int], float] = {}
        synchronize(self.device)
        for (phase, unit, start), (_, _, end) in zip(self.moments, self.moments[1:], strict=False):
            took = start.elapsed_time(end) / 1e3 if self._by_events else end - start
            found[phase, unit] = found.get((phase, unit), 0.0) + took
        return found


def measure_step(
    profile: ModelProfile,
    step: TracedStep,
    device: torch.device,
    *,
    warm_up: int = 2,
    steps: int = 7,
    patience: float = 20.0,
) -> ModelProfile:
    """Measure the seconds of a profiled step, as medians over several steps and over blocks of one kind.

    Args:
        profile: profile of the same step.
        step: the step, with module and batch on ``device``. Parameters, buffers and random states are restored.
        device: on which it runs.
        warm_up: number of steps that do not count.
        steps: number of steps that count.
        patience: seconds after which no further step starts, once two were measured.

    Returns:
        a profile whose spans have seconds.
    """
    by_name = dict(step.module.named_modules())
    units = [by_name[block.name] for block in profile.blocks]
    found: list[dict[tuple[str, int], float]] = []
    start = time.perf_counter()
    with _restore(step.module):
        optimizers = list(step.optimizers())
        for number in range(warm_up + steps):
            clock = _Clock(units, device)
            step.module.zero_grad()
            with current_device(device):
                run_step(step, optimizers, units, clock)
            if number >= warm_up:
                found.append(clock.seconds())
            if time.perf_counter() - start > patience and len(found) >= 2:
                break
    medians = _pool(profile, {key: statistics.median([one.get(key, 0.0) for one in found]) for key in found[0]})
    timed = {"kept": _distribute(profile.steps["kept"], medians)}
    if "recomputed" in profile.steps:
        # not measured: a recomputed block runs its forward a second time in the backward
        again = dict(medians)
        for number, block in enumerate(profile.blocks):
            if block.repeated:
                again[BACKWARD, number] = medians.get((BACKWARD, number), 0.0) + medians.get((FORWARD, number), 0.0)
        timed["recomputed"] = _distribute(profile.steps["recomputed"], again)
    return replace(profile, steps=timed, device=device.type)


@contextmanager
def _restore(module: nn.Module) -> Iterator[None]:
    """When the context ends, restore parameters, buffers and random states, and drop gradients."""
    tensors = [*module.parameters(), *module.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        with isolate_rng():
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        for tensor in tensors:
            tensor.grad = None


def _pool(profile: ModelProfile, seconds: dict[tuple[str, int], float]) -> dict[tuple[str, int], float]:
    """Replace the seconds of each block by the median over the blocks of its kind."""
    pooled = dict(seconds)
    for kind in {block.kind for block in profile.blocks}:
        numbers = [number for number, block in enumerate(profile.blocks) if block.kind == kind]
        for phase in (FORWARD, BACKWARD):
            value = statistics.median([seconds.get((phase, number), 0.0) for number in numbers])
            pooled.update({(phase, number): value for number in numbers})
    return pooled


def _distribute(step: StepProfile, seconds: dict[tuple[str, int], float]) -> StepProfile:
    """Distribute the seconds of each block over its spans, in proportion to their memory traffic."""
    spans = []
    for span in step.spans:
        total = step.work(span.phase, span.unit).moved
        share = span.work.moved / total if total else 1.0
        spans.append(replace(span, seconds=seconds.get((span.phase, span.unit), 0.0) * share))
    return StepProfile(tuple(spans))
