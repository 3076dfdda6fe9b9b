"""DeepSpeed as an optional package."""

from __future__ import annotations

import pytest

from lockstep.engines.table import make_strategy
from lockstep.extensions.deepspeed import package


def test_a_package_that_a_name_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r'needs the package `deepspeed`.*"torch-lockstep\[deepspeed\]"'):
        make_strategy("deepspeed", 1)
