"""A class method that refuses to be called on an instance, whose state it would not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    restricted_classmethod = classmethod  # which type checkers know
else:

    class restricted_classmethod:
        """Like ``classmethod``; a call on an instance raises, because its result is a new object.

        Example::

            class Model:
                @restricted_classmethod
                def load(cls, path): ...

            model = Model.load(path)  # and not model.load(path), which would leave `model` as it is
        """

        def __init__(self, method: Callable[..., Any]) -> None:
            self.method = method
            update_wrapper(self, method)

        def __get__(self, instance: object, kind: type) -> Callable[..., Any]:
            if instance is None:
                return self.method.__get__(kind)

            def refuse(*args: object, **kwargs: object) -> Any:
                name = f"{kind.__name__}.{self.method.__name__}"
                raise TypeError(
                    f"{name} makes a new object and leaves the one that it is called on as it is: call it on the "
                    f"class, `object = {name}(...)`."
                )

            return refuse
