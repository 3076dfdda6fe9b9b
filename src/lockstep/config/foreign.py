"""Objects of an installed Lightning, and others that are nearly right: what to change, in one sentence."""

from __future__ import annotations

from typing import Any

from lockstep.ground.errors import MisconfigurationException

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


def check_kind(where: str, thing: Any, kind: type, name: str) -> None:
    """Refuse what is no instance of ``kind``.

    Args:
        where: the call and its argument, for the message.
        thing: what was given.
        kind: lockstep's class.
        name: how users import it from lockstep.

    Raises:
        MisconfigurationException: a class in place of an instance, an object of Lightning's, or something else.
    """
    if isinstance(thing, type) and issubclass(thing, kind):
        raise MisconfigurationException(f"{where}: {thing.__name__} is a class; give an instance, {thing.__name__}().")
    if isinstance(thing, kind):
        return
    check_not_lightnings(where, thing)
    shown = type(thing).__name__ if not isinstance(thing, type) else f"the class {thing.__name__}"
    raise MisconfigurationException(f"{where}: give a lockstep.{name}, not {shown} ({thing!r:.100}).")


def check_not_lightnings(where: str, thing: Any) -> None:
    """Refuse an object whose class derives from one of an installed Lightning.

    Raises:
        MisconfigurationException: with the import to change.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    base = next((base for base in kind.__mro__ if base.__module__.split(".")[0] in PACKAGES), None)
    if base is not None:
        root = base.__module__.split(".")[0]
        package = "lightning.pytorch" if root == "lightning" else root
        raise MisconfigurationException(
            f"{where}: {kind.__name__} derives from {base.__module__}.{base.__qualname__}, and a Trainer of lockstep "
            f"runs classes of lockstep: change its import from `{package}` to `lockstep`, or leave the script as it is "
            "and start it by `lockstep run --lightning script.py`."
        )


def check_constructed(where: str, thing: Any, attribute: str) -> None:
    """Refuse an object whose class forgot to call the constructor of its base.

    Args:
        where: the call, for the message.
        thing: a module or data module.
        attribute: that the base's ``__init__`` sets.

    Raises:
        MisconfigurationException: with the line to add.
    """
    if attribute not in vars(thing):
        name = type(thing).__name__
        raise MisconfigurationException(
            f"{where}: {name}.__init__ does not call `super().__init__()`; make it its first line."
        )
