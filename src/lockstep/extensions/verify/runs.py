"""Runs of a script on ranks, as one process, or on simulated ranks, each in a copy of the current folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row
from lockstep.extensions.verify.compare import Difference, Reason
from lockstep.extensions.verify.processes import Patience, Server, run
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.settings import Settings

_LARGE = 4 * 2**20
"""Bytes above which a file, probably data, is linked instead of copied."""
_MAX_ENTRIES = 3000
"""Number of files and folders after which folders are linked instead of copied."""


@dataclass(frozen=True)
class Request:
    """Settings of a verification: the script, the number of ranks and steps, and time limits.

    Attributes:
        words: the script and its arguments, or ``-m``, a module and its arguments.
        devices: number of ranks.
        steps: optimizer steps.
        strategy: strategy that Trainers use on several ranks; "" for their own.
        patience: time limits of a run.
        keep: folder in which the recordings are kept; None: they are deleted.
        against: git revision with which the working tree is compared; "" for other checks.
    """

    words: tuple[str, ...]
    devices: int = 2
    steps: int = 5
    strategy: str = ""
    patience: Patience = field(default_factory=Patience)
    keep: Path | None = None
    against: str = ""


class Runs:
    """Runner of a script on ranks, in one process, or on simulated ranks.

    Args:
        request: what to verify.
        folder: folder for recordings.
        server: starts processes.

    Attributes:
        home: folder whose script is run.
        moved: a folder, and its copy from which the script imports instead; empty: none.
        float64: True if the script computes in float64.
        rank_by_rank: True if one process gets the ranks' micro-batches one after another.
    """

    def __init__(self, request: Request, folder: Path, server: Server) -> None:
        self.request = request
        self.folder = folder
        self.server = server
        self.home = Path.cwd()
        self.moved: tuple[str, ...] = ()
        self.float64 = True
        self.rank_by_rank = False
        self._number = 0

    def on_ranks(self, *overrides: str, after: Recording | None = None, **changes: Any) -> Recording:
        """Run the script on all ranks.

        Args:
            overrides: names of what is disabled or changed.
            after: run in whose folder the script is started, so that it finds the checkpoints there.
            changes: settings that are not those of the request, such as ``epoch_steps=5``.
        """
        settings = replace(self._settings(), world=self.request.devices, overrides=overrides)
        return self._run("ranks", replace(settings, **changes), after)

    def on_simulated(self, world: int, steps: int) -> Recording:
        """Run the script on ``world`` simulated ranks that do not communicate, as many at a time as there are cores."""
        settings = replace(self._settings(), world=world, steps=steps, simulated=True)
        return self._run("simulated", settings, together=os.cpu_count() or 1)

    def on_one(self, ranks: Recording, *overrides: str, order: tuple[int, ...] = ()) -> Recording:
        """Run the script as one process, on the samples that the recording ``ranks`` contains.

        Args:
            ranks: recording of the run on ranks.
            overrides: names of what is disabled or changed.
            order: ranks whose samples are fed, in the order in which they are joined; empty: all.
        """
        feed = tuple(str(ranks.ranks[rank].folder) for rank in order or range(self.request.devices))
        return self._run("one", replace(self._settings(), feed=feed, overrides=overrides))

    def certificate(
        self,
        steps: int = 0,
        rows: Iterable[Row] = (),
        found: tuple[Difference, Reason | None] | None = None,
        reasons: Iterable[str] = (),
        notes: Iterable[str] = (),
        course: Iterable[float] = (),
        compared: str = "ranks and one process",
    ) -> Certificate:
        """Return a certificate. Its verdict depends on the difference ``found`` and on ``reasons`` against a verdict.

        The verdict is "different" if something was found, else "could not tell" if there are reasons, else "alike".

        Args:
            steps: optimizer steps that were compared.
            rows: what was compared.
            found: the first difference and its cause.
            reasons: why there is no verdict.
            notes: expected differences; equal ones are listed once.
            course: differences of gradients by step.
            compared: what the ranks were compared with.
        """
        certificate = Certificate(
            " ".join(self.request.words),
            self.request.devices,
            steps,
            ALIKE,
            precision="float64" if self.float64 else "own",
            rows=tuple(rows),
            reasons=tuple(reasons),
            notes=tuple(dict.fromkeys(notes)),
            gradient_differences=tuple(course),
            compared=compared,
        )
        if found is None:
            return replace(certificate, verdict=UNKNOWN) if certificate.reasons else certificate
        difference, reason = found
        certificate = replace(certificate, verdict=DIFFERENT, first_difference=str(difference))
        return certificate if reason is None else replace(certificate, cause=str(reason), evidence=reason.proof)

    def _run(self, name: str, settings: Settings, after: Recording | None = None, together: int = 0) -> Recording:
        self._number += 1
        settings = replace(settings, folder=str(self.folder / f"{self._number}-{name}"))
        source = self.home if after is None else after.first.folder.parent / settings.working_folder.name
        working_copy(source, settings.working_folder)
        endings = run(self.server, settings, self.request.patience, together)
        ranks = [replace(settings, rank=rank) for rank in range(settings.world)]
        pairs = zip(ranks, endings, strict=True)
        return Recording(tuple(RankRecording(each.own_folder, ending) for each, ending in pairs))

    def _settings(self) -> Settings:
        return Settings(
            self.request.words,
            folder="",
            steps=self.request.steps,
            float64=self.float64,
            rank_by_rank=self.rank_by_rank,
            strategy=self.request.strategy,
            home=str(self.home),
            moved=self.moved,
        )


def working_copy(source: Path, target: Path, names: Sequence[str] | None = None) -> Path:
    """Copy a folder for one run, so that other runs do not find the files that this run writes.

    Small files are copied. Large files, hidden folders, and folders after the first 3,000 entries are linked.

    Args:
        source: the folder.
        target: the copy. What it has is kept.
        names: paths in the folder of what is copied; None: everything.

    Returns:
        ``target``.
    """
    remaining = [_MAX_ENTRIES]
    for name in os.listdir(source) if names is None else names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        _copy(source.absolute() / name, target / name, remaining, target.absolute())
    target.mkdir(parents=True, exist_ok=True)  # also of an empty folder
    return target


def _copy(source: Path, target: Path, remaining: list[int], root: Path) -> None:
    remaining[0] -= 1
    # the copy itself, if it is inside the folder that is copied
    if root.is_relative_to(source) or target.exists():
        return
    is_link = source.is_symlink()
    if source.is_dir() and not is_link and remaining[0] > 0 and not source.name.startswith("."):
        target.mkdir()
        for entry in source.iterdir():
            _copy(entry, target / entry.name, remaining, root)
    elif source.is_file() and not is_link and source.stat().st_size <= _LARGE:
        shutil.copy2(source, target)
    else:
        target.symlink_to(source)
