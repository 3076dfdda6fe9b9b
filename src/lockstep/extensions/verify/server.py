"""A process that imports torch once and forks the processes of runs: `python -m lockstep.extensions.verify.server`."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from lockstep.extensions.verify.child import run
from lockstep.extensions.verify.settings import Settings
from lockstep.launch.parent_death import end_with

_LOOK = 0.05


def serve() -> None:
    """Fork a process for each line on standard input, until that is closed; write down how each ends."""
    torch.set_num_threads(1)
    running: dict[int, Path] = {}
    pending = b""
    while True:
        _collect(running)
        if not select.select([0], [], [], _LOOK)[0]:
            continue
        read = os.read(0, 65536)
        if not read:
            break
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            number = _fork(order)
            running[number] = Path(order["folder"]) / "exit"
            os.write(1, f"{number}\n".encode())
    for number in running:
        os.killpg(number, signal.SIGKILL)
        os.waitpid(number, 0)


def _collect(running: dict[int, Path]) -> None:
    for number in list(running):
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            running.pop(number).write_text(str(os.waitstatus_to_exitcode(status)))


def _fork(order: dict[str, Any]) -> int:
    server = os.getpid()
    number = os.fork()
    if not number:
        _become_rank(order, server)
    return number


def _become_rank(order: dict[str, Any], server: int) -> NoReturn:
    """Run a script in this process, and end at once: threads of the script's wait for nothing."""
    code = 1
    try:
        os.setsid()
        end_with(server)
        os.environ.update(order["environ"])
        folder = Path(order["folder"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        run(Settings.read(order["settings"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    end_with(os.getppid())
    serve()
