"""OnExceptionCheckpoint: saves the run when an exception ends its training."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.checkpoint import storage
from lockstep.ground.rank import log, rank_prefixed_message

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Callback that saves a checkpoint when an exception (including Ctrl-C) ends the training.

    The checkpoint is removed after a successful fit.

    ``trainer.fit(..., ckpt_path="last")`` finds it if it is the newest checkpoint. An exception before
    training has started keeps an earlier checkpoint, as do validation, test and prediction.

    The run resumes from the start of the interrupted window. The ranks cannot communicate after one of them has failed,
    so the states of single ranks (random states, the sums of values logged in this epoch) are not in the file. The same
    holds on one process, because the failed batch has already changed them. An interruption by Ctrl-C on which all
    ranks have agreed is saved completely. On several ranks the first that fails writes; at a URL, rank 0 does.

    As in Lightning it counts as a callback that saves checkpoints: the Trainer does not add its own ModelCheckpoint.

    Args:
        dirpath: folder or URL.
        filename: name of the file, without ``.ckpt``.

    Raises:
        ValueError: ``filename`` is empty.
        OSError: the folder cannot be written; raised at the setup of the fit.

    Example::

        trainer = Trainer(callbacks=[OnExceptionCheckpoint("checkpoints"), ModelCheckpoint("checkpoints")])
        trainer.fit(model, ckpt_path="last")
    """

    FILE_EXTENSION = ".ckpt"
    best_model_path = ""

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError(
                f"OnExceptionCheckpoint(filename={filename!r}): the name is empty. Pass a name without `.ckpt`."
            )
        self.dirpath = os.fspath(dirpath)
        self.filename = filename
        self._training = False
        self._time_before: float | None = None

    @property
    def ckpt_path(self) -> str:
        """Path of the checkpoint."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    @property
    def state_key(self) -> str:
        """Key of the state in checkpoints, different for each path."""
        return self._generate_state_key(dirpath=self.dirpath, filename=self.filename)

    def find_last(self, trainer: Trainer) -> set[str]:
        """Return a set with the checkpoint's path if the file exists; else an empty set."""
        return {self.ckpt_path} if storage.exists(self.ckpt_path) else set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise if the folder is not writable; disable saving until training starts."""
        self._training = False
        if stage == "fit":
            storage.check_writable(self.dirpath)
            if trainer.is_global_zero and not storage.is_remote(self.dirpath):
                storage.remove(self._claim)  # left by a rank that was killed while it wrote

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enable saving, now that training starts."""
        self._training = True
        self._time_before = self._time_written()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save a checkpoint; only one rank saves if the ranks cannot cooperate.

        If the save fails, its error is logged and not raised.
        """
        if not self._training:
            return
        self._training = False
        agreed = isinstance(exception, KeyboardInterrupt) and trainer.interruption is not None
        if not agreed and not self._is_first(trainer):
            return
        try:
            if agreed:
                trainer.save_checkpoint(self.ckpt_path)
            else:
                trainer.fit_loop.save_alone(self.ckpt_path)
        except Exception as failure:
            rank = trainer.global_rank if trainer.world_size > 1 else None
            message = f"OnExceptionCheckpoint could not write {self.ckpt_path}: {type(failure).__name__}: {failure}"
            log.warning(rank_prefixed_message(message, rank))
        finally:
            if trainer.world_size > 1 and not agreed and not storage.is_remote(self.dirpath):
                storage.remove(self._claim)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Delete the checkpoint after a successful fit."""
        if stage == "fit" and trainer.is_global_zero:
            trainer.strategy.remove_checkpoint(self.ckpt_path)

    # -- the rank that writes ------------------------------------------------------------------------------

    @property
    def _claim(self) -> str:
        return os.path.join(self.dirpath, f".{self.filename}.claim")

    def _time_written(self) -> float | None:
        return storage.modified(self.ckpt_path) if storage.exists(self.ckpt_path) else None

    def _is_first(self, trainer: Trainer) -> bool:
        """Return True if this rank is the first that starts to write the checkpoint. Not a collective."""
        if trainer.world_size == 1:
            return True
        if storage.is_remote(self.dirpath):
            return trainer.is_global_zero
        if self._time_written() != self._time_before:
            return False
        with contextlib.suppress(OSError):
            os.makedirs(self.dirpath, exist_ok=True)
            # ranks cannot agree any more, since one has failed; the file system lets only one make the file
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": False}
