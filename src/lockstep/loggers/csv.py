"""CSVLogger: metrics in a table, hyperparameters in a YAML file."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.ground.rank import rank_zero_only, rank_zero_warn
from lockstep.loggers.base import FolderLogger, as_dict, rank_zero_experiment, write_hparams


class ExperimentWriter:
    """The files ``metrics.csv`` and ``hparams.yaml`` in `log_dir`.

    The table has a row for each call and a column for each name ever seen. Rows are held back until :meth:`save`.

    Args:
        log_dir: a local folder, which is made.
        go_on: add to a table that is there. By default a table that an earlier run left under this name is kept as
            ``metrics.1.csv`` (``.2`` ...).
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str, go_on: bool = False) -> None:
        self.log_dir = log_dir
        self.hparams: dict[str, Any] = {}
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        os.makedirs(log_dir, exist_ok=True)
        if go_on:
            self.read_columns()
        else:
            self._set_aside()

    def read_columns(self) -> None:
        """Take over the columns of the table as it is now: another process may have written to it."""
        if os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def _set_aside(self) -> None:
        earlier = Path(self.metrics_file_path)
        if not earlier.exists():
            return
        number = 1
        while earlier.with_suffix(f".{number}.csv").exists():
            number += 1
        aside = earlier.rename(earlier.with_suffix(f".{number}.csv"))
        rank_zero_warn(f"{self.log_dir!r} holds the metrics of an earlier run: they are kept as {aside.name!r}.")

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Add `params` to the hyperparameters known, and write all to ``hparams.yaml``."""
        self.hparams.update(params)
        write_hparams(self.log_dir, self.hparams, self.NAME_HPARAMS_FILE)

    @property
    def _fs(self) -> Any:  # Lightning's name, which subclasses in other packages read
        return import_module("fsspec.core").url_to_fs(self.log_dir)[0]

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row; tensors of one element become numbers."""
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics_dict.items()}
        row["step"] = len(self.metrics) if step is None else step
        self.metrics.append(row)

    def save(self) -> None:
        """Write the rows that are held back. A new column means that the table is written anew."""
        if not self.metrics:
            return
        new = {name for row in self.metrics for name in row} - set(self.metrics_keys)
        if new:
            self._add_columns(new)
        with open(self.metrics_file_path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []

    def _add_columns(self, new: set[str]) -> None:
        rows: list[dict[str, Any]] = []
        if self.metrics_keys:
            with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        self.metrics_keys = sorted({*self.metrics_keys, *new})
        # Beside and renamed: the rows of days must not depend on this moment.
        with storage.replacing(self.metrics_file_path) as binary:
            lines = _Lines()
            writer = csv.DictWriter(lines, self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
            binary.write("".join(lines).encode())


class _Lines(list[str]):
    """What `csv` writes to, line by line."""

    write = list.append


class CSVLogger(FolderLogger):
    """Keeps metrics in ``save_dir/name/version_N/metrics.csv`` and hyperparameters in ``hparams.yaml``.

    Args:
        save_dir: a local folder.
        name: the experiment; ``""`` or None: versions lie in `save_dir` itself.
        version: a number, or a string that is the folder's whole name. None: the next free number.
        prefix: put in front of the names of metrics, with ``-`` between.
        flush_logs_every_n_steps: rows are written to the disk whenever that many steps have passed, and
            whenever :meth:`save` is called.

    Example::

        Trainer(logger=CSVLogger("logs", name="digits"))
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._begun = False  # whether the table in the folder is this run's
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._flushed = 0  # how many times that many steps had passed when rows were last written

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The table's writer; on ranks other than 0 something that takes any call."""
        if self._experiment is None:
            with self._writing():
                self._experiment = ExperimentWriter(self.log_dir, go_on=self._begun)
            self._begun = True
        writer: ExperimentWriter = self._experiment
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row for `step`; by default steps are counted."""
        if step is None:
            step = len(self.experiment.metrics)
        self.experiment.log_metrics(self._prefixed(metrics), step)
        if (step + 1) // self._flush_logs_every_n_steps != self._flushed:
            self.save()
            self._flushed = (step + 1) // self._flush_logs_every_n_steps

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None, **_: object) -> None:
        """Add `params` to those known, and write all to ``hparams.yaml``."""
        self.hparams.update(as_dict(params))
        with self._writing():
            self.experiment.log_hparams(self.hparams)

    @rank_zero_only
    def save(self) -> None:
        """Write the rows that are held back."""
        if self._experiment is not None:
            with self._writing():
                self._experiment.save()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process adds to the table of this run: the rows so far are written, an earlier run's are
        # set aside, and what the copy writes is read before this one goes on.
        if rank_zero_only.rank == 0:
            if self._begun or os.path.exists(os.path.join(self.log_dir, ExperimentWriter.NAME_METRICS_FILE)):
                self.experiment.save()
                self._experiment = None
            self._begun = True
        return super().__getstate__()
