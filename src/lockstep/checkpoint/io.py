"""Classes with which a Trainer writes, reads and removes checkpoints, synchronously or in the background.

On top of it, the writer of a run's checkpoints, which reports each checkpoint when it is complete.
"""

from __future__ import annotations

import copy
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import format, storage
from lockstep.checkpoint.storage import PathLike
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.transfer import ReusedCopies

# -- copies that the run cannot change -----------------------------------------------------------------------


_PLAIN = (Tensor, torch.nn.Parameter)


def snapshot(checkpoint: dict[str, Any], memory: ReusedCopies | None = None) -> dict[str, Any]:
    """Copy a checkpoint to the CPU, so that the run can continue while the copy is written.

    Tensors that share memory in the checkpoint share it in the copy (tied weights, views), so that files do not grow.
    Tensors inside objects of other classes stay on their devices.

    Args:
        checkpoint: the checkpoint to copy.
        memory: memory for the copies, which is reused; None: new memory.
    """
    memory = ReusedCopies() if memory is None else memory
    # deepcopy's memo: it copies the containers, and takes the tensors from here
    copies: dict[int, Any] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    waiting: list[object] = [checkpoint]
    seen = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            if id(value) not in copies:
                if _is_plain(value):
                    copies[id(value)] = _copied(value, storages, memory)
                elif not value.is_leaf:  # deepcopy refuses those
                    copies[id(value)] = copy.deepcopy(value.detach())
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    # only now: all transfers from the device run together
    memory.arrive()
    return copy.deepcopy(checkpoint, copies)


def _is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor can be copied as bytes: strided, not quantized, without Python attributes."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


def _copied(tensor: Tensor, storages: dict[int, torch.UntypedStorage], memory: ReusedCopies) -> Tensor:
    source: Any = tensor.untyped_storage()  # torch leaves the types of its methods out
    if source._cdata not in storages:
        # to the CPU: a second copy of model and optimizer may be more than a GPU holds
        storages[source._cdata] = memory.of(source)
    copied = torch.empty(0, dtype=tensor.dtype)
    copied.set_(storages[source._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())
    if type(tensor) is torch.nn.Parameter:
        return torch.nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


# -- the interface -------------------------------------------------------------------------------------------


class CheckpointIO(ABC):
    """Base class for writing, reading and removing checkpoints; pass an instance to ``Trainer(plugins=...)``.

    The Trainer calls :meth:`load_checkpoint` on every rank if a call starts from a checkpoint;
    :meth:`save_checkpoint` and :meth:`remove_checkpoint` on rank 0, any number of times; and :meth:`teardown` on
    every rank at the end of a call that has saved or loaded. The same object is used by later calls. An error on
    rank 0 is raised on every rank.

    Attributes:
        writes_later: :meth:`save_checkpoint` may return before the checkpoint is complete.
        writes_shards: :meth:`save_checkpoint` can run on every rank under one path, each with its part of a model
            that no rank holds completely; :meth:`load_checkpoint` returns each rank's part.

    Example::

        class Encrypted(TorchCheckpointIO):
            def save_checkpoint(self, checkpoint, path, storage_options=None):
                super().save_checkpoint({**checkpoint, "state_dict": encrypt(checkpoint["state_dict"])}, path)

        Trainer(plugins=[Encrypted()])
    """

    writes_later = False
    writes_shards = False

    @abstractmethod
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: storage.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: the state of the run. Its tensors are the run's own, which the next step changes.
            path: destination. An earlier checkpoint there should stay intact until the new one is complete.
            storage_options: as in ``trainer.save_checkpoint``.
        """

    @abstractmethod
    def load_checkpoint(
        self, path: storage.PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            path: a path that :meth:`save_checkpoint` has written.
            map_location: device of its tensors, as in ``torch.load``; the Trainer passes the CPU.
            weights_only: as in the user's call, such as ``trainer.fit``; not passed if the user has not set it.

        Returns:
            the dict that was saved.
        """

    @abstractmethod
    def remove_checkpoint(self, path: storage.PathLike) -> None:
        """Delete a checkpoint, or a link to one; do nothing if it does not exist.

        Args:
            path: a path that :meth:`save_checkpoint` has written.
        """

    def then(self, action: Callable[[], Any]) -> None:
        """Run an action once all earlier saves are complete.

        A class that writes in :meth:`save_checkpoint` itself runs it immediately.
        """
        action()

    def wait(self) -> None:  # noqa: B027, optional
        """Wait until all earlier saves are complete."""

    def teardown(self) -> None:  # noqa: B027, optional
        """Complete pending work and release resources; :meth:`save_checkpoint` may be called again later."""


class TorchCheckpointIO(CheckpointIO):
    """CheckpointIO that atomically writes one torch file, locally or at a URL. The file has a hash and no pickled code.

    Example::

        checkpoint = TorchCheckpointIO().load_checkpoint("checkpoints/last.ckpt")
        print(checkpoint["epoch"], list(checkpoint["state_dict"])[:3])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: storage.PathLike, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint to a file.

        Raises:
            TypeError: ``storage_options`` are given, which this class does not support.
            MisconfigurationException: ``torch.load(weights_only=True)`` could not read a value in the checkpoint.
            OSError: the file could not be written; the earlier one is intact.
        """
        self._check_options(storage_options)
        format.save(checkpoint, path)

    def _check_options(self, storage_options: object) -> None:
        if storage_options is not None:
            raise TypeError(
                f"save_checkpoint(storage_options={storage_options!r:.100}): {type(self).__name__} takes no "
                "storage options. Omit them, or pass a CheckpointIO that supports them to Trainer(plugins=...)."
            )

    def load_checkpoint(
        self, path: storage.PathLike, map_location: Any | None = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a complete checkpoint: a file from lockstep or Lightning 2.x, or a folder that ranks wrote in parts.

        Returns:
            the dict that was saved.

        Raises:
            CorruptCheckpoint: the file is truncated or altered, or is not a checkpoint.
            MisconfigurationException: the file contains objects of other classes, which need ``weights_only=False``.
            FileNotFoundError: the checkpoint does not exist.
        """
        from lockstep.checkpoint import sharded  # it reads files, too; a run that loads none does without

        return sharded.load(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: storage.PathLike) -> None:
        """Delete a file, a link or a folder of parts; do nothing if it does not exist.

        Args:
            path: path or URL.
        """
        storage.remove(path)


# -- asynchronous writing ------------------------------------------------------------------------------------


COPIES = 2
"""Maximum number of checkpoints in memory: one that is being written, one that waits."""


class AsyncCheckpointIO(CheckpointIO):
    """A CheckpointIO that writes in a background thread, using another CheckpointIO.

    Training waits only while the run's state is copied to the CPU.

    Files are written, linked and removed one after the other, in the order of the calls: a checkpoint is removed when
    the one that replaces it is complete. A third checkpoint waits until the first of two is written, so that a slow
    disk costs time, not memory. The thread lives while there is something to write; the process does not end earlier.

    The Trainer waits for it at the end of a call (and at once after a save outside its calls), so that
    ``ckpt_path="best"`` and ``"last"`` find what the fit has saved. A failed write is raised once, by the next
    save or load, or else by :meth:`teardown`; files that were to be removed after it are kept.

    Within a call, in a hook for example, a path may be known before its file exists. Rank 0, which writes, can read it
    by :meth:`load_checkpoint`, which waits. The copies are on the CPU, and so are the tensors in the file.

    Args:
        checkpoint_io: the CheckpointIO that writes; default :class:`~lockstep.checkpoint.io.TorchCheckpointIO`.

    Example::

        trainer = Trainer(plugins=[AsyncCheckpointIO()], callbacks=[ModelCheckpoint(every_n_train_steps=500)])
    """

    writes_later = True

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = TorchCheckpointIO() if checkpoint_io is None else checkpoint_io
        self._set_up()

    def _set_up(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[Callable[[], Any], bool]] = deque()  # (action, is a save)
        self._thread: threading.Thread | None = None
        self._is_working = False
        self._error: BaseException | None = None
        self._memory = ReusedCopies()

    # -- the interface that the Trainer calls --------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any | None = None) -> None:
        """Copy a checkpoint to the CPU, and write the copy in the background.

        Raises:
            Exception: an earlier checkpoint could not be written; the new one is not started.
        """
        with self._changed:
            self._changed.wait_for(lambda: sum(is_save for _, is_save in self._queue) < COPIES)
        self._raise_error()
        copied = snapshot(checkpoint, self._memory)
        write = partial(self.checkpoint_io.save_checkpoint, copied, path, storage_options=storage_options)
        self._write_later(write, path)

    def _write_later(self, write: Callable[[], Any], path: PathLike) -> None:
        def explained() -> None:
            try:
                write()
            except BaseException as error:  # it is raised in a later call, which has nothing to do with this path
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    error.add_note(f"{type(self).__name__} failed to write {str(path)!r} in the background.")
                raise

        self._append(explained, is_save=True)

    def load_checkpoint(
        self, path: PathLike, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, after all scheduled writes are complete.

        Args:
            path, map_location, weights_only: as for the CheckpointIO that writes.

        Returns:
            the dict that was saved.

        Raises:
            Exception: an earlier checkpoint could not be written.
        """
        self.wait()
        if weights_only is None:
            return self.checkpoint_io.load_checkpoint(path, map_location=map_location)
        return self.checkpoint_io.load_checkpoint(path, map_location=map_location, weights_only=weights_only)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a checkpoint, after all earlier saves are complete.

        Args:
            path: path or URL.
        """
        self.then(partial(self.checkpoint_io.remove_checkpoint, path))

    def then(self, action: Callable[[], Any]) -> None:
        """Run an action after all earlier saves are complete.

        If one of the saves has failed, the action does not run.
        """
        self._append(partial(self.checkpoint_io.then, action), is_save=False)

    def wait(self) -> None:
        """Wait until all scheduled writes are complete.

        Raises:
            Exception: a write failed.
        """
        self._wait()
        self._raise_error()

    def teardown(self) -> None:
        """Wait until all scheduled writes are complete, and release the memory of the copies.

        Raises:
            Exception: a write failed.
        """
        self._wait()
        self._memory = ReusedCopies()
        try:
            self._raise_error()
        finally:
            self.checkpoint_io.teardown()

    # -- the thread ----------------------------------------------------------------------------------------

    def _append(self, action: Callable[[], Any], is_save: bool) -> None:
        with self._changed:
            # a removal makes room for a checkpoint that does not exist then
            if self._error is not None and not is_save:
                return
            if is_save and not self._is_working:
                # not a daemon: the process ends when the file is complete
                self._thread = threading.Thread(target=self._work, name="lockstep-checkpoint")
                self._thread.start()
                self._is_working = True
            if self._is_working:
                self._queue.append((action, is_save))
                return
        action()  # nothing is being written: no thread is needed

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._is_working = False
                    return
                action = self._queue[0][0]
            failed = None
            try:
                action()
            except BaseException as error:  # raised later, where the Trainer can handle it
                failed = error
            del action  # it holds the copy of the checkpoint
            with self._changed:
                self._queue.popleft()  # only now: `save_checkpoint` counts a save that is under way
                if failed is not None:
                    self._error = self._error or failed
                    # remove and link nothing in favour of a checkpoint that does not exist
                    self._queue = deque(entry for entry in self._queue if entry[1])
                self._changed.notify_all()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __getstate__(self) -> dict[str, Any]:
        own = ("_changed", "_queue", "_thread", "_is_working", "_error", "_memory")  # of one process
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_up()


# -- the checkpoints of a run ---------------------------------------------------------------------------------


Path = str | os.PathLike[str]


class CheckpointWriter:
    """Wrapper around the Trainer's CheckpointIO that also records which checkpoints this run has saved.

    Args:
        default_io: the CheckpointIO to use if the user passes none.

    Attributes:
        before_touching: called before a write or removal; raises if a newer attempt at the run exists.
        after_saving: called with the path of each complete checkpoint that a fit can resume from.
    """

    def __init__(self, default_io: CheckpointIO | None = None) -> None:
        self.before_touching: Callable[[], object] | None = None
        self.after_saving: Callable[[str], object] | None = None
        self._default_io = TorchCheckpointIO() if default_io is None else default_io
        self._given_io: CheckpointIO | None = None
        self._is_open = False
        self._saved: set[str] = set()

    @property
    def io(self) -> CheckpointIO:
        """The CheckpointIO that writes and reads files. Set this property before a call of the Trainer."""
        return self._default_io if self._given_io is None else self._given_io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        self._given_io = io

    def save(
        self, checkpoint: dict[str, Any], path: Path, storage_options: object = None, *, sharded: bool = False
    ) -> None:
        """Write a checkpoint. Call this on rank 0 alone, or on all ranks if ``sharded``.

        Args:
            checkpoint: the state of the run, or this rank's part of the state.
            path: path of the checkpoint, the same on all ranks.
            storage_options: options of the CheckpointIO.
            sharded: all ranks write, each its part.

        Raises:
            MisconfigurationException: ``sharded``, but the CheckpointIO cannot write parts.
        """
        if sharded and not getattr(self.io, "writes_shards", False):
            raise MisconfigurationException(
                f"{type(self.io).__name__} writes complete checkpoints, but each rank has only a part of the model. "
                "Remove it (async_save=True of the strategy writes in the background), or save one file "
                '(FSDPStrategy(state_dict_type="full"), DeepSpeedStrategy(checkpoint_format="full")), or pass a '
                "CheckpointIO with `writes_shards = True`, whose `save_checkpoint` runs on every rank."
            )
        self._is_open = True
        if self.before_touching is not None:
            self.before_touching()
        self.io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        # its file may not exist yet, or be in a place that only the user's CheckpointIO can look up
        if self._given_io is not None or self.io.writes_later:
            self._saved.add(str(path))
        # weights alone are nothing to resume from
        if self.after_saving is not None and "optimizer_states" in checkpoint:
            self.io.then(partial(self.after_saving, str(path)))

    def load(self, path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint to the CPU."""
        self._is_open = True
        if weights_only is None:  # an older CheckpointIO does not accept it
            return self.io.load_checkpoint(path, map_location="cpu")
        return self.io.load_checkpoint(path, map_location="cpu", weights_only=weights_only)

    def remove(self, path: Path) -> None:
        """Delete a checkpoint."""
        self._saved.discard(str(path))
        if self.before_touching is not None:
            self.before_touching()
        self.io.remove_checkpoint(path)

    def has(self, path: Path) -> bool:
        """Return True if `path` exists, or if this run has saved a checkpoint there, possibly still incomplete."""
        return str(path) in self._saved or storage.exists(path)

    def close(self) -> None:
        """Call the CheckpointIO's ``teardown``, if the CheckpointIO was used."""
        if self._is_open:
            self._is_open = False
            self.io.teardown()
