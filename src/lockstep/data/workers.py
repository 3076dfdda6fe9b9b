"""Support for loader workers: their number, the signals that they block, and errors that explain why a worker died."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from lockstep.ground.errors import MisconfigurationException, words_of
from lockstep.ground.installed import EXIT_WORKERS

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.synchronize import Condition, Semaphore


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return an upper bound for ``num_workers``: the available cores per rank minus one for the rank.

    Args:
        local_world_size: number of ranks on this machine.

    Raises:
        MisconfigurationException: fewer than one rank.
    """
    if local_world_size < 1:
        raise MisconfigurationException(
            f"suggested_max_num_workers(local_world_size={local_world_size}): pass the number of ranks, which is at "
            "least 1."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world_size - 1)


SECONDS_FOR_LOCK = 1.0
"""Seconds to wait for the lock of a pass's end event; a living worker has the lock for microseconds."""

SECONDS_FOR_END = 5.0
"""Seconds to wait for the end of a worker whose connection broke, which may write a core dump first."""

SENT_TO_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a terminal or a cluster sends to all processes of a job."""


def opened(loader: Iterable[Any]) -> Iterator[Any]:
    """Return ``iter(loader)``, modified so that reading raises an error, instead of hanging, if a worker is killed.

    torch ends its workers by a `multiprocessing.Event`, and each worker takes the event's lock once a batch. A worker
    that is killed at that moment (by the kernel, out of memory) never releases the lock. The training process would
    then wait for it forever instead of raising torch's error. Here that process gets a different event.

    A cluster signals all processes of a job, and the run could not reach its boundary without its workers. Workers
    therefore block the signals that this process handles, whatever their start method.

    A worker that dies while a batch is fetched from it may have closed its connections but not have ended yet. torch
    would raise the connection's error, while for an ended worker it raises an error that names it. This function waits
    for the worker's end.

    The path of a batch is otherwise unchanged. Iterators that differ from those of torch 2 are returned unchanged,
    except for a loader that is its own iterator: its ``__iter__`` may rewind it, and any `for` would call it again.
    """
    with _signals_blocked(loader):
        iterator = iter(loader)
    if iterator is loader and rewinds(iterator):
        return _rest(iterator)
    event = getattr(iterator, "_workers_done_event", None)
    if isinstance(event, _DoneEvent):
        return iterator  # persistent workers: set in the previous pass
    workers = getattr(iterator, "_workers", None)
    condition, flag = getattr(event, "_cond", None), getattr(event, "_flag", None)
    if workers and condition is not None and flag is not None:
        iterator._workers_done_event = _DoneEvent(condition, flag, workers)  # type: ignore[attr-defined]
    if workers:
        _watched.add(iterator)
    fetch = getattr(iterator, "_try_get_data", None)
    if workers and fetch is not None:
        # a weak reference: an iterator and its workers must end as soon as it is no longer used
        known = functools.partial(_fetched, weakref.WeakMethod(fetch), workers)
        iterator._try_get_data = known  # type: ignore[attr-defined]
    return iterator


def rewinds(iterator: Iterator[Any]) -> bool:
    """Return True if calling ``__iter__`` of an iterator starts a new pass, instead of only returning the iterator."""
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)


def _rest(iterator: Iterator[Any]) -> Iterator[Any]:
    """Yield the remaining items of an iterator, without calling its ``__iter__``, which may start a new pass."""
    with contextlib.suppress(StopIteration):
        while True:
            batch = next(iterator)
            yield batch
            del batch


def _fetched(method: weakref.WeakMethod[Callable[..., Any]], workers: Sequence[BaseProcess], *timeout: float) -> Any:
    """Fetch the next batch from a worker. If its connection breaks, raise an error that names the dead worker."""
    fetch = method()
    assert fetch is not None  # the iterator is executing this call
    try:
        return fetch(*timeout)
    except RuntimeError as error:
        name_death(error)
        raise
    except (ConnectionError, EOFError, FileNotFoundError) as error:  # from the sockets that pass shared memory
        until = time.monotonic() + SECONDS_FOR_END
        while all(worker.is_alive() for worker in workers):
            if time.monotonic() > until:
                raise
            # torch's handler may raise here and name the signal that killed a worker.
            time.sleep(0.01)
        gone = ", ".join(str(worker.pid) for worker in workers if not worker.is_alive())
        death = RuntimeError(f"DataLoader worker (pid(s) {gone}) exited unexpectedly")
        name_death(death)
        raise death from error


# -- the cause of a worker's death ----------------------------------------------------------------------------


KEPT = 16
"""Number of batches whose indices are recorded per worker; torch prefetches `prefetch_factor` of them, usually 2."""

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:exited unexpectedly|is killed by signal: [^.]+\.)"
)
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
"""All of torch's loader iterators with workers, for `name_death`."""


class IndexRecorder:
    """Wrapper around a sampler's iterator that stores the indices of recent batches, for errors about dead workers.

    Args:
        inner: the sampler's iterator.
        workers: number of workers that fetch the batches.

    Attributes:
        num_yielded: number of batches that it has yielded.
    """

    def __init__(self, inner: Iterator[Any], workers: int) -> None:
        self._inner = inner
        self._last: deque[Any] = deque(maxlen=KEPT * (1 + workers))
        self.num_yielded = 0

    def __iter__(self) -> IndexRecorder:
        return self

    def __next__(self) -> Any:
        found = next(self._inner)
        self._last.append(found)
        self.num_yielded += 1
        return found

    def indices_of(self, number: int) -> Any:
        """Return the indices of batch ``number``; None if they are no longer stored."""
        place = number - self.num_yielded + len(self._last)
        return self._last[place] if 0 <= place < len(self._last) else None


def name_death(error: BaseException) -> None:
    """Extend torch's error about a dead worker by the signal that killed it and the samples that it had to fetch.

    torch may raise that error at any point of the program, from its handler of SIGCHLD.
    """
    found = _DEATH.match(words_of(error)) if isinstance(error, RuntimeError) and len(error.args) == 1 else None
    # Text after torch's sentence: the cause has been added already.
    if found is None or found.end() < len(str(error).rstrip()):
        return
    for process in map(int, found[1].split(",")):
        for iterator in list(_watched):
            for number, worker in enumerate(getattr(iterator, "_workers", ())):
                if worker.pid == process:
                    sentence = str(error).rstrip(". ")
                    error.args = (f"{sentence}: {_how(worker)}{_while(iterator, number)}",)
                    return


def _how(worker: BaseProcess) -> str:
    code = worker.exitcode
    if code is None:
        return "its exit code is unknown"
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = ", perhaps by the system for lack of memory, or by hand" if code == -signal.SIGKILL else ""
    return f"it was killed by {name}{why}"


def _while(iterator: Any, worker: int) -> str:
    """Return the end of an error message: the samples that a dead worker had to fetch, or "" if they are unknown."""
    tasks, recorder = getattr(iterator, "_task_info", {}), getattr(iterator, "_sampler_iter", None)
    if not isinstance(recorder, IndexRecorder):
        return ""
    waiting = [
        recorder.indices_of(number) for number, task in sorted(tasks.items()) if len(task) == 1 and task[0] == worker
    ]
    batches = [
        ", ".join(map(repr, indices[:SHOWN])) + (", ..." if len(indices) > SHOWN else "")
        for indices in (each if isinstance(each, list | tuple) else [each] for each in waiting if each is not None)
    ]
    return f", and had to fetch the samples {'; '.join(batches)}" if batches else ""


SHOWN = 8
"""Maximum number of samples of a batch that an error lists."""


@contextmanager
def _signals_blocked(loader: Iterable[Any]) -> Iterator[None]:
    """Inside the context, block signals with Python handlers, so that processes started there block them too."""
    ours = {number for number in SENT_TO_ALL if callable(signal.getsignal(number))}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        ours.discard(signal.SIGINT)
    if not ours:
        yield
        return
    _kill_at_exit()
    context = getattr(loader, "multiprocessing_context", None) or multiprocessing
    if getattr(loader, "num_workers", 0) and context.get_start_method() != "fork":
        resource_tracker.ensure_running()  # which unblocks SIGTERM when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@functools.cache
def _kill_at_exit() -> None:
    """Register a function that kills remaining workers at exit, since workers block SIGTERM.

    Python would wait for them.
    """

    def kill() -> None:
        # torch's handler of SIGCHLD would raise during exit.
        with contextlib.suppress(AttributeError, ValueError):
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for worker in multiprocessing.active_children():
            if worker.daemon:
                worker.kill()

    EXIT_WORKERS.at_exit(kill)


def end_workers(loader: object) -> None:
    """End the persistent workers of a loader. Do nothing if the loader has none."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
        loader._iterator = None  # type: ignore[attr-defined]


class _DoneEvent:
    """Replacement of torch's `multiprocessing.Event` that requests workers to end. Killed workers cannot block it."""

    def __init__(self, condition: Condition, flag: Semaphore, workers: Sequence[BaseProcess]) -> None:
        self._condition = condition
        self._flag = flag
        self._workers = workers
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Request the workers to end. If a killed worker holds the event's lock, kill the other workers."""
        self._set = True
        if self._condition.acquire(timeout=SECONDS_FOR_LOCK):
            try:
                self._flag.release()
            finally:
                self._condition.release()
            return
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()  # it may block any other signal
