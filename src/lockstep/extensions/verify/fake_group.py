"""Process group for simulated ranks, whose collectives return at once and send nothing."""

import functools
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.extensions.verify.watch import Watch, patch, record_collective

BACKEND = "fake"
"""Name of torch's backend that sends nothing."""


def store() -> dist.Store:
    """Create the store for process groups of the fake backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    made: dist.Store = FakeStore()
    return made


def install(watch: Watch) -> None:
    """Make broadcasts return the values that rank 0 has sent, since rank 0 runs before the other ranks.

    The fake backend leaves receive buffers as they are, so that ranks would continue with whatever is in memory.
    Rank 0 writes the values to files, which the other ranks read.
    """
    rank, folder, numbers = watch.settings.rank, Path(watch.settings.folder) / "broadcasts", itertools.count(1)
    folder.mkdir(exist_ok=True)
    send = dist.broadcast

    def exchange(value: object) -> object:
        path = folder / f"{next(numbers)}.pt"
        if rank == 0:
            torch.save(value, path, pickle_module=pickle)
        return torch.load(path, weights_only=False) if path.exists() else None

    @functools.wraps(dist.broadcast)
    def broadcast(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = send(tensor, *args, **kwargs)
        found = exchange(tensor.detach().clone())
        # the shape may differ where ranks broadcast in another order: the comparison then reports that
        if isinstance(found, Tensor) and found.shape == tensor.shape:
            tensor.detach().copy_(found)
        return work

    @functools.wraps(dist.broadcast_object_list)
    def broadcast_objects(object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        found = exchange(list(object_list))
        if isinstance(found, list):
            object_list[:] = found

    patch(dist, "broadcast", broadcast)
    patch(dist, "broadcast_object_list", broadcast_objects)


def bucket_hook(watch: Watch) -> Callable[[object, dist.GradBucket], torch.futures.Future[Tensor]]:
    """Return a communication hook for DistributedDataParallel that records each bucket and sends nothing."""

    def record_bucket(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        record_collective(watch, "all_reduce", bucket.buffer())
        # a rank waits in the collective that is its last event, so the end of this one is recorded as well
        watch.journal.record("collected", number=0)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return record_bucket
