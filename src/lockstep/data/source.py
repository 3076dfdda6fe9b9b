"""Sources: one loader as one rank draws from it, pass after pass; and several, side by side."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lockstep.data.combined import LENGTHS, end_workers, rows
from lockstep.data.cut import Cut
from lockstep.data.drawn_order import (
    DrawnOrder,
    WatchedSampler,
    generator_state,
    generators_of,
    of_all_ranks,
    set_generator_state,
    stateful,
    states_of,
)
from lockstep.data.measured import Measure
from lockstep.data.order import generator, make_key
from lockstep.data.randomness import SeededIndex, SeededIndices, capture, put_back
from lockstep.data.recut import WindowPlan
from lockstep.data.sampler import Schedule, call_set_epoch, holders, length_of
from lockstep.data.stream import Counting, DrawHistory, Shard, Sizes, WatchedInit, stream_length
from lockstep.data.workers import opened
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.seed import isolate_rng, random_states, set_random_states

# -- one loader ----------------------------------------------------------------------------------------------


SEED_BITS = (1 << 63) - 1  # of a seed that travels in an int64 tensor


@dataclass(frozen=True)
class SourceSpec:
    """What every source of a stage is made with."""

    rank: int
    size: int
    seed: int
    stage: str
    borrow: bool
    """Give a rank whose part of a micro-batch is empty a sample of another's part. Else no sample is drawn twice."""
    distribute: bool = True
    """Share the loaders out over the ranks; else each rank iterates what it was given."""
    torch_order: bool = False
    """Shuffle by torch's own permutation."""
    planned: int = 1
    """The number of ranks that the order of data was first drawn for."""
    gather: Callable[[Tensor], Tensor] | None = None
    """Every rank's tensor, stacked; None where there is but one rank."""

    def agreed(self, seed: int) -> int:
        """Rank 0's seed."""
        return seed if self.gather is None else int(self.gather(torch.tensor(seed & SEED_BITS))[0])


class Source(ABC):
    """One loader as one rank draws from it.

    Where ``ahead`` is true, the length and the weights of micro-batches are known before they are fetched, by
    ``has`` and ``weights``; else only :meth:`weighed` tells, batch by batch.
    """

    ahead: bool
    fixed: bool = False
    """``weights`` may be asked at any time and in any order, not only once and ascending."""
    length: int | float
    """Micro-batches of a pass on the rank that has most; infinite where it is not known."""
    even: int = 0
    """In at least so many leading micro-batches every rank draws ``batch`` samples."""
    rest: int = 0
    """Samples of a last batch that is not full, of loaders that are taken as they are."""
    batch: int = 1
    flexible: bool = False
    """Can be cut into windows of any size; else in whole batches only."""
    pads: bool = False
    """Gives a rank whose part of a micro-batch is empty a sample of another's part, so that all draw equally often."""
    rank: int
    mark: float = 0.0
    """Stands for the first sample of a stream before it was shared out: on all ranks alike, unless it is not one."""
    noted: deque[list[Any]] | None = None
    """What the data set was asked for, batch by batch, as far as it was not taken out again; see `note_indices`."""

    def note_indices(self) -> None:  # noqa: B027
        """From the next pass on keep in ``noted`` which samples are drawn; does nothing where nobody knows."""

    @abstractmethod
    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        """Begins a pass: this rank's micro-batches from ``start`` on; from ``stop`` on none is wanted.

        ``turn`` counts the passes within an epoch.
        """

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        """As :meth:`open`, with the number of samples drawn for each micro-batch."""
        batches = enumerate(self.open(epoch, turn, start, stop), start)
        return ((batch, float(self.weights(number)[self.rank])) for number, batch in batches)

    def has(self, number: int) -> bool:
        """Whether any rank has this micro-batch."""
        return number < self.length

    def weights(self, number: int) -> Sequence[float]:
        """Number of samples that each rank draws for a micro-batch."""
        raise NotImplementedError(f"{type(self).__name__} knows no weights ahead")

    def row(self, number: int) -> list[Sequence[float]]:
        """:meth:`weights` of each loader of which a micro-batch holds a part; asked in place of those."""
        return [self.weights(number)]

    def without(self, batch: Any, parts: Sequence[float]) -> Any:
        """A micro-batch with None for the parts that weigh nothing on this rank."""
        return batch

    def planned(self, ranks: int) -> int | float:
        """Micro-batches that a pass would have on another number of ranks."""
        return self.length

    def group(self, grouping: WindowPlan) -> None:  # noqa: B027
        """Cut the passes to come as another number of ranks has planned or begun them; before they are opened."""

    def place(self, number: int) -> Any:
        """What has been drawn before a micro-batch with which a window begins, for :meth:`group`, as plain data.

        None where the number of micro-batches is all that is known.
        """
        return None

    def generator_states(self) -> list[Any]:
        """The states of the user's generators and samplers that the order comes from, where nobody else keeps them."""
        return []

    def set_generator_states(self, states: list[Any]) -> None:  # noqa: B027
        """Puts back what :meth:`generator_states` gave."""

    def leaves(self) -> list[Source]:
        """The sources of single loaders that this one is made of."""
        return [self]

    def state_dict(self) -> dict[str, Any]:
        """What it takes, besides the position, to go on from here; empty if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """For the next pass that is opened."""

    def close(self) -> None:  # noqa: B027
        """Ends loader workers."""


class Indexed(Source):
    """A loader over a map-style data set, whose indices a schedule of ours deals out.

    The user's loader stays as it is: a shallow copy of it (its class, attributes, data set, workers'
    settings) gets another batch sampler and a generator of its own.
    """

    def __init__(
        self, loader: DataLoader[Any], schedule: Schedule, draft: SourceSpec, key: int, measure: Measure | None = None
    ) -> None:
        self.rank = draft.rank
        self._trains = draft.stage == "train"
        self._measure = measure  # of what the data set gives as a batch by itself
        self.ahead = measure is None
        self.fixed = schedule.fixed and self.ahead
        self.flexible = schedule.flexible
        self._schedule = schedule
        self.pads = schedule.borrow
        self._key = key
        self.length = schedule.length
        self.even = schedule.even
        self.batch = schedule.batch
        self._quiet = schedule.quiet
        self._own_process = loader.num_workers == 0
        self._stop: int | float = math.inf
        dealt = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._copy = copy_loader(loader, **{dealt: _Lists(self)})

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        self._schedule.stop = self._stop = stop
        self._schedule.begin(epoch, turn, start)
        self._copy.generator = generator(make_key(self._key, "workers", epoch, turn))
        if self.noted is not None:
            self.noted.clear()
        iterator = opened(self._copy)
        return apart(iterator) if self._own_process and not self._quiet else iterator

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        if not self._trains:
            weighed = super().weighed(epoch, turn, start, stop)
            return weighed if self._measure is None else self._measure.each(batch for batch, _ in weighed)
        return self._with_gaps(self.open(epoch, turn, start, stop), start, stop)

    def _with_gaps(self, batches: Iterator[Any], number: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        """One item for each micro-batch that any rank has: one that weighs 0.0 where this rank's part is empty."""
        while number < stop and self.has(number):
            weight = float(self.weights(number)[self.rank])
            batch = next(batches) if weight or self.pads else None
            yield batch, self._measure(batch) if weight and self._measure is not None else weight
            number += 1

    def note_indices(self) -> None:
        self.noted = deque()

    def planned(self, ranks: int) -> int | float:
        return self._schedule.planned(ranks)

    def group(self, grouping: WindowPlan) -> None:
        self._schedule.group(grouping)
        self.length, self.even = self._schedule.length, self._schedule.even

    def place(self, number: int) -> int:
        return self._schedule.place(number)

    def has(self, number: int) -> bool:
        return self._schedule.has(number)

    def weights(self, number: int) -> Sequence[float]:
        return self._schedule.weights(number)

    def state_dict(self) -> dict[str, Any]:
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state)

    def lists(self) -> Iterator[Any]:
        """What the copy's batch sampler yields in the pass that was opened last."""
        drawn = self._schedule.draw(self._stop)
        if self.noted is not None:
            drawn = _noting(drawn, self.noted)
        return drawn if self._quiet or not self._own_process else _seeding(drawn)

    def close(self) -> None:
        end_workers(self._copy)


def _noting(drawn: Iterable[Any], noted: deque[list[Any]]) -> Iterator[Any]:
    """Writes down what is drawn, before a loader (and its workers, ahead of time) gets it."""
    for indices in drawn:
        # a plain slice: walking over seeded indices would seed
        noted.append(indices[:] if isinstance(indices, list) else [_plain(indices)])
        yield indices


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, SeededIndex) else index


class _Noted:
    """The batch sampler of a loader that is taken as it stands, with its batches noted."""

    def __init__(self, batches: Any, noted: deque[list[Any]]) -> None:
        self._batches = batches
        self._noted = noted

    def __iter__(self) -> Iterator[Any]:
        self._noted.clear()  # another pass
        return _noting((list(indices) for indices in self._batches), self._noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)


def _seeding(drawn: Iterator[Any]) -> Iterator[Any]:
    """Seeds before each fetch in this process, for data sets that fetch a whole batch by themselves."""
    for indices in drawn:
        if isinstance(indices, SeededIndices | SeededIndex):
            indices.seed()
        yield indices


class _Lists:
    """The batch sampler of a source's loader: one for all passes, as persistent workers keep the first."""

    def __init__(self, source: Indexed) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source.lists()

    def __len__(self) -> int:
        return int(self._source.length)


class Stream(Source):
    """A loader over an iterable data set, shared out over ranks and workers; how: `Shard`."""

    ahead = False

    def __init__(self, loader: DataLoader[Any], draft: SourceSpec, key: int, measure: Measure) -> None:
        self.rank = draft.rank
        self._measure = measure  # of what the data set gives as a batch by itself
        self._key = key
        samples, batches = length_of(loader.dataset), loader.batch_sampler
        size = getattr(batches, "batch_size", None)
        self.batch = size or 1
        self._length_on = lambda ranks: (
            math.inf if samples is None else stream_length(samples, size, loader.drop_last, ranks, loader.num_workers)
        )
        self.length = self._length_on(draft.size)
        self._sizes = Sizes(draft.rank, draft.size, self.batch)
        self._workers = max(1, loader.num_workers)
        self._first = 0  # micro-batches of the pass that earlier lives of the run have drawn
        self._shard = Shard(loader.dataset, draft.rank, draft.size, key)
        self._counts = batches is not None
        self.flexible = self._counts and self.batch > 1
        self._own_process = loader.num_workers == 0
        changes: dict[str, Any] = {"dataset": self._shard, "_IterableDataset_len_called": None}
        if self._counts:
            changes["collate_fn"] = Counting(loader.collate_fn, self._shard)
        if loader.worker_init_fn is not None:
            changes["worker_init_fn"] = WatchedInit(loader.worker_init_fn)
        self._copy = copy_loader(loader, **changes)
        self._coming: tuple[int, int] | None = None  # pass that persistent workers expect
        self._pass = [0, 0]
        self._resume: dict[str, Any] = {}
        self._name = measure.name
        self._first_sample: list[Any] = []  # pass, ranks, workers, and what stands for its first sample
        self._was_first: list[Any] = []  # the same of the checkpoint

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        return (batch for batch, _ in self.weighed(epoch, turn, start, stop))

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        goes_on = self._go_back(epoch, turn)
        self._begin(epoch, turn)
        iterator = opened(self._copy)
        if self._own_process:
            iterator = apart(iterator)
        if self._counts and not goes_on and not self._shard.lives:
            iterator = self._compared(iterator, [epoch, turn, self._sizes.size, self._workers])
        if not goes_on:
            iterator = skipped(iterator, start - self._first)
        if not self._counts:
            return self._measure.each(iterator)
        return self._marked(iterator)

    def _begin(self, epoch: int, turn: int) -> None:
        if self._coming != (epoch, turn):
            end_workers(self._copy)  # they count epochs by themselves, and would be wrong
        self._coming, self._pass = (epoch + 1, turn), [epoch, turn]
        self._shard.set_epoch(epoch, turn)
        self._copy.generator = generator(make_key(self._key, "workers", epoch, turn))

    def _go_back(self, epoch: int, turn: int) -> bool:
        """Puts the data set where a checkpoint left it; whether the pass goes on there.

        One of an epoch's end is of a pass that is over: it is opened once more, and what comes next begins anew.
        """
        state, self._resume = self._resume, {}
        if not state:
            return False
        if "loader" in state:
            self._copy.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        else:
            self._shard.load_state_dict(state["stream"])
        old = state.get("pass", [epoch, turn])  # versions before did not tell
        if old == [epoch, turn]:
            return True
        random = capture()
        self._begin(*old)
        next(opened(self._copy), None)
        self._coming = None
        put_back(random)
        return False

    def _compared(self, iterator: Iterator[Any], reading: list[int]) -> Iterator[Any]:
        """Notes the first sample, and says so where a resumed pass is read again and begins with another one."""
        self._first_sample = []
        for batch in itertools.islice(iterator, 1):
            self._first_sample = [*reading, batch[1]]
            was, self._was_first = self._was_first, []
            if was[:4] == reading and was[4] and batch[1] and was[4] != batch[1]:
                rank_zero_warn(
                    f"{self._name}: the run was resumed in the middle of an epoch, for which the "
                    f"{type(self._shard.dataset).__name__} is read again from its beginning, and it does not begin "
                    "with the sample that it began with before: of this epoch's samples some may be seen twice and "
                    "some never. Seed what it draws by `set_epoch(epoch)`, or give it `state_dict` and "
                    "`load_state_dict`."
                )
            yield batch
        yield from iterator

    def _marked(self, iterator: Iterator[Any]) -> Iterator[tuple[Any, float]]:
        for count, mark, batch in iterator:
            self.mark = mark
            yield batch, float(count)

    def planned(self, ranks: int) -> int | float:
        return self._length_on(ranks)

    def group(self, grouping: WindowPlan) -> None:
        lives = [DrawHistory(*life) for life in grouping.place] if isinstance(grouping.place, list) else []
        changes = self.flexible and self._sizes.group(grouping)
        if changes:
            self._copy = copy_loader(self._copy, batch_sampler=self._sizes)
        if changes or lives != self._shard.lives:
            self.close()  # persistent workers have copies
            self._coming = None
        self._shard.lives, self._first = lives, grouping.number if lives else 0

    def place(self, number: int) -> list[list[Any]]:
        taken = self._sizes.taken(number - self._first, self._workers)
        here = DrawHistory(self._sizes.size, self._workers, taken)
        return [[life.ranks, life.workers, life.taken] for life in [*self._shard.lives, here]]

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self._copy, "state_dict"):
            return {"loader": self._copy.state_dict(), "pass": self._pass}
        if self._own_process and hasattr(self._shard.dataset, "state_dict"):
            return {"stream": self._shard.state_dict(), "pass": self._pass}
        return {"first": self._first_sample} if self._first_sample else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._was_first = state.get("first", [])
        self._resume = state if "loader" in state or "stream" in state else {}

    def close(self) -> None:
        end_workers(self._copy)


class Untouched(Source):
    """An iterable that is taken as it stands, with the process' own random numbers.

    Its state holds the random states at the beginning of the pass, so that a resumed run draws the same
    order, those of a sampler's own generators included; and the loader's own state, if it has one, instead of
    reading again. What a sampler of the user's draws is hashed: another order after a resume is refused.

    Args:
        loader: any iterable.
        cut: tells how many samples are in this rank's batches, in its terms a single rank's; without it ``measure``
            does, and they are known only when they are there.
        draft: rank, seed and the like.
        measure: tells the size of a batch.
    """

    def __init__(self, loader: Any, cut: Cut | None, draft: SourceSpec, measure: Measure) -> None:
        self._measure = measure
        self.rank = draft.rank
        self._loader = loader
        self._cut = cut
        self._size = draft.size
        self._states: dict[str, Any] | None = None
        self._resume: dict[str, Any] = {}
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        length = length_of(loader)
        self.length = math.inf if length is None else length
        # A plain loader over a map-style data set keeps to its length; what others say of theirs is not built
        # on.
        plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        indexed = plain and not isinstance(loader.dataset, IterableDataset)
        self._indexed = indexed
        self._generators: list[Any] = []
        self._samplers: list[Any] = []  # those that can save where they are
        self._own_states: list[Any] = []  # of these generators and samplers, at the beginning of the pass
        self._watched: WatchedSampler | None = None
        if indexed and not self._stateful:
            self._watch_order(loader, measure.name)
        if not indexed:
            cut = self._cut = None
        self.ahead = self.fixed = cut is not None
        if cut is not None:
            self.even, self.batch, self.rest = cut.full, cut.batch, cut.rest

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        resume, self._resume = self._resume, {}
        announce_epoch(self._loader, epoch)
        self._pass = [epoch, turn]
        if "loader" in resume:
            self._loader.load_state_dict(resume["loader"])
            iterator = opened(self._loader)
            if resume.get("pass", self._pass) == self._pass:
                return iterator
            next(iterator, None)  # the checkpoint is of the end of a pass, which is over with this
        if "random" not in resume or start == 0:
            self._states = random_states(include_cuda=False)
            self._own_states = self.generator_states()
            return skipped(opened(self._loader), start)
        self._states, self._own_states = resume["random"], resume.get("own", [])
        self.set_generator_states(self._own_states)
        if self._watched is not None:
            self._watched.resume = resume.get("drawn", [])
        with isolate_rng(include_cuda=False):
            set_random_states(self._states)
            return skipped(opened(self._loader), start)

    def generator_states(self) -> list[Any]:
        return [*map(generator_state, self._generators), *states_of(self._samplers)]

    def set_generator_states(self, states: list[Any]) -> None:
        for made, state in zip(self._generators, states, strict=False):
            set_generator_state(made, state)
        for sampler, state in zip(self._samplers, states[len(self._generators) :], strict=False):
            sampler.load_state_dict(state)

    def _watch_order(self, loader: DataLoader[Any], name: str) -> None:
        """Notes the generators that the order comes from, and hashes it where it comes from a sampler of the user's."""
        dealt = "sampler" if loader.batch_sampler is None else "batch_sampler"
        found = [holder for sampler in (loader.sampler, loader.batch_sampler) for holder in holders(sampler)]
        held = {id(made): made for holder in (*found, loader) for made in generators_of(holder)}
        self._generators = list(held.values())
        if any(type(holder) not in (RandomSampler, SequentialSampler, BatchSampler, NoneType) for holder in found):
            named = next(holder for holder in found[::-1] if type(holder) is not BatchSampler)
            self._watched = WatchedSampler(getattr(loader, dealt), DrawnOrder(named, name))
            self._loader = copy_loader(loader, **{dealt: self._watched})
            self._samplers = stateful({id(holder): holder for holder in found}.values())

    def weights(self, number: int) -> Sequence[float]:
        assert self._cut is not None, "the weights of ready-made batches were asked for ahead"
        return self._cut.weights(number) * self._size  # the ranks' are alike, or they are fetched first

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        if self._cut is None:
            return self._measure.each(self.open(epoch, turn, start, stop))
        return super().weighed(epoch, turn, start, stop)

    def place(self, number: int) -> int | None:
        return None if self._cut is None or self._size > 1 else min(self._cut.n, number * self.batch)

    def note_indices(self) -> None:
        batches = getattr(self._loader, "batch_sampler", None)
        if isinstance(self._loader, DataLoader) and batches is not None and self._indexed:
            self.noted = deque()
            self._loader = copy_loader(self._loader, batch_sampler=_Noted(batches, self.noted))

    def state_dict(self) -> dict[str, Any]:
        if self._stateful:
            return {"loader": self._loader.state_dict(), "pass": self._pass}
        if self._states is None:
            return {}
        drawn = {} if self._watched is None else {"drawn": self._watched.order.saved()}
        return {"random": self._states, "own": self._own_states, **drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state

    def close(self) -> None:
        end_workers(self._loader)


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A shallow copy of a loader, of its own class and with all its attributes, some of them changed.

    Making a new one would need the arguments of a subclass' ``__init__``. The attributes are written past
    `DataLoader.__setattr__`, which keeps users from changing a loader that is in use.
    """
    made: DataLoader[Any] = object.__new__(type(loader))
    # Weights are matched with batches by their order; the user's loader keeps its own workers.
    made.__dict__.update(loader.__dict__, _iterator=None, in_order=True, **changes)
    return made


def apart(iterator: Iterator[Any]) -> Iterator[Any]:
    """Fetches with the random states of training put back after each fetch."""
    while True:
        states = capture()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            put_back(states)
        yield batch


def skipped(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator after ``count`` batches have been read and thrown away."""
    for _ in itertools.islice(iterator, count):
        pass
    return iterator


def announce_epoch(loader: Any, epoch: int) -> None:
    """Calls ``set_epoch`` on whatever of a loader has it."""
    for attribute in ("sampler", "batch_sampler"):
        for holder in holders(getattr(loader, attribute, None)):
            call_set_epoch(holder, epoch)


# -- several loaders -----------------------------------------------------------------------------------------


class RowWeight(float):
    """The weight of a micro-batch of several loaders: that of its heaviest part.

    Attributes:
        parts: the weight of each part.
    """

    parts: tuple[float, ...]

    @classmethod
    def of(cls, parts: Iterable[float]) -> RowWeight:
        """The weight of these parts."""
        known = tuple(parts)
        made = cls(max(known))
        made.parts = known
        return made


class Mixed(Source):
    """Several sources in one of the modes of `CombinedLoader` but ``"sequential"``.

    A micro-batch weighs what the heaviest of its parts weighs. A part that a rank has no samples of is None there.

    Args:
        parts: the sources.
        spec: the nest that their batches come in.
        mode: ``"min_size"``, ``"max_size"`` or ``"max_size_cycle"``.
        limits: at most so many micro-batches of each part's pass.
    """

    def __init__(
        self, parts: list[Source], spec: TreeSpec, mode: str, limits: Sequence[int | float] | None = None
    ) -> None:
        self._parts = parts
        self._spec = self.nest = spec
        self._mode = mode
        self._limits = limits or [math.inf] * len(parts)
        self.rank = parts[0].rank
        self.pads = True  # its parts do, each by itself
        self._measure()
        self.fixed = all(part.fixed for part in parts)
        self.flexible = all(part.flexible for part in parts)
        # A sampler of the user's that begins anew is ahead of the loader, and its passes overlap.
        self.ahead = self.fixed or (mode != "max_size_cycle" and all(part.ahead for part in parts))
        self.batch = max(part.batch for part in parts)
        # Resume by reading again: the order of some depends on the process' random numbers, or where a later pass
        # begins shows on reading only.
        self._rereads = any(isinstance(part, Untouched) for part in parts) or (
            mode == "max_size_cycle" and any(map(math.isinf, self._lengths))
        )
        self._states: dict[str, Any] | None = None  # random states at the beginning of the pass
        self._own_states: list[Any] = []  # those of generators that loaders hold
        self._resume: dict[str, Any] | None = None

    def _measure(self) -> None:
        parts = self._parts
        self._lengths = [min(part.length, limit) for part, limit in zip(parts, self._limits, strict=True)]
        self.length = LENGTHS[self._mode](self._lengths)
        self.even = int(min(map(min, [part.even for part in parts], self._lengths)))

    def planned(self, ranks: int) -> int | float:
        lengths = [part.planned(ranks) for part in self._parts]
        return LENGTHS[self._mode](map(min, lengths, self._limits))

    def group(self, grouping: WindowPlan) -> None:
        for part in self._parts:  # which go on by the number of micro-batches
            part.group(replace(grouping, number=0, place=None))
        self._measure()

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        walk = self._rows([part.open for part in self._parts], epoch, start, stop)
        return (tree_unflatten(row, self._spec) for row in walk)

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        walk = self._rows([part.weighed for part in self._parts], epoch, start, stop)
        return map(self._weighed_row, walk)

    def _weighed_row(self, row: list[Any]) -> tuple[Any, float]:
        weight = RowWeight.of(0.0 if item is None else item[1] for item in row)
        self.mark = sum(part.mark for part in self._parts) % 2**52
        some = bool(weight)  # else it is a padding batch, or nobody's
        kept = [None if item is None or (some and not item[1]) else item[0] for item in row]
        return tree_unflatten(kept, self._spec), weight

    def has(self, number: int) -> bool:
        if self._mode == "max_size_cycle":
            return number < self.length
        parts = zip(self._parts, self._lengths, strict=True)
        some = all if self._mode == "min_size" else any
        return some(number < length and part.has(number) for part, length in parts)

    def weights(self, number: int) -> Sequence[float]:
        return [max(weights) for weights in zip(*self.row(number), strict=True)]

    def row(self, number: int) -> list[Sequence[float]]:
        found: list[Sequence[float] | None] = []
        for part, length in zip(self._parts, self._lengths, strict=True):
            local = number % int(length) if self._mode == "max_size_cycle" else number
            found.append(part.weights(local) if local < length and part.has(local) else None)
        size = max(len(weights) for weights in found if weights is not None)
        return [[0.0] * size if weights is None else weights for weights in found]

    def without(self, batch: Any, parts: Sequence[float]) -> Any:
        leaves = self._spec.flatten_up_to(batch)
        return tree_unflatten([leaf if part else None for leaf, part in zip(leaves, parts, strict=True)], self._spec)

    def leaves(self) -> list[Source]:
        return [leaf for part in self._parts for leaf in part.leaves()]

    def state_dict(self) -> dict[str, Any]:
        states = [part.state_dict() for part in self._parts]
        if self._rereads or self._mode == "max_size_cycle":
            states = list(map(of_all_ranks, states))  # other states do not tell how often their loader has begun anew
        found: dict[str, Any] = {"parts": states} if any(states) else {}
        if self._rereads and self._states is not None:
            found |= {"random": self._states, "own": self._own_states}
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state if "random" in state else None
        for part, of_part in zip(self._parts, state.get("parts", []), strict=False):
            part.load_state_dict(of_part)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _rows(
        self, open_part: Sequence[Callable[..., Iterator[Any]]], epoch: int, start: int, stop: int | float
    ) -> Iterator[list[Any]]:
        """The parts' batches side by side, from row ``start`` on."""
        cycles = self._mode == "max_size_cycle"
        begin = 0 if self._rereads else start
        places = [divmod(begin, int(length)) if cycles and begin else (0, begin) for length in self._lengths]

        def opener(number: int) -> Callable[[int], Iterator[Any]]:
            first_turn, first_start = places[number]
            limit = min(self._limits[number], stop)

            def open_pass(turn: int) -> Iterator[Any]:
                at = first_start if turn == first_turn else 0
                opened = open_part[number](epoch, turn, at, limit)
                return opened if math.isinf(limit) else itertools.islice(opened, max(0, int(limit) - at))

            return open_pass

        openers = [opener(number) for number in range(len(self._parts))]
        walk = rows(openers, self._mode, [turn for turn, _ in places])
        resume, self._resume = self._resume, None
        if not self._rereads:
            return walk
        if resume is None or start == 0:
            self._states = random_states(include_cuda=False)
            self._own_states = [part.generator_states() for part in self._parts]
            return skipped(walk, start)
        self._states, self._own_states = resume["random"], resume.get("own", [])
        for part, states in zip(self._parts, self._own_states, strict=False):
            part.set_generator_states(states)
        with isolate_rng(include_cuda=False):
            set_random_states(resume["random"])
            return skipped(walk, start)
