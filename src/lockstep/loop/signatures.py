"""What the user's step methods take: which of (batch, batch_idx, dataloader_idx) they are called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.ground.errors import MisconfigurationException


def takes_idx(training_step: Callable[..., Any]) -> bool:
    """Whether a ``training_step`` has a parameter for the index of the batch, whatever its name is."""
    positional, takes_any = _taken(training_step)
    return takes_any or len(positional) > 1


def arguments_of(step: Callable[..., Any], several: bool, name: str) -> int:
    """How many of (batch, batch_idx, dataloader_idx) the user's step of an evaluation takes.

    Args:
        step: the method.
        several: whether there are several loaders, one after another.
        name: of the method, for the error.

    Raises:
        MisconfigurationException: it draws its batches itself, or lacks what tells loaders apart.
    """
    wanted = 3 if several else 2
    refuse_iterator(step, name)
    if several:
        refuse_fewer(step, wanted, name, f"{name}(self, batch, batch_idx, dataloader_idx=0)")
    return _most(step, wanted)


def refuse_iterator(step: Callable[..., Any], name: str) -> None:
    """Refuse a step that draws its batches itself.

    Raises:
        MisconfigurationException: with what it may take.
    """
    if any(parameter.name == "dataloader_iter" for parameter in _taken(step)[0]):
        raise MisconfigurationException(
            f"`{name}(dataloader_iter)` is not supported: the order of data and which ranks have samples are planned "
            f"batch by batch. Define `{name}(batch, batch_idx)`."
        )


def refuse_fewer(method: Callable[..., Any], given: int, name: str, define: str) -> None:
    """Refuse a method that cannot take the number of the loader, of several.

    Args:
        method: of the module.
        given: how many arguments it is called with.
        name: of the method.
        define: its definition, for the error.

    Raises:
        MisconfigurationException: with the definition.
    """
    if _most(method, given) < given:
        raise MisconfigurationException(
            f"There are several loaders, and `{name}` takes no `dataloader_idx`: define it as `{define}`."
        )


def _most(method: Callable[..., Any], given: int) -> int:
    """How many of ``given`` arguments a method takes by their places."""
    positional, takes_any = _taken(method)
    return given if takes_any else min(given, len(positional))


def _taken(method: Callable[..., Any]) -> tuple[list[inspect.Parameter], bool]:
    """The parameters that arguments fill by their place, and whether a method takes any number of them.

    A wrapper on the instance may show those of the class' function.
    """
    found = list(inspect.signature(method).parameters.values())
    wraps = not inspect.ismethod(method) and (hasattr(method, "__wrapped__") or hasattr(method, "__signature__"))
    if wraps and found and found[0].name == "self":
        del found[0]
    positional = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional, any(p.kind is p.VAR_POSITIONAL for p in found)
