"""Patches of `torch.distributed` that set up groups with the run's rank and world size, and record collectives."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.extensions.verify import fake_group
from lockstep.extensions.verify.settings import is_user_code
from lockstep.extensions.verify.watch import Watch, patch, record_collective
from lockstep.ground.comm import COLLECTIVES, RENAMED

TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for another in a collective."""


class Groups:
    """Observer that patches `torch.distributed` to set up the run's process groups and to record collectives.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._is_inside = False
        self._number = 0

    def install(self) -> None:
        """Patch the functions of `torch.distributed` that set up groups and those that communicate."""
        self._replace_setup()
        if self.watch.settings.simulated:
            fake_group.install(self.watch)
        if "world size" in self.watch.settings.overrides:
            self._report_size_of_ranks()
        # torch 2.13 has renamed some, and its FSDP2 calls them by the new names
        renamed = {new: COLLECTIVES[old] for old, new in RENAMED.items()}
        for name, payload in {**COLLECTIVES, **renamed}.items():
            function = getattr(dist, name, None)
            if function is not None:
                self._patch(name, self._wrap(name, function, payload))

    def _patch(self, name: str, function: Callable[..., Any]) -> None:
        # torch's own code looks these functions up in distributed_c10d
        patch(dist, name, function)
        patch(dist.distributed_c10d, name, function)

    def _replace_setup(self) -> None:
        init_process_group, new_group = dist.init_process_group, dist.new_group
        settings = self.watch.settings

        @functools.wraps(init_process_group)
        def init(*args: Any, **kwargs: Any) -> None:
            rank, world = settings.rank, settings.world
            if settings.simulated:
                init_process_group(fake_group.BACKEND, store=fake_group.store(), rank=rank, world_size=world)
            else:
                # a file instead of a port: nothing else on the machine can take it
                place = f"file://{Path(settings.folder) / 'store'}"
                init_process_group("gloo", init_method=place, rank=rank, world_size=world, timeout=TIMEOUT)

        @functools.wraps(new_group)
        def new(*args: Any, **kwargs: Any) -> Any:
            arguments = inspect.signature(new_group).bind(*args, **kwargs).arguments
            ranks = arguments.get("ranks")
            if ranks is not None:
                # one process runs the script of several ranks
                arguments["ranks"] = [rank for rank in ranks if rank < settings.world]
            backend = fake_group.BACKEND if settings.simulated else "gloo"
            return new_group(**{**arguments, "backend": backend, "timeout": TIMEOUT})

        def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *rest: Any, **kwargs: Any) -> None:
            # this process is already one of those that the script would start
            fn(settings.rank, *args)

        self._patch("init_process_group", init)
        self._patch("new_group", new)
        patch(torch.multiprocessing, "spawn", spawn)
        patch(torch.multiprocessing, "start_processes", spawn)

    def _report_size_of_ranks(self) -> None:
        """In the one-process run, return the ranks' world size to user code, to check if learning rates then agree."""
        get_world_size, size = dist.get_world_size, len(self.watch.settings.feed)
        os.environ["WORLD_SIZE"] = str(size)

        def size_for_user(group: Any = None) -> int:
            # torch's own calls need the true size
            is_user = group is None and is_user_code(sys._getframe(1).f_code.co_filename)
            return size if is_user else get_world_size(group)

        patch(dist, "get_world_size", size_for_user)

    def _wrap(self, name: str, function: Callable[..., Any], payload: str) -> Callable[..., Any]:
        """Wrap a collective so that its calls are recorded, except those inside another collective.

        Args:
            name: name of torch's function.
            function: torch's function.
            payload: name of the argument that is sent.
        """
        signature = inspect.signature(function)

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            arguments = signature.bind(*args, **kwargs).arguments
            group = arguments.get("group")
            whole = group is None or dist.get_world_size(group) == self.watch.settings.world
            self._number += 1
            record_collective(self.watch, name, arguments.get(payload, arguments.get("obj")), self._number, whole)
            self._is_inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_inside = False
            # a rank whose last event is a collective waits in it
            self.watch.journal.record("collected", number=self._number)
            return result

        return recorded
