"""Says of what a gradient is made: how much of which micro-batch of which rank is in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.verify.recordings import Recording
from lockstep.verify.steps import STRIDE, strided_sums

_FITS = 1e-6
"""The part of a gradient that may be left over, where it is made of the ranks' own ones."""
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


class Parts:
    """The ranks' own gradients of one update.

    Args:
        ranks: the run.
        update: which.
    """

    def __init__(self, ranks: Recording, update: int) -> None:
        self.ranks = ranks
        self.update = update
        self._sums: list[dict[str, dict[int, Tensor]]] = [rank.load("sums", update) for rank in ranks.ranks]
        backwards = {number for own in self._sums for each in own.values() for number in each}
        self._backwards = sorted(backwards)

    @property
    def are_known(self) -> bool:
        """Whether the ranks' own gradients could be seen: not those of sharded parameters."""
        return bool(self._backwards) and not self.ranks.is_sharded

    @property
    def keys(self) -> list[str]:
        """Parameters that have a gradient on some rank."""
        return [key for key in self._sums[0] if any(own.get(key) for own in self._sums)]

    def shares(self, gradient: dict[str, Any], keys: Sequence[str] | None = None) -> Shares:
        """Of what a gradient is made, over some parameters or all."""
        keys = [key for key in (keys or self.keys) if gradient.get(key) is not None]
        target = torch.cat([strided_sums(gradient[key]) for key in keys]) if keys else torch.zeros(1)
        columns = [
            torch.cat([own.get(key, {}).get(number, torch.zeros(STRIDE, dtype=torch.float64)) for key in keys])
            for own in self._sums
            for number in self._backwards
        ]
        matrix = torch.stack(columns, 1) if keys else torch.zeros(1, len(columns), dtype=torch.float64)
        scale = matrix.norm(dim=0).clamp_min(1e-300)
        solution = torch.linalg.lstsq(matrix / scale, target.double()[:, None], driver="gelsd").solution[:, 0] / scale
        left = (matrix @ solution - target).norm() / target.norm().clamp_min(1e-300)
        return Shares(solution.view(len(self._sums), -1), left.item())

    def is_own(self, gradient: dict[str, Any], rank: int, keys: Sequence[str]) -> bool:
        """Whether a rank's gradient is what its own backwards gave, and nothing of other ranks."""
        own = {key: sum(self._sums[rank].get(key, {}).values(), _NOTHING) for key in keys}
        scale = max((sums.abs().max().item() for sums in own.values()), default=0.0)
        for key, sums in own.items():
            value = gradient.get(key)
            found = _NOTHING if value is None else strided_sums(value)
            if not (found - sums).abs().max().item() <= 1e-7 * scale:
                return False
        return True

    def mean(self, key: str) -> Tensor:
        """What a mean over ranks makes of a parameter's gradients, as sums."""
        return self._sum(key) / len(self._sums)

    def _sum(self, key: str) -> Tensor:
        total = torch.zeros(STRIDE, dtype=torch.float64)
        for own in self._sums:
            for sums in own.get(key, {}).values():
                total = total + sums
        return total

    def not_averaged(self, gradients: Sequence[dict[str, Any]]) -> list[str]:
        """Parameters whose gradient at the step is not the mean over ranks."""
        found = []
        scale = max((self.mean(key).abs().max().item() for key in self.keys), default=0.0)
        for key in self.keys:
            for gradient in gradients:
                value = gradient.get(key)
                sums = torch.zeros(STRIDE, dtype=torch.float64) if value is None else strided_sums(value)
                if not (sums - self.mean(key)).abs().max().item() <= 1e-7 * scale:
                    found.append(key)
                    break
        return found
