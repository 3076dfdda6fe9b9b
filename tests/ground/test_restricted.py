"""A class method that is not for instances."""

from __future__ import annotations

import inspect

import pytest

from lockstep import LightningDataModule, LightningModule
from lockstep.checkpoint.arguments import restricted_classmethod


class Base:
    @restricted_classmethod
    def make(cls, number: int = 1) -> str:
        """Makes one."""
        return f"{cls.__name__} {number}"


class Derived(Base): ...


def test_it_is_called_on_classes_only() -> None:
    assert (Base.make(2), Derived.make()) == ("Base 2", "Derived 1")
    with pytest.raises(TypeError, match=r"Derived.make returns a new object.*`object = Derived.make\(...\)`"):
        Derived().make()
    assert list(inspect.signature(Base.make).parameters) == ["number"]
    assert Base.make.__doc__ == "Makes one."


@pytest.mark.parametrize("kind", [LightningModule, LightningDataModule])
def test_a_checkpoint_is_loaded_by_the_class(kind: type) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__}.load_from_checkpoint returns a new object"):
        kind().load_from_checkpoint("any.ckpt")
