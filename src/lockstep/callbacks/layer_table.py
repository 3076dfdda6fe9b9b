"""The table of a model's layers: names, types, parameters, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lockstep.ground.device import move_data_to_device
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once
from lockstep.ground.seed import isolate_rng
from lockstep.ground.tree import tree_map

UNKNOWN_SIZE = "?"
NOT_APPLICABLE = "n/a"


@dataclass
class LayerSummary:
    """One row of the table."""

    name: str
    """Where the layer is, as in ``named_modules()``."""
    layer_type: str
    """Name of its class."""
    num_parameters: int
    """Elements of all parameters inside; lazy ones that do not know their shape yet count 0."""
    training: bool
    """Whether it is in training mode."""
    in_size: Any = UNKNOWN_SIZE
    """Shape of its input as a list (nested for several), ``"?"`` where it did not run."""
    out_size: Any = UNKNOWN_SIZE
    """Shape of its output, likewise."""


class ModelSummary:
    """The layers of a module, one row each, and totals; ``str()`` of it is the printed table.

    If the module has an ``example_input_array`` (a tensor, a tuple of arguments or a dict of keyword
    arguments), it is called once with it, in evaluation mode and without gradients, to learn the sizes; modes
    and random states are put back.

    Args:
        model: any ``nn.Module``.
        max_depth: levels of nesting to show; -1 shows all, 0 only the totals.

    Raises:
        MisconfigurationException: ``max_depth`` is no int of at least -1.

    Example::

        >>> print(ModelSummary(torch.nn.Sequential(torch.nn.Linear(4, 2))))
          | Name | Type   | Params | Mode
        ---------------------------------
        0 | 0    | Linear | 10     | train
        ---------------------------------
        10        Trainable params
        0         Non-trainable params
        10        Total params
        0.000     Total estimated model params size (MB)
        1         Modules in train mode
        0         Modules in eval mode
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise MisconfigurationException(
                f"ModelSummary(max_depth={max_depth!r}): it must be -1 (all levels), 0 (totals only) or "
                "a number of levels."
            )
        modules = {
            name: module
            for name, module in model.named_modules()
            if name and (max_depth == -1 or name.count(".") < max_depth)
        }
        self.max_depth = max_depth
        self.layers: list[LayerSummary] = [
            LayerSummary(name, type(module).__name__, _count(module.parameters()), module.training)
            for name, module in modules.items()
        ]
        self.has_sizes = getattr(model, "example_input_array", None) is not None
        if self.has_sizes:
            _measure(model, modules, {layer.name: layer for layer in self.layers})
        parameters = list(model.parameters())
        modes = [module.training for module in model.modules()][1:]
        self.total_parameters: int = _count(parameters)
        self.trainable_parameters: int = _count(p for p in parameters if p.requires_grad)
        self.leftover_parameters: int = _count(model.parameters(recurse=False))
        #: bytes of all parameters in their present types, in units of 10^6
        self.model_size: float = sum(_size(p) * p.dtype.itemsize for p in parameters) / 1e6
        self.total_training_modes: dict[str, int] = {"train": sum(modes), "eval": len(modes) - sum(modes)}

    @property
    def layer_names(self) -> list[str]:
        """Names of the rows."""
        return [layer.name for layer in self.layers]

    @property
    def layer_types(self) -> list[str]:
        """Classes of the rows."""
        return [layer.layer_type for layer in self.layers]

    @property
    def param_nums(self) -> list[int]:
        """Parameters of the rows."""
        return [layer.num_parameters for layer in self.layers]

    @property
    def in_sizes(self) -> list[Any]:
        """Input shapes of the rows."""
        return [layer.in_size for layer in self.layers]

    @property
    def out_sizes(self) -> list[Any]:
        """Output shapes of the rows."""
        return [layer.out_size for layer in self.layers]

    def __str__(self) -> str:
        header = ["", "Name", "Type", "Params", "Mode"] + ["In sizes", "Out sizes"] * self.has_sizes
        rows = [
            [str(i), layer.name, layer.layer_type, readable_count(layer.num_parameters)]
            + ["train" if layer.training else "eval"]
            + [str(layer.in_size), str(layer.out_size)] * self.has_sizes
            for i, layer in enumerate(self.layers)
        ]
        if self.layers and self.leftover_parameters:
            leftover = ["", "other params", NOT_APPLICABLE, readable_count(self.leftover_parameters)]
            rows.append(leftover + [NOT_APPLICABLE] * (len(header) - len(leftover)))
        totals = [
            (readable_count(self.trainable_parameters), "Trainable params"),
            (readable_count(self.total_parameters - self.trainable_parameters), "Non-trainable params"),
            (readable_count(self.total_parameters), "Total params"),
            (f"{self.model_size:,.3f}", "Total estimated model params size (MB)"),
            (str(self.total_training_modes["train"]), "Modules in train mode"),
            (str(self.total_training_modes["eval"]), "Modules in eval mode"),
        ]
        table = _table(header, rows) if rows else []
        return "\n".join(table + [f"{number:<10}{text}" for number, text in totals])

    __repr__ = __str__


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """The :class:`ModelSummary` of a module."""
    return ModelSummary(lightning_module, max_depth=max_depth)


def readable_count(number: int) -> str:
    """A count in at most a few characters.

    >>> [readable_count(n) for n in (0, 999, 1234, 61_706, 132_600, 2_000_000, 3 * 10**15)]
    ['0', '999', '1.2 K', '61.7 K', '132 K', '2.0 M', '3,000 T']
    """
    assert number >= 0
    unit = min((len(str(number)) - 1) // 3, 4)
    scaled = number / 1000**unit
    if unit == 0:
        return str(number)
    digits = f"{math.floor(scaled):,d}" if scaled >= 100 else f"{math.floor(scaled * 10) / 10:.1f}"
    return f"{digits} {' KMBT'[unit]}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:], rule]


def _size(parameter: Tensor) -> int:
    if isinstance(parameter, UninitializedParameter):
        warn_once(
            "The model summary counts lazy parameters as 0: they get their shapes in the first forward.",
            key="summary of lazy parameters",
        )
        return 0
    return parameter.numel()


def _count(parameters: Any) -> int:
    return sum(map(_size, parameters))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, (list, tuple)):
        return [_shape(item) for item in value]
    return UNKNOWN_SIZE


def _measure(model: nn.Module, modules: Mapping[str, nn.Module], rows: Mapping[str, LayerSummary]) -> None:
    """Run the example through the model and write the shapes that pass each layer first into its row."""

    def watch(row: LayerSummary) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
            if row.in_size == UNKNOWN_SIZE:
                given = (*args, *kwargs.values())
                row.in_size = _shape(given[0] if len(given) == 1 else given)
                row.out_size = _shape(output)

        return hook

    example = _prepared(model, model.example_input_array)
    modes = {module: module.training for module in model.modules()}
    handles = [
        module.register_forward_hook(watch(rows[name]), with_kwargs=True)
        for name, module in modules.items()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        model.eval()
        with torch.no_grad(), isolate_rng():
            if isinstance(example, Mapping):
                model(**example)
            elif isinstance(example, (list, tuple)):
                model(*example)
            else:
                model(example)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training


def _prepared(model: nn.Module, example: Any) -> Any:
    """The example where the model is, its floats in the model's own type."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return example

    def cast_float(tensor: Tensor) -> Tensor:
        return tensor.to(first.dtype) if tensor.is_floating_point() else tensor

    return tree_map(cast_float, move_data_to_device(example, first.device), Tensor)
