"""Pytest plugin of lockstep: the fixture ``verified``, which runs ``lockstep verify`` in a test.

Every run of pytest imports this file, so it imports lockstep only when a test uses the fixture. It is outside of the
package lockstep, whose import has effects, and outside of the extension verify, which may be deleted.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--verify-ranks``."""
    text = "numbers of ranks for all uses of the fixture verified, in place of their own"
    parser.getgroup("lockstep").addoption("--verify-ranks", metavar="N[,N]", help=text)


@pytest.fixture
def verified(pytestconfig: pytest.Config) -> Any:
    """Return a function that verifies a script, and fails the test unless the script trains the same on ranks."""
    from lockstep.ground.extensions import load

    function = load("services", "pytest's fixture verified")
    return functools.partial(function, pytestconfig.rootpath, pytestconfig.getoption("verify_ranks"))
