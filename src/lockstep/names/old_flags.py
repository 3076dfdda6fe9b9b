"""Translation of Trainer flags that PyTorch Lightning 0.4 to 1.9 (2019 to 2022) had to current flags.

A script that uses old flags runs with one warning, which shows the current spelling, or gets an error with a solution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.config.run import OLD_BACKENDS
from lockstep.ground.accelerators import CUDAAccelerator
from lockstep.ground.errors import MisconfigurationException, WrongType
from lockstep.ground.rank import rank_zero_deprecation

Today = dict[str, Any]
"""Values of current flags, by name."""

REMOVED = "this old flag was removed"
"""Part of the message about a flag without a translation; the migration searches for it."""


@dataclass(frozen=True)
class OldFlag:
    """Translation rule for one old flag: its current equivalent, the values that have no effect, and message text."""

    today: Callable[[Any], Today] | None = None
    """Function from the old flag's value to current flags; None: the flag cannot be translated."""
    idle: tuple[Any, ...] = ()
    """Values that turned the flag off; they have no effect."""
    why: str = ""
    """Part of the message: the alternative if the flag is refused, or the reason if it has no effect."""


@dataclass
class Translation:
    """Result of the translation of old flags: the equivalent current flags, and the text of the warning.

    Attributes:
        flags: current flags.
        callbacks: callbacks to add to the user's.
        resume: checkpoint for ``fit`` if the call names none.
        spelled: the current spelling of each argument.
        notes: further sentences of the warning.
    """

    flags: Today = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)
    resume: Any = None
    spelled: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def with_callbacks(self, given: Callback | Sequence[Callback] | None) -> list[Any]:
        """Return the callbacks that replace old flags, followed by the callbacks in ``Trainer(callbacks=...)``."""
        given = [] if given is None else given
        return self.callbacks + (list(given) if isinstance(given, (list, tuple)) else [given])


def _renamed(name: str) -> OldFlag:
    return OldFlag(today=lambda value: {name: value})


def _part(name: str) -> OldFlag:
    # These flags were fractions: an int of 1 meant the whole loader, and means one batch today.
    return OldFlag(today=lambda value: {name: float(value)})


def _no_effect(why: str) -> OldFlag:
    return OldFlag(today=lambda value: {}, why=why)


def _refused(way_out: str, *idle: object) -> OldFlag:
    return OldFlag(idle=idle, why=way_out)


def _early_stop(value: object) -> Today:
    # callbacks are imported by the flags that ask for them: a run without old flags loads none
    from lockstep.callbacks.early_stopping import EarlyStopping

    if value is False:
        return {}
    return {"callbacks": value if isinstance(value, Callback) else EarlyStopping("val_loss", patience=3)}


def _summary(value: object) -> Today:
    from lockstep.callbacks.model_summary import ModelSummary

    if value is None:
        return {"enable_model_summary": False}
    if value not in ("top", "full"):
        raise MisconfigurationException(
            f"Trainer(weights_summary={value!r}) is not valid: choose 'top', 'full' or None."
        )
    return {"callbacks": ModelSummary(max_depth=1 if value == "top" else -1)}


def _refresh_rate(value: int | None) -> Today:
    from lockstep.callbacks.progress.tqdm import TQDMProgressBar

    if value == 0:
        return {"enable_progress_bar": False}
    return {} if value is None else {"callbacks": TQDMProgressBar(refresh_rate=value)}


_TPU = "use accelerator='tpu', devices=8, with the package torch_tpu"
_IPU = "torch's package for IPUs is discontinued; use accelerator='auto'"

# The meaning of each depends on the others (devices, strategy, precision): `_where` and `_precision` read them.
TOGETHER = frozenset(
    {
        "gpus",
        "nb_gpu_nodes",
        "num_gpu_nodes",
        "distributed_backend",
        "num_processes",
        "use_amp",
        "amp_level",
        "amp_backend",
    }
)

ROWS: dict[str, OldFlag] = {
    "max_nb_epochs": _renamed("max_epochs"),
    "min_nb_epochs": _renamed("min_epochs"),
    "train_percent_check": _part("limit_train_batches"),
    "val_percent_check": _part("limit_val_batches"),
    "test_percent_check": _part("limit_test_batches"),
    "overfit_pct": _part("overfit_batches"),
    "nb_sanity_val_steps": _renamed("num_sanity_val_steps"),
    "gradient_clip": _renamed("gradient_clip_val"),
    "row_log_interval": _renamed("log_every_n_steps"),
    "add_row_log_interval": _renamed("log_every_n_steps"),
    "log_save_interval": _no_effect("loggers write immediately"),
    "flush_logs_every_n_steps": _no_effect("loggers write immediately; CSVLogger has an argument for it"),
    "default_save_path": _renamed("default_root_dir"),
    "weights_save_path": _refused("use callbacks=ModelCheckpoint(dirpath=...)", None),
    "checkpoint_callback": OldFlag(
        today=lambda value: (
            {"callbacks": value} if isinstance(value, Callback) else {"enable_checkpointing": bool(value)}
        )
    ),
    "early_stop_callback": OldFlag(today=_early_stop),
    "enable_early_stop": _refused("use callbacks=EarlyStopping('val_loss', patience=3)", False),
    "weights_summary": OldFlag(today=_summary),
    "show_progress_bar": _renamed("enable_progress_bar"),
    "progress_bar_refresh_rate": OldFlag(today=_refresh_rate),
    "process_position": _refused("use callbacks=TQDMProgressBar(process_position=...)", 0),
    "track_grad_norm": _refused(
        "call `self.log_dict(grad_norm(self, norm_type=2))` in the module's `on_before_optimizer_step`, with grad_norm "
        "from lockstep.utilities",
        -1,
        None,
    ),
    "print_nan_grads": _refused("use detect_anomaly=True, which names the operation that produced a NaN", False),
    "terminate_on_nan": OldFlag(
        today=lambda value: {"non_finite": "stop"} if value else {}, why="NaN ends the fit before the update"
    ),
    "auto_lr_find": _refused(
        "call `Tuner(trainer).lr_find(model)`, with Tuner from lockstep.tuner, before fit", False, None
    ),
    "auto_scale_batch_size": _refused(
        "call `Tuner(trainer).scale_batch_size(model)`, with Tuner from lockstep.tuner, before fit", False, None
    ),
    "auto_select_gpus": _refused("list the devices: devices=[...], or set CUDA_VISIBLE_DEVICES", False),
    "resume_from_checkpoint": OldFlag(why="a fit without `ckpt_path` resumes from it"),
    "tpu_cores": _refused(_TPU, None),
    "num_tpu_cores": _refused(_TPU, None),
    "ipus": _refused(_IPU, None),
    "move_metrics_to_cpu": _no_effect("logged values are kept as sums, not as a history"),
    "multiple_trainloader_mode": _refused(
        "pass `train_dataloaders=CombinedLoader(loaders, mode=...)` to fit()", "max_size_cycle"
    ),
    "stochastic_weight_avg": _refused("use callbacks=StochasticWeightAveraging(swa_lrs=...)", False),
    "replace_sampler_ddp": _renamed("use_distributed_sampler"),
    "truncated_bptt_steps": _refused(
        "split the sequence in `training_step`, with `self.automatic_optimization = False`", None
    ),
    "reload_dataloaders_every_epoch": OldFlag(
        today=lambda value: {"reload_dataloaders_every_n_epochs": int(bool(value))}
    ),
    "log_gpu_memory": _refused("use callbacks=DeviceStatsMonitor()", None, False),
    "prepare_data_per_node": _refused("set `self.prepare_data_per_node = False` in the module or data module", True),
    "automatic_optimization": _refused(
        "set `self.automatic_optimization = False` in the module's __init__", True, None
    ),
    "enable_pl_optimizer": _no_effect("`self.optimizers()` returns wrapped optimizers by default"),
    "experiment": _refused("use logger=, such as TensorBoardLogger(folder)", None),
    "debug": _refused(
        "set the environment variable TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch checks that all ranks call the "
        "same collectives",
        None,
    ),
    "cluster": _refused("the cluster is detected from the environment variables of its jobs", None),
    "current_gpu_name": _no_effect("the device of a process follows from its rank"),
    "lr_scheduler_milestones": _refused(
        "return a torch.optim.lr_scheduler.MultiStepLR from configure_optimizers", None
    ),
}
"""Translations of the old flags, by name."""

OLD_FLAGS = TOGETHER | ROWS.keys()


def old_flags_of(given: Today, others: Today) -> Today:
    """Remove old flags, and old values of current flags, from a Trainer's arguments. Return them as a dict.

    Args:
        given: current flags with their values. An old value is reset to its default here.
        others: all other arguments, from which old flags are removed.
    """
    old = {name: others.pop(name) for name in [*others] if name in OLD_FLAGS}
    for name in ("accelerator", "strategy", "devices"):
        if given[name] is None:
            given[name] = "auto"  # the default of 1.5 to 1.9
    if given["accelerator"] in OLD_BACKENDS:
        old.setdefault("distributed_backend", given["accelerator"])
        given["accelerator"] = "auto"
    return old


def translate(old: Today, given: Today, defaults: Today) -> Translation:
    """Translate old flags to current ones, and issue one warning for all of them.

    Args:
        old: the old flags.
        given: current flags as they were passed to the Trainer.
        defaults: their default values.

    Raises:
        MisconfigurationException: as for `meaning`.
    """
    translation = meaning(old, given, defaults)
    before = ", ".join(f"{name}={value!r:.60}" for name, value in old.items())
    today = ", ".join(dict.fromkeys(piece for piece in translation.spelled if not piece.startswith("trainer.")))
    calls = [piece for piece in translation.spelled if piece.startswith("trainer.")]
    notes = "".join(f" ({note})" for note in translation.notes)
    rank_zero_deprecation(
        f"Trainer({before}) is an old spelling. Use {' and '.join([f'Trainer({today})', *calls])}{notes}.",
        stacklevel=3,  # the line that creates the Trainer
    )
    return translation


def meaning(old: Today, given: Today, defaults: Today, *, here: bool = True) -> Translation:
    """Return the current flags that are equivalent to old flags, without a warning.

    Args:
        old: as for `translate`.
        given: as for `translate`.
        defaults: as for `translate`.
        here: True if the run is on this machine, False if it is on an unknown machine with several GPUs.

    Raises:
        MisconfigurationException: a flag has no translation (the message has a solution), contradicts a current flag,
            or has an invalid value; or the GPUs do not exist on this machine.
    """
    translation = Translation()
    _where(old, given, translation, here)
    _precision(old, translation)
    for name, value in old.items():
        if name in TOGETHER or any(value is off or value == off for off in ROWS[name].idle):
            continue
        if name == "resume_from_checkpoint":
            if value is not None:
                translation.resume = value
                translation.spelled.append(f"trainer.fit(..., ckpt_path={value!r})")
            continue
        row = ROWS[name]
        if row.today is None:
            raise WrongType(f"Trainer({name}={value!r:.100}): {REMOVED}; {row.why}.")
        today = row.today(value)
        if not today and row.why:
            translation.notes.append(f"`{name}` has no effect: {row.why}")
        _add(translation, name, today)
    _check(translation, old, given, defaults)
    return translation


def _add(translation: Translation, name: str, today: Today) -> None:
    for flag, value in today.items():
        if flag == "callbacks":
            translation.callbacks.append(value)
            translation.spelled.append(f"callbacks=[{type(value).__name__}(...)]")
        else:
            translation.flags[flag] = value
            translation.spelled.append(f"{flag}={value!r}")


def _where(old: Today, given: Today, translation: Translation, here: bool) -> None:
    """Add the translation of the old flags for devices, nodes and strategy to ``translation``."""
    nodes = [old[name] for name in ("nb_gpu_nodes", "num_gpu_nodes") if name in old]
    today: Today = {"num_nodes": nodes[0]} if nodes else {}
    devices, gpus = _devices(old, given, translation, here)
    strategy = _strategy(old, given, nodes[0] if nodes else given["num_nodes"], gpus)
    if strategy is not None:
        devices["strategy"] = strategy
    _add(translation, "gpus", {**today, **devices})


def _devices(old: Today, given: Today, translation: Translation, here: bool) -> tuple[Today, int | None]:
    """Return (current flags that replace the old device flags, number of GPUs). The number is None if it is unknown."""
    backend, processes = old.get("distributed_backend"), old.get("num_processes", 1)
    today: Today = {}
    gpus: int | None = None
    if "gpus" in old:
        devices, gpus = _gpus(old["gpus"], here)
        today["accelerator"], today["devices"] = ("gpu", devices) if gpus else ("cpu", "auto")
    elif backend is not None and given["accelerator"] == given["devices"] == "auto" and "num_processes" not in old:
        # A backend without `gpus` meant the CPU, also on a machine with GPUs.
        today["accelerator"], gpus = "cpu", 0
        translation.notes.append("without `gpus` a run was on the CPU")
    if processes is not None and (processes != 1 or backend == "ddp_cpu") and today.get("accelerator") != "gpu":
        today["accelerator"], today["devices"] = "cpu", processes
    return today, gpus


def _strategy(old: Today, given: Today, nodes: object, gpus: int | None) -> str | None:
    """Return the strategy for the old distributed backend, given the number of nodes and of GPUs per node."""
    backend, is_open = old.get("distributed_backend"), given["strategy"] == "auto"
    several_nodes = isinstance(nodes, int) and nodes > 1
    # Without a backend several GPUs of one node were DataParallel in one process, and several nodes were
    # DistributedDataParallel.
    if backend == "dp" and gpus is not None and gpus <= 1:
        backend = None
    elif backend is None and gpus is not None and gpus > 1 and is_open:
        backend = "dp"
    if several_nodes and backend in (None, "dp") and is_open:
        return "ddp"
    return "ddp_spawn" if backend == "ddp_cpu" else backend


def _gpus(value: object, here: bool) -> tuple[Any, int]:
    """Translate a value of the old flag ``gpus``. Return (value of ``devices``, number of GPUs).

    Raises:
        MisconfigurationException: the value is invalid, or this machine has no GPU.
    """
    if isinstance(value, str) and value.strip() == "-1":
        value = -1
    elif isinstance(value, str):  # "3" was the GPU with this index, not three GPUs
        try:
            value = [int(part) for part in value.split(",") if part.strip()]
        except ValueError:
            value = False
    if value is None or value == [] or (not isinstance(value, bool) and isinstance(value, int) and value == 0):
        return "auto", 0
    if isinstance(value, bool) or not isinstance(value, (int, list, tuple)):
        raise MisconfigurationException(
            "Trainer(gpus=...) must be a number, a list such as [0, 1] or a string such as '0, 1'. The current "
            "spelling is accelerator='gpu', devices=2."
        )
    if here and not CUDAAccelerator.is_available():
        raise MisconfigurationException(
            f"Trainer(gpus={value!r}) was requested, but torch finds no GPU on this machine. To run on the CPU, omit "
            f"`gpus`; the current spelling is accelerator='gpu', devices={value!r}."
        )
    if isinstance(value, int):
        every = CUDAAccelerator.auto_device_count() if here else 2  # any number above 1 for another machine
        return value, every if value == -1 else value
    return list(value), len(value)


def _precision(old: Today, translation: Translation) -> None:
    """Add the translation of the old flags for precision to ``translation``."""
    level, amp = old.get("amp_level"), old.get("use_amp", False)
    if old.get("amp_backend", "native") not in ("native", None):
        raise MisconfigurationException(
            f"Trainer(amp_backend={old['amp_backend']!r}) is no longer supported, because torch itself has mixed "
            "precision: use precision='16-mixed'."
        )
    if not amp:
        if level is not None and "use_amp" in old:
            translation.notes.append(f"`amp_level={level!r}` had no effect without `use_amp=True`")
        elif level is not None:
            translation.notes.append(f"`amp_level={level!r}` was for apex; torch's mixed precision has no levels")
        return
    if level is not None:
        translation.notes.append(f"`amp_level={level!r}` was for apex; torch's mixed precision has no levels")
    # Of apex's levels only O0 and O3 were not mixed precision.
    _add(translation, "use_amp", {"precision": {"O0": "32-true", "O3": "16-true"}.get(str(level), "16-mixed")})


def _check(translation: Translation, old: Iterable[str], given: Today, defaults: Today) -> None:
    for flag, value in translation.flags.items():
        if given[flag] != defaults[flag] and given[flag] != value:
            raise MisconfigurationException(
                f"Trainer({flag}={given[flag]!r:.100}) contradicts the old flags {', '.join(sorted(old))}, which mean "
                f"{flag}={value!r}: remove one of the two."
            )
