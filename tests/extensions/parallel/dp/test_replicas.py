"""DataParallel on CPU devices, against the module on one."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lockstep
from lockstep.extensions.parallel.dp import replicas
from lockstep.extensions.parallel.dp.replicas import (
    DataParallel,
    gather,
    in_threads,
    part_sizes,
    replicate,
    rows_of,
    scatter,
)

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "a b")


@dataclass
class Out:
    logits: Tensor
    names: list[str]


class Net(nn.Module):
    """Shared weights, a frozen layer, outputs of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = self.first
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        hidden = self.frozen(torch.tanh(self.tied(x))) * scale
        out = self.last(hidden)
        return {
            "out": out,
            "pair": Pair(hidden, [out.sum(1)]),
            "kept": Out(out, [str(len(x))] * len(x)),
            "scale": scale,
        }


@given(rows=st.integers(1, 9), devices=st.integers(1, 5))
@settings(max_examples=20)
def test_outputs_and_gradients_are_those_of_one_device(rows: int, devices: int) -> None:
    torch.manual_seed(rows)
    net, x = Net().double(), torch.randn(rows, 3, dtype=torch.float64)
    alone = net(x, scale=2.0)
    alone["out"].square().mean().backward()
    expected = {name: parameter.grad for name, parameter in net.named_parameters()}
    net.zero_grad()
    found = DataParallel(net, ["cpu"] * devices)(x, scale=2.0)
    found["out"].square().mean().backward()
    for name, parameter in net.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found["out"], alone["out"], rtol=1e-13, atol=0)
    assert type(found["pair"]) is Pair
    assert found["pair"].b[0].shape == (rows,)
    assert found["scale"] == 2.0
    assert sum(int(name) > 0 for name in found["kept"].names) == rows


@given(rows=st.integers(1, 50), parts=st.integers(1, 9))
def test_parts_differ_by_one_row_at_most(rows: int, parts: int) -> None:
    sizes = part_sizes(rows, parts)
    assert sum(sizes) == rows
    assert len(sizes) == min(rows, parts)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0


def test_a_batch_is_cut_with_all_that_is_in_it() -> None:
    batch = {"x": torch.arange(5), "y": [torch.arange(10).view(5, 2), "text"], "all": torch.tensor(7)}
    first, second = scatter(batch, [CPU, CPU])
    assert first["x"].tolist() == [0, 1, 2]
    assert second["x"].tolist() == [3, 4]
    assert second["y"][0].tolist() == [[6, 7], [8, 9]]
    assert second["y"][1] == "text"
    assert second["all"] == 7
    assert scatter(torch.arange(6).view(2, 3), [CPU, CPU], dim=1)[1].tolist() == [[2], [5]]
    assert rows_of("no tensor") is None
    assert scatter({"a": 1}, [CPU, CPU]) == [{"a": 1}]
    with pytest.raises(ValueError, match=r"different sizes \[3, 5\] along dimension 0"):
        scatter([torch.zeros(5), torch.zeros(3)], [CPU, CPU])


def test_scalars_are_gathered_into_a_vector() -> None:
    assert gather([torch.tensor(1.0), torch.tensor(2.0)], CPU).tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="different keys"):
        gather([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}], CPU)
    with pytest.raises(ValueError, match=r"\['Tensor', 'float'\]|\['float'"):
        gather([1.0, torch.zeros(1)], CPU)


def test_the_first_part_keeps_batchnorms_statistics() -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(8, 3), nn.BatchNorm1d(3)
    expected = nn.BatchNorm1d(3)
    expected(x[:4])
    DataParallel(norm, ["cpu", "cpu"])(x)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    assert norm.num_batches_tracked == 1


def test_replicas_share_parameters_and_have_buffers_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    same, other = replicate(net, [CPU, CPU])
    assert same is net
    assert other is not net
    assert other[0].weight is net[0].weight
    assert other[1].running_mean is not net[1].running_mean


def test_threads_have_the_callers_modes() -> None:
    def modes() -> tuple[Any, ...]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert in_threads([modes] * 3) == [(False, False, torch.bfloat16)] * 3
    with torch.inference_mode():
        assert in_threads([modes] * 2) == [(False, True, torch.float32)] * 2


def test_each_part_has_its_device_for_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, ``torch.zeros(3, device="cuda")`` of every replica was on the first."""
    here = threading.local()

    @contextlib.contextmanager
    def place(device: torch.device) -> Iterator[None]:
        here.device = device
        yield
        del here.device

    monkeypatch.setattr(replicas, "place_on", place)
    devices = [CPU, torch.device("cpu", 0), torch.device("cpu", 1)]
    assert in_threads([lambda: here.device] * 2, devices) == devices[:2]


def test_an_error_in_a_thread_comes_out() -> None:
    def fail() -> None:
        raise KeyError("the second")

    with pytest.raises(KeyError, match="the second"):
        in_threads([lambda: 1, fail])


def test_an_error_in_a_part_tells_its_device() -> None:
    """It was not to be seen which part of the batch, and which device, an error was of."""
    with pytest.raises(KeyError) as caught:
        DataParallel(_Fails(), ["cpu"] * 3)(torch.arange(6.0))
    if hasattr(caught.value, "add_note"):  # from Python 3.11 on
        assert caught.value.__notes__ == ["Raised for part 2 of 3 of the batch, on cpu."]


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x[0] == 2:
            raise KeyError("no such thing")
        return x


class _Strict(dict[str, Any]):
    """As some libraries' outputs: takes no items in its constructor, and refuses `update`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("not this one")


def test_mappings_keep_their_kind() -> None:
    """A defaultdict was called with its items."""
    parts = [defaultdict(list, a=torch.ones(2)), defaultdict(list, a=torch.zeros(1))]
    joined = gather(parts, CPU)
    assert (joined["a"].tolist(), joined["b"]) == ([1, 1, 0], [])
    strict = [_Strict("x"), _Strict("x")]
    for part in strict:
        part["a"] = torch.ones(1)
    found = gather(strict, CPU)
    assert (type(found), found.kind, found["a"].tolist()) == (_Strict, "x", [1, 1])


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([1.5, 2.5], "returned 1.5 and 2.5, which cannot be joined"),
        ([{"n": 3}, {"n": 2}], "returned 3 and 2"),
        ([numpy.zeros(2), numpy.ones(2)], "would be lost"),
        ([[torch.ones(1)] * 3, [torch.ones(1)] * 2], r"a list of \[2, 3\] members"),
    ],
)
def test_what_would_be_lost_is_an_error(outputs: list[Any], text: str) -> None:
    """The first part's number stood for all of them."""
    with pytest.raises(ValueError, match=text):
        gather(outputs, CPU)


def test_what_cannot_be_cut_or_copied_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"dim=1\): the batch has a tensor of shape \(3,\)"):
        scatter({"x": torch.ones(3, 2), "mask": torch.ones(3)}, [CPU], 1)
    with pytest.raises(ValueError, match="is lazy and not initialized"):  # replicas would begin with other weights
        DataParallel(nn.LazyLinear(2), ["cpu", "cpu"])(torch.ones(2, 2))


def test_it_is_found_beside_the_container() -> None:
    assert lockstep.DataParallel is DataParallel


def test_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        DataParallel(Net(), [])
    with pytest.raises(ValueError, match=r"'weight' is on meta, but the first device is cpu"):
        DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"])
