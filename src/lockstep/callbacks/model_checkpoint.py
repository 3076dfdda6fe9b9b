"""ModelCheckpoint: saves a run at chosen times, names the checkpoints, and deletes those that are no longer needed."""

from __future__ import annotations

import os
import secrets
import shutil
import time
import weakref
from collections.abc import Sequence
from copy import copy, deepcopy
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.callbacks.checkpoint_folder import FolderClaim, checkpoints_since, fill, name_pattern
from lockstep.checkpoint import storage
from lockstep.ground.errors import MisconfigurationException, NonFiniteError
from lockstep.ground.rank import rank_zero_info, rank_zero_warn, warn_once
from lockstep.ground.types import TrainerFn
from lockstep.loggers.base import as_yaml

if TYPE_CHECKING:
    from lockstep.ground.types import STEP_OUTPUT
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer

# -- the base class ------------------------------------------------------------------------------------------


class Checkpoint(Callback):
    """Base class of callbacks that save checkpoints; the Trainer calls them after all other callbacks."""

    _decides = True

    def find_last(self, trainer: Trainer) -> set[str]:
        """Return the paths that ``ckpt_path="last"`` may refer to; the Trainer picks the newest.

        Args:
            trainer: the Trainer whose call searches for a checkpoint.
        """
        return set()


# -- ModelCheckpoint -----------------------------------------------------------------------------------------


EARLIER = (
    "ModelCheckpoint: the checkpoint of step {now} is ranked by the value of {monitor!r} from step {step}, the last "
    "one measured. It ranks after all checkpoints whose value was measured at their own step, and is listed in "
    "`values_of_earlier_steps`. To avoid this, save at steps with a validation (val_check_interval) or at epoch ends."
)


RANKING = (
    *("best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "current_score"),
    *("last_model_path", "values_of_earlier_steps"),
)
"""Attributes that are updated before the file is written, because the file contains them."""


class ModelCheckpoint(Checkpoint):
    """Callback that saves the run, and keeps the best or the latest of its checkpoints.

    A save is due at the end of every ``every_n_epochs``-th epoch (or of its validation, if that does not run exactly
    once an epoch), at every ``every_n_train_steps``-th optimizer step, or after ``train_time_interval``. Only one of
    the three may be given; the default is every epoch. The checkpoint is written if it is among the ``save_top_k`` best
    by ``monitor``. The checkpoint that it displaces is deleted after the new one is complete. If a validation, or the
    mean over the epoch's training, is due at the same step, the save waits for its value. A value of an earlier step
    ranks after all values that were measured on the saved weights themselves. The results are in
    :attr:`best_model_path`, :attr:`best_model_score` and :attr:`last_model_path`.

    Args:
        dirpath: folder or URL; by default ``checkpoints`` in the first logger's folder, or in
            ``default_root_dir``.
        filename: a template such as ``"{epoch}-{val_loss:.2f}"``: names of logged metrics (and ``epoch``,
            ``step``) in braces. Default ``"{epoch}-{step}"``.
        monitor: the metric to rank by. None: the latest checkpoint counts as the best.
        verbose: report what is saved.
        save_last: also write ``last.ckpt`` whenever a save is due, even if it is not among the best;
            ``"link"`` makes it a link to the file saved last.
        save_top_k: number of checkpoints to keep; -1: all, 0: none. Without ``monitor``: -1, 0 or 1.
        save_on_exception: save when an exception ends the run. One process only.
        save_weights_only: omit optimizer states and everything else that only a resume needs.
        mode: ``"min"`` or ``"max"``: which values of ``monitor`` are better. NaN is worse than all.
        auto_insert_metric_name: write ``epoch=3`` for ``{epoch}``, not ``3``.
        every_n_train_steps: optimizer steps between saves.
        train_time_interval: time between saves, a :class:`datetime.timedelta`; the first rank whose clock reaches it
            decides for all.
        every_n_epochs: epochs between saves; 0: none at epoch ends.
        save_on_train_epoch_end: save epochs at the end of training (True) or of validation (False).
        enable_version_counter: append ``-v1``, ``-v2`` ... rather than overwrite a file of the same name.
        save_pretrained: next to ``NAME.ckpt`` also write a folder ``NAME-pretrained`` with
            ``trainer.save_pretrained``; it is deleted together with the checkpoint.
        save_trainable_only: omit weights that have been frozen and unchanged since the start of the fit; see
            ``Trainer.save_checkpoint``.

    Raises:
        MisconfigurationException: an argument is out of range, or the arguments exclude each other; at the setup of a
            call, ``save_pretrained`` or ``save_last="link"`` is used with a URL; later, ``monitor`` was never logged.
        OSError: the folder cannot be written; raised on all ranks at the setup of the fit.

    Example::

        keep = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{val_loss:.3f}", save_top_k=3)
        Trainer(callbacks=[keep]).fit(model)
        Net.load_from_checkpoint(keep.best_model_path)
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        save_pretrained: bool = False,
        save_trainable_only: bool = False,
    ) -> None:
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self.dirpath: str | None = None
        if dirpath:
            self.dirpath = storage.absolute(dirpath)
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.mode = mode
        self.auto_insert_metric_name = auto_insert_metric_name
        self._every_n_train_steps = every_n_train_steps or 0
        self._train_time_interval = train_time_interval
        self._every_n_epochs = every_n_epochs or 0
        self._save_on_train_epoch_end = save_on_train_epoch_end
        self._enable_version_counter = enable_version_counter
        self.save_pretrained = save_pretrained
        self.save_trainable_only = save_trainable_only
        self._check_arguments()

        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.last_model_path = ""
        self.current_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.values_of_earlier_steps: dict[str, int] = {}
        self.kth_best_model_path = ""
        self.kth_value = torch.tensor(torch.inf if mode == "min" else -torch.inf)

        self._step_of_last_save = 0  # a run without steps needs no checkpoint
        self._step_of_last_batch = 0
        self._latest_path = ""
        self._time_of_last_save = 0.0
        self._time_bit = 0
        self._is_waiting_for_metric = False
        self._has_validated = False
        self._saves = ("", "")  # names of the save before this one, and of this one: a checkpoint has both
        self._newest_save = ""  # name of the last save that has written a file
        self._displaced: dict[str, float] = {}  # files that the latest save deletes after it: path, time of the file
        self._leftovers: dict[str, float] = {}  # the same from the checkpoint that the run resumes from
        self._is_resumed = False
        self._interrupted = ""  # file that a killed run saved before it updated its last checkpoint
        self._offered: set[str] = set()  # paths offered as "last"
        self._folder = FolderClaim()

    def _check_arguments(self) -> None:
        def refuse(arguments: str, rule: str) -> None:
            raise MisconfigurationException(f"ModelCheckpoint({arguments}): {rule}.")

        if self.mode not in ("min", "max"):
            refuse(f"mode={self.mode!r}", 'the mode is unknown. Choose "min" or "max"')
        if self.save_last not in (None, True, False, "link"):
            refuse(f"save_last={self.save_last!r}", 'the value is unknown. Choose True, False or "link"')
        if self.save_top_k < -1:
            refuse(f"save_top_k={self.save_top_k}", "the number is not valid. Choose at least 0, or -1 to keep all")
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            refuse(
                f"save_top_k={self.save_top_k}, monitor=None",
                "no quantity for top_k to track. Pass `monitor`, or choose a `save_top_k` of -1, 0 or 1",
            )
        for name in ("every_n_train_steps", "every_n_epochs"):
            if getattr(self, f"_{name}") < 0:
                refuse(f"{name}={getattr(self, f'_{name}')}", "the number is negative. Choose at least 0")
        names = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
        given = [f"{n}={getattr(self, f'_{n}')}" for n in names if getattr(self, f"_{n}") not in (0, None)]
        if len(given) > 1:
            refuse(
                ", ".join(given), "these cannot be combined. Pass only one, or use several ModelCheckpoint callbacks"
            )

    def saves_nothing(self, max_epochs: int, max_steps: int) -> str:
        """Return the reason why a fit with these limits would save nothing; ``""`` if it would save.

        Args:
            max_epochs: limit of the fit; -1: no limit.
            max_steps: limit of the fit in optimizer steps; -1: no limit.
        """
        epochs, steps, name = self._every_n_epochs, self._every_n_train_steps, "ModelCheckpoint"
        keeps = self.save_top_k != 0 or self.save_last or self.save_on_exception
        argument = "" if keeps else "save_top_k=0"
        if not epochs and not steps and self._train_time_interval is None:
            argument = f"every_n_epochs={epochs}"
        if argument:
            return (
                f"{name}({argument}) saves nothing. Remove the callback, or choose what to save, for example with "
                "save_last=True."
            )
        if epochs > max_epochs > 0:
            return (
                f"{name}(every_n_epochs={epochs}) saves nothing with Trainer(max_epochs={max_epochs}). Reduce "
                "every_n_epochs."
            )
        if steps > max_steps > 0:
            return (
                f"{name}(every_n_train_steps={steps}) saves nothing with Trainer(max_steps={max_steps}). Reduce "
                "every_n_train_steps."
            )
        return ""

    @property
    def every_n_epochs(self) -> int:
        """Number of epochs between saves; 0 disables saves at epoch ends."""
        return self._every_n_epochs

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    # -- when a save is due --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leftovers, self._interrupted, self._is_resumed = {}, "", False
        dirpath: str | None = None
        problem: OSError | None = None
        # Rank 0 checks its disk and broadcasts the result, so that all ranks continue, or all stop.
        if trainer.is_global_zero:
            dirpath = self._choose_folder(trainer)
            try:
                if stage == "fit" and (self.save_top_k != 0 or self.save_last) and not trainer.fast_dev_run:
                    storage.check_writable(dirpath)
                    storage.remove_leftovers(dirpath)
                    self._folder.claim(dirpath)
            except OSError as error:
                problem = error
        self.dirpath, problem = trainer.strategy.broadcast((dirpath, problem))
        if problem is not None:
            raise problem
        if self.save_pretrained and storage.is_remote(str(self.dirpath)):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_pretrained=True): {self.dirpath!r} is not a local folder. Choose one with "
                "dirpath=, or upload the folder that trainer.save_pretrained(folder) writes."
            )
        if self.save_last == "link" and storage.is_remote(str(self.dirpath)):
            raise MisconfigurationException(
                f'ModelCheckpoint(save_last="link"): links are not possible in {self.dirpath!r}. Use save_last=True.'
            )
        if self._train_time_interval is not None and stage == "fit":
            self._time_bit = trainer.agreement.register(f"save-by-time {self.state_key}")
        if self.save_on_exception and trainer.world_size > 1:
            warn_once(
                "ModelCheckpoint(save_on_exception=True) is ignored with several processes, because a save needs all "
                "processes, and one has failed. Unless the strategy shards the model, use OnExceptionCheckpoint."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._time_of_last_save = time.monotonic()
        self._has_validated = self._is_waiting_for_metric = False
        # The current state of a resumed run is already saved.
        self._step_of_last_save = self._step_of_last_batch = trainer.global_step
        if self._is_resumed:
            self._end_interrupted_save(trainer)
        elif trainer.is_global_zero and not (self._latest_path or getattr(trainer, "ckpt_path", None)):
            self._folder.look_for_others(str(self.dirpath), self.FILE_EXTENSION)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._folder.release()

    def _is_due(self, trainer: Trainer, step: int) -> bool:
        """Return True if a save is due after this step, either by time or by number of steps.

        If it is due by time, the time interval restarts.
        """
        if self._train_time_interval is None:
            return self._every_n_train_steps >= 1 and step % self._every_n_train_steps == 0
        # On a single process the loop settles no requests: the answer is known at once.
        is_requested = trainer.agreement.now if trainer.world_size == 1 else trainer.agreement.is_up
        if not is_requested(self._time_bit):
            return False
        trainer.agreement.lower(self._time_bit)
        self._time_of_last_save = time.monotonic()
        return True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._train_time_interval is not None:
            waited = time.monotonic() - self._time_of_last_save
            if waited >= self._train_time_interval.total_seconds():
                trainer.agreement.request(self._time_bit)
        if step == self._step_of_last_batch or not trainer.strategy.sync_gradients:  # inside a window
            return
        self._step_of_last_batch = step
        if not self._is_due(trainer, step) or self._should_skip(trainer):
            return
        with trainer.strategy.with_all_ranks():  # ranks without samples save, too
            metrics = self._metrics(trainer)
            # The value of a validation that follows belongs to these weights, too.
            if self._value_follows(trainer, metrics) or (self.monitor and trainer.fit_loop.validation_follows()):
                self._is_waiting_for_metric = True
                return
            self._save(trainer, metrics)

    def _step_of_value(self, trainer: Trainer) -> int:
        """Return the optimizer step at which the monitored metric was last measured."""
        return trainer.published.measured.get(str(self.monitor), trainer.global_step)

    def _value_follows(self, trainer: Trainer, metrics: dict[str, Tensor]) -> bool:
        """Return True if a save should wait, because the monitored metric may still be measured at this step."""
        if self.monitor is None:
            return False
        is_missing = self.monitor not in metrics
        if not is_missing and self._step_of_value(trainer) == trainer.global_step:
            return False
        # The end of the epoch follows its last batch. With saves by epochs, a missing name is reported at the first
        # validation: it may be a mistake.
        return trainer.is_last_batch or (is_missing and not self._every_n_epochs)

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        ModelCheckpoint.on_train_batch_end(self, trainer, pl_module, None, None, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._has_validated = True
        if self._is_waiting_for_metric or not self._saves_when_training_ends(trainer):
            self._end_of_epoch(trainer, is_over=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_waiting_for_metric or self._saves_when_training_ends(trainer):
            self._end_of_epoch(trainer, is_over=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_behind = self.save_top_k == 0 and self._step_of_last_save != trainer.global_step
        if self.save_last and (is_behind or not self._latest_path) and not trainer.fast_dev_run:
            self._save(trainer, self._metrics(trainer), ranked=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._latest_path and trainer.strategy.checkpoint_io.writes_later:  # the loggers may have found no file
            self._announce(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        kind = type(exception).__name__
        try:
            if not self.save_on_exception or trainer.world_size != 1 or self._should_skip(trainer):
                return
            metrics = self._metrics(trainer)
            path = self._free_path(trainer, metrics, "")
            outdated_last = self._name_last(trainer, metrics)
            try:
                self._write(trainer, path)
            except NonFiniteError:  # the exception that ended the run must be raised
                rank_zero_info(f"{kind} ended the run. No checkpoint was saved, because the weights are not finite.")
                return
            self._save_last(trainer)
            self._delete(trainer, outdated_last, self.last_model_path)
            rank_zero_info(f"{kind} ended the run. Saved a checkpoint to {path!r}.")
        finally:
            self._folder.release()

    def _end_of_epoch(self, trainer: Trainer, is_over: bool) -> None:
        every = self._every_n_epochs
        is_due = every >= 1 and (trainer.current_epoch + 1) % every == 0
        if self._should_skip(trainer) or not (is_due or self._is_waiting_for_metric):
            return
        metrics = self._metrics(trainer)
        if not is_over and self._value_follows(trainer, metrics):
            self._is_waiting_for_metric = True
        elif is_due or self.monitor in metrics or not self._awaits_validation(trainer):
            self._save(trainer, metrics)

    def _should_skip(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.state.fn is not TrainerFn.FITTING
            or trainer.sanity_checking
            or self._step_of_last_save == trainer.global_step
        )

    def _saves_when_training_ends(self, trainer: Trainer) -> bool:
        """Return True if epoch-end saves happen in ``on_train_epoch_end``, False for ``on_validation_end``."""
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if not trainer.fit_loop.expects_validation:
            return True
        return trainer.check_val_every_n_epoch == 1 and trainer.val_check_interval == 1.0

    # -- what is saved -------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, metrics: dict[str, Tensor], ranked: bool = True) -> None:
        """Save the ranked checkpoint and ``last.ckpt``, then delete the checkpoints that these two replace."""
        self._is_waiting_for_metric = False
        ranking = {name: copy(getattr(self, name)) for name in RANKING}
        self._saves, self._displaced = (self._newest_save, secrets.token_hex(8)), {}
        try:
            outdated_last = self._name_last(trainer, metrics)  # before the first file: each file contains it
            outdated = self._save_ranked(trainer, metrics) if ranked and self.save_top_k != 0 else ""
            latest = self._latest_path
            self._save_last(trainer)
        except NonFiniteError:
            vars(self).update(ranking)  # undo all changes
            if trainer.non_finite != "ignore":
                raise
            warn_once("ModelCheckpoint: the weights are not finite. Nothing is saved until they are.")
            return
        # Only now: last.ckpt may have been a link to a file that is deleted here.
        self._delete(trainer, outdated, latest)
        self._delete(trainer, outdated_last, self.last_model_path)

    def _save_ranked(self, trainer: Trainer, metrics: dict[str, Tensor]) -> str:
        """Save a checkpoint if its score is among the best.

        Return the path of the checkpoint that it replaces, or ``""``.
        """
        if self.monitor is None:
            displaced = self.best_model_path if self.save_top_k == 1 else ""
            self.best_model_path = self._free_path(trainer, metrics, displaced)
            self._record_displaced(trainer, displaced)
            self._write(trainer, self.best_model_path)
            return displaced
        if self.monitor not in metrics:
            self._report_missing_monitor(trainer, metrics)
            return ""
        score = metrics[self.monitor]
        measured = self._step_of_value(trainer)
        earlier = None if measured == trainer.global_step else measured
        if earlier is not None:
            warn_once(EARLIER.format(monitor=self.monitor, now=trainer.global_step, step=earlier), key=EARLIER)
        if self._is_among_best(score, earlier is not None):
            return self._save_scored(trainer, metrics, score, earlier)
        if self.verbose:
            value = f"Step {trainer.global_step}: {self.monitor} = {score:.5f}"
            rank_zero_info(f"{value} is not among the best {self.save_top_k}.")
        return ""

    def _save_scored(
        self, trainer: Trainer, metrics: dict[str, Tensor], score: Tensor, earlier: int | None = None
    ) -> str:
        is_full = 0 < self.save_top_k <= len(self.best_k_models)
        displaced = self.kth_best_model_path if is_full else ""
        path = self._free_path(trainer, metrics, displaced)
        if path in self.best_k_models:  # the file is overwritten
            displaced = ""
        elif displaced:
            del self.best_k_models[displaced]
            self.values_of_earlier_steps.pop(displaced, None)
            self._record_displaced(trainer, displaced)
        # every comparison with NaN is False: it would rank by the order of the files
        if torch.isnan(score):
            score = torch.full_like(score, torch.inf if self.mode == "min" else -torch.inf)
        # All this is part of the checkpoint itself, so it is set before the write.
        self.current_score = self.best_k_models[path] = score
        if earlier is None:
            self.values_of_earlier_steps.pop(path, None)
        else:
            self.values_of_earlier_steps[path] = earlier
        if self.save_top_k in (-1, len(self.best_k_models)):
            self.kth_best_model_path = max(self.best_k_models, key=self._sort_key)
            self.kth_value = self.best_k_models[self.kth_best_model_path]
        self.best_model_path = min(self.best_k_models, key=self._sort_key)
        self.best_model_score = self.best_k_models[self.best_model_path]
        if self.verbose:
            value = f"Step {trainer.global_step}: {self.monitor} = {score:.5f}"
            rank_zero_info(f"{value} (best {self.best_model_score:.5f}), saving to {path!r}.")
        self._write(trainer, path)
        return displaced

    def _name_last(self, trainer: Trainer, metrics: dict[str, Tensor]) -> str:
        """Choose the path of ``last.ckpt`` for this save. Return the path of the previous ``last.ckpt``, or ``""``."""
        if not self.save_last:
            return ""
        previous = self.last_model_path
        self.last_model_path = self._free_path(trainer, metrics, previous, self.CHECKPOINT_NAME_LAST)
        if self.last_model_path != previous:
            self._record_displaced(trainer, previous)
        return previous

    def _save_last(self, trainer: Trainer) -> None:
        """Write ``last.ckpt``, or link it to the latest checkpoint."""
        if self.save_last == "link" and self._latest_path and self.save_top_k != 0:
            if trainer.is_global_zero and self._latest_path != self.last_model_path:
                # after the file exists: a broken link would hide the earlier checkpoints
                trainer.strategy.checkpoint_io.then(partial(storage.link, self.last_model_path, self._latest_path))
        elif self.save_last:
            self._write(trainer, self.last_model_path)

    def _write(self, trainer: Trainer, path: str) -> None:
        # a user's own Trainer may accept only Lightning's arguments
        options = {"trainable_only": True} if self.save_trainable_only else {}
        trainer.save_checkpoint(path, self.save_weights_only, **options)
        if self.save_pretrained:
            trainer.save_pretrained(self._pretrained_path(path))
        self._step_of_last_save = trainer.global_step
        self._latest_path, self._newest_save = path, self._saves[1]
        if trainer.is_global_zero:
            self._folder.claim(str(self.dirpath))  # in `setup` the folder may not have existed yet
        self._announce(trainer)

    def _announce(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                # a logger that keeps it must not keep the callback alive
                logger.after_save_checkpoint(weakref.proxy(self))

    def _delete(self, trainer: Trainer, path: str, latest: str) -> None:
        """Delete a checkpoint of this run, unless it is `latest` or the checkpoint from which the user resumes."""
        if path == latest or not self._may_delete(trainer, path):
            return
        trainer.strategy.remove_checkpoint(path)
        if self.save_pretrained:
            shutil.rmtree(self._pretrained_path(path), ignore_errors=True)

    def _may_delete(self, trainer: Trainer, path: str) -> bool:
        if not path or not trainer.is_global_zero or not self._is_ours(path):
            return False
        resumed = getattr(trainer, "ckpt_path", None)
        is_named = resumed and resumed not in self._offered
        return not (is_named and storage.absolute(path) == storage.absolute(str(resumed)))

    # -- after a kill --------------------------------------------------------------------------------------

    def _record_displaced(self, trainer: Trainer, path: str) -> None:
        """Record in this save's checkpoints that `path` is to be deleted after the save.

        If a kill prevents the deletion, a resumed run deletes the file.
        """
        if self._may_delete(trainer, path) and not storage.is_remote(path) and storage.exists(path):
            self._displaced[path] = storage.modified(path)

    def _end_interrupted_save(self, trainer: Trainer) -> None:
        """Before a resumed fit trains, complete a save during which the earlier process was killed. Collective."""
        path, state = trainer.strategy.broadcast(self._interrupted_save(trainer))
        if path:
            self.load_state_dict(state)
            self._interrupted = path
        kept = {self.best_model_path, self.last_model_path, *self.best_k_models}
        leftovers, self._leftovers = self._leftovers, {}
        for leftover, time_of_file in leftovers.items() if trainer.is_global_zero else ():
            # the time: another run may have saved under this name since
            if leftover not in kept and storage.exists(leftover) and storage.modified(leftover) == time_of_file:
                self._delete(trainer, leftover, "")

    def _interrupted_save(self, trainer: Trainer) -> tuple[str, dict[str, Any]]:
        """On rank 0, find a ranked checkpoint that is newer than ``last.ckpt`` because a kill interrupted the save.

        Return its path and the callback's state in it.
        """
        last = self.last_model_path
        if not trainer.is_global_zero or not last or storage.is_remote(last) or not storage.exists(last):
            return "", {}
        if self._saves_in(last)[1] != self._newest_save:  # the run resumes from another save than that of `last`
            return "", {}
        for path in checkpoints_since(last, str(self.dirpath), self.FILE_EXTENSION):
            if path not in self.best_k_models and self._saves_in(path)[0] == self._newest_save:
                return path, self._glance(path)
        return "", {}

    def _saves_in(self, path: str) -> Sequence[str]:
        """Return (id of the previous save, id of the save that wrote the file), read from the checkpoint `path`."""
        found: Sequence[str] = self._glance(path).get("saves", ("", ""))
        return found

    def _glance(self, path: str) -> dict[str, Any]:
        """Return this callback's state in a checkpoint, without reading its tensors."""
        from lockstep.checkpoint.sharded import glance  # a resume alone needs it

        state: dict[str, Any] = glance(path).get("callbacks", {}).get(self.state_key, {})
        return state

    def _pretrained_path(self, path: str) -> str:
        return f"{path.removesuffix(self.FILE_EXTENSION)}-pretrained"

    def _is_ours(self, path: str) -> bool:
        """Return True if `path` is in this callback's folder and has its extension.

        Paths also come from checkpoints, which may be from an untrusted source.
        """
        return path.endswith(self.FILE_EXTENSION) and storage.lies_in(path, str(self.dirpath))

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return True if a checkpoint with the score `current` would be among the best ``save_top_k``.

        Metrics are already the same on all ranks, so no communication is needed.

        Args:
            trainer: unused; for subclasses written for Lightning.
            current: score to rank, a scalar tensor. None: return False.
        """
        return current is not None and self._is_among_best(current, False)

    def _is_among_best(self, score: Tensor, is_earlier: bool) -> bool:
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        if is_earlier != (self.kth_best_model_path in self.values_of_earlier_steps):
            return not is_earlier
        worst = self.best_k_models[self.kth_best_model_path]
        return bool(score < worst) if self.mode == "min" else bool(score > worst)

    def _sort_key(self, path: str) -> tuple[bool, float]:
        """Return a key that sorts ranked checkpoints, best first.

        Checkpoints whose value was measured at an earlier step come last.
        """
        score = float(self.best_k_models[path])
        return path in self.values_of_earlier_steps, score if self.mode == "min" else -score

    def _metrics(self, trainer: Trainer) -> dict[str, Tensor]:
        """Return the reduced metrics by name, with ``epoch`` and ``step`` as integers. Collective."""
        metrics = deepcopy(trainer.reduced_metrics())
        for name, value in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            logged = metrics.get(name)
            metrics[name] = logged.int() if isinstance(logged, Tensor) else torch.tensor(value)
        return metrics

    def _report_missing_monitor(self, trainer: Trainer, metrics: dict[str, Tensor]) -> None:
        available = sorted(set(metrics) - {"epoch", "step"})
        message = (
            f"ModelCheckpoint(monitor={self.monitor!r}) could not find the monitored key in the returned metrics: "
            f"{available}. Log the metric with `self.log({self.monitor!r}, value)`, or monitor another one."
        )
        # The name may be right nevertheless: it is an error only if nothing else explains why it is missing.
        lacks = trainer.fit_loop.lacks_metrics
        if lacks is not None:
            why = f"{lacks}, so no checkpoint is ranked or saved."
        elif self._awaits_validation(trainer):
            why = "No checkpoint is ranked before the first validation."
        elif trainer.limit_val_batches == 0:
            why = "limit_val_batches=0 disables the validation that may log the metric, so nothing is ranked or saved."
        else:
            raise MisconfigurationException(message)
        rank_zero_warn(f"{message} {why}")

    def _awaits_validation(self, trainer: Trainer) -> bool:
        return not self._has_validated and trainer.fit_loop.expects_validation

    # -- file names ----------------------------------------------------------------------------------------

    def _choose_folder(self, trainer: Trainer) -> str:
        if self.dirpath is not None:
            return self.dirpath
        if not trainer.loggers:
            return storage.absolute(os.path.join(trainer.default_root_dir, "checkpoints"))
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
        return storage.absolute(os.path.join(root, str(logger.name), version, "checkpoints"))

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the checkpoint path for `metrics`, from the template `filename` (default: the callback's).

        Args:
            metrics: values for the names in braces.
            filename: template, as in the class.
            ver: number of the version, which is appended as ``-v<ver>``; None: no version.
            prefix: text before the name, followed by ``-``.

        Returns:
            the path in ``dirpath``; the name alone before the folder is chosen.

        Example::

            keep = ModelCheckpoint("checkpoints", filename="{epoch}-{val_loss:.2f}")
            keep.format_checkpoint_name({"epoch": 3, "val_loss": 0.217})  # ".../checkpoints/epoch=3-val_loss=0.22.ckpt"
        """
        template = filename or self.filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"
        equals = self.CHECKPOINT_EQUALS_CHAR if self.auto_insert_metric_name else None
        version = None if ver is None else f"v{ver}"
        parts = [part for part in (prefix, fill(template, metrics, equals), version) if part]
        name = self.CHECKPOINT_JOIN_CHAR.join(parts) + self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _free_path(self, trainer: Trainer, metrics: dict[str, Tensor], own: str, filename: str | None = None) -> str:
        """Return an unused checkpoint path, with a version like ``-v1`` if needed. The path `own` counts as unused."""
        path = self.format_checkpoint_name(metrics, filename)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path not in (own, self._interrupted) and self.file_exists(path, trainer):
            path = self.format_checkpoint_name(metrics, filename, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Return True on all ranks if the file exists on rank 0. Collective.

        Args:
            filepath: path of a file or folder, or a URL.
            trainer: the Trainer that runs.
        """
        found = trainer.strategy.checkpoints.has(filepath) if trainer.is_global_zero else None
        return bool(trainer.strategy.broadcast(found))

    def find_last(self, trainer: Trainer) -> set[str]:
        """Return the path of the newest ``last.ckpt``, ``last-v1.ckpt`` etc. Without any, return all checkpoints."""
        folder = self._choose_folder(trainer)
        pattern = name_pattern(self.CHECKPOINT_NAME_LAST, self.FILE_EXTENSION)
        names = [name for name in storage.names(folder) if name.endswith(self.FILE_EXTENSION)]
        last = [os.path.join(folder, name) for name in names if pattern.fullmatch(name)]
        newest = sorted(filter(storage.exists, last), key=storage.modified)[-1:]
        self._offered = {*(newest if last else (os.path.join(folder, name) for name in names))}
        return self._offered

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write :attr:`best_k_models` (path: score) as YAML, by default to ``best_k_models.yaml`` in the folder.

        Args:
            filepath: path of the file; an existing one is replaced atomically. None: the default, once a fit has chosen
                the folder.

        Raises:
            OSError: the file cannot be written.
        """
        if filepath is None:
            assert self.dirpath is not None, "the folder is chosen when a fit starts"
            filepath = os.path.join(self.dirpath, "best_k_models.yaml")
        with storage.replacing(filepath) as file:
            file.write(as_yaml({path: float(score) for path, score in self.best_k_models.items()}).encode())

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "dirpath": self.dirpath,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
            "values_of_earlier_steps": dict(self.values_of_earlier_steps),
            "saves": list(self._saves),
            "displaced": dict(self._displaced),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_model_path = state_dict["best_model_path"]
        folder = state_dict.get("dirpath", self.dirpath)
        if folder != self.dirpath:
            rank_zero_warn(
                f"The checkpoint was saved in {folder!r}, but this run saves in {self.dirpath!r}. Therefore only "
                "best_model_path is restored, and a new ranking starts in `best_k_models`."
            )
            return
        ranked = dict(state_dict.get("best_k_models", self.best_k_models))
        for score in ranked.values():
            float(score)  # detect a malformed score here, not at a later comparison
        last = state_dict.get("last_model_path", self.last_model_path)
        named = [self.best_model_path, last, *ranked, state_dict.get("kth_best_model_path", "")]
        # The checkpoint may be from an untrusted source, and ranked files are deleted later.
        foreign = [path for path in named if path and not self._is_ours(path)]
        if foreign:
            rank_zero_warn(
                f"The checkpoint lists {foreign[0]!r} as saved by this ModelCheckpoint, but the path is not a "
                f"{self.FILE_EXTENSION} file in {self.dirpath!r}. Such files are neither ranked nor deleted."
            )
        self.last_model_path = "" if last in foreign else last
        self.best_model_score = state_dict["best_model_score"]
        self.best_k_models = {path: score for path, score in ranked.items() if path not in foreign}
        earlier = state_dict.get("values_of_earlier_steps", {})
        self.values_of_earlier_steps = {path: int(earlier[path]) for path in self.best_k_models if path in earlier}
        self.kth_best_model_path = state_dict.get("kth_best_model_path", self.kth_best_model_path)
        self.kth_value = state_dict.get("kth_value", self.kth_value)
        before, latest = state_dict.get("saves", ("", ""))
        self._saves, self._newest_save = (str(before), str(latest)), str(latest)
        self._is_resumed = bool(latest)
        self._leftovers = {path: float(time) for path, time in state_dict.get("displaced", {}).items()}
        has_surplus = 0 < self.save_top_k < len(self.best_k_models)
        if has_surplus:  # an earlier run kept more; their files stay
            kept = sorted(self.best_k_models, key=self._sort_key)[: self.save_top_k]
            self.best_k_models = {path: self.best_k_models[path] for path in kept}
        ranked = self.best_k_models
        is_full = 0 < self.save_top_k <= len(ranked)
        is_stale = (is_full or bool(self.kth_best_model_path)) and self.kth_best_model_path not in ranked
        if has_surplus or foreign or is_stale:
            self.kth_best_model_path = max(ranked, key=self._sort_key) if ranked else ""
            self.best_model_path = min(ranked, key=self._sort_key) if ranked else ""
            self.best_model_score = ranked.get(self.best_model_path)
            if ranked:
                self.kth_value = ranked[self.kth_best_model_path]
