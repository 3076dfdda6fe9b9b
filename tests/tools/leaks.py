"""What a piece of code left behind: processes, threads, ports, shared memory, settings, a process group."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SHARED_MEMORY = Path("/dev/shm")
WATCHED_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
# Set by pytest for each phase of a test, or by libraries for good when they are first used.
UNWATCHED_VARIABLES = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_PTXAS_PATH",
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
    }
)

LASTING = frozenset(["lockstep-sample", "lockstep-device-marks"])
"""A process that has been a rank keeps these threads, which tell others where it is, and what its device has done
(`lockstep.supervise.stack_request`, `lockstep.supervise.device_marks`)."""


@dataclass(frozen=True)
class Snapshot:
    """What this process has and how it is set, at one moment."""

    children: frozenset[int]
    """Process ids of the direct children."""
    threads: frozenset[int]
    """Identities (``id``) of the Python threads."""
    ports: frozenset[str]
    """TCP addresses (host:port) on which this process listens."""
    shared_memory: frozenset[str]
    """Names of the files in /dev/shm, whoever made them."""
    environ: Mapping[str, str]
    """The environment variables."""
    settings: Mapping[str, Any]
    """Process-wide settings by name: see ``SETTINGS``."""
    group: bool
    """Whether torch.distributed has a default process group."""
    known: frozenset[int] = field(default_factory=frozenset)
    """Process ids that are somebody's to keep (a rank pool) and never count as left behind."""


def _signal_reader(number: int) -> Callable[[], Any]:
    return lambda: signal.getsignal(number)


def _signal_writer(number: int) -> Callable[[Any], Any]:
    return lambda handler: signal.signal(number, handler)


# Name -> (how to read the setting, how to put it back).
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.get_default_dtype()": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.are_deterministic_algorithms_enabled()": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.is_grad_enabled()": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads),
    "torch.get_default_device()": (
        torch.get_default_device,
        # None, not "cpu": a default device that was set makes every factory call slower
        lambda device: torch.set_default_device(None if device == torch.device("cpu") else device),
    ),
    "torch.backends.cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
    "the working directory": (os.getcwd, os.chdir),
    **{f"the handler of {number.name}": (_signal_reader(number), _signal_writer(number)) for number in WATCHED_SIGNALS},
}


def child_processes() -> frozenset[int]:
    """Process ids of this process's direct children, zombies reaped and left out."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return frozenset(child.pid for child in multiprocessing.active_children() if child.pid)
    found: set[int] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return frozenset(pid for pid in found if not _reap(pid))


def _reap(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            os.waitpid(pid, os.WNOHANG)
        return state in "ZX"
    except (OSError, ChildProcessError):
        return True


def command_line(pid: int) -> str:
    """The command of process ``pid``, shortened; empty when it has ended, or has none for 0.1 s."""
    deadline = time.monotonic() + 0.1
    words: list[bytes] = []
    # subprocess.Popen returns while the kernel still sets up the new program, whose arguments come last.
    while not any(words) and time.monotonic() < deadline:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return ""
        if not any(words):
            time.sleep(0.001)
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= 100 else text[:97] + "..."


def listening_ports() -> frozenset[str]:
    """The TCP addresses on which this very process listens (empty where the kernel has no /proc)."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:["):
                    found.update(_listening_at(int(descriptor)))
    return frozenset(found)


def _listening_at(descriptor: int) -> list[str]:
    """The address of a socket that listens for TCP connections; empty for any other.

    Asked of the socket itself: the kernel's tables of all connections (/proc/net/tcp) take milliseconds to read.
    """
    # The family only makes room for any address; with SOCK_NONBLOCK Python leaves the descriptor's own flags alone.
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_INET6, kind, 0, fileno=os.dup(descriptor)) as probe:
        family = probe.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN)
        if family in (socket.AF_INET, socket.AF_INET6) and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            host, port = probe.getsockname()[:2]
            return [f"{host}:{port}" if family == socket.AF_INET else f"[{host}]:{port}"]
    return []


def shared_memory_files() -> frozenset[str]:
    """Names of the files in /dev/shm (empty where there is none)."""
    try:
        return frozenset(os.listdir(SHARED_MEMORY))
    except OSError:
        return frozenset()


def snapshot(known: Iterable[int] = ()) -> Snapshot:
    """Notes what this process has now.

    Args:
        known: process ids that are somebody's to keep, a rank pool's for example.
    """
    return Snapshot(
        children=child_processes(),
        threads=frozenset(id(thread) for thread in threading.enumerate()),
        ports=listening_ports(),
        shared_memory=shared_memory_files(),
        environ=dict(os.environ),
        settings={name: read() for name, (read, _) in SETTINGS.items()},
        group=dist.is_available() and dist.is_initialized(),
        known=frozenset(known),
    )


def leaks(before: Snapshot, known: Iterable[int] = (), patience: float = 2.0) -> list[str]:
    """What is there now and was not at ``before``: one sentence each, empty when nothing is.

    What takes a moment to go (a data loader's workers, a thread in its last lines) has ``patience`` seconds.
    """
    ours = before.known | frozenset(known)
    found = _patiently(lambda: running(before, ours) + _open(before), patience)
    return found + _lasting(before)


def running_leaks(before: Snapshot, patience: float = 2.0) -> list[str]:
    """The part of ``leaks`` about processes and threads: cheap, and right while a process group is up."""
    return _patiently(lambda: running(before), patience)


def _patiently(look: Callable[[], list[str]], patience: float) -> list[str]:
    deadline = time.monotonic() + patience
    found = look()
    if found:
        gc.collect()  # an iterator in a cycle keeps its workers
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = look()
    return found


def running(before: Snapshot, known: Iterable[int] = ()) -> list[str]:
    """Child processes and threads that run now and did not at ``before``."""
    found = [f"child process {pid} still runs: {command_line(pid)}" for pid in sorted(new_children(before, known))]
    found += [
        f"thread {thread.name!r} still runs"
        for thread in threading.enumerate()
        if id(thread) not in before.threads
        and type(thread).__name__ != "TMonitor"  # tqdm keeps one for good
        and type(thread).__name__ != "_DummyThread"  # a native one that has called Python: nobody here can end it
        and thread.name not in LASTING
    ]
    return found


def _open(before: Snapshot) -> list[str]:
    found = [f"port {port} is still open" for port in sorted(listening_ports() - before.ports)]
    found += [
        f"{SHARED_MEMORY / name} is still there"
        for name in sorted(shared_memory_files() - before.shared_memory)
        if not _foreign(name)
    ]
    return found


def _lasting(before: Snapshot) -> list[str]:
    found = []
    for name in sorted(set(before.environ) | set(os.environ)):
        old, new = before.environ.get(name), os.environ.get(name)
        if old != new and name not in UNWATCHED_VARIABLES:
            found.append(f"environment variable {name} was {old!r} and is {new!r}")
    for name, old in before.settings.items():
        new = SETTINGS[name][0]()
        if old != new:
            found.append(f"{name} was {old!r} and is {new!r}")
    if dist.is_available() and dist.is_initialized() and not before.group:
        found.append("torch.distributed's default process group was not destroyed")
    return found


def _infrastructure() -> frozenset[int]:
    """Processes that `multiprocessing` itself starts once and keeps."""
    from multiprocessing import forkserver, resource_tracker

    found = (
        getattr(resource_tracker._resource_tracker, "_pid", None),
        getattr(forkserver._forkserver, "_forkserver_pid", None),
    )
    return frozenset(pid for pid in found if pid)


def _foreign(name: str) -> bool:
    """Whether a file in /dev/shm belongs to another program that runs on this machine.

    torch and lockstep write the maker's process id into the name; files of others are told by who holds them.
    """
    if name.startswith(("__KMP_REGISTERED_LIB", "sem.")):
        return True
    ours = _family()
    named = {int(number) for number in re.findall(r"\d{2,7}", name)}
    if any(pid not in ours and Path(f"/proc/{pid}").exists() for pid in named):
        return True
    return any(pid not in ours for pid in _holders(SHARED_MEMORY / name))


def _family() -> set[int]:
    """This process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return family
        family |= more


def _holders(path: Path) -> set[int]:
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(path) in (process / "maps").read_text():
                found.add(int(process.name))
                continue
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(descriptor) == str(path):
                        found.add(int(process.name))
    return found


def put_back(before: Snapshot, known: Iterable[int] = ()) -> None:
    """Ends the processes and undoes the settings that ``leaks`` would name, as far as that can be done."""
    end_children(before, known)
    for name in shared_memory_files() - before.shared_memory:
        if not _foreign(name):
            (SHARED_MEMORY / name).unlink(missing_ok=True)
    if dist.is_available() and dist.is_initialized() and not before.group:
        dist.destroy_process_group()
    restore_settings(before)


def new_children(before: Snapshot, known: Iterable[int] = ()) -> frozenset[int]:
    """Process ids of the children that came after ``before`` and are nobody's to keep."""
    return child_processes() - before.children - before.known - frozenset(known) - _infrastructure()


def end_children(before: Snapshot, known: Iterable[int] = ()) -> None:
    """Kills the children that came after ``before``."""
    for pid in new_children(before, known):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def restore_settings(before: Snapshot) -> None:
    """Puts back the environment and what stands in ``SETTINGS``."""
    if dict(os.environ) != dict(before.environ):
        for name in set(os.environ) - set(before.environ):
            if name not in UNWATCHED_VARIABLES:
                del os.environ[name]
        os.environ.update(before.environ)
    for name, old in before.settings.items():
        read, write = SETTINGS[name]
        if old is not None and read() != old:
            write(old)
