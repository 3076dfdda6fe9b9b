"""Profiles of a LightningModule's training step, created without a fit."""

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
    "{name}: `training_step` depends on values ({error}), and a plan traces shapes only. Remove `.item()` and `if` on "
    "tensors from the step, or choose a strategy by its name."
)


def _silent(*args: object, **kwargs: object) -> None:
    """Do nothing, in place of ``log`` and ``log_dict`` while a step is profiled."""


@contextmanager
def _without_log(module: LightningModule, trainer: Trainer | None) -> Iterator[None]:
    """Inside the block, attach the module to a Trainer and disable the module's logging."""
    with ExitStack() as end:
        for name, value in (("_trainer", trainer), ("log", _silent), ("log_dict", _silent)):
            replace_until(end, module, name, value)
        yield


def build(module: LightningModule, trainer: Trainer | None, device: torch.device | None = None) -> LightningModule:
    """Return a copy of the module on which ``configure_model`` has run, or the module itself if it lacks the hook.

    Args:
        module: the user's module.
        trainer: attached to the copy while the hook runs.
        device: device for the layers. None: the meta device.
    """
    if not is_overridden("configure_model", module, ModuleHooks):
        return module
    refuse_lazy(module, "A plan, which copies the module,")
    with ExitStack() as end:
        # a Trainer and its loaders are not copied
        replace_until(end, module, "_trainer", None)
        made = copy.deepcopy(module)
    with torch.device("meta") if device is None else device, _without_log(made, trainer):
        made.configure_model()
    return made if device is None else made.to(device)


def step_of(module: LightningModule, batch: object, precision: Precision) -> TracedStep:
    """Create a training step of ``module`` on ``batch`` that computes the same loss as a fit.

    Args:
        module: a module with automatic optimization.
        batch: a batch on the module's device.
        precision: precision of the fit.

    Raises:
        MisconfigurationException: the module has manual optimization, or its step returns no loss.
    """
    name = type(module).__name__
    refuse_lazy(module, "A plan")
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{name} sets automatic_optimization = False, so a plan cannot detect the backward in `training_step`: "
            "choose a strategy by its name."
        )
    more = (0,) if takes_idx(module.training_step) else ()
    converted = batch if precision.convert_input is None else precision.convert_input(batch)

    def loss() -> Tensor:
        found = module.training_step(converted, *more)
        found = found.get("loss") if isinstance(found, dict) else found
        if not isinstance(found, Tensor):
            raise MisconfigurationException(
                f"{name}.training_step returned no loss for the plan's batch: return a tensor, or {{'loss': ...}}."
            )
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
    named: Sequence[str] = (),
    trainer: Trainer | None = None,
    device: torch.device | None = None,
) -> ModelProfile:
    """Profile the memory, the operations and optionally the seconds of a LightningModule's training step.

    Args:
        module: the user's module, which is restored afterwards.
        batch: one batch of training data.
        precision: precision of the fit.
        named: names of the blocks.
        trainer: attached to the module while the step is profiled.
        device: device of module and batch, on which seconds are measured. None: seconds are not measured.

    Raises:
        MisconfigurationException: the step has manual optimization, no loss, or control flow that depends on values,
            or there are no blocks of these names.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    whole = build(module, trainer, device)
    name = type(module).__name__
    with _without_log(whole, trainer):
        step = step_of(whole, batch, precision)
        first = next((tensor for tensor in tensors_in(batch, 6) if tensor.dim()), None)
        count = 1 if first is None else len(first)
        try:
            found = profile_step(step, samples=count, batch=batch, precision=precision.name, named=named)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise MisconfigurationException(DEPENDS.format(name=name, error=str(error)[:100])) from error
        except ValueError as error:
            raise MisconfigurationException(f"{name}: {error}") from error
        if device is not None:
            found = measure_step(found, step, device)
    return found
