"""Channels: messages as JSON between two processes of one machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

LONGEST = 4 * 2**20
"""Bytes of a message; whoever sends more is no process of lockstep's."""

PATIENCE = 1
"""Seconds that a message may take to be handed to the system: a peer that is stopped reads nothing."""

Message = dict[str, Any]


class Channel:
    """One end of it. Any thread may send; one thread at a time may receive.

    Args:
        connection: a connected stream socket; it belongs to the channel from now on.

    Example:
        >>> here, there = map(Channel, socket.socketpair())
        >>> here.send({"say": "hello"}), there.receive()
        (True, {'say': 'hello'})
        >>> here.close()
        >>> there.receive() is None
        True
        >>> there.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._wait_at_most(PATIENCE)
        self._lock = threading.Lock()
        self._rest = b""
        self.error: OSError | None = None  #: why it is over, where the other end has not simply hung up

    @contextlib.contextmanager
    def patient(self, seconds: int) -> Iterator[None]:
        """Inside, a message may take so long to be handed to the system: a peer that has just begun to start reads
        nothing yet."""
        self._wait_at_most(seconds)
        try:
            yield
        finally:
            self._wait_at_most(PATIENCE)

    def _wait_at_most(self, seconds: int) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))

    def send(self, message: Message, descriptor: int | None = None) -> bool:
        """Send a message, and with it an open file, between processes of one machine.

        Returns:
            whether it went out; not where the other end is gone, or takes nothing in for a second (`patient`).
        """
        text = line_of(message)
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
        return message_in(text)

    def receive_with_file(self) -> tuple[Message | None, int | None]:
        """The first message of a channel, and the file that came with it."""
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


def line_of(message: Message) -> bytes:
    """A message as it is sent."""
    return json.dumps(message).encode() + b"\n"


def message_in(line: bytes) -> Message | None:
    """The message that a line is; None if it is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


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
