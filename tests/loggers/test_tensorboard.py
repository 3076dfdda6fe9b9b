"""What TensorBoardLogger writes, read back with TensorBoard's own reader."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.loggers.csv import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger, default_logger

pytest.importorskip("tensorboard")


def events(folder: str | Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_scalars(tmp_path: Path) -> None:
    threads = threading.active_count()
    logger = TensorBoardLogger(tmp_path, prefix="run", flush_secs=60)
    logger.log_metrics({"loss": torch.tensor(0.5), "n": 3}, step=7)
    logger.log_metrics({"loss": 0.25}, step=8)
    logger.save()
    loss = events(logger.log_dir).Scalars("run-loss")
    assert [(event.step, event.value) for event in loss] == [(7, 0.5), (8, 0.25)]
    logger.log_metrics({"both": {"a": 1, "b": 2}}, step=1)
    logger.finalize("success")
    assert events(Path(logger.log_dir, "run-both_b")).Scalars("run-both")[0].value == 2
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("default", "metrics", "expected"),
    [
        (True, None, {"hp_metric": -1.0}),
        (True, {"acc": 0.5}, {"acc": 0.5}),
        (False, 2, {"hp_metric": 2.0}),
        (False, None, {}),
    ],
)
def test_hyperparameters_with_their_metrics(
    tmp_path: Path, default: bool, metrics: Any, expected: dict[str, float]
) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    params = {"lr": torch.tensor(0.5), "model": {"depth": 3}, "loss": nn.MSELoss, "none": None, "flag": True}
    logger.log_hyperparams(params, metrics)
    logger.finalize("success")
    assert Path(logger.log_dir, "hparams.yaml").read_text().startswith("lr: 0.5\nmodel:\n  depth: 3\n")
    read = events(logger.log_dir)
    assert {tag: read.Scalars(tag)[0].value for tag in read.Tags()["scalars"]} == expected
    if expected:
        from tensorboard.plugins.hparams import plugin_data_pb2

        content = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        shown = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
        assert set(shown) == {"lr", "model/depth", "loss", "none", "flag"}
        assert shown["lr"].number_value == 0.5
        assert shown["model/depth"].number_value == 3


def test_sub_dir(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, version=2, sub_dir="train")
    assert logger.log_dir == str(tmp_path / "lightning_logs" / "version_2" / "train")
    assert logger.sub_dir == "train"


class Net(nn.Linear):
    example_input_array: Any = torch.ones(1, 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_graph(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    net = Net(2, 1)
    logger.log_graph(net)
    logger.finalize("success")
    assert events(logger.log_dir).Tags()["graph"]
    net.example_input_array = None
    with pytest.warns(UserWarning, match="example_input_array is a NoneType"):
        logger.log_graph(net)
    quiet = TensorBoardLogger(tmp_path)
    quiet.log_graph(net)
    assert quiet._experiment is None


def test_default_logger_and_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(default_logger(tmp_path), TensorBoardLogger)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert type(default_logger(tmp_path)) is CSVLogger
    with pytest.raises(ModuleNotFoundError, match=r'pip install "torch-lockstep\[tensorboard\]"'):
        TensorBoardLogger(tmp_path)
