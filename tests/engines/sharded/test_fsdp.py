"""FSDP against one process: the same numbers, from wrapping to checkpoints, in every mode."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep import LightningModule, Trainer
from lockstep.engines.ddp.sync_batchnorm import convert_sync_batchnorm
from lockstep.engines.sharded import sharded_init
from lockstep.engines.sharded.sharded_init import ShardedInit
from lockstep.ground import comm
from lockstep.ground.errors import MisconfigurationException
from lockstep.memory.blocks import blocks_by, find_blocks
from lockstep.strategies import DDPStrategy, FSDPStrategy
from tests.equivalence.models import CASES as COMMON
from tests.equivalence.models import Case, Normed, Plain, agree, refusal, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(self.inner(self.norm(x)).tanh())
        return out


class Deep(LightningModule):
    """Repeated blocks, a scalar parameter, a frozen one, a tied one, and sizes that no world divides."""

    policy: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.back = nn.Linear(7, 5, bias=False)
        self.again = nn.Linear(7, 5)
        self.again.weight = self.back.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x) * self.scale * self.frozen
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.back(hidden) + self.again(hidden).sin()
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self(x).sum(1)
        return nn.functional.mse_loss(found, y.reshape(-1).to(found.dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.005, momentum=0.9, weight_decay=0.1)


class Mixed(Deep):
    """Several dtypes in a block; torch's Adam takes a complex parameter for pairs of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.waves = nn.Parameter(torch.randn(7, dtype=torch.complex64, generator=torch.Generator().manual_seed(3)))
        self.blocks[1].register_parameter("gain", nn.Parameter(torch.ones(7, dtype=torch.complex64)))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.into(x) * self.waves * self.blocks[1].gain
        return super().forward(x) + torch.view_as_real(turned).sum((1, 2))[:, None]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.003, eps=1e-2)


class OwnNorm(Normed):
    """Its BatchNorm was made synchronized by the user."""

    def __init__(self) -> None:
        super().__init__()
        convert_sync_batchnorm(self)


CASES: dict[str, Case] = {
    **COMMON,
    "empty shares, accumulation": (Plain, 25, {"batch_size": 2, "steps": 7, "accumulate": 3}),
    "by value": (Plain, 23, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "SyncBatchNorm": (Normed, 23, {"sync_batchnorm": True}),
    "SyncBatchNorm, empty shares": (Normed, 26, {"sync_batchnorm": True, "batch_size": 2}),
    "SyncBatchNorm of the user's, empty shares": (OwnNorm, 26, {"batch_size": 2}),
    "blocks": (Deep, 23, {"accumulate": 3, "gradient_clip_val": 0.5, "steps": 3}),
    "several dtypes": (Mixed, 23, {"accumulate": 3, "gradient_clip_val": 0.5, "steps": 3}),
    "blocks, empty shares": (Deep, 25, {"batch_size": 2, "steps": 7}),
}
MODES: dict[str, dict[str, Any]] = {
    "full": {},
    "gradients": {"sharding_strategy": "SHARD_GRAD_OP"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1)},
    "offload": {"cpu_offload": True},
    "recomputed": {"activation_checkpointing": True},
    "reduced once": {"accumulate_shards": False},
}


EVERYDAY = [("full", 2)]
ALWAYS = {
    "blocks": ("gradients", "hybrid", "reduced once"),
    "blocks, empty shares": ("offload", "recomputed"),
}
"""Cases by which the other modes are tried every day, each by one of them, on two ranks."""
ALL = [(mode, world) for mode in MODES for world in (1, 2, 3, 4) if mode != "hybrid" or world in (2, 4)]


def is_everyday(case: str, mode: str, world: int) -> bool:
    if case.endswith("empty shares") and mode == "full":  # on two ranks no share of these with BatchNorm is empty
        return world == 3 and case not in ALWAYS
    return (mode, world) in EVERYDAY or (mode in ALWAYS.get(case, ()) and world == 2)


@pytest.mark.everyday(8)
@pytest.mark.parametrize(
    ("case", "mode", "world"),
    [
        pytest.param(case, *each, marks=() if is_everyday(case, *each) else pytest.mark.slow)
        for case in CASES
        for each in ALL
    ],
)
def test_shards_train_as_one_process(ranks: RankPool, case: str, mode: str, world: int) -> None:
    module, length, given = CASES[case]
    options = MODES[mode] | ({"device_mesh": (2, world // 2)} if mode == "hybrid" else {})
    agree(ranks(world), module, rows(length), partial(FSDPStrategy, **options), **{"steps": 3, **given})


# -- what is sharded -----------------------------------------------------------------------------------------


def test_repeated_blocks_are_found() -> None:
    net = Deep()
    assert find_blocks(net) == list(net.blocks)
    nested = nn.Sequential(nn.Sequential(*[Block(3) for _ in range(2)]), nn.Sequential(Block(3), Block(3)))
    assert len(find_blocks(nested)) == 4
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []


def test_a_block_that_shares_a_parameter_with_others_is_left_to_the_module() -> None:
    net = Deep()
    net.blocks[1].inner.bias = net.blocks[2].inner.bias
    assert find_blocks(net) == [net.blocks[0]]
    with pytest.raises(ValueError, match=r"'inner.bias' with 'blocks.1.inner.bias' outside of"):
        blocks_by({Block}, net)


def test_policies_of_torchs_first_fsdp_choose_layers() -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    net = Deep()
    assert blocks_by([Block], net) == list(net.blocks)[::-1]
    assert blocks_by(partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), net) == list(net.blocks)
    chosen = blocks_by(partial(size_based_auto_wrap_policy, min_num_params=200), net)
    assert chosen == list(net.blocks)
    with pytest.raises(ValueError, match="no layer of Deep is selected; the classes of its layers are Block"):
        blocks_by({nn.Conv2d}, net)


class BuiltLate(LightningModule):
    """Its layers are made in `configure_model`, with random numbers, and some again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(6, 64), *[Block(64) for _ in range(6)], nn.Linear(64, 1))
            for layer in self.net[:2].modules():
                if isinstance(layer, nn.Linear):
                    nn.init.trunc_normal_(layer.weight, std=0.2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.net is not None
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


def built_late(strategy: str) -> tuple[dict[str, Tensor], int]:
    sharded_init.BUDGET, peaks = 20_000, []
    own = ShardedInit.gather

    def noting(self: ShardedInit, tensors: Any) -> None:
        own(self, tensors)
        peaks.append(self.peak)

    with patch.object(ShardedInit, "gather", noting):
        torch.manual_seed(4 + (dist.get_rank() if strategy == "fsdp" else 0))
        world = dist.get_world_size() if strategy == "fsdp" else 1
        trainer = quiet(strategy=strategy, devices=world, max_steps=1)
        trainer.fit(BuiltLate(), rows(8)(2))
    whole = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    return whole, max(peaks, default=0)


def test_ranks_build_together_what_none_of_them_holds(ranks: RankPool) -> None:
    ((expected, _),) = ranks(1).run(built_late, "auto", group=False)
    size = sum(value.nbytes for value in expected.values())
    for found, peak in ranks(3).run(built_late, "fsdp", timeout=60):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
        assert 0 < peak < size / 3


# -- evaluation ----------------------------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((6,), float(index))


class Stream(IterableDataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        return (torch.full((6,), float(index)) for index in range(self.length))


class Seen(Deep):
    """Counts what its hooks and steps were given, and whether a padding batch came through."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked: list[float] = []
        self.steps = 0
        self.seen = 0.0

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.steps += 1
        self.seen += float(batch[:, 0].sum())
        self.log("mean", self(batch).mean(), on_epoch=True)
        self.log("samples", float(len(batch)), reduce_fx="sum")
        self.log("largest", batch.max(), reduce_fx="max")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooked += batch[:, 0].tolist()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self(batch)
        return batch[:, 0].tolist()


def evaluated(length: int, streams: bool, strategy: str) -> Any:
    torch.manual_seed(3)
    module = Seen()
    trainer = quiet(strategy=strategy, devices=dist.get_world_size() if strategy == "fsdp" else 1, precision="64-true")
    data: Any = Stream(length) if streams else Numbers(length)
    loaders = [DataLoader(data, batch_size=2), DataLoader(Numbers(3), batch_size=1)]
    trainer.validate(module, loaders, verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = [
        number for batch in trainer.predict(module, DataLoader(Numbers(length), batch_size=2)) for number in batch
    ]
    return logged, sorted(module.hooked), module.seen, predicted


@pytest.mark.parametrize(("length", "streams"), [(1, True), (2, False), (7, True)])
def test_an_evaluation_sees_each_sample_once(ranks: RankPool, length: int, streams: bool) -> None:
    """Ranks without a batch take part in the others' forwards, and nothing of it counts."""
    ((expected, hooked, seen, predicted),) = ranks(1).run(evaluated, length, streams, "auto", group=False)
    found = ranks(3).run(evaluated, length, streams, "fsdp", timeout=60)
    for logged, *_ in found:
        assert logged == pytest.approx(expected, rel=1e-12)
    assert sorted(number for _, mine, *_ in found for number in mine) == hooked
    assert sum(mine for _, _, mine, _ in found) == pytest.approx(seen)
    assert sorted(number for *_, mine in found for number in mine) == sorted(predicted)


def fits_after_validation() -> bool:
    torch.manual_seed(dist.get_rank())
    module = Seen()
    trainer = quiet(strategy="fsdp", devices=2, max_steps=2, precision="64-true")
    trainer.validate(module, DataLoader(Numbers(3)), verbose=False)
    trainer.fit(module, rows(8)(2), DataLoader(Numbers(3)))
    trainer.validate(module, DataLoader(Numbers(3)), verbose=False)
    return all(torch.equal(*comm.all_gather_tensor(whole)) for _, whole, _ in trainer.strategy.whole_parameters())


def test_a_module_may_be_validated_before_its_fit(ranks: RankPool) -> None:
    """Parameters made under inference_mode cannot be trained."""
    assert ranks(2).run(fits_after_validation, timeout=60) == [True, True]


# -- checkpoints ---------------------------------------------------------------------------------------------


class Adam(Deep):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.003)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "sharded": lambda: DDPStrategy(shard_optimizer=True),
    "fsdp": FSDPStrategy,
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, dist.get_world_size() // 2)),
    "gradients": lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"),
}


def fit_to(steps: int, strategy: str, resume: str | None = None, save: str | None = None) -> dict[str, Tensor]:
    world = 1 if strategy == "single" else dist.get_world_size()
    trainer = quiet(strategy=STRATEGIES[strategy](), devices=world, max_steps=steps, precision="64-true", max_epochs=-1)
    trainer.seed = 5
    torch.manual_seed(1 if world == 1 or not dist.get_rank() else 77)
    module = Adam()
    trainer.fit(module, rows(24)(24 // world // 2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


MOVES = [("fsdp", 2, "single", 1), ("single", 1, "fsdp", 2), ("ddp", 2, "gradients", 2)]
MORE = [
    (a, m, b, n)
    for a in STRATEGIES
    for b in STRATEGIES
    for m in (1, 2, 3, 4)
    for n in (1, 2, 3, 4)
    if (a == "single") <= (m == 1)
    and (b == "single") <= (n == 1)
    and (a != "hybrid" or m in (2, 4))
    and (b != "hybrid" or n in (2, 4))
    and {"fsdp", "gradients", "hybrid"} & {a, b}
    and (a, m, b, n) not in MOVES
]


@pytest.mark.parametrize(
    ("wrote", "many", "reads", "more"),
    [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in MORE[::7])],
)
def test_a_checkpoint_goes_from_strategy_to_strategy(
    ranks: RankPool, tmp_path: Path, wrote: str, many: int, reads: str, more: int
) -> None:
    path = str(tmp_path / "moved.ckpt")
    written = ranks(many).run(fit_to, 3, wrote, None, path, timeout=60)[0]
    saved = torch.load(path, weights_only=False)
    alone = ranks(1).run(fit_to, 3, "single", None, str(tmp_path / "alone.ckpt"), group=False)[0]
    expected = torch.load(tmp_path / "alone.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    for name, value in written.items():
        assert torch.equal(saved["state_dict"][name], value), name
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)
    mine, theirs = saved["optimizer_states"][0], expected["optimizer_states"][0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, state in mine["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(value, theirs["state"][number][name], rtol=1e-7, atol=1e-12)
    whole = ranks(1).run(fit_to, 5, "single", group=False)[0]
    for found in ranks(more).run(fit_to, 5, reads, path, timeout=60):
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=1e-10)


# -- manual optimization, hooks, precision -------------------------------------------------------------------


class Adversaries(LightningModule):
    """Two optimizers in turn, by hand; each net is frozen while the other one learns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.judge = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.judge(self.maker(x)).square().mean())
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward(
            (self.judge(x).squeeze(1) - x[:, 0]).square().mean() - self.judge(self.maker(x).detach()).mean() / 9
        )
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.maker.parameters(), 0.05), torch.optim.SGD(self.judge.parameters(), 0.05, 0.9)


@pytest.mark.parametrize(("length", "policy"), [(24, None), (25, {nn.Linear})])
def test_manual_optimization_trains_as_one_process(ranks: RankPool, length: int, policy: Any) -> None:
    agree(ranks(2), Adversaries, rows(length), partial(FSDPStrategy, auto_wrap_policy=policy), batch_size=2)


class WalksAway(Deep):
    """Ends an epoch within a window: what its micro-batches gave is dropped."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 and self.current_epoch == 0 else None


def ended_early(strategy: Any) -> dict[str, Tensor]:
    trainer = quiet(
        strategy=strategy or FSDPStrategy(accumulate_shards=False),
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=3,
        precision="64-true",
    )
    trainer.seed = 5
    torch.manual_seed(1)
    trainer.fit(WalksAway(), rows(36)(2))
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


def test_gradients_of_a_window_that_ended_early_are_dropped(ranks: RankPool) -> None:
    """Whole gradients wait beside `.grad`, where torch's `zero_grad` does not see them."""
    expected = ranks(2).run(ended_early, "ddp")[0]
    for found in ranks(2).run(ended_early, None, timeout=60):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


class Images(LightningModule):
    """A convolution and a batch norm that belong to the module's own group."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        loss = (self.net(images) - targets).square().mean()
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def images_in(dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Losses under ``mixed_precision=dtype``, and of a loop by hand that rounds weights and inputs, but no norm."""
    data = [(torch.randn(6, 1, 4, 4), torch.randn(6, 1)) for _ in range(4)]
    torch.manual_seed(3)
    module, plain = Images(), Images()
    plain.load_state_dict(module.state_dict())
    optimizer = plain.configure_optimizers()
    conv, norm, _, _, linear = plain.net
    expected = []
    for images, targets in data:
        weights = [layer.weight.to(dtype) for layer in (conv, linear)], [b.bias.to(dtype) for b in (conv, linear)]
        hidden = nn.functional.conv2d(images.to(dtype), weights[0][0], weights[1][0])
        hidden = norm(hidden.float()).to(dtype).relu().flatten(1)
        loss = (nn.functional.linear(hidden, weights[0][1], weights[1][1]) - targets.to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    quiet(strategy=FSDPStrategy(mixed_precision=dtype), devices=1, max_steps=4).fit(module, data)
    return module.losses, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_policys_dtype_is_that_of_the_steps_inputs_and_not_of_batch_norms(
    ranks: RankPool, dtype: torch.dtype
) -> None:
    """Layers of the module's own group met inputs in float32; batch norms met weights unlike their statistics."""
    (found,) = ranks(1).run(images_in, dtype, timeout=60)
    assert found[0] == found[1]


# -- what cannot be ------------------------------------------------------------------------------------------


class MadeEarly(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class LineSearch(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Grows(Deep):
    def on_train_batch_end(self, *args: Any) -> None:
        if not hasattr(self, "more"):
            self.more = nn.Parameter(torch.ones(3))


class ReturnsNone(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if batch_idx else None


REFUSED: list[tuple[Callable[[], LightningModule], dict[str, Any], str]] = [
    (MadeEarly, {}, "Create the optimizer in `configure_optimizers`"),
    (LineSearch, {}, "FSDPStrategy does not support LBFGS, which mixes"),
    (Grows, {}, "'more' was added after the module was sharded"),
    (ReturnsNone, {}, "such as `0.0 * loss`"),
    (Deep, {"auto_wrap_policy": {nn.Conv2d}}, "FSDPStrategy(auto_wrap_policy={<class"),
    (Deep, {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (3, 2)}, "the run's 2 ranks"),
]


@pytest.mark.parametrize(("module", "given", "said"), REFUSED)
def test_what_cannot_be_sharded_is_refused_by_name(ranks: RankPool, module: Any, given: Any, said: str) -> None:
    for found in ranks(2).run(refusal, module, partial(FSDPStrategy, **given), rows(12)(2), timeout=60):
        assert said in found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sharding_strategy": "FULL"}, 'must be one of "FULL_SHARD", "SHARD_GRAD_OP"'),
        ({"auto_wrap_polcy": {Block}}, "Did you mean auto_wrap_policy"),
        ({"mixed_precision": "half"}, "must be a dtype"),
        ({"device_mesh": (2, 2)}, 'sharding_strategy="HYBRID_SHARD"'),
        ({"cpu_offload": "yes"}, "must be True or False"),
        ({"cpu_offload": True, "sharding_strategy": "NO_SHARD"}, "Use a different sharding_strategy, or omit"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        FSDPStrategy(**given)
    assert said in str(raised.value)


def test_arguments_of_torchs_first_fsdp_are_taken() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

    FSDPStrategy(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=True),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def test_no_shard_is_ddp() -> None:
    assert type(quiet(strategy=FSDPStrategy(sharding_strategy="NO_SHARD"), devices=2).strategy) is DDPStrategy
    assert type(quiet(strategy="fsdp", devices=2).strategy) is FSDPStrategy


def sharded_then_ddp() -> str:
    module = Deep()
    quiet(strategy="fsdp", devices=2, max_steps=1).fit(module, rows(4)(2))
    with pytest.raises(MisconfigurationException) as raised:
        Trainer(strategy="ddp", devices=2, accelerator="cpu", logger=False).fit(module, rows(4)(2))
    return str(raised.value)


def test_a_sharded_module_is_not_given_to_another_engine(ranks: RankPool) -> None:
    for said in ranks(2).run(sharded_then_ddp, timeout=60):
        assert 'is still partitioned after a fit with strategy="fsdp"' in said


class Around(Plain):
    """A module around the layers of another one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def _fits_layers_of_another_module() -> str:
    first = Plain()
    quiet(strategy="fsdp", devices=2, max_steps=1, max_epochs=-1).fit(first, rows(8)(2))
    with pytest.raises(MisconfigurationException) as refused:
        quiet(strategy="fsdp", devices=2, max_steps=1, max_epochs=-1).fit(Around(first.net), rows(8)(2))
    quiet(strategy="fsdp", devices=2, max_steps=1, max_epochs=-1).fit(first, rows(8)(2))
    return str(refused.value)


def test_layers_that_another_modules_fit_left_in_shards_are_refused(ranks: RankPool) -> None:
    """torch said: "Invariant encountered: value was None when it should not be"."""
    for said in ranks(2).run(_fits_layers_of_another_module):
        assert "Around.net.0.weight is already sharded" in said


# -- callbacks that copy or change the module ------------------------------------------------------------------


def left_after_a_fit() -> int:
    def fit() -> weakref.ref[Any]:
        module = Deep()
        quiet(strategy="fsdp", devices=2, max_steps=2).fit(module, [(x.float(), y.float()) for x, y in rows(8)(4)])
        return weakref.ref(module)

    of_fits = [fit() for _ in range(2)]
    gc.collect()
    return sum(module() is not None for module in of_fits)


def test_a_fit_leaves_no_module_behind(ranks: RankPool) -> None:
    """A hook on a gathered parameter, which the garbage collector cannot look into, held the module."""
    assert ranks(2).run(left_after_a_fit, timeout=60) == [0, 0]
