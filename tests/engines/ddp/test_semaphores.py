"""Semaphores between processes: they count, order memory and wait; and who has ended is known, reaped or not."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from lockstep.engines.ddp.shared_memory import BYTES, Semaphores
from lockstep.ground.shared_pages import common_pages
from tests.tools.pool import RankPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def _alone() -> Semaphores:
    opened = Semaphores.open(None, 3)
    assert opened is not None
    return opened


def test_a_wait_sleeps_so_long_and_uses_no_processor() -> None:
    semaphores = _alone()
    begun, used = time.monotonic(), time.process_time()
    assert not semaphores.wait(semaphores[2], 0.3)
    assert 0.3 <= time.monotonic() - begun < 2
    assert time.process_time() - used < 0.1
    semaphores.close()


def _forked(run: Callable[[int, int], None]) -> tuple[int, int, int]:
    """A child that calls ``run`` with descriptors to write and read; its id, and our ends of the two."""
    (told, tell), (go, let_go) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(let_go)
        try:
            run(tell, go)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(go)
    return child, told, let_go


def _messages(count: int) -> int:
    """Plain writes of one rank that the other reads once it has taken: how many were not there yet."""
    pages = common_pages(None, 4096)
    semaphores = Semaphores.open(None, 2)
    assert pages is not None
    assert semaphores is not None
    cells = memoryview(pages.memory).cast("q")
    missing = 0
    for number in range(1, count):
        if dist.get_rank() == 0:
            cells[number % 512] = number
            semaphores.add(semaphores[0])
            while not semaphores.wait(semaphores[1]):
                pass
        else:
            while not semaphores.wait(semaphores[0]):
                pass
            missing += cells[number % 512] != number
            semaphores.add(semaphores[1])
    cells.release()
    semaphores.close()
    os.close(pages.handle)
    return missing


def test_who_has_taken_sees_what_was_written_before(ranks: RankPool) -> None:
    assert ranks(2).run(_messages, 3000) == [0, 0]


def test_a_process_that_ended_is_gone_even_if_nobody_has_reaped_it() -> None:
    """A process's id stays until its parent asks for it, and is another's in another container."""
    pages = common_pages(None, 3 * BYTES)
    assert pages is not None

    def other(tell: int, go: int) -> None:
        mine = Semaphores(pages, 1, 3)
        os.write(tell, b"x")
        os.read(go, 1)
        mine.add(mine[0])

    child, told, let_go = _forked(other)
    semaphores = Semaphores(pages, 0, 3)
    os.read(told, 1)
    assert not semaphores.is_gone(1)
    os.kill(child, signal.SIGSTOP)
    assert not semaphores.is_gone(1)
    os.kill(child, signal.SIGCONT)
    assert semaphores.is_gone(2)  # nobody ever came
    os.write(let_go, b"x")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is a zombie now, and stays one
    assert semaphores.is_gone(1)
    os.waitpid(child, 0)
    os.close(told)
    os.close(let_go)
    semaphores.close()


def test_a_forked_child_does_not_stand_in_for_its_parent() -> None:
    """Loader workers live a little longer than the rank that they belong to, and close what they inherit."""
    semaphores = _alone()

    def worker(tell: int, go: int) -> None:
        for _ in range(2):
            os.write(tell, b"y" if semaphores.is_gone(0) else b"n")
            os.read(go, 1)

    child, told, let_go = _forked(worker)
    assert os.read(told, 1) == b"n"
    semaphores.close()
    os.write(let_go, b"x")
    assert os.read(told, 1) == b"y"
    os.close(told)
    os.close(let_go)  # which ends its last wait
    os.waitpid(child, 0)


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        semaphores = _alone()
        assert len(os.listdir("/proc/self/fd")) > before
        del semaphores
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
