"""What would otherwise happen without a word: a sentence each, that names the step or what to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from lockstep.callbacks import Callback
from lockstep.ground.rank import forget_warnings
from tests.loop.pieces import Slope, numbers, quiet


def heard(run: Callable[[], Any], *words: str) -> list[str]:
    """The warnings of a run in which all of these words are."""
    forget_warnings()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    found = [str(warning.message) for warning in seen]
    return [each for each in found if all(word in each for word in words)]


# -- how long a fit is


class Stops(Slope):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = True


class Predicts(Slope):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch


def test_a_fit_whose_epochs_nobody_chose_says_where_it_ends() -> None:
    [said] = heard(lambda: quiet().fit(Stops(), numbers(3)), "max_epochs", "not set")
    assert "1000 epochs, at step 3000" in said
    assert "max_epochs=-1" in said
    for flags in ({"max_epochs": 1000}, {"max_steps": 2}, {"max_time": {"minutes": 1}}, {"fast_dev_run": True}):
        assert heard(lambda flags=flags: quiet(**flags).fit(Stops(), numbers(3)), "not set") == []  # type: ignore[misc]
    assert heard(lambda: quiet().predict(Predicts(), numbers(1)), "max_epochs") == []


def test_a_resume_beyond_the_limit_says_that_nothing_is_left(tmp_path: Any) -> None:
    trainer = quiet(max_epochs=3)
    trainer.fit(Slope(), numbers(2))
    path = str(tmp_path / "three.ckpt")
    trainer.save_checkpoint(path)

    def resume(**flags: Any) -> list[str]:
        return heard(lambda: quiet(**flags).fit(Slope(), numbers(2), ckpt_path=path), "nothing left to train")

    [said] = resume(max_epochs=3)
    assert "after step 6 and 3 epochs" in said
    assert "max_epochs=3 reached" in said
    assert path in said
    assert "max_steps=4 reached" in resume(max_epochs=9, max_steps=4)[0]
    assert resume(max_epochs=4) == []


# -- values that a step returns, as in 2019


class Of2019(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "log": {"train_loss": loss}, "progress_bar": {"train_loss": loss}}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"val_loss": batch.mean(), "text": "x"}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"test_loss": 1.0}


class LogsLate(Of2019):
    """Keeps what its step returns by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.values.append(batch.mean())
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.values).mean())


class Reads(Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        pass


def test_returned_values_that_nobody_reads_are_named() -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    [said] = heard(lambda: trainer.fit(Of2019(), numbers(3), numbers(2)), "training_step")
    assert "['log', 'progress_bar']" in said
    assert "self.log_dict(values)" in said
    [said] = heard(lambda: quiet().validate(Of2019(), numbers(3)), "validation_step")
    assert "['val_loss']" in said
    assert "self.log('val_loss', value)" in said
    assert len(heard(lambda: quiet().test(Of2019(), numbers(3)), "self.log('test_loss', value)")) == 1
    assert heard(lambda: quiet().validate(LogsLate(), numbers(3)), "validation_step") == []
    assert heard(lambda: quiet(callbacks=[Reads()]).validate(Of2019(), numbers(3)), "validation_step") == []


# -- parts that do not learn as they seem to


def test_a_part_in_eval_mode_stayed_in_it_without_a_word() -> None:
    class Loaded(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout()).eval()  # as transformers gives it

    said = heard(lambda: quiet(max_epochs=1).fit(Loaded(), numbers(1)), "eval mode")
    assert len(said) == 1
    assert "'body' and 2 more" in said[0]
    assert not heard(lambda: quiet(max_epochs=1).fit(Slope(), numbers(1)), "eval mode")
