"""Whether a run can use a device that is there: torch was built for it, and other processes leave it some memory."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch

from lockstep.ground.device import device_module, device_name
from lockstep.ground.device_memory import memory_cached, memory_held, memory_info
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import rank_prefixed_message, rank_zero_only

FULL = 0.1
"""Of a device's memory: with less than this part free, and taken by others, a run hardly fits."""

_BUILT_FOR = re.compile(r"(?P<form>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")


def check_usable(device: torch.device) -> None:
    """Refuse a device for which torch has no code, and warn of one that other processes fill.

    Args:
        device: of this rank, the current one of its kind.

    Raises:
        MisconfigurationException: with the builds that torch has and the way out.
    """
    if device.type == "cpu":
        return
    module = device_module(device)
    if torch.version.cuda is not None and hasattr(module, "get_arch_list"):
        refuse_architecture(device, module.get_device_capability(device), module.get_arch_list())
    warn_of_others(device)


def refuse_architecture(device: torch.device, capability: tuple[int, int], built_for: Sequence[str]) -> None:
    """Refuse a GPU for which torch was not built: its first kernel would fail.

    Code for a GPU runs on those of the same major version that are no older; what is compiled when it is loaded
    ("compute_90"), on all that are no older; a form "a" or "f" on this version alone, or its family.

    Args:
        device: for the message.
        capability: of the GPU, (9, 0).
        built_for: as ``torch.cuda.get_arch_list`` tells; empty: nobody knows.

    Raises:
        MisconfigurationException: with the way out.
    """
    found = [form for name in built_for if (form := _BUILT_FOR.fullmatch(name)) is not None]
    if not found or any(_runs_on(form, capability) for form in found):
        return
    version = ".".join(map(str, capability))
    raise MisconfigurationException(
        f"{device} ({device_name(device)}) has compute capability {version}, and torch {torch.__version__} was built "
        f"for {', '.join(built_for)}: install a build of torch that is made for it, choose another device by "
        "Trainer(devices=[...]), or use accelerator='cpu'"
    )


def _runs_on(form: re.Match[str], capability: tuple[int, int]) -> bool:
    version = int(form["major"]), int(form["minor"])
    if form["only"] == "a":
        return version == capability
    return version <= capability and (form["form"] == "compute" or version[0] == capability[0])


def held_by_others(device: torch.device) -> int:
    """Bytes of an accelerator's memory that other processes have taken; 0 where nobody tells."""
    known = memory_info(device)
    return 0 if known is None else max(0, known[1] - known[0] - (memory_held(device) or 0) - memory_cached(device))


def warn_of_others(device: torch.device) -> None:
    """Warn, once in this process, of a device whose memory other processes have taken."""
    known, others = memory_info(device), held_by_others(device)
    if known is None or known[0] >= FULL * known[1] or others < known[1] / 2:
        return
    free, total = known
    gib = 2**30
    where = rank_prefixed_message(str(device), rank_zero_only.rank)
    if device in _told:
        return
    _told.add(device)
    warnings.warn(  # on each rank: each has a card of its own
        f"{where}: {free / gib:.1f} of {total / gib:.1f} GiB are free, and {others / gib:.1f} GiB belong to other "
        "processes (nvidia-smi, or the maker's tool, lists them): end them, or choose another device by "
        "Trainer(devices=[...]).",
        stacklevel=2,
    )


_told: set[torch.device] = set()
