"""scripts/measure counts a sample as a hand counted it, and says what the project's own numbers are."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from tests.guards.source import PROJECT, Source, numbers

SCRIPT = PROJECT / "scripts" / "measure"

ENGINE = '''\
"""An engine."""

import math  # a comment


class Engine:
    """What strategies override."""

    window = None
    """Set by some."""

    def step(self, values: list[int], text: str = "") -> int:
        """Counts.

        Not code.
        """
        if values and text or self.window:
            return len([v for v in values if v > 1 if v < 5])
        elif text:
            # nothing
            return 1
        return 2 if values else math.floor(0.5)

    def load(self) -> str:
        return """
# no comment

"""

    def __init__(self) -> None: ...
'''
# lines: import, class, window, def, if, return, elif, return, return, def, the string of four, def
ENGINE_LINES = 15
# and, or; if; the comprehension, its two conditions; elif; the ternary
STEP_DECISIONS = 2 + 1 + 3 + 1 + 1

DERIVED = '''\
"""Strategies."""
from strategies import engine
class Middle(engine.Engine):
    def __init__(self): self.a = f"{1:>{2}}"
class DDPStrategy(Middle):
    def step(self, values, text=""):
        def inner(value):
            match value:
                case 1: return 0
                case _: return 1
        try:
            return inner(values)
        except ValueError:
            while True:
                for one in values: pass
    def window(self): ...
    def own(self): ...
class Later(DDPStrategy):
    def step(self): ...
'''
STRINGS = r"""
x = r'a\' \"b' \
    '', f'{1}#', '''
# it is text
'''
"""
# def __init__: 6 of (def __init__ ( self ) :), 5 of (self . a = "...")
INIT_TOKENS = 6 + 5


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    loader = SourceFileLoader("measure", str(SCRIPT))
    module = module_from_spec(spec_from_loader(loader.name, loader))  # type: ignore[arg-type]
    sys.modules["measure"] = module  # dataclasses look their module up
    try:
        loader.exec_module(module)
    finally:
        del sys.modules["measure"]
    return module


@pytest.fixture(scope="module")
def sample(measure: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("sample")
    files = {
        "strategies/engine.py": ENGINE,
        "strategies/more/ddp.py": DERIVED,
        "hpc/trials.py": "class Trial: ...\n" * 2 + "#\n" * 800,
        "hpc/engine.py": "class Copies:\n    def put(self): ...\nclass More(Copies):\n    def put(self): ...\n",
    }
    for name, text in files.items():
        path = root / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "checks" / "parts" / "deep").mkdir(parents=True)
    (root / "checks" / "parts" / "deep" / "test_a.py").write_text('"""A test."""\nassert True\n')
    return measure.report(root / "house", root / "checks")


def test_lines_and_decisions_are_those_of_a_hand(sample: dict) -> None:
    found = numbers(Source(Path("engine.py"), ENGINE))
    assert found.lines == ENGINE_LINES
    assert [(one.name, one.decisions) for one in found.functions] == [
        ("Engine.step", STEP_DECISIONS),
        ("Engine.load", 0),
        ("Engine.__init__", 0),
    ]
    assert found.decisions == STEP_DECISIONS


def test_tokens_are_those_of_a_hand() -> None:
    (line,) = (line for line in DERIVED.split("\n") if "f" in line and "__init__" in line)
    assert numbers(Source(Path("a.py"), line.strip())).tokens == INIT_TOKENS
    assert numbers(Source(Path("a.py"), '"""No token."""\nx = (1.5e-3 ** -y) # none\n')).tokens == 8
    assert numbers(Source(Path("a.py"), STRINGS)).tokens == 8  # three strings, two commas, three lines of text


def test_folders_hold_what_lies_below_them(sample: dict) -> None:
    assert set(sample["folders"]) == {"strategies", "strategies/more", "hpc"}
    inner, outer = sample["folders"]["strategies/more"], sample["folders"]["strategies"]
    assert inner["files"] == 1
    assert inner["decisions"] == 3  # two arms and a handler
    assert outer["files"] == 2
    assert outer["decisions"] == STEP_DECISIONS + 3
    assert outer["density"] == round(1000 * (STEP_DECISIONS + 3) / (ENGINE_LINES + inner["lines"]))
    assert sample["total"]["lines"] == outer["lines"] + sample["folders"]["hpc"]["lines"]
    assert sample["tests"] == {"parts": 1}


def test_the_seam_is_what_is_overridden(sample: dict) -> None:
    assert sample["overridden"] == {"step": ["DDPStrategy", "Later"], "window": ["DDPStrategy"]}


def test_what_is_too_long_or_exists_twice_is_named(sample: dict) -> None:
    assert list(sample["class_names_twice"]) == ["Trial"]
    assert len(sample["class_names_twice"]["Trial"]) == 2
    assert sample["long_files"] == {"house/hpc/trials.py": 802}
    assert sample["longest_functions"][0]["name"] == "Engine.step"
    assert sample["functions_above_decisions"] == 0
    assert sample["functions_above_lines"] == 0


@pytest.mark.slow  # 5 s of a processor
def test_the_script_prints_the_project(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    found = json.loads(run.stdout)
    parts = [size for name, size in found["folders"].items() if "/" not in name]
    assert sum(size["lines"] for size in parts) == found["total"]["lines"] > 30_000
    assert found["tests_total"] > 30_000
    assert len(found["longest_functions"]) == 20
    assert "step" in found["overridden"]


def test_a_reader_gets_a_table(measure: ModuleType, sample: dict) -> None:
    said = measure.text(sample)
    assert "strategies " in said
    assert "\n  more " in said
    assert "files above 800 lines: 1\n  house/hpc/trials.py: 802" in said
