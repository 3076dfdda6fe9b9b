"""Ranks as threads of one process: cheaper than processes where nothing process-wide is at stake."""

from __future__ import annotations

import datetime
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lockstep.testing.pool import RankFailure, rank_failure, rank_timeout

_one_at_a_time = threading.Lock()


def run_threads(world: int, fn: Callable[..., Any], *args: object, timeout: float = 30) -> list[Any]:
    """Calls ``fn(*args)`` on ``world`` threads, each a rank of one gloo group, and returns results by rank.

    The groups are real ones (gloo), subgroups included, so sums have the bits that processes get. What a
    process has once is shared by all ranks: random states, the environment, signals, the working directory,
    torch's flags. Code that touches those needs a `RankPool`.

    Example::

        def total() -> float:
            value = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(value)
            return value.item()

        assert run_threads(8, total) == [36.0] * 8

    Args:
        world: how many ranks.
        fn: what to call on each.
        *args: its arguments, the same objects on every rank.
        timeout: seconds, for a collective and for the whole call.

    Raises:
        RankFailure: a rank raised; the first one to do so is named and is the cause. The others' collectives
            fail when it leaves.
        RankTimeout: ranks did not come back; their threads cannot be ended, and go on as daemons.
    """
    if world < 1:
        raise ValueError(f"world={world!r}: a call takes at least one rank")
    store = dist.HashStore()
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}  # in the order of time

    def rank_main(rank: int) -> None:
        try:
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            dist.barrier()  # who leaves at once must not be gone while another still connects to it
            results[rank] = fn(*args)
        except BaseException as error:
            failures[rank] = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    with _one_at_a_time, _world_per_thread():
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = {rank: _stack(thread) for rank, thread in enumerate(threads) if thread.is_alive()}
    if failures:
        raise _failure(fn, world, failures, late)
    if late:
        raise rank_timeout(fn, world, timeout, late)
    return [results[rank] for rank in range(world)]


def _failure(
    fn: Callable[..., Any], world: int, failures: dict[int, BaseException], late: dict[int, str]
) -> RankFailure:
    first, cause = next(iter(failures.items()))
    stack = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    said = {rank: _summary(error) for rank, error in failures.items()}
    error = rank_failure(fn, world, first, said, stack, late)
    error.__cause__ = cause
    return error


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(it has just ended)"


class _World(threading.local):
    """What torch.distributed keeps for a process (its groups), kept once per thread."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []


@contextmanager
def _world_per_thread() -> Iterator[None]:
    registry: Any = torch._C._distributed_c10d  # where C++ looks groups up by name
    before = distributed_c10d._world
    distributed_c10d._world = _World()  # type: ignore[assignment]
    registry._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        registry._set_thread_isolation_mode(False)
        distributed_c10d._world = before
