"""Counts what a rank sends to others, whoever sends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from lockstep import Callback

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce_scatter_tensor",
)


@contextmanager
def counted() -> Iterator[list[str]]:
    """The names of the collectives that are called meanwhile, over groups of more than one rank."""
    calls: list[str] = []

    def noting(name: str) -> Any:
        own = getattr(dist, name)

        @wraps(own)  # the trace, installed by the first fit of a process, reads the names of its arguments
        def call(*args: Any, **kwargs: Any) -> Any:
            groups = [each for each in (*args, *kwargs.values()) if isinstance(each, dist.ProcessGroup)]
            if not groups or dist.get_world_size(groups[0]) > 1:
                calls.append(name)
            return own(*args, **kwargs)

        return patch.object(dist, name, call)

    with ExitStack() as patches:
        for name in COLLECTIVES:
            patches.enter_context(noting(name))
        yield calls


class ByStep(Callback):
    """What each training step has sent, from the batch's start to the optimizer's update and the average after it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.steps: list[list[str]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(list(self.calls))
