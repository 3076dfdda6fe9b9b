"""Files of torch's distributed checkpoint (DCP): hashed while they are written, read without running code."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum, EnumMeta
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from lockstep.checkpoint import storage
from lockstep.checkpoint.storage import PathLike
from lockstep.ground.parameters import is_sharded_twice, local_part, starts_of

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset of a part within the full tensor, and the part's size, in each dimension."""

PIECE = 1 << 22
"""Number of bytes that are hashed at a time while they are written."""

SYNCED = 1 << 25
"""Number of bytes after which the file is synced to the disk, while the next ones are hashed."""

METADATA = ".metadata"
"""DCP's own file: maps parts of tensors to bytes of files."""


# -- parts of tensors ----------------------------------------------------------------------------------------


def chunks_of(boxes: Iterable[Box]) -> list[ChunkStorageMetadata]:
    """Convert the offsets and sizes of this rank's parts of a tensor to DCP's chunk descriptions."""
    return [ChunkStorageMetadata(torch.Size(corner), torch.Size(sizes)) for corner, sizes in boxes]


def items_of(name: str, shape: torch.Size, local: Tensor, boxes: Iterable[Box]) -> list[WriteItem]:
    """Return DCP's write items for this rank's parts of a tensor.

    Args:
        name: name of the tensor.
        shape: shape of the full tensor.
        local: this rank's values, for dtype and other properties.
        boxes: offsets and sizes of this rank's parts.
    """
    items, properties = [], TensorProperties.create_from_tensor(local)
    for chunk in chunks_of(boxes):
        data = TensorWriteData(chunk=chunk, properties=properties, size=shape)
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    return items


class _PlacedPart:
    """A wrapper with correct offsets for a DTensor whose dimension is split by tensor parallelism and again by FSDP.

    torch computes wrong offsets for such a DTensor; see `box_in`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self._part = tensor.shape, local_part(tensor.detach())
        box = tuple(starts_of(tensor)), tuple(self._part.shape)
        self._boxes = [box] if self._part.numel() else []

    def size(self) -> torch.Size:
        return self.shape

    def to_local(self) -> Tensor:
        return self._part

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return items_of(fqn, self.shape, self._part, self._boxes)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return chunks_of(self._boxes)


def _wrap_misplaced(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors by name; DTensors for which torch computes wrong offsets are wrapped in `_PlacedPart`."""
    return {name: _PlacedPart(each) if is_sharded_twice(each) else each for name, each in tensors.items()}


# -- writing -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digest:
    """Size and SHA-256 of a file, with which a reader detects damage."""

    bytes: int
    sha256: str


class HashedFile(io.RawIOBase):
    """Writer of a new file that computes the hash of the data while the disk stores it.

    A second thread writes a large piece while this thread hashes it: both release the GIL. A third thread waits for the
    disk.

    Args:
        path: path of the file; may be a URL.

    Attributes:
        error: the operating system's error if a piece could not be written.
    """

    def __init__(self, path: PathLike) -> None:
        super().__init__()
        self._file, self._is_remote = storage.create(path), storage.is_remote(path)
        self._hash = hashlib.sha256()
        self._threads = ThreadPoolExecutor(2, "lockstep-write")
        self._length = self._synced = 0
        self._sync: Future[None] | None = None
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def _write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._length += len(view)
        if len(view) < PIECE // 4:  # a thread would take longer than the write
            self._hash.update(view)
            self._file.write(view)
            return len(view)
        pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
        written = self._threads.submit(lambda: [self._file.write(piece) for piece in pieces])
        try:
            for piece in pieces:
                self._hash.update(piece)
        finally:
            written.result()  # torch reuses the memory when this returns
        if self._is_remote:
            return len(view)
        # A sync from time to time keeps the disk busy during the writes; one at the end would wait for all bytes.
        if self._length - self._synced >= SYNCED and (self._sync is None or self._sync.done()):
            self._synced, self._sync = self._length, self._threads.submit(os.fsync, self._file.fileno())
        return len(view)

    def tell(self) -> int:
        return self._length

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Sync the bytes to the disk and close the file."""
        if not self.closed:
            try:
                if self._sync is not None:
                    self._sync.result()
                if not self._is_remote:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            finally:
                self._threads.shutdown()
                self._file.close()
                super().close()

    def digest(self) -> Digest:
        """Return the size and hash of all bytes written so far."""
        return Digest(self._length, self._hash.hexdigest())


class _Files(FileSystem):
    """File system interface for DCP, for local paths and URLs, that records a digest of each written file."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: PathLike, mode: str) -> Iterator[Any]:
        if mode == "rb":
            with storage.opened(path) as stream:
                yield stream
            return
        error: OSError | None = None
        try:
            with HashedFile(path) as file:
                try:
                    yield file
                except RuntimeError:  # torch reports a failed write by a position in its own source
                    if file.error is None:
                        raise
            error = file.error
        except OSError as failed:
            error = failed
        if error is not None:
            raise storage.explain(error, storage.local("" if storage.is_remote(path) else path)) from error
        self.digests[os.path.basename(path)] = file.digest()

    def concat_path(self, path: PathLike, suffix: str) -> str:
        return storage.inside(path, suffix)

    def init_path(self, path: PathLike) -> str:
        return os.fspath(path)

    def rename(self, path: PathLike, new_path: PathLike) -> None:
        storage.rename(path, new_path)
        self.digests[os.path.basename(new_path)] = self.digests.pop(os.path.basename(path))

    def exists(self, path: PathLike) -> bool:
        return storage.exists(path)

    def rm_file(self, path: PathLike) -> None:
        storage.remove(path)


class Writer(FileSystemWriter):
    """A DCP storage writer whose files are hashed while they are written.

    Attributes:
        digests: digests of the files that this process has written, by name.
    """

    def __init__(self, folder: PathLike) -> None:
        super().__init__("", sync_files=False)  # each file is synced when it is closed
        self.fs = files = _Files()
        self.path, self.digests = files.init_path(folder), files.digests

    def storage_meta(self) -> StorageMeta:
        """Return DCP's storage metadata without the folder's id, which becomes wrong when the folder is renamed."""
        return StorageMeta()


class Planner(DefaultSavePlanner):
    """A DCP planner that decides which tensor parts each rank writes, and provides this rank's values.

    Args:
        state: dicts of tensors. Each rank writes its part of a DTensor, or of a tensor that describes its local part
            by ``__create_write_items__`` and ``to_local``; rank 0 writes any other tensor.
        is_zero: True on rank 0.

    Attributes:
        local: the values that this rank may have to write, by name: its parts of DTensors and the like; on rank 0 also
            the other tensors.
    """

    def __init__(self, state: Mapping[str, Any], is_zero: bool) -> None:
        super().__init__()
        self.set_up_planner(dict(state), is_coordinator=is_zero)
        self.state_dict = _wrap_misplaced(self.state_dict)
        self.local: dict[str, Tensor] = {}
        self._box: dict[str, Callable[[torch.Size, Tensor], Tensor]] = {}
        for name, value in self.state_dict.items():
            part = value.to_local() if hasattr(value, "to_local") else value if is_zero else None
            if part is not None:
                self.local[name] = _in_its_own_storage(part.detach())
            box = getattr(value, "box", None)  # for a part in several boxes
            if box is not None:
                self._box[name] = box

    def create_local_plan(self) -> SavePlan:
        """Return a plan with this rank's write items. Only rank 0 writes replicated tensors."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.type is WriteItemType.SHARD or self.is_coordinator]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values for a write item: this rank's part of a tensor, or a rectangular region of that part."""
        value, box = self.local[index.fqn], self._box.get(index.fqn)
        return value if box is None else _in_its_own_storage(box(cast("torch.Size", index.offset), value))


def _in_its_own_storage(tensor: Tensor) -> Tensor:
    """Return a tensor that uses the same memory, but has a storage that contains no other elements.

    torch copies a part of a larger storage, such as a shard with padding, and keeps all copies until the file is
    complete: that would need the memory of this rank's part once more.
    """
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    if whole or tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # keep the tensor alive
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


@contextmanager
def without_crc32() -> Iterator[None]:
    """Disable the CRC-32 checksums of ``torch.save`` inside the block. SHA-256 replaces them and takes less time."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


# -- reading -------------------------------------------------------------------------------------------------


_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}


class _MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of DCP's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it contains the class {module}.{name}, which is not allowed in DCP's metadata")


def _enum_member(kind: object, name: str) -> Enum:
    """Return the member of an enum by name. Unpickling uses this function in place of ``getattr``.

    Python 3.11.0 to 3.11.3 pickle a member as a call of ``getattr``, which would give access to anything.

    Raises:
        pickle.UnpicklingError: ``kind`` is not an enum, or has no such member.
    """
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(
            f"it reads the attribute {name!r:.50} of {kind!r:.50}, which is not allowed in DCP's metadata"
        )
    member: Enum = kind.__members__[name]
    return member


def read_metadata(folder: PathLike) -> Metadata:
    """Read the DCP metadata of a folder without running code.

    Raises:
        pickle.UnpicklingError: the file contains other classes; a damaged file may raise other errors, too.
    """
    with storage.opened(storage.inside(folder, METADATA)) as file:
        found = _MetadataUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it contains a {type(found).__name__}")
    return found


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the metadata of all tensors by name.

    Other entries are omitted, because reading their values would unpickle objects.
    """
    found = metadata.state_dict_metadata.items()
    return {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}


def files_of(metadata: Metadata) -> dict[str, list[str]]:
    """Map each tensor's name to the files that contain its parts."""
    found: dict[str, set[str]] = {}
    for index, place in metadata.storage_data.items():
        found.setdefault(index.fqn, set()).add(place.relative_path)
    return {name: sorted(files) for name, files in found.items()}


def read(folder: PathLike, metadata: Metadata, into: Mapping[str, Tensor]) -> None:
    """Read from DCP files into the given tensors, or into this rank's parts of DTensors. Not a collective.

    Args:
        folder: the folder with DCP's files.
        metadata: metadata of the folder.
        into: destination tensors by name, with the shapes that the files have.
    """
    # torch's own `load` is a collective and reads the metadata again, with pickle
    planner, reader = _ReadPlanner(into, metadata), _Reader(folder)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()


class _ReadPlanner(DefaultLoadPlanner):
    """A DCP load planner whose destinations are this rank's parts of DTensors."""

    def __init__(self, into: Mapping[str, Tensor], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(dict(into), metadata, True)
        self.state_dict = _wrap_misplaced(into)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor into which an item is read; for a `_PlacedPart`, the local tensor, as torch requires."""
        part = self.state_dict[index.fqn]
        return part.to_local() if isinstance(part, _PlacedPart) else super().lookup_tensor(index)


class _Reader(FileSystemReader):
    """A DCP storage reader that unpickles only tensors."""

    def __init__(self, folder: PathLike) -> None:
        super().__init__("")
        self.fs = files = _Files()
        self.path = files.init_path(folder)
