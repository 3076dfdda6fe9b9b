"""Channels: messages as JSON between two processes, and what the supervisors of several nodes tell one another."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lockstep.cluster.local import loopback_of
from lockstep.supervise.causes import First, located

# -- between processes ---------------------------------------------------------------------------------------


LONGEST = 4 * 2**20
"""Bytes of a message; whoever sends more is no process of lockstep's."""

PATIENCE = 1
"""Seconds that a message may take to be handed to the system: a peer that is stopped reads nothing."""

Message = dict[str, Any]


class Channel:
    """One end of it. Any thread may send; one thread at a time may receive.

    Args:
        connection: a connected stream socket; it belongs to the line from now on.

    Example:
        >>> here, there = map(Line, socket.socketpair())
        >>> here.send({"say": "hello"}), there.receive()
        (True, {'say': 'hello'})
        >>> here.close()
        >>> there.receive() is None
        True
        >>> there.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE, 0))
        self._socket = connection
        self._lock = threading.Lock()
        self._rest = b""
        self.error: OSError | None = None  #: why it is over, where the other end has not simply hung up

    def send(self, message: Message, descriptor: int | None = None) -> bool:
        """Send a message, and with it an open file, between processes of one machine.

        Returns:
            whether it went out; not where the other end is gone, or takes nothing in for a second.
        """
        text = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                if descriptor is not None:
                    socket.send_fds(self._socket, [text], [descriptor])
                else:
                    self._socket.sendall(text)
            except (OSError, ValueError):
                self.hang_up()  # half a message may be out
                return False
        return True

    def receive(self) -> Message | None:
        """The next message; waits for it. None when there will be no more."""
        while b"\n" not in self._rest:
            more = self._take()
            if not more or len(self._rest) > LONGEST:
                return None
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json.loads(text)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def receive_with_file(self) -> tuple[Message | None, int | None]:
        """The first message of a line, and the file that came with it."""
        try:
            text, descriptors, _, _ = socket.recv_fds(self._socket, 2**16, 1)
        except OSError:
            return None, None
        self._rest = text
        return self.receive(), descriptors[0] if descriptors else None

    def hang_up(self) -> None:
        """End the conversation: whoever waits in :meth:`receive`, here or there, gets None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, and give the socket back."""
        self.hang_up()
        self._socket.close()

    def _take(self) -> bytes:
        try:
            return self._socket.recv(2**16)
        except OSError as error:
            self.error = error
            return b""


def door(name: str) -> socket.socket | None:
    """Where the ranks of this machine find a supervisor: a name in the system's memory, no file.

    Returns:
        None on another system than Linux, and where somebody has the name.
    """
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.bind("\0" + name)
        made.listen(1024)
        return made
    except OSError:
        return None


def caller(connection: socket.socket) -> int:
    """The process at the other end, if it is this user's; else 0."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return int(process) if user == os.getuid() else 0


# -- between nodes -------------------------------------------------------------------------------------------


IDLE, INTERVAL, PROBES = 10, 5, 4
"""Seconds without a message after which a node is asked whether it is there, seconds between that, and how often."""

SILENCE = IDLE + INTERVAL * PROBES
"""Seconds after which a node that does not answer is taken for gone."""

SILENT = f"has not answered for {SILENCE} s"
"""What is said of such a node."""

CALLING = 10.0
"""Seconds that the call of the hub may take, and that a caller gets to say who it is."""

Heard = Callable[[int, Any], None]


class Hub:
    """This node's end of it. Until the nodes have met, what is sent is lost.

    Args:
        node: this node's number; 0 is the hub.
        host: its name, for the others.
        on_lost: called with number and host of a node whose supervisor is gone and has not said farewell, and with the
            reason.
        on_met: called with the number of a node that has joined; of the hub, when this one has joined it.
    """

    def __init__(
        self,
        node: int,
        host: str,
        on_lost: Callable[[int, str, str], None],
        on_met: Callable[[int], None] = lambda node: None,
    ) -> None:
        self.node, self.host = node, host
        self._on_lost, self._on_met = on_lost, on_met
        self._listeners: dict[str, Heard] = {}
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._door: socket.socket | None = None
        self._token = ""
        self._closing = False

    @property
    def nodes(self) -> list[int]:
        """The other nodes with which this one is connected."""
        with self._lock:
            return sorted(self._channels)

    def listen(self, topic: str, heard: Heard) -> None:
        """Have ``heard(node, body)`` called, in a thread of this hub, for each message on a topic."""
        self._listeners[topic] = heard

    def open(self, address: str = "") -> tuple[int, str]:
        """Be the hub.

        Args:
            address: by which the others call. It listens there alone if only this host can call by it, else everywhere.

        Returns:
            the port where it listens, and the word by which the others prove that they belong here.
        """
        self._token = secrets.token_hex(16)
        host = loopback_of(address) if address else ""
        everywhere = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=1024, dualstack_ipv6=everywhere)
        threading.Thread(target=self._answer, name="lockstep-hub", daemon=True).start()
        return int(self._door.getsockname()[1]), self._token

    def join(self, address: str, port: int, token: str) -> bool:
        """Call the hub; whether it can be reached."""
        try:
            connection = socket.create_connection((address, port), CALLING)
        except OSError:
            return False
        connection.settimeout(None)
        channel = Channel(_kept_alive(connection))
        if not channel.send({"token": token, "node": self.node, "host": self.host}):
            return False
        with self._lock:
            self._channels[0] = channel
        threading.Thread(target=self._hear, args=(0, address, channel), name="lockstep-node-0", daemon=True).start()
        self._on_met(0)
        return True

    def send(self, topic: str, body: object) -> None:
        """Tell all other nodes something that JSON can say."""
        self._pass({"node": self.node, "topic": topic, "body": body}, but=None)

    def close(self) -> None:
        """Say farewell to the others, who then do not take this node for lost."""
        self._closing = True
        if self._door is not None:
            with contextlib.suppress(OSError):  # accept() would wait on in its thread
                self._door.shutdown(socket.SHUT_RDWR)
            self._door.close()
        self._pass({"node": self.node, "farewell": True}, but=None)
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.hang_up()

    def _pass(self, message: Message, but: int | None) -> None:
        with self._lock:
            channels = [channel for node, channel in self._channels.items() if node != but]
        for channel in channels:
            channel.send(message)

    def _answer(self) -> None:
        """In a thread: let the other nodes in."""
        assert self._door is not None
        while not self._closing:
            try:
                connection, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._admit, args=(connection,), name="lockstep-node", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(CALLING)
        channel = Channel(_kept_alive(connection))
        hello = channel.receive()
        if hello is None or not secrets.compare_digest(str(hello.get("token")), self._token):
            channel.close()  # none of ours
            return
        connection.settimeout(None)
        node, host = int(hello["node"]), str(hello["host"])
        with self._lock:
            self._channels[node] = channel
        self._on_met(node)
        self._hear(node, host, channel)

    def _hear(self, node: int, host: str, channel: Channel) -> None:
        """In a thread: what one node says, until it has gone."""
        well = False
        while (message := channel.receive()) is not None:
            well = well or (bool(message.get("farewell")) and message["node"] == node)
            if self.node == 0:
                self._pass(message, but=node)
            heard = self._listeners.get(message.get("topic", ""))
            if heard is not None:
                heard(int(message["node"]), message["body"])
        with self._lock:
            self._channels.pop(node, None)
        if not well and not self._closing:
            silent = channel.error is not None and channel.error.errno in _UNREACHED
            self._on_lost(node, host, SILENT if silent else "ended without a word")
        channel.close()


_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Have the system ask now and then whether the other machine is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    options = {
        "TCP_KEEPIDLE": IDLE,
        "TCP_KEEPALIVE": IDLE,  # its name on macOS
        "TCP_KEEPINTVL": INTERVAL,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE * 1000,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


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
        decided: the first cause: ``words``, and the ``node`` that it is of.
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
        self.decided: dict[str, Any] | None = None

    def open(self, address: str) -> tuple[int, str]:
        """Let the others call by an address; gives the port and the word that they need."""
        assert self.hub is not None
        self.hub.listen("claim", lambda node, body: self._put("claim", (node, body)))
        return self.hub.open(address)

    def join(self, address: str, port: int, token: str) -> None:
        """Call the first node, in a thread."""
        assert self.hub is not None
        self.hub.listen("first", lambda node, body: self._put("first", body))
        threading.Thread(target=self.hub.join, args=(address, port, token), name="lockstep-call", daemon=True).start()

    def say(self, cause: First) -> None:
        """Tell the others the first cause of this node."""
        if self.hub is None:
            return
        body = {"words": located(cause, self.host), "rank": getattr(cause, "rank", -1), "cause": asdict(cause)}
        if self._node == 0:
            self.claimed((0, body))
        else:
            self.hub.send("claim", body)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the first cause is known, and another node's."""
        return self.decided is not None and self.decided["node"] != self._node

    def close(self) -> None:
        """Say farewell."""
        if self.hub is not None:
            self.hub.close()

    def claimed(self, what: tuple[int, Any]) -> bool:
        """On the first node: one knows a cause. The first to say so is believed."""
        node, body = what
        if self.decided is None:
            self.decided = {**body, "node": node}
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
