"""The table of known differences between Lightning 2.6.6 and lockstep, in what programs show."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.differential.play import same
from tests.differential.program import COMBINED

if TYPE_CHECKING:
    from tests.differential.compare import Difference
    from tests.differential.play import Record
    from tests.differential.program import Program


@dataclass(frozen=True)
class Row:
    """A difference on purpose.

    Attributes:
        sentence: what differs, and why.
        where: the file of the docs that tells it, and the name of its row there.
        holds: whether it explains a difference of a program.
    """

    sentence: str
    where: str
    holds: Callable[[Program, Difference, Record, Record], bool]
    goes_on: bool = False
    """Whether what comes after it in the run is another, too."""


PAGE = "docs/lightning.md"


def _fact(*names: str) -> Callable[[Program, Difference, Record, Record], bool]:
    return lambda program, d, theirs, ours: d.kind in ("fact", "end") and d.name in names


def _logged_in_this_hook(program: Program, d: Difference, theirs: Record, ours: Record) -> bool:
    if d.kind != "fact" or not d.name.endswith("_metrics"):
        return False
    unlike = [name for name in {**d.theirs, **d.ours} if not same(d.theirs.get(name), d.ours.get(name))]
    own = [log.name for log in program.logs if d.where.endswith(log.hook) or log.hook.endswith("_start")]
    return all(any(name.startswith(part) for part in own) for name in unlike)


def _has(program: Program, kind: str) -> bool:
    return any(name == kind for name, _ in program.callbacks)


ROWS = [
    Row(
        "`training_step(dataloader_iter)` is refused by name.",
        PAGE,
        lambda program, d, theirs, ours: program.iter_step and "fit" in str(program.calls),
        goes_on=True,
    ),
    Row(
        "limit_train_batches=0: the loader is asked for, and the log says that there is nothing to train.",
        PAGE,
        lambda program, d, theirs, ours: program.flags.get("limit_train_batches") == 0,
        goes_on=True,
    ),
    Row(
        "With 64-true Lightning loads a checkpoint's weights into float32 and casts them after it; here they keep "
        "their bits.",
        PAGE,
        lambda program, d, theirs, ours: (
            program.flags.get("precision") == "64-true" and d.where.endswith("on_load_checkpoint")
        ),
        goes_on=True,
    ),
    Row(
        "A closure that LBFGS calls again runs all micro-batches of its window, and each of them is logged once.",
        "docs/architecture.md: One step",
        lambda program, d, theirs, ours: (
            program.optimizers == ("lbfgs",) and (d.name.endswith("_metrics") or _accumulates(program))
        ),
        goes_on=True,
    ),
    Row(
        "What a hook logs is in the metrics when all callbacks and the module had the hook; an epoch's, at its end.",
        PAGE,
        _logged_in_this_hook,
    ),
    Row(
        "Callbacks' on_save_checkpoint runs for files that hold weights only, too: it may put other weights in.",
        PAGE,
        lambda program, d, theirs, ours: (
            d.kind == "order"
            and "callback.on_save_checkpoint" in d.ours[:1]
            and "callback.on_save_checkpoint" not in d.theirs[:1]
            and any(settings.get("save_weights_only") for _, settings in program.callbacks)
        ),
        goes_on=True,
    ),
    Row(
        "Loaders side by side: a batch weighs what our loader drew for it, in Lightning as much as its first tensor.",
        "docs/architecture.md: Micro-batches weigh their samples",
        lambda program, d, theirs, ours: program.train in COMBINED and d.name.endswith("_metrics"),
        goes_on=True,
    ),
    Row(
        "A resumed run goes on with the order of data of its own epoch; Lightning draws the first epoch's again.",
        "README.md",
        lambda program, d, theirs, ours: (
            "resume" in program.calls[-1] and program.train == "shuffled" and d.name == "arguments"
        ),
        goes_on=True,
    ),
    Row(
        "Loaders are asked for before gradients are switched off, in Lightning after it.",
        "tests/golden/test_hook_order.py",
        lambda program, d, theirs, ours: d.name == "grad mode" and d.where.endswith("_dataloader"),
    ),
    Row(
        "Metrics of several loaders are there in on_validation_epoch_end (on_test_epoch_end), and those of one are not "
        "before its loader's end; in Lightning they come into callback_metrics when the next loader begins.",
        PAGE,
        lambda program, d, theirs, ours: (
            len(program.val_loaders) > 1
            and d.kind in ("fact", "end")
            and d.name.endswith("_metrics")
            and (d.kind == "end" or "_validation_" in d.where or "_test_" in d.where or "_sanity_" in d.where)
        ),
    ),
    Row(
        "accumulate_grad_batches is that of the epoch from the start; 1 again after the fit.",
        f"{PAGE}: GradientAccumulationScheduler",
        lambda program, d, theirs, ours: (
            d.name in ("accumulate_grad_batches", "estimated_stepping_batches")
            and any(kind == "GradientAccumulationScheduler" for kind, _ in program.callbacks)
        ),
    ),
    Row(
        "estimated_stepping_batches is infinite for a loader without length and no max_steps.",
        f"{PAGE}: estimated_stepping_batches",
        lambda program, d, theirs, ours: d.name == "estimated_stepping_batches" and program.train == "iterable",
    ),
    Row(
        "The last, partial window is divided by the samples that are there.",
        f"{PAGE}: accumulate_grad_batches",
        lambda program, d, theirs, ours: (
            d.where.endswith(("on_before_backward", "module.backward", "on_train_batch_end"))
            and d.name == "arguments"
            and _accumulates(program)
        ),
        goes_on=True,
    ),
    Row(
        "A training loader without batches is refused by name; Lightning's fit ends without a step.",
        PAGE,
        lambda program, d, theirs, ours: "has no batches" in str(ours.ends),
        goes_on=True,
    ),
    Row(
        "is_last_batch is false before the first batch of a fit, and where a user ends the epoch before the loader.",
        "tests/golden/test_hook_order.py",
        _fact("is_last_batch"),
    ),
    Row(
        "In manual optimization the entry of a plateau scheduler keeps its monitor; Lightning drops it.",
        PAGE,
        lambda program, d, theirs, ours: program.manual and d.name == "schedulers",
    ),
    Row(
        "ckpt_path is there from the start of the call.",
        PAGE,
        lambda program, d, theirs, ours: d.name == "ckpt_path" and d.theirs is None,
    ),
    Row(
        "The pass for SWA's BatchNorm statistics is no epoch of its own.",
        f"{PAGE}: StochasticWeightAveraging",
        lambda program, d, theirs, ours: (
            d.name in ("max_epochs", "estimated_stepping_batches", "schedulers")
            and _has(program, "StochasticWeightAveraging")
        ),
        goes_on=True,
    ),
    Row(
        "configure_gradient_clipping is given 'norm' where no algorithm was chosen, in Lightning None.",
        f"{PAGE}: gradient_clip_algorithm",
        lambda program, d, theirs, ours: d.where == "module.configure_gradient_clipping" and d.name == "arguments",
    ),
    Row(
        "Numbers of batches are those of this call: infinite or empty until its loaders are asked for.",
        PAGE,
        lambda program, d, theirs, ours: (
            d.kind == "fact" and d.name.startswith(("num_", "val_check_batch")) and d.ours in (math.inf, [], None)
        ),
    ),
    Row(
        "A call that lacks data or a checkpoint is refused before its first hook.",
        PAGE,
        lambda program, d, theirs, ours: any(
            words in str(ours.ends) for words in ("no data: pass", 'ckpt_path="best"', "ckpt_path='best'", "'last'")
        ),
        goes_on=True,
    ),
    Row(
        "Without validation Lightning's pass for SWA ends with a step along the last epoch's gradient.",
        f"{PAGE}: StochasticWeightAveraging",
        lambda program, d, theirs, ours: d.name == "weights" and _has(program, "StochasticWeightAveraging"),
        goes_on=True,
    ),
    Row(
        "current_epoch counts finished epochs: a fit that ended within one has not finished it.",
        f"{PAGE}: current_epoch",
        lambda program, d, theirs, ours: (
            d.name == "current_epoch" and isinstance(d.ours, int) and d.theirs == d.ours + 1
        ),
    ),
    Row(
        "KeyboardInterrupt raised in a hook comes out of the call; Lightning exits the process with 1.",
        PAGE,
        lambda program, d, theirs, ours: d.name == "raised" and "SystemExit" in d.theirs and "Keyboard" in d.ours,
        goes_on=True,
    ),
    Row(
        "Batches weigh by the samples that our loader drew, so that no size is guessed from tensors, or warned of.",
        "docs/architecture.md: Micro-batches weigh their samples",
        lambda program, d, theirs, ours: d.kind == "warnings" and d.where == "batch size" and d.theirs,
    ),
]


def _accumulates(program: Program) -> bool:
    return "accumulate_grad_batches" in program.flags or any(
        kind == "GradientAccumulationScheduler" for kind, _ in program.callbacks
    )


def explain(program: Program, difference: Difference, theirs: Record, ours: Record) -> Row | None:
    """The row that explains a difference, if one does."""
    return next((row for row in ROWS if row.holds(program, difference, theirs, ours)), None)
