"""DeviceStatsMonitor: names and steps of what is written, and what it needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.callbacks import DeviceStatsMonitor
from tests.callbacks.fake_trainer import FakeTrainer
from tests.callbacks.side_by_side import OURS, loader, model, recorder, theirs, trainer

pytest.importorskip("psutil")


@pytest.mark.parametrize("cpu_stats", [None, True, False])
@pytest.mark.filterwarnings("ignore")
def test_names_and_steps_are_lightnings(cpu_stats: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        logger, module = recorder(kit), model(kit)
        module.test_step = module.validation_step
        run = trainer(
            kit,
            logger=logger,
            callbacks=[kit.callbacks.DeviceStatsMonitor(cpu_stats)],
            max_epochs=2,
            log_every_n_steps=2,
            accumulate_grad_batches=2,
        )
        run.fit(module, loader(24, 4), loader(12, 4))
        run.test(module, loader(12, 4), verbose=False)
        found.append([(step, sorted(metrics)) for step, metrics in logger.sent if "epoch" not in metrics])
    assert found[0] == found[1]
    assert bool(found[0]) is (cpu_stats is not False)


@pytest.mark.parametrize("cpu_stats", [None, True])
def test_what_is_written_on_a_gpu(cpu_stats: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.peak": 7})
    monitor, run = DeviceStatsMonitor(cpu_stats), FakeTrainer()
    run.strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    monitor.setup(run, None, "fit")  # type: ignore[arg-type]
    monitor.on_train_batch_start(run, None, None, 0)  # type: ignore[arg-type]
    written = run.loggers[0].written[0][1]
    assert written["DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.peak"] == 7
    assert len(written) == (4 if cpu_stats else 1)
