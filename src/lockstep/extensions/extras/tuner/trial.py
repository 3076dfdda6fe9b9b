"""Trials: short trainings or evaluations, after which the Trainer and the model are restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.data.combined import unpack
from lockstep.datamodule import LightningDataModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import refuse_lazy
from lockstep.ground.seed import random_states, set_random_states
from lockstep.ground.tree import tree_map
from lockstep.ground.types import RunningStage, TrainerFn, TrainerState
from lockstep.loggers.base import DummyLogger, Logger
from lockstep.loop import state
from lockstep.loop.call import configured_optimizers
from lockstep.loop.evaluate import EvaluationLoop
from lockstep.loop.fit import FitLoop
from lockstep.loop.hooks import Hooks, is_overridden
from lockstep.loop.logged_metrics import LoggedMetrics
from lockstep.loop.logging import LogCollector
from lockstep.loop.metrics import is_metric
from lockstep.loop.progress import EPOCH_START
from lockstep.loop.session import FitState, Session
from lockstep.module import LightningModule
from lockstep.trainer import Trainer

# -- snapshot ------------------------------------------------------------------------------------------------


class _TensorCopy:
    """Copy of a tensor's values in CPU memory, from which the tensor is restored after a trial."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.values = tensor.detach().to("cpu", copy=True)

    def restore(self) -> Tensor:
        with torch.no_grad():
            self.tensor.copy_(self.values)
        return self.tensor


def _copied(value: object) -> Any:
    return tree_map(_TensorCopy, value, Tensor)


def _restored(value: object) -> Any:
    return tree_map(lambda copied: copied.restore(), value, _TensorCopy)


class TrialSnapshot:
    """Copy of all state that a trial may change, to restore it afterwards.

    It contains weights, buffers, gradients, modes and metrics of the module, its optimizers and schedulers, the
    gradient scaler, all global random states, and the values saved by the user's ``on_save_checkpoint`` hooks. Plain
    Python attributes of the module are not restored; keep such values in buffers, or save them in
    ``on_save_checkpoint``.

    Args:
        trainer: a Trainer inside a call, with its module set up.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        module, strategy = trainer.lightning_module, trainer.strategy
        refuse_lazy(module, "A search by trial, after which everything is as before")
        self._parts = [(part, part.training, _tensors(part)) for part in module.modules()]
        self._trainable = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._metrics = [
            (part, _copied({name: getattr(part, name) for name in part._defaults}), part._update_count, part._computed)
            for part in module.modules()
            if is_metric(part)
        ]
        self._optimizers = [(optimizer, _optimizer_state(optimizer)) for optimizer in strategy.optimizers]
        self._schedulers = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict())) for config in strategy.lr_scheduler_configs
        ]
        scaler = strategy.precision.scaler
        self._scaler = None if scaler is None else scaler.state_dict()
        self._random = random_states()
        self._generators = [(each, each.get_state()) for each in _generators(trainer.loaders.given)]
        self._checkpoint = _copied(state.collect(trainer.session)) if _saves_more(trainer) else None

    def drop_gradients(self) -> None:
        """Set ``.grad`` of all parameters to None, so that a trial does not change the gradients in the snapshot."""
        for parameter, _ in self._gradients:
            parameter.grad = None

    def restore(self) -> None:
        """Restore all state in the snapshot; may be called several times."""
        trainer = self._trainer
        if self._checkpoint is not None:
            checkpoint = _restored(self._checkpoint)
            saved = checkpoint.get(type(trainer.datamodule).__qualname__)
            if saved is not None and trainer.datamodule is not None:
                trainer.datamodule.load_state_dict(saved)
            trainer.hooks.call("on_load_checkpoint", checkpoint)
        for part, training, (parameters, buffers) in self._parts:
            part.training = training
            vars(part)["_parameters"] = _restored(parameters)
            vars(part)["_buffers"] = _restored(buffers)
        for parameter, requires_grad in self._trainable:
            parameter.requires_grad_(requires_grad)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for metric, states, count, computed in self._metrics:
            for name, value in _restored(states).items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed
        for optimizer, saved in self._optimizers:
            _restore_optimizer(optimizer, saved)
        for scheduler, saved in self._schedulers:
            scheduler.load_state_dict(copy.deepcopy(saved))
        scaler = trainer.strategy.precision.scaler
        if scaler is not None and self._scaler is not None:
            scaler.load_state_dict(self._scaler)
        for generator, saved in self._generators:
            generator.set_state(saved)
        # Last, because hooks and load_state_dict above may draw random numbers.
        set_random_states(self._random)


def _tensors(part: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return _copied(dict(part._parameters)), _copied(dict(part._buffers))


def _optimizer_state(optimizer: Optimizer) -> Any:
    """Copy the state of an optimizer: all attributes if it has torch's ``load_state_dict``, else its ``state_dict``."""
    if not isinstance(optimizer, Optimizer) or type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        return _copied(copy.deepcopy(optimizer.state_dict()))
    groups = [{**_copied({k: v for k, v in group.items() if k != "params"})} for group in optimizer.param_groups]
    return dict(vars(optimizer)), groups, {parameter: _copied(value) for parameter, value in optimizer.state.items()}


def _restore_optimizer(optimizer: Optimizer, saved: dict[str, Any] | tuple[Any, ...]) -> None:
    if isinstance(saved, dict):
        optimizer.load_state_dict(_restored(saved))
        return
    attributes, groups, states = saved
    # Not by load_state_dict, which converts the dtypes of states.
    vars(optimizer).clear()
    vars(optimizer).update(attributes)
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        parameters = group["params"]
        group.clear()
        group.update(params=parameters, **_restored(values))
    optimizer.state.clear()
    for parameter, value in states.items():
        optimizer.state[parameter] = _restored(value)


def _generators(given: dict[str, Any]) -> Iterator[torch.Generator]:
    """Yield the random generators of the given loaders and their samplers. A trial advances these generators."""
    for loaders in given.values():
        for loader in unpack(loaders, "")[0] if loaders is not None else ():
            for holder in (loader, getattr(loader, "sampler", None)):
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator):
                    yield generator


def _saves_more(trainer: Trainer) -> bool:
    """Return True if the user's code adds state to checkpoints; a trial may change this state."""
    module, datamodule = trainer.lightning_module, trainer.datamodule
    hooks = ("on_save_checkpoint", "on_load_checkpoint")
    return (
        any(is_overridden(name, module, LightningModule) for name in hooks)
        or any(is_overridden(name, callback, Callback) for name in hooks for callback in trainer.callbacks)
        or (datamodule is not None and is_overridden("state_dict", datamodule, LightningDataModule))
    )


# -- trials --------------------------------------------------------------------------------------------------


LOOPS = {
    "validate_loop": RunningStage.VALIDATING,
    "test_loop": RunningStage.TESTING,
    "predict_loop": RunningStage.PREDICTING,
}


def _users_property(name: str) -> Any:
    return property(lambda silent: getattr(silent._logger, name, None))


class SilentLogger(DummyLogger):
    """Logger that has the name and folders of the user's logger, and drops everything that a trial logs."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._logger = logger

    name, version, save_dir, root_dir, log_dir = map(
        _users_property, ("name", "version", "save_dir", "root_dir", "log_dir")
    )


def refuse_several_processes(trainer: Trainer, what: str) -> None:
    """Raise if the Trainer has several ranks.

    Raises:
        MisconfigurationException: the Trainer starts several processes, or is one of several.
    """
    if trainer.world_size > 1 or trainer._spawns:
        raise MisconfigurationException(
            f"{what} works in one process only, but this Trainer has {trainer.world_size}"
            f"{' that it spawns' if trainer._spawns else ''}. The ranks cannot yet agree on whether a trial ran out of "
            "memory. Search with `Trainer(devices=1)`, and use the result in this Trainer."
        )


def refuse_without_undo(trainer: Trainer, what: str) -> None:
    """Raise if the strategy cannot undo the optimizer steps of a trial.

    Raises:
        MisconfigurationException: the Trainer spawns processes, or its strategy has state that cannot be restored.
    """
    if trainer._spawns:
        raise MisconfigurationException(
            f"{what} would leave its result in the processes that this Trainer spawns. Use the callback "
            'LearningRateFinder(), which sets the rate within the fit, or strategy="ddp".'
        )
    if trainer.world_size > 1 and not trainer.strategy.undoes_steps:
        raise MisconfigurationException(
            f"{what} must undo its steps, which {type(trainer.strategy).__name__} on {trainer.world_size} ranks cannot "
            'do. Search with strategy="ddp" without a communication hook and without shard_optimizer, or with '
            "Trainer(devices=1), and use the result in this Trainer."
        )


@contextmanager
def trial(trainer: Trainer, snapshot: TrialSnapshot, callbacks: list[Callback], **flags: Any) -> Iterator[None]:
    """Run a ``with`` block as a separate call of the Trainer, with ``callbacks`` only, without logging or saving.

    Afterwards, also after an exception, ``snapshot`` is restored.

    Args:
        trainer: a Trainer inside a call. The trial uses the same module, optimizers and loader hooks.
        snapshot: the state to restore.
        callbacks: callbacks of the trial.
        flags: fields of the trial's RunConfig.
    """
    session = trainer.session
    strategy, module, strategy_before = session.strategy, session.module, dict(vars(session.strategy))
    results, progress = LogCollector.of(strategy, module), session.fit.progress
    inside = session.branch(
        config=replace(
            session.config,
            num_sanity_val_steps=0,
            min_epochs=0,
            min_steps=0,
            max_time=None,
            log_every_n_steps=1,
            val_check_interval=1.0,
            check_val_every_n_epoch=session.config.check_val_every_n_epoch or 1,
            **flags,
        ),
        state=TrainerState(session.state.status, session.state.fn, session.state.stage),
        loggers=[SilentLogger(logger) for logger in session.loggers],
        callbacks=callbacks,
        shown=[*callbacks],
        hooks=Hooks(trainer, module, callbacks, results),
        results=results,
        published=LoggedMetrics(),
        should_stop=False,
        interruption=None,
        fit=FitState(progress=replace(progress, batch=0, last=False, phase=EPOCH_START)),
    )
    snapshot.drop_gradients()
    # A trial has no callbacks and may run more epochs than the fit, so a monitored metric may be missing.
    strategy.lr_scheduler_configs = [each for each in strategy.lr_scheduler_configs if not each.reduce_on_plateau]
    try:
        with in_session(trainer, inside):
            yield
    finally:
        # The strategy first: hooks that are called while restoring must see its own optimizers and schedulers.
        vars(strategy).clear()
        vars(strategy).update(strategy_before)
        if session.world_size > 1:
            session.agreement.lower(session.stop_flag)
        snapshot.restore()


@contextmanager
def in_session(trainer: Trainer, session: Session) -> Iterator[None]:
    """Within a context, let the Trainer use another session, with new loops."""
    names = ("session", "fit_loop", *LOOPS)
    before = {name: vars(trainer)[name] for name in names}
    outer = trainer.session
    outer.inner, trainer.session, trainer.fit_loop = session, session, FitLoop(session)
    for name, stage in LOOPS.items():
        setattr(trainer, name, EvaluationLoop(session, stage))
    try:
        yield
    finally:
        for name in ("fit_loop", *LOOPS):
            getattr(trainer, name).release()
        trainer.__dict__.update(before)
        outer.inner = None


def train(trainer: Trainer) -> None:
    """Train inside a trial until the trial's ``max_steps`` or ``should_stop``, for several epochs if needed.

    What surrounds a fit, such as its setup, does not run. Training also ends after an epoch in which no accumulation
    window contained a batch.
    """
    session, loop = trainer.session, trainer.fit_loop
    session.fit.results = session.results
    loop.make_step()
    session.state.stage = RunningStage.TRAINING
    loop.setup_data()
    if loop.validates:
        loop.validation.setup_data()
    session.hooks.call("on_train_start")
    update, continues = loop.step.update, True
    while continues and session.fit.loaded.num_batches and loop.ending.in_epoch() is None:
        update.had_batch = False
        loop.epoch()
        # If all batches were None, or the user ended the epoch before the first, further epochs would not step either.
        continues = update.had_batch or not session.module.automatic_optimization
    session.hooks.call("on_train_end")


def evaluate(trainer: Trainer) -> Any:
    """Validate, test or predict inside a trial, and return the loop that ran."""
    stage = trainer.state.stage
    (loop,) = (getattr(trainer, name) for name, each in LOOPS.items() if each is stage)
    loop.setup_data()
    if loop.feed is None:
        return loop
    if len(loop.feed.num_batches) > 1:
        raise MisconfigurationException(
            f"A search for the batch size of trainer.{trainer.state.fn}() needs one loader, but there are "
            f"{len(loop.feed.num_batches)}. Search with one loader at a time."
        )
    if stage is RunningStage.PREDICTING:
        loop.predict(False)
    else:
        loop.evaluate()
    return loop


def configure_again(trainer: Trainer) -> None:
    """Call ``configure_optimizers`` again before training, because a trial may have changed a value that it reads."""
    strategy, found = trainer.strategy, configured_optimizers(trainer.session)
    if trainer.world_size == 1:
        strategy.setup_optimizers(*found)
        return
    strategy.optimizers, strategy.lr_scheduler_configs = found  # the reducer of gradients exists already
    strategy.change_optimizers()


def has_started(trainer: Trainer) -> bool:
    """Return True if the fit has started to train. Its optimizers may then have state."""
    return trainer.state.fn is TrainerFn.FITTING and trainer.fit_loop.has_optimizers


# -- an attribute that a search reads and sets --------------------------------------------------------------


def _holders(trainer: Trainer, name: str) -> Iterator[tuple[str, Any, bool]]:
    """Yield (object's name, object, is_mapping) for each object that has the attribute ``name``."""
    for word, owner in (("model", trainer.lightning_module), ("datamodule", trainer.datamodule)):
        if owner is None:
            continue
        if hasattr(owner, name):
            yield word, owner, False
        if name in getattr(owner, "hparams", ()):
            yield f"{word}.hparams", owner.hparams, True


def places_of(trainer: Trainer, name: str) -> list[str]:
    """Return the names of the objects that have the attribute ``name``, such as "model" and "datamodule.hparams"."""
    return [word for word, _, _ in _holders(trainer, name)]


def values_of(trainer: Trainer, name: str) -> dict[str, Any]:
    """Return the value of the attribute ``name`` in each object that has it, keyed by the object's name."""
    return {word: holder[name] if item else getattr(holder, name) for word, holder, item in _holders(trainer, name)}


def set_everywhere(trainer: Trainer, name: str, value: object) -> None:
    """Set the attribute ``name`` in all objects that have it.

    If ``value`` is a dict from :func:`values_of`, each object gets its own value in the dict.
    """
    for word, holder, item in list(_holders(trainer, name)):
        own = value[word] if isinstance(value, dict) else value
        if item:
            holder[name] = own
        else:
            setattr(holder, name, own)
