"""TQDMProgressBar: progress as a line of text that is written over itself."""

from __future__ import annotations

import math
import re
import sys
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from lockstep.callbacks.progress.base import DrawnProgressBar, Meter, Screen, behind, in_notebook, is_terminal, number
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from tqdm import tqdm

    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class TQDMProgressBar(DrawnProgressBar):
    """Draws bars with tqdm on stdout: one for training, one below it for the validation in between.

    The time and speed of training leave validation out. Where the line is too narrow for all metrics, speed,
    bar and times go first. What is printed meanwhile goes above the bars. To change how a bar looks, override
    the method that makes it (:meth:`init_train_tqdm` and its like), or :meth:`get_metrics` for what stands
    beside it. On ranks that draw nothing the bars are there too, disabled.

    Args:
        refresh_rate: draw at every n-th batch, yet at most ten times a second; 0 draws nothing.
        process_position: leave so many pairs of lines above the bars free, for bars of other processes.
        leave: keep the finished bar of each epoch on the screen.

    Raises:
        MisconfigurationException: ``refresh_rate`` or ``process_position`` is negative.

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
        super().__init__(refresh_rate, every=refresh_rate)
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if value < 0:
                raise MisconfigurationException(f"TQDMProgressBar({name}={value}): it must be at least 0.")
        self._process_position = process_position
        self._leave = leave
        self._train_bar: Any = None
        self._eval_bar: Any = None
        self._screen = Screen(self._shown)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: settings; a bar that is being drawn stays here."""
        return {**super().__getstate__(), "_train_bar": None, "_eval_bar": None, "_screen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """There is no bar here yet."""
        vars(self).update(state)
        self._screen = Screen(self._shown)

    @property
    def refresh_rate(self) -> int:
        """Batches from one drawing to the next, at least."""
        return int(self._refresh_rate)

    @property
    def process_position(self) -> int:
        """Pairs of lines left free above."""
        return self._process_position

    @property
    def train_progress_bar(self) -> Any:
        """tqdm's bar of training, None outside a fit; it may be replaced by another one."""
        return self._train_bar

    @train_progress_bar.setter
    def train_progress_bar(self, bar: tqdm[Any]) -> None:
        self._train_bar = bar

    @property
    def val_progress_bar(self) -> Any:
        """tqdm's bar of the evaluation that runs now, None outside of one; it may be replaced by another one."""
        return self._eval_bar

    @val_progress_bar.setter
    def val_progress_bar(self, bar: tqdm[Any]) -> None:
        self._eval_bar = bar

    test_progress_bar = predict_progress_bar = val_progress_bar

    def disable(self) -> None:
        super().disable()
        self._screen.close()
        for bar in (self._eval_bar, self._train_bar):
            if bar is not None:
                bar.close()

    # -- how bars are made ---------------------------------------------------------------------------------

    def init_sanity_tqdm(self) -> Any:
        """Make the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> Any:
        """Make the bar of training."""
        return self._make(self.train_description, leave=True)

    def init_validation_tqdm(self) -> Any:
        """Make the bar of validation: below that of training, or alone in ``trainer.validate``."""
        below = self.trainer.state.fn == "fit"
        return self._make(self.validation_description, leave=not below, offset=int(below))

    def init_test_tqdm(self) -> Any:
        """Make the bar of testing."""
        return self._make(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Make the bar of prediction."""
        return self._make(self.predict_description, leave=True)

    def _make(self, description: str, *, leave: bool, offset: int = 0) -> Any:
        return _tqdm()(
            desc=description,
            position=2 * self._process_position + offset,
            disable=self.is_disabled,
            leave=leave,
            dynamic_ncols=True,
            file=behind(sys.stdout),
            smoothing=0,
            bar_format=self.BAR_FORMAT,
        )

    # -- training ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._train_bar = self.init_train_tqdm()
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the bar anew."""
        if not self._draws:
            return
        if self._leave and self._train_meter.done:
            self._train_bar.close()
            self._train_bar = self.init_train_tqdm()
        self._train_meter.begin(self.total_train_batches)
        _begin(self._train_bar, self._train_meter, self.epoch_description)

    def _draw_training(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._train_bar.initial = self._train_meter.first
        self._train_bar.n = self._train_meter.done
        self._train_bar.set_postfix(self.get_metrics(trainer, pl_module))

    # -- evaluation ----------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._eval_bar = self.init_sanity_tqdm()
        super().on_sanity_check_start(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._eval_bar = self.init_validation_tqdm()
        super().on_validation_start(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._eval_bar = self.init_test_tqdm()
        super().on_test_start(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._eval_bar = self.init_predict_tqdm()
        super().on_predict_start(trainer, pl_module)

    def _begin_loader(self, trainer: Trainer, name: str, total: int | float) -> None:
        self._eval_meter.begin(total)
        _begin(self._eval_bar, self._eval_meter, name)

    def _draw_evaluation(self, done: int) -> None:
        self._eval_bar.n = done
        self._eval_bar.refresh()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar of validation and show its metrics beside that of training."""
        if trainer.sanity_checking:
            return
        self._close_evaluation()
        if self._train_bar is not None and self._draws:
            away = self._train_meter.resume()
            self._train_bar.start_t += away
            # not behind the start, or tqdm takes the bar for one that was never drawn
            self._train_bar.last_print_t += away
            self._draw_training(trainer, pl_module)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_evaluation()

    # -- the end -------------------------------------------------------------------------------------------

    def print(self, *args: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, **kwargs: Any) -> None:
        """Print above the bars."""
        if self._shown():
            self._screen.write(sep.join(map(str, args)) + end, sys.stdout if file is None else file)
        else:
            print(*args, sep=sep, end=end, file=file, **kwargs)

    def _begin_drawing(self) -> None:
        super()._begin_drawing()
        if self._draws and not in_notebook():
            self._screen.open()

    def _shown(self) -> list[Any]:
        """The bars on the screen."""
        return [bar for bar in (self._train_bar, self._eval_bar) if bar is not None and not bar.disable]

    def _close_evaluation(self) -> None:
        self.reset_dataloader_idx_tracker()
        if self._eval_bar is not None:
            self._eval_bar.close()
            self._eval_bar = None
        if self._train_bar is None:
            self._screen.close()

    def _close(self) -> None:
        if self._train_bar is not None:
            bar, self._train_bar = self._train_bar, None
            self._close_evaluation()
            bar.close()
        else:
            self._close_evaluation()
        self._draws = False


# How a line is drawn, from all there is to say down to what has to be seen.
_NARROWER = (
    TQDMProgressBar.BAR_FORMAT,
    "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{l_bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
    "{l_bar} {n_fmt}/{total_fmt}{postfix}",
    "{desc}{n_fmt}/{total_fmt}{postfix}",
    "{n_fmt}/{total_fmt}{postfix}",
)
_LEAST_BAR = 6  # characters; a shorter one shows nothing


def _fit(bar: tqdm[Any], shown: dict[str, Any]) -> None:
    """Choose the fullest of our formats of which nothing is cut off at the terminal's width.

    All but the first leave out the logger's version. Where even the briefest is too long, its end is cut off.
    """
    for form in _NARROWER:
        around = {**shown, "ncols": None, "bar_format": form.replace("{bar}", "")}
        if len(bar.format_meter(**around)) + _LEAST_BAR * ("{bar}" in form) <= shown["ncols"]:
            break
        shown["postfix"] = re.sub(r"(, )?v_num=[^,]*$", "", shown["postfix"] or "")
    shown["bar_format"] = form


def convert_inf(x: int | float | None) -> int | float | None:
    """A total as tqdm has it: None where it is not known."""
    return x if x is not None and math.isfinite(x) else None


def _begin(bar: tqdm[Any], meter: Meter, description: str) -> None:
    bar.reset(total=convert_inf(meter.total))
    bar.total = convert_inf(meter.total)
    bar.initial = 0
    bar.set_description(description)


def _tqdm() -> Any:
    """tqdm's class, imported when a bar is first drawn, without its thread and its lock between processes."""
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
                """Leave the cursor at the left: what another rank prints does not go on with the bar's line."""
                shown = super().display(msg, pos)
                if is_terminal(self.fp):
                    self.fp.write("\r")
                    self.fp.flush()
                return shown

            @staticmethod
            def format_num(n: float) -> str:
                return number(n)

            def __str__(self) -> str:
                shown = self.format_dict
                if shown.get("ncols") and shown.get("bar_format") == TQDMProgressBar.BAR_FORMAT:
                    _fit(self, shown)
                return self.format_meter(**shown)

        _class = Tqdm
    return _class


_class: Any = None


def __getattr__(name: str) -> Any:
    """``Tqdm``, the class of the bars, for overrides of :meth:`TQDMProgressBar.init_train_tqdm` and its like."""
    if name == "Tqdm":
        return _tqdm()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
