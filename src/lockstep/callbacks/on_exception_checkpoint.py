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
    """Saves a checkpoint when an exception (Ctrl-C among them) ends the training, and removes it after a fit that
    ends well.

    ``trainer.fit(..., ckpt_path="last")`` finds it where it is the newest checkpoint. An exception before
    training has begun leaves an earlier checkpoint alone, as do validation, test and prediction.

    The run goes on from the beginning of the window that was under way. Other ranks cannot be asked for
    anything when one has failed, so what each has to itself (random states, the sums of what was logged in
    this epoch) is not in the file, on one process neither, where the failed batch is half in it. An
    interruption by Ctrl-C, on which all ranks have agreed, is saved whole. On several ranks the first that
    fails writes, at a URL rank 0.

    As in Lightning it counts as a callback that saves checkpoints: the Trainer adds no ModelCheckpoint of its
    own beside it.

    Args:
        dirpath: folder or URL.
        filename: the file's name, without ``.ckpt``.

    Raises:
        ValueError: ``filename`` is empty.
        OSError: the folder cannot be written; when the fit is set up.

    Example::

        trainer = Trainer(callbacks=[OnExceptionCheckpoint("checkpoints"), ModelCheckpoint("checkpoints")])
        trainer.fit(model, ckpt_path="last")
    """

    FILE_EXTENSION = ".ckpt"
    best_model_path = ""

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not filename:
            raise ValueError(f"OnExceptionCheckpoint(filename={filename!r}): the file needs a name, without `.ckpt`.")
        self.dirpath = os.fspath(dirpath)
        self.filename = filename
        self._training = False
        self._before: float | None = None

    @property
    def ckpt_path(self) -> str:
        """The checkpoint's path."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    @property
    def state_key(self) -> str:
        """One for each path."""
        return self._generate_state_key(dirpath=self.dirpath, filename=self.filename)

    def find_last(self, trainer: Trainer) -> set[str]:
        """The checkpoint, if it is there."""
        return {self.ckpt_path} if storage.exists(self.ckpt_path) else set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out whether the folder can be written; until training begins there is nothing to save."""
        self._training = False
        if stage == "fit":
            storage.check_writable(self.dirpath)
            if trainer.is_global_zero and not storage.is_remote(self.dirpath):
                storage.remove(self._claim)  # of a rank that was killed while it wrote

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From here on there is."""
        self._training = True
        self._before = self._written()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Save, unless another rank has or does; a failure to save never hides the exception."""
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
            said = f"OnExceptionCheckpoint could not write {self.ckpt_path}: {type(failure).__name__}: {failure}"
            log.warning(rank_prefixed_message(said, rank))
        finally:
            if trainer.world_size > 1 and not agreed and not storage.is_remote(self.dirpath):
                storage.remove(self._claim)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A fit that has ended well needs the checkpoint no more."""
        if stage == "fit" and trainer.is_global_zero:
            trainer.strategy.remove_checkpoint(self.ckpt_path)

    # -- which rank ----------------------------------------------------------------------------------------

    @property
    def _claim(self) -> str:
        return os.path.join(self.dirpath, f".{self.filename}.claim")

    def _written(self) -> float | None:
        return storage.modified(self.ckpt_path) if storage.exists(self.ckpt_path) else None

    def _is_first(self, trainer: Trainer) -> bool:
        """Whether no other rank has written this fit's checkpoint or is writing it; asks nobody."""
        if trainer.world_size == 1:
            return True
        if storage.is_remote(self.dirpath):
            return trainer.is_global_zero
        if self._written() != self._before:
            return False
        with contextlib.suppress(OSError):
            os.makedirs(self.dirpath, exist_ok=True)
            os.close(os.open(self._claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_training": False}
