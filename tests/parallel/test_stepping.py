"""An update that works on other tensors than its hooks see: what runs where, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.parallel.zero.optimizers import update_within


class _Noted(torch.optim.SGD):
    """Notes its update, or fails in it; calls the step of its base, whose hooks run once more."""

    told: list[str]
    fails = False

    def step(self, closure: Any = None) -> Any:
        self.told.append("update")
        if self.fails:
            raise KeyError("update")
        return super().step(closure)


@contextmanager
def _inside(told: list[str]) -> Iterator[None]:
    told.append("in")
    try:
        yield
    finally:
        told.append("out")


def _noted() -> _Noted:
    optimizer = _Noted([nn.Parameter(torch.ones(1))], 0.1)
    told = optimizer.told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    return optimizer


def test_hooks_run_outside_and_the_update_inside() -> None:
    optimizer = _noted()
    told = optimizer.told
    with update_within(optimizer, _inside(told), lambda: told.append("then")):
        optimizer.step()
    # the hooks of the base's step, in the middle, belong to the update
    assert told == ["before", "in", "update", "before", "after", "out", "then", "after"]
    told.clear()
    optimizer.step()
    assert told == ["before", "update", "before", "after", "after"]


def test_an_update_that_raises_leaves_nothing_behind() -> None:
    optimizer = _noted()
    optimizer.fails = True
    with pytest.raises(KeyError), update_within(optimizer, _inside(optimizer.told), pytest.fail):
        optimizer.step()
    assert optimizer.told == ["before", "in", "update", "out"]
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)


def test_an_optimizer_of_another_kind_has_no_hooks() -> None:
    told: list[str] = []
    with update_within(object(), _inside(told), lambda: told.append("then")):
        told.append("update")
    assert told == ["in", "update", "out", "then"]
