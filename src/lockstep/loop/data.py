"""Feeds: the loaders of a stage as this rank draws from them, limited, shared out and weighed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec
from torch.utils.data import DataLoader

from lockstep.data.combined import LENGTHS, CombinedLoader, flatten
from lockstep.data.fixed import in_order
from lockstep.data.mixed import Mixed
from lockstep.data.sampler import length_of
from lockstep.data.source import Draft, Source, Untouched, make_source
from lockstep.ground.comm import all_gather_tensor
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once

Gather = Callable[[Tensor], Tensor]
"""Every rank's tensor (same shape and dtype), stacked along a new first dimension."""

Limit = int | float | None
"""As of a ``limit_*_batches`` flag: a number of batches, a part of the length (float), 1.0 or None: all."""

_END = object()
OTHER_STREAMS = (
    "The iterable data set of train_dataloader begins with another sample on each rank. If it shards itself over the "
    "ranks, it is now shared out twice, and most of its samples are never seen: set "
    "Trainer(use_distributed_sampler=False). If it draws its samples by chance or from elsewhere, all is well."
)


class Place(Protocol):
    """Where this process stands among the ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


class Window:
    """The micro-batches of one optimizer step, as this rank draws them; to be iterated once.

    Iterating gives (batch, weight, share): ``weight`` is the number of samples drawn for the micro-batch (0.0
    if it is borrowed, because this rank's part is empty), ``share`` what its loss is multiplied with, so that
    the average over the ranks of the sum over the window is the mean over all samples of the window:
    weight x ranks / (sum of the weights of all ranks and micro-batches).

    Attributes:
        size: number of micro-batches that are left, the same on all ranks.
        begun: micro-batches of this window that an earlier life of the run has done.
        last: whether this is the epoch's last window.
    """

    __slots__ = ("_batches", "_parts", "begun", "last", "size")

    def __init__(
        self, batches: Iterator[Any], parts: Sequence[tuple[float, float]], last: bool, begun: int = 0
    ) -> None:
        self._batches = batches
        self._parts = parts[begun:] if begun else parts
        self.size = len(parts) - begun
        self.begun = begun
        self.last = last

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        batches = self._batches
        for weight, share in self._parts:
            batch = next(batches, _END)
            if batch is _END:
                raise RuntimeError("A training loader ended before the length that it had given (its `len()`).")
            yield batch, weight, share


class Feed:
    """The training loaders of a fit, epoch by epoch.

    Use :meth:`train` to make one. Where all loaders tell their length and weights ahead, a window costs
    nothing but its batches. Of others (iterable data sets, foreign iterables) a window is fetched whole
    before it is handed out, and one batch more, to know whether it is the last; with several ranks one small
    collective a window tells who still has data.

    Example:
        >>> feed = Feed.train(DataLoader(data, 32, shuffle=True), world=World.single(), seed=42)
        >>> feed.begin(epoch=0)
        >>> for window in feed.windows(accumulate=2):
        ...     for batch, weight, share in window:
        ...         (loss(batch) * share).backward()
    """

    def __init__(
        self, source: Source, world: Place, num_batches: int | float, ahead: bool, gather: Gather | None
    ) -> None:
        self._source = source
        self._rank = world.rank
        self._size = world.size
        self._gather = gather
        self._ahead = ahead
        #: micro-batches of an epoch on every rank, after the limit; infinite where it is not known
        self.num_batches = num_batches
        self._start = 0
        self._epoch = 0
        self._batches: Iterator[Any] = iter(())
        self._state: dict[str, Any] | None = None

    @classmethod
    def train(
        cls,
        source: Any,
        *,
        world: Place,
        seed: int,
        limit: Limit = None,
        distribute: bool = True,
        order: Literal["keyed", "torch"] | None = None,
        overfit: bool = False,
        gather: Gather | None = None,
    ) -> Feed:
        """The feed of what a ``train_dataloader`` hook returned.

        Args:
            source: a DataLoader or other iterable of batches, or a dict, list or `CombinedLoader` of such (a
                dict or list ends with its longest loader, the others beginning anew).
            world: this rank and the number of ranks.
            seed: the order of data and the random numbers of data sets are functions of it; the same on all
                ranks.
            limit: ``limit_train_batches``.
            distribute: ``use_distributed_sampler``; False: loaders are taken as they are, their batches weigh
                1.
            order: "torch": shuffle by torch's own permutations; one process draws them from its global
                generator as a plain loader does, several from a generator seeded with ``seed + epoch``.
            overfit: ``overfit_batches``: read loaders in order.
            gather: collective for what ranks must agree on, if not over the default process group.

        Raises:
            MisconfigurationException: no batches, a limit that cannot be, loaders that differ between ranks.
        """
        if gather is None and world.size > 1:
            gather = all_gather_tensor
        by_torch = order == "torch"
        draft = Draft(world.rank, world.size, seed, "train", True, distribute, torch_order=by_torch, gather=gather)
        loaders, spec, mode = opened(source, "max_size_cycle")
        if mode == "sequential":
            raise MisconfigurationException(
                'CombinedLoader(mode="sequential") is for evaluation; for training choose "min_size", '
                '"max_size" or "max_size_cycle".'
            )
        if not loaders:
            raise MisconfigurationException(f"train_dataloader gave no loaders, but {source!r}: return at least one.")
        names = names_of("train_dataloader", len(loaders))
        if overfit:
            loaders = list(map(in_order, loaders, names))
        parts = make_sources(loaders, draft, names)
        ahead = check_alike(parts, draft, names)
        for part, loader, name in zip(parts, loaders, names, strict=True):
            if part.length == 0:
                raise MisconfigurationException(no_batches(loader, name, world.size))
        made = parts[0] if spec is None else Mixed(parts, spec, mode)
        count = limited(limit, made.length, "overfit_batches" if overfit else "limit_train_batches")
        ahead = ahead and made.ahead
        if gather is not None and not ahead:  # the ranks' lengths may differ: all go on to the longest
            count = longest(count, gather)
        return cls(made, world, count, ahead, gather)

    def begin(self, epoch: int, start_batch: int = 0) -> None:
        """Opens the loaders for an epoch, from this rank's micro-batch ``start_batch`` on."""
        self._start = start_batch
        self._epoch = epoch
        self._state = None
        if self._ahead:
            self._batches = self._source.open(epoch, 0, start_batch, self.num_batches)

    def windows(self, accumulate: int) -> Iterator[Window]:
        """The windows of the epoch, of ``accumulate`` micro-batches each, the last one perhaps of fewer."""
        return self._known(accumulate) if self._ahead else self._fetched(accumulate)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's loaders need to go on besides epoch and micro-batch; mostly {}."""
        return self._source.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Before the :meth:`begin` that goes on from where :meth:`state_dict` was taken."""
        self._source.load_state_dict(state)

    def close(self) -> None:
        """Drops the epoch that is under way and ends loader workers."""
        self._batches = iter(())
        self._source.close()

    # -- windows whose weights are known before anything is fetched

    def _known(self, accumulate: int) -> Iterator[Window]:
        source, batches, stop = self._source, self._batches, self.num_batches
        begun = self._start % accumulate
        number = self._start - begun
        even = min(source.even, stop)
        same = [(float(source.batch), 1.0 / accumulate)] * accumulate
        while number < stop:
            after = number + accumulate
            if after <= even:
                parts = same
            else:
                parts = self._parts(number, min(after, stop))
                if not parts:
                    return
                after = number + len(parts)
            yield Window(batches, parts, after >= stop or (after >= even and not source.has(after)), begun)
            number, begun = after, 0

    def _parts(self, number: int, stop: int | float) -> list[tuple[float, float]]:
        """(weight, share) of this rank's micro-batches ``number`` to ``stop``, as far as there are any."""
        weights = []
        while number < stop and self._source.has(number):
            weights.append(self._source.weights(number))
            number += 1
        return shares([each[self._rank] for each in weights], sum(map(sum, weights)), self._size)

    # -- windows that must be fetched before anything is known

    def _fetched(self, accumulate: int) -> Iterator[Window]:
        begun, stop = self._start % accumulate, self.num_batches
        number = self._start - begun
        batches = self._source.weighed(self._epoch, 0, number, stop)
        self._state = self._source.state_dict()
        held: list[tuple[Any, float]] = []
        borrowed: Any = _END
        last = False
        while number < stop and not last:
            room = int(min(accumulate, stop - number))
            held.extend(itertools.islice(batches, room - len(held)))
            after = self._source.state_dict()
            if number + room < stop:
                held.extend(itertools.islice(batches, room + 1 - len(held)))
            mine, held = held[:room], held[room:]
            size, total, last = self._agree([weight for _, weight in mine], bool(held))
            if size == 0:
                return
            if len(mine) < size:
                borrowed = mine[-1][0] if mine else self._any_batch() if borrowed is _END else borrowed
                mine += [(borrowed, 0.0)] * (size - len(mine))
            borrowed = mine[-1][0]
            parts = shares([weight for _, weight in mine], total, self._size)
            yield Window(self._handed_out(mine[begun:], after), parts, last, begun)
            number, begun = number + size, 0

    def _handed_out(self, mine: list[tuple[Any, float]], after: dict[str, Any]) -> Iterator[Any]:
        """The batches of a window; until the last is out, the feed's state is that before the window."""
        for batch, _ in mine[:-1]:
            yield batch
        self._state = after
        yield mine[-1][0]

    def _agree(self, weights: list[float], more: bool) -> tuple[int, float, bool]:
        """(micro-batches of the rank that has most, sum of all weights, whether no rank has more)."""
        if self._gather is None:
            return len(weights), sum(weights), not more
        mine = [len(weights), sum(weights), more, self._source.mark]
        ranks = self._gather(torch.tensor(mine, dtype=torch.float64))
        if len({mark for mark in ranks[:, 3].tolist() if mark}) > 1:
            warn_once(OTHER_STREAMS)
        return int(ranks[:, 0].max()), float(ranks[:, 1].sum()), not bool(ranks[:, 2].any())

    def _any_batch(self) -> Any:
        """Some batch of this rank, for a step in which it takes part for the others' sake only."""
        batch = next(self._source.open(self._epoch, 0, 0, 1), _END)
        if batch is _END:
            raise MisconfigurationException(
                f"train_dataloader has no samples for rank {self._rank} of {self._size}: the iterable data "
                "set is shorter than the number of ranks. Use fewer devices or more data."
            )
        return batch


class EvaluationFeed:
    """The loaders of a validation, test or prediction.

    Iterating gives (batch, batch_idx, dataloader_idx, weight): every sample once on one of the ranks, the
    loaders one after the other (or in a `CombinedLoader`'s mode). Ranks draw different numbers of batches
    where the samples do not go round. Use :meth:`of` to make one.

    Attributes:
        num_batches: of each loader, after the limit, on the rank that draws most; infinite where not known.
        sequential: whether loaders are taken one after the other; else a batch holds one of each.
        batch_indices: samples of the batch given last, where the sources were told to note them and could.
    """

    def __init__(self, sources: list[Source], num_batches: list[int | float], sequential: bool) -> None:
        self._sources = sources
        self.num_batches = num_batches
        self.sequential = sequential
        self.batch_indices: list[Any] = []
        self._epoch = 0
        self._limit: int | None = None

    @classmethod
    def of(
        cls,
        source: Any,
        *,
        world: Place,
        seed: int,
        limit: Limit | Sequence[Limit] = None,
        distribute: bool = True,
        order: Literal["keyed", "torch"] | None = None,
        flag: str = "limit_val_batches",
        overfit: bool = False,
        gather: Gather | None = None,
    ) -> EvaluationFeed:
        """The feed of what a ``val_dataloader``, ``test_dataloader`` or ``predict_dataloader`` hook returned.

        Args:
            source: an iterable of batches, or a dict, list or `CombinedLoader` of such (taken one after the
                other, unless a `CombinedLoader` says otherwise).
            world: this rank and the number of ranks.
            seed: as of :meth:`Feed.train`.
            limit: of all loaders, or one for each in a list.
            distribute: ``use_distributed_sampler``.
            order: as of :meth:`Feed.train`.
            flag: the name of the limit, "limit_{stage}_batches".
            overfit: as of :meth:`Feed.train`.
            gather: as of :meth:`Feed.train`.
        """
        if gather is None and world.size > 1:
            gather = all_gather_tensor
        stage = flag.split("_")[1]
        by_torch = order == "torch"
        draft = Draft(world.rank, world.size, seed, stage, False, distribute, torch_order=by_torch, gather=gather)
        loaders, spec, mode = opened(source, "sequential")
        names = names_of(f"{stage}_dataloader", len(loaders))
        if overfit:
            loaders, flag = list(map(in_order, loaders, names)), "overfit_batches"
        parts = make_sources(loaders, draft, names)
        check_alike(parts, draft, names)
        for part, loader, name in zip(parts, loaders, names, strict=True):
            if part.length == 0:
                rank_zero_warn(no_batches(loader, name, world.size))
        limits = limit if isinstance(limit, Sequence) else [limit] * len(parts)
        counts = [limited(each, part.length, flag) for each, part in zip(limits, parts, strict=True)]
        if spec is None or mode == "sequential":
            return cls(parts, counts, True)
        return cls([Mixed(parts, spec, mode, counts)], [LENGTHS[mode](counts)], False)

    def begin(self, epoch: int, limit: int | None = None) -> None:
        """For the next pass: its epoch, which loaders that shuffle follow, and a limit below the others."""
        self._epoch = epoch
        self._limit = limit

    def __iter__(self) -> Iterator[tuple[Any, int, int, float]]:
        for number, (source, count) in enumerate(zip(self._sources, self.num_batches, strict=True)):
            stop = count if self._limit is None else min(count, self._limit)
            batches = source.weighed(self._epoch, 0, 0, stop)
            wanted = itertools.islice(batches, None if math.isinf(stop) else int(stop))
            for batch_idx, (batch, weight) in enumerate(wanted):
                self.batch_indices = source.noted.popleft() if source.noted else []
                yield batch, batch_idx, number, weight

    def note_indices(self) -> None:
        """From the next pass on, know the samples of each batch."""
        for source in self._sources:
            source.note_indices()

    def close(self) -> None:
        """Ends loader workers."""
        for source in self._sources:
            source.close()


# -- what feeds are made of


def opened(source: Any, mode: str) -> tuple[list[Any], TreeSpec | None, str]:
    """(loaders, their nest or None if there is but a bare one, mode) of what a loader hook returned."""
    if isinstance(source, CombinedLoader):
        return source.flattened, flatten(source.iterables)[1], source.mode
    loaders, spec = flatten(source)
    bare = len(loaders) == 1 and loaders[0] is source
    return loaders, None if bare else spec, mode


def make_sources(loaders: list[Any], draft: Draft, names: list[str]) -> list[Source]:
    """A source for each loader."""
    parts = enumerate(zip(loaders, names, strict=True))
    return [make_source(loader, draft, number, name) for number, (loader, name) in parts]


def names_of(hook: str, count: int) -> list[str]:
    """What messages call the loaders of a hook."""
    return [hook] if count == 1 else [f"{hook}[{number}]" for number in range(count)]


def shares(mine: Sequence[float], total: float, size: int) -> list[tuple[float, float]]:
    """(weight, share) of a rank's micro-batches, given the sum of all weights of the window."""
    return [(float(weight), weight * size / total) for weight in mine]


def limited(limit: Limit, length: int | float, flag: str) -> int | float:
    """Number of micro-batches under a ``limit_*_batches`` flag.

    Raises:
        MisconfigurationException: a part of a length that is not known, or less than one batch.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return length
    if isinstance(limit, int) or limit == 0:
        return min(int(limit), length)
    if math.isinf(length):
        raise MisconfigurationException(
            f"{flag}={limit} is a part of the loader's length, but the loader has none (no `__len__`): give "
            f"a number of batches, such as {flag}=100, or 1.0 for all."
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise MisconfigurationException(
            f"{flag}={limit} of {length} batches is less than one: give at least {1 / length:.4g}, or a "
            f"number of batches, such as {flag}=1."
        )
    return count


def longest(count: int | float, gather: Gather) -> int | float:
    """The number of micro-batches of the rank that has most."""
    most = gather(torch.tensor(count, dtype=torch.float64)).max().item()
    return most if math.isinf(most) else int(most)


def check_alike(parts: list[Source], draft: Draft, names: list[str]) -> bool:
    """Whether loaders are of the same length on all ranks; those that lockstep shares out must be.

    Raises:
        MisconfigurationException: the ranks have different data sets or batch sizes.
    """
    if draft.gather is None or not parts:
        return True
    facts = [[-1 if math.isinf(part.length) else int(part.length), part.even, part.batch] for part in parts]
    ranks = draft.gather(torch.tensor(facts, dtype=torch.int64))
    same = (ranks == ranks[0]).all(dim=2).all(dim=0).tolist()
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        if not same[number] and not isinstance(part, Untouched):
            lengths = ", ".join(str(length) for length in ranks[:, number, 0].tolist())
            raise MisconfigurationException(
                f"{name} is not the same on all ranks (batches by rank: {lengths}). lockstep shares one data "
                "set out over the ranks: build the same loader on each; or, if each rank has data of its "
                "own, set Trainer(use_distributed_sampler=False)."
            )
    return all(same)


def no_batches(loader: Any, name: str, size: int) -> str:
    """Why a loader gives no batches."""
    samples = length_of(getattr(loader, "dataset", None))
    if not isinstance(loader, DataLoader) or not samples:
        return f"{name} has no batches: its data set is empty (length 0)."
    if loader.drop_last:
        needed = f"batch_size={loader.batch_size}" + (f" x {size} ranks" if size > 1 else "")
        return (
            f"{name} has no batches: drop_last=True drops a global batch that is not full, and the {samples} "
            f"samples do not fill one ({needed}). Set drop_last=False or a smaller batch_size."
        )
    return f"{name} has no batches: its sampler yields no samples (its `len()` is 0)."


def explain_loader_error(error: BaseException) -> MisconfigurationException | None:
    """What to tell the user about an error that came out of a loader hook; None if it is not a known one.

    Known are torch's own complaints about a `DistributedSampler` made before there is a process group, and
    about ``shuffle=True`` over an empty data set.
    """
    text = str(error)
    if "process group has not been initialized" in text:
        return MisconfigurationException(
            "A DistributedSampler was made before the process group exists (in one process there is none). "
            "Leave the sampler out and give the DataLoader shuffle=True or False: lockstep shares the data "
            "over the ranks by itself. Trainer(use_distributed_sampler=False) takes loaders as they are, "
            "made in the loader hooks, where the group of a distributed strategy exists."
        )
    if "num_samples should be a positive integer value, but got num_samples=0" in text:
        return MisconfigurationException(
            "A DataLoader(shuffle=True) was made of an empty data set (length 0). Check the data set's path or split."
        )
    return None
