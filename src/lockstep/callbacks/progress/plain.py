"""PlainProgressBar: now and then a line of text, for logs and pipes; and which bar suits what is written to."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from lockstep.callbacks.progress.base import ProgressBar, clock, in_notebook, number
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.callbacks.progress.tqdm import TQDMProgressBar
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class PlainProgressBar(ProgressBar):
    """Writes a line to stderr at the end of an epoch, but not more often than once in a while.

    It is what a Trainer takes where stdout is no terminal. The last epoch always gets its line, so a short
    run writes just that one::

        Epoch 9/9: step 1800, 0:03, train_loss=0.04127, val_acc=0.9778

    It does nothing between the ends of epochs, and costs nothing there.

    Args:
        interval: least number of seconds between two lines; 0 writes one for each epoch.

    Raises:
        MisconfigurationException: ``interval`` is negative.
    """

    def __init__(self, interval: float = 30.0) -> None:
        super().__init__()
        if interval < 0:
            raise MisconfigurationException(f"PlainProgressBar(interval={interval}): seconds, at least 0.")
        self.interval = interval
        self._epoch = ""
        self._written: str | None = None
        self._epoch_began = self._next = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The first line is due one interval from now."""
        self._written = None
        self._epoch_began = monotonic()
        self._next = self._epoch_began + self.interval

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock of the epoch."""
        self._epoch = self.epoch_description
        self._epoch_began = monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the line if it is time to."""
        if monotonic() >= self._next:
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the line of the last epoch if it has none yet."""
        if self._written != self._epoch:
            self._write(trainer, pl_module)

    def _write(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_disabled:
            return
        self._written = self._epoch
        self._next = monotonic() + self.interval
        shown = [f"step {trainer.global_step}", clock(monotonic() - self._epoch_began)]
        shown += [f"{name}={number(value)}" for name, value in self.get_metrics(trainer, pl_module).items()]
        print(f"{self._epoch}: {', '.join(shown)}", file=sys.stderr, flush=True)


def choose_progress_bar() -> ProgressBar:
    """The progress bar of a Trainer whose user named none.

    Returns:
        :class:`RichProgressBar` on a terminal that can move its cursor, if rich is installed;
        :class:`TQDMProgressBar` on other terminals and in notebooks; :class:`PlainProgressBar`, which writes
        a line now and then and never animates, where stdout is a file or a pipe.
    """
    if in_notebook():
        return TQDMProgressBar()
    if not _is_terminal():
        return PlainProgressBar()
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return TQDMProgressBar()
    return TQDMProgressBar() if Console().is_dumb_terminal else RichProgressBar()


def _is_terminal() -> bool:
    # stdout is None under pythonw, and closed in some daemons
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
