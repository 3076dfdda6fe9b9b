"""Callbacks of a fit that cannot do their work: two averages of the weights, checkpoints that are never saved."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.callbacks.base import Callback
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once
from lockstep.loop.session import Session


def check_contradictions(session: Session) -> None:
    """Refuse two averages of the weights in a fit, and warn of checkpoints that are never saved.

    Raises:
        MisconfigurationException: with the callbacks, and the way out.
    """
    _check_averages(session.callbacks)
    config = session.config
    for callback in session.callbacks:
        if isinstance(callback, ModelCheckpoint) and not config.fast_dev_run:
            saves_nothing = callback.saves_nothing(config.max_epochs, config.max_steps)
            if saves_nothing:
                warn_once(saves_nothing)


def _check_averages(callbacks: Sequence[Callback]) -> None:
    """Two averages: each takes the other's for the weights, and only one is left in the module at the end."""
    averages = [each for each in callbacks if each.averages_weights is True]  # a stand-in has every attribute
    if len(averages) > 1:
        names = " and ".join(type(each).__name__ for each in averages)
        raise MisconfigurationException(
            f"Trainer(callbacks=[{names}]): each leaves its own average of the weights in the module, so that one of "
            "them would be lost: keep one."
        )
