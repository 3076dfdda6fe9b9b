"""Ranks start alike and stay alike: modules compared and sent at the start, and are checked for it in each step."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import does
from lockstep.ground.torch_support import DDP, refuse_without

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# -- the start -----------------------------------------------------------------------------------------------


PIECE_BYTES = 250 * 2**20
"""At most this much of a module's tensors is copied together for one broadcast."""


def check_same_module(module: nn.Module, group: comm.Group = None) -> None:
    """Make sure that ``module`` has the same parameters and buffers on every rank of ``group``, in the same
    order.

    Raises:
        ValueError: on every rank, naming the first difference.
    """
    check_alike(type(module).__name__, describe(module), group)


def check_alike(what: str, mine: Sequence[str], group: comm.Group = None) -> None:
    """Make sure that all ranks of ``group`` give the same lines.

    Raises:
        ValueError: on every rank, naming the first difference, or what another has raised in `raise_on_all`.
    """
    if comm.world_size(group) == 1:
        return
    found = comm.all_gather_object((hashlib.sha256("\n".join(mine).encode()).hexdigest(), ""), group)
    for _, said in found:
        if said:
            raise MisconfigurationException(said)
    if len(set(found)) == 1:
        return
    first = comm.broadcast_object(list(mine), 0, group)
    for rank, difference in enumerate(comm.all_gather_object(_difference(first, mine), group)):
        if difference is not None:
            raise MisconfigurationException(
                f"{what} is not the same on every rank: rank 0 has {difference[0]}, rank {rank} has {difference[1]}. "
                "Build it alike everywhere: nothing in it may depend on the rank"
            )


def _difference(first: Sequence[str], mine: Sequence[str]) -> tuple[str, str] | None:
    """The first lines that differ."""
    for pair in itertools.zip_longest(first, mine, fillvalue="nothing more"):
        if pair[0] != pair[1]:
            return pair
    return None


@contextlib.contextmanager
def raise_on_all(group: comm.Group) -> Iterator[None]:
    """Where this block raises, every rank of ``group`` does: the others in `check_alike`, which has to come next."""
    try:
        yield
    except Exception as error:
        if comm.world_size(group) > 1:
            said = str(error) if isinstance(error, MisconfigurationException) else f"{type(error).__name__}: {error}"
            who = f"rank {comm.rank(group)}: "
            with contextlib.suppress(RuntimeError):  # of the connection: others have ended
                comm.all_gather_object(("", who + said.removeprefix(who)), group)
        raise


def describe(module: nn.Module, ignored: Collection[str] = ()) -> list[str]:
    """A line for each parameter and buffer of ``module``, in order, but for those with ``ignored`` names."""
    lines = []
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
        ("tensor", _further(module)),
    ):
        lines += [described(kind, name, tensor) for name, tensor in named if name not in ignored]
    return lines


def described(kind: str, name: str, tensor: Tensor, more: str = "") -> str:
    """A line for a tensor: its kind ("parameter", "buffer", ...), its name, what it is, and ``more``."""
    frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
    return f"{kind} {name!r} ({_kind(tensor)}{frozen}{more})"


def _further(module: nn.Module) -> list[tuple[str, Tensor]]:
    """What the state dict holds beside parameters and buffers."""
    known = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    state = module.state_dict(keep_vars=True)
    return [(name, value) for name, value in state.items() if isinstance(value, Tensor) and id(value) not in known]


def _kind(tensor: Tensor) -> str:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "without a shape yet"
    laid = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return f"{tensor.dtype}, shape {tuple(tensor.shape)}{laid}"


def find_group(group: comm.Group, mesh: DeviceMesh | None, module: nn.Module) -> Any:
    """The process group of a container: the given one, that of the mesh, or the default one.

    Args:
        group: None for the default one.
        mesh: a device mesh, if any; where it is a part of a larger one, ``module`` is made ready for that.
        module: what is wrapped.

    Raises:
        ValueError: there is none, or this rank is not in it.
        MisconfigurationException: this torch lacks what a container needs.
    """
    refuse_without(DDP, DDP, "train on one device")
    if not comm.is_distributed():
        raise MisconfigurationException(
            "DistributedDataParallel: Default process group has not been initialized; call "
            "torch.distributed.init_process_group(...) first, on every rank"
        )
    if group is not None and mesh is not None:
        raise MisconfigurationException("Cannot specify both process_group and device_mesh arguments. Give one of them")
    if mesh is not None:
        if mesh.ndim != 1:
            raise MisconfigurationException(
                f"Only 1D device mesh is supported, and device_mesh={mesh!r} has {mesh.ndim} dimensions: give one of "
                "them, as in mesh['replicate']"
            )
        if mesh._get_root_mesh() != mesh:
            from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

            _pre_dp_module_transform(module)
        group = mesh.get_group(mesh_dim=0)
    found = dist.group.WORLD if group is None else group
    if dist.get_rank(found) < 0:
        raise MisconfigurationException(
            f"process_group: rank {dist.get_rank()} (of {dist.get_world_size()}) is not in it; wrap the model on its "
            "members only"
        )
    for parameter in module.parameters() if isinstance(module, nn.Module) else ():
        comm.travel_by(parameter.device, found)
        break
    return found


def sparse_names(module: nn.Module) -> set[str]:
    """Parameters of layers that were built with sparse=True."""
    layers = (nn.Embedding, nn.EmbeddingBag)
    found = {name for name, layer in module.named_modules() if isinstance(layer, layers) and layer.sparse}
    return {f"{name}.weight".lstrip(".") for name in found}


def _problem_of(parameter: Tensor) -> str | None:
    """Why a parameter has no gradient that can be averaged, if so, and the way out."""
    if isinstance(parameter, UninitializedParameter):
        return "belongs to a lazy module and has no shape yet: run one batch through the model before it is wrapped"
    if parameter.is_meta:
        return (
            "is on the meta device and has no values: give it some before the model is wrapped "
            "(module.to_empty(device=...), then load a state dict or reset its parameters)"
        )
    if any(step == 0 and size > 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True)):
        return (
            "is expanded: several of its elements are one place in memory, of which an optimizer would write each; "
            "build it from a tensor of its own (tensor.expand(...).clone())"
        )
    return None


def _inner_container(module: nn.Module, trained: set[int], group: comm.Group) -> str | None:
    """The name of a part that averages some of the ``trained`` parameters itself: torch's container, or ours."""
    for name, part in module.named_modules():
        own = (id(parameter) for parameter in part.parameters())
        averages = hasattr(part, "require_backward_grad_sync") and not trained.isdisjoint(own)
        if averages and not (part is module and _yields(part, group)):
            return name
    return None


def find_unusable(module: nn.Module, ignored: Collection[str] = (), group: comm.Group = None) -> str | None:
    """Why gradients of ``module`` cannot be averaged, if so: what is wrong with which parameter, and the way out.

    A container of lockstep may be wrapped again, whole and over the same ``group``: the outer one averages then.
    """
    if not isinstance(module, nn.Module):
        return f"module={module!r}: give a torch.nn.Module"
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    kind = type(module).__name__
    for name, parameter in named:
        problem = _problem_of(parameter)
        if problem is not None:
            return f"parameter {name!r} of {kind} {problem}"
    inner = _inner_container(module, {id(parameter) for _, parameter in named if parameter.requires_grad}, group)
    if inner is not None:
        where = f"part {inner!r} of {kind}" if inner else "the module"
        return (
            f"{where} is a DistributedDataParallel already, and two cannot average the same gradients: wrap the "
            "model as a whole, once"
        )
    types = sorted({parameter.device.type for _, parameter in named})
    if len(types) > 1:
        return f"{kind} has parameters on {' and '.join(types)}; move it to devices of one type"
    if not any(parameter.requires_grad for _, parameter in named):
        return f"{kind}: no parameter requires a gradient, so there is nothing to average; use the module as it is"
    return None


def _yields(container: nn.Module, group: comm.Group) -> bool:
    """Whether this container can let another one of ``group`` do its work."""
    if not hasattr(container, "use_reducer"):
        return False
    settings = vars(container)
    ours = settings["process_group"] is group
    return ours and not (settings["parameters_to_ignore"] or (settings["device_ids"] or ())[1:])


def state_tensors(module: nn.Module, ignored: Collection[str] = (), buffers: bool = True) -> list[Tensor]:
    """Parameters, buffers (also those that no state dict holds) and what else a state dict holds, each once."""
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
    """Overwrite the parameters and buffers of ``module`` with those of rank ``src``, bitwise.

    Args:
        module: alike on every rank (`check_same_module`).
        group: the ranks.
        src: whose values all take, counted in the group.
        ignored: names that are left alone.
        buffers: whether buffers, too.
    """
    if comm.world_size(group) > 1:
        comm.broadcast_tensors(state_tensors(module, ignored, buffers), src, group, piece=PIECE_BYTES)


@does("taking rank 0's buffers")
def sync_buffers(module: nn.Module, group: comm.Group = None) -> None:
    """Overwrite the buffers of ``module`` with rank 0's, bitwise; a loop does it before each forward."""
    broadcast_buffers(module.buffers(), 0, group)


def broadcast_buffers(buffers: Iterable[Tensor], src: int, group: comm.Group) -> None:
    """Overwrite ``buffers`` with those of rank ``src``, in a way that a backward under way does not mind."""
    kept = tuple(buffers)
    # a forward before this one may have saved them for its backward
    with torch.autograd._unsafe_preserve_version_counter(kept):
        comm.broadcast_tensors(kept, src, group)


def buffers_in_forwards(forward_sync_buffers: bool | None, broadcast_buffers: bool | None) -> bool:
    """What a container's two arguments say about its buffers; the older one is deprecated, as in torch."""
    if broadcast_buffers is not None:
        warnings.warn(
            f"broadcast_buffers={broadcast_buffers} is deprecated: say forward_sync_buffers={broadcast_buffers} (with "
            "it, buffers are rank 0's at the start in any case), which counts where both are given",
            FutureWarning,
            stacklevel=3,
        )
    return next(value for value in (forward_sync_buffers, broadcast_buffers, True) if value is not None)


# -- desync check and absent ranks ---------------------------------------------------------------------------


PATIENCE = 3.0
"""Seconds in which ranks that failed in the same collective report; they fail within moments of each other."""

LOST = re.compile("gloo|nccl|connection|timed? ?out|left|gone", re.IGNORECASE)
"""What a failed collective says, unlike an error of this rank's own."""
QUOTED = re.compile("'[^']*'")
"""Names in an error: a parameter may be called left."""

STAGES = {
    "forward": "begins a forward",
    "backward": "begins a backward",
}


class DesyncCheck:
    """Asks all ranks of a group for the same thing at the same time, and compares."""

    def __init__(self, group: comm.Group, module: nn.Module) -> None:
        self._group = group
        self._named: list[tuple[str, Tensor]] = list(
            module.named_parameters()
        )  # now: in a backward other tensors may stand in for them
        self._sums: dict[str, int] = {}

    def renew(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the gradients of these parameters from now on."""
        self._named = list(named_parameters)

    def remember(self, over: comm.Group | Literal[False] = None) -> None:
        """Remember the gradients as they are now; the next `compare` compares them.

        Args:
            over: the group of the round. After one of fewer ranks (False: of none) they differ, and are left out.
        """
        if over is False or comm.world_size(over) < comm.world_size(self._group):
            return
        self._sums = {name: checksum(p.grad) for name, p in self._named if p.grad is not None}

    def compare(self, stage: str, missing: list[str], batch: int | None = None) -> None:
        """Say where this rank is, and hear where the others are.

        Args:
            stage: of the step.
            missing: parameters whose gradients were not reduced.
            batch: the number of the batch, where ``training_step`` makes the backwards.

        Raises:
            RuntimeError: on every rank, if they are not at the same stage or in the same batch, reductions were not
                issued, or gradients differ.
        """
        found: list[Any] = comm.all_gather_object((stage, missing, self._sums, batch), self._group)
        self._sums = {}
        stages = [theirs for theirs, *_ in found]
        if len(set(stages)) > 1:
            places = ", ".join(f"rank {rank} {STAGES[theirs]}" for rank, theirs in enumerate(stages))
            ahead = ", ".join(str(rank) for rank, theirs in enumerate(stages) if theirs == "forward")
            raise RuntimeError(
                f"check_reduction: the ranks are not at the same point: {places}. No backward has reached the "
                f"outputs of the last forward on rank {ahead}: let the loss depend on them (loss + 0 * outputs.sum()), "
                "or call skip_backward() there"
            )
        self._compare_batches([theirs for *_, theirs in found])
        for rank, (_, names, *_) in enumerate(found):
            if names:
                raise RuntimeError(
                    f"check_reduction: rank {rank} did not reduce the gradient of parameter {names[0]!r} in the last "
                    f"backward ({len(names)} in all): it ended early (did it raise?)"
                )
        self._compare_gradients([sums for _, _, sums, _ in found])

    @staticmethod
    def _compare_batches(batches: list[int | None]) -> None:
        if len(set(batches)) > 1:
            places = ", ".join(f"rank {rank} in {batch}" for rank, batch in enumerate(batches))
            raise RuntimeError(
                f"check_reduction: the ranks reduce gradients of different batches: {places}. A `training_step` of "
                "manual optimization has to make the same backwards on every rank: where one rank leaves a batch out, "
                "call self.manual_backward(0 * loss) there, and step as the others do"
            )

    @staticmethod
    def _compare_gradients(sums: list[dict[str, int]]) -> None:
        names = list(dict.fromkeys(name for theirs in sums for name in theirs))
        for name in names:
            values = [theirs.get(name) for theirs in sums]
            if len(set(values)) > 1:
                usual = max(values, key=values.count)
                odd = [rank for rank, value in enumerate(values) if value != usual]
                raise RuntimeError(
                    f"check_reduction: after the last backward rank {', '.join(map(str, odd))} had another gradient of "
                    f"parameter {name!r} than the others: something but the reduction writes gradients there (a hook "
                    "on the parameter, a communication hook that is not the same on every rank)"
                )


def checksum(grad: Tensor) -> int:
    """A number that depends on every bit of ``grad`` and on its place."""
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


@contextlib.contextmanager
def named_failure(group: comm.Group, doing: str, number: int) -> Iterator[None]:
    """Where a collective fails in this block, say which rank was not there, and what it has said of itself.

    Args:
        group: the ranks of the collective.
        doing: what it is for; with ``number`` alike on every rank, and used once.
        number: of the round that comes, or is under way.
    """
    try:
        yield
    except Exception as error:
        lost = isinstance(error, dist.DistError) or LOST.search(QUOTED.sub("", str(error)))
        if not (lost and isinstance(error, RuntimeError)):
            report_failure(group, number, error)
            raise
        absent = describe_absent(group, f"{doing} of round {number}", number)
        raise RuntimeError(f"rank {comm.rank(group)}, {doing} of round {number}: {absent}") from error


def report_failure(group: comm.Group, number: int, error: Exception) -> None:
    """Before this rank, perhaps alone, raises ``error``: for the ranks that will miss it in round ``number``."""
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_key(group, number)}{comm.rank(group)}", f"{type(error).__name__}: {error}")


def _key(group: comm.Group, moment: object) -> str:
    return f"lockstep/failed/{getattr(group or dist.group.WORLD, 'group_name', '')}/{moment}/"


def describe_absent(group: comm.Group, moment: str, number: int) -> str:
    """After a collective has failed here: the ranks of ``group`` that do not report the same, in a sentence.

    Args:
        group: the ranks of the collective.
        moment: which one it was; alike on every rank, and used once.
        number: of its round.
    """
    mine = comm.rank(group)
    try:
        store = dist.distributed_c10d._get_default_store()
        here, words = _key(group, moment), _key(group, number)
        store.set(f"{here}{mine}", "1")
        absent = [rank for rank in range(comm.world_size(group)) if rank != mine]
        said: dict[int, str] = {}
        until = time.monotonic() + PATIENCE
        while len(said) < len(absent) and time.monotonic() < until:
            absent = [rank for rank in absent if not store.check([f"{here}{rank}"])]
            for rank in absent:
                if rank not in said and store.check([f"{words}{rank}"]):
                    said[rank] = store.get(f"{words}{rank}").decode()
            time.sleep(0.05)
    except RuntimeError:  # DistError and its kind are
        return "the ranks' common store does not answer: the process that keeps it, that of rank 0, has ended"
    if not absent:
        return "all ranks were there: the connection between them failed"
    for rank in absent:
        if rank in said:
            return f"rank {rank} was not there: it raised {said[rank]}"
    who = f"rank {absent[0]} was" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))} were"
    return (
        f"{who} not there: gone, failed, or elsewhere in its program (a loss that depends on no output of the model, a "
        "batch more or less than on the other ranks: see skip_backward() and join())"
    )
