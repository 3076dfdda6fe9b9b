"""Record of how a run was started. Its checkpoints contain the record, so that a step can be replayed."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from lockstep.launch.environment import HIDDEN, SECRET
from lockstep.supervise.stack import FOREIGN

FOLDER = os.sep
"""The current folder when lockstep was imported: scripts may change it before they train. "/" if it was deleted."""
with suppress(OSError):
    FOLDER = os.getcwd()

_VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE"),
    *("OMP_NUM_THREADS", "PYTHONHASHSEED", "PYTHONPATH"),
)


@functools.cache
def how_started() -> dict[str, Any]:
    """Return how this process was started, as a dict of plain values for a checkpoint.

    The dict has the command ("command", without the interpreter; empty in a notebook), "folder", "commit", the hashes
    of the user's imported files ("code", by path), "versions", "threads", and the "variables" that change results.
    """
    return {
        "command": without_secrets(_command()),
        "executable": sys.executable,
        "folder": FOLDER,
        "commit": _commit(),
        "code": hashes_of_code(),
        "versions": {"python": sys.version.split()[0], "torch": str(torch.__version__)},
        "threads": torch.get_num_threads(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _VARIABLES or name.startswith("PL_TRAINER_")
        },
    }


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process' environment with other values for some variables, for a script that is started again."""
    return {**os.environ, **variables}


def _command() -> list[str]:
    words = sys.orig_argv[1:]
    if "--multiprocessing-fork" in words:  # a spawned process, which has the arguments of the process that started it
        return list(sys.argv)
    main = sys.modules.get("__main__")
    return words if getattr(main, "__file__", None) and "ipykernel" not in sys.modules else []


def without_secrets(words: list[str]) -> list[str]:
    """Return a command in which the values of options such as ``--api-key`` are replaced by ``(not shown)``.

    Example:
        >>> without_secrets(["train.py", "--token", "abc", "--lr=0.1", "--api-key=abc"])
        ['train.py', '--token', '(not shown)', '--lr=0.1', '--api-key=(not shown)']
    """
    found: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = word.startswith("-") and SECRET.search(name) is not None
        if is_value and not word.startswith("-"):
            found.append(HIDDEN)
        else:
            found.append(f"{name}={HIDDEN}" if is_secret and equals else word)
        is_value = is_secret and not equals
    return found


def _commit() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", FOLDER, "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    return ""


def hashes_of_code() -> dict[str, str]:
    """Return the first 16 digits of the SHA-256 of each imported file of the user, by its path, relative to `FOLDER`.

    Installed packages and Python itself are left out.
    """
    found = {}
    for module in list(sys.modules.values()):
        # not getattr: a module may import something when it is asked for an attribute
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str) and not os.path.abspath(file).startswith(FOREIGN):
            path = os.path.relpath(file, FOLDER)
            with suppress(OSError), open(file, "rb") as opened:
                digits = hashlib.sha256(opened.read()).hexdigest()[:16]
                found[os.path.abspath(file) if path.startswith("..") else path] = digits
    return dict(sorted(found.items()))
