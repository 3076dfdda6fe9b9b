"""Sees the process group of a script: it is made for the ranks that are there, and every collective is written down."""

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
from lockstep.extensions.verify.settings import is_users, location
from lockstep.extensions.verify.watch import Watch, note_collective, put
from lockstep.ground.comm import COLLECTIVES, RENAMED

PATIENCE = timedelta(seconds=60)
"""How long a rank waits for another in a collective."""


class Groups:
    """Watches `torch.distributed`.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._inside = False
        self._number = 0

    def install(self) -> None:
        """Put it in the place of torch's functions."""
        self._see_beginning()
        if self.watch.settings.simulated:
            fake_group.install(self.watch)
        renamed = {new: COLLECTIVES[old] for old, new in RENAMED.items()}
        for name, payload in {**COLLECTIVES, **renamed}.items():
            function = getattr(dist, name, None)
            if function is not None:
                self._put(name, self._noted(name, function, payload))

    def _put(self, name: str, function: Callable[..., Any]) -> None:
        put(dist, name, function)
        put(dist.distributed_c10d, name, function)

    def _see_beginning(self) -> None:
        begin, new_group = dist.init_process_group, dist.new_group
        settings = self.watch.settings

        @functools.wraps(begin)
        def begun(*args: Any, **kwargs: Any) -> None:
            rank, world = settings.rank, settings.world
            if settings.simulated:
                begin(fake_group.BACKEND, store=fake_group.store(), rank=rank, world_size=world)
            else:
                place = f"file://{Path(settings.folder) / 'store'}"
                begin("gloo", init_method=place, rank=rank, world_size=world, timeout=PATIENCE)
            self.watch.journal.note("group", where=location())

        @functools.wraps(new_group)
        def made(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(new_group).bind(*args, **kwargs).arguments
            ranks = given.get("ranks")
            if ranks is not None:
                given["ranks"] = [rank for rank in ranks if rank < settings.world]
            backend = fake_group.BACKEND if settings.simulated else "gloo"
            return new_group(**{**given, "backend": backend, "timeout": PATIENCE})

        self._tell_size()
        self._put("init_process_group", begun)
        self._put("new_group", made)
        put(torch.multiprocessing, "spawn", self._spawned)
        put(torch.multiprocessing, "start_processes", self._spawned)

    def _tell_size(self) -> None:
        """Tell the script the number of ranks, where one process is to say what it makes of it."""
        settings = self.watch.settings
        if "world size" not in settings.overrides:
            return
        get_world_size, told = dist.get_world_size, len(settings.feed)
        os.environ["WORLD_SIZE"] = str(told)

        def asked(group: Any = None) -> int:
            users = group is None and is_users(sys._getframe(1).f_code.co_filename)
            return told if users else get_world_size(group)

        put(dist, "get_world_size", asked)

    def _spawned(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), *rest: Any, **kwargs: Any) -> None:
        """What a script would have started in processes of its own: this process is one of them already."""
        fn(self.watch.settings.rank, *args)

    def _noted(self, name: str, function: Callable[..., Any], payload: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            whole = group is None or dist.get_world_size(group) == self.watch.settings.world
            self._number += 1
            note_collective(self.watch, name, given.get(payload), self._number, whole)
            self._inside = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._inside = False
            self.watch.journal.note("collected", number=self._number)
            return result

        return noted
