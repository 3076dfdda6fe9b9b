"""Which of a ModelCheckpoint's files a logger has still to upload, and what it says of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import proxy

from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.ground.view import TrainerView

#: the settings of a ModelCheckpoint that are uploaded along with its files
_SETTINGS = (
    "monitor",
    "mode",
    "save_last",
    "save_top_k",
    "save_weights_only",
    "_every_n_train_steps",
    "_every_n_epochs",
)


def announce(callback: Any, trainer: TrainerView) -> None:
    """Tell the loggers, on rank 0, that `callback` has saved a checkpoint."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.after_save_checkpoint(proxy(callback))


@dataclass(frozen=True)
class Upload:
    """A checkpoint to be uploaded.

    Attributes:
        path: the file.
        score: its value of the monitored metric, None without one.
        aliases: ``"latest"``, and ``"best"`` for the callback's best.
        kind: the class of the callback.
        settings: the callback's settings by name.
    """

    path: str
    score: float | None
    aliases: list[str]
    kind: str
    settings: dict[str, Any]

    def metadata(self, kind: str) -> dict[str, Any]:
        """What is kept beside the file, as plain values: the settings under `kind`."""
        return {"score": self.score, "original_filename": Path(self.path).name, kind: self.settings}


class Uploads:
    """What ``log_model`` means, and which files have been uploaded.

    Args:
        when: False: never; True: what there is at the end, or at once where every checkpoint is kept
            (``save_top_k=-1``); ``"all"``: each as soon as it is saved.
    """

    def __init__(self, when: Literal["all"] | bool) -> None:
        self.when = when
        self._done: dict[str, float] = {}  # path -> time of its last change: last.ckpt keeps its name
        self._at_end: dict[int, Any] = {}

    def after_save(self, callback: Any) -> list[Upload]:
        """What to upload now that `callback` has saved a file."""
        if self.when == "all" or (self.when is True and callback.save_top_k == -1):
            return self.new(callback)
        if self.when is True:
            self._at_end[id(callback)] = callback
        return []

    def at_end(self) -> list[Upload]:
        """What is left to upload when a run has ended."""
        return [upload for callback in self._at_end.values() for upload in self.new(callback)]

    def new(self, callback: Any) -> list[Upload]:
        """The files of `callback` that have not been uploaded as they are now, oldest first; they then count so."""
        scores = {callback.last_model_path: callback.current_score, callback.best_model_path: callback.best_model_score}
        scores.update(callback.best_k_models)
        found = []
        for path, score in scores.items():
            # a path may come from a checkpoint, which anybody may have made: what lies elsewhere is not sent away
            if not path or not Path(path).is_file() or not storage.lies_in(path, callback.dirpath):
                continue
            changed = Path(path).stat().st_mtime
            if self._done.get(path, float("-inf")) < changed:
                self._done[path] = changed
                found.append((changed, path, score))
        settings = {name: getattr(callback, name) for name in _SETTINGS if hasattr(callback, name)}
        best = callback.best_model_path
        return [
            Upload(
                path,
                score.item() if isinstance(score, Tensor) else score,
                ["latest", "best"] if path == best else ["latest"],
                callback.__class__.__name__,  # not type(): a weak proxy stands for the callback
                settings,
            )
            for _, path, score in sorted(found, key=lambda each: each[:2])
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_at_end": {}}  # callbacks belong to their own process
