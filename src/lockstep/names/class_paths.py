"""Short names of classes, as configs and command lines have them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from lockstep.names.finder import ROOT

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


def known_here(config: Any) -> Any:
    """A config or a part of it, when the classes that it names have been imported.

    Args:
        config: plain values, in dicts and lists.
    """
    if isinstance(config, dict):
        for each in config.values():
            known_here(each)
    elif isinstance(config, list):
        for each in config:
            known_here(each)
    elif isinstance(config, str):
        import_named(config)
    return config
