"""Compares what N ranks train with what one process trains, step by step; and names what differs first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.extensions.verify.certificate import Row
from lockstep.extensions.verify.recordings import Event, Recording, Value

SAMPLES = "samples"
COLLECTIVES = "order of collectives"
STEPS = "number of steps"
FIRST = "first parameters"
RATES = "learning rates"
GRADIENTS = "gradients"
CLIPPED = "gradients at the step"
PARAMETERS = "parameters"
BUFFERS = "buffers"
EVALUATION = "evaluation"
IN_ORDER = (SAMPLES, FIRST, COLLECTIVES, RATES, GRADIENTS, CLIPPED, PARAMETERS, BUFFERS, STEPS, EVALUATION)
"""What is compared, as it comes in a step."""
_UNITS = {SAMPLES: " batches", RATES: " steps", STEPS: " steps"}

EXACT = 1e-9
"""The largest difference that passes in float64, as part of the largest value of the step."""
_TINY = 1e-7
"""A gradient's element below it, as part of the largest, is rounding, of which an optimizer such as Adam may make a
whole step: such elements of parameters are not compared."""

NOT_FINITE = "gradients are not finite: let the script train to numbers, by a lower learning rate or other data"


@dataclass(frozen=True)
class Difference:
    """What differs.

    Attributes:
        what: one of `IN_ORDER`.
        step: the optimizer step, from 0; -1 where it is none's.
        update: the same, counted over all optimizers.
        name: of the parameter, buffer or sample.
        ranks: on which it differs.
        size: largest difference as part of the largest value of its kind; infinite where that means nothing.
        text: in words, where the numbers do not tell.
    """

    what: str
    step: int
    update: int
    name: str
    ranks: tuple[int, ...] = ()
    size: float = math.inf
    text: str = ""

    def __str__(self) -> str:
        when = f"step {self.step}: " if self.step >= 0 else ""
        return when + (self.text or self._size())

    def _size(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"{self.what.removesuffix('s')} of {self.name} on {ranks}: off by {self.size:.2g} of the largest"


@dataclass(frozen=True)
class Reason:
    """Why something differs.

    Attributes:
        text: in a sentence.
        where: the line of the script where it can be told.
        proof: what makes it certain; "" where it is a guess.
    """

    text: str
    where: str = ""
    proof: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.where})" if self.where else self.text


def told_by_rank(counts: Iterable[tuple[int, object]]) -> str:
    """Values of ranks, in words.

    Example:
        >>> told_by_rank(enumerate([3, 2]))
        'rank 0: 3, rank 1: 2'
    """
    return ", ".join(f"rank {rank}: {count}" for rank, count in counts)


def uneven(where: str) -> Reason:
    """The reason where some ranks have more batches than others."""
    text = "ranks get several numbers of batches: give all as many (DistributedSampler), or train within Join"
    return Reason(text, where)


@dataclass
class Comparison:
    """What two runs have in common, and what not.

    Attributes:
        differences: all that was found, in the order of steps, the largest first.
        compared: how much of each kind was compared.
        largest: the largest difference that passed, by kind.
        course: by update, the largest difference of gradients, as part of the largest.
        sizes: by kind and update, the largest difference as part of the largest value.
        untouched: names of parameters that no gradient reached.
        zero: names of those whose gradient was zero in all steps, or rounding beside the largest.
        zero_share: the part of a model's elements that both are.
        vacuous: why a pass would say nothing.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    course: list[float] = field(default_factory=list)
    sizes: dict[tuple[str, int], float] = field(default_factory=dict)
    untouched: list[str] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    zero_share: float = 0.0
    vacuous: list[str] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        """What differs first."""
        return min(self.differences, key=_place, default=None)

    def forget(self, *kinds: str) -> None:
        """Leave out the differences of some kinds."""
        self.differences = [each for each in self.differences if each.what not in kinds]

    def forget_from(self, update: int) -> bool:
        """Leave out the differences from an update on; whether there were any."""
        before = len(self.differences)
        self.differences = [each for each in self.differences if each.update < update]
        return len(self.differences) < before

    def count(self, what: str, number: int = 1) -> None:
        """So much of a kind was compared."""
        self.compared[what] = self.compared.get(what, 0) + number

    def rows(self) -> Iterator[Row]:
        """A line for each kind that was compared."""
        for what in IN_ORDER:
            number = self.compared.get(what)
            if number:
                yield Row(what, f"{number}{_UNITS.get(what, '')}", self._outcome(what))

    def _outcome(self, what: str) -> str:
        found = [each for each in self.differences if each.what == what]
        if found:
            return f"DIFFERENT: {min(found, key=_place)}"
        if what == SAMPLES:
            return "each once"
        if what in self.largest:
            return f"alike to {max(self.largest[what], 1e-17):.0e}"
        return "alike"


def _place(difference: Difference) -> tuple[float, int, float]:
    return difference.update, IN_ORDER.index(difference.what), -difference.size


Tensors = Mapping[str, Tensor | None]
Tolerance = Callable[[str, int], float]


def exactly(what: str, update: int) -> float:
    """The tolerance where all is in float64, and nothing is rounded in another way."""
    return EXACT


class Numbers:
    """Compares the numbers of two runs.

    Args:
        ranks: the run on N ranks.
        whole: the run of one process.
        tolerance: gives the largest difference that passes, for a kind and an update.
        tiny: elements of gradients below it, as part of the largest, are rounding.
    """

    def __init__(self, ranks: Recording, whole: Recording, tolerance: Tolerance, tiny: float = _TINY) -> None:
        self.ranks = ranks
        self.whole = whole
        self.tolerance = tolerance
        self.tiny = tiny
        self.result = Comparison()
        self._rounding: dict[str, Tensor] = {}

    def compare(self) -> Comparison:
        """Compare update by update."""
        for event, own in zip(self.ranks.steps, self.whole.first.steps, strict=False):
            if own["optimizer"] != event["optimizer"]:
                break
            self._step(event, own)
        self._count_steps()
        self._look_for_nothing()
        return self.result

    def _step(self, event: Event, own: Event) -> None:
        update = event["update"]
        self._rates(event, own)
        if event["number"] == 0:
            self._tensors(FIRST, "first", event, event["optimizer"])
        both = (self.whole.first, self.ranks.first)
        unclipped = all(each.load("unclipped", update) for each in both) and not clips_first(self.ranks, update)
        if unclipped:
            self._tensors(GRADIENTS, "unclipped", event, update)
        self._tensors(CLIPPED if unclipped else GRADIENTS, "gradients", event, update)
        self._note_rounding(update)
        self._tensors(PARAMETERS, "parameters", event, update)
        self._tensors(BUFFERS, "buffers", event, update)

    # -- learning rates

    def _rates(self, event: Event, own: Event) -> None:
        self.result.count(RATES)
        update = event["update"]
        by_rank = [step["rates"] for _, step in self.ranks.of("step", update=update)]
        strays = tuple(number for number, rates in enumerate(by_rank) if rates != by_rank[0])
        if strays:
            text = f"learning rate {by_rank[0]} on rank 0, {by_rank[strays[0]]} on rank {strays[0]}"
            self._found(Difference(RATES, event["number"], update, "learning rate", strays, text=text))
        elif any(abs(a - b) > 1e-9 * abs(b) for a, b in zip(event["rates"], own["rates"], strict=False)):
            text = f"learning rate {event['rates']} on {len(by_rank)} ranks, {own['rates']} on one process"
            self._found(Difference(RATES, event["number"], update, "", (), text=text))

    # -- tensors

    def _tensors(self, what: str, file: str, event: Event, number: int) -> None:
        expected = self.whole.whole(file, number)[0]
        by_rank = self.ranks.whole(file, number)
        found = {rank: values for rank, values in enumerate(by_rank) if values}  # one that joined makes no more steps
        if not found or not expected:
            return
        scale = _largest_of(expected)
        worst = 0.0
        for key, reference in expected.items():
            worst = max([worst, *self._tensor(what, key, found, reference, scale, event)])
        self.result.sizes[what, event["update"]] = worst
        if what == GRADIENTS:
            self.result.course.append(worst)

    def _tensor(
        self, what: str, key: str, found: Mapping[int, Tensors], reference: Tensor | None, scale: float, event: Event
    ) -> list[float]:
        """Compare one value; gives how far it is off on each rank, if that is of importance."""
        update, members = event["update"], tuple(found)
        parts = [values.get(key) for values in found.values()]
        sizes = [self._distance(what, key, part, reference, scale) for part in aligned(parts, reference)]
        strays = tuple(members[at] for at, size in enumerate(sizes) if not size <= self.tolerance(what, update))
        self.result.count(what)
        if what == BUFFERS and 0 not in strays:
            return []  # rank 0's are those that last: a wrapper hands them to the others at the next forward
        if strays:
            name = event["names"].get(key, key)
            ranks = strays if len(sizes) == len(members) else members
            self._found(Difference(what, event["number"], update, name, ranks, max(sizes)))
        else:
            self.result.largest[what] = max(self.result.largest.get(what, 0.0), *sizes)
        return sizes

    def _distance(self, what: str, key: str, found: Tensor | None, reference: Tensor | None, scale: float) -> float:
        """How far a value is off, as part of the largest of its kind; a missing gradient is zero."""
        if found is None or reference is None:
            return max(_largest(found), _largest(reference)) / (scale or 1.0)
        if found.shape != reference.shape:
            return math.inf
        if not reference.numel():
            return 0.0
        difference = (found.double() - reference.double()).abs()
        if what == PARAMETERS and key in self._rounding and self._rounding[key].shape == difference.shape:
            difference = difference * ~self._rounding[key]
        own = max(_largest(reference), _largest(found)) if what == BUFFERS else scale
        size = difference.max().item()
        if math.isnan(size):
            return math.nan if not torch.equal(found.isnan(), reference.isnan()) else 0.0
        return size / (own or 1.0)

    def _note_rounding(self, update: int) -> None:
        """Elements whose gradient is rounding may go anywhere, from here on."""
        gradients = self.whole.whole("gradients", update)[0]
        scale = _largest_of(gradients)
        for key, value in gradients.items():
            if value is not None:
                tiny = (value.abs() < self.tiny * scale) & (value != 0)
                self._rounding[key] = tiny | self._rounding.get(key, torch.zeros_like(tiny))

    # -- the rest

    def _count_steps(self) -> None:
        counts = [len(rank.steps) for rank in self.ranks.ranks]
        own = len(self.whole.first.steps)
        if self.ranks.has("join") and own in (max(counts), len(self.ranks.steps)):
            counts = [own]  # a rank that has run out makes fewer, and one that is stopped behind its steps not all
        self.result.count(STEPS, min(counts))
        if len({*counts, own}) > 1:
            least = min(*counts, own)
            text = f"optimizer steps by rank: {', '.join(map(str, counts))}; on one process: {own}"
            self._found(Difference(STEPS, least, least, "steps", text=text))

    def _look_for_nothing(self) -> None:
        """Runs that agree because nothing happens in them."""
        sizes: dict[str, list[float]] = defaultdict(list)  # by parameter, those of the gradients that are there
        elements: dict[str, int] = {}
        last: dict[int, Tensors] = {}  # by optimizer, its parameters
        moved = False
        for event in self.ranks.first.steps:
            gradients = self.ranks.whole("gradients", event["update"])[0]
            after = self.ranks.whole("parameters", event["update"])[0]
            number, rounding = event["optimizer"], self._passes_unseen(gradients, event["update"])
            before = last.get(number) or self.ranks.whole("first", number)[0]
            last[number] = after
            for key in event["trainable"]:
                own, value = sizes[event["names"][key]], gradients.get(key)
                if value is not None:
                    own.append(_above(rounding, _largest(value)))
                elements[event["names"][key]] = _number_of(after.get(key))
                moved = moved or _is_moved(before.get(key), after.get(key))
        zero = [name for name, own in sizes.items() if not any(own)]
        self.result.untouched = [name for name in zero if not sizes[name]]
        self.result.zero = [name for name in zero if sizes[name]]
        self.result.zero_share = sum(elements[name] for name in zero) / max(sum(elements.values()), 1)
        self._say_vacuous([size for own in sizes.values() for size in own], moved)

    def _passes_unseen(self, gradients: Tensors, update: int) -> float:
        """The largest gradient of which nobody would see that it differs: it is rounding beside the others."""
        unseen = self.tolerance(GRADIENTS, update) * _largest_of(gradients)
        return unseen if math.isfinite(unseen) else 0.0

    def _say_vacuous(self, sizes: Sequence[float], moved: bool) -> None:
        """Say why an agreement means nothing.

        Args:
            sizes: of all gradients.
            moved: whether a step has changed a parameter.
        """
        events = self.ranks.first.steps
        losses = {event["loss"] for event in self.ranks.first.of("backward")} - {None}
        if not all(map(math.isfinite, sizes)):
            self.result.vacuous.append(NOT_FINITE)
        elif self.result.untouched + self.result.zero and not any(sizes):
            self.result.vacuous.append(_why_nothing(events, self.result.untouched))
        elif events and not moved:
            self.result.vacuous.append(
                "no parameter is changed by a step: let the learning rate be above 0 in the first steps, or ask for "
                "more --steps"
            )
        elif len(events) > 1 and len(losses) == 1:
            self.result.vacuous.append(f"the loss is {losses.pop():g} at every step: let it depend on the samples")

    def _found(self, difference: Difference) -> None:
        self.result.differences.append(difference)


def own_gradients(ranks: Recording, update: int) -> list[dict[str, Value]]:
    """Each rank's gradients of an update, before they are clipped, unless they are averaged only then."""
    made = [rank for rank in ranks.ranks if rank.has_made(update)]
    if clips_first(ranks, update):
        return [rank.load("gradients", update) for rank in made]
    return [rank.of_step(update) for rank in made]


def clips_first(ranks: Recording, update: int) -> bool:
    """Whether ranks clip gradients that differ, and make them alike only then."""
    if ranks.is_sharded:
        return False
    before = [rank.load("unclipped", update) for rank in ranks.ranks]
    after = [rank.load("gradients", update) for rank in ranks.ranks]
    return not are_alike(before) and are_alike(after)


def are_alike(values: Sequence[Mapping[str, Value]]) -> bool:
    """Whether ranks have the same tensors, up to rounding, as far as they have them."""
    first = values[0]
    for other in values[1:]:
        for key, value in first.items():
            theirs = other.get(key)
            if not isinstance(value, Tensor) or not isinstance(theirs, Tensor):
                continue
            if value.shape != theirs.shape or _largest(value - theirs) > 1e-6 * _largest(value):
                return False
    return True


def aligned(parts: Sequence[Tensor | None], reference: Tensor | None) -> list[Tensor | None]:
    """Values by rank, as they are compared with one process' value: of parts of a tensor the whole.

    Example:
        >>> [len(each) for each in aligned([torch.ones(2), torch.ones(2)], torch.ones(4))]
        [4]
    """
    there = [part for part in parts if part is not None]
    if reference is None or all(part.shape == reference.shape for part in there):
        return list(parts)
    for dim in range(reference.dim()):
        whole = _joined(there, dim)
        if whole is not None and whole.shape == reference.shape:
            return [whole]
    flat = _joined(there, 0)
    if flat is not None and flat.dim() == 1 and flat.numel() >= reference.numel():
        return [flat[: reference.numel()].view(reference.shape)]
    return list(parts)


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Parts behind each other along a dimension; None where they do not fit."""
    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError):
        return None


def _why_nothing(events: Sequence[Event], untouched: Sequence[str]) -> str:
    """Why no parameter has a gradient."""
    if all(event["unknown"] and len(event["unknown"]) == len(event["names"]) for event in events):
        return (
            "the optimizer's parameters are of no module that is called, and get no gradient: make the optimizer "
            "behind what replaces parameters, such as fully_shard"
        )
    if untouched:
        return (
            "no gradient reaches a parameter of the optimizer: make it of model.parameters(), and call backward before "
            "its step"
        )
    return "all gradients are zero, so that nothing is trained: let the loss depend on the parameters"


def _above(least: float, size: float) -> float:
    """A size; 0 where it is not above the least one, and NaN as it is."""
    return 0.0 if size <= least else size


def _number_of(value: Tensor | None) -> int:
    return 0 if value is None else value.numel()


def _is_moved(before: Tensor | None, after: Tensor | None) -> bool:
    return before is not None and after is not None and not torch.equal(before, after)


def _largest(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else value.abs().max().item()


def _largest_of(values: Tensors) -> float:
    return max(map(_largest, values.values()), default=0.0)
