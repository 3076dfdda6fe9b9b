"""Checks that all ranks have the same module and gradients, and broadcasts of module states."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import does

# -- the start -----------------------------------------------------------------------------------------------


PIECE_BYTES = 250 * 2**20
"""Maximum number of bytes of a module's tensors that one broadcast sends together."""


def check_same_module(module: nn.Module, group: comm.Group = None) -> None:
    """Check that ``module`` has the same parameters and buffers, in the same order, on every rank of ``group``.

    Raises:
        ValueError: on every rank; names the first difference.
    """
    check_alike(type(module).__name__, describe(module), group)


def check_alike(what: str, mine: Sequence[str], group: comm.Group = None) -> None:
    """Raise an error unless the descriptions in ``mine`` are equal on all ranks of ``group``. Collective.

    Raises:
        MisconfigurationException: on every rank; names the first difference, or another rank's error from
            `raise_on_all`.
    """
    if comm.world_size(group) == 1:
        return
    # a hash is short; whole descriptions travel only to name the difference
    found = comm.all_gather_object((hashlib.sha256("\n".join(mine).encode()).hexdigest(), ""), group)
    for _, error in found:
        if error:
            raise MisconfigurationException(error)
    if len(set(found)) == 1:
        return
    first = comm.broadcast_object(list(mine), 0, group)
    for rank, difference in enumerate(comm.all_gather_object(_difference(first, mine), group)):
        if difference is not None:
            raise MisconfigurationException(
                f"{what} is not the same on every rank: rank 0 has {difference[0]}, rank {rank} has {difference[1]}. "
                "Build it the same way on every rank, independent of the rank's number"
            )


def _difference(first: Sequence[str], mine: Sequence[str]) -> tuple[str, str] | None:
    """Return the first pair of lines that differs between two lists; None if all lines are equal."""
    for pair in itertools.zip_longest(first, mine, fillvalue="nothing more"):
        if pair[0] != pair[1]:
            return pair
    return None


@contextlib.contextmanager
def raise_on_all(group: comm.Group) -> Iterator[None]:
    """Report an error in this block to the other ranks of ``group``, which raise it in their next `check_alike`."""
    try:
        yield
    except Exception as error:
        if comm.world_size(group) > 1:
            text = str(error) if isinstance(error, MisconfigurationException) else f"{type(error).__name__}: {error}"
            who = f"rank {comm.rank(group)}: "  # a message may start with it already
            with contextlib.suppress(RuntimeError):  # the connection is lost: other ranks have ended
                comm.all_gather_object(("", who + text.removeprefix(who)), group)
        raise


def describe(module: nn.Module, ignored: Collection[str] = ()) -> list[str]:
    """Return a line of text for each parameter and buffer of ``module``, in order, except those in ``ignored``."""
    lines = []
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
        ("tensor", _further(module)),
    ):
        lines += [described(kind, name, tensor) for name, tensor in named if name not in ignored]
    return lines


def described(kind: str, name: str, tensor: Tensor, more: str = "") -> str:
    """Return a line that describes a tensor by kind ("parameter", "buffer"), name, dtype, shape, and ``more``."""
    frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
    return f"{kind} {name!r} ({_kind(tensor)}{frozen}{more})"


def _further(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) for tensors in the state dict that are not parameters or buffers."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and id(value) not in known]


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "without a shape yet"
    laid = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return f"{tensor.dtype}, shape {tuple(tensor.shape)}{laid}"


def sparse_names(module: nn.Module) -> set[str]:
    """Return the names of embedding weights that get sparse gradients (``sparse=True``)."""
    layers = (nn.Embedding, nn.EmbeddingBag)
    found = {name for name, layer in module.named_modules() if isinstance(layer, layers) and layer.sparse}
    return {f"{name}.weight".lstrip(".") for name in found}


def state_tensors(module: nn.Module, ignored: Collection[str] = (), buffers: bool = True) -> list[Tensor]:
    """Return parameters, buffers (also non-persistent ones) and other tensors in the state dict, each once."""
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    if buffers:
        named += [*module.named_buffers(), *_further(module)]
    return [tensor for name, tensor in named if name not in ignored]


def broadcast_module_state(
    module: nn.Module,
    group: comm.Group = None,
    *,
    src: int = 0,
    ignored: Collection[str] = (),
    buffers: bool = True,
) -> None:
    """Overwrite the parameters and buffers of ``module`` with those of rank ``src``, bit for bit. Collective.

    Args:
        module: the same on every rank, apart from values (`check_same_module`).
        group: process group of the ranks; None: the default group.
        src: rank within the group whose values are sent.
        ignored: names of tensors that do not change.
        buffers: include buffers.
    """
    if comm.world_size(group) > 1:
        comm.broadcast_tensors(state_tensors(module, ignored, buffers), src, group, piece=PIECE_BYTES)


@does("taking rank 0's buffers")
def sync_buffers(module: nn.Module, group: comm.Group = None) -> None:
    """Overwrite the buffers of ``module`` with rank 0's, bit for bit. Loops call this function before each forward."""
    broadcast_buffers(module.buffers(), 0, group)


def broadcast_buffers(buffers: Iterable[Tensor], src: int, group: comm.Group) -> None:
    """Overwrite ``buffers`` with those of rank ``src``, without invalidating autograd graphs that saved them."""
    kept = tuple(buffers)
    # an earlier forward may have saved them for its backward
    with torch.autograd._unsafe_preserve_version_counter(kept):
        comm.broadcast_tensors(kept, src, group)


# -- desync check --------------------------------------------------------------------------------------------


STAGES = {
    "forward": "starts a forward",
    "backward": "starts a backward",
}


class DesyncCheck:
    """Debugging check that all ranks in a group are at the same stage and batch, with the same gradients."""

    def __init__(self, group: comm.Group, module: nn.Module) -> None:
        self._group = group
        # copied now: during a backward other tensors may replace them
        self._named: list[tuple[str, Tensor]] = list(module.named_parameters())
        self._sums: dict[str, int] = {}

    def renew(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the parameters whose gradients are compared."""
        self._named = list(named_parameters)

    def remember(self, over: comm.Group | Literal[False] = None) -> None:
        """Record checksums of the current gradients for the next `compare`.

        Args:
            over: the group that reduced the gradients; False: none did. If it is not the whole group, gradients differ
                and are not compared.
        """
        if over is False or comm.world_size(over) < comm.world_size(self._group):
            return
        self._sums = {name: checksum(p.grad) for name, p in self._named if p.grad is not None}

    def compare(self, stage: str, missing: list[str], batch: int | None = None) -> None:
        """Compare this rank's stage, batch and gradients with those of the other ranks. Collective.

        Args:
            stage: stage of the step.
            missing: parameters whose gradients were not reduced.
            batch: number of the batch, if ``training_step`` runs the backwards.

        Raises:
            RuntimeError: on every rank, if stages, batches or gradients differ, or gradients were not reduced.
        """
        found: list[Any] = comm.all_gather_object((stage, missing, self._sums, batch), self._group)
        self._sums = {}
        stages = [theirs for theirs, *_ in found]
        if len(set(stages)) > 1:
            places = ", ".join(f"rank {rank} {STAGES[theirs]}" for rank, theirs in enumerate(stages))
            ahead = ", ".join(str(rank) for rank, theirs in enumerate(stages) if theirs == "forward")
            raise RuntimeError(
                f"check_reduction: the ranks are at different points of a step: {places}. On rank {ahead} no "
                "backward has reached the outputs of the last forward. Make the loss depend on these outputs (loss + "
                "0 * outputs.sum()), or call skip_backward() on that rank"
            )
        batches = [theirs for *_, theirs in found]
        if len(set(batches)) > 1:
            places = ", ".join(f"rank {rank} in {batch}" for rank, batch in enumerate(batches))
            raise RuntimeError(
                f"check_reduction: the ranks reduce gradients of different batches: {places}. In manual "
                "optimization, `training_step` must run the same backwards on every rank. On a rank that skips a "
                "batch, call self.manual_backward(0 * loss), and step as the other ranks do"
            )
        for rank, (_, names, *_) in enumerate(found):
            if names:
                raise RuntimeError(
                    f"check_reduction: rank {rank} did not reduce the gradient of parameter {names[0]!r} in the last "
                    f"backward (number of missing gradients: {len(names)}), because the backward ended early (did it "
                    "raise?)"
                )
        # only after batches and reductions agree: otherwise gradients differ for one of the reasons above
        sums = [theirs for _, _, theirs, _ in found]
        for name in dict.fromkeys(name for theirs in sums for name in theirs):
            values = [theirs.get(name) for theirs in sums]
            if len(set(values)) > 1:
                usual = max(values, key=values.count)
                odd = [rank for rank, value in enumerate(values) if value != usual]
                raise RuntimeError(
                    f"check_reduction: after the last backward, rank {', '.join(map(str, odd))} had a gradient of "
                    f"parameter {name!r} that differs from the other ranks'. Check for code that writes gradients "
                    "on that rank only (a hook on the parameter, a communication hook that differs between ranks)"
                )


def checksum(grad: Tensor) -> int:
    """Return a checksum that depends on every bit of ``grad`` and its position."""
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.coalesce()
        return checksum(grad._values()) ^ checksum(grad._indices())
    if grad.is_complex():
        grad = torch.view_as_real(grad)
    flat = grad.contiguous().view(-1)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(whole).to(torch.int64)
    places = torch.arange(1, 2 * bits.numel() + 1, 2, device=bits.device)
    return int((bits * places).sum())
