"""A checkpoint of another model, or of another optimizer, is refused with the first difference and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import LightningModule
from lockstep.checkpoint.format import load, save
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import numbers, quiet


class Net(LightningModule):
    """Layers of given widths, trained by an optimizer of a given class."""

    def __init__(self, optimizer: Any = torch.optim.Adam, **widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(1, width) for name, width in (widths or {"a": 2}).items()})
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(layer(batch.float().unsqueeze(1)).mean() for layer in self.layers.values())

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


class Loose(Net):
    def __init__(self, *args: Any, **widths: int) -> None:
        super().__init__(*args, **widths)
        self.strict_loading = False


@pytest.fixture
def written(tmp_path: Path) -> Path:
    trainer, path = quiet(max_epochs=1), tmp_path / "net.ckpt"
    trainer.fit(Net(a=2, b=3), numbers(2))
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            Net(a=2, b=4),
            r"'layers.b.weight' has the shape \(3, 1\) in the checkpoint and \(4, 1\) here; make the module",
        ),
        (Loose(a=2, b=4), r"'layers.b.weight' has the shape"),
        (Net(a=2, b=3, c=1), r"the checkpoint has no 'layers.c.weight';.*strict_loading = False"),
        (Net(a=2), r"the module has no 'layers.b.weight';.*strict_loading = False"),
    ],
)
def test_another_model_is_told_the_first_parameter_that_differs(written: Path, module: Net, said: str) -> None:
    """It was torch's list of all keys, over several lines."""
    match = rf"trainer.fit\(ckpt_path=.*net.ckpt.*of another model than this (Net|Loose): {said}"
    with pytest.raises(MisconfigurationException, match=match) as raised:
        quiet(max_epochs=2).fit(module, numbers(2), ckpt_path=written)
    assert "\n" not in str(raised.value)
    with pytest.raises(MisconfigurationException, match=r"trainer.validate.*of another model"):
        quiet().validate(module, numbers(2), ckpt_path=written, verbose=False)


def test_loading_that_is_not_strict_leaves_out_what_differs(written: Path) -> None:
    quiet().validate(Loose(a=2), numbers(2), ckpt_path=written, verbose=False)


def test_an_error_of_a_module_s_own_loading_stays_itself(written: Path) -> None:
    class Own(Net):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        quiet().validate(Own(a=2, b=3), numbers(2), ckpt_path=written, verbose=False)


def test_another_class_of_optimizer_is_named(written: Path) -> None:
    """Adam's state was put into SGD, which failed in its first step for want of a key."""
    with pytest.raises(
        MisconfigurationException, match=r"is not this SGD: it was written by Adam\. Resume with.*fit without"
    ):
        quiet(max_epochs=2).fit(Net(torch.optim.SGD, a=2, b=3), numbers(2), ckpt_path=written)


def test_and_where_the_checkpoint_names_no_class_by_its_settings(written: Path) -> None:
    content = load(written)
    del content["lockstep"]["optimizers"]
    save(content, written)
    with pytest.raises(MisconfigurationException, match=r"is not this SGD: it has the setting 'betas', which SGD"):
        quiet(max_epochs=2).fit(Net(torch.optim.SGD, a=2, b=3), numbers(2), ckpt_path=written)
    content["optimizer_states"][0]["param_groups"][0].pop("decoupled_weight_decay")  # as an older torch wrote it
    save(content, written)
    assert quiet(max_epochs=2).fit(Net(a=2, b=3), numbers(2), ckpt_path=written).epochs == 2


class Grouped(Net):
    def __init__(self, cuts: list[int]) -> None:
        super().__init__(a=2, b=3)
        self.cuts = cuts

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        ends = [*self.cuts, len(parameters)]
        return torch.optim.Adam([{"params": parameters[i:j]} for i, j in zip([0, *ends], ends, strict=False)])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([], [2], "it has 1 parameter groups, this one 2"),
        ([1], [2], "its parameter group 0 has 1 parameters, that of this one 2"),
    ],
)
def test_other_parameter_groups_are_counted(tmp_path: Path, before: list[int], now: list[int], said: str) -> None:
    trainer, path = quiet(max_epochs=1), tmp_path / "groups.ckpt"
    trainer.fit(Grouped(before), numbers(2))
    trainer.save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=f"is not this Adam: {said}"):
        quiet(max_epochs=2).fit(Grouped(now), numbers(2), ckpt_path=path)
