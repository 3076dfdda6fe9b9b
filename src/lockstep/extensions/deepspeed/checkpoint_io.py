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
    """Writer of folders in DeepSpeed's own format; ``extensions/deepspeed/folder.py`` reads them.

    Attributes:
        save: function of the strategy that lets the engine write into a folder. Its second argument is the rest of
            the checkpoint: all entries but weights and optimizer states.
    """

    writes_shards = True
    writes_all_weights = True  # also the frozen ones
    save: Callable[[Path, dict[str, Any]], None]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Write a checkpoint folder. Collective.

        Raises the errors of `ShardedCheckpointIO`; a URL is refused.
        """
        self._check_options(storage_options)
        own = checkpoint.get(format.KEY, {})
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        written: dict[str, Any] = {}

        def put_together(parts: list[Any]) -> list[None]:
            ranks = {"ranks": parts} if "ranks" in own else {}
            written.update(format.marked({**rest, format.KEY: {**own, **ranks}}))
            return [None] * len(parts)

        # rank 0's file has the entries of all ranks, so the others need nothing back
        sharded.together(lambda: own["ranks"][comm.rank()] if "ranks" in own else None, put_together)
        about = {**own.get("writer", {}), "epoch": rest.get("epoch"), "global_step": rest.get("global_step")}
        sharded.write_by(lambda folder: self.save(folder, written), about, path)
