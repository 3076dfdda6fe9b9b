"""Check that a stopped and restarted run continues as an uninterrupted run would."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.extensions.verify import refusals
from lockstep.extensions.verify.certificate import Certificate, Row
from lockstep.extensions.verify.compare import Difference, Reason
from lockstep.extensions.verify.loaders import DRAWS
from lockstep.extensions.verify.recordings import Event, RankRecording, Recording, Value
from lockstep.extensions.verify.runs import Request, Runs

_EXACT = 1e-12
_SHORTEST = 2
"""Steps of the shortest epoch within which a run can be stopped."""
_CAUSES = {
    "learning rates": "the schedule is not restored: save and load the scheduler's state_dict()",
    "gradients": "the weights are not those at the stop: save and load all of the model's state_dict()",
    "parameters": "the optimizer starts without its state (momentum, averages): save and load its state_dict()",
    "buffers": (
        "buffers (such as BatchNorm's running statistics) are not those at the stop: save and load all of the model's "
        "state_dict(), not only its parameters"
    ),
}
"""Cause of a difference in each kind of compared values, if all earlier kinds agree."""
_RANDOM = (
    "the random numbers of a step differ: save and load the states of the generators that the step uses "
    "(torch.get_rng_state(), random.getstate(), numpy.random.get_state())"
)

_AT_EPOCH_END, _WITHIN = "samples", "samples within an epoch"
_STOPS = {_AT_EPOCH_END: "the stop", _WITHIN: "a stop within the epoch"}

Finding = tuple[Difference, Reason]


class ResumeCheck:
    """Check that runs a script with and without a stop, and compares the samples and values after the stop.

    In all runs an epoch of training ends after ``steps`` steps, so that scripts that save at the end of an epoch do so.
    A second stop is within the first epoch, by SIGTERM. A script that saves then, or every few steps, can resume.

    Args:
        request: what to verify.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._stop = 0  # steps before the stop

    def certify(self) -> Certificate:
        """Run the script and return the certificate."""
        steps = self.request.steps
        undisturbed = self.runs.on_ranks(steps=2 * steps, epoch_steps=steps)
        reason = refusals.check_ranks(undisturbed)
        if reason:
            return self._certificate(reason)
        if undisturbed.has("dropout"):
            self._notes.append("dropout was disabled: its random numbers after the stop were not compared")
        stopped = self.runs.on_ranks(steps=steps + 1, epoch_steps=steps, max_epochs=1)
        self._stop = len(stopped.first.steps)
        reason, found = self._stop_at_epoch_end(undisturbed, stopped)
        if found is not None:
            return self._certificate(found=found)
        # a script that saves only within epochs has not resumed from the end of one
        is_compared, found = self._stop_within_epoch(undisturbed)
        return self._certificate("" if is_compared else reason, found)

    def _stop_at_epoch_end(self, undisturbed: Recording, stopped: Recording) -> tuple[str, Finding | None]:
        """Resume a run after one epoch. Return (reason why it cannot be compared or "", first difference or None)."""
        remaining = len(undisturbed.first.steps) - self._stop
        if remaining < 1:
            return "the script trains for one epoch only, and a stop would follow it: let it train for two", None
        resumed = self.runs.on_ranks(after=stopped, steps=remaining, epoch_steps=self.request.steps)
        reason = refusals.check_ranks(resumed)
        # the first weights again: nothing was loaded
        if not reason and _largest_difference(_first(undisturbed), _first(resumed))[1] <= _EXACT:
            reason = (
                "started again with the same command, the script trains from the start: let it save a checkpoint at "
                "the end of an epoch, and load it from the current folder"
            )
        if reason:
            return reason, None
        return "", self._compare(_AT_EPOCH_END, undisturbed, resumed, remaining)

    def _stop_within_epoch(self, undisturbed: Recording) -> tuple[bool, Finding | None]:
        """Stop within the first epoch by SIGTERM. Return (True if the script resumed there, first difference)."""
        steps, length = self.request.steps, self._stop
        if length < _SHORTEST:
            return False, None
        stopped = self.runs.on_ranks(steps=2 * steps, epoch_steps=steps, sigterm_after=length // 2)
        resumed = self.runs.on_ranks(after=stopped, steps=length - 1, epoch_steps=steps)
        # the weights show after which step the script continued
        place: int | None = None
        if not refusals.check_ranks(resumed):
            again = _first(resumed)
            for event in undisturbed.first.steps:
                if _largest_difference(undisturbed.first.load("parameters", event["update"]), again)[1] <= _EXACT:
                    place = int(event["number"]) + 1
                    break
        if place is None or place >= length:
            self._notes.append(
                "a stop within an epoch, by SIGTERM, leaves no checkpoint at that step, so it was not compared"
            )
            return False, None
        self._stop = place
        return True, self._compare(_WITHIN, undisturbed, resumed, length - place)

    def _certificate(self, reason: str = "", found: Finding | None = None) -> Certificate:
        reasons = [reason] if reason else []
        steps = 0 if reason else self._stop
        compared = "ranks, stopped and started again"
        return self.runs.certificate(steps, self._rows, found, reasons, self._notes, compared=compared)

    # -- comparing

    def _compare(self, kind: str, undisturbed: Recording, resumed: Recording, steps: int) -> Finding | None:
        """Compare the steps after a stop: first the batches, then the values, which depend on the batches."""
        for number, (whole, again) in enumerate(zip(undisturbed.ranks, resumed.ranks, strict=True)):
            for at in range(min(steps, len(again.steps))):
                expected = _batches(whole, self._stop + at)
                # a script may draw the batches before the stop again, and skip them
                found = _batches(again, at)[-len(expected) :]
                if _prints(found) == _prints(expected):
                    continue
                self._rows.append(Row(kind, f"{at + 1} steps", "DIFFERENT"))
                text = (
                    f"step {self._stop + at} ({at} after {_STOPS[kind]}) on rank {number} trains on sample "
                    f"{_name(found)}, without the stop on sample {_name(expected)}"
                )
                cause = _cause_of_samples(kind, whole, again)
                return Difference(kind, -1, at, "", (number,), text=text), cause
        self._rows.append(Row(kind, f"{steps} steps", "as undisturbed"))
        return self._compare_numbers(undisturbed, resumed, min(resumed.fewest_steps, steps))

    def _compare_numbers(self, undisturbed: Recording, resumed: Recording, steps: int) -> Finding | None:
        ranks = list(zip(undisturbed.ranks, resumed.ranks, strict=True))
        for at in range(steps):
            for kind, cause in _CAUSES.items():
                # rank 0's buffers are the ones that are saved
                for number, (whole, again) in enumerate(ranks[:1] if kind == "buffers" else ranks):
                    name, size = _deviation(kind, whole, self._stop + at, again, at)
                    if size > _EXACT:
                        self._rows.append(Row(kind, f"{at + 1} steps", "DIFFERENT"))
                        text = (
                            f"step {self._stop + at} ({at} after the stop): {kind} of {name} on rank {number}: off by "
                            f"{size:.2g}"
                        )
                        reason = Reason(cause)
                        if kind == "gradients" and _draws(whole, self._stop + at) != _draws(again, at):
                            reason = Reason(_RANDOM, again.line_of("draw") or again.line_of(DRAWS))
                        return Difference(kind, -1, at, name, (number,), size, text), reason
        self._rows += [Row(kind, f"{steps} steps", "as undisturbed") for kind in _CAUSES]
        return None


def _cause_of_samples(kind: str, whole: RankRecording, again: RankRecording) -> Reason:
    """Explain why a rank trains on different samples after a stop."""
    where = again.line_of("iteration")
    if kind == _WITHIN:
        return Reason(
            "the position within the epoch is not restored: skip the batches that were trained, or save and load the "
            "loader's position",
            where,
        )
    steps = range(len(again.steps))
    if all(_prints(_batches(again, at)) == _prints(_batches(whole, at)) for at in steps):
        return Reason(
            "the order of epoch 0 is repeated: after a resume the script counts epochs from 0, or its generator starts "
            "with its seed; call set_epoch with the number of the epoch, counted from the first start",
            where,
        )
    return Reason("the order of samples is not restored: save and load its generator", where)


def _batches(rank: RankRecording, step: int) -> list[Event]:
    """Return the events of the batches that a rank drew for a step."""
    return rank.find("batch", grad=True, step=step)


def _draws(rank: RankRecording, step: int) -> list[object]:
    """Return a list of a step's random numbers, and of the generator states of Python and NumPy if steps use them."""
    update = rank.steps[step]["update"]
    paths = sorted(rank.folder.glob(f"draw-{update}-*.pt"))
    found: list[object] = [(path.name.split("-", 2)[2], torch.load(path).tolist()) for path in paths]
    if rank.find(DRAWS):
        names = ("random-{loader}-{iteration}-{batch}.pkl".format_map(event) for event in _batches(rank, step))
        found += [path.read_bytes() for path in map(rank.folder.joinpath, names) if path.exists()]
    return found


def _prints(batches: list[Event]) -> list[object]:
    return [event["prints"] for event in batches]


def _name(batches: list[Event]) -> str:
    """Return the first sample of ``batches`` as text: its index, or its fingerprint if it has no index."""
    if not batches:
        return "none"
    return str((batches[0]["indices"] or batches[0]["prints"])[0])


def _first(run: Recording) -> dict[str, Value]:
    """Load the parameters with which rank 0 started."""
    return run.first.load("first", run.first.steps[0]["optimizer"])


def _deviation(kind: str, whole: RankRecording, at: int, again: RankRecording, step: int) -> tuple[str, float]:
    """Return (name, difference) of the value that differs most at a step: relative, or absolute for rates."""
    if at >= len(whole.steps):
        return "", 0.0
    own, theirs = whole.steps[at], again.steps[step]
    if kind == "learning rates":
        sizes = [abs(a - b) for a, b in zip(own["rates"], theirs["rates"], strict=False)]
        return "all parameters", max(sizes, default=0.0)
    expected = whole.load(kind, own["update"])
    # a checkpoint has no buffers that are not persistent
    saved = {key: value for key, value in expected.items() if key not in own["unsaved"]}
    key, size = _largest_difference(saved, again.load(kind, theirs["update"]))
    return own["names"].get(key, key), size


def _largest_difference(expected: Mapping[str, Value], found: Mapping[str, Value]) -> tuple[str, float]:
    """Return (key, difference) of the value that differs most. Differences are relative to the largest element."""
    sizes = {key: _difference(value, found.get(key)) for key, value in expected.items()}
    name = max(sizes, key=lambda key: sizes[key], default="")
    return name, sizes.get(name, 0.0)


def _difference(expected: Value, found: Value) -> float:
    own, theirs = _tensor(expected), _tensor(found)
    if own is None or theirs is None or not own.numel():
        return 0.0
    if own.shape != theirs.shape:
        return math.inf
    if not own.is_floating_point():
        return math.inf if not torch.equal(own, theirs) else 0.0
    return ((own - theirs).abs().max() / own.abs().max().clamp_min(1e-300)).item()


def _tensor(value: Value) -> Tensor | None:
    """Return a recorded tensor, or the rank's shard if it is sharded."""
    return value["part"] if isinstance(value, dict) else value
