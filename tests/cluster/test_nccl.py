"""NCCL's variables: checked by name, set where nobody else has, told, taken back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster import nccl
from lockstep.cluster.nccl import NAMES, NcclVariables
from lockstep.ground.errors import MisconfigurationException

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
    assert "in force: set NCCL_NSOCKS_PERTHREAD=4, NCCL_SOCKET_NTHREADS=2, NCCL_MIN_NCHANNELS=8" in told
    assert variables.set() == told  # a second call of the Trainer
    variables.restore()
    assert in_force() == {}


def test_the_shell_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "16")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = NcclVariables(ASKED)
    told = variables.set()
    assert os.environ["NCCL_MIN_NCHANNELS"] == "16"
    assert "kept as set before NCCL_MIN_NCHANNELS=16 (from the environment; asked: 8)" in told
    assert "besides, in the environment NCCL_DEBUG=WARN" in told
    variables.restore()
    assert in_force() == {"NCCL_MIN_NCHANNELS": "16", "NCCL_DEBUG": "WARN"}


def test_the_clusters_file_goes_before(tmp_path: Path) -> None:
    """NCCL takes the environment before its files, so setting a variable would override what a cluster says."""
    (tmp_path / "nccl.conf").write_text("# ours\nNCCL_MIN_NCHANNELS = 32\n#NCCL_SOCKET_NTHREADS=9\nno variable\n")
    variables = NcclVariables(ASKED)
    told = variables.set()
    assert in_force() == {"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2"}
    assert f"NCCL_MIN_NCHANNELS=32 (from {tmp_path / 'nccl.conf'}; asked: 8)" in told
    variables.restore()


def test_the_users_file_goes_before_the_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_MIN_NCHANNELS=32\n")
    (tmp_path / "own.conf").write_text("NCCL_MIN_NCHANNELS=12\n")
    assert "NCCL_MIN_NCHANNELS=12" in NcclVariables({"MIN_NCHANNELS": 8}).set()
    (tmp_path / "third.conf").write_text("NCCL_MIN_NCHANNELS=24\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "third.conf"))
    assert "NCCL_MIN_NCHANNELS=24" in NcclVariables({"MIN_NCHANNELS": 8}).set()


def test_names_with_the_prefix_and_values_of_each_kind() -> None:
    asked: dict[str, Any] = {"NCCL_SOCKET_IFNAME": "eth0", "IB_DISABLE": True, "P2P_DISABLE": False, "NTHREADS": 256}
    assert NcclVariables(asked).wanted == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "0",
        "NCCL_NTHREADS": "256",
    }


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"NSOCK_PERTHREAD": 4}, r"'NSOCK_PERTHREAD'.*Did you mean 'NSOCKS_PERTHREAD'"),
        ({"NCCL_SOCKET_NTHREAD": 2}, r"Did you mean 'SOCKET_NTHREADS'"),
        ({"min_nchannels": 2}, r"Did you mean 'MIN_NCHANNELS'"),
        ({"TORCH_NCCL_BLOCKING_WAIT": 1}, "no variable of this name.*exported in the shell"),
        ({3: 1}, "nccl={3: ...}"),
        ({"MIN_NCHANNELS": 1.5}, r"'MIN_NCHANNELS': 1.5.*whole number"),
        ({"MIN_NCHANNELS": None}, "'MIN_NCHANNELS': None"),
        ({"SOCKET_IFNAME": ""}, "'SOCKET_IFNAME': ''"),
        ({"MIN_NCHANNELS": 1, "NCCL_MIN_NCHANNELS": 2}, "NCCL_MIN_NCHANNELS is there twice"),
        (["MIN_NCHANNELS"], "give a dict"),
    ],
)
def test_what_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        NcclVariables(asked)
    assert in_force() == {}


def test_the_list_has_the_variables_that_people_set() -> None:
    for name in ("DEBUG", "SOCKET_IFNAME", "IB_HCA", "P2P_LEVEL", "ALGO", "PROTO", "NVLS_ENABLE", "CUMEM_ENABLE"):
        assert name in NAMES
