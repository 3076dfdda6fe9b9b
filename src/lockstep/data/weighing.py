"""Weights of the micro-batches of a window (their numbers of samples) and shares of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from lockstep.ground.errors import MisconfigurationException

Part = tuple[float, float]
"""(weight, share) of a micro-batch; see `lockstep.data.window.Window`."""


def weigh(mine: Sequence[float], total: float, size: int) -> list[Part]:
    """Return (weight, share) of a rank's micro-batches, given the sum of all weights of the window."""
    return [(float(weight), weight * size / total if weight else 0.0) for weight in mine]


class Share(float):
    """The share of a micro-batch of several loaders that are cut unevenly: the share of its heaviest part.

    Attributes:
        parts: the share of each part, by which the mean over the part's samples is multiplied; 0.0 if this rank has no
            samples of it.
    """

    parts: tuple[float, ...]


def share_of(share: float, part: float) -> float:
    """Return the share of a fraction ``part`` of a micro-batch's samples; the fraction is the same for each loader."""
    if type(share) is not Share:
        return share * part
    made = Share(share * part)
    made.parts = tuple(each * part for each in share.parts)
    return made


def weigh_parts(
    weighed: Sequence[Part], parts: Sequence[Sequence[float]], totals: Sequence[float], size: int
) -> list[Part]:
    """Return (weight, share) of micro-batches of several loaders.

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
    """Return the sum of several loaders' losses, each weighted by its own loader's samples.

    Args:
        output: the value that ``training_step`` returned.
        nest: the structure of the batch.
        share: the share of the micro-batch.

    Raises:
        MisconfigurationException: the losses have another structure, or the output contains a weight.
    """
    losses = output["loss"]
    try:
        leaves = nest.flatten_up_to(losses)
    except ValueError:
        leaves = []
    known = [leaf for leaf in leaves if leaf is not None]
    if not known or not all(isinstance(leaf, Tensor) for leaf in known) or "weight" in output:
        raise MisconfigurationException(
            f'`training_step` returned {{"loss": {losses!r:.200}}}: give one loss for each loader, in the nest in '
            'which its batch came, None where that is None; and no "weight" beside, since each loader weighs by '
            "its own samples."
        )
    parts = share.parts if isinstance(share, Share) else (share,) * len(leaves)
    weighed = [leaf * part for leaf, part in zip(leaves, parts, strict=True) if leaf is not None]
    return torch.stack(weighed).sum()
