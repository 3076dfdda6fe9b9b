"""Loaders whose order does not change, for runs that see the same few batches in every epoch."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lockstep.data.source import copy_loader
from lockstep.ground.rank import rank_zero_warn


def in_order(loader: Any, name: str) -> Any:
    """The loader, reading its data set from the beginning and in order.

    A ``DistributedSampler`` keeps its share and stops shuffling. A batch sampler of the user's own kind and loaders
    over iterable data sets are left as they are; what the first draws depends on the epoch that it is told.

    Args:
        loader: any iterable of batches; the user's object is not changed.
        name: for the warning that the order of the user's is given up.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        rank_zero_warn(
            f"Trainer(overfit_batches=...): {name} has a batch sampler of its own kind, {type(batches).__name__}; it "
            "chooses the batches; see to it that it chooses the same in every epoch."
        )
        return loader
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) is SequentialSampler or (batches is None and isinstance(sampler, BatchSampler)):
        return loader
    if isinstance(sampler, DistributedSampler):
        if not sampler.shuffle:
            return loader
        ordered: Any = copy.copy(sampler)
        ordered.shuffle = False
    else:
        ordered = SequentialSampler(loader.dataset)  # type: ignore[arg-type]  # it asks for a length only
    rank_zero_warn(f"Trainer(overfit_batches=...): {name} shuffles; for these few batches it is read in order.")
    if batches is None:
        return copy_loader(loader, sampler=ordered)
    plain = BatchSampler(ordered, batches.batch_size, batches.drop_last)
    return copy_loader(loader, sampler=ordered, batch_sampler=plain)
