"""Attributes of single objects, as their bound methods, that are others for a while."""

from __future__ import annotations

from contextlib import ExitStack


def replace_until(end: ExitStack, owner: object, name: str, value: object) -> None:
    """Give an object another attribute; when the stack is closed, it has its own again, or its class's.

    Args:
        end: puts back what was there.
        owner: the object.
        name: of the attribute.
        value: that it has meanwhile.
    """
    own = vars(owner)
    if name in own:
        end.callback(setattr, owner, name, own[name])
    else:
        end.callback(own.pop, name, None)
    setattr(owner, name, value)
