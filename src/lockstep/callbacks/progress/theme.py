"""How RichProgressBar looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RichProgressBarTheme:
    """Styles of the parts of the bar, in the words of https://rich.readthedocs.io/en/stable/style.html."""

    description: str = ""  #: "Epoch 3/9", "Testing"
    progress_bar: str = "cyan"  #: what is done
    progress_bar_finished: str = "green"  #: all of it is done
    progress_bar_pulse: str = "cyan"  #: nobody knows how much there is to do
    batch_progress: str = ""  #: "40/100"
    time: str = "dim"  #: time spent, time left
    processing_speed: str = "dim"  #: "81.3it/s"
    metrics: str = "italic"  #: the line of metrics
    metrics_text_delimiter: str = "  "  #: between two of them
    metrics_format: str = "#.4g"  #: of a number among them
