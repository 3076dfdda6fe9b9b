"""Starts a function of this folder once a rank, each in a fresh process, and brings back what rank 0 returns."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent.parent
Prefix = Callable[[int], tuple[Sequence[str], dict[str, str]]]
"""What stands before a rank's command, and its variables."""


def on_loopback(rank: int) -> tuple[Sequence[str], dict[str, str]]:
    """Nothing before the command; gloo takes the loopback device where there is one."""
    loopback = os.path.exists("/sys/class/net/lo") and "GLOO_SOCKET_IFNAME" not in os.environ
    return (), {"GLOO_SOCKET_IFNAME": "lo"} if loopback else {}


def run(function: str, world: int, settings: dict[str, Any], prefix: Prefix = on_loopback, limit: float = 3600) -> Any:
    """What ``function`` returns on rank 0.

    Args:
        function: "file:name"; it is called with the settings on every rank, when the group is there. What it
            returns is JSON.
        world: processes.
        settings: keyword arguments, as JSON; "backend" is the group's (gloo if not given) and not handed on.
        prefix: what stands before the command of a rank.
        limit: seconds after which all are ended.

    Raises:
        RuntimeError: if a rank fails (the others are ended) or the limit is reached.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps({"function": function, "world": world, "folder": folder, "settings": settings})
        children = []
        try:
            for rank in range(world):
                before, variables = prefix(rank)
                command = [*before, sys.executable, "-m", "engine.ranks", str(rank), told]
                environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path(), **variables}
                children.append(subprocess.Popen(command, env=environ))
            _wait(children, function, time.monotonic() + limit)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                child.wait()
        return json.loads((Path(folder) / "result").read_text())


def _path() -> str:
    before = os.environ.get("PYTHONPATH")
    return f"{FOLDER}{os.pathsep}{before}" if before else str(FOLDER)


def _wait(children: list[subprocess.Popen[bytes]], function: str, deadline: float) -> None:
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.poll()]
        if failed:
            time.sleep(1)  # for the others' last words
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    codes = [child.poll() for child in children]
    if any(codes) or None in codes:
        raise RuntimeError(f"{function}: exit statuses of the ranks {codes} (None: did not end in time)")


def _this_rank(rank: int, told: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    settings = told["settings"]
    folder = Path(told["folder"])
    dist.init_process_group(
        settings.pop("backend", "gloo"),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=told["world"],
    )
    try:
        file, name = told["function"].split(":")
        result = getattr(importlib.import_module(f"engine.{file}"), name)(**settings)
        if rank == 0:
            (folder / "result").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _this_rank(int(sys.argv[1]), json.loads(sys.argv[2]))
