"""Files that the script has open, where a process does not end as Python does."""

from __future__ import annotations

import contextlib
import gc
import io

BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
"""What keeps text or bytes back that were written to it."""


def flush_open_files() -> None:
    """Write out what waits in the buffers of open files: ``os._exit`` would leave it there.

    Of a forked process these are its own files. Those of its parent, which writes them itself, are frozen
    (`lockstep.ground.fork`), and not among what is found.
    """
    with contextlib.suppress(MemoryError):
        for each in gc.get_objects():
            if type(each) in BUFFERED:
                with contextlib.suppress(OSError, ValueError, RuntimeError):  # closed, read only, or nobody reads it
                    each.flush()
