"""What a started process takes over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.seed import current_seed, hand_down_seed
from lockstep.launch.environment import inherit
from lockstep.launch.parent_death import end_with


@pytest.fixture(autouse=True)
def rank_and_seed_put_back() -> Iterator[None]:
    rank, seed = rank_zero_only.rank, current_seed()
    yield
    rank_zero_only.rank = rank
    hand_down_seed(seed)


def test_rank_and_seed() -> None:
    inherit({"LOCAL_RANK": "3", "PL_GLOBAL_SEED": "9"})
    assert (rank_zero_only.rank, current_seed()) == (3, 9)


def test_a_seed_that_is_none_is_told_by_its_variable() -> None:
    """`import lockstep` ended with int()'s own error."""
    with pytest.raises(MisconfigurationException, match=r"PL_GLOBAL_SEED is 'tomorrow'.*integer.*or remove it"):
        inherit({"PL_GLOBAL_SEED": "tomorrow"})
    hand_down_seed(4)
    inherit({"PL_GLOBAL_SEED": ""})  # as a shell's script has it of a variable of its own that is not set
    assert current_seed() == 4


def test_a_process_of_a_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader worker has the variable too, and another parent; that the ranks' parent lives is enough."""
    monkeypatch.setattr(os, "_exit", pytest.fail)
    inherit({"LOCKSTEP_PARENT": str(os.getpid())})


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the bond is made on Linux only")
def test_a_process_whose_parent_ended_before_it_could_bind_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = subprocess.Popen([sys.executable, "-I", "-S", "-c", "pass"])
    parent.wait()
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    end_with(parent.pid)
    assert codes == [1]
