"""Loader workers: one that is killed does not hold up the end of its pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SECONDS_FOR_LOCK = 1.0
"""A worker that lives holds the lock for microseconds."""


def opened(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``; a pass of torch's loader workers ends even if one of them was killed.

    Torch tells its workers to end by a `multiprocessing.Event`, and each takes the event's lock once a batch.
    Killed in that moment (by the kernel, for want of memory), it never gives the lock back, and the process that
    trains would wait for it without end instead of raising torch's error. That process is given another event here.

    Nothing is changed on the way of a batch. Iterators that are not made as torch 2 makes them stay as they are.
    """
    iterator = iter(loader)
    event = getattr(iterator, "_workers_done_event", None)
    if isinstance(event, _Done):
        return iterator  # persistent workers: it is that of the pass before
    workers = getattr(iterator, "_workers", None)
    condition, flag = getattr(event, "_cond", None), getattr(event, "_flag", None)
    if workers and condition is not None and flag is not None:
        iterator._workers_done_event = _Done(condition, flag, workers)  # type: ignore[attr-defined]
    return iterator


class _Done:
    """The parent's side of a `multiprocessing.Event` that workers have too and that only the parent sets."""

    def __init__(self, condition: Any, flag: Any, workers: Sequence[Any]) -> None:
        self._condition = condition
        self._flag = flag
        self._workers = workers
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        """Tells the workers to end; those that could not hear it, since the lock is lost, are ended at once."""
        self._set = True
        if self._condition.acquire(timeout=SECONDS_FOR_LOCK):
            try:
                self._flag.release()
            finally:
                self._condition.release()
            return
        for worker in self._workers:
            if worker.is_alive():
                worker.terminate()  # torch's workers exit without an error if it is their parent that asks
