"""Does a strategy train the model that one process with the whole batch trains? Step by step, and who differs.

Made for losses that are means over samples (or over what the step's own ``weight`` counts). Dropout,
unsynchronised BatchNorm, losses that mix samples, and ``drop_last`` are not the same on many ranks; nor are
parameters under Adam, which makes a step of a true zero's rounding error.
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

# -- the verdict ---------------------------------------------------------------------------------------------


STEPS = "course of steps"
BUFFER = "buffer"
INITIAL = "first parameter"
GRADIENT = "gradient"
CLIPPED = "clipped gradient"
PARAMETER = "parameter"
_IN_ORDER = (STEPS, INITIAL, BUFFER, GRADIENT, CLIPPED, PARAMETER)
"""Kinds, as they come in a step: what strays later in a step follows from what strayed before."""

_SHOWN = 8
"""Lines of a report for the differences of one step."""


@dataclass(frozen=True)
class RankDifference:
    """What strays at one step.

    Attributes:
        step: the optimizer step, counted from 0.
        what: "first parameter" (those that training starts from), "buffer" (with which the step's forward
            runs), "gradient" (before clipping), "clipped gradient", "parameter" (after the step), or
            "course of steps" (the runs made different ones).
        name: of the parameter or buffer; "" for a course of steps.
        ranks: those on which it strays.
        size: largest absolute difference; infinite where there is no gradient in one of the runs only.
        scale: largest element that one process has, over all names; a difference is measured by it.
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
            return f"step {self.step}: another {STEPS} {where}"
        if math.isinf(self.size):
            return f"step {self.step}: {self.what} {self.name!r} {where} is there in one of the runs only"
        return f"step {self.step}: {self.what} {self.name!r} {where} off by {self.size:.3g} (largest: {self.scale:.3g})"


@dataclass(frozen=True)
class EquivalenceReport:
    """What `check_equivalence` found; true where nothing strays.

    Attributes:
        title: what was compared with one process.
        steps: optimizer steps.
        differences: by step and kind as they came, in each the largest first.
        cause: what the first of them are a sign of; "" where there are none.
        largest: the largest difference that passed, as part of its scale.
        traffic: by step, the reductions of gradients that a rank took part in, and the bytes that it gave to them;
            of the rank that sent most.
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
        """The differences of the step and kind that stray first; all others may follow from them."""
        start = self.differences[:1]
        return tuple(d for d in self.differences if (d.step, d.what) == (start[0].step, start[0].what))

    def __str__(self) -> str:
        if self:
            return f"{self.title}: {self.steps} steps as on one process, to {self.largest:.1e}"
        lines = [f"{self.title}: strays from one process.", *map(str, self.first[:_SHOWN])]
        if len(self.first) > _SHOWN:
            lines.append(f"and {len(self.first) - _SHOWN} more of this step")
        return "\n  ".join([*lines, f"Cause: {self.cause}."])


# -- what ranks say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFinding:
    """One difference, as one rank sees it; ``digest`` tells whether two ranks hold the same wrong tensor."""

    step: int
    what: str
    name: str
    size: float
    scale: float
    digest: str


@dataclass
class Witness:
    """What one rank has to say about its run."""

    findings: list[RankFinding] = field(default_factory=list)
    largest: float = 0.0
    clipped_before: set[int] = field(default_factory=set)
    """Steps whose gradient lay within the bound of clipping already, though that of one process does not."""
    weights: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By step, the samples of each forward; 0 for one that a rank has none of."""
    buffers: dict[int, list[dict[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """By step, for each forward, the digests of the buffers that it started with."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By digest, the buffers."""
    traffic: list[tuple[int, int]] = field(default_factory=list)
    """After each step, the reductions of gradients so far, and their bytes."""

    def forward(self, step: int, weight: float, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Note with what a forward starts."""
        seen = {}
        for name, buffer in buffers:
            found = buffer.detach().cpu()
            seen[name] = digest(found)
            if seen[name] not in self.tensors:
                self.tensors[seen[name]] = found.clone()
        self.weights[step].append(weight)
        self.buffers[step].append(seen)


def digest(tensor: Tensor | None) -> str:
    """A fingerprint of a CPU tensor's bits."""
    if tensor is None:
        return ""
    bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(bits, digest_size=16).hexdigest()


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(title: str, steps: int, ranks: list[Witness]) -> EquivalenceReport:
    """The report on what all ranks say, by rank."""
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
    report = EquivalenceReport(title, steps, tuple(differences), largest=largest, traffic=_traffic(ranks))
    return report if report else replace(report, cause=_cause(report.first, ranks))


def _traffic(ranks: list[Witness]) -> tuple[tuple[int, int], ...]:
    """What each step cost, from what each rank's counters showed after it."""
    after = [(0, 0), *(max(each) for each in zip(*(witness.traffic for witness in ranks), strict=False))]
    return tuple((number - before, size - less) for (before, less), (number, size) in pairwise(after))


def _were_one(digests: list[list[str]]) -> bool:
    """Whether all ranks had the same values in some forward; a rank without samples runs none."""
    return any(len(set(alike)) == 1 for alike in zip(*filter(None, digests), strict=False))


def _stale_buffers(ranks: list[Witness]) -> list[RankDifference]:
    """Buffers in which the ranks never were one in a step; between a window's forwards they may part."""
    found = []
    for step, forwards in ranks[0].buffers.items():
        for name in forwards[0] if forwards else ():
            digests = [[seen[name] for seen in witness.buffers.get(step, [])] for witness in ranks]
            if _were_one(digests):
                continue
            mine, newest = digests[0][-1], [each[-1] if each else "" for each in digests]
            strays = tuple(rank for rank, theirs in enumerate(newest) if theirs and theirs != mine)
            tensors = [ranks[rank].tensors[newest[rank]].double() for rank in (0, *strays) if newest[rank]]
            size = max(((each - tensors[0]).abs().max().item() for each in tensors), default=math.inf)
            found.append(RankDifference(step, BUFFER, name, strays, size, tensors[0].abs().max().item()))
    return found


def _cause(first: tuple[RankDifference, ...], ranks: list[Witness]) -> str:
    """What the differences that came first are a sign of."""
    step, what = first[0].step, first[0].what
    if what == STEPS:
        return "the runs make different steps: their data does not end alike, or an update is left out"
    if what == INITIAL:
        return "training does not start from rank 0's parameters"
    if what == BUFFER:
        return "stale buffers: the ranks' forwards run with buffers of their own, rank 0's are not taken over"
    if what == PARAMETER:
        return "the update itself: the gradients are right, the parameters after the step are not"
    if not _alike_on_all(first, ranks):
        if what == CLIPPED:
            return "clipping on each rank by another norm: the gradients are right and alike before it"
        names = ", ".join(repr(d.name) for d in first[:_SHOWN])
        return f"not reduced: the ranks hold different gradients of {names} (a bucket is left out?)"
    if what == CLIPPED:
        return "clipping: the gradients are right before it, and on all ranks alike wrong after it"
    if any(step in witness.clipped_before for witness in ranks):
        return "clipping before the reduction: a gradient that exceeds the bound lies within it before it is clipped"
    return _weighing(step, ranks)


def _weighing(step: int, ranks: list[Witness]) -> str:
    """What is wrong with the ranks' shares in a step of which all ranks have the same wrong gradient."""
    samples = [witness.weights.get(step, []) for witness in ranks]
    told = "; ".join(f"rank {rank}: {', '.join(f'{n:g}' for n in each)}" for rank, each in enumerate(samples))
    if len({n for each in samples for n in each}) > 1:
        return f"mean of means: the first step to stray is shared out unevenly, and weighed evenly (samples: {told})"
    return f"weights: the ranks agree on a wrong gradient in an even step (samples: {told}); one's loss weighs too much"


def _alike_on_all(first: tuple[RankDifference, ...], ranks: list[Witness]) -> bool:
    step, what = first[0].step, first[0].what
    digests: dict[str, set[str]] = defaultdict(set)
    for witness in ranks:
        mine = {
            finding.name: finding.digest for finding in witness.findings if (finding.step, finding.what) == (step, what)
        }
        for difference in first:
            digests[difference.name].add(mine.get(difference.name, "within the tolerance"))
    return all(len(each) == 1 for each in digests.values())


# -- the comparison ------------------------------------------------------------------------------------------


NO_STEPS = (
    "check_equivalence: one process makes no optimizer step with the data of make_data, and nothing can be compared: "
    "give more samples, a loader without drop_last, or flags that let it train"
)

_QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "max_epochs": -1,
    "limit_val_batches": 0,
    "logger": False,
    "non_finite": "ignore",  # NaN strays, and is reported as such
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

    Once on one process of the CPU, where a batch is the whole global batch; once with ``strategy`` on ``devices``
    ranks, each of which takes ``accumulate`` micro-batches of ``batch_size`` samples for a step. Compared, by name:
    the parameters at the start, each step's gradient before and after clipping, the parameters after it; and
    the buffers with which the ranks' forwards run, with rank 0's.

    Ranks are started as the strategy does it, unless they are there already (``torchrun``):
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
        a report that is true where all is equal, and else names step, parameter and ranks; no steps are an error.

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
        tape = _one_process(make_module, make_data(whole), common, seed)
        compare.expected = [each for each in tape if not trainer.strategy.steps_itself or each.what != CLIPPED]
        torch.manual_seed(seed + trainer.global_rank)  # ranks that start alike would hide a missing broadcast
        trainer.fit(make_module(), make_data(batch_size))
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    settings = {"accumulate": accumulate, "batch_size": batch_size, **flags}
    told = ", ".join(f"{setting}={value}" for setting, value in settings.items())
    return judge(f"{name} on {trainer.world_size} rank(s), {told}", _steps_of(tape), compare.ranks)


def _steps_of(tape: list[_Observation]) -> int:
    """The optimizer steps that one process has made."""
    return max((each.step + 1 for each in tape if each.what == PARAMETER), default=0)


def _one_process(
    make_module: Callable[[], LightningModule], data: object, flags: dict[str, Any], seed: int
) -> list[_Observation]:
    record = _ProcessRecorder()
    torch.manual_seed(seed)
    _trainer({**flags, "plugins": _AloneEnvironment()}, record, seed).fit(make_module(), data)
    if not _steps_of(record.tape):
        raise MisconfigurationException(NO_STEPS)
    return record.tape


def _trainer(flags: dict[str, Any], observer: Callback, seed: int) -> Trainer:
    trainer = Trainer(**{**flags, "callbacks": [*flags.get("callbacks", ()), observer]})
    trainer.seed = seed
    return trainer


class _AloneEnvironment(ClusterEnvironment):
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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.take(_Observation(trainer.global_step, INITIAL, self._whole(trainer)[0]))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        step = trainer.global_step
        if step == self._reduced:  # a closure that is called again: what comes then follows from the first call
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
        """Values and gradients of the module's parameters, whole, however the engine holds them. Collective."""
        values: dict[str, Tensor | None] = {}
        gradients: dict[str, Tensor | None] = {}
        of_module = {plain_name(name) for name, _ in trainer.lightning_module.named_parameters()}
        for name, value, gradient in trainer.strategy.whole_parameters():
            if name in of_module:
                values[name] = value  # gradients may be whole only while they are looked at
                gradients[name] = None if gradient is None else gradient.clone()
        return values, gradients

    def _on_any_batch_end(self, trainer: Trainer, pl_module: LightningModule, batch_idx: int) -> None:
        self.on_train_batch_end(trainer, pl_module, None, None, batch_idx)


class _ProcessRecorder(_Observer):
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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.strategy.drives_all_devices:
            return  # one rank, whose strategy would not share out what is no method of the module
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
                    RankFinding(observation.step, observation.what, name, size, scale, digest(found))
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
        self._mine.findings.append(RankFinding(step, STEPS, "", math.inf, 0.0, ""))


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
