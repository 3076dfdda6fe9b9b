"""Set-up and tear-down of a Trainer call (fit, validate, test or predict): everything before and after its loop."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.checkpoint.pretrained import is_of_transformers
from lockstep.config.objects import check_callbacks, check_kind, in_order, refuse_one_key
from lockstep.data.workers import name_death
from lockstep.datamodule import LightningDataModule
from lockstep.engines.engine import states_to_cpu
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed, words_of
from lockstep.ground.extensions import MissingExtension, load
from lockstep.ground.hyperparameters import merged_hyperparameters
from lockstep.ground.memory_use import empty_cache, is_oom_error
from lockstep.ground.methods import replace_until
from lockstep.ground.parameters import whole_shapes
from lockstep.ground.rank import does, rank_zero_info, rank_zero_warn
from lockstep.ground.seed import current_seed
from lockstep.ground.types import LRSchedulerConfig, RunningStage, TrainerFn, TrainerStatus
from lockstep.hooks import ModuleHooks
from lockstep.loggers.base import FolderLogger
from lockstep.loop import state
from lockstep.loop.checks import check_contradictions, check_removed_hooks, check_uncalled, refuse_iterator
from lockstep.loop.compiled import CompiledLayers, check_threads
from lockstep.loop.finite_watch import guard_updates, release_updates
from lockstep.loop.hooks import Hooks, is_overridden, is_replaced
from lockstep.loop.logged_metrics import EVERYBODY, LoggedMetrics
from lockstep.loop.logging import LogCollector
from lockstep.loop.memory import store_memory_use
from lockstep.loop.metrics import fill_lists_in_call
from lockstep.loop.optimizers import parse
from lockstep.loop.session import RunLoaders, Session
from lockstep.loop.signals import TERMINATED, Signals, ignore_requeue_signals
from lockstep.module import LightningModule
from lockstep.profilers.base import PassThroughProfiler
from lockstep.supervise import status
from lockstep.supervise.collective_trace import set_location
from lockstep.supervise.signals import ENDED, interruptible
from lockstep.supervise.stack import stack_of

LOGS = ("log", "log_dict")
PLANNED_FROM = 50_000_000
"""Number of parameters from which "auto" plans the strategy. Smaller models fit on any device (0.8 GB of states)."""
STEP_OF = {TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step"}


@dataclass(frozen=True)
class CallArguments:
    """Arguments that the set-up of a Trainer call needs.

    Attributes:
        fn: the called method.
        ckpt_path: checkpoint to resume a fit from, or to load weights from for an evaluation.
        weights_only: as in `torch.load`.
        release: closes the loop's loaders and their workers.
        signals: handles signals until the fit ends; None for an evaluation.
    """

    fn: TrainerFn
    ckpt_path: str | None
    weights_only: bool | None
    release: Callable[[], None]
    signals: Signals | None = None


@contextmanager
def call(session: Session, request: CallArguments) -> Iterator[None]:
    """Set up a Trainer call, run its loop in the ``with`` block, and tear the call down, also after an error.

    The order of hooks is Lightning's: ``configure_callbacks``, ``prepare_data``, ``setup``, ``configure_model``,
    weights and callbacks restored, module on its device, ``configure_optimizers``, ``on_fit_start``, training
    state restored, the loop, ``on_fit_end``, ``teardown``.
    """
    session.signals = request.signals
    quiet = ignore_requeue_signals(session) if request.signals is None else request.signals.handle()
    try:
        with quiet, fill_lists_in_call(session.strategy), _call(session, request):
            yield
    finally:
        session.signals = None


@contextmanager
def _call(session: Session, request: CallArguments) -> Iterator[None]:
    fn, signals = request.fn, request.signals
    session.begin(fn)
    session.state.status = TrainerStatus.RUNNING
    session.ckpt_path = request.ckpt_path  # ModelCheckpoint does not delete the file that the run continues from
    ends = ExitStack()
    try:
        with _interruptible(session), ExitStack() as watched:
            _set_up(session, request, watched, ends)
            yield
            state.finish(session)
            if session.interruption is not None:
                raise KeyboardInterrupt
        store_memory_use(session)
        if session.fitting:
            session.hooks.call("on_fit_end")
        _call_setup_hooks(session, "teardown")
        state.finish(session)  # checkpoints that these hooks have saved
        if signals is not None:
            signals.record_end()
        for logger in session.loggers:
            logger.finalize("success")
        session.state.status = TrainerStatus.FINISHED
    except KeyboardInterrupt as interrupt:
        _handle_failure(session, interrupt)
        # a fit that ended at a boundary has a result; one that a second Ctrl-C ended, or half an evaluation, has none
        if session.interruption is None or fn is not TrainerFn.FITTING:
            raise
        if session.interruption == TERMINATED:
            raise SystemExit(ENDED) from None
    except BaseException as error:
        clarify_error(session.module if session.has("module") else None, error)
        name_death(error)
        if signals is not None:
            signals.failing = True
        status.record_failure(error)  # first: other ranks then need not wait for the hooks below
        reason = status.name_first_cause(error)
        _add_location_note(session, error)
        _handle_failure(session, reason)
        if reason is not error:
            raise reason from error
        raise
    finally:
        with ends:
            _tear_down(session, request.release)


def _running_hook_and_batch(session: Session) -> tuple[str, int]:
    """Return the name of the running hook, and the current training batch's index (-1 outside of training)."""
    in_training = session.state.stage is RunningStage.TRAINING and session.fit.results is session.results
    return session.results.hook[0], session.fit.progress.batch if in_training else -1


def _add_location_note(session: Session, error: BaseException) -> None:
    """Add a note with hook, epoch and batch to an error whose traceback shows none of the user's code."""
    if isinstance(error, OWN_ERRORS) or not hasattr(error, "add_note"):  # Python has notes from 3.11 on
        return
    stack = stack_of(error)
    if stack.loads or any(frame.is_users for frame in stack.frames):
        return  # the traceback shows the user's line, or the loader's worker
    hook, batch = _running_hook_and_batch(session) if session.has("results") else ("", -1)
    where = f", epoch {session.fit.progress.epoch}, batch {batch}" if batch >= 0 else ""
    last = f"; the last hook was {hook}" if hook else ""
    error.add_note(f"In trainer.{session.state.fn} on rank {session.strategy.world.rank}{where}{last}.")


@does("setting up")
def _choose_checkpoint(session: Session, request: CallArguments) -> str | None:
    """Return, on all ranks, the checkpoint from which the call continues, as rank 0 has chosen it. Collective."""
    signals = request.signals
    # rank 0 decides what "last" is, since another node may see new files later
    found = request.ckpt_path if signals is None else signals.resume_from(request.ckpt_path)
    ckpt_path: str | None = session.strategy.broadcast(found)
    # ModelCheckpoint may delete a checkpoint of an earlier attempt, but not the one that the user has passed
    session.ckpt_path = request.ckpt_path if signals is not None and signals.is_later_attempt else ckpt_path
    return ckpt_path


def _restore(session: Session, request: CallArguments, ckpt_path: str) -> dict[str, Any]:
    """Read a checkpoint, restore module and callbacks from it, and return it."""
    checkpoint = state.read(session, ckpt_path, request.weights_only)
    state.restore_model(session, checkpoint)
    state.restore_callbacks(session, checkpoint)
    if request.signals is not None:
        request.signals.restore(checkpoint)
    return checkpoint


def _set_up(session: Session, request: CallArguments, watched: ExitStack, ends: ExitStack) -> None:
    """Prepare everything that a Trainer call needs before its loop starts.

    Args:
        session: the session of the call.
        request: the arguments of the call.
        watched: closed when the loop has ended.
        ends: closed at the end of the call, after the last hooks.
    """
    session.connect()
    _reconsider(session)
    module, strategy, signals, fn = session.module, session.strategy, request.signals, request.fn
    session.results = LogCollector.of(strategy, module)
    session.callbacks = _with_model_callbacks(session)
    session.callbacks_at_setup, session.loop_exit = [*session.callbacks], watched
    _add_log_methods(session.callbacks, module, watched)
    check_module(session, fn)  # before the rendezvous: a mistake in the script then costs no waiting
    strategy.setup_environment()
    status.record_wait_limits(session.config.hang_timeout, session.config.hang_kill)
    set_location(partial(_running_hook_and_batch, session))  # for reports of hangs
    ckpt_path = _choose_checkpoint(session, request)
    session.agreement = strategy.make_agreement()
    session.stop_flag = session.agreement.register("stop")
    session.interrupt_flag = session.agreement.register("interrupt")
    session.not_finite_flag = session.agreement.register("not finite")
    if signals is not None:
        signals.set_up()
    session.published = LoggedMetrics()
    session.hooks = Hooks(session.trainer, module, session.callbacks, session.results)
    if session.seed is None:
        # for the order of data; a checkpoint's replaces it
        seed = current_seed()
        random_state = torch.get_rng_state()
        drawn = int(torch.empty((), dtype=torch.int64).random_().item()) if seed is None else seed
        torch.set_rng_state(random_state)  # the user's draws after `torch.manual_seed` are those without a Trainer
        session.seed = strategy.broadcast(drawn)
    _prepare_data(session)
    for logger in session.loggers:
        share = getattr(logger, "share", None)  # a third party's logger has no such method
        if share is not None:
            share(strategy.broadcast)
    if not isinstance(session.profiler, PassThroughProfiler):
        from lockstep.loop.profiled import instrument  # here: a run without a profiler does not import it

        ends.callback(instrument(session).conclude)
    strategy.barrier("before setup")
    _call_setup_hooks(session, "setup")
    apply_user_changes(session)  # `setup` may add callbacks
    strategy.barrier("after setup")
    _configure_model(session)
    if session.config.compile is not None:
        # before `setup_module`: hooks of an engine on a layer then stay outside of the compiled code
        ends.callback(CompiledLayers(session, session.config.compile).end)
    if fn is TrainerFn.FITTING:
        guard_updates(session)
    own_backward = module.backward if is_replaced("backward", module, LightningModule) else None
    places_first = session.places_first
    if places_first:
        strategy.setup_module(module, own_backward)
    checkpoint = None if ckpt_path is None else _restore(session, request, ckpt_path)
    if not places_first:  # the weights are loaded on the CPU, so that two copies are never on the device
        strategy.setup_module(module, own_backward)
    state.take_base(session, checkpoint)
    if fn is TrainerFn.FITTING:
        strategy.setup_optimizers(*configured_optimizers(session))
        _report_start(session)
        session.hooks.call("on_fit_start")
        apply_user_changes(session)
    if session.config.enable_autolog_hparams:
        _log_hyperparameters(session)
    if checkpoint is not None and fn is TrainerFn.FITTING:
        state.restore_training(session, checkpoint)
    strategy.barrier("run")
    module.zero_grad()  # the user may have called `backward` before the fit


def _report_start(session: Session) -> None:
    """Log one line with the devices, strategy, precision and output folder of a fit."""
    strategy, world = session.strategy, session.strategy.world
    devices = f"{world.size} x {strategy.root_device.type}"
    if world.num_nodes > 1:
        devices += f" on {world.num_nodes} nodes"
    folders = [getattr(logger, "log_dir", None) for logger in session.loggers[:1]]
    folders += [getattr(callback, "dirpath", None) for callback in session.checkpoint_callbacks]
    folder = next(filter(None, folders), None)
    files = "no files" if folder is None else f"files in {os.fspath(folder)}"
    session.report(f"trainer.fit: {devices}, {type(strategy).__name__}, {strategy.precision.name}, {files}")


def _reconsider(session: Session) -> None:
    """Before the fit of a large model with ``strategy="auto"``, replace the chosen strategy by that of a plan."""
    if not session.chooses or not session.fitting:
        return
    # layers of `configure_model` are not counted: the hook may do anything, and is called once, later
    if sum(each.numel() for each in session.module.parameters() if not is_lazy(each)) < PLANNED_FROM:
        return
    try:
        reconsider = load("services", "plan of an automatic choice")
    except MissingExtension:  # plans are an extension's
        return
    reconsider(session)


def configured_optimizers(session: Session) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Call the module's ``configure_optimizers``; return its optimizers and schedulers as two lists."""
    module = session.module
    own_step = is_overridden("lr_scheduler_step", module, LightningModule)
    with whole_shapes(module):  # users choose groups by shapes; a sharded parameter shows its part only
        returned = session.hooks.own("configure_optimizers")
    return parse(returned, automatic=module.automatic_optimization, custom_scheduler_step=own_step)


def check_module(session: Session, fn: TrainerFn) -> None:
    """Raise an error if a module or its loaders lack something that the Trainer method ``fn`` needs.

    Raises:
        MisconfigurationException: a method or loader is missing, or a flag does not fit the module.
    """
    module, loaders = session.module, session.loaders
    check_removed_hooks(module, fn)
    check_uncalled(session.strategy, session.callbacks, module, session.datamodule)
    check_steps(module, fn)
    if fn is TrainerFn.FITTING:
        _check_fitted(session)
    elif fn in STEP_OF:
        _check_loader(loaders, fn, "val" if fn is TrainerFn.VALIDATING else "test")
    else:
        _check_loader(loaders, fn, "predict")


def check_steps(module: LightningModule, fn: TrainerFn) -> None:
    """Raise an error if a module does not define a method that the Trainer method ``fn`` calls.

    Raises:
        MisconfigurationException: names the missing method.
    """
    kind = type(module).__name__
    needed = (
        ("training_step", "configure_optimizers") if fn is TrainerFn.FITTING else (STEP_OF.get(fn, "predict_step"),)
    )
    missing = next((name for name in needed if not _has(module, name)), None)
    if missing == "predict_step":
        if type(module).forward is torch.nn.Module.forward:
            raise MisconfigurationException(
                f"trainer.predict({kind}): the module has neither `predict_step` nor `forward`; define one."
            )
    elif missing is not None:
        raise MisconfigurationException(f"trainer.{fn}({kind}): No `{missing}()` method defined; define one.")


def _has(module: LightningModule, name: str) -> bool:
    return is_overridden(name, module, LightningModule)


def _check_fitted(session: Session) -> None:
    module, loaders, kind = session.module, session.loaders, type(session.module).__name__
    refuse_iterator(module.training_step, "training_step")
    if not loaders.defined("train"):
        raise MisconfigurationException(
            f"trainer.fit({kind}): there is no training data: pass `train_dataloaders=`, or define "
            "`train_dataloader` in the module or in the `datamodule`."
        )
    if loaders.defined("val") != _has(module, "validation_step"):
        there, lacking = ("a val_dataloader", "validation_step")
        if _has(module, "validation_step"):
            there, lacking = ("a validation_step", "val_dataloader")
        rank_zero_warn(f"{kind}: there is {there} but no {lacking}, so validation is skipped.")
    config = session.config
    if not module.automatic_optimization and config.gradient_clip_val is not None:
        raise MisconfigurationException(
            "Automatic gradient clipping is not supported for manual optimization: remove "
            f"Trainer(gradient_clip_val={config.gradient_clip_val}), and call "
            "`self.clip_gradients(optimizer, gradient_clip_val=...)` in `training_step`."
        )
    if not module.automatic_optimization and config.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            "Automatic gradient accumulation is not supported for manual optimization: remove "
            f"Trainer(accumulate_grad_batches={config.accumulate_grad_batches}), and call "
            "`optimizer.step()` in every k-th batch."
        )
    check_contradictions(session)


def _check_loader(loaders: RunLoaders, fn: TrainerFn, stage: str) -> None:
    if not loaders.defined(stage):
        raise MisconfigurationException(
            f"trainer.{fn}(): there is no data: pass `dataloaders=`, or define `{stage}_dataloader` in the module or "
            "in the `datamodule`."
        )


def _with_model_callbacks(session: Session) -> list[Callback]:
    """Merge the Trainer's callbacks with those that the module's ``configure_callbacks`` returns.

    A callback from the module replaces the Trainer's callbacks of its class and of its base classes.

    Raises:
        MisconfigurationException: an object is not a callback, or two have the same key in a checkpoint.
    """
    callbacks, module = session.base_callbacks, session.module
    if not is_overridden("configure_callbacks", module, LightningModule):
        return in_order(callbacks)
    session.hooks = Hooks(session.trainer, module, callbacks, session.results)  # an error below calls `on_exception`
    own = module.configure_callbacks()
    del session.hooks
    if not own:
        return in_order(callbacks)
    where = f"{type(module).__name__}.configure_callbacks()"
    own = list(own) if isinstance(own, (list, tuple)) else [own]
    for callback in own:
        check_kind(where, callback, Callback, "Callback")
    kept: list[Callback] = []
    replaced: list[Callback] = []
    for callback in callbacks:
        kind = type(callback)
        is_replaced = kind is not Callback and any(isinstance(each, kind) for each in own)
        (replaced if is_replaced else kept).append(callback)
    if replaced:
        names = ", ".join(type(each).__name__ for each in replaced)
        rank_zero_info(f"{where}: its callbacks replace the Trainer's {names}.")
    refuse_one_key([*kept, *own], where)
    return in_order([*kept, *own])


def _add_log_methods(callbacks: list[Callback], module: LightningModule, end: ExitStack) -> None:
    """Let callbacks call ``self.log`` and ``self.log_dict``, the module's methods, until ``end`` is closed."""
    for callback in callbacks:
        for name in LOGS:
            if not hasattr(callback, name):
                replace_until(end, callback, name, getattr(module, name))


def apply_user_changes(session: Session) -> None:
    """Apply changes that the user's hooks made to the Trainer's list of callbacks and to hooks on the module."""
    # users change the list in place, so it is compared with what it was
    if [*map(id, session.callbacks)] != [*map(id, session.callbacks_at_setup)]:
        check_callbacks("trainer.callbacks", session.callbacks)
        if session.loop_exit is not None:
            _add_log_methods(session.callbacks, session.module, session.loop_exit)
    session.hooks.rebind(in_order(session.callbacks))


def _configure_model(session: Session) -> None:
    """Call ``configure_model`` so that it creates layers on the engine's device and in the precision's dtype."""
    strategy, made_in = session.strategy, session.strategy.precision.init_context
    if session.config.compile is not None:
        check_threads(strategy)  # before the layers are made, which may take minutes
    if is_overridden("configure_sharded_model", session.module, ModuleHooks):  # its old name
        session.hooks.own("configure_sharded_model")
    with strategy.building(session.module), made_in() if made_in else nullcontext():
        session.hooks.own("configure_model")


def _prepare_data(session: Session) -> None:
    """Call ``prepare_data`` in one process per node, or in rank 0 only, while all other processes wait."""
    datamodule, module = session.datamodule, session.module
    for owner, base in ((datamodule, LightningDataModule), (module, ModuleHooks)):
        if owner is not None and is_overridden("prepare_data", owner, base):
            per_node = owner.prepare_data_per_node
            if session.is_global_zero or (per_node and session.strategy.world.local_rank == 0):
                owner.prepare_data()
    session.strategy.barrier("prepare_data")


def _call_setup_hooks(session: Session, name: str) -> None:
    stage = session.state.fn
    assert stage is not None
    if session.datamodule is not None:
        getattr(session.datamodule, name)(stage=stage)
    session.hooks.call(name, stage)


def _log_hyperparameters(session: Session) -> None:
    sources = [obj for obj in (session.module, session.datamodule) if obj is not None]
    merged = merged_hyperparameters(sources)
    for logger in session.loggers:
        if merged:
            logger.log_hyperparams(merged)
        elif session.fitting and isinstance(logger, FolderLogger):
            # scripts pass the file's name to `load_from_checkpoint`, also if it has no entries
            logger.begin_hparams_file()
        logger.log_graph(session.module)
        logger.save()


def _handle_failure(session: Session, error: BaseException) -> None:
    session.state.status = TrainerStatus.INTERRUPTED
    if not session.has("hooks"):  # set-up has called none of the user's hooks
        return
    state.finish_alone(session)
    session.hooks.call("on_exception", error)
    if session.datamodule is not None:
        session.datamodule.on_exception(error)
    for logger in session.loggers:
        logger.finalize("failed")
    # values logged before the failure stay readable; but after a failure of one of several ranks, a device may wait for
    # a collective that never ends
    if session.world_size == 1 or session.strategy.root_device.type == "cpu":
        with contextlib.suppress(Exception):  # the error that ended the call is the one to raise
            for shown in EVERYBODY:
                session.show_logged(shown)


def _tear_down(session: Session, release: Callable[[], None]) -> None:
    release()
    state.finish_alone(session)
    session.strategy.teardown()
    release_updates(session)
    leave_device(session)
    if session.has("results"):
        session.results.enter("")  # `self.log` after the call is an error
    if session.has("agreement"):
        session.agreement.close()
    session.state.stage = None
    set_location(None)


@contextmanager
def _interruptible(session: Session) -> Iterator[None]:
    """Let the first Ctrl-C end a fit after the current window, other loops after the batch; a second raises at once."""

    def request_end() -> None:
        if not session.strategy.has_met:  # before the rendezvous there is no boundary
            raise KeyboardInterrupt
        if session.interruption is not None:
            return
        session.interrupt("Ctrl-C")
        if session.is_global_zero:
            where = "the next boundary" if session.state.fn is TrainerFn.FITTING else "this batch's end"
            text = f"lockstep: Ctrl-C: trainer.{session.state.fn} ends at {where}; a second Ctrl-C ends it at once."
            with contextlib.suppress(OSError, ValueError, AttributeError):  # there may be no stderr
                clear = "\n" if sys.stderr.isatty() else ""  # below the bar and the ^C
                # past Python's buffers, which may be in use while a handler runs
                os.write(sys.stderr.fileno(), f"{clear}{text}\n".encode())
                status.record_ctrl_c_report()

    def end() -> None:
        session.interrupt(None)  # the exception ends the loop, so it does not wait for a boundary

    with interruptible(request_end, end):
        yield


# -- the end of a call: the device's memory is free again ----------------------------------------------------


def leave_device(session: Session) -> None:
    """Move module and optimizer states back to the CPU, unless a failure may have left the device blocked."""
    strategy = session.strategy
    failed = session.state.status is TrainerStatus.INTERRUPTED and session.interruption is None
    if not failed:
        _move_to_cpu(strategy)
    elif strategy.world_size == 1:  # with several ranks, the device may wait for a collective that never ends
        with contextlib.suppress(RuntimeError):  # the device may be what failed: the first error is the one to raise
            _move_to_cpu(strategy)


def _move_to_cpu(strategy: Strategy) -> None:
    """Move module and optimizer states to the CPU if the engine permits. Set gradients on other devices to None."""
    module, device = strategy.module, strategy.root_device
    if module is None:  # the call ended before it was set up
        return
    if device.type != "cpu":
        for parameter in strategy.named_parameters().values():
            parameter.grad = None
    if not strategy.places_first:
        module.cpu()
        for optimizer in strategy.optimizers:
            states_to_cpu(optimizer)
    empty_cache(device)


# -- errors of torch that mislead ----------------------------------------------------------------------------


OWN_ERRORS = (MisconfigurationException, CorruptCheckpoint, RankFailed, KeyboardInterrupt)
"""Errors whose message is already clear: `clarify_error` and `_add_location_note` do not change them."""

OUT_OF_MEMORY = "(trainer.memory() shows what memory is used for, and docs/memory.md describes ways to use less.)"


def clarify_error(module: LightningModule | None, error: BaseException) -> None:
    """Replace a misleading message of a torch error. The error object and its traceback stay the same."""
    if isinstance(error, OWN_ERRORS) or len(error.args) > 1:
        return
    text, message = words_of(error), None
    if is_oom_error(error):
        message = text if OUT_OF_MEMORY in text else f"{text} {OUT_OF_MEMORY}".lstrip()
    elif module is None or not isinstance(error, RuntimeError):
        return
    elif "backward through the graph a second time" in text and module.automatic_optimization:
        # torch advises retain_graph=True, with which gradients would be added twice
        message = (
            f"{type(module).__name__}.training_step: a backward has already freed the graph of its loss. If the step "
            "calls `backward`, remove that call and return the loss. If it uses a tensor from an earlier step, store "
            "`tensor.detach()`."
        )
    elif "meta" in text:
        message = _on_meta(module)
    if message is not None:
        error.args = (message,)


def _on_meta(module: LightningModule) -> str | None:
    """Return a message that names the parameters on the meta device, or None if no parameter is there."""
    names = [repr(name) for name, parameter in module.named_parameters() if parameter.is_meta]
    if not names:
        return None
    which = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if any(map(is_of_transformers, module.modules())):
        return (
            f"{type(module).__name__}: parameter {which} is on the meta device: `load_pretrained` reads its values "
            "after `configure_model`, so `configure_model` cannot compute with them (resize_token_embeddings takes a "
            "mean). For a larger vocabulary, write a new folder once and load it: from_pretrained, "
            "resize_token_embeddings, save_pretrained(NEW_FOLDER)."
        )
    return (
        f"{type(module).__name__}: parameter {which} is on the meta device and has no values: create the layer in "
        "`configure_model`, or call `to_empty(device=...)` and initialize it, before the fit."
    )
