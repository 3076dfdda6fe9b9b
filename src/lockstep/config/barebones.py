"""``Trainer(barebones=True)``: everything that costs time beside the model's own steps is off."""

from __future__ import annotations

from typing import Any

from lockstep.config.values import switch
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_zero_info

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
