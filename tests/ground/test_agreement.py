"""Flags: every rank sees a flag at the same boundary, whoever raised it, however slow the others are."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lockstep.ground import agreement as module
from lockstep.ground import shared_pages
from lockstep.ground.agreement import ConsensusFlags
from tests.tools.pool import RankPool

Seen = list[tuple[int, int]]


def _reduce() -> None:
    dist.all_reduce(torch.ones(1))


def _flags(mode: str, every: int | None = None) -> ConsensusFlags:
    """Flags by "shared" memory, or by "messages", as where each rank has a host of its own."""
    if mode != "messages":
        return ConsensusFlags(every=every)
    with mock.patch.object(shared_pages, "host", return_value=str(dist.get_rank())):
        return ConsensusFlags(every=every)


def _race(mode: str, every: int | None, windows: int, seed: int, held: bool = True) -> tuple[list[int], Seen]:
    """Random requests and pauses; answers what this rank asked for and what it saw, as (window, bit).

    ``held``: a reduction holds the ranks up in most windows, as gloo's do and NCCL's do not.
    """
    chance = random.Random(seed * 100 + dist.get_rank())
    agreement = _flags(mode, every)
    bits = [agreement.register(name) for name in ("stop", "save", "signal")]
    asked: list[int] = []
    seen: Seen = []

    def pause() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 2e-3)

    def ask() -> None:
        if chance.random() < 0.1:
            bit = chance.choice(bits)
            asked.append(bit)
            agreement.request(bit)

    for window in range(windows):
        ask()
        pause()
        synced = window % 7 != 3  # no reduction in some windows
        agreement.publish()
        ask()
        pause()
        if synced and held:
            _reduce()
        pause()
        ask()
        agreement.settle(synced)
        for bit in bits:
            if agreement.is_up(bit):
                seen.append((window, bit))
                if window % 3:  # sometimes it stays up for a while
                    agreement.lower(bit)
    agreement.close()
    return asked, seen


CHANNELS = [("shared", 1), ("messages", 1), ("messages", 3), ("messages", None)]


@pytest.mark.everyday
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("mode", "every"), CHANNELS)
def test_all_ranks_see_a_flag_at_the_same_boundary(ranks: RankPool, world: int, mode: str, every: int | None) -> None:
    results = ranks(world).run(_race, mode, every, 200, world)
    seen = results[0][1]
    assert all(other == seen for _, other in results)
    assert {bit for _, bit in seen} == {bit for asked, _ in results for bit in asked} == {0, 1, 2}


def _sockets() -> set[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {
        name for link in links if os.path.islink(link) for name in [os.readlink(link)] if name.startswith("socket:")
    }


def _race_over_hosts(hosts: list[str], every: int | None, windows: int, seed: int) -> tuple[Any, int]:
    """The same, of ranks that are taken to be on these hosts; and the sockets that an agreement opens."""
    with mock.patch.object(shared_pages, "host", return_value=hosts[dist.get_rank()]):
        _reduce()
        before = _sockets()
        agreement = ConsensusFlags(every=every)
        opened = len(_sockets() - before)  # those of an earlier group may close meanwhile
        kind = type(agreement._channel).__name__
        agreement.close()
        raced = _race("hosts", every, windows, seed)
    return (kind, raced), opened


HOSTS = [["a", "a", "b", "b"], ["a", "b", "a", "c"], ["a", "b", "b", "b", "b"], [*"aabcdefghij"]]


PACES = (1, 3, None)


# Every day each pace on the first hosts, and one of them on each of the others.
@pytest.mark.everyday
@pytest.mark.parametrize(
    ("hosts", "every"),
    [
        pytest.param(
            hosts,
            every,
            marks=() if not place or place % 3 == number else pytest.mark.slow,
            id=f"{''.join(hosts)}-{every}",
        )
        for place, hosts in enumerate(HOSTS)
        for number, every in enumerate(PACES)
    ],
)
def test_ranks_of_several_hosts_agree_over_the_sockets_that_they_have(
    ranks: RankPool, hosts: list[str], every: int | None
) -> None:
    """A second gloo mesh was made for it: 34 sockets a rank at 16 ranks, where torch has 17."""
    results = ranks(len(hosts)).run(_race_over_hosts, hosts, every, 50, len(hosts), timeout=60)
    (_, (_, seen)), _ = results[0]
    for (kind, (_, other)), opened in results:
        assert (kind, other, opened) == ("_Messages", seen, 0)
    assert {bit for _, bit in seen} == {bit for (_, (asked, _)), _ in results for bit in asked}


def _race_without_reductions(hosts: list[str], every: int | None, windows: int) -> tuple[str, Any]:
    with (
        mock.patch.object(shared_pages, "host", return_value=hosts[dist.get_rank()]),
        mock.patch.object(module, "on_one_host", return_value=False),  # shared flags need reductions that hold up
    ):
        agreement = ConsensusFlags(every=every)
        heads = agreement._channel._maximum._heads  # type: ignore[attr-defined]
        agreement.close()
        return str(heads), _race("hosts", every, windows, 7, held=False)


@pytest.mark.everyday
@pytest.mark.parametrize("every", [1, 3, None])
@pytest.mark.parametrize(("hosts", "heads"), [("aaa", [0]), ("aabb", [0, 2])])
def test_ranks_agree_where_no_reduction_holds_them_up(
    ranks: RankPool, hosts: str, heads: list[int], every: int | None
) -> None:
    """As under NCCL, whose reductions are only queued. On one host it takes no message at all."""
    results = ranks(len(hosts)).run(_race_without_reductions, list(hosts), every, 200, timeout=60)
    assert [leaders for leaders, _ in results] == [str(heads)] * len(hosts)
    seen = results[0][1][1]
    assert all(other == seen for _, (_, other) in results)
    assert {bit for _, bit in seen} == {bit for _, (asked, _) in results for bit in asked}


def _windows_until_seen(seconds: float) -> int:
    """After how many windows, which take so long on rank 1, a request of rank 0's is seen."""
    agreement = _flags("messages")
    bit = agreement.register("signal")
    for window in range(100):
        if window == 20 and dist.get_rank() == 0:
            agreement.request(bit)
        time.sleep(seconds * dist.get_rank())
        agreement.publish()
        _reduce()
        agreement.settle(True)
        if agreement.is_up(bit):
            break
    agreement.close()
    return window - 19


def test_messages_go_more_often_where_windows_are_long(ranks: RankPool) -> None:
    """A signal was acted on 8 to 15 windows later, also where these took longer than SLURM waits to kill."""
    assert max(ranks(2).run(_windows_until_seen, 0.06)) <= 2
    quick = ranks(2).run(_windows_until_seen, 0.0)
    assert quick[0] == quick[1] <= 16


def _two_clocks() -> list[int]:
    """Both ranks' clocks ring, one of them after it has published: one save answers both."""
    agreement = _flags("shared")
    save = agreement.register("save-by-time")
    seen = []
    for window in range(5):
        if window == 1 and dist.get_rank() == 0:
            agreement.request(save)
        agreement.publish()
        if window == 1 and dist.get_rank() == 1:
            agreement.request(save)
        _reduce()
        agreement.settle(True)
        if agreement.is_up(save):
            seen.append(window)
            agreement.lower(save)
    agreement.close()
    return seen


def test_lower_answers_requests_of_all_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(_two_clocks) == [[1], [1]]


def _asked_at_once(mode: str) -> list[Any]:
    # every=1: the request is on its way in a message when the answer comes
    agreement = _flags(mode, 1)
    stop, save = agreement.register("stop"), agreement.register("save")
    answers: list[Any] = [agreement.now(stop)]
    if dist.get_rank() == 1:
        agreement.request(stop)
    agreement.publish()  # then the epoch ends in a window without a reduction
    agreement.settle(False)
    answers += [agreement.is_up(stop), agreement.now(stop), agreement.is_up(stop), agreement.now(save)]
    agreement.lower(stop)
    for _ in range(8):
        agreement.publish()
        _reduce()
        agreement.settle(True)
        answers.append(agreement.is_up(stop))
    agreement.close()
    return answers


@pytest.mark.parametrize("mode", ["shared", "messages"])
def test_now_answers_at_once_and_is_not_answered_again(ranks: RankPool, mode: str) -> None:
    expected = [False, False, True, True, False] + [False] * 8
    assert ranks(2).run(_asked_at_once, mode) == [expected] * 2


def _kind(patched: str, value: object) -> str:
    """The channel that is chosen where a function of `shared_pages` returns something else on rank 1."""
    with mock.patch.object(shared_pages, patched, return_value=value) if dist.get_rank() else contextlib.nullcontext():
        agreement = ConsensusFlags()
    kind = type(agreement._channel).__name__
    agreement.close()
    assert not list(Path("/dev/shm").glob(f"lockstep-{os.getpid()}-*"))
    return kind


@pytest.mark.parametrize(
    ("patched", "value", "kind"),
    # `close_handle` is imported by its name: nothing changes there.
    [("close_handle", None, "_Shared"), ("host", "elsewhere", "_Messages"), ("_map", None, "_Messages")],
)
def test_memory_on_one_host_messages_between_hosts_or_without_a_map(
    ranks: RankPool, patched: str, value: object, kind: str
) -> None:
    assert ranks(2).run(_kind, patched, value) == [kind] * 2


def test_one_rank_sees_its_own_request_at_the_boundary() -> None:
    agreement = ConsensusFlags()
    stop, save = agreement.register("stop"), agreement.register("save")
    assert agreement.register("stop") == stop
    agreement.request(stop)
    agreement.publish()
    assert not agreement.is_up(stop)
    agreement.settle(False)
    assert agreement.is_up(stop)
    assert agreement.now(stop)
    assert not agreement.now(save)
    agreement.lower(stop)
    agreement.settle(True)
    assert not agreement.is_up(stop)
    agreement.request(save)
    assert agreement.now(save)
    agreement.close()
