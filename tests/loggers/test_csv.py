"""The table of CSVLogger."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path

import pytest
import torch

from lockstep.loggers.csv import CSVLogger


def rows(logger: CSVLogger, name: str = "metrics.csv") -> list[dict[str, str]]:
    with open(Path(logger.log_dir, name), newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_for_each_call(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, prefix="run")
    logger.log_metrics({"loss": torch.tensor(0.5), "n": 3}, step=7)
    logger.log_metrics({"loss": 0.25})
    logger.save()
    assert rows(logger) == [
        {"run-loss": "0.5", "run-n": "3", "step": "7"},
        {"run-loss": "0.25", "run-n": "", "step": "1"},
    ]


def test_columns_may_come_later(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step, metrics in enumerate([{"b": 1.0}, {"b": 2.0}, {"a,\n": 3.0, "b": 4.0}, {"c": 5.0}]):
        logger.log_metrics(metrics, step)
        logger.save()
    assert [row["step"] for row in rows(logger)] == ["0", "1", "2", "3"]
    assert list(rows(logger)[0]) == ["a,\n", "b", "c", "step"]
    assert [row["b"] for row in rows(logger)] == ["1.0", "2.0", "4.0", ""]
    assert rows(logger)[2]["a,\n"] == "3.0"
    assert os.listdir(logger.log_dir) == ["metrics.csv"]


def test_flushed_whenever_n_steps_have_passed(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=10)
    written = []
    for step in range(0, 30, 4):  # never exactly at a tenth step
        logger.log_metrics({"a": step}, step)
        path = Path(logger.log_dir, "metrics.csv")
        written.append(len(rows(logger)) if path.exists() else 0)
    assert written == [0, 0, 0, 4, 4, 6, 6, 6]
    logger.finalize("success")
    assert len(rows(logger)) == 8


def test_appends_without_reading_the_table_again(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, 0)
    logger.save()
    inode = Path(logger.log_dir, "metrics.csv").stat().st_ino
    logger.log_metrics({"a": 2}, 1)
    logger.save()
    logger.save()
    assert Path(logger.log_dir, "metrics.csv").stat().st_ino == inode
    assert len(rows(logger)) == 2


def test_the_same_version_again_starts_a_table_and_keeps_the_earlier(tmp_path: Path) -> None:
    for run in range(3):
        logger = CSVLogger(tmp_path, version="mine")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger.log_metrics({"a": run}, 0)
        logger.finalize("success")
        assert len(caught) == (run > 0)
        assert all(f"'metrics.{run}.csv'" in str(warning.message) for warning in caught)
    assert sorted(os.listdir(logger.log_dir)) == ["metrics.1.csv", "metrics.2.csv", "metrics.csv"]
    assert [rows(logger, name)[0]["a"] for name in ("metrics.1.csv", "metrics.2.csv", "metrics.csv")] == list("012")


def test_an_explicit_version_beside_checkpoints_does_not_warn(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    Path(logger.log_dir, "checkpoints").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"a": 1}, 0)


def test_a_tensor_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        CSVLogger(tmp_path).log_metrics({"a": torch.ones(2)}, 0)
