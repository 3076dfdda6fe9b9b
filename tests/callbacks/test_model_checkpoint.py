"""When ModelCheckpoint saves, under which name, and what it deletes; played by a Trainer reduced to its counters."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.callbacks import model_checkpoint
from lockstep.callbacks.model_checkpoint import ModelCheckpoint, fill
from lockstep.checkpoint.format import load, save
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.types import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lockstep.loggers.csv import CSVLogger

MODULE: Any = SimpleNamespace(automatic_optimization=True)


@dataclass
class OneRankAgreement:
    """Flags that go up at the next boundary after they were requested."""

    names: list[str] = field(default_factory=list)
    requested: set[int] = field(default_factory=set)
    up: set[int] = field(default_factory=set)

    def register(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    def request(self, bit: int) -> None:
        self.requested.add(bit)

    def settle(self) -> None:
        self.up |= self.requested
        self.requested.clear()

    def is_up(self, bit: int) -> bool:
        return bit in self.up

    def now(self, bit: int) -> bool:
        return bit in self.requested | self.up

    def lower(self, bit: int) -> None:
        self.requested.discard(bit)
        self.up.discard(bit)


@dataclass
class FakeTrainer:
    """Counters and files of a fit, without a model."""

    default_root_dir: str
    callback: ModelCheckpoint
    batches: int = 4
    val_batches: int = 1
    accumulate: int = 1
    check_val_every_n_epoch: int | None = 1
    val_check_interval: float = 1.0
    limit_val_batches: float = 1.0
    values: Callable[[int], dict[str, float]] = lambda epoch: {}  # what validation of an epoch logs
    loggers: list[Any] = field(default_factory=list)
    fast_dev_run: int = 0
    world_size: int = 1
    is_global_zero: bool = True
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        self.state = TrainerState(TrainerStatus.RUNNING, TrainerFn.FITTING, RunningStage.TRAINING)
        self.agreement = OneRankAgreement()
        self.strategy = Strategy()
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.global_step = self.current_epoch = 0
        self.is_last_batch = self.sanity_checking = False
        self.fit_loop = SimpleNamespace(
            lacks_metrics=None,
            is_interrupted=False,
            expects_validation=self.val_batches > 0,
            validation_follows=self.validation_follows,
        )
        self.published = SimpleNamespace(measured={})
        self.saves: list[tuple[int, str]] = []

    def save_checkpoint(self, path: str, weights_only: bool = False) -> None:
        assert not self.inside_window, "saved while gradients were on the way"
        self.saves.append((self.global_step, os.path.basename(path)))
        save({"global_step": self.global_step, "callbacks": {"c": self.callback.state_dict()}}, path)

    def reduced_metrics(self) -> dict[str, torch.Tensor]:
        return dict(self.callback_metrics)

    def log(self, values: dict[str, float]) -> None:
        self.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def validate(self) -> None:
        if self.val_batches:
            self.log(self.values(self.current_epoch))
            self.callback.on_validation_end(self, MODULE)  # type: ignore[arg-type]

    def validation_follows(self) -> bool:
        if not self.val_batches:
            return False
        if self.val_check_interval != 1.0:
            return (self.batch + 1) % int(self.val_check_interval) == 0
        every = self.check_val_every_n_epoch
        return self.is_last_batch and (every is None or (self.current_epoch + 1) % every == 0)

    def epoch(self, start: int = 0) -> None:
        for batch_idx in range(start, self.batches):
            self.batch, self.is_last_batch = batch_idx, batch_idx + 1 == self.batches
            self.inside_window = bool((batch_idx + 1) % self.accumulate) and not self.is_last_batch
            if not self.inside_window:
                self.global_step += 1
            self.agreement.settle()
            self.callback.on_train_batch_end(self, MODULE, None, None, batch_idx)  # type: ignore[arg-type]
            if self.validation_follows():
                self.validate()
        self.callback.on_train_epoch_end(self, MODULE)  # type: ignore[arg-type]
        self.current_epoch += 1

    def fit(self, epochs: int) -> FakeTrainer:
        trainer: Any = self
        self.inside_window = False
        self.callback.setup(trainer, MODULE, "fit")
        if self.ckpt_path:
            checkpoint = load(self.ckpt_path)
            self.global_step = checkpoint["global_step"]
            self.callback.load_state_dict(checkpoint["callbacks"]["c"])
        self.callback.on_train_start(trainer, MODULE)
        for _ in range(epochs):
            self.epoch()
        self.callback.on_train_end(trainer, MODULE)
        return self


def run(root: Path, callback: ModelCheckpoint, epochs: int = 1, **options: Any) -> FakeTrainer:
    return FakeTrainer(str(root), callback, **options).fit(epochs)


def files(callback: ModelCheckpoint) -> list[str]:
    return sorted(os.listdir(str(callback.dirpath)))


def losses(*values: float) -> Callable[[int], dict[str, float]]:
    return lambda epoch: {"loss": values[epoch]}


class TestWhen:
    def test_by_default_the_latest_epoch_is_kept(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint()
        trainer = run(tmp_path, callback, epochs=3)
        assert trainer.saves == [(4, "epoch=0-step=4.ckpt"), (8, "epoch=1-step=8.ckpt"), (12, "epoch=2-step=12.ckpt")]
        assert files(callback) == ["epoch=2-step=12.ckpt"]
        assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=12.ckpt")

    @pytest.mark.parametrize("accumulate", [1, 2, 3])
    def test_every_n_steps_at_boundaries_only_and_once(self, tmp_path: Path, accumulate: int) -> None:
        callback = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
        trainer = run(tmp_path, callback, epochs=2, batches=11, accumulate=accumulate)
        last = trainer.global_step
        assert [step for step, _ in trainer.saves] == list(range(3, last + 1, 3))

    def test_validation_every_second_epoch(self, tmp_path: Path) -> None:
        trainer = run(tmp_path, ModelCheckpoint(save_top_k=-1), epochs=4, check_val_every_n_epoch=2)
        assert [step for step, _ in trainer.saves] == [8, 16]

    @pytest.mark.parametrize(("when", "step"), [(True, [4]), (False, [2, 4])])
    def test_save_on_train_epoch_end_decides(self, tmp_path: Path, when: bool, step: list[int]) -> None:
        callback = ModelCheckpoint(save_on_train_epoch_end=when, save_top_k=-1)
        trainer = run(tmp_path, callback, val_check_interval=2)
        assert [step for step, _ in trainer.saves] == step

    def test_by_the_clock_through_the_agreement(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(1000))
        monkeypatch.setattr(model_checkpoint, "time", SimpleNamespace(monotonic=lambda: next(now)))
        callback = ModelCheckpoint(train_time_interval=timedelta(seconds=4), save_top_k=-1)
        trainer = run(tmp_path, callback, batches=20, accumulate=2)
        assert trainer.agreement.names == [f"save-by-time {callback.state_key}"]
        # a batch takes a tick; a save comes at the first boundary 4 ticks or more after the last
        assert [step for step, _ in trainer.saves] == [2, 4, 6, 8, 10]
        # another rank's clock decides as well
        other = ModelCheckpoint(tmp_path / "o", train_time_interval=timedelta(days=1), save_top_k=-1)
        trainer = FakeTrainer(str(tmp_path), other, batches=4, world_size=2)
        trainer.agreement.requested.add(0)
        assert trainer.fit(1).saves == [(1, "epoch=0-step=1.ckpt")]

    def test_not_outside_of_a_fit(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint()
        assert run(tmp_path, callback, fast_dev_run=1).saves == []
        for change in ({"fn": TrainerFn.VALIDATING}, {}):
            trainer = FakeTrainer(str(tmp_path), callback)
            trainer.state.fn = change.get("fn", TrainerFn.FITTING)
            trainer.sanity_checking = not change
            trainer.global_step = 5
            trainer.validate()
            callback.on_train_epoch_end(trainer, MODULE)  # type: ignore[arg-type]
            assert trainer.saves == []

    def test_a_resumed_run_does_not_save_again_what_it_came_from(self, tmp_path: Path) -> None:
        first = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        run(tmp_path, first, batches=4)
        second = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        trainer = run(tmp_path, second, batches=6, accumulate=3, ckpt_path=first.best_model_path)
        assert trainer.saves == []  # steps 5 and 6; the first micro-batches were still at step 4

    def test_on_exception(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(save_on_exception=True, save_last=True)
        trainer: Any = FakeTrainer(str(tmp_path), callback)
        trainer.inside_window = False
        callback.setup(trainer, MODULE, "fit")
        callback.on_exception(trainer, MODULE, KeyboardInterrupt())
        trainer.global_step = 3
        callback.on_exception(trainer, MODULE, KeyboardInterrupt())
        assert [name for _, name in trainer.saves] == ["epoch=0-step=3.ckpt", "last.ckpt"]
        trainer.world_size, trainer.global_step = 2, 4
        callback.on_exception(trainer, MODULE, ValueError())
        assert len(trainer.saves) == 2


class TestRanking:
    @pytest.mark.parametrize(
        ("mode", "k", "kept", "best"),
        [
            ("min", 1, [2], 2),
            ("min", 2, [2, 3], 2),
            ("max", 2, [0, 1], 1),
            ("max", 9, [0, 1, 2, 3, 4], 1),
            ("min", -1, [0, 1, 2, 3, 4], 2),
        ],
    )
    def test_the_best_are_kept(self, tmp_path: Path, mode: str, k: int, kept: list[int], best: int) -> None:
        callback = ModelCheckpoint(monitor="loss", mode=mode, save_top_k=k, filename="{epoch}")
        values = losses(0.7, 0.9, 0.1, 0.2, 0.5)
        run(tmp_path, callback, epochs=5, values=values)
        assert files(callback) == [f"epoch={epoch}.ckpt" for epoch in kept]
        assert sorted(map(os.path.basename, callback.best_k_models)) == files(callback)
        assert os.path.basename(callback.best_model_path) == f"epoch={best}.ckpt"
        assert float(callback.best_model_score) == pytest.approx(values(best)["loss"])  # type: ignore[arg-type]

    def test_nan_is_worse_than_all(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_top_k=2, filename="{epoch}")
        run(tmp_path, callback, epochs=4, values=losses(float("nan"), 0.5, float("nan"), 0.6))
        assert files(callback) == ["epoch=1.ckpt", "epoch=3.ckpt"]
        assert float(callback.kth_value) == pytest.approx(0.6)

    def test_steps_wait_for_a_metric_of_validation(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", every_n_train_steps=2, save_top_k=-1, filename="{step}-{loss}")
        trainer = run(tmp_path, callback, epochs=2, batches=3, values=losses(1, 2), check_val_every_n_epoch=2)
        # steps 2, 4 wait; validation after step 6 has the value
        assert trainer.saves == [(6, "step=6-loss=2.ckpt")]

    def test_steps_wait_for_a_metric_of_a_training_epoch(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="train", every_n_train_steps=2, filename="{step}-{train}")
        trainer = FakeTrainer(str(tmp_path), callback, batches=3, val_batches=0)
        batch_end = callback.on_train_epoch_end

        def epoch_end(view: Any, module: Any) -> None:
            trainer.log({"train": 5.0})
            batch_end(view, module)

        callback.on_train_epoch_end = epoch_end  # type: ignore[method-assign]
        assert trainer.fit(1).saves == [(3, "step=3-train=5.0.ckpt")]

    def test_the_last_batch_does_not_take_the_value_of_the_validation_before(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(
            monitor="loss",
            every_n_train_steps=4,
            save_on_train_epoch_end=False,
            save_top_k=-1,
            filename="{epoch}-{loss}",
        )
        trainer = run(tmp_path, callback, epochs=2, values=losses(1, 2))
        assert trainer.saves == [(4, "epoch=0-loss=1.ckpt"), (8, "epoch=1-loss=2.ckpt")]


class TestMissingMonitor:
    def test_names_what_there_is(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="val_los")
        with pytest.raises(MisconfigurationException, match=r"monitor='val_los'.*available are \['acc', 'val_loss'\]"):
            run(tmp_path, callback, values=lambda epoch: {"val_loss": 1.0, "acc": 0.5})

    def test_is_no_error_before_the_first_validation(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_on_train_epoch_end=True, save_top_k=-1)
        with pytest.warns(UserWarning, match="before the first validation"):
            trainer = run(tmp_path, callback, epochs=2, check_val_every_n_epoch=2, values=losses(1, 2))
        assert [step for step, _ in trainer.saves] == [8]


class TestLast:
    def test_is_the_latest_whatever_its_rank(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_last=True, filename="{epoch}")
        run(tmp_path, callback, epochs=3, values=losses(1, 2, 3))
        assert files(callback) == ["epoch=0.ckpt", "last.ckpt"]
        assert load(callback.last_model_path)["global_step"] == 12
        assert callback.find_last(FakeTrainer(str(tmp_path), callback)) == {callback.last_model_path}  # type: ignore[arg-type]

    def test_without_a_last_file_every_checkpoint_may_be_it(self, tmp_path: Path) -> None:
        """``ckpt_path="last"`` once started anew where checkpoints were there, but none was called last."""
        callback = ModelCheckpoint(save_top_k=-1)
        run(tmp_path, callback, epochs=2)
        found = callback.find_last(FakeTrainer(str(tmp_path), callback))  # type: ignore[arg-type]
        assert sorted(map(os.path.basename, found)) == files(callback)
        assert len(found) == 2

    def test_with_none_else(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(save_last=True, save_top_k=0)
        assert [step for step, _ in run(tmp_path, callback, epochs=2).saves] == [4, 8]
        assert files(callback) == ["last.ckpt"]
        callback = ModelCheckpoint(tmp_path / "e", save_last=True, save_top_k=0, every_n_epochs=2)
        assert [step for step, _ in run(tmp_path, callback, epochs=3).saves] == [8, 12]

    def test_a_link_never_leads_nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        callback = ModelCheckpoint(save_last="link", filename="{epoch}")
        remove = model_checkpoint.storage.remove
        led_to: list[str] = []

        def watch(path: str) -> None:
            remove(path)
            led_to.append(os.readlink(callback.last_model_path))
            assert os.path.exists(callback.last_model_path)

        monkeypatch.setattr(model_checkpoint.storage, "remove", watch)
        run(tmp_path, callback, epochs=3)
        assert led_to == ["epoch=1.ckpt", "epoch=2.ckpt"]
        assert files(callback) == ["epoch=2.ckpt", "last.ckpt"]


class TestDeleting:
    def test_only_after_the_new_one_is_there(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", filename="{epoch}")
        trainer = FakeTrainer(str(tmp_path), callback, values=losses(2, 1))
        trainer.fit(1)

        def fail(path: str, weights_only: bool = False) -> None:
            raise OSError("no room")

        trainer.save_checkpoint = fail  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no room"):
            trainer.epoch()
        assert files(callback) == ["epoch=0.ckpt"]

    def test_only_on_rank_zero(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(filename="{epoch}")
        trainer = FakeTrainer(str(tmp_path), callback, is_global_zero=False)
        answers = iter([(str(tmp_path), None)])  # the folder; then: no such file
        trainer.strategy.broadcast = lambda value, src=0: next(answers, False)
        trainer.fit(2)
        assert files(callback) == ["epoch=0.ckpt", "epoch=1.ckpt"]

    def test_neither_what_the_run_was_resumed_from_nor_what_is_elsewhere(self, tmp_path: Path) -> None:
        first = ModelCheckpoint(tmp_path / "a", filename="{step}")
        run(tmp_path, first)
        again = ModelCheckpoint(tmp_path / "a", filename="{step}")
        run(tmp_path, again, ckpt_path=first.best_model_path)
        assert files(again) == ["step=4.ckpt", "step=8.ckpt"]
        elsewhere = ModelCheckpoint(tmp_path / "b", filename="{step}")
        with pytest.warns(UserWarning, match="a new ranking starts"):
            run(tmp_path, elsewhere, ckpt_path=again.best_model_path)
        assert files(again) == ["step=4.ckpt", "step=8.ckpt"]
        assert files(elsewhere) == ["step=12.ckpt"]


class TestNames:
    @pytest.mark.parametrize(
        ("template", "equals", "expected"),
        [
            ("{epoch}-{step}", "=", "epoch=3-step=12"),
            ("m-{val/loss:.2f}", "=", "m-val/loss=0.12"),
            ("e{epoch:02d}-l{val/loss:.1f}", None, "e03-l0.1"),
            ("{missing:d}-{missing:.2f}-{missing}", "=", "missing=0-missing=0.00-missing=0"),
            ("{epoch}-{epoch_test}", ":", "epoch:3-epoch_test:7"),
            ("{a.b}", "=", "a.b=1"),
        ],
    )
    def test_templates(self, template: str, equals: str | None, expected: str) -> None:
        metrics = {"epoch": torch.tensor(3), "step": 12, "val/loss": torch.tensor(0.123), "epoch_test": 7, "a.b": 1}
        assert fill(template, metrics, equals) == expected

    def test_versions(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(filename="same", save_top_k=-1)
        run(tmp_path, callback, epochs=3)
        assert files(callback) == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]
        plain = ModelCheckpoint(tmp_path / "p", filename="same", save_top_k=-1, enable_version_counter=False)
        run(tmp_path, plain, epochs=3)
        assert files(plain) == ["same.ckpt"]


class TestFolder:
    def test_of_the_logger(self, tmp_path: Path) -> None:
        callback, logger = ModelCheckpoint(), CSVLogger(tmp_path, name="exp")
        seen: list[str] = []
        logger.after_save_checkpoint = lambda given: seen.append(given.best_model_path)  # type: ignore[method-assign]
        run(tmp_path / "unused", callback, loggers=[logger])
        assert callback.dirpath == str(tmp_path / "exp" / "version_0" / "checkpoints")
        assert seen == [callback.best_model_path]

    def test_a_url(self) -> None:
        callback = ModelCheckpoint(f"memory://lockstep-{os.getpid()}/run", filename="{epoch}", save_last=True)
        run(Path("unused"), callback, epochs=2)
        assert model_checkpoint.storage.names(str(callback.dirpath)) == ["epoch=1.ckpt", "last.ckpt"]

    def test_that_cannot_be_made_is_told_before_work_starts(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        callback = ModelCheckpoint(tmp_path / "f" / "checkpoints")
        trainer: Any = FakeTrainer(str(tmp_path), callback)
        with pytest.raises(NotADirectoryError, match="f' is a file"):
            callback.setup(trainer, MODULE, "fit")
        # other ranks hear of it from rank 0 and stop with it
        sent = []
        trainer.strategy.broadcast = lambda value, src=0: (sent.append(value), value)[1]
        with pytest.raises(NotADirectoryError):
            callback.setup(trainer, MODULE, "fit")
        trainer.is_global_zero = False
        trainer.strategy.broadcast = lambda value, src=0: sent[0]
        with pytest.raises(NotADirectoryError):
            ModelCheckpoint(tmp_path / "g").setup(trainer, MODULE, "fit")


class TestState:
    def test_goes_on_after_a_resume(self, tmp_path: Path) -> None:
        first = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=2, filename="{step}", save_last=True)
        run(tmp_path, first, epochs=3, values=losses(3, 1, 2))
        assert files(first) == ["last.ckpt", "step=12.ckpt", "step=8.ckpt"]
        second = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=2, filename="{step}", save_last=True)
        assert second.state_key == first.state_key
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(tmp_path, second, epochs=1, values=losses(0), ckpt_path=first.last_model_path)
        assert files(second) == ["last.ckpt", "step=16.ckpt", "step=8.ckpt"]
        assert os.path.basename(second.best_model_path) == "step=16.ckpt"

    @pytest.mark.parametrize(("before", "kept"), [(3, 1), (-1, 2), (3, 3), (1, 3)])
    def test_a_resume_may_keep_more_or_fewer(self, before: int, kept: int, tmp_path: Path) -> None:
        """The ranking of the run before was taken over whole, and its second save was a KeyError."""
        first = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=before, filename="{step}", save_last=True)
        run(tmp_path, first, epochs=4, values=losses(6, 9, 7, 8))
        second = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=kept, filename="{step}")
        run(tmp_path, second, epochs=4, values=losses(5, 4, 10, 3), ckpt_path=first.last_model_path)
        ranked = sorted(int(float(score)) for score in second.best_k_models.values())
        assert ranked == [3, 4, 5][:kept]
        assert all(os.path.exists(path) for path in second.best_k_models)
        assert second.kth_best_model_path == max(second.best_k_models, key=lambda path: second.best_k_models[path])

    def test_a_checkpoint_knows_itself(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_last=True)
        run(tmp_path, callback, values=losses(1))
        state = load(callback.best_model_path)["callbacks"]["c"]
        assert state["best_model_path"] == callback.best_model_path
        assert list(state["best_k_models"]) == [callback.best_model_path]
        assert load(callback.last_model_path)["callbacks"]["c"]["last_model_path"] == callback.last_model_path


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"mode": "best"}, "mode='best'"),
            ({"save_top_k": -2}, "save_top_k=-2"),
            ({"save_top_k": 3}, "save_top_k=3, monitor=None"),
            ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
            ({"every_n_epochs": 1, "every_n_train_steps": 2}, "every_n_train_steps=2, every_n_epochs=1"),
            ({"every_n_epochs": 1, "train_time_interval": timedelta(0)}, "every_n_epochs=1, train_time_interval=0"),
        ],
    )
    def test_that_cannot_work(self, arguments: dict[str, Any], says: str) -> None:
        with pytest.raises(MisconfigurationException, match=rf"^ModelCheckpoint\({says}.*\): "):
            ModelCheckpoint(**arguments)
