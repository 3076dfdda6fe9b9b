"""LightningModule by itself: what it knows without a Trainer, hyperparameters, freezing, toggling, loading."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import Callback, LightningModule
from tests.loop.pieces import Recorder, Slope, numbers, quiet


class Layers(LightningModule):
    def __init__(self, width: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width, bias=bias)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.ones(2)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_without_a_trainer_it_stands_at_the_beginning_of_one_process() -> None:
    module = Layers()
    places = (module.current_epoch, module.global_step, module.global_rank, module.local_rank)
    assert places == (0, 0, 0, 0)
    assert (module.logger, module.loggers, module.on_gpu) == (None, [], False)
    assert (module.device, module.dtype) == (torch.device("cpu"), torch.float32)
    assert module.double().dtype == torch.float64
    with pytest.raises(RuntimeError, match=r"Layers is not attached to a `Trainer`: call trainer.fit\(module\)"):
        _ = module.trainer


def test_in_a_fit_it_sees_the_trainer() -> None:
    class Sees(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.trainer is trainer
            seen.append((self.current_epoch, self.global_step, self.logger))
            return super().training_step(batch, batch_idx)

    recorder, seen = Recorder(), []  # type: ignore[var-annotated]
    trainer = quiet(max_epochs=2, logger=recorder)
    trainer.fit(Sees(), numbers(2))
    assert seen == [(0, 0, recorder), (0, 1, recorder), (1, 2, recorder), (1, 3, recorder)]


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "configure_optimizers"])
def test_what_is_not_defined_says_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"`{name}` is not defined"):
        getattr(LightningModule(), name)()


def test_it_is_saved_with_its_hyperparameters_and_made_again(tmp_path: Path) -> None:
    module, recorder = Layers(width=3), Recorder()
    trainer = quiet(max_epochs=1, logger=recorder)
    trainer.fit(module, numbers(1))
    trainer.save_checkpoint(tmp_path / "layers.ckpt")
    again = Layers.load_from_checkpoint(tmp_path / "layers.ckpt")
    assert again.hparams == {"width": 3, "bias": True}
    assert torch.equal(again.layer.weight, module.layer.weight)
    assert recorder.hparams == [{"width": 3, "bias": True}]
    with pytest.raises(RuntimeError, match=r"Unexpected key.*layer.bias"):
        Layers.load_from_checkpoint(tmp_path / "layers.ckpt", bias=False)
    assert Layers.load_from_checkpoint(tmp_path / "layers.ckpt", bias=False, strict=False).layer.bias is None


@pytest.mark.gpu
def test_it_is_loaded_to_where_its_weights_are_mapped(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Layers(), numbers(1))
    trainer.save_checkpoint(tmp_path / "layers.ckpt")
    assert Layers.load_from_checkpoint(tmp_path / "layers.ckpt", map_location="cuda").device.type == "cuda"
    assert Layers.load_from_checkpoint(tmp_path / "layers.ckpt").device.type == "cpu"


@pytest.mark.parametrize("key", ["hparams", "module_arguments"])
def test_hyperparameters_are_found_where_checkpoints_of_2019_and_2020_have_them(tmp_path: Path, key: str) -> None:
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": Layers(width=6).state_dict(), key: {"width": 6}}, path)
    assert Layers.load_from_checkpoint(path).hparams == {"width": 6, "bias": True}
    torch.save({"state_dict": Layers(width=6).state_dict(), key: {"width": 3}, "hyper_parameters": {"width": 6}}, path)
    assert Layers.load_from_checkpoint(path).hparams.width == 6


def test_freeze_and_unfreeze() -> None:
    module = Layers()
    assert module.freeze() is module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not module.training
    assert module.unfreeze() is module
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert module.training


def test_toggling_gives_back_what_was_frozen_before() -> None:
    class Pair(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.shared, self.frozen = (nn.Parameter(torch.zeros(1)) for _ in range(2))
            self.frozen.requires_grad = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first, _ = self.optimizers()
            with self.toggled_optimizer(first):
                seen.append([p.requires_grad for p in (self.w, self.shared, self.frozen)])
            seen.append([p.requires_grad for p in (self.w, self.shared, self.frozen)])

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD([self.shared], lr=0.0)
            return first, torch.optim.SGD([self.w, self.shared, self.frozen], lr=0.0)

    seen: list[list[bool]] = []
    quiet(max_epochs=1).fit(Pair(), numbers(1))
    assert seen == [[False, True, False], [True, True, False]]


def test_it_can_be_copied_and_pickled_while_it_is_attached() -> None:
    module = Layers()
    quiet(max_epochs=1).fit(module, numbers(1))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._trainer is None
        assert torch.equal(other.layer.weight, module.layer.weight)


def test_callbacks_that_come_with_the_model_replace_those_of_their_type() -> None:
    from lockstep.callbacks import LearningRateMonitor, ModelSummary

    own, given = ModelSummary(), ModelSummary()

    class Brings(Slope):
        def configure_callbacks(self) -> Any:
            return own

    other = LearningRateMonitor()
    trainer = quiet(
        max_epochs=1, enable_model_summary=True, callbacks=[given, other], logger=Recorder(), log_every_n_steps=1
    )
    trainer.fit(Brings(), numbers(1))
    assert [callback for callback in trainer.callbacks if callback in (own, given, other)] == [other, own]
    trainer.fit(Slope(), numbers(1))
    assert [callback for callback in trainer.callbacks if callback in (own, given, other)] == [given, other]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_what_configure_callbacks_raised_was_not_told_to_on_exception(error: BaseException) -> None:
    class Told(Callback):
        seen: BaseException | None = None

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.seen = exception

    class Model(Slope):
        def configure_callbacks(self) -> Any:
            raise error

    told = Told()
    with pytest.raises(type(error)):
        quiet(max_epochs=1, callbacks=told).fit(Model(), numbers(4))
    assert told.seen is error


def test_print_speaks_with_and_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    class Speaks(Slope):
        def on_train_start(self) -> None:
            self.print("from a fit")

    Layers().print("alone")
    quiet(max_epochs=1).fit(Speaks(), numbers(1))
    assert capsys.readouterr().out == "alone\nfrom a fit\n"


def test_of_fabric_and_a_mesh_there_is_none() -> None:
    module = Slope()
    assert module.fabric is None
    quiet(max_epochs=1).fit(module, numbers(1))
    assert module.device_mesh is None


class Inner(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        self.log("inner", 3.0)
        return self.layer(x)


class Outer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.inner(torch.ones(2)).sum()


def test_a_module_in_another_has_its_trainer_and_logs() -> None:
    module, trainer = Outer(), quiet(max_steps=1)
    trainer.fit(module, numbers(2))
    assert module.inner.trainer is trainer
    assert trainer.callback_metrics["inner"] == 3.0
    module.trainer = None
    with pytest.raises(RuntimeError, match="Inner is not attached"):
        _ = module.inner.trainer
