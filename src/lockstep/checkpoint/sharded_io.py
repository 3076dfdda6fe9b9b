"""The seam to checkpoints in parts, which all ranks write: at once, or while training goes on."""

from __future__ import annotations

from typing import Any

from lockstep.checkpoint import sharded
from lockstep.checkpoint.io import TorchCheckpointIO
from lockstep.checkpoint.storage import PathLike
from lockstep.ground import comm


class ShardedCheckpointIO(TorchCheckpointIO):
    """Folders in the format of torch's distributed checkpoint; see ``checkpoint/sharded.py``. What is read is whole."""

    writes_shards = True

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a folder. Collective.

        Raises:
            TypeError: ``storage_options`` are given: here is nothing that they could choose.
            MisconfigurationException: ``path`` is a URL, or a checkpoint cannot hold something.
            OSError: the folder could not be written; the earlier one is whole.
        """
        self._check_options(storage_options)
        rank = comm.rank()
        parts = sharded.split(checkpoint, rank)
        sharded.write(parts, sharded.plan(parts, rank), path)
