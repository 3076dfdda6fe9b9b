"""This process as a rank under its node's supervisor: started here by local rank 0, found by the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING

from lockstep.cluster.world import World
from lockstep.ground.fork_and_exit import flush_open_files
from lockstep.ground.installed import EXIT_SUPERVISOR
from lockstep.ground.rank import log
from lockstep.launch.environment import started_in
from lockstep.launch.parent_death import PARENT
from lockstep.supervise import status
from lockstep.supervise.channel import Channel, Message, caller
from lockstep.supervise.mailbox import MAILBOX, Mailbox, leave_note
from lockstep.supervise.signals import HANDLED, SignalPipe

if TYPE_CHECKING:
    from torch.distributed import Store

OFF = "LOCKSTEP_SUPERVISE"
"""The variable that, at 0, has ranks of a launcher do without a supervisor."""

PATIENCE = 30.0
"""Seconds after which a script that has ended says which ranks it waits for."""

STARTING = 60
"""Seconds that a supervisor gets to start: Python may lie on a disk that is far away."""

ONE_SCREEN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID", "JSM_NAMESPACE_SIZE")
"""Variables of launchers that bring together on one screen what the nodes print."""

MEETING = 10.0
"""Seconds in which a rank of a launcher looks for its node's supervisor; it does not wait for it."""

FAREWELL = 2.0
"""Seconds that a rank of a launcher which has failed waits for the first cause to be on the screen."""

_BOOT = """
import json, sys, types
order = json.loads(sys.argv[1])
sys.prefix, sys.exec_prefix = order["prefixes"]
sys.path += [path for path in order["paths"] if path not in sys.path]
package = sys.modules["lockstep"] = types.ModuleType("lockstep")
package.__path__ = [order["folder"]]
from lockstep.supervise.supervisor import main
main(*order["descriptors"])
"""
# Isolated, without the user's own start-up code, and with a package that does not import what lockstep's does.


class Supervised:
    """Local rank 0's side of its supervisor.

    Args:
        world: of this process; with a port.
        command: of the other ranks, where they are to be started.
        environ: for them.

    Attributes:
        address: of the mailbox.
        listening: a context in which the supervisor hears of Ctrl-C, also while this process waits in a collective.
    """

    def __init__(
        self, world: World, command: list[str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._world = world
        self._starts = command is not None
        self._process = os.getpid()
        self._mailbox = Mailbox()
        self._signal_pipe = SignalPipe()
        self.address = self._mailbox.address
        self.listening: Callable[[], AbstractContextManager[None]] = (
            self._signal_pipe.listening if self._starts else nullcontext
        )
        self._answers: dict[str, Message] = {}
        self._answered = threading.Condition()
        self._over = False
        here, there = socket.socketpair()
        self._channel = Channel(here)
        self._supervisor = _start(there, self._mailbox, self._signal_pipe)
        there.close()
        environ = {} if environ is None else {**environ, MAILBOX: self.address}
        with self._channel.patient(STARTING):  # an environment may be larger than what waits in a socket
            self._channel.send(
                {
                    "process": self._process,
                    "rank": world.rank,
                    "size": world.size,
                    "local_size": world.local_size,
                    "node": world.node_rank,
                    "nodes": world.num_nodes,
                    "command": command,
                    "environ": environ,
                    "parent": PARENT,
                    "folder": started_in,
                    "name": "" if self._starts else meeting_name(world),
                    "scheduled": "SLURM_JOB_ID" in os.environ,
                    "one_screen": any(name in os.environ for name in ONE_SCREEN),
                }
            )
        _leaving.append(self._finish)
        threading.Thread(target=self._hear, name="lockstep-supervised", daemon=True).start()

    def open_hub(self) -> tuple[int, str] | None:
        """On the first node: the port where its supervisor listens for those of the others, and the word they need."""
        self._channel.send({"say": "hub", "address": self._world.address})
        answer = self._answer("hub", MEETING)
        return None if answer is None else (answer["port"], answer["token"])

    def join_hub(self, address: str, port: int, token: str) -> None:
        """On another node: tell the supervisor where the first node's listens."""
        self._channel.send({"say": "join", "address": address, "port": port, "token": token})

    def _hear(self) -> None:
        """In a thread: do what the supervisor says."""
        while (message := self._channel.receive()) is not None:
            if message["do"] == "end":
                self._end(message["text"], message["code"])
            with self._answered:
                self._over = self._over or message["do"] == "go"  # its end is no failure from now on
                self._answers[message["do"]] = message
                self._answered.notify_all()
        if not self._over and self._starts and os.getpid() == self._process:
            code = self._supervisor.wait()
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            text = f"lockstep: the supervisor of the ranks (process {self._supervisor.pid}) was {how}, and they with it"
            self._end(text, 1)
        with self._answered:
            self._over = True
            self._answered.notify_all()

    def _end(self, text: str, code: int) -> None:
        """Have a text be the last on the screen, and end this process."""
        for worker in multiprocessing.active_children():  # of a loader, say
            worker.kill()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it any more, or there is none
            sys.stdout.flush()
        flush_open_files()
        self._channel.send({"say": "acts"})
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="replace") if text else b"")
        os._exit(code)

    def _answer(self, kind: str, seconds: float | None) -> Message | None:
        """Wait for an answer; None if it has not come in time, or never will."""
        with self._answered:
            self._answered.wait_for(lambda: kind in self._answers or self._over, seconds)
            return self._answers.get(kind)

    def _finish(self) -> None:
        """When this process ends: wait for the others; where something has failed, this does not come back."""
        if os.getpid() != self._process:  # a process that was forked here
            return
        if not self._starts:
            if _take_leave(self._channel, self.address, self._world.rank):
                self._answer("go", FAREWELL)
            return
        self._channel.send(_last_word(self._world.rank))
        try:
            if self._answer("go", PATIENCE) is None and not self._over:
                self._channel.send({"say": "running"})
                running = self._answer("running", MEETING)
                log.info("waiting for ranks %s to end", running and running["ranks"])
                self._answer("go", None)
        except KeyboardInterrupt:
            self._channel.send({"say": "stop"})
            self._answer("go", PATIENCE)
        self._over = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(PATIENCE)


def _start(channel: socket.socket, notes: Mailbox, signal_pipe: SignalPipe) -> subprocess.Popen[bytes]:
    handed = [channel.fileno(), notes.descriptor, signal_pipe.fileno()]
    order = {
        "prefixes": [sys.prefix, sys.exec_prefix],
        "paths": [path for path in sys.path if isinstance(path, str)],  # a Path, say, is ignored by Python, too
        "folder": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        "descriptors": handed,
    }
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)  # they wait until it has its handlers
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, json.dumps(order)], stdin=subprocess.DEVNULL, pass_fds=handed
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- ranks that somebody else has started ------------------------------------------------------------------


def meeting_name(world: World, environ: Mapping[str, str] = os.environ) -> str:
    """The name under which the ranks of a node find its supervisor: of this node, run and attempt, and no other."""
    names = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_RESTART_COUNT",
    )
    words = [world.address, world.port, world.size, world.node_rank, *(environ.get(name) for name in names)]
    return f"lockstep-{os.getuid()}-{hashlib.sha256(repr(words).encode()).hexdigest()[:24]}"


class FoundSupervisor:
    """Another local rank's side of the supervisor that local rank 0 has started.

    Args:
        world: of this process.

    Attributes:
        address: of the mailbox; "" as long as the supervisor is not found.
    """

    def __init__(self, world: World) -> None:
        self.address = ""
        self.listening = nullcontext
        self._world = world
        self._process = os.getpid()
        self._channel: Channel | None = None
        self._told = threading.Event()
        self._come = threading.Event()
        self._seek = threading.Thread(target=self._find, name="lockstep-supervised", daemon=True)
        self._seek.start()
        self._come.wait(0.5)
        _leaving.append(self._finish)

    def _find(self) -> None:
        """In a thread: look for it, and hear what it says."""
        name, until = "\0" + meeting_name(self._world), time.monotonic() + MEETING
        while time.monotonic() < until and self._channel is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(name)
            except OSError:
                connection.close()
                time.sleep(0.05)
                continue
            if not caller(connection):  # another user has taken the name, and would hand out a mailbox of its own
                connection.close()
                return
            self._channel = Channel(connection)
        if self._channel is None:
            return
        message, descriptor = self._channel.receive_with_file()
        if message is None or descriptor is None:
            return
        self._channel.send({"rank": self._world.rank})
        self.address = Mailbox(descriptor).address
        status.report_to(self.address)
        self._come.set()
        while (message := self._channel.receive()) is not None:
            if message["do"] == "go":
                self._told.set()
        self._told.set()

    def _finish(self) -> None:
        if os.getpid() != self._process or self._channel is None or not self.address:
            return
        if _take_leave(self._channel, self.address, self._world.rank):
            self._told.wait(FAREWELL)


def _last_word(rank: int) -> Message:
    """That this process' script has come to its end, and what ended it, if something did."""
    error = getattr(sys, "last_value", None)
    cause = None if error is None else asdict(status.note_on(error, rank))
    return {"say": "left", "at": time.monotonic(), "cause": cause}


def _take_leave(channel: Channel, address: str, rank: int) -> bool:
    """At the end of a process that somebody else has started: note how it ends, for a supervisor that cannot ask.

    Returns:
        whether it has failed, and waits for the supervisor to print the first cause.
    """
    word = _last_word(rank)
    leave_note(address, {"left": rank, "code": 0 if word["cause"] is None else 1})
    return word["cause"] is not None and channel.send(word)


Side = Supervised | FoundSupervisor

_leaving: list[Callable[[], None]] = []
"""What the sides of this process do when it ends: one, or none."""


def _leave() -> None:
    for leave in _leaving:
        leave()


# At the import, and so behind what the script has put there: from its leave a rank 0 whose run has failed does not come
# back.
EXIT_SUPERVISOR.at_exit(_leave)


def at_launcher(world: World, environ: Mapping[str, str] = os.environ) -> Side | None:
    """The supervisor's side of a rank that somebody else has started; None where there is to be no supervisor."""
    if world.size == 1 or environ.get(OFF) == "0":
        return None
    try:
        if world.local_rank == 0:
            return Supervised(world)
        return FoundSupervisor(world) if sys.platform.startswith("linux") else None
    except OSError:  # no more processes may be started: the run can do without
        return None


def meet_nodes(side: Side | None, world: World, store: Store) -> None:
    """Have the supervisors of several nodes find each other, through the store where their ranks have met.

    Args:
        side: this process' side of its supervisor; None: it has none.
        world: of this process.
        store: of the meeting, with ``set`` and ``get``. All local ranks 0 must come here.
    """
    if world.num_nodes == 1 or world.local_rank:
        return
    key = "lockstep/supervisors"
    if world.node_rank == 0:
        location = side.open_hub() if isinstance(side, Supervised) else None
        store.set(key, "" if location is None else f"{location[0]} {location[1]}")
        return
    port, _, token = store.get(key).decode().partition(" ")
    if token and isinstance(side, Supervised):
        side.join_hub(world.address, int(port), token)
