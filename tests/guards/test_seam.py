"""What strategies override of the seam, and the flags by which they say what they are: it may only become less."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.guards.source import PROJECT, Source, Sources, house, imports, numbers

SEAM = {
    "Engine": (
        "setup_module setup_optimizers run backward skip clip step window named_parameters whole_parameters save load "
        "teardown"
    ),
    "Strategy": ("connect setup_environment building check_trained load_checkpoint held set_requires_grad steps_end"),
    "Gradients": "local whole window_state load_window_state",
}
"""The methods that some class overrides, by the class that offers them; `docs/architecture.md` says what they do."""

MOST_METHODS, MOST_FLAGS = 25, 7
OFFERED_BY = (*SEAM, "ModelCopies", "Collectives")
ENGINES = ("lockstep.engines.", *(f"lockstep.extensions.{name}." for name in ("balancing", "deepspeed", "parallel")))
BASE = ("engine", "strategy")
"""Files of engines/ that know of no engine."""


def classes(sources: Sources) -> dict[str, ast.ClassDef]:
    """Those of engines, in the core and in extensions that bring one."""
    engines = (source for source in sources.values() if source.module.startswith(ENGINES))
    return {one.name: one for source in engines for one in numbers(source).classes}


def bases(name: str, known: dict[str, ast.ClassDef]) -> Iterator[str]:
    """A class's bases, and theirs."""
    for base in known[name].bases if name in known else ():
        base = base.value if isinstance(base, ast.Subscript) else base  # of a generic class
        above = getattr(base, "attr", getattr(base, "id", ""))
        yield above
        yield from bases(above, known)


def offered(kind: ast.ClassDef) -> set[str]:
    named = {one.target.id for one in kind.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    return named | {one.name for one in kind.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("__")}


def overridden(sources: Sources) -> dict[str, set[str]]:
    """By the class of the seam that offers it, outermost: what other classes put in its place."""
    known = classes(sources)
    found: dict[str, set[str]] = defaultdict(set)
    for name, kind in known.items():
        if name not in OFFERED_BY:
            above = set(bases(name, known))
            for method in (one.name for one in kind.body if isinstance(one, ast.FunctionDef)):
                owner = next((one for one in OFFERED_BY if one in above and method in offered(known[one])), None)
                if owner is not None:
                    found[owner].add(method)
    return dict(found)


def flags(kind: ast.ClassDef) -> list[str]:
    fields = [one for one in kind.body if isinstance(one, ast.AnnAssign)]
    return [ast.unparse(one.target) for one in fields if ast.unparse(one.annotation) == "bool"]


def test_what_strategies_override_is_what_the_seam_lists() -> None:
    listed = {owner: set(methods.split()) for owner, methods in SEAM.items()}
    assert overridden(house()) == listed
    assert sum(map(len, listed.values())) <= MOST_METHODS


def test_the_page_names_each_method() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text()
    missing = [name for methods in SEAM.values() for name in methods.split() if f"`{name}`" not in page]
    assert missing == []


def test_flags_are_few_and_on_the_page() -> None:
    known = classes(house())
    found = [*flags(known["Engine"]), *flags(known["Strategy"])]
    assert len(found) <= MOST_FLAGS, found
    page = (PROJECT / "docs" / "architecture.md").read_text()
    assert [name for name in found if f"`{name}`" not in page] == []


def test_the_base_knows_no_engine() -> None:
    sources = house()
    for file in BASE:
        source = sources[f"lockstep.engines.{file}"]
        wings = [
            name for _, name in imports(source, sources) if name.startswith("lockstep.engines.") and name.count(".") > 2
        ]
        assert wings == [], source.path


def test_a_new_override_is_found() -> None:
    text = (
        '"""A."""\nclass Engine:\n    window: object = None\n    flag: bool = False\n    def run(self): ...\n'
        "class Strategy(Engine):\n    def join(self): ...\n    def _inner(self): ...\n"
        "class Middle(Strategy):\n    def join(self): ...\n    def own(self): ...\n"
        "class Last(Middle):\n    def run(self): ...\n    def window(self): ...\n    def _inner(self): ...\n"
        "    def own(self): ...\n    def __init__(self): ...\n"
    )
    sources = {"lockstep.engines.a": Source(Path("lockstep/engines/a.py"), text)}
    assert overridden(sources) == {"Engine": {"run", "window"}, "Strategy": {"join", "_inner"}}
    assert flags(classes(sources)["Engine"]) == ["flag"]
