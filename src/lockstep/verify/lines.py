"""Notes which lines of the user's a process runs in its first step, to find those that only some ranks run."""

from __future__ import annotations

from types import FrameType
from typing import Any

from lockstep.verify.settings import is_users, short
from lockstep.verify.watch import Watch


class Lines:
    """Traces the lines of a script between the first batch and the first backward.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._users: dict[str, bool] = {}
        self._noted: set[tuple[str, int]] = set()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Python's trace function."""
        file = frame.f_code.co_filename
        users = self._users.get(file)
        if users is None:
            users = self._users[file] = is_users(file)
        if not users:
            return None
        first_step = self.watch.is_training and not self.watch.in_loader and not self.watch.updates
        if event == "line" and first_step and not self.watch.backwards:
            at = file, frame.f_lineno
            if at not in self._noted:
                self._noted.add(at)
                self.watch.journal.note("line", where=f"{short(file)}:{frame.f_lineno}")
        return self.trace
