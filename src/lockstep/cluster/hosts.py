"""Hosts and their tasks as schedulers write them: ``node[001-003,7],gpu-a``, ``2(x3),1``, ``node1 4 node2 4``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.ground.errors import MisconfigurationException

_RANGE = r"(\d+)(?:-(\d+))?"  # not compiled here: most processes that import this are on no cluster
_TASKS = r"(\d+)(?:\(x(\d+)\))?"


def hostlist(text: str) -> list[str]:
    """The hosts that SLURM's short form stands for, in its order.

    Args:
        text: names with numbers and ranges of numbers in brackets, several pairs of brackets too, set off from each
            other by commas or spaces.

    Raises:
        MisconfigurationException: brackets that do not match, or hold no numbers.

    Example:
        >>> hostlist("node[001-003,7],gpu-a")
        ['node001', 'node002', 'node003', 'node7', 'gpu-a']
    """
    return [host for part in _parts(text) for host in _hosts(part, text)]


def first_host(text: str) -> str:
    """The first host of a list in SLURM's short form, without spelling out the others.

    Raises:
        MisconfigurationException: there is none, or as :func:`hostlist`.
    """
    for part in _parts(text):
        return next(_hosts(part, text))
    raise MisconfigurationException(f"the list of hosts {text!r} names no host")


def _parts(text: str) -> Iterator[str]:
    """The text cut at the commas and spaces that stand outside brackets."""
    begin, depth = 0, 0
    for at, sign in enumerate(text + ","):
        depth += (sign == "[") - (sign == "]")
        if sign in ", \n\t" and not depth:
            if text[begin:at]:
                yield text[begin:at]
            begin = at + 1
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
        f"the list of hosts {text!r} is not as SLURM writes it (node[1-3,7],other): set MASTER_ADDR to the host "
        "of rank 0"
    )


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from SLURM's short form.

    Raises:
        MisconfigurationException: no such form.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(_TASKS, item.strip())
        if match is None:
            raise MisconfigurationException(
                f"tasks per node {text!r} are not as SLURM writes them (2(x3),1): start the tasks by srun"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def slots(text: str) -> dict[str, int]:
    """Hosts and their slots from LSF's ``LSB_MCPU_HOSTS``, in its order; a host that comes twice has both.

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
            f"LSB_MCPU_HOSTS={text!r} is not as LSF writes it (node1 4 node2 4): set MASTER_ADDR to the host of rank 0"
        )
    for host, count in zip(words[::2], words[1::2], strict=True):
        counts[host] = counts.get(host, 0) + int(count)
    return counts
