"""What a run in spawned processes brings back to the process that called it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Parts of a torch module that its state_dict carries, or that belong to one process.
_TORCH_OWN = ("_parameters", "_buffers", "_modules", "_trainer", "training")


@dataclass
class Handover:
    """Rank 0's side of a call, as it travels back.

    Attributes:
        returned: what the loop gave.
        module: the module, its tensors on the CPU.
        callbacks: the callbacks, in the Trainer's order.
        progress: counters of the fit.
        published: the metrics that users read.
        state: what the Trainer was doing last.
    """

    returned: Any
    module: Any
    callbacks: list[Any]
    progress: Any
    published: Any
    state: Any


def call(trainer: Any, loop: Any, *args: Any) -> Handover:
    """In a rank: run a loop of its Trainer, and pack what the calling process is to know."""
    returned = loop.run(*args)
    module = trainer.lightning_module.cpu()
    return Handover(
        returned, module, trainer.base_callbacks, trainer.fit_loop.progress, trainer.published, trainer.state
    )


def take_over(trainer: Any, handover: Handover) -> Any:
    """In the calling process: go on as if the loop had run here; gives what it returned."""
    module = trainer.lightning_module
    module.load_state_dict(handover.module.state_dict())
    for name, value in vars(handover.module).items():
        if name not in _TORCH_OWN and not name.endswith("_hooks"):
            object.__setattr__(module, name, value)
    for mine, theirs in zip(trainer.base_callbacks, handover.callbacks, strict=True):
        vars(mine).update(vars(theirs))
    trainer.fit_loop.progress, trainer.published = handover.progress, handover.published
    trainer.state = handover.state
    return handover.returned
