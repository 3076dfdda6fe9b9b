"""Connections between the supervisors of several nodes. Each node connects to node 0. Sending never blocks.

One thread per node runs an event loop with a task for each connection, so that a slow peer affects no other. Messages
that a connection cannot send yet are buffered. A message about the current state is dropped while the previous one is
still buffered.
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
from lockstep.supervise.channel import MAX_MESSAGE, Message, line_of, message_in
from lockstep.supervise.screen_text import one_line, print_line, reason_of

PROBE_AFTER, PROBE_PERIOD, PROBES = 10, 5, 4
"""Seconds without a message until a node is probed, seconds between probes, and number of probes."""

SILENCE = PROBE_AFTER + PROBE_PERIOD * PROBES
"""Seconds after which a node that does not answer counts as gone."""

SILENT = f"has not answered for {SILENCE} s"
"""Reason for the loss of such a node."""

CONNECT_TIMEOUT = 10.0
"""Seconds that connecting to the hub may take, and that a connecting node has to identify itself."""

MAX_GREETING = 2**16
"""Maximum size of a connecting node's first message in bytes."""

NAME = 100
"""Maximum length of a displayed host name."""

MAX_BUFFERED = 16 * MAX_MESSAGE
"""Maximum number of buffered bytes of a connection. With more, it is closed."""

FLUSH_TIMEOUT = 1.0
"""Seconds for which `Hub.close` waits until buffered messages are sent."""

WELCOME = b"\n"
"""First message of the hub to an admitted node: an empty line."""

TAKEN = b"!"
"""Message from the hub to a node whose number another node has."""

ONE_NUMBER_EACH = "the run continues with that node. Set a different number on each node (NODE_RANK, --node-rank)"
"""Advice about two nodes with the same number."""

_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
_NO_FILES = (errno.EMFILE, errno.ENFILE)

Listener = Callable[[int, Any], None]


class _Connection:
    """An admitted connection to another node, with a buffer of outgoing messages. Callers must hold the hub's lock.

    Args:
        opened: the socket.
        node, host, name: identity of the other end.

    Attributes:
        has_ended: whether the other end has sent its farewell.
        waits: number of buffered bytes.
        filled: set when there is something to send. Only the event loop may set it.
    """

    def __init__(self, opened: socket.socket, node: int, host: str, name: str = "") -> None:
        self.socket = opened
        self.node, self.host, self.name = node, host, name
        self.has_ended = False
        self.waits = 0
        self.filled = asyncio.Event()
        self._out: deque[tuple[str, bytes]] = deque()

    def put(self, topic: str, text: bytes, newest: bool = False) -> bool:
        """Buffer a message and return True. With ``newest``, return False if a message of the same topic is waiting."""
        if newest and any(waiting == topic for waiting, _ in self._out):
            return False
        self._out.append((topic, text))
        self.waits += len(text)
        if self.waits > MAX_BUFFERED:
            self.hang_up()
        return True

    def next(self) -> bytes:
        """Return the first buffered message, or b"" if the buffer is empty."""
        return self._out[0][1] if self._out else b""

    def sent(self) -> None:
        """Remove the first buffered message. Call this method after the message was sent."""
        self.waits -= len(self._out.popleft()[1])

    def hang_up(self) -> None:
        """Shut the connection down, which ends the tasks that use the connection on both nodes."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class Hub:
    """This node's connections to the other nodes. Messages sent before the nodes are connected are lost.

    ``on_lost`` and the functions passed to `listen` run in the hub's thread and must not block.

    Args:
        node: number of this node. Node 0 is the hub.
        host: name of this node's host, for the others.
        on_lost: called with node, host and reason, if a node's supervisor disappears without a farewell.

    Attributes:
        is_refused: whether the hub has rejected this node because another node has its number.
    """

    def __init__(self, node: int, host: str, on_lost: Callable[[int, str, str], None]) -> None:
        self.node, self.host = node, host
        self.is_refused = False
        self._name = secrets.token_hex(8)  # recognizes a node that connects again
        self._on_lost = on_lost
        self._listeners: dict[str, Listener] = {}
        self._connections: dict[int, _Connection] = {}
        self._lock = threading.RLock()
        self._server: socket.socket | None = None
        self._token = ""
        self._has_warned = self._is_ending = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-hub", daemon=True)

    @property
    def nodes(self) -> list[int]:
        """Numbers of the other nodes to which this node is connected."""
        with self._lock:
            return sorted(self._connections)

    def listen(self, topic: str, listener: Listener) -> None:
        """Call ``listener(node, body)`` for each message on a topic from another node."""
        self._listeners[topic] = listener

    def open(self, address: str = "") -> tuple[int, str]:
        """Listen for connections from the other nodes. Only node 0, which is the hub, calls this method.

        Args:
            address: address that the other nodes connect to. A loopback address is bound alone; otherwise all
                interfaces are.

        Returns:
            the port, and the token that connecting nodes have to send.
        """
        self._token = secrets.token_hex(16)
        host = loopback_of(address) if is_own(address) else ""
        everywhere = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=4096, dualstack_ipv6=everywhere)
        self._server.setblocking(False)
        self._start(self._accept_nodes(self._server))
        return int(self._server.getsockname()[1]), self._token

    def join(self, address: str, port: int, token: str) -> bool:
        """Connect to the hub on node 0, and wait for admission. Return True if admitted."""
        try:
            opened = _kept_alive(socket.create_connection((address, port), CONNECT_TIMEOUT))
        except OSError:
            return False
        try:
            opened.sendall(line_of({"token": token, "node": self.node, "host": self.host, "name": self._name}))
            welcome = opened.recv(1)  # the hub sends nothing before this byte
            self.is_refused = welcome == TAKEN
        except OSError:
            welcome = b""
        if self.is_refused:
            print_line(f"node {self.node} ({self.host}): another node has this number, and {ONE_NUMBER_EACH}")
        if welcome != WELCOME:
            opened.close()
            return False
        connection = _Connection(opened, 0, address)
        with self._lock:
            self._connections[0] = connection
        self._start(self._serve(connection))
        return True

    def send(self, topic: str, body: object, to: int | None = None, newest: bool = False) -> bool:
        """Send JSON data to another node, or to all others.

        Args:
            topic: topic of the message.
            body: content of the message.
            to: the node; None: all others, forwarded by node 0.
            newest: drop the message if the previous one on this topic is still buffered.

        Returns:
            True if it was buffered for a node. False if it exceeds `MAX_MESSAGE` bytes.
        """
        text = line_of({"node": self.node, "topic": topic, "body": body, **({} if to is None else {"to": to})})
        return len(text) <= MAX_MESSAGE and self._pass(topic, text, to, newest=newest)

    def close(self, last: object = None) -> None:
        """Close all connections after a farewell message, so that the other nodes do not report this node as lost.

        Args:
            last: content of the "farewell" message.
        """
        self._pass("farewell", line_of({"node": self.node, "farewell": True, "body": last}), None)
        self._end()

    # -- the thread

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Schedule a coroutine in the event loop of the hub's thread. Start the thread if it is not running."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread.start()
            self._loop.call_soon_threadsafe(self._do, work)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine as a task, and keep a reference to the task until its end. Runs in the event loop."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self) -> None:
        """Run the event loop. Runs in the hub's thread."""

        async def until_end() -> None:
            await self._ends.wait()
            until = asyncio.get_running_loop().time() + FLUSH_TIMEOUT
            while self._has_buffered() and asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.01)
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # once more through the loop: transports close their sockets there
            await asyncio.sleep(0)

        assert self._loop is not None
        self._loop.run_until_complete(until_end())

    def _has_buffered(self) -> bool:
        with self._lock:
            return any(connection.waits for connection in self._connections.values())

    def _end(self) -> None:
        """Send the buffered messages, and end the hub's thread."""
        self._is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join(2 * FLUSH_TIMEOUT)
        with self._lock:
            self._connections.clear()  # nobody uses the loop from here on
            if self._loop is not None and not self._loop.is_running():
                self._loop.close()
                self._loop = None
        if self._server is not None:
            self._server.close()

    # -- sending

    def _pass(self, topic: str, text: bytes, to: int | None, excluded: int | None = None, newest: bool = False) -> bool:
        """Buffer a message for one node, or for all connected nodes. Return True if it was buffered at least once.

        The node ``excluded`` does not get the message.
        """
        with self._lock:
            wanted = [node for node in self._connections if (to is None or node == to) and node != excluded]
            receivers = [self._connections[node] for node in wanted if self._connections[node].put(topic, text, newest)]
            if receivers:
                assert self._loop is not None
                self._loop.call_soon_threadsafe(_signal, receivers)
        return bool(receivers)

    async def _write(self, connection: _Connection, writer: asyncio.StreamWriter) -> None:
        """Send a connection's buffered messages in order, and wait for further messages."""
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

    # -- connecting nodes

    async def _accept_nodes(self, door: socket.socket) -> None:
        """Accept connections from other nodes. For each, start a task that decides whether to admit the node."""
        while True:
            try:
                opened, _ = await asyncio.get_running_loop().sock_accept(door)
            except OSError as error:
                if error.errno in _NO_FILES and not raise_limit():
                    # accepting would fail again at once, in a busy loop
                    await asyncio.sleep(1.0)
                continue
            self._do(self._admit(_kept_alive(opened)))

    async def _admit(self, opened: socket.socket) -> None:
        """Identify a connecting node, and serve it if it is admitted."""
        connection = None
        try:
            hello = _message(await asyncio.wait_for(_first_line(opened), CONNECT_TIMEOUT))
            connection = self._identify(opened, hello)
        except Exception:  # malformed messages
            pass
        finally:
            if connection is None:
                opened.close()
        if connection is not None:
            await self._serve(connection)

    def _identify(self, opened: socket.socket, hello: Message | None) -> _Connection | None:
        """Check a node's first message, and return the new connection. Return None if the node is rejected.

        A node that connects again replaces its previous connection. A second node with the number of a connected one is
        rejected: the run continues with the first.
        """
        if hello is None:
            return None
        node, name = hello.get("node"), str(hello.get("name"))
        host = one_line(str(hello.get("host")), NAME)
        # compare_digest accepts only ASCII text
        given = str(hello.get("token")).encode(errors="backslashreplace")
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
        print_line(f"{host} connected as node {node}, but {before.host} has this number already: {ONE_NUMBER_EACH}")
        return None

    # -- receiving

    async def _serve(self, connection: _Connection) -> None:
        """Serve one connection until it ends. Errors do not affect other connections."""
        reason = "ended without reporting why"
        try:
            reader, writer = await asyncio.open_connection(sock=connection.socket, limit=MAX_MESSAGE)
            # drain() returns only when everything is sent, so that `waits` counts what is not
            writer.transport.set_write_buffer_limits(0)
            writing = asyncio.ensure_future(self._write(connection, writer))
            try:
                while (message := _message(await reader.readline())) is not None:
                    self._take(connection, message)
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                writer.transport.abort()
        except OSError as error:
            if error.errno in _UNREACHED:
                reason = SILENT
        except ValueError:  # the message is too long
            pass
        finally:
            self._remove(connection, reason)

    def _take(self, connection: _Connection, message: Message) -> None:
        """Pass a node's message to the listeners of its topic. Drop a malformed message, but keep the connection."""
        try:
            self._dispatch(connection, message)
        except Exception as error:  # for instance from another version
            if not self._has_warned:
                self._has_warned = True
                print_line(
                    f"a message from node {connection.node} ({connection.host}) could not be read: {reason_of(error)}"
                )

    def _dispatch(self, connection: _Connection, message: Message) -> None:
        # node 0 forwards messages, so they name their sender; node 0 itself relies on the connection
        node = connection.node if self.node == 0 else int(message["node"])
        if message.get("farewell"):
            connection.has_ended = connection.has_ended or node == connection.node
            if "farewell" in self._listeners:
                self._listeners["farewell"](node, message.get("body"))
            return
        topic = str(message.get("topic"))
        if self.node == 0 and "to" not in message:
            self._pass(topic, line_of(message), None, excluded=connection.node)
        listener = self._listeners.get(topic)
        if listener is not None:
            listener(node, message["body"])

    def _remove(self, connection: _Connection, reason: str) -> None:
        """Remove a connection that has ended, and report the loss of its node."""
        with self._lock:
            own = self._connections.get(connection.node) is connection
            if own:
                del self._connections[connection.node]
        if own and not connection.has_ended and not self._is_ending:
            self._on_lost(connection.node, connection.host, reason)


async def _first_line(opened: socket.socket) -> bytes:
    """Read the first line that a connecting node sends. The node then waits for the hub's reply."""
    opened.setblocking(False)
    text = b""
    while not text.endswith(b"\n") and len(text) <= MAX_GREETING:
        more = await asyncio.get_running_loop().sock_recv(opened, MAX_GREETING)
        if not more:
            break
        text += more
    return text


def _signal(connections: list[_Connection]) -> None:
    """Wake the tasks that send the buffered messages of these connections. Runs in the event loop."""
    for connection in connections:
        connection.filled.set()


def _kept_alive(opened: socket.socket) -> socket.socket:
    """Enable TCP keep-alive, to detect that the other machine is gone."""
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {
        "TCP_KEEPIDLE": PROBE_AFTER,
        "TCP_KEEPALIVE": PROBE_AFTER,  # the name on macOS
        "TCP_KEEPINTVL": PROBE_PERIOD,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened


def _message(line: bytes) -> Message | None:
    """Return the message on a line, or None if the line is incomplete or not a message."""
    return message_in(line) if line.endswith(b"\n") else None
