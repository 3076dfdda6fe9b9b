"""What a checkpoint may hold: what is let through is read back, what is not is named by its key."""

from __future__ import annotations

import collections
import enum
import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.checkpoint.format import readable
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict


class Colour(enum.Enum):
    RED = 1


class Point:
    def __init__(self) -> None:
        self.x = 1


Pair = collections.namedtuple("Pair", "a b")


class TensorWithAName(torch.Tensor):
    pass


def round_trip(value: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(readable(value), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class TestLetThrough:
    @pytest.mark.parametrize(
        "value",
        [
            *(None, True, -3, 1 << 70, 0.5, 1j, "text", "", b"bytes", bytearray(b"b")),
            *((1, (2,)), [1, [2]], {1, 2}, {1: "a", (2, 3): "b"}),
            *(collections.OrderedDict(a=1), collections.Counter("aab")),
            *(torch.float16, torch.device("cpu"), torch.Size([2]), torch.strided),
        ],
        ids=repr,
    )
    def test_plain_values(self, value: Any) -> None:
        back = round_trip({"value": value})["value"]
        assert back == value
        assert type(back) is type(value)

    def test_tensors(self) -> None:
        with_attribute = torch.ones(2)
        with_attribute.note = {"a": 1}  # type: ignore[attr-defined]
        back = round_trip({"p": nn.Parameter(torch.ones(1)), "b": nn.Buffer(torch.ones(3)), "t": with_attribute})
        assert isinstance(back["p"], nn.Parameter)
        assert back["t"].note == {"a": 1}

    def test_nothing_is_copied_where_nothing_changes(self) -> None:
        state = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).state_dict()
        checkpoint = {"state_dict": state, "list": [{"a": (1, 2)}]}
        assert readable(checkpoint) is checkpoint

    def test_a_list_in_itself_and_one_there_twice(self) -> None:
        loop: list[Any] = [1]
        loop.append(loop)
        twice = [np.int64(3)]
        back = round_trip({"loop": loop, "a": twice, "b": twice})
        assert back["loop"][1] is back["loop"]
        assert back["a"] is back["b"]

    def test_a_class_that_was_made_known(self) -> None:
        with torch.serialization.safe_globals([Point]):
            assert isinstance(round_trip({"p": Point()})["p"], Point)
        with torch.serialization.safe_globals([TensorWithAName]):
            value = torch.ones(1).as_subclass(TensorWithAName)
            assert isinstance(round_trip({"t": value})["t"], TensorWithAName)
        with pytest.raises(MisconfigurationException):
            readable({"p": Point()})

    @settings(max_examples=60, deadline=None)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(min_size=1),
            lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
            max_leaves=20,
        )
    )
    def test_whatever_is_let_through_comes_back_equal(self, value: Any) -> None:
        assert round_trip({"value": value}) == {"value": value}


class TestMadePlain:
    def test_numpy_numbers(self) -> None:
        numbers = {
            "a": np.float64(0.1),
            "b": [np.int64(3), np.bool_(True)],
            "c": (np.float32(0.5), np.str_("s")),
        }
        back = round_trip({"numbers": numbers})["numbers"]
        assert back == {"a": 0.1, "b": [3, True], "c": (0.5, "s")}
        assert [type(value) for value in (back["a"], *back["b"], *back["c"])] == [
            float,
            int,
            bool,
            float,
            str,
        ]
        assert type(numbers["a"]) is np.float64  # what was given is not changed
        assert type(round_trip({np.int64(1): 2}).popitem()[0]) is int

    def test_attribute_dicts_become_dicts(self) -> None:
        back = round_trip({"h": AttributeDict(model=AttributeDict(lr=0.1))})
        assert back == {"h": {"model": {"lr": 0.1}}}
        assert type(back["h"]["model"]) is dict

    def test_an_ordered_dict_keeps_its_attributes(self) -> None:
        state = nn.Linear(1, 1).state_dict()
        state["extra"] = np.float64(1.0)  # type: ignore[assignment]
        back = round_trip({"state_dict": state})["state_dict"]
        assert list(back) == ["weight", "bias", "extra"]
        assert back._metadata == state._metadata  # type: ignore[attr-defined]


def function() -> None: ...


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "what", "way_out"),
        [
            (Path("a"), r"a pathlib\.\w+", r"by str\(\.\.\.\)"),
            (np.ones(2), r"a numpy\.ndarray", r"torch\.as_tensor"),
            (np.datetime64("2020-01-01"), r"a numpy\.datetime64", "allow its class"),
            (np.random.get_state(), r"a numpy\.ndarray", r"torch\.as_tensor"),
            (Colour.RED, r"a .*Colour", "allow its class"),
            (Point(), r"a .*Point", r"add_safe_globals\(\[.*Point\]\)"),
            (Point, r"the class .*Point", "keep its name"),
            (function, "a function", "keep its name"),
            (lambda: 1, "a function", "keep its name"),
            (functools.partial(function), r"a functools\.partial", "keep its name"),
            (Pair(1, 2), r"a .*Pair", "plain list or tuple"),
            (frozenset({1}), "a frozenset", "plain list or tuple"),
            (collections.defaultdict(list), r"a collections\.defaultdict", r"dict\(\.\.\.\)"),
            (range(3), "a range", "keep tensors"),
            (nn.Linear(1, 1), r"a torch\.nn\.\S+Linear", "allow its class"),
            (torch.ones(1).as_subclass(TensorWithAName), r"a .*TensorWithAName", "allow its class"),
            (b"", "a bytes", "keep tensors"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_by_key_with_a_way_out(self, value: Any, what: str, way_out: str) -> None:
        place = r'checkpoint\["callbacks"\]\["C"\]\[0\](\[1\])?'
        with pytest.raises(MisconfigurationException, match=f"^{place} is {what}, .*{way_out}"):
            readable({"callbacks": {"C": [value]}})

    def test_a_hyperparameter_can_be_ignored(self) -> None:
        with pytest.raises(MisconfigurationException, match=r"save_hyperparameters\(ignore=\['path'\]\)"):
            readable({"hyper_parameters": {"path": {"deep": Path("a")}}})

    @pytest.mark.parametrize("bad", [{frozenset({1}): 1}, {"s": {frozenset({1})}}])
    def test_keys_and_items_of_sets_too(self, bad: dict[Any, Any]) -> None:
        with pytest.raises(MisconfigurationException, match="frozenset"):
            readable(bad)

    def test_attributes_of_tensors_and_of_ordered_dicts_too(self) -> None:
        tensor = torch.ones(1)
        tensor.note = Path("a")  # type: ignore[attr-defined]
        with pytest.raises(MisconfigurationException, match=r'\["t"\]\["__dict__"\]\["note"\]'):
            readable({"t": tensor})
        ordered: collections.OrderedDict[str, int] = collections.OrderedDict(a=1)
        ordered.note = Path("a")  # type: ignore[attr-defined]
        with pytest.raises(MisconfigurationException, match=r'\["o"\]\["__dict__"\]\["note"\]'):
            readable({"o": ordered})
