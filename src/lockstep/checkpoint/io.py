"""The seam through which a Trainer writes, reads and removes its checkpoints, and what stands there by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from lockstep.checkpoint import format, storage


class CheckpointIO(ABC):
    """Where checkpoints go and come from; give an instance to ``Trainer(plugins=...)``.

    Order of calls, by the Trainer: :meth:`load_checkpoint` on every rank, where a call begins from a checkpoint;
    :meth:`save_checkpoint` and :meth:`remove_checkpoint` on rank 0, as often as there is an occasion;
    :meth:`teardown` on every rank, when a call has saved or loaded and ends. A later call begins anew, with the same
    object. An error of rank 0 is raised on every rank.

    Attributes:
        writes_later: whether :meth:`save_checkpoint` may return before the checkpoint is there.

    Example::

        class Encrypted(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint, path, storage_options=None):
                super().save_checkpoint({**checkpoint, "state_dict": encrypt(checkpoint["state_dict"])}, path)

        Trainer(plugins=[Encrypted()])
    """

    writes_later = False

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: storage.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: the run. Its tensors are the run's own, which the next step changes.
            path: where to. What was there before should stay whole until the new one is.
            storage_options: as of ``trainer.save_checkpoint``.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: storage.PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            path: what :meth:`save_checkpoint` was given.
            map_location: where its tensors go, as in ``torch.load``; the Trainer asks for the CPU.
            weights_only: as of the call, such as ``trainer.fit``; left out where the user has not given it.
        """

    @abstractmethod
    def remove_checkpoint(self, path: storage.PathLike) -> None:
        """Delete a checkpoint, or a link to one; nothing happens if there is none."""

    def then(self, action: Callable[[], Any]) -> None:
        """Do something when all that has been saved so far is there: at once, but where files are written later."""
        action()

    def teardown(self) -> None:  # noqa: B027, optional
        """Bring what has begun to its end, and let go of what is held; :meth:`save_checkpoint` may come again."""


class TorchCheckpointIO(CheckpointIO):
    """Files of torch, local or at a URL: hashed, free of code, whole or not there. See ``checkpoint/format.py``."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: storage.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a file.

        Raises:
            TypeError: ``storage_options`` are given: here is nothing that they could choose.
            MisconfigurationException: ``torch.load(weights_only=True)`` could not read something in it.
            OSError: the file could not be written; the earlier one is whole.
        """
        if storage_options is not None:
            raise TypeError(
                f"save_checkpoint(storage_options={storage_options!r:.100}): {type(self).__name__} has no options; "
                "leave them out, or give Trainer(plugins=...) a CheckpointIO of your own that knows them."
            )
        format.save(checkpoint, path)

    def load_checkpoint(
        self, path: storage.PathLike, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file of lockstep, or of Lightning 2.x.

        Raises:
            CorruptCheckpoint: the file is truncated or altered, or no checkpoint at all.
            MisconfigurationException: it holds objects of other classes: it needs ``weights_only=False``.
            FileNotFoundError: there is no such file.
        """
        return format.load(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: storage.PathLike) -> None:
        """Delete a file or link; nothing happens if there is none."""
        storage.remove(path)
