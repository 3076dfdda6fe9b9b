"""Starts a script in the processes of a run, and sees to it that they end."""

from __future__ import annotations

import contextlib
import json
import os
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

_LOOK = 0.05
_DEADLOCK = 5.0
"""Seconds for which ranks wait in collectives that do not fit together, until that is certain."""


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        status: "done" (the steps were made), "ended" (the script ended before), "failed", "killed" (by the system) or
            "stuck" (nothing moved any more).
        steps: optimizer steps that it made.
        message: of its failure.
        where: the line of the script in which it failed.
    """

    status: str
    steps: int = 0
    message: str = ""
    where: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than it should."""
        return self.status in ("failed", "killed")

    @property
    def has_finished(self) -> bool:
        """Whether it ended as it should."""
        return self.status in ("done", "ended")

    @property
    def short(self) -> str:
        """The beginning of the message."""
        lines = self.message.strip().splitlines()
        return lines[0][:200] if lines else "without a message"


@dataclass(frozen=True)
class Patience:
    """How long a run may take.

    Attributes:
        silence: seconds without anything that a rank notes.
        whole: seconds in all.
    """

    silence: float = 90.0
    whole: float = 900.0


class ServerDied(RuntimeError):
    """The process is gone of which those of runs are forked.

    Args:
        code: its exit code.
    """

    def __init__(self, code: int) -> None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(
            f"the process that starts the script's ranks {how}, perhaps for want of memory: see what it printed above, "
            "and give a smaller model, or fewer --devices"
        )


class Server:
    """A process that has imported torch, of which a run's processes are forked: that spares each the import.

    Attributes:
        process: itself.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "lockstep.extensions.verify.server"]
        # CUDA is hidden before torch is imported; threads of OpenMP do not survive a fork, so that there are none
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()

    def start(self, settings: Settings) -> Forked:
        """Start a process with these settings."""
        order = {"settings": settings.write(), "folder": str(settings.own_folder), "environ": _environ(settings)}
        answer = self._ask(json.dumps(order))
        if not answer:
            raise ServerDied(self.process.wait())
        return Forked(int(answer), settings.own_folder / "exit", self.process)

    def _ask(self, order: str) -> str:
        """The server's answer to a line; "" where it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(order + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.process.stdout.readline()


@dataclass(frozen=True)
class Forked:
    """A process that the server has forked.

    Attributes:
        number: of the process.
        path: of the file into which the server writes its exit code.
        server: that does so; what it has forked ends with it.
    """

    number: int
    path: Path
    server: subprocess.Popen[str]

    def poll(self) -> int | None:
        """Its exit code; None as long as it runs.

        Raises:
            ServerDied: nobody writes it down any more.
        """
        text = _read(self.path)
        code = None if text else self.server.poll()
        if code is not None:
            raise ServerDied(code)
        return int(text) if text else None

    def kill(self) -> None:
        """End it, and all that it started; wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.number, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(_LOOK / 10)


def run(server: Server, settings: Settings, patience: Patience, together: int = 0) -> list[Ending]:
    """Run a script in ``settings.world`` processes, and say how each ended.

    Args:
        server: starts processes.
        settings: of all of them.
        patience: how long that may take.
        together: how many run at a time, behind rank 0 alone; 0: all.
    """
    port = _free_port()
    ranks = [replace(settings, rank=rank, port=port) for rank in range(settings.world)]
    groups = [ranks]
    if together:
        groups = [ranks[:1], *(ranks[first : first + together] for first in range(1, len(ranks), together))]
    return [ending for group in groups for ending in _run(server, group, patience)]


def _run(server: Server, ranks: Sequence[Settings], patience: Patience) -> list[Ending]:
    processes = [server.start(each) for each in ranks]
    folders = [each.own_folder for each in ranks]
    try:
        stuck = _wait(processes, folders, patience)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [_ending(folder, process.poll(), stuck) for folder, process in zip(folders, processes, strict=True)]


def _free_port() -> int:
    """A port at which nobody listens: the ranks meet at a file, and scripts may look whether it is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _environ(settings: Settings) -> dict[str, str]:
    """The variables of a rank, as torchrun sets them."""
    return {
        "RANK": str(settings.rank),
        "LOCAL_RANK": str(settings.rank),
        "WORLD_SIZE": str(settings.world),
        "LOCAL_WORLD_SIZE": str(settings.world),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(settings.port),
        "TORCHELASTIC_RUN_ID": "verify",
    }


def _wait(processes: Sequence[Forked], folders: Sequence[Path], patience: Patience) -> bool:
    """Wait for processes; True where they have to be ended, since nothing moves any more."""
    begun = moved = time.monotonic()
    sizes: list[int] = []
    while any(process.poll() is None for process in processes):
        time.sleep(_LOOK)
        now = time.monotonic()
        found = [_size(folder / "events.jsonl") for folder in folders]
        if found != sizes:
            sizes, moved = found, now
        silent = now - moved
        if silent > patience.silence or now - begun > patience.whole:
            return True
        if silent > _DEADLOCK and _is_deadlock(processes, folders):
            return True
    return False


def _is_deadlock(processes: Sequence[Forked], folders: Sequence[Path]) -> bool:
    """Whether ranks wait for others in collectives that do not fit together, or that have ended."""
    waits = [_waits(folder) for folder in folders]
    names = {name for name in waits if name}
    ended = any(process.poll() is not None for process in processes)
    return len(names) > 1 or (bool(names) and ended)


def _waits(folder: Path) -> str:
    """The collective in which a rank is; "" for none."""
    lines = _read(folder / "events.jsonl").splitlines()
    event: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return f"{event['name']} {event['number']}" if event.get("kind") == "collective" else ""


def _ending(folder: Path, code: int | None, stuck: bool) -> Ending:
    path = folder / "end.json"
    if path.exists():
        return Ending(**json.loads(path.read_text()))
    if stuck:
        return Ending("stuck")
    if code is not None and code < 0:
        return Ending("killed", message=signal.Signals(-code).name)
    lines = _read(folder / "stderr").strip().splitlines()
    return Ending("failed", message=lines[-1] if lines else f"exit code {code}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
