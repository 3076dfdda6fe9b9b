"""Runs torch's tests of DistributedDataParallel with its own class and with ours, and records how they end.

``python -m tests.extensions.parallel.peers.record`` writes ``verdicts.json``; names of tests or of candidates after it
run these only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.extensions.parallel.peers.runner import Verdict, run
from tests.extensions.parallel.peers.suite import CANDIDATES
from tests.tools.pool import RankPool

FOLDER = Path(__file__).parent
VERDICTS = FOLDER / "verdicts.json"
REASONS = FOLDER / "reasons.json"


def recorded() -> dict[str, Any]:
    """The versions and the verdicts, by test and candidate."""
    return dict(json.loads(VERDICTS.read_text())) if VERDICTS.exists() else {"torch": "", "tests": {}}


def reasons() -> dict[str, dict[str, str]]:
    """Why a test does not pass, by test: "torch", "ours", or "own words" (it passes but for an error's text), in words.

    "kind" sorts those that torch's class passes and ours does not.
    """
    return dict(json.loads(REASONS.read_text()))


def candidates(test: str) -> list[str]:
    """With which candidates a test is run."""
    own_words = "own words" in reasons().get(test, {})
    return [name for name in CANDIDATES if name != "own words" or own_words]


def names(pool: RankPool) -> list[str]:
    """The tests, in the file's order."""
    return list(pool.run(_names, timeout=120, group=False)[0])  # on all of them: it imports the file


def _names() -> list[str]:
    from tests.extensions.parallel.peers import suite

    return suite.names()


def main(wanted: list[str]) -> None:
    """Run what is wanted (all of it if nothing is named) and write it down."""
    before = recorded()["tests"]
    found: dict[str, dict[str, str]] = {}
    with RankPool(2) as pool:
        for test in names(pool):
            names_of = candidates(test)
            row = {name: word for name, word in before.get(test, {}).items() if name in names_of}
            for name in names_of:
                if wanted and name not in wanted and test not in wanted:
                    continue
                end: Verdict = run(pool, test, name)
                row[name] = end.word
                print(f"{test:75} {name:9} {end.word:7} {end.reason[:120]}", flush=True)
                if name == "torch" and end.word == "passes" and not end.made:
                    row.clear()  # it makes no DistributedDataParallel
                    break
            if "torch" in row:
                found[test] = row
    VERDICTS.write_text(json.dumps({"torch": torch.__version__.partition("+")[0], "tests": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
