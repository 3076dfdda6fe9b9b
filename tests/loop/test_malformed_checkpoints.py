"""Checkpoints that somebody else has made: malformed ones are one kind of error, hostile ones reach no other file."""

from __future__ import annotations

import copy
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lockstep import Callback, LightningModule
from lockstep.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lockstep.checkpoint import format, storage
from lockstep.checkpoint.format import load, save
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.loggers.base import Uploads
from tests.loop.pieces import Cut, Killed, numbers, quiet

NAMED = (CorruptCheckpoint, MisconfigurationException)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.layers(batch).square().mean()
        self.log("train", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(folder: Path, *callbacks: Callback, **options: Any) -> Any:
    rows: Any = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
    data = DataLoader(rows, batch_size=2, shuffle=True)
    keeps = [EarlyStopping("val", patience=50), ModelCheckpoint(folder, monitor="val", save_top_k=2, save_last=True)]
    flags: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 2, "enable_checkpointing": True}
    trainer = quiet(**flags, callbacks=[*keeps, Timer(), *callbacks], num_sanity_val_steps=0)
    trainer.fit(Net(), data, data, **options)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run that was cut off inside a window of its second epoch, and its checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.raises(Killed):
        fit(folder / "kept", Cut("on_train_batch_end", 8, folder / "cut.ckpt"))
    return folder, torch.load(folder / "cut.ckpt", weights_only=True)


# -- malformed -------------------------------------------------------------------------------------------------

GONE = object()
VALUES: list[Any] = [
    *(None, "x", -1, 0, 7, 10**12, 1.5, float("nan"), True, [], {}, {"a": 1}, [1, 2], b"x", "../../etc/passwd"),
    *(torch.zeros(2), torch.zeros(()), torch.zeros(3, 3, 3), torch.tensor(True), GONE, GONE),
]


def keys(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if before:
        yield before
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from keys(item, (*before, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path, or none."""
    made = copy.copy(content)
    if len(path) > 1:
        made[path[0]] = changed(content[path[0]], path[1:], value)
    elif value is GONE:
        del made[path[0]]
    else:
        made[path[0]] = value
    return made


def resumed(folder: Path, content: dict[str, Any]) -> str:
    """How a resume from a file of that content ended: "ok", "refused", or the kind of another error."""
    path = folder / "changed.ckpt"
    try:
        format.save(content, path)
    except MisconfigurationException:
        return "refused"
    try:
        fit(folder / "kept", ckpt_path=path)
    except CorruptCheckpoint as error:
        return "refused" if str(path) in str(error) else f"it does not name the file: {error}"
    except MisconfigurationException:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_malformed_checkpoint_is_one_kind_of_error(seed: int, saved: tuple[Path, dict[str, Any]]) -> None:
    """A right hash and a value of another type, at any key: raw TypeError, KeyError, RuntimeError, in the middle of
    training too."""
    folder, good = saved
    draw, wrong = random.Random(seed), []
    parts: list[tuple[Any, ...]] = [(key,) for key in good if key != "lockstep"]
    parts += [("lockstep", key) for key in good["lockstep"]]
    for _ in range(25):
        part = draw.choice(parts)
        path = draw.choice([path for path in keys(good) if path[: len(part)] == part])
        value = draw.choice(VALUES)
        ended = resumed(folder, changed(good, path, value))
        if ended not in ("ok", "refused"):
            wrong.append((path, value, ended))
    assert wrong == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("optimizer_states", 0, "state", 0, "exp_avg"), torch.zeros(2)),
        (("optimizer_states", 0, "state", 0, "exp_avg"), GONE),
        (("optimizer_states", 0, "state", 5, "step"), -1),
        (("optimizer_states", 0, "param_groups", 0, "weight_decay"), GONE),
        (("optimizer_states", 0, "param_groups", 0, "lr"), "x"),
        (("optimizer_states", 0, "param_groups", 0, "amsgrad"), 1.5),
        (("lr_schedulers", 0, "gamma"), "x"),
        (("lr_schedulers", 0, "step"), 5),
        (("lockstep", "progress", "epoch"), "x"),
        (("lockstep", "progress", "phase"), "lunch"),
        (("lockstep", "plan", "ranks"), 0),
        (("lockstep", "ranks", 0, "random"), {}),
        (("lockstep", "metrics"), [1]),
        (("state_dict", "layers.0.weight"), "x"),
        (("callbacks",), "x"),
    ],
)
def test_what_would_fail_later_is_refused_when_it_is_loaded(
    path: tuple[Any, ...], value: Any, saved: tuple[Path, dict[str, Any]]
) -> None:
    assert resumed(saved[0], changed(saved[1], path, value)) == "refused"


def test_a_file_of_lightnings_with_a_flipped_bit_is_refused(saved: tuple[Path, dict[str, Any]]) -> None:
    """It has no hash, and a flipped bit in a weight was loaded; a zip file knows the sum of each member."""
    path = saved[0] / "lightning.ckpt"
    content = {key: value for key, value in saved[1].items() if key != "lockstep"}
    torch.save({**content, "state_dict": {"w": torch.ones(4000)}}, path)
    assert format.load(path)["state_dict"]["w"].sum() == 4000
    good, draw = path.read_bytes(), random.Random(3)
    with zipfile.ZipFile(path) as archive:
        spans = [(member.header_offset, member.compress_size) for member in archive.infolist() if member.file_size]
    named: list[bool] = []
    in_weight = good.index(torch.ones(2).numpy().tobytes()) + 2
    for at in [in_weight, *(draw.randrange(len(good)) for _ in range(150))]:
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :])
        try:
            loaded = format.load(path)
        except NAMED as error:
            named.append(str(path) in str(error))
        else:  # in the padding between members, or a name or a date that nobody reads
            assert loaded["state_dict"]["w"].tolist() == [1.0] * 4000
            assert repr(loaded["loops"]) == repr(content["loops"])
    assert named
    assert all(named)
    for length in [0, 10, spans[-1][0], len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CorruptCheckpoint, match=r"lightning\.ckpt"):
            format.load(path)


def test_a_file_without_sums_is_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"state_dict": {"w": torch.ones(4000)}}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert format.load(tmp_path / "a.ckpt")["state_dict"]["w"].sum() == 4000


# -- hostile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dots", "absolute", "link", "other file", "folder"])
def test_a_checkpoints_paths_delete_no_file_of_others(
    how: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """``last_model_path = "<dirpath>/../victim.ckpt"`` had the victim deleted when the next last.ckpt was saved."""
    folder = tmp_path / "kept"
    folder.mkdir()
    (tmp_path / "victims").mkdir()
    victim = tmp_path / "victims" / "victim.ckpt"
    (folder / "link").symlink_to(tmp_path / "victims")
    named = {
        "dots": f"{folder}/../victims/victim.ckpt",
        "absolute": str(victim),
        "link": f"{folder}/link/victim.ckpt",
        "other file": f"{folder}/notes.txt",
        "folder": str(folder),
    }[how]
    if how == "other file":
        victim = folder / "notes.txt"
    victim.write_text("precious")
    content = copy.deepcopy(saved[1])
    (key,) = (key for key in content["callbacks"] if key.startswith("ModelCheckpoint"))
    score = torch.tensor(1e9)
    content["callbacks"][key] |= {
        "dirpath": str(folder),
        "last_model_path": named,
        "best_model_path": named,
        "kth_best_model_path": named,
        "best_k_models": {named: score, f"{folder}/gone.ckpt": score},
        "kth_value": score,
    }
    path = tmp_path / "hostile.ckpt"
    format.save(content, path)
    with pytest.warns(UserWarning, match="Such files are neither ranked nor deleted"):
        trainer = fit(folder, ckpt_path=path)
    assert victim.read_text() == "precious"
    kept = trainer.checkpoint_callback
    assert [storage.lies_in(each, folder) for each in kept.best_k_models] == [True, True]
    assert sorted(file.name for file in folder.glob("*.ckpt")) == sorted(
        ["last.ckpt", *(os.path.basename(each) for each in kept.best_k_models)]
    )


def test_a_checkpoints_paths_are_not_uploaded(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    secret = tmp_path / "secret.ckpt"
    for path in (secret, tmp_path / "kept" / "own.ckpt"):
        path.write_text("x")
    callback = ModelCheckpoint(tmp_path / "kept")
    callback.best_model_path, callback.last_model_path = str(secret), str(tmp_path / "kept" / "own.ckpt")
    assert [upload.path for upload in Uploads("all").new(callback)] == [callback.last_model_path]


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("s3://bucket/run/a.ckpt", True),
        ("s3://bucket/run/deep/a.ckpt", True),
        ("s3://bucket/run/../a.ckpt", False),
        ("s3://bucket/running/a.ckpt", False),
        ("s3://bucket/run", False),
        ("s3://other/run/a.ckpt", False),
        ("/bucket/run/a.ckpt", False),
    ],
)
def test_what_lies_in_a_remote_folder(path: str, inside: bool) -> None:
    assert storage.lies_in(path, "s3://bucket/run/") is inside


# -- A checkpoint of another model, or of another optimizer, is refused with the first difference and a way out --


class Linears(LightningModule):
    """Layers of given widths, trained by an optimizer of a given class."""

    def __init__(self, optimizer: Any = torch.optim.Adam, **widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(1, width) for name, width in (widths or {"a": 2}).items()})
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(layer(batch.float().unsqueeze(1)).mean() for layer in self.layers.values())

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


class Loose(Linears):
    def __init__(self, *args: Any, **widths: int) -> None:
        super().__init__(*args, **widths)
        self.strict_loading = False


@pytest.fixture
def written(tmp_path: Path) -> Path:
    trainer, path = quiet(max_epochs=1), tmp_path / "net.ckpt"
    trainer.fit(Linears(a=2, b=3), numbers(2))
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            Linears(a=2, b=4),
            r"size mismatch for 'layers.b.weight': the shape is \(3, 1\) in the checkpoint, and \(4, 1\) in this",
        ),
        (Loose(a=2, b=4), r"size mismatch for 'layers.b.weight'"),
        (Linears(a=2, b=3, c=1), r"the checkpoint has no 'layers.c.weight';.*strict_loading = False"),
        (Linears(a=2), r"the module has no 'layers.b.weight';.*strict_loading = False"),
    ],
)
def test_another_model_is_told_the_first_parameter_that_differs(written: Path, module: Linears, said: str) -> None:
    """It was torch's list of all keys, over several lines."""
    match = rf"trainer.fit\(ckpt_path=.*net.ckpt.*from a different model, not from this (Linears|Loose): {said}"
    with pytest.raises(MisconfigurationException, match=match) as raised:
        quiet(max_epochs=2).fit(module, numbers(2), ckpt_path=written)
    assert "\n" not in str(raised.value)
    with pytest.raises(MisconfigurationException, match=r"trainer.validate.*from a different model"):
        quiet().validate(module, numbers(2), ckpt_path=written, verbose=False)


def test_loading_that_is_not_strict_leaves_out_what_differs(written: Path) -> None:
    quiet().validate(Loose(a=2), numbers(2), ckpt_path=written, verbose=False)


def test_an_error_of_a_module_s_own_loading_stays_itself(written: Path) -> None:
    class Own(Linears):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        quiet().validate(Own(a=2, b=3), numbers(2), ckpt_path=written, verbose=False)


def test_another_class_of_optimizer_is_named(written: Path) -> None:
    """Adam's state was put into SGD, which failed in its first step for want of a key."""
    with pytest.raises(
        MisconfigurationException, match=r"is not this SGD: it was written by Adam\. Resume with.*fit without"
    ):
        quiet(max_epochs=2).fit(Linears(torch.optim.SGD, a=2, b=3), numbers(2), ckpt_path=written)


def test_and_where_the_checkpoint_names_no_class_by_its_settings(written: Path) -> None:
    content = load(written)
    del content["lockstep"]["optimizers"]
    save(content, written)
    with pytest.raises(MisconfigurationException, match=r"is not this SGD: it has the setting 'betas', which SGD"):
        quiet(max_epochs=2).fit(Linears(torch.optim.SGD, a=2, b=3), numbers(2), ckpt_path=written)
    content["optimizer_states"][0]["param_groups"][0].pop("decoupled_weight_decay")  # as an older torch wrote it
    save(content, written)
    assert quiet(max_epochs=2).fit(Linears(a=2, b=3), numbers(2), ckpt_path=written).epochs == 2


class Grouped(Linears):
    def __init__(self, cuts: list[int]) -> None:
        super().__init__(a=2, b=3)
        self.cuts = cuts

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        ends = [*self.cuts, len(parameters)]
        return torch.optim.Adam([{"params": parameters[i:j]} for i, j in zip([0, *ends], ends, strict=False)])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([], [2], "it has 1 parameter groups, but this optimizer has 2"),
        ([1], [2], "its parameter group 0 has 1 parameters, but this optimizer's has 2"),
    ],
)
def test_other_parameter_groups_are_counted(tmp_path: Path, before: list[int], now: list[int], said: str) -> None:
    trainer, path = quiet(max_epochs=1), tmp_path / "groups.ckpt"
    trainer.fit(Grouped(before), numbers(2))
    trainer.save_checkpoint(path)
    with pytest.raises(MisconfigurationException, match=f"is not this Adam: {said}"):
        quiet(max_epochs=2).fit(Grouped(now), numbers(2), ckpt_path=path)
