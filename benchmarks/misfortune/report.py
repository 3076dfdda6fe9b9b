"""Verdicts as Markdown tables, and the page that they make."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from . import scenarios, verdict
from .scenarios import Failure, Hang

Found = dict[str, Any]
WIDTH = 110
"""Characters of a line of a screen that a cell shows."""


COST = 5.0
"""Microseconds that the gate may add to a collective."""
GATED = {
    "user": "called by a script",
    "async": "called by a script, waited for later",
    "library": "called by a package, 16 frames below the script",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def cell(line: str) -> str:
    """A line of a screen for a cell: paths without folders, and not too long."""
    short = re.sub(r"[\w./-]*/([\w-]+\.py)", r"\1", line)
    short = short if len(short) <= WIDTH else short[: WIDTH - 1].rstrip() + "…"
    return f"`{short.replace('`', '').replace('|', chr(92) + '|')}`" if short else ""


def spread(values: Sequence[float | None]) -> str:
    """The median, and the worst in brackets where there are several; a dash where one is missing."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "–"
    return f"{median(known):.1f}" + (f" ({max(known):.1f})" if len(known) > 1 else "")


def kept(missed: Sequence[Sequence[str]]) -> str:
    """Whether nothing is missed in any of the runs; if not, what."""
    reasons = list(dict.fromkeys(reason for run in missed for reason in run))
    if not reasons:
        return "yes"
    bad = sum(1 for run in missed if run)
    share = f" in {bad} of {len(missed)}" if len(missed) > 1 else ""
    return f"**no**{share}: " + "; ".join(reason.replace("|", chr(92) + "|") for reason in reasons)


def _failures(rows: Sequence[Failure], found: Found) -> list[str]:
    cells = []
    for row in rows:
        runs = [verdict.OfFailure(**run) for run in found[row.key]]
        worst = max(runs, key=lambda run: (not run.told, run.seconds or 0.0))
        cells.append(
            [
                row.name,
                row.start,
                spread([run.seconds for run in runs]),
                str(max(run.lines for run in runs)),
                cell(worst.last),
                ", ".join(sorted({str(run.code) for run in runs})),
                ", ".join(sorted({name for run in runs for name in run.left})) or "nothing",
                kept([run.missed for run in runs]),
            ]
        )
    head = ["failure", "started by", "seconds", "lines", "last line", "exit code", "left", "kept"]
    return table(head, cells)


def of_failures(found: Found) -> list[str]:
    """The twelve."""
    lines = _failures(scenarios.FAILURES, found["runs"])
    if not found["memory"]:
        lines += ["", "No control group could be made: the rank that runs out of memory killed itself."]
    return lines


def of_elsewhere(found: Found) -> list[str]:
    """Some of them under other launchers."""
    return _failures(scenarios.ELSEWHERE, found["runs"])


def of_hangs(found: Found) -> list[str]:
    """The twelve."""
    return _hangs(scenarios.HANGS, found)


def of_nodes(found: Found) -> list[str]:
    """All of them on two nodes."""
    return [*_failures(scenarios.NODES_FAILURES, found["runs"]), "", *_hangs(scenarios.NODES_HANGS, found)]


def _hangs(rows: Sequence[Hang], found: Found) -> list[str]:
    cells = []
    for row in rows:
        runs = [verdict.OfHang(**{**run, "missing": _by_rank(run["missing"])}) for run in found["runs"][row.key]]
        missed = [run.missed(found["timeout"], row.is_busy, row.is_harmless) for run in runs]
        worst = max(runs, key=lambda run: len(run.missing))
        named = "no rank waits" if row.is_harmless else spread([run.seconds for run in runs])
        ended = "continues" if row.is_busy else spread([run.ended for run in runs])
        if row.is_harmless:
            ended = "when complete"
        wanted = "; ".join(f"rank {rank} at {place}" for rank, place in row.places.items())
        cells.append([row.name, row.start, wanted, named, ended, cell(worst.line), kept(missed)])
    head = ["hang", "started by", "expected", "reported after s", "ended after s", "message", "kept"]
    return table(head, cells)


def _by_rank(plain: Mapping[Any, str]) -> dict[int, str]:
    return {int(rank): place for rank, place in plain.items()}


def of_healthy(found: Found) -> list[str]:
    """No false alarm."""
    run = verdict.OfHealth(**found["run"])
    cells = [f"{run.seconds:.0f}", f"{found['timeout']:g}", run.did, str(run.busy), str(len(run.alarms)), str(run.code)]
    head = ["seconds", "hang_timeout", "what it did", "reports of a busy rank", "false alarms", "exit code", "kept"]
    return table(head, [[*cells, kept([[cell(line) for line in run.missed]])]])


def of_gate(found: Found) -> list[str]:
    """What it adds."""
    rows = [
        [GATED.get(kind, kind), f"{cost:.2f}", f"≤ {COST:g}", "yes" if cost <= COST else "**no**"]
        for kind, cost in found["costs"].items()
    ]
    return table(["collective", "added µs", "promised", "kept"], rows)


def of_peers(found: Found) -> list[str]:
    """The same scripts with Lightning's Trainer."""
    cells = []
    for key, run in found["peers"].items():
        own, other = found["own"][key], run
        cells.append(
            [
                key,
                *(_ending(one, found["limit"]) for one in (own, other)),
                str(own["lines"]),
                str(other["lines"]),
                cell(own["last"]),
                cell(other["last"]),
            ]
        )
    theirs = f"Lightning {found['version']}"
    head = ["", "lockstep, s", f"{theirs}, s", "lines", "its lines", "last line", "its last line"]
    return table(head, cells)


def _ending(run: Found, limit: float) -> str:
    return f"{run['seconds']:.1f}" if run["ended"] else f"not in {limit:g}"


SECTIONS: dict[str, tuple[str, str, Callable[[Found], list[str]]]] = {
    "failures": (
        "Failures of a rank",
        f"The promise: within {verdict.SECONDS:g} s all processes have ended and the cause is printed, in at most "
        f"{verdict.LINES} lines. The last line names the rank, and the file and line of the frame that raised (or how "
        "the process ended). The exit code is not 0. No process, no file in /dev/shm and no port is left.",
        of_failures,
    ),
    "elsewhere": (
        "Failures under ddp_spawn, torchrun and on two nodes",
        "torchrun always prints its own report last. Under torchrun, the column “last line” therefore shows the line "
        "before this report, but the lines of the report are counted.",
        of_elsewhere,
    ),
    "hangs": (
        "Hangs and mismatched collectives",
        "The promise: a message with each rank and the line where it waits is printed within "
        f"`hang_timeout` + {verdict.SLACK:g} s after the ranks diverged. Then the run ends, unless a rank is only "
        "busy.\n\nOn some devices a collective returns as soon as it is queued, as with NCCL. On such devices, "
        "lockstep detects within 1.5 s that a queued collective is not complete, so a late rank is reported up to "
        "1.5 s later. There, ranks that all wait for each other do not prove a hang, as a device's queue may still "
        "advance, so the run does not end at once.",
        of_hangs,
    ),
    "nodes": (
        "Failures and hangs on two nodes",
        "Two nodes with one rank each were started by hand with NODE_RANK on this machine. The promises are the same, "
        "and apply to the last line on the screen of each node. If a script fails before it creates its Trainer, only "
        "its own node reports the error; the other node waits until the rendezvous times out.",
        of_nodes,
    ),
    "healthy": (
        "No false alarms",
        "In this run one rank repeatedly waits for the other for 1.5 times `hang_timeout`. The other rank has a slow "
        "step, reads a slow sample, validates longer, or works alone at the end of an epoch. The promise: the run "
        "completes, and the only messages report that one rank is busy and the other waits for it.",
        of_healthy,
    ),
    "gate": (
        "What hang detection costs",
        "The start and end of each collective of torch.distributed are recorded in memory that outlives the rank. The "
        "table shows the processor time that this adds to a call, in the calling thread. Calls with and without "
        "recording alternate, and each time is the minimum of 40 rounds of 500 calls.",
        of_gate,
    ),
    "peers": (
        "Compared with Lightning",
        "The same scripts were run with `import lightning.pytorch`. Times are measured until the last process has "
        "ended.",
        of_peers,
    ),
}


def section(name: str, figures: Found) -> str:
    """One part's heading, explanation, table and load."""
    title, about, lines = SECTIONS[name]
    load = " and ".join(f"{value:.1f}" for value in figures["load"])
    texts = [f"## {title}", "", about, "", *lines(figures["found"]), "", f"Load average before and after: {load}.", ""]
    return "\n".join(texts)


def page(figures: Found, command: str) -> str:
    """docs/failures.md."""
    timeout = figures["hangs"]["found"]["timeout"]
    about = f"""# Failures and hangs: what is reported

This page explains the messages that are printed when a rank (process) fails or hangs, and shows how fast they come.
Written by {command}.

```
lockstep: rank 1 failed first, at fails.py:88: KeyError: 'no such label'
```

**Failures.** The last line on stderr describes the failure that occurred first: the rank, the file and line, and the
error. All other ranks are ended. Resume with `ckpt_path="last"`, or let [lockstep run](run.md) restart the ranks.

**Hangs.** A message reports which rank waits where, and what the other ranks do. With `Trainer(hang_timeout=60.0)`, the
default, it is printed after 60 s of waiting; with `hang_timeout=None`, never.

- If it is proven that the ranks can never continue, the run ends at once.
- Otherwise the run ends after `hang_kill=1800.0` s. With `hang_kill=None` it does not end.

In the tables, each row is a training script with two or more ranks, started in a new folder at a terminal, as a user
would start it. At the 20th step one rank fails, or does something that the other ranks do not do. From this moment,
times are measured and printed lines are counted. For failures, the time ends when the last process has ended.

If a script was run several times, its seconds are the median, with the maximum in brackets. "Kept" means that every
run kept the promise of its section. In the tables of hangs `hang_timeout` is {timeout:g} s.
"""
    return "\n".join([about, *(section(name, figures[name]) for name in SECTIONS if name in figures)])


def write(figures: Found, path: Path, command: str) -> None:
    """The page, as a file."""
    path.write_text(page(figures, command))


def missed_of(row: Failure | Hang, run: Found, timeout: float) -> list[str]:
    """What is missed in one run, as it is kept."""
    if isinstance(row, Failure):
        return verdict.OfFailure(**run).missed
    of_hang = verdict.OfHang(**{**run, "missing": _by_rank(run["missing"])})
    return of_hang.missed(timeout, row.is_busy, row.is_harmless)
