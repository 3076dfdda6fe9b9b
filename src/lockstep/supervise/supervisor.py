"""Supervisor of a node: a small process that watches the ranks, ends them, and reports the first cause.

Local rank 0 starts it. It does not import torch, so that it is ready within 0.1 s. Without a launcher, it starts the
other ranks, each in a process group of its own. After the first failure, even of rank 0, it lets the other ranks raise
and save their state. It ends those that still run two seconds later, or half a second after the last activity if each
has failed or waits in a collective. The first cause is the last line on the terminal. Supervisors of several nodes
agree on it (`hub`).

The main thread makes all decisions, event by event. The other threads only produce events.
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
from lockstep.launch.parent_death import rank_preparation
from lockstep.launch.processes import GRACE, SAVE_TIMEOUT, Ended, Foreign, RankProcesses, is_stopped
from lockstep.supervise.causes import (
    Cause,
    Divergence,
    First,
    Judgement,
    also_failed,
    early_cause,
    final_cause,
    has_left,
    is_printed,
    judgement,
    was_caught,
    with_host,
)
from lockstep.supervise.changes import plain_notes
from lockstep.supervise.channel import Channel, Message, listen_at, peer_process
from lockstep.supervise.elsewhere import NotesOfAll
from lockstep.supervise.hang_text import has_left_call
from lockstep.supervise.mailbox import RANK, Mailbox
from lockstep.supervise.monitor import RankMonitor, Verdict
from lockstep.supervise.nodes import Decision, Nodes
from lockstep.supervise.screen_text import wipe_line
from lockstep.supervise.signals import HANDLED

TICK = 0.1
"""Seconds between checks for the first cause while it is not certain."""

ORDER_TIMEOUT = 2.0
"""Seconds that rank 0 has to carry out an order."""

NODES_TIMEOUT = 0.8
"""Seconds that other nodes have to report what they know. Longer than a comparison takes."""

IDLE_TICK = 1.0
"""Seconds between checks for remaining processes."""

Handlers = dict[str, Callable[[Any], object]]
"""Event handlers by the name of the event."""


def _codes(number: int) -> tuple[int | None, ...]:
    """Return the possible exit codes of a process that signal ``number`` has ended. None stands for an unknown code."""
    return None, -number, 128 + number


class Supervisor:
    """Supervisor of a node's ranks, from the ranks' start until the last rank has ended.

    Args:
        channel: channel to local rank 0.
        mailbox: mailbox of the ranks.
        signal_pipe: descriptor of a pipe that receives the signals of local rank 0.
        order: first message from local rank 0, see `lockstep.supervise.client`.
    """

    def __init__(self, channel: Channel, mailbox: Mailbox, signal_pipe: int, order: Message) -> None:
        self._channel, self._mailbox, self._signal_pipe, self._order = channel, mailbox, signal_pipe, order
        self._rank, self._node = int(order["rank"]), int(order["node"])
        self._starts_ranks = order["command"] is not None
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
        self._processes.hurries = self._starts_ranks
        self._nodes = Nodes(self._node, order["nodes"], self._put, self._follow, order["scheduled"])
        self._monitor = RankMonitor(
            mailbox,
            lambda found: self._put("verdict", found),
            lambda: self._processes.ended,
            order["size"],
            self._nodes.hub,
            self._nodes.host,
            self._processes.memory_kills.update,
        )
        if self._nodes.hub is not None:
            self._nodes.compares = NotesOfAll(self._nodes.hub, self._monitor.hangs.traces.made).compare
        self._rank_zero = Foreign(order["process"], lambda: self._reported_code(self._rank))
        self._channels: list[Channel] = []
        self._exit_causes: dict[int, Cause] = {}  # errors of ended scripts, whose ranks wait for permission to exit
        self._interrupted = False  # by Ctrl-C
        self._zero_has_left = False
        numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        self._signalled = {number: threading.Event() for number in numbers}  # that reached rank 0 or this process
        self._verdict: Verdict | None = None
        self._first: First | None = None
        self._has_printed = self._has_queried = self._is_over = False
        # all ranks have ended, and those of other nodes may still wait for one that left a call
        self._waits_for_nodes = False
        self._deciding: Handlers = {
            "claim": self._nodes.handle_claim,
            "compared": self._nodes.decide,
            "first": self._nodes.accept,
            "lost": self._nodes.handle_loss,
        }

    def _put(self, event: str, what: object = None) -> None:
        self._events.put((event, what))

    # -- ranks -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the other ranks, or accept ranks from a launcher, and watch all ranks."""
        order = self._order
        self._processes.adopt(self._rank, self._rank_zero, stop=not self._starts_ranks)
        if self._starts_ranks:
            first = rank_preparation()
            environ = {**order["environ"], order["parent"]: str(os.getpid())}
            for local_rank in range(1, order["local_size"]):
                environ["LOCAL_RANK"], environ[RANK] = str(local_rank), str(self._rank + local_rank)
                handed = (self._mailbox.descriptor,)
                self._processes.start(
                    self._rank + local_rank, order["command"], environ, handed, order["folder"], first
                )
        elif order["name"]:
            self._thread(self._admit, listen_at(order["name"]))
        self._processes.watch()
        self._monitor.start()
        self._thread(self._receive, self._channel, self._rank)
        self._thread(self._receive_signals)

    def starts(self) -> bool:
        """Call `start`. If the system cannot start more processes or threads, end all ranks and return False."""
        try:
            self.start()
        except RuntimeError as error:  # the limit of processes or threads is reached
            self._processes.stop(0.0)
            self._channel.send({"do": "end", "text": f"lockstep: {error}.", "code": 1})
            return False
        return True

    def _thread(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, name="lockstep-" + target.__name__.strip("_"), daemon=True).start()

    def _admit(self, entrance: socket.socket | None) -> None:
        """Accept connections from ranks that an external launcher has started. Runs in a thread."""
        while entrance is not None:
            # at a limit, the rank works without a supervisor
            with contextlib.suppress(OSError, RuntimeError):
                connection, _ = entrance.accept()
                self._thread(self._welcome, connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Identify the rank at a new connection, and receive its messages. Runs in a thread for each connection."""
        process, channel = peer_process(connection), Channel(connection)
        if process <= 0 or not channel.send({"do": "come"}, self._mailbox.descriptor):
            channel.close()
            return
        rank = (channel.receive() or {}).get("rank")
        first = self._rank
        # not a rank of this node
        if type(rank) is not int or not first < rank < first + self._order["local_size"]:
            channel.close()
            return
        self._channels.append(channel)
        self._processes.adopt(rank, Foreign(process, lambda: self._reported_code(rank)))
        self._processes.watch()
        self._receive(channel, rank)

    def _receive(self, channel: Channel, rank: int) -> None:
        """Receive a rank's messages and turn them into events. Runs in a thread."""
        while (message := channel.receive()) is not None:
            # malformed messages are dropped
            with contextlib.suppress(KeyError, TypeError):
                if message["say"] == "left" and message["cause"] is not None:
                    message["cause"] = Cause(**message["cause"])
                self._put(message["say"], (rank, message))
        if rank == self._rank:
            self._put("gone")

    def _receive_signals(self) -> None:
        """Receive the signals that local rank 0 has received and written to its pipe. Runs in a thread."""
        poll = select.poll()
        poll.register(self._signal_pipe, select.POLLIN)
        while True:
            poll.poll()
            with contextlib.suppress(BlockingIOError):
                received = os.read(self._signal_pipe, 4096)
                if not received:  # rank 0 and all its forked processes have ended
                    return
                self._note_signals(received)
                for _ in range(received.count(signal.SIGINT)):
                    self._monitor.interrupt()

    def _reported_code(self, rank: int) -> int | None:
        """Return the exit code that a rank has reported to the mailbox. Return None if the rank has reported none."""
        return next((note["code"] for note in self._mailbox.others("left") if note["left"] == rank), None)

    def _is_excused(self, rank: int, code: int | None) -> bool:
        """Return True if a rank was ended by a signal that a scheduler sent to all ranks, which is not a failure."""
        if self._starts_ranks or self._first is not None:
            return False
        # the same signal may not have arrived here yet
        until = time.monotonic() + NODES_TIMEOUT
        while not any(self._is_ended_by(number, code) for number in self._signalled):
            if time.monotonic() >= until or not any(code in _codes(number) for number in self._signalled):
                return False
            time.sleep(TICK / 5)
        return True

    def _is_ended_by(self, number: int, code: int | None) -> bool:
        """Return True if signal ``number`` explains a rank's exit code and this supervisor has received the signal too.

        Before any rank has joined the process group, the signal explains every exit code.
        """
        return self._signalled[number].is_set() and (code in _codes(number) or not self._mailbox.has_joined())

    def _note_signals(self, numbers: Collection[int]) -> None:
        for number, event in self._signalled.items():
            if number in numbers:
                event.set()

    # -- signals -----------------------------------------------------------------------------------------------

    def on_signal(self, number: int) -> None:
        """Handle a signal that the supervisor has received itself, as a member of its process group or job step."""
        if number == signal.SIGINT and self._starts_ranks:
            self._processes.signal(number)  # like a Ctrl-C from the terminal
        self._note_signals([number])
        if number == signal.SIGTSTP:
            self._processes.signal_groups(signal.SIGSTOP)
            before = signal.signal(number, signal.SIG_DFL)
            # has no effect if its group is orphaned
            os.kill(os.getpid(), number)
            signal.signal(number, before)  # after SIGCONT
            self._processes.signal_groups(signal.SIGCONT)

    # -- events ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Handle events until all ranks have ended and the first cause is reported."""
        handlers: Handlers = {
            "ended": self._on_ended,
            "left": self._on_left,
            "stop": self._stop,  # Ctrl-C while rank 0 was waiting for the others to end
            "gone": self._on_gone,
            "wound up": lambda _: self._conclude(),
            "verdict": self._on_verdict,
            **self._deciding,
            "asked": self._on_question,
            "running": lambda _: self._channel.send({"do": "running", "ranks": self._processes.running}),
            # the scheduler restarts the run only if this process does not end it
            "silent": lambda words: self._write(
                f"lockstep: {words}: waiting for the scheduler to end the run, or to start it elsewhere"
            ),
            "hub": self._on_hub,
            "join": self._on_join,
        }
        while not self._is_over:
            try:
                event, what = self._events.get(timeout=TICK if self._is_open() or self._waits_for_nodes else IDLE_TICK)
            except queue.Empty:
                self._find_cause()
                if self._waits_for_nodes:
                    self._on_ended(None)
                if not self._processes.running and self._rank_zero.wait(0):
                    # no process is left that could produce an event
                    if self._is_failing() and not self._has_printed:
                        # the event of a failure may come a moment after the last rank has ended
                        self._processes.wait(GRACE)
                        self._conclude()
                    self._is_over = True
            else:
                handlers.get(event, _nothing)(what)

    def close(self) -> None:
        """Close the connections and stop the monitor."""
        self._nodes.close(self._monitor.farewell())
        self._monitor.stop()

    def _is_open(self) -> bool:
        """Return True if a rank has failed and the first cause is still to be found."""
        return self._first is None and bool(self._processes.failed or self._exit_causes)

    def _find_cause(self) -> None:
        """Report the first cause if it has become certain. Otherwise, query other nodes once about lost connections."""
        if not self._is_open():
            return
        found: First | None
        found = early_cause(self._processes.failed, self._mailbox.read(), self._monitor.positions(), self._exit_causes)
        if _may_be_gloos(found):
            found = self._monitor.hangs.divergence() or found
        elsewhere = self._monitor.caught_elsewhere
        if found is None and elsewhere:
            found = Divergence(elsewhere)
        if found is not None:
            self._publish(found)
        elif not self._has_queried:
            self._has_queried = True
            # the ranks that this node's ranks have lost may be another node's
            for each in self._mailbox.read():
                if each.lost and each.call:
                    self._nodes.query(
                        {"rank": each.rank, "call": each.call, "where": f"{each.doing} ({each.location})"}
                    )

    def _on_question(self, body: Message) -> None:
        """Handle another node's query about lost connections. Report the first cause if it is on this node.

        The cause is here if a rank of this node has caught an exception in its call, or has left the call.
        """
        if self._first is not None or self._nodes.decided is not None:
            return
        positions = self._monitor.own_positions()
        found: First | None = next((note for note in self._mailbox.read() if was_caught(note, positions)), None)
        departed = [position for position in positions.values() if has_left(position, int(body["call"]))]
        if found is None and departed:
            found = Divergence(has_left_call(departed[0], [int(body["rank"])], str(body["where"])))
        if found is not None:
            self._publish(found)
            self._thread(self._processes.wind_up, time.monotonic())

    def _on_ended(self, _: object) -> None:
        self._find_cause()
        if self._is_failing():
            self._is_over = self._has_printed and not self._processes.running
        elif self._starts_ranks and not self._zero_has_left and self._rank not in self._processes.running:
            self._stop(None)  # rank 0 ended by itself, outside of calls
        elif not self._processes.running:
            # after sys.exit() in a call, without any failure so far, others may still wait for the ranks of this node
            positions = self._monitor.own_positions()
            has_exited = any(note.is_exit and was_caught(note, positions) for note in self._mailbox.read())
            self._waits_for_nodes = has_exited and self._nodes.has_to_wait()
            if not self._waits_for_nodes:
                self._end()

    def _end(self) -> None:
        """End this supervisor after a run without failures. Let rank 0 exit if it still runs."""
        self._channel.send({"do": "go"})
        self._is_over = True

    def _stop(self, _: object) -> None:
        """End all ranks that still run."""
        self._processes.stop()
        self._end()

    def _is_failing(self) -> bool:
        known = self._verdict or self._first or self._nodes.decided
        return bool(self._processes.failed or self._exit_causes or known or self._interrupted)

    def _on_left(self, what: tuple[int, Message]) -> None:
        """Handle the end of a rank's script. The rank's process waits for permission to exit.

        Ranks from a launcher report only failures.
        """
        rank, message = what
        cause: Cause | None = message["cause"]
        if not self._starts_ranks:
            if cause is not None:
                self._exit_causes[rank] = cause
            self._thread(self._processes.wind_up, message["at"])
            self._find_cause()
            return
        self._record_leave(*what)
        if self._interrupted and self._verdict is None:
            until = time.monotonic() + GRACE
            while self._processes.running and time.monotonic() < until:
                time.sleep(TICK / 5)
            self._stop(None)
            return
        if cause is not None:
            self._thread(self._processes.wind_up, cause.at)
        self._on_ended(None)

    def _record_leave(self, rank: int, message: Message) -> None:
        cause: Cause | None = message["cause"]
        self._zero_has_left = True
        self._interrupted = cause is not None and cause.is_interrupt
        if cause is not None:
            self._exit_causes[rank] = cause
        self._processes.record_end(rank, message["at"] if cause is None else None)

    def _on_gone(self, _: object) -> None:
        """Handle the end of rank 0's process. If rank 0 was killed while it waited for other ranks, end those ranks."""
        if self._starts_ranks and self._zero_has_left and not self._is_failing():
            self._stop(None)

    def _on_verdict(self, verdict: Verdict) -> None:
        # its consequences are already being handled
        if self._has_printed or self._processes.failed:
            return
        self._verdict = verdict
        cause = verdict.cause
        if cause is not None and not verdict.interrupted:
            self._publish(cause)
        self._processes.stop(GRACE / 4)
        if not self._monitor.hangs.is_halted(self._rank):
            # it may be waiting in a collective, which raises now
            self._await_rank_zero(GRACE / 2)
        self._conclude()

    # -- other nodes -------------------------------------------------------------------------------------------

    def _on_hub(self, what: tuple[int, Message]) -> None:
        """Open the hub that connects the nodes, and send the hub's port and token to local rank 0."""
        port, token = self._nodes.open(what[1]["address"])
        self._channel.send({"do": "hub", "port": port, "token": token})

    def _on_join(self, what: tuple[int, Message]) -> None:
        """Connect to the nodes' hub at the address that local rank 0 has sent."""
        message = what[1]
        self._nodes.join(message["address"], message["port"], message["token"])

    def _follow(self, decided: Decision) -> None:
        """Handle the nodes' decision on the first cause. End this node's ranks unless only this node has the cause."""
        if self._nodes.is_elsewhere:
            self._mailbox.leave({"first": decided.words, "rank": decided.rank})
            self._thread(self._processes.wind_up, time.monotonic() - GRACE / 4)
        if not self._starts_ranks:
            self._print_early()

    def _publish(self, cause: First) -> None:
        """Report this node's first cause to its ranks and to the other nodes. The ranks' errors will name the cause."""
        self._first = cause
        self._mailbox.leave({"first": with_host(cause, self._nodes.host), "rank": getattr(cause, "rank", -1)})
        notes = self._monitor.hangs.traces.newest(cause.rank) if _may_be_gloos(cause) else ()
        self._nodes.claim(cause, plain_notes(notes))
        if self._nodes.hub is None and not self._starts_ranks:
            self._print_early()

    # -- end ---------------------------------------------------------------------------------------------------

    def _await_rank_zero(self, seconds: float) -> None:
        """Let rank 0 end by itself. Wait longer if rank 0 has raised an exception, since it may be saving its state.

        The nodes do not decide on the first cause meanwhile, because events from other nodes are handled later.
        """
        start, later = time.monotonic(), list[tuple[str, Any]]()

        def is_over() -> bool:
            waited = time.monotonic() - start
            return waited >= seconds and (waited >= SAVE_TIMEOUT or not self._mailbox.is_someone_ending())

        def keep(name: str) -> Callable[[Any], None]:
            return lambda what: later.append((name, what))

        handlers: Handlers = {name: keep(name) for name in self._deciding}
        if self._starts_ranks:
            handlers["left"] = lambda what: self._record_leave(*what)
        self._handle_until(
            lambda: self._rank not in self._processes.running or self._zero_has_left or is_over(), handlers
        )
        for event in later:
            self._put(*event)

    def _handle_until(self, condition: Callable[[], bool], handlers: Handlers, seconds: float = math.inf) -> bool:
        """Handle events until the condition holds or time is up. Events without a handler here are dropped."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() >= until:
                return False
            with contextlib.suppress(queue.Empty):
                event, what = self._events.get(timeout=TICK / 5)
                handlers.get(event, _nothing)(what)
        return True

    def _conclude(self) -> None:
        """Report the first cause after all other ranks have ended, and end this supervisor."""
        if not self._starts_ranks:
            if not self._has_printed:
                self._print(self._judge())
            self._is_over = not self._processes.running
            return
        if self._is_by_ctrl_c():
            # it ends rank 0, too: its script outside of a call, or a call that waits for ranks that are gone
            rank = self._rank
            self._handle_until(
                lambda: rank not in self._processes.running or self._zero_has_left or self._mailbox.is_inside(rank),
                {"left": lambda what: self._record_leave(*what)},
            )
            self._await_rank_zero(GRACE / 4)
        if self._interrupted and self._verdict is None:
            self._end()
        else:
            self._end_rank_zero(self._judge())
        self._is_over = True

    def _is_by_ctrl_c(self) -> bool:
        """Return True if Ctrl-C ended all failed ranks, which happens outside of Trainer calls."""
        failed, number = self._processes.failed, signal.SIGINT
        return (
            self._starts_ranks
            and bool(failed)
            and all(end.code == -number or self._is_ended_by(number, end.code) for end in failed)
        )

    def _cause(self, printed: set[int], folded: set[int], notes: list[Cause]) -> tuple[First | None, bool]:
        """Return (cause, is_printed): the first cause from this node's records, and True if its traceback was printed.

        Args:
            printed: ranks that have printed their tracebacks.
            folded: ranks that have omitted theirs.
            notes: records of the ranks' exceptions.
        """
        failed = self._processes.failed
        if self._verdict is not None:
            printed = {end.rank for end in failed} | self._exit_causes.keys() | printed
            return self._verdict.cause, is_printed(self._verdict.cause, printed - folded, notes)
        proof = self._monitor.hangs.divergence()
        cause, has_traceback = final_cause(
            failed, notes, self._monitor.positions(), self._exit_causes, printed, proof, folded
        )
        return (self._first if cause is None or isinstance(self._first, Divergence) else cause), has_traceback

    def _judge(self) -> Judgement:
        failed, verdict, printed = self._processes.failed, self._verdict, self._ranks_that("printed")
        folded, notes = self._ranks_that("folded"), self._mailbox.read()
        cause, has_traceback = self._cause(printed, folded, notes)
        interrupted = self._is_by_ctrl_c() if verdict is None else verdict.interrupted
        codes = [end.code for end in failed]
        if self._nodes.hub is not None and not interrupted:
            if self._first is None and cause is not None:
                # nothing is certain here: another node may know more and decides first
                self._await_decision()
                if self._nodes.decided is None:
                    self._publish(cause)
            self._await_decision()
            if self._nodes.decided is not None and self._nodes.is_elsewhere:
                return judgement(Divergence(self._nodes.decided.words), True, False, codes)
        also = also_failed(cause, [note for note in notes if note.rank in folded], self._nodes.host)
        return judgement(cause, has_traceback, interrupted, codes, self._nodes.host, also)

    def _ranks_that(self, did: str) -> set[int]:
        """Return the ranks that have reported an action: ``"printed"`` or ``"folded"`` (omitted) their tracebacks."""
        return {note[did] for note in self._mailbox.others(did)}

    def _await_decision(self) -> None:
        nodes = self._nodes
        if nodes.hub is not None:
            others = nodes.hub
            self._handle_until(lambda: nodes.decided is not None or not others.nodes, self._deciding, NODES_TIMEOUT)

    def _end_rank_zero(self, found: Judgement) -> None:
        """Let rank 0 print the last line and exit. If rank 0 does not react, kill it and print the line here."""
        # a received SIGTERM that explains the ends of all ranks is not a failure
        number, failed = signal.SIGTERM, self._processes.failed
        is_ended = self._signalled[number].is_set() and not self._exit_causes
        is_ended = is_ended and all(self._is_ended_by(number, end.code) for end in failed)
        text = "" if is_ended else _without_agents_line(found.text)
        if self._rank in self._processes.running or self._zero_has_left:
            stopped = is_stopped(self._order["process"])
            if not stopped and self._channel.send({"do": "end", "text": text, "code": found.code}):
                acted: list[object] = []
                acts = self._handle_until(lambda: bool(acted), {"acts": acted.append}, ORDER_TIMEOUT)
                if acts and self._rank_zero.wait(ORDER_TIMEOUT):
                    return
                text = "" if acts else text
            self._rank_zero.signal(signal.SIGKILL)
            self._rank_zero.wait(ORDER_TIMEOUT)
        self._write(text)

    def _print_early(self) -> None:
        """Print the first cause at once, before a launcher ends the ranks and prints its own summary."""
        nodes, decided = self._nodes, self._nodes.decided
        if self._has_printed or (nodes.hub is not None and decided is None):
            return
        if decided is not None and nodes.is_elsewhere:
            self._print(judgement(Divergence(decided.words), True, False, []))
        elif self._first is not None:
            has_traceback = is_printed(self._first, self._ranks_that("printed"), self._mailbox.read())
            self._print(judgement(self._first, has_traceback, False, [], nodes.host))

    def _print(self, found: Judgement) -> None:
        self._has_printed = True
        hub = self._nodes.hub
        if not (self._order["one_screen"] and self._node and hub is not None and hub.nodes):
            self._write(_without_agents_line(found.text))
        for channel in [self._channel, *self._channels]:
            channel.send({"do": "go"})

    def _write(self, text: str) -> None:
        if text:
            wipe_line()
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="replace"))


def _nothing(what: object) -> None:
    """Do nothing. This is the handler of events that are ignored."""


def _may_be_gloos(cause: First | None) -> TypeGuard[Ended]:
    """Return True if the cause may be an abort by gloo, which occurs if ranks pass tensors of different sizes."""
    return isinstance(cause, Ended) and cause.code in (None, -signal.SIGABRT)


def _without_agents_line(text: str) -> str:
    """Pass the last line of a text to the agent of `lockstep run`, and return the text without that line.

    Without an agent, return the whole text.
    """
    # only the last line, whatever earlier lines contain
    before, _, last = text.rpartition("\n")
    words = last.removeprefix("lockstep: ")
    return before.rstrip("\n") if words != last and hand_cause(words) else text


def main(channel: int, mailbox: int, signal_pipe: int) -> None:
    """Run the supervisor's process. Entry point, called by local rank 0's command.

    Args:
        channel: descriptor of the socket to local rank 0.
        mailbox: descriptor of the mailbox.
        signal_pipe: descriptor of the pipe of rank 0's signals.
    """
    to_rank_zero = Channel(socket.socket(fileno=channel))
    order = to_rank_zero.receive()
    if order is None:  # rank 0 has already ended
        return
    supervisor = Supervisor(to_rank_zero, Mailbox(mailbox), signal_pipe, order)
    # Handlers instead of SIG_IGN, which started ranks would inherit.
    for number in HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: supervisor.on_signal(number))
    # with an inherited SIG_IGN, exit codes of ranks would be lost
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    promise_cause()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    if supervisor.starts():
        supervisor.run()
    supervisor.close()
    os._exit(0)  # does not wait for threads that are blocked on messages
