"""Nodes, devices on a cluster, and the folder where files go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lockstep import Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import QUIET, quiet

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.mark.parametrize("nodes", [0, -1, "two", 1.5, True])
def test_a_number_of_nodes_that_is_none(nodes: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"num_nodes=.*integer of at least 1"):
        quiet(num_nodes=nodes)


@pytest.mark.parametrize("devices", [[0, 1], "0,1"])
def test_a_list_of_devices_is_refused_where_a_cluster_deals_them(
    eight_gpus: None, monkeypatch: pytest.MonkeyPatch, devices: Any
) -> None:
    flags: dict[str, Any] = {**QUIET, "accelerator": "gpu", "strategy": "ddp"}
    assert Trainer(**flags, devices=devices).device_ids == [0, 1]
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match=r"devices=.*torchelastic started this process.*number"):
        Trainer(**flags, devices=devices)
    assert Trainer(**flags, devices=2).device_ids == [0, 1]


def test_a_root_is_a_folder_that_need_not_be_there_yet(tmp_path: Path) -> None:
    assert quiet(default_root_dir=tmp_path / "a" / "b").default_root_dir == str(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    with pytest.raises(MisconfigurationException, match="this path is a file"):
        quiet(default_root_dir=tmp_path / "file")


def test_a_root_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    flags: dict[str, Any] = {**QUIET, "default_root_dir": tmp_path / "new"}
    said = rf"default_root_dir='{tmp_path}/new'.*'{tmp_path}' is not writable.*another folder"
    for wanting in ({"logger": True}, {"callbacks": ModelCheckpoint(), "enable_checkpointing": True}):
        with pytest.raises(MisconfigurationException, match=said):
            Trainer(**{**flags, **wanting})
    Trainer(**flags)  # writes nothing
    Trainer(**{**flags, "logger": True, "fast_dev_run": True})
    elsewhere = ModelCheckpoint(dirpath=tmp_path / "elsewhere")
    Trainer(**{**flags, "callbacks": elsewhere, "enable_checkpointing": True})
