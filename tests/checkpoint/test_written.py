"""Checkpoints that earlier trees have written, of each strategy at each moment, are gone on from to the right end."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lockstep.plugins.io import TorchCheckpointIO
from tests.checkpoint.written import BOUNDARY, DATA, RESUMED, RUNS, WINDOW, End, differs, kind, play_of, unpack
from tests.tools.pool import RankPool

FORMATS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))
SAVED = [(run, moment) for run, how in RUNS.items() for moment in how.moments]
THREE = "ddp, then 3 ranks"
OTHERS = ("ddp", THREE, "fsdp in parts", "tensor parallel", "pipeline")

pytestmark = pytest.mark.timeout(110)

Written = tuple[Path, dict[str, End]]


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    return folder, unpack(request.param, folder)


def go_on(ranks: RankPool, written: Written, run: str, path: Path, reader: str) -> str | None:
    """What is wrong with the end of a run that another goes on with from a checkpoint."""
    found = ranks(RUNS[reader].ranks).run(play_of, reader, run, None, path, timeout=100)[0]
    return differs(found, written[1][kind(RUNS[run])], RUNS[run].single)


def case(run: str, moment: str, *others: str, everyday: bool) -> Any:
    marks: list[pytest.MarkDecorator] = [] if everyday else [pytest.mark.slow]
    if {run, *others} & {"balance", "pipeline"}:
        marks.append(pytest.mark.extension("balancing"))
    if run.startswith("deepspeed"):
        marks.append(pytest.mark.extension("deepspeed"))
        marks.append(pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"))
    return pytest.param(run, moment, *others, marks=marks)


def is_hardest(run: str, moment: str) -> bool:
    """Within a window, where the strategy can be saved there."""
    return moment in (WINDOW, RESUMED) or (moment == BOUNDARY and RUNS[run].single)


@pytest.mark.everyday(5)
@pytest.mark.parametrize(
    ("run", "moment"), [case(*saved, everyday=is_hardest(*saved) and RUNS[saved[0]].ranks == 2) for saved in SAVED]
)
def test_a_checkpoint_is_gone_on_from_as_it_was_written(
    ranks: RankPool, written: Written, run: str, moment: str
) -> None:
    wrong = go_on(ranks, written, run, written[0] / run / moment, run)
    assert wrong is None, wrong


@pytest.mark.everyday
@pytest.mark.parametrize(("run", "moment"), [case(*saved, everyday=True) for saved in SAVED])
def test_one_process_goes_on_from_any(ranks: RankPool, written: Written, run: str, moment: str) -> None:
    wrong = go_on(ranks, written, run, written[0] / run / moment, "one process")
    assert wrong is None, wrong


@pytest.mark.parametrize(
    ("run", "moment", "reader"),
    [case(*saved, reader, everyday=False) for reader in OTHERS for saved in SAVED if reader != saved[0]],
)
def test_other_ranks_and_strategies_go_on_from_any(
    ranks: RankPool, written: Written, run: str, moment: str, reader: str
) -> None:
    wrong = go_on(ranks, written, run, written[0] / run / moment, reader)
    assert wrong is None, wrong


# -- what is compared is compared ----------------------------------------------------------------------------


LOSES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "gradients": lambda checkpoint: [part.pop("gradients") for part in checkpoint["lockstep"]["ranks"]],
    "what was logged": lambda checkpoint: [part.pop("results") for part in checkpoint["lockstep"]["ranks"]],
    "states": lambda checkpoint: checkpoint["optimizer_states"][0]["state"].clear(),
    "a batch": lambda checkpoint: checkpoint["lockstep"]["progress"].update(
        batch=checkpoint["lockstep"]["progress"]["batch"] - 1
    ),
}


@pytest.mark.parametrize("loses", LOSES)
def test_a_reader_that_loses_something_ends_elsewhere(
    ranks: RankPool, written: Written, tmp_path: Path, loses: str
) -> None:
    checkpoint = TorchCheckpointIO().load_checkpoint(written[0] / "ddp" / WINDOW)
    LOSES[loses](checkpoint)
    TorchCheckpointIO().save_checkpoint(checkpoint, tmp_path / "lost.ckpt")
    assert go_on(ranks, written, "ddp", tmp_path / "lost.ckpt", "ddp") is not None
