"""Sources of loaders over iterable data sets, whose stream of samples is split among ranks and loader workers."""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from lockstep.data.counting import LoaderOrder
from lockstep.data.order import generator, make_key, mix
from lockstep.data.own_parts import EMPTY, FAILED, OTHER_RANKS, UNKNOWN, OwnParts, shards_itself
from lockstep.data.partition import WindowPlan
from lockstep.data.passes import Passes
from lockstep.data.randomness import capture, put_back, seed_all
from lockstep.data.source import (
    LoaderSource,
    Measure,
    SourceSpec,
    Stateful,
    call_set_epoch,
    copy_loader,
    length_of,
    skip,
    unmixed,
)
from lockstep.data.workers import end_workers, opened
from lockstep.ground.comm import as_bytes
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn

_END = object()
OTHER_WORKERS = (
    "{kind} shards itself over the loader's workers, but num_workers was changed from {then} to {now} within an epoch, "
    "so its remaining samples are unknown. Resume with num_workers={then}, or from a checkpoint of an epoch's end."
)

# -- the source ----------------------------------------------------------------------------------------------


class Stream(LoaderSource):
    """Source for a loader over an iterable data set. It reads this rank's part of the stream of samples.

    `Shard` describes how the stream is split.

    Attributes:
        moved: True if the next pass was started on a different number of ranks.
    """

    ahead = False

    def __init__(self, loader: DataLoader[Any], spec: SourceSpec, key: int, measure: Measure) -> None:
        self.rank = spec.rank
        self._measure = measure  # for data sets that return batches by themselves
        self._passes = Passes(loader, measure.name, spec.stage)
        self._key = key
        samples, batches = length_of(loader.dataset), loader.batch_sampler
        kind = type(loader.dataset).__name__
        self._kind, self.moved = kind, False
        self.own = shards_itself(loader.dataset)
        self._own_parts: OwnParts | None = None
        if spec.size > 1 and spec.gather is not None and not self.own:
            self._own_parts = OwnParts(spec.gather, loader.num_workers, measure.name, kind, samples is not None)
        size = getattr(batches, "batch_size", None)
        self.batch = size or 1
        self._samples, self._batch_size, self._drop_last = samples, size, loader.drop_last
        self.samples = -1 if samples is None else samples
        self._workers = max(1, loader.num_workers)
        self.length = self.planned(spec.size)
        self._sizes = Sizes(spec.rank, spec.size, self.batch)
        self._first = 0  # micro-batches of the pass that earlier attempts of the run have drawn
        share = StatefulShard if hasattr(loader.dataset, "state_dict") else Shard
        self._shard = share(cast(IterableDataset[Any], loader.dataset), spec.rank, spec.size, key, self._own_parts)
        self._counts = batches is not None
        self.flexible = self._counts and self.batch > 1
        self._own_process = loader.num_workers == 0
        # torch warns if a stream is longer than the length that the user's loader has cached; a shard has its own.
        changes: dict[str, Any] = {"dataset": self._shard, "_IterableDataset_len_called": None}
        if self._counts:
            changes["collate_fn"] = Counting(loader.collate_fn, self._shard)
        if loader.worker_init_fn is not None:
            changes["worker_init_fn"] = WatchedInit(loader.worker_init_fn)
        self._copy = copy_loader(loader, **changes)
        self._coming: tuple[int, int] | None = None  # pass that persistent workers expect
        self._pass = [0, 0]
        self._ended: dict[str, Any] = {}  # the state of a pass that had ended before it was resumed
        self._over = False  # the pass has ended: a loader with a state would restart there
        self._resume: dict[str, Any] = {}
        self._newest: dict[str, Any] = {}  # the newest state, perhaps of the previous pass
        self._unread: dict[str, Any] | None = None  # the state until the first batch of the pass was read
        self._name = measure.name
        self._first_sample: list[Any] = []  # pass, ranks, workers, and a fingerprint of its first sample
        self._was_first: list[Any] = []  # the same from the checkpoint

    def open(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[Any]:
        return (batch for batch, _ in self.weighed(epoch, turn, start, stop))

    def weighed(self, epoch: int, turn: int, start: int, stop: int | float) -> Iterator[tuple[Any, float]]:
        self._over = bool(self._resume.get("over")) and self._resume["pass"] == [epoch, turn]
        if self._over:
            self._ended = self._newest = self._resume
            self._resume = {}
            return iter(())
        self._ended = {}
        self._newest = self._unread = self._resume or self._newest
        goes_on = self._go_back(epoch, turn)
        self._begin(epoch, turn)
        iterator = opened(self._copy)
        if self._own_parts is not None:
            self._own_parts.settle(iterator)
            iterator = self._check_first(iterator)
        iterator = self._reading(self._passes.watched(iterator))
        if self._own_process:
            iterator = unmixed(iterator)
        if self._counts and not goes_on and not self._shard.attempts:
            iterator = self._compared(iterator, [epoch, turn, self._sizes.size, self._workers])
        if not goes_on:
            iterator = skip(iterator, start - self._first)
        if not self._counts:
            return self._measure.each(iterator)
        return ((batch, float(count)) for count, _, batch in iterator)

    def _begin(self, epoch: int, turn: int) -> None:
        if self._coming != (epoch, turn):
            end_workers(self._copy)  # they count epochs themselves, and would be wrong
        self._coming, self._pass = (epoch + 1, turn), [epoch, turn]
        self._shard.set_epoch(epoch, turn)
        self._copy.generator = generator(make_key(self._key, "workers", epoch, turn))

    def _go_back(self, epoch: int, turn: int) -> bool:
        """Restore the data set's state from a checkpoint. Return True if the state was saved within this pass.

        A checkpoint of an epoch's end belongs to a pass that has ended: that pass is opened once more, and the next
        starts from the beginning.
        """
        state, self._resume = self._resume, {}
        if not state:
            return False
        if "loader" in state:
            cast(Stateful, self._copy).load_state_dict(state["loader"])
        elif isinstance(self._shard, StatefulShard):
            self._shard.load_state_dict(state["stream"])
        old = state.get("pass", [epoch, turn])  # earlier versions did not save it
        if old == [epoch, turn]:
            return True
        # Training's random numbers must not depend on this additional pass.
        random = capture()
        self._begin(*old)
        next(opened(self._copy), None)
        self._coming = None
        put_back(random)
        return False

    def _compared(self, iterator: Iterator[Any], reading: list[int]) -> Iterator[Any]:
        """Yield the batches and record the first sample. Warn if a resumed pass now starts with another sample."""
        self._first_sample = []
        for batch in itertools.islice(iterator, 1):
            self._first_sample = [*reading, batch[1]]
            was, self._was_first = self._was_first, []
            if was[:4] == reading and was[4] and batch[1] and was[4] != batch[1]:
                rank_zero_warn(
                    f"{self._name}: the {type(self._shard.dataset).__name__} is read again to resume within an epoch, "
                    "but starts with a different sample now, so some samples of this epoch may be seen twice and "
                    "others never. Seed its order in `set_epoch(epoch)`, or define `state_dict` and `load_state_dict`."
                )
            yield batch
        yield from iterator

    def _check_first(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches. After the first, check that the stream supports the number of ranks.

        The first batch shows if the stream shards itself.
        """
        batch = next(iterator, _END)
        self._check_ranks()
        if batch is not _END:
            yield batch
            del batch
            yield from iterator

    def _reading(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and record that the pass has started and, at its end, that it is over.

        Before the first batch, the state of the data set may be that of the previous pass' end.
        """
        for first in itertools.islice(iterator, 1):
            self._unread = None
            yield first
            del first
        yield from iterator
        self._over = True

    def _check_ranks(self) -> None:
        if self._own_parts is not None:
            self.own = bool(self._own_parts.found)
        if self.moved and self.own:
            raise MisconfigurationException(OTHER_RANKS.format(name=self._name, kind=self._kind))

    @property
    def workers(self) -> int | None:
        """Number of loader workers per rank that read the stream; None if each rank has its own stream."""
        return None if self.own else self._workers

    def order(self) -> LoaderOrder:
        return LoaderOrder("a stream", self.samples, self._workers)

    def planned(self, ranks: int) -> int | float:
        if self._samples is None:
            return math.inf
        ranks = 1 if self.own else ranks  # its length is the length of a rank's own part
        return stream_length(self._samples, self._batch_size, self._drop_last, ranks, self._workers)

    def repartition(self, plan: WindowPlan) -> None:
        self.moved = plan.number > 0
        if self.moved and plan.position is None:  # the stream had sharded itself over ranks
            raise MisconfigurationException(OTHER_RANKS.format(name=self._name, kind=self._kind))
        self._check_ranks()
        attempts = [DrawHistory(*attempt) for attempt in plan.position] if isinstance(plan.position, list) else []
        changes = self.flexible and self._sizes.repartition(plan)
        if changes:
            self._copy = copy_loader(self._copy, batch_sampler=self._sizes)
        if changes or attempts != self._shard.attempts:
            self.close()  # persistent workers have copies
            self._coming = None
        self._shard.attempts, self._first = attempts, plan.number if attempts else 0

    def position(self, number: int) -> list[list[Any]] | None:
        if self.own:
            return None
        taken = self._sizes.taken(number - self._first, self._workers)
        here = DrawHistory(self._sizes.size, self._workers, taken)
        return [[attempt.ranks, attempt.workers, attempt.taken] for attempt in [*self._shard.attempts, here]]

    def state_dict(self) -> dict[str, Any]:
        if self._ended or self._resume:
            return self._ended or self._resume
        about = {"pass": self._pass, "own": self.own}
        by_loader = hasattr(self._copy, "state_dict")
        if not by_loader and not (self._own_process and isinstance(self._shard, StatefulShard)):
            return {"first": self._first_sample} if self._first_sample else {}
        if self._unread is not None:
            return self._unread
        if by_loader:
            self._newest = {"loader": cast(Stateful, self._copy).state_dict(), "over": self._over, **about}
        else:
            self._newest = {"stream": cast(StatefulShard, self._shard).state_dict(), **about}
        return self._newest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._was_first = state.get("first", [])
        self._resume = state if "loader" in state or "stream" in state else {}
        if self._resume and self._own_parts is not None:
            # It resumes after the samples that would show it.
            self._own_parts.found = bool(state.get("own"))

    def close(self) -> None:
        end_workers(self._copy)


# -- how a stream is split -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawHistory:
    """Record of the samples that one attempt of a run has drawn from a stream.

    An attempt draws from the samples that earlier attempts have left.
    """

    ranks: int
    workers: int
    """Number of workers of each rank; 1 if samples are read in the rank itself."""
    taken: list[list[int]]
    """Number of samples that each worker of each rank has drawn, which are the first ones assigned to that worker."""

    def has(self, number: int, worker: int | None) -> bool:
        """Return True if this attempt has drawn sample ``number``.

        Args:
            number: number of the sample in the stream, or among the samples that earlier attempts left.
            worker: the worker that reads the stream, for data sets that shard themselves over workers; else None.
        """
        if worker is None:
            number, taker = divmod(number, self.workers * self.ranks)
            worker, rank = divmod(taker, self.ranks)
        else:
            number, rank = divmod(number, self.ranks)
        return number < self.taken[rank][worker % self.workers]


class Sizes:
    """Replacement for the batch sampler of a loader over an iterable data set. It determines only the batch sizes.

    A window is ``window`` consecutive samples of the stream. A rank takes its own samples of it, in ``micro`` parts
    that are as even as possible.

    Args:
        rank: this rank.
        size: number of ranks.
        batch: the loader's ``batch_size``.
    """

    def __init__(self, rank: int, size: int, batch: int) -> None:
        self.rank = rank
        self.size = size
        self.batch = batch
        self.micro = 1
        self.window = batch * size

    def repartition(self, plan: WindowPlan) -> bool:
        """Set the batch sizes of later passes by a plan for another number of ranks. Return True if they change.

        Raises:
            MisconfigurationException: a window has fewer samples than there are ranks.
        """
        before = self.micro, self.window
        self.micro, self.window = 1, self.batch * self.size
        if not plan.divides(self.size):
            self.micro, self.window = plan.micro(self.size), plan.window(self.batch)
        if self.window < self.size:
            raise MisconfigurationException(
                f"A step of this run has {self.window} samples of an iterable data set, which is fewer than the "
                f"{self.size} ranks: use at most {self.window} ranks, or a larger batch_size."
            )
        return (self.micro, self.window) != before

    def of(self, rank: int) -> Iterator[int]:
        """Yield the number of samples in each micro-batch of ``rank``."""
        for number in itertools.count():
            mine = self._before(number + 1, rank) - self._before(number, rank)
            yield from (mine // self.micro + (part < mine % self.micro) for part in range(self.micro))

    def taken(self, batches: int, workers: int) -> list[list[int]]:
        """Return, for each rank, a list of how many samples each worker has drawn after ``batches`` micro-batches.

        The number of batches must be that at the end of a window.
        """
        if self.micro == 1 and self.window == self.batch * self.size:
            # Equal batches go to the workers in turn, so their numbers are known without iterating.
            mine = [(batches // workers + (worker < batches % workers)) * self.batch for worker in range(workers)]
            return [mine] * self.size
        if workers == 1:
            return [[self._before(batches // self.micro, rank)] for rank in range(self.size)]
        found = [[0] * workers for _ in range(self.size)]
        for rank, of_rank in enumerate(found):
            for number, count in enumerate(itertools.islice(self.of(rank), batches)):
                of_rank[number % workers] += count
        return found

    def _before(self, windows: int, rank: int) -> int:
        """Return how many samples of the first ``windows`` windows belong to a rank."""
        return -((rank - windows * self.window) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        return ([0] * count for count in self.of(self.rank))  # for a stream, only the number of indices counts


class Shard(IterableDataset[Any]):
    """The part of an iterable data set that a rank, or one of its loader workers, reads.

    Every rank and worker reads the same stream (random numbers are seeded identically everywhere) and takes its
    part:

    - If the data set shards itself over workers, rank ``r`` takes items ``r``, ``r + ranks``, ... of each
      worker's stream. Such a data set reads ``id`` or ``num_workers`` of
      `torch.utils.data.get_worker_info()` before its first sample (or has a ``worker_init_fn`` that does, or
      that accesses the data set through it).
    - If it shards itself over ranks, it is taken completely. Such a data set is a known one (`shards_itself`), or
      starts with a different sample on each rank (`OwnParts`).
    - Otherwise sample ``i`` goes to worker ``w`` of rank ``r`` if ``i % (workers x ranks) == w x ranks + r``.

    Before each sample the generators are seeded from (seed, epoch, position in the stream).

    Args:
        dataset: the user's data set.
        rank: this rank.
        size: number of ranks.
        key: 64-bit hash of (seed, loader).
        own_parts: detects if the ranks' streams are already parts of the data; None if known or for one rank.

    Attributes:
        mark: fingerprint of the first sample of the stream, as read by this copy; 0.0 if there is none.
        attempts: the samples that earlier attempts drew in this pass, on other numbers of ranks; the remaining samples
            are split as if they were the whole stream.
    """

    def __init__(
        self, dataset: IterableDataset[Any], rank: int, size: int, key: int, own_parts: OwnParts | None = None
    ) -> None:
        self.dataset = dataset
        self.rank, self.size = rank, size
        self.key = key
        self._own_parts = own_parts
        self._own = shards_itself(dataset)
        self.mark = 0.0
        self.epoch = 0
        self.turn = 0
        self._passes = 0  # started by this copy; copies in persistent workers live on over epochs
        self._read = 0  # samples of the stream in this pass
        self._looked = self._ended = False
        self._resume: dict[str, Any] | None = None
        self.attempts: list[DrawHistory] = []
        self._drawn: list[int] = []  # samples of each attempt, as far as the stream was read

    def set_epoch(self, epoch: int, turn: int) -> None:
        """Set the epoch and turn of the next pass. Copies in persistent workers count later epochs themselves."""
        self.epoch, self.turn, self._passes = epoch, turn, 0

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch + self._passes
        self._passes += 1
        self._read, self._ended = 0, False
        self._drawn = [0] * len(self.attempts)
        call_set_epoch(self.dataset, epoch)
        state, self._resume = self._resume, None
        if state is not None and state.get("ended"):  # its own state may be that of a start
            self._ended = True
            return iter(())
        if state is not None:
            self._read, self._looked = state["read"], state["looked"]
            self._drawn = list(state.get("drawn", self._drawn))
            cast(Stateful, self.dataset).load_state_dict(state["dataset"])
        return self._mine(make_key(self.key, "stream", epoch, self.turn))

    def _mine(self, key: int) -> Iterator[Any]:
        info = watch_worker_info()
        samples = self._samples(key, info)
        if self._own_parts is not None:
            samples = self._compare_first(samples, None if info is None else info.worker, self._own_parts)
        for number, item in samples:
            rank, size = (0, 1) if self._own else (self.rank, self.size)
            left = self._left(number, info) if self.attempts else number
            if left is None:
                continue
            if info is None or self._looked:
                mine = left % size == rank
            else:
                mine = left % (info.workers * size) == info.worker * size + rank
            if mine:
                yield item

    def _samples(self, key: int, info: WatchedInfo | None) -> Iterator[tuple[int, Any]]:
        """Yield (number, value) for each sample. Seed the random generators before each sample is read."""
        worker = 0 if info is None else info.worker
        seed_all(mix(key, self._read))
        iterator = iter(self.dataset)
        for number in itertools.count(self._read):
            # Readers that shard themselves are at different samples, so each gets its own random numbers;
            # but not before the first sample: what is shuffled there must be the same in all.
            here = key
            if number > 0 and self._own:
                here = make_key(here, "rank", self.rank)
            if number > 0 and self._looked:
                here = make_key(here, worker)
            seed_all(mix(here, number))
            item = next(iterator, _END)
            if item is _END:
                self._ended = True
                return
            if number == 0 and not self._own:
                self.mark = fingerprint(item)
            self._read = number + 1
            if info is not None and not self._looked:
                self._looked = info.looked
            yield number, item

    def _compare_first(
        self, samples: Iterator[tuple[int, Any]], worker: int | None, own_parts: OwnParts
    ) -> Iterator[tuple[int, Any]]:
        """Yield the samples, after comparing the first ones between ranks to detect if each rank has its own data."""
        head: list[tuple[int, Any]] = []
        if own_parts.found is None:
            # One with a state must not be read ahead.
            ahead = 1 if isinstance(self, StatefulShard) else 2
            try:
                head = list(itertools.islice(samples, ahead))
            except BaseException:
                own_parts.ask(worker, FAILED)
                raise
            own_parts.ask(worker, fingerprint([item for _, item in head]) or UNKNOWN if head else EMPTY)
        self._own = bool(own_parts.found)
        if self._own:
            self.mark = 0.0  # it should differ between the ranks
        yield from head
        yield from samples

    def _left(self, number: int, info: WatchedInfo | None) -> int | None:
        """Return a sample's index among the samples that no earlier attempt has drawn; None if one has drawn it."""
        worker = None
        if info is not None and self._looked:
            for attempt in self.attempts:
                if attempt.workers != info.workers:
                    words = {"kind": type(self.dataset).__name__, "now": info.workers, "then": attempt.workers}
                    raise MisconfigurationException(OTHER_WORKERS.format(**words))
            worker = info.worker
        for index, attempt in enumerate(self.attempts):
            if attempt.has(number, worker):
                self._drawn[index] += 1
                return None
            number -= self._drawn[index]
        return number


class StatefulShard(Shard):
    """A `Shard` of a data set that can save and restore its progress."""

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the number of samples read, the data set's state, and whether the stream has ended."""
        drawn = {"drawn": list(self._drawn)} if self.attempts else {}
        state = cast(Stateful, self.dataset).state_dict()
        return {"read": self._read, "looked": self._looked, "ended": self._ended, **drawn, "dataset": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store ``state``, from which the next pass resumes."""
        self._resume = state


class WatchedInfo:
    """Replacement for a loader worker's `WorkerInfo`. It records accesses, and returns the user's own data set."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info
        self.worker: int = info.id
        self.workers: int = info.num_workers
        self.looked = False
        self.reached = False

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            self.reached = True
            return cast(Shard, self._info.dataset).dataset
        if name in ("id", "num_workers"):
            self.looked = True
        return getattr(self._info, name)


def watch_worker_info() -> WatchedInfo | None:
    """In a loader worker, make `get_worker_info()` return a `WatchedInfo`, and return this object.

    Return None in any other process.
    """
    info: object = get_worker_info()
    if info is None or isinstance(info, WatchedInfo):
        return info
    watched = WatchedInfo(cast(WorkerInfo, info))
    torch_worker._worker_info = watched  # type: ignore[assignment]
    return watched


class WatchedInit:
    """Wrapper around ``worker_init_fn`` that marks the data set as sharded over workers if the function accesses it."""

    def __init__(self, init: Callable[[int], None]) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        watched = watch_worker_info()
        assert watched is not None, "worker_init_fn ran outside of a loader's worker"
        self.init(worker)
        watched.looked = watched.looked or watched.reached


class Counting:
    """Wrapper around a ``collate_fn`` that returns (number of samples, fingerprint of the stream's start, batch)."""

    def __init__(self, collate: Callable[[Any], Any], shard: Shard) -> None:
        self.collate = collate
        self.shard = shard  # in a worker, its copy of the shard

    def __call__(self, samples: list[Any]) -> tuple[int, float, Any]:
        return len(samples), self.shard.mark, self.collate(samples)


def fingerprint(item: object) -> float:
    """Hash a sample to an integer below 2**52, as a float. Return 0.0 if the sample cannot be hashed."""
    parts, shape = tree_flatten(item)
    try:
        content = [repr(shape).encode(), *map(_bytes, parts)]
    except Exception:  # a user's object, which may refuse in any way
        return 0.0
    return float(int.from_bytes(hashlib.blake2b(b"|".join(content), digest_size=8).digest(), "big") >> 12)


def _bytes(part: object) -> bytes:
    if isinstance(part, torch.Tensor):  # its pickle also contains its device
        numbers = as_bytes(part.cpu())
        return f"{part.dtype}{tuple(part.shape)}".encode() + numbers.numpy().tobytes()
    return pickle.dumps(part)


def stream_length(samples: int, batch: int | None, drop_last: bool, ranks: int, workers: int) -> int:
    """Return the number of batches in a stream of known length, on the rank with the most batches.

    Every worker forms its own batches, so that each may end with a partial one.
    """
    shards = ranks * max(1, workers)
    lengths = []
    for rank in range(ranks):
        parts = [-(-(samples - shard) // shards) for shard in range(rank, shards, ranks)]
        step = batch or 1
        lengths.append(sum(max(0, part) // step if drop_last else -(-max(0, part) // step) for part in parts))
    return max(lengths)
