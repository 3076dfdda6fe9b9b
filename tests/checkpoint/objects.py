"""A file system of fsspec's that keeps objects as a store in a cloud does."""

from __future__ import annotations

import datetime
import io
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fsspec.spec import AbstractFileSystem


class Objects(AbstractFileSystem):  # type: ignore[misc]
    """A store of objects: no folders, an object is there when it is whole, and what was listed is remembered.

    ``objects:///folder/run/x.ckpt`` is the object ``run/x.ckpt`` in a folder of this machine, which all ranks see.
    """

    protocol = "objects"
    root_marker = "/"

    def _file(self, path: str) -> Path:
        folder = Path(os.environ["LOCKSTEP_TEST_OBJECTS"])
        return folder / quote(self._strip_protocol(path).strip("/"), safe="")

    def _keys(self) -> dict[str, int]:
        if "" not in self.dircache:
            folder = Path(os.environ["LOCKSTEP_TEST_OBJECTS"])
            self.dircache[""] = [
                {"name": "/" + unquote(each.name), "size": each.stat().st_size} for each in folder.iterdir()
            ]
        return {each["name"]: each["size"] for each in self.dircache[""]}

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path).rstrip("/")
        found: dict[str, dict[str, Any]] = {}
        for key, size in self._keys().items():
            if key == path:
                found[key] = {"name": key, "size": size, "type": "file"}
            elif key.startswith(path + "/"):
                inner, _, below = key[len(path) + 1 :].partition("/")
                found[f"{path}/{inner}"] = {
                    "name": f"{path}/{inner}", "size": 0 if below else size, "type": "directory" if below else "file"
                }  # fmt: skip
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        file = self._file(path)
        if mode == "rb":
            return file.open("rb")

        class Upload(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    file.write_bytes(self.getvalue())
                super().close()

        return Upload()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._file(path2).write_bytes(self._file(path1).read_bytes())
        self.invalidate_cache()

    def rm_file(self, path: str) -> None:
        self._file(path).unlink()
        self.invalidate_cache()

    def modified(self, path: str) -> Any:
        return datetime.datetime.fromtimestamp(self._file(path).stat().st_mtime, datetime.UTC)
