"""Loops for validation, test and prediction. Each sample is used once; metrics are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lockstep.data.feed import EvaluationFeed
from lockstep.ground.methods import kept
from lockstep.ground.rank import warn_once
from lockstep.ground.text_table import padded
from lockstep.ground.transfer import move_data_to_device
from lockstep.ground.types import RunningStage
from lockstep.hooks import ModuleHooks
from lockstep.loop.call import CallArguments, apply_user_changes, call
from lockstep.loop.checks import arguments_of, refuse_fewer
from lockstep.loop.hooks import Transfer, is_overridden
from lockstep.loop.logged_entry import Entry
from lockstep.loop.logged_metrics import NOT_FOR_CALLBACKS
from lockstep.loop.logging import LogCollector
from lockstep.loop.metrics import leave_inference_mode
from lockstep.loop.padding import in_step, padding
from lockstep.loop.progress import VALIDATED
from lockstep.loop.resume import modes_of
from lockstep.loop.session import STAGE_OF, Session
from lockstep.loop.state import validation_start

FN_OF = {stage: fn for fn, stage in STAGE_OF.items()}

NOTHING_PREDICTED = (
    "`predict_step` returned None: the list of predictions has None for this batch. If this is not intended, return "
    "the predictions; if a callback writes them, use predict(return_predictions=False)."
)


class EvaluationLoop:
    """Loop that runs validation, test or prediction: one pass over the loaders of the stage.

    As pseudo-code::

        eval mode; on_<stage>_start; on_<stage>_epoch_start
        for batch in feed:
            to the device; on_<stage>_batch_start; <stage>_step; on_<stage>_batch_end
        reduce metrics over steps and ranks; on_<stage>_epoch_end; log; on_<stage>_end; train mode
    """

    def __init__(
        self,
        session: Session,
        stage: RunningStage,
        reload_due: Callable[[], bool] = bool,
        request: Callable[[str], Any] | None = None,
    ) -> None:
        self.session = session
        self.stage = stage
        self._reload_due = reload_due  # for a fit's validation: True if its loaders have to be made again
        self._request = request  # for a fit's validation: returns the loaders
        self.name = "validation" if stage is RunningStage.VALIDATING else stage.value
        self.prefix = stage.dataloader_prefix
        self.feed: EvaluationFeed | None = None
        self.given: object = None  # the loaders as the user made them
        self.predictions: Any = []  # of the running prediction, for a writer
        self.epoch_batch_indices: list[list[list[Any]]] = []  # loader, batch, sample
        self.seen: dict[int, int] = {}  # batches so far, by loader: the x axis of on_step values in evaluation

    def __getstate__(self) -> dict[str, Any]:
        return kept(self, "feed", "predictions")

    @property
    def num_batches(self) -> list[int | float]:
        """List of the number of this rank's batches in each loader, limited by ``limit_*_batches``."""
        return self.feed.num_batches if self.feed is not None else []

    @property
    def num_batches_by_loader(self) -> list[int | float]:
        """List of the number of batches in each loader, also if a CombinedLoader reads the loaders together."""
        return self.feed.by_loader if self.feed is not None else []

    def run(
        self,
        ckpt_path: str | None = None,
        verbose: bool = True,
        return_predictions: bool = True,
        weights_only: bool | None = None,
    ) -> Any:
        """Run ``trainer.validate``, ``test`` or ``predict``.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the call has been torn down.
        """
        session = self.session
        self.feed = None
        with call(session, CallArguments(FN_OF[self.stage], ckpt_path, weights_only, self.release)):
            session.state.stage = self.stage
            self.setup_data()
            session.strategy.sync_gradients = False
            if self.stage is RunningStage.PREDICTING:
                return self.predict(return_predictions) if self.feed is not None else None
            values = self.evaluate()
            if verbose and session.is_global_zero:
                session.print(table(values, self.name))
            return values
        raise AssertionError("an interrupted evaluation raises")

    def setup_data(self) -> None:
        """Request the stage's loaders if they are missing or a reload is due, and distribute samples over the ranks."""
        session, config = self.session, self.session.config
        due = session.fitting and self._reload_due()
        if self.feed is not None and not due:
            return
        self.release()
        limit = getattr(config, f"limit_{self.prefix}_batches")
        request = self._request or session.loaders.request
        source = request(self.prefix) if limit != 0 else None  # a limit of 0 does not call the user's hook
        if source is None:
            return
        self.given, self.seen = source, {}  # as in Lightning, the validations of a fit continue counting
        self.feed = EvaluationFeed.of(
            source,
            replicas=session.strategy.replicas.for_feed(session.strategy.members),
            seed=session.drawn_seed,
            limit=limit,
            distribute=config.use_distributed_sampler,
            order="torch" if config.order == "torch" else "keyed",
            flag=f"limit_{self.prefix}_batches",
            overfit=session.fitting and bool(config.overfit_batches),
        )

    # -- validate, test ------------------------------------------------------------------------------------

    def evaluate(self, sanity_steps: int = 0) -> list[dict[str, float]]:
        """Run validation or test once; return a dict of metrics for each loader.

        Metrics from a sanity check are not sent to the loggers.

        Args:
            sanity_steps: batches of each loader in a sanity check (-1: all); 0: this is not a sanity check.
        """
        self.setup_data()
        if self.feed is None:
            return []
        session, hooks, name = self.session, self.session.hooks, self.name
        strategy = session.strategy
        apply_user_changes(session)
        outer_sync, results = strategy.sync_gradients, LogCollector.of(strategy, session.module)
        outer = session.collect_in(results)
        strategy.sync_gradients = False
        if session.fitting and not sanity_steps:  # for a checkpoint that a hook of the validation saves
            session.fit.resume.validation = validation_start(session)
        try:
            with strategy.copies.one_model(), self._no_gradients(), self._eval_mode():
                hooks.call(f"on_{name}_start")
                hooks.call(f"on_{name}_epoch_start")
                returned: Any = None
                for output, _ in self._steps(f"{name}_step", sanity_steps):
                    returned = output
                values = self._end(results, to_loggers=not sanity_steps)
                if isinstance(returned, dict) and returned and not any(values):
                    self._warn_of_unread(returned)
            strategy.steps_end()
            return values
        finally:
            session.collect_in(outer)
            strategy.sync_gradients = outer_sync

    def _warn_of_unread(self, returned: dict[str, Any]) -> None:
        """Warn that numbers returned by a step are unused. Called after an evaluation in which nothing was logged."""
        step, end = f"{self.name}_step", f"on_{self.name}_batch_end"
        numbers = []
        for key, value in returned.items():
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers.append(key)
        if numbers and not self.session.hooks.owners((end,)):
            warn_once(
                f"`{step}` returned {numbers}, but nothing was logged: returned values are only passed to `{end}`. "
                f"Call `self.log({numbers[0]!r}, value)` in `{step}`.",
                key=f"{step} returned values",
            )

    def _end(self, results: LogCollector, to_loggers: bool) -> list[dict[str, float]]:
        """Reduce and log the values of an evaluation, and call its end hooks; return the metrics of each loader."""
        session, hooks, name = self.session, self.session.hooks, self.name
        assert self.feed is not None
        results.weight = 1.0  # values from here on do not belong to a batch
        values = results.reduce_epoch()
        shown = values if to_loggers else [value for value in values if value[0].key[1] < 0]  # as in Lightning
        for_loggers = session.published.publish(shown)
        epoch_end = getattr(hooks, f"on_{name}_epoch_end")
        if epoch_end is not None:
            results.hook = ("", -1)  # values of the hook belong to no loader
            hooks.call(f"on_{name}_epoch_end")
            late = results.reduce_epoch()
            for_loggers.update(session.published.publish(late))
            values = values + late
        if session.fitting:
            session.published.note_measured(values, session.fit.progress.global_step)
        if for_loggers and to_loggers:
            session.log_metrics(for_loggers, None)
        if to_loggers and session.fitting:
            fit = session.fit
            fit.resume.validation = None
            # before `on_validation_end`, whose checkpoints continue after the validation
            fit.progress.phase, fit.progress.validated = VALIDATED, fit.resume.counted(fit.progress.batch)
        elif to_loggers:
            session.record()
        results.ended = True
        hooks.call(f"on_{name}_end")
        results.reset_metrics()  # after the hooks, which may compute metrics
        return _by_loader(values, len(self.feed.num_batches))

    def _pad(self, step: Callable[..., Any], position: tuple[Any, int, int], takes: int, transfer: Transfer) -> None:
        """Run a step on a padding batch, because forwards on other ranks communicate with this rank."""
        session, results = self.session, self.session.results
        batch, batch_idx, loader = position
        with padding(session):
            results.muted = True
            moved = batch if transfer.idle else transfer(batch, loader)
            session.strategy.run(step, *(moved, batch_idx, loader)[:takes])
            results.muted = False

    def _steps(self, step_name: str, sanity_steps: int = 0) -> Iterator[tuple[Any, int]]:
        """Run the stage's step on the batches of all loaders, and yield (output, dataloader_idx) for each batch."""
        session, feed, hooks, name = self.session, self.feed, self.session.hooks, self.name
        assert feed is not None
        module, results = session.module, session.results
        several = len(feed.num_batches) > 1 and feed.sequential
        step = getattr(module, step_name)
        takes = arguments_of(step, several, step_name)
        kinds = (("start", "batch", 3), ("end", "outputs, batch", 4)) if several else ()
        for kind, first, given in kinds:
            hook = f"on_{name}_batch_{kind}"
            if is_overridden(hook, module, ModuleHooks):
                define = f"{hook}(self, {first}, batch_idx, dataloader_idx=0)"
                refuse_fewer(getattr(module, hook), given, hook, define)
        transfer = Transfer(module, session.datamodule, session.strategy)
        # a validation within a fit goes on: the fit ends at its next boundary, where callbacks save it
        ends_at_once = not session.fitting
        start, end = f"on_{name}_batch_start", f"on_{name}_batch_end"
        feed.begin(session.fit.progress.epoch, limit=sanity_steps if sanity_steps > 0 else None)
        loader = 0
        for batch, batch_idx, dataloader_idx, weight, is_padding in self._batches(feed):
            if dataloader_idx != loader:
                results.end_loader(loader)
                if not sanity_steps:  # users see the values of a loader once it has ended
                    session.published.preview(results.epoch_so_far(loader))
                loader = dataloader_idx
            if session.interruption is not None and ends_at_once:
                raise KeyboardInterrupt
            shown = dataloader_idx if several else -1
            results.hook, results.weight, results.among_batches = ("", shown), weight, True
            if is_padding:
                results.enter(step_name, shown)
                self._pad(step, (batch, batch_idx, dataloader_idx), takes, transfer)
                continue
            if not transfer.idle:
                batch = transfer(batch, dataloader_idx)
            position = (batch, batch_idx, dataloader_idx) if several else (batch, batch_idx)
            hooks.call(start, *position)
            results.enter(step_name, shown)
            output = session.strategy.run(step, *position[:takes])
            results.enter("", shown)
            hooks.call(end, output, *position)
            for_loggers = session.published.publish(results.take_step_values(), to=NOT_FOR_CALLBACKS)
            if not sanity_steps:  # batch by batch, from this rank's samples; x counts batches, as in Lightning
                seen = self.seen.get(dataloader_idx, 0)
                self.seen[dataloader_idx] = seen + 1
                if for_loggers:
                    session.log_metrics(for_loggers, seen, with_epoch=False)
            yield output, dataloader_idx
        session.strategy.steps_end()
        results.hook, results.among_batches = ("", -1), False
        if several:
            results.end_loader(loader)

    def _batches(self, feed: EvaluationFeed) -> Iterator[tuple[Any, int, int, float, bool]]:
        """Return an iterator over this rank's (batch, batch_idx, dataloader_idx, weight, is_padding)."""
        strategy = self.session.strategy
        if strategy.runs_padding and strategy.world_size > 1:
            return in_step(feed, strategy)
        return ((*each, False) for each in feed)

    # -- predict -------------------------------------------------------------------------------------------

    def predict(self, return_predictions: bool) -> Any:
        """Run prediction once; return the list of ``predict_step`` outputs, or one such list per loader."""
        hooks, feed = self.session.hooks, self.feed
        assert feed is not None
        collected: list[list[Any]] = [[] for _ in feed.num_batches]
        self.predictions = collected[0] if len(collected) == 1 else collected
        self.epoch_batch_indices = [[] for _ in collected]
        apply_user_changes(self.session)
        from lockstep.callbacks.prediction_writer import BasePredictionWriter  # a fit needs none

        writers = [callback for callback in self.session.callbacks if isinstance(callback, BasePredictionWriter)]
        keeps = return_predictions or any(writer.interval.on_epoch for writer in writers)
        if writers:
            feed.record_indices()
        with self._no_gradients(), self._eval_mode():
            hooks.call("on_predict_start")
            hooks.call("on_predict_epoch_start")
            for output, dataloader_idx in self._steps("predict_step"):
                if keeps:
                    if output is None and return_predictions:
                        warn_once(NOTHING_PREDICTED)
                    # off the device, whose memory would fill
                    collected[dataloader_idx].append(move_data_to_device(output, "cpu"))
                if feed.batch_indices:
                    self.epoch_batch_indices[dataloader_idx].append(feed.batch_indices)
            hooks.call("on_predict_epoch_end")
            predictions, self.predictions, self.epoch_batch_indices = self.predictions, [], []
            hooks.call("on_predict_end")
        return predictions if return_predictions else None

    @property
    def current_batch_indices(self) -> list[Any]:
        """Dataset indices of the samples in the current batch, for BasePredictionWriter; empty if unknown."""
        return self.feed.batch_indices if self.feed is not None else []

    def release(self) -> None:
        """Close the loaders and their workers."""
        if self.feed is not None:
            self.feed.close()

    # -- modes ---------------------------------------------------------------------------------------------

    @contextmanager
    def _no_gradients(self) -> Iterator[None]:
        """Disable gradients in the ``with`` block: by ``torch.inference_mode`` if possible, else by ``no_grad``."""
        inside_fit = self.session.fitting
        # tensors made in inference mode cannot be trained: those of an engine that communicates in forwards, and those
        # of lazy layers, are used by a later fit
        infers = self.session.config.inference_mode and not inside_fit and not self.session.strategy.runs_padding
        infers = infers and not any(is_lazy(parameter) for parameter in self.session.module.parameters())
        quiet = torch.inference_mode if infers else torch.no_grad
        try:
            with quiet():
                yield
        finally:
            if infers:
                leave_inference_mode(self.session.module)

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Set the module to eval mode in the ``with`` block, and restore the mode of each submodule afterwards."""
        session, module, changes = self.session, self.session.module, self.session.fit.resume.hook_changes
        modes = changes.outside = modes_of(module)
        session.hooks.own(f"on_{self.name}_model_eval")
        yield
        back = f"on_{self.name}_model_train"
        if hasattr(module, back) and is_overridden(back, module, ModuleHooks):
            session.hooks.own(back)
        else:  # not `module.train()`: parts that the user has frozen in eval mode stay so
            for name, part in module.named_modules():
                part.training = modes.get(name, part.training)
        changes.outside = None


def _by_loader(values: list[tuple[Entry, str, Tensor]], loaders: int) -> list[dict[str, float]]:
    """Return a dict of metrics for each loader. Values that belong to no single loader are in each dict."""
    found: list[dict[str, float]] = [{} for _ in range(loaders)]
    for entry, name, value in values:
        if entry.logger:
            loader = entry.key[1]
            for part in found if loader < 0 else [found[loader]]:
                part[name] = float(value)
    return found


def table(values: Sequence[dict[str, float]], stage: str) -> str:
    """Format metrics as an aligned table with a row for each metric and a column for each loader.

    Args:
        values: the result of ``trainer.validate``.
        stage: "validation" or "test", for the heading.
    """
    names = sorted({name for part in values for name in part})
    if not names:
        return f"{stage}: nothing was logged"
    heads = [f"loader {number}" for number in range(len(values))] if len(values) > 1 else ["value"]
    rows = [[name, *(f"{part[name]:.6g}" if name in part else "" for part in values)] for name in names]
    head, *lines = map("  ".join, padded([[stage, *heads], *rows], right=range(1, len(heads) + 1)))
    return "\n".join([head, "-" * len(head), *lines])
