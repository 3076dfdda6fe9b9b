"""Extensions that have been deleted, and what lists of files still name of them."""

from __future__ import annotations

import re

from lockstep.ground.extensions import is_there


def is_absent(path: str) -> bool:
    """Return True if a file or a test, given by its path, is of an extension that has been deleted."""
    found = re.search(r"\bextensions/(\w+)/", path)
    return found is not None and not is_there(found[1])
