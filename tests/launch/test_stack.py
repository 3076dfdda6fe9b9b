"""Where a rank is, read off a stack."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.ground.rank import does, marks_in, waits
from lockstep.supervise import stack_request as sample
from lockstep.supervise.screen_text import reason_of
from lockstep.supervise.stack import _TORCH_WAITS, LOCKSTEP, PACKAGES, TORCH, Frame, Stack, stack_of
from lockstep.testing import BoringModel
from tests.tools.fresh import python

C10D = Frame(f"{TORCH}distributed/distributed_c10d.py", 9, "all_reduce")
STOP = Frame(f"{LOCKSTEP}loop/session.py", 8, "agree_on_ending")
USERS = Frame("/home/me/train.py", 3, "main")


def test_the_line_of_the_user_is_named_not_that_of_a_library() -> None:
    with pytest.raises(RuntimeError) as caught:
        BoringModel()(torch.zeros(3))
    first = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    assert stack_of(caught.value).location() == f"{__file__}:{first}"


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise ValueError("no such label")


def test_an_exception_in_a_loader_worker_is_placed_in_the_worker() -> None:
    """It was placed in torch's `reraise`, and its reason was the worker's whole traceback."""
    found = ("", "")
    batches = iter(DataLoader(Broken(), num_workers=1))
    try:
        next(batches)
    except ValueError as error:
        found = (stack_of(error).location(), reason_of(error))
    batches._shutdown_workers()  # type: ignore[attr-defined]
    line = inspect.getsourcelines(Broken.__getitem__)[1] + 1
    assert found == (f"{__file__}:{line}", "ValueError: no such label (in a loader worker)")


MODEL = Frame(f"{PACKAGES[0]}mine/model.py", 7, "training_step")
CLI = Frame(f"{PACKAGES[0]}mine/cli.py", 20, "main")
COMMAND = Frame(f"{sys.prefix}/bin/mine", 8, "<module>")
NUMPY = Frame(f"{PACKAGES[0]}numpy/linalg.py", 5, "solve")


@pytest.mark.parametrize(
    ("frames", "location"),
    [
        ((NUMPY, MODEL, STOP, CLI, COMMAND), MODEL),  # the command was named: mine:8, whatever had failed
        ((STOP, CLI, COMMAND), CLI),
        ((NUMPY, STOP, CLI, USERS), USERS),  # somebody else's package, which a script of the user's has called
        ((NUMPY, COMMAND), NUMPY),
    ],
)
def test_the_line_of_a_project_that_is_installed_is_named(frames: tuple[Frame, ...], location: Frame) -> None:
    assert Stack(frames).location() == str(location)


@pytest.mark.parametrize(
    ("frames", "waits", "doing"),
    [
        ((C10D, STOP, USERS), True, "agreeing on a stop"),
        ((C10D, USERS), True, "all_reduce"),
        ((USERS, C10D, STOP), False, ""),  # a hook of the user's, called by lockstep
        ((STOP, USERS), False, "agreeing on a stop"),
        ((), False, ""),
    ],
)
def test_what_a_rank_does_and_whether_it_waits(frames: tuple[Frame, ...], waits: bool, doing: str) -> None:
    assert (Stack(frames).waits, Stack(frames).doing) == (waits, doing)


def test_marks_are_read_from_where_functions_are_written() -> None:
    """They were named far away: one moved to another file, and ranks that compared loaders were said to gather."""
    known = {path: marks_in(str(path)) for path in Path(LOCKSTEP).rglob("*.py")}
    words = {mark.words for marks in known.values() for mark in marks.values()}
    assert {"saving a checkpoint", "comparing the loaders of the ranks", "reducing gradients in backward"} <= words
    written = sum(path.read_text().count("@does(") + path.read_text().count("@waits(") for path in known)
    assert sum(map(len, known.values())) <= written
    assert known[Path(LOCKSTEP, "engines/ddp/reducer.py")]["finish"].waits
    assert marks_in("no such file") == {}
    assert does("words")(os.stat) is waits()(os.stat) is os.stat  # no frame and no time


def test_torchs_functions_that_wait_are_where_they_are_said_to_be() -> None:
    for end, function in _TORCH_WAITS:
        assert f"def {function}" in Path(TORCH, end).read_text()


# -- asked for from outside


WITHOUT_TORCH = """
import sys, types
package = types.ModuleType("lockstep"); package.__path__ = [sys.argv[1]]; sys.modules["lockstep"] = package
"""
"""What a script begins with that uses modules which need no torch: its import takes seconds."""

WAITS = """
import threading
from lockstep.supervise import stack_request as sample
print(sample.offer(), flush=True)
lock = threading.Lock(); lock.acquire()
def waits(): lock.acquire()
waits()
"""


def script(text: str) -> list[str]:
    return [sys.executable, "-c", WITHOUT_TORCH + text, LOCKSTEP]


@pytest.mark.skipif(sample.ASK is None, reason="needs signals of Linux")
def test_a_question_at_the_end_of_a_process_does_not_kill_it() -> None:
    """On a loaded machine a rank that had ended well was asked once more: "rank 1 was killed by signal 43"."""
    asked = (
        "import faulthandler, os\n"
        "from lockstep.supervise import stack_request\n"
        "assert stack_request.offer()\n"
        "faulthandler.unregister(stack_request.ASK)  # as Python does it at its end\n"
        "os.kill(os.getpid(), stack_request.ASK)\n"
    )
    assert subprocess.run([sys.executable, "-c", asked], timeout=60).returncode == 0


@pytest.mark.skipif(sample.ASK is None, reason="needs signals of Linux")
def test_a_process_that_runs_no_python_answers() -> None:
    with subprocess.Popen(script(WAITS), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            answers = process.stdout.readline().strip()
            time.sleep(0.2)
            for _ in range(2):
                stack = sample.ask(process.pid, answers)
                assert stack is not None
                assert [frame.function for frame in stack.frames] == ["waits", "<module>"]
        finally:
            process.kill()
    assert sample.ask(process.pid, answers) is None  # it is gone


SLEEPS = """
import ctypes, time
from lockstep.supervise import stack_request as sample
print(sample.offer(), flush=True)
sample.set_phase_source(lambda: ("training_step", 1204))
def sleeps(library):
    began = time.monotonic()
    left = library.sleep(1)
    print(left, time.monotonic() - began >= 0.9, flush=True)
sleeps(ctypes.{library}(None))
"""


@pytest.mark.skipif(sample.ASK is None, reason="needs signals of Linux")
@pytest.mark.parametrize(
    ("library", "said", "batch"), [("CDLL", "0 True", ("training_step", 1204)), ("PyDLL", "", ("", -1))]
)
def test_a_look_does_not_cut_a_sleep_in_c_short(library: str, said: str, batch: tuple[str, int]) -> None:
    """A signal asked, and sleep() returned early. It still asks where the interpreter's lock is held meanwhile; the
    batch is then not told."""
    with subprocess.Popen(script(SLEEPS.format(library=library)), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answers = process.stdout.readline().strip()
        time.sleep(0.3)
        stack = sample.ask(process.pid, answers)
        assert stack is not None
        assert [frame.function for frame in stack.frames] == ["sleeps", "<module>"]
        assert (stack.phase, stack.batch) == batch
        assert process.stdout.read().strip().startswith(said)
    assert process.returncode == 0


@pytest.mark.skipif(sample.ASK is None, reason="needs signals of Linux")
def test_stacks_can_be_asked_for_where_no_folder_takes_temporary_files() -> None:
    """A fit on ranks ended at its start with tempfile's error, in a container that is read-only, or on a full disk."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "from lockstep.supervise import stack_request; print(stack_request.offer() != '')"
    )
    assert python("-c", code).stdout == "True\n"
