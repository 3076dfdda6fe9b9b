"""What a container tells of its run: parameters by name, its errors, its range in a profile, and a deprecated name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import profile

from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.extensions.parallel.wrapping import buffers_in_forwards
from tests.tools.pool import RankPool

RANGE = "DistributedDataParallel.forward"


class Net(nn.Module):
    """Uses its second layer before its first, and its third on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.c = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x))


def mapped() -> list[Any]:
    net = Net()
    net.b.weight.requires_grad_(False)
    model = DistributedDataParallel(net)
    parameters, sparse = model._build_params_for_reducer()
    found: list[Any] = [model._build_debug_param_to_name_mapping(parameters), sparse]
    for wrong in ([*parameters, nn.Parameter(torch.ones(1))], parameters[:1]):
        with pytest.raises(ValueError) as raised:
            model._build_debug_param_to_name_mapping(wrong)
        found.append(str(raised.value))
    return found


def test_parameters_that_are_averaged_and_their_names(ranks: RankPool) -> None:
    for names, sparse, more, less in ranks(2).run(mapped):
        assert names == {0: "a.weight", 1: "c.weight"}
        assert sparse == [False, False]
        assert "of 2 averaged parameters, but got 3" in more
        assert "c.weight" in less


def erring() -> None:
    model = DistributedDataParallel(nn.Linear(4, 1))
    with pytest.raises(TypeError, match="must be callable"):
        model.register_comm_hook({}, {})  # type: ignore[arg-type]
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    model.module.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="'gain' was added"):
        model(torch.ones(2, 4))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported, "):
        DistributedDataParallel(nn.Linear(4, 1), device_mesh=mesh)


def test_errors_have_torchs_words_in_them(ranks: RankPool) -> None:
    ranks(2).run(erring)


def profiled() -> list[int]:
    model = DistributedDataParallel(nn.Linear(4, 1))
    counts = []
    for failing in (False, True):
        with profile() as prof:
            for _ in range(2):
                model(torch.ones(2, 4))
            if failing:
                with pytest.raises(RuntimeError):
                    model(torch.ones(2, 3))
        events = [event for event in prof.function_events or () if event.name == RANGE]
        counts.append(len(events))
        assert all(any(child.name == "aten::linear" for child in event.cpu_children) for event in events[:2])
    return counts


def test_a_profile_has_a_range_around_each_forward(ranks: RankPool) -> None:
    assert ranks(2).run(profiled) == [[2, 3]] * 2


def test_the_deprecated_name_for_buffers_is_told() -> None:
    for older in (True, False):
        with pytest.warns(FutureWarning, match=f"broadcast_buffers={older} is deprecated"):
            assert buffers_in_forwards(None, older) is older
        with pytest.warns(FutureWarning, match="broadcast_buffers"):
            assert buffers_in_forwards(not older, older) is not older
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert buffers_in_forwards(None, None) is True
        assert buffers_in_forwards(False, None) is False
