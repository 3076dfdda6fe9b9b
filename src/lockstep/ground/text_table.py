"""Text tables with padded columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def padded(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[list[str]]:
    """Pad each cell of a table to the width of its column.

    Args:
        rows: rows with the same number of cells.
        right: numbers of the columns that are aligned to the right; others are aligned to the left.

    Example:
        >>> padded([["loss", "0.5"], ["accuracy", "12"]], right=[1])
        [['loss    ', '0.5'], ['accuracy', ' 12']]
    """
    found = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width = max(map(len, column))
        align = str.rjust if number in right else str.ljust
        found.append([align(cell, width) for cell in column])
    return [list(row) for row in zip(*found, strict=True)]
