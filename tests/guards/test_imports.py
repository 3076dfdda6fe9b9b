"""What `import lockstep` and Lightning's names cost: little time, and nothing heavy; a search needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.tools.extensions import is_there

# Imported where they are used: optional packages, parts of torch that cost 0.7 to 1.3 s each, and what few runs of
# lockstep need, together 30 % of its import.
LATE = (
    "accelerate",
    "cloudpickle",
    "docstring_parser",
    "fractions",
    "fsspec",
    "hypothesis",
    "jsonargparse",
    "lightning",
    "lockstep.extensions.balancing.pipeline.stages",
    "lockstep.extensions.balancing.planner.cost",
    "lockstep.extensions.balancing.pipeline.strategy",
    "lockstep.extensions.deepspeed.strategy",
    "lockstep.engines.sharded.fsdp",
    "matplotlib",
    "rich",
    "sklearn",
    "statistics",
    "sysconfig",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed._shard",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.onnx",
    "torch.utils.tensorboard",
    "torchmetrics",
    "tqdm",
    "yaml",
)
PART = 0.125
"""Of what `import torch` costs beside it: other work on the machine makes both slower."""
PART_OF_NAMES = 0.1
"""The same of Lightning's names."""
TRIES = 8

PROGRAM = """
import atexit, json, os, sys, time
@atexit.register
def show():  # registered first, so called last: after lockstep has left the group
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    print("\\n" + json.dumps({**found, "left": [0, [name for name in names if "gloo" in name], None]}))
start = time.process_time()
import torch
before, found, of_torch = set(sys.modules), {}, time.process_time() - start
start = time.process_time()
import lockstep
for use in sys.argv[1:]:
    said = None
    exec(use)
    found[use] = [(time.process_time() - start) / of_torch, sorted(set(sys.modules) - before), said]
"""
NAMES = "from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything"
BARS = """
import lockstep.callbacks as callbacks
[getattr(callbacks, name) for name in callbacks.__all__]
callbacks.TQDMProgressBar(), callbacks.RichProgressBar()
"""
FACE = """
lockstep.callbacks.EarlyStopping
lockstep.utilities.model_helpers.is_overridden
lockstep.demos.boring_classes.BoringModel
lockstep.strategies.DDPStrategy
lockstep.profilers.SimpleProfiler
from lockstep.utilities.types import STEP_OUTPUT
said = lockstep.strategies.DDPStrategy.__name__
"""
FIT = """
from lockstep.callbacks import EarlyStopping, ModelCheckpoint, RichProgressBar
from lockstep.loggers import CSVLogger
from lockstep.names.table import table
from lockstep.strategies import DDPStrategy
from lockstep.testing.models import BoringModel
from lockstep.utilities import rank_zero_only
Trainer(accelerator="cpu", devices=1, strategy="ddp", max_steps=2, logger=CSVLogger(".")).fit(BoringModel())
said = table.cache_info().currsize
"""
LIGHTNINGS = """
from lockstep.lightning import enter
enter()
import lightning as L
import lightning.pytorch as pl
import pytorch_lightning
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
assert pl.Trainer is L.Trainer is Trainer
"""
OLD = """
from lockstep.core.lightning import LightningModule
said = table.cache_info().currsize
"""
USES = ("", NAMES, BARS, "import yaml", FIT, *([LIGHTNINGS] if is_there("lightning") else []), FACE, OLD)
"""What a program does with the package, one after another."""

Cost = tuple[float, list[str], Any]


@cache
def costs(*uses: str) -> dict[str, Cost]:
    """By use, of all so far in a fresh interpreter: CPU time over that of `import torch`, the modules that came on top,
    and what the use says; behind them all, in the place of modules, gloo's threads at the process's end."""
    # with compiled files, as installed packages have them, also where Python is told not to write any
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *(uses or USES)]
    with tempfile.TemporaryDirectory() as folder:
        found = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder)
    assert found.returncode == 0, found.stderr
    return {use: tuple(cost) for use, cost in json.loads(found.stdout.splitlines()[-1]).items()}


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if name.startswith(tuple(f"{late}." for late in LATE)) or name in LATE]


def at_best(enough: float, first: float, *uses: str) -> float:
    """What the last use costs beside the one before it: a busy machine is slow now and then, so the least of some."""
    for _ in range(TRIES - 1):
        if first <= enough:
            break
        found = costs.__wrapped__(*uses)
        spent = [0.0, *(found[use][0] for use in uses)]
        first = min(first, spent[-1] - spent[-2])
    return first


@pytest.mark.parametrize("use", ["", NAMES])
def test_import_brings_nothing_heavy(use: str) -> None:
    found = costs()[use][1]
    assert heavy(found) == []
    assert not [name for name in found if name.startswith(("lockstep.testing", "lockstep.cli", "lockstep.tuner"))]


def test_rich_and_tqdm_are_imported_when_they_draw() -> None:
    assert {"rich", "tqdm", "tqdm.auto"} & set(costs()[BARS][1]) == set()


def test_parts_of_the_face_come_when_they_are_asked_for() -> None:
    assert costs()[FACE][2] == "DDPStrategy"


def test_the_table_is_read_when_a_name_is_missing_and_not_before() -> None:
    assert costs()[FIT][2] == 0
    assert costs()[OLD][2] == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_gloo_threads_end_with_the_group() -> None:
    """They once outlived it, held by default arguments of torch's that were taken while the group was there.

    A thread that then asked for the interpreter's lock aborted the process: one ddp run in five ended its last rank
    with SIGABRT after all work was done.
    """
    assert costs()["left"][1] == []


def test_import_is_quick() -> None:
    assert at_best(PART, costs()[NAMES][0], NAMES) <= PART


@pytest.mark.extension("lightning")
def test_lightnings_names_cost_little_at_the_start() -> None:
    assert at_best(PART_OF_NAMES, costs()[LIGHTNINGS][0] - costs()[FIT][0], NAMES, LIGHTNINGS) <= PART_OF_NAMES


def test_a_heavy_import_would_be_seen() -> None:
    assert "yaml" in heavy(costs()["import yaml"][1])


@pytest.mark.parametrize(
    "use",
    [
        "import lockstep; lockstep.__version__",
        "from lockstep import HyperOptArgumentParser, SlurmCluster",
        "from lockstep.cli.run import main; main(['trials', '--help'])",
        "from lockstep.cli.run import main; main(['submit', '--print', __file__])",
    ],
)
@pytest.mark.extension("search")
def test_a_search_is_submitted_and_looked_at_without_torch(use: str, tmp_path: Path) -> None:
    """Its import takes 2 s: ten times what the rest of such a command takes."""
    script = tmp_path / "script.py"
    caught = f"try:\n    exec({use!r})\nexcept SystemExit as end:\n    assert not end.code\n"
    script.write_text(f"import sys\n{caught}assert 'torch' not in sys.modules\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
