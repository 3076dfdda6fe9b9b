"""``strategy="ddp"``: this script, started once for each rank of the node."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

from lockstep.cluster.base import World
from lockstep.cluster.detect import detect
from lockstep.cluster.local import is_started, rank_variables
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import log
from lockstep.ground.seed import current_seed
from lockstep.launch.causes import Cause, Notes, cause_of, first_cause, leave_note
from lockstep.launch.children import GRACE, Children
from lockstep.launch.inherit import PARENT, SEED, started_in
from lockstep.launch.port import free_port
from lockstep.launch.threads import share_cores

T = TypeVar("T")

NOTES = "LOCKSTEP_NOTES"
"""The variable with the address of the notes that a rank leaves when it fails."""

PATIENCE = 30.0
"""Seconds after which a script that has ended says which ranks it waits for."""


class ScriptLauncher:
    """Calls functions in all ranks, having started the script of this process once for each of the others.

    The calling process is local rank 0. The first `launch` in it starts the others with the same command
    line; they run the script from its beginning, come to the same `launch`, find themselves started and go
    on together. Later launches, of the same Trainer or another, find the ranks there. The ranks belong to
    one foreground process
    group: Ctrl-C reaches each of them by itself.

    When a rank fails, the others end within seconds, and the last line on the screen is the first cause.

    Args:
        world: of this process, as `lockstep.cluster.detect.detect` found it.

    Attributes:
        world: the same, with a port; final once `launch` calls its function.
    """

    def __init__(self, world: World) -> None:
        self.world = world

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """``function(*args, **kwargs)``, in this process, when all ranks of the node are started.

        Raises:
            MisconfigurationException: there is no script that could be started again.
        """
        if self.world.local_size > 1 and not is_started(os.environ):
            _Others(self.world)
        self.world = detect(os.environ, self.world.local_size, self.world.num_nodes).world
        share_cores(os.environ, self.world.local_size)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _note(self.world.rank, error)
            raise


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


def _note(rank: int, error: BaseException) -> None:
    """Remember, for the one who tells the first cause, that this exception came out of this rank's run."""
    global _raised
    _raised = (error, cause_of(rank, error))
    if NOTES in os.environ:
        leave_note(os.environ[NOTES], _raised[1])


_raised: tuple[BaseException, Cause] | None = None


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
        self._children = Children(self._end)
        atexit.register(self._finish)
        os.environ.update(rank_variables(self._world))
        environ = {**os.environ, NOTES: self._notes.address}
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

    def _end(self) -> None:
        """In a watcher's thread: a rank has failed. Let this process end by itself, else end it."""
        interrupted = all(end.code == -signal.SIGINT for end in self._children.failed)
        # A collective raises when its peers are gone; what waits for something else never comes back.
        if not self._leaving.wait(None if interrupted else 2 * GRACE):
            self._tell_and_exit(None)

    def _finish(self) -> None:
        """When this process ends: wait for the others; tell who failed first."""
        self._leaving.set()
        error = getattr(sys, "last_value", None)  # what ended the script, if something did
        if error is None:
            self._wait()
        elif not self._children.wait(GRACE):
            self._children.stop()
        if not isinstance(error, KeyboardInterrupt) and (error is not None or self._children.failed):
            self._tell_and_exit(error)

    def _wait(self) -> None:
        if not self._children.wait(PATIENCE):
            log.info("waiting for ranks %s to end", self._children.running)
            try:
                self._children.wait()
            except KeyboardInterrupt:
                self._children.stop()

    def _tell_and_exit(self, error: BaseException | None) -> None:
        """Print the first cause as the last line of all ranks, and end.

        Args:
            error: what ended the script in this process; None: it ended well, or has to be ended.
        """
        codes = {end.rank: end.code for end in self._children.failed}
        causes = [cause for cause in self._notes.read() if cause.rank in codes]
        if error is not None:
            same = _raised is not None and _raised[0] is error
            own = _raised[1] if same and _raised is not None else cause_of(self._world.rank, error)
            causes = sorted([*causes, own], key=lambda cause: cause.at)
        cause = first_cause(self._children.failed, causes)
        code = max(codes.values(), default=1)
        sys.stdout.flush()
        print(f"lockstep: {cause}", file=sys.stderr, flush=True)
        os._exit(code if code > 0 else 1)
