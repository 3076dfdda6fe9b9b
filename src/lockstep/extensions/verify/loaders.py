"""What loaders give: written down sample by sample in a run on ranks, and put together for the run of one process."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pickle
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, default_convert
from torch.utils.data.distributed import DistributedSampler

from lockstep.extensions.verify.float64 import widened_tree
from lockstep.extensions.verify.nudge import NUDGED, moved_batch
from lockstep.extensions.verify.settings import location, stack
from lockstep.extensions.verify.watch import Stop, Watch, put

_SHOWN_AFTER = 8
"""Batches from the beginning, and from the end, that an evaluation gets once the steps are made."""

DRAWS = "draws"
"""The kind of event that is noted where a step draws random numbers of Python's or NumPy's."""

_ORDER = 100_000
"""Samples of an epoch's order that are written down."""

Collate = Callable[[], Any]
"""Puts the samples of a batch together."""


def fingerprint(sample: object) -> str:
    """A few letters for the content of a sample; "" where it cannot be read."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        _digest(sample, digest.update)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
        return ""
    return digest.hexdigest()


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor):
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
class Made:
    """A loader that was made.

    Attributes:
        loader: itself, so that no other one gets its id.
        place: among all that were made.
        lines: of the script that made it.
        iterated_at: how many were made when it was iterated last.
    """

    loader: DataLoader[Any]
    place: int
    lines: tuple[str, ...]
    iterated_at: int = 0


class Loaders:
    """Stands in for the iteration of every loader.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._made: dict[int, Made] = {}  # by the id of a loader
        self._numbered: list[Made] = []  # by number, the newest of the loaders that have it
        self._iterations: Counter[int] = Counter()  # by number, those that have begun
        self._training: set[int] = set()
        # of the ranks, whose samples one process is fed
        self._lengths = {event["loader"]: event["length"] for event in watch.of_rank_0("length")}
        self._begun = {(event["loader"], event["iteration"]) for event in watch.of_rank_0("batch", "iterated")}

    def install(self) -> None:
        """Put it in the place of torch's methods."""
        init, length = DataLoader.__init__, DataLoader.__len__

        @functools.wraps(init)  # Lightning reads its signature
        def made(loader: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
            self._made.setdefault(id(loader), Made(loader, len(self._made), tuple(stack())))
            init(loader, *args, **kwargs)

        def len_(loader: DataLoader[Any]) -> int:
            made = self._made.get(id(loader))
            if made is not None and made.place in self._lengths:
                apart = len(self.watch.settings.feed) if self.watch.settings.apart else 1
                return self._lengths[made.place] * apart
            found = length(loader)
            if made is not None and not self.watch.settings.is_replay:
                self.watch.journal.note("length", loader=made.place, length=found)
            return found

        put(DataLoader, "__init__", made)
        put(DataLoader, "__len__", len_)
        put(DataLoader, "__iter__", lambda loader: self._iterate(loader))

    def _number(self, loader: DataLoader[Any]) -> int:
        """A loader's number, in the order of first iterations; one that is made anew for each epoch has one number."""
        made = self._made.get(id(loader)) or Made(loader, len(self._made), (f"a copy {id(loader)}",))
        self._made[id(loader)] = made
        for number, other in enumerate(self._numbered):
            if other is made or (other.lines == made.lines and other.iterated_at <= made.place):
                self._numbered[number] = made
                break
        else:
            number = len(self._numbered)
            self._numbered.append(made)
        made.iterated_at = len(self._made)
        return number

    def _iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        number = self._number(loader)
        iteration = self._iterations[number]
        if self._is_beyond(number, iteration):
            raise Stop
        ends = self.watch.is_done or 0 < self.watch.settings.epochs <= iteration
        if ends and number in self._training:
            with self.watch.inside_loader():
                self._note_order(loader, number)
            raise Stop
        self._iterations[number] += 1
        if self.watch.settings.is_replay:
            return self._tracked(number, self._replayed(loader, number, iteration))
        self._describe(loader, number, iteration)
        return self._tracked(number, self._recorded(loader, number, iteration))

    def _is_beyond(self, number: int, iteration: int) -> bool:
        """Whether one process goes on to an epoch that ranks have not begun."""
        return self.watch.settings.is_replay and iteration > 0 and (number, iteration) not in self._begun

    def _tracked(self, number: int, batches: Generator[Collate]) -> Iterator[Any]:
        """The batches; an epoch of training ends when the steps are made.

        Samples are put together as a part of the step: random numbers that this draws (of which tokens are masked, say)
        are handed over as the step's are.
        """
        settings = self.watch.settings
        before, iteration = self.watch.steps, self._iterations[number] - 1
        for at in itertools.count():
            if self.watch.steps > before:
                self._training.add(number)
                if self.watch.is_done or 0 < settings.cut <= self.watch.steps - before:
                    batches.close()
                    return
            try:
                with self.watch.inside_loader():
                    collate = next(batches)
            except StopIteration:
                return
            self.watch.begin_training()
            states = self._share_randomness(f"random-{number}-{iteration}-{at}.pkl")
            self.watch.collates = True
            batch = collate()
            self.watch.collates = False
            if NUDGED in settings.overrides:
                batch = moved_batch(batch)
            yield widened_tree(batch) if settings.float64 else batch
            if states != _random_states():
                self.watch.journal.note_once(DRAWS, where=location())

    def _share_randomness(self, name: str) -> bytes:
        """Python's and NumPy's random numbers of a step, those of one process the first rank's; gives their state."""
        settings = self.watch.settings
        if settings.is_replay:
            path = Path(settings.feed[0] if len(settings.feed) == 1 else settings.folder_of_ranks / "rank-0") / name
            if path.exists():
                own, numpys = pickle.loads(path.read_bytes())
                random.setstate(own)
                np.random.set_state(numpys)
        states = _random_states()
        if not settings.is_replay:
            (self.watch.journal.folder / name).write_bytes(states)
        return states

    # -- recording

    def _describe(self, loader: DataLoader[Any], number: int, iteration: int) -> None:
        """Note what is known of a loader's order before it is iterated."""
        dataset, sampler = loader.dataset, loader.sampler
        sized = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__")
        batches = loader.batch_sampler if loader.batch_sampler is not None else sampler
        own = None if type(batches) is BatchSampler else type(batches).__name__
        drawn = _length(sampler) if own is None else None
        self.watch.journal.note(
            "iteration",
            loader=number,
            iteration=iteration,
            dataset=type(dataset).__name__,
            size=_length(dataset) if sized else None,
            cut=isinstance(dataset, Subset),
            sampler=own or type(sampler).__name__,
            drawn=drawn,
            batch_size=loader.batch_size,
            replacement=bool(getattr(sampler, "replacement", False)),
            shared_out=isinstance(sampler, DistributedSampler),
            shuffles=bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler")),
            epoch=getattr(sampler, "epoch", None),
            share=[getattr(sampler, name, None) for name in ("rank", "num_replicas", "seed")],
            probe=self._probe(_base(dataset)) if sized and iteration == 0 else None,
            grad=torch.is_grad_enabled(),
            step=self.watch.steps,
            where=location(),
        )

    def _probe(self, dataset: Any) -> str:
        """The fingerprint of a data set's first sample: have ranks the same data?"""
        states = torch.get_rng_state(), random.getstate()
        torch.manual_seed(0)
        random.seed(0)
        try:
            return fingerprint(dataset[0])
        except Exception:  # whatever a data set of the user's raises: its own iteration shows it
            return ""
        finally:
            torch.set_rng_state(states[0])
            random.setstate(states[1])

    def _recorded(self, loader: DataLoader[Any], number: int, iteration: int) -> Generator[Collate]:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as torch's iterators do
        source = _stream(loader) if isinstance(loader.dataset, IterableDataset) else _indexed(loader)
        for at in itertools.count():
            if at == _SHOWN_AFTER and self.watch.is_done and not isinstance(loader.dataset, IterableDataset):
                source = iter(list(source)[-_SHOWN_AFTER:])
            found = next(source, None)
            samples = None if found is None else found[1]()
            if found is None or samples is None:
                self.watch.journal.note("iterated", loader=number, iteration=iteration, batches=at)
                return
            whole = loader.batch_sampler is None and loader.batch_size is None
            self._write(samples, number, iteration, at, found[0], whole)
            try:
                yield functools.partial(loader.collate_fn, samples[0] if whole else samples)
            except GeneratorExit:
                self._note_rest(source, number, iteration)
                raise

    def _write(
        self, samples: list[Any], number: int, iteration: int, at: int, indices: list[int] | None, whole: bool
    ) -> None:
        path = self.watch.journal.folder / _name(number, iteration, at)
        why = ""
        try:
            torch.save({"samples": samples, "whole": whole}, path)
        except Exception as error:  # whatever cannot be pickled
            path.unlink(missing_ok=True)
            why = f"{type(error).__name__}: {error}"
        self.watch.journal.note(
            "batch",
            loader=number,
            iteration=iteration,
            batch=at,
            indices=indices,
            prints=[fingerprint(sample) for sample in samples],
            step=self.watch.steps,
            grad=torch.is_grad_enabled(),
            unwritten=why,
        )

    def _note_rest(self, pending: Iterator[Any], number: int, iteration: int) -> None:
        """The order in which the rest of an epoch would have come."""
        try:
            rest = [index for indices, _ in itertools.islice(pending, _ORDER) for index in indices or ()]
        except Exception:
            return
        self.watch.journal.note("rest", loader=number, iteration=iteration, indices=rest[:_ORDER])

    def _note_order(self, loader: DataLoader[Any], number: int) -> None:
        """The order of the epoch that would have come next."""
        if self.watch.settings.is_replay or isinstance(loader.dataset, IterableDataset):
            return
        iteration = self._iterations[number]
        self._describe(loader, number, iteration)
        order = itertools.islice(_indexed(loader), _ORDER)
        indices = [index for found, _ in order for index in found or ()][:_ORDER]
        self.watch.journal.note("order", loader=number, iteration=iteration, indices=indices)

    # -- replay

    def _replayed(self, loader: DataLoader[Any], number: int, iteration: int) -> Generator[Collate]:
        seen: set[str] = set()
        for at in itertools.count():
            parts = self._parts(number, iteration, at)
            if not parts:
                return
            if number in self.watch.settings.once:
                parts = _once(parts, seen)
            self.watch.chunks = tuple(len(part["samples"]) for part in parts)
            if parts[0]["whole"]:
                yield functools.partial(self._joined, loader.collate_fn or default_convert, parts)
            else:
                yield functools.partial(loader.collate_fn, [sample for part in parts for sample in part["samples"]])

    def _joined(self, convert: Callable[[Any], Any], parts: list[dict[str, Any]]) -> Any:
        """The ranks' ready-made batches as one."""
        batches = [convert(part["samples"][0]) for part in parts]
        self.watch.chunks = tuple(_rows(batch) for batch in batches)
        return joined(batches)

    def _parts(self, number: int, iteration: int, at: int) -> list[dict[str, Any]]:
        """What the ranks got as their batch ``at``; of one rank after another, where they are not put together."""
        feed = self.watch.settings.feed
        paths = [Path(folder) / _name(number, iteration, at) for folder in feed]
        if self.watch.settings.apart:
            paths = [Path(feed[at % len(feed)]) / _name(number, iteration, at // len(feed))]
        return [torch.load(path, weights_only=False) for path in paths if path.exists()]


def _random_states() -> bytes:
    """Of Python's random numbers and NumPy's."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _once(parts: list[dict[str, Any]], seen: set[str]) -> list[dict[str, Any]]:
    """The parts of a batch without samples that were seen before."""
    for part in parts:
        prints = [fingerprint(sample) for sample in part["samples"]]
        part["samples"] = [s for s, text in zip(part["samples"], prints, strict=True) if text not in seen]
        seen.update(prints)
    return [part for part in parts if part["samples"]] or parts[:1]


def _rows(batch: Any) -> int:
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def joined(batches: list[Any]) -> Any:
    """Batches as one: tensors behind each other along their first dimension.

    Raises:
        ValueError: they do not fit together.
    """
    flat = [tree_flatten(batch) for batch in batches]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("batches of several shapes cannot be put together")
    leaves = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        first = parts[0]
        if isinstance(first, Tensor) and first.dim():
            leaves.append(torch.cat(parts))
        elif all(bool(part == first) for part in parts):
            leaves.append(first)
        else:
            raise ValueError(f"values of type {type(first).__name__} that differ cannot be put together")
    return tree_unflatten(leaves, flat[0][1])


def _name(number: int, iteration: int, at: int) -> str:
    return f"batch-{number}-{iteration}-{at}.pt"


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except TypeError:
        return None


Fetch = Callable[[], list[Any] | None]


def _indexed(loader: DataLoader[Any]) -> Iterator[tuple[list[int] | None, Fetch]]:
    """The batches of a data set with indices: each with them, and a function that fetches the samples."""
    dataset: Any = loader.dataset
    batches: Iterable[list[Any]] | None = loader.batch_sampler
    several = batches is not None and bool(getattr(dataset, "__getitems__", None))
    fetch = dataset.__getitems__ if several else lambda indices: [dataset[index] for index in indices]
    for indices in batches if batches is not None else ([index] for index in loader.sampler):
        yield _plain(indices, dataset), functools.partial(fetch, indices)


def _plain(indices: Any, dataset: object) -> list[int] | None:
    """Indices as numbers, those of a Subset as what they are in the whole; None where they are something else."""
    try:
        found = [int(index) for index in indices]
        while isinstance(dataset, Subset):
            found = [int(dataset.indices[index]) for index in found]
            dataset = dataset.dataset
    except (TypeError, ValueError, IndexError):
        return None
    return found


def _base(dataset: Any) -> Any:
    """The data set of which a Subset is a part."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _stream(loader: DataLoader[Any]) -> Iterator[tuple[list[int] | None, Fetch]]:
    """The batches of an iterable data set."""
    samples = iter(loader.dataset)
    size = loader.batch_size

    def fetch() -> list[Any] | None:
        found = list(itertools.islice(samples, size or 1))
        if not found or (loader.drop_last and size is not None and len(found) < size):
            return None
        return found

    while True:
        yield None, fetch
