"""DataParallel on CPU devices, against the module on one."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.parallel.dp import DataParallel, cut, gather, in_threads, replicate, rows_of, scatter

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
@settings(max_examples=20, deadline=None)
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
    sizes = cut(rows, parts)
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
    with pytest.raises(ValueError, match=r"\[3, 5\] rows along dimension 0"):
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


def test_an_error_in_a_thread_comes_out() -> None:
    def fail() -> None:
        raise KeyError("the second")

    with pytest.raises(KeyError, match="the second"):
        in_threads([lambda: 1, fail])


def test_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one device"):
        DataParallel(Net(), [])
    with pytest.raises(ValueError, match=r"'weight' is on meta, and the first device is cpu"):
        DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"])
