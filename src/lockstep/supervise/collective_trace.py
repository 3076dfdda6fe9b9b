"""Wrappers of torch's collectives, which record each call in this process' trace before the call runs.

The wrappers also pass contiguous copies of strided tensors to collectives that gloo computes incorrectly on them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.distributed_c10d import GroupMember

from lockstep.ground import comm
from lockstep.ground.comm import COLLECTIVES, RENAMED
from lockstep.ground.installed import DEVICE_MARKS, FORK_TRACE, TORCH_COLLECTIVES
from lockstep.ground.rank import waits
from lockstep.supervise.device_marks import DeviceMarks
from lockstep.supervise.stack import FOREIGN, LOCKSTEP
from lockstep.supervise.stack_request import set_phase_source
from lockstep.supervise.trace_memory import ASIDE, MESSAGE, WHOLE, TraceMemory, own
from lockstep.supervise.traced_groups import TracedGroup, kind_of_device, kinds_by_backend, sequence_of

# -- recording -----------------------------------------------------------------------------------------------


NOTED = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
)
"""Collectives that are recorded before they run. Others are counted by backends, and seen only in stacks."""

MESSAGES = ("send", "recv")
"""Point-to-point operations that are recorded. They have no number, since only some ranks of a group call them."""

COUNTED = ("send", "recv", "recv_anysource")
"""Methods of torch's groups that send or receive messages, which some backends count as collectives."""

_SIMPLE = ("all_reduce", "broadcast", "reduce", "all_gather", "barrier", *RENAMED)
"""Functions that run exactly one collective, and call no other recorded function."""

_ROOTS = ("src", "dst")
_REDUCTIONS = dist.ReduceOp.RedOpType.__members__
SUM = dist.ReduceOp.SUM
# user code calls none of them
_LOOPS = tuple(f"{LOCKSTEP}loop/{name}.py" for name in ("fit", "evaluate", "session"))
_OTHERS, _USERS, _OUTERMOST = 0, 1, 2
_PENDING = 4096


class CollectiveTrace:
    """Recorder of this process' collectives. Wrappers that replace torch's functions write to the recorder.

    Attributes:
        where: returns the hook that this rank is in, and the batch; None: unknown.
    """

    def __init__(self) -> None:
        self.memory: TraceMemory = own()
        self.where: Callable[[], tuple[str, int]] | None = None
        self._busy: set[int] = set()  # threads inside a collective: nested calls are not recorded
        self._groups: dict[int, TracedGroup] = {}
        self._watched: list[Any] = []
        self._generations: dict[str, int] = {}
        self._payloads: dict[Any, int] = {}
        self._locations: dict[tuple[int, int], int] = {}
        self._kept: dict[int, CodeType] = {}  # keeps code objects alive, so that their ids are not reused
        self._files: dict[str, int] = {}
        self._phases: dict[str, int] = {"": 0}
        self._pending: dict[int, int] = {}  # ids of works not yet waited for, and their notes
        self._queues: dict[int, str] = {}  # notes of pending works that remain in a device's queue after the wait
        self._works: set[type] = {dist.Work}  # classes of the works that were returned
        self._marks = DeviceMarks(self.memory)
        self._reductions = {id(value): f" {name}" for name, value in _REDUCTIONS.items()} | {id(None): ""}
        default = GroupMember.WORLD
        if default is not None:
            self._add_group(default, whole=True)

    # -- wrappers of torch's functions

    def collective(
        self, name: str, function: Callable[..., Any], strided: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """Return a wrapper that records the calls of a collective.

        Args:
            name: one of `COLLECTIVES`.
            function: torch's function.
            strided: function to call instead for a tensor that is not contiguous.
        """
        return self._wrap(name, function, COLLECTIVES[name], name not in _SIMPLE, strided=strided)

    def message(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that records the calls of a point-to-point operation."""
        return self._wrap(name, function, "tensor", nests=False, numbered=False)

    def composed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper that records the calls of lockstep's own collectives, which send point-to-point messages."""
        return self._wrap(name, function, COLLECTIVES[name], nests=True)

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of a group's ``send`` or ``recv`` that excludes messages from the count of collectives.

        The backend's counter also counts messages.
        """
        groups = self._groups

        def counted(group: Any, tensors: list[Tensor], *args: object, **kwargs: object) -> Any:
            known = groups.get(id(group))
            if known is not None and known.parts:
                known = known.parts.get(tensors[0].device.type)
            if known is None or not known.counts:
                return method(group, tensors, *args, **kwargs)
            known.follow(group)
            work = method(group, tensors, *args, **kwargs)
            known.sequence = known.sequence_of(group)
            return work

        return functools.update_wrapper(counted, method)

    def waited(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of ``Work.wait`` that records the completion of an asynchronous collective."""
        pending, complete, queues, mark = self._pending, self.memory.complete, self._queues, self._marks.put

        @waits()
        def waited(work: dist.Work, timeout: timedelta | None = None) -> Any:
            result = wait(work) if timeout is None else wait(work, timeout)
            if pending:
                index = pending.pop(id(work), 0)
                if index and not (queues and (queue := queues.pop(index, "")) and mark(index, queue)):
                    complete(index)
            return result

        return functools.update_wrapper(waited, wait)

    def _wrap(
        self,
        name: str,
        function: Callable[..., Any],
        payload: str,
        nests: bool,
        numbered: bool = True,
        strided: Callable[..., Any] | None = None,
    ) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)
        at = names.index("group") if "group" in names else len(names)
        start = self._record_start(name, names, payload, numbered)
        end = self._record_end(nests)
        busy, groups, find = self._busy, self._groups, self._find

        def noted(*args: object, **kwargs: object) -> Any:
            if is_compiling() or (busy and get_ident() in busy):
                return function(*args, **kwargs)
            group: Any = args[at] if len(args) > at else kwargs.get("group")
            if group is None:
                group = GroupMember.WORLD
            known = groups.get(id(group))
            if known is None or known.parts:
                known = find(group, name, args, kwargs)
                if known is None:  # the call itself raises the error
                    return function(*args, **kwargs)
            index = start(args, kwargs, group, known)
            call = function if strided is None or _is_whole(args, kwargs) else strided
            if nests:
                busy.add(get_ident())
            work: Any = call  # marker: the call has not returned
            try:
                work = call(*args, **kwargs)
            finally:
                end(index, group, known, work, work is not call)
            return work

        return functools.update_wrapper(noted, function)

    # The functions below run at each collective. What depends on torch's function alone is computed once, when it is
    # wrapped.

    def _record_start(self, name: str, names: list[str], payload: str, numbered: bool) -> Callable[..., int]:
        """Return a function that adds a note for the start of a collective, and returns the note's index."""
        word, enter = self.memory.word("operation", name), self.memory.enter
        payload_of = self._payload_of(names, payload) if payload else lambda args, kwargs: 0
        root_of = _root_of(names)
        location_of, phase_of = self._location, self._phase
        main, threads = threading.main_thread().ident, threading._active  # type: ignore[attr-defined]

        def start(args: tuple[Any, ...], kwargs: dict[str, Any], group: Any, known: TracedGroup) -> int:
            if numbered and known.counts:
                known.follow(group)
            shape = payload_of(args, kwargs)
            source = -1 if root_of is None else root_of(args, kwargs)
            phase, batch = (0, -1) if self.where is None else phase_of()
            if numbered:
                known.number += 1
                number = known.number | known.passed
                flags = WHOLE if known.whole else 0
            else:
                number, flags = 0, MESSAGE
            thread = get_ident()
            # autograd's threads are not in this table: their collectives are the training thread's
            if thread != main and thread in threads:
                flags |= ASIDE
            return enter(number, shape, location_of(sys._getframe(2)), word, known.word, phase, flags, batch, source)

        return start

    def _payload_of(self, names: list[str], payload: str) -> Callable[..., int]:
        """Return a function that maps a call's tensor and reduction to an index in the trace's text table.

        The number is 0 for a call without a tensor.
        """
        what = names.index(payload)
        op = names.index("op") if "op" in names else -1
        payloads, describe = self._payloads, self._describe

        def payload_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            given = len(args)
            tensor: Any = args[what] if given > what else kwargs.get(payload)
            reduction = None if op < 0 else args[op] if given > op else kwargs.get("op", SUM)
            try:
                found = payloads.get((tensor.shape, tensor.dtype, id(reduction)))
                return describe(tensor, reduction) if found is None else found
            except (AttributeError, TypeError, RuntimeError):
                # not a tensor: the call itself raises the error
                return 0

        return payload_of

    def _record_end(self, nests: bool) -> Callable[..., None]:
        """Return a function that records the end of a call of a collective."""
        busy, leave, pend, mark = self._busy, self.memory.leave, self._pend, self._marks.put

        def end(index: int, group: Any, known: TracedGroup, work: Any, returned: bool) -> None:
            if nests:
                busy.discard(get_ident())
                # the number of collectives it made is known only afterwards
                if known.counts:
                    known.sequence = known.sequence_of(group)
            # recv returns an int: the source of the message
            complete = not returned or work is None or work.__class__ is int
            if not returned:
                known.whole = False  # whether the collective started is unknown
            leave(index, complete and not (known.queue and work is None and mark(index, known.queue)))
            if not complete:
                pend(work, index, known.queue)

        return end

    def stop(self) -> None:
        """Stop recording in this thread, even by wrappers that other code still references."""
        self._busy.add(get_ident())

    def _pend(self, work: Any, index: int, queue: str) -> None:
        """Store an asynchronous collective's ``Work``. Waiting for the ``Work`` will complete the note ``index``."""
        kind: Any = work.__class__
        if kind not in self._works:
            self._works.add(kind)
            # a backend written in Python has a class of works with a wait of its own
            if issubclass(kind, dist.Work) and "wait" in kind.__dict__:
                _set(kind, "wait", self.waited(kind.wait))
        self._pending[id(work)] = index
        if queue:
            self._queues[index] = queue
        if not index & 1023 and len(self._pending) > _PENDING:
            self._pending.clear()
            self._queues.clear()

    # -- words

    def _describe(self, tensor: Tensor, reduction: object) -> int:
        """Return the index in the trace's text table for a tensor and its reduction; add the text if it is new."""
        name = self._reductions.get(id(reduction))
        text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{' ?' if name is None else name}"
        found = self.memory.word("payload", text, tensor.numel())
        # only built-in reductions: others may be freed, and their ids reused
        if found and name is not None:
            self._payloads[tensor.shape, tensor.dtype, id(reduction)] = found
        return found

    def _phase(self) -> tuple[int, int]:
        assert self.where is not None
        name, batch = self.where()
        found = self._phases.get(name)
        if found is None:
            found = self._phases[name] = self.memory.word("phase", name)
        return found, batch

    def _location(self, frame: FrameType | None) -> int:
        """Return the index in the trace's text table for the user's innermost line; 0 for calls by lockstep's loop."""
        files = self._files
        while frame is not None:
            code = frame.f_code
            kind = files.get(code.co_filename)
            if kind is None:
                kind = files[code.co_filename] = _kind(code.co_filename)
            if kind:
                break
            frame = frame.f_back
        if frame is None or kind == _OUTERMOST:
            return 0
        key = (id(code), frame.f_lasti)
        found = self._locations.get(key)
        if found is None:
            self._kept[id(code)] = code
            found = self._locations[key] = self.memory.word("location", code.co_filename, frame.f_lineno, code.co_name)
        return found

    # -- groups

    def _find(self, group: Any, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> TracedGroup | None:
        """Return the record of a process group or, if it has several backends, of the backend that runs the call.

        Return None if this rank is not a member, or the group does not exist.
        """
        known = self._groups.get(id(group)) or self._add_group(group, whole=False)
        if known is not None and known.parts:
            known = known.parts.get(kind_of_device(name, args, kwargs, group)) or known
        return known

    def _add_group(self, group: Any, whole: bool) -> TracedGroup | None:
        try:
            members = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, TypeError, ValueError):  # unknown to torch
            return None
        name = group.group_name
        generation = self._generations[name] = self._generations.get(name, -1) + 1
        name = f"{name}{chr(39) * generation}"
        kinds = kinds_by_backend(group)
        queue = "" if len(kinds) != 1 or "cpu" in kinds[0] else kinds[0][0]

        def traced_as(name: str, queue: str, device: torch.device | None = None) -> TracedGroup:
            sequence = sequence_of(group, device)
            return TracedGroup(
                self.memory.word("group", name, members), sequence, whole or sequence == 0, queue, device
            )

        known = self._groups[id(group)] = traced_as(name, queue)
        for types in kinds if len(kinds) > 1 else ():
            first = "cpu" if "cpu" in types else types[0]
            part = traced_as(f"{name} on {first}", "" if first == "cpu" else first, torch.device(first))
            known.parts.update(dict.fromkeys(types, part))
        key = id(group)

        def gone(_: object) -> None:
            self._groups.pop(key, None)

        self._watched.append(weakref.ref(group, gone))
        return known


def _root_of(names: list[str]) -> Callable[..., int] | None:
    """Return a function that reads the source or destination rank from a call's arguments (-1 if not an int).

    Return None for functions without such an argument.
    """
    name = next((each for each in _ROOTS if each in names), "")
    if not name:
        return None
    at = names.index(name)

    def root_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        found = args[at] if len(args) > at else kwargs.get(name)
        return found if found.__class__ is int else -1

    return root_of


def _is_whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True unless a call's tensor is a strided view, which gloo reduces incorrectly."""
    tensor = args[0] if args else kwargs.get("tensor")
    return not isinstance(tensor, Tensor) or tensor.is_contiguous()


def _kind(file: str) -> int:
    if file.startswith(FOREIGN):
        return _OUTERMOST if file in _LOOPS else _OTHERS
    return _USERS


# -- wrappers in place of collectives ------------------------------------------------------------------------


IN_PLACE = ("all_reduce", "reduce")
"""Collectives that gloo computes incorrectly for strided views."""

# -- strided tensors


class _Done:
    """A ``Work`` that is already complete, for a collective that was called with ``async_op=True``."""

    def __init__(self, result: list[Tensor]) -> None:
        self._result = result

    def wait(self, timeout: object = None) -> bool:
        """Return True without waiting, because the collective is complete."""
        return True

    def is_completed(self) -> bool:
        """Return True, because the collective is complete."""
        return True

    def is_success(self) -> bool:
        """Return True, because a failed collective raises its error when it is called."""
        return True

    def result(self) -> list[Tensor]:
        """Return the tensors of the collective."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a completed future with the tensors of the collective."""
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._result)
        return future


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def whole(tensor: object, *args: object, **kwargs: object) -> Any:
        if not isinstance(tensor, Tensor) or tensor.is_contiguous() or tensor.layout != torch.strided:
            return function(tensor, *args, **kwargs)
        given = inspect.signature(function).bind(tensor, *args, **kwargs)
        waits = not given.arguments.pop("async_op", False)
        given.arguments["tensor"] = copy = tensor.contiguous()
        work = function(*given.args, **given.kwargs)
        with torch.no_grad():
            tensor.copy_(copy)
        return work if waits else _Done([tensor])

    return whole


# -- installation

_HOMES = (dist, dist.distributed_c10d)
_replaced: list[tuple[Any, str, Any]] = []
"""Replaced attributes: object, name, original value."""
_trace: CollectiveTrace | None = None


def install_trace() -> None:
    """Replace torch's collectives in this process with wrappers that record each call.

    The wrappers also make gloo reduce strided tensors correctly. Repeated calls do nothing.
    """
    global _trace
    if not _replaced:
        TORCH_COLLECTIVES.install(lambda: uninstall_trace)
        # a forked child must not write into this process' trace; its own wrappers, if any, use another
        FORK_TRACE.at_fork(after_in_child=_forget)
        _trace = trace = CollectiveTrace()
        for name in NOTED:
            made = RENAMED.get(name, name)
            made = made if hasattr(dist, made) else name
            function = getattr(dist, made)
            _replace(made, trace.collective(name, function, _whole(function) if name in IN_PLACE else None))
        for name in MESSAGES:
            _replace(name, trace.message(name, getattr(dist, name)))
        for name in COUNTED:
            _set(dist.ProcessGroup, name, trace.counted(getattr(dist.ProcessGroup, name)))
        _set(comm, "combined_by_messages", trace.composed("all_reduce", comm.combined_by_messages))
        _set(dist.Work, "wait", trace.waited(dist.Work.wait))


def _forget() -> None:
    uninstall_trace()
    if _trace is not None:
        _trace.stop()


def uninstall_trace() -> None:
    """Restore torch's own functions, for measurements and tests without the trace."""
    while _replaced:
        home, name, value = _replaced.pop()
        setattr(home, name, value)
    DEVICE_MARKS.remove()


def set_location(where: Callable[[], tuple[str, int]] | None) -> None:
    """Set the function that returns this rank's current hook and batch for recorded calls; None for no function."""
    if _trace is not None:
        install_trace()
        _trace.where = where
        set_phase_source(where)


WAITS = (*COLLECTIVES, *RENAMED.values(), "wait")
"""Names of torch's collectives, and of ``Work.wait``: all functions that may wait for other ranks."""


@contextmanager
def wrapped(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Iterable[str]) -> Iterator[None]:
    """Replace torch's functions with these ``names`` by ``wrap(name, function)`` inside the context.

    Args:
        wrap: returns the function to call instead.
        names: names of functions in `WAITS`.
    """
    homes = [(home, name) for name in names for home in (*_HOMES, dist.Work) if hasattr(home, name)]
    made: list[tuple[Any, str, Any, Any]] = []
    for home, name in homes:
        before = getattr(home, name)
        after = wrap(name, before)
        setattr(home, name, after)
        made.append((home, name, before, after))
    try:
        yield
    finally:
        for home, name, before, after in made:
            if getattr(home, name) is after:
                setattr(home, name, before)


def _replace(name: str, function: Callable[..., Any]) -> None:
    for home in _HOMES:
        if hasattr(home, name):
            _set(home, name, function)


def _set(home: object, name: str, value: object) -> None:
    # the static attribute: a C++ method that `getattr` returned would not be bound after it is restored
    _replaced.append((home, name, inspect.getattr_static(home, name)))
    setattr(home, name, value)
