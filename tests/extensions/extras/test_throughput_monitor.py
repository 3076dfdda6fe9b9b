"""ThroughputMonitor: what is written and when, and that validations are no training time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import lockstep.extensions.extras.throughput_monitor as monitor_file
from lockstep.callbacks import ThroughputMonitor
from tests.callbacks.side_by_side import OURS, loader, model, recorder, theirs, trainer
from tests.loop.pieces import Recorder, Slope, Validated, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


def size(batch: Any) -> int:
    return len(batch[0]) if isinstance(batch, (list, tuple)) else len(batch)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore")
def test_names_and_steps_are_lightnings(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        logger, module = recorder(kit), model(kit)
        module.flops_per_batch = 1000
        module.test_step = module.validation_step
        module.predict_step = lambda batch, batch_idx: None
        monitor = kit.callbacks.ThroughputMonitor(size, lambda batch: 3 * size(batch), window_size=2)
        run = trainer(
            kit,
            logger=logger,
            callbacks=[monitor],
            max_epochs=1,
            log_every_n_steps=2,
            accumulate_grad_batches=accumulate,
            num_sanity_val_steps=1,
            val_check_interval=0.5,
        )
        run.fit(module, loader(24, 4), loader(12, 4))
        run.test(module, loader(16, 4), verbose=False)
        run.predict(module, loader(16, 4))
        totals = [
            (
                step,
                sorted(metrics),
                [metrics[name] for name in sorted(metrics) if name.endswith(("samples", "lengths"))],
            )
            for step, metrics in logger.sent
            if any("/" in name for name in metrics)
        ]
        found.append(totals)
    assert found[0] == found[1]
    names = {name for _, metrics, _ in found[0] for name in metrics}
    assert {"train/device/samples_per_sec", "validate/batches", "test/device/flops_per_sec", "predict/lengths"} <= names


def test_the_batches_of_all_validations_of_a_fit_are_counted_on() -> None:
    monitor = ThroughputMonitor(len)
    for _ in range(2):  # and a fit begins anew
        logger = Recorder()
        quiet(logger=logger, callbacks=monitor, max_epochs=3, log_every_n_steps=2).fit(
            Validated(), numbers(4), numbers(3)
        )
        assert [step for step, metrics in logger.sent if "validate/batches" in metrics] == [2, 5, 8]


class Clock:
    """A clock that steps move, in place of the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(monitor_file, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_rates_of_known_durations_and_validations_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Timed(Validated):
        flops_per_batch = 80

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            clock.now += 0.5
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            clock.now += 7.0

    logger, monitor = Recorder(), ThroughputMonitor(len, window_size=4)
    run = quiet(logger=logger, callbacks=monitor, max_epochs=2, log_every_n_steps=1, num_sanity_val_steps=0)
    run.fit(Timed(), numbers(12, batch_size=2), numbers(2))
    train = [metrics for _, metrics in logger.sent if "train/device/batches_per_sec" in metrics]
    assert len(train) == 9
    for metrics in train:
        assert metrics["train/device/batches_per_sec"] == pytest.approx(2.0)
        assert metrics["train/device/samples_per_sec"] == pytest.approx(4.0)
        assert metrics["train/device/flops_per_sec"] == pytest.approx(160.0)
    assert train[-1]["train/time"] == pytest.approx(6.0)
    assert train[-1]["train/samples"] == 24


def test_a_module_that_does_not_say_its_operations() -> None:
    with pytest.warns(UserWarning, match="Slope has no attribute `flops_per_batch`"):
        quiet(callbacks=ThroughputMonitor(len), max_epochs=1).fit(Slope(), numbers(3))


@pytest.mark.parametrize("settings", [{"window": 3}, {"window_size": 1}])
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="window"):
        ThroughputMonitor(len, **settings)


def written_on_ranks() -> Any:
    logger = Recorder()
    run = on_ranks(logger=logger, callbacks=ThroughputMonitor(len, window_size=2), max_epochs=1, log_every_n_steps=1)
    run.fit(Slope(), numbers(8))
    return [metrics for _, metrics in logger.sent if "train/batches" in metrics]


@pytest.mark.filterwarnings("ignore")
def test_rank_0_writes_for_all(ranks: RankPool) -> None:
    first, second = ranks(2).run(written_on_ranks, timeout=40)
    assert second == []
    assert [metrics["train/samples"] for metrics in first] == [1, 2, 3, 4]
    assert first[-1]["train/samples_per_sec"] == pytest.approx(2 * first[-1]["train/device/samples_per_sec"])


def test_a_monitor_without_a_logger_warns() -> None:
    with pytest.warns(UserWarning, match=r"ThroughputMonitor logs nothing"):
        quiet(max_epochs=2, callbacks=[ThroughputMonitor(batch_size_fn=len)]).fit(Slope(), numbers(2))


@pytest.mark.filterwarnings("error:The peak operations")
def test_a_given_peak_is_used_without_a_warning() -> None:
    monitor = ThroughputMonitor(batch_size_fn=len, available_flops=1e12)
    quiet(max_epochs=1, callbacks=[monitor]).fit(Slope(), numbers(2))
    assert monitor.available_flops == 1e12
