"""`self.log` on one process: names, reductions, weights, where it may be called, what the loggers get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from lockstep import Callback
from lockstep.loop.logged_entry import Entry
from lockstep.utilities.exceptions import MisconfigurationException
from tests.loop.pieces import Recorder, Slope, Validated, acting, numbers, on_ranks, quiet
from tests.tools.pool import RankPool


class Logs(Slope):
    """Logs what it is told to, in each training step; ``x`` is the batch's mean."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("x", batch.mean(), **self.options)
        return super().training_step(batch, batch_idx)


def logged(module: Slope, count: int = 3, batch_size: int = 1, **flags: Any) -> dict[str, float]:
    trainer = quiet(max_epochs=1, **flags)
    trainer.fit(module, numbers(count, batch_size))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("options", "metrics"),
    [
        ({}, {"x": 3.0}),
        ({"on_epoch": True}, {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}),
        ({"on_step": False, "on_epoch": True}, {"x": 2.0}),
        ({"on_step": True, "on_epoch": False}, {"x": 3.0}),
    ],
)
def test_names_say_what_is_of_a_step_and_what_of_an_epoch(options: dict[str, Any], metrics: dict[str, float]) -> None:
    assert logged(Logs(**options)) == metrics


@pytest.mark.parametrize(
    ("reduce_fx", "value"),
    [
        *[("mean", 2.0), ("avg", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 3.0)],
        *[(torch.mean, 2.0), (torch.sum, 6.0), (torch.min, 1.0), (torch.max, 3.0), (sum, 6.0), (min, 1.0), (max, 3.0)],
    ],
)
def test_an_epoch_is_reduced_as_asked(reduce_fx: Any, value: float) -> None:
    assert logged(Logs(on_step=False, on_epoch=True, reduce_fx=reduce_fx)) == {"x": value}


def test_another_reduction_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"reduce_fx='median'.*mean, sum, min, max"):
        logged(Logs(reduce_fx="median"))


def test_a_mean_weighs_by_samples_unless_told_otherwise() -> None:
    assert logged(Logs(on_step=False, on_epoch=True), count=3, batch_size=2) == {"x": 2.0}
    assert logged(Logs(on_step=False, on_epoch=True, batch_size=1), count=3, batch_size=2) == {"x": 2.25}


def test_metrics_start_afresh_in_each_epoch() -> None:
    seen: list[Any] = []
    module = acting(
        training_step=lambda m, *_: m.log("x", float(m.current_epoch), on_step=False, on_epoch=True),
        on_train_epoch_start=lambda m: seen.append(dict(m.trainer.callback_metrics)),
    )
    quiet(max_epochs=3).fit(module, numbers(2))
    assert seen == [{}, {"x": 0.0}, {"x": 1.0}]


def test_a_loss_may_be_changed_in_place_after_it_was_logged() -> None:
    def change(module: Any, batch: Any, at: int) -> None:
        value = batch.mean()
        module.log("x", value, on_step=True, on_epoch=True)
        value.mul_(100)

    assert logged(acting(training_step=change)) == {"x": 2.0, "x_step": 3.0, "x_epoch": 2.0}


def test_values_that_were_read_do_not_change_afterwards() -> None:
    kept: list[Tensor] = []
    logged(acting(Logs, on_train_batch_end=lambda m, *_: kept.append(m.trainer.callback_metrics["x"])))
    assert kept == [1.0, 2.0, 3.0]


def test_logging_keeps_no_graph_and_the_dtype() -> None:
    class Loss(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = (self.w * batch).mean()
            self.log("loss", loss, on_epoch=True)
            self.log("count", 3)
            return loss

    trainer = quiet(max_epochs=1)
    trainer.fit(Loss(), numbers(1))
    metrics = trainer.callback_metrics
    assert not any(value.requires_grad for value in metrics.values())
    assert (metrics["loss"].dtype, metrics["loss_epoch"].dtype) == (torch.float64, torch.float64)
    assert metrics["count"].dtype == torch.get_default_dtype()


def test_a_name_that_comes_late_is_of_the_hook_that_logs_it() -> None:
    """From the second epoch on it was taken for one of `on_train_epoch_end`, which has no steps."""

    module = acting(training_step=lambda m, *_: m.log("late", 5.0, on_step=True) if m.current_epoch == 1 else None)
    trainer = quiet(max_epochs=2)
    trainer.fit(module, numbers(1))
    assert trainer.callback_metrics == {"late": 5.0}


def test_what_each_audience_is_shown() -> None:
    def log(module: Any, *_: Any) -> None:
        module.log("bar", 1.0, prog_bar=True, logger=False)
        module.log("file", 2.0)
        module.log("both", 3.0, prog_bar=True, on_epoch=True)
        module.log_dict({"one": 4.0, "two": 5.0}, prog_bar=True, logger=False)

    trainer = quiet(max_epochs=1, logger=Recorder(), log_every_n_steps=1)
    trainer.fit(acting(training_step=log), numbers(1))
    assert set(trainer.callback_metrics) == {"bar", "file", "both", "both_step", "both_epoch", "one", "two"}
    assert set(trainer.logged_metrics) == {"file", "both_step", "both_epoch"}
    assert trainer.progress_bar_metrics == {"bar": 1.0, "both_step": 3.0, "both_epoch": 3.0, "one": 4.0, "two": 5.0}


# -- where -------------------------------------------------------------------------------------------------

STEPS = ["train_batch_start", "before_zero_grad", "before_backward", "after_backward", "before_optimizer_step"]
EPOCHS = ["train_start", "train_epoch_start", "train_epoch_end", "validation_start", "validation_epoch_start"]
EPOCHS += ["validation_batch_start", "validation_batch_end", "validation_epoch_end"]
EVERYWHERE = [(f"on_{hook}", "step") for hook in (*STEPS, "train_batch_end")]
EVERYWHERE += [(f"on_{hook}", "epoch") for hook in EPOCHS]
NOWHERE = ["setup", "configure_optimizers", "on_fit_start", "on_sanity_check_start"]
NOWHERE += ["on_validation_end", "on_train_end", "on_fit_end", "teardown"]


def calls_in(hook: str, call: Any) -> Any:
    """A module whose ``hook`` calls ``call(module)``."""
    return acting(Validated, **{hook: lambda module, *args: call(module) and None})


@pytest.mark.parametrize("by_callback", [False, True])
@pytest.mark.parametrize(("hook", "kind"), EVERYWHERE)
def test_hooks_in_which_one_may_log(hook: str, kind: str, by_callback: bool) -> None:
    log = lambda module: module.log("x", 2.0)  # noqa: E731
    if by_callback:
        callback: Any = Callback()
        setattr(callback, hook, lambda trainer, module, *args: log(module))
        module, callbacks = calls_in("on_fit_end", lambda module: None), [callback]
    else:
        module, callbacks = calls_in(hook, log), []
    trainer = quiet(max_epochs=1, callbacks=callbacks)
    trainer.fit(module, numbers(2), numbers(2))
    assert trainer.callback_metrics["x"] == 2.0
    assert ("x_step" in trainer.callback_metrics) is False


@pytest.mark.parametrize(("hook", "kind"), EVERYWHERE)
def test_on_step_is_refused_where_there_is_no_step(hook: str, kind: str) -> None:
    module = calls_in(hook, lambda module: module.log("x", 2.0, on_step=True))
    fit = lambda: quiet(max_epochs=1).fit(module, numbers(2), numbers(2))  # noqa: E731
    if kind == "step" or hook.startswith("on_validation_batch"):
        assert fit().metrics["x"] == 2.0
    else:
        with pytest.raises(MisconfigurationException, match=rf"on_step=True.*`{hook}`"):
            fit()


@pytest.mark.parametrize("hook", NOWHERE)
def test_hooks_in_which_nothing_can_be_logged(hook: str) -> None:
    module, callback = calls_in(hook, lambda module: module.log("x", 2.0)), Callback()
    if hook == "on_sanity_check_start":
        callback.on_sanity_check_start = lambda trainer, module: module.log("x", 2.0)  # type: ignore[method-assign]
    with pytest.raises(MisconfigurationException, match=rf"self.log\('x', ...\) in `{hook}`"):
        quiet(max_epochs=1, callbacks=[callback]).fit(module, numbers(2), numbers(2))


def test_after_a_fit_and_before_set_up_nothing_can_be_logged() -> None:
    module = Slope()
    quiet(max_epochs=1).fit(module, numbers(1))
    with pytest.raises(MisconfigurationException, match=r"self.log"):
        module.log("x", 1.0)
    with pytest.raises(MisconfigurationException, match=r"self.log"):
        quiet(max_epochs=1).fit(acting(configure_callbacks=lambda m: m.log("x", 1.0)), numbers(1))


def test_without_a_trainer_log_warns_and_keeps_nothing() -> None:
    with pytest.warns(UserWarning, match="without a Trainer"):
        Slope().log("x", 1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m: m.log("x", torch.ones(2)),
            r"tensor of shape \(2,\)>\)` was called in `training_step`, but the tensor must have a single element",
        ),
        (lambda m: m.log("x", torch.ones(0)), r"tensor of shape \(0,\)"),
        (
            lambda m: m.log("x", "high"),
            r"`self.log\(x, high\)` was called in `training_step`, but `str` values cannot be logged.*logger",
        ),
        (lambda m: m.log("x", "3"), "`str` values cannot be logged"),
        (
            lambda m: m.log("x", {"a": 1.0}),
            r"self.log\(x, {'a': 1.0}\).*`dict` values cannot be logged: log its items with `self.log_dict",
        ),
        (lambda m: m.log("x", [1.0]), "`list` values cannot be logged: log one number"),
        (lambda m: m.log("x", None), "`NoneType` values cannot be logged"),
        (lambda m: m.log(1.0, "x"), r"self.log\(1.0, ...\): the name must be a str"),
        (lambda m: m.log("x", 1.0, on_step=False, on_epoch=False), "logs nothing"),
        (lambda m: (m.log("x", 1.0), m.log("x", 1.0, prog_bar=True)), "twice in `training_step` with different"),
    ],
)
def test_calls_of_log_that_make_no_sense(call: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        quiet(max_epochs=1).fit(calls_in("training_step", call), numbers(1))


# -- loggers -----------------------------------------------------------------------------------------------


class Talks(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("a", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", float(batch_idx), on_step=True, on_epoch=True)
        self.log("hidden", 1.0, logger=False)

    def on_validation_epoch_end(self) -> None:
        self.log("late", 3.0)


def test_loggers_get_what_lightning_sends_at_lightnings_steps() -> None:
    """Recorded with Lightning 2.6.6."""
    recorder, module = Recorder(), Talks()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1, logger=recorder, log_every_n_steps=2)
    trainer.fit(module, numbers(4), numbers(2))
    assert recorder.sent == [
        (1, {"a_step": 1.0, "epoch": 0}),
        (3, {"a_step": 3.0, "epoch": 0}),
        (0, {"v_step": 0.0}),
        (1, {"v_step": 1.0}),
        (3, {"v_epoch": 0.5, "late": 3.0, "epoch": 0}),
        (3, {"a_epoch": 1.5, "epoch": 0}),
        (5, {"a_step": 1.0, "epoch": 1}),
        (7, {"a_step": 3.0, "epoch": 1}),
        (2, {"v_step": 0.0}),
        (3, {"v_step": 1.0}),
        (7, {"v_epoch": 0.5, "late": 3.0, "epoch": 1}),
        (7, {"a_epoch": 1.5, "epoch": 1}),
    ]
    recorder.sent.clear()
    assert trainer.validate(module, numbers(2), verbose=False) == [{"v_epoch": 0.5, "late": 3.0}]
    assert recorder.sent[-1] == (8, {"v_epoch": 0.5, "late": 3.0, "epoch": 2})


def test_the_step_at_which_a_fit_stopped_was_not_sent() -> None:
    """A value that ended the fit was in no logger, unless the step was one of those that are."""

    def end(module: Any, outputs: Any, batch: Any, at: int) -> None:
        module.trainer.should_stop = at == 1

    recorder = Recorder()
    quiet(max_epochs=2, logger=recorder, log_every_n_steps=50).fit(acting(Logs, on_train_batch_end=end), numbers(8))
    assert recorder.sent == [(1, {"x": 2.0, "epoch": 0})]


def test_a_value_of_a_single_step_is_sent_once() -> None:
    module = acting(training_step=lambda m, batch, at: m.log("first", 7.0) if at == 0 else None)
    recorder = Recorder()
    quiet(max_epochs=1, logger=recorder, log_every_n_steps=2).fit(module, numbers(6))
    assert recorder.sent == [(1, {"first": 7.0, "epoch": 0})]


def test_a_value_named_step_is_the_x_axis() -> None:
    module = acting(training_step=lambda m, batch, at: m.log_dict({"step": 100.0 + at, "x": 1.0}))
    recorder = Recorder()
    quiet(max_epochs=1, logger=recorder, log_every_n_steps=1).fit(module, numbers(2))
    assert recorder.sent == [(100, {"x": 1.0}), (101, {"x": 1.0})]


def test_the_x_axis_counts_windows() -> None:
    recorder = Recorder()
    quiet(max_epochs=1, logger=recorder, log_every_n_steps=1, accumulate_grad_batches=2).fit(Logs(), numbers(4))
    assert recorder.sent == [(0, {"x": 2.0, "epoch": 0}), (1, {"x": 4.0, "epoch": 0})]


def test_loggers_are_told_how_it_ended() -> None:
    recorder = Recorder()
    quiet(max_epochs=1, logger=recorder).fit(Slope(), numbers(1))
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, logger=recorder).fit(acting(training_step=lambda *_: 1 / 0), numbers(1))
    assert recorder.ended == ["success", "failed"]


# -- torchmetrics ------------------------------------------------------------------------------------------


def test_metrics_that_compute_more_than_a_number_are_refused() -> None:
    from torchmetrics import CatMetric

    class Cats(Slope):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            cat(batch)
            self.log("cat", cat, on_step=False, on_epoch=True)

    cat = CatMetric()
    with pytest.raises(MisconfigurationException, match=r"self.log\('cat', CatMetric\).*not return a single number"):
        quiet(max_epochs=1).fit(Cats(), numbers(2))


def test_a_metric_that_computes_none_is_not_logged() -> None:
    """As in Lightning: a metric without samples of its own may have no value yet, and the fit ended in an error."""
    from torchmetrics import SumMetric

    class NoneAtFirst(SumMetric):
        def compute(self) -> Any:
            value = super().compute()
            return value if value > 6 else None

    total, trainer = NoneAtFirst(), quiet(max_epochs=2)

    def step(module: Any, batch: Any, at: int) -> None:
        if at == 0:
            assert "sum_epoch" not in trainer.callback_metrics
        total.to(batch.device)(batch * (1 + module.current_epoch))
        module.log("sum", total, on_step=True, on_epoch=True)

    trainer.fit(acting(training_step=step), numbers(3))  # 1 + 2 + 3 is no value, 2 + 4 + 6 is one
    assert trainer.callback_metrics == {"sum": 12.0, "sum_epoch": 12.0}


def test_metrics_reduce_themselves_and_start_afresh() -> None:
    from torchmetrics import MaxMetric, MeanMetric, MetricCollection

    class Measures(Slope):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()
            self.pair = MetricCollection({"low": MeanMetric(), "high": MaxMetric()}, prefix="pair/")

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.mean(batch * (1 + self.current_epoch))
            self.pair.update(batch)
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            self.log_dict(self.pair, on_step=False, on_epoch=True)

    trainer = quiet(max_epochs=2)
    trainer.fit(Measures(), numbers(3))
    means = {"mean": 4.0, "mean_step": 6.0, "mean_epoch": 4.0}
    assert trainer.callback_metrics == {**means, "pair/low": 2.0, "pair/high": 3.0}


@pytest.mark.parametrize(
    ("values", "mean", "dtype"),
    [
        ([torch.tensor(1), torch.tensor(2)], 1.5, torch.float32),
        ([torch.tensor(True), torch.tensor(False)], 0.5, torch.float32),
        (
            [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0078125, dtype=torch.bfloat16)],
            1.00390625,
            torch.float32,
        ),
        ([1.0, torch.tensor(1.0 + 1e-12, dtype=torch.float64)], 1.0 + 5e-13, torch.float64),
        ([torch.tensor(1), torch.tensor(0.25)], 0.625, torch.float32),
        ([torch.tensor(1.0), torch.tensor([3.0])], 2.0, torch.float32),
        ([0.5, 1], 0.75, torch.float32),
        ([torch.tensor(1.0), 0.5, torch.tensor(0.0)], 0.5, torch.float32),
    ],
)
def test_a_mean_of_whole_numbers_or_flags_is_none_itself(values: list[Any], mean: float, dtype: torch.dtype) -> None:
    """An accuracy of flags was True, and the mean of 1 and 2 was 1: means were rounded to the type that was logged."""

    module = acting(training_step=lambda m, batch, at: m.log("x", values[at], on_step=True, on_epoch=True))
    trainer = quiet(max_epochs=1)
    trainer.fit(module, numbers(len(values)))
    shown = trainer.callback_metrics["x_epoch"]
    assert (shown.item(), shown.dtype) == (mean, dtype)
    assert trainer.callback_metrics["x_step"].item() == float(values[-1])


def test_a_tensor_that_grows_is_refused_as_at_first() -> None:
    module = acting(training_step=lambda m, batch, at: m.log("x", torch.ones(1 + at)))
    with pytest.raises(MisconfigurationException, match=r"tensor of shape \(2,\)"):
        quiet(max_epochs=1).fit(module, numbers(3))


@pytest.mark.parametrize("size", [-1, float("nan"), float("inf"), "four", torch.ones(2)])
def test_a_batch_size_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    """Weights of -1 cancelled out, and the mean was that of the batches."""

    module = acting(training_step=lambda m, batch, at: m.log("x", batch.mean(), batch_size=size if at else 1))
    with pytest.raises(MisconfigurationException, match=r"self\.log\('x', \.\.\., batch_size=.*number of samples"):
        quiet(max_epochs=1).fit(module, numbers(3))


class CallbackLogs(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        self.log("from a callback", 2.0, on_epoch=True)
        self.log_dict({"a": 1.0, "b": 3.0})

    def on_validation_epoch_end(self, *args: Any) -> None:
        self.log("validated", 5.0)


class Keeps(Callback):
    """Has a ``log`` of its own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def log(self, text: str) -> None:
        self.seen.append(text)

    def on_train_start(self, *args: Any) -> None:
        self.log("begun")


def test_callbacks_log_as_the_module_does() -> None:
    callback, own = CallbackLogs(), Keeps()
    trainer = quiet(max_epochs=1, callbacks=[callback, own])
    trainer.fit(Validated(), numbers(2), numbers(1))
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert {"from a callback_epoch": 2.0, "a": 1.0, "b": 3.0, "validated": 5.0}.items() <= found.items()
    assert own.seen == ["begun"]
    assert "log" not in vars(callback)


class TwoHooks(Slope):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("both", batch.mean(), on_step=True, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("both", batch.mean() + 100)


def test_of_two_hooks_that_log_one_name_the_later_ones_value_is_shown() -> None:
    """As in Lightning; the hooks were taken in the order of the alphabet."""
    trainer = quiet()
    trainer.validate(TwoHooks(), numbers(4), verbose=False)
    assert trainer.callback_metrics["both"].item() == 102.5
    assert trainer.callback_metrics["both_epoch"].item() == 2.5


class OnADevice(torch.Tensor):
    """A tensor of a device other than the CPU, as far as logging asks."""

    is_cpu = False


@pytest.mark.parametrize("reduce_fx", ["mean", "sum"])
def test_sums_of_an_epoch_are_exact_where_the_device_has_no_float64(
    reduce_fx: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 a sum of many values loses what is small against it: 0.1, 20,000 times, gave 1999.66."""
    monkeypatch.setattr("lockstep.loop.logged_entry.widest", lambda device: torch.float32)
    entry = Entry(("training_step", -1, "loss"), (False, None, False, True, reduce_fx, True, False, False))
    value, times = torch.tensor(0.1).as_subclass(OnADevice), 4_000
    plain = torch.tensor(0.0)
    for _ in range(times):
        entry.add(value, 1.0, 1)
        plain += value
    exact = times * value.item()
    assert abs(float(plain) - exact) > 1e-5 * exact
    assert entry.total.dtype == torch.float32
    assert float(entry.total) == pytest.approx(exact, rel=1e-7)
    entry.clear()
    assert entry.lost == 0.0


# -- One name that several things are logged under: loaders of an evaluation, and metrics that are made anew -----


class Shares(Slope):
    """Logs the numbers of two loaders as one name."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for number in batch:  # each sample by itself, so that sums do not depend on the number of ranks
            self.log("v", number + 10 * dataloader_idx, add_dataloader_idx=False, batch_size=1, **self.options)
        self.log("own", float(dataloader_idx))

    test_step = validation_step


def shown(start: Any = quiet, **options: Any) -> tuple[float, list[Any]]:
    module, loaders = Shares(**options), [numbers(4, 2), numbers(2, 2)]
    trainer = start(max_epochs=1)
    trainer.fit(module, numbers(2), loaders)
    tested = trainer.test(module, loaders, verbose=False)
    return trainer.callback_metrics["v"].item(), [part["v"] for part in tested]


ONE_NAME = [({}, 33 / 6), ({"reduce_fx": "sum"}, 33.0), ({"reduce_fx": "max"}, 12.0), ({"reduce_fx": "min"}, 1.0)]


def shown_on_two() -> list[Any]:
    return [shown(on_ranks, **options) for options, _ in ONE_NAME]


def test_loaders_that_log_one_name_on_ranks(ranks: RankPool) -> None:
    assert ranks(2).run(shown_on_two) == [[(value, [value, value]) for _, value in ONE_NAME]] * 2


def test_loaders_that_mean_different_things_by_one_name_are_refused() -> None:
    def differ(module: Any, batch: Any, at: int, loader: int = 0) -> None:
        module.log("v", 1.0, add_dataloader_idx=False, reduce_fx=["mean", "sum"][loader])

    with pytest.raises(MisconfigurationException, match=r"'v'.*log this name with different.*a different name"):
        quiet().validate(type("Differ", (Slope,), {"validation_step": differ})(), [numbers(1), numbers(1)])


class New(Slope):
    """Makes its metric in each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        metric = torchmetrics.MeanMetric()
        metric(torch.tensor(float(batch_idx)))
        self.log("m", metric, **self.options)
        return super().training_step(batch, batch_idx)


def test_a_metric_that_is_made_anew_in_each_step_is_refused() -> None:
    """The last batch's value was shown for the epoch's."""
    with pytest.raises(MisconfigurationException, match=r"'m', <MeanMetric>.*attribute of the module"):
        quiet(max_epochs=1).fit(New(on_step=False, on_epoch=True), numbers(3))


def test_a_value_of_its_step_alone_is_right() -> None:
    trainer = quiet(max_epochs=1, log_every_n_steps=1)
    trainer.fit(New(), numbers(3))
    assert trainer.callback_metrics["m"] == 2.0


# -- `self.log` on several ranks: what each logged is one number for all -----------------------------------------


class Sevens(Slope):
    """Validates 7 samples, whose mean no mean of the ranks' means gives."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = batch**2
        for name in ("mean", "sum", "min", "max"):
            self.log(name, getattr(values, name)(), reduce_fx=name)
        self.log("rank zero's", float(self.global_rank + 5), rank_zero_only=True)

    def on_validation_epoch_end(self) -> None:
        self.log("ranks", float(self.global_rank))


def validate(samples: int, batch_size: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    trainer = on_ranks()
    returned = trainer.validate(Sevens(), numbers(samples, batch_size), verbose=False)
    return returned, {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("world", "samples", "batch_size"), [(2, 7, 1), (2, 7, 2), (3, 7, 4), (2, 1, 1)])
def test_a_validation_gives_the_true_numbers_on_every_rank(
    ranks: RankPool, world: int, samples: int, batch_size: int
) -> None:
    """7 samples on 2 ranks: Lightning 2.6.6 says 14.375 for 16.43 or the like."""
    squares = [number**2 for number in range(1, samples + 1)]
    expected = {
        "mean": sum(squares) / samples,
        "sum": sum(squares),
        "min": 1,
        "max": samples**2,
        "rank zero's": 5.0,
        "ranks": (world - 1) / 2,
    }
    for returned, shown in ranks(world).run(validate, samples, batch_size):
        assert returned == [pytest.approx(expected)]
        assert shown == pytest.approx(expected)


def test_a_rank_without_samples_shows_what_the_others_logged_in_their_type(ranks: RankPool) -> None:
    """It had logged nothing, and showed the value in float32: a threshold could be crossed on some ranks only."""
    assert ranks(3).run(validate_thirds) == [{"third": 1 / 3}] * 3


def validate_thirds() -> dict[str, float]:
    log = lambda m, batch, at: m.log("third", batch.mean() / 3)  # noqa: E731
    trainer = on_ranks()
    trainer.validate(acting(Validated, validation_step=log), numbers(1), verbose=False)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


class Different(Slope):
    """Each rank logs a name of its own besides a common one, and more names than fit at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log(f"of rank {self.global_rank}", batch.mean(), on_epoch=True)
        for number in range(40):
            self.log(f"n{number}", float(number), on_epoch=True, on_step=False)
            self.log(f"m{number}", batch.mean(), on_epoch=True, on_step=True)
        return super().training_step(batch, batch_idx)


def differ() -> tuple[dict[str, float], list[Any]]:
    recorder = Recorder()
    trainer = on_ranks(max_epochs=2, logger=recorder, log_every_n_steps=1)
    trainer.fit(Different(), numbers(4))
    return {name: value.item() for name, value in trainer.callback_metrics.items()}, recorder.sent


def test_ranks_that_log_different_names_do_not_wait_for_each_other(ranks: RankPool) -> None:
    (first, sent), (second, others) = ranks(2).run(differ, timeout=30)
    assert first == second
    assert (first["of rank 0_epoch"], first["of rank 1_epoch"]) == (2.0, 3.0)
    assert (first["n39"], first["m39_epoch"], first["m39_step"]) == (39.0, 2.5, 3.5)
    assert [step for step, _ in sent] == [0, 1, 1, 2, 3, 3]
    assert sent[0][1]["m7_step"] == 1.5
    assert sent == others


def stop_on_one(rank: int) -> list[Any]:
    def log(module: Any, batch: Any, at: int) -> None:
        module.log("own", batch.mean(), sync_dist=True)
        module.trainer.should_stop = (module.global_rank, at) == (rank, 1)

    recorder = Recorder()
    on_ranks(max_epochs=2, logger=recorder, log_every_n_steps=50).fit(acting(training_step=log), numbers(8))
    return recorder.sent


@pytest.mark.parametrize("rank", [0, 1])
def test_the_step_at_which_one_rank_stops_is_sent_with_the_values_of_all(ranks: RankPool, rank: int) -> None:
    first, _ = ranks(2).run(stop_on_one, rank, timeout=30)
    assert first == [(1, {"own": 3.5, "epoch": 0})]
