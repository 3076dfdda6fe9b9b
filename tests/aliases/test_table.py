"""Everything that can be imported from Lightning's public packages can be from lockstep, or says why not."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest

import lockstep
from lockstep.names.finder import COMPLETED
from lockstep.names.table import Refused, table
from tests.aliases.surface import lightning, surface
from tests.tools.extensions import needs

MODULES, OLD = table()["pytorch"], table()["earlier"]


def home_of(row: str, name: str) -> str:
    """The path below lockstep to which a row of the table leads."""
    module, _, own = row.partition(":")
    return f"{module}.{own or name}"


ROWS = [
    pytest.param(path, name, marks=[] if isinstance(row := rows[name], Refused) else needs(home_of(row, name)))
    for path, rows in sorted(MODULES.items())
    if isinstance(rows, dict)
    for name in sorted(rows)
    if name
]
PAIRS = [row.values for row in ROWS]
REFUSED_MODULES = sorted(path for path, rows in MODULES.items() if isinstance(rows, Refused))


def lockstep_path(path: str) -> str:
    return f"lockstep.{path}".rstrip(".")


def outcome(path: str, name: str | None = None) -> str:
    """What becomes of an import: "works", or the text of the ImportError."""
    try:
        module = importlib.import_module(lockstep_path(path))
        if name is not None:
            exec(f"from {module.__name__} import {name}", {})
    except ImportError as error:
        return str(error)
    return "works"


@pytest.mark.extension("extras", "lightning")  # whose names they are that are missing then
@pytest.mark.filterwarnings("ignore")
def test_every_name_of_lightnings_can_be_imported_or_says_why_not() -> None:
    if lightning() is None:
        pytest.skip("lightning is not installed")
    mute = []
    for path, names in surface().items():
        for name in [None, *names]:
            said = outcome(path, name)
            if said != "works" and not (said.startswith("lockstep") and len(said.partition(": ")[2]) > 20):
                mute.append(f"{path}.{name}: {said}")
    assert mute == []


@pytest.mark.filterwarnings("ignore")
def test_the_table_has_no_rows_that_lightning_does_not_have() -> None:
    if lightning() is None:
        pytest.skip("lightning is not installed")
    known = surface()
    old = [f"{path}.{name}" for path, rows in OLD.items() if isinstance(rows, dict) for name in rows]
    extra = [
        name
        for name in (f"{path}.{name}" for path, name in PAIRS if name not in known.get(path, []))
        if name not in old
    ]
    # what one imports in Lightning from the sister package, or from modules that import it by chance
    assert set(extra) <= {
        ".Fabric",
        "cli.LRSchedulerType",
        "loggers.NeptuneLogger",
        "loggers.logger.rank_zero_experiment",
        "utilities.data.suggested_max_num_workers",
        "utilities.enums.GradClipAlgorithmType",
        "utilities.warnings.PossibleUserWarning",
        "utilities.rank_zero.rank_zero_module",
        "utilities.rank_zero.LightningDeprecationWarning",
        *(f"utilities.throughput.{name}" for name in MODULES["utilities.throughput"]),
    }
    sisters = {"fabric", "utilities.apply_func", "utilities.throughput"}
    assert set(MODULES) - {*known, *OLD, *sisters} == set()
    assert [name for name in old if name.rpartition(".")[2] in known.get(name.rpartition(".")[0], [])] == []


@pytest.mark.parametrize(("path", "name"), ROWS)
def test_a_row_leads_home_or_says_why_not(path: str, name: str) -> None:
    row = MODULES[path][name]  # type: ignore[index]
    said = outcome(path, name)
    assert said == (f"{lockstep_path(path)}.{name}: {row}" if isinstance(row, Refused) else "works")


@pytest.mark.parametrize("path", REFUSED_MODULES)
def test_a_refused_module_says_why(path: str) -> None:
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(lockstep_path(path))
    parent = path.rpartition(".")[0]
    assert str(error.value).endswith(str(MODULES[parent] if parent in REFUSED_MODULES else MODULES[path]))


def test_a_row_is_there_for_what_the_file_has_not() -> None:
    """The table says nothing twice: a file of lockstep that has the name needs no row for it."""
    for path, name in PAIRS:
        file = path in COMPLETED and sys.modules.get(lockstep_path(path))
        own = vars(file).get(name) if file else None
        assert (getattr(own, "__module__", ""), getattr(own, "__name__", "")) != (lockstep_path(path), name)


def test_files_that_have_rows_are_known() -> None:
    """So the finder need not read the table when it finds one of them."""
    folder, found = Path(lockstep.__file__).parent, set()
    for path, rows in MODULES.items():
        file = folder.joinpath(*path.split("."))
        is_file = file.with_suffix(".py").exists() or (file / "__init__.py").exists()
        if path and is_file and (rows or any(other.startswith(f"{path}.") for other in MODULES)):
            found.add(path)
    assert found == COMPLETED


# -- the mechanism --------------------------------------------------------------------------------------------


def test_an_object_is_the_same_by_every_path() -> None:
    from lockstep.callbacks.base import Callback
    from lockstep.callbacks.callback import Callback as by_alias
    from lockstep.pytorch.callbacks import Callback as by_long_path

    assert lockstep.Callback is Callback is by_alias is by_long_path
    assert by_alias.__module__ == "lockstep.callbacks.base"


def test_lockstep_pytorch_is_lockstep() -> None:
    import lockstep.pytorch
    import lockstep.pytorch.callbacks.early_stopping as stopping
    from lockstep.pytorch import Trainer

    assert lockstep.pytorch is lockstep
    assert stopping is sys.modules["lockstep.callbacks.early_stopping"]
    assert Trainer is lockstep.Trainer
    assert lockstep.__spec__.name == "lockstep"
    assert stopping.__spec__ is not None
    assert stopping.__spec__.name == stopping.__name__ == "lockstep.callbacks.early_stopping"


def test_a_file_can_have_modules_below_it() -> None:
    import lockstep.trainer.states
    from lockstep.ground.types import TrainerFn
    from lockstep.trainer import seed_everything
    from lockstep.trainer.trainer import Trainer

    assert Trainer is lockstep.Trainer is sys.modules["lockstep.trainer"].Trainer  # type: ignore[attr-defined]
    assert lockstep.trainer.states.TrainerFn is TrainerFn
    assert seed_everything is lockstep.seed_everything


def test_an_alias_lists_what_it_has() -> None:
    import lockstep.plugins.environments as environments

    assert "TorchElasticEnvironment" in environments.__all__
    assert "TorchElasticEnvironment" in dir(environments)
    assert "XLAEnvironment" not in dir(environments)
    assert "plugins.environments" in str(environments.__doc__)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from lockstep.callbacks.callback import nothing  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(AttributeError, match="'lockstep' has no attribute 'nothing'"):
        _ = lockstep.nothing
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'lockstep\.nothing'"):
        importlib.import_module("lockstep.nothing")
    assert not hasattr(lockstep.utilities, "nothing")


def test_fabric_is_refused_with_what_to_take() -> None:
    with pytest.raises(ImportError, match=r"lockstep has no Fabric\. .*DistributedDataParallel"):
        from lockstep import Fabric  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="lockstep has no Fabric"):
        importlib.import_module("lockstep.fabric.utilities")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from lockstep import data_loader", r"define `def train_dataloader\(self\)` alone"),
        ("from lockstep.core.decorators import auto_move_data", r"trainer\.predict\(\) moves batches"),
        ("from lockstep import TrainResult", "return the loss from the step"),
        ("from lockstep.loggers.test_tube import TestTubeLogger", "use TensorBoardLogger"),
        ("from lockstep.lite import LightningLite", "LightningLite became Fabric: lockstep has no Fabric"),
        ("from lockstep.plugins import DDPPlugin", r"give Trainer\(strategy=\.\.\.\)"),
    ],
)
def test_what_is_gone_since_2019_names_todays_way(line: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        exec(line)


def test_a_refused_name_is_no_attribute() -> None:
    """``hasattr(lockstep, "fabric")`` raised ImportError, and so did a look at any other name that is refused."""
    for module, name in (
        (lockstep, "fabric"),
        (lockstep, "Fabric"),
        (lockstep.loggers, "NeptuneLogger"),
        (lockstep.utilities, "LightningEnum"),
        (importlib.import_module("lockstep.core.optimizer"), "do_nothing_closure"),
        (importlib.import_module("lockstep.callbacks.timer"), "Interval"),
    ):
        assert not hasattr(module, name)
        assert getattr(module, name, None) is None
        with pytest.raises(AttributeError, match=rf"{module.__name__}\.{name}: .{{20}}"):
            getattr(module, name)
        with pytest.raises(ImportError, match=rf"{module.__name__}\.{name}: .{{20}}"):
            exec(f"from {module.__name__} import {name}", {})


def test_an_alias_hides_nothing_of_a_files_own() -> None:
    for path in MODULES:
        parent, _, last = path.rpartition(".")
        file = Path(lockstep.__file__).parent.joinpath(*parent.split("."), "__init__.py") if parent else None
        if file is not None and file.exists():
            body = ast.parse(file.read_text()).body
            defined = {getattr(node, "name", "") for node in body}
            assert last not in defined, path
