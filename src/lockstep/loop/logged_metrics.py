"""What users read of logged values: the dicts for callbacks, loggers and the progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.loop.logged_entry import Entry

NOT_FOR_CALLBACKS = ("logged", "progress_bar")
EVERYBODY = ("callback", *NOT_FOR_CALLBACKS)


class LoggedMetrics:
    """The three dicts that users read: what callbacks, loggers and the progress bar see."""

    def __init__(self) -> None:
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress_bar: dict[str, Any] = {}
        self.measured: dict[str, int] = {}  # names whose newest value is a pass's as a whole, and the step of its end
        self._before: dict[str, Tensor | None] = {}  # what :meth:`preview` has covered in ``callback``

    def preview(self, values: list[tuple[Entry, str, Tensor]], to: Sequence[str] = EVERYBODY) -> None:
        """Show values that are to be reduced yet."""
        for entry, name, _ in values if "callback" in to else ():
            for shown in (name, entry.name):
                self._before.setdefault(shown, self.callback.get(shown))
        self.publish(values, reduced=False, to=to)

    def reduced(self) -> dict[str, Tensor]:
        """``callback`` without what :meth:`preview` has shown."""
        found: dict[str, Tensor | None] = {**self.callback, **self._before}
        return {name: value for name, value in found.items() if value is not None}

    def publish(
        self, values: list[tuple[Entry, str, Tensor]], *, to: Sequence[str] = EVERYBODY, reduced: bool = True
    ) -> dict[str, Tensor]:
        """Show ``values``; returns those that loggers get.

        Args:
            values: as the reductions of :class:`LogCollector` give them.
            to: which of the three dicts; single steps of an evaluation are :data:`NOT_FOR_CALLBACKS`.
            reduced: False for values of this rank's that a reduction will replace.
        """
        for_loggers = {}
        for entry, name, value in values:
            if reduced and self._before:
                self._before.pop(name, None)
                self._before.pop(entry.name, None)
            if "callback" in to:
                self.callback[name] = value
                if entry.on_step and entry.on_epoch:  # the plain name stands for the newest of the two
                    self.callback[entry.name] = value
            if reduced and self.measured and "callback" in to:
                self.measured.pop(name, None)
                self.measured.pop(entry.name, None)
            if entry.logger and "logged" in to:
                self.logged[name] = for_loggers[name] = value
            if entry.prog_bar and "progress_bar" in to:
                self.progress_bar[name] = value
        return for_loggers

    def note_measured(self, values: list[tuple[Entry, str, Tensor]], step: int) -> None:
        """These are of a validation or of an epoch of training that ended after so many optimizer steps."""
        for entry, name, _ in values:
            self.measured[name] = self.measured[entry.name] = step

    def clear(self) -> None:
        """Forget everything (after the sanity check)."""
        for shown in (self.callback, self.logged, self.progress_bar, self._before, self.measured):
            shown.clear()
