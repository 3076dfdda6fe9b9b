"""One call of the Trainer from its first hook to its last: everything before and after the loop."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lockstep.datamodule import LightningDataModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.hyperparameters import merged_hyperparameters
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.seed import current_seed
from lockstep.ground.states import RunningStage, TrainerFn, TrainerStatus
from lockstep.hooks import ModuleHooks
from lockstep.loop import state
from lockstep.loop.hooks import Hooks, check_removed_hooks, check_uncalled, is_overridden
from lockstep.loop.logging import LogCollector, LoggedMetrics
from lockstep.loop.metrics import lists_made_alike
from lockstep.loop.optimizers import parse
from lockstep.loop.signals import TERMINATED, undisturbed
from lockstep.module import LightningModule
from lockstep.profilers.base import PassThroughProfiler
from lockstep.supervise import status
from lockstep.supervise.collective_trace import compared, set_location
from lockstep.supervise.signals import ENDED, interruptible

STEP_OF = {TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step"}


@contextmanager
def session(trainer: Any, fn: TrainerFn, ckpt_path: Any = None, weights_only: bool | None = None) -> Iterator[None]:
    """One call of the Trainer; a fit, which has made ``trainer.signals``, heeds them from beginning to end."""
    signals = trainer.signals
    if signals is None:
        with undisturbed(trainer), lists_made_alike(), _session(trainer, fn, ckpt_path, weights_only):
            yield
        return
    try:
        with signals.heeded(), lists_made_alike(), _session(trainer, fn, ckpt_path, weights_only):
            yield
    finally:
        trainer.signals = trainer.fit_loop.signals = None


@contextmanager
def _session(trainer: Any, fn: TrainerFn, ckpt_path: Any, weights_only: bool | None) -> Iterator[None]:
    """Set up what ``fn`` needs, hand over to its loop, and tear down whatever happened.

    The order of hooks is Lightning's: ``configure_callbacks``, ``prepare_data``, ``setup``, ``configure_model``,
    weights and callbacks restored, module on its device, ``configure_optimizers``, ``on_fit_start``, training
    state restored, the loop, ``on_fit_end``, ``teardown``.
    """
    trainer.state.fn, trainer.state.status = fn, TrainerStatus.RUNNING
    trainer.interruption = None
    trainer._ckpt_path = ckpt_path  # ModelCheckpoint does not delete the file that the run goes on from
    trainer.agreement = trainer.results = trainer.hooks = trainer.instruments = None
    try:
        with _interruptible(trainer), ExitStack() as watched:
            _set_up(trainer, fn, ckpt_path, weights_only, watched)
            yield
            state.finish(trainer)
            if trainer.interruption is not None:
                raise KeyboardInterrupt
    except KeyboardInterrupt as interrupt:
        _failed(trainer, interrupt)
        # A fit that was asked to end has a result. A second Ctrl-C, or what half an evaluation gives, is no result.
        if trainer.interruption is None or fn is not TrainerFn.FITTING:
            raise
        if trainer.interruption == TERMINATED:
            raise SystemExit(ENDED) from None
    except BaseException as error:
        name_ways_out(error)
        if trainer.signals is not None:
            trainer.signals.failing = True
        status.failed(error)  # the others need not wait for what follows
        reason = status.named(error)
        _failed(trainer, reason)
        if reason is not error:
            raise reason from error
        raise
    else:
        if fn is TrainerFn.FITTING:
            trainer.hooks.call("on_fit_end")
        _call_setup_hooks(trainer, "teardown")
        state.finish(trainer)  # what these hooks have saved
        if trainer.signals is not None:
            trainer.signals.done()
        for logger in trainer.loggers:
            logger.finalize("success")
        trainer.state.status = TrainerStatus.FINISHED
    finally:
        _release(trainer)


def _be_watched(trainer: Any) -> None:
    """Say how long this rank may wait, and who knows where it is, to those who look for hangs."""
    status.expect(trainer.config.hang_timeout, trainer.config.hang_kill)
    set_location(partial(_whereabouts, trainer))


def _whereabouts(trainer: Any) -> tuple[str, int]:
    """The hook that runs, and the training batch; -1: none."""
    stage, hook = trainer.state.stage, trainer.results.hook[0]
    return hook, trainer.fit_loop.progress.batch if stage is RunningStage.TRAINING else -1


def name_ways_out(error: BaseException) -> None:
    """Add to torch's complaint about a BatchNorm that sees one sample what to do about it, and to Python's about a
    StopIteration where it comes from."""
    ended = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(ended, StopIteration) and len(error.args) == 1:
        if str(error) == "generator raised StopIteration":  # Python's words, from one of ours that a hook ran in
            frame = traceback.extract_tb(ended.__traceback__)[-1]
            error.args = (
                f"{frame.name} raised StopIteration, {frame.filename}:{frame.lineno}: a `next()` whose iterator has "
                "ended, say. Give it a default, `next(iterator, None)`, or begin the iterator anew.",
            )
        return
    if not isinstance(error, ValueError) or len(error.args) != 1:
        return
    text = str(error)
    if text.startswith("Expected more than 1 value per channel when training") and "drop_last" not in text:
        # in place: the error is still the one that the user's line raised
        error.args = (
            f"{text}. A batch of one sample, the last one of an epoch say, has no statistics: leave it out by "
            "DataLoader(drop_last=True); or, where there are several ranks, take the statistics over the samples of "
            "all by Trainer(sync_batchnorm=True).",
        )


def _set_up(trainer: Any, fn: TrainerFn, ckpt_path: Any, weights_only: bool | None, watched: ExitStack) -> None:
    trainer.connect()
    module, strategy = trainer.lightning_module, trainer.strategy
    module.trainer = trainer
    if trainer.datamodule is not None:
        trainer.datamodule.trainer = trainer
    trainer.results = LogCollector.of(strategy, module)
    trainer.callbacks = _with_model_callbacks(trainer.base_callbacks, module)
    check_module(trainer, fn)
    strategy.setup_environment()
    _be_watched(trainer)
    if trainer.config.debug == "collectives" and strategy.world_size > 1:
        watched.enter_context(compared())
    # "last" is what rank 0 found: another node may see its files later
    found = ckpt_path if trainer.signals is None else trainer.signals.resume_from(ckpt_path)
    asked, ckpt_path = ckpt_path, strategy.broadcast(found)
    # the run's own may be displaced by a newer one, as if nothing had happened
    trainer._ckpt_path = asked if trainer.signals is not None and trainer.signals.goes_on else ckpt_path
    trainer.agreement = strategy.make_agreement()
    trainer.stop_flag = trainer.agreement.register("stop")
    trainer.interrupt_flag = trainer.agreement.register("interrupt")
    if trainer.signals is not None:
        trainer.signals.set_up()
    trainer.published = LoggedMetrics()
    trainer.hooks = Hooks(trainer, module, trainer.callbacks)
    _choose_seed(trainer)
    _prepare_data(trainer)
    for logger in trainer.loggers:
        share = getattr(logger, "share", None)  # a third party's logger may not have it
        if share is not None:
            share(strategy.broadcast)
    if not isinstance(trainer.profiler, PassThroughProfiler):
        from lockstep.loop.profiled import instrument  # not for runs that measure nothing

        instrument(trainer)
    strategy.barrier("before setup")
    _call_setup_hooks(trainer, "setup")
    strategy.barrier("after setup")
    if is_overridden("configure_sharded_model", module, ModuleHooks):  # its old name
        trainer.hooks.own("configure_sharded_model")
    trainer.hooks.own("configure_model")
    checkpoint = state.read(trainer, ckpt_path, weights_only) if ckpt_path is not None else None
    if checkpoint is not None:
        state.restore_model(trainer, checkpoint)
        state.restore_callbacks(trainer, checkpoint)
        if trainer.signals is not None:
            trainer.signals.restore(checkpoint)
    strategy.setup_module(module, module.backward if is_overridden("backward", module, LightningModule) else None)
    if fn is TrainerFn.FITTING:
        own_step = is_overridden("lr_scheduler_step", module, LightningModule)
        returned = trainer.hooks.own("configure_optimizers")
        found = parse(returned, automatic=module.automatic_optimization, custom_scheduler_step=own_step)
        strategy.setup_optimizers(*found)
        trainer.hooks.call("on_fit_start")
    if trainer.config.enable_autolog_hparams:
        _log_hyperparameters(trainer)
    if checkpoint is not None and fn is TrainerFn.FITTING:
        state.restore_training(trainer, checkpoint)
    strategy.barrier("run")
    module.zero_grad()


def check_module(trainer: Any, fn: TrainerFn) -> None:
    """Refuse a module that lacks what ``fn`` needs, before anything is started.

    Raises:
        MisconfigurationException: with the method that is missing, or the flag that cannot go with the module.
    """
    module, loaders, kind = trainer.lightning_module, trainer.loaders, type(trainer.lightning_module).__name__
    check_removed_hooks(module, fn)
    check_uncalled(trainer)

    def has(name: str) -> bool:
        return is_overridden(name, module, LightningModule)

    if fn is TrainerFn.FITTING:
        for name in ("training_step", "configure_optimizers"):
            if not has(name):
                raise MisconfigurationException(f"trainer.fit({kind}): the module has no `{name}`; define it.")
        if not loaders.defined("train"):
            raise MisconfigurationException(
                f"trainer.fit({kind}): no training data: pass `train_dataloaders=` or `datamodule=`, or define "
                "`train_dataloader` in the module."
            )
        if loaders.defined("val") != has("validation_step"):
            there, lacking = ("a val_dataloader", "validation_step")
            if has("validation_step"):
                there, lacking = ("a validation_step", "val_dataloader")
            rank_zero_warn(f"{kind}: there is {there} but no {lacking}: validation is left out.")
        if not module.automatic_optimization:
            _check_manual(trainer.config)
    elif fn in STEP_OF:
        stage = "val" if fn is TrainerFn.VALIDATING else "test"
        if not has(STEP_OF[fn]):
            raise MisconfigurationException(f"trainer.{fn}({kind}): the module has no `{STEP_OF[fn]}`; define it.")
        _check_loader(loaders, fn, stage)
    else:
        if not has("predict_step") and type(module).forward is torch.nn.Module.forward:
            raise MisconfigurationException(
                f"trainer.predict({kind}): the module has neither `predict_step` nor `forward`; define one."
            )
        _check_loader(loaders, fn, "predict")


def _check_loader(loaders: Any, fn: TrainerFn, stage: str) -> None:
    if not loaders.defined(stage):
        raise MisconfigurationException(
            f"trainer.{fn}(): no data: pass `dataloaders=` or `datamodule=`, or define `{stage}_dataloader`."
        )


def _check_manual(config: Any) -> None:
    if config.gradient_clip_val is not None:
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={config.gradient_clip_val}) clips only under automatic optimization: call "
            "`self.clip_gradients(optimizer, gradient_clip_val=...)` in `training_step` instead."
        )
    if config.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"Trainer(accumulate_grad_batches={config.accumulate_grad_batches}) works only under automatic "
            "optimization: in manual optimization step the optimizer at every k-th batch instead."
        )


def _with_model_callbacks(callbacks: list[Any], module: Any) -> list[Any]:
    """The Trainer's callbacks with the model's: one of the model's replaces the Trainer's of the same type."""
    own = module.configure_callbacks()
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    kinds = {type(callback) for callback in own}
    merged = [callback for callback in callbacks if type(callback) not in kinds] + own
    return state.checkpoints_last(merged)


def _choose_seed(trainer: Any) -> None:
    """One seed for the order of data: the user's, else one that rank 0 draws; a checkpoint's replaces it."""
    if trainer.seed is None:
        seed = current_seed()
        drawn = int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
        trainer.seed = trainer.strategy.broadcast(drawn)


def _prepare_data(trainer: Any) -> None:
    """``prepare_data`` on one process of each node, or of all, the others waiting."""
    datamodule, module = trainer.datamodule, trainer.lightning_module
    for owner, base in ((datamodule, LightningDataModule), (module, ModuleHooks)):
        if owner is not None and is_overridden("prepare_data", owner, base):
            per_node = owner.prepare_data_per_node
            if trainer.is_global_zero or (per_node and trainer.local_rank == 0):
                owner.prepare_data()
    trainer.strategy.barrier("prepare_data")


def _call_setup_hooks(trainer: Any, name: str) -> None:
    stage = trainer.state.fn.value
    if trainer.datamodule is not None:
        getattr(trainer.datamodule, name)(stage=stage)
    trainer.hooks.call(name, stage)


def _log_hyperparameters(trainer: Any) -> None:
    sources = [obj for obj in (trainer.lightning_module, trainer.datamodule) if obj is not None]
    merged = merged_hyperparameters(sources)
    for logger in trainer.loggers:
        if merged:
            logger.log_hyperparams(merged)
        logger.log_graph(trainer.lightning_module)
        logger.save()


def _failed(trainer: Any, error: BaseException) -> None:
    trainer.state.status = TrainerStatus.INTERRUPTED
    if trainer.hooks is None:  # nothing of the user's has been set up
        return
    state.finish_alone(trainer)
    trainer.hooks.call("on_exception", error)
    if trainer.datamodule is not None:
        trainer.datamodule.on_exception(error)
    for logger in trainer.loggers:
        logger.finalize("failed")


def _release(trainer: Any) -> None:
    for loop in (trainer.fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.release()
    state.finish_alone(trainer)
    trainer.strategy.teardown()
    if trainer.results is not None:
        trainer.results.enter("")  # nothing can be logged any more
    if trainer.agreement is not None:
        trainer.agreement.close()
    trainer.state.stage = None
    set_location(None)
    if trainer.instruments is not None:
        trainer.instruments.conclude()


@contextmanager
def _interruptible(trainer: Any) -> Iterator[None]:
    """The first Ctrl-C asks the loop to end at its next boundary, the second one raises where it strikes."""

    def ask() -> None:
        if trainer.interruption is None:
            trainer.interruption = "Ctrl-C"
            trainer.should_stop = True
            if trainer.is_global_zero:
                _say(trainer)

    def end() -> None:
        trainer.interruption = None  # this one is not for the loop to end cleanly

    with interruptible(ask, end):
        yield


def _say(trainer: Any) -> None:
    """What follows from a Ctrl-C. Written past Python's buffers: a handler may strike while they are written to."""
    where = "the next boundary" if trainer.state.fn is TrainerFn.FITTING else "this batch's end"
    text = f"lockstep: Ctrl-C: trainer.{trainer.state.fn} ends at {where}; a second Ctrl-C ends it at once."
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
        clear = "\n" if sys.stderr.isatty() else ""  # below the bar and the ^C
        os.write(sys.stderr.fileno(), f"{clear}{text}\n".encode())
