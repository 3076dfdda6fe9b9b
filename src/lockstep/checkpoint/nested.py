"""Inner classes among the hyperparameters that a command line has saved, made again from ``class_path``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from lockstep.ground.errors import MisconfigurationException, missing_extra

NOTES = ("_class_path", "_instantiator")
"""What the command line notes among the hyperparameters: the class where it was chosen, and who made it."""


def without_notes(cls: type, saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters as arguments of ``cls``: as they are, or with objects in place of their descriptions.

    A checkpoint may name only classes that the program has imported, and each must be what the annotation of its
    argument asks for: loading imports nothing.

    Args:
        cls: what is to be made.
        saved: the checkpoint's hyperparameters.
        given: arguments that go before them.

    Raises:
        MisconfigurationException: the checkpoint is one of a subclass, or names a class that is not imported.
        ModuleNotFoundError: there are inner classes, and jsonargparse is not installed.
    """
    if not any(note in saved for note in NOTES):
        return saved
    kind = _imported(str(saved.get("_class_path", "")))
    if kind is not None and kind is not cls and issubclass(kind, cls):
        raise MisconfigurationException(
            f"{cls.__name__}.load_from_checkpoint: the checkpoint was made of a subclass; call "
            f"{kind.__name__}.load_from_checkpoint."
        )
    saved = {key: value for key, value in saved.items() if key not in NOTES}
    inner = {key: value for key, value in saved.items() if key not in given and any(_paths(value))}
    if not inner:
        return saved
    for path in _paths(inner):
        if _imported(path) is None:
            raise MisconfigurationException(
                f"{cls.__name__}.load_from_checkpoint: the checkpoint asks for an object of the class {path!r}, which "
                "this program has not imported; import it first if you trust the checkpoint."
            )
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError:
        raise missing_extra(
            "jsonargparse", "cli", f"{cls.__name__}.load_from_checkpoint, with inner classes,"
        ) from None
    parser = ArgumentParser(exit_on_error=False)
    others = {name for name in _parameters(cls) if name not in inner}
    parser.add_class_arguments(cls, "made", fail_untyped=False, skip=others)
    made = parser.instantiate(parser.parse_object({"made": inner}), instantiate_groups=False).made
    return {**saved, **{key: made[key] for key in inner}}


def _parameters(cls: type) -> Iterator[str]:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    for key in parser.add_class_arguments(cls, "made", fail_untyped=False):
        yield key.removeprefix("made.").split(".")[0]


def _paths(value: Any) -> Iterator[str]:
    """The classes that a value describes, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("class_path"), str):
            yield value["class_path"]
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths(item)


def _imported(path: str) -> type | None:
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None
