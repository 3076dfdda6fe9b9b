"""Search for the largest batch size at which a few steps run without exhausting memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.callbacks.base import Callback
from lockstep.data.combined import LENGTHS, unpack
from lockstep.data.source import length_of
from lockstep.extensions.extras.tuner.lr_finder import limited
from lockstep.extensions.extras.tuner.trial import (
    TrialSnapshot,
    configure_again,
    evaluate,
    has_started,
    places_of,
    refuse_several_processes,
    set_everywhere,
    train,
    trial,
    values_of,
)
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import garbage_collection_cuda, is_oom_error
from lockstep.ground.rank import rank_zero_info, rank_zero_warn
from lockstep.ground.types import STEP_OUTPUT, TrainerFn
from lockstep.module import LightningModule
from lockstep.trainer import Trainer

MODES = ("power", "binsearch")
STAGES = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
"""Stage whose batch size is searched, by method of the Trainer."""


@dataclass(frozen=True)
class BatchSizeSearch:
    """Settings of a search for the largest batch size that fits into memory.

    Raises:
        ValueError: a setting is invalid.
    """

    mode: str  # "power": double until a size does not fit; "binsearch": then bisect between the largest size that
    # fits and the smallest that does not
    steps_per_trial: int = 3  # optimizer steps, or batches of an evaluation
    init_val: int = 2  # first size
    max_trials: int = 25  # number of sizes that fit before the search ends
    batch_arg_name: str = "batch_size"
    margin: float = 0.0  # with "binsearch": fraction that is subtracted from the result
    max_val: int = 8192  # largest size to try

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"scale_batch_size(mode={self.mode!r}): pass one of {', '.join(map(repr, MODES))}.")
        for name in ("steps_per_trial", "init_val", "max_trials", "max_val"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"scale_batch_size({name}={value!r}): pass an integer of at least 1.")
        if not 0.0 <= self.margin < 1.0:
            raise ValueError(f"scale_batch_size(margin={self.margin!r}): pass a fraction of at least 0 and below 1.")


def search(fits: Callable[[int], bool], covers: Callable[[int], bool], settings: BatchSizeSearch) -> int:
    """Return the largest batch size that fits into memory, or 0 if not even a batch of 1 fits.

    Args:
        fits: tries a size, and returns True if it fits into memory.
        covers: returns True if a tried size covers the whole data set, so that larger ones make no difference.
        settings: settings of the search.
    """
    mode, max_val = settings.mode, settings.max_val
    size, low, high, successes = min(settings.init_val, max_val), 0, 0, 0
    while True:
        if fits(size):
            low, successes = size, successes + 1
            if successes >= settings.max_trials or size >= max_val or covers(size):
                break
            above = high or None
        else:
            high = above = size
        if above is None:
            size = min(2 * size, max_val)
        elif mode == "power":
            if low or size == 1:
                break
            size //= 2
        else:
            if high - low <= 1:
                break
            size = (low + high) // 2
    return max(1, int(low * (1 - settings.margin))) if low and mode == "binsearch" else low


class _Counter(Callback):
    """Callback that ends a trial after a number of batches.

    With manual optimization, ``max_steps`` cannot end the trial, because the number of steps per batch is unknown.
    """

    def __init__(self, batches: int) -> None:
        self._remaining = batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        self._remaining -= 1
        if self._remaining <= 0:
            trainer.should_stop = True


def check_data(trainer: Trainer, name: str) -> None:
    """Raise if a search cannot change the batch size of the loaders.

    Raises:
        MisconfigurationException: loaders are given as objects, there are several processes, or the attribute does not
            exist.
    """
    refuse_several_processes(trainer, "The batch size finder")
    method = str(trainer.state.fn)
    stage = STAGES[method]
    if trainer.loaders.given.get(stage) is not None:
        raise MisconfigurationException(
            f"The batch size finder cannot change the batch size of a loader that is passed to trainer.{method}(). "
            f"Create it in `{stage}_dataloader` of the module or of a data module, with `batch_size=self.{name}`."
        )
    places = places_of(trainer, name)
    if not places:
        raise MisconfigurationException(
            f"The batch size finder found no `{name}` in the model, the data module, or their hparams. Set it there "
            "and create the loaders with it, or set batch_arg_name to your attribute."
        )
    if {"model", "model.hparams"} <= set(places):
        rank_zero_warn(f"The batch size finder sets both model.{name} and model.hparams.{name}.")


def scale_batch_size(trainer: Trainer, settings: BatchSizeSearch) -> int | None:
    """Search for the largest batch size inside a Trainer call. Assign the result to ``batch_arg_name``, and return it.

    Return None in a ``fast_dev_run``.

    Raises:
        MisconfigurationException: see :func:`check_data`; or an evaluation has several loaders.
        RuntimeError: not even a batch of one sample fits into memory.
    """
    if trainer.fast_dev_run:
        rank_zero_warn("The batch size finder does nothing in a `fast_dev_run`.")
        return None
    batch_arg_name = settings.batch_arg_name
    check_data(trainer, batch_arg_name)
    before, snapshot, samples = values_of(trainer, batch_arg_name), TrialSnapshot(trainer), [0]

    def fits(size: int) -> bool:
        set_everywhere(trainer, batch_arg_name, size)
        try:
            samples[0] = _run_trial(trainer, snapshot, settings.steps_per_trial)
        except (RuntimeError, MemoryError) as error:
            if not is_oom_error(error):
                raise
            fit = False
        else:
            fit = True
        if not fit or trainer.strategy.root_device.type != "cpu":
            # After the except clause, because the frames of the exception refer to the batch.
            garbage_collection_cuda()
        # Ctrl-C ends a trial like a normal end; the search must not continue with the next size.
        if trainer.interruption is not None:
            raise KeyboardInterrupt
        rank_zero_info(f"Batch size {size} {'fits' if fit else 'does not fit into memory'}.")
        return fit

    try:
        found = search(fits, lambda size: 0 < samples[0] <= size, settings)
        if not found:
            raise RuntimeError(
                f"The batch size finder: not even {batch_arg_name}=1 fits into memory. Make the model or its input "
                "smaller."
            )
    except BaseException:
        set_everywhere(trainer, batch_arg_name, before)
        raise
    set_everywhere(trainer, batch_arg_name, found)
    _make_loaders_again(trainer)
    rank_zero_info(
        f"The batch size finder set `{batch_arg_name}` to {found} ({', '.join(places_of(trainer, batch_arg_name))})."
    )
    return found


def _run_trial(trainer: Trainer, snapshot: TrialSnapshot, steps: int) -> int:
    """Run the steps of one trial. Return the number of samples in the data set; 0 if the number is unknown."""
    if trainer.state.fn is not TrainerFn.FITTING:
        flags: dict[str, Any] = {f"limit_{STAGES[str(trainer.state.fn)]}_batches": steps}
        with trial(trainer, snapshot, [], **flags):
            return _samples(evaluate(trainer).given)
    most, counters = -1, [_Counter(steps)]
    if trainer.lightning_module.automatic_optimization:
        most, counters = trainer.fit_loop.progress.global_step + steps, []
    flags = {"max_steps": most, "limit_train_batches": 1.0}
    flags["limit_val_batches"] = limited(trainer.config.limit_val_batches, steps)
    with trial(trainer, snapshot, [*counters], **flags):
        train(trainer)
        return _samples(trainer.fit_loop.given)


def _samples(loaders: object) -> int:
    parts, _, mode = unpack(loaders, "max_size_cycle")
    lengths = [length_of(getattr(loader, "dataset", None)) for loader in parts]
    known = [length for length in lengths if length is not None]
    return int(LENGTHS[mode](known)) if known else 0


def _make_loaders_again(trainer: Trainer) -> None:
    """Drop the loaders of the current Trainer call, so that it creates new ones with the new batch size."""
    if trainer.state.fn is not TrainerFn.FITTING:
        loop = getattr(trainer, f"{trainer.state.fn}_loop")
        if loop.feed is not None:
            loop.release()
            loop.feed = None
            loop.setup_data()
        return
    loop = trainer.fit_loop
    was_set_up = loop.feed is not None
    loop.release()
    trainer.session.fit.feed = loop.validation.feed = None
    if has_started(trainer):
        loop.setup_data()
    elif was_set_up:  # `configure_optimizers` read `estimated_stepping_batches`, which depends on the loaders
        configure_again(trainer)


# -- as a callback ------------------------------------------------------------------------------------------


class BatchSizeFinder(Callback):
    """Callback that finds the largest batch size that fits into memory; the Trainer call then uses this batch size.

    The loaders must come from hooks of the module or of a data module that read the attribute.

    Args:
        mode: "power": double until memory is exhausted, and take the last size that fits; "binsearch": then bisect to
            the largest size that fits.
        steps_per_trial: number of optimizer steps (batches in an evaluation) for each size.
        init_val: first size, in samples.
        max_trials: number of sizes that fit before the search ends.
        batch_arg_name: attribute of the module, the data module, or their hparams.
        margin: with "binsearch", fraction that is subtracted from the result.
        max_val: largest size to try, in samples.

    Attributes:
        optimal_batch_size: the result; ``init_val`` before the search.

    Raises:
        ValueError: a setting is invalid.
        MisconfigurationException: at the setup of a call, the attribute does not exist, loaders were passed as
            arguments, or there are several processes.

    Example::

        trainer = Trainer(callbacks=BatchSizeFinder(mode="binsearch"))
        trainer.fit(model, datamodule=data)     # data.batch_size is set, and used
    """

    SUPPORTED_MODES = MODES
    _searches = True

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self._settings = BatchSizeSearch(
            mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
        )
        self.optimal_batch_size: int | None = init_val

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        check_data(trainer, self._settings.batch_arg_name)

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run the search, and then restore everything except the batch size.

        Args:
            trainer: the Trainer that runs.
            pl_module: module of the run.

        Raises:
            RuntimeError: not even one sample fits into memory.
        """
        self.optimal_batch_size = scale_batch_size(trainer, self._settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scale_batch_size(trainer, pl_module)

    on_test_start = on_predict_start = on_fit_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn is TrainerFn.VALIDATING:  # not the validation of a fit
            self.scale_batch_size(trainer, pl_module)
