"""An attribute that a search reads and sets, wherever the user keeps it: module, data module, or their hparams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.trainer import Trainer


def _holders(trainer: Trainer, name: str) -> Iterator[tuple[str, Any, bool]]:
    """Where the attribute is: (the place in words, the object, whether it is an item of a mapping)."""
    for word, owner in (("model", trainer.lightning_module), ("datamodule", trainer.datamodule)):
        if owner is None:
            continue
        if hasattr(owner, name):
            yield word, owner, False
        if name in getattr(owner, "hparams", ()):
            yield f"{word}.hparams", owner.hparams, True


def places(trainer: Trainer, name: str) -> list[str]:
    """Where the attribute is found, in words: "model", "model.hparams", "datamodule", "datamodule.hparams"."""
    return [word for word, _, _ in _holders(trainer, name)]


def get(trainer: Trainer, name: str) -> dict[str, Any]:
    """The attribute's value in each of its places."""
    return {word: holder[name] if item else getattr(holder, name) for word, holder, item in _holders(trainer, name)}


def put(trainer: Trainer, name: str, value: object) -> None:
    """Set the attribute in all of its places; a dict from :func:`get` gives each place its own value."""
    for word, holder, item in list(_holders(trainer, name)):
        own = value[word] if isinstance(value, dict) else value
        if item:
            holder[name] = own
        else:
            setattr(holder, name, own)
