"""From the Trainer's flags to one frozen RunConfig: every check that needs no model, no data and no device."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from lockstep.ground.errors import MisconfigurationException

# Flags of Lightning 2.6 that lockstep does not have yet, with the way round for today.
NOT_BUILT = {
    "overfit_batches": "use `limit_train_batches` with a loader that does not shuffle",
    "profiler": "wrap the script in `torch.profiler.profile`",
    "barebones": "turn the callbacks and the logger off: `logger=False, enable_checkpointing=False, ...`",
    "plugins": "pass `precision=` and `strategy=` by name",
    "sync_batchnorm": "use a norm that does not mix samples, `torch.nn.GroupNorm` for one",
    "reload_dataloaders_every_n_epochs": "draw what changes inside the data set, from its epoch",
    "model_registry": "pass `ckpt_path=` a path",
    "enable_autolog_hparams": "call `save_hyperparameters(logger=False)` in the module",
}


@dataclass(frozen=True)
class RunConfig:
    """What the user asked of the Trainer, checked and with its defaults filled in.

    Limits of batches are an ``int`` (a number of batches) or a ``float`` in [0, 1] (a fraction of the loader).
    """

    fast_dev_run: int
    max_epochs: int  # -1: no limit
    min_epochs: int
    max_steps: int  # -1: no limit
    min_steps: int
    max_time: float | None  # seconds
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    val_check_interval: int | float
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int  # -1: the whole loader
    log_every_n_steps: int
    accumulate_grad_batches: int | dict[int, int]
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"]
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    detect_anomaly: bool
    default_root_dir: str
    order: Literal["lockstep", "torch"]

    def accumulation(self, epoch: int) -> int:
        """Micro-batches of one window in ``epoch`` (counted from 0)."""
        if isinstance(self.accumulate_grad_batches, int):
            return self.accumulate_grad_batches
        due = [first for first in self.accumulate_grad_batches if first <= epoch]
        return self.accumulate_grad_batches[max(due)] if due else 1


def unknown_flags(flags: dict[str, Any]) -> None:
    """Refuse flags that the Trainer does not have, naming the nearest that it has.

    Raises:
        MisconfigurationException: where ``flags`` is not empty.
    """
    for name, value in flags.items():
        if name in NOT_BUILT:
            raise MisconfigurationException(
                f"Trainer({name}={value!r}): lockstep does not have this flag yet; {NOT_BUILT[name]}."
            )
        near = difflib.get_close_matches(name, [*KNOWN_FLAGS], n=1, cutoff=0.5)
        hint = f" Did you mean `{near[0]}`?" if near else f" The flags are: {', '.join(sorted(KNOWN_FLAGS))}."
        raise MisconfigurationException(f"Trainer has no flag `{name}` (given {name}={value!r}).{hint}")


def resolve(flags: dict[str, Any]) -> RunConfig:
    """Turn the Trainer's flags into a RunConfig.

    Args:
        flags: every flag that RunConfig has a field for, as it was given.

    Raises:
        MisconfigurationException: for a value, or a combination, that cannot work.
    """
    flags = _fast(dict(flags))
    _choice("deterministic", flags["deterministic"], (True, False, None, "warn"))
    _choice("order", flags["order"], ("lockstep", "torch"))
    root, every_n = flags["default_root_dir"], _whole("log_every_n_steps", flags["log_every_n_steps"], at_least=0)
    limits: dict[str, Any] = {name: _limit(name, flags[name]) for name in BATCH_LIMITS}
    as_given = ("fast_dev_run", "deterministic", "benchmark", "inference_mode", "use_distributed_sampler")
    return RunConfig(
        **{name: flags[name] for name in (*as_given, "detect_anomaly", "order")},
        **limits,
        **_length(flags),
        **_validation(flags),
        **_clipping(flags),
        log_every_n_steps=50 if every_n is None else every_n,
        accumulate_grad_batches=_accumulation(flags["accumulate_grad_batches"]),
        default_root_dir=os.fspath(root) if root is not None else os.getcwd(),
    )


BATCH_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")


def _fast(flags: dict[str, Any]) -> dict[str, Any]:
    """What ``fast_dev_run`` means for the other flags."""
    batches = flags["fast_dev_run"]
    if not isinstance(batches, int) or batches < 0:
        raise MisconfigurationException(
            f"Trainer(fast_dev_run={batches!r}): give True, False or the number of batches to try."
        )
    flags["fast_dev_run"] = int(batches)
    if batches:
        flags.update(dict.fromkeys(BATCH_LIMITS, int(batches)))
        flags.update(max_epochs=1, min_epochs=None, max_steps=int(batches), min_steps=None, num_sanity_val_steps=0)
        flags.update(val_check_interval=1.0, check_val_every_n_epoch=1)
    return flags


def _length(flags: dict[str, Any]) -> dict[str, Any]:
    """How long the fit is, in epochs, steps and seconds."""
    seconds = _seconds(flags["max_time"])
    epochs = _whole("max_epochs", flags["max_epochs"], at_least=-1)
    steps = _whole("max_steps", flags["max_steps"], at_least=-1)
    steps = -1 if steps is None else steps
    if epochs is None:
        epochs = -1 if steps != -1 or seconds is not None else 1000
    found = {"max_epochs": epochs, "max_steps": steps, "max_time": seconds}
    for unit, most in (("epochs", epochs), ("steps", steps)):
        least = _whole(f"min_{unit}", flags[f"min_{unit}"], at_least=0) or 0
        if most != -1 and least > most:
            raise MisconfigurationException(
                f"Trainer(min_{unit}={least}, max_{unit}={most}): the least is above the most."
            )
        found[f"min_{unit}"] = least
    return found


def _validation(flags: dict[str, Any]) -> dict[str, Any]:
    """When to validate."""
    every = _whole("check_val_every_n_epoch", flags["check_val_every_n_epoch"], at_least=1)
    interval = 1.0 if flags["val_check_interval"] is None else flags["val_check_interval"]
    if every is None and isinstance(interval, float):
        raise MisconfigurationException(
            f"Trainer(check_val_every_n_epoch=None, val_check_interval={interval!r}): across epochs the interval "
            "counts training batches; give `val_check_interval` an int."
        )
    sanity = _whole("num_sanity_val_steps", flags["num_sanity_val_steps"], at_least=-1)
    return {
        "val_check_interval": _limit("val_check_interval", interval, zero=False),
        "check_val_every_n_epoch": every,
        "num_sanity_val_steps": 2 if sanity is None else sanity,
    }


def _clipping(flags: dict[str, Any]) -> dict[str, Any]:
    """How gradients are clipped; 0 is no clipping, as in Lightning."""
    value, algorithm = flags["gradient_clip_val"], flags["gradient_clip_algorithm"]
    algorithm = "norm" if algorithm is None else str(algorithm).lower()
    _choice("gradient_clip_algorithm", algorithm, ("norm", "value"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={value!r}): give a number above 0, or None for no clipping."
        )
    return {"gradient_clip_val": float(value) if value else None, "gradient_clip_algorithm": algorithm}


KNOWN_FLAGS = frozenset(RunConfig.__dataclass_fields__) | {
    "accelerator",
    "strategy",
    "devices",
    "num_nodes",
    "precision",
    "logger",
    "callbacks",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
}


def _whole(flag: str, value: Any, *, at_least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        meaning = " (-1 means no limit)" if at_least == -1 else ""
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a whole number of at least {at_least}{meaning}."
        )
    return value


def _limit(flag: str, value: int | float | None, *, zero: bool = True) -> int | float:
    if value is None:
        return 1.0
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if not good or (isinstance(value, float) and value > 1.0) or (not zero and value == 0):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a number of batches (an int) or a fraction of the loader "
            "(a float between 0.0 and 1.0)."
        )
    return value


def _choice(flag: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise MisconfigurationException(f"Trainer({flag}={value!r}): choose one of {', '.join(map(repr, choices))}.")


def _accumulation(value: int | dict[int, int]) -> int | dict[int, int]:
    table = value if isinstance(value, dict) else {0: value}
    for epoch, batches in table.items():
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (epoch, batches))
        if not whole or epoch < 0 or batches < 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={value!r}): give an int of at least 1, or a dict from the first "
                "epoch (counted from 0) to the micro-batches of a step from then on, such as {0: 8, 5: 4}."
            )
    return value


def _seconds(value: str | timedelta | dict[str, int] | None) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, timedelta):
            length = value
        elif isinstance(value, dict):
            length = timedelta(**value)
        else:
            days, hours, minutes, seconds = (int(part) for part in value.strip().split(":"))
            length = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        if length < timedelta(0):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise MisconfigurationException(
            f'Trainer(max_time={value!r}): give "DD:HH:MM:SS", a datetime.timedelta, or its arguments as a dict '
            'such as {"hours": 2}.'
        ) from None
    return length.total_seconds()
