"""Writes hook_order/*.json: the order of Lightning 2.6.6's hooks in every scenario of recorder.py.

Run it from the project's folder after a scenario was added or changed, where Lightning 2.6.6 is installed
(the extra ``bench`` has it)::

    python -m tests.golden.make_hook_order
"""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path

import lightning

from tests.golden.recorder import SCENARIOS, record

FOLDER = Path(__file__).parent / "hook_order"
VERSION = "2.6.6"


def main() -> None:
    """Record every scenario and write one file for each."""
    if lightning.__version__ != VERSION:
        raise SystemExit(f"The golden files are those of Lightning {VERSION}; installed is {lightning.__version__}.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    for name, scenario in SCENARIOS.items():
        lines = record("lightning.pytorch", scenario)
        golden = {"lightning": VERSION, "scenario": name, "calls": lines}
        (FOLDER / f"{name}.json").write_text(json.dumps(golden, indent=0) + "\n")
        print(f"{name}: {len(lines)} calls")


if __name__ == "__main__":
    main()
