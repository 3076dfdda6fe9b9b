"""Runners of a fit's accumulation windows: forward and backward of each micro-batch, and the update.

Once per fit, `FitLoop.make_step` chooses the class that runs accumulation windows: `Automatic`, `ByClosure`
(`loop/closures.py`), `Manual` or `Ahead`. The method ``window`` of each class runs a whole window. The base class
`Step` has the methods that all share: for start and end of a micro-batch, its loss and its backward. The update is in
`loop/update.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.data.window import Share, Window, share_of, weighed_by_part
from lockstep.engines.engine import BatchByHand, MicroBatch, WindowRunner
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once
from lockstep.loop.checks import takes_idx
from lockstep.loop.hooks import Transfer
from lockstep.loop.logged_entry import Entry, joined_values
from lockstep.loop.logging import LogCollector
from lockstep.loop.optimizers import refuse_loss
from lockstep.loop.padding import padding
from lockstep.loop.progress import BATCH_END
from lockstep.loop.session import Session
from lockstep.loop.update import Update

BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_backward")
SKIPPED = (
    "The data set does not divide evenly: ranks {ranks} have no samples of a last micro-batch, and run neither "
    "`training_step` nor these batch hooks for it: {names}. Move code that belongs to each update (an average of the "
    "weights, for example) to `on_before_zero_grad` or `on_before_optimizer_step`, which run on every rank; or drop "
    "such batches with DataLoader(drop_last=True)."
)
NO_BATCH = (
    "A training loader returned None for a batch: on_train_batch_start and `training_step` are skipped. If this is not "
    "intended, check the loader's `collate_fn`."
)
NO_HOOK = (
    "rank {rank}: `training_step` returned None for the last micro-batch of a window, so `on_after_backward` does not "
    "run on this rank. If the hook changes gradients and other ranks have a loss, the ranks' weights differ from then "
    "on: return `0.0 * loss`."
)
UNEVEN = (
    "Loaders that are read together are split unevenly over the ranks. One loss for all loaders is weighted by the "
    "loader with most samples, so the gradient differs from that of one process with the whole batch. Return a loss "
    'for each loader, {"loss": {"a": loss_a, "b": loss_b}}, nested as the batch and None where a batch is None; or '
    "drop uneven batches with DataLoader(drop_last=True) in each loader."
)


class TrainingBatch(NamedTuple):
    """A micro-batch on the device, after its ``on_train_batch_start`` has run."""

    batch: Any
    number: int
    """``batch_idx``"""
    weight: float
    """Number of this rank's samples in the micro-batch; 0 if it has none."""
    share: float
    """Factor for the micro-batch's loss."""
    absent: tuple[int, ...]
    """Ranks without samples of the micro-batch."""
    first: bool
    """True for the first micro-batch in its window."""
    last: bool
    """True for the last micro-batch in its window."""


class Step:
    """Base class of the runners of accumulation windows. A subclass defines :meth:`window`.

    If this rank has no samples of a micro-batch, batch hooks and ``training_step`` do not run. Hooks of the update run
    on every rank.

    Attributes:
        update: updates the parameters at the end of a window.
        shared: True if there are several ranks.
        training_step: the module's method, or a timed version of it.
        takes_idx: True if ``training_step`` takes ``batch_idx``.
        transfer: moves a batch to the device.
        moves: True if ``transfer`` changes anything.
        absent: ranks without samples of the current micro-batch.
        ended_by_user: True if ``on_train_batch_start`` has returned -1.
        newest: index in its epoch of the last micro-batch that has started; -1 before the first.
        at_once: number of micro-batches that run before a validation is possible.
    """

    newest = -1
    at_once = 1
    training_step: Callable[..., Any]
    takes_idx: bool
    _given: Callable[..., Any] | None = None  # the module's method at the start of the epoch

    def __init__(self, session: Session, update: Update) -> None:
        # all that a step reads is an attribute of this object: a chain of attributes costs at each step
        self._session = session
        self._strategy = session.strategy
        self._hooks = session.hooks
        self._fit, self._progress = session.fit, session.fit.progress
        self._results = session.results
        self._scaler = session.strategy.precision.scaler
        self._watch_loss = session.fit.finite.step_check
        self._has_checked_keys = False
        self.shared = session.world_size > 1
        self.update = update
        self.take_step()
        self.transfer = Transfer(session.module, session.datamodule, session.strategy)
        self.moves = not self.transfer.idle
        self.absent: tuple[int, ...] = ()
        self.ended_by_user = False
        self._results.enter("training_step")
        self._table = self._results.table

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Run one accumulation window. Yield after the hooks of each micro-batch.

        Args:
            window: the micro-batches.
            batch_idx: ``batch_idx`` of the first micro-batch.
        """
        raise NotImplementedError

    def continue_after(self, batch: int, accumulate: int) -> None:
        """Prepare to resume an epoch after its first ``batch`` micro-batches."""

    def take_step(self) -> None:
        """Read the module's ``training_step``, which a hook may have replaced since the last epoch."""
        given = self._session.module.training_step
        if given != self._given:  # else a profiler's timed version stays
            self._given = self.training_step = given
            self.takes_idx = takes_idx(given)

    # -- a micro-batch starts ------------------------------------------------------------------------------

    def micro_batches(self, window: Window, batch_idx: int) -> Iterator[TrainingBatch]:
        """Call ``on_train_batch_start`` for each micro-batch, then yield it. Stop if the hook ends the epoch."""
        strategy, progress, last, absent = self._strategy, self._progress, window.size - 1, window.absent
        local = strategy.copies.local_steps
        if last and not window.num_done:  # a window of one batch has no middle from which a resume could continue
            self._fit.resume.window_start.note(batch_idx)
        if local is not None:  # with local steps, samples weigh among the ranks whose gradients are averaged
            window.share_among(local.averaged_ranks())
        if window.gap is not None:
            strategy.check_gap(*window.gap)
        self._results.among_batches = True
        for i, (batch, weight, share) in enumerate(window):
            strategy.sync_gradients = at_end = i == last
            progress.last = at_end and window.last
            progress.under_way = True
            if absent is not None:
                self.absent = strategy.replicas.ranks(absent[i])
            if self.newest == -1:  # the first of a fit; on the CPU, where reading labels waits for no device
                self._fit.uneven_targets = (self.shared or last > 0) and has_uneven_targets(batch)
            batch = self.begin(batch, batch_idx + i, weight)
            if self.ended_by_user:
                progress.under_way = False
                return
            progress.runs = True
            # `trainer.optimizers = [...]` in a hook
            if strategy.optimizers != self.update.optimizers:
                self.update.change_optimizers()
            first = i == 0 and not window.num_done
            yield TrainingBatch(batch, batch_idx + i, weight, share, self.absent, first, at_end)

    def begin(self, batch: object, batch_idx: int, weight: float) -> Any:
        """Move a batch to the device and call ``on_train_batch_start``; return the batch on the device."""
        results = self._results
        self.newest = batch_idx
        results.micro_batch += 1
        results.weight = weight
        results.muted = weight == 0.0  # a padding batch logs nothing
        if self.absent:
            return self._begin_with_absent(batch, batch_idx, weight)
        if self.moves:
            batch = self.transfer(batch)
        if batch is None:
            warn_once(NO_BATCH, key="no batch")
        elif self._hooks.on_train_batch_start is not None:
            self.ended_by_user = self._hooks.call("on_train_batch_start", batch, batch_idx) == -1
        results.table = self._table
        return batch

    def _begin_with_absent(self, batch: object, batch_idx: int, weight: float) -> Any:
        """Start a micro-batch for which some ranks have no samples. Collective."""
        names = self._hooks.owners(BATCH_HOOKS)
        if names:
            warn_once(SKIPPED.format(ranks=list(self.absent), names=", ".join(names)), key="batch hooks skipped")
        ended = False
        if weight == 0.0:
            self._hooks.call_without_samples("_on_any_batch_start", batch_idx)
            if self.moves and batch is not None:
                with padding(self._session):
                    batch = self.transfer(batch)
        else:
            with self.without_absent():
                if self.moves:
                    batch = self.transfer(batch)
                if self._hooks.on_train_batch_start is not None:
                    ended = self._hooks.call("on_train_batch_start", batch, batch_idx) == -1
        # the hook did not run on all ranks, and they have to end the epoch together
        self.ended_by_user = self._strategy.reduce_boolean_decision(ended, all=False)
        if self.ended_by_user:
            self.absent = ()
        self._results.table = self._table
        return batch

    @contextmanager
    def without_absent(self) -> Iterator[None]:
        """Make collectives in the ``with`` block raise, because ranks without samples skip the block's user code."""
        self._strategy.absent = self.absent
        try:
            yield
        finally:
            self._strategy.absent = ()

    # -- its forward ---------------------------------------------------------------------------------------

    def arguments(self, micro_batch: TrainingBatch) -> tuple[Any, ...]:
        """Return the arguments to pass to ``training_step`` for a micro-batch."""
        return (micro_batch.batch, micro_batch.number) if self.takes_idx else (micro_batch.batch,)

    def enter_step(self, muted: bool) -> None:
        """Record values that are logged from now on as values of ``training_step``; if ``muted``, discard them."""
        self._results.table = self._table
        self._results.muted = muted

    def read_loss(self, output: Any, share: float) -> tuple[Tensor | None, float | Tensor]:
        """Return (loss, factor): the loss in a result of ``training_step``, and the factor to multiply the loss by.

        Args:
            output: result of ``training_step``.
            share: the micro-batch's share of the accumulation window.
        """
        if output is None:
            warn_once(
                "`training_step` returned None: the micro-batch is skipped. If this is not intended, return the loss.",
                key="training_step None",
            )
            return None, share
        loss = output
        if not isinstance(output, Tensor):
            nest = self._fit.loaded.nest
            loss = output.get("loss") if isinstance(output, Mapping) else None
            if not isinstance(loss, (Tensor,) if nest is None else (Tensor, dict, list, tuple)):
                raise MisconfigurationException(
                    f"`training_step` returned {type(output).__name__}: return the loss (a tensor), a dict with the "
                    'key "loss", or None.'
                )
            if not isinstance(loss, Tensor):  # a loss for each of several loaders
                self.update.unweighed = True
                assert nest is not None
                return weighed_by_part(output, nest, share), 1.0
            if not self._has_checked_keys:
                self._has_checked_keys = True
                unread = [key for key in ("log", "progress_bar") if isinstance(output.get(key), dict)]
                if unread:
                    rank_zero_warn(
                        f"`training_step` returned the keys {unread}, which are no longer used: call "
                        "`self.log_dict(values)`, with prog_bar=True for the progress bar, and return the loss."
                    )
            if "weight" in output:
                # the user's weights are divided out at the end of the window, when those of all ranks are known
                own = output["weight"]
                self._fit.weights = own if self._fit.weights is None else self._fit.weights + own
                return loss, own
        self.update.unweighed = True
        if type(share) is Share:
            _warn_of_uneven_loaders()
        return loss, share

    # -- its backward --------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish this rank's flags (stop, signal) before the gradient reduction; ranks read them after the window."""
        self._session.request_stop()
        self._session.agreement.publish()

    def backward(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Multiply the loss by its factor, run backward, and return the product."""
        if isinstance(factor, Tensor) or factor != 1.0:  # comparing a tensor would wait for its device
            loss = loss * factor
        hooks = self._hooks
        try:
            if self._scaler is None and hooks.on_before_backward is None and hooks.on_after_backward is None:
                self._strategy.backward(loss)
            else:
                self._backward_with_hooks(loss)
        except RuntimeError as error:  # checked only after a failure, so that healthy steps pay nothing
            refuse_loss(loss, "`training_step` returned", error)
            raise
        return loss

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Run ``LightningModule.manual_backward``, with the loss weighted by the number of samples."""
        if self._watch_loss is not None and not self._session.is_padding:
            self._watch_loss(loss)
        if self.update.share != 1.0:
            loss = loss * self.update.share
        try:
            self._backward_with_hooks(loss, *args, **kwargs)
        except RuntimeError as error:
            refuse_loss(loss, "manual_backward() was given", error)
            raise

    def _backward_with_hooks(self, loss: Tensor, *args: object, **kwargs: Any) -> None:
        hooks, strategy, update = self._hooks, self._strategy, self.update
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if hooks.on_before_backward is not None and not self._session.is_padding:
            strategy.steps_end()  # FSDP leaves parameters whole after a forward: what the hook writes there is lost
            if self.absent:
                with self.without_absent():
                    hooks.call("on_before_backward", loss)
            else:
                hooks.call("on_before_backward", loss)
        if self._scaler is not None and update.optimizer is None:
            # manual optimization: users clip and read gradients between backwards, so those are kept unscaled
            update.watch.enlarge()
            strategy.backward(loss, *args, **kwargs)
            update.watch.reduce()
        else:
            strategy.backward(loss, *args, **kwargs)
        if hooks.on_after_backward is not None:
            hooks.call("on_after_backward")

    # -- it ends -------------------------------------------------------------------------------------------

    def end(self, outputs: object, micro_batch: TrainingBatch, done: int = 1) -> None:
        """Count a finished micro-batch, and call ``on_train_batch_end``.

        Args:
            outputs: first argument of ``on_train_batch_end``.
            micro_batch: the micro-batch that has ended.
            done: number of micro-batches to count.
        """
        progress, results = self._progress, self._results
        progress.batch += done
        progress.total_batches += done
        progress.under_way = progress.runs = False
        progress.phase = BATCH_END  # before the hooks, whose checkpoints continue after this micro-batch
        if results.each_step:
            self._session.published.publish(results.agree_on_step())
        if self.absent:
            if micro_batch.weight == 0.0:
                self._hooks.call_without_samples("_on_any_batch_end", micro_batch.number)
            elif self._hooks.on_train_batch_end is not None:
                with self.without_absent():
                    self._hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
            self.absent = ()
        elif self._hooks.on_train_batch_end is not None:
            self._hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
        results.muted = False
        if results.each_step and self._strategy.sync_gradients:
            self._session.agree_on_stop()  # a hook may have stopped by a value of this window: at once, on all ranks


class Automatic(Step):
    """Runner of windows in automatic optimization: forward and backward of each micro-batch, then one update.

    The order of a window of two micro-batches, as users' hooks see it (Lightning's)::

        on_train_batch_start, training_step, on_before_zero_grad, zero_grad,
            on_before_backward, backward, on_after_backward, on_train_batch_end
        on_train_batch_start, training_step,
            on_before_backward, backward, on_after_backward,
            on_before_optimizer_step, clip, optimizer.step, schedulers, on_train_batch_end

    A rank without samples runs, of all this, zero_grad, on_after_backward if gradients were reduced,
    on_before_optimizer_step, clipping and the step.
    """

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Run one accumulation window. Yield after the hooks of each micro-batch."""
        update = self.update
        steps = self.shared or bool(window.num_done)  # False if the loader gave None for every batch
        for micro_batch in self.micro_batches(window, batch_idx):
            steps = steps or micro_batch.batch is not None
            shown = self.forward_backward(micro_batch)
            if micro_batch.last:
                if steps:
                    update.prepare()
                    self._strategy.step(update.optimizer)  # type: ignore[arg-type]  # there is one on this way
                update.end_window(micro_batch.number, steps)
            self.end(shown, micro_batch)
            yield

    def forward_backward(self, micro_batch: TrainingBatch) -> Any:
        """Run forward and backward of one micro-batch; return the outputs for ``on_train_batch_end``."""
        if micro_batch.absent:
            return self._with_absent_ranks(micro_batch)
        if micro_batch.batch is None:
            return self._without_batch(micro_batch)
        if self.takes_idx:
            output = self._strategy.run(self.training_step, micro_batch.batch, micro_batch.number)
        else:
            output = self._strategy.run(self.training_step, micro_batch.batch)
        return self._backward_of(output, micro_batch)

    def _backward_of(self, output: Any, micro_batch: TrainingBatch) -> Any:
        """Run backward from a result of ``training_step``; return the outputs for ``on_train_batch_end``."""
        strategy = self._strategy
        loss, factor = self.read_loss(output, micro_batch.share)
        if loss is not None and self._watch_loss is not None:
            self._watch_loss(loss)
        if micro_batch.first:  # after the forward, as in Lightning: `on_train_batch_end` still has the gradients
            self.update.zero_grad(micro_batch.number)
        if self.shared and strategy.sync_gradients:
            self.publish()
        if loss is None:
            strategy.skip_loss()  # takes part in the reduction, for which the other ranks wait
            if self.shared and strategy.sync_gradients and self._hooks.on_after_backward is not None:
                warnings.warn(NO_HOOK.format(rank=strategy.global_rank), stacklevel=2)  # on this rank, whichever it is
        else:
            loss = self.backward(loss, factor)
        if self._hooks.on_train_batch_end is None:
            return None
        if loss is None:
            return {}
        # the loss as backward has seen it
        return {"loss": loss.detach()} if isinstance(output, Tensor) else _detached({**output, "loss": loss})

    def _without_batch(self, micro_batch: TrainingBatch) -> None:
        """Skip forward and backward, because the loader returned None for a batch."""
        if micro_batch.first and not self._strategy.sync_gradients:  # the window has further micro-batches
            self.update.zero_grad(micro_batch.number)
        if self.shared and self._strategy.sync_gradients:
            self.publish()
        self._strategy.skip_loss()

    # -- micro-batches that some ranks have no samples of --------------------------------------------------

    def _with_absent_ranks(self, micro_batch: TrainingBatch) -> Any:
        """Run forward and backward of a micro-batch for which some ranks have no samples."""
        strategy = self._strategy
        with strategy.without_ranks(micro_batch.absent):
            if micro_batch.weight and micro_batch.batch is None:
                return self._without_batch(micro_batch)
            if micro_batch.weight:
                with self.without_absent():  # until the step returns, since the others do not run it
                    output = strategy.run(self.training_step, *self.arguments(micro_batch))
                return self._backward_of(output, micro_batch)
            if strategy.runs_padding:
                self._run_padding(micro_batch)
            else:
                self._before_reduction(micro_batch)
                if self._scaler is not None:
                    # torch's scaler makes its scale tensor at the first loss
                    self._scaler.scale(torch.zeros((), device=strategy.root_device))
                strategy.skip(absent=True)
            if strategy.sync_gradients and self._hooks.on_after_backward is not None:
                self._hooks.call("on_after_backward")
        return None

    def _run_padding(self, micro_batch: TrainingBatch) -> None:
        """Run ``training_step`` on a padding batch, as its forward communicates with all ranks. Discard gradients."""
        strategy, weights = self._strategy, self._fit.weights
        with padding(self._session):
            output = strategy.run(self.training_step, *self.arguments(micro_batch))
            loss, _ = self.read_loss(output, 1.0)
            if self._fit.weights is not weights:  # the weight of a padding batch does not count
                self._fit.weights = 0.0 if weights is None else weights
            self._before_reduction(micro_batch)
            if loss is None:
                strategy.skip_loss()
            else:
                strategy.backward(loss if self._scaler is None else self._scaler.scale(loss))

    def _before_reduction(self, micro_batch: TrainingBatch) -> None:
        if micro_batch.first:
            self.update.zero_grad(micro_batch.number)
        if self._strategy.sync_gradients:
            self.publish()


class Manual(Step):
    """Runner of windows in manual optimization: each has one batch, and ``training_step`` updates the parameters.

    ``training_step`` therefore runs on every rank, on a padding batch if the rank has no samples (`loop/padding.py`).
    """

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Run one accumulation window, which has a single batch. Yield once, after the batch's hooks."""
        strategy = self._strategy
        for micro_batch in self.micro_batches(window, batch_idx):
            batch, weight, share = micro_batch.batch, micro_batch.weight, micro_batch.share
            if self.shared:
                self.publish()  # before the step, in which the reduction is
            self.update.watch.forget_depth()
            rounds = strategy.rounds
            self.update.share = share if weight else 1.0  # for `manual_backward`
            strategy.by_hand = BatchByHand(micro_batch.number, share)
            if type(share) is Share:
                _warn_of_uneven_loaders()
            with padding(self._session) if weight == 0.0 else nullcontext():
                skips = batch is None and not self.shared
                output = None if skips else strategy.run(self.training_step, *self.arguments(micro_batch))
            strategy.by_hand = None
            shown = _shown_by_hand(output)
            if self.shared:
                # only a step that has reduced gradients has carried the flags to the other ranks
                self._session.agreement.settle(strategy.rounds != rounds)
            self.end(None if batch is None else shown, micro_batch)
            yield


class StepParts:
    """Recorder that merges values logged with ``on_step=True``, for engines that split micro-batches into parts.

    Values logged with ``on_epoch=True`` are not merged here, because they add up over the parts.

    Args:
        results: collector of the steps' values.
    """

    def __init__(self, results: LogCollector) -> None:
        self._results = results
        self._kept: dict[int, dict[str, tuple[Entry, Any, float]]] = {}  # micro-batch -> name -> entry, value, weight

    def keep(self) -> None:
        """Store the values that a finished part of a micro-batch has logged with ``on_step=True``."""
        results = self._results
        kept = self._kept.setdefault(results.micro_batch, {})
        for name, entry in (results.table or {}).items():
            if entry.step_fresh != results.micro_batch or not entry.last_weight:
                continue
            value, weight = entry.last, entry.last_weight
            if name in kept:
                _, before, weighed = kept[name]
                value, weight = joined_values(entry.op, before, weighed, value, weight), weighed + weight
            kept[name] = (entry, value, weight)
            entry.step_fresh = 0

    def show(self) -> None:
        """At the end of a micro-batch, log the merged values of all its parts as the micro-batch's own values."""
        results = self._results
        for entry, value, weight in self._kept.pop(results.micro_batch, {}).values():
            entry.last, entry.last_weight, entry.step_fresh = value, weight, results.micro_batch

    def show_newest(self) -> int:
        """Log each metric's newest merged value. Return the number of the newest micro-batch."""
        newest = self._results.micro_batch
        for number in sorted(self._kept):
            newest = max(newest, number)
            for entry, value, weight in self._kept[number].values():
                entry.last, entry.last_weight, entry.step_fresh = value, weight, number
        return newest


class Ahead(Step):
    """Runner of windows that calls the engine's own method, after all batches of the window have been read.

    Hooks of the batches run before and after the window; ``on_after_backward`` runs once.

    Args:
        session: session of the fit.
        update: update of the fit.
        play: the engine's method that runs a window.

    Raises:
        MisconfigurationException: the engine does not support a hook or the optimizer.
    """

    def __init__(self, session: Session, update: Update, play: WindowRunner) -> None:
        super().__init__(session, update)
        self._play = play
        self._parts = StepParts(session.results)
        name = type(self._strategy).__name__
        if update.by_closure:
            raise MisconfigurationException(
                f"{name} runs whole accumulation windows itself, so a closure cannot run them again: use an optimizer "
                "whose `step` needs no closure, and do not override `optimizer_step`."
            )
        if self._hooks.on_before_backward is not None:
            raise MisconfigurationException(
                f"{name} runs whole accumulation windows itself and does not call `on_before_backward`: change "
                "the loss in `training_step`, or gradients in `on_after_backward`, which runs once a window."
            )

    def window(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Run one accumulation window. Yield after the hooks of each micro-batch."""
        results, update = self._results, self.update
        self.at_once = window.size
        started = [(micro_batch, results.micro_batch) for micro_batch in self.micro_batches(window, batch_idx)]
        if self.ended_by_user:
            return
        losses: dict[int, Tensor] = {}  # by number, as backward starts from them
        parts = [self._part(micro_batch, number, losses) for micro_batch, number in started]
        if not window.num_done:
            update.zero_grad(batch_idx)
        if self.shared:
            self.publish()
        self.absent = ()  # the engine runs `training_step` on all ranks
        self._parts = StepParts(results)
        outputs = self._play(self.training_step, parts)
        self._parts.keep()
        results.show_ahead = self._parts.show_newest  # a hook below may save a checkpoint
        if self._hooks.on_after_backward is not None:
            self._hooks.call("on_after_backward")
        update.prepare()
        self._strategy.step(update.optimizer)  # type: ignore[arg-type]  # there is one on this way
        update.end_window(started[-1][0].number, True)
        for output, (micro_batch, number) in zip(outputs, started, strict=True):
            # as in other ways to play: only the last batch of a window is at a boundary
            self._strategy.sync_gradients = micro_batch.last
            self._enter(micro_batch.weight, number)
            self._parts.show()
            self.absent = micro_batch.absent
            shown = {} if output is None or isinstance(output, Tensor) else _detached(output)
            if number in losses:
                shown["loss"] = losses[number]
            # the first hook counts all batches: a checkpoint continues after the whole window
            self.end(shown, micro_batch, done=len(started) if micro_batch.number == batch_idx else 0)
            yield

    def _part(self, micro_batch: TrainingBatch, number: int, losses: dict[int, Tensor]) -> MicroBatch:
        """Convert a micro-batch to a `MicroBatch`, the argument type of the engine's ``window``."""
        enter = partial(self._enter_part, micro_batch.weight, number)
        loss = partial(self._scaled_loss, micro_batch.share, losses, number)
        return MicroBatch(self.arguments(micro_batch), enter, loss, empty=micro_batch.weight == 0.0)

    def _enter_part(self, weight: float, number: int, part: float = 1.0) -> None:
        self._parts.keep()
        self._enter(weight * part, number)

    def _enter(self, weight: float, number: int) -> None:
        """Record values that are logged from now on as values of micro-batch ``number``."""
        self._results.weight, self._results.micro_batch = weight, number
        self.enter_step(muted=weight == 0.0)

    def _scaled_loss(
        self, share: float, losses: dict[int, Tensor], number: int, output: object, part: float = 1.0
    ) -> Tensor | None:
        """Return the loss of a micro-batch or of its part, multiplied by its factor and by the loss scale, if any."""
        loss, factor = self.read_loss(output, share_of(share, part))
        if loss is None:
            return None
        if self._watch_loss is not None:
            self._watch_loss(loss)
        loss = loss * factor
        # a copy, since on the CPU a detached mean keeps the memory of the tensor that it is the mean of
        losses[number] = loss.detach().clone() if number not in losses else losses[number] + loss.detach()
        return loss if self._scaler is None else self._scaler.scale(loss)

    def continue_after(self, batch: int, accumulate: int) -> None:
        """Set :attr:`at_once` to resume an epoch after its first ``batch`` micro-batches."""
        self.at_once = (batch - 1) % accumulate + 1


def _shown_by_hand(output: object) -> dict[str, Any]:
    """Convert a result of ``training_step`` in manual optimization to the ``outputs`` of ``on_train_batch_end``.

    Raises:
        MisconfigurationException: ``output`` is not a tensor, a dict or None.
    """
    if output is None:
        return {}
    if isinstance(output, Mapping):
        return _detached(output)
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    raise MisconfigurationException(
        f"`training_step` returned {output!r:.80} ({type(output).__name__}): in manual optimization, return a tensor "
        "or a dict, which `on_train_batch_end` receives, or None."
    )


def _detached(output: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a step's output dict in which all tensors are detached."""
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}


def has_uneven_targets(batch: object) -> bool:
    """Return True if samples of a batch may differ in their number of valid labels ("labels" other than -100).

    A mean over all labels is then not a mean over the samples. Waits for the device of the labels.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.ndim < 2 or not labels.numel() or labels.is_floating_point():
        return False
    counts = (labels != -100).flatten(1).sum(1)
    # a single sample is not even, since the next one may have another number
    is_even = len(counts) > 1 and bool((counts == counts[0]).all())
    return not is_even and bool((counts < labels[0].numel()).any())


def _warn_of_uneven_loaders() -> None:
    """Warn once that ``training_step`` returned one loss for several loaders that are split unevenly over the ranks."""
    warn_once(UNEVEN, key="uneven loaders")
