"""Support for a ModelCheckpoint's folder: file names, detection of other runs, and cleanup after a kill."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.checkpoint import claims, storage
from lockstep.ground.rank import warn_once

# -- names of files ------------------------------------------------------------------------------------------


_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")


def fill(template: str, metrics: Mapping[str, Any], equals: str | None = "=") -> str:
    """Replace each ``{name}`` or ``{name:format}`` in `template` by the metric of that name, or by 0 if it is missing.

    Args:
        template: such as ``"{epoch:02d}-{val/loss:.2f}"``.
        metrics: numbers or tensors of one element, by name.
        equals: separator between a name and its value; None omits the name.

    Example::

        >>> fill("{epoch:02d}-{loss:.2f}", {"epoch": 5, "loss": 0.123})
        'epoch=05-loss=0.12'
    """

    def value(field: re.Match[str]) -> str:
        name = field[1]
        text = format(metrics.get(name, 0), field[2] or "")
        return text if equals is None else f"{name}{equals}{text}"

    return _FIELD.sub(value, template)


def name_pattern(template: str, extension: str) -> re.Pattern[str]:
    """Return a regular expression for all file names from `template`, including names with a version like ``-v1``."""
    literal = re.split(r"\{[^{}]*\}", template)
    return re.compile(".*".join(map(re.escape, literal)) + r"(-v\d+)?" + re.escape(extension))


# -- other runs ----------------------------------------------------------------------------------------------


SHARED = (
    "ModelCheckpoint: another process is saving checkpoints in {folder} at the same time, so that neither run can find "
    "its own last checkpoint. Pass a different `dirpath` for each run, or end one of the runs."
)

OTHERS = (
    "ModelCheckpoint: {folder} contains checkpoints from another run ({name}), which are not deleted. "
    '`ckpt_path="last"` finds the newest checkpoint of either run. Pass a different `dirpath` for each run to '
    "avoid this."
)


class FolderClaim:
    """Lock on a folder while a fit saves checkpoints there. Other processes can check whether the folder is locked."""

    def __init__(self) -> None:
        self._claimed: str | None = None
        self._is_shared = False

    def claim(self, folder: str) -> None:
        """Lock ``folder`` if it exists, and warn if another process has already locked it."""
        if self._claimed is None:
            mark = claims.claim(folder)
            self._claimed, self._is_shared = folder if mark else None, mark is False
            if self._is_shared:
                warn_once(SHARED.format(folder=folder))

    def look_for_others(self, folder: str, extension: str) -> None:
        """Warn if the folder contains checkpoints of another run; called before the first save of a run."""
        others = [name for name in storage.names(folder) if name.endswith(extension)]
        if others and not self._is_shared:  # already warned about
            warn_once(OTHERS.format(folder=folder, name=others[0]))

    def release(self) -> None:
        """Unlock the folder."""
        if self._claimed is not None:
            claims.release(self._claimed)
            self._claimed = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_claimed": None, "_is_shared": False}  # a lock belongs to one process


# -- after a kill --------------------------------------------------------------------------------------------


def checkpoints_since(path: str, folder: str, extension: str) -> Iterator[str]:
    """Yield the paths of checkpoints in a local folder that were written after the checkpoint `path`."""
    since, own = storage.modified(path), storage.absolute(path)
    for name in storage.names(folder):
        found = os.path.join(folder, name)
        is_checkpoint = name.endswith(extension) and storage.exists(found) and storage.absolute(found) != own
        if is_checkpoint and storage.modified(found) >= since:
            yield found
