"""Metadata of a local checkpoint, read without its tensors."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.checkpoint import sharded, storage
from lockstep.checkpoint.damage import check_archive_size
from lockstep.checkpoint.storage import PathLike


def glance(path: PathLike) -> dict[str, Any]:
    """Return a checkpoint's dict; its tensors are read from the disk only when they are accessed.

    For a folder of parts it is the dict without weights and optimizer states. Hashes are not checked. Return an empty
    dict if this is impossible: at a URL, for a damaged file, or for one that needs ``weights_only=False``.
    """
    if storage.is_remote(path):
        return {}
    name = str(storage.local(path))
    try:
        if storage.is_index_folder(name):
            name = storage.inside(name, sharded.META)
        with storage.reading(name) as file:
            check_archive_size(file, name)
        found = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a later full read of the checkpoint reports what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def global_step(path: PathLike) -> int | None:
    """Return the optimizer step in a checkpoint; None if it is unknown."""
    found = glance(path).get("global_step")
    return found if isinstance(found, int) else None
