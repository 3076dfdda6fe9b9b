"""PowerSGD, which sends each gradient matrix as two thin matrices (Vogels, Karimireddy and Jaggi, 2019)."""

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
    """Settings of the hook `power_sgd`, and the tensors that a rank stores between rounds of gradient reduction.

    Args:
        rank: columns of the thin matrices; 1 to 4 is usual. At most the number of rows or columns of a matrix.
        start: rounds with the plain mean before compression; at least 0. A tenth of the training is usual: gradients
            change fastest at first, so that the previous round's approximation is of little use.
        min_compression_rate: compress a matrix only if that sends less than its size divided by this number.
        error_feedback: add the errors of the approximation so far to each gradient. This needs memory of the size of
            the compressed gradients, in float32 (or in their own dtype, if that is wider). Without it, training loses
            what the approximation leaves out.
        warm_start: start with the approximation of the previous round; without it, with random vectors.
        seed: seed of the random vectors; the same on all ranks.
        process_group: process group of the ranks; ``None`` is the default group.

    Attributes:
        iteration: rounds so far.
        numbers, numbers_sent: number of gradients in compressed rounds so far, and of numbers sent for them.

    Raises:
        MisconfigurationException: ``rank`` is below 1, another number is negative, or ``rank`` or ``start`` is not an
            integer.
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
                f"PowerSGDState(rank={rank!r}, start={start!r}, min_compression_rate={min_compression_rate}): pass "
                "integers, a rank of at least 1, and a start and a rate of at least 0"
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
        """Size in bytes of the tensors that this rank stores between rounds of gradient reduction."""
        return self._memory.bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rounds and this rank's stored tensors, which differ between ranks."""
        return {"iteration": self.iteration, "memory": self._memory.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of rounds and the tensors that this rank saved. The constructor's settings stay unchanged.

        Args:
            state: result of :meth:`state_dict` on this rank.
        """
        self.iteration = state["iteration"]
        self._memory.load_state_dict(state["memory"])


def power_sgd(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average gradients approximately: send (n + m) ``state.rank`` numbers for an n x m matrix. A communication hook.

    M is a gradient on this rank, with n rows (its first dimension) of m numbers, plus the errors so far. All ranks
    multiply M with the same thin matrix Q, average P = M Q and make its columns orthonormal. Then they average
    Q = M^T P, and P Q^T approximates the mean. This is one step of a power iteration: with a warm start, Q follows the
    largest singular vectors from round to round. Vectors, scalars and matrices that would not be smaller are sent
    unchanged, in one message with the Ps. There are two messages per bucket.

    fp16 and bf16 gradients are sent in their dtype and summed in float32. If a gradient is inf or NaN, its matrix is
    NaN on all ranks, and the memory does not change in that round.

    Each rank orthogonalizes by itself, so ranks have the same bits only on processors of one kind.

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
    """Gradient that is approximated by the product of two thin matrices, which are sent instead."""

    place: int  # index among the bucket's parameters
    absent: bool  # no gradient in this round: its error is kept for a later one
    values: Tensor  # (n, m); a view of the buffer, unless that has 16 bits
    record: Record
    rank: int


class _Round:
    """Computation of one bucket's approximate mean over the ranks."""

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
        # matrices of one shape are adjacent, so that `_orthonormal` handles them in one call
        self.matrices.sort(key=lambda matrix: (*matrix.values.shape, matrix.place))

    def run(self, group: comm.Group) -> None:
        """Overwrite the bucket's gradients with their approximate mean over the ranks. Collective."""
        matrices = self.matrices
        if self.state.error_feedback:
            for matrix in matrices:
                if "error" not in matrix.record:
                    matrix.record["error"] = torch.zeros_like(matrix.values)
                if not matrix.absent:
                    matrix.values.add_(matrix.record["error"])
        sides = self._start_values()
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
            self._average_q(ps, group)
        if self.half:
            self.flat.copy_(self.work)

    def _start_values(self) -> list[Tensor]:
        """Return an orthonormal start value of Q for each matrix: the last round's Q, or random numbers."""
        fresh = not self.state.warm_start
        starts = []
        for matrix in self.matrices:
            q = matrix.record.get("q")
            if fresh or q is None or q.shape[1] != matrix.rank:
                # all ranks draw the same numbers, which differ between rounds, buckets and parameters
                seed = self.state.seed
                for number in (self.round, self.bucket.index(), matrix.place):
                    seed = (seed * 1_000_003 + number + 1) % 2**63
                generator = torch.Generator().manual_seed(seed)
                q = torch.randn(matrix.values.shape[1], matrix.rank, generator=generator).to(self.work)
            starts.append(q)
        return _orthonormal(starts)

    def _average_q(self, ps: list[Tensor], group: comm.Group) -> None:
        """Average Q, write the approximate means into the matrices, and store errors and Q for the next round.

        A rank's error is the difference to the approximation of its own matrix. (With the difference to the ranks'
        mean, which has the same sum, errors of opposite signs would grow forever if the ranks' data differ.)
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
                _store(matrix.record, "error", torch.addmm(matrix.values, p, own.t(), alpha=-1), good)
            if self.state.warm_start:
                # Q is zero if no rank had a gradient; then the old one is the better start
                _store(matrix.record, "q", q, good & q.any())
            torch.mm(p, q.t(), out=matrix.values)

    def _average(self, message: Tensor, group: comm.Group, sent: Tensor | None = None) -> None:
        """Overwrite ``message`` with its mean over the ranks, and ``sent`` with the rounded values from this rank."""
        if not self.half:
            mean(message, group)
            return
        owed = None if sent is None or sent is message else torch.empty_like(message)
        mean_in_halves(message, self.half, group, owed)
        if sent is not None and owed is not None:
            sent.sub_(owed)


def _rows(parameter: Tensor) -> int:
    """Return the number of rows of a parameter's gradient viewed as a matrix; 0 for vectors and scalars."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    # the outermost dimension in memory: a gradient has its parameter's layout, which may be channels_last
    return parameter.shape[max(range(parameter.dim()), key=lambda d: (parameter.stride(d), -d))]


def _views(flat: Tensor, shapes: Iterable[tuple[int, int]]) -> list[Tensor]:
    views, start = [], 0
    for rows, columns in shapes:
        views.append(flat[start : start + rows * columns].view(rows, columns))
        start += rows * columns
    return views


def _orthonormal(matrices: list[Tensor]) -> list[Tensor]:
    """Return, for each thin matrix, a matrix with orthonormal columns that span the same space.

    Adjacent matrices of one shape are handled in one call.
    """
    # Householder's QR: orthonormal for any rank, also for zero matrices, and NaN stays NaN
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


def _store(record: Record, name: str, value: Tensor, good: Tensor) -> None:
    """Set ``record[name]`` to ``value`` if the boolean tensor ``good`` is true, without waiting for a GPU."""
    # on a GPU `if good` would wait for it
    if good.device.type == "cpu":
        if good:
            record[name] = value.clone() if value._is_view() else value
        return
    old = record.get(name)
    if old is None:
        old = torch.zeros_like(value) if name == "error" else torch.ones_like(value)
    record[name] = torch.where(good, value, old)
