"""Draws docs/floors.svg: the parts of lockstep on their floors, with an arrow from each to what it stands on.

    python scripts/draw_floors.py

The floors are those of tests/guards/test_house.py, and the arrows are read from the imports of the source. An import
that follows from others (a, of c, where a imports b and b imports c) has no arrow; nor has one of `ground`, on which
every part stands. A test holds the picture to the source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from tests.guards.source import PACKAGE, Sources, read  # noqa: E402
from tests.guards.test_house import APART, FLOORS, inner_imports, is_face  # noqa: E402

PICTURE = PROJECT / "docs" / "floors.svg"
BOTTOM = "ground"

# Part -> what it is, in two lines; in each row of the picture the parts stand in this order.
WORDS = {
    "__main__": ("the command", "lockstep"),
    "cli": ("lockstep run,", "LightningCLI"),
    "tuner": ("a first rate,", "a batch size"),
    "trainer": ("Trainer: the", "parts put together"),
    "attributes": ("what users", "read of it"),
    "loop": ("fit, one window,", "evaluation, state"),
    "config": ("flags into one", "RunConfig"),
    "names": ("Lightning's paths,", "as data"),
    "strategies": ("engine, collectives", "and files of a run"),
    "callbacks": ("code at points", "of a run"),
    "module": ("Lightning-", "Module"),
    "loggers": ("where logged", "values go"),
    "datamodule": ("LightningData-", "Module"),
    "hpc": ("searches and", "their trials"),
    "launch": ("how ranks", "are started"),
    "supervise": ("who failed first,", "who waits"),
    "parallel": ("gradients: reducer,", "buckets, hooks"),
    "planner": ("what each way", "would take"),
    "hooks": ("the hooks of", "a module"),
    "precision": ("number formats", "of a run"),
    "checkpoint": ("hashed files,", "without code"),
    "data": ("which sample goes", "to which rank"),
    "profilers": ("what takes", "how long"),
    "cluster": ("who this", "process is"),
    "ground": ("trees, collectives, agreement, seeds, devices:", "what every part stands on"),
    "lightning": ("scripts for it,", "unchanged"),
    "testing": ("rank pool,", "equivalence"),
}
NAMES = {6: "tools", 5: "Trainer", 4: "loops", 3: "strategies", 2: "engines", 1: "ground"}
FILLS = {6: "#f1ecf9", 5: "#e6eefb", 4: "#e2f3f6", 3: "#e4f5e6", 2: "#f8f3dd", 1: "#f2ede6"}
STROKES = {6: "#8562bd", 5: "#4271bd", 4: "#2a8a9b", 3: "#3b9149", 2: "#b58a1c", 1: "#8d7558"}

Edges = dict[str, set[str]]


# -- what stands on what ---------------------------------------------------------------------------------------


def edges_of(sources: Sources) -> Edges:
    """For each part the parts that its files import."""
    edges: Edges = {}
    for source in sources.values():
        if not is_face(source.module):
            names = (name.split(".") for _, name in inner_imports(source, sources) if not is_face(name))
            found = {path[1] for path in names if len(path) > 1}
            edges.setdefault(source.part, set()).update(found - {source.part})
    return edges


def reachable(edges: Edges, part: str) -> set[str]:
    found: set[str] = set()
    todo = [*edges.get(part, ())]
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += edges.get(each, ())
    return found


def arrows_of(edges: Edges) -> list[tuple[str, str]]:
    """The imports that do not follow from others; parts that import each other count as one."""
    below = {part: reachable(edges, part) for part in edges}
    group = {part: min({part} | {one for one in below[part] if part in below.get(one, ())}) for part in edges}
    arrows = []
    for part, imported in edges.items():
        for each in imported - {BOTTOM}:
            mutual = group[each] == group[part]
            mine = {one for member in edges if group[member] == group[part] for one in edges[member]}
            others = {one for one in mine if group[one] not in (group[each], group[part])}
            if mutual or not any(each in below.get(one, ()) for one in others):
                arrows.append((part, each))
    return sorted(arrows)


# -- where it stands -------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP = 1220, 112, 150, 24
BOX, ROW, GAP = (138, 58), 98, 20  # a box; from one row of boxes to the next; between two boxes
MOST = int((WIDTH - LEFT - RIGHT - GAP) // (BOX[0] + GAP))
"""Boxes in a row."""


@dataclass(frozen=True)
class Box:
    part: str
    x: float
    y: float
    width: float = BOX[0]

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + BOX[1]


def rows_of(parts: Iterable[str], arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The parts of one floor in rows: above those that they stand on, and beside each other where that is mutual."""
    own = list(parts)
    inner = {(part, each) for part, each in arrows if part in own and each in own}
    groups: list[list[str]] = []
    for part in own:
        together = next((group for group in groups if any({(part, one), (one, part)} <= inner for one in group)), None)
        if together is None:
            groups.append([part])
        else:
            together.append(part)

    def height(group: list[str]) -> int:
        below = [other for other in groups if other is not group and any((a, b) in inner for a in group for b in other)]
        return 1 + max((height(other) for other in below), default=-1)

    rows: list[list[str]] = []
    for level in sorted({height(group) for group in groups}, reverse=True):
        rows.append([])
        for group in (group for group in groups if height(group) == level):
            if len(rows[-1]) + len(group) > MOST:
                rows.append([])
            rows[-1] += group
    return rows


def placed(floors: dict[int, list[list[str]]]) -> tuple[dict[str, Box], dict[int, tuple[float, float]]]:
    """The box of each part, and from where to where each floor reaches."""
    boxes: dict[str, Box] = {}
    bands: dict[int, tuple[float, float]] = {}
    y = float(TOP)
    inside = WIDTH - LEFT - RIGHT
    for floor in sorted(floors, reverse=True):
        begin = y
        for row in floors[floor]:
            gap = max(GAP, min(60, (inside - len(row) * BOX[0]) / (len(row) + 1)))
            width = inside - 4 * GAP if row == [BOTTOM] else BOX[0]
            x = LEFT + (inside - len(row) * width - (len(row) - 1) * gap) / 2
            for part in row:
                boxes[part] = Box(part, x, y + 16, width)
                x += width + gap
            y += ROW
        bands[floor] = (begin, y - 6)
        y += 12
    for number, part in enumerate(sorted(APART & WORDS.keys())):
        boxes[part] = Box(part, WIDTH - RIGHT + 22, TOP + 40 + number * ROW, RIGHT - 44)
    return boxes, bands


# -- the picture -----------------------------------------------------------------------------------------------


def lane(boxes: Iterable[Box], y: float, x: float) -> float:
    """The place next to ``x`` at which a line passes between the boxes of the row at ``y``."""
    row = sorted((box for box in boxes if box.y == y), key=lambda box: box.x)
    if not row:
        return x
    between = [(one.x + one.width + other.x) / 2 for one, other in pairwise(row)]
    free = [row[0].x - GAP, *between, row[-1].x + row[-1].width + GAP]
    return min(free, key=lambda place: abs(place - x))


def ports(arrows: Iterable[tuple[str, str]], boxes: dict[str, Box]) -> dict[tuple[str, str], tuple[float, float]]:
    """Where each arrow from row to row leaves its box, and where it comes to the other: spread, and uncrossed."""
    down = [(part, each) for part, each in arrows if boxes[part].y < boxes[each].y]
    at: dict[tuple[str, str], list[float]] = {pair: [0.0, 0.0] for pair in down}
    for end in (0, 1):
        for part in {pair[end] for pair in down}:
            mine = sorted((pair for pair in down if pair[end] == part), key=lambda pair: boxes[pair[1 - end]].middle)
            for number, pair in enumerate(mine):
                at[pair][end] = boxes[part].middle + (number - (len(mine) - 1) / 2) * 20
    return {pair: (begin, end) for pair, (begin, end) in at.items()}


def down(
    one: Box, other: Box, begin: float, end: float, boxes: Iterable[Box], used: dict[tuple[float, float], int]
) -> str:
    """A path from a box to one in a row below, between the boxes of the rows that it passes."""
    points = [(begin, one.bottom + 1)]
    for y in sorted({box.y for box in boxes if one.y < box.y < other.y and box.part not in APART}):
        share = (y - one.y) / (other.y - one.y)
        x = lane((box for box in boxes if box.part not in APART), y, begin + (end - begin) * share)
        number = used[x, y] = used.get((x, y), -1) + 1
        x += (number + 1) // 2 * (5 if number % 2 else -5)
        points += [(x, y - 4), (x, y + BOX[1] + 4)]
    points.append((end, other.y - 5))
    path = f"M{begin:.0f},{points[0][1]:.0f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        half = (to_y - y) / 2
        path += f" C{x:.0f},{y + half:.0f} {to_x:.0f},{to_y - half:.0f} {to_x:.0f},{to_y:.0f}"
    return path


def sideways(one: Box, other: Box, both: bool) -> str:
    """A path between two boxes of a row."""
    right = other.x > one.x
    begin, end = (one.x + one.width, other.x - 4) if right else (one.x, other.x + other.width + 4)
    begin += (4 if right else -4) * both
    y = one.y + BOX[1] / 2
    if abs(end - begin) < BOX[0]:
        return f"M{begin:.0f},{y:.0f} L{end:.0f},{y:.0f}"
    over = one.y - 16  # the boxes between them
    return (
        f"M{one.middle:.0f},{one.y - 1:.0f} C{one.middle:.0f},{over:.0f} {other.middle:.0f},{over:.0f} "
        f"{other.middle:.0f},{one.y - 5:.0f}"
    )


def lines_of(arrows: list[tuple[str, str]], boxes: dict[str, Box]) -> Iterator[str]:
    shown = [pair for pair in arrows if pair[0] in FLOORS and boxes.keys() >= {*pair}]
    at, used = ports(shown, boxes), {}
    for part, each in shown:
        one, other, both = boxes[part], boxes[each], (each, part) in shown
        if both and each < part:
            continue
        color = STROKES[FLOORS[part]]
        head = f"url(#to{color[1:]})"
        path = (
            down(one, other, *at[part, each], [*boxes.values()], used)
            if one.y < other.y
            else sideways(one, other, both)
        )
        ends = f'marker-end="{head}"' + f' marker-start="{head}"' * both
        yield f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" opacity="0.85" {ends}/>'


def drawn_box(box: Box, floor: int | None) -> list[str]:
    stroke = "#8a8f98" if floor is None else STROKES[floor]
    dashed = ' stroke-dasharray="4 3"' if floor is None else ""
    first, second = WORDS.get(box.part, ("", ""))
    name = f"{box.part}.py" if (PACKAGE / f"{box.part}.py").is_file() else box.part
    words = [(19, 13, "700", "#20242c", name + ("/" if not name.endswith(".py") else ""), "mono")]
    if box.part == BOTTOM:
        words.append((39, 11, "400", "#4b5260", f"{first} {second}", "sans"))
    else:
        words += [(35, 11, "400", "#4b5260", first, "sans"), (49, 11, "400", "#4b5260", second, "sans")]
    families = {
        "mono": "DejaVu Sans Mono, Menlo, Consolas, monospace",
        "sans": "DejaVu Sans, Helvetica, Arial, sans-serif",
    }
    lines = [
        f'<rect x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{BOX[1]}" rx="7" fill="#ffffff" '
        f'stroke="{stroke}" stroke-width="1.4"{dashed}/>'
    ]
    for down, size, weight, color, text, family in words:
        lines.append(
            f'<text x="{box.middle:.0f}" y="{box.y + down:.0f}" font-family="{families[family]}" font-size="{size}" '
            f'font-weight="{weight}" fill="{color}" text-anchor="middle">{escape(text)}</text>'
        )
    return lines


def drawn(sources: Sources) -> str:
    """The picture, as SVG."""
    edges = edges_of(sources)
    arrows = arrows_of(edges)
    known = [*WORDS, *sorted(edges.keys() - WORDS.keys())]
    on_floor = {floor: [part for part in known if FLOORS.get(part) == floor and part in edges] for floor in NAMES}
    floors = {floor: rows_of(parts, arrows) for floor, parts in on_floor.items()}
    floors[FLOORS[BOTTOM]] = [[part for part in on_floor[FLOORS[BOTTOM]] if part != BOTTOM], [BOTTOM]]
    boxes, bands = placed(floors)
    height = max(end for _, end in bands.values()) + 40
    sans = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}">',
        "<!-- drawn by scripts/draw_floors.py -->",
        "<defs>",
        *(
            f'<marker id="to{color[1:]}" viewBox="0 0 8 8" refX="5" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0,0.5 L8,4 L0,7.5 z" fill="{color}"/></marker>'
            for color in STROKES.values()
        ),
        "</defs>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    for floor, (begin, end) in bands.items():
        middle = (begin + end) / 2
        out += [
            f'<rect x="12" y="{begin:.0f}" width="{WIDTH - RIGHT - 12}" height="{end - begin:.0f}" rx="10" '
            f'fill="{FILLS[floor]}"/>',
            f'<text x="30" y="{middle + 2:.0f}" {sans} font-size="26" font-weight="700" fill="{STROKES[floor]}">'
            f"{floor}</text>",
            f'<text x="30" y="{middle + 20:.0f}" {sans} font-size="12" fill="{STROKES[floor]}">{NAMES[floor]}</text>',
        ]
    out += lines_of(arrows, boxes)
    for part, box in boxes.items():
        out += drawn_box(box, FLOORS.get(part))
    side = WIDTH - RIGHT / 2
    out.append(
        f'<text x="{side:.0f}" y="{TOP + 20}" {sans} font-size="13" font-weight="700" fill="#6b7280" '
        'text-anchor="middle">apart</text>'
    )
    for number, line in enumerate(("testing imports from", "any floor; no part", "imports these three")):
        y = TOP + 40 + len(APART & boxes.keys()) * ROW - 10 + number * 14
        out.append(
            f'<text x="{side:.0f}" y="{y}" {sans} font-size="10.5" fill="#6b7280" text-anchor="middle">{line}</text>'
        )
    note = (
        "Read from the imports: a part imports from its own floor and below. "
        "Imports that follow from others, and those of ground, have no arrow."
    )
    out += [f'<text x="30" y="{height - 14:.0f}" {sans} font-size="11.5" fill="#6b7280">{note}</text>', "</svg>"]
    return "\n".join(out) + "\n"


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(drawn(read(PACKAGE)))


if __name__ == "__main__":
    main()
