"""Names of classes, as configs and command lines have them: Lightning's paths in lockstep, and short names."""

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
    """The path that a module of Lightning's has in lockstep; None for other packages.

    Example:
        >>> home_of("pytorch_lightning.callbacks"), home_of("lightning.fabric.utilities.seed"), home_of("torch")
        ('lockstep.callbacks', 'lockstep.utilities.seed', None)
    """
    lightnings = rf"lightning\.(?:pytorch|fabric)|{'|'.join(LIGHTNINGS)}"
    found = re.fullmatch(rf"(?:{lightnings})((?:\.\w+)*)|{TEST_TUBE}[.\w]*", module)
    return None if found is None else ROOT + (found[1] or "")


@functools.cache
def refusal(path: str) -> str | None:
    """Why a name cannot be imported from lockstep; None where it can be."""
    found: object = import_module(ROOT)
    try:
        for part in path.split(".")[1:]:
            if not isinstance(found, ModuleType | type):
                return None  # what is behind a property or a function is known when the script runs
            found = getattr(found, part)
    except (AttributeError, ImportError) as error:
        if isinstance(found, type) and " is gone since " not in str(error):
            return None  # of what a class has not, a type checker tells
        said = re.sub(rf"^{ROOT}[\w.]*: ", "", str(error))
        known = "lockstep has nothing of this name; docs/lightning.md has the names that there are."
        return known if said.startswith("module ") else said
    return None


def class_at_home(text: str) -> str | None:
    """The path in lockstep of a class path of Lightning's; None for any other text.

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
    """Import the class of a face that has this name, if there is one: a parser finds only classes that are imported."""
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        if name in module.__all__:
            getattr(module, name)


def import_all() -> None:
    """Import all classes of the faces, but for those whose extra is not installed."""
    for face in FACES:
        module = import_module(f"{ROOT}.{face}")
        for name in module.__all__:
            with suppress(ImportError):
                getattr(module, name)


# -- configs -------------------------------------------------------------------------------------------------


def known_here(config: Any) -> Any:
    """A config, or a part of it, with lockstep's class paths; the classes that it names shortly are imported.

    Args:
        config: plain values, in dicts and lists.

    Raises:
        TypeError: it names a class of Lightning's that lockstep does not have.
    """
    moved: dict[str, str] = {}
    found = _known_here(config, moved)
    if moved:
        read = ", ".join(f"{path} as {home}" for path, home in moved.items())
        rank_zero_info(f"class paths of Lightning are read as lockstep's (`lockstep migrate FILE` writes them): {read}")
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
