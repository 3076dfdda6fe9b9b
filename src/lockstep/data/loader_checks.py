"""Checks of loaders before their first batch: limits, empty loaders, and equal lengths on all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lockstep.data.source import Gather, LoaderSource, SourceSpec, length_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import does

Limit = int | float | None
"""Value of a ``limit_*_batches`` flag: a number of batches, a fraction of the length (float); 1.0 or None: all."""


def limited(limit: Limit, length: int | float, flag: str) -> int | float:
    """Return how many of a loader's ``length`` micro-batches the ``limit`` of a ``limit_*_batches`` flag allows.

    Raises:
        MisconfigurationException: the limit is a fraction of an unknown length, or amounts to less than one batch.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return length
    if isinstance(limit, int) or limit == 0:
        return min(int(limit), length)
    if math.isinf(length):
        raise MisconfigurationException(
            f"{flag}={limit} is a fraction of the loader's length, but the loader has no length (no `__len__`): pass "
            f"a number of batches, such as {flag}=100, or 1.0 for all batches."
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise MisconfigurationException(
            f"{flag}={limit} of {length} batches is less than one batch: pass at least {1 / length:.4g}, or a "
            f"number of batches, such as {flag}=1."
        )
    return count


def longest(count: int | float, gather: Gather) -> int | float:
    """Return the maximum of the ranks' values of ``count``. Collective."""
    most = gather(torch.tensor(count, dtype=torch.float64)).max().item()
    return most if math.isinf(most) else int(most)


@does("comparing the loaders of the ranks")
def check_alike(parts: list[LoaderSource], spec: SourceSpec, names: list[str]) -> bool:
    """Compare the loaders of all ranks. Return True if each loader has the same length on all ranks. Collective.

    Loaders that lockstep splits among the ranks must have equal lengths; a rank's own loaders may differ.

    Raises:
        MisconfigurationException: the ranks have different data sets or batch sizes.
    """
    if spec.gather is None or not parts:
        return True
    mine = [
        [-1 if math.isinf(part.length) else int(part.length), part.samples, part.even, part.batch, part.rest]
        for part in parts
    ]
    ranks = spec.gather(torch.tensor(mine, dtype=torch.int64))
    same = (ranks == ranks[0]).all(dim=2).all(dim=0).tolist()
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        if not same[number] and not part.own:
            raise MisconfigurationException(
                f"{name} is not the same on all ranks ({_lengths(ranks[:, number])}), but lockstep splits one data set "
                "among the ranks. Build the same loader on each rank; or, if each rank has its own data, set "
                "Trainer(use_distributed_sampler=False)."
            )
    return all(same)


def _lengths(ranks: Tensor) -> str:
    """Describe a loader's length on each rank: in batches, or in samples if only the numbers of samples differ."""
    batches, samples = ranks[:, 0].tolist(), ranks[:, 1].tolist()
    only_samples = len(set(batches)) == 1 and len(set(samples)) > 1
    what, numbers = ("samples", samples) if only_samples else ("batches", batches)
    return f"{what} by rank: {', '.join(map(str, numbers))}"


def check_batches(parts: list[LoaderSource], loaders: list[Any], names: list[str], ranks: int) -> None:
    """Raise an error if a training loader yields no batch when ``ranks`` ranks share it.

    Raises:
        MisconfigurationException: a loader has no batches; the message has the reason.
    """
    for part, loader, name in zip(parts, loaders, names, strict=True):
        if part.planned(ranks) == 0:
            raise MisconfigurationException(no_batches(loader, name, ranks))


def check_trainable(source: object, loaders: list[Any], mode: str) -> None:
    """Raise an error if a ``train_dataloader`` hook returned no loader, or a CombinedLoader in sequential mode.

    Raises:
        MisconfigurationException: training cannot use the returned value.
    """
    if mode == "sequential":
        raise MisconfigurationException(
            'CombinedLoader(mode="sequential") is for evaluation; for training choose "min_size", '
            '"max_size" or "max_size_cycle".'
        )
    if not loaders:
        raise MisconfigurationException(
            f"train_dataloader returned {source!r}, which contains no loader: return at least one."
        )


def no_batches(loader: object, name: str, size: int) -> str:
    """Return an error message that explains why a loader has no batches."""
    samples = length_of(getattr(loader, "dataset", None))
    if not isinstance(loader, DataLoader) or not samples:
        return f"{name} has no batches, because its data set is empty (length 0)."
    # a DistributedSampler's length is one rank's share, not the total
    drawn = samples if isinstance(loader.sampler, DistributedSampler) else length_of(loader.sampler)
    if loader.drop_last and drawn:
        needed = f"batch_size={loader.batch_size}" + (f" x {size} ranks" if size > 1 else "")
        return (
            f"{name} has no batches, because drop_last=True drops an incomplete global batch and its {drawn} samples "
            f"do not fill one ({needed}). Set drop_last=False or a smaller batch_size."
        )
    return f"{name} has no batches, because its sampler yields no samples (its `len()` is 0)."
