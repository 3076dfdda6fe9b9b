"""Checkpoint folders that DeepSpeed's engine writes: recognized here, read and written by its extension."""

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
"""The file in such a folder that contains the name of the newest checkpoint's folder."""

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Function that returns a tensor to read this rank's part into, given the tensor's name, shape and dtype."""


class EngineFolders(Protocol):
    """Reader and writer of such folders; implemented by DeepSpeed's extension."""

    def read(self, path: PathLike, place: Place | None, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint as one process would have written it."""

    def write(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Write a checkpoint as one rank of the engine would."""


def is_engines(path: PathLike) -> bool:
    """Return True if `path` is a local folder that DeepSpeed's engine has written."""
    return not storage.is_remote(path) and (storage.local(path) / LATEST).is_file()


def engine_folders() -> EngineFolders:
    """Import and return the reader and writer of such folders.

    Raises:
        MissingExtension: the extension has been deleted.
    """
    found: EngineFolders = load("services", "folders of DeepSpeed's engine")
    return found
