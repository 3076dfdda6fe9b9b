"""What MLFlowLogger records, read back by MLflow's own client from its SQLite and file stores."""

from __future__ import annotations

import ast
import pickle
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.ground.rank import rank_zero_only
from lockstep.loggers import mlflow as ours
from lockstep.loggers.base import DummyExperiment
from lockstep.loggers.mlflow import MLFlowLogger
from tests.loggers.runs import Net, fit

pytest.importorskip("mlflow")
pytest.importorskip("mlflow.tracking")


@pytest.fixture(autouse=True)
def only_files_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """MLflow reports nothing, takes folders as stores, and its variables are put back."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # put back as it was: MLflow sets it
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.setattr(ours, "_announced", set())
    yield
    import mlflow

    mlflow.set_tracking_uri(None)


@pytest.fixture
def logger(tmp_path: Path) -> MLFlowLogger:
    return MLFlowLogger("exp", tracking_uri=f"file:{tmp_path / 'runs'}", prefix="p")


def values(logger: MLFlowLogger, name: str) -> list[tuple[int, float]]:
    return [(each.step, each.value) for each in logger.experiment.get_metric_history(logger.run_id, name)]


def test_a_fit_and_a_test_in_one_run(tmp_path: Path) -> None:
    uri = f"file:{tmp_path / 'runs'}"
    logger = MLFlowLogger("digits", run_name="mine", tags={"a": "b"}, tracking_uri=uri)
    model = Net(more=[{"size": 2}])
    fit(logger, model).test(model, verbose=False)
    assert values(logger, "loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert values(logger, "val") == [(1, 2.0), (3, 2.0)]
    assert values(logger, "tested") == [(4, 3.0)]
    run = logger.experiment.get_run(logger.run_id)
    assert run.data.params == {"lr": "0.1", "more/0/size": "2"}
    assert (run.info.status, run.info.run_name, run.data.tags["a"]) == ("FINISHED", "mine", "b")
    assert logger.experiment.get_experiment(logger.experiment_id).name == "digits"


@pytest.mark.filterwarnings("ignore:.*noload")
def test_the_default_store_is_one_that_mlflow_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")  # without it, MLflow refuses folders
    pytest.importorskip("sqlalchemy")
    logger = MLFlowLogger("digits", save_dir=tmp_path / "ml")
    logger.log_metrics({"a": 1.0}, 2)
    assert values(logger, "a") == [(2, 1.0)]
    assert (tmp_path / "ml" / "mlflow.db").exists()
    assert logger.save_dir == str(tmp_path / "ml")
    (tmp_path / "file").write_text("x")
    logger.experiment.log_artifact(logger.run_id, str(tmp_path / "file"))
    assert list((tmp_path / "ml" / "artifacts").rglob("file"))


def test_numbers_text_and_names(logger: MLFlowLogger) -> None:
    with pytest.warns(RuntimeWarning, match=r"'p-a\(b\)' is recorded as 'p-ab'"):
        logger.log_metrics({"a(b)": torch.tensor(0.5), "n": np.float32(2)}, step=4)
    with pytest.warns(UserWarning, match=r"'p-word' is text"):
        logger.log_metrics({"word": "x", "n": 3})
    assert values(logger, "p-ab") == [(4, 0.5)]
    assert sorted(values(logger, "p-n")) == [(0, 3.0), (4, 2.0)]


def test_hyperparameters_are_flat_text_of_a_length_that_is_taken(logger: MLFlowLogger) -> None:
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

    many = {f"n{number}": number for number in range(150)}  # more than one message takes
    logger.log_hyperparams(Namespace(model={"depth": 3}, path=Path("a"), long="x" * 10_000, **many))
    params = logger.experiment.get_run(logger.run_id).data.params
    assert (params["model/depth"], params["path"], len(params)) == ("3", "a", 153)
    assert len(params["long"]) == MAX_PARAM_VAL_LENGTH


@pytest.mark.parametrize(
    ("log_model", "top_k", "uploaded"), [(False, 1, []), (True, 1, [1]), (True, -1, [0, 1]), ("all", -1, [0, 1])]
)
def test_checkpoints_as_artifacts(tmp_path: Path, log_model: Any, top_k: int, uploaded: list[int]) -> None:
    class Better(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", -float(self.current_epoch))

    logger = MLFlowLogger("e", tracking_uri=f"file:{tmp_path / 'runs'}", log_model=log_model)
    keep = ModelCheckpoint(tmp_path / "kept", filename="{epoch}", monitor="val", save_top_k=top_k)
    fit(logger, Better(), enable_checkpointing=True, callbacks=[keep])
    found = [each.path for each in logger.experiment.list_artifacts(logger.run_id)]
    assert found == [f"epoch={number}" for number in uploaded]
    if uploaded:
        yaml = pytest.importorskip("yaml")
        (folder,) = (tmp_path / "runs").rglob("artifacts/epoch=1")
        metadata = yaml.safe_load((folder / "metadata.yaml").read_text())
        assert (metadata["score"], metadata["original_filename"]) == (-1.0, "epoch=1.ckpt")
        assert metadata["Checkpoint"]["monitor"] == "val"
        assert ast.literal_eval((folder / "aliases.txt").read_text()) == ["latest", "best"]
        assert (folder / "epoch=1.ckpt").read_bytes() == (tmp_path / "kept" / "epoch=1.ckpt").read_bytes()


def test_a_failed_run_is_said_to_have_failed(logger: MLFlowLogger) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(logger, Fails())
    assert logger.experiment.get_run(logger.run_id).info.status == "FAILED"


def test_a_run_that_is_there_is_gone_on_with(logger: MLFlowLogger) -> None:
    logger.log_metrics({"a": 1.0}, 0)
    again = MLFlowLogger(tracking_uri=logger._tracking_uri, run_id=logger.run_id, prefix="p")
    again.log_metrics({"a": 2.0}, 1)
    assert (again.name, again.version) == (logger.experiment_id, logger.run_id)
    assert values(logger, "p-a") == [(0, 1.0), (1, 2.0)]
    same = MLFlowLogger("exp", tracking_uri=logger._tracking_uri)
    assert same.experiment_id == logger.experiment_id
    assert same.run_id != logger.run_id
    other = pickle.loads(pickle.dumps(logger))
    assert (other._client, other.run_id) == (None, logger.run_id)


def test_other_ranks_begin_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MLFlowLogger(save_dir=tmp_path / "runs")
    logger.share(lambda value: ("3", "abc"))
    logger.log_metrics({"a": 1.0}, 0)
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert isinstance(logger.experiment, DummyExperiment)
    assert (logger.name, logger.version) == ("3", "abc")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("synchronous", [None, True, False])
def test_synchronous_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: bool | None) -> None:
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}", synchronous=synchronous)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(logger.experiment, "log_batch", lambda **content: sent.append(content))
    logger.log_metrics({"a": 1.0})
    assert sent[0].get("synchronous") is synchronous
