"""The version of CUDA that the driver of this machine knows."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def cuda_driver_version() -> int:
    """Asked of the driver itself, without using a GPU: torch has no name for it.

    Returns:
        as CUDA writes it: 12040 is 12.4. 0: there is no driver, or it does not say.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        failed = driver.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value
