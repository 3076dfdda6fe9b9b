"""Channels, which pass JSON messages between two processes on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

MAX_MESSAGE = 4 * 2**20
"""Maximum size of a message in bytes."""

SEND_TIMEOUT = 1
"""Seconds that sending may block. A stopped peer does not read."""

Message = dict[str, Any]


class Channel:
    """One end of a connection over which two processes exchange JSON messages.

    Any thread may send. Only one thread at a time may receive.

    Args:
        connection: a connected stream socket. The channel owns it.

    Example:
        >>> here, there = map(Channel, socket.socketpair())
        >>> here.send({"text": "hello"}), there.receive()
        (True, {'text': 'hello'})
        >>> here.close()
        >>> there.receive() is None
        True
        >>> there.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._wait_at_most(SEND_TIMEOUT)
        self._lock = threading.Lock()
        self._rest = b""
        self.error: OSError | None = None  #: why the connection ended; None where the other end closed it

    @contextlib.contextmanager
    def patient(self, seconds: int) -> Iterator[None]:
        """Let `send` block for up to ``seconds`` inside the context, for a receiver that is still starting."""
        self._wait_at_most(seconds)
        try:
            yield
        finally:
            self._wait_at_most(SEND_TIMEOUT)

    def _wait_at_most(self, seconds: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, message: Message, descriptor: int | None = None) -> bool:
        """Send a message and, optionally, an open file to a process on the same machine.

        Returns:
            True if it was sent. False if the other end is gone, or does not read within a second (see `patient`).
        """
        text = line_of(message)
        with self._lock:
            try:
                if descriptor is not None:
                    socket.send_fds(self._socket, [text], [descriptor])
                else:
                    self._socket.sendall(text)
            except (OSError, ValueError):
                self.hang_up()  # half a message may have been sent
                return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message, and return the message. Return None once the connection has ended."""
        while b"\n" not in self._rest:
            more = self._take()
            # a sender of more is not a process of lockstep, and would fill the memory
            if not more or len(self._rest) > MAX_MESSAGE:
                return None
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\n")
        return message_in(text)

    def receive_with_file(self) -> tuple[Message | None, int | None]:
        """Wait for the channel's first message. Return (message, descriptor of the file sent with it)."""
        try:
            text, descriptors, _, _ = socket.recv_fds(self._socket, 2**16, 1)
        except OSError:
            return None, None
        self._rest = text
        return self.receive(), descriptors[0] if descriptors else None

    def hang_up(self) -> None:
        """Shut the connection down. :meth:`receive` returns None at both ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the connection down and close the socket."""
        self.hang_up()
        self._socket.close()

    def _take(self) -> bytes:
        try:
            return self._socket.recv(2**16)
        except OSError as error:
            self.error = error
            return b""


def line_of(message: Message) -> bytes:
    """Encode a message as one line of JSON."""
    return json.dumps(message).encode() + b"\n"


def message_in(line: bytes) -> Message | None:
    """Decode the JSON message in a line. Return None if the line is not a message."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def listen_at(name: str) -> socket.socket | None:
    """Open the socket at which ranks on this machine connect to a supervisor. Its abstract name is not a file.

    Returns:
        the listening socket; None on systems other than Linux, and where the name is taken.
    """
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name)
        listener.listen(1024)
        return listener
    except OSError:
        return None


def peer_process(connection: socket.socket) -> int:
    """Return the id of the process at the other end, or 0 if the process belongs to another user."""
    # the kernel fills them in, so that the other end cannot forge them
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", credentials)
    return int(process) if user == os.getuid() else 0
