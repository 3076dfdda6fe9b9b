"""Loader classes that make batches in their own way, which a copy of the loader cannot reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lockstep.data.own_parts import shards_itself
from lockstep.data.source import SourceSpec, holders, length_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info

TAKEN_AS_IT_IS = (
    "{name} is a {kind}, and {reason}: lockstep takes it as it is. The order of its samples is its own, and a run that "
    "is resumed in the middle of an epoch reads it again up to there."
)
NOT_SHARED = (
    "{name} is a {kind}, and {reason}: lockstep cannot share it out over {size} ranks, each of which would see all "
    "that it gives. Give a plain DataLoader; or give each rank samples of its own, by a DistributedSampler or by "
    "Trainer(use_distributed_sampler=False), which has each rank read the loader that it made."
)


def makes_own_batches(loader: DataLoader[Any]) -> str | None:
    """Return why a copy of the loader with other indices would not yield the loader's batches; None if it would.

    A class may override ``__iter__`` to transform each batch, and a copy of the loader does the same. It does
    not if the loader holds an iterator over its own sampler, or if its length differs from that of its sampler,
    since it then reads more or less than one pass.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ and kind.__len__ is DataLoader.__len__:
        return None
    held = [name for name, value in vars(loader).items() if name != "_iterator" and isinstance(value, Iterator)]
    if held:
        return f"it holds an iterator of its own (`{held[0]}`)"
    if isinstance(loader.dataset, IterableDataset) or kind.__len__ is DataLoader.__len__:
        return None
    own, plain = length_of(loader), _plain_length(loader)
    return None if own == plain else f"its length is {own} batches, where that of its sampler is {plain}"


def _plain_length(loader: DataLoader[Any]) -> int | None:
    try:
        return DataLoader.__len__(loader)
    except (TypeError, NotImplementedError):
        return None


def check_own_batches(loader: DataLoader[Any], spec: SourceSpec, name: str, reason: str) -> None:
    """Report that a loader is used unchanged, or refuse one that several ranks would each read completely.

    Raises:
        MisconfigurationException: nothing gives each rank its own samples.
    """
    told = {"name": name, "kind": type(loader).__name__, "reason": reason}
    if spec.size > 1 and not _has_own_parts(loader):
        raise MisconfigurationException(NOT_SHARED.format(size=spec.size, **told))
    rank_zero_info(TAKEN_AS_IT_IS.format(**told))


def _has_own_parts(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset):
        return shards_itself(loader.dataset)
    return any(isinstance(each, DistributedSampler) for each in [loader.sampler, *holders(loader.batch_sampler)])
