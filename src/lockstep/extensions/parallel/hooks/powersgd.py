"""PowerSGD: each matrix of gradients travels as two thin ones (Vogels, Karimireddy and Jaggi, 2019)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.extensions.parallel.hooks.compress import allreduce, mean, mean_in_halves, real
from lockstep.extensions.parallel.hooks.error_feedback import Memory, Record
from lockstep.extensions.parallel.hooks.grad_bucket import GradBucket
from lockstep.extensions.parallel.hooks.hook_transport import submit
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException


class PowerSGDState:
    """Settings and memory of `power_sgd`.

    Args:
        rank: columns of the thin matrices. 1 to 4 is usual; a matrix with fewer rows or columns takes as many.
        start: rounds with the plain mean before; at least 0. Gradients change fastest at the beginning, where an
            approximation from the round before is worth least: a tenth of the training is usual.
        min_compression_rate: a matrix travels compressed if that takes less than one part in so many of its bytes.
        error_feedback: add to each gradient what the approximation has left out so far. It takes the memory of the
            compressed gradients once more, in float32 (or in their own dtype, if that is wider). Without it, training
            loses what does not fit into the rank.
        warm_start: begin with the approximation of the round before; without it, with random vectors.
        seed: of the random vectors; the same on all ranks.
        process_group: the ranks; ``None`` is the default group.

    Attributes:
        iteration: rounds so far.
        numbers, numbers_sent: gradients of compressed rounds so far, and what travelled for them.

    Raises:
        MisconfigurationException: for a rank below 1, a negative number elsewhere, or parts of rounds.
    """

    def __init__(
        self,
        rank: int = 1,
        *,
        start: int = 1000,
        min_compression_rate: float = 2.0,
        error_feedback: bool = True,
        warm_start: bool = True,
        seed: int = 0,
        process_group: comm.Group = None,
    ) -> None:
        whole = isinstance(rank, int) and isinstance(start, int)
        if not whole or rank < 1 or start < 0 or min_compression_rate < 0:
            raise MisconfigurationException(
                f"PowerSGDState(rank={rank!r}, start={start!r}, min_compression_rate={min_compression_rate}): rank is "
                "a whole number above 0, start one of at least 0, and the rate is at least 0"
            )
        self.process_group = process_group
        self.rank = rank
        self.start = start
        self.min_compression_rate = min_compression_rate
        self.error_feedback = error_feedback
        self.warm_start = warm_start
        self.seed = seed
        self.iteration = 0
        self.numbers = 0
        self.numbers_sent = 0
        self._memory = Memory()

    @property
    def memory_bytes(self) -> int:
        """Bytes that this rank keeps from one round to the next."""
        return self._memory.bytes

    def state_dict(self) -> dict[str, Any]:
        """Progress and memory of this rank (each rank has its own errors): tensors and plain types."""
        return {"iteration": self.iteration, "memory": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was saved, by this rank; settings stay those of the constructor."""
        self.iteration = state["iteration"]
        self._memory.load_state_dict(state["memory"])


def power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, approximated by matrices of rank ``state.rank``: (n + m) r numbers travel for n x m.

    A gradient of n rows (its first dimension) with m numbers each is M on this rank. All ranks multiply M, and what
    they owe to it, with the same thin matrix Q, average P = M Q and make its columns orthonormal; then they average
    Q = M^T P, and P Q^T is the mean's approximation. That is a step of the power iteration: with a warm start, Q
    follows the largest singular vectors from round to round. Vectors, scalars and matrices that would not be smaller
    travel as they are, in one message with the Ps: two messages a bucket.

    Gradients of fp16 and bf16 travel in their dtype and are summed in float32. Where a gradient is inf or NaN, its
    matrix is NaN on all ranks, and nothing of that round is kept for the next.

    Ranks orthogonalize for themselves: they end with the same bits on processors of one kind.

    Args:
        state: settings and memory.
        bucket: gradients of any floating point dtype; complex ones count as pairs of real numbers.

    Example::

        model.register_comm_hook(PowerSGDState(rank=4, start=100), power_sgd)
    """
    group, round_ = state.process_group, state.iteration
    state.iteration += bucket.is_last()
    if round_ < state.start:
        return allreduce(group, bucket)

    def reduce(own: comm.Group) -> Tensor:
        _Round(state, bucket, round_).run(own)
        return bucket.buffer()

    return submit(group, bucket.buffer().device, reduce)


class _Matrix(NamedTuple):
    """A gradient that travels compressed."""

    place: int  # among the bucket's parameters
    absent: bool  # no gradient in this round: what is owed waits
    values: Tensor  # (n, m); a view of the buffer, unless that has 16 bits
    record: Record
    rank: int


class _Round:
    """One bucket's way."""

    def __init__(self, state: PowerSGDState, bucket: GradBucket, round_: int) -> None:
        self.state = state
        self.bucket = bucket
        self.round = round_
        self.flat = real(bucket.buffer())
        self.half = self.flat.dtype if self.flat.element_size() == 2 else None
        self.work = self.flat.float() if self.half else self.flat
        self.matrices: list[_Matrix] = []
        self.rest: list[Tensor] = []
        self._sort()

    def _sort(self) -> None:
        width = self.flat.numel() // max(1, self.bucket.buffer().numel())  # 2 for complex numbers
        origin = self.bucket.buffer().storage_offset()
        records, absent = self.state._memory.records(self.bucket), self.bucket.absent
        laid = zip(self.bucket.gradients(), self.bucket.parameters(), records, strict=True)
        for place, (gradient, parameter, record) in enumerate(laid):
            start, size = width * (gradient.storage_offset() - origin), width * gradient.numel()
            part = self.work[start : start + size]
            rows = _rows(parameter)
            columns = size // rows if rows else 0
            rank = min(rows, columns, self.state.rank)
            sent = (rows + columns) * rank
            if rank and sent * self.state.min_compression_rate < size:
                self.matrices.append(_Matrix(place, place in absent, part.view(rows, columns), record, rank))
            else:
                self.rest.append(part)
                sent = size
            self.state.numbers += size
            self.state.numbers_sent += sent
        # matrices of one shape stand together, and are orthogonalized together
        self.matrices.sort(key=lambda matrix: (*matrix.values.shape, matrix.place))

    def run(self, group: comm.Group) -> None:
        """Exchange, and leave the approximated mean in the buffer."""
        matrices = self.matrices
        if self.state.error_feedback:
            for matrix in matrices:
                if "error" not in matrix.record:
                    matrix.record["error"] = torch.zeros_like(matrix.values)
                if not matrix.absent:
                    matrix.values.add_(matrix.record["error"])
        sides = self._begin()
        loose = sum(part.numel() for part in self.rest)
        first = self.work.new_empty(loose + sum(m.values.shape[0] * m.rank for m in matrices))
        if self.rest:
            torch.cat(self.rest, out=first[:loose])
        ps = _views(first[loose:], [(matrix.values.shape[0], matrix.rank) for matrix in matrices])
        for matrix, p, q in zip(matrices, ps, sides, strict=True):
            torch.mm(matrix.values, q, out=p)
        self._average(first, group)
        for part, averaged in zip(self.rest, first[:loose].split([part.numel() for part in self.rest]), strict=True):
            part.copy_(averaged)
        if matrices:
            self._second(ps, group)
        if self.half:
            self.flat.copy_(self.work)

    def _begin(self) -> list[Tensor]:
        """Q of each matrix, orthonormal: of the last round, or random."""
        fresh = not self.state.warm_start
        starts = []
        for matrix in self.matrices:
            q = matrix.record.get("q")
            if fresh or q is None or q.shape[1] != matrix.rank:
                generator = torch.Generator().manual_seed(self._seed(matrix.place))
                q = torch.randn(matrix.values.shape[1], matrix.rank, generator=generator).to(self.work)
            starts.append(q)
        return _orthonormal(starts)

    def _second(self, ps: list[Tensor], group: comm.Group) -> None:
        """Q, the approximation, and what is kept.

        Each rank keeps what the approximation of its own matrix leaves out, and no other rank's: what it has sent is
        gone from its error for good. (With the ranks' mean taken off each matrix, which sums up to the same, errors
        of opposite sign would grow for ever where the ranks' data differ.)
        """
        ps = _orthonormal(ps)
        second = self.work.new_empty(sum(m.values.shape[1] * m.rank for m in self.matrices))
        shapes = [(matrix.values.shape[1], matrix.rank) for matrix in self.matrices]
        qs = _views(second, shapes)
        for matrix, p, q in zip(self.matrices, ps, qs, strict=True):
            torch.mm(matrix.values.t(), p, out=q)
        sent = second.clone() if self.state.error_feedback else second
        self._average(second, group, sent)
        for matrix, p, q, own in zip(self.matrices, ps, qs, _views(sent, shapes), strict=True):
            good = q.isfinite().all()
            if self.state.error_feedback and not matrix.absent:
                _keep(matrix.record, "error", torch.addmm(matrix.values, p, own.t(), alpha=-1), good)
            if self.state.warm_start:
                _keep(matrix.record, "q", q, good & q.any())  # zeros where no rank had a gradient
            torch.mm(p, q.t(), out=matrix.values)

    def _average(self, message: Tensor, group: comm.Group, sent: Tensor | None = None) -> None:
        """Overwrite ``message`` with its mean; a copy of it, ``sent``, with what of it is in the mean."""
        if not self.half:
            mean(message, group)
            return
        owed = None if sent is None or sent is message else torch.empty_like(message)
        mean_in_halves(message, self.half, group, owed)
        if sent is not None and owed is not None:
            sent.sub_(owed)

    def _seed(self, place: int) -> int:
        seed = self.state.seed
        for number in (self.round, self.bucket.index(), place):
            seed = (seed * 1_000_003 + number + 1) % 2**63
        return seed


def _rows(parameter: Tensor) -> int:
    """Rows of the matrix that a gradient is in the buffer, where it lies as its parameter does; 0 for vectors."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    return parameter.shape[max(range(parameter.dim()), key=lambda d: (parameter.stride(d), -d))]


def _views(flat: Tensor, shapes: Iterable[tuple[int, int]]) -> list[Tensor]:
    views, start = [], 0
    for rows, columns in shapes:
        views.append(flat[start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return views


def _orthonormal(matrices: list[Tensor]) -> list[Tensor]:
    """Orthonormal columns that span those of each (thin) matrix; neighbours of one shape together.

    Householder's QR gives orthonormal columns whatever the rank, zero matrices included; NaN stays NaN.
    """
    found: list[Tensor] = []
    begin = 0
    for end in range(1, len(matrices) + 1):
        if end < len(matrices) and matrices[end].shape == matrices[begin].shape:
            continue
        alike = matrices[begin:end]
        if len(alike) == 1:
            found.append(torch.linalg.qr(alike[0])[0])
        else:
            found.extend(torch.linalg.qr(torch.stack(alike))[0].unbind())
        begin = end
    return found


def _keep(record: Record, name: str, value: Tensor, good: Tensor) -> None:
    """Put ``value`` into ``record`` if ``good`` is true, without asking a GPU for its answer."""
    if good.device.type == "cpu":
        if good:
            record[name] = value.clone() if value._is_view() else value
        return
    old = record.get(name)
    if old is None:
        old = torch.zeros_like(value) if name == "error" else torch.ones_like(value)
    record[name] = torch.where(good, value, old)
