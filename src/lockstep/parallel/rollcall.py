"""Whether all ranks of a group are at the same point, and who is absent when a collective has failed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.ground import comm

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


class RollCall:
    """Asks all ranks of a group for the same thing at the same time, and compares.

    Args:
        group: the ranks.
        module: whose gradients are compared.
    """

    def __init__(self, group: comm.Group, module: nn.Module) -> None:
        self._group = group
        self._named: list[tuple[str, Tensor]] = list(
            module.named_parameters()
        )  # now: in a backward other tensors may stand in for them
        self._sums: dict[str, int] = {}

    def renew(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Compare the gradients of these parameters from now on."""
        self._named = list(named_parameters)

    def note(self, over: comm.Group | Literal[False] = None) -> None:
        """Remember the gradients as they are now; the next `answer` compares them.

        Args:
            over: the group of the round. After one of fewer ranks (False: of none) they differ, and are left out.
        """
        if over is False or comm.world_size(over) < comm.world_size(self._group):
            return
        self._sums = {name: checksum(p.grad) for name, p in self._named if p.grad is not None}

    def answer(self, stage: str, missing: list[str]) -> None:
        """Say where this rank is, and hear where the others are.

        Args:
            stage: a key of `STAGES`.
            missing: parameters whose gradients were not reduced on this rank.

        Raises:
            RuntimeError: on every rank, if they are not at the same stage, reductions were not issued, or gradients
                differ.
        """
        found: list[Any] = comm.all_gather_object((stage, missing, self._sums), self._group)
        self._sums = {}
        stages = [theirs for theirs, _, _ in found]
        if len(set(stages)) > 1:
            places = ", ".join(f"rank {rank} {STAGES[theirs]}" for rank, theirs in enumerate(stages))
            ahead = ", ".join(str(rank) for rank, theirs in enumerate(stages) if theirs == "forward")
            raise RuntimeError(
                f"check_reduction: the ranks are not at the same point: {places}. No backward has reached the "
                f"outputs of the last forward on rank {ahead}: let the loss depend on them (loss + 0 * outputs.sum()), "
                "or call skip_backward() there"
            )
        for rank, (_, names, _) in enumerate(found):
            if names:
                raise RuntimeError(
                    f"check_reduction: rank {rank} did not reduce the gradient of parameter {names[0]!r} in the last "
                    f"backward ({len(names)} in all): it ended early (did it raise?)"
                )
        self._compare([sums for _, _, sums in found])

    @staticmethod
    def _compare(sums: list[dict[str, int]]) -> None:
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
def named_failure(
    group: comm.Group, doing: str, number: int, noted: Callable[[Exception], Exception]
) -> Iterator[None]:
    """Where a collective fails in this block, say which rank was not there, and what it has said of itself.

    Args:
        group: the ranks of the collective.
        doing: what it is for; with ``number`` alike on every rank, and used once.
        number: of the round that comes, or is under way.
        noted: is given what is raised.
    """
    try:
        yield
    except Exception as error:
        lost = isinstance(error, dist.DistError) or LOST.search(QUOTED.sub("", str(error)))
        if not (lost and isinstance(error, RuntimeError)):
            leave_word(group, number, error)
            noted(error)
            raise
        absent = say_who_is_absent(group, f"{doing} of round {number}", number)
        said = f"rank {comm.rank(group)}, {doing} of round {number}: {absent}"
        raise noted(RuntimeError(said)) from error


def leave_word(group: comm.Group, number: int, error: Exception) -> None:
    """Before this rank, perhaps alone, raises ``error``: for the ranks that will miss it in round ``number``."""
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{_key(group, number)}{comm.rank(group)}", f"{type(error).__name__}: {error}")


def _key(group: comm.Group, moment: object) -> str:
    return f"lockstep/failed/{getattr(group or dist.group.WORLD, 'group_name', '')}/{moment}/"


def say_who_is_absent(group: comm.Group, moment: str, number: int) -> str:
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
