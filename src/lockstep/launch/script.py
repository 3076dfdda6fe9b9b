"""``strategy="ddp"``: this script, started once for each rank of the node."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from lockstep.cluster.base import World
from lockstep.cluster.detect import detect
from lockstep.cluster.local import is_started, rank_variables
from lockstep.cluster.table import LOCAL
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.ground.seed import current_seed
from lockstep.launch.attendance import attended, note_on
from lockstep.launch.causes import Cause, Stray, first_cause, was_caught
from lockstep.launch.children import FAREWELL, GRACE, Children, Ended
from lockstep.launch.inherit import PARENT, SEED, bind_loader_workers, started_in
from lockstep.launch.nested import check_not_nested
from lockstep.launch.notes import Notes
from lockstep.launch.port import free_port
from lockstep.launch.threads import share_cores
from lockstep.launch.watch import Verdict, Watch

T = TypeVar("T")

NOTES = "LOCKSTEP_NOTES"
"""The variable with the address of the notes that a rank leaves when it fails."""

PATIENCE = 30.0
"""Seconds after which a script that has ended says which ranks it waits for."""


class ScriptLauncher:
    """Calls functions in all ranks, having started the script of this process once for each of the others.

    The calling process is local rank 0. The first `launch` in it starts the others with the same command
    line; they run the script from its beginning, come to the same `launch`, find themselves started and go
    on together. Later launches, of the same Trainer or another, find the ranks there. A terminal's Ctrl-C reaches
    each of them by itself; one that only this process got is passed on.

    When a rank fails or strays, the others end within seconds, and the last line on the screen is the first cause.

    Args:
        world: of this process, as `lockstep.cluster.detect.detect` found it.
        launched: whether the ranks are there already, whoever has started them.

    Attributes:
        world: the same, with a port; final once `launch` calls its function.
    """

    def __init__(self, world: World, launched: bool = False) -> None:
        self.world = world
        self._launched = launched

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)``, in this process, when all ranks of the node are started.

        Raises:
            MisconfigurationException: there is no script that could be started again.
        """
        if not self._launched:
            if self.world.local_size > 1 and not is_started(os.environ):
                _others.append(_Others(self.world))
            self.world = detect(os.environ, self.world.local_size, self.world.num_nodes, LOCAL).world
        check_not_nested(self.world)
        share_cores(os.environ, self.world.local_size)
        bind_loader_workers()
        others = _others[0] if _others else None
        address = os.environ.get(NOTES, "") if others is None else others.address
        with nullcontext() if others is None else others.listening(), attended(self.world.rank, address):
            return function(*args, **kwargs)


def command_line(main: ModuleType, argv: Sequence[str], original: Sequence[str]) -> list[str] | None:
    """The command that runs this process' script once more; None where there is no script.

    Args:
        main: the module ``__main__``.
        argv: ``sys.argv``.
        original: ``sys.orig_argv``: all words of the command, from which the arguments are taken where they
            can be told, since a script may have changed ``sys.argv``.
    """
    python = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if argv[0] in ("", "-"):  # typed in, or read from standard input
        return None
    if argv[0] == "-c":
        at = next((i for i, word in enumerate(original) if i and word[0] == "-" and word[-1] == "c"), None)
        return None if at is None else [*python, "-c", *original[at + 1 :]]
    if spec is not None and spec.name != "__main__":
        return [*python, "-m", spec.name, *_after({spec.name, spec.parent}, argv, original)]
    if spec is not None:  # a folder or an archive with a __main__.py
        return [*python, argv[0], *_after({argv[0]}, argv, original)]
    return None if file is None else [*python, os.path.abspath(file), *_after({argv[0]}, argv, original)]


def _after(names: set[str], argv: Sequence[str], original: Sequence[str]) -> Sequence[str]:
    """The script's arguments: what follows its name in the command."""
    at = next((i for i, word in enumerate(original) if i and word in names), None)
    return argv[1:] if at is None else original[at + 1 :]


_others: list[_Others] = []
"""The ranks that this process has started: one entry, or none."""


class _Others:
    """The ranks that this process has started: watched while it runs, waited for when it ends."""

    def __init__(self, world: World) -> None:
        import __main__

        command = command_line(__main__, sys.argv, sys.orig_argv)
        if command is None:
            raise MisconfigurationException(
                "strategy='ddp' starts the script once for each device, and an interactive session has no "
                "script: use strategy='ddp_spawn', or save the code as a file and run that"
            )
        self._leaving = threading.Event()
        self._world = replace(world, port=world.port or free_port())
        self._notes = Notes()
        self._children = Children(self._end, self._notes.is_inside, self._notes.is_someone_ending)
        self._watch = Watch(self._notes, world.local_size == world.size, self._stop, self._ended)
        self._verdict: Verdict | None = None
        self._left_at: float | None = None
        self.address = self._notes.address
        self.listening = self._watch.ear.listening
        atexit.register(self._finish)
        os.environ.update(rank_variables(self._world))
        environ = {**os.environ, NOTES: self.address}
        if current_seed() is not None:
            environ[SEED] = str(current_seed())
        if threading.current_thread() is threading.main_thread():
            # the bond is to the thread that starts a process; another thread than this one may end before
            environ[PARENT] = str(os.getpid())
        for local_rank in range(1, world.local_size):
            environ["LOCAL_RANK"] = str(local_rank)
            handed = (self._notes.descriptor,)
            self._children.start(self._world.rank + local_rank, command, environ, handed, started_in)
        self._children.watch()
        self._watch.start()

    def _ended(self) -> dict[int, float]:
        """Ranks that have come to their end, with the time."""
        own = {} if self._left_at is None else {self._world.rank: self._left_at}
        return {**self._children.ended, **own}

    def _end(self) -> None:
        """In a watcher's thread: a rank has failed. Let this process end by itself, else end it."""
        interrupted = all(end.code == -signal.SIGINT for end in self._children.failed)
        # A collective raises when its peers are gone; what waits for something else never comes back.
        self._await_end(None if interrupted else 1.5 * GRACE)

    def _stop(self, verdict: Verdict) -> None:
        """In the watch's thread: end the others, and this process."""
        self._verdict = verdict
        self._children.stop(GRACE / 4)
        self._await_end(GRACE / 2)  # it may be waiting in a collective, which raises now

    def _await_end(self, seconds: float | None) -> None:
        """Let this process end by itself; longer, if something has been raised in it: it may be saving what it has."""
        ended = self._leaving.wait(seconds)
        if not ended and self._notes.is_someone_ending():
            ended = self._leaving.wait(FAREWELL)
        if not ended:
            self._tell_and_exit(None)

    def _finish(self) -> None:
        """When this process ends: wait for the others; tell who failed first."""
        self._leaving.set()
        error = getattr(sys, "last_value", None)  # what ended the script, if something did
        if error is None:
            self._left_at = time.monotonic()
            self._wait()
        elif not self._children.wait(GRACE):
            self._children.stop()
        self._watch.stop()
        interrupted = isinstance(error, KeyboardInterrupt)
        if self._verdict is not None or (not interrupted and (error is not None or self._children.failed)):
            self._tell_and_exit(error)

    def _wait(self) -> None:
        try:
            if not self._children.wait(PATIENCE):
                log.info("waiting for ranks %s to end", self._children.running)
                self._children.wait()
        except KeyboardInterrupt:
            self._children.stop()

    def _tell_and_exit(self, error: BaseException | None) -> None:
        """Print the first cause as the last line of all ranks, and end.

        Args:
            error: what ended the script in this process; None: it ended well, or has to be ended.
        """
        cause, printed = self._first_cause(error)
        codes = [end.code for end in self._children.failed]
        code = max(codes, default=1)
        interrupted = isinstance(cause, Cause) and cause.is_interrupt
        if interrupted or (self._verdict is not None and self._verdict.interrupted):
            code = 128 + signal.SIGINT
        for worker in multiprocessing.active_children():  # of a loader, say
            worker.kill()
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            sys.stdout.flush()
        trace = f"{cause.trace}\n" if isinstance(cause, Cause) and not printed and not interrupted else ""
        what = "interrupted by Ctrl-C" + ("" if cause is None or isinstance(cause, Cause) else f": {cause}")
        words = what if code == 128 + signal.SIGINT else str(cause)
        with contextlib.suppress(OSError, ValueError):
            print(f"{trace}lockstep: {words}", file=sys.stderr, flush=True)
        os._exit(code if code > 0 else 1)

    def _first_cause(self, error: BaseException | None) -> tuple[Cause | Ended | Stray | None, bool]:
        """The first cause, and whether its traceback is on the screen."""
        failed, stands, notes = self._children.failed, self._watch.stands(), self._notes.read()
        printed = {end.rank for end in failed}
        noted = {cause.rank: cause for cause in notes if cause.rank in printed}
        if error is not None:
            noted[self._world.rank] = note_on(error, self._world.rank)
            printed.add(self._world.rank)
        cause: Cause | Ended | Stray | None = None if self._verdict is None else self._verdict.cause
        if cause is None and not (self._verdict is not None and self._verdict.interrupted):
            caught = [cause for cause in notes if cause.rank not in noted and was_caught(cause, stands)]
            cause = first_cause(failed, sorted(noted.values(), key=lambda cause: cause.at), stands, caught)
        told = isinstance(cause, Cause) and (cause.is_exit or (cause.rank in printed and not cause.lost))
        return cause, told
