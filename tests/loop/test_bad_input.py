"""What cannot work is said in one sentence, with its way out, before work starts where that can be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep import LightningModule
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from tests.loop.pieces import Slope, Stream, Validated, acting, heard, numbers, on_ranks, quiet
from tests.tools.pool import RankFailure, RankPool


class NoStep(LightningModule):
    def configure_optimizers(self) -> Any:
        raise AssertionError("work has begun")


class NoOptimizer(LightningModule):
    def setup(self, stage: str) -> None:
        raise AssertionError("work has begun")

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def forward(self, x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.fit(NoStep(), numbers(1)), r"trainer.fit\(NoStep\): No `training_step\(\)` method defined"),
        (lambda t: t.fit(NoOptimizer(), numbers(1)), r"trainer.fit\(NoOptimizer\).*No `configure_optimizers\(\)`"),
        (lambda t: t.fit(Slope()), r"trainer.fit\(Slope\): no training data: pass `train_dataloaders=`"),
        (lambda t: t.fit(torch.nn.Linear(1, 1), numbers(1)), r"must be a `LightningModule` of lockstep, got `Linear`"),
        (lambda t: t.validate(NoOptimizer(), numbers(1)), r"trainer.validate\(NoOptimizer\).*No `validation_step\(\)`"),
        (lambda t: t.validate(Validated()), r"trainer.validate\(\): no data: pass `dataloaders=`.*`val_dataloader`"),
        (lambda t: t.test(Slope(), numbers(1)), r"trainer.test\(Slope\).*No `test_step\(\)`"),
        (lambda t: t.predict(Slope(), numbers(1)), r"neither `predict_step` nor `forward`"),
        (lambda t: t.predict(NoOptimizer()), r"trainer.predict\(\): no data.*`predict_dataloader`"),
        (lambda t: t.validate(), r"trainer.validate\(model\): it must be a `LightningModule`"),
        (lambda t: t.fit(Slope(), numbers(0)), r"train_dataloader has no batches: its data set is empty \(length 0\)"),
        (lambda t: t.fit(Slope(), numbers(3, 4, drop_last=True)), r"drop_last=True drops .* 3 samples.*batch_size=4"),
        (lambda t: t.fit(Slope(), []), r"train_dataloader.*no loaders"),
        (
            lambda t: t.fit(Slope(), numbers(1), ckpt_path="best"),
            r'ckpt_path="best"\).*`ModelCheckpoint` is not configured',
        ),
        (lambda t: t.save_checkpoint("x.ckpt"), r"save_checkpoint\('x.ckpt'\): there is nothing to save"),
    ],
)
def test_calls_that_cannot_work(call: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said) as raised:
        call(quiet(max_epochs=1))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_a_module_without_a_step_is_refused_before_processes_are_started(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks imported everything, met, and each refused it in a traceback of its own."""

    def start(*args: object) -> None:
        raise AssertionError("processes are started")

    trainer = quiet(strategy=strategy, devices=2, max_epochs=1)
    monkeypatch.setattr(trainer, "_launch", start)
    for call, method in ((trainer.fit, "training_step"), (trainer.test, "test_step")):
        with pytest.raises(MisconfigurationException, match=rf"\(NoStep\): No `{method}\(\)` method defined"):
            call(NoStep(), numbers(2))


def test_a_save_after_a_fit_whose_set_up_failed_said_that_none_has_no_parameters() -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no data here")

    trainer = quiet(max_epochs=1)
    with pytest.raises(ValueError, match="no data here"):
        trainer.fit(acting(setup=fail), numbers(1))
    with pytest.raises(MisconfigurationException, match="nothing to save before the first fit has set up its module"):
        trainer.save_checkpoint("x.ckpt")


@pytest.mark.parametrize("returned", ["loss", 3.0, {"los": torch.tensor(1.0)}, {"loss": 1.0}])
def test_a_training_step_that_returns_something_else(returned: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r'`training_step` returned \w+: return the loss.*"loss"'):
        quiet(max_epochs=1).fit(acting(training_step=lambda *_: returned), numbers(1))


class Returns(Slope):
    """Its loss is what a function makes of the one that could be trained."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(self.w * batch)


LOSSES: Any = pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.detach().mean(), "a loss that does not require gradients: it was detached"),
        (lambda loss: torch.tensor(loss.mean().item()), "a loss that does not require gradients"),
        (lambda loss: loss, r"a loss of shape \(2,\): use one number, for example `loss.mean\(\)`"),
    ],
)


@LOSSES
def test_a_loss_without_a_way_back(change: Any, said: str) -> None:
    """It was torch's own sentence of an element 0."""
    with pytest.raises(MisconfigurationException, match=f"`training_step` returned {said}"):
        quiet(max_epochs=1).fit(Returns(change), numbers(2, 2))


@LOSSES
def test_a_loss_without_a_way_back_in_manual_optimization(change: Any, said: str) -> None:
    class ByHand(Returns):
        def __init__(self) -> None:
            super().__init__(change)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))

    with pytest.raises(MisconfigurationException, match=rf"manual_backward\(\) was given {said}"):
        quiet(max_epochs=1).fit(ByHand(), numbers(2, 2))


def test_an_error_of_a_backward_that_is_not_the_loss_s_stays_itself() -> None:
    def change(loss: Any) -> Any:
        loss.register_hook(lambda gradient: 1 / 0)
        return loss.mean()

    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1).fit(Returns(change), numbers(2, 2))

    class Fails(Slope):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        quiet(max_epochs=1).fit(Fails(), numbers(2, 2))


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_an_epoch_of_none_is_warned_of_once(flags: dict[str, Any]) -> None:
    module = Returns(lambda loss: None)
    trainer = quiet(max_epochs=2, **flags)
    said = heard(lambda: trainer.fit(module, numbers(4)), "training_step")
    assert said == [
        "`training_step` returned None: the micro-batch is skipped. If this is not intended, return the loss."
    ]
    assert (trainer.current_epoch, module.w.item()) == (2, 0.0)


def test_none_for_an_optimizer_that_steers_by_the_loss() -> None:
    """LBFGS ended in float(None)."""

    class ByLoss(Returns):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(MisconfigurationException, match=r"LBFGS.*`training_step` returned None.*return the loss"):
        quiet(max_epochs=1).fit(ByLoss(lambda loss: None), numbers(1))


def test_a_monitor_that_was_never_logged(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match=r"EarlyStopping\(monitor='los'\).*'loss'"):
        quiet(max_epochs=1, callbacks=[EarlyStopping("los")]).fit(
            acting(training_step=lambda m, batch, at: m.log("loss", batch.sum())), numbers(1)
        )
    flags: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, monitor="los")]}
    with pytest.raises(MisconfigurationException, match=r"ModelCheckpoint\(monitor='los'\).*loss"):
        quiet(max_epochs=1, **flags).fit(
            acting(training_step=lambda m, batch, at: m.log("loss", batch.sum())), numbers(1)
        )


def test_a_stream_that_is_shorter_than_the_ranks(ranks: RankPool) -> None:
    def fit(by_hand: bool) -> None:
        module = Slope()
        module.automatic_optimization = not by_hand
        on_ranks(max_epochs=1).fit(module, DataLoader(Stream(1)))

    ranks(2).run(fit, False, timeout=20)
    with pytest.raises(RankFailure, match="shorter than the number of ranks"):
        ranks(2).run(fit, True, timeout=20)


# -- checkpoints -------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    trainer, path = quiet(max_epochs=1), tmp_path / "good.ckpt"
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(path)
    return path


def resume(path: Path) -> None:
    module = acting(training_step=lambda *_: pytest.fail("work has begun"))
    quiet(max_epochs=2).fit(module, numbers(2), ckpt_path=path)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.ckpt"):
        resume(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit"])
def test_a_damaged_checkpoint(written: Path, damage: str) -> None:
    content = bytearray(written.read_bytes())
    content[len(content) // 2] ^= 4 if damage == "a flipped bit" else 0
    written.write_bytes(content[:-200] if damage == "truncated" else content)
    with pytest.raises(CorruptCheckpoint, match=r"good.ckpt"):
        resume(written)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "notes.ckpt"
    path.write_text("not a checkpoint")
    with pytest.raises(CorruptCheckpoint, match=r"notes.ckpt"):
        resume(path)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises((CorruptCheckpoint, MisconfigurationException), match="state_dict"):
        resume(path)


def test_what_cannot_be_read_back_is_refused_and_the_earlier_file_stays(written: Path) -> None:
    def add(module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"function": print}

    before = written.read_bytes()
    trainer = quiet(max_epochs=1)
    trainer.fit(acting(on_save_checkpoint=add), numbers(1))
    with pytest.raises(MisconfigurationException, match=r'checkpoint\["extra"\]\["function"\]'):
        trainer.save_checkpoint(written)
    assert written.read_bytes() == before
    assert list(written.parent.iterdir()) == [written]


def test_a_path_that_cannot_be_written_is_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def save() -> str:
        trainer = on_ranks(max_epochs=1)
        trainer.fit(Slope(), numbers(2))
        try:
            trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")
        except (OSError, RuntimeError) as error:
            return str(error)
        return ""

    assert all("x.ckpt" in said or "file" in said for said in ranks(2).run(save, timeout=30))
