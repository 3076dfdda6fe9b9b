"""A model in stages whose devices are all driven by one process: the numbers of one device, and what is where."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import LightningModule
from lockstep.callbacks import Callback
from lockstep.extensions.balancing.pipeline.stages import SCHEDULES
from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies import BalancedStrategy
from lockstep.testing import check_equivalence
from tests.engines.devices import CPU, MadeUpDevices, made_up
from tests.equivalence.models import Plain, rows
from tests.extensions.balancing.balanced import check_reports, made_up_clock
from tests.extensions.balancing.pipeline import test_balanced as of_ranks
from tests.extensions.balancing.pipeline import test_resplit as of_moves
from tests.extensions.balancing.pipeline.test_balanced import CASES, SEEDS, Chained, Tied
from tests.extensions.balancing.test_stage_timeline import check_file, trained
from tests.loop.pieces import Validated, numbers, quiet
from tests.tools.pool import RankPool

one_process = partial(BalancedStrategy, one_process=True)


@pytest.fixture(autouse=True)
def leaves_no_group() -> Iterator[None]:
    """A process group of one rank stays for the next call, here of another test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the numbers of one device ---------------------------------------------------------------------------------

RUNS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (3, {"schedule": "gpipe"}),
    (2, {"schedule": "interleaved"}),
    (3, {"schedule": "zero-bubble"}),
    (2, {"schedule": "zero-bubble", "stages_per_rank": 2}),
]


@pytest.mark.everyday(6)
@pytest.mark.parametrize("run", range(len(RUNS)), ids=map(str, RUNS))
@pytest.mark.parametrize("case", CASES)
def test_devices_of_one_process_train_as_one_device(run: int, case: str) -> None:
    (devices, options), (module, length, given) = RUNS[run], CASES[case]
    check_reports([check_equivalence(module, rows(length), strategy=one_process(**options), devices=devices, **given)])


class Untied(Tied):
    """Each block has weights of its own; a frozen one is among them."""

    def __init__(self, blocks: int = 5, width: int = 6) -> None:
        super().__init__(blocks, width)
        self.layers[-1].weight = nn.Parameter(self.layers[-1].weight.detach().clone().mul_(0.5))
        self.layers[blocks // 2].requires_grad_(False)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_random_pipelines_of_one_process_train_as_one_device(devices: int, seed: int) -> None:
    check_reports([of_ranks.random_case(seed, devices, one_process=True)])


@pytest.mark.everyday(6)
@pytest.mark.parametrize(("kind", "schedule"), of_ranks.SPLIT_RUNS)
def test_odd_stages_of_one_process_train_as_one_device(kind: type[LightningModule], schedule: str) -> None:
    chain = kind().layers if issubclass(kind, Tied) else kind().net
    strategy = one_process(split=[3, len(chain) - 3], schedule=schedule)  # type: ignore[arg-type]
    check_reports([check_equivalence(kind, rows(23), strategy=strategy, devices=2, batch_size=5)])


@pytest.mark.parametrize("kind", [of_ranks.Ignores, of_ranks.LossWithoutChain])
def test_a_loss_without_the_chain_has_the_gradients_of_what_it_uses(kind: type[LightningModule]) -> None:
    found = of_ranks.weights_of(kind, one_process(split="equal"), 2)
    torch.testing.assert_close(found, of_ranks.weights_of(kind, "auto", 1), rtol=1e-11, atol=1e-13)


class Seen(nn.Module):
    """Its parameter has a hook that runs once its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(8, 8), 0
        self.inner.bias.register_post_accumulate_grad_hook(self._look)

    def _look(self, parameter: Tensor) -> None:
        self.seen += 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Watched(Chained):
    """A hook waits for gradients of its last stage."""

    layers = staticmethod(lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Seen(), nn.Linear(8, 1)])


class Twins(nn.Module):
    """Two parameters get the gradient of its output, one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + self.one + self.other


class OneForTwo(Chained):
    """Its micro-batches have two samples, as many as a parameter has rows."""

    layers = staticmethod(lambda: [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Twins(), nn.Linear(8, 1)])


SPLIT_WRONG: dict[Any, str] = {
    **of_ranks.UNSPLIT,
    of_ranks.Ignores: "the gradient of net.3.value differs",
    of_ranks.LossWithoutChain: "the gradient of the parameter of shape .* outside of the chain differs",
    OneForTwo: r"torch computes a gradient for net.3.* that shares memory with another gradient",
    Watched: "net.3.inner.bias has a post-accumulate-grad hook",
}


@pytest.mark.parametrize("kind", SPLIT_WRONG)
def test_where_torchs_backward_in_two_parts_is_wrong_it_is_refused(kind: type[LightningModule]) -> None:
    """Before the first update that would be; a loss that leaves the chain out in every other step, in the second."""
    chain = kind().layers if issubclass(kind, Tied) else kind().net
    split = [3, len(chain) - 3]  # type: ignore[arg-type]
    strategy = one_process(split=split, schedule="zero-bubble")
    if torch.__version__ < "2.13":  # which backward is wrong is a matter of torch's release
        right_or_refused(kind, strategy, one_process(split=split, schedule="1f1b"))
        return
    with pytest.raises(MisconfigurationException, match=SPLIT_WRONG[kind]) as raised:
        quiet(strategy=strategy, devices=2, max_epochs=1, precision="64-true").fit(kind(), rows(23)(5))
    assert "Choose schedule='1f1b' or 'interleaved'" in str(raised.value)


def right_or_refused(kind: type[LightningModule], strategy: BalancedStrategy, plain: BalancedStrategy) -> None:
    try:
        found = of_ranks.weights_of(kind, strategy, 2)
    except MisconfigurationException as refused:
        assert "Choose schedule='1f1b' or 'interleaved'" in str(refused)  # noqa: PT017
    else:
        torch.testing.assert_close(found, of_ranks.weights_of(kind, plain, 2), rtol=1e-11, atol=1e-13)


class LogsBefore(Tied):
    """Logs what it is given before it calls the chain, which runs once more for the first stage."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", float(len(batch[0])), reduce_fx="sum", batch_size=1)
        self.through(self.table(batch[0]))


def sums(strategy: Any, devices: int) -> dict[str, float]:
    trainer = quiet(strategy=strategy, devices=devices, max_epochs=1, precision="64-true")
    trainer.fit(LogsBefore(), rows(13)(4), rows(9)(2))
    return {name: value.item() for name, value in trainer.callback_metrics.items() if name in ("samples", "seen")}


def test_what_is_logged_before_the_chain_counts_once() -> None:
    """The code before the chain runs for the first stage and for the last one, here in one process."""
    assert sums(one_process(micro_batches=2), 2) == sums("auto", 1)
    assert sums("auto", 1)["seen"] == 9.0


# -- what is where ---------------------------------------------------------------------------------------------


def test_an_operation_on_two_made_up_devices_raises() -> None:
    """So that the tests below test something."""
    devices = MadeUpDevices()
    with devices.there():
        here, there = torch.ones(2, requires_grad=True), torch.ones(2).to(made_up(1))
        assert (here.device, there.device, torch.zeros(2, device=made_up(2)).device) == (CPU, made_up(1), made_up(2))
        with pytest.raises(AssertionError, match="of tensors on cpu, cpu:1"):
            here * there
        product = here.to(made_up(1)) * there * torch.tensor(2.0)
        assert product.device == made_up(1)
        product.sum().to(CPU).backward()
        assert here.grad is not None
        assert here.grad.device == CPU
        parameter = nn.Parameter(torch.ones(2))
        parameter.data = parameter.data.to(made_up(2))
        assert parameter.device == made_up(2)


class Where(Callback):
    """Checks after each step what is on which device, and at the end that nothing is left on a device of a stage."""

    def __init__(self, devices: MadeUpDevices, count: int, chain: str) -> None:
        self.devices, self.count, self.chain = devices, count, chain
        self.looks, self.ends = 0, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if not isinstance(trainer.strategy, BalancedStrategy):
            return
        split, root = trainer.strategy.split, made_up(self.devices.first)
        ends = list(itertools.accumulate(split))
        assert pl_module.device == trainer.strategy.root_device == root
        for name, tensor in itertools.chain(pl_module.named_parameters(), pl_module.named_buffers()):
            where = root
            if name.startswith(f"{self.chain}."):
                block = int(name.split(".")[1])
                stage = next(number for number, end in enumerate(ends) if block < end)
                where = made_up(self.devices.first + self.count - 1 - stage % self.count)  # the last is on the first
            assert tensor.device == where, name
            if tensor.grad is not None:
                assert tensor.grad.device == where, name
            for value in trainer.optimizers[0].state.get(tensor, {}).values():
                assert not isinstance(value, Tensor) or not value.ndim or value.device == where, name
        self.looks += 1

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, BalancedStrategy):
            root = made_up(self.devices.first)
            assert {p.device for p in pl_module.parameters()} <= {CPU, root}
            self.ends = True


class OnItsDevice(Plain):
    """Makes a tensor on the module's device, as `self.device` says it; its first parameter is one of the chain."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.zeros(3, device=self.device).sum()


@pytest.mark.parametrize(
    ("run", "first"),
    [pytest.param(run, (run + 1) % 2, marks=[] if run == 4 else [pytest.mark.slow]) for run in range(len(RUNS))],
)
@pytest.mark.parametrize("kind", [OnItsDevice, pytest.param(of_moves.Tied, marks=pytest.mark.slow)])
def test_blocks_are_on_the_device_of_their_stage(kind: type[LightningModule], run: int, first: int) -> None:
    """No operation of a fit, forward or backward, has tensors of two devices; the numbers are those of one."""
    (count, options), made = RUNS[run], MadeUpDevices(first)
    make: Callable[[], LightningModule] = kind if kind is OnItsDevice else Apart
    where = Where(made, count, "net" if kind is OnItsDevice else "layers")
    given: dict[str, Any] = {"gradient_clip_val": 0.1, "accumulate": 2, "callbacks": [where]}
    with made.there():
        strategy = one_process(split="equal", **options)
        check_reports([check_equivalence(make, rows(23), strategy=strategy, devices=count, **given)])
    assert where.looks >= 5
    assert where.ends
    assert len(made.moves) > 2 * (count - 1)


class Apart(of_moves.Tied):
    """Blocks with buffers under Adam, without a matrix that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1].linear = nn.Linear(5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("devices", [2, 3])
def test_random_pipelines_do_nothing_on_two_devices_at_once(devices: int, seed: int) -> None:
    with MadeUpDevices(seed % 2).there():
        check_reports([of_ranks.random_case(seed, devices, Untied, one_process=True)])


class KeepsMore(nn.Linear):
    """Has a tensor that is neither parameter nor buffer, and moves it, as metrics do."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.sums = torch.zeros(6)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.sums = fn(self.sums)
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        self.sums += x.detach().sum(0)
        return super().forward(x)


class Measures(Untied):
    """Has such layers outside of the chain and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1], self.head = KeepsMore(), KeepsMore()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.head(self.table(batch[0])).square().mean()

    def on_train_end(self) -> None:
        self.at_end = self.head.sums.device


def test_layers_that_move_more_than_parameters_do_so() -> None:
    """A metric of torchmetrics stayed on the CPU while its model went to the device of its rank."""
    with MadeUpDevices(1).there():
        module = Measures()
        quiet(strategy=one_process(split=[2, 3]), devices=2, max_epochs=1).fit(module, rows(8)(4))
        assert module.at_end == made_up(1)
        assert module.layers[1].sums.device == CPU  # again, with its block
        assert module.layers[1].sums.any()


def test_evaluation_and_prediction_go_from_device_to_device() -> None:
    class Looks(of_ranks.Looks):
        def __init__(self) -> None:
            super().__init__()
            self.layers[-1].weight = nn.Parameter(torch.eye(6))

    with MadeUpDevices(1).there():
        found = of_ranks.seen(one_process(split="equal"), 2, 6, Looks)
    of_ranks.check_seen(found, of_ranks.seen("auto", 1, 6, Looks))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_sixteen_bits_and_clipping_know_several_devices(algorithm: str) -> None:
    def fit(strategy: Any, devices: int) -> list[float]:
        torch.manual_seed(4)
        module, flags = Untied(), {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
        trainer = quiet(strategy=strategy, devices=devices, max_epochs=1, precision="16-mixed", **flags)
        trainer.fit(module, rows(16, shuffle=False)(4))
        return [p.sum().item() for p in module.parameters()]

    with MadeUpDevices().there():
        found = fit(one_process(split="equal", chain="layers"), 2)
    assert found == pytest.approx(fit("auto", 1), rel=1e-2, abs=1e-3)


# -- blocks that move ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 12)))])
def test_blocks_that_move_at_random_between_devices_train_as_on_one(seed: int) -> None:
    count, made, jumps = 2 + seed % 3, MadeUpDevices(seed % 2), of_moves.Jumps(seed)
    where = Where(made, count, "layers")
    schedule = SCHEDULES[seed % 4] if count < 4 else "1f1b"
    given: dict[str, Any] = {"accumulate": 1 + seed % 2, "gradient_clip_val": 0.5, "callbacks": [jumps, where]}
    with made.there():
        strategy = one_process(split="equal", schedule=schedule)
        check_reports([check_equivalence(Apart, rows(37), strategy=strategy, devices=count, steps=6, **given)])
    assert len({tuple(split) for split in jumps.splits}) > 1


def test_adams_states_move_with_their_blocks() -> None:
    found = of_moves.states_of(one_process(split="equal"), 3, 1)
    for moved, alone in zip(found, of_moves.states_of("auto", 1, None), strict=True):
        torch.testing.assert_close(moved, alone, rtol=1e-10, atol=1e-12)


class SlowPlace(Callback):
    """Lets the clock of each device run at its own pace: one is slow until a step, and then the next one."""

    def __init__(self, place: int, factor: float, until: int) -> None:
        self.place, self.factor, self.until = place, factor, until

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy, BalancedStrategy):
            for place, times in trainer.strategy.times.items():
                times.clock = partial(self._now, trainer, place)

    def _now(self, trainer: Any, place: int) -> float:
        slow = place == self.place + (trainer.global_step >= self.until)
        return of_moves.CLOCK.now * (self.factor if slow else 1.0)


@pytest.mark.parametrize(
    ("schedule", "blocks", "splits"),
    [
        ("1f1b", 8, [(6, 2), (2, 6)]),
        pytest.param("interleaved", 16, [(6, 2, 6, 2), (2, 6, 2, 6)], marks=pytest.mark.slow),
        pytest.param("zero-bubble", 8, [(6, 2), (2, 6)], marks=pytest.mark.slow),
    ],
)
def test_a_slow_device_gets_fewer_blocks(
    monkeypatch: pytest.MonkeyPatch, schedule: str, blocks: int, splits: list[tuple[int, ...]]
) -> None:
    """Each device is measured by itself, first block by block and then in its windows."""
    monkeypatch.setattr(of_moves, "FACTOR", lambda rank, step: 1.0)
    strategy = one_process(schedule=schedule)
    made = nullcontext() if schedule == "1f1b" else MadeUpDevices().there()
    with made_up_clock() as clock, made:
        monkeypatch.setattr(of_moves, "CLOCK", clock)
        report = check_equivalence(
            lambda: of_moves.Uneven((1.0,) * blocks),
            rows(203),
            strategy=strategy,
            devices=2,
            batch_size=4,
            steps=32,
            callbacks=[SlowPlace(0, 3.0, 12)],
        )
    assert report, report
    assert [found.after for found in strategy.decisions] == splits
    assert strategy.decisions[0].step == 0
    assert "the stages' devices run all blocks in" in str(strategy.decisions[0])
    assert 12 < strategy.decisions[1].step <= 30
    assert strategy.decisions[1].gain == pytest.approx(3.0)


# -- checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_goes_on_on_one_device_on_two_ranks_and_in_one_process(ranks: RankPool, tmp_path: Path) -> None:
    path, fit = tmp_path / "devices.ckpt", of_ranks.fit
    whole = fit(path, one_process(split=[4, 1]), 2, 6, False)
    saved = torch.load(path, weights_only=True)
    assert len(saved["optimizer_states"][0]["state"]) == 3 + 4 + 5
    assert saved["lockstep"]["strategy"] == {"split": [4, 1]}
    torch.testing.assert_close(fit(path, one_process(split=[4, 1]), 2, 6, True), whole, rtol=0, atol=0)
    found = [fit(path, one_process(), 3, 6, True), fit(path, "auto", 1, 6, True)]
    found += ranks(2).run(fit, path, BalancedStrategy(), 2, 6, True, timeout=60)
    for each in found:
        torch.testing.assert_close(each, whole, rtol=1e-11, atol=1e-13)
    back = tmp_path / "ranks.ckpt"
    expected = ranks(2).run(fit, back, BalancedStrategy(split=[2, 3]), 2, 6, False, timeout=60)[0]
    torch.testing.assert_close(fit(back, one_process(), 2, 6, True), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_the_split_of_a_checkpoint_is_gone_on_with_and_its_states_are_on_their_devices(tmp_path: Path) -> None:
    def life(steps: int, split: Any) -> tuple[Any, Any]:
        torch.manual_seed(5)
        keeps, module, made = of_moves.Keeps(), Apart(), MadeUpDevices(1)
        path = tmp_path / "one.ckpt"
        with made.there():
            where = Where(made, 2, "layers")
            trainer = quiet(
                strategy=one_process(split=split),
                devices=2,
                max_steps=steps,
                precision="64-true",
                callbacks=[keeps, where],
            )
            trainer.fit(module, rows(64, shuffle=False)(4), ckpt_path=path if path.exists() else None)
            if not path.exists():
                trainer.save_checkpoint(path)
        return trainer.strategy, keeps.states[-1]

    life(3, [5, 2])
    strategy, resumed = life(6, "measured")
    assert strategy.decisions[0].before == (5, 2)
    (tmp_path / "one.ckpt").unlink()
    torch.testing.assert_close(resumed, life(6, [5, 2])[1], rtol=1e-12, atol=1e-14)


def test_one_process_saves_alone_what_several_ranks_cannot(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.state = deepcopy(trainer.strategy.save(alone=True).module)

    saves, module = Saves(), Tied()
    trainer = quiet(strategy=one_process(split="equal"), devices=2, max_epochs=1, callbacks=[saves])
    trainer.fit(module, rows(4)(4))
    torch.testing.assert_close(saves.state, dict(module.state_dict()))


# -- around it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_timeline_has_the_rows_of_each_device(tmp_path: Path) -> None:
    path = tmp_path / "stages.csv"
    # blocks and backward of each; the code before and after the chain runs where the last stage is
    assert trained(path, 3, split=[3, 1, 1], one_process=True) == [False] * 3
    check_file(path, 3, [6, 6, 12])


def test_a_failed_fit_leaves_the_module_whole() -> None:
    module = of_ranks.Fails()
    with pytest.raises(KeyError, match="of the user's"):
        quiet(strategy=one_process(), devices=2, max_epochs=1).fit(module, rows(8)(4))
    quiet(max_epochs=1).fit(Tied(), rows(4)(4))
    assert all(bool(p.isfinite().all()) for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "flags", "text"),
    [
        ({"stages": 2}, {"devices": 4}, r"stages=2, one_process=True\): .* of its 4 devices, without replicas: omit"),
        ({}, {"devices": 1}, "this run has one: pass devices=2 or more"),
        ({}, {"devices": 2, "num_nodes": 2}, r"this run has 2 ranks on 2 node\(s\): pass num_nodes=1"),
        ({"one_process": 1}, {}, r"one_process=1\): pass True or False"),
    ],
)
def test_what_one_process_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], flags: dict[str, Any], text: str
) -> None:
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        if "num_nodes" in flags:
            monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException, match=text):
        quiet(strategy=BalancedStrategy(**{"one_process": True, **options}), **flags).fit(Tied(), rows(4)(2))


@pytest.mark.parametrize(
    ("module", "split", "text"),
    [
        (Tied, [3, 2], "'layers.4.weight' are the same tensor, .* but would be on cpu:1 and on cpu. Pass"),
        (of_ranks.TiedEnd, [2, 3], "'layers.0.weight' and 'layers.4.weight' are the same tensor"),
        (Tied, "measured", "would be on cpu:1 and on cpu"),
    ],
)
def test_a_parameter_on_two_devices_is_refused_by_its_names(module: Any, split: Any, text: str) -> None:
    with MadeUpDevices().there(), pytest.raises(MisconfigurationException, match=text):
        quiet(strategy=one_process(split=split), devices=2, max_epochs=1).fit(module(), rows(4)(2))


class TiedClose(Untied):
    """Its first two blocks share a matrix, and so do its last one and a layer outside of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.layers[1].weight, self.head.weight = self.layers[0].weight, self.layers[4].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.through(batch[0])).square().mean()


def test_a_parameter_that_stays_on_one_device_is_shared_there() -> None:
    class Tears(Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.strategy.resplit([3, 2])
            with pytest.raises(MisconfigurationException, match=r"'layers.0.weight' and 'layers.1.weight'.* cpu:1 and"):
                trainer.strategy.resplit([1, 4])
            assert trainer.strategy.split == (3, 2)
            with pytest.raises(MisconfigurationException, match=r"split=\[5, 0\]\): pass .* above 0, whose sum is 5"):
                trainer.strategy.resplit([5, 0])

    with MadeUpDevices().there():
        check_reports([check_equivalence(TiedClose, rows(16), strategy=one_process(split=[2, 3]), devices=2)])
        trainer = quiet(strategy=one_process(split=[2, 3]), devices=2, max_epochs=1, callbacks=[Tears()])
        trainer.fit(TiedClose(), rows(8)(4))
        with pytest.raises(MisconfigurationException, match='but with split="measured" their blocks may move'):
            quiet(strategy=one_process(), devices=2, max_epochs=1).fit(TiedClose(), rows(8)(4))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_gpus_of_one_process_train_as_one_device(schedule: str) -> None:
    for split in ("equal", "measured"):
        strategy = one_process(split=split, schedule=schedule)
        flags: dict[str, Any] = {"accelerator": "gpu", "devices": 2, "gradient_clip_val": 0.1, "accumulate": 2}
        check_reports([check_equivalence(Untied, rows(40), strategy=strategy, **flags)])


class InStages(Validated):
    """A chain of layers, whose windows an engine plays in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.chain(batch[:, None]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_validation_start(self) -> None:
        self.validated.append(len(self.batches))


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        ({}, [10, 20, 30]),
        ({"val_check_interval": 4}, [6, 9, 16, 19, 26, 29]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, [6, 9, 13, 16, 20, 26, 29]),
    ],
)
def test_a_window_that_is_played_in_one_piece_is_validated_once(flags: dict[str, Any], times: list[int]) -> None:
    """It was validated after each of its micro-batches, or not at all if it passed the one at which it was due."""
    module = InStages()
    strategy = one_process(split="equal")
    trainer = quiet(
        max_epochs=3, num_sanity_val_steps=0, accumulate_grad_batches=3, devices=2, strategy=strategy, **flags
    )
    trainer.fit(module, numbers(10), numbers(1))
    assert module.validated == times
