"""Cells of text under one another: those of a column are as wide as its widest."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def padded(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[list[str]]:
    """The rows of a table with cells of one width in each column.

    Args:
        rows: of as many cells each.
        right: the columns, by number, whose cells end below one another; those of all others begin so.

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
