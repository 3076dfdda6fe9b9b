"""An optimizer's step whose update works on other tensors than those that its groups hold, and its hooks see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch.optim.optimizer import Optimizer


@contextmanager
def update_within(optimizer: Any, context: AbstractContextManager[Any], then: Callable[[], None]) -> Iterator[None]:
    """Inside, call the optimizer's own ``step``: its update, and nothing else, runs in ``context``.

    Hooks before the step (``register_step_pre_hook``, those of all optimizers, too) run before it is entered, hooks
    after the step when it is left and ``then`` was called.

    Args:
        optimizer: one that is no ``torch.optim.Optimizer`` has no hooks.
        context: entered once.
        then: called after the update; not if that raises.
    """
    entered = ExitStack()
    depth = 0  # a subclass's step may call that of its base, which runs all hooks once more

    def enter(*_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            entered.enter_context(context)

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            entered.close()
            then()

    with entered:
        if not isinstance(optimizer, Optimizer):
            enter()
            yield
            leave()
            return
        hooks = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
        # an OrderedDict by its id
        optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
