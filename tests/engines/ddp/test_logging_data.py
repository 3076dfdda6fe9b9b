"""What a container tells of its run: its facts, its errors, its range in a profile, and a deprecated name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.profiler import profile

from lockstep.engines.ddp.consistency import buffers_in_forwards
from lockstep.engines.ddp.container import DistributedDataParallel
from lockstep.testing.pool import RankPool

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


def told(static: bool) -> list[dict[str, Any]]:
    model = DistributedDataParallel(Net(), static_graph=static, bucket_cap_mb=0.00007)
    found = [model._get_ddp_logging_data()]
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    return [*found, model._get_ddp_logging_data()]


@pytest.mark.parametrize("static", [False, True])
def test_layout_and_counts_are_told_once_backwards_have_shown_them(ranks: RankPool, static: bool) -> None:
    for before, after in ranks(2).run(told, static):
        assert before["bucket_sizes"] == "16, 64, 64"
        assert before["has_rebuilt_buckets"] == before["iteration"] == 0
        assert "rebuilt_bucket_sizes" not in before
        assert after["iteration"] == 3
        assert after["has_rebuilt_buckets"] == 1
        assert sorted(after["rebuilt_bucket_sizes"].split(", ")) == ["16", "64", "64"]
        order = after["rebuilt_per_bucket_param_indices"].split(", ")
        assert order.index("0") < order.index("1")  # gradients of a come before those of b
        assert after["unused_parameter_size"] == 16
        assert after["num_buckets_reduced"] == 3
        assert after["collectives"] >= 3 * 3
        assert after["bytes_reduced"] >= 3 * (16 + 64 + 64)
        assert after["shared_memory"] == 1
        assert "has_error" not in after


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
        assert "of 2 parameters that are averaged, and not of 3" in more
        assert "c.weight" in less


def erring() -> list[tuple[str, str]]:
    found = []
    model = DistributedDataParallel(nn.Linear(4, 1))
    with pytest.raises(TypeError):
        model.register_comm_hook({}, {})  # type: ignore[arg-type]
    found.append(("must be callable", model._get_ddp_logging_data()["error"]))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="should be called before training loop starts"):
        model._set_static_graph()
    found.append(("before training loop starts", model._get_ddp_logging_data()["error"]))
    model.module.gain = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError):
        model(torch.ones(2, 4))
    found.append(("'gain' was added", model._get_ddp_logging_data()["error"]))
    del model.module.gain
    assert model._get_ddp_logging_data()["has_error"] == 1
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1))
    with pytest.raises(RuntimeError) as raised:
        DistributedDataParallel(nn.Linear(4, 1), device_mesh=mesh)
    found.append(("Only 1D device mesh is supported, ", str(raised.value)))
    return found


def test_errors_are_kept_and_have_torchs_words_in_them(ranks: RankPool) -> None:
    for pairs in ranks(2).run(erring):
        for words, said in pairs:
            assert words in said


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
