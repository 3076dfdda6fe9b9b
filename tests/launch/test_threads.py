"""Cores shared by the ranks of a node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lockstep.launch import environment


@pytest.fixture(autouse=True)
def six_of_six(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(environment, "cores", lambda: 6)
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ranks", "each"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_each_rank_gets_its_share(ranks: int, each: int) -> None:
    environment.share_cores({}, ranks)
    assert torch.get_num_threads() == each


def test_the_users_choice_stays() -> None:
    environment.share_cores({"OMP_NUM_THREADS": "6"}, 2)
    assert torch.get_num_threads() == 6
    torch.set_num_threads(2)
    environment.share_cores({}, 2)
    assert torch.get_num_threads() == 2
