"""Refuses optimizers that cannot take the module's parameters before the weights of a folder are read."""

from __future__ import annotations

import io
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import copy
from typing import Any

from torch.optim import Optimizer

from lockstep.checkpoint.pretrained import is_planned
from lockstep.engines.owners import with_parameters
from lockstep.ground.seed import isolate_rng
from lockstep.loop.hooks import is_overridden
from lockstep.loop.optimizers import optimizers_in
from lockstep.loop.session import Session
from lockstep.module import LightningModule

OF_LOADERS = ("estimated_stepping_batches", "num_training_batches", "train_dataloader", "datamodule", "fit_loop")
"""Attributes of the Trainer by which loaders are asked for, which come later."""


def check_early(session: Session) -> None:
    """Refuse optimizers by what is known of parameters without values: their shapes, and the strategy.

    ``configure_optimizers`` is called on a copy of the module, and what it makes is dropped. Where it cannot be called
    yet nothing is refused: the call that counts comes when weights are in place. Nothing happens where no weights
    wait to be read.

    Raises:
        ValueError: of an optimizer that does not take what it was given.
        MisconfigurationException: of the strategy, which cannot do an optimizer's update.
    """
    module = session.module
    if not session.fitting or not is_planned(module):
        return
    if not is_overridden("configure_optimizers", module, LightningModule):
        return
    try:
        with _unnoticed():
            made = optimizers_in(_copied(module, session).configure_optimizers())
    except ValueError as error:
        if _is_of_optimizer(error):
            raise
        return
    except Exception:  # it needs what is not there yet, values or the length of an epoch say
        return
    check = session.strategy.check_update
    if check is not None:
        for optimizer in with_parameters(made):
            check(optimizer)


@contextmanager
def _unnoticed() -> Iterator[None]:
    """Inside, nothing is shown and no random numbers are drawn that would be missing later."""
    with isolate_rng(include_cuda=False), redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _copied(module: LightningModule, session: Session) -> LightningModule:
    """A module with the same layers and parameters; attributes that are set in it are not set in the first one."""
    made: LightningModule = object.__new__(type(module))
    own = {name: copy(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
    vars(made).update(own, _trainer=_EarlyTrainer(session.trainer))
    return made


class _EarlyTrainer:
    """A Trainer that has no loaders yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in OF_LOADERS:
            raise LookupError(name)
        return getattr(self._trainer, name)


def _is_of_optimizer(error: ValueError) -> bool:
    """Whether it comes from a method of an optimizer, and is about more than where parameters are.

    They are on the meta device, which some optimizers do not know.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    about_devices = any(word in str(error).lower() for word in ("device", "meta", "cpu", "cuda"))
    return not about_devices and any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames)
