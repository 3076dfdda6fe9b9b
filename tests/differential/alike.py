"""Whether lockstep shows the same of a program in whatever form it is written; also in precisions that Lightning does
not have on the CPU.

python -m tests.differential.alike [--cases N] [--seed S] [--only SEED ...]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.differential.compare import Difference, differences
from tests.differential.forms import PAST_WRAPPER, program_in_forms
from tests.differential.play import play
from tests.differential.program import Program
from tests.differential.record import Record

BY_WRAPPER = ("on_before_optimizer_step", "module.optimizer_step", "module.optimizer_zero_grad", "optimizer.updated")
"""What belongs to a step of an optimizer in its wrapper; where gradients are not finite, a plain one steps without."""


LEFT_OUT = ("nothing was stepped", "order of schedulers and optimizers")
"""Warnings after steps that a loss scale left out, of which torch hears by the wrapper alone."""


def in_plain_form(program: Program) -> Program:
    """The program as a tutorial writes it."""
    by_hand = "wrapped" if program.by_hand in PAST_WRAPPER else program.by_hand
    acts = tuple(act for act in program.acts if act.kind != "copy")
    return replace(program, form="method", by_hand=by_hand, acts=acts, pickles=False)


def drawn(seed: int) -> Program:
    """A program that has another form than the plain one."""
    r = random.Random(f"alike {seed}")
    for number in range(1000):
        program = program_in_forms(seed * 1000 + number)
        if program.manual and program.by_hand != "wrapped" and "precision" in program.flags:
            precision = r.choice(("16-mixed", "16-mixed", "bf16-mixed", "32-true"))
            program = replace(program, flags={**program.flags, "precision": precision})
        if program.by_hand in PAST_WRAPPER and len(program.optimizers) > 1:
            continue  # several are toggled by the wrapper
        if in_plain_form(program) != replace(program, pickles=False):
            return program
    raise AssertionError(f"no program of seed {seed} has another form")


def unlike(program: Program) -> list[Difference]:
    """Where a program shows something else than its plain form."""
    records: list[Record] = []
    for each in (in_plain_form(program), replace(program, pickles=False)):
        with tempfile.TemporaryDirectory(prefix="alike") as folder:
            records.append(play("lockstep", each, Path(folder).resolve()))
    for record in records:
        if program.by_hand in PAST_WRAPPER:
            record.events = [event for event in record.events if not event[0].endswith(BY_WRAPPER)]
        for _, facts in (*record.events, *record.ends):
            facts.pop("grad mode", None)  # a decorated hook may look without gradients
            facts.pop("message", None)
    past_scaler = program.by_hand in PAST_WRAPPER and program.flags.get("precision") == "16-mixed"
    found = differences(*records)
    return [d for d in found if not (past_scaler and d.kind == "warnings" and d.where.startswith(LEFT_OUT))]


def main() -> int:
    """Print where programs in two forms are unlike; the exit code is 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    given = parser.parse_args()
    count, seeds = 0, given.only or range(given.seed, given.seed + given.cases)
    for seed in seeds:
        program = drawn(seed)
        found = unlike(program)
        count += bool(found)
        if found:
            print(f"seed {seed}: {program}")
            for difference in found[:6]:
                print(f"    {difference}")
            sys.stdout.flush()
    print(f"{len(seeds) - count} alike, {count} unlike")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
