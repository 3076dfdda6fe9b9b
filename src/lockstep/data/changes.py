"""Checks for changes of a loader since its hook ran: a warning or an error before the next epoch."""

from __future__ import annotations

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once

RELOAD = "Trainer(reload_dataloaders_every_n_epochs=1) plans each epoch anew."
LENGTH = "The data set of {name} has {now} samples, and had {before} when its loader was asked for"


def check_samples(name: str, before: int | None, now: int | None) -> None:
    """Warn about a data set that has grown, and refuse one that has shrunk.

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
        raise MisconfigurationException(f"{length}, and the epoch is planned by that. {RELOAD}")
    warn_once(f"{length}: what has come since is not drawn. {RELOAD}", key=f"{name} has grown")


def tell_of_more(name: str, before: int, now: int | None) -> None:
    """Warn about a sampler that has grown since its loader's hook ran; ``before`` is -1 if its length is unknown."""
    if now is not None and now > before >= 0:
        warn_once(
            f"The sampler of {name} has a length of {now}, and had {before} when its loader was asked for: an epoch "
            f"ends after {before}. {RELOAD}",
            key=f"sampler of {name} has grown",
        )


def check_option(name: str, option: str, before: object, now: object) -> None:
    """Refuse a changed option of a loader's batch sampler.

    Raises:
        MisconfigurationException: the option has changed; the message names the way out.
    """
    if before != now:
        raise MisconfigurationException(
            f"{name}: {option}={before} has become {now} since the loader was asked for, and the epoch is planned by "
            f"that. {RELOAD}"
        )
