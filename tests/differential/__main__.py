"""Run random programs on Lightning and on lockstep, and print where they differ.

python -m tests.differential [--cases N] [--seed S] [--only SEED ...]

A program that takes longer than a minute is told as one that does not end, with the place where it stood.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections import Counter
from types import FrameType

from tests.differential.compare import Verdict, compare
from tests.differential.more import program_of
from tests.differential.program import Program

LIMIT = 60
"""Seconds a program may take on both packages together; the usual one takes half a second."""


class OutOfTime(BaseException):
    """A program has not ended within the limit. No program catches it."""


def out_of_time(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def compared(program: Program) -> Verdict | None:
    """The verdict on a program, or None after the stack of one that does not end was printed."""
    signal.alarm(LIMIT)
    try:
        return compare(program)
    except OutOfTime:
        print(f"seed {program.seed} does not end within {LIMIT} s: {program}")
        print(traceback.format_exc())
        return None
    finally:
        signal.alarm(0)


def main() -> int:
    """Print each unexplained difference with the seed of its program; the exit code is 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="that of the first program; the others follow it")
    parser.add_argument("--only", type=int, nargs="*", help="the seeds to run")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, out_of_time)
    for seed in given.only or range(given.seed, given.seed + given.cases):
        verdict = compared(program_of(seed))
        if verdict is None:
            outcomes["endless"] += 1
            continue
        rows.update({row.sentence for _, row in verdict.explained})
        ended = f", ended by {verdict.ended}" if verdict.ended else ""
        outcomes[("different" if verdict.unexplained else "explained" if verdict.explained else "equal")] += 1
        if verdict.unexplained or given.only:
            print(f"seed {seed}{ended}: {verdict.program}")
            shown: Counter[str] = Counter(f"{d.kind} {d.name}" for d in verdict.unexplained)
            for difference in verdict.unexplained:
                key = f"{difference.kind} {difference.name}"
                if shown[key]:
                    print(f"    {difference} ({shown.pop(key)} such)")
            for difference, row in verdict.explained if given.only else ():
                print(f"    explained by {row.sentence!r}: {difference}")
            sys.stdout.flush()
    for sentence, count in rows.most_common():
        print(f"{count:4} {sentence}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 1 if outcomes["different"] or outcomes["endless"] else 0


if __name__ == "__main__":
    sys.exit(main())
