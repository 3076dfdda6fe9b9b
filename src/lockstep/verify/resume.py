"""Says whether a script that is started again goes on as if it had never been stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.verify import refusals
from lockstep.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row
from lockstep.verify.recordings import Event, RankRecording, Recording
from lockstep.verify.verification import Request, Verification

_EXACT = 1e-12
_SHORTEST = 2
"""Steps of an epoch that can be stopped within it."""


@dataclass(frozen=True)
class Finding:
    """What a run that was stopped does otherwise.

    Attributes:
        first: in words.
        cause: why.
    """

    first: str
    cause: str


class ResumeCheck:
    """Runs a script undisturbed, and once more with a stop in the middle; compares samples and numbers behind it.

    An epoch of training ends behind ``steps`` steps in all runs, so that scripts that save at the end of one do so. A
    second stop is within the first epoch, by SIGTERM: a script that saves then, or has saved every few steps, goes on.

    Args:
        request: what is asked for.
        verification: makes the runs.
    """

    def __init__(self, request: Request, verification: Verification) -> None:
        self.request = request
        self.verification = verification
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._stop = 0  # steps before the stop

    def certify(self) -> Certificate:
        """The certificate."""
        steps = self.request.steps
        undisturbed = self.verification.on_ranks_cut(2 * steps, steps)
        reason = refusals.of_ranks(undisturbed, 1)
        if reason:
            return self._certificate(UNKNOWN, reasons=(reason,))
        stopped = self.verification.on_ranks_cut(steps + 1, steps, epochs=1)
        self._stop = len(stopped.first.steps)
        reason, found = self._behind_epoch(undisturbed, stopped)
        if found is not None:
            return self._certificate(DIFFERENT, found)
        left, found = self._within_epoch(undisturbed)
        if found is not None:
            return self._certificate(DIFFERENT, found)
        return self._certificate(UNKNOWN, reasons=(reason,)) if reason and not left else self._certificate(ALIKE)

    def _behind_epoch(self, undisturbed: Recording, stopped: Recording) -> tuple[str, Finding | None]:
        """Stop behind the first epoch: why that tells nothing, or what differs."""
        left = len(undisturbed.first.steps) - self._stop
        if left < 1:
            return "the script trains for one epoch only, and is stopped behind that: let it train for two", None
        folder = Path(stopped.first.folder).parent / "work"
        resumed = self.verification.on_ranks_cut(left, self.request.steps, left_by=folder)
        reason = refusals.of_ranks(resumed, 1) or self._not_resumed(undisturbed, resumed)
        if reason:
            return reason, None
        return "", self._samples(undisturbed, resumed) or self._numbers(undisturbed, resumed)

    def _within_epoch(self, undisturbed: Recording) -> tuple[bool, Finding | None]:
        """Stop within the first epoch by SIGTERM: whether the script went on from there, and what differs."""
        steps, length = self.request.steps, self._stop
        if length < _SHORTEST:
            return False, None
        stopped = self.verification.on_ranks_cut(2 * steps, steps, interrupt=length // 2)
        folder = Path(stopped.first.folder).parent / "work"
        resumed = self.verification.on_ranks_cut(length - 1, steps, left_by=folder)
        at = None if refusals.of_ranks(resumed, 1) else self._place(undisturbed, resumed)
        if at is None or at >= length:
            self._notes.append(
                "a stop within an epoch, by SIGTERM, leaves no checkpoint of that place: it was not compared"
            )
            return False, None
        self._stop = at
        found = self._samples_within(undisturbed, resumed, length - at)
        return True, found or self._numbers(undisturbed, resumed, length - at)

    def _place(self, undisturbed: Recording, resumed: Recording) -> int | None:
        """The steps behind which a run went on: the weights tell; None for none, or for no step's weights."""
        optimizer = undisturbed.first.steps[0]["optimizer"]
        again = resumed.first.load("first", optimizer)
        for event in undisturbed.first.steps:
            if _largest_difference(undisturbed.first.load("parameters", event["update"]), again) <= _EXACT:
                return int(event["number"]) + 1
        return None

    def _certificate(self, verdict: str, found: Finding | None = None, reasons: tuple[str, ...] = ()) -> Certificate:
        return Certificate(
            " ".join(self.request.words),
            self.request.devices,
            0 if reasons else self._stop,
            verdict,
            rows=tuple(self._rows),
            first=found.first if found is not None else "",
            cause=found.cause if found is not None else "",
            reasons=reasons,
            nature=tuple(self._notes),
            resume=True,
        )

    def _not_resumed(self, undisturbed: Recording, resumed: Recording) -> str:
        """Why the second start went on from nothing; "" where it did go on."""
        optimizer = undisturbed.first.steps[0]["optimizer"]
        begun = undisturbed.first.load("first", optimizer)
        again = resumed.first.load("first", optimizer)
        if _largest_difference(begun, again) <= _EXACT:
            return (
                "started again by the same command the script begins anew: let it save at the end of an epoch, and "
                "find its own checkpoint in the current folder"
            )
        return ""

    # -- samples

    def _samples(self, undisturbed: Recording, resumed: Recording) -> Finding | None:
        count = 0
        for number, (whole, again) in enumerate(zip(undisturbed.ranks, resumed.ranks, strict=True)):
            expected, found = _epoch(whole, 1), _epoch(again, 0)
            before = _epoch(whole, 0)
            for at, (own, theirs) in enumerate(zip(expected, found, strict=False)):
                count += 1
                if own["prints"] == theirs["prints"]:
                    continue
                self._rows.append(Row("samples", f"{count} batches", "DIFFERENT"))
                first = (
                    f"batch {at} behind the stop on rank {number} begins with sample {_name(theirs)}, undisturbed with "
                    f"sample {_name(own)}"
                )
                where = next((event["where"] for event in again.of("iteration")), "")
                if [each["prints"] for each in found] == [each["prints"] for each in before[: len(found)]]:
                    cause = (
                        f"the order of epoch 0 comes again: the epoch behind a resume is counted from 0 ({where}): "
                        "give set_epoch the number of the epoch, those before the stop included"
                    )
                    return Finding(first, cause)
                return Finding(first, f"the order of samples is not restored ({where}): save and load its generator")
        self._rows.append(Row("samples", f"{count} batches", "as undisturbed"))
        return None

    def _samples_within(self, undisturbed: Recording, resumed: Recording, steps: int) -> Finding | None:
        """Compare the batches of the steps behind a stop within an epoch."""
        for number, (whole, again) in enumerate(zip(undisturbed.ranks, resumed.ranks, strict=True)):
            for at in range(min(steps, len(again.steps))):
                expected = _trained(whole, self._stop + at)
                found = _trained(again, at)[-len(expected) :]
                if [each["prints"] for each in expected] == [each["prints"] for each in found]:
                    continue
                self._rows.append(Row("samples within an epoch", f"{at + 1} steps", "DIFFERENT"))
                first = (
                    f"step {self._stop + at} ({at} behind a stop within the epoch) on rank {number} trains on sample "
                    f"{_name(found[0]) if found else 'none'}, undisturbed on sample {_name(expected[0])}"
                )
                where = next((event["where"] for event in again.of("iteration")), "")
                cause = f"the place within the epoch is not restored ({where}): leave out the batches that were trained"
                return Finding(first, f"{cause}, or save and load the loader's place")
        self._rows.append(Row("samples within an epoch", f"{steps} steps", "as undisturbed"))
        return None

    # -- numbers

    def _numbers(self, undisturbed: Recording, resumed: Recording, most: int | None = None) -> Finding | None:
        count = min(len(rank.steps) for rank in resumed.ranks)
        count = count if most is None else min(count, most)
        for at in range(count):
            for kind, cause in _CAUSES:
                for number, (whole, again) in enumerate(zip(undisturbed.ranks, resumed.ranks, strict=True)):
                    name, size = _differs(kind, whole, self._stop + at, again, at)
                    if size > _EXACT:
                        step = f"step {self._stop + at} ({at} behind the stop)"
                        text = f"{step}: {kind} of {name} on rank {number}: off by {size:.2g}"
                        self._rows.append(Row(kind, f"{at + 1} steps", "DIFFERENT"))
                        return Finding(text, cause)
        self._rows += [Row(kind, f"{count} steps", "as undisturbed") for kind, _ in _CAUSES]
        return None


_CAUSES = (
    ("learning rates", "the schedule is not restored: save and load the scheduler's state_dict()"),
    ("gradients", "the weights are not those of the stop: save and load all of the model's state_dict()"),
    ("parameters", "the optimizer begins anew (momentum, averages): save and load its state_dict()"),
)
"""What is compared, and what a difference there is a sign of where all before it is alike."""


def _epoch(rank: RankRecording, iteration: int) -> list[Event]:
    """The batches of an iteration of the loader that a rank trained on."""
    batches = [event for event in rank.of("batch") if event["grad"]]
    loader = batches[0]["loader"] if batches else -1
    return [event for event in batches if event["loader"] == loader and event["iteration"] == iteration]


def _trained(rank: RankRecording, step: int) -> list[Event]:
    """The batches that a rank drew for a step."""
    return [event for event in rank.of("batch") if event["grad"] and event["step"] == step]


def _differs(kind: str, whole: RankRecording, at: int, again: RankRecording, step: int) -> tuple[str, float]:
    """What differs most at a step of a run that was stopped, and how much, as part of its largest value."""
    if at >= len(whole.steps):
        return "", 0.0
    own, theirs = whole.steps[at], again.steps[step]
    if kind == "learning rates":
        sizes = [abs(a - b) for a, b in zip(own["rates"], theirs["rates"], strict=False)]
        return "all parameters", max(sizes, default=0.0)
    expected, found = whole.load(kind, own["update"]), again.load(kind, theirs["update"])
    by_name = {own["names"].get(key, key): _difference(value, found.get(key)) for key, value in expected.items()}
    name = max(by_name, key=lambda key: by_name[key], default="")
    return name, by_name.get(name, 0.0)


def _name(event: Event) -> str:
    return str(event["indices"][0]) if event["indices"] else str(event["prints"][0])


def _tensor(value: Any) -> Tensor | None:
    return value["part"] if isinstance(value, dict) else value


def _difference(expected: Any, found: Any) -> float:
    own, theirs = _tensor(expected), _tensor(found)
    if own is None or theirs is None or not own.numel():
        return 0.0
    if own.shape != theirs.shape:
        return float("inf")
    return ((own - theirs).abs().max() / own.abs().max().clamp_min(1e-300)).item()


def _largest_difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    return max((_difference(value, found.get(key)) for key, value in expected.items()), default=0.0)
