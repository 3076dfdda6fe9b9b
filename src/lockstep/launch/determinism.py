"""The environment variable that CUDA's matrix products need in order to be deterministic."""

from __future__ import annotations

import os

VARIABLE, WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def fix_cublas_workspaces() -> None:
    """Let cuBLAS use workspaces of fixed sizes; it reads the variable when it is used first.

    A value that the user has set stays. Ranks that are started from here inherit it.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
    """
    os.environ.setdefault(VARIABLE, WORKSPACES)
