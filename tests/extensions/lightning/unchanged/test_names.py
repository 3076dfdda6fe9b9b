"""Lightning's names lead to lockstep: in a process and all that it starts, whether Lightning is installed or not."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import types
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import lockstep
from lockstep import lightning as names
from lockstep.cli.run import planned
from lockstep.ground.errors import MisconfigurationException
from lockstep.launch.elastic_run import _variables
from lockstep.launch.environment import SITE, STANDS_FOR, STANDS_IN, names_variables
from lockstep.names.finder import FINDER, resolve
from lockstep.names.table import Refused, table
from tests.scripts.in_rank import run_script
from tests.tools.fresh import python
from tests.tools.pool import RankPool

HERE = Path(__file__).parent
COMMAND = Path(names.__file__)
HOME = "lockstep.callbacks.base"


def in_mode(ranks: RankPool, folder: Path, *words: str | Path) -> CompletedProcess[str]:
    """``python -m lockstep.lightning words``, in a copy of a process that has imported lockstep."""
    return run_script(ranks, COMMAND, *map(str, words), folder=folder)[0]


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


# -- one process ---------------------------------------------------------------------------------------------


def told(ended: CompletedProcess[str]) -> dict[str, Any]:
    """What ``names.py`` printed."""
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition(" = ") for line in ended.stdout.splitlines() if " = " in line]
    return {name: eval(value) for name, _, value in lines}


def test_what_a_script_finds_by_lightnings_names(ranks: RankPool, tmp_path: Path) -> None:
    found = told(in_mode(ranks, tmp_path, HERE / "names.py", "a", "--b"))
    assert found["roots"] == [True, True]
    assert found["across"] is True
    assert found["module"] == ["lockstep.module", "lockstep.callbacks.early_stopping", True]
    assert found["star"] is True
    assert found["versions"] == [STANDS_FOR] * 4
    assert found["metadata"] == [STANDS_FOR] * 3
    assert (found["files"], found["folder"]) == (["__init__.py"] * 3 + ["finder.py"], True)
    assert (found["requirement"], found["spec"]) == ("pytorch-lightning", "lightning.pytorch.callbacks")
    assert found["arguments"] == {"lr": 1, "depth": 2}
    assert (found["seed"], found["filesystem"], found["load"], found["moved"]) == (3, "LocalFileSystem", True, 1.0)
    assert (found["environment"], found["rank"], found["enum"]) == (False, 0, True)
    assert found["warnings"] == [True, True]
    assert found["attribute"] == [False, False]
    assert (found["pickle"], found["old pickle"], found["old hparams"]) == (True, True, "AttributeDict")
    assert found["lockstep's version"] is True
    assert found["itself"] == ["__main__", str(HERE / "names.py"), None, [str(HERE / "names.py"), "a", "--b"]]
    # what is refused can be imported where it is a class, and says why when it is made
    assert found["refused"] == [True, False]
    assert (
        found["made"]
        == "MisconfigurationException: XLAStrategy(...): it requires torch_xla, but lockstep uses TPUs through the "
        "package torch_tpu: accelerator='tpu'."
    )
    assert found["derived"].startswith("MisconfigurationException: Mine(...): it requires torch_xla")
    assert found["fabric"].startswith("MisconfigurationException: Fabric(...): lockstep has no Fabric. Keep your loop")
    assert found["loops"].startswith("MisconfigurationException: _FitLoop(...): Lightning's loops are internal")
    assert found["mps"] == "nothing"
    asks = r"imported by the script \(<string>:1\): "
    assert re.match(rf"ModuleNotFoundError: lightning\.fabric\.strategies\.launchers, {asks}", found["fabric file"])
    assert re.match(rf"ModuleNotFoundError: .*get_torchvision_model, {asks}call torchvision", found["function"])
    assert re.match(rf"ModuleNotFoundError: .*callbacks\.Nothing, {asks}lockstep has no object", found["unknown"])
    assert re.match(rf"ModuleNotFoundError: .*callbacks\.nothing, {asks}.* without --light", found["unknown file"])


def test_a_third_party_that_asks_for_what_is_not_there_is_named_with_its_line(ranks: RankPool, tmp_path: Path) -> None:
    package = tmp_path / "thirdparty"
    package.mkdir()
    (package / "__init__.py").write_text("\nfrom lightning.pytorch.utilities.imports import _OMEGACONF_AVAILABLE\n")
    ended = in_mode(ranks, tmp_path, script(tmp_path, "import thirdparty"))
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(
        "ModuleNotFoundError: lightning.pytorch.utilities.imports._OMEGACONF_AVAILABLE, imported by "
    )
    assert f"imported by thirdparty ({package / '__init__.py'}:2): " in last


PRIVATE = """
from lightning.pytorch import Callback, Trainer


class Reads(Callback):
    def __init__(self, what):
        self.what = what

    def on_train_end(self, trainer, pl_module):
        print(self.what, "=", repr(eval(self.what)))
"""
FIT = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import thirdparty, sys
L.Trainer(accelerator="cpu", max_steps=3, logger=False, enable_progress_bar=False, enable_checkpointing=False,
          enable_model_summary=False, callbacks=[thirdparty.Reads(what) for what in sys.argv[1:]]).fit(BoringModel())
"""


def test_private_attributes_that_do_no_harm_can_be_read(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "thirdparty.py").write_text(PRIVATE)
    asked = {
        "trainer._accelerator_connector.is_distributed": False,
        "trainer._accelerator_connector.strategy is trainer.strategy": True,
        "[device.type for device in trainer._accelerator_connector._parallel_devices]": ["cpu"],
        "trainer._checkpoint_connector.dump_checkpoint(True)['global_step']": 3,
        "sorted(trainer._logger_connector.callback_metrics)": [],
        "trainer._logger_connector.log_metrics({'a': 1.0}, 2)": None,
        "len(trainer._callback_connector._reorder_callbacks(trainer.callbacks))": 1,
        "trainer.fit_loop.epoch_loop._batches_that_stepped": 3,
        "trainer.fit_loop.batch_idx, trainer.fit_loop.total_batch_idx": (2, 2),
        "hasattr(trainer, '_results')": False,
        "hasattr(trainer._data_connector, 'prepare_data')": False,
    }
    ended = in_mode(ranks, tmp_path, script(tmp_path, FIT), *asked)
    assert ended.returncode == 0, ended.stderr
    lines = [line.rpartition(" = ") for line in ended.stdout.splitlines() if " = " in line]
    assert {what: eval(value) for what, _, value in lines} == {**asked, list(asked)[6]: len(asked)}


@pytest.mark.parametrize(
    "what",
    [
        "trainer._results",
        "trainer._data_connector.prepare_data()",
        "trainer._accelerator_connector._precision_flag",
        "trainer.fit_loop._data_source",
        "trainer.fit_loop.epoch_loop.batch_progress",
    ],
)
def test_other_private_attributes_name_the_package_and_line_that_read_them(
    what: str, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "thirdparty.py").write_text(PRIVATE.replace("eval(self.what)", what))
    ended = in_mode(ranks, tmp_path, script(tmp_path, FIT), "it")
    assert ended.returncode == 1
    said = next(line for line in ended.stderr.splitlines() if line.startswith("AttributeError: "))
    assert said.startswith(f"AttributeError: {what.removesuffix('()')}, which thirdparty ({tmp_path}/thirdparty.py:10)")
    assert said.endswith(
        "Do not use the part of thirdparty that needs it, or run with Lightning itself, without --lightning."
    )


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning", "other"])
def test_a_script_that_silences_lightnings_logger_silences_lockstep(name: str, ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "thirdparty.py").write_text("")
    text = f"import logging\nlogging.getLogger({name!r}).setLevel(logging.ERROR)\n{FIT}".replace(
        "enable_model_summary=False, ", ""
    )
    said = in_mode(ranks, tmp_path, script(tmp_path, text)).stderr
    assert ("trainer.fit ended: max_steps=3 reached." in said) == (name == "other")


def test_a_script_that_imports_both_names(ranks: RankPool, tmp_path: Path) -> None:
    text = """
        import lockstep
        import lightning
        assert lightning.LightningModule is lockstep.LightningModule
        assert lightning.pytorch.callbacks.Timer is lockstep.callbacks.Timer
        print("one")
    """
    assert in_mode(ranks, tmp_path, script(tmp_path, text)).stdout == "one\n"


def test_a_pin_below_2_is_told_the_version_that_one_says(ranks: RankPool, tmp_path: Path) -> None:
    text = """
        from importlib.metadata import version
        if int(version("lightning").split(".")[0]) >= 2:
            raise SystemExit("thirdparty needs lightning<2, and there is " + version("lightning"))
        import pytorch_lightning
        print(pytorch_lightning.__version__, pytorch_lightning.Trainer.__module__)
    """
    path = script(tmp_path, text)
    assert in_mode(ranks, tmp_path, path).stderr == f"thirdparty needs lightning<2, and there is {STANDS_FOR}\n"
    ended = run_script(ranks, COMMAND, str(path), folder=tmp_path, environ={STANDS_IN: "1.9.5"})[0]
    assert ended.stdout == "1.9.5 lockstep.trainer\n"


def test_an_older_lightning_that_is_installed_is_not_looked_at(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "installed"
    for package in ("lightning", "pytorch_lightning"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('of an older Lightning')")
        info = folder / f"{package}-1.9.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.9.5\n")
    text = f"""
        import sys
        sys.path.insert(0, {str(folder)!r})
        from importlib.metadata import version
        import pytorch_lightning
        print(pytorch_lightning.Trainer.__module__, version("pytorch-lightning"))
    """
    assert in_mode(ranks, tmp_path, script(tmp_path, text)).stdout == f"lockstep.trainer {STANDS_FOR}\n"


def test_a_lightning_that_was_imported_before_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names.ROOTS}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    module = types.ModuleType("pytorch_lightning")
    module.__file__ = "/there/pytorch_lightning/__init__.py"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", module)
    said = r"`pytorch_lightning` is imported already \(from /there/.*`lockstep run --lightning script.py`.*%load_ext"
    with pytest.raises(MisconfigurationException, match=said):
        names.load_ipython_extension(None)
    assert not names.LIGHTNING.is_installed
    assert STANDS_IN not in os.environ


def test_what_is_switched_on_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in names.ROOTS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    before = list(sys.meta_path)
    names.enter()
    names.enter()
    try:
        import lightning.pytorch as pl

        assert pl.Trainer is lockstep.Trainer
        assert os.environ["PYTHONPATH"] == f"{SITE}{os.pathsep}/mine"
        assert sys.meta_path == [FINDER, *(finder for finder in before if finder is not FINDER)]
    finally:
        names.unload_ipython_extension(None)
    assert (len(sys.meta_path), FINDER.version) == (len(before), None)
    assert not [name for name in sys.modules if name.partition(".")[0] in names.ROOTS]
    assert (os.environ["PYTHONPATH"], STANDS_IN in os.environ) == ("/mine", False)


def test_test_tubes_names_are_lockstep_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts of 2019 took the parser and the cluster from there, beside Lightning."""
    for name in [name for name in sys.modules if name.partition(".")[0] in names.ROOTS]:
        monkeypatch.delitem(sys.modules, name)
    names.enter()
    try:
        import test_tube
        from test_tube.argparse_hopt import HyperOptArgumentParser  # type: ignore[import-not-found]
        from test_tube.hpc import SlurmCluster  # type: ignore[import-not-found]

        assert test_tube.HyperOptArgumentParser is HyperOptArgumentParser is lockstep.HyperOptArgumentParser
        assert test_tube.SlurmCluster is SlurmCluster is lockstep.SlurmCluster
        with pytest.raises(MisconfigurationException, match="use TensorBoardLogger"):
            test_tube.Experiment()
        with pytest.raises(ModuleNotFoundError, match="test_tube"):
            __import__("test_tube.other")
    finally:
        names.leave()
    assert "test_tube" not in sys.modules


def test_python_that_ignores_the_environment_is_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in names.ROOTS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(names.sys, "flags", types.SimpleNamespace(ignore_environment=1, no_site=0))
    with pytest.warns(UserWarning, match="Python was started with -E, -I or -S"):
        names.enter()
    names.leave()


OBJECTS = """
    import lightning as L
    import torch
    import warnings
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Normalizer:
        scale = 3

    class Model(BoringModel):
        def __init__(self, normalizer, loss, width=2):
            super().__init__()
            self.save_hyperparameters()
            self.loss_function = loss

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = {"range": range(3), "normalizer": self.hparams.normalizer}

    model = Model(Normalizer(), torch.nn.L1Loss())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False,
                            enable_model_summary=False)
        trainer.fit(model)
    path = trainer.checkpoint_callback.best_model_path
    print([str(each.message) for each in caught if "weights_only" in str(each.message)])
    again = Model.load_from_checkpoint(path, weights_only=False)
    print(again.hparams.normalizer.scale, type(again.loss_function).__name__, again.hparams.width)
    print(torch.load(path, weights_only=False)["mine"]["range"])
    try:
        Model.load_from_checkpoint(path)
    except Exception as error:
        print(type(error).__name__, str(error)[:90])
"""


def test_a_checkpoint_holds_what_a_script_for_lightning_puts_into_it(ranks: RankPool, tmp_path: Path) -> None:
    """Hyperparameters that are objects were refused, which pytorch-forecasting's models have."""
    ended = in_mode(ranks, tmp_path, script(tmp_path, OBJECTS))
    assert ended.returncode == 0, ended.stderr
    warned, kept, mine, refused = ended.stdout.splitlines()[-4:]
    assert "contains objects that are not tensors or plain values. To load it, pass weights_only=False" in warned
    assert len(eval(warned)) == 1
    assert (kept, mine) == ("3 L1Loss 2", "range(0, 3)")
    assert refused.startswith("MisconfigurationException The checkpoint ")


def test_without_lightnings_names_such_hyperparameters_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    path = script(tmp_path, OBJECTS.replace("lightning as L", "lockstep as L").replace("lightning.pytorch", "lockstep"))
    ended = run_script(ranks, path, folder=tmp_path)[0]
    assert "the hyperparameter 'normalizer' is a __main__.Normalizer, which cannot be saved" in ended.stderr


LOADS = """
import lightning.pytorch as pl
from lightning.fabric.accelerators.cuda import num_cuda_devices
from lightning.pytorch.core.saving import _load_from_checkpoint, get_filesystem
from lightning.pytorch.demos.boring_classes import BoringModel

class Own(BoringModel):
    def __init__(self, width: int = 3):
        super().__init__()
        self.save_hyperparameters()

    @classmethod
    def load_from_checkpoint(cls, path, strict=False):
        return _load_from_checkpoint(cls, path, None, None, strict, width=5)

trainer = pl.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False)
trainer.fit(Own())
trainer.save_checkpoint("own.ckpt")
loaded = Own.load_from_checkpoint("own.ckpt")
print("own =", [type(loaded).__name__, loaded.hparams.width, type(get_filesystem("own.ckpt")).__name__])
print("devices =", num_cuda_devices())
try:
    from lightning.pytorch.core.saving import load_hparams_from_yaml
except ImportError as error:
    print("refused =", ["use yaml: yaml.safe_load(file)" in str(error)])
"""


def test_a_class_with_a_way_of_its_own_to_load_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    found = told(in_mode(ranks, tmp_path, script(tmp_path, LOADS)))
    assert found["own"] == ["Own", 5, "LocalFileSystem"]
    assert found["devices"] == torch.cuda.device_count()
    assert found["refused"] == [True]


# -- the tables ----------------------------------------------------------------------------------------------


def test_the_rows_of_fabric_lead_home() -> None:
    for section in (table()["fabric"], table()["third_parties"], table()["test_tube"]):
        for path, rows in section.items():
            for name, row in rows.items() if isinstance(rows, dict) else ():
                assert isinstance(row, Refused) or resolve(row, name) is not None, (path, name)


def test_fabrics_rows_are_names_of_lightnings() -> None:
    found = find_spec("lightning")  # imported, it would set variables
    if found is None or found.origin is None:
        pytest.skip("lightning is not installed")
    for section, part in (("fabric", "fabric"), ("third_parties", "pytorch")):
        for path in table()[section]:
            file = Path(found.origin).with_name(part).joinpath(*path.split("."))
            assert file.with_suffix(".py").exists() or (file / "__init__.py").exists(), path


def test_the_version_is_that_of_the_lightning_that_tests_compare_with() -> None:
    try:
        assert version("lightning") == STANDS_FOR
    except PackageNotFoundError:
        pytest.skip("lightning is not installed")


# -- words ---------------------------------------------------------------------------------------------------


def test_the_flag_reaches_the_ranks_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with_flag, without = planned(["--lightning", "train.py", "--lr", "1"]), planned(["train.py", "--lr", "1"])
    assert (with_flag.words, with_flag.name) == (without.words, without.name)
    assert _variables(with_flag, tmp_path, {"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{SITE}{os.pathsep}/mine"
    assert STANDS_IN not in _variables(without, tmp_path, {})
    twice = names_variables(names_variables({}))
    assert twice == {STANDS_IN: STANDS_FOR, "PYTHONPATH": SITE}


@pytest.mark.parametrize(
    ("words", "by_script"),
    [
        ("--lightning train.py", True),
        ("train.py --lightning --lr 1", True),
        ("train.py", False),
        ("--lightning --devices 1 train.py", False),
        ("--lightning --max-restarts 1 train.py", False),
        ("--lightning --resume train.py", False),
    ],
)
def test_without_options_the_scripts_trainer_starts_its_own_number_of_ranks(
    words: str, by_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert planned(words.split()).by_script == by_script


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "usage: python -m lockstep.lightning script.py"),
        (["--help"], 0, "usage: python -m lockstep.lightning script.py"),
        (["nothing.py"], 1, "lockstep.lightning: nothing.py does not exist (in "),
    ],
)
def test_words_that_name_no_script(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        names.main(words)
    output = capsys.readouterr()
    text = ended.value.code if isinstance(ended.value.code, str) else output.out + output.err
    assert (text.startswith(said), isinstance(ended.value.code, str) or ended.value.code == code) == (True, True)


# -- other processes -----------------------------------------------------------------------------------------


def folder_of(tmp_path: Path) -> Path:
    for name in ("train.py", "helper.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    return tmp_path


def check(ended: CompletedProcess[str], world: int) -> None:
    assert ended.returncode == 0, ended.stderr
    for rank in range(world):
        assert f"rank {rank} of {world}: {HOME}" in ended.stdout
    assert f"done: Lightning {STANDS_FOR}, []" in ended.stdout


MODULE = ["-m", "lockstep.lightning"]


def test_spawned_workers_have_the_names(ranks: RankPool, tmp_path: Path) -> None:
    """A process that is started by a command line without a word of lockstep, as ranks are."""
    check(in_mode(ranks, folder_of(tmp_path), "train.py", "auto", "1", "spawn"), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "world"),
    [
        ([*MODULE, "train.py", "ddp", "2", "spawn"], 2),
        ([*MODULE, "train.py", "ddp_spawn", "2", "fork"], 2),
        ([*MODULE, "train.py", "ddp_fork", "2", "none"], 2),
        ([*MODULE, "train.py", "auto", "1", "forkserver"], 1),
        ([*MODULE, "-m", "train", "ddp", "2", "none"], 2),
        (["-m", "torch.distributed.run", "--nproc-per-node", "2", *MODULE, "train.py", "ddp", "2", "spawn"], 2),
        (["-m", "lockstep", "run", "--lightning", "--devices", "2", "train.py", "ddp", "2", "spawn"], 2),
        (["-m", "lockstep", "run", "--lightning", "--devices", "2", "-m", "train", "ddp", "2", "none"], 2),
        (["-m", "lockstep", "run", "--lightning", "train.py", "ddp", "2", "spawn"], 2),
        (["-m", "lockstep", "run", "--lightning", "-m", "train", "ddp_spawn", "2", "none"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_way_to_start_ranks_hands_the_names_down(command: list[str], world: int, tmp_path: Path) -> None:
    check(python(*command, folder=folder_of(tmp_path)), world)


@pytest.mark.slow
def test_a_folder_runs_as_a_script(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.mkdir()
    (program / "__main__.py").write_text((HERE / "train.py").read_text())
    (program / "helper.py").write_text((HERE / "helper.py").read_text())
    check(python(*MODULE, "program", "ddp", "2", "none", folder=tmp_path), 2)


def test_a_process_that_is_started_imports_nothing_until_a_name_is_asked_for(tmp_path: Path) -> None:
    text = """
        import sys
        assert "torch" not in sys.modules and "lockstep" not in sys.modules
        import mine
        print(mine.who, "torch" in sys.modules)
        import lightning
        print(lightning.__version__, "torch" in sys.modules, lightning.Trainer.__module__)
        print(sys.whose)
    """
    (tmp_path / "mine.py").write_text("who = 'mine'")
    other = tmp_path / "site"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.whose = 'the user'\n")
    variables = names_variables({"PYTHONPATH": os.pathsep.join([str(other), os.environ.get("PYTHONPATH", "")])})
    path = script(tmp_path, text)
    ended = python(path, folder=tmp_path, **variables)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"mine False\n{STANDS_FOR} True lockstep.trainer\nthe user\n"


def test_a_python_without_lockstep_goes_on_without(tmp_path: Path) -> None:
    """A process below may be of another environment: there the names are whose they were."""
    (tmp_path / "lightning.py").write_text("where = 'its own'")
    path = script(tmp_path, "import lightning\nprint(lightning.where)")
    hidden = "import sys; sys.modules['lockstep'] = None; import runpy; runpy.run_path(sys.argv[1])"
    ended = python("-c", hidden, path, folder=tmp_path, **{STANDS_IN: STANDS_FOR, "PYTHONPATH": SITE})
    assert ended.stdout == "its own\n", ended.stderr


@pytest.mark.slow
def test_a_notebook(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "%load_ext lockstep.lightning",
        "import sys; sys.argv[1:] = []\nimport lightning as L, helper, torch\nfrom torch.utils.data import DataLoader",
        "class Net" + (HERE / "train.py").read_text().split("class Net")[1].split("def real_lightning")[0],
        "trainer = L.Trainer(accelerator='cpu', devices=2, max_epochs=1, callbacks=[helper.Tells()], logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        "loader = DataLoader(torch.ones(8, 2), batch_size=2, num_workers=1, multiprocessing_context='spawn')\n"
        "trainer.fit(Net(), loader)",
        "print(L.__version__, trainer.callback_metrics['loss'].item() > 0)",
    ]
    folder_of(tmp_path)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    text = "".join(output.get("text", "") for cell in book.cells for output in cell.outputs)
    assert f"rank 1 of 2: {HOME}" in capfd.readouterr().out
    assert f"{STANDS_FOR} True" in text


# -- cost ----------------------------------------------------------------------------------------------------


def test_a_python_that_asks_for_none_of_them_pays_nothing_to_speak_of(tmp_path: Path) -> None:
    path = script(tmp_path, "import sys, time\nprint(time.process_time(), 'torch' in sys.modules)")
    with_names, without = [], []
    for _ in range(6):
        for times, variables in ((with_names, names_variables()), (without, {})):
            seconds, torch_is_there = python(path, folder=tmp_path, **variables).stdout.split()
            times.append(float(seconds))
            assert torch_is_there == "False"
    assert min(with_names) - min(without) < 0.02, (with_names, without)


def test_a_step_runs_no_line_of_this(ranks: RankPool, tmp_path: Path) -> None:
    text = """
        import sys
        import lightning as L
        from lightning.pytorch.demos.boring_classes import BoringModel

        class Model(BoringModel):
            def on_train_batch_start(self, batch, batch_idx):
                if batch_idx == 2:
                    sys.setprofile(lambda frame, event, arg: files.add(frame.f_code.co_filename))

            def on_train_epoch_end(self):
                sys.setprofile(None)

        files = set()
        L.Trainer(accelerator="cpu", max_steps=8, logger=False, enable_progress_bar=False,
                  enable_checkpointing=False, enable_model_summary=False).fit(Model())
        print(len(files) > 3, [file for file in files if file.endswith(("lightning.py", "sitecustomize.py"))])
    """
    assert in_mode(ranks, tmp_path, script(tmp_path, text)).stdout == "True []\n"
