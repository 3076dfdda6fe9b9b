"""Ctrl-C, heard once by every rank."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any

import pytest

from lockstep.supervise import stack, status
from lockstep.supervise.signals import PASS, SignalPipe, accept_ctrl_c, ending_at_once, interruptible, pass_on


class Loop:
    def __init__(self) -> None:
        self.asked = self.ended = 0

    def ask(self) -> None:
        self.asked += 1

    def end(self) -> None:
        self.ended += 1


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_asks_and_the_second_raises() -> None:
    loop, before = Loop(), signal.getsignal(signal.SIGINT)

    def run() -> None:
        with interruptible(loop.ask, loop.end):
            press()
            assert (loop.asked, loop.ended) == (1, 0)
            press()

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (loop.asked, loop.ended) == (1, 1)
    assert signal.getsignal(signal.SIGINT) is before


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_the_script_has_set_is_called_first() -> None:
    """It was replaced, without a word: what it would have saved was not."""
    heard: list[str] = []
    with handled_by(lambda number, frame: heard.append("the script's")):
        users = signal.getsignal(signal.SIGINT)
        with interruptible(lambda: heard.append("the loop's"), lambda: None):
            with interruptible(lambda: heard.append("an inner loop's"), lambda: None):  # an evaluation in a hook
                press()
            press()
        assert signal.getsignal(signal.SIGINT) is users
    assert heard == ["an inner loop's", "the script's", "the loop's"]


def test_a_handler_that_the_script_sets_meanwhile_stays() -> None:
    def later(number: int, frame: object) -> None: ...

    with handled_by(signal.default_int_handler):
        with interruptible(lambda: None, lambda: None):
            signal.signal(signal.SIGINT, later)
        assert signal.getsignal(signal.SIGINT) is later


def test_one_that_a_shell_has_a_process_in_the_background_ignore_stays_ignored() -> None:
    """A fit that a shell's script had started by `&` ended at the Ctrl-C that was for what ran in the foreground."""
    loop = Loop()
    with handled_by(signal.SIG_IGN):
        with interruptible(loop.ask, loop.end):
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert loop.asked == 0


@pytest.mark.skipif(PASS is None, reason="needs signals of Linux")
def test_one_that_comes_twice_over_is_one() -> None:
    """A terminal tells the ranks too: what their parent passed on counted as a second Ctrl-C, and ended them."""
    loop = Loop()
    with interruptible(loop.ask, loop.end):
        pass_on(os.getpid())
        press()
        pass_on(os.getpid())
        assert loop.ended == 0
        assert loop.asked == 3  # the loop itself knows that it was asked before


@pytest.mark.skipif(PASS is None, reason="needs signals of Linux")
def test_one_that_is_passed_on_between_calls_has_no_effect() -> None:
    assert PASS is not None
    before = signal.getsignal(PASS)
    try:
        accept_ctrl_c()
        pass_on(os.getpid())
    finally:
        signal.signal(PASS, before)


def press_in_worker() -> None:
    press()
    os._exit(7)


def test_a_loader_worker_takes_no_notice() -> None:
    """A terminal's Ctrl-C ended the workers, and the run failed for want of them before it came to its boundary."""
    loop = Loop()
    with interruptible(loop.ask, loop.end):
        worker = get_context("fork").Process(target=press_in_worker, daemon=True)
        worker.start()
        worker.join(20)
    assert (worker.exitcode, loop.asked) == (7, 0)


def test_the_ear_hears_what_the_main_thread_cannot_handle() -> None:
    loop, ear, heard = Loop(), SignalPipe(), []

    def listen() -> None:
        press()
        while not heard or not heard[-1]:
            heard.append(ear.presses())

    listener = threading.Thread(target=listen)
    try:
        with interruptible(loop.ask, loop.end), ear.listening():
            listener.start()
            listener.join(20)
            assert ear.presses() == 0
        with interruptible(lambda: None, lambda: None):
            press()
        assert ear.presses() == 0  # after listening, nothing is heard
    finally:
        ear.close()
    assert heard[-1] == 1


def test_an_ear_leaves_another_listener_alone() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    ear, before = SignalPipe(), signal.set_wakeup_fd(write)
    try:
        with ear.listening():
            assert signal.set_wakeup_fd(write) == write
    finally:
        signal.set_wakeup_fd(before)
        ear.close()
        os.close(read)
        os.close(write)


def test_an_interrupt_does_not_tell_of_others_that_were_interrupted_a_moment_earlier() -> None:
    """Their connections are closed then, and Python prints what was being handled when the interrupt came."""
    made: dict[str, Any] = {}
    lost = "def recv():\n    raise RuntimeError('Connection closed by peer')\n"
    exec(compile(lost, f"{stack.TORCH}distributed/distributed_c10d.py", "exec"), made)

    def interrupted(first: Callable[[], object]) -> KeyboardInterrupt:
        try:
            try:
                first()
            finally:
                raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            status._drop_lost(error)
            return error

    assert interrupted(made["recv"]).__context__ is None
    assert isinstance(interrupted(lambda: 1 / 0).__context__, ZeroDivisionError)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rank_at_once_that_waits_for_the_others(number: int) -> None:
    """No handler of Python's runs there: a rank whose peer had died of the same signal waited for minutes."""

    def wait() -> None:
        signal.signal(number, lambda *heard: None)
        with ending_at_once():
            os.kill(os.getpid(), number)
        os._exit(7)

    process = get_context("fork").Process(target=wait)
    process.start()
    process.join(20)
    assert process.exitcode == -number


def test_a_signal_that_is_ignored_stays_so_while_ranks_meet() -> None:
    with handled_by(signal.SIG_IGN), ending_at_once():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
