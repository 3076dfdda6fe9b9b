"""Accumulation window: one rank's micro-batches of an optimizer step, with their weights and loss factors (shares)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from operator import not_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lockstep.ground.errors import MisconfigurationException

_END = object()
Part = tuple[float, float]
"""The pair (weight, share) of a micro-batch; see `Window`."""


class Window:
    """An accumulation window: this rank's micro-batches of one optimizer step. Iterate over it only once.

    Iterating yields (batch, weight, share). ``weight`` is the number of samples drawn for the micro-batch. It is 0.0
    if this rank's part is empty; the batch is then None or a padding batch. ``share`` is the factor for the loss of
    the micro-batch: weight x ranks / (sum of the weights of all ranks and micro-batches). With these factors, the sum
    over the window, averaged over the ranks, is the mean over all samples of the window.

    Attributes:
        size: number of remaining micro-batches, equal on all ranks.
        num_done: number of micro-batches of this window that an earlier attempt of the run has done.
        last: True for the last window of the epoch.
        absent: for each micro-batch, the ranks with an empty part; None if no part of the window is empty.
        of_rank: each rank's samples in the window.
        gap: (rank, loader) for a rank that has samples of a micro-batch but none of that loader; None if there is none.
    """

    __slots__ = ("_among", "_batches", "_parts", "absent", "gap", "last", "num_done", "of_rank", "size")

    def __init__(
        self,
        batches: Iterator[Any],
        parts: Sequence[Part],
        last: bool,
        of_rank: Sequence[float],
        num_done: int = 0,
        absent: Sequence[tuple[int, ...]] | None = None,
        among: Callable[[Sequence[int] | None], Sequence[Part]] | None = None,
        gap: tuple[int, int] | None = None,
    ) -> None:
        self.gap, self.of_rank = gap, of_rank
        self.absent = absent[num_done:] if absent is not None and any(absent) else None
        self._batches = batches
        self._parts = parts[num_done:] if num_done else parts
        self.size = len(parts) - num_done
        self.num_done = num_done
        self.last = last
        self._among = among  # returns the parts for a subset of averaging ranks; None: all weights are equal

    def share_among(self, ranks: Sequence[int]) -> None:
        """Recompute the shares for a window in which only ``ranks``, including this rank, average their gradients."""
        if self._among is not None:
            self._parts = self._among(ranks)[self.num_done :]

    def __iter__(self) -> Iterator[tuple[Any, float, float]]:
        batches = self._batches
        for weight, share in self._parts:
            batch = next(batches, _END)
            if batch is _END:
                raise RuntimeError(
                    "A training loader yielded fewer batches than its length (its `len()`): correct its `__len__`."
                )
            yield batch, weight, share


def empty_ranks(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose weight (number of samples) is 0."""
    return tuple(itertools.compress(itertools.count(), map(not_, weights))) if 0 in weights else ()


def first_gap(of_parts: Sequence[Sequence[float]], of_rank: Sequence[float]) -> tuple[int, int] | None:
    """Return (rank, loader index): a rank that has samples of a micro-batch, but none from the loader with this index.

    Return None without such a rank.
    """
    gaps = ((rank, loader) for loader, part in enumerate(of_parts) for rank in empty_ranks(part) if of_rank[rank])
    return next(gaps, None)


# -- weights and shares ------------------------------------------------------------------------------------------


def weigh(mine: Sequence[float], total: float, size: int) -> list[Part]:
    """Return the (weight, share) of each micro-batch. ``total`` is the sum of all ranks' weights in the window."""
    return [(float(weight), weight * size / total if weight else 0.0) for weight in mine]


class Share(float):
    """The share of a micro-batch with parts from several loaders, computed from the weight of its largest part.

    Attributes:
        parts: the share of each part, by which the mean over the part's samples is multiplied; 0.0 if this rank has no
            samples of it.
    """

    parts: tuple[float, ...]


def share_of(share: float, part: float) -> float:
    """Multiply a share by the fraction ``part``, and do the same with the shares of its parts. Return the new share."""
    if type(share) is not Share:
        return share * part
    made = Share(share * part)
    made.parts = tuple(each * part for each in share.parts)
    return made


def weigh_parts(
    weighed: Sequence[Part], parts: Sequence[Sequence[float]], totals: Sequence[float], size: int
) -> list[Part]:
    """Return the (weight, share) of each micro-batch if micro-batches have parts from several loaders.

    Args:
        weighed: the result of :func:`weigh`.
        parts: for each micro-batch, the weights of its parts on this rank.
        totals: for each part, the sum of all weights of the window.
        size: number of ranks.
    """
    found = []
    for (weight, share), mine in zip(weighed, parts, strict=True):
        each = tuple(part * size / total if part else 0.0 for part, total in zip(mine, totals, strict=True))
        if weight and any(part and abs(part - share) > 1e-12 * share for part in each):
            uneven = Share(share)
            uneven.parts = each
            share = uneven
        found.append((weight, share))
    return found


def weighed_by_part(output: dict[str, Any], nest: TreeSpec, share: float) -> Tensor:
    """Return the sum of the loaders' losses in ``output``, each multiplied by the share of its loader's part.

    Args:
        output: the value that ``training_step`` returned.
        nest: the structure of the batch.
        share: the share of the micro-batch.

    Raises:
        MisconfigurationException: the structure of the losses differs, or the output contains a weight.
    """
    losses = output["loss"]
    try:
        leaves = nest.flatten_up_to(losses)
    except ValueError:
        leaves = []
    known = [leaf for leaf in leaves if leaf is not None]
    if not known or not all(isinstance(leaf, Tensor) for leaf in known) or "weight" in output:
        raise MisconfigurationException(
            f'`training_step` returned {{"loss": {losses!r:.200}}}: return one loss per loader in the structure of the '
            'batch (None where the batch is None). Omit "weight", because the loss of each loader is '
            "weighted by the loader's own samples."
        )
    parts = share.parts if isinstance(share, Share) else (share,) * len(leaves)
    weighed = [leaf * part for leaf, part in zip(leaves, parts, strict=True) if leaf is not None]
    return torch.stack(weighed).sum()
