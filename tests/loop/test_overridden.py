"""Whether something is overridden, asked as users ask it; the answers are Lightning's."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Callback, LightningDataModule, LightningModule
from lockstep.loop.checks import is_param_in_hook_signature
from lockstep.loop.hooks import is_overridden
from tests.loop.pieces import Slope


class Data(LightningDataModule):
    def setup(self, stage: str) -> None: ...


class Calls(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "instance", "parent", "answer"),
    [
        ("training_step", Slope(), None, True),
        ("validation_step", Slope(), None, False),
        ("on_train_batch_end", Slope(), LightningModule, True),
        ("setup", Data(), None, True),
        ("teardown", Data(), None, False),
        ("on_fit_start", Calls(), None, True),
        ("on_fit_end", Calls(), None, False),
        ("training_step", None, None, False),
    ],
)
def test_is_overridden(name: str, instance: Any, parent: Any, answer: bool) -> None:
    assert is_overridden(name, instance, parent) is answer


def test_questions_without_an_answer() -> None:
    with pytest.raises(ValueError, match="say by `parent=` which class"):
        is_overridden("anything", object())
    with pytest.raises(ValueError, match="LightningModule has no such method"):
        is_overridden("anything", Slope())


def one(batch: Any) -> None: ...


def two(batch: Any, batch_idx: int) -> None: ...


def many(*args: Any) -> None: ...


@pytest.mark.parametrize("hook", [one, two, many, Slope().training_step])
@pytest.mark.parametrize("options", [{}, {"explicit": True}, {"min_args": 2}, {"min_args": 1, "explicit": True}])
@pytest.mark.filterwarnings("ignore")
def test_what_a_hook_takes_is_told_as_lightning_tells_it(hook: Any, options: dict[str, Any]) -> None:
    from tests.aliases.surface import lightning

    if lightning() is None:
        pytest.skip("lightning is not installed")
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature as theirs

    assert is_param_in_hook_signature(hook, "batch_idx", **options) == theirs(hook, "batch_idx", **options)
