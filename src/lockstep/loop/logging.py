"""LogCollector, which records ``self.log`` values and reduces them over steps and ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lockstep.engines.strategy import Strategy
from lockstep.ground.comm import Combine
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.numbers import floats
from lockstep.ground.rank import does, warn_once
from lockstep.loop.logged_entry import LOGGING, Entry, Key, Options
from lockstep.loop.logged_rows import (
    NEUTRAL,
    Part,
    Rows,
    Total,
    each_step_wanted,
    head,
    joined,
    largest,
    part_of,
    shown_value,
)
from lockstep.loop.metrics import StatesByLoader, is_metric
from lockstep.memory.recompute import STATE

if TYPE_CHECKING:
    from torchmetrics import Metric

NEW_METRIC = (
    "self.log({name!r}, <{metric}>) in `{hook}` received a different object than before, so the epoch's value would be "
    "that of the last object alone. Create the metric once, as an attribute of the module; or log numbers, which are "
    "averaged over the epoch."
)
NOT_SAVED = (
    "self.log({name!r}, <{metric}>): the metric is not an attribute of the module (it may be in a list), so this "
    "checkpoint does not contain the state of the metric in this epoch: make it an attribute, or put it into a "
    "`torch.nn.ModuleList`."
)
_PLACES = {hook: place for place, hook in enumerate(LOGGING)}
_COMPARED = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "add_dataloader_idx", "rank_zero_only")
"""Names of the options that `Entry.normal` returns, in its order."""

LogSnapshot = dict[Key, tuple[Any, ...]]
"""Snapshots of all entries, by key."""
Reader = Callable[[Entry], tuple[Any, float, int]]  # (value, weight, the micro-batch of a step's value; 0: an epoch's)


def _place(key: Key) -> tuple[int, Key]:
    """Return the value by which logged entries are sorted, so that all ranks have the same order."""
    return _PLACES[key[0]], key


def _newest(entry: Entry) -> tuple[Any, float, int]:
    """Return (value, weight, micro-batch) from the last step in which an entry was logged."""
    return entry.last, entry.last_weight if entry.step_fresh else 0.0, entry.step_fresh


def _hash(fresh: list[Entry]) -> int:
    """Return a hash of a rank's logged entries. Ranks with the same entries get the same hash."""
    names = repr([(entry.key, entry.op, entry.metric is not None, entry.dtype) for entry in fresh])
    return zlib.crc32(names.encode())


class LogCollector:
    """Collector that records the ``self.log`` values of one stage (training or an evaluation) and reduces them.

    Values of single steps are this rank's own until one of these reductions, which are collective: :meth:`reduce_step`
    at logging intervals; :meth:`agree_on_step` before a decision depends on them, and after every micro-batch once any
    rank has logged one with ``sync_dist=True``.

    Attributes:
        each_step: True if the loop calls :meth:`agree_on_step` after the current micro-batch; the same on all ranks.
        among_batches: True while an epoch's batches run: readers then see values of single steps, else of the epoch.
        ended: True if the evaluation has ended except for its last hook: a resume does not restore metrics.

    Args:
        combined: combines float64 vectors of equal length from all ranks by a function.
        from_zero: sends rank 0's result of a function on a small Python object of each rank to every rank.
        world_size: number of ranks.
        rank: this rank.
        on_cpu: True if values are on the CPU, where reading a number waits for no device.
        counted: the ranks whose values count, one of each replica; None: all ranks have different samples.
        module: used to find torchmetrics objects by name on ranks that had no data for them.
    """

    def __init__(
        self,
        combined: Callable[[Tensor, Combine], Tensor],
        from_zero: Callable[[Any, Callable[[list[Any]], Any]], Any],
        world_size: int = 1,
        rank: int = 0,
        module: nn.Module | None = None,
        on_cpu: bool = True,
        counted: Sequence[int] | None = None,
    ) -> None:
        self._combined = combined
        self._from_zero = from_zero
        self._world_size = world_size
        self._rank = rank
        self._module = module
        self._on_cpu = on_cpu
        self._counts = counted is None or rank in counted
        self._combine_on_device: Callable[[Tensor, Combine], Tensor] | None = None
        self._device = torch.device("cpu")
        self._capacity = 64  # number of names that fit into a row; grows on all ranks together
        # by hook and loader; sorted in the order of hooks, since the later value of a name is the one to show
        self._tables: dict[tuple[str, int], dict[str, Entry]] = {}
        self._agreed: dict[Key, tuple[Entry, str, Tensor]] = {}  # reduced, but not yet sent to the loggers
        self._by_loader: StatesByLoader | None = None  # metrics' states, in an evaluation of several loaders
        # this rank has logged with sync_dist=True; each reduction carries it, so that ranks which log different names
        # still run the same reductions
        self._wants_each_step = False
        self.each_step = world_size > 1  # until the first reduction has decided
        self.table: dict[str, Entry] | None = None
        self.hook: tuple[str, int] = ("", -1)
        self.among_batches = self.ended = False
        self.show_ahead: Callable[[], int] | None = None  # `StepParts.show_newest`, if windows are played ahead
        self.shown_until = 0  # the micro-batch after which users last saw all values
        self.micro_batch = 1  # counted by the training loop, in the same way on all ranks
        self.weight = 1.0
        self.muted = False
        trainer = getattr(module, "_trainer", None)
        self._barebones = getattr(trainer, "barebones", False)
        self._has_loggers = trainer is None or bool(trainer.loggers)

    @classmethod
    def of(cls, strategy: Strategy, module: nn.Module) -> LogCollector:
        """Create a collector for the values that ``module`` logs, with the strategy's ranks and device."""
        ranks = strategy.collectives
        device = strategy.root_device
        on_cpu = device.type == "cpu"
        replicas = strategy.replicas
        each = None if replicas.count == strategy.world_size else replicas.first_ranks
        made = cls(ranks.combined, ranks.from_zero, strategy.world_size, strategy.global_rank, module, on_cpu, each)
        if not on_cpu and strategy.world_size > 1:
            made.reduce_on_device(ranks.combined_there, device)
        return made

    def reduce_on_device(self, combined: Callable[[Tensor, Combine], Tensor], device: torch.device) -> None:
        """Reduce on_step values on the device from now on, so that ``sync_dist=True`` does not wait for the device."""
        self._combine_on_device, self._device = combined, device

    def enter(self, hook: str, dataloader_idx: int = -1) -> None:
        """Assign all values that are logged from now on to this hook and this loader."""
        self.hook = (hook, dataloader_idx)
        self.table = self._tables.get(self.hook)
        if self.table is None and hook in LOGGING:
            self.table = self._table_of(self.hook)

    def _table_of(self, hook: tuple[str, int]) -> dict[str, Entry]:
        """Return the table of entries, by name, for a (hook, loader) pair. Create the table if it is missing."""
        if hook not in self._tables:
            tables = {**self._tables, hook: {}}
            self._tables = {key: tables[key] for key in sorted(tables, key=lambda key: (_PLACES[key[0]], key))}
        return self._tables[hook]

    def log(self, name: str, value: Any, options: Options, batch_size: float | None) -> None:
        """Record a value. `LightningModule.log` calls this method for all values that its fast path does not handle."""
        if self._barebones:  # no entry is ever created, so `LightningModule.log` always ends here
            warn_once("self.log(...) records nothing under Trainer(barebones=True).", key="log in barebones mode")
            return
        if STATE.recomputing or (self.muted and not is_metric(value)):
            return  # values of a recomputed forward were logged by the first one
        table = self.table
        entry = None if table is None else table.get(name)
        if entry is None or entry.options != options:
            entry = self._open(name, options)
        if self._rank and entry.rank_zero_only:
            entry.mark(self.micro_batch)  # without a value: this rank takes part in the reduction of rank 0's
            return
        weight = self.weight if batch_size is None else checked_size(name, batch_size)
        if is_metric(value):
            self._add_metric(entry, value, weight)
        else:
            entry.add(value, weight, self.micro_batch)
            if self._on_cpu:
                entry.learn_quick(value)

    def _open(self, name: str, options: Options) -> Entry:
        """Create the entry for a name that the current hook logs, or update the options of an existing entry."""
        if not isinstance(name, str):
            raise MisconfigurationException(
                f"self.log({name!r}, ...): the name must be a str: `self.log({str(name)!r}, value)`."
            )
        if self.table is None:
            where = f"in `{self.hook[0]}`" if self.hook[0] else "outside the hooks of a run"
            raise MisconfigurationException(
                f"self.log({name!r}, ...) {where}: logging is not possible there; use `self.logger.log_metrics`, or "
                "log in a step or epoch hook."
            )
        if "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"self.log({name!r}): with several loaders, `/dataloader_idx_N` is added automatically: remove "
                "it from the name, or choose another name."
            )
        entry = Entry((*self.hook, name), options)
        if options[1] is True and not self._has_loggers:
            warn_once(f"self.log({name!r}, ..., logger=True), but the Trainer has no logger: set Trainer(logger=...).")
        known = self.table.setdefault(name, entry)
        if known is not entry:
            if known.normal() != entry.normal():
                pairs = zip(_COMPARED, known.normal(), entry.normal(), strict=True)
                changed = [
                    f"{option}={first!r}, then {option}={last!r}" for option, first, last in pairs if first != last
                ]
                raise MisconfigurationException(
                    f"self.log({name!r}, ...) was called twice in `{self.hook[0]}` with different arguments "
                    f"({'; '.join(changed)}). Pass the same arguments, or use another name."
                )
            known.options = options
            known.each_step |= entry.each_step
        self._wants_each_step |= entry.each_step
        return known

    def _add_metric(self, entry: Entry, metric: Metric, weight: float) -> None:
        """Record a torchmetrics object for the epoch's value, and its last forward's result for the step's value."""
        if entry.metric is not None and entry.metric is not metric and entry.epoch_fresh:
            kind = type(metric).__name__
            raise MisconfigurationException(NEW_METRIC.format(name=entry.key[2], hook=entry.key[0], metric=kind))
        entry.metric = metric
        entry.epoch_fresh = entry.on_epoch
        forward = metric._forward_cache  # None if the user has called `update`
        if entry.on_step and forward is not None and not self.muted:
            on_epoch, entry.on_epoch = entry.on_epoch, False
            entry.add(forward, weight, self.micro_batch)
            entry.on_epoch = on_epoch

    def end_loader(self, loader: int) -> None:
        """Store and reset the states of the metrics logged for ``loader``, one of several, after its last batch."""
        if self._by_loader is None:
            self._by_loader = StatesByLoader()
        for (_, dataloader_idx), table in self._tables.items():
            for entry in table.values():
                if entry.metric is not None and entry.epoch_fresh and dataloader_idx == loader:
                    self._by_loader.keep(entry.metric, loader)

    def _entries(self) -> list[Entry]:
        return [entry for table in self._tables.values() for entry in table.values()]

    def step_values(self, since: int = 0, for_bar: bool = False) -> list[tuple[Entry, str, Tensor]]:
        """Return this rank's last on_step values as a list of (entry, name, value), not reduced over the ranks.

        Args:
            since: only values of later micro-batches.
            for_bar: only values for the progress bar.
        """
        entries = [
            entry
            for entry in self._entries()
            if entry.step_fresh > since and entry.last_weight and (entry.prog_bar or not for_bar)
        ]
        numbers = floats([entry.last for entry in entries])
        return [
            (entry, entry.step_name, torch.tensor(number, dtype=entry.dtype))
            for entry, number in zip(entries, numbers, strict=True)
        ]

    def take_step_values(self) -> list[tuple[Entry, str, Tensor]]:
        """Return :meth:`step_values`, and mark the values as read, so that later calls do not return them."""
        values = self.step_values()
        for entry, _, _ in values:
            entry.step_fresh = 0
        return values

    @does("reducing logged values")
    def reduce_step(self) -> list[tuple[Entry, str, Tensor]]:
        """Reduce on_step values. Return all values reduced since the last call, to send them to loggers. Collective."""
        self.agree_on_step()
        values, self._agreed = list(self._agreed.values()), {}
        return values

    def agree_on_step(self) -> list[tuple[Entry, str, Tensor]]:
        """Reduce the on_step values that were logged on any rank since the last reduction. Collective.

        For each name only values from the last micro-batch count in which any rank logged the name. A rank without
        samples in that micro-batch has an older value. The next :meth:`reduce_step` returns the results for loggers.
        """
        fresh = [entry for entry in self._entries() if entry.step_fresh]
        reduced = (self._reduce if self._combine_on_device is None else self._reduce_on_device)(fresh, _newest)
        values = []
        for entry, value in reduced:
            entry.step_fresh = 0
            values.append((entry, entry.step_name, value))
            self._agreed[entry.key] = values[-1]
        return values

    def epoch_so_far(self, loader: int = -1) -> list[tuple[Entry, str, Tensor]]:
        """Return this rank's on_epoch values since the last :meth:`reduce_epoch`, without a reduction over the ranks.

        torchmetrics objects are omitted if there are several ranks or loaders, because all contribute to their values.

        Args:
            loader: only values of this loader; -1: values without a loader number.
        """
        found = []
        for entry in self._entries():
            if not entry.epoch_fresh or entry.key[1] != loader:
                continue
            if entry.metric is None:
                value = torch.tensor(shown_value(entry.op, float(entry.total), entry.weight), dtype=entry.dtype)
            elif self._world_size > 1 or self._by_loader is not None:
                continue
            else:
                number = _one_number(entry.metric.compute())
                if number is None:
                    continue
                value = number
            found.append((entry, entry.epoch_name, value))
        return found

    def snapshot(self) -> LogSnapshot:
        """Return a snapshot of all entries, for :meth:`go_back`."""
        return {entry.key: entry.snapshot() for entry in self._entries()}

    def go_back(self, snapshot: LogSnapshot) -> None:
        """Restore the values in a :meth:`snapshot`. The states of torchmetrics objects are not restored."""
        for entry in self._entries():
            if entry.key in snapshot:
                entry.go_back(snapshot[entry.key])
            else:
                entry.clear()

    @does("reducing logged values")
    def reduce_epoch(self) -> list[tuple[Entry, str, Tensor]]:
        """Reduce the on_epoch values over steps and ranks, and compute torchmetrics objects. Collective.

        Reduced entries are cleared, also their step values, so a second call returns only values that were logged after
        the first. Metrics keep their states from all loaders for the hooks at the epoch's end, until
        :meth:`reset_metrics`.
        """
        fresh = [entry for entry in self._entries() if entry.epoch_fresh]
        values = self._reduce(fresh, _epochs)
        # after the names are agreed: `compute` is collective in itself, in the same order on all ranks
        computed = self._computed([entry for entry, _ in values if entry.metric is not None])
        found = []
        for entry, value in values:
            if entry.metric is not None:
                if computed[entry.key] is None:  # the metric has no data and no value
                    continue
                number = _one_number(computed[entry.key])
                if number is None:
                    raise MisconfigurationException(
                        f"self.log({entry.key[2]!r}, {type(entry.metric).__name__}): its compute() does not return a "
                        "single number: log its parts with `self.log_dict`."
                    )
                value = number
            found.append((entry, entry.epoch_name, value))
        for entry, _ in values:
            entry.clear()
        if self._by_loader is not None:
            of_loaders = [entry.metric for entry, _ in values if entry.metric is not None and entry.key[1] >= 0]
            for metric in {id(metric): metric for metric in of_loaders}.values():
                self._by_loader.show_all(metric)
        return found

    @property
    def metrics(self) -> list[Metric]:
        """The logged torchmetrics objects, without duplicates."""
        return list({id(entry.metric): entry.metric for entry in self._entries() if entry.metric is not None}.values())

    def reset_metrics(self) -> None:
        """Reset all logged torchmetrics objects, after the hooks at the epoch's end."""
        for metric in self.metrics:
            metric.reset()

    def _computed(self, entries: list[Entry]) -> dict[Key, Any]:
        """Compute each entry's metric over all ranks, and over all loaders for which it was logged. Collective."""
        # entries of one metric are computed once: each `compute` sends the metric's states
        groups: dict[tuple[int, Any], list[Entry]] = {}
        for entry in entries:
            several = self._by_loader is not None and entry.key[1] >= 0
            groups.setdefault((id(entry.metric), entry.name if several else None), []).append(entry)
        found: dict[Key, Any] = {}
        for (_, name), alike in groups.items():
            metric = alike[0].metric
            if name is not None and self._by_loader is not None:
                self._by_loader.show(metric, sorted({entry.key[1] for entry in alike}), name)
            assert metric is not None
            value = metric.compute()
            found.update((entry.key, value) for entry in alike)
        return found

    def _reduce(self, fresh: list[Entry], read: Reader) -> list[tuple[Entry, Tensor]]:
        """Reduce entries over the ranks. Names are compared by a hash and sent only if hashes differ. Collective."""
        fresh.sort(key=lambda entry: _place(entry.key))
        if self._world_size > 1:
            fresh, totals = self._exchange(fresh, read)
        else:
            totals = [part[:2] for part in self._local_parts(fresh, read)]
        if read is _epochs:
            totals = _over_loaders(fresh, totals)
        return [
            (entry, torch.tensor(shown_value(entry.op, *total), dtype=entry.dtype))
            for entry, total in zip(fresh, totals, strict=True)
        ]

    def _reduce_on_device(self, fresh: list[Entry], read: Reader) -> list[tuple[Entry, Tensor]]:
        """Reduce entries as :meth:`_reduce` does, but on the device and without waiting for it. Collective."""
        assert self._combine_on_device is not None
        fresh.sort(key=lambda entry: _place(entry.key))
        mine = torch.tensor(head(_hash(fresh), len(fresh), self._wants_each_step), dtype=torch.float64)
        agreed = self._combined(mine, largest)
        self.each_step = each_step_wanted(agreed)
        if Rows([], self._capacity, True).ranks_differ(agreed):
            fresh = self._agree_on_names(fresh)
        if not fresh:
            return []
        rows = Rows([entry.op for entry in fresh], self._capacity, True)
        parts = [read(entry) if self._counts else (NEUTRAL[entry.op], 0.0, 0) for entry in fresh]
        shown = rows.shown(self._combine_on_device(rows.make_on(self._device, parts), rows.combine))
        return [(entry, value.to(entry.dtype)) for entry, value in zip(fresh, shown, strict=True)]

    def _local_parts(self, fresh: list[Entry], read: Reader) -> list[Part]:
        """Return this rank's contribution (`Part`) to each entry's reduction. Values on devices are copied together."""
        parts = [read(entry) for entry in fresh]
        numbers = floats([value if weight else 0.0 for value, weight, _ in parts])
        return [
            part_of(entry.op, number, *rest) for entry, number, (_, *rest) in zip(fresh, numbers, parts, strict=True)
        ]

    def _exchange(self, fresh: list[Entry], read: Reader) -> tuple[list[Entry], list[Total]]:
        rows, row = self._combined_row(_hash(fresh), fresh, read)
        self.each_step = each_step_wanted(row)
        if rows.ranks_differ(row):  # rare: ranks without samples, or a branch on a rank's own data
            fresh = self._agree_on_names(fresh)
            rows, row = self._combined_row(0, fresh, read)
        return fresh, rows.totals(row)

    def _combined_row(self, names: int, fresh: list[Entry], read: Reader) -> tuple[Rows, Tensor]:
        rows = Rows([entry.op for entry in fresh], self._capacity, read is not _epochs)
        # ranks with the same samples have the same values, of which one counts
        parts = self._local_parts(fresh, read) if self._counts else [(NEUTRAL[entry.op], 0.0, 0.0) for entry in fresh]
        mine = rows.make(names, self._wants_each_step, parts)
        return rows, self._combined(mine, rows.combine)

    def _agree_on_names(self, fresh: list[Entry]) -> list[Entry]:
        """Return the union of all ranks' entries in the same order on all ranks. Add missing entries. Collective."""
        modules = self._modules()
        names = {id(module): name for name, module in modules.items()}
        mine = [
            (
                list(entry.key),
                entry.normal(),
                None if entry.metric is None else names.get(id(entry.metric), ""),
                entry.dtype,
            )
            for entry in fresh
        ]
        union = self._from_zero(mine, _union)  # rank 0 joins them, so that all have one order
        for key, logged in union.items():
            if logged.metric == "" and len(logged.ranks) < self._world_size:
                raise RuntimeError(
                    f"self.log({key[2]!r}, <torchmetrics.Metric>) in `{key[0]}` was called on ranks {logged.ranks} "
                    f"only, and the metric's reduction needs all {self._world_size} ranks: make the metric an "
                    "attribute of the module, so that other ranks find it."
                )
        while len(union) > self._capacity:
            self._capacity *= 2
        entries = []
        for key in sorted(union, key=_place):
            table = self._table_of(key[:2])
            if key[2] not in table:
                table[key[2]] = Entry(key, union[key].options)
            entry = table[key[2]]
            entry.dtype = union[key].dtype
            if union[key].metric and entry.metric is None:
                entry.metric = modules[union[key].metric]
            entries.append(entry)
        return entries

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the values logged so far in an unfinished epoch, as plain types and tensors.

        The states of torchmetrics objects are saved elsewhere. This state only records which of the module's metrics
        were logged.
        """
        before, micro_batch = self.snapshot(), self.micro_batch
        if self.show_ahead is not None:
            self.micro_batch = self.show_ahead()
        found = self._states()
        self.go_back(before)
        self.micro_batch = micro_batch
        return found

    def _states(self) -> list[dict[str, Any]]:
        """Return the states of all entries that have values."""
        names = {id(part): name for name, part in self._modules().items() if is_metric(part)}
        found = []
        for entry in self._entries():
            if entry.metric is not None and id(entry.metric) not in names:
                if entry.epoch_fresh:
                    warn_once(NOT_SAVED.format(name=entry.key[2], metric=type(entry.metric).__name__))
                continue
            is_newer = entry.step_fresh > (self.shown_until if self._world_size == 1 else 0) and entry.last_weight > 0
            # the entry of a metric stays, so that a resumed run resets the metric at the end of the epoch
            is_logged = entry.epoch_fresh or entry.metric is not None
            if is_logged or entry.each_step or is_newer:
                metric = None if entry.metric is None else names[id(entry.metric)]
                age = self.micro_batch - entry.step_fresh if is_newer else None
                found.append({**entry.state(age), "fresh": entry.epoch_fresh, "metric": metric})
        return found

    def _modules(self) -> dict[str, nn.Module]:
        return {} if self._module is None else dict(self._module.named_modules())

    def load_state_dict(self, state: list[dict[str, Any]], micro_batches: int = 0) -> None:
        """Load logged values from a state that :meth:`state_dict` returned.

        Args:
            state: this rank's state.
            micro_batches: number of micro-batches of the run so far, the same on all ranks: it shows which value is the
                newest.
        """
        modules = self._modules()
        self.micro_batch += micro_batches
        for saved in state:
            hook, dataloader_idx, name = saved["key"]
            entry = Entry((hook, dataloader_idx, name), tuple(saved["options"]))
            entry.total, entry.last, entry.weight = saved["total"], saved["last"], saved["weight"]
            entry.dtype = saved["dtype"]
            entry.epoch_fresh = saved["fresh"]
            if saved.get("age") is not None:  # checkpoints of earlier versions have none
                entry.last_weight, entry.step_fresh = saved["last_weight"], max(1, self.micro_batch - saved["age"])
            metric = modules.get(saved.get("metric") or "")
            if is_metric(metric):
                entry.metric = metric
            self._wants_each_step |= entry.each_step
            self._table_of((hook, dataloader_idx))[name] = entry


@dataclass
class _Logged:
    """Options of a name that at least one rank has logged, and the ranks that logged it."""

    options: Options
    metric: str | None  #: name in the module; "": the module does not have it; None: it is not a metric
    dtype: torch.dtype  #: a rank that logged nothing shows the value in the type of the others
    ranks: list[int]  #: the ranks that have logged it, if that matters


def _union(of_ranks: list[Any]) -> dict[Key, _Logged]:
    """Merge the ranks' lists of logged entries into one dict."""
    union: dict[Key, _Logged] = {}
    for rank, theirs in enumerate(of_ranks):
        for (hook, dataloader_idx, name), options, metric, dtype in theirs:
            found = union.setdefault((hook, dataloader_idx, name), _Logged(tuple(options), metric, dtype, []))
            found.dtype = torch.promote_types(found.dtype, dtype)
            if found.metric == "":
                found.ranks.append(rank)
    return union


def _over_loaders(entries: list[Entry], totals: list[Total]) -> list[Total]:
    """Return the totals, with one joint total for all loaders that log a name with ``add_dataloader_idx=False``.

    Raises:
        MisconfigurationException: the loaders log it in different ways.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for place, entry in enumerate(entries):
        if entry.key[1] >= 0 and entry.name == entry.key[2]:
            groups.setdefault((entry.key[0], entry.name), []).append(place)
    found = list(totals)
    for (hook, name), places in groups.items():
        alike = [entries[place] for place in places]
        kinds = {(entry.op, id(entry.metric)) for entry in alike}
        if len(kinds) > 1:
            raise MisconfigurationException(
                f"self.log({name!r}, ..., add_dataloader_idx=False) in `{hook}`: the loaders log this name with "
                "different reduce_fx or torchmetrics objects, or some log a number, so there is no value over all "
                "loaders. Use a different name for each loader, or remove add_dataloader_idx=False."
            )
        total = joined(alike[0].op, [totals[place] for place in places])
        for place in places:
            found[place] = total
    return found


def checked_size(name: str, batch_size: object) -> float:
    """Check the ``batch_size`` of a `self.log` call, and return it as the weight of the logged value.

    Raises:
        MisconfigurationException: ``batch_size`` is not a number of samples.
    """
    try:
        size = float(batch_size)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        size = -1.0
    if not 0.0 <= size < math.inf:
        raise MisconfigurationException(
            f"self.log({name!r}, ..., batch_size={batch_size!r}): pass the number of samples that the value covers (0 "
            "or more), or omit batch_size to use the number of samples in the batch."
        )
    return size


def _one_number(value: object) -> Tensor | None:
    """Return a metric's value as a 0-d tensor; None if the value is not a single number."""
    return value.detach().reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else None


def _epochs(entry: Entry) -> tuple[Any, float, int]:
    return entry.total, entry.weight, 0
