"""Plans for a Trainer's model, data and devices, and the strategy that strategy="auto" selects for large models."""

from __future__ import annotations

import importlib.util
import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_unflatten

from lockstep.data.combined import unpack
from lockstep.extensions.balancing.planner.plan import Goal, Plan, make_plan
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import host_memory, total_memory
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.seed import isolate_rng
from lockstep.ground.transfer import move_data_to_device
from lockstep.launch.environment import cores
from lockstep.loop.hooks import Transfer
from lockstep.memory.meter import readable
from lockstep.precision.formats import make_precision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockstep.extensions.balancing.planner.cost import Candidate
    from lockstep.extensions.balancing.planner.hardware import Hardware
    from lockstep.loop.session import Session
    from lockstep.trainer import Trainer

ALONE = ("single", "dp")
"""Kinds of candidates that run in one process."""
STATES = 16
"""Bytes for each parameter in float32: itself, its gradient, Adam's two means."""
CLEARLY = 0.5
"""Fraction of a device's memory that model states may take without a plan."""


def packages() -> list[str]:
    """Return the names of the installed optional packages that a plan may use."""
    return [name for name in ("deepspeed",) if importlib.util.find_spec(name) is not None]


def first_batch(trainer: Trainer) -> Any:
    """Return the first batch of the training data, on the CPU. Random states are restored.

    Raises:
        MisconfigurationException: there is no training data.
    """
    data = trainer.datamodule
    with isolate_rng():
        if data is not None:
            data.prepare_data()
            data.setup("fit")
        returned = trainer.loaders.request("train")
        if returned is None:
            raise MisconfigurationException("A plan needs a batch: pass batch=, train_dataloaders= or datamodule=.")
        loaders, nest, _ = unpack(returned, "")
        batches = [next(iter(loader), None) for loader in loaders]
        if not batches or any(batch is None for batch in batches):
            raise MisconfigurationException(
                "A plan needs a batch, and a training DataLoader yields none: pass batch=, or check the dataset."
            )
        return batches[0] if nest is None else tree_unflatten(batches, nest)


@contextmanager
def _threads(ranks: int) -> Iterator[None]:
    """In the context, limit torch's threads to the number of this host's cores divided by ``ranks``."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, cores() // ranks)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def plan_for(
    trainer: Trainer,
    batch: Any,
    *,
    hardware: Hardware | None = None,
    goal: Goal = "speed",
    named: Sequence[str] = (),
    measure: bool | None = None,
    folder: Path | None = None,
) -> Plan:
    """Create a plan for the module that is attached to a Trainer.

    Args:
        trainer: Trainer to which the module is attached.
        batch: one batch of training data.
        hardware: the devices. None: measure the Trainer's devices.
        goal: see `lockstep.extensions.balancing.planner.plan.make_plan`.
        named: names of the blocks.
        measure: True to measure seconds on this device if the model fits. None: measure unless ``hardware`` is given.
        folder: cache of measurements.
    """
    from lockstep.extensions.balancing.planner.hardware import hardware_of
    from lockstep.extensions.balancing.plans.planning import profile_module

    strategy, module = trainer.strategy, trainer.lightning_module
    precision = strategy.precision
    device = strategy.root_device
    with _threads(trainer.world_size if device.type == "cpu" else 1):
        batch = Transfer(module, trainer.datamodule, strategy)(batch)
        profile_of = partial(profile_module, module, named=named, trainer=trainer)
        cold = make_precision(precision.name, "cpu") if device.type != "cpu" else precision
        # before the hardware is measured, since it refuses modules that cannot be planned
        profile = profile_of(move_data_to_device(batch, "cpu"), cold)
        if hardware is None:
            devices = max(len(strategy.devices), 1) if strategy.drives_all_devices else strategy.world.local_size
            hardware = hardware_of(device, devices, strategy.world.num_nodes, folder)
            measure = True if measure is None else measure
        fits = STATES * profile.elements < CLEARLY * hardware.memory and profile.elements
        if measure and fits and not any(p.is_meta for p in module.parameters()):
            before = next((p.device for p in module.parameters()), device)
            module.to(device)
            try:
                profile = profile_of(batch, precision, device=device)
            finally:
                module.to(before)
    found = make_plan([profile], hardware, goal=goal, packages=packages())
    if found.choice is None and precision.name == "32-true":  # show whether another precision would fit
        other = profile_of(move_data_to_device(batch, "cpu"), make_precision("bf16-mixed", "cpu"))
        found = make_plan([profile, other], hardware, goal=goal, packages=packages())
    return found


def plan_fit(trainer: Trainer, batch: object, goal: Goal, blocks: Sequence[str]) -> Plan:
    """Create the plan that `Trainer.plan` returns. A ``batch`` of None means the first training batch."""
    return plan_for(trainer, first_batch(trainer) if batch is None else batch, goal=goal, named=blocks)


# -- strategy="auto" -------------------------------------------------------------------------------------------------


def steady_memory(device: torch.device, ranks: int) -> float:
    """Return a device's total memory in bytes; on a CPU, the host's memory divided by the number of ranks."""
    # not the free bytes: all ranks of a host must get the same number
    total = total_memory(device)
    if total is not None:
        return float(total)
    return (host_memory() or math.inf) / ranks


def clearly_fits(module: nn.Module, device: torch.device, ranks: int) -> bool:
    """Return True if parameters, gradients and Adam states need less than half of a device's memory."""
    size = sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
    return STATES * size < CLEARLY * steady_memory(device, ranks)


def reconsider(session: Session) -> None:
    """Replace the strategy of a ``strategy="auto"`` fit with a plan's choice if the model may not fit one device.

    Collective. Rank 0 makes the plan and sends the choice to the others. If there can be no plan, a warning is issued
    and the strategy stays.

    Args:
        session: the starting fit, whose strategy may be replaced.
    """
    strategy, trainer = session.strategy, session.trainer
    world, device = strategy.world, strategy.root_device
    if clearly_fits(session.module, device, world.local_size):
        return
    strategy.setup_environment()
    candidate = strategy.broadcast(_choose(trainer) if world.is_zero else None)
    if candidate is None:
        return
    from lockstep.extensions.balancing.planned import strategy_of

    made = strategy_of(candidate, "spawn" if strategy.launcher == "spawn" else "popen")
    made.sync_batchnorm, made.checkpoint_io = strategy.sync_batchnorm, strategy.checkpoint_io
    session.strategy, session.chooses = made, False
    session.connect()


def _choose(trainer: Trainer) -> Candidate | None:
    """Create a plan with the cost model, and return its choice. Return None to keep the current strategy."""
    from lockstep.extensions.balancing.planner.cost import Candidate
    from lockstep.extensions.balancing.planner.hardware import described

    world, device = trainer.strategy.world, trainer.strategy.root_device
    memory, on_gpu = steady_memory(device, world.local_size), device.type != "cpu"
    machine = replace(described(world.local_size, world.num_nodes, memory), kind=device.type, overlaps=on_gpu)
    try:
        found = plan_for(trainer, first_batch(trainer), hardware=machine)
    except Exception as error:  # a user's step may run on a device and fail on fake tensors
        name = type(trainer.lightning_module).__name__
        kept = type(trainer.strategy).__name__
        rank_zero_warn(f'Trainer(strategy="auto"): {name} is large and cannot be planned, so {kept} is used: {error}')
        return None
    rows = [row for row in found.rows if row.eligible]
    # the ranks exist already
    if world.size > 1:
        rows = [one for one in rows if one.candidate.kind not in ALONE]
    if found.choice is None or not rows:
        rank_zero_warn(f'Trainer(strategy="auto"): {found.reason}')
        return None
    if found.choice in rows:
        best, why = found.choice, found.reason
    else:
        best = max(rows, key=lambda one: one.rate)
        why = f"{best.candidate.name}: the fastest on {world.size} ranks, {readable(best.memory)} on each device."
    rank_zero_info(f'Trainer(strategy="auto") uses {why}')
    plain = Candidate("single" if world.size == 1 else "ddp", precision=best.candidate.precision)
    return None if best.candidate == plain else best.candidate
