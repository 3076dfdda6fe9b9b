"""The guard against leaks: each kind of thing that a test can leave behind is named, and cleared away."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lockstep.testing import RandomDataset
from tests.tools import leaks
from tests.tools.fresh import python
from tests.tools.pool import pool_processes


@pytest.fixture
def before() -> Iterator[leaks.Snapshot]:
    snapshot = leaks.snapshot(pool_processes())
    yield snapshot
    assert leaks.leaks(snapshot, pool_processes()) == []


def found(before: leaks.Snapshot) -> list[str]:
    return leaks.leaks(before, pool_processes(), patience=0.1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_named(before: leaks.Snapshot, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    shown = f"[{host}]" if ":" in host else host
    with server:
        assert found(before) == [f"port {shown}:{server.getsockname()[1]} is still open"]


def test_shared_memory_is_named(before: leaks.Snapshot) -> None:
    # The name says whose it is: a guard that runs beside this one does not take it for its own test's.
    block = shared_memory.SharedMemory(name=f"lockstep-test-{os.getpid()}", create=True, size=8)
    try:
        assert found(before) == [f"/dev/shm/{block.name} is still there"]
    finally:
        block.close()
        block.unlink()


SETTINGS: list[tuple[Callable[[], object], str]] = [
    (lambda: torch.set_default_dtype(torch.float64), "get_default_dtype() was torch.float32 and is"),
    (lambda: torch.set_default_device("meta"), "get_default_device() was device(type='cpu') and is"),
    (lambda: torch.set_num_threads(2), "get_num_threads() was 1 and is 2"),
    (lambda: os.chdir("/"), "the working directory was "),
    (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "the handler of SIGTERM was "),
]


@pytest.mark.parametrize(("change", "said"), SETTINGS)
def test_a_setting_is_named_and_put_back(before: leaks.Snapshot, change: Callable[[], object], said: str) -> None:
    change()
    (sentence,) = found(before)
    assert said in sentence
    leaks.put_back(before, pool_processes())


def test_a_process_group_is_named_and_destroyed(before: leaks.Snapshot) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert "torch.distributed's default process group was not destroyed" in found(before)
    leaks.put_back(before, pool_processes())


def test_what_ends_by_itself_is_no_leak(before: leaks.Snapshot) -> None:
    threading.Thread(target=time.sleep, args=(0.2,)).start()
    subprocess.Popen(["sleep", "0.2"])
    next(iter(DataLoader(RandomDataset(4, 8), num_workers=1)))
    assert leaks.leaks(before, pool_processes()) == []


LEAKY = """
import os, subprocess, torch

def test_leaks():
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    subprocess.Popen(["sleep", "600"])

def test_next_is_not_blamed():
    assert "LEFT_BEHIND" not in os.environ
    assert torch.get_default_dtype() == torch.float32

def test_fails_for_a_reason_of_its_own():
    os.environ["LEFT_BEHIND"] = "1"
    assert False, "the reason"
"""


ENDS = """
import os

def test_ends_its_process():
    os._exit(3)

def test_runs_in_another():
    pass
"""
DRAWN = """
import pytest

@pytest.mark.everyday(2)
@pytest.mark.parametrize("number", range(5))
def test_drawn(number):
    assert number in (0, 4)
"""


def test_the_suites_guard_fails_the_test_that_leaks(tmp_path: Path) -> None:
    """Runs a small suite under the conftest of this one, on copies: one ends within a test; of five cases two run."""
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "test_ends.py").write_text(ENDS)
    (tmp_path / "test_drawn.py").write_text(DRAWN)
    words = ["-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--copies=2", "--rootdir"]
    root = str(Path(__file__).parents[2])  # that conftest imports from tests/
    result = python(*words, tmp_path, tmp_path, folder=tmp_path, PYTHONPATH=root)
    assert "2 failed, 5 passed, 3 deselected" in result.stdout, result.stdout + result.stderr
    assert "1 error" in result.stdout
    assert "test_ends.py::test_ends_its_process ended with exit status 3 in the test" in result.stdout
    assert "the test left something behind:" in result.stdout
    assert "still runs: sleep 600" in result.stdout
    assert "environment variable LEFT_BEHIND was None and is '1'" in result.stdout
    assert "torch.get_default_dtype() was torch.float32 and is torch.float64" in result.stdout
    assert "ERROR test_leaky.py::test_leaks" in result.stdout
