"""Columns and metrics line of RichProgressBar. Import this file only when a bar is drawn, because it imports rich."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.callbacks.progress.base import Meter, clock, speed
from lockstep.ground.errors import missing_extra

try:
    from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
    from rich.control import Control
    from rich.live_render import LiveRender
    from rich.progress import Progress, ProgressColumn, Task
    from rich.segment import ControlType, Segment
    from rich.table import Column
    from rich.text import Text
except ModuleNotFoundError:
    raise missing_extra("rich", "rich", "RichProgressBar's columns") from None


class _Column(ProgressColumn):
    """Base class of columns for rich, with one style and with text from a task's `Meter`."""

    justify: JustifyMethod = "right"

    def __init__(self, style: str) -> None:
        super().__init__(Column(no_wrap=True, justify=self.justify))
        self.style = style

    def render(self, task: Task) -> Text:
        """Return the styled text for a task."""
        return Text(self.text(task, task.fields["meter"]), style=self.style)

    def text(self, task: Task, meter: Meter) -> str:
        """Return the text for a task, without style.

        Args:
            task: task of rich's progress display.
            meter: counter of the loop's batches and seconds.
        """
        raise NotImplementedError


class Batches(_Column):
    """Column with completed and total batches: ``40/100``, with dashes if the total is unknown."""

    def text(self, task: Task, meter: Meter) -> str:
        total = "--" if task.total is None else str(int(task.total))
        return f"{int(task.completed):>{len(total)}}/{total}"


class Times(_Column):
    """Column with the elapsed and the remaining time: ``0:12<1:20``."""

    justify: JustifyMethod = "left"

    def text(self, task: Task, meter: Meter) -> str:
        return f"{clock(meter.seconds)}<{clock(meter.remaining)}"


class Speed(_Column):
    """Column with the number of batches per second: ``81.3it/s``."""

    def text(self, task: Task, meter: Meter) -> str:
        return speed(meter.rate)


class FromTop(LiveRender):
    """Renderer for rich that draws at the cursor's position, and then moves the cursor back to this position.

    rich itself leaves the cursor at the end of the bars, where another rank's traceback would continue the line. To
    redraw the bars it moves up, and overwrites the last lines of the traceback.

    Attributes:
        stays: True to leave the cursor at the end, for output after the bars.
    """

    stays = False

    def position_cursor(self) -> Control:
        """Return rich's ``Control`` that moves the cursor to the start of the line and clears everything below."""
        control = Control()
        control.segment = Segment("\r\x1b[J", None, [(ControlType.CARRIAGE_RETURN,)])
        return control

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from super().__rich_console__(console, options)
        if not self.stays and self._shape is not None and console.is_interactive:
            up = [(ControlType.CURSOR_UP, self._shape[1] - 1)] if self._shape[1] > 1 else []
            yield Control(*up, ControlType.CARRIAGE_RETURN)


class Bars(Progress):
    """A ``rich.progress.Progress`` with a line of metrics below the bars.

    Attributes:
        metrics: the metrics in the line below the bars.
    """

    def __init__(
        self,
        columns: list[Any],
        metrics_text: Callable[[dict[str, Any]], tuple[str, str]],
        console_kwargs: dict[str, Any],
    ) -> None:
        # set before `super().__init__()`, in which rich calls `get_renderables`
        self.metrics: dict[str, Any] = {}
        self._metrics_text = metrics_text
        super().__init__(*columns, console=Console(**console_kwargs), auto_refresh=False)
        self._lines = FromTop(self.get_renderable())
        self.live._live_render = self._lines

    def stop(self) -> None:
        """Draw the bars for the last time, and move the cursor below them."""
        self._lines.stays = True
        super().stop()

    def leave(self) -> None:
        """Stop the display without drawing it again, so that output from another process is not overwritten."""
        self._lines._shape = None
        self.live.refresh = lambda: None

    def get_renderables(self) -> Iterator[Any]:
        """Yield the table of bars, then the line of metrics."""
        yield self.make_tasks_table(self.tasks)
        if self.metrics:
            text, style = self._metrics_text(self.metrics)
            yield Text(text, style=style)
