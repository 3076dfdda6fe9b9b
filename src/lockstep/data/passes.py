"""Warnings about loaders that can only be read once, such as a generator."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.data.workers import rewinds
from lockstep.ground.rank import warn_once

NOTHING_LEFT = (
    "{name} gives no batches in this pass: it reads something that can be read once, such as a generator or an open "
    "file, and that has been read. {way_out}"
)
GOES_ON = (
    "{name} is an iterator ({kind}): this pass begins where an earlier one has ended, a sanity check perhaps, and what "
    "that has read does not come again. {way_out}"
)
WAY_OUT = "Give a DataLoader, a list, or an object whose `__iter__` begins anew with each call."


class Passes:
    """The passes over one loader.

    Args:
        loader: the user's loader.
        name: name of the loader in messages.
        stage: "train", "val", "test" or "predict". Training may continue within an iterator, by
            ``limit_train_batches`` batches an epoch, without a warning.
    """

    def __init__(self, loader: object, name: str, stage: str) -> None:
        self._loader, self._name = loader, name
        self._is_iterator = isinstance(loader, Iterator) and not rewinds(loader)
        self._may_go_on = stage == "train"
        self._had_batches = False

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass; warn if an earlier pass has consumed some or all of them."""
        if self._is_iterator and self._had_batches and not self._may_go_on:
            self._tell(GOES_ON)
        had_batches = False
        for first in itertools.islice(batches, 1):
            had_batches = self._had_batches = True
            yield first
            del first  # else it would stay in memory for the whole pass
        if not had_batches and (self._had_batches or self._is_iterator):
            self._tell(NOTHING_LEFT)
        for batch in batches:  # `yield from` would close a user's generator together with this one
            yield batch
            del batch

    def _tell(self, text: str) -> None:
        warn_once(text.format(name=self._name, kind=type(self._loader).__name__, way_out=WAY_OUT))
