"""The table of Lightning's surface is whole, true to the code, and the page is written from it."""

from __future__ import annotations

import importlib
import inspect
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import lockstep
from tests.surface import applies
from tests.surface.table import GUIDE, KINDS, PAGE, VERDICTS, guide, is_test, page, rows
from tests.tools.absent import is_absent


def named(*kinds: str) -> set[str]:
    return {row["name"] for row in rows() if row["kind"] in kinds}


def public(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.fixture
def lightning() -> Iterator[Any]:
    before = dict(os.environ)
    found = pytest.importorskip("lightning.pytorch")
    yield found
    os.environ.clear()
    os.environ.update(before)


def test_the_pages_are_written_from_the_rows() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.surface.table`"
    assert GUIDE.read_text() == guide(), "run `python -m tests.surface.table`"
    assert len(applies.BEHAVIOUR["common"]) <= 25


def test_migrate_has_the_rows_of_both_pages() -> None:
    wanted = applies.text(rows())
    assert applies.FILE.read_text() == wanted, "run `python -m tests.surface.table`"


def test_no_cell_is_empty() -> None:
    for row in rows():
        assert row["kind"] in KINDS, row
        assert row["verdict"] in VERDICTS, row
        assert row["name"], row
        assert row["verdict"] == "works" or row.get("reason"), f"say why: {row}"


def test_each_row_names_a_test_that_is_there() -> None:
    assert [(row["name"], row["test"]) for row in rows() if not (is_test(row["test"]) or is_absent(row["test"]))] == []


def test_a_thing_has_one_row() -> None:
    counts = Counter((row["kind"], row["name"]) for row in rows())
    assert [thing for thing, count in counts.items() if count > 1] == []


def test_every_flag_of_ours_has_a_row() -> None:
    own = {"order", "keep_global_batch", "balance", "hang_timeout", "hang_kill"}
    flags = set(inspect.signature(lockstep.Trainer.__init__).parameters) - {"self"} - own
    assert flags - {"others"} - named("flag") == set()


def test_every_callback_of_ours_has_a_row() -> None:
    names = importlib.import_module("lockstep.callbacks").__all__
    assert set(names) - named("callback", "tuner") == set()


# -- against Lightning, where it is installed ----------------------------------------------------------------


def test_every_flag_of_lightnings_has_a_row(lightning: Any) -> None:
    flags = set(inspect.signature(lightning.Trainer.__init__).parameters) - {"self"}
    assert flags - named("flag") == set()


def test_every_attribute_of_lightnings_trainer_has_a_row(lightning: Any) -> None:
    trainer = lightning.Trainer(logger=False, barebones=False, accelerator="cpu")
    assert public(trainer) - named("attribute", "flag") == set()


def test_every_attribute_and_hook_of_lightnings_module_has_a_row(lightning: Any) -> None:
    own = public(lightning.LightningModule()) - public(__import__("torch").nn.Module())
    owned = named("hook", "module attribute", "datamodule attribute", "callback hook")
    assert {f"LightningModule.{name}" for name in own} - owned == set()
    assert {f"LightningDataModule.{name}" for name in public(lightning.LightningDataModule())} - owned == set()
    assert {f"Callback.{name}" for name in public(lightning.Callback)} - owned == set()


def test_every_callback_logger_profiler_and_strategy_of_lightnings_has_a_row(lightning: Any) -> None:
    for package, kinds in {"callbacks": ("callback", "tuner"), "loggers": ("logger",)}.items():
        names = set(importlib.import_module(f"{lightning.__name__}.{package}").__all__)
        assert names - named(*kinds) == set(), package
    profilers = importlib.import_module("lightning.pytorch.profilers").__all__
    assert {f"lightning.pytorch.profilers.{name}" for name in profilers} - named("name") == set()
    registry = importlib.import_module("lightning.pytorch.strategies").StrategyRegistry
    assert set(registry.available_strategies()) - named("registry") == set()
