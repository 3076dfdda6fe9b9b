"""MLFlowLogger: sends metrics, hyperparameters and checkpoints to MLflow."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lockstep.ground.errors import missing_extra
from lockstep.ground.rank import rank_zero_info, rank_zero_only, warn_once
from lockstep.loggers.base import (
    Logger,
    SavesCheckpoints,
    Upload,
    Uploads,
    as_dict,
    as_yaml,
    flattened,
    prefixed,
    rank_zero_experiment,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


_FILE = "file:"
#: most parameters and most metrics that MLflow accepts in one message
_PARAMS, _METRICS = 100, 1000
#: MLflow's names for the ends of a run
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}
#: addresses that loggers have set in MLflow, which exports them as MLFLOW_TRACKING_URI: the user did not choose them
_announced: set[str] = set()


class MLFlowLogger(Logger):
    """Logger that sends metrics, hyperparameters and, with `log_model`, checkpoints to an MLflow run.

    Needs the extra ``mlflow``, which installs ``mlflow-skinny`` and the packages of its SQLite store. The full
    ``mlflow`` works too, and has a web page: ``mlflow ui --backend-store-uri <tracking_uri>``. The run is created on
    rank 0 when something is first logged.

    Args:
        experiment_name: name of the experiment; it is created if it does not exist.
        run_name: displayed name of the run; replaces the tag ``mlflow.runName``.
        tracking_uri: store of the runs: address of a server, ``sqlite:///runs.db`` or ``file:folder``. By default the
            variable ``MLFLOW_TRACKING_URI``, else the SQLite file ``mlflow.db`` in `save_dir`. (Without SQLAlchemy:
            files in `save_dir`, which newer MLflow accepts only with ``MLFLOW_ALLOW_FILE_STORE=true``.)
        tags: tags of the run.
        save_dir: folder of the store if there is no `tracking_uri`.
        log_model: upload checkpoints as artifacts, each to a folder of its name with ``metadata.yaml`` and
            ``aliases.txt``. ``"all"``: each when it is saved. True: those that exist at the end of the run, or each
            when it is saved if all are kept (``save_top_k=-1``).
        prefix: prefix of the names of metrics, followed by ``-``.
        artifact_location: destination of the artifacts of a new experiment; by default MLflow's choice for a
            `tracking_uri`, else ``artifacts`` in `save_dir`.
        run_id: id of an existing run to continue.
        synchronous: wait for each message (True) or send in the background (False); None: MLflow's default.

    Raises:
        ModuleNotFoundError: mlflow is not installed.

    Example::

        Trainer(logger=MLFlowLogger("digits", tracking_uri="http://localhost:5000")).fit(model)
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise missing_extra("mlflow", "mlflow", "MLFlowLogger")
        from mlflow.environment_variables import MLFLOW_TRACKING_URI

        self._save_dir: str | None = None
        uri = tracking_uri or MLFLOW_TRACKING_URI.get()
        if not tracking_uri and uri in _announced:
            uri = None  # the variable is another logger's doing
        if not uri:
            self._save_dir = os.fspath(save_dir or "./mlruns")
            uri = f"{_FILE}{self._save_dir}"
            if importlib.util.find_spec("sqlalchemy") is not None:
                uri = f"sqlite:///{os.path.join(self._save_dir, 'mlflow.db')}"
                artifact_location = artifact_location or Path(self._save_dir, "artifacts").absolute().as_uri()
        elif uri.startswith(_FILE):
            self._save_dir = uri.removeprefix(_FILE).removeprefix("//")
        self._tracking_uri = uri
        self._experiment_name = experiment_name
        self._experiment_id: str | None = None
        self._run_name = run_name
        self._run_id = run_id
        self.tags = tags
        self._prefix = prefix
        self._artifact_location = artifact_location
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._uploads = Uploads(log_model)
        self._client: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``MlflowClient``. The first read creates the run. On ranks other than 0, a dummy object."""
        if self._client is None:
            import mlflow
            from mlflow.environment_variables import MLFLOW_TRACKING_URI
            from mlflow.tracking import MlflowClient

            if self._save_dir is not None:
                os.makedirs(self._save_dir, exist_ok=True)
            if MLFLOW_TRACKING_URI.get() != self._tracking_uri:
                _announced.add(self._tracking_uri)
                mlflow.set_tracking_uri(self._tracking_uri)  # for the user's own calls of mlflow
            client = MlflowClient(self._tracking_uri)
            if self._run_id is None:
                self._run_id = self._create_run(client)
            else:
                self._experiment_id = client.get_run(self._run_id).info.experiment_id
            self._client = client
        return self._client

    def _create_run(self, client: MlflowClient) -> str:
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            self._experiment_id = found.experiment_id
        else:
            rank_zero_info(f"MLFlowLogger: created the experiment {self._experiment_name!r} at {self._tracking_uri}")
            self._experiment_id = client.create_experiment(self._experiment_name, self._artifact_location)
        if self._run_name is not None:
            self.tags = {**(self.tags or {}), MLFLOW_RUN_NAME: self._run_name}
        run_id: str = client.create_run(self._experiment_id, tags=resolve_tags(self.tags)).info.run_id
        return run_id

    @property
    def run_id(self) -> str | None:
        """Id of the MLflow run, created when rank 0 first reads this property; see :meth:`share` for other ranks."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the MLflow experiment, which is created with the run when rank 0 first reads this property."""
        _ = self.experiment
        return self._experiment_id

    @property
    def name(self) -> str | None:
        """Id (not the name) of the MLflow experiment, as in Lightning."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """Id of the MLflow run."""
        return self.run_id

    @property
    def save_dir(self) -> str | None:
        """Local folder in which MLflow stores runs; None if `tracking_uri` names a server or a database."""
        return self._save_dir

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        self._experiment_id, self._run_id = broadcast((self.experiment_id, self.run_id))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics that are numbers.

        Text is omitted with a warning. A name that MLflow refuses is changed with a warning.
        """
        from mlflow.entities import Metric

        now, found = int(time.time() * 1000), []
        for name, value in prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, str):
                warn_once(f"MLFlowLogger: the metric {name!r} is text, not a number, and is omitted. Log numbers only.")
                continue
            allowed = re.sub(r"[^a-zA-Z0-9_/. -]+", "", name)
            if allowed != name:
                warn_once(
                    f"MLFlowLogger: the metric {name!r} is recorded as {allowed!r}. MLflow accepts only letters, "
                    "digits, spaces and _ / . - in names.",
                    category=RuntimeWarning,
                )
            found.append(Metric(key=allowed, value=float(value), timestamp=now, step=step or 0))
        for start in range(0, len(found), _METRICS):
            self._log_batch(metrics=found[start : start + _METRICS])

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: object, **kwargs: object) -> None:
        """Record hyperparameters as text, truncated to MLflow's maximum length; nested names become ``outer/inner``.

        Args:
            params: hyperparameters by name, or a Namespace; values may be nested dicts.
        """
        from mlflow.entities import Param
        from mlflow.utils import validation

        # MLflow's limit has grown over its versions, and longer text is an error
        longest = getattr(validation, "MAX_PARAM_VAL_LENGTH", 250)
        found = [Param(name, str(value)[:longest]) for name, value in flattened(as_dict(params)).items()]
        for start in range(0, len(found), _PARAMS):
            self._log_batch(params=found[start : start + _PARAMS])

    def _log_batch(self, **content: list[Any]) -> None:
        self.experiment.log_batch(run_id=self.run_id, **content, **self._options)

    def after_save_checkpoint(self, checkpoint_callback: SavesCheckpoints) -> None:
        self._upload(self._uploads.after_save(checkpoint_callback))

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Upload checkpoints if `log_model` is set, and report the status of the run to MLflow."""
        if self._client is None:
            return
        self._upload(self._uploads.at_end())
        self.experiment.set_terminated(self.run_id, _STATUS.get(status, status))

    def _upload(self, uploads: list[Upload]) -> None:
        for upload in uploads:
            target = Path(upload.path).stem
            self.experiment.log_artifact(self.run_id, upload.path, target)
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "metadata.yaml").write_text(as_yaml(upload.metadata("Checkpoint")), encoding="utf-8")
                Path(folder, "aliases.txt").write_text(str(upload.aliases), encoding="utf-8")
                self.experiment.log_artifacts(self.run_id, folder, target)

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process logs to the same run, over its own connection.
        run = self.run_id if rank_zero_only.rank == 0 else self._run_id
        return {**self.__dict__, "_client": None, "_run_id": run}
