"""The twelve failures and the twelve hangs: what is started, which rank is to be named, and at which line."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from .watched import Command

SCRIPTS = Path(__file__).resolve().parent / "scripts"
DDP, SPAWN, TORCHRUN, NODES = "python", "python, ddp_spawn", "torchrun", "python, on 2 nodes"
"""How a run is started."""
LIGHTNING = "lightning.pytorch"


@dataclass(frozen=True)
class Failure:
    """One rank fails."""

    name: str  #: for people
    case: str  #: what the script is told, and what marks its line
    rank: int = 1  #: that fails
    says: str = ""  #: where no frame raises: what the last line has to say beside the rank
    start: str = DDP
    devices: int = 2  #: on each node

    @property
    def key(self) -> str:
        """Of this run among the others."""
        return f"{self.name} ({self.start})"

    @property
    def place(self) -> str:
        """``"fails.py:81"``, the line that raises; "" where none does."""
        return "" if self.says else marked("fails.py", self.case)


@dataclass(frozen=True)
class Hang:
    """Ranks do not do the same, and wait for one another."""

    name: str  #: for people
    case: str  #: what the script is told
    where: Mapping[int, str] = field(default_factory=dict)  #: by rank that is to be named: what marks its line
    is_busy: bool = False  #: whether a rank is busy outside a collective, which ends no run
    start: str = DDP

    @property
    def key(self) -> str:
        """Of this run among the others."""
        return f"{self.name} ({self.start})"

    @property
    def is_harmless(self) -> bool:
        """Whether nobody has to wait, and the run goes on to its end."""
        return not self.where

    @property
    def places(self) -> dict[int, str]:
        """The lines at which ranks are to be named."""
        return {rank: marked("strays.py", mark) for rank, mark in self.where.items()}


FAILURES = [
    Failure("exception", "exception"),
    Failure("SIGKILL", "killed", says="SIGKILL"),
    Failure("SIGSTOP", "stopped", says="stopped|SIGSTOP"),
    Failure("`os._exit(0)`", "exit", says="exit code 0"),
    Failure("out of memory, killed", "memory", says="SIGKILL"),
    Failure("exception in a loader worker", "worker"),
    Failure("exception in a callback", "callback"),
    Failure("exception before the first collective", "early"),
    Failure("exception during a save", "save", rank=0),
    Failure("exception on rank 0", "exception", rank=0),
    Failure("exception on the last rank", "exception", rank=2, start=SPAWN, devices=3),
    Failure("exception on another node", "exception", rank=3, start=NODES),
]

ELSEWHERE = [
    Failure("exception", "exception", start=SPAWN),
    Failure("SIGKILL", "killed", says="SIGKILL", start=SPAWN),
    Failure("SIGSTOP", "stopped", says="stopped|SIGSTOP", start=SPAWN),
    Failure("exception in a loader worker", "worker", start=SPAWN),
    Failure("exception", "exception", start=TORCHRUN),
    Failure("SIGKILL", "killed", says="SIGKILL", start=TORCHRUN),
    Failure("SIGSTOP", "stopped", says="stopped|SIGSTOP", start=TORCHRUN),
    Failure("SIGKILL", "killed", rank=3, says="SIGKILL", start=NODES),
]
"""Some of them, started in other ways."""

HANGS = [
    Hang("one rank logs with `sync_dist=True`, the other does not", "log"),
    Hang("a barrier on rank 0 only", "barrier", {0: "barrier", 1: "fit"}),
    Hang("one rank breaks early from a loop of collectives", "break", {0: "break", 1: "fit"}),
    Hang("another shape", "shape", {0: "shape", 1: "shape"}),
    Hang("another order", "order", {0: "order on rank 0", 1: "order on rank 1"}),
    Hang("a collective under `if is_global_zero`", "zero", {0: "zero", 1: "fit"}),
    Hang("a sleeping loader", "loader", {1: "loader"}, is_busy=True),
    Hang("a stopped rank", "stopped", {1: "stopped"}, start=TORCHRUN),
    Hang("a callback that returns early on one rank", "callback", {0: "callback", 1: "fit"}),
    Hang("a save on rank 0 only", "save", {0: "save", 1: "fit"}),
    Hang("a user's own all_reduce on one rank", "own", {0: "fit", 1: "own"}),
    Hang("FSDP2 with a layer skipped on one rank", "fsdp", {0: "fsdp on rank 0", 1: "fsdp on rank 1"}),
]


NODES_FAILURES = [
    replace(row, start=NODES, devices=1, rank=min(row.rank, 1))
    for row in FAILURES
    if row.start == DDP and row.case != "early"  # one that fails before it says that it is a rank: no node knows of it
]
NODES_HANGS = [replace(row, start=NODES) for row in HANGS]
"""All rows on two nodes, of one rank each."""


def marked(script: str, mark: str) -> str:
    """File and line that a comment marks in a script of this folder, ``"fails.py:81"``."""
    lines = (SCRIPTS / script).read_text().splitlines()
    numbers = [at for at, line in enumerate(lines, 1) if re.search(rf"# (.*, )?{mark}(,|$)", line)]
    if len(numbers) != 1:
        raise ValueError(f"{script} marks {len(numbers)} lines as {mark!r}")
    return f"{script}:{numbers[0]}"


def free_port() -> int:
    """One on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def started(start: str, script: str, words: list[str], environ: Mapping[str, str], devices: int = 2) -> list[Command]:
    """What a user types to start a script in one of the ways; one command for each node.

    Args:
        start: the way.
        script: of this folder.
        words: what the script is told.
        environ: further variables.
        devices: on each node.
    """
    python = [sys.executable, str(SCRIPTS / script), *words, "--devices", str(devices)]
    if start == DDP:
        return [Command(python, environ)]
    if start == SPAWN:
        return [Command([*python, "--strategy", "ddp_spawn"], environ)]
    if start == TORCHRUN:
        runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        return [Command([*runner, *python[1:]], environ)]
    if start == NODES:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environ}
        return [Command([*python, "--nodes", "2"], {**meeting, "NODE_RANK": str(node)}) for node in (0, 1)]
    raise ValueError(f"no way to start a run is called {start!r}")


def of_failure(failure: Failure, library: str = "lockstep", memory: str = "") -> list[Command]:
    """The commands of a failure.

    Args:
        failure: which.
        library: whose Trainer.
        memory: folder of a control group with a limit of memory; "" where there is none.
    """
    words = [failure.case, "--rank", str(failure.rank)]
    return started(failure.start, "fails.py", words, {"LIBRARY": library, "MEMORY": memory}, failure.devices)


def of_hang(hang: Hang, timeout: float, library: str = "lockstep") -> list[Command]:
    """The commands of a hang; ``timeout`` is the Trainer's ``hang_timeout``."""
    words = [hang.case, "--timeout", str(timeout)]
    return started(hang.start, "strays.py", words, {"LIBRARY": library}, 1 if hang.start == NODES else 2)
