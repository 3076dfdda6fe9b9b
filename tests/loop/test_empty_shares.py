"""A rank without samples of a micro-batch: nothing that a user can write sees a batch there, and the numbers are those
of one process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lockstep import LightningModule
from lockstep import callbacks as all_callbacks
from lockstep.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lockstep.strategies import DDPStrategy
from tests.loop.pieces import Recorder, Slope, Stream, Validated, acting, heard, numbers, on_ranks, quiet
from tests.tools.extensions import is_there
from tests.tools.hooked import hooked
from tests.tools.pool import RankPool

SAMPLES, WORLD = 13, 3
"""Of the last micro-batch two ranks have no sample."""


# -- counted once, wherever a user counts


class Counts(Slope):
    """Counts samples in every place that is shown a batch."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.seen: Counter[str] = Counter()
        self.listed: list[float] = []
        self.metric = SumMetric()
        self.loose = [SumMetric()]
        self.register_buffer("buffer", torch.zeros((), dtype=torch.float64))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen["transfer"] += len(batch)
        return batch

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen["start"] += len(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen["step"] += len(batch)
        self.listed.extend(batch.tolist())
        self.buffer += len(batch)
        self.log("sum", batch.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("mean", batch.mean(), on_step=True, on_epoch=True, sync_dist=True)
        return (self.w * batch).mean()

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen["before backward"] += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["end"] += len(batch)
        self.metric.update(batch)
        self.loose[0].update(batch)


class CountsToo(Callback):
    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen["callback's start"] += len(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen["callback's before backward"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen["callback's end"] += len(batch)


def count(stream: bool, accumulate: int) -> dict[str, Any]:
    module, callback = Counts(), CountsToo()
    # rank 0's buffers would come to all
    flags: dict[str, Any] = {"strategy": DDPStrategy(broadcast_buffers=False), "devices": WORLD, "max_epochs": 1}
    trainer = quiet(callbacks=[callback], accumulate_grad_batches=accumulate, **flags)
    trainer.fit(module, DataLoader(Stream(SAMPLES), batch_size=1) if stream else numbers(SAMPLES))
    seen = {**module.seen, **callback.seen, "listed": len(module.listed), "buffer": int(module.buffer)}
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    module.metric._should_unsync = module.loose[0]._should_unsync = False
    totals = [module.metric.compute().item(), module.loose[0].compute().item()]
    return {"seen": seen, "samples": module.listed, "metrics": metrics, "totals": totals}


@pytest.mark.everyday
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_sample_was_counted_on_ranks_that_had_borrowed_it(ranks: RankPool, stream: bool, accumulate: int) -> None:
    """13 samples on 3 ranks were counted as 15 in batch hooks, and in lists that training_step filled."""
    found = ranks(WORLD).run(count, stream, accumulate)
    total: Counter[str] = sum((Counter(each["seen"]) for each in found), Counter())
    assert set(total.values()) == {SAMPLES}
    assert len(total) == 10
    assert sorted(sample for each in found for sample in each["samples"]) == list(range(1, SAMPLES + 1))
    for each in found:
        assert each["metrics"]["sum"] == each["totals"][0] == each["totals"][1] == sum(range(1, SAMPLES + 1))
        assert each["metrics"]["mean_epoch"] == pytest.approx(7.0)


# -- the numbers of one process


class Net(LightningModule):
    """A little of everything whose numbers could differ."""

    def __init__(self, optimizer: str = "SGD", **how: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1), nn.Flatten(0)).double()
        self.optimizer, self.how = optimizer, how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.net(batch) - batch.sum(1)).square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe")
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


class Scales(Net):
    """Changes the reduced gradient where users do, and notes how often."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(-0.3, 0.3)  # type: ignore[union-attr]


class Steps(Net):
    """Has an `optimizer_step` of its own: the closure road."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


class Gan(Net):
    """Two optimizers by hand, of which one needs the other's part frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(3, 1).double()
        self.fakes: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        with generator.toggle_model():
            fake = self.net(batch).unsqueeze(1) * batch
            generator.zero_grad()
            self.manual_backward(-self.critic(fake).mean())
            self.clip_gradients(generator, 0.1, "norm")
            generator.step()
        with critic.toggle_model():
            critic.zero_grad()
            self.manual_backward((self.critic(fake.detach()) - self.critic(batch)).mean())
            critic.step()
        self.fakes.append(fake.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net.parameters(), lr=0.1), torch.optim.SGD(self.critic.parameters(), lr=0.1)]


def rows() -> Tensor:
    return torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


class Rows(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(rows())


def fitted(make: Callable[[], Any], strategy: dict[str, Any], stream: bool, flags: dict[str, Any]) -> Tensor:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    module = make()
    data: Any = Rows() if stream else rows()
    kind = DDPStrategy(**strategy) if world > 1 else "auto"
    trainer = quiet(strategy=kind, devices=world, max_epochs=2, **flags)
    trainer.fit(module, DataLoader(data, batch_size=WORLD // world))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], bool, dict[str, Any]]] = {
    "plain": (Net, {}, False, {}),
    "accumulated": (Net, {}, False, {"accumulate_grad_batches": 3}),
    "clipped": (Net, {}, False, {"gradient_clip_val": 0.2}),
    "gradients changed": (Scales, {}, False, {}),
    "closures": (Steps, {}, False, {"accumulate_grad_batches": 3}),
    "a line search": (lambda: Net("LBFGS"), {}, False, {}),
    "a line search over a window": (lambda: Net("LBFGS"), {}, False, {"accumulate_grad_batches": 3}),
    "static graph": (Net, {"static_graph": True}, False, {}),
    "sharded": (lambda: Net("Adam"), {"shard_optimizer": True}, False, {"gradient_clip_val": 0.2}),
    **{
        name: (Net, given, False, {"accumulate_grad_batches": 3})
        for name, given in hooked("communication hook").items()
    },
    "compared": (Net, {"check_reduction": True}, False, {}),
    "by hand": (Gan, {}, False, {}),
    "stream": (Net, {}, True, {}),
    "stream, accumulated": (Net, {"static_graph": True}, True, {"accumulate_grad_batches": 3}),
    "stream, by hand": (Gan, {}, True, {}),
    "over TCP": (Net, {"shared_memory": False}, False, {}),
}


@pytest.mark.everyday(6)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_one_process(ranks: RankPool, case: str) -> None:
    expected = fitted(*CASES[case])
    for found in ranks(WORLD).run(fitted, *CASES[case], timeout=60):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


# -- what belongs to the update runs on every rank


class Updates(Slope):
    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.updates: Counter[str] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", batch.mean(), sync_dist=True)
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any, what: str = "zero_grad") -> None:
        self.updates[what] += 1

    def on_after_backward(self) -> None:
        self.on_before_zero_grad(None, "after backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.on_before_zero_grad(None, "step")


def update(folder: str) -> dict[str, Any]:
    save = ModelCheckpoint(folder, monitor="loss", every_n_train_steps=1, save_top_k=-1)
    rates, module = LearningRateMonitor("step"), Updates()
    callbacks: list[Callback] = [save, rates]
    if is_there("extras"):
        callbacks.append(all_callbacks.WeightAveraging(avg_fn=lambda old, new, count: old + 0.5 * (new - old)))
        callbacks.append(all_callbacks.SpikeDetection(rtol=1e9))
    flags: dict[str, Any] = {"callbacks": callbacks, "log_every_n_steps": 1}
    trainer = on_ranks(max_epochs=1, enable_checkpointing=True, logger=Recorder(), **flags)
    trainer.fit(module, numbers(SAMPLES))
    return {
        "updates": dict(module.updates),
        "weight": module.w.item(),
        "saved": {path: score.item() for path, score in save.best_k_models.items()},
        "rates": len(rates.lrs["lr-SGD"]),
        "steps": (trainer.global_step, trainer.fit_loop.progress.total_batches),
    }


def test_the_update_and_lockstep_s_own_callbacks_run_on_every_rank(ranks: RankPool, tmp_path: Any) -> None:
    found = ranks(WORLD).run(update, str(tmp_path), timeout=60)
    assert found[0] == found[1] == found[2]
    assert found[0]["updates"] == {"zero_grad": 5, "after backward": 5, "step": 5}
    assert list(found[0]["saved"].values()) == [2.0, 5.0, 8.0, 11.0, 13.0]
    assert (found[0]["rates"], found[0]["steps"]) == (5, (5, 5))


def end() -> list[Any]:
    module = acting(on_train_batch_start=lambda m, batch, at: -1 if at == 4 else None)
    result = on_ranks(max_epochs=2).fit(module, numbers(SAMPLES))
    return [result.epochs, result.global_step]


def test_ranks_without_samples_end_the_epoch_with_the_others(ranks: RankPool) -> None:
    """They would have waited in the reduction of a step that the rank with a sample did not take."""
    assert ranks(WORLD).run(end, timeout=40) == [[2, 8]] * 3


# -- what cannot be joined is refused; what is left out is said


CALLS: dict[str, Any] = {
    "all_gather": lambda module: module.all_gather(torch.ones(())),
    "save_checkpoint": lambda module: module.trainer.save_checkpoint("/dev/null/never"),
    "reduced_metrics": lambda module: module.trainer.reduced_metrics(),
    "barrier": lambda module: module.trainer.strategy.barrier(),
    "broadcast": lambda module: module.trainer.strategy.broadcast(torch.ones(())),
    "reduce": lambda module: module.trainer.strategy.reduce(torch.ones(())),
}


def call(name: str, samples: int) -> None:
    hook = "training_step" if name == "all_gather" else "on_train_batch_end"
    module = acting(**{hook: lambda module, *_: (CALLS[name](module), None)[1]})
    on_ranks(max_epochs=1).fit(module, numbers(samples))


@pytest.mark.everyday(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_collective_that_ranks_without_samples_cannot_join_is_refused_by_name(ranks: RankPool, name: str) -> None:
    expected = rf"{name}\(.* was called for a micro-batch for which ranks \[1, 2\] have no samples[\s\S]*drop_last=True"
    with pytest.raises(Exception, match=expected):
        ranks(WORLD).run(call, name, 1, timeout=40)


def test_a_collective_is_fine_where_every_rank_has_samples(ranks: RankPool) -> None:
    ranks(WORLD).run(call, "all_gather", 12, timeout=40)


def unshared(samples: int) -> list[str]:
    fit = lambda: on_ranks(max_epochs=2, callbacks=[CountsToo()]).fit(Counts(), numbers(samples))  # noqa: E731
    return heard(fit, "does not divide evenly")


def test_hooks_that_do_not_run_on_ranks_without_samples_are_named_once(ranks: RankPool) -> None:
    zero, one, two = ranks(WORLD).run(unshared, SAMPLES)
    assert (len(zero), one, two) == (1, [], [])
    for said in ("ranks [1, 2]", "CountsToo.on_train_batch_end", "Counts.on_train_batch_start", "on_before_zero_grad"):
        assert said in zero[0]
    assert ranks(WORLD).run(unshared, 12) == [[], [], []]


# -- manual optimization runs on a padding batch, which leaves no trace


class Meter:
    """An object of the user's own, which is put back."""

    def __init__(self) -> None:
        self.count = 0


class ByHand(Slope):
    """Keeps state of every kind that is put back, and one that is not."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        from torchmetrics import SumMetric

        self.automatic_optimization = False
        self.number, self.hidden = 0, torch.zeros(1)
        self.listed, self.recent, self.unique = [], deque([0.0], maxlen=2), {0.0}  # type: ignore[var-annotated]
        self.nested = {"deep": {"list": [0.0]}, "loose": SumMetric(), "tensor": torch.zeros(1)}
        self.metric = SumMetric()
        self.part = nn.Linear(1, 1)
        self.part.calls = 0  # type: ignore[assignment]
        self.meter, self.foreign, self.hooks = Meter(), SimpleNamespace(count=0), 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.hooks += 1

    def on_before_backward(self, loss: Tensor) -> None:
        self.hooks += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooks += 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.meter.count += 1
        if not self.trainer.is_padding_batch:
            self.foreign.count += 1
        value = batch.item()
        self.number += 1
        self.hidden = self.hidden + 1
        self.listed.append(value)
        self.recent.append(value)
        self.unique.add(value)
        self.nested["deep"]["list"].append(value)  # type: ignore[index]
        self.nested["loose"].update(batch)  # type: ignore[union-attr]
        self.nested["tensor"].add_(1)  # type: ignore[union-attr]
        self.metric.update(batch)
        self.part.calls += 1  # type: ignore[operator, assignment]
        self.fresh = value
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward((self.w * batch).mean())
        optimizer.step()

    def kept(self) -> list[Any]:
        loose = self.nested["loose"].sum_value.item()  # type: ignore[union-attr]
        counted = [len(self.listed), self.part.calls, self.meter.count, self.foreign.count, self.hooks]
        plain = [self.number, self.hidden.item(), *counted]
        inside = [len(self.nested["deep"]["list"]), loose, self.nested["tensor"].item()]  # type: ignore[index, union-attr]
        return [*plain, *inside, list(self.recent), sorted(self.unique), self.metric.sum_value.item(), self.w.item()]


def by_hand(samples: int) -> tuple[list[Any], bool, bool]:
    module = ByHand()
    listed = module.listed
    on_ranks(max_epochs=1).fit(module, numbers(samples))
    return module.kept(), hasattr(module, "fresh"), listed is module.listed


def test_a_padding_batch_leaves_no_trace_in_the_module(ranks: RankPool) -> None:
    (zero, _, _), (one, fresh, same) = ranks(2).run(by_hand, 3)
    assert zero == [2, 2.0, 2, 2, 2, 2, 6, 3, 4.0, 2.0, [1.0, 3.0], [0.0, 1.0, 3.0], 4.0, pytest.approx(-0.45)]
    assert one == [1, 1.0, 1, 1, 1, 1, 3, 2, 2.0, 1.0, [0.0, 2.0], [0.0, 2.0], 2.0, pytest.approx(-0.45)]
    assert fresh
    assert same
    _, (one, fresh, _) = ranks(2).run(by_hand, 1)
    assert one == [0, 0.0, 0, 0, 0, 0, 0, 1, 0.0, 0.0, [0.0], [0.0], 0.0, pytest.approx(-0.1)]
    assert not fresh


# -- evaluation: shares differ by one sample at most, and nobody is given another's


def evaluate(stream: bool) -> dict[str, int]:
    seen: Counter[str] = Counter()

    def see(name: str, batch: Any) -> Any:
        seen[name] += len(batch)
        return batch

    module = acting(
        Validated,
        validation_step=lambda m, batch, at: see("validation", batch),
        on_validation_batch_end=lambda m, outputs, batch, at: see("end", batch),
        predict_step=lambda m, batch, at: see("predict", batch),
    )
    data = DataLoader(Stream(SAMPLES), batch_size=2) if stream else numbers(SAMPLES, 2)
    on_ranks().validate(module, data, verbose=False)
    on_ranks().predict(module, data)
    return dict(seen)


@pytest.mark.parametrize("stream", [False, True])
def test_evaluation_gives_each_sample_to_one_rank(ranks: RankPool, stream: bool) -> None:
    found: Counter[str] = sum((Counter(each) for each in ranks(WORLD).run(evaluate, stream)), Counter())
    assert found == {"validation": SAMPLES, "end": SAMPLES, "predict": SAMPLES}


class Nothing(Slope):
    """Has no loss on rank 1, and changes gradients where there was one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_rank else super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        assert self.w.grad is not None
        self.w.grad *= 0.5


def without_a_loss() -> list[str]:
    return heard(lambda: on_ranks(max_epochs=1).fit(Nothing(), numbers(4)), "on_after_backward")


def test_a_rank_without_a_loss_says_that_a_hook_which_changes_gradients_does_not_run(ranks: RankPool) -> None:
    zero, one = ranks(2).run(without_a_loss)
    assert not zero
    assert all("rank 1: `training_step` returned None" in text for text in one)
    assert one
