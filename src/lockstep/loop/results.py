"""What ``self.log`` collected: (sum, weight) per name over the steps, then over the ranks in one packed all_gather."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException

# Where `self.log` may be called: hook -> (on_step by default, on_epoch by default, whether on_step is allowed).
_STEP, _EPOCH, _EPOCH_ONLY = (True, False, True), (False, True, True), (False, True, False)
LOGGING: dict[str, tuple[bool, bool, bool]] = {
    **dict.fromkeys(
        [
            "training_step",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_zero_grad",
            "optimizer_zero_grad",
            "on_before_backward",
            "backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "optimizer_step",
            "configure_gradient_clipping",
            "clip_gradients",
        ],
        _STEP,
    ),
    **dict.fromkeys(
        [
            "validation_step",
            "test_step",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_test_batch_start",
            "on_test_batch_end",
        ],
        _EPOCH,
    ),
    **dict.fromkeys(
        [
            "on_train_start",
            "on_train_epoch_start",
            "on_train_epoch_end",
            "on_validation_start",
            "on_validation_epoch_start",
            "on_validation_epoch_end",
            "on_test_start",
            "on_test_epoch_start",
            "on_test_epoch_end",
        ],
        _EPOCH_ONLY,
    ),
}
REDUCTIONS = ("mean", "sum", "min", "max")

# prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only: as given to `self.log`
Options = tuple[Any, ...]
Reader = Callable[["Entry"], tuple[Any, float, bool]]  # (value, weight, whether it is the newest one)
Key = tuple[str, int, str]  # hook, dataloader_idx (-1: only one), name


class Entry:
    """One name logged in one hook: its running reduction and its newest value."""

    __slots__ = (
        "dtype",
        "epoch_fresh",
        "key",
        "last",
        "last_weight",
        "logger",
        "metric",
        "name",
        "on_epoch",
        "on_step",
        "op",
        "options",
        "prog_bar",
        "rank_zero_only",
        "step_fresh",
        "total",
        "weight",
    )

    def __init__(self, key: Key, options: Options) -> None:
        hook, dataloader_idx, name = key
        self.key = key
        self.options = options
        self.prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, self.rank_zero_only = options
        default_on_step, default_on_epoch, step_allowed = LOGGING[hook]
        self.on_step = default_on_step if on_step is None else bool(on_step)
        self.on_epoch = default_on_epoch if on_epoch is None else bool(on_epoch)
        self.logger = logger is not False
        self.op = _reduction(name, reduce_fx)
        if not self.on_step and not self.on_epoch:
            raise MisconfigurationException(
                f"self.log({name!r}, on_step=False, on_epoch=False) in `{hook}` keeps nothing: leave one of them on."
            )
        if self.on_step and not step_allowed:
            raise MisconfigurationException(
                f"self.log({name!r}, on_step=True) in `{hook}`, which is no step: leave `on_step` away there."
            )
        self.name = f"{name}/dataloader_idx_{dataloader_idx}" if dataloader_idx >= 0 and add_dataloader_idx else name
        self.metric: Any = None
        self.dtype = torch.get_default_dtype()
        # Python numbers where values are on the CPU (double precision, and a fifth of a tensor operation's cost),
        # 0-dim tensors on the device where they are on one, so that nothing waits for it.
        self.last: Any = 0.0
        self.total: Any = _NEUTRAL[self.op]
        self.clear()

    def clear(self) -> None:
        """Forget what was collected."""
        self.epoch_fresh = self.step_fresh = False
        self.weight = self.last_weight = 0.0
        self.total = _NEUTRAL[self.op]

    def add(self, value: Any, weight: float) -> None:
        """Take in one logged value, a number or a tensor of one element."""
        if isinstance(value, Tensor):
            if value.is_cpu:
                self.dtype = value.dtype
                if value.ndim:
                    value = self._scalar(value)
                value = value.item()
            else:
                value = self._on_device(value)
        else:
            value = float(value)
        if self.on_step:
            self.last = value
            self.last_weight = weight
            self.step_fresh = True
        if self.on_epoch:
            self.epoch_fresh = True
            self.weight += weight
            op = self.op
            if op == "mean":
                self.total = self.total + value * weight
            elif op == "sum":
                self.total = self.total + value
            elif isinstance(value, Tensor):
                pick = torch.minimum if op == "min" else torch.maximum
                self.total = pick(torch.as_tensor(self.total, dtype=value.dtype, device=value.device), value)
            else:
                self.total = min(self.total, value) if op == "min" else max(self.total, value)

    def _on_device(self, value: Tensor) -> Tensor:
        """A copy (the caller may change its loss in place) in double precision, or the widest that the device has."""
        self.dtype = value.dtype
        wide = torch.float32 if value.device.type == "mps" else torch.float64
        return self._scalar(value.detach()).to(wide, copy=True)

    def _scalar(self, value: Tensor) -> Tensor:
        if value.numel() != 1:
            raise MisconfigurationException(
                f"self.log({self.key[2]!r}, <tensor of shape {tuple(value.shape)}>): log one number, its mean say."
            )
        return value.reshape(())

    def normal(self) -> list[Any]:
        """The options in plain types, equal for equal meaning."""
        return [*self.options[:4], self.op, *self.options[5:]]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of an epoch that is not over."""
        return {
            "key": list(self.key),
            "options": self.normal(),
            "total": float(self.total),
            "last": float(self.last),
            "weight": float(self.weight),
            "dtype": self.dtype,
        }


_NEUTRAL = {"mean": 0.0, "sum": 0.0, "min": float("inf"), "max": float("-inf")}


def _reduction(name: str, reduce_fx: Any) -> str:
    op = {torch.mean: "mean", torch.sum: "sum", torch.min: "min", torch.max: "max", sum: "sum", min: "min", max: "max"}
    found = reduce_fx.lower() if isinstance(reduce_fx, str) else op.get(reduce_fx)
    if found == "avg":
        found = "mean"
    if found not in REDUCTIONS:
        raise MisconfigurationException(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): choose one of {', '.join(REDUCTIONS)}, or log a "
            "torchmetrics.Metric for a reduction of your own."
        )
    return found


def is_metric(value: Any) -> bool:
    """Whether ``value`` is a torchmetrics object (never imports torchmetrics: who has one has imported it)."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


class Results:
    """What was logged in one stage (training or one evaluation).

    Args:
        gather: all_gather of a float64 vector of equal length on all ranks, giving a (world, n) tensor.
        gather_objects: all_gather of a small Python object, giving a list by rank.
        world_size: number of ranks.
        rank: this rank.
        module: whose torchmetrics objects are found by name on ranks that had no data for them.
    """

    def __init__(
        self,
        gather: Callable[[Tensor], Tensor],
        gather_objects: Callable[[Any], list[Any]],
        world_size: int = 1,
        rank: int = 0,
        module: Any = None,
    ) -> None:
        self._gather = gather
        self._gather_objects = gather_objects
        self._world_size = world_size
        self._rank = rank
        self._module = module
        self._capacity = 64  # names that fit into one packed all_gather; grows alike on all ranks
        self._tables: dict[tuple[str, int], dict[str, Entry]] = {}
        self.table: dict[str, Entry] | None = None
        self.hook: tuple[str, int] = ("", -1)
        self.weight = 1.0
        self.muted = False

    @classmethod
    def of(cls, strategy: Any, module: Any) -> Results:
        """Results of ``module``, reduced over the ranks of ``strategy``."""
        gather, gather_objects = strategy.gather_stacked, strategy.gather_objects
        return cls(gather, gather_objects, strategy.world_size, strategy.global_rank, module)

    def enter(self, hook: str, dataloader_idx: int = -1) -> None:
        """Say in which hook the next ``log`` calls happen."""
        self.hook = (hook, dataloader_idx)
        self.table = self._tables.get(self.hook)
        if self.table is None and hook in LOGGING:
            self.table = self._tables[self.hook] = {}

    def log(self, name: str, value: Any, options: Options, batch_size: float | None) -> None:
        """Take in one value of ``name``; the hot path of ``self.log``."""
        if self.muted and not is_metric(value):
            return
        table = self.table
        entry = table.get(name) if table is not None else None
        if entry is None or entry.options != options:
            entry = self._open(name, options)
        if self._rank and entry.rank_zero_only:
            entry.epoch_fresh, entry.step_fresh = entry.on_epoch, entry.on_step
            return
        weight = self.weight if batch_size is None else batch_size
        if entry.op == "mean" and type(value) is Tensor and value.is_cpu and not value.ndim:
            # Entry.add for what nearly every value is, in this frame: between tensor operations a call costs a
            # microsecond, since nothing of ours is in the processor's cache.
            entry.dtype = value.dtype
            number = value.item()
            if entry.on_step:
                entry.last, entry.last_weight, entry.step_fresh = number, weight, True
            if entry.on_epoch:
                entry.total += number * weight
                entry.weight += weight
                entry.epoch_fresh = True
        elif is_metric(value):
            self._add_metric(entry, value, weight)
        else:
            entry.add(value, weight)

    def _open(self, name: str, options: Options) -> Entry:
        if self.table is None:
            where = f"in `{self.hook[0]}`" if self.hook[0] else "outside the hooks of a run"
            raise MisconfigurationException(
                f"self.log({name!r}, ...) {where}: nothing can be logged there; use `self.logger.log_metrics`, or log "
                "in a step or epoch hook."
            )
        entry = Entry((*self.hook, name), options)
        known = self.table.setdefault(name, entry)
        if known is not entry:
            if known.normal() != entry.normal():
                raise MisconfigurationException(
                    f"self.log({name!r}, ...) was called twice in `{self.hook[0]}` with different arguments: "
                    f"{known.normal()} and {entry.normal()}."
                )
            known.options = options
        return known

    def _add_metric(self, entry: Entry, metric: Any, weight: float) -> None:
        entry.metric = metric
        entry.epoch_fresh = entry.on_epoch
        forward = metric._forward_cache
        if entry.on_step and forward is not None and not self.muted:
            on_epoch, entry.on_epoch = entry.on_epoch, False  # the metric itself keeps the epoch's value
            entry.add(forward, weight)
            entry.on_epoch = on_epoch

    def _entries(self) -> list[Entry]:
        return [entry for table in self._tables.values() for entry in table.values()]

    def step_values(self) -> list[tuple[Entry, str, Tensor]]:
        """The newest on_step values of this rank, not reduced: (entry, name, value)."""
        found = []
        for entry in self._entries():
            if entry.step_fresh and entry.last_weight:
                value = torch.tensor(float(entry.last), dtype=entry.dtype)
                found.append((entry, f"{entry.name}_step" if entry.on_epoch else entry.name, value))
        return found

    def take_step_values(self) -> list[tuple[Entry, str, Tensor]]:
        """:meth:`step_values`, each of them once."""
        values = self.step_values()
        for entry, _, _ in values:
            entry.step_fresh = False
        return values

    def reduce_step(self) -> list[tuple[Entry, str, Tensor]]:
        """The newest on_step values over all ranks; one packed all_gather. Collective."""
        fresh = [entry for entry in self._entries() if entry.step_fresh]
        values = self._reduce(fresh, lambda entry: (entry.last, entry.last_weight, True))
        for entry in fresh:
            entry.step_fresh = False
        return [(entry, f"{entry.name}_step" if entry.on_epoch else entry.name, value) for entry, value in values]

    def reduce_epoch(self) -> list[tuple[Entry, str, Tensor]]:
        """The on_epoch values over all steps and ranks; one packed all_gather, and the metrics' own. Collective.

        What is reduced is cleared, so that a second call gives only what was logged in between; so are the newest
        values of single steps, which the epoch's values replace.
        """
        fresh = [entry for entry in self._entries() if entry.epoch_fresh]
        values = self._reduce(fresh, lambda entry: (entry.total, entry.weight, False))
        computed: dict[int, Any] = {}
        found = []
        for entry, value in values:
            if entry.metric is not None:
                if id(entry.metric) not in computed:
                    computed[id(entry.metric)] = entry.metric.compute()
                value = computed[id(entry.metric)]
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise MisconfigurationException(
                        f"self.log({entry.key[2]!r}, {type(entry.metric).__name__}): its compute() gives no single "
                        "number; log its parts by `log_dict`."
                    )
                value = value.detach().reshape(())
            found.append((entry, f"{entry.name}_epoch" if entry.on_step else entry.name, value))
        for metric in {id(entry.metric): entry.metric for entry, _ in values if entry.metric is not None}.values():
            metric.reset()
        for entry, _ in values:
            entry.clear()
        return found

    def _reduce(self, fresh: list[Entry], read: Reader) -> list[tuple[Entry, Tensor]]:
        """Reduce entries over the ranks: names travel as a hash, and in full only where the hashes differ."""
        fresh.sort(key=lambda entry: entry.key)
        if self._world_size > 1:
            fresh, columns = self._exchange(fresh, read)
        else:
            columns = [[self._local(entry, read) for entry in fresh]]
        reduced = []
        for i, entry in enumerate(fresh):
            parts = [rank[i] for rank in columns]
            value = _combine(entry.op, parts)
            reduced.append((entry, torch.tensor(value, dtype=entry.dtype)))
        return reduced

    def _local(self, entry: Entry, read: Reader) -> tuple[float, float]:
        value, weight, newest = read(entry)
        if weight == 0.0:
            return _NEUTRAL[entry.op], 0.0
        number = float(value)
        return (number * weight if newest and entry.op == "mean" else number), float(weight)

    def _exchange(self, fresh: list[Entry], read: Reader) -> tuple[list[Entry], list[list[tuple[float, float]]]]:
        names = repr([(entry.key, entry.op, entry.metric is not None) for entry in fresh])
        header = [float(zlib.crc32(names.encode())), float(len(fresh))]
        rows = self._packed(header, fresh, read)
        if any(row[:2] != rows[0][:2] for row in rows) or rows[0][1] > self._capacity:
            fresh = self._agree_on_names(fresh)
            rows = self._packed([0.0, float(len(fresh))], fresh, read)
        pairs = [[(row[2 + 2 * i], row[3 + 2 * i]) for i in range(len(fresh))] for row in rows]
        return fresh, pairs

    def _packed(self, header: list[float], fresh: list[Entry], read: Reader) -> list[list[float]]:
        numbers = list(header)
        for entry in fresh[: self._capacity]:
            numbers.extend(self._local(entry, read))
        vector = torch.zeros(2 + 2 * self._capacity, dtype=torch.float64)
        vector[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        return self._gather(vector).tolist()

    def _agree_on_names(self, fresh: list[Entry]) -> list[Entry]:
        """The union of what any rank logged, in one order; entries that this rank lacks are made, empty."""
        modules = dict(self._module.named_modules()) if self._module is not None else {}
        names = {id(module): name for name, module in modules.items()}
        mine = [
            (list(entry.key), entry.normal(), None if entry.metric is None else names.get(id(entry.metric), ""))
            for entry in fresh
        ]
        union: dict[Key, tuple[Options, str | None]] = {}
        ranks_with: dict[Key, list[int]] = {}
        for rank, theirs in enumerate(self._gather_objects(mine)):
            for (hook, dataloader_idx, name), options, metric in theirs:
                key = (hook, dataloader_idx, name)
                union.setdefault(key, (tuple(options), metric))
                ranks_with.setdefault(key, []).append(rank)
        for key, (_, metric) in union.items():
            if metric == "" and len(ranks_with[key]) < self._world_size:
                raise RuntimeError(
                    f"self.log({key[2]!r}, <torchmetrics.Metric>) in `{key[0]}` was reached on ranks "
                    f"{ranks_with[key]} only, and the metric's own reduction needs all {self._world_size} ranks: make "
                    "the metric an attribute of the module, so that the others find it."
                )
        while len(union) > self._capacity:
            self._capacity *= 2
        entries = []
        for key in sorted(union):
            table = self._tables.setdefault(key[:2], {})
            if key[2] not in table:
                table[key[2]] = Entry(key, union[key][0])
            entry = table[key[2]]
            if union[key][1] and entry.metric is None:
                entry.metric = modules[union[key][1]]
            entries.append(entry)
        return entries

    def state_dict(self) -> list[dict[str, Any]]:
        """What was collected in an epoch that is not over; plain types and tensors."""
        return [entry.state() for entry in self._entries() if entry.epoch_fresh and entry.metric is None]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on collecting where :meth:`state_dict` was taken."""
        for saved in state:
            hook, dataloader_idx, name = saved["key"]
            entry = Entry((hook, dataloader_idx, name), tuple(saved["options"]))
            entry.total, entry.last, entry.weight = saved["total"], saved["last"], saved["weight"]
            entry.dtype = saved["dtype"]
            entry.epoch_fresh = True
            self._tables.setdefault((hook, dataloader_idx), {})[name] = entry


def _combine(op: str, parts: list[tuple[float, float]]) -> float:
    values = [value for value, weight in parts if weight]
    if op == "mean":
        weight = sum(weight for _, weight in parts)
        return sum(values) / weight if weight else float("nan")
    if not values:
        return _NEUTRAL[op]
    return sum(values) if op == "sum" else min(values) if op == "min" else max(values)


class Published:
    """The three dicts that users read: what callbacks, loggers and the progress bar see."""

    def __init__(self) -> None:
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress_bar: dict[str, Any] = {}

    def publish(self, values: list[tuple[Entry, str, Tensor]]) -> dict[str, Tensor]:
        """Show ``values``; returns those that loggers get."""
        for_loggers = {}
        for entry, name, value in values:
            self.callback[name] = value
            if entry.on_step and entry.on_epoch:  # the plain name stands for the newest of the two
                self.callback[entry.name] = value
            if entry.logger:
                self.logged[name] = for_loggers[name] = value
            if entry.prog_bar:
                self.progress_bar[name] = value
        return for_loggers

    def clear(self) -> None:
        """Forget everything (after the sanity check)."""
        self.callback.clear()
        self.logged.clear()
        self.progress_bar.clear()
