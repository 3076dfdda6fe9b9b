"""Checkpoints in parts: folders in DCP's format to which each rank writes its part, with an index and hashes.

The folder contains

    ``__R_0.distcp``, ``.metadata``   tensors of module and optimizers, in the format of `torch.distributed.checkpoint`
    ``meta.pt``                       the rest of the checkpoint's dict (Lightning's name)
    ``rank_R.pt``                     state of rank R alone: random states, data position, accumulated gradients
    ``index.json``                    size and SHA-256 of every file, shape and dtype of every tensor

so that `torch.distributed.checkpoint.load({"model": module.state_dict()}, checkpoint_id=folder)` reads the weights.
At a URL, where no folder can be renamed, all files but the index are in an inner folder, whose name the index has.
A tensor of the state dict is called ``model.NAME``, one of an optimizer ``optimizer_I.state.NUMBER.NAME``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from lockstep.checkpoint import damage, format, storage
from lockstep.checkpoint.storage import INDEX, PathLike
from lockstep.ground import comm
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException, RankFailed
from lockstep.ground.extensions import load as load_extension

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

    from lockstep.checkpoint.dcp import Digest, Planner

VERSION = 1
"""Version of the folder's layout, in the index."""
META = "meta.pt"
METADATA = ".metadata"
OWN = format.KEY
STRUCTURE = "structure"
"""Key in lockstep's part of ``meta.pt`` with the dicts that contained the tensors of module and optimizers."""
MARK = "lockstep tensor"
"""Key of the dict ``{MARK: name}`` that replaces a tensor in ``meta.pt``."""
WAY_OUT = "Resume from an earlier checkpoint, or copy the folder again."

Place = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Function that creates the destination for a tensor, or for this rank's part, from its name, shape and dtype."""

T = TypeVar("T")
R = TypeVar("R")

LATEST = "latest"
"""File in a folder written by DeepSpeed's engine; contains the name of the newest checkpoint's subfolder."""


class EngineFolders(Protocol):
    """Interface for reading and writing DeepSpeed's own checkpoint folders, implemented by the DeepSpeed extension."""

    def read(self, path: PathLike, place: Place | None, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint at ``path``, in the form that a single process writes."""

    def write(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Write a checkpoint to ``folder``, in the form that DeepSpeed's engine writes on one rank."""


def is_engines(path: PathLike) -> bool:
    """Return True if `path` is a local folder that DeepSpeed's engine has written."""
    return not storage.is_remote(path) and (storage.local(path) / LATEST).is_file()


def engine_folders() -> EngineFolders:
    """Import and return the reader and writer of DeepSpeed's own checkpoint folders.

    Raises:
        MissingExtension: the extension has been deleted.
    """
    found: EngineFolders = load_extension("services", "folders of DeepSpeed's engine")
    return found


def is_sharded(path: PathLike | IO[bytes]) -> bool:
    """Return True if `path` is a checkpoint folder of lockstep, Lightning or DeepSpeed, whether intact or damaged."""
    if not isinstance(path, (str, os.PathLike)) or storage.is_file(path):
        return False
    return any(storage.is_file(storage.inside(path, name)) for name in (INDEX, METADATA, LATEST))


# -- from a dict to parts, and back --------------------------------------------------------------------------


@dataclass
class FolderParts:
    """A checkpoint's dict, divided into the parts that different files store.

    Attributes:
        tensors: nested dicts of tensors, by name.
        meta: the dict without these tensors.
        ranks: rank-specific state, for each rank whose file this process writes; empty for weights alone.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)


def split(checkpoint: Mapping[str, Any], rank: int | None = None) -> FolderParts:
    """Divide a checkpoint's dict into the parts that different files store; tensors are not copied.

    Tensors in the states of the module and the optimizers are stored separately, and DTensors anywhere.

    Args:
        checkpoint: a dict from `lockstep.loop.state.collect`, or a checkpoint that was read.
        rank: the rank of this process; None: one process writes the parts of all ranks.
    """
    parts = FolderParts()
    structure, rest = {}, {}
    # Only where tensors are many and large is each stored by its name; others stay in the pickled rest.
    for key, value in checkpoint.items():
        if key == "state_dict":
            structure[key] = _move_tensors(value, ("model",), parts.tensors, whole=True)
        elif key == "optimizer_states":
            structure[key] = [_optimizer(state, number, parts.tensors) for number, state in enumerate(value)]
        else:
            rest[key] = value
    own = dict(rest.get(OWN, {}))
    if "ranks" in own:
        each = own["ranks"]
        parts.ranks = dict(enumerate(each)) if rank is None else {rank: each[rank]}
        own["ranks"] = len(each)
    rest[OWN] = own
    rest = _move_tensors(rest, ("other",), parts.tensors, whole=False)
    parts.meta = {**rest, OWN: {**rest[OWN], STRUCTURE: structure}}
    return parts


def _optimizer(state: Any, number: int, tensors: dict[str, Any]) -> Any:
    """Move the tensors of an optimizer's state dict to `tensors`. Return the dict with placeholders in their place."""
    if not isinstance(state, dict):
        return state
    each = _move_tensors(state.get("state", {}), (f"optimizer_{number}", "state"), tensors, whole=True)
    return {**state, "state": each} if "state" in state else state


def _move_tensors(
    value: Any, path: tuple[str, ...], tensors: dict[str, Any], whole: bool, inside: tuple[int, ...] = ()
) -> Any:
    """Move the tensors of a nested value to the dict `tensors`.

    In the returned value, each moved tensor is replaced by a placeholder with the tensor's name.

    Args:
        value: a tree of dicts, lists and tuples; derived classes are left unchanged.
        path: path to the value, which becomes part of the tensors' names.
        tensors: nested dicts that receive the tensors.
        whole: also move tensors that are not DTensors.
        inside: ids of enclosing containers, to stop if a container contains itself.
    """
    if isinstance(value, Tensor):
        if not (whole or hasattr(value, "to_local")):
            return value
        inner = tensors
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
        return {MARK: ".".join(path)}
    if type(value) not in (dict, OrderedDict, list, tuple) or id(value) in inside:
        return value
    entries = list(value.items() if isinstance(value, dict) else enumerate(value))
    deeper = (*inside, id(value))
    made = [_move_tensors(item, (*path, str(key)), tensors, whole, deeper) for key, item in entries]
    if all(new is item for new, (_, item) in zip(made, entries, strict=True)):
        return value
    if not isinstance(value, dict):
        return type(value)(made)
    return {**{key: new for new, (key, _) in zip(made, entries, strict=True)}, **_versions(value)}


VERSIONS = "lockstep versions"
"""Key for the version numbers of modules, which torch keeps as an attribute of a state dict."""


def _versions(value: dict[Any, Any]) -> dict[str, Any]:
    found = getattr(value, "_metadata", None)
    return {} if found is None else {VERSIONS: {name: dict(entry) for name, entry in found.items()}}


def join(meta: Mapping[str, Any], tensors: Mapping[str, Tensor], ranks: list[Any] | None) -> dict[str, Any]:
    """Assemble a checkpoint's dict from its parts, as the inverse of `split`."""
    own = dict(meta.get(OWN, {}))
    structure = own.pop(STRUCTURE, None)
    if ranks is not None:
        own["ranks"] = ranks
    checkpoint: dict[str, Any] = _put_back({**meta, OWN: own}, tensors)
    if structure is None:  # not written by lockstep
        weights = {name[len("model.") :]: value for name, value in tensors.items() if name.startswith("model.")}
        return {**checkpoint, "state_dict": weights}
    return {**checkpoint, **_put_back(structure, tensors)}


def _put_back(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and MARK in value:
            return tensors[value[MARK]]
        made: Any = {key: _put_back(item, tensors) for key, item in value.items() if key != VERSIONS}
        if VERSIONS in value:
            made = OrderedDict(made)
            made._metadata = OrderedDict(value[VERSIONS])
        return made
    if type(value) in (list, tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


# -- the index -----------------------------------------------------------------------------------------------


@dataclass
class Index:
    """The content of a checkpoint folder's ``index.json``.

    Attributes:
        files: size and hash of each file as it was written, by name.
        tensors: shape, dtype and the names of the files of each tensor, by name.
        about: the writing strategy and world size, epoch and step.
    """

    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> bytes:
        """Return the index as JSON, with one line per file and tensor, and a hash of the content at its end."""
        content: dict[str, Any] = {"format": "lockstep checkpoint in parts", "version": VERSION, **asdict(self)}
        lines = []
        for key, value in {**content, "sha256": _hash_of(content)}.items():
            inner = (
                ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
                if (isinstance(value, dict))
                else ""
            )
            lines.append(f"{json.dumps(key)}: " + (f"{{\n{inner}\n }}" if inner else json.dumps(value)))
        return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()

    @classmethod
    def read(cls, folder: PathLike) -> Index:
        """Read the index of a folder.

        Raises:
            CorruptCheckpoint: the index is missing or damaged, or was written by a later version of lockstep.
        """
        name = storage.inside(folder, INDEX)
        try:
            with storage.opened(name) as file:
                content: dict[str, Any] = json.loads(file.read())
            known = content.pop("sha256")
        except FileNotFoundError:
            raise CorruptCheckpoint(f"The checkpoint {os.fspath(folder)!r} lacks the file {INDEX}. {WAY_OUT}") from None
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CorruptCheckpoint(f"{name!r} is damaged ({damage.first_line(error)}). {WAY_OUT}") from error
        if known != _hash_of(content):
            raise CorruptCheckpoint(
                f"{name!r} has changed since it was written (its content does not match its hash). {WAY_OUT}"
            )
        if content.get("version") != VERSION:
            raise CorruptCheckpoint(
                f"{name!r} has format version {content.get('version')!r}, but this lockstep reads version {VERSION}. "
                "Load the checkpoint with the lockstep release that saved it."
            )
        try:
            damage.check_index(content)
        except ValueError as error:
            raise CorruptCheckpoint(f"{name!r} is malformed: {error}. {WAY_OUT}") from None
        return cls(content["files"], content["tensors"], content["about"])

    def within(self, folder: PathLike) -> str:
        """Return the path of the folder that contains DCP's files: `folder`, or a subfolder of it if it is a URL."""
        prefix = next((os.path.dirname(name) for name in self.files if os.path.basename(name) == METADATA), "")
        return storage.inside(folder, prefix) if prefix else os.fspath(folder)


def _hash_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_files(folder: PathLike, index: Index, names: list[str] | None = None) -> None:
    """Raise an error if a file of the folder differs in size or hash from its entry in the index.

    Args:
        folder: the folder.
        index: the folder's index.
        names: names of the files whose hashes are checked; None: all.

    Raises:
        CorruptCheckpoint: a file differs; the message names it.
    """
    sizes = storage.sizes(folder)
    # sizes first: they cost nothing, and most damage is a file that is missing or cut short
    for name, known in index.files.items():
        size = sizes.get(name)
        if size is None:
            raise CorruptCheckpoint(f"The checkpoint {os.fspath(folder)!r} lacks the file {name}. {WAY_OUT}")
        if size != known["bytes"]:
            raise CorruptCheckpoint(
                f"{storage.inside(folder, name)!r} is {'truncated' if size < known['bytes'] else 'too long'}. It has "
                f"{size} bytes instead of {known['bytes']}. {WAY_OUT}"
            )
    for name in index.files if names is None else names:
        file = storage.inside(folder, name)
        if sha256_of(file) != index.files[name]["sha256"]:
            raise CorruptCheckpoint(
                f"{file!r} has changed since it was written (its bytes do not match the hash in {INDEX}). {WAY_OUT}"
            )


def sha256_of(path: PathLike) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with storage.opened(path) as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _files_to_check(files: Mapping[str, dict[str, Any]], rank: int, world: int) -> list[str]:
    """Return the names of the files that a rank hashes. All files' bytes are divided about evenly over the ranks."""
    loads, mine = [0] * world, []
    # with the name as a second key every rank has the same order, and so the same shares
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = loads.index(min(loads))
        loads[least] += files[name]["bytes"]
        if least == rank:
            mine.append(name)
    return mine


# -- writing -------------------------------------------------------------------------------------------------


class OnRank(RankFailed):
    """Error that a rank raises because another rank has failed."""


def together(act: Callable[[], T], conclude: Callable[[list[T]], list[R]], group: comm.Group = None) -> R:
    """Call `act` on each rank, then `conclude` on rank 0; return the value that it computes for this rank. Collective.

    Args:
        act: called on each rank.
        conclude: called on rank 0 with the results of all ranks; returns a list with a value for each rank.
        group: process group of the ranks.

    Returns:
        this rank's value from `conclude`.

    Raises:
        Exception: the error of this rank.
        OnRank: another rank failed.
    """
    error: Exception | None = None
    given: T | None = None
    try:
        given = act()
    except Exception as failed:
        error = failed  # kept: a rank that raised here would leave the others waiting in the next collective
    all_given = comm.gather_objects((given, None if error is None else damage.first_line(error)), group)
    answers: list[tuple[R | None, str | None]] = []
    if comm.rank(group) == 0:
        errors = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(all_given) if text is not None]
        try:
            if not errors:
                answers = [(answer, None) for answer in conclude([each for each, _ in all_given])]
        except Exception as failed:
            error, errors = failed, [f"rank 0: {damage.first_line(failed)}"]
        if errors:
            answers = [(None, errors[0])] * comm.world_size(group)
    answer, text = comm.scatter_objects(answers, group)
    if error is not None:
        raise error
    if text is not None:
        raise OnRank(text)
    return cast("R", answer)


def plan(parts: FolderParts, rank: int) -> Planner:
    """Return the DCP planner for `write`, with references to this rank's values."""
    from lockstep.checkpoint.dcp import Planner  # late: torch's part takes 0.7 s to import

    return Planner(parts.tensors, rank == 0)


def write(parts: FolderParts, planner: Planner, path: PathLike, group: comm.Group = None) -> None:
    """Write a checkpoint folder atomically, with each rank's part. Collective.

    Args:
        parts: this rank's parts; only names and shapes of its tensors are used.
        planner: planner with the values.
        path: a folder or URL that all ranks can access; an earlier checkpoint there stays until this one is complete.
        group: process group for the coordination of the ranks.

    Raises:
        MisconfigurationException: the checkpoint contains something that cannot be saved.
        OSError: the folder cannot be written.
        OnRank: another rank failed.
    """
    from lockstep.checkpoint import dcp

    writing = _Writing(parts, planner, path, comm.rank(group))
    try:
        folder, mine = together(writing.prepare, writing.begin, group)
        with dcp.without_crc32():
            together(lambda: writing.put(folder, mine), writing.finish, group)
    except OnRank as error:
        raise OnRank(f"the checkpoint {os.fspath(path)!r} could not be written: {error}") from None
    finally:
        if writing.folder is not None:
            writing.folder.discard()


def write_by(save: Callable[[Path], None], about: dict[str, Any], path: PathLike, group: comm.Group = None) -> None:
    """Write a folder with the function `save`, completely or not at all, and add an index of its files. Collective.

    Args:
        save: writes into the folder, on all ranks.
        about: what the index records about the writer; see `Index`.
        path: as in `write`, but a URL is refused; errors as in `write`.
        group: as in `write`.
    """
    made: list[storage.NewFolder] = []
    rank, world = comm.rank(group), comm.world_size(group)

    def begin(_: object) -> list[str]:
        made.append(storage.NewFolder(path))
        return [str(made[0].path)] * world

    def digests(folder: Path) -> dict[str, dict[str, Any]]:
        sizes = {
            str(file.relative_to(folder)): {"bytes": file.stat().st_size}
            for file in folder.rglob("*")
            if file.is_file()
        }
        found = {}
        for name in _files_to_check(sizes, rank, world):
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())  # the engine does not sync, and the folder is to survive a power loss
            found[name] = {**sizes[name], "sha256": sha256_of(folder / name)}
        return found

    def finish(each: list[dict[str, dict[str, Any]]]) -> list[None]:
        files = {name: entry for found in each for name, entry in found.items()}
        made[0].commit(Index(dict(sorted(files.items())), {}, about).dump())
        return [None] * world

    def check() -> None:
        if storage.is_remote(path):
            raise MisconfigurationException(
                f'{os.fspath(path)!r}: DeepSpeedStrategy(checkpoint_format="deepspeed") cannot save to a URL. Save '
                'to a folder that all ranks can access, or choose checkpoint_format="sharded" or "full".'
            )

    try:
        folder = Path(together(check, begin, group))

        def put() -> None:
            with storage.written_by_torch(folder):
                save(folder)

        together(put, lambda given: [None] * world, group)
        together(lambda: digests(folder), finish, group)
    except OnRank as error:
        raise OnRank(f"the checkpoint {os.fspath(path)!r} could not be written: {error}") from None
    finally:
        for each in made:
            each.discard()


class _Writing:
    """Steps of one call of `write`, as methods in the order in which they run."""

    def __init__(self, parts: FolderParts, planner: Planner, path: PathLike, rank: int) -> None:
        self.parts, self.planner, self.path, self.rank = parts, planner, path, rank
        self.folder: storage.NewFolder | storage.NewRemoteFolder | None = None

    def prepare(self) -> Any:
        """On each rank, check that all values can be read back, and return this rank's plan."""
        if self.rank == 0:
            self.parts.meta = format.with_version(self.parts.meta)
        self.parts.ranks = {rank: format.with_version(part) for rank, part in self.parts.ranks.items()}
        return self.planner.create_local_plan()

    def begin(self, plans: list[Any]) -> list[tuple[str, Any]]:
        """On rank 0, create the folder, and return its path and the final plan for each rank."""
        from lockstep.checkpoint.dcp import Writer

        plans, self.metadata = self.planner.create_global_plan(plans)
        self.folder = storage.new_folder(self.path)
        self.writer = Writer(self.folder.path)
        return [(str(self.folder.path), each) for each in self.writer.prepare_global_plan(plans)]

    def put(self, folder: str, mine: Any) -> tuple[Any, dict[str, Digest]]:
        """On each rank, write this rank's tensors and state."""
        from lockstep.checkpoint.dcp import Writer

        if not storage.is_remote(folder) and not storage.exists(folder):
            raise FileNotFoundError(
                errno.ENOENT,
                f"rank 0 has created {folder!r}, which does not exist on this node. Save to a folder that all "
                "nodes share",
            )
        writer = Writer(folder)
        written = writer.write_data(self.planner.finish_plan(mine), self.planner)
        written.wait()
        for rank, part in self.parts.ranks.items():
            self._write(storage.inside(folder, f"rank_{rank}.pt"), part, writer.digests)
        return written.value(), writer.digests

    @staticmethod
    def _write(path: str, content: dict[str, Any], digests: dict[str, Digest]) -> None:
        from lockstep.checkpoint.dcp import HashedFile

        with HashedFile(path) as file:
            format.write(content, cast("IO[bytes]", file))
        digests[os.path.basename(path)] = file.digest()

    def finish(self, results: list[tuple[Any, dict[str, Digest]]]) -> list[None]:
        """On rank 0, write the metadata and the index, and rename the folder to its final name."""
        from lockstep.checkpoint import dcp

        assert self.folder is not None
        digests = self.writer.digests
        for _, each in results:
            digests.update(each)
        all_written = [written for written, _ in results]
        # torch sets it in the metadata that it writes, which is a copy before torch 2.12
        self.metadata.storage_data = {each.index: each.storage_data for written in all_written for each in written}
        self.writer.finish(self.metadata, all_written)
        self._write(storage.inside(self.folder.path, META), self.parts.meta, digests)
        lies_in, prefix = dcp.files_of(self.metadata), self.folder.prefix
        tensors = {
            name: {
                "shape": list(entry.size),
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "files": [prefix + file for file in lies_in[name]],
            }
            for name, entry in dcp.tensors_in(self.metadata).items()
        }
        meta = self.parts.meta
        about = {**meta[OWN].get("writer", {}), "epoch": meta.get("epoch"), "global_step": meta.get("global_step")}
        index = Index({prefix + name: asdict(digests[name]) for name in sorted(digests)}, tensors, about)
        if storage.is_remote(self.path):
            # The URL may mean another place on each node, or another run may have removed files. The index, which makes
            # the checkpoint whole, must not be written then.
            sizes = storage.sizes(self.path)
            for name, known in index.files.items():
                size = sizes.get(name, 0)
                if size != known["bytes"]:
                    raise OSError(
                        errno.EIO,
                        f"rank 0 finds only {size} of the {known['bytes']} bytes that were written to "
                        f"{storage.inside(self.path, name)!r}. Save to a URL that is the same storage on all ranks, "
                        "and to which no other run writes",
                    )
        self.folder.commit(index.dump())
        return [None] * len(results)


# -- reading -------------------------------------------------------------------------------------------------


def load(
    path: PathLike | IO[bytes], map_location: MAP_LOCATION = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a complete checkpoint from lockstep or Lightning 2.x: a file, or a folder of parts.

    Args:
        path: a file or a folder, or its URL, or an open file.
        map_location: device of its tensors, as in ``torch.load``. Tensors of a folder are on the CPU unless it is a
            device.
        weights_only: as in `lockstep.checkpoint.format.load`; the tensors of a folder cannot contain code.

    Raises:
        CorruptCheckpoint: the checkpoint is truncated or altered, or is no checkpoint.
        MisconfigurationException: a file contains objects of other classes, which need ``weights_only=False``.
        FileNotFoundError: the checkpoint does not exist.
    """
    if not is_sharded(path):
        return format.load(path, map_location, weights_only)
    with damage.reported_as_damage(path):
        return _load(cast("PathLike", path), map_location, weights_only)


def _load(folder: PathLike, map_location: MAP_LOCATION, weights_only: bool | None) -> dict[str, Any]:
    """Read a complete checkpoint from a folder of parts."""
    index = _read_checked_index(folder)
    if is_engines(folder):
        return engine_folders().read(folder, None, weights_only)
    device = map_location if isinstance(map_location, (str, torch.device)) else None

    def place(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    made = _Reading(_within(folder, index), weights_only, map_location)
    tensors = made.tensors(place)
    if device is not None:
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    return made.whole(tensors, range(made.ranks))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike, output_file: PathLike, tag: str | None = None
) -> dict[str, Any]:
    """Convert a checkpoint folder of DeepSpeed, or any folder of parts, to one file. The name is as in Lightning.

    Files of the engine are unpickled, so they must come from a trusted source.

    Args:
        checkpoint_dir: the folder.
        output_file: file to write with `format.save`; it is replaced if it exists.
        tag: tag of the checkpoint in an engine's folder; only the latest can be converted, which is the default.

    Returns:
        The checkpoint: full weights in float32 under ``state_dict``, and the rest of the run.

    Raises:
        MisconfigurationException: the folder is not a checkpoint in parts, or has another tag.
        CorruptCheckpoint: as in `load`.
        OSError: the file cannot be written.

    Example::

        convert_zero_checkpoint_to_fp32_state_dict("checkpoints/last.ckpt", "whole.ckpt")
        model = Net.load_from_checkpoint("whole.ckpt")
    """
    folder = checkpoint_dir
    if not is_sharded(folder):
        raise MisconfigurationException(
            f"convert_zero_checkpoint_to_fp32_state_dict({os.fspath(folder)!r}): the path is not the folder of a "
            "sharded checkpoint. Pass the path to which the checkpoint was saved."
        )
    engines = is_engines(folder)
    latest = (storage.local(folder) / LATEST).read_text().strip() if engines else None
    if tag is not None and tag != latest:
        raise MisconfigurationException(
            f"convert_zero_checkpoint_to_fp32_state_dict(tag={tag!r}): only the latest checkpoint, "
            f"{latest!r}, can be converted. Omit `tag`, or write {tag!r} into the folder's file named 'latest'."
        )
    found = load(folder, "cpu", False if engines else None)
    format.save(found, output_file)
    return found


def outline(path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
    """Check the hashes of a checkpoint. Return the checkpoint, with tensors on the meta device where possible.

    Arguments and errors are those of `load`.
    """
    if not is_sharded(path):
        return format.load(path, "meta")
    with damage.reported_as_damage(path):
        index = _read_checked_index(path)
        if is_engines(path):
            return engine_folders().read(path, None, weights_only)
        made = _Reading(_within(path, index), None, "cpu")
        return made.whole(made.shapes(), range(made.ranks))


Needs: TypeAlias = Callable[[Sequence[int], bool], Sequence[int]]
"""Function that returns the ranks whose own state this rank needs. Its arguments are the replica index of each rank
that saved, and whether these ranks had accumulated gradients."""


def load_parts(path: PathLike, place: Place, needs: Needs, weights_only: bool | None = None) -> dict[str, Any]:
    """Read this rank's share of a checkpoint from a folder of parts. Collective.

    The share is this rank's part of each tensor, and the states of those ranks that ``needs`` returns.

    Each file is hashed by one rank. A damaged file is an error on all ranks.

    Args:
        path: path of the folder.
        place: creates the destination of a tensor; a DTensor if each rank has a part.
        needs: returns the ranks whose own state this rank needs.
        weights_only: as in `load`.

    Returns:
        the checkpoint as from `load`, with tensors from `place`, and only the needed rank-specific states.

    Raises:
        CorruptCheckpoint: the checkpoint is truncated or altered.
    """
    rank, world = comm.rank(), comm.world_size()
    within = os.fspath(path)

    def check() -> None:
        nonlocal within
        index = _index(path)
        if index is not None:
            with damage.reported_as_damage(path):
                check_files(path, index, _files_to_check(index.files, rank, world))
            within = index.within(path)

    try:
        together(check, lambda given: [None] * len(given), None)
    except OnRank as error:
        raise CorruptCheckpoint(str(error)) from None
    with damage.reported_as_damage(path):
        if is_engines(path):
            return engine_folders().read(path, place, weights_only)
        made = _Reading(within, weights_only, "cpu")
        return made.whole(made.tensors(place), needs(made.of_rank, made.had_gradients) if made.ranks else ())


def _index(folder: PathLike) -> Index | None:
    """Read the index of a folder; return None if lockstep has not written the folder."""
    if storage.is_file(storage.inside(folder, INDEX)):
        return Index.read(folder)
    # Lightning writes a `meta.pt` too; only lockstep's has the format in it, and then the index is lost
    meta = storage.inside(folder, META)
    known = format.load(meta, "cpu").get(OWN) if storage.is_file(meta) else None
    return Index.read(folder) if isinstance(known, dict) and "format" in known else None


def _read_checked_index(folder: PathLike) -> Index | None:
    """Read the index of a folder, and raise if a file differs in size or hash from its entry there."""
    index = _index(folder)
    if index is not None:
        check_files(folder, index)
    return index


def _within(folder: PathLike, index: Index | None) -> str:
    return os.fspath(folder) if index is None else index.within(folder)


class _Reading:
    """Reader of a checkpoint folder, used after the folder's files were checked.

    Attributes:
        ranks: number of ranks that have saved their own state.
        of_rank: the replica index of each of these ranks.
        had_gradients: True if these ranks had accumulated gradients.
    """

    def __init__(self, folder: str, weights_only: bool | None, map_location: MAP_LOCATION) -> None:
        from lockstep.checkpoint import dcp

        self.folder, self.map_location = folder, map_location
        try:
            self.metadata = dcp.read_metadata(folder)
        except Exception as error:  # pickle raises errors of many classes for a damaged file
            raise CorruptCheckpoint(
                f"{storage.inside(folder, METADATA)!r} is damaged ({damage.first_line(error)}). {WAY_OUT}"
            ) from error
        meta = storage.inside(folder, META)
        has_meta = storage.is_file(meta)  # else torch.distributed.checkpoint.save was called directly
        self.meta = format.load(meta, map_location, weights_only) if has_meta else {}
        kept = self.meta.get(OWN, {}).get("ranks", 0)
        self.ranks = kept if isinstance(kept, int) else 0
        own = self.meta.get(OWN, {})
        self.of_rank: Sequence[int] = own.get("replicas") or range(self.ranks)
        self.had_gradients = bool(own.get("held", True))
        self._has_ranks = "ranks" in self.meta.get(OWN, {})

    def tensors(self, place: Place) -> dict[str, Tensor]:
        """Read all tensors, each into the destination that `place` creates for it. Return {name: tensor}."""
        from lockstep.checkpoint import dcp

        known = dcp.tensors_in(self.metadata)
        made = {name: place(name, entry.size, entry.properties.dtype) for name, entry in known.items()}
        try:
            dcp.read(self.folder, self.metadata, made)
        except OSError:
            raise
        except Exception as error:  # torch's error for files without a hash
            raise CorruptCheckpoint(
                f"The checkpoint {self.folder!r} is damaged ({damage.first_line(error)}). {WAY_OUT}"
            ) from error
        return made

    def shapes(self) -> dict[str, Tensor]:
        """Return {name: tensor on the meta device} for all tensors."""
        from lockstep.checkpoint import dcp

        known = dcp.tensors_in(self.metadata).items()
        return {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta") for name, entry in known}

    def whole(self, tensors: Mapping[str, Tensor], mine: Any) -> dict[str, Any]:
        """Assemble the checkpoint's dict from ``tensors`` and the rank-specific states of the ranks in ``mine``."""
        ranks: list[Any] = [{} for _ in range(self.ranks)]
        for rank in mine:
            part = format.load(storage.inside(self.folder, f"rank_{rank}.pt"), "cpu")
            part.pop(OWN, None)  # the version, which `format.with_version` has added to each file
            ranks[rank] = part
        try:
            return join(self.meta, tensors, ranks if self._has_ranks else None)
        except KeyError as error:
            raise CorruptCheckpoint(
                f"The checkpoint {self.folder!r} has no tensor {error.args[0]!r}, which {META} lists. {WAY_OUT}"
            ) from error


# -- metadata alone --------------------------------------------------------------------------------------------


def glance(path: PathLike) -> dict[str, Any]:
    """Return a local checkpoint's dict without any checks. Tensors are read from the disk only when accessed.

    For a folder of parts, the dict lacks weights and optimizer states. Return an empty dict at a URL, for a damaged
    file, or for a file that needs ``weights_only=False``.
    """
    if storage.is_remote(path):
        return {}
    name = str(storage.local(path))
    try:
        if storage.is_index_folder(name):
            name = storage.inside(name, META)
        with storage.reading(name) as file:
            damage.check_archive_size(file, name)
        found = torch.load(name, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a later full read of the checkpoint reports what is wrong with it
        return {}
    return found if isinstance(found, dict) else {}


def global_step(path: PathLike) -> int | None:
    """Return the optimizer step in a local checkpoint; None if it is unknown."""
    found = glance(path).get("global_step")
    return found if isinstance(found, int) else None
