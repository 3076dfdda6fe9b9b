"""`World`: this process' rank, the numbers of ranks and nodes, and the address of their rendezvous.

The module also parses the lists of hosts and tasks that schedulers pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class World:
    """Place of this process in a run: its rank, the numbers of ranks and nodes, and the address of the rendezvous.

    Raises:
        MisconfigurationException: the numbers contradict each other.
    """

    rank: int  #: rank of this process, 0 to size - 1
    size: int  #: processes on all nodes
    local_rank: int  #: rank of this process on its node, 0 to local_size - 1
    local_size: int  #: processes on this node
    node_rank: int  #: number of this node, 0 to num_nodes - 1
    num_nodes: int
    address: str  #: host of rank 0, for the rendezvous
    port: int  #: port of the rendezvous; 0 until one is chosen

    def __post_init__(self) -> None:
        for name, value, limit_name, limit in (
            ("rank", self.rank, "world size", self.size),
            ("local rank", self.local_rank, "number of ranks on the node", self.local_size),
            ("node rank", self.node_rank, "number of nodes", self.num_nodes),
        ):
            if not 0 <= value < limit:
                raise MisconfigurationException(
                    f"{name} {value} is out of range for a {limit_name} of {limit}: expected 0 to {limit - 1}"
                )
        if self.local_size > self.size or self.num_nodes > self.size:
            raise MisconfigurationException(
                f"a world size of {self.size} is too small for {self.num_nodes} node(s) with {self.local_size} rank(s) "
                "on this node"
            )
        if not 0 <= self.port <= 65535:
            raise MisconfigurationException(f"port {self.port} is invalid: choose a free one between 1024 and 65535")

    @classmethod
    def single(cls) -> World:
        """Return the World of a run on one process."""
        return cls(0, 1, 0, 1, 0, 1, "127.0.0.1", 0)

    @property
    def is_zero(self) -> bool:
        """True on global rank 0."""
        return self.rank == 0


def read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the integer in the environment variable ``name``, or ``default`` if the variable is not set.

    Args:
        environ: the environment.
        name: name of the variable.
        default: value if the variable is not set; None: it has to be set.

    Raises:
        MisconfigurationException: the variable is not set, or is not an integer.
    """
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = "is not set" if text is None else f"is {text!r}"
        raise MisconfigurationException(
            f"the environment variable {name} {found}: set it to an integer, or remove the other variables of a "
            "launcher (RANK, LOCAL_RANK, ...)"
        ) from None


def world_of(cluster: str, environ: Mapping[str, str], names: tuple[str, ...], way_out: str, **numbers: Any) -> World:
    """Create a World from ``numbers``. If they contradict each other, the error names their environment variables.

    Args:
        cluster: name of the cluster, for messages.
        environ: the environment.
        names: names of the variables.
        way_out: remedy for contradictions, for messages.
        numbers: fields of the World.

    Raises:
        MisconfigurationException: the numbers contradict each other. The message has names, values and the remedy.
    """
    try:
        return World(**numbers)
    except MisconfigurationException as error:
        found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
        raise MisconfigurationException(f"{cluster}: {found} contradict each other: {error}. {way_out}") from None


def node_of(rank: int, local_rank: int, local_size: int, size: int) -> tuple[int, int]:
    """Return (index of a rank's node, number of nodes), for a launcher that passes neither number.

    All nodes are assumed to have the same number of ranks.

    Raises:
        MisconfigurationException: the ranks are ordered neither node by node nor round-robin.
    """
    nodes, rest = divmod(size, max(local_size, 1))
    # node by node, as most launchers do, or else round-robin
    if not rest and rank % local_size == local_rank:
        return rank // local_size, nodes
    if not rest and rank // nodes == local_rank:
        return rank % nodes, nodes
    raise MisconfigurationException(
        f"rank {rank} of {size} is local rank {local_rank} of {local_size}, which is only possible if the nodes have "
        "different numbers of ranks: start the same number of ranks on each node"
    )


def port_of(environ: Mapping[str, str], *numbers: int | None) -> int | None:
    """Return ``MASTER_PORT``. If it is not set, compute a port from the numbers of the job, job step and attempt.

    Args:
        environ: the environment.
        numbers: numbers of the job, of its step, and of the attempt.

    Returns:
        the port; if derived, from 15000 to 29999. None if the job's number is unknown.
    """
    if "MASTER_PORT" in environ:
        return read_number(environ, "MASTER_PORT")
    if not numbers or numbers[0] is None:
        return None
    job, step, attempt = [*(number or 0 for number in numbers), 0, 0][:3]
    # below the ports that the system assigns to other programs
    return 15000 + (job + 2311 * step + 101 * attempt) % 15000


def missing(cluster: str, name: str, way_out: str) -> MisconfigurationException:
    """Return the exception for an environment variable that a cluster should have set, but has not."""
    return MisconfigurationException(f"{cluster}: the environment variable {name} is not set: {way_out}")


# -- schedulers' lists of hosts and tasks ---------------------------------------------------------------------


# not compiled here: most processes that import this are not on a cluster
_RANGE = r"(\d+)(?:-(\d+))?"
_TASKS = r"(\d+)(?:\(x(\d+)\))?"


def hostlist(text: str) -> list[str]:
    """Expand a compressed host list from SLURM, in order.

    Args:
        text: names, separated by commas or spaces. They may have numbers and ranges of numbers in one or several pairs
            of brackets.

    Raises:
        MisconfigurationException: brackets do not match, or contain something else than numbers.

    Example:
        >>> hostlist("node[001-003,7],gpu-a")
        ['node001', 'node002', 'node003', 'node7', 'gpu-a']
    """
    return [host for part in _parts(text) for host in _hosts(part, text)]


def first_host(text: str) -> str:
    """Return the first host in a compressed host list from SLURM, without expanding the others.

    Raises:
        MisconfigurationException: the list is empty, or malformed as for :func:`hostlist`.
    """
    for part in _parts(text):
        return next(_hosts(part, text))
    raise MisconfigurationException(f"the list of hosts {text!r} is empty: set MASTER_ADDR to the host of rank 0")


def _parts(text: str) -> Iterator[str]:
    """Split a text at commas and spaces, except inside brackets, and yield the parts."""
    start, depth = 0, 0
    for at, sign in enumerate(text + ","):
        depth += (sign == "[") - (sign == "]")
        if sign in ", \n\t" and not depth:
            if text[start:at]:
                yield text[start:at]
            start = at + 1
        if depth not in (0, 1):
            break
    if depth:
        raise _unreadable(text)


def _hosts(part: str, text: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    inside, _, tail = rest.partition("]")
    for item in inside.split(","):
        match = re.fullmatch(_RANGE, item)
        if match is None:
            raise _unreadable(text)
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low):
            raise _unreadable(text)
        for number in range(int(low), int(high) + 1):
            for end in _hosts(tail, text):
                yield f"{head}{number:0{len(low)}d}{end}"


def _unreadable(text: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"the list of hosts {text!r} is not in SLURM's format (node[1-3,7],other): set MASTER_ADDR to the host of "
        "rank 0"
    )


def tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's compressed list with the number of tasks on each node.

    Raises:
        MisconfigurationException: the text is malformed.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(_TASKS, item.strip())
        if match is None:
            raise MisconfigurationException(
                f"tasks per node {text!r} are not in SLURM's format (2(x3),1): start the tasks with srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slots(text: str) -> dict[str, int]:
    """Return a dict from each host to its number of slots, from ``text``, the value of LSF's ``LSB_MCPU_HOSTS``.

    The numbers of a repeated host are added.

    Raises:
        MisconfigurationException: not a list of hosts, each followed by a number.

    Example:
        >>> slots("launch 1 node1 4 node2 4")
        {'launch': 1, 'node1': 4, 'node2': 4}
    """
    words = text.split()
    counts: dict[str, int] = {}
    if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
        raise MisconfigurationException(
            f"LSB_MCPU_HOSTS={text!r} is not in LSF's format (node1 4 node2 4): set MASTER_ADDR to the host of rank 0"
        )
    for host, count in zip(words[::2], words[1::2], strict=True):
        counts[host] = counts.get(host, 0) + int(count)
    return counts
