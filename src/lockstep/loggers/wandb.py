"""WandbLogger: metrics, media, hyperparameters and checkpoints to Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Module

from lockstep.ground.errors import MisconfigurationException, missing_extra
from lockstep.ground.rank import rank_zero_only, rank_zero_warn
from lockstep.loggers.base import (
    Logger,
    SavesCheckpoints,
    Upload,
    Uploads,
    as_dict,
    as_json,
    prefixed,
    rank_zero_experiment,
)

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from wandb import Run


#: the x axis of all metrics
STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Keeps metrics, media, hyperparameters and, if asked to, checkpoints in a run of Weights & Biases.

    Needs the extra ``wandb``. The run begins when something is first logged, on rank 0; it ends
    with the process, or by ``wandb.finish()``, so that ``fit`` and ``test`` share it.

    Args:
        name: the name shown for the run.
        save_dir: the folder in which ``wandb/`` is made.
        version: the id of the run; an id that exists is gone on with.
        offline: keep the run in files only; ``wandb sync`` uploads them later. As in W&B itself this holds for the
            whole process.
        dir: used where `save_dir` is None.
        id: used where `version` is None.
        anonymous: log without an account, where the installed wandb can.
        project: the project; by default the variable ``WANDB_PROJECT``, else ``"lightning_logs"``.
        log_model: upload checkpoints as artifacts of type ``model``, with the aliases ``latest`` and ``best``:
            ``"all"``: each when it is saved; True: what there is when a run has ended (each, if ``save_top_k=-1``).
        experiment: a run that ``wandb.init`` has given, to log to.
        prefix: put in front of the names of metrics, with ``-`` between.
        checkpoint_name: the name of the artifacts; ``"model-<run id>"`` by default.
        add_file_policy: "mutable" copies a checkpoint before it is uploaded, "immutable" trusts it to stay.
        **kwargs: handed to ``wandb.init``, such as ``entity``, ``group``, ``tags``, ``mode``.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        MisconfigurationException: `log_model` with `offline`: nothing can be uploaded then.

    Example::

        logger = WandbLogger(project="digits", log_model="all")
        logger.watch(model)
        Trainer(logger=logger).fit(model)
    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise missing_extra("wandb", "wandb", "WandbLogger")
        if offline and log_model:
            raise MisconfigurationException(
                f"WandbLogger(offline=True, log_model={log_model!r}): an offline run uploads no checkpoints; leave one "
                "of the two out. The checkpoints are in ModelCheckpoint's folder in any case."
            )
        folder = save_dir if save_dir is not None else dir
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or _project_of_environment() or "lightning_logs",
            "dir": None if folder is None else os.fspath(folder),
            "id": version or id,
            "resume": "allow",
        }
        if anonymous:
            self._wandb_init["anonymous"] = "allow"
        self._wandb_init.update(kwargs)
        self._offline = offline
        self._prefix = prefix
        self._experiment = experiment
        self._uploads = Uploads(log_model)
        self._checkpoint_name = checkpoint_name
        self.add_file_policy = add_file_policy
        self._project = self._wandb_init["project"]
        self._save_dir = self._wandb_init["dir"]
        self._id = self._wandb_init["id"]
        self._attach_id: str | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The ``wandb.Run``, begun if there is none yet; on ranks other than 0 something that takes any call."""
        if self._experiment is None:
            import wandb

            if wandb.run is not None:
                rank_zero_warn(
                    "WandbLogger logs to the W&B run that is already going on in this process. For a run of its own, "
                    "call `wandb.finish()` first."
                )
                self._experiment = wandb.run
            elif self._attach_id is not None:
                module: Any = wandb  # whose stub leaves this function out
                self._experiment = module._attach(self._attach_id)
            else:
                self._experiment = self._begin()
            self._id = self._experiment.id
        return self._experiment

    def _begin(self) -> Any:
        import wandb

        if self._offline:  # W&B's own reports too are to stay here
            wandb.setup(settings=wandb.Settings(mode="offline"))
            self._wandb_init.setdefault("mode", "offline")
        run = wandb.init(**self._wandb_init)
        if self._wandb_init.get("sync_tensorboard"):
            run.define_metric("*", step_metric="global_step")
        else:
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    @property
    def name(self) -> str | None:
        """The project. The run's own name is ``logger.experiment.name``."""
        return self._project

    @property
    def version(self) -> str | None:
        """The id of the run; None if there is none yet and none was given."""
        return self._experiment.id if self._experiment is not None else self._id

    @property
    def save_dir(self) -> str | None:
        """The folder that holds ``wandb/``."""
        return self._save_dir

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        if rank_zero_only.rank == 0:
            _ = self.experiment  # the folder of checkpoints is named by the id
        self._id = broadcast(self.version)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers and W&B's media by name."""
        row = prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            row[STEP] = step
        self.experiment.log(row)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: object, **kwargs: object) -> None:
        """Add `params` to the run's config; what JSON has no word for is written as its name."""
        self.experiment.config.update(as_json(as_dict(params)), allow_val_change=True)

    @rank_zero_only
    def watch(self, model: Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of gradients or parameters.

        Args:
            model: what to look at.
            log: ``"gradients"``, ``"parameters"``, ``"all"``, or None for the graph alone.
            log_freq: every how many backward passes.
            log_graph: record the structure of the model too.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def unwatch(self, model: Module | None = None) -> None:
        """Take the hooks of :meth:`watch` off `model`, or off all models."""
        self.experiment.unwatch(model)

    @rank_zero_only
    def log_table(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: pandas.DataFrame | None = None,
        step: int | None = None,
    ) -> None:
        """Record a table, whose cells may be media: from `columns` and rows of `data`, or from a `dataframe`."""
        import wandb

        self.log_metrics({key: wandb.Table(columns=columns, data=data, dataframe=dataframe)}, step)

    def log_text(
        self,
        key: str,
        columns: list[str] | None = None,
        data: list[list[str]] | None = None,
        dataframe: pandas.DataFrame | None = None,
        step: int | None = None,
    ) -> None:
        """Record a table of text; arguments as of :meth:`log_table`."""
        self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record tensors, arrays, PIL images or files; `kwargs` hold one item for each, such as ``caption``."""
        self._log_media("Image", "images", key, images, step, kwargs)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record arrays or files; `kwargs` hold one item for each, such as ``caption``, ``sample_rate``."""
        self._log_media("Audio", "audios", key, audios, step, kwargs)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record arrays or files; `kwargs` hold one item for each, such as ``caption``, ``fps``, ``format``."""
        self._log_media("Video", "videos", key, videos, step, kwargs)

    @rank_zero_only
    def _log_media(
        self, kind: str, argument: str, key: str, items: list[Any], step: int | None, kwargs: dict[str, list[Any]]
    ) -> None:
        if not isinstance(items, list):
            raise TypeError(f"log_{kind.lower()}({key!r}): {argument} is a {type(items).__name__}; give a list.")
        for name, values in kwargs.items():
            if len(values) != len(items):
                raise ValueError(
                    f"log_{kind.lower()}({key!r}): {name} has {len(values)} items for {len(items)} {argument}; give "
                    "one for each."
                )
        import wandb

        make = getattr(wandb, kind)
        each = [{name: values[index] for name, values in kwargs.items()} for index in range(len(items))]
        self.log_metrics({key: [make(item, **options) for item, options in zip(items, each, strict=True)]}, step)

    def after_save_checkpoint(self, checkpoint_callback: SavesCheckpoints) -> None:
        self._upload(self._uploads.after_save(checkpoint_callback))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload what `log_model` has left to the end, if the run was a success. The W&B run goes on."""
        if status == "success" and self._experiment is not None:
            self._upload(self._uploads.at_end())

    def _upload(self, uploads: list[Upload]) -> None:
        import wandb

        for upload in uploads:
            name = self._checkpoint_name = self._checkpoint_name or f"model-{self.experiment.id}"
            artifact = wandb.Artifact(name=name, type="model", metadata=upload.metadata(upload.kind))
            artifact.add_file(upload.path, name="model.ckpt", policy=self.add_file_policy)
            self.experiment.log_artifact(artifact, aliases=upload.aliases)

    @staticmethod
    @rank_zero_only
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Fetch an artifact from W&B, on rank 0; None elsewhere.

        Args:
            artifact: its name, ``"entity/project/model-<run id>:best"``.
            save_dir: the folder to put it in.
            artifact_type: its type, to be checked.
            use_artifact: tell W&B that the run of this process, if there is one, uses it.

        Returns:
            the folder that it is in.
        """
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        folder: str = found.download(root=None if save_dir is None else os.fspath(save_dir))
        return folder

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Tell W&B that this run uses `artifact`; gives the ``wandb.Artifact``."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def __getstate__(self) -> dict[str, Any]:
        # A process of ours logs to the same run: it is begun here, and attached to there through W&B's service.
        run = self.experiment if rank_zero_only.rank == 0 else None
        attach = getattr(run, "_attach_id", None)
        return {**self.__dict__, "_experiment": None, "_id": self.version, "_attach_id": attach}


def _project_of_environment() -> str | None:
    """``WANDB_PROJECT``, as W&B reads it; None where a stand-in of a test takes the place of the package."""
    try:
        from wandb.env import get_project
    except ImportError:
        return None
    return get_project()
