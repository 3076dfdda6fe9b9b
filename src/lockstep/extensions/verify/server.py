"""Server that imports torch once and forks the processes of runs (`python -m lockstep.extensions.verify.server`)."""

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

_POLL_SECONDS = 0.05


def serve() -> None:
    """Read orders (one line of JSON each) from standard input, and run each order's script in a forked process.

    Print the process id, and write the exit code to the file `exit` in the order's folder. When the input is closed,
    kill the processes that still run.
    """
    torch.set_num_threads(1)
    server = os.getpid()
    running: dict[int, Path] = {}
    pending = b""
    while True:
        for number in list(running):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                running.pop(number).write_text(str(os.waitstatus_to_exitcode(status)))
        # with a timeout, so that exit codes are collected while no order arrives
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            continue
        # os.read, since a buffered reader would hold lines back that select does not see
        read = os.read(0, 65536)
        if not read:
            break
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            order = json.loads(line)
            number = os.fork()
            if not number:
                _run_rank(order, server)
            running[number] = Path(order["folder"]) / "exit"
            os.write(1, f"{number}\n".encode())
    for number in running:
        os.killpg(number, signal.SIGKILL)
        os.waitpid(number, 0)


def _run_rank(order: dict[str, Any], server: int) -> NoReturn:
    """Run a script in this forked process, and exit."""
    code = 1
    try:
        # a session of its own: the rank is killed with all that it started
        os.setsid()
        end_with(server)
        os.environ.update(order["environ"])
        folder = Path(order["folder"])
        # standard input and output are the server's orders and answers until here
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
        # without Python's shutdown, which would wait for the script's threads
        os._exit(code)


if __name__ == "__main__":
    end_with(os.getppid())
    serve()
