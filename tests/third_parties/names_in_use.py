"""List the names of Lightning that an installed package uses and that lockstep lacks, without importing the package.

    python -m tests.third_parties.names_in_use gluonts darts    # in an environment with lockstep and these packages

Imported names are imported; attributes of a Trainer (`trainer.fit_loop.epoch_loop`, `self.trainer.optimizers`) are
read in a hook of a small fit. Attributes that are set, and those of modules and loops in other variables, are not
seen.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lockstep
from lockstep import lightning as switch
from lockstep.testing import BoringModel

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")


def main(packages: list[str]) -> None:
    """Print the missing names of each package with the places that use them."""
    switch.enter()
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            print(f"{package}: not installed, or not a package")
            continue
        used: dict[str, str] = {}
        for folder in spec.submodule_search_locations:
            for path in sorted(Path(folder).rglob("*.py")):
                for name, line in names_in(path.read_text(errors="replace")):
                    used.setdefault(name, f"{path.relative_to(folder)}:{line}")
        missing = [name for name in used if not is_there(name)]
        print(f"{package}: {len(used)} names, {len(missing)} missing")
        for name in sorted(missing):
            print(f"  {name}  ({used[name]})")


def names_in(source: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line): ``lightning.pytorch.Trainer`` for imports, ``trainer.fit_loop`` for attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in old sources
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.partition(".")[0] in ROOTS:
                    aliases[name.asname or name.name.partition(".")[0]] = (
                        name.name if name.asname else name.name.partition(".")[0]
                    )
                    yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in ROOTS:
            for name in node.names:
                aliases[name.asname or name.name] = f"{node.module}.{name.name}"
                yield f"{node.module}.{name.name}", node.lineno
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner and isinstance(node.ctx, ast.Load):
            found = chain(node)
            if found and found[0] in aliases:
                yield ".".join([aliases[found[0]], *found[1:]]), node.lineno
            elif "trainer" in found[:-1]:
                yield ".".join(found[found.index("trainer") :]), node.lineno


def chain(node: ast.expr) -> list[str]:
    """Return ["self", "trainer", "fit_loop"] for ``self.trainer.fit_loop``; [] for what has calls in it."""
    if isinstance(node, ast.Attribute):
        before = chain(node.value)
        return [*before, node.attr] if before else []
    return [node.id] if isinstance(node, ast.Name) else []


def is_there(name: str) -> bool:
    """Return True if lockstep has the name; it is imported as far as modules go, and read from there."""
    first, *rest = name.split(".")
    found: Any = in_a_fit() if first == "trainer" else importlib.import_module(first)
    path = first
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except Exception:  # whatever the finder raises for what is refused
                return False
        except Exception:
            return isinstance(getattr(type(found), part, None), property)  # not to be read here, but there
    return True


@functools.cache
def in_a_fit() -> lockstep.Trainer:
    """Return the Trainer of a small fit."""
    trainer = lockstep.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(BoringModel())
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
