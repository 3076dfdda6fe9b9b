"""Prediction of a step's memory and seconds for each way to train, from a model's profile and the hardware."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

import torch

from lockstep.engines.ddp.bucket import ALIGNMENT, ParameterInfo, in_order_of_arrival, plan_buckets
from lockstep.engines.owners import owners_of
from lockstep.extensions.balancing.planner.hardware import Hardware
from lockstep.extensions.balancing.planner.partition import Block, Device, DoesNotFit, Split, Stage, partition
from lockstep.extensions.balancing.planner.profile import ModelProfile, ParameterProfile, SpanProfile, StepProfile
from lockstep.extensions.balancing.planner.timeline import (
    IN_ROUNDS,
    STAGES_OF_RANK,
    actions_of,
    most_in_flight,
    simulate,
)
from lockstep.extensions.balancing.planner.trace import BACKWARD, FORWARD, REST, UPDATE, OperationWork
from lockstep.ground.comm import PIECE

MIB = 2**20
BUCKET_MB = 25.0
"""Default size of a bucket of ddp."""
NAMES = {
    "sharded": "ddp, sharded optimizer",
    "fsdp_grads": "fsdp, SHARD_GRAD_OP",
    "fsdp_offload": "fsdp_cpu_offload",
}
"""Names of kinds in the table, if they differ."""
GROUP_CALLS = 20
"""Number of operations that gather, or shard, the parameters of a block."""


@dataclass(frozen=True)
class Candidate:
    """A way to train that a plan may choose: a strategy with the settings that change memory or time.

    Attributes:
        kind: "single", "dp", "ddp", "sharded" (ddp with a sharded optimizer), "fsdp", "fsdp_grads", "fsdp_offload",
            "deepspeed" or "pipeline".
        stage: ZeRO stage of deepspeed.
        offload: True if deepspeed keeps optimizer states, and in stage 3 parameters, on the host.
        recomputed: True if repeated blocks are recomputed in the backward; a pipeline chooses the blocks.
        hook: "" or "bf16": communication hook of ddp.
        bucket_mb: MiB of a bucket of ddp.
        micro_batches: number of micro-batches of a pipeline.
        schedule: schedule of a pipeline, which is "GPipe", "1F1B", "interleaved" or "zero-bubble".
        precision: as in ``Trainer(precision=...)``.
    """

    kind: str
    stage: int = 0
    offload: bool = False
    recomputed: bool = False
    hook: str = ""
    bucket_mb: float = BUCKET_MB
    micro_batches: int = 1
    schedule: str = ""
    precision: str = "32-true"

    @property
    def uses_host(self) -> bool:
        """True if model states are in the host's memory."""
        return self.offload or self.kind == "fsdp_offload"

    @property
    def plain(self) -> Candidate:
        """This candidate, but with default buckets and without hook, offload and recomputation."""
        return replace(self, bucket_mb=BUCKET_MB, hook="", offload=False, recomputed=False)

    @property
    def name(self) -> str:
        """Name of the candidate in a plan's table."""
        name = NAMES.get(self.kind, self.kind)
        if self.kind == "deepspeed":
            name = f"deepspeed_stage_{self.stage}" + "_offload" * self.offload
        variants = (
            (self.kind == "pipeline", f"{self.schedule}, {self.micro_batches} micro-batches"),
            (self.hook, f"{self.hook} hook"),
            (self.bucket_mb != BUCKET_MB, f"buckets of {self.bucket_mb:g} MiB"),
            (self.recomputed, "recomputation"),
        )
        return ", ".join([name, *(text for holds, text in variants if holds)])


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a training step under a candidate, and predicted memory of the rank that needs most.

    Attributes:
        candidate: the way to train.
        devices: number of devices that it uses.
        parts: bytes by purpose.
        memory: bytes at the peak.
        compute: seconds of forward and backward.
        sent: seconds of waiting for messages.
        update: seconds of the update.
        samples: number of samples in a step, over all devices.
        host: bytes on the host, for all devices of a node.
        missing: bytes that a device lacks; 0 if the candidate fits.
        why: what does not fit: the largest part, the host's memory, or a pipeline's error; "" if all fits.
        split: stages of a pipeline.
        obstacle: reason why the candidate cannot be run, or "".
        other: reason why the candidate changes the numbers of training (a precision, a compression), or "".
    """

    candidate: Candidate
    devices: int
    parts: dict[str, float]
    memory: float
    compute: float
    sent: float
    update: float
    samples: float
    host: float = 0.0
    missing: float = 0.0
    why: str = ""
    split: Split | None = field(default=None, compare=False)
    obstacle: str = ""
    other: str = ""

    @property
    def seconds(self) -> float:
        """Total seconds of a training step: computation, messages and update."""
        return self.compute + self.sent + self.update

    @property
    def rate(self) -> float:
        """Samples per second, over all devices."""
        return self.samples / self.seconds if self.seconds else math.inf

    @property
    def fits(self) -> bool:
        """True if the memory of the devices and of the host is sufficient."""
        return self.missing <= 0

    @property
    def eligible(self) -> bool:
        """True if a plan may choose this candidate: it fits, can be run, and leaves training's numbers unchanged."""
        return self.fits and not self.obstacle and not self.other


# -- bytes of model states -----------------------------------------------------------------------------------------


def _gradients(parameters: Iterable[ParameterProfile]) -> float:
    return float(sum(p.size for p in parameters if p.trainable))


def _states(parameters: Iterable[ParameterProfile]) -> float:
    return float(sum(p.like * p.elements + p.fixed for p in parameters))


def shard_elements(p: ParameterProfile, ranks: int) -> int:
    """Return the number of elements of a parameter in one rank's FSDP shard, which has whole rows and padding."""
    if not p.shape:
        return 1
    return -(-p.shape[0] // ranks) * (p.elements // max(p.shape[0], 1))


def _model_states(parameters: Sequence[ParameterProfile]) -> dict[str, float]:
    """Return the bytes without sharding, by purpose: "parameters", "gradients" and "optimizer states"."""
    size = float(sum(p.size for p in parameters))
    return {"parameters": size, "gradients": _gradients(parameters), "optimizer states": _states(parameters)}


def _unit_sizes(profile: ModelProfile) -> dict[int, float]:
    """Return a dict from each FSDP unit (a repeated block's index, or `REST`) to the bytes of its parameters."""
    sizes: dict[int, float] = {REST: 0.0}
    for p in profile.parameters:
        unit = p.unit if p.unit != REST and profile.blocks[p.unit].repeated else REST
        sizes[unit] = sizes.get(unit, 0.0) + p.size
    return sizes


# -- seconds -------------------------------------------------------------------------------------------------------


def span_seconds(span: SpanProfile, hardware: Hardware, precision: str) -> float:
    """Return the measured seconds of a span of operations; without a measurement, the cost model's estimate."""
    if span.seconds is not None:
        return span.seconds
    work = span.work
    # the arithmetic of products and the bytes of all operations, unless launching the operations takes longer
    return max(work.products / hardware.speed(precision) + work.moved / hardware.moved, work.calls * hardware.call)


def phase_seconds(spans: Iterable[SpanProfile], profile: ModelProfile, hardware: Hardware, phase: str) -> float:
    """Return the total seconds of a phase's spans on one device."""
    return sum(span_seconds(span, hardware, profile.precision) for span in spans if span.phase == phase)


def ring(size: float, ranks: int, hardware: Hardware, passes: int = 2) -> float:
    """Return the seconds of a ring all-reduce of ``size`` bytes; if ``passes`` is 1, of an all-gather."""
    bandwidth, latency = hardware.slowest_link()
    return passes * ((ranks - 1) / ranks * size / bandwidth + (ranks - 1) * latency)


# -- the ways, each with its formulas --------------------------------------------------------------------------------


class _Single:
    """Cost model of training in one process. Base class of the cost models of all other ways to train.

    Attributes:
        ranks: number of devices that take part.
        on_host: model states that an offloading candidate has in the host's memory.
    """

    alone = True
    """True if there is one device only."""
    cuts_batch = False
    """True if the batch of one device is divided over all."""

    def __init__(self, profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> None:
        self.profile, self.candidate, self.hardware = profile, candidate, hardware
        self.ranks = 1 if self.alone else hardware.world
        self.step = profile.step(candidate.recomputed)
        self.trained = _gradients(profile.parameters)
        self.on_host: tuple[str, ...] = ()

    def predict(self) -> Prediction:
        """Return the predicted memory and seconds of a training step, as a `Prediction`."""
        profile, hardware = self.profile, self.hardware
        rest = {"buffers": float(profile.buffers), "batches": float(profile.batch)}
        parts = {**self.states(), **rest, "activations": float(self.working())}
        offloaded = self.on_host if self.candidate.uses_host else ()
        host = sum((parts[name] for name in offloaded), 0.0) * hardware.devices
        parts |= dict.fromkeys(offloaded, 0.0)
        memory = sum(parts.values())
        compute, sent, update = self.seconds()
        # ranks of a host share its memory bandwidth, and possibly its cores
        if self.ranks > 1 and hardware.kind == "cpu":
            busy = 1 + (hardware.contention - 1) * (hardware.devices - 1)
            compute, update = busy * compute, busy * update
        samples = profile.samples * (1 if self.cuts_batch else self.ranks)
        found = Prediction(self.candidate, self.ranks, parts, memory, compute, sent, update, samples, host)
        if host > hardware.host_memory:
            return replace(found, missing=host - hardware.host_memory, why="the host's memory")
        if memory > hardware.memory:
            return replace(found, missing=memory - hardware.memory, why=max(parts, key=lambda name: parts[name]))
        return found

    def states(self) -> dict[str, float]:
        """Return the bytes of model states and buckets, by purpose, on the rank that needs the most memory."""
        return {**_model_states(self.profile.parameters), "buckets": 0.0}

    def working(self) -> float:
        """Return the peak memory in bytes, without the model states that :meth:`states` returns."""
        return max(map(self.working_in, self.step.spans))

    def working_in(self, span: SpanProfile) -> float:
        """Return the peak memory of a span in bytes, without the model states."""
        # states() counts all gradients, and before the end of the backward some do not exist yet
        return span.peak if span.phase == FORWARD else span.grown - self.trained

    def seconds(self) -> tuple[float, float, float]:
        """Return (compute, messages, update): seconds of computation, of waiting for messages, and of the update."""
        compute, sent = self.exchange(self.phase(FORWARD) + self.phase(BACKWARD))
        return compute, sent, self.phase(UPDATE)

    def phase(self, name: str) -> float:
        """Return the seconds of the phase ``name`` on one device."""
        return phase_seconds(self.step.spans, self.profile, self.hardware, name)

    def exchange(self, compute: float) -> tuple[float, float]:
        """Return (computation, messages) in seconds, if one device alone would compute for ``compute`` seconds."""
        return compute, 0.0


class _DataParallel(_Single):
    """Cost model of ``dp``, in which one process divides the batch over all devices."""

    alone, cuts_batch = False, True

    def working_in(self, span: SpanProfile) -> float:
        return super().working_in(span) / self.ranks

    def exchange(self, compute: float) -> tuple[float, float]:
        each = self.profile.size / self.hardware.link + self.hardware.latency
        return compute / self.ranks, 2 * (self.ranks - 1) * each


class _DDP(_Single):
    """Cost model of ``ddp``: each rank has a replica, and gradient buckets are reduced during the backward."""

    alone = False

    @cached_property
    def buckets(self) -> tuple[list[list[str]], list[list[str]]]:
        """Two lists of buckets (lists of parameter names): in order of registration, and of the gradients' arrival."""
        device, bucket = torch.device("cpu"), self.candidate.bucket_mb
        trained = [p for p in self.profile.parameters if p.trainable]
        infos = [ParameterInfo(p.name, p.size, torch.uint8, device) for p in trained]
        arrived = [p.name for p in sorted(trained, key=lambda p: p.arrival) if p.arrival >= 0]
        caps = [min(1.0, bucket) * MIB, bucket * MIB]
        return plan_buckets(infos, caps), plan_buckets(in_order_of_arrival(infos, arrived), caps)

    @cached_property
    def first(self) -> float:
        """Bytes of the first step's gradients that still exist in the second forward; 0 unless buckets are rebuilt."""
        # they are in the buckets by registration, which are freed after the forward
        registered, arrived = self.buckets
        return self.trained if registered != arrived else 0.0

    def waiting(self, arrived: float) -> float:
        """Return how many of the ``arrived`` bytes of computed gradients are not yet copied into a bucket."""
        sizes = {p.name: p.size for p in self.profile.parameters}
        # the gradients of a bucket are copied into it together
        for bucket in self.buckets[1]:
            size = sum(sizes[name] for name in bucket)
            if arrived <= size:
                return max(arrived, 0.0)
            arrived -= size
        return 0.0

    def states(self) -> dict[str, float]:
        # each gradient starts at a multiple of 16 bytes, and has a flag
        sizes = [-(-p.size // ALIGNMENT) * ALIGNMENT + p.itemsize for p in self.profile.parameters if p.trainable]
        return {**super().states(), "buckets": sum(sizes) - self.trained}

    def working_in(self, span: SpanProfile) -> float:
        # the buckets, which states() counts as gradients, exist all the time
        if span.phase == BACKWARD:
            return max(float(span.added), span.peak + self.waiting(span.grown - span.peak))
        return span.peak + (self.first if span.phase == FORWARD else 0.0)

    def exchange(self, compute: float) -> tuple[float, float]:
        return compute, self.exposed()

    def exposed(self) -> float:
        """Return for how many seconds a rank waits after its backward until all buckets are reduced.

        Buckets are reduced one after another, each when its gradients exist. If messages do not overlap with
        computation, all are reduced after the backward.
        """
        hardware, bucket = self.hardware, self.candidate.bucket_mb * MIB
        spans = [span for span in self.step.spans if span.phase == BACKWARD]
        last = {span.unit: index for index, span in enumerate(spans)}
        arriving: dict[int, float] = {}
        for p in self.profile.parameters:
            if p.trainable and p.unit in last:
                arriving[last[p.unit]] = arriving.get(last[p.unit], 0.0) + p.size
        now = end = waiting = 0.0
        for index, span in enumerate(spans):
            took = span_seconds(span, hardware, self.profile.precision) if hardware.overlaps else 0.0
            size = arriving.get(index, 0.0)
            pieces = max(1, math.ceil(size / bucket))
            for piece in range(1, pieces + 1):
                waiting += size / pieces
                if waiting >= bucket:
                    end = max(end, now + took * piece / pieces) + self.summed(waiting)
                    waiting = 0.0
            now += took
        if waiting:
            end = max(end, now) + self.summed(waiting)
        return max(end - now, 0.0)

    def summed(self, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes, in shared memory on one host, otherwise in a ring."""
        size *= 0.5 if self.candidate.hook == "bf16" else 1.0
        if self.hardware.shared and self.hardware.nodes == 1:
            return self.hardware.shared_latency + self.ranks / 2 * size / self.hardware.shared
        return ring(size, self.ranks, self.hardware)


class _SharedUpdate(_DDP):
    """Base class of cost models for engines in which each rank updates a part of the model."""

    @property
    def engine(self) -> str:
        """Name under which `Hardware.engines` has the engine's measured cost."""
        return self.candidate.kind

    def seconds(self) -> tuple[float, float, float]:
        hardware, profile = self.hardware, self.profile
        compute = self.phase(FORWARD) + self.phase(BACKWARD)
        # engines were measured on the CPU of one host; for others, messages follow from formulas
        cost = dict(hardware.engines).get(self.engine) if hardware.nodes == 1 else None
        if cost is None:
            compute, sent = self.exchange(compute)
        else:
            sent = cost.seconds(self.groups(), len(profile.parameters), profile.size, self.ranks)
        return compute, sent, self.on_the_host() if self.candidate.uses_host else self.phase(UPDATE) / self.ranks

    def groups(self) -> int:
        """Return how many groups of parameters are gathered: one per repeated block, and one for the rest."""
        return sum(block.repeated for block in self.profile.blocks) + 1

    def on_the_host(self) -> float:
        """Return the seconds of an update on the host, including the copies of gradients and weights."""
        hardware, work = self.hardware, OperationWork()
        for span in self.step.spans:
            if span.phase == UPDATE:
                work.add(span.work)
        moved = work.moved / self.ranks * hardware.devices / hardware.host_moved
        return max(moved + 2 * self.trained / self.ranks / hardware.host_link, work.calls / self.ranks * hardware.call)


class _Sharded(_SharedUpdate):
    """Cost model of ``ddp`` with a sharded optimizer: each parameter is updated by the rank that owns it."""

    def states(self) -> dict[str, float]:
        trained = [p for p in self.profile.parameters if p.trainable]
        owners = owners_of([p.size for p in trained], [0] * self.ranks)
        owned: list[list[ParameterProfile]] = [[] for _ in range(self.ranks)]
        for p, owner in zip(trained, owners, strict=True):
            owned[owner].append(p)
        return {**super().states(), "optimizer states": max(map(_states, owned))}

    def working_in(self, span: SpanProfile) -> float:
        if span.phase != UPDATE:
            return super().working_in(span)
        # buffers of the owners' new values, one piece of each in transit
        sends = min(float((self.ranks + 1) * PIECE), self.trained)
        return max(span.peak / self.ranks, sends)

    def exchange(self, compute: float) -> tuple[float, float]:
        return compute, self.exposed() + ring(self.trained, self.ranks, self.hardware, 1)


class _FullySharded(_SharedUpdate):
    """Cost model of FSDP: parameters are sharded, and a block's parameters are gathered while the block runs."""

    def __init__(self, profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> None:
        super().__init__(profile, candidate, hardware)
        self.keeps = candidate.kind == "fsdp_grads"
        self.on_host = ("optimizer states", "parameters", "gradients")

    @property
    def engine(self) -> str:
        return "fsdp_grads" if self.keeps else "fsdp"

    def states(self) -> dict[str, float]:
        parts = [(p, shard_elements(p, self.ranks)) for p in self.profile.parameters]
        return {
            "parameters": float(sum(count * p.itemsize for p, count in parts)),
            "gradients": float(sum(count * p.itemsize for p, count in parts if p.trainable)),
            "optimizer states": float(sum(p.like * count + p.fixed for p, count in parts)),
            "buckets": 0.0,
        }

    def working(self) -> float:
        """Return the peak bytes of activations, gathered parameters and full gradients, without the model states.

        A gather makes one flat copy and from it the parameters, so that both exist for a moment. During a block's
        backward, the flat copy of the previous block arrives, and gradients are copied into one flat tensor.
        """
        sizes, peaks = _unit_sizes(self.profile), list[float]()
        gathered = root = sizes.pop(REST)
        for span in self.step.spans:
            size = sizes.get(span.unit, 0.0)
            if span.phase == FORWARD:
                peaks.append(span.peak + gathered + size)
                gathered += size if self.keeps else 0.0
            elif span.phase == BACKWARD:
                before = sizes.get(span.unit - 1, 0.0) if size else 0.0
                whole = root + (sum(sizes.values()) if self.keeps else size + before)
                peaks.append(span.peak + whole + (size or root))
            else:
                peaks.append(span.peak / self.ranks)
        return max(peaks)

    def exchange(self, compute: float) -> tuple[float, float]:
        hardware, size, groups = self.hardware, self.profile.size, self.groups()
        gathers = 1 if self.keeps else 2
        total = gathers * ring(size, self.ranks, hardware, 1) + ring(self.trained, self.ranks, hardware, 1)
        latency = hardware.slowest_link()[1]
        total += (gathers + 1) * (groups - 1) * (self.ranks - 1) * latency
        if hardware.overlaps:
            return compute, max(total - compute, total / (groups + 1))
        # copies between flat tensors and parameters or gradients
        copied = (gathers + 1) * 2 * size / hardware.moved
        return compute + (copied + (gathers + 1) * groups * GROUP_CALLS * hardware.call), total


class _DeepSpeed(_FullySharded):
    """Cost model of DeepSpeed's engine, which updates its own float32 copy of the weights."""

    def __init__(self, profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> None:
        super().__init__(profile, candidate, hardware)
        self.cuts_parameters = candidate.stage == 3
        if not self.cuts_parameters:
            self.on_host = ("optimizer states",)

    @property
    def engine(self) -> str:
        return f"deepspeed {self.candidate.stage}"

    def states(self) -> dict[str, float]:
        trained = [p for p in self.profile.parameters if p.trainable]
        itemsize = max((p.itemsize for p in trained), default=4)
        like = max((p.like for p in trained), default=0) + 4
        fixed = max((p.fixed for p in trained), default=0)
        if self.cuts_parameters:
            part = float(sum(-(-p.elements // self.ranks) for p in trained))
            parameters = gradients = part * itemsize
        else:  # stages 1 and 2 pad all parameters together
            unit = 2 * self.ranks
            padded = -(-sum(p.elements for p in trained) // unit) * unit
            part, parameters, gradients = padded / self.ranks, float(padded * itemsize), 0.0
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer states": part * like + fixed,
            "buckets": 0.0,
        }

    def working(self) -> float:
        """Return the peak memory in bytes, without the model states.

        Gradients are gathered in buckets. In stages 1 and 2 the update creates whole ones.
        """
        sizes = _unit_sizes(self.profile)
        peaks = []
        for span in self.step.spans:
            if self.cuts_parameters:
                peaks.append(span.peak + sizes[REST] + 2 * sizes.get(span.unit, 0.0))
            elif span.phase == UPDATE:
                peaks.append(span.peak / self.ranks + 2 * self.trained)
            else:
                peaks.append(span.grown + self.trained / self.ranks)
        return max(peaks)

    def exchange(self, compute: float) -> tuple[float, float]:
        return super().exchange(compute) if self.cuts_parameters else (compute, self.exposed())


WAYS: dict[str, type[_Single]] = {
    "single": _Single,
    "dp": _DataParallel,
    "ddp": _DDP,
    "sharded": _Sharded,
    "fsdp": _FullySharded,
    "fsdp_grads": _FullySharded,
    "fsdp_offload": _FullySharded,
    "deepspeed": _DeepSpeed,
}


def predict(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Prediction:
    """Return the predicted memory and seconds of a training step under a candidate, as a `Prediction`.

    Args:
        profile: the model's profile in the candidate's precision.
        candidate: a way to train.
        hardware: the devices.
    """
    if candidate.kind == "pipeline":
        return _pipeline(profile, candidate, hardware)
    return WAYS[candidate.kind](profile, candidate, hardware).predict()


# -- pipelines -------------------------------------------------------------------------------------------------------


def _outside(step: StepProfile) -> tuple[list[SpanProfile], list[SpanProfile]]:
    """Return (early, late): spans of code before the first block, and spans of all other code outside the blocks."""
    early: list[SpanProfile] = []
    late: list[SpanProfile] = []
    for phase, direction in ((FORWARD, 1), (BACKWARD, -1)):
        spans = [span for span in step.spans if span.phase == phase][::direction]
        before = list(takewhile(lambda span: span.unit == REST, spans))
        early += before[::direction]
        late += [span for span in spans[len(before) :] if span.unit == REST][::direction]
    return early, late


def _chain(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Iterator[Block]:
    """Yield a `Block` for each block. The first and the last one include the code before and after the chain."""
    step, count = profile.steps["kept"], candidate.micro_batches
    last, (before, behind) = len(profile.blocks) - 1, profile.outside
    early, late = _outside(step)
    there = before  # bytes that the forwards up to a block keep
    for number, block in enumerate(profile.blocks):
        own = [s for s in step.spans if s.unit == number]
        ahead, after = early if number == 0 else [], late if number == last else []
        spans = own + ahead + after
        forward = phase_seconds(spans, profile, hardware, FORWARD)
        backward = phase_seconds(spans, profile, hardware, BACKWARD)
        # parameters outside the blocks are on all ranks, so that they count for none of the blocks
        mine = [p for p in profile.parameters if p.unit == number]
        there += block.kept
        kept = block.kept + (before if number == 0 else 0) + (behind if number == last else 0)
        working = max((s.peak for s in own if s.phase == BACKWARD), default=0) - there
        working = max([working, *(s.peak - there - behind for s in after)])
        yield Block(
            (forward + backward) / count,
            forward / count if block.repeated else math.inf,
            sum(_model_states(mine).values()),
            kept / count,
            min(block.sends, block.kept) / count,
            max(working, block.sends) / count,
            block.sends / count,
        )


def _memory_of_rank(profile: ModelProfile, stages: Sequence[Stage], flights: Sequence[float]) -> dict[str, float]:
    """Return the memory of one rank of a pipeline in bytes, by purpose.

    Args:
        profile: the model's profile.
        stages: the rank's stages.
        flights: for each device, the fraction of a batch whose activations it stores at the same time.
    """
    inside = {number for stage in stages for number in range(stage.start, stage.stop)}
    mine = [p for p in profile.parameters if p.unit == REST or p.unit in inside]
    states = sum(_model_states([p for p in mine if p.unit != REST]).values())
    # buffers for inputs and for gradients of outputs exist for all micro-batches
    followed = [stage for stage in stages if stage.stop < len(profile.blocks)]
    received = sum(profile.blocks[stage.start - 1].sends for stage in stages if stage.start)
    received += sum(profile.blocks[stage.stop - 1].sends for stage in followed)
    # an output that no backward needs exists until its gradient has arrived
    ends = [(stage, profile.blocks[stage.stop - 1]) for stage in followed]
    sent = sum(flights[stage.device] * max(block.sends - block.kept, 0) for stage, block in ends)
    update = max((s.peak for s in profile.steps["kept"].spans if s.phase == UPDATE), default=0)
    return {
        **_model_states(mine),
        "buckets": 0.0,
        "buffers": float(profile.buffers),
        "batches": float(profile.batch),
        "activations": max(sum(stage.memory for stage in stages) - states + sent, float(update)) + received,
    }


def _row(profile: ModelProfile, hardware: Hardware, each: int, in_flight: Sequence[float]) -> list[Device]:
    """Return one `Device` for each stage. A device that runs ``each`` stages divides its memory equally among them."""
    bandwidth, latency = hardware.slowest_link()
    everywhere = sum(_memory_of_rank(profile, (), ()).values())
    received = 2 * each * max(block.sends for block in profile.blocks)
    memory = (hardware.memory - everywhere - received) / each
    return [Device(1.0, memory, bandwidth, latency, most) for most in in_flight]


def _pipeline(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Prediction:
    """Predict memory and seconds of a pipeline by simulating its schedule with the best split."""
    schedule, count = candidate.schedule.lower(), candidate.micro_batches
    each = STAGES_OF_RANK.get(schedule, 1)
    ranks = min(hardware.world, len(profile.blocks) // each)
    actions = actions_of(schedule, ranks, count, each)
    in_flight = [most_in_flight(actions[at % ranks])[at] for at in range(each * ranks)]
    row = _row(profile, hardware, each, in_flight)
    blank = Prediction(candidate, ranks, {}, math.inf, 0.0, 0.0, 0.0, profile.samples)
    spares = schedule not in IN_ROUNDS
    try:
        split = partition(list(_chain(profile, candidate, hardware)), row, spares)
    except DoesNotFit as error:
        return replace(blank, missing=error.missing, why=str(error))
    if spares and len(split.stages) < ranks:
        ranks = len(split.stages)
        actions = actions_of(schedule, ranks, count)
    simulated = simulate([stage.seconds for stage in split.stages], actions)
    of_ranks = [split.stages[rank::ranks] for rank in range(ranks)]
    compute = count * max(sum(stage.seconds for stage in stages) for stages in of_ranks)
    flights = [most / count for most in in_flight]
    parts = max((_memory_of_rank(profile, stages, flights) for stages in of_ranks), key=lambda part: sum(part.values()))
    return replace(
        blank,
        devices=ranks,
        parts=parts,
        memory=sum(parts.values()),
        compute=compute,
        sent=max(each.end for each in simulated) - compute,
        update=phase_seconds(profile.steps["kept"].spans, profile, hardware, UPDATE) / ranks,
        split=split,
    )
