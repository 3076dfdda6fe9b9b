"""Where ranks meet, and what is said when they cannot."""

from __future__ import annotations

import contextlib
import socket
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.cluster.rendezvous import _agree_on_attempt, connect_ranks
from lockstep.cluster.world import World
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.environment import free_port

LONG, SHORT = timedelta(seconds=30), timedelta(seconds=0.5)


def world(rank: int, port: int, address: str = "127.0.0.1") -> World:
    return World(rank, 2, rank, 2, 0, 1, address, port)


def both(environ: dict[str, str], other: dict[str, str]) -> list[bytes]:
    """What two ranks find of each other."""
    port = free_port()

    def come(rank: int, environ: dict[str, str]) -> tuple[object, bytes]:
        store = connect_ranks(world(rank, port), LONG, environ)
        store.set(str(rank), f"of {rank}")
        store.set_timeout(SHORT)
        try:
            return store, store.get(str(1 - rank))
        except RuntimeError:
            return store, b"nobody"

    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(come, range(2), (environ, other)))  # with rank 0's store, which holds what is in it
    return [found for _, found in met]


def test_ranks_find_each_other() -> None:
    assert both({}, {}) == [b"of 1", b"of 0"]


def test_a_rank_of_an_earlier_attempt_finds_nobody() -> None:
    """On a node that was cut off it may live on, and its address of the store may be right again."""
    job = {"SLURM_JOB_ID": "7"}
    assert both({**job, "SLURM_RESTART_COUNT": "1"}, job) == [b"nobody", b"nobody"]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            MisconfigurationException, match=rf"port {port} of .* is in use .*MASTER_PORT={port}\): end that process"
        ):
            connect_ranks(world(0, port), LONG, {}, SHORT)


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_a_master_that_cannot_be_reached(address: str) -> None:
    port = free_port()
    says = rf"rank 1 could not reach rank 0 at MASTER_ADDR={address}, MASTER_PORT={port} within 0.5 s"
    with pytest.raises(RuntimeError, match=says):
        connect_ranks(world(1, port, address), LONG, {}, SHORT)


def test_ranks_that_do_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"not all of the 2 ranks joined .* within 0.5 s \(1/2 clients joined\)"):
        connect_ranks(world(0, free_port()), LONG, {}, SHORT)


def test_the_groups_timeout_is_the_most() -> None:
    with pytest.raises(RuntimeError, match=r"within 0\.5 s"):
        connect_ranks(world(1, free_port()), SHORT, {})


def nodes_by_agent(counts: tuple[int, int], store: dist.TCPStore, nodes: int = 2) -> list[bytes]:
    """What two ranks find of each other in a store that torchrun's agent keeps over all restarts."""

    def come(rank: int, count: int) -> bytes:
        environ = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(count)}
        on_node = (0, 1, rank, 2) if nodes > 1 else (rank, 2, 0, 1)
        place = World(rank, 2, *on_node, "127.0.0.1", store.port)
        part = connect_ranks(place, LONG, environ)
        part.set_timeout(SHORT)
        part.set(str(rank), f"of {rank}, {counts}")
        with contextlib.suppress(RuntimeError):
            return part.get(str(1 - rank))
        return b""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(come, range(2), counts))


def test_an_attempt_reads_no_addresses_of_the_one_before() -> None:
    """torchrun's store outlives its attempts, and half of its restarts on gloo failed so."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for count in (0, 1):
        counts = (count, count)
        assert nodes_by_agent(counts, store, nodes=1) == [f"of 1, {counts}".encode(), f"of 0, {counts}".encode()]
    assert nodes_by_agent((2, 3), store, nodes=1) == [b"", b""]  # a rank that is left over


def test_on_several_nodes_the_agents_count_their_restarts_each_for_itself() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    for counts in ((0, 0), (1, 0), (1, 0)):  # the last time both were restarted for a third node's sake
        assert nodes_by_agent(counts, store) == [f"of 1, {counts}".encode(), f"of 0, {counts}".encode()]
        store.set("lockstep/here/1", "a rank that was killed before it heard its number")


def test_a_message_that_its_writer_did_not_finish_is_passed_over() -> None:
    """A rank 0 that was killed between the number of a message and the message."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    name = uuid.UUID(int=7)
    store.add(f"lockstep/messages/{name.hex}", 1)
    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(uuid, "uuid4", lambda: name)
        clients = [dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(2)]
        places = [World(rank, 2, 0, 1, rank, 2, "127.0.0.1", store.port) for rank in range(2)]
        assert list(pool.map(lambda rank: _agree_on_attempt(clients[rank], places[rank], LONG), range(2))) == [1, 1]


def test_ranks_that_do_not_come_to_the_agents_store() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    environ = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for rank, said in ((0, "not all of the 2 ranks joined the store"), (1, "rank 1 received no message from rank 0")):
        with pytest.raises(RuntimeError, match=rf"{said}.*MASTER_PORT={store.port} within {SHORT.total_seconds():g} s"):
            connect_ranks(World(rank, 2, 0, 1, rank, 2, "127.0.0.1", store.port), LONG, environ, SHORT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/net")
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_ranks_on_one_host_listens_there_alone(address: str) -> None:
    """It listened on all interfaces: whoever could reach the machine could write what the ranks read."""
    port = free_port()
    store = connect_ranks(World(0, 1, 0, 1, 0, 1, address, port), timedelta(seconds=10), {})
    store.set("asked", "answered")
    assert store.get("asked") == b"answered"
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    here = [fields[1] for fields in lines if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")]
    assert here == [f"0100007F:{port:04X}"]  # 127.0.0.1, as the system writes it
