"""Decomposition of a gradient into contributions from each rank's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.extensions.verify.recordings import Recording, Value
from lockstep.extensions.verify.steps import STRIDE, strided_sums

_FITS = 1e-6
"""Largest remainder, as a fraction of the gradient, at which it counts as a sum of the ranks' own gradients."""
_ROUNDING = 1e-7
"""Largest difference between gradients that counts as rounding, as a fraction of the largest gradient."""
_NOTHING = torch.zeros(STRIDE, dtype=torch.float64)


@dataclass(frozen=True)
class Shares:
    """A gradient, expressed as a weighted sum of the gradients of each rank's micro-batches.

    Attributes:
        weights: weight of each rank's micro-batches, of shape (ranks, micro-batches). In one process, and in the mean
            over ranks, each is 1 / ranks.
        rest: the remainder, as a fraction of the gradient.
        is_unique: True if only these weights give the gradient.
    """

    weights: Tensor
    rest: float
    is_unique: bool = False

    @property
    def fits(self) -> bool:
        """True if the weighted sum reproduces the gradient, up to rounding."""
        return self.rest < _FITS

    def all_are(self, weight: float) -> bool:
        """Return True if all micro-batches have this weight in the gradient."""
        return self.fits and bool((self.weights - weight).abs().max() < 1e-5 * max(1.0, abs(weight)))

    @property
    def sum_to_one(self) -> bool:
        """True if, for each micro-batch, the ranks' weights add up to 1, as they do in a mean over samples."""
        return bool((self.weights.sum(0) - 1.0).abs().max() < 1e-4)

    def constant(self) -> float | None:
        """Return the weight that all micro-batches have, or None if their weights differ."""
        mean = self.weights.mean().item()
        return mean if self.all_are(mean) else None

    def most_uneven(self) -> list[float]:
        """Return each rank's weight of the micro-batch whose weights differ most between ranks, in order of rank."""
        column = int((self.weights.amax(0) - self.weights.amin(0)).argmax())
        return [round(weight, 4) for weight in self.weights[:, column].tolist()]

    def rounded(self) -> list[float]:
        """Return the weights of all micro-batches, rank by rank, rounded for a message."""
        # + 0.0 turns -0.0 into 0.0
        return [round(weight, 3) + 0.0 for weight in self.weights.reshape(-1).tolist()]


class Parts:
    """Decomposition of one update's gradients into contributions from the backwards of each rank.

    Args:
        ranks: the run.
        update: number of the update.
    """

    def __init__(self, ranks: Recording, update: int) -> None:
        self.ranks = ranks
        self.update = update
        self._sums = [rank.sums(update) for rank in ranks.ranks]
        self._backwards = sorted({number for own in self._sums for each in own.values() for number in each})

    @property
    def are_known(self) -> bool:
        """True if each rank's gradients before the reduction were recorded.

        They are never recorded for sharded parameters.
        """
        return bool(self._backwards) and not self.ranks.is_sharded

    @property
    def keys(self) -> list[str]:
        """Keys of the parameters that have a gradient on some rank."""
        return [key for key in self._sums[0] if any(own.get(key) for own in self._sums)]

    def shares(self, gradient: Mapping[str, Value], keys: Sequence[str] | None = None) -> Shares:
        """Find by least squares the weight of each rank's micro-batches in a gradient.

        Args:
            gradient: gradient of each parameter, by key.
            keys: parameters to use; None: all.
        """
        keys = [key for key in keys or self.keys if gradient.get(key) is not None]
        if not keys:
            return Shares(torch.zeros(len(self._sums), len(self._backwards)), 1.0)
        target = torch.cat([_sums_of(gradient.get(key)) for key in keys])
        columns = [
            torch.cat([own.get(key, {}).get(number, _NOTHING) for key in keys])
            for own in self._sums
            for number in self._backwards
        ]
        matrix = torch.stack(columns, 1)
        # columns of one size, since lstsq ignores those that are small compared with others
        scale = matrix.norm(dim=0).clamp_min(1e-300)
        # gelsd allows columns that depend on each other, as equal micro-batches do
        found = torch.linalg.lstsq(matrix / scale, target[:, None], driver="gelsd")
        solution = found.solution[:, 0] / scale
        rest = (matrix @ solution - target).norm() / target.norm().clamp_min(1e-300)
        # with as many weights as numbers any gradient is such a sum
        is_unique = int(found.rank) == len(columns) < int((matrix != 0).any(1).sum())
        return Shares(solution.view(len(self._sums), -1), rest.item(), is_unique)

    def is_own(self, gradient: Mapping[str, Value], rank: int, keys: Sequence[str]) -> bool:
        """Return True if a rank's gradient is the sum of its own backwards, without contributions from other ranks."""
        return not self._deviating([gradient], {key: self._total([self._sums[rank]], key) for key in keys})

    def not_averaged(self, gradients: Sequence[Mapping[str, Value]]) -> list[str]:
        """Return the keys of parameters whose gradient is not the mean over ranks."""
        return self._deviating(gradients, {key: self._total(self._sums, key) / len(self._sums) for key in self.keys})

    def _total(self, ranks: Sequence[dict[str, dict[int, Tensor]]], key: str) -> Tensor:
        return sum((sums for own in ranks for sums in own.get(key, {}).values()), _NOTHING)

    def _deviating(self, gradients: Sequence[Mapping[str, Value]], expected: Mapping[str, Tensor]) -> list[str]:
        """Return the keys of parameters whose strided sums in any of ``gradients`` differ from ``expected``."""
        scale = max((sums.abs().max().item() for sums in expected.values()), default=0.0)
        return [
            key
            for key, sums in expected.items()
            if not all((_sums_of(each.get(key)) - sums).abs().max().item() <= _ROUNDING * scale for each in gradients)
        ]


def _sums_of(value: Value) -> Tensor:
    """Return the `strided_sums` of a gradient, or zeros if the gradient is missing."""
    return strided_sums(value) if isinstance(value, Tensor) else _NOTHING
