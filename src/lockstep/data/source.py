"""Sources: objects that read one rank's share of the batches of a loader.

This file has the base class, and the source of loaders over map-style data sets whose order is a function.

In `data/` a *rank* is one of the ranks that see different samples: see `Replicas`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lockstep.data.counting import IN_ORDER, LoaderOrder
from lockstep.data.order import Order, generator, make_key, sequential
from lockstep.data.partition import Partition, Position, WindowPlan
from lockstep.data.passes import check_option, check_samples
from lockstep.data.randomness import SeededIndex, SeededIndices, capture, draws_nothing, put_back
from lockstep.data.workers import IndexRecorder, end_workers, opened
from lockstep.ground.comm import all_gather_tensor, as_bytes, rank, world_size
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info
from lockstep.ground.tree import tree_leaves

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Function that returns every rank's tensor (same shape and dtype), stacked along a new first dimension."""

Reshare: TypeAlias = tuple[int, tuple[float, ...]]
"""The first micro-batch of a window, and the ranks' shares that start to apply with it; () means equal shares."""

SEED_BITS = (1 << 63) - 1  # bits of a seed that fit into an int64 tensor
OTHER_BATCH = (
    "{name} yields different samples on ranks {rank} and {other}, but these ranks share one replica of the model and "
    "must see the same samples. Return a DataLoader, remove Trainer(use_distributed_sampler=False), and seed random "
    "samples (`seed_everything(1)`), because each rank runs the script."
)
NOT_DRAWN = (
    "{name} is a {kind}, and its `__iter__` yielded a batch without drawing from the loader's sampler, so lockstep "
    "cannot split it among {size} ranks, and each would see all its samples. Draw from `super().__iter__()` in "
    "`__iter__`; or give each rank a loader with its own samples and set Trainer(use_distributed_sampler=False)."
)
NOT_DRAWN_AGAIN = (
    "{name} is a {kind}, and its `__iter__` yielded a batch without drawing from the loader's sampler, so lockstep "
    "cannot resume within this epoch, which requires skipping samples that were already seen. Draw from "
    "`super().__iter__()` in `__iter__`; or resume from a checkpoint of an epoch's end."
)
_BLOCK = 8192  # positions whose indices are computed at once: 1 ms, 64 KiB


# -- inputs of all sources -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replicas:
    """Number of model replicas, which read different samples, and the index of this rank's replica.

    Ranks that share a model by tensor or pipeline parallelism are one replica: they draw the same batches. If no
    strategy splits the model, each rank is a replica.
    """

    index: int = 0
    """Index of this rank's replica."""
    count: int = 1
    gather: Gather | None = None
    """Function that stacks the tensors of all replicas by index, each from one of the replica's ranks; a collective.
    None: gather over the default process group, in which each rank is a replica."""
    gather_members: Gather | None = None
    """Function that stacks the tensors of this replica's ranks; a collective. None: the replica has one rank."""

    def agreed_gather(self) -> Gather | None:
        """Return the function that gathers over the replicas; None if no values need to be gathered.

        This is the case with one replica if no function was given.
        """
        if self.gather is not None or self.count == 1:
            return self.gather
        if world_size() != self.count:
            raise ValueError(
                f"Replicas(count={self.count}) does not equal the number of ranks, {world_size()}: pass `gather`, a "
                "function that gathers from one rank of each replica."
            )
        return all_gather_tensor


def _compared(batches: Iterator[Any], gather: Gather, name: str) -> Iterator[Any]:
    """Yield the batches of a pass. Raise an error if the ranks of a replica have different first batches."""
    for first in batches:
        found = gather(torch.tensor([rank(), _digest(first)])).tolist()
        for other, digest in found:
            if digest != found[0][1]:
                raise MisconfigurationException(OTHER_BATCH.format(name=name, other=other, rank=found[0][0]))
        yield first
        del first  # else it would stay in memory for the whole pass
        break
    yield from batches


def _digest(batch: object) -> int:
    """Return a 32-bit checksum of a batch: of its tensors, arrays, strings and integers."""
    found = 0
    for leaf in tree_leaves(batch, (Tensor, np.ndarray, np.generic, str, bytes, int)):
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.device.type == "meta"):
            continue  # no bytes that could be compared
        whole = leaf.detach().cpu().contiguous() if isinstance(leaf, Tensor) else leaf
        # The same bytes in another dtype or shape are another batch.
        found = zlib.crc32(f"{whole.dtype}{list(whole.shape)}".encode() if hasattr(whole, "dtype") else b"", found)
        if isinstance(whole, Tensor):
            found = zlib.crc32(as_bytes(whole).numpy().data, found)
        else:
            found = zlib.crc32(whole.tobytes() if hasattr(whole, "tobytes") else repr(whole).encode(), found)
    return found


@dataclass(frozen=True)
class SourceSpec:
    """Settings that all sources of a stage share."""

    rank: int
    """Index of this rank's replica."""
    size: int
    """Number of replicas."""
    seed: int
    stage: str
    pads: bool = False
    """Draw a padding batch (a sample of another rank) where a rank's part of a micro-batch is empty. If False, no
    sample is drawn twice."""
    distribute: bool = True
    """Split the samples of each loader among the ranks; if False, each rank iterates its own loader unchanged."""
    torch_order: bool = False
    """Shuffle by torch's own permutation; see ``by_process``."""
    planned: int = 1
    """The number of ranks for which the order of data was planned."""
    gather: Gather | None = None
    """Stacks every rank's tensor; None if there is only one rank."""
    shares: tuple[float, ...] = ()
    """A number for each rank, to which its part of a global batch is proportional; empty: equal parts."""
    reshared: bool = False
    """The shares change while an epoch runs."""
    gather_members: Gather | None = None
    """Stacks the tensors of the ranks of this replica; None if it has only one."""
    gaps: bool = False
    """Also in evaluation, yield an item without weight where a rank's part of a micro-batch is empty, so that parallel
    loaders end and restart at the same batch on all ranks. Training always does."""

    @property
    def by_process(self) -> bool:
        """True if one process draws the order with its global random generators, as torch does for a plain loader."""
        return self.torch_order and self.size == self.planned == 1 and self.gather is None

    def compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches of a pass. When the first batch is drawn, compare it between the ranks of this replica.

        Raises:
            MisconfigurationException: the ranks' first batches differ.
        """
        gather = self.gather_members
        return batches if gather is None else _compared(batches, gather, f"{self.stage}_dataloader")

    def agreed(self, seed: int) -> int:
        """Return the value of ``seed`` on rank 0. Collective."""
        return seed if self.gather is None else int(self.gather(torch.tensor(seed & SEED_BITS))[0])


class LoaderSource(ABC):
    """Base class of sources, which read one rank's share of the batches of a loader.

    If ``ahead`` is true, ``has`` and ``weights`` know the length and the weights of micro-batches before they are
    fetched; otherwise only :meth:`weighed` yields them, batch by batch.
    """

    ahead: bool
    fixed: bool = False
    """``weights`` may be called at any time and in any order, not only once and in ascending order."""
    length: int | float
    """Number of micro-batches in a pass, on the rank with most; infinite if unknown."""
    even: int = 0
    """Number of leading micro-batches in which each rank draws as many samples as in the first, and at least one."""
    samples: int = -1
    """Number of positions in a pass, over all ranks: a sampler's elements or a stream's samples; -1 if unknown."""
    rest: int = 0
    """Number of samples in a partial last batch, for loaders that are used unchanged."""
    batch: int = 1
    """Number of samples that a rank draws for a full micro-batch; with unequal shares, the mean over the ranks."""
    own: bool = False
    """True if each rank has its own data, of any length; False if the ranks share one data set."""
    flexible: bool = False
    """True if an epoch can be divided into windows of any size; False if only into whole batches."""
    pads: bool = False
    """True if a rank draws a padding batch where its part is empty, so that all ranks draw equally often."""
    divisible: bool = False
    """True if a global batch can be divided into parts of any size; False if only into whole batches."""
    uneven: bool = False
    """True if the ranks draw unequal parts of a full global batch."""
    reshares: bool = False
    """True if :meth:`reshare` can change the shares within a pass; False if they change only between passes."""
    drawn: int = 0
    """Number of micro-batches of the pass that were drawn, including prefetched ones; valid only if ``reshares``."""
    rank: int
    recorded: deque[list[Any]] | None = None
    """Queue of the sample indices of drawn batches, from which the reader removes them; see `record_indices`."""

    def record_indices(self) -> None:  # noqa: B027
        """Record the sample indices of drawn batches in ``recorded`` from the next pass on, if they are known."""

    @abstractmethod
    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        """Start a pass and return this rank's micro-batches, beginning with number ``start``.

        Micro-batches from ``stop`` on are not needed. ``turn`` counts the passes within an epoch.
        """

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        """Start a pass as :meth:`open` does. Return an iterator over (micro-batch, number of its samples)."""
        batches = enumerate(self.open(epoch, turn, start, stop), start)
        return ((batch, float(self.weights(number)[self.rank])) for number, batch in batches)

    def has(self, number: int) -> bool:
        """Return True if micro-batch ``number`` exists on any rank."""
        return number < self.length

    def weights(self, number: int) -> Sequence[float]:
        """Return, for each rank, the number of samples that it draws for a micro-batch; 0 for a padding batch."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot compute the weights of a micro-batch before the micro-batch is fetched"
        )

    def even_until(self, number: int) -> int:
        """Return the index of the next micro-batch whose weights may differ from those of micro-batch ``number``."""
        return self.even

    def use_shares(self, shares: Sequence[Reshare]) -> None:  # noqa: B027
        """Set the ranks' shares of a global batch for later passes, as pairs (micro-batch, shares from then on)."""

    def reshare(self, shares: Reshare) -> None:
        """Set new shares of a global batch within the current pass, from a micro-batch that no rank has drawn yet."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot change the ranks' shares of a global batch within a pass"
        )

    def row(self, number: int) -> list[Sequence[float]]:
        """Return the ranks' weights (numbers of samples) in a micro-batch: one list for each combined loader.

        Call either this method or :meth:`weights` for a micro-batch.
        """
        return [self.weights(number)]

    def without(self, batch: object, parts: Sequence[float]) -> Any:
        """Return a micro-batch with None in place of the parts from loaders that have no samples for this rank."""
        return batch

    def planned(self, ranks: int) -> int | float:
        """Return the number of micro-batches in a pass if the loader is divided among ``ranks`` ranks."""
        return self.length

    def repartition(self, plan: WindowPlan) -> None:  # noqa: B027
        """Divide the passes that are opened after this call by ``plan``, which is for a different number of ranks."""

    def samples_of(self, number: int) -> tuple[list[int], int] | None:
        """Return (data set indices, first position) of this rank's part of a micro-batch; None if unknown."""
        return None

    def position(self, number: int) -> Position:
        """Return the position that all ranks together reach before micro-batch ``number``, the first of a window."""
        return None

    def generator_states(self) -> list[Any]:
        """Return the states of the user's generators and samplers for a checkpoint; empty if the source needs none."""
        return []

    def set_generator_states(self, states: list[Any]) -> None:  # noqa: B027
        """Restore the states of :meth:`generator_states`."""

    @property
    def workers(self) -> int | None:
        """Number of loader workers per rank that read a stream split among the ranks; None without such a stream."""
        return None

    def order(self) -> LoaderOrder:
        """Describe the order of the samples. A checkpoint within an epoch stores the description."""
        return LoaderOrder("in an order of its own", self.samples)

    def leaves(self) -> list[LoaderSource]:
        """Return the sources of the single loaders that this source combines; ``[self]`` for a single loader."""
        return [self]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, other than the position, from which a pass can resume; an empty dict if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Load a state for the next pass that is opened."""

    def close(self) -> None:  # noqa: B027
        """End the loader workers."""


# -- loaders over map-style data sets ------------------------------------------------------------------------


class Sampling(NamedTuple):
    """A loader over a map-style data set, with the settings by which it draws samples."""

    loader: DataLoader[Any]
    spec: SourceSpec
    key: int
    """64-bit hash of (seed, loader)."""
    name: str
    """Name of the loader in messages."""
    sampler: Iterable[Any]
    """Yields indices; if ``batch_size`` is None, whole batches (a batch sampler)."""
    batch_size: int | None
    drop_last: bool
    single: bool
    """Each index stands for a whole batch (a loader with ``batch_size=None``)."""

    @classmethod
    def of(cls, loader: DataLoader[Any], spec: SourceSpec, key: int, name: str) -> Sampling:
        """Read from a loader the settings by which it draws samples."""
        batches: Iterable[Any] | None = loader.batch_sampler
        if batches is None and isinstance(loader.sampler, BatchSampler):
            batches = loader.sampler  # batch_size=None: the data set receives a list of indices
        if batches is None:
            return cls(loader, spec, key, name, loader.sampler, 1, False, True)
        if type(batches) is BatchSampler:
            return cls(loader, spec, key, name, batches.sampler, batches.batch_size, batches.drop_last, False)
        return cls(loader, spec, key, name, batches, None, False, False)

    def order(self, samples: int) -> LoaderOrder:
        """Describe the order in which the sampler yields ``samples`` positions. A checkpoint stores the description."""
        kind = type(self.sampler)
        if kind is SequentialSampler:
            return LoaderOrder(IN_ORDER, samples)
        if not isinstance(self.sampler, RandomSampler) or kind is not RandomSampler:
            return LoaderOrder(f"drawn by {kind.__name__}", samples)
        if self.sampler.replacement:
            return LoaderOrder("drawn with replacement", samples)
        return LoaderOrder("shuffled as torch does" if self.spec.torch_order else "shuffled", samples)


class Indexed(LoaderSource):
    """Base class of sources that choose the data set indices that a loader fetches.

    The user's loader is not changed: a shallow copy of it (its class, attributes, data set, workers' settings) gets
    another batch sampler and its own generator.

    Subclasses choose the indices: :meth:`begin` is called once for each pass, then :meth:`draw` is iterated (possibly
    ahead of training, to keep loader workers busy); the feed calls ``has`` and ``weights`` in ascending order.
    """

    flexible = True

    def __init__(self, sampling: Sampling) -> None:
        loader, spec = sampling.loader, sampling.spec
        self.rank = spec.rank
        self.pads = spec.pads
        self.batch = sampling.batch_size or 1
        self._gaps = spec.gaps or spec.stage == "train"
        # measures what the data set returns as a batch by itself
        self._measure = Measure(sampling.name, spec.stage) if sampling.single else None
        self.ahead = self._measure is None
        self.divisible = sampling.batch_size is not None and not sampling.single
        self.uneven = bool(spec.shares) or spec.reshared
        self.reshares = spec.reshared
        self._sampling = sampling
        self._key = sampling.key
        self._epoch_key = 0
        self._quiet = draws_nothing(loader.dataset, loader.collate_fn)  # if True, indices need not seed anything
        self._own_process = loader.num_workers == 0
        self._plan: WindowPlan | None = None
        self._stop: int | float = math.inf
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._copy = copy_loader(loader, **{replaced: _Lists(self)})
        # the first batch shows whether the class' own `__iter__` draws from it
        self._sampler_used = type(loader).__iter__ is DataLoader.__iter__

    @abstractmethod
    def begin(self, epoch: int, turn: int, start: int) -> None:
        """Prepare a pass that starts at micro-batch ``start``."""

    @abstractmethod
    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        """Return this rank's indices for each micro-batch, from the start of the pass to ``stop``."""

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        planned = self._sampling
        now = Sampling.of(planned.loader, planned.spec, planned.key, planned.name)
        # torch refuses to set these on a loader in use, but not on its batch sampler.
        for option in ("batch_size", "drop_last"):
            check_option(planned.name, option, getattr(planned, option), getattr(now, option))
        self._stop = stop
        self._epoch_key = make_key(self._key, "draw", epoch, turn)
        self.begin(epoch, turn, start)
        # torch draws the seeds of workers from it; they must not depend on what training has drawn.
        self._copy.generator = generator(make_key(self._key, "workers", epoch, turn))
        if self.recorded is not None:
            self.recorded.clear()
        iterator = opened(self._copy) if self._sampler_used else self._checked(opened(self._copy), start)
        return unmixed(iterator) if self._own_process and not self._quiet else iterator

    def _checked(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        """Yield the batches of a loader that has its own ``__iter__``. Check that the loader uses lockstep's sampler.

        With one replica, a pass that starts at its first micro-batch is not checked.

        Raises:
            MisconfigurationException: the first batch was yielded without drawing from the sampler.
        """
        for batch in itertools.islice(batches, 1):
            size = self._sampling.spec.size
            if not self._sampler_used and (size > 1 or start):
                text, kind = NOT_DRAWN if size > 1 else NOT_DRAWN_AGAIN, type(self._copy).__name__
                raise MisconfigurationException(text.format(name=self._sampling.name, kind=kind, size=size))
            yield batch
            del batch
        yield from batches

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        if not self._gaps:
            weighed = super().weighed(epoch, turn, start, stop)
            return weighed if self._measure is None else self._measure.each(batch for batch, _ in weighed)
        return self._with_gaps(self.open(epoch, turn, start, stop), start, stop)

    def _with_gaps(self, batches: Iterator[Any], number: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        """Yield (batch, weight) for each micro-batch; the weight is 0.0 where only other ranks have samples."""
        while number < stop and self.has(number):
            weight = float(self.weights(number)[self.rank])
            batch = next(batches) if weight or self.pads else None
            yield batch, self._measure(batch) if weight and self._measure is not None else weight
            number += 1

    def record_indices(self) -> None:
        self.recorded = deque()

    def lists(self) -> Iterator[Any]:
        """Return an iterator over the current pass that yields this rank's indices for each micro-batch.

        The batch sampler of the loader's copy yields them.
        """
        self._sampler_used = True
        drawn = self.draw(self._stop)
        if self.recorded is not None:
            drawn = recording(drawn, self.recorded)
        if not self._own_process:
            # If a worker dies, the error names the samples that it had to fetch.
            return IndexRecorder(drawn, self._copy.num_workers)
        return drawn if self._quiet else _seeding(drawn)

    def close(self) -> None:
        end_workers(self._copy)

    def _seeds(self, indices: list[int], first: int) -> list[int] | int:
        """Return a micro-batch's indices in the loader's form, wrapped to seed the random generators if necessary.

        ``first`` is the position of the first index.
        """
        if not self._sampling.single:
            return indices if self._quiet else SeededIndices(indices, self._epoch_key, first)
        index = indices[0]  # any element of a sampler goes to the data set; only integers can seed
        return index if self._quiet or not isinstance(index, int) else SeededIndex.make(index, self._epoch_key, first)


class Ordered(Indexed):
    """Source that computes the sample order from the position, so that a pass can start anywhere at no cost.

    It stores no order and sends no messages.

    Args:
        sampling: the loader and its sampling settings.
        order: ``order(epoch, turn)`` returns the order of a pass.
    """

    def __init__(self, sampling: Sampling, order: Callable[[int, int], Order]) -> None:
        super().__init__(sampling)
        self.fixed = self.ahead
        count, spec = length_of(sampling.sampler) or 0, sampling.spec
        self.samples = count
        self._whole = Partition(count, self.batch, spec.size, sampling.drop_last, weights=spec.shares)
        self._use(self._whole)
        self._order_of = order
        self._among = _drawn_from(sampling.sampler)
        self._order: Order = sequential
        self._start = 0

    def order(self) -> LoaderOrder:
        return self._sampling.order(self.samples)

    def planned(self, ranks: int) -> int:
        return dataclasses.replace(self._whole, size=ranks, weights=()).length

    def _use(self, partition: Partition) -> None:
        self._partition, self.length, self.even = partition, partition.length, partition.full
        self._partitions = [partition]  # each applies up to the next one's first micro-batch

    def repartition(self, plan: WindowPlan) -> None:
        whole = self._whole
        self._plan = plan
        self._use(plan.partition(whole.n, whole.batch, whole.size, whole.drop_last, whole.weights))

    def samples_of(self, number: int) -> tuple[list[int], int] | None:
        spans = [(first, end) for _, first, end in self._spans(self._partition_at(number), [number])]
        return None if self._sampling.single or not spans else (self._indices(spans)[0], spans[0][0])

    def position(self, number: int) -> int:
        whole, plan = self._whole, self._plan
        if plan is None:
            return min(whole.n, number * whole.batch * whole.size)
        return min(whole.n, plan.reached(number, whole.batch, whole.size))

    def begin(self, epoch: int, turn: int, start: int) -> None:
        check_samples(self._sampling.name, self._among, _drawn_from(self._sampling.sampler))
        self._order = self._order_of(epoch, turn)
        self._start = start

    def use_shares(self, shares: Sequence[Reshare]) -> None:
        self._partitions = [self._partition]
        for number, weights in shares:
            if number <= self._partition.number:
                self._partitions = [dataclasses.replace(self._partition, weights=weights)]
            else:
                self._partitions.append(self._partitions[-1].repartition(number, weights))

    def reshare(self, shares: Reshare) -> None:
        number, weights = shares
        if number < self.drawn:
            raise RuntimeError(
                f"{self._sampling.name}: micro-batch {number} has been drawn, so its division among the ranks cannot "
                "change. Pass a later micro-batch"
            )
        self._partitions.append(self._partitions[-1].repartition(number, weights))

    def _partition_at(self, number: int) -> Partition:
        cuts = self._partitions
        return cuts[0] if len(cuts) == 1 else next((c for c in reversed(cuts) if c.number <= number), cuts[0])

    def even_until(self, number: int) -> int:
        partition = self._partition_at(number)
        after = next((later.number for later in self._partitions if later.number > number), partition.full)
        return min(partition.full, after)

    def weights(self, number: int) -> Sequence[float]:
        return self._partition_at(number).sizes(number)

    def draw(self, stop: int | float) -> Iterator[list[int] | int]:
        if self.reshares:
            return self._one_by_one(int(min(stop, self.length)))
        blocks = self._blocks(int(min(stop, self.length)))
        if self._quiet and not self._sampling.single:  # no Python frame per batch
            return itertools.chain.from_iterable(block for block, _ in blocks)
        return (self._seeds(*each) for block in blocks for each in zip(*block, strict=True))

    def _blocks(self, stop: int) -> Iterator[tuple[list[list[int]], list[int]]]:
        """Yield (indices, first positions) for blocks of micro-batches: this rank's part of each micro-batch."""
        partition, full = self._partition, min(self._partition.full, stop)
        at_once = max(1, _BLOCK // partition.batch)
        for begin in range(self._start, full, at_once):
            end = min(begin + at_once, full)
            first, last = partition.span(begin, self.rank)
            firsts = torch.arange(end - begin).mul_(partition.batch * partition.size).add_(first)
            yield self._order(firsts.unsqueeze(1) + torch.arange(last - first)).tolist(), firsts.tolist()
        for begin in range(max(full, self._start), stop, at_once):
            numbers = range(begin, min(begin + at_once, stop))
            spans = [(first, end) for _, first, end in self._spans(partition, numbers)]
            yield self._indices(spans), [first for first, _ in spans]

    def _spans(self, partition: Partition, numbers: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (micro-batch number, first position, end) of this rank's part of each micro-batch. Omit empty parts."""
        for number in numbers:
            first, end = partition.span(number, self.rank)
            if first == end and self.pads:
                first = partition.span(number, 0)[0]  # a sample of another rank
                end = first + 1
            if first < end:
                yield number, first, end

    def _indices(self, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
        if not spans:
            return []
        drawn = iter(self._order(torch.cat([torch.arange(*span) for span in spans])).tolist())
        return [list(itertools.islice(drawn, end - first)) for first, end in spans]

    def _one_by_one(self, stop: int) -> Iterator[list[int] | int]:
        """Yield this rank's indices for each micro-batch. Recompute the remaining indices if shares change."""
        number = self.drawn = self._start
        while number < stop:
            partition, known = self._partition_at(number), len(self._partitions)
            after = next((later.number for later in self._partitions if later.number > number), stop)
            end = min(stop, after, number + max(1, _BLOCK // partition.batch))
            found = list(self._spans(partition, range(number, end)))
            of_each = self._indices([(first, last) for _, first, last in found])
            for (at, first, _), indices in zip(found, of_each, strict=True):
                if len(self._partitions) > known and at >= self._partitions[known].number:
                    break
                self.drawn = at + 1
                yield self._seeds(indices, first)
            # new shares may start after this rank's last part, before micro-batches in which it had none
            number = min(end, self._partitions[known].number) if len(self._partitions) > known else end
            self.drawn = max(self.drawn, number)  # none of this rank's are left before it


def _drawn_from(sampler: object) -> int | None:
    """Return the length of the data source of one of torch's samplers; None if the data source has no length."""
    return length_of(getattr(sampler, "data_source", None))


class _Lists:
    """Batch sampler of a source's loader. All passes share one instance, because persistent workers store it."""

    def __init__(self, source: Indexed) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source.lists()

    def __len__(self) -> int:
        return int(self._source.length)


def recording(drawn: Iterable[Any], recorded: deque[list[Any]]) -> Iterator[Any]:
    """Append the indices of each batch to ``recorded`` before yielding them, since loader workers fetch ahead."""
    for indices in drawn:
        # a plain slice: iterating over seeded indices would seed
        recorded.append(indices[:] if isinstance(indices, list) else [_plain(indices)])
        yield indices


def _plain(index: object) -> object:
    return int(index) if isinstance(index, SeededIndex) else index


def _seeding(drawn: Iterable[Any]) -> Iterator[Any]:
    """Yield the indices of batches. Seed the generators before each batch is fetched in this process.

    A data set that fetches a whole batch at once needs this.
    """
    for indices in drawn:
        if isinstance(indices, SeededIndices | SeededIndex):
            indices.seed()
        yield indices


# -- the size of ready-made batches --------------------------------------------------------------------------


class Measure:
    """Callable that returns the number of samples in a ready-made batch, and logs once how the number is determined.

    The number is the length of the first tensor, because lockstep did not draw the samples of such batches.

    Args:
        name: name of the loader in messages.
        stage: "train", "val", "test" or "predict"; nothing is weighed in a prediction.
    """

    def __init__(self, name: str, stage: str) -> None:
        self.name = name
        self._has_reported = stage == "predict"
        self._training = stage == "train"

    def __call__(self, batch: object) -> float:
        """Return the number of samples in a batch; 1 if it cannot be determined."""
        tensor = first_tensor(batch)
        # a first tensor without rows is no reason to leave a rank out
        size = float(len(tensor) or 1) if tensor is not None and tensor.ndim else 1.0
        if not self._has_reported and (tensor is None or (len(tensor) if tensor.ndim else tensor is not batch)):
            self._has_reported = True
            self._report(tensor, size)
        return size

    def each(self, batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
        """Yield (batch, number of samples) for each batch."""
        return ((batch, self(batch)) for batch in batches)

    def _report(self, tensor: Tensor | None, size: float) -> None:
        way_out = "pass `self.log(..., batch_size=samples)`"
        if self._training:
            way_out += ' and return {"loss": loss, "weight": samples}'
        found = f" (shape {tuple(tensor.shape)})" if tensor is not None else ", because the batch contains no tensor"
        rank_zero_info(
            f"{self.name} yields ready-made batches, so lockstep uses the length of the first tensor as the number of "
            f"samples: {size:g} in the first batch{found}. If that is wrong, {way_out}."
        )


def first_tensor(batch: object) -> Any:
    """Return the first tensor or array in a batch of nested collections. Return None if there is none."""
    if isinstance(batch, Tensor) or (hasattr(batch, "__array__") and hasattr(batch, "shape")):
        return batch
    if isinstance(batch, Mapping):
        items: Iterable[Any] = batch.values()
    elif isinstance(batch, (list, tuple)):
        items = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = (getattr(batch, each.name) for each in dataclasses.fields(batch))
    else:
        return None
    return next((found for item in items if (found := first_tensor(item)) is not None), None)


# -- loaders, their samplers and their states ----------------------------------------------------------------


def copy_loader(loader: DataLoader[Any], **changes: object) -> DataLoader[Any]:
    """Return a shallow copy of a loader, of the same class, with the attributes in ``changes`` replaced.

    Constructing a new one would need the arguments of a subclass' ``__init__``. The attributes bypass
    `DataLoader.__setattr__`, which keeps users from changing a loader that is in use.
    """
    made: DataLoader[Any] = object.__new__(type(loader))
    # Weights are matched with batches by their order; the user's loader keeps its own workers.
    made.__dict__.update(loader.__dict__, _iterator=None, in_order=True, **changes)
    return made


def unmixed(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the items of an iterator. Restore the process's random states after fetching each item."""
    while True:
        states = capture()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            put_back(states)
        yield batch


def skip(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Read ``count`` batches from an iterator, and return the iterator."""
    for _ in itertools.islice(iterator, count):
        pass
    return iterator


def read_first(iterator: Iterator[Any]) -> Iterator[Any]:
    """Read the first batch now, so that the iterator draws its random numbers. Return an iterator over all batches."""
    return itertools.chain(list(itertools.islice(iterator, 1)), iterator)


def length_of(sized: object) -> int | None:
    """Return the length of an object. Return None if it has no ``len``."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def holders(sampler: object) -> list[object]:
    """Return ``[sampler]``, or for a batch sampler ``[batch sampler, the sampler inside it]``."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None else [sampler, inner]


def call_set_epoch(target: object, epoch: int) -> None:
    """Call ``set_epoch`` of a user's sampler or data set. Do nothing if it has no such method."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class Stateful(Protocol):
    """A sampler, data set or loader that can save and restore its progress."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> object: ...


def stateful(candidates: Iterable[Any]) -> list[Stateful]:
    """Return the objects in ``candidates`` that can save and restore their progress."""
    return [
        each
        for each in candidates
        if callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))
    ]


def states_of(samplers: Iterable[Stateful]) -> list[Any]:
    """Return copies of the current states of the samplers."""
    return [deepcopy(sampler.state_dict()) for sampler in samplers]


def of_all_ranks(state: object) -> dict[str, Any]:
    """Return the part of a loader's state that does not depend on the rank or the number of ranks: the sample order."""
    if not isinstance(state, dict):
        return {}
    common: dict[str, Any] = {key: state[key] for key in ("order",) if key in state}
    if "parts" in state:
        parts = [of_all_ranks(part) for part in state["parts"]]
        if any(parts):
            common["parts"] = parts
    return common
