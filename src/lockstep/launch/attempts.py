"""The attempts at one run: which is the newest, what each fit saved last, and what earlier ones may no longer do."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from lockstep.checkpoint import storage


class Superseded(RuntimeError):
    """A rank of an earlier attempt at a run, on a node that was cut off say, was about to touch its checkpoints."""


class Attempts(ABC):
    """A run that is started anew when it has failed, or when its time is up, as one attempt at it sees it.

    A file beside the checkpoints says which attempt is the newest and which checkpoint each fit of it wrote last.
    Ranks that are left over from an earlier attempt find there that they have been replaced, and touch no checkpoint
    any more. Fits are numbered from 1 in the order in which the script makes them.

    Attributes:
        path: of the file; "" where this rank does not know it.
        attempt: the number of this one, of which later ones have greater.
        asks: signals that ask for the run to be saved and started anew.
        requeues: whether whoever started the run starts it anew on such a signal.
        saves: whether SIGTERM has the run saved before it ends.
        agent: who started this rank; "" where nobody needs to know.
        is_kept: whether fits are saved from time to time where nobody else does it, and at their end.
    """

    asks: tuple[int, ...] = ()
    requeues = False
    saves = False
    agent = ""
    is_kept = False

    def __init__(self, path: str, attempt: int) -> None:
        self.path = path
        self.attempt = attempt

    @abstractmethod
    def __str__(self) -> str:
        """The run, as sentences say it."""

    @abstractmethod
    def told(self, newest: int) -> str:
        """What is said to a rank that has been replaced by the attempt ``newest``."""

    @abstractmethod
    def checkpoint(self, call: int) -> str:
        """Where lockstep itself saves the fit number ``call``."""

    @abstractmethod
    def enter(self, agents: Sequence[str] = ()) -> None:
        """This attempt is the newest one from here on. On rank 0.

        Args:
            agents: who started each rank.

        Raises:
            Superseded: there is a newer one.
        """

    def claim(self) -> Any:
        """What the other ranks have to know of an attempt that rank 0 has entered; None: nothing."""
        return None

    def join(self, claim: Any) -> None:  # noqa: B027, there may be nothing to take over
        """On the other ranks: take over what rank 0 has told."""

    @abstractmethod
    def requeue(self) -> str:
        """Have the run started anew, which ends its processes; gives the reason if that did not work."""

    def done(self, call: int) -> None:  # noqa: B027, nor to do
        """A fit has come to its end, and the script goes on. On rank 0."""

    # -- the file: rank 0 writes it ------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """What the file says.

        Raises:
            Superseded: that there is a newer attempt.
        """
        known = read(self.path) if self.path else {}
        newest = known.get("attempt", 0)
        if newest > self.attempt:
            raise Superseded(self.told(newest))
        return known

    def saved(self, path: str, call: int) -> None:
        """A checkpoint that a fit could go on from has been written."""
        known = self.check()
        self.write({**known, "attempt": self.attempt, "saved": {**known.get("saved", {}), str(call): path}})

    def newest(self, call: int) -> str | None:
        """The checkpoint that an earlier attempt at this fit wrote last, if it is still there; None in a first one."""
        path = self.check().get("saved", {}).get(str(call)) if self.attempt else None
        return path if path is not None and storage.exists(path) else None

    def write(self, known: dict[str, Any]) -> None:
        """Replace the file."""
        with storage.replacing(self.path) as file:
            file.write(json.dumps(known).encode())


def read(path: str) -> dict[str, Any]:
    """What such a file says; nothing where there is none."""
    try:
        with storage.reading(path) as file:
            known: dict[str, Any] = json.load(file)
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return known
