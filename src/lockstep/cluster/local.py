"""Ranks without a cluster, on this machine, or on several machines if the user starts the script on each node.

The variables are those of Lightning's own launcher, so that scripts that read them behave the same: ``LOCAL_RANK``,
``NODE_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lockstep.cluster.world import World, read_number, world_of
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log


def is_started(environ: Mapping[str, str]) -> bool:
    """Return True if a launcher, of lockstep or another program, started this process as a rank."""
    return "LOCAL_RANK" in environ


@contextmanager
def local_rank_set(local_rank: int) -> Iterator[None]:
    """Set ``LOCAL_RANK`` inside the context, for DeepSpeed, which reads the variable.

    Without a launcher, the variable is removed afterwards, because it marks a process as a started rank.
    """
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        os.environ.pop("LOCAL_RANK", None)


def local_world(environ: Mapping[str, str], devices: int, num_nodes: int) -> World:
    """Return this process' World in a run with ``devices`` ranks on each of ``num_nodes`` nodes.

    A process that no launcher started is local rank 0 of its node. Its port is 0 ("choose one") if the environment does
    not set one.

    Args:
        environ: the environment.
        devices: number of ranks on each node.
        num_nodes: number of nodes. With several, the user has to set ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``
            on each.

    Raises:
        MisconfigurationException: a variable is missing, or contradicts the flags.
    """
    size = devices * num_nodes
    started_size = read_number(environ, "WORLD_SIZE", default=size)
    if is_started(environ) and started_size != size:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes} make {size} rank(s), but {started_size} were started "
            f"(WORLD_SIZE={started_size}): use the same devices and num_nodes for every Trainer of a script (test "
            "and validate count each sample once on any number of ranks), or strategy='ddp_spawn', whose ranks end "
            "after each call. If LOCAL_RANK is left over from another program, unset it"
        )
    if not is_started(environ) and size > 1 and "RANK" in environ:
        raise MisconfigurationException(
            f"devices={devices}, num_nodes={num_nodes}: lockstep starts the ranks, but RANK={environ['RANK']} is set, "
            "without WORLD_SIZE and LOCAL_RANK: unset RANK, or set all variables of a launcher"
        )
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if "GROUP_RANK" in environ and "NODE_RANK" in missing:
        missing.remove("NODE_RANK")
    if num_nodes > 1 and missing:
        raise MisconfigurationException(
            f"num_nodes={num_nodes}, but {', '.join(missing)} is not set: start the script once on each node. There, "
            "set MASTER_ADDR to the first node, MASTER_PORT to a free port of the first node, and NODE_RANK to 0, 1, "
            "..."
        )
    node_rank = read_number(environ, "NODE_RANK", default=read_number(environ, "GROUP_RANK", default=0))
    local_rank = read_number(environ, "LOCAL_RANK", default=0)
    return world_of(
        "By hand",
        environ,
        ("NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"),
        f"devices={devices}, num_nodes={num_nodes} make ranks 0 to {size - 1}: correct the variables",
        rank=node_rank * devices + local_rank,
        size=size,
        local_rank=local_rank,
        local_size=devices,
        node_rank=node_rank,
        num_nodes=num_nodes,
        address=environ.get("MASTER_ADDR", "127.0.0.1"),
        port=read_number(environ, "MASTER_PORT", default=0),
    )


INTERFACE = "GLOO_SOCKET_IFNAME"
"""Environment variable with gloo's network interface. By default, gloo uses that of the host's name."""


def loopback_of(address: str) -> str:
    """Return the loopback address to which a host name resolves; "" if it resolves to any other address."""
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)})
        return found[0] if found and all(ipaddress.ip_address(each).is_loopback for each in found) else ""
    except (OSError, ValueError):
        return ""


def is_own(address: str) -> bool:
    """Return True if an address is a loopback address on every machine, such as 127.0.0.1 or localhost.

    A name that only this host resolves to 127.0.1.1 does not count: it may be another address elsewhere.
    """
    if address.lower() in ("localhost", "localhost.localdomain", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False


def choose_gloo_interface(world: World) -> None:
    """Set gloo's network interface if other nodes cannot reach this host by its name.

    Gloo sends other ranks the address of the host's name, which /etc/hosts often maps to 127.0.1.1. Ranks on other
    nodes would connect to themselves. In that case, set `GLOO_SOCKET_IFNAME` to the interface that leads to node 0.
    """
    if world.num_nodes == 1 or INTERFACE in os.environ or is_own(world.address):
        return
    name = socket.gethostname()
    try:
        own = loopback_of(name) if socket.getaddrinfo(name, None) else ""
    except OSError:
        own = "unknown"
    if not own:
        return
    found = _interface_towards(world.address, world.port)
    if found:
        os.environ[INTERFACE] = found
    if world.local_rank == 0:
        what = f"{INTERFACE}={found} is set" if found else f"set {INTERFACE} to the interface that leads to other nodes"
        log.info(f"Other nodes cannot reach this host by its name {name}, which is {own} here (/etc/hosts): {what}.")


def _interface_towards(address: str, port: int) -> str:
    """Return the name of the network interface through which this host reaches an address; "" if unknown."""
    with contextlib.suppress(ImportError):
        import fcntl

        # 192.0.2.1 is reserved and leads out of this network; nothing is sent
        for target in (address, "192.0.2.1"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, port or 9))
                own = probe.getsockname()[0]
                for _, name in [] if ipaddress.ip_address(own).is_loopback else socket.if_nameindex():
                    with contextlib.suppress(OSError):
                        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                        if socket.inet_ntoa(answer[20:24]) == own:
                            return name
    return ""


SIOCGIFADDR = 0x8915
"""Number of Linux' ioctl that returns the address of a network interface."""


def on_one_host(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make ranks on one host listen on the loopback interface only."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")] if loopback_of(address) else []
    return {INTERFACE: names[0]} if names and INTERFACE not in environ else {}


def rank_variables(world: World) -> dict[str, str]:
    """Return a rank's environment variables, from which `local_world` recreates ``world``."""
    return {
        "LOCAL_RANK": str(world.local_rank),
        "NODE_RANK": str(world.node_rank),
        "WORLD_SIZE": str(world.size),
        "MASTER_ADDR": world.address,
        "MASTER_PORT": str(world.port),
    }
