"""Messages of communication hooks go out in one order on all ranks, beside the backward."""

from __future__ import annotations

import atexit
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
from lockstep.parallel.grad_bucket import GradBucket
from lockstep.parallel.hooks.torch_hooks import innermost, torch_name

# -- the ordered queue ---------------------------------------------------------------------------------------


Future: TypeAlias = "torch.futures.Future[Tensor]"
Job: TypeAlias = "Callable[[comm.Group], Tensor]"

THREAD = "lockstep-hook"
"""Name of a lane's thread."""
PATIENCE = 1.0
"""Seconds that the end of the interpreter waits for such a thread, which may be held up by a rank that is gone."""


def submit(group: comm.Group, device: torch.device, job: Job) -> Future:
    """Run ``job`` in the lane of ``group``, after all that was submitted before.

    The first call for a group is collective: every rank of it makes the lane.

    Args:
        group: the ranks; ``None`` is the default group.
        device: where the tensors of ``job`` are; on a GPU it sees what the current stream has been given by now.
        job: a function of the group over which it is to communicate (the same ranks in the same order); it may
            block.

    Returns:
        A future of what ``job`` returns, or raises.
    """
    return open_lane(group, device).submit(group, device, job)


def open_lane(group: comm.Group, device: torch.device) -> Lane:
    """The lane of ``group`` for tensors on ``device``; made where there is none, which is collective."""
    if comm.world_size(group) == 1:
        return Lane()
    parent: Any = dist.group.WORLD if group is None else group
    kinds = _lanes.setdefault(parent, {})
    kind = carrier(parent, device)
    if kind not in kinds:
        if kind == "gloo":
            kinds[kind] = ThreadLane(_own_group(parent))
        else:
            kinds[kind] = StreamLane() if kind == "nccl" else Lane()
    return kinds[kind]


def carrier(group: comm.Group, device: torch.device) -> str:
    """The backend by which ``group`` carries tensors of ``device``: "gloo", "nccl", ...; empty where it cannot."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)
    return backends.get(device.type, "")


def _own_group(group: Any) -> Any:
    members = dist.get_process_group_ranks(group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    # Where all ranks take part, torch numbers groups. Where they do not, it names a group by its ranks and by how many
    # groups each of them has, and a group never comes together whose ranks have different numbers of them.
    some = group is not dist.group.WORLD
    own = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=some)
    comm.barrier(own)  # a rank that ends at once must not be gone while another still connects to it
    return own


class Lane:
    """Runs jobs at once, over the group itself."""

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        """A future of ``job``'s result."""
        future = _future(device)
        _settle(future, job, group)
        return future


class StreamLane(Lane):
    """Runs jobs at once, with their kernels and messages on a stream beside the backward's."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        """A future of ``job``'s result; a stream that waits for it waits for this lane's stream."""
        future = _future(device)
        with self._beside(device):
            _settle(future, job, group)
        return future

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context on this lane's stream, after what the current stream has been given by now."""
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return _Beside(self._streams[device], torch.cuda.current_stream(device).record_event())


class ThreadLane(StreamLane):
    """Runs jobs on a thread that ends when none are left, over ``group``, which nobody else uses."""

    def __init__(self, group: comm.Group) -> None:
        super().__init__()
        self._group = group
        self._waiting: deque[tuple[Future, Job, AbstractContextManager[Any]]] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        """A future of ``job``'s result."""
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

    def __init__(self, stream: Any, event: Any) -> None:
        self._stream, self._event = stream, event

    def __enter__(self) -> None:
        self._stream.wait_event(self._event)
        self._context = torch.cuda.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
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
    """Let the lanes' threads end: one that is just coming out of its last job when the interpreter goes aborts it."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(PATIENCE)


atexit.register(end_threads)

_lanes: weakref.WeakKeyDictionary[Any, dict[str, Lane]] = weakref.WeakKeyDictionary()
"""The lanes of each group, by backend; they go with it."""


# -- hooks of others -----------------------------------------------------------------------------------------


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]

_ONE_MESSAGE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "post_localSGD_hook", "noop_hook"}
_OWN = "lockstep.parallel.hooks."


def keeps_order(hook: Any) -> bool:
    """Whether ``hook`` may be called for a bucket while what it does for the last one is under way.

    That is so where it hands over all of its messages before it returns, or keeps them in order by itself: lockstep's
    hooks, those of torch's that send one message, and a hook with a true attribute ``overlaps``, which says so of
    itself; in wrappers too. Of others nothing is known: on gloo, they are called when the last future is done.
    """
    inner = innermost(hook)
    if getattr(hook, "overlaps", False) or getattr(inner, "overlaps", False):
        return True
    return str(getattr(inner, "__module__", "")).startswith(_OWN) or torch_name(inner) in _ONE_MESSAGE


def in_order(hook: Hook, group: comm.Group = None) -> Hook:
    """``hook``; but torch's PowerSGD, wrapped or not, so that it runs in a lane on gloo, beside the backward.

    Args:
        hook: a communication hook of anybody.
        group: the ranks, where ``hook``'s state does not name them.
    """
    if isinstance(hook, _InLane) or torch_name(innermost(hook)) != "powerSGD_hook":
        return hook
    return _InLane(hook, group)


class _InLane:
    """Runs torch's PowerSGD in a lane, over the lane's group."""

    overlaps = True

    def __init__(self, hook: Hook, group: comm.Group) -> None:
        self.wrapped_hook = hook
        self._group = group
        self._seen: dict[int, list[int]] = {}
        self._home: tuple[Any, comm.Group] | None = None
        self._own: comm.Group = None

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        if self._home is None or self._home[0] is not state:
            self._home = state, state.process_group  # read once: while the lane runs it is the lane's
        self._forget_others(state, bucket)
        home = self._home[1]
        group = self._group if home is None else home
        if not _one_by_one(group, bucket):
            return self.wrapped_hook(state, bucket)

        def run(own: comm.Group) -> Tensor:
            # One of gloo's threads still holds the group when the result is there; was it the last to let go of it, it
            # would wait for its own end, which aborts the process.
            self._own = own
            state.process_group = own
            try:
                return self.wrapped_hook(state, bucket).wait()
            finally:
                state.process_group = home

        return submit(group, bucket.buffer().device, run)

    def _forget_others(self, state: Any, bucket: GradBucket) -> None:
        """Drop what torch's state remembers of a bucket that held other parameters: it knows buckets by number only."""
        index, parameters = bucket.index(), [id(parameter) for parameter in bucket.parameters()]
        if self._seen.setdefault(index, parameters) != parameters:
            self._seen[index] = parameters
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.pop(index, None)


def _one_by_one(group: comm.Group, bucket: GradBucket) -> bool:
    return comm.world_size(group) > 1 and carrier(group, bucket.buffer().device) == "gloo"
