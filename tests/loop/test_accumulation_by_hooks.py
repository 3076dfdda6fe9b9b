"""A hook sets ``trainer.accumulate_grad_batches`` at an epoch's start: a fit that resumes behind it keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.callbacks import Callback, GradientAccumulationScheduler
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Killed(Exception):
    """In the place of a SIGKILL."""


class Sets(Callback):
    """Accumulates 2 batches in the second epoch, 1 in the others."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = 2 if trainer.current_epoch == 1 else 1


class Schedule(GradientAccumulationScheduler):
    """The same by a subclass that answers otherwise than its table."""

    def __init__(self) -> None:
        super().__init__({0: 1})

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        return 2 if epoch == 1 else 1


class Cut(Callback):
    """Saves behind the ``nth`` batch and ends the run there."""

    def __init__(self, nth: int, path: Path) -> None:
        self.left, self.path = nth, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            trainer.save_checkpoint(self.path)
            raise Killed


def in_two(kind: type[Callback], nth: int, path: Path, start: Any = quiet) -> tuple[list[float], list[float], int]:
    """The windows' gradients of an unbroken fit and of one in two parts, and how often the second part has stepped."""
    expected, first, second = Slope(), Slope(), Slope()
    start(max_epochs=3, callbacks=[kind()]).fit(expected, numbers(8, 2))
    with pytest.raises(Killed):
        start(max_epochs=3, callbacks=[kind(), Cut(nth, path)]).fit(first, numbers(8, 2))
    result = start(max_epochs=3, callbacks=[kind()]).fit(second, numbers(8, 2), ckpt_path=path)
    return expected.gradients, first.gradients + second.gradients, result.global_step


@pytest.mark.parametrize("kind", [Sets, Schedule])
@pytest.mark.parametrize("nth", [3, 4, 5, 6, 7, 8, 9])
def test_a_resume_keeps_the_accumulation_that_a_hook_has_set(kind: type[Callback], nth: int, tmp_path: Path) -> None:
    """The rest of the epoch stepped at every batch."""
    expected, found, steps = in_two(kind, nth, tmp_path / "cut.ckpt")
    assert len(expected) == 10
    assert (found, steps) == (expected, 10)


def test_a_flag_that_the_user_has_changed_wins(tmp_path: Path) -> None:
    path, second = tmp_path / "cut.ckpt", Slope()
    with pytest.raises(Killed):
        quiet(max_epochs=2, callbacks=[Sets(), Cut(6, path)]).fit(Slope(), numbers(8, 2))
    quiet(max_epochs=2, accumulate_grad_batches=4).fit(second, numbers(8, 2), ckpt_path=path)
    assert len(second.gradients) == 1


def on_two(nth: int, path: Path) -> tuple[list[float], list[float], int]:
    return in_two(Sets, nth, path, on_ranks)


def test_a_resume_keeps_the_accumulation_that_a_hook_has_set_on_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for expected, found, steps in ranks(2).run(on_two, 3, tmp_path / "cut.ckpt"):
        assert (found, steps) == (expected, 5)
