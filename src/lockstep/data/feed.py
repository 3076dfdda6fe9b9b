"""Feeds, which yield this rank's batches of a stage (such as validation) with their weights.

A *rank* here is one of the ranks that see different samples: see `lockstep.data.source.Replicas`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import mul
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.data.combined import LENGTHS, Mixed, RowWeight, checked_shares, make_sources, unpack
from lockstep.data.counting import BatchCounting, LoaderOrder, ResumePoint
from lockstep.data.loader_checks import Limit, check_alike, check_batches, check_trainable, limited, longest, no_batches
from lockstep.data.partition import WindowPlan
from lockstep.data.source import LoaderSource, Replicas, Reshare, SourceSpec
from lockstep.data.window import Part, Window, empty_ranks, first_gap, weigh, weigh_parts
from lockstep.ground.comm import as_bytes
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import does, rank_zero_warn
from lockstep.ground.tree import tree_leaves, tree_map

CountingFor = Callable[[int, list[int], bool, int | None], BatchCounting]
"""Function that returns how a run counts batches. Its arguments are the number of replicas, the ``batch_size`` of each
loader, True if the loaders can be divided into windows of any size, and the number of workers that read a stream."""

_END = object()


class Feed:
    """Source of the accumulation windows of a fit. It reads the training loaders, one epoch after the other.

    Create a feed with :meth:`train`. If all loaders know their length and weights in advance, a window costs nothing
    but its batches. Otherwise (iterable data sets, foreign iterables) a window is fetched completely before it is
    handed out, plus one batch, to find out whether it is the last. With several ranks, one small collective per window
    determines which ranks still have data.

    Example:
        >>> feed = Feed.train(DataLoader(data, 32, shuffle=True), replicas=Replicas(), seed=42)
        >>> feed.begin(epoch=0)
        >>> for window in feed.windows(accumulate=2):
        ...     for batch, weight, share in window:
        ...         (loss(batch) * share).backward()
    """

    def __init__(
        self,
        source: LoaderSource,
        spec: SourceSpec,
        count: int | float,
        limited: bool,
        ahead: bool,
        counting: BatchCounting,
        batches: list[int],
        padded: bool = False,
    ) -> None:
        self._limit = count if limited else math.inf  # rows of an epoch
        num_batches = source.length if counting.is_replanned else count
        # The ranks' lengths may differ: all continue to the longest.
        if spec.gather is not None and not ahead:
            num_batches = longest(num_batches, spec.gather)
        self._source = source
        self._spec = spec
        self._size = spec.size
        #: True if the order is drawn by the generators of this process
        self.by_process = spec.by_process
        self._ahead = ahead
        self._padded = padded
        self._mixes = len(source.leaves()) if isinstance(source, Mixed) else 0  # loaders in parallel
        #: structure of a batch of several loaders; None for a single bare loader
        self.nest = source.nest if isinstance(source, Mixed) else None
        #: micro-batches of an epoch on every rank, after the limit; infinite if unknown
        self.num_batches = num_batches
        #: how the run counts batches
        self.counting = counting
        #: ``batch_size`` of each loader; 1 for loaders that are used unchanged
        self.batches = batches
        self._length = self._stop = num_batches
        self._is_repartitioned = False
        self._start = self._first = 0
        self._epoch = 0
        self._accumulate = 1
        self._even: int | float = -1  # end of the next windows of equal weight; -1: unknown
        self._shares: list[Reshare] = [(0, spec.shares)]  # of the epoch `_shared_epoch`
        self._latest, self._shared_epoch = spec.shares, -1
        self._batches: Iterator[Any] = iter(())
        self._lasting = LastingBatches()
        self._state: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None  # after the last batch of a window: the state before the window

    @classmethod
    def train(
        cls,
        source: object,
        *,
        replicas: Replicas,
        seed: int,
        limit: Limit = None,
        distribute: bool = True,
        order: Literal["keyed", "torch"] | None = None,
        overfit: bool = False,
        counting: CountingFor | None = None,
        planned: int | None = None,
        padded: bool = False,
        shares: Sequence[float] | None = None,
        reshared: bool = False,
    ) -> Feed:
        """Create the feed that reads the loaders from a ``train_dataloader`` hook.

        Args:
            source: a DataLoader or other iterable of batches, or a dict, list or `CombinedLoader` of such (a
                dict or list ends with its longest loader, and the others restart).
            replicas: the number of replicas, which see different samples, and the index of this rank's replica.
            seed: seed of the data order and of the data sets' random numbers; the same on all ranks.
            limit: ``limit_train_batches``.
            distribute: ``use_distributed_sampler``; if False, each rank uses its own loaders unchanged.
            order: "torch": shuffle by torch's own permutations; one process draws them from its global
                generator as a plain loader does, several from a generator seeded with ``seed + epoch``.
            overfit: ``overfit_batches``: read loaders in order.
            counting: returns how a run that was planned on other ranks counts batches; default: by the current ranks.
            planned: the number of ranks in the plan, if already known.
            padded: hand out padding batches where a rank's part of a micro-batch is empty.
            shares: a number for each replica, to which its part of each global batch is proportional; default: equal.
            reshared: the shares change while an epoch runs, by :meth:`reshare`.

        Raises:
            MisconfigurationException: there are no batches; the limit, the shares or the number of ranks is invalid; or
                the loaders differ between ranks.
        """
        gather, size = replicas.agreed_gather(), replicas.count
        by_weight, torch_order = checked_shares(shares, size, gather), order == "torch"
        loaders, nest, mode = unpack(source, "max_size_cycle")
        pads = padded or nest is not None  # parallel loaders need equal batch counts on all ranks
        spec = SourceSpec(
            *(replicas.index, size, seed, "train", pads, distribute, torch_order, planned or size, gather),
            shares=by_weight,
            reshared=reshared,
            gather_members=replicas.gather_members,
        )
        check_trainable(source, loaders, mode)
        parts, loaders, names = make_sources(loaders, spec, overfit)
        ahead, batches = check_alike(parts, spec, names), [part.batch for part in parts]
        made = parts[0] if nest is None else Mixed(parts, nest, mode)
        counted = (
            BatchCounting(size, size) if counting is None else counting(size, batches, made.flexible, made.workers)
        )
        check_batches(parts, loaders, names, counted.ranks)
        whole = made.planned(counted.ranks)
        count = limited(limit, whole, "overfit_batches" if overfit else "limit_train_batches")
        return cls(made, spec, count, count < whole, ahead and made.ahead, counted, batches, padded)

    def begin(self, epoch: int, start_batch: int = 0, accumulate: int = 1) -> None:
        """Start an epoch at this rank's micro-batch ``start_batch``, and open the loaders.

        Args:
            epoch: counted from 0.
            start_batch: counted as this attempt of the run counts.
            accumulate: the value for the next call of :meth:`windows`.
        """
        self.prepare(epoch, accumulate)
        self._start = start_batch
        self._state = self._before = None
        if self._spec.reshared:
            if epoch != self._shared_epoch:
                self._shares, self._shared_epoch = [(0, self._latest)], epoch
            self._source.use_shares(self._shares)
        if self._ahead:
            self._batches = self._spec.compared(self._source.open(epoch, 0, start_batch, self._stop))

    def prepare(self, epoch: int, accumulate: int) -> None:
        """Set the epoch. Divide it among the current ranks if it was planned or started with another number of ranks.

        Args:
            epoch: number of the epoch, from 0.
            accumulate: the value for the next call of :meth:`windows`.
        """
        self._epoch, self._accumulate = epoch, accumulate
        counting, source, most = self.counting, self._source, self._limit
        self._first = counting.done_before(epoch)[0]
        plan = counting.window_plan(epoch, accumulate, most)
        if plan is None and not self._is_repartitioned:
            return
        self._is_repartitioned = True
        source.repartition(plan or WindowPlan(counting.ranks, accumulate, most))
        most = counting.batches(most, accumulate)
        if self._ahead:
            self.num_batches = self._stop = source.length if source.flexible else min(source.length, most)
        else:  # it ends when all ranks are done
            self.num_batches, self._stop = counting.batches(self.rows, accumulate), most

    # -- changing shares

    @property
    def shares(self) -> tuple[float, ...]:
        """Each rank's share of a global batch, as set most recently; an empty tuple if all shares are equal."""
        return self._latest

    @property
    def drawn(self) -> int:
        """Number of this epoch's micro-batches that this rank has drawn. New shares apply only to later ones.

        Prefetched micro-batches count as drawn.
        """
        return self._source.drawn

    @property
    def sources(self) -> list[LoaderSource]:
        """List with one entry: the source that the feed reads. The source may combine several loaders."""
        return [self._source]

    @property
    def micro(self) -> int:
        """Number of micro-batches in a full accumulation window of the current epoch."""
        return self.counting.micro(self._accumulate)

    def shared_at_once(self) -> tuple[int, int]:
        """Return (size of a global batch that is divided among the ranks, number of such batches per full window)."""
        batch, micro = self._source.batch, self.micro
        whole = self.counting.ranks * self._accumulate * batch
        return (batch * self._size, micro) if micro * batch * self._size == whole else (whole, 1)

    def reshare(self, shares: Sequence[float], number: int | None) -> int | None:
        """Set new shares for the ranks, from the first window that starts at or after micro-batch ``number``.

        Call this method on all ranks with the same arguments.

        Args:
            shares: a positive number for each rank.
            number: a micro-batch that no rank has drawn yet; None: the first one of the next epoch.

        Returns:
            the first micro-batch with the new shares, which starts a window; None if that is in the next epoch.
        """
        self._latest = () if len(set(shares)) == 1 else tuple(shares)
        if number is None:
            self._shared_epoch = -1  # the next epoch, whichever it is
        if number is None or not self._source.reshares:
            return None
        # Only at the start of a window: within one, the shares of its micro-batches are fixed.
        number += (self._first - number) % self.micro
        if number >= self._stop:
            return None
        self._source.reshare((number, self._latest))
        self._shares.append((number, self._latest))
        self._even = -1
        return number

    def shares_state(self) -> dict[str, Any] | None:
        """Return the ranks' current and later shares, for :meth:`load_shares`; None if shares never change."""
        if not self._spec.reshared:
            return None
        by_number = [[number, list(shares)] for number, shares in self._shares]
        return {"size": self._size, "epoch": self._shared_epoch, "shares": by_number, "latest": list(self._latest)}

    def load_shares(self, state: dict[str, Any], number: int, keep: bool = True) -> None:
        """Restore the shares that :meth:`shares_state` returned, unless the number of ranks has changed.

        Args:
            state: the state from a checkpoint.
            number: number of micro-batches of the state's epoch that are done.
            keep: if False, use the restored shares only until the current window ends, then the initial ones.
        """
        # Shares belong to ranks: they mean nothing on another number of ranks.
        if state["size"] != self._size:
            return
        begins, self._latest = self._latest, tuple(state["latest"])
        if not self.counting.moved:
            self._shared_epoch = state["epoch"]
            self._shares = [(first, tuple(shares)) for first, shares in state["shares"]]
        if not keep:
            self._latest = begins
            after = number + (self._first - number) % self.micro
            self._shares = [each for each in self._shares if each[0] < after] + [(after, begins)]

    @property
    def orders(self) -> list[LoaderOrder]:
        """List with the order in which each loader yields its samples."""
        return [leaf.order() for leaf in self._source.leaves()]

    # -- counting by the plan

    @property
    def rows(self) -> int | float:
        """Number of planned batches in an epoch, at most the limit; infinite if unknown."""
        if not self.counting.is_replanned:
            return self._length
        return min(self._source.planned(self.counting.ranks), self._limit)

    def rows_at(self, number: int) -> int:
        """Return how many planned batches correspond to the first ``number`` micro-batches of the current epoch."""
        if not self.counting.is_replanned:
            return number
        rows, all_rows = self.counting.rows(self._epoch, number, self._accumulate), self.rows
        at_end = number >= self.num_batches and not math.isinf(all_rows)
        return int(all_rows if at_end else min(rows, all_rows))

    def samples(self, number: int) -> tuple[list[int], int] | None:
        """Return (data set indices of this rank's part of a micro-batch, position of the first one in the epoch).

        Return None if the indices are unknown: with several loaders, a stream, or a user's own sampler.

        Args:
            number: number of the micro-batch in the epoch, from 0.
        """
        return self._source.samples_of(number)

    def batches_done(self, number: int, accumulate: int) -> int:
        """Return how many micro-batches of the current window precede micro-batch ``number`` of the epoch.

        Args:
            number: number of the micro-batch in the epoch, from 0.
            accumulate: the plan's batches per window, as for :meth:`windows`.
        """
        return (number - self._first) % self.counting.micro(accumulate)

    def reached(self, number: int) -> ResumePoint:
        """Return the point from which to resume after the epoch's first ``number`` micro-batches, which end a window.

        It is valid for a resume on any number of ranks.
        """
        before = self.counting.resumed_at
        if before is not None and (before.epoch, before.number) == (self._epoch, number):
            return before
        position = self._source.position(number) if number else None
        return ResumePoint(self._epoch, number, self.rows_at(number), position)

    def windows(self, accumulate: int) -> Iterator[Window]:
        """Return the accumulation windows of the epoch, each made of ``accumulate`` planned batches.

        The last window may have fewer. On the planned number of ranks, each batch of the plan is one micro-batch.

        Args:
            accumulate: number of the plan's batches per window, at least 1.
        """
        micro = self.counting.micro(accumulate)
        return self._known(micro) if self._ahead else self._fetched(micro)

    def state_dict(self, under_way: bool = False) -> dict[str, Any]:
        """Return what this rank's loaders need for a resume besides epoch and micro-batch; often an empty dict.

        Args:
            under_way: return the state before the batch that was yielded last, so that a resume yields it again.
        """
        if under_way and self._before is not None:
            return self._before
        return self._source.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`. Call this method before :meth:`begin` resumes the epoch.

        Args:
            state: result of :meth:`state_dict` on this rank.
        """
        point = self.counting.resumed_at
        # A stream that other ranks resume is read by position; the state of one rank does not apply.
        reads_again = self.counting.moved and point is not None and isinstance(point.position, list)
        if not reads_again:
            self._source.load_state_dict(state)

    def close(self) -> None:
        """Abandon the current epoch, and end the loader workers."""
        self._batches = iter(())
        self._source.close()

    # -- windows with weights that are known before anything is fetched

    def _known(self, accumulate: int) -> Iterator[Window]:
        source, batches, stop = self._source, self._batches, self._stop
        # A resume may be within a window; its first micro-batches are done.
        done = (self._start - self._first) % accumulate
        number = self._start - done
        self._even = -1
        same: list[Part] = []
        of_rank: list[float] = []
        among: Callable[[Sequence[int] | None], list[Part]] | None = None
        while number < stop:
            after = number + accumulate
            if after > self._even:
                source.has(int(min(after, stop)) - 1)  # only what was drawn of a user's sampler is known
                self._even = even = min(source.even_until(number), stop)
                if after <= even:  # all windows up to there weigh the same
                    sizes = source.weights(number)
                    mine = [sizes[self._spec.rank]] * accumulate
                    of_rank = list(map(mul, sizes, itertools.repeat(accumulate)))
                    same = weigh(mine, sum(of_rank), self._size)
                    if source.uneven:
                        among = partial(self._among, mine, [], of_rank, [of_rank])
            if after <= self._even:
                last = after >= stop or (after >= self._even and not source.has(after))
                yield Window(batches, same, last, of_rank, done, among=among)
            else:
                rows = self._rows(number, min(after, stop))
                if not rows:
                    return
                after = number + len(rows)
                yield self._weighed_window(rows, after >= stop or not source.has(after), done)
            number, done = after, 0

    def _weighed_window(self, rows: list[list[Sequence[float]]], last: bool, done: int) -> Window:
        """Return a window of unequal micro-batches. Their weights for all loaders and ranks are in ``rows``."""
        mine = [[part[self._spec.rank] for part in row] for row in rows]
        # sums over all ranks run inside Python's built-in functions, for speed
        weights = [row[0] if len(row) == 1 else list(map(max, *row)) for row in rows]
        of_rank = list(map(sum, zip(*weights, strict=True)))
        of_parts = [list(map(sum, zip(*of_rows, strict=True))) for of_rows in zip(*rows, strict=True)]
        among = partial(self._among, [max(row) for row in mine], mine, of_rank, of_parts)
        absent = list(map(empty_ranks, weights))
        drawn = self._batches if all(map(all, mine)) else self._with_gaps(mine[done:])
        gap = next(filter(None, map(first_gap, rows, weights)), None)
        return Window(drawn, among(None), last, of_rank, done, absent, among, gap)

    def _among(
        self,
        weights: Sequence[float],
        mine: Sequence[Sequence[float]],
        of_rank: Sequence[float],
        of_parts: Sequence[Sequence[float]],
        ranks: Sequence[int] | None,
    ) -> list[Part]:
        """Return a list of (weight, share) for this rank's micro-batches, if only ``ranks`` average their gradients.

        Args:
            weights: weights of this rank's micro-batches.
            mine: the same by loader.
            of_rank: the sum of each rank's weights.
            of_parts: the same by loader and rank; one entry per loader if there are several.
            ranks: the ranks that average gradients, including this one; None: all.
        """
        size = self._size
        if ranks is not None:
            size, of_rank = len(ranks), [of_rank[rank] for rank in ranks]
            of_parts = [[each[rank] for rank in ranks] for each in of_parts]
        parts = weigh(weights, sum(of_rank) or 1.0, size)
        return parts if len(of_parts) < 2 else weigh_parts(parts, mine, list(map(sum, of_parts)), size)

    def _rows(self, number: int, stop: int | float) -> list[list[Sequence[float]]]:
        """Return the weights (numbers of samples) of micro-batches ``number`` to ``stop``, for all loaders and ranks.

        Micro-batches that do not exist are omitted.
        """
        rows = []
        while number < stop and self._source.has(number):
            rows.append(self._source.row(number))
            number += 1
        return rows

    def _with_gaps(self, rows: list[list[float]]) -> Iterator[Any]:
        """Yield a batch for each micro-batch. Where this rank has no samples, yield None or a padding batch."""
        for parts in rows:
            batch = next(self._batches, _END) if any(parts) or self._source.pads else None
            if batch is _END:
                return
            if any(parts):
                yield batch if all(parts) else self._source.without(batch, parts)
            else:
                yield batch if self._padded else None

    # -- windows that must be fetched before their weights are known

    def _fetched(self, accumulate: int) -> Iterator[Window]:
        done, stop = (self._start - self._first) % accumulate, self._stop
        number = self._start - done
        # From the start of a window that is under way: its shares need the weights of all its micro-batches.
        batches = self._spec.compared(self._source.weighed(self._epoch, 0, number, stop))
        self._state = self._source.state_dict()
        held: list[tuple[Any, float]] = []
        padding: Any = _END if self._padded else None
        last = False
        while number < stop and not last:
            room = int(min(accumulate, stop - number))
            self._lasting.draw(batches, held, room)
            after = self._source.state_dict()  # before the batch ahead, which belongs to the next window
            if number + room < stop:
                self._lasting.draw(batches, held, room + 1)  # one more shows whether this window is the last
            mine, held = held[:room], held[room:]
            absent, of_rank, last, of_parts = self._agree([weight for _, weight in mine], bool(held), room)
            size = len(absent)
            if size == 0:
                return
            if self._padded and mine:
                padding = mine[-1][0]
            elif self._padded and padding is _END:
                padding = self._any_batch()
            mine += [(padding, 0.0)] * (size - len(mine))
            of_rows = [getattr(weight, "parts", [0.0] * len(of_parts)) for _, weight in mine]
            among = partial(self._among, [weight for _, weight in mine], of_rows, of_rank, of_parts)
            drawn = self._handed_out(mine[done:], after)
            yield Window(drawn, among(None), last, of_rank, done, absent, among, first_gap(of_parts, of_rank))
            number, done = number + size, 0

    def _handed_out(self, mine: list[tuple[Any, float]], after: dict[str, Any]) -> Iterator[Any]:
        """Yield a window's batches. Before the last one, set ``after`` as the loader state that checkpoints save."""
        self._before = None
        for batch, _ in mine[:-1]:
            yield batch
        self._before, self._state = self._state, after
        yield mine[-1][0]

    @does("checking which ranks have more data")
    def _agree(
        self, weights: list[float], more: bool, room: int
    ) -> tuple[list[tuple[int, ...]], list[float], bool, list[list[float]]]:
        """Exchange between all ranks the weights (numbers of samples) of a window's micro-batches. Collective.

        Returns:
            for each micro-batch the ranks without samples; the sum of each rank's weights; True if no rank has more
            data; and for each loader each rank's sum, if a micro-batch holds parts of several loaders.
        """
        by_row = [weight.parts for weight in weights if isinstance(weight, RowWeight)]
        sums = [sum(of_rows) for of_rows in zip(*by_row, strict=True)] or [0.0] * self._mixes
        if self._spec.gather is None:
            return [()] * len(weights), [sum(weights)], not more, [[each] for each in sums]
        # One message for everything; float64 holds all counts exactly.
        there = [float(weight > 0) for weight in weights] + [0.0] * (room - len(weights))
        mine = [len(weights), sum(weights), more, *there, *sums]
        ranks = self._spec.gather(torch.tensor(mine, dtype=torch.float64))
        size = int(ranks[:, 0].max())
        absent = [*map(empty_ranks, ranks[:, 3 : 3 + size].T.tolist())]
        return absent, ranks[:, 1].tolist(), not bool(ranks[:, 2].any()), ranks[:, 3 + room :].T.tolist()

    def _any_batch(self) -> Any:
        """Return any batch of this rank, as padding for a window in which the rank has no data."""
        batch = next(self._source.open(self._epoch, 0, 0, 1), _END)
        if batch is _END:
            raise MisconfigurationException(
                f"train_dataloader has no samples for rank {self._spec.rank} of {self._size}, because the iterable "
                "data set has fewer samples than there are ranks. Use fewer devices or more data."
            )
        return batch


# -- buffered batches --------------------------------------------------------------------------------------------

WeighedBatch = tuple[Any, float]
"""A batch and its weight."""
ARRAYS = (Tensor, np.ndarray)


class LastingBatches:
    """Buffer for batches that are drawn ahead. It copies the batches if the loader reuses their memory.

    To detect such a loader, the first batches are copied when they are drawn, and compared with the originals after
    later batches were drawn, before the first one is yielded.

    Attributes:
        copies: True if the loader is known to reuse memory.
    """

    def __init__(self) -> None:
        self.copies = False
        self._lasting = 0  # this many buffered batches have stayed unchanged

    def draw(self, batches: Iterator[WeighedBatch], held: list[WeighedBatch], count: int) -> None:
        """Draw batches into the list ``held``, until it has ``count`` batches or the loader ends.

        Args:
            batches: the loader's batches with their weights.
            held: batches that were drawn earlier and not yielded yet.
            count: number of batches wanted.
        """
        drawn = itertools.islice(batches, max(0, count - len(held)))
        if self.copies:
            held.extend((tree_map(_copy, batch, ARRAYS), weight) for batch, weight in drawn)
        # Known to last: a comparison of every window would copy all batches.
        elif self._lasting >= count:
            held.extend(drawn)
        else:
            copies = [(tree_map(_copy, batch, ARRAYS), weight) for batch, weight in held]
            for batch, weight in drawn:
                held.append((batch, weight))
                copies.append((tree_map(_copy, batch, ARRAYS), weight))
            pairs = [
                pair
                for (batch, _), (copy, _) in zip(held, copies, strict=True)
                for pair in zip(tree_leaves(batch, ARRAYS), tree_leaves(copy, ARRAYS), strict=True)
            ]
            # Bytes are compared, not values: NaN differs from itself.
            if any(array is not copy and _bytes(array) != _bytes(copy) for array, copy in pairs):
                self.copies = True
                held[:] = copies
            self._lasting = max(self._lasting, len(held))


def _copy(array: Any) -> Any:
    if isinstance(array, np.ndarray):
        return array.copy()
    strided = array.layout is torch.strided and not array.is_nested and array.device.type != "meta"
    return array.clone() if strided and not array.requires_grad else array


def _bytes(array: Any) -> bytes:
    if isinstance(array, Tensor):
        array = as_bytes(array.detach().as_subclass(Tensor).cpu().contiguous()).numpy()
    return bytes(array.tobytes())


# -- evaluation --------------------------------------------------------------------------------------------------


class EvaluationFeed:
    """Source of the batches for a validation, a test or a prediction.

    Iterating yields (batch, batch_idx, dataloader_idx, weight). Every sample is drawn once, on one of the ranks. The
    loaders follow one another (or a `CombinedLoader`'s mode). Ranks draw different numbers of batches if the samples do
    not divide evenly. Create a feed with :meth:`of`.

    Attributes:
        by_loader: number of batches of each loader, after the limit, on the rank with most; infinite if unknown.
        num_batches: like ``by_loader``, but a single number if each item combines batches of all loaders.
        sequential: True if loaders follow one another; False if each item combines batches of all loaders.
        sources: the sources, in the order in which they are read.
        batch_indices: sample indices of the last batch, if the sources record them.
    """

    def __init__(
        self,
        sources: list[LoaderSource],
        spec: SourceSpec,
        num_batches: list[int | float],
        sequential: bool,
        by_loader: list[int | float] | None = None,
    ) -> None:
        self.sources = sources
        self._compared = spec.compared
        self._gaps = spec.gaps
        self.num_batches, self.by_loader = num_batches, by_loader or num_batches
        self.sequential = sequential
        self.batch_indices: list[Any] = []
        self._epoch = 0
        self._limit: int | None = None

    @classmethod
    def of(
        cls,
        source: object,
        *,
        replicas: Replicas,
        seed: int,
        limit: Limit | Sequence[Limit] = None,
        distribute: bool = True,
        order: Literal["keyed", "torch"] | None = None,
        flag: str = "limit_val_batches",
        overfit: bool = False,
    ) -> EvaluationFeed:
        """Create the feed that reads the loaders from ``val_dataloader`` or a similar hook.

        Args:
            source: an iterable of batches, or a dict, list or `CombinedLoader` of such (iterated one after the
                other, unless a `CombinedLoader` sets another mode).
            replicas: as in :meth:`Feed.train`.
            seed: as in :meth:`Feed.train`.
            limit: one limit for all loaders, or a list with one for each.
            distribute: ``use_distributed_sampler``.
            order: as in :meth:`Feed.train`.
            flag: the name of the limit, "limit_{stage}_batches".
            overfit: as in :meth:`Feed.train`.
        """
        loaders, nest, mode = unpack(source, "sequential")
        side_by_side = nest is not None and mode != "sequential"
        spec = SourceSpec(
            *(replicas.index, replicas.count, seed, flag.split("_")[1], False, distribute, order == "torch"),
            gather=replicas.agreed_gather(),
            gather_members=replicas.gather_members,
            gaps=side_by_side and replicas.count > 1,
        )
        parts, loaders, names = make_sources(loaders, spec, overfit)
        check_alike(parts, spec, names)
        for part, loader, name in zip(parts, loaders, names, strict=True):
            if part.length == 0:
                rank_zero_warn(no_batches(loader, name, spec.size))
        limits = limit if isinstance(limit, Sequence) else [limit] * len(parts)
        flag = "overfit_batches" if overfit else flag
        counts = [limited(each, part.length, flag) for each, part in zip(limits, parts, strict=True)]
        if nest is None or not side_by_side:
            return cls(parts, spec, counts, True)
        return cls([Mixed(parts, nest, mode, counts)], spec, [LENGTHS[mode](counts)], False, counts)

    def begin(self, epoch: int, limit: int | None = None) -> None:
        """Set the epoch that determines the next pass's shuffling, and optionally a limit on its batches."""
        self._epoch = epoch
        self._limit = limit

    def __iter__(self) -> Iterator[tuple[Any, int, int, float]]:
        for number, (source, count) in enumerate(zip(self.sources, self.num_batches, strict=True)):
            stop = count if self._limit is None else min(count, self._limit)
            batches = self._compared(source.weighed(self._epoch, 0, 0, stop))
            wanted = itertools.islice(batches, None if math.isinf(stop) else int(stop))
            # Items without weight only keep parallel loaders in step with the other ranks.
            mine = (each for each in wanted if each[1]) if self._gaps else wanted
            for batch_idx, (batch, weight) in enumerate(mine):
                self.batch_indices = source.recorded.popleft() if source.recorded else []
                yield batch, batch_idx, number, weight

    def record_indices(self) -> None:
        """Record the sample indices of each batch in ``batch_indices``, starting with the next pass."""
        for source in self.sources:
            source.record_indices()

    def close(self) -> None:
        """End the loader workers."""
        for source in self.sources:
            source.close()
