"""Recomputation: the same bits as without it, in less memory, and nothing counted twice."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lockstep import LightningModule
from lockstep.ground.errors import MisconfigurationException
from lockstep.memory.recompute import is_recomputing, recompute
from lockstep.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy
from tests.equivalence.models import agree, rows
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool


class Block(nn.Module):
    """With everything that a second forward could get wrong: dropout, statistics, a counter that it reads."""

    def __init__(self, width: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(dropout)
        self.into, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        self.forwards += not is_recomputing()
        self.calls += 1
        hidden = self.drop(self.into(self.norm(x)).tanh()) / self.calls.clone()
        return x + self.out(hidden) * (torch.ones(()) if scale is None else scale)


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(6, 8), nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x, scale=x.square().mean())
        return x


def trained(change: Callable[[nn.Module], Any], autocast: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Gradients and buffers after two windows of two forwards each, and the random state."""
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    net = Stack()
    change(net)
    x = torch.randn(5, 6)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            loss = (net(x) * net(2 * x)).square().mean()
        torch.set_default_dtype(before)  # as in a Trainer: a backward runs outside of the precision's context
        loss.backward()
        torch.set_default_dtype(dtype)
    torch.set_default_dtype(before)
    assert [block.forwards for block in net.blocks] == [4, 4, 4]
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {**gradients, **dict(net.named_buffers()), "random": torch.get_rng_state()}


def wrapped(net: nn.Module) -> None:
    apply_activation_checkpointing(
        net,
        checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, CheckpointImpl.NO_REENTRANT),
        check_fn=lambda m: isinstance(m, Block),
    )


def by_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Block)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "blocks": recompute,
    "class": lambda net: recompute(net, Block),
    "policy": lambda net: recompute(net, by_policy),
    "all but matmuls": lambda net: recompute(net, save="matmuls"),
    "all but one operator": lambda net: recompute(net, save=[torch.ops.aten.addmm.default]),
    "nested": lambda net: (recompute(net, Block), recompute(net, {nn.Linear, nn.BatchNorm1d})),
    "inner layers": lambda net: recompute(net, {nn.BatchNorm1d, nn.Dropout}),
}


@pytest.mark.everyday
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_bits_are_those_without_it(change: str, autocast: bool) -> None:
    """Dropout draws the same numbers, buffers are changed once and read as in the first forward."""
    expected = trained(lambda net: None, autocast)
    found = trained(CHANGES[change], autocast)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_numbers_without_a_dtype_are_those_of_the_forward() -> None:
    expected, found = (trained(change, dtype=torch.float64) for change in (lambda net: None, recompute))
    assert found["into.weight"].dtype is torch.float64
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def saved_bytes(change: Callable[[nn.Module], Any]) -> int:
    """What a forward keeps, by storage, without parameters."""
    torch.manual_seed(1)
    net = Stack(8)
    change(net)
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = net(torch.randn(64, 6)).sum()
    loss.backward()
    return sum(kept.values())


def test_less_is_kept() -> None:
    whole, blocks = saved_bytes(lambda net: None), saved_bytes(recompute)
    assert blocks < whole / 8  # of each block its input: 8 numbers of about 100
    assert saved_bytes(lambda net: recompute(net, {nn.Dropout})) > blocks


def test_it_ends() -> None:
    net = Stack()
    end = recompute(net)
    assert "forward" in vars(net.blocks[0])
    recompute(net)()  # what was changed before is not this one's
    assert "forward" in vars(net.blocks[0])
    end()
    assert all("forward" not in vars(layer) for layer in net.modules())


def test_a_forward_of_the_layers_own_comes_back() -> None:
    net = Stack()
    own = net.blocks[0].forward = lambda x, scale: x * 2
    end = recompute(net)
    net(torch.randn(5, 6)).sum().backward()
    assert net.blocks[0].forwards == 0
    end()
    assert net.blocks[0].forward is own


def test_copies_are_recomputed_with_their_own_parameters() -> None:
    """An average of the weights copies the module; a copy must not run the original's forward."""
    net = Stack()
    recompute(net)
    for copied in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        copied(torch.randn(5, 6)).sum().backward()
        assert copied.blocks[1].into.weight.grad is not None
        assert net.blocks[1].into.weight.grad is None
        assert [block.forwards for block in copied.blocks] == [1, 1, 1]


def test_hooks_of_a_layer_run_once_and_those_inside_it_again() -> None:
    net = Stack(2)
    seen = []
    net.blocks[0].register_forward_hook(lambda *args: seen.append("block"))
    net.blocks[0].out.register_forward_hook(lambda *args: seen.append("inside"))
    recompute(net)
    net(torch.randn(5, 6)).sum().backward()
    assert seen == ["inside", "block", "inside"]


def test_a_forward_still_has_its_signature() -> None:
    net = Stack()
    before = inspect.signature(net.blocks[0].forward)
    recompute(net)
    assert str(inspect.signature(net.blocks[0].forward)) == str(before).replace("(self, ", "(")


def test_nothing_is_recomputed_without_gradients() -> None:
    net = Stack()
    recompute(net)
    with torch.no_grad():
        net(torch.randn(5, 6))
    assert [block.forwards for block in net.blocks] == [1, 1, 1]


def test_two_backwards_of_one_graph() -> None:
    net = Stack()
    recompute(net)
    out = net(torch.randn(5, 6)).sum()
    out.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in net.named_parameters()}
    out.backward()
    assert all(torch.equal(p.grad, 2 * first[name]) for name, p in net.named_parameters())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers": {nn.Conv2d}}, "no layer of Stack is selected; the classes of its layers are BatchNorm1d, Block"),
        (
            {"save": "everything"},
            "_save='everything' is not known; the only name is \"matmuls\"",
        ),
        ({"save": [torch.ops.aten.mm]}, "change it to `torch.ops.aten.mm.default`"),
        ({"save": 3}, "activation_checkpointing_save=3"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        recompute(Stack(), **given)


@pytest.mark.parametrize("strategy", [SingleDeviceStrategy, DDPStrategy, FSDPStrategy])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"activation_checkpointing": "blocks"}, r"activation_checkpointing='blocks'\) must be True or"),
        ({"activation_checkpointing": [Block(4)]}, "must be True or classes of layers"),
        ({"activation_checkpointing": True, "activation_checkpointing_policy": {Block}}, "use only one of them"),
        ({"activation_checkpointing_save": "matmuls"}, "Select them with activation_checkpointing=True"),
        ({"activation_checkpointing": True, "activation_checkpointing_save": "mm"}, "the only name is"),
    ],
)
def test_arguments_of_strategies_are_checked_at_once(strategy: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said) as caught:
        strategy(**given)
    assert strategy.__name__ in str(caught.value)


# -- under strategies ----------------------------------------------------------------------------------------


class Deep(LightningModule):
    def __init__(self, dropout: float = 0.0, wraps: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.wraps = wraps
        self.forwards = 0

    def configure_model(self) -> None:
        if self.wraps and isinstance(self.blocks[0], Block):
            wrapped(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.into(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x.sum(1), batch[1].reshape(-1).to(x.dtype))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.005, momentum=0.9)


STRATEGIES: dict[str, Callable[..., Any]] = {
    "single": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "ddp, static graph": lambda **given: DDPStrategy(static_graph=True, **given),
    "ddp, sharded optimizer": lambda **given: DDPStrategy(shard_optimizer=True, **given),
    "fsdp": FSDPStrategy,
    "fsdp, gradients": lambda **given: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP", **given),
    "fsdp, whole": lambda **given: FSDPStrategy(sharding_strategy="NO_SHARD", **given),
}


def fitted(strategy: str, wraps: bool, precision: str, given: dict[str, Any]) -> Any:
    """Losses and the state dict after a fit with dropout, BatchNorm synchronized."""
    torch.manual_seed(5)
    module = Deep(0.3, wraps)
    trainer = quiet(
        strategy=STRATEGIES[strategy](**given),
        devices=dist.get_world_size(),
        max_epochs=1,
        accumulate_grad_batches=2,
        precision=precision,
        sync_batchnorm=True,
    )
    trainer.fit(module, rows(20)(4))
    weights = {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}
    left = [name for name, layer in module.named_modules() if "forward" in vars(layer)]
    return weights, dict(module.named_buffers()), list(module.state_dict()), left


BY_WRAPPER = ("ddp, sharded optimizer", "fsdp, whole")
"""Every day each strategy with one of the two ways, and one process with both: these with torch's wrapper."""


@pytest.mark.everyday(3)
@pytest.mark.parametrize("precision", ["64-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=pytest.mark.slow if each in BY_WRAPPER else ()) for each in STRATEGIES]
)
def test_a_fit_has_the_same_bits(ranks: RankPool, strategy: str, precision: str) -> None:
    """Statistics of synchronized BatchNorm are counted once, and the layers are what they were afterwards."""
    pool = ranks(1 if strategy == "single" else 2)
    plain = pool.run(fitted, strategy, False, precision, {})
    for given in ({"activation_checkpointing": True}, {"activation_checkpointing": True, **SAVES}):
        again = pool.run(fitted, strategy, False, precision, given)
        for (weights, buffers, keys, _), (others, statistics, same, left) in zip(plain, again, strict=True):
            assert all(torch.equal(value, others[name]) for name, value in weights.items())
            assert all(torch.equal(value, statistics[name]) for name, value in buffers.items())
            assert (keys, left) == (same, [])


SAVES = {"activation_checkpointing_save": "matmuls"}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(each, marks=() if each in ("single", *BY_WRAPPER) else pytest.mark.slow) for each in STRATEGIES],
)
def test_torchs_wrapper_in_configure_model(ranks: RankPool, strategy: str) -> None:
    """The guide's way: same bits, same keys in a checkpoint, same names of parameters."""
    pool = ranks(1 if strategy == "single" else 2)
    plain, again = (pool.run(fitted, strategy, wraps, "64-true", {}) for wraps in (False, True))
    for (weights, buffers, keys, _), (others, statistics, same, _) in zip(plain, again, strict=True):
        assert list(weights) == list(others)
        assert all(torch.equal(value, others[name]) for name, value in weights.items())
        values = zip(buffers.values(), statistics.values(), strict=True)
        assert all(torch.equal(value, other) for value, other in values)
        assert keys == same


@pytest.mark.everyday(1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_empty_shares_with_synchronized_statistics(ranks: RankPool, strategy: str) -> None:
    made = partial(STRATEGIES[strategy], activation_checkpointing={Block})
    agree(ranks(3), Deep, rows(26), made, batch_size=2, steps=7, sync_batchnorm=True)


class Logs(Deep):
    """A layer logs by the module that holds it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda layer, args: self.note(args[0]))
        self.blocks[0].norm.register_forward_pre_hook(lambda layer, args: self.note(args[0]))

    def note(self, x: Tensor) -> None:
        self.log("calls", 1.0, reduce_fx="sum", on_step=False, on_epoch=True, batch_size=1)


def test_what_a_layer_logs_is_logged_once() -> None:
    trainer = quiet(strategy=SingleDeviceStrategy(activation_checkpointing=True), max_epochs=1)
    trainer.fit(Logs(), rows(8)(2))
    assert trainer.callback_metrics["calls"] == 4 * 3


def test_a_model_without_repeated_blocks_is_told() -> None:
    with pytest.warns(UserWarning, match="Lone has no repeated blocks.*Pass the classes of the layers"):
        quiet(strategy=SingleDeviceStrategy(activation_checkpointing=True), max_epochs=1).fit(Lone(), rows(8)(2))


class Lone(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]


def test_a_class_that_is_not_there_is_told_with_the_argument() -> None:
    trainer = quiet(strategy=SingleDeviceStrategy(activation_checkpointing={nn.Conv2d}), max_epochs=1)
    with pytest.raises(
        MisconfigurationException, match=r"SingleDeviceStrategy\(activation_checkpointing=.*no layer of .* is selected"
    ):
        trainer.fit(Deep(), rows(8)(2))
