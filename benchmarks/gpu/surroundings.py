"""Prints as one line of JSON where a run takes place: versions, devices, driver, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu.plan import ROOT

PACKAGES = ("torch", "lightning", "accelerate", "transformers", "torchvision", "torchmetrics", "triton", "pytest")


def said(*command: str) -> str:
    """What a command prints; empty where it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def installed() -> dict[str, str]:
    """The versions of the packages that matter, those that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def source_digest(folder: Path = ROOT / "src") -> str:
    """A fingerprint of the sources, by which a checkout without git can be told."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def commit() -> str:
    """The commit, with "+" where files differ from it; empty where there is no git."""
    found = said("git", "rev-parse", "--short=10", "HEAD")
    return found + ("+" if found and said("git", "status", "--porcelain", "--untracked-files=no") else "")


def devices(kind: str) -> dict[str, Any]:
    """How many devices of a kind there are, and what they are called."""
    import torch

    if kind == "cpu":
        return {"devices": 1, "device": f"CPU, {os.cpu_count()} cores", "kind": "cpu"}
    module: Any = getattr(torch, kind, None)
    count = module.device_count() if module is not None and module.is_available() else 0
    name = module.get_device_name(0) if count and hasattr(module, "get_device_name") else kind
    return {"devices": count, "device": name, "kind": kind}


def libraries(kind: str) -> dict[str, str]:
    """CUDA, NCCL, cuDNN and the driver, where they are."""
    import torch

    if kind != "cuda" or not torch.cuda.is_available():
        return {}
    found = {"CUDA": torch.version.cuda or "", "cuDNN": str(torch.backends.cudnn.version())}
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    return found


def everything(kind: str) -> dict[str, Any]:
    """All of it."""
    return {
        **devices(kind),
        "packages": installed(),
        "libraries": libraries(kind),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "commit": commit(),
        "sources": source_digest(),
        "nvidia-smi": said("nvidia-smi") if kind == "cuda" else "",
    }


if __name__ == "__main__":
    print(json.dumps(everything(sys.argv[1])))
