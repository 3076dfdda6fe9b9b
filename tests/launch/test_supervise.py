"""The supervisor of a node: it tells who failed first whoever dies, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cluster.world import World
from lockstep.ground.errors import RankFailed
from lockstep.launch.environment import free_port
from lockstep.launch.processes import Ended, Foreign, is_stopped
from lockstep.supervise import client, status
from lockstep.supervise.causes import Cause, early_cause, final_cause, judgement
from lockstep.supervise.channel import listen_at
from lockstep.supervise.mailbox import Mailbox, leave_note
from lockstep.supervise.screen_text import shortened
from lockstep.supervise.signals import SignalPipe
from lockstep.supervise.snapshot import RankPosition
from tests.launch.sessions import members, started

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and signals of Linux")

# Ranks that do not even join a group: rank ``WHO`` does ``WHAT``, the others sleep.
SCRIPT = """
import os, signal, sys, time
from lockstep.cluster.detect import detect
from lockstep.launch.script import ScriptLauncher

what, who = sys.argv[1], int(sys.argv[2])
if what == "starts" and os.environ.get("LOCAL_RANK") == str(who):
    time.sleep(100)
if what == "early" and os.environ.get("LOCAL_RANK") == str(who):
    raise KeyError("before its Trainer")
placement = detect(os.environ, 2)
launcher = ScriptLauncher(placement.world, placement.launched)

def train():
    if what == "starts": signal.signal(signal.SIGINT, lambda *heard: None)
    os.write(1, f"trains {launcher.world.rank} {os.getpid()} {os.getppid()}\\n".encode())
    if launcher.world.rank == who:
        time.sleep(float(sys.argv[3]))
        if what == "exit": os._exit(5)
        if what == "leave": return
    time.sleep(100)

launcher.launch(train)
"""


class Run:
    """The script in a session of its own, and what is left of it in the end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pids: dict[int, int] = {}
        self.parents: dict[int, int] = {}

    def wait_for(self, ranks: int) -> None:
        """Until so many ranks train."""
        assert self.process.stdout is not None
        while len(self.pids) < ranks:
            words = self.process.stdout.readline().split()
            assert words, "the script ended"
            self.pids[int(words[1])], self.parents[int(words[1])] = int(words[2]), int(words[3])

    def end(self) -> tuple[int, list[str]]:
        """Exit code, and what is on the screen."""
        _, errors = self.process.communicate(timeout=60)  # which waits for all that could still write
        return self.process.returncode, errors.splitlines()

    def left(self) -> list[int]:
        """Processes of the session that still run."""
        return members(self.process.pid)

    def is_left(self, seconds: float = 10) -> bool:
        """Whether anything is, after some seconds."""
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(0.05)
        return bool(self.left())


@contextlib.contextmanager
def running(folder: Path, *words: str, session: bool = True) -> Iterator[Run]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with started(folder, sys.executable, str(script), *words, session=session, MASTER_ADDR="127.0.0.1") as process:
        run = Run(process)
        try:
            yield run
        finally:
            for pid in {*run.left(), *run.pids.values(), process.pid}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@LINUX
def test_rank_zero_is_killed_and_its_name_is_on_the_screen(tmp_path: Path) -> None:
    """It watched the others itself, so that nobody told when it was the one to die."""
    with running(tmp_path, "sleep", "0", "0") as run:
        run.wait_for(2)
        assert run.parents[1] not in (run.pids[0], os.getpid())  # a process that is no rank
        os.kill(run.pids[0], signal.SIGKILL)
        code, errors = run.end()
        assert code == -signal.SIGKILL
        assert re.fullmatch(r"lockstep: rank 0 \(process \d+\) was killed by SIGKILL \(exit code -9\)", errors[-1])
        assert not run.is_left()


@LINUX
@pytest.mark.slow
def test_nothing_outlives_rank_zero_that_was_killed_while_it_waited_for_the_others(tmp_path: Path) -> None:
    """Its last word had been said, so that its end was no news: a rank that waited for what never came stayed."""
    with running(tmp_path, "leave", "0", "0") as run:
        run.wait_for(2)
        time.sleep(1.5)
        assert run.process.poll() is None
        os.kill(run.pids[0], signal.SIGKILL)
        assert not run.is_left()


@LINUX
@pytest.mark.slow  # every day without processes: tests/launch/test_monitor.py
def test_ctrl_c_ends_rank_zero_that_waits_for_one_that_is_still_starting(tmp_path: Path) -> None:
    """Rank 1 died in its imports, and rank 0 waited for it in the rendezvous; a second Ctrl-C had no effect."""
    with running(tmp_path, "starts", "1", "0") as run:
        run.wait_for(1)
        os.killpg(run.process.pid, signal.SIGINT)
        code, errors = run.end()
        assert (code, errors[-1]) == (130, "lockstep: interrupted by Ctrl-C")
        assert not run.is_left()


@LINUX
@pytest.mark.slow
def test_nothing_outlives_the_supervisor(tmp_path: Path) -> None:
    with running(tmp_path, "sleep", "0", "0") as run:
        run.wait_for(2)
        os.kill(run.parents[1], signal.SIGKILL)
        code, errors = run.end()
        assert code == 1
        assert errors[-1].endswith("was killed by signal 9, so all ranks were ended")
        assert not run.is_left()


@LINUX
@pytest.mark.slow
def test_an_error_before_the_first_trainer_is_told_with_its_line(tmp_path: Path) -> None:
    with running(tmp_path, "early", "1", "0") as run:
        code, errors = run.end()
        assert code == 1
        assert errors[-1] == f"lockstep: rank 1 failed first, at {tmp_path}/train.py:10: KeyError: 'before its Trainer'"
        assert not run.is_left()


@LINUX
@pytest.mark.slow
def test_ctrl_z_stops_all_and_is_no_failure(tmp_path: Path) -> None:
    with running(tmp_path, "exit", "1", "8", session=False) as run:  # in a session of its own nobody could go on
        run.wait_for(2)
        os.killpg(run.process.pid, signal.SIGTSTP)  # the terminal's group: rank 0 and the supervisor
        until = time.monotonic() + 10
        while not all(map(is_stopped, run.pids.values())) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(map(is_stopped, run.pids.values()))
        time.sleep(3)
        os.killpg(run.process.pid, signal.SIGCONT)
        code, errors = run.end()
        assert (code, len(errors)) == (5, 1)


def test_it_starts_without_torch() -> None:
    """It has to be there before the ranks are, and each node has one."""
    order = {
        "prefixes": [sys.prefix, sys.exec_prefix],
        "paths": sys.path,
        "folder": os.path.dirname(os.path.dirname(client.__file__)),
        "descriptors": [],
    }
    boot = client._BOOT.replace("main(*", "print(sorted({'torch', 'numpy', 'asyncio'} & sys.modules.keys()), *")
    words = [sys.executable, "-I", "-S", "-c", boot, json.dumps(order)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


# -- the judgement -----------------------------------------------------------------------------------------


def note(rank: int, lost: bool = False, at: float = 1.0) -> Cause:
    return Cause(rank, at, "ValueError: no", "train.py:3", f"trace of {rank}\n", 1, lost, "barrier")


def inside(rank: int) -> RankPosition:
    return RankPosition(rank, 0.0, 1, True, "train.py:9")


def test_what_is_certain_and_what_is_not() -> None:
    positions = {0: inside(0), 1: inside(1)}
    dead = Ended(0, 100, 1, 2.0)
    assert early_cause([dead], [note(0, lost=True)], positions) is None  # another one knows why
    assert early_cause([dead], [note(0, lost=True), note(1)], positions) == note(1)
    assert early_cause([dead], [], positions) == dead
    assert early_cause([], [note(1)], {}, exiting=[1]) == note(1)


def test_a_traceback_is_shown_once() -> None:
    ended = Ended(1, 100, 1, 2.0)
    cause, told = final_cause([ended], [note(1)], {}, {}, printing=[])
    assert (cause, told) == (note(1), True)
    # a rank that was ended after it had printed
    cause, told = final_cause([Ended(0, 100, 1, 2.0)], [note(0, lost=True), note(1)], {}, {}, printing=[1])
    assert (cause, told) == (note(1), True)
    last = "lockstep: rank 1 failed first, at train.py:3: ValueError: no"
    assert judgement(cause, True, False, [1]).text == last
    assert judgement(cause, False, False, [1]).text == f"trace of 1\n{last}"


@LINUX
def test_a_supervisor_that_starts_hears_signals_once_it_can_heed_them() -> None:
    """A Ctrl-C in its first tenth of a second ended it, and the run with the words of a failure."""
    here, there = socket.socketpair()
    mailbox, pipe = Mailbox(), SignalPipe()
    try:
        process = client._start(there, mailbox, pipe)
        there.close()
        process.send_signal(signal.SIGINT)
        here.close()  # it has no order, and ends
        assert process.wait(60) == 0
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    finally:
        mailbox.close()
        pipe.close()


@LINUX
def test_a_supervisor_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had the name first handed out a mailbox of its own."""
    world = World(1, 2, 1, 2, 0, 1, "127.0.0.1", free_port())
    monkeypatch.setattr(client, "peer_process", lambda connection: 0)
    entrance = listen_at(client.socket_name(world))
    assert entrance is not None
    found = client.FoundSupervisor(world)
    status.at_exit.remove(found._finish)
    found._search.join(20)
    entrance.close()
    assert (found.address, found._search.is_alive()) == ("", False)


@pytest.mark.parametrize(("codes", "code"), [([-9], 1), ([None], 1), ([7, -9], 7), ([], 1)])
def test_the_exit_code_is_never_zero(codes: list[int | None], code: int) -> None:
    assert judgement(note(1), True, False, codes).code == code


# -- the others --------------------------------------------------------------------------------------------


@pytest.fixture
def notes() -> Iterator[Mailbox]:
    """For a rank's calls in this process, which has none afterwards."""
    made = Mailbox()
    yield made
    status.record_call(0, "").__enter__()
    made.close()


def test_a_rank_that_lost_another_is_told_why(notes: Mailbox) -> None:
    """It said "Connection closed by peer", which is no reason."""
    notes.leave({"first": "rank 1 (process 7) was killed by SIGKILL", "rank": 1})
    with pytest.raises(
        RankFailed, match=r"rank 1 .* was killed by SIGKILL \(this is rank 0, which lost its connection in"
    ) as raised:
        with status.record_call(0, notes.address):
            lose()
    assert raised.value.rank == 1
    assert isinstance(raised.value, RuntimeError)
    assert "closed by peer" in str(raised.value.__cause__)


def test_errors_of_its_own_stay(notes: Mailbox) -> None:
    notes.leave({"first": "rank 1 failed", "rank": 1})
    with pytest.raises(RuntimeError, match="mine"), status.record_call(0, notes.address):
        raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("first", "said"), [([{"first": "rank 1 failed", "rank": 1}], ""), ([], "lost the connection to other ranks")]
)
def test_the_line_with_the_first_cause_stays_the_last(
    first: list[dict[str, object]],
    said: str,
    notes: Mailbox,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Under torchrun, where the supervisor speaks at once, a line about the lost connection came after it."""
    monkeypatch.setattr(status, "CAUSE_TIMEOUT", 0.05)
    for note in first:
        notes.leave(note)
    with pytest.raises(RuntimeError) as raised, status.record_call(0, notes.address):
        lose()
    sys.excepthook(type(raised.value), raised.value, None)
    error = capsys.readouterr().err
    assert said in error
    assert bool(said) == bool(error)


def test_a_run_whose_ranks_went_different_ways_is_given_up(notes: Mailbox) -> None:
    """A rank that was stopped, and went on to tell where it was, trained on and said last how its fit had ended."""
    with status.record_call(0, notes.address):
        notes.leave({"first": "rank 1 failed", "rank": 1})
        assert not status.is_ending()
        notes.leave({"first": "rank 1 is stopped", "rank": -1})
        assert status.is_ending()
    status.record_call(0, "").__enter__()
    assert not status.is_ending()


def lose() -> None:
    """What a collective does whose peer is gone: an error from a file of lockstep's that waits."""
    from lockstep.ground import comm

    code = compile("def barrier():\n    raise RuntimeError('Connection closed by peer')", comm.__file__, "exec")
    space: dict[str, object] = {}
    exec(code, space)
    space["barrier"]()  # type: ignore[operator]


# -- small parts -------------------------------------------------------------------------------------------


def test_a_long_traceback_keeps_the_users_lines() -> None:
    """One ValueError filled the screen with the frames of the loops."""
    from torch.utils.data import DataLoader

    class Data:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise KeyError("no such column")

    def read(depth: int) -> None:
        if depth:
            read(depth - 1)
        list(DataLoader(Data()))  # type: ignore[arg-type]

    with pytest.raises(KeyError) as long:
        read(6)
    text = shortened(long.value)
    assert 'raise KeyError("no such column")' in text
    assert "calls in lockstep, torch and Python" in text
    assert "dataloader.py" not in text
    with pytest.raises(ValueError, match="short") as raised:
        raise ValueError("short")
    assert "calls in lockstep" not in shortened(raised.value)


@LINUX
def test_the_end_of_another_ones_child_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read(); raise SystemExit(3)"],
                          stdin=subprocess.PIPE) as process:  # fmt: skip
        foreign = Foreign(process.pid)
        assert not foreign.wait(0)
        process.communicate(timeout=30)
        assert foreign.wait(10)
        foreign.close()
    said = Foreign(process.pid, lambda: 4)  # it is gone, and forgotten
    assert said.wait(5)
    assert said.end() == 4


def test_no_note_is_lost_where_ranks_leave_them_at_once() -> None:
    """A file in memory has no guard for the position that processes share: notes of the same moment took one place."""
    mailbox, ranks, notes = Mailbox(), 6, 300
    try:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                for number in range(notes):
                    leave_note(mailbox.address, {"told": rank, "number": number})
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        mailbox.read()
        found = [(note["told"], note["number"]) for note in mailbox.others("told")]
    finally:
        mailbox.close()
    assert sorted(found) == [(rank, number) for rank in range(ranks) for number in range(notes)]
