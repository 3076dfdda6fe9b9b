"""TQDMProgressBar: progress as a line of text that is overwritten."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.callbacks.progress.base import DrawnProgressBar, Meter, in_notebook, is_terminal, number
from lockstep.ground.installed import STREAMS

if TYPE_CHECKING:
    from lockstep.trainer import Trainer


class TQDMProgressBar(DrawnProgressBar):
    """Progress bar drawn with tqdm on stdout, with a second bar below for validation within a fit.

    The time and speed of training exclude validation. Other output is printed above the bars. To change
    how a bar looks, override the method that makes it (:meth:`init_train_tqdm` and so on), or
    :meth:`get_metrics` for the metrics next to it. On ranks that do not draw, the bars exist but are disabled.

    Args:
        refresh_rate: draw at every n-th batch, but at most ten times a second; 0 disables drawing.
        process_position: number of pairs of lines to leave free above the bars, for bars of other processes.
        leave: keep the finished bar of each epoch on the screen.

    Example::

        class Bar(TQDMProgressBar):
            def init_validation_tqdm(self):
                bar = super().init_validation_tqdm()
                bar.set_description("measuring")
                return bar

        Trainer(callbacks=Bar(refresh_rate=10))
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave, every=refresh_rate)
        self._process_position = process_position
        self.train_progress_bar: Any = None
        """tqdm's training bar, closed after the fit; None before a fit. A user may replace it."""
        self.val_progress_bar: Any = None
        """tqdm's bar for the last evaluation, closed afterwards. A user may replace it."""
        self._stand_ins: list[_StreamAboveBars] | None = None

    _drawn = ("train_progress_bar", "val_progress_bar", "_stand_ins")
    test_progress_bar = predict_progress_bar = property(
        lambda self: self.val_progress_bar, lambda self, bar: setattr(self, "val_progress_bar", bar)
    )

    @property
    def process_position(self) -> int:
        """Number of pairs of lines that are left blank above the bars, for example for the bars of other processes."""
        return self._process_position

    def disable(self) -> None:
        super().disable()
        self._give_back()
        self._close_bars()

    # -- construction of bars ------------------------------------------------------------------------------

    def init_sanity_tqdm(self) -> Any:
        """Create the bar for the sanity check.

        Returns:
            a new ``tqdm`` object, as in :meth:`init_train_tqdm`.
        """
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Create the training bar.

        Returns:
            a new ``tqdm`` object. An override may return a bar of another class.
        """
        return self._make(self.train_description, leave=True)

    def init_validation_tqdm(self) -> Any:
        """Create the validation bar, below the training bar in a fit.

        Returns:
            a new ``tqdm`` object, as in :meth:`init_train_tqdm`.
        """
        below = self.trainer.state.fn == "fit"
        return self._make(self.validation_description, leave=not below, offset=int(below))

    def init_test_tqdm(self) -> Any:
        """Create the bar for testing.

        Returns:
            a new ``tqdm`` object, as in :meth:`init_train_tqdm`.
        """
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Create the bar for prediction.

        Returns:
            a new ``tqdm`` object, as in :meth:`init_train_tqdm`.
        """
        return self._make(self.predict_description, leave=True)

    def _make(self, description: str, *, leave: bool, offset: int = 0) -> Any:
        return _tqdm()(
            desc=description,
            position=2 * self._process_position + offset,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=_original(sys.stdout),
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    # -- drawing -------------------------------------------------------------------------------------------

    def _open(self, what: str) -> None:
        bar = getattr(self, f"init_{what.removesuffix('_check')}_tqdm")()
        setattr(self, "train_progress_bar" if what == "train" else "val_progress_bar", bar)

    def _bar(self, meter: Meter) -> Any:
        return self.train_progress_bar if meter is self._train_meter else self.val_progress_bar

    def _begin_bar(self, trainer: Trainer, meter: Meter, name: str) -> None:
        bar = self._bar(meter)
        bar.reset(total=convert_inf(meter.total))
        bar.total = convert_inf(meter.total)
        bar.initial = 0
        bar.set_description(name)

    def _paint(self, meter: Meter, metrics: dict[str, Any] | None = None) -> None:
        bar = self._bar(meter)
        if bar is not None:
            bar.initial, bar.n = meter.first, meter.done
            if not bar.disable:  # the time of training excludes validation
                bar.start_t = bar._time() - meter.seconds
                bar.last_print_t = bar._time()  # if it were before the start, tqdm would treat the bar as never drawn
            if metrics is None:
                bar.refresh()
            else:
                bar.set_postfix(metrics)

    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        if self.val_progress_bar is not None:
            self.val_progress_bar.close()
        if self.train_progress_bar is None or self.train_progress_bar.disable:  # a closed bar is disabled
            self._give_back()

    def _close_bars(self) -> None:
        for bar in (self.val_progress_bar, self.train_progress_bar):
            if bar is not None:
                bar.close()

    def _close(self) -> None:
        self._close_bars()
        self._end_evaluation()
        self._draws = False

    # -- output of others ----------------------------------------------------------------------------------

    def print(self, *args: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, **kwargs: Any) -> None:
        """Print text above the bars, without overwriting them.

        Arguments are those of Python's ``print``.
        """
        if self._visible_bars():
            _write_above(self._visible_bars(), sep.join(map(str, args)) + end, sys.stdout if file is None else file)
        else:
            print(*args, sep=sep, end=end, file=file, **kwargs)

    def _visible_bars(self) -> list[Any]:
        """Return the bars that are currently on the screen."""
        return [bar for bar in (self.train_progress_bar, self.val_progress_bar) if bar is not None and not bar.disable]

    def _begin_drawing(self) -> None:
        super()._begin_drawing()
        if self._draws and not self._stand_ins and not in_notebook() and is_terminal(sys.stdout):
            STREAMS.mark_installed()
            terminals = [name for name in ("stdout", "stderr") if is_terminal(getattr(sys, name))]
            self._stand_ins = [_StreamAboveBars(name, self._visible_bars) for name in terminals]

    def _give_back(self) -> None:
        stand_ins, self._stand_ins = self._stand_ins, None
        if stand_ins:
            STREAMS.mark_removed()
            for stand_in in stand_ins:
                stand_in.end()


class _StreamAboveBars:
    """Replacement for ``sys.stdout`` or ``sys.stderr`` that writes text above the bars on the screen.

    It collects whole lines (of ``print``, warnings and lockstep's own messages), clears the bars, writes the lines, and
    draws the bars again below.

    Args:
        name: name of the stream.
        shown: returns the bars on the screen; not called after `end`.
    """

    def __init__(self, name: str, shown: Callable[[], list[Any]]) -> None:
        self.stream: TextIO = getattr(sys, name)
        self._name, self._visible_bars, self._process, self._line = name, shown, os.getpid(), ""
        self._is_over = False
        setattr(sys, name, self)

    def write(self, text: str) -> int:
        """Write complete lines above the bars, and buffer an incomplete line."""
        if self._is_over or os.getpid() != self._process:  # a forked loader worker has no bars
            return int(self.stream.write(text))
        # Text that moves the cursor draws its own bar. A single newline may belong to it: it moves the cursor down.
        if "\r" in text or "\x1b[A" in text or (text == "\n" and not self._line):
            self.stream.write(text)
            return len(text)
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            _write_above(self._visible_bars(), lines + newline, self.stream)
        return len(text)

    def end(self) -> None:
        """Restore the original stream. From then on, this object writes directly to that stream."""
        self._is_over = True
        self.stream.write(self._line)
        self._line = ""
        if getattr(sys, self._name) is self:  # else another object has replaced it, and this one passes text on
            setattr(sys, self._name, self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _original(stream: TextIO) -> Any:
    """Return the original stream if it was replaced by `_StreamAboveBars`, else the stream itself."""
    return stream.stream if isinstance(stream, _StreamAboveBars) else stream


def _write_above(shown: Sequence[Any], text: str, stream: TextIO) -> None:
    """Write complete lines above the bars, and redraw the bars unless the lines go to a file."""
    stream = _original(stream)
    bars = shown if is_terminal(stream) or stream is _original(sys.stdout) else ()
    for bar in bars:
        bar.clear()
        bar.fp.flush()
    stream.write(text)
    stream.flush()
    for bar in bars:
        bar.refresh()


def convert_inf(x: int | float | None) -> int | float | None:
    """Return ``x`` as a total for tqdm. An infinite total becomes None, with which tqdm marks an unknown total.

    Args:
        x: number of batches; infinity or None if unknown.
    """
    return x if x is not None and math.isfinite(x) else None


def _tqdm() -> Any:
    """Import tqdm, and return a subclass that uses neither tqdm's monitor thread nor its interprocess lock."""
    global _class
    if _class is None:
        if in_notebook() and find_spec("ipywidgets"):
            from tqdm.auto import tqdm
        else:
            from tqdm import tqdm

        class Tqdm(tqdm):
            # one thread of one process draws
            monitor_interval = 0
            _lock = threading.RLock()

            def display(self, msg: str | None = None, pos: int | None = None) -> Any:
                """Draw the bar, and move the cursor to the line's start, where another rank's output should start."""
                shown = super().display(msg, pos)
                if is_terminal(self.fp):
                    self.fp.write("\r")
                    self.fp.flush()
                return shown

            @staticmethod
            def format_num(n: float) -> str:
                return number(n)

        _class = Tqdm
    return _class


_class: Any = None


def __getattr__(name: str) -> Any:
    """Import tqdm on the first access to this module's attribute ``Tqdm``, and return the class of the bars.

    A subclass that overrides, for example, ``init_train_tqdm`` may import it.
    """
    if name == "Tqdm":
        return _tqdm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
