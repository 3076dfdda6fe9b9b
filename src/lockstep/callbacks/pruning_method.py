"""What ModelPruning prunes by: the class or function that its arguments stand for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.utils import prune

from lockstep.ground.errors import MisconfigurationException

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ln_structured": prune.ln_structured,
    "l1_unstructured": prune.l1_unstructured,
    "random_structured": prune.random_structured,
    "random_unstructured": prune.random_unstructured,
}
METHODS: dict[str, Any] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}


def find_method(asked: Any, across: bool, dim: int | None, norm: int | None) -> tuple[Any, dict[str, Any]]:
    """What to prune by, and its arguments.

    Args:
        asked: the ``pruning_fn`` of ModelPruning.
        across: its ``use_global_unstructured``.
        dim: its ``pruning_dim``.
        norm: its ``pruning_norm``.

    Returns:
        a class of pruning method, if elements of all parameters are compared, else a function
        ``fn(module, name=..., amount=...)``; and arguments by name.

    Raises:
        MisconfigurationException: they do not fit together.
    """
    names = [name for name, function in FUNCTIONS.items() if asked is function]
    if isinstance(asked, str) or names:
        return _by_name(names[0] if names else asked.lower(), across, dim, norm)
    is_method = inspect.isclass(asked) and issubclass(asked, prune.BasePruningMethod)
    if is_method and not across:
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={asked.__name__}, use_global_unstructured=False): a class of pruning method "
            "works with use_global_unstructured=True; to prune each parameter by itself, give a function "
            "`fn(module, name=..., amount=...)`, such as the class's `apply`."
        )
    if not is_method and (across or not callable(asked)):
        hint = "; give the class, not an object of it" if isinstance(asked, prune.BasePruningMethod) else ""
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={asked!r:.100}): it is expected to be a str in {list(FUNCTIONS)} or a class "
            f"derived from torch.nn.utils.prune.BasePruningMethod{hint}; with use_global_unstructured=False also a "
            "function `fn(module, name=..., amount=...)`."
        )
    if is_method:
        _check_type(asked)
    return asked, {}


def _by_name(name: str, across: bool, dim: int | None, norm: int | None) -> tuple[Any, dict[str, Any]]:
    if name not in FUNCTIONS:
        raise MisconfigurationException(f"ModelPruning(pruning_fn={name!r}): it must be one of {list(FUNCTIONS)}.")
    options: dict[str, Any] = {}
    if name.endswith("_structured"):
        if dim is None:
            raise MisconfigurationException(
                f"ModelPruning({name!r}): the `pruning_dim` should be provided, for it takes away whole slices."
            )
        options["dim"] = dim
    if name == "ln_structured":
        if norm is None:
            raise MisconfigurationException(f"ModelPruning({name!r}): the `pruning_norm` should be provided.")
        options["n"] = norm
    if across:
        _check_type(METHODS[name])
        return METHODS[name], options
    return partial(FUNCTIONS[name], **options), {}


def _check_type(method: Any) -> None:
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind != "unstructured":
        raise MisconfigurationException(
            f"ModelPruning(pruning_fn={method.__name__}, use_global_unstructured=True): the method's PRUNING_TYPE "
            f"is {kind!r}, and across parameters only 'unstructured' ones work: set use_global_unstructured=False."
        )
