"""What Lightning and lockstep show of one program, side by side."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.differential.causes import REAL, by_call
from tests.differential.known import TAKEN_OUT, Row, explain
from tests.differential.play import play
from tests.differential.program import Program
from tests.differential.record import Event, Record, same
from tests.differential.warned import LEFT_OUT, about

REFUSED = re.compile(r"^None: None|MisconfigurationException|^\['KeyboardInterrupt'\]")
"""How a call of ours may end where Lightning's has ended otherwise: well, with a refusal, by the user's Ctrl-C."""
DIGEST = re.compile(r"[0-9a-f]{10}")


@dataclass(frozen=True)
class Difference:
    """One place where the two are not alike.

    Attributes:
        kind: "order", "fact", "end", "rows", "files", "checkpoint" or "warnings".
        where: the hook, call or file.
        name: which fact of it.
        state: Lightning's function, status and stage there.
        call: the call of the Trainer.
        place: how many events of the call came before it.
    """

    kind: str
    where: str
    name: str
    theirs: Any
    ours: Any
    state: tuple[str | None, ...] = (None, None, None)
    call: str = ""
    place: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.where} {self.name}: Lightning {_short(self.theirs)}, lockstep {_short(self.ours)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 700 else text[:700] + " ..."


@dataclass(frozen=True)
class Verdict:
    """The differences of a program, those of the table and those that nobody explains."""

    program: Program
    explained: tuple[tuple[Difference, Row], ...]
    unexplained: tuple[Difference, ...]
    ended: str
    """How Lightning's first call ended: "" or the class of the exception."""


def compare(program: Program) -> Verdict:
    """Run a program on both."""
    with tempfile.TemporaryDirectory(prefix="differential") as folder:
        records = []
        for package in ("lightning.pytorch", "lockstep"):
            root = Path(folder).resolve() / package.partition(".")[0]
            root.mkdir()
            records.append(play(package, program, root))
    return judge(program, *records)


def judge(program: Program, theirs: Record, ours: Record) -> Verdict:
    """Explain what differs of two records, out of which the rows may take what they explain."""
    explained: list[tuple[Difference, Row]] = []
    unexplained: list[Difference] = []
    for row in TAKEN_OUT:
        taken = row.take(program, theirs, ours)
        if taken:
            explained.append((Difference("taken out", taken, "", "", ""), row))
    cause: Row | None = None
    for difference in differences(theirs, ours):
        row = explain(program, difference, theirs, ours) or follows(difference, cause)
        explained.append((difference, row)) if row is not None else unexplained.append(difference)
        if row is not None and row.then and (cause is None or cause.then != "all"):
            cause = row
    ended = next((end["raised"][0] for _, end in theirs.ends if "raised" in end), "")
    return Verdict(program, tuple(explained), tuple(unexplained), ended)


def follows(difference: Difference, cause: Row | None) -> Row | None:
    """The row, where a difference can follow from one that it has explained before."""
    if difference.name == "raised" and not REFUSED.search(difference.ours):
        return None  # an error that is no refusal is a fault, whatever went before
    if cause is None or cause.then == "all":
        return cause
    # These decide by the numbers.
    ranks = difference.name in ("ModelCheckpoint", "EarlyStopping", "should_stop") or keeps_others(difference)
    saves = difference.kind == "order" and "on_save_checkpoint" in str([difference.theirs[:1], difference.ours[:1]])
    return cause if ranks or saves or alike(difference.theirs, difference.ours) else None


def keeps_others(difference: Difference) -> bool:
    """Whether as many checkpoints are kept, and others."""
    theirs, ours = difference.theirs, difference.ours
    kept = difference.where == "names" and len(theirs) == len(ours)
    return kept and all(name.endswith(".ckpt") for name in [*theirs, *ours])


def alike(theirs: Any, ours: Any) -> bool:
    """Whether two plain values differ only in real numbers and in digests of weights."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(alike(theirs[key], ours[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)) and isinstance(ours, (list, tuple)):
        return len(theirs) == len(ours) and all(map(alike, theirs, ours))
    if isinstance(theirs, float) and isinstance(ours, float):
        return True
    if isinstance(theirs, str) and isinstance(ours, str) and theirs != ours:
        digests = DIGEST.fullmatch(theirs) is not None and DIGEST.fullmatch(ours) is not None
        return digests or REAL.sub("", theirs) == REAL.sub("", ours)
    return bool(theirs == ours)


def differences(theirs: Record, ours: Record) -> list[Difference]:
    """The differences as a run comes by them."""
    found = _events(theirs.events, ours.events)
    found += _ends(theirs.ends, ours.ends)
    if not same(theirs.rows, ours.rows):
        mine, other = _first(theirs.rows, ours.rows)
        found.append(Difference("rows", "logger", "", mine, other))
    if theirs.files.keys() != ours.files.keys():
        mine, other = sorted(theirs.files.keys() - ours.files.keys()), sorted(ours.files.keys() - theirs.files.keys())
        found.append(Difference("files", "names", "", mine, other))
    for name in sorted(theirs.files.keys() & ours.files.keys()):
        if not same(theirs.files[name], ours.files[name]):
            mine, other = theirs.files[name], ours.files[name]
            if isinstance(mine, list) and isinstance(other, list):
                mine, other = _first(mine, other)
            found.append(Difference("files", name, "content", mine, other))
    for name in sorted(theirs.checkpoints.keys() & ours.checkpoints.keys()):
        for fact, value in theirs.checkpoints[name].items():
            if not same(value, ours.checkpoints[name][fact]):
                found.append(Difference("checkpoint", name, fact, value, ours.checkpoints[name][fact]))
    warned, told = (
        {about(*each) for each in record.warned if not LEFT_OUT.search(each[1])} for record in (theirs, ours)
    )
    for topic in sorted(warned ^ told):
        found.append(Difference("warnings", topic, "", topic in warned, topic in told))
    return found


def _first(theirs: list[Any], ours: list[Any]) -> tuple[Any, Any]:
    """The first rows that differ, and what follows them."""
    for place, (mine, other) in enumerate(zip(theirs, ours, strict=False)):
        if not same(mine, other):
            return theirs[place : place + 3], ours[place : place + 3]
    shorter = min(len(theirs), len(ours))
    return theirs[shorter:], ours[shorter:]


def _events(theirs: list[Event], ours: list[Event]) -> list[Difference]:
    """Differences of facts up to the first event that the other does not have, and that one, in each call."""
    found: list[Difference] = []
    mine, other = by_call(theirs), by_call(ours)
    for call, events in mine.items():
        found += _events_of_call(call, events, other.get(call, []))
    return found


def _events_of_call(call: str, theirs: list[Event], ours: list[Event]) -> list[Difference]:
    found: list[Difference] = []
    place = 0
    for (label, mine), (other_label, other) in zip(theirs, ours, strict=False):
        if label != other_label:
            break
        place += 1
        for name in {**mine, **other}:
            value, another = mine.get(name, "-"), other.get(name, "-")
            if not same(value, another):
                found.append(
                    Difference("fact", label, name, value, another, tuple(mine.get("state", "---")), call, place)
                )
    more, others = [label for label, _ in theirs[place:]], [label for label, _ in ours[place:]]
    if more or others:
        before = theirs[place - 1][0] if place else "the beginning"
        found.append(Difference("order", f"after {before}", "", more[:10], others[:10], call=call, place=place))
    return found


def _ends(theirs: list[Event], ours: list[Event]) -> list[Difference]:
    found = []
    for (label, mine), (_, other) in zip(theirs, ours, strict=False):
        raised, another = mine.get("raised", [""]), other.get("raised", [""])
        if not set(raised[:1]) & set(another) and not set(another[:1]) & set(raised):
            told = [f"{end.get('raised')}: {end.get('message')}" for end in (mine, other)]
            found.append(Difference("end", label, "raised", *told, call=label))
        for name in {**mine, **other}:
            if name not in ("raised", "message") and not same(mine.get(name, "-"), other.get(name, "-")):
                values = mine.get(name, "-"), other.get(name, "-")
                found.append(Difference("end", label, name, *values, call=label))
    return found
