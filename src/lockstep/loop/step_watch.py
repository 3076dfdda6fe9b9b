"""StepWatch, which counts optimizer steps and skips steps with overflowed gradients, even if user code calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lockstep.engines.strategy import Strategy
from lockstep.ground import comm
from lockstep.ground.optimizers import demands_closure
from lockstep.ground.rank import warn_once
from lockstep.loop.session import Session

UNSEEN = (
    "{kind}: `automatic_optimization = False`, and in this epoch no optimizer that `configure_optimizers` returned "
    "was stepped: `trainer.global_step` stays {step}, `max_steps` does not end the fit, and ModelCheckpoint has "
    "nothing new to save. Call `optimizer.step()` in `training_step`, and return the optimizer from "
    "`configure_optimizers`."
)


class StepWatch:
    """Watcher of a fit's optimizers. Its hooks count steps, and skip steps with overflowed gradients.

    Under manual optimization each step of an optimizer counts, through ``self.optimizers()`` or directly. A step with
    non-finite gradients is skipped: while the optimizer steps, its parameters' ``.grad`` is None.
    """

    def __init__(
        self, session: Session, optimizers: Iterable[Optimizer], counts: bool, mean_loss: Callable[[Any], Tensor]
    ) -> None:
        self._progress = session.fit.progress
        self._strategy: Strategy = session.strategy
        self._scaler = session.strategy.precision.scaler
        self._counts = counts
        self._shared = counts and session.world_size > 1
        self._mean_loss = mean_loss
        self._first_step = self._progress.global_step
        self._may_differ = False  # a backward was not reduced: ranks may find different overflows
        self._stepping: Optimizer | None = None  # the outermost optimizer in its step
        self._depth = 0  # a subclass's step may call its base's, which runs all hooks again
        self._has_stepped = False
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._handles: list[Any] = []
        if counts or self._scaler is not None:
            for optimizer in optimizers:
                # SAM's `base_optimizer` steps the same parameters, and scripts may step it directly
                for each in _with_inner(optimizer):
                    self._handles += [
                        each.register_step_pre_hook(partial(self._begin, optimizer)),
                        each.register_step_post_hook(self._end),
                    ]

    def detach(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # -- around a backward of manual optimization

    def enlarge(self) -> None:
        """Multiply accumulated gradients by the loss scale, before a backward of a scaled loss adds to them."""
        # gradients are scaled only while a backward runs: code of the user between backwards sees the true ones
        assert self._scaler is not None
        self._scaler.multiply(self._strategy.gradients.local())

    def reduce(self) -> None:
        """After a backward, divide gradients by the loss scale, and record which optimizers have non-finite ones."""
        scaler, strategy = self._scaler, self._strategy
        assert scaler is not None
        scaler.divide(strategy.gradients.local())
        self._may_differ = self._may_differ or not strategy.sync_gradients
        for optimizer in strategy.optimizers:
            scaler.check(optimizer)

    def settle(self, optimizer: Optimizer) -> None:
        """Decide whether an optimizer with complete gradients may step in manual optimization. May be collective."""
        scaler = self._scaler
        if scaler is None:
            return
        if not scaler.is_checked(optimizer):  # gradients of `loss.backward()`, which were not scaled
            scaler.check(optimizer)
        if self._may_differ and self._strategy.world_size > 1:
            scaler.share_overflow(optimizer, partial(comm.all_reduce, op="max"), self._strategy.root_device)

    # -- the optimizers' hooks

    def forget_depth(self) -> None:
        """Reset the count of nested steps at the start of a batch, in case the user caught an error from a step."""
        self._stepping, self._depth = None, 0

    def _begin(self, owner: Optimizer, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._stepping is not None and self._stepping is not optimizer:
            return None
        self._stepping, self._depth = optimizer, self._depth + 1
        if self._depth > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        holds = self._scaler is not None and not self._scaler.steps
        if closure is None:
            if holds:  # the step bypasses the scaler, which would have skipped it
                self._hide_gradients(owner)
            return None
        if holds:  # the closure computes the gradients, so they are checked after it
            closure = partial(self._run_hidden, owner, closure)
        elif self._shared and demands_closure(optimizer):
            closure = partial(self._run_for_all, closure)
        else:
            return None
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _run_hidden(self, owner: Optimizer, closure: Callable[[], Any]) -> Any:
        self._give_back()  # the closure may be called several times in one step
        result = closure()
        self._hide_gradients(owner)
        return result

    def _run_for_all(self, closure: Callable[[], Any]) -> Any:
        """Run a line search's closure. If the closure reduced gradients, return the loss averaged over the ranks."""
        rounds = self._strategy.rounds
        loss = closure()
        return loss if loss is None or self._strategy.rounds == rounds else self._mean_loss(loss)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is not optimizer:
            return
        self._depth -= 1
        if self._depth:
            return
        self._stepping, self._has_stepped = None, True
        self._give_back()
        if self._counts and not self.left_out:
            self._progress.global_step += 1

    def epoch_ended(self) -> None:
        """Warn once if no optimizer from ``configure_optimizers`` has stepped in manual optimization."""
        if self._counts and not self._has_stepped and self._progress.global_step == self._first_step:
            warn_once(UNSEEN.format(kind=type(self._strategy.module).__name__, step=self._first_step))

    @property
    def left_out(self) -> bool:
        """True if all ranks skipped the last step; always False if weights differ between nodes."""
        return self._scaler is not None and self._scaler.left_out and self._strategy.copies.local_steps is None

    def _hide_gradients(self, owner: Optimizer) -> None:
        """If a gradient of ``owner`` is not finite, set its gradients to None for a step without the loss scaler."""
        scaler = self._scaler
        assert scaler is not None
        if self._counts:
            self.settle(owner)
        if scaler.must_skip(owner):
            for group in owner.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._hidden.append((parameter, parameter.grad))
                        parameter.grad = None
        scaler.update(owner)

    def _give_back(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and all optimizers in its attributes, at any depth."""
    found: dict[int, Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and isinstance(each, Optimizer) and hasattr(each, "_optimizer_step_pre_hooks"):
            found[id(each)] = each
            waiting += [value for value in vars(each).values() if isinstance(value, Optimizer)]
    return iter(found.values())
