"""Compare random user programs on one to three ranks with one process.

python -m tests.fuzz [--engines] [--cases N] [--seed S] [--only SEED ...]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.fuzz import compare, engines, program
from tests.tools.pool import RankPool


def main() -> int:
    """Print each difference with the seed of its program; the exit code is 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="that of the first program; the others follow it")
    parser.add_argument("--only", type=int, nargs="*", help="the seeds to run")
    parser.add_argument("--engines", action="store_true", help="small programs on every engine")
    given = parser.parse_args()
    run: Callable[[RankPool, int], Any] = lambda pool, seed: (  # noqa: E731
        engines.compare(pool, engines.draw(seed)) if given.engines else compare.compare(pool, program.draw(seed))
    )
    seeds = given.only or range(given.seed, given.seed + given.cases)
    outcomes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    with RankPool(3) as pool:
        for seed in seeds:
            verdict = run(pool, seed)
            outcomes[verdict.outcome] += 1
            if verdict.outcome == "different" or given.only:
                print(f"{verdict.outcome}: {verdict.program}")
                for reason in verdict.reasons[:6]:
                    print(f"    {reason[:2000]}")
                sys.stdout.flush()
            elif verdict.outcome != "equal":
                reasons[f"{verdict.outcome}: {verdict.reasons[0][:160]}"] += 1
    for reason, count in reasons.most_common():
        print(f"{count:4} {reason}")
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 1 if outcomes["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
