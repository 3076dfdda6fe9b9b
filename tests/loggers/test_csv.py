"""The table of CSVLogger."""

from __future__ import annotations

import csv
import os
import pickle
import warnings
from pathlib import Path

from lockstep.loggers.csv import CSVLogger


def rows(logger: CSVLogger, name: str = "metrics.csv") -> list[dict[str, str]]:
    with open(Path(logger.log_dir, name), newline="") as file:
        return list(csv.DictReader(file))


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


def test_a_spawned_copy_and_the_original_write_one_table(tmp_path: Path) -> None:
    """A test() after a ddp_spawn fit found the table that the spawned process had written, and set it aside."""
    logger = CSVLogger(tmp_path, version=0)
    spawned = pickle.loads(pickle.dumps(logger))  # what a spawned rank 0 gets
    spawned.log_metrics({"loss": 1.0}, 0)
    spawned.finalize("success")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_metrics({"test_loss": 2.0}, 1)
        logger.finalize("success")
        again = pickle.loads(pickle.dumps(logger))
        again.log_metrics({"loss": 3.0, "later": 4.0}, 2)
        again.finalize("success")
        logger.log_metrics({"loss": 5.0}, 3)
        logger.finalize("success")
    assert os.listdir(logger.log_dir) == ["metrics.csv"]
    assert list(rows(logger)[0]) == ["later", "loss", "step", "test_loss"]
    assert [row["step"] for row in rows(logger)] == ["0", "1", "2", "3"]
    assert [row["loss"] for row in rows(logger)] == ["1.0", "", "3.0", "5.0"]


def test_the_writer_keeps_hyperparameters_too(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    writer = logger.experiment
    assert (writer.NAME_METRICS_FILE, writer.NAME_HPARAMS_FILE) == ("metrics.csv", "hparams.yaml")
    writer.log_hparams({"a": 1})
    writer.log_hparams({"b": 2})
    assert writer.hparams == {"a": 1, "b": 2}
    assert Path(logger.log_dir, "hparams.yaml").read_text() == "a: 1\nb: 2\n"
