"""The flags that torch keeps for the whole process, not for one Trainer."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.launch.cuda import fix_cublas_workspaces


def apply_to_process(config: Any, device_type: str) -> None:
    """Set what ``deterministic`` and ``benchmark`` ask for in this process; None leaves torch as it is.

    Args:
        config: the RunConfig.
        device_type: of the run; only CUDA needs more than torch's own switch.
    """
    deterministic, benchmark = config.deterministic, config.benchmark
    if deterministic and benchmark:
        rank_zero_warn(
            f"Trainer(deterministic={deterministic!r}, benchmark=True): cuDNN's choice among its algorithms depends on "
            "timings, so runs may differ; leave out `benchmark`."
        )
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is not None:
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic and device_type == "cuda":
        fix_cublas_workspaces()


def announce(config: Any) -> None:
    """Say what makes a run slow, in the process that the user has started."""
    if config.detect_anomaly:
        rank_zero_info(
            "Trainer(detect_anomaly=True): every backward is searched for NaN, which is slow; for debugging only."
        )
