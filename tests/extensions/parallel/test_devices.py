"""One process with several devices in the container: CPUs here, as GPUs elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.extensions.parallel.container import DistributedDataParallel
from tests.tools.pool import RankPool


class Net(nn.Module):
    """Takes and gives nested things."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.trunk(batch["x"]).tanh()
        return {"hidden": hidden * scale, "more": (self.head(hidden),)}


def _net() -> Net:
    torch.manual_seed(2)
    return Net().double()


def _batch(rank: int, rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {"x": torch.randn(rows, 4, dtype=torch.float64, generator=generator)}


def _loss(output: dict[str, Any]) -> Tensor:
    return output["hidden"].square().mean() + output["more"][0].sin().mean()


def _cut(devices: Any, rows: int) -> tuple[list[Tensor], int]:
    net = _net()
    model = DistributedDataParallel(net, devices, bucket_cap_mb=0.0002)
    grads = []
    for _ in range(2):
        net.zero_grad()
        _loss(model(_batch(dist.get_rank(), rows), scale=2.0)).backward()
        grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return grads, model.reducer.rounds


@pytest.mark.everyday
@pytest.mark.parametrize("rows", [5, 2, 1], ids=["", "fewer rows than devices", "one row"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", torch.device("cpu"), "cpu"], "all"], ids=str)
def test_several_devices_have_the_gradients_of_one_process(ranks: RankPool, devices: Any, rows: int) -> None:
    net = _net()
    for rank in range(2):
        (_loss(net(_batch(rank, rows), scale=2.0)) / 2).backward()
    for found, rounds in ranks(2).run(_cut, devices, rows):
        assert rounds == 2
        for grad, parameter in zip(found, net.parameters(), strict=True):
            assert (grad - parameter.grad).abs().max() <= 1e-12 * parameter.grad.abs().max()  # type: ignore[union-attr]


class Own(DistributedDataParallel):
    """Cuts, runs and joins in its own way, and tells of it."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.seen: list[Any] = [("scatter", len(device_ids))]
        return super().scatter(inputs, kwargs, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.seen.append(("parallel_apply", len(replicas)))
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.seen.append(("gather", output_device))
        return super().gather(outputs, output_device)


def _overridden() -> list[list[Any]]:
    seen = []
    for devices in (["cpu"], ["cpu", "cpu"]):
        model = Own(_net(), devices, output_device="cpu", dim=0)
        model(_batch(0, 4))
        seen.append(model.seen)
    return seen


def test_scatter_parallel_apply_and_gather_can_be_overridden(ranks: RankPool) -> None:
    cpu = torch.device("cpu")
    one, two = ranks(1).run(_overridden)[0]
    assert one == [("scatter", 1)]
    assert two == [("scatter", 2), ("parallel_apply", 2), ("gather", cpu)]


def _attributes() -> list[Any]:
    cpu = torch.device("cpu")
    plain, one = DistributedDataParallel(_net()), DistributedDataParallel(_net(), ["cpu"])
    two = DistributedDataParallel(_net(), ["cpu", "cpu"], dim=1)
    assert (plain.device_ids, plain.output_device, plain.dim) == (None, None, 0)
    assert (one.device_ids, one.output_device) == ([cpu], cpu)
    assert (two.device_ids, two.output_device, two.dim) == ([cpu, cpu], cpu, 1)
    assert DistributedDataParallel(_net(), []).device_ids is None  # as torch's
    assert one.to_kwargs((1, torch.ones(1)), {"a": 2}, "cpu") == (((1, torch.ones(1)),), ({"a": 2},))
    said = []
    for settings in ({"device_ids": [0]}, {"output_device": "cpu"}, {"device_ids": "cpu"}, {"device_ids": ["meta"]}):
        with pytest.raises(ValueError) as raised:
            DistributedDataParallel(_net(), **settings)  # type: ignore[arg-type]
        said.append(str(raised.value))
    return said


def test_devices_are_said_as_in_torch_and_wrong_ones_refused(ranks: RankPool) -> None:
    (said,) = ranks(1).run(_attributes)
    assert said[0].startswith("device_ids=[0]: the module is on cpu, but the first device is cuda:0")
    assert said[1].startswith("output_device='cpu' without device_ids")
    assert said[2].startswith("device_ids='cpu': pass a list of devices")
    assert "the first device is meta" in said[3]


class Table(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.t()).t()


def _along_one() -> Tensor:
    torch.manual_seed(0)
    net = Table(3, 2).double()
    x = torch.randn(3, 5, dtype=torch.float64)
    return DistributedDataParallel(net, ["cpu", "cpu"], dim=1)(x) - net(x)


def test_a_batch_is_cut_along_dim(ranks: RankPool) -> None:
    assert ranks(1).run(_along_one)[0].abs().max() < 1e-15
