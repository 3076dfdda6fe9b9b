"""Observer of DataLoaders: saves the samples that the ranks read, and later feeds them to the single process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_convert
from torch.utils.data.distributed import DistributedSampler

from lockstep.extensions.verify.float64 import widen
from lockstep.extensions.verify.nudge import NUDGED, move_batch
from lockstep.extensions.verify.processes import Ending
from lockstep.extensions.verify.recordings import Event, RankRecording
from lockstep.extensions.verify.settings import call_lines, is_user_code, location, short, stack
from lockstep.extensions.verify.watch import Stop, Watch, before_each_call, patch

DRAWS = "draws"
"""Kind of the event for a step that draws random numbers from Python's or NumPy's generator."""

DEDUPLICATED = "deduplicated"
"""Override that makes a loader give a sample of several ranks only once, for example ``deduplicated 1`` for loader 1.
"""
SPLIT = "split"
"""Override that makes a loader give the ranks' batches one after another, for example ``split 1`` for loader 1."""

_EVALUATED = 8
"""Number of first batches, and of last batches, that an evaluation after all steps reads."""
_NAME = "batch-{}-{}-{{}}.pt"
"""File of a batch, by the numbers of its loader and iteration; its own number is filled in later."""
ORDER = 100_000
"""Maximum number of samples of an epoch's order that are recorded."""

Collate = Callable[[], Any]
"""Collates the samples of a batch."""
Fetch = Callable[[], list[Any] | None]
"""Reads the samples of a batch, and returns None at the end of the data."""


def fingerprint(sample: object) -> str:
    """Return a hash of a sample's content as 16 hexadecimal digits, or "" if it cannot be computed."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        _digest(sample, digest.update)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return ""
    return digest.hexdigest()


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor):
        # NumPy has no bfloat16, so that the bytes are read
        update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            update(str(key).encode())
            _digest(value[key], update)
    elif isinstance(value, list | tuple):
        for each in value:
            _digest(each, update)
    else:
        update(pickle.dumps(value))


@dataclass
class KnownLoader:
    """Record of a DataLoader that the script created, with the source lines that created it.

    Attributes:
        loader: the loader; the reference keeps another one from getting its id.
        place: number of loaders that were created before it.
        lines: lines of the script that created it; empty for a copy of another loader.
        iterated_at: number of loaders that existed when it was last iterated.
    """

    loader: DataLoader[Any]
    place: int
    lines: tuple[str, ...] = ()
    iterated_at: int = 0


class Loaders:
    """Observer that replaces the iteration of every DataLoader: ranks save their samples, one process replays them.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._known: dict[int, KnownLoader] = {}  # by the id of a loader
        self._numbered: list[KnownLoader] = []  # by number, the newest loader that has it
        self._created: dict[int, str] = {}  # lines that created DistributedSamplers and Subsets, by id
        self._iterations: Counter[int] = Counter()  # iterations that have started, by number
        self._training: set[int] = set()
        # of the ranks whose samples this process is fed
        self._lengths = _lengths_of(watch.events_of_rank_0("length"), watch.events_of_rank_0("iteration"))
        self._dispatched = _batches_per_backward(watch)
        self._started = {(each["loader"], each["iteration"]) for each in watch.events_of_rank_0("batch", "iterated")}

    def install(self) -> None:
        """Replace methods of torch's DataLoader by observed versions."""
        original, length = DataLoader.__init__, DataLoader.__len__

        @functools.wraps(original)  # Lightning reads its signature
        def init(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            self._known.setdefault(id(loader), KnownLoader(loader, len(self._known), tuple(stack())))
            original(loader, *args, **kwargs)

        def len_(loader: DataLoader[Any]) -> int:
            known = self._known.get(id(loader))
            if known is not None and known.place in self._lengths:
                # one process makes as many batches as a rank, or those of all ranks
                times = len(self.watch.settings.feed) if self.watch.settings.rank_by_rank else 1
                return self._lengths[known.place] * times
            found = length(loader)
            if known is not None and not self.watch.settings.is_replay:
                self.watch.journal.record("length", loader=known.place, length=found, data=id(loader.dataset))
            return found

        for kind in (DistributedSampler, Subset):
            before_each_call(kind, "__init__", lambda own, _: self._created.update({id(own): call_lines(stack())}))
        patch(DataLoader, "__init__", init)
        patch(DataLoader, "__len__", len_)
        patch(DataLoader, "__iter__", lambda loader: self._iterate(loader))

    def _number(self, loader: DataLoader[Any]) -> int:
        """Return a loader's number. Loaders are numbered in the order in which they are first iterated.

        Loaders that a script creates for each epoch share one number: the same lines create them, one after another.
        """
        known = self._known.get(id(loader)) or KnownLoader(loader, len(self._known))
        self._known[id(loader)] = known
        for number, other in enumerate(self._numbered):
            if other is known or (known.lines and other.lines == known.lines and other.iterated_at <= known.place):
                self._numbered[number] = known
                break
        else:
            number = len(self._numbered)
            self._numbered.append(known)
        known.iterated_at = len(self._known)
        return number

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self.watch.has_iterated_loader |= torch.is_grad_enabled()
        number = self._number(loader)
        iteration = self._iterations[number]
        settings = self.watch.settings
        # one process must not continue to an epoch that the ranks have not started
        if settings.is_replay and iteration > 0 and (number, iteration) not in self._started:
            raise Stop
        is_over = self.watch.is_done or 0 < settings.max_epochs <= iteration or self.watch.has_join_ended
        if is_over and number in self._training:
            # the order of this epoch shows whether the sampler shuffles again, unless the script handles the early end
            # of the epoch (PyTorch-Ignite reads on, in the same epoch)
            is_new = not isinstance(sys.exc_info()[1], StopIteration)
            if is_new and not settings.is_replay and not isinstance(loader.dataset, IterableDataset):
                with self.watch.inside_loader():
                    self._describe(loader, number, iteration)
                    order = itertools.islice(_indexed(loader), ORDER)
                    indices = [index for found, _ in order for index in found or ()][:ORDER]
                    self.watch.journal.record("order", loader=number, iteration=iteration, indices=indices)
            raise Stop
        self._iterations[number] += 1
        if settings.is_replay:
            self.watch.journal.record("size", loader=number, size=_length(loader.dataset))
            return self._track(number, self._replay_batches(loader, number, iteration))
        self._describe(loader, number, iteration)
        return self._track(number, self._record_batches(loader, number, iteration))

    def _track(self, number: int, batches: Generator[Collate]) -> Iterator[Any]:
        """Yield a loader's batches. End a training epoch early if the run or the epoch has made the requested steps."""
        watch, settings = self.watch, self.watch.settings
        before, iteration = watch.steps, self._iterations[number] - 1
        for at in itertools.count():
            if watch.steps > before:
                self._training.add(number)
                if watch.is_done:
                    watch.end_join()
                if watch.is_done or 0 < settings.epoch_steps <= watch.steps - before:
                    # the epoch ends instead of the script, so that evaluations and checkpoints after it still run
                    batches.close()
                    watch.drains = watch.is_done
                    return
            try:
                with watch.inside_loader():
                    collate = next(batches)
            except StopIteration:
                return
            watch.start_training()
            states = self._share_randomness(f"random-{number}-{iteration}-{at}.pkl")
            # outside of the loader: random numbers that a collate_fn draws (masked tokens) are shared as the step's are
            watch.collates = True
            batch = collate()
            watch.collates = False
            if NUDGED in settings.overrides:
                batch = move_batch(batch)
            yield tree_map(widen, batch) if settings.float64 else batch
            # the generators have moved while the script made its step
            if states != self._random_states():
                watch.journal.record_once(DRAWS, where=location())

    def _share_randomness(self, name: str) -> bytes:
        """On a rank, save the states of Python's and NumPy's generators. In the single process, restore saved states.

        One process uses the states of the only rank whose samples it is fed, or of rank 0. Return the states.
        """
        settings = self.watch.settings
        if settings.is_replay:
            path = Path(settings.feed[0] if len(settings.feed) == 1 else settings.folder_of_ranks / "rank-0") / name
            if path.exists():
                python, numpy, own = pickle.loads(path.read_bytes())
                random.setstate(python)
                np.random.set_state(numpy)
                for generator, state in zip(self.watch.living_generators(), own, strict=False):
                    if isinstance(generator, random.Random):
                        generator.setstate(state)
                    else:
                        generator.bit_generator.state = state
        states = self._random_states()
        if not settings.is_replay:
            (self.watch.journal.folder / name).write_bytes(states)
        return states

    def _random_states(self) -> bytes:
        """Return the pickled states of Python's and NumPy's global generators, and of those that the script created."""
        own = [
            each.getstate() if isinstance(each, random.Random) else each.bit_generator.state
            for each in self.watch.living_generators()
        ]
        return pickle.dumps((random.getstate(), np.random.get_state(), own))

    # -- recording

    def _describe(self, loader: DataLoader[Any], number: int, iteration: int) -> None:
        """Record, before an iteration, the settings that determine a loader's samples and their order."""
        dataset, sampler = loader.dataset, loader.sampler
        is_sized = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
        batches = loader.batch_sampler if loader.batch_sampler is not None else sampler
        created = call_lines(self._known[id(loader)].lines or stack())
        if isinstance(dataset, IterableDataset) and is_user_code((code := type(dataset).__iter__.__code__).co_filename):
            created = f"{short(code.co_filename)}:{code.co_firstlineno}, read at {created}"
        lines = [self._created.get(id(each)) for each in (dataset, sampler)]
        whole: Any = dataset
        while isinstance(whole, Subset):
            whole = whole.dataset
        self.watch.journal.record(
            "iteration",
            loader=number,
            iteration=iteration,
            dataset=type(dataset).__name__,
            size=_length(dataset) if is_sized else None,
            cut=isinstance(dataset, Subset),
            sampler=type(sampler if type(batches) is BatchSampler else batches).__name__,
            batch_size=loader.batch_size,
            replacement=bool(getattr(sampler, "replacement", False)),
            shared_out=isinstance(sampler, DistributedSampler),
            shuffles=bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler")),
            epoch=getattr(sampler, "epoch", None),
            share=[getattr(sampler, name, None) for name in ("rank", "num_replicas", "seed")],
            place=self._known[id(loader)].place,
            length=_length(batches),
            data=id(dataset),
            probe=_probe(whole) if is_sized and iteration == 0 else None,
            where=call_lines(stack()),
            created=" and ".join(filter(None, lines)) or created,
        )

    def _record_batches(self, loader: DataLoader[Any], number: int, iteration: int) -> Generator[Collate]:
        """Yield the batches of a loader on a rank, and save their samples for the run in a single process."""
        # torch's iterators draw their seed so; without it, later random numbers would be others
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        journal = self.watch.journal
        is_stream = isinstance(loader.dataset, IterableDataset)
        source = _stream(loader) if is_stream else _indexed(loader)
        for at in itertools.count():
            if at == _EVALUATED and self.watch.is_done and not is_stream:
                # the end of an evaluation is where samplers repeat samples
                source = iter(list(source)[-_EVALUATED:])
            found = next(source, None)
            samples = None if found is None else found[1]()
            if found is None or samples is None:
                journal.record("iterated", loader=number, iteration=iteration, batches=at)
                return
            whole = loader.batch_sampler is None and loader.batch_size is None
            (path,) = self.watch.files(_NAME.format(number, iteration), at)
            torch.save({"samples": samples, "whole": whole, "indices": found[0]}, path)
            journal.record(
                "batch",
                loader=number,
                iteration=iteration,
                batch=at,
                indices=found[0],
                prints=[fingerprint(sample) for sample in samples],
                step=self.watch.steps,
                grad=torch.is_grad_enabled(),
            )
            try:
                yield functools.partial(loader.collate_fn, samples[0] if whole else samples)
            except GeneratorExit:
                # the epoch ends early; its remaining order still shows which samples ranks share
                with contextlib.suppress(Exception):  # a user's sampler may raise anything
                    rest = [index for indices, _ in itertools.islice(source, ORDER) for index in indices or ()]
                    journal.record("rest", loader=number, iteration=iteration, indices=rest[:ORDER])
                raise

    # -- replay

    def _replay_batches(self, loader: DataLoader[Any], number: int, iteration: int) -> Generator[Collate]:
        """Yield the batches that the ranks saved, either joined across ranks or one rank after another."""
        settings = self.watch.settings
        seen: set[object] = set()
        for at in itertools.count():
            name = _NAME.format(number, iteration)
            paths = self.watch.files(name, at)
            if number in self._dispatched:
                group = self._dispatched[number]
                paths = [self.watch.files(name, at * group + each, False)[0] for each in range(group)]
            parts = [torch.load(path, weights_only=False) for path in paths if path.exists()]
            if not parts:
                return
            if f"{DEDUPLICATED} {number}" in settings.overrides:
                for part in parts:
                    # different samples may have equal contents
                    keys = part["indices"] or [fingerprint(sample) for sample in part["samples"]]
                    part["samples"] = [s for s, key in zip(part["samples"], keys, strict=True) if key not in seen]
                    seen.update(keys)
                # an empty batch would fail in most collate functions
                parts = [part for part in parts if part["samples"]] or parts[:1]
            is_split = f"{SPLIT} {number}" in settings.overrides
            for own in [[part] for part in parts] if is_split else [parts]:
                self.watch.chunks = tuple(len(part["samples"]) for part in own)
                if number in self._dispatched:
                    number_of_samples, ranks = sum(self.watch.chunks), len(settings.feed)
                    ends = [number_of_samples * rank // ranks for rank in range(ranks + 1)]
                    self.watch.chunks = tuple(end - start for start, end in itertools.pairwise(ends))
                if own[0]["whole"]:
                    yield functools.partial(self._join, loader.collate_fn or default_convert, own)
                else:
                    yield functools.partial(loader.collate_fn, [sample for part in own for sample in part["samples"]])

    def _join(self, convert: Callable[[Any], Any], parts: list[dict[str, Any]]) -> Any:
        """Return the concatenated batches of the ranks, from a data set that yields ready-made batches."""
        batches = [convert(part["samples"][0]) for part in parts]
        self.watch.chunks = tuple(
            next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
            for batch in batches
        )
        return join_batches(batches)


def _batches_per_backward(watch: Watch) -> dict[int, int]:
    """Return how many batches rank 0 reads for each backward from loaders that only rank 0 reads, by their number.

    Such a loader's batches are sent to the other ranks, as Accelerate does with an IterableDataset: either one batch
    that is divided among the ranks, or one for each rank.
    """
    others = [RankRecording(Path(folder), Ending("done")) for folder in watch.settings.feed[1:]]
    read = {event["loader"] for rank in others for event in rank.find("batch")}
    if not others:
        return {}
    found: Counter[int] = Counter()
    backwards = 0
    # between the first two backwards, as batches may be read ahead before the first one
    for event in watch.events_of_rank_0("batch", "backward"):
        backwards += event["kind"] == "backward"
        if backwards == 1 and event["kind"] == "batch" and event["loader"] not in read:
            found[event["loader"]] += 1
    return dict(found)


def _lengths_of(lengths: list[Event], iterations: list[Event]) -> dict[int, int]:
    """Return the lengths that loaders had on rank 0, by their place.

    Accelerate's ``prepare`` replaces a loader by one that reads a rank's share of the same data. Then the first one,
    whose length a script may have read for a schedule, gets the length of the second one: in one process they agree.
    """
    found = {event["loader"]: event["length"] for event in lengths}
    iterated = {event["place"] for event in iterations}
    for each in iterations:
        for event in lengths:
            if event["data"] == each["data"] and event["loader"] not in iterated and each["length"] is not None:
                found[event["loader"]] = each["length"]
    return found


def _probe(dataset: Any) -> str:
    """Return the fingerprint of a data set's first sample. It differs if the ranks have different data sets."""
    # a sample may be drawn: with the same seed on all ranks, and without moving the script's generators
    states = torch.get_rng_state(), random.getstate()
    torch.manual_seed(0)
    random.seed(0)
    try:
        return fingerprint(dataset[0])
    except Exception:  # any error of a user's data set: its iteration will raise it again
        return ""
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])


def join_batches(batches: list[Any]) -> Any:
    """Join batches of the same structure by concatenating corresponding tensors along the first dimension.

    Raises:
        ValueError: the batches differ in structure, or in a value that is not a tensor.
    """
    flat = [tree_flatten(batch) for batch in batches]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError(
            "the ranks' batches differ in structure, so they cannot be joined into one for the single-process run"
        )
    leaves = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        first = parts[0]
        if isinstance(first, Tensor) and first.dim():
            leaves.append(torch.cat(parts))
        elif all(bool(part == first) for part in parts):
            leaves.append(first)
        else:
            raise ValueError(
                f"the ranks' batches have different values of type {type(first).__name__}, so they cannot be joined "
                "into one for the single-process run. Let the data set return tensors with one entry for each sample"
            )
    return tree_unflatten(leaves, flat[0][1])


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


def _indexed(loader: DataLoader[Any]) -> Iterator[tuple[list[int] | None, Fetch]]:
    """Yield (indices, function that reads the samples) for each batch of a map-style data set."""
    dataset: Any = loader.dataset
    batches: Iterable[list[Any]] | None = loader.batch_sampler
    # torch fetches a whole batch by __getitems__, but without a batch sampler only single samples
    has_getitems = batches is not None and bool(getattr(dataset, "__getitems__", None))
    fetch = dataset.__getitems__ if has_getitems else lambda indices: [dataset[index] for index in indices]
    for indices in batches if batches is not None else ([index] for index in loader.sampler):
        yield _plain(indices, dataset), functools.partial(fetch, indices)


def _plain(indices: Any, dataset: object) -> list[int] | None:
    """Convert indices of a data set or Subset to integers in the full data set; None if they are not integers."""
    try:
        found = [int(index) for index in indices]
        while isinstance(dataset, Subset):
            found = [int(dataset.indices[index]) for index in found]
            dataset = dataset.dataset
    except (TypeError, ValueError, IndexError):
        return None
    return found


def _stream(loader: DataLoader[Any]) -> Iterator[tuple[list[int] | None, Fetch]]:
    """Yield (None, function that reads the samples) for each batch of an iterable data set."""
    samples = iter(loader.dataset)
    size = loader.batch_size

    def fetch() -> list[Any] | None:
        found = list(itertools.islice(samples, size or 1))
        if not found or (loader.drop_last and size is not None and len(found) < size):
            return None
        return found

    while True:
        yield None, fetch
