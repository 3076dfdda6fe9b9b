"""The supervisor of a node: a small process that is no rank, watches the ranks, ends them, and tells why.

It is started by local rank 0, and imports no torch, so that it is there within a tenth of a second. Where nobody else
starts the ranks it starts the others, each in a process group of its own. Whoever ends first and badly, rank 0
included, it lets the others raise and save what they have, ends those that still run two seconds later (half a second
after the last of them has moved, where each has failed or waits in a collective), and has the first cause be the last
line on the screen. Supervisors of several nodes agree on which that is (`hub`).

All is decided in the main thread, event by event; the other threads only bring events.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeGuard

from lockstep.cluster.torchelastic import hand_cause, promise_cause
from lockstep.launch.parent_death import bound
from lockstep.launch.processes import FAREWELL, GRACE, Ended, Foreign, RankProcesses, is_stopped
from lockstep.supervise.causes import (
    Cause,
    Divergence,
    First,
    Judgement,
    also_failed,
    early_cause,
    final_cause,
    has_left,
    is_told,
    judgement,
    left,
    located,
    was_caught,
)
from lockstep.supervise.changes import plain_notes
from lockstep.supervise.channel import Channel, Message, caller, door
from lockstep.supervise.comparison import NotesOfAll
from lockstep.supervise.mailbox import RANK, Mailbox
from lockstep.supervise.monitor import RankMonitor, Verdict
from lockstep.supervise.nodes import Decision, Nodes
from lockstep.supervise.screen_text import wipe_line
from lockstep.supervise.signals import HANDLED

TICK = 0.1
"""Seconds from one look for the first cause to the next, while it is not certain."""

ANSWER = 2.0
"""Seconds that rank 0 gets to do what it is told."""

NEWS = 0.8
"""Seconds that other nodes get to say what they know; longer than a comparison takes."""

IDLE = 1.0
"""Seconds from one look at whether anybody is left to the next."""

Handlers = dict[str, Callable[[Any], object]]
"""By the name of an event, what to do."""


def _codes(number: int) -> tuple[int | None, ...]:
    """Return the exit codes of a process that a signal has ended; None where nobody can ask any more."""
    return None, -number, 128 + number


class Supervisor:
    """Watches the ranks of a node from their start to the end of the last.

    Args:
        channel: to local rank 0.
        mailbox: of the ranks.
        signal_pipe: descriptor of a pipe into which the system writes the signals that local rank 0 gets.
        order: what local rank 0 wants, see `lockstep.supervise.client`.
    """

    def __init__(self, channel: Channel, mailbox: Mailbox, signal_pipe: int, order: Message) -> None:
        self._channel, self._mailbox, self._signal_pipe, self._order = channel, mailbox, signal_pipe, order
        self._rank, self._node = int(order["rank"]), int(order["node"])
        self._starts = order["command"] is not None
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._processes = RankProcesses(
            lambda: self._put("wound up"),
            mailbox.is_inside,
            mailbox.is_someone_ending,
            mailbox.failed_at,
            lambda rank: self._put("ended"),
            self._is_excused,
            lambda rank: self._monitor.hangs.traces.waits_since(rank),
        )
        self._processes.hurries = self._starts
        self._nodes = Nodes(self._node, order["nodes"], self._put, self._follow, order["scheduled"])
        self._monitor = RankMonitor(
            mailbox,
            lambda found: self._put("verdict", found),
            lambda: self._processes.ended,
            order["size"],
            self._nodes.hub,
            self._nodes.host,
            self._processes.memory_kills.look,
        )
        if self._nodes.hub is not None:
            self._nodes.compares = NotesOfAll(self._nodes.hub, self._monitor.hangs.traces.made).ask
        self._zero = Foreign(order["process"], lambda: self._said(self._rank))
        self._channels: list[Channel] = []
        self._left: dict[int, Cause] = {}  # the error that ended the script of rank 0, which waits for its leave
        self._interrupted = False  # it was Ctrl-C
        self._has_left = False
        numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        self._signalled = {number: threading.Event() for number in numbers}  # they have come to rank 0, or here
        self._verdict: Verdict | None = None
        self._first: First | None = None
        self._told = self._has_asked = self._is_over = False
        self._lingers = False  # all ranks have ended, and those of other nodes may wait for one that has left a call
        self._deciding: Handlers = {
            "claim": self._nodes.claimed,
            "compared": self._nodes.compared,
            "first": self._nodes.heard,
            "lost": self._nodes.lost,
        }

    def _put(self, event: str, what: object = None) -> None:
        self._events.put((event, what))

    # -- the ranks ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the other ranks, or let them come, and begin to watch."""
        order = self._order
        self._processes.adopt(self._rank, self._zero, stop=not self._starts)
        if self._starts:
            first = bound()
            environ = {**order["environ"], order["parent"]: str(os.getpid())}
            for local_rank in range(1, order["local_size"]):
                environ["LOCAL_RANK"], environ[RANK] = str(local_rank), str(self._rank + local_rank)
                handed = (self._mailbox.descriptor,)
                self._processes.start(
                    self._rank + local_rank, order["command"], environ, handed, order["folder"], first
                )
        elif order["name"]:
            self._thread(self._admit, door(order["name"]))
        self._processes.watch()
        self._monitor.start()
        self._thread(self._hear, self._channel, self._rank)
        self._thread(self._hear_presses)

    def starts(self) -> bool:
        """`start`; where the system lets no more ranks start, those that run are ended, and rank 0 says why."""
        try:
            self.start()
        except RuntimeError as error:  # of processes, or of threads
            self._processes.stop(0.0)
            self._channel.send({"do": "end", "text": f"lockstep: {error}.", "code": 1})
            return False
        return True

    def _thread(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="lockstep-" + target.__name__.strip("_"), daemon=True).start()

    def _admit(self, entrance: socket.socket | None) -> None:
        """In a thread: ranks that somebody else has started come."""
        while entrance is not None:
            with contextlib.suppress(OSError, RuntimeError):  # no more files, or threads: the rank does without
                connection, _ = entrance.accept()
                self._thread(self._welcome, connection)

    def _welcome(self, connection: socket.socket) -> None:
        """In a thread of its own: a process says which rank it is, and what it has to say."""
        process, channel = caller(connection), Channel(connection)
        if process <= 0 or not channel.send({"do": "come"}, self._mailbox.descriptor):
            channel.close()
            return
        rank = (channel.receive() or {}).get("rank")
        first = self._rank
        if type(rank) is not int or not first < rank < first + self._order["local_size"]:  # none of ours
            channel.close()
            return
        self._channels.append(channel)
        self._processes.adopt(rank, Foreign(process, lambda: self._said(rank)))
        self._processes.watch()
        self._hear(channel, rank)

    def _hear(self, channel: Channel, rank: int) -> None:
        """In a thread: what a rank says."""
        while (message := channel.receive()) is not None:
            with contextlib.suppress(KeyError, TypeError):  # what makes no sense is left out
                if message["say"] == "left" and message["cause"] is not None:
                    message["cause"] = Cause(**message["cause"])
                self._put(message["say"], (rank, message))
        if rank == self._rank:
            self._put("gone")

    def _hear_presses(self) -> None:
        """In a thread: the signals that rank 0 hears."""
        poll = select.poll()
        poll.register(self._signal_pipe, select.POLLIN)
        while True:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                heard = os.read(self._signal_pipe, 4096)
                if not heard:  # rank 0 is gone, and all that it has forked
                    return
                self._note_signals(heard)
                for _ in range(heard.count(signal.SIGINT)):
                    self._monitor.interrupt()

    def _said(self, rank: int) -> int | None:
        """The exit code that a rank has announced."""
        return next((note["code"] for note in self._mailbox.others("left") if note["left"] == rank), None)

    def _is_excused(self, rank: int, code: int | None) -> bool:
        """Whether an end is what a scheduler asked for, that asked all: it sees to the others, too."""
        if self._starts or self._first is not None:
            return False
        until = time.monotonic() + NEWS  # the same signal may not have been heard here yet
        while not any(self._is_ended_by(number, code) for number in self._signalled):
            if time.monotonic() >= until or not any(code in _codes(number) for number in self._signalled):
                return False
            time.sleep(TICK / 5)
        return True

    def _is_ended_by(self, number: int, code: int | None) -> bool:
        """Return True if a signal has come that ends a process with this code: with any while it imports torch."""
        return self._signalled[number].is_set() and (code in _codes(number) or not self._mailbox.has_met())

    def _note_signals(self, numbers: Collection[int]) -> None:
        for number, event in self._signalled.items():
            if number in numbers:
                event.set()

    # -- signals -----------------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        """A signal has come to this process: with others of its group, or its step of a job."""
        if number == signal.SIGINT and self._starts:
            self._processes.signal(number)  # a terminal would have told them
        self._note_signals([number])
        if number == signal.SIGTSTP:
            self._processes.signal_groups(signal.SIGSTOP)
            before = signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)  # stops this process, unless nobody could let its group go on: a shell, say
            signal.signal(number, before)  # later, when it goes on
            self._processes.signal_groups(signal.SIGCONT)

    # -- events ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """From event to event; comes back when nothing is left to do."""
        handlers: Handlers = {
            "ended": self._on_ended,
            "left": self._on_left,
            "stop": self._stop,  # Ctrl-C, while rank 0 waited for the others to end
            "gone": self._on_gone,
            "wound up": lambda _: self._conclude(),
            "verdict": self._on_verdict,
            **self._deciding,
            "asked": self._on_asked,
            "running": lambda _: self._channel.send({"do": "running", "ranks": self._processes.running}),
            "silent": self._on_silent,
            "hub": self._on_hub,
            "join": self._on_join,
        }
        while not self._is_over:
            try:
                event, what = self._events.get(timeout=TICK if self._is_open() or self._lingers else IDLE)
            except queue.Empty:
                self._on_silence()
            else:
                handlers.get(event, _nothing)(what)

    def close(self) -> None:
        """Let go of all."""
        self._nodes.close(self._monitor.last())
        self._monitor.stop()

    def _on_silence(self) -> None:
        """Nothing has come for a while."""
        self._look()
        if self._lingers:
            self._on_ended(None)
        if not self._processes.running and self._zero.wait(0):
            self._is_over = True  # nobody is left who could bring an event

    def _is_open(self) -> bool:
        """Whether something has failed, and what is not certain yet."""
        return self._first is None and bool(self._processes.failed or self._left)

    def _look(self) -> None:
        """Whether it is certain by now what has failed first; then the others are told."""
        if not self._is_open():
            return
        found: First | None
        found = early_cause(self._processes.failed, self._mailbox.read(), self._monitor.stands(), self._left)
        if _may_be_gloos(found):
            found = self._monitor.hangs.divergence() or found
        elsewhere = self._monitor.caught_elsewhere
        if found is None and elsewhere:
            found = Divergence(elsewhere)
        if found is not None:
            self._publish(found)
        elif not self._has_asked:
            self._has_asked = True
            self._ask_nodes()

    def _ask_nodes(self) -> None:
        """This node has lost ranks, maybe of another one: ask the others."""
        for each in self._mailbox.read():
            if each.lost and each.call:
                self._nodes.ask({"rank": each.rank, "call": each.call, "where": f"{each.doing} ({each.location})"})

    def _on_asked(self, body: Message) -> None:
        """A rank of another node has lost others: who has left its call here, or failed and was caught?"""
        if self._first is not None or self._nodes.decided is not None:
            return
        stands = self._monitor.own_stands()
        found: First | None = next((note for note in self._mailbox.read() if was_caught(note, stands)), None)
        gone = [stand for stand in stands.values() if has_left(stand, int(body["call"]))]
        if found is None and gone:
            found = left(gone[0], [int(body["rank"])], str(body["where"]))
        if found is not None:
            self._publish(found)
            self._thread(self._processes.wind_up, time.monotonic())

    def _on_ended(self, _: object) -> None:
        self._look()
        if self._is_failing():
            self._is_over = self._told and not self._processes.running
        elif self._starts and not self._has_left and self._rank not in self._processes.running:
            self._stop(None)  # rank 0 ended by itself, outside of any call
        elif not self._processes.running:
            self._lingers = self._has_exited() and self._nodes.misses()
            if not self._lingers:
                self._end()

    def _end(self) -> None:
        """Nothing is left to do: rank 0 may end, if it is there to be told."""
        self._channel.send({"do": "go"})
        self._is_over = True

    def _stop(self, _: object) -> None:
        """End all that still run."""
        self._processes.stop()
        self._end()

    def _has_exited(self) -> bool:
        """Whether ``sys.exit()`` has ended the newest call of a rank of this node, and nobody has minded so far."""
        stands = self._monitor.own_stands()
        return any(note.is_exit and was_caught(note, stands) for note in self._mailbox.read())

    def _is_failing(self) -> bool:
        known = self._verdict or self._first or self._nodes.decided
        return bool(self._processes.failed or self._left or known or self._interrupted)

    def _on_left(self, what: tuple[int, Message]) -> None:
        """A rank has come to its end, and waits for its leave; one that a launcher started only if it has failed."""
        rank, message = what
        cause: Cause | None = message["cause"]
        if not self._starts:
            if cause is not None:
                self._left[rank] = cause
            self._thread(self._processes.wind_up, message["at"])
            self._look()
            return
        self._take_leave(*what)
        if self._interrupted and self._verdict is None:
            until = time.monotonic() + GRACE
            while self._processes.running and time.monotonic() < until:
                time.sleep(TICK / 5)
            self._stop(None)
            return
        if cause is not None:
            self._thread(self._processes.wind_up, cause.at)
        self._on_ended(None)

    def _take_leave(self, rank: int, message: Message) -> None:
        cause: Cause | None = message["cause"]
        self._has_left = True
        self._interrupted = cause is not None and cause.is_interrupt
        if cause is not None:
            self._left[rank] = cause
        self._processes.has_left(rank, message["at"] if cause is None else None)

    def _on_gone(self, _: object) -> None:
        """Rank 0's process is not there any more; if it was killed while it waited for the others, nobody waits now."""
        if self._starts and self._has_left and not self._is_failing():
            self._stop(None)

    def _on_verdict(self, verdict: Verdict) -> None:
        if self._told or self._processes.failed:  # what follows from it is under way
            return
        self._verdict = verdict
        cause = verdict.cause
        if cause is not None and not verdict.interrupted:
            self._publish(cause)
        self._processes.stop(GRACE / 4)
        if not self._monitor.hangs.is_halted(self._rank):
            self._await_rank_zero(GRACE / 2)  # it may be waiting in a collective, which raises now
        self._conclude()

    def _on_silent(self, words: str) -> None:
        """A node does not answer, and a scheduler that sees to it looks for another one: ending would be giving up."""
        self._write(f"lockstep: {words}: waiting for the scheduler to end the run, or to start it elsewhere")

    # -- other nodes -------------------------------------------------------------------------------------------

    def _on_hub(self, what: tuple[int, Message]) -> None:
        """Local rank 0 asks where the other nodes can call."""
        port, token = self._nodes.open(what[1]["address"])
        self._channel.send({"do": "hub", "port": port, "token": token})

    def _on_join(self, what: tuple[int, Message]) -> None:
        """Local rank 0 knows where the hub is."""
        message = what[1]
        self._nodes.join(message["address"], message["port"], message["token"])

    def _follow(self, decided: Decision) -> None:
        """The first cause of all nodes is known: end this node's ranks."""
        if self._nodes.is_elsewhere:
            self._mailbox.leave({"first": decided.words, "rank": decided.rank})
            self._thread(self._processes.wind_up, time.monotonic() - GRACE / 4)
        if not self._starts:
            self._tell_at_once()

    def _publish(self, cause: First) -> None:
        """The first cause of this node is certain: tell its ranks, whose collectives raise now, and the other nodes."""
        self._first = cause
        self._mailbox.leave({"first": located(cause, self._nodes.host), "rank": getattr(cause, "rank", -1)})
        notes = self._monitor.hangs.traces.newest(cause.rank) if _may_be_gloos(cause) else ()
        self._nodes.say(cause, plain_notes(notes))
        if self._nodes.hub is None and not self._starts:
            self._tell_at_once()

    # -- the end -----------------------------------------------------------------------------------------------

    def _await_rank_zero(self, seconds: float) -> None:
        """Let rank 0 end by itself; longer, if something has been raised in it: it may be saving what it has.

        Who is the first cause is not decided meanwhile: what other nodes say is heard later.
        """
        began, later = time.monotonic(), list[tuple[str, Any]]()

        def is_over() -> bool:
            waited = time.monotonic() - began
            return waited >= seconds and (waited >= FAREWELL or not self._mailbox.is_someone_ending())

        def keep(name: str) -> Callable[[Any], None]:
            return lambda what: later.append((name, what))

        handlers: Handlers = {name: keep(name) for name in self._deciding}
        if self._starts:
            handlers["left"] = lambda what: self._take_leave(*what)
        self._hear_until(lambda: self._rank not in self._processes.running or self._has_left or is_over(), handlers)
        for event in later:
            self._put(*event)

    def _hear_until(self, condition: Callable[[], bool], handlers: Handlers, seconds: float = math.inf) -> bool:
        """Take in some kinds of events until something holds, or for so long; all others are of no use any more."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= until:
                return False
            with contextlib.suppress(queue.Empty):
                event, what = self._events.get(timeout=TICK / 5)
                handlers.get(event, _nothing)(what)
        return True

    def _conclude(self) -> None:
        """All others have ended: tell why, and end."""
        if not self._starts:
            if not self._told:
                self._print(self._judged())
            self._is_over = not self._processes.running
            return
        if self._is_by_ctrl_c():
            self._await_interrupt()
        if self._interrupted and self._verdict is None:
            self._end()
        else:
            self._tell_rank_zero(self._judged())
        self._is_over = True

    def _is_by_ctrl_c(self) -> bool:
        """Return True if Ctrl-C is what ended the ranks that failed: it strikes those that are not in a call."""
        failed, number = self._processes.failed, signal.SIGINT
        return (
            self._starts
            and bool(failed)
            and all(end.code == -number or self._is_ended_by(number, end.code) for end in failed)
        )

    def _await_interrupt(self) -> None:
        """Let a Ctrl-C end rank 0 too: its script outside of a call; in one, it waits for ranks that are gone."""
        rank = self._rank
        self._hear_until(
            lambda: rank not in self._processes.running or self._has_left or self._mailbox.is_inside(rank),
            {"left": lambda what: self._take_leave(*what)},
        )
        self._await_rank_zero(GRACE / 4)

    def _cause(self, shown: set[int], folded: set[int], notes: list[Cause]) -> tuple[First | None, bool]:
        """The first cause, as far as this node knows it, and whether it has been told.

        Args:
            shown, folded: ranks that have printed their tracebacks, and that have folded theirs.
            notes: of ranks on their exceptions.
        """
        failed = self._processes.failed
        if self._verdict is not None:
            printed = {end.rank for end in failed} | self._left.keys() | shown
            return self._verdict.cause, is_told(self._verdict.cause, printed - folded, notes)
        proof = self._monitor.hangs.divergence()
        cause, told = final_cause(failed, notes, self._monitor.stands(), self._left, shown, proof, folded)
        return (self._first if cause is None or isinstance(self._first, Divergence) else cause), told

    def _judged(self) -> Judgement:
        failed, verdict, shown = self._processes.failed, self._verdict, self._who("printed")
        folded, notes = self._who("folded"), self._mailbox.read()
        cause, told = self._cause(shown, folded, notes)
        interrupted = self._is_by_ctrl_c() if verdict is None else verdict.interrupted
        codes = [end.code for end in failed]
        if self._nodes.hub is not None and not interrupted:
            if self._first is None and cause is not None:
                self._await_decision()  # nothing is certain here, and another node may know more: let it speak first
                if self._nodes.decided is None:
                    self._publish(cause)
            self._await_decision()
            if self._nodes.decided is not None and self._nodes.is_elsewhere:
                return judgement(Divergence(self._nodes.decided.words), True, False, codes)
        also = also_failed(cause, [note for note in notes if note.rank in folded], self._nodes.host)
        return judgement(cause, told, interrupted, codes, self._nodes.host, also)

    def _who(self, did: str) -> set[int]:
        """The ranks that have ``"printed"`` their tracebacks, or that have ``"folded"`` theirs."""
        return {note[did] for note in self._mailbox.others(did)}

    def _await_decision(self) -> None:
        nodes = self._nodes
        if nodes.hub is not None:
            others = nodes.hub
            self._hear_until(lambda: nodes.decided is not None or not others.nodes, self._deciding, NEWS)

    def _tell_rank_zero(self, found: Judgement) -> None:
        """Have rank 0 print the last line and end. Where it cannot, end it, and print."""
        text = "" if self._is_quiet() else _left_to_say(found.text)
        if self._rank in self._processes.running or self._has_left:
            stopped = is_stopped(self._order["process"])
            if not stopped and self._channel.send({"do": "end", "text": text, "code": found.code}):
                acted: list[object] = []
                acts = self._hear_until(lambda: bool(acted), {"acts": acted.append}, ANSWER)
                if acts and self._zero.wait(ANSWER):
                    return
                text = "" if acts else text
            self._zero.signal(signal.SIGKILL)
            self._zero.wait(ANSWER)
        self._write(text)

    def _is_quiet(self) -> bool:
        """Whether SIGTERM has ended rank 0, and it had been heard before: nothing has failed."""
        number, failed = signal.SIGTERM, self._processes.failed
        is_set = self._signalled[number].is_set()
        return is_set and not self._left and all(self._is_ended_by(number, end.code) for end in failed)

    def _tell_at_once(self) -> None:
        """Where a launcher ends the ranks, and prints its own summary: be there before it."""
        nodes, decided = self._nodes, self._nodes.decided
        if self._told or (nodes.hub is not None and decided is None):
            return
        if decided is not None and nodes.is_elsewhere:
            self._print(judgement(Divergence(decided.words), True, False, []))
        elif self._first is not None:
            told = is_told(self._first, self._who("printed"), self._mailbox.read())
            self._print(judgement(self._first, told, False, [], nodes.host))

    def _print(self, found: Judgement) -> None:
        self._told = True
        hub = self._nodes.hub
        if not (self._order["one_screen"] and self._node and hub is not None and hub.nodes):
            self._write(_left_to_say(found.text))
        for channel in [self._channel, *self._channels]:
            channel.send({"do": "go"})

    def _write(self, text: str) -> None:
        if text:
            wipe_line()
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="replace"))


def _nothing(what: object) -> None:
    """What is done with an event that is of no use any more."""


def _may_be_gloos(cause: First | None) -> TypeGuard[Ended]:
    """Whether gloo may have ended a process, which it does where ranks bring other sizes."""
    return isinstance(cause, Ended) and cause.code in (None, -signal.SIGABRT)


def _left_to_say(text: str) -> str:
    """What is to be printed, where the agent of `lockstep run` says the last line."""
    before, _, last = text.rpartition("\n")  # the last line, whatever a message before it says
    words = last.removeprefix("lockstep: ")
    return before.rstrip("\n") if words != last and hand_cause(words) else text


def main(channel: int, mailbox: int, signal_pipe: int) -> None:
    """Run the process to its end.

    Args:
        channel, mailbox, signal_pipe: descriptors: of the socket to local rank 0, the mailbox, and the pipe of
            its signals.
    """
    to_rank_zero = Channel(socket.socket(fileno=channel))
    order = to_rank_zero.receive()
    if order is None:  # it has ended already
        return
    supervisor = Supervisor(to_rank_zero, Mailbox(mailbox), signal_pipe, order)
    # Handlers, where others would ignore: the ranks that are started are not to inherit it.
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: supervisor.on_signal(number))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # of who inherits an ignored one the system forgets how ranks ended
    promise_cause()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    if supervisor.starts():
        supervisor.run()
    supervisor.close()
    os._exit(0)  # threads that wait for messages have nobody to wait for
