"""Checkpoints of a run, from which a replay can start."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint.sharded import glance
from lockstep.checkpoint.storage import is_index_folder
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.environment import HIDDEN
from lockstep.loop.progress import BATCH_END, VALIDATED


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run, and how the run was started.

    Attributes:
        path: the checkpoint; "" for the start of the run.
        step: number of the first step that a fit runs as a whole after it.
        own: lockstep's part of it.
        started: how the run was started the last time; empty if an earlier version of lockstep has written the
            checkpoint.
    """

    path: str
    step: int
    own: dict[str, Any]
    started: dict[str, Any]

    @property
    def ranks(self) -> int:
        """Number of ranks that trained until the checkpoint."""
        return int(self.own["writer"]["world"])

    def command(self, given: list[str]) -> list[str]:
        """Return the command of the run: a script or ``-m`` and a module, and arguments.

        Args:
            given: the command that the user passes; [] for the run's own.

        Raises:
            MisconfigurationException: the run's command is unknown or not complete.
        """
        if given:
            return given
        words: list[str] = self.started.get("command", [])
        where = f"{self.path}: "
        if not words:
            raise MisconfigurationException(
                f"{where}the checkpoint does not contain the command of its run (a notebook, or an earlier version of "
                "lockstep): pass it, lockstep replay RUN --step N -- train.py arguments"
            )
        if any(HIDDEN in word for word in words):
            raise MisconfigurationException(
                f"{where}the run's command had an argument that may be a secret and is not stored: pass the whole "
                f"command again, lockstep replay RUN --step N -- {' '.join(words)}"
            )
        starts = [at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"]
        return words[starts[0] :] if starts else words

    def changed_code(self, folder: str) -> list[str]:
        """Return the files of the user's code that differ from those of the run.

        Args:
            folder: folder in which the run would be started now.
        """
        differ = []
        for name, digits in self.started.get("code", {}).items():
            file = Path(folder, name)
            now = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""
            if now != digits:
                differ.append(name if now else f"{name} (missing)")
        return differ

    def changes(self) -> list[str]:
        """Describe what has changed since the run: the user's files, and the versions of Python and torch."""
        import torch

        started, found = self.started, []
        differ = self.changed_code(started.get("folder", ""))
        if differ:
            commit = started.get("commit", "")
            at = f" The run was at commit {commit[:12]}." if commit else ""
            found.append(f"Other code than in the run: {', '.join(differ)}.{at}")
        before, now = started.get("versions", {}).get("torch"), str(torch.__version__)
        if before not in (None, now):
            found.append(f"Another version of torch than in the run: {now}, not {before}.")
        return found


def find(run: str, step: int, or_start: bool = False) -> SavedRun:
    """Return the last checkpoint of a run before a step.

    Args:
        run: folder of a run, or a checkpoint.
        step: number of the step.
        or_start: for a run on one process without such a checkpoint, return its start, with "" as the path.

    Raises:
        MisconfigurationException: there is no such checkpoint.
    """
    if not os.path.exists(run):
        raise MisconfigurationException(f"lockstep replay {run}: there is no such file or folder")
    known = sorted(filter(None, map(_read, _paths(run))), key=lambda saved: (saved.step, os.path.getmtime(saved.path)))
    before = [saved for saved in known if saved.step <= step]
    if before:
        # the command of the last attempt, which may train for longer
        return replace(before[-1], started=known[-1].started)
    if known and or_start and known[0].ranks == 1:
        return replace(known[0], path="", step=0, started=known[-1].started)
    if known:
        raise MisconfigurationException(
            f"lockstep replay {run} --step {step}: its first checkpoint is at step {known[0].step}. Replay a later "
            "step, or save more checkpoints: ModelCheckpoint(every_n_train_steps=..., save_top_k=-1)"
        )
    raise MisconfigurationException(f"lockstep replay {run}: there is no checkpoint of lockstep that a fit can resume")


def _paths(run: str) -> list[str]:
    if os.path.isfile(run) or is_index_folder(run):
        return [run]
    return [str(path) for path in Path(run).rglob("*") if path.suffix == ".ckpt"]


def _read(path: str) -> SavedRun | None:
    own = glance(path).get("lockstep")
    if not isinstance(own, dict) or "ranks" not in own:  # weights alone, or another program's
        return None
    progress = own["progress"]
    # a checkpoint at the end of a batch is within a window, or at its end, where the window is not counted yet
    return SavedRun(
        path, progress["windows"] + (progress["phase"] in (BATCH_END, VALIDATED)), own, own.get("started") or {}
    )
