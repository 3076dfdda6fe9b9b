"""Random programs show on lockstep what they show on Lightning 2.6.6, but for the rows of a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.differential.compare import Verdict, compare, differences
from tests.differential.known import PAGE, ROWS, Row
from tests.differential.more import program_of
from tests.differential.parts import extensions_of
from tests.differential.program import LOSS, PLAIN, VAL, Act, Log, Program
from tests.differential.record import Record
from tests.tools.extensions import is_there

lightning = pytest.importorskip("lightning")
if lightning.__version__ != "2.6.6":
    pytest.skip(f"the reference is Lightning 2.6.6, not {lightning.__version__}", allow_module_level=True)

EVERY_DAY = 12
ALL = 400


def is_playable(program: Program) -> bool:
    return all(map(is_there, extensions_of(program)))


def case(value: Any, program: Program) -> Any:
    return pytest.param(value, marks=pytest.mark.extension(*extensions_of(program)))


def different(seeds: range) -> list[str]:
    verdicts = [compare(program) for program in map(program_of, seeds) if is_playable(program)]
    return [
        f"seed {verdict.program.seed}: {difference}" for verdict in verdicts for difference in verdict.unexplained[:3]
    ]


def test_programs_are_lightnings() -> None:
    assert not different(range(EVERY_DAY))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(EVERY_DAY, ALL, 50))
def test_many_programs_are_lightnings(first: int) -> None:
    assert not different(range(first, min(first + 50, ALL)))


FOUND = {
    "trainer.state.stage was None and trainer.training False in setup and configure_optimizers": replace(
        PLAIN, calls=("fit", "validate", "test")
    ),
    "the validation loaders were asked for while trainer.training was true": replace(PLAIN, data="data module"),
    "trainer.train_dataloader was the CombinedLoader, not what it was made of": replace(
        PLAIN, train="dict min_size", logs=()
    ),
    "an optimizer whose step(closure=None) needs its closure was given none": replace(PLAIN, optimizers=("closure",)),
    "an optimizer in optimizer_step was no instance of its class": replace(PLAIN, hooks="working"),
    "outputs of on_train_batch_end held a loss that was not divided by the accumulation": replace(
        PLAIN, flags={**PLAIN.flags, "accumulate_grad_batches": 3}
    ),
    "single steps of an evaluation were logged with an epoch, and not seen in its hooks": replace(
        PLAIN, calls=("fit", "test", "test"), logs=(LOSS, Log("test_step", "a", "module", {"on_step": True}))
    ),
    "the suffix of a step's and an epoch's value came after the loader's": replace(
        PLAIN,
        val_loaders=(3, 4),
        logs=(LOSS, Log("validation_step", "a", "module", {"on_step": True, "on_epoch": True})),
    ),
    "LearningRateMonitor asked a module without optimizers for its rate": replace(
        PLAIN, optimizers=("none",), callbacks=(("LearningRateMonitor", {}),)
    ),
    "what a hook logged was not in the metrics that the next one looked at": replace(
        PLAIN, logs=(LOSS, Log("on_train_epoch_end", "a", "callback", {}), Log("on_train_start", "b", "callback", {}))
    ),
    "metrics of a loader were not there when the next one began": replace(PLAIN, val_loaders=(3, 4), logs=(LOSS, VAL)),
    "a resume of LBFGS was refused": replace(PLAIN, optimizers=("lbfgs",), calls=("fit", "resume"), batch_size=6),
    "layers of configure_model were made in float32 under bf16-true": replace(
        PLAIN, late=True, flags={**PLAIN.flags, "precision": "bf16-true"}
    ),
    "the run's seed was drawn from what the user's layers are drawn from": replace(PLAIN, late=True),
    "a checkpoint that a user had saved again by torch.save was refused": replace(
        PLAIN, calls=("fit", "resume rewritten")
    ),
    "a checkpoint that a user had edited was refused": replace(PLAIN, calls=("fit", "resume edited")),
    "single steps of a second fit's validations were not counted anew": replace(
        PLAIN, calls=("fit", "fit on"), logs=(LOSS, Log("validation_step", "a", "module", {"on_step": True}))
    ),
    "an exception in on_fit_end was not told to on_exception": replace(
        PLAIN, acts=(Act("raise", "callback.on_fit_end", 1),)
    ),
    "an exponential average differed in its last bits": replace(
        PLAIN, train_samples=(11, 4), callbacks=(("EMAWeightAveraging", {"decay": 0.9}),)
    ),
    "a step's value was shown again over a validation's of its name": replace(
        PLAIN,
        flags={**PLAIN.flags, "log_every_n_steps": 3},
        logs=(LOSS, Log("validation_step", "a", "module", {}), Log("on_train_batch_end", "a", "callback", {})),
    ),
    "one name logged twice in a hook, once by the hook's defaults and once as these say, was refused": replace(
        PLAIN,
        logs=(
            LOSS,
            Log("on_train_batch_end", "a", "callback", {}),
            Log("on_train_batch_end", "a", "callback", {"on_step": True}),
        ),
    ),
    "of two hooks of a step that log a name the first one's value was shown": replace(
        PLAIN,
        flags={**PLAIN.flags, "log_every_n_steps": 2},
        logs=(
            LOSS,
            Log("on_train_batch_start", "a", "callback", {"on_epoch": False, "logger": False}),
            Log("training_step", "a", "module", {}),
        ),
    ),
    "min_steps alone did not ask for a first epoch": replace(
        PLAIN, flags={**PLAIN.flags, "min_steps": 2}, acts=(Act("stop", "training_step", 1),)
    ),
}


@pytest.mark.parametrize("fault", [case(fault, program) for fault, program in FOUND.items()])
def test_what_programs_found_stays_mended(fault: str) -> None:
    verdict: Verdict = compare(FOUND[fault])
    assert not verdict.unexplained, "\n".join(map(str, verdict.unexplained))


# A program is compared in the same way for each row: every day for some of them, beside random programs, which find
# differences that no row explains.
@pytest.mark.everyday(24)
@pytest.mark.parametrize("row", [case(row, row.shown_by) for row in ROWS], ids=lambda row: row.sentence[:60])
def test_a_row_is_shown_by_a_program(row: Row) -> None:
    verdict = compare(row.shown_by)
    assert not verdict.unexplained, "\n".join(map(str, verdict.unexplained))
    assert row in [found for _, found in verdict.explained]


def test_a_row_names_a_page_that_is_there() -> None:
    root = Path(__file__).parents[2]
    for row in ROWS:
        page, _, place = row.where.partition(": ")
        place = place or (row.sentence if page == PAGE else "")
        assert (root / page).is_file(), row
        assert place in (root / page).read_text(), row


def test_a_comparison_finds_each_kind_of_difference() -> None:
    def shown() -> Record:
        return Record(
            events=[("module.setup", {"global_step": 0})],
            ends=[("0 fit", {"weights": "a"})],
            rows=[(0, {"loss": 1.0})],
            files={"metrics.csv": [{"loss": 1.0}]},
            checkpoints={"last.ckpt": {"epoch": 1}},
        )

    assert not differences(shown(), shown())
    changes = {
        "order": Record(events=[("callback.setup", {})]),
        "fact": Record(events=[("module.setup", {"global_step": 1})]),
        "end": Record(ends=[("0 fit", {"raised": ["ValueError"]})]),
        "rows": Record(rows=[]),
        "files": Record(files={}),
        "checkpoint": Record(checkpoints={"last.ckpt": {"epoch": 2}}),
        "warnings": Record(warned={("UserWarning", "`max_epochs` was not set")}),
    }
    for kind, change in changes.items():
        other = shown()
        for name in ("events", "ends", "warned"):
            if getattr(change, name):
                setattr(other, name, getattr(change, name))
        if kind in ("rows", "files"):
            setattr(other, kind, getattr(change, kind))
        if kind == "checkpoint":
            other.checkpoints = change.checkpoints
        assert kind in [difference.kind for difference in differences(shown(), other)]
