"""Where this release was tried: releases of torch, and kinds of devices."""

from __future__ import annotations

import multiprocessing

import torch

from lockstep.ground.rank import warn_once

TRIED = (2, 15)
"""The newest torch that this release was tested with; a test holds it to constraints.txt and pyproject.toml."""
RAN = ("cpu", "cuda")
"""Kinds of devices on which this release has run: the README's table says when, and a test holds the two together."""
RAN_ON_SEVERAL = ("cpu",)
"""The same of ranks with a device each."""


def warn_of_untried_torch(version: str = torch.__version__) -> None:
    """Warn, once and on rank 0, of a torch that is newer than all that were tried.

    Args:
        version: as torch writes its own, ``"2.13.0+cpu"``.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) > TRIED and multiprocessing.parent_process() is None:  # not in loader workers
        tried = ".".join(map(str, TRIED))
        warn_once(
            f"torch {version} is newer than {tried}, the newest that this release of lockstep was tested with: should "
            f"something be wrong, `pip install 'torch=={tried}.*'` takes that one."
        )


def untried(kind: str, several: bool = False) -> str | None:
    """What to say at the start of a run on devices on which this release never ran; None where it did.

    Args:
        kind: of the devices.
        several: whether ranks have one each.
    """
    if kind in (RAN_ON_SEVERAL if several else RAN):
        return None
    where, reference = ("such a device", "the CPU") if kind not in RAN else ("several such devices", "one")
    return (
        f'accelerator={kind!r}: this release of lockstep has not run on {where} yet (README, "Where it has '
        f'run"): compare the first losses with a run on {reference}, and report what differs.'
    )
