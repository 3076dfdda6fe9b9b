"""NCCL's environment variables, from ``DDPStrategy(nccl=...)``, and a check that NCCL is available.

NCCL reads a variable from the environment, else from the user's file (``~/.nccl.conf``, or ``NCCL_CONF_FILE``), else
from the cluster's (``/etc/nccl.conf``), when it creates its first communicator.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.ground.errors import MisconfigurationException

# -- variables -----------------------------------------------------------------------------------------------


PREFIX = "NCCL_"
CLUSTER_FILE = "/etc/nccl.conf"
USER_FILE = "~/.nccl.conf"


class NcclVariables:
    """NCCL's environment variables for a run. Values in the shell or in NCCL's files take precedence.

    Args:
        values: values by name, with or without ``NCCL_``. Values are text, integers, or booleans (1 and 0).

    Attributes:
        wanted: variables and values in the form that NCCL reads.

    Example:
        >>> NcclVariables({"NSOCKS_PERTHREAD": 4, "IB_DISABLE": True}).wanted
        {'NCCL_NSOCKS_PERTHREAD': '4', 'NCCL_IB_DISABLE': '1'}
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.wanted = {
            PREFIX + name.removeprefix(PREFIX): str(int(value) if isinstance(value, bool) else value)
            for name, value in values.items()
        }
        self._set: list[str] = []
        self._is_set = self._reported = False

    def apply(self, backend: str, group_exists: bool) -> str | None:
        """Set the variables if NCCL is used but has not read them. At the first call, return a message on the result.

        Args:
            backend: backend of the process group, such as "nccl" or "gloo".
            group_exists: whether the group already exists.
        """
        if "nccl" not in backend:
            result = f"they have no effect, because the backend is {backend}, not nccl."
        elif group_exists and not self._is_set:
            result = "they have no effect, because the process group exists already. Set them in the shell."
        else:
            result = self.set()
            self._is_set = True
        first, self._reported = not self._reported, True
        return f"DDPStrategy(nccl={self.values}): {result}" if first else None

    def set(self) -> str:
        """Set each variable that neither the shell nor NCCL's files set. Return a message with values and sources."""
        files, results = _files(), []
        for variable, value in self.wanted.items():
            if variable in os.environ and variable not in self._set:
                results.append(f"{variable}={os.environ[variable]} (from the environment; requested: {value})")
            elif variable in files:
                results.append("{1} (from {0}; requested: {2})".format(*files[variable], value))
            else:
                os.environ[variable] = value
                self._set += [variable] if variable not in self._set else []
                results.append(f"{variable}={value}")
        return f"NCCL's variables in force: {', '.join(results)}."

    def restore(self) -> None:
        """Remove from the environment the variables that `set` has added."""
        while self._set:
            os.environ.pop(self._set.pop(), None)


def _files() -> dict[str, tuple[str, str]]:
    """Return (file, "NAME=value") by name for the variables in NCCL's files. The user's file takes precedence."""
    found: dict[str, tuple[str, str]] = {}
    for name in (CLUSTER_FILE, os.environ.get(PREFIX + "CONF_FILE", USER_FILE)):
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8", errors="replace")
        except (OSError, RuntimeError):  # no such file, or no home folder
            continue
        for line in text.splitlines():
            variable, is_set, value = line.partition("=")
            if is_set and not variable.lstrip().startswith("#"):
                found[variable.strip()] = name, f"{variable.strip()}={value.strip()}"
    return found


# -- availability --------------------------------------------------------------------------------------------


def check_nccl(device_type: str) -> None:
    """Raise an error if the run requests NCCL, but this device or build of torch does not support it.

    Args:
        device_type: type of this rank's device: "cuda", "cpu".

    Raises:
        MisconfigurationException: NCCL is missing, or does not support the device.
    """
    if device_type != "cuda":
        raise MisconfigurationException(
            f"process_group_backend='nccl': NCCL needs GPUs, but the devices of this run are {device_type}: omit "
            "process_group_backend, or use process_group_backend='gloo'."
        )
    if not (dist.is_available() and dist.is_nccl_available()):
        raise MisconfigurationException(
            f"process_group_backend='nccl': torch {torch.__version__} was built without NCCL: install a build of torch "
            "for CUDA, or use process_group_backend='gloo', which also works between GPUs, but is slower."
        )
