"""The table of a model's layers, with their names, types, parameters and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import whole_shape
from lockstep.ground.rank import warn_once
from lockstep.ground.seed import isolate_rng
from lockstep.ground.text_table import padded
from lockstep.ground.transfer import move_data_to_device
from lockstep.ground.tree import tree_map

UNKNOWN_SIZE = "?"
NOT_APPLICABLE = "n/a"


class LayerSummary:
    """Row of the table for one layer. A hook records the layer's input and output sizes in the first forward.

    Args:
        module: the layer.

    Example::

        >>> layer = torch.nn.Linear(4, 2)
        >>> row = LayerSummary(layer)
        >>> _ = layer(torch.zeros(3, 4))
        >>> row.layer_type, row.num_parameters, row.in_size, row.out_size
        ('Linear', 10, [3, 4], [3, 2])
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._in_size: Any = None
        self._out_size: Any = None
        self._handle: Any = None
        if not isinstance(module, torch.jit.ScriptModule):  # they do not support hooks
            self._handle = module.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(self, _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any], output: object) -> None:
        given = (*args, *kwargs.values())
        self._in_size = parse_batch_shape(given[0] if len(given) == 1 else given)
        self._out_size = parse_batch_shape(output)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Remove the forward hook that records sizes."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        self.detach_hook()

    @property
    def layer_type(self) -> str:
        """Name of the layer's class."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Number of elements of the layer's parameters, including submodules; lazy parameters count 0."""
        return _count(self._module.parameters())

    @property
    def training(self) -> bool:
        """True if the layer is in training mode."""
        return self._module.training

    @property
    def in_size(self) -> Any:
        """Shape of the layer's input as a list (nested for several inputs); ``"?"`` before its first forward."""
        return self._in_size or UNKNOWN_SIZE

    @property
    def out_size(self) -> Any:
        """Shape of the layer's output, in the form of :attr:`in_size`."""
        return self._out_size or UNKNOWN_SIZE


class ModelSummary:
    """Table of a module's layers, with one row for each, and totals. ``str()`` returns the table as text.

    If the module has an ``example_input_array`` (a tensor, a tuple of arguments or a dict of keyword arguments), the
    module is called with it once, in evaluation mode and without gradients, to record the sizes and to count
    floating point operations. Modes and random states are restored.

    Args:
        model: any ``nn.Module``.
        max_depth: number of levels of nested modules to show; -1 shows all, 0 only the totals.

    Raises:
        MisconfigurationException: ``max_depth`` is not an int of at least -1.

    Example::

        >>> print(ModelSummary(torch.nn.Sequential(torch.nn.Linear(4, 2))))
          | Name | Type   | Params | Mode
        ----------------------------------
        0 | 0    | Linear | 10     | train
        ----------------------------------
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
                f"ModelSummary(max_depth={max_depth!r}): the depth is not valid. Pass -1 for all levels, 0 for totals "
                "only, or a number of levels."
            )
        self._model = model
        self._max_depth = max_depth
        self._flops: dict[str, dict[Any, int]] = {}
        self._layer_summary = self.summarize()

    def summarize(self) -> dict[str, LayerSummary]:
        """Return {layer name: row}. If the model has an example input, run it to record sizes and operations.

        Returns:
            a dict from the names of the shown layers to their rows, in the order of ``named_modules``.
        """
        rows = {name: LayerSummary(module) for name, module in self.named_modules}
        try:
            if self.has_sizes:
                self._flops = _run_example(self._model)
        finally:
            for row in rows.values():
                row.detach_hook()
        return rows

    @property
    def has_sizes(self) -> bool:
        """True if the model has an ``example_input_array``, which is run through the model to record sizes."""
        return getattr(self._model, "example_input_array", None) is not None

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """List of (name, module), one entry for each row."""
        depth = self._max_depth
        found = self._model.named_modules()
        return [(name, module) for name, module in found if name and (depth == -1 or name.count(".") < depth)]

    @property
    def layer_names(self) -> list[str]:
        """List of the layers' names, one for each row."""
        return list(self._layer_summary)

    @property
    def layer_types(self) -> list[str]:
        """List of the layers' class names, one for each row."""
        return [layer.layer_type for layer in self._layer_summary.values()]

    @property
    def param_nums(self) -> list[int]:
        """List of the numbers of parameter elements, one for each row."""
        return [layer.num_parameters for layer in self._layer_summary.values()]

    @property
    def training_modes(self) -> list[bool]:
        """List of booleans, one for each row: True if the layer is in training mode."""
        return [layer.training for layer in self._layer_summary.values()]

    @property
    def in_sizes(self) -> list[Any]:
        """List of the layers' input shapes, one for each row."""
        return [layer.in_size for layer in self._layer_summary.values()]

    @property
    def out_sizes(self) -> list[Any]:
        """List of the layers' output shapes, one for each row."""
        return [layer.out_size for layer in self._layer_summary.values()]

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """Dict of the floating point operations for the example input: {layer name: {operator: count}}.

        Without an example input, each layer has an empty dict.
        """
        return {name: self._flops.get(name, {}) for name in self.layer_names}

    @property
    def total_flops(self) -> int:
        """Floating point operations in a forward of the example input; 0 without an example."""
        return sum(self._flops.get("", {}).values())

    @property
    def total_parameters(self) -> int:
        """Number of elements of all parameters; shared parameters count once."""
        return _count(self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """Number of elements of the parameters that require gradients."""
        return _count(p for p in self._model.parameters() if p.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """Sum of the numbers of parameter elements in all rows."""
        return sum(self.param_nums)

    @property
    def leftover_parameters(self) -> int:
        """Number of elements of the model's own parameters, outside its layers."""
        return _count(self._model.parameters(recurse=False))

    @property
    def model_size(self) -> float:
        """Size of all parameters in their current dtypes, in units of 10^6 bytes."""
        return sum(_size(p) * p.dtype.itemsize for p in self._model.parameters()) / 1e6

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Dict with the number of submodules in ``"train"`` and in ``"eval"`` mode."""
        modes = [module.training for module in self._model.modules()][1:]
        return {"train": sum(modes), "eval": len(modes) - sum(modes)}

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """Return (head, cells) for each column, as the callback ``ModelSummary.summarize`` receives them."""
        columns = [
            (" ", list(map(str, range(len(self.layer_names))))),
            ("Name", self.layer_names),
            ("Type", self.layer_types),
            ("Params", list(map(readable_count, self.param_nums))),
            ("Mode", ["train" if training else "eval" for training in self.training_modes]),
            ("FLOPs", [readable_count(sum(counts.values())) for counts in self.flop_counts.values()]),
        ]
        if self.has_sizes:
            columns += [("In sizes", list(map(str, self.in_sizes))), ("Out sizes", list(map(str, self.out_sizes)))]
        if self.layer_names and self.leftover_parameters:
            leftover = {" ": " ", "Name": "other params", "Params": readable_count(self.leftover_parameters)}
            for head, cells in columns:
                cells.append(leftover.get(head, NOT_APPLICABLE))
        return columns

    def __str__(self) -> str:
        totals = totals_of(
            self.total_parameters,
            self.trainable_parameters,
            self.model_size,
            self.total_training_modes,
            self.total_flops,
        )
        return format_table(self._get_summary_data(), totals)

    __repr__ = __str__


def format_table(columns: Sequence[tuple[str, list[str]]], totals: list[tuple[str, str]]) -> str:
    """Format the table, and the lines with the totals below it, as text.

    Args:
        columns: head and cells of each column.
        totals: the result of :func:`totals_of`.
    """
    columns = without_empty_flops(columns)
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    table = _table([head.strip() for head, _ in columns], [[c.strip() for c in row] for row in rows]) if rows else []
    return "\n".join(table + [f"{number:<10}{text}" for number, text in totals])


def without_empty_flops(columns: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Remove the FLOPs column if all its counts are 0."""
    return [(head, cells) for head, cells in columns if head != "FLOPs" or not {*cells} <= {"0", NOT_APPLICABLE}]


def totals_of(
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: Mapping[str, int],
    total_flops: int,
) -> list[tuple[str, str]]:
    """Return a list of (number, description) for the lines below the table. FLOPs are omitted if they are 0."""
    lines = [
        (readable_count(trainable_parameters), "Trainable params"),
        (readable_count(total_parameters - trainable_parameters), "Non-trainable params"),
        (readable_count(total_parameters), "Total params"),
        (readable_size(model_size), "Total estimated model params size (MB)"),
        (str(total_training_modes["train"]), "Modules in train mode"),
        (str(total_training_modes["eval"]), "Modules in eval mode"),
    ]
    return [*lines, (readable_count(total_flops), "Total FLOPs")] if total_flops else lines


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the :class:`ModelSummary` of a module.

    Args:
        lightning_module: any ``nn.Module``.
        max_depth: number of levels of nested modules to show; -1 shows all, 0 only the totals.

    Raises:
        MisconfigurationException: ``max_depth`` is not an int of at least -1.
    """
    return ModelSummary(lightning_module, max_depth=max_depth)


def readable_count(number: int) -> str:
    """Format a count with a unit, in a few characters.

    >>> [readable_count(n) for n in (0, 999, 1234, 61_706, 132_600, 2_000_000, 3 * 10**15)]
    ['0', '999', '1.2 K', '61.7 K', '132 K', '2.0 M', '3,000 T']
    """
    assert number >= 0
    unit = min((len(str(number)) - 1) // 3, 4)
    scaled = number / 1000**unit
    if unit == 0:
        return str(number)
    digits = f"{math.floor(scaled):,d}" if scaled >= 100 else f"{scaled:.1f}"
    return f"{digits} {' KMBT'[unit]}"


def readable_size(megabytes: float) -> str:
    """Format a model's size in MB with three decimals.

    >>> readable_size(1234.5678)
    '1,234.568'
    """
    return f"{megabytes:,.3f}"


def parse_batch_shape(batch: object) -> Any:
    """Return the shape of a tensor as a list, nested for lists and tuples of tensors; ``"?"`` for anything else."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    if isinstance(batch, (list, tuple)):
        return [parse_batch_shape(item) for item in batch]
    return UNKNOWN_SIZE


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = map(" | ".join, padded([header, *rows]))
    rule = "-" * len(head)
    return [head.rstrip(), rule, *map(str.rstrip, lines), rule]


def _size(parameter: Tensor) -> int:
    if isinstance(parameter, UninitializedParameter):
        warn_once(
            "The model summary counts lazy parameters as 0, because they have no shape before the first forward.",
            key="summary of lazy parameters",
        )
        return 0
    return whole_shape(parameter).numel()


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(map(_size, parameters))


def _run_example(model: nn.Module) -> dict[str, dict[Any, int]]:
    """Run the example input. Return {layer name: {operator: floating point operations}}, with ``""`` for the sum."""
    from torch.utils.flop_counter import FlopCounterMode

    example = _prepare_example(model, model.example_input_array)
    modes = {module: module.training for module in model.modules()}
    counter = FlopCounterMode(display=False)
    try:
        model.eval()
        with torch.no_grad(), isolate_rng(), counter:
            if isinstance(example, Mapping):
                model(**example)
            elif isinstance(example, (list, tuple)):
                model(*example)
            else:
                model(example)
    finally:
        for module, training in modes.items():
            module.training = training
    root = f"{type(model).__name__}."
    found = {name.removeprefix(root): dict(counts) for name, counts in counter.get_flop_counts().items()}
    return {**found, "": found.get("Global", {})}


def _prepare_example(model: nn.Module, example: object) -> Any:
    """Move the example input to the model's device, and cast floating point tensors to its dtype."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        return example

    def cast_float(tensor: Tensor) -> Tensor:
        return tensor.to(first.dtype) if tensor.is_floating_point() else tensor

    return tree_map(cast_float, move_data_to_device(example, first.device), Tensor)
