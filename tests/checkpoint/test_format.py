"""A checkpoint file comes back as it was written, or is refused."""

from __future__ import annotations

import os
import pickle
import random
import resource
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.checkpoint import format as checkpoint_format
from lockstep.checkpoint.format import load, save
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.ground.hyperparameters import AttributeDict


def a_checkpoint() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    return {
        "state_dict": model.state_dict(),
        "epoch": 3,
        "optimizer_states": [{"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "rng": torch.randint(256, (1000,), dtype=torch.uint8, generator=generator),
        "hyper_parameters": {"lr": 0.1, "layers": [1, 2], "name": "é"},
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.ckpt"
    save(a_checkpoint(), path)
    return path


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key in a.keys() - {"state_dict", "rng"}:
        assert a[key] == b[key]
    assert torch.equal(a["rng"], b["rng"])
    for name, tensor in a["state_dict"].items():
        assert torch.equal(tensor, b["state_dict"][name])


class TestRoundTrip:
    def test_comes_back(self, path: Path) -> None:
        checkpoint = a_checkpoint()
        save(checkpoint, path)
        for back in (load(path), load(str(path), map_location="cpu", weights_only=False)):
            assert back.pop("lockstep") == {"format": checkpoint_format.FORMAT}
            assert_same(back, checkpoint)

    def test_what_was_given_is_not_changed(self, tmp_path: Path) -> None:
        checkpoint = {"a": 1, "lockstep": {"plan": [["w"]]}}
        save(checkpoint, tmp_path / "x")
        assert checkpoint == {"a": 1, "lockstep": {"plan": [["w"]]}}
        assert load(tmp_path / "x")["lockstep"] == {"plan": [["w"]], "format": 1}

    def test_plain_torch_and_zip_can_read_it(self, path: Path) -> None:
        ours, theirs = load(path), torch.load(path, weights_only=True)
        assert_same(ours, theirs)
        assert_same(ours, torch.load(path, weights_only=True, mmap=True))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None

    def test_storages_that_are_shared_stay_shared(self, tmp_path: Path) -> None:
        weight = torch.arange(6.0)
        save({"a": weight, "b": weight[2:]}, tmp_path / "x")
        back = load(tmp_path / "x")
        back["a"][2] = 9
        assert back["b"][0] == 9

    def test_large_tensors(self, tmp_path: Path) -> None:
        tensors = {str(i): torch.randn(300_001 + i) for i in range(3)}  # more than one read of the hash
        save(tensors, tmp_path / "x")
        back = load(tmp_path / "x")
        assert all(torch.equal(tensor, back[name]) for name, tensor in tensors.items())

    def test_a_url(self) -> None:
        url = f"memory://lockstep-format-{os.getpid()}/x.ckpt"
        save({"a": torch.ones(2)}, url)
        assert torch.equal(load(url)["a"], torch.ones(2))

    @pytest.mark.parametrize("name", ["plain.ckpt", "epoch=1-loss=0.5.ckpt", "é ü.ckpt", "archive"])
    def test_any_name(self, tmp_path: Path, name: str) -> None:
        save({"a": 1}, tmp_path / name)
        assert load(tmp_path / name)["a"] == 1


class TestDamage:
    def test_every_one_of_200_flipped_bits_is_refused(self, path: Path) -> None:
        whole = path.read_bytes()
        choose = random.Random(0)
        # 150 anywhere; 50 at the end, where the directory, the mark and the hash are
        bits = [choose.randrange(8 * len(whole)) for _ in range(150)]
        bits += [8 * len(whole) - 1 - choose.randrange(8 * 72) for _ in range(50)]
        for bit in bits:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpoint, match=r"run\.ckpt' .*: (resume from an earlier|check the path)"):
                load(path)
        path.write_bytes(whole)
        load(path)

    def test_every_bit_of_the_mark_counts(self, path: Path) -> None:
        whole = path.read_bytes()
        for bit in range(8 * (len(whole) - 50), 8 * (len(whole) - 32)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            with pytest.raises(CorruptCheckpoint):
                load(path)

    def test_truncated_anywhere_or_longer(self, path: Path) -> None:
        whole = path.read_bytes()
        choose = random.Random(1)
        for length in [0, 1, 3, 4, 40, len(whole) - 1, len(whole) - 50] + [
            choose.randrange(len(whole)) for _ in range(40)
        ]:
            path.write_bytes(whole[:length])
            with pytest.raises(CorruptCheckpoint, match=r"run\.ckpt"):
                load(path)
        path.write_bytes(whole + b"x")
        with pytest.raises(CorruptCheckpoint):
            load(path)

    def test_the_hash_is_checked_before_anything_is_unpickled(self, tmp_path: Path) -> None:
        ran = tmp_path / "ran"
        path = tmp_path / "x"
        save({"a": 1}, path)
        evil = pickle.dumps(_Runs(f"open({str(ran)!r}, 'w')"), protocol=2)
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
            comment = archive.comment
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, evil if name.endswith("data.pkl") else data)
            archive.comment = comment
        with pytest.raises(CorruptCheckpoint, match="do not match the hash"):
            load(path, weights_only=False)
        assert not ran.exists()


class _Runs:
    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return exec, (self.code,)


class TestForeignFiles:
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "is empty"),
            (b"epoch: 3\n", "was not written by torch.save"),
            (pickle.dumps({"a": 1}), "was not written by torch.save"),
        ],
    )
    def test_no_zip(self, tmp_path: Path, content: bytes, says: str) -> None:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(CorruptCheckpoint, match=rf"x' {says}.*check the path"):
            load(tmp_path / "x", weights_only=False)

    def test_another_zip(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "x", "w") as archive:
            archive.writestr("word/document.xml", "<a/>")
        with pytest.raises(CorruptCheckpoint, match=r"no data\.pkl"):
            load(tmp_path / "x")

    def test_a_tensor(self, tmp_path: Path) -> None:
        torch.save(torch.ones(1), tmp_path / "x")
        with pytest.raises(CorruptCheckpoint, match="holds a Tensor"):
            load(tmp_path / "x")

    def test_none_and_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"there is no checkpoint '.*none'"):
            load(tmp_path / "none")
        with pytest.raises(IsADirectoryError, match="is a folder"):
            load(tmp_path)

    def test_a_device_that_is_not_here_is_no_damage(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        torch.save({"a": torch.ones(1)}, tmp_path / "foreign")
        save({"a": torch.ones(1)}, tmp_path / "ours")
        for name in ("foreign", "ours"):
            with pytest.raises(RuntimeError, match="map_location") as caught:
                load(tmp_path / name)
            assert not isinstance(caught.value, CorruptCheckpoint)
            assert load(tmp_path / name, map_location="cpu")["a"] == 1


class TestLightning:
    """Files as Lightning 2.x writes them: torch.save of a dict, with no hash."""

    def test_plain_hyperparameters(self, tmp_path: Path) -> None:
        checkpoint = {**a_checkpoint(), "pytorch-lightning_version": "2.6.0"}
        torch.save(checkpoint, tmp_path / "x")
        assert_same(load(tmp_path / "x"), checkpoint)

    @pytest.mark.parametrize("module", ["lightning.fabric.utilities.data", "lightning_fabric.utilities.data"])
    def test_nested_hyperparameters_are_of_a_class_that_need_not_be_installed(
        self, tmp_path: Path, module: str
    ) -> None:
        # Only the name of the class is in the file: ours is replaced by theirs.
        own = AttributeDict.__module__
        torch.save({"hyper_parameters": {"model": AttributeDict(lr=0.1, sub=AttributeDict(n=2))}}, tmp_path / "x")
        with zipfile.ZipFile(tmp_path / "x") as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "y", "w") as archive:
            for name, data in members.items():
                archive.writestr(name, data.replace(own.encode(), module.encode()))
        back = load(tmp_path / "y")["hyper_parameters"]
        assert back == {"model": {"lr": 0.1, "sub": {"n": 2}}}
        assert type(back["model"]) is dict

    def test_others_say_that_they_need_weights_only_false(self, tmp_path: Path) -> None:
        torch.save({"hyper_parameters": {"args": Namespace(a=1), "path": Path("p")}}, tmp_path / "x")
        with pytest.raises(MisconfigurationException, match=r"x' holds.*argparse\.Namespace.*weights_only=False"):
            load(tmp_path / "x")
        assert load(tmp_path / "x", weights_only=False)["hyper_parameters"]["args"].a == 1


class TestSaveRefuses:
    def test_before_the_earlier_file_is_touched(self, path: Path) -> None:
        before = path.stat()
        with pytest.raises(MisconfigurationException, match=r'checkpoint\["hyper_parameters"\]\["path"\] is a pathlib'):
            save({"hyper_parameters": {"path": Path("a")}}, path)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert os.listdir(path.parent) == [path.name]

    @pytest.fixture
    def no_room(self) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @pytest.mark.parametrize("numbers", [16_300, 40_000, 1_000_000])
    def test_no_room_in_the_middle_or_at_the_end(self, path: Path, no_room: None, numbers: int) -> None:
        before = path.read_bytes()
        with pytest.raises(OSError, match=r"run\.ckpt': there is no room .*earlier file under this name is whole"):
            save({"a": torch.randn(numbers)}, path)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
        assert load(path)["epoch"] == 3

    def test_two_views_of_a_storage_with_two_types(self, path: Path) -> None:
        tensor = torch.ones(4)
        with pytest.raises(RuntimeError, match="view the same data as different types"):
            save({"a": tensor, "b": tensor.view(torch.int32)}, path)
        assert load(path)["epoch"] == 3
