"""Loading of weights from a folder of safetensors files into modules, which may be sharded."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, missing_extra
from lockstep.ground.parameters import box_of, keep_dtype, local_part
from lockstep.ground.rank import rank_zero_warn

PLAN = "_lockstep_pretrained"
"""Attribute of a layer that maps parameter and buffer names to the sources of their values."""
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SHOWN = 10

Box = Sequence[slice]
"""A slice for each dimension."""

NO_FOLDER = (
    "load_pretrained({folder!r}): the folder does not exist. Pass a folder on this machine; to download one from the "
    "Hub, run `hf download NAME --local-dir FOLDER`."
)
PICKLED = (
    "load_pretrained({folder!r}): the weights are pickled ({name}), cannot be read in parts, and may run code. "
    "If you trust their author, convert them to safetensors once: AutoModel.from_pretrained({folder!r})."
    "save_pretrained(NEW_FOLDER)."
)
NO_WEIGHTS = (
    "load_pretrained({folder!r}): the folder contains neither {index} nor {one}. Pass a folder from `save_pretrained`."
)
BAD_INDEX = "load_pretrained({folder!r}): {index} is damaged ({error}). Copy the folder again."
DAMAGED = "load_pretrained({folder!r}): {name} is damaged ({error}). Copy the file again."
ANOTHER = (
    "load_pretrained({folder!r}): none of the folder's {count} tensors belongs to a {model}. The folder has {there}; "
    "the model has {here}. Pass the model's own folder, or build the model from the folder's config: "
    "AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))."
)
SHAPES = (
    "load_pretrained({folder!r}): {count} tensors have different shapes in the folder and in {model}: {shown}. Build "
    "the model from AutoConfig.from_pretrained(folder), or pass ignore_mismatched_sizes=True to have these tensors "
    "initialized. For a larger vocabulary write a new folder once: from_pretrained, resize_token_embeddings, "
    "save_pretrained."
)
RESIZED = (
    "load_pretrained({folder!r}): the shape of {name!r} has changed from {was} to {now} since this call, before the "
    "values were loaded. Write a folder with the new shapes once, and load that folder: "
    "AutoModel.from_pretrained({folder!r}), resize_token_embeddings, save_pretrained(NEW_FOLDER)."
)
QUANTIZED = (
    "load_pretrained({folder!r}): the weights are quantized ({method} in config.json), and cannot be loaded into "
    "ordinary parameters. Pass the unquantized folder, or write one once: "
    "AutoModelForCausalLM.from_pretrained({folder!r}).dequantize(), then save_pretrained(NEW_FOLDER)."
)
NOT_FILLED = (
    "load_pretrained({folder!r}): layers of {model} with {names} were replaced before their values were loaded, so the "
    "new layers would stay without these values. Replace layers before `load_pretrained`."
)


class WeightFiles:
    """Reader of a folder of safetensors files. The constructor reads only the files' headers.

    Args:
        folder: a folder with one file, or with an index and the parts that it names.

    Attributes:
        shapes: shapes of all tensors, by name.

    Raises:
        MisconfigurationException: the folder contains no such files.
        CorruptCheckpoint: a part is missing or truncated.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self._open = importlib.import_module("safetensors").safe_open
        except ModuleNotFoundError:
            raise missing_extra("safetensors", "transformers", "load_pretrained") from None
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        if not self.folder.is_dir():
            raise MisconfigurationException(NO_FOLDER.format(folder=str(folder)))
        for path, keys in self._parts().items():
            try:
                with self._open(path, framework="pt") as file:
                    for key in file.keys() if keys is None else keys:
                        self._file_of[key] = path
                        self.shapes[key] = tuple(file.get_slice(key).get_shape())
            except Exception as error:  # safetensors' error class differs between versions
                raise CorruptCheckpoint(DAMAGED.format(folder=str(self.folder), name=path.name, error=error)) from None

    def _parts(self) -> dict[Path, Collection[str] | None]:
        """Return a dict from each weight file to its tensors' names in the index, or to None if there is no index."""
        folder, one = str(self.folder), self.folder / ONE_FILE
        # before an index, as in `from_pretrained`: a model that was once saved in parts leaves its index
        if one.is_file():
            return {one: None}
        if (self.folder / INDEX).is_file():
            return self._indexed()
        found = list(self.folder.glob("*.safetensors"))
        if len(found) == 1:
            return {found[0]: None}
        pickled = sorted(path for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in self.folder.glob(kind))
        if pickled:
            raise MisconfigurationException(PICKLED.format(folder=folder, name=pickled[0].name))
        raise MisconfigurationException(NO_WEIGHTS.format(folder=folder, index=INDEX, one=ONE_FILE))

    def _indexed(self) -> dict[Path, Collection[str] | None]:
        try:
            keys: dict[Path, list[str]] = {}
            for key, name in json.loads((self.folder / INDEX).read_text())["weight_map"].items():
                keys.setdefault(self.folder / name, []).append(key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(BAD_INDEX.format(folder=str(self.folder), index=INDEX, error=repr(error))) from None
        return {**keys}

    def read(self, key: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or only the part in ``box``.

        The result uses the memory into which the file is mapped; copy it before changing it.
        """
        # opened for each read: the mapping ends with the returned tensor, and its pages do not accumulate in memory
        with self._open(self._file_of[key], framework="pt") as file:
            part: Tensor = file.get_slice(key)[tuple(box) if box else ...]
        return part


def _refuse_quantized(folder: Path) -> None:
    """Raise if a folder's ``config.json`` describes quantized weights."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):  # a folder of weights alone
        return
    given = config.get("quantization_config") if isinstance(config, dict) else None
    if given:
        method = given.get("quant_method") if isinstance(given, dict) else None
        raise MisconfigurationException(QUANTIZED.format(folder=str(folder), method=method or "quantization_config"))


@dataclass
class Loading:
    """Progress of one call of `load_pretrained`: the names of the tensors that are still to be loaded.

    Attributes:
        files: reader of the folder.
        model: class name of the model, for messages.
        waiting: names of tensors that have not been loaded yet.
    """

    files: WeightFiles
    model: str
    waiting: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: object) -> Loading:
        """Return this object itself, so that a copied layer loads the same values as the original."""
        return self

    def check_done(self) -> None:
        """Raise if any tensor was not loaded because its layer has been replaced.

        Raises:
            MisconfigurationException: the message names the tensors.
        """
        if self.waiting:
            names = shown(sorted(self.waiting))
            raise MisconfigurationException(
                NOT_FILLED.format(folder=str(self.files.folder), names=names, model=self.model)
            )


@dataclass(frozen=True)
class Source:
    """Reader of one tensor of the model from a folder's files, with a conversion if needed.

    Attributes:
        loading: the call of `load_pretrained`.
        name: name in the model.
        shape: shape of the full tensor.
        keys: names in the files; several if a conversion of transformers makes the tensor from several.
        conversion: function that runs transformers' ``WeightConverter`` and returns the tensor; None: no conversion.
    """

    loading: Loading
    name: str
    shape: torch.Size
    keys: tuple[str, ...]
    conversion: Callable[[], Tensor] | None = None

    def read(self, box: Box | None = None) -> Tensor:
        """Read the tensor, or only the part in ``box``, with the dtype of the files."""
        if self.conversion is None:
            return self.loading.files.read(self.keys[0], box)
        whole = self.conversion()
        return whole[tuple(box)] if box else whole

    def read_flat(self, start: int, size: int) -> Tensor:
        """Read ``size`` elements of the flattened tensor from ``start`` on.

        Only the rows of the tensor that contain these elements are read.
        """
        if not self.shape:
            return self.read().reshape(-1)
        row = max(1, self.shape[1:].numel())
        first = start // row
        rows = self.read([slice(first, -(-(start + size) // row))]).reshape(-1)
        return rows[start - first * row :][:size]


# -- sources of a module's tensors -----------------------------------------------------------------------------


def load_pretrained(model: nn.Module, folder: str | Path, *, ignore_mismatched_sizes: bool = False) -> None:
    """Initialize a module with the weights of a folder of safetensors, as transformers' ``from_pretrained`` would.

    Call it in ``configure_model`` with a module that was built on the meta device: nothing is read yet, and each rank
    later reads the slices that the strategy assigns to it, directly from the files. A module with memory is filled
    immediately.

    Names are interpreted as ``from_pretrained`` does, including renamed ones and tied weights. Parameters that the
    folder lacks are initialized by the model's ``_init_weights``, and a warning names them, as it does tensors of the
    folder without a place in the model. The dtype is the module's: values of another one are cast. (``from_config``
    makes a module in the config's dtype, often bfloat16, unless you pass ``dtype=torch.float32``.)

    Args:
        model: a model of transformers, or any other with the names of the files.
        folder: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its parts.
        ignore_mismatched_sizes: skip tensors with other shapes than the model's, as if the folder lacked them;
            otherwise they are an error.

    Raises:
        MisconfigurationException: the folder belongs to a different model, is quantized, or contains no safetensors.
        CorruptCheckpoint: a file is missing or damaged.
        ModuleNotFoundError: safetensors is not installed.

    Example::

        class Tuned(LightningModule):
            def configure_model(self):
                if self.model is None:
                    with torch.device("meta"):
                        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))
                    lockstep.load_pretrained(self.model, FOLDER)
    """
    files = WeightFiles(folder)
    _refuse_quantized(files.folder)
    loading = Loading(files, type(model).__name__)
    places = places_of(model)
    found, unexpected = _sources(model, loading, places)
    if not found:
        there, here = shown(sorted(files.shapes)), shown(list(places))
        raise MisconfigurationException(
            ANOTHER.format(folder=str(folder), count=len(files.shapes), model=loading.model, there=there, here=here)
        )
    passed_over = _refuse_other_shapes(found, places, loading, ignore_mismatched_sizes)
    missing = _resolve_ties(model, found, places)
    missing, unexpected = _reported_names(model, missing, unexpected)
    if is_of_transformers(model):
        _keep_dtypes(model, places)
    _warn(loading, [name for name in missing if name not in passed_over], unexpected)
    vars(model)[FOLDER] = str(files.folder)
    # Plans are attributes of the layers, so that they follow a layer into a copy or another module.
    for name, source in found.items():
        layer, own = places[name]
        plan: dict[str, Source] = vars(layer).setdefault(PLAN, {})
        if own in plan:  # an earlier call was to fill the layer, too
            plan[own].loading.waiting.discard(plan[own].name)
        plan[own] = source
        loading.waiting.add(source.name)
    if not any(tensor_at(*place).is_meta for place in places.values()):
        for layer, own, source in planned(model):
            read_into(tensor_at(layer, own), source)
        forget(model)


def _keep_dtypes(model: Any, places: Mapping[str, Place]) -> None:
    """Convert to float32 those tensors that must be float32 in a transformers model of any dtype.

    These are computed buffers (rotary tables, for example), and tensors that the model's class names.
    """
    kept = {id(layer): set(layer._non_persistent_buffers_set) for layer in model.modules()}
    plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    for name, (layer, own) in places.items():
        pattern = next((each for each in plan if re.search(each.replace("*", ".*"), name)), None)
        if pattern is not None:
            tensor = tensor_at(layer, own)
            tensor.data = tensor.data.to(plan[pattern])
            kept[id(layer)].add(own)
    for layer in model.modules():
        keep_dtype(layer, kept[id(layer)])


FOLDER = "_lockstep_pretrained_folder"
"""Attribute of a model with the name of the folder from which it was loaded."""

Place = tuple[nn.Module, str]


def places_of(model: nn.Module) -> dict[str, Place]:
    """Map the full name of each parameter and persistent buffer to (layer, name within the layer).

    A tied tensor has an entry for each of its names.
    """
    found: dict[str, Place] = {}
    for prefix, layer in model.named_modules(remove_duplicate=False):
        for own, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            if tensor is not None and own not in layer._non_persistent_buffers_set:
                found[f"{prefix}.{own}".lstrip(".")] = (layer, own)
    return found


def tensor_at(layer: nn.Module, own: str) -> Tensor:
    """Return a layer's parameter or buffer by its name within the layer."""
    tensor = layer._parameters[own] if own in layer._parameters else layer._buffers[own]
    assert tensor is not None
    return tensor


def is_of_transformers(model: nn.Module) -> bool:
    """Return True if the model derives from transformers' ``PreTrainedModel``."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def _sources(model: nn.Module, loading: Loading, places: Mapping[str, Place]) -> tuple[dict[str, Source], list[str]]:
    """Return (sources, unexpected): a source for each model tensor in the folder, and the names of other tensors."""
    if is_of_transformers(model):
        return _as_transformers(model, loading, places)
    keys = loading.files.shapes
    found = {key: _as_it_is(loading, key, key) for key in keys if key in places}
    return found, [key for key in keys if key not in places]


def _as_it_is(loading: Loading, name: str, key: str) -> Source:
    return Source(loading, name, torch.Size(loading.files.shapes[key]), (key,))


def _as_transformers(model: Any, loading: Loading, places: Mapping[str, Place]) -> tuple[dict[str, Source], list[str]]:
    """Do the work of `_sources` for models of transformers, with transformers' renamings and conversions."""
    loader, mapping = _loader(model, str(loading.files.folder))
    renamings = [each for each in mapping if isinstance(each, loader.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loader.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known, prefix = dict.fromkeys(places, True), model.base_model_prefix
    found: dict[str, Source] = {}
    joined: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    unexpected: list[str] = []
    for key in sorted(loading.files.shapes, key=loader.dot_natural_key):
        name, pattern = loader.rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = loader.rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=known)
        if name not in known:
            unexpected.append(name)
        elif pattern is None:
            found.setdefault(name, _as_it_is(loading, name, key))
        else:
            joined.setdefault(name, (pattern, []))[1].append((key, pattern))
    for first, (pattern, keys) in joined.items():
        found |= _converted(model, loading, known, first, of_pattern[pattern], keys)
    model._weight_conversions = [each for each in mapping if each.was_used()]  # saving reverts them
    return found, unexpected


def _loader(model: Any, folder: str) -> tuple[Any, list[Any]]:
    """Return (transformers' module for loading weights, list of its renamings and conversions for a model)."""
    try:
        loader = importlib.import_module("transformers.core_model_loading")
        return loader, importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    except ModuleNotFoundError:
        raise MisconfigurationException(
            f"load_pretrained({folder!r}): reading a model of transformers needs transformers 5 or newer. Run "
            "pip install -U transformers, or call from_pretrained in `__init__`."
        ) from None


def _converted(
    model: Any, loading: Loading, known: Mapping[str, bool], first: str, converter: Any, keys: list[tuple[str, str]]
) -> dict[str, Source]:
    """Return a source for each tensor that a ``WeightConverter`` of transformers makes from the tensors ``keys``."""

    def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        own = deepcopy(converter)
        for key, pattern in keys:
            own.add_tensor(first, key, pattern, lambda key=key: read(key))
        made = own.convert(first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    shapes = loading.files.shapes
    targets = convert(lambda key: torch.empty(shapes[key], device="meta"))
    names = tuple(key for key, _ in keys)

    def conversion(target: str) -> Callable[[], Tensor]:
        return lambda: convert(loading.files.read)[target]

    return {
        target: Source(loading, target, each.shape, names, conversion(target))
        for target, each in targets.items()
        if target in known
    }


def _refuse_other_shapes(
    found: dict[str, Source], places: Mapping[str, Place], loading: Loading, passes_over: bool
) -> set[str]:
    """Raise if tensors in the folder have other shapes than in the model.

    With ``passes_over`` warn instead, and remove these tensors from ``found``. Return their names.
    """
    wanted = {name: tensor_at(*places[name]).shape for name in found}
    wrong = {name for name, source in found.items() if source.shape != wanted[name]}
    if not wrong:
        return wrong
    folder = str(loading.files.folder)
    shapes = shown([f"{name} {tuple(found[name].shape)} for {tuple(wanted[name])}" for name in sorted(wrong)], str)
    if not passes_over:
        raise MisconfigurationException(
            SHAPES.format(folder=folder, count=len(wrong), model=loading.model, shown=shapes)
        )
    rank_zero_warn(
        f"load_pretrained({folder!r}): {len(wrong)} tensors have different shapes in the folder and in "
        f"{loading.model}, and are newly initialized: {shapes}."
    )
    for name in wrong:
        del found[name]
    return wrong


# -- tied weights ----------------------------------------------------------------------------------------------


def _resolve_ties(model: nn.Module, found: dict[str, Source], places: Mapping[str, Place]) -> list[str]:
    """Assign one source to all names of a tied tensor. Return the first name of each tensor without a source.

    Tied names with different values in the files are untied, as in ``from_pretrained``.
    """
    groups: dict[int, list[str]] = {}
    for name, place in places.items():
        groups.setdefault(id(tensor_at(*place)), []).append(name)
    missing: list[str] = []
    for names in groups.values():
        there = [name for name in names if name in found]
        if not there:
            missing.append(names[0])
            continue
        first = there[0]
        for name in names:
            if name in there and found[name].keys != found[first].keys and not _are_equal(found[first], found[name]):
                _untie(model, first, name, places)
            else:
                found[name] = found[first]
    return missing


def _are_equal(one: Source, other: Source) -> bool:
    """Return True if two tensors in the files are equal. Compare them piece by piece to save memory."""
    if one.shape != other.shape or one.conversion is not None or other.conversion is not None:
        return False
    if not one.shape:
        return torch.equal(one.read(), other.read())
    rows = max(1, 2**24 // max(1, one.shape[1:].numel()))
    pieces = [[slice(at, at + rows)] for at in range(0, one.shape[0], rows)]
    return all(torch.equal(one.read(piece), other.read(piece)) for piece in pieces)


def _untie(model: Any, first: str, name: str, places: Mapping[str, Place]) -> None:
    layer, own = places[name]
    tensor = tensor_at(layer, own)
    layer._parameters[own] = Parameter(tensor.detach().clone(), tensor.requires_grad)
    getattr(model, "all_tied_weights_keys", {}).pop(name, None)
    rank_zero_warn(
        f"load_pretrained: {type(model).__name__} ties {name!r} to {first!r}, but the folder has different values "
        "for the two, so they are untied. Set tie_word_embeddings=False in the model's config to avoid this warning."
    )


# -- messages --------------------------------------------------------------------------------------------------


def _reported_names(model: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Return (missing, unexpected) without the names that ``from_pretrained`` would not report for this model."""
    if not is_of_transformers(model):
        return missing, unexpected
    info = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(info)
    return [n for n in missing if n in info.missing_keys], [n for n in unexpected if n in info.unexpected_keys]


def _warn(loading: Loading, missing: list[str], unexpected: list[str]) -> None:
    folder = str(loading.files.folder)
    if missing:
        rank_zero_warn(
            f"load_pretrained({folder!r}): {len(missing)} tensors of {loading.model} are not in the folder, and are "
            f"newly initialized: {shown(missing)}."
        )
    if unexpected:
        rank_zero_warn(
            f"load_pretrained({folder!r}): {len(unexpected)} tensors of the folder are not used in {loading.model}: "
            f"{shown(unexpected)}."
        )


def shown(names: Sequence[str], show: Callable[[str], str] = repr) -> str:
    """Join the first `SHOWN` names of a list for a message, and append the number of further names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(show(name) for name in names[:SHOWN]) + more


def read_into(tensor: Tensor, source: Source) -> None:
    """Load values into a tensor, or into this rank's part of a DTensor."""
    part = local_part(tensor.detach())
    if part.numel():
        part.copy_(source.read(box_of(tensor)))


# -- the plan of a module --------------------------------------------------------------------------------------


def planned(module: nn.Module) -> Iterator[tuple[nn.Module, str, Source]]:
    """Yield (layer, name within the layer, source) for every parameter and buffer that is still to be loaded."""
    for layer in module.modules():
        for own, source in vars(layer).get(PLAN, {}).items():
            yield layer, own, source


def check_shapes(module: nn.Module) -> None:
    """Raise if the shape of a tensor has changed since `load_pretrained`.

    Raises:
        MisconfigurationException: a shape has changed; the message names the tensor.
    """
    for layer, own, source in planned(module):
        now = tensor_at(layer, own).shape
        if now != source.shape:
            folder, was = str(source.loading.files.folder), tuple(source.shape)
            raise MisconfigurationException(RESIZED.format(folder=folder, name=source.name, was=was, now=tuple(now)))


def is_planned(module: nn.Module) -> bool:
    """Return True if any tensor of a module is still to be loaded from a folder."""
    return any(True for _ in planned(module))


def planned_ids(module: nn.Module) -> set[int]:
    """Return the ids of tensors that are still to be loaded from a folder."""
    return {id(tensor_at(layer, own)) for layer, own, _ in planned(module)}


def forget(module: nn.Module) -> None:
    """Mark all tensors of a module as loaded. Raise if tensors of layers that were replaced have not been loaded.

    Raises:
        MisconfigurationException: layers that were still to be loaded have been replaced.
    """
    loadings = {id(source.loading): source.loading for _, _, source in planned(module)}
    for layer in module.modules():
        for source in vars(layer).pop(PLAN, {}).values():
            source.loading.waiting.discard(source.name)
    for loading in loadings.values():
        loading.check_done()
