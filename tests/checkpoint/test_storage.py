"""A file under its name is always whole: the earlier one, or the new one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lockstep.checkpoint import storage
from tests.scripts.in_rank import run_script
from tests.tools.pool import RankPool


def write(path: storage.PathLike, data: bytes) -> None:
    with storage.replacing(path) as file:
        file.write(data)


def write_half(path: storage.PathLike, error: type[BaseException]) -> None:
    with storage.replacing(path) as file:
        file.write(b"ha")
        raise error


class TestReplacing:
    def test_the_earlier_file_is_there_until_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        write(path, b"one")
        with storage.replacing(path) as file:
            file.write(b"two")
            file.flush()
            assert path.read_bytes() == b"one"
            assert storage.names(tmp_path) == ["x"]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_leaves_the_earlier_file_and_nothing_else(
        self, tmp_path: Path, error: type[BaseException]
    ) -> None:
        path = tmp_path / "x"
        write(path, b"one")
        with pytest.raises(error):
            write_half(path, error)
        assert path.read_bytes() == b"one"
        assert os.listdir(tmp_path) == ["x"]

    def test_replaces_a_link_and_not_what_it_leads_to(self, tmp_path: Path) -> None:
        write(tmp_path / "best", b"best")
        storage.link(tmp_path / "last", tmp_path / "best")
        write(tmp_path / "last", b"last")
        assert (tmp_path / "best").read_bytes() == b"best"
        assert (tmp_path / "last").read_bytes() == b"last"

    def test_bytes_are_on_the_disk_before_the_name_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []
        sync, rename = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("sync"), sync(descriptor))[1])
        monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b))[1])
        write(tmp_path / "x", b"1")
        assert calls == ["sync", "rename", "sync"]


KILLED = """
import os, signal, sys
from lockstep.checkpoint import storage
with storage.replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


KILLED_LINK = """
import os, signal, sys
from lockstep.checkpoint import storage
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
storage.link(sys.argv[1] + "/last", sys.argv[1] + "/a")
"""


@pytest.fixture
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script") / "killed.py"


class TestLeftovers:
    @pytest.mark.timeout(60)
    def test_a_killed_write_is_removed_by_the_next_one_and_a_living_one_is_not(
        self, ranks: RankPool, script: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "x.ckpt"
        write(path, b"one")
        script.write_text(KILLED)
        (done,) = run_script(ranks, script, str(path), folder=tmp_path)
        assert done.returncode == -signal.SIGKILL
        assert path.read_bytes() == b"one"
        (leftover,) = set(os.listdir(tmp_path)) - {"x.ckpt"}
        assert leftover.startswith(".x.ckpt.")
        assert leftover.endswith(storage.UNFINISHED)
        told, tell = os.pipe()
        go, let_go = os.pipe()
        if not (other := os.fork()):
            try:
                with storage.replacing(path) as file:
                    file.write(b"half")
                    os.write(tell, b"writing")
                    os.read(go, 1)
            finally:
                os._exit(0)
        assert os.read(told, 7) == b"writing"
        write(path, b"two")
        assert len(os.listdir(tmp_path)) == 2
        assert leftover not in os.listdir(tmp_path)
        os.write(let_go, b"x")
        os.waitpid(other, 0)
        for descriptor in (told, tell, go, let_go):
            os.close(descriptor)
        assert path.read_bytes() == b"half"
        assert os.listdir(tmp_path) == ["x.ckpt"]

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("by", ["link", "write"])
    @pytest.mark.parametrize("target_is_gone", [False, True])
    def test_a_killed_link_is_removed_by_the_next_one(
        self, ranks: RankPool, script: Path, tmp_path: Path, by: str, target_is_gone: bool
    ) -> None:
        script.write_text(KILLED_LINK)
        for name in ("a", "b"):
            write(tmp_path / name, name.encode())
        (done,) = run_script(ranks, script, str(tmp_path), folder=tmp_path)
        assert done.returncode == -signal.SIGKILL
        (leftover,) = set(os.listdir(tmp_path)) - {"a", "b"}
        assert os.readlink(tmp_path / leftover) == "a"
        if target_is_gone:
            storage.remove(tmp_path / "a")
        if by == "link":
            storage.link(tmp_path / "last", tmp_path / "b")
        else:
            write(tmp_path / "last", b"b")
        assert (tmp_path / "last").read_bytes() == b"b"
        assert sorted(os.listdir(tmp_path)) == (["b", "last"] if target_is_gone else ["a", "b", "last"])

    def test_nothing_is_written_through_a_link_that_was_left(self, tmp_path: Path) -> None:
        write(tmp_path / "best", b"best")
        own = tmp_path / f".last.{os.getpid()}-{threading.get_native_id()}{storage.UNFINISHED}"
        own.symlink_to("best")  # of a process of the same id, as in a container that was started again
        write(tmp_path / "last", b"last")
        assert (tmp_path / "best").read_bytes() == b"best"
        assert (tmp_path / "last").read_bytes() == b"last"

    def test_a_link_taken_for_a_leftover_is_made_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write(tmp_path / "a", b"a")
        rename = os.replace

        def overtaken(source: Path, place: Path) -> None:
            monkeypatch.setattr(os, "replace", rename)
            storage.remove(source)
            rename(source, place)

        monkeypatch.setattr(os, "replace", overtaken)
        storage.link(tmp_path / "last", tmp_path / "a")
        assert os.readlink(tmp_path / "last") == "a"
        assert set(os.listdir(tmp_path)) == {"a", "last"}

    def test_threads_write_the_same_name_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        ready = threading.Barrier(3)

        def rank(letter: bytes) -> None:
            with storage.replacing(path) as file:
                file.write(letter * 100_000)
                ready.wait(10)

        threads = [threading.Thread(target=rank, args=(letter,)) for letter in (b"a", b"b", b"c")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert path.read_bytes() in (b"a" * 100_000, b"b" * 100_000, b"c" * 100_000)
        assert os.listdir(tmp_path) == ["x"]


class TestErrors:
    def test_a_file_where_the_folder_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"")
        with pytest.raises(OSError, match=r"f/x': its folder is not writable"):
            write(tmp_path / "f" / "x", b"")
        with pytest.raises(NotADirectoryError, match=r"f' is a file"):
            storage.check_writable(tmp_path / "f" / "deeper")

    def test_a_folder_without_rights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        storage.check_writable(tmp_path / "new" / "folder")
        assert os.listdir(tmp_path) == []
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(PermissionError, match="permission is missing in"):
            storage.check_writable(tmp_path / "new" / "folder")


class TestTheRest:
    def test_a_url(self) -> None:
        path = f"memory://lockstep-{os.getpid()}-{time.time_ns()}/run/x.ckpt"
        folder = os.path.dirname(path)
        write(path, b"one")
        write(path, b"two!")
        with storage.reading(path) as file:
            file.seek(1)
            assert file.read() == b"wo!"
        with pytest.raises(RuntimeError):
            write_half(path, RuntimeError)
        assert storage.names(folder) == ["x.ckpt"]
        assert storage.size(path) == 4
        storage.check_writable(folder)
        storage.remove(path)
        storage.remove(path)
        assert not storage.exists(path)
        assert storage.names(folder) == []
