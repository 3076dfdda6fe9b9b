"""Detection of another distribution, ``lockstep`` 0.0.1, which can replace this package's ``lockstep/__init__.py``.

The file that ``lockstep`` 0.0.1 installs is empty.
"""

from __future__ import annotations

import os
import sys
import warnings

METADATA = "lockstep-0.0.1.dist-info"
WAY_OUT = "Run `pip uninstall lockstep torch-lockstep`, then `pip install torch-lockstep`."


def warn_if_installed(package: str) -> None:
    """Warn if ``lockstep`` 0.0.1 is installed in the same folder as this package, whose path is ``package``.

    It was installed before this package, or this import would have run its file. Uninstalling it removes our file.
    """
    if os.path.isdir(os.path.join(os.path.dirname(package), METADATA)):
        warnings.warn(
            f"The distribution lockstep 0.0.1, a different project, has the same folder as torch-lockstep. {WAY_OUT}",
            stacklevel=2,
        )


def replaced_by_it() -> str | None:
    """Return an error message if ``lockstep`` 0.0.1 has replaced this package's ``lockstep/__init__.py``, else None."""
    if hasattr(sys.modules["lockstep"], "__version__"):
        return None
    file = sys.modules["lockstep"].__file__
    return f"the distribution lockstep 0.0.1, a different project, has replaced {file}. {WAY_OUT}"
