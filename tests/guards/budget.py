"""The budget of tokens by folder: .py and .json files of the package, and the tools of the tests.

    python -m tests.guards.budget            # prints what each folder uses of its budget
    python -m tests.guards.budget --write    # notes what is used as the budget

A budget may move between folders, and from the reserve to a folder. The sum is `MOST`, which is not raised: when the
reserve is used up, new code is paid for by code that goes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from tests.guards.source import PACKAGE, PROJECT, Source, numbers, tokens
from tests.guards.words import folder_of

BUDGET = Path(__file__).with_name("budget.json")
TOOLS = PROJECT / "tests" / "tools"

MOST = 616_000
"""Tokens in all folders together: 600,000 from before the extension replay, and 16,000 for it."""

RESERVE = "reserve"
"""The part of the budget that no folder has."""


def used(package: Path = PACKAGE, tools: Path = TOOLS) -> dict[str, int]:
    """The tokens of each folder, docstrings and comments left out."""
    sums: Counter[str] = Counter()
    for root, name in ((package, ""), (tools, "tests/tools")):
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
            source = Source(path.relative_to(root.parent), path.read_text())
            count = numbers(source).tokens if path.suffix == ".py" else tokens(source.text)
            sums[name or folder_of(source)] += count
    return dict(sorted(sums.items()))


def over(budget: dict[str, int], found: dict[str, int]) -> list[str]:
    """Folders that use more than their budget, in a sentence each."""
    return [
        f"{folder} has {count:,} tokens, and a budget of {budget.get(folder, 0):,}"
        for folder, count in found.items()
        if count > budget.get(folder, 0)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="note what is used as the budget")
    options = parser.parse_args()
    found = used()
    if options.write:
        BUDGET.write_text(json.dumps({**found, RESERVE: MOST - sum(found.values())}, indent=1) + "\n")
    budget = json.loads(BUDGET.read_text())
    for folder, count in found.items():
        print(f"{folder:34}{count:9,}{budget.get(folder, 0):9,}")
    print(f"{'sum':34}{sum(found.values()):9,}{MOST:9,}")


if __name__ == "__main__":
    main()
