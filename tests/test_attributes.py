"""What users read of a Trainer, beside Lightning's."""

from __future__ import annotations

import dataclasses
import math
import typing
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep import Trainer
from lockstep.attributes import Attributes
from lockstep.config.run import RunConfig
from lockstep.ground.types import RunningStage
from tests.loop.pieces import QUIET, Recorder, Slope, Validated, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


def public(trainer: Any) -> set[str]:
    return {name for name in dir(trainer) if not name.startswith("_")}


def test_every_public_name_of_lightnings_trainer_is_there(lightning: Any) -> None:
    ours, theirs = Trainer(**QUIET), lightning.Trainer(**QUIET)
    assert public(theirs) - public(ours) == set()


# Values that differ on purpose; each is a row of the table in docs.
DIFFER = {
    "accelerator": "an object of lockstep's",
    "current_epoch": "counts finished epochs; a fit that ended within an epoch has not finished it",
    "gradient_clip_algorithm": "'norm' where Lightning has None for the same",
    "min_epochs": "0 where Lightning has None",
    "min_steps": "0 where Lightning has None",
    "precision_plugin": "an object of lockstep's",
    "profiler": "an object of lockstep's",
    "state": "an object of lockstep's",
    "strategy": "an object of lockstep's",
}


def plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None))) or (
        isinstance(value, (list, tuple)) and all(map(plain, value))
    )


def values(trainer: Any) -> dict[str, Any]:
    asked = public(trainer) - DIFFER.keys() - {"estimated_stepping_batches"}  # that asks for loaders
    found = {name: getattr(trainer, name, None) for name in asked}  # some of lockstep's own come with a call
    return {name: value for name, value in found.items() if plain(value)}


def model(library: Any, seen: dict[str, dict[str, Any]]) -> Any:
    class Looks(library.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def look(self, where: str) -> None:
            seen.setdefault(where, values(self.trainer))

        def configure_optimizers(self) -> Any:
            self.estimate = self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.look(f"training {self.current_epoch} {batch_idx}")
            return self.w * batch.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.look(f"{self.trainer.state.stage.value} {batch_idx}")

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.look("test")

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.look("predict")
            return batch

    return Looks()


FLAGS: list[dict[str, Any]] = [
    {"max_epochs": 2},
    {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_train_batches": 3, "limit_val_batches": 0.5},
    {"max_steps": 3, "val_check_interval": 2, "num_sanity_val_steps": -1, "gradient_clip_val": 0.5},
    {"fast_dev_run": 2},
    {"overfit_batches": 2, "max_epochs": 1},
]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_values_are_lightnings_before_within_and_after_calls(lightning: Any, flags: dict[str, Any]) -> None:
    said: list[dict[str, dict[str, Any]]] = []
    for library in (lockstep, lightning):
        seen: dict[str, dict[str, Any]] = {}
        trainer, module = library.Trainer(**QUIET, **flags), model(library, seen)
        seen["made"] = values(trainer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, numbers(4), numbers(4))
            seen["fitted"] = values(trainer)
            trainer.validate(module, numbers(4), verbose=False)
            trainer.test(module, numbers(3), verbose=False)
            trainer.predict(module, numbers(5))
            seen["all done"] = {**values(trainer), "estimate": module.estimate}
        said.append(seen)
    ours, theirs = said
    assert ours.keys() == theirs.keys()
    # a Trainer of lockstep knows from the beginning that max_steps takes the place of max_epochs
    different = {
        (where, name): (ours[where].get(name, "nothing"), value)
        for where, found in theirs.items()
        for name, value in found.items()
        if (where, name) != ("made", "max_epochs") and ours[where].get(name, "nothing") != value
    }
    assert different == {}


def test_stages_can_be_set_as_in_lightning() -> None:
    trainer = quiet()
    for name in ("training", "validating", "testing", "predicting", "sanity_checking"):
        setattr(trainer, name, True)
        assert getattr(trainer, name)
        setattr(trainer, name, False)
        assert trainer.state.stage is None
    trainer.training = True
    trainer.testing = False
    assert trainer.state.stage is RunningStage.TRAINING


def test_the_logger_can_be_set() -> None:
    trainer, recorder = quiet(), Recorder()
    trainer.logger = recorder
    assert trainer.loggers == [recorder]
    trainer.logger = None
    assert trainer.loggers == []
    trainer.loggers = recorder
    assert trainer.loggers == [recorder]
    trainer.loggers = None
    assert (trainer.loggers, trainer.logger) == ([], None)


def test_a_checkpoint_may_be_set_beforehand(tmp_path: Path) -> None:
    first = quiet(max_epochs=1)
    first.fit(Slope(), numbers(3))
    first.save_checkpoint(tmp_path / "one.ckpt")
    trainer, module = quiet(max_epochs=2), Slope()
    assert trainer.ckpt_path is None
    trainer.ckpt_path = tmp_path / "one.ckpt"
    trainer.fit(module, numbers(3))
    assert (len(module.batches), trainer.ckpt_path) == (3, str(tmp_path / "one.ckpt"))
    trainer.ckpt_path = None
    trainer.max_epochs = 3
    trainer.fit(module, numbers(3))
    assert trainer.ckpt_path is None


def test_a_module_is_made_where_and_how_it_will_run() -> None:
    trainer = quiet(precision="bf16-true")
    with trainer.init_module():
        module = torch.nn.Linear(2, 2)
    assert module.weight.dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
    with quiet().init_module(empty_init=True):
        torch.nn.init.constant_(kept := torch.full((2,), 3.0), 7.0)
    assert kept.tolist() == [3.0, 3.0]
    torch.nn.init.constant_(kept, 7.0)
    assert kept.tolist() == [7.0, 7.0]


def test_hyperparameters_go_to_the_loggers_unless_it_is_turned_off() -> None:
    class Tuned(Slope):
        def __init__(self, size: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    for flag, sent in ((True, 1), (False, 0)):
        recorder = Recorder()
        quiet(max_epochs=1, logger=recorder, enable_autolog_hparams=flag).fit(Tuned(), numbers(1))
        assert len(recorder.hparams) == sent


def on_each_rank() -> Any:
    trainer = on_ranks(max_epochs=1)
    trainer.fit(Validated(), numbers(4), numbers(2))
    return trainer.distributed_sampler_kwargs, trainer.device_ids, trainer.num_devices, trainer.scaler


def test_where_the_ranks_are(ranks: RankPool) -> None:
    assert quiet().distributed_sampler_kwargs is None
    found = ranks(2).run(on_each_rank, timeout=40)
    assert found == [({"num_replicas": 2, "rank": rank}, [0, 1], 2, None) for rank in (0, 1)]


def test_when_validation_comes_is_told() -> None:
    trainer = quiet(max_epochs=1)
    assert trainer.val_check_batch is None
    trainer.fit(Validated(), numbers(4), numbers(1))
    assert trainer.val_check_batch == 4
    assert quiet(num_sanity_val_steps=-1).num_sanity_val_steps == math.inf


def test_every_flag_that_is_read_as_it_is_has_a_type() -> None:
    """Type checkers see no `__getattr__`, so a flag without a type would be a misspelt one to them."""
    own = {name for name, value in vars(Attributes).items() if isinstance(value, property)}
    hints = typing.get_type_hints(RunConfig)
    flags = {each.name: hints[each.name] for each in dataclasses.fields(RunConfig)}
    written = {name: kind for name, kind in typing.get_type_hints(Attributes).items() if name in flags}
    assert written == {name: kind for name, kind in flags.items() if name not in own}


@pytest.mark.parametrize("name", ["from_argparse_args", "add_argparse_args", "parse_argparser"])
def test_what_read_command_lines_names_todays_way(name: str) -> None:
    with pytest.raises(
        AttributeError, match=rf"Trainer\.{name}\(\) was removed in Lightning 2\.0: .* or use LightningCLI\."
    ):
        getattr(Trainer, name)
    trainer = Trainer(accelerator="cpu", logger=False)
    assert not hasattr(trainer, name)
    assert name not in dir(trainer)
