"""What `import lockstep` costs: little time, and nothing heavy or optional; commands of a search need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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
    "lockstep.engines.pipeline.stages",
    "lockstep.planner.cost",
    "lockstep.engines.pipeline.strategy",
    "lockstep.engines.deepspeed.strategy",
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
TRIES = 8

PROGRAM = """
import json, sys, time
start = time.process_time()
import torch
before, found, of_torch = set(sys.modules), {}, time.process_time() - start
start = time.process_time()
import lockstep
for use in sys.argv[1:]:
    exec(use)
    found[use] = [(time.process_time() - start) / of_torch, sorted(set(sys.modules) - before)]
print(json.dumps(found))
"""
NAMES = "from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything"
BARS = """
import lockstep.callbacks as callbacks
[getattr(callbacks, name) for name in callbacks.__all__]
callbacks.TQDMProgressBar(), callbacks.RichProgressBar()
"""
USES = ("", NAMES, BARS, "import yaml")
"""What a program does with the package, one after another."""


@cache
def costs() -> dict[str, tuple[float, list[str]]]:
    """By use: CPU time over that of `import torch`, and the modules that came on top, in a fresh interpreter so far."""
    # with compiled files, as installed packages have them, also where Python is told not to write any
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", PROGRAM, *USES]
    found = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert found.returncode == 0, found.stderr
    return {use: tuple(cost) for use, cost in json.loads(found.stdout).items()}


def heavy(modules: list[str]) -> list[str]:
    return [name for name in modules if name.startswith(tuple(f"{late}." for late in LATE)) or name in LATE]


@pytest.mark.parametrize("use", ["", NAMES])
def test_import_brings_nothing_heavy(use: str) -> None:
    assert heavy(costs()[use][1]) == []


def test_rich_and_tqdm_are_imported_when_they_draw() -> None:
    assert {"rich", "tqdm", "tqdm.auto"} & set(costs()[BARS][1]) == set()


def test_import_is_quick() -> None:
    best = costs()[NAMES][0]
    for _ in range(TRIES - 1):  # a busy machine is slow now and then; the minimum is what the import costs
        if best <= PART:
            break
        costs.cache_clear()
        best = min(best, costs()[NAMES][0])
    assert best <= PART


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
def test_a_search_is_submitted_and_looked_at_without_torch(use: str, tmp_path: Path) -> None:
    """Its import takes 2 s: ten times what the rest of such a command takes."""
    script = tmp_path / "script.py"
    caught = f"try:\n    exec({use!r})\nexcept SystemExit as end:\n    assert not end.code\n"
    script.write_text(f"import sys\n{caught}assert 'torch' not in sys.modules\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
