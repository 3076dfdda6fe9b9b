"""Saving and loading of checkpoints as dicts: Lightning's keys, and lockstep's for a bit-identical resume."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import partial
from types import NoneType
from typing import Any

import torch

from lockstep.callbacks.model_checkpoint import Checkpoint
from lockstep.checkpoint import frozen, storage
from lockstep.checkpoint.claims import is_claimed_elsewhere
from lockstep.checkpoint.io import CheckpointIO
from lockstep.data.source import of_all_ranks
from lockstep.datamodule import LightningDataModule
from lockstep.engines.engine import EngineState
from lockstep.ground.errors import MisconfigurationException, MissingKey, raise_on_all
from lockstep.ground.hyperparameters import noted_classes, plain_hyperparameters
from lockstep.ground.optimizers import class_of
from lockstep.ground.rank import does, log, rank_zero_info, rank_zero_warn, warn_once
from lockstep.ground.seed import random_states_of, set_random_states_of
from lockstep.ground.types import TrainerFn, TrainerStatus
from lockstep.launch.started import how_started
from lockstep.loop.logging import LogCollector
from lockstep.loop.metrics import find_metric, is_metric, load_metric, parts_of
from lockstep.loop.progress import Progress
from lockstep.loop.resume import SavedRanks, ValidationStart, at_window_start
from lockstep.loop.session import Session
from lockstep.loop.state_checks import check_types, load_optimizer, load_weights, taking
from lockstep.loop.window_start import initial_state, metric_state, put_buffers
from lockstep.module import check_weights

OWN = "lockstep"  # our own part of a checkpoint; all other keys but the classes of hyperparameters are Lightning's
# Lightning asks for this key to know which migrations a file needs; ours have the layout of this version.
LAYOUT = "2.6.0"


# -- saving ------------------------------------------------------------------------------------------------


def _training_state(session: Session, engine: EngineState) -> dict[str, Any]:
    """Return the states of callbacks, optimizers, schedulers and scaler under Lightning's keys."""
    strategy = session.strategy
    found: dict[str, Any] = {
        "callbacks": {callback.state_key: saved for callback in session.callbacks if (saved := callback.state_dict())}
    }
    if engine.optimizers is not None:
        found["optimizer_states"] = engine.optimizers
    found["lr_schedulers"] = [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs]
    scaler = strategy.precision.scaler
    if scaler is not None:
        found["MixedPrecision"] = scaler.state_dict()
    return found


def collect(
    session: Session, weights_only: bool = False, *, alone: bool = False, trainable_only: bool = False
) -> dict[str, Any]:
    """Return a checkpoint of the run as a dict. Collective, unless ``alone``.

    Args:
        session: session during or after a fit.
        weights_only: omit what only a resume needs.
        alone: do not communicate. The checkpoint has no random states and gradients, which differ between ranks, so a
            resume repeats the current window.
        trainable_only: omit weights that are frozen and have not changed, and record their names.
    """
    progress, strategy = session.fit.progress.saved(), session.strategy
    base = session.base.record(strategy.named_parameters()) if trainable_only else {}
    with session.base.left_out() if trainable_only else nullcontext():
        engine = strategy.save(alone, weights_only)
    checkpoint: dict[str, Any] = {
        "epoch": progress.epoch,
        "global_step": progress.global_step,
        "pytorch-lightning_version": LAYOUT,
        "state_dict": engine.module,
        "loops": progress.lightning_loops(),
        OWN: {
            "progress": progress.state_dict(),
            "writer": {
                "strategy": type(strategy).__name__,
                "world": session.world_size,
                "torch": str(torch.__version__),
            },
            **({frozen.KEY: base} if base else {}),
        },
    }
    if not weights_only:
        checkpoint[OWN]["optimizers"] = [class_of(optimizer) for optimizer in strategy.optimizers]
        checkpoint.update(_training_state(session, engine))
        checkpoint[OWN].update(_resume_entries(session, engine, progress, alone))
    datamodule = session.datamodule
    for source in (session.module, datamodule):
        if source is not None and source.hparams:
            key = source.CHECKPOINT_HYPER_PARAMS_KEY
            checkpoint[key] = plain_hyperparameters(source.hparams)
            # `torch.load(weights_only=True)` accepts plain values, so classes are recorded by name
            checkpoint[f"{key}_classes"] = noted_classes(source.hparams, checkpoint[key])
            if source._hparams_name is not None:
                checkpoint[source.CHECKPOINT_HYPER_PARAMS_NAME] = source._hparams_name
    if datamodule is not None and not weights_only:
        saved = datamodule.state_dict()
        if saved:
            checkpoint[type(datamodule).__qualname__] = saved
    session.hooks.call("on_save_checkpoint", checkpoint)  # last: users may change all of it
    return checkpoint


def _resume_entries(session: Session, engine: EngineState, progress: Progress, alone: bool) -> dict[str, Any]:
    """Return lockstep's part of a checkpoint: seed, batch plan, metrics, and an entry for each rank."""
    fit, automatic = session.fit, session.module.automatic_optimization
    done = _finished_in_window(session, progress)
    # while a batch runs, gradients may hold a part of it, and its logged values are mixed with those of others: a
    # resume then plays the window again
    again = alone or (fit.progress.runs and automatic)
    if again and done:
        progress.go_back(done)
        done = 0
    # in manual optimization only the user knows where a window ends, so gradients are always saved
    holds = not alone and (bool(done) or not automatic)
    start = fit.resume.window_start.state(progress.batch) if again else None
    if start is not None:  # None for a window of one batch
        if engine.module is not None:
            engine.module.update(start["buffers"])
        start = at_window_start({"window_start": {**start, "buffers": {}}}, not progress.batch)
    if alone:
        part = {"data": of_all_ranks(_loader_state(session))}
        if session.world_size == 1:  # values logged on other ranks are missing
            part.update(logged(session) if start is None else start)
        ranks = [part] * session.world_size
    else:
        ranks = _entries(session, progress, done, start, holds)
    published = session.published.callback if fit.resume.cut_epoch is None else fit.resume.cut_epoch["published"]
    if_any = {
        "strategy of ranks": engine.by_rank,
        "changed by hooks": fit.resume.hook_changes.state_dict(session.module),
        "shares": None if fit.feed is None else fit.feed.shares_state(),
        "not finite at start": fit.finite.at_start,
    }
    return {
        **{key: value for key, value in if_any.items() if value},
        "progress": {**progress.state_dict(), "seconds": fit.seconds()},
        "seed": session.seed,
        "plan": fit.resume.batches.state_dict(session.config, fit.feed, progress, done),
        "strategy": engine.own or {},
        "replicas": list(session.strategy.replicas.of_rank),
        "metrics": {name: value.cpu() for name, value in published.items()},
        "measured": dict(session.published.measured),
        "ranks": ranks,
        "held": holds,
        "started": how_started() if session.is_global_zero else {},
    }


def _finished_in_window(session: Session, progress: Progress) -> int:
    """Return the number of finished batches in the current accumulation window."""
    feed = session.fit.feed
    if progress.last or not progress.batch or feed is None:
        return 0  # at the end of an epoch, or before it has loaders
    return int(feed.batches_done(progress.batch, session.config.accumulation(progress.epoch)))


def _entries(session: Session, progress: Progress, done: int, start: dict[str, Any] | None, holds: bool) -> list[Any]:
    """Gather the ranks' entries of a checkpoint in a list on rank 0, unless each rank writes its own. Collective.

    Args:
        session: session of this rank.
        progress: counters that are saved.
        done: finished batches in a window that a resume continues.
        start: logged values at the start of a window that a resume repeats; else None.
        holds: True if the gradients of the window are saved.
    """
    fit, strategy = session.fit, session.strategy
    cut = fit.resume.cut_epoch or logged(session)
    validation = fit.resume.validation
    random = random_states_of(strategy.own_devices) if validation is None else validation.random
    part: dict[str, Any] = {"random": random, "data": _loader_state(session)}
    part.update({"results": cut["results"], "metrics": cut["metrics"]} if start is None else start)
    if done:
        part["window_start"] = fit.resume.window_start.state(progress.batch - done, session.is_global_zero)
    if holds:
        part["weights"] = fit.weights
        part.update(strategy.window_state())
    if strategy.saves_shards:  # each rank writes its own entry
        ranks: list[Any] = [{} for _ in range(session.world_size)]
        ranks[strategy.world.rank] = part
        return ranks
    # reduced gradients are the same on all ranks: they are not sent, and are in the file once
    return strategy.collectives.gather_on_zero(part, alike=True)


def logged(session: Session) -> dict[str, Any]:
    """Return this rank's logged values and metric states of the current epoch, and ``trainer.callback_metrics``."""
    module, results, validation = session.module, session.fit.results, session.fit.resume.validation
    return {
        "results": [] if results is None else deepcopy(results.state_dict()),
        "metrics": metric_states(module, vars(session).get("results")) if validation is None else validation.metrics,
        "published": dict(session.published.callback),
    }


def validation_start(session: Session) -> ValidationStart:
    """Return the random states and metric states before a validation within a fit changes them."""
    return ValidationStart(random_states_of(session.strategy.own_devices), metric_states(session.module))


def metric_states(module: torch.nn.Module, of: LogCollector | None = None) -> dict[str, Any]:
    """Return the states of a module's torchmetrics objects, by name.

    Args:
        module: module of the fit.
        of: collector of logged values; if it is that of an ended evaluation, its metrics count as reset.
    """
    logged = of.metrics if of is not None and of.ended else []
    ended = {id(part) for metric in logged for part in parts_of(metric)}
    metrics = ((name, part) for name, part in module.named_modules() if is_metric(part))
    return {name: (initial_state if id(metric) in ended else metric_state)(metric) for name, metric in metrics}


def _loader_state(session: Session) -> dict[str, Any]:
    """Return the state of this rank's training loaders. While a batch runs, return the state before that batch."""
    fit = session.fit
    return {} if fit.feed is None else fit.feed.state_dict(fit.progress.under_way)


@does("saving a checkpoint")
def save(
    session: Session,
    path: str | os.PathLike[str],
    weights_only: bool = False,
    storage_options: object = None,
    also: Callable[[dict[str, Any]], None] | None = None,
    trainable_only: bool = False,
) -> None:
    """Write a checkpoint of the run. Collective.

    Args:
        session: session during or after a fit.
        path: a path or a URL.
        weights_only: as in `collect`.
        storage_options: options for the CheckpointIO.
        also: function that changes the checkpoint before it is written; called on every rank.
        trainable_only: as in `collect`.

    Raises:
        NonFiniteError: the weights are not finite; nothing was written.
    """
    if trainable_only and getattr(session.strategy.checkpoint_io, "writes_all_weights", False):
        raise MisconfigurationException(
            f"trainer.save_checkpoint(trainable_only=True): {type(session.strategy).__name__} writes all weights in "
            'its checkpoint_format: choose checkpoint_format="sharded" or "full" instead.'
        )
    checkpoint = collect(session, weights_only, trainable_only=trainable_only)
    if also is not None:
        also(checkpoint)
    session.fit.finite.check(checkpoint)
    error: Exception | None = None
    try:
        session.strategy.save_checkpoint(checkpoint, path, storage_options, sharded=session.strategy.saves_shards)
    except Exception as failed:
        error = failed
    # a full disk on one rank is an error on all, which would otherwise wait for it in the next collective
    raise_on_all(error, session.strategy.gather_objects, f"the checkpoint {os.fspath(path)!r}")
    session.fit.finite.newest_checkpoint = os.fspath(path)
    if session.state.status is not TrainerStatus.RUNNING:  # otherwise the end of the call waits for the writer
        finish(session)


def save_alone(session: Session, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint from this rank without communication, after a failure."""
    checkpoint = collect(session, alone=True)
    session.fit.finite.check_alone(checkpoint)
    session.strategy.save_checkpoint(checkpoint, path, alone=True)
    session.strategy.checkpoints.close()


def finish(session: Session) -> None:
    """Wait until all checkpoints are written. If a rank failed to write, raise an error on all ranks. Collective."""
    strategy = session.strategy
    if getattr(type(strategy.checkpoint_io), "teardown", None) is CheckpointIO.teardown:
        return
    error: Exception | None = None
    try:
        strategy.checkpoints.close()
    except Exception as failed:
        error = failed
    raise_on_all(error, strategy.gather_objects, "a checkpoint")


def finish_alone(session: Session) -> None:
    """Wait until this rank's checkpoints are written, without communication. Log any error. Used after a failure."""
    try:
        session.strategy.checkpoints.close()
    except Exception as failed:
        log.warning(f"A checkpoint could not be written: {type(failed).__name__}: {failed}")


# -- loading -----------------------------------------------------------------------------------------------


def best_of(session: Session) -> Checkpoint | None:
    """Return the first checkpoint callback whose ``best_model_path`` is set, or None."""
    keepers = (callback for callback in session.checkpoint_callbacks if getattr(callback, "best_model_path", ""))
    return next(keepers, None)


def find(session: Session, asked: str | os.PathLike[str] | None, *, model_given: bool) -> str | None:
    """Return the path of the checkpoint that ``asked``, a ``ckpt_path``, refers to; None if there is nothing to load.

    Args:
        session: session whose ModelCheckpoint callbacks know "best" and "last".
        asked: a path, "best", "last", "hpc" (written by Lightning when it requeued a job), or None.
        model_given: False if the call got no module; then None means the best checkpoint.

    Raises:
        MisconfigurationException: there is no such checkpoint.
    """
    fn = session.state.fn
    if asked is None:
        best = "" if model_given else getattr(best_of(session), "best_model_path", "")
        if best:
            rank_zero_info(f"trainer.{fn}(): no module passed, so the last fit's best checkpoint is loaded: {best}")
        return str(best) or None
    if asked == "hpc":
        return _requeued(session)
    if asked not in ("best", "last"):
        return os.fspath(asked)
    if not session.checkpoint_callbacks:
        raise MisconfigurationException(
            f'trainer.{fn}(ckpt_path="{asked}"): `ModelCheckpoint` is not configured; pass a path, or remove '
            "`enable_checkpointing=False`."
        )
    path = getattr(best_of(session), "best_model_path", "") if asked == "best" else _last(session)
    if path:
        keepers = sum(hasattr(callback, "best_model_score") for callback in session.checkpoint_callbacks)
        if asked == "best" and keepers > 1:
            warn_once(
                f'trainer.{fn}(ckpt_path="best"): this Trainer has {keepers} ModelCheckpoint callbacks; the best '
                f"checkpoint of the first one is loaded, {path}. Pass a path to load another checkpoint.",
                key="the best of several",
            )
        return str(path)
    if asked == "last" and session.fitting:
        warn_once('trainer.fit(ckpt_path="last"): there is no checkpoint yet; the fit starts from the beginning.')
        return None
    raise MisconfigurationException(
        f'trainer.{fn}(ckpt_path="{asked}"): `ModelCheckpoint` is not configured to save the {asked} checkpoint, or '
        "has saved none yet; pass a path."
    )


def _requeued(session: Session) -> str:
    """Return the newest checkpoint that Lightning wrote when it requeued a job."""
    folder = session.config.default_root_dir
    names = storage.names(folder)
    numbers = {int(found[1]): name for name in names if (found := re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", name))}
    if not numbers:
        raise MisconfigurationException(
            f'trainer.{session.state.fn}(ckpt_path="hpc"): there is no hpc_ckpt_N.ckpt in {folder}; pass a '
            "path, or omit ckpt_path: a job that lockstep requeued continues automatically."
        )
    return storage.inside(folder, numbers[max(numbers)])


PATIENCE = 10.0
"""Seconds that a fit with ckpt_path="last" waits for another process that still saves to the same folder."""


def _last(session: Session) -> str | None:
    """Return the ModelCheckpoint callbacks' checkpoint with the highest ``global_step``, or None."""
    found: set[str] = set()
    for callback in session.checkpoint_callbacks:
        found |= {str(path) for path in callback.find_last(session.trainer)}
    existing = sorted(path for path in found if storage.exists(path))
    steps: list[int | None] = [None]
    if session.is_global_zero:  # rank 0 decides for all
        for folder in sorted({os.path.dirname(path) for path in existing}) if session.fitting else ():
            if is_claimed_elsewhere(folder, PATIENCE):
                raise MisconfigurationException(
                    f'trainer.fit(ckpt_path="last"): another process is saving its run in {folder} now, so the last '
                    "checkpoint there does not belong to this run: wait for that process to end, pass the path of a "
                    "checkpoint, or pass a different `dirpath` to ModelCheckpoint."
                )
        if len(existing) > 1:
            from lockstep.checkpoint.sharded import global_step  # only a choice needs it

            steps = [global_step(path) for path in existing]
    if None in steps:  # a file without a step, for example of another program: the one that was written last
        return max(existing, key=storage.modified) if existing else None
    return max(zip(steps, map(storage.modified, existing), existing, strict=True))[-1]


@does("reading a checkpoint")
def read(session: Session, path: str, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint to the CPU on every rank, and copy its seed and batch plan into the session."""
    checkpoint: dict[str, Any] = session.strategy.load_checkpoint(path, weights_only)
    check_weights(checkpoint, path)
    rank_zero_info(f"trainer.{session.state.fn}: restoring from {path}")
    with taking(path, "its plan"):
        own = checkpoint.get(OWN, {})
        if own.get("seed") is not None:
            session.seed = operator.index(own["seed"])  # the order of data is a function of it
        if session.state.fn is TrainerFn.FITTING:
            session.fit.resume.batches.read(own)
            session.fit.resume.shares = own.get("shares")
    return checkpoint


def restore_model(session: Session, checkpoint: dict[str, Any]) -> None:
    """Load a checkpoint's weights and data module state, after calling the module's ``on_load_checkpoint``."""
    module, datamodule = session.module, session.datamodule
    _call_load_hook(session, checkpoint)
    if not session.places_first:  # placing the module has converted it
        session.strategy.precision.convert_module(module)  # a module in float32 would round weights in double
    absent = frozen.absent_of(checkpoint, module)
    if session.fitting and absent is None:  # before loading: the file may hold other values of frozen weights
        session.base = frozen.FrozenBase(module)
        if _hashes_base(session):
            session.base.begin(dict(module.named_parameters()))
    with taking(session.ckpt_path, "'state_dict'"):
        load_weights(session, checkpoint["state_dict"], absent or ())
    saved = checkpoint.get(type(datamodule).__qualname__)
    if saved is not None and isinstance(datamodule, LightningDataModule):
        datamodule.load_state_dict(saved)


def _call_load_hook(session: Session, checkpoint: dict[str, Any]) -> None:
    """Call the module's ``on_load_checkpoint``; in a fit, once more for weights that a callback saved separately."""
    keys = {key for callback in session.callbacks if (key := callback._other_weights)} if session.fitting else set()
    weights = {key: checkpoint[key] for key in keys if isinstance(checkpoint.get(key), dict)}
    others = {key: {**checkpoint, "state_dict": copy(found)} for key, found in weights.items()}
    # `others` keeps the values alive, so their ids stay their own
    items = {key: [(name, id(value)) for name, value in found.items()] for key, found in weights.items()}
    session.hooks.own("on_load_checkpoint", checkpoint)
    for key, other in others.items():
        now = [(name, id(value)) for name, value in weights[key].items()]
        # a hook that has changed these weights by their own key is not called on them
        if checkpoint.get(key) is weights[key] and items[key] == now:
            session.hooks.own("on_load_checkpoint", other)
            checkpoint[key] = other["state_dict"]


def _hashes_base(session: Session) -> bool:
    """Return True if a fit hashes its frozen weights at the start: if checkpoints will omit them, or they are small."""
    will_save = any(getattr(callback, "save_trainable_only", False) for callback in session.checkpoint_callbacks)
    return will_save or session.base.elements <= frozen.SOON_HASHED


def take_base(session: Session, checkpoint: dict[str, Any] | None) -> None:
    """Record the frozen weights. Raise an error if the checkpoint was trained with different frozen weights."""
    module = session.module
    absent = None if checkpoint is None else frozen.absent_of(checkpoint, module)
    if checkpoint is not None and module.strict_loading:
        call = f"trainer.{session.state.fn}(ckpt_path={str(session.ckpt_path)!r})"
        with taking(session.ckpt_path, "its record of frozen weights"):
            frozen.check(checkpoint, module, session.strategy.named_parameters(), call)
    whole = checkpoint is not None and absent is None
    if session.fitting and not whole:  # otherwise `restore_model` has recorded it
        session.base = frozen.FrozenBase(module, absent)
        if _hashes_base(session):
            session.base.begin(session.strategy.named_parameters())
    elif not (session.has("base") and session.base.is_of(module)):  # the record of the last fit stays valid after it
        session.base = frozen.FrozenBase(module, absent)


def restore_callbacks(session: Session, checkpoint: dict[str, Any]) -> None:
    """Call the callbacks' ``on_load_checkpoint``, then load each callback's state by its ``state_key``."""
    for hook in session.hooks.callbacks("on_load_checkpoint"):
        hook(checkpoint)
    with taking(session.ckpt_path, "'callbacks'"):
        states = dict(checkpoint.get("callbacks", {}))
    unclaimed = sorted(set(map(str, states)) - {callback.state_key for callback in session.callbacks})
    if unclaimed and session.fitting:
        rank_zero_warn(
            f"trainer.fit(ckpt_path=...): the checkpoint has the states of callbacks that this Trainer does not have: "
            f"{', '.join(unclaimed)}. They are dropped: pass the same callbacks to the Trainer to restore them."
        )
    for callback in session.callbacks:
        saved = states.get(callback.state_key)
        if saved is None:
            continue
        if not type(callback).__module__.startswith("lockstep."):
            callback.load_state_dict(saved)  # an error there is the user's
            continue
        with taking(session.ckpt_path, f"the state of {type(callback).__name__}"):
            check_types(saved, callback.state_dict(), type(callback), optional=True)
            callback.load_state_dict(saved)


def restore_training(session: Session, checkpoint: dict[str, Any]) -> None:
    """Restore optimizers, schedulers, scaler, counters and the bucket plan. `restore_rank` restores the rest."""
    for key, what in (("optimizer_states", "optimizers"), ("lr_schedulers", "schedulers")):
        if key not in checkpoint:
            raise MissingKey(
                f"trainer.fit(ckpt_path=...): the checkpoint has weights only (no {what}), so a fit cannot resume "
                "from it: load it with `load_from_checkpoint` and fit without `ckpt_path`."
            )
    strategy, path = session.strategy, session.ckpt_path
    with taking(path, "the optimizers' states"):
        _same_number("optimizers", strategy.optimizers, checkpoint["optimizer_states"])
        kinds = checkpoint.get(OWN, {}).get("optimizers", [None] * len(strategy.optimizers))
        each = zip(strategy.optimizers, checkpoint["optimizer_states"], kinds, strict=True)
        for number, (optimizer, saved, kind) in enumerate(each):
            this_one = EngineState(optimizers=[*[None] * number, saved])
            load_optimizer(optimizer, saved, kind, partial(strategy.load, this_one))
    with taking(path, "the schedulers' states"):
        configs = strategy.lr_scheduler_configs
        _same_number("lr schedulers", configs, checkpoint["lr_schedulers"])
        for config, saved in zip(configs, checkpoint["lr_schedulers"], strict=True):
            if type(config.scheduler).__module__.startswith("torch."):
                check_types(saved, config.scheduler.state_dict(), type(config.scheduler))
            config.scheduler.load_state_dict(saved)
    with taking(path, "the state of its precision"):
        if strategy.precision.scaler is not None and "MixedPrecision" in checkpoint:
            strategy.precision.scaler.load_state_dict(checkpoint["MixedPrecision"])
    with taking(path, "its progress"):
        _restore_progress(session, checkpoint)


def _restore_progress(session: Session, checkpoint: dict[str, Any]) -> None:
    """Restore the counters, the engine's own state and the metrics, and select this rank's entry."""
    strategy, fit = session.strategy, session.fit
    own = checkpoint.get(OWN, {})
    if "ranks" in own:
        fit.progress.load(own["progress"])
        fit.finite.at_start = [str(name) for name in own.get("not finite at start", [])]
        if "changed by hooks" in own:
            fit.resume.hook_changes.load(own["changed by hooks"])
        strategy.load(EngineState(own=own["strategy"], by_rank=own.get("strategy of ranks", [])))
        for name, value in own["metrics"].items():
            session.published.callback[name] = torch.as_tensor(value)
        session.published.measured.update(own.get("measured", {}))
        saved = SavedRanks.read(own)
        fit.resume.entry = saved.part_for(
            strategy.world.rank, strategy.replicas, strategy.cuts_parameters, strategy.window is not None
        )
        if fit.progress.batch and not saved.has_logged_values:
            fit.resume.lacks_logged = True
            rank_zero_warn(
                f"trainer.fit(ckpt_path={str(session.ckpt_path)!r}): a rank that failed saved this checkpoint alone, "
                f"after {fit.progress.batch} batches of epoch {fit.progress.epoch}, without the values logged on other "
                "ranks: this epoch's means only cover the remaining batches."
            )
    else:
        fit.progress.load_lightning(checkpoint)
        fit.resume.entry = {"data": {}}
        fit.resume.lacks_logged = fit.progress.batch > 0
        if fit.resume.lacks_logged:
            rank_zero_warn(
                f"trainer.fit(ckpt_path=...): Lightning saved this checkpoint after {fit.progress.batch} batches "
                f"of epoch {fit.progress.epoch}, without the values that they logged: this epoch's means only cover "
                "the remaining batches."
            )


def _same_number(what: str, have: list[Any], saved: list[Any]) -> None:
    if len(have) != len(saved):
        raise MisconfigurationException(
            f"trainer.fit(ckpt_path=...): the checkpoint has {len(saved)} {what}, but `configure_optimizers` returned "
            f"{len(have)}: resume with the module that wrote it."
        )


def restore_rank(session: Session, part: dict[str, Any]) -> None:
    """Restore random states, logged values, loaders and gradients just before training continues.

    Args:
        session: session of the fit.
        part: this rank's entry of the checkpoint. A checkpoint from Lightning has no entries, so ``part`` is empty.
    """
    module, strategy = session.module, session.strategy
    with taking(session.ckpt_path, "a rank's part"):
        session.fit.loaded.load_state_dict(part["data"])
        logged = part.get("results", [])
        for entry in logged:
            for key in ("total", "last", "weight", "last_weight", "age"):
                if not isinstance(entry.get(key), (int, float, torch.Tensor, NoneType)):
                    raise TypeError(f"{key!r} of a logged value is a {type(entry[key]).__name__}")
        session.results.load_state_dict(logged, session.fit.progress.total_batches)
        for name, saved in part.get("metrics", {}).items():
            metric = find_metric(module, name)
            if metric is not None:
                load_metric(metric, saved if isinstance(saved, list) else [saved])
            else:
                warn_once(
                    f"The checkpoint has a state of the metric {name!r}, which this module does not have: the state "
                    "is ignored."
                )
        if "published" in part:
            session.published.callback.clear()
            session.published.callback.update(part["published"])
        put_buffers(module, part.get("buffers_at_start", {}))
        session.fit.resume.window_start.take(part.get("window_start"))
        others: SavedRanks | None = part.get("of others")
        if others is not None:
            shapes = {name: parameter.shape for name, parameter in strategy.named_parameters().items()}
            part = {**part, "gradients": others.mean_gradients(shapes)}
        strategy.load_window_state(part)
        session.fit.weights = part.get("weights")
        if "random" in part:  # last: loading may have drawn random numbers
            set_random_states_of(part["random"], strategy.own_devices)
