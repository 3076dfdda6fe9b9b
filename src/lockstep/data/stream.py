"""Iterable data sets: one stream of samples shared out over ranks and loader workers."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lockstep.data.order import make_key, mix
from lockstep.data.randomness import seed_all
from lockstep.data.recut import WindowPlan
from lockstep.data.sampler import call_set_epoch
from lockstep.ground.errors import MisconfigurationException

_END = object()


@dataclass(frozen=True)
class DrawHistory:
    """What one life of a run has drawn of a stream, or of what those before it had left of it."""

    ranks: int
    workers: int
    """Of each rank; 1 where samples are read in the rank itself."""
    taken: list[list[int]]
    """Of each rank, by worker: how many samples, the first ones that go to this worker."""

    def has(self, number: int, worker: int | None) -> bool:
        """Whether it drew a sample.

        Args:
            number: of the sample in the stream; of what earlier lives have left, where there are such.
            worker: whose stream it is, of data sets that shard themselves over workers; else None.
        """
        if worker is None:
            number, place = divmod(number, self.workers * self.ranks)
            worker, rank = divmod(place, self.ranks)
        else:
            number, rank = divmod(number, self.ranks)
        return number < self.taken[rank][worker % self.workers]


class Sizes:
    """Stands in for the batch sampler of an iterable data set's loader: how many samples a rank takes at once.

    A window is ``window`` neighbouring samples of the stream, of which a rank takes those that are its own, in
    ``micro`` parts that are as even as possible.

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

    def group(self, grouping: WindowPlan) -> bool:
        """Cut the passes to come anew; tells whether that changes anything.

        Raises:
            MisconfigurationException: a window has fewer samples than there are ranks.
        """
        before = self.micro, self.window
        self.micro, self.window = 1, self.batch * self.size
        if not grouping.divides(self.size):
            self.micro, self.window = grouping.micro(self.size), grouping.window(self.batch)
        if self.window < self.size:
            raise MisconfigurationException(
                f"A step of this run has {self.window} samples, and an iterable data set cannot be shared out over "
                f"{self.size} ranks then: use at most {self.window}."
            )
        return (self.micro, self.window) != before

    def of(self, rank: int) -> Iterator[int]:
        """Samples of each micro-batch of a rank."""
        for number in itertools.count():
            mine = self._before(number + 1, rank) - self._before(number, rank)
            yield from (mine // self.micro + (part < mine % self.micro) for part in range(self.micro))

    def taken(self, batches: int, workers: int) -> list[list[int]]:
        """What each rank's workers have drawn after so many micro-batches, with which a window ends."""
        if self.micro == 1 and self.window == self.batch * self.size:
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
        """Samples of a rank in so many windows."""
        return -((rank - windows * self.window) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        return ([0] * count for count in self.of(self.rank))  # a stream is asked by how many indices there are


class Shard(IterableDataset[Any]):
    """The part of an iterable data set that one loader worker of one rank takes.

    Every rank and worker reads the same stream (random numbers are seeded alike everywhere) and takes its
    part:

    - Of a data set that shards itself over workers, rank ``r`` takes items ``r``, ``r + ranks``, ... of each
      worker's stream. It is known by its looking at the ``id`` or ``num_workers`` of
      `torch.utils.data.get_worker_info()` before its first sample (or by a ``worker_init_fn`` that does, or
      that reaches for the data set through it).
    - Of any other, sample ``i`` goes to worker ``w`` of rank ``r`` if ``i % (workers x ranks) == w x ranks +
      r``.
    - One that shards itself over ranks is taken whole if that can be seen (``split_dataset_by_node`` of
      Hugging Face's `datasets`); otherwise set ``Trainer(use_distributed_sampler=False)``. Its first sample is
      another on each rank, which ``mark`` tells.

    Before each sample the generators are seeded from (seed, epoch, position in the stream).

    Args:
        dataset: the user's.
        rank: this rank.
        size: number of ranks.
        key: 64 bits that stand for (seed, loader).

    Attributes:
        mark: a number that stands for the first sample of the stream, read by this copy; 0.0 where there is none.
        lives: what has been drawn in this pass while there were other ranks; the others of its samples are shared
            out as if they were the whole stream.
    """

    def __init__(self, dataset: Any, rank: int, size: int, key: int) -> None:
        whole = getattr(dataset, "_distributed", None) is not None
        self.dataset = dataset
        self.rank, self.size = (0, 1) if whole else (rank, size)
        self.key = key
        self.mark = 0.0
        self.epoch = 0
        self.turn = 0
        self._passes = 0  # begun by this copy: those in persistent workers live from epoch to epoch
        self._read = 0  # samples of the stream in this pass
        self._looked = False
        self._resume: dict[str, Any] | None = None
        self.lives: list[DrawHistory] = []
        self._drawn: list[int] = []  # samples that each of the lives has drawn, as far as they were read

    def set_epoch(self, epoch: int, turn: int) -> None:
        """For the next pass; the copies in persistent workers count epochs on from there."""
        self.epoch, self.turn, self._passes = epoch, turn, 0

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch + self._passes
        self._passes += 1
        self._read = 0
        self._drawn = [0] * len(self.lives)
        call_set_epoch(self.dataset, epoch)
        state, self._resume = self._resume, None
        if state is not None:
            self._read, self._looked = state["read"], state["looked"]
            self._drawn = list(state.get("drawn", self._drawn))
            self.dataset.load_state_dict(state["dataset"])
        return self._mine(make_key(self.key, "stream", epoch, self.turn))

    def _mine(self, key: int) -> Iterator[Any]:
        info = watch_worker_info()
        worker = 0 if info is None else info.worker
        seed_all(mix(key, self._read))
        iterator = iter(self.dataset)
        for number in itertools.count(self._read):
            # Workers that shard by themselves are at different samples, so each gets random numbers of its own;
            # but not before the first: what is shuffled there must come out the same in all.
            seed_all(mix(make_key(key, worker) if self._looked and number > 0 else key, number))
            item = next(iterator, _END)
            if item is _END:
                return
            if number == 0:
                self.mark = fingerprint(item)
            self._read = number + 1
            if info is not None and not self._looked:
                self._looked = info.looked
            own = info is not None and self._looked
            left = self._left(number, worker if own else None) if self.lives else number
            if left is None:
                continue
            if info is None or self._looked:
                mine = left % self.size == self.rank
            else:
                mine = left % (info.workers * self.size) == worker * self.size + self.rank
            if mine:
                yield item

    def _left(self, number: int, worker: int | None) -> int | None:
        """The number of a sample among those that were left by all lives; None if one of them has drawn it."""
        for place, life in enumerate(self.lives):
            if life.has(number, worker):
                self._drawn[place] += 1
                return None
            number -= self._drawn[place]
        return number

    def state_dict(self) -> dict[str, Any]:
        """Samples read so far, and the data set's own state (it must have one)."""
        drawn = {"drawn": list(self._drawn)} if self.lives else {}
        return {"read": self._read, "looked": self._looked, **drawn, "dataset": self.dataset.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on from there."""
        self._resume = state


class WatchedInfo:
    """Stands in for a loader worker's `WorkerInfo`: notes who looks, and shows the user's own data set."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self.worker: int = info.id
        self.workers: int = info.num_workers
        self.looked = False
        self.reached = False

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            self.reached = True
            return self._info.dataset.dataset
        if name in ("id", "num_workers"):
            self.looked = True
        return getattr(self._info, name)


def watch_worker_info() -> WatchedInfo | None:
    """In a loader's worker: puts a watch on `get_worker_info()`, if there is none yet; elsewhere None."""
    info: Any = get_worker_info()
    if info is not None and not isinstance(info, WatchedInfo):
        info = WatchedInfo(info)
        torch_worker._worker_info = info
    return info


class WatchedInit:
    """A loader's ``worker_init_fn`` under the watch: if it reaches for the data set, it shards it."""

    def __init__(self, init: Callable[[int], None]) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        watched = watch_worker_info()
        assert watched is not None, "worker_init_fn ran outside of a loader's worker"
        self.init(worker)
        watched.looked = watched.looked or watched.reached


class Counting:
    """A ``collate_fn`` that tells how many samples it was given, of which stream: returns (count, mark, batch)."""

    def __init__(self, collate: Callable[[Any], Any], shard: Shard) -> None:
        self.collate = collate
        self.shard = shard  # in a worker, its copy of the shard

    def __call__(self, samples: list[Any]) -> tuple[int, float, Any]:
        return len(samples), self.shard.mark, self.collate(samples)


def fingerprint(item: Any) -> float:
    """A whole number below 2**52, the same for equal samples; 0.0 where it cannot be told."""
    parts, shape = tree_flatten(item)
    try:
        content = [repr(shape).encode(), *map(_bytes, parts)]
    except Exception:  # a user's object, which may refuse in any way
        return 0.0
    return float(int.from_bytes(hashlib.blake2b(b"|".join(content), digest_size=8).digest(), "big") >> 12)


def _bytes(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):  # whose pickle also tells where it lies
        numbers = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{part.dtype}{tuple(part.shape)}".encode() + numbers.numpy().tobytes()
    return pickle.dumps(part)


def stream_length(samples: int, batch: int | None, drop_last: bool, ranks: int, workers: int) -> int:
    """Batches of the rank that gets most, of a stream of known length shared over ranks and workers.

    Every worker forms batches of its own, so that each may end with a partial one.
    """
    shards = ranks * max(1, workers)
    lengths = []
    for rank in range(ranks):
        parts = [-(-(samples - shard) // shards) for shard in range(rank, shards, ranks)]
        step = batch or 1
        lengths.append(sum(max(0, part) // step if drop_last else -(-max(0, part) // step) for part in parts))
    return max(lengths)
