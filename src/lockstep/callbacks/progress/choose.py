"""Which progress bar suits the place that this process writes to."""

from __future__ import annotations

import sys

from lockstep.callbacks.progress.base import ProgressBar, in_notebook
from lockstep.callbacks.progress.plain import PlainProgressBar
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.callbacks.progress.tqdm import TQDMProgressBar


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
