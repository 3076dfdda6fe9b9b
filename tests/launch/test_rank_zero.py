"""Rank 0 at the side of its supervisor: how it starts one, and how it ends with it."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from lockstep.supervise import client
from tests.tools.fresh import python

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs signals of Linux")

# Rank 0 of two, without torch, which it does not need for this. {rank} is the code of rank 1, {rest} what rank 0 does.
SCRIPT = """
import atexit, os, signal, sys, time, types
package = sys.modules["lockstep"] = types.ModuleType("lockstep")
package.__path__ = [{folder!r}]
from lockstep.cluster.world import World
from lockstep.supervise.client import Supervised
{before}
world = World(0, 2, 0, 2, 0, 1, "127.0.0.1", 29500)
side = Supervised(world, ["python", "-I", "-S", "-c", {rank!r}], dict(os.environ))
{rest}
"""


def script(folder: Path, rank: str, rest: str, before: str = "") -> Path:
    path = folder / "train.py"
    package = os.path.dirname(os.path.dirname(client.__file__))
    text = SCRIPT.format(folder=package, rank=rank, rest=rest, before=before)
    path.write_text(text.replace('"python"', "sys.executable"))
    return path


@pytest.mark.parametrize("rest", ["raise RuntimeError('it has lost rank 1')", "pass", "sys.stdout = None"])
def test_what_the_script_does_at_its_end_is_done_where_another_rank_has_failed(tmp_path: Path, rest: str) -> None:
    """Rank 0 ended by `os._exit`: what was registered with atexit did not run, and what was written was lost."""
    before = "atexit.register(os.write, 1, b'cleaned up')\ntable = open('table.csv', 'w')\ntable.write('epoch,loss')"
    fails = "open('fails', 'w').close(); raise SystemExit(3)"
    behind_it = f"while not os.path.exists('fails'): time.sleep(0.01)\ntime.sleep(1)\n{rest}"
    ended = python(script(tmp_path, fails, behind_it, before), folder=tmp_path)
    assert ended.returncode == 3
    assert ended.stdout == "cleaned up"
    assert (tmp_path / "table.csv").read_text() == "epoch,loss"
    assert re.fullmatch(r"lockstep: rank 1 \(process \d+\) ended with exit code 3", ended.stderr.splitlines()[-1])


def test_a_large_environment_reaches_a_supervisor_that_starts_slowly(tmp_path: Path) -> None:
    """After a second rank 0 hung up, and the run ended: "the supervisor of the ranks was ended with exit code 0"."""
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\ncase "$*" in *supervisor*) sleep 1.5;; esac\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    before = f"sys.executable = {str(slow)!r}\nos.environ.update({{f'SERVICE_{{n}}': 'x' * 100 for n in range(4000)}})"
    rank = "import os; os.write(1, str('SERVICE_3999' in os.environ).encode())"
    ended = python(script(tmp_path, rank, "", before), folder=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True", "")


def test_a_rank_that_is_killed_is_named_where_the_script_ignores_the_ends_of_its_children(tmp_path: Path) -> None:
    """The supervisor inherited that, so that the system forgot how ranks ended: 0, it was told."""
    rank = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    ended = python(script(tmp_path, rank, "time.sleep(20)", before), folder=tmp_path)
    assert ended.returncode == 1
    assert re.fullmatch(
        rf"lockstep: rank 1 \(process \d+\) was killed by SIGKILL \(exit code -{int(signal.SIGKILL)}\)",
        ended.stderr.splitlines()[-1],
    )
