"""A test whose body runs in a process that has the made-up device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tools.pool import RankPool


def on_device(world: int = 1, **options: Any) -> Callable[[Callable[[], object]], Callable[[RankPool], None]]:
    """Makes a test of a function without arguments, which each of ``world`` ranks calls.

    Args:
        world: how many.
        **options: of `RankPool.run`; ranks have no process group, unless ``group=True``.
    """

    def made(body: Callable[[], object]) -> Callable[[RankPool], None]:
        def test(madeup: RankPool) -> None:
            madeup(world).run(body, **{"group": False, "timeout": 20, **options})

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return made
