"""Unmodified programs for Lightning that use third parties' classes, by Lightning's names that lead to lockstep.

Each prints what it found; numbers are those that Lightning 2.6.6 gave for the same program.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

pytestmark = pytest.mark.extension("lightning")

PROGRAMS = Path(__file__).parent / "programs"
ORDER = {"PL_TRAINER_ORDER": "torch"}


def needs(*packages: str) -> None:
    """Skips where one is not installed; nothing is imported, since some set variables."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")


LOCKSTEP = ("-m", "lockstep.lightning")


def launcher() -> Path:
    """The file that runs as ``python -m lockstep.lightning``."""
    from lockstep import lightning

    return Path(lightning.__file__)


def play(folder: Path, name: str, *words: str, by: tuple[str, ...] = LOCKSTEP, seconds: float = 300) -> dict[str, str]:
    """The program's lines, by what stands before the colon; ``by=()``: with Lightning itself."""
    ended = python(*by, PROGRAMS / f"{name}.py", *words, folder=folder, seconds=seconds, **ORDER)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return told(ended.stdout)


def told(text: str) -> dict[str, str]:
    lines = [line.partition(": ") for line in text.splitlines() if re.match(r"\w+: ", line)]
    return {name: value for name, _, value in lines}


METRICS = {"train_accuracy_epoch": "9.1667e-01", "val_accuracy": "9.6875e-01", "val_f1": "9.6821e-01"}


def test_torchmetrics(ranks: RankPool, tmp_path: Path) -> None:
    needs("torchmetrics")
    ended = run_script(ranks, launcher(), str(PROGRAMS / "metrics.py"), folder=tmp_path, environ=ORDER)[0]
    assert told(ended.stdout) == METRICS, ended.stderr


@pytest.mark.slow
def test_torchmetrics_on_two_ranks(tmp_path: Path) -> None:
    needs("torchmetrics")
    found = play(tmp_path, "metrics", "2")
    assert found.keys() == METRICS.keys()
    assert all(0.5 < float(value) <= 1 for value in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_optunas_pruning_callback(devices: int, tmp_path: Path) -> None:
    """It reads ``trainer._accelerator_connector``; on ranks it reports through a data base."""
    needs("optuna", "optuna_integration")
    found = play(tmp_path, "pruning", str(devices))
    assert found["states"] == "['COMPLETE', 'PRUNED', 'COMPLETE']"
    assert found["steps"] == "[4, 2, 4]"
    if devices == 1:
        assert float(found["value"]) == pytest.approx(2.164e-07, rel=1e-3)  # in float32: processors round apart


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_mlflows_autolog(devices: int, tmp_path: Path) -> None:
    """Its checkpoint callback reads ``trainer._checkpoint_connector``, on rank 0 alone."""
    needs("mlflow", "sqlalchemy", "alembic", "pandas")
    found = play(tmp_path, "autolog", str(devices))
    assert found["params"] == "['epochs', 'lr', 'monitor', 'optimizer_name', 'patience']"
    assert found["artifacts"] == "['checkpoints', 'model_summary.txt']"
    if devices == 1:
        assert found["val_loss"] == "['3.4463e-01', '1.8334e-01']"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_wandbs_logger(devices: int, tmp_path: Path) -> None:
    needs("wandb")
    found = play(tmp_path, "wandb_offline", str(devices))
    assert found["config"] == "{'lr': 0.1}"
    if devices == 1:
        assert found["loss"] == "4.1094e-03"
        assert found["step"] == "15 True"


def test_wandbs_class_for_fabric_says_who_asks_and_what_to_take(ranks: RankPool, tmp_path: Path) -> None:
    needs("wandb")
    script = tmp_path / "script.py"
    script.write_text("import wandb.integration.lightning.fabric")
    ended = run_script(ranks, launcher(), str(script), folder=tmp_path)[0]
    said = ended.stderr.splitlines()[-1]
    if said == "NameError: name '_PATH' is not defined":
        pytest.skip("this release of wandb ends in an error of its own where an import fails")
    assert re.search(
        r"fabric\.utilities\.logger\.\w+, imported by wandb \(.*logger\.py:\d+\): .* Do not use the part of wandb",
        said,
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_of_transformers(devices: int, tmp_path: Path) -> None:
    needs("transformers")
    found = play(tmp_path, "transformer", str(devices))
    assert found["loaded"] == "BertForSequenceClassification"
    if devices == 1:
        assert (found["train_loss"], found["val_loss"]) == ("6.8740e-01", "6.8596e-01")


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "loss"), [(1, "3.940e+00"), (2, "3.949e+00")])
def test_lora_by_peft(devices: int, loss: str, tmp_path: Path) -> None:
    """As ``lockstep run --lightning`` starts it; peft's own `save_pretrained` writes the adapter."""
    needs("transformers", "peft")
    run = ("-m", "lockstep", "run", "--devices", str(devices), "--lightning")
    found = play(tmp_path, "lora", str(devices), by=run)
    assert found == {"trainable": "2048", "val_loss": loss, "same": "True True"}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_temporal_fusion_transformer_of_pytorch_forecasting(devices: int, tmp_path: Path) -> None:
    """Its hyperparameters are objects, which its checkpoint has to hold."""
    needs("pytorch_forecasting", "pandas")
    found = play(tmp_path, "forecasting", str(devices))
    assert found["predicted"] == "(4, 4) True"
    if devices == 1:  # which depends on the versions of pandas and NumPy: Lightning, which is there with it, says it
        assert found["val_loss"] == play(tmp_path, "forecasting", str(devices), by=())["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_lightlys_modules(devices: int, tmp_path: Path) -> None:
    needs("lightly", "torchvision")
    found = play(tmp_path, "selfsupervised", str(devices))
    assert "'val_top1': 2" in found["epochs"]
    if devices == 1:
        assert (found["loss"], found["val_top2"]) == ("2.2892e+00", "7.5000e-01")


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_monais_parts(devices: int, tmp_path: Path) -> None:
    needs("monai")
    found = play(tmp_path, "segmentation", str(devices))
    assert float(found["val_dice"]) > 0.8
    if devices == 1:
        assert (found["train_loss"], found["val_dice"]) == ("1.3286e-01", "9.3419e-01")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_rays_strategy_environment_and_callback(workers: int, tmp_path: Path) -> None:
    """Workers that Ray starts have the names from the environment; the callback saves and reports on each rank."""
    needs("ray", "pyarrow", "pandas")
    found = play(tmp_path, "ray_workers", str(workers), str(tmp_path))
    assert found["epoch"] == ("1 step: 16" if workers == 1 else "1 step: 8")
    assert found["keys"] == "['layer.bias', 'layer.weight']"
    if workers == 2:  # as by hand, with batches of four in order; Lightning shuffles loaders that do not, on ranks
        assert found["loss"] == "3.6847e-02"
