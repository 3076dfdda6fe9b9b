"""The table of a model's layers, by the names that users import."""

from lockstep.callbacks.layer_table import LayerSummary, ModelSummary, summarize

__all__ = ["LayerSummary", "ModelSummary", "summarize"]
