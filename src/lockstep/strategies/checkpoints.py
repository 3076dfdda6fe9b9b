"""Who writes, reads and removes the checkpoints of a run, and how it is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.checkpoint import storage
from lockstep.checkpoint.io import CheckpointIO, TorchCheckpointIO
from lockstep.ground.errors import MisconfigurationException

Path = str | os.PathLike[str]


class CheckpointWriter:
    """The checkpoints of one run, by way of a CheckpointIO.

    Attributes:
        before_touching: raises if the run's checkpoints are no longer its own.
        after_saving: told of each checkpoint that a fit can go on from, when it is there.
    """

    def __init__(self) -> None:
        self.before_touching: Callable[[], object] | None = None
        self.after_saving: Callable[[str], object] | None = None
        self._default_io = TorchCheckpointIO()
        self._given_io: CheckpointIO | None = None
        self._is_open = False
        self._saved: set[str] = set()

    @property
    def io(self) -> CheckpointIO:
        """What writes and reads files; set it before a call of the Trainer."""
        return self._default_io if self._given_io is None else self._given_io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        self._given_io = io

    def save(
        self, checkpoint: dict[str, Any], path: Path, storage_options: object = None, *, sharded: bool = False
    ) -> None:
        """Write a checkpoint. Only the ranks that are to write call it: rank 0, one alone, or all with their parts.

        Args:
            checkpoint: the run, or this rank's part of it.
            path: the same on all ranks.
            storage_options: of the CheckpointIO.
            sharded: all ranks write, each its part.

        Raises:
            MisconfigurationException: the CheckpointIO writes whole checkpoints only.
        """
        if sharded and not getattr(self.io, "writes_shards", False):
            raise MisconfigurationException(
                f"{type(self.io).__name__} writes whole checkpoints, and here each rank has a part of the model: give "
                "Trainer(plugins=[...]) a CheckpointIO with `writes_shards = True`, whose `save_checkpoint` runs on "
                "every rank."
            )
        self._is_open = True
        if self.before_touching is not None:
            self.before_touching()
        self.io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        if self._given_io is not None:
            self._saved.add(str(path))
        if self.after_saving is not None and "optimizer_states" in checkpoint:
            self.io.then(partial(self.after_saving, str(path)))

    def load(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint to the CPU."""
        self._is_open = True
        if weights_only is None:  # which a CheckpointIO of earlier years does not know
            return self.io.load_checkpoint(path, map_location="cpu")
        return self.io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint."""
        self._saved.discard(str(path))
        if self.before_touching is not None:
            self.before_touching()
        self.io.remove_checkpoint(path)

    def has(self, path: Path) -> bool:
        """Whether something has this name here, or a checkpoint is on its way there."""
        return str(path) in self._saved or storage.exists(path)

    def close(self) -> None:
        """Let the CheckpointIO end what it has begun; nothing happens if it has begun nothing."""
        if self._is_open:
            self._is_open = False
            self.io.teardown()
