"""Refuses optimizers that cannot take the module's parameters before the weights of a folder are read."""

from __future__ import annotations

import io
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import copy
from typing import Any

import torch
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from lockstep.checkpoint.pretrained import is_planned
from lockstep.engines.owners import with_parameters
from lockstep.ground.seed import isolate_rng
from lockstep.loop.hooks import is_overridden
from lockstep.loop.optimizers import optimizers_in
from lockstep.loop.session import Session
from lockstep.module import LightningModule

NOT_YET = (
    *("estimated_stepping_batches", "num_training_batches", "train_dataloader", "datamodule", "fit_loop"),
    *("model", "lightning_module"),
)
"""Attributes of the Trainer by which loaders are asked for, which come later, or the module itself."""


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
    defined = is_overridden("configure_optimizers", module, LightningModule)
    if not (session.fitting and defined and is_planned(module)):
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
    """The module with other layers and parameters, which have shapes and no memory.

    What is set in them, or hung on them, is not set in the module: a hook of a parameter would run twice.
    """
    made: LightningModule = _twin(module, {})
    vars(made).update({name: copy(value) for name, value in vars(made).items() if isinstance(value, dict)})
    vars(made)["_trainer"] = _EarlyTrainer(session.trainer)
    return made


def _twin(layer: Any, memo: dict[int, Any]) -> Any:
    """A layer of the same class with the same attributes, whose parameters and inner layers are others."""
    if id(layer) not in memo:
        made = memo[id(layer)] = object.__new__(type(layer))
        vars(made).update(vars(layer))
        vars(made)["_parameters"] = {name: _shape_of(p, memo) for name, p in layer._parameters.items()}
        vars(made)["_modules"] = {
            name: None if inner is None else _twin(inner, memo) for name, inner in layer._modules.items()
        }
    return memo[id(layer)]


def _shape_of(parameter: Parameter | None, memo: dict[int, Any]) -> Parameter | None:
    """A parameter of the same shape on the meta device; the same one again for a tied one."""
    if parameter is None:
        return None
    if id(parameter) not in memo:
        memo[id(parameter)] = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    found: Parameter = memo[id(parameter)]
    return found


class _EarlyTrainer:
    """A Trainer that has no loaders and no module yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name in NOT_YET:
            raise LookupError(name)
        return getattr(self._trainer, name)


def _is_of_optimizer(error: ValueError) -> bool:
    """Whether it comes from a method of an optimizer, and is about more than where parameters are.

    They are on the meta device, which some optimizers do not know.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    about_devices = any(word in str(error).lower() for word in ("device", "meta", "cpu", "cuda"))
    return not about_devices and any(isinstance(frame.f_locals.get("self"), Optimizer) for frame in frames)
