"""From the Trainer's flags to one frozen RunConfig: every check that needs no model, no data and no device."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info

# -- names of flags ------------------------------------------------------------------------------------------


DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
    "logger": None,
    "callbacks": None,
    "fast_dev_run": False,
    "max_epochs": None,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "limit_predict_batches": None,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
    "log_every_n_steps": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "deterministic": None,
    "benchmark": None,
    "inference_mode": True,
    "use_distributed_sampler": True,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "plugins": None,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "default_root_dir": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
    "order": "lockstep",
    "debug": None,
    "keep_global_batch": True,
    "hang_timeout": 60.0,
    "hang_kill": 1800.0,
}
"""Every flag of the Trainer, in the order of its signature, and its default."""


def unknown_flags(flags: dict[str, Any]) -> None:
    """Refuse flags that the Trainer does not have, naming the nearest that it has.

    Raises:
        MisconfigurationException: where ``flags`` is not empty.
    """
    for name, value in flags.items():
        near = difflib.get_close_matches(name, [*DEFAULTS], n=1, cutoff=0.5)
        hint = f" Did you mean `{near[0]}`?" if near else f" The flags are: {', '.join(sorted(DEFAULTS))}."
        raise MisconfigurationException(f"Trainer has no flag `{name}` (given {name}={value!r}).{hint}")


def config_of(given: dict[str, Any]) -> RunConfig:
    """The RunConfig of a Trainer's flags; those that it has no field for are left alone.

    Raises:
        MisconfigurationException: for a value, or a combination, that cannot work.
    """
    return resolve({name: given[name] for name in RunConfig.__dataclass_fields__})


def set_flag(config: RunConfig, name: str, value: Any) -> RunConfig:
    """The config with a flag that is set after construction, checked as it is there.

    Raises:
        MisconfigurationException: for a value, or a combination, that cannot work.
    """
    return changed(config, {flag: DEFAULTS[flag] for flag in RunConfig.__dataclass_fields__}, name, value)


def synchronizes_batchnorm(given: Any, devices_of_a_process: int) -> bool:
    """Whether BatchNorm is to take its statistics over all ranks.

    Raises:
        MisconfigurationException: for another value than a bool, or where one process has several devices.
    """
    if switch("sync_batchnorm", given) and devices_of_a_process > 1:
        raise MisconfigurationException(
            f"Trainer(sync_batchnorm=True) where one process drives {devices_of_a_process} devices: BatchNorm is "
            'synchronized over ranks only; use strategy="ddp".'
        )
    return bool(given)


def refuse_what_is_not_there(model_registry: Any) -> None:
    """Flags of Lightning's of which lockstep has only the default.

    Raises:
        MisconfigurationException: with the reason, and what to do.
    """
    if model_registry is not None:
        raise MisconfigurationException(
            f"Trainer(model_registry={model_registry!r}): Lightning sends checkpoints to its company's model hub by "
            "this flag, through the package litmodels; lockstep sends nothing anywhere. Leave it out, keep "
            "checkpoints with ModelCheckpoint(dirpath=...), and upload the files yourself."
        )


# -- values of flags -----------------------------------------------------------------------------------------


def switch(flag: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, (bool, int)) or value not in (True, False):
        raise MisconfigurationException(f"Trainer({flag}={value!r}): give True or False.")
    return bool(value)


def whole(flag: str, value: Any, *, at_least: int) -> int | None:
    """A whole number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        meaning = " (-1 means no limit)" if at_least == -1 else ""
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a whole number of at least {at_least}{meaning}."
        )
    return value


def fraction_or_count(flag: str, value: int | float | None, *, zero: bool = True) -> int | float:
    """A number of batches (an int; a float above 1 without a fraction counts as one), or a part of them (a float)."""
    if value is None:
        return 1.0
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if good and isinstance(value, float) and value > 1.0 and value.is_integer():
        return int(value)
    if not good or (isinstance(value, float) and value > 1.0) or (not zero and value == 0):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give a number of batches (an int) or a fraction of the loader "
            "(a float between 0.0 and 1.0)."
        )
    return value


def interval(flag: str, value: Any) -> int | float | timedelta:
    """A number of batches, a part of an epoch, or a time."""
    if isinstance(value, (str, dict, timedelta)):
        found = duration(flag, value)
        assert found is not None
        return found
    return fraction_or_count(flag, value, zero=False)


def choice(flag: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """One of the choices."""
    if value not in choices:
        raise MisconfigurationException(f"Trainer({flag}={value!r}): choose one of {', '.join(map(repr, choices))}.")
    return value


def accumulation(value: int | dict[int, int]) -> int | dict[int, int]:
    """Micro-batches of a window, or a dict from the first epoch to that."""
    table = value if isinstance(value, dict) else {0: value}
    for epoch, batches in table.items():
        good = all(isinstance(n, int) and not isinstance(n, bool) for n in (epoch, batches))
        if not good or epoch < 0 or batches < 1:
            raise MisconfigurationException(
                f"Trainer(accumulate_grad_batches={value!r}): give an int of at least 1, or a dict from the first "
                "epoch (counted from 0) to the micro-batches of a step from then on, such as {0: 8, 5: 4}."
            )
    return value


def duration(flag: str, value: str | timedelta | dict[str, int] | None) -> timedelta | None:
    """A length of time, or None."""
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
            f'Trainer({flag}={value!r}): give "DD:HH:MM:SS", a datetime.timedelta, or its arguments as a dict '
            'such as {"hours": 2}.'
        ) from None
    return length


def seconds(flag: str, value: Any) -> float | None:
    """A length of time above 0, in seconds, or None for no limit."""
    found = value.total_seconds() if isinstance(value, timedelta) else value
    good = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < float("inf")
    if found is not None and not good:
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give seconds above 0, a datetime.timedelta, or None for off."
        )
    return None if found is None else float(found)


def folder(flag: str, value: Any) -> str:
    """The path of a folder, as text; it need not be there yet."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}): give the path of a folder, a str or a pathlib.Path; it is made when needed."
        )
    path = os.fspath(value)
    if os.path.exists(path) and not os.path.isdir(path):
        raise MisconfigurationException(f"Trainer({flag}={path!r}): there is a file of this name; give a folder.")
    return path


def check_writable(flag: str, path: str) -> None:
    """Refuse a folder, or the one above it where it is to be made, that this user may not write to."""
    there = os.path.abspath(path)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        raise MisconfigurationException(
            f"Trainer({flag}={path!r}): logs and checkpoints are to go there, and {there!r} cannot be written to: "
            f"give `{flag}` another folder, or set logger=False and enable_checkpointing=False."
        )


# -- barebones -----------------------------------------------------------------------------------------------


# Flag -> what it is in barebones mode; whoever asks for something else contradicts the mode.
OFF: dict[str, Any] = {
    "enable_checkpointing": False,
    "logger": False,
    "enable_progress_bar": False,
    "log_every_n_steps": 0,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "detect_anomaly": False,
    "profiler": None,
}


def strip(given: dict[str, Any]) -> bool:
    """Turn off in the given flags what ``barebones`` turns off, and say so once; tells whether it is on.

    Args:
        given: the Trainer's flags; changed in place where ``barebones`` is among them.

    Raises:
        MisconfigurationException: a flag that asks for what the mode turns off.
    """
    if not switch("barebones", given["barebones"]):
        return False
    for name, off in OFF.items():
        value = given[name]
        if value is not None and not (isinstance(value, (bool, int)) and value == off):
            raise MisconfigurationException(
                f"Trainer(barebones=True, {name}={value!r:.100}): the mode is for measuring what a step costs; this "
                "adds to it; leave out one of the two."
            )
        given[name] = off
    rank_zero_info(
        "Trainer(barebones=True): checkpoints, loggers, progress bar, model summary, sanity check, anomaly detection, "
        "profiler and `self.log` are off, so that a step costs the least."
    )
    return True


# -- RunConfig -----------------------------------------------------------------------------------------------


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
