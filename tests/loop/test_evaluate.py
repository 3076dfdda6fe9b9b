"""validate, test, predict: what they return, what they leave as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import LightningDataModule
from lockstep.callbacks import ModelCheckpoint
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Recorder, Slope, Validated, acting, numbers, quiet


class Judged(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", (batch - self.w).mean(), prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", (batch - self.w).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch - self.w


def test_validate_and_test_return_and_print_their_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet()
    assert trainer.validate(Judged(), numbers(4)) == [{"loss": 2.5}]
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()] == [
        ["validation", "value"],
        [shown.splitlines()[1]],
        ["loss", "2.5"],
    ]
    assert trainer.test(Judged(), numbers(5), verbose=False) == [{"test_loss": 3.0}]
    assert capsys.readouterr().out == ""
    assert (trainer.callback_metrics, trainer.num_test_batches) == ({"test_loss": 3.0}, [5])


class Several(Slope):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", batch.mean())
        self.log("own", batch.mean(), add_dataloader_idx=False) if dataloader_idx else None
        self.batches.append((batch_idx, dataloader_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 9) -> None:
        self.log("seen", float(dataloader_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("all", 7.0)


def test_several_loaders_have_their_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    module, recorder = Several(), Recorder()
    first, second = quiet(logger=recorder).validate(module, [numbers(1), numbers(3)])
    assert first == {"loss/dataloader_idx_0": 1.0, "seen/dataloader_idx_0": 0.0, "all": 7.0}
    assert second == {"loss/dataloader_idx_1": 2.0, "seen/dataloader_idx_1": 1.0, "own": 2.0, "all": 7.0}
    assert module.batches == [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert "loader 1" in capsys.readouterr().out


def test_hooks_of_a_single_loader_are_not_told_its_number() -> None:
    assert quiet().validate(Several(), numbers(1), verbose=False) == [{"loss": 1.0, "seen": 9.0, "all": 7.0}]


def test_single_steps_go_to_the_loggers_by_the_batches_of_their_loader() -> None:
    def log(module: Any, batch: Any, at: int, loader: int) -> None:
        if at:
            module.log("x", batch.sum(), on_step=True, on_epoch=False)

    recorder = Recorder()
    trainer = quiet(logger=recorder)
    trainer.validate(type("Steps", (Slope,), {"validation_step": log})(), [numbers(2), numbers(3)], verbose=False)
    assert [(step, sorted(sent)) for step, sent in recorder.sent] == [
        (1, ["x/dataloader_idx_0"]),
        (1, ["x/dataloader_idx_1"]),
        (2, ["x/dataloader_idx_1"]),
    ]


def test_single_steps_are_shown_with_and_without_a_logger_but_decide_nothing() -> None:
    """They were each rank's own among what callbacks decide by; Lightning does not show them there either."""

    module = acting(Validated, validation_step=lambda m, batch, at: m.log("x", batch.sum(), on_step=True))
    for logger in (False, Recorder()):
        trainer = quiet(logger=logger)
        trainer.validate(module, numbers(2), verbose=False)
        assert trainer.callback_metrics == {"x": 1.5, "x_epoch": 1.5}
        assert trainer.logged_metrics == {"x_step": 2.0, "x_epoch": 1.5}


def test_a_step_that_takes_no_loader_number_is_told_of_several_loaders() -> None:
    with pytest.raises(MisconfigurationException, match=r"validation_step\(self, batch, batch_idx, dataloader_idx=0\)"):
        quiet().validate(Judged(), [numbers(1), numbers(1)])


@pytest.mark.parametrize(("limit", "value"), [(2, 1.5), (0.5, 1.5), (1.0, 2.5), (1, 1.0)])
def test_evaluation_has_limits(limit: float, value: float) -> None:
    assert quiet(limit_val_batches=limit).validate(Judged(), numbers(4), verbose=False) == [{"loss": value}]


def test_a_limit_of_zero_leaves_everything_out() -> None:
    """A prediction failed on an assertion; Lightning 2.6.6 gives the same answers."""
    trainer = quiet(limit_val_batches=0, limit_predict_batches=0)
    assert trainer.validate(Judged(), numbers(4), verbose=False) == []
    assert trainer.predict(Judged(), numbers(4)) is None


def test_predict_returns_what_predict_step_returned() -> None:
    trainer = quiet()
    assert [part.tolist() for part in trainer.predict(Judged(), numbers(3, 2))] == [[1.0, 2.0], [3.0]]
    assert trainer.predict(Judged(), numbers(3), return_predictions=False) is None

    numbered = type("Numbered", (Judged,), {"predict_step": lambda self, batch, at, loader=0: (batch.item(), loader)})
    assert trainer.predict(numbered(), [numbers(2), numbers(1)]) == [[(1.0, 0), (2.0, 0)], [(1.0, 1)]]


def test_predict_calls_forward_by_default() -> None:
    assert quiet().predict(acting(forward=lambda m, x: 2 * x), numbers(2)) == [torch.tensor([2.0]), torch.tensor([4.0])]


# -- modes -------------------------------------------------------------------------------------------------


class Moody(Judged):
    """A part of it is in eval mode on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.free = nn.Dropout(), nn.Dropout()
        self.frozen.eval()
        self.modes: list[Any] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.modes.append((self.training, self.frozen.training, self.free.training, torch.is_grad_enabled()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.on_train_batch_start()
        assert torch.is_inference_mode_enabled() is self.expected


def test_evaluation_is_in_eval_mode_and_puts_every_submodule_back() -> None:
    module = Moody()
    module.expected = False  # tensors of an inference mode could not take part in training
    quiet(max_epochs=2, num_sanity_val_steps=1).fit(module, numbers(1), numbers(1))
    validates, trains = (False, False, False, False), (True, False, True, True)
    assert module.modes == [validates, trains, validates, trains, validates]
    assert (module.training, module.frozen.training, module.free.training) == (True, False, True)


@pytest.mark.parametrize("flag", [True, False])
def test_inference_mode_is_a_flag(flag: bool) -> None:
    module = Moody()
    module.expected = flag
    quiet(inference_mode=flag).validate(module, numbers(1), verbose=False)
    assert module.modes == [(False, False, False, False)]
    assert torch.is_grad_enabled()


def test_a_module_may_set_its_own_modes() -> None:
    calls: list[str] = []
    hooks = {f"on_validation_model_{name}": lambda m, name=name: calls.append(name) for name in ("eval", "train")}
    hooks["on_validation_model_zero_grad"] = lambda m: calls.append("zero")
    quiet(max_epochs=1, num_sanity_val_steps=0).fit(acting(Judged, **hooks), numbers(1), numbers(1))
    assert calls == ["zero", "eval", "train"]


# -- data modules, checkpoints -----------------------------------------------------------------------------


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str, call: str = "setup") -> None:
        self.calls.append(f"{call} {stage}")

    def teardown(self, stage: str) -> None:
        self.setup(stage, "teardown")

    train_dataloader, val_dataloader = (lambda self: numbers(2)), (lambda self: numbers(3))
    test_dataloader, predict_dataloader = (lambda self: numbers(5)), (lambda self: numbers(1))


def test_a_data_module_serves_every_call() -> None:
    trainer, data, module = quiet(max_epochs=1, num_sanity_val_steps=0), Data(), Judged()
    trainer.fit(module, datamodule=data)
    assert len(module.batches) == 2
    assert trainer.validate(module, datamodule=data, verbose=False) == [{"loss": 2.0}]
    assert trainer.test(module, data, verbose=False) == [{"test_loss": 3.0}]
    assert trainer.predict(module, data) == [torch.tensor([1.0], dtype=torch.float64)]
    stages = ("fit", "validate", "test", "predict")
    assert data.calls == [call for stage in stages for call in ("prepare", f"setup {stage}", f"teardown {stage}")]
    assert data.trainer is trainer


def test_loaders_and_a_data_module_at_once_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"trainer.fit\(\): pass loaders or `datamodule=`"):
        quiet().fit(Judged(), numbers(1), datamodule=Data())


def test_which_weights_are_judged(tmp_path: Path) -> None:
    """The loss is 2 - w and w grows by 1 an epoch; the best by `max` is the first."""

    class Falls(Judged):
        training_step = lambda self, *_: -self.w  # noqa: E731

    keeps = ModelCheckpoint(tmp_path, monitor="loss", mode="max", save_last=True)
    trainer = quiet(max_epochs=3, enable_checkpointing=True, callbacks=[keeps])
    module = Falls(lr=1.0)
    result = trainer.fit(module, numbers(1), numbers(3))
    assert (result.best_model_path, result.best_model_score) == (keeps.best_model_path, 1.0)

    def loss(**options: Any) -> float:
        return trainer.validate(dataloaders=numbers(3), verbose=False, **options)[0]["loss"]

    newest = keeps.last_model_path
    assert loss(model=module) == -1.0
    assert loss() == 1.0  # without a module: the best one
    assert loss(ckpt_path="last") == -1.0
    assert loss(ckpt_path="best") == 1.0
    assert loss(model=Falls(), ckpt_path=newest) == -1.0


def test_which_of_several_callbacks_best_means_was_not_said(tmp_path: Path) -> None:
    several = [ModelCheckpoint(tmp_path / name, every_n_epochs=every) for every, name in enumerate("ab", start=1)]
    trainer = quiet(max_epochs=2, enable_checkpointing=True, callbacks=several)
    trainer.fit(Judged(), numbers(1), numbers(1))
    with pytest.warns(UserWarning, match=r"2 ModelCheckpoint callbacks; the best checkpoint of the first"):
        trainer.validate(Judged(), numbers(1), verbose=False, ckpt_path="best")
