"""What a run is to show, held against what was seen: pure."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .screen import Piece, shown, since, text_of
from .watched import Enough, Seen

SECONDS = 3.0
"""From a failure to the end of the last process."""
LINES = 40
"""That a failure may print."""
SLACK = 2.0
"""Seconds beside ``hang_timeout`` until a hang is named."""
RUNNERS = ("=====", "-----")
"""How lines begin with which torchrun closes: nothing can come after them."""

_RANKS = re.compile(r"(?<!with )\branks? (\d+(?:(?:, | and )\d+)*)")
_BUSY = re.compile(r"lockstep: for \d+ s, ")
_PLACE = re.compile(r"[\w./-]*?([\w-]+\.py:\d+)")


@dataclass(frozen=True)
class OfFailure:
    """A failure's verdict."""

    seconds: float | None  #: None: nothing happened
    lines: int  #: on the fullest screen
    last: str  #: the last line that is not empty
    told: bool  #: whether that has the rank, and the line of the frame that raised (or how the process ended)
    code: int  #: of the commands, the one nearest to 0
    left: list[str]

    @property
    def kept(self) -> bool:
        """All of what is promised."""
        return not self.missed

    @property
    def missed(self) -> list[str]:
        """What is promised and was not seen."""
        if self.seconds is None:
            return ["it did not come to the failure"]
        checks = {
            f"{self.seconds:.1f} s": self.seconds <= SECONDS,
            f"{self.lines} lines": self.lines <= LINES,
            "the last line": self.told,
            "exit code 0": self.code != 0,
            ", ".join(self.left): not self.left,
        }
        return [name for name, holds in checks.items() if not holds]


@dataclass(frozen=True)
class OfHang:
    """A hang's verdict."""

    seconds: float | None  #: from the event to the naming; None: it was not named
    ended: float | None  #: to the end of the last process; None: it had to be ended from outside
    line: str  #: that names most
    missing: dict[int, str]  #: ranks that are not named with their lines
    code: int
    left: list[str]

    def missed(self, timeout: float, is_busy: bool, is_harmless: bool) -> list[str]:
        """What is promised and was not seen.

        Args:
            timeout: the Trainer's ``hang_timeout``.
            is_busy: whether the run is to go on, for a rank is only busy.
            is_harmless: whether nobody has to wait.
        """
        if is_harmless:
            checks = {"it ends": self.ended is not None, f"exit code {self.code}": self.code == 0}
        else:
            checks = {f"rank {rank} at {place} is not named": False for rank, place in self.missing.items()}
            if self.seconds is not None:
                checks[f"{self.seconds:.1f} s"] = self.seconds <= timeout + SLACK
            if is_busy:
                checks["it was ended"] = self.ended is None
            else:
                checks |= {"it was not ended": self.ended is not None, "exit code 0": self.code != 0}
        return [*(name for name, holds in checks.items() if not holds), *self.left]


@dataclass(frozen=True)
class OfHealth:
    """A healthy run's verdict."""

    seconds: float  #: that it took
    did: str  #: in the script's words; "" if it did not come to its end
    busy: int  #: how often it was said that a rank is busy and others wait, which is true
    alarms: list[str]  #: what else was said of ranks
    code: int
    left: list[str]

    @property
    def missed(self) -> list[str]:
        """What is promised and was not seen."""
        ended = [] if self.did and self.code == 0 else ["it did not come to its end"]
        return [*self.alarms, *ended, *self.left]


def places(line: str) -> Iterator[tuple[int, str]]:
    """The ranks that a line names, each with the files and lines between it and the next one."""
    found = list(_RANKS.finditer(line))
    for at, match in enumerate(found):
        until = found[at + 1].start() if at + 1 < len(found) else len(line)
        numbers = [int(number) for number in re.findall(r"\d+", match.group(1))]
        for place in _PLACE.findall(line[match.end() : until]):
            yield from ((number, place) for number in numbers)


def own_last(lines: Sequence[str]) -> str:
    """The last line; under torchrun the last one before its own report."""
    kept = list(lines)
    if kept and kept[-1].startswith(RUNNERS):
        starts = [at for at, line in enumerate(kept) if re.match(r"(\[rank\d+\]: )?[EW]\d{4} |Traceback", line)]
        kept = kept[: starts[0]] if starts else kept
    return kept[-1] if kept else ""


def of_failure(seen: Seen, rank: int, place: str, says: str, by_torchrun: bool = False) -> OfFailure:
    """The verdict on a run in which one rank failed.

    Args:
        seen: the run.
        rank: that failed.
        place: file and line that raised; "" where none did.
        says: then, a pattern of what the last line has to say.
        by_torchrun: whether torchrun's report comes after ours.
    """
    screens = [since(screen, seen.event or 0.0) for screen in seen.screens]
    lasts = [own_last(lines) if by_torchrun else (lines or [""])[-1] for lines in screens]
    told = [(rank, place) in places(last) if place else _names(last, rank, says) for last in lasts]
    last = next((last for last, good in zip(lasts, told, strict=True) if not good), lasts[0])
    seconds = None
    if seen.event is not None:
        printed = max((piece.at for screen in seen.screens for piece in screen), default=seen.event)
        seconds = max(seen.gone, printed) - seen.event
    left = [*seen.left, *([] if seen.ended else ["it did not end by itself"])]
    # where the rank was alone on its node, that node's command ends as the rank did
    codes = [code for code in seen.codes if code or says != "exit code 0"]
    return OfFailure(seconds, max(map(len, screens)), last, all(told), min(codes or [0], key=abs), left)


def _names(line: str, rank: int, says: str) -> bool:
    ranks = {int(number) for match in _RANKS.finditer(line) for number in re.findall(r"\d+", match.group(1))}
    return rank in ranks and re.search(says, line) is not None


def named(pieces: Sequence[Piece], wanted: Mapping[int, str]) -> tuple[str, dict[int, str], float | None]:
    """The first line that names all wanted ranks with their lines, or the one that names most of them.

    Returns:
        the line, what is missing in it, and when it stood on the screen (None where something is missing).
    """
    best, missing = "", dict(wanted)
    for line in shown(text_of(pieces)):
        found = set(places(line))
        lacks = {rank: place for rank, place in wanted.items() if (rank, place) not in found}
        if len(lacks) < len(missing):
            best, missing = line, lacks
    if not best or missing:
        return best, missing, None
    for count in range(1, len(pieces) + 1):
        if best in shown(text_of(pieces[:count])):
            return best, {}, pieces[count - 1].at
    return best, {}, None


def of_hang(seen: Seen, wanted: Mapping[int, str]) -> OfHang:
    """The verdict on a run in which ranks went different ways.

    Args:
        seen: the run.
        wanted: file and line by rank that is to be named.
    """
    pieces = [piece for piece in seen.screens[0] if piece.at >= (seen.event or 0.0)]
    line, missing, at = named(pieces, wanted)
    seconds = None if at is None or seen.event is None else at - seen.event
    ended = seen.gone - seen.event if seen.ended and seen.event is not None else None
    last = line or (shown(text_of(pieces)) or [""])[-1]
    return OfHang(seconds, ended, last, missing, min(seen.codes, key=abs), seen.left)


def of_health(seen: Seen, seconds: float) -> OfHealth:
    """The verdict on a run in which nothing happened."""
    lines = shown(text_of(seen.screens[0]))
    did = next((line for line in lines if line.startswith("healthy: ")), "")
    said = [line for line in lines if re.match(r"(\[rank\d+\]: )?(lockstep: |\w*Error)", line) and _RANKS.search(line)]
    alarms = [line for line in said if not _BUSY.search(line)]
    code = min(seen.codes, key=abs)
    return OfHealth(seconds, did.removeprefix("healthy: "), len(said) - len(alarms), alarms, code, seen.left)


def is_named_for(seconds: float, wanted: Mapping[int, str]) -> Enough:
    """Tells when all wanted ranks stand on the screen with their lines and so many seconds have passed since."""

    def enough(screens: list[list[Piece]]) -> bool:
        at = named(screens[0], wanted)[2] if wanted else None
        return at is not None and time.monotonic() - at > seconds

    return enough
