"""What WandbLogger records, in offline runs, read back from the files that W&B would upload."""

from __future__ import annotations

import json
import struct
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.ground.rank import rank_zero_only
from lockstep.loggers.base import DummyExperiment
from lockstep.loggers.csv import CSVLogger
from lockstep.loggers.wandb import STEP, WandbLogger
from tests.loggers.runs import Net, fit

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing leaves this machine, and no process of W&B's outlives the test."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of_wandb"))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("WANDB_SERVICE", "")  # put back as it was: W&B sets it
    monkeypatch.delenv("WANDB_SERVICE")
    yield
    wandb.finish()
    wandb.teardown()


def records(folder: Path) -> list[Any]:
    """The messages in the file of the one run in `folder`, which ends."""
    wandb.finish()
    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 20
    while time.monotonic() < until:  # W&B's service writes on after finish() has returned
        found = read(path.read_bytes())
        if any(each.WhichOneof("record_type") == "exit" for each in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"W&B has not ended the run in {path}")


def read(data: bytes) -> list[Any]:
    """The messages in a log of LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    found, message, at = [], b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is filled up
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return found


def items(entries: Any) -> dict[str, Any]:
    return {each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in entries}


def rows(found: list[Any]) -> list[dict[str, Any]]:
    history = [items(each.history.item) for each in found if each.WhichOneof("record_type") == "history"]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in history]


def config(found: list[Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for each in found:
        kind = each.WhichOneof("record_type")
        if kind in ("config", "run"):
            merged.update(items((each.config if kind == "config" else each.run.config).update))
    return merged


def test_a_fit_and_a_test_in_one_run(tmp_path: Path) -> None:
    logger = WandbLogger("mine", tmp_path, project="digits", prefix="p", tags=["t"])
    model = Net(lr=0.5, more="relu")
    trainer = fit([logger, CSVLogger(tmp_path / "csv")], model)
    trainer.test(model, verbose=False)
    assert trainer.loggers[0].experiment is wandb.run
    assert (logger.name, logger.version, logger.save_dir) == ("digits", wandb.run.id, str(tmp_path))
    found = records(tmp_path)
    assert [(row["p-loss"], row[STEP]) for row in rows(found) if "p-loss" in row] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [(row["p-val"], row[STEP]) for row in rows(found) if "p-val" in row] == [(2, 1), (2, 3)]
    assert {"lr": 0.5, "more": "relu"}.items() <= config(found).items()
    (run,) = [each.run for each in found if each.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name, list(run.tags)) == ("digits", "mine", ["t"])
    axes = [each.metric for each in found if each.WhichOneof("record_type") == "metric"]
    assert any(each.glob_name == "*" and each.step_metric == STEP for each in axes)
    assert (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").exists()


def test_hyperparameters_as_json(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.log_hyperparams(
        Namespace(loss=nn.MSELoss, path=Path("a/b"), n=np.float32(0.5), deep={"f": nn.functional.relu})
    )
    logger.log_hyperparams({"n": 2, "t": torch.tensor(3)})
    expected = {"loss": "MSELoss", "path": "a/b", "n": 2, "deep": {"f": "relu"}, "t": 3}
    assert expected.items() <= config(records(tmp_path)).items()


def test_media_tables_and_text(tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    logger.log_image("images", [image, image], step=3, caption=["one", "two"])
    logger.log_table("table", columns=["a", "b"], data=[[1, "x"]])
    logger.log_text("text", columns=["a"], data=[["y"]], step=5)
    with pytest.raises(TypeError, match=r"log_image\('images'\): `images` is a ndarray, not a list"):
        logger.log_image("images", image)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="caption has 1 items for 2 images"):
        logger.log_image("images", [image, image], caption=["one"])
    found = rows(records(tmp_path))
    images = next(row for row in found if any(key.startswith("images") for key in row))
    assert images[STEP] == 3
    shown = images.get("images") or {key.partition("/")[2]: value for key, value in images.items()}
    assert (shown["count"], shown["captions"]) == (2, ["one", "two"])
    assert any(key.startswith("table") for row in found for key in row)
    assert any(key.startswith("text") and row[STEP] == 5 for row in found for key in row)


def test_audio_and_video_are_made_of_each_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = WandbLogger(save_dir=tmp_path, experiment=(run := FakeRun()))
    for kind in ("Audio", "Video"):  # W&B needs further packages to encode them
        monkeypatch.setattr(wandb, kind, lambda item, kind=kind, **options: (kind, item, options))
    logger.log_audio("a", ["x.wav"], sample_rate=[8000])
    logger.log_video("v", ["x.mp4", "y.mp4"], step=1, fps=[4, 5])
    assert run.logged == [
        {"a": [("Audio", "x.wav", {"sample_rate": 8000})]},
        {"v": [("Video", "x.mp4", {"fps": 4}), ("Video", "y.mp4", {"fps": 5})], STEP: 1},
    ]


def test_gradients_are_watched_until_they_are_not(tmp_path: Path) -> None:
    logger, model = WandbLogger(save_dir=tmp_path), nn.Linear(2, 1)
    logger.watch(model, log="all", log_freq=1)
    for step in range(2):
        model(torch.ones(1, 2)).sum().backward()
        logger.log_metrics({"a": 1.0}, step)
    logger.unwatch(model)
    model(torch.ones(1, 2)).sum().backward()
    logger.log_metrics({"a": 1.0}, 2)
    found = [row for row in rows(records(tmp_path)) if "a" in row]
    assert [any(key.startswith("gradients/weight") for key in row) for row in found] == [True, True, False]
    assert any(key.startswith("parameters/weight") for key in found[0])


class FakeRun:
    """Takes what a run takes, and remembers it."""

    id = "abc"

    def __init__(self) -> None:
        self.artifacts: list[Any] = []
        self.logged: list[Any] = []

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append(
            (artifact.name, artifact.type, list(artifact.manifest.entries), aliases, artifact.metadata)
        )

    def log(self, row: Any) -> None:
        self.logged.append(row)

    def define_metric(self, *args: Any, **kwargs: Any) -> None: ...

    config = SimpleNamespace(update=lambda *args, **kwargs: None)


@pytest.mark.parametrize(
    ("log_model", "top_k", "times", "aliases"),
    [
        (False, 1, 0, []),
        (True, 1, 1, [["latest", "best"]]),
        (True, -1, 2, [["latest", "best"], ["latest"]]),
        ("all", 1, 1, [["latest", "best"]]),
    ],
)
def test_checkpoints_as_artifacts(tmp_path: Path, log_model: Any, top_k: int, times: int, aliases: Any) -> None:
    logger = WandbLogger(save_dir=tmp_path, log_model=log_model, experiment=(run := FakeRun()))
    keep = ModelCheckpoint(tmp_path / "kept", monitor="val", save_top_k=top_k)
    fit(logger, enable_checkpointing=True, callbacks=[keep])
    assert [each[:3] for each in run.artifacts] == [("model-abc", "model", ["model.ckpt"])] * times
    assert [each[3] for each in run.artifacts] == aliases
    if run.artifacts:
        metadata = run.artifacts[0][4]
        assert metadata["score"] == 2.0
        assert metadata["original_filename"] == "epoch=0-step=2.ckpt"
        assert metadata["ModelCheckpoint"]["monitor"] == "val"
        assert metadata["ModelCheckpoint"]["save_top_k"] == top_k


def test_artifacts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def artifact(name: str, type: str | None = None) -> Any:
        asked.append((name, type))
        return SimpleNamespace(download=lambda root: root)

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=artifact))
    assert WandbLogger.download_artifact("a/b:best", tmp_path, "model") == str(tmp_path)
    run: Any = SimpleNamespace(use_artifact=lambda name, type=None: ("used", name, type), id="x")
    assert WandbLogger(experiment=run).use_artifact("a/b:best", "model") == ("used", "a/b:best", "model")
    assert asked == [("a/b:best", "model")]


def test_a_run_that_goes_on_is_taken_over(tmp_path: Path) -> None:
    run = wandb.init(dir=tmp_path, project="own")
    with pytest.warns(UserWarning, match=r"wandb run already in progress.*wandb\.finish\(\)"):
        assert WandbLogger(save_dir=tmp_path).experiment is run


def test_other_ranks_begin_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = WandbLogger(save_dir=tmp_path)
    logger.share(lambda value: "from_zero")
    logger.log_metrics({"a": 1.0}, 0)
    logger.watch(nn.Linear(1, 1))
    logger.finalize("success")
    assert isinstance(logger.experiment, DummyExperiment)
    assert (logger.version, wandb.run) == ("from_zero", None)


def test_offline_starts_nothing_that_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    assert logger.experiment.offline
    assert rows(records(tmp_path)) == []
