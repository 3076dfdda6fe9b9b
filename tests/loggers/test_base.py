"""Versions that two runs do not share, hyperparameters as YAML, and what all loggers have in common."""

from __future__ import annotations

import copy
import enum
import os
import pickle
import threading
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_only
from lockstep.loggers.base import (
    DummyExperiment,
    DummyLogger,
    FolderLogger,
    Logger,
    as_yaml,
    claim_version,
    rank_zero_experiment,
)
from lockstep.loggers.csv import CSVLogger
from lockstep.loggers.tensorboard import TensorBoardLogger
from tests.loggers.runs import fit


@pytest.fixture
def rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)


LOGGERS = [CSVLogger, TensorBoardLogger]


@pytest.mark.parametrize("cls", LOGGERS)
class TestEveryFolderLogger:
    """The contract of loggers that keep files."""

    def test_folders(self, cls: type[FolderLogger], tmp_path: Path) -> None:
        logger = cls(tmp_path, name="exp", version=3)
        assert logger.name == "exp"
        assert logger.version == 3
        assert logger.save_dir == str(tmp_path)
        assert logger.root_dir == str(tmp_path / "exp")
        assert logger.log_dir == str(tmp_path / "exp" / "version_3")
        assert cls(tmp_path, name="exp", version="mine").log_dir == str(tmp_path / "exp" / "mine")
        assert Path(cls(tmp_path, name=None, version=1).log_dir) == tmp_path / "version_1"
        assert os.listdir(tmp_path) == []

    def test_versions_count_up(self, cls: type[FolderLogger], tmp_path: Path) -> None:
        for name in ("version_4", "version_x", "version_1_old", "other"):
            (tmp_path / "lightning_logs" / name).mkdir(parents=True)
        first, second = cls(tmp_path), cls(tmp_path)
        assert (first.version, second.version, first.version) == (5, 6, 5)
        assert (tmp_path / "lightning_logs" / "version_6").is_dir()

    def test_share_takes_what_rank_zero_chose(
        self, cls: type[FolderLogger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_wire: list[Any] = []
        zero, one = cls(tmp_path), cls(tmp_path)
        zero.share(lambda value: (on_wire.append(value), value)[1])
        monkeypatch.setattr(rank_zero_only, "rank", 1)

        def receive(value: Any) -> Any:
            assert value is None
            return pickle.loads(pickle.dumps(on_wire[0]))

        one.share(receive)
        assert (one.name, one.version) == ("lightning_logs", 0)
        assert os.listdir(tmp_path / "lightning_logs") == ["version_0"]

    def test_other_ranks_touch_nothing(self, cls: type[FolderLogger], tmp_path: Path, rank_one: None) -> None:
        logger = cls(tmp_path)
        assert logger.version == 0
        logger.log_metrics({"a": 1.0}, 0)
        logger.log_hyperparams({"a": 1})
        logger.experiment.add_text("a", "b")  # type: ignore[attr-defined]
        logger.save()
        logger.finalize("success")
        assert os.listdir(tmp_path) == []

    def test_hyperparameters_add_up(self, cls: type[FolderLogger], tmp_path: Path) -> None:
        logger = cls(tmp_path)
        logger.log_hyperparams({"a": 1})
        logger.log_hyperparams(Namespace(b=[0.5]))
        logger.finalize("success")
        assert Path(logger.log_dir, "hparams.yaml").read_text() == "a: 1\nb: [0.5]\n"

    def test_a_copy_logs_to_the_same_version(self, cls: type[FolderLogger], tmp_path: Path) -> None:
        logger = cls(tmp_path)
        other = pickle.loads(pickle.dumps(logger))
        other.log_metrics({"a": 1.0}, 0)
        other.finalize("success")
        assert logger.log_dir == other.log_dir
        assert os.listdir(tmp_path / "lightning_logs") == ["version_0"]

    def test_a_folder_that_cannot_be_written_is_named(self, cls: type[FolderLogger], tmp_path: Path) -> None:
        """It was a bare NotADirectoryError or PermissionError, that named no logger."""
        (tmp_path / "file").write_text("in the way")
        says = rf"{cls.__name__}\(save_dir='.*file'\): the folder is not writable .* Pass a different folder"
        for version in (None, 3):
            logger = cls(tmp_path / "file", version=version)
            with pytest.raises(MisconfigurationException, match=says):
                logger.log_metrics({"a": 1.0}, 0)
            with pytest.raises(MisconfigurationException, match=says):
                logger.log_hyperparams({"a": 1})


@pytest.mark.parametrize("name", ["CometLogger", "LitLogger", "NeptuneLogger"])
def test_loggers_of_lightning_that_are_not_here_say_why_and_what_to_do(name: str) -> None:
    with pytest.raises(ImportError, match=rf"lockstep.loggers.{name}: .*\. Log to .*WandbLogger"):
        exec(f"from lockstep.loggers import {name}")


def test_several_loggers_each_get_everything(tmp_path: Path) -> None:
    both = [CSVLogger(tmp_path / "a"), CSVLogger(tmp_path / "b"), TensorBoardLogger(tmp_path / "c")]
    trainer = fit(both, max_epochs=1, limit_val_batches=0)
    assert trainer.loggers == both
    assert trainer.logger is both[0]
    tables = [Path(each.log_dir, "metrics.csv").read_text() for each in both[:2]]
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 3
    assert all(Path(each.log_dir, "hparams.yaml").read_text() == "lr: 0.1\nmore: null\n" for each in both)


def test_loggers_of_one_run_share_a_version(tmp_path: Path) -> None:
    for run in range(2):
        table, board = CSVLogger(tmp_path), TensorBoardLogger(tmp_path)
        assert (table.version, board.version) == (run, run)
        table.log_metrics({"a": 1.0}, 0)
        table.finalize("success")
    alone = TensorBoardLogger(tmp_path)  # another run: there are files in version_1
    assert alone.version == 2
    assert TensorBoardLogger(tmp_path).version == 3


@pytest.mark.timeout(60)
def test_runs_that_start_at_once_do_not_share_a_version(tmp_path: Path) -> None:
    taken: list[int] = []
    ready = threading.Barrier(4)

    def run() -> None:
        ready.wait(10)
        taken.extend(claim_version(tmp_path) for _ in range(20))

    runs = [threading.Thread(target=run) for _ in range(4)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join(30)
    assert sorted(taken) == list(range(80))


class Colour(enum.Enum):
    RED = 1


@dataclass
class Layer:
    size: int = 2


class TestYaml:
    yaml = pytest.importorskip("yaml")

    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()

    @settings(max_examples=25)
    @given(
        st.dictionaries(
            st.text() | st.integers(),
            st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12),
        )
    )
    def test_reads_back_equal(self, params: dict[Any, Any]) -> None:
        assert self.yaml.safe_load(as_yaml(params)) == params

    def test_looks_like_what_a_person_would_write(self) -> None:
        params = {
            "lr": 1e-5,
            "name": "resnet18",
            "betas": (0.9, 0.999),
            "model": {"depth": 3, "layers": [{"size": 1}]},
            "none": None,
            "namespace": Namespace(a=True),
            "dataclass": Layer(),
            "enum": Colour.RED,
            "numpy": np.float64(0.5),
            "tensor": torch.tensor(3),
            "path": Path("a/b"),
            "class": Layer,
            "empty": {},
            "inf": float("-inf"),
        }
        text = as_yaml(params)
        assert text.splitlines()[:7] == [
            "lr: 1.0e-05",
            "name: resnet18",
            "betas: [0.9, 0.999]",
            "model:",
            "  depth: 3",
            "  layers: [{size: 1}]",
            '"none": null',
        ]
        back = self.yaml.safe_load(text)
        assert back["class"] == str(Layer)
        assert back["path"] == "a/b"
        assert (back["enum"], back["numpy"], back["tensor"]) == ("RED", 0.5, 3)
        assert (back["namespace"], back["dataclass"], back["empty"]) == ({"a": True}, {"size": 2}, {})
        assert back["inf"] == float("-inf")
        assert self.yaml.safe_load(as_yaml({"a": float("nan")}))["a"] != 0


class TestDummies:
    def test_take_everything(self) -> None:
        logger = DummyLogger()
        logger.log_metrics({"a": 1}, step=1)
        logger.log_hyperparams({})
        logger.finalize("success")
        logger[0].experiment[1].add_image("a", None)  # type: ignore[attr-defined]
        logger.watch("model")  # a method of another logger
        logger.share(lambda value: value)
        assert (logger.name, logger.version, logger.log_dir) == ("", "", None)
        assert isinstance(copy.deepcopy(logger), DummyLogger)
        assert isinstance(pickle.loads(pickle.dumps(DummyExperiment())), DummyExperiment)

    def test_a_logger_of_ones_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Mine(Logger):
            name = "mine"
            version = 1

            @property
            @rank_zero_experiment
            def experiment(self) -> list[int]:
                return [1]

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...

            def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...

        assert Mine().experiment == [1]
        assert (Mine().save_dir, Mine().root_dir, Mine().group_separator) == (None, None, "/")
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        assert isinstance(Mine().experiment, DummyExperiment)
