"""FiniteWatch, which detects NaN and infinite losses, gradients and weights during a fit and reacts to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from lockstep.config.run import RunConfig
from lockstep.engines.strategy import Strategy
from lockstep.ground.agreement import ConsensusFlags
from lockstep.ground.errors import MisconfigurationException, NonFiniteError
from lockstep.ground.numbers import Parts, floats, names_not_finite, not_finite, parts_with_values, total_norm
from lockstep.ground.parameters import is_freed
from lockstep.ground.rank import rank_zero_warn
from lockstep.ground.tree import tensors_in
from lockstep.module import LightningModule
from lockstep.precision.base import UpdateGuard

SHOWN = 8
"""Maximum number of samples or tensor names that a message lists."""
MOST_KEPT = 1024
"""Maximum number of losses that stay on a device before they are read."""
IN_CHECKPOINT = ("state_dict", "current_model_state", "optimizer_states")
"""Checkpoint keys whose tensors must be finite. WeightAveraging saves ``current_model_state``."""


class WatchedRun(Protocol):
    """The attributes of a session that `FiniteWatch` uses."""

    config: RunConfig
    strategy: Strategy
    module: LightningModule
    agreement: ConsensusFlags
    not_finite_flag: int
    fit: Any

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class NonFiniteNumber:
    """The first non-finite loss or gradient norm on a rank.

    Attributes:
        what: "loss" or "gradient norm".
        value: NaN or an infinity.
        rank: the rank that computed the number.
        step: ``trainer.global_step`` before the update to which the number belongs.
        epoch: epoch, counted from 0.
        batch: ``batch_idx`` at that step.
        samples: data set indices of this rank's samples in the batch; None if they are unknown.
        position: position of the first sample in the epoch's order; None if ``samples`` is None.
    """

    what: str
    value: float
    rank: int
    step: int
    epoch: int
    batch: int
    samples: list[int] | None
    position: int | None

    def describe(self, with_rank: bool) -> str:
        """Return a sentence with value, batch and step, and a sentence with the samples if they are known."""
        where = f"batch {self.batch} in epoch {self.epoch} (step {self.step})"
        on_rank = f" on rank {self.rank}" if with_rank else ""
        text = f"The {self.what} of {where}{on_rank} is {self.value}."
        if self.samples is None or self.position is None:
            return text
        shown = ", ".join(map(str, self.samples[:SHOWN])) + (", ..." if len(self.samples) > SHOWN else "")
        last = self.position + len(self.samples) - 1
        places = f"position {last}" if len(self.samples) == 1 else f"positions {self.position} to {last}"
        return f"{text} Its samples: {shown} (indices in the data set; {places} of the epoch)."


@dataclass
class FiniteWatch:
    """Detector of NaN and infinite values during a fit. Training steps do not wait for the device.

    A loss on the CPU is read at once. Losses on a device are kept until the loop reads other numbers from the device.
    Weights are searched after a loss that is not finite, before a validation, at the end of an epoch, and before a
    checkpoint is written. A flag makes all ranks decide together.

    Attributes:
        is_active: True if a fit runs, and ``Trainer(non_finite=...)`` is not "ignore".
        has_found: True if this rank has found a non-finite number, until `raise_or_warn` handles it.
        at_start: parameters and buffers that were not finite when the run started; they are not searched.
        newest_checkpoint: path of the last checkpoint that was written, or that the fit continues from.
    """

    is_active: bool = False
    has_found: bool = False
    at_start: list[str] = field(default_factory=list)  # such as an attention mask of -inf
    newest_checkpoint: str | None = None
    _session: WatchedRun | None = None
    _first: NonFiniteNumber | None = None
    _has_warned: bool = False
    _waits: bool = False
    _kept: list[tuple[Tensor, str, int, int, int]] = field(default_factory=list)
    _parts: Parts = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, without those that belong to the running fit."""
        return {"at_start": self.at_start, "newest_checkpoint": self.newest_checkpoint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(FiniteWatch()), **state)

    # -- the fit -------------------------------------------------------------------------------------------

    def start(self, session: WatchedRun, loaded: str | None) -> None:
        """Record which weights are not finite before the first step. Collective.

        Args:
            session: the session of the fit, after set-up.
            loaded: path of the checkpoint that the fit resumes from, or None.

        Raises:
            NonFiniteError: the checkpoint has weights or optimizer states that are not finite, but were when its run
                started.
        """
        self._session = session
        self.is_active = session.config.non_finite != "ignore"
        self._waits = session.strategy.root_device.type != "cpu"
        self.newest_checkpoint = loaded
        found = self._union_of_ranks(not_finite(self._to_search([])))
        if loaded is not None and self.is_active:
            broken = self._union_of_ranks(not_finite(_optimizer_states(session)))
            broken += [name for name in found if name not in self.at_start]
            if broken:
                self.is_active = False
                raise NonFiniteError(
                    f"trainer.fit(ckpt_path={loaded!r}): not finite in this checkpoint: {_listed(broken)}. Resume from "
                    'an earlier checkpoint, or set Trainer(non_finite="ignore") to resume from this one.'
                )
        self.at_start = found

    def stop(self) -> None:
        """Stop checking losses and gradients when the fit ends. Later checkpoints are still checked."""
        self.is_active = self.has_found = False
        self._kept = []

    @property
    def step_check(self) -> Callable[..., None] | None:
        """The method `note`, to call with each loss and gradient norm; None if these are not watched."""
        return self.note if self.is_active else None

    def note(self, number: Tensor, what: str = "loss") -> None:
        """Check that a loss or gradient norm is finite. A number on a device is stored, for a later check by `read`."""
        if self._waits:
            if number.numel() == 1:
                self._kept.append((number.detach(), what, *self._place()))
                if len(self._kept) >= MOST_KEPT:  # a fit without logging reads none, and would keep them all
                    self.read()
            return
        try:
            value = number.item()
        except RuntimeError:  # more than one number, which `backward` refuses with its own message
            return
        if value - value != 0:  # true for NaN and Inf only, and cheaper than a call of math.isfinite
            self._find(value, what, *self._place())

    def _place(self) -> tuple[int, int, int]:
        """Return (global_step, epoch, batch_idx) of the running step."""
        assert self._session is not None
        progress = self._session.fit.progress
        return progress.global_step, progress.epoch, progress.batch

    def read(self) -> None:
        """Check that the losses and gradient norms stored by `note` are finite. Waits for the device once."""
        if self._kept:
            self.take(floats([number for number, *_ in self._kept]))

    def numbers_to_read(self) -> list[Tensor]:
        """Return stored losses and gradient norms, and the norm of the weights, which the caller passes to `take`."""
        # on the CPU the next loss shows bad weights; a search at each logged step would cost more than all else here
        if not (self.is_active and self._waits):
            return []
        self._parts = parts_with_values(self._to_search(self.at_start))
        norm = total_norm(self._parts)
        return [number for number, *_ in self._kept] + ([] if norm is None else [norm])

    def take(self, values: list[float]) -> None:
        """Check that ``values``, the numbers from `numbers_to_read` as floats, are finite."""
        kept, self._kept = self._kept, []
        for value, (_, what, step, epoch, batch) in zip(values, kept, strict=False):
            if value - value != 0:
                self._find(value, what, step, epoch, batch)
                break
        parts, self._parts = self._parts, []
        if parts and values[-1] - values[-1] != 0 and names_not_finite(parts):
            self._report()

    def _find(self, value: float, what: str, step: int, epoch: int, batch: int) -> None:
        """Record the first non-finite number with its batch and samples, and raise the flag for all ranks."""
        session = self._session
        assert session is not None
        if self._first is None:
            feed = session.fit.feed
            samples = None if feed is None else feed.samples(batch)
            self._first = NonFiniteNumber(
                what, value, session.strategy.world.rank, step, epoch, batch, *(samples or (None, None))
            )
        self._report()

    def _report(self) -> None:
        """Raise the flag that makes all ranks call `raise_or_warn` at the end of the window."""
        session = self._session
        assert session is not None
        self.has_found = True
        if session.world_size > 1:
            session.agreement.request(session.not_finite_flag)

    def check_weights(self) -> None:
        """Check that the weights, and the losses and gradient norms stored since the last check, are finite.

        Does not communicate. Waits for the device once.
        """
        if not self.is_active:
            return
        if self._waits:
            self.take(floats(self.numbers_to_read()))
        elif not_finite(self._to_search(self.at_start)):
            self._report()

    def agree(self) -> None:
        """Call `check_weights`, and `raise_or_warn` on all ranks if any rank found non-finite values. Collective."""
        session = self._session
        if not self.is_active or session is None:
            return
        self.check_weights()
        found = self.has_found
        if session.world_size > 1:
            found = session.agreement.now(session.not_finite_flag)
        if found:
            self.raise_or_warn()

    def raise_or_warn(self) -> None:
        """Raise if weights are not finite; otherwise warn once about the non-finite loss or gradient. Collective.

        Raises:
            NonFiniteError: the weights are not finite; or, with ``non_finite="stop"``, a loss or gradient is not.
        """
        session = self._session
        assert session is not None
        self.read()  # losses that wait on the device may hold the first cause
        first, broken = self._gather_findings(not_finite(self._to_search(self.at_start)))
        self._first, self.has_found = None, False
        if session.world_size > 1:
            session.agreement.lower(session.not_finite_flag)
        if broken or session.config.non_finite == "stop":
            raise NonFiniteError(self._ending(first, broken))
        if not self._has_warned:
            self._has_warned = True
            continues = "The weights are finite, and the fit continues"
            if session.config.non_finite == "skip":
                continues = "The update is skipped, and the fit continues"
            rank_zero_warn(
                f"{self._cause(first, {})} {continues}; Trainer(detect_anomaly=True) names the operation that "
                "produced the value."
            )

    def handle_bad_gradient(self) -> None:
        """Report a skipped update with non-finite gradients; with ``non_finite="stop"``, raise instead. Collective."""
        session = self._session
        if session is None or session.config.non_finite != "stop":
            if self.is_active:
                self._report()
            return
        self.read()
        first, _ = self._gather_findings([])
        raise NonFiniteError(self._ending(first, {}))

    def check(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise if weights or optimizer states in a checkpoint are not finite. Collective.

        Args:
            checkpoint: the whole checkpoint, or this rank's shards.

        Raises:
            NonFiniteError: on all ranks.
        """
        session = self._session
        if session is None:
            return
        found = not_finite(_in_checkpoint(checkpoint, {*self.at_start}))
        found += not_finite(self._to_search(self.at_start))  # an engine may write the weights itself
        if session.strategy.reduce_boolean_decision(bool(found), all=False):
            self.read()
            first, broken = self._gather_findings(found)
            raise NonFiniteError(self._ending(first, broken))

    def check_alone(self, checkpoint: Mapping[str, Any]) -> None:
        """Raise if a checkpoint that only this rank saves has non-finite values. Does not communicate."""
        if self._session is not None:
            found = not_finite(_in_checkpoint(checkpoint, {*self.at_start}))
            if found:
                raise NonFiniteError(f"not finite: {_listed(found)}")

    # -- findings of all ranks -----------------------------------------------------------------------------

    def _to_search(self, but: list[str]) -> Iterator[tuple[str, Tensor]]:
        assert self._session is not None
        return ((name, tensor) for name, tensor in _weights_of(self._session.module) if name not in but)

    def _union_of_ranks(self, names: list[str]) -> list[str]:
        """Return the union of all ranks' names, in the same order on every rank. Collective."""
        session = self._session
        assert session is not None
        # one bit first: objects are gathered only in the rare case
        if not session.strategy.reduce_boolean_decision(bool(names), all=False):
            return []
        return list(dict.fromkeys(name for own in session.strategy.gather_objects(names) for name in own))

    def _gather_findings(self, names: list[str]) -> tuple[NonFiniteNumber | None, dict[str, int]]:
        """Return (first non-finite number on any rank, dict from each name to the lowest rank with it). Collective."""
        session = self._session
        assert session is not None
        every = session.strategy.gather_objects((self._first, names))
        numbers = [number for number, _ in every if number is not None]
        first = min(numbers, key=lambda number: (number.epoch, number.batch, number.rank), default=None)
        found: dict[str, int] = {}
        for rank, (_, own) in enumerate(every):
            for name in own:
                found.setdefault(name, rank)
        return first, found

    # -- messages ------------------------------------------------------------------------------------------

    def _cause(self, first: NonFiniteNumber | None, broken: dict[str, int]) -> str:
        """Describe the first non-finite number and the tensors that are not finite, as text for a message."""
        session = self._session
        assert session is not None
        several = session.world_size > 1
        if first is not None:
            since = f" Not finite since then: {_listed([*broken])}." if broken else ""
            return first.describe(several) + since
        progress = session.fit.progress
        at = f"step {progress.global_step} (epoch {progress.epoch})"
        if not broken:
            return f"The gradient of {at} is not finite, although every loss was finite."
        on_rank = f" on rank {min(broken.values())}" if several else ""
        return f"Not finite at {at}{on_rank}, although every loss was finite: {_listed([*broken])}."

    def _ending(self, first: NonFiniteNumber | None, broken: dict[str, int]) -> str:
        saved = "No checkpoint was saved."
        if self.newest_checkpoint is not None:
            saved = f"The newest healthy checkpoint is {self.newest_checkpoint}."
        return (
            f"{self._cause(first, broken)} {saved} "
            'Trainer(non_finite="skip") skips such updates; Trainer(detect_anomaly=True) names the operation that '
            "produced the value."
        )


# -- tensors to search ---------------------------------------------------------------------------------------


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each trainable parameter and each persistent buffer."""
    in_stages = is_freed(module)  # a single NaN may replace a parameter of another pipeline stage
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not (in_stages and parameter.numel() == 1):
            yield name, parameter
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _optimizer_states(session: WatchedRun) -> Iterator[tuple[str, Tensor]]:
    for optimizer in session.strategy.optimizers:
        for state in getattr(optimizer, "state", {}).values():
            for tensor in tensors_in(state):
                yield f"a state of {type(optimizer).__name__}", tensor


def _in_checkpoint(checkpoint: Mapping[str, Any], but: set[str]) -> Iterator[tuple[str, Tensor]]:
    for key in IN_CHECKPOINT:
        part = checkpoint.get(key) or {}
        if isinstance(part, Mapping):
            yield from ((name, value) for name, value in part.items() if name not in but and isinstance(value, Tensor))
        else:
            yield from ((f"the optimizer's state ({key})", tensor) for tensor in tensors_in(part))


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    shown = ", ".join(names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


# -- updates that are skipped ---------------------------------------------------------------------------------


def guard_updates(session: WatchedRun) -> None:
    """Install the guard that skips updates with non-finite gradients, or ends the fit before such an update.

    Raises:
        MisconfigurationException: the engine reduces and steps in one operation, so it cannot skip an update.
    """
    mode, strategy = session.config.non_finite, session.strategy
    # a loss scale (precision="16-mixed") skips such updates itself
    if mode not in ("skip", "stop") or strategy.precision.scaler is not None:
        return
    if strategy.steps_itself:
        if mode == "stop":  # such an engine is watched by its losses
            return
        raise MisconfigurationException(
            f'Trainer(non_finite="skip"): {type(strategy).__name__} reduces and steps in one operation, so it cannot '
            'skip updates; choose "protect" or "stop", or precision="16-mixed", which skips updates itself.'
        )
    asked_by = f'Trainer(non_finite="{mode}")'
    strategy.precision.scaler = UpdateGuard(strategy.root_device.type, asked_by, session.fit.finite.handle_bad_gradient)


def release_updates(session: WatchedRun) -> None:
    """Remove the guard that `guard_updates` installed."""
    if isinstance(session.strategy.precision.scaler, UpdateGuard):
        session.strategy.precision.scaler = None


def skipped_updates_text(session: WatchedRun) -> str:
    """Return the number of skipped updates as the end of a sentence; "" if no update was skipped."""
    guard = session.strategy.precision.scaler
    count = guard.all_left_out if isinstance(guard, UpdateGuard) else 0
    return f"; updates skipped because a gradient was not finite: {count}" if count else ""
