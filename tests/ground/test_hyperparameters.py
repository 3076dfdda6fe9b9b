"""Hyperparameters are collected as Lightning 2.6 collects them."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import pickle
import warnings
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import (
    AttributeDict,
    HyperparametersMixin,
    merged_hyperparameters,
    plain_hyperparameters,
)


class Module(HyperparametersMixin, nn.Module):
    """What a LightningModule is, as far as hyperparameters go."""


class Net(Module):
    def __init__(self, width: int, lr: float = 0.1, *rest: Any, mode: str = "a", **more: Any) -> None:
        super().__init__()
        local = width + 1  # no argument: never collected
        self.save_hyperparameters()
        self.local = local


class WiderNet(Net):
    def __init__(self, width: int = 3, extra: str = "e") -> None:
        super().__init__(width * 2, lr=0.5)


class TestCollecting:
    def test_all_arguments_with_defaults_and_keywords_but_not_the_rest(self) -> None:
        net = Net(4, 0.2, 5, 6, depth=7)
        assert net.hparams == {"width": 4, "lr": 0.2, "mode": "a", "depth": 7}
        assert net._hparams_name == "kwargs"
        assert net._log_hyperparams

    def test_a_subclass_adds_its_arguments_and_its_values_win(self) -> None:
        assert WiderNet(3).hparams == {"width": 3, "extra": "e", "lr": 0.5, "mode": "a"}

    def test_a_frame_of_ones_own(self) -> None:
        class Late(Module):
            def __init__(self, a: int, b: int = 2) -> None:
                super().__init__()
                keep(self, inspect.currentframe())

        def keep(net: Module, frame: Any) -> None:
            net.save_hyperparameters(frame=frame)

        assert Late(1).hparams == {"a": 1, "b": 2}

    def test_ignored_ones_can_be_dropped_later(self) -> None:
        net = Net(1)
        net.remove_ignored_hparams(["lr", "unknown"])
        assert net.hparams == {"width": 1, "mode": "a"}

    def test_named_subset(self) -> None:
        class Some(Module):
            def __init__(self, a: int, b: int, c: int) -> None:
                super().__init__()
                self.save_hyperparameters("a", "c", logger=False)

        net = Some(1, 2, 3)
        assert net.hparams == {"a": 1, "c": 3}
        assert not net._log_hyperparams

    def test_ignore_drops_also_what_a_base_class_saved(self) -> None:
        class Ignoring(Net):
            def __init__(self, width: int, loss: str = "l") -> None:
                super().__init__(width)
                self.save_hyperparameters(ignore=["lr", "loss"])

        assert Ignoring(2).hparams == {"width": 2, "mode": "a"}
        assert Ignoring(2).hparams_initial == {"width": 2, "mode": "a"}

    @pytest.mark.parametrize("make", [dict, Namespace])
    def test_one_container_remembers_which_argument_it_was(self, make: Any) -> None:
        class Contained(Module):
            def __init__(self, config: Any, other: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters(config)

        net = Contained(make(a=1, b=[2]))
        assert net.hparams == {"a": 1, "b": [2]}
        assert net._hparams_name == "config"

    def test_a_module_inside_a_module_keeps_to_its_own_arguments(self) -> None:
        class Outer(Module):
            def __init__(self, width: int, outer: str) -> None:
                super().__init__()
                self.inner = Net(width * 10)
                self.save_hyperparameters()

        outer = Outer(1, "o")
        assert outer.hparams == {"width": 1, "outer": "o"}
        assert outer.inner.hparams == {"width": 10, "lr": 0.1, "mode": "a"}

    def test_dataclass_fields(self) -> None:
        @dataclass
        class Data(HyperparametersMixin):
            size: int = 3
            name: str = "n"

            def __post_init__(self) -> None:
                self.save_hyperparameters()

        assert Data(size=4).hparams == {"size": 4, "name": "n"}


class TestWhatIsKept:
    def test_initial_is_a_deep_copy(self) -> None:
        class Listed(Module):
            def __init__(self, layers: list[int]) -> None:
                super().__init__()
                self.save_hyperparameters()

        net = Listed([1, 2])
        net.hparams.layers.append(3)
        net.hparams_initial.layers.append(4)
        assert net.hparams_initial == {"layers": [1, 2]}

    def test_a_module_among_them_warns_and_plain_ones_do_not(self) -> None:
        class Backboned(Module):
            def __init__(self, backbone: nn.Module) -> None:
                super().__init__()
                self.save_hyperparameters()

        with pytest.warns(UserWarning, match=r"'backbone'.*ignore=\['backbone'\]"):
            Backboned(nn.Linear(1, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Net(1)


class Colour(enum.Enum):
    RED = "red"


def a_loss() -> None: ...


class Holds(Module):
    def __init__(self, value: Any, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class TestWhatACheckpointHolds:
    """Paths, namespaces, enums and functions were refused only when the first checkpoint was saved."""

    def test_objects_stay_and_their_plain_forms_are_saved(self) -> None:
        given = {"root": Path("a/b"), "colour": Colour.RED, "n": np.float32(0.5), "args": Namespace(depth=2)}
        net = Holds(given, Path("c"))
        assert net.hparams.value is given
        assert isinstance(net.hparams.more, Path)
        assert plain_hyperparameters(net.hparams) == {
            "value": {"root": "a/b", "colour": "red", "n": 0.5, "args": {"depth": 2}},
            "more": "c",
        }

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (a_loss, r"'value' is a function"),
            (nn.ReLU, r"'value' is the class torch\.nn\.\S+ReLU"),
            (functools.partial(a_loss), r"'value' is a functools\.partial"),
            ({"a": [a_loss]}, r"'value' contains, at \['a'\]\[0\], a function"),
        ],
    )
    def test_what_it_cannot_hold_is_refused_at_once_by_its_key(self, value: Any, what: str) -> None:
        ways = r"save_hyperparameters\(ignore=\['value'\]\).*load_from_checkpoint\(path, value=\.\.\.\)"
        with pytest.raises(MisconfigurationException, match=rf"the hyperparameter {what}.*{ways}"):
            Holds(value)

    def test_a_subclass_may_ignore_what_its_base_class_has_saved(self) -> None:
        class Child(Holds):
            def __init__(self, value: Any, loss: Any) -> None:
                super().__init__(value)
                self.save_hyperparameters(ignore="loss")

        assert Child(1, a_loss).hparams == {"value": 1, "more": None}

    @pytest.mark.filterwarnings("ignore:.*is a module")
    def test_modules_are_left_out(self) -> None:
        net = Holds(nn.Linear(1, 1), 3)
        assert isinstance(net.hparams.value, nn.Linear)
        assert plain_hyperparameters(net.hparams) == {"more": 3}


class TestMerging:
    def test_module_and_data_module(self) -> None:
        silent = Net(5)
        silent._log_hyperparams = False
        assert merged_hyperparameters([Holds(torch.ones(2)), Net(1)]).keys() == {"value", "more", "width", "lr", "mode"}
        assert merged_hyperparameters([Net(1), silent]) == {"width": 1, "lr": 0.1, "mode": "a"}

    def test_a_name_that_both_have_must_mean_the_same(self) -> None:
        assert merged_hyperparameters([Net(1), Net(1)])["width"] == 1
        with pytest.raises(MisconfigurationException, match=r"'width' is 1 in the module and 2 in the data module"):
            merged_hyperparameters([Net(1), Net(2)])


class TestErrors:
    def test_a_name_that_is_no_argument(self) -> None:
        class Wrong(Module):
            def __init__(self, a: int) -> None:
                super().__init__()
                self.save_hyperparameters("b")

        with pytest.raises(MisconfigurationException, match=r"'b' is not an argument.*\['a'\]"):
            Wrong(1)


class TestAttributeDict:
    def test_items_are_attributes(self) -> None:
        settings = AttributeDict({"lr": 0.1, "my-key": 2})
        settings.depth = 3
        del settings.lr
        assert settings == {"my-key": 2, "depth": 3}
        with pytest.raises(AttributeError, match="'lr'"):
            _ = settings.lr
        with pytest.raises(AttributeError, match="'lr'"):
            del settings.lr

    def test_copies_and_pickles_keep_the_type(self) -> None:
        settings = AttributeDict(a=AttributeDict(b=1))
        for other in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
            assert isinstance(other, AttributeDict)
            assert other.a.b == 1
