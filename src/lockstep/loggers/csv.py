"""CSVLogger: writes metrics to a CSV table and hyperparameters to a YAML file."""

from __future__ import annotations

import csv
import io
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
    """Writer of the files ``metrics.csv`` and ``hparams.yaml`` in `log_dir`.

    The table has a row for each call of :meth:`log_metrics` and a column for each name. Rows are buffered until
    :meth:`save`.

    Args:
        log_dir: local folder; created if needed.
        append: add rows to an existing table. If False, the table of an earlier run is renamed to
            ``metrics.1.csv`` (``.2`` ...).
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str, append: bool = False) -> None:
        self.log_dir = log_dir
        self.hparams: dict[str, Any] = {}
        self.metrics: list[dict[str, Any]] = []
        self.metrics_keys: list[str] = []
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        os.makedirs(log_dir, exist_ok=True)
        table = Path(self.metrics_file_path)
        if append:
            self.read_columns()
        elif table.exists():
            number = 1
            while table.with_suffix(f".{number}.csv").exists():
                number += 1
            earlier = table.rename(table.with_suffix(f".{number}.csv"))
            rank_zero_warn(
                f"{self.log_dir!r} contains metrics from an earlier run; the file was renamed to {earlier.name!r}."
            )

    def read_columns(self) -> None:
        """Read the column names from the existing table, to which another process may have added columns."""
        if os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file), [])

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Add `params` to the hyperparameters, and write all of them to ``hparams.yaml``."""
        self.hparams.update(params)
        write_hparams(self.log_dir, self.hparams, self.NAME_HPARAMS_FILE)

    # Lightning's name, which subclasses in other packages read; fsspec is slow to import
    @property
    def _fs(self) -> Any:
        return import_module("fsspec.core").url_to_fs(self.log_dir)[0]

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Buffer a row of the table. Tensors of one element become numbers.

        Args:
            metrics_dict: numbers, or tensors of one element, by name.
            step: value of the column ``step``; None: the number of buffered rows.
        """
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics_dict.items()}
        row["step"] = len(self.metrics) if step is None else step
        self.metrics.append(row)

    def save(self) -> None:
        """Write the buffered rows to the table. If there is a new column, rewrite the whole table.

        Raises:
            OSError: the file cannot be written.
        """
        if not self.metrics:
            return
        new = {name for row in self.metrics for name in row} - set(self.metrics_keys)
        if new:
            rows: list[dict[str, Any]] = []
            if self.metrics_keys:
                with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
            self.metrics_keys = sorted({*self.metrics_keys, *new})
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
            # to a temporary file that is renamed: a kill here must not lose the rows of days
            with storage.replacing(self.metrics_file_path) as binary:
                binary.write(text.getvalue().encode())
        with open(self.metrics_file_path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        self.metrics = []


class CSVLogger(FolderLogger):
    """Logger that writes ``metrics.csv`` and ``hparams.yaml`` to ``save_dir/name/version_N``.

    Args:
        save_dir: local folder.
        name: name of the experiment; ``""`` or None: versions are in `save_dir` itself.
        version: number, or a string that is the whole name of the folder; None: the next free number.
        prefix: prefix of the names of metrics, followed by ``-``.
        flush_logs_every_n_steps: number of steps after which buffered rows are written; :meth:`save` writes them too.

    Raises:
        MisconfigurationException: `save_dir` is a URL, or, when something is logged, cannot be written.

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
        self._owns_table = False  # the table in the folder is this run's, not an earlier one's
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._flushes = 0  # intervals of that many steps that had passed when rows were last written

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The :class:`ExperimentWriter` on rank 0. On other ranks, an object that ignores all calls."""
        if self._experiment is None:
            with self._named_errors():
                self._experiment = ExperimentWriter(self.log_dir, append=self._owns_table)
            self._owns_table = True
        writer: ExperimentWriter = self._experiment
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Buffer a row for `step` (default: the number of buffered rows)."""
        if step is None:
            step = len(self.experiment.metrics)
        self.experiment.log_metrics(self._prefixed(metrics), step)
        # not `step % n`: with log_every_n_steps the steps of rows may never be multiples of n
        if (step + 1) // self._flush_logs_every_n_steps != self._flushes:
            self.save()
            self._flushes = (step + 1) // self._flush_logs_every_n_steps

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None, **_: object) -> None:
        """Add `params` to the hyperparameters, and write all to ``hparams.yaml``."""
        self.hparams.update(as_dict(params))
        with self._named_errors():
            self.experiment.log_hparams(self.hparams)

    @rank_zero_only
    def save(self) -> None:
        """Write the buffered rows to the table."""
        if self._experiment is not None:
            with self._named_errors():
                self._experiment.save()

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process adds to the table of this run. So write the rows so far, or rename the table of an
        # earlier run; and forget the columns, since the copy may add some before this process writes again.
        if rank_zero_only.rank == 0:
            if self._owns_table or os.path.exists(os.path.join(self.log_dir, ExperimentWriter.NAME_METRICS_FILE)):
                self.experiment.save()
                self._experiment = None
            self._owns_table = True
        return super().__getstate__()
