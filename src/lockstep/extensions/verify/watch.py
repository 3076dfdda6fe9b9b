"""What the observers of a process have in common: its settings, its journal, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lockstep.extensions.verify.processes import Ending
from lockstep.extensions.verify.recordings import Event, RankRecording
from lockstep.extensions.verify.settings import Journal, Settings, stack


class Stop(BaseException):
    """The steps are made: the script is not to go on. No `except Exception` of the script's catches it."""


class Watch:
    """How far a process is.

    Attributes:
        settings: what the process was told.
        journal: where it notes what it sees.
        steps: optimizer steps so far, of the optimizer that made most.
        updates: optimizer steps so far, of all optimizers.
        backwards: calls of backward since the last step.
        is_training: whether training has begun: before it, random numbers are a model's first weights.
        in_loader: whether a loader is drawing a batch.
        collates: whether its samples are being put together.
        chunks: samples of each rank in the newest batch of a replay, in the order in which they are put together.
        depth: how many modules are being called, one within the other.
        on_training: called when training begins.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.journal = Journal(settings.own_folder)
        self.steps = 0
        self.updates = 0
        self.backwards = 0
        self.is_training = False
        self.in_loader = False
        self.collates = False
        self.chunks: tuple[int, ...] = ()
        self.depth = 0
        self.on_training: Callable[[], None] | None = None

    def of_rank_0(self, *kinds: str) -> list[Event]:
        """The events of some kinds of rank 0 of the ranks whose samples are fed; none where none are."""
        settings = self.settings
        if not settings.is_replay:
            return []
        return RankRecording(settings.folder_of_ranks / "rank-0", Ending("done")).of(*kinds)

    @property
    def is_done(self) -> bool:
        """Whether as many steps are made as were asked for."""
        return self.steps >= self.settings.steps

    def begin_training(self) -> None:
        """Training begins, unless it has."""
        if self.is_training:
            return
        self.is_training = True
        if self.on_training is not None:
            self.on_training()

    @contextmanager
    def inside_loader(self) -> Iterator[None]:
        """Inside, a loader draws a batch: random numbers are the data's own."""
        before, self.in_loader = self.in_loader, True
        try:
            yield
        finally:
            self.in_loader = before


def put(home: object, name: str, value: object) -> None:
    """Put something of lockstep's in the place of an attribute of torch's, to the end of this process."""
    setattr(home, name, value)


def note_collective(watch: Watch, name: str, payload: object, number: int = 0, whole: bool = True) -> None:
    """Note a collective.

    Args:
        watch: of this process.
        name: of the function.
        payload: what is sent.
        number: among the script's own calls; 0: one of a wrapper's.
        whole: whether all ranks take part.
    """
    lines = stack()
    watch.journal.note(
        "collective",
        name=name,
        number=number,
        whole=whole,
        shape=list(payload.shape) if isinstance(payload, Tensor) else None,
        update=watch.updates,
        backwards=watch.backwards,
        training=watch.is_training and torch.is_grad_enabled(),
        in_module=watch.depth > 0,
        where=next(iter(lines), ""),
        stack=lines,
    )
