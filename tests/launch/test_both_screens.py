"""A script on two nodes of one rank each, started by hand: both screens end with the first cause; nothing is left."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.sessions import kill, marked, started
from tests.load import at_most

SCRIPT = Path(__file__).with_name("two_nodes.py")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


class Run:
    """The script on two nodes, until nothing of it is left: the lines of both screens and the time that it took."""

    def __init__(self, folder: Path, what: str, strategy: str, hosts: bool) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        nodes = []
        for node in range(2):
            name = f"import socket; socket.gethostname = lambda: 'host{node}'; " if hosts else ""
            words = (
                f"{name}import runpy, sys; sys.argv[0] = {str(SCRIPT)!r}; runpy.run_path({str(SCRIPT)!r}, run_name='x')"
            )
            environ = {"NODE_RANK": str(node), "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1"}
            command = (sys.executable, "-c", words, what, strategy)
            nodes.append(started(folder, *command, stderr=subprocess.STDOUT, **environ))
        began = time.monotonic()
        try:
            self.lines = [node.communicate(timeout=50)[0].rstrip("\n").split("\n") for node in nodes]
        finally:
            for node in nodes:
                kill(node.pid)
                node.wait()
        self.seconds = time.monotonic() - began
        self.codes = [node.returncode for node in nodes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "strategy", "hosts", "says"),
    [
        ("barrier", "ddp", True, r"do not match: rank 0 waits in barrier #\d+, BARRIER .*; rank 1 "),
        ("barrier", "ddp", False, r"at different places: rank 0 in barrier \(BARRIER\); rank 1 in reducing gradients"),
        (
            "barrier",
            "fsdp",
            True,
            r"do not match: rank 0 waits in barrier #\d+, BARRIER .*; rank 1 waits in all_gather",
        ),
        ("shape", "ddp", False, r"rank 0 .*float32 \(2,\) SUM, SHAPE .*; rank 1 .*float32 \(1002,\) SUM, SHAPE"),
        ("stopped", "ddp", True, r"rank 1 is stopped, STOPPED \(SIGSTOP\), and rank 0 waits in reducing gradients"),
        ("caught", "ddp", True, r"rank 1 on \S+ failed first, at CAUGHT: KeyError: 'no such label'"),
        ("raise", "ddp", False, r"rank 1 on \S+ failed first, at RAISE: ValueError: no such label"),
        ("left", "fsdp", False, r"rank 1 on \S+ failed first, at LEFT: sys.exit\(0\) in the middle of the run"),
        ("gone", "ddp", True, r"rank 0 on \S+ failed first, at GONE: sys.exit\(0\) in the middle of the run"),
    ],
)
def test_both_screens_end_with_the_first_cause(
    tmp_path: Path, what: str, strategy: str, hosts: bool, says: str
) -> None:
    run = Run(tmp_path, what, strategy, hosts)
    place = re.escape(marked(SCRIPT, rf"{what}\b"))
    for lines in run.lines:
        assert re.search(says.replace(what.upper(), place), lines[-1]), "\n".join(lines)
    assert 0 not in run.codes
    assert what != "raise" or not any("closed by peer" in line for line in run.lines[0])


@pytest.mark.slow
@pytest.mark.parametrize(("what", "most"), [("all leave", 10), ("one leaves at the end", 14)])
def test_nodes_whose_ranks_leave_where_nobody_misses_them_end_well(tmp_path: Path, what: str, most: float) -> None:
    run = Run(tmp_path, what, "ddp", True)
    assert run.codes == [0, 0], run.lines
    assert not [line for lines in run.lines for line in lines if "failed" in line]
    assert run.seconds < at_most(most)
