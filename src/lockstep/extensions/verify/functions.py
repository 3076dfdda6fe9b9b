"""Sees the functions of torch that a script calls: random numbers, dropout, and batch normalization."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lockstep.extensions.verify import float64
from lockstep.extensions.verify.calls import Calls
from lockstep.extensions.verify.settings import location
from lockstep.extensions.verify.watch import Watch

_DRAWS = {
    *("randn", "rand", "randint", "randperm", "randn_like", "rand_like", "randint_like", "normal", "bernoulli"),
    *("multinomial", "poisson", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_"),
    *("cauchy_", "geometric_", "rrelu", "binomial", "_standard_gamma", "_sample_dirichlet"),
}
_DRAWS_WITHIN = {"gumbel_softmax"}
"""Functions of torch's in Python that draw by such ones: those are called with this mode on."""
_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"),
    *("feature_dropout", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
}


_PROBABILITIES = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
"""The place of `dropout_p` among the arguments."""
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Functions whose one float among the arguments is the probability of dropout between layers."""

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


class Functions(TorchFunctionMode):
    """Stands before torch's functions.

    Random numbers that are drawn in training are written down by the ranks, and one process gets those of all ranks,
    put together as the samples are. Dropout is off. Batch normalization takes its statistics from each rank's part of
    a batch, as unsynchronized ranks do.

    Args:
        watch: of this process.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self._window = (-1, -1)
        self._at = 0
        self._calls = Calls(watch)

    def _draws(self, name: str) -> bool:
        """Whether a function draws random numbers of training itself, not of its data."""
        return name in _DRAWS and self.watch.is_training and not self.watch.in_loader

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        call = float64.call if self.watch.settings.float64 else _plainly
        if name in _DROPOUTS and args and isinstance(args[0], Tensor):
            return self._without_dropout(func, args, kwargs)
        if name in _DRAWS_WITHIN:
            with self:
                return _undispatched(func)(*args, **kwargs)
        if name in _PROBABILITIES:
            args, kwargs = self._without_argument(_PROBABILITIES[name], args, kwargs)
        elif name in _RECURRENT:
            args = self._without_layers_dropout(args)
        elif name == "batch_norm" and len(self.watch.chunks) > 1:
            return self._batch_norm(func, args, kwargs)
        result = call(func, args, kwargs)
        if isinstance(result, Tensor) and self._draws(name):
            result = self._drawn(name, result)
        self._calls.note(name, result)
        return result

    # -- random numbers

    def _drawn(self, name: str, result: Tensor) -> Tensor:
        """A tensor of random numbers: written down, or taken from the ranks."""
        file = self._next_file()
        if not self.watch.settings.is_replay:
            torch.save(result.detach(), self.watch.journal.folder / file)
            self._note("draw", name)
            return result
        feed = self.watch.settings.feed
        folders = (feed[self.watch.backwards % len(feed)],) if self.watch.settings.apart else feed
        paths = [Path(folder) / file for folder in folders]
        parts = [torch.load(path) for path in paths if path.exists()]
        found = _permuted(parts, result) if name == "randperm" else _fitting(parts, result)
        if found is None:
            self._note("own draw", name)
            return result
        if found is parts[0] and any(not torch.equal(part, found) for part in parts):
            self._note("rank 0's draw", name)
        if name.endswith("_"):
            with torch.no_grad():
                return result.copy_(found)
        if result.requires_grad:  # a gradient follows from the values that were drawn
            result.data.copy_(found)
            return result
        return found.to(result.dtype)

    def _next_file(self) -> str:
        """The file of the next random numbers, by update and micro-batch."""
        settings = self.watch.settings
        window = self.watch.updates, self.watch.backwards
        if self._window != window:
            self._window, self._at = window, 0
        micro_batch = window[1] // len(settings.feed) if settings.apart else window[1]
        self._at += 1
        return f"draw-{window[0]}-{micro_batch}-{self._at}.pt"

    def _note(self, kind: str, name: str) -> None:
        self.watch.journal.note_once(kind, name=name, where=location(), grad=torch.is_grad_enabled())

    # -- dropout

    def _without_dropout(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        if training and probability:
            self._note("dropout", "dropout")
        return args[0]

    def _without_argument(self, at: int, args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
        """Arguments with a probability of dropout of 0, whose place is ``at``."""
        if (args[at] if len(args) > at else kwargs.get("dropout_p", 0.0)) == 0.0:
            return args, kwargs
        self._note("dropout", "attention")
        if len(args) > at:
            return (*args[:at], 0.0, *args[at + 1 :]), kwargs
        return args, {**kwargs, "dropout_p": 0.0}

    def _without_layers_dropout(self, args: Arguments) -> Arguments:
        """Arguments of a recurrent network's layers, of which none drops anything."""
        at = next((at for at, value in enumerate(args) if isinstance(value, float)), None)
        if at is None or not args[at]:
            return args
        if args[at + 1]:  # in training
            self._note("dropout", "recurrent layers")
        return (*args[:at], 0.0, *args[at + 1 :])

    # -- batch normalization

    def _batch_norm(self, func: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        batch, total = given.pop("input"), sum(self.watch.chunks)
        if not given.get("training") or len(batch) % total:
            return func(*args, **kwargs)
        self._note("batch norm", "batch_norm")
        rows = [chunk * (len(batch) // total) for chunk in self.watch.chunks]
        mean, var = given.pop("running_mean", None), given.pop("running_var", None)
        parts = []
        first = 0 if self.watch.settings.feed[0].endswith("rank-0") else len(rows) - 1
        for at, part in enumerate(batch.split(rows)):
            # the statistics that are kept are rank 0's, which its model has at the end
            kept = (mean, var) if at == first else (None, None)
            parts.append(func(part, *kept, **given))
        return torch.cat(parts)


def _undispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's in Python, which calls no mode for itself, so that it does so for what it calls."""
    own: Any = function
    return FunctionType(
        own.__code__,
        {**own.__globals__, "has_torch_function_unary": lambda _: False},
        own.__name__,
        own.__defaults__,
    )


def _plainly(function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    return function(*args, **kwargs)


def _fitting(parts: list[Tensor], own: Tensor) -> Tensor | None:
    """What ranks drew, in the place of what one process drew; None where it does not fit."""
    if not parts:
        return None
    if all(part.shape == own.shape for part in parts):
        return parts[0]
    one_row = all(part.dim() and part.shape[1:] == own.shape[1:] for part in parts) and own.dim()
    if one_row and sum(len(part) for part in parts) == len(own):
        return torch.cat(parts)
    return None


def _permuted(parts: list[Tensor], own: Tensor) -> Tensor | None:
    """The permutations of ranks as one: each of its own samples."""
    if sum(map(len, parts)) != len(own):
        return _fitting(parts, own)
    firsts = itertools.accumulate(map(len, parts), initial=0)
    return torch.cat([part + first for part, first in zip(parts, firsts, strict=False)])
