"""Checkpoints in parts at URLs: whole or not there, on a store of objects and on one of files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from lockstep.callbacks import ModelCheckpoint
from lockstep.checkpoint import dcp, sharded, storage
from lockstep.cli.checkpoint import checkpoint as command
from tests.checkpoint.test_sharded import Falls, check_same, fit_to, fsdp, whole_of
from tests.equivalence.models import rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


def at(kind: str, folder: Path | str) -> str:
    """A URL within a folder, in this process."""
    if kind == "files":
        return f"local://{folder}"
    fsspec.register_implementation("objects", "tests.checkpoint.objects.Objects", clobber=True)
    os.environ["LOCKSTEP_TEST_OBJECTS"] = str(folder)
    return "objects:///run"


@pytest.fixture(params=["objects", pytest.param("files", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOCKSTEP_TEST_OBJECTS", "")
    return str(request.param)


def on_rank(kind: str, folder: str, act: Any, *args: Any) -> Any:
    """`act(url, ...)` on a rank, which is left as it was."""
    with patch.dict(os.environ):
        return act(at(kind, folder), *args)


@pytest.fixture(scope="module")
def samples(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """By the kind of URL the folder that two ranks have saved at one, and what they had; each made once."""

    @cache
    def made(kind: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, ranks(2).run(on_rank, kind, str(folder), saves, 2, timeout=60)[0]

    return made


@pytest.fixture
def saved(samples: Callable[[str], tuple[Path, dict[str, Any]]], kind: str, tmp_path: Path) -> dict[str, Any]:
    """A copy of it; what the ranks had."""
    folder, live = samples(kind)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return live


def saves(url: str, steps: int) -> dict[str, Any]:
    return fit_to(steps, "fsdp", None, f"{url}/two.ckpt")


def resumes(url: str) -> list[dict[str, Any]]:
    return [fit_to(5, "fsdp", f"{url}/two.ckpt"), fit_to(5, "fsdp")]


def test_a_folder_at_a_url_is_what_one_on_this_machine_is(
    ranks: RankPool, tmp_path: Path, kind: str, saved: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    url = at(kind, tmp_path)
    assert sharded.is_sharded(f"{url}/two.ckpt")
    assert storage.names(url) == ["two.ckpt"]
    check_same(sharded.load(f"{url}/two.ckpt"), saved)
    for again, once in ranks(2).run(on_rank, kind, str(tmp_path), resumes, timeout=60):
        assert all(torch.equal(again["weights"][name], value) for name, value in once["weights"].items())
    with storage.opened(f"{url}/two.ckpt/index.json") as file:
        index = json.loads(file.read())
    prefix = os.path.dirname(next(iter(index["files"])))
    state: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in saved["weights"].items()}}
    torch.distributed.checkpoint.load(state, storage_reader=FsspecReader(f"{url}/two.ckpt/{prefix}"), no_dist=True)
    assert all(torch.equal(state["model"][name], value) for name, value in saved["weights"].items())
    assert command(["show", f"{url}/two.ckpt"]) == 0
    assert command(["convert", f"{url}/two.ckpt", str(tmp_path / "one.ckpt")]) == 0
    assert command(["convert", str(tmp_path / "one.ckpt"), f"{url}/parts.ckpt", "--to", "parts"]) == 0
    assert command(["diff", f"{url}/two.ckpt", f"{url}/parts.ckpt", "--all"]) == 0
    said = capsys.readouterr().out
    assert "kind: folder of 7 files" in said
    assert "hashes: valid" in said


def fails(url: str) -> str:
    """Rank 1 cannot write its part."""
    full = OSError(28, "no space left") if dist.get_rank() == 1 else None
    with patch.object(dcp.HashedFile, "write", side_effect=full) if full else patch.dict(os.environ):
        try:
            saves(url, 3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.usefixtures("saved")
def test_the_earlier_one_stays_until_the_next_is_whole(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    url = at(kind, tmp_path)
    path = f"{url}/two.ckpt"
    said = ranks(2).run(on_rank, kind, str(tmp_path), fails, timeout=60)
    assert "rank 1: OSError" in said[0]
    assert "no space left" in said[1].lower()
    assert sharded.load(path)["global_step"] == 2
    assert len(storage.names(path)) == 2  # the index, and one folder
    left = f"{path}/parts-dead/__0_0.distcp"  # by a writer that was killed
    fsspec.core.url_to_fs(url)[0].makedirs(storage.inside(path, "parts-dead").partition("://")[2], exist_ok=True)
    with storage.create(left) as file:
        file.write(b"half")
    assert sharded.load(path)["global_step"] == 2
    ranks(2).run(on_rank, kind, str(tmp_path), saves, 4, timeout=60)
    assert sharded.load(path)["global_step"] == 4
    assert len(storage.names(path)) == 2
    storage.remove(path)
    assert not storage.exists(path)
    assert storage.names(url) == []


def test_a_first_one_that_was_not_finished_is_none(tmp_path: Path, kind: str) -> None:
    url = at(kind, tmp_path)
    new = storage.new_folder(f"{url}/half.ckpt")
    with storage.create(f"{new.path}/__0_0.distcp") as file:
        file.write(b"half")
    assert storage.names(url) == []
    assert not storage.exists(f"{url}/half.ckpt")
    assert not sharded.is_sharded(f"{url}/half.ckpt")
    storage.remove(f"{url}/half.ckpt")
    assert os.listdir(tmp_path / "run" if (tmp_path / "run").exists() else tmp_path) == []


def keeps(url: str) -> tuple[list[str], int, bool]:
    keeper = ModelCheckpoint(url, save_top_k=1, monitor="loss", save_last=True)

    def trainer(epochs: int) -> Any:
        torch.manual_seed(5)
        strategy = fsdp(async_save=True) if epochs == 3 else fsdp()
        flags: dict[str, Any] = {"devices": 2, "precision": "64-true", "enable_checkpointing": True}
        return quiet(strategy=strategy, max_epochs=epochs, callbacks=[keeper], **flags)

    trainer(3).fit(Falls(), rows(24)(4))
    here = storage.names(url)
    keeper = ModelCheckpoint(url, save_last=True)
    resumed = trainer(4)
    resumed.fit(Falls(), rows(24)(4), ckpt_path="last")
    torch.manual_seed(5)
    straight = quiet(strategy=fsdp(), max_epochs=4, devices=2, precision="64-true")
    straight.fit(Falls(), rows(24)(4))
    both = [whole_of(each)["weights"] for each in (resumed, straight)]
    return here, resumed.current_epoch, all(torch.equal(both[0][name], both[1][name]) for name in both[1])


def test_model_checkpoint_keeps_and_finds_folders_at_urls(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for here, epoch, equal in ranks(2).run(on_rank, kind, str(tmp_path), keeps, timeout=60):
        assert here == ["epoch=2-step=9.ckpt", "last.ckpt"]
        assert epoch == 4
        assert equal


def lost(_: str) -> str:
    try:
        saves("memory://run", 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_url_that_each_rank_sees_for_itself_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks(2).run(on_rank, "files", str(tmp_path), lost, timeout=60):
        assert "Save to a URL that is the same storage on all ranks" in said
