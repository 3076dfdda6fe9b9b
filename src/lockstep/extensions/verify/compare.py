"""Step-by-step comparison of gradients, parameters and other values that N ranks and one process compute."""

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
REPORTS = "reported numbers"
IN_ORDER = (SAMPLES, FIRST, COLLECTIVES, RATES, GRADIENTS, CLIPPED, PARAMETERS, BUFFERS, STEPS, REPORTS)
"""Kinds of compared values, in the order of a step; the first that differs causes the other differences."""
_UNITS = {SAMPLES: " batches", RATES: " steps", STEPS: " steps"}

EXACT = 1e-9
"""Largest difference that counts as equal in float64, as a fraction of the step's largest value."""
_TINY = 1e-7
"""Elements of gradients below this fraction of the largest are rounding errors. An optimizer such as Adam may turn them
into steps of full size, so these elements of parameters are not compared."""

NOT_FINITE = "gradients are not finite: use a lower learning rate or other data, so that training gives finite numbers"


@dataclass(frozen=True)
class Difference:
    """Record of a value that differs between two runs, with its place and size.

    Attributes:
        kind: one of `IN_ORDER`.
        step: optimizer step, from 0; -1 if the difference belongs to none.
        update: the step's number among the steps of all optimizers.
        name: name of the parameter, buffer or sample.
        ranks: ranks whose value differs.
        size: largest difference as a fraction of the largest value of its kind; infinite if that has no meaning.
        text: description, unless name and size describe it.
    """

    kind: str
    step: int
    update: int
    name: str
    ranks: tuple[int, ...] = ()
    size: float = math.inf
    text: str = ""

    def __str__(self) -> str:
        text = self.text
        if not text:
            ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
            size = f"off by {self.size:.2g} of the largest"
            text = f"{self.kind.removesuffix('s')} of {self.name} on {ranks}: {size}"
        return f"step {self.step}: {text}" if self.step >= 0 else text


@dataclass(frozen=True)
class Reason:
    """Cause of a difference between two runs, with a line of the script and the evidence.

    Attributes:
        text: a sentence.
        where: the line of the script that causes the difference.
        proof: the evidence; "" if the cause is a guess.
    """

    text: str
    where: str = ""
    proof: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.where})" if self.where else self.text


def by_rank(values: Iterable[tuple[int, object]]) -> str:
    """Format one value per rank for a message.

    Example:
        >>> by_rank(enumerate([3, 2]))
        'rank 0: 3, rank 1: 2'
    """
    return ", ".join(f"rank {rank}: {value}" for rank, value in values)


def shorten(names: Sequence[object], most: int = 3) -> str:
    """Format the first ``most`` names of a list for a message.

    Example:
        >>> shorten("abcd")
        'a, b, c, ...'
    """
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def several(ranks: Sequence[int]) -> str:
    """Format rank numbers to follow the word "rank", starting with an "s" if there are several.

    Example:
        >>> "rank" + several([3]), "rank" + several([0, 1, 2, 3, 4, 5])
        ('rank 3', 'ranks 0, 1, 2, 3, ...')
    """
    return f"{'s' * (len(ranks) > 1)} {shorten(ranks, 4)}"


def uneven(where: str) -> Reason:
    """Return the cause of a difference that arises because ranks get different numbers of batches."""
    text = "ranks get different numbers of batches: use a DistributedSampler, or train inside a Join context"
    return Reason(text, where)


@dataclass
class Comparison:
    """Result of comparing two runs: the differences, and what was compared.

    Attributes:
        differences: all differences, in the order in which they were found.
        compared: number of compared items by kind.
        largest: largest difference that passed, by kind.
        course: for each update the largest difference of gradients, as a fraction of the largest.
        sizes: by kind and update, the largest difference as a fraction of the largest value.
        untrained: names of parameters that got no gradient in any step, or only rounding compared with the largest.
        untrained_share: the fraction of a model's elements that are in `untrained`.
        vacuous: reasons why agreement would prove nothing.
        samples: outcome of the comparison of samples, if they do not differ.
    """

    differences: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    course: list[float] = field(default_factory=list)
    sizes: dict[tuple[str, int], float] = field(default_factory=dict)
    untrained: list[str] = field(default_factory=list)
    untrained_share: float = 0.0
    vacuous: list[str] = field(default_factory=list)
    samples: str = "each once"

    @property
    def first(self) -> Difference | None:
        """First difference, or None. If several of the same kind and update are first, the largest of these."""
        return min(self.differences, key=_place, default=None)

    def drop(self, *kinds: str) -> None:
        """Drop the differences of the given kinds."""
        self.differences = [each for each in self.differences if each.kind not in kinds]

    def count(self, kind: str, number: int = 1) -> None:
        """Add ``number`` to the count of compared items of a kind."""
        self.compared[kind] = self.compared.get(kind, 0) + number

    def rows(self) -> Iterator[Row]:
        """Yield a table row for each kind that was compared."""
        for kind in IN_ORDER:
            number = self.compared.get(kind)
            if number:
                yield Row(kind, f"{number}{_UNITS.get(kind, '')}", self._outcome(kind))

    def _outcome(self, kind: str) -> str:
        found = [each for each in self.differences if each.kind == kind]
        if found:
            return f"DIFFERENT: {min(found, key=_place)}"
        if kind == SAMPLES:
            return self.samples
        if kind in self.largest:
            return f"equal to within {max(self.largest[kind], 1e-17):.0e}"
        return "equal"


def _place(difference: Difference) -> tuple[float, int, float]:
    return difference.update, IN_ORDER.index(difference.kind), -difference.size


Tensors = Mapping[str, Tensor | None]
Tolerance = Callable[[str, int], float]
"""Returns the largest difference that counts as equal, for a kind and an update."""


def exact(kind: str, update: int) -> float:
    """Return the tolerance for comparing two float64 runs: `EXACT` for every kind and update."""
    return EXACT


class Numbers:
    """Comparison of the gradients, parameters and other values that two runs compute.

    Args:
        ranks: the run on N ranks.
        single: the run of one process.
        tolerance: returns the largest difference that counts as equal.
        tiny: elements of gradients below this fraction of the largest are rounding errors.

    Attributes:
        names: names of both runs in messages.
    """

    names = ("on the ranks", "on one process")

    def __init__(self, ranks: Recording, single: Recording, tolerance: Tolerance, tiny: float = _TINY) -> None:
        self.ranks = ranks
        self.single = single
        self.tolerance = tolerance
        self.tiny = tiny
        self.result = Comparison()
        self._rounding: dict[str, Tensor] = {}

    def compare(self) -> Comparison:
        """Compare the runs update by update."""
        for event, own in zip(self.ranks.steps, self.single.first.steps, strict=False):
            if own["optimizer"] != event["optimizer"]:
                break
            update = event["update"]
            self._compare_rates(event, own)
            if event["number"] == 0:
                self._compare_tensors(FIRST, "first", event, event["optimizer"])
            both = (self.single.first, self.ranks.first)
            # ranks that clip before they average have no gradients to compare until then
            is_clipped = all(each.load("unclipped", update) for each in both) and not clips_first(self.ranks, update)
            if is_clipped:
                self._compare_tensors(GRADIENTS, "unclipped", event, update)
            are_own = not are_equal([rank.load("gradients", update) for rank in self.ranks.ranks])
            # steps with a rank's own gradients are as good if weights are averaged later, and the step is linear
            starts = [rank.load("first", event["optimizer"]) for rank in self.ranks.ranks]
            is_averaged_later = are_own and bool(self.ranks.reduced_after_step) and are_equal(starts)
            # an optimizer that reduces gradients itself gets those of its rank
            if not (are_own and self.ranks.reduced_in_step):
                kind = CLIPPED if is_clipped else GRADIENTS
                self._compare_tensors(kind, "gradients", event, update, is_averaged_later)
            self._mark_rounding(update)
            if not is_averaged_later:
                self._compare_tensors(PARAMETERS, "parameters", event, update)
            self._compare_tensors(BUFFERS, "buffers", event, update)
        self._compare_steps()
        self._check_vacuous()
        return self.result

    # -- learning rates and steps

    def _compare_rates(self, event: Event, own: Event) -> None:
        self.result.count(RATES)
        update = event["update"]
        rates = [step["rates"] for _, step in self.ranks.find("step", update=update)]
        deviating = tuple(number for number, each in enumerate(rates) if each != rates[0])
        if deviating:
            text = f"learning rate {rates[0]} on rank 0, {rates[deviating[0]]} on rank {deviating[0]}"
            difference = Difference(RATES, event["number"], update, "learning rate", deviating, text=text)
            self.result.differences.append(difference)
        elif any(abs(a - b) > 1e-9 * abs(b) for a, b in zip(event["rates"], own["rates"], strict=False)):
            text = f"learning rate {event['rates']} {self.names[0]}, {own['rates']} {self.names[1]}"
            self.result.differences.append(Difference(RATES, event["number"], update, "", (), text=text))

    def _compare_steps(self) -> None:
        counts = [len(rank.steps) for rank in self.ranks.ranks]
        own = len(self.single.first.steps)
        if self.ranks.has("join"):
            counts = [own := self.ranks.fewest_steps]
        self.result.count(STEPS, min(counts))
        if len({*counts, own}) > 1:
            least = min(*counts, own)
            text = f"optimizer steps by rank: {', '.join(map(str, counts))}; {self.names[1]}: {own}"
            self.result.differences.append(Difference(STEPS, least, least, "steps", text=text))

    # -- tensors

    def _compare_tensors(self, kind: str, file: str, event: Event, number: int, average: bool = False) -> None:
        """Compare the tensors that both runs have written to a kind of file, for example "gradients".

        ``number`` is the number of the update or, for the file "first", the number of the optimizer. With ``average``,
        the mean over the ranks is compared.
        """
        expected = self.single.assembled(file, number)[0]
        found = self.ranks.assembled(file, number)
        if not all(found) or not expected:
            return
        if average:
            found = [{key: _mean([values.get(key) for values in found]) for key in found[0]}] * len(found)
        scale = _largest_of(expected)
        worst = 0.0
        for key, reference in expected.items():
            worst = max([worst, *self._compare_tensor(kind, key, found, reference, scale, event)])
        self.result.sizes[kind, event["update"]] = worst
        if kind == GRADIENTS:
            self.result.course.append(worst)

    def _compare_tensor(
        self, kind: str, key: str, found: Sequence[Tensors], reference: Tensor | None, scale: float, event: Event
    ) -> list[float]:
        """Compare one tensor with ``reference``. Return the differences on the ranks, as fractions of ``scale``."""
        update = event["update"]
        parts = [values.get(key) for values in found]
        sizes = [self._distance(kind, key, part, reference, scale) for part in align(parts, reference)]
        # "not <=", since NaN is never above the tolerance
        deviating = tuple(rank for rank, size in enumerate(sizes) if not size <= self.tolerance(kind, update))
        self.result.count(kind)
        if kind == BUFFERS and 0 not in deviating:
            # a wrapper gives rank 0's buffers to the others in the next forward
            return []
        if deviating:
            name = event["names"].get(key, key)
            ranks = deviating if len(sizes) == len(found) else tuple(range(len(found)))
            difference = Difference(kind, event["number"], update, name, ranks, max(sizes))
            self.result.differences.append(difference)
        else:
            self.result.largest[kind] = max(self.result.largest.get(kind, 0.0), *sizes)
        return sizes

    def _distance(self, kind: str, key: str, found: Tensor | None, reference: Tensor | None, scale: float) -> float:
        """Return the largest elementwise difference, as a fraction of ``scale``. A missing gradient counts as zero."""
        if found is None or reference is None:
            return max(_largest(found), _largest(reference)) / (scale or 1.0)
        if found.shape != reference.shape:
            return math.inf
        if not reference.numel():
            return 0.0
        difference = (found.double() - reference.double()).abs()
        if kind == PARAMETERS and key in self._rounding and self._rounding[key].shape == difference.shape:
            difference = difference * ~self._rounding[key]
        # buffers have no common scale: a mean, a variance, a number of batches
        own = max(_largest(reference), _largest(found)) if kind == BUFFERS else scale
        size = difference.max().item()
        if math.isnan(size):
            return math.nan if not torch.equal(found.isnan(), reference.isnan()) else 0.0
        return size / (own or 1.0)

    def _mark_rounding(self, update: int) -> None:
        """From this update on, do not compare parameter elements whose gradient is only a rounding error.

        The updates of these elements are arbitrary.
        """
        gradients = self.single.assembled("gradients", update)[0]
        scale = _largest_of(gradients)
        for key, value in gradients.items():
            if value is not None:
                tiny = (value.abs() < self.tiny * scale) & (value != 0)
                self._rounding[key] = tiny | self._rounding.get(key, torch.zeros_like(tiny))

    # -- runs that agree without training

    def _check_vacuous(self) -> None:
        """Find untrained parameters, and reasons why an agreement of the runs would not be conclusive."""
        result, events = self.result, self.ranks.first.steps
        sizes: dict[str, list[float]] = defaultdict(list)  # by parameter, of its gradients
        elements: dict[str, int] = {}
        last: dict[int, Tensors] = {}  # by optimizer, its parameters
        has_moved = False
        for event in events:
            update, number = event["update"], event["optimizer"]
            gradients = self.ranks.assembled("gradients", update)[0]
            after = self.ranks.assembled("parameters", update)[0]
            # a gradient below the tolerance could differ without being noticed
            unseen = self.tolerance(GRADIENTS, update) * _largest_of(gradients)
            rounding = unseen if math.isfinite(unseen) else 0.0
            before = last.get(number) or self.ranks.assembled("first", number)[0]
            last[number] = after
            for key in event["trainable"]:
                name = event["names"][key]
                own, gradient = sizes[name], gradients.get(key)
                if gradient is not None:
                    size = _largest(gradient)
                    own.append(0.0 if size <= rounding else size)  # NaN stays
                old, new = before.get(key), after.get(key)
                elements[name] = 0 if new is None else new.numel()
                if not has_moved and old is not None and new is not None:
                    has_moved = not torch.equal(old, new)
        result.untrained = [name for name, own in sizes.items() if not any(own)]
        result.untrained_share = sum(elements[name] for name in result.untrained) / max(sum(elements.values()), 1)
        all_sizes = [size for own in sizes.values() for size in own]
        if not all(map(math.isfinite, all_sizes)):
            result.vacuous.append(NOT_FINITE)
        elif result.untrained and not any(all_sizes):
            result.vacuous.append(
                "no parameter of the optimizer gets a gradient: create the optimizer with the parameters that the loss "
                "depends on, and after calls that replace parameters, such as fully_shard"
            )
        elif events and not has_moved:
            result.vacuous.append(
                "no step changes a parameter: use a learning rate above 0 in the first steps, or more --steps"
            )


def own_gradients(ranks: Recording, update: int) -> list[dict[str, Value]]:
    """Return each rank's gradients of an update, from before clipping unless the ranks clip before they average."""
    if clips_first(ranks, update):
        return [rank.load("gradients", update) for rank in ranks.ranks]
    return [rank.unclipped_gradients(update) for rank in ranks.ranks]


def clips_first(ranks: Recording, update: int) -> bool:
    """Return True if each rank clips its own gradients before they are averaged over the ranks."""
    if ranks.is_sharded:
        return False
    before = [rank.load("unclipped", update) for rank in ranks.ranks]
    after = [rank.load("gradients", update) for rank in ranks.ranks]
    return not are_equal(before) and are_equal(after)


def are_equal(values: Sequence[Mapping[str, Value]]) -> bool:
    """Return True if the ranks' tensors are equal up to rounding. Missing tensors are not compared."""
    first = values[0]
    for other in values[1:]:
        for key, value in first.items():
            theirs = other.get(key)
            if not isinstance(value, Tensor) or not isinstance(theirs, Tensor):
                continue
            if value.shape != theirs.shape or _largest(value - theirs) > 1e-6 * _largest(value):
                return False
    return True


def align(parts: Sequence[Tensor | None], reference: Tensor | None) -> list[Tensor | None]:
    """Return the ranks' tensors. Shards of one tensor are joined to one tensor in the shape of ``reference``.

    Example:
        >>> [len(each) for each in align([torch.ones(2), torch.ones(2)], torch.ones(4))]
        [4]
    """
    there = [part for part in parts if part is not None]
    if reference is None or all(part.shape == reference.shape for part in there):
        return list(parts)
    for dim in range(reference.dim()):
        whole = _concatenated(there, dim)
        if whole is not None and whole.shape == reference.shape:
            return [whole]
    # FSDP's first version flattens parameters and pads the last shard
    flat = _concatenated(there, 0)
    if flat is not None and flat.dim() == 1 and flat.numel() >= reference.numel():
        return [flat[: reference.numel()].view(reference.shape)]
    return list(parts)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """Concatenate parts along a dimension. Return None if their shapes do not fit."""
    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError):
        return None


def _mean(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [value for value in values if value is not None]
    return sum(there[1:], there[0]) / len(values) if there else None


def _largest(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else value.abs().max().item()


def _largest_of(values: Tensors) -> float:
    return max(map(_largest, values.values()), default=0.0)
