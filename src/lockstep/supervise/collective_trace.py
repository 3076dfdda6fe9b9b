"""A trace of torch's collectives, noted at a gate before each call, which also makes strided tensors contiguous."""

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
from lockstep.supervise.stack_request import answer_with
from lockstep.supervise.trace_memory import ASIDE, MESSAGE, WHOLE, TraceMemory, own
from lockstep.supervise.traced_groups import TracedGroup, kind_of_device, kinds_by_backend, sequence_of

# -- what is noted -------------------------------------------------------------------------------------------


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
"""Collectives that are noted before they are made. Of all others stacks tell who waits, and the backends count them."""

MESSAGES = ("send", "recv")
"""Messages from rank to rank that are noted, and not numbered, since only some ranks of a group make them."""

COUNTED = ("send", "recv", "recv_anysource")
"""Methods of torch's groups by which every message goes: some backends count them among the collectives."""

_SIMPLE = ("all_reduce", "broadcast", "reduce", "all_gather", "barrier", *RENAMED)
"""Those that make one collective of the group, and call nothing that is noted."""

_ROOTS = ("src", "dst")
_REDUCTIONS = dist.ReduceOp.RedOpType.__members__
SUM = dist.ReduceOp.SUM
_LOOPS = tuple(f"{LOCKSTEP}loop/{name}.py" for name in ("fit", "evaluate", "session"))  # user code calls none of them
_OTHERS, _USERS, _OUTERMOST = 0, 1, 2
_PENDING = 4096


class CollectiveTrace:
    """Makes functions of torch's write what they do into this process' trace.

    Attributes:
        where: gives the hook in which this rank is, and the batch; None: nobody knows.
    """

    def __init__(self) -> None:
        self.memory: TraceMemory = own()
        self.where: Callable[[], tuple[str, int]] | None = None
        self._busy: set[int] = set()  # threads inside a collective: what that calls in turn is not noted
        self._groups: dict[int, TracedGroup] = {}
        self._watched: list[Any] = []
        self._generations: dict[str, int] = {}
        self._payloads: dict[Any, int] = {}
        self._locations: dict[tuple[int, int], int] = {}
        self._kept: dict[int, CodeType] = {}  # so that no other code gets the id of one that is gone
        self._files: dict[str, int] = {}
        self._phases: dict[str, int] = {"": 0}
        self._pending: dict[int, int] = {}  # works that nobody has waited for, and their notes
        self._queues: dict[int, str] = {}  # those of them that are in a device's queue when they have been waited for
        self._works: set[type] = {dist.Work}  # classes of what has been begun
        self._marks = DeviceMarks(self.memory)
        self._reductions = {id(value): f" {name}" for name, value in _REDUCTIONS.items()} | {id(None): ""}
        default = GroupMember.WORLD
        if default is not None:
            self._meet(default, whole=True)

    # -- what is put in the place of torch's functions

    def collective(
        self, name: str, function: Callable[..., Any], strided: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """A collective that is noted.

        Args:
            name: one of `COLLECTIVES`.
            function: torch's.
            strided: what is called instead for a tensor that is not contiguous.
        """
        return self._noted(name, function, COLLECTIVES[name], name not in _SIMPLE, strided=strided)

    def message(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A message from rank to rank that is noted."""
        return self._noted(name, function, "tensor", nests=False, numbered=False)

    def composed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of ours that is made of messages, and noted as the collective that it is."""
        return self._noted(name, function, COLLECTIVES[name], nests=True)

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A group's way to send or receive: what its backend counts for that is no collective."""
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
        """``Work.wait``, which notes that what was waited for is complete."""
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

    def _noted(
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
        begin = self._begun(name, names, payload, numbered)
        end = self._ended(nests)
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
                if known is None:  # the call itself says why
                    return function(*args, **kwargs)
            index = begin(args, kwargs, group, known)
            call = function if strided is None or _is_whole(args, kwargs) else strided
            if nests:
                busy.add(get_ident())
            work: Any = call  # what is no answer, if there is none
            try:
                work = call(*args, **kwargs)
            finally:
                end(index, group, known, work, work is not call)
            return work

        return functools.update_wrapper(noted, function)

    # The functions that follow are called at each collective. What can be known of a function of torch's is found out
    # before, when it is replaced.

    def _begun(self, name: str, names: list[str], payload: str, numbered: bool) -> Callable[..., int]:
        """What notes that a call begins, and gives the note's index."""
        word, enter = self.memory.word("operation", name), self.memory.enter
        payload_of = self._payload_of(names, payload) if payload else lambda args, kwargs: 0
        root_of = _root_of(names)
        location_of, phase_of = self._location, self._phase
        main, threads = threading.main_thread().ident, threading._active  # type: ignore[attr-defined]

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any], group: Any, known: TracedGroup) -> int:
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
            if thread != main and thread in threads:  # one of Python's; autograd's are none
                flags |= ASIDE
            return enter(number, shape, location_of(sys._getframe(2)), word, known.word, phase, flags, batch, source)

        return begin

    def _payload_of(self, names: list[str], payload: str) -> Callable[..., int]:
        """What gives the word for the tensor of a call, and its reduction; 0 where there is no tensor."""
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
            except (AttributeError, TypeError, RuntimeError):  # no tensor: the call itself says so
                return 0

        return payload_of

    def _ended(self, nests: bool) -> Callable[..., None]:
        """What notes that a call is over."""
        busy, leave, pend, mark = self._busy, self.memory.leave, self._pend, self._marks.put

        def end(index: int, group: Any, known: TracedGroup, work: Any, returned: bool) -> None:
            if nests:
                busy.discard(get_ident())
                if known.counts:  # how many it makes is seen behind it
                    known.sequence = known.sequence_of(group)
            complete = not returned or work is None or work.__class__ is int  # a received message's source
            if not returned:
                known.whole = False  # nobody knows whether it has been begun
            leave(index, complete and not (known.queue and work is None and mark(index, known.queue)))
            if not complete:
                pend(work, index, known.queue)

        return end

    def stop(self) -> None:
        """Note nothing of this thread any more, also where somebody has kept a function that notes."""
        self._busy.add(get_ident())

    def _pend(self, work: Any, index: int, queue: str) -> None:
        """What has been begun, and nobody has waited for."""
        kind: Any = work.__class__
        if kind not in self._works:
            self._works.add(kind)
            if issubclass(kind, dist.Work) and "wait" in kind.__dict__:  # a backend that is written in Python
                _set(kind, "wait", self.waited(kind.wait))
        self._pending[id(work)] = index
        if queue:
            self._queues[index] = queue
        if not index & 1023 and len(self._pending) > _PENDING:
            self._pending.clear()
            self._queues.clear()

    # -- words

    def _describe(self, tensor: Tensor, reduction: object) -> int:
        """The word for a tensor, and the reduction of it, if there is one."""
        name = self._reductions.get(id(reduction))
        text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{' ?' if name is None else name}"
        found = self.memory.word("payload", text, tensor.numel())
        if found and name is not None:  # other reductions may be gone soon, and their ids another's
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
        """The innermost line of the user's; 0 where lockstep's loop has made the call."""
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
        """A group that is new here or has several backends: of these, the one that carries the call. None where this
        rank is no member, or there is no group."""
        known = self._groups.get(id(group)) or self._meet(group, whole=False)
        if known is not None and known.parts:
            known = known.parts.get(kind_of_device(name, args, kwargs, group)) or known
        return known

    def _meet(self, group: Any, whole: bool) -> TracedGroup | None:
        try:
            members = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, TypeError, ValueError):  # one that torch does not know
            return None
        name = group.group_name
        generation = self._generations[name] = self._generations.get(name, -1) + 1
        name = f"{name}{chr(39) * generation}"
        kinds = kinds_by_backend(group)
        queue = "" if len(kinds) != 1 or "cpu" in kinds[0] else kinds[0][0]

        def known_as(name: str, queue: str, device: torch.device | None = None) -> TracedGroup:
            sequence = sequence_of(group, device)
            return TracedGroup(
                self.memory.word("group", name, members), sequence, whole or sequence == 0, queue, device
            )

        known = self._groups[id(group)] = known_as(name, queue)
        for alike in kinds if len(kinds) > 1 else ():
            first = "cpu" if "cpu" in alike else alike[0]
            part = known_as(f"{name} on {first}", "" if first == "cpu" else first, torch.device(first))
            known.parts.update(dict.fromkeys(alike, part))
        key = id(group)

        def gone(_: object) -> None:
            self._groups.pop(key, None)

        self._watched.append(weakref.ref(group, gone))
        return known


def _root_of(names: list[str]) -> Callable[..., int] | None:
    """What gives the source or destination of a call, -1 where that is no number; None for functions without one."""
    name = next((each for each in _ROOTS if each in names), "")
    if not name:
        return None
    at = names.index(name)

    def root_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        found = args[at] if len(args) > at else kwargs.get(name)
        return found if found.__class__ is int else -1

    return root_of


def _is_whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether gloo reduces the tensor of a call rightly."""
    tensor = args[0] if args else kwargs.get("tensor")
    return not isinstance(tensor, Tensor) or tensor.is_contiguous()


def _kind(file: str) -> int:
    if file.startswith(FOREIGN):
        return _OUTERMOST if file in _LOOPS else _OTHERS
    return _USERS


# -- the gate before collectives -----------------------------------------------------------------------------


IN_PLACE = ("all_reduce", "reduce")
"""Collectives that gloo performs wrongly on strided views."""

# -- strided tensors


class _Done:
    """The work of a collective that has been waited for."""

    def __init__(self, result: list[Tensor]) -> None:
        self._result = result

    def wait(self, timeout: object = None) -> bool:
        """Nothing is left to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """A failure was raised when it happened."""
        return True

    def result(self) -> list[Tensor]:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future that has its value."""
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


# -- putting it up

_HOMES = (dist, dist.distributed_c10d)
_replaced: list[tuple[Any, str, Any]] = []
"""What stood where the gate stands: object, name, value."""
_trace: CollectiveTrace | None = None


def install_trace() -> None:
    """Have torch's collectives noted from here on, in this process, and strided tensors reduced rightly; once."""
    global _trace
    if not _replaced:
        TORCH_COLLECTIVES.install(lambda: take_down)
        # a process that is forked here must not write into this one's trace; its own gate, if any, has another
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
    take_down()
    if _trace is not None:
        _trace.stop()


def take_down() -> None:
    """Put torch's own functions back: for what is to be measured or tested without the gate."""
    while _replaced:
        home, name, value = _replaced.pop()
        setattr(home, name, value)
    DEVICE_MARKS.remove()


def set_location(where: Callable[[], tuple[str, int]] | None) -> None:
    """Say who knows in which hook this rank is, and at which batch; None: nobody any more."""
    if _trace is not None:
        install_trace()
        _trace.where = where
        answer_with(where)


WAITS = (*COLLECTIVES, *RENAMED.values(), "wait")
"""All that may wait for other ranks: torch's collectives, and waits for those that were begun."""


@contextmanager
def wrapped(wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]], names: Iterable[str]) -> Iterator[None]:
    """Inside, functions of torch's are called through what ``wrap`` makes of their names and of what stands there.

    Args:
        wrap: gives the function that is called.
        names: of functions, out of `WAITS`.
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
    # as it stands in the class: what `getattr` gives of a method of C++ is not bound any more once it is put back
    _replaced.append((home, name, inspect.getattr_static(home, name)))
    setattr(home, name, value)
