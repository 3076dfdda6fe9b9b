"""Checkpoints that omit frozen weights and contain hashes of the omitted weights, independent of the sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.checkpoint.pretrained import FOLDER, shown
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.parameters import (
    is_placeholder,
    local_part,
    partition_values,
    plain_name,
    starts_of,
    state_dicts_without,
    whole_shape,
)
from lockstep.ground.rank import rank_zero_warn

KEY = "base"
"""Key in lockstep's part of a checkpoint under which the omitted weights are described."""
PIECE = 2**20
"""Number of elements that are hashed at a time."""
FACTORS = (-7046029254386353131, -4417276706812531889, -7723592293110705685)
"""Factors of the hash, from splitmix64 and xxHash, as signed 64-bit numbers."""

OTHERS = (
    "{call}: the checkpoint has only trained weights, and lacks {count} frozen tensors of {base} ({elements:,} "
    "elements). This module, however, has {here} tensors ({own:,} elements) that the checkpoint lacks{first}. Build "
    "the module as in the run that saved it, with the same layers frozen, or save a complete checkpoint."
)
ANOTHER = (
    "{call}: the adapter was trained on the base {base}, which differs from this module's base {own} in {count} of "
    "{all} frozen tensors: {names}. First load the adapter's base, for example with "
    "lockstep.load_pretrained(model, FOLDER), or set `strict_loading = False` in the module to load anyway."
)
OTHER_DTYPE = (
    "{call}: the adapter was trained on frozen weights in {there}, but this module's frozen weights are in {here}, "
    "so the bases cannot be compared. Load the base in {there} to have the bases compared."
)


def plain(name: str) -> str:
    """Return a parameter name without the prefixes that wrappers such as DDP and ``torch.compile`` add."""
    return plain_name(name).replace("_orig_mod.", "")


SOON_HASHED = 2**25
"""Number of elements that one CPU core hashes in about a third of a second."""


class _Version:
    """A record of a tensor's version, to detect later writes to the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = ref(tensor)
        # a tensor made in inference mode has no version, and reading it raises
        self._at_start = 0 if tensor.is_inference() else tensor._version

    def is_written(self) -> bool:
        """Return True if the tensor still exists and was written since this object was created.

        Writes to ``.data`` are not detected.
        """
        tensor = self._tensor()
        return tensor is not None and not tensor.is_inference() and tensor._version != self._at_start


class FrozenBase:
    """Tracker of the parameters that are frozen when a fit starts. Checkpoints omit those that stay unchanged.

    Args:
        module: the module at the start of the fit.
        absent: parameter names that the checkpoint to resume from omits; None: no checkpoint, or a complete one.
    """

    def __init__(self, module: nn.Module, absent: Iterable[str] | None = None) -> None:
        self._module = module
        known = None if absent is None else frozenset(absent)
        self._names = frozenset(name for name in _frozen(module) if known is None or name in known)
        # Hashes decide what has changed. Versions alone would not: ``.data`` is written without a new version, and
        # shards and blocks that move become new tensors without a change.
        self._at_start: dict[str, int | None] | None = None
        named = dict(module.named_parameters(remove_duplicate=False))
        #: number of elements of all frozen parameters, on all ranks together
        self.elements = _elements({name: each for name, each in named.items() if plain(name) in self._names})
        self._versions = {plain(name): _Version(tensor) for name, tensor in named.items() if plain(name) in self._names}

    def is_of(self, module: nn.Module) -> bool:
        """Return True if this object was created for `module`."""
        return self._module is module

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Record hashes of the frozen parameters, to detect changes later. Collective.

        Without this call the first `record` stores the hashes, except for tensors whose version has changed by then.
        """
        self._at_start = self._hashes(self._own(parameters))

    def left_out(self) -> AbstractContextManager[None]:
        """Return a context in which state dicts omit frozen parameters, except those that `record` found changed."""
        names = self._names.intersection(_frozen(self._module))
        return state_dicts_without(self._module, lambda name: plain(name) in names)

    def record(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return a description of the parameters that checkpoints omit, to store in a checkpoint. Collective.

        A tensor that has changed since the start, such as a target network's, is no longer omitted.

        Args:
            parameters: the module's parameters by name, as this rank holds them.
        """
        own = self._own(parameters)
        now = self._hashes(own)
        if self._at_start is None:
            written = {name for name, version in self._versions.items() if version.is_written()}
            self._at_start = {name: number for name, number in now.items() if name not in written}
        start = self._at_start
        # by id: a tied parameter has several names, and all of them count as changed
        changed = {id(own[name]) for name, number in now.items() if number is None or number != start.get(name)}
        named = self._module.named_parameters(remove_duplicate=False)
        self._names -= {plain(name) for name, parameter in named if id(parameter) in changed}
        left_out = {name: each for name, each in own.items() if id(each) not in changed}
        return _describe(left_out, [now[name] for name in left_out], base_name(self._module)) if left_out else {}

    def _own(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {plain(name): each for name, each in parameters.items()}
        return {name: each for name, each in own.items() if name in self._names and not each.requires_grad}

    def _hashes(self, own: Mapping[str, Tensor]) -> dict[str, int | None]:
        return dict(zip(own, hashes_of(own), strict=True)) if own else {}


def _frozen(module: nn.Module) -> Iterator[str]:
    named = module.named_parameters(remove_duplicate=False)
    return (plain(name) for name, parameter in named if not parameter.requires_grad)


def base_name(module: nn.Module) -> str:
    """Return a name for a module's initial weights: the folder from which they were loaded, or the module's class."""
    for layer in module.modules():
        folder = vars(layer).get(FOLDER)
        if folder is not None:
            return repr(folder)
    given = (getattr(getattr(layer, "config", None), "name_or_path", None) for layer in module.modules())
    named = next((name for name in given if isinstance(name, str) and name), None)
    return type(module).__name__ if named is None else repr(named)


def _describe(parameters: Mapping[str, Tensor], hashes: Sequence[int | None], base: str) -> dict[str, Any]:
    """Return a dict that describes the omitted parameters, by which `check` recognizes the base weights."""
    return {
        "of": base,
        "hashes": torch.tensor(hashes, dtype=torch.int64),
        "names": _digest(parameters),
        "elements": _elements(parameters),
        "dtypes": _dtypes(parameters),
    }


def _digest(parameters: Mapping[str, Tensor]) -> str:
    text = "\n".join(f"{name} {tuple(whole_shape(each))}" for name, each in parameters.items())
    return hashlib.sha256(text.encode()).hexdigest()


def _elements(parameters: Mapping[str, Tensor]) -> int:
    return sum(whole_shape(each).numel() for each in parameters.values())


def _dtypes(parameters: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted({str(each.dtype).removeprefix("torch.") for each in parameters.values()}))


@contextmanager
def lenient(module: Any, absent: Collection[str]) -> Iterator[None]:
    """Within a context, disable strict loading of a LightningModule if the checkpoint omits any parameter."""
    before = module._strict_loading
    if absent:
        module.strict_loading = False
    try:
        yield
    finally:
        module._strict_loading = before


def without(state: Mapping[str, Any], absent: Collection[str]) -> dict[str, Any]:
    """Return a copy of a state dict without the parameters in ``absent``."""
    left_out = set(absent)
    return {name: value for name, value in state.items() if plain(name) not in left_out}


def absent_of(checkpoint: Mapping[str, Any], module: nn.Module) -> list[str] | None:
    """Return the names of the module's parameters that a checkpoint omits, or None for a complete checkpoint."""
    if _description(checkpoint) is None:
        return None
    there = checkpoint["state_dict"]
    saved = {plain(name) for name in there}
    named = module.named_parameters(remove_duplicate=False)
    return [plain(name) for name, _ in named if plain(name) not in saved]


def base_of(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the name of the base weights that a checkpoint omits, or None for a complete checkpoint."""
    record = _description(checkpoint)
    return None if record is None else str(record.get("of"))


def _description(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    own = checkpoint.get("lockstep")
    found = own.get(KEY) if isinstance(own, Mapping) else None
    return found if isinstance(found, dict) else None


def check(checkpoint: Mapping[str, Any], module: nn.Module, parameters: Mapping[str, Tensor], call: str) -> None:
    """Raise if a checkpoint's weights were trained with other frozen weights than the module's. Collective.

    Args:
        checkpoint: a loaded checkpoint, which may be complete; then nothing is checked.
        module: the module with its frozen weights loaded.
        parameters: parameters of the module by name, as this rank holds them.
        call: name of the user's call, for messages.

    Raises:
        MisconfigurationException: the frozen weights have other names or values; raised on every rank.
    """
    record, absent = _description(checkpoint), absent_of(checkpoint, module)
    if record is None or absent is None:
        return
    left_out = set(absent)
    own = {plain(name): each for name, each in parameters.items() if plain(name) in left_out}
    if _digest(own) != record["names"]:
        first = f" ({shown(list(own))})" if own else ""
        numbers = {"count": len(record["hashes"]), "elements": record["elements"], "here": len(own)}
        raise MisconfigurationException(
            OTHERS.format(call=call, base=record["of"], own=_elements(own), first=first, **numbers)
        )
    here = _dtypes(own)
    if here != record["dtypes"]:  # hashes are of bits, which a cast changes
        rank_zero_warn(OTHER_DTYPE.format(call=call, there=record["dtypes"], here=here))
        return
    pairs = zip(own, hashes_of(own), record["hashes"].tolist(), strict=True)
    differing = [name for name, found, saved in pairs if found != saved]
    if differing:
        numbers = {"count": len(differing), "all": len(own)}
        raise MisconfigurationException(
            ANOTHER.format(call=call, base=record["of"], own=base_name(module), names=shown(differing), **numbers)
        )


# -- hashes ----------------------------------------------------------------------------------------------------


def hashes_of(parameters: Mapping[str, Tensor]) -> list[int | None]:
    """Return a 64-bit hash of each parameter, independent of the sharding. Collective.

    Each rank hashes its own parts, and the results are added. A replicated part counts once, with the first rank's
    value. The hash is None for a parameter that cannot be read (lazy, or of a custom class).
    """
    mine: dict[tuple[str, tuple[int, ...]], int | None] = {}
    for name, parameter in parameters.items():
        try:
            part, begins, shape = _part_of(parameter)
            own = _hash(part, begins, shape) if part.numel() else 0
        except (RuntimeError, TypeError, ValueError):
            mine[name, ()] = None
        else:
            if own != 0:
                mine[name, tuple(begins)] = own
    merged: dict[tuple[str, tuple[int, ...]], int | None] = {}
    for of_rank in reversed(comm.all_gather_object(mine, None)):  # the first rank's value stays
        merged |= of_rank
    unread = {name for (name, _), number in merged.items() if number is None}
    sums = dict.fromkeys(parameters, 0)
    for (name, _), number in merged.items():
        sums[name] += number or 0
    return [None if name in unread else (number + 2**63) % 2**64 - 2**63 for name, number in sums.items()]


def _part_of(parameter: Any) -> tuple[Tensor, list[int], Sequence[int]]:
    """Return this rank's part of a parameter, the offsets of the part, and the parameter's full shape.

    Offset and shape are those of the flattened parameter if DeepSpeed has divided it.
    """
    if hasattr(parameter, "ds_tensor"):
        numel, rank = parameter.ds_shape.numel(), comm.rank(None)
        start = min(rank * parameter.ds_tensor.numel(), numel)
        return partition_values(parameter, rank), [start], (numel,)
    if is_placeholder(parameter):
        return torch.empty(0), [0], (0,)
    return local_part(parameter.detach()), starts_of(parameter), parameter.shape


def _hash(part: Tensor, begins: Sequence[int], shape: Sequence[int]) -> int:
    """Return the sum of the hashes of a part's elements. Each hash depends on the element's bits and position."""
    if not part.dim():
        part, begins, shape = part.reshape(1), [0], (1,)
    rows = max(1, PIECE // max(1, part[0].numel()))
    total = 0
    for at in range(0, len(part), rows):
        piece = part[at : at + rows]
        total += _mixed(piece, _places(piece, [begins[0] + at, *begins[1:]], shape))
    return total


def _places(part: Tensor, begins: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return each element's index in the flattened full tensor."""
    places, stride = torch.zeros((), dtype=torch.int64, device=part.device), 1
    for dim in reversed(range(part.dim())):
        own = torch.arange(begins[dim], begins[dim] + part.shape[dim], device=part.device) * stride
        places = places + own.reshape(-1, *[1] * (part.dim() - 1 - dim))
        stride *= shape[dim]
    return places


def _mixed(part: Tensor, places: Tensor) -> int:
    part = torch.view_as_real(part) if part.is_complex() else part
    size = part.element_size()
    # bits and not values, so that -0.0 and nan count
    words = part.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    places = places.unsqueeze(-1) * 2 + torch.arange(2, device=part.device) if words.dim() > places.dim() else places
    first, second, third = FACTORS
    mixed = words.to(torch.int64).add(1).mul_(first).add_(places, alpha=second)
    mixed ^= mixed >> 31
    mixed *= third
    mixed ^= mixed >> 29
    return int(mixed.sum())
