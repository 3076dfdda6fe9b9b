"""load_from_checkpoint: from saved hyperparameters back to a module, whoever wrote the file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint.arguments import where_there_is_a_device
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.models import BoringModel
from tests.checkpoint.test_as_they_were import saved


class Net(BoringModel):
    def __init__(self, root: Any, lr: float = 0.1, args: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class Child(Net):
    def __init__(self, depth: int, **kwargs: Any) -> None:
        super().__init__(**{"root": "child", **kwargs})


class Backboned(BoringModel):
    def __init__(self, backbone: nn.Module, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = backbone


@dataclass
class Size:
    width: int

    def __post_init__(self) -> None:
        self.width *= 2


class Contained(BoringModel):
    def __init__(self, config: Any, other: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters(config)
        self.other = other


def test_arguments_that_are_given_go_first(tmp_path: Path) -> None:
    path = saved(Net("data"), tmp_path)
    assert Net.load_from_checkpoint(path, lr=0.7).hparams == {"root": "data", "lr": 0.7, "args": None}
    child = Child.load_from_checkpoint(path, depth=4)
    assert child.hparams == {"depth": 4, "lr": 0.1, "args": None, "root": "data"}


def test_a_subclass_that_passes_keywords_on(tmp_path: Path) -> None:
    path = saved(Child(2, lr=0.3), tmp_path)
    expected = {"root": "child", "lr": 0.3, "args": None, "depth": 2}
    assert torch.load(path, weights_only=True)["hyper_parameters"] == expected
    assert Child.load_from_checkpoint(path).hparams == expected


@pytest.mark.filterwarnings("ignore:.*is a module")
def test_a_module_is_given_again_and_asked_for_by_name(tmp_path: Path) -> None:
    path = saved(Backboned(nn.Linear(2, 2), 4), tmp_path)
    with pytest.raises(MisconfigurationException, match=r"Backboned\.__init__ requires 'backbone'.*backbone=\.\.\."):
        Backboned.load_from_checkpoint(path)
    assert Backboned.load_from_checkpoint(path, backbone=nn.Linear(2, 2)).hparams.width == 4


def test_one_container_and_another_argument(tmp_path: Path) -> None:
    """An argument beside the container was taken for one of its items."""
    path = saved(Contained({"a": 1, "b": 2}), tmp_path)
    back = Contained.load_from_checkpoint(path, b=3, other=5)
    assert (back.hparams.a, back.hparams.b, back.other) == (1, 3, 5)


@pytest.mark.parametrize(
    ("name", "text"), [("h.yaml", "root: new\nlr: 0.5\n"), ("h.csv", "key,value\nroot,new\nlr,0.5\n")]
)
def test_a_file_of_hyperparameters(tmp_path: Path, name: str, text: str) -> None:
    pytest.importorskip("yaml")
    path = saved(Net("data"), tmp_path)
    (tmp_path / name).write_text(text)
    assert Net.load_from_checkpoint(path, hparams_file=tmp_path / name).hparams == {
        "root": "new",
        "lr": 0.5,
        "args": None,
    }
    (tmp_path / "h.txt").write_text(text)
    with pytest.raises(MisconfigurationException, match=r"hparams_file='.*h\.txt'.*\.yaml"):
        Net.load_from_checkpoint(path, hparams_file=tmp_path / "h.txt")


class Wider(Net):
    def __init__(self, root: Any, lr: float = 0.1, args: Any = None) -> None:
        super().__init__(root, lr, args)
        self.head = nn.Linear(2, 1)


def test_names_of_weights_that_differ(tmp_path: Path) -> None:
    path = saved(Net("data"), tmp_path)
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        Wider.load_from_checkpoint(path)
    with pytest.warns(UserWarning, match=r"Wider: weights that are in the module.*head\.weight, head\.bias"):
        Wider.load_from_checkpoint(path, strict=False)

    class Lenient(Wider):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.strict_loading = False

    with pytest.warns(UserWarning, match=r"head\.weight"):
        Lenient.load_from_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=r"strict=True\): Lenient has set strict_loading = False"):
        Lenient.load_from_checkpoint(path, strict=True)


def test_a_file_that_is_open(tmp_path: Path) -> None:
    path = saved(net := Net("data"), tmp_path)
    with open(path, "rb") as file:
        assert torch.equal(Net.load_from_checkpoint(file).layer.weight, net.layer.weight)
        assert not file.closed
    assert Net.load_from_checkpoint(io.BytesIO(path.read_bytes())).hparams.root == "data"


def test_tensors_of_a_device_that_is_not_here_go_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = torch.ones(1).untyped_storage()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert where_there_is_a_device(storage, "cuda:0").device.type == "cpu"
    assert where_there_is_a_device(storage, "cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert where_there_is_a_device(storage, "cuda:0") is None


class Parsed(BoringModel):
    def __init__(self, size: Size, sizes: tuple[int, ...] = (1,), root: Path = Path("data")) -> None:
        super().__init__()
        self.given = (size, sizes, root)


def test_what_a_command_line_has_parsed_becomes_objects(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    path = saved(Parsed(Size(1)), tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint.pop("lockstep")
    keys = {"_instantiator": "lockstep.cli.instantiate_module", "_class_path": "x.Parsed"}
    parsed = {"size": {"width": 3}, "sizes": [4, 5], "root": "x", **keys}
    torch.save({**checkpoint, "hyper_parameters": parsed}, path)
    assert Parsed.load_from_checkpoint(path).given == (Size(3), (4, 5), Path("x"))
