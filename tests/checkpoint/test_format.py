"""A checkpoint file comes back as it was written, or is refused; what it cannot hold is named by its key."""

from __future__ import annotations

import collections
import enum
import io
import os
import pickle
import random
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.checkpoint import format as checkpoint_format
from lockstep.checkpoint.format import load, readable, save
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

    def test_plain_torch_and_zip_can_read_it(self, path: Path) -> None:
        ours, theirs = load(path), torch.load(path, weights_only=True)
        assert_same(ours, theirs)
        assert_same(ours, torch.load(path, weights_only=True, mmap=True))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


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
            with pytest.raises(CorruptCheckpoint, match=r"run\.ckpt' .*(Resume from an earlier|Check the path)"):
                load(path)
        path.write_bytes(whole)
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
        with pytest.raises(CorruptCheckpoint, match="do not match its hash"):
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
        with pytest.raises(CorruptCheckpoint, match=rf"x' {says}.*Check the path"):
            load(tmp_path / "x", weights_only=False)

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


@pytest.fixture
def no_room() -> Iterator[None]:
    """No file may grow past 64 KiB: the kernel refuses the write in the middle, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestSaveRefuses:
    def test_before_the_earlier_file_is_touched(self, path: Path) -> None:
        before = path.stat()
        with pytest.raises(MisconfigurationException, match=r'checkpoint\["hyper_parameters"\]\["path"\] is a pathlib'):
            save({"hyper_parameters": {"path": Path("a")}}, path)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert os.listdir(path.parent) == [path.name]

    @pytest.mark.parametrize("numbers", [16_300, 40_000, 1_000_000])
    def test_no_room_in_the_middle_or_at_the_end(self, path: Path, no_room: None, numbers: int) -> None:
        before = path.read_bytes()
        with pytest.raises(OSError, match=r"run\.ckpt': the disk is full .*MiB are free; the earlier file is intact"):
            save({"a": torch.randn(numbers)}, path)
        assert path.read_bytes() == before
        assert os.listdir(path.parent) == [path.name]
        assert load(path)["epoch"] == 3


# -- what a checkpoint may hold -----------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Point:
    def __init__(self) -> None:
        self.x = 1


Pair = collections.namedtuple("Pair", "a b")


class TensorWithAName(torch.Tensor):
    pass


def round_trip(value: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    torch.save(readable(value), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class TestLetThrough:
    def test_nothing_is_copied_where_nothing_changes(self) -> None:
        state = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).state_dict()
        checkpoint = {"state_dict": state, "list": [{"a": (1, 2)}]}
        assert readable(checkpoint) is checkpoint

    def test_a_list_in_itself_and_one_there_twice(self) -> None:
        loop: list[Any] = [1]
        loop.append(loop)
        twice = [np.int64(3)]
        back = round_trip({"loop": loop, "a": twice, "b": twice})
        assert back["loop"][1] is back["loop"]
        assert back["a"] is back["b"]

    def test_a_class_that_was_made_known(self) -> None:
        with torch.serialization.safe_globals([Point]):
            assert isinstance(round_trip({"p": Point()})["p"], Point)
        with torch.serialization.safe_globals([TensorWithAName]):
            value = torch.ones(1).as_subclass(TensorWithAName)
            assert isinstance(round_trip({"t": value})["t"], TensorWithAName)
        with pytest.raises(MisconfigurationException):
            readable({"p": Point()})

    @settings(max_examples=25)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(min_size=1),
            lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
            max_leaves=20,
        )
    )
    def test_whatever_is_let_through_comes_back_equal(self, value: Any) -> None:
        assert round_trip({"value": value}) == {"value": value}


class TestMadePlain:
    def test_numpy_numbers(self) -> None:
        numbers = {"a": np.float64(0.1), "b": [np.int64(3), np.bool_(True)], "c": (np.float32(0.5), np.str_("s"))}
        back = round_trip({"numbers": numbers})["numbers"]
        assert back == {"a": 0.1, "b": [3, True], "c": (0.5, "s")}
        assert [type(value) for value in (back["a"], *back["b"], *back["c"])] == [float, int, bool, float, str]
        assert type(numbers["a"]) is np.float64  # what was given is not changed
        assert type(round_trip({np.int64(1): 2}).popitem()[0]) is int

    def test_attribute_dicts_become_dicts(self) -> None:
        back = round_trip({"h": AttributeDict(model=AttributeDict(lr=0.1))})
        assert back == {"h": {"model": {"lr": 0.1}}}
        assert type(back["h"]["model"]) is dict


def function() -> None: ...


class TestRefused:
    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (Path("a"), r"a pathlib\.\w+"),
            (np.ones(2), r"a numpy\.ndarray"),
            (Colour.RED, r"a .*Colour"),
            (Point(), r"a .*Point"),
            (function, "a function"),
            (Pair(1, 2), r"a .*Pair"),
            (nn.Linear(1, 1), r"a torch\.nn\.\S+Linear"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_by_key(self, value: Any, what: str) -> None:
        place = r'checkpoint\["callbacks"\]\["C"\]\[0\](\[1\])?'
        with pytest.raises(
            MisconfigurationException, match=f"^{place} is {what}, .*Save only tensors.*add_safe_globals"
        ):
            readable({"callbacks": {"C": [value]}})

    def test_attributes_of_tensors_and_of_ordered_dicts_too(self) -> None:
        tensor = torch.ones(1)
        tensor.note = Path("a")  # type: ignore[attr-defined]
        with pytest.raises(MisconfigurationException, match=r'\["t"\]\["__dict__"\]\["note"\]'):
            readable({"t": tensor})
        ordered: collections.OrderedDict[str, int] = collections.OrderedDict(a=1)
        ordered.note = Path("a")  # type: ignore[attr-defined]
        with pytest.raises(MisconfigurationException, match=r'\["o"\]\["__dict__"\]\["note"\]'):
            readable({"o": ordered})


@pytest.mark.filterwarnings("ignore:Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
def test_torchs_variable_counts_only_where_weights_only_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that reads its own checkpoints leaves no way to give the argument."""
    path = tmp_path / "objects.ckpt"
    torch.save({"state_dict": {}, "enum": Colour.RED}, path)
    with pytest.raises(MisconfigurationException, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"):
        load(path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    assert load(path)["enum"] is Colour.RED
    with pytest.raises(MisconfigurationException, match=r"not tensors or plain values: .*Colour"):
        load(path, weights_only=True)


def test_a_second_ctrl_c_within_a_save_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch made a RuntimeError of it (unexpected pos)."""
    path, left = tmp_path / "a.ckpt", [0]
    content = {f"w{i}": torch.ones(100) for i in range(5)}
    save(content, path)
    before, pass_on = path.read_bytes(), checkpoint_format._HashingWriter._pass_on

    def interrupted(writer: Any, data: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        pass_on(writer, data)

    monkeypatch.setattr(checkpoint_format._HashingWriter, "_pass_on", interrupted)
    for at in (1, 2, 5, 10):
        left[0] = at
        with pytest.raises(KeyboardInterrupt):
            save({**content, "more": torch.zeros(1)}, path)
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
