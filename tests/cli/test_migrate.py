"""`lockstep migrate`: what it changes and what it leaves, what it tells, and that what it has changed runs."""

# ruff: noqa: E501 - tables of lines before and after

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.migrate import OLD_ARGUMENTS, RENAMED, migrated, table
from lockstep.cli.run import main
from lockstep.cli.script import OF_OLD, ROOT
from lockstep.config.old_flags import OLD_FLAGS, ROWS
from lockstep.loop.hooks import FORGOTTEN, OF_CALLBACKS
from lockstep.names.table import Refused
from lockstep.names.table import table as names_table
from lockstep.testing.pool import RankPool
from tests.scripts.in_rank import run_script


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
        ("import lightning\nlightning.Trainer()", "import lockstep\nlockstep.Trainer()"),
        ("import lightning\nx = lightning.pytorch.Trainer", "import lockstep\nx = lockstep.Trainer"),
        ("import lightning.pytorch\nlightning.pytorch.Trainer()", "import lockstep\nlockstep.Trainer()"),
        (
            "import lightning.pytorch.callbacks\nlightning.pytorch.callbacks.Timer()",
            "import lockstep.callbacks\nlockstep.callbacks.Timer()",
        ),
        (
            "import pytorch_lightning\ndef f(pytorch_lightning):\n    return pytorch_lightning",
            "import lockstep as pytorch_lightning\ndef f(pytorch_lightning):\n    return pytorch_lightning",
        ),
        ("from lightning.pytorch import Trainer as T", "from lockstep import Trainer as T"),
        ("from test_tube import HyperOptArgumentParser, SlurmCluster as S", "from lockstep import HyperOptArgumentParser, SlurmCluster as S"),
        ("from test_tube.hpc import SlurmCluster", "from lockstep import SlurmCluster"),
        ("from lightning import pytorch as pl", "import lockstep as pl"),
        (
            "if True:\n    from lightning import pytorch as pl, Trainer",
            "if True:\n    import lockstep as pl\n    from lockstep import Trainer",
        ),
        (
            "from pytorch_lightning import *\nTrainer(early_stop_callback=True)",
            "from lockstep.callbacks import EarlyStopping\nfrom lockstep import *\n"
            'Trainer(callbacks=[EarlyStopping("val_loss", patience=3)])',
        ),
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
        ("from lightning_fabric.utilities.seed import seed_everything", "from lockstep import seed_everything"),
        (
            "from lightning.fabric.plugins.environments import SLURMEnvironment",
            "from lockstep.plugins.environments import SLURMEnvironment",
        ),
        ("from lightning.fabric.utilities.rank_zero import rank_zero_only", "from lockstep.utilities import rank_zero_only"),
        ("from pytorch_lightning.core.lightning import LightningModule", "from lockstep import LightningModule"),
        ("from pytorch_lightning.utilities.distributed import rank_zero_only", "from lockstep.utilities import rank_zero_only"),
        ("from pytorch_lightning.utilities.cli import LightningCLI", "from lockstep.cli import LightningCLI"),
        ("from pytorch_lightning.metrics.functional import accuracy", "from torchmetrics.functional import accuracy"),
        ("from pytorch_lightning import data_loader, Trainer", "from lockstep import Trainer"),
        ("import pytorch_lightning as pl\nfrom pytorch_lightning import data_loader  # of 2019\nx = 1", "import lockstep as pl\nx = 1"),
    ],
)  # fmt: skip
def test_imports(before: str, after: str) -> None:
    assert moved(f"{before}\n") == f"{after}\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("from lightning.pytorch.plugins import DeepSpeedPrecision", "DeepSpeedPrecision: DeepSpeed needs no precision"),
        ("from lightning.fabric import Fabric", "Fabric: lockstep has no Fabric"),
        ("from pytorch_lightning.loops import *", r"from pytorch_lightning.loops import \*: Lightning's loops are inner"),
        ("from pytorch_lightning.utilities.cloud_io import get", "get: lockstep has no such module"),
        ("from lightning.pytorch import nothing", "nothing: lockstep has nothing of this name"),
        ("import lightning.pytorch as pl\npl.strategies.XLAStrategy()", "pl.strategies.XLAStrategy: it is made for torch_xla"),
        ("import pytorch_lightning as pl\npl.metrics.Accuracy()", "pl.metrics.Accuracy: metrics are a package of their own"),
        ("import pytorch_lightning as pl\npl.__version__", "pl.__version__ is lockstep's version"),
        ("import pytorch_lightning as pl\npl.Trainer.from_argparse_args(args)", r"Trainer\.from_argparse_args\(\) is gone"),
        ("import pytorch_lightning as pl\nlogging.getLogger('pytorch_lightning')", "the text 'pytorch_lightning' names"),
        ("import pytorch_lightning as pl\nfrom test_tube import Experiment", "Experiment of test_tube: .* TensorBoardLogger"),
        ("from pytorch_lightning.metrics import Accuracy", "classification need `task=` today"),
    ],
)  # fmt: skip
def test_what_cannot_be_moved_is_told(line: str, said: str) -> None:
    assert [text for text in told(line) if re.search(said, text)], told(line)


MODULES, OLD = names_table()["pytorch"], names_table()["earlier"]


def test_modules_of_old_are_those_of_the_table() -> None:
    of_old = {
        path
        for path in OLD
        if "." in path and (path not in ("", "core", "plugins", "strategies") or path.startswith("loggers.base"))
    }
    assert of_old == {path for path in {*OLD, *MODULES} if OF_OLD.fullmatch(f"{ROOT}.{path}") and "." in path}


# -- flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("gpus=8, distributed_backend='ddp'", 'accelerator="gpu", devices=8, strategy="ddp"'),
        ("gpus=8, nb_gpu_nodes=12, distributed_backend='ddp'", 'num_nodes=12, accelerator="gpu", devices=8, strategy="ddp"'),
        ("gpus=[0, 1]", 'accelerator="gpu", devices=[0, 1], strategy="dp"'),
        ("gpus='0, 1', max_epochs=3", 'accelerator="gpu", devices=[0, 1], strategy="dp", max_epochs=3'),
        ("gpus=1, use_amp=True", 'accelerator="gpu", devices=1, precision="16-mixed"'),
        ("amp_level='O2', use_amp=False", ""),
        ("num_processes=2, accelerator='ddp_cpu'", 'accelerator="cpu", devices=2, strategy="ddp_spawn"'),
        ("max_nb_epochs=n, min_nb_epochs=1", "max_epochs=n, min_epochs=1"),
        ("train_percent_check=0.1, val_percent_check=1", "limit_train_batches=0.1, limit_val_batches=1.0"),
        ("overfit_pct=part", "overfit_batches=float(part)"),
        ("show_progress_bar=False, log_save_interval=10", "enable_progress_bar=False"),
        ("log_gpu_memory=None, auto_lr_find=False", ""),
        ("terminate_on_nan=True", "detect_anomaly=True"),
        ("terminate_on_nan=False, max_epochs=1", "max_epochs=1"),
        ("reload_dataloaders_every_epoch=True", "reload_dataloaders_every_n_epochs=1"),
        ("checkpoint_callback=False", "enable_checkpointing=False"),
        ("checkpoint_callback=saver, early_stop_callback=stopper", "callbacks=[saver, stopper]"),
        ("callbacks=[a], early_stop_callback=True", 'callbacks=[pl.callbacks.EarlyStopping("val_loss", patience=3), a]'),
        ("weights_summary='full', callbacks=[]", "callbacks=[pl.callbacks.ModelSummary(max_depth=-1)]"),
        ("weights_summary=None", "enable_model_summary=False"),
        ("progress_bar_refresh_rate=20", "callbacks=[pl.callbacks.TQDMProgressBar(refresh_rate=20)]"),
        ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
        ("max_epochs=1,", "max_epochs=1,"),
        # not to be known here
        ("gpus=args.gpus", "gpus=args.gpus"),
        ("track_grad_norm=2", "track_grad_norm=2"),
        ("early_stop_callback=s, callbacks=mine", "early_stop_callback=s, callbacks=mine"),
        ("max_nb_epochs=1, max_epochs=2", "max_nb_epochs=1, max_epochs=2"),
        ("amp_backend='apex'", "amp_backend='apex'"),
    ],
)  # fmt: skip
def test_flags(before: str, after: str) -> None:
    assert trainer(before) == after
    text = f"import pytorch_lightning as pl\nt = pl.Trainer({before})\n"
    assert bool(told(text)) == (before == after != "max_epochs=1,")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "flags",
    [
        "max_nb_epochs=3, min_nb_epochs=1, train_percent_check=1, val_percent_check=0.5, overfit_pct=0.25",
        "gpus=0, distributed_backend='dp', use_amp=False, amp_level='O2'",
        "num_processes=2, distributed_backend='ddp_cpu', nb_sanity_val_steps=0, gradient_clip=0.5",
        "num_processes=2, accelerator='ddp_spawn', row_log_interval=7, terminate_on_nan=True",
        "gpus=None, nb_gpu_nodes=1, use_amp=True, amp_level='O3', reload_dataloaders_every_epoch=True",
        "weights_summary='full', progress_bar_refresh_rate=5, early_stop_callback=True, checkpoint_callback=False",
        "weights_summary=None, progress_bar_refresh_rate=0, default_save_path='there'",
        "weights_summary='top', log_save_interval=3, replace_sampler_ddp=False, track_grad_norm=-1",
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
        parts = (found.strategy, found.precision_plugin, *found.callbacks)
        said = [
            getattr(each, "refresh_rate", getattr(each, "patience", getattr(each, "_max_depth", ""))) for each in parts
        ]
        made.append(
            (
                found.config,
                found.world_size,
                {type(each).__name__: what for each, what in zip(parts, said, strict=True)},
            )
        )
    assert made[0] == made[1]
    assert not {name for name in OLD_FLAGS if f"{name}=" in re.sub(r"\(.*?\)", "", trainer(flags))} - {"accelerator"}


def test_a_callback_that_was_a_flag_is_imported() -> None:
    text = "from pytorch_lightning import Trainer\n\nTrainer(early_stop_callback=True)\n"
    assert moved(text) == (
        "from lockstep.callbacks import EarlyStopping\nfrom lockstep import Trainer\n\n"
        'Trainer(callbacks=[EarlyStopping("val_loss", patience=3)])\n'
    )


def test_what_stands_in_a_moved_flag_is_moved_too() -> None:
    """A package's own name stayed behind inside a flag that had become a callback."""
    text = (
        "import pytorch_lightning\nt = pytorch_lightning.Trainer(\n"
        "    checkpoint_callback=pytorch_lightning.callbacks.ModelCheckpoint(period=2), default_save_path=f(t.fit(train_dataloader=1)),\n"
        "    resume_from_checkpoint=pytorch_lightning.x)\nt.fit(m)\n"
    )
    assert moved(text) == (
        "import lockstep\nt = lockstep.Trainer(\n"
        "    callbacks=[lockstep.callbacks.ModelCheckpoint(every_n_epochs=2)], default_root_dir=f(t.fit(train_dataloaders=1)),\n"
        "    resume_from_checkpoint=lockstep.x)\nt.fit(m)\n"
    )


def test_a_checkpoint_to_go_on_from_goes_to_fit() -> None:
    text = "import pytorch_lightning as pl\nt = pl.Trainer(resume_from_checkpoint='a.ckpt')\nt.fit(model)\n"
    assert moved(text) == "import lockstep as pl\nt = pl.Trainer()\nt.fit(model, ckpt_path='a.ckpt')\n"
    again = f"{text}t.fit(model)\n"
    assert "resume_from_checkpoint='a.ckpt'" in moved(again)
    assert "give it to fit, as ckpt_path=" in told(again)[0]


def test_lines_of_their_own_go_with_their_comments() -> None:
    text = (
        "import pytorch_lightning as pl\n"
        "pl.Trainer(\n    # how long\n    max_nb_epochs=3,  # few\n    log_save_interval=1,  # often\n"
        "    # where\n    gpus=2,\n    distributed_backend='ddp',\n    amp_level='O1'\n)\n"
    )
    assert moved(text) == (
        "import lockstep as pl\n"
        "pl.Trainer(\n    # how long\n    max_epochs=3,  # few\n"
        '    # where\n    accelerator="gpu", devices=2, strategy="ddp",\n)\n'
    )


def test_every_old_flag_is_changed_or_told_of() -> None:
    for name in OLD_FLAGS:
        text = f"import pytorch_lightning as pl\nt = pl.Trainer({name}=some.value)\nt.fit(m)\n"
        assert f"{name}=" not in moved(text).replace("ckpt_path=", "") or told(text), name
    assert ROWS.keys() <= OLD_FLAGS


def test_arguments_of_methods() -> None:
    text = "from pytorch_lightning import Trainer\nt = Trainer()\nt.fit(m, train_dataloader=a)\nt.test(test_dataloaders=b)\n"
    assert moved(text).endswith("t.fit(m, train_dataloaders=a)\nt.test(dataloaders=b)\n")
    assert set(OLD_ARGUMENTS) == {"fit", "validate", "test", "predict"}


# -- hooks ---------------------------------------------------------------------------------------------------


def module(body: str, base: str = "pl.LightningModule") -> str:
    lines = "".join(f"    {line}\n" if line else "\n" for line in body.splitlines())
    return f"import pytorch_lightning as pl\n\nclass Net({base}):\n{lines}"


def body_of(text: str) -> str:
    found = moved(text).partition("):\n")[2]
    return "".join(line.removeprefix("    ") for line in found.splitlines(keepends=True))


def test_decorators_go() -> None:
    text = module("@property\n@pl.data_loader\ndef tng_dataloader(self):  # mine\n    return 1")
    assert body_of(text) == "def train_dataloader(self):  # mine\n    return 1\n"
    text = module("@pl.core.decorators.auto_move_data\ndef forward(self, x):\n    return x")
    assert body_of(text) == "def forward(self, x):\n    return x\n"
    assert "trainer.predict() moves batches" in told(text)[0]


def test_outputs_of_an_epoch_are_collected() -> None:
    text = module("def training_epoch_end(self, outputs: list) -> None:\n    '''Sum.'''\n    print(outputs)")
    assert body_of(text) == (
        "def on_train_epoch_start(self):\n    self.train_outputs = []\n\n"
        "def on_train_batch_end(self, outputs, batch, batch_idx):\n    self.train_outputs.append(outputs)\n\n"
        "def on_train_epoch_end(self) -> None:\n    '''Sum.'''\n"
        "    outputs, self.train_outputs = self.train_outputs, []\n    print(outputs)\n"
    )
    there = module("def test_epoch_end(self, outputs):\n    pass\ndef on_test_batch_end(self, *a):\n    pass")
    assert body_of(there) == "".join(line[4:] for line in there.splitlines(keepends=True)[3:])
    assert "define on_test_epoch_end(self)" in told(there)[0]


def test_what_was_logged_by_returning_it() -> None:
    text = module("def training_step(self, b, i):\n    return {'loss': l, 'log': {'a': l}, 'progress_bar': {'b': l}}")
    assert body_of(text) == (
        "def training_step(self, b, i):\n    self.log_dict({'a': l})\n    self.log_dict({'b': l}, prog_bar=True)\n"
        "    return {'loss': l}\n"
    )
    text = module(
        "def training_step(self, b, i):\n    if i:\n        out = {'loss': a, 'log': c}\n        return out\n"
        "    out = {'loss': b, 'log': d}\n    return out"
    )
    assert body_of(text) == (
        "def training_step(self, b, i):\n    if i:\n        out = {'loss': a}\n        self.log_dict(c)\n"
        "        return out\n    out = {'loss': b}\n    self.log_dict(d)\n    return out\n"
    )
    text = module("def validation_end(self, o):\n    logs = {'val_loss': l}\n    return {'val_loss': l, 'log': logs}")
    assert "    self.log_dict(logs)\n    return {'val_loss': l}\n" in body_of(text)
    text = module("def validation_end(self, o):\n    return compute(o)")
    assert told(text) == ["what validation_end returns is not logged: call self.log(name, value)."]


@pytest.mark.parametrize(
    ("base", "before", "after"),
    [
        ("pl.LightningModule", "on_epoch_end(self)", "on_train_epoch_end(self)"),
        ("pl.LightningModule", "on_batch_end(self)", "on_train_batch_end(self, outputs, batch, batch_idx)"),
        ("pl.Callback", "on_batch_start(self, t, m)", "on_train_batch_start(self, t, m, batch, batch_idx)"),
        ("pl.Callback", "on_keyboard_interrupt(self, t, m)", "on_exception(self, t, m, exception)"),
        ("pl.callbacks.EarlyStopping", "on_epoch_end(self, t, m)", "on_train_epoch_end(self, t, m)"),
        (
            "pl.Callback",
            "on_train_batch_end(self, t, m, outputs, batch, batch_idx, dataloader_idx: int)",
            "on_train_batch_end(self, t, m, outputs, batch, batch_idx, dataloader_idx: int = 0)",
        ),
        ("pl.LightningDataModule", "tng_dataloader(self)", "tng_dataloader(self)"),
        ("object", "on_epoch_end(self)", "on_epoch_end(self)"),
    ],
)
def test_hooks_that_have_another_name(base: str, before: str, after: str) -> None:
    assert body_of(module(f"def {before}:\n    pass", base)) == f"def {after}:\n    pass\n"


def test_every_hook_of_old_is_changed_or_told_of() -> None:
    for kind, names in (("LightningModule", FORGOTTEN), ("Callback", OF_CALLBACKS)):
        for name in names:
            text = module(f"def {name}(self):\n    pass", f"pl.{kind}")
            assert f"def {name}(" not in moved(text) or told(text), (kind, name)
    assert {name for kind, name in RENAMED if kind == "Callback"} <= OF_CALLBACKS.keys()


def test_hyperparameters() -> None:
    text = module("def __init__(self, hparams):\n    super().__init__()\n    self.hparams = hparams  # all")
    assert body_of(text).endswith("    self.save_hyperparameters(hparams)  # all\n")


def test_several_optimizers_are_told_of() -> None:
    assert (
        "set self.automatic_optimization = False"
        in told(module("def training_step(self, b, i, optimizer_idx):\n    x"))[0]
    )


# -- what differs --------------------------------------------------------------------------------------------


def test_only_rows_that_apply_are_told() -> None:
    text = "import lightning as L\nfrom torch.utils.data import DataLoader\nL.Trainer(accumulate_grad_batches=4)\n"
    found = told(text, by_hand=False)
    assert found == table()["flag Trainer(accumulate_grad_batches)"]
    assert told("import lightning as L\n", by_hand=False) == []
    shuffled = told(f"{text}DataLoader(data, shuffle=True)\n", by_hand=False)
    assert [each for each in shuffled if each not in found] == table()["flag DataLoader(shuffle=True)"]


def test_each_row_is_told_once_at_the_first_line() -> None:
    notes = migrated("import lightning as L\nL.Trainer(devices=2)\nL.Trainer(devices=2)\n")[1]
    assert [note.line for note in notes] == [2]


# -- files ---------------------------------------------------------------------------------------------------


SCRIPT = '''"""As of 2019."""
import torch
import pytorch_lightning as pl
from pytorch_lightning import data_loader


class Net(pl.LightningModule):
    def __init__(self, hparams):
        super(Net, self).__init__()
        self.hparams = hparams
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_nb):
        loss = self.layer(batch).pow(2).mean()
        return {"loss": loss, "log": {"train_loss": loss}}

    def validation_step(self, batch, batch_nb):
        return {"val_loss": self.layer(batch).mean()}

    def validation_end(self, outputs):
        mean = torch.stack([x["val_loss"] for x in outputs]).mean()
        tqdm_dict = {"val_loss": mean}
        return {"val_loss": mean, "progress_bar": tqdm_dict, "log": tqdm_dict}

    def training_epoch_end(self, outputs):
        self.log("epoch_loss", torch.stack([x["loss"] for x in outputs]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    @data_loader
    def tng_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2, shuffle=True)

    @pl.data_loader
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
trainer.fit(Net({"lr": 0.1}))
print("steps", trainer.global_step, sorted(trainer.callback_metrics))
'''


def test_a_script_of_2019_runs_when_it_has_been_moved(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(SCRIPT)
    assert main(["migrate", "--write", str(tmp_path / "old.py")]) == 0
    text = (tmp_path / "old.py").read_text()
    assert migrated(text)[0] == text
    (done,) = run_script(ranks, tmp_path / "old.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps 4 ['epoch_loss', 'train_loss', 'val_loss']" in done.stdout
    assert "old spelling" not in done.stderr
    assert "nobody calls" not in done.stderr


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
        f"{tmp_path / 'a.py'}: nothing is to be done: it imports nothing of Lightning\n",
    )
    assert (tmp_path / "a.py").read_text() == text


def test_what_is_no_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.py").write_text("import lightning\nprint 'of Python 2'\n")
    (tmp_path / "fine.py").write_text("import lightning\n")
    (tmp_path / "binary.py").write_bytes(b"\x00\xff")
    (tmp_path / "a.ipynb").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, said in {
        "wrong.py": r"wrong\.py:2 is no Python of today: Missing parentheses",
        "none.py": r"none\.py is not there \(this is ",
        "binary.py": r"binary\.py.* is no Python of today: ",
        "a.ipynb": r"a\.ipynb is a notebook: write it as a script first",
        "empty": "there is no script in the folder",
    }.items():
        assert main(["migrate", "--write", str(tmp_path / "fine.py"), str(tmp_path / name)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(f"lockstep migrate: .*{said}", line), line
    assert (tmp_path / "fine.py").read_text() == "import lightning\n"  # all are read before one is written
    assert main(["migrate"]) == 2


def test_line_ends_encodings_and_odd_characters_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    text = "# -*- coding: latin-1 -*-\r\nimport pytorch_lightning as pl  # é\f\r\nx = 'é'; t = pl.Trainer(max_nb_epochs=1)\r\n"
    file.write_bytes(text.encode("latin-1"))
    assert main(["migrate", "--write", str(file)]) == 0
    wanted = text.replace("pytorch_lightning", "lockstep").replace("max_nb_epochs", "max_epochs")
    assert file.read_bytes() == wanted.encode("latin-1")
    file.write_bytes("\ufeffimport lightning\n".encode())
    assert main(["migrate", "--write", str(file)]) == 0
    assert file.read_bytes() == "\ufeffimport lockstep\n".encode()


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
    for path, rows in MODULES.items():
        if isinstance(rows, Refused) and "." in path:
            parent, _, name = path.rpartition(".")
            assert told(f"from lightning.pytorch.{parent} import {name}\n"), path
