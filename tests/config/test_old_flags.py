"""The flags of 2019 to 2022: each is translated with a warning, or refused with today's way."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from lockstep import Trainer
from lockstep.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary, TQDMProgressBar
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.errors import MisconfigurationException
from lockstep.names.old_flags import OLD_FLAGS, ROWS
from tests.loop.pieces import QUIET, Slope, numbers

BARE = {name: value for name, value in QUIET.items() if name not in ("accelerator", "devices")}


def old(**flags: Any) -> tuple[Trainer, str]:
    """A Trainer made by old flags, and what the warning says."""
    with pytest.warns(DeprecationWarning, match="is an old spelling. Use ") as caught:
        trainer = Trainer(**{**BARE, **flags})
    (said,) = [str(one.message) for one in caught if one.category is DeprecationWarning]
    assert caught[-1].filename == __file__
    return trainer, said


GPU = {"accelerator": "gpu"}
PAGE: list[tuple[dict[str, Any], type, list[int], int, str]] = [
    ({"gpus": 1}, SingleDeviceStrategy, [0], 1, "Trainer(accelerator='gpu', devices=1)"),
    ({"gpus": 1, "use_amp": True}, SingleDeviceStrategy, [0], 1, "devices=1, precision='16-mixed'"),
    (
        {"gpus": 4, "distributed_backend": "ddp", "use_amp": True},
        DDPStrategy,
        [0, 1, 2, 3],
        4,
        "devices=4, strategy='ddp', precision='16-mixed'",
    ),
    ({"gpus": "-1", "distributed_backend": "ddp"}, DDPStrategy, list(range(8)), 8, "devices=-1, strategy='ddp'"),
    ({"gpus": 1, "distributed_backend": "dp"}, SingleDeviceStrategy, [0], 1, "devices=1)"),
    ({"gpus": 2, "accelerator": "ddp"}, DDPStrategy, [0, 1], 2, "devices=2, strategy='ddp'"),
    ({"gpus": 2, "strategy": "ddp"}, DDPStrategy, [0, 1], 2, "devices=2)"),
]


def check_line(flags: dict[str, Any], strategy: type, devices: list[int], ranks: int, today: str) -> None:
    """A line of 2019 gives this strategy on these devices, and the warning says how it is written today."""
    trainer, said = old(**flags)
    assert type(trainer.strategy) is strategy
    assert (trainer.device_ids, trainer.world_size, trainer.strategy.root_device.type) == (devices, ranks, "cuda")
    assert trainer.precision == ("16-mixed" if "use_amp" in flags else "32-true")
    assert f"accelerator='gpu', devices={today.split('devices=')[1]}" in said
    assert all(f"{name}={value!r}" in said.split(" Use ")[0] for name, value in flags.items() if name in OLD_FLAGS)


@pytest.mark.parametrize(("flags", "strategy", "devices", "ranks", "today"), PAGE, ids=str)
def test_lines_of_2019_with_gpus(
    eight_gpus: None, flags: dict[str, Any], strategy: type, devices: list[int], ranks: int, today: str
) -> None:
    check_line(flags, strategy, devices, ranks, today)


@pytest.mark.parametrize("nodes", [{"nb_gpu_nodes": 12}, {"num_gpu_nodes": 12}, {"num_nodes": 12}])
@pytest.mark.parametrize("backend", [{}, {"distributed_backend": "ddp"}])
def test_twelve_nodes_of_eight_gpus(
    eight_gpus: None, monkeypatch: pytest.MonkeyPatch, nodes: dict[str, int], backend: dict[str, str]
) -> None:
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "first", "MASTER_PORT": "12345"}.items():
        monkeypatch.setenv(name, value)
    trainer, _ = old(gpus=8, **nodes, **backend)
    assert type(trainer.strategy) is DDPStrategy
    assert (trainer.world_size, trainer.num_nodes, trainer.num_devices, trainer.global_rank) == (96, 12, 8, 0)


@pytest.mark.parametrize(
    ("flags", "strategy", "ranks", "note"),
    [
        ({"distributed_backend": None}, SingleDeviceStrategy, 1, ""),
        ({"distributed_backend": "dp"}, SingleDeviceStrategy, 1, "without `gpus` a run was on the CPU"),
        ({"distributed_backend": "ddp"}, DDPStrategy, 1, "without `gpus` a run was on the CPU"),
        ({"gpus": 0, "num_processes": 2}, DDPStrategy, 2, ""),
        ({"num_processes": 2, "distributed_backend": "ddp_cpu"}, DDPStrategy, 2, "strategy='ddp_spawn'"),
        ({"amp_level": "O2", "use_amp": False}, SingleDeviceStrategy, 1, "`amp_level='O2'` had no effect without"),
    ],
    ids=str,
)
def test_lines_of_2019_without_gpus(flags: dict[str, Any], strategy: type, ranks: int, note: str) -> None:
    trainer, said = old(**flags)
    assert (type(trainer.strategy), trainer.world_size) == (strategy, ranks)
    assert trainer.strategy.root_device.type == "cpu"
    assert note in said


@pytest.mark.parametrize(
    ("level", "precision"), [("O1", "16-mixed"), ("O2", "16-mixed"), ("O0", "32-true"), ("O3", "16-true")]
)
def test_levels_of_apex(eight_gpus: None, level: str, precision: str) -> None:
    trainer, said = old(gpus=1, use_amp=True, amp_level=level)
    assert trainer.precision == precision
    assert "for apex; torch's mixed precision has no levels" in said


@pytest.mark.parametrize("gpus", [2, [0, 1], "0, 1", -1])
def test_gpus_without_a_gpu_say_so_in_words_of_both_years(no_gpu: None, gpus: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r"gpus=.*finds no GPU.*CPU.*accelerator='gpu', devices="):
        Trainer(**BARE, gpus=gpus)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gpus": 8, "distributed_backend": "ddp2"}, 'strategy="ddp2".*use "ddp"'),
        ({"gpus": 2, "devices": 4}, "devices=4.*old flags gpus.*devices=2"),
        ({"gpus": True}, "gpus=.*must be a number"),
        ({"gpus": "a"}, "gpus=.*must be a number"),
        ({"gpus": 9, "distributed_backend": "ddp"}, "devices=9 was requested, but this machine has 8"),
    ],
)
def test_gpus_that_cannot_be(eight_gpus: None, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        Trainer(**BARE, **flags)


TRANSLATED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_nb_epochs": 7, "min_nb_epochs": 2}, {"max_epochs": 7, "min_epochs": 2}),
    ({"train_percent_check": 0.5}, {"limit_train_batches": 0.5}),
    ({"val_percent_check": 1, "test_percent_check": 0.1}, {"limit_val_batches": 1.0, "limit_test_batches": 0.1}),
    ({"overfit_pct": 0.25}, {"overfit_batches": 0.25, "limit_train_batches": 0.25}),
    ({"nb_sanity_val_steps": 5}, {"num_sanity_val_steps": 5}),
    ({"gradient_clip": 0.5}, {"gradient_clip_val": 0.5}),
    ({"row_log_interval": 3}, {"log_every_n_steps": 3}),
    ({"add_row_log_interval": 4}, {"log_every_n_steps": 4}),
    ({"default_save_path": "somewhere"}, {"default_root_dir": "somewhere"}),
    ({"replace_sampler_ddp": False}, {"use_distributed_sampler": False}),
    ({"terminate_on_nan": True}, {"non_finite": "stop"}),
    ({"reload_dataloaders_every_epoch": True}, {"reload_dataloaders_every_n_epochs": 1}),
]


@pytest.mark.parametrize(("flags", "meaning"), TRANSLATED, ids=str)
def test_flags_that_have_another_name_today(flags: dict[str, Any], meaning: dict[str, Any]) -> None:
    trainer, said = old(**flags)
    assert {name: getattr(trainer, name) for name in meaning} == meaning
    name, value = next(iter(meaning.items()))
    assert f"{name}={value!r}" in said.split(" Use ")[1]


def test_callbacks_that_were_flags() -> None:
    stop, keep = EarlyStopping("loss"), ModelCheckpoint()
    flags = {name: value for name, value in BARE.items() if name == "logger"}
    with pytest.warns(DeprecationWarning, match=r"Use Trainer\(callbacks=\[ModelCheckpoint.*enable_progress_bar=Fal"):
        trainer = Trainer(**flags, checkpoint_callback=keep, early_stop_callback=stop, show_progress_bar=False)
    assert (trainer.checkpoint_callback, trainer.early_stopping_callback) == (keep, stop)
    assert trainer.progress_bar_callback is None
    with pytest.warns(DeprecationWarning, match="is an old spelling"):
        trainer = Trainer(
            **flags,
            checkpoint_callback=False,
            early_stop_callback=True,
            weights_summary="full",
            progress_bar_refresh_rate=20,
        )
    assert trainer.checkpoint_callback is None
    assert (trainer.early_stopping_callback.monitor, trainer.early_stopping_callback.patience) == ("val_loss", 3)
    assert [type(one) for one in trainer.callbacks] == [EarlyStopping, ModelSummary, TQDMProgressBar]
    with pytest.warns(DeprecationWarning, match="is an old spelling"):
        trainer = Trainer(**flags, weights_summary=None, progress_bar_refresh_rate=0, early_stop_callback=False)
    assert [type(one) for one in trainer.callbacks] == [ModelCheckpoint]


def test_resume_from_checkpoint_is_where_a_fit_goes_on(tmp_path: Any) -> None:
    first = Trainer(**QUIET, max_epochs=1)
    first.fit(Slope(), numbers(3))
    first.save_checkpoint(tmp_path / "one.ckpt")
    path = str(tmp_path / "one.ckpt")
    with pytest.warns(DeprecationWarning, match=r"trainer.fit\(..., ckpt_path='.*one.ckpt'\)"):
        second = Trainer(**QUIET, max_epochs=2, resume_from_checkpoint=path)
    module = Slope()
    assert second.fit(module, numbers(3)).global_step == 6
    assert len(module.batches) == 3


OFF = [(name, off) for name, row in ROWS.items() for off in row.idle]


@pytest.mark.parametrize(("name", "value"), OFF)
def test_flags_that_were_off_mean_nothing(name: str, value: Any) -> None:
    trainer, _ = old(**{name: value})
    assert trainer.config == Trainer(**BARE).config


GONE = [name for name, row in ROWS.items() if row.today is None and name != "resume_from_checkpoint"]


@pytest.mark.parametrize("name", GONE)
def test_flags_that_are_gone_name_todays_way(name: str) -> None:
    said = f"Trainer({name}='x'): this old flag was removed; {ROWS[name].why}."
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(said)}$") as raised:
        Trainer(**BARE, **{name: "x"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["log_save_interval", "flush_logs_every_n_steps", "move_metrics_to_cpu", "current_gpu_name"]
)
def test_flags_without_effect_say_so(name: str) -> None:
    _, said = old(**{name: 10})
    assert f"`{name}` has no effect: " in said


def test_apex_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"amp_backend='apex'.*precision='16-mixed'"):
        Trainer(**BARE, amp_backend="apex")


def test_defaults_of_the_versions_between_are_accepted() -> None:
    trainer = Trainer(**BARE, accelerator=None, strategy=None, devices=None)
    assert trainer.world_size == max(1, torch.cuda.device_count())


def test_every_row_is_tried_above() -> None:
    tried = {*GONE} | {name for flags, _ in TRANSLATED for name in flags} | {name for name, _ in OFF}
    tried |= {name for flags, *_ in PAGE for name in flags}
    by_name = "checkpoint_callback early_stop_callback show_progress_bar weights_summary progress_bar_refresh_rate "
    by_name += "resume_from_checkpoint log_save_interval flush_logs_every_n_steps move_metrics_to_cpu amp_level "
    by_name += "current_gpu_name enable_pl_optimizer nb_gpu_nodes num_gpu_nodes num_processes amp_backend use_amp"
    assert OLD_FLAGS - tried - set(by_name.split()) == set()
