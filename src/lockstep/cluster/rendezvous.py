"""Rendezvous of the ranks: all of them connect to a store on the host of rank 0.

Errors name the address, and a remedy.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lockstep.cluster.local import is_own
from lockstep.cluster.slurm import attempt
from lockstep.cluster.world import World, read_number
from lockstep.ground.errors import MisconfigurationException

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""Time for which a rank tries to reach rank 0, and rank 0 waits for the others, unless the group's timeout is less."""


def connect_ranks(
    world: World, timeout: timedelta, environ: Mapping[str, str] = os.environ, limit: timedelta = RENDEZVOUS_TIMEOUT
) -> dist.Store:
    """Connect to rank 0's store, wait until all ranks have connected, and return the store for the process group.

    Each attempt at a run uses its own prefix in the store. A rank left over from an earlier attempt, for instance on a
    node that was cut off, may reach the store, but does not find the new ranks in it. torchrun's agent keeps its store
    over restarts, and the prefix prevents ranks from reading addresses of earlier ranks.

    Args:
        world: World of this process, with the address and port at which rank 0 or torchrun's agent listens.
        timeout: timeout of later requests to the store.
        environ: the environment.
        limit: timeout of the rendezvous itself.

    Raises:
        MisconfigurationException: the port is taken.
        RuntimeError: rank 0 cannot be reached, or not all ranks arrive in time.
    """
    by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = world.is_zero and not by_agent
    limit = min(timeout, limit)
    remaining = limit if listens else _await_listener(world.address, world.port, limit)
    alone = world.num_nodes == 1 or is_own(world.address)
    listener = listen(world.address, world.port) if listens and alone else None
    try:
        store = dist.TCPStore(
            world.address,
            world.port,
            None if by_agent else world.size,
            is_master=listens,
            timeout=remaining,
            wait_for_workers=not by_agent,
            master_listen_fd=listener,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        # torch's own message has pages of C++ frames
        raise _explain(world, error, limit, listens) from None
    number = attempt(environ)
    if by_agent and world.num_nodes > 1:
        number = _agree_on_attempt(store, world, limit)
    elif by_agent:
        number = max(number, read_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"lockstep/attempt{number}", store)


def listen(address: str, port: int) -> int | None:
    """Open the socket of rank 0's store, which listens on ``address`` alone.

    The socket listens on the ranks' address only, usually 127.0.0.1. Torch's own socket listens on all interfaces,
    where anybody can write to the store.

    Returns:
        the socket's descriptor, which the store will own. None on any error: torch's store then opens a socket itself,
        and its own error is clearer.
    """
    try:
        # sorted: IPv4 comes first
        found = sorted(socket.getaddrinfo(address, port, type=socket.SOCK_STREAM))
        listener = socket.socket(found[0][0], socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[0][4])
        listener.listen(2048)
    except OSError:
        listener.close()
        return None
    return listener.detach()


def _await_listener(address: str, port: int, limit: timedelta) -> timedelta:
    """Wait until a process listens at an address. Return the time that remains of ``limit``.

    Give up when 90 % of ``limit`` has passed.

    Torch's store waits half a second before it retries, and raises an error if a signal arrives meanwhile.
    """
    start, seconds = time.monotonic(), limit.total_seconds()
    while time.monotonic() - start < 0.9 * seconds:
        try:
            socket.create_connection((address, port), timeout=seconds).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
        except OSError:
            # unknown or unreachable address: torch's own retries and errors apply
            break
    return timedelta(seconds=max(0.1 * seconds, seconds - (time.monotonic() - start)))


def _agree_on_attempt(store: dist.Store, world: World, limit: timedelta) -> int:
    """Choose a number for this attempt that no earlier attempt has used. All ranks return the same number.

    Agents of several nodes count their restarts independently, so that TORCHELASTIC_RESTART_COUNT does not identify an
    attempt. Rank 0 sends a new number to every rank. Once all have confirmed it, rank 0 releases it. No rank polls:
    each makes about six requests, and rank 0 four for each of the others.
    """
    until = time.monotonic() + limit.total_seconds()
    seconds = f"{limit.total_seconds():g} s"
    if world.is_zero:
        number = store.add("lockstep/attempts", 1)
        if not _send_number(store, world.size, number, until):
            raise RuntimeError(
                f"not all of the {world.size} ranks joined the store at MASTER_ADDR={world.address}, "
                f"MASTER_PORT={world.port} within {seconds}: check that all {world.num_nodes} agents run"
            )
        return number
    # a unique name, which replaces that of an earlier attempt's rank
    name = uuid.uuid4().hex
    store.set(f"lockstep/here/{world.rank}", name)
    turn = 1
    while time.monotonic() < until:
        if not _await(store, [_message(name, turn)], until, LOOK):
            # skip a message whose writer was killed
            turn += store.check([_message(name, turn + 1)])
            continue
        word, _, called = store.get(_message(name, turn)).decode().partition(" ")
        if word == GO:
            return int(called)
        # confirm any number, even that of a rank 0 left over from an earlier attempt
        store.set(f"lockstep/heard/{called}/{name}", "")
        turn += 1
    raise RuntimeError(
        f"rank {world.rank} received no message from rank 0 through the store at MASTER_ADDR={world.address}, "
        f"MASTER_PORT={world.port} within {seconds}: check that rank 0 runs"
    )


CALL, GO = "call", "go"
"""Messages from rank 0 to the other ranks, each with the number of the attempt."""

LOOK = 1.0
"""Seconds that a request to the store may block. Signals are handled only afterwards."""


def _send_number(store: dist.Store, size: int, number: int, until: float) -> bool:
    """On rank 0, send the attempt's ``number`` to all ranks, and after their confirmation the signal to start.

    Return False if the ranks have not confirmed it in time.
    """
    places = [f"lockstep/here/{rank}" for rank in range(1, size)]
    called: set[str] = set()
    wait = 0.02
    while time.monotonic() < until:
        if not _await(store, places, until, LOOK):
            continue
        names = [name.decode() for name in store.multi_get(places)]
        for name in names:
            if name not in called:
                _write(store, name, f"{CALL} {number}")
        called.update(names)
        if _await(store, [f"lockstep/heard/{number}/{name}" for name in names], until, wait):
            for name in names:
                _write(store, name, f"{GO} {number}")
            return True
        # a key may have the name of a rank that is gone, until the current rank replaces it
        wait = min(2 * wait, LOOK)
    return False


def _await(store: dist.Store, keys: list[str], until: float, seconds: float) -> bool:
    """Wait up to ``seconds``, and no later than ``until``, for all keys to be in the store. Return True if they are."""
    try:
        store.wait(keys, timedelta(seconds=max(0.001, min(seconds, until - time.monotonic()))))
    except dist.DistStoreError:
        return False
    return True


def _write(store: dist.Store, name: str, words: str) -> None:
    store.set(_message(name, store.add(f"lockstep/messages/{name}", 1)), words)


def _message(name: str, turn: int) -> str:
    return f"lockstep/message/{name}/{turn}"


def _explain(world: World, error: Exception, limit: timedelta, listens: bool) -> Exception:
    """Return an error that explains why torch's rendezvous failed, and suggests a remedy."""
    place, seconds = f"MASTER_ADDR={world.address}, MASTER_PORT={world.port}", limit.total_seconds()
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text:
        return MisconfigurationException(
            f"port {world.port} of {socket.gethostname()}, for the rendezvous of the ranks, is in use by another "
            f"process ({place}): end that process if it belongs to an earlier run. Otherwise set MASTER_PORT to a "
            "free port, or unset it"
        )
    if listens and "clients joined" in text:
        return RuntimeError(
            f"not all of the {world.size} ranks joined rank 0 at {place} within {seconds:g} s ({_joined_count(text)}): "
            f"start the script on all {world.num_nodes} node(s), with the same MASTER_ADDR and MASTER_PORT"
        )
    reason = text.splitlines()[0][:200].rstrip(".")
    who = "rank 0 listens here and cannot be reached" if listens else f"rank {world.rank} could not reach rank 0"
    return RuntimeError(
        f"{who} at {place} within {seconds:g} s ({reason}; this host is {socket.gethostname()}): check that rank 0 "
        "runs, that MASTER_ADDR is its host on all nodes, and that no firewall blocks the port"
    )


def _joined_count(text: str) -> str:
    """Return the part of torch's message that contains the number of connected ranks."""
    return next((part.strip() for part in text.split(".") if "clients joined" in part), text)
