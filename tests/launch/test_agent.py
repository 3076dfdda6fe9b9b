"""The agent of `lockstep run`: what it tells its ranks, how it numbers nodes, which end it calls the first."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStateError, RendezvousStoreInfo

from lockstep.launch.elastic_run import (
    FRESH,
    InOrder,
    LaunchPlan,
    _describe_first,
    _lock,
    _variables,
    remove_old_folders,
)


def told(plan: LaunchPlan, **environ: str) -> dict[str, str]:
    return _variables(plan, Path("/folder"), environ)


@pytest.mark.parametrize("flags", [{"max_restarts": 1}, {"resume": True}])
def test_a_run_that_may_go_on_has_a_name_and_its_agent_one_of_its_own(flags: dict[str, Any]) -> None:
    plan = LaunchPlan(("train.py",), "train-1", 2, **flags)
    first, second = told(plan), told(plan)
    assert first["LOCKSTEP_RUN"] == second["LOCKSTEP_RUN"] == "train-1"
    assert first["LOCKSTEP_AGENT"] != second["LOCKSTEP_AGENT"]
    assert first["LOCKSTEP_RESUME"] == str(int(plan.resume))


def test_a_job_that_slurm_has_started_anew_has_the_same_agents() -> None:
    plan, job = LaunchPlan(("train.py",), "train-1", 2, max_restarts=1), {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    names = [
        told(plan, **job, SLURM_PROCID=task, SLURM_RESTART_COUNT=life)["LOCKSTEP_AGENT"]
        for life, task in (("0", "0"), ("1", "0"), ("1", "1"))
    ]
    assert names[0] == names[1] != names[2]


class Met:
    """What torch's handler gives the nodes of a round, numbered by something else than their users."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.info = RendezvousInfo(store, rank, size, RendezvousStoreInfo("torch's", 1))

    def next_rendezvous(self) -> RendezvousInfo:
        return self.info


def meet(numbers: list[int | None]) -> list[Any]:
    """(number, address of the first node) of each node, or what it raised."""
    store = dist.HashStore()

    def come(rank: int, number: int | None) -> Any:
        try:
            info = InOrder(Met(store, rank, len(numbers)), number, f"node{rank}").next_rendezvous()  # type: ignore[arg-type]
        except RendezvousStateError as error:
            return str(error)
        return info.rank, info.bootstrap_store_info.master_addr  # type: ignore[union-attr]

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(come, range(len(numbers)), numbers))


def test_nodes_have_the_numbers_that_their_users_gave_them() -> None:
    assert meet([2, 0, 1]) == [(2, "node1"), (0, "node1"), (1, "node1")]
    assert meet([None, 5, None]) == [(1, "node1"), (0, "node1"), (2, "node1")]
    assert meet([0, 0]) == ["--node-rank 0 is used on 2 nodes: pass a different number on each"] * 2


def test_the_folder_of_an_agent_that_was_killed_goes_with_the_next_run(tmp_path: Path) -> None:
    """SIGKILL left it among the system's temporary files for ever."""
    own, fresh, other = (
        tmp_path / name for name in ("lockstep-agent-a", "lockstep-agent-b", "lockstep-run-x-fit-1.ckpt")
    )
    for folder in (own, fresh, other):
        folder.mkdir()
        (folder / "cause-1").write_text("rank 1 failed first")
    held = _lock(own)
    assert held is not None
    for folder in (own, other):
        os.utime(folder, times=(time.time() - 2 * FRESH,) * 2)
    remove_old_folders(tmp_path)
    assert sorted(tmp_path.iterdir()) == [own, fresh, other]
    os.close(held)  # as the system does when the agent dies
    remove_old_folders(tmp_path)
    assert sorted(tmp_path.iterdir()) == [fresh, other]


def failure(code: int, pid: int = 7) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=pid, exitcode=code, error_file="<N/A>")


def test_the_end_that_others_follow_from_is_told() -> None:
    ended = {0: failure(1), 1: failure(-signal.SIGKILL), 2: failure(-signal.SIGTERM)}  # the agent has ended rank 2
    assert _describe_first(ended) == "rank 1 (process 7) was killed by SIGKILL (exit code -9)"
    assert _describe_first({0: failure(-signal.SIGTERM), 1: failure(3)}) == "rank 1 (process 7) ended with exit code 3"
    assert _describe_first({0: failure(-signal.SIGTERM)}) == "rank 0 (process 7) was killed by SIGTERM (exit code -15)"
