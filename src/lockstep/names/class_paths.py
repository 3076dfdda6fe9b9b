"""Conversion of class paths of Lightning, and of short class names, in configs and on command lines."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from types import ModuleType
from typing import Any

from lockstep.ground.rank import rank_zero_info
from lockstep.names.finder import CLASS, LIGHTNINGS, ROOT, TEST_TUBE

# -- Lightning's paths ---------------------------------------------------------------------------------------


def lockstep_module(module: str) -> str | None:
    """Convert the path of a module of Lightning to lockstep's. Return None for a module of another package.

    Example:
        >>> modules = ("pytorch_lightning.callbacks", "lightning.fabric.utilities.seed", "torch")
        >>> tuple(map(lockstep_module, modules))
        ('lockstep.callbacks', 'lockstep.utilities.seed', None)
    """
    lightnings = rf"lightning\.(?:pytorch|fabric)|{'|'.join(LIGHTNINGS)}"
    found = re.fullmatch(rf"(?:{lightnings})((?:\.\w+)*)|{TEST_TUBE}[.\w]*", module)
    return None if found is None else ROOT + (found[1] or "")


@functools.cache
def refusal(path: str) -> str | None:
    """Return the reason why a dotted name cannot be imported from lockstep. Return None if it can."""
    found: object = import_module(ROOT)
    try:
        for part in path.split(".")[1:]:
            if not isinstance(found, ModuleType | type):
                return None  # attributes of a property or of a function's result are only known when the script runs
            found = getattr(found, part)
    except (AttributeError, ImportError) as error:
        if isinstance(found, type) and " was removed in Lightning " not in str(error):
            return None  # a missing attribute of a class is left to type checkers
        reason = re.sub(rf"^{ROOT}[\w.]*: ", "", str(error))
        unknown = "lockstep has no object with this name; docs/lightning.md lists the available names."
        return unknown if reason.startswith("module ") else reason
    return None


def lockstep_class_path(text: str) -> str | None:
    """Convert the path of a class of Lightning to lockstep's. Return None for any other text.

    Example:
        >>> lockstep_class_path("lightning.pytorch.loggers.CSVLogger"), lockstep_class_path("torch.optim.Adam")
        ('lockstep.loggers.CSVLogger', None)
    """
    found = re.fullmatch(rf"([\w.]+)\.({CLASS})", text)
    home = None if found is None else lockstep_module(found[1])
    return None if found is None or home is None else f"{home}.{found[2]}"


# -- short names ---------------------------------------------------------------------------------------------


FACES = ("callbacks", "loggers", "profilers", "strategies")
"""Public modules whose classes have short names, as in ``--trainer.callbacks+=Timer``."""


def import_named(name: str) -> None:
    """Import the class with a short name such as "CSVLogger", because a parser finds only imported classes.

    Do nothing if lockstep has no such class.
    """
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        if name in module.__all__:
            getattr(module, name)


# -- configs -------------------------------------------------------------------------------------------------


def to_lockstep_paths(config: Any) -> Any:
    """Replace the class paths of Lightning in a config by lockstep's. Import classes that have short names.

    Args:
        config: plain values, in dicts and lists.

    Raises:
        TypeError: the config contains a class of Lightning that lockstep does not have.
    """
    moved: dict[str, str] = {}
    found = _known_here(config, moved)
    if moved:
        read = ", ".join(f"{path} as {home}" for path, home in moved.items())
        rank_zero_info(f"Lightning's class paths are read as lockstep's ({read}): `lockstep migrate FILE` writes them")
    return found


def _known_here(config: Any, moved: dict[str, str]) -> Any:
    if isinstance(config, dict):
        return {key: _known_here(each, moved) for key, each in config.items()}
    if isinstance(config, list):
        return [_known_here(each, moved) for each in config]
    if not isinstance(config, str):
        return config
    home = lockstep_class_path(config)
    if home is None:
        import_named(config)
        return config
    why = refusal(home)
    if why is not None:
        raise TypeError(f"{config}: {why}")
    moved[config] = home
    return home
