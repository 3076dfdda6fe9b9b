"""Detection of ranks that LSF's job step manager (``jsrun``) started."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.cluster.world import World, missing, node_of, port_of, read_number, slots, world_of

_NAMES = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
_WAY_OUT = "Start the script with jsrun, or remove the JSM_NAMESPACE_* variables"


def given_world(environ: Mapping[str, str]) -> World | None:
    """Return the World of a process that LSF's ``jsrun`` started as a rank. None in any other process.

    The rendezvous is on the first host of the job other than the batch script's, at a port derived from the job's id.
    ``MASTER_ADDR`` and ``MASTER_PORT`` take precedence. Hosts are read from ``LSB_MCPU_HOSTS``, else ``LSB_HOSTS``,
    else the file in ``LSB_DJOB_RANKFILE``.

    Raises:
        MisconfigurationException: a variable is missing, is not a number, or contradicts another.
    """
    if "JSM_NAMESPACE_RANK" not in environ:
        return None
    rank, size, local_rank = (read_number(environ, name) for name in _NAMES[:3])
    # if jsrun does not set it: equal on all hosts with ranks. The first host may be the batch script's alone
    hosts = len(_hosts(environ))
    with_ranks = next((count for count in (hosts - 1, hosts) if count > 0 and size % count == 0), 1)
    local_size = read_number(environ, _NAMES[3], default=size // with_ranks)
    node, nodes = node_of(rank, local_rank, local_size, size)
    port = port_of(environ, read_number(environ, "LSB_JOBID") if "LSB_JOBID" in environ else None)
    if port is None:
        raise missing("LSF", "LSB_JOBID", "set MASTER_PORT to a port that is free on the host of rank 0")
    address = environ.get("MASTER_ADDR") or main_host(environ, nodes)
    if address is None and nodes > 1:
        raise missing("LSF", "LSB_MCPU_HOSTS", "set MASTER_ADDR to the host of rank 0")
    return world_of(
        "LSF",
        environ,
        (*_NAMES, "MASTER_PORT"),
        _WAY_OUT,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node,
        num_nodes=nodes,
        address=address or "127.0.0.1",
        port=port,
    )


def main_host(environ: Mapping[str, str], nodes: int) -> str | None:
    """Return the first of the hosts on which an LSF job runs ranks. Return None outside an LSF job.

    Args:
        environ: the environment.
        nodes: number of nodes with ranks. A job has one more host, the first, if its batch script runs
            on a host of its own.
    """
    hosts = _hosts(environ)
    return None if not hosts else hosts[1] if len(hosts) > nodes else hosts[0]


def _hosts(environ: Mapping[str, str]) -> list[str]:
    if environ.get("LSB_MCPU_HOSTS"):
        return list(slots(environ["LSB_MCPU_HOSTS"]))
    if environ.get("LSB_HOSTS"):
        return list(dict.fromkeys(environ["LSB_HOSTS"].split()))
    # LSF writes a file if a job has too many hosts for a variable
    path = environ.get("LSB_DJOB_RANKFILE")
    if not path:
        return []
    try:
        with open(path) as file:
            return list(dict.fromkeys(line.strip() for line in file if line.strip()))
    except OSError as error:
        raise missing("LSF", "MASTER_ADDR", f"and LSB_DJOB_RANKFILE={path} cannot be read ({error.strerror})") from None
