"""Initialization of layers on the meta device, whose parameters have a shape but no memory.

They are read from the folder of `load_pretrained`, or initialized by the layers or by the model that contains them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from lockstep.checkpoint import pretrained
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import box_of, is_placeholder, local_part

NO_RESET = (
    "{layer} has {name!r} on the meta device, and no method initializes it. Add a method `reset_parameters` to {kind}, "
    "or `_init_weights(layer)` or `init_weights()` to the model, or create the layer without torch.device('meta')."
)
UNSET = "{layer}: {maker} does not initialize {name!r}, which is on the meta device. Assign values in this method."
OF_ADAPTER = (
    "{layer}: the initial values of this adapter ({kind}) depend on its base layer, whose weights are not loaded yet. "
    "Use LoRA with init_lora_weights=True, False or 'gaussian', or load the weights with from_pretrained in "
    "`__init__`, before the adapter is added."
)
CPU = torch.device("cpu")
FLAG = "_is_hf_initialized"
"""Attribute of tensors that transformers' init functions must not change."""


@torch.no_grad()
def leave_meta(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialize tensors on the meta device, except those that are to be loaded from a folder.

    peft's adapters are initialized first, by their own method. If the model has a method ``_init_weights(layer)``, as
    those of transformers do, it is called as ``model.apply(model._init_weights)`` would. Tensors that are still without
    values are initialized by the layer's own ``reset_parameters``, or by ``init_weights()`` of the layer or of a model
    around it. A layer's tensors are full, and not sharded, only during the call for this layer.

    Args:
        module: changed in place; tensors that are not on the meta device are unchanged.
        device: device of newly allocated memory.

    Raises:
        MisconfigurationException: nothing initializes a layer, or a parameter is still without values.
    """
    if not any(True for layer in module.modules() for _ in _on_meta(layer)):
        return
    waiting = _Waiting(module)
    if not waiting.names:
        return
    waiting.check()  # before memory is allocated and random numbers are drawn
    ties = _Ties(module)
    wanted = {id(_found(layer, name)) for layer in module.modules() for name in waiting.names_of(layer)}
    _give_memory(module, device, wanted)
    ties.restore()
    waiting.drop_shared(ties)
    # first, since `_init_weights` of transformers would initialize an adapter's linear layers like any other
    _draw_adapters(module, waiting)
    with _flagged(module), _guarded():
        _apply_own(module, None, waiting)
    for layer, names in waiting.remaining():
        if callable(getattr(layer, "reset_parameters", None)):
            _call(layer.reset_parameters, [(layer, names)], waiting)  # type: ignore[arg-type]
    for layer, _ in waiting.remaining():
        maker = waiting.makers[id(layer)]
        if maker is not None and waiting.names_of(layer):  # else another layer's call has done it
            _call(maker.init_weights, waiting.pending_within(maker), waiting)  # type: ignore[arg-type]
    for layer, names in waiting.remaining():
        shown = waiting.prefixes[id(layer)] or "The module"
        raise MisconfigurationException(UNSET.format(layer=shown, maker=waiting.maker_of(layer), name=names[0]))


@torch.no_grad()
def fill(module: nn.Module, device: torch.device, parts: torch.device | None = None) -> None:
    """Load this rank's parts of the tensors for which `load_pretrained` was called.

    No other bytes of the files are read.

    Args:
        module: unsharded, or sharded into DTensors; its tensors on the meta device are allocated.
        device: device of newly allocated memory.
        parts: device of newly allocated shards, if different.

    Raises:
        MisconfigurationException: layers with weights to load have been replaced, or have different shapes now.
    """
    wanted = pretrained.planned_ids(module)
    if not wanted:
        return
    pretrained.check_shapes(module)
    ties = _Ties(module)
    _give_memory(module, device, wanted, parts)
    ties.restore()
    for tensor, source in _planned_once(module):
        if is_placeholder(tensor):
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        pretrained.read_into(tensor, source)
    pretrained.forget(module)


def fill_whole(module: nn.Module, device: torch.device = CPU) -> None:
    """Allocate, initialize and load all tensors of an unsharded module.

    Values come from the folder named in `load_pretrained`, or else from `leave_meta`.
    """
    leave_meta(module, CPU)  # transformers also draws and computes tables there
    fill(module, device)


@torch.no_grad()
def stand_in(module: nn.Module) -> dict[int, pretrained.Source]:
    """Replace parameters that will be loaded later with placeholders without memory, and load buffers now.

    Returns:
        the source of each parameter's values, by the parameter's id.

    Raises:
        MisconfigurationException: a tensor's shape has changed since the call of `load_pretrained`.
    """
    pretrained.check_shapes(module)
    ties = _Ties(module)
    for layer, name, source in pretrained.planned(module):
        tensor = _found(layer, name)
        if name in layer._parameters:
            value = torch.full((), torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)
            nothing = value.expand(tensor.shape)
            if tensor.is_meta:
                _put(layer, name, Parameter(nothing, tensor.requires_grad))
            else:  # from an earlier call in which no weights changed
                tensor.data = nothing
        elif tensor.is_meta:
            buffer = torch.empty_like(tensor, device="cpu")
            pretrained.read_into(buffer, source)
            _put(layer, name, buffer)
    ties.restore()
    return {id(tensor): source for tensor, source in _planned_once(module) if isinstance(tensor, Parameter)}


def _planned_once(module: nn.Module) -> Iterator[tuple[Tensor, pretrained.Source]]:
    """Return (tensor, source) for every tensor that is still to be loaded; a tied tensor occurs once."""
    planned = [(_found(layer, name), source) for layer, name, source in pretrained.planned(module)]
    found = {id(tensor): (tensor, source) for tensor, source in reversed(planned)}
    return reversed(found.values())


def _give_memory(
    module: nn.Module, device: torch.device, wanted: Collection[int], parts: torch.device | None = None
) -> None:
    def given(tensor: Tensor) -> Tensor:
        if not tensor.is_meta or id(tensor) not in wanted:
            return tensor
        return torch.empty_like(tensor, device=parts if parts and hasattr(tensor, "placements") else device)

    module._apply(given)  # type: ignore[no-untyped-call]  # torch gives it no types


class _Waiting:
    """Tracker of a module's layers with tensors on the meta device, and of the tensors that are not yet initialized.

    Attributes:
        names: names, within a layer, of the layer's tensors that still need values; by the layer's id.
        pending: `names` as it was at the start, without layers that are complete.
        prefixes: names of all layers, by id.
        models: nearest enclosing model with ``_init_weights``, by a layer's id.
        makers: nearest enclosing module with ``init_weights()``, by a layer's id.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[int, list[str]] = {}
        self.pending: dict[int, list[str]] = {}
        self.prefixes: dict[int, str] = {}
        self.models: dict[int, nn.Module | None] = {}
        self.makers: dict[int, nn.Module | None] = {}
        self._layers: dict[int, nn.Module] = {}
        planned = pretrained.planned_ids(module)
        for prefix, layer in module.named_modules():
            self._layers[id(layer)], self.prefixes[id(layer)] = layer, prefix
            names = [name for name in _on_meta(layer) if id(_found(layer, name)) not in planned]
            if names:
                self.names[id(layer)] = names
        self._look_around(module, None, None)

    def _look_around(self, layer: nn.Module, model: nn.Module | None, maker: nn.Module | None) -> None:
        model = layer if _required(getattr(layer, "_init_weights", None)) == 1 else model
        maker = layer if model is not layer and _required(getattr(layer, "init_weights", None)) == 0 else maker
        self.models.setdefault(id(layer), model)
        self.makers.setdefault(id(layer), maker)
        for child in layer.children():
            self._look_around(child, model, maker)

    def names_of(self, layer: nn.Module) -> list[str]:
        """Return the names of the layer's tensors that are not yet initialized."""
        return self.names.get(id(layer), [])

    def remaining(self) -> list[tuple[nn.Module, list[str]]]:
        """Return (layer, tensor names) for every layer with uninitialized tensors, in order of registration."""
        return [(self._layers[key], list(names)) for key, names in self.names.items() if names]

    def mark_initialized(self, layer: nn.Module, name: str) -> None:
        """Record that a tensor of a layer is initialized."""
        if name in self.names_of(layer):
            self.names[id(layer)].remove(name)

    def mark_complete(self, layers: Iterable[nn.Module]) -> None:
        """Exclude these layers from initialization methods that are called for other layers."""
        for layer in layers:
            self.pending.pop(id(layer), None)

    def drop_shared(self, ties: _Ties) -> None:
        """Assign each shared tensor to the first layer that has it, so that only this layer initializes it."""
        for layer, names in self.remaining():
            self.names[id(layer)] = [name for name in names if name in ties.names[id(layer)]]
        self.pending = {key: list(names) for key, names in self.names.items()}

    def pending_within(self, maker: nn.Module) -> Pending:
        """Return a list of (layer, tensor names) for the layers that ``maker.init_weights()`` should initialize."""
        return [(layer, self.pending[id(layer)]) for layer in maker.modules() if self.pending.get(id(layer))]

    def maker_of(self, layer: nn.Module) -> str:
        """Return a description of the method that should initialize a layer, for error messages."""
        model, maker = self.models[id(layer)], self.makers[id(layer)]
        if maker is not None:
            return f"`init_weights` of {type(maker).__name__}"
        if callable(getattr(layer, "reset_parameters", None)):
            return f"`reset_parameters` of {type(layer).__name__}"
        return f"`_init_weights` of {type(model).__name__}"

    def check(self) -> None:
        """Raise an error if a layer on the meta device has no method that could initialize it."""
        for layer, names in self.remaining():
            around = self.models[id(layer)] is not None or self.makers[id(layer)] is not None
            if not around and not callable(getattr(layer, "reset_parameters", None)):
                shown = self.prefixes[id(layer)] or "The module"
                raise MisconfigurationException(NO_RESET.format(layer=shown, name=names[0], kind=type(layer).__name__))


def _required(method: object) -> int:
    """Return the number of arguments that a method requires; -1 if it is not callable or has no signature."""
    try:
        parameters = inspect.signature(method).parameters.values()  # type: ignore[arg-type]  # a TypeError
    except (TypeError, ValueError):
        return -1
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.default is inspect.Parameter.empty and each.kind in plain for each in parameters)


# -- the calls -------------------------------------------------------------------------------------------------

Pending = list[tuple[nn.Module, list[str]]]
"""Pairs of a layer and the names of its tensors that an initialization method should fill."""


def _draw_adapters(module: nn.Module, waiting: _Waiting) -> None:
    """Initialize peft adapters that moved to the meta device with their base layers.

    peft initializes an adapter before it moves the adapter to the device of the base layer; these values are lost.
    """
    configs: dict[str, Any] = {}
    for layer in module.modules():
        found = getattr(layer, "peft_config", None)
        configs |= found if isinstance(found, dict) else {}
    for prefix, layer in module.named_modules():
        pending = _pending_of_adapter(layer, waiting)
        if not pending:
            continue
        reset = _reset_of_adapter(layer, configs)
        if reset is not None:
            _call(reset, pending, waiting)
        if any(waiting.names_of(each) for each, _ in pending):
            raise MisconfigurationException(OF_ADAPTER.format(layer=prefix, kind=type(layer).__name__))
        waiting.mark_complete(each for each, _ in pending)


def _pending_of_adapter(layer: Any, waiting: _Waiting) -> Pending:
    """Return (layer, tensor names) for the uninitialized parts of a peft layer, without its base layer."""
    if not any(kind.__name__ == "BaseTunerLayer" for kind in type(layer).__mro__):
        return []
    around = getattr(layer, "base_layer", None)  # may itself be an adapter of another parameter
    base = {id(each) for each in (layer.get_base_layer() if around is None else around).modules()}
    parts = [each for each in layer.modules() if id(each) not in base]
    return [(each, waiting.pending[id(each)]) for each in parts if waiting.pending.get(id(each))]


def _reset_of_adapter(layer: Any, configs: dict[str, Any]) -> Callable[[], None] | None:
    """Return a function that initializes a LoRA layer by its config; None if it would need the base weights."""
    reset = getattr(layer, "reset_lora_parameters", None)
    parts = [each for each in (getattr(layer, name, None) for name in LORA) if each]
    ways: dict[str, bool | str] = {}
    for name in [name for part in parts for name in part]:
        way = getattr(configs.get(name), "init_lora_weights", True)
        ways[name] = way.lower() if isinstance(way, str) else way
    # other ways (PiSSA, OLoRA, EVA ...) start from the values of the base layer
    if reset is None or _required(reset) != 2 or any(way not in (True, False, "gaussian") for way in ways.values()):
        return None
    return partial(_draw, reset, parts, ways)


def _draw(reset: Callable[[str, bool | str], object], parts: list[Any], ways: dict[str, bool | str]) -> None:
    for name, way in ways.items():
        # with False peft leaves the small matrices as their constructors made them
        for part in parts if way is False else ():
            if isinstance(part, nn.ModuleDict) and name in part:
                small: Any = part[name]
                small.reset_parameters()
        reset(name, way)


LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""Names of a LoRA layer's attributes with its low-rank matrices; each maps adapter names to matrices."""


def _apply_own(layer: nn.Module, model: Any, waiting: _Waiting) -> None:
    """Call ``_init_weights`` of the nearest enclosing model for each layer, children first.

    The method may write to a child's tensors, as GPT-2's does to projections. Therefore tensors of direct children are
    unsharded during the call, too.
    """
    nearest = waiting.models[id(layer)]
    model = nearest if nearest is layer else model
    for child in layer.children():
        _apply_own(child, model, waiting)
    if model is None:
        return
    pending = [(each, waiting.pending.get(id(each), [])) for each in (layer, *layer.children())]
    if any(names for _, names in pending):
        _call(lambda: model._init_weights(layer), pending, waiting)


def _call(method: Callable[[], object], pending: Pending, waiting: _Waiting) -> None:
    """Call an initialization method with full tensors in the layers, and copy this rank's parts of the results."""
    with ExitStack() as wholes:
        made = [(layer, names, wholes.enter_context(_unsharded(layer, names))) for layer, names in pending]
        method()
        for layer, names, own in made:
            for name in names:
                _copy_part(layer, name, own[name], waiting)


def _copy_part(layer: nn.Module, name: str, own: Tensor, waiting: _Waiting) -> None:
    whole = _found(layer, name).detach()
    unset = _unset(whole)
    if bool(unset.all()) and unset.numel():  # the method has not touched it
        return
    part, box = local_part(own.detach()), box_of(own)
    new = whole[box]
    if name in waiting.names_of(layer):
        part.copy_(new)
        if not bool(unset.any()):
            waiting.mark_initialized(layer, name)
    else:  # a second call has changed some elements, perhaps not all
        part.copy_(torch.where(unset[box], part.to(new.device), new))


@contextmanager
def _unsharded(layer: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Inside the block, replace a layer's tensors with full ones, which an initialization method can fill.

    The named tensors are replaced with full ones on the CPU, and all others with copies.
    """
    own = {name: tensor for name, tensor in (*layer._parameters.items(), *layer._buffers.items()) if tensor is not None}
    for name, tensor in own.items():
        if name in names:
            # On the CPU the random numbers do not depend on the model's device. The whole tensor is drawn, and a
            # sharded layer keeps its part of it: torch would give every part on a CPU the same numbers.
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device=CPU)
            _mark_unset(stand_in)
        elif tensor.is_meta or hasattr(tensor, "placements"):
            stand_in = tensor.detach().clone()
        else:
            stand_in = tensor.detach().to(CPU, copy=True)
        if name in layer._parameters:
            stand_in = Parameter(stand_in, tensor.requires_grad)
        if name not in names:
            setattr(stand_in, FLAG, True)
        _put(layer, name, stand_in)
    try:
        yield own
    finally:
        for name, tensor in own.items():
            _put(layer, name, tensor)


def _mark_unset(tensor: Tensor) -> None:
    # values that no init function gives; an unsigned or boolean tensor has none to spare
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(torch.nan)
    elif _is_signed(tensor):
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    else:
        tensor.zero_()


def _unset(tensor: Tensor) -> Tensor:
    """Return a mask of the elements that are still unset: they have the value that `_mark_unset` has written.

    For unsigned and boolean dtypes, which have no value to spare as a mark, all elements are False.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    if _is_signed(tensor):
        return tensor == torch.iinfo(tensor.dtype).min
    return torch.zeros_like(tensor, dtype=torch.bool)


def _is_signed(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


@contextmanager
def _flagged(module: nn.Module) -> Iterator[None]:
    """Inside the block, flag the tensors that will be loaded. Then transformers' init functions skip them."""
    tensors = [_found(layer, name) for layer, name, _ in pretrained.planned(module)]
    for tensor in tensors:
        setattr(tensor, FLAG, True)
    try:
        yield
    finally:
        for tensor in tensors:
            vars(tensor).pop(FLAG, None)


def _guarded() -> AbstractContextManager[object]:
    """Return a context in which torch's init functions also skip the tensors that `_flagged` has flagged."""
    if "transformers" not in sys.modules:
        return nullcontext()
    with suppress(ImportError):  # an older version
        found: AbstractContextManager[object] = import_module(
            "transformers.initialization"
        ).guard_torch_init_functions()
        return found
    return nullcontext()


# -- parameters and buffers ------------------------------------------------------------------------------------


def _on_meta(layer: nn.Module) -> Iterator[str]:
    own = {**layer._parameters, **layer._buffers}
    return (name for name, tensor in own.items() if tensor is not None and tensor.is_meta)


class _Ties:
    """Record of the layers that share tensors on the meta device, to restore the sharing after ``Module._apply``.

    Attributes:
        names: names of the tensors that a layer should initialize, by the layer's id.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        self.names: dict[int, list[str]] = {}
        for layer in module.modules():
            self.names[id(layer)] = []
            for name in _on_meta(layer):
                tensor = _found(layer, name)
                if id(tensor) not in self._places:  # only the first layer that shares it initializes it
                    self.names[id(layer)].append(name)
                self._places.setdefault(id(tensor), []).append((layer, name))

    def restore(self) -> None:
        """Make the layers share the tensors again, as before ``Module._apply``."""
        for (first, name), *others in self._places.values():
            for layer, other in others:
                _put(layer, other, _found(first, name))


def _found(layer: nn.Module, name: str) -> Tensor:
    found = layer._parameters[name] if name in layer._parameters else layer._buffers[name]
    assert found is not None
    return found


def _put(layer: nn.Module, name: str, tensor: Tensor | None) -> None:
    if name in layer._buffers:
        layer._buffers[name] = tensor
    else:
        assert tensor is None or isinstance(tensor, Parameter)
        layer._parameters[name] = tensor
