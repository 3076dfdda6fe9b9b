"""A slow network between two processes of one machine: network namespaces joined by a cable of a given rate.

Needs Linux, root, and the programs `ip` and `tc` (iproute2). What is made is called after this process, and goes
when the context ends, however it ends; what a killed run has left goes when the next one begins.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Prefix = Callable[[int], tuple[Sequence[str], dict[str, str]]]
NAME = "lockstep-bench-{process}-{rank}"
NETWORK = "10.231.17"
"""Addresses inside the namespaces, where nothing else is; they collide with nothing outside."""


def namespace(process: int, rank: int) -> str:
    """Name of the namespace of ``rank`` that ``process`` makes."""
    return NAME.format(process=process, rank=rank)


def cable(process: int, rank: int) -> str:
    """Name of that rank's end of the cable; the kernel takes 15 letters."""
    return f"lsb{process % 10**9}r{rank}"


def stale(names: Iterable[str], alive: Callable[[int], bool]) -> list[str]:
    """Of ``names``, the namespaces that a run has left which is no longer ``alive``; nobody else's.

    Example:
        >>> stale(["blue", "lockstep-bench-7-0", "lockstep-bench-8-1"], lambda process: process == 8)
        ['lockstep-bench-7-0']
    """
    pattern = re.compile(NAME.format(process=r"(\d+)", rank=r"\d+"))
    found = ((name, pattern.fullmatch(name)) for name in names)
    return [name for name, match in found if match and not alive(int(match[1]))]


def _alive(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


def obstacle() -> str | None:
    """Why namespaces cannot be made here, in a sentence; None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a network namespace is made by root only"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program!r} is not installed (iproute2)"
    try:
        with link(100):
            pass
    except OSError as error:
        return f"this system refuses: {error}"
    return None


def _remove(names: Iterable[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _clean() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    _remove(stale((line.split()[0] for line in listed.splitlines() if line.strip()), _alive))


@contextlib.contextmanager
def link(megabits: float) -> Iterator[Prefix]:
    """Two namespaces joined by a cable that carries ``megabits`` a second each way.

    Gives, for a rank, what stands before its command and which variables it needs. SIGTERM ends the context too.

    Raises:
        OSError: if the system refuses.
    """
    process = os.getpid()
    names = [namespace(process, rank) for rank in (0, 1)]
    ends = [cable(process, rank) for rank in (0, 1)]

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        _clean()
        for name in names:
            _call("ip", "netns", "add", name)
        # made inside the namespaces: nothing is ever seen outside, and the cable goes with them
        _call(
            "ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1]
        )
        for rank, (name, end) in enumerate(zip(names, ends, strict=True)):
            _call("ip", "-n", name, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", end)
            _call("ip", "-n", name, "link", "set", end, "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            # a bucket of tokens: 64 KiB at once, what waits longer than 50 ms is dropped, as a switch would
            shaped = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms"]
            _call("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, "root", *shaped)
        yield lambda rank: (("ip", "netns", "exec", names[rank]), {"GLOO_SOCKET_IFNAME": ends[rank]})
    finally:
        _remove(names)
        signal.signal(signal.SIGTERM, before)


def bytes_sent(interface: str) -> int:
    """Since the interface came up, with all headers; asked from inside its namespace."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())
