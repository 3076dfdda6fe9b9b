"""Sample orders of torch's built-in samplers, and sources of indices that iterate over user-defined samplers.

A built-in sampler becomes a function of the position. A user-defined sampler yields the same indices on every rank.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from lockstep.data.counting import LoaderOrder
from lockstep.data.order import Order, Shuffled, WithReplacement, make_key, sequential, table
from lockstep.data.partition import Partition, WindowPlan
from lockstep.data.passes import warn_if_grown
from lockstep.data.randomness import SeparateStates, generators_of
from lockstep.data.source import (
    Gather,
    Indexed,
    Reshare,
    Sampling,
    call_set_epoch,
    holders,
    length_of,
    stateful,
    states_of,
)
from lockstep.ground.errors import MisconfigurationException

_DRAW = 512  # positions drawn from a user's sampler at once
_WAY_OUT = (
    "Make the order depend on the epoch only: draw it from torch's, NumPy's or Python's global generator, which "
    "lockstep seeds, or seed the sampler's own generator in `set_epoch(epoch)`; or define `state_dict` and "
    "`load_state_dict`"
)


def order_of(sampler: object, *, seed: int, key: int, torch_order: bool) -> Callable[[int, int], Order] | None:
    """Return a function ``f(epoch, turn)`` that returns the order of a plain torch sampler; None for other samplers.

    The indices are those of the sampler's own data source, which may differ from the loader's data set. None is also
    returned for a sampler with a ``set_epoch`` attribute, which depends on the epoch, and for one with an empty data
    source or one without a length, for which torch raises its own error.

    Args:
        sampler: a loader's sampler.
        seed: seed of the run.
        key: hash of (seed, loader).
        torch_order: shuffle by `torch.randperm` with a generator seeded by ``seed + epoch``.
    """
    if hasattr(sampler, "set_epoch") or type(sampler) not in (SequentialSampler, RandomSampler):
        return None
    n = length_of(getattr(sampler, "data_source", None))
    if n is None or (n == 0 and length_of(sampler)):
        return None
    if not isinstance(sampler, RandomSampler):
        return lambda epoch, turn: sequential
    if sampler.replacement:
        return lambda epoch, turn: WithReplacement(n, make_key(key, "replacement", epoch, turn))
    if torch_order:
        # For more samples than the data set has, torch's sampler draws further permutations, which are not a table.
        return (lambda epoch, turn: table(n, seed + epoch + turn)) if sampler.num_samples <= n else None
    return lambda epoch, turn: Shuffled(n, make_key(key, "shuffle", epoch, turn))


def own_generator(sampler: object) -> torch.Generator | None:
    """Return the CPU generator that a user passed to a sampler. Return None if there is none."""
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) and found.device.type == "cpu" else None


# -- a user's sampler ----------------------------------------------------------------------------------------


class Drawn(Indexed):
    """Source of indices that come from a user's sampler or batch sampler, which yields the same on all ranks.

    The sampler is drawn with generators that are seeded from (seed, epoch), separate from those of training. Its
    positions are divided among the ranks like those of a plain sampler. With a batch sampler, each rank uses every
    ``size``-th batch. The sampler's ``set_epoch`` is called. A checkpoint contains a hash of the drawn order, and a
    different order after a resume, or on another rank, is an error.

    Args:
        sampling: the loader and its sampling settings.
        among: the (rank, size) for which positions are divided; default: those of the spec.
    """

    def __init__(self, sampling: Sampling, among: tuple[int, int] | None = None) -> None:
        super().__init__(sampling)
        spec = sampling.spec
        self.rank, self._size = among or (spec.rank, spec.size)
        self._gather = spec.gather if among is None else None
        self._shares: list[Reshare] = [(0, spec.shares)]
        self._sampler = sampler = sampling.sampler
        self.length = self._length_on(self._size)
        self.samples = -1 if (count := length_of(sampler)) is None else count
        self._unit = self._size * self.batch  # positions that are pulled together
        self._position = 0  # pulled from the sampler so far
        held = generators_of(holders(sampler))
        self._generators = [(each, spec.agreed(each.initial_bits())) for each in held]
        self._stateful = stateful(holders(sampler))
        self._before: list[Any] = []  # their states at the start of the pass
        self._order = DrawnOrder(sampler, sampling.name)
        self._pass = (0, 0)
        self._has_ended = False
        self._resume: dict[str, Any] = {}
        self._states = SeparateStates(0)
        self._iterator: Iterator[Any] = iter(())
        self._mine: deque[tuple[list[int], int]] = deque()  # (indices, position of the first), not yet handed out
        self._chunks: deque[_Chunk] = deque()  # what was pulled, as long as its weights may still be needed
        self._stretches: deque[_Stretch] = deque()
        self._reached = 0  # micro-batches pulled from the sampler so far
        self._start = 0

    def begin(self, epoch: int, turn: int, start: int) -> None:
        saved = self._resumed(epoch, turn)
        for holder in holders(self._sampler):
            call_set_epoch(holder, epoch)
        if self._stop >= self.length:  # else a limit ends the epoch
            warn_if_grown(self._sampling.name, self.samples, length_of(self._sampler))
        for each, state in zip(self._stateful, saved.get("before", ()), strict=False):
            each.load_state_dict(state)
        self._before, self._pass = states_of(self._stateful), (epoch, turn)
        nothing_left = start >= min(self._stop, self.length, saved.get("length") or math.inf)
        # If nothing is left of the pass, there is nothing that another order could change.
        self._order.begin(() if nothing_left else saved.get("drawn", ()))
        seeds = [(held, make_key(seed, epoch, turn)) for held, seed in self._generators]
        self._states = SeparateStates(make_key(self._key, "sampler", epoch, turn), seeds)
        self._mine.clear()
        self._chunks.clear()
        self._stretches.clear()
        number, self._position = (0, 0) if self._plan is None else (self._plan.number, self._plan.drawn)
        self._reached, self._start = number, start
        with self._states:
            self._iterator = iter(self._sampler)
            for first in range(0, self._position, _DRAW):
                self._next(min(_DRAW, self._position - first))
        # Once an epoch is enough: a sampler that differs between ranks does so from the start.
        if self._gather is not None and turn == 0:
            self._pull()
            self._order.compare(self._gather)
        # Draw as far as before the resume, so that another order is refused before a sample is used.
        while self._order.expected and self._pull():
            pass
        self._order.ended()
        # The weights before the start are kept: it may be in the middle of a window.
        while self._reached < start and self._pull():
            pass
        for _ in range(min(start - number, len(self._mine))):
            self._mine.popleft()

    def has(self, number: int) -> bool:
        while self._reached <= number:
            if not self._pull():
                return False
        return True

    def weights(self, number: int) -> Sequence[float]:
        reached = self.has(number)
        assert reached, f"micro-batch {number} was requested, but the sampler has ended"
        self._forget(number)
        return next(chunk for chunk in self._chunks if number < chunk.partition.length).sizes(number)

    def even_until(self, number: int) -> int:
        self._forget(number)
        found = next(iter(self._stretches), None)
        return number if found is None or found.first > number else found.end

    def _forget(self, number: int) -> None:
        """Drop the weights (numbers of samples) of micro-batches before ``number``, which are no longer needed."""
        while self._chunks and self._chunks[0].partition.length <= number:
            self._chunks.popleft()
        while self._stretches and self._stretches[0].end <= number:
            self._stretches.popleft()

    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        number = self._start
        while number < stop and (self._mine or self.has(number)):
            number += 1
            if self._mine:  # else this rank has no part of the last global batch
                yield self._seeds(*self._mine.popleft())

    def order(self) -> LoaderOrder:
        return self._sampling.order(self.samples)

    def planned(self, ranks: int) -> int | float:
        return self._length_on(ranks)

    def _length_on(self, ranks: int) -> int | float:
        count = length_of(self._sampler)
        return math.inf if count is None else Partition(count, self.batch, ranks, self._sampling.drop_last).length

    def repartition(self, plan: WindowPlan) -> None:
        self._plan = plan
        self._unit = plan.window(self.batch)
        count, drop_last = length_of(self._sampler), self._sampling.drop_last
        n = plan.limited(math.inf if count is None else count, self.batch, drop_last)
        self.length = n if math.isinf(n) else plan.partition(int(n), self.batch, self._size, drop_last).length

    @property
    def drawn(self) -> int:  # type: ignore[override]
        """Number of this pass's micro-batches that have been divided among the ranks so far."""
        return self._reached

    def use_shares(self, shares: Sequence[Reshare]) -> None:
        self._shares = list(shares)

    def reshare(self, shares: Reshare) -> None:
        if shares[0] < self._reached:
            raise RuntimeError(
                f"{self._sampling.name}: micro-batch {shares[0]} has been drawn, so its division among the ranks "
                "cannot change. Pass a later micro-batch"
            )
        self._shares.append(shares)

    def position(self, number: int) -> int:
        plan = self._plan
        return number * self._unit if plan is None else plan.reached(number, self.batch, self._size)

    def _pull(self) -> bool:
        """Draw the next global batches or windows, and divide them among the ranks. Return False at the end."""
        # where shares may change, samples are not divided far ahead of training
        wanted: int | float = self._unit * (1 if self.reshares else max(1, _DRAW // self._unit))
        if self._plan is not None:
            wanted = min(wanted, self._plan.limited(math.inf, self.batch, False) - self._position)
        with self._states:
            drawn = self._next(max(0, int(wanted)))
        before = self._reached
        if drawn:
            self._share_out(drawn)
        return self._reached > before

    def _next(self, count: int) -> list[Any]:
        """Return up to ``count`` further elements of the sampler. Add them to the hash of the drawn order."""
        drawn = list(itertools.islice(self._iterator, count))
        self._has_ended = len(drawn) < count
        if self._sampling.batch_size is None:
            drawn = list(map(list, drawn))  # one may be an iterator
        self._order.add(drawn)
        return drawn

    def _resumed(self, epoch: int, turn: int) -> dict[str, Any]:
        """Return this pass's state from the checkpoint. Without such a state, restore the samplers, and return {}."""
        resume = self._resume
        if not resume:
            return {}
        here = resume["pass"] == [epoch, turn]
        if here or resume["pass"][0] != epoch:
            self._resume = {}
        seeds = resume.get("seeds", ())
        if len(seeds) == len(self._generators):
            self._generators = [(held, seed) for (held, _), seed in zip(self._generators, seeds, strict=True)]
        if here:
            return resume
        for each, state in zip(self._stateful, resume.get("now", ()), strict=False):
            each.load_state_dict(state)
        return {}

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            "pass": list(self._pass),
            "drawn": self._order.saved(),
            "seeds": [seed for _, seed in self._generators],
            "length": self._reached if self._has_ended else None,
        }
        if self._stateful:
            saved |= {"before": self._before, "now": states_of(self._stateful)}
        return {"order": saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state.get("order", {})

    def _share_out(self, drawn: list[Any]) -> None:
        """Divide newly drawn elements, which start with a new window, among the ranks. Store this rank's part."""
        in_batches = self._sampling.batch_size is None
        partition = self._partition_of(len(drawn))
        chunk = _Chunk(partition, list(map(len, drawn)) if in_batches else [])
        for number in range(self._reached, partition.length):
            first, end = partition.span(number, self.rank)
            mine = drawn[first:end]
            if in_batches:
                mine = mine[0] if mine else []
            if not mine and self.pads:
                begin, stop = partition.span(number, 0)[0], partition.span(number, self._size - 1)[1]
                mine = next(filter(None, drawn[begin:stop]))[:1] if in_batches else drawn[begin : begin + 1]
            if mine:
                position = self._position + first
                # batches of unknown size: positions far apart
                self._mine.append((mine, position << 20 if in_batches else position))
        self._chunks.append(chunk)
        first, end, kind = partition.number, partition.full, chunk.kind()
        if end > first and kind is not None:
            # A longer stretch saves work: the feed computes shares once for each.
            if self._stretches and self._stretches[-1].end == first and self._stretches[-1].kind == kind:
                first = self._stretches.pop().first
            self._stretches.append(_Stretch(first, end, kind))
        self._position += len(drawn)
        self._reached = partition.length

    def _partition_of(self, count: int) -> Partition:
        """Return the `Partition` of the next ``count`` positions into micro-batches and ranks' parts."""
        drop_last, initial = self._sampling.drop_last, self._shares[0]
        weights = next((each for each in reversed(self._shares) if each[0] <= self._reached), initial)[1]
        if self._plan is None:
            return Partition(count, self.batch, self._size, drop_last, weights=weights, number=self._reached)
        here = WindowPlan(self._plan.ranks, self._plan.accumulate, number=self._reached)
        return here.partition(count, self.batch, self._size, drop_last, weights)


class _Chunk(NamedTuple):
    """Consecutive positions that were drawn together, and their division among the ranks."""

    partition: Partition
    lengths: list[int]
    """Length of each position's batch, for a batch sampler; else empty."""

    def sizes(self, number: int) -> list[int]:
        """Return the number of samples of each rank in micro-batch ``number``."""
        sizes = self.partition.sizes(number)
        if not self.lengths:
            return sizes
        first, count = self.partition.span(number, 0)[0], sum(sizes)  # the first ranks have a batch each
        return self.lengths[first : first + count] + [0] * (len(sizes) - count)

    def kind(self) -> tuple[float, ...] | None:
        """Return a key that is equal for two chunks if their full micro-batches have the same weights.

        Return None if the weights differ within this chunk.
        """
        if not self.lengths:
            return self.partition.weights
        size = self.lengths[0]
        return (size,) if size and self.lengths.count(size) == len(self.lengths) else None


class _Stretch(NamedTuple):
    """Consecutive micro-batches with equal weights, in which each rank has at least one sample."""

    first: int
    end: int
    kind: tuple[float, ...]


class OwnShare(Drawn):
    """Source of indices that come from a user's `DistributedSampler`, which yields only this rank's samples."""

    flexible = False  # this rank knows its own share only

    def __init__(self, sampling: Sampling) -> None:
        super().__init__(sampling, among=(0, 1))
        self.pads = self.divisible = False
        self._ranks = sampling.spec.size

    def order(self) -> LoaderOrder:
        return self._sampling.order(-1)  # a rank's own

    def weights(self, number: int) -> Sequence[float]:
        return list(super().weights(number)) * self._ranks

    def planned(self, ranks: int) -> int | float:
        batches = self._length_on(1) * self._ranks
        return batches if math.isinf(batches) else -(-batches // ranks)

    def repartition(self, plan: WindowPlan) -> None:
        """Do nothing, because the user's sampler determines this rank's samples."""

    def position(self, number: int) -> int:
        return super().position(number) * self._ranks

    def state_dict(self) -> dict[str, Any]:
        return {"order of rank": super().state_dict()["order"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state.get("order of rank", {})


# -- hash of the order ---------------------------------------------------------------------------------------


class DrawnOrder:
    """Hash of the elements that a sampler yields in a pass, to compare them with a checkpoint and other ranks.

    Args:
        sampler: the sampler, for messages.
        name: name of its loader, for messages.

    Attributes:
        count: number of elements that were hashed so far.
        expected: number of elements that the checkpoint's pass had drawn when it was saved; 0 if nothing is left to
            compare.
    """

    def __init__(self, sampler: object, name: str) -> None:
        self.sampler = sampler
        self.name = name
        self.count = 0
        self.expected = 0
        self._wanted = ""
        self._hash: hashlib.blake2b | None = hashlib.blake2b(digest_size=8)

    def begin(self, saved: Sequence[Any] = ()) -> None:
        """Start the hash of a new pass. ``saved`` is the hash from a checkpoint in this pass, to compare with."""
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=8)
        self.expected, self._wanted = saved or (0, "")

    def saved(self) -> list[Any]:
        """Return the hash as plain data for a checkpoint; an empty list if the elements cannot be compared."""
        return [] if self._hash is None else [self.count, self._hash.hexdigest()]

    def add(self, drawn: Sequence[Any]) -> None:
        """Add ``drawn``, elements that the sampler has yielded, to the hash.

        Raises:
            MisconfigurationException: the elements differ from those before the resume.
        """
        left = self.expected - self.count
        if 0 < left < len(drawn):
            self.add(drawn[:left])
            drawn = drawn[left:]
        self.count += len(drawn)
        if self._hash is not None:
            found = content(drawn)
            if found is None:
                self._hash = None
            else:
                self._hash.update(found)
        if self.expected and self.count >= self.expected:
            self.expected = 0
            if self._hash is not None and self._hash.hexdigest() != self._wanted:
                self._refuse()

    def ended(self) -> None:
        """Record that the sampler is exhausted. Raise an error if it had yielded more elements before the resume."""
        if self.expected:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise MisconfigurationException(
            f"{self.name}: the {type(self.sampler).__name__} draws a different order than before the resume, so "
            f"some samples of this epoch would be seen twice and others never. {_WAY_OUT}. Or resume from a checkpoint "
            "that was saved at the end of an epoch."
        )

    def compare(self, gather: Gather) -> None:
        """Raise an error if the ranks' samplers have yielded different elements so far. Collective.

        Raises:
            MisconfigurationException: ranks drew different orders.
        """
        mine = 0 if self._hash is None else int.from_bytes(self._hash.digest(), "big") >> 1
        ranks = gather(torch.tensor([mine], dtype=torch.int64)).flatten().tolist()
        if 0 not in ranks and len(set(ranks)) > 1:
            raise MisconfigurationException(
                f"{self.name}: the {type(self.sampler).__name__} draws a different order on each rank, so some samples "
                f"would be seen twice and others never. {_WAY_OUT}. If each rank has its own data, set "
                "Trainer(use_distributed_sampler=False)."
            )


def content(drawn: Sequence[Any]) -> bytes | None:
    """Encode elements of a sampler so that equal elements give equal bytes. Return None if that is impossible."""
    try:
        return array("q", drawn).tobytes()
    except (TypeError, ValueError, OverflowError):
        pass
    try:  # batches of whole numbers, as below
        return b"|".join(map(partial(array, "q"), drawn))
    except (TypeError, ValueError, OverflowError):
        pass
    found = []
    for element in drawn:
        try:
            found.append(array("q", element).tobytes())
        except (TypeError, ValueError, OverflowError):
            text = repr(element)
            if " at 0x" in text:  # contains an address
                return None
            found.append(text.encode(errors="replace"))
    return b"|".join(found)


class WatchedSampler:
    """A wrapper of a user's sampler or batch sampler that hashes each element that the sampler yields."""

    def __init__(self, sampler: Iterable[Any], order: DrawnOrder) -> None:
        self._sampler = sampler
        self.order = order
        self.resume: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        saved, self.resume = self.resume, []
        self.order.begin(saved)
        for element in self._sampler:
            self.order.add([element])
            yield element
        self.order.ended()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]
