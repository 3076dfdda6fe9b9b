"""Classes in place of objects, objects of an installed Lightning, constructors that were forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep import Callback, LightningDataModule, LightningModule
from lockstep.callbacks import EarlyStopping
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Recorder, Slope, numbers, quiet


class ForgetsModule(LightningModule):
    def __init__(self) -> None:
        pass


class ForgetsData(LightningDataModule):
    def __init__(self) -> None:
        self.size = 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.fit(Slope, numbers(1)), r"trainer.fit\(model\): Slope is a class: pass an instance, Slope\(\)"),
        (lambda t: t.validate(Slope), r"trainer.validate\(model\): Slope is a class"),
        (
            lambda t: t.fit(3, numbers(1)),
            r"trainer.fit\(model\): pass an instance of lockstep's `LightningModule`, not of `int`",
        ),
        (
            lambda t: t.fit(ForgetsModule(), numbers(1)),
            r"ForgetsModule.__init__ did not call `super\(\).__init__\(\)`",
        ),
        (lambda t: t.fit(Slope(), datamodule=ForgetsData()), r"ForgetsData.__init__ did not call `super\(\)"),
    ],
)
def test_calls_that_are_nearly_right(call: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        call(quiet(max_epochs=1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"callbacks": [EarlyStopping]}, r"callbacks=...\): EarlyStopping is a class: pass an instance, EarlySt"),
        ({"callbacks": Callback}, r"callbacks=...\): Callback is a class"),
        (
            {"callbacks": [print]},
            r"callbacks=...\): pass an instance of lockstep's `Callback`, not of `builtin_function_or_method`",
        ),
        ({"logger": Recorder}, r"logger=.*Recorder.*CSVLogger\(folder\)"),
        ({"strategy": SingleDeviceStrategy}, r"strategy=SingleDeviceStrategy\) is a class"),
    ],
)
def test_flags_that_are_nearly_right(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        quiet(**flags)


def test_classes_of_an_installed_lightning_name_the_import_and_the_command(
    lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest"])

    class Theirs(lightning.LightningModule):  # type: ignore[misc,name-defined]
        pass

    class TheirData(lightning.LightningDataModule):  # type: ignore[misc,name-defined]
        pass

    change = r"derives from lightning\.pytorch\..*from `lockstep` instead of `lightning.pytorch`\."
    said = change + r".* with `lockstep run --lightning script\.py`\."
    with pytest.raises(MisconfigurationException, match=rf"Theirs {said}"):
        quiet().fit(Theirs(), numbers(1))
    with pytest.raises(MisconfigurationException, match=rf"TheirData {said}"):
        quiet().fit(Slope(), datamodule=TheirData())
    with pytest.raises(MisconfigurationException, match=rf"EarlyStopping {said}"):
        quiet(callbacks=[lightning.callbacks.EarlyStopping("loss")])
    with pytest.raises(MisconfigurationException, match=rf"EarlyStopping {said}"):
        quiet(callbacks=lightning.callbacks.EarlyStopping)
    monkeypatch.setattr("sys.argv", ["there/train.py"])
    with pytest.raises(MisconfigurationException, match=r"DDPStrategy .* with `lockstep run --lightning train\.py`"):
        quiet(strategy=lightning.strategies.DDPStrategy())
    with pytest.raises(MisconfigurationException, match=r"CPUAccelerator .* with `lockstep run --lightning train\.py`"):
        quiet(accelerator=lightning.accelerators.CPUAccelerator())
    with pytest.raises(MisconfigurationException, match=r"SimpleProfiler .* with `lockstep run --lightning train\.py`"):
        quiet(profiler=lightning.profilers.SimpleProfiler())
