"""NCCL: its variables, checked by name, set where nobody else has, and taken back; what is said before ranks start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.cluster import nccl
from lockstep.cluster.nccl import NcclVariables, check_nccl
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.trainer import Trainer

ASKED = {"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2, "MIN_NCHANNELS": 8}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(nccl, "CLUSTER_FILE", str(tmp_path / "nccl.conf"))
    monkeypatch.setattr(nccl, "USER_FILE", str(tmp_path / "own.conf"))


def in_force() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}


def test_they_are_set_and_taken_back() -> None:
    variables = NcclVariables(ASKED)
    assert in_force() == {}  # not before the group is made
    told = variables.set()
    assert in_force() == {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2", "NCCL_MIN_NCHANNELS": "8"}
    assert "in force: NCCL_NSOCKS_PERTHREAD=4, NCCL_SOCKET_NTHREADS=2, NCCL_MIN_NCHANNELS=8" in told
    assert variables.set() == told  # a second call of the Trainer
    variables.restore()
    assert in_force() == {}


def test_the_shell_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "16")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = NcclVariables(ASKED)
    told = variables.set()
    assert os.environ["NCCL_MIN_NCHANNELS"] == "16"
    assert "NCCL_MIN_NCHANNELS=16 (from the environment; requested: 8)" in told
    variables.restore()
    assert in_force() == {"NCCL_MIN_NCHANNELS": "16", "NCCL_DEBUG": "WARN"}


def test_the_clusters_file_goes_before(tmp_path: Path) -> None:
    """NCCL takes the environment before its files, so setting a variable would override what a cluster says."""
    (tmp_path / "nccl.conf").write_text("# ours\nNCCL_MIN_NCHANNELS = 32\n#NCCL_SOCKET_NTHREADS=9\nno variable\n")
    variables = NcclVariables(ASKED)
    told = variables.set()
    assert in_force() == {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}
    assert f"NCCL_MIN_NCHANNELS=32 (from {tmp_path / 'nccl.conf'}; requested: 8)" in told
    variables.restore()


def test_the_users_file_goes_before_the_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_MIN_NCHANNELS=32\n")
    (tmp_path / "own.conf").write_text("NCCL_MIN_NCHANNELS=12\n")
    assert "NCCL_MIN_NCHANNELS=12" in NcclVariables({"MIN_NCHANNELS": 8}).set()
    (tmp_path / "third.conf").write_text("NCCL_MIN_NCHANNELS=24\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "third.conf"))
    assert "NCCL_MIN_NCHANNELS=24" in NcclVariables({"MIN_NCHANNELS": 8}).set()


def test_names_may_have_the_prefix() -> None:
    wanted = NcclVariables({"NCCL_SOCKET_IFNAME": "eth0", "P2P_DISABLE": False}).wanted
    assert wanted == {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "0"}


def test_it_is_said_by_the_trainer_before_anything_starts() -> None:
    with pytest.raises(MisconfigurationException, match=r"process_group_backend='nccl': NCCL needs GPUs"):
        Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="nccl"))
    Trainer(accelerator="cpu", devices=1, strategy=DDPStrategy(process_group_backend="gloo"))


def test_gpus_without_nccl_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(MisconfigurationException, match=r"was built without NCCL: install .*backend='gloo'"):
        Trainer(accelerator="gpu", devices=2, strategy="ddp")
    Trainer(accelerator="gpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))


@pytest.mark.gpu
def test_the_nccl_of_this_machine_is_right() -> None:
    assert torch.version.cuda is not None
    check_nccl("cuda")
