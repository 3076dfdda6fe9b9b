"""SyncBatchNorm by torch's CUDA kernels: the same numbers, and how often an activation is read and written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.native_batch_norm import ZERO_COUNT
from lockstep.engines.ddp.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from lockstep.ground import comm
from tests.engines.ddp.batch_norm_kernels import NAMES, Traffic, installed, wide
from tests.engines.ddp.test_sync_batchnorm import Case, compare, play
from tests.tools.pool import RankPool

WIDE = torch.float64


def natively(cases: list[Case], device: str) -> list[dict[str, Tensor]]:
    with installed():
        return play(cases, device)


@pytest.mark.parametrize("lengths", [(3, 5), (0, 4), (1, 1), (0, 0, 2)], ids=str)
def test_numbers_are_those_of_one_process_with_the_whole_batch(ranks: RankPool, lengths: tuple[int, ...]) -> None:
    """With uneven and empty batches, whoever has the first samples."""
    kinds: list[dict[str, Any]] = [
        {},
        {"inner": (4,), "affine": False},
        {"inner": (3, 2), "momentum": None, "eps": 0.1},
        {"inner": (2, 1, 3), "tracked": False},
        {"inner": (3, 2), "momentum": 1.0},
    ]
    compare(ranks, [Case(lengths, **kind) for kind in kinds], play=natively)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_narrow_types_keep_their_type(ranks: RankPool, dtype: torch.dtype, tolerance: float) -> None:
    """Parameters and running statistics in 16 bits, too."""
    compare(ranks, [Case((3, 5), inner, dtype=dtype) for inner in ((), (3, 2))], tolerance, play=natively)


def train(kind: str) -> dict[str, Any]:
    """A step in which rank 1 takes part for the others' sake, or with channels last, or 16-bit inputs."""
    layer = convert_sync_batchnorm(torch.nn.BatchNorm2d(3, dtype=torch.float32 if kind == "mixed" else WIDE))
    assert isinstance(layer, SyncBatchNorm)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(4, 3, 5, 2, dtype=WIDE, generator=generator)
    gradient = torch.randn(4, 3, 5, 2, dtype=WIDE, generator=generator)
    if kind == "zero weight":
        layer.zero_weight = rank == 1
        x = x if rank == 0 else x * torch.inf
    if kind == "mixed":
        x, gradient = x.bfloat16(), gradient.bfloat16()
    if kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    if kind == "every second":
        x = x.repeat(2, 1, 1, 1)[::2]
    x.requires_grad_(kind != "first layer")
    y = layer(x)
    y.backward(gradient)
    return {
        "output": y.detach(),
        "input": x.grad,
        "weight": layer.weight.grad,
        "bias": layer.bias.grad,
        **dict(layer.named_buffers()),
    }


def both(kind: str) -> list[dict[str, Any]]:
    plain = train(kind)
    with installed():
        return [plain, train(kind)]


@pytest.mark.parametrize("kind", ["zero weight", "channels last", "every second", "first layer", "mixed"])
def test_numbers_are_those_of_the_path_of_the_cpu(ranks: RankPool, kind: str) -> None:
    tolerance = 1e-2 if kind == "mixed" else 1e-12
    for rank, (plain, native) in enumerate(ranks(2).run(both, kind)):
        for name, expected in plain.items():
            if expected is None:
                assert native[name] is None
                continue
            assert native[name].dtype == expected.dtype
            if kind == "zero weight" and rank == 1 and name in ("output", "input", "weight", "bias"):
                continue  # nobody's
            torch.testing.assert_close(native[name], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_is_read_and_written_eight_times(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, as torch's own; by the path of the CPU it is 20 times in float32 and 50 in bfloat16."""
    monkeypatch.setattr(comm, "world_size", lambda group=None: 8)
    monkeypatch.setattr(comm, "all_gather_tensor", lambda t, group=None: t.detach().expand(8, -1).clone())
    monkeypatch.setattr(comm, "all_reduce", lambda t, op="sum", group=None: t.detach() * 8)
    layer = SyncBatchNorm(64)
    x = torch.randn(16, 64, 28, 28).to(dtype).requires_grad_()
    traffic = Traffic()
    with installed(traffic), traffic:
        y = layer(x)
        forward = len(traffic.moved)
        y.backward(torch.empty_like(y))
    moved = [(name, moved) for name, moved in traffic.moved if moved >= x.nbytes and "empty" not in name]
    assert sum(bytes_ for _, bytes_ in moved) <= 8.1 * x.nbytes, moved
    assert forward <= 10, traffic.moved
    assert len(traffic.moved) - forward <= 10, traffic.moved


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [(), (4,), (3, 2)], ids=str)
def test_the_kernels_do_what_the_equations_say(dtype: torch.dtype, inner: tuple[int, ...]) -> None:
    """Each of the five on a GPU; the first of three ranks has no samples."""
    eps, tolerance = 1e-3, {torch.float64: 1e-10, torch.float32: 1e-4}.get(dtype, 2e-2)
    x, gradient = (torch.randn(6, 3, *inner).to(dtype) for _ in range(2))
    scale, shift = (torch.randn(3).to(wide(x)) for _ in range(2))
    counts = torch.tensor([ZERO_COUNT, 6, 9], dtype=wide(x))
    means, inverses = torch.randn(3, 3).to(wide(x)), torch.rand(3, 3).to(wide(x)) + 0.5

    def play(device: str, kernels: dict[str, Any]) -> list[Any]:
        own = [each.to(device) for each in (x, gradient, scale, shift, counts, means, inverses)]
        a, g, weight, bias, n, m, inverse = own
        running = torch.zeros(3, dtype=wide(a), device=device), torch.ones(3, dtype=wide(a), device=device)
        stats = kernels["batch_norm_stats"](a, eps)
        whole = kernels["batch_norm_gather_stats_with_counts"](m, m, inverse, *running, 0.3, eps, n)
        out = kernels["batch_norm_elemt"](a, weight, bias, *whole, eps)
        sums = kernels["batch_norm_backward_reduce"](g, a, *whole, weight, True, True, True)
        back = kernels["batch_norm_backward_elemt"](g, a, *whole, weight, *sums[:2], n.to(torch.int32))
        return [*stats, *whole, *running, out, *sums, back]

    real = play("cuda", {name: getattr(torch, name) for name in NAMES})
    for found, expected in zip(real, play("cpu", NAMES), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
