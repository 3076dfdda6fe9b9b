"""Transport that reduces gradients with a communication hook instead of an all-reduce.

Hooks with several messages send them one after another, in the same order on all ranks, while the backward runs.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ddp.reducer import Reducer
from lockstep.engines.ddp.transport import AllReduce, RoundGroup, Size
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.ground import comm
from lockstep.ground.device import current_of, current_stream, has_streams, in_stream, new_stream
from lockstep.ground.installed import Installation

EXIT_ORDERED = Installation(
    "atexit: end the threads of ordered messages",
    ("extensions/parallel/hooks/hook_transport.py",),
    "a thread that needs the interpreter while it exits aborts the process; installed at import",
)

# -- the ordered queue ---------------------------------------------------------------------------------------


Future: TypeAlias = "torch.futures.Future[Tensor]"
Job: TypeAlias = "Callable[[comm.Group], Tensor]"

THREAD = "lockstep-hook"
"""Name of a queue's thread."""
PATIENCE = 1.0
"""Seconds to wait for a queue's thread at exit, since a rank that has ended may block the thread forever."""


def submit(group: comm.Group, device: torch.device, job: Job) -> Future:
    """Run ``job`` in the queue of ``group``, after all earlier jobs.

    The first call for a group is collective, since it makes the queue.

    Args:
        group: process group of the ranks; ``None`` is the default group.
        device: device of the job's tensors. On a GPU the job runs after the current stream's work so far.
        job: a function of the process group that it must use (the same ranks in the same order); it may block.

    Returns:
        a future of the job's result or error.
    """
    return open_queue(group, device).submit(group, device, job)


def open_queue(group: comm.Group, device: torch.device) -> OrderedQueue:
    """Return the queue of ``group`` for tensors on ``device``. Creating the queue is collective."""
    if comm.world_size(group) == 1:
        return OrderedQueue()
    parent: Any = dist.group.WORLD if group is None else group
    kinds = _queues.setdefault(parent, {})
    kind = comm.backend_of(parent, device.type)
    if kind not in kinds:
        if kind == "gloo":
            kinds[kind] = ThreadQueue(_own_group(parent))
        else:
            kinds[kind] = StreamQueue() if kind == "nccl" else OrderedQueue()
    return kinds[kind]


def _own_group(group: dist.ProcessGroup) -> Any:
    members = dist.get_process_group_ranks(group)
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    # torch numbers groups that all ranks make. It names others by their ranks and by each rank's number of groups; if
    # the numbers differed between ranks, the group would never connect
    some = group is not dist.group.WORLD
    own = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=some)
    # a rank that exits at once would be missing while another one still connects to it
    comm.barrier(own)
    return own


class OrderedQueue:
    """Queue that runs each job immediately, with the given process group."""

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        future = _future(device)
        _complete(future, job, group)
        return future


class StreamQueue(OrderedQueue):
    """Queue that runs each job immediately, with kernels and messages on the queue's own stream."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        """Run a job, and return a future. Streams that wait for the future wait for this queue's stream."""
        future = _future(device)
        with self._on_stream(device):
            _complete(future, job, group)
        return future

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context that selects this queue's stream, which first waits for the current stream's work so far."""
        if not _has_queue(device):
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return _on_stream(self._streams[device], current_stream(device).record_event())


class ThreadQueue(StreamQueue):
    """Queue that runs jobs in a thread, with its own process group. The thread ends when no jobs are left."""

    def __init__(self, group: comm.Group) -> None:
        super().__init__()
        self._group = group
        self._waiting: deque[tuple[Future, Job, AbstractContextManager[Any]]] = deque()
        self._lock = threading.Lock()
        self._runs = False

    def submit(self, group: comm.Group, device: torch.device, job: Job) -> Future:
        future = _future(device)
        with self._lock:
            self._waiting.append((future, job, self._on_stream(device)))
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
                future, job, context = self._waiting.popleft()
            with context:
                _complete(future, job, self._group)
            del future, job, context  # otherwise their tensors would live until the next job


@contextmanager
def _on_stream(stream: Any, event: Any) -> Iterator[None]:
    """Select ``stream``, and make it wait for ``event``."""
    stream.wait_event(event)
    with in_stream(stream):
        yield


@cache
def has_futures(kind: str) -> bool:
    """Return True if ``torch.futures`` synchronizes streams of device type ``kind``.

    Then the stream that waits for a future waits for the stream that set it.
    """
    if kind in ("cpu", "cuda"):
        return kind == "cuda"
    try:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[current_of(kind)])
        future.set_result(torch.empty(1, device=current_of(kind)))
        future.wait()
    except RuntimeError:
        return False
    return True


def _has_queue(device: torch.device) -> bool:
    """Return True if a device has streams for jobs, and torch's futures make other streams wait for them."""
    return has_streams(device) and has_futures(device.type)


def _future(device: torch.device) -> Future:
    return torch.futures.Future(devices=[device] if _has_queue(device) else None)


def _complete(future: Future, job: Job, group: comm.Group) -> None:
    try:
        with torch.no_grad():
            result = job(group)
    except BaseException as error:  # raised where the future is waited for: the thread has no caller
        future.set_exception(error)  # type: ignore[arg-type]
    else:
        future.set_result(result)


def completed(tensor: Tensor) -> Future:
    """Return a completed future whose value is ``tensor``."""
    future = _future(tensor.device)
    future.set_result(tensor)
    return future


def end_threads() -> None:
    """Wait for the queues' threads, since a thread that runs while the interpreter exits would abort the process."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(PATIENCE)


EXIT_ORDERED.at_exit(end_threads)

_queues: weakref.WeakKeyDictionary[Any, dict[str, OrderedQueue]] = weakref.WeakKeyDictionary()
"""Queues of each group, by backend. Weak, so that they are freed with the group."""


# -- which hook it is ----------------------------------------------------------------------------------------


TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_TORCH_WRAPPERS = ("fp16_compress_wrapper_hook", "bf16_compress_wrapper_hook")


def innermost(hook: object) -> Any:
    """Return the hook inside fp16 and bf16 wrappers (torch's and lockstep's) and ``functools.partial``."""
    while True:
        inside = getattr(hook, "wrapped_hook", None)
        if inside is None and isinstance(hook, functools.partial):
            inside = hook.func
        if inside is None and torch_name(hook) in _TORCH_WRAPPERS:
            inside = inspect.getclosurevars(hook).nonlocals["hook"]  # type: ignore[arg-type]
        if inside is None:
            return hook
        hook = inside


def torch_name(thing: object) -> str | None:
    """Return the name of one of torch's hooks, or of the class of such a hook's state; None for others.

    Example:
        >>> from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        >>> torch_name(fp16_compress_hook)
        'fp16_compress_hook'
        >>> torch_name(print) is None
        True
    """
    home = getattr(thing, "__module__", None)
    if not isinstance(home, str) or not home.startswith(TORCH_HOOKS):
        return None
    return getattr(thing, "__name__", None) or type(thing).__name__


def name_of(hook: object) -> str:
    """Return a hook's name for messages."""
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


EXAMPLE = (
    "return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()"
    ".then(lambda done: bucket.buffer())"
)


def future_of(returned: object, hook: object) -> torch.futures.Future[Any]:
    """Check that a hook returned a future, and return that future.

    Raises:
        TypeError: the hook returned something else.
    """
    if isinstance(returned, torch._C.Future):
        return returned  # type: ignore[return-value]
    raise TypeError(
        f"rank {comm.rank()}: the communication hook {name_of(hook)} returned {type(returned).__name__}. It must "
        f"return a torch.futures.Future of the reduced gradients, as in `{EXAMPLE}`"
    )


def tensor_of(value: object, bucket: GradBucket, hook: object) -> Tensor:
    """Return the reduced gradients from the value of a hook's future, as a 1-D tensor.

    Args:
        value: value of the hook's future: a tensor with the bucket's size, or a list of one. It may have another
            dtype, since torch's wrappers return that.
        bucket: the hook's bucket.
        hook: the hook, for the error.

    Raises:
        TypeError: the value is not a tensor, has a different size or device from the buffer, has integers, or is real
            for complex gradients, whose imaginary parts would be lost.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    buffer = bucket.buffer()
    if isinstance(value, Tensor):
        numbers = value.is_floating_point() or value.is_complex()
        fits = value.numel() == buffer.numel() and value.device == buffer.device and numbers and not value.is_sparse
        if fits and value.is_complex() == buffer.is_complex():
            return value.detach().reshape(-1)
    raise TypeError(
        f"rank {comm.rank()}: the future of the communication hook {name_of(hook)} contains {_describe(value)}. "
        f"For bucket {bucket.index()} it must contain {_describe(buffer)}, as in `{EXAMPLE}`"
    )


def _describe(thing: object) -> str:
    if isinstance(thing, Tensor):
        return f"a tensor of {thing.numel()} elements ({thing.dtype} on {thing.device})"
    if isinstance(thing, (list, tuple)):
        return f"a {type(thing).__name__} of {len(thing)}"
    return "None" if thing is None else f"a {type(thing).__name__}"


# -- errors in futures' callbacks ----------------------------------------------------------------------------


WAIT = 5e-5
"""Seconds between two checks of a future that a failed callback may have left incomplete."""

Callback = Callable[[Any], Any]


class CallbackErrors:
    """Recorder of errors in the callbacks that a hook adds to futures, directly or in other callbacks.

    An error in ``future.then(...)`` is the error of the future that ``then`` returned. An error in
    ``future.add_done_callback(...)`` is only printed by torch, and a future that the callback should complete is
    never completed.

    Attributes:
        error: the first error, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._may_stay_open = False
        _patch_futures()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record errors in the callbacks that this thread registers inside the context."""
        before, _current.errors = getattr(_current, "errors", None), self
        try:
            yield
        finally:
            _current.errors = before

    def wait(self, future: torch.futures.Future[Any]) -> Any:
        """Return the value of ``future``. If a callback failed, raise the callback's original error."""
        # a plain wait would not return if a done callback has failed
        if self._may_stay_open:
            while self.error is None and not future.done():
                time.sleep(WAIT)
        self.raise_error()
        try:
            return future.wait()
        except Exception:
            self.raise_error()  # the original: torch's error has only its text
            raise

    def raise_error(self) -> None:
        """Raise the recorded error of a callback, if any."""
        if self.error is not None:
            raise self.error

    def guard(self, callback: Callback, is_done_callback: bool) -> Callback:
        """Wrap a callback so that its error is recorded, whichever thread runs the callback."""
        self._may_stay_open = self._may_stay_open or is_done_callback

        @wraps(callback)
        def guarded(future: torch.futures.Future[Any]) -> Any:
            with self.recording():
                try:
                    return callback(future)
                except BaseException as error:
                    self.error = self.error or error
                    raise

        return guarded


_current = threading.local()


@cache
def _patch_futures() -> None:
    """Patch torch's futures, once, so that callbacks registered inside `CallbackErrors.recording` are wrapped."""
    kind: Any = torch._C.Future
    for name in ("then", "add_done_callback"):
        setattr(kind, name, _with_recording(getattr(kind, name), name == "add_done_callback"))


def _with_recording(own: Callable[..., Any], is_done_callback: bool) -> Callable[..., Any]:
    @wraps(own)
    def register(future: torch.futures.Future[Any], callback: Callback) -> Any:
        errors: CallbackErrors | None = getattr(_current, "errors", None)
        return own(future, callback if errors is None else errors.guard(callback, is_done_callback))

    return register


# -- hooks of several messages -------------------------------------------------------------------------------


Hook = Callable[[Any, GradBucket], "torch.futures.Future[Tensor]"]

_ONE_MESSAGE = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "post_localSGD_hook", "noop_hook"}
_OWN = "lockstep.extensions.parallel.hooks."


def keeps_order(hook: object) -> bool:
    """Return True if ``hook`` may be called for a bucket while its work for the previous bucket still runs.

    Such a hook starts all of its messages before it returns, or orders them itself. These are lockstep's hooks, those
    of torch's that send one message, and hooks with a true attribute ``overlaps``; also inside wrappers. On gloo other
    hooks are called when the last future is done.
    """
    inner = innermost(hook)
    if getattr(hook, "overlaps", False) or getattr(inner, "overlaps", False):
        return True
    return str(getattr(inner, "__module__", "")).startswith(_OWN) or torch_name(inner) in _ONE_MESSAGE


def in_order(hook: Hook, group: comm.Group = None) -> Hook:
    """Wrap torch's PowerSGD so that it runs in a queue on gloo. Return other hooks unchanged."""
    if isinstance(hook, _InQueue) or torch_name(innermost(hook)) != "powerSGD_hook":
        return hook
    return _InQueue(hook, group)


class _InQueue:
    """Hook that runs torch's PowerSGD in a queue, with the queue's process group."""

    overlaps = True

    def __init__(self, hook: Hook, group: comm.Group) -> None:
        self.wrapped_hook = hook
        self._group = group
        self._seen: dict[int, list[int]] = {}
        self._state_group: tuple[Any, comm.Group] | None = None
        self._own: comm.Group = None

    def __call__(self, state: Any, bucket: GradBucket) -> Any:
        if self._state_group is None or self._state_group[0] is not state:
            self._state_group = state, state.process_group  # read once: a running job sets it to the queue's group
        self._forget_others(state, bucket)
        home = self._state_group[1]
        group = self._group if home is None else home
        if not _in_turn(group, bucket):
            return self.wrapped_hook(state, bucket)

        def run(own: comm.Group) -> Tensor:
            # a thread of gloo still has a reference to the group when the result arrives; if that were the last one,
            # the thread would wait for its own end, which aborts the process
            self._own = own
            state.process_group = own
            try:
                return self.wrapped_hook(state, bucket).wait()
            finally:
                state.process_group = home

        return submit(group, bucket.buffer().device, run)

    def _forget_others(self, state: Any, bucket: GradBucket) -> None:
        """Delete the state that torch stores for the bucket's index, if the parameters in the bucket have changed."""
        index, parameters = bucket.index(), [id(parameter) for parameter in bucket.parameters()]
        if self._seen.setdefault(index, parameters) != parameters:
            self._seen[index] = parameters
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.pop(index, None)


def _in_turn(group: comm.Group, bucket: GradBucket) -> bool:
    return comm.world_size(group) > 1 and comm.backend_of(group, bucket.buffer().device.type) == "gloo"


# -- the transport -------------------------------------------------------------------------------------------


class HookTransport(AllReduce):
    """Transport that reduces buckets with a communication hook. The hook divides gradients by the number of ranks.

    On gloo a future's callback runs in a thread at an undefined time. A hook that starts another collective there
    (torch's PowerSGD) could start those of two buckets in different orders on two ranks. So the hook is called for a
    bucket when the last bucket's future is done, unless it has ``overlaps = True``: then it starts all its collectives
    before it returns.

    Args:
        group: process group of the ranks.
        state: the hook's first argument.
        hook: ``(state, GradBucket) -> Future`` of a tensor with the buffer's size (or a list of one).
        buckets: returns the current round's buckets. Sparse gradients, which are in the last ones, bypass the hook.
        over: returns the round's group for sparse gradients; False if each rank keeps its own gradients.
    """

    divides = False
    inline_used = False
    alignment = 1  # as in torch: a hook may rely on a buffer without gaps

    def __init__(
        self,
        group: comm.Group,
        state: object,
        hook: Callable[..., Any],
        buckets: Callable[[], Sequence[Bucket]],
        over: RoundGroup,
    ) -> None:
        super().__init__(group)
        self._state, self._hook, self._buckets, self._over = state, in_order(hook, group), buckets, over
        self._open_buckets: dict[int, GradBucket] = {}
        self._in_turn = False
        self._last: Any = None
        self._error: Exception | None = None
        self._callbacks = CallbackErrors()

    def buffers(self, sizes: list[Size]) -> Iterable[Tensor]:
        several = comm.world_size(self._group) > 1 and not keeps_order(self._hook)
        self._in_turn = several and any(comm.backend_of(self._group, device.type) == "gloo" for _, _, device in sizes)
        return super().buffers(sizes)

    def start(self, bucket: Bucket, scale: float) -> None:
        """Call the hook for the bucket. `flush` and `wait` raise the hook's error after the backward."""
        if self._error is not None:
            return
        if bucket.is_sparse:
            group = self._over()
            if group is False or comm.world_size(group) == 1:
                bucket.work = completed(bucket.flat)
                return
            bucket.flat.mul_(1 / comm.world_size(group))
            bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)
            return
        following = self._buckets()[bucket.index + 1 :]
        last = not following or following[0].is_sparse
        absent = () if 0 not in bucket.used else [place for place, used in enumerate(bucket.used) if not used]
        given = GradBucket(bucket.index, bucket.buffer, bucket.views, bucket.parameters, last, absent)
        self._open_buckets[bucket.index] = given
        try:
            self.flush()
            self._callbacks.raise_error()  # also an error since the last round
            with self._callbacks.recording():
                returned = self._hook(self._state, given)
            bucket.work = self._last = future_of(returned, self._hook)
        except Exception as error:
            self._error = error

    def flush(self) -> None:
        """Wait until the hook's calls so far have started all their collectives."""
        if self._error is not None:
            raise self._error
        if self._in_turn and self._last is not None:
            self._callbacks.wait(self._last)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the hook's result, and copy it into the buffer."""
        if self._error is not None:
            raise self._error
        if bucket.is_sparse:
            bucket.work.wait()
            return
        value = self._callbacks.wait(bucket.work)
        self._last = None
        # most hooks return the buffer itself
        result = tensor_of(value, self._open_buckets.pop(bucket.index), self._hook)
        if result.data_ptr() != bucket.buffer.data_ptr():
            bucket.buffer.copy_(result)


def attach_hook(
    reducer: Reducer, state: object, hook: Callable[..., Any], round_group: RoundGroup | None = None
) -> None:
    """Make ``hook`` reduce the buckets of ``reducer``. Call this on every rank before the reducer's first `prepare`.

    Args:
        reducer: a reducer without a hook.
        state: the hook's first argument.
        hook: ``(state, bucket) -> Future`` of the reduced buffer. The bucket is a `GradBucket`; its gradients are not
            divided by the number of ranks.
        round_group: called once a round for the group in which ranks exchange used parameters. None is the reducer's
            group; False: nothing is exchanged (steps that reduce nothing).

    Raises:
        RuntimeError: there is a hook already, or a backward was prepared.
    """
    carried = HookTransport(reducer.group, state, hook, lambda: reducer.buckets, lambda: reducer.round_group)
    reducer.use_transport(carried, round_group)
