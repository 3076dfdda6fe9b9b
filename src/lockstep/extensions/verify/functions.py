"""Mode that intercepts torch's functions to reuse the ranks' random numbers, disable dropout and split BatchNorm."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.extensions.verify import float64
from lockstep.extensions.verify.calls import Calls
from lockstep.extensions.verify.own_batches import OwnBatches
from lockstep.extensions.verify.settings import call_lines, is_user_code, location, stack
from lockstep.extensions.verify.watch import Watch, patch

KEPT = ("own draw", "rank 0's draw")
"""Kinds of events for a draw in which one process keeps its own random numbers, or uses rank 0's for all ranks."""

SAME = "same draw"
"""Kind of the event for random numbers of samples that are the same on all ranks."""

PERMUTED = "joined permutation"
"""Kind of the event for a permutation that joins those of the ranks; a script may use only a part of it."""

_DRAWS = {
    *("randn", "rand", "randint", "randperm", "randn_like", "rand_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "poisson", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_"),
    *("cauchy_", "geometric_", "rrelu", "binomial", "_standard_gamma", "_sample_dirichlet"),
}
_DRAWS_WITHIN = {"gumbel_softmax"}
"""Python functions that call functions in `_DRAWS`; the mode stays active inside them."""
_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"),
    *("feature_dropout", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
}
_PROBABILITIES = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""Position of `dropout_p` among the arguments."""
_RANKS_NORM = "batch norm on ranks"
"""Kind of the event for a rank that normalizes its own batch by torch's function."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Functions with a single float argument, the probability of dropout between layers."""

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Functions(TorchFunctionMode):
    """Mode that intercepts torch's functions to reuse the ranks' random numbers, and to disable dropout.

    Ranks write the random numbers that they draw in training. One process gets the numbers of all ranks, joined as the
    samples are. Dropout is disabled. BatchNorm computes its statistics for each rank's part of a batch, as on ranks
    that do not synchronize it.

    Args:
        watch: state that this process's observers share.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self._window = (-1, -1)  # update and backward of the newest draw
        self._at = 0  # draws since then
        self._calls = Calls(watch)
        self._own_batches = OwnBatches(watch)
        self._own_batches.install()
        # layers that synchronize their statistics themselves call torch's function in one process only
        self._has_ranks_norm = bool(watch.events_of_rank_0(_RANKS_NORM))
        run_backward = torch.autograd._engine_run_backward

        @functools.wraps(run_backward)
        def run_in_mode(*args: Any, **kwargs: Any) -> Any:
            # torch switches the mode off within backward, but the forwards that a checkpoint repeats need it
            with self:
                return run_backward(*args, **kwargs)

        patch(torch.autograd, "_engine_run_backward", run_in_mode)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        watch = self.watch
        if name in _DROPOUTS and args and isinstance(args[0], Tensor):
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            if training and probability:
                self._record("dropout", "dropout")
            return args[0]
        if name in _DRAWS_WITHIN:
            # within a mode torch switches it off; the function itself then has to be kept from dispatching again
            own: Any = func
            undispatched = {**own.__globals__, "has_torch_function_unary": lambda _: False}
            with self:
                return FunctionType(own.__code__, undispatched, own.__name__, own.__defaults__)(*args, **kwargs)
        if name in _PROBABILITIES:
            args, kwargs = self._without_attention_dropout(_PROBABILITIES[name], args, kwargs)
        elif name in _RECURRENT:
            at = next((at for at, value in enumerate(args) if isinstance(value, float)), None)
            if at is not None and args[at]:
                if args[at + 1]:  # in training
                    self._record("dropout", "recurrent layers")
                args = (*args[:at], 0.0, *args[at + 1 :])
        elif name == "batch_norm" and kwargs.get("training", args[5] if len(args) > 5 else False):
            if not watch.settings.is_replay:
                self._record(_RANKS_NORM, name)
            elif self._has_ranks_norm and len(watch.chunks) > 1:
                return self._batch_norm_by_rank(func, args, kwargs)
        result = float64.call(func, args, kwargs) if watch.settings.float64 else func(*args, **kwargs)
        # random numbers in a loader belong to the data, which is replayed as a whole
        if isinstance(result, Tensor) and name in _DRAWS and not watch.in_loader:
            if self._own_batches.is_choice(name):
                result = self._own_batches.draw(name, result)
            elif watch.is_training:
                result = self._shared_draw(name, result)
        else:
            result = self._own_batches.cut(name, args, kwargs, result)
        # such as the mean of the errors; later operations, such as a division, get this number
        if isinstance(result, Tensor) and not result.dim() and result.requires_grad:
            where = call_lines(stack())
            if not watch.loss_line and args and isinstance(args[0], Tensor) and args[0].dim():
                watch.loss_line = watch.scale_line = where
            elif is_user_code(sys._getframe(1).f_code.co_filename):
                watch.scale_line = where
        self._calls.record(name, args[0] if name == "__setitem__" else result)
        return result

    # -- random numbers

    def _shared_draw(self, name: str, result: Tensor) -> Tensor:
        """On a rank, save the random numbers just drawn. In one process, return the ranks' numbers instead."""
        # one file for each draw of an update and micro-batch: ranks and one process draw in the same order
        window = self.watch.updates, self.watch.backwards
        if self._window != window:
            self._window, self._at = window, 0
        self._at += 1
        paths = self.watch.files(f"draw-{window[0]}-{{}}-{self._at}.pt", window[1])
        if not self.watch.settings.is_replay:
            torch.save(result.detach(), paths[0])
            self._record("draw", name)
            return result
        parts = [torch.load(path) for path in paths if path.exists()]
        if name == "randperm" and sum(map(len, parts)) == len(result):
            # each rank permutes its own samples, which follow those of the ranks before it
            offsets = itertools.accumulate(map(len, parts), initial=0)
            self._record(PERMUTED, name)
            shared: Tensor | None = torch.cat([part + first for part, first in zip(parts, offsets, strict=False)])
        else:
            shared = _fitting(parts, result)
        if shared is None:
            self._record("own draw", name)
            return result
        are_same = all(torch.equal(part, parts[0]) for part in parts)
        if shared is parts[0] and not are_same:
            self._record("rank 0's draw", name)
        elif shared is not parts[0] and are_same and len(parts) > 1:
            self._record(SAME, name)
        if name.endswith("_"):
            with torch.no_grad():
                return result.copy_(shared)
        if result.requires_grad:  # the gradient depends on the values that were drawn
            result.data.copy_(shared)
            return result
        return shared.to(result.dtype)

    def _record(self, kind: str, name: str) -> None:
        self.watch.journal.record_once(kind, name=name, where=location(), grad=torch.is_grad_enabled())

    # -- dropout and batch normalization

    def _without_attention_dropout(self, at: int, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Return (args, kwargs) with `dropout_p`, the positional argument ``at``, set to 0."""
        if (args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)) == 0.0:
            return args, kwargs
        self._record("dropout", "attention")
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :]), kwargs
        return args, {**kwargs, "dropout_p": 0.0}

    def _batch_norm_by_rank(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        """Apply BatchNorm to each rank's part of a batch separately, with the part's own statistics."""
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        batch, total = arguments.pop("input"), sum(self.watch.chunks)
        # a batch of other rows than the loader's cannot be split by ranks
        if len(batch) % total:
            return func(*args, **kwargs)
        self._record("batch norm", "batch_norm")
        rows = [chunk * (len(batch) // total) for chunk in self.watch.chunks]
        mean, var = arguments.pop("running_mean", None), arguments.pop("running_var", None)
        parts = []
        # running statistics are those of rank 0, whose model is the one that is kept
        first = 0 if self.watch.settings.feed[0].endswith("rank-0") else len(rows) - 1
        for at, part in enumerate(batch.split(rows)):
            running = (mean, var) if at == first else (None, None)
            parts.append(func(part, *running, **arguments))
        return torch.cat(parts)


def _fitting(parts: list[Tensor], own: Tensor) -> Tensor | None:
    """Join ``parts``, the ranks' random numbers, to the shape of ``own``. Return None if the shapes do not fit."""
    if not parts:
        return None
    # numbers that do not depend on the batch
    if all(part.shape == own.shape for part in parts):
        return parts[0]
    # numbers for each sample
    has_rows = all(part.dim() and part.shape[1:] == own.shape[1:] for part in parts) and own.dim()
    if has_rows and sum(len(part) for part in parts) == len(own):
        return torch.cat(parts)
    return None
