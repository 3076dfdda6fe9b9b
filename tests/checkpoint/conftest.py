"""Fixtures that skip tests where a package is missing."""

from __future__ import annotations

import pytest

from tests.checkpoint.adapted import needs_peft
from tests.checkpoint.tuned import needs_transformers

transformers = pytest.fixture(needs_transformers, name="transformers")
peft = pytest.fixture(needs_peft, name="peft")
