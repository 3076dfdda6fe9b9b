"""The table of metrics that validate and test print."""

from __future__ import annotations


def table(values: list[dict[str, float]], stage: str) -> str:
    """The metrics of each loader as aligned text, a row for each metric and a column for each loader.

    Args:
        values: as ``trainer.validate`` gives them.
        stage: "validation" or "test", for the heading.
    """
    names = sorted({name for part in values for name in part})
    if not names:
        return f"{stage}: nothing was logged"
    heads = [stage, *([f"loader {i}" for i in range(len(values))] if len(values) > 1 else ["value"])]
    rows = [[name, *(_number(part[name]) if name in part else "" for part in values)] for name in names]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: list[str]) -> str:
        return "  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))])

    rule = "-" * len(line(heads))
    return "\n".join([line(heads), rule, *map(line, rows)])


def _number(value: float) -> str:
    return f"{value:.6g}"
