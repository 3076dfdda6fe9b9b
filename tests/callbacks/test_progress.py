"""Progress bars: what they show, where, how often, and that they leave nothing behind."""

from __future__ import annotations

import errno
import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Callback
from lockstep.callbacks.progress import base
from lockstep.callbacks.progress.base import Meter, PlainProgressBar, ProgressBar
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.callbacks.progress.tqdm import TQDMProgressBar
from lockstep.config import objects
from lockstep.ground.rank import rank_zero_info
from lockstep.ground.types import TrainerFn, TrainerState
from scripts import draw_run
from tests.callbacks.fake_trainer import FakeTrainer
from tests.loop.pieces import Slope, numbers, quiet


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that meters see, in a list of one."""
    time = [100.0]
    monkeypatch.setattr(base, "monotonic", lambda: time[0])
    return time


def rich_bar(**settings: Any) -> tuple[RichProgressBar, io.StringIO]:
    screen = io.StringIO()
    console = {"file": screen, "force_terminal": True, "width": 80, "color_system": None}
    return RichProgressBar(console_kwargs=console, **settings), screen


def show(bar: ProgressBar, *, fn: TrainerFn = TrainerFn.FITTING, **settings: Any) -> FakeTrainer:
    """A fit of 2 epochs of 3 batches (or another call), with a metric."""
    settings = {"max_epochs": 2, "num_training_batches": 3, **settings}
    trainer = FakeTrainer([bar], state=TrainerState(fn=fn), **settings)

    def step(trainer: FakeTrainer, batch_idx: int) -> None:
        trainer.progress_bar_metrics["loss"] = torch.tensor(1 / (trainer.global_step + 1))

    module = nn.Linear(1, 1)
    if fn is TrainerFn.FITTING:
        trainer.fit(module, step)
    else:
        trainer.call("setup", module, str(fn))
        trainer.evaluate(module, "validation" if fn is TrainerFn.VALIDATING else str(fn), [2, 3])
        trainer.call("teardown", module, str(fn))
    return trainer


# -- the meter ---------------------------------------------------------------------------------------------


def test_a_meter_is_due_at_its_interval_at_every_nth_batch_and_at_the_end(now: list[float]) -> None:
    m = Meter(every=2, interval=1.0)
    m.begin(9)
    due = []
    for done in range(1, 10):
        now[0] += 0.4
        due += [done] if m.due(done) else []
    assert due == [2, 6, 9]


def test_a_meter_leaves_pauses_out(now: list[float]) -> None:
    m = Meter()
    m.begin(10)
    for done in range(1, 5):
        now[0] += 0.5
        m.due(done)
    m.pause()
    now[0] += 50
    assert m.seconds == 2
    m.resume()
    assert (m.seconds, m.rate, m.remaining) == (2, 2, 3)
    m.resume()
    assert m.seconds == 2


# -- what there is to show ---------------------------------------------------------------------------------


def test_totals() -> None:
    bar = ProgressBar()
    with pytest.raises(TypeError, match="not attached to a running Trainer"):
        _ = bar.trainer
    trainer = FakeTrainer(num_training_batches=10, num_val_batches=[2, 3], check_val_every_n_epoch=2)
    bar.setup(trainer, nn.Identity(), "fit")  # type: ignore[arg-type]
    assert (bar.total_train_batches, bar.total_val_batches, bar.epoch_description) == (10, 0, "Epoch 0/2")
    trainer.current_epoch = 1
    assert bar.total_val_batches == 5
    trainer.max_epochs, trainer.max_steps, trainer.global_step, trainer.accumulate_grad_batches = -1, 7, 5, 3
    assert (bar.total_train_batches, bar.epoch_description) == (6, "Epoch 1")
    assert [bar.has_dataloader_changed(i) for i in (0, 0, 1)] == [True, False, True]
    assert bar.total_val_batches_current_dataloader == 3


# -- on the screen -----------------------------------------------------------------------------------------


def test_tqdm_in_a_fit(capsys: pytest.CaptureFixture[str]) -> None:
    show(TQDMProgressBar(), seconds_per_batch=0.002)  # a rate of four digits more would push the end off the line
    screen = capsys.readouterr().out
    assert "Sanity Checking: 100%" in screen
    assert "Validation: 100%" in screen
    last = screen.rstrip("\n").split("\r")[-1]
    assert re.fullmatch(r"Epoch 1/1: 100%\|.*\| 3/3 \[00:00<00:00, .*it/s, loss=0.1667, v_num=0\]", last)


def test_rich_in_a_fit() -> None:
    bar, screen = rich_bar()
    show(bar)
    text = screen.getvalue()
    assert "Sanity Checking" in text
    assert "Validation" in text
    lines = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text).strip().split("\n")
    bars, metrics = (line.split("\r")[-1].strip() for line in lines[-2:])
    assert re.fullmatch(r"Epoch 1/1 +━+ 3/3 0:00<0:00 +\d+(\.\d+)?it/s", bars)
    assert metrics == "loss=0.1667  v_num=0"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") >= 1, "the cursor is hidden"


@pytest.mark.parametrize("kind", ["rich", "tqdm"])
def test_an_exception_closes_the_bars(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    bar, screen = rich_bar() if kind == "rich" else (TQDMProgressBar(), None)
    trainer = FakeTrainer([bar], num_training_batches=5)
    module = nn.Linear(1, 1)
    for hook in ("on_train_start", "on_train_epoch_start"):
        bar.setup(trainer, module, "fit")  # type: ignore[arg-type]
        trainer.call(hook, module)
    trainer.call("on_train_batch_end", module, None, None, 0)
    trainer.call("on_exception", module, KeyboardInterrupt())
    text = screen.getvalue() if screen else capsys.readouterr().out
    assert text.rstrip("\x1b[?25h").endswith("\n")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")
    bar.print("after", "wards")
    assert capsys.readouterr().out == "after wards\n"


# -- beside what others print ------------------------------------------------------------------------------


WIPED = "\r\x1b[J\x1b[?25h"
"""With this a rank that fails begins: see `lockstep.supervise.screen_text.wiping`."""
WIDE = {"width": 100, "force_terminal": True, "force_interactive": True}


class Screen(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    def lines(self) -> list[str]:
        """What a terminal shows of it: a carriage return goes back, and what follows covers what was there."""
        rows: list[list[str]] = [[]]
        row = column = 0
        for part in re.split("(\x1b\\[A|\r|\n)", self.getvalue()):
            if part == "\x1b[A":
                row -= 1
            elif part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                rows += [[] for _ in range(row + 1 - len(rows))]
            else:
                rows[row] += " " * (column + len(part) - len(rows[row]))
                rows[row][column : column + len(part)] = part
                column += len(part)
        return ["".join(characters).rstrip() for characters in rows]


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """From now on stdout and stderr are one terminal; not in a fixture, after which pytest captures."""
    screen = Screen(True)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def play(bar: ProgressBar, metrics: dict[str, Any], step: Any = None, **settings: Any) -> None:
    """One epoch of 3 batches with ``metrics``."""
    flags = {"max_epochs": 1, "num_training_batches": 3, "enable_validation": False, **settings}
    FakeTrainer([bar], progress_bar_metrics=metrics, **flags).fit(nn.Linear(1, 1), step)


def test_what_is_printed_stands_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message that ends a fit, and prints in the user's steps, once stood behind the bar on its line."""
    terminal = on_terminal(monkeypatch)

    def step(trainer: FakeTrainer, batch_idx: int) -> None:
        if batch_idx == 1:
            print("a user's", "line")
            print("half a line", end="")
            print(" and the rest")
            print("to stderr", file=sys.stderr)
        if batch_idx == 2:
            rank_zero_info("trainer.fit ended: %s.", "max_epochs=1 reached")

    logging_of_pytest = logging.root.handlers[:]
    logging.root.handlers.clear()
    try:
        play(TQDMProgressBar(), {"loss": 0.5}, step)
    finally:
        logging.root.handlers[:] = logging_of_pytest
    lines = [line for line in terminal.lines() if line]
    above = ["a user's line", "half a line and the rest", "to stderr", "trainer.fit ended: max_epochs=1 reached."]
    assert lines[:-1] == above
    assert lines[-1].startswith("Epoch 0/0: 100%|")
    assert sys.stdout is sys.stderr is terminal, "the streams are given back"


@pytest.mark.parametrize("kind", ["rich", "tqdm"])
def test_another_ranks_traceback_was_glued_to_the_bars(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on with the bar's line, and its last line was drawn over."""
    terminal, metrics = on_terminal(monkeypatch), {"loss": 0.5, "accuracy": 0.25}
    bar = RichProgressBar(1000, console_kwargs=WIDE) if kind == "rich" else TQDMProgressBar()

    def step(trainer: FakeTrainer, batch_idx: int) -> None:
        if batch_idx == 1:  # as another process does it: past all that stands in for a stream here
            Screen.write(terminal, f"{WIPED}Traceback\nKeyError: 'label'\n")
        if batch_idx == 2:
            Screen.write(terminal, "a line without wiping\n")

    play(bar, metrics, step)
    screen = draw_run.Screen(100)
    screen.feed(terminal.getvalue().replace("\n", "\r\n"))
    lines = ["".join(letter for letter, _ in line).rstrip() for line in screen.lines]
    lines = [line for line in lines if line]
    assert lines[:2] == ["Traceback", "KeyError: 'label'"]
    assert lines[2].startswith("a line without wiping")
    assert lines[3].startswith("Epoch 0/0")
    assert len(lines) == (5 if kind == "rich" else 4)  # rich has a line of metrics


def test_the_streams_are_given_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = TQDMProgressBar()
    trainer = FakeTrainer([bar])
    module = nn.Linear(1, 1)
    trainer.call("setup", module, "fit")
    trainer.call("on_train_start", module)
    assert sys.stdout is not terminal
    print("no end of line yet", end="")
    trainer.call("on_exception", module, ValueError())
    assert sys.stdout is terminal
    assert "no end of line yet" in terminal.getvalue()


# -- what users override -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_an_override_may_use_the_bars_on_every_rank(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        made: list[str] = []

        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.set_description("of my own")
            self.made.append("train")
            return bar

        def init_validation_tqdm(self) -> Any:
            self.made.append("val")
            return Tqdm(disable=True)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_start(trainer, pl_module)
            self.train_progress_bar.set_description(f"Round {trainer.current_epoch}")

        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num", None)
            return {**items, "mine": "yes"}

    from lockstep.callbacks.progress.tqdm import Tqdm

    bar = Own()
    show(bar, global_rank=rank)
    assert bar.made == ["train", "val", "val"]
    out = capsys.readouterr().out
    if rank:
        assert out == ""
    else:
        assert "Round 1: 100%" in out
        assert "mine=yes" in out
        assert "Validation" not in out
        assert "v_num" not in out


def test_rich_names_its_bars_as_lightning_does() -> None:
    seen: list[Any] = []

    class Own(RichProgressBar):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            seen.append((self.train_progress_bar.description.strip(), self.train_progress_bar.total))
            assert self.train_progress_bar.id == self.train_progress_bar_id
            assert self.val_progress_bar_id is None
            self.refresh()

        def on_validation_batch_end(self, *args: Any) -> None:
            super().on_validation_batch_end(*args)
            seen.append((self.val_progress_bar.description, self.val_progress_bar.total))

    bar = Own(console_kwargs={"file": io.StringIO()})
    show(bar, max_epochs=1)
    assert seen == [("Sanity Checking", 1), *[("Epoch 0/0", 3)] * 3, *[("Validation", 2)] * 2]
    with pytest.raises(TypeError, match="exists only while"):
        _ = bar.train_progress_bar


def test_a_bar_of_ones_own_that_skips_the_constructor() -> None:
    class Own(ProgressBar):
        def __init__(self) -> None:
            self.enable = True  # type: ignore[method-assign,assignment]
            self.seen: list[float] = []

        def disable(self) -> None:
            self.enable = False  # type: ignore[method-assign,assignment]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self.seen.append((batch_idx + 1) / self.total_train_batches)

    bar = Own()
    play(bar, {})
    assert bar.seen == [pytest.approx(i / 3) for i in (1, 2, 3)]
    assert bar.is_enabled


def test_the_theme_has_the_fields_of_lightnings(lightning: Any) -> None:
    from dataclasses import fields

    from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme as Theirs

    from lockstep.callbacks.progress.rich import RichProgressBarTheme

    assert {field.name for field in fields(RichProgressBarTheme)} == {field.name for field in fields(Theirs)}


# -- without a terminal ------------------------------------------------------------------------------------


def test_a_short_run_writes_one_plain_line(capsys: pytest.CaptureFixture[str]) -> None:
    show(PlainProgressBar())
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Epoch 1/1: step 6, 0:00, loss=0.1667, v_num=0\n")


def test_a_plain_line_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit whose log lay on a full disk, or whose terminal was closed, died of its line."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    show(PlainProgressBar(interval=0))


def test_a_plain_bar_writes_each_epoch_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    show(PlainProgressBar(interval=0))
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["Epoch 0/1", "Epoch 1/1"]


@pytest.mark.parametrize(
    ("terminal", "term", "rich", "kind"),
    [
        (False, "xterm", True, PlainProgressBar),
        (True, "xterm", True, RichProgressBar),
        (True, "xterm", False, TQDMProgressBar),
        (True, "dumb", True, TQDMProgressBar),
    ],
)
def test_which_bar_is_chosen(
    terminal: bool, term: str, rich: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(terminal))
    monkeypatch.setenv("TERM", term)
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert type(objects.choose_progress_bar()) is kind


# -- a fit that goes on within an epoch ----------------------------------------------------------------------


class Stops(Callback):
    """Saves behind the second batch of an epoch, and ends the fit there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize("kind", ["plain", "tqdm", "rich"])
def test_a_fit_that_goes_on_within_an_epoch_names_it(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line began with a colon, and bars had neither name nor total: no hook tells that such an epoch begins."""
    path = tmp_path / "within.ckpt"
    quiet(max_epochs=2, callbacks=[Stops(path)]).fit(Slope(), numbers(4))

    class Shows(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            found.append(
                (shown.train_progress_bar.desc if kind == "tqdm" else task().description.strip(), task().total)
            )

    def task() -> Any:
        return shown.train_progress_bar

    found: list[tuple[str, Any]] = []
    made: dict[str, Any] = {"plain": PlainProgressBar, "tqdm": TQDMProgressBar, "rich": RichProgressBar}
    shown = made[kind]()
    flags = {"enable_progress_bar": True, "callbacks": [shown, *([] if kind == "plain" else [Shows()])]}
    quiet(max_epochs=2, **flags).fit(Slope(), numbers(4), ckpt_path=path)
    if kind == "plain":
        assert "Epoch 1/1: step 8" in capsys.readouterr().err
    else:
        assert [(name.removesuffix(": "), total) for name, total in found] == [("Epoch 1/1", 4)] * 2
