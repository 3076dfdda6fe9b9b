"""How many loader workers there is room for."""

from __future__ import annotations

import os

import pytest

from lockstep.data.workers import suggested_max_num_workers


@pytest.mark.parametrize(("cores", "ranks", "workers"), [(8, 1, 7), (8, 2, 3), (8, 8, 1), (2, 4, 1), (1, 1, 1)])
def test_cores_are_shared_by_the_ranks(cores: int, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    assert suggested_max_num_workers(ranks) == workers
