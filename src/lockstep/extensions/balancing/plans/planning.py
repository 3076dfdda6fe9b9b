"""The step of a LightningModule as a plan needs it: its loss, its optimizers, its precision, without a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.extensions.balancing.planner.profile import ModelProfile, measure_step, profile_step
from lockstep.extensions.balancing.planner.trace import TracedStep
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import replace_until
from lockstep.ground.parameters import refuse_lazy
from lockstep.ground.tree import tensors_in
from lockstep.hooks import ModuleHooks
from lockstep.loop.checks import takes_idx
from lockstep.loop.hooks import is_overridden
from lockstep.loop.optimizers import parse
from lockstep.module import LightningModule
from lockstep.precision.base import Precision

if TYPE_CHECKING:
    from lockstep.trainer import Trainer

DEPENDS = (
    "{name}: what `training_step` does depends on values ({error}), and a plan without a device knows shapes only. Let "
    "the step be free of `.item()` and of `if` over tensors, or plan with a step that is."
)


def samples_of(batch: object, given: int | None = None) -> int:
    """The samples of a batch: as given, or the length of its first tensor."""
    first = next((t for t in tensors_in(batch, 6) if t.dim()), None)
    return given or (1 if first is None else len(first))


def _silent(*args: object, **kwargs: object) -> None:
    """In place of ``log``, while nothing is trained."""


@contextmanager
def _unlogged(module: LightningModule, trainer: Trainer | None) -> Iterator[None]:
    """Within, the module is attached to a Trainer and logs nothing."""
    with ExitStack() as end:
        for name, value in (("_trainer", trainer), ("log", _silent), ("log_dict", _silent)):
            replace_until(end, module, name, value)
        yield


def built(module: LightningModule, trainer: Trainer | None, device: torch.device | None = None) -> LightningModule:
    """The module with the layers that ``configure_model`` makes: of a copy.

    Args:
        module: itself, where it does not override ``configure_model``.
        trainer: to which the copy is attached meanwhile.
        device: where the layers are made; None: without memory.
    """
    if not is_overridden("configure_model", module, ModuleHooks):
        return module
    refuse_lazy(module, "A plan, which copies the module,")
    with ExitStack() as end:
        replace_until(end, module, "_trainer", None)
        made = copy.deepcopy(module)
    with torch.device("meta") if device is None else device, _unlogged(made, trainer):
        made.configure_model()
    return made if device is None else made.to(device)


def step_of(module: LightningModule, batch: object, precision: Precision) -> TracedStep:
    """One step of ``module`` on ``batch``, as the loops play it.

    Args:
        module: under automatic optimization.
        batch: as a loader gives it, on the module's device.
        precision: of the run.

    Raises:
        MisconfigurationException: manual optimization, or a step that gives no loss.
    """
    name = type(module).__name__
    refuse_lazy(module, "A plan")
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{name} sets automatic_optimization = False, and a plan needs to know where the backward is: choose the "
            "strategy by its name."
        )
    more = (0,) if takes_idx(module.training_step) else ()
    converted = batch if precision.convert_input is None else precision.convert_input(batch)

    def loss() -> Tensor:
        found = module.training_step(converted, *more)
        found = found.get("loss") if isinstance(found, dict) else found
        if not isinstance(found, Tensor):
            raise MisconfigurationException(f"{name}.training_step gave no loss for the batch of the plan.")
        return found

    def optimizers() -> Sequence[Optimizer]:
        returned = module.configure_optimizers()
        made, _ = parse(returned, automatic=True, custom_scheduler_step=True)
        return [each for each in made if isinstance(each, Optimizer)]

    dtype = getattr(precision, "dtype", None)
    context: Callable[[], Any] = precision.context or nullcontext
    return TracedStep(module, loss, optimizers, context, dtype)


def profile_module(
    module: LightningModule,
    batch: object,
    precision: Precision,
    *,
    samples: int | None = None,
    named: Sequence[str] = (),
    trainer: Trainer | None = None,
    device: torch.device | None = None,
    recomputed: bool = True,
) -> ModelProfile:
    """What a step of a LightningModule costs.

    Args:
        module: is as before afterwards.
        batch: as a loader gives it.
        precision: of the run.
        samples: of the batch; None: the length of its first tensor.
        named: blocks, by name.
        trainer: to which the module is attached meanwhile.
        device: measure seconds there; the module and the batch are on it. None: the cost model.
        recomputed: look at recomputation, too.

    Raises:
        MisconfigurationException: manual optimization, no loss, control flow that depends on values, blocks that are
            not there.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    whole = built(module, trainer, device)
    name = type(module).__name__
    with _unlogged(whole, trainer):
        step = step_of(whole, batch, precision)
        count = samples_of(batch, samples)
        try:
            found = profile_step(
                step, samples=count, batch=batch, precision=precision.name, named=named, recomputed=recomputed
            )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise MisconfigurationException(DEPENDS.format(name=name, error=str(error)[:100])) from error
        except ValueError as error:
            raise MisconfigurationException(f"{name}: {error}") from error
        if device is not None:
            found = measure_step(found, step, device)
    return found
