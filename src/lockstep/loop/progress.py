"""Progress: the counters of a fit (epochs, batches, optimizer steps), which checkpoints save and restore."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from types import NoneType
from typing import Any

# The point in an epoch at which a checkpoint was taken, and from which a resumed run continues.
EPOCH_START = "epoch_start"  # before the epoch's first batch
BATCH_END = "batch_end"  # after a training batch, before a validation that is due
VALIDATED = "validated"  # after the validation that followed a batch
WINDOW_END = "window_end"  # after everything at a boundary
EPOCH_END = "epoch_end"  # after the last batch and its validation


@dataclass
class Progress:
    """Counters of what a fit has done: epochs, batches, windows and optimizer steps. A checkpoint saves them.

    Attributes:
        epoch: current epoch, counted from 0; between two epochs the number of finished epochs.
        batch: training batches finished in this epoch (including the one whose ``on_train_batch_end`` runs).
        total_batches: training batches finished in all epochs.
        earlier: batches in earlier epochs, as the run's plan counts them.
        validated: batches of this epoch up to its last validation, as the run's plan counts them.
        global_step: steps of all optimizers, as ``trainer.global_step``.
        windows: finished windows; the x axis of the loggers.
        last: True if the batch that was started last is its epoch's last, as ``trainer.is_last_batch``.
        phase: point in the epoch, see the constants of this file.
        seconds: time spent fitting, including earlier attempts of the run.
        train_loaded: the epoch for which the training loaders were last requested, if they are reloaded.
        val_loaded: the epoch for which the validation loaders were last requested, if they are reloaded.
    """

    epoch: int = 0
    batch: int = 0
    total_batches: int = 0
    global_step: int = 0
    windows: int = 0
    last: bool = False
    phase: str = EPOCH_START
    seconds: float = 0.0
    train_loaded: int | None = None
    val_loaded: int | None = None
    earlier: int = 0
    validated: int = 0

    # Not fields: a resumed fit does not need them.
    ended = False  # this fit ended by itself
    under_way = False  # a batch has started and has not ended
    runs = False  # its `training_step` may have started too

    def for_next_fit(self) -> Progress:
        """Return the counters with which the Trainer's next fit starts.

        Epochs and steps continue, as in Lightning. If the earlier fit stopped in the middle of an epoch, that epoch
        counts as finished if the fit ended by itself, and is repeated if an error or Ctrl-C ended the fit.
        """
        is_within_epoch = self.phase != EPOCH_START
        return Progress(
            epoch=self.epoch + (is_within_epoch and self.ended),
            total_batches=self.total_batches,
            global_step=self.global_step,
            windows=self.windows,
            earlier=self.total_batches,
        )

    def saved(self) -> Progress:
        """Return a copy of the counters for a checkpoint. In it, the current batch does not count as finished."""
        return replace(self, last=self.last and not self.under_way)

    def go_back(self, batches: int) -> None:
        """Subtract the current window's ``batches``, because a resume will repeat them."""
        self.batch -= batches
        self.total_batches -= batches
        # before the first window the epoch starts again, with its hooks
        self.phase = WINDOW_END if self.batch else EPOCH_START

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as a plain dict."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """Load the counters that :meth:`state_dict` returned.

        Raises:
            ValueError: a value is not valid for its counter.
        """
        for each in fields(self):
            value: Any = state.get(each.name, each.default)
            if each.name == "phase":
                known = value in (EPOCH_START, BATCH_END, VALIDATED, WINDOW_END, EPOCH_END)
            else:
                known = isinstance(value, _KINDS[str(each.type)]) and (value is None or value >= 0)
            if not known:
                raise ValueError(f"{each.name} is {value!r:.50}")
            setattr(self, each.name, value)

    def reshare(self, boundary: int, number: int | None) -> None:
        """Adjust the counters for a resume with a different number of ranks or batch size.

        Args:
            boundary: number of batches in the epoch up to the last finished window; later batches are repeated.
            number: ``boundary`` in batches of the new size; None: the epoch starts again.
        """
        if self.last and number is not None:
            self.batch = max(number, 1)
            return
        if self.batch > boundary:
            self.phase = WINDOW_END
            self.total_batches -= self.batch - boundary
        self.batch = number or 0
        if number is None:
            self.phase = EPOCH_START

    def load_lightning(self, checkpoint: dict[str, Any]) -> None:
        """Load the counters of a checkpoint that Lightning 2.x wrote.

        Lightning counts a batch as ready, started, processed and completed; a checkpoint taken in the middle of
        an epoch has fewer processed epochs than started ones.
        """
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        batches = loop.get("epoch_loop.batch_progress", {})
        epochs = loop.get("epoch_progress", {}).get("current", {})
        self.global_step = int(checkpoint.get("global_step", 0))
        self.windows = int(loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", self.global_step))
        self.total_batches = int(batches.get("total", {}).get("processed", 0))
        inside = epochs.get("processed", 0) < epochs.get("started", 0)
        self.epoch = int(epochs.get("processed", checkpoint.get("epoch", -1) + 1))
        self.batch = int(batches.get("current", {}).get("processed", 0)) if inside else 0
        self.earlier = self.total_batches - self.batch
        self.last = bool(batches.get("is_last_batch", False))
        self.phase = EPOCH_START
        if inside and self.batch:
            validation = loop.get("epoch_loop.val_loop.batch_progress")
            self.phase = BATCH_END if _validation_is_due(batches.get("current", {}), validation) else VALIDATED

    def lightning_loops(self) -> dict[str, Any]:
        """Return the counters in the form in which Lightning's checkpoints store them."""
        ended = self.phase == EPOCH_END
        batch = {"ready": self.batch, "started": self.batch, "processed": self.batch, "completed": self.batch}
        total = dict.fromkeys(batch, self.total_batches)
        epochs = {"ready": self.epoch + 1, "started": self.epoch + 1, "processed": self.epoch + ended}
        epochs["completed"] = self.epoch
        steps = {"ready": self.global_step, "completed": self.global_step}
        stepped = {"total": steps, "current": dict(steps)}
        dropped = {"total": {**steps, "started": self.global_step}, "current": {**steps, "started": self.global_step}}
        return {
            "fit_loop": {
                # one of the two is read, depending on the module's optimization
                "epoch_loop.automatic_optimization.optim_progress": {
                    "optimizer": {"step": stepped, "zero_grad": dropped}
                },
                "epoch_loop.manual_optimization.optim_step_progress": stepped,
                "epoch_loop.batch_progress": {"total": total, "current": batch, "is_last_batch": self.last},
                "epoch_loop.state_dict": {"_batches_that_stepped": self.windows},
                "epoch_progress": {"total": dict(epochs), "current": epochs},
            }
        }


_KINDS: dict[str, tuple[type[float] | type[None], ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int, NoneType),
}
"""Valid types of a counter in a checkpoint, for each annotation in `Progress`."""


def _validation_is_due(batches: dict[str, Any], validation: dict[str, Any] | None) -> bool:
    """Return True if Lightning wrote the checkpoint after a batch, but before the end of that batch's validation."""
    processed = batches.get("processed", 0)
    if batches.get("completed", processed) < processed:
        return True  # in `on_train_batch_end`
    if validation is None or batches.get("ready", processed) > processed:
        return False  # another batch had started
    done = validation.get("total", {})  # of this validation: Lightning resets the counts for each
    is_over = validation.get("is_last_batch", False) and done.get("ready", 0) == done.get("completed", 0) > 0
    return not is_over
