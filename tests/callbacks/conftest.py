"""What tests of callbacks share: Lightning, to run beside."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def lightning() -> Any:
    """``lightning.pytorch``; the test is skipped where it is not installed."""
    before = os.environ.copy()
    library = pytest.importorskip("lightning.pytorch")
    for name in set(os.environ) - set(before):  # its import sets variables
        del os.environ[name]
    return library
