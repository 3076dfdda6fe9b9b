"""The source that stands for a loader, chosen by how the loader draws; and loaders whose order is fixed."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lockstep.data.cut import Cut
from lockstep.data.measured import Measure
from lockstep.data.order import make_key
from lockstep.data.randomness import draws_nothing
from lockstep.data.sampler import Drawn, Ordered, OwnShare, Schedule, holders, length_of, order_of, own_generator
from lockstep.data.source import Indexed, Source, SourceSpec, Stream, Untouched, copy_loader
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once


def make_source(loader: Any, draft: SourceSpec, number: int, name: str) -> Source:
    """The source for a loader or other iterable.

    Args:
        loader: what a dataloader hook returned, or one part of it.
        draft: rank, seed and the like.
        number: place among the loaders of the stage; loaders of one stage are shuffled apart.
        name: for messages.

    Raises:
        MisconfigurationException: it has a `DistributedSampler` made for other ranks.
    """
    measure = Measure(name, draft.stage)
    if not isinstance(loader, DataLoader) or not draft.distribute:
        if draft.distribute and draft.size > 1:
            warn_once(SEEN_WHOLE.format(name=name, kind=type(loader).__name__, size=draft.size))
        return Untouched(loader, plain_cut(loader, 1), draft, measure)
    key = make_key(draft.seed, draft.stage, number)
    if isinstance(loader.dataset, IterableDataset):
        return Stream(loader, draft, key, measure)
    if draft.torch_order and draft.size == draft.planned == 1:
        return Untouched(loader, plain_cut(loader, 1), draft, measure)
    return make_indexed(loader, draft, key, name)


SEEN_WHOLE = (
    "{name} is a {kind}, no DataLoader: lockstep cannot share it out, and each of the {size} ranks reads all that it "
    "gives. Unless it gives each rank a part of its own, every sample is seen {size} times: make a DataLoader of it, "
    "or shard it by rank. Trainer(use_distributed_sampler=False) says that ranks have data of their own."
)


def plain_cut(loader: Any, size: int) -> Cut | None:
    """How a plain loader's samples are cut over ``size`` ranks; None if its batches are not of one size."""
    if not isinstance(loader, DataLoader):
        return None
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    count = length_of(batches.sampler)
    return None if count is None else Cut(count, batches.batch_size, size, batches.drop_last)


def make_indexed(loader: DataLoader[Any], draft: SourceSpec, key: int, name: str) -> Indexed:
    """Takes over a loader of a map-style data set: finds the schedule that its sampler asks for."""
    quiet = draws_nothing(loader.dataset, loader.collate_fn)
    batches: Any = loader.batch_sampler
    if batches is None and isinstance(loader.sampler, BatchSampler):
        batches = loader.sampler  # batch_size=None: the data set is asked for a list of indices at once
    plain = type(batches) is BatchSampler
    sampler: Any = batches.sampler if plain else (loader.sampler if batches is None else batches)
    alone = batches is None  # each index stands for a whole batch
    measure = Measure(name, draft.stage) if alone else None
    size_of_batch = batches.batch_size if plain else (1 if alone else None)
    drop_last = plain and batches.drop_last
    own = own_generator(sampler)
    order = None
    if plain or alone:
        own_key = key if own is None else make_key(draft.agreed(own.initial_seed()), "generator")
        order = order_of(
            sampler,
            length_of(loader.dataset) or 0,
            seed=draft.seed,
            key=own_key,
            torch_order=draft.torch_order,
        )
    schedule: Schedule
    if order is not None:
        cut = Cut(len(sampler), size_of_batch or 1, draft.size, drop_last)
        schedule = Ordered(cut, order, draft.rank, key=key, borrow=draft.borrow, quiet=quiet, alone=alone)
        return Indexed(loader, schedule, draft, key, measure)
    distributed = next((s for s in holders(sampler) if isinstance(s, DistributedSampler)), None)
    if distributed is not None:
        check_own_share(distributed, draft, name)
    rank, size = (draft.rank, draft.size) if distributed is None else (0, 1)
    drawn = Drawn(
        sampler,
        rank,
        size,
        key=key,
        borrow=draft.borrow,
        quiet=quiet,
        size_of_batch=size_of_batch,
        drop_last=drop_last,
        alone=alone,
        agreed=draft.agreed,
        gather=draft.gather if distributed is None else None,
        name=name,
    )
    return Indexed(loader, drawn if distributed is None else OwnShare(drawn, draft.size), draft, key, measure)


def check_own_share(sampler: DistributedSampler[Any], draft: SourceSpec, name: str) -> None:
    """Refuses a `DistributedSampler` that was made for another number of ranks than there are."""
    if (sampler.rank, sampler.num_replicas) != (draft.rank, draft.size):
        raise MisconfigurationException(
            f"{name} has a DistributedSampler(num_replicas={sampler.num_replicas}, rank={sampler.rank}), but "
            f"this is rank {draft.rank} of {draft.size}. Leave the sampler out: lockstep shares the data "
            "over the ranks by itself; or set Trainer(use_distributed_sampler=False) to have the loader "
            "taken as it is."
        )


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
