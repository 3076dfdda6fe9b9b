"""A run on many nodes, played in one process: nobody is lost, the right rank is named, and messages stay few."""

from __future__ import annotations

import math
import resource

import pytest

from tests.tools.scale import SimulatedRun, meet
from tests.tools.scale_messages import agree, reduce_logged

TIMEOUT = 20.0


@pytest.mark.parametrize("nodes", [2, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_long_wait_is_told_once_and_a_failure_is_named_everywhere(nodes: int) -> None:
    """A rank that kept others waiting for 30 s on 32 nodes had 12 of them taken for lost, and the run ended."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = 8 * nodes - 5
    with SimulatedRun(nodes, hang_timeout=TIMEOUT) as run:
        start = run.start()
        assert (start.messages, start.most) == (2 * (nodes - 1), 2)
        wait = run.wait(40, late)
        assert run.lost == []
        ((moment, said),) = run.told
        assert moment - 1000.0 <= TIMEOUT + 5
        assert f"rank {late} is in its own code, /home/me/train.py:88" in said
        assert f"ranks 0-{late - 1}, {late + 1}-{8 * nodes - 1} wait in all_reduce #41" in said
        assert wait.most <= wait.seconds  # one message a second, there and back
        assert wait.messages <= (wait.most + 2) * (nodes - 1)  # one each way may be under way as they are counted
        failure = run.fail(5)
        assert set(run.decided) == {run.decided[0]}
        assert "rank 5 on " in run.decided[0]
        assert "ValueError: made up" in run.decided[0]
        assert failure.most <= 3
        assert failure.messages <= 3 * nodes
        end = run.end()
        assert run.lost == []
        assert end.most <= 3
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == limits


def test_a_late_node_that_falls_silent_is_not_news() -> None:
    """Once node 1 had said nothing for 5 s, the wait was told again: of node 0's ranks, and without the late one."""
    with SimulatedRun(2, hang_timeout=TIMEOUT, silent={1: range(24, 40)}) as run:
        run.start()
        run.wait(40, late=11)
        ((_, said),) = run.told
    assert "rank 11 is in its own code" in said


@pytest.mark.parametrize("off", [{3: 240.0}, {0: -240.0}, {5: 86_400.0}], ids=str)
def test_a_node_whose_clock_is_off_is_no_lost_node(off: dict[int, float]) -> None:
    with SimulatedRun(8, hang_timeout=TIMEOUT, off=off) as run:
        run.start()
        run.wait(40, late=42)
        assert run.lost == []
        ((moment, said),) = run.told
        assert moment - 1000.0 <= TIMEOUT + 5
        assert "rank 42 is in its own code, /home/me/train.py:88" in said
        run.fail(5)
        assert len(set(run.decided)) == 1
        assert "rank 5 on " in run.decided[0]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("late", [17, 42])
def test_a_node_that_says_nothing_for_a_minute_is_no_lost_node(late: int) -> None:
    """What its ranks do is told once it says so."""
    with SimulatedRun(8, hang_timeout=TIMEOUT, silent={2: range(60)}) as run:
        run.start()
        run.wait(90, late)
        assert run.lost == []
        assert f"rank {late} is in its own code, /home/me/train.py:88" in run.told[-1][1]
        run.fail(5)
        assert len(set(run.decided)) == 1
        assert "rank 5 on " in run.decided[0]
        run.end()
        assert run.lost == []


@pytest.mark.parametrize("gone", [[7], [7, 9]])
def test_a_lost_node_is_named_under_64(gone: list[int]) -> None:
    with SimulatedRun(64) as run:
        run.start()
        run.lose(gone)
        assert len(set(run.decided)) == 1
        assert any(run.decided[0].startswith(f"node {number} (") for number in gone)
        assert run.decided[0].endswith(") ended without reporting why")


def test_where_node_0_is_lost_every_node_says_so() -> None:
    with SimulatedRun(8) as run:
        run.start()
        run.lose([0])
        assert {words.split(" (")[0] for words in run.decided} == {"node 0"}


@pytest.mark.parametrize("ranks", [2, 64, pytest.param(2048, marks=pytest.mark.slow)])
def test_ranks_meet_with_few_requests(ranks: int) -> None:
    requests = meet(ranks)
    assert requests["another rank"] <= 8
    assert requests["rank 0"] <= 6 * ranks + 30


@pytest.mark.parametrize("ranks", [9, 64, 1000, pytest.param(8192, marks=pytest.mark.slow)])
def test_logged_values_cost_a_rank_a_logarithm_of_messages(ranks: int) -> None:
    """Every rank got every other rank's values: 0.5 s for 100 names at 10,000 ranks."""
    few, many = reduce_logged(ranks, 1), reduce_logged(ranks, 100)
    depth = math.log2(ranks)
    for found in (few, many):
        assert max(found["rank 0"], found["another rank"]) <= 4 * depth + 4
        assert found["depth"] <= 4 * depth + 4
    assert few["bytes"] <= (4 * depth + 4) * 8 * (5 + 3 * 64)
    assert many["bytes"] <= (4 * depth + 4) * 8 * (5 + 3 * 100)


@pytest.mark.parametrize("hosts", [1, 2, 8, 9, 64, 65, 128, 1000])
def test_hosts_agree_with_a_logarithm_of_messages(hosts: int) -> None:
    """A ring over all ranks was 2 (ranks - 1) messages deep."""
    found = agree(hosts)
    levels = max(1, math.ceil(math.log(hosts, 8) - 1e-9))
    assert found["depth"] <= 2 * levels - 1
    assert found["most"] <= 14 * levels
