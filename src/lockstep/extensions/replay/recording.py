"""Recording of a fit: for each step 64 bits of the gradients and 64 of the weights, in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lockstep.checkpoint import storage
from lockstep.extensions.replay.hashes import TensorHash
from lockstep.extensions.replay.request import ReplayDone
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import replace_until
from lockstep.loop.progress import BATCH_END, VALIDATED

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lockstep.loop.session import Session

FILE = "step-hashes.bin"
ROW = np.dtype([("gradients", "<i8"), ("weights", "<i8")])
MOST_KEPT = 256
"""Rows that stay on a device before they are read, which waits for it."""


def read(run: str | os.PathLike[str], below: bool = False) -> np.ndarray:
    """Return the recording of a run. It is empty if there is none.

    Args:
        run: folder with the recording.
        below: search in its subfolders too, and return the newest recording.

    Returns:
        a structured array (steps,) with the int64 fields "gradients" and "weights", from step 0; both are 0 for a step
        that was not recorded.
    """
    files = sorted(Path(run).glob(f"**/{FILE}" if below else FILE), key=os.path.getmtime)
    data = files[-1].read_bytes() if files else b""
    return np.frombuffer(data[: len(data) - len(data) % ROW.itemsize], ROW)


@contextmanager
def recording(session: Session) -> Iterator[None]:
    """Record the steps of a fit while the ``with`` block runs.

    Args:
        session: session of the fit, after its set-up.

    Raises:
        MisconfigurationException: the strategy does not keep gradients and weights where they can be read, or the
            folder of the run is a URL.
    """
    strategy = session.strategy
    if strategy.steps_itself or strategy.window is not None or strategy.drives_all_devices:
        raise MisconfigurationException(
            f'Trainer(record="hashes") does not work with {type(strategy).__name__}: remove `record`, or use "ddp" or '
            '"fsdp".'
        )
    recorder = Recorder(session)
    with ExitStack() as end:
        replace_until(end, strategy, "step", recorder.around(strategy.step))
        replace_until(end, strategy, "save_checkpoint", recorder.before(strategy.save_checkpoint))
        try:
            yield
        except ReplayDone:
            recorder.write()
            raise
        except BaseException:
            recorder.write(alone=True)
            raise
        else:
            recorder.write()
        finally:
            recorder.close()


class Recorder:
    """Writer of a fit's recording.

    A row is written before the first checkpoint that contains its step, so a resume continues the recording. Rows stay
    on the device until then, or until there are `MOST_KEPT`; on a CPU without shards they are written at once.

    Args:
        session: session of the fit.
    """

    def __init__(self, session: Session) -> None:
        self._strategy = session.strategy
        self._progress = session.fit.progress
        self._is_sharded = session.strategy.cuts_parameters
        self._writes = session.is_global_zero
        self._hashes = TensorHash(session.strategy.world.rank)
        self._rows: list[int] = []
        self._kept: list[Tensor] = []
        self._inside = False
        self._descriptor = -1
        folder = _folder_of(session)
        if self._writes:
            self._descriptor = self._open(folder, session.ckpt_path if session.fit.resume.entry is not None else None)

    def _open(self, folder: str, resumed: str | None) -> int:
        """Open the file with the rows of the steps that are done, and return its descriptor."""
        progress = self._progress
        # the step of a checkpoint at the end of a batch is done, but not counted
        done = progress.windows + (progress.phase in (BATCH_END, VALIDATED))
        folders = [folder] if resumed is None else [os.path.dirname(resumed), folder]
        known = max((read(each)[:done] for each in folders), key=len)
        os.makedirs(folder, exist_ok=True)
        descriptor = os.open(os.path.join(folder, FILE), os.O_RDWR | os.O_CREAT, 0o666)
        os.pwrite(descriptor, known.tobytes(), 0)
        os.ftruncate(descriptor, known.nbytes)
        return descriptor

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of ``strategy.step`` that records gradients and weights."""

        def recorded(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            if self._inside:  # an engine's step that calls `step` again
                return step(optimizer, closure, **options)
            self._inside = True
            parameters = self._strategy.named_parameters()
            try:
                gradients = self._hash_gradients(parameters) if closure is None else None
                result = step(optimizer, closure, **options)
            finally:
                self._inside = False
            # a closure computes the gradients within the step
            gradients = self._hash_gradients(parameters) if gradients is None else gradients
            self._add(gradients, self._hash(parameters))
            return result

        return recorded

    def before(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of ``strategy.save_checkpoint`` that writes the rows first."""

        def saved(checkpoint: Any, path: Any, *args: Any, alone: bool = False, **options: Any) -> Any:
            self.write(alone=alone)
            return save(checkpoint, path, *args, alone=alone, **options)

        return saved

    def _hash_gradients(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return self._hash({name: p.grad for name, p in parameters.items() if p.grad is not None})

    def _hash(self, named: Mapping[str, Tensor]) -> Tensor:
        if not (self._writes or self._is_sharded):  # rank 0 has the same
            return torch.zeros((), dtype=torch.int64)
        return self._hashes(named, self._strategy.root_device)

    def _add(self, gradients: Tensor, weights: Tensor) -> None:
        """Add the hashes of an optimizer step to the row of the running window."""
        number = self._progress.windows
        if self._rows and self._rows[-1] == number:  # several optimizer steps in one window
            gradients = self._kept[-1][0] * 31 + gradients
            del self._rows[-1], self._kept[-1]
        self._rows.append(number)
        self._kept.append(torch.stack((gradients, weights)))
        at_once = not self._is_sharded and self._strategy.root_device.type == "cpu"
        if len(self._rows) > (1 if at_once else MOST_KEPT):
            self.write(keep=1)

    def write(self, keep: int = 0, alone: bool = False) -> None:
        """Write the kept rows to the file. Collective if parameters are sharded.

        Args:
            keep: number of the newest rows to keep.
            alone: True after a failure, without the other ranks: nothing is written if parameters are sharded.
        """
        count = len(self._rows) - keep
        if count <= 0 or (alone and self._is_sharded):
            return
        numbers, rows = self._rows[:count], torch.stack(self._kept[:count]).cpu()
        del self._rows[:count], self._kept[:count]
        if self._is_sharded:
            rows = self._strategy.gather_stacked(rows.flatten()).sum(0).view(rows.shape)
        if not self._writes:
            return
        for number, row in zip(numbers, rows.numpy(), strict=True):
            os.pwrite(self._descriptor, row.astype("<i8").tobytes(), number * ROW.itemsize)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _folder_of(session: Session) -> str:
    """Return the folder of the recording: that of the checkpoints, or else ``default_root_dir``."""
    folders = [getattr(callback, "dirpath", None) for callback in session.checkpoint_callbacks]
    folder = next(filter(None, folders), session.config.default_root_dir)
    if storage.is_remote(folder):
        raise MisconfigurationException(
            f'Trainer(record="hashes"): the folder of the checkpoints, {folder}, is not local: save to a local '
            "folder, or remove `record`."
        )
    return str(storage.local(folder))
