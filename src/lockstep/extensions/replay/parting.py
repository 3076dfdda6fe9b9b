"""Comparison of two runs: the step at which their hashes part, and the operation at which their traces part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from lockstep.extensions.replay.operations import Operation, Trace

CHANGE = 50.0
"""Ratio of a difference to that of a nudged repeat, above which it is a change and not rounding."""


def first_step(a: np.ndarray, b: np.ndarray) -> tuple[int, str] | None:
    """Return (step, "gradients" or "weights") where two recordings part first; None if they agree.

    Steps that only one of them has, or has not recorded, are not compared.
    """
    count = min(len(a), len(b))
    a, b = a[:count], b[:count]
    known = (a["weights"] != 0) & (b["weights"] != 0)
    differ = {field: known & (a[field] != b[field]) for field in ("gradients", "weights")}
    steps = np.flatnonzero(differ["gradients"] | differ["weights"])
    if not len(steps):
        return None
    step = int(steps[0])
    return step, "gradients" if differ["gradients"][step] else "weights"


@dataclass(frozen=True)
class Parting:
    """The first operation in which two traces part.

    Attributes:
        a: the operation in A; None if only B runs it.
        b: the operation in B; None if only A runs it.
        difference: norm of the difference of their results, relative to the result, in the elements of the traces.
        noise: the same between A and a repeat of A with nudged weights; 0.0 if it was not needed.
        is_rounding: True if the difference is as small as that of the repeat.
    """

    a: Operation | None
    b: Operation | None
    difference: float
    noise: float = 0.0
    is_rounding: bool = False

    def __str__(self) -> str:
        """Return a description with both lines."""
        if self.a is None or self.b is None:
            name, only = ("B", self.b) if self.a is None else ("A", self.a)
            return f"only {name} runs {only}"
        text = str(self.a)
        if self.b.line != self.a.line:
            text += f" (in B {self.b.line or self.b.phase})"
        same = "the same inputs" if self.a.inputs == self.b.inputs else "other inputs"
        size = f"differ by {self.difference:.2g} of their norm" if self.difference else "differ in a few elements"
        noise = f"; rounding alone by {self.noise:.2g}" if self.noise else ""
        return f"{text}: with {same}, results {size}{noise}"


def first_operation(a: Trace, b: Trace) -> Parting | None:
    """Return the first operation in which two traces of the same version of torch part; None if they agree."""
    for number, (one, other) in enumerate(zip(a.operations, b.operations, strict=False)):
        if one.name != other.name:
            return _inserted(a, b, number)
        if one.outputs != other.outputs or (one.inputs != other.inputs and not one.is_view):
            return Parting(one, other, _difference(a.values[number], b.values[number]))
    counts = [len(trace.operations) for trace in (a, b)]
    return None if counts[0] == counts[1] else _inserted(a, b, min(counts))


def _inserted(a: Trace, b: Trace, number: int) -> Parting:
    """Return the parting at an operation that only one trace has, or that another operation replaces in the other."""
    rest_a, rest_b = a.operations[number:], b.operations[number:]
    names_a, names_b = ([each.name for each in rest[:200]] for rest in (rest_a, rest_b))
    tag = SequenceMatcher(None, names_a, names_b, autojunk=False).get_opcodes()[0][0]
    if tag == "delete":
        return Parting(rest_a[0], None, 0.0)
    if tag == "insert":
        return Parting(None, rest_b[0], 0.0)
    return Parting(rest_a[0] if rest_a else None, rest_b[0] if rest_b else None, 0.0)


def first_change(a: Trace, b: Trace, nudged: Trace) -> Parting | None:
    """Return where two traces of different versions part by more than rounding; else where they part first.

    Versions may run an operation by other ones, so only operations that both have, in the same order, are compared.

    Args:
        a: trace of A.
        b: trace of B.
        nudged: trace of A with nudged weights, which shows how far rounding moves each result.

    Returns:
        the first operation whose difference is more than `CHANGE` times that of the repeat; else the first difference,
        marked as rounding; None if the results agree.
    """
    rounding: Parting | None = None
    noise = float(np.finfo(np.float32).eps) / 4
    for at_a, at_b in _common(a, b):
        # the noise of a single operation may cancel out, that of those before it does not
        noise = max(noise, _difference(a.values[at_a], nudged.values[at_a]))
        one, other = a.operations[at_a], b.operations[at_b]
        if one.outputs == other.outputs:
            continue
        difference = _difference(a.values[at_a], b.values[at_b])
        if difference > CHANGE * noise:
            return Parting(one, other, difference, noise)
        rounding = rounding or Parting(one, other, difference, noise, is_rounding=True)
    return rounding


def _common(a: Trace, b: Trace) -> Iterator[tuple[int, int]]:
    """Yield the numbers of operations that both traces have, without views, as (number in A, number in B)."""
    numbers = [[n for n, each in enumerate(trace.operations) if not each.is_view] for trace in (a, b)]
    keys = [
        [(trace.operations[n].name, trace.operations[n].phase, trace.operations[n].module) for n in own]
        for trace, own in zip((a, b), numbers, strict=True)
    ]
    for block in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks():
        for number in range(block.size):
            yield numbers[0][block.a + number], numbers[1][block.b + number]


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return the norm of a - b relative to that of a; infinity if their sizes differ or one is not finite."""
    if a.shape != b.shape or not (np.isfinite(a) == np.isfinite(b)).all():
        return float("inf")
    known = np.isfinite(a)
    norm = float(np.linalg.norm(a[known]))
    difference = float(np.linalg.norm((a - b)[known]))
    return difference / norm if norm else float(difference > 0)
