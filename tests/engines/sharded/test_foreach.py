"""An optimizer with parameters of several kinds updates them one by one, as torch's foreach functions take one kind."""

from __future__ import annotations

import copy

import torch
from torch import nn

from lockstep.engines.sharded.strategy import update_one_by_one


def parameters(*meshes: object) -> list[nn.Parameter]:
    """Some of which say that they are parts on a mesh."""
    made = [nn.Parameter(torch.ones(2, device="meta")) for _ in meshes]
    for parameter, mesh in zip(made, meshes, strict=True):
        if mesh is not None:
            parameter.device_mesh = mesh  # type: ignore[attr-defined]
    return made


def chosen(*meshes: object, **options: object) -> list[object]:
    """What groups have: the first ones, and one that is added."""
    mine = parameters(*meshes)
    optimizer = torch.optim.SGD([{"params": mine[:1]}, {"params": mine[1:]}], 0.1, **options)  # type: ignore[arg-type]
    update_one_by_one(optimizer, mine)
    optimizer.add_param_group({"params": parameters(None)})
    return [group["foreach"] for group in optimizer.param_groups]


def test_several_kinds_are_updated_one_by_one() -> None:
    assert chosen(None, "mesh") == [False] * 3
    assert chosen("mesh", "rows") == [False] * 3


def test_one_kind_and_what_the_user_chose_stay() -> None:
    assert chosen(None, None) == chosen("mesh", "mesh") == [None] * 3
    assert chosen(None, "mesh", foreach=True) == [True] * 3


def test_a_state_that_another_strategy_has_saved_does_not_undo_it() -> None:
    mine = parameters(None, "mesh")
    optimizer = torch.optim.SGD(mine, 0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    update_one_by_one(optimizer, mine)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["foreach"] is False
    assert optimizer.state_dict()["param_groups"] == saved["param_groups"]  # nor is it in what is saved


def test_parameters_on_the_cpu_are_left_alone() -> None:
    """Where torch takes no such functions by itself."""
    mine = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    mine[0].device_mesh = "mesh"  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(mine, 0.1)
    update_one_by_one(optimizer, mine)
    assert optimizer.param_groups[0]["foreach"] is None
