"""Checkpoint: what the Trainer takes for a callback that saves checkpoints."""

from __future__ import annotations

from lockstep.callbacks.base import Callback
from lockstep.ground.view import TrainerView


class Checkpoint(Callback):
    """Base of callbacks that save checkpoints: the Trainer calls them after all others."""

    def find_last(self, trainer: TrainerView) -> set[str]:
        """Paths that ``ckpt_path="last"`` may stand for; the Trainer takes the newest."""
        return set()
