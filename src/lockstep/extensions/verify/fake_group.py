"""Process group for simulated ranks, whose collectives return at once and send nothing."""

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.verify.watch import Watch, note_collective, patch

BACKEND = "fake"
"""Name of torch's backend that sends nothing."""


def store() -> dist.Store:
    """Create the store that `BACKEND` needs."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made: dist.Store = FakeStore()
    return made


def install(watch: Watch) -> None:
    """Make broadcasts and scatters return the values that rank 0 sent in its run, before the other ranks.

    The fake backend leaves receive buffers as they are, so that ranks would continue with whatever is in memory.
    """
    sent = _SentByRankZero(watch)
    patch(dist, "broadcast", sent.broadcast_tensor(dist.broadcast))
    patch(dist, "broadcast_object_list", sent.broadcast_objects(dist.broadcast_object_list))
    patch(dist, "scatter_object_list", sent.scatter_objects(dist.scatter_object_list))


class _SentByRankZero:
    """Values that rank 0 broadcasts and scatters, which it writes to files for the other ranks.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self._rank = watch.settings.rank
        self._folder = Path(watch.settings.folder) / "broadcasts"
        self._folder.mkdir(exist_ok=True)
        self._number = 0

    def broadcast_tensor(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `broadcast` so that the tensor has rank 0's values afterwards."""

        @functools.wraps(function)
        def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            work = function(tensor, *args, **kwargs)
            found = self._exchange(tensor.detach().clone())
            # the shape may differ where ranks broadcast in another order: the comparison then reports that
            if isinstance(found, Tensor) and found.shape == tensor.shape:
                tensor.detach().copy_(found)
            return work

        return broadcast

    def broadcast_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `broadcast_object_list` so that the list has rank 0's objects afterwards."""

        @functools.wraps(function)
        def broadcast(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
            found = self._exchange(list(object_list))
            if isinstance(found, list):
                object_list[:] = found

        return broadcast

    def scatter_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `scatter_object_list` so that the output has this rank's item of rank 0's input list."""

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
    """Return a communication hook for DistributedDataParallel that records each bucket and sends nothing."""

    def note_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        note_collective(watch, "all_reduce", bucket.buffer())
        # a rank waits in the collective that is its last event, so the end of this one is recorded as well
        watch.journal.note("collected", number=0)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return note_bucket
