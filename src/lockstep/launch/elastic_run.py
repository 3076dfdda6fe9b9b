"""``lockstep run``: an agent, derived from torch's, that starts a node's ranks and restarts them after failures."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous

from lockstep.cluster.local import on_one_host
from lockstep.cluster.rendezvous import listen
from lockstep.cluster.torchelastic import CAUSE, STARTED
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch import parent_death
from lockstep.launch.attempts import AGENT, RECORDS, RESUME, RUN, remove_records
from lockstep.launch.environment import ReservedPort, names_variables, site_variable
from lockstep.launch.parent_death import PARENT
from lockstep.launch.processes import Ended
from lockstep.supervise.screen_text import one_line, wipe_line

CAUSE_TIMEOUT = 3.0
"""Seconds that the agent waits for a cause that a supervisor has promised."""

FOLDERS = "lockstep-agent-"
"""Prefix of the agents' folders, in the system's folder for temporary files."""

FRESH = 60.0
"""Seconds for which such a folder may be new and not locked by its agent yet."""

REACH_TIMEOUT = 60
"""Seconds within which an agent has to reach the node of the rendezvous."""

OWN_PORTS = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Torch's variable that gives each attempt a store and a port of its own."""

HERE = "127.0.0.1"
"""Address of this node if it is the only one."""

ENDED_ELSEWHERE = "another node has ended the run; the reason is in its output"

PASSED_ON = ("SIGUSR1", "SIGUSR2")
"""Signals that are passed on to the ranks, and do not end the agent."""


@dataclass(frozen=True)
class LaunchPlan:
    """Parsed options of ``lockstep run``: the script, the ranks and nodes, the rendezvous, and restarts."""

    words: tuple[str, ...]  #: the script and its arguments, as after ``python``
    name: str  #: name of the run, the same for the same command
    devices: int  #: number of ranks on this node
    nodes: tuple[int, int] = (1, 1)  #: minimum and maximum number of nodes
    node_rank: int | None = None  #: rank of this node. The rendezvous is on node 0, which has rank 0
    address: str | None = None  #: address of the rendezvous; None: this node
    port: int = 0  #: port of the rendezvous; 0: a free one
    local_address: str | None = None  #: address of this node for the others; None: its host name
    run_id: str = "lockstep"  #: id of the rendezvous, the same on all nodes
    max_restarts: int = 0
    resume: bool = False
    patience: int = 600  #: seconds to wait for the other nodes
    grace: int = 30  #: seconds that ranks have to end
    lightning: bool = False  #: whether Lightning's import names are lockstep's in the ranks
    by_script: bool = False  #: whether the script's own Trainer starts the ranks, without an agent

    @property
    def alone(self) -> bool:
        """True if the run has exactly one node."""
        return self.nodes == (1, 1)

    @property
    def flags(self) -> str:
        """The command-line options that determine the number of ranks."""
        few, most = self.nodes
        nodes = "" if self.alone else f" --nodes {few}" if few == most else f" --nodes {few}:{most}"
        return f"--devices {self.devices}{nodes}"


class Agent(LocalElasticAgent):
    """Agent of ``lockstep run``: torch's elastic agent, which also prints a line for each restart.

    Args:
        folder: folder of the files that ranks pass to the agent.
        grace: seconds that ranks have to end.
        spec: arguments for torch's agent.
        options: further arguments for torch's agent.
    """

    def __init__(self, folder: Path, grace: int, spec: WorkerSpec, **options: Any) -> None:
        super().__init__(spec, **options)
        self._folder, self._grace = folder, grace
        self._started = 0
        self._result: RunResult | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._started += 1
        self._result = None
        os.environ[CAUSE] = str(self._folder / f"cause-{self._started}")
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            self._result = result
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._result is None:
            print_line("a node has joined or left, or has restarted its ranks: all ranks are restarted")
        else:
            left = self._remaining_restarts
            print_line(f"{self.cause()}; all ranks are restarted ({left or 'no'} restart{'s' * (left != 1)} left)")
        super()._restart_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if self._pcontext is not None:  # torch 2.11 always waits 30 s
            self._pcontext.close(death_sig, self._grace)
        super()._shutdown(death_sig)

    def cause(self) -> str:
        """Return the failure's cause that a supervisor reported first, or else a description of the exit codes."""
        path = Path(os.environ[CAUSE])
        until = time.monotonic() + CAUSE_TIMEOUT * path.with_name(f"{path.name}.promised").exists()
        while True:
            with contextlib.suppress(OSError):
                return path.read_text()
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        if self._result is None or not self._result.failures:
            return "the ranks of this node hang in a system call and cannot be ended"
        return _describe_first(self._result.failures)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Pass a received signal on to the ranks. For use as a signal handler."""
        context = self._pcontext
        for process in () if context is None else context.pids().values():
            with contextlib.suppress(OSError):
                os.killpg(process, number)


def _describe_first(failures: Mapping[int, ProcessFailure]) -> str:
    """Describe the failure that is most likely the first, from the ranks' exit codes.

    A rank that was killed counts before a rank that failed with an exception. Ranks that were killed by SIGTERM do not
    count if others failed, because the agent ended them.
    """
    by_itself = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    ends = by_itself or failures
    killed = [rank for rank, failure in ends.items() if failure.exitcode < 0]
    # exceptions of the other ranks are usually consequences
    rank = killed[0] if killed else next(iter(ends))
    failure = ends[rank]
    if killed or not os.path.isfile(failure.error_file):
        return str(Ended(rank, failure.pid, failure.exitcode, 0.0))
    return f"rank {rank} failed first: {one_line(failure.message)}"


def print_line(text: str) -> None:
    """Print a line on stderr."""
    wipe_line()
    with contextlib.suppress(OSError, ValueError):
        print(f"lockstep: {one_line(text, None)}", file=sys.stderr, flush=True)


def start(plan: LaunchPlan, environ: MutableMapping[str, str] = os.environ) -> int:
    """Start this node's ranks, restart them after failures, and return the exit code for ``lockstep run``.

    Raises:
        MisconfigurationException: this process is a rank itself, or the port is taken.
    """
    refuse_nested(environ)
    hosts = not plan.alone and _hosts_rendezvous(plan)
    if hosts:
        _check_port(plan)
    # LOGLEVEL is torch's variable: users who set it want to see the messages
    if "LOGLEVEL" not in os.environ:
        # torch's agent logs errors and prints a table of them, and the last line has to be the first cause
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    remove_old_folders(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS))
    lock = _lock(folder)
    try:
        environ.update(_variables(plan, folder, environ))
        agent = _agent(plan, hosts, folder)
        return _run(agent, folder)
    except RendezvousError as error:
        print_line(_rendezvous_failure(plan, error))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def start_script(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process with one that runs the script under Lightning's import names.

    The Trainer in the script starts the ranks.

    Raises:
        MisconfigurationException: this process is a rank itself.
    """
    refuse_nested(environ)
    os.execve(sys.executable, [sys.executable, "-m", "lockstep.lightning", *plan.words], dict(environ))


def remove_old_folders(temporary: Path) -> None:
    """Remove the folders that killed agents have left in the system's folder for temporary files.

    Args:
        temporary: the system's folder for temporary files.
    """
    for folder in temporary.glob(f"{FOLDERS}*"):
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < FRESH:
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until this process ends, and return the lock's descriptor; None if the folder cannot be locked."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def refuse_nested(environ: Mapping[str, str]) -> None:
    """Raise an error if ``lockstep run`` was started inside a rank.

    Raises:
        MisconfigurationException: the environment variables mark this process as a rank.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
    if "TORCHELASTIC_RUN_ID" not in environ and not {"RANK", "LOCAL_RANK"} & environ.keys():
        return
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    there = " ".join(f"-u {name}" for name in (*names, "MASTER_ADDR", "MASTER_PORT", PARENT) if name in environ)
    raise MisconfigurationException(
        f"lockstep run: this process is a rank itself ({found}): start `lockstep run` once on each node, not by "
        f"torchrun or from a rank's script. If the variables are left over, remove them: env {there} lockstep run ..."
    )


def _variables(plan: LaunchPlan, folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the agent sets for its ranks."""
    found = {STARTED: plan.flags} | (on_one_host(HERE, environ) if plan.alone else {OWN_PORTS: "1"})
    found |= names_variables(environ) if plan.lightning else site_variable(environ)
    if plan.max_restarts or plan.resume:
        # an attempt at a job that SLURM has restarted belongs to the same run
        job = environ.get("SLURM_JOB_ID")
        of_slurm = f"slurm-{job}-{environ.get('SLURM_STEP_ID', '')}-{environ.get('SLURM_PROCID', '0')}"
        own = uuid.uuid4().hex[:12] if job is None else of_slurm
        found |= {RUN: plan.name, AGENT: own, RECORDS: str(folder / "records"), RESUME: str(int(plan.resume))}
    return found


def _hosts_rendezvous(plan: LaunchPlan) -> bool:
    """Return True if the rendezvous of several nodes listens on this node."""
    if plan.node_rank is not None:
        return plan.node_rank == 0
    assert plan.address is not None
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(plan.address, None)}
    except OSError:
        return False
    for address in found:
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, 0))  # only possible for an address of this host
            return True
    return False


def _check_port(plan: LaunchPlan) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", plan.port))
        except OSError as error:
            raise MisconfigurationException(
                f"lockstep run: --master-port {plan.port}: this host ({socket.gethostname()}) cannot listen on the "
                f"port of the rendezvous ({error.strerror}): choose another port on all nodes, or end processes of an "
                "earlier run"
            ) from None


def _agent(plan: LaunchPlan, hosts: bool, folder: Path) -> Agent:
    python = [sys.executable, *subprocess._args_from_interpreter_flags(), "-u"]  # type: ignore[attr-defined]
    spec = WorkerSpec(
        role="default",
        local_world_size=plan.devices,
        entrypoint=sys.executable,
        args=("-I", "-S", parent_death.__file__, str(os.getpid()), *python, *plan.words),
        rdzv_handler=OneNode(plan.run_id) if plan.alone else _rendezvous_of_nodes(plan, hosts),
        max_restarts=plan.max_restarts,
        monitor_interval=0.1,
        local_addr=HERE if plan.alone else plan.local_address,
    )
    return Agent(folder, plan.grace, spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder)))


def _rendezvous_of_nodes(plan: LaunchPlan, hosts: bool) -> RendezvousHandler:
    """Return the rendezvous handler for several nodes. With ``hosts``, the rendezvous listens on this node."""
    options = {
        "join_timeout": plan.patience,
        "last_call_timeout": 5,
        "read_timeout": REACH_TIMEOUT,
        "timeout": plan.patience,
    }
    endpoint = f"{plan.address}:{plan.port}"
    parameters = RendezvousParameters(
        "c10d", endpoint, plan.run_id, *plan.nodes, plan.local_address, is_host=hosts, **options
    )
    return InOrder(rendezvous.get_rendezvous_handler(parameters), plan.node_rank, plan.local_address)


def _run(agent: Agent, folder: Path) -> int:
    for name in PASSED_ON:
        signal.signal(getattr(signal, name), agent.pass_on)
    handler, done = agent.get_worker_group().spec.rdzv_handler, False
    try:
        result = agent.run()
        handler.shutdown()
        done = result is not None and not result.is_failed()
    except (KeyboardInterrupt, SignalException) as ended:
        # torch handles Ctrl-C only later
        number = getattr(ended, "sigval", signal.SIGINT)
        print_line("interrupted by Ctrl-C" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}")
        return int(128 + number)
    finally:
        with contextlib.suppress(OSError):
            for path in set((folder / "records").read_text().splitlines()):
                remove_records(path, done)
    if done:
        return 0
    if result is None:
        print_line(ENDED_ELSEWHERE)
        return 1
    print_line(agent.cause())
    codes = [failure.exitcode for failure in result.failures.values() if failure.exitcode != -signal.SIGTERM]
    code = next(iter(codes), 1)
    return int(code if code > 0 else 128 - code)


def _rendezvous_failure(plan: LaunchPlan, error: BaseException) -> str:
    """Return the message for a failed rendezvous, with its address and a remedy."""
    few = plan.nodes[0]
    place = f"--master-addr {plan.address} --master-port {plan.port}"
    reason = type(error).__name__
    if "Connection" in reason:
        return (
            f"node {plan.node_rank if plan.node_rank is not None else socket.gethostname()} could not reach {place} "
            f"within {REACH_TIMEOUT} s: check that `lockstep run --node-rank 0` runs there, and that the address is "
            "valid on this node"
        )
    if "Timeout" in reason:
        return (
            f"fewer than {few} nodes joined at {place} within {plan.patience} s (--patience): start the same command "
            f"on {few} nodes, with --node-rank 0 to {few - 1}, or lower --nodes"
        )
    if "Closed" in reason:
        return ENDED_ELSEWHERE
    return f"the rendezvous of the nodes at {place} failed: {error}"


class OneNode(RendezvousHandler):
    """Handler of a rendezvous on a single node, with a store that only processes on this host can reach.

    torch's own store listens on all network interfaces, where anybody can write to the store.

    Args:
        run_id: name of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        port = ReservedPort()
        self._store = TCPStore(
            HERE, port.number, None, is_master=True, wait_for_workers=False, master_listen_fd=listen(HERE, port.number)
        )
        port.close()
        self._round = 0
        self._closed = False

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Start the next round of the rendezvous. The agent calls this method before it starts or restarts ranks."""
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(HERE, self._store.port))

    def get_backend(self) -> str:
        return "one node"

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


class InOrder(RendezvousHandler):
    """Rendezvous handler that numbers the nodes in the order of ``--node-rank``, so that rank 0 is on the first node.

    torch orders the nodes by host names and process ids. The nodes exchange their numbers through torch's store of the
    round.

    Args:
        inner: torch's rendezvous handler.
        node_rank: the number that the user gave this node; None: none. Nodes without a number come last.
        address: address of this node for the others; None: its host name.
    """

    def __init__(self, inner: RendezvousHandler, node_rank: int | None, address: str | None) -> None:
        self._inner = inner
        self._node_rank = node_rank
        self._address = address

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all nodes have joined this round of the rendezvous, and return its result.

        Raises:
            RendezvousStateError: two nodes have the same number.
        """
        joined = self._inner.next_rendezvous()
        store = PrefixStore("lockstep", joined.store)
        store.set_timeout(timedelta(seconds=60))
        store.set(f"node-{joined.rank}", "" if self._node_rank is None else str(self._node_rank))
        given = [each.decode() for each in store.multi_get([f"node-{rank}" for rank in range(joined.world_size)])]
        twice = sorted({number for number in given if number and given.count(number) > 1})
        if twice:
            count = given.count(twice[0])
            raise RendezvousStateError(
                f"--node-rank {twice[0]} is used on {count} nodes: pass a different number on each"
            )
        order = sorted(range(joined.world_size), key=lambda rank: (not given[rank], int(given[rank] or 0), rank))
        rank = order.index(joined.rank)
        place = RendezvousStoreInfo.build(rank, store, self._address)
        return RendezvousInfo(joined.store, rank, joined.world_size, place)

    def get_backend(self) -> str:
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
