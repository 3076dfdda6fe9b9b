"""What feeds are made of: loaders opened, named, limited, and compared over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec
from torch.utils.data import DataLoader

from lockstep.data.chosen import make_source
from lockstep.data.combined import CombinedLoader, flatten
from lockstep.data.sampler import length_of
from lockstep.data.source import Draft, Source, Untouched
from lockstep.ground.errors import MisconfigurationException

Gather = Callable[[Tensor], Tensor]
"""Every rank's tensor (same shape and dtype), stacked along a new first dimension."""

Limit = int | float | None
"""As of a ``limit_*_batches`` flag: a number of batches, a part of the length (float), 1.0 or None: all."""


def opened(source: Any, mode: str) -> tuple[list[Any], TreeSpec | None, str]:
    """(loaders, their nest or None if there is but a bare one, mode) of what a loader hook returned."""
    if isinstance(source, CombinedLoader):
        return source.flattened, flatten(source.iterables)[1], source.mode
    loaders, spec = flatten(source)
    bare = len(loaders) == 1 and loaders[0] is source
    return loaders, None if bare else spec, mode


def make_sources(loaders: list[Any], draft: Draft, names: list[str]) -> list[Source]:
    """A source for each loader."""
    parts = enumerate(zip(loaders, names, strict=True))
    return [make_source(loader, draft, number, name) for number, (loader, name) in parts]


def names_of(hook: str, count: int) -> list[str]:
    """What messages call the loaders of a hook."""
    return [hook] if count == 1 else [f"{hook}[{number}]" for number in range(count)]


def shares(mine: Sequence[float], total: float, size: int) -> list[tuple[float, float]]:
    """(weight, share) of a rank's micro-batches, given the sum of all weights of the window."""
    return [(float(weight), weight * size / total if weight else 0.0) for weight in mine]


class Share(float):
    """The share of a micro-batch of several loaders that are cut unevenly: that of its heaviest part.

    Attributes:
        parts: the share of each part, 0.0 where this rank has no samples of it: what the mean over the part's samples
            is multiplied with.
    """

    parts: tuple[float, ...]


def part_shares(
    shares: list[tuple[float, float]], parts: Sequence[Sequence[float]], totals: Sequence[float], size: int
) -> list[tuple[float, float]]:
    """(weight, share) of micro-batches of several loaders.

    Args:
        shares: as :func:`shares` gives them.
        parts: of each micro-batch the weights of its parts on this rank.
        totals: of each part the sum of all weights of the window.
        size: number of ranks.
    """
    found = []
    for (weight, share), mine in zip(shares, parts, strict=True):
        each = tuple(part * size / total if part else 0.0 for part, total in zip(mine, totals, strict=True))
        if weight and any(part and abs(part - share) > 1e-12 * share for part in each):
            uneven = Share(share)
            uneven.parts = each
            share = uneven
        found.append((weight, share))
    return found


def limited(limit: Limit, length: int | float, flag: str) -> int | float:
    """Number of micro-batches under a ``limit_*_batches`` flag.

    Raises:
        MisconfigurationException: a part of a length that is not known, or less than one batch.
    """
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return length
    if isinstance(limit, int) or limit == 0:
        return min(int(limit), length)
    if math.isinf(length):
        raise MisconfigurationException(
            f"{flag}={limit} is a part of the loader's length, but the loader has none (no `__len__`): give "
            f"a number of batches, such as {flag}=100, or 1.0 for all."
        )
    count = int(length * limit)
    if count == 0 and length > 0:
        raise MisconfigurationException(
            f"{flag}={limit} of {length} batches is less than one: give at least {1 / length:.4g}, or a "
            f"number of batches, such as {flag}=1."
        )
    return count


def longest(count: int | float, gather: Gather) -> int | float:
    """The number of micro-batches of the rank that has most."""
    most = gather(torch.tensor(count, dtype=torch.float64)).max().item()
    return most if math.isinf(most) else int(most)


def check_alike(parts: list[Source], draft: Draft, names: list[str]) -> bool:
    """Whether loaders are of the same length on all ranks; those that lockstep shares out must be.

    Raises:
        MisconfigurationException: the ranks have different data sets or batch sizes.
    """
    if draft.gather is None or not parts:
        return True
    facts = [[-1 if math.isinf(part.length) else int(part.length), part.even, part.batch, part.rest] for part in parts]
    ranks = draft.gather(torch.tensor(facts, dtype=torch.int64))
    same = (ranks == ranks[0]).all(dim=2).all(dim=0).tolist()
    for number, (part, name) in enumerate(zip(parts, names, strict=True)):
        if not same[number] and not isinstance(part, Untouched):
            lengths = ", ".join(str(length) for length in ranks[:, number, 0].tolist())
            raise MisconfigurationException(
                f"{name} is not the same on all ranks (batches by rank: {lengths}). lockstep shares one data "
                "set out over the ranks: build the same loader on each; or, if each rank has data of its "
                "own, set Trainer(use_distributed_sampler=False)."
            )
    return all(same)


def check_batches(parts: list[Source], loaders: list[Any], names: list[str], ranks: int) -> None:
    """Refuse training loaders without batches on so many ranks.

    Raises:
        MisconfigurationException: with the reason.
    """
    for part, loader, name in zip(parts, loaders, names, strict=True):
        if part.planned(ranks) == 0:
            raise MisconfigurationException(no_batches(loader, name, ranks))


def no_batches(loader: Any, name: str, size: int) -> str:
    """Why a loader gives no batches."""
    samples = length_of(getattr(loader, "dataset", None))
    if not isinstance(loader, DataLoader) or not samples:
        return f"{name} has no batches: its data set is empty (length 0)."
    if loader.drop_last:
        needed = f"batch_size={loader.batch_size}" + (f" x {size} ranks" if size > 1 else "")
        return (
            f"{name} has no batches: drop_last=True drops a global batch that is not full, and the {samples} "
            f"samples do not fill one ({needed}). Set drop_last=False or a smaller batch_size."
        )
    return f"{name} has no batches: its sampler yields no samples (its `len()` is 0)."
