"""State that a resume needs besides weights and optimizers to continue bit-identically.

A checkpoint can be saved between any two micro-batches, in a validation, or by a rank that failed alone. A resume
continues at the same place, with the same ranks or with others. `Resume` stores this state while a fit runs;
`loop/state.py` writes it to a checkpoint and restores it.

**Within a window** a resume continues in one of two ways. With the same number of replicas, or in manual optimization,
it loads the gradients of the window's finished micro-batches and continues after them. Otherwise it repeats the window,
and restores what the micro-batches have changed, so that nothing counts twice: logged values, torchmetrics objects,
buffers (`loop/window_start.py`), and the counters of `Progress`.

**On other ranks** each rank loads its own entry if the ranks form the same replicas as before. Otherwise:

- Logged values, torchmetrics objects and the state at the window's start are distributed: each new replica merges those
  of some saved replicas.
- States of loaders, of random generators, and of buffers within a window are loaded only if the number of replicas is
  the same.
- Each replica gets the mean of the window's gradients over the saved replicas, and its share of the loss weights.
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
"""One rank's entry in a checkpoint: "random", "data", "results", "metrics"; within a window also "window_start",
"weights" and gradients."""


@dataclass
class Resume:
    """State of a fit, besides weights and optimizers, that its checkpoints need for a resume.

    Attributes:
        entry: this rank's entry of the checkpoint, until training continues.
        lacks_logged: True if the checkpoint lacks the logged values of the epoch within which the fit continues.
        cut_epoch: logged values of an epoch that a limit or Ctrl-C ended early, for a checkpoint.
        validation: random states and metrics at the start of the current validation, or None. A resume repeats the
            validation.
        batches: the plan that counts batches, which may come from a run on other ranks.
        counted: converts a number of this rank's micro-batches to the count in the run's plan.
        shares: the ranks' shares of the samples in the checkpoint; None: all shares were equal.
        window_start: state at the start of the current window, which its micro-batches change.
        hook_changes: parameters and submodules that hooks have frozen, unfrozen or switched to eval mode.
    """

    entry: RankEntry | None = None
    lacks_logged: bool = False
    cut_epoch: RankEntry | None = None
    validation: ValidationStart | None = None
    # lambdas, since these classes are defined below
    batches: RunBatches = field(default_factory=lambda: RunBatches())
    counted: Callable[[int], int] = int
    shares: dict[str, Any] | None = None
    window_start: WindowStart = field(default_factory=WindowStart)
    hook_changes: HookChanges = field(default_factory=lambda: HookChanges())

    def __getstate__(self) -> dict[str, Any]:
        return kept(self, "entry", "counted")


@dataclass(frozen=True)
class ValidationStart:
    """Random states and metrics as they were at the start of a validation."""

    random: dict[str, Any]
    metrics: dict[str, Any]


# -- on other ranks ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedRanks:
    """Entries of a checkpoint, one for each rank of the run that saved the checkpoint, and each rank's replica."""

    parts: Sequence[RankEntry]
    of_rank: tuple[int, ...]
    """Replica number of each rank."""

    @classmethod
    def read(cls, own: dict[str, Any]) -> SavedRanks:
        """Read the ranks' entries and replicas from the checkpoint's entry "lockstep".

        Raises:
            ValueError: the replicas do not match the entries.
        """
        parts, of_rank = own["ranks"], own["replicas"]
        if len(of_rank) != len(parts) or set(of_rank) != set(range(max(of_rank, default=-1) + 1)):
            raise ValueError(f"'replicas' is {of_rank!r:.50}, but there are {len(parts)} ranks")
        return cls(parts, tuple(of_rank))

    @property
    def count(self) -> int:
        """Number of replicas."""
        return max(self.of_rank) + 1

    def members(self, replica: int) -> list[int]:
        """Return the ranks that belong to a replica."""
        return [rank for rank, its in enumerate(self.of_rank) if its == replica]

    @property
    def of_replicas(self) -> list[RankEntry]:
        """List of entries, one for each replica: the entry of the replica's first rank."""
        return [self.parts[self.of_rank.index(replica)] for replica in range(self.count)]

    @property
    def has_logged_values(self) -> bool:
        """True if the checkpoint has the logged values of all ranks; False if a single rank saved it alone."""
        return all("results" in part for part in self.of_replicas if part)  # an entry that was not read is empty

    def part_for(self, rank: int, replicas: ReplicaMap, cuts: bool, first_logs: bool) -> RankEntry:
        """Return the entry from which ``rank`` of the resumed run continues. Replicas may differ from the checkpoint's.

        Args:
            rank: rank in the resumed run.
            replicas: replicas of the resumed run.
            cuts: True if the engine of the resumed run shards gradients.
            first_logs: True if only the first rank of each replica weights losses.
        """
        # the same ranks continue from their own entries, to the same bits
        same_form = not self.holds_gradients or cuts == any("sharded" in part for part in self.parts)
        if self.of_rank == replicas.of_rank and same_form:
            return self.parts[rank]
        each = self.of_replicas
        mine = each[replicas.index :: replicas.count]
        part: RankEntry = joined(mine)
        if _saved(each, "window_start"):
            # values that are the same on all ranks: rank 0's buffers are those of the checkpoint
            first = self.parts[0].get("window_start") or {}
            shared = {key: first.get(key, {}) for key in ("buffers", "published")}
            part["window_start"] = {**joined(_saved(mine, "window_start")), **shared}
        part["data"] = of_all_ranks(self.parts[0].get("data"))
        if self.count == replicas.count:
            part.update(_select(mine[0], "data", "random", "buffers"))
        if self.holds_gradients:
            part["of others"] = self  # their gradients are joined when shapes are known
            weighs = not first_logs or rank in replicas.first_ranks
            weights = _saved(mine, "weights")
            part["weights"] = sum(weights) if weights and weighs else None
        return part

    @property
    def holds_gradients(self) -> bool:
        """True if the checkpoint has gradients: it was saved within a window, or in manual optimization."""
        return any("gradients" in part for part in self.parts)

    def mean_gradients(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return full gradients by name, averaged over the replicas. A missing gradient counts as zeros.

        Args:
            shapes: shapes of the unsharded parameters by name.
        """
        # a checkpoint within a window alone has gradients to put together
        from lockstep.engines.sharded.fully_shard import whole_gradients

        found: dict[str, Tensor] = {}
        for replica in range(self.count):
            for name, gradient in whole_gradients(self.parts, self.members(replica), shapes).items():
                found[name] = found[name] + gradient if name in found else gradient
        return {name: gradient / self.count for name, gradient in found.items()} if self.count > 1 else found


def joined(parts: Sequence[RankEntry]) -> RankEntry:
    """Return one entry with the merged logged values and metrics of several saved replicas' entries."""
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for name, state in part.get("metrics", {}).items():
            metrics.setdefault(name, []).extend(state if isinstance(state, list) else [state])
    return {"results": merged([part.get("results", []) for part in parts]), "metrics": metrics}


def _saved(parts: Sequence[RankEntry], key: str) -> list[Any]:
    """Return ``part[key]`` for each part that has the key with a value other than None."""
    return [part[key] for part in parts if part.get(key) is not None]


def at_window_start(part: RankEntry, restarts_epoch: bool) -> RankEntry:
    """Return a rank's entry as of the start of the current window, for a resume that repeats the window.

    Args:
        part: the rank's entry.
        restarts_epoch: True if the window is the first of its epoch, so that the epoch's start hooks run again.
    """
    start = part.get("window_start") or {}
    found = {**_select(part, "data", "random"), **_select(start, "metrics", "published")}
    found["buffers_at_start"] = start.get("buffers", {})
    return found if restarts_epoch else {**found, **_select(start, "results")}


def _select(part: RankEntry, *keys: str) -> RankEntry:
    """Return a copy of ``part`` that contains only ``keys``."""
    return {key: part[key] for key in keys if key in part}


class RunBatches:
    """Recorder of how a run counts its batches, from which a resume on a different number of ranks finds its position.

    Attributes:
        saved: plan from the checkpoint that the fit resumes from; None once training continues.
    """

    def __init__(self) -> None:
        self.saved: BatchPlan | None = None
        self._ranks: int | None = None  # of the plan, once it is settled
        self._flag: Accumulation = 1  # as passed to the fit; callbacks may change the config later
        self._by_hooks: Accumulation | None = None  # the value that hooks of the checkpoint's run had set

    @property
    def planned(self) -> int | None:
        """Number of ranks for which the plan counts batches, or None if there is no plan yet."""
        return self._ranks if self.saved is None else self.saved.ranks

    def read(self, own: dict[str, Any]) -> None:
        """Read the plan from a checkpoint's entry "lockstep"."""
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
        """Return the `BatchCounting`, the rules by which a fit with these loaders counts its batches.

        Args:
            config: config of the fit.
            automatic: True under automatic optimization.
            ranks: number of ranks that read different samples.
            batches: the ``batch_size`` of each loader.
            flexible: True if the loaders can be split into windows of any size.
            workers: number of workers that read a stream.
        """
        if self.saved is None:  # a second fit of a resumed run counts as the first did
            return BatchCounting(self._ranks or ranks, ranks)
        attempt = RunAttempt(
            ranks, config.accumulate_grad_batches, batches, flexible, automatic, config.keep_global_batch, workers
        )
        return count_batches(self.saved, attempt)

    def prepare(self, feed: Feed, config: RunConfig, epoch: int) -> None:
        """Prepare the new ``feed`` for the epoch in which training starts or continues."""
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
        """Convert the checkpoint's position to this run's batches, before training continues.

        Args:
            config: config of the fit.
            feed: training loaders of the fit.
            progress: counters of the fit, which are converted in place.
            resumed: this rank's entry of the checkpoint, or None.
            holds: True if engine and optimizers can continue with the gradients of the current window.

        Returns:
            the entry; if the current window is repeated, without the parts that then do not apply.
        """
        saved, self.saved = self.saved, None
        found = feed.counting
        self._ranks, self._flag = found.ranks, config.accumulate_grad_batches
        if saved is not None and saved.accumulate != self._flag:
            self._by_hooks = None  # the user has changed the flag
        if saved is None or resumed is None:
            return resumed
        is_within_epoch = progress.phase != EPOCH_START and not progress.last and bool(progress.batch)
        has_warned = is_within_epoch and _warn_of_changed_loaders(saved, feed)
        # torch's sampler draws another permutation for several ranks than for one process
        other_order = saved.at.rows > 0 and saved.by_process not in (None, feed.by_process)
        if is_within_epoch and not has_warned and config.order == "torch" and other_order:
            rank_zero_warn(
                'Trainer(order="torch"): one process draws a different permutation than several processes, so in the '
                "rest of this epoch some samples may be seen twice and some never."
            )
        found.report()
        inside = progress.batch > saved.at.number and not progress.last
        again = inside and (found.moved or not holds)
        if not (found.moved or again):
            return resumed
        number = found.resumed_number if found.moved else saved.at.number or None
        progress.reshare(saved.at.number, number)
        # the same samples, in batches of other sizes
        row_before, row_now = saved.ranks * max(saved.batches, default=1), found.ranks * max(feed.batches, default=1)
        progress.validated = progress.validated * row_before // row_now
        return at_window_start(resumed, number is None) if again else resumed

    def restore_hook_flags(self, config: RunConfig) -> RunConfig:
        """Return the config with the ``accumulate_grad_batches`` that hooks had set before the checkpoint was saved."""
        by_hooks, self._by_hooks = self._by_hooks, None
        return config if by_hooks is None else set_flag(config, "accumulate_grad_batches", by_hooks)

    def state_dict(self, config: RunConfig, feed: Feed | None, progress: Progress, done: int) -> dict[str, Any] | None:
        """Return the plan for counting batches and the fit's position in the plan, to save in a checkpoint.

        Args:
            config: config of the fit, with changes by hooks.
            feed: training loaders; None before they exist.
            progress: counters of the fit.
            done: number of finished batches in the current window.
        """
        if feed is None:
            return None
        found, at = feed.counting, ResumePoint(progress.epoch, 0, 0)
        if progress.phase != EPOCH_START:
            at = feed.reached(progress.batch - done)
        point = found.resumed_at
        before = point if point is not None and point.epoch == progress.epoch else None
        plan = BatchPlan(
            found.ranks, self._flag, feed.batches, found.size, at, before, feed.by_process, feed.orders
        ).state_dict()
        newest = config.accumulate_grad_batches
        return plan if newest == self._flag else {**plan, "by hooks": newest}


# -- what hooks have changed ---------------------------------------------------------------------------------


Flags = Mapping[str, bool]
ModuleFlags = dict[str, Flags]
"""Flags by name: "trained" (``requires_grad`` of parameters) and "training" (mode of submodules)."""


class HookChanges:
    """Recorder of the changes that hooks make to ``requires_grad`` and train or eval modes once training has started.

    A checkpoint saves the changes, because a hook at the start of an epoch does not run again after a resume in that
    epoch or later.

    Attributes:
        outside: the mode of each submodule before the current evaluation; None outside of evaluations.
    """

    def __init__(self) -> None:
        self.outside: Flags | None = None
        self._at_start: ModuleFlags | None = None
        self._at_end: ModuleFlags | None = None  # what the user changes after the fit does not count
        self._saved: ModuleFlags = {}

    def load(self, saved: ModuleFlags) -> None:
        """Load changes from a checkpoint; :meth:`begin` applies them.

        Raises:
            TypeError: a value is not a bool.
        """
        for what in ("trained", "training"):
            if not all(isinstance(value, bool) for value in saved[what].values()):
                raise TypeError(f"{what!r} of a hook's changes must contain only bools, but is {saved[what]!r:.50}")
        self._saved = saved

    def begin(self, strategy: Strategy, module: LightningModule) -> None:
        """Record ``requires_grad`` and modes after ``on_train_start``, and apply the changes from the checkpoint."""
        self._at_start = self._flags_of(module)
        parameters, parts = strategy.named_parameters(), dict(module.named_modules())
        for name, needed in self._saved.get("trained", {}).items():
            if name in parameters and parameters[name].requires_grad is not needed:
                strategy.set_requires_grad(parameters[name], needed)  # the reducer counts the parameters of its buckets
        for name, training in self._saved.get("training", {}).items():
            if name in parts:
                parts[name].training = training

    def end(self, module: LightningModule) -> None:
        """Record ``requires_grad`` and train or eval modes after the last epoch."""
        self._at_end = self._flags_of(module)

    def state_dict(self, module: LightningModule) -> ModuleFlags:
        """Return the changed values of ``requires_grad`` and modes, by name; an empty dict if nothing changed."""
        if self._at_start is None:
            return self._saved
        now = self._at_end or self._flags_of(module)
        changes = {what: _changed(before, now[what]) for what, before in self._at_start.items()}
        return dict(changes) if any(changes.values()) else {}

    def _flags_of(self, module: LightningModule) -> ModuleFlags:
        """Return the current values of ``requires_grad`` and modes, without the effect of ``toggle_optimizer``."""
        toggled = module._toggled
        trained = {plain_name(n): toggled.get(p, p.requires_grad) for n, p in module.named_parameters()}
        return {"trained": trained, "training": self.outside or modes_of(module)}


def modes_of(module: nn.Module) -> dict[str, bool]:
    """Map each submodule's name to its ``training`` flag."""
    return {name: part.training for name, part in module.named_modules()}


def _changed(before: Flags, now: Flags) -> dict[str, bool]:
    """Return the flags in ``now`` that differ from ``before``."""
    return {name: value for name, value in now.items() if before.get(name, value) is not value}


# -- loaders that differ from those of the epoch's start ------------------------------------------------------


def _warn_of_changed_loaders(saved: BatchPlan, feed: Feed) -> bool:
    """Warn and return True if the loaders of a resumed epoch yield samples in a different order than before."""
    now, before = feed.orders, saved.orders
    if before is None:
        return False
    if len(now) != len(before):
        _warn_of_change("There are", f"{len(now)} training loaders, but there were {len(before)}")
        return True
    has_warned = False
    for number, (order, old) in enumerate(zip(now, before, strict=True)):
        if saved.workers is not None:  # the stream is read again; a change of its workers is reported elsewhere
            old = old._replace(workers=order.workers)
        change = order.change(old)
        if change:
            name = f"train_dataloader[{number}]" if len(now) > 1 else "train_dataloader"
            _warn_of_change(f"The samples of {name} are now", change)
            has_warned = True
    return has_warned


def _warn_of_change(what: str, change: str) -> None:
    rank_zero_warn(
        f"trainer.fit: the run continues within an epoch. {what} {change}: in this epoch some samples may be seen "
        "twice and some never. Resume with the loaders of the saved run, or from a checkpoint of the end of an epoch."
    )
