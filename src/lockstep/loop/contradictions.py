"""What a user asks for that cannot all be: callbacks that contradict each other, and what has no effect beside another.

The first is refused, the second is said. Values of single flags, and flags alone, are checked in `lockstep.config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lockstep.callbacks.base import Callback
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.model_checkpoint import ModelCheckpoint
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once
from lockstep.loop.hooks import is_overridden
from lockstep.loop.session import Session
from lockstep.module import LightningModule


def check_contradictions(session: Session) -> None:
    """Refuse callbacks of a fit that contradict each other, and say what has no effect.

    Raises:
        MisconfigurationException: with the callbacks, and the way out.
    """
    _check_averages(session.callbacks)
    for said in (*_modes(session.callbacks), *_without_effect(session)):
        warn_once(said)


def _check_averages(callbacks: Sequence[Callback]) -> None:
    """Two averages: each takes the other's for the weights, and only one is left in the module at the end."""
    averages = [each for each in callbacks if each.averages_weights]
    if len(averages) > 1:
        names = " and ".join(type(each).__name__ for each in averages)
        raise MisconfigurationException(
            f"Trainer(callbacks=[{names}]): each leaves its own average of the weights in the module, so that one of "
            "them would be lost: keep one."
        )


def _modes(callbacks: Sequence[Callback]) -> Iterator[str]:
    """One metric of which less is better for one callback and more for another."""
    judges = [each for each in callbacks if isinstance(each, (EarlyStopping, ModelCheckpoint))]
    for place, stop in enumerate(judges):
        for other in judges[place + 1 :] if isinstance(stop, EarlyStopping) else ():  # checkpoints come last
            if other.monitor == stop.monitor and other.mode != stop.mode:
                yield (
                    f"EarlyStopping(monitor={stop.monitor!r}, mode={stop.mode!r}) and {type(other).__name__}(monitor="
                    f"{other.monitor!r}, mode={other.mode!r}): of one metric less is better for one of them, and more "
                    "for the other."
                )


def _without_effect(session: Session) -> Iterator[str]:
    config, module, callbacks = session.config, session.module, session.callbacks
    clips = not module.automatic_optimization or is_overridden("configure_gradient_clipping", module, LightningModule)
    if config.gradient_clip_algorithm != "norm" and config.gradient_clip_val is None and not clips:
        yield (
            f"Trainer(gradient_clip_algorithm={config.gradient_clip_algorithm!r}) clips nothing without "
            "gradient_clip_val."
        )
    every, epochs = config.check_val_every_n_epoch, config.max_epochs
    if session.enable_validation and every is not None and epochs != -1 and every > epochs > 0:
        yield (
            f"Trainer(check_val_every_n_epoch={every}, max_epochs={epochs}): the fit ends before its first validation."
        )
    for callback in callbacks:
        if not (isinstance(callback, ModelCheckpoint) and config.fast_dev_run):
            yield from callback.without_effect(config.max_epochs, config.max_steps)
