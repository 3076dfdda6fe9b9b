"""The options that ``Trainer(compile=...)`` accepts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep.ground.errors import MisconfigurationException

Blocks = bool | tuple[type[nn.Module] | str, ...] | None
OWN = "blocks"
"""Key of the option that lockstep interprets; all others are arguments of ``torch.compile``."""


@dataclass(frozen=True)
class CompileOptions:
    """The validated value of ``Trainer(compile=...)``: the layers to compile, and arguments of ``torch.compile``."""

    blocks: Blocks = None
    """The layers to compile. True: the repeated blocks. False: the whole module, layer by layer from the top. A tuple:
    layers of these classes or class names. None: the repeated blocks if several ranks train, else the whole module."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``torch.compile``."""

    @property
    def backend(self) -> str:
        """Name of the backend of ``torch.compile``."""
        backend = self.options.get("backend", "inductor")
        return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)


def compile_options(flag: str, value: object) -> CompileOptions | None:
    """Validate ``Trainer(compile=...)`` and return the options; None if the value turns compilation off.

    Raises:
        MisconfigurationException: the value is not a bool or dict, or "blocks" does not name layers.
    """
    if isinstance(value, CompileOptions):
        return value
    if value is None or value is False:  # but not 0, which is refused
        return None
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise MisconfigurationException(
            f"Trainer({flag}={value!r:.100}) is not valid: pass True, False, or a dict such as "
            f'{{"mode": "max-autotune", "fullgraph": True, "blocks": [Block]}}.'
        )
    options = {name: option for name, option in value.items() if name != OWN}
    return CompileOptions(_blocks(flag, value.get(OWN)), options)


def _blocks(flag: str, given: object) -> Blocks:
    if given is None or isinstance(given, bool):
        return given
    kinds = tuple(given) if isinstance(given, Collection) and not isinstance(given, str) else (given,)
    are_layers = [isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, nn.Module)) for kind in kinds]
    if not kinds or not all(are_layers):
        raise MisconfigurationException(
            f"Trainer({flag}={{'blocks': {given!r:.100}}}) is not valid: pass True (the repeated blocks), False (the "
            "whole module), or classes of layers."
        )
    return kinds
