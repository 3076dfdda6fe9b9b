"""Entry, which stores the values that one hook logs under one name, and the table of hooks that may log."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.ground.comm import reduction_of
from lockstep.ground.device import widest
from lockstep.ground.errors import MisconfigurationException
from lockstep.loop.logged_rows import NEUTRAL, extreme, joined

if TYPE_CHECKING:
    from torchmetrics import Metric

# Hooks in which `self.log` may be called, in the order in which they run: hook -> (on_step by default, on_epoch by
# default, on_step is allowed). If several hooks log one name, the later one's value is shown.
_STEP, _EPOCH, _EPOCH_ONLY = (True, False, True), (False, True, True), (False, True, False)
LOGGING: dict[str, tuple[bool, bool, bool]] = {
    "on_train_start": _EPOCH_ONLY,
    "on_train_epoch_start": _EPOCH_ONLY,
    "on_train_batch_start": _STEP,
    "training_step": _STEP,
    "on_before_zero_grad": _STEP,
    "optimizer_zero_grad": _STEP,
    "on_before_backward": _STEP,
    "backward": _STEP,
    "on_after_backward": _STEP,
    "on_before_optimizer_step": _STEP,
    "configure_gradient_clipping": _STEP,
    "clip_gradients": _STEP,
    "optimizer_step": _STEP,
    "on_train_batch_end": _STEP,
    "on_validation_start": _EPOCH_ONLY,
    "on_validation_epoch_start": _EPOCH_ONLY,
    "on_validation_batch_start": _EPOCH,
    "validation_step": _EPOCH,
    "on_validation_batch_end": _EPOCH,
    "on_validation_epoch_end": _EPOCH_ONLY,
    "on_test_start": _EPOCH_ONLY,
    "on_test_epoch_start": _EPOCH_ONLY,
    "on_test_batch_start": _EPOCH,
    "test_step": _EPOCH,
    "on_test_batch_end": _EPOCH,
    "on_test_epoch_end": _EPOCH_ONLY,
    "on_train_epoch_end": _EPOCH_ONLY,
}

# prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, rank_zero_only, sync_dist: as passed to `self.log`
Options = tuple[Any, ...]
Key = tuple[str, int, str]  # hook, dataloader_idx (-1: only one), name


class Entry:
    """Accumulator of the values that one hook logs under one name: running reduction and last value.

    Attributes:
        step_fresh: the micro-batch in which ``last`` was logged, as `LogCollector.micro_batch` counts; 0 if it is not
            newer than the last reduction over the ranks (on one rank: than the loggers' value).
        epoch_fresh: True if a value was logged since the last :meth:`clear`.
        dtype: type of the reduced values: float64 for float64, the default type (or float32) for all others.
        quick: type (torch's, or float) of values that ``LightningModule.log`` may record itself; None: no type.
        each_step: True if the value of every single step is reduced over the ranks (``sync_dist=True``).
    """

    __slots__ = (
        "dtype",
        "each_step",
        "epoch_fresh",
        "epoch_name",
        "key",
        "last",
        "last_weight",
        "logger",
        "lost",
        "metric",
        "name",
        "on_epoch",
        "on_step",
        "op",
        "options",
        "prog_bar",
        "quick",
        "rank_zero_only",
        "step_fresh",
        "step_name",
        "total",
        "weight",
    )

    def __init__(self, key: Key, options: Options) -> None:
        hook, dataloader_idx, name = key
        self.key = key
        self.options = options
        self.prog_bar, logger, on_step, on_epoch, reduce_fx, add_dataloader_idx, self.rank_zero_only = options[:7]
        default_on_step, default_on_epoch, step_allowed = LOGGING[hook]
        self.on_step = default_on_step if on_step is None else bool(on_step)
        self.on_epoch = default_on_epoch if on_epoch is None else bool(on_epoch)
        self.each_step = self.on_step and any(options[7:])
        self.logger = logger is not False
        self.op = reduction_of(name, reduce_fx)
        if not self.on_step and not self.on_epoch:
            raise MisconfigurationException(
                f"self.log({name!r}, on_step=False, on_epoch=False) in `{hook}` logs nothing: set one to True."
            )
        if self.on_step and not step_allowed:
            raise MisconfigurationException(
                f"self.log({name!r}, on_step=True) in `{hook}`, which is not a step: remove `on_step=True`."
            )
        loader = f"/dataloader_idx_{dataloader_idx}" if dataloader_idx >= 0 and add_dataloader_idx else ""
        both = self.on_step and self.on_epoch
        self.name = f"{name}{loader}"
        self.step_name, self.epoch_name = (f"{name}{end}{loader}" if both else self.name for end in ("_step", "_epoch"))
        self.metric: Metric | None = None
        self.dtype = _reduced_dtype(torch.get_default_dtype())
        self.quick: Any = None
        # Python numbers if values are on the CPU (double precision, a fifth of a tensor operation's cost), 0-d tensors
        # on a device otherwise, so that nothing waits for it.
        self.last: Any = 0.0
        self.total: Any = NEUTRAL[self.op]
        self.lost: Any = 0.0  # rounding error of the total, if it is float32
        self.clear()

    def clear(self) -> None:
        """Discard all values."""
        self.epoch_fresh, self.step_fresh = False, 0
        self.weight = self.last_weight = 0.0
        self.total, self.lost = NEUTRAL[self.op], 0.0

    def mark(self, micro_batch: int) -> None:
        """On a rank above 0, record that rank 0 logs a value in this micro-batch (``rank_zero_only=True``)."""
        self.epoch_fresh, self.step_fresh = self.on_epoch, micro_batch if self.on_step else 0

    def learn_quick(self, value: object) -> None:
        """If the reduction is a mean, enable the fast path of ``LightningModule.log`` for the type of ``value``."""
        if self.op == "mean":
            kind = type(value)
            self.quick = (
                value.dtype if isinstance(value, Tensor) and kind is Tensor else float if kind is float else None
            )

    def add(self, value: Tensor | float, weight: float, micro_batch: int) -> None:
        """Add a value that was logged in this micro-batch: a number, or a tensor with one element."""
        if isinstance(value, Tensor):
            if value.ndim:
                if value.numel() != 1:
                    raise MisconfigurationException(
                        f"`self.log({self.key[2]}, <tensor of shape {tuple(value.shape)}>)` was called in "
                        f"`{self.key[0]}`, but the tensor must have a single element: log its mean, for example."
                    )
                value = value.reshape(())
            self.dtype = _reduced_dtype(value.dtype)
            value = value.item() if value.is_cpu else self._on_device(value)
        else:
            value = float(value) if type(value) in (float, int) else self._number(value)
        if self.on_step:
            self.last = value
            self.last_weight = weight
            self.step_fresh = micro_batch
        if self.on_epoch:
            self.epoch_fresh = True
            self.weight += weight
            op = self.op
            if op == "mean":
                value = value * weight
            if op in ("min", "max"):
                self.total = extreme(op, self.total, value)
            elif isinstance(value, Tensor) and value.dtype == torch.float32:
                # the device has no float64 (MPS): Kahan summation, or the mean of a long epoch would drift
                rest = value - self.lost
                total = self.total + rest
                self.total, self.lost = total, (total - self.total) - rest
            else:
                self.total = self.total + value

    def _on_device(self, value: Tensor) -> Tensor:
        """Return a copy of ``value`` in float64, or in the device's widest dtype. A DTensor is gathered."""
        wide = value.detach().to(widest(value.device), copy=True)  # a copy: the caller may change its loss in place
        return wide if type(wide) is Tensor or not hasattr(wide, "full_tensor") else wide.full_tensor()

    def _number(self, value: object) -> float:
        """Convert a value that is not a tensor, such as a NumPy number, to a float; raise if this is impossible."""
        try:
            if not isinstance(value, (str, bytes)):  # float() would accept "3"
                return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
        way_out = "log one number"
        if isinstance(value, dict):
            way_out = "log its items with `self.log_dict(...)`"
        elif isinstance(value, (str, bytes)):
            way_out = "log numbers here, and text with `self.logger.experiment`"
        raise MisconfigurationException(
            f"`self.log({self.key[2]}, {value!s:.80})` was called in `{self.key[0]}`, but `{type(value).__name__}` "
            f"values cannot be logged: {way_out}."
        )

    def normal(self) -> list[Any]:
        """Return the ``self.log`` options that determine the logged value (all except ``sync_dist``), with defaults."""
        return [self.prog_bar, self.logger, self.on_step, self.on_epoch, self.op, *self.options[5:7]]

    def snapshot(self) -> tuple[Any, ...]:
        """Return the current values, for :meth:`go_back`."""
        return self.total, self.lost, self.weight, self.epoch_fresh, self.last, self.last_weight, self.step_fresh

    def go_back(self, snapshot: tuple[Any, ...]) -> None:
        """Restore the values that :meth:`snapshot` returned."""
        self.total, self.lost, self.weight, self.epoch_fresh, self.last, self.last_weight, self.step_fresh = snapshot

    def state(self, age: int | None) -> dict[str, Any]:
        """Return the values as a dict, for a checkpoint within an epoch.

        Args:
            age: number of micro-batches since ``last`` was logged; None if the loggers have already received it.
        """
        return {
            "key": list(self.key),
            "options": [*self.normal(), self.each_step],
            "total": float(self.total),
            "last": float(self.last),
            "last_weight": float(self.last_weight),
            "age": age,
            "weight": float(self.weight),
            "dtype": self.dtype,
        }


def _reduced_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if it is float32 or float64, else torch's default dtype if it is one of these, else float32."""
    if dtype in (torch.float32, torch.float64):
        return dtype
    default = torch.get_default_dtype()
    return default if default in (torch.float32, torch.float64) else torch.float32


# -- merged states of several ranks, or of the parts of a micro-batch ----------------------------------------


def merged(parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the saved entries of several ranks into the entries of one rank; see `LogCollector.state_dict`."""
    found: dict[Key, dict[str, Any]] = {}
    for saved in (each for part in parts for each in part):
        key: Any = tuple(saved["key"])
        if key not in found:
            found[key] = dict(saved)
            continue
        first, op = found[key], Entry(key, tuple(saved["options"])).op
        first["total"], first["weight"] = joined(op, [(each["total"], each["weight"]) for each in (first, saved)])
        first["fresh"] = first["fresh"] or saved["fresh"]
        first.update(_newest_step(op, first, saved))
    return list(found.values())


def _newest_step(op: str, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the newer of two ranks' on_step values; if both are from the same micro-batch, return their reduction."""
    ages = [math.inf if saved.get("age") is None else saved["age"] for saved in (one, other)]
    if ages[0] != ages[1] or ages[0] == math.inf:
        newest = one if ages[0] <= ages[1] else other
        return {key: newest[key] for key in ("last", "last_weight", "age") if key in newest}
    weights = one["last_weight"], other["last_weight"]
    last = joined_values(op, one["last"], weights[0], other["last"], weights[1])
    return {"last": last, "last_weight": sum(weights), "age": one["age"]}


def joined_values(op: str, one: Any, its_weight: float, other: Any, others_weight: float) -> Any:
    """Combine two reduced values by the reduction ``op``. Only ``"mean"`` uses the weights."""
    if op == "mean":
        return (one * its_weight + other * others_weight) / (its_weight + others_weight)
    if op == "sum":
        return one + other
    return extreme(op, one, other)
