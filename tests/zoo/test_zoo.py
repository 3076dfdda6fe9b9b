"""The contract, over a zoo of users' modules: ranks show what one process shows, and a run that goes on in mid-epoch
ends with the bits of one that did not stop. A part of them is drawn each day; all run where slow tests do."""

from __future__ import annotations

import os
import random
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.callbacks import Checkpoint
from tests.fuzz.compare import differences
from tests.fuzz.program import Rows, Shown
from tests.loop.pieces import SaveAt, quiet
from tests.tools.pool import RankFailure, RankPool
from tests.zoo.members import MEMBERS

pytestmark = pytest.mark.timeout(120)
GLOBAL_BATCH = 4
RANKED = ("ddp", "fsdp")
DRAWN = 2
"""How many are drawn each day."""
TODAY = random.Random(date.today().toordinal()).sample(list(MEMBERS), DRAWN)


def run(name: str, engine: str, save_to: str = "", resume_from: str = "") -> Shown:
    """Fit a member on the ranks that are there; gives what this rank shows."""
    member, shown = MEMBERS[name], Shown()
    size = 1 if engine == "auto" else torch.distributed.get_world_size()
    rank = 0 if engine == "auto" else torch.distributed.get_rank()
    torch.manual_seed(5 + rank)  # rank 0's weights are everybody's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet(
            strategy=engine,
            devices=size,
            precision="64-true",
            max_epochs=2,
            logger=Rows(shown),
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            callbacks=[SaveBehind(1, save_to)] if save_to else [],
            enable_checkpointing=bool(save_to),
            **member.flags,
        )
        trainer.seed = 11
        module = member.kind()
        batch = GLOBAL_BATCH // size
        valid = member.loader(batch) if name != "several loaders" else member.loader(batch)["b"]
        trainer.fit(module, member.loader(batch), valid, ckpt_path=resume_from or None)
    shown.metrics = rounded(trainer.callback_metrics, member.digits)
    shown.rows = [(step, rounded(row, member.digits)) for step, row in shown.rows]
    whole = {key: value for key, value, _ in trainer.strategy.whole_parameters()}
    shown.parameters = {key: value.detach().clone() for key, value in whole.items()}
    return shown


class SaveBehind(SaveAt, Checkpoint):
    """Saves behind the module's own `on_train_batch_end`, as a ModelCheckpoint does."""


def rounded(values: Any, digits: int | None) -> dict[str, float]:
    return {key: float(value if digits is None else f"{float(value):.{digits}g}") for key, value in values.items()}


def check_ranks(ranks: RankPool, name: str, engine: str) -> None:
    expected = run(name, "auto")
    words = MEMBERS[name].refused.get(engine)
    if words is not None:
        with pytest.raises(RankFailure, match=words):
            ranks(2).run(run, name, engine, timeout=60)
        return
    assert not differences(expected, ranks(2).run(run, name, engine, timeout=60))


def check_resume(folder: Path, name: str) -> None:
    path = os.path.join(folder, "saved.ckpt")
    whole = run(name, "auto", save_to=path)
    on = run(name, "auto", resume_from=path)
    assert whole.metrics == on.metrics
    for key, value in whole.parameters.items():
        assert torch.equal(value, on.parameters[key]), key
    assert whole.rows[-len(on.rows) :] == on.rows


@pytest.mark.everyday
@pytest.mark.parametrize("engine", RANKED)
@pytest.mark.parametrize("name", TODAY)
def test_ranks_show_what_one_process_shows(ranks: RankPool, name: str, engine: str) -> None:
    check_ranks(ranks, name, engine)


def test_what_hooks_write_between_forward_and_backward_stays(ranks: RankPool) -> None:
    """Under fsdp, in `on_before_zero_grad` and `on_before_backward`, parameters were those gathered for the backward,
    which are freed behind it, and with them what a hook had written."""
    check_ranks(ranks, "a target net in a step", "fsdp")


@pytest.mark.parametrize("name", TODAY)
def test_a_run_that_goes_on_in_mid_epoch_has_the_same_bits(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", RANKED)
@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in TODAY])
def test_ranks_show_what_one_process_shows_of_all(ranks: RankPool, name: str, engine: str) -> None:
    check_ranks(ranks, name, engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in TODAY])
def test_runs_that_go_on_in_mid_epoch_have_the_same_bits(tmp_path: Path, name: str) -> None:
    check_resume(tmp_path, name)
