"""Tools for users, re-exported from the files that define them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.names.finder import late

if TYPE_CHECKING:
    from lockstep.data.combined import CombinedLoader as CombinedLoader
    from lockstep.ground.hyperparameters import AttributeDict as AttributeDict
    from lockstep.ground.parameters import grad_norm as grad_norm
    from lockstep.ground.rank import (
        rank_zero_debug as rank_zero_debug,
    )
    from lockstep.ground.rank import (
        rank_zero_deprecation as rank_zero_deprecation,
    )
    from lockstep.ground.rank import (
        rank_zero_info as rank_zero_info,
    )
    from lockstep.ground.rank import (
        rank_zero_only as rank_zero_only,
    )
    from lockstep.ground.rank import (
        rank_zero_warn as rank_zero_warn,
    )
    from lockstep.ground.transfer import move_data_to_device as move_data_to_device

_FILES = {
    "AttributeDict": ".ground.hyperparameters",
    "CombinedLoader": ".data.combined",
    "grad_norm": ".ground.parameters",
    "move_data_to_device": ".ground.transfer",
    "rank_zero_debug": ".ground.rank",
    "rank_zero_deprecation": ".ground.rank",
    "rank_zero_info": ".ground.rank",
    "rank_zero_only": ".ground.rank",
    "rank_zero_warn": ".ground.rank",
}

__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    """Import the file that defines ``name`` when the name is first used."""
    return late(__name__, _FILES, name)


def __dir__() -> list[str]:
    return sorted(__all__)
