"""PyTorchProfiler: records the operators and kernels in each step with ``torch.profiler``."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity

from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.rank import warn_once
from lockstep.profilers.base import Profiler

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: steps of the default schedule: one waits, one warms up, three are recorded
DEFAULT_STEPS = 5


class PyTorchProfiler(Profiler):
    """Profiler that records the operators of some steps with torch's profiler and reports them as a table.

    The schedule counts steps of training, validation, test and prediction separately, and runs once for each. While
    steps of one kind are recorded, others do not count. If a stage has fewer than five steps and no ``schedule`` is
    given, all of its steps are recorded.

    Args:
        dirpath: see `Profiler`; traces for Chrome and TensorBoard are written there too.
        filename: see `Profiler`.
        group_by_input_shapes: report a row for each shape of inputs; needs ``record_shapes=True``.
        emit_nvtx: emit NVTX ranges for ``nsys`` in place of recording; needs a CUDA device.
        export_to_chrome: write a trace (``*.pt.trace.json``) for ``chrome://tracing`` and TensorBoard.
        row_limit: maximum number of rows of the table; -1: all.
        sort_by_key: one of ``AVAILABLE_SORT_KEYS``; None: "cuda_time_total" with a CUDA device, else "cpu_time_total".
        record_module_names: label the forward of every submodule.
        table_kwargs: further arguments of torch's ``EventList.table``.
        **profiler_kwargs: arguments of ``torch.profiler.profile`` (``schedule``, ``activities``, ``profile_memory``
            ...), and ``export_to_flame_graph=True`` with ``metric="self_cpu_time_total"``, to write stacks.

    Raises:
        MisconfigurationException: ``sort_by_key`` is not one of ``AVAILABLE_SORT_KEYS``.

    Example::

        schedule = torch.profiler.schedule(wait=2, warmup=2, active=6)
        trainer = Trainer(profiler=PyTorchProfiler(dirpath="traces", schedule=schedule, profile_memory=True))
    """

    STEP_FUNCTIONS = set(STEPS)
    AVAILABLE_SORT_KEYS = {
        "count",
        "cpu_memory_usage",
        "cpu_time",
        "cpu_time_total",
        "cuda_memory_usage",
        "cuda_time",
        "cuda_time_total",
        "self_cpu_memory_usage",
        "self_cuda_memory_usage",
    }

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        activities = list(profiler_kwargs.get("activities") or default_activities())
        on_cuda = ProfilerActivity.CUDA in activities
        self._flame_graph = profiler_kwargs.pop("export_to_flame_graph", False)
        self._metric = profiler_kwargs.pop("metric", "self_cpu_time_total")
        self._sort_by_key = sort_by_key or f"{'cuda' if on_cuda else 'cpu'}_time_total"
        if self._sort_by_key not in self.AVAILABLE_SORT_KEYS:
            raise MisconfigurationException(
                f"PyTorchProfiler(sort_by_key={sort_by_key!r}): the key is unknown. Pass one of "
                f"{sorted(self.AVAILABLE_SORT_KEYS)}."
            )
        self._table_kwargs = dict(table_kwargs or {})
        self._group_by_input_shapes = group_by_input_shapes and bool(profiler_kwargs.get("record_shapes"))
        self._emit_nvtx = emit_nvtx
        self._export_to_chrome = export_to_chrome
        self._row_limit = row_limit
        self._record_module_names = record_module_names
        self._on_trace_ready = profiler_kwargs.get("on_trace_ready")
        self._user_schedule = profiler_kwargs.get("schedule")
        self._profiler_kwargs = {**profiler_kwargs, "activities": activities}
        if self._flame_graph:
            self._profiler_kwargs["with_stack"] = True
        #: torch's profiler while it is running
        self.profiler: Any = None
        #: events that were recorded last
        self.function_events: EventList | None = None
        self._module: Callable[[], Any] = _nothing
        self._labels: RegisterRecordFunction | None = None
        self._ranges: Any = None
        self._schedule: StepSchedule | None = None
        self._open: dict[str, record_function] = {}
        self._tables: dict[str, str] = {}

    def observe(self, module: nn.Module | None) -> None:
        """Attach to a LightningModule, to label its submodules in recordings and to count its steps.

        The Trainer calls this method.

        Args:
            module: module to attach to; None: detach.
        """
        # weak: a profiler may outlive the fit, and would keep the module's memory
        self._module = _nothing if module is None else weakref.ref(module)

    # -- actions -------------------------------------------------------------------------------------------

    def start(self, action_name: str) -> None:
        """Start an action's label in the recording. The first action also starts torch's profiler."""
        if self.profiler is None:
            self._tables = {}
            module = self._module()
            if module is not None and self._record_module_names:
                self._labels = RegisterRecordFunction(module)
                self._labels.__enter__()
            if self._emit_nvtx:
                self._ranges = torch.cuda.profiler.profile()
                self.profiler = torch.autograd.profiler.emit_nvtx()
                self._ranges.__enter__()
            else:
                self._schedule = StepSchedule(
                    self._user_schedule or torch.profiler.schedule(wait=1, warmup=1, active=3)
                )
                settings = {
                    **self._profiler_kwargs,
                    "schedule": self._schedule,
                    "on_trace_ready": self._store_recording,
                }
                self.profiler = torch.profiler.profile(**settings)
            self.profiler.__enter__()
        if action_name not in self._open:
            label = self._open[action_name] = record_function(f"[pl][profile]{action_name}")
            label.__enter__()

    def stop(self, action_name: str) -> None:
        """End an action's label in the recording. After a step method, also advance the schedule."""
        label = self._open.pop(action_name, None)
        if label is not None:
            label.__exit__(None, None, None)
        step = action_name.rpartition(".")[2]
        schedule = self._schedule
        if step not in STEPS or schedule is None or not schedule.counts_now(step):
            return
        trainer = getattr(self._module(), "_trainer", None)
        if trainer is not None and trainer.sanity_checking:
            return  # its batches would use up the schedule of the validations
        schedule.current = step
        if self._user_schedule is None and trainer is not None and _num_steps(trainer, step) < DEFAULT_STEPS:
            schedule.given = lambda number: ProfilerAction.RECORD
        self.profiler.step()

    # -- recordings ----------------------------------------------------------------------------------------

    def _store_recording(self, profiler: torch.profiler.profile) -> None:
        """Store a table of the recorded steps, and write traces and stacks; called by torch when a recording ends."""
        step = (self._schedule.current if self._schedule is not None else None) or "records"
        self.function_events = profiler.events()
        averages = self.function_events.key_averages(group_by_input_shapes=self._group_by_input_shapes)
        self._tables[step] = averages.table(self._sort_by_key, row_limit=self._row_limit, **self._table_kwargs)
        if self._on_trace_ready is not None:
            self._on_trace_ready(profiler)
        elif self.dirpath is None:
            if self._export_to_chrome or self._flame_graph:
                warn_once(
                    "PyTorchProfiler wrote no trace, because it has no folder. Pass `dirpath`, or use a logger "
                    "with files."
                )
        else:
            os.makedirs(self.dirpath, exist_ok=True)
            if self._export_to_chrome:
                torch.profiler.tensorboard_trace_handler(self.dirpath, self.file_name(step, ""))(profiler)
            if self._flame_graph:
                profiler.export_stacks(os.path.join(self.dirpath, self.file_name(step, ".stack")), self._metric)

    def summary(self) -> str:
        """Stop recording, and return a table of operators for each step method that was recorded."""
        self._switch_off()
        return self.report(self._tables) if self._tables else ""

    def _switch_off(self) -> None:
        for action in list(self._open):
            self._open.pop(action).__exit__(None, None, None)
        if self.profiler is not None:
            # its exit may call `_store_recording`, and must not run twice if that raises
            profiler, self.profiler = self.profiler, None
            profiler.__exit__(None, None, None)
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
        if self._labels is not None:
            self._labels.__exit__()
        self._ranges = self._labels = self._schedule = None

    def teardown(self, stage: str | None) -> None:
        """Stop recording, and detach from the module."""
        self._switch_off()
        self._module = _nothing

    def __getstate__(self) -> dict[str, Any]:  # torch's profiler and its events stay in their process
        gone = {"profiler", "function_events", "_labels", "_ranges", "_schedule"}
        return {
            **{name: None if name in gone else value for name, value in self.__dict__.items()},
            "_module": _nothing,
            "_open": {},
        }


class StepSchedule:
    """Schedule for torch's profiler that counts the steps of each step method separately.

    Args:
        given: schedule for each step method; maps a step's number to a ``ProfilerAction``.
    """

    def __init__(self, given: Callable[[int], ProfilerAction]) -> None:
        self.given = given
        #: kind of the step that has just ended
        self.current: str | None = None
        self.counts: dict[str, int] = {}
        self._finished: set[str] = set()
        self._busy: str | None = None  # kind of the steps that are being recorded
        self._last = ProfilerAction.NONE

    def counts_now(self, step: str) -> bool:
        """Return True if steps of the method ``step`` count now, because no other step method is being recorded."""
        return self._busy in (None, step)

    def __call__(self, number: int) -> ProfilerAction:
        """Return the profiler's action for the next step.

        ``number``, torch's count of steps, is ignored.
        """
        step = self.current
        if step is None:
            return self.given(0)
        if self._busy == step and self._last is ProfilerAction.RECORD_AND_SAVE:
            self._finished.add(step)
        if step in self._finished:
            self._busy = None
            return ProfilerAction.NONE
        self.counts[step] = self.counts.get(step, 0) + 1
        self._last = self.given(self.counts[step])
        self._busy = None if self._last is ProfilerAction.NONE else step
        return self._last


class RegisterRecordFunction:
    """Context manager that labels the forward of every submodule in recordings of torch's profiler.

    Args:
        model: module whose submodules are labelled with class and name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._open: list[record_function] = []
        self._handles: list[Any] = []

    def __enter__(self) -> RegisterRecordFunction:
        for name, module in self._model.named_modules():
            if name:
                kind = type(module)
                before, after = self._hooks(f"[pl][module]{kind.__module__}.{kind.__name__}: {name}")
                self._handles.append(module.register_forward_pre_hook(before))
                # also after an error: a label left open would enclose all that follows
                self._handles.append(module.register_forward_hook(after, always_call=True))
        return self

    def _hooks(self, label: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, inputs: object) -> None:
            record = record_function(label)
            record.__enter__()
            self._open.append(record)

        def after(module: nn.Module, inputs: object, outputs: object) -> None:
            if self._open:
                self._open.pop().__exit__(None, None, None)

        return before, after

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def default_activities() -> list[ProfilerActivity]:
    """Return the activities that this machine can record: the CPU, and CUDA if it is available."""
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])


def _num_steps(trainer: Any, step: str) -> float:
    """Return how often a step method runs in one epoch or evaluation."""
    stage = {"training_step": "training", "validation_step": "val", "test_step": "test"}.get(step, "predict")
    found: Any = getattr(trainer, f"num_{stage}_batches")
    batches = float(sum(found) if isinstance(found, Sequence) else found)
    if stage == "training" and trainer.max_steps >= 0:
        batches = min(batches, trainer.max_steps * trainer.accumulate_grad_batches)
    return batches


def _nothing() -> None:
    return None
