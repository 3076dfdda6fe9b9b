"""The memory and the seconds of a step under each way to train: formulas over a profile and hardware, nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from lockstep.engines.ddp.averaging import PIECE
from lockstep.engines.ddp.bucket import ALIGNMENT, ParameterInfo, Plan, in_order_of_arrival, plan_buckets
from lockstep.engines.owners import owners_of
from lockstep.planner.engines import EngineCost
from lockstep.planner.hardware import Hardware
from lockstep.planner.partition import Block, Device, DoesNotFit, Split, Stage, partition
from lockstep.planner.profile import ModelProfile, ParameterProfile, SpanProfile, StepProfile
from lockstep.planner.timeline import IN_ROUNDS, STAGES_OF_RANK, actions_of, held, play
from lockstep.planner.trace import BACKWARD, FORWARD, REST, UPDATE, OperationWork

MIB = 2**20
GROUP_CALLS = 20
"""Operations that gather, or cut, the parameters of a block."""


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        kind: "single", "dp", "ddp", "sharded" (ddp with a sharded optimizer), "fsdp", "fsdp_grads", "fsdp_offload",
            "deepspeed" or "pipeline".
        stage: of deepspeed.
        offload: deepspeed: optimizer states, and under stage 3 parameters, are on the host.
            Single and ddp: optimizer states are.
        recomputed: repeated blocks are computed again; a pipeline chooses the blocks.
        hook: "" or "bf16": how gradients of ddp travel.
        bucket_mb: MiB of a bucket of ddp.
        micro_batches: of a pipeline.
        schedule: of a pipeline: "GPipe", "1F1B", "interleaved" or "zero-bubble".
        precision: as of ``Trainer(precision=...)``.
    """

    kind: str
    stage: int = 0
    offload: bool = False
    recomputed: bool = False
    hook: str = ""
    bucket_mb: float = 25.0
    micro_batches: int = 1
    schedule: str = ""
    precision: str = "32-true"

    @property
    def uses_host(self) -> bool:
        """Whether model states are in the host's memory."""
        return self.offload or self.kind == "fsdp_offload"

    @property
    def name(self) -> str:
        """As the table shows it."""
        names = {
            "sharded": "ddp, sharded optimizer",
            "fsdp_grads": "fsdp, SHARD_GRAD_OP",
            "fsdp_offload": "fsdp_cpu_offload",
        }
        name = names.get(self.kind, self.kind)
        if self.kind == "deepspeed":
            name = f"deepspeed_stage_{self.stage}" + ("_offload" if self.offload else "")
        elif self.offload:
            name += ", offloaded optimizer"
        if self.kind == "pipeline":
            name += f", {self.schedule}, {self.micro_batches} micro-batches"
        if self.hook:
            name += f", {self.hook} hook"
        if self.bucket_mb != 25.0:
            name += f", buckets of {self.bucket_mb:g} MiB"
        return name + (", recomputation" if self.recomputed else "")


@dataclass(frozen=True)
class Prediction:
    """What a candidate would take, on the rank that takes most.

    Attributes:
        candidate: which.
        devices: how many it uses.
        parts: bytes by what they are for.
        memory: bytes at the peak.
        host: bytes on the host, for all devices of a node.
        compute, sent, update: seconds of forward and backward, of waiting for messages, and of the update.
        samples: of a step, over all devices.
        missing: bytes above what there is; 0 where it fits.
        why: what does not fit, or what is in the way.
        split: of a pipeline.
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

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.sent + self.update

    @property
    def rate(self) -> float:
        """Samples a second, over all devices."""
        return self.samples / self.seconds if self.seconds else math.inf

    @property
    def fits(self) -> bool:
        """Whether there is memory for it."""
        return self.missing <= 0


# -- bytes of model states -----------------------------------------------------------------------------------------


def _gradients(parameters: Iterable[ParameterProfile]) -> float:
    return float(sum(p.size for p in parameters if p.trainable))


def _states(parameters: Iterable[ParameterProfile]) -> float:
    return float(sum(p.like * p.elements + p.fixed for p in parameters))


def bucket_bytes(parameters: Iterable[ParameterProfile]) -> float:
    """The buckets of ddp: each gradient at a multiple of 16 bytes, and a flag for each."""
    total = 0
    for p in parameters:
        if p.trainable:
            total += -(-p.size // ALIGNMENT) * ALIGNMENT + p.itemsize
    return float(total)


def shard_elements(p: ParameterProfile, ranks: int) -> int:
    """Elements of a rank's part under FSDP: whole rows, filled up."""
    if not p.shape:
        return 1
    return -(-p.shape[0] // ranks) * (p.elements // max(p.shape[0], 1))


def bucket_plan(profile: ModelProfile, bucket_mb: float, *, at_first: bool = False) -> Plan:
    """Which gradients travel together, by name: at first in order of registration, then in that in which they come."""
    device = torch.device("cpu")
    trained = [p for p in profile.parameters if p.trainable]
    infos = [ParameterInfo(p.name, p.size, torch.uint8, device) for p in trained]
    caps = [min(1.0, bucket_mb) * MIB, bucket_mb * MIB]
    came = sorted((p.arrival, p.name) for p in trained if p.arrival >= 0)
    return plan_buckets(infos if at_first else in_order_of_arrival(infos, [name for _, name in came]), caps)


def is_laid_out_anew(profile: ModelProfile, bucket_mb: float) -> bool:
    """Whether ddp lays out its buckets anew after the first step, since gradients come in another order."""
    return bucket_plan(profile, bucket_mb, at_first=True) != bucket_plan(profile, bucket_mb)


def _owned_states(profile: ModelProfile, ranks: int) -> float:
    """Of a sharded optimizer: the states on the rank that has most. No parameter is cut."""
    trained = [p for p in profile.parameters if p.trainable]
    owners = owners_of([p.size for p in trained], [0] * ranks)
    return max(_states(p for p, owner in zip(trained, owners, strict=True) if owner == rank) for rank in range(ranks))


def model_states(profile: ModelProfile, candidate: Candidate, ranks: int) -> dict[str, float]:
    """Bytes of parameters, gradients, optimizer states and buckets on the rank that has most.

    Args:
        profile: of the model.
        candidate: the way to train.
        ranks: that share it.
    """
    every = profile.parameters
    size = float(sum(p.size for p in every))
    found = {"parameters": size, "gradients": _gradients(every), "optimizer states": _states(every), "buckets": 0.0}
    if candidate.kind in ("ddp", "sharded") and ranks > 1:
        found["buckets"] = bucket_bytes(every) - found["gradients"]
    if candidate.kind == "sharded" and ranks > 1:
        found["optimizer states"] = _owned_states(profile, ranks)
    if candidate.kind.startswith("fsdp"):
        found.update(_fully_sharded(profile, ranks))
    if candidate.kind == "deepspeed":
        found.update(_zero(profile, candidate.stage, ranks))
    return found


def _fully_sharded(profile: ModelProfile, ranks: int) -> dict[str, float]:
    """FSDP's: each rank has a part of each parameter."""
    parts = [(p, p.elements if not p.shape else shard_elements(p, ranks)) for p in profile.parameters]
    return {
        "parameters": float(sum(count * p.itemsize for p, count in parts)),
        "gradients": float(sum(count * p.itemsize for p, count in parts if p.trainable)),
        "optimizer states": float(sum(p.like * count + p.fixed for p, count in parts)),
    }


def _zero(profile: ModelProfile, stage: int, ranks: int) -> dict[str, float]:
    """DeepSpeed's: it steps weights of its own in float32; stages 1 and 2 pad all parameters together."""
    trained = [p for p in profile.parameters if p.trainable]
    itemsize = max((p.itemsize for p in trained), default=4)
    like = max((p.like for p in trained), default=0) + 4
    fixed = max((p.fixed for p in trained), default=0)
    if stage == 3:
        part = sum(-(-p.elements // ranks) for p in trained)
        return {"parameters": part * itemsize, "gradients": part * itemsize, "optimizer states": part * like + fixed}
    padded = -(-sum(p.elements for p in trained) // (2 * ranks)) * 2 * ranks
    return {"parameters": padded * itemsize, "gradients": 0.0, "optimizer states": padded * like / ranks + fixed}


# -- the peak ------------------------------------------------------------------------------------------------------


def _unit_sizes(profile: ModelProfile) -> dict[int, float]:
    """Bytes of the parameters that FSDP gathers together: of a repeated block, and of all the rest."""
    sizes: dict[int, float] = {REST: 0.0}
    for p in profile.parameters:
        alone = p.unit != REST and profile.blocks[p.unit].repeated
        sizes[p.unit if alone else REST] = sizes.get(p.unit if alone else REST, 0.0) + p.size
    return sizes


def _working(profile: ModelProfile, candidate: Candidate, ranks: int, states: dict[str, float]) -> float:
    """Bytes beside the model states at the moment when all together are most, less states that are not there then."""
    step = steps_of(profile, candidate)
    if candidate.kind.startswith("fsdp"):
        return _working_in_shards(profile, candidate, step, ranks)
    if candidate.kind == "deepspeed":
        return _working_of_zero(profile, candidate, step, ranks)
    gradients = states["gradients"]
    in_buckets = candidate.kind in ("ddp", "sharded") and ranks > 1
    # the first gradients lie in the first buckets, until they are dropped behind the next forward
    old = gradients if in_buckets and is_laid_out_anew(profile, candidate.bucket_mb) else 0.0
    # the owners' new values, a message of each under way
    sends = min(float((ranks + 1) * PIECE), gradients) if candidate.kind == "sharded" and ranks > 1 else 0.0
    share = ranks if candidate.kind == "sharded" else 1
    peaks: list[float] = []
    for span in step.spans:
        if in_buckets:  # gradients lie there all the time
            more = {FORWARD: span.peak + old, BACKWARD: span.added, UPDATE: max(span.peak / share, sends)}
            peaks.append(more[span.phase])
        else:
            peaks.append(span.peak if span.phase == FORWARD else span.grown - gradients)
    if candidate.kind == "dp":
        return max(peaks) / ranks
    return float(max(peaks))


def _working_in_shards(profile: ModelProfile, candidate: Candidate, step: StepProfile, ranks: int) -> float:
    """FSDP: what is gathered, and gradients before they are cut.

    A gather makes one flat copy, and from it the parameters, so that both are there for a moment. While a block's
    backward runs, the flat copy of the block before it comes; gradients are copied into one flat tensor, and cut.
    """
    sizes, peaks = _unit_sizes(profile), list[float]()
    keeps = candidate.kind == "fsdp_grads"
    root = sizes[REST]
    gathered = root
    for span in step.spans:
        alone = span.unit in sizes and span.unit != REST
        size = sizes[span.unit] if alone else 0.0
        if span.phase == FORWARD:
            peaks.append(span.peak + gathered + size)
            gathered += size if keeps else 0.0
        elif span.phase == BACKWARD:
            before = sizes.get(span.unit - 1, 0.0) if alone and span.unit > 0 else 0.0
            here = sum(sizes.values()) if keeps else root + size + before
            peaks.append(span.peak + here + (size if alone else root))
            peaks.append(span.peak + (here - size) + 2 * size)
        else:
            peaks.append(span.peak / ranks)
    return max(peaks)


def _working_of_zero(profile: ModelProfile, candidate: Candidate, step: StepProfile, ranks: int) -> float:
    """DeepSpeed: gradients are gathered in buckets, and in stages 1 and 2 the update makes whole ones."""
    sizes = _unit_sizes(profile)
    trained = _gradients(profile.parameters)
    peaks = []
    for span in step.spans:
        if candidate.stage == 3:
            size = sizes.get(span.unit, 0.0)
            peaks.append(span.peak + sizes[REST] + 2 * size)
        else:
            peaks.append(span.peak / ranks + 2 * trained if span.phase == UPDATE else span.grown + trained / ranks)
    return float(max(peaks))


def steps_of(profile: ModelProfile, candidate: Candidate) -> StepProfile:
    """The way in which a candidate plays the step."""
    return profile.steps["recomputed" if candidate.recomputed and "recomputed" in profile.steps else "kept"]


# -- seconds -------------------------------------------------------------------------------------------------------


def work_seconds(work: OperationWork, hardware: Hardware, precision: str) -> float:
    """Seconds of operations by the cost model: products, then what is moved, and the calls at least."""
    return max(work.products / hardware.speed(precision) + work.moved / hardware.moved, work.calls * hardware.call)


def span_seconds(span: SpanProfile, hardware: Hardware, precision: str) -> float:
    """Measured seconds, or those of the cost model."""
    return span.seconds if span.seconds is not None else work_seconds(span.work, hardware, precision)


def phase_seconds(profile: ModelProfile, candidate: Candidate, hardware: Hardware, phase: str) -> float:
    """Seconds of a phase on one device."""
    return _seconds_of(steps_of(profile, candidate).spans, profile, hardware, phase)


def _seconds_of(spans: Iterable[SpanProfile], profile: ModelProfile, hardware: Hardware, phase: str) -> float:
    return sum(span_seconds(span, hardware, profile.precision) for span in spans if span.phase == phase)


def ring(size: float, ranks: int, hardware: Hardware, passes: int = 2) -> float:
    """Seconds of an all-reduce of ``size`` bytes by a ring; of an all-gather or a reduce-scatter with one pass."""
    if ranks < 2:
        return 0.0
    bandwidth, latency = hardware.slowest_link()
    return passes * ((ranks - 1) / ranks * size / bandwidth + (ranks - 1) * latency)


def _summed(size: float, ranks: int, hardware: Hardware) -> float:
    """Seconds of an all-reduce of a bucket: in shared memory, where ranks of one host have it, else by a ring."""
    if hardware.shared and hardware.nodes == 1 and ranks > 1:
        return hardware.shared_latency + ranks / 2 * size / hardware.shared
    return ring(size, ranks, hardware)


def _exposed(profile: ModelProfile, candidate: Candidate, hardware: Hardware, ranks: int) -> float:
    """Seconds for which ddp waits for its buckets when the backward has ended.

    Buckets travel one after another, each when its gradients are there.
    """
    factor = 0.5 if candidate.hook == "bf16" else 1.0
    now = end = waiting = 0.0
    spans = [s for s in steps_of(profile, candidate).spans if s.phase == BACKWARD]
    by_unit: dict[int, float] = {}
    for p in profile.parameters:
        by_unit[p.unit] = by_unit.get(p.unit, 0.0) + p.size * p.trainable
    last = {span.unit: index for index, span in enumerate(spans)}
    for index, span in enumerate(spans):
        begun = now
        now += span_seconds(span, hardware, profile.precision)
        size = by_unit.get(span.unit, 0.0) if last[span.unit] == index else 0.0
        pieces = max(1, math.ceil(size / (candidate.bucket_mb * MIB)))
        for piece in range(pieces):
            waiting += size / pieces
            if waiting >= candidate.bucket_mb * MIB:
                ready = begun + (now - begun) * (piece + 1) / pieces if hardware.overlaps else math.inf
                end = max(end, ready if ready < math.inf else 0.0) + _summed(waiting * factor, ranks, hardware)
                waiting = 0.0
    if waiting:
        end = max(end, now if hardware.overlaps else 0.0) + _summed(waiting * factor, ranks, hardware)
    return max(end - now, 0.0) if hardware.overlaps else end


def _engine(candidate: Candidate, hardware: Hardware) -> EngineCost | None:
    """What the engine of a candidate was measured to cost, on the ranks of one host."""
    kind = {"deepspeed": f"deepspeed {candidate.stage}", "fsdp_offload": "fsdp"}.get(candidate.kind, candidate.kind)
    return dict(hardware.engines).get(kind) if hardware.nodes == 1 else None


def _seconds(profile: ModelProfile, candidate: Candidate, hardware: Hardware, ranks: int) -> tuple[float, float, float]:
    """Seconds of computation, of waiting for messages, and of the update."""
    forward, backward, update = (phase_seconds(profile, candidate, hardware, p) for p in (FORWARD, BACKWARD, UPDATE))
    compute = forward + backward
    size = sum(p.size for p in profile.parameters)
    trained = _gradients(profile.parameters)
    cost = _engine(candidate, hardware)
    if candidate.kind == "single":
        sent = 0.0
    elif candidate.kind == "dp":
        compute, sent = compute / ranks, 2 * (ranks - 1) * (size / hardware.link + hardware.latency)
    elif candidate.kind == "ddp":
        sent = _exposed(profile, candidate, hardware, ranks)
    elif cost is not None:
        sent, update = cost.seconds(_groups(profile), len(profile.parameters), size, ranks), update / ranks
    elif candidate.kind == "sharded":  # owners broadcast what they have updated
        sent, update = _exposed(profile, candidate, hardware, ranks) + ring(trained, ranks, hardware, 1), update / ranks
    elif candidate.kind == "deepspeed" and candidate.stage < 3:
        sent, update = _exposed(profile, candidate, hardware, ranks), update / ranks
    else:
        compute, sent = _in_shards(profile, candidate, hardware, ranks, compute)
        update /= ranks
    if candidate.uses_host and candidate.kind in ("single", "ddp"):  # states come to the device and go back
        update += 2 * _states(profile.parameters) / hardware.host_link
    elif candidate.uses_host:
        update = _update_on_host(profile, candidate, hardware, ranks)
    return compute, sent, update


def _groups(profile: ModelProfile) -> int:
    """How many groups of parameters are gathered one by one: the repeated blocks, and all the rest."""
    return sum(1 for block in profile.blocks if block.repeated) + 1


def _in_shards(
    profile: ModelProfile, candidate: Candidate, hardware: Hardware, ranks: int, compute: float
) -> tuple[float, float]:
    """Seconds of computation and of waiting where each rank has a part of each parameter."""
    size, trained = sum(p.size for p in profile.parameters), _gradients(profile.parameters)
    gathers = 1 if candidate.kind == "fsdp_grads" else 2
    groups = _groups(profile)
    total = gathers * ring(size, ranks, hardware, 1) + ring(trained, ranks, hardware, 1)
    latency = hardware.slowest_link()[1]
    total += (gathers + 1) * (groups - 1) * (ranks - 1) * latency
    if hardware.overlaps:
        return compute, max(total - compute, total / (groups + 1))
    copied = (gathers + 1) * 2 * size / hardware.moved  # between flat tensors and parameters or gradients
    return compute + (copied + (gathers + 1) * groups * GROUP_CALLS * hardware.call), total


def _update_on_host(profile: ModelProfile, candidate: Candidate, hardware: Hardware, ranks: int) -> float:
    """Seconds of an update by the host: gradients go there, weights come back."""
    work = [span.work for span in steps_of(profile, candidate).spans if span.phase == UPDATE]
    moved, calls = sum(each.moved for each in work), sum(each.calls for each in work)
    trained = _gradients(profile.parameters)
    update = moved / ranks * hardware.devices / hardware.host_moved + 2 * trained / ranks / hardware.host_link
    return max(update, calls / ranks * hardware.call)


# -- together --------------------------------------------------------------------------------------------------------


def _on_host(candidate: Candidate) -> tuple[str, ...]:
    """The model states that are in the host's memory."""
    if not candidate.uses_host:
        return ()
    if candidate.kind == "fsdp_offload" or (candidate.kind == "deepspeed" and candidate.stage == 3):
        return "optimizer states", "parameters", "gradients"
    return ("optimizer states",)


def predict(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Prediction:
    """Memory and seconds of a step under a candidate.

    Args:
        profile: of the model, in the candidate's precision.
        candidate: the way to train.
        hardware: the devices.
    """
    if candidate.kind == "pipeline":
        return _pipeline(profile, candidate, hardware)
    ranks = 1 if candidate.kind == "single" else hardware.world
    states = model_states(profile, candidate, ranks)
    rest = {"buffers": float(profile.buffers), "batches": float(profile.batch)}
    parts = {**states, **rest, "activations": _working(profile, candidate, ranks, states)}
    away = _on_host(candidate)
    host = sum((parts[name] for name in away), 0.0) * (1 if ranks == 1 else hardware.devices)
    parts |= dict.fromkeys(away, 0.0)
    memory = sum(parts.values())
    compute, sent, update = _seconds(profile, candidate, hardware, ranks)
    if ranks > 1 and hardware.kind == "cpu":  # ranks of a host share its memory, and perhaps its cores
        busy = 1 + (hardware.contention - 1) * (hardware.devices - 1)
        compute, update = busy * compute, busy * update
    samples = profile.samples * (1 if candidate.kind in ("single", "dp") else ranks)
    found = Prediction(candidate, ranks, parts, memory, compute, sent, update, samples, host)
    if host > hardware.host_memory:
        return replace(found, missing=host - hardware.host_memory, why="the host's memory")
    most = max(parts, key=lambda name: parts[name])
    return replace(found, missing=max(memory - hardware.memory, 0.0), why=most if memory > hardware.memory else "")


def _outside(step: StepProfile) -> tuple[list[SpanProfile], list[SpanProfile]]:
    """What runs outside of blocks before the first and behind the last one, but for the update."""
    early: list[SpanProfile] = []
    late: list[SpanProfile] = []
    for span in step.spans:
        if span.unit == REST and span.phase != UPDATE:
            (early if _early(step, span) else late).append(span)
    return early, late


def _chain(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Iterator[Block]:
    """The blocks as a chain; what runs before the first and behind the last one goes with these.

    Parameters outside of blocks are on all ranks, and in no block here.
    """
    step, count = profile.steps["kept"], candidate.micro_batches
    last, (before, behind) = len(profile.blocks) - 1, profile.outside
    early, late = _outside(step)
    there = before  # bytes that the forwards up to a block keep
    for number, block in enumerate(profile.blocks):
        own = [s for s in step.spans if s.unit == number]
        ahead, after = early if number == 0 else [], late if number == last else []
        spans = own + ahead + after
        forward = _seconds_of(spans, profile, hardware, FORWARD)
        backward = _seconds_of(spans, profile, hardware, BACKWARD)
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


def _model_states(parameters: Sequence[ParameterProfile]) -> dict[str, float]:
    """Of parameters that are whole, with gradients of their own."""
    size = float(sum(p.size for p in parameters))
    return {"parameters": size, "gradients": _gradients(parameters), "optimizer states": _states(parameters)}


def _early(step: StepProfile, span: SpanProfile) -> bool:
    """Whether a part that belongs to no block runs before the first one, or behind it in the backward."""
    here = next(index for index, one in enumerate(step.spans) if one is span)
    blocks = [index for index, one in enumerate(step.spans) if one.phase == span.phase and one.unit != REST]
    return not blocks or (here < blocks[0] if span.phase == FORWARD else here > blocks[-1])


def _at_borders(profile: ModelProfile, stages: Sequence[Stage], flights: Sequence[float]) -> tuple[float, float]:
    """What stages receive (inputs, and gradients of outputs), and the outputs that no backward needs.

    Received are those of all micro-batches; an output is there until its gradient has come.
    """
    followed = [stage for stage in stages if stage.stop < len(profile.blocks)]
    inputs = [profile.blocks[stage.start - 1].sends for stage in stages if stage.start]
    outputs = [profile.blocks[stage.stop - 1] for stage in followed]
    not_kept = [max(block.sends - block.kept, 0) for block in outputs]
    return (
        sum(inputs) + sum(block.sends for block in outputs),
        sum(flights[stage.device] * size for stage, size in zip(followed, not_kept, strict=True)),
    )


def _of_rank(profile: ModelProfile, stages: Sequence[Stage], flights: Sequence[float]) -> dict[str, float]:
    """What a rank of a pipeline holds: its stages, and what is outside of blocks.

    Args:
        profile: of the model.
        stages: of the rank.
        flights: by device of the row: the part of a batch whose activations it holds at the same time.
    """
    inside = {number for stage in stages for number in range(stage.start, stage.stop)}
    mine = [p for p in profile.parameters if p.unit == REST or p.unit in inside]
    states = sum(_model_states([p for p in mine if p.unit != REST]).values())
    received, sent = _at_borders(profile, stages, flights)
    update = max((s.peak for s in profile.steps["kept"].spans if s.phase == UPDATE), default=0)
    return {
        **_model_states(mine),
        "buckets": 0.0,
        "buffers": float(profile.buffers),
        "batches": float(profile.batch),
        "activations": max(sum(stage.memory for stage in stages) - states + sent, float(update)) + received,
    }


def _row(profile: ModelProfile, hardware: Hardware, each: int, in_flight: Sequence[float]) -> list[Device]:
    """The devices in the order of the stages, ``each`` stages on one, with the memory that a stage may fill there."""
    bandwidth, latency = hardware.slowest_link()
    everywhere = sum(_of_rank(profile, (), ()).values())
    received = 2 * each * max(block.sends for block in profile.blocks)
    memory = (hardware.memory - everywhere - received) / each
    return [Device(1.0, memory, bandwidth, latency, most) for most in in_flight]


def _pipeline(profile: ModelProfile, candidate: Candidate, hardware: Hardware) -> Prediction:
    """One batch in micro-batches through stages, of which each device has one, or several that go round the devices."""
    schedule, count = candidate.schedule.lower(), candidate.micro_batches
    each = STAGES_OF_RANK.get(schedule, 1)
    ranks = min(hardware.world, len(profile.blocks) // each)
    actions = actions_of(schedule, ranks, count, each)
    in_flight = [held(actions[at % ranks])[at] for at in range(each * ranks)]
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
    bars = play([stage.seconds for stage in split.stages], actions)
    of_ranks = [split.stages[rank::ranks] for rank in range(ranks)]
    compute = count * max(sum(stage.seconds for stage in stages) for stages in of_ranks)
    flights = [most / count for most in in_flight]
    parts = max((_of_rank(profile, stages, flights) for stages in of_ranks), key=lambda part: sum(part.values()))
    return replace(
        blank,
        devices=ranks,
        parts=parts,
        memory=sum(parts.values()),
        compute=compute,
        sent=max(bar.end for bar in bars) - compute,
        update=phase_seconds(profile, candidate, hardware, UPDATE) / ranks,
        split=split,
    )
