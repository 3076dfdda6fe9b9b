"""The names of the Trainer's flags, and what is said of one that it does not have."""

from __future__ import annotations

import difflib
from typing import Any

from lockstep.config.run import RunConfig, changed, resolve
from lockstep.config.values import switch
from lockstep.ground.errors import MisconfigurationException

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
