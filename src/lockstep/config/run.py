"""From the Trainer's flags to one frozen RunConfig: every check that needs no model, no data and no device."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

from lockstep.config.values import (
    accumulation,
    choice,
    duration,
    folder,
    fraction_or_count,
    interval,
    seconds,
    switch,
    whole,
)
from lockstep.ground.errors import MisconfigurationException


@dataclass(frozen=True)
class RunConfig:
    """What the user asked of the Trainer, checked and with its defaults filled in.

    Limits of batches are an ``int`` (a number of batches) or a ``float`` in [0, 1] (a fraction of the loader).

    Raises:
        MisconfigurationException: for a combination that cannot work.
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
    overfit_batches: int | float  # 0: off; else limit_train_batches and limit_val_batches are the same
    val_check_interval: int | float | timedelta
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
    reload_dataloaders_every_n_epochs: int  # 0: never
    default_root_dir: str
    enable_autolog_hparams: bool
    order: Literal["lockstep", "torch"]
    debug: Literal["collectives"] | None
    keep_global_batch: bool
    hang_timeout: float | None  # seconds
    hang_kill: float | None  # seconds

    def __post_init__(self) -> None:
        for unit in ("epochs", "steps"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most != -1 and least > most:
                raise MisconfigurationException(
                    f"Trainer(min_{unit}={least}, max_{unit}={most}): the least is above the most."
                )
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise MisconfigurationException(
                f"Trainer(check_val_every_n_epoch=None, val_check_interval={self.val_check_interval!r}): across epochs "
                "the interval counts training batches or time; give `val_check_interval` an int or a duration."
            )

    def accumulation(self, epoch: int) -> int:
        """Micro-batches of one window in ``epoch`` (counted from 0)."""
        if isinstance(self.accumulate_grad_batches, int):
            return self.accumulate_grad_batches
        due = [first for first in self.accumulate_grad_batches if first <= epoch]
        return self.accumulate_grad_batches[max(due)] if due else 1


def resolve(flags: dict[str, Any]) -> RunConfig:
    """Turn the Trainer's flags into a RunConfig.

    Args:
        flags: every flag that RunConfig has a field for, as it was given.

    Raises:
        MisconfigurationException: for a value, or a combination, that cannot work.
    """
    flags = _fast(dict(flags))
    switches: dict[str, Any] = {name: switch(name, flags[name]) for name in SWITCHES}
    benchmark = flags["benchmark"] if flags["benchmark"] is None else switch("benchmark", flags["benchmark"])
    limits: dict[str, Any] = {name: fraction_or_count(name, flags[name]) for name in BATCH_LIMITS}
    overfit = fraction_or_count(
        "overfit_batches", 0.0 if flags["overfit_batches"] is None else flags["overfit_batches"]
    )
    if overfit:
        limits.update(limit_train_batches=overfit, limit_val_batches=overfit)
    every_n = whole("log_every_n_steps", flags["log_every_n_steps"], at_least=0)
    reload = whole("reload_dataloaders_every_n_epochs", flags["reload_dataloaders_every_n_epochs"], at_least=0)
    root = flags["default_root_dir"]
    return RunConfig(
        fast_dev_run=flags["fast_dev_run"],
        overfit_batches=overfit,
        deterministic=choice("deterministic", flags["deterministic"], (True, False, None, "warn")),
        benchmark=benchmark,
        order=choice("order", flags["order"], ("lockstep", "torch")),
        debug=choice("debug", flags["debug"], (None, "collectives")),
        hang_timeout=seconds("hang_timeout", flags["hang_timeout"]),
        hang_kill=seconds("hang_kill", flags["hang_kill"]),
        **switches,
        **limits,
        **_length(flags),
        **_validation(flags),
        **_clipping(flags),
        log_every_n_steps=50 if every_n is None else every_n,
        accumulate_grad_batches=accumulation(flags["accumulate_grad_batches"]),
        reload_dataloaders_every_n_epochs=reload or 0,
        default_root_dir=folder("default_root_dir", root) if root is not None else os.getcwd(),
    )


BATCH_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
SWITCHES = (
    "inference_mode",
    "use_distributed_sampler",
    "detect_anomaly",
    "enable_autolog_hparams",
    "keep_global_batch",
)
# Flags that decide others too, at construction and when they are set later.
_LEADERS = ("fast_dev_run", "overfit_batches")


def changed(config: RunConfig, defaults: dict[str, Any], name: str, value: Any) -> RunConfig:
    """The config with one flag set anew, checked as at construction.

    Args:
        config: what held so far; stays as it is.
        defaults: every flag of ``resolve`` at its default.
        name: the flag.
        value: as a user would give it to the Trainer.

    Raises:
        MisconfigurationException: as :func:`resolve`.
    """
    untouched = resolve(defaults)
    found = resolve({**defaults, name: value, **_company(name, value)})
    wanted = {name: getattr(found, name)}
    if name in _LEADERS:
        wanted.update(
            {
                field.name: getattr(found, field.name)
                for field in fields(found)
                if getattr(found, field.name) != getattr(untouched, field.name)
            }
        )
    return replace(config, **wanted)


def _company(name: str, value: Any) -> dict[str, Any]:
    """What a flag needs beside it to be checked alone; how it goes with the others is the RunConfig's to say."""
    if name == "check_val_every_n_epoch" and value is None:
        return {"val_check_interval": 1}
    return {f"max_{name[4:]}": -1} if name in ("min_epochs", "min_steps") else {}


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
    limit = duration("max_time", flags["max_time"])
    epochs = whole("max_epochs", flags["max_epochs"], at_least=-1)
    steps = whole("max_steps", flags["max_steps"], at_least=-1)
    steps = -1 if steps is None else steps
    if epochs is None:
        epochs = -1 if steps != -1 or limit is not None else 1000
    return {
        "max_epochs": epochs,
        "max_steps": steps,
        "max_time": None if limit is None else limit.total_seconds(),
        "min_epochs": whole("min_epochs", flags["min_epochs"], at_least=0) or 0,
        "min_steps": whole("min_steps", flags["min_steps"], at_least=0) or 0,
    }


def _validation(flags: dict[str, Any]) -> dict[str, Any]:
    """When to validate."""
    given = flags["val_check_interval"]
    sanity = whole("num_sanity_val_steps", flags["num_sanity_val_steps"], at_least=-1)
    return {
        "val_check_interval": interval("val_check_interval", 1.0 if given is None else given),
        "check_val_every_n_epoch": whole("check_val_every_n_epoch", flags["check_val_every_n_epoch"], at_least=1),
        "num_sanity_val_steps": 2 if sanity is None else sanity,
    }


def _clipping(flags: dict[str, Any]) -> dict[str, Any]:
    """How gradients are clipped; 0 is no clipping, as in Lightning."""
    value, algorithm = flags["gradient_clip_val"], flags["gradient_clip_algorithm"]
    algorithm = "norm" if algorithm is None else str(algorithm).lower()
    choice("gradient_clip_algorithm", algorithm, ("norm", "value"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0):
        raise MisconfigurationException(
            f"Trainer(gradient_clip_val={value!r}): give a number above 0, or None for no clipping."
        )
    return {"gradient_clip_val": float(value) if value else None, "gradient_clip_algorithm": algorithm}
