"""The rank pool: results, failures that name their cause, and calls that do not see one another."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.tools import leaks
from tests.tools.leaks import command_line
from tests.tools.pool import RankFailure, RankPool, RankTimeout, pool_processes
from tests.tools.pool_worker import CALLS_PER_COLLECTION

FACTOR = 3.0


class Fish(Exception):
    """Raised on a rank, known only to this file."""


def total(x: float) -> float:
    value = torch.tensor([x * FACTOR * (dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def refuse(rank: int) -> None:
    if dist.get_rank() == rank:
        raise Fish("lr=-1 is no learning rate")
    dist.barrier()


def end_with(rank: int, how: Callable[[], Any]) -> None:
    if dist.get_rank() == rank:
        how()
    dist.barrier()


def stay(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)


def hold_group_in_a_circle() -> None:
    """As a Trainer and its module do."""
    circle: list[Any] = [dist.group.WORLD]
    circle.append(circle)


def gloo_threads() -> int:
    threads = Path("/proc/self/task").iterdir()
    return sum((thread / "comm").read_text().startswith("gloo_tcp") for thread in threads)


def sum_over_a_mesh(groups: int, columns: int = 1) -> float:
    """The sum of a DTensor over a mesh, whose groups are named after those that were made before them."""
    for _ in range(groups):
        dist.new_group()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("rows", "row"))
    cut = distribute_tensor(torch.ones(4, columns), mesh, [Shard(0), Shard(0)])
    return float((cut * 2).sum(0).full_tensor()[0])


def spoil() -> None:
    os.environ["RANK"] = "17"
    os.environ["SPOILT"] = "yes"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.manual_seed(99)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path.insert(0, "/nowhere")


def condition() -> tuple[Any, ...]:
    return (
        os.environ["RANK"],
        os.environ.get("SPOILT"),
        os.getcwd(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        signal.getsignal(signal.SIGTERM),
        "/nowhere" in sys.path,
        torch.rand(1).item(),
        float(np.random.rand()),
        random.random(),
    )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_by_rank(ranks: RankPool, world: int) -> None:
    expected = FACTOR * sum(range(1, world + 1))
    assert ranks(world).run(total, 1.0) == [expected] * world
    assert ranks(world).run(lambda: dist.get_rank()) == list(range(world))


def test_a_call_sees_nothing_of_the_one_before(ranks: RankPool) -> None:
    before = ranks(2).run(condition)
    ranks(2).run(spoil)
    assert ranks(2).run(condition) == before


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_failure_names_the_rank_and_shows_its_traceback(ranks: RankPool, culprit: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=rf"refuse failed on rank {culprit} of 3: .*Fish: lr=-1") as caught:
        ranks(3).run(refuse, culprit)
    assert time.monotonic() - start < 10
    assert caught.value.rank == culprit
    assert "test_pool.py" in caught.value.stack
    assert "in refuse" in caught.value.stack
    assert isinstance(caught.value.__cause__, Fish)
    assert ranks(3).run(total, 1.0) == [FACTOR * 6] * 3


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os._exit(3), "exit status 3"),
        (lambda: sys.exit("enough"), "SystemExit: enough"),
    ],
)
def test_a_rank_that_dies_is_named_and_replaced(ranks: RankPool, how: Callable[[], Any], said: str) -> None:
    with pytest.raises(RankFailure, match=f"end_with failed on rank 1 of 2: .*{said}") as caught:
        ranks(2).run(end_with, 1, how)
    assert caught.value.rank == 1
    assert ranks(2).run(total, 1.0) == [FACTOR * 3] * 2


def test_a_rank_that_hangs_is_named_with_its_stack(ranks: RankPool) -> None:
    with pytest.raises(RankTimeout, match=r"no answer after 0\.5 s from rank 1\n") as caught:
        ranks(2).run(stay, 1, 600.0, timeout=0.5)
    assert caught.value.rank == 1
    assert "test_pool.py" in caught.value.stack
    assert "in stay" in caught.value.stack
    assert ranks(2).run(total, 1.0) == [FACTOR * 3] * 2


def test_of_a_rank_that_does_not_answer_the_system_is_asked(ranks: RankPool) -> None:
    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RankTimeout, match=r"it gave no stack within a second: state T.*, 0.00 s of a processor in it"):
        ranks(2).run(stop, timeout=1)


def test_what_a_call_leaves_running_is_its_failure(ranks: RankPool) -> None:
    def start() -> None:
        if dist.get_rank() == 1:
            subprocess.Popen(["sleep", "600"])
            threading.Thread(target=time.sleep, args=(4,), name="dreamer", daemon=True).start()

    said = r"rank 1 of 2: .*child process \d+ still runs: sleep 600; thread 'dreamer' still runs"
    with pytest.raises(RankFailure, match=said):
        ranks(2).run(start)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by /proc")
def test_groups_of_earlier_calls_kept_their_threads(ranks: RankPool) -> None:
    for _ in range(2 * CALLS_PER_COLLECTION):
        ranks.run(hold_group_in_a_circle)
    deadline = time.monotonic() + 10  # on a busy machine threads of closed groups take a while to end
    while max(ranks.run(gloo_threads, group=False)) >= CALLS_PER_COLLECTION and time.monotonic() < deadline:
        time.sleep(0.1)
    assert max(ranks.run(gloo_threads, group=False)) < CALLS_PER_COLLECTION


def test_a_mesh_of_an_earlier_call_was_asked_for_its_group(ranks: RankPool) -> None:
    """torch's caches gave it to an equal mesh: "Could not resolve the process group registered under the name 5"."""
    for groups in (4, 0, 2):
        assert ranks(4).run(sum_over_a_mesh, groups) == [8.0] * 4


def test_an_open_pool_is_no_leak_and_closing_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = leaks.snapshot(pool_processes())
    pool = RankPool(2)
    assert leaks.leaks(before, pool_processes()) == []
    pids = [*pool.pids, pool._nursery.pid]
    assert pool.run(total, 1.0) == [FACTOR * 3] * 2
    pool.close()
    deadline = time.monotonic() + 5
    while any(command_line(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [command_line(pid) for pid in pids] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.run(total, 1.0)


def test_a_killed_owner_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told, tell = os.pipe()
    if not (owner := os.fork()):
        try:
            pool = RankPool(1)
            os.write(tell, " ".join(map(str, (*pool.pids, pool._nursery.pid))).encode())
            pool.run(time.sleep, 600, timeout=600)
        finally:
            os._exit(1)
    os.close(tell)
    pids = [int(word) for word in os.read(told, 100).split()]
    os.close(told)
    assert len(pids) == 2
    assert all(map(command_line, pids))
    assert len(list(tmp_path.iterdir())) == 1
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    deadline = time.monotonic() + 10
    while any(map(command_line, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [command_line(pid) for pid in pids] == ["", ""]
    assert list(tmp_path.iterdir()) == []
