"""Messages of communication hooks go out in one order on all ranks, beside the backward."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground import comm
from lockstep.ground.installed import EXIT_ORDERED

# -- the ordered queue ---------------------------------------------------------------------------------------


Future: TypeAlias = "torch.futures.Future[Tensor]"
Job: TypeAlias = "Callable[[comm.Group], Tensor]"

THREAD = "lockstep-hook"
"""Name of a queue's thread."""
PATIENCE = 1.0
"""Seconds that the end of the interpreter waits for such a thread, which may be held up by a rank that is gone."""


def submit(group: comm.Group, device: torch.device, job: Job) -> Future:
    """Run ``job`` in the queue of ``group``, after all that was submitted before.

    The first call for a group is collective: every rank of it makes the queue.

    Args:
        group: the ranks; ``None`` is the default group.
        device: where the tensors of ``job`` are; on a GPU it sees what the current stream has been given by now.
        job: a function of the group over which it is to communicate (the same ranks in the same order); it may
            block.

    Returns:
        A future of what ``job`` returns, or raises.
    """
    return open_queue(group, device).submit(group, device, job)


def open_queue(group: comm.Group, device: torch.device) -> OrderedQueue:
    """The queue of ``group`` for tensors on ``device``; made where there is none, which is collective."""
    if comm.world_size(group) == 1:
        return OrderedQueue()
    parent: Any = dist.group.WORLD if group is None else group
    kinds = _queues.setdefault(parent, {})
    kind = carrier(parent, device)
    if kind not in kinds:
        if kind == "gloo":
            kinds[kind] = ThreadQueue(_own_group(parent))
        else:
            kinds[kind] = StreamQueue() if kind == "nccl" else OrderedQueue()
    return kinds[kind]


def carrier(group: comm.Group, device: torch.device) -> str:
    """The backend by which ``group`` carries tensors of ``device``: "gloo", "nccl", ...; empty where it cannot."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    return backends.get(device.type, "")


def _own_group(group: dist.ProcessGroup) -> Any:
    members = dist.get_process_group_ranks(group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    # Where all ranks take part, torch numbers groups. Where they do not, it names a group by its ranks and by how many
    # groups each of them has, and a group never comes together whose ranks have different numbers of them.
    some = group is not dist.group.WORLD
    own = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=some)
    comm.barrier(own)  # a rank that ends at once must not be gone while another still connects to it
    return own


class OrderedQueue:
    """Runs jobs at once, over the group itself."""

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        future = _future(device)
        _settle(future, job, group)
        return future


class StreamQueue(OrderedQueue):
    """Runs jobs at once, with their kernels and messages on a stream beside the backward's."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        """A future of ``job``'s result; a stream that waits for it waits for this queue's stream."""
        future = _future(device)
        with self._beside(device):
            _settle(future, job, group)
        return future

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context on this queue's stream, after what the current stream has been given by now."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return _Beside(self._streams[device], torch.cuda.current_stream(device).record_event())


class ThreadQueue(StreamQueue):
    """Runs jobs on a thread that ends when none are left, over ``group``, which nobody else uses."""

    def __init__(self, group: comm.Group) -> None:
        super().__init__()
        self._group = group
        self._waiting: deque[tuple[Future, Job, AbstractContextManager[Any]]] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        future = _future(device)
        with self._lock:
            self._waiting.append((future, job, self._beside(device)))
            starts, self._runs = not self._runs, True
        if starts:
            threading.Thread(target=self._run, name=THREAD, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                future, job, beside = self._waiting.popleft()
            with beside:
                _settle(future, job, self._group)
            del future, job, beside  # nothing is kept until the next one comes


class _Beside:
    """On ``stream``, after ``event``."""

    def __init__(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        self._stream, self._event = stream, event

    def __enter__(self) -> None:
        self._stream.wait_event(self._event)
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)


def _future(device: torch.device) -> Future:
    return torch.futures.Future(devices=[device] if device.type == "cuda" else None)


def _settle(future: Future, job: Job, group: comm.Group) -> None:
    try:
        with torch.no_grad():
            result = job(group)
    except BaseException as error:  # told to whoever waits: the thread has nobody above it
        future.set_exception(error)  # type: ignore[arg-type]
    else:
        future.set_result(result)


def completed(tensor: Tensor) -> Future:
    """A future that holds ``tensor`` already."""
    future = _future(tensor.device)
    future.set_result(tensor)
    return future


def end_threads() -> None:
    """Let the queues' threads end: one that is just coming out of its last job when the interpreter goes aborts it."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(PATIENCE)


EXIT_ORDERED.at_exit(end_threads)

_queues: weakref.WeakKeyDictionary[Any, dict[str, OrderedQueue]] = weakref.WeakKeyDictionary()
"""The queues of each group, by backend; they go with it."""
