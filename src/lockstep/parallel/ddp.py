"""DistributedDataParallel for hand-written loops (a thin container over the reducer); how ranks start."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lockstep.ground import comm
from lockstep.ground.device import move_data_to_device
from lockstep.ground.fork import protect_forks
from lockstep.ground.tree import tree_leaves
from lockstep.parallel.reducer import Reducer


class DistributedDataParallel(nn.Module):
    """Trains ``module`` on every rank of a group, each with its own part of the batch, as one.

    At construction every rank takes rank 0's parameters and buffers. A backward from the outputs leaves every
    rank with the mean of the ranks' gradients: they are averaged while it still runs, and are there when
    ``loss.backward()`` returns. Parameters that a rank, or no rank, uses in a step need no flag (see
    `lockstep.parallel.reducer.Reducer`), and a bucket's layout never depends on chance.

    A rank whose loss does not depend on the outputs at all takes no part in the round, and the others wait
    for it: have it call ``loss = loss + 0 * outputs.sum()``.

    Args:
        module: on the device where it is to run; at least one parameter requires a gradient.
        device_ids: ``[device]`` to have tensors among the inputs moved there; ``None`` leaves them where they
            are.
        broadcast_buffers: before a forward that follows a synchronised one, take rank 0's buffers
            (BatchNorm's running statistics).
        process_group: the ranks; ``None`` is the default group.
        bucket_cap_mb: size in MiB of the buckets in which gradients travel.
        find_unused_parameters: unused parameters are found whatever this says; taken for the sake of existing
            scripts.
        gradient_as_bucket_view: let ``.grad`` be views of the buckets, which saves a copy and their memory.

    Raises:
        ValueError: on every rank, if the ranks' modules differ, or nothing in ``module`` requires a gradient,
            or ``device_ids`` names more than one device.

    Example::

        model = DistributedDataParallel(Net())
        for batch, target in loader:
            optimizer.zero_grad()
            loss_fn(model(batch), target).backward()
            optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        *,
        broadcast_buffers: bool = True,
        process_group: comm.Group = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
    ) -> None:
        super().__init__()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError(
                f"DistributedDataParallel({type(module).__name__}): no parameter requires a gradient, so "
                "there is nothing to average; use the module as it is"
            )
        if device_ids is not None and len(device_ids) != 1:
            raise ValueError(
                f"device_ids={list(device_ids)}: a process drives one device; start one process per device "
                "and give each its own, or device_ids=None"
            )
        protect_forks()  # of loader workers, beside the group's threads
        self.module = module
        self.device = None if device_ids is None else _as_device(device_ids[0])
        self.process_group = process_group
        self.broadcast_buffers = broadcast_buffers
        check_same_module(module, process_group)
        broadcast_module_state(module, process_group)
        self.reducer = Reducer(
            module.named_parameters(),
            process_group,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        self._distributed = comm.world_size(process_group) > 1
        self._sync = True
        self._armed = False
        self._buffers_may_differ = True
        self._leaf_hooks: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if not self._distributed:
            return self.module(*self._move(args), **self._move(kwargs))
        if torch._C._current_graph_task_id() == -1:
            self._armed = False  # outside of a backward: one that is still armed has raised
        if self.broadcast_buffers and self._buffers_may_differ:
            sync_buffers(self.module, self.process_group)
        outputs = self.module(*self._move(args), **self._move(kwargs))
        self._buffers_may_differ = self._sync and torch.is_grad_enabled()
        if torch.is_grad_enabled():
            self._watch(outputs, self._sync)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in this context have backwards that accumulate on this rank only.

        What they add up is averaged with the first backward whose forward was outside.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _move(self, inputs: Any) -> Any:
        return inputs if self.device is None else move_data_to_device(inputs, self.device)

    # -- The backward begins when a gradient reaches an output, and ends when autograd says so. Outputs belong
    #    to the outermost graph, while a parameter's first gradient may come inside a re-entrant checkpoint's
    #    own backward, where "the end" would be that one's.

    def _watch(self, outputs: Any, sync: bool) -> None:
        for hook in self._leaf_hooks:
            hook.remove()
        self._leaf_hooks = []

        def reached(grad: Tensor) -> None:
            self._begin(sync)

        for output in tree_leaves(outputs, Tensor):
            if output.requires_grad:
                hook = output.register_hook(reached)
                if output.is_leaf:  # a parameter, handed out as it is: it outlives this forward
                    self._leaf_hooks.append(hook)

    def _begin(self, sync: bool) -> None:
        if self._armed:
            self.reducer.sync = self.reducer.sync or sync
            return
        self._armed = True
        self.reducer.sync = sync
        self.reducer.prepare()
        Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._armed = False
        self.reducer.finish()


def _as_device(device: int | torch.device | str) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def check_same_module(module: nn.Module, group: comm.Group = None) -> None:
    """Make sure that ``module`` has the same parameters and buffers on every rank of ``group``, in the same
    order.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    if comm.world_size(group) == 1:
        return
    mine = _describe(module)
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(comm.all_gather_object(digest, group))) == 1:
        return
    every = comm.all_gather_object(mine, group)
    for rank, theirs in enumerate(every):
        for index in range(max(len(every[0]), len(theirs))):
            first = every[0][index] if index < len(every[0]) else "nothing more"
            other = theirs[index] if index < len(theirs) else "nothing more"
            if first != other:
                raise ValueError(
                    f"{type(module).__name__} is not the same on every rank: rank 0 has {first}, rank {rank} "
                    f"has {other}. Build it alike everywhere: nothing in it may depend on the rank"
                )


def _describe(module: nn.Module) -> list[str]:
    """A line for each parameter and buffer, in order."""
    lines = []
    for name, parameter in module.named_parameters():
        trained = "" if parameter.requires_grad else ", frozen"
        lines.append(f"parameter {name!r} ({parameter.dtype}, shape {tuple(parameter.shape)}{trained})")
    for name, buffer in module.named_buffers():
        lines.append(f"buffer {name!r} ({buffer.dtype}, shape {tuple(buffer.shape)})")
    return lines


def broadcast_module_state(module: nn.Module, group: comm.Group = None) -> None:
    """Overwrite the parameters and buffers of ``module`` with rank 0's, bitwise."""
    comm.broadcast_tensors([*module.parameters(), *module.buffers()], 0, group)


def sync_buffers(module: nn.Module, group: comm.Group = None) -> None:
    """Overwrite the buffers of ``module`` with rank 0's, bitwise; a loop does it before each forward."""
    comm.broadcast_tensors(module.buffers(), 0, group)
