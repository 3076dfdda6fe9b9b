"""The process of one part: ``python -m benchmarks.gpu.process SETTINGS``, as `benchmarks.gpu.main` starts it."""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.checks import Part, run_part


def begin(settings: dict[str, Any]) -> None:
    """Run the part that the settings name."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(settings["limit"], exit=True)  # the log then says where it hung
    name, kept = settings.pop("part"), settings.pop("kept")
    run_part(Part(**settings, kept=Path(kept)), name)


if __name__ == "__main__":
    begin(json.loads(sys.argv[1]))
