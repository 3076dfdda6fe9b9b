"""GradientAccumulationScheduler: the windows of each epoch, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep import Callback
from lockstep.callbacks import GradientAccumulationScheduler
from lockstep.ground.errors import MisconfigurationException
from tests.callbacks.side_by_side import OURS, loader, model, theirs, trainer
from tests.loop.pieces import SaveAt, Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


def test_the_windows_and_the_weights_are_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kit in (OURS, theirs(monkeypatch)):
        seen: list[tuple[int, int, int]] = []

        class Watch(kit.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                seen.append((trainer.current_epoch, trainer.accumulate_grad_batches, trainer.global_step))  # noqa: B023

        module, schedule = model(kit), kit.callbacks.GradientAccumulationScheduler({1: 2, 3: 3})
        trainer(kit, callbacks=[schedule, Watch()], max_epochs=4).fit(module, loader(24, 4))
        found.append((seen, schedule.scheduling, schedule.epochs, module.state_dict()))
    ours, others = found
    assert ours[:3] == others[:3]
    assert ours[0][-1] == (3, 3, 6 + 3 + 3 + 2)
    for name, value in ours[3].items():
        torch.testing.assert_close(value, others[3][name], rtol=1e-12, atol=1e-14)


def test_steps_are_estimated_by_the_schedule_and_the_flag_is_given_back() -> None:
    class Estimates(Slope):
        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    run = quiet(callbacks=GradientAccumulationScheduler({1: 4}), max_epochs=3)
    for _ in range(2):
        module = Estimates()
        run.fit(module, numbers(8))
        assert module.estimate == run.global_step == 8 + 2 + 2
        assert run.accumulate_grad_batches == 1


def test_a_fit_that_fails_leaves_the_next_one_free() -> None:
    class Fails(Callback):
        on = True

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if self.on:
                raise RuntimeError("no luck")

    fails = Fails()
    run = quiet(callbacks=[GradientAccumulationScheduler({0: 2}), fails], max_epochs=1)
    with pytest.raises(RuntimeError, match="no luck"):
        run.fit(Slope(), numbers(4))
    fails.on = False
    assert run.fit(Slope(), numbers(4)).global_step == 2


def test_a_resume_inside_a_window_goes_on_with_the_epochs_windows(tmp_path: Path) -> None:
    path, whole, resumed = tmp_path / "run.ckpt", Slope(lr=0.1), Slope(lr=0.1)
    callbacks = [GradientAccumulationScheduler({1: 4}), SaveAt(4, path, epoch=1)]
    quiet(callbacks=callbacks, max_epochs=2).fit(whole, numbers(10))
    quiet(callbacks=callbacks[:1], max_epochs=2).fit(resumed, numbers(10), ckpt_path=path)
    assert resumed.gradients == whole.gradients[-2:]
    assert torch.equal(resumed.w, whole.w)


def accumulated() -> Any:
    module = Slope(lr=0.1)
    on_ranks(callbacks=GradientAccumulationScheduler({1: 2}), max_epochs=2).fit(module, numbers(8))
    return dist.get_rank(), module.gradients, module.w.item()


def test_two_ranks_take_the_steps_of_one_process_with_twice_the_batch(ranks: RankPool) -> None:
    alone = Slope(lr=0.1)
    quiet(callbacks=GradientAccumulationScheduler({1: 2}), max_epochs=2).fit(alone, numbers(8, batch_size=2))
    for _, gradients, w in ranks(2).run(accumulated, timeout=40):
        assert gradients == pytest.approx(alone.gradients, rel=1e-12)
        assert w == pytest.approx(alone.w.item(), rel=1e-12)


def test_what_it_refuses() -> None:
    for empty in ({}, None, 3):
        with pytest.raises(TypeError, match="at least one entry"):
            GradientAccumulationScheduler(empty)  # type: ignore[arg-type]
    for wrong in ({-1: 2}, {"0": 2}, {0: 0}, {0: 1.5}, {0: True}):
        with pytest.raises(MisconfigurationException, match="scheduling="):
            GradientAccumulationScheduler(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Trainer\(accumulate_grad_batches=2\)"):
        quiet(callbacks=GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2).fit(Slope(), numbers(4))
    manual = Slope()
    manual.automatic_optimization = False
    with pytest.raises(RuntimeError, match="only with automatic optimization"):
        quiet(callbacks=GradientAccumulationScheduler({0: 2})).fit(manual, numbers(4))
