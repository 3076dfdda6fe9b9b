"""When ModelCheckpoint saves, under which name, and what it deletes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.callbacks import model_checkpoint
from lockstep.callbacks.model_checkpoint import ModelCheckpoint, fill
from lockstep.checkpoint.format import load
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers.csv import CSVLogger
from lockstep.plugins.io import TorchCheckpointIO  # type: ignore[import-not-found]
from tests.loop.pieces import Slope, acting, numbers, quiet


class NotesSaves(TorchCheckpointIO):  # type: ignore[misc]
    """Notes the step and the name of each file that it writes."""

    def __init__(self) -> None:
        self.saves: list[tuple[int, str]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        self.saves.append((checkpoint["global_step"], os.path.basename(path)))


class Logs(Slope):
    def __init__(self, values: Callable[[int], dict[str, float]]) -> None:
        super().__init__()
        self.values = values

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict(self.values(self.current_epoch))


def run(
    root: Path,
    callback: ModelCheckpoint,
    epochs: int = 1,
    values: Callable[[int], dict[str, float]] = lambda epoch: {},
    batches: int = 4,
    resume: str | None = None,
    **flags: Any,
) -> list[tuple[int, str]]:
    """A fit whose validations log ``values(epoch)``; step and name of each file that was written."""
    io = NotesSaves()
    flags = {"num_sanity_val_steps": 0, "enable_checkpointing": True, "default_root_dir": root, **flags}
    trainer = quiet(max_epochs=epochs, callbacks=[callback], plugins=[io], **flags)
    trainer.fit(Logs(values), numbers(batches), numbers(1), ckpt_path=resume)
    return io.saves


def files(callback: ModelCheckpoint) -> list[str]:
    return sorted(os.listdir(str(callback.dirpath)))


def losses(*values: float) -> Callable[[int], dict[str, float]]:
    return lambda epoch: {"loss": values[epoch]}


class TestWhen:
    def test_by_default_the_latest_epoch_is_kept(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint()
        saves = run(tmp_path, callback, epochs=3)
        assert saves == [(4, "epoch=0-step=4.ckpt"), (8, "epoch=1-step=8.ckpt"), (12, "epoch=2-step=12.ckpt")]
        assert files(callback) == ["epoch=2-step=12.ckpt"]
        assert callback.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=12.ckpt")

    @pytest.mark.parametrize(
        ("options", "flags", "steps"),
        [
            ({"every_n_train_steps": 3}, {"batches": 11, "epochs": 2}, [*range(3, 22, 3)]),
            ({"every_n_train_steps": 3}, {"batches": 11, "epochs": 2, "accumulate_grad_batches": 3}, [3, 6]),
            ({}, {"epochs": 4, "check_val_every_n_epoch": 2}, [8, 16]),
            ({"save_on_train_epoch_end": True}, {"val_check_interval": 2}, [4]),
            ({"save_on_train_epoch_end": False}, {"val_check_interval": 2}, [2, 4]),
            ({"save_on_train_epoch_end": False}, {"num_sanity_val_steps": 1}, [4]),
            ({}, {"fast_dev_run": 1}, []),
        ],
    )
    def test_steps(self, options: dict[str, Any], flags: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
        assert [step for step, _ in run(tmp_path, ModelCheckpoint(save_top_k=-1, **options), **flags)] == steps

    def test_by_the_clock(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = iter(range(1000))
        monkeypatch.setattr(model_checkpoint, "time", SimpleNamespace(monotonic=lambda: next(now)))
        callback = ModelCheckpoint(train_time_interval=timedelta(seconds=4), save_top_k=-1)
        saves = run(tmp_path, callback, batches=20, accumulate_grad_batches=2, limit_val_batches=0)
        # a batch takes a tick; a save comes at the first boundary 4 ticks or more after the last
        assert [step for step, _ in saves] == [2, 4, 6, 8, 10]

    def test_a_resumed_run_does_not_save_again_what_it_came_from(self, tmp_path: Path) -> None:
        first = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        run(tmp_path, first)
        second = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        flags = {"epochs": 2, "batches": 6, "accumulate_grad_batches": 3, "resume": first.best_model_path}
        assert run(tmp_path, second, **flags) == []  # steps 5 and 6; the first micro-batches were still at step 4

    def test_on_exception(self, tmp_path: Path) -> None:
        def fail(module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ValueError("bad batch")

        keep = ModelCheckpoint(tmp_path, save_on_exception=True, save_last=True)
        with pytest.raises(ValueError, match="bad batch"):
            quiet(max_epochs=1, callbacks=[keep], enable_checkpointing=True).fit(
                acting(Slope, training_step=fail), numbers(4)
            )
        assert files(keep) == ["epoch=0-step=3.ckpt", "last.ckpt"]


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


class TestMissingMonitor:
    def test_names_what_there_is(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="val_los")
        with pytest.raises(
            MisconfigurationException, match=r"monitor='val_los'.*in the returned metrics: \['acc', 'val_loss'\]"
        ):
            run(tmp_path, callback, values=lambda epoch: {"val_loss": 1.0, "acc": 0.5})

    def test_is_no_error_before_the_first_validation(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_on_train_epoch_end=True, save_top_k=-1)
        with pytest.warns(UserWarning, match="before the first validation"):
            saves = run(tmp_path, callback, epochs=2, check_val_every_n_epoch=2, values=losses(1, 2))
        assert [step for step, _ in saves] == [8]


class TestLast:
    def test_is_the_latest_whatever_its_rank(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_last=True, filename="{epoch}")
        run(tmp_path, callback, epochs=3, values=losses(1, 2, 3))
        assert files(callback) == ["epoch=0.ckpt", "last.ckpt"]
        assert load(callback.last_model_path)["global_step"] == 12

    def test_with_none_else(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(save_last=True, save_top_k=0)
        assert [step for step, _ in run(tmp_path, callback, epochs=2)] == [4, 8]
        assert files(callback) == ["last.ckpt"]
        callback = ModelCheckpoint(tmp_path / "e", save_last=True, save_top_k=0, every_n_epochs=2)
        assert [step for step, _ in run(tmp_path, callback, epochs=3)] == [8, 12]

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
    def test_only_after_the_new_one_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        callback, save = ModelCheckpoint(monitor="loss", filename="{epoch}"), NotesSaves.save_checkpoint

        def fail(io: NotesSaves, *args: Any) -> None:
            if io.saves:
                raise OSError("no room")
            save(io, *args)

        monkeypatch.setattr(NotesSaves, "save_checkpoint", lambda io, *args, **_: fail(io, *args))
        with pytest.raises(OSError, match="no room"):
            run(tmp_path, callback, epochs=2, values=losses(2, 1))
        assert files(callback) == ["epoch=0.ckpt"]

    def test_not_what_is_elsewhere(self, tmp_path: Path) -> None:
        first = ModelCheckpoint(tmp_path / "a", filename="{step}")
        run(tmp_path, first)
        elsewhere = ModelCheckpoint(tmp_path / "b", filename="{step}")
        with pytest.warns(UserWarning, match="a new ranking starts"):
            run(tmp_path, elsewhere, epochs=2, resume=first.best_model_path)
        assert (files(first), files(elsewhere)) == (["step=4.ckpt"], ["step=8.ckpt"])


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
        run(tmp_path / "unused", callback, logger=logger)
        assert callback.dirpath == str(tmp_path / "exp" / "version_0" / "checkpoints")
        assert seen == [callback.best_model_path]

    def test_a_url(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(f"memory://lockstep-{os.getpid()}/run", filename="{epoch}", save_last=True)
        run(tmp_path, callback, epochs=2)
        assert model_checkpoint.storage.names(str(callback.dirpath)) == ["epoch=1.ckpt", "last.ckpt"]

    def test_that_cannot_be_made_is_told_before_work_starts(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        with pytest.raises(NotADirectoryError, match="f' is a file"):
            run(tmp_path, ModelCheckpoint(tmp_path / "f" / "checkpoints"), limit_train_batches=0)


class TestState:
    def test_goes_on_after_a_resume(self, tmp_path: Path) -> None:
        first, second = (
            ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=2, filename="{step}", save_last=True)
            for _ in range(2)
        )
        run(tmp_path, first, epochs=3, values=losses(3, 1, 2))
        assert files(first) == ["last.ckpt", "step=12.ckpt", "step=8.ckpt"]
        assert second.state_key == first.state_key
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(tmp_path, second, epochs=4, values=losses(3, 1, 2, 0), resume=first.last_model_path)
        assert files(second) == ["last.ckpt", "step=16.ckpt", "step=8.ckpt"]
        assert os.path.basename(second.best_model_path) == "step=16.ckpt"

    @pytest.mark.parametrize(("before", "kept"), [(3, 1), (-1, 2), (3, 3), (1, 3)])
    def test_a_resume_may_keep_more_or_fewer(self, before: int, kept: int, tmp_path: Path) -> None:
        """The ranking of the run before was taken over whole, and its second save was a KeyError."""
        values = losses(6, 9, 7, 8, 5, 4, 10, 3)
        first = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=before, filename="{step}", save_last=True)
        run(tmp_path, first, epochs=4, values=values)
        second = ModelCheckpoint(tmp_path / "c", monitor="loss", save_top_k=kept, filename="{step}")
        run(tmp_path, second, epochs=8, values=values, resume=first.last_model_path)
        ranked = sorted(int(float(score)) for score in second.best_k_models.values())
        assert ranked == [3, 4, 5][:kept]
        assert all(os.path.exists(path) for path in second.best_k_models)
        assert second.kth_best_model_path == max(second.best_k_models, key=lambda path: second.best_k_models[path])

    def test_a_checkpoint_knows_itself(self, tmp_path: Path) -> None:
        callback = ModelCheckpoint(monitor="loss", save_last=True)
        run(tmp_path, callback, values=losses(1))
        best, last = (
            load(path)["callbacks"][callback.state_key] for path in (callback.best_model_path, callback.last_model_path)
        )
        assert best["best_model_path"] == callback.best_model_path
        assert list(best["best_k_models"]) == [callback.best_model_path]
        assert last["last_model_path"] == callback.last_model_path


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
