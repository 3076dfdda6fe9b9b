"""What the page about Lightning's names says works, where it did not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep import Callback, LightningModule, Trainer
from lockstep.callbacks import ModelCheckpoint
from lockstep.loggers import CSVLogger, TensorBoardLogger
from lockstep.utilities import CombinedLoader
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, numbers, quiet


def loaders(mode: Any) -> CombinedLoader:
    return CombinedLoader({"a": numbers(4), "b": numbers(2)}, mode)


class Together(Slope):
    """Its evaluations take batches of several loaders."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch_idx)

    test_step = predict_step = validation_step


@pytest.mark.parametrize(("mode", "batches"), [("min_size", 2), ("max_size", 4), ("max_size_cycle", 4)])
def test_batches_of_loaders_side_by_side_are_told_for_each(mode: str, batches: int) -> None:
    trainer, module = quiet(max_epochs=1), Together()
    trainer.fit(module, numbers(2), loaders(mode))
    assert trainer.num_val_batches == [4, 2]
    assert trainer.num_sanity_val_batches == [2, 2]
    assert module.validated == [0, 1, *range(batches)]
    trainer.test(module, loaders(mode), verbose=False)
    trainer.predict(module, loaders(mode))
    assert trainer.num_test_batches == trainer.num_predict_batches == [4, 2]


class Seen(Callback):
    """Notes the epoch that hooks see."""

    def __init__(self) -> None:
        self.epochs: list[tuple[str, int]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(("train", trainer.current_epoch))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.epochs.append(("epoch", trainer.current_epoch))


def test_a_fit_that_goes_on_behind_an_epoch_begins_with_the_next_one(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    quiet(max_epochs=2, callbacks=keeps, enable_checkpointing=True).fit(Slope(), numbers(2))
    seen = Seen()
    quiet(max_epochs=2, callbacks=seen).fit(Slope(), numbers(2), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert seen.epochs == [("train", 1), ("epoch", 1)]


def test_a_run_that_is_past_its_last_epoch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "done.ckpt"
    trainer = quiet(max_epochs=3)
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=r"has done 3 epochs, more than Trainer\(max_epochs=2\)"):
        quiet(max_epochs=2).fit(Slope(), numbers(2), ckpt_path=path)
    with pytest.warns(UserWarning, match="nothing left to train"):
        quiet(max_epochs=3).fit(Slope(), numbers(2), ckpt_path=path)


class Sized(Slope):
    """Has an argument."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_an_argument_that_init_does_not_take_is_left_out_with_a_word(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Sized(2), numbers(2))
    trainer.save_checkpoint(tmp_path / "sized.ckpt")
    with pytest.warns(UserWarning, match=r"load_from_checkpoint\(widht=\.\.\.\).*it is ignored"):
        assert Sized.load_from_checkpoint(tmp_path / "sized.ckpt", widht=3).hparams.width == 2


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_the_file_of_hyperparameters_is_there_without_any(kind: Any, tmp_path: Path) -> None:
    logger = kind(tmp_path)
    trainer = quiet(max_epochs=1, logger=logger)
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(tmp_path / "at.ckpt")
    Slope.load_from_checkpoint(tmp_path / "at.ckpt", hparams_file=os.path.join(logger.log_dir, "hparams.yaml"))


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_a_loggers_own_name_and_folder_say_where_it_writes(kind: Any, tmp_path: Path) -> None:
    class Own(kind):  # type: ignore[misc, valid-type]
        @property
        def name(self) -> str:
            return "mine"

        @property
        def save_dir(self) -> str:
            return str(tmp_path / "elsewhere")

    logger = Own(tmp_path, name="other")
    assert logger.log_dir == str(tmp_path / "elsewhere" / "mine" / "version_0")


def test_off_is_no_sanity_check() -> None:
    assert quiet(num_sanity_val_steps=False).num_sanity_val_steps == 0
    with pytest.raises(MisconfigurationException, match="num_sanity_val_steps=True"):
        quiet(num_sanity_val_steps=True)


def test_loggers_may_be_set_to_none_or_one(tmp_path: Path) -> None:
    trainer, logger = quiet(), CSVLogger(tmp_path)
    trainer.loggers = logger
    assert trainer.loggers == [logger]
    trainer.loggers = None
    assert trainer.loggers == []
    assert trainer.logger is None


def test_another_fit_has_received_no_signal() -> None:
    class Told(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if not self.batches:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=1)
    with pytest.raises(SystemExit):
        trainer.fit(Told(), numbers(4))
    assert trainer.received_sigterm
    trainer.fit(Slope(), numbers(2))
    assert not trainer.received_sigterm
