"""The list of all hooks and handlers that lockstep installs in its process, in Python, torch or the system.

Code installs something only through its entry here, so the list is complete. A test compares it with the source, and
with the process before and after a fit. An entry that belongs to a fit is removed when the fit ends. An entry that
stays is kept until the process ends, for the reason in its entry, and does nothing while no fit runs.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Undo = Callable[[], object]


INSTALLED: list[Installation] = []
"""All installations, in order of definition; extensions add theirs on import."""


class Installation:
    """A hook or handler that lockstep installs at most once in a process.

    Args:
        name: name of the hook in Python or torch.
        homes: the files that install the hook.
        why: why the hook is needed and, if it stays after a fit, why it stays.
        stays: True if the hook stays until the process ends.
    """

    def __init__(self, name: str, homes: tuple[str, ...], why: str, stays: bool = True) -> None:
        self.name, self.homes, self.why, self.stays = name, homes, why, stays
        INSTALLED.append(self)
        self._count = 0
        self._undo: Undo | None = None

    @property
    def is_installed(self) -> bool:
        """True if the hook is currently installed."""
        return self._count > 0

    def install(self, put: Callable[[], Undo | None]) -> None:
        """Install the hook by calling ``put``, unless the hook is already installed.

        Args:
            put: installs the hook and returns the function that removes it; None if it cannot be removed.
        """
        if not self._count:
            self._count = 1
            self._undo = put()

    def remove(self) -> None:
        """Remove the hook. Do nothing if it is not installed or cannot be removed."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
            self._count = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark the hook as installed inside the block. The caller must install and remove the hook."""
        self.mark_installed()
        try:
            yield
        finally:
            self.mark_removed()

    def mark_installed(self) -> None:
        """Mark the hook as installed. The caller has installed it, and must call `mark_removed` after removing it."""
        self._count += 1

    def mark_removed(self) -> None:
        """Undo `mark_installed` after the caller has removed the hook."""
        self._count -= 1

    def at_fork(
        self,
        before: Callable[[], object] | None = None,
        after_in_child: Callable[[], object] | None = None,
        after_in_parent: Callable[[], object] | None = None,
    ) -> None:
        """Register functions that Python calls at each fork. The functions cannot be unregistered."""

        def put() -> None:
            if before is not None:
                os.register_at_fork(before=before)
            if after_in_child is not None:
                os.register_at_fork(after_in_child=after_in_child)
            if after_in_parent is not None:
                os.register_at_fork(after_in_parent=after_in_parent)

        if hasattr(os, "register_at_fork"):
            self.install(put)

    def at_exit(self, do: Callable[..., object], *args: object) -> None:
        """Register a function that runs when the process exits.

        A function without arguments runs once. With arguments, it runs once for each call of this method.
        """
        if not args:
            atexit.unregister(do)
        atexit.register(do, *args)
        self._count, self._undo = 1, lambda: atexit.unregister(do)


ALIASES = Installation(
    "sys.meta_path", ("names/finder.py",), "Lightning's import paths, from `import lockstep` on, as any import"
)
LIGHTNING = Installation(
    "sys.meta_path: Lightning's names",
    ("launch/site/sitecustomize.py",),  # and the extension
    "where a script written for Lightning runs unchanged, its imports lead to lockstep as long as the process lives",
)
EXCEPTHOOK = Installation(
    "sys.excepthook",
    ("supervise/status.py", "launch/site/sitecustomize.py"),
    "notes what ends a rank's script, and folds long tracebacks; on one process it is installed when a call fails, "
    "in a rank of `lockstep run` before the script's first line. It stays, since an uncaught error ends the process "
    "only after the call",
)
MODULE_HOOKS = Installation(
    "torch's hooks on parameters, buffers and submodules that are registered",
    ("engines/ddp/late_parameters.py",),
    "report parameters that are added late; a hook for each model could be removed within torch's loop over the hooks",
)
TORCH_COLLECTIVES = Installation(
    "torch's collectives",
    ("supervise/collective_trace.py",),
    "note what a rank does; they stay for the code after the fit, for which other ranks may wait, too",
)
STACK = Installation(
    "faulthandler, and the thread lockstep-sample",
    ("supervise/stack_request.py",),
    "report to the supervisor where a rank is, also after its fit, until the process ends",
)
DEVICE_MARKS = Installation(
    "the thread lockstep-device-marks",
    ("supervise/device_marks.py",),
    "note which queued collectives the device has completed, also after a fit, where other ranks may wait, too",
)
PASSED_ON = Installation(
    "the handler of the signal SIGRTMIN+10",
    ("supervise/signals.py",),
    "a Ctrl-C that is passed on after a fit would end the process; it is ignored then",
)
HANDLERS = Installation(
    "handlers of signals",
    ("supervise/signals.py",),
    "a signal is acted on at the next boundary",
    stays=False,
)
WAKEUP = Installation(
    "signal.set_wakeup_fd", ("supervise/signals.py",), "a Ctrl-C is received in a collective, too", stays=False
)
STREAMS = Installation(
    "sys.stdout and sys.stderr",
    ("callbacks/progress/tqdm.py",),
    "printed lines appear above the bars",
    stays=False,
)
FORK_GARBAGE = Installation(
    "os.register_at_fork: the collector of garbage",
    ("ground/fork_and_exit.py",),
    "a child must not collect its parent's process group, nor memory that is pinned for a device",
)
FORK_THREADS = Installation(
    "os.register_at_fork: wait for torch's threads",
    ("ground/fork_and_exit.py",),
    "a fork may copy a lock that is taken",
)
FORK_WAKEUP = Installation(
    "os.register_at_fork: signal.set_wakeup_fd", ("supervise/signals.py",), "a child must not report Ctrl-C as its rank"
)
FORK_TRACE = Installation(
    "os.register_at_fork: torch's collectives",
    ("supervise/collective_trace.py",),
    "a child writes no trace of its rank",
)
FORK_WORKERS = Installation(
    "os.register_at_fork: prctl", ("launch/environment.py",), "the system ends loader workers with their rank"
)
EXIT_THREADS = Installation(
    "atexit: wait for torch's threads",
    ("ground/fork_and_exit.py",),
    "a thread that needs the interpreter while it shuts down aborts the process",
)
EXIT_GROUP = Installation("atexit: leave the process group", ("engines/ranks.py",), "the group stays after a fit")
EXIT_WORKERS = Installation(
    "atexit: kill loader workers", ("data/workers.py",), "persistent workers live as long as their loader"
)
EXIT_SUPERVISOR = Installation(
    "atexit: take leave of the supervisor", ("supervise/status.py",), "a failed rank waits for the first cause"
)
EXIT_JOB = Installation(
    "atexit: forget what a SLURM job has saved", ("launch/attempts.py",), "the job may end in the code after the fit"
)
