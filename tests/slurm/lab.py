"""A real SLURM of several virtual nodes on this machine: Debian's slurmctld and slurmd, without systemd.

    python -m tests.slurm.lab start [NODES]      afterwards: export SLURM_CONF=...
    python -m tests.slurm.lab crash|power-off|unplug|plug|boot NODE
    python -m tests.slurm.lab stop

Each node is a set of Linux namespaces: it has its own hostname, processes, /dev/shm and /etc/hosts, and where the
machine allows it its own network on a bridge. Disk and /tmp are shared by all. It needs root; the packages are
installed on Debian where they are missing (13 MB). Nothing is written outside the folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare")
NETWORK, BRIDGE = "10.78.0", "lockbr0"
CONTROL_PORT, NODE_PORT = 16917, 17100

CONFIG = """\
ClusterName=lab
SlurmctldHost={host}({control})
SlurmctldPort={control_port}
SlurmUser=root
# cred_expire is also how long a requeued job waits before it may start again: at least 5 s, by default 120
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
# all is quick, so that tests take seconds; Slurm's defaults are minutes
SlurmctldParameters=preempt_send_user_signal
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_interval=2
SlurmdTimeout=12
MessageTimeout=5
TCPTimeout=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MinJobAge=3600
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
NODE = "NodeName=node{i} NodeHostname=node{i} NodeAddr={address} Port={port} CPUs=8 RealMemory=64000 Gres=gpu:fake:8"


class NoSlurm(Exception):
    """There can be no SLURM on this machine; the reason."""


def why_not() -> str:
    """Why this machine can have no such cluster; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if missing() and not (Path("/etc/debian_version").exists() and shutil.which("apt-get")):
        return f"{', '.join(missing())} not installed, and this is no Debian"
    if subprocess.run(["unshare", "-umip", "--fork", "true"], capture_output=True).returncode:
        return "this machine allows no namespaces (CAP_SYS_ADMIN)"
    return ""


def missing() -> list[str]:
    """The programs that are not there."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Lab:
    """The cluster of this machine; there is one at a time.

    Args:
        folder: of its configuration, logs and state.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(tempfile.gettempdir()) / "lockstep-slurm"
        self.environ = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        for name in [name for name in self.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
            del self.environ[name]

    # -- up and down ---------------------------------------------------------------------------------------

    def start(self, nodes: int = 4) -> None:
        """Have it up with so many nodes; what runs already, stays.

        Raises:
            NoSlurm: that cannot be, here.
        """
        reason = why_not()
        if reason:
            raise NoSlurm(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        if missing():
            self._install()
        if not self._alive("slurmctld.pid"):
            self.stop()
            self._configure(nodes)
            self._start_control()
        for number in range(1, nodes + 1):
            if not self._alive(f"node{number}.pid"):
                self.boot(f"node{number}")
        self._await_nodes(nodes)

    def stop(self) -> None:
        """End what was started, by the ids that were noted; the jobs are forgotten."""
        for pid in [self.folder / "slurmctld.pid", *self.folder.glob("node*.pid"), self.folder / "munged.pid"]:
            if self._alive(pid.name):
                os.kill(int(pid.read_text()), signal.SIGKILL if pid.name.startswith("node") else signal.SIGTERM)
                self._await(lambda pid=pid: not self._alive(pid.name), 10)
            pid.unlink(missing_ok=True)
        for node in self.folder.glob("spool/node*"):
            _quietly("ip", "netns", "del", f"lock-{node.name}")
            _quietly("ip", "link", "del", _cable(node.name))
        _quietly("ip", "link", "del", BRIDGE)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _install(self) -> None:
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        policy = Path("/usr/sbin/policy-rc.d")  # keeps packages from starting daemons of their own
        made = not policy.exists()
        if made:
            policy.write_text("#!/bin/sh\nexit 101\n")
            policy.chmod(0o755)
        try:
            words = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES, "iproute2"]
            if subprocess.run(words, env=quiet, capture_output=True).returncode:
                subprocess.run(["apt-get", "update", "-qq"], env=quiet, capture_output=True)
                done = subprocess.run(words, env=quiet, capture_output=True, text=True)
                if done.returncode:
                    raise NoSlurm(f"its packages cannot be installed: {done.stderr.strip()[-300:]}")
        finally:
            if made:
                policy.unlink()

    def _configure(self, nodes: int) -> None:
        for name in ("state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for gpu in range(8):  # a character device each, or SLURM takes them for none
            (self.folder / "dev" / f"gpu{gpu}").symlink_to("/dev/null")
        own_network = _has_networks()
        (self.folder / "mode").write_text("network" if own_network else "shared")
        control = f"{NETWORK}.254" if own_network else "127.0.0.1"
        names = range(1, nodes + 1)
        addresses = {i: f"{NETWORK}.{i}" if own_network else "127.0.0.1" for i in names}
        lines = [NODE.format(i=i, address=addresses[i], port=NODE_PORT + i) for i in names]
        host = socket.gethostname().split(".")[0]
        text = CONFIG.format(
            host=host, control=control, control_port=CONTROL_PORT, folder=self.folder, nodes="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        # or slurmd insists on a mounted /sys/fs/cgroup
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        gpus = f"NodeName=node[1-{nodes}] Name=gpu Type=fake File={self.folder}/dev/gpu[0-7]\n"
        (self.folder / "gres.conf").write_text(gpus)
        hosts = ["127.0.0.1 localhost", f"{control} {host}", *(f"{addresses[i]} node{i}" for i in names)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self.folder.chmod(0o755)

    def _start_control(self) -> None:
        f = self.folder
        munge = ["munged", f"--key-file={f}/munge.key", f"--socket={f}/munge.sock", f"--pid-file={f}/munged.pid"]
        _do(*munge, f"--log-file={f}/munged.log", f"--seed-file={f}/munge.seed", "--num-threads=2")
        if self.has_networks:
            _do("ip", "link", "add", BRIDGE, "type", "bridge")
            _do("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
            _do("ip", "link", "set", BRIDGE, "up")
        _do("slurmctld", "-f", f"{f}/slurm.conf")

    def _await_nodes(self, nodes: int) -> None:
        def count() -> bool:
            words = ["sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
            states = subprocess.run(words, env=self.environ, capture_output=True, text=True).stdout.split()
            return sum(state in ("idle", "mixed", "allocated", "completing") for state in states) == nodes

        if not self._await(count, 90):
            log = self.folder / "slurmctld.log"
            raise NoSlurm(f"its nodes did not come up: {log.read_text()[-500:] if log.exists() else ''}")

    # -- nodes ---------------------------------------------------------------------------------------------

    @property
    def has_networks(self) -> bool:
        """Whether each node has a network of its own, so that it can be cut off."""
        return (self.folder / "mode").read_text() == "network"

    def boot(self, node: str) -> None:
        """Start a node that is not there."""
        (self.folder / "spool" / node).mkdir(exist_ok=True)
        enter: list[str] = []
        if self.has_networks:
            space, number = f"lock-{node}", node.removeprefix("node")
            _quietly("ip", "netns", "del", space)
            _quietly("ip", "link", "del", _cable(node))
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", _cable(node), "type", "veth", "peer", "name", "eth0", "netns", space)
            _do("ip", "link", "set", _cable(node), "master", BRIDGE, "up")
            _do("ip", "-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            enter = ["ip", "netns", "exec", space]
        own = ["unshare", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = [*enter, *own, "bash", str(HERE / "node.sh"), node, str(self.folder)]
        # through a shell that ends at once: the node is nobody's child, and outlives who has started it
        apart = 'log=$1; shift; setsid "$@" </dev/null >>"$log" 2>&1 & echo $!'
        shell = ["bash", "-c", apart, "bash", str(self.folder / f"{node}.log"), *words]
        started = subprocess.run(shell, env=self.environ, capture_output=True, text=True, check=True)
        (self.folder / f"{node}.pid").write_text(started.stdout.strip())

    def crash(self, node: str) -> None:
        """All processes of the node end at once; its peers see closed connections."""
        os.kill(int((self.folder / f"{node}.pid").read_text()), signal.SIGKILL)

    def unplug(self, node: str) -> None:
        """Cut the node's network off; its processes go on."""
        _do("ip", "link", "set", _cable(node), "down")

    def plug(self, node: str) -> None:
        """Undo :meth:`unplug`."""
        _do("ip", "link", "set", _cable(node), "up")

    def power_off(self, node: str) -> None:
        """The node ends, and nothing reaches its peers."""
        self.unplug(node)
        self.crash(node)

    def mend(self) -> None:
        """Have all nodes back and no job left."""
        self.run("scancel", "--user=root")
        self._await(lambda: not self.run("squeue", "-h").strip(), 60)
        names = sorted(path.name for path in self.folder.glob("spool/node*"))
        for node in names:
            if not self._alive(f"{node}.pid"):
                self.boot(node)
            elif self.has_networks:
                self.plug(node)
        self._await_nodes(len(names))

    # -- jobs ----------------------------------------------------------------------------------------------

    def run(self, *words: str, **more: str) -> str:
        """What a command of SLURM's prints; ``more``: variables.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(words, env={**self.environ, **more}, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, script: Path, *options: str, **more: str) -> str:
        """Submit a batch script; gives the job's number."""
        return self.run("sbatch", "--parsable", *options, str(script), **more).strip()

    def job(self, number: str) -> dict[str, str]:
        """What SLURM knows of a job: ``JobState``, ``Restarts``, ``NodeList`` ..."""
        words = self.run("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, *states: str, seconds: float = 120) -> str:
        """Wait until a job has come to one of the states, by default to its end; gives the state."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self._await(lambda: self.job(number)["JobState"] in wanted, seconds)
        return self.job(number)["JobState"]

    def _await(self, done: object, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if done():  # type: ignore[operator]
                return True
            time.sleep(0.1)
        return False

    def _alive(self, name: str) -> bool:
        """Whether the process of a file with its id runs, and is one of ours: ids are used again."""
        try:
            pid = int((self.folder / name).read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False
        return any(part in words for part in (b"slurmctld", b"munged", b"node.sh"))


def _cable(node: str) -> str:
    return f"lockv{node.removeprefix('node')}"


def _has_networks() -> bool:
    """Whether this machine can give nodes networks of their own."""
    tries: Sequence[Sequence[str]] = (
        ("ip", "netns", "add", "locktest"),
        ("ip", "link", "add", "lockt0", "type", "veth", "peer", "name", "lockt1"),
        ("ip", "link", "add", "locktb", "type", "bridge"),
    )
    can = all(_quietly(*words) for words in tries)
    _quietly("ip", "link", "del", "lockt0")
    _quietly("ip", "link", "del", "locktb")
    _quietly("ip", "netns", "del", "locktest")
    return can


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NoSlurm(f"`{' '.join(words)}` failed: {done.stderr.strip()}")


def _quietly(*words: str) -> bool:
    return subprocess.run(words, capture_output=True).returncode == 0


def main() -> None:
    """The commands of the module's docstring."""
    lab, verb, rest = Lab(), sys.argv[1].replace("-", "_"), sys.argv[2:]
    if verb == "start":
        lab.start(*map(int, rest))
        print(f"export SLURM_CONF={lab.environ['SLURM_CONF']}")
    else:
        getattr(lab, verb)(*rest)


if __name__ == "__main__":
    main()
