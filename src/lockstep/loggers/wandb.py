"""WandbLogger: sends metrics, media, hyperparameters and checkpoints to Weights & Biases."""

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


#: x axis of all metrics
STEP = "trainer/global_step"


class WandbLogger(Logger):
    """Logger that sends metrics, media, hyperparameters and, with `log_model`, checkpoints to a W&B run.

    Needs the extra ``wandb``. The run starts on rank 0 when something is first logged. It ends with the process or
    with ``wandb.finish()``, so that ``fit`` and ``test`` share a run.

    Args:
        name: displayed name of the run.
        save_dir: folder in which ``wandb/`` is made.
        version: id of the run; an existing run is continued.
        offline: keep the run in files only, which ``wandb sync`` uploads later. As in W&B itself, this applies to the
            whole process.
        dir: used if `save_dir` is None.
        id: used if `version` is None.
        anonymous: log without an account, if the installed wandb can.
        project: name of the project; by default the variable ``WANDB_PROJECT``, else ``"lightning_logs"``.
        log_model: upload checkpoints as artifacts of type ``model``, with the aliases ``latest`` and ``best``.
            ``"all"``: each when it is saved. True: those that exist at the end of the run, or each when it is saved
            if all are kept (``save_top_k=-1``).
        experiment: run to log to, from ``wandb.init``.
        prefix: prefix of the names of metrics, followed by ``-``.
        checkpoint_name: name of the artifacts; default ``"model-<run id>"``.
        add_file_policy: "mutable" copies a checkpoint before the upload; "immutable" does not, and the file must not
            change meanwhile.
        **kwargs: further arguments of ``wandb.init``, such as ``entity``, ``group``, ``tags``, ``mode``.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        MisconfigurationException: both `log_model` and `offline` are given.

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
                f"WandbLogger(offline=True, log_model={log_model!r}): an offline run cannot upload checkpoints. Remove "
                "one of the two arguments. The checkpoints are also in ModelCheckpoint's folder."
            )
        folder = save_dir if save_dir is not None else dir
        if not project:
            try:
                from wandb.env import get_project

                project = get_project()  # WANDB_PROJECT
            except ImportError:  # a stub that a user's test puts in the place of wandb
                pass
        self._wandb_init: dict[str, Any] = {
            "name": name,
            "project": project or "lightning_logs",
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
        """The ``wandb.Run``, started on first access; on ranks other than 0 an object that accepts any call."""
        if self._experiment is None:
            import wandb

            if wandb.run is not None:
                rank_zero_warn(
                    "There is a wandb run already in progress in this process, and WandbLogger logs to it. For a new "
                    "run call `wandb.finish()` first."
                )
                self._experiment = wandb.run
            elif self._attach_id is not None:
                module: Any = wandb  # its type stub lacks this function
                self._experiment = module._attach(self._attach_id)
            else:
                self._experiment = self._init_run()
            self._id = self._experiment.id
        return self._experiment

    def _init_run(self) -> Any:
        import wandb

        if self._offline:  # for the process: W&B's own usage reports must not leave this machine either
            wandb.setup(settings=wandb.Settings(mode="offline"))
            self._wandb_init.setdefault("mode", "offline")
        run = wandb.init(**self._wandb_init)
        # W&B's own step counts calls of log(), and one optimizer step may have several
        if self._wandb_init.get("sync_tensorboard"):
            run.define_metric("*", step_metric="global_step")
        else:
            run.define_metric(STEP)
            run.define_metric("*", step_metric=STEP, step_sync=True)
        return run

    @property
    def name(self) -> str | None:
        """Name of the project. The name of the run is ``logger.experiment.name``."""
        return self._project

    @property
    def version(self) -> str | None:
        """Id of the W&B run; None before the run starts if no id was passed."""
        return self._experiment.id if self._experiment is not None else self._id

    @property
    def save_dir(self) -> str | None:
        """Folder in which W&B creates its folder ``wandb``."""
        return self._save_dir

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        if rank_zero_only.rank == 0:
            _ = self.experiment  # starts the run: its id is in the path of ModelCheckpoint's folder
        self._id = broadcast(self.version)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics by name: numbers, or W&B media objects."""
        row = prefixed(metrics, self._prefix, self.LOGGER_JOIN_CHAR)
        if step is not None and not self._wandb_init.get("sync_tensorboard"):
            row[STEP] = step
        self.experiment.log(row)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: object, **kwargs: object) -> None:
        """Add `params` to the run's config; objects without a JSON type are converted to text."""
        self.experiment.config.update(as_json(as_dict(params)), allow_val_change=True)

    @rank_zero_only
    def watch(self, model: Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Let W&B record histograms of the model's gradients, parameters, or both.

        Args:
            model: module to watch.
            log: ``"gradients"``, ``"parameters"``, ``"all"``, or None for the graph alone.
            log_freq: number of backward passes between two records.
            log_graph: also record the structure of the model.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    @rank_zero_only
    def unwatch(self, model: Module | None = None) -> None:
        """Remove the hooks of :meth:`watch` from `model`; if `model` is None, from all models."""
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
        """Record a table, from column names and rows or from a dataframe; cells may be media.

        Args:
            key: name of the table.
            columns: names of the columns.
            data: rows, each a list with a cell per column.
            dataframe: pandas DataFrame, in place of columns and data.
            step: optimizer step.

        Example::

            logger.log_table("errors", columns=["text", "label"], data=[["a cat", 0], ["a dog", 1]])
        """
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
        """Record a table of texts; arguments are those of :meth:`log_table`.

        Cells are strings.
        """
        self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record images (tensors, arrays, PIL images or paths); `kwargs` are lists with one item per image.

        Args:
            key: name of the images.
            images: one item per image.
            step: optimizer step.
            kwargs: arguments of ``wandb.Image``, each a list with one item per image.

        Raises:
            TypeError: `images` is not a list.
            ValueError: a list in `kwargs` has another length.

        Example::

            logger.log_image("samples", [first, second], caption=["a cat", "a dog"])
        """
        self._log_media("Image", "images", key, images, step, kwargs)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record audio (arrays or paths); `kwargs` are lists with an item per clip, such as ``sample_rate``.

        Args:
            key: name of the audio.
            audios: one item per clip.
            step: optimizer step.
            kwargs: arguments of ``wandb.Audio``, each a list with one item per clip.

        Raises:
            TypeError: `audios` is not a list.
            ValueError: a list in `kwargs` has another length.
        """
        self._log_media("Audio", "audios", key, audios, step, kwargs)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **kwargs: list[Any]) -> None:
        """Record videos (arrays or paths); `kwargs` are lists with an item per video, such as ``fps``.

        Args:
            key: name of the video.
            videos: one item per clip.
            step: optimizer step.
            kwargs: arguments of ``wandb.Video``, each a list with one item per clip.

        Raises:
            TypeError: `videos` is not a list.
            ValueError: a list in `kwargs` has another length.
        """
        self._log_media("Video", "videos", key, videos, step, kwargs)

    @rank_zero_only
    def _log_media(
        self, kind: str, argument: str, key: str, items: list[Any], step: int | None, kwargs: dict[str, list[Any]]
    ) -> None:
        if not isinstance(items, list):
            raise TypeError(
                f"log_{kind.lower()}({key!r}): `{argument}` is a {type(items).__name__}, not a list. Pass a list."
            )
        for name, values in kwargs.items():
            if len(values) != len(items):
                raise ValueError(
                    f"log_{kind.lower()}({key!r}): {name} has {len(values)} items for {len(items)} {argument}. Pass "
                    "one item for each."
                )
        import wandb

        make = getattr(wandb, kind)
        each = [{name: values[index] for name, values in kwargs.items()} for index in range(len(items))]
        self.log_metrics({key: [make(item, **options) for item, options in zip(items, each, strict=True)]}, step)

    def after_save_checkpoint(self, checkpoint_callback: SavesCheckpoints) -> None:
        self._upload(self._uploads.after_save(checkpoint_callback))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload checkpoints if `log_model` is set and the fit succeeded; the W&B run stays open."""
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
        """Download an artifact from W&B on rank 0 and return its folder; other ranks return None.

        Args:
            artifact: name of the artifact: ``"entity/project/model-<run id>:best"``.
            save_dir: target folder; None: the one that W&B chooses.
            artifact_type: type that the artifact must have.
            use_artifact: record the artifact as an input of this process's run, if there is a run.

        Returns:
            the folder of the downloaded files.
        """
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        folder: str = found.download(root=None if save_dir is None else os.fspath(save_dir))
        return folder

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Declare an artifact as an input of this run, and return the ``wandb.Artifact``.

        Args:
            artifact: name of the artifact: ``"entity/project/name:alias"``.
            artifact_type: type that the artifact must have; None: any.
        """
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned process logs to the same run: start it here, and let the copy attach to it by W&B's service.
        run = self.experiment if rank_zero_only.rank == 0 else None
        attach = getattr(run, "_attach_id", None)
        return {**self.__dict__, "_experiment": None, "_id": self.version, "_attach_id": attach}
