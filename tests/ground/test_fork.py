"""Forks beside torch's threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest

from lockstep.ground import fork_and_exit, installed
from tests.loop.pieces import Slope, numbers, on_ranks
from tests.tools.pool import RankPool

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
_PR_SET_NAME = 15


class Busy(threading.Thread):
    """A thread with a name of the system's that computes for a while, without the interpreter."""

    def __init__(self, name: bytes, seconds: float) -> None:
        super().__init__(daemon=True)
        self.system_name, self.seconds = name, seconds
        self.started, self.ended = threading.Event(), 0.0

    def run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, self.system_name, 0, 0, 0)
        block, until = bytes(1 << 22), time.monotonic() + self.seconds
        while time.monotonic() < until:
            hashlib.sha256(block)  # lets go of the interpreter
            self.started.set()
        self.ended = time.monotonic()


@linux
def test_a_fork_waits_for_a_thread_of_torchs_that_runs() -> None:
    """A child that was forked while such a thread held the lock of thread states never began: its rank waited too."""
    busy = Busy(b"pt_gloo_runloop", 0.3)
    busy.start()
    busy.started.wait(10)
    fork_and_exit.wait_for_torch_threads()
    waited_until = time.monotonic()
    busy.join(10)
    assert waited_until >= busy.ended - 0.05  # what it still does at its end is Python's own


@linux
def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_and_exit, "PATIENCE", 0.05)
    busy = Busy(b"pt_gloo_runloop", 0.8)
    busy.start()
    busy.started.wait(10)
    fork_and_exit.wait_for_torch_threads()
    assert busy.ended == 0.0
    busy.join(10)


def forks_wait() -> bool:
    on_ranks(max_epochs=1, limit_train_batches=1).fit(Slope(), numbers(2))
    return installed.FORK_THREADS.is_installed


@linux
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="CPython 3.12 makes the lock anew in time")
def test_ranks_are_protected(ranks: RankPool) -> None:
    assert ranks(2).run(forks_wait, timeout=40) == [True, True]


BESIDE_GARBAGE = """
import gc, os, runpy, sys

class Group:  # in the place of a process group, whose threads a child does not have
    def __init__(self):
        self.me, self.owner = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.owner:
            os._exit(3)

def others():  # what some other package does first in a child
    return [[] for _ in range(100_000)]

os.register_at_fork(after_in_child=others)
if sys.argv[2:]:
    runpy.run_path(sys.argv[2])["protect_forks"]()
collects = gc.isenabled()
Group()
child = os.fork()
if child == 0:
    if sys.argv[1] == "collected":
        gc.collect()
    os._exit(0 if gc.isenabled() else 5)
assert gc.isenabled() == collects
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("how", ["collected", "by itself"])
def test_a_child_leaves_its_parents_garbage_alone(how: str) -> None:
    """A loader's worker whose collector came upon a destroyed process group hung, or died of a segmentation fault; one
    in which it came upon memory that was pinned for a GPU, before lockstep had its say in the child, was aborted."""
    command = [sys.executable, "-c", BESIDE_GARBAGE, how]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "3\n"
    assert subprocess.run([*command, str(fork_and_exit.__file__)], capture_output=True, text=True).stdout == "0\n"


ENDS = """
import ctypes, hashlib, os, sys, threading, time, types
package = types.ModuleType("lockstep"); package.__path__ = [sys.argv[1]]; sys.modules["lockstep"] = package
from lockstep.ground.fork_and_exit import settle_at_exit

begun = threading.Event()

def run():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
    block, until = bytes(1 << 22), time.monotonic() + 1.5
    while time.monotonic() < until:
        hashlib.sha256(block)  # lets go of the interpreter, and wants it back
        begun.set()
    os.write(1, b"let go")
    time.sleep(60)

settle_at_exit()
threading.Thread(target=run, daemon=True).start()
begun.wait(10)
"""


@linux
def test_a_process_does_not_end_while_a_thread_of_torchs_still_wants_the_interpreter() -> None:
    """A gloo group's thread that asks for the interpreter while it shuts down aborts the process: "terminate called
    without an active exception" after a script's last step. Python's own threads just end there. A busy machine can
    keep the thread from it for seconds."""
    package = os.path.dirname(os.path.dirname(str(fork_and_exit.__file__)))  # by itself: nothing here needs torch
    ended = subprocess.run([sys.executable, "-c", ENDS, package], capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"let go"
