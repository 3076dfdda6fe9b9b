"""Attributes of Lightning's fit loop that third-party code reads, such as ``trainer.fit_loop.epoch_loop``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.config.run import set_flag
from lockstep.ground.errors import Inner, no_inner_part

if TYPE_CHECKING:
    from lockstep.loop.progress import Progress
    from lockstep.loop.session import Session


class _Flag:
    """Descriptor that makes a Trainer flag readable and assignable as an attribute of the fit loop."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, loop: FitNames, owner: type | None = None) -> Any:
        return self if loop is None else getattr(loop.session.config, self._name)

    def __set__(self, loop: FitNames, value: object) -> None:
        loop.session.config = set_flag(loop.session.config, self._name, value)


class FitNames:
    """Base class of `FitLoop` with the attributes that third-party code reads from Lightning's fit loop."""

    session: Session

    max_epochs, min_epochs, max_steps, min_steps = _Flag(), _Flag(), _Flag(), _Flag()

    @property
    def progress(self) -> Progress:
        """Counters of the fit, such as finished batches, accumulation windows and optimizer steps."""
        return self.session.fit.progress

    @property
    def current_epoch(self) -> int:
        """Current epoch, counted from 0."""
        raise NotImplementedError

    @property
    def batch_idx(self) -> int:
        """Index of the last training batch that has started, counted from the epoch's start; -1 before the first."""
        raise NotImplementedError

    @property
    def total_batch_idx(self) -> int:
        """Index of the last training batch that has started, counted over all epochs; -1 before the first."""
        return self.progress.total_batches - self.progress.batch + self.batch_idx

    @property
    def epoch_loop(self) -> Inner:
        """Stand-in for Lightning's ``fit_loop.epoch_loop``, with the attributes that third-party code reads."""
        name = "trainer.fit_loop.epoch_loop"
        source = {"is_defined": lambda: lambda: self.session.enable_validation}
        validation = {"_data_source": lambda: Inner(f"{name}.val_loop._data_source", source)}
        offers = {
            "_batches_that_stepped": lambda: self.progress.windows,
            "batch_idx": lambda: self.batch_idx,
            "global_step": lambda: self.progress.global_step,
            "total_batch_idx": lambda: self.total_batch_idx,
            "val_loop": lambda: Inner(f"{name}.val_loop", validation),
        }
        return Inner(name, offers)

    @property
    def epoch_progress(self) -> Inner:
        """Stand-in for Lightning's ``fit_loop.epoch_progress``, with the attribute ``current.completed`` alone."""
        name = "trainer.fit_loop.epoch_progress"
        counts = {"completed": lambda: self.current_epoch}
        return Inner(name, {"current": lambda: Inner(f"{name}.current", counts)})

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` query objects that have no attributes yet
        if name.startswith("__") or "session" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise no_inner_part(f"trainer.fit_loop.{name}")
