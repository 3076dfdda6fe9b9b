"""Backwards of ``torch.distributed.autograd``, which leave gradients in a context of theirs and not in ``.grad``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch.distributed import autograd, rpc
from torch.nn.parameter import Parameter

NO_PLACE = (
    "parameter {name!r} got a gradient on other ranks only, and torch.distributed.autograd has no place for it in this "
    "rank's context: let the loss depend on it (loss + 0 * parameter.sum()), or use loss.backward()"
)
STATIC = (
    "static_graph=True records how backwards change .grad, and torch.distributed.autograd leaves gradients elsewhere: "
    "take static_graph=False with it"
)

_has_agent = getattr(rpc, "_is_current_rpc_agent_set", bool)  # torch is built without RPC on some systems


def current_context() -> int | None:
    """The number of the context that this thread is in; None outside of any."""
    if not _has_agent():
        return None
    try:
        return int(autograd._current_context()._context_id())
    except RuntimeError:
        return None


def versions(parameters: Iterable[Parameter], context: int) -> list[int | None]:
    """What changes when a distributed backward gives gradients to ``parameters``."""
    given = autograd.get_gradients(context)
    return [given[parameter]._version if parameter in given else None for parameter in parameters]


@contextmanager
def as_grad(named: Mapping[str, Parameter], context: int, empty: bool = False) -> Iterator[None]:
    """Lets parameters have the gradients of a context for a while; what becomes of them is left in the context.

    Args:
        named: the parameters.
        context: its number.
        empty: let them have none to begin with.

    Raises:
        RuntimeError: a parameter without a gradient in the context has got one.
    """
    given = autograd.get_gradients(context)
    kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in named.values()]
    try:
        for parameter in named.values():
            parameter.grad = None if empty else given.get(parameter)
        yield
        for name, parameter in named.items():
            if parameter.grad is None:
                if parameter in given:
                    given[parameter].zero_()
            elif parameter in given:
                given[parameter].copy_(parameter.grad)
            else:
                raise RuntimeError(NO_PLACE.format(name=name))
    finally:
        for parameter, grad, values in kept:
            if grad is not None and values is not None:
                grad.detach().copy_(values)  # it may be a place in a bucket
            parameter.grad = grad
