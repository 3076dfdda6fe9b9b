"""On which processes `prepare_data` runs: one of each node, or one of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep import LightningDataModule
from lockstep.loop.call import _prepare_data
from tests.loop.pieces import Slope


class Data(LightningDataModule):
    def prepare_data(self) -> None:
        called.append("data")


class Module(Slope):
    def prepare_data(self) -> None:
        called.append("module")


called: list[str] = []


@pytest.mark.parametrize(
    ("local_rank", "is_global_zero", "per_node", "runs"),
    [
        (0, True, True, True),
        (0, True, False, True),
        (0, False, True, True),
        (0, False, False, False),
        (1, False, True, False),
        (1, False, False, False),
    ],
)
def test_where_it_runs(local_rank: int, is_global_zero: bool, per_node: bool, runs: bool) -> None:
    called.clear()
    data, module = Data(), Module()
    data.prepare_data_per_node = module.prepare_data_per_node = per_node
    barriers: list[Any] = []
    session = SimpleNamespace(
        datamodule=data,
        module=module,
        is_global_zero=is_global_zero,
        strategy=SimpleNamespace(barrier=barriers.append, world=SimpleNamespace(local_rank=local_rank)),
    )
    _prepare_data(session)
    assert called == (["data", "module"] if runs else [])
    assert barriers == ["prepare_data"]  # the others wait


def test_each_says_for_itself() -> None:
    called.clear()
    data, module = Data(), Module()
    data.prepare_data_per_node = False
    session = SimpleNamespace(
        datamodule=data,
        module=module,
        is_global_zero=False,
        strategy=SimpleNamespace(barrier=lambda name: None, world=SimpleNamespace(local_rank=0)),
    )
    _prepare_data(session)
    assert called == ["module"]
