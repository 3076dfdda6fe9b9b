"""Extensions are found by the table: what is there, what was deleted, and what other distributions bring."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import lockstep
from lockstep.ground import extensions
from lockstep.ground.extensions import EXTENSIONS, ROOT, is_there, module_of
from tests.guards.source import PROJECT
from tests.tools.core import copy_without
from tests.tools.fresh import python

FOLDER = Path(lockstep.__file__).parent
THERE = [name for name in EXTENSIONS if is_there(name)]


def former_paths(extension: str) -> list[tuple[str, str]]:
    """Each path below lockstep that a module of an extension had, and its path of today."""
    found = []
    for path, module in EXTENSIONS[extension].paths.items():
        home = ".".join(part for part in (ROOT, extension, module) if part)
        place = FOLDER.joinpath("extensions", extension, *filter(None, module.split(".")))
        found.append((f"lockstep.{path}", home))
        for file in place.glob("*.py") if place.is_dir() else ():
            if file.stem != "__init__":
                found.append((f"lockstep.{path}.{file.stem}", f"{home}.{file.stem}"))
    return found


@pytest.mark.parametrize("extension", THERE)
def test_a_module_is_one_by_either_path(extension: str) -> None:
    optional = ("deepspeed", "jsonargparse", "optuna")
    for former, today in former_paths(extension):
        try:
            assert importlib.import_module(former) is importlib.import_module(today), former
        except ModuleNotFoundError as error:
            assert error.name in optional, former  # noqa: PT017
        assert extensions.module_of(former.removeprefix("lockstep.")) == today


@pytest.mark.extension("lightning")
def test_a_module_runs_by_its_former_path() -> None:
    run = subprocess.run([sys.executable, "-m", "lockstep.lightning", "--help"], capture_output=True, text=True)
    assert (run.returncode, run.stdout[:35]) == (0, "usage: python -m lockstep.lightning")


def test_a_path_of_no_extension_has_no_home() -> None:
    assert module_of("loop.fit") is None
    assert module_of("verification") is None


# -- deleted -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with lockstep without its extensions."""
    folder = tmp_path_factory.mktemp("core")
    copy_without(folder)
    return folder


DELETED = """
import sys
sys.path.insert(0, {path!r})
import lockstep
assert lockstep.__file__.startswith({path!r}), lockstep.__file__

def said(do):
    try:
        do()
    except Exception as error:
        print(type(error).__name__ + ": " + str(error))
    else:
        print("nothing")

from lockstep import *
from lockstep.callbacks import *
print("SpikeDetection" in dir(lockstep.callbacks), "ModelCheckpoint" in dir(lockstep.callbacks))
said(lambda: Trainer(strategy="deepspeed_stage_2", accelerator="cpu", devices=2))
def face():
    from lockstep.callbacks import SpikeDetection
said(face)
def old():
    import lockstep.verify.certificate
said(old)
from lockstep.cli.run import main
print(main(["verify", "train.py"]))
said(lambda: Trainer(accelerator="cpu", logger=False).verify(LightningModule()))
said(lambda: Trainer(strategy="dp", accelerator="cpu", devices=2))
said(lambda: lockstep.DistributedDataParallel)
said(lambda: Trainer(strategy="balanced", accelerator="cpu", devices=2))
said(lambda: Trainer(balance=True, accelerator="cpu", devices=2, logger=False))
said(lambda: Trainer(strategy="plan.yaml", accelerator="cpu"))
said(lambda: Trainer(accelerator="cpu", logger=False).plan(LightningModule()))
from lockstep.strategies import DDPStrategy
said(lambda: DDPStrategy(ddp_comm_hook=print))
import pydoc
assert "verify" in pydoc.render_doc(Trainer)
"""


def test_what_is_of_a_deleted_extension_is_missing_by_name(without: Path) -> None:
    run = subprocess.run([sys.executable, "-c", DELETED.format(path=str(without))], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    absent = "is not installed: reinstall torch-lockstep, or do not use it."
    strategy, face, old, code, call, dp, container, *balancing, hook = run.stdout.splitlines()[1:]
    assert run.stdout.startswith("False True\n")
    assert strategy.startswith("MissingExtension: the strategy 'deepspeed_stage_2' belongs to the extension")
    assert face.startswith("ImportError: cannot import name 'SpikeDetection'") or "extension 'extras'" in face
    assert old.startswith("ModuleNotFoundError: lockstep.verify")
    assert old.endswith(absent)
    assert code == "2"
    assert run.stderr.count("the command 'verify' belongs to the extension 'verify'") == 1
    assert call.startswith("MissingExtension: the service 'trainer.verify' belongs to the extension 'verify'")
    assert dp.startswith("MissingExtension: the strategy 'dp' belongs to the extension 'parallel'")
    assert container.startswith("AttributeError: lockstep.DistributedDataParallel belongs to the extension 'parallel'")
    of_balancing = (
        "the strategy 'balanced'",
        *(f"the service '{name}'" for name in ("balance", "saved plans", "trainer.plan")),
    )
    for said, what in zip(balancing, of_balancing, strict=True):
        assert said.startswith(f"MissingExtension: {what} belongs to the extension 'balancing'")
    assert hook.startswith("MissingExtension: the service 'communication hooks' belongs to the extension 'parallel'")
    assert all(said.endswith(absent) for said in (dp, container, *balancing, hook))


TRAIN = """
import hashlib, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import lockstep
from lockstep.callbacks import ModelCheckpoint
from lockstep.loop import call

call.PLANNED_FROM = 0  # every model is large: under "auto" it is planned where plans can be made

class Line(lockstep.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

assert lockstep.__file__.startswith(sys.argv[1]), lockstep.__file__
lockstep.seed_everything(1, verbose=False)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
saves = ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1, filename="{step}")
trainer = lockstep.Trainer(accelerator="cpu", devices=2, strategy=sys.argv[2], max_steps=8, callbacks=saves,
                           logger=False, enable_progress_bar=False, enable_model_summary=False)
model = Line()
trainer.fit(model, loader, ckpt_path=sys.argv[3] if len(sys.argv) > 3 else None)
weights = trainer.strategy.save(weights_only=True).module
if trainer.is_global_zero:
    print("weights", hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest())
    print("extensions", [name for name in sys.modules if name.startswith("lockstep.extensions.")])
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "auto"])
def test_two_ranks_train_save_and_resume_without_extensions(strategy: str, without: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    said = []
    for more in ([], ["saved/step=3.ckpt"]):
        run = python("train.py", str(without), strategy, *more, folder=tmp_path, PYTHONPATH=str(without))
        assert run.returncode == 0, run.stderr
        said.append([line for line in run.stdout.splitlines() if line.startswith(("weights", "extensions"))])
    assert said[0] == said[1]
    assert len(said[0]) == 2


PARTS = (
    *("test_base", "test_format", "test_checkpoint", "test_environments", "test_place", "test_order", "test_contract"),
    *("test_verdict", "test_tree", "test_variables", "test_csv", "test_fit", "test_caches"),
    *("test_precision", "test_profilers", "test_threads"),
)
"""Files of tests, by name: about one in each folder of the core."""


def pytest_on(folder: Path, *words: str, seconds: float) -> CompletedProcess[str]:
    """Run pytest on the tests of the project with the lockstep of a folder."""
    paths = os.pathsep.join([str(folder), str(PROJECT)])
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
    return python("-m", "pytest", *options, *words, folder=PROJECT, seconds=seconds, PYTHONPATH=paths)


@pytest.mark.timeout(400)
def test_the_tests_of_the_core_are_collected_and_some_run_without_extensions(without: Path) -> None:
    """``scripts/test --core`` runs all of them."""
    files = " or ".join(f"{name}.py" for name in PARTS)
    run = pytest_on(without, "tests", "--ignore", "tests/extensions", "-k", files, seconds=380)
    assert run.returncode == 0, run.stdout[-4000:]
    passed, deselected = (int(re.findall(rf"(\d+) {word}", run.stdout)[-1]) for word in ("passed", "deselected"))
    assert passed > 200
    assert passed + deselected > 8000


EACH = [pytest.param(name, marks=[] if name == "extras" else pytest.mark.slow) for name in THERE]
"""Every day the one whose names most tests use."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", EACH)
def test_without_one_extension_the_tests_of_the_others_are_collected(name: str, tmp_path: Path) -> None:
    copy_without(tmp_path, [name])
    run = pytest_on(tmp_path, "tests/extensions", "--ignore", f"tests/extensions/{name}", "--collect-only", seconds=180)
    assert run.returncode == 0, run.stdout[-4000:]
    assert int(re.findall(r"(\d+)(?:/\d+)? tests collected", run.stdout)[-1]) > 200


def test_a_fit_imports_no_extension(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    run = python("train.py", str(FOLDER.parent), "ddp", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "extensions []"


# -- of others -----------------------------------------------------------------------------------------------

MODULE = """
from lockstep.strategies import SingleDeviceStrategy

class Quiet(SingleDeviceStrategy):
    pass

def make():
    return Quiet()

def count():
    return 3

def hello(words):
    print("hello", *words)
    return 0
"""


def distribution(folder: Path, name: str, points: str, module: str = MODULE) -> None:
    """Put a distribution with entry points into a folder, as pip would."""
    (folder / f"{name}.py").write_text(module)
    about = folder / f"{name}-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(points)


USE = """
import sys
sys.path.insert(0, {path!r})
from lockstep import Trainer
from lockstep.cli.run import main
for name in ("quiet", "made"):
    print(type(Trainer(strategy=name, accelerator="cpu", logger=False).strategy).__name__)
code = main(["hello", "world"])
print(code)
main(["--help"])
for name in ("twice", "broken", "nothing", "number"):
    try:
        Trainer(strategy=name, accelerator="cpu", logger=False)
    except Exception as error:
        print(f"{{name}}: {{error}}")
print(type(Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False).strategy).__name__)
"""


def test_other_distributions_bring_strategies_and_commands(tmp_path: Path) -> None:
    distribution(
        tmp_path,
        "quiet",
        "[lockstep.strategies]\nquiet = quiet:Quiet\nmade = quiet:make\ntwice = quiet:Quiet\nnothing = quiet:Never\n"
        "number = quiet:count\nddp = quiet:Quiet\n[lockstep.commands]\nhello = quiet:hello\nenv = quiet:hello\n",
    )
    distribution(tmp_path, "loud", "[lockstep.strategies]\ntwice = loud:Quiet\n")
    distribution(tmp_path, "broken", "[lockstep.strategies]\nbroken = broken:Quiet\n", "raise OSError('no card')")
    run = python("-c", USE.format(path=str(tmp_path)))
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[:4] == ["Quiet", "Quiet", "hello world", "0"]
    assert "  hello      a command of quiet 1.5" in lines
    assert sum(line.startswith("  env ") and "quiet" not in line for line in lines) == 1
    said = {line.partition(":")[0]: line for line in lines[5:]}
    claimed = "twice: the strategy 'twice' is provided by loud 1.5 and by quiet 1.5: uninstall one of them."
    assert said["twice"] == claimed
    assert said["broken"] == (
        "broken: the strategy 'broken' of broken 1.5 cannot be imported from 'broken:Quiet': OSError: no card. Repair "
        "or uninstall that package."
    )
    assert "'quiet:Never': AttributeError" in said["nothing"]
    assert said["number"] == 'number: The entry point of Trainer(strategy="number") returned a int, not a Strategy.'
    assert lines[-1] == "DDPStrategy"
