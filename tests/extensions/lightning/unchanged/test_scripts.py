"""Three scripts that import lightning end where Lightning ends, as they stand: on one process and on two."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from lockstep import lightning as names
from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"
CLI = (
    "fit --trainer.accelerator cpu --trainer.max_epochs 3 --trainer.enable_progress_bar false --model.width 6 "
    "--trainer.callbacks lightning.pytorch.callbacks.EarlyStopping --trainer.callbacks.monitor val_loss "
    "--model.optimizer torch.optim.SGD --model.optimizer.lr 0.1 "
    "--model.schedule torch.optim.lr_scheduler.ExponentialLR --model.schedule.gamma 0.9"
)
SCRIPTS = {"autoencoder": "{}", "gan": "{}", "command": CLI + " --trainer.devices {} --trainer.strategy {}"}
ORDER = {"PL_TRAINER_ORDER": "torch"}
"""The samples in the order in which torch's loader shuffles them; lockstep has one of its own."""


def words(name: str, devices: int) -> list[str]:
    return SCRIPTS[name].format(devices, "ddp" if devices > 1 else "auto").split()


def found(ended: CompletedProcess[str]) -> dict[str, Any]:
    """What a script printed."""
    assert ended.returncode == 0, ended.stderr
    lines = [line.split(" ", 2) for line in ended.stdout.splitlines() if line.startswith(("found ", "name "))]
    return {line[1] if len(line) == 3 else "name": float(line[2]) if len(line) == 3 else line[1] for line in lines}


def run(folder: Path, *words: str, **variables: str) -> CompletedProcess[str]:
    return python(*words, folder=folder, seconds=200, **variables)


def golden(name: str, devices: int) -> dict[str, Any]:
    """Where Lightning 2.6.6 ended."""
    return json.loads(GOLDEN.read_text())[f"{name} on {devices}"]


def alike(here: dict[str, Any], there: dict[str, Any]) -> None:
    """The same to five digits."""
    assert here.keys() == there.keys()
    for name, value in there.items():
        assert here[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=1e-7)), name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_where_lightning_ends(name: str, ranks: RankPool, tmp_path: Path) -> None:
    script = str(HERE / "scripts" / f"{name}.py")
    ended = run_script(ranks, Path(names.__file__), script, *words(name, 1), folder=tmp_path, environ=ORDER)[0]
    alike(found(ended), golden(name, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_on_two_ranks_too(name: str, tmp_path: Path) -> None:
    script = str(HERE / "scripts" / f"{name}.py")
    alike(found(run(tmp_path, "-m", "lockstep.lightning", script, *words(name, 2), **ORDER)), golden(name, 2))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_golden_numbers_are_those_of_the_installed_lightning(name: str, devices: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("importlib.metadata").version("lightning")
    if lightning != "2.6.6":
        pytest.skip("the numbers are those of 2.6.6")
    alike(found(run(tmp_path, str(HERE / "scripts" / f"{name}.py"), *words(name, devices))), golden(name, devices))


def main() -> None:
    """Write ``golden.json`` from the installed Lightning."""
    import tempfile

    numbers = {}
    for name in SCRIPTS:
        for devices in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                script = str(HERE / "scripts" / f"{name}.py")
                numbers[f"{name} on {devices}"] = found(run(Path(folder), script, *words(name, devices)))
    GOLDEN.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
