"""The seams for engines, each tried by a small one: a strategy of 60 lines, and fakes that own a road."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep import LightningModule
from lockstep.strategies.engine import Engine
from lockstep.testing import EquivalenceReport, RankPool, check_equivalence
from tests.equivalence.models import Idle, Plain, Sometimes, Weighted, rows
from tests.strategies.averaging import AveragingStrategy

# -- a strategy of 60 lines ----------------------------------------------------------------------------------

CASES: dict[str, tuple[type[LightningModule], int, dict[str, Any]]] = {
    "even": (Plain, 72, {}),
    "uneven last batch": (Plain, 23, {}),
    "empty shares": (Plain, 25, {"batch_size": 2, "steps": 7}),
    "accumulation 3, clipped": (Plain, 23, {"accumulate": 3, "gradient_clip_val": 0.5}),
    "own weights": (Weighted, 23, {"accumulate": 3}),
    "unused in some steps": (Sometimes, 23, {"batch_size": 2}),
    "never used": (Idle, 23, {"accumulate": 3}),
}


def equivalence(case: str) -> EquivalenceReport:
    module, length, given = CASES[case]
    return check_equivalence(module, rows(length), strategy=AveragingStrategy(), devices=dist.get_world_size(), **given)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_strategy_of_sixty_lines_trains_as_one_process(ranks: RankPool, case: str, world: int) -> None:
    for report in ranks(world).run(equivalence, case, timeout=60):
        assert report, report


def methods(kind: type) -> list[str]:
    return [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]


def test_an_engine_answers_twelve_methods_at_most() -> None:
    assert len(methods(Engine)) <= 12, methods(Engine)
    source = Path(inspect.getfile(AveragingStrategy)).read_text()
    assert len(source.splitlines()) <= 60
    kind = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
    assert len([each for each in kind.body if isinstance(each, ast.FunctionDef)]) <= 15
