"""Floating-point operations: counted against products by hand, and the table of devices against its names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.extensions.extras.throughput import get_available_flops, measure_flops

GPU = torch.device("cuda", 0)


def named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_linear_layers_operations(device: str) -> None:
    with torch.device(device):
        model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(5, 8)
    forward = 2 * 5 * (8 * 16 + 16 * 4)
    assert measure_flops(model, lambda: model(x)) == forward
    # backward: a gradient for every weight, and one for the input of the second layer
    assert measure_flops(model, lambda: model(x), lambda y: y.sum()) == 2 * forward + 2 * 5 * 16 * 4


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.float16, 756),
        ("NVIDIA H200 NVL", torch.float64, 30),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA RTX A6000", torch.float32, 38.7),
        ("NVIDIA GeForce RTX 3090 Ti", torch.float32, 40),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
    ],
)
def test_devices_that_are_known(name: str, dtype: torch.dtype, tera: float, monkeypatch: pytest.MonkeyPatch) -> None:
    named(name, monkeypatch)
    assert get_available_flops(GPU, dtype) == int(tera * 1e12)


def test_float32_is_tf32_where_products_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    named("NVIDIA A100-SXM4-40GB", monkeypatch)
    for precision, tera in (("highest", 19.5), ("high", 156.0)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert get_available_flops(GPU, torch.float32) == int(tera * 1e12)
    named("Tesla V100-SXM2-16GB", monkeypatch)
    assert get_available_flops(GPU, torch.float32) == int(15.7e12)
