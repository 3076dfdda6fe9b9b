"""Does a strategy train the model that one process with the whole batch trains? Step by step, and who strays.

Made for losses that are means over samples (or over what the step's own ``weight`` counts). Dropout,
unsynchronised BatchNorm, losses that mix samples, and ``drop_last`` are not the same on many ranks; nor are
parameters under Adam, which makes a step of a true zero's rounding error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.callbacks.base import Callback
from lockstep.cluster.environments import ClusterEnvironment
from lockstep.ground.seed import isolate_rng
from lockstep.module import LightningModule
from lockstep.strategies.base import Strategy
from lockstep.testing.verdict import (
    CLIPPED,
    GRADIENT,
    INITIAL,
    PARAMETER,
    STEPS,
    EquivalenceReport,
    Finding,
    Witness,
    digest,
    judge,
)
from lockstep.trainer import Trainer

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": -1,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def check_equivalence(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[int], Any],
    *,
    strategy: str | Strategy = "ddp",
    devices: int = 2,
    accumulate: int = 1,
    batch_size: int = 4,
    steps: int = 5,
    seed: int = 0,
    tolerance: float = 1e-12,
    **flags: Any,
) -> EquivalenceReport:
    """Train twice from the same seed, and compare every optimizer step.

    Once on one process, where a batch is the whole global batch; once with ``strategy`` on ``devices`` ranks,
    each of which takes ``accumulate`` micro-batches of ``batch_size`` samples for a step. Compared, by name:
    the parameters at the start, each step's gradient before and after clipping, the parameters after it; and
    the buffers with which the ranks' forwards run, with rank 0's.

    Ranks are started as the strategy does it, unless they are there already (``torchrun``, a `RankPool`):
    then call this on each of them, and each gets the report.

    Args:
        make_module: gives a fresh module; torch is seeded before, on each rank with another seed.
        make_data: gives the training loader for a batch size: samples of a micro-batch on one rank.
        strategy: what is tried.
        devices: number of ranks.
        accumulate: micro-batches of a step on each rank.
        batch_size: samples of a micro-batch on each rank.
        steps: optimizer steps; epochs begin anew as they need.
        seed: of the module's first weights and of the order of data.
        tolerance: largest difference that passes, as part of the step's largest gradient (or parameter).
        **flags: of both Trainers: ``gradient_clip_val=0.5``, say, or ``precision`` in place of "64-true".

    Returns:
        a report that is true where all is equal, and else names step, parameter and ranks.

    Example::

        def data(batch_size):
            return DataLoader(RandomDataset(32, length=23), batch_size, shuffle=True)

        report = check_equivalence(BoringModel, data, strategy="ddp_spawn", devices=2, gradient_clip_val=0.1)
        assert report, report
    """
    common = {**_QUIET, "max_steps": steps, **flags}
    compare = _Compare(tolerance, common.get("gradient_clip_val"), common.get("gradient_clip_algorithm"))
    own = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": accumulate}
    trainer = _trainer({**common, **own}, compare, seed)
    with isolate_rng():
        whole = batch_size * trainer.world_size * accumulate
        compare.expected = _one_process(make_module, make_data(whole), common, seed)
        torch.manual_seed(seed + trainer.global_rank)  # ranks that start alike would hide a missing broadcast
        trainer.fit(make_module(), make_data(batch_size))
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    settings = {"accumulate": accumulate, "batch_size": batch_size, **flags}
    told = ", ".join(f"{setting}={value}" for setting, value in settings.items())
    return judge(f"{name} on {trainer.world_size} rank(s), {told}", steps, compare.ranks)


def _one_process(
    make_module: Callable[[], LightningModule], data: Any, flags: dict[str, Any], seed: int
) -> list[_Observation]:
    record = _Record()
    torch.manual_seed(seed)
    _trainer({**flags, "plugins": _Alone()}, record, seed).fit(make_module(), data)
    return record.tape


def _trainer(flags: dict[str, Any], observer: Callback, seed: int) -> Trainer:
    trainer = Trainer(**{**flags, "callbacks": [*flags.get("callbacks", ()), observer]})
    trainer.seed = seed
    return trainer


class _Alone(ClusterEnvironment):
    """One process by itself, also where a launcher's variables say that it is a rank among others."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank


# -- what a run shows ----------------------------------------------------------------------------------------


@dataclass
class _Observation:
    """The tensors of one kind at one step, by parameter; a gradient may be None."""

    step: int
    what: str
    tensors: dict[str, Tensor | None]

    def key(self) -> tuple[Any, ...]:
        """What must be equal for two observations to be comparable."""
        return self.step, self.what, list(self.tensors)


class _Observer(Callback):
    """Takes gradients and parameters at the points where two runs must agree."""

    def __init__(self) -> None:
        self._reduced = -1  # the newest step whose gradient was taken
        self._updated = 0

    def take(self, observation: _Observation) -> None:
        """One observation; they come in the same order in each run."""
        raise NotImplementedError

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.take(_Observation(trainer.global_step, INITIAL, dict(pl_module.named_parameters())))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        step = trainer.global_step
        if step == self._reduced:  # a closure that is called again: what comes then follows from the first call
            return
        self._reduced = step
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with trainer.strategy.whole_gradients():
            gradients = {name: p.grad for name, p in pl_module.named_parameters() if id(p) in own}
            self.take(_Observation(step, GRADIENT, gradients))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._updated:
            return
        self._updated = trainer.global_step
        step = trainer.global_step - 1
        with trainer.strategy.with_all_ranks(), trainer.strategy.whole_gradients():
            self.take(_Observation(step, CLIPPED, {name: p.grad for name, p in pl_module.named_parameters()}))
        self.take(_Observation(step, PARAMETER, dict(pl_module.named_parameters())))

    def _on_any_batch_end(self, trainer: Any, pl_module: Any, batch_idx: int) -> None:
        self.on_train_batch_end(trainer, pl_module, None, None, batch_idx)


class _Record(_Observer):
    """Keeps what one process shows."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Observation] = []

    def take(self, observation: _Observation) -> None:
        tensors = {name: None if t is None else t.detach().cpu().clone() for name, t in observation.tensors.items()}
        self.tape.append(_Observation(observation.step, observation.what, tensors))


class _Compare(_Observer):
    """Compares what a rank shows with the tape of one process, and brings the ranks' findings together."""

    def __init__(self, tolerance: float, clip: float | None, algorithm: str | None) -> None:
        super().__init__()
        self.expected: list[_Observation] = []
        self.ranks: list[Witness] = []
        self._tolerance = tolerance
        self._clip = clip
        self._order = math.inf if algorithm == "value" else 2.0
        self._mine = Witness()
        self._taken = 0
        self._astray = False  # another course of events: nothing to compare any more

    # -- around the fit

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.strategy.drives_all_devices:
            return  # one rank, whose strategy would not share out what is no method of the module
        own = pl_module.training_step

        @functools.wraps(own)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self._mine.forward(trainer.global_step, trainer.results.weight, pl_module.named_buffers())
            return own(*args, **kwargs)

        pl_module.training_step = training_step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.drives_all_devices:
            self._mine.forward(trainer.global_step, trainer.results.weight, ())

    def _on_any_batch_start(self, trainer: Any, pl_module: Any, batch_idx: int) -> None:
        self._mine.weights[trainer.global_step].append(0.0)  # without samples no forward runs

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self._updated:
            self._mine.traffic.append(trainer.strategy.traffic)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        vars(pl_module).pop("training_step", None)
        if not self._astray and self._taken < len(self.expected):
            self._go_astray(self.expected[self._taken].step)
        self.expected = []  # not to travel back from a spawned rank
        self.ranks = trainer.strategy.gather_objects(self._mine)

    # -- one observation

    def take(self, observation: _Observation) -> None:
        if self._astray:
            return
        expected = self.expected[self._taken] if self._taken < len(self.expected) else None
        if expected is None or expected.key() != observation.key():
            self._go_astray(observation.step)
            return
        self._taken += 1
        scale = max((_size(tensor) for tensor in expected.tensors.values()), default=0.0)
        for name, tensor in observation.tensors.items():
            found = None if tensor is None else tensor.detach().cpu()
            size = _distance(found, expected.tensors[name])
            if not size <= self._tolerance * scale:  # NaN strays too
                self._mine.findings.append(
                    Finding(observation.step, observation.what, name, size, scale, digest(found))
                )
            elif scale:
                self._mine.largest = max(self._mine.largest, size / scale)
        if observation.what == GRADIENT and self._clip is not None:
            self._look_for_clipping(self._clip, observation, expected)

    def _look_for_clipping(self, bound: float, observation: _Observation, expected: _Observation) -> None:
        """Note where a gradient that exceeds the bound of clipping lies within it before it is clipped."""
        if _norm(expected, self._order) > bound >= _norm(observation, self._order) * (1 - 1e-9):
            self._mine.clipped_before.add(observation.step)

    def _go_astray(self, step: int) -> None:
        self._astray = True
        self._mine.findings.append(Finding(step, STEPS, "", math.inf, 0.0, ""))


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else tensor.abs().max().item()


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    """Largest difference; infinite where only one of the two is there (an optimizer skips None, not zeros)."""
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    return _size(found.to(expected.dtype) - expected)


def _norm(observation: _Observation, order: float) -> float:
    norms = [torch.linalg.vector_norm(t.detach().cpu(), order) for t in observation.tensors.values() if t is not None]
    return torch.linalg.vector_norm(torch.stack(norms), order).item() if norms else 0.0
