"""One window: micro-batches, backward, clipping, update, schedulers; and manual optimization below it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.engines.engine import MicroBatch
from lockstep.ground.closures import demands_closure, takes_closure
from lockstep.ground.device_numbers import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_warn, warn_once
from lockstep.loop.feed import Window
from lockstep.loop.hooks import Transfer, is_overridden, is_replaced
from lockstep.loop.optimizers import LightningOptimizer, refuse_loss
from lockstep.loop.padding import padding
from lockstep.loop.parts import StepParts
from lockstep.loop.progress import BATCH_END
from lockstep.loop.schedulers import Schedulers
from lockstep.loop.session import Session
from lockstep.loop.signatures import takes_idx
from lockstep.loop.step_watch import StepWatch
from lockstep.loop.weighing import Share, share_of, weighed_by_part
from lockstep.module import LightningModule

BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_backward")
NO_HOOK = (
    "rank {rank}: `training_step` returned None for the last micro-batch of a window, so that `on_after_backward` does "
    "not run here. If it changes gradients, and other ranks had a loss, the ranks' weights part: return `0.0 * loss`."
)
SKIPPED = (
    "The data set does not go round: ranks {ranks} have no samples of a micro-batch that is left at the end, and run "
    "neither `training_step` nor the batch hooks for it: {names}. What belongs to each update (an average of the "
    "weights, say) belongs into a hook of the update, `on_before_zero_grad` or `on_before_optimizer_step`, which run "
    "on every rank; or leave such batches out by DataLoader(drop_last=True)."
)
UNEVEN = (
    "The loaders side by side are cut unevenly in this step: of one there are more samples than of another in a "
    "micro-batch or on a rank, so that one loss for all cannot weigh each as one process with the whole batch would. "
    'It is weighed by the loader with most samples. Return the losses by loader, {"loss": {"a": loss_a, "b": loss_b}}, '
    "in the nest of the batch and None where a batch is None: each is weighed by its own samples then. Or leave such "
    "rows out: DataLoader(drop_last=True) in each."
)
NO_BATCH = (
    "A training loader gave None for a batch: it is skipped, and so are on_train_batch_start and `training_step`. If "
    "that is not meant, look at the loader's `collate_fn`."
)


class Begun(NamedTuple):
    """A micro-batch that is on the device, and whose ``on_train_batch_start`` has run."""

    batch: Any
    number: int
    """``batch_idx``"""
    weight: float
    """Samples of this rank."""
    share: float
    """What its loss is multiplied with."""
    absent: tuple[int, ...]
    """Ranks without samples of it."""
    first: bool
    """The first of its window."""
    last: bool
    """The last of its window."""


class Step:
    """Plays the windows of a fit.

    The order of a window of two micro-batches, as users' hooks see it (Lightning's)::

        on_train_batch_start, training_step, on_before_zero_grad, zero_grad,
            on_before_backward, backward, on_after_backward, on_train_batch_end
        on_train_batch_start, training_step,
            on_before_backward, backward, on_after_backward,
            on_before_optimizer_step, clip, optimizer.step, schedulers, on_train_batch_end

    A micro-batch of which this rank has no samples does not exist for the user's code here: its batch hooks and
    ``training_step`` do not run. What belongs to the update runs on every rank: zero_grad, on_after_backward where
    the gradients were reduced, on_before_optimizer_step, clipping, the step. Under manual optimization
    ``training_step`` does the update, so it runs on a padding batch, which leaves no trace (`loop/padding.py`).

    Three ways lead through a window; :meth:`setup` takes one for the whole fit: automatic optimization, manual
    optimization, and that of an engine that plays ahead: all forwards and backwards of a window at once.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ended_by_user = False  # on_train_batch_start returned -1
        self.wrapped: list[LightningOptimizer] = []
        self.watch: StepWatch | None = None  # of the optimizers' own steps
        self.at_once = 1  # micro-batches that are played before anybody looks whether a validation is due

    def setup(self) -> None:
        """Bind what the windows of this fit use; called once, when strategy, module and optimizers are ready."""
        session = self.session
        self.module = session.module
        self.strategy = session.strategy
        self.hooks = session.hooks
        self.results = session.results
        self.fit, self.progress = session.fit, session.fit.progress
        self.config = session.config
        self.agreement = session.agreement
        self.scaler = self.strategy.precision.scaler
        self.transfer = Transfer(self.module, session.datamodule, self.strategy)
        self.moves = not self.transfer.idle
        self.shared = self.strategy.world_size > 1
        self.training_step = self.module.training_step
        self.results.enter("training_step")
        self.table = self.results.table
        self.takes_idx = takes_idx(self.training_step)
        own = {name: is_replaced(name, self.module, LightningModule) for name in vars(LightningModule)}
        self._own_zero_grad = own["optimizer_zero_grad"]
        self._own_clipping = own["configure_gradient_clipping"]
        self._clips = self._own_clipping or self.config.gradient_clip_val is not None
        self.schedulers = Schedulers(session)
        self.counted: Callable[[int], int] = int  # micro-batches of an epoch as the run's plan counts them
        self.fit.weights = None  # sum of what `training_step` returned as "weight" in this window
        self._unweighed = False  # whether it returned a loss without one in this window
        self._looked_at_keys = False
        self._weighs: bool | None = None  # whether it returns weights, as all ranks agree once one has returned a loss
        self._factor: float | Tensor = 1.0
        self._share = 1.0
        self._use_optimizers()
        self._by_closure = self._steps_by_closure()
        self._losses: list[Tensor] = []  # of this window, where a closure returns their sum
        self._absent: tuple[int, ...] = ()  # ranks without samples for the micro-batch at hand
        self._bare_backward = (
            self.scaler is None and self.hooks.on_before_backward is None and self.hooks.on_after_backward is None
        )
        self._choose_way()

    def _steps_by_closure(self) -> bool:
        """Whether ``optimizer.step`` plays the last micro-batch: an optimizer or an ``optimizer_step`` wants it so."""
        by_engine = self.strategy.window is not None
        is_own = is_overridden if by_engine else is_replaced
        own_step = is_own("optimizer_step", self.module, LightningModule)
        may = not (self.strategy.steps_itself or by_engine)
        wants = may and any(takes_closure(optimizer) for optimizer in self._optimizers)
        return self.module.automatic_optimization and (self.needs_closure or own_step or wants)

    def _choose_way(self) -> None:
        """Take one of the ways through a window, and refuse an optimizer that cannot go with it."""
        automatic, by_engine = self.module.automatic_optimization, self.strategy.window
        if not automatic:
            self.window = self._manual
        elif by_engine is not None:
            self._check_ahead()
            self._play_window = by_engine
            self.window = self._ahead
        else:
            self.window = self._automatic
        if self.scaler is not None and not automatic:
            self.scaler.refuse(*self._optimizers)
        if self.scaler is not None and self.needs_closure:
            raise MisconfigurationException(
                f'Trainer(precision="16-mixed") with {type(self.optimizer).__name__}: a scaled loss and a line search '
                'do not go together; use precision="bf16-mixed" or "32-true".'
            )

    def _use_optimizers(self) -> None:
        self._optimizers = [*self.strategy.optimizers]
        self.wrapped = [
            LightningOptimizer(optimizer, self._stepped_by_user, self.module, self.strategy.synchronize)
            for optimizer in self._optimizers
        ]
        automatic = self.module.automatic_optimization
        self.optimizer: Optimizer | None = self._optimizers[0] if automatic else None
        self.release()
        self.watch = StepWatch(self.session, self._optimizers, counts=not automatic)
        self.needs_closure = self.optimizer is not None and demands_closure(self.optimizer)

    def release(self) -> None:
        """The fit is over: take the hooks from its optimizers."""
        if self.watch is not None:
            self.watch.detach()

    def _change_optimizers(self) -> None:
        """The user has put others in their place (``trainer.optimizers = [...]``): step those from here on."""
        if self.optimizer is not None and not self._by_closure and demands_closure(self.strategy.optimizers[0]):
            raise MisconfigurationException(
                f"trainer.optimizers: {type(self.strategy.optimizers[0]).__name__}, which needs a closure, takes the "
                f"place of {type(self.optimizer).__name__} in the middle of a fit: begin with it in "
                "`configure_optimizers`, or step both yourself (`self.automatic_optimization = False`)."
            )
        self.strategy.change_optimizers()
        self._use_optimizers()

    # -- the ways through a window -------------------------------------------------------------------------

    def _begun(self, window: Window, batch_idx: int) -> Iterator[Begun]:
        """Begin one micro-batch after the other; none behind the one for which the user has ended the epoch."""
        strategy, last, absent = self.strategy, window.size - 1, window.absent
        for i, (batch, weight, share) in enumerate(window):
            strategy.sync_gradients = at_end = i == last
            self.progress.last = at_end and window.last
            if absent is not None:
                self._absent = strategy.replicas.ranks(absent[i])
            batch = self._begin(batch, batch_idx + i, weight)
            if self.ended_by_user:
                return
            if strategy.optimizers != self._optimizers:
                self._change_optimizers()
            first = i == 0 and not window.begun
            yield Begun(batch, batch_idx + i, weight, share, self._absent, first, at_end)

    def _automatic(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Play one window, yielding after each micro-batch, when its hooks have run.

        Where ``optimizer.step`` takes a closure, that plays the last micro-batch. Each further call of it drops the
        gradients and plays the whole window again; what is logged is what the last call saw.
        """
        played: list[Begun] = []
        steps = self.shared or bool(window.begun)  # whether there is a batch that is not None
        self._losses.clear()
        for micro_batch in self._begun(window, batch_idx):
            steps = steps or micro_batch.batch is not None
            if self._by_closure:
                played.append(micro_batch)
            if not micro_batch.last:
                outputs = self._play(micro_batch)
            elif self._by_closure and steps:
                outputs = self._step_by_closure(played)
            else:
                outputs = self._play(micro_batch)
                if steps:
                    self._prepare_update()
                    self.strategy.step(self.optimizer)  # type: ignore[arg-type]  # there is one on this way
            if micro_batch.last:
                self._end_window(micro_batch.number, steps)
            self._end(outputs, micro_batch)
            yield

    def _step_by_closure(self, window: list[Begun]) -> Any:
        """The update of a window whose last micro-batch is still to be played."""
        outputs: Any = {}
        logged: Any = None  # before the last micro-batch
        played = False

        @torch.enable_grad()  # an optimizer's step may run under no_grad
        def closure() -> Tensor | None:
            nonlocal outputs, logged, played
            if played:
                self.results.go_back(logged)
                self._losses.clear()
            else:
                logged = self.results.snapshot()
            for micro_batch in window if played else window[-1:]:
                outputs = self._play_in_closure(micro_batch)
            played = True
            self._prepare_update()
            return self._closure_loss(all(micro_batch.weight for micro_batch in window))

        optimizer: Any = self.wrapped[0]  # which stands for an Optimizer
        self.module.optimizer_step(self.progress.epoch, window[-1].number, optimizer, closure)
        if not played:
            raise MisconfigurationException(
                "`optimizer_step` did not run its `optimizer_closure`, in which forward and backward are: call "
                "`optimizer.step(closure=optimizer_closure)`, or `optimizer_closure()` alone to skip the update."
            )
        return outputs

    def _play_in_closure(self, micro_batch: Begun) -> Any:
        self.strategy.sync_gradients = micro_batch.last
        self.results.table = self.table
        self.results.muted = not micro_batch.last or micro_batch.weight == 0.0
        self._absent = micro_batch.absent
        return self._play(micro_batch)

    def _closure_loss(self, has_samples: bool) -> Tensor | None:
        """What the closure returns: the loss of the window; None where no step returned one.

        Args:
            has_samples: whether this rank has samples of each micro-batch.
        """
        losses = self._losses
        if not losses and not self.needs_closure:
            return None
        if not losses and has_samples:
            raise MisconfigurationException(
                f"{type(self.optimizer).__name__} steers by the loss, and `training_step` returned None for "
                "every micro-batch of this window: return the loss."
            )
        if not losses:
            losses = [torch.zeros((), device=self.strategy.root_device)]  # the others' count
        total = torch.stack(losses).sum() * self._factor
        if not (self.needs_closure and self.shared):
            return total
        # a line search steers by it, so it must be the same number on all ranks; one without samples does not know
        # its type
        mean: Tensor = self.strategy.reduce(total.to(widest(total.device)), reduce_op="mean")
        return mean

    def _check_ahead(self) -> None:
        """Refuse what cannot be where the engine plays the window.

        Raises:
            MisconfigurationException: with the hook or the optimizer, and the way out.
        """
        name = type(self.strategy).__name__
        if self._by_closure:
            raise MisconfigurationException(
                f"{name} plays whole windows itself, so that no closure can run them again: use an optimizer whose "
                "`step` needs none, and do not override `optimizer_step`."
            )
        if self.hooks.on_before_backward is not None:
            raise MisconfigurationException(
                f"{name} plays whole windows itself and calls no `on_before_backward`: change the loss in "
                "`training_step`, or gradients in `on_after_backward`, which runs once a window."
            )

    def _ahead(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Have the engine play one window: all its batches are there before the first forward.

        Hooks of the batches run before and after the window; ``on_after_backward`` runs once.
        """
        results, progress = self.results, self.progress
        self.at_once = window.size
        begun = [(micro_batch, results.micro_batch) for micro_batch in self._begun(window, batch_idx)]
        if self.ended_by_user:
            return
        losses: dict[int, Tensor] = {}  # by number, as backward begins from them
        parts = [self._part(micro_batch, number, losses) for micro_batch, number in begun]
        if not window.begun:
            self._zero_grad(batch_idx)
        if self.shared:
            self._publish()
        self._absent = ()
        self._parts = StepParts(results)
        outputs = self._play_window(self.training_step, parts)
        self._parts.keep()
        results.show_ahead = self._parts.show_newest  # for a checkpoint of a hook below
        if self.hooks.on_after_backward is not None:
            self.hooks.call("on_after_backward")
        self._prepare_update()
        self.strategy.step(self.optimizer)  # type: ignore[arg-type]
        last = begun[-1][0].number
        self._end_window(last, True)
        progress.batch += last - batch_idx  # a checkpoint of the hooks below goes on after the whole window
        progress.total_batches += last - batch_idx
        for output, (micro_batch, number) in zip(outputs, begun, strict=True):
            # as elsewhere: who saves at the end of a window does so behind all of its batches
            self.strategy.sync_gradients = micro_batch.last
            self._enter(micro_batch.weight, number)
            self._parts.show()
            self._absent = micro_batch.absent
            shown = {} if output is None or isinstance(output, Tensor) else _detached(output)
            if number in losses:
                shown["loss"] = losses[number]
            self._end(shown, micro_batch, counts=micro_batch.number == batch_idx)
            yield

    def _part(self, micro_batch: Begun, number: int, losses: dict[int, Tensor]) -> MicroBatch:
        """What an engine that plays ahead gets of a micro-batch."""
        arguments = (micro_batch.batch, micro_batch.number) if self.takes_idx else (micro_batch.batch,)
        enter = partial(self._enter_part, micro_batch.weight, number)
        loss = partial(self._scaled_loss, micro_batch.share, losses, number)
        return MicroBatch(arguments, enter, loss, empty=micro_batch.weight == 0.0)

    def go_on_after(self, batch: int, accumulate: int) -> None:
        """A resumed run begins after this micro-batch."""
        if self.window == self._ahead:
            self.at_once = (batch - 1) % accumulate + 1

    def _enter_part(self, weight: float, number: int, part: float = 1.0) -> None:
        self._parts.keep()
        self._enter(weight * part, number)

    def _enter(self, weight: float, number: int) -> None:
        """What is logged from here on is of this micro-batch."""
        results = self.results
        results.weight, results.micro_batch, results.muted = weight, number, weight == 0.0
        results.table = self.table

    def _scaled_loss(
        self, share: float, losses: dict[int, Tensor], number: int, output: object, part: float = 1.0
    ) -> Tensor | None:
        """What backward begins from, of what ``training_step`` returned for (a part of) micro-batch ``number``."""
        loss, factor = self._read(output, share_of(share, part))
        if loss is None:
            return None
        loss = loss * factor
        # a copy: on a CPU the mean of a loss lies in the memory of all that it is the mean of
        losses[number] = loss.detach().clone() if number not in losses else losses[number] + loss.detach()
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _manual(self, window: Window, batch_idx: int) -> Iterator[None]:
        """Play one batch of manual optimization: ``training_step`` does it all."""
        for micro_batch in self._begun(window, batch_idx):
            batch, number, weight, share = micro_batch[:4]
            if self.shared:
                self._publish()
            arguments = (batch, number) if self.takes_idx else (batch,)
            self.watch.forget_depth()  # type: ignore[union-attr]
            rounds = self.strategy.rounds
            self._share = share if weight else 1.0
            if type(share) is Share:
                warn_once(UNEVEN, key="uneven loaders")
            with padding(self.session) if weight == 0.0 else nullcontext():
                skips = batch is None and not self.shared
                output = None if skips else self.strategy.run(self.training_step, *arguments)
            shown = self._shown(output)
            outputs = None if batch is None else _detached(shown)
            self.progress.batch += 1
            self.progress.total_batches += 1
            self.progress.phase = BATCH_END
            if self.shared:
                self.agreement.settle(self.strategy.rounds != rounds)
            self._end(outputs, micro_batch)
            yield

    @staticmethod
    def _shown(output: object) -> dict[str, Any]:
        """What ``training_step`` of manual optimization returned, as ``on_train_batch_end`` sees it."""
        if output is None:
            return {}
        if isinstance(output, Mapping):
            return dict(output)
        if isinstance(output, Tensor):
            return {"loss": output}
        raise MisconfigurationException(
            f"`training_step` returned {output!r:.80} ({type(output).__name__}): under manual optimization it may "
            "return a tensor or a dict, which `on_train_batch_end` is shown, or nothing."
        )

    # -- parts of a window ---------------------------------------------------------------------------------

    def _begin(self, batch: object, batch_idx: int, weight: float) -> Any:
        results = self.results
        results.micro_batch += 1
        results.weight = weight
        results.muted = weight == 0.0
        if self._absent:
            return self._begin_with_absent(batch, batch_idx, weight)
        if self.moves:
            batch = self.transfer(batch)
        if batch is None:
            warn_once(NO_BATCH, key="no batch")
        elif self.hooks.on_train_batch_start is not None:
            self.ended_by_user = self.hooks.call("on_train_batch_start", batch, batch_idx) == -1
        results.table = self.table
        return batch

    def _begin_with_absent(self, batch: object, batch_idx: int, weight: float) -> Any:
        """:meth:`_begin` where some ranks have no samples of the micro-batch: all learn whether the epoch ends here."""
        names = self.hooks.owners(BATCH_HOOKS)
        if names:
            warn_once(SKIPPED.format(ranks=list(self._absent), names=", ".join(names)), key="batch hooks skipped")
        ended = False
        if weight == 0.0:
            self.hooks.call_without_samples("_on_any_batch_start", batch_idx)
            if self.moves and batch is not None:
                with padding(self.session):
                    batch = self.transfer(batch)
        else:
            with self._without_absent():
                if self.moves:
                    batch = self.transfer(batch)
                if self.hooks.on_train_batch_start is not None:
                    ended = self.hooks.call("on_train_batch_start", batch, batch_idx) == -1
        self.ended_by_user = self.strategy.reduce_boolean_decision(ended, all=False)
        if self.ended_by_user:
            self._absent = ()
        self.results.table = self.table
        return batch

    @contextmanager
    def _without_absent(self) -> Iterator[None]:
        """Around user code that ranks without samples do not run: it may call no collective."""
        self.strategy.absent = self._absent
        try:
            yield
        finally:
            self.strategy.absent = ()

    def _play(self, micro_batch: Begun) -> Any:
        """Forward and backward of one micro-batch; gives what ``on_train_batch_end`` is shown."""
        if micro_batch.absent:
            return self._play_with_absent(micro_batch)
        if micro_batch.batch is None:
            return self._without_batch(micro_batch)
        batch = micro_batch.batch
        if self.takes_idx:
            output = self.strategy.run(self.training_step, batch, micro_batch.number)
        else:
            output = self.strategy.run(self.training_step, batch)
        return self._learn(output, micro_batch)

    def _learn(self, output: Any, micro_batch: Begun) -> Any:
        """Backward from what ``training_step`` returned."""
        loss, factor = self._read(output, micro_batch.share)
        if micro_batch.first:
            self._zero_grad(micro_batch.number)
        if self.shared and self.strategy.sync_gradients:
            self._publish()
        if loss is None:
            self._skip()
        else:
            loss = self._differentiate(loss, factor)
        return None if self.hooks.on_train_batch_end is None else _with_loss(output, loss)

    def _without_batch(self, micro_batch: Begun) -> None:
        """What :meth:`_play` does where the loader gave None for a batch."""
        if micro_batch.first and not self.strategy.sync_gradients:  # the window goes on
            self._zero_grad(micro_batch.number)
        if self.shared and self.strategy.sync_gradients:
            self._publish()
        self.strategy.skip_loss()

    def _skip(self) -> None:
        """Take part in the reduction without a loss: ``training_step`` returned None."""
        strategy = self.strategy
        self.strategy.skip_loss()
        if self.shared and strategy.sync_gradients and self.hooks.on_after_backward is not None:
            warnings.warn(NO_HOOK.format(rank=strategy.global_rank), stacklevel=3)  # on this rank, whichever it is

    def _differentiate(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        """Backward of a loss times its factor; gives the product."""
        if isinstance(factor, Tensor) or factor != 1.0:  # of a device's nobody asks
            loss = loss * factor
        if self._by_closure:
            self._losses.append(loss.detach())
        try:
            if self._bare_backward:
                self.strategy.backward(loss)
            else:
                self._backward(loss)
        except RuntimeError as error:
            refuse_loss(loss, "`training_step` returned", error)
            raise
        return loss

    def _play_with_absent(self, micro_batch: Begun) -> Any:
        """:meth:`_play` of a micro-batch of which some ranks have no samples."""
        strategy, step = self.strategy, self.training_step
        with strategy.leaving_out(micro_batch.absent):
            if micro_batch.weight and micro_batch.batch is None:
                return self._without_batch(micro_batch)
            if micro_batch.weight:
                arguments = (micro_batch.batch, micro_batch.number) if self.takes_idx else (micro_batch.batch,)
                with self._without_absent():  # until the step returns: the others do not run it
                    output = strategy.run(step, *arguments)
                return self._learn(output, micro_batch)
            if strategy.runs_padding:
                self._run_padding(micro_batch)
            else:
                self._take_part(micro_batch)
        return None

    def _take_part(self, micro_batch: Begun) -> None:
        """Take part in the window's reduction without samples."""
        strategy = self.strategy
        if micro_batch.first:
            self._zero_grad(micro_batch.number)
        if self.scaler is not None:
            self.scaler.scale(torch.zeros((), device=strategy.root_device))  # it is made by its first loss
        if strategy.sync_gradients:
            self._publish()
        strategy.skip(absent=True)
        if strategy.sync_gradients and self.hooks.on_after_backward is not None:
            self.hooks.call("on_after_backward")

    def _run_padding(self, micro_batch: Begun) -> None:
        """Let this rank, which has no samples, go through the step with the others."""
        strategy = self.strategy
        with padding(self.session):
            arguments = (micro_batch.batch, micro_batch.number) if self.takes_idx else (micro_batch.batch,)
            before = self.fit.weights
            loss, _ = self._read(strategy.run(self.training_step, *arguments), 1.0)
            if self.fit.weights is not before:  # it returns weights, and this one is nothing
                self.fit.weights = 0.0 if before is None else before
            if micro_batch.first:
                self._zero_grad(micro_batch.number)
            if strategy.sync_gradients:
                self._publish()
            if loss is None:
                self.strategy.skip_loss()
            else:
                strategy.backward(loss if self.scaler is None else self.scaler.scale(loss))
        if strategy.sync_gradients and self.hooks.on_after_backward is not None:
            self.hooks.call("on_after_backward")

    def _publish(self) -> None:
        """Before this rank's part of the reduction: what it wants the others to know at the window's end."""
        self.session.request_stop()
        self.agreement.publish()

    def _read(self, output: Any, share: float) -> tuple[Tensor | None, float | Tensor]:
        """The loss and its factor from what ``training_step`` returned."""
        if output is None:
            warn_once(
                "`training_step` returned None: the micro-batch is skipped. If that is not meant, return the loss.",
                key="training_step None",
            )
            return None, share
        loss = output
        if not isinstance(output, Tensor):
            loss = self._loss_of(output)
            nest = self.fit.loaded.nest
            if nest is not None and not isinstance(loss, Tensor):
                self._unweighed = True
                return weighed_by_part(output, nest, share), 1.0
            if "weight" in output:
                own = output["weight"]
                self.fit.weights = own if self.fit.weights is None else self.fit.weights + own
                return loss, own
        self._unweighed = True
        if type(share) is Share:
            warn_once(UNEVEN, key="uneven loaders")
        return loss, share

    def _loss_of(self, output: Any) -> Any:
        """The loss in a dict: a tensor, or a nest of them, one for each of several loaders."""
        loss = output.get("loss") if isinstance(output, dict) else None
        nests = (dict, list, tuple) if self.fit.loaded.nest is not None else ()
        if not isinstance(loss, (Tensor, *nests)):
            raise MisconfigurationException(
                f"`training_step` returned {type(output).__name__}: return the loss (a tensor), a dict with the key "
                '"loss", or None.'
            )
        if not self._looked_at_keys and isinstance(loss, Tensor):
            self._looked_at_keys = True
            _tell_of_unread(output)
        return loss

    def _backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        hooks = self.hooks
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if hooks.on_before_backward is not None and not self.session.is_padding:
            self.strategy.steps_end()
            if self._absent:
                with self._without_absent():
                    hooks.call("on_before_backward", loss)
            else:
                hooks.call("on_before_backward", loss)
        if self.scaler is not None and self.optimizer is None:
            assert self.watch is not None
            self.watch.enlarge()
            self.strategy.backward(loss, *args, **kwargs)
            self.watch.reduce()
        else:
            self.strategy.backward(loss, *args, **kwargs)
        if hooks.on_after_backward is not None:
            hooks.call("on_after_backward")

    def _zero_grad(self, batch_idx: int) -> None:
        if self.hooks.on_before_zero_grad is not None:
            self.strategy.steps_end()  # what the hook writes in parameters stays
            self.hooks.call("on_before_zero_grad", self.optimizer)
        optimizer = self.optimizer
        assert optimizer is not None
        if self._own_zero_grad:
            self.module.optimizer_zero_grad(self.progress.epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def _prepare_update(self) -> None:
        """The window's gradient is whole: divide the users' weights out, unscale, run the hook, clip."""
        optimizer = self.optimizer
        assert optimizer is not None
        if self._weighs is not False or self.fit.weights is not None:
            self._divide_weights()
        if self.scaler is not None:
            self.scaler.forget(optimizer)
            self.scaler.unscale(optimizer)
        if self.hooks.on_before_optimizer_step is not None:
            self.hooks.call("on_before_optimizer_step", optimizer)
        if self._clips:
            value, algorithm = self.config.gradient_clip_val, self.config.gradient_clip_algorithm
            if self._own_clipping:
                self.module.configure_gradient_clipping(optimizer, value, algorithm)
            else:
                self.strategy.clip(optimizer, value, algorithm)  # type: ignore[arg-type]  # which `_clips` tells

    def _divide_weights(self) -> None:
        """Divide the weights that training steps returned out of the gradient; all ranks do it, or none."""
        weighed, unweighed = self.fit.weights is not None, self._unweighed
        if self._weighs is None:
            kinds = torch.tensor([weighed, unweighed], dtype=torch.float32)
            weighed, unweighed = self.strategy.reduce(kinds, reduce_op="max").bool().tolist()
            self._weighs = weighed if weighed or unweighed else None
        if (weighed and self._weighs is False) or (unweighed and self._weighs):
            raise MisconfigurationException(
                '`training_step` returned a "weight" for some micro-batches and none for others: return one with every '
                "loss, on every rank, or with none."
            )
        if self._weighs:
            self._factor = self.strategy.divide_gradients(0.0 if self.fit.weights is None else self.fit.weights)
        self.fit.weights, self._unweighed = None, False

    def _end_window(self, batch_idx: int, updated: bool) -> None:
        """Count the update and step the schedulers, unless there was nothing to step for, or gradients overflowed."""
        updated = updated and not self.strategy.left_out
        updated = updated and (self.scaler is None or not self.watch.left_out)  # type: ignore[union-attr]
        if updated:
            self.progress.global_step += 1
        if self.shared:
            self.agreement.settle(True)
        if updated and self.schedulers.by_step:
            self.schedulers.after_update(self.counted(batch_idx + 1))
        if self.progress.last:
            self.schedulers.after_epoch()

    def _end(self, outputs: object, micro_batch: Begun, counts: bool = True) -> None:
        progress = self.progress
        if self.optimizer is not None and counts:
            progress.batch += 1
            progress.total_batches += 1
            progress.phase = BATCH_END
        results = self.results
        if results.each_step:
            self.session.published.publish(results.agree_on_step())
        if self._absent:
            self._end_with_absent(outputs, micro_batch)
        elif self.hooks.on_train_batch_end is not None:
            self.hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
        results.muted = False
        if results.each_step and self.strategy.sync_gradients:
            self.session.agree_on_stop()  # who stops by a value of this window stops here

    def _end_with_absent(self, outputs: object, micro_batch: Begun) -> None:
        if micro_batch.weight == 0.0:
            self.hooks.call_without_samples("_on_any_batch_end", micro_batch.number)
        elif self.hooks.on_train_batch_end is not None:
            with self._without_absent():
                self.hooks.call("on_train_batch_end", outputs, micro_batch.batch, micro_batch.number)
        self._absent = ()

    # -- what users call -----------------------------------------------------------------------------------

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward in manual optimization, with the hooks around it; batches count by their samples here too."""
        if self._share != 1.0:
            loss = loss * self._share
        try:
            self._backward(loss, *args, **kwargs)
        except RuntimeError as error:
            refuse_loss(loss, "manual_backward() was given", error)
            raise

    def clip(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer, with the Trainer's settings where none are given."""
        value = self.config.gradient_clip_val if value is None else value
        if value is None:
            return
        algorithm = self.config.gradient_clip_algorithm if algorithm is None else str(algorithm).lower()
        if algorithm not in ("norm", "value"):
            raise MisconfigurationException(
                f'clip_gradients(gradient_clip_algorithm={algorithm!r}): choose "norm" or "value".'
            )
        self.strategy.clip(optimizer, value, algorithm)

    def _stepped_by_user(self, optimizer: Optimizer, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """``LightningOptimizer.step``: in ``optimizer_step`` the closure is the window's, in manual the user's."""
        if not self.module.automatic_optimization:
            own = closure

            def closure() -> Any:
                result = own() if own is not None else None
                self.watch.settle(optimizer)  # type: ignore[union-attr]
                if self.hooks.on_before_optimizer_step is not None:
                    self.hooks.call("on_before_optimizer_step", optimizer)
                return result

        before = self.progress.global_step
        result = self.strategy.step(optimizer, closure, **options)
        if self.optimizer is None and self.progress.global_step == before:  # else the window's end counts it
            self.progress.global_step += not self.watch.left_out  # type: ignore[union-attr]  # one without hooks
        return result


def _tell_of_unread(output: dict[str, Any]) -> None:
    lost = [key for key in ("log", "progress_bar") if isinstance(output.get(key), dict)]
    if lost:
        rank_zero_warn(
            f"`training_step` returned the keys {lost}, as in 2019, and nothing reads them: write "
            "`self.log_dict(values)`, with prog_bar=True for the progress bar, and return the loss."
        )


def _with_loss(output: Any, loss: Tensor | None) -> dict[str, Any]:
    """What ``on_train_batch_end`` is shown of a step's output: the loss is as backward saw it."""
    if loss is None:
        return {}
    return {"loss": loss.detach()} if isinstance(output, Tensor) else _detached({**output, "loss": loss})


def _detached(output: dict[str, Any]) -> dict[str, Any]:
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
