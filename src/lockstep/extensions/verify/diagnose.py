"""Says of what a gradient is made: how much of which micro-batch of which rank is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.extensions.verify.recordings import Recording, Value
from lockstep.extensions.verify.steps import STRIDE, strided_sums

_FITS = 1e-6
"""The part of a gradient that may be left over, where it is made of the ranks' own ones."""
_SAME = 1e-7
"""The largest difference of two gradients that is rounding, as part of the largest."""
_NOTHING = torch.zeros(STRIDE, dtype=torch.float64)


@dataclass(frozen=True)
class Shares:
    """Of what a gradient is made.

    Attributes:
        weights: by rank and micro-batch, how much of its gradient is in it; for one process and the mean over ranks
            each is 1 / ranks.
        rest: the part of the gradient that is made of nothing of these.
    """

    weights: Tensor
    rest: float

    @property
    def fits(self) -> bool:
        """Whether it is made of the ranks' gradients."""
        return self.rest < _FITS

    def equal(self, weight: float) -> bool:
        """Whether all of them are in it, each with this weight."""
        return self.fits and bool((self.weights - weight).abs().max() < 1e-5 * max(1.0, abs(weight)))

    @property
    def sum_to_one(self) -> bool:
        """Whether the ranks' weights of each micro-batch add up to 1, as those of a mean over samples do."""
        return bool((self.weights.sum(0) - 1.0).abs().max() < 1e-4)

    def constant(self) -> float | None:
        """The weight that all of them have; None where they have several."""
        mean = self.weights.mean().item()
        return mean if self.equal(mean) else None

    def by_rank(self) -> list[float]:
        """The weight of each rank's first micro-batch."""
        return [round(weight, 4) for weight in self.weights[:, 0].tolist()]

    def rounded(self) -> list[float]:
        """The weights of all ranks' micro-batches."""
        return [round(weight, 3) + 0.0 for weight in self.weights.reshape(-1).tolist()]


class Parts:
    """The ranks' own gradients of one update.

    Args:
        ranks: the run.
        update: which.
    """

    def __init__(self, ranks: Recording, update: int) -> None:
        self.ranks = ranks
        self.update = update
        self._sums = [rank.sums(update) for rank in ranks.ranks if rank.has_made(update)]
        self._backwards = sorted({number for own in self._sums for each in own.values() for number in each})

    @property
    def are_known(self) -> bool:
        """Whether the ranks' own gradients could be seen: not those of sharded parameters."""
        return bool(self._backwards) and not self.ranks.is_sharded

    @property
    def keys(self) -> list[str]:
        """Parameters that have a gradient on some rank."""
        return [key for key in self._sums[0] if any(own.get(key) for own in self._sums)]

    def shares(self, gradient: Mapping[str, Value], keys: Sequence[str] | None = None) -> Shares:
        """Of what a gradient is made, over some parameters or all."""
        keys = [key for key in keys or self.keys if gradient.get(key) is not None]
        if not keys:
            return Shares(torch.zeros(len(self._sums), len(self._backwards)), 1.0)
        target = torch.cat([_summed(gradient.get(key)) for key in keys])
        columns = [
            torch.cat([own.get(key, {}).get(number, _NOTHING) for key in keys])
            for own in self._sums
            for number in self._backwards
        ]
        matrix = torch.stack(columns, 1)
        scale = matrix.norm(dim=0).clamp_min(1e-300)
        solution = torch.linalg.lstsq(matrix / scale, target[:, None], driver="gelsd").solution[:, 0] / scale
        left = (matrix @ solution - target).norm() / target.norm().clamp_min(1e-300)
        return Shares(solution.view(len(self._sums), -1), left.item())

    def is_own(self, gradient: Mapping[str, Value], rank: int, keys: Sequence[str]) -> bool:
        """Whether a rank's gradient is what its own backwards gave, and nothing of other ranks."""
        return not self._astray([gradient], {key: self._sum([self._sums[rank]], key) for key in keys})

    def not_averaged(self, gradients: Sequence[Mapping[str, Value]]) -> list[str]:
        """Parameters whose gradient at the step is not the mean over ranks."""
        return self._astray(gradients, {key: self._sum(self._sums, key) / len(self._sums) for key in self.keys})

    def _sum(self, ranks: Sequence[dict[str, dict[int, Tensor]]], key: str) -> Tensor:
        """What the backwards of ranks gave a parameter."""
        return sum((sums for own in ranks for sums in own.get(key, {}).values()), _NOTHING)

    def _astray(self, gradients: Sequence[Mapping[str, Value]], expected: Mapping[str, Tensor]) -> list[str]:
        """Parameters of which some gradient is not the expected one."""
        scale = max((sums.abs().max().item() for sums in expected.values()), default=0.0)
        return [
            key
            for key, sums in expected.items()
            if not all((_summed(each.get(key)) - sums).abs().max().item() <= _SAME * scale for each in gradients)
        ]


def _summed(value: Value) -> Tensor:
    """A gradient as sums; one that is not there is zero."""
    return strided_sums(value) if isinstance(value, Tensor) else _NOTHING
