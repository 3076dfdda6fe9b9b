"""Environment variables: flags, cores, CUDA's, and what a started process takes over."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep import Trainer
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only
from lockstep.ground.seed import current_seed, hand_down_seed
from lockstep.launch import environment
from lockstep.launch.environment import flags_of, inherit, number_devices
from lockstep.launch.parent_death import end_with
from tests.loop.pieces import QUIET

# -- flags


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("True", True), ("[0, 1]", [0, 1]), ("ddp", "ddp")])
def test_values_are_read_as_python_writes_them(text: str, value: Any) -> None:
    assert flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": text}) == {"devices": value}


def test_what_the_script_says_counts_more() -> None:
    assert flags_of({"devices": 1}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": "2"}) == {}
    assert flags_of({"devices": "auto"}, {"devices": "auto"}, {"PL_TRAINER_DEVICES": ""}) == {}


def test_a_trainer_takes_its_flags_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_EPOCHS": "7", "LIMIT_VAL_BATCHES": "0.5", "ACCUMULATE_GRAD_BATCHES": "4"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", value)
    trainer = Trainer(**QUIET, accumulate_grad_batches=2)
    assert (trainer.max_epochs, trainer.limit_val_batches, trainer.accumulate_grad_batches) == (7, 0.5, 2)


# -- cores shared by the ranks of a node


@pytest.fixture
def six_of_six(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(environment, "cores", lambda: 6)
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("ranks", "each"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_each_rank_gets_its_share(six_of_six: None, ranks: int, each: int) -> None:
    environment.share_cores({}, ranks)
    assert torch.get_num_threads() == each


def test_the_users_choice_stays(six_of_six: None) -> None:
    environment.share_cores({"OMP_NUM_THREADS": "6"}, 2)
    assert torch.get_num_threads() == 6
    torch.set_num_threads(2)
    environment.share_cores({}, 2)
    assert torch.get_num_threads() == 2


# -- CUDA's: set where lockstep starts the ranks, left alone on a cluster


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)


USERS = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("by_a_cluster", "before", "after"),
    [
        (False, {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2"}),
        (False, USERS, USERS),
        (True, {}, {}),
    ],
)
def test_they_are_set_where_neither_the_user_nor_a_cluster_does(
    three_gpus: None, by_a_cluster: bool, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    number_devices(by_a_cluster, environ)
    assert environ == after


def test_others_get_the_names_of_gpus_that_this_process_has_counted_by_speed(
    three_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 went on by speed and its children by the bus: on unlike GPUs two ranks took one card."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = [SimpleNamespace(name="Some GPU", uuid=f"0{number}-ab") for number in (2, 0, 1)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: found[number])
    environ: dict[str, str] = {}
    number_devices(False, environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "GPU-02-ab,GPU-00-ab,GPU-01-ab"}
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}
    number_devices(False, environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1,2"}


# -- what a started process takes over


@pytest.fixture
def put_back() -> Iterator[None]:
    rank, seed = rank_zero_only.rank, current_seed()
    yield
    rank_zero_only.rank = rank
    hand_down_seed(seed)


def test_rank_and_seed(put_back: None) -> None:
    inherit({"LOCAL_RANK": "3", "PL_GLOBAL_SEED": "9"})
    assert (rank_zero_only.rank, current_seed()) == (3, 9)


def test_a_seed_that_is_none_is_told_by_its_variable(put_back: None) -> None:
    """`import lockstep` ended with int()'s own error."""
    with pytest.raises(MisconfigurationException, match=r"PL_GLOBAL_SEED is 'tomorrow'.*integer.*or remove it"):
        inherit({"PL_GLOBAL_SEED": "tomorrow"})
    hand_down_seed(4)
    inherit({"PL_GLOBAL_SEED": ""})  # as a shell's script has it of a variable of its own that is not set
    assert current_seed() == 4


def test_a_process_of_a_rank_is_left_alone(put_back: None, monkeypatch: pytest.MonkeyPatch) -> None:
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
