"""What the stages of a pipeline do, and when: a schedule played with the seconds of each stage, and its picture.

draw_stages(axes, play([0.003, 0.004], micro_batches=4, schedule="1f1b"))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORWARD, BACKWARD, OUTSIDE = "blocks forward", "backward", "before and behind the chain"
COLORS = {FORWARD: "#4477aa", BACKWARD: "#ee8866", OUTSIDE: "#ccbb44"}
"""Told apart by the colour-blind, too."""
WAITING = "#e4e4e4"


class Bar(NamedTuple):
    """Something that a stage computes.

    Attributes:
        stage: its number.
        part: one of `COLORS`.
        begin, end: seconds.
    """

    stage: int
    part: str
    begin: float
    end: float


def play(seconds: Sequence[float], micro_batches: int, schedule: str) -> list[Bar]:
    """The forwards and backwards of a step; a forward takes a third of a micro-batch's time.

    Args:
        seconds: of a micro-batch on each stage, forward and backward.
        micro_batches: of the step, above 0.
        schedule: "1f1b" or "gpipe", in any case; with fewer micro-batches than stages it is "gpipe".

    Example:
        >>> max(bar.end for bar in play([3.0, 3.0], micro_batches=2, schedule="gpipe"))
        9.0
    """
    count = len(seconds)
    interleaves = schedule.lower() == "1f1b" and micro_batches >= count
    waiting = [_turns(micro_batches, count - stage if interleaves else micro_batches) for stage in range(count)]
    ended: dict[tuple[int, str, int], float] = {}
    free, bars = [0.0] * count, []
    while any(waiting):
        for stage, turns in enumerate(waiting):
            while turns:
                part, number = turns[0]
                before = [(stage - 1, FORWARD, number)] if part == FORWARD and stage else []
                if part == BACKWARD:
                    before = [(stage, FORWARD, number) if stage == count - 1 else (stage + 1, BACKWARD, number)]
                if any(each not in ended for each in before):
                    break
                begin = max([free[stage], *(ended[each] for each in before)])
                end = begin + seconds[stage] * (1 / 3 if part == FORWARD else 2 / 3)
                ended[stage, part, number] = free[stage] = end
                bars.append(Bar(stage, part, begin, end))
                turns.pop(0)
    return bars


def _turns(micro_batches: int, ahead: int) -> list[tuple[str, int]]:
    """Forwards and backwards of a stage in their order; so many forwards run before the first backward."""
    turns = [(FORWARD, number) for number in range(min(ahead, micro_batches))]
    for number in range(micro_batches):
        turns.append((BACKWARD, number))
        if ahead + number < micro_batches:
            turns.append((FORWARD, ahead + number))
    return turns


def draw_stages(axes: Axes, bars: Sequence[Bar], names: Sequence[str]) -> None:
    """Draw a row for each stage, the first on top; where nothing is computed, the stage waits.

    Args:
        axes: of matplotlib.
        bars: of the stages.
        names: of the stages.
    """
    begin, end = min(bar.begin for bar in bars), max(bar.end for bar in bars)
    for stage in range(len(names)):
        axes.barh(stage, 1e3 * (end - begin), height=0.8, color=WAITING, label="waiting" if not stage else None)
    for part, color in COLORS.items():
        mine = [bar for bar in bars if bar.part == part]
        widths, left = [1e3 * (bar.end - bar.begin) for bar in mine], [1e3 * (bar.begin - begin) for bar in mine]
        rows = [bar.stage for bar in mine]
        if mine:
            axes.barh(rows, widths, left=left, height=0.8, color=color, edgecolor="white", linewidth=0.4, label=part)
    busy = [sum(bar.end - bar.begin for bar in bars if bar.stage == stage) for stage in range(len(names))]
    told = [f"{name}\n{each / (end - begin):.0%} computing" for name, each in zip(names, busy, strict=True)]
    axes.set_yticks(range(len(names)), told)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_xlim(0, 1e3 * (end - begin))
