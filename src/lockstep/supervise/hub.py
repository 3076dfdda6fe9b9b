"""The connections between the supervisors of several nodes: each is connected with node 0, and none waits for another.

One thread of a node runs an event loop, with a task for each connection: what one sends, or does not take in, concerns
no other. What a connection does not take in yet is kept for it; a message that tells how things are now is not sent
while the one before it still waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from lockstep.cluster.limits import raise_limit
from lockstep.cluster.local import is_own, loopback_of
from lockstep.supervise.channel import LONGEST, Message, line_of, message_in
from lockstep.supervise.screen_text import one_line, reason_of, say

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

WAITING = 16 * LONGEST
"""Bytes that wait for a connection to take them in, above which it is given up."""

FLUSH = 1.0
"""Seconds for which `Hub.close` lets what waits go out."""

WELCOME = b"\n"
"""What the hub says first to a node that it has let in: a message without content."""

TAKEN = b"!"
"""What it says to one whose number another has."""

SENT_AWAY = "each node needs a number of its own (NODE_RANK, --node_rank). The run goes on with the first"
"""What is said of two nodes with one number."""

_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_NO_FILES = (errno.EMFILE, errno.ENFILE)

Heard = Callable[[int, Any], None]


class _Connection:
    """One connection of two nodes that know each other. Whoever calls a method holds the hub's lock.

    Args:
        opened: the socket.
        node, host, name: at its other end.

    Attributes:
        well: the other end has said farewell.
        waits: bytes that have not gone out.
        filled: set when there is something to send; only the loop may set it.
    """

    def __init__(self, opened: socket.socket, node: int, host: str, name: str = "") -> None:
        self.socket = opened
        self.node, self.host, self.name = node, host, name
        self.well = False
        self.waits = 0
        self.filled = asyncio.Event()
        self._out: deque[tuple[str, bytes]] = deque()

    def put(self, topic: str, text: bytes, newest: bool = False) -> bool:
        """Keep a message until it can go out; ``newest``: unless one on this topic still waits."""
        if newest and any(waiting == topic for waiting, _ in self._out):
            return False
        self._out.append((topic, text))
        self.waits += len(text)
        if self.waits > WAITING:
            self.hang_up()
        return True

    def next(self) -> bytes:
        """The message that is to go out first; empty if there is none."""
        return self._out[0][1] if self._out else b""

    def sent(self) -> None:
        """That message has gone out."""
        self.waits -= len(self._out.popleft()[1])

    def hang_up(self) -> None:
        """End the conversation; its task sees that at both ends."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """This node's end of it. Until the nodes have met, what is sent is lost.

    Args:
        node: this node's number; 0 is the hub.
        host: its name, for the others.
        on_lost: called with number and host of a node whose supervisor is gone and has not said farewell, and with the
            reason.

    Attributes:
        is_refused: the hub has not let this node in, since another has its number.

    ``on_lost`` and the functions of `listen` are called in the hub's thread, and must not wait.
    """

    def __init__(self, node: int, host: str, on_lost: Callable[[int, str, str], None]) -> None:
        self.node, self.host = node, host
        self.is_refused = False
        self._name = secrets.token_hex(8)  # by which a second call is known
        self._on_lost = on_lost
        self._listeners: dict[str, Heard] = {}
        self._connections: dict[int, _Connection] = {}
        self._lock = threading.RLock()
        self._door: socket.socket | None = None
        self._token = ""
        self._has_said_broken = self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-hub", daemon=True)

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
        self._door = socket.create_server((host, 0), family=family, backlog=4096, dualstack_ipv6=everywhere)
        self._door.setblocking(False)
        self._start(self._admit_callers(self._door))
        return int(self._door.getsockname()[1]), self._token

    def join(self, address: str, port: int, token: str) -> bool:
        """Call the hub, and wait until it has let this node in; whether it has."""
        try:
            opened = _kept_alive(socket.create_connection((address, port), CALLING))
        except OSError:
            return False
        try:
            opened.sendall(line_of({"token": token, "node": self.node, "host": self.host, "name": self._name}))
            welcome = opened.recv(1)  # the hub's first byte: nothing else is sent before it
            self.is_refused = welcome == TAKEN
        except OSError:
            welcome = b""
        if self.is_refused:
            say(f"node {self.node} ({self.host}) is not the first with this number: {SENT_AWAY}")
        if welcome != WELCOME:
            opened.close()
            return False
        connection = _Connection(opened, 0, address)
        with self._lock:
            self._connections[0] = connection
        self._start(self._serve(connection))
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
        text = line_of({"node": self.node, "topic": topic, "body": body, **({} if to is None else {"to": to})})
        return len(text) <= LONGEST and self._pass(topic, text, to, newest=newest)

    def close(self, last: object = None) -> None:
        """Say farewell to the others, who then do not take this node for lost.

        Args:
            last: what those who listen for a "farewell" get.
        """
        self._pass("farewell", line_of({"node": self.node, "farewell": True, "body": last}), None)
        self._end()

    # -- the thread

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Have the loop do something, and begin it if there is none."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            self._loop.call_soon_threadsafe(self._do, work)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """In the loop: do something beside all else."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        """The thread."""
        assert self._loop is not None
        self._loop.run_until_complete(self._until_the_end())

    async def _until_the_end(self) -> None:
        await self._ends.wait()
        until = asyncio.get_running_loop().time() + FLUSH
        while self._waits() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # the system gets the sockets back

    def _waits(self) -> bool:
        with self._lock:
            return any(connection.waits for connection in self._connections.values())

    def _end(self) -> None:
        """Let what waits go out, and end the thread."""
        self._is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join(2 * FLUSH)
        with self._lock:
            self._connections.clear()  # nobody uses the loop any more
            if self._loop is not None and not self._loop.is_running():
                self._loop.close()
                self._loop = None
        if self._door is not None:
            self._door.close()

    # -- sending

    def _pass(self, topic: str, text: bytes, to: int | None, but: int | None = None, newest: bool = False) -> bool:
        """Send a message to a node, or to all but one."""
        with self._lock:
            wanted = [node for node in self._connections if (to is None or node == to) and node != but]
            told = [self._connections[node] for node in wanted if self._connections[node].put(topic, text, newest)]
            if told:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(_wake, told)
        return bool(told)

    async def _write(self, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        """Send what comes, one message after another."""
        while True:
            await connection.filled.wait()
            connection.filled.clear()
            while text := self._next(connection):
                writer.write(text)
                await writer.drain()
                with self._lock:
                    connection.sent()

    def _next(self, connection: _Connection) -> bytes:
        with self._lock:
            return connection.next()

    # -- callers

    async def _admit_callers(self, door: socket.socket) -> None:
        """Let callers in who have not said yet who they are."""
        while True:
            try:
                opened, _ = await asyncio.get_running_loop().sock_accept(door)
            except OSError as error:
                if error.errno in _NO_FILES and not raise_limit():
                    await asyncio.sleep(1.0)  # the door would be ready all the time
                continue
            self._do(self._admit(_kept_alive(opened)))

    async def _admit(self, opened: socket.socket) -> None:
        """Hear who a caller is, and serve it if it is one of ours."""
        connection = None
        try:
            hello = _message(await asyncio.wait_for(_greeting(opened), CALLING))
            connection = self._meet(opened, hello)
        except Exception:  # whatever it has sent
            pass
        finally:
            if connection is None:
                opened.close()
        if connection is not None:
            await self._serve(connection)

    def _meet(self, opened: socket.socket, hello: Message | None) -> _Connection | None:
        """Whether a caller is one of ours, by its first message.

        One that calls again takes the place of before. Another with the number of one that is there is sent away: the
        run goes on with the first.
        """
        if hello is None:
            return None
        node, name = hello.get("node"), str(hello.get("name"))
        host = one_line(str(hello.get("host")), NAME)
        given = str(hello.get("token")).encode(errors="backslashreplace")  # of text, only ASCII can be compared
        if not hmac.compare_digest(given, self._token.encode()) or type(node) is not int or node < 1:
            return None
        with self._lock:
            before = self._connections.get(node)
            if before is None or before.name == name:
                connection = self._connections[node] = _Connection(opened, node, host, name)
                connection.put("welcome", WELCOME)
                connection.filled.set()
                if before is not None:
                    before.hang_up()
                return connection
        with contextlib.suppress(OSError):
            opened.send(TAKEN)
        say(f"{host} calls itself node {node}, and {before.host} is that: {SENT_AWAY}")
        return None

    # -- hearing

    async def _serve(self, connection: _Connection) -> None:
        """See to one connection until it is over. Whatever comes by it, the others are served on."""
        reason = "ended without a word"
        try:
            await self._converse(connection)
        except OSError as error:
            if error.errno in _UNREACHED:
                reason = SILENT
        except ValueError:  # a message that is too long
            pass
        finally:
            self._lose(connection, reason)

    async def _converse(self, connection: _Connection) -> None:
        reader, writer = await asyncio.open_connection(sock=connection.socket, limit=LONGEST)
        writer.transport.set_write_buffer_limits(0)  # what is drained has gone out
        writing = asyncio.ensure_future(self._write(connection, writer))
        try:
            while (message := _message(await reader.readline())) is not None:
                self._take(connection, message)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            writer.transport.abort()

    def _take(self, connection: _Connection, message: Message) -> None:
        """A message of a node; one that makes no sense is left out, and the node stays."""
        try:
            self._hear(connection, message)
        except Exception as error:  # of another version, say
            if not self._has_said_broken:
                self._has_said_broken = True
                say(f"a message of node {connection.node} ({connection.host}) makes no sense: {reason_of(error)}")

    def _hear(self, connection: _Connection, message: Message) -> None:
        # node 0 passes on what others say; at node 0 each speaks for itself
        node = connection.node if self.node == 0 else int(message["node"])
        if message.get("farewell"):
            connection.well = connection.well or node == connection.node
            self._listeners.get("farewell", _nobody)(node, message.get("body"))
            return
        topic = str(message.get("topic"))
        if self.node == 0 and "to" not in message:
            self._pass(topic, line_of(message), None, but=connection.node)
        heard = self._listeners.get(topic)
        if heard is not None:
            heard(node, message["body"])

    def _lose(self, connection: _Connection, reason: str) -> None:
        """A connection is over."""
        with self._lock:
            own = self._connections.get(connection.node) is connection
            if own:
                del self._connections[connection.node]
        if own and not connection.well and not self._is_ending:
            self._on_lost(connection.node, connection.host, reason)


async def _greeting(opened: socket.socket) -> bytes:
    """What a caller says first: one line, and nothing more before it is answered."""
    opened.setblocking(False)
    text = b""
    while not text.endswith(b"\n") and len(text) <= HELLO:
        more = await asyncio.get_running_loop().sock_recv(opened, HELLO)
        if not more:
            break
        text += more
    return text


def _wake(connections: list[_Connection]) -> None:
    """In the loop: there is something to send."""
    for connection in connections:
        connection.filled.set()


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


def _nobody(node: int, body: object) -> None:
    """Who hears what nobody listens for."""


def _message(line: bytes) -> Message | None:
    """The message that a line is; None if it is none, or not whole."""
    return message_in(line) if line.endswith(b"\n") else None
