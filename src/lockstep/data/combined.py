"""`CombinedLoader`, and functions that create a source of batches for each loader from a dataloader hook.

A hook may return one loader, or several in a nest of dicts, lists and tuples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lockstep.data.fixed import Untouched, in_order
from lockstep.data.order import make_key
from lockstep.data.own_parts import check_own_batches, makes_own_batches
from lockstep.data.partition import WindowPlan, apportion
from lockstep.data.sampler import Drawn, OwnShare, order_of, own_generator
from lockstep.data.source import (
    Gather,
    Indexed,
    LoaderSource,
    Measure,
    Ordered,
    Reshare,
    Sampling,
    SourceSpec,
    holders,
    length_of,
    of_all_ranks,
    read_first,
    skip,
)
from lockstep.data.stream import Stream
from lockstep.data.workers import end_workers
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.rank import warn_once
from lockstep.ground.seed import isolate_rng, random_states, set_random_states

Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]

LENGTHS: dict[str, Callable[[Iterable[int | float]], int | float]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}
"""Function that computes the number of batches from the loaders' lengths, for each mode."""

_END = object()


class CombinedLoader(Iterable[tuple[Any, int, int]]):
    """Loader that combines several loaders. Iterating over it yields (batch, batch_idx, dataloader_idx).

    Args:
        iterables: a dict, list or other nest of loaders; batches have the same structure.
        mode: ``"min_size"`` ends with the shortest loader; ``"max_size"`` ends with the longest, and loaders
            that have ended yield None; ``"max_size_cycle"`` ends with the longest, and the others restart;
            ``"sequential"`` iterates one loader after the other: ``batch`` is a loader's own and
            ``dataloader_idx`` its index.

    Raises:
        ValueError: the mode is unknown.

    Example:
        >>> loader = CombinedLoader({"a": [1, 2, 3], "b": ["x", "y"]}, "max_size_cycle")
        >>> [batch for batch, _, _ in loader][-1]
        {'a': 3, 'b': 'x'}
    """

    def __init__(self, iterables: object, mode: Mode = "min_size") -> None:
        if mode not in LENGTHS:
            raise ValueError(f"CombinedLoader(mode={mode!r}): choose one of {', '.join(LENGTHS)}.")
        self._iterables = iterables
        self._mode = mode
        self._flattened, self._spec = flatten(iterables)
        self._limits: list[int | float] | None = None
        self._iterator: Iterator[tuple[Any, int, int]] | None = None

    @property
    def iterables(self) -> Any:
        """The loaders, in the dict, list or other nest that was passed."""
        return self._iterables

    @property
    def mode(self) -> Mode:
        """The mode that was passed to the constructor."""
        return self._mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders as a flat list. Assign a list of the same length to replace them."""
        return self._flattened

    @flattened.setter
    def flattened(self, loaders: list[Any]) -> None:
        if len(loaders) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.flattened was assigned {len(loaders)} loaders, but it has {len(self._flattened)}: "
                "assign a list of that length."
            )
        self._iterables = tree_unflatten(loaders, self._spec)
        self._flattened = loaders

    @property
    def sampler(self) -> Any:
        """Samplers of the loaders, in the same nest as `iterables`; None for a loader without a sampler."""
        return tree_unflatten([getattr(loader, "sampler", None) for loader in self._flattened], self._spec)

    @property
    def batch_sampler(self) -> Any:
        """Batch samplers of the loaders, in the same nest as `iterables`; None for a loader without a batch sampler."""
        found = [getattr(loader, "batch_sampler", None) for loader in self._flattened]
        return tree_unflatten(found, self._spec)

    @property
    def limits(self) -> list[int | float] | None:
        """Maximum number of batches of each loader. Assigning a single number sets the limit of every loader."""
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, int | float):
            limits = [limits] * len(self._flattened)
        elif limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.limits was assigned {len(limits)} numbers for {len(self._flattened)} loaders: assign "
                "one number for each loader, or a single number for all."
            )
        self._limits = limits

    def __iter__(self) -> CombinedLoader:
        self._iterator = self._walk()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._iterator is None:
            raise RuntimeError("Call iter() on the CombinedLoader before next().")
        return next(self._iterator)

    def __len__(self) -> int:
        if not self._flattened:
            return 0
        lengths = [math.inf if (n := length_of(loader)) is None else n for loader in self._flattened]
        length = LENGTHS[self._mode](map(min, lengths, self._limits or itertools.repeat(math.inf)))
        if math.isinf(length):
            raise TypeError(
                f"This CombinedLoader (mode={self._mode!r}) has no length, because one of its loaders has none "
                "(no `__len__`)."
            )
        return int(length)

    def reset(self) -> None:
        """End the current iteration, and stop persistent workers of the loaders."""
        self._iterator = None
        for loader in self._flattened:
            end_workers(loader)

    def _walk(self) -> Iterator[tuple[Any, int, int]]:
        openers = [self._opener(number) for number in range(len(self._flattened))]
        if self._mode == "sequential":
            for number, opener in enumerate(openers):
                for batch_idx, batch in enumerate(opener(0)):
                    yield batch, batch_idx, number
            return
        if not openers:
            return
        for batch_idx, row in enumerate(rows(openers, self._mode)):
            yield tree_unflatten(row, self._spec), batch_idx, 0

    def _opener(self, number: int) -> Callable[[int], Iterator[Any]]:
        loader = self._flattened[number]
        limit = math.inf if self._limits is None else self._limits[number]
        if math.isinf(limit):
            return lambda turn: iter(loader)
        return lambda turn: itertools.islice(loader, int(limit))


def rows(
    openers: Sequence[Callable[[int], Iterator[Any]]], mode: str, turns: Sequence[int] | None = None
) -> Iterator[list[Any]]:
    """Yield lists with one batch from each of several iterators. The mode ``"sequential"`` is not supported.

    The iterators are opened when this function is called, not at the first item.

    Args:
        openers: functions that open one iterator each, given the number of passes that have ended.
        mode: decides when to end, and what an iterator yields after its end.
        turns: number of passes of each iterator that have already ended; default: 0.
    """
    turns = list(turns or [0] * len(openers))
    # All are opened before the first row, so that the workers of all loaders start now.
    iterators = [opener(turn) for opener, turn in zip(openers, turns, strict=True)]
    return _drawn_from(iterators, openers, mode, turns)


def _drawn_from(
    iterators: list[Iterator[Any]], openers: Sequence[Callable[[int], Iterator[Any]]], mode: str, turns: list[int]
) -> Iterator[list[Any]]:
    while iterators:
        row = [next(iterator, _END) for iterator in iterators]
        ended = [item is _END for item in row]
        turns = [count + is_over for count, is_over in zip(turns, ended, strict=True)]
        if {"min_size": any(ended), "max_size": all(ended), "max_size_cycle": all(turns)}[mode]:
            return
        for number in itertools.compress(range(len(row)), ended):
            row[number] = None
            if mode == "max_size_cycle":
                iterators[number] = openers[number](turns[number])
                row[number] = next(iterators[number], _END)
                if row[number] is _END:
                    return  # an empty loader: there is nothing to cycle through
        yield row


def flatten(loaders: object) -> tuple[list[Any], TreeSpec]:
    """Return (list of the loaders in a nest of dicts and lists, tree spec that rebuilds the nest).

    A list counts as a loader, not as a nest, if its items are batches: tensors, objects that cannot be iterated,
    arrays, or tuples or dicts that contain only tensors, arrays, strings and numbers.
    """
    return tree_flatten(loaders, is_leaf=_is_list_of_batches)


def _is_list_of_batches(loaders: object) -> bool:
    if not isinstance(loaders, list | tuple):
        return False
    return any(not hasattr(item, "__iter__") or (not isinstance(item, list) and _is_batch(item)) for item in loaders)


def _is_batch(item: object) -> bool:
    """Return True if the item must be a batch because it contains nothing that could be a loader."""
    if isinstance(item, Mapping | list | tuple):
        parts = list(item.values() if isinstance(item, Mapping) else item)
        return bool(parts) and all(map(_is_batch, parts))
    return isinstance(item, Tensor | str | bytes | int | float | None) or hasattr(item, "__array__")


# -- the sources of loaders ----------------------------------------------------------------------------------


def unpack(returned: object, mode: str) -> tuple[list[Any], TreeSpec | None, str]:
    """Return (list of loaders, tree spec of their nest, mode) for a value that a dataloader hook returned.

    The spec describes the nest of the loaders; it is None for a single loader that is not in a container.
    """
    if isinstance(returned, CombinedLoader):
        return returned.flattened, flatten(returned.iterables)[1], returned.mode
    loaders, nest = flatten(returned)
    bare = len(loaders) == 1 and loaders[0] is returned
    return loaders, None if bare else nest, mode


def make_sources(
    loaders: list[Any], spec: SourceSpec, overfit: bool = False
) -> tuple[list[LoaderSource], list[Any], list[str]]:
    """Return (sources, loaders, names for messages) of a stage: three lists with an item for each loader.

    With ``overfit``, the returned loaders read their data sets in order instead of shuffling.
    """
    hook, several = f"{spec.stage}_dataloader", len(loaders) > 1
    names = [f"{hook}[{number}]" if several else hook for number in range(len(loaders))]
    if overfit:
        loaders = list(map(in_order, loaders, names))
    parts = enumerate(zip(loaders, names, strict=True))
    return [make_source(loader, spec, number, name) for number, (loader, name) in parts], loaders, names


def make_source(loader: Iterable[Any], spec: SourceSpec, number: int, name: str) -> LoaderSource:
    """Create the source that reads a loader or another iterable of batches. The loader's kind determines its class.

    Args:
        loader: the value that a dataloader hook returned, or one loader from it.
        spec: settings that all sources of the stage share.
        number: index of the loader in the stage; the loaders of a stage are shuffled independently.
        name: name of the loader in messages.

    Raises:
        MisconfigurationException: the loader has a `DistributedSampler` that was made for another rank, it makes its
            own batches and every rank would read all of them, or its batches cannot be divided by the requested shares.
        WrongType: the loader cannot be iterated.
    """
    if not hasattr(type(loader), "__iter__") and not hasattr(type(loader), "__getitem__"):
        raise WrongType(
            f"{name} is {loader!r:.100}, a {type(loader).__name__}, which cannot be iterated: return or pass a "
            "DataLoader or another iterable of batches."
        )
    # It has `__getitem__`, so Python iterates it, sample by sample.
    if isinstance(loader, Dataset) and not hasattr(type(loader), "__iter__"):
        warn_once(
            f"{name} is a {type(loader).__name__}, which is a data set, so each of its samples is used as a batch. To "
            "make batches, pass DataLoader(data_set, batch_size=...)."
        )
    measure = Measure(name, spec.stage)
    # The index is part of the key: loaders of a stage are shuffled independently.
    key = make_key(spec.seed, spec.stage, number)
    if not isinstance(loader, DataLoader) or not spec.distribute:
        if spec.distribute and spec.size > 1:
            warn_once(READ_BY_ALL.format(name=name, kind=type(loader).__name__, size=spec.size))
        made: LoaderSource = Untouched(loader, spec, measure)
    elif (reason := makes_own_batches(loader)) is not None:
        check_own_batches(loader, spec, name, reason)
        made = Untouched(loader, spec, measure)
    elif isinstance(loader.dataset, IterableDataset):
        made = Stream(loader, spec, key, measure)
    elif spec.by_process:
        made = Untouched(loader, spec, measure)
    else:
        made = make_indexed(loader, spec, key, name)
    if spec.shares or spec.reshared:
        check_shares(made, spec, name)
    return made


READ_BY_ALL = (
    "{name} is a {kind}, not a DataLoader: lockstep cannot split its samples among the ranks, so each of the {size} "
    "ranks reads all of them, and every sample is seen {size} times unless the iterable shards itself by rank. Pass a "
    "DataLoader, or set Trainer(use_distributed_sampler=False) if each rank has its own data."
)


def make_indexed(loader: DataLoader[Any], spec: SourceSpec, key: int, name: str) -> Indexed:
    """Create the source for a loader over a map-style data set. The loader's sampler determines its class."""
    sampling = Sampling.of(loader, spec, key, name)
    sampler = sampling.sampler
    if sampling.batch_size is not None:
        own = own_generator(sampler)
        # Ranks may have seeded their generators differently; rank 0's seed counts.
        own_key = key if own is None else make_key(spec.agreed(own.initial_seed()), "generator")
        order = order_of(sampler, seed=spec.seed, key=own_key, torch_order=spec.torch_order)
        if order is not None:
            return Ordered(sampling, order)
    distributed = next((each for each in holders(sampler) if isinstance(each, DistributedSampler)), None)
    if distributed is None:
        return Drawn(sampling)
    check_own_share(distributed, spec, name)
    return OwnShare(sampling)


def checked_shares(shares: Sequence[float] | None, count: int, gather: Gather | None) -> tuple[float, ...]:
    """Check the replicas' shares of a global batch. Return the shares as a tuple, which is empty if all are equal.

    Collective if ``gather`` is not None.

    Raises:
        MisconfigurationException: the shares are not ``count`` positive numbers, or differ between ranks.
    """
    if shares is None:
        return ()
    shares = tuple(share if isinstance(share, int) else float(share) for share in shares)  # NumPy's numbers, too
    if len(shares) != count or not all(0 < share < math.inf for share in shares):
        raise MisconfigurationException(
            f"shares={shares!r} is not a list of {count} positive numbers: pass one for each replica."
        )
    if gather is not None:
        of_ranks = gather(torch.tensor(shares, dtype=torch.float64))
        if not bool((of_ranks == of_ranks[0]).all()):
            raise MisconfigurationException(
                f"shares={shares!r} differs between the ranks ({of_ranks.tolist()}), so some samples would be seen "
                "twice and others never. Compute the shares on one rank and broadcast them."
            )
    # Equal shares use the faster even division.
    return shares if len(set(shares)) > 1 else ()


def check_shares(source: LoaderSource, spec: SourceSpec, name: str) -> None:
    """Raise an error if the batches of a loader cannot be divided among the replicas by their shares.

    Raises:
        MisconfigurationException: the loader yields ready-made batches, or a replica would get no sample.
    """
    if not source.divisible:
        flag, else_do = f"shares={spec.shares}", "use equal shares"
        if spec.reshared:
            flag, else_do = "Trainer(balance=True)", "omit `balance`"
        raise MisconfigurationException(
            f"{flag}: {name} yields ready-made batches, which lockstep cannot divide unevenly among the ranks. Pass a "
            "DataLoader over a map-style data set, with a batch_size and without a DistributedSampler or a batch "
            f"sampler, and keep Trainer(use_distributed_sampler=True); or {else_do}."
        )
    if not spec.shares:
        return
    samples = source.batch * spec.size
    parts = apportion(samples, spec.size, spec.shares)
    if 0 in parts:
        raise MisconfigurationException(
            f"shares={spec.shares}: replica {parts.index(0)} gets no sample from a global batch of {name}, which has "
            f"{samples} samples (batch_size={source.batch} x {spec.size}): use a larger batch_size or a larger share."
        )


def check_own_share(sampler: DistributedSampler[Any], spec: SourceSpec, name: str) -> None:
    """Raise an error if a `DistributedSampler` was made for another rank or another number of ranks."""
    if (sampler.rank, sampler.num_replicas) != (spec.rank, spec.size):
        raise MisconfigurationException(
            f"{name} has a DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}), but "
            f"this is rank {spec.rank} of {spec.size}. Remove the sampler, because lockstep splits the data among the "
            "ranks itself; or set Trainer(use_distributed_sampler=False) to use the loader unchanged."
        )


# -- loaders in parallel --------------------------------------------------------------------------------------


class RowWeight(float):
    """Weight of a micro-batch with parts from several loaders, which is the maximum of the parts' weights.

    Attributes:
        parts: the weight of each part.
    """

    parts: tuple[float, ...]

    @classmethod
    def of(cls, parts: Iterable[float]) -> RowWeight:
        """Create the weight of a micro-batch from the weights of its parts."""
        known = tuple(parts)
        made = cls(max(known))
        made.parts = known
        return made


class Mixed(LoaderSource):
    """Source that combines the micro-batches of several sources. The mode ``"sequential"`` is not supported.

    A micro-batch has the weight of its heaviest part. A part is None on a rank that has no samples of it.

    Args:
        parts: the sources.
        nest: the structure of their batches.
        mode: ``"min_size"``, ``"max_size"`` or ``"max_size_cycle"``.
        limits: maximum number of micro-batches of each part's pass.
    """

    def __init__(
        self, parts: list[LoaderSource], nest: TreeSpec, mode: str, limits: Sequence[int | float] | None = None
    ) -> None:
        self._parts = parts
        self.nest = nest
        self._mode = mode
        self._limits = limits or [math.inf] * len(parts)
        self.rank = parts[0].rank
        self.pads = True  # each part does
        self._measure()
        self.fixed = all(part.fixed for part in parts)
        self.flexible = all(part.flexible for part in parts)
        # A user's sampler that restarts runs ahead of the loader, and its passes overlap.
        self.ahead = self.fixed or (mode != "max_size_cycle" and all(part.ahead for part in parts))
        self.batch = max(part.batch for part in parts)
        # Resume by reading the pass again: the order of some parts depends on the process' random numbers, or the
        # start of a later pass is only found by reading.
        self._rereads = any(isinstance(part, Untouched) for part in parts) or (
            mode == "max_size_cycle" and any(map(math.isinf, self._lengths))
        )
        self._states: dict[str, Any] | None = None  # random states at the start of the pass
        self._own_states: list[Any] = []  # states of the loaders' own generators
        self._epoch = 0  # of the pass
        self._resume: dict[str, Any] | None = None

    def _measure(self) -> None:
        parts = self._parts
        self._lengths = [min(part.length, limit) for part, limit in zip(parts, self._limits, strict=True)]
        self.length = LENGTHS[self._mode](self._lengths)
        # parts that are divided by weight are rounded independently
        uneven = any(part.uneven for part in parts)
        self.even = 0 if uneven else int(min(map(min, [part.even for part in parts], self._lengths)))

    def planned(self, ranks: int) -> int | float:
        lengths = [part.planned(ranks) for part in self._parts]
        return LENGTHS[self._mode](map(min, lengths, self._limits))

    def repartition(self, plan: WindowPlan) -> None:
        for part in self._parts:  # parts continue by the number of micro-batches
            part.repartition(replace(plan, number=0, position=None))
            if isinstance(part, Stream):
                part.moved = plan.number > 0
        self._measure()

    def use_shares(self, shares: Sequence[Reshare]) -> None:
        # Its micro-batches are numbered differently, so one share holds for a whole pass.
        for part in self._parts:
            part.use_shares([(0, shares[-1][1])])

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        walk = self._rows([part.open for part in self._parts], epoch, start, stop)
        return (tree_unflatten(row, self.nest) for row in walk)

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        walk = self._rows([part.weighed for part in self._parts], epoch, start, stop)
        return map(self._weighed_row, walk)

    def _weighed_row(self, row: list[Any]) -> tuple[Any, float]:
        weight = RowWeight.of(0.0 if item is None else item[1] for item in row)
        some = bool(weight)  # else it is a padding batch, or no rank has samples
        kept = [None if item is None or (some and not item[1]) else item[0] for item in row]
        return tree_unflatten(kept, self.nest), weight

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
            # A shorter part restarts: its micro-batches are numbered within its own pass.
            local = number % int(length) if self._mode == "max_size_cycle" else number
            found.append(part.weights(local) if local < length and part.has(local) else None)
        size = max(len(weights) for weights in found if weights is not None)
        return [[0.0] * size if weights is None else weights for weights in found]

    def without(self, batch: object, parts: Sequence[float]) -> Any:
        leaves = self.nest.flatten_up_to(batch)
        return tree_unflatten([leaf if part else None for leaf, part in zip(leaves, parts, strict=True)], self.nest)

    def leaves(self) -> list[LoaderSource]:
        return [leaf for part in self._parts for leaf in part.leaves()]

    def state_dict(self) -> dict[str, Any]:
        if self._resume is not None:
            return self._resume
        states: list[dict[str, Any]] = []
        for part in self._parts:
            if not self._rereads and self._mode != "max_size_cycle":
                states.append(part.state_dict())
            elif isinstance(part, (Untouched, Stream)):  # read again; their state does not count restarts
                states.append({})
            else:
                states.append(of_all_ranks(part.state_dict()))
        found: dict[str, Any] = {"parts": states} if any(states) else {}
        if self._rereads and self._states is not None:
            now = [part.generator_states() for part in self._parts]
            found |= {"random": self._states, "own": self._own_states, "now": now, "epoch": self._epoch}
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
        """Yield lists with one batch from each part, starting with micro-batch ``start``."""
        cycles = self._mode == "max_size_cycle"
        begin = 0 if self._rereads else start
        begins = [divmod(begin, int(length)) if cycles and begin else (0, begin) for length in self._lengths]

        def opener(number: int) -> Callable[[int], Iterator[Any]]:
            first_turn, first_start = begins[number]
            limit = min(self._limits[number], stop)

            def open_pass(turn: int) -> Iterator[Any]:
                at = first_start if turn == first_turn else 0
                batches = open_part[number](epoch, turn, at, limit)
                return batches if math.isinf(limit) else itertools.islice(batches, max(0, int(limit) - at))

            return open_pass

        openers = [opener(number) for number in range(len(self._parts))]
        opened = partial(rows, openers, self._mode, [turn for turn, _ in begins])
        return self._reread(opened, epoch, start) if self._rereads else opened()

    def _reread(self, opened: Callable[[], Iterator[list[Any]]], epoch: int, start: int) -> Iterator[list[Any]]:
        """Read a pass again with a checkpoint's random states, and skip its first ``start`` micro-batches."""
        resume, self._resume = self._resume or {}, None
        self._epoch = epoch
        # Earlier versions did not save the epoch.
        same = resume.get("epoch", epoch if start else None) == epoch
        # The checkpoint is of an earlier epoch, or there is none: the pass starts with the current states.
        if not (resume and same):
            self._set_own_states(resume.get("now", []))
            self._states = random_states(include_cuda=False)
            self._own_states = [part.generator_states() for part in self._parts]
            return skip(opened(), start)
        self._states, self._own_states = resume["random"], resume.get("own", [])
        self._set_own_states(self._own_states)
        with isolate_rng(include_cuda=False):
            set_random_states(resume["random"])
            return skip(opened(), start) if start else read_first(opened())

    def _set_own_states(self, states: Sequence[Any]) -> None:
        for part, of_part in zip(self._parts, states, strict=False):
            part.set_generator_states(of_part)
