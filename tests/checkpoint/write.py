"""Writes the checkpoints that are kept of a format: see written.py. ``python -m tests.checkpoint.write FORMAT``."""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.checkpoint.written import BOUNDARY, DATA, RUNS, differs, ends, kind, play_of
from tests.tools.pool import RankPool


def main(format: str) -> None:
    right = ends()
    with tempfile.TemporaryDirectory() as name, RankPool(2) as pool:
        folder = Path(name)
        for run_name, run in RUNS.items():
            (folder / run_name).mkdir()
            load = folder / run.after / BOUNDARY if run.after else None
            found = pool(run.ranks).run(play_of, run_name, run_name, folder / run_name, load, timeout=120)[0]
            wrong = differs(found, right[kind(run)], run.single)
            if wrong:
                raise SystemExit(f"{run_name} is not one process: {wrong}")
        with tarfile.open(DATA / f"{format}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted(folder.rglob("*")):
                archive.add(path, path.relative_to(folder), recursive=False, filter=anonymous)
    text = json.dumps({name: asdict(end) for name, end in right.items()}, indent=1)
    (DATA / f"{format}.json").write_text(text + "\n")
    print(f"{format}.tar.xz: {(DATA / f'{format}.tar.xz').stat().st_size} bytes")


def anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
    return entry


if __name__ == "__main__":
    main(sys.argv[1])
