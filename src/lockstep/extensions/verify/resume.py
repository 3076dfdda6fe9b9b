"""Says whether a script that is started again goes on as if it had never been stopped."""

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
"""Steps of an epoch that can be stopped within it."""
_CAUSES = {
    "learning rates": "the schedule is not restored: save and load the scheduler's state_dict()",
    "gradients": "the weights are not those of the stop: save and load all of the model's state_dict()",
    "parameters": "the optimizer begins anew (momentum, averages): save and load its state_dict()",
    "buffers": (
        "buffers (BatchNorm's running statistics, say) are not those of the stop: save and load all of the model's "
        "state_dict(), and not its parameters alone"
    ),
}
"""What is compared, and what a difference there is a sign of where all before it is alike."""
_RANDOM = (
    "the random numbers of a step are others: save and load the states of the generators that it draws by "
    "(torch.get_rng_state(), random.getstate(), numpy.random.get_state())"
)

_BEHIND, _WITHIN = "samples", "samples within an epoch"
_STOPS = {_BEHIND: "the stop", _WITHIN: "a stop within the epoch"}

Finding = tuple[Difference, Reason]


class ResumeCheck:
    """Runs a script undisturbed, and once more with a stop in the middle; compares samples and numbers behind it.

    An epoch of training ends behind ``steps`` steps in all runs, so that scripts that save at the end of one do so. A
    second stop is within the first epoch, by SIGTERM: a script that saves then, or has saved every few steps, goes on.

    Args:
        request: what is asked for.
        runs: makes the runs.
    """

    def __init__(self, request: Request, runs: Runs) -> None:
        self.request = request
        self.runs = runs
        self._rows: list[Row] = []
        self._notes: list[str] = []
        self._stop = 0  # steps before the stop

    def certify(self) -> Certificate:
        """The certificate."""
        steps = self.request.steps
        undisturbed = self.runs.on_ranks_cut(2 * steps, steps)
        reason = refusals.of_ranks(undisturbed, 1)
        if reason:
            return self._certificate(reason)
        if undisturbed.has("dropout"):
            self._notes.append("dropout was off: whether its random numbers go on was not compared")
        stopped = self.runs.on_ranks_cut(steps + 1, steps, epochs=1)
        self._stop = len(stopped.first.steps)
        reason, found = self._behind_epoch(undisturbed, stopped)
        if found is not None:
            return self._certificate(found=found)
        left, found = self._within_epoch(undisturbed)
        return self._certificate("" if left else reason, found)

    def _behind_epoch(self, undisturbed: Recording, stopped: Recording) -> tuple[str, Finding | None]:
        """Stop behind the first epoch: why that tells nothing, or what differs."""
        left = len(undisturbed.first.steps) - self._stop
        if left < 1:
            return "the script trains for one epoch only, and is stopped behind that: let it train for two", None
        resumed = self.runs.on_ranks_cut(left, self.request.steps, left_by=stopped)
        reason = refusals.of_ranks(resumed, 1) or self._not_resumed(undisturbed, resumed)
        if reason:
            return reason, None
        return "", self._samples(_BEHIND, undisturbed, resumed, left) or self._numbers(undisturbed, resumed, left)

    def _within_epoch(self, undisturbed: Recording) -> tuple[bool, Finding | None]:
        """Stop within the first epoch by SIGTERM: whether the script went on from there, and what differs."""
        steps, length = self.request.steps, self._stop
        if length < _SHORTEST:
            return False, None
        stopped = self.runs.on_ranks_cut(2 * steps, steps, interrupt=length // 2)
        resumed = self.runs.on_ranks_cut(length - 1, steps, left_by=stopped)
        at = None if refusals.of_ranks(resumed, 1) else self._place(undisturbed, resumed)
        if at is None or at >= length:
            self._notes.append(
                "a stop within an epoch, by SIGTERM, leaves no checkpoint of that place: it was not compared"
            )
            return False, None
        self._stop, left = at, length - at
        found = self._samples(_WITHIN, undisturbed, resumed, left)
        return True, found or self._numbers(undisturbed, resumed, left)

    def _place(self, undisturbed: Recording, resumed: Recording) -> int | None:
        """The steps behind which a run went on: the weights tell; None for none, or for no step's weights."""
        again = _first(resumed)
        for event in undisturbed.first.steps:
            if _largest_difference(undisturbed.first.load("parameters", event["update"]), again)[1] <= _EXACT:
                return int(event["number"]) + 1
        return None

    def _certificate(self, reason: str = "", found: Finding | None = None) -> Certificate:
        reasons = [reason] if reason else []
        steps = 0 if reason else self._stop
        compared = "ranks, stopped and started again"
        return self.runs.certificate(steps, self._rows, found, reasons, self._notes, compared=compared)

    def _not_resumed(self, undisturbed: Recording, resumed: Recording) -> str:
        """Why the second start went on from nothing; "" where it did go on."""
        if _largest_difference(_first(undisturbed), _first(resumed))[1] > _EXACT:
            return ""
        return (
            "started again by the same command the script begins anew: let it save at the end of an epoch, and find "
            "its own checkpoint in the current folder"
        )

    # -- samples

    def _samples(self, what: str, undisturbed: Recording, resumed: Recording, steps: int) -> Finding | None:
        """Compare the batches of some steps behind a stop."""
        for number, (whole, again) in enumerate(zip(undisturbed.ranks, resumed.ranks, strict=True)):
            for at in range(min(steps, len(again.steps))):
                expected = _trained(whole, self._stop + at)
                found = _trained(again, at)[-len(expected) :]  # those before the stop may be drawn, and left out
                if _prints(found) == _prints(expected):
                    continue
                self._rows.append(Row(what, f"{at + 1} steps", "DIFFERENT"))
                text = (
                    f"step {self._stop + at} ({at} behind {_STOPS[what]}) on rank {number} trains on sample "
                    f"{_name(found)}, undisturbed on sample {_name(expected)}"
                )
                cause = _of_place(again) if what == _WITHIN else _of_order(whole, again)
                return Difference(what, -1, at, "", (number,), text=text), cause
        self._rows.append(Row(what, f"{steps} steps", "as undisturbed"))
        return None

    # -- numbers

    def _numbers(self, undisturbed: Recording, resumed: Recording, most: int) -> Finding | None:
        count = min(resumed.fewest_steps, most)
        ranks = list(zip(undisturbed.ranks, resumed.ranks, strict=True))
        for at in range(count):
            for kind, cause in _CAUSES.items():
                # rank 0's buffers are those that last, and that are saved
                for number, (whole, again) in enumerate(ranks[:1] if kind == "buffers" else ranks):
                    name, size = _differs(kind, whole, self._stop + at, again, at)
                    if size > _EXACT:
                        self._rows.append(Row(kind, f"{at + 1} steps", "DIFFERENT"))
                        text = (
                            f"step {self._stop + at} ({at} behind the stop): {kind} of {name} on rank {number}: off by "
                            f"{size:.2g}"
                        )
                        reason = Reason(cause)
                        if kind == "gradients" and _drawn(whole, self._stop + at) != _drawn(again, at):
                            reason = Reason(_RANDOM, again.where("draw") or again.where(DRAWS))
                        return Difference(kind, -1, at, name, (number,), size, text), reason
        self._rows += [Row(kind, f"{count} steps", "as undisturbed") for kind in _CAUSES]
        return None


def _of_place(again: RankRecording) -> Reason:
    """Why a rank trains on other samples behind a stop within an epoch."""
    return Reason(
        "the place within the epoch is not restored: leave out the batches that were trained, or save and load the "
        "loader's place",
        again.where("iteration"),
    )


def _of_order(whole: RankRecording, again: RankRecording) -> Reason:
    """Why a rank trains on other samples behind a stop at the end of an epoch."""
    where = again.where("iteration")
    steps = range(len(again.steps))
    if all(_prints(_trained(again, at)) == _prints(_trained(whole, at)) for at in steps):
        return Reason(
            "the order of epoch 0 comes again: the epoch behind a resume is counted from 0, or its generator begins at "
            "its seed: give set_epoch the number of the epoch, those before the stop included",
            where,
        )
    return Reason("the order of samples is not restored: save and load its generator", where)


def _trained(rank: RankRecording, step: int) -> list[Event]:
    """The batches that a rank drew for a step."""
    return rank.of("batch", grad=True, step=step)


def _drawn(rank: RankRecording, step: int) -> list[object]:
    """What a step drew of random numbers, and the states of Python's and NumPy's generators, if steps draw of them."""
    update = rank.steps[step]["update"]
    paths = sorted(rank.folder.glob(f"draw-{update}-*.pt"))
    found: list[object] = [(path.name.split("-", 2)[2], torch.load(path).tolist()) for path in paths]
    if rank.of(DRAWS):
        names = ("random-{loader}-{iteration}-{batch}.pkl".format_map(event) for event in _trained(rank, step))
        found += [path.read_bytes() for path in map(rank.folder.joinpath, names) if path.exists()]
    return found


def _prints(batches: list[Event]) -> list[object]:
    return [event["prints"] for event in batches]


def _name(batches: list[Event]) -> str:
    """The first sample of batches."""
    if not batches:
        return "none"
    return str((batches[0]["indices"] or batches[0]["prints"])[0])


def _first(run: Recording) -> dict[str, Value]:
    """The parameters with which rank 0 began."""
    return run.first.load("first", run.first.steps[0]["optimizer"])


def _differs(kind: str, whole: RankRecording, at: int, again: RankRecording, step: int) -> tuple[str, float]:
    """What differs most at a step of a run that was stopped, and how much, as part of its largest value."""
    if at >= len(whole.steps):
        return "", 0.0
    own, theirs = whole.steps[at], again.steps[step]
    if kind == "learning rates":
        sizes = [abs(a - b) for a, b in zip(own["rates"], theirs["rates"], strict=False)]
        return "all parameters", max(sizes, default=0.0)
    expected = whole.load(kind, own["update"])
    saved = {key: value for key, value in expected.items() if key not in own["unsaved"]}
    key, size = _largest_difference(saved, again.load(kind, theirs["update"]))
    return own["names"].get(key, key), size


def _largest_difference(expected: Mapping[str, Value], found: Mapping[str, Value]) -> tuple[str, float]:
    """The value that differs most, and by how much, as part of its largest element."""
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
    """A value's own part, if it is one of several ranks'."""
    return value["part"] if isinstance(value, dict) else value
