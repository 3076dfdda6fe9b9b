"""Schedules: the samples that a rank draws for each micro-batch of an epoch, and how many the others draw."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from lockstep.data.cut import Cut
from lockstep.data.drawn_order import DrawnOrder, generators_of, initial_bits, stateful, states_of
from lockstep.data.order import Order, Shuffled, WithReplacement, make_key, sequential, table
from lockstep.data.randomness import Lane, SeededIndex, SeededIndices
from lockstep.data.recut import Recut, Rest, WindowPlan

_BLOCK = 8192  # positions whose indices are computed at once: 1 ms, 64 KiB
_DRAW = 512  # positions asked of a user's sampler at once


class Schedule(ABC):
    """What one rank draws in an epoch, micro-batch by micro-batch.

    A source calls :meth:`begin` once for each pass over the data and iterates :meth:`draw` (perhaps ahead of
    training, to keep loader workers busy); the feed asks :meth:`has` and :meth:`weights` in ascending order.

    Args:
        rank: this rank.
        size: number of ranks.
        key: 64 bits that stand for (seed, loader).
        borrow: give a rank whose part of a global batch is empty one sample of another's part (training).
        quiet: fetching draws no random numbers, so that indices need not seed any.
    """

    length: int | float
    """Number of micro-batches of the rank that has most of them; infinite where that is not known."""
    even: int = 0
    """At least so many leading micro-batches hold ``batch`` samples on every rank."""
    batch: int = 1
    fixed: bool = False
    """As of `Source`."""
    flexible: bool = True
    """Whether :meth:`group` can cut the epoch as it asks; else only where its micro-batches are full ones."""
    stop: int | float = math.inf
    """From this micro-batch on none is wanted in the pass that begins."""

    def __init__(self, rank: int, size: int, *, key: int, borrow: bool, quiet: bool) -> None:
        self.rank = rank
        self.size = size
        self.key = key
        self.borrow = borrow
        self.quiet = quiet
        self.epoch_key = 0

    def begin(self, epoch: int, turn: int, start: int) -> None:
        """Gets ready to draw from micro-batch ``start`` on; ``turn`` counts passes within the epoch."""
        self.epoch_key = make_key(self.key, "draw", epoch, turn)

    @abstractmethod
    def has(self, number: int) -> bool:
        """Whether any rank draws samples for this micro-batch."""

    @abstractmethod
    def weights(self, number: int) -> Sequence[int]:
        """How many samples each rank draws for this micro-batch; 0 where a rank's sample is borrowed."""

    @abstractmethod
    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        """This rank's indices of each micro-batch from ``start`` up to ``stop``."""

    @abstractmethod
    def planned(self, ranks: int) -> int | float:
        """:attr:`length` on another number of ranks, ungrouped."""

    @abstractmethod
    def group(self, grouping: WindowPlan) -> None:
        """Cut the passes to come as another number of ranks has planned or begun them."""

    @abstractmethod
    def place(self, number: int) -> int:
        """Positions that all ranks have drawn before a micro-batch with which a window begins."""

    def state_dict(self) -> dict[str, Any]:
        """What it takes, besides the position, to draw the same order again; empty if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """For the pass of the checkpoint, which is opened again; see :meth:`state_dict`."""

    def _seeding(self, indices: list[int], first: int) -> list[int]:
        return indices if self.quiet else SeededIndices(indices, self.epoch_key, first)


class Ordered(Schedule):
    """A schedule from an order that is a function: nothing is stored or sent, and any start costs the same.

    Args:
        cut: how positions are cut.
        order: ``order(epoch, turn)`` is the order of a pass.
        alone: indices come one by one, as a loader with ``batch_size=None`` wants them (``cut.batch`` is 1).
    """

    fixed = True

    def __init__(
        self,
        cut: Cut,
        order: Callable[[int, int], Order],
        rank: int,
        *,
        key: int,
        borrow: bool,
        quiet: bool,
        alone: bool = False,
    ) -> None:
        super().__init__(rank, cut.size, key=key, borrow=borrow, quiet=quiet)
        self._whole = cut
        self._grouping: WindowPlan | None = None
        self.alone = alone
        self.batch = cut.batch
        self._use(cut)
        self._order_of = order
        self._order: Order = sequential
        self._start = 0

    def planned(self, ranks: int) -> int:
        return replace(self._whole, size=ranks).length

    def _use(self, cut: Cut | Recut | Rest) -> None:
        self.cut = cut
        self.length = cut.length
        self.even = cut.full

    def group(self, grouping: WindowPlan) -> None:
        whole = self._whole
        self._grouping = grouping
        self._use(grouping.cut(whole.n, whole.batch, whole.size, whole.drop_last))

    def place(self, number: int) -> int:
        whole, grouping = self._whole, self._grouping
        if grouping is None:
            return min(whole.n, number * whole.batch * whole.size)
        return min(whole.n, grouping.reached(number, whole.batch, whole.size))

    def begin(self, epoch: int, turn: int, start: int) -> None:
        super().begin(epoch, turn, start)
        self._order = self._order_of(epoch, turn)
        self._start = start

    def has(self, number: int) -> bool:
        return number < self.length

    def weights(self, number: int) -> Sequence[int]:
        return self.cut.weights(number)

    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        blocks = self._blocks(int(min(stop, self.length)))
        if self.quiet and not self.alone:  # no frame of ours for a batch
            return itertools.chain.from_iterable(block for block, _ in blocks)
        return self._each(blocks)

    def _each(self, blocks: Iterator[tuple[list[list[int]], list[int]]]) -> Iterator[list[int] | int]:
        for block in blocks:
            for indices, first in zip(*block, strict=True):
                if not self.alone:
                    yield SeededIndices(indices, self.epoch_key, first)
                else:
                    yield indices[0] if self.quiet else SeededIndex.make(indices[0], self.epoch_key, first)

    def _blocks(self, stop: int) -> Iterator[tuple[list[list[int]], list[int]]]:
        """Many micro-batches at once: (indices of each, position of its first) of this rank's part."""
        cut, full = self.cut, min(self.cut.full, stop)
        at_once = max(1, _BLOCK // cut.batch)
        within = torch.arange(cut.batch)
        for begin in range(self._start, full, at_once):
            end = min(begin + at_once, full)
            firsts = torch.arange(end - begin).mul_(cut.batch * cut.size).add_(cut.span(begin, self.rank)[0])
            yield self._order(firsts.unsqueeze(1) + within).tolist(), firsts.tolist()
        for begin in range(max(full, self._start), stop, at_once):
            yield self._uneven(range(begin, min(begin + at_once, stop)))

    def _uneven(self, numbers: Iterable[int]) -> tuple[list[list[int]], list[int]]:
        spans = []
        for number in numbers:
            first, end = self.cut.span(number, self.rank)
            if first == end and self.borrow:
                first = self.cut.span(number, 0)[0]
                end = first + 1
            if first < end:
                spans.append((first, end))
        if not spans:
            return [], []
        drawn = iter(self._order(torch.cat([torch.arange(*span) for span in spans])).tolist())
        return [list(itertools.islice(drawn, end - first)) for first, end in spans], [first for first, _ in spans]


class Drawn(Schedule):
    """A schedule from a sampler or batch sampler of the user's, drawn on every rank alike.

    It is drawn under generators seeded by (seed, epoch), apart from those of training; its positions are cut
    like ours. Of a batch sampler every rank takes each ``size``-th batch. The user's ``set_epoch`` is called.
    A checkpoint holds a hash of what was drawn: a sampler that draws another order after a resume, or on another
    rank, is refused.

    Args:
        sampler: yields indices; or lists of them where ``size_of_batch`` is None (a batch sampler).
        size_of_batch: indices that make a full micro-batch.
        drop_last: leave out the last global batch if it is not full.
        alone: the data set is asked for one index at a time (a loader with ``batch_size=None``).
        agreed: makes the seed of a generator that the sampler holds the same on all ranks.
        gather: every rank's tensor, stacked, to compare what ranks have drawn; None: not compared.
        name: of the loader, for messages.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        rank: int,
        size: int,
        *,
        key: int,
        borrow: bool,
        quiet: bool,
        size_of_batch: int | None,
        drop_last: bool = False,
        alone: bool = False,
        agreed: Callable[[int], int] = int,
        gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
        name: str = "the loader",
    ) -> None:
        super().__init__(rank, size, key=key, borrow=borrow, quiet=quiet)
        self.sampler = sampler
        self.size_of_batch = size_of_batch
        self.drop_last = drop_last
        self.alone = alone
        self.batch = size_of_batch or 1
        self.length = self.planned(size)
        self._unit = size * self.batch  # positions that are pulled together
        self._grouping: WindowPlan | None = None
        self._position = 0  # pulled from the sampler so far
        held = {id(made): made for holder in holders(sampler) for made in generators_of(holder)}
        self._generators = [(made, agreed(initial_bits(made))) for made in held.values()]
        self._stateful = stateful(holders(sampler))
        self._before: list[Any] = []  # their states at the beginning of the pass
        self._order = DrawnOrder(sampler, name)
        self._gather = gather
        self._pass = (0, 0)
        self._has_ended = False
        self._resume: dict[str, Any] = {}
        self._lane = Lane(0)
        self._iterator: Iterator[Any] = iter(())
        self._mine: deque[tuple[list[int], int]] = deque()  # (indices, position of the first), not yet handed out
        self._weights: dict[int, list[int]] = {}  # of each rank, by micro-batch, not yet asked for
        self._reached = 0  # micro-batches pulled from the sampler so far
        self._start = 0

    def begin(self, epoch: int, turn: int, start: int) -> None:
        super().begin(epoch, turn, start)
        saved = self._resumed(epoch, turn)
        for holder in holders(self.sampler):
            call_set_epoch(holder, epoch)
        for holder, state in zip(self._stateful, saved.get("before", ()), strict=False):
            holder.load_state_dict(state)
        self._before, self._pass = states_of(self._stateful), (epoch, turn)
        nothing_left = start >= min(self.stop, self.length, saved.get("length") or math.inf)
        self._order.begin(() if nothing_left else saved.get("drawn", ()))
        seeds = [(made, make_key(seed, epoch, turn)) for made, seed in self._generators]
        self._lane = Lane(make_key(self.key, "sampler", epoch, turn), seeds)
        self._mine.clear()
        self._weights.clear()
        number, self._position = (0, 0) if self._grouping is None else (self._grouping.number, self._grouping.position)
        self._reached, self._start = number, start
        with self._lane:
            self._iterator = iter(self.sampler)
            for first in range(0, self._position, _DRAW):
                self._next(min(_DRAW, self._position - first))
        if self._gather is not None and turn == 0:
            self._pull()
            self._order.compare(self._gather)
        # as far as it was drawn before the resume, to compare all of it now
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

    def weights(self, number: int) -> Sequence[int]:
        reached = self.has(number)
        assert reached, f"micro-batch {number} was asked of a sampler that has ended"
        return self._weights.pop(number)

    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        number = self._start
        while number < stop and (self._mine or self.has(number)):
            number += 1
            if not self._mine:
                continue  # this rank has no part of the last global batch
            indices, first = self._mine.popleft()
            if not self.alone:
                yield self._seeding(indices, first)
            else:
                index = indices[0]  # whatever the sampler yields goes to the data set; only integers can seed
                seeds = isinstance(index, int) and not self.quiet
                yield SeededIndex.make(index, self.epoch_key, first) if seeds else index

    def planned(self, ranks: int) -> int | float:
        count = length_of(self.sampler)
        return math.inf if count is None else Cut(count, self.batch, ranks, self.drop_last).length

    def group(self, grouping: WindowPlan) -> None:
        self._grouping = grouping
        self._unit = grouping.window(self.batch)
        count = length_of(self.sampler)
        n = grouping.kept(math.inf if count is None else count, self.batch, self.drop_last)
        self.length = n if math.isinf(n) else grouping.cut(int(n), self.batch, self.size, self.drop_last).length

    def place(self, number: int) -> int:
        grouping = self._grouping
        return number * self._unit if grouping is None else grouping.reached(number, self.batch, self.size)

    def _pull(self) -> bool:
        """Draws the next few global batches, or windows of a grouping; whether there were any."""
        wanted: int | float = self._unit * max(1, _DRAW // self._unit)
        if self._grouping is not None:
            wanted = min(wanted, self._grouping.kept(math.inf, self.batch, False) - self._position)
        with self._lane:
            drawn = self._next(max(0, int(wanted)))
        before = self._reached
        for start in range(0, len(drawn), self._unit):
            self._share_out(drawn[start : start + self._unit])
        return self._reached > before

    def _next(self, count: int) -> list[Any]:
        """What the sampler yields next, which is hashed."""
        drawn = list(itertools.islice(self._iterator, count))
        self._has_ended = len(drawn) < count
        if self.size_of_batch is None:
            drawn = [list(batch) for batch in drawn]  # one may be an iterator
        self._order.add(drawn)
        return drawn

    def _resumed(self, epoch: int, turn: int) -> dict[str, Any]:
        """What a checkpoint says of this pass; a later one only goes on with the samplers' states."""
        resume = self._resume
        if not resume:
            return {}
        here = resume["pass"] == [epoch, turn]
        if here or resume["pass"][0] != epoch:
            self._resume = {}
        seeds = resume.get("seeds", ())
        if len(seeds) == len(self._generators):
            self._generators = [(made, seed) for (made, _), seed in zip(self._generators, seeds, strict=True)]
        if here:
            return resume
        for holder, state in zip(self._stateful, resume.get("now", ()), strict=False):
            holder.load_state_dict(state)
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
        """Shares out neighbouring positions that begin with a global batch, or a window of a grouping."""
        grouping = self._grouping
        if grouping is None:
            cut: Cut | Recut | Rest = Cut(len(drawn), self.batch, self.size, self.drop_last)
        else:
            here = WindowPlan(grouping.ranks, grouping.accumulate)
            cut = here.cut(len(drawn), self.batch, self.size, self.drop_last)
        for number in range(cut.length):
            spans = [cut.span(number, rank) for rank in range(self.size)]
            if self.size_of_batch is None:
                parts = [drawn[first] if first < end else [] for first, end in spans]
            else:
                parts = [drawn[first:end] for first, end in spans]
            self._take(parts, self._position + spans[self.rank][0])
        self._position += len(drawn)

    def _take(self, parts: list[list[int]], position: int) -> None:
        mine = parts[self.rank]
        # batches of unknown size: positions far apart
        first = position << 20 if self.size_of_batch is None else position
        if not mine and self.borrow:
            mine = next(part for part in parts if part)[:1]
        if mine:
            self._mine.append((mine, first))
        self._weights[self._reached] = [len(part) for part in parts]
        self._reached += 1


class OwnShare(Schedule):
    """A schedule from a `DistributedSampler` of the user's, which has cut the data for this rank itself."""

    def __init__(self, drawn: Drawn, size: int) -> None:
        super().__init__(drawn.rank, size, key=drawn.key, borrow=False, quiet=drawn.quiet)
        self._drawn = drawn
        self.length = drawn.length
        self.batch = drawn.batch
        self.flexible = False  # this rank knows its own share only

    def begin(self, epoch: int, turn: int, start: int) -> None:
        self._drawn.stop = self.stop
        self._drawn.begin(epoch, turn, start)

    def has(self, number: int) -> bool:
        return self._drawn.has(number)

    def weights(self, number: int) -> Sequence[int]:
        return list(self._drawn.weights(number)) * self.size

    def planned(self, ranks: int) -> int | float:
        samples = self._drawn.planned(1) * self._drawn.batch * self.size
        return -(-samples // (self._drawn.batch * ranks))

    def group(self, grouping: WindowPlan) -> None:
        """Nothing is cut anew: the sampler's share is, by the user."""

    def place(self, number: int) -> int:
        return self._drawn.place(number) * self.size

    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        return self._drawn.draw(stop)

    def state_dict(self) -> dict[str, Any]:
        return {"order of rank": self._drawn.state_dict()["order"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn.load_state_dict({"order": state["order of rank"]} if "order of rank" in state else {})


def order_of(sampler: object, n: int, *, seed: int, key: int, torch_order: bool) -> Callable[[int, int], Order] | None:
    """The order, given (epoch, turn), that stands for one of torch's plain samplers; None for any other.

    Args:
        sampler: a loader's.
        n: length of the data set.
        seed: of the run.
        key: stands for (seed, loader).
        torch_order: shuffle by `torch.randperm` with a generator seeded by ``seed + epoch``.
    """
    if type(sampler) is SequentialSampler:
        return lambda epoch, turn: sequential
    if type(sampler) is not RandomSampler:
        return None
    if sampler.replacement:
        return lambda epoch, turn: WithReplacement(n, make_key(key, "replacement", epoch, turn))
    if torch_order:
        return (lambda epoch, turn: table(n, seed + epoch + turn)) if sampler.num_samples <= n else None
    return lambda epoch, turn: Shuffled(n, make_key(key, "shuffle", epoch, turn))


def length_of(sized: object) -> int | None:
    """``len()`` of something, or None where it has none."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def holders(sampler: object) -> list[object]:
    """A (batch) sampler and the sampler inside it, where there is one."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def own_generator(sampler: object) -> torch.Generator | None:
    """The CPU generator that a sampler was given by the user."""
    found = getattr(sampler, "generator", None)
    return found if isinstance(found, torch.Generator) and found.device.type == "cpu" else None


def call_set_epoch(target: object, epoch: int) -> None:
    """Tells a sampler or data set of the user's which epoch begins, if it wants to know."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
