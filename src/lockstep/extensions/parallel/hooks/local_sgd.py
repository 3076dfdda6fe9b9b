"""Post-local SGD, which averages gradients over all ranks in the first rounds, later over the ranks of a node."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.transport import RoundGroup
from lockstep.extensions.parallel.hooks.compress import allreduce
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import completed, innermost, torch_name
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException

# -- the ranks of a node -------------------------------------------------------------------------------------


def node_group(group: comm.Group = None) -> Any:
    """Create a process group with the ranks of ``group`` that are on this rank's node. Collective.

    A node is a host and a network namespace on it.
    """
    nodes = comm.all_gather_object(this_node(), group)
    mine = [rank for rank, node in enumerate(nodes) if node == nodes[comm.rank(group)]]
    return group_of(mine, group)


def group_of(members: list[int], group: comm.Group = None) -> Any:
    """Create a process group with the given ranks, which include this rank. Collective on these ranks.

    Args:
        members: ranks within ``group``.
        group: process group whose backend and timeout are used; ``None`` is the default group.
    """
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    whole: Any = dist.group.WORLD if group is None else group
    by = comm.carrier(group, torch.device("cpu"))
    timeout = whole._get_backend(torch.device(by.type)).options._timeout
    members_of_all = [ranks[member] for member in members]
    with _without_split():
        made = dist.new_group(members_of_all, timeout=timeout, backend=_backend(group), use_local_synchronization=True)
    # a rank that exits at once would be missing while another one still connects to it
    comm.barrier(made)
    return made


@contextlib.contextmanager
def _without_split() -> Iterator[None]:
    """In the context, make new groups connect on their own instead of splitting the default communicator."""
    # torch splits it if the default group is bound to a device, and all ranks would have to call that
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


def _backend(group: comm.Group) -> str:
    """Return a group's backend in the form of `torch.distributed.init_process_group`: "cpu:gloo,cuda:nccl"."""
    parts = dist.get_backend_config(group).split(",")
    kinds = {part.partition(":")[2] for part in parts}
    return kinds.pop() if len(kinds) == 1 else ",".join(parts)


def this_node() -> tuple[str, str, str]:
    """Return an identifier of this process's node, made of host name, boot id and network namespace."""
    # containers may share a host name, and one host may run several containers
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/net")
    return socket.gethostname(), boot, namespace


# -- the hook ------------------------------------------------------------------------------------------------


class PostLocalSGDState:
    """State of the communication hook `post_local_sgd`: its settings, and the number of rounds so far.

    Args:
        start: number of rounds with the mean over all ranks; from round ``start`` (counted from 0) on, steps are
            local.
        subgroup: ranks that average gradients in local steps. ``None``: those on this rank's node, found by
            `lockstep.engines.ddp.hooks.local_sgd.node_group` when the hook is registered or first called, which is
            collective.
        process_group: all ranks; ``None`` is the default group.
        local_allreduce: if False, each rank uses its own gradients in local steps, and ``subgroup`` is ignored.

    Attributes:
        iteration: rounds so far.

    Raises:
        MisconfigurationException: ``start`` is not a number of rounds.
    """

    def __init__(
        self,
        start: int,
        subgroup: comm.Group = None,
        *,
        process_group: comm.Group = None,
        local_allreduce: bool = True,
    ) -> None:
        if not isinstance(start, int) or start < 0:
            raise MisconfigurationException(f"PostLocalSGDState(start={start!r}): pass a number of rounds, at least 0")
        self.process_group = process_group
        self.subgroup = subgroup
        self.start = start
        self.local_allreduce = local_allreduce
        self.iteration = 0
        self._made = False

    @property
    def start_localSGD_iter(self) -> int:
        """Alias of ``start``, under the name that torch's ``PostLocalSGDState`` uses."""
        return self.start

    def prepare(self) -> None:
        """Create a subgroup of this node's ranks if the state needs one and has none. Collective."""
        if self.local_allreduce and self.subgroup is None and comm.world_size(self.process_group) > 1:
            self.subgroup, self._made = node_group(self.process_group), True

    def __getstate__(self) -> dict[str, Any]:
        # a group cannot be used in another process, which makes its own
        made = {"subgroup": None, "_made": False} if self._made else {}
        return {**vars(self), **made}

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the number of rounds so far."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of rounds from the result of :meth:`state_dict`.

        Args:
            state: a saved state, from any rank.
        """
        self.iteration = state["iteration"]


def post_local_sgd(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients over all ranks in the first rounds, later over ``state.subgroup``, if there is one.

    Args:
        state: settings and progress.
        bucket: gradients of any dtype.

    Returns:
        a future of the bucket's buffer: a 1-D tensor with the averaged gradients.

    Example::

        state = PostLocalSGDState(start=1000)
        model.register_comm_hook(state, post_local_sgd)
        averager = ParameterAverager(model.parameters(), period=16, start=1000)
        for batch in loader:
            ...
            optimizer.step()
            averager.step()
    """
    if state.iteration == 0 and bucket.index() == 0:
        state.prepare()
    local = state.iteration >= state.start
    state.iteration += bucket.is_last()
    if not local:
        return allreduce(state.process_group, bucket)
    if state.local_allreduce and state.subgroup is not None:
        return allreduce(state.subgroup, bucket)
    return completed(bucket.buffer())


def marks_of(hook: object, state: Any) -> RoundGroup | None:
    """Return a function that selects the group over which a round exchanges the flags of used parameters.
    Return None if the hook always uses the same group.

    Args:
        hook: a communication hook of lockstep or torch, wrapped or not.
        state: the hook's state.

    Returns:
        ``None`` for hooks that always use one group. For post-local SGD a function to be called at the start of each
        round, before its first bucket. It returns a group, ``None`` for the default group, or False if a rank uses
        its own gradients and nothing is exchanged.
    """
    inner = innermost(hook)
    if inner is not post_local_sgd and torch_name(inner) != "post_localSGD_hook":
        return None

    def group_of_round() -> comm.Group | Literal[False]:
        if rounds_of(state) < state.start_localSGD_iter:
            return state.process_group
        is_local = state.subgroup is None or comm.world_size(state.subgroup) == 1
        return False if is_local or not averages_locally(state) else state.subgroup

    return group_of_round


def rounds_of(state: Any) -> int:
    """Return the number of rounds so far, from torch's or lockstep's state of post-local SGD."""
    return int(state.iter if hasattr(state, "iter") else state.iteration)


def averages_locally(state: Any) -> bool:
    """Return True if local steps average over a subgroup, according to torch's or lockstep's state."""
    return bool(getattr(state, "local_allreduce", getattr(state, "post_local_gradient_allreduce", True)))
