"""ModelSummary and RichModelSummary: the table of a module's layers, printed before a fit."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.callbacks.base import Callback
from lockstep.callbacks.layer_table import ModelSummary as LayerTable
from lockstep.callbacks.layer_table import format_table, totals_of, without_empty_flops
from lockstep.ground.errors import missing_extra
from lockstep.ground.rank import rank_zero_info

if TYPE_CHECKING:
    from lockstep.module import LightningModule
    from lockstep.trainer import Trainer


class ModelSummary(Callback):
    """Callback that shows the model's layers, their parameters and sizes once, on rank 0, at the start of a fit.

    The table is logged to the logger ``lockstep`` at level INFO, which writes to stderr by default. To
    show it in another way, override :meth:`summarize`.

    Args:
        max_depth: number of levels of nested modules to show; -1 shows all, 0 disables the summary.
        **summarize_kwargs: arguments for :meth:`summarize`.

    Raises:
        MisconfigurationException: ``max_depth`` is not an int of at least -1.

    Example::

        Trainer(callbacks=[ModelSummary(max_depth=2)])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: object) -> None:
        LayerTable(nn.Module(), max_depth)  # raises for a wrong depth before the fit starts
        self._max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._max_depth:
            return
        # All ranks make it: an example input runs a forward, in which a sharded model communicates.
        table = self._summary(trainer, pl_module)
        if trainer.is_global_zero:
            self.summarize(
                table._get_summary_data(),
                table.total_parameters,
                table.trainable_parameters,
                table.model_size,
                table.total_training_modes,
                total_flops=table.total_flops,
                **self._summarize_kwargs,
            )

    def _summary(self, trainer: Trainer, pl_module: LightningModule) -> LayerTable:
        return LayerTable(pl_module, self._max_depth)

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
        """Write the table, on rank 0.

        Args:
            summary_data: head and cells of each column.
            total_parameters: elements of all parameters.
            trainable_parameters: elements of the parameters that require gradients.
            model_size: size of all parameters, in units of 10^6 bytes.
            total_training_modes: number of modules in "train" and "eval" mode.
            total_flops: floating point operations of one forward of the example input; 0 without the input.
            **summarize_kwargs: arguments of the constructor.
        """
        totals = totals_of(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        rank_zero_info("\n%s", format_table(summary_data, totals))


NUMBERS = ("Params", "FLOPs", "In sizes", "Out sizes")


def choose_model_summary(callbacks: list[Any]) -> ModelSummary:
    """Return a RichModelSummary if ``callbacks`` contain a RichProgressBar, else a ModelSummary."""
    # a run without that bar does not load its file
    loaded = sys.modules.get("lockstep.callbacks.progress.rich")
    is_rich = loaded is not None and any(isinstance(one, loaded.RichProgressBar) for one in callbacks)
    return RichModelSummary() if is_rich else ModelSummary()


class RichModelSummary(ModelSummary):
    """Model summary that is drawn with rich (extra ``rich``) on stdout, on rank 0, at the start of a fit.

    Args:
        max_depth: number of levels of nested modules to show; -1 shows all, 0 disables the summary.
        **summarize_kwargs: ``header_style``, a style of rich ("bold magenta"), and the arguments of an override of
            ``summarize``.

    Raises:
        ModuleNotFoundError: rich is not installed.
        MisconfigurationException: ``max_depth`` is not an int of at least -1.

    Example::

        Trainer(callbacks=[RichModelSummary(max_depth=2, header_style="bold")])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: object) -> None:
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
        """Draw the table; arguments as in :meth:`ModelSummary.summarize`."""
        from rich import get_console
        from rich.table import Table
        from rich.text import Text

        console = get_console()
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for head, _ in without_empty_flops(summary_data):
            table.add_column(
                head,
                justify="right" if head in NUMBERS else "left",
                no_wrap=head == "Name",
                style="dim" if head == " " else None,
            )
        for row in zip(*(cells for _, cells in without_empty_flops(summary_data)), strict=True):
            table.add_row(*map(Text, row))  # plain text: "[1, 3]" is not markup
        console.print(table)
        totals = Table.grid(padding=(0, 2))
        numbers = totals_of(total_parameters, trainable_parameters, model_size, total_training_modes, total_flops)
        for number, text in numbers:
            totals.add_row(Text(text, style="bold"), number)
        console.print(totals)
