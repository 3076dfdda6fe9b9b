"""The memory of a run: what it is used for, and when it has run out, what would need less, each way with its bytes."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engines.sharded.fully_shard import find_blocks
from lockstep.ground.compiled import has_compiled
from lockstep.ground.device_memory import is_oom_error
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.usable import held_by_others
from lockstep.loop.session import Session
from lockstep.loop.step import Step
from lockstep.memory.meter import Activations, MemoryUse, parts_of, readable

ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
"""How torch's allocators say what was asked of them."""
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class OutOfMemory(torch.OutOfMemoryError, MemoryError):
    """A device's memory, or the host's, is used up: the message says for what, and what would need less.

    Its ``__cause__`` is what torch or Python raised. It is caught by whoever catches that, as
    ``torch.OutOfMemoryError``, ``RuntimeError`` or ``MemoryError``.
    """


# -- what it is used for --------------------------------------------------------------------------------------


def memory_of(session: Session) -> MemoryUse:
    """What this rank's memory is used for; after a fit, what it was when that ended.

    Raises:
        MisconfigurationException: before the first call of the Trainer.
    """
    strategy = session.strategy
    if session.state.stage is None and session.used is not None:
        return session.used
    if strategy.module is None:
        raise MisconfigurationException(
            "trainer.memory(): no module has been set up; call it in or after trainer.fit() or an evaluation."
        )
    held = strategy.held()
    if session.built is not None:
        held["parameters"] = [*held["parameters"], *session.built]
    return MemoryUse.of(
        held, rank=strategy.world.rank, device=strategy.root_device.type, activations=session.activations
    )


def countable(session: Session) -> Activations | None:
    """What counts the activations of this session's module; None where they cannot be told from outside.

    So it is in compiled modules, and where one process drives several devices in threads.
    """

    def gathered() -> list[Tensor]:
        return session.strategy.held().get("gathered", [])

    compiled = session.module._compiler_ctx is not None or has_compiled(session.module)
    return None if compiled or session.strategy.drives_all_devices else Activations(session.module, gathered)


def watch_first_window(session: Session, step: Step, told: Callable[[], None]) -> None:
    """Count what the first forward of a fit keeps; later ones are as they are without this.

    Args:
        session: keeps what was counted.
        step: of the fit, set up.
        told: called when the first window is over.
    """
    session.used = session.activations = None
    activations = countable(session)
    batches, road = step.batches, step.window
    own = batches.training_step

    def first(*args: Any) -> Iterator[None]:
        step.window = road
        yield from road(*args)
        if activations is not None:
            activations.end()
        told()

    @wraps(own)
    def counting(*args: Any, **kwargs: Any) -> Any:
        batches.training_step = own
        if activations is None or session.activations is not None:
            return own(*args, **kwargs)
        session.activations = activations
        activations.samples = float(session.results.weight) or None
        with activations.counting():
            return own(*args, **kwargs)

    step.window = first
    if activations is not None:
        batches.training_step = counting


# -- out of memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A way to need less memory.

    Attributes:
        text: what to do.
        saves: bytes of this rank.
    """

    text: str
    saves: int


def ways_out(session: Session, used: MemoryUse) -> list[Way]:
    """What would need less memory on this rank, cheapest first, without what is in use."""
    strategy, ranks, counted = session.strategy, session.strategy.world.size, session.activations
    samples = 0.0 if counted is None else counted.samples or 0.0
    window = session.config.accumulation(session.fit.progress.epoch)
    trains, half, on_device = session.fitting, used.activations // 2, used.device != "cpu"
    is_full = strategy.precision.name in ("32-true", "64-true")
    devices = "" if ranks > 1 else ", devices=2"
    parts = max(ranks, 2)
    rows: list[tuple[bool, set[str], str, int]] = [  # whether it may be, what it is no more beside, what to do, bytes
        (samples >= 2, set(), f"half the batch, {samples / 2:g} samples on a rank in place of {samples:g}", half),
        (
            samples >= 2 and session.module.automatic_optimization,
            set(),
            f"half the batch and Trainer(accumulate_grad_batches={2 * window}): the same samples a step",
            half,
        ),
        (trains and is_full, set(), 'Trainer(precision="bf16-mixed"): activations of half the size, about', half),
        (
            trains,
            {"recomputation"},
            f"{type(strategy).__name__}(activation_checkpointing=True): repeated blocks are computed again",
            _recomputable(session),
        ),
        (
            trains,
            {"sharded optimizer", "sharded parameters"},
            "DDPStrategy(shard_optimizer=True): each rank has its part of the optimizer states",
            used.optimizer_states * (ranks - 1) // ranks,
        ),
        (
            True,
            {"sharded parameters"},
            f'Trainer(strategy="fsdp"{devices}): each rank has 1/{parts} of the model',
            used.model_states * (parts - 1) // parts,
        ),
        (
            on_device,
            {"offload"},
            'Trainer(strategy="fsdp_cpu_offload"): the model is on the CPU',
            used.model_states,
        ),
    ]
    in_use = strategy.saves_memory_by
    return [Way(text, saves) for may_be, beside, text, saves in rows if may_be and not beside & in_use and saves > 0]


def _recomputable(session: Session) -> int:
    """What the repeated blocks keep, less their inputs, and less the largest one, which a backward computes again."""
    counted = session.activations
    if counted is None:
        return 0
    blocks = {id(block) for block in find_blocks(session.module)}
    names = [name for layer, name in counted.names.items() if layer in blocks]
    of_blocks = [sum(n for layer, n in counted.layers.items() if f"{layer}.".startswith(f"{b}.")) for b in names]
    inputs = sum(counted.inputs.get(name, 0) for name in names)
    return sum(of_blocks) - max(of_blocks, default=0) - inputs


def explained(session: Session, error: BaseException) -> OutOfMemory | None:
    """The error to raise in the place of one that says that memory is used up; None for all others."""
    if isinstance(error, OutOfMemory) or not is_oom_error(error) or session.strategy.module is None:
        return None
    try:
        return OutOfMemory(_message(session, error))
    except (MemoryError, RuntimeError):  # there is not even the memory for this
        return None
    finally:
        session.built = None
        traceback.clear_frames(error.__traceback__)  # what the user's frames hold: telling needs memory, too


def _table(ways: list[Way]) -> list[str]:
    if not ways:
        return []
    width = max(len(way.text) for way in ways)
    return [
        "what would need less, on each rank:",
        *(f"  {way.text:<{width}}  {readable(way.saves):>10}" for way in ways),
    ]


def _message(session: Session, error: BaseException) -> str:
    used, strategy = memory_of(session), session.strategy
    asked = ASKED.search(str(error))
    wanted = "" if asked is None else f" {readable(float(asked[1]) * UNITS[asked[2]])} more were asked for."
    where = f"rank {strategy.world.rank} of {strategy.world.size}"
    lines = [f"{where} has no memory left on its device ({used.device}).{wanted}", str(used)]
    elsewhere = held_elsewhere(strategy.held(), used)
    if elsewhere:
        lines.append(
            f"  and in tensors held elsewhere, by data, lists or attributes of the script: {readable(elsewhere)}"
        )
    others = held_by_others(strategy.root_device)
    if others * HELPS >= used.total and others >= 2**16:
        lines.append(f"  and by other processes on the device: {readable(others)}")
    least = (used.total + elsewhere) / HELPS if elsewhere > used.total else 1
    ways = [way for way in ways_out(session, used) if way.saves >= least]
    lines += _table(ways)
    if elsewhere > used.total:
        lines.append(
            "most of it is no part of the training: let go of what is kept over steps (`del`, `.item()`, `.detach()`)"
        )
    return "\n".join(lines)


HELPS = 20
"""A way that saves less than this part of what is in use is no way out."""


def held_elsewhere(held: Mapping[str, Iterable[Tensor]], used: MemoryUse) -> int:
    """Bytes of a device that tensors hold which are neither the model's nor counted otherwise; 0: nothing to speak of.

    Args:
        held: the tensors of the model and its training, by kind.
        used: what is known to be in use.
    """
    known, found = set(), dict[int, int]()
    with suppress(RuntimeError, NotImplementedError):
        known = {_storage(part) for tensors in held.values() for tensor in tensors for part in parts_of(tensor)}
    gc.collect()  # what is garbage is held by nobody
    try:
        things = gc.get_objects()
    except MemoryError:  # the list alone takes megabytes of a CPU that has none left
        return 0
    for thing in things:
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == used.device:
            with suppress(RuntimeError, NotImplementedError):  # one without memory of its own
                found[_storage(thing)] = thing.untyped_storage().nbytes()
    elsewhere = sum(size for storage, size in found.items() if storage not in known) - used.activations
    return elsewhere if elsewhere * HELPS >= used.total and elsewhere >= 2**16 else 0


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def keep(session: Session) -> None:
    """A fit is over, and its buckets will be gone: keep what memory was used for."""
    if session.fitting and session.activations is not None:
        session.used = memory_of(session)


@contextmanager
def of_setup(session: Session) -> Iterator[None]:
    """Around set-up. Where a module is still being built, what it has so far is in nobody's hands yet."""
    session.built = None
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_oom_error(error) and session.strategy.module is not session.module:
            session.strategy.module = session.module
            session.built = _parameters_in_frames(error)
        raise


def _parameters_in_frames(error: BaseException) -> list[Tensor]:
    """Those of the modules that were being built when ``error`` was raised."""
    found: dict[int, Tensor] = {}
    trace = error.__traceback__
    while trace is not None:
        for value in trace.tb_frame.f_locals.values():
            if isinstance(value, nn.Module):
                found.update({id(parameter): parameter for parameter in value.parameters()})
        trace = trace.tb_next
    return list(found.values())
