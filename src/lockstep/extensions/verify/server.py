"""Server that imports torch once and forks the processes of runs."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from lockstep.extensions.verify.child import run
from lockstep.launch.parent_death import end_with, prctl

_POLL_SECONDS = 0.05
_ORPHAN_SECONDS = 2.0
_PR_SET_CHILD_SUBREAPER = 36


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
                folder = running.pop(number)
                if not running:
                    _end_orphans()
                folder.write_text(str(os.waitstatus_to_exitcode(status)))
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
        os.kill(number, signal.SIGKILL)
    _end_orphans()


def _end_orphans() -> None:
    """Wait shortly for the processes that ended ranks have left, then kill them. The system gives them to this process.

    Some end by themselves, and delete shared memory first.
    """
    children, until = Path(f"/proc/self/task/{os.getpid()}/children"), time.monotonic() + _ORPHAN_SECONDS
    while children.exists() and (found := children.read_text().split()):
        for number in map(int, found):
            if time.monotonic() > until:
                os.kill(number, signal.SIGKILL)
            os.waitpid(number, os.WNOHANG)
        time.sleep(_POLL_SECONDS)


def _run_rank(order: dict[str, Any], server: int) -> NoReturn:
    """Run a script in this forked process, and exit."""
    code = 1
    try:
        # a session of its own, so that Ctrl-C does not reach the script
        os.setsid()
        end_with(server)
        os.environ.update(order["environ"])
        folder = Path(order["folder"])
        # standard input and output are the server's orders and answers until here
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), stream)
        run(pickle.loads(bytes.fromhex(order["settings"])))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # without Python's shutdown, which would wait for the script's threads
        os._exit(code)


def main() -> None:
    """Serve until the process that has started this one ends."""
    end_with(os.getppid())
    found = prctl()
    if found is not None:
        found(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    serve()
