"""Dotted names that pages and examples give to users go on working, wherever the files lie."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from tests.documents.names import in_text, in_the_project, kept, resolves
from tests.tools.extensions import needs

NAMES = in_the_project()


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name.removeprefix("lockstep."))) for name in kept()])
def test_a_name_that_was_once_on_a_page_works(name: str) -> None:
    assert resolve_name(name) is not None


@pytest.mark.parametrize("name", sorted(NAMES.keys() - set(kept())))
def test_a_name_that_does_not_work_is_refused_by_name(name: str) -> None:
    """docs/lightning.md names what lockstep does not have; the error says it, too, with the way out."""
    assert not resolves(name), f"{name} is new on {NAMES[name]}: run python -m tests.documents.names"
    assert NAMES[name] == ["docs/lightning.md"]
    with pytest.raises(AttributeError, match=rf"^{name}: "):
        resolve_name(name)


def test_names_are_found_in_text_and_in_code() -> None:
    page = """
Take `lockstep.callbacks.Timer`, not docs/lockstep.md. `from lockstep.tuner import Tuner`

```python
import lockstep.strategies
import lockstep as L
from lockstep.loggers import (
    CSVLogger as Log,
)
L.utilities.rank_zero_only(Log.name)
import lockstep.plugins
lockstep.plugins.io.CheckpointIO(other.name)
```
"""
    assert in_text(page) == {
        "lockstep.callbacks.Timer",
        "lockstep.tuner",
        "lockstep.tuner.Tuner",
        "lockstep.strategies",
        "lockstep.loggers",
        "lockstep.loggers.CSVLogger",
        "lockstep.loggers.CSVLogger.name",
        "lockstep.utilities",
        "lockstep.utilities.rank_zero_only",
        "lockstep.plugins",
        "lockstep.plugins.io",
        "lockstep.plugins.io.CheckpointIO",
    }


def test_a_name_that_is_gone_does_not_resolve() -> None:
    assert resolves("lockstep.callbacks.Timer.time_elapsed")
    assert not resolves("lockstep.callbacks.Gone")
    assert not resolves("lockstep.gone.Timer")
