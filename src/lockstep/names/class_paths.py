"""Class names in configs and command lines: Lightning's paths and their homes in lockstep, and short names."""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from lockstep.ground.rank import rank_zero_info
from lockstep.names.finder import CLASS, LIGHTNINGS, ROOT, TEST_TUBE

# -- Lightning's paths ---------------------------------------------------------------------------------------


def home_of(module: str) -> str | None:
    """Return the path in lockstep of a module of Lightning; None for other packages.

    Example:
        >>> home_of("pytorch_lightning.callbacks"), home_of("lightning.fabric.utilities.seed"), home_of("torch")
        ('lockstep.callbacks', 'lockstep.utilities.seed', None)
    """
    lightnings = rf"lightning\.(?:pytorch|fabric)|{'|'.join(LIGHTNINGS)}"
    found = re.fullmatch(rf"(?:{lightnings})((?:\.\w+)*)|{TEST_TUBE}[.\w]*", module)
    return None if found is None else ROOT + (found[1] or "")


@functools.cache
def refusal(path: str) -> str | None:
    """Return why a name cannot be imported from lockstep; None if it can be."""
    found: object = import_module(ROOT)
    try:
        for part in path.split(".")[1:]:
            if not isinstance(found, ModuleType | type):
                return None  # attributes of a property or of a function's result are only known when the script runs
            found = getattr(found, part)
    except (AttributeError, ImportError) as error:
        if isinstance(found, type) and " is gone since " not in str(error):
            return None  # a missing attribute of a class is left to type checkers
        reason = re.sub(rf"^{ROOT}[\w.]*: ", "", str(error))
        unknown = "lockstep has no object with this name; docs/lightning.md lists the available names."
        return unknown if reason.startswith("module ") else reason
    return None


def class_at_home(text: str) -> str | None:
    """Return the class path in lockstep for a class path of Lightning; None for any other text.

    Example:
        >>> class_at_home("lightning.pytorch.loggers.CSVLogger"), class_at_home("torch.optim.Adam")
        ('lockstep.loggers.CSVLogger', None)
    """
    found = re.fullmatch(rf"([\w.]+)\.({CLASS})", text)
    home = None if found is None else home_of(found[1])
    return None if found is None or home is None else f"{home}.{found[2]}"


# -- short names ---------------------------------------------------------------------------------------------


FACES = ("callbacks", "loggers", "profilers", "strategies")
"""Faces whose classes can be given by their short names, such as ``--trainer.callbacks+=Timer``."""


def import_named(name: str) -> None:
    """Import the class with this name from a face, if there is one: a parser finds only imported classes."""
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        if name in module.__all__:
            getattr(module, name)


def import_all() -> None:
    """Import all classes of the faces."""
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        for name in module.__all__:
            with suppress(ImportError):  # its extra is not installed
                getattr(module, name)


# -- configs -------------------------------------------------------------------------------------------------


def known_here(config: Any) -> Any:
    """Return a config with lockstep's class paths in place of Lightning's, and import classes named by short names.

    Args:
        config: plain values, in dicts and lists.

    Raises:
        TypeError: the config names a class of Lightning that lockstep does not have.
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
    home = class_at_home(config)
    if home is None:
        import_named(config)
        return config
    why = refusal(home)
    if why is not None:
        raise TypeError(f"{config}: {why}")
    moved[config] = home
    return home
