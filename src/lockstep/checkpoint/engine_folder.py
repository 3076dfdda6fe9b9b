"""Folders of checkpoints that DeepSpeed's engine writes: recognized here, read and written by its extension."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.checkpoint.storage import PathLike
from lockstep.ground.extensions import load

LATEST = "latest"
"""The file of such a folder that names the folder with the files."""

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Makes the tensor into which this rank's part of a tensor of that name, shape and dtype is read."""


class EngineFolders(Protocol):
    """Reads and writes such folders; DeepSpeed's extension has it."""

    def read(self, path: PathLike, place: Place | None, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint as one process would have written it."""

    def write(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Write a checkpoint as one rank of the engine would."""


def is_engines(path: PathLike) -> bool:
    """Return True if there is a folder at `path` that DeepSpeed's engine has written."""
    return not storage.is_remote(path) and (storage.local(path) / LATEST).is_file()


def engine_folders() -> EngineFolders:
    """Import what reads and writes such folders.

    Raises:
        MissingExtension: the extension has been deleted.
    """
    found: EngineFolders = load("services", "folders of DeepSpeed's engine")
    return found
