"""Optimizers and schedulers of a run: parsing of ``configure_optimizers``, and wrappers for ``self.optimizers()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.types import LRSchedulerConfig
from lockstep.module import LightningModule

SHAPES = (
    "an optimizer, a list of optimizers, ([optimizers], [schedulers]), or a dict with the keys "
    '"optimizer" and (optional) "lr_scheduler" and "monitor"'
)


class LightningOptimizer:
    """Wrapper that ``self.optimizers()`` returns. Its ``step`` runs the hooks and counts the step.

    All other attributes come from the wrapped optimizer.

    Args:
        optimizer: the wrapped optimizer.
        step: function of (optimizer, closure, keyword arguments) that makes a step.
        module: module of the fit; None in a copy outside of a fit.
        sync: function that returns a context in which gradients are reduced or not; None in a copy.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., Any],
        module: LightningModule | None,
        sync: Callable[..., Any] | None,
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._module = module
        self._sync = sync

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `isinstance(optimizer, torch.optim.SGD)` of scripts and of torch's schedulers checks the wrapped optimizer
        return type(self._optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The wrapped ``torch.optim.Optimizer``."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: object) -> Any:
        """Run the hooks, step the optimizer, and return the result of the closure.

        Args:
            closure: function without arguments that computes the loss and its gradients; most optimizers need none.
            kwargs: further arguments of the optimizer's ``step``.

        Raises:
            MisconfigurationException: `closure` is not callable.
        """
        if closure is not None and not callable(closure):
            raise MisconfigurationException(f"optimizer.step(closure={closure!r}): the closure must be callable.")
        return self._step(self._optimizer, closure, kwargs)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Require gradients only for this optimizer's parameters in the ``with`` block.

        Args:
            sync_grad: False: do not reduce gradients over the ranks in the block.

        Raises:
            MisconfigurationException: the optimizer is a copy outside of a fit.

        Example::

            discriminator_optimizer = self.optimizers()[1]
            with discriminator_optimizer.toggle_model(sync_grad=is_last):
                self.manual_backward(loss)
        """
        if self._module is None or self._sync is None:
            raise MisconfigurationException(
                "optimizer.toggle_model(): this optimizer is a copy that belongs to no fit; use the one that "
                "`self.optimizers()` returns."
            )
        this: Any = self  # it passes as an Optimizer
        with self._sync(sync_grad), self._module.toggled_optimizer(this):
            yield

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # `copy` and `pickle` ask an object that has no attributes yet
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return LightningOptimizer, (self._optimizer, _step_alone, None, None)  # a copy belongs to no fit

    def __repr__(self) -> str:
        return f"Lightning{self._optimizer!r}"


def _step_alone(optimizer: Optimizer, closure: Callable[[], Any] | None, kwargs: dict[str, object]) -> Any:
    step: Callable[..., Any] = optimizer.step
    return step(**kwargs) if closure is None else step(closure, **kwargs)


class NoOptimizer(Optimizer):
    """Optimizer without parameters, for a module whose ``configure_optimizers`` returns None."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})
        self.param_groups = []  # callbacks would look for the learning rate of a group

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, without updating any parameters."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: there are no gradients."""


def parse(
    returned: object, *, automatic: bool, custom_scheduler_step: bool
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return (optimizers, schedulers) from a result of ``configure_optimizers``.

    Args:
        returned: any of the shapes that Lightning documents.
        automatic: the module's ``automatic_optimization``.
        custom_scheduler_step: True if the module overrides ``lr_scheduler_step``, so any scheduler is accepted.

    Raises:
        MisconfigurationException: the shape is unknown, a scheduler lacks its metric or optimizer, or there are
            several optimizers under automatic optimization.
    """
    if returned is None:
        rank_zero_warn(
            "`configure_optimizers` returned None: this fit will run with no optimizer, and updates no parameters. If "
            "this is not intended, return the optimizer."
        )
        return [NoOptimizer()], []
    optimizers, schedulers = _unpack(returned)
    if automatic and len(optimizers) > 1:
        raise MisconfigurationException(
            f"Training with multiple optimizers ({len(optimizers)} here) is only supported with manual optimization: "
            "set `self.automatic_optimization = False` in the module, and step them in `training_step` "
            "(`a, b = self.optimizers()`). To step all of them after one backward, return a single "
            "`lockstep.CombinedOptimizer(a, b)` from `configure_optimizers`."
        )
    configs = [_scheduler_config(scheduler, automatic) for scheduler in schedulers]
    for config in configs:
        _check_scheduler(config, optimizers, automatic, custom_scheduler_step)
    return optimizers, configs


def _is_optimizer(obj: object) -> bool:
    return isinstance(obj, Optimizer) or all(
        hasattr(obj, name) for name in ("param_groups", "step", "zero_grad", "state_dict", "load_state_dict")
    )


def _unpack(returned: object) -> tuple[list[Any], list[Any]]:
    """Split a result of ``configure_optimizers`` into optimizers and schedulers, without checks."""
    if _is_optimizer(returned):
        return [returned], []
    if isinstance(returned, dict):
        return _unpack_dicts([returned])
    found = _unpack_sequence(returned) if isinstance(returned, (list, tuple)) else None
    if found is None:
        raise MisconfigurationException(
            f"`configure_optimizers` returned {type(returned).__name__} ({returned!r:.200}); it must return {SHAPES}."
        )
    return found


def _unpack_dicts(returned: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    for entry in returned:
        if "optimizer" not in entry:
            raise MisconfigurationException(
                f'`configure_optimizers` returned a dict without the key "optimizer" (it has {sorted(entry)}); '
                f"it must return {SHAPES}."
            )
        _warn_of_extra("`configure_optimizers` returned a dict with", entry, {"optimizer", "lr_scheduler", "monitor"})
    scheduled = [entry for entry in returned if entry.get("lr_scheduler")]
    schedulers = [{"monitor": entry.get("monitor"), **_as_dict(entry["lr_scheduler"])} for entry in scheduled]
    return [entry["optimizer"] for entry in returned], schedulers


def _unpack_sequence(returned: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Split a sequence into optimizers and schedulers; return None if its structure is not recognized."""
    if not returned:
        return None
    if len(returned) == 2 and isinstance(returned[0], (list, tuple)) and all(map(_is_optimizer, returned[0])):
        schedulers = returned[1] if isinstance(returned[1], (list, tuple)) else [returned[1]]
        return list(returned[0]), list(schedulers)
    if all(isinstance(entry, dict) for entry in returned):
        return _unpack_dicts(returned)
    if all(map(_is_optimizer, returned)):
        return list(returned), []
    if len(returned) == 2 and _is_optimizer(returned[0]):
        raise MisconfigurationException(
            f"`configure_optimizers` returned ({type(returned[0]).__name__}, {type(returned[1]).__name__}): put "
            "the optimizer and the scheduler in a list each, `return [optimizer], [scheduler]`, or return "
            '{"optimizer": optimizer, "lr_scheduler": scheduler}.'
        )
    return None


def _as_dict(scheduler: object) -> dict[str, Any]:
    return dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}


def _warn_of_extra(what: str, given: dict[str, Any], known: set[str]) -> None:
    extra = []
    for key in sorted(map(str, set(given) - known)):
        near = get_close_matches(key, known, 1)
        extra.append(f"{key!r} (did you mean {near[0]!r}?)" if near else repr(key))
    if extra:
        rank_zero_warn(
            f"{what} unknown keys: {', '.join(extra)}; the known keys are {sorted(known)}.", category=RuntimeWarning
        )


def _scheduler_config(scheduler: object, automatic: bool) -> LRSchedulerConfig:
    given = _as_dict(scheduler)
    known = {field.name for field in fields(LRSchedulerConfig)}
    _warn_of_extra("The lr scheduler's dict has", given, known)
    if "scheduler" not in given:
        raise MisconfigurationException(f'The lr scheduler dict must have the key "scheduler"; it has {sorted(given)}.')
    config = LRSchedulerConfig(**{key: value for key, value in given.items() if key in known})
    if "reduce_on_plateau" not in given:
        config.reduce_on_plateau = isinstance(config.scheduler, ReduceLROnPlateau)
    if config.interval not in ("step", "epoch"):
        raise MisconfigurationException(
            f'The lr scheduler\'s "interval" is {config.interval!r}; it must be "step" or "epoch".'
        )
    if not isinstance(config.frequency, int) or config.frequency < 1:
        raise MisconfigurationException(
            f'The lr scheduler\'s "frequency" is {config.frequency!r}; it must be an int of at least 1.'
        )
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise MisconfigurationException(
            "`configure_optimizers` must include a monitor when a `ReduceLROnPlateau` scheduler is used: return "
            '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}.'
        )
    return config


def _check_scheduler(
    config: LRSchedulerConfig, optimizers: list[Any], automatic: bool, custom_scheduler_step: bool
) -> None:
    scheduler = config.scheduler
    kind = type(scheduler).__name__
    if not (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict")):
        raise WrongType(
            f"The lr scheduler {kind} has no `state_dict`/`load_state_dict`, so a resumed run could not restore it: "
            "define both."
        )
    if automatic and config.interval == "epoch" and isinstance(scheduler, OneCycleLR):
        # Lightning's default interval is the epoch, with which this schedule hardly advances
        rank_zero_warn(
            "OneCycleLR expects one call per optimizer step, but would be stepped once an epoch: return "
            '{"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}.',
            category=RuntimeWarning,
        )
    ordinary = isinstance(scheduler, (LRScheduler, ReduceLROnPlateau))
    if automatic and not ordinary and not custom_scheduler_step:
        raise MisconfigurationException(
            f"The lr scheduler {kind} is not a torch LRScheduler: override `lr_scheduler_step` in the module to "
            "step it."
        )
    owner = getattr(scheduler, "optimizer", None)
    if owner is not None and not any(owner is optimizer for optimizer in optimizers):
        raise MisconfigurationException(
            f"The lr scheduler {kind} belongs to an optimizer that `configure_optimizers` did not return: return both."
        )


def refuse_loss(loss: Tensor, who: str, error: RuntimeError) -> None:
    """Raise an error that explains why backward failed, if the loss is the cause; otherwise return.

    Raises:
        MisconfigurationException: the loss is detached, or not a single number.
    """
    if not loss.requires_grad:
        raise MisconfigurationException(
            f"{who} a loss that does not require gradients: it was detached (`.detach()`, `.item()`, `no_grad`), or no "
            "parameter with requires_grad=True contributes to it. Compute the loss from the module's outputs."
        ) from error
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"{who} a loss of shape {tuple(loss.shape)}: use one number, for example `loss.mean()`."
        ) from error
