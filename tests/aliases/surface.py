"""What Lightning's public packages hold: the modules, and the names that users can import from each."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "lightning.pytorch"


def lightning() -> Any:
    """``lightning.pytorch``, with nothing that its import does to the environment; None where it is not installed."""
    before = os.environ.copy()
    try:
        return importlib.import_module(PACKAGE)
    except ModuleNotFoundError:
        return None
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]


def surface() -> dict[str, list[str]]:
    """Module path below ``lightning.pytorch`` -> its public names."""
    package = lightning()
    found = {"": names_of(package)}
    before = os.environ.copy()
    for module in pkgutil.walk_packages(package.__path__, f"{PACKAGE}."):
        path = module.name.removeprefix(f"{PACKAGE}.")
        if not any(part.startswith("_") for part in path.split(".")):
            found[path] = names_of(importlib.import_module(module.name))
    for name in set(os.environ) - set(before):
        del os.environ[name]
    return found


def names_of(module: ModuleType) -> list[str]:
    """What a module defines, hands on on purpose, or lists in ``__all__``; no modules, and nothing private."""
    names = set(getattr(module, "__all__", ()))
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None)
        mine = home == module.__name__
        # a package hands on what lies below it, or in the sister package for both of Lightning's APIs
        handed_on = hasattr(module, "__path__") and isinstance(home, str) and home.startswith("lightning.")
        if (mine or (handed_on and home != PACKAGE)) and not isinstance(value, ModuleType):
            names.add(name)
    names.update(name for name in _written(module) if hasattr(module, name))
    unimportant = {"Any", "log", "warning_cache"}
    kept = {name for name in names if not name.startswith("_") and name not in unimportant}
    return sorted(name for name in kept if not isinstance(getattr(module, name, None), ModuleType))


def _written(module: ModuleType) -> set[str]:
    """Constants, and imports that are marked as meant for others (``# noqa: F401``)."""
    text = Path(str(module.__file__)).read_text()
    lines, names = text.splitlines(), set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom) and "F401" in "".join(lines[node.lineno - 1 : node.end_lineno]):
            names.update(alias.asname or alias.name for alias in node.names)
    return names
