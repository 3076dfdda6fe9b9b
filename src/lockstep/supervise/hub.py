"""What the supervisors of several nodes tell one another: each is connected with node 0, and none waits for a slow one.

One thread serves all connections of a node. What a connection does not take in yet is kept for it; a message that
tells how things are now is not sent while the one before still waits.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lockstep.cluster.limits import raise_limit
from lockstep.cluster.local import is_own, loopback_of
from lockstep.supervise.causes import Divergence, First, located
from lockstep.supervise.channel import Message
from lockstep.supervise.stack import one_line, reason_of

# -- connections ---------------------------------------------------------------------------------------------


IDLE, INTERVAL, PROBES = 10, 5, 4
"""Seconds without a message after which a node is asked whether it is there, seconds between that, and how often."""

SILENCE = IDLE + INTERVAL * PROBES
"""Seconds after which a node that does not answer is taken for gone."""

SILENT = f"has not answered for {SILENCE} s"
"""What is said of such a node."""

CALLING = 10.0
"""Seconds that a call of the hub may take, and that a caller gets to say who it is."""

HELLO = 2**16
"""Bytes that a caller gets to say who it is."""

NAME = 100
"""Characters of a host's name that are shown."""

LONGEST = 4 * 2**20
"""Bytes of a message. None is longer; whoever sends more is none of ours."""

WAITING = 16 * LONGEST
"""Bytes that wait for a connection to take them in, above which it is given up."""

MEETING = 60.0
"""Seconds for which a node calls the hub again and again."""

FLUSH = 1.0
"""Seconds for which `Hub.close` lets what waits go out."""

Heard = Callable[[int, Any], None]


class _Connection:
    """One connection, served by the hub's thread.

    Attributes:
        node, host, name: at its other end; -1 before that has said who it is.
        joined: it has been let in, or this end has.
        well: the other end has said farewell.
        error: of the system, where the other end has not simply hung up.
        deadline: until when the other end has to say who it is.
        events: for which the hub's thread watches it; 0: it does not.
    """

    def __init__(self, opened: socket.socket, node: int = -1, host: str = "") -> None:
        opened.setblocking(False)
        self.socket = opened
        self.node, self.host, self.name = node, host, ""
        self.joined = self.well = False
        self.error: OSError | None = None
        self.deadline = time.monotonic() + CALLING
        self._rest = bytearray()
        self._out: deque[tuple[str, memoryview]] = deque()
        self.waits = 0  #: bytes that wait
        self.events = 0

    def put(self, topic: str, text: bytes, newest: bool) -> bool:
        """Keep a message until it can go out; ``newest``: unless one on this topic still waits."""
        if newest and any(waiting == topic for waiting, _ in self._out):
            return False
        self._out.append((topic, memoryview(text)))
        self.waits += len(text)
        return True

    def write(self) -> bool:
        """Send what the system takes; False if the connection is over."""
        while self._out:
            topic, text = self._out[0]
            try:
                sent = self.socket.send(text)
            except (BlockingIOError, InterruptedError):
                return True
            except OSError as error:
                self.error = error
                return False
            self.waits -= sent
            if sent < len(text):
                self._out[0] = topic, text[sent:]
                return True
            self._out.popleft()
        return True

    def read(self) -> tuple[list[Message], bool]:
        """The messages that have come, and whether the connection goes on."""
        goes_on = True
        try:
            more = self.socket.recv(2**18)
            goes_on = bool(more)
            self._rest += more
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.error, goes_on = error, False
        found: list[Message] = []
        *texts, rest = self._rest.split(b"\n")
        if texts:
            self._rest = bytearray(rest)
        for text in texts:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                return found, False
            if not isinstance(message, dict):
                return found, False
            found.append(message)
        return found, goes_on and len(self._rest) <= LONGEST

    @property
    def holds(self) -> int:
        """Bytes of a message that has not come whole."""
        return len(self._rest)

    def close(self) -> None:
        """Hang up, and give the socket back."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def _kept_alive(opened: socket.socket) -> socket.socket:
    """Have the system ask now and then whether the other machine is there."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {
        "TCP_KEEPIDLE": IDLE,
        "TCP_KEEPALIVE": IDLE,  # its name on macOS
        "TCP_KEEPINTVL": INTERVAL,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


# -- the hub -------------------------------------------------------------------------------------------------


class Hub:
    """This node's end of it. Until the nodes have met, what is sent is lost.

    Args:
        node: this node's number; 0 is the hub.
        host: its name, for the others.
        on_lost: called with number and host of a node whose supervisor is gone and has not said farewell, and with the
            reason.
        on_met: called with the number of a node that has joined; of the hub, when this one has joined it.

    Attributes:
        is_refused: the hub has not let this node in, since another has its number.

    All three functions, and those of `listen`, are called in the hub's thread, and must not wait.
    """

    def __init__(
        self,
        node: int,
        host: str,
        on_lost: Callable[[int, str, str], None],
        on_met: Callable[[int], None] = lambda node: None,
    ) -> None:
        self.node, self.host = node, host
        self.is_refused = False
        self._name = secrets.token_hex(8)  # by which a second call is known
        self._on_lost, self._on_met = on_lost, on_met
        self._listeners: dict[str, Heard] = {}
        self._connections: dict[int, _Connection] = {}
        self._strangers: set[_Connection] = set()
        self._changed: set[_Connection] = set()  # of which the thread has to see for what it watches them
        self._lock = threading.RLock()
        self._door: socket.socket | None = None
        self._has_said_limit = self._has_said_broken = False
        self._opens_at = 0.0  # when the door is looked at again, after no file could be opened for a caller
        self._token = ""
        self._ends_at: float | None = None  # when `close` has waited long enough
        self._selector: selectors.BaseSelector | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        self._thread = threading.Thread(target=self._serve, name="lockstep-hub", daemon=True)

    @property
    def nodes(self) -> list[int]:
        """The other nodes with which this one is connected."""
        with self._lock:
            return sorted(self._connections)

    def listen(self, topic: str, heard: Heard) -> None:
        """Have ``heard(node, body)`` called for each message on a topic."""
        self._listeners[topic] = heard

    def open(self, address: str = "") -> tuple[int, str]:
        """Be the hub.

        Args:
            address: by which the others call. It listens there alone if it means the host itself on every host, else
                everywhere.

        Returns:
            the port where it listens, and the word by which the others prove that they belong here.
        """
        self._token = secrets.token_hex(16)
        host = loopback_of(address) if is_own(address) else ""
        everywhere = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
        door = socket.create_server((host, 0), family=family, backlog=4096, dualstack_ipv6=everywhere)
        door.setblocking(False)
        self._door = door
        self._start()
        return int(door.getsockname()[1]), self._token

    def join(self, address: str, port: int, token: str) -> bool:
        """Call the hub, and wait until it has let this node in; whether it has."""
        try:
            opened = _kept_alive(socket.create_connection((address, port), CALLING))
        except OSError:
            return False
        try:
            opened.sendall(_text({"token": token, "node": self.node, "host": self.host, "name": self._name}))
            welcome = opened.recv(1)  # the hub's first byte: nothing else is sent before it
            self.is_refused = welcome == TAKEN
        except OSError:
            welcome = b""
        if welcome != WELCOME:
            opened.close()
            return False
        connection = _Connection(opened, 0, address)
        connection.joined = True
        with self._lock:
            self._connections[0] = connection
            self._changed.add(connection)
        self._start()
        self._on_met(0)
        return True

    def send(self, topic: str, body: object, to: int | None = None, newest: bool = False) -> bool:
        """Tell another node something that JSON can say, or all others.

        Args:
            topic: of the listeners there.
            body: what they get.
            to: the node; None: all others, by way of node 0.
            newest: leave it out where the one before on this topic has not gone out yet.

        Returns:
            whether it will go out to any node. Not if it has more than `LONGEST` bytes.
        """
        text = _text({"node": self.node, "topic": topic, "body": body, **({} if to is None else {"to": to})})
        return len(text) <= LONGEST and self._pass(topic, text, to, newest=newest)

    def close(self, last: object = None) -> None:
        """Say farewell to the others, who then do not take this node for lost.

        Args:
            last: what those who listen for a "farewell" get.
        """
        self._pass("farewell", _text({"node": self.node, "farewell": True, "body": last}), None)
        self._ends_at = time.monotonic() + FLUSH
        if self._thread.is_alive():
            self._wake_up()
            self._thread.join(2 * FLUSH)
        with self._lock:
            for connection in self._every():
                connection.close()
            self._connections.clear()
            self._strangers.clear()
        if self._door is not None:
            self._door.close()

    # -- connections

    def _every(self) -> list[_Connection]:
        with self._lock:
            return [*self._connections.values(), *self._strangers]

    def _pass(self, topic: str, text: bytes, to: int | None, but: int | None = None, newest: bool = False) -> bool:
        with self._lock:
            if to is None:
                connections = [connection for node, connection in self._connections.items() if node != but]
            else:
                connections = [self._connections[to]] if to in self._connections else []
            told = [connection for connection in connections if connection.put(topic, text, newest)]
            for connection in told:
                connection.write()  # if it is over, the thread sees that, too
            late = [connection for connection in told if connection.waits]
            self._changed.update(late)
        if late:
            self._wake_up()
        return bool(told)

    # -- the thread

    def _start(self) -> None:
        with self._lock:
            if self._selector is not None:
                return
            self._selector = selectors.DefaultSelector()
            self._wake = socket.socketpair()
            for end in self._wake:
                end.setblocking(False)
            self._selector.register(self._wake[0], selectors.EVENT_READ)
            self._thread.start()

    def _wake_up(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # full: it wakes up anyway
                self._wake[1].send(b".")

    def _serve(self) -> None:
        assert self._selector is not None
        assert self._wake is not None
        selector = self._selector
        if self._door is not None:
            selector.register(self._door, selectors.EVENT_READ)
        while not self._has_ended():
            self._register(selector)
            for key, events in selector.select(self._patience()):
                if key.fileobj is self._wake[0]:
                    with contextlib.suppress(OSError):
                        self._wake[0].recv(4096)
                elif key.fileobj is self._door:
                    self._admit(selector)
                else:
                    self._serve_one(key.data, events)
            self._dismiss()
        selector.close()
        for end in self._wake:
            end.close()
        self._wake = None

    def _has_ended(self) -> bool:
        if self._ends_at is None:
            return False
        return time.monotonic() >= self._ends_at or not any(connection.waits for connection in self._every())

    def _patience(self) -> float | None:
        """Seconds after which there is something to do, whatever comes; None: nothing."""
        moments = [connection.deadline for connection in self._strangers]
        moments += [moment for moment in (self._opens_at, self._ends_at) if moment]
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _register(self, selector: selectors.BaseSelector) -> None:
        """Let the selector watch the connections of now, and those for writing for which something waits."""
        with self._lock:
            changed, self._changed = self._changed, set()
        for connection in changed:
            if connection.socket.fileno() < 0:  # closed
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.waits else 0)
            if connection.events != events:
                change = selector.modify if connection.events else selector.register
                change(connection.socket, events, connection)
                connection.events = events
        if self._opens_at and time.monotonic() >= self._opens_at and self._door is not None:
            self._opens_at = 0.0
            selector.register(self._door, selectors.EVENT_READ)

    def _admit(self, selector: selectors.BaseSelector) -> None:
        """Let callers in who have not said yet who they are."""
        assert self._door is not None
        while True:
            try:
                opened, _ = self._door.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not raise_limit():
                    selector.unregister(self._door)  # it would be ready all the time
                    self._say_limit()
                    self._opens_at = time.monotonic() + 1.0
                    return
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                continue
            connection = _Connection(_kept_alive(opened))
            with self._lock:
                self._strangers.add(connection)
                self._changed.add(connection)

    def _say_limit(self) -> None:
        """Say once that nodes wait outside."""
        if not self._has_said_limit:
            self._has_said_limit = True
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            _say(
                f"node {self.node} ({self.host}) may open {limit} files, and more nodes call than that: failures of "
                "those that cannot join are told on their own screens only. Raise the limit (`ulimit -n`)"
            )

    def _serve_one(self, connection: _Connection, events: int) -> None:
        """See to one connection. Whatever comes by it, the others are served on."""
        try:
            self._look_at(connection, events)
        except Exception:  # nothing that anybody sends may end this thread
            self._lose(connection)

    def _look_at(self, connection: _Connection, events: int) -> None:
        messages: list[Message] = []
        goes_on = True
        if events & selectors.EVENT_READ:
            messages, goes_on = connection.read()
        for message in messages:
            if connection.joined:
                self._take(connection, message)
            elif not self._meet(connection, message):
                return
        if not connection.joined and connection.holds > HELLO:
            goes_on = False
        with self._lock:
            if goes_on and events & selectors.EVENT_WRITE:
                goes_on = connection.write()
            goes_on = goes_on and connection.waits <= WAITING
            self._changed.add(connection)
        if not goes_on:
            self._lose(connection)

    def _meet(self, connection: _Connection, hello: Message) -> bool:
        """The first message of a caller; whether it is one of ours.

        One that calls again takes the place of before. Another with the number of one that is there is sent away: the
        run goes on with the first.
        """
        with self._lock:
            self._strangers.discard(connection)
        node, name = hello.get("node"), str(hello.get("name"))
        host = one_line(str(hello.get("host")), NAME)
        given = str(hello.get("token")).encode(errors="backslashreplace")  # of text, only ASCII can be compared
        if not hmac.compare_digest(given, self._token.encode()) or type(node) is not int or node < 1:
            self._drop(connection)
            return False
        with self._lock:
            there = self._connections.get(node)
        if there is not None and there.name != name:
            with contextlib.suppress(OSError):
                connection.socket.send(TAKEN)
            _say(f"{host} calls itself node {there.node}, and {there.host} is that: {SENT_AWAY}")
            self._drop(connection)
            return False
        connection.node, connection.host, connection.name, connection.joined = node, host, name, True
        with self._lock:
            before = self._connections.pop(connection.node, None)
            self._connections[connection.node] = connection
            connection.put("welcome", WELCOME, newest=False)
        if before is not None:
            self._drop(before)
        self._on_met(connection.node)
        return True

    def _take(self, connection: _Connection, message: Message) -> None:
        """A message of a node; one that makes no sense is left out, and the node stays."""
        try:
            self._hear(connection, message)
        except Exception as error:  # of another version, say
            if not self._has_said_broken:
                self._has_said_broken = True
                _say(f"a message of node {connection.node} ({connection.host}) makes no sense: {reason_of(error)}")

    def _hear(self, connection: _Connection, message: Message) -> None:
        # node 0 passes on what others say; at node 0 each speaks for itself
        node = connection.node if self.node == 0 else int(message["node"])
        if message.get("farewell"):
            connection.well = connection.well or node == connection.node
            self._listeners.get("farewell", _nobody)(node, message.get("body"))
            return
        topic = str(message.get("topic"))
        if self.node == 0 and "to" not in message:
            self._pass(topic, _text(message), None, but=connection.node)
        heard = self._listeners.get(topic)
        if heard is not None:
            heard(node, message["body"])

    def _lose(self, connection: _Connection) -> None:
        with self._lock:
            self._strangers.discard(connection)
            own = self._connections.get(connection.node) is connection
            if own:
                del self._connections[connection.node]
        self._drop(connection)
        if own and not connection.well and self._ends_at is None:
            silent = connection.error is not None and connection.error.errno in _UNREACHED
            self._on_lost(connection.node, connection.host, SILENT if silent else "ended without a word")

    def _drop(self, connection: _Connection) -> None:
        """Hang up, in the hub's thread."""
        if connection.events and self._selector is not None:
            self._selector.unregister(connection.socket)
            connection.events = 0
        connection.close()

    def _dismiss(self) -> None:
        """Hang up on callers who do not say who they are."""
        now = time.monotonic()
        for connection in [connection for connection in self._strangers if connection.deadline <= now]:
            with self._lock:
                self._strangers.discard(connection)
            self._drop(connection)


WELCOME = b"\n"
"""What the hub says first to a node that it has let in: a message without content."""

TAKEN = b"!"
"""What it says to one whose number another has."""

SENT_AWAY = "each node needs a number of its own (NODE_RANK, --node_rank). The run goes on with the first"
"""What is said of two nodes with one number."""

_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def _nobody(node: int, body: object) -> None:
    """Who hears what nobody listens for."""


def _text(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _say(words: str) -> None:
    """Write a line on the screen."""
    with contextlib.suppress(OSError):
        os.write(2, f"lockstep: {words}.\n".encode())


UNTOLD = "failures of other nodes are not told here"


# -- the first cause of all nodes ----------------------------------------------------------------------------


class Nodes:
    """This node among the others, for the first cause of all: each claims what it knows, and node 0 decides.

    Args:
        node: its number.
        count: how many there are.
        put: called in threads with the name of an event and what belongs to it, for `claimed`, `heard` and `lost`.
        follow: called when the first cause of all nodes is known.
        scheduled: whether a scheduler looks after nodes that do not answer: it may start the run elsewhere, and would
            not if it ended by itself.

    Attributes:
        host: the name of this machine; "" where there is no other.
        hub: to the other nodes; None where there are none.
        decided: the first cause: ``words``, and the ``node`` that it is of; ``proved``, where it is that ranks of
            several nodes did not make the same calls.
        compares: on node 0: whether ranks did different things as the collectives of these notes; it may wait.
    """

    def __init__(
        self,
        node: int,
        count: int,
        put: Callable[[str, Any], None],
        follow: Callable[[dict[str, Any]], None],
        scheduled: bool = False,
    ) -> None:
        self._node = node
        self._put = put
        self._follow = follow
        self._scheduled = scheduled
        self.host = socket.gethostname() if count > 1 else ""
        self.hub = Hub(node, self.host, self._lose) if count > 1 else None
        if self.hub is not None:
            self.hub.listen("asked", lambda node, body: put("asked", body))
        self.decided: dict[str, Any] | None = None
        self.compares: Callable[[list[dict[str, Any]]], Divergence | None] = lambda notes: None
        self._compared: tuple[int, Any] | None = None

    def open(self, address: str) -> tuple[int, str]:
        """Let the others call by an address; gives the port and the word that they need."""
        assert self.hub is not None
        self.hub.listen("claim", lambda node, body: self._put("claim", (node, body)))
        return self.hub.open(address)

    def join(self, address: str, port: int, token: str) -> None:
        """Call the first node, in a thread, until it answers."""
        assert self.hub is not None
        self.hub.listen("first", lambda node, body: self._put("first", body))
        thread = threading.Thread(target=self._call, args=(address, port, token), name="lockstep-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started: the run can do without
            _say(f"node {self._node} ({self.host}) may start no more threads (`ulimit -u`): {UNTOLD}")

    def _call(self, address: str, port: int, token: str) -> None:
        assert self.hub is not None
        until = time.monotonic() + MEETING
        while not self.hub.join(address, port, token):
            if self.hub.is_refused:
                _say(f"node {self._node} ({self.host}) is not the first with this number: {SENT_AWAY}")
                return
            if time.monotonic() >= until:
                told = f"node {self._node} ({self.host}) could not reach the supervisor of node 0 at {address}:{port}"
                _say(f"{told}: {UNTOLD}")
                return
            time.sleep(1.0)

    def say(self, cause: First, notes: list[dict[str, Any]] | None = None) -> None:
        """Tell the others the first cause of this node.

        Args:
            cause: it.
            notes: the newest collectives of a rank that may have been aborted since another brought other sizes.
        """
        if self.hub is None:
            return
        body = {"words": located(cause, self.host), "rank": getattr(cause, "rank", -1), "notes": notes or []}
        if self._node == 0:
            self.claimed((0, body))
        else:
            self.hub.send("claim", body, to=0)

    def ask(self, body: dict[str, Any]) -> None:
        """A rank of this node has lost others: ask all other nodes who has left it, or failed."""
        if self.hub is not None:
            self.hub.send("asked", body)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the first cause is known, and another node's, or not of one node alone."""
        decided = self.decided
        return decided is not None and (decided["node"] != self._node or "proved" in decided)

    def close(self, last: object = None) -> None:
        """Say farewell, with a last word."""
        if self.hub is not None:
            self.hub.close(last)

    def claimed(self, what: tuple[int, Any]) -> bool:
        """On the first node: one knows a cause. The first to say so is believed."""
        node, body = what
        if self.decided is not None or self._compared is not None:
            return False
        if body.get("notes"):
            self._compared = what
            threading.Thread(target=self._compare, args=what, name="lockstep-compare", daemon=True).start()
            return False
        return self._decide(node, body)

    def _compare(self, node: int, body: dict[str, Any]) -> None:
        """In a thread: what other nodes' ranks did, beside one that has been aborted."""
        proof = None
        with contextlib.suppress(Exception):  # of whatever kind it is: the claim counts
            proof = self.compares(body["notes"])
        told = {"words": str(proof), "rank": -1, "proved": True} if proof is not None else body
        self._put("compared", (node, told))

    def compared(self, what: tuple[int, Any]) -> bool:
        """On the first node: a claim has been compared with what other nodes' ranks did."""
        return self._decide(*what) if self.decided is None else False

    def _decide(self, node: int, body: dict[str, Any]) -> bool:
        if self.decided is None:
            self.decided = {"words": body["words"], "rank": body.get("rank", -1), "node": node}
            self.decided |= {"proved": True} if body.get("proved") else {}
            assert self.hub is not None
            self.hub.send("first", self.decided)
            self._follow(self.decided)
        return False

    def heard(self, body: dict[str, Any]) -> bool:
        """On another one: the first node has decided."""
        if self.decided is None:
            self.decided = body
            self._follow(body)
        return False

    def lost(self, what: tuple[int, str]) -> bool:
        """A node's supervisor is gone, and has not said farewell."""
        node, words = what
        if node == 0:  # nobody is there to decide
            return self.heard({"words": words, "node": node})
        return self.claimed((node, {"words": words}))

    def _lose(self, node: int, host: str, reason: str) -> None:
        words = f"node {node} ({host}) {reason}"
        if self._scheduled and reason == SILENT:
            self._put("silent", words)
        else:
            self._put("lost", (node, words))
