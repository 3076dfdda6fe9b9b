"""Checkpoints that DeepSpeed's engine writes itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.checkpoint import format, sharded
from lockstep.checkpoint.io import TorchCheckpointIO
from lockstep.checkpoint.storage import PathLike
from lockstep.ground import comm


class EngineCheckpointIO(TorchCheckpointIO):
    """Folders in DeepSpeed's own format; see ``extensions/deepspeed/folder.py``. What is read is whole.

    Attributes:
        save: has the engine write into a folder, with what a checkpoint has beside weights and optimizer states; the
            strategy sets it.
    """

    writes_shards = True
    writes_all_weights = True  # those that are not trained, too
    save: Callable[[Path, dict[str, Any]], None]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a folder. Collective; errors as of `ShardedCheckpointIO`, and a URL is refused."""
        self._check_options(storage_options)
        own = checkpoint.get(format.KEY, {})
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        written: dict[str, Any] = {}

        def put_together(parts: list[Any]) -> list[None]:
            ranks = {"ranks": parts} if "ranks" in own else {}
            written.update(format.marked({**rest, format.KEY: {**own, **ranks}}))
            return [None] * len(parts)

        # what each rank alone needs is written by rank 0, and no other rank gets it
        sharded.together(lambda: own["ranks"][comm.rank()] if "ranks" in own else None, put_together)
        about = {**own.get("writer", {}), "epoch": rest.get("epoch"), "global_step": rest.get("global_step")}
        sharded.write_by(lambda folder: self.save(folder, written), about, path)
