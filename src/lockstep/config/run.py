"""`RunConfig`, the Trainer's flags after validation, which needs no model, data or device."""

# ruff: noqa: RUF009 - dataclass fields are made by a function that calls `field`

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

from lockstep.config.compile import CompileOptions, compile_options
from lockstep.data.counting import batches_of_window
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.numbers import whole_number
from lockstep.ground.rank import rank_zero_info, rank_zero_warn

# -- names of flags ------------------------------------------------------------------------------------------


def defaults_of(init: Callable[..., None]) -> dict[str, Any]:
    """Return the default of each Trainer flag by name, in the order of the constructor ``init``."""
    parameters = inspect.signature(init).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


OLD_BACKENDS = ("dp", "ddp", "ddp2", "ddp_cpu", "ddp_spawn", "ddp_sharded", "horovod")
"""Values of `accelerator` in releases 1.0 to 1.4 of Lightning, in which that flag selected the strategy."""


def may_have_old_flags(given: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return True if a Trainer's arguments may contain flags, or values of flags, of Lightning 0.4 to 1.9.

    Args:
        given: current flags with their values.
        others: all other arguments.
    """
    where = [given[name] for name in ("accelerator", "strategy", "devices")]
    return bool(others) or any(value is None for value in where) or where[0] in OLD_BACKENDS


def refuse_unknown_flags(given: dict[str, Any], flags: Collection[str]) -> None:
    """Raise an error if the Trainer received an argument that is not one of its flags.

    Args:
        given: the unknown arguments.
        flags: names of the Trainer's flags.

    Raises:
        WrongType: there is an unknown argument. The message suggests the flag with the closest name.
    """
    for name, value in given.items():
        near = difflib.get_close_matches(name, flags, n=1, cutoff=0.5)
        hint = f" Did you mean `{near[0]}`?" if near else f" The flags are: {', '.join(sorted(flags))}."
        raise WrongType(f"Trainer({name}={value!r}): there is no flag `{name}`.{hint}")


def synchronizes_batchnorm(given: object, devices_of_a_process: int) -> bool:
    """Validate ``sync_batchnorm``. Return True if BatchNorm should use statistics of all ranks.

    Raises:
        MisconfigurationException: the value is not a bool, or one process has several devices.
    """
    if switch("sync_batchnorm", given) and devices_of_a_process > 1:
        raise MisconfigurationException(
            f"Trainer(sync_batchnorm=True) does not support {devices_of_a_process} devices in one process, because "
            'BatchNorm is synchronized only between ranks: use strategy="ddp".'
        )
    return bool(given)


def refuse_unsupported_flags(model_registry: object) -> None:
    """Raise an error if a flag for which lockstep supports only the default has another value.

    Raises:
        MisconfigurationException: such a flag has another value.
    """
    if model_registry is not None:
        raise MisconfigurationException(
            f"Trainer(model_registry={model_registry!r}) is not supported, because lockstep does not upload "
            "checkpoints to Lightning's model hub. Omit it, save checkpoints with ModelCheckpoint(dirpath=...), and "
            "upload the files yourself."
        )


# -- checks of values: each takes a flag's name and its value ------------------------------------------------


def is_number(value: object, *kinds: type) -> TypeGuard[float]:
    """Return True if a value is an instance of one of the classes ``kinds`` and is not a bool."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def switch(flag: str, value: object, *, optional: bool = False) -> bool | None:
    """Validate a flag that must be True or False, and return it. With ``optional``, None is valid, too."""
    if value is None and optional:
        return None
    if not isinstance(value, int) or value not in (0, 1):
        raise MisconfigurationException(f"Trainer({flag}={value!r}) is not valid: pass True or False.")
    return bool(value)


def whole(
    flag: str, value: object, *, at_least: int, default: int | None = None, may_be_off: bool = False
) -> int | None:
    """Validate a flag that must be an integer, and return it. Return ``default`` for None.

    If the flag ``may_be_off``, return 0 for False.
    """
    if value is None:
        return default
    if value is False and may_be_off:
        return 0
    number = whole_number(value)
    if number is None or number < at_least:
        meaning = " (-1 means no limit)" if at_least == -1 else ""
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}) is not valid: pass an integer of at least {at_least}{meaning}."
        )
    return number


def batches_to_try(flag: str, value: object) -> int:
    """Validate ``fast_dev_run``, and return the number of batches to run; 0 if the flag is off."""
    number = int(value) if isinstance(value, bool) else whole_number(value)
    if number is None or number < 0:
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}) is not valid: pass True, False or the number of batches to run."
        )
    return number


def fraction_or_count(flag: str, value: object, *, zero: bool = True, default: float = 1.0) -> int | float:
    """Validate a limit on batches and return it: a number of batches (int), or a fraction of the loader (float).

    A float above 1 without decimals, such as 10.0, is a number of batches.
    """
    if value is None:
        return default
    if is_number(value, int, float) and (value > 0 or (zero and value == 0)):
        if isinstance(value, int) or value <= 1.0:
            return value
        if value.is_integer():
            return int(value)
    raise MisconfigurationException(
        f"Trainer({flag}={value!r}) is not valid: pass a number of batches (an int) or a fraction of the loader "
        "(a float between 0.0 and 1.0)."
    )


def interval(flag: str, value: object) -> int | float | timedelta:
    """Validate an interval: a number of batches, a fraction of an epoch, or a duration."""
    if isinstance(value, (str, dict, timedelta)):
        return duration(flag, value)
    return fraction_or_count(flag, value, zero=False)


def choice(flag: str, value: object, *, choices: tuple[object, ...]) -> object:
    """Validate a flag whose value must be in ``choices``, and return the value."""
    if value not in choices:
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}) is not valid: choose one of {', '.join(map(repr, choices))}."
        )
    return value


def accumulation(flag: str, value: int | dict[int, int]) -> int | dict[int, int]:
    """Validate ``accumulate_grad_batches``: an int, or a dict that maps an epoch to the int from that epoch on."""
    given = value if isinstance(value, dict) else {0: value}
    table: dict[int, int] = {}
    for first, count in given.items():
        epoch, batches = whole_number(first), whole_number(count)
        if epoch is None or batches is None or epoch < 0 or batches < 1:
            raise MisconfigurationException(
                f"Trainer({flag}={value!r}) is not valid: pass an int of at least 1, or a dict from an epoch (counted "
                "from 0) to the number of micro-batches in a step from then on, such as {0: 8, 5: 4}."
            )
        table[epoch] = batches
    return table if isinstance(value, dict) else table[0]


def clip_bound(flag: str, value: object) -> float | None:
    """Validate ``gradient_clip_val`` and return it. Return None for 0, since 0 means no clipping in Lightning."""
    if value is None:
        return None
    message = f"Trainer({flag}={value!r}) is not valid: pass a number above 0, or None for no clipping."
    if not is_number(value, int, float):
        raise WrongType(message)
    if not value >= 0:
        raise MisconfigurationException(message)
    return float(value) or None


def clip_algorithm(flag: str, value: object) -> object:
    """Validate ``gradient_clip_algorithm`` and return it in lower case. Return "norm" for None."""
    return choice(flag, "norm" if value is None else str(value).lower(), choices=("norm", "value"))


def duration(flag: str, value: str | timedelta | dict[str, int]) -> timedelta:
    """Convert a duration ("DD:HH:MM:SS", a dict or a timedelta) to a timedelta."""
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
            f'Trainer({flag}={value!r}) is not valid: pass "DD:HH:MM:SS", a datetime.timedelta, or its arguments as a '
            'dict such as {"hours": 2}.'
        ) from None
    return length


def duration_in_seconds(flag: str, value: str | timedelta | dict[str, int] | None) -> float | None:
    """Convert a duration to seconds. Return None for None."""
    return None if value is None else duration(flag, value).total_seconds()


def seconds(flag: str, value: object) -> float | None:
    """Convert a positive number or a timedelta to seconds. Return None for None, which means no limit."""
    if value is None:
        return None
    found = value.total_seconds() if isinstance(value, timedelta) else value
    if is_number(found, int, float) and 0 < found < float("inf"):
        return float(found)
    raise MisconfigurationException(
        f"Trainer({flag}={value!r}) is not valid: pass a number of seconds above 0, a datetime.timedelta, or None."
    )


def folder(flag: str, value: object) -> str:
    """Validate the path of a folder, and return it. The folder need not exist. None means the working directory."""
    if value is None:
        return os.getcwd()
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r}) is not valid: pass the path of a folder, as a str or a pathlib.Path. The "
            "folder is created when needed."
        )
    path = os.path.expanduser(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise MisconfigurationException(f"Trainer({flag}={path!r}): this path is a file: pass the path of a folder.")
    return path


def check_writable(flag: str, path: str) -> None:
    """Raise an error if the user cannot write to a folder. A folder that does not exist must be creatable."""
    existing = os.path.abspath(path)
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing) or not os.access(existing, os.W_OK | os.X_OK):
        raise MisconfigurationException(
            f"Trainer({flag}={path!r}): logs and checkpoints are written there, but {existing!r} is not writable: "
            f"set `{flag}` to another folder, or set logger=False and enable_checkpointing=False."
        )


# -- barebones -----------------------------------------------------------------------------------------------


# The value of each flag in barebones mode; another value contradicts the mode.
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
    "record": None,
}


def strip(given: dict[str, Any]) -> bool:
    """Apply ``barebones``: turn off the flags that cost time in each step. Return True if ``barebones`` is on.

    Log once which flags are off.

    Args:
        given: the Trainer's flags; changed in place if ``barebones`` is on.

    Raises:
        MisconfigurationException: a flag turns on something that the mode turns off.
    """
    if not switch("barebones", given["barebones"]):
        return False
    for name, off in OFF.items():
        value = given[name]
        if value is not None and not (isinstance(value, (bool, int)) and value == off):
            raise MisconfigurationException(
                f"`Trainer(barebones=True, {name}={value!r:.100})` was passed, but barebones measures the cost of a "
                "bare step, which this flag would increase: remove one of the two."
            )
        given[name] = off
    rank_zero_info(
        "Trainer(barebones=True): checkpoints, loggers, progress bar, model summary, sanity check, anomaly detection, "
        "profiler and `self.log` are off, to minimize the cost of a step."
    )
    return True


NonFinite = Literal["protect", "skip", "stop", "ignore"]
"""Valid values of ``Trainer(non_finite=...)``."""


# -- RunConfig -----------------------------------------------------------------------------------------------


def _flag(check: Callable[..., Any], **options: object) -> Any:
    """Create a field of `RunConfig`. ``check`` validates and converts the value that the user passed for the flag."""
    return field(metadata={"check": partial(check, **options)})


@dataclass(frozen=True)
class RunConfig:
    """The validated flags of a Trainer, with defaults for the flags that the user did not pass.

    Limits of batches are an ``int`` (a number of batches) or a ``float`` in [0, 1] (a fraction of the loader).

    Raises:
        MisconfigurationException: a combination of flags cannot work.
    """

    fast_dev_run: int = _flag(batches_to_try)
    max_epochs: int = _flag(whole, at_least=-1, default=1000)  # -1: no limit
    min_epochs: int = _flag(whole, at_least=0, default=0)
    max_steps: int = _flag(whole, at_least=-1, default=-1)  # -1: no limit
    min_steps: int = _flag(whole, at_least=0, default=0)
    max_time: float | None = _flag(duration_in_seconds)
    limit_train_batches: int | float = _flag(fraction_or_count)
    limit_val_batches: int | float = _flag(fraction_or_count)
    limit_test_batches: int | float = _flag(fraction_or_count)
    limit_predict_batches: int | float = _flag(fraction_or_count)
    overfit_batches: int | float = _flag(fraction_or_count, default=0.0)  # 0: off
    val_check_interval: int | float | timedelta = _flag(interval)
    check_val_every_n_epoch: int | None = _flag(whole, at_least=1)
    num_sanity_val_steps: int = _flag(whole, at_least=-1, default=2, may_be_off=True)  # -1: the whole loader
    log_every_n_steps: int = _flag(whole, at_least=0, default=50)
    accumulate_grad_batches: int | dict[int, int] = _flag(accumulation)
    gradient_clip_val: float | None = _flag(clip_bound)
    gradient_clip_algorithm: Literal["norm", "value"] = _flag(clip_algorithm)
    deterministic: bool | Literal["warn"] | None = _flag(choice, choices=(True, False, None, "warn"))
    benchmark: bool | None = _flag(switch, optional=True)
    inference_mode: bool = _flag(switch)
    use_distributed_sampler: bool = _flag(switch)
    detect_anomaly: bool = _flag(switch)
    non_finite: NonFinite = _flag(choice, choices=get_args(NonFinite))
    reload_dataloaders_every_n_epochs: int = _flag(whole, at_least=0, default=0)  # 0: never
    default_root_dir: str = _flag(folder)
    enable_autolog_hparams: bool = _flag(switch)
    order: Literal["lockstep", "torch"] = _flag(choice, choices=("lockstep", "torch"))
    keep_global_batch: bool = _flag(switch)
    balance: bool = _flag(switch)
    compile: CompileOptions | None = _flag(compile_options)
    record: Literal["hashes"] | None = _flag(choice, choices=(None, "hashes"))
    hang_timeout: float | None = _flag(seconds)
    hang_kill: float | None = _flag(seconds)

    def __post_init__(self) -> None:
        for unit in ("epochs", "steps"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most != -1 and least > most:
                raise MisconfigurationException(
                    f"Trainer(min_{unit}={least}, max_{unit}={most}): the minimum exceeds the maximum: change one of "
                    "them."
                )
        # An interval across epochs has no length that a fraction could refer to.
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise MisconfigurationException(
                f"Trainer(check_val_every_n_epoch=None, val_check_interval={self.val_check_interval!r}): an interval "
                "across epochs must count batches or time: set `val_check_interval` to an int or a duration."
            )

    def accumulation(self, epoch: int) -> int:
        """Return the value of ``accumulate_grad_batches`` for an epoch. Epochs are counted from 0."""
        return batches_of_window(self.accumulate_grad_batches, epoch)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {each.name: each.metadata["check"] for each in fields(RunConfig)}


def config_of(given: dict[str, Any]) -> RunConfig:
    """Create a `RunConfig` from the flags of a Trainer. Ignore flags that are not fields of `RunConfig`.

    Raises:
        MisconfigurationException: a value, or a combination of flags, cannot work.
    """
    values = {name: check(name, given[name]) for name, check in _CHECKS.items()}
    # Another limit replaces the default of max_epochs.
    if given["max_epochs"] is None and (values["max_steps"] != -1 or values["max_time"] is not None):
        values["max_epochs"] = -1
    if given["min_epochs"] is None and given["min_steps"] is not None:
        values["min_epochs"] = min(1, values["max_epochs"] % (1 << 62))  # as in Lightning; -1 is no limit
    overfit = values["overfit_batches"]
    for name in ("limit_train_batches", "limit_val_batches"):
        if overfit and not values["fast_dev_run"] and given[name] is not None and values[name] != overfit:
            rank_zero_warn(
                f"Trainer(overfit_batches={overfit}, {name}={given[name]}): overfit_batches overrides {name}."
            )
    for name in ("fast_dev_run", "overfit_batches"):
        values.update(_implied_by(name, values[name]))
    return RunConfig(**values)


def set_flag(config: RunConfig, name: str, value: object) -> RunConfig:
    """Return a copy of the config with a new value for one flag, after the same checks as in the constructor.

    Raises:
        MisconfigurationException: a value, or a combination of flags, cannot work.
    """
    checked = _CHECKS[name](name, value)
    return replace(config, **{name: checked, **_implied_by(name, checked)})


def _implied_by(name: str, value: Any) -> dict[str, Any]:
    """Return the values that one flag's value implies for other flags, by name."""
    if name == "overfit_batches" and value:
        return {"limit_train_batches": value, "limit_val_batches": value}
    if name != "fast_dev_run" or not value:
        return {}
    limits = dict.fromkeys([name for name in _CHECKS if name.startswith("limit_")], value)
    lengths = {"max_epochs": 1, "min_epochs": 0, "max_steps": value, "min_steps": 0}
    return {**limits, **lengths, "num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
