"""Checks of a loader at each pass: changes since the dataloader hook ran, and iterators that are already consumed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from lockstep.data.workers import rewinds
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

RELOAD = "Set Trainer(reload_dataloaders_every_n_epochs=1) to call the hook before each epoch."
LENGTH = "The data set of {name} has {now} samples, but had {before} when its dataloader hook ran"


def check_samples(name: str, before: int | None, now: int | None) -> None:
    """Warn if a data set has grown since the dataloader hook ran. Raise an error if it has shrunk.

    Args:
        name: name of the loader.
        before: number of samples when the loader's hook ran; None if unknown.
        now: current number of samples.

    Raises:
        MisconfigurationException: the data set has fewer samples than before.
    """
    if before is None or now is None or before == now:
        return
    length = LENGTH.format(name=name, now=now, before=before)
    if now < before:
        raise MisconfigurationException(f"{length}, and the epoch was planned for {before} samples. {RELOAD}")
    warn_once(f"{length}. Added samples are not drawn. {RELOAD}", key=f"{name} has grown")


def warn_if_grown(name: str, before: int, now: int | None) -> None:
    """Warn if a sampler has grown since the dataloader hook ran. ``before`` is -1 if the length is unknown."""
    if now is not None and now > before >= 0:
        warn_once(
            f"The sampler of {name} has length {now}, but had {before} when its dataloader hook ran. An epoch still "
            f"ends after {before} samples. {RELOAD}",
            key=f"sampler of {name} has grown",
        )


def check_option(name: str, option: str, before: object, now: object) -> None:
    """Raise an error if an option of a batch sampler has changed since the dataloader hook ran.

    Raises:
        MisconfigurationException: the option has changed.
    """
    if before != now:
        raise MisconfigurationException(
            f"{name}: {option} was changed from {before} to {now} after its dataloader hook ran, but the epoch was "
            f"planned with {before}. {RELOAD}"
        )


# -- loaders that can only be read once ------------------------------------------------------------------------

NOTHING_LEFT = (
    "{name} yields no batches in this pass, because it can only be read once, like a generator or an open file, and an "
    "earlier pass has read it. {way_out}"
)
CONTINUES = (
    "{name} is an iterator ({kind}), so this pass starts where an earlier one ended (perhaps the sanity check) and "
    "misses the batches that were read then. {way_out}"
)
WAY_OUT = "Return a DataLoader, a list, or an object with an `__iter__` that restarts on each call."


class Passes:
    """Reader of a loader's batches that warns if the loader is an iterator that an earlier pass has consumed.

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
        """Yield the batches of a pass. Warn if some or all are missing because an earlier pass consumed them."""
        if self._is_iterator and self._had_batches and not self._may_go_on:
            self._warn(CONTINUES)
        had_batches = False
        for first in itertools.islice(batches, 1):
            had_batches = self._had_batches = True
            yield first
            del first  # else it would stay in memory for the whole pass
        if not had_batches and (self._had_batches or self._is_iterator):
            self._warn(NOTHING_LEFT)
        for batch in batches:  # `yield from` would close a user's generator together with this one
            yield batch
            del batch

    def _warn(self, text: str) -> None:
        warn_once(text.format(name=self._name, kind=type(self._loader).__name__, way_out=WAY_OUT))
