"""Source of batches from a loader that is used unchanged, and unshuffled loaders for ``overfit_batches``.

Used unchanged are iterables that are not DataLoaders, loaders that make batches in their own way, and all loaders if
``use_distributed_sampler`` is False.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lockstep.data.counting import LoaderOrder
from lockstep.data.partition import Partition
from lockstep.data.passes import Passes
from lockstep.data.randomness import HeldGenerator, generators_of
from lockstep.data.sampler import DrawnOrder, WatchedSampler
from lockstep.data.source import (
    LoaderSource,
    Measure,
    Sampling,
    SourceSpec,
    Stateful,
    call_set_epoch,
    copy_loader,
    holders,
    length_of,
    read_first,
    recording,
    skip,
    stateful,
    states_of,
)
from lockstep.data.workers import end_workers, opened
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.seed import isolate_rng, random_states, set_random_states


class Untouched(LoaderSource):
    """Source of batches from a loader that lockstep uses unchanged. The loader draws from the global random generators.

    The source's state contains the random states at the start of the pass, including those of a sampler's own
    generators, so that a resumed run draws the same order. It also contains the current states of these generators, for
    the next pass. For a loader with a ``state_dict``, that state is loaded instead of reading the pass again. Until a
    batch of the pass has been read, that state may still belong to the previous pass, and a resumed run restarts the
    pass. The elements that a user's sampler yields are hashed, and a different order after a resume is an error.

    Args:
        loader: any iterable of batches.
        spec: settings that all sources of the stage share.
        measure: measures the size of a batch if the loader does not know it in advance.
    """

    own = True

    def __init__(self, loader: Iterable[Any], spec: SourceSpec, measure: Measure) -> None:
        self._measure = measure
        self._passes = Passes(loader, measure.name, spec.stage)
        self.rank = spec.rank
        self._loader = loader
        self._size = spec.size
        self._states: dict[str, Any] | None = None
        self._pass: list[int] | None = None
        self._resume: dict[str, Any] = {}
        self._newest: dict[str, Any] = {}  # newest state with the loader's own, perhaps of the previous pass
        self._unread: dict[str, Any] | None = None  # the state until the first batch of the pass was read
        self._stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        length = length_of(loader)
        self.length = math.inf if length is None else length
        self._generators: list[HeldGenerator] = []
        self._samplers: list[Stateful] = []  # those with a `state_dict`
        self._own_states: list[Any] = []  # states of these generators and samplers at the start of the pass
        self._watched: WatchedSampler | None = None
        self._partition: Partition | None = None  # of this rank's samples, as if it were the only rank
        # A plain loader over a map-style data set keeps to its length; other loaders' lengths are not relied upon.
        self._indexed = False
        self._sampling: Sampling | None = None
        if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
            self._indexed = not isinstance(loader.dataset, IterableDataset)
            if self._indexed:
                self._partition = _partition_of(loader)
                # torch itself shuffles an unchanged loader, whatever `order` the run has; checkpoints record that.
                as_torch = replace(spec, torch_order=True)
                self._sampling = Sampling.of(loader, as_torch, 0, measure.name)
            # A loader with a state restores its order itself.
            if self._indexed and not self._stateful:
                self._watch_order(loader, measure.name)
        self.ahead = self.fixed = self._partition is not None
        if self._partition is not None:
            self.even, self.batch, self.rest = self._partition.full, self._partition.batch, self._partition.rest

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        resume, self._resume = self._resume, {}
        announce_epoch(self._loader, epoch)
        self._pass = [epoch, turn]
        if "pass" in resume:
            same = bool(resume["pass"] == self._pass)
        else:  # earlier versions did not save the pass
            same = "loader" in resume or start > 0
        if not (same and "loader" in resume):
            iterator = self._reopen(resume, start) if same and resume else self._open_next(resume, start)
            iterator = iterator if self._indexed else self._passes.watched(iterator)
            return self._reading(iterator) if self._stateful else iterator
        self._newest = self._unread = resume
        cast(Stateful, self._loader).load_state_dict(resume["loader"])
        iterator = opened(self._loader)
        if start < min(stop, self.length):
            return self._reading(iterator)
        next(iterator, None)  # the checkpoint was taken at the end of a pass; this ends it
        return iter(())

    def _open_next(self, resume: dict[str, Any], start: int) -> Iterator[Any]:
        """Start a new pass at batch ``start``. ``resume`` is the saved state of the previous pass, or empty."""
        if "loader" in resume:
            self._end_pass(resume)
        # After a checkpoint of an earlier pass the generators continue from its end.
        self.set_generator_states(resume.get("now", []))
        if self._watched is not None:
            self._watched.order.begin()  # it has drawn nothing until the first read
        self._states = random_states(include_cuda=False)
        self._own_states = self.generator_states()
        self._unread = self._beginning()
        return skip(opened(self._loader), start)

    def _reopen(self, resume: dict[str, Any], start: int) -> Iterator[Any]:
        """Restart the pass in which a checkpoint was saved, with the same random states, at batch ``start``."""
        if resume.get("before"):
            self._end_pass(resume["before"])
        self._states, self._own_states = resume["random"], resume.get("own", [])
        self._unread = self._beginning()
        self.set_generator_states(self._own_states)
        if self._watched is not None:
            self._watched.resume = resume.get("drawn", [])
        with isolate_rng(include_cuda=False):
            set_random_states(self._states)
            iterator = opened(self._loader)
            return skip(iterator, start) if start else read_first(iterator)

    def _end_pass(self, state: dict[str, Any]) -> None:
        """Load the loader's state from an earlier pass, and finish that pass. The next ``iter`` starts a new pass."""
        self._newest = state
        cast(Stateful, self._loader).load_state_dict(state["loader"])
        with isolate_rng(include_cuda=False):
            next(opened(self._loader), None)

    def _beginning(self) -> dict[str, Any]:
        """Return the state at the beginning of the current pass, from which the pass can be read again."""
        found = {"random": self._states, "own": self._own_states, "pass": self._pass}
        return {**found, "before": self._newest} if self._stateful else found

    def _reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        for first in itertools.islice(batches, 1):
            self._unread = None
            yield first
            del first  # else it would stay in memory for the whole pass
        yield from batches

    def generator_states(self) -> list[Any]:
        return [*(held.state() for held in self._generators), *states_of(self._samplers)]

    def set_generator_states(self, states: list[Any]) -> None:
        for held, state in zip(self._generators, states, strict=False):
            held.set_state(state)
        for sampler, state in zip(self._samplers, states[len(self._generators) :], strict=False):
            sampler.load_state_dict(state)

    def _watch_order(self, loader: DataLoader[Any], name: str) -> None:
        """Find the random generators that set the loader's order. Hash the elements that a user's sampler yields."""
        replaced = "sampler" if loader.batch_sampler is None else "batch_sampler"
        found = [holder for sampler in (loader.sampler, loader.batch_sampler) for holder in holders(sampler)]
        self._generators = generators_of([*found, loader])
        if any(type(holder) not in (RandomSampler, SequentialSampler, BatchSampler, NoneType) for holder in found):
            named = next(holder for holder in found[::-1] if type(holder) is not BatchSampler)
            self._watched = WatchedSampler(getattr(loader, replaced), DrawnOrder(named, name))
            self._loader = copy_loader(loader, **{replaced: self._watched})
            self._samplers = stateful({id(holder): holder for holder in found}.values())

    def weights(self, number: int) -> Sequence[float]:
        assert self._partition is not None, "weights() was called ahead of time for ready-made batches"
        # The same on all ranks: if their loaders differ, batches are fetched first and weighed one by one.
        return self._partition.sizes(number) * self._size

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        if self._partition is None:
            return self._measure.each(self.open(epoch, turn, start, stop))
        return super().weighed(epoch, turn, start, stop)

    def position(self, number: int) -> int | None:
        return None if self._partition is None or self._size > 1 else min(self._partition.n, number * self.batch)

    def order(self) -> LoaderOrder:
        if self._sampling is not None:
            return self._sampling.order(-1 if self._partition is None or self._size > 1 else self._partition.n)
        samples = -1 if math.isinf(self.length) or self._size > 1 else int(self.length)
        return LoaderOrder(f"as a {type(self._loader).__name__} gives them", samples)

    def record_indices(self) -> None:
        batches = getattr(self._loader, "batch_sampler", None)
        if isinstance(self._loader, DataLoader) and batches is not None and self._indexed:
            self.recorded = deque()
            self._loader = copy_loader(self._loader, batch_sampler=_RecordedBatches(batches, self.recorded))

    def state_dict(self) -> dict[str, Any]:
        if self._resume:
            return self._resume
        if self._states is None and self._pass is None:
            return {}
        if not self._stateful:
            drawn = {} if self._watched is None else {"drawn": self._watched.order.saved()}
            return {**self._beginning(), "now": self.generator_states(), **drawn}
        if self._unread is not None:
            return self._unread
        self._newest = {"loader": cast(Stateful, self._loader).state_dict(), "pass": self._pass}
        return self._newest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume = state

    def close(self) -> None:
        end_workers(self._loader)


class _RecordedBatches:
    """A wrapper of a user's batch sampler that records each batch of indices that the sampler yields."""

    def __init__(self, batches: Iterable[Any], recorded: deque[list[Any]]) -> None:
        self._batches = batches
        self._recorded = recorded

    def __iter__(self) -> Iterator[Any]:
        self._recorded.clear()  # another pass
        return recording((list(indices) for indices in self._batches), self._recorded)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


def announce_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader's sampler and batch sampler, if they have this method."""
    for attribute in ("sampler", "batch_sampler"):
        for holder in holders(getattr(loader, attribute, None)):
            call_set_epoch(holder, epoch)


def _partition_of(loader: DataLoader[Any]) -> Partition | None:
    """Return the `Partition` by which a rank's own loader divides its samples into batches.

    Return None for a custom batch sampler or a loader without a length.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    count = length_of(batches.sampler)
    return None if count is None else Partition(count, batches.batch_size, 1, batches.drop_last)


def in_order(loader: Iterable[Any], name: str) -> Iterable[Any]:
    """Return a copy of a loader that reads the data set in order, as ``overfit_batches`` requires.

    A ``DistributedSampler`` keeps its share and stops shuffling. Loaders with a custom batch sampler class and
    loaders over iterable data sets are returned unchanged; the batches of the former may depend on the epoch.

    Args:
        loader: any iterable of batches; the user's object is not changed.
        name: name of the loader, for the warning that it no longer shuffles.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = cast("BatchSampler | None", loader.batch_sampler)
    if batches is not None and type(batches) is not BatchSampler:
        rank_zero_warn(
            f"Trainer(overfit_batches=...): {name} has a custom batch sampler, {type(batches).__name__}, which "
            "lockstep cannot replace. Make sure that it yields the same batches in every epoch."
        )
        return loader
    sampler = loader.sampler if batches is None else batches.sampler
    if type(sampler) is SequentialSampler or (batches is None and isinstance(sampler, BatchSampler)):
        return loader
    if isinstance(sampler, DistributedSampler):
        if not sampler.shuffle:
            return loader
        # A copy, since the user may use the sampler elsewhere.
        ordered: Sampler[Any] = copy.copy(sampler)
        ordered.shuffle = False  # type: ignore[attr-defined]
    else:
        ordered = SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # it needs a length only
    rank_zero_warn(
        f"Trainer(overfit_batches=...): {name} shuffles its samples, but overfit_batches reads them in order, so that "
        "all epochs have the same batches."
    )
    if batches is None:
        return copy_loader(loader, sampler=ordered)
    plain = BatchSampler(ordered, batches.batch_size, batches.drop_last)
    return copy_loader(loader, sampler=ordered, batch_sampler=plain)
