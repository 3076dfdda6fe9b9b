"""Storage of the Trainer's dicts ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.loop.logged_entry import Entry

NOT_FOR_CALLBACKS = ("logged", "progress_bar")
EVERYBODY = ("callback", *NOT_FOR_CALLBACKS)


class LoggedMetrics:
    """Storage of the Trainer's dicts ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``."""

    def __init__(self) -> None:
        self.callback: dict[str, Tensor] = {}
        self.logged: dict[str, Tensor] = {}
        self.progress_bar: dict[str, Any] = {}
        self.measured: dict[str, int] = {}  # names whose newest value is a whole pass's -> the step at its end
        self._before: dict[str, Tensor | None] = {}  # values in ``callback`` that :meth:`preview` has replaced

    def preview(self, values: list[tuple[Entry, str, Tensor]], to: Sequence[str] = EVERYBODY) -> None:
        """Publish this rank's unreduced values, until a reduction over the ranks replaces them."""
        for entry, name, _ in values if "callback" in to else ():
            for shown in (name, entry.name):
                self._before.setdefault(shown, self.callback.get(shown))
        self.publish(values, reduced=False, to=to)

    def reduced(self) -> dict[str, Tensor]:
        """Return a copy of ``callback`` in which the last reduced values replace those from :meth:`preview`."""
        found: dict[str, Tensor | None] = {**self.callback, **self._before}
        return {name: value for name, value in found.items() if value is not None}

    def publish(
        self, values: list[tuple[Entry, str, Tensor]], *, to: Sequence[str] = EVERYBODY, reduced: bool = True
    ) -> dict[str, Tensor]:
        """Add values to the dicts that users read. Return the values that go to the loggers.

        Args:
            values: results of the reductions of :class:`LogCollector`.
            to: the dicts to update; for single steps of an evaluation :data:`NOT_FOR_CALLBACKS`.
            reduced: False for values of this rank that a reduction will replace.
        """
        for_loggers = {}
        for entry, name, value in values:
            # empty in most steps, so that publishing costs no look-ups
            if reduced and self._before:
                self._before.pop(name, None)
                self._before.pop(entry.name, None)
            if "callback" in to:
                self.callback[name] = value
                if entry.on_step and entry.on_epoch:  # the plain name has the newer of the two values
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
        """Record ``step``, the optimizer step at the end of the validation or epoch that produced the values."""
        for entry, name, _ in values:
            self.measured[name] = self.measured[entry.name] = step

    def clear(self) -> None:
        """Clear all values, for example after the sanity check."""
        for shown in (self.callback, self.logged, self.progress_bar, self._before, self.measured):
            shown.clear()
