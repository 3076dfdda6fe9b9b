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


def test_lines_are_those_of_a_hand() -> None:
    found = numbers(Source(Path("engine.py"), ENGINE))
    assert found.lines == ENGINE_LINES
    assert found.comments == 1
    assert [one.name for one in found.functions] == ["Engine.step", "Engine.load", "Engine.__init__"]


def test_tokens_are_those_of_a_hand() -> None:
    (line,) = (line for line in DERIVED.split("\n") if "f" in line and "__init__" in line)
    assert numbers(Source(Path("a.py"), line.strip())).tokens == INIT_TOKENS
    assert numbers(Source(Path("a.py"), '"""No token."""\nx = (1.5e-3 ** -y) # none\n')).tokens == 8
    assert numbers(Source(Path("a.py"), STRINGS)).tokens == 8  # three strings, two commas, three lines of text


def test_folders_hold_what_lies_below_them(sample: dict) -> None:
    assert set(sample["folders"]) == {"strategies", "strategies/more", "hpc"}
    inner, outer = sample["folders"]["strategies/more"], sample["folders"]["strategies"]
    assert inner["files"] == 1
    assert outer["files"] == 2
    assert outer["lines"] == ENGINE_LINES + inner["lines"]
    assert sample["core"]["lines"] == outer["lines"] + sample["folders"]["hpc"]["lines"]
    assert sample["tests"] == {"parts": 1}


def test_the_seam_is_what_is_overridden(sample: dict) -> None:
    assert sample["overridden"] == {"step": ["DDPStrategy", "Later"], "window": ["DDPStrategy"]}


def test_what_exists_twice_is_named(sample: dict) -> None:
    assert list(sample["class_names_twice"]) == ["Trial"]
    assert len(sample["class_names_twice"]["Trial"]) == 2


BORDER = {
    "__init__.py": "",
    "ground/table.py": "def asked(): ...\ndef for_all(): ...\ndef _private(): return 1\nfor_all()\n",
    "extensions/own/a.py": "from house.ground.table import asked, for_all, _private\nasked(), _private()\n",
}


def test_what_crosses_the_border_is_counted(measure: ModuleType, tmp_path: Path) -> None:
    for name, text in BORDER.items():
        (tmp_path / "lockstep" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lockstep" / name).write_text(text.replace("house", "lockstep"))
    found = measure.report(tmp_path / "lockstep", None)
    assert found["core"]["lines"] == 4
    assert found["extensions"]["lines"] == 2
    assert found["only_for_extensions"] == [
        "1 lockstep/ground/table.py: asked",
        "1 lockstep/ground/table.py: _private",
    ]
    assert found["private_names_for_extensions"] == ["lockstep/extensions/own/a.py: _private"]
    assert (found["private_functions_used_once"], found["short_functions_used_once"]) == (1, 1)


@pytest.mark.slow  # 5 s of a processor
def test_the_script_prints_the_project(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True, cwd=tmp_path)
    found = json.loads(run.stdout)
    assert found["core"]["lines"] > 30_000
    assert found["tests_total"] > 30_000
    assert "step" in found["overridden"]


def test_a_reader_gets_a_table(measure: ModuleType, sample: dict) -> None:
    said = measure.text(sample)
    assert "strategies " in said
    assert "\n  more " in said
    assert "class names that exist twice: 1" in said
