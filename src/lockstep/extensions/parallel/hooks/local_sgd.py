"""Post-local SGD: the mean over all ranks for some rounds, and over the ranks of a node from then on."""

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
    by = comm.carrier(group, torch.device("cpu"))
    timeout = whole._get_backend(torch.device(by.type)).options._timeout
    members_of_all = [ranks[member] for member in members]
    with _apart_from_default():
        made = dist.new_group(members_of_all, timeout=timeout, backend=_backend(group), use_local_synchronization=True)
    comm.barrier(made)  # a rank that ends at once must not be gone while another still connects to it
    return made


@contextlib.contextmanager
def _apart_from_default() -> Iterator[None]:
    """Inside, new groups connect by themselves. Beside a default group that is bound to a device, torch would split its
    communicator, which all of its ranks have to call, and those of other groups do not."""
    default: Any = dist.group.WORLD
    bound, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = bound


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


# -- the hook ------------------------------------------------------------------------------------------------


class PostLocalSGDState:
    """Settings and progress of `post_local_sgd`.

    Args:
        start: rounds with the mean over all ranks; from round ``start`` (counted from 0) on, steps are local.
        subgroup: the ranks that go on averaging gradients with this one. ``None``: those on this rank's node, found
            by `lockstep.engines.ddp.hooks.local_sgd.node_group`, which all ranks call together when the hook is
            registered or first called.
        process_group: all ranks; ``None`` is the default group.
        local_allreduce: False: every rank goes on by itself, and ``subgroup`` is not used.

    Attributes:
        iteration: rounds so far.

    Raises:
        MisconfigurationException: for a ``start`` that is no number of rounds.
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
            raise MisconfigurationException(f"PostLocalSGDState(start={start!r}): a number of rounds, at least 0")
        self.process_group = process_group
        self.subgroup = subgroup
        self.start = start
        self.local_allreduce = local_allreduce
        self.iteration = 0
        self._made = False

    @property
    def start_localSGD_iter(self) -> int:
        """``start``, by the name that torch's state has for it."""
        return self.start

    def prepare(self) -> None:
        """Make the group of this node's ranks, where none was given; collective."""
        if self.local_allreduce and self.subgroup is None and comm.world_size(self.process_group) > 1:
            self.subgroup, self._made = node_group(self.process_group), True

    def __getstate__(self) -> dict[str, Any]:
        made = {"subgroup": None, "_made": False} if self._made else {}  # a group belongs to its process
        return {**vars(self), **made}

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]


def post_local_sgd(state: PostLocalSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean over all ranks, then over ``state.subgroup``; by itself, a rank keeps its own gradients.

    Args:
        state: settings and progress.
        bucket: gradients of any dtype.

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
    """Over which group the ranks agree on the parameters that were used, where that changes with a hook's rounds.

    Args:
        hook: a communication hook, of lockstep or torch, wrapped or not.
        state: its state.

    Returns:
        ``None`` for hooks that always go over one group. For post-local SGD, a function to be called at the beginning
        of each round, before its first bucket: ``None`` for the state's whole group; a group; or False where a rank
        goes on by itself, and nothing is to be agreed.
    """
    inner = innermost(hook)
    if inner is post_local_sgd:
        return lambda: _group_of_round(
            state.iteration < state.start, state.process_group, state.subgroup, state.local_allreduce
        )
    if torch_name(inner) == "post_localSGD_hook":
        return lambda: _group_of_round(
            state.iter < state.start_localSGD_iter,
            state.process_group,
            state.subgroup,
            state.post_local_gradient_allreduce,
        )
    return None


def _group_of_round(
    whole: bool, group: comm.Group, subgroup: comm.Group, together: bool
) -> comm.Group | Literal[False]:
    if whole:
        return group
    if not together or subgroup is None or comm.world_size(subgroup) == 1:
        return False
    return subgroup
