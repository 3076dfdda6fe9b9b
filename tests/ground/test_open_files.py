"""Files that are open where a process ends by ``os._exit``."""

from __future__ import annotations

from pathlib import Path

from tests.tools.fresh import python

SCRIPT = """
import gc, os
from lockstep.ground.fork_and_exit import flush_open_files

parents = open("parents.csv", "w")
parents.write("once")
child = os.fork()
if not child:
    gc.freeze()  # as lockstep.ground.fork_and_exit has it done
    own = open("own.csv", "w")
    own.write("epoch,loss")
    raw = open("own.bin", "wb")
    raw.write(b"weights")
    flush_open_files()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_what_a_process_has_written_is_there_and_what_its_parent_writes_comes_once(tmp_path: Path) -> None:
    """A rank of `ddp_spawn` lost the last 8 KB of a file that a callback had left open."""
    path = tmp_path / "forks.py"
    path.write_text(SCRIPT)
    ended = python(path, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = {name: (tmp_path / name).read_text() for name in ("parents.csv", "own.csv", "own.bin")}
    assert found == {"parents.csv": "once", "own.csv": "epoch,loss", "own.bin": "weights"}
