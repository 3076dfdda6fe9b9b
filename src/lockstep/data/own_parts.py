"""Detection of data sets that already yield different data on each rank, which lockstep must not split again.

That is a data set that shards itself over the ranks, which is recognized by its type or by its first samples, or a
loader that makes batches in its own way.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.data.source import SourceSpec, holders, length_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info

EMPTY, UNKNOWN, FAILED = 1.0, 2.0, 3.0
"""Markers in place of a fingerprint: the stream is empty, the sample has no fingerprint, or reading failed."""
_SHARED_OUT, _OWN = 1.0, 2.0

TAKEN = (
    "{name}: {kind} starts with a different sample on each rank, so lockstep treats it as sharded over the ranks, "
    "and each rank reads its own stream to the end. If the streams have the same samples in random order, every "
    "sample is seen {ranks} times: seed the order in `set_epoch(epoch)`, and lockstep splits the stream among the "
    "ranks."
)
LENGTH = (
    "{name}: {kind} starts with a different sample on each rank. If it shards itself over the ranks, set "
    "Trainer(use_distributed_sampler=False), because its `__len__` may count the samples of one rank or of all. "
    "Otherwise seed its order in `set_epoch(epoch)`, and lockstep splits the stream among the ranks."
)
WORKERS = (
    "{name} has a different num_workers on each rank ({found}), so some samples would be seen twice and others never. "
    "Set the same number on all ranks."
)
OTHER_RANKS = (
    "{name}: {kind} shards itself over the ranks, and this epoch was started on a different number of ranks, so its "
    "remaining samples are unknown. Resume on the former number of ranks, or from a checkpoint of an epoch's end."
)


def shards_itself(dataset: object) -> bool:
    """Return True if the type of a data set shows that it yields different samples on each rank.

    Known data sets are those of Hugging Face's ``split_dataset_by_node``, of ``webdataset`` with ``split_by_node``, and
    of MosaicML's ``streaming``.
    """
    if getattr(dataset, "_distributed", None) is not None:
        return True
    kinds = type(dataset).__mro__
    if any(kind.__module__.startswith("streaming.") and kind.__name__ == "StreamingDataset" for kind in kinds):
        return True
    stages = getattr(dataset, "pipeline", None)
    if not isinstance(stages, (list, tuple)):
        return False
    functions = (getattr(stage, "f", stage) for stage in stages)
    return any(getattr(function, "__name__", "") == "split_by_node" for function in functions)


class OwnParts:
    """Detector of a stream that is already split among the ranks. It compares the ranks' first samples.

    The process that reads the stream (the rank, or one of its loader workers) requests the result and waits for it.

    Args:
        gather: gathers a tensor over the ranks.
        workers: number of loader workers.
        name: name of the loader in messages.
        kind: type of the data set in messages.
        has_length: the data set has a ``__len__``.
    """

    def __init__(self, gather: Any, workers: int, name: str, kind: str, has_length: bool) -> None:
        self._gather, self._workers = gather, workers
        self._name, self._kind, self._has_length = name, kind, has_length
        # the result, then a fingerprint of each reader's first samples
        self._cells = torch.zeros(max(1, workers) + 1, dtype=torch.float64)
        if workers:
            self._cells = self._cells.share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gather": None}  # only the rank's process can gather

    @property
    def found(self) -> bool | None:
        """True if each rank has its own part of the data; False if lockstep splits the stream; None while unknown."""
        answer = float(self._cells[0])
        return None if not answer else answer == _OWN

    @found.setter
    def found(self, own: bool | None) -> None:
        self._cells[0] = 0.0 if own is None else _OWN if own else _SHARED_OUT

    def ask(self, worker: int | None, mark: float) -> bool:
        """Submit ``mark``, a fingerprint of this reader's first samples. Wait for all ranks, and return `found`."""
        self._cells[1 + (worker or 0)] = mark
        if worker is None:
            self._agree()
        parent = os.getppid()
        while self.found is None and (worker is None or os.getppid() == parent):
            time.sleep(0.001)
        return bool(self.found)

    def settle(self, iterator: Iterator[Any]) -> None:
        """Wait until all loader workers of this rank have submitted fingerprints, and determine `found`. Collective."""
        if self._workers and self.found is None:
            workers = getattr(iterator, "_workers", ())
            while not bool(self._cells[1:].all()) and all(worker.is_alive() for worker in workers):
                time.sleep(0.001)
            self._agree()

    def _agree(self) -> None:
        numbers = self._gather(torch.tensor([self._workers])).flatten().tolist()
        if len(set(numbers)) > 1:
            raise MisconfigurationException(WORKERS.format(name=self._name, found=numbers))
        marks: Tensor = self._gather(self._cells[1:].clone())
        by_reader = [set(column) for column in marks.T.tolist()]
        # A sample without a fingerprint proves nothing: the streams may be equal.
        own = any(len(column) > 1 and not column & {0.0, UNKNOWN, FAILED} for column in by_reader)
        self.found = own
        if own:
            text = LENGTH if self._has_length else TAKEN
            message = text.format(name=self._name, kind=self._kind, ranks=len(numbers))
            if self._has_length:
                raise MisconfigurationException(message)
            rank_zero_info(message)


# -- loaders that make their own batches ------------------------------------------------------------------------

USED_UNCHANGED = (
    "{name} is a {kind}, and {reason}, so lockstep uses it unchanged. The loader determines the order of its samples, "
    "and a run that resumes within an epoch reads it again, from the start of the epoch up to that point."
)
NOT_SHARED = (
    "{name} is a {kind}, and {reason}, so lockstep cannot split it among {size} ranks, and each would see all its "
    "samples. Return a plain DataLoader; add a DistributedSampler; or build a loader with its own samples on each rank "
    "and set Trainer(use_distributed_sampler=False)."
)


def makes_own_batches(loader: DataLoader[Any]) -> str | None:
    """Return the reason why lockstep cannot choose the indices that a loader fetches; None if lockstep can choose them.

    A class may override ``__iter__`` to transform each batch, which a copy with other indices does, too. Such a copy
    fails if the loader stores an iterator over its own sampler. It also fails if the loader's length differs from its
    sampler's, because the loader then reads more or less than one pass.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__:
        return None
    held = [name for name, value in vars(loader).items() if name != "_iterator" and isinstance(value, Iterator)]
    if held:
        return f"it stores its own iterator (`{held[0]}`)"
    if isinstance(loader.dataset, IterableDataset) or kind.__len__ is DataLoader.__len__:
        return None
    own, plain = length_of(loader), None
    with contextlib.suppress(TypeError, NotImplementedError):  # a sampler without a length
        plain = DataLoader.__len__(loader)
    return None if own == plain else f"its length is {own} batches, but that of its sampler is {plain}"


def check_own_batches(loader: DataLoader[Any], spec: SourceSpec, name: str, reason: str) -> None:
    """Log that a loader is used unchanged. Raise an error if ranks would read the same samples.

    Raises:
        MisconfigurationException: several ranks would read the same samples.
    """
    if isinstance(loader.dataset, IterableDataset):
        is_sharded = shards_itself(loader.dataset)
    else:
        samplers = [loader.sampler, *holders(loader.batch_sampler)]
        is_sharded = any(isinstance(each, DistributedSampler) for each in samplers)
    words = {"name": name, "kind": type(loader).__name__, "reason": reason}
    if spec.size > 1 and not is_sharded:
        raise MisconfigurationException(NOT_SHARED.format(size=spec.size, **words))
    rank_zero_info(USED_UNCHANGED.format(**words))
