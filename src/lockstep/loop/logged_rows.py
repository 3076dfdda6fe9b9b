"""Packing of a rank's logged values into one tensor (a row), and reduction of the ranks' rows.

A row starts with a header of five numbers: a hash of the names, the number of names, the negatives of both, and a flag
for the reduction of each step. After the header are the values, their weights, and the micro-batches of step values (0
for values of an epoch). A row has room for more names than there are, so that ranks with different names can be
combined.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lockstep.ground.device import widest
from lockstep.ground.transfer import pinned

Part: TypeAlias = tuple[float, float, float]
"""(value, weight, micro-batch) of one name. A mean's value is multiplied by its weight; weight 0 means no value."""

Total: TypeAlias = tuple[float, float]
"""(value, weight) of one name. A mean's value is multiplied by its weight."""

NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}
HEAD = 5


@dataclass(frozen=True)
class Rows:
    """Layout of a row of logged values, identical on all ranks that log the same names.

    Args:
        ops: the reduction of each name, as in `NEUTRAL`.
        capacity: number of names that fit into a row.
        steps: True for values of single steps: then only those of the newest micro-batch count.
    """

    ops: Sequence[str]
    capacity: int
    steps: bool

    def make(self, names: int, wants_each_step: bool, parts: Sequence[Part]) -> Tensor:
        """Pack values into a row, a float64 tensor of shape ``(5 + 3 * capacity,)``.

        Args:
            names: hash of the names.
            wants_each_step: flag for the header.
            parts: the part of each name.
        """
        kept = parts[: self.capacity]
        room = [0.0] * (self.capacity - len(kept))
        numbers = head(names, len(parts), wants_each_step)
        for column in zip(*kept, strict=True) if kept else ((), (), ()):
            numbers += [*column, *room]
        return torch.tensor(numbers, dtype=torch.float64)

    def make_on(self, device: torch.device, parts: Sequence[tuple[Any, float, int]]) -> Tensor:
        """Pack values from any device into a row on ``device`` asynchronously. The row has no hash of the names."""
        far = [isinstance(value, Tensor) and value.device.type != "cpu" for value, *_ in parts]
        known = [(0.0 if there else value, *rest) for there, (value, *rest) in zip(far, parts, strict=True)]
        row = self.make(0, False, [part_of(op, *each) for op, each in zip(self.ops, known, strict=True)])
        row = pinned(row.to(widest(device)), device).to(device, non_blocking=True)
        for place, (value, weight, _) in enumerate(parts):
            if far[place] and weight:
                wide = value.detach().reshape(()).to(row.dtype)
                row[HEAD + place] = wide * weight if self.ops[place] == "mean" else wide
        return row

    def combine(self, rows: Tensor) -> Tensor:
        """Reduce the k rows in a tensor of shape (..., k, n) to one row. Sums are computed in the order of the rows."""
        # of a number and its negation the largest: they show the largest and the smallest one, which differ if ranks do
        head = rows[..., :HEAD].amax(-2)
        parts = rows[..., HEAD:].view(*rows.shape[:-1], 3, self.capacity)
        values, weights, newest = parts.unbind(-2)
        there = weights != 0.0
        if self.steps:
            latest = torch.where(there, newest, 0.0).amax(-2, keepdim=True)
            there = there & (newest == latest)
            newest = latest
        sums = torch.where(there.unsqueeze(-2), parts[..., :2, :], 0.0).unbind(-3)
        total = sums[0]  # in the order of the ranks: the bits do not depend on torch's way to sum
        for each in sums[1:]:
            total = total + each
        if self._extremes:
            total = total.clone()
        for op, places in self._extremes.items():
            known = torch.where(there, values, NEUTRAL[op])
            several = torch.stack([known[..., place] for place in places], -1).unbind(-2)
            found = functools.reduce(functools.partial(_extreme, op), several)
            for number, place in enumerate(places):  # indexing by a list would copy it to the device
                total[..., 0, place] = found[..., number]
        return torch.cat([head, total.flatten(-2), newest[..., 0, :]], -1)

    @functools.cached_property
    def _extremes(self) -> dict[str, list[int]]:
        """Indices of the names that are reduced by "min" or "max", in a dict by reduction."""
        ops = self.ops[: self.capacity]
        return {op: [place for place, each in enumerate(ops) if each == op] for op in ("min", "max") if op in ops}

    def shown(self, row: Tensor) -> list[Tensor]:
        """Return the final value of each name in a reduced row, on the row's device."""
        totals, weights = row[HEAD:].view(3, self.capacity)[:2].unbind()
        totals = totals + 0.0  # -0.0 becomes 0.0, as in `shown_value`
        means = totals / weights  # NaN without weight
        return [(means if op == "mean" else totals)[place] for place, op in enumerate(self.ops)]

    def ranks_differ(self, row: Tensor) -> bool:
        """Return True if the ranks log different names, or more names than fit into a row."""
        names, count, least_names, least_count, _ = row[:HEAD].tolist()
        return bool(names != -least_names or count != -least_count or count > self.capacity)

    def totals(self, row: Tensor) -> list[Total]:
        """Return the reduced (value, weight) of each name, read from a row."""
        numbers = row.tolist()[HEAD:]
        return list(zip(numbers, numbers[self.capacity :], strict=False))[: len(self.ops)]


def part_of(op: str, value: Any, weight: float, micro_batch: float) -> Part:
    """Convert a logged value to a `Part` of a row. For an epoch's mean (micro-batch 0), pass the weighted sum."""
    if weight == 0.0:
        return NEUTRAL[op], 0.0, 0.0
    number = float(value)
    return number * weight if micro_batch and op == "mean" else number, float(weight), float(micro_batch)


def head(names: int, count: int, wants_each_step: bool) -> list[float]:
    """Return the header of a row. It contains the hash and count and their negatives, to find maximum and minimum."""
    return [float(names), float(count), -float(names), -float(count), float(wants_each_step)]


def largest(rows: Tensor) -> Tensor:
    """Return the elementwise maximum of the k headers in a tensor of shape (..., k, 5)."""
    return rows.amax(-2)


def each_step_wanted(row: Tensor) -> bool:
    """Return True if, in a reduced row, any rank has logged with ``sync_dist=True``. Each step is then reduced."""
    return bool(row[HEAD - 1])


def shown_value(op: str, value: float, weight: float) -> float:
    """Return the final value from a reduced (value, weight); NaN for a mean without samples."""
    if op == "mean":
        return (value + 0.0) / weight if weight else math.nan
    if not weight:
        return NEUTRAL[op]
    return value + 0.0 if op == "sum" else value


def joined(op: str, totals: Sequence[Total]) -> Total:
    """Reduce several (value, weight) pairs to one pair."""
    values, weights = zip(*totals, strict=True)
    if op in ("min", "max"):
        return functools.reduce(functools.partial(extreme, op), values), sum(weights)
    return sum(values), sum(weights)


def extreme(op: str, one: Any, other: Any) -> Any:
    """Return the smaller ("min") or larger ("max") of two numbers. NaN wins, as in torch; -0.0 is below 0.0.

    If the second number is a tensor on a device, so is the result.
    """
    if isinstance(other, Tensor):
        pick = torch.minimum if op == "min" else torch.maximum
        return pick(torch.as_tensor(one, dtype=other.dtype, device=other.device), other)
    if one != one or other != other:  # NaN is unequal to itself
        return math.nan
    if one == other:
        first = math.copysign(1.0, one) < math.copysign(1.0, other)
        return one if first is (op == "min") else other
    return min(one, other) if op == "min" else max(one, other)


def _extreme(op: str, one: Tensor, other: Tensor) -> Tensor:
    """Reduce two tensors element by element, as :func:`extreme` does for numbers."""
    first, second = (one, other) if op == "min" else (other, one)
    pick = torch.minimum if op == "min" else torch.maximum
    return torch.where(one == other, torch.where(one.signbit(), first, second), pick(one, other))
