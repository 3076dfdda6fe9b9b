"""Damaged and hostile files: whatever was done to one, it is one kind of error, before anything is unpacked."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lockstep.checkpoint import dcp, format, sharded, storage
from lockstep.checkpoint.sharded import INDEX, load, outline
from lockstep.ground import plain_yaml
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.module import LightningModule

VALUES: list[Any] = [
    None,
    True,
    -1,
    1.5,
    "",
    "x",
    [],
    {},
    [1],
    {"a": 1},
    10**30,
    "../../etc/passwd",
    "\0",
    {"bytes": -1},
]
EVERY_DAY, ALL = 40, 1000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in parts."""
    path = tmp_path / "parts"
    content = {
        "state_dict": {"w": torch.arange(6.0).reshape(2, 3)},
        "optimizer_states": [{"state": {0: {"m": torch.ones(2, 3)}}, "param_groups": [{"lr": 0.1}]}],
        "epoch": 1,
        "global_step": 2,
        "lockstep": {"format": 1, "ranks": [{"seed": 1}]},
    }
    parts = sharded.split(content)
    sharded.write(parts, sharded.plan(parts, 0), path)
    return path


def with_right_hash(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index, and give it the hash that fits."""
    content = json.loads((folder / INDEX).read_text())
    content.pop("sha256")
    changed = change(content)
    if isinstance(changed, dict):
        changed = {**changed, "sha256": sharded._hash_of(changed)}
    (folder / INDEX).write_text(json.dumps(changed))


def is_refused(path: Path) -> None:
    for read in (load, outline):
        with pytest.raises(CorruptCheckpoint) as caught:
            read(path)
        assert str(path) in str(caught.value)


def test_an_index_with_a_right_hash_and_malformed_content_is_refused(folder: Path) -> None:
    """It was an AttributeError, a KeyError, or a file outside of the folder."""
    whole = (folder / INDEX).read_bytes()
    for key in ("files", "tensors", "about"):
        for value in (None, 1, "x", [], [1]):
            with_right_hash(folder, lambda content, key=key, value=value: {**content, key: value})
            is_refused(folder)
            (folder / INDEX).write_bytes(whole)
    name = next(iter(json.loads(whole)["files"]))
    for value in VALUES:
        with_right_hash(folder, lambda c, value=value: {**c, "files": {**c["files"], name: value}})
        is_refused(folder)
        (folder / INDEX).write_bytes(whole)
    for other in ("../../outside", "/etc/hostname", "a/../b", "."):
        with_right_hash(folder, lambda c, o=other: {**c, "files": {**c["files"], o: {"bytes": 1, "sha256": ""}}})
        is_refused(folder)
        (folder / INDEX).write_bytes(whole)


def damage(folder: Path, draw: random.Random) -> str:
    """Something that happens to a folder; says what."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path, kind = draw.choice(files), draw.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.unlink()
        path.mkdir()
    elif kind == 2:
        path.unlink()
        path.symlink_to(path.name)  # to itself
    elif kind == 3:
        path.unlink()
        other = path.with_name("other")
        path.symlink_to(other)
        other.symlink_to(path)
    elif kind == 4:
        path.write_bytes(draw.randbytes(draw.randrange(200)))
    elif kind == 5:
        text = bytearray(path.read_bytes())
        for _ in range(draw.randrange(1, 9)):
            text[draw.randrange(len(text))] ^= draw.randrange(1, 256)
        path.write_bytes(text)
    elif kind == 6:
        path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])
    else:
        content = json.loads((folder / INDEX).read_text())
        key = draw.choice([key for key in content if key != "sha256"])
        if isinstance(content[key], dict) and content[key] and draw.random() < 0.7:
            inner = draw.choice(sorted(content[key]))
            with_right_hash(folder, lambda c: {**c, key: {**c[key], inner: draw.choice(VALUES)}})
        else:
            with_right_hash(folder, lambda c: {**c, key: draw.choice(VALUES)})
    return f"{kind} of {path.name}"


def hunt(folder: Path, seeds: range) -> None:
    whole = load(folder)
    for seed in seeds:
        copy = folder.with_name("damaged")
        shutil.copytree(folder, copy)
        done = damage(copy, random.Random(seed))
        for read in (load, outline):
            try:
                found = read(copy)
            except CorruptCheckpoint:
                continue
            except (FileNotFoundError, IsADirectoryError):
                assert not sharded.is_sharded(copy), (seed, done)
                continue
            if read is load:  # what was damaged is not read
                assert torch.equal(found["state_dict"]["w"], whole["state_dict"]["w"]), (seed, done)
        shutil.rmtree(copy)


def test_folders_that_are_damaged_in_any_way_are_one_kind_of_error(folder: Path) -> None:
    hunt(folder, range(EVERY_DAY))


@pytest.mark.slow
def test_many_folders_that_are_damaged_in_any_way_are_one_kind_of_error(folder: Path) -> None:
    hunt(folder, range(EVERY_DAY, ALL))


def test_a_link_that_leads_to_itself_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.symlink_to(path)
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint at .*last.ckpt.*symbolic links"):
        load(path)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_zip_file_that_unpacks_to_gigabytes_is_refused_by_its_directory(tmp_path: Path, sealed: bool) -> None:
    """3 MB that would take gigabytes of memory, or minutes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
        archive.writestr("archive/data/0", bytes(2**27))
    path = tmp_path / "bomb.ckpt"
    content = made.getvalue()
    if sealed:
        import hashlib

        content = content[:-2] + format._SEAL
        content += hashlib.sha256(content).digest()
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match="would unpack to 134217732"):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_members_of_a_zip_file_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"w": torch.zeros(2**20)}, path)
    text = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        end = archive.start_dir
    count = len(zipfile.ZipFile(path).infolist())
    entries = text[end : text.rindex(b"PK\x05\x06")]
    last = bytearray(text[text.rindex(b"PK\x05\x06") :])
    last[8:12] = (2 * count).to_bytes(2, "little") * 2
    last[12:16] = (2 * len(entries)).to_bytes(4, "little")
    last[16:20] = end.to_bytes(4, "little")
    path.write_bytes(text[:end] + entries + entries + bytes(last))
    with pytest.raises(CorruptCheckpoint):
        load(path)


# -- YAML


@pytest.mark.everyday(4)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"\xff\xfe\x00\x00", "it is not YAML"),
        (b"a: \xe9\n", "it is not YAML"),
        (b"[" * 5_000, "it is"),
        (b"a: b: c\n", "it is not YAML"),
        (b"a: !!python/object/apply:os.system [ls]\n", "it is not YAML"),
    ],
)
def test_yaml_that_cannot_be_what_it_says_is_refused_early(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "hparams.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=says):
        plain_yaml.read(path)
    saved = tmp_path / "last.ckpt"
    torch.save({"state_dict": {}}, saved)
    with pytest.raises(MisconfigurationException, match=r"hparams_file='.*hparams.yaml'\): "):
        LightningModule.load_from_checkpoint(saved, hparams_file=path)


# -- a full disk


class NoRoom(io.FileIO):
    """A file on a disk that has room for some bytes."""

    room = 1000

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.room:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_full_disk_under_parts_is_told_as_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was torch's "unexpected pos 704 vs 598", a position in its own source."""
    monkeypatch.setattr(storage, "create", lambda path: NoRoom(path, "w"))
    parts = sharded.split(load(folder))
    with pytest.raises(OSError, match="the disk is full"):
        sharded.write(parts, sharded.plan(parts, 0), folder.with_name("other"))


class Called:
    """Pickled as a call of ``getattr``."""

    def __init__(self, kind: object, name: str) -> None:
        self.asked = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.asked


def test_members_of_enums_that_older_releases_of_python_3_11_pickle_by_getattr_could_not_be_read() -> None:
    known = Called(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    read = dcp._MetadataUnpickler(io.BytesIO(pickle.dumps(known))).load()
    assert read is _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    for kind, name in ((_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "count")):
        with pytest.raises(pickle.UnpicklingError, match="it reads the attribute"):
            dcp._MetadataUnpickler(io.BytesIO(pickle.dumps(Called(kind, name)))).load()
