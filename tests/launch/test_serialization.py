"""Objects that travel to another process."""

from __future__ import annotations

import io
from types import CodeType
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from lockstep.launch import spawn


def there_and_back(obj: Any) -> Any:
    file = io.BytesIO()
    spawn.pack(obj, file)
    file.seek(0)
    return spawn.unpack(file)


def test_what_a_script_defines_goes_by_value() -> None:
    class Local(nn.Linear):
        pass

    module = Local(2, 1)
    same = there_and_back({"module": module, "weight": module.weight, "fn": lambda x: x + 1})
    assert type(same["module"]).__name__ == "Local"
    assert same["module"].weight is same["weight"]
    assert torch.equal(same["weight"], module.weight)
    assert same["fn"](1) == 2


def test_tensors_come_back_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: every tensor is taken for one of another device, and counted where it is brought over."""
    brought: list[torch.Tensor] = []
    on_cpu = spawn._on_cpu

    def count(tensor: torch.Tensor) -> torch.Tensor:
        brought.append(tensor)
        return on_cpu(tensor)

    monkeypatch.setattr(spawn, "STAYS", ())
    monkeypatch.setattr(spawn, "_on_cpu", count)
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    same = there_and_back([parameter, torch.ones(1), parameter])
    assert [tensor is parameter for tensor in brought].count(True) == 1  # though it is in the list twice
    assert same[0] is same[2]
    assert isinstance(same[0], nn.Parameter)
    assert not same[0].requires_grad


@pytest.mark.gpu
def test_cuda_tensors_come_back_on_the_cpu() -> None:
    module = nn.Linear(2, 1).cuda()
    assert {p.device.type for p in there_and_back(module).parameters()} == {"cpu"}
    assert {p.device.type for p in module.parameters()} == {"cuda"}


NESTED = """
def outer(factor):
    def inner(value):
        return value * factor
    return inner
"""


def test_the_users_file_was_lost_under_cloudpickle_3_1_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives all code the name "<dynamic-code>", and each last line said so in the place of the user's file."""
    reduces = cloudpickle.Pickler.dispatch_table[CodeType]

    def without_file(code: CodeType) -> Any:
        return reduces(code.replace(co_filename="<dynamic-code>"))

    monkeypatch.setitem(cloudpickle.Pickler.dispatch_table, CodeType, without_file)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(NESTED, "/home/user/train.py", "exec"), names)
    inner = there_and_back(names["outer"](3))
    assert inner(2) == 6
    assert inner.__code__.co_filename == "/home/user/train.py"
    outer = there_and_back(names["outer"])
    assert outer.__code__.co_filename == outer(1).__code__.co_filename == "/home/user/train.py"
