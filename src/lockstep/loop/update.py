"""Update: prepares the gradients of an accumulation window for the optimizer, and steps the schedulers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim import Optimizer

from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.optimizers import EagerClosure, demands_closure, may_ignore, takes_closure
from lockstep.ground.rank import warn_once
from lockstep.loop.hooks import is_overridden, is_replaced
from lockstep.loop.optimizers import LightningOptimizer
from lockstep.loop.schedulers import Schedulers
from lockstep.loop.session import Session
from lockstep.loop.step_watch import StepWatch
from lockstep.module import LightningModule

_TORCHS_ZERO_GRAD = Optimizer.zero_grad

TARGETS = (
    "`training_step` returned a loss without a weight, and samples of this fit's first batch have different numbers of "
    "labels that are not -100. If the loss is the mean over labels, as with models of transformers, the gradient "
    'depends on the number of micro-batches and ranks: return {"loss": loss, "weight": (labels != -100).sum()}, with '
    "labels[:, 1:] for a causal model, which does not predict the first label."
)


class Update:
    """Does the work around an optimizer step: clears, divides and clips gradients, and counts the step.

    Attributes:
        module: module whose methods may replace parts of the update.
        optimizer: the optimizer under automatic optimization; None in manual optimization.
        wrapped: the optimizers as ``self.optimizers()`` returns them.
        watch: hooks on the optimizers' steps.
        needs_closure: True if the optimizer cannot step without a closure.
        by_closure: True if ``optimizer.step`` runs the last micro-batch.
        share: factor for the loss of the current batch, in manual optimization.
        schedulers: schedulers of the fit.
        had_batch: True once a window with a batch has ended.
        weighs: True if ``training_step`` returns weights; the same on all ranks. None until a rank has returned a loss.
        unweighed: True if a loss in this window had no weight.
        factor: factor by which the window's gradient was multiplied; a closure's loss needs it too.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._strategy = session.strategy
        self._hooks = session.hooks
        self._fit, self._progress = session.fit, session.fit.progress
        self._scaler = session.strategy.precision.scaler
        self._shared = session.world_size > 1
        self._fit.weights = None  # the sum of the weights of this window
        self.weighs: bool | None = None
        self.unweighed = False
        self.factor: float | Tensor = 1.0
        self._note = session.fit.finite.step_check
        self.module = session.module
        self.own_zero_grad = is_replaced("optimizer_zero_grad", self.module, LightningModule)
        self.own_clipping = is_replaced("configure_gradient_clipping", self.module, LightningModule)
        self._defines_clipping = self.own_clipping  # a profiler sets `own_clipping` to time the method
        self.share = 1.0
        self.schedulers = Schedulers(session)
        self.had_batch = False
        self._use_optimizers()
        by_engine = self._strategy.window is not None
        # an engine that plays windows refuses overrides; one that only wraps the method, to trace it, is harmless there
        is_own = is_overridden if by_engine else is_replaced
        own_step = is_own("optimizer_step", self.module, LightningModule)
        may_use = not (self._strategy.steps_itself or by_engine)
        wants = may_use and any(takes_closure(optimizer) for optimizer in self.optimizers)
        self.by_closure = self.module.automatic_optimization and (self.needs_closure or own_step or wants)

    # -- the optimizers ------------------------------------------------------------------------------------

    def _use_optimizers(self) -> None:
        automatic = self.module.automatic_optimization
        self.optimizers = [*self._strategy.optimizers]
        self.wrapped = [
            LightningOptimizer(optimizer, self._step_for_user, self.module, self._strategy.synchronize)
            for optimizer in self.optimizers
        ]
        self.optimizer: Optimizer | None = self.optimizers[0] if automatic else None
        self.watch = StepWatch(self._session, self.optimizers, counts=not automatic, mean_loss=self._mean_loss)
        self.needs_closure = self.optimizer is not None and demands_closure(self.optimizer)

    def check_scaler(self) -> None:
        """Raise if an optimizer does not work with the precision's loss scale."""
        scaler = self._scaler
        if scaler is not None and self.optimizer is None:
            scaler.refuse(*self.optimizers)
        if scaler is not None and self.needs_closure:
            raise MisconfigurationException(
                f"{scaler.asked_by} with {type(self.optimizer).__name__}: a line search does not work if updates "
                'may be skipped; use precision="bf16-mixed" or "32-true", and non_finite="protect".'
            )

    def change_optimizers(self) -> None:
        """Replace the optimizers by those that the user assigned (``trainer.optimizers = [...]``).

        Raises:
            MisconfigurationException: the new optimizer needs a closure, but this fit runs windows without closures.
        """
        if self.optimizer is not None and not self.by_closure and demands_closure(self._strategy.optimizers[0]):
            raise MisconfigurationException(
                f"trainer.optimizers: {type(self._strategy.optimizers[0]).__name__}, which needs a closure, cannot "
                f"replace {type(self.optimizer).__name__} during a fit: return it from `configure_optimizers`, or step "
                "both yourself (`self.automatic_optimization = False`)."
            )
        self._strategy.change_optimizers()
        self.watch.detach()
        self._use_optimizers()

    # -- in a window ---------------------------------------------------------------------------------------

    def zero_grad(self, batch_idx: int) -> None:
        """Call ``on_before_zero_grad``, and set the previous window's gradients to None by ``optimizer_zero_grad``."""
        if self._hooks.on_before_zero_grad is not None:
            self._strategy.steps_end()  # FSDP leaves parameters whole after a forward: what the hook writes is lost
            self._hooks.call("on_before_zero_grad", self.optimizer)
        optimizer = self.optimizer
        assert optimizer is not None
        is_torchs = type(optimizer).zero_grad is _TORCHS_ZERO_GRAD and "zero_grad" not in vars(optimizer)
        if self.own_zero_grad:
            self.module.optimizer_zero_grad(self._progress.epoch, batch_idx, optimizer)
        elif is_torchs and not profiler._is_profiler_enabled:
            # torch's own method records each call for its profiler, also while that is off, which takes as long as all
            # of lockstep's work in a small step
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()

    def prepare(self) -> None:
        """Prepare the gradients for the step: divide by weights, unscale, call ``on_before_optimizer_step``, clip."""
        optimizer = self.optimizer
        assert optimizer is not None
        if self.weighs is not False or self._fit.weights is not None:
            self._divide_weights()
        if self._scaler is not None:
            self._scaler.forget(optimizer)
            self._scaler.unscale(optimizer)  # before the hook and the clipping, which see true gradients
        if self._hooks.on_before_optimizer_step is not None:
            self._hooks.call("on_before_optimizer_step", optimizer)
        config = self._session.config  # a hook may have set a flag
        value, algorithm = config.gradient_clip_val, config.gradient_clip_algorithm
        if value is not None or self._defines_clipping:
            if self.own_clipping:
                self.module.configure_gradient_clipping(optimizer, value, algorithm)
            else:
                norm = self._strategy.clip(optimizer, value, algorithm)  # type: ignore[arg-type]  # there is a value
                if norm is not None and self._note is not None:
                    self._note(norm, "gradient norm")

    def _divide_weights(self) -> None:
        """Divide the window's gradients by the sum of the "weight" values that steps returned, if any. Collective."""
        weighed, unweighed = self._fit.weights is not None, self.unweighed
        if self.weighs is None:  # a rank without samples has seen no loss, so all agree on it, once
            kinds = torch.tensor([weighed, unweighed], dtype=torch.float32)
            weighed, unweighed = self._strategy.reduce(kinds, reduce_op="max").bool().tolist()
            self.weighs = weighed if weighed or unweighed else None
            if unweighed and self._fit.uneven_targets:
                warn_once(TARGETS, key="uneven targets")
        if (weighed and self.weighs is False) or (unweighed and self.weighs):
            raise MisconfigurationException(
                '`training_step` returned a "weight" for some micro-batches only: return a weight with every loss '
                "on every rank, or with none."
            )
        if self.weighs:
            self.factor = self._strategy.divide_gradients(0.0 if self._fit.weights is None else self._fit.weights)
        self._fit.weights, self.unweighed = None, False

    def end_window(self, batch_idx: int, updated: bool) -> None:
        """Count the update, unless it was skipped or the window had no batch, and step the schedulers that are due."""
        self.had_batch = self.had_batch or updated
        updated = updated and not self._strategy.left_out
        updated = updated and (self._scaler is None or not self.watch.left_out)
        if updated:
            self._progress.global_step += 1
        if self._shared:
            self._session.agreement.settle(True)  # the reduction of this window has carried the ranks' flags
        if updated and self.schedulers.by_step:
            self.schedulers.after_update(self._fit.resume.counted(batch_idx + 1))
        if self._progress.last:
            self.schedulers.after_epoch()

    # -- methods that users call ---------------------------------------------------------------------------

    def clip(self, optimizer: Optimizer, value: float | None, algorithm: str | None) -> None:
        """Clip the gradients of one optimizer. A value of None means the Trainer's setting; 0 means no clipping."""
        config = self._session.config
        own = config.gradient_clip_val
        if value is not None and own is not None and value != own:
            raise MisconfigurationException(
                f"clip_gradients(gradient_clip_val={value!r}) differs from Trainer(gradient_clip_val={own!r}): set "
                "only one of them."
            )
        value = own if value is None else value
        algorithm = config.gradient_clip_algorithm if algorithm is None else str(algorithm).lower()
        if algorithm not in ("norm", "value"):
            raise MisconfigurationException(
                f'clip_gradients(gradient_clip_algorithm={algorithm!r}): choose "norm" or "value".'
            )
        if value is None:
            return
        if not isinstance(value, (int, float)):
            raise WrongType(f"clip_gradients(gradient_clip_val={value!r}): pass a number, or None for the Trainer's.")
        if value > 0:
            self._strategy.clip(optimizer, value, algorithm)

    def _mean_loss(self, loss: Any) -> Tensor:
        """Average a closure's loss over the ranks, with the same weights as `manual_backward`. Collective."""
        device = self._strategy.root_device
        own = torch.as_tensor(loss, device=device).detach().to(widest(device))
        weighed = torch.zeros_like(own) if self._session.is_padding else own * self.share
        mean: Tensor = self._strategy.reduce(weighed, reduce_op="mean")
        return mean

    def _step_for_user(self, optimizer: Optimizer, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Step an optimizer for ``LightningOptimizer.step``, and return the result of the closure."""
        if not self.module.automatic_optimization:
            # the hook runs when gradients are complete: after the user's closure
            own = closure

            def closure() -> Any:
                result = own() if own is not None else None
                self.watch.settle(optimizer)
                if self._hooks.on_before_optimizer_step is not None:
                    self._hooks.call("on_before_optimizer_step", optimizer)
                return result

        elif closure is not None and may_ignore(optimizer):
            closure = EagerClosure(closure, optimizer)
        before = self._progress.global_step
        result = self._strategy.step(optimizer, closure, **options)
        if self.optimizer is None and self._progress.global_step == before:
            # an optimizer that is not torch's has no hooks by which `StepWatch` would have counted its step
            self._progress.global_step += not self.watch.left_out
        return result
