"""RichModelSummary: the table of the model's layers, drawn with rich."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from lockstep.callbacks.layer_table import totals_of
from lockstep.callbacks.model_summary import ModelSummary
from lockstep.callbacks.progress.rich import RichProgressBar
from lockstep.ground.errors import missing_extra

NUMBERS = ("Params", "FLOPs", "In sizes", "Out sizes")


def choose_model_summary(callbacks: list[Any]) -> ModelSummary:
    """The summary of a Trainer whose user named none: drawn with rich beside bars that are."""
    return RichModelSummary() if any(isinstance(one, RichProgressBar) for one in callbacks) else ModelSummary()


class RichModelSummary(ModelSummary):
    """Shows the model's layers with rich (extra ``rich``) when a fit begins, on stdout, on rank 0.

    Args:
        max_depth: levels of nesting to show; -1 shows all, 0 turns the summary off.
        **summarize_kwargs: ``header_style``, in rich's words ("bold magenta"), and whatever an override of
            ``summarize`` takes.

    Raises:
        ModuleNotFoundError: rich is not installed.
        MisconfigurationException: ``max_depth`` is no int of at least -1.

    Example::

        Trainer(callbacks=[RichModelSummary(max_depth=2, header_style="bold")])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        if find_spec("rich") is None:
            raise missing_extra("rich", "rich", "RichModelSummary")
        super().__init__(max_depth, **summarize_kwargs)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int,
        **summarize_kwargs: Any,
    ) -> None:
        """Draw the table; arguments as of :meth:`ModelSummary.summarize`."""
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        console = get_console()
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for head, _ in summary_data:
            table.add_column(
                head,
                justify="right" if head in NUMBERS else "left",
                no_wrap=head == "Name",
                style="dim" if head == " " else None,
            )
        for row in zip(*(cells for _, cells in summary_data), strict=True):
            table.add_row(*map(Text, row))  # as it is: "[1, 3]" is no markup
        console.print(table)
        totals = Table.grid(padding=(0, 2))
        numbers = totals_of(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for number, text in numbers:
            totals.add_row(Text(text, style="bold"), number)
        console.print(totals)
