"""LightningCLI: what is parsed, what is made of it, what runs, and what is written."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from lockstep import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lockstep.callbacks import EarlyStopping, ModelCheckpoint
from lockstep.loggers import CSVLogger
from lockstep.utilities.exceptions import MisconfigurationException

yaml = pytest.importorskip("yaml")
pytest.importorskip("jsonargparse", minversion="4.49")

from lockstep.cli import (  # noqa: E402
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerCallable,
    OptimizerCallable,
    ReduceLROnPlateau,
    SaveConfigCallback,
    instantiate_class,
    instantiate_module,
)
from tests.tools.fresh import python  # noqa: E402


class Encoder(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.width = width


class Wide(Encoder):
    def __init__(self, width: int = 400, deep: bool = False) -> None:
        super().__init__(width)
        self.deep = deep


class Net(LightningModule):
    """One weight.

    Args:
        lr: learning rate.
        sizes: some sizes.
        encoder: an inner part.
    """

    def __init__(
        self, lr: float = 0.1, sizes: tuple[int, ...] = (1, 2), encoder: Encoder | None = None, name: str = "net"
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.sizes, self.encoder, self.name = lr, sizes, encoder, name
        self.w = nn.Linear(2, 1)
        self.ran: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran.append("fit")
        return self.w(batch[0]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.ran.append("validate")
        self.log("val_loss", self.w(batch[0]).pow(2).mean())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.ran.append("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.ran.append("predict")
        return self.w(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Other(Net):
    def __init__(self, lr: float = 0.5) -> None:
        super().__init__(lr)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4, features: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.classes = 10 * features

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No words of pytest's command line, and a folder to write into."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)


def made(args: Any = None, model: Any = Net, data: Any = Data, **options: Any) -> LightningCLI:
    """The objects, without a run."""
    options = {"trainer_defaults": QUIET, "run": False, **options}
    return options.pop("kind", LightningCLI)(model, data, args=[] if args is None else args, **options)


# -- parsing -----------------------------------------------------------------------------------------------


def test_words_become_objects() -> None:
    cli = made(["--model.lr=0.25", "--model.sizes=[3,4]", "--data.batch_size=2", "--trainer.max_epochs=7"])
    assert (cli.model.lr, cli.model.sizes, cli.datamodule.batch_size, cli.trainer.max_epochs) == (0.25, (3, 4), 2, 7)
    assert isinstance(cli.trainer, Trainer)
    assert (cli.config.model.lr, cli.config_init.model) == (0.25, cli.model)
    assert cli.subcommand is None


def test_a_dict_and_files_become_objects_the_later_ones_winning(tmp_path: Path) -> None:
    assert made({"model": {"lr": 0.25}}).model.lr == 0.25
    (tmp_path / "a.yaml").write_text("model: {lr: 0.25, name: a}\ntrainer: {max_epochs: 3}\n")
    (tmp_path / "b.yaml").write_text("model: {lr: 0.5}\n")
    (tmp_path / "t.yaml").write_text("max_epochs: 9\n")
    cli = made(["--config", "a.yaml", "--config", "b.yaml"])
    assert (cli.model.lr, cli.model.name, cli.trainer.max_epochs) == (0.5, "a", 3)
    cli = made(["-c", "a.yaml", "--model.lr", "0.75", "--trainer", "t.yaml"])
    assert (cli.model.lr, cli.trainer.max_epochs) == (0.75, 9)


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PL_MODEL__LR", "0.25")
    assert made(parser_kwargs={"default_env": True}).model.lr == 0.25
    assert made().model.lr == 0.1
    monkeypatch.setenv("MY_MODEL__LR", "0.5")
    assert made(parser_kwargs={"default_env": True, "env_prefix": "MY"}).model.lr == 0.5


@pytest.mark.parametrize(
    ("flag", "word", "value"),
    [
        ("max_time", "00:01:00:00", 3600.0),
        ("limit_train_batches", "0.5", 0.5),
        ("accumulate_grad_batches", "{0: 4, 2: 2}", 4),
        ("config.accumulate_grad_batches", "{0: 4, 2: 2}", {0: 4, 2: 2}),
        ("deterministic", "warn", "warn"),
    ],
)
def test_flags_of_the_trainer(flag: str, word: str, value: Any) -> None:
    trainer = made([f"--trainer.{flag.removeprefix('config.')}={word}"]).trainer
    assert operator.attrgetter(flag)(trainer) == value
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.lrr=3"], "unrecognized arguments: --model.lrr"),
        (["--model.lr=fast"], 'Parser key "model.lr"'),
        (["--trainer.maxepochs=3"], "unrecognized arguments: --trainer.maxepochs"),
        (["--trainer.max_epochs=many"], 'Parser key "trainer.max_epochs"'),
        (["--config=missing.yaml"], "missing.yaml"),
        (["--optimizer=NoSuch"], "NoSuch"),
    ],
)
def test_a_mistake_is_named(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        made(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_printed_config_has_lightnings_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    theirs_cli = pytest.importorskip("lightning.pytorch.cli").LightningCLI
    from lightning.pytorch import LightningModule as TheirModule

    class Theirs(TheirModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()

    class Ours(LightningModule):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()

    def printed(kind: Any, model: Any) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            kind(model, args=["fit", "--print_config"])
        found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
        return found

    theirs, ours = printed(theirs_cli, Theirs), printed(LightningCLI, Ours)
    assert list(ours) == list(theirs)
    own = set(ours["trainer"]) - set(theirs["trainer"])
    assert own == {
        "order",
        "keep_global_batch",
        "hang_timeout",
        "hang_kill",
        "balance",
        "compile",
        "non_finite",
        "record",
    }
    assert set(theirs["trainer"]) <= set(ours["trainer"])
    assert {key: ours[key] for key in theirs if key != "trainer"} == {k: v for k, v in theirs.items() if k != "trainer"}


def test_a_printed_config_is_one_to_start_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        made(["--model.lr=0.25", "--model.encoder=Wide", "--print_config"])
    assert ended.value.code == 0
    (tmp_path / "c.yaml").write_text(capsys.readouterr().out)
    cli = made(["--config=c.yaml"])
    assert (cli.model.lr, type(cli.model.encoder), cli.model.encoder.width) == (0.25, Wide, 400)


def test_help_tells_of_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        made(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "--model.lr LR learning rate. (type: float, default: 0.1)",
        "--trainer.max_epochs MAX_EPOCHS stop after this many epochs",
        "--data.batch_size",
        "--seed_everything",
        "--optimizer",
        "--lr_scheduler",
    ):
        assert part in text


# -- objects -----------------------------------------------------------------------------------------------


def test_callbacks_and_loggers_by_class_path() -> None:
    cli = made(
        {
            "trainer": {
                "logger": {"class_path": "lockstep.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
                "callbacks": [
                    {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 5}},
                    {"class_path": "lockstep.callbacks.ModelCheckpoint", "init_args": {"dirpath": "here"}},
                ],
                "enable_checkpointing": None,
            }
        },
        save_config_callback=None,
    )
    assert isinstance(cli.trainer.logger, CSVLogger)
    stopping, checkpoint = cli.trainer.callbacks
    assert (type(stopping), stopping.patience) == (EarlyStopping, 5)
    assert (type(checkpoint), Path(checkpoint.dirpath).name) == (ModelCheckpoint, "here")


def test_class_paths_of_lightnings_are_read_as_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}}
    given = {"trainer": {"logger": logger, "callbacks": ["pytorch_lightning.callbacks.LearningRateMonitor"]}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))
    words = ["--trainer.logger=lightning.pytorch.loggers.CSVLogger", "--trainer.logger.save_dir=logs"]
    for args in (["--config=c.yaml"], given, words):
        caplog.clear()
        assert isinstance(made(args, save_config_callback=None).trainer.logger, CSVLogger)
        assert caplog.text.count("lightning.pytorch.loggers.CSVLogger as lockstep.loggers.CSVLogger") == 1
    (tmp_path / "c.yaml").write_text("trainer: {callbacks: [lightning.pytorch.callbacks.XLAStatsMonitor]}")
    for args in (["--config=c.yaml"], ["--trainer.callbacks=lightning.pytorch.callbacks.XLAStatsMonitor"]):
        with pytest.raises(SystemExit):
            made(args)
        assert "error: lightning.pytorch.callbacks.XLAStatsMonitor: it requires torch_xla" in capsys.readouterr().err


SHORT = """
import argparse
from importlib import import_module
import lockstep
from lockstep.cli import LightningArgumentParser, LightningCLI

bases = {"callbacks": "Callback", "loggers": "Logger", "profilers": "Profiler", "strategies": "Strategy"}
missing = []
for face, base in ((import_module(f"lockstep.{face}"), base) for face, base in bases.items()):
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_argument("--it", type=getattr(face, base))
    for name in face.__all__:
        try:
            parser.parse_args([f"--it={name}"])
        except argparse.ArgumentError as error:  # for want of arguments, or since it is abstract, are others
            found = issubclass(getattr(face, name), getattr(face, base))
            missing += [name] if found and "Expected a dot import path" in str(error) else []
print("missing", missing)
"""


def test_every_name_of_a_face_is_a_short_name(tmp_path: Path) -> None:
    done = python("-c", SHORT, folder=tmp_path)
    assert done.stdout == "missing []\n", done.stderr


PARSED = """
import sys
from lockstep import LightningModule
from lockstep.cli import LightningCLI

def parsed(*words):
    return LightningCLI(LightningModule, run=False, save_config_callback=None, args=list(words)).config.trainer

assert not [name for name in sys.modules if name.startswith("lockstep") and name.endswith("timer")]
print(parsed("--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameters=true").strategy)
print(parsed("--trainer.callbacks+=LearningRateMonitor", "--trainer.callbacks.logging_interval=epoch").callbacks)
print(parsed("--config=c.yaml").callbacks)
parsed("--trainer.callbacks.help=DeviceStatsMonitor")
"""


def test_classes_that_nobody_has_imported_are_found_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: Timer\n    init_args: {duration: '00:01:00:00'}\n  - LambdaCallback\n"
    )
    done = python("-c", PARSED, folder=tmp_path)
    for said in ("find_unused_parameters=True", "logging_interval='epoch'", "Timer", "LambdaCallback", "cpu_stats"):
        assert said in done.stdout, done.stderr


def test_subclasses_of_model_and_data() -> None:
    words = [
        f"--model={__name__}.Other",
        "--model.lr=0.25",
        f"--data={__name__}.Data",
        "--data.batch_size=2",
    ]  # as others have names like these
    for model, data, options in (
        (Net, Data, {"subclass_mode_model": True, "subclass_mode_data": True}),
        (None, None, {}),
    ):
        cli = made(words, model, data, **options)
        assert (type(cli.model), cli.model.lr, cli.datamodule.batch_size) == (Other, 0.25, 2)
    assert made([f"--model={__name__}.Other"], None, None).datamodule is None


def make_net(width: int = 3) -> Net:
    return Net(lr=width / 10)


def make_trainer(max_epochs: int = 2, callbacks: list[Callback] | None = None) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": max_epochs + 1, "callbacks": callbacks})


def test_functions_in_place_of_classes() -> None:
    cli = made(["--model.width=5", "--trainer.max_epochs=4"], make_net, trainer_class=make_trainer, trainer_defaults={})
    assert (cli.model.lr, cli.trainer.max_epochs) == (0.5, 5)


def test_a_trainer_without_callbacks_warns() -> None:
    class Bare(Trainer):
        def __init__(self, max_epochs: int = 2) -> None:
            super().__init__(**{**QUIET, "max_epochs": max_epochs})

    with pytest.warns(UserWarning, match="has no argument `callbacks`"):
        assert made(trainer_class=Bare, trainer_defaults={}).trainer.max_epochs == 2


class Linked(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.lr", compute_fn=lambda size: size / 100)
        parser.link_arguments("data.classes", "model.name", compute_fn=str, apply_on="instantiate")
        parser.add_lightning_class_args(EarlyStopping, "stopping")
        parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 4})
        parser.add_argument("--note", default="none")


def test_links_and_arguments_of_ones_own() -> None:
    cli = made(["--data.batch_size=2", "--data.features=3", "--note=mine", "--stopping.patience=6"], kind=Linked)
    assert (cli.model.lr, cli.model.name, cli.config.note) == (0.02, "30", "mine")
    (stopping,) = cli.trainer.early_stopping_callbacks
    assert (stopping.monitor, stopping.patience) == ("val_loss", 6)
    assert (cli.model.hparams.lr, cli.model.hparams.name) == (0.02, "30")


def test_defaults_of_the_trainer() -> None:
    always = EarlyStopping("val_loss")
    defaults = {**QUIET, "max_epochs": 11, "callbacks": always}
    cli = made(trainer_defaults=defaults, save_config_callback=None)
    assert (cli.trainer.max_epochs, cli.trainer.callbacks) == (11, [always])
    assert made(["--trainer.max_epochs=12"], trainer_defaults=defaults).trainer.max_epochs == 12


def test_the_trainer_may_be_made_otherwise() -> None:
    class Own(LightningCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Trainer:
            return super().instantiate_trainer(max_epochs=5, **kwargs)

    assert made(kind=Own).trainer.max_epochs == 5


# -- seeds -------------------------------------------------------------------------------------------------


def test_the_seed_is_set_before_anything_is_made() -> None:
    first, second, third = (made([f"--seed_everything={seed}"]) for seed in (3, 3, 4))
    assert torch.equal(first.model.w.weight, second.model.w.weight)
    assert not torch.equal(first.model.w.weight, third.model.w.weight)
    assert first.config["seed_everything"] == 3
    assert made(seed_everything_default=9).config["seed_everything"] == 9


def test_no_seed_is_set_where_none_is_wanted() -> None:
    seed_everything(1)
    expected = torch.rand(1)
    seed_everything(1)
    cli = made(["--seed_everything=false"], model=Seedless)
    assert (cli.model.drawn, cli.config["seed_everything"]) == (expected, False)
    seed_everything(21)
    assert made().config["seed_everything"] == 21


class Seedless(Net):
    def __init__(self) -> None:
        self_drawn = torch.rand(1)
        super().__init__()
        self.drawn = self_drawn


# -- optimizers --------------------------------------------------------------------------------------------


def optimizer_of(cli: LightningCLI) -> Any:
    return cli.model.configure_optimizers()


def test_optimizer_and_scheduler_of_the_command_line() -> None:
    with pytest.warns(UserWarning, match=r"`Net.configure_optimizers` is replaced"):
        cli = made(["--optimizer=Adam", "--optimizer.lr=0.25"])
    optimizer = optimizer_of(cli)
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (Adam, 0.25)
    assert optimizer.param_groups[0]["params"] == list(cli.model.parameters())
    words = ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"]
    (optimizer,), (scheduler,) = optimizer_of(made(words))
    assert (type(optimizer), type(scheduler), scheduler.step_size, scheduler.optimizer) == (SGD, StepLR, 3, optimizer)


def test_a_plateau_scheduler_says_what_it_watches() -> None:
    words = ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=ReduceLROnPlateau"]
    found = optimizer_of(made([*words, "--lr_scheduler.monitor=val_loss"]))
    scheduler = found["lr_scheduler"]["scheduler"]
    assert (type(scheduler), scheduler.monitor) == (ReduceLROnPlateau, "val_loss")
    assert found["lr_scheduler"]["monitor"] == "val_loss"
    made(["fit", *words, "--lr_scheduler.monitor=val_loss"], run=True)


def test_without_words_the_models_own_optimizer_stays() -> None:
    optimizer = optimizer_of(made(["--model.lr=0.25"]))
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (SGD, 0.25)


class Fixed(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args(Adam)
        parser.add_lr_scheduler_args(StepLR)
        parser.set_defaults({"lr_scheduler.step_size": 7})

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


def test_fixed_classes_and_configure_optimizers_of_ones_own() -> None:
    found = optimizer_of(made(["--optimizer.lr=0.25"], kind=Fixed))
    assert type(found["optimizer"]) is Adam
    assert found["optimizer"].param_groups[0]["lr"] == 0.25
    assert (found["lr_scheduler"]["scheduler"].step_size, found["lr_scheduler"]["interval"]) == (7, "step")


class TwoOptimizers(LightningModule):
    def __init__(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.w = nn.Linear(1, 1)


class Several(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args((SGD, Adam), nested_key="one", link_to="model.first")
        parser.add_optimizer_args(Adam, nested_key="two", link_to="model.second")


def test_several_optimizers_are_linked_to_the_model() -> None:
    cli = made(["--one=SGD", "--one.lr=0.5", "--two.lr=0.25"], TwoOptimizers, None, kind=Several)
    one, two = (instantiate_class(cli.model.w.parameters(), each) for each in (cli.model.first, cli.model.second))
    assert (type(one), one.param_groups[0]["lr"]) == (SGD, 0.5)
    assert (type(two), two.param_groups[0]["lr"]) == (Adam, 0.25)


def test_two_that_are_both_automatic_are_refused() -> None:
    class Both(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_optimizer_args(SGD, nested_key="one")
            parser.add_optimizer_args(Adam, nested_key="two")

    with pytest.raises(MisconfigurationException, match=r"the command line has \['one', 'two', 'lr_scheduler'\]"):
        made(["--one.lr=0.5"], kind=Both)


class Takes(Net):
    def __init__(
        self,
        optimizer: OptimizerCallable = lambda parameters: Adam(parameters, lr=0.125),
        scheduler: LRSchedulerCallable = lambda optimizer: StepLR(optimizer, 5),
    ) -> None:
        super().__init__()
        self.make, self.plan = optimizer, scheduler


def test_a_model_may_take_calls_that_make_them() -> None:
    model = made(["--model.optimizer=SGD", "--model.optimizer.lr=0.5"], Takes, auto_configure_optimizers=False).model
    optimizer = model.make(model.parameters())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (SGD, 0.5)
    assert model.plan(optimizer).step_size == 5


@pytest.mark.parametrize("kind", [nn.Linear, (SGD, nn.Linear), "Adam"])
def test_what_is_no_optimizer_is_refused(kind: Any) -> None:
    with pytest.raises(MisconfigurationException, match="not a subclass of Optimizer"):
        LightningArgumentParser().add_optimizer_args(kind)
    with pytest.raises(MisconfigurationException, match="must be a Trainer, LightningModule"):
        LightningArgumentParser().add_lightning_class_args(Encoder, "encoder")


# -- runs --------------------------------------------------------------------------------------------------


class Told(LightningCLI):
    """Notes what is called around the run."""

    told: list[str]

    def before_instantiate_classes(self) -> None:
        self.told = ["before classes"]

    def after_instantiate_classes(self) -> None:
        self.told.append("after classes")

    def before_fit(self) -> None:
        self.told.append("before fit")

    def after_fit(self) -> None:
        self.told.append(f"after {self.trainer.global_step} steps")


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_subcommands_run(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli = made([method, "--data.batch_size=2"], run=True, kind=Told, save_config_callback=None)
    assert cli.subcommand == method
    assert cli.model.ran.count(method) == 4
    assert set(cli.model.ran) <= {method, "validate"}
    expected = ["before fit", "after 4 steps"] if method == "fit" else []
    assert cli.told == ["before classes", "after classes", *expected]


def test_arguments_of_the_method_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    made(["validate", "--verbose=false"], run=True, save_config_callback=None)
    assert "val_loss" not in capsys.readouterr().out
    made(["validate"], run=True, save_config_callback=None)
    assert "val_loss" in capsys.readouterr().out


def test_a_subcommand_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Longer(Trainer):
        def count(self, model: LightningModule, upto: int = 3) -> None:
            """Count."""
            self.counted = list(range(upto))

    class Counting(LightningCLI):
        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            return {**LightningCLI.subcommands(), "count": {"model"}}

    cli = made(["count", "--upto=2"], data=None, run=True, kind=Counting, trainer_class=Longer)
    assert cli.trainer.counted == [0, 1]  # type: ignore[attr-defined]


def test_parser_kwargs_of_one_subcommand(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("model: {lr: 0.25}\n")
    kwargs = {"fit": {"default_config_files": ["f.yaml"]}}
    assert made(["fit"], run=True, parser_kwargs=kwargs, save_config_callback=None).model.lr == 0.25
    assert made(["validate"], run=True, parser_kwargs=kwargs, save_config_callback=None).model.lr == 0.1


def test_no_subcommand_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        made([], run=True)
    assert "subcommand" in capsys.readouterr().err


def test_words_beside_args_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--model.lr=3"])
    with pytest.warns(UserWarning, match="is ignored"):
        assert made([]).model.lr == 0.1
    assert LightningCLI(Net, run=False, trainer_defaults=QUIET).model.lr == 3.0


# -- what is saved -----------------------------------------------------------------------------------------

LOGGED = {**QUIET, "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}}}


def test_the_config_is_saved_beside_the_logs_and_read_again(tmp_path: Path) -> None:
    words = ["fit", "--model.lr=0.25", "--model.encoder=Wide", "--seed_everything=5"]
    cli = made(words, run=True, trainer_defaults=LOGGED)
    path = Path(cli.trainer.log_dir or "") / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    assert (saved["model"]["lr"], saved["seed_everything"], saved["trainer"]["max_epochs"]) == (0.25, 5, 1)
    assert path.read_text().startswith("# lockstep==")
    again = made(["fit", f"--config={path}"], run=True, trainer_defaults=QUIET)
    assert (again.model.lr, type(again.model.encoder), again.config.fit.seed_everything) == (0.25, Wide, 5)
    assert [part.name for part in tmp_path.rglob("config.yaml")] == ["config.yaml"] * 2  # a version each


def test_an_earlier_config_is_not_overwritten_unasked(tmp_path: Path) -> None:
    flags = {**QUIET, "default_root_dir": str(tmp_path)}
    made(["fit"], run=True, trainer_defaults=flags)
    with pytest.raises(RuntimeError, match=r"config.yaml exists already"):
        made(["fit"], run=True, trainer_defaults=flags)
    made(["fit", "--model.lr=0.75"], run=True, trainer_defaults=flags, save_config_kwargs={"overwrite": True})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["lr"] == 0.75
    other = {"config_filename": "other.yaml"}
    made(["fit"], run=True, trainer_defaults=flags, save_config_kwargs=other)
    assert (tmp_path / "other.yaml").exists()


def test_nothing_is_saved_where_it_is_not_wanted(tmp_path: Path) -> None:
    made(["fit"], run=True, save_config_callback=None)
    made(["fit", "--trainer.fast_dev_run=true"], run=True)
    assert list(tmp_path.rglob("*.yaml")) == []


class Elsewhere(SaveConfigCallback):
    saved: list[str] = []

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.saved.append(f"{stage} {yaml.safe_load(self.parser.dump(self.config))['model']['lr']}")


def test_a_config_may_be_saved_elsewhere(tmp_path: Path) -> None:
    options = {"save_config_callback": Elsewhere, "save_config_kwargs": {"save_to_log_dir": False}}
    made(["fit"], run=True, **options)
    assert Elsewhere.saved == ["fit 0.1"]
    assert list(tmp_path.rglob("*.yaml")) == []
    with pytest.raises(ValueError, match="saves nothing"):
        made(save_config_kwargs={"save_to_log_dir": False})


# -- hyperparameters and checkpoints -----------------------------------------------------------------------


def test_hyperparameters_are_what_was_parsed() -> None:
    cli = made(["--model.encoder=Wide", "--model.lr=0.25", "--data.batch_size=2"])
    assert cli.model.hparams.encoder == {
        "class_path": f"{Wide.__module__}.Wide",
        "init_args": {"width": 400, "deep": False},
    }
    assert (cli.model.hparams.lr, cli.datamodule.hparams.batch_size) == (0.25, 2)
    assert cli.model.hparams["_instantiator"] == "lockstep.cli.instantiate_module"
    plain = made(["--model.lr=0.25"], load_from_checkpoint_support=False)
    assert "_instantiator" not in plain.model.hparams


@pytest.mark.parametrize("subclass", [False, True])
def test_a_module_with_inner_classes_is_made_again(subclass: bool) -> None:
    path = f"{Net.__module__}.Net"
    start = [f"--model={path}"] if subclass else []
    cli = made([*start, "--model.encoder=Wide", "--model.encoder.deep=true"], subclass_mode_model=subclass)
    hparams = dict(cli.model.hparams)
    assert hparams.get("_class_path") == (path if subclass else None)
    again = instantiate_module(Net, hparams)
    assert (type(again), type(again.encoder), again.encoder.deep) == (Net, Wide, True)


def checkpoint_of(tmp_path: Path, *words: str) -> Path:
    cli = made(["fit", *words], run=True, save_config_callback=None)
    path = tmp_path / "net.ckpt"
    cli.trainer.save_checkpoint(path)
    return path


def test_load_from_checkpoint_makes_inner_classes(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, "--model.lr=0.25", "--model.encoder=Wide", "--model.encoder.width=7")
    model = Net.load_from_checkpoint(path)
    assert (model.lr, type(model.encoder), model.encoder.width) == (0.25, Wide, 7)  # type: ignore[union-attr]
    assert Net.load_from_checkpoint(path, encoder=None).encoder is None
    checkpoint = torch.load(path, weights_only=True)
    assert torch.equal(model.w.weight, checkpoint["state_dict"]["w.weight"])
    assert checkpoint["hyper_parameters"]["encoder"]["init_args"] == {"width": 7, "deep": False}


def test_a_checkpoint_cannot_ask_for_any_class(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, "--model.encoder=Wide")
    for asked, said in (("antigravity.Encoder", "has not imported"), ("subprocess.Popen", "Popen")):
        checkpoint = torch.load(path, weights_only=True)
        del checkpoint["lockstep"]
        checkpoint["hyper_parameters"]["encoder"] = {"class_path": asked, "init_args": {}}
        torch.save(checkpoint, tmp_path / "bad.ckpt")
        with pytest.raises(Exception, match=said):
            Net.load_from_checkpoint(tmp_path / "bad.ckpt")
    assert "antigravity" not in sys.modules


def test_a_subclasss_checkpoint_is_loaded_by_the_subclass(tmp_path: Path) -> None:
    cli = made(["fit", "--model=Other", "--model.lr=0.25"], Net, run=True, subclass_mode_model=True)
    cli.trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert Other.load_from_checkpoint(tmp_path / "other.ckpt").lr == 0.25
    with pytest.raises(MisconfigurationException, match=r"Call Other\.load_from_checkpoint"):
        Net.load_from_checkpoint(tmp_path / "other.ckpt")


def test_a_checkpoint_says_the_models_arguments(tmp_path: Path) -> None:
    path = checkpoint_of(tmp_path, "--model.lr=0.25", "--model.encoder=Wide", "--model.sizes=[7]")
    cli = made(["validate", f"--ckpt_path={path}"], run=True, save_config_callback=None)
    assert (cli.model.lr, cli.model.sizes, type(cli.model.encoder)) == (0.25, (7,), Wide)


@pytest.mark.parametrize("source", ["words", "config", "environment", "dict"])
def test_arguments_given_by_hand_win_against_a_checkpoints(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = ("--model.encoder=Wide", "--model.encoder.width=7", "--model.encoder.deep=true")
    path = checkpoint_of(tmp_path, "--model.lr=0.25", "--model.sizes=[7]", *encoder)
    (tmp_path / "own.yaml").write_text("model: {lr: 0.1}\n")  # its default
    words: Any = ["validate", f"--ckpt_path={path}"]
    if source == "environment":
        monkeypatch.setenv("PL_VALIDATE__MODEL__LR", "0.1")
    elif source == "dict":
        words = {"subcommand": "validate", "validate": {"ckpt_path": str(path), "model": {"lr": 0.1}}}
    else:
        words.append("--model.lr=0.1" if source == "words" else "--config=own.yaml")
    kwargs = {"default_env": source == "environment"}
    cli = made(words, run=True, save_config_callback=None, parser_kwargs=kwargs)
    assert (cli.model.lr, cli.model.hparams.lr, cli.model.sizes) == (0.1, 0.1, (7,))
    assert (cli.model.encoder.width, cli.model.encoder.deep) == (7, True)
    assert f"hyperparameters in --ckpt_path {path} are used for model arguments that are not given here" in caplog.text


def test_arguments_of_nested_classes_win_one_by_one(tmp_path: Path) -> None:
    encoder = ("--model.encoder=Wide", "--model.encoder.width=7", "--model.encoder.deep=true")
    path = checkpoint_of(tmp_path, *encoder)
    words = ["validate", f"--ckpt_path={path}", "--model.encoder=Wide", "--model.encoder.width=9"]
    cli = made(words, run=True, save_config_callback=None)
    assert (type(cli.model.encoder), cli.model.encoder.width, cli.model.encoder.deep) == (Wide, 9, True)
    cli = made([*words[:2], "--model.encoder=Encoder"], run=True, save_config_callback=None)
    assert (type(cli.model.encoder), cli.model.encoder.width) == (Encoder, 4)


def test_arguments_of_a_subclass_win_against_a_checkpoints(tmp_path: Path) -> None:
    model = ["--model=Net", "--model.lr=0.25", "--model.name=saved"]
    cli = made(["fit", *model], run=True, subclass_mode_model=True, save_config_callback=None)
    cli.trainer.save_checkpoint(tmp_path / "net.ckpt")
    words = ["validate", f"--ckpt_path={tmp_path / 'net.ckpt'}", "--model=Net", "--model.lr=0.5"]
    cli = made(words, run=True, subclass_mode_model=True, save_config_callback=None)
    assert (cli.model.lr, cli.model.name) == (0.5, "saved")


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint_of(tmp_path)
    with pytest.raises(SystemExit):
        made(["validate", f"--ckpt_path={path}"], model=Other, run=True)
    assert f"--ckpt_path {path}: its hyperparameters do not fit the model's arguments" in capsys.readouterr().err


# -- as a user ---------------------------------------------------------------------------------------------

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from lockstep import LightningDataModule, LightningModule
from lockstep.cli import LightningCLI

class Net(LightningModule):
    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.w = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.w(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)

if __name__ == "__main__":
    cli = LightningCLI(Net, Data)
    cli.trainer.print("steps", cli.trainer.global_step, "lr", cli.trainer.optimizers[0].param_groups[0]["lr"])
"""


@pytest.mark.slow
def test_a_script_on_two_processes(tmp_path: Path) -> None:
    """Both ranks parse the same words; rank 0 alone writes the config."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = "fit --model.lr 0.25 --trainer.max_epochs 1 --trainer.accelerator cpu --trainer.devices 2"
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    run = python("train.py", *words.split(), folder=tmp_path, **variables)
    assert run.returncode == 0, run.stderr
    assert "steps 2 lr 0.25" in run.stdout
    (config,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(config.read_text())["model"] == {"lr": 0.25}


def test_without_jsonargparse_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith(("lockstep.cli", LightningCLI.__module__.rpartition(".")[0]))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"lockstep.cli needs the package `jsonargparse`.*torch-lockstep\[cli\]"
    ):
        importlib.import_module("lockstep.cli").LightningCLI  # noqa: B018
