"""Trainer(compile=...): layers run compiled under every strategy, with the same numbers, and are left as they were."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import LightningModule
from lockstep.callbacks import LambdaCallback
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.methods import CompiledForward, has_compiled
from lockstep.loop.compiled import from_compiled, is_compiled, to_uncompiled
from lockstep.loop.hooks import is_overridden
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.accelerator.left_out import strategies
from tests.equivalence.models import Blocks
from tests.equivalence.models import rows as sums
from tests.loop.pieces import Slope, acting, numbers, quiet
from tests.tools.pool import RankPool

EAGER = {"backend": "eager"}
"""What the compiler makes of a graph is run by Python: it is quick, and has the same numbers."""


class Block(nn.Module):
    """A layer made of layers, as a transformer has many."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


graphs: list[Any] = []


def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """A compiler that counts its graphs, and leaves them to Python."""
    graphs.append(graph)
    return graph.forward


class Net(LightningModule):
    """Blocks in a Sequential, and a head."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = (self(x) - y).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", (self(x) - y).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Flat(Net):
    """Has no forward of its own: the step calls the layers."""

    forward = LightningModule.forward  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.head(self.blocks(x)) - y).square().mean()


def rows(count: int = 24, width: int = 8, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Made up data."""
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=drawn, dtype=dtype)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(batch: int = 4) -> DataLoader[Any]:
    """Made up batches."""
    return DataLoader(rows(), batch_size=batch)


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    graphs.clear()
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@contextmanager
def _made_at(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def fitted(module: type[Net] = Net, **flags: Any) -> Net:
    """A module after a fit."""
    with _made_at(3):
        made = module()
    quiet(max_epochs=1, **flags).fit(made, loader())
    return made


@pytest.mark.everyday(5)
@pytest.mark.parametrize("module", [Net, Flat])
@pytest.mark.parametrize("blocks", [None, True, False, [Block], "Block"])
def test_a_fit_has_the_numbers_of_one_that_compiles_nothing(module: type[Net], blocks: Any) -> None:
    plain = fitted(module)
    assert not graphs
    made = fitted(module, compile={"backend": counting, "blocks": blocks})
    assert graphs
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], value, rtol=0, atol=0)


def test_all_is_as_it_was_when_the_call_is_over_or_has_failed() -> None:
    made, failed = fitted(compile=EAGER), acting(Net, training_step=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quiet(compile=EAGER).fit(failed, loader())
    for each in (made, failed):
        assert not has_compiled(each)
        assert all("forward" not in vars(layer) for layer in each.modules())
    pickle.loads(pickle.dumps(made))


def test_copies_within_a_fit_run_compiled_by_themselves() -> None:
    copies: list[Net] = []

    made = Net()
    copying = LambdaCallback(on_train_end=lambda trainer, module: copies.append(copy.deepcopy(module)))
    quiet(max_epochs=1, compile={**EAGER, "blocks": True}, callbacks=[copying]).fit(made, loader())
    (copied,) = copies
    first: Any = copied.blocks[0]
    forward = vars(first)["forward"]
    assert isinstance(forward, CompiledForward)
    assert forward.layer is first is not made.blocks[0]
    x = torch.randn(3, 8)
    torch.testing.assert_close(copied.cpu()(x), made.cpu()(x))


ENGINES: dict[str, Any] = {
    "ddp": lambda: "ddp",
    "sharded optimizer": lambda: DDPStrategy(shard_optimizer=True),
    "fsdp": lambda: "fsdp",
    "recomputed under fsdp": lambda: FSDPStrategy(activation_checkpointing=True),
    "2-D": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    **{name: partial(str, name) for name in strategies("balanced", "deepspeed_stage_2")},
}


def _equal(engine: str, make: type[Blocks] = Blocks, **flags: Any) -> EquivalenceReport:
    if engine.startswith("deepspeed"):  # has no float64
        flags = {**flags, "precision": "32-true", "tolerance": 1e-5}
    return check_equivalence(make, sums(23), strategy=ENGINES[engine](), devices=2, **flags)


@pytest.mark.everyday(3)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_compiled_run_is_one_process(engine: str, ranks: RankPool) -> None:
    """Block by block, before an engine cuts them or hangs its hooks on them."""
    for report in ranks(2).run(partial(_equal, engine, compile=EAGER), group=False, timeout=200):
        assert report, report


class ByHand(Blocks):
    """Compiles its blocks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = torch.compile(self.net[1], backend="eager")
        self.net[2].compile(backend="eager")


@pytest.mark.everyday(3)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "2-D"])
def test_layers_that_the_user_has_compiled_train_under_every_strategy(engine: str, ranks: RankPool) -> None:
    for report in ranks(2).run(partial(_equal, engine, ByHand), group=False, timeout=200):
        assert report, report


def test_what_is_compiled_is_logged() -> None:
    said: list[str] = []
    with patch("lockstep.loop.compiled.rank_zero_info", said.append):
        quiet(max_epochs=1, compile={**EAGER, "blocks": [Block]}).fit(Net(), loader())
    assert said == ["trainer.fit: 2 x Block are compiled by eager: the first batch of each shape takes longer."]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, r"compile=3\) is not valid: pass True, False, or a dict"),
        ({"blocks": 3}, r"pass True \(the repeated blocks\)"),
    ],
)
def test_what_cannot_be_asked_is_refused(given: Any, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=says):
        quiet(compile=given)


def test_layers_that_are_not_there_are_refused_by_name() -> None:
    with pytest.raises(MisconfigurationException, match="there is no layer of class 'Blok'"):
        quiet(compile={**EAGER, "blocks": ["Blok"]}).fit(Net(), loader())
    with pytest.raises(MisconfigurationException, match="no layer of Net is selected"):
        quiet(compile={**EAGER, "blocks": [nn.Conv2d]}).fit(Net(), loader())


def _built(engine: str) -> EquivalenceReport:
    from torch._inductor.async_compile import AsyncCompile

    try:
        return _equal(engine, compile=True)
    finally:
        AsyncCompile.pool().shutdown()  # torch keeps its threads until the process ends
        AsyncCompile.pool.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "recomputed under fsdp", *strategies("balanced")])
def test_code_that_inductor_builds_has_the_numbers_of_one_process(engine: str, ranks: RankPool) -> None:
    for report in ranks(2).run(_built, engine, group=False, timeout=800):
        assert report, report


def _in_two_parts() -> str:
    strategy = lockstep.strategies.BalancedStrategy(schedule="zero-bubble")
    with pytest.raises(MisconfigurationException) as refused:
        check_equivalence(Blocks, sums(23), strategy=strategy, devices=2, compile=EAGER)
    return str(refused.value)


@pytest.mark.extension("balancing")
def test_a_schedule_that_cuts_a_backward_in_two_is_refused(ranks: RankPool) -> None:
    for said in ranks(2).run(_in_two_parts, group=False, timeout=100):
        assert "is compiled" in said


# -- `torch.compile(module)` given to the Trainer: the module inside is fitted, and runs compiled ----------------


class Logs(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        compiled.append(torch.compiler.is_compiling())
        loss = (self.w * batch).mean()
        self.log("loss", loss)
        return loss


compiled: list[bool] = []


@pytest.mark.timeout(120)
def test_a_compiled_module_trains_to_the_same_numbers() -> None:
    modules = [Logs(lr=0.1), Logs(lr=0.1)]
    logged = []
    for module, given in zip(modules, [modules[0], torch.compile(modules[1], backend="eager")], strict=True):
        trainer = quiet(max_epochs=1)
        trainer.fit(given, numbers(3))
        assert trainer.lightning_module is module
        logged.append(trainer.callback_metrics)
    assert torch.equal(modules[0].w, modules[1].w)
    assert logged[0] == logged[1] != {}
    assert modules[1]._compiler_ctx is not None


def test_a_compiled_step_is_what_runs() -> None:
    compiled.clear()
    module = Logs()
    quiet(max_epochs=1).fit(torch.compile(module, backend="eager"), numbers(2))
    assert "training_step" in vars(module)
    assert compiled != [False, False]  # the compiler has looked into it


def test_a_module_and_back() -> None:
    module = Slope()
    wrapped = torch.compile(module, backend="eager")
    assert is_compiled(wrapped)
    assert not is_compiled(module)
    assert from_compiled(wrapped) is module is from_compiled(wrapped)
    assert {"training_step", "log"} <= vars(module).keys()
    assert not is_overridden("validation_step", module, LightningModule)  # only what the module has is compiled
    assert to_uncompiled(module) is module
    assert not {"training_step", "log", "forward"} & vars(module).keys()
    assert module._compiler_ctx is None
    assert to_uncompiled(torch.compile(module, backend="eager")) is module


def test_what_is_not_compiled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from_compiled\(Slope\): pass the result of torch.compile"):
        from_compiled(Slope())
    with pytest.raises(ValueError, match=r"to_uncompiled\(Slope\): this module is not compiled"):
        to_uncompiled(Slope())
    layer = torch.compile(torch.nn.Linear(1, 1), backend="eager")
    with pytest.raises(ValueError, match="a Linear was compiled, which is not a LightningModule"):
        from_compiled(layer)
    with pytest.raises((MisconfigurationException, TypeError), match="OptimizedModule"):
        quiet().fit(layer, numbers(1))
