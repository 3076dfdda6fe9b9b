"""Step-by-step comparison of a distributed strategy with a single process on the same global batches.

For losses that are means over samples (or over the step's own ``weight``). Dropout, unsynchronized BatchNorm, losses
that mix samples, and ``drop_last`` differ on several ranks. So do parameters under Adam, which turns the rounding error
of a gradient that should be zero into a full step.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.callbacks.base import Callback
from lockstep.cluster.environments import ClusterEnvironment
from lockstep.engines.strategy import Strategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import plain_name
from lockstep.ground.seed import isolate_rng
from lockstep.module import LightningModule
from lockstep.testing.devices import chosen_accelerator
from lockstep.trainer import Trainer

# -- the report ----------------------------------------------------------------------------------------------


STEPS = "course of steps"
BUFFER = "buffer"
INITIAL = "first parameter"
GRADIENT = "gradient"
CLIPPED = "clipped gradient"
PARAMETER = "parameter"
_IN_ORDER = (STEPS, INITIAL, BUFFER, GRADIENT, CLIPPED, PARAMETER)
"""Kinds of differences, in the order in which they occur in a step; later differences may follow from earlier ones."""

_SHOWN = 8
"""Maximum number of differences that a report lists."""


@dataclass(frozen=True)
class RankDifference:
    """A difference between the run with the strategy and the run on a single process in one step.

    Attributes:
        step: the optimizer step, counted from 0.
        what: "first parameter" (at the start of training), "buffer" (at the start of the step's forward), "gradient"
            (before clipping), "clipped gradient", "parameter" (after the step), or "course of steps" (the runs made
            different steps).
        name: name of the parameter or buffer; "" for a course of steps.
        ranks: ranks with the difference.
        size: largest absolute difference; infinite if only one of the runs has a gradient.
        scale: largest absolute element on the single process over all names, to which differences are relative.
    """

    step: int
    what: str
    name: str
    ranks: tuple[int, ...]
    size: float
    scale: float

    def __str__(self) -> str:
        where = f"on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        if self.what == STEPS:
            return f"step {self.step}: a different {STEPS} {where}"
        if math.isinf(self.size):
            return f"step {self.step}: {self.what} {self.name!r} {where} exists in only one of the runs"
        return f"step {self.step}: {self.what} {self.name!r} {where} off by {self.size:.3g} (largest: {self.scale:.3g})"


@dataclass(frozen=True)
class EquivalenceReport:
    """Result of `check_equivalence`. Its truth value is True if no difference was found.

    Attributes:
        title: the strategy and settings that were compared with a single process.
        steps: number of optimizer steps.
        differences: differences, sorted by step and kind; those of one step and kind by size, largest first.
        cause: probable cause of the first differences; "" if there are none.
        largest: largest relative difference within the tolerance.
        traffic: for each step, the number of gradient reductions of a rank and their bytes; the maximum over the ranks.
    """

    title: str
    steps: int
    differences: tuple[RankDifference, ...] = ()
    cause: str = ""
    largest: float = 0.0
    traffic: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def first(self) -> tuple[RankDifference, ...]:
        """Differences of the first kind in the first step that differs. They may cause all later differences."""
        start = self.differences[:1]
        return tuple(d for d in self.differences if (d.step, d.what) == (start[0].step, start[0].what))

    def __str__(self) -> str:
        if self:
            return f"{self.title}: {self.steps} steps as on one process, to {self.largest:.1e}"
        lines = [f"{self.title}: differs from one process.", *map(str, self.first[:_SHOWN])]
        if len(self.first) > _SHOWN:
            lines.append(f"and {len(self.first) - _SHOWN} more of this step")
        return "\n  ".join([*lines, f"Cause: {self.cause}."])


# -- findings of ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFinding:
    """Difference found on one rank. Ranks with the same wrong tensor have equal ``digest``."""

    step: int
    what: str
    name: str
    size: float
    scale: float
    digest: str


@dataclass
class Witness:
    """Record of the observations that one rank makes during the run with the strategy."""

    findings: list[RankFinding] = field(default_factory=list)
    largest: float = 0.0
    clipped_before: set[int] = field(default_factory=set)
    """Steps in which this rank's gradient was within the bound before clipping, and the single process's was not."""
    weights: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Number of samples of each forward, by step; 0 for a micro-batch without samples on this rank."""
    buffers: dict[int, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Digests of the buffers at the start of each forward, by step."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Buffers by digest."""
    traffic: list[tuple[int, int]] = field(default_factory=list)
    """Number of gradient reductions up to the end of each step, and their bytes."""

    def forward(self, step: int, weight: float, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Record the number of samples of a forward, and the buffers' values at the start of the forward."""
        seen = {}
        for name, buffer in buffers:
            found = buffer.detach().cpu()
            seen[name] = digest(found)
            if seen[name] not in self.tensors:
                self.tensors[seen[name]] = found.clone()
        self.weights[step].append(weight)
        self.buffers[step].append(seen)


def digest(tensor: Tensor | None) -> str:
    """Return a hash of a CPU tensor's bits; "" for None."""
    if tensor is None:
        return ""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(bits, digest_size=16).hexdigest()


# -- the judgement -------------------------------------------------------------------------------------------


def judge(title: str, steps: int, ranks: list[Witness]) -> EquivalenceReport:
    """Combine the observations of all ranks into a report."""
    by_place: dict[tuple[int, str, str], dict[int, RankFinding]] = defaultdict(dict)
    for rank, witness in enumerate(ranks):
        for finding in witness.findings:
            by_place[finding.step, finding.what, finding.name][rank] = finding
    differences = [
        RankDifference(*place, tuple(found), max(f.size for f in found.values()), next(iter(found.values())).scale)
        for place, found in by_place.items()
    ]
    differences += _stale_buffers(ranks)
    differences.sort(key=lambda d: (d.step, _IN_ORDER.index(d.what), -d.size))
    largest = max((witness.largest for witness in ranks), default=0.0)
    # The counters run on over the steps: each step's traffic is what they have grown by.
    after = [(0, 0), *(max(each) for each in zip(*(witness.traffic for witness in ranks), strict=False))]
    traffic = tuple((number - before, size - less) for (before, less), (number, size) in pairwise(after))
    report = EquivalenceReport(title, steps, tuple(differences), largest=largest, traffic=traffic)
    return report if report else replace(report, cause=_cause(report.first, ranks))


def _stale_buffers(ranks: list[Witness]) -> list[RankDifference]:
    """Return a difference for each buffer that differed between ranks in every forward of a step."""
    found = []
    for step, forwards in ranks[0].buffers.items():
        for name in forwards[0] if forwards else ():
            digests = [[seen[name] for seen in witness.buffers.get(step, [])] for witness in ranks]
            # One equal forward is enough: buffers may differ between the forwards of a window. A rank without samples
            # runs no forward.
            if any(len(set(of_forward)) == 1 for of_forward in zip(*filter(None, digests), strict=False)):
                continue
            mine, newest = digests[0][-1], [each[-1] if each else "" for each in digests]
            others = tuple(rank for rank, theirs in enumerate(newest) if theirs and theirs != mine)
            tensors = [ranks[rank].tensors[newest[rank]].double() for rank in (0, *others) if newest[rank]]
            size = max(((each - tensors[0]).abs().max().item() for each in tensors), default=math.inf)
            found.append(RankDifference(step, BUFFER, name, others, size, tensors[0].abs().max().item()))
    return found


def _cause(first: tuple[RankDifference, ...], ranks: list[Witness]) -> str:
    """Return the probable cause of the differences, as a text for the report."""
    step, what = first[0].step, first[0].what
    if what == STEPS:
        return "the runs make different steps, because data ends at different points or an update is omitted"
    if what == INITIAL:
        return "training does not start from rank 0's parameters"
    if what == BUFFER:
        return "stale buffers, because each rank's forward runs with its own buffers instead of rank 0's"
    if what == PARAMETER:
        return "the optimizer step, because the gradients are right and the parameters after the step are wrong"
    digests: dict[str, set[str]] = defaultdict(set)
    for witness in ranks:
        mine = {each.name: each.digest for each in witness.findings if (each.step, each.what) == (step, what)}
        for difference in first:
            digests[difference.name].add(mine.get(difference.name, "within the tolerance"))
    if any(len(each) > 1 for each in digests.values()):
        if what == CLIPPED:
            return "clipping with a different norm on each rank; the gradients are right before clipping"
        names = ", ".join(repr(d.name) for d in first[:_SHOWN])
        return f"not reduced: the ranks have different gradients for {names} (is a bucket omitted?)"
    if what == CLIPPED:
        return "clipping: the gradients are right before clipping, and equally wrong on all ranks after it"
    if any(step in witness.clipped_before for witness in ranks):
        return "clipping before the reduction: the reduced gradient is within the bound already before clipping"
    samples = [witness.weights.get(step, []) for witness in ranks]
    counts = "; ".join(f"rank {rank}: {', '.join(f'{n:g}' for n in each)}" for rank, each in enumerate(samples))
    if len({n for each in samples for n in each}) > 1:
        return (
            "mean of means: in the first wrong step ranks have different numbers of samples, but equal weights "
            f"(samples: {counts})"
        )
    return (
        f"weights: all ranks have the same wrong gradient although they have equal numbers of samples "
        f"(samples: {counts}), so a loss has a wrong weight"
    )


# -- the comparison ------------------------------------------------------------------------------------------


NO_STEPS = (
    "check_equivalence: a single process makes no optimizer step with the data from make_data. Use more samples, a "
    "loader without drop_last, or flags that let it train"
)

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": -1,
    "limit_val_batches": 0,
    "logger": False,
    "non_finite": "ignore",  # NaN is reported as a difference
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
    """Train on a single process and with a strategy, from the same seed, and compare every optimizer step.

    The first run is one process on the CPU, with the whole global batch as its batch. The second uses ``strategy`` on
    ``devices`` ranks, each with ``accumulate`` micro-batches of ``batch_size`` samples in a step. Compared by name are
    the parameters at the start, the gradients of each step before and after clipping, the parameters after it, and the
    ranks' buffers at each forward (with rank 0's).

    Ranks are started as by the strategy, unless they are running already (``torchrun``). In that case call this on each
    rank; each gets the report.

    Args:
        make_module: returns a new module; torch is seeded before the call, with a different seed on each rank.
        make_data: returns the training loader for a batch size (samples of a micro-batch on one rank).
        strategy: the strategy to check.
        devices: number of ranks.
        accumulate: micro-batches of a step on each rank.
        batch_size: samples of a micro-batch on each rank.
        steps: optimizer steps, over as many epochs as needed.
        seed: seed of the module's initial weights and of the order of data.
        tolerance: largest accepted difference, relative to the step's largest gradient (or parameter).
        **flags: flags of both Trainers, such as ``gradient_clip_val=0.5``, or ``precision`` instead of "64-true".

    Returns:
        A report that is true if all values are equal; otherwise it names step, parameter and ranks.

    Raises:
        MisconfigurationException: the single process makes no optimizer step with the data.

    Example::

        def data(batch_size):
            return DataLoader(RandomDataset(32, length=23), batch_size, shuffle=True)

        report = check_equivalence(BoringModel, data, strategy="ddp_spawn", devices=2, gradient_clip_val=0.1)
        assert report, report
    """
    common = {**_QUIET, "max_steps": steps, **flags}
    compare = _Compare(tolerance, common.get("gradient_clip_val"), common.get("gradient_clip_algorithm"))
    own = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": accumulate}
    trainer = _trainer({**common, "accelerator": chosen_accelerator(), **flags, **own}, compare, seed)
    with isolate_rng():
        whole = batch_size * trainer.strategy.replicas.count * accumulate
        record = _ProcessRecorder()
        torch.manual_seed(seed)
        _trainer({**common, "plugins": _AloneEnvironment()}, record, seed).fit(make_module(), make_data(whole))
        made = max((each.step + 1 for each in record.tape if each.what == PARAMETER), default=0)
        if not made:
            raise MisconfigurationException(NO_STEPS)
        compare.expected = [each for each in record.tape if not trainer.strategy.steps_itself or each.what != CLIPPED]
        # Another seed on each rank: equal initial weights would hide a missing broadcast.
        torch.manual_seed(seed + trainer.global_rank)
        trainer.fit(make_module(), make_data(batch_size))
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    settings = {"accumulate": accumulate, "batch_size": batch_size, **flags}
    shown = ", ".join(f"{setting}={value}" for setting, value in settings.items())
    return judge(f"{name} on {trainer.world_size} rank(s), {shown}", made, compare.ranks)


def _trainer(flags: dict[str, Any], observer: Callback, seed: int) -> Trainer:
    trainer = Trainer(**{**flags, "callbacks": [*flags.get("callbacks", ()), observer]})
    trainer.seed = seed
    return trainer


class _AloneEnvironment(ClusterEnvironment):
    """Cluster environment for a run on a single process. It ignores the variables that a launcher has set."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank


# -- observations of a run -----------------------------------------------------------------------------------


@dataclass
class _Observation:
    """Observed tensors of one kind in one step, by parameter name. A missing gradient is None."""

    step: int
    what: str
    tensors: dict[str, Tensor | None]

    def key(self) -> tuple[Any, ...]:
        """Return (step, kind, parameter names). Two observations can be compared only if their keys are equal."""
        return self.step, self.what, list(self.tensors)


class _Observer(Callback):
    """A callback that observes gradients and parameters at the points where the two runs must agree."""

    def __init__(self) -> None:
        self._reduced = -1  # the newest step whose gradient was taken
        self._updated = 0

    def take(self, observation: _Observation) -> None:
        """Process an observation of this run. Both runs make the same kinds of observations in the same order."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.take(_Observation(trainer.global_step, INITIAL, self._whole(trainer)[0]))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step
        # An optimizer may call its closure again; later gradients of the step follow from the first ones.
        if step == self._reduced:
            return
        self._reduced = step
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        names = {plain_name(name) for name, p in pl_module.named_parameters() if id(p) in own}
        gradients = self._whole(trainer)[1]
        self.take(_Observation(step, GRADIENT, {name: gradients[name] for name in gradients if name in names}))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self._updated:
            return
        self._updated = trainer.global_step
        step = trainer.global_step - 1
        with trainer.strategy.with_all_ranks():
            values, gradients = self._whole(trainer)
        if not trainer.strategy.steps_itself:
            self.take(_Observation(step, CLIPPED, gradients))
        self.take(_Observation(step, PARAMETER, values))

    def _whole(self, trainer: Trainer) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        """Return unsharded values and gradients of the module's parameters, by name. Collective."""
        values: dict[str, Tensor | None] = {}
        gradients: dict[str, Tensor | None] = {}
        of_module = {plain_name(name) for name, _ in trainer.lightning_module.named_parameters()}
        for name, value, gradient in trainer.strategy.whole_parameters():
            if name in of_module:
                values[name] = value
                # a copy: an engine may free a gathered gradient after this iteration
                gradients[name] = None if gradient is None else gradient.clone()
        return values, gradients

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self.on_train_batch_end(trainer, pl_module, None, None, batch_idx)


class _ProcessRecorder(_Observer):
    """An observer that stores the observations of the single process."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[_Observation] = []

    def take(self, observation: _Observation) -> None:
        tensors = {name: None if t is None else t.detach().cpu().clone() for name, t in observation.tensors.items()}
        self.tape.append(_Observation(observation.step, observation.what, tensors))


class _Compare(_Observer):
    """An observer that compares this rank's observations with the single process's, and gathers all ranks' findings."""

    def __init__(self, tolerance: float, clip: float | None, algorithm: str | None) -> None:
        super().__init__()
        self.expected: list[_Observation] = []
        self.ranks: list[Witness] = []
        self._tolerance = tolerance
        self._clip = clip
        self._order = math.inf if algorithm == "value" else 2.0
        self._mine = Witness()
        self._taken = 0
        self._has_diverged = False  # the runs made different steps: nothing more can be compared

    # -- around the fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.strategy.drives_all_devices:
            return  # its strategy replicates the module, and replicas would not call the wrapper
        own = pl_module.training_step

        @functools.wraps(own)
        def training_step(*args: object, **kwargs: object) -> Any:
            self._mine.forward(trainer.global_step, trainer.results.weight, pl_module.named_buffers())
            return own(*args, **kwargs)

        vars(pl_module)["training_step"] = training_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        if trainer.strategy.drives_all_devices:
            self._mine.forward(trainer.global_step, trainer.results.weight, ())

    def _on_any_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self._mine.weights[trainer.global_step].append(0.0)  # without samples no forward runs

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step != self._updated:
            self._mine.traffic.append(trainer.strategy.traffic)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        vars(pl_module).pop("training_step", None)
        if not self._has_diverged and self._taken < len(self.expected):
            self._diverge(self.expected[self._taken].step)
        self.expected = []  # a spawned rank would send them back
        self.ranks = trainer.strategy.gather_objects(self._mine)

    # -- one observation

    def take(self, observation: _Observation) -> None:
        if self._has_diverged:
            return
        expected = self.expected[self._taken] if self._taken < len(self.expected) else None
        if expected is None or expected.key() != observation.key():
            self._diverge(observation.step)
            return
        self._taken += 1
        scale = max((_size(tensor) for tensor in expected.tensors.values()), default=0.0)
        for name, tensor in observation.tensors.items():
            found = None if tensor is None else tensor.detach().cpu()
            size = _distance(found, expected.tensors[name])
            if not size <= self._tolerance * scale:  # also for NaN
                self._mine.findings.append(
                    RankFinding(observation.step, observation.what, name, size, scale, digest(found))
                )
            elif scale:
                self._mine.largest = max(self._mine.largest, size / scale)
        if observation.what != GRADIENT or self._clip is None:
            return
        # Not clipped yet, but within the bound that the gradient of one process exceeds: it was clipped too early.
        if _norm(expected, self._order) > self._clip >= _norm(observation, self._order) * (1 - 1e-9):
            self._mine.clipped_before.add(observation.step)

    def _diverge(self, step: int) -> None:
        self._has_diverged = True
        self._mine.findings.append(RankFinding(step, STEPS, "", math.inf, 0.0, ""))


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else tensor.abs().max().item()


def _distance(found: Tensor | None, expected: Tensor | None) -> float:
    """Return the largest absolute difference between two tensors, or infinity if only one of them is None.

    None is not the same as zeros, because an optimizer skips a parameter without gradient.
    """
    if found is None or expected is None:
        return 0.0 if found is expected else math.inf
    return _size(found.to(expected.dtype) - expected)


def _norm(observation: _Observation, order: float) -> float:
    norms = [torch.linalg.vector_norm(t.detach().cpu(), order) for t in observation.tensors.values() if t is not None]
    return torch.linalg.vector_norm(torch.stack(norms), order).item() if norms else 0.0
