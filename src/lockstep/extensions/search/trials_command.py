"""``lockstep trials``: shows the trials of a search as a table, resubmits trials and cancels trials."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from lockstep.cli.run import CommandParser
from lockstep.extensions.search import search as searches
from lockstep.extensions.search import table
from lockstep.extensions.search.queue import SlurmRefused
from lockstep.extensions.search.search import Search, Status
from lockstep.extensions.search.trials import JOURNAL
from lockstep.ground.errors import MisconfigurationException

ABOUT = """\
Show the trials of a search: state, hyperparameters, newest metrics, node, restarts and seconds, and the best trial.
"""
EXAMPLES = """\
examples:
  lockstep trials searches/digits                                     the table
  lockstep trials searches/digits --sort val_accuracy --csv           for a notebook
  lockstep trials searches/digits --resubmit failed                   failed trials, from their newest checkpoints
  lockstep trials searches/digits --watch --resubmit preempted        where the cluster cancels what it preempts
"""
KINDS = (searches.FAILED, searches.PREEMPTED, searches.UNSUBMITTED, searches.CANCELLED)
"""States whose trials can be resubmitted."""
CLEAR = "\033[H\033[2J"


def trials(words: Sequence[str]) -> int:
    """Run ``lockstep trials`` and return its exit code.

    Args:
        words: arguments after ``lockstep trials``.

    Raises:
        MisconfigurationException: there are no trials at the path, or an option does not fit them.
    """
    given = _parser().parse_args(words)
    found = searches.found_at(given.path)
    if not found:
        raise MisconfigurationException(
            f"{given.path}: there are no trials (folders trial_0000 ...). Use the log_path of a SlurmCluster, or the "
            "folder of a search in it"
        )
    if (given.resubmit or given.cancel) and len(found) > 1:
        names = ", ".join(str(search.path) for search in found)
        raise MisconfigurationException(f"{given.path} contains several searches. Use one of them: {names}")
    try:
        if given.cancel:
            statuses, _ = _query_trials(found[0])
            if given.cancel != "all":
                flag = f"--cancel {given.cancel}"
                statuses = _numbered(statuses, given.cancel, flag, "all, or numbers of trials")
            cancelled = searches.cancel_trials(statuses)
            numbers = searches.ranges([trial.number for trial in cancelled])
            none = "none, because no trial is pending or running"
            print(f"lockstep trials: cancelled: {f'trial(s) {numbers}' if cancelled else none}", file=sys.stderr)
        if given.watch is not None:
            return _watch(found, given)
        if given.resubmit:
            _resubmit(found[0], given, reported=set())
        elif not given.cancel:
            _show(found, given)
        return 0
    except SlurmRefused as refused:
        print(f"lockstep trials: {refused}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> CommandParser:
    parser = CommandParser("lockstep trials", None, ABOUT, EXAMPLES)
    add = parser.add_argument
    add("path", metavar="LOG_PATH", help="the log_path of a SlurmCluster, or the folder of a search in it")
    add("--sort", metavar="METRIC", help="the best trials first, by this metric")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--max", dest="largest", action="store_const", const=True, help="the largest is the best")
    group.add_argument("--min", dest="largest", action="store_const", const=False, help="the smallest is the best "
                       "(default: determined by the metric's name)")  # fmt: skip
    add("--all", action="store_true", help="all metrics, and hyperparameters that are the same in all trials")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--csv", action="store_true", help="print CSV")
    group.add_argument("--json", action="store_true", help="print JSON")
    add("--watch", nargs="?", type=float, const=5.0, metavar="SECONDS", help="show the table again, every 5 seconds by "
        "default, until no state changes any more")  # fmt: skip
    add("--resubmit", metavar="|".join((*KINDS[:3], "TRIAL")), help="submit trials again, from their newest "
        "checkpoints: all of a state, or by number (3 or 3,5)")  # fmt: skip
    add("--cancel", nargs="?", const="all", metavar="TRIAL", help="cancel all pending and running trials, or some: 3,5")
    add("--max-preemptions", type=int, metavar="N", help="do not resubmit trials that were preempted more often "
        "(default: of the search)")  # fmt: skip
    add("--max-failures", type=int, metavar="N", help="do not resubmit trials that failed so often (default: of the "
        "search)")  # fmt: skip
    return parser


def _watch(found: Sequence[Search], given: argparse.Namespace) -> int:
    """Show the table repeatedly, and resubmit the selected trials, until no trial's state can change any more."""
    reported: set[str] = set()
    while True:
        # Before the table, which then shows the resubmitted trials as pending.
        again = given.resubmit and _resubmit(found[0], given, reported)
        if sys.stdout.isatty():
            print(CLEAR, end="")
        statuses = _show(found, given)
        if not again and all(status.state in searches.FINAL for status in statuses):
            return 0
        time.sleep(max(given.watch, 0.1))


def _query_trials(search: Search) -> tuple[list[Status], str]:
    """Return (state of each trial, SLURM's error message or "" if SLURM answered)."""
    # Dead trials of a study are marked here, because there may be no other trial left that would do so.
    if (search.path / JOURNAL).exists() and importlib.util.find_spec("optuna") is not None:
        from lockstep.extensions.search.study import fail_dead

        with contextlib.suppress(PermissionError):  # the table needs read access only
            fail_dead(search.path)
    return searches.query_trials(search)


def _show(found: Sequence[Search], given: argparse.Namespace) -> list[Status]:
    """Print a table for each search, and return the states of all trials."""
    shown: list[Status] = []
    rows = []
    for search in found:
        statuses, trouble = _query_trials(search)
        shown += statuses
        order = table.order_by(statuses, given.sort, given.largest)
        if given.sort is not None and order is not None:
            statuses = sorted(statuses, key=order.key)
        if given.csv or given.json:
            rows += [table.as_dict(search.path.name, status) for status in statuses]
        else:
            print(table.text(search.path.name, statuses, order, given.all))
        if trouble:
            print(f"lockstep trials: SLURM did not answer: {trouble}", file=sys.stderr)
    if given.json:
        print(json.dumps(rows, indent=2))
    elif given.csv:
        print(table.as_csv(rows), end="")
    # --watch may write to a pipe, whose reader waits for each table.
    sys.stdout.flush()
    return shown


# -- resubmit and cancel -------------------------------------------------------------------------------------


def _resubmit(search: Search, given: argparse.Namespace, reported: set[str]) -> int:
    """Resubmit the trials that the command line selects, and return their number.

    Args:
        search: search of the trials.
        given: options of the command line.
        reported: messages of earlier rounds, which are not repeated.

    Raises:
        SlurmRefused: SLURM did not answer, so that a trial may still run; or sbatch failed.
    """
    statuses, trouble = _query_trials(search)
    if trouble:
        raise SlurmRefused(f"SLURM did not report the states of the trials, so none is resubmitted: {trouble}")
    chosen = _chosen(statuses, given.resubmit)
    typed = {"preemptions": given.max_preemptions, "failures": given.max_failures}
    limits = replace(search.limits, **{name: most for name, most in typed.items() if most is not None})
    again = []
    for status in chosen:
        why = searches.exhausted(status, limits) if given.resubmit in KINDS else ""
        if why and why not in reported:
            print(f"lockstep trials: not resubmitted: {why}", file=sys.stderr)
            reported.add(why)
        elif not why:
            again.append(status.trial)
    if again:
        searches.submit_trials(search, again, lambda text: print(f"lockstep trials: {text}", file=sys.stderr))
    elif given.watch is None:
        print(f"lockstep trials: nothing to resubmit: no trial matches --resubmit {given.resubmit}", file=sys.stderr)
    return len(again)


def _chosen(statuses: Sequence[Status], what: str) -> list[Status]:
    """Return the trials that ``--resubmit`` selects.

    Raises:
        MisconfigurationException: the state or trial does not exist, or the trial is pending, running or completed.
    """
    if what in KINDS:
        return [status for status in statuses if status.state == what]
    chosen = _numbered(statuses, what, f"--resubmit {what}", f"{', '.join(KINDS)}, or numbers of trials, as 3 or 3,5")
    for status in chosen:
        if status.state not in KINDS:
            raise MisconfigurationException(
                f"--resubmit {what}: trial {status.trial.number} is {status.state}. Only {', '.join(KINDS)} trials can "
                "be resubmitted"
            )
    return chosen


def _numbered(statuses: Sequence[Status], what: str, flag: str, way: str) -> list[Status]:
    by_number = {str(status.trial.number): status for status in statuses}
    unknown = [word for word in what.split(",") if word.strip() not in by_number]
    if unknown:
        raise MisconfigurationException(
            f"{flag}: there is no trial {unknown[0]!r}; the search has {len(statuses)} trial(s). Use {way}"
        )
    return [by_number[word.strip()] for word in what.split(",")]
