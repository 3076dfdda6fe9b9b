"""One server of `lockstep verify` for all its tests: its import of torch is most of what a run costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep.extensions.verify.processes import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started
