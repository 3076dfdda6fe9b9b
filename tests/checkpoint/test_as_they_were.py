"""load_from_checkpoint gives the hyperparameters that the run had, or says by name which it cannot tell."""

from __future__ import annotations

import enum
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from lockstep import LightningModule, Trainer
from lockstep.checkpoint.annotated import instantiate
from lockstep.ground.errors import MisconfigurationException
from lockstep.loggers import CSVLogger
from lockstep.testing.models import BoringModel

if TYPE_CHECKING:
    from decimal import Decimal


class Act(enum.Enum):
    RELU = "relu"
    GELU = "gelu"


class Swapped(enum.Enum):
    left = "right"
    right = "left"


class WrittenMode(str, enum.Enum):
    FAST = "fast"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Computed:
    lr: float
    batch: int

    def __post_init__(self) -> None:
        self.lr = self.lr * self.batch / 256


@dataclass
class NetConfig:
    width: int
    acts: dict[Act, list[Any]] = field(default_factory=dict)


@dataclass
class Child(NetConfig):
    pass


@dataclass
class A:
    lr: float


@dataclass
class B:
    lr: float


class ActAndPart(NamedTuple):
    one: Act
    two: A | B


@dataclass(frozen=True)
class Sums:
    parts: list[NetConfig]
    total: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(part.width for part in self.parts))


class Sized(BoringModel):
    def __init__(self, sums: Sums | None = None) -> None:
        super().__init__()


class Net(Sized):
    def __init__(
        self,
        cfg: Computed,
        net: NetConfig,
        opt: A | B,
        size: Sequence[int] = (2, 2),
        root: Path = "data",  # type: ignore[assignment]
        hidden: list[int] = (4, 4),  # type: ignore[assignment]
        where: str | Path = "",
        mode: str = "",
        pairs: dict[Act, list[ActAndPart]] | None = None,
        acts: set[Act] | frozenset[Act] | None = None,
        others: Namespace | None = None,
        odd: Decimal | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.save_hyperparameters()


def of_the_run() -> Net:
    pairs = {Act.GELU: [ActAndPart(Act.RELU, B(1.0)), ActAndPart(Act.GELU, A(2.0))]}
    more: dict[str, Any] = {"pairs": pairs, "acts": frozenset({Act.GELU}), "others": Namespace(to=Path("b"))}
    more["sums"] = Sums([NetConfig(1), NetConfig(2)])
    return Net(Computed(0.1, 512), Child(8, {Act.RELU: [1]}), B(0.3), where=Path("a"), mode=WrittenMode.FAST, **more)


def saved(module: LightningModule, folder: Path, logger: Any = False) -> Path:
    """A checkpoint of `module` after a step."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": logger}
    trainer = Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", enable_checkpointing=False, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def changed(path: Path, change: Any) -> Path:
    """A checkpoint with other notes of classes."""
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lockstep"]
    notes = checkpoint["hyper_parameters_classes"]
    checkpoint["hyper_parameters_classes"] = {at: change(kind) for at, kind in notes.items()}
    torch.save(checkpoint, path)
    return path


def test_each_comes_back_as_it_was(tmp_path: Path) -> None:
    """A ``__post_init__`` computed twice, B came back as A, a subclass as its base, and a tuple as a list."""
    path = saved(net := of_the_run(), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = Net.load_from_checkpoint(path)
        assert repr(back.hparams) == repr(net.hparams)
        assert type(back.hparams.net) is Child
        moved = changed(path, lambda kind: kind.replace(__name__, "__main__"))  # what was a script is a module now
        assert repr(Net.load_from_checkpoint(moved).hparams) == repr(net.hparams)


def test_a_class_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    path = changed(saved(of_the_run(), tmp_path), lambda kind: kind.replace(":Child", ":Grandchild"))
    with pytest.warns(UserWarning, match=r"'net' was saved with objects of Grandchild, .* plain values.*net=\.\.\.\)"):
        assert Net.load_from_checkpoint(path).hparams.net == {"width": 8, "acts": {Act.RELU: [1]}}
    assert Net.load_from_checkpoint(path, net=NetConfig(1)).hparams.net == NetConfig(1)


def test_what_no_annotation_names_stays_plain_and_is_said(tmp_path: Path) -> None:
    class Plain(BoringModel):
        def __init__(self, act: Any, more: dict[str, Any]) -> None:
            super().__init__()
            self.save_hyperparameters()

    path = saved(Plain(Act.RELU, {"a": Path("b")}), tmp_path)
    with pytest.warns(
        UserWarning,
        match=r"Plain\.load_from_checkpoint: the hyperparameter 'act' was saved with objects of Act.*act=\.\.\.\)",
    ):
        assert Plain.load_from_checkpoint(path).hparams == {"act": "relu", "more": {"a": Path("b")}}


def test_an_attribute_computed_of_computed_values_is_refused(tmp_path: Path) -> None:
    @dataclass
    class More(Computed):
        def __post_init__(self) -> None:
            super().__post_init__()
            self.half = self.lr / 2

    class Halved(BoringModel):
        def __init__(self, cfg: More) -> None:
            super().__init__()
            self.save_hyperparameters()

    Halved.__init__.__annotations__["cfg"] = More
    path = saved(Halved(More(0.1, 512)), tmp_path)
    with pytest.raises(
        MisconfigurationException,
        match=r"'cfg' cannot be rebuilt.*More\.__post_init__ changes the field 'lr'.*'half'.*cfg=\.\.\.",
    ):
        Halved.load_from_checkpoint(path)
    assert Halved.load_from_checkpoint(saved(Halved(More(0.1, 256)), tmp_path)).hparams.cfg.half == 0.05


def test_a_dataclass_that_has_changed_is_named(tmp_path: Path) -> None:
    path = saved(of_the_run(), tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lockstep"]
    checkpoint["hyper_parameters"]["net"]["depth"] = 2
    torch.save(checkpoint, path)
    with pytest.raises(MisconfigurationException, match=r"'net' cannot be rebuilt.*'depth'.*net=\.\.\."):
        Net.load_from_checkpoint(path)


def test_one_argument_that_took_all(tmp_path: Path) -> None:
    class Whole(BoringModel):
        def __init__(self, args: Namespace) -> None:
            super().__init__()
            self.save_hyperparameters(args)
            self.args = args

    args = Namespace(root=Path("a"), lr=0.1)
    path = saved(Whole(args), tmp_path)
    assert Whole.load_from_checkpoint(path).args == args
    assert Whole.load_from_checkpoint(path, root="b").args.root == "b"


class Logged(BoringModel):
    def __init__(self, act: Swapped, rights: Rights, net: NetConfig, either: str | Act, opt: A | B) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_the_file_that_a_logger_wrote(tmp_path: Path) -> None:
    """What it has as the run had it comes back as it was; what was edited is taken as it stands."""
    pytest.importorskip("yaml")
    rights = Rights.READ | Rights.WRITE
    net = Logged(Swapped.left, rights, Child(3, {Act.GELU: [1]}), Act.GELU, B(0.5))
    logger = CSVLogger(tmp_path)
    path, file = saved(net, tmp_path, logger), Path(logger.log_dir, "hparams.yaml")
    assert "act: left" in file.read_text()
    assert repr(Logged.load_from_checkpoint(path, hparams_file=file).hparams) == repr(net.hparams)
    file.write_text(file.read_text().replace("left", "right"))
    edited = Logged.load_from_checkpoint(path, hparams_file=file).hparams
    assert (edited.act, edited.net) == ("right", net.hparams.net)


def test_a_container_of_omegaconfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, since lockstep does not need the package."""
    package = ModuleType("omegaconf")

    class DictConfig(dict[str, Any]):
        __module__ = "omegaconf.dictconfig"

    package.OmegaConf = type("OmegaConf", (), {"create": staticmethod(DictConfig)})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "omegaconf", package)
    found = instantiate(DictConfig, {"a": 1})
    assert (found, type(found)) == ({"a": 1}, DictConfig)
