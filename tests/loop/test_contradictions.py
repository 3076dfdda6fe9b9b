"""What a user asks for that cannot all be: it is refused, or said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    Timer,
    TQDMProgressBar,
)
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Slope, numbers, quiet


class Measured(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0)


def fit(**flags: Any) -> None:
    quiet(**{"max_epochs": 2, **flags}).fit(Measured(), numbers(2), numbers(1))


def test_two_progress_bars_are_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"two progress bars"):
        quiet(enable_progress_bar=True, callbacks=[TQDMProgressBar(), TQDMProgressBar()])


SAID: list[tuple[str, dict[str, Any], str]] = [
    ("flags", {"overfit_batches": 1, "limit_train_batches": 2}, r"overfit_batches=1, limit_train_batches=2"),
    ("checkpoint", {"every_n_epochs": 5}, r"every_n_epochs=5\).*no epoch is saved"),
    ("checkpoint", {"every_n_epochs": 0}, r"every_n_epochs=0\) saves nothing"),
    ("checkpoint", {"save_top_k": 0}, r"save_top_k=0\) saves nothing"),
]


@pytest.mark.parametrize(("of", "given", "said"), SAID)
def test_what_has_no_effect_is_said(of: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, **given) if of == "checkpoint" else None
    flags = given if checkpoint is None else {"callbacks": [checkpoint], "enable_checkpointing": True}
    with pytest.warns(UserWarning, match=said):
        fit(**flags)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"logger": True}, r"'x', ..., logger=True\), and there is no logger"),
        ({"sync_dist_group": object()}, r"sync_dist_group=...\) has no effect"),
        ({"enable_graph": True}, r"enable_graph=...\) has no effect"),
    ],
)
def test_and_arguments_of_log(options: dict[str, Any], said: str) -> None:
    class Logs(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, **options)
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match=said):
        quiet(max_epochs=1).fit(Logs(), numbers(1))


def test_what_goes_together_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    callbacks = [
        EarlyStopping("v"),
        ModelCheckpoint(tmp_path, monitor="v"),
        ModelCheckpoint(tmp_path, monitor="v", every_n_train_steps=2),
        Timer(),
    ]
    fit(callbacks=callbacks, enable_checkpointing=True, gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert [str(each.message) for each in recwarn if "eval mode" not in str(each.message)] == []


# -- what steps take and return


class Manual(Slope):
    def __init__(self, returned: Any) -> None:
        super().__init__()
        self.automatic_optimization, self.returned = False, returned

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [5, 1.5, "loss", [torch.zeros(())], True])
def test_manual_optimization_returns_a_tensor_a_dict_or_nothing(returned: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"`training_step` returned .*manual optimization"):
        quiet(max_epochs=1).fit(Manual(returned), numbers(1))


@pytest.mark.parametrize("returned", [None, torch.zeros(()), {"any": 1}])
def test_which_it_takes(returned: Any) -> None:
    assert quiet(max_epochs=1).fit(Manual(returned), numbers(1)).epochs == 1


def test_no_loggers_are_none() -> None:
    trainer = quiet()
    trainer.loggers = None
    assert trainer.loggers == []
    assert trainer.logger is None
