"""PruneTrial: what it reports, and that a pruned trial ends on all ranks at the same step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

optuna = pytest.importorskip("optuna")

from lockstep import LightningModule  # noqa: E402
from lockstep.callbacks import PruneTrial  # noqa: E402
from lockstep.extensions.search.journal import StudyJournal  # noqa: E402
from lockstep.extensions.search.parser import HyperOptArgumentParser, Hyperparameters, running_trial  # noqa: E402
from lockstep.extensions.search.trials import JOURNAL  # noqa: E402
from lockstep.ground.errors import MisconfigurationException  # noqa: E402
from tests.loop.pieces import on_ranks, quiet  # noqa: E402
from tests.tools.pool import RankPool  # noqa: E402

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Rises(LightningModule):
    """Logs 0, 1, 2, ... once an epoch, plus what its rank adds."""

    def __init__(self, added: float = 0.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.added = added

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def on_train_epoch_end(self) -> None:
        self.log("loss", self.current_epoch + self.added, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Validates(Rises):
    """Logs the number of steps at each validation."""

    def on_train_epoch_end(self) -> None: ...

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.global_step))


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(8, 1), batch_size=2)


def drawn(folder: Path, number: int = 0, above: float = 2.5) -> Hyperparameters:
    """A trial that begins here, and is pruned when its value rises above a number."""
    parser = HyperOptArgumentParser(strategy="optuna", pruner=optuna.pruners.ThresholdPruner(upper=above))
    parser.opt_range("--lr", type=float, low=0.1, high=1.0, tunable=True)
    return parser.parse_args([]).draw(number, folder)


def entries(folder: Path) -> list[Any]:
    storage = optuna.storages.JournalStorage(StudyJournal(str(folder / JOURNAL)))
    return list(optuna.load_study(study_name=folder.name, storage=storage).trials)


def test_a_trial_is_stopped_when_the_study_gives_it_up(tmp_path: Path) -> None:
    hparams, callback = drawn(tmp_path), PruneTrial("loss")
    trainer = quiet(max_epochs=9, callbacks=[callback])
    trainer.fit(Rises(), loader())
    assert (callback.pruned, callback.checks, trainer.current_epoch) == (True, 4, 4)
    assert hparams.finish(0, "completed") == "pruned"
    (entry,) = entries(tmp_path)
    assert (entry.state.name, entry.intermediate_values) == ("PRUNED", {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0})
    assert running_trial() is None


def test_a_trial_that_comes_to_its_end_has_the_last_value(tmp_path: Path) -> None:
    hparams, callback = drawn(tmp_path), PruneTrial("loss")
    quiet(max_epochs=2, callbacks=[callback]).fit(Rises(), loader())
    assert hparams.finish(0, "completed") == "completed"
    assert (callback.pruned, entries(tmp_path)[0].value) == (False, 1.0)


def test_several_validations_an_epoch_are_several_reports(tmp_path: Path) -> None:
    hparams = drawn(tmp_path, above=99)
    trainer = quiet(max_epochs=2, val_check_interval=0.5, num_sanity_val_steps=1, callbacks=[PruneTrial("loss")])
    trainer.fit(Validates(), loader(), loader())
    hparams.finish(0, "completed")
    assert entries(tmp_path)[0].intermediate_values == {0: 2.0, 1: 4.0, 2: 6.0, 3: 8.0}


def test_reports_are_counted_on_over_a_resume(tmp_path: Path) -> None:
    hparams, first = drawn(tmp_path / "study", above=99), PruneTrial("loss")
    trainer = quiet(max_epochs=2, callbacks=[first])
    trainer.fit(Rises(), loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    quiet(max_epochs=3, callbacks=[PruneTrial("loss")]).fit(Rises(), loader(), ckpt_path=tmp_path / "last.ckpt")
    hparams.finish(0, "completed")
    assert entries(tmp_path / "study")[0].intermediate_values == {0: 0.0, 1: 1.0, 2: 2.0}


def test_a_trial_that_began_anew_kept_the_values_of_its_failed_start(tmp_path: Path) -> None:
    hparams = drawn(tmp_path, above=999)
    quiet(max_epochs=3, callbacks=[PruneTrial("loss")]).fit(Rises(added=100.0), loader())
    hparams.finish(0, "failed")
    hparams = drawn(tmp_path, above=999)
    quiet(max_epochs=2, callbacks=[PruneTrial("loss")]).fit(Rises(), loader())
    assert hparams.finish(0, "completed") == "completed"
    failed, completed = entries(tmp_path)
    assert (failed.state.name, failed.intermediate_values) == ("FAIL", {0: 100.0, 1: 101.0, 2: 102.0})
    assert (completed.value, completed.intermediate_values) == (1.0, {0: 0.0, 1: 1.0})


def test_outside_of_a_trial_it_does_nothing() -> None:
    callback = PruneTrial("loss")
    trainer = quiet(max_epochs=2, callbacks=[callback])
    trainer.fit(Rises(), loader())
    assert (callback.pruned, trainer.current_epoch) == (False, 2)


def test_a_metric_that_was_never_logged_is_an_error(tmp_path: Path) -> None:
    hparams = drawn(tmp_path)
    with pytest.raises(MisconfigurationException, match=r"PruneTrial\(monitor='los'\).*Logged so far: 'loss'"):
        quiet(max_epochs=2, callbacks=[PruneTrial("los")]).fit(Rises(), loader())
    hparams.finish(0, "failed")


# -- two ranks ------------------------------------------------------------------------------------------------


def pruned_on_ranks(folder: str) -> tuple[int, int, bool, dict[int, float]]:
    rank = torch.distributed.get_rank()
    hparams = drawn(Path(folder), above=2.25) if rank == 0 else None
    callback = PruneTrial("loss")
    trainer = on_ranks(max_epochs=9, callbacks=[callback])
    trainer.fit(Rises(added=rank), loader())  # the ranks' mean is half a step above what rank 0 logs
    if hparams is not None:
        hparams.finish(0, "completed")
    entry = entries(Path(folder))[0]
    return trainer.global_step, trainer.current_epoch, callback.pruned, entry.intermediate_values


def test_a_pruned_trial_ends_on_both_ranks_at_the_same_step(ranks: Any, tmp_path: Path) -> None:
    pool: RankPool = ranks(2)
    first, second = pool.run(pruned_on_ranks, str(tmp_path))
    assert first[:3] == second[:3] == (6, 3, True)
    assert first[3] == {0: 0.5, 1: 1.5, 2: 2.5}


def journal_lost(folder: str) -> str:
    rank = torch.distributed.get_rank()
    hparams = drawn(Path(folder)) if rank == 0 else None
    callback = PruneTrial("loss")
    if rank == 0:
        trial = running_trial()
        assert trial is not None
        trial.report = lambda step, value: 1 / 0  # type: ignore[method-assign]
    try:
        on_ranks(max_epochs=2, callbacks=[callback]).fit(Rises(), loader())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if hparams is not None:
            hparams.finish(0, "failed")
    return ""


def test_a_report_that_fails_on_rank_0_fails_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(journal_lost, str(tmp_path))
    assert first.startswith("ZeroDivisionError")
    assert "ZeroDivisionError" in second
