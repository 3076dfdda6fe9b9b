"""What cannot work is said in one sentence, with its way out, before work starts where that can be known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from lockstep import LightningDataModule, LightningModule, Trainer
from lockstep.callbacks import Callback, EarlyStopping
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.ground.errors import CorruptCheckpoint, MisconfigurationException
from lockstep.loop.call import _prepare_data
from lockstep.names.table import former_methods
from lockstep.precision.base import Precision
from lockstep.testing import BoringModel, RandomDataset
from tests.loop.pieces import Slope, Stream, Validated, acting, heard, heard_again, numbers, on_ranks, quiet
from tests.tools.pool import RankFailure, RankPool


class NoStep(LightningModule):
    def configure_optimizers(self) -> Any:
        raise AssertionError("work has begun")


class NoOptimizer(LightningModule):
    def setup(self, stage: str) -> None:
        raise AssertionError("work has begun")

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def forward(self, x: Any) -> Any: ...


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.fit(NoStep(), numbers(1)), r"trainer.fit\(NoStep\): No `training_step\(\)` method defined"),
        (lambda t: t.fit(NoOptimizer(), numbers(1)), r"trainer.fit\(NoOptimizer\).*No `configure_optimizers\(\)`"),
        (lambda t: t.fit(Slope()), r"trainer.fit\(Slope\): there is no training data: pass `train_dataloaders=`"),
        (lambda t: t.fit(torch.nn.Linear(1, 1), numbers(1)), r"lockstep's `LightningModule`, not of `Linear`"),
        (lambda t: t.validate(NoOptimizer(), numbers(1)), r"trainer.validate\(NoOptimizer\).*No `validation_step\(\)`"),
        (
            lambda t: t.validate(Validated()),
            r"trainer.validate\(\): there is no data: .*`val_dataloader`",
        ),
        (lambda t: t.test(Slope(), numbers(1)), r"trainer.test\(Slope\).*No `test_step\(\)`"),
        (lambda t: t.predict(Slope(), numbers(1)), r"neither `predict_step` nor `forward`"),
        (lambda t: t.predict(NoOptimizer()), r"trainer.predict\(\): there is no data.*`predict_dataloader`"),
        (lambda t: t.validate(), r"trainer.validate\(model\): pass an instance of lockstep's `LightningModule`"),
        (
            lambda t: t.fit(Slope(), numbers(0)),
            r"has no batches, because its data set is empty \(length 0\)",
        ),
        (lambda t: t.fit(Slope(), numbers(3, 4, drop_last=True)), r"drop_last=True drops .* 3 samples.*batch_size=4"),
        (lambda t: t.fit(Slope(), []), r"train_dataloader.*no loader"),
        (
            lambda t: t.fit(Slope(), numbers(1), ckpt_path="best"),
            r'ckpt_path="best"\).*`ModelCheckpoint` is not configured',
        ),
        (lambda t: t.save_checkpoint("x.ckpt"), r"save_checkpoint\('x.ckpt'\): there is nothing to save"),
    ],
)
def test_calls_that_cannot_work(call: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said) as raised:
        call(quiet(max_epochs=1))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_a_module_without_a_step_is_refused_before_processes_are_started(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks imported everything, met, and each refused it in a traceback of its own."""

    def start(*args: object) -> None:
        raise AssertionError("processes are started")

    trainer = quiet(strategy=strategy, devices=2, max_epochs=1)
    monkeypatch.setattr(trainer, "_launch", start)
    for call, method in ((trainer.fit, "training_step"), (trainer.test, "test_step")):
        with pytest.raises(MisconfigurationException, match=rf"\(NoStep\): No `{method}\(\)` method defined"):
            call(NoStep(), numbers(2))


@pytest.mark.parametrize("returned", ["loss", 3.0, {"los": torch.tensor(1.0)}, {"loss": 1.0}])
def test_a_training_step_that_returns_something_else(returned: Any) -> None:
    with pytest.raises(MisconfigurationException, match=r'`training_step` returned \w+: return the loss.*"loss"'):
        quiet(max_epochs=1).fit(acting(training_step=lambda *_: returned), numbers(1))


class Returns(Slope):
    """Its loss is what a function makes of the one that could be trained."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.change(self.w * batch)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.detach().mean(), "a loss that does not require gradients: it was detached"),
        (lambda loss: torch.tensor(loss.mean().item()), "a loss that does not require gradients"),
        (lambda loss: loss, r"a loss of shape \(2,\): use one number, for example `loss.mean\(\)`"),
    ],
)
def test_a_loss_without_a_way_back(change: Any, said: str) -> None:
    """It was torch's own sentence of an element 0."""

    class ByHand(Returns):
        def __init__(self) -> None:
            super().__init__(change)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))

    for module, who in ((Returns(change), "`training_step` returned"), (ByHand(), r"manual_backward\(\) was given")):
        with pytest.raises(MisconfigurationException, match=f"{who} {said}"):
            quiet(max_epochs=1).fit(module, numbers(2, 2))


def test_an_error_of_a_backward_that_is_not_the_loss_s_stays_itself() -> None:
    def change(loss: Any) -> Any:
        loss.register_hook(lambda gradient: 1 / 0)
        return loss.mean()

    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1).fit(Returns(change), numbers(2, 2))

    class Fails(Slope):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        quiet(max_epochs=1).fit(Fails(), numbers(2, 2))


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}])
def test_an_epoch_of_none_is_warned_of_once(flags: dict[str, Any]) -> None:
    module = Returns(lambda loss: None)
    trainer = quiet(max_epochs=2, **flags)
    said = heard(lambda: trainer.fit(module, numbers(4)), "training_step")
    assert said == [
        "`training_step` returned None: the micro-batch is skipped. If this is not intended, return the loss."
    ]
    assert (trainer.current_epoch, module.w.item()) == (2, 0.0)


def test_none_for_an_optimizer_that_steers_by_the_loss() -> None:
    """LBFGS ended in float(None)."""

    class ByLoss(Returns):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(MisconfigurationException, match=r"LBFGS.*`training_step` returned None.*return the loss"):
        quiet(max_epochs=1).fit(ByLoss(lambda loss: None), numbers(1))


def test_a_stream_that_is_shorter_than_the_ranks(ranks: RankPool) -> None:
    def fit(by_hand: bool) -> None:
        module = Slope()
        module.automatic_optimization = not by_hand
        on_ranks(max_epochs=1).fit(module, DataLoader(Stream(1)))

    ranks(2).run(fit, False, timeout=20)
    with pytest.raises(RankFailure, match="has fewer samples than there are ranks"):
        ranks(2).run(fit, True, timeout=20)


# -- checkpoints -------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    trainer, path = quiet(max_epochs=1), tmp_path / "good.ckpt"
    trainer.fit(Slope(), numbers(2))
    trainer.save_checkpoint(path)
    return path


def resume(path: Path) -> None:
    module = acting(training_step=lambda *_: pytest.fail("work has begun"))
    quiet(max_epochs=2).fit(module, numbers(2), ckpt_path=path)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere.ckpt"):
        resume(tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize("damage", ["truncated", "a flipped bit"])
def test_a_damaged_checkpoint(written: Path, damage: str) -> None:
    content = bytearray(written.read_bytes())
    content[len(content) // 2] ^= 4 if damage == "a flipped bit" else 0
    written.write_bytes(content[:-200] if damage == "truncated" else content)
    with pytest.raises(CorruptCheckpoint, match=r"good.ckpt"):
        resume(written)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "notes.ckpt"
    path.write_text("not a checkpoint")
    with pytest.raises(CorruptCheckpoint, match=r"notes.ckpt"):
        resume(path)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises((CorruptCheckpoint, MisconfigurationException), match="state_dict"):
        resume(path)


def test_what_cannot_be_read_back_is_refused_and_the_earlier_file_stays(written: Path) -> None:
    def add(module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = {"function": print}

    before = written.read_bytes()
    trainer = quiet(max_epochs=1)
    trainer.fit(acting(on_save_checkpoint=add), numbers(1))
    with pytest.raises(MisconfigurationException, match=r'checkpoint\["extra"\]\["function"\]'):
        trainer.save_checkpoint(written)
    assert written.read_bytes() == before
    assert list(written.parent.iterdir()) == [written]


def test_a_path_that_cannot_be_written_is_told_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def save() -> str:
        trainer = on_ranks(max_epochs=1)
        trainer.fit(Slope(), numbers(2))
        try:
            trainer.save_checkpoint(tmp_path / "file" / "x.ckpt")
        except (OSError, RuntimeError) as error:
            return str(error)
        return ""

    assert all("x.ckpt" in said or "file" in said for said in ranks(2).run(save, timeout=30))


# -- Errors and warnings of the kinds that Lightning raises, so that what programs catch is caught here, too -----


class NoState:
    """A scheduler that cannot be saved."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        pass


class Scheduled(BoringModel):
    """Its schedule is what ``make`` makes of the optimizer."""

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any], **entry: Any) -> None:
        super().__init__()
        self.make, self.entry = make, entry

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.entry}]


def loader() -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, 4))


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: quiet().fit(nn.Linear(2, 2)),  # type: ignore[arg-type]
        lambda: quiet().validate(None, loader()),
        lambda: Trainer(gradient_clip_val="much"),  # type: ignore[arg-type]
        lambda: Trainer(accelerator="cpu", devices=[0, 1]),
        lambda: quiet(max_steps=1).fit(clips(gradient_clip_val="much"), loader()),
        lambda: quiet(max_steps=1).fit(Scheduled(NoState), loader()),
        lambda: quiet().fit(BoringModel(), object()),
        lambda: quiet().validate(BoringModel(), object()),
        lambda: quiet().predict(BoringModel(), {"a": 3}),
    ],
    ids=["module", "no module", "flag", "devices", "clipping", "scheduler", "train", "val", "predict"],
)
def test_what_is_of_a_wrong_type_is_a_type_error_too(mistake: Callable[[], Any]) -> None:
    with pytest.raises(TypeError) as caught:
        mistake()
    assert isinstance(caught.value, MisconfigurationException)


def test_a_loader_that_gives_no_batches_is_named() -> None:
    with pytest.raises(MisconfigurationException, match=r"train_dataloader is <object .*> *, an? object, which cannot"):
        quiet().fit(acting(BoringModel, train_dataloader=lambda m: object()))


def test_a_data_set_in_the_place_of_a_loader_was_trained_on_sample_by_sample_in_silence() -> None:
    module = BoringModel()
    with pytest.warns(
        UserWarning, match=r"train_dataloader is a RandomDataset, which is a data set.*DataLoader\(data_set, batch"
    ):
        quiet(max_steps=2).fit(module, RandomDataset(32, 8))  # type: ignore[arg-type]


def test_saving_before_there_is_a_module_is_an_attribute_error_too(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="nothing to save before the first fit"):
        quiet().save_checkpoint(tmp_path / "a.ckpt")


def one_cycle(optimizer: torch.optim.Optimizer) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=10)


def test_one_cycle_by_epochs_is_told(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.warns(RuntimeWarning, match=r"OneCycleLR expects.*\"interval\": \"step\""):
        quiet(max_steps=1).fit(Scheduled(one_cycle), loader())
    recwarn.clear()
    quiet(max_steps=1).fit(Scheduled(one_cycle, interval="step"), loader())
    assert not [each for each in recwarn if "OneCycleLR" in str(each.message)]


class TwoLoaders(BoringModel):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def test_hooks_of_batches_that_cannot_take_the_loaders_number_are_named() -> None:
    def ends(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def ends_anyhow(self: Any, *args: Any) -> None:
        self.seen = len(args)

    short, whole = (type("Ends", (TwoLoaders,), {"on_validation_batch_end": hook})() for hook in (ends, ends_anyhow))
    define = r"on_validation_batch_end\(self, outputs, batch, batch_idx, dataloader_idx=0\)"
    with pytest.raises(MisconfigurationException, match=rf"several loaders, but.*does not take.*`{define}`"):
        quiet().validate(short, [loader(), loader()])
    quiet().validate(short, loader())
    quiet().validate(whole, [loader(), loader()])
    assert whole.seen == 4


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_steps_of_evaluations_that_draw_themselves_are_refused_as_those_of_training(stage: str) -> None:
    def draws(self: Any, dataloader_iter: Any) -> None: ...

    name = {"validate": "validation"}.get(stage, stage)
    with pytest.raises(MisconfigurationException, match=rf"`{name}_step\(dataloader_iter\)` is not supported"):
        getattr(quiet(), stage)(type("Draws", (BoringModel,), {f"{name}_step": draws})(), loader())


def test_a_fit_that_goes_on_without_a_callback_says_whose_state_is_lost(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def callbacks() -> list[Callback]:
        return [EarlyStopping("a", check_on_train_epoch_end=True, strict=False)]

    trainer = quiet(max_epochs=1, callbacks=callbacks())
    trainer.fit(BoringModel(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    recwarn.clear()
    quiet(max_epochs=2, callbacks=callbacks()).fit(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")
    quiet().validate(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert not [each for each in recwarn if "states of callbacks" in str(each.message)]
    with pytest.warns(UserWarning, match=r"the states of callbacks that this Trainer does not have: EarlyStopping\{"):
        quiet(max_epochs=2).fit(BoringModel(), loader(), ckpt_path=tmp_path / "a.ckpt")


def test_a_name_may_not_end_as_those_of_several_loaders_do() -> None:
    module = acting(BoringModel, training_step=lambda m, *_: m.log("loss/dataloader_idx_0", 1.0))
    with pytest.raises(MisconfigurationException, match=r"'loss/dataloader_idx_0'.*remove it"):
        quiet(max_steps=1).fit(module, loader())


def clips(**settings: Any) -> Any:
    clip = lambda m, optimizer, *_: m.clip_gradients(optimizer, **settings) or True  # noqa: E731
    return acting(BoringModel, configure_gradient_clipping=clip)


def test_clipping_by_two_bounds_or_an_unknown_way_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0\.5\) differs.*gradient_clip_val=0\.1"):
        quiet(max_steps=1, gradient_clip_val=0.1).fit(clips(gradient_clip_val=0.5), loader())
    quiet(max_steps=1, gradient_clip_val=0.1).fit(clips(gradient_clip_val=0.1), loader())
    with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm='foo'"):
        quiet(max_steps=1).fit(clips(gradient_clip_algorithm="foo"), loader())


def test_the_loop_tells_which_batch_runs() -> None:
    seen: list[Any] = []

    def read(module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = module.trainer.fit_loop
        assert loop.batch_idx == loop.epoch_loop.batch_idx == batch_idx
        seen.append((loop.batch_idx, loop.total_batch_idx, loop.epoch_progress.current.completed))

    trainer = quiet(max_epochs=2, limit_train_batches=2)
    assert trainer.fit_loop.batch_idx == -1
    trainer.fit(acting(on_train_batch_end=read), numbers(4))
    assert seen == [(0, 0, 0), (1, 1, 0), (0, 2, 1), (1, 3, 1)]
    assert trainer.fit_loop.epoch_progress.current.completed == 2
    with pytest.raises(AttributeError, match=r"epoch_progress\.current\.completed, which .* sets, is an internal"):
        trainer.fit_loop.epoch_progress.current.completed = 5
    with pytest.raises(AttributeError, match=r"_batches_that_stepped, which .* sets"):
        trainer.fit_loop.epoch_loop._batches_that_stepped = 5


def test_predictions_that_are_none_are_told(recwarn: pytest.WarningsRecorder) -> None:
    class Every(BoringModel):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            return None if batch_idx % 2 else batch_idx

    assert quiet().predict(Every(), loader(), return_predictions=False) is None
    assert not [each for each in recwarn if "predict_step" in str(each.message)]
    with pytest.warns(UserWarning, match="`predict_step` returned None: the list of predictions has None"):
        assert quiet().predict(Every(), loader()) == [0, None, 2, None]


# -- What would otherwise happen without a word: a sentence each, that names the step or what to write -----------


# -- how long a fit is


def stops() -> Any:
    return acting(on_train_epoch_end=lambda m: setattr(m.trainer, "should_stop", True))


def test_a_fit_whose_epochs_nobody_chose_says_where_it_ends() -> None:
    [said] = heard_again(lambda: quiet().fit(stops(), numbers(3)), "max_epochs", "not set")
    assert "1000 epochs, at step 3000" in said
    assert "max_epochs=-1" in said
    for flags in ({"max_epochs": 1000}, {"max_steps": 2}, {"max_time": {"minutes": 1}}, {"fast_dev_run": True}):
        assert heard_again(lambda flags=flags: quiet(**flags).fit(stops(), numbers(3)), "not set") == []  # type: ignore[misc]
    assert heard_again(lambda: quiet().predict(acting(forward=lambda m, x: x), numbers(1)), "max_epochs") == []


def test_a_resume_beyond_the_limit_says_that_nothing_is_left(tmp_path: Any) -> None:
    trainer = quiet(max_epochs=3)
    trainer.fit(Slope(), numbers(2))
    path = str(tmp_path / "three.ckpt")
    trainer.save_checkpoint(path)

    def resume(**flags: Any) -> list[str]:
        return heard_again(lambda: quiet(**flags).fit(Slope(), numbers(2), ckpt_path=path), "nothing left to train")

    [said] = resume(max_epochs=3)
    assert "after step 6 and 3 epochs" in said
    assert "max_epochs=3 reached" in said
    assert path in said
    assert "max_steps=4 reached" in resume(max_epochs=9, max_steps=4)[0]
    assert resume(max_epochs=4) == []


# -- values that a step returns, as in 2019


class Of2019(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "log": {"train_loss": loss}, "progress_bar": {"train_loss": loss}}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return {"val_loss": batch.mean(), "text": "x"}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return {"test_loss": 1.0}


def test_returned_values_that_nobody_reads_are_named() -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    [said] = heard_again(lambda: trainer.fit(Of2019(), numbers(3), numbers(2)), "training_step")
    assert "['log', 'progress_bar']" in said
    assert "self.log_dict(values)" in said
    [said] = heard_again(lambda: quiet().validate(Of2019(), numbers(3)), "validation_step")
    assert "['val_loss']" in said
    assert "self.log('val_loss', value)" in said
    assert len(heard_again(lambda: quiet().test(Of2019(), numbers(3)), "self.log('test_loss', value)")) == 1
    reads = {"on_validation_batch_end": lambda *_: None}
    logs = {"on_validation_epoch_end": lambda m: m.log("val_loss", 1.0)}
    for hooks in (reads, logs):
        assert heard_again(lambda: quiet().validate(acting(Of2019, **hooks), numbers(3)), "validation_step") == []  # noqa: B023


# -- parts that do not learn as they seem to


def test_a_part_in_eval_mode_stayed_in_it_without_a_word() -> None:
    class Loaded(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout()).eval()  # as transformers gives it

    said = heard_again(lambda: quiet(max_epochs=1).fit(Loaded(), numbers(1)), "eval mode")
    assert len(said) == 1
    assert "'body' and 2 more" in said[0]
    assert not heard_again(lambda: quiet(max_epochs=1).fit(Slope(), numbers(1)), "eval mode")


# -- Losses that are means over labels, of which samples have different numbers: a fit says so once --------------


PADDED = [[1, 2, 3], [4, -100, -100]]
MASKED = [[1, -100, 3], [-100, 2, 3]]
WHOLE = [[1, 2, 3], [4, 5, 6]]


class Labels(LightningModule):
    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.words, self.weighs = nn.Embedding(8, 8), weighs

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        labels = batch["labels"]
        loss = nn.functional.cross_entropy(self.words(labels.clamp(min=0)).flatten(0, 1), labels.flatten())
        return {"loss": loss, "weight": (labels != -100).sum()} if self.weighs else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("rows", "weighs", "accumulate", "warns"),
    [
        (PADDED, False, 2, True),
        (PADDED, True, 2, False),
        (PADDED, False, 1, False),  # one process, one batch a step: there is no other way to cut it
        (MASKED, False, 2, False),
        (WHOLE, False, 2, False),
    ],
)
def test_a_mean_over_labels_that_is_not_weighed_by_them_is_named(
    rows: list[list[int]], weighs: bool, accumulate: int, warns: bool
) -> None:
    loader: Any = DataLoader([{"labels": torch.tensor(row)} for row in rows * 4], 2)  # type: ignore[arg-type]
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate)
    assert len(heard(lambda: trainer.fit(Labels(weighs), loader), "labels that are not -100")) == warns


# -- Where a rank is, as those who look for hangs are told -------------------------------------------------------


# -- On which processes `prepare_data` runs: one of each node, or one of all -------------------------------------


class Data(LightningDataModule):
    def prepare_data(self) -> None:
        called.append("data")


class Module(Slope):
    def prepare_data(self) -> None:
        called.append("module")


called: list[str] = []


def prepared(local_rank: int, is_global_zero: bool, **per_node: bool) -> list[str]:
    """Whose `prepare_data` runs on a rank, which waits for the others."""
    called.clear()
    barriers: list[str] = []
    parts: dict[str, Any] = {"datamodule": Data(), "module": Module()}
    for part, flag in zip(parts.values(), per_node.values(), strict=True):
        part.prepare_data_per_node = flag
    strategy = SimpleNamespace(barrier=barriers.append, world=SimpleNamespace(local_rank=local_rank))
    _prepare_data(SimpleNamespace(**parts, is_global_zero=is_global_zero, strategy=strategy))  # type: ignore[arg-type]
    assert barriers == ["prepare_data"]
    return called


@pytest.mark.parametrize(
    ("local_rank", "is_global_zero", "per_node", "runs"),
    [
        (0, True, True, True),
        (0, True, False, True),
        (0, False, True, True),
        (0, False, False, False),
        (1, False, True, False),
        (1, False, False, False),
    ],
)
def test_where_it_runs(local_rank: int, is_global_zero: bool, per_node: bool, runs: bool) -> None:
    found = prepared(local_rank, is_global_zero, data=per_node, module=per_node)
    assert found == (["data", "module"] if runs else [])


def test_each_says_for_itself() -> None:
    assert prepared(0, False, data=False, module=True) == ["module"]


# -- Hooks of old: refused or told of before anything starts, so that no result is silently missing --------------


class Evaluated(Slope):
    started = False

    def setup(self, stage: str) -> None:
        self.started = True

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("hook", "call", "instead"),
    [
        ("training_epoch_end", "fit", "on_train_epoch_end"),
        ("validation_epoch_end", "fit", "on_validation_epoch_end"),
        ("validation_epoch_end", "validate", "on_validation_epoch_end"),
        ("test_epoch_end", "test", "on_test_epoch_end"),
    ],
)
def test_an_epoch_end_with_outputs_is_refused_by_its_new_name(hook: str, call: str, instead: str) -> None:
    kind: Any = type("Old", (Evaluated,), {hook: lambda self, outputs: None})
    module = kind()
    with pytest.raises(NotImplementedError, match=rf"Old\.{hook}: .*`{instead}\(self\)`"):
        getattr(quiet(max_epochs=1), call)(module, numbers(1))
    assert not module.started


def test_only_what_the_call_would_need_is_refused() -> None:
    kind: Any = type("Old", (Evaluated,), {"test_epoch_end": lambda self, outputs: None})
    quiet(max_epochs=1).fit(kind(), numbers(1))


def test_other_hooks_of_old_are_told_of_once() -> None:
    told = r"training_step_end \(the end of training_step\), on_epoch_end \(on_train_epoch_end\)"
    nothing = {name: lambda self, *args: None for name in ("training_step_end", "on_epoch_end")}
    with pytest.warns(UserWarning, match=told):
        quiet(max_epochs=1).fit(type("Old", (Slope,), nothing)(), numbers(1))


def test_the_old_name_of_configure_model_is_called_before_it() -> None:
    calls: list[str] = []
    names = ("configure_sharded_model", "setup", "configure_optimizers")
    module = acting(**{name: lambda *args, name=name: calls.append(name) for name in names})
    with pytest.warns(DeprecationWarning, match="rename it to configure_model"):
        quiet(max_epochs=1).fit(module, numbers(1))
    assert calls == ["setup", "configure_sharded_model", "configure_optimizers"]


def test_both_names_of_configure_model_are_refused() -> None:
    module = acting(configure_sharded_model=lambda m: None, configure_model=lambda m: None)
    with pytest.raises(MisconfigurationException, match="configure_model and configure_sharded_model"):
        quiet(max_epochs=1).fit(module, numbers(1))


def ended_by(method: str, base: type) -> Any:
    return type("Own", (base,), {method: lambda self, *args, **kwargs: None})()


@pytest.mark.parametrize("method", former_methods("strategy"))
@pytest.mark.parametrize("base", [SingleDeviceStrategy, DDPStrategy])
def test_a_method_of_lightnings_strategies_is_refused_by_name(method: str, base: Any) -> None:
    """A subclass's `optimizer_step`, which clipped or logged say, was never called, and nobody said so."""
    assert not hasattr(base, method)
    module = Evaluated()
    with pytest.raises(MisconfigurationException, match=rf"^Own\.{method}: a Strategy .* Instead: "):
        quiet(max_epochs=1, strategy=ended_by(method, base), devices=1).fit(module, numbers(1))
    assert not module.started


@pytest.mark.parametrize("method", former_methods("precision"))
def test_a_method_of_lightnings_precisions_is_refused_by_name(method: str) -> None:
    assert not hasattr(Precision, method)
    with pytest.raises(MisconfigurationException, match=rf"^Own\.{method}: a Precision .* Instead: "):
        quiet(max_epochs=1, plugins=[ended_by(method, Precision)]).fit(Evaluated(), numbers(1))


def test_overrides_that_are_called_are_not_refused() -> None:
    class Own(SingleDeviceStrategy):
        called = False

        def run(self, fn: Any, *args: Any) -> Any:
            self.called = True
            return super().run(fn, *args)

        def helper(self) -> None: ...

    strategy = Own()
    quiet(max_epochs=1, strategy=strategy).fit(Slope(), numbers(1))
    assert strategy.called


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("on_training_epoch_end", "on_train_epoch_end"),
        ("on_validation_epoch_ends", "on_validation_epoch_end"),
        ("on_trian_batch_end", "on_train_batch_end"),
    ],
)
@pytest.mark.parametrize("of", ["module", "callback"])
def test_a_misspelt_hook_is_told(of: str, name: str, meant: str) -> None:
    own = ended_by(name, Slope if of == "module" else Callback)
    module, callbacks = (own, []) if of == "module" else (Slope(), [own])
    with pytest.warns(
        UserWarning, match=rf"Own\.{name} is not a hook, so the Trainer does not call it: did you mean {meant}\?"
    ):
        quiet(max_epochs=1, callbacks=callbacks).fit(module, numbers(1))


@pytest.mark.parametrize("name", ["on_epoch_end", "on_keyboard_interrupt", "on_pretrain_routine_start"])
def test_a_callbacks_hook_of_old_is_told(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"Own defines former hooks, which are never called; .*: {name} \(on_"):
        quiet(max_epochs=1, callbacks=[ended_by(name, Callback)]).fit(Slope(), numbers(1))


@pytest.mark.filterwarnings("error:.*is not a hook")
def test_methods_of_the_users_own_are_not_told() -> None:
    quiet(max_epochs=1).fit(acting(on_reward=lambda m: None, on_click=lambda m: None), numbers(1))
