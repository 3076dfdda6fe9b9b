"""Start and end of a run's processes, which are forked from a server that has imported torch."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.extensions.verify.settings import Settings

_MODULE = "lockstep.extensions.verify.server"
_SERVE = f"import sys; here = sys.path.pop(0); import {_MODULE} as server; sys.path.insert(0, here); server.main()"
"""Program of the server. It imports torch without the current folder, whose files may have names that torch imports."""
_LIBRARIES = {
    # without it, Accelerate and Hugging Face's Trainer start no process group on a machine without an accelerator
    "ACCELERATE_USE_CPU": "true",
    "DS_ACCELERATOR": "cpu",
}
"""Variables that let libraries train on several ranks of a CPU; a library's own launcher sets them there."""
_POLL_SECONDS = 0.05
_DEADLOCK_SECONDS = 5.0
"""Seconds after which ranks that wait in different collectives count as deadlocked."""


@dataclass(frozen=True)
class Ending:
    """Result of a process that has ended: its status and its error.

    Attributes:
        status: "done" (the steps were made), "ended" (the script ended first), "failed", "killed" (by the system) or
            "stuck" (no progress).
        message: message of the error.
        where: line of the script in which the process failed.
    """

    status: str
    message: str = ""
    where: str = ""

    @property
    def has_failed(self) -> bool:
        """True if the process failed or was killed."""
        return self.status in ("failed", "killed")

    @property
    def has_finished(self) -> bool:
        """True if the process ended without an error."""
        return self.status in ("done", "ended")

    @property
    def short(self) -> str:
        """First line of the error message, at most 200 characters."""
        lines = self.message.strip().splitlines()
        return lines[0][:200] if lines else "without a message"


@dataclass(frozen=True)
class Patience:
    """Time limits after which the processes of a run are killed.

    Attributes:
        silence: seconds without a new event of any rank.
        total: seconds for the whole run.
    """

    silence: float = 90.0
    total: float = 900.0


class ServerDied(RuntimeError):
    """Error raised when the server that forks the runs' processes has ended.

    Args:
        code: exit code of the server.
    """

    def __init__(self, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(
            f"the process that starts the script's ranks {how}, possibly because memory ran out: see its output above, "
            "and use a smaller model or fewer --devices"
        )


class Server:
    """Handle of the server process, which imports torch once and forks the processes of runs.

    Attributes:
        process: the running server.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-c", _SERVE]
        # CUDA is hidden before torch is imported. One OpenMP thread: a pool of threads does not survive a fork
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        # the server ends when its standard input is closed
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()

    def start(self, settings: Settings) -> Forked:
        """Fork a process that runs the script with these settings.

        Raises:
            ServerDied: the server has ended.
        """
        # the variables of a rank, as torchrun sets them
        environ = {
            **{f"{kind}RANK": str(settings.rank) for kind in ("", "LOCAL_", "ROLE_")},
            **{f"{kind}WORLD_SIZE": str(settings.world) for kind in ("", "LOCAL_", "ROLE_")},
            **dict.fromkeys(("GROUP_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), "0"),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(settings.port),
            "TORCHELASTIC_RUN_ID": "verify",
            **_LIBRARIES,
        }
        folder = settings.own_folder
        folder.mkdir(parents=True, exist_ok=True)
        order = json.dumps({"settings": pickle.dumps(settings).hex(), "folder": str(folder), "environ": environ})
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # a server that has ended leaves the pipe broken, or its reply empty
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        if not answer:
            raise ServerDied(self.process.wait())
        return Forked(int(answer), folder / "exit", self.process)


@dataclass(frozen=True)
class Forked:
    """Handle of a process that the server has forked.

    Attributes:
        number: process id.
        path: file into which the server writes the exit code.
        server: the server; the processes that it has forked end with it.
    """

    number: int
    path: Path
    server: subprocess.Popen[str]

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs.

        Raises:
            ServerDied: the server has ended without writing the exit code.
        """
        text = _read(self.path)
        code = None if text else self.server.poll()
        if code is not None:
            raise ServerDied(code)
        return int(text) if text else None

    def kill(self) -> None:
        """Kill the process, and wait until it has ended. After a run the server ends all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(_POLL_SECONDS / 10)


def run(server: Server, settings: Settings, patience: Patience, together: int = 0) -> list[Ending]:
    """Run a script in ``settings.world`` processes, and return how each process ended.

    Args:
        server: starts processes.
        settings: settings of all of them; rank and port are filled in.
        patience: time limits.
        together: number of ranks that run at a time, once rank 0 has run alone; 0: all.

    Returns:
        How each process ended, by rank.
    """
    with socket.socket() as listener:
        # only free, not used: the ranks' rendezvous is a file, but a script may check the port in its environment
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    ranks = [replace(settings, rank=rank, port=port) for rank in range(settings.world)]
    groups = [ranks]
    if together:
        groups = [ranks[:1], *(ranks[first : first + together] for first in range(1, len(ranks), together))]
    return [ending for group in groups for ending in _run(server, group, patience)]


def _run(server: Server, ranks: Sequence[Settings], patience: Patience) -> list[Ending]:
    processes = [server.start(each) for each in ranks]
    folders = [each.own_folder for each in ranks]
    try:
        is_stuck = _wait(processes, folders, patience)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    endings = []
    for folder, process in zip(folders, processes, strict=True):
        code = process.poll()
        # a rank that has written its end counts as ended, even if it was killed while it shut down
        if (folder / "end.json").exists():
            endings.append(Ending(**json.loads((folder / "end.json").read_text())))
        elif is_stuck:
            endings.append(Ending("stuck"))
        elif code is not None and code < 0:
            endings.append(Ending("killed", message=signal.Signals(-code).name))
        else:
            lines = _read(folder / "stderr").strip().splitlines()
            endings.append(Ending("failed", message=lines[-1] if lines else f"exit code {code}"))
    return endings


def _wait(processes: Sequence[Forked], folders: Sequence[Path], patience: Patience) -> bool:
    """Wait for processes to end. Return True if they are stuck or exceed a time limit, and must be killed."""
    start = last_change = time.monotonic()
    sizes: list[int] = []
    while any(process.poll() is None for process in processes):
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        # every event makes its file longer, so sizes are enough to see progress
        paths = [folder / "events.jsonl" for folder in folders]
        new_sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        if new_sizes != sizes:
            sizes, last_change = new_sizes, now
        silent = now - last_change
        if silent > patience.silence or now - start > patience.total:
            return True
        if silent > _DEADLOCK_SECONDS:
            # a deadlock is certain earlier: ranks are in collectives that do not match, or that others will not enter
            waits = {wait for wait in map(_collective_of, folders) if wait}
            has_ended = any(process.poll() is not None for process in processes)
            if len(waits) > 1 or (waits and has_ended):
                return True
    return False


def _collective_of(folder: Path) -> str:
    """Return the name and number of the collective in which a rank waits, or "" if it waits in none."""
    lines = _read(folder / "events.jsonl").splitlines()
    event: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return f"{event['name']} {event['number']}" if event.get("kind") == "collective" else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
