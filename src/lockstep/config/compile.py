"""``Trainer(compile=...)``: what of a module is compiled, and how."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lockstep.ground.errors import MisconfigurationException

Blocks = bool | tuple[type[nn.Module] | str, ...] | None
OWN = "blocks"
"""The key that is lockstep's; the others are arguments of ``torch.compile``."""


@dataclass(frozen=True)
class CompileOptions:
    """What is compiled, and how."""

    blocks: Blocks = None
    """True: the repeated blocks; False: the whole module, layer by layer from the top; classes of layers, or their
    names; None: the repeated blocks where several ranks train, else the whole module."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``torch.compile``."""

    @property
    def backend(self) -> str:
        """The name of the compiler."""
        backend = self.options.get("backend", "inductor")
        return backend if isinstance(backend, str) else getattr(backend, "__name__", type(backend).__name__)


def compile_options(flag: str, value: object) -> CompileOptions | None:
    """The options; None where nothing is to be compiled.

    Raises:
        MisconfigurationException: it is no bool and no dict, or names no layers.
    """
    if isinstance(value, CompileOptions):
        return value
    if value is None or value is False:  # 0 is no answer
        return None
    if value is True:
        value = {}
    if not isinstance(value, Mapping):
        raise MisconfigurationException(
            f'Trainer({flag}={value!r:.100}): give True, False, or a dict such as {{"mode": "max-autotune", '
            '"fullgraph": True, "blocks": [Block]}.'
        )
    options = {name: option for name, option in value.items() if name != OWN}
    return CompileOptions(_blocks(flag, value.get(OWN)), options)


def _blocks(flag: str, given: object) -> Blocks:
    if given is None or isinstance(given, bool):
        return given
    kinds = tuple(given) if isinstance(given, Collection) and not isinstance(given, str) else (given,)
    if not kinds or not all(isinstance(kind, str) or _is_layer(kind) for kind in kinds):
        raise MisconfigurationException(
            f"Trainer({flag}={{'blocks': {given!r:.100}}}): give True (the repeated blocks), False (the whole module), "
            "or classes of layers."
        )
    return kinds


def _is_layer(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)
