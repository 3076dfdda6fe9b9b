"""Reporting of a run's actions to a profiler, under the names that Lightning's profilers use.

With a profiler, :func:`instrument` replaces bound methods of the run by timed versions, once, before the first hook,
and `Instruments.conclude` removes them at the end. Without a profiler nothing is changed, and no step checks for one.
An action that is running is not started a second time by its own calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from lockstep.data.feed import EvaluationFeed, Feed
from lockstep.datamodule import LightningDataModule
from lockstep.engines.strategy import Strategy
from lockstep.ground.methods import replace_until
from lockstep.ground.types import TrainerStatus
from lockstep.loop.hooks import NAMES, CallbackMethod, Hooks, is_overridden
from lockstep.loop.session import Session
from lockstep.loop.step import Step
from lockstep.module import LightningModule

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

BATCH = "run_training_batch"
EPOCH = "run_training_epoch"
OF_DATAMODULE = ("setup", "teardown", "state_dict", "load_state_dict", "on_exception")
OF_MODULE = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")
MOVE = "transfer_batch_to_device"
_END = object()


def instrument(session: Session) -> Instruments:
    """Report the actions of a Trainer call to its profiler until ``conclude()`` is called on the result."""
    profiler, module = session.profiler, session.module
    rank = session.strategy.world.rank if session.world_size > 1 else None
    profiler.setup(stage=str(session.state.fn), local_rank=rank, log_dir=session.trainer.log_dir)
    observe = getattr(profiler, "observe", None)
    if observe is not None:
        observe(module)
    return Instruments(session)


class Loop(Protocol):
    """Interface of the loops whose loading of batches is timed."""

    @property
    def feed(self) -> Feed | EvaluationFeed | None: ...

    def setup_data(self) -> None: ...


class Instruments:
    """Instrumentation of one Trainer call, which replaces the methods that the call runs by timed versions.

    Args:
        session: the session, with hooks, loaders and strategy ready, before the loop starts.
    """

    def __init__(self, session: Session) -> None:
        trainer = session.trainer  # for its loops, whose methods are timed; the rest of loop/ does not access them
        self._session = session
        self._profiler = session.profiler
        self._open: set[str] = set()
        self._end = ExitStack()
        self._timed_sources: set[int] = set()
        self._module = f"[LightningModule]{type(session.module).__name__}."
        self._strategy = f"[Strategy]{type(session.strategy).__name__}."
        self._time_hooks(session.hooks)
        own_hook = session.hooks.own

        def timed_own_hook(name: str, *args: object) -> Any:
            return self.timed(self._module + name, own_hook)(name, *args)

        self._replace(session.hooks, "own", timed_own_hook)
        # hooks that are bound again, after a change by users, are not timed yet
        self._replace(session.hooks, "on_rebound", lambda: self._time_hooks(session.hooks))
        self._time_strategy(session.strategy)
        self._time_fit(trainer)
        self._time_data(session)
        self._time_feed(trainer.fit_loop, "[_TrainingEpochLoop].train_dataloader_next")
        for loop in (trainer.fit_loop.validation, trainer.validate_loop, trainer.test_loop):
            self._time_feed(loop, f"[_EvaluationLoop].{loop.prefix}_next")
        self._time_feed(trainer.predict_loop, "[_PredictionLoop].predict_next")
        self._replace(trainer, "save_checkpoint", self.timed("save_checkpoint", trainer.save_checkpoint))

    # -- actions -------------------------------------------------------------------------------------------

    def start(self, action: str) -> bool:
        """Report the start of an action to the profiler. Return False if the action is already running."""
        if action in self._open:
            return False
        self._open.add(action)
        self._profiler.start(action)
        return True

    def stop(self, action: str) -> None:
        """Report the end of an action to the profiler if the action is running."""
        if action in self._open:
            self._open.discard(action)
            self._profiler.stop(action)

    def timed(self, action: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` wrapped so that each call is reported as an action."""

        @wraps(fn)
        def run(*args: object, **kwargs: object) -> Any:
            if not self.start(action):
                return fn(*args, **kwargs)
            try:
                return fn(*args, **kwargs)
            finally:
                self.stop(action)

        return run

    def _replace(self, owner: object, name: str, value: object) -> None:
        """Assign an attribute of ``owner``. :meth:`conclude` restores the previous value."""
        replace_until(self._end, owner, name, value)

    def conclude(self) -> None:
        """Restore the original methods, and let the profiler print its report if the call succeeded."""
        session = self._session
        for action in list(self._open):  # left open by an error
            self.stop(action)
        self._end.close()
        if session.state.status is TrainerStatus.FINISHED:
            self._profiler.describe()
        else:
            self._profiler.teardown(str(session.state.fn))

    # -- the timed methods -----------------------------------------------------------------------------------

    def _time_hooks(self, hooks: Hooks) -> None:
        def of_callback(call: CallbackMethod, name: str) -> Callable[..., Any]:
            return self.timed(f"[Callback]{call.owner.state_key}.{name}", call)

        for name in NAMES:
            pair = getattr(hooks, name)
            if pair is not None:
                first, own, last = pair
                timed_own = None if own is None else self.timed(self._module + name, own)
                timed_first = tuple(of_callback(call, name) for call in first)
                timed_last = tuple(of_callback(call, name) for call in last)
                self._replace(hooks, name, (timed_first, timed_own, timed_last))
        monitors = tuple(of_callback(call, "on_train_epoch_end") for call in hooks.epoch_end_monitors)
        self._replace(hooks, "epoch_end_monitors", monitors)

    def _time_strategy(self, strategy: Strategy) -> None:
        run, actions = strategy.run, {}

        def timed_run(fn: Callable[..., Any], *args: object) -> Any:
            name = getattr(fn, "__name__", "run")
            if name not in actions:
                actions[name] = self.timed(self._strategy + name, run)
            return actions[name](fn, *args)

        self._replace(strategy, "run", timed_run)
        self._replace(strategy, "backward", self.timed(f"{self._strategy}backward", strategy.backward))
        # on the default path, if `optimizer_step` is not overridden, this is the update
        self._replace(strategy, "step", self.timed(f"{self._module}optimizer_step", strategy.step))

    def _time_fit(self, trainer: Trainer) -> None:
        fit_loop, make_step = trainer.fit_loop, trainer.fit_loop.make_step

        def make_timed_step() -> None:
            make_step()
            update = fit_loop.step.update
            self._replace(update, "module", _TimedModule(update.module, self))
            # the module's own methods do what the update does itself if they are not overridden
            update.own_zero_grad = update.own_clipping = update.schedulers.own_step = True
            update.schedulers.module = update.module
            self._time_batches(fit_loop.step)

        self._replace(fit_loop, "make_step", make_timed_step)
        self._replace(fit_loop, "epoch", self.timed(EPOCH, fit_loop.epoch))

    def _time_batches(self, step: Step) -> None:
        begin, end = step.begin, step.end

        def timed_begin(*args: Any) -> Any:
            batch = begin(*args)
            if not step.ended_by_user:  # a batch that ends the epoch is not played, so nothing would stop the action
                self.start(BATCH)
            return batch

        def timed_end(*args: Any, **kwargs: Any) -> None:
            self.stop(BATCH)
            end(*args, **kwargs)

        self._replace(step, "begin", timed_begin)
        self._replace(step, "end", timed_end)
        # the hooks of training only: an evaluation has a transfer of its own
        timed = {name: self.timed(f"{self._owner(own)}{name}", own) for name, own in step.transfer.hooks.items()}
        if MOVE in timed:
            timed[MOVE] = self.timed(f"{self._strategy}batch_to_device", timed[MOVE])
        step.transfer.use(timed)

    def _owner(self, method: Callable[..., Any]) -> str:
        owner = getattr(method, "__self__", None)
        return f"[LightningDataModule]{type(owner).__name__}." if owner is self._session.datamodule else self._module

    def _time_data(self, session: Session) -> None:
        loaders, datamodule, request = session.loaders, session.datamodule, session.loaders.request

        def timed_request(stage: str) -> Any:
            hook = loaders.hook(stage)
            timed = request if hook is None else self.timed(f"{self._owner(hook)}{stage}_dataloader", request)
            return timed(stage)

        self._replace(loaders, "request", timed_request)
        for name in OF_DATAMODULE if datamodule is not None else ():
            if is_overridden(name, datamodule, LightningDataModule):
                action = f"[LightningDataModule]{type(datamodule).__name__}.{name}"
                self._replace(datamodule, name, self.timed(action, getattr(datamodule, name)))

    def _time_feed(self, loop: Loop, action: str) -> None:
        """Report the time to load each batch as ``action``, for all loaders that the loop sets up later."""
        setup_data = loop.setup_data

        def timed_setup_data() -> None:
            setup_data()
            for source in () if loop.feed is None else loop.feed.sources:
                if id(source) not in self._timed_sources:  # `setup_data` returns early for loaders that it has
                    self._timed_sources.add(id(source))
                    for name in ("open", "weighed"):
                        self._replace(source, name, self._timed_opening(action, getattr(source, name)))

        self._replace(loop, "setup_data", timed_setup_data)

    def _timed_opening(self, action: str, opening: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def each(items: Iterator[Any]) -> Iterator[Any]:
            fetch = self.timed(action, lambda: next(items, _END))
            while (item := fetch()) is not _END:
                yield item

        # opened at the call, as without a profiler: workers start, and the loader's state is that of the new pass
        return lambda *args, **kwargs: each(iter(opening(*args, **kwargs)))


class _TimedModule:
    """Proxy for the user's module that times its optimizer methods during an update."""

    def __init__(self, module: LightningModule, instruments: Instruments) -> None:
        self._module = module
        for name in OF_MODULE:
            action = f"[LightningModule]{type(module).__name__}.{name}"
            setattr(self, name, instruments.timed(action, getattr(module, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
