"""Iterable data sets that shard themselves over the ranks: recognized by their type or by their first samples."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info

EMPTY, UNKNOWN, FAILED = 1.0, 2.0, 3.0
"""Markers in place of a fingerprint: there is no sample, it has no fingerprint, or it could not be read."""
_SHARED_OUT, _OWN = 1.0, 2.0

TAKEN = (
    "{name}: {kind} begins with another sample on each rank, and is taken to shard itself over the ranks: each rank "
    "reads its own stream to the end. If it draws the same samples on each rank in an order of chance, each of them is "
    "seen {ranks} times: seed what it draws by `set_epoch(epoch)`, and lockstep shares it out."
)
LENGTH = (
    "{name}: {kind} begins with another sample on each rank. If it shards itself over the ranks, its `__len__` may be "
    "that of all samples or of a rank's own, and lockstep cannot tell how long an epoch is: set "
    "Trainer(use_distributed_sampler=False), by which each rank reads its own loader to the end. If all ranks are to "
    "read the same samples, seed what it draws by `set_epoch(epoch)`, and lockstep shares it out."
)
WORKERS = "{name} has another num_workers on each rank ({found}): samples would be seen twice, and others never."
OTHER_RANKS = (
    "{name}: {kind} shards itself over the ranks, and the epoch was begun on another number of ranks: nobody can tell "
    "which of its samples are left. Resume with as many ranks, or from a checkpoint of the end of an epoch."
)


def shards_itself(dataset: object) -> bool:
    """Return True if a data set is known to give each rank its own samples.

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
    """A test of whether the ranks' streams are already parts of the data, by their first samples.

    The process that reads the stream (the rank, or one of its loader workers) asks and waits for the answer.

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
        # the answer, then a fingerprint of each reader's first samples
        self._cells = torch.zeros(max(1, workers) + 1, dtype=torch.float64)
        if workers:
            self._cells = self._cells.share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_gather": None}  # only the rank's process can gather

    @property
    def found(self) -> bool | None:
        """The answer; None while it is unknown."""
        answer = float(self._cells[0])
        return None if not answer else answer == _OWN

    @found.setter
    def found(self, own: bool | None) -> None:
        self._cells[0] = 0.0 if own is None else _OWN if own else _SHARED_OUT

    def ask(self, worker: int | None, mark: float) -> bool:
        """Return the answer, given a fingerprint of the reader's first samples. Waits for all ranks."""
        self._cells[1 + (worker or 0)] = mark
        if worker is None:
            self._agree()
        parent = os.getppid()
        while self.found is None and (worker is None or os.getppid() == parent):
            time.sleep(0.001)
        return bool(self.found)

    def settle(self, iterator: Iterator[Any]) -> None:
        """Wait in the rank's process until the workers of a pass ask, then answer. Collective."""
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
        told = [set(column) for column in marks.T.tolist()]
        own = any(len(column) > 1 and not column & {0.0, UNKNOWN, FAILED} for column in told)
        self.found = own
        if own:
            text = LENGTH if self._has_length else TAKEN
            said = text.format(name=self._name, kind=self._kind, ranks=len(numbers))
            if self._has_length:
                raise MisconfigurationException(said)
            rank_zero_info(said)
