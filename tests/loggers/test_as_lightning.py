"""The loggers beside those of the installed Lightning: names, arguments, and what they write."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from lockstep import loggers
from lockstep.loggers.csv import CSVLogger

theirs = pytest.importorskip("lightning.pytorch.loggers")


def test_each_of_lightnings_loggers_is_here_or_says_why_not() -> None:
    there = {name for name in theirs.__all__ if name in loggers.__all__}
    assert there == {"CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"}
    for name in set(theirs.__all__) - there:
        with pytest.raises(AttributeError, match=f"lockstep.loggers.{name}: .* Log to"):
            getattr(loggers, name)


def test_arguments_are_those_of_lightning() -> None:
    for name in ("CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger"):
        wanted = inspect.signature(getattr(theirs, name)).parameters.values()
        found = inspect.signature(getattr(loggers, name)).parameters.values()
        assert [(each.name, each.default, each.kind) for each in found] == [
            (each.name, each.default, each.kind) for each in wanted
        ]
        public = {each for each in dir(getattr(theirs, name)) if not each.startswith("_")}
        assert public - set(dir(getattr(loggers, name))) == set()


def test_writes_the_table_that_lightning_writes(tmp_path: Path) -> None:
    tables = []
    for place, kind in (("ours", CSVLogger), ("theirs", theirs.CSVLogger)):
        logger = kind(tmp_path / place, name="n", version="v", prefix="p", flush_logs_every_n_steps=2)
        for step in range(5):
            logger.log_metrics({"loss": torch.tensor(step / 4), f"late{step // 3}": step}, step)
        logger.finalize("success")
        tables.append(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
    assert tables[0] == tables[1]
