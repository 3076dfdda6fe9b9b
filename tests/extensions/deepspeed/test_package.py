"""DeepSpeed as an optional package."""

from __future__ import annotations

import pytest

from lockstep.engines.table import make_strategy
from lockstep.extensions.deepspeed import package
from lockstep.ground.errors import MisconfigurationException


def test_a_package_that_a_name_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "is_installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r'needs the package `deepspeed`.*"torch-lockstep\[deepspeed\]"'):
        make_strategy("deepspeed", 1)


@pytest.mark.parametrize("version", ["0.18.9", "0.19.7", "0.19.0rc1"])
def test_a_version_whose_gradients_were_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(package.importlib.metadata, "version", lambda name: version)
    with pytest.raises(MisconfigurationException, match=rf"needs deepspeed 0\.19\.8 or newer.*{version} is installed"):
        make_strategy("deepspeed", 1)
