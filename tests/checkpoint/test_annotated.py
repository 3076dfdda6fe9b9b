"""Hyperparameters that are no plain values: a checkpoint holds their plain form, the annotation brings them back."""

from __future__ import annotations

import copy
import enum
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from lockstep import LightningModule
from lockstep.checkpoint.annotated import instantiate
from lockstep.ground.errors import MisconfigurationException

if TYPE_CHECKING:
    from decimal import Decimal


class Colour(enum.Enum):
    RED = "red"
    BLUE = (0, 0, 1)


class Size(NamedTuple):
    width: int
    colour: Colour = Colour.RED


@dataclass
class Block:
    width: int
    colour: Colour = Colour.RED


@dataclass(frozen=True)
class Config:
    blocks: list[Block]
    folder: Path = Path("here")
    by_name: dict[str, Block] = field(default_factory=dict)
    best: Block | None = None
    total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(block.width for block in self.blocks))


CONFIG = Config([Block(1), Block(2, Colour.BLUE)], Path("/a/b"), {"x": Block(3)}, Block(4))


SMALL = Size(1)


class Base(LightningModule):
    def __init__(self, size: Size = SMALL, **others: Any) -> None:
        super().__init__()
        self.size = size


class Net(Base):
    def __init__(
        self,
        config: Config,
        colour: Colour | None,
        path: Path | str,
        sizes: tuple[Size, ...] = (),
        names: Namespace | None = None,
        odd: Decimal | None = None,
        plain: dict[str, int] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.save_hyperparameters()
        self.given = [config, colour, path, sizes, names, odd, plain, self.size]
        self.total = config.total


def test_what_the_annotation_names_comes_back(tmp_path: Path) -> None:
    """A dataclass came back as a dict, and the module's ``__init__`` failed: 'dict' object has no attribute 'total'."""
    net = Net(CONFIG, Colour.BLUE, Path("p"), (Size(1), Size(2)), Namespace(a=1), plain={"a": 1}, size=Size(7))
    path = save(net, tmp_path)
    loaded = Net.load_from_checkpoint(path)
    assert loaded.given[:2] + loaded.given[3:] == net.given[:2] + net.given[3:]
    assert str(loaded.given[2]) == "p"
    assert [type(value) for value in loaded.given if value is not loaded.given[2]] == [
        type(value) for value in net.given if value is not net.given[2]
    ]
    assert Net.load_from_checkpoint(path, config=Config([])).total == 0


def save(module: Any, folder: Path) -> Path:
    from lockstep.checkpoint import format
    from lockstep.ground.hyperparameters import noted_classes, plain_hyperparameters

    plain = plain_hyperparameters(module.hparams)
    content = {
        "state_dict": module.state_dict() if isinstance(module, LightningModule) else {},
        module.CHECKPOINT_HYPER_PARAMS_KEY: plain,
        f"{module.CHECKPOINT_HYPER_PARAMS_KEY}_classes": noted_classes(module.hparams, plain),
        module.CHECKPOINT_HYPER_PARAMS_NAME: module._hparams_name,
    }
    format.save(content, folder / "a.ckpt")
    return folder / "a.ckpt"


def test_a_dataclass_that_has_changed_is_named(tmp_path: Path) -> None:
    class Changed(LightningModule):
        def __init__(self, config: Block) -> None:
            super().__init__()
            self.save_hyperparameters()

    module = Changed(Block(1))
    vars(Block)["__dataclass_fields__"]["depth"] = field = copy.copy(vars(Block)["__dataclass_fields__"]["width"])
    field.name, module.hparams.config.depth = "depth", 2
    try:
        path = save(module, tmp_path)
    finally:
        del vars(Block)["__dataclass_fields__"]["depth"]
    with pytest.raises(MisconfigurationException, match=r"'config' cannot be rebuilt.*Block.*'depth'.*config=\.\.\."):
        Changed.load_from_checkpoint(path)


def test_a_container_of_omegaconfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, since lockstep does not need the package."""
    package = ModuleType("omegaconf")

    class DictConfig(dict[str, Any]):
        __module__ = "omegaconf.dictconfig"

    package.OmegaConf = type("OmegaConf", (), {"create": staticmethod(DictConfig)})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", package)
    found = instantiate(DictConfig, {"a": 1})
    assert (found, type(found)) == ({"a": 1}, DictConfig)
