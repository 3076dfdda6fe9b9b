"""What a fit continues from besides weights and optimizers, so that a resumed run ends in the same bits.

A checkpoint can be saved between any two micro-batches, in a validation, or by a rank that failed alone. A resume
continues at the same place, with the same ranks or with others. `Resume` holds what that takes while a fit runs;
`loop/state.py` writes it to a checkpoint and restores it.

**Within a window** there are two ways to continue. Where the gradients of its first micro-batches can be taken over,
they are, and the window continues after them. Else the window is played again from its beginning, and what its
micro-batches have changed is put back, so that nothing counts twice: logged values, torchmetrics objects, buffers
(`loop/window_start.py`), and the counters of `Progress`. Gradients can be taken over where there are as many replicas,
and in manual optimization.

**On other ranks** each rank gets what it had, if the ranks are in the same replicas as before. Else it depends on whose
a quantity is:

- Logged values, torchmetrics objects and the window's beginning are each replica's. The replicas that continue share
  out those of the saved ones among them.
- States of loaders, of random generators, and of buffers within a window are each replica's, too. They are taken over
  where there are as many replicas.
- Gradients of the window and the weights of its losses are the run's. Each replica gets the mean of the gradients, and
  its part of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.config.run import RunConfig, accumulation, set_flag
from lockstep.data.counting import Accumulation, BatchCounting, BatchPlan, ResumePoint, RunAttempt, count_batches
from lockstep.data.feed import Feed
from lockstep.data.source import of_all_ranks
from lockstep.engines.collectives import ReplicaMap
from lockstep.engines.sharded.fully_shard import whole_gradients
from lockstep.ground.methods import kept
from lockstep.ground.parameters import plain_name
from lockstep.ground.rank import rank_zero_warn
from lockstep.loop.logged_entry import merged
from lockstep.loop.progress import EPOCH_START, Progress
from lockstep.loop.window_start import WindowStart

if TYPE_CHECKING:
    from lockstep.engines.strategy import Strategy
    from lockstep.module import LightningModule


RankEntry = dict[str, Any]
"""What a checkpoint holds of one rank: "random", "data", "results", "metrics"; within a window "window_start",
"weights" and gradients."""


@dataclass
class Resume:
    """What a fit continues from, and what a checkpoint of it needs for that.

    Attributes:
        entry: this rank's entry of the checkpoint, until training continues.
        lacks_logged: the checkpoint does not hold what was logged in the epoch within which the fit continues.
        cut_epoch: what an epoch that ended early had logged, for a checkpoint.
        validation: random states and torchmetrics objects at the beginning of the validation under way, which a resume
            plays again; None: there is none.
        batches: the counting of batches on other ranks.
        counted: micro-batches of this rank's epoch as the run's plan counts them.
        shares: the ranks' shares in the checkpoint; None: they were equal.
        window_start: what the micro-batches of the window under way change, as it was before them.
        hook_changes: what hooks have frozen, thawed or switched to eval mode since training began.
    """

    entry: RankEntry | None = None
    lacks_logged: bool = False
    cut_epoch: RankEntry | None = None
    validation: ValidationStart | None = None
    batches: RunBatches = field(default_factory=lambda: RunBatches())
    counted: Callable[[int], int] = int
    shares: dict[str, Any] | None = None
    window_start: WindowStart = field(default_factory=WindowStart)
    hook_changes: HookChanges = field(default_factory=lambda: HookChanges())

    def __getstate__(self) -> dict[str, Any]:
        return kept(self, "entry", "counted")


@dataclass(frozen=True)
class ValidationStart:
    """What a validation changes, as it was before."""

    random: dict[str, Any]
    metrics: dict[str, Any]


# -- on other ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRanks:
    """The ranks of the attempt that saved, by the samples that they saw."""

    parts: Sequence[RankEntry]
    of_rank: tuple[int, ...]
    """The replica of each rank."""

    @classmethod
    def read(cls, own: dict[str, Any]) -> SavedRanks:
        """From lockstep's part of a checkpoint.

        Raises:
            ValueError: replicas that cannot be.
        """
        parts, of_rank = own["ranks"], own["replicas"]
        if len(of_rank) != len(parts) or set(of_rank) != set(range(max(of_rank, default=-1) + 1)):
            raise ValueError(f"replicas is {of_rank!r:.50}, of {len(parts)} ranks")
        return cls(parts, tuple(of_rank))

    @property
    def count(self) -> int:
        """Number of replicas."""
        return max(self.of_rank) + 1

    def members(self, replica: int) -> list[int]:
        """The ranks of a replica."""
        return [rank for rank, its in enumerate(self.of_rank) if its == replica]

    @property
    def of_replicas(self) -> list[RankEntry]:
        """The parts of each replica's first rank, which stand for all of the replica's."""
        return [self.parts[self.of_rank.index(replica)] for replica in range(self.count)]

    @property
    def knows_logged(self) -> bool:
        """Whether what the epoch had logged is there: a rank that saved alone did not know that of the others."""
        return all("results" in part for part in self.of_replicas if part)  # a part that nobody has read is empty

    def _window_start(self, mine: Sequence[RankEntry]) -> RankEntry:
        """The beginning of the window under way, for a rank that stands for several; buffers are rank 0's."""
        first = self.parts[0].get("window_start") or {}
        alike = {key: first.get(key, {}) for key in ("buffers", "published")}
        return {**joined(_saved(mine, "window_start")), **alike}

    def part_for(self, rank: int, replicas: ReplicaMap, cuts: bool, first_logs: bool) -> RankEntry:
        """What a rank goes on with.

        Args:
            rank: of this attempt.
            replicas: of this attempt.
            cuts: whether its engine holds gradients in shards.
            first_logs: whether of each replica the first rank alone weighs losses.
        """
        alike = not self.holds_gradients or cuts == any("sharded" in part for part in self.parts)
        if self.of_rank == replicas.of_rank and alike:
            return self.parts[rank]
        each = self.of_replicas
        mine = each[replicas.index :: replicas.count]
        part: RankEntry = joined(mine)
        if _saved(each, "window_start"):
            part["window_start"] = self._window_start(mine)
        part["data"] = of_all_ranks(self.parts[0].get("data"))
        if self.count == replicas.count:
            part.update(_those(mine[0], "data", "random", "buffers"))
        if self.holds_gradients:
            part["of others"] = self
            weighs = not first_logs or rank in replicas.first_ranks
            weights = _saved(mine, "weights")
            part["weights"] = sum(weights) if weights and weighs else None
        return part

    @property
    def holds_gradients(self) -> bool:
        """Whether a window was under way, or steps were by hand."""
        return any("gradients" in part for part in self.parts)

    def mean_gradients(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Whole gradients, the mean over the replicas; a replica without one counts as zeros.

        Args:
            shapes: of the whole parameters.
        """
        found: dict[str, Tensor] = {}
        for replica in range(self.count):
            for name, gradient in whole_gradients(self.parts, self.members(replica), shapes).items():
                found[name] = found[name] + gradient if name in found else gradient
        return {name: gradient / self.count for name, gradient in found.items()} if self.count > 1 else found


def joined(parts: Sequence[RankEntry]) -> RankEntry:
    """What several replicas had logged, as one goes on with it."""
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for name, state in part.get("metrics", {}).items():
            metrics.setdefault(name, []).extend(state if isinstance(state, list) else [state])
    return {"results": merged([part.get("results", []) for part in parts]), "metrics": metrics}


def _saved(parts: Sequence[RankEntry], key: str) -> list[Any]:
    """What parts hold under a key, those left out that hold nothing."""
    return [part[key] for part in parts if part.get(key) is not None]


def at_window_start(part: RankEntry, anew: bool) -> RankEntry:
    """What a rank goes on with that plays the window under way again.

    Args:
        part: of the rank.
        anew: it is the epoch's first, and the epoch begins anew, with all that its hooks log.
    """
    start = part.get("window_start") or {}
    found = {**_those(part, "data", "random"), **_those(start, "metrics", "published")}
    found["buffers_at_start"] = start.get("buffers", {})
    return found if anew else {**found, **_those(start, "results")}


def _those(part: RankEntry, *keys: str) -> RankEntry:
    """What a part holds under some keys, as far as it does."""
    return {key: part[key] for key in keys if key in part}


class RunBatches:
    """By what one Trainer's fits count their batches.

    Attributes:
        saved: the plan of the checkpoint that the fit goes on from, until training goes on.
    """

    def __init__(self) -> None:
        self.saved: BatchPlan | None = None
        self._ranks: int | None = None  # those of the plan, once it is settled
        self._flag: Accumulation = 1  # as it is given to the fit, whatever callbacks make of it later
        self._by_hooks: Accumulation | None = None  # what those of a checkpoint's run had made of it

    @property
    def planned(self) -> int | None:
        """The number of ranks of the plan, where it is known."""
        return self._ranks if self.saved is None else self.saved.ranks

    def read(self, own: dict[str, Any]) -> None:
        """Take in lockstep's part of a checkpoint that a fit is to go on from."""
        self._ranks = self._by_hooks = None
        if own.get("plan") is not None:
            self.saved = BatchPlan.load(own["plan"])
            by_hooks = own["plan"].get("by hooks")
            self._by_hooks = None if by_hooks is None else accumulation("accumulate_grad_batches", by_hooks)

    def counting(
        self,
        config: RunConfig,
        automatic: bool,
        ranks: int,
        batches: list[int],
        flexible: bool,
        workers: int | None = None,
    ) -> BatchCounting:
        """How the fit counts.

        Args:
            config: of the fit.
            automatic: whether optimization is.
            ranks: that see samples of their own.
            batches: the ``batch_size`` of its loaders.
            flexible: whether these can be cut into windows of any size.
            workers: that read a stream.
        """
        if self.saved is None:
            return BatchCounting(self._ranks or ranks, ranks)
        attempt = RunAttempt(
            ranks, config.accumulate_grad_batches, batches, flexible, automatic, config.keep_global_batch, workers
        )
        return count_batches(self.saved, attempt)

    def prepare(self, feed: Feed, config: RunConfig, epoch: int) -> None:
        """Have a new feed know the epoch that it goes on in, before that is begun."""
        epoch = epoch if self.saved is None else self.saved.at.epoch
        feed.prepare(epoch, config.accumulation(epoch))

    def settle(
        self,
        config: RunConfig,
        feed: Feed,
        progress: Progress,
        resumed: dict[str, Any] | None,
        holds: bool = True,
    ) -> dict[str, Any] | None:
        """The loaders are there and training is about to begin: go on by the counting that they allow.

        Args:
            config: of the fit.
            feed: its loaders.
            progress: its counters, which are moved to the same place in this rank's count.
            resumed: this rank's part of the checkpoint.
            holds: whether gradients of a window under way can be taken over, by its engine and optimizers.

        Returns:
            what of that part still holds.
        """
        saved, self.saved = self.saved, None
        found = feed.counting
        self._ranks, self._flag = found.ranks, config.accumulate_grad_batches
        if saved is not None and saved.accumulate != self._flag:
            self._by_hooks = None  # the user has set the flag anew
        if saved is None or resumed is None:
            return resumed
        warn_within_epoch(config, saved, feed, progress)
        found.tell()
        inside = progress.batch > saved.at.number and not progress.last
        again = inside and (found.moved or not holds)
        if not (found.moved or again):
            return resumed
        number = found.resumed_number if found.moved else saved.at.number or None
        progress.reshare(saved.at.number, number)
        row_before, row_now = saved.ranks * max(saved.batches, default=1), found.ranks * max(feed.batches, default=1)
        progress.validated = progress.validated * row_before // row_now
        return at_window_start(resumed, number is None) if again else resumed

    def as_hooks_left_it(self, config: RunConfig) -> RunConfig:
        """The config of a fit that goes on, with the accumulation that hooks had set which do not run again."""
        by_hooks, self._by_hooks = self._by_hooks, None
        return config if by_hooks is None else set_flag(config, "accumulate_grad_batches", by_hooks)

    def state_dict(self, config: RunConfig, feed: Feed | None, progress: Progress, begun: int) -> dict[str, Any] | None:
        """For a checkpoint: the plan, and how far it has come.

        Args:
            config: of the fit, as hooks have left it.
            feed: the training loaders; None before they are asked for.
            progress: the fit's.
            begun: batches of a window under way.
        """
        if feed is None:
            return None
        found, at = feed.counting, ResumePoint(progress.epoch, 0, 0)
        if progress.phase != EPOCH_START:
            at = feed.reached(progress.batch - begun)
        point = found.resumed_at
        before = point if point is not None and point.epoch == progress.epoch else None
        plan = BatchPlan(
            found.ranks, self._flag, feed.batches, found.size, at, before, feed.by_process, feed.orders
        ).state_dict()
        newest = config.accumulate_grad_batches
        return plan if newest == self._flag else {**plan, "by hooks": newest}


# -- what hooks have changed ---------------------------------------------------------------------------------


Flags = Mapping[str, bool]
Noted = dict[str, Flags]
"""Which parameters are "trained", and which parts are in "training" mode, by name."""


class HookChanges:
    """Which parameters have been frozen or thawed, and which parts have changed their mode, since training began.

    A hook that does so when an epoch begins does not run again where a fit resumes within that epoch or behind it. What
    the user does with the module behind the fit is not among them.

    Attributes:
        outside: the mode of each part outside of the evaluation under way; None: there is none.
    """

    def __init__(self) -> None:
        self.outside: Flags | None = None
        self._begun: Noted | None = None
        self._ended: Noted | None = None
        self._saved: Noted = {}

    def load(self, saved: Noted) -> None:
        """Take changes out of a checkpoint, for `begin`.

        Raises:
            TypeError: they are none.
        """
        for what in ("trained", "training"):
            if not all(isinstance(value, bool) for value in saved[what].values()):
                raise TypeError(f"{what!r} of a hook's changes is {saved[what]!r:.50}")
        self._saved = saved

    def begin(self, strategy: Strategy, module: LightningModule) -> None:
        """Training begins, behind ``on_train_start``: note what is trained, and make the changes of the checkpoint."""
        self._begun = self._noted(module)
        parameters, parts = strategy.named_parameters(), dict(module.named_modules())
        for name, needed in self._saved.get("trained", {}).items():
            if name in parameters and parameters[name].requires_grad is not needed:
                strategy.set_requires_grad(parameters[name], needed)
        for name, training in self._saved.get("training", {}).items():
            if name in parts:
                parts[name].training = training

    def end(self, module: LightningModule) -> None:
        """The last epoch has ended."""
        self._ended = self._noted(module)

    def state_dict(self, module: LightningModule) -> Noted:
        """The changes, by name; nothing where there are none."""
        if self._begun is None:
            return self._saved
        now = self._ended or self._noted(module)
        changes = {what: _changed(before, now[what]) for what, before in self._begun.items()}
        return dict(changes) if any(changes.values()) else {}

    def _noted(self, module: LightningModule) -> Noted:
        """What is trained now, but for what the steps of manual optimization toggle."""
        toggled = module._toggled
        trained = {plain_name(n): toggled.get(p, p.requires_grad) for n, p in module.named_parameters()}
        return {"trained": trained, "training": self.outside or modes_of(module)}


def modes_of(module: nn.Module) -> dict[str, bool]:
    """Whether each part of a module is in training mode, by name."""
    return {name: part.training for name, part in module.named_modules()}


def _changed(before: Flags, now: Flags) -> dict[str, bool]:
    """What is another one now."""
    return {name: value for name, value in now.items() if before.get(name, value) is not value}


# -- other loaders than those that the epoch was begun with ---------------------------------------------------


def _warn_of_other_order(saved: BatchPlan, feed: Feed) -> None:
    """Where an epoch in torch's order goes on: one process and several draw differently."""
    if saved.at.rows > 0 and saved.by_process not in (None, feed.by_process):
        rank_zero_warn(
            'Trainer(order="torch"): one process draws another permutation than several, so that of what is left '
            "of this epoch some samples come twice and some never."
        )


def warn_within_epoch(config: RunConfig, saved: BatchPlan, feed: Feed, progress: Progress) -> None:
    """Where a fit goes on in the middle of an epoch: warn of what keeps its samples from coming once each."""
    if progress.phase == EPOCH_START or progress.last or not progress.batch:
        return
    has_warned = _warn_of_changed_loaders(saved, feed)
    if config.order == "torch" and not has_warned:
        _warn_of_other_order(saved, feed)


def _warn_of_changed_loaders(saved: BatchPlan, feed: Feed) -> bool:
    """Where an epoch goes on, and the loaders do not give the samples in the order in which it was begun."""
    now, before = feed.orders, saved.orders
    if before is None:
        return False
    if len(now) != len(before):
        _warn_of_change("There are", f"{len(now)} training loaders, before {len(before)}")
        return True
    has_warned = False
    for number, (order, old) in enumerate(zip(now, before, strict=True)):
        if saved.workers is not None:  # the stream is read again, and its workers are told of
            old = old._replace(workers=order.workers)
        change = order.change(old)
        if change:
            name = f"train_dataloader[{number}]" if len(now) > 1 else "train_dataloader"
            _warn_of_change(f"The samples of {name} are", change)
            has_warned = True
    return has_warned


def _warn_of_change(what: str, change: str) -> None:
    rank_zero_warn(
        f"trainer.fit: the run goes on in the middle of an epoch. {what} {change}: of this epoch some samples may be "
        "seen twice and some never. Resume with the loaders that it had, or from a checkpoint of the end of an epoch."
    )
