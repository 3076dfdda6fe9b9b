"""A process group without the other ranks: collectives return at once, and nothing is sent."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.verify.watch import Watch, note_collective, put

BACKEND = "fake"
"""The name of torch's backend that sends nothing."""


def store() -> dist.Store:
    """The store that belongs to it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made: dist.Store = FakeStore()
    return made


def install(watch: Watch) -> None:
    """Let ranks read what rank 0, which has run before them, has sent: they would go on with what is in memory."""
    of_rank_0 = _OfRankZero(watch)
    put(dist, "broadcast", of_rank_0.of_tensors(dist.broadcast))
    put(dist, "broadcast_object_list", of_rank_0.of_objects(dist.broadcast_object_list))
    put(dist, "scatter_object_list", of_rank_0.scattered(dist.scatter_object_list))


class _OfRankZero:
    """What rank 0 broadcasts and scatters, in order: written down by it, and read by the others.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self._rank = watch.settings.rank
        self._folder = Path(watch.settings.folder) / "broadcasts"
        self._folder.mkdir(exist_ok=True)
        self._number = 0

    def of_tensors(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`broadcast`, whose tensor is then rank 0's."""

        @functools.wraps(function)
        def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = function(tensor, *args, **kwargs)
            found = self._exchange(tensor.detach().clone())
            if isinstance(found, Tensor) and found.shape == tensor.shape:
                tensor.detach().copy_(found)
            return work

        return broadcast

    def of_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`broadcast_object_list`, which gives rank 0's objects."""

        @functools.wraps(function)
        def broadcast(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
            found = self._exchange(list(object_list))
            if isinstance(found, list):
                object_list[:] = found

        return broadcast

    def scattered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`scatter_object_list`, which gives a rank its part of rank 0's objects."""

        @functools.wraps(function)
        def scatter(scatter_object_output_list: list[Any], scatter_object_input_list: Any, *_: Any, **__: Any) -> None:
            found = self._exchange(scatter_object_input_list)
            if isinstance(found, list):
                scatter_object_output_list[0] = found[min(self._rank, len(found) - 1)]

        return scatter

    def _exchange(self, value: object) -> object:
        self._number += 1
        path = self._folder / f"{self._number}.pt"
        if self._rank == 0:
            torch.save(value, path, pickle_module=pickle)
        return torch.load(path, weights_only=False) if path.exists() else None


def bucket_hook(watch: Watch) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook for DistributedDataParallel that notes each bucket, and sends nothing."""

    def noted(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        note_collective(watch, "all_reduce", bucket.buffer())
        watch.journal.note("collected", number=0)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return noted
