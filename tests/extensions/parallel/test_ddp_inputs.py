"""Arguments and inputs of the container: those of torch's, each working or refused by name; errors on every rank."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lockstep.engines.ddp.bucket import distinct, infos_of, plan_buckets
from lockstep.extensions.parallel.container import DistributedDataParallel
from lockstep.ground.errors import MisconfigurationException
from tests.extensions.parallel.nets import batch_of, is_right, make_net
from tests.tools.pool import RankPool

TORCHS = nn.parallel.DistributedDataParallel


def test_every_argument_of_torchs_is_taken_in_its_place() -> None:
    theirs = list(inspect.signature(TORCHS.__init__).parameters)
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    assert list(ours)[: len(theirs)] == theirs
    later = {"batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"}  # of torch 2.12, 2.13 and 2.15
    own = {name: p for name, p in ours.items() if name not in {*theirs, *later}}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in own.values())


def test_every_public_name_of_torchs_is_there() -> None:
    names = {name for name in dir(TORCHS) if not name.startswith("_")} - set(dir(nn.Module))
    assert names - set(dir(DistributedDataParallel)) == set()


def test_a_backward_that_ends_by_hand_is_refused() -> None:
    net = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(net)
    assert not net.require_manual_backward_finalization
    assert not net.should_finalize_after_backward
    net.require_manual_backward_finalization = False
    with pytest.raises(MisconfigurationException, match="finalization=True: gradients are averaged"):
        net.require_manual_backward_finalization = True
    with pytest.raises(MisconfigurationException, match=r"finalize_backward\(\): gradients are averaged"):
        net.finalize_backward()


def _made(name: str) -> list[Any]:
    net = make_net()
    settings: dict[str, Any] = {
        "find_unused_parameters": {"find_unused_parameters": True},
        "views off": {"gradient_as_bucket_view": False},
        "static": {"static_graph": True},
        "delayed": {
            "delay_all_reduce_named_params": [("0.weight", net[0].weight)],
            "param_to_hook_all_reduce": net[2].bias,
        },
        "skip": {"skip_all_reduce_unused_params": True},
        "caps": {"bucket_cap_mb_list": [0.0001, 0.0002]},
        "copies": {"batched_grad_copy": True, "lazy_bucket_allocation": True},
        "over TCP": {"shared_memory": False},
        "small": {"bucket_cap_mb": 0.0001},
        "checked": {"check_reduction": True},
        "mesh": {},
    }[name]
    if name == "mesh":
        settings = {"device_mesh": torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))}
    model = DistributedDataParallel(net, **settings)
    return [is_right(model, step) for step in range(3)]


@pytest.mark.parametrize(
    "name",
    [
        "find_unused_parameters",
        "views off",
        "static",
        "delayed",
        "skip",
        "caps",
        "copies",
        "over TCP",
        "small",
        "checked",
        "mesh",
    ],
)
def test_settings_have_the_gradients_of_one_process(ranks: RankPool, name: str) -> None:
    assert ranks(2).run(_made, name) == [[True] * 3] * 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mixed_precision": "fp16"}, "mixed_precision='fp16' is not supported.*torch.autocast"),
    ({"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, "delay_all_reduce_named_params .* pass both"),
    ({"bucket_cap_mb": 0}, "bucket_cap_mb=0"),
    ({"bucket_cap_mb_list": [25, -1]}, r"bucket_cap_mb_list=\[25, -1\]"),
]


def _refusals() -> list[str]:
    said = []
    for settings, _ in REFUSED:
        with pytest.raises(ValueError) as raised:
            DistributedDataParallel(make_net(), **settings)
        said.append(str(raised.value))
    with pytest.raises(ValueError) as raised:
        DistributedDataParallel(make_net(), process_group=dist.group.WORLD, device_mesh=object())
    return [*said, str(raised.value)]


def test_settings_that_cannot_work_are_refused_by_name(ranks: RankPool) -> None:
    for said in ranks(2).run(_refusals):
        for text, (_, pattern) in zip(said, REFUSED, strict=False):
            assert re.search(pattern, text), text
        assert "both process_group and device_mesh" in said[-1]


def test_bucket_sizes_one_by_one() -> None:
    shared = nn.Parameter(torch.zeros(10))
    named = [("a", shared), ("b", nn.Parameter(torch.zeros(10))), ("b2", shared), ("c", nn.Parameter(torch.zeros(10)))]
    named.insert(2, ("half", nn.Parameter(torch.zeros(10).half())))
    named.append(("d", nn.Parameter(torch.zeros(30))))
    assert plan_buckets(infos_of(distinct(named).items()), [40, 80]) == [["d"], ["half"], ["c", "b"], ["a"]]


def _changed(how: str) -> str:
    net = make_net()
    if how == "thawed":
        net[0].weight.requires_grad_(False)
    model = DistributedDataParallel(net)
    model(batch_of(0, 0)).sum().backward()
    if how == "thawed":
        net[0].weight.requires_grad_(True)
    elif how == "added":
        net[0].register_parameter("gain", nn.Parameter(torch.ones(1)))
    elif how == "replaced":
        net[2] = nn.Linear(5, 2).double()
    with pytest.raises(ValueError) as raised:
        model(batch_of(0, 0))
    with torch.no_grad():
        model(batch_of(0, 0))  # no gradient, no harm
    return str(raised.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("thawed", "parameter '0.weight' was frozen when the model was wrapped and requires a gradient now"),
        ("added", "parameter '0.gain' was added to the model after it was wrapped"),
        ("replaced", "parameter '2.weight' was added to the model after it was wrapped"),
    ],
)
def test_parameters_that_change_after_wrapping_are_named(ranks: RankPool, how: str, said: str) -> None:
    for rank, found in enumerate(ranks(2).run(_changed, how)):
        assert found.startswith(f"rank {rank}: {said}")


def _step_with(hook: Any) -> None:
    model = DistributedDataParallel(make_net())
    model.register_comm_hook(None, hook)
    model(batch_of(0, 0)).sum().backward()


def _hooks() -> list[str]:
    said = []
    for hook in (3, lambda state: None, lambda state, bucket: bucket.buffer(), lambda state, bucket: _future(3)):
        with pytest.raises((TypeError, ValueError)) as raised:
            _step_with(hook)
        said.append(str(raised.value))
    model = DistributedDataParallel(make_net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        with pytest.raises(RuntimeError) as twice:
            model.register_comm_hook(None, default_hooks.allreduce_hook)
        said.append(str(twice.value))
    right = is_right(model)
    late = DistributedDataParallel(make_net())
    late(batch_of(0, 0)).sum().backward()
    with pytest.raises(RuntimeError) as after:
        late.register_comm_hook(None, default_hooks.allreduce_hook)
    return [*said, str(after.value), str(right)]


def _future(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


def test_hooks_that_cannot_work_are_named(ranks: RankPool) -> None:
    for rank, said in enumerate(ranks(2).run(_hooks)):
        assert "must be callable" in said[0]
        assert "is called as hook(state, bucket)" in said[1]
        assert f"rank {rank}: the communication hook" in said[2]
        assert "must return a torch.futures.Future" in said[2]
        assert f"rank {rank}: the future of the communication hook" in said[3]
        assert "only one hook can be registered" in said[4]
        assert "before the first backward" in said[6]
        assert said[7] == "True"


def _ignoring() -> list[bool]:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).double()
    own = net[0].bias.detach().clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias", "1.running_mean"])
    model = DistributedDataParallel(net)
    kept = torch.equal(own, net[0].bias)
    model(batch_of(0, dist.get_rank())).square().sum().backward()
    net[1].running_mean.fill_(dist.get_rank())
    model(batch_of(0, dist.get_rank())).square().sum().backward()
    names = [name for name, _ in DistributedDataParallel._get_data_parallel_params(net, named_params=True)]
    return [
        kept,
        float(net[1].running_mean.abs().max()) > 0.5 or dist.get_rank() == 0,
        names == ["0.weight", *names[1:]],
    ]


def test_parameters_and_buffers_can_be_left_alone(ranks: RankPool) -> None:
    assert ranks(2).run(_ignoring) == [[True] * 3] * 2
