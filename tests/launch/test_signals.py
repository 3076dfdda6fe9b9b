"""Signals that are noted and no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lockstep.supervise.signals import handling
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool


def test_a_signal_is_noted_and_ends_nothing() -> None:
    noted: list[int] = []
    with handling([signal.SIGUSR1, signal.SIGTERM], noted.append):
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert noted == [signal.SIGUSR1, signal.SIGTERM]
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_users_stay() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        with handling([signal.SIGUSR2], lambda number: pytest.fail("the user's handler was replaced")):
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert heard == [signal.SIGUSR2]


def test_a_handler_of_the_users_is_called_beside_the_note() -> None:
    """A script with a handler of SIGTERM of its own lost the graceful end."""
    heard: list[int] = []
    noted: list[int] = []
    users = lambda number, frame: heard.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, users)
    try:
        with handling([signal.SIGTERM], noted.append, shared=[signal.SIGTERM]):
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is users
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with handling([signal.SIGTERM], noted.append, shared=[signal.SIGTERM]):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == noted == [signal.SIGTERM]


def test_a_handler_that_gives_way_is_back_afterwards() -> None:
    """A trial of a search heeds signals outside of its fits, and a fit takes them over."""
    outer: list[int] = []
    inner: list[int] = []
    with handling([signal.SIGUSR1], outer.append, is_replaceable=True):
        with handling([signal.SIGUSR1], inner.append):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    with handling([signal.SIGUSR1], outer.append):
        with handling([signal.SIGUSR1], inner.append):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert (len(outer), len(inner)) == (2, 1)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_forked_processes_take_no_notice() -> None:
    """A loader worker is signalled with its rank, and the run could not come to its boundary without it."""
    noted: list[int] = []
    with handling([signal.SIGUSR1], noted.append):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(10 + len(noted))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 10


def test_what_is_not_heeded_does_what_the_system_does(ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "by_default.py"
    script.write_text("""
import os, signal
from lockstep.supervise.signals import handling, by_default
with handling([signal.SIGTERM], lambda number: print("noted", flush=True)):
    with by_default(signal.SIGTERM):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    with by_default(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
    print("not here")
""")
    (done,) = run_script(ranks, script, folder=tmp_path)
    assert (done.stdout, done.returncode) == ("noted\n", -signal.SIGTERM)
