"""Implementation of `Trainer.verify`, which writes a script that fits the module, and verifies that script."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import cloudpickle

from lockstep.extensions.verify.certificate import Certificate
from lockstep.extensions.verify.runs import Request
from lockstep.extensions.verify.verification import verify
from lockstep.ground.errors import MisconfigurationException

_SCRIPT = """\
import sys

sys.path[:] = {path!r}
import cloudpickle

with open({parts!r}, "rb") as file:
    flags, model, data, datamodule = cloudpickle.load(file)
import torch
from lockstep import Trainer

if torch.get_default_dtype() == torch.float64:
    model.double()  # it was created with the default type of another process

Trainer(**flags).fit(model, data, datamodule=datamodule)
"""

_QUIET: dict[str, object] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
    "max_time": None,
}


def verify_fit(
    flags: Mapping[str, object], model: object, data: object, datamodule: object, devices: int, steps: int
) -> Certificate:
    """Compare a Trainer's fit on several ranks with one process, and return the certificate with the result.

    Args:
        flags: the Trainer's arguments. Loggers, checkpoints and progress bars are switched off.
        model: the module.
        data: its data loaders, or None.
        datamodule: its data module, or None.
        devices: number of ranks.
        steps: optimizer steps.

    Raises:
        MisconfigurationException: a flag, the module or its data cannot be pickled.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        script, parts = Path(folder) / "fit.py", Path(folder) / "parts.pkl"
        # more steps than are compared: verify stops the fit, not max_steps
        all_flags = {**flags, **_QUIET, "max_steps": 2 * steps}
        try:
            parts.write_bytes(cloudpickle.dumps((all_flags, model, data, datamodule)))
        except Exception as error:  # any error of an object that cannot be pickled
            raise MisconfigurationException(
                f"trainer.verify: the module, its data or a flag of the Trainer cannot be pickled ({error}), but ranks "
                "are separate processes. Verify the script instead: `lockstep verify script.py`"
            ) from error
        path = [each for each in sys.path if isinstance(each, str)]  # Python ignores other entries
        script.write_text(_SCRIPT.format(path=path, parts=str(parts)))
        certificate = verify(Request((str(script),), devices, steps))
    return replace(certificate, script=type(model).__name__)
