"""What a copy of a part of a run has, in this process or in another one: what a call of the Trainer leaves behind."""

from __future__ import annotations

from typing import Any


def kept(part: object, *of_the_call: str) -> dict[str, Any]:
    """The attributes of a part that its copies have; what `__getstate__` gives.

    Methods that a call has put in the place of the class's own, to measure them, stay behind: they work on this object.

    Args:
        part: the object.
        of_the_call: names of attributes that belong to the call that runs; they are None in a copy.
    """
    state = {name: value for name, value in vars(part).items() if not _stands_in(part, name, value)}
    return state | dict.fromkeys(state.keys() & set(of_the_call))


def _stands_in(part: object, name: str, value: object) -> bool:
    own = getattr(type(part), name, None)
    return callable(own) and callable(value) and str(getattr(value, "__module__", "")).startswith("lockstep.")
