"""CheckpointIOs with which all ranks write a checkpoint in parts, synchronously or in the background."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.checkpoint import sharded
from lockstep.checkpoint.damage import first_line
from lockstep.checkpoint.io import AsyncCheckpointIO, TorchCheckpointIO, snapshot
from lockstep.checkpoint.storage import PathLike
from lockstep.ground import comm
from lockstep.ground.device import synchronize
from lockstep.ground.transfer import HostMemory


class ShardedCheckpointIO(TorchCheckpointIO):
    """CheckpointIO that writes folders in the format of torch's distributed checkpoint.

    Folders are read completely.
    """

    writes_shards = True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a checkpoint folder with the parts of all ranks. Collective.

        Raises:
            TypeError: ``storage_options`` are given, which this class does not support.
            MisconfigurationException: the checkpoint contains something that cannot be saved.
            OSError: the folder could not be written; the earlier one is intact.
        """
        self._check_options(storage_options)
        rank = comm.rank()
        parts = sharded.split(checkpoint, rank)
        sharded.write(parts, sharded.plan(parts, rank), path)


class AsyncShardedCheckpointIO(AsyncCheckpointIO):
    """A CheckpointIO that writes checkpoint folders in the background, with a thread on each rank.

    Training waits only while each rank copies its part to the CPU.

    The threads coordinate through their own process group. Each save reuses the memory of the copies (pinned if the
    parts are on a GPU), so that a save waits for the previous one. A failed write is raised on all ranks by the next
    save, load, or end of a call; the earlier checkpoint is intact.
    """

    writes_shards = True

    def __init__(self) -> None:
        super().__init__(ShardedCheckpointIO())

    def _set_up(self) -> None:
        super()._set_up()
        self._group: comm.Group = None
        self._copies: dict[str, Tensor] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Copy this rank's part to the CPU, and write the copy in the background. Collective.

        Raises:
            Exception: an earlier checkpoint could not be written; the new one is not started.
        """
        if storage_options is not None:
            self.checkpoint_io.save_checkpoint({}, path, storage_options)  # it refuses them
        self._agree()
        if self._group is None and comm.world_size() > 1:
            # the thread's messages must not mix with those of the training, which uses the other groups meanwhile
            self._group = dist.new_group(backend="gloo")
        rank = comm.rank()
        parts = sharded.split(checkpoint, rank)
        planner = sharded.plan(parts, rank)
        planner.local = self._copied(planner.local)
        parts.meta = snapshot(parts.meta)
        parts.ranks = {each: snapshot(part) for each, part in parts.ranks.items()}
        self._write_later(partial(sharded.write, parts, planner, path, self._group), path)

    def _agree(self) -> None:
        """Wait for the current write. If the write has failed on any rank, raise on all ranks. Collective."""
        error: Exception | None = None
        try:
            self.wait()
        except Exception as failed:
            error = failed
        errors = comm.all_gather_object(None if error is None else first_line(error))
        if error is not None:
            raise error
        for rank, text in enumerate(errors):
            if text is not None:
                raise sharded.OnRank(f"rank {rank}: {text}")

    def _copied(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy this rank's values to the CPU, reusing the memory of the previous copies where shapes match."""
        kept, copies = self._copies, {}
        memory = {device: HostMemory(device) for device in {value.device for value in local.values()}}
        for name, value in local.items():
            copy = kept.get(name)
            if copy is None or (copy.shape, copy.dtype, copy.stride()) != (value.shape, value.dtype, value.stride()):
                copy = memory[value.device].like(value)
            # a copy into unpinned memory is complete when it returns
            copies[name] = copy.copy_(value, non_blocking=copy.is_pinned())
        for device in {value.device for value in local.values()}:
            synchronize(device)
        self._copies = copies
        return copies

    def teardown(self) -> None:
        """Wait until all scheduled writes are complete; release the copies' memory and the process group."""
        try:
            super().teardown()
        finally:
            group, self._group, self._copies = self._group, None, {}
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_group", "_copies")  # they belong to one process
        return {name: value for name, value in super().__getstate__().items() if name not in own}
