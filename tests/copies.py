"""Shares out the files of tests among copies of the process that has collected them: ``pytest --copies 4``.

Workers that start anew each import torch and 350 files of tests. Copies are forked when that is done, and share what is
in memory. A file is run by one copy, so that the fixtures of a module are made once.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.tools.pool import RankPool

NURSERY = pytest.StashKey[socket.socket]()
"""In a copy's configuration: what forks the ranks of its pool (`RankPool.nursery`)."""

Files = list[list[pytest.Item]]
"""The tests of each file."""

STOP = -1
"""What a copy is told in place of a file's number."""
PATIENCE = 60.0
"""Seconds that copies have to clear up when a run ends early."""


TOGETHER = {
    "slurm": "a machine has one such cluster",
    "accelerator": "they share ranks that have the made-up device",
    "guards": "they share the parsed package",
}
"""Folders whose tests one copy runs, and why."""
WITH = {"test_installed.py": "guards", "test_docs.py": "guards"}
"""Files of other folders that belong to them."""


def by_file(items: Iterable[pytest.Item]) -> Files:
    """The tests of each file, or of all files that stay together."""
    found: dict[Path | str, list[pytest.Item]] = {}
    for item in items:
        folder = WITH.get(item.path.name, item.path.parent.name)
        found.setdefault(folder if folder in TOGETHER else item.path, []).append(item)
    return list(found.values())


# -- what a copy does ----------------------------------------------------------------------------------------


class Reporter:
    """Sends what a copy has to tell to the process that shows it, in the place of pytest's own reporter."""

    def __init__(self, pipe: Connection, replaced: Any) -> None:
        self.pipe, self.config = pipe, replaced.config
        self._tw = replaced._tw  # where a time limit shows the stacks of its test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        said: Any = (warning_message.message, warning_message.category)
        try:
            pickle.loads(pickle.dumps(said))
        except Exception:  # a class that a test has made
            said = (Warning(str(warning_message.message)), Warning)
        where = (warning_message.filename, warning_message.lineno)
        self.pipe.send(("warning", (*said, *where), when, nodeid, location))


def begin(session: pytest.Session, pipe: Connection, name: str) -> None:
    """Part with what a copy cannot share with the others: captured output, the reporter, the folder of ``tmp_path``."""
    config = session.config
    config.workerinput = {"workerid": name}  # so pytest keeps no list of failed tests here
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()
        capture.start_global_capturing()
    replaced = config.pluginmanager.unregister(name="terminalreporter")
    if config.pluginmanager.has_plugin("terminalprogress"):
        config.pluginmanager.unregister(name="terminalprogress")
    config.pluginmanager.register(Reporter(pipe, replaced), "terminalreporter")
    folders = config._tmp_path_factory
    folders._basetemp = folders.getbasetemp() / name
    folders._basetemp.mkdir(mode=0o700)


def play(session: pytest.Session, pipe: Connection, files: Files, items: list[pytest.Item]) -> None:
    """Run these tests, and then file after file, until there is none."""
    while items:
        following: list[pytest.Item] = []
        for here, item in enumerate(items, 1):
            if here == len(items):  # the next file's first test says which fixtures stay
                pipe.send(("ask",))
                number = pipe.recv()
                following = [] if number == STOP else files[number]
            after = (items[here:] or following or [None])[0]
            pipe.send(("begin",))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            pipe.send(("end",))
            if pipe.poll():  # nothing was asked for: told to stop
                return
        items = following


# -- what shares out -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Copy:
    """A copy of this process, and the tests that it has to run yet."""

    process: int
    pipe: Connection
    left: deque[pytest.Item] = field(default_factory=deque)
    running: bool = False


class Copies:
    """Runs the tests of a session on copies of its process.

    Args:
        session: has collected them.
        number: of copies.
        files: in the order in which they are begun.
        pool: gives each copy a nursery for ranks; None where no test needs one.
    """

    def __init__(self, session: pytest.Session, number: int, files: Files, pool: RankPool | None) -> None:
        self.session, self.config = session, session.config
        self.number, self.files, self.pool = number, files, pool
        self.waiting = deque(range(len(files)))
        self.copies: dict[Connection, Copy] = {}
        self.born = 0

    def run(self) -> None:
        """Until all tests have run, or the session is to end."""
        try:
            while len(self.copies) < self.number and self.waiting:
                self.start(self.files[self.waiting.popleft()])
            while self.copies:
                for pipe in wait(list(self.copies)):
                    self.hear(self.copies[pipe])
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            self.end()

    def start(self, items: list[pytest.Item]) -> None:
        """Fork a copy that begins with these tests."""
        self.config._tmp_path_factory.getbasetemp()  # made once, here
        nursery = None if self.pool is None else self.pool.nursery()
        mine, its = Pipe()
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            if capture.is_globally_capturing():
                capture.read_global_capture()  # what was captured before is not a copy's to show
            sys.stdout.flush()
            sys.stderr.flush()
            process = os.fork()
            if not process:
                mine.close()
                self._be_a_copy(its, items, nursery)
        self.born += 1
        its.close()
        if nursery is not None:
            nursery.close()
        self.copies[mine] = Copy(process, mine, deque(items))

    def _be_a_copy(self, pipe: Connection, items: list[pytest.Item], nursery: socket.socket | None) -> NoReturn:
        status = 1
        try:
            for other in self.copies:
                other.close()
            begin(self.session, pipe, f"copy{self.born}")
            if nursery is not None:
                self.config.stash[NURSERY] = nursery
            try:
                play(self.session, pipe, self.files, items)
            finally:
                self.session._setupstate.teardown_exact(None)
            status = 0
        except (BrokenPipeError, ConnectionResetError, EOFError):
            pass  # who has started it is gone
        except BaseException:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(("say", traceback.format_exc()))
        finally:
            os._exit(status)

    # -- what copies tell

    def hear(self, copy: Copy) -> None:
        """Take one message."""
        try:
            kind, *what = copy.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.gone(copy)
            return
        getattr(self, f"_{kind}")(copy, *what)

    def _ask(self, copy: Copy) -> None:
        number = self.waiting.popleft() if self.waiting else STOP
        if number != STOP:
            copy.left.extend(self.files[number])
        copy.pipe.send(number)

    def _begin(self, copy: Copy) -> None:
        copy.running = True

    def _end(self, copy: Copy) -> None:
        copy.running = False
        item = copy.left.popleft()
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _report(self, copy: Copy, data: dict[str, Any]) -> None:
        report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
        copy.left[0].ihook.pytest_runtest_logreport(report=report)

    def _warning(self, copy: Copy, said: tuple[Any, ...], when: str, nodeid: str, location: Any) -> None:
        about = {"when": when, "nodeid": nodeid, "location": location}
        self.config.hook.pytest_warning_recorded.call_historic(
            kwargs={"warning_message": warnings.WarningMessage(*said), **about}
        )

    def _say(self, copy: Copy, text: str) -> None:
        self.config.pluginmanager.getplugin("terminalreporter").write_line(text)

    def gone(self, copy: Copy) -> None:
        """A copy has ended: with its work done, or within a test, which has failed then; another does what is left."""
        del self.copies[copy.pipe]
        copy.pipe.close()
        status = os.waitstatus_to_exitcode(os.waitpid(copy.process, 0)[1])
        if not copy.left:
            return
        item = copy.left.popleft()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        said = f"the process that ran {item.nodeid} {how} {'in' if copy.running else 'before'} the test"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")
        item.ihook.pytest_runtest_logreport(report=report)
        if copy.left:
            self.start(list(copy.left))

    def end(self) -> None:
        """Have the copies that are still there clear up and end."""
        for pipe in self.copies:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(STOP)
        for pipe, copy in self.copies.items():
            with contextlib.suppress(EOFError, ConnectionResetError):
                while pipe.poll(PATIENCE):
                    pipe.recv()
                os.kill(copy.process, signal.SIGKILL)
            os.waitpid(copy.process, 0)
            pipe.close()
        self.copies.clear()
