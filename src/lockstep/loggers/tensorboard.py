"""TensorBoardLogger, and `default_logger`, which chooses the logger of ``Trainer(logger=True)``."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn import Module

from lockstep.ground.errors import missing_extra
from lockstep.ground.rank import rank_zero_only, rank_zero_warn
from lockstep.ground.transfer import move_data_to_device
from lockstep.loggers.base import FolderLogger, Logger, as_dict, flattened, rank_zero_experiment
from lockstep.loggers.csv import CSVLogger


def default_logger(root_dir: str | os.PathLike[str]) -> Logger:
    """Return the logger of ``Trainer(logger=True)``: TensorBoardLogger if tensorboard is installed, else CSVLogger."""
    return (TensorBoardLogger if _is_installed() else CSVLogger)(root_dir)


def _is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardLogger(FolderLogger):
    """Logger that writes TensorBoard files to ``save_dir/name/version_N``.

    Hyperparameters are recorded for TensorBoard and in ``hparams.yaml``. View both with
    ``tensorboard --logdir save_dir``. Needs the extra ``tensorboard``.

    Args:
        save_dir: local folder.
        name: name of the experiment; ``""`` or None: versions are in `save_dir` itself.
        version: number, or a string that is the whole name of the folder; None: the next free number.
        log_graph: record the graph of the model, which needs an ``example_input_array``.
        default_hp_metric: record hyperparameters without a metric with ``hp_metric`` = -1. TensorBoard shows no
            hyperparameters without a metric.
        prefix: prefix of the names of metrics, followed by ``-``.
        sub_dir: subfolder of the version's folder for the files of TensorBoard.
        kwargs: further arguments of ``torch.utils.tensorboard.SummaryWriter``, such as ``max_queue``, ``flush_secs``.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
        MisconfigurationException: `save_dir` is a URL, or, when something is logged, cannot be written.

    Example::

        Trainer(logger=TensorBoardLogger("logs", name="digits"))
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not _is_installed():
            raise missing_extra("tensorboard", "tensorboard", "TensorBoardLogger")
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.path.expandvars(os.path.expanduser(os.fspath(sub_dir)))
        self._kwargs = kwargs

    @property
    def sub_dir(self) -> str | None:
        """Value of the argument ``sub_dir``: subfolder for TensorBoard's files, or None."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        return os.path.join(super().log_dir, self._sub_dir or "").rstrip(os.sep)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``SummaryWriter`` of rank 0. Other ranks get an object that accepts and ignores any call."""
        if self._experiment is None:
            from torch.utils.tensorboard import SummaryWriter

            with self._named_errors():
                self._experiment = SummaryWriter(log_dir=self.log_dir, **self._kwargs)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics: a number as one curve, a dict of numbers as several curves in one chart.

        Raises:
            ValueError: a value is neither a number nor a dict of numbers.
        """
        for name, value in self._prefixed(metrics).items():
            if isinstance(value, Mapping):
                self.experiment.add_scalars(name, value, step)
                continue
            try:
                number = float(value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"log_metrics: {name!r} is {value!r}, not a number; log numbers, tensors of one element, or dicts "
                    "of them."
                ) from error
            self.experiment.add_scalar(name, number, step)

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Record hyperparameters, with resulting `metrics` (by name, or a single number) for TensorBoard's table.

        Args:
            params: hyperparameters by name, or a Namespace; values may be nested dicts.
            metrics: metrics by name, or one number, which is named ``hp_metric``; None: see `default_hp_metric` in the
                class.
            step: optimizer step of the metrics.

        Raises:
            ValueError: a metric is neither a number nor a dict of numbers.
            MisconfigurationException: the folder is not writable.
        """
        self.hparams.update(as_dict(params))
        self._write_hparams()
        if metrics is None and self._default_hp_metric:
            metrics = -1
        if metrics is None:  # without a metric TensorBoard would not show them
            return
        by_name = metrics if isinstance(metrics, dict) else {"hp_metric": metrics}
        self.log_metrics(by_name, step)
        from torch.utils.tensorboard.summary import hparams

        values = {name: _plain_value(value) for name, value in flattened(as_dict(params)).items()}
        writer = self.experiment._get_file_writer()
        for summary in hparams(values, {name: float(value) for name, value in by_name.items()}):
            writer.add_summary(summary, step)

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | tuple[Any, ...] | None = None) -> None:
        """Record the model's graph if the logger was created with ``log_graph=True``. Warn without an example input.

        Args:
            model: module to trace.
            input_array: input of the module's ``forward``: a tensor with a batch dimension, or a tuple of all
                arguments; None: ``model.example_input_array``.
        """
        if not self._log_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if not isinstance(example, (Tensor, tuple)):
            rank_zero_warn(
                "TensorBoardLogger(log_graph=True): the graph is not recorded, because the model's "
                f"example_input_array is a {type(example).__name__}. Assign a tensor, or a tuple of all arguments of "
                "forward."
            )
            return
        parameter = next(model.parameters(), None)
        if parameter is not None:
            example = move_data_to_device(example, parameter.device)
        module: Any = model
        # torch.jit.trace reads every property, and those that need a Trainer raise without one
        is_detached = getattr(module, "_trainer", self) is None
        with module._seen_by_torchscript() if is_detached else nullcontext():
            self.experiment.add_graph(model, example)

    @rank_zero_only
    def save(self) -> None:
        """Write buffered values to the file."""
        if self._experiment is not None:
            self._experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file; later values are written to a second file in the same folder."""
        if self._experiment is not None:
            self._experiment.close()
            self._experiment = None


def _plain_value(value: object) -> bool | int | float | str:
    """Convert a hyperparameter to a number or text for TensorBoard."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    return value if isinstance(value, (bool, int, float, str)) else str(value)
