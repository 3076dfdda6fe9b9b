"""A plan: every way to train with its memory and its seconds, the one to choose and why, and the file that keeps it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_type_hints

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.extensions import is_there
from lockstep.memory.meter import readable

if TYPE_CHECKING:  # else imported where a plan is made: each Trainer names this file, and few make a plan
    from lockstep.extensions.balancing.planner.cost import Candidate, Prediction
    from lockstep.extensions.balancing.planner.hardware import Hardware
    from lockstep.extensions.balancing.planner.profile import ModelProfile

Goal = Literal["speed", "memory"]
NEAR, NEAR_COMPUTED = 0.05, 0.15
"""Rates that differ by less count as equal, where seconds were measured and where they come from the cost model: the
simpler way is chosen."""
ORDER = ("single", "ddp", "fsdp_grads", "fsdp", "sharded", "deepspeed", "dp", "fsdp_offload", "pipeline")
"""Kinds of candidates, simple ones first."""

# -- all ways --------------------------------------------------------------------------------------------------------


def candidates(profile: ModelProfile, hardware: Hardware) -> Iterator[Candidate]:
    """The ways to train a model on these devices.

    Args:
        profile: of the model.
        hardware: the devices.
    """
    for way in _ways(hardware):
        yield replace(way, precision=profile.precision)
        # under stage 3 a second forward keeps other tensors than the first, which torch's checkpointing refuses
        again = way.kind != "dp" and way.stage < 3 and way.bucket_mb == 25.0 and not way.hook
        if again and "recomputed" in profile.steps:
            yield replace(way, precision=profile.precision, recomputed=True)
    if hardware.world > 1 and len(profile.blocks) > 1:
        yield from _pipelines(profile, hardware)


def _ways(hardware: Hardware) -> list[Candidate]:
    """The ways in which each device runs the whole model."""
    from lockstep.extensions.balancing.planner.cost import Candidate

    several, on_gpu = hardware.world > 1, hardware.kind != "cpu"
    ways = [
        (True, Candidate("single")),
        (several and hardware.nodes == 1, Candidate("dp")),
        *((several, Candidate(kind)) for kind in ("ddp", "sharded", "fsdp_grads", "fsdp")),
        *((several and hardware.overlaps, Candidate("ddp", bucket_mb=size)) for size in (5.0, 100.0)),
        (several, Candidate("ddp", hook="bf16")),
        *((several, Candidate("deepspeed", stage=stage)) for stage in (1, 2, 3)),
        (on_gpu, Candidate("fsdp_offload")),
        *((on_gpu, Candidate("deepspeed", stage=stage, offload=True)) for stage in (2, 3)),
    ]
    return [way for offered, way in ways if offered]


def _pipelines(profile: ModelProfile, hardware: Hardware) -> Iterator[Candidate]:
    """Pipelines of all devices, by schedule and number of micro-batches."""
    from lockstep.extensions.balancing.planner.cost import Candidate
    from lockstep.extensions.balancing.planner.timeline import IN_ROUNDS, STAGES_OF_RANK

    for times in (1, 2, 4):
        count = times * hardware.world
        if count <= profile.samples:
            for schedule in ("GPipe", "1F1B", *IN_ROUNDS):
                stages = hardware.world * STAGES_OF_RANK.get(schedule, 1)
                if schedule not in IN_ROUNDS or len(profile.blocks) >= stages:
                    yield Candidate("pipeline", micro_batches=count, schedule=schedule, precision=profile.precision)


def obstacle(profile: ModelProfile, candidate: Candidate, hardware: Hardware, packages: frozenset[str]) -> str:
    """Why a candidate cannot be run although it may fit; "" where it can.

    Args:
        profile: of the model.
        candidate: the way to train.
        hardware: the devices.
        packages: optional ones that are there.
    """
    if candidate.kind == "pipeline":
        return 'predicted, not chosen: the module needs a chain of blocks; give strategy="balanced"'
    extension = {"deepspeed": "deepspeed", "dp": "parallel"}.get(candidate.kind)
    if extension is not None and not is_there(extension):
        return f"needs the extension {extension}"
    if candidate.kind == "deepspeed" and "deepspeed" not in packages:
        return "needs the package deepspeed"
    if candidate.kind == "deepspeed" and not profile.elementwise:
        return "the optimizer needs whole parameters"
    if candidate.kind == "sharded" and not profile.parameter_wise:
        return "the optimizer needs all parameters together"
    if candidate.kind == "dp" and profile.samples < hardware.devices:
        return f"{profile.samples} samples cannot be cut over {hardware.devices} devices"
    return ""


# -- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Ways to train a model on some devices, and the one to choose.

    Attributes:
        profile: of the model, in the precision that was asked for.
        hardware: the devices.
        rows: all ways.
        choice: the best; None where nothing fits.
        reason: why, in a sentence or two.
    """

    profile: ModelProfile
    hardware: Hardware
    rows: tuple[Prediction, ...]
    choice: Prediction | None
    reason: str

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, everything: bool = False) -> Iterator[str]:
        """The table, the choice, its reason.

        Args:
            everything: also ways that are not worth choosing: pipelines and variants of a way that gain nothing.
        """
        model, there = self.profile, self.hardware
        yield (
            f"{model.name}: {_count(model.elements)} parameters, {len(model.blocks)} blocks, {model.samples:g} samples "
            f"on a device, {model.precision}; seconds " + ("measured" if model.device else "by the cost model")
        )
        nodes = f"{there.nodes} nodes of " if there.nodes > 1 else ""
        yield f"{nodes}{there.devices} x {there.name}, {readable(there.memory)} each for the run"
        yield ""
        rows = [row for row in self.rows if everything or self._is_worth(row)]
        width = max(len(self._name(row)) for row in rows)
        yield f"  {'way':<{width}}  {'memory':>10}  {'step':>9}  {'samples/s':>9}"
        for row in sorted(rows, key=lambda row: (not row.eligible, bool(row.other), -row.rate)):
            if row.fits:
                numbers = f"{readable(row.memory):>10}  {_time(row.seconds):>9}  {row.rate:>9.4g}"
                note = row.obstacle or row.other
            else:
                memory = readable(row.memory) if row.parts else "-"
                numbers, note = f"{memory:>10}  {'-':>9}  {'-':>9}", f"{readable(row.missing)} too much: {row.why}"
            chosen = "*" if row is self.choice else " "
            yield f"{chosen} {self._name(row):<{width}}  {numbers}  {note}".rstrip()
        if len(rows) < len(self.rows):
            left_out = len(self.rows) - len(rows)
            yield f"  and {left_out} more that gain nothing: lockstep plan --all, Plan.lines(everything=True)"
        yield ""
        yield self.reason

    def _is_worth(self, row: Prediction) -> bool:
        """Whether somebody might choose it: a variant that gains something, a pipeline that beats the choice."""
        if row.candidate.kind == "pipeline":
            alike = [each for each in self.rows if _kind(each) == _kind(row)]
            best = max(alike, key=lambda each: (each.fits, each.rate, -each.missing))
            return row is best and (self.choice is None or row.rate > self.choice.rate * (1 + NEAR))
        base = next((each for each in self.rows if each.candidate == row.candidate.plain), row)
        gains = row.rate > base.rate * (1 + NEAR) or row.memory < base.memory * (1 - NEAR_COMPUTED)
        return gains or row in (self.choice, base) or not base.fits

    def _name(self, row: Prediction) -> str:
        precision = row.candidate.precision
        return row.candidate.name + (f", {precision}" if precision != self.profile.precision else "")

    def save(self, path: str | Path) -> None:
        """Write the choice to a file for ``Trainer(strategy="plan.yaml")``.

        Raises:
            MisconfigurationException: nothing fits, so that there is no choice.
        """
        if self.choice is None:
            raise MisconfigurationException(f"{path}: there is nothing to save. {self.reason}")
        Path(path).write_text(SavedPlan.of(self).text())


def _kind(row: Prediction) -> tuple[str, str]:
    return row.candidate.kind, row.candidate.precision


def _count(number: float) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def make_plan(
    profiles: Sequence[ModelProfile], hardware: Hardware, *, goal: Goal = "speed", packages: Sequence[str] = ()
) -> Plan:
    """Predict every way to train and choose one: a pure function of what it is given.

    Args:
        profiles: of one model: first in the precision that was asked for, then in others, which are shown.
        hardware: the devices.
        goal: "speed": the most samples a second of what fits, the simpler way where two are as good as equal;
            "memory": the least memory on a device.
        packages: optional ones that are there: "deepspeed".

    Example::

        plan = make_plan([profile], described(devices=8, memory=80e9), packages=["deepspeed"])
        print(plan)
    """
    from lockstep.extensions.balancing.planner.cost import predict

    if goal not in ("speed", "memory"):
        raise MisconfigurationException(f'goal={goal!r}: give "speed" or "memory"')
    rows = []
    for profile in profiles:
        for candidate in candidates(profile, hardware):
            row = predict(profile, candidate, hardware)
            other = "" if profile is profiles[0] else "other numbers: the precision"
            if candidate.hook:
                other = "other numbers: gradients are rounded"
            in_the_way = obstacle(profile, candidate, hardware, frozenset(packages))
            rows.append(replace(row, obstacle=in_the_way, other=other))
    eligible = [row for row in rows if row.eligible]
    if not eligible:
        return Plan(profiles[0], hardware, tuple(rows), None, _nothing_fits(profiles[0], rows, hardware))
    near = NEAR if profiles[0].device else NEAR_COMPUTED
    choice = _fastest(eligible, near) if goal == "speed" else _smallest(eligible)
    return Plan(profiles[0], hardware, tuple(rows), choice, _reason(choice, rows, hardware, goal, near))


def _place(prediction: Prediction) -> tuple[int, int, bool, bool, float]:
    one = prediction.candidate
    return ORDER.index(one.kind), one.stage, one.offload, one.recomputed, abs(one.bucket_mb - 25.0)


def _fastest(found: Sequence[Prediction], near: float) -> Prediction:
    best = max(one.rate for one in found)
    return min((one for one in found if one.rate >= best * (1 - near)), key=_place)


def _smallest(found: Sequence[Prediction]) -> Prediction:
    found = [one for one in found if one.candidate.kind != "dp"] or found  # it cuts the batch, which others could, too
    least = min(one.memory for one in found)
    near = [one for one in found if one.memory <= least * (1 + NEAR_COMPUTED)]
    return min(near, key=lambda one: (not one.candidate.offload, one.candidate.kind != "deepspeed", _place(one)))


def _reason(choice: Prediction, rows: Sequence[Prediction], hardware: Hardware, goal: Goal, near: float) -> str:
    """The sentence that says why."""
    name = choice.candidate.name
    takes = f"{readable(choice.memory)} of {readable(hardware.memory)} on each device"
    if goal == "memory":
        return f"{name}: the least memory of all that can be run, {takes}."
    said = f"{name}: {takes}, {_time(choice.seconds)} a step, {choice.rate:.4g} samples a second"
    plain = [row for row in rows if not row.other and row.candidate == row.candidate.plain]
    simpler = [one for one in plain if one.candidate.kind in ("single", "ddp") and _place(one) < _place(choice)]
    last = next((one for one in reversed(simpler) if not one.fits), None)
    if last is not None:
        lacks = f"{last.candidate.name} lacks {readable(last.missing)} on each device"
        return f"{said}. {lacks} (most of it are its {last.why})."
    if choice.candidate.kind == "single" and hardware.world > 1:
        return f"{said}; more devices would wait for their messages longer than they compute."
    return f"{said}; the model fits, and no other way is faster by more than {near:.0%}."


def _nothing_fits(profile: ModelProfile, rows: Sequence[Prediction], hardware: Hardware) -> str:
    """What is missing, and what would make it fit."""
    found = min((row for row in rows if not row.other and not row.obstacle), key=lambda row: row.missing)
    said = (
        f"Nothing fits: {found.candidate.name} is nearest and needs {readable(found.missing)} more than the "
        f"{readable(hardware.memory)} of a device."
    )
    fitting = sorted({row.candidate.precision for row in rows if row.other and row.fits} - {found.candidate.precision})
    precisions = [f'precision="{precision}"' for precision in fitting]
    ways = [*_by_smaller_batch(profile, found), *precisions, *_by_more_devices(found, hardware)]
    ways.append(f"devices of {readable(found.memory * 1.1)}")
    return f"{said} What would fit: {'; '.join(ways)}."


def _by_smaller_batch(profile: ModelProfile, found: Prediction) -> list[str]:
    by_batch = max(span.peak for span in profile.step(found.candidate.recomputed).spans)
    return ["half the batch with accumulate_grad_batches=2"] if by_batch / 2 >= found.missing else []


def _by_more_devices(found: Prediction, hardware: Hardware) -> list[str]:
    states = sum(found.parts.get(name, 0.0) for name in ("parameters", "gradients", "optimizer states"))
    if states <= found.missing:
        return []
    count = hardware.world * states / (states - found.missing)
    return [f"about {max(hardware.world + 1, round(count + 0.5))} devices with fsdp"]


# -- the file ----------------------------------------------------------------------------------------------------------


LARGEST = 2**20
"""Bytes of a plan's file that are looked at."""
OF_CANDIDATE = ("stage", "offload", "recomputed", "bucket_mb", "precision")
"""What a file has of the candidate by the names that the candidate has for it."""


@dataclass(frozen=True)
class SavedPlan:
    """The choice of a plan, as a file has it: lines ``name: value`` whose values are JSON, which is YAML, too.

    Attributes:
        model, key: the class of the model, and what tells it from others.
        strategy: kind of the candidate; the fields after it are the candidate's.
        devices, nodes, device: for which machine.
        memory, seconds, samples: what was predicted.
        available: bytes of a device that a run could use.
        reason: of the choice.
    """

    model: str
    key: str
    strategy: str
    stage: int
    offload: bool
    recomputed: bool
    bucket_mb: float
    precision: str
    devices: int
    nodes: int
    device: str
    available: float
    memory: float
    seconds: float
    samples: float
    reason: str

    @classmethod
    def of(cls, plan: Plan) -> SavedPlan:
        """The file's contents for a plan with a choice."""
        choice, there = plan.choice, plan.hardware
        assert choice is not None
        one = choice.candidate
        devices, nodes = (1, 1) if choice.devices == 1 else (there.devices, there.nodes)
        return cls(
            model=plan.profile.name,
            key=plan.profile.key,
            strategy=one.kind,
            **{name: getattr(one, name) for name in OF_CANDIDATE},
            devices=devices,
            nodes=nodes,
            device=there.name,
            available=there.memory,
            memory=choice.memory,
            seconds=choice.seconds,
            samples=choice.samples,
            reason=plan.reason,
        )

    @property
    def candidate(self) -> Candidate:
        """The way to train."""
        from lockstep.extensions.balancing.planner.cost import Candidate

        return Candidate(self.strategy, **{name: getattr(self, name) for name in OF_CANDIDATE})

    def text(self) -> str:
        """What is written."""
        rows = [f"{name}: {json.dumps(value)}" for name, value in vars(self).items()]
        return "\n".join(['# made by `lockstep plan`, for Trainer(strategy="...")', *rows, ""])

    @classmethod
    def read(cls, path: str | Path) -> SavedPlan:
        """What a file says.

        Raises:
            MisconfigurationException: there is no such file, or it is no plan.
        """
        try:
            with open(path, "rb") as file:
                text = file.read(LARGEST).decode(errors="replace")  # what is no text is no plan
        except OSError as error:
            raise MisconfigurationException(
                f'Trainer(strategy="{path}"): {error.strerror or error}: make it by `lockstep plan script.py --save '
                f"{path}`."
            ) from None
        found = {m[1]: m[2] for line in text.splitlines() if (m := re.fullmatch(r"(\w+): (.+)", line.strip()))}
        try:
            saved = cls(**{name: json.loads(value) for name, value in found.items()})
            saved._check()
            return saved
        except (TypeError, ValueError, RecursionError):
            raise MisconfigurationException(
                f'Trainer(strategy="{path}"): the file is no plan of this release: make it anew by `lockstep plan`.'
            ) from None

    def _check(self) -> None:
        """Compare the values with what they are to be.

        Raises:
            ValueError: one is of another type, or no number that there is, or two do not go together.
        """
        for name, wanted in get_type_hints(type(self)).items():
            value = getattr(self, name)
            right = type(value) in ((int, float) if wanted is float else (wanted,))
            if not right or (wanted in (int, float) and not 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r}")
        if self.offload and self.strategy != "deepspeed":
            raise ValueError(f"{self.strategy} has no offload")

    def check_machine(self, available: float, where: str) -> None:
        """Refuse a machine whose devices have less memory than the plan needs.

        Args:
            available: bytes of a device.
            where: for the message.
        """
        if available < self.memory:
            raise MisconfigurationException(
                f"{where} needs {readable(self.memory)} on each device, and a device here has {readable(available)}: "
                f"it was made for {self.device}; make one for this machine."
            )

    def check_model(self, name: str, key: str, where: str) -> None:
        """Refuse another model.

        Args:
            name, key: of the model at hand.
            where: for the message.
        """
        if key != self.key:
            raise MisconfigurationException(
                f"{where} was made for {self.model}, whose parameters are others than those of this {name}: make a "
                "plan for this model, or give strategy= a name."
            )
