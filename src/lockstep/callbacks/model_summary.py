"""ModelSummary: shows the table of the model's layers when a fit begins."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from lockstep.callbacks.base import Callback
from lockstep.callbacks.layer_table import ModelSummary as LayerTable
from lockstep.ground.rank import rank_zero_info
from lockstep.ground.view import ModuleView, TrainerView


class ModelSummary(Callback):
    """Shows the model's layers, their parameters and sizes once, on rank 0, when a fit begins.

    The table goes to the logger ``lockstep`` at level INFO, which writes to stderr unless told otherwise.

    Args:
        max_depth: levels of nesting to show; -1 shows all, 0 turns the summary off.

    Raises:
        MisconfigurationException: ``max_depth`` is no int of at least -1.

    Example::

        Trainer(callbacks=[ModelSummary(max_depth=2)])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        LayerTable(nn.Module(), max_depth)  # tells of a wrong depth before the fit begins
        self._max_depth = max_depth
        self._summarize_kwargs = summarize_kwargs

    def on_fit_start(self, trainer: TrainerView, pl_module: ModuleView) -> None:
        """Show the table."""
        if not self._max_depth:
            return
        # All ranks make it: with an example input that is a forward, in which a sharded model communicates.
        table = LayerTable(cast(nn.Module, pl_module), self._max_depth)
        if trainer.is_global_zero:
            self.summarize(table, **self._summarize_kwargs)

    @staticmethod
    def summarize(table: LayerTable, **summarize_kwargs: Any) -> None:
        """Write the table; override it to show the table in another way."""
        rank_zero_info("\n%s", table)
