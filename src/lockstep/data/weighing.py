"""How the micro-batches of a window are weighed: by their samples, and the loss of each by its share of the window."""

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
    """(weight, share) of a rank's micro-batches, given the sum of all weights of the window."""
    return [(float(weight), weight * size / total if weight else 0.0) for weight in mine]


class Share(float):
    """The share of a micro-batch of several loaders that are cut unevenly: that of its heaviest part.

    Attributes:
        parts: the share of each part, 0.0 where this rank has no samples of it: what the mean over the part's samples
            is multiplied with.
    """

    parts: tuple[float, ...]


def share_of(share: float, part: float) -> float:
    """Of a micro-batch's share that of a part of its samples, which is the same part of each loader's."""
    if type(share) is not Share:
        return share * part
    made = Share(share * part)
    made.parts = tuple(each * part for each in share.parts)
    return made


def weigh_parts(
    weighed: Sequence[Part], parts: Sequence[Sequence[float]], totals: Sequence[float], size: int
) -> list[Part]:
    """(weight, share) of micro-batches of several loaders.

    Args:
        weighed: as :func:`weigh` gives them.
        parts: of each micro-batch the weights of its parts on this rank.
        totals: of each part the sum of all weights of the window.
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
    """The losses of several loaders, each weighed by its own loader's samples, added up.

    Args:
        output: what ``training_step`` returned.
        nest: of the batch.
        share: of the micro-batch.

    Raises:
        MisconfigurationException: the losses are in another nest, or a weight stands beside them.
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
