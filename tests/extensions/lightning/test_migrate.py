"""`lockstep migrate`: what it changes in imports and flags, what it reports by line, and that what it has changed runs."""

# ruff: noqa: E501 - tables of lines before and after

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.run import main
from lockstep.extensions.lightning.migrate import ROWS, migrated
from lockstep.loop.checks import EPOCH_ENDS
from lockstep.names.old_flags import OLD_FLAGS
from lockstep.names.table import Refused, former_methods, table
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool


def moved(text: str) -> str:
    found, _ = migrated(text)
    ast.parse(found)
    return found


def told(text: str, by_hand: bool = True) -> list[str]:
    return [note.text for note in migrated(text)[1] if note.by_hand is by_hand]


def trainer(flags: str) -> str:
    """What becomes of a Trainer's flags, on one line."""
    found = moved(f"import pytorch_lightning as pl\nt = pl.Trainer({flags})\n")
    return found.partition("pl.Trainer(")[2].rstrip()[:-1]


# -- imports -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import lightning as L\nL.Trainer()", "import lockstep as L\nL.Trainer()"),
        ("import lightning.pytorch as pl", "import lockstep as pl"),
        ("import pytorch_lightning as pl, torch", "import lockstep as pl, torch"),
        ("import os; import pytorch_lightning as ptl  # here", "import os; import lockstep as ptl  # here"),
        ("import lightning\nlightning.Trainer()", "import lockstep as lightning\nlightning.Trainer()"),
        (
            "import lightning\nx = lightning.pytorch.Trainer",
            "import lockstep as lightning\nx = lightning.pytorch.Trainer",
        ),
        (
            "import lightning.pytorch\nlightning.pytorch.Trainer()",
            "import lockstep as lightning\nlightning.pytorch.Trainer()",
        ),
        (
            "import lightning.pytorch.callbacks\nlightning.pytorch.callbacks.Timer()",
            "import lockstep as lightning\nlightning.pytorch.callbacks.Timer()",
        ),
        ("import lightning.pytorch.callbacks as c", "import lockstep.callbacks as c"),
        ("import pytorch_lightning.callbacks", "import lockstep as pytorch_lightning"),
        ("from lightning.pytorch import Trainer as T", "from lockstep import Trainer as T"),
        ("from test_tube import HyperOptArgumentParser, SlurmCluster as S", "from lockstep import HyperOptArgumentParser, SlurmCluster as S"),
        ("from test_tube.hpc import SlurmCluster", "from lockstep import SlurmCluster"),
        ("from lightning import pytorch as pl", "from lockstep import pytorch as pl"),
        ("if True:\n    from lightning import pytorch as pl, Trainer", "if True:\n    from lockstep import pytorch as pl, Trainer"),
        ("from pytorch_lightning import *\nTrainer(max_nb_epochs=1)", "from lockstep import *\nTrainer(max_epochs=1)"),
        (
            "from lightning.pytorch.callbacks import (\n    EarlyStopping,  # stops\n    ModelCheckpoint,\n)",
            "from lockstep.callbacks import (\n    EarlyStopping,  # stops\n    ModelCheckpoint,\n)",
        ),
        (
            "from lightning.pytorch.callbacks.early_stopping import EarlyStopping",
            "from lockstep.callbacks.early_stopping import EarlyStopping",
        ),
        ("from lightning.fabric import seed_everything", "from lockstep import seed_everything"),
        ("from lightning_fabric.utilities.seed import seed_everything", "from lockstep.utilities.seed import seed_everything"),
        (
            "from lightning.fabric.plugins.environments import SLURMEnvironment",
            "from lockstep.plugins.environments import SLURMEnvironment",
        ),
        ("from lightning.fabric.utilities.rank_zero import rank_zero_only", "from lockstep.utilities.rank_zero import rank_zero_only"),
        ("from pytorch_lightning.core.lightning import LightningModule", "from lockstep.core.lightning import LightningModule"),
        ("from pytorch_lightning.utilities.distributed import rank_zero_only", "from lockstep.utilities.distributed import rank_zero_only"),
        ("from pytorch_lightning.utilities.cli import LightningCLI", "from lockstep.utilities.cli import LightningCLI"),
    ],
)  # fmt: skip
def test_imports(before: str, after: str) -> None:
    """Bodies stay as they are, and what is imported is there."""
    assert moved(f"{before}\n") == f"{after}\n"
    assert told(f"{before}\n") == []
    imports = [node for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Import | ast.ImportFrom)]
    exec("\n".join(ast.unparse(node) for node in imports), names := {})
    for node in ast.walk(ast.parse(after)):
        if isinstance(node, ast.Attribute) and not after.startswith("import lockstep as pytorch_lightning\ndef"):
            assert eval(ast.unparse(node), names) is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from lightning.pytorch.plugins import DeepSpeedPrecision", "DeepSpeedPrecision: DeepSpeed needs no precision"),
        ("from lightning.fabric import Fabric", "Fabric: lockstep has no Fabric"),
        ("from pytorch_lightning.loops import *", r"\*: Lightning's loops are internal"),
        ("from pytorch_lightning.utilities.cloud_io import get", "get: lockstep has no object with this name"),
        ("from lightning.pytorch import nothing", "nothing: lockstep has no object with this name"),
        ("import lightning.pytorch as pl\npl.strategies.XLAStrategy()", "pl.strategies.XLAStrategy: it requires torch_xla"),
        ("import pytorch_lightning as pl\npl.metrics.Accuracy()", "pl.metrics: metrics are in a separate package"),
        ("import pytorch_lightning as pl\npl.__version__", "__version__ is lockstep's version"),
        ("import pytorch_lightning as pl\npl.Trainer.from_argparse_args(args)", r"Trainer\.from_argparse_args\(\) was removed in Lightning"),
        ("import pytorch_lightning as pl\nlogging.getLogger('pytorch_lightning')", "the text 'pytorch_lightning' contains a name of"),
        ("import pytorch_lightning as pl\nfrom test_tube import Experiment", "Experiment: test_tube is .* TensorBoardLogger"),
        ("from pytorch_lightning.metrics import Accuracy", "Accuracy: metrics are in a separate package"),
        ("from pytorch_lightning import data_loader, Trainer", r"data_loader: a loader method needs no decorator"),
        ("from pytorch_lightning.core import auto_move_data", r"auto_move_data: trainer.predict\(\) moves batches"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_told(line: str, said: str) -> None:
    assert [text for text in told(line) if re.search(said, text)], told(line)


# -- flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gpus=8, distributed_backend='ddp'", "accelerator='gpu', devices=8, strategy='ddp'"),
        ("gpus=8, nb_gpu_nodes=12, distributed_backend='ddp'", "num_nodes=12, accelerator='gpu', devices=8, strategy='ddp'"),
        ("gpus=[0, 1]", "accelerator='gpu', devices=[0, 1], strategy='dp'"),
        ("gpus='0, 1', max_epochs=3", "accelerator='gpu', devices=[0, 1], strategy='dp', max_epochs=3"),
        ("gpus=1, use_amp=True", "accelerator='gpu', devices=1, precision='16-mixed'"),
        ("amp_level='O2', use_amp=False", ""),
        ("num_processes=2, accelerator='ddp_cpu'", "accelerator='cpu', devices=2, strategy='ddp_spawn'"),
        ("max_nb_epochs=n, min_nb_epochs=1", "max_epochs=n, min_epochs=1"),
        ("train_percent_check=0.1, val_percent_check=1", "limit_train_batches=0.1, limit_val_batches=1.0"),
        ("show_progress_bar=False, log_save_interval=10", "enable_progress_bar=False"),
        ("log_gpu_memory=None, auto_lr_find=False", ""),
        ("log_gpu_memory=None, max_epochs=1, auto_lr_find=False", "max_epochs=1"),
        ("terminate_on_nan=True", "non_finite='stop'"),
        ("terminate_on_nan=False, max_epochs=1", "max_epochs=1"),
        ("reload_dataloaders_every_epoch=True", "reload_dataloaders_every_n_epochs=1"),
        ("checkpoint_callback=False", "enable_checkpointing=False"),
        ("weights_summary=None", "enable_model_summary=False"),
        ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
        ("max_epochs=1,", "max_epochs=1,"),
        ("devices=None", "devices=None"),
        # not to be known here
        ("gpus=args.gpus", "gpus=args.gpus"),
        ("gpus=2, strategy=args.strategy", "gpus=2, strategy=args.strategy"),
        ("overfit_pct=part", "overfit_pct=part"),
        ("track_grad_norm=2", "track_grad_norm=2"),
        ("track_grad_norm=norm", "track_grad_norm=norm"),
        ("early_stop_callback=True, callbacks=mine", "early_stop_callback=True, callbacks=mine"),
        ("checkpoint_callback=saver", "checkpoint_callback=saver"),
        ("weights_summary='full'", "weights_summary='full'"),
        ("progress_bar_refresh_rate=20", "progress_bar_refresh_rate=20"),
        ("resume_from_checkpoint=path", "resume_from_checkpoint=path"),
        ("max_nb_epochs=1, max_epochs=2", "max_nb_epochs=1, max_epochs=2"),
        ("max_nb_epochs=1, max_epochs=None", "max_nb_epochs=1, max_epochs=None"),
        ("use_amp=True, precision='16-mixed'", "use_amp=True, precision='16-mixed'"),
        ("amp_backend='apex'", "amp_backend='apex'"),
    ],
)  # fmt: skip
def test_flags(before: str, after: str) -> None:
    assert trainer(before) == after
    text = f"import pytorch_lightning as pl\nt = pl.Trainer({before})\n"
    assert bool(told(text)) == (before == after not in ("max_epochs=1,", "devices=None"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("early_stop_callback=True", r"today callbacks=\[EarlyStopping\(\.\.\.\)\]"),
        ("weights_summary='full'", r"today callbacks=\[ModelSummary"),
        ("resume_from_checkpoint=path", r"today trainer\.fit\(\.\.\., ckpt_path=path\)"),
        ("gpus=args.gpus", r"Trainer\(gpus=args\.gpus\): its meaning today depends on the value"),
        ("checkpoint_callback=saver", "depends on the value"),
        ("track_grad_norm=2", "this old flag was removed; call `self.log_dict.*on_before_optimizer_step`"),
        ("track_grad_norm=norm", "this old flag was removed; call `self.log_dict.*on_before_optimizer_step`"),
        ("max_nb_epochs=1, max_epochs=2", "remove one of the two"),
        ("max_nb_epochs=1, max_epochs=None", "today max_epochs=1, but this flag is also set"),
        ("amp_backend='apex'", "amp_backend='apex'.*is no longer supported"),
        ("**flags", "old flags in it are translated when the script runs"),
    ],
)
def test_flags_that_stay_are_told_of(flags: str, said: str) -> None:
    (text,) = told(f"import pytorch_lightning as pl\nt = pl.Trainer({flags})\n")
    assert re.search(said, text), text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "flags",
    [
        "max_nb_epochs=3, min_nb_epochs=1, train_percent_check=1, val_percent_check=0.5, overfit_pct=0.25",
        "gpus=0, distributed_backend='dp', use_amp=False, amp_level='O2'",
        "num_processes=2, distributed_backend='ddp_cpu', nb_sanity_val_steps=0, gradient_clip=0.5",
        "num_processes=2, accelerator='ddp_spawn', row_log_interval=7, terminate_on_nan=True",
        "gpus=None, nb_gpu_nodes=1, use_amp=True, amp_level='O3', reload_dataloaders_every_epoch=True",
        "weights_summary=None, progress_bar_refresh_rate=0, default_save_path='there', checkpoint_callback=False",
        "log_save_interval=3, replace_sampler_ddp=False, track_grad_norm=-1",
    ],
)
def test_flags_that_were_moved_make_the_same_trainer(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the Trainer itself translates them while it runs."""
    monkeypatch.chdir(tmp_path)
    made = []
    for today in (flags, trainer(flags)):
        found = eval(f"pl.Trainer({today})", {"pl": lockstep})
        kinds = {type(each).__name__ for each in (found.strategy, found.precision_plugin, *found.callbacks)}
        made.append((found.config, found.world_size, kinds))
    assert made[0] == made[1]
    assert not {name for name in OLD_FLAGS if f"{name}=" in trainer(flags)} - {"accelerator"}


def test_lines_of_their_own_go_with_their_comments() -> None:
    text = (
        "import pytorch_lightning as pl\n"
        "pl.Trainer(\n    # how long\n    max_nb_epochs=3,  # few\n    log_save_interval=1,  # often\n"
        "    # where\n    gpus=2,\n    distributed_backend='ddp',\n    amp_level='O1'\n)\n"
    )
    assert moved(text) == (
        "import lockstep as pl\n"
        "pl.Trainer(\n    # how long\n    max_epochs=3,  # few\n"
        "    # where\n    accelerator='gpu', devices=2, strategy='ddp',\n)\n"
    )


def test_every_old_flag_is_changed_or_told_of() -> None:
    for name in OLD_FLAGS:
        text = f"import pytorch_lightning as pl\nt = pl.Trainer({name}=some.value)\nt.fit(m)\n"
        assert f"{name}=" not in moved(text) or told(text), name


# -- what is reported by line --------------------------------------------------------------------------------


def module(body: str, base: str = "pl.LightningModule") -> str:
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    return f"import pytorch_lightning as pl\n\nclass Net({base}):\n{lines}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (module("@pl.data_loader\ndef tng_dataloader(self):\n    return 1"), [
            (4, "pl.data_loader: a loader method needs no decorator: define `def train_dataloader(self)` alone."),
            (5, "tng_dataloader: no longer called; use train_dataloader."),
        ]),
        (module("def training_epoch_end(self, outputs):\n    print(outputs)"), [
            (4, "training_epoch_end: no longer called; use on_train_epoch_end(self), with the outputs of the "
                "steps in an attribute."),
        ]),
        (module("def on_epoch_end(self, t, m):\n    pass", "pl.callbacks.EarlyStopping"), [
            (4, "on_epoch_end: no longer called; use on_train_epoch_end."),
        ]),
        (module("def on_epoch_end(self, t, m):\n    pass", "object"), []),
        (module("def __init__(self, hparams):\n    self.hparams = hparams"), [
            (5, "self.hparams = ...: today self.save_hyperparameters(...)."),
        ]),
        (module("def training_step(self, b, i, optimizer_idx: int):\n    x"), [
            (4, "optimizer_idx: with several optimizers set self.automatic_optimization = False; step them in "
                "training_step."),
        ]),
        ("from pytorch_lightning import Trainer\nt = Trainer()\nt.fit(m, train_dataloader=a)\nt.test(test_dataloaders=b)\n", [
            (3, "fit(train_dataloader=...): today train_dataloaders=."),
            (4, "test(test_dataloaders=...): today dataloaders=."),
        ]),
        ("import pytorch_lightning as pl\npl.callbacks.ModelCheckpoint(period=1)\n", [
            (2, "ModelCheckpoint(period=...): today every_n_epochs=."),
        ]),
    ],
)  # fmt: skip
def test_what_is_to_be_done_by_hand(text: str, said: list[tuple[int, str]]) -> None:
    found, notes = migrated(text)
    assert sorted((note.line, note.text) for note in notes if note.by_hand) == said
    assert found == re.sub("(import|from) pytorch_lightning", r"\1 lockstep", text)  # bodies stay


def test_what_is_behind_a_property_is_not_told_of() -> None:
    lines = ["self.trainer.logger.log_metrics({})", "self.trainer.strategy.root_device", "self.trainer.model.eval()"]
    assert told(module("def on_fit_end(self):\n    " + "\n    ".join(lines))) == []
    text = "import lightning as L\ntrainer = L.Trainer()\ntrainer.checkpoint_callback.best_model_path\n"
    assert told(f"{text}L.seed_everything.cache\n") == []


def test_every_hook_of_old_is_told_of() -> None:
    ends = {name for names in EPOCH_ENDS.values() for name in names}
    for kind, names in (
        ("LightningModule", {*former_methods("module"), *ends}),
        ("Callback", former_methods("callback")),
    ):
        for name in names:
            assert told(module(f"def {name}(self):\n    pass", f"pl.{kind}")), (kind, name)


# -- what differs --------------------------------------------------------------------------------------------


def test_only_rows_that_apply_are_told() -> None:
    text = "import lightning as L\nfrom torch.utils.data import DataLoader\nL.Trainer(accumulate_grad_batches=4)\n"
    found = told(text, by_hand=False)
    assert found == ROWS["differs"]["flag Trainer(accumulate_grad_batches)"]
    assert told("import lightning as L\n", by_hand=False) == []
    shuffled = told(f"{text}DataLoader(data, shuffle=True)\n", by_hand=False)
    assert [each for each in shuffled if each not in found] == ROWS["differs"]["flag DataLoader(shuffle=True)"]


def test_each_row_is_told_once_at_the_first_line() -> None:
    notes = migrated("import lightning as L\nL.Trainer(devices=2)\nL.Trainer(devices=2)\n")[1]
    assert [str(note) for note in notes if note.line == 3 and "Trainers of different sizes" not in str(note)] == []
    assert {note.line for note in migrated("import lightning as L\nL.Trainer(devices=2)\n")[1]} == {2}
    assert len(notes) == len({str(note) for note in notes})


# -- files ---------------------------------------------------------------------------------------------------


SCRIPT = '''"""As of 2021."""
import torch
import pytorch_lightning as pl
from pytorch_lightning.core.lightning import LightningModule


class Net(LightningModule):
    def __init__(self, lr):
        super(Net, self).__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_nb):
        loss = self.layer(batch).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_nb):
        self.log("val_loss", self.layer(batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


trainer = pl.Trainer(
    max_nb_epochs=2,
    gpus=None,
    nb_sanity_val_steps=0,
    train_percent_check=0.5,
    row_log_interval=1,
    show_progress_bar=False,
    checkpoint_callback=False,
)
trainer.fit(Net(0.1))
print("steps", trainer.global_step, sorted(trainer.callback_metrics))
'''


def test_a_script_of_years_ago_runs_when_it_has_been_moved(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(SCRIPT)
    assert main(["migrate", "--write", str(tmp_path / "old.py")]) == 0
    text = (tmp_path / "old.py").read_text()
    assert migrated(text)[0] == text
    (done,) = run_script(ranks, tmp_path / "old.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps 4 ['train_loss', 'val_loss']" in done.stdout
    assert "old spelling" not in done.stderr


def test_the_diff_can_be_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text(SCRIPT.rstrip("\n"))  # no newline at the end
    assert main(["migrate", "old.py"]) == 0
    assert Path("old.py").read_text() == SCRIPT.rstrip("\n")
    diff = capsys.readouterr().out
    applied = subprocess.run(["git", "apply", "-"], input=diff, text=True, capture_output=True, check=False)
    assert applied.returncode == 0, applied.stderr
    assert Path("old.py").read_text() == migrated(SCRIPT.rstrip("\n"))[0]


@pytest.mark.parametrize(
    "text", ["import torch\nprint('lightning')\n", "from lockstep import Trainer\nTrainer(max_epochs=1)\n", ""]
)
def test_nothing_to_be_done(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(text)
    assert main(["migrate", "--write", str(tmp_path / "a.py")]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == (
        "",
        f"{tmp_path / 'a.py'}: nothing to do: the file does not use Lightning\n",
    )
    assert (tmp_path / "a.py").read_text() == text


def test_what_is_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text("import lightning\nprint 'of Python 2'\n")
    (tmp_path / "fine.py").write_text("import lightning\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, said in {
        "wrong.py": r"wrong\.py:2 is not valid Python 3: Missing parentheses",
        "none.py": r"none\.py does not exist \(in ",
        "binary.py": r"binary\.py.* is not valid Python 3: ",
        "a.ipynb": r"a\.ipynb is a notebook\. Convert it to a script first",
        "empty": r"there is no script \(\*\.py\) in the folder",
    }.items():
        assert main(["migrate", "--write", str(tmp_path / "fine.py"), str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"lockstep migrate: .*{said}", line), line
    assert (tmp_path / "fine.py").read_text() == "import lightning\n"  # all are read before one is written
    assert main(["migrate"]) == 2


CONFIG = """# lightning.pytorch==2.6.6
trainer:
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: é}}  # lightning.pytorch.loggers.CSVLogger
  callbacks:
  - class_path: 'pytorch_lightning.callbacks.EarlyStopping'
    init_args: {monitor: lightning.pytorch}\r
  - lightning.pytorch.callbacks.XLAStatsMonitor
"""


def test_class_paths_of_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_bytes(CONFIG.encode())
    (tmp_path / "b.json").write_text('{"a": [\n\t"lightning.pytorch.loggers.CSVLogger", "say \\"x\\""]}')
    assert main(["migrate", "--write", str(tmp_path / "a.yaml"), str(tmp_path / "b.json")]) == 0
    wanted = CONFIG.replace("path: lightning.pytorch", "path: lockstep").replace("pytorch_lightning", "lockstep")
    assert (tmp_path / "a.yaml").read_bytes() == wanted.encode()
    assert (tmp_path / "b.json").read_text() == '{"a": [\n\t"lockstep.loggers.CSVLogger", "say \\"x\\""]}'
    said = capsys.readouterr().err
    assert re.search(r"to do by hand:\n  line 7: lightning.pytorch.callbacks.XLAStatsMonitor: \w+", said)
    for name, text in (("wrong.yaml", "a: ]"), ("wrong.json", "{")):
        (tmp_path / name).write_text(text)
        assert main(["migrate", str(tmp_path / name)]) == 2
        assert f"{name} is not valid {name[-4:]}: " in capsys.readouterr().err


def test_line_ends_encodings_and_odd_characters_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    text = "# -*- coding: latin-1 -*-\r\nimport pytorch_lightning as pl  # é\f\r\nx = 'é'; t = pl.Trainer(max_nb_epochs=1)\r\n"
    file.write_bytes(text.encode("latin-1"))
    assert main(["migrate", "--write", str(file)]) == 0
    wanted = text.replace("pytorch_lightning", "lockstep").replace("max_nb_epochs", "max_epochs")
    assert file.read_bytes() == wanted.encode("latin-1")
    file.write_bytes("\ufeffimport lightning\n".encode())
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_bytes() == "\ufeffimport lockstep as lightning\n".encode()


def scripts() -> Iterator[Path]:
    """Programs that others wrote: Lightning's demonstrations, callbacks and command line."""
    found = importlib.util.find_spec("lightning")
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0]) / "pytorch"
        yield from (*folder.glob("demos/*.py"), *folder.glob("callbacks/*.py"), folder / "cli.py")


def test_programs_of_others_are_moved_and_stay_python() -> None:
    files = list(scripts())
    if not files:
        pytest.skip("lightning is not installed")
    for file in files:
        text = file.read_text()
        new = moved(text)
        imports = [node for node in ast.walk(ast.parse(new)) if isinstance(node, ast.Import | ast.ImportFrom)]
        left = [
            ast.unparse(node) for node in imports if re.search("lightning.pytorch|pytorch_lightning", ast.unparse(node))
        ]
        assert left == [], file
        assert len(new.splitlines()) - len(text.splitlines()) in range(-3, 4), file
        assert moved(new) == new, file  # done once, nothing is left


def test_each_refused_module_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the table of imports refuses, a script that imports it is told why."""
    for path, rows in table()["pytorch"].items():
        if isinstance(rows, Refused) and "." in path:
            parent, _, name = path.rpartition(".")
            assert told(f"from lightning.pytorch.{parent} import {name}\n"), path


def test_what_fails_comes_first_and_what_differs_takes_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "old.py"
    file.write_text(
        "import pytorch_lightning as pl\nclass M(pl.LightningModule):\n    def on_epoch_end(self):\n"
        "        self.log('a', 1)\npl.Trainer.from_argparse_args(args)\n"
    )
    main(["migrate", str(file)])
    report = capsys.readouterr().err
    lines = report.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("  line")][:2] == ["  line 5", "  line 3"]
    assert max(map(len, lines[lines.index(next(line for line in lines if "differences" in line)) + 1 :])) < 160
    assert "add_dataloader_idx" not in report


def test_a_reader_that_has_enough_ends_the_command_quietly() -> None:
    command = [sys.executable, "-m", "lockstep", "migrate", str(Path(__file__).parent / "unchanged")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    assert "BrokenPipe" not in started.stderr.read()
    started.stderr.close()
    started.wait(60)
