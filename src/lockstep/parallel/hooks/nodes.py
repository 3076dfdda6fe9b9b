"""The ranks of a group that share a node."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground import comm


def node_group(group: comm.Group = None) -> Any:
    """A process group of the ranks of ``group`` that are on this rank's node; collective.

    A node is a host and a network namespace of it: what reaches each other without a wire.
    """
    nodes = comm.all_gather_object(this_node(), group)
    mine = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank(group)]]
    return group_of(mine, group)


def group_of(members: list[int], group: comm.Group = None) -> Any:
    """A process group of some ranks of ``group``, this one among them; they call it together.

    Args:
        members: counted within ``group``.
        group: it gives the backend and the time limit.
    """
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    whole: Any = dist.group.WORLD if group is None else group
    backends = dist.get_backend_config(group)
    kind = "cuda" if "cuda:" in backends and "cpu:" not in backends else "cpu"
    timeout = whole._get_backend(torch.device(kind)).options._timeout
    members_of_all = [ranks[member] for member in members]
    made = dist.new_group(members_of_all, timeout=timeout, backend=_backend(group), use_local_synchronization=True)
    comm.barrier(made)  # a rank that ends at once must not be gone while another still connects to it
    return made


def _backend(group: comm.Group) -> str:
    """As `torch.distributed.init_process_group` wants to be told: "gloo", or "cpu:gloo,cuda:nccl"."""
    parts = dist.get_backend_config(group).split(",")
    kinds = {part.partition(":")[2] for part in parts}
    return kinds.pop() if len(kinds) == 1 else ",".join(parts)


def this_node() -> tuple[str, str, str]:
    """What tells this process's node from others: host name, boot, network namespace."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), boot, namespace
