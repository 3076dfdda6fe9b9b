"""State that the observers in a process share, such as the journal and the progress of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.extensions.verify.processes import Ending
from lockstep.extensions.verify.recordings import Event, RankRecording
from lockstep.extensions.verify.settings import Journal, Settings, stack

WHOLE = "whole"
"""Prefix of the file of a tensor from which the script cuts batches."""
_FEW = 16
"""Most numbers of a collective that are recorded; more are not a metric."""


class Stop(BaseException):
    """Exception that ends a script after all steps. `except Exception` in the script does not catch it."""


class Watch:
    """State of an observed process that its observers share.

    Attributes:
        settings: settings of the process.
        journal: journal of the events that observers record.
        steps: optimizer steps so far, of the optimizer with the most.
        updates: optimizer steps so far, of all optimizers.
        backwards: calls of backward since the last step.
        loss_line: line that has reduced a tensor to a number first since the last backward.
        scale_line: line that has computed a number last, such as by a division of the loss.
        is_training: True once training has started; random numbers drawn earlier are initial weights.
        in_loader: True while a loader draws a batch.
        collates: True while the samples of a batch are collated.
        chunks: samples of each rank in the newest batch of a replay, in the order in which they are joined.
        generators: references to the random number generators that the script created.
        depth: number of nested calls of modules.
        in_backward: True while a backward runs.
        in_step: True while an optimizer makes a step without a closure.
        evaluates: True if the newest call of a model was not for training.
        has_iterated_loader: True once a loader has been iterated with gradients enabled, as for training.
        drains: True if a loader has ended early: it may have been read ahead, so that one more step follows.
        joins: True once the script has created a Join context.
        on_training_start: called when training starts.
        made: batches and their parts that the script has made without a loader, with the files that they are saved to.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.journal = Journal(settings.own_folder)
        self.steps = 0
        self.updates = 0
        self.backwards = 0
        self.loss_line = ""
        self.scale_line = ""
        self.is_training = False
        self.in_loader = False
        self.collates = False
        self.chunks: tuple[int, ...] = ()
        self.generators: list[ref[Any]] = []
        self.depth = 0
        self.in_backward = False
        self.in_step = False
        self.evaluates = False
        self.has_iterated_loader = False
        self.drains = False
        self.joins = False
        self.on_training_start: Callable[[], None] = lambda: None
        self.made = WeakIdKeyDictionary()

    def living_generators(self) -> list[Any]:
        """Return the script's own random number generators that still exist, in the order of their creation."""
        return [generator for each in self.generators if (generator := each()) is not None]

    def events_of_rank_0(self, *kinds: str) -> list[Event]:
        """Return rank 0's events of the given kinds. Return an empty list unless this process replays a run."""
        settings = self.settings
        if not settings.is_replay:
            return []
        return RankRecording(settings.folder_of_ranks / "rank-0", Ending("done")).find(*kinds)

    def files(self, name: str, number: int, is_one_by_one: bool = True) -> list[Path]:
        """Return the file that this rank writes, or the files of the ranks that one process reads.

        Args:
            name: name of the file, with ``{}`` for the number.
            number: number in this process. If it gets the ranks' micro-batches one after another, there is one file,
                whose number is that of the rank.
            is_one_by_one: False to read the files of all ranks even so.
        """
        folders = [Path(folder) for folder in self.settings.feed] or [self.journal.folder]
        if self.settings.rank_by_rank and is_one_by_one:
            number, rank = divmod(number, len(folders))
            folders = [folders[rank]]
        return [folder / name.format(number) for folder in folders]

    @property
    def is_done(self) -> bool:
        """True once all requested steps are made."""
        return self.steps >= self.settings.steps

    def end_join(self) -> None:
        """If the script uses Join, create the file that signals to all ranks that this rank has made all steps."""
        if self.joins:
            self._join_end.touch()

    @property
    def has_join_ended(self) -> bool:
        """True if a rank that trains inside Join has made all steps.

        Inside Join the ranks make different numbers of steps. All of them end with the epoch in which the first rank
        has made the requested number: a rank that started another epoch would wait for the ranks that have ended.
        """
        return self.joins and self._join_end.exists()

    @property
    def _join_end(self) -> Path:
        return self.settings.own_folder.parent / "join-ended"

    def start_training(self) -> None:
        """Record that training has started. Later calls do nothing."""
        if self.is_training:
            return
        self.is_training = True
        # what it calls is not a part of the step, which may be traced
        with self.inside_loader():
            self.on_training_start()

    def withdraw(self, value: object, is_whole: bool = False) -> None:
        """Let one process not be fed what a rank has saved of tensors that the script has made, as they are no batches.

        Args:
            value: the tensors, in any structure.
            is_whole: True if the script cuts batches from them: one process may then use those of rank 0.
        """
        for leaf in tree_leaves(value):
            path = self.made.get(leaf) if isinstance(leaf, Tensor) else None
            if path is not None and path.exists():
                path.rename(path.with_name(f"{WHOLE if is_whole else 'withdrawn'}-{path.name}"))

    @contextmanager
    def inside_loader(self) -> Iterator[None]:
        """Mark that a loader draws a batch in the context, so that its random numbers are not counted as the step's."""
        before, self.in_loader = self.in_loader, True
        try:
            yield
        finally:
            self.in_loader = before


def patch(owner: object, name: str, value: object) -> None:
    """Replace an attribute of a module or class. The observed process keeps the new value until it ends."""
    setattr(owner, name, value)


def before_each_call(kind: Any, name: str, change: Callable[[Any, dict[str, Any]], object]) -> None:
    """Call ``change`` with the object and the keyword arguments before each call of a method."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def method(own: object, *args: Any, **kwargs: Any) -> Any:
        change(own, kwargs)
        return original(own, *args, **kwargs)

    patch(kind, name, method)


def record_collective(watch: Watch, name: str, payload: object, number: int = 0, whole: bool = True) -> None:
    """Record a call of a collective in the journal.

    Args:
        watch: state that this process's observers share.
        name: name of torch's function.
        payload: what is sent; the shape is recorded if it is a tensor, and in an evaluation a few numbers are.
        number: number among the script's own calls; 0: a wrapper's call.
        whole: True if all ranks take part.
    """
    lines = stack()
    watch.withdraw(payload)
    watch.journal.record(
        "collective",
        name=name,
        number=number,
        whole=whole,
        shape=list(payload.shape) if isinstance(payload, Tensor) else None,
        update=watch.updates,
        backwards=watch.backwards + watch.in_backward,
        in_step=watch.in_step,
        training=watch.is_training and torch.is_grad_enabled(),
        in_module=watch.depth > 0,
        evaluates=watch.evaluates,
        values=_numbers(payload) if watch.evaluates and not watch.depth else [],
        where=next(iter(lines), ""),
        stack=lines,
    )


def _numbers(payload: object) -> list[float]:
    """Return the numbers in a tensor, or in an object such as a dict of metrics. Return [] if they are many."""
    leaves = tree_leaves(payload)
    if any(leaf.numel() > _FEW if type(leaf) is Tensor else not isinstance(leaf, int | float) for leaf in leaves):
        return []
    found = [number for leaf in leaves for number in torch.as_tensor(leaf).double().flatten().tolist()]
    return found if len(found) <= _FEW else []
