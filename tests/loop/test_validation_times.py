"""When a fit validates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.utils.data import DataLoader, Sampler

from lockstep.loop import validation_timing
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import QUIET, Stream, Validated, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

# flags -> training batches before each validation of 3 epochs of 10; all as measured with Lightning 2.6.6
TIMES: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [10, 20, 30]),
    ({"val_check_interval": 1.0}, [10, 20, 30]),
    ({"val_check_interval": 4}, [4, 8, 14, 18, 24, 28]),
    ({"val_check_interval": 0.3}, [3, 6, 9, 13, 16, 19, 23, 26, 29]),
    ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12, 16, 20, 24, 28]),
    ({"val_check_interval": 25, "check_val_every_n_epoch": None}, [25]),
    ({"check_val_every_n_epoch": 2}, [20]),
    ({"check_val_every_n_epoch": 2, "val_check_interval": 5}, [15, 20]),
    ({"limit_val_batches": 0}, []),
    ({"limit_train_batches": 3, "val_check_interval": 0.5}, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
]


@pytest.mark.parametrize(("flags", "times"), TIMES)
def test_validation_comes_when_its_flags_say(flags: dict[str, Any], times: list[int]) -> None:
    module = Validated()
    quiet(max_epochs=3, num_sanity_val_steps=0, **flags).fit(module, numbers(10), numbers(1))
    assert module.validated == times


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ({}, [10, 20]),
        ({"val_check_interval": 4}, [4, 8, 14, 18]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12, 16, 20]),
    ],
)
def test_validation_of_a_stream_without_a_length(flags: dict[str, Any], times: list[int]) -> None:
    module = Validated()
    quiet(max_epochs=2, num_sanity_val_steps=0, **flags).fit(module, DataLoader(Stream(10)), numbers(1))
    assert module.validated == times


class Short(Sampler[int]):
    """Tells twelve samples, and gives eight."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_an_epoch_that_is_shorter_than_its_loader_told_is_validated_at_its_end() -> None:
    """No validation came, and nothing said so: the number of batches that it waited for was never reached."""
    module = Validated()
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(module, numbers(12, sampler=Short()), numbers(1))
    assert module.validated == [8, 16]


@pytest.mark.parametrize("stream", [False, True])
def test_a_fit_that_stops_early_is_validated_once_at_its_end(stream: bool) -> None:
    """It was validated after every micro-batch of the window in which it was told to stop."""

    module = acting(Validated, on_train_batch_start=lambda m, *_: setattr(m.trainer, "should_stop", True))
    train = DataLoader(Stream(10)) if stream else numbers(10)
    quiet(max_epochs=3, accumulate_grad_batches=4, num_sanity_val_steps=0).fit(module, train, numbers(1))
    assert module.validated == [4]


@pytest.mark.parametrize(("steps", "batches"), [(0, []), (1, [0]), (2, [0, 1]), (-1, [0, 1, 2]), (9, [0, 1, 2])])
def test_the_sanity_check_tries_so_many_batches(steps: int, batches: list[int]) -> None:
    seen: list[int] = []
    module = acting(
        Validated, validation_step=lambda m, batch, at: seen.append(at) if m.trainer.sanity_checking else None
    )
    trainer = quiet(max_epochs=1, num_sanity_val_steps=steps)
    trainer.fit(module, numbers(2), numbers(3))
    assert seen == batches
    assert trainer.num_sanity_val_batches == [len(batches)]


def test_a_sanity_check_shows_its_metrics_and_then_forgets_them() -> None:
    """They were not to be seen at all, and a KeyError in `on_validation_epoch_end` ended the fit."""

    class Sane(Validated):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("checked", batch.sum())

        def on_validation_epoch_end(self) -> None:
            seen.append((self.trainer.sanity_checking, self.trainer.callback_metrics["checked"].item()))

        def on_train_start(self) -> None:
            assert self.trainer.callback_metrics == {}

    seen: list[tuple[bool, float]] = []
    quiet(max_epochs=1, num_sanity_val_steps=2).fit(Sane(), numbers(2), numbers(3))
    assert seen == [(True, 1.5), (False, 2.0)]


def test_a_sanity_check_leaves_no_trace_in_the_random_states() -> None:
    import torch

    drawn: list[float] = []
    for steps in (0, 2):
        torch.manual_seed(5)
        quiet(max_epochs=1, num_sanity_val_steps=steps).fit(
            acting(
                Validated,
                validation_step=lambda *_: torch.rand(1) and None,
                on_train_start=lambda m: drawn.append(torch.rand(1).item()),
            ),
            numbers(1),
            numbers(3),
        )
    assert drawn[0] == drawn[1]


def test_intervals_that_cannot_be_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"`val_check_interval` \(11\).*check_val_every_n_epoch=None"):
        quiet(max_epochs=1, val_check_interval=11).fit(Validated(), numbers(10), numbers(1))
    with pytest.raises(MisconfigurationException, match=r"val_check_interval=0.5"):
        quiet(max_epochs=1, val_check_interval=0.5).fit(Validated(), DataLoader(Stream(10)), numbers(1))


# -- by time -----------------------------------------------------------------------------------------------


class Clock:
    """A clock that a module moves: ten seconds a training batch."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Ticks(Validated):
    clock: Clock

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.clock.now += 10.0
        return super().training_step(batch, batch_idx)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(validation_timing, "time", made)
    monkeypatch.setattr(Ticks, "clock", made, raising=False)
    return made


@pytest.mark.parametrize("interval", ["00:00:00:40", timedelta(seconds=40), {"seconds": 40}])
def test_a_time_is_a_time_however_it_is_written(clock: Clock, interval: Any) -> None:
    module = Ticks()
    trainer = quiet(max_epochs=3, num_sanity_val_steps=0, val_check_interval=interval)
    trainer.fit(module, numbers(10), numbers(1))
    assert module.validated == [4, 8, 12, 16, 20, 24, 28]  # not at the ends of epochs: the time is all that counts
    assert trainer.val_check_interval == timedelta(seconds=40)
    assert trainer.val_check_batch is None


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ({"check_val_every_n_epoch": None}, [4, 8, 12, 16, 20, 24, 28]),
        ({"check_val_every_n_epoch": 2}, [11, 15, 19]),  # as soon as a second epoch has begun
        ({"accumulate_grad_batches": 3}, [6, 10, 16, 20, 26, 30]),  # at the ends of windows
        ({"limit_val_batches": 0}, []),
        ({"fast_dev_run": 5}, [5]),
    ],
)
def test_validation_by_time_with_other_flags(clock: Clock, flags: dict[str, Any], times: list[int]) -> None:
    module = Ticks()
    quiet(**{"max_epochs": 3, "num_sanity_val_steps": 0, "val_check_interval": {"seconds": 40}, **flags}).fit(
        module, numbers(10), numbers(1)
    )
    assert module.validated == times


def test_lightning_validates_at_the_same_times(lightning: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop

    for module in (evaluation_loop, fit_loop, training_epoch_loop):
        monkeypatch.setattr(module, "time", clock)

    class Theirs(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Ticks()
            self.training_step, self.validation_step = self.inner.training_step, self.inner.validation_step
            self.configure_optimizers = self.inner.configure_optimizers

    for flags in ({}, {"check_val_every_n_epoch": 2}, {"check_val_every_n_epoch": None}):
        common: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 0, "val_check_interval": {"seconds": 40}}
        ours, theirs = Ticks(), Theirs()
        quiet(**common, **flags).fit(ours, numbers(10), numbers(1))
        lightning.Trainer(**QUIET, **common, **flags).fit(theirs, numbers(10), numbers(1))
        assert ours.validated == theirs.inner.validated


@pytest.mark.parametrize("value", ["12:30", "a:b:c:d", {"fortnights": 1}, timedelta(seconds=-1)])
def test_a_time_that_is_none(value: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r'val_check_interval=.*"DD:HH:MM:SS"'):
        quiet(val_check_interval=value)


def by_time() -> list[int]:
    module = acting(Validated, on_train_batch_start=lambda m, *_: m.global_rank or time.sleep(0.02))
    trainer = on_ranks(max_epochs=1, num_sanity_val_steps=0, val_check_interval={"milliseconds": 100})
    trainer.fit(module, numbers(60), numbers(2))
    return module.validated


def test_all_ranks_validate_at_the_same_batches(ranks: RankPool) -> None:
    first, second = ranks(2).run(by_time, timeout=40)
    assert first == second
    assert 2 <= len(first) <= 6
