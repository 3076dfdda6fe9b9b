"""Plans: predicted memory and time of every way to train, the chosen way and its reason, and files of plans."""

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

if TYPE_CHECKING:  # imported when a plan is made: each Trainer imports this file, and few make a plan
    from lockstep.extensions.balancing.planner.cost import Candidate, Prediction
    from lockstep.extensions.balancing.planner.hardware import Hardware
    from lockstep.extensions.balancing.planner.profile import ModelProfile

Goal = Literal["speed", "memory"]
NEAR, NEAR_COMPUTED = 0.05, 0.15
"""Rates that differ by less count as equal: with measured seconds, and with those of the cost model."""
ORDER = ("single", "ddp", "fsdp_grads", "fsdp", "sharded", "deepspeed", "dp", "fsdp_offload", "pipeline")
"""Kinds of candidates, simple ones first."""

# -- all ways --------------------------------------------------------------------------------------------------------


def candidates(profile: ModelProfile, hardware: Hardware) -> Iterator[Candidate]:
    """Yield all candidates: the ways to train a model on these devices.

    Args:
        profile: the model's profile.
        hardware: the devices.
    """
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
    for offered, way in ways:
        if not offered:
            continue
        yield replace(way, precision=profile.precision)
        # under stage 3 a second forward keeps other tensors than the first, which torch's checkpointing refuses
        again = way.kind != "dp" and way.stage < 3 and way.bucket_mb == 25.0 and not way.hook
        if again and "recomputed" in profile.steps:
            yield replace(way, precision=profile.precision, recomputed=True)
    if several and len(profile.blocks) > 1:
        yield from _pipelines(profile, hardware)


def _pipelines(profile: ModelProfile, hardware: Hardware) -> Iterator[Candidate]:
    """Yield pipeline candidates over all devices, for each schedule and number of micro-batches."""
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
    """Return the reason, apart from memory, why a candidate cannot run. Return "" if it can.

    Args:
        profile: the model's profile.
        candidate: the way to train.
        hardware: the devices.
        packages: optional packages that are installed.
    """
    if candidate.kind == "pipeline":
        return 'predicted, not chosen: the module needs a chain of blocks; pass strategy="balanced"'
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
        return f"{profile.samples} samples cannot be divided over {hardware.devices} devices"
    return ""


# -- the choice ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Predictions for all ways to train a model on given devices, and the chosen way.

    Attributes:
        profile: the model's profile in the precision of the Trainer.
        hardware: the devices.
        rows: predictions of all ways.
        choice: the best one; None if nothing fits.
        reason: reason for the choice, in one or two sentences.
    """

    profile: ModelProfile
    hardware: Hardware
    rows: tuple[Prediction, ...]
    choice: Prediction | None
    reason: str

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, everything: bool = False) -> Iterator[str]:
        """Yield the lines of the printed table, followed by the reason for the choice.

        Args:
            everything: True for all rows, including pipelines and variants of a way that gain nothing.
        """
        model, machine = self.profile, self.hardware
        yield (
            f"{model.name}: {_count(model.elements)} parameters, {len(model.blocks)} blocks, {model.samples:g} samples "
            f"on a device, {model.precision}; seconds " + ("measured" if model.device else "by the cost model")
        )
        nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
        yield f"{nodes}{machine.devices} x {machine.name}, {readable(machine.memory)} each for the run"
        yield ""
        rows = [row for row in self.rows if everything or self._is_worth_showing(row)]
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

    def _is_worth_showing(self, row: Prediction) -> bool:
        """Return True if the table should show a row: default settings, gains in time or memory, faster pipelines."""
        if row.candidate.kind == "pipeline":
            of_kind = [each for each in self.rows if _kind(each) == _kind(row)]
            best = max(of_kind, key=lambda each: (each.fits, each.rate, -each.missing))
            return row is best and (self.choice is None or row.rate > self.choice.rate * (1 + NEAR))
        base = next((each for each in self.rows if each.candidate == row.candidate.plain), row)
        gains = row.rate > base.rate * (1 + NEAR) or row.memory < base.memory * (1 - NEAR_COMPUTED)
        return gains or row in (self.choice, base) or not base.fits

    def _name(self, row: Prediction) -> str:
        precision = row.candidate.precision
        return row.candidate.name + (f", {precision}" if precision != self.profile.precision else "")

    def save(self, path: str | Path) -> None:
        """Write the choice to a file for ``Trainer(strategy="plan.yaml")``.

        Args:
            path: path of a YAML file.

        Raises:
            MisconfigurationException: nothing fits, so there is no choice.
        """
        if self.choice is None:
            raise MisconfigurationException(
                f"{path}: the plan cannot be saved, because it selects no strategy. {self.reason}"
            )
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
    """Predict memory and seconds of every way to train, and choose one.

    Equal arguments give equal plans.

    Args:
        profiles: profiles of one model, first in the Trainer's precision, then in precisions that are only shown.
        hardware: the devices.
        goal: "speed": the most samples a second among ways that fit, and the simpler of two that are about equal;
            "memory": the least memory on a device.
        packages: optional packages that are installed, such as "deepspeed".

    Example::

        plan = make_plan([profile], described(devices=8, memory=80e9), packages=["deepspeed"])
        print(plan)
    """
    from lockstep.extensions.balancing.planner.cost import predict

    if goal not in ("speed", "memory"):
        raise MisconfigurationException(f'A plan has no goal={goal!r}: pass "speed" or "memory".')
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
    if goal == "speed":
        best = max(one.rate for one in eligible)
        choice = min((one for one in eligible if one.rate >= best * (1 - near)), key=_simplicity)
    else:
        # dp needs less memory only because it cuts the batch, which is possible under all strategies
        eligible = [one for one in eligible if one.candidate.kind != "dp"] or eligible
        least = min(one.memory for one in eligible)
        smallest = [one for one in eligible if one.memory <= least * (1 + NEAR_COMPUTED)]
        choice = min(
            smallest,
            key=lambda one: (not one.candidate.offload, one.candidate.kind != "deepspeed", _simplicity(one)),
        )
    return Plan(profiles[0], hardware, tuple(rows), choice, _reason(choice, rows, hardware, goal, near))


def _simplicity(prediction: Prediction) -> tuple[int, int, bool, bool, float]:
    """Return the sort key that orders predictions from the simplest way to train to the most complex."""
    one = prediction.candidate
    return ORDER.index(one.kind), one.stage, one.offload, one.recomputed, abs(one.bucket_mb - 25.0)


def _reason(choice: Prediction, rows: Sequence[Prediction], hardware: Hardware, goal: Goal, near: float) -> str:
    """Explain the choice in one or two sentences."""
    name = choice.candidate.name
    takes = f"{readable(choice.memory)} of {readable(hardware.memory)} on each device"
    if goal == "memory":
        return f"{name}: the least memory of all that can be run, {takes}."
    summary = f"{name}: {takes}, {_time(choice.seconds)} a step, {choice.rate:.4g} samples a second"
    plain = [row for row in rows if not row.other and row.candidate == row.candidate.plain]
    simpler = [
        one for one in plain if one.candidate.kind in ("single", "ddp") and _simplicity(one) < _simplicity(choice)
    ]
    last = next((one for one in reversed(simpler) if not one.fits), None)
    if last is not None:
        lacks = f"{last.candidate.name} lacks {readable(last.missing)} on each device"
        return f"{summary}. {lacks} (mostly for {last.why})."
    if choice.candidate.kind == "single" and hardware.world > 1:
        return f"{summary}; more devices would wait for their messages longer than they compute."
    return f"{summary}; the model fits, and no other way is faster by more than {near:.0%}."


def _nothing_fits(profile: ModelProfile, rows: Sequence[Prediction], hardware: Hardware) -> str:
    """Return a message about the missing memory, and about changes with which the model would fit."""
    found = min((row for row in rows if not row.other and not row.obstacle), key=lambda row: row.missing)
    changes = []
    by_batch = max(span.peak for span in profile.step(found.candidate.recomputed).spans)
    if by_batch / 2 >= found.missing:
        changes.append("half the batch with accumulate_grad_batches=2")
    fitting = {row.candidate.precision for row in rows if row.other and row.fits} - {found.candidate.precision}
    changes += [f'precision="{precision}"' for precision in sorted(fitting)]
    states = sum(found.parts.get(name, 0.0) for name in ("parameters", "gradients", "optimizer states"))
    if states > found.missing:
        # sharded states shrink with the number of devices; activations stay
        count = hardware.world * states / (states - found.missing)
        changes.append(f"about {max(hardware.world + 1, round(count + 0.5))} devices with fsdp")
    changes.append(f"devices of {readable(found.memory * 1.1)}")
    return (
        f"Nothing fits: {found.candidate.name} is nearest and needs {readable(found.missing)} more than the "
        f"{readable(hardware.memory)} of a device. What would fit: {'; '.join(changes)}."
    )


# -- the file ----------------------------------------------------------------------------------------------------------


LARGEST = 2**20
"""Maximum number of bytes that are read from a plan's file."""
OF_CANDIDATE = ("stage", "offload", "recomputed", "bucket_mb", "precision")
"""Fields of a file that have the name of the candidate's attribute."""


@dataclass(frozen=True)
class SavedPlan:
    """The saved choice of a plan. The file has lines ``name: value`` with JSON values, so it is valid YAML.

    Attributes:
        model: class of the model.
        key: see `lockstep.extensions.balancing.planner.profile.key_of`.
        strategy: kind of the candidate; the fields after it are the candidate's.
        devices: number of devices on a node.
        nodes: number of nodes.
        device: name of the device.
        available: bytes of a device that a run could use.
        memory: predicted bytes of a device.
        seconds: predicted seconds of a step.
        samples: number of samples in a step, over all devices.
        reason: reason for the choice.
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
        """Create the saved form of a plan, which must contain a choice."""
        choice, machine = plan.choice, plan.hardware
        assert choice is not None
        one = choice.candidate
        devices, nodes = (1, 1) if choice.devices == 1 else (machine.devices, machine.nodes)
        return cls(
            model=plan.profile.name,
            key=plan.profile.key,
            strategy=one.kind,
            **{name: getattr(one, name) for name in OF_CANDIDATE},
            devices=devices,
            nodes=nodes,
            device=machine.name,
            available=machine.memory,
            memory=choice.memory,
            seconds=choice.seconds,
            samples=choice.samples,
            reason=plan.reason,
        )

    @property
    def candidate(self) -> Candidate:
        """The chosen candidate: a way to train."""
        from lockstep.extensions.balancing.planner.cost import Candidate

        return Candidate(self.strategy, **{name: getattr(self, name) for name in OF_CANDIDATE})

    def text(self) -> str:
        """Return the contents of the plan's file."""
        rows = [f"{name}: {json.dumps(value)}" for name, value in vars(self).items()]
        return "\n".join(['# made by `lockstep plan`, for Trainer(strategy="...")', *rows, ""])

    @classmethod
    def read(cls, path: str | Path) -> SavedPlan:
        """Read a plan from its file.

        Raises:
            MisconfigurationException: there is no such file, or it is not a plan.
        """
        try:
            with open(path, "rb") as file:
                # a file that is not text is refused below as not being a plan
                text = file.read(LARGEST).decode(errors="replace")
        except OSError as error:
            raise MisconfigurationException(
                f'Trainer(strategy="{path}"): the plan cannot be read ({error.strerror or error}). Create it with '
                f"`lockstep plan script.py --save {path}`."
            ) from None
        found = {m[1]: m[2] for line in text.splitlines() if (m := re.fullmatch(r"(\w+): (.+)", line.strip()))}
        try:
            saved = cls(**{name: json.loads(value) for name, value in found.items()})
            saved._check()
            return saved
        except (TypeError, ValueError, RecursionError):
            raise MisconfigurationException(
                f'Trainer(strategy="{path}"): the file is not a plan of this release. Create a new plan with '
                "`lockstep plan`."
            ) from None

    def _check(self) -> None:
        """Raise an error if a value has the wrong type or is out of range.

        Raises:
            ValueError: a value has another type, is negative or not finite, or two values do not fit together.
        """
        for name, wanted in get_type_hints(type(self)).items():
            value = getattr(self, name)
            right = type(value) in ((int, float) if wanted is float else (wanted,))
            if not right or (wanted in (int, float) and not 0 <= value < math.inf):
                raise ValueError(f"{name} is {value!r}")
        if self.offload and self.strategy != "deepspeed":
            raise ValueError(f"{self.strategy} has no offload")

    def check_machine(self, available: float, where: str) -> None:
        """Raise an error if the devices of this machine have less memory than the plan needs.

        Args:
            available: bytes of a device.
            where: the user's argument, for the message.
        """
        if available < self.memory:
            raise MisconfigurationException(
                f"{where} needs {readable(self.memory)} on each device, but a device here has {readable(available)}: "
                f"the plan was made for {self.device}. Create a plan on this machine."
            )

    def check_model(self, name: str, key: str, where: str) -> None:
        """Raise an error if the parameters of a model differ from those of the plan's model.

        Args:
            name: class of the model.
            key: see `lockstep.extensions.balancing.planner.profile.key_of`.
            where: the user's argument, for the message.
        """
        if key != self.key:
            raise MisconfigurationException(
                f"{where} was made for {self.model}, whose parameters differ from those of this {name}. Create a plan "
                "for this model, or use the name of a strategy."
            )
