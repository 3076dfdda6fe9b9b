"""A rank's connection to its node's supervisor. Local rank 0 starts the supervisor, and other ranks connect."""

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
from lockstep.ground.rank import log
from lockstep.launch.environment import started_in
from lockstep.launch.parent_death import PARENT
from lockstep.supervise import status
from lockstep.supervise.channel import Channel, Message, peer_process
from lockstep.supervise.mailbox import MAILBOX, Mailbox, leave_note
from lockstep.supervise.signals import HANDLED, SignalPipe

if TYPE_CHECKING:
    from torch.distributed import Store

OFF = "LOCKSTEP_SUPERVISE"
"""Environment variable that, if 0, turns supervision off for ranks that a launcher started."""

END_TIMEOUT = 30.0
"""Seconds after which a script that has ended logs which ranks it waits for."""

START_TIMEOUT = 60
"""Seconds that a supervisor has to start. Python may be installed on a slow network disk."""

ONE_SCREEN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_ID", "JSM_NAMESPACE_SIZE")
"""Variables of launchers that collect the output of all nodes on one terminal."""

SUPERVISOR_TIMEOUT = 10.0
"""Seconds for which a rank of a launcher searches for its node's supervisor, in a thread."""

PRINT_TIMEOUT = 2.0
"""Seconds that a failed rank of a launcher waits until the first cause is printed."""

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
# Isolated mode, without the user's startup code. The package object is a bare one, so that lockstep's own imports are
# not run.


class Supervised:
    """Connection of local rank 0 to the supervisor, which this class starts.

    Args:
        world: world of this process, with a port.
        command: command that starts the other ranks; None if a launcher starts them.
        environ: environment of the other ranks.

    Attributes:
        address: address of the mailbox.
        listening: context in which the supervisor receives Ctrl-C, even while this process waits in a collective.
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
        self._replies: dict[str, Message] = {}
        self._reply_arrived = threading.Condition()
        self._is_over = False
        here, there = socket.socketpair()
        self._channel = Channel(here)
        self._supervisor = _start(there, self._mailbox, self._signal_pipe)
        there.close()
        environ = {} if environ is None else {**environ, MAILBOX: self.address}
        # an environment may exceed the socket's buffer
        with self._channel.patient(START_TIMEOUT):
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
                    "name": "" if self._starts else socket_name(world),
                    "scheduled": "SLURM_JOB_ID" in os.environ,
                    "one_screen": any(name in os.environ for name in ONE_SCREEN),
                }
            )
        status.at_exit.append(self._finish)
        threading.Thread(target=self._receive, name="lockstep-supervised", daemon=True).start()

    def open_hub(self) -> tuple[int, str] | None:
        """On the first node, return (port, token), with which other nodes connect to the supervisor."""
        self._channel.send({"say": "hub", "address": self._world.address})
        reply = self._await_reply("hub", SUPERVISOR_TIMEOUT)
        return None if reply is None else (reply["port"], reply["token"])

    def join_hub(self, address: str, port: int, token: str) -> None:
        """On other nodes, connect this node's supervisor to the supervisor of the first node."""
        self._channel.send({"say": "join", "address": address, "port": port, "token": token})

    def _receive(self) -> None:
        """Receive the supervisor's messages and carry out its commands. Runs in a thread."""
        while (message := self._channel.receive()) is not None:
            if message["do"] == "end":
                self._end(message["text"], message["code"])
            with self._reply_arrived:
                if message["do"] == "go":
                    # from now on, the supervisor's end is not a failure
                    self._is_over = True
                self._replies[message["do"]] = message
                self._reply_arrived.notify_all()
        if not self._is_over and self._starts and os.getpid() == self._process:
            code = self._supervisor.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            text = f"lockstep: the supervisor (process {self._supervisor.pid}) {how}, so all ranks were ended"
            self._end(text, 1)
        with self._reply_arrived:
            self._is_over = True
            self._reply_arrived.notify_all()

    def _end(self, text: str, code: int) -> None:
        """Print ``text`` as the run's last line on the terminal, and exit this process with ``code``."""
        # workers of a data loader, for instance
        for worker in multiprocessing.active_children():
            worker.kill()
        # the reader is gone, or stdout is missing
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        flush_open_files()
        self._channel.send({"say": "acts"})
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="replace") if text else b"")
        os._exit(code)

    def _await_reply(self, kind: str, seconds: float | None) -> Message | None:
        """Wait for a reply from the supervisor. Return None after ``seconds``, or if the supervisor is gone."""
        with self._reply_arrived:
            self._reply_arrived.wait_for(lambda: kind in self._replies or self._is_over, seconds)
            return self._replies.get(kind)

    def _finish(self) -> None:
        """At this process' exit, wait until the supervisor permits the exit. Do not return if the run has failed."""
        if os.getpid() != self._process:  # a forked child
            return
        if not self._starts:
            if _report_end(self._channel, self.address, self._world.rank):
                self._await_reply("go", PRINT_TIMEOUT)
            return
        self._channel.send(_end_note(self._world.rank))
        try:
            if self._await_reply("go", END_TIMEOUT) is None and not self._is_over:
                self._channel.send({"say": "running"})
                running = self._await_reply("running", SUPERVISOR_TIMEOUT)
                log.info("waiting for ranks %s to end", running and running["ranks"])
                self._await_reply("go", None)
        except KeyboardInterrupt:
            self._channel.send({"say": "stop"})
            self._await_reply("go", END_TIMEOUT)
        self._is_over = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(END_TIMEOUT)


def _start(channel: socket.socket, notes: Mailbox, signal_pipe: SignalPipe) -> subprocess.Popen[bytes]:
    handed = [channel.fileno(), notes.descriptor, signal_pipe.fileno()]
    order = {
        "prefixes": [sys.prefix, sys.exec_prefix],
        # Python ignores other entries, too
        "paths": [path for path in sys.path if isinstance(path, str)],
        "folder": os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        "descriptors": handed,
    }
    flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    # a signal before the supervisor has its handlers would end it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    try:
        return subprocess.Popen(
            [sys.executable, *flags, "-c", _BOOT, json.dumps(order)], stdin=subprocess.DEVNULL, pass_fds=handed
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- ranks started by a launcher ---------------------------------------------------------------------------


def socket_name(world: World, environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the socket at which a node's ranks find their supervisor in this attempt at a run."""
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
    """Connection of a local rank other than 0 to the supervisor that local rank 0 has started.

    Args:
        world: world of this process.

    Attributes:
        address: address of the mailbox; "" until the supervisor is found.
    """

    def __init__(self, world: World) -> None:
        self.address = ""
        self.listening = nullcontext
        self._world = world
        self._process = os.getpid()
        self._channel: Channel | None = None
        self._may_exit = threading.Event()
        self._has_address = threading.Event()
        self._search = threading.Thread(target=self._find, name="lockstep-supervised", daemon=True)
        self._search.start()
        self._has_address.wait(0.5)
        status.at_exit.append(self._finish)

    def _find(self) -> None:
        """Connect to the supervisor as soon as it listens, and receive its messages. Runs in a thread."""
        name, until = "\0" + socket_name(self._world), time.monotonic() + SUPERVISOR_TIMEOUT
        while time.monotonic() < until and self._channel is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(name)
            except OSError:
                connection.close()
                time.sleep(0.05)
                continue
            # another user has taken the name and would send a mailbox of their own
            if not peer_process(connection):
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
        self._has_address.set()
        while (message := self._channel.receive()) is not None:
            if message["do"] == "go":
                self._may_exit.set()
        self._may_exit.set()

    def _finish(self) -> None:
        if os.getpid() != self._process or self._channel is None or not self.address:
            return
        if _report_end(self._channel, self.address, self._world.rank):
            self._may_exit.wait(PRINT_TIMEOUT)


def _end_note(rank: int) -> Message:
    """Return the message that reports the end of this process' script, with the error if the script failed."""
    error = getattr(sys, "last_value", None)
    cause = None if error is None else asdict(status.record_for(error, rank))
    return {"say": "left", "at": time.monotonic(), "cause": cause}


def _report_end(channel: Channel, address: str, rank: int) -> bool:
    """Report how this process ends to a supervisor that cannot read the exit code of this process.

    Returns:
        True if the process failed and has to wait until the supervisor has printed the first cause.
    """
    word = _end_note(rank)
    leave_note(address, {"left": rank, "code": 0 if word["cause"] is None else 1})
    return word["cause"] is not None and channel.send(word)


Side = Supervised | FoundSupervisor


def at_launcher(world: World, environ: Mapping[str, str] = os.environ) -> Side | None:
    """Connect a rank that an external launcher started to its node's supervisor. Local rank 0 starts the supervisor.

    Return None if the run has no supervision.
    """
    if world.size == 1 or environ.get(OFF) == "0":
        return None
    try:
        if world.local_rank == 0:
            return Supervised(world)
        return FoundSupervisor(world) if sys.platform.startswith("linux") else None
    except OSError:  # process limit reached: the run works without a supervisor
        return None


def connect_nodes(side: Side | None, world: World, store: Store) -> None:
    """Connect the supervisors of all nodes, whose addresses are exchanged through the ranks' store.

    Every local rank 0 must call it.

    Args:
        side: this process' connection to its supervisor; None without a supervisor.
        world: world of this process.
        store: store of the rendezvous, with ``set`` and ``get``.
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
