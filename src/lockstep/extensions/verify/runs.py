"""Makes the runs of a script: on ranks, as one process, on ranks that are simulated; and the certificate of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.extensions.verify.certificate import ALIKE, DIFFERENT, UNKNOWN, Certificate, Row
from lockstep.extensions.verify.compare import Difference, Reason
from lockstep.extensions.verify.processes import Patience, Server, run
from lockstep.extensions.verify.recordings import RankRecording, Recording
from lockstep.extensions.verify.settings import Settings
from lockstep.extensions.verify.working_copy import working_copy


@dataclass(frozen=True)
class Request:
    """What is to be verified.

    Attributes:
        words: the script and its arguments, or ``-m`` and a module with its.
        devices: ranks.
        steps: optimizer steps.
        strategy: what Trainers take on several ranks in place of their own; "" for their own.
        patience: how long a run may take.
        keep: a folder for the recordings; None: they go.
    """

    words: tuple[str, ...]
    devices: int = 2
    steps: int = 5
    strategy: str = ""
    patience: Patience = field(default_factory=Patience)
    keep: Path | None = None


class Runs:
    """Makes runs of one script.

    Args:
        request: what is asked for.
        folder: where recordings go.
        server: starts processes.

    Attributes:
        float64: whether the script calculates in float64.
        apart: whether one process gets the ranks' micro-batches one after another.
    """

    def __init__(self, request: Request, folder: Path, server: Server) -> None:
        self.request = request
        self.folder = folder
        self.server = server
        self.float64 = True
        self.apart = False
        self._number = 0

    def on_ranks(self, *overrides: str) -> Recording:
        """Run the script on all ranks."""
        return self._run("ranks", replace(self._settings(), world=self.request.devices, overrides=overrides))

    def on_ranks_cut(
        self, steps: int, cut: int, epochs: int = 0, left_by: Recording | None = None, interrupt: int = 0
    ) -> Recording:
        """Run the script on all ranks, with epochs that end early, in the folder that another run has left."""
        world = self.request.devices
        settings = replace(self._settings(), world=world, steps=steps, cut=cut, epochs=epochs, interrupt=interrupt)
        return self._run("ranks", settings, left_by)

    def on_simulated(self, world: int, steps: int) -> Recording:
        """Run the script on ranks that have no others to talk to, a few at a time."""
        settings = replace(self._settings(), world=world, steps=steps, simulated=True)
        return self._run("simulated", settings, together=os.cpu_count() or 1)

    def on_one(
        self, ranks: Recording, *overrides: str, order: tuple[int, ...] = (), once: tuple[int, ...] = ()
    ) -> Recording:
        """Run the script as one process, which is fed what the ranks were."""
        feed = tuple(str(ranks.ranks[rank].folder) for rank in order or range(self.request.devices))
        return self._run("one", replace(self._settings(), feed=feed, overrides=overrides, once=once))

    def certificate(
        self,
        steps: int = 0,
        rows: Iterable[Row] = (),
        found: tuple[Difference, Reason | None] | None = None,
        reasons: Iterable[str] = (),
        nature: Iterable[str] = (),
        course: Iterable[float] = (),
        compared: str = "ranks and one process",
    ) -> Certificate:
        """The certificate: "different" where something was found, "could not tell" where there are reasons."""
        certificate = Certificate(
            " ".join(self.request.words),
            self.request.devices,
            steps,
            ALIKE,
            precision="float64" if self.float64 else "own",
            rows=tuple(rows),
            reasons=tuple(reasons),
            nature=tuple(dict.fromkeys(nature)),
            course=tuple(course),
            compared=compared,
        )
        if found is None:
            return replace(certificate, verdict=UNKNOWN) if certificate.reasons else certificate
        difference, reason = found
        certificate = replace(certificate, verdict=DIFFERENT, first=str(difference))
        return certificate if reason is None else replace(certificate, cause=str(reason), proof=reason.proof)

    def _run(self, name: str, settings: Settings, left_by: Recording | None = None, together: int = 0) -> Recording:
        self._number += 1
        settings = replace(settings, folder=str(self.folder / f"{self._number}-{name}"))
        source = Path.cwd() if left_by is None else left_by.first.folder.parent / settings.working_folder.name
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
            apart=self.apart,
            strategy=self.request.strategy,
            home=str(Path.cwd()),
        )
