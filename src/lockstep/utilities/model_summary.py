"""Summaries of a model's layers and parameters, importable from here as in Lightning."""

from lockstep.callbacks.layer_table import LayerSummary, ModelSummary, parse_batch_shape, summarize
from lockstep.callbacks.layer_table import readable_count as get_human_readable_count
from lockstep.callbacks.layer_table import readable_size as get_formatted_model_size

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]
