"""What `import lockstep` costs: little time, and nothing heavy or optional."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

# Optional packages, and parts of torch that cost 0.7 to 1.3 s each: imported where they are used.
LATE = (
    "accelerate",
    "cloudpickle",
    "docstring_parser",
    "fsspec",
    "hypothesis",
    "jsonargparse",
    "lightning",
    "matplotlib",
    "rich",
    "sklearn",
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
SECONDS = 0.15
TRIES = 8

PROGRAM = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import lockstep
{use}
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
USE = "from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything"


@cache
def cost(use: str) -> tuple[float, tuple[str, ...]]:
    """CPU seconds over `import torch`, and the modules that came on top, in a fresh interpreter."""
    # with compiled files, as installed packages have them, also where Python is told not to write any
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = subprocess.run([sys.executable, "-c", PROGRAM.format(use=use)], capture_output=True, text=True, env=environ)
    assert found.returncode == 0, found.stderr
    seconds, modules = json.loads(found.stdout)
    return seconds, tuple(modules)


def heavy(modules: tuple[str, ...]) -> list[str]:
    return [name for name in modules if name.startswith(tuple(f"{late}." for late in LATE)) or name in LATE]


@pytest.mark.parametrize("use", ["", USE])
def test_import_brings_nothing_heavy(use: str) -> None:
    assert heavy(cost(use)[1]) == []


def test_import_is_quick() -> None:
    best = cost(USE)[0]
    for _ in range(TRIES - 1):  # a busy machine is slow now and then; the minimum is what the import costs
        if best <= SECONDS:
            break
        cost.cache_clear()
        best = min(best, cost(USE)[0])
    assert best <= SECONDS


def test_a_heavy_import_would_be_seen() -> None:
    assert "yaml" in heavy(cost("import yaml")[1])
