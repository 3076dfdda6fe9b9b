"""What lies between `fit` and `training_step`, and what a step does besides: budgets, counted."""

from __future__ import annotations

import builtins
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lockstep
from tests.loop.pieces import Slope, numbers, on_ranks, quiet
from tests.tools.pool import RankPool

PACKAGE = str(Path(lockstep.__file__).parent) + os.sep
FRAMES, FILES, CALLS = 7, 5, 27
INSTRUCTIONS, OF_A_VALUE = 900, 130
"""Most bytecode instructions of the library in a step (814 in November 2026), and for a logged value (114)."""
ENGINE = "engines/ddp/"
"""What it calls grows with the buckets, and is the same in a hand-written loop."""


class Looks(Slope):
    """Notes the library's frames between `Trainer.fit` and its training step, from the outside in."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        files = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                files.append(frame.f_code.co_filename.removeprefix(PACKAGE))
                if (files[-1], frame.f_code.co_name) == ("trainer.py", "fit"):
                    break
            frame = frame.f_back
        self.path = files[::-1]
        return super().training_step(batch, batch_idx)


class LooksByHand(Looks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def over_budget(path: list[str]) -> list[str]:
    """What is wrong with a path of files, from `fit` to `training_step`."""
    stays = [file for i, file in enumerate(path) if i == 0 or path[i - 1] != file]
    returns = sorted({file for file in stays if stays.count(file) > 1})
    wrong = [f"{len(path)} frames"] if len(path) > FRAMES else []
    wrong += [f"{len(set(path))} files"] if len(set(path)) > FILES else []
    return wrong + [f"returns to {file}" for file in returns]


def path_to(make: Callable[[], Looks], start: Callable[..., Any]) -> list[str]:
    module = make()
    start(max_epochs=1).fit(module, numbers(4))
    return module.path


@pytest.mark.parametrize("make", [Looks, LooksByHand])
def test_the_way_to_a_training_step_is_short(make: Callable[[], Looks], ranks: RankPool) -> None:
    for path in (path_to(make, quiet), *ranks(2).run(path_to, make, on_ranks)):
        assert path[0] == "trainer.py"
        assert over_budget(path) == [], path


def test_a_path_over_the_budget_is_told() -> None:
    assert over_budget(["a", "b", "a"]) == ["returns to a"]
    assert over_budget(["a", "b", "c", "d", "e", "f"]) == ["6 files"]
    assert over_budget(["a"] * 10) == ["10 frames"]
    assert over_budget(["a", "a", "b"]) == []


class Bare(lockstep.LightningModule):
    """Has nothing but its step; from the fifth step to the ninth it is watched what the library does."""

    def __init__(self, watch: Callable[[], Any]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.watch = watch
        self.watched: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            self.watched = self.watch()
            self.watched.__enter__()
        elif batch_idx == 8:
            self.watched.__exit__(None, None, None)
        return (self.w * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


CALLED: list[str] = []


@contextmanager
def calls_of_the_library() -> Iterator[None]:
    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            CALLED.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")

    CALLED.clear()
    gc.collect()
    gc.disable()  # what others have left behind calls the library when it goes, and is no part of a step
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        gc.enable()


def calls_a_step(start: Callable[..., Any], **flags: Any) -> list[str]:
    start(max_epochs=1, **flags).fit(Bare(calls_of_the_library), numbers(10 * start_size(start)))
    return list(CALLED)


def start_size(start: Callable[..., Any]) -> int:
    return torch.distributed.get_world_size() if start is on_ranks else 1


def test_a_step_makes_few_calls(ranks: RankPool) -> None:
    on_two = [[call for call in called if not call.startswith(ENGINE)] for called in ranks(2).run(calls_on_ranks)]
    for called in (calls_a_step(quiet), calls_a_step(quiet, accumulate_grad_batches=2), *on_two):
        assert 4 < len(called) <= 4 * CALLS, "\n".join(called)


def calls_on_ranks() -> list[str]:
    return calls_a_step(on_ranks)


@contextmanager
def instructions_of_the_library() -> Iterator[None]:
    """Notes the file and function of each bytecode instruction of the library."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            CALLED.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_name}")
        return trace

    CALLED.clear()
    gc.collect()
    gc.disable()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


class Logs(Bare):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="each Python has instructions of its own")
@pytest.mark.parametrize(("make", "most"), [(Bare, INSTRUCTIONS), (Logs, INSTRUCTIONS + OF_A_VALUE)])
def test_a_step_takes_few_instructions(make: type[Bare], most: int) -> None:
    """Times scatter on a shared machine by more than a step's own cost; instructions do not."""
    quiet(max_epochs=1).fit(make(instructions_of_the_library), numbers(10))
    places = Counter(CALLED)
    assert 100 < len(CALLED) / 4 <= most, places.most_common(20)


@contextmanager
def nothing_slow() -> Iterator[None]:
    """Notes imports and looks at the environment."""
    real, real_get, own = builtins.__import__, type(os.environ).__getitem__, type(os.environ)

    def noted_import(name: str, *args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            CALLED.append(f"import {name}")
        return real(name, *args, **kwargs)

    def noted_get(self: Any, key: str) -> str:
        CALLED.append(f"environ {key}")
        return real_get(self, key)

    CALLED.clear()
    builtins.__import__, own.__getitem__ = noted_import, noted_get  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        builtins.__import__, own.__getitem__ = real, real_get  # type: ignore[method-assign]


def test_a_step_imports_nothing_and_reads_no_environment() -> None:
    quiet(max_epochs=1).fit(Bare(nothing_slow), numbers(10))
    assert CALLED == []
    with nothing_slow():
        os.environ.get("PATH")
    assert CALLED == ["environ PATH"]
