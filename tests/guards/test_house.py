"""The laws of the house (docs/architecture.md), read off the source; each law is shown to catch a breach."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.guards.border import between, crossings
from tests.guards.source import PROJECT, Source, Sources, house, imports, numbers, read

# Part -> floor. A part is a folder or file directly under lockstep/; it imports from its floor or below.
FLOORS = {
    "ground": 1,
    "data": 1,
    "cluster": 1,
    "profilers": 1,
    "engines": 2,
    "memory": 2,
    "checkpoint": 2,
    "precision": 2,
    "callbacks": 2,
    "loggers": 2,
    "launch": 2,
    "supervise": 2,
    "module": 2,
    "hooks": 2,
    "datamodule": 2,
    # on the third: STRATEGIES
    "config": 4,
    "loop": 4,
    "names": 4,
    "attributes": 5,
    "trainer": 5,
    "tuner": 6,
    "cli": 6,
    "extensions": 7,
    "__main__": 6,
}
STRATEGIES = {
    *("strategy", "engine", "ranks", "collectives", "table", "buffers", "copies"),
    *("sharded.fsdp", "sharded.model_parallel"),
}
"""Files of engines/ that know of a run, besides each folder's file `strategy`; the others work in a loop by hand."""

CROSSINGS = {
    "buffers": "ddp.consistency ddp.sync_batchnorm",
    "sharded.fsdp": "ddp.reducer ddp.strategy",
    "sharded.fully_shard": "ddp.consistency ddp.transport",
    "sharded.model_parallel": "ddp.consistency",
    "sharded.sharded_init": "ddp.consistency",
    "sharded.strategy": "ddp.consistency ddp.late_parameters",
}
"""Who imports what of another engine's folder. It may only become less."""

# Stand beside the house. Only the testing part may import from any floor; nobody inside imports any of them.
APART = {"testing"}
FACES = {
    "lockstep",
    "lockstep.callbacks",
    "lockstep.cli",
    "lockstep.loggers",
    "lockstep.extensions.parallel.hooks",
    "lockstep.profilers",
    "lockstep.strategies",
    "lockstep.testing",
    "lockstep.tuner",
    "lockstep.utilities",
}
# Users' overrides of hooks name the Trainer (`def on_fit_start(self, trainer: Trainer, ...)`), so the signatures that
# they override name it, too. These parts may import exactly this one from above, for type checkers only.
TRAINER = "lockstep.trainer"
NAME_THE_TRAINER = {"callbacks", "loggers", "module", "datamodule", "loop"}
ENGINES = ("engines", "memory", "precision", "data")
ABOVE_ENGINES = ("trainer", "loop", "callbacks")
READS_ENVIRONMENT = ("cluster", "launch", "supervise", "testing")
FORBIDDEN_NAMES = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "connector",
    "connectors",
    "manager",
    "managers",
}
MAY_BE_TWICE = {
    "ModelSummary": "users import both: Lightning's callback, and its table of layers",
}
"""Names of classes that two files have, and why."""


def is_face(module: str) -> bool:
    """The faces, and the old paths under `lockstep.utilities`: they re-export, and nobody inside imports them."""
    return module in FACES or module.startswith("lockstep.utilities.")


def inner_imports(source: Source, sources: Sources) -> Iterator[tuple[int, str]]:
    may_name_it = type_only_lines(source) if source.part in NAME_THE_TRAINER else set()
    for line, name in imports(source, sources):
        if name.split(".")[0] == "lockstep" and not (name == TRAINER and line in may_name_it):
            yield line, name


def type_only_lines(source: Source) -> set[int]:
    """The lines below ``if TYPE_CHECKING:``."""
    return {
        line
        for node in source.nodes
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for each in node.body
        for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)
    }


def engines_file(module: str) -> str:
    """The name of a file below ``engines/``; "" for any other."""
    return module.removeprefix("lockstep.engines.") if module.startswith("lockstep.engines.") else ""


def floor_of(module: str) -> int:
    """The floor that a file stands on; 0 for ``lockstep`` itself."""
    part = module.split(".")[1] if "." in module else ""
    file = engines_file(module)
    if file in STRATEGIES or file.endswith(".strategy"):
        return 3
    return FLOORS.get(part, 0)


# -- the laws: each gives one sentence per breach -----------------------------------------------------------


def floors(sources: Sources) -> Iterator[str]:
    for source in sources.values():
        if is_face(source.module) or source.part == "testing":
            continue
        if source.part not in FLOORS and source.part not in APART:
            yield f"{source.path}: {source.part!r} stands on no floor; give it one in FLOORS"
            continue
        mine = floor_of(source.module)
        for line, name in inner_imports(source, sources):
            part = name.split(".")[1] if "." in name else ""
            if is_face(name) or (part == source.part and part != "engines"):
                continue
            if part in APART:
                yield f"{source.path}:{line} imports {name}, which stands apart"
            elif floor_of(name) > mine:
                yield f"{source.path}:{line} (floor {mine}) imports {name} (floor {floor_of(name)})"


def wings(sources: Sources) -> Iterator[str]:
    """The folder of one engine imports nothing of another's, and what all of them stand on nothing of any."""
    for source in sources.values():
        mine = engines_file(source.module)
        allowed = CROSSINGS.get(mine, "").split()
        for line, name in inner_imports(source, sources):
            other = engines_file(name)
            wing = other.partition(".")[0] if "." in other else ""
            if mine and wing and wing != mine.partition(".")[0] and other not in allowed:
                yield f"{source.path}:{line} imports {name}, which is another engine's"


def circles(sources: Sources) -> Iterator[str]:
    """Files that reach each other by imports, faces left out."""
    graph = {
        source.module: {name for _, name in inner_imports(source, sources) if name in sources and not is_face(name)}
        for source in sources.values()
        if not is_face(source.module)
    }
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[str]:
        if module in path:
            yield "a circle: " + " -> ".join([*path[path.index(module) :], module])
        elif module not in done:
            for name in sorted(graph.get(module, ())):
                yield from visit(name, [*path, module])
            done.add(module)

    for module in sorted(graph):
        yield from visit(module, [])


def faces(sources: Sources) -> Iterator[str]:
    """Nobody inside imports from a face; an `__init__` that is no face holds one docstring."""
    for source in sources.values():
        for line, name in inner_imports(source, sources):
            if is_face(name) and not is_face(source.module):
                yield f"{source.path}:{line} imports from the face {name}; import from the file"
        if source.is_init and not is_face(source.module) and len(source.tree.body) != 1:
            yield f"{source.path} is no face: it holds one docstring and nothing else"


def class_names(sources: Sources) -> Iterator[str]:
    """A name has one meaning in the whole package."""
    homes: dict[str, str] = {}
    for source in sources.values():
        for node in numbers(source).classes:
            before = homes.setdefault(node.name, str(source.path))
            if before != str(source.path) and node.name not in MAY_BE_TWICE:
                yield f"{source.path}:{node.lineno} has a class {node.name}, and so has {before}: say of what each is"


def names(sources: Sources) -> Iterator[str]:
    for source in sources.values():
        for part in source.path.with_suffix("").parts:
            if part.lower().strip("_") in FORBIDDEN_NAMES or part.lower().endswith(("_utils", "_helpers")):
                yield f"{source.path}: {part!r} is no noun that says what is inside"


def docstrings(sources: Sources) -> Iterator[str]:
    for source in sources.values():
        if not (ast.get_docstring(source.tree) or "").strip():
            yield f"{source.path} does not open with a docstring that says what it is"


def engines(sources: Sources) -> Iterator[str]:
    """The engines are usable from a hand-written loop, but for the files that know of a run."""
    for source in sources.values():
        if floor_of(source.module) == 3:
            continue
        for line, name in inner_imports(source, sources):
            if source.part in ENGINES and name.split(".")[1:2] and name.split(".")[1] in ABOVE_ENGINES:
                yield f"{source.path}:{line} is an engine and imports {name}"


def environment(sources: Sources) -> Iterator[str]:
    """Settings and the cluster's variables are read and set in two places only."""
    for source in sources.values():
        if source.part in READS_ENVIRONMENT or source.module.startswith("lockstep.extensions.verify."):
            continue
        for node in source.nodes:
            used = (
                isinstance(node, ast.Attribute)
                and node.attr in {"environ", "environb", "getenv", "putenv", "unsetenv"}
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ) or (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in {"environ", "getenv", "putenv"} for alias in node.names)
            )
            if used:
                yield f"{source.path}:{node.lineno} touches the environment; that is for cluster/ and launch/"


def strategies_are_not_told_apart(sources: Sources) -> Iterator[str]:
    for source in sources.values():
        if source.part in ("engines", "extensions", "testing"):
            continue
        for node in source.nodes:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2):
                continue
            if node.func.id not in {"isinstance", "issubclass"}:
                continue
            for word in ast.walk(node.args[1]):
                name = getattr(word, "attr", getattr(word, "id", ""))
                if name.endswith("Strategy"):
                    yield f"{source.path}:{node.lineno} asks {node.func.id}(..., {name}); the seam is wrong"


def trainer_is_the_users(sources: Sources) -> Iterator[str]:
    """The loops hand the Trainer to hooks, and read the session; a profiler alone times the loops of the Trainer."""
    for source in sources.values():
        if source.part != "loop" or source.path.name == "profiled.py":
            continue
        for node in source.nodes:
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "trainer"
            ):
                yield f"{source.path}:{node.lineno} reads trainer.{node.attr}; the session has what a loop works on"


def border(sources: Sources) -> Iterator[str]:
    """The core imports no extension; faces repeat the table's names for type checkers."""
    yield from crossings(sources, {name: type_only_lines(sources[name]) for name in sources if is_face(name)})


LAWS: list[Callable[[Sources], Iterator[str]]] = [
    border,
    floors,
    wings,
    circles,
    faces,
    class_names,
    names,
    docstrings,
    engines,
    environment,
    strategies_are_not_told_apart,
    trainer_is_the_users,
]


# -- the house ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps(law: Callable[[Sources], Iterator[str]]) -> None:
    breaches = list(law(house()))
    assert not breaches, "\n".join(breaches)


def test_no_crossing_is_allowed_that_is_gone() -> None:
    used: set[tuple[str, str]] = set()
    for source in house().values():
        used |= {(engines_file(source.module), engines_file(name)) for _, name in inner_imports(source, house())}
    listed = {(file, other) for file, others in CROSSINGS.items() for other in others.split()}
    assert listed - used == set()


def test_extensions_import_no_other_extension() -> None:
    assert list(between(house())) == []


def test_the_architecture_page_names_every_part() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text()
    parts = {source.part for source in house().values()} - {""}
    spellings = {part: (f"{part}/", f"{part}.py", f"lockstep.{part}") for part in parts}
    assert [part for part in sorted(parts) if not any(one in page for one in spellings[part])] == []


# -- the laws -----------------------------------------------------------------------------------------------

VERIFY = "extensions/verify/a.py"
CASES = [
    (border, {"loop/a.py": "from lockstep.extensions.verify import a", VERIFY: ""}, "loop/a.py:1 imports"),
    (border, {"loop/a.py": "def f():\n    import lockstep.extensions.verify.a", VERIFY: ""}, "loop/a.py:2 imports"),
    (
        border,
        {"loop/a.py": "if TYPE_CHECKING:\n    from lockstep.extensions.verify.a import A", VERIFY: ""},
        "loop/a.py:2 imports",
    ),
    (border, {"loop/a.py": "import_module('lockstep.extensions.verify')"}, "has the path"),
    (border, {"callbacks/__init__.py": "from lockstep.extensions.verify.a import A", VERIFY: ""}, "__init__.py:1"),
    (
        floors,
        {"ground/rank.py": "from lockstep.loop import fit"},
        "(floor 1) imports lockstep.loop (floor 4)",
    ),
    (
        floors,
        {"ground/rank.py": "def f():\n    import lockstep.trainer"},
        "ground/rank.py:2 (floor 1) imports",
    ),
    (
        floors,
        {"launch/a.py": "if TYPE_CHECKING:\n    from lockstep.engines.ddp.strategy import DDPStrategy"},
        "launch/a.py:2 (floor 2) imports lockstep.engines.ddp.strategy",
    ),
    (floors, {"ground/rank.py": "from ..loop.fit import FitLoop"}, "imports lockstep.loop.fit (floor 4)"),
    (
        floors,
        {"callbacks/a.py": "from lockstep.trainer import Trainer", "trainer.py": '"""A."""'},
        "callbacks/a.py:1 (floor 2) imports lockstep.trainer (floor 5)",
    ),
    (
        floors,
        {"callbacks/a.py": "if TYPE_CHECKING:\n    from lockstep.loop.fit import FitLoop"},
        "callbacks/a.py:2 (floor 2) imports lockstep.loop.fit (floor 4)",
    ),
    (
        floors,
        {"engines/ranks.py": "if TYPE_CHECKING:\n    from lockstep.trainer import Trainer", "trainer.py": '"""A."""'},
        "engines/ranks.py:2 (floor 3) imports lockstep.trainer (floor 5)",
    ),
    (
        floors,
        {"engines/ddp/reducer.py": "from lockstep.engines.ranks import RankedStrategy", "engines/ranks.py": '"""A."""'},
        "reducer.py:1 (floor 2) imports lockstep.engines.ranks (floor 3)",
    ),
    (
        wings,
        {
            "engines/ddp/reducer.py": "from lockstep.engines.sharded import weights",
            "engines/sharded/weights.py": '"""A."""',
        },
        "reducer.py:1 imports lockstep.engines.sharded",
    ),
    (floors, {"attic/a.py": ""}, "'attic' stands on no floor"),
    (floors, {"loop/fit.py": "from lockstep.testing.models import BoringModel"}, "which stands apart"),
    (
        circles,
        {
            "ground/a.py": "from lockstep.ground import b",
            "ground/b.py": "def f():\n    from lockstep.ground.c import C",
            "ground/c.py": "from .a import A",
        },
        "a circle: lockstep.ground.a -> lockstep.ground.b -> lockstep.ground.c -> lockstep.ground.a",
    ),
    (faces, {"loop/fit.py": "from lockstep.callbacks import Callback"}, "the face lockstep.callbacks"),
    (faces, {"loop/fit.py": "from lockstep import Trainer"}, "the face lockstep;"),
    (faces, {"loop/fit.py": "from lockstep.utilities.grads import norm"}, "the face lockstep.utilities"),
    (faces, {"loop/fit.py": "from .. import callbacks"}, "the face lockstep.callbacks"),
    (faces, {"loop/__init__.py": '"""Loops."""\nfrom lockstep.loop.fit import FitLoop'}, "is no face"),
    (
        class_names,
        {"loop/fit.py": '"""A."""\nclass Plan: ...', "memory/meter.py": '"""A."""\nclass Plan: ...'},
        "memory/meter.py:2 has a class Plan, and so has lockstep/loop/fit.py",
    ),
    (names, {"ground/utils.py": '"""A."""'}, "'utils' is no noun"),
    (names, {"ground/tensor_utils.py": '"""A."""'}, "'tensor_utils' is no noun"),
    (names, {"misc/tree.py": '"""A."""'}, "'misc' is no noun"),
    (docstrings, {"ground/tree.py": "import torch"}, "tree.py does not open with a docstring"),
    (engines, {"data/order.py": "from lockstep.callbacks.base import Callback"}, "is an engine and imports"),
    (engines, {"engines/ddp/reducer.py": "def f():\n    from lockstep.loop import fit"}, "is an engine and imports"),
    (
        environment,
        {"loop/fit.py": "import os\nx = os.environ.get('RANK')"},
        "fit.py:2 touches the environment",
    ),
    (environment, {"trainer.py": "import os\nx = os.getenv('RANK')"}, "trainer.py:2 touches the environment"),
    (environment, {"trainer.py": "from os import environ"}, "trainer.py:1 touches the environment"),
    (
        strategies_are_not_told_apart,
        {"loop/fit.py": "if isinstance(self.strategy, (DDPStrategy, int)):\n    pass"},
        "isinstance(..., DDPStrategy)",
    ),
    (
        strategies_are_not_told_apart,
        {"trainer.py": "issubclass(kind, ddp.DDPStrategy)"},
        "issubclass(..., DDP",
    ),
    (trainer_is_the_users, {"loop/fit.py": "session.trainer.max_epochs"}, "loop/fit.py:1 reads trainer.max_epochs"),
]


@pytest.mark.parametrize(("law", "files", "said"), CASES)
def test_a_law_catches(
    law: Callable[[Sources], Iterator[str]], files: dict[str, str], said: str, tmp_path: Path
) -> None:
    package = tmp_path / "lockstep"
    for face in FACES:
        files = {"/".join([*face.split(".")[1:], "__init__.py"]): '"""A face."""', **files}
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    (breach,) = law(read(package))
    assert said in breach


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_law_lets_pass(law: Callable[[Sources], Iterator[str]], tmp_path: Path) -> None:
    files = {
        "__init__.py": '"""The face."""\nfrom lockstep.trainer import Trainer as Trainer',
        "callbacks/__init__.py": '"""A face."""\nfrom lockstep.callbacks.base import Callback as Callback',
        "callbacks/base.py": '"""Callbacks."""\nfrom lockstep.ground import tree\n'
        "if TYPE_CHECKING:\n    from lockstep.trainer import Trainer",
        "ground/__init__.py": '"""The ground floor."""',
        "ground/tree.py": '"""Trees."""\nimport os\nhere = os.getcwd()',
        "cluster/slurm.py": '"""Slurm."""\nimport os\nrank = os.environ["SLURM_PROCID"]',
        "trainer.py": '"""The Trainer."""\nfrom lockstep.callbacks.base import Callback\nisinstance(1, str)',
        "engines/ddp/reducer.py": '"""The reducer."""\nfrom lockstep.ground.tree import here',
        "data/order.py": '"""Order."""',
        "testing/equivalence.py": '"""A check."""\nfrom lockstep.trainer import Trainer',
    }
    for name, text in files.items():
        (tmp_path / "lockstep" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lockstep" / name).write_text(text)
    assert list(law(read(tmp_path / "lockstep"))) == []
