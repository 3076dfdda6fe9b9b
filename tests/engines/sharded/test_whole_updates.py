"""Optimizers that need whole matrices, over shards: the numbers of one process, states and their owners, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from lockstep import CombinedOptimizer, LightningModule, parameter_wise
from lockstep.checkpoint.sharded import load
from lockstep.engines.sharded import whole_updates
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lockstep.testing import EquivalenceReport, check_equivalence
from tests.equivalence.models import agree, same
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.timeout(90)

SIZES = (6, 7, 13, 5)


class Shampoo(Optimizer):
    """Written by hand: a statistic of each side of a matrix, its inverse root by eigenvalues; vectors by their sign."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        for group in self.param_groups:
            group["steps"] += 1  # once a step, however many rounds there are
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad.sign()
                if p.ndim == 2:
                    sides = self.state[p].setdefault(
                        "sides", [torch.eye(n, dtype=p.dtype, device=p.device) for n in p.shape]
                    )
                    sides[0] += p.grad @ p.grad.T
                    sides[1] += p.grad.T @ p.grad
                    update = _root(sides[0]) @ p.grad @ _root(sides[1])
                p.sub_(update, alpha=group["lr"] / group["steps"])


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(-0.25)) @ vectors.T


parameter_wise(whole=True)(Shampoo)


class Exact(torch.optim.Optimizer):
    """Momentum made orthogonal in float64, without torch's rounding to 16 bits: Muon as it is on paper."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-9)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.sub_(x, alpha=group["lr"])
        return loss


parameter_wise(whole=True)(Exact)


class Net(LightningModule):
    """Matrices of sizes that no number of ranks divides, and biases beside them."""

    optimizer = "muon"
    sizes = SIZES

    def __init__(self) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for into, out in zip(self.sizes, self.sizes[1:], strict=False):
            steps += [nn.Linear(into, out), nn.Tanh()]
        self.net = nn.Sequential(*steps)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.head = nn.Linear(self.sizes[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.net(x))
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x[:, : self.sizes[0]]).reshape(-1), y.reshape(-1))

    def matrices(self) -> list[dict[str, Any]]:
        """In two groups."""
        found = [p for p in self.parameters() if p.ndim == 2 and p.requires_grad]
        return [{"params": found[:1], "lr": 0.01}, {"params": found[1:]}]

    def made(self, name: str) -> Optimizer:
        vectors = [p for p in self.parameters() if p.ndim != 2]
        every = [*self.matrices(), {"params": vectors, "lr": 0.02}]
        if name == "muon":
            return torch.optim.Muon(self.matrices(), lr=0.02, weight_decay=0.1)
        if name == "exact":
            return Exact(self.matrices())
        if name == "adafactor":
            return torch.optim.Adafactor(every, lr=0.01, weight_decay=0.1)
        if name == "shampoo":
            return Shampoo(every)
        if name == "transformers":
            from transformers.optimization import Adafactor

            return Adafactor(every, lr=None)
        return CombinedOptimizer(self.made(name.split(" + ")[0]), torch.optim.AdamW(vectors, lr=0.003, eps=1e-3))

    def configure_optimizers(self) -> Any:
        optimizer = self.made(self.optimizer)
        if self.optimizer == "transformers":  # it has a learning rate of its own
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def kind(name: str, size: tuple[int, ...] = SIZES, base: type[Net] = Net) -> type[Net]:
    return type("Net", (base,), {"optimizer": name, "sizes": size})


def rows(length: int, width: int = 13) -> Any:
    drawn = torch.Generator().manual_seed(5)
    x = torch.randn(length, width, generator=drawn, dtype=torch.float64)
    y = x.sin().sum(1)
    data = torch.utils.data.TensorDataset(x, y)
    return lambda batch_size: torch.utils.data.DataLoader(data, batch_size)


# -- the numbers of one process ------------------------------------------------------------------------------

STRATEGIES: dict[str, Any] = {
    "fsdp": FSDPStrategy,
    "hybrid": lambda: FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, dist.get_world_size() // 2)),
    "offload": lambda: FSDPStrategy(cpu_offload=True),
    "reduced once": lambda: FSDPStrategy(accumulate_shards=False),
    "ddp": DDPStrategy,
    "owned": lambda: DDPStrategy(shard_optimizer=True),
}
EVERY = ("muon", "exact", "adafactor", "transformers", "shampoo", "muon + adamw", "exact + adamw")


@contextmanager
def rounds_of(size: int) -> Iterator[None]:
    """Rounds of that many bytes, and then of as many as before: a rank of the pool that a test did not use must
    not make other rounds than one that it used."""
    whole_updates.ROUND, before = size, whole_updates.ROUND
    try:
        yield
    finally:
        whole_updates.ROUND = before


def _equal(name: str, engine: str, pieces: int, **flags: Any) -> EquivalenceReport:
    made, world = STRATEGIES[engine](), dist.get_world_size()
    with rounds_of(pieces):
        return check_equivalence(kind(name), rows(23), strategy=made, devices=world, batch_size=3, **flags)


@pytest.mark.everyday(6)
@pytest.mark.parametrize(
    ("name", "engine", "world"),
    [case for case in product(EVERY, STRATEGIES, (1, 2, 3, 4)) if case[1] != "hybrid" or case[2] in (2, 4)],
)
def test_ranks_train_as_one_process(ranks: RankPool, name: str, engine: str, world: int) -> None:
    for report in ranks(world).run(partial(_equal, accumulate=2, gradient_clip_val=0.3), name, engine, 200):
        assert report, report


def _drawn(seed: int) -> EquivalenceReport:
    """Shapes, size of rounds and optimizer of a seed."""
    draw = random.Random(seed)
    sizes = tuple(draw.choice([1, 2, 3, 5, 8, 11, 13]) for _ in range(draw.randint(2, 5)))
    size = draw.choice([1, 400, 2**25])
    name = draw.choice([each for each in EVERY if "transformers" not in each])
    flags: dict[str, Any] = {"devices": dist.get_world_size(), "batch_size": 3, "accumulate": draw.randint(1, 2)}
    with rounds_of(size):
        return check_equivalence(kind(name, sizes), rows(23), strategy=FSDPStrategy(), **flags)


@pytest.mark.everyday(2)
@pytest.mark.parametrize("seed", range(40))
def test_any_shapes_train_as_on_one_process(ranks: RankPool, seed: int) -> None:
    for report in ranks(1 + seed % 4).run(_drawn, seed):
        assert report, report


# -- split in two ways ---------------------------------------------------------------------------------------


class Wide(Net):
    """Its first two layers are cut by tensor parallelism, along columns and rows, and all are cut by FSDP."""

    sizes = (6, 8, 6, 5)

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or isinstance(self.net[0].weight, DTensor):
            return
        row, rows_of = mesh["tensor_parallel"], mesh["data_parallel"]
        if row.size() > 1:
            parallelize_module(self.net, row, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if rows_of.size() > 1:
            for layer in (self.net, self.head):
                fully_shard(layer, mesh=rows_of)


def _wide(name: str) -> Net:
    return kind(name, Wide.sizes, Wide)()


@pytest.mark.everyday(2)
@pytest.mark.parametrize("name", ["muon + adamw", "exact", "adafactor", "shampoo"])
@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (1, 2), (2, 1), (1, 4), (4, 1), (3, 1)])
def test_rows_and_columns_are_gathered(ranks: RankPool, name: str, data: int, tensor: int) -> None:
    made, strategy = partial(_wide, name), partial(ModelParallelStrategy, data, tensor)
    agree(ranks(data * tensor), made, rows(23), strategy, batch_size=3, accumulate=2)


# -- states --------------------------------------------------------------------------------------------------


def _owned() -> list[Any]:
    """What this rank holds of states, and what the strategy and the optimizer say."""
    made = kind("exact + adamw")()
    trainer = quiet(max_steps=2, max_epochs=-1, strategy=FSDPStrategy(), devices=dist.get_world_size())
    trainer.fit(made.double(), rows(23)(4))
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, CombinedOptimizer)
    exact = optimizer.optimizers[0]
    shapes = [tuple(entry["momentum"].shape) for entry in exact.state.values()]
    assert not any(isinstance(entry["momentum"], DTensor) for entry in exact.state.values())
    return [shapes, sorted(exact.state_dict()["state"]), sorted(optimizer.state_dict()["state"])]


def test_a_state_is_with_its_owner_alone(ranks: RankPool) -> None:
    found = ranks(3).run(_owned)
    shapes = [shape for mine, _, _ in found for shape in mine]
    assert sorted(shapes) == sorted([(7, 6), (13, 7), (5, 13), (1, 5)])
    for _, exact, both in found:  # the ordinary state, on each rank
        assert exact == list(range(4))
        assert both == list(range(8))


ENGINES: dict[str, Any] = {
    "file": FSDPStrategy,
    "folder": lambda: FSDPStrategy(state_dict_type="sharded"),
    "ddp": DDPStrategy,
    "owned": lambda: DDPStrategy(shard_optimizer=True),
}


def _saved(name: str, engine: str, path: str, resume: str | None, steps: int) -> None:
    """A fit until a step, from a checkpoint or not, and a checkpoint behind it."""
    torch.manual_seed(0)
    flags: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "precision": "64-true"}
    trainer = quiet(strategy=ENGINES[engine](), devices=dist.get_world_size(), **flags)
    trainer.fit(kind(name)(), rows(24)(12 // dist.get_world_size()), ckpt_path=resume)
    trainer.save_checkpoint(path)


ROADS: list[list[tuple[str, int]]] = [
    [("file", 4), ("file", 2), ("ddp", 2), ("ddp", 1)],
    [("folder", 3), ("folder", 2), ("owned", 2), ("file", 1)],
    [("ddp", 1), ("folder", 3), ("owned", 3), ("file", 4)],
]


@pytest.mark.everyday(1)
@pytest.mark.parametrize("name", ["exact + adamw", "adafactor", "muon", "muon + adamw", "shampoo", "transformers"])
@pytest.mark.parametrize("road", range(len(ROADS)))
def test_states_move_between_ranks_and_strategies(ranks: RankPool, tmp_path: Path, name: str, road: int) -> None:
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(len(ROADS[road]))]
    for number, (engine, world) in enumerate(ROADS[road]):
        ranks(world).run(_saved, name, engine, paths[number], paths[number - 1] if number else None, 3)
    first, *others = [load(path) for path in paths]
    for other in others:
        assert first["optimizer_states"][0]["state"]
        for key in ("state_dict", "optimizer_states", "global_step"):
            assert same(first[key], other[key]), key
    last = str(tmp_path / "last.ckpt")
    (engine, world), (_, first_world) = ROADS[road][-1], ROADS[road][0]
    ranks(world).run(_saved, name, engine, last, paths[-1], 5)
    ranks(first_world).run(_saved, name, ROADS[road][0][0], paths[0], None, 5)
    one, other = load(paths[0]), load(last)
    torch.testing.assert_close(one["state_dict"], other["state_dict"], rtol=0, atol=1e-12)


# -- what is said --------------------------------------------------------------------------------------------


class LikeMuon(Net):
    """An optimizer of its own that is called as torch's."""

    def configure_optimizers(self) -> Any:
        made: Any = type("Muon", (torch.optim.SGD,), {"step": lambda self: None})
        return made(self.parameters(), 0.1)


class Two(Net):
    """Returns two optimizers."""

    def configure_optimizers(self) -> Any:
        return [self.made("muon"), torch.optim.AdamW([p for p in self.parameters() if p.ndim != 2])]


def _refused(made: type[Net], strategy: Any) -> str:
    with pytest.raises(Exception) as said:  # of any kind: what it says is looked at
        quiet(max_steps=1, strategy=strategy(), devices=dist.get_world_size()).fit(made(), rows(24)(4))
    return str(said.value)


def test_an_unknown_optimizer_of_such_a_name_is_refused_until_it_is_declared(ranks: RankPool) -> None:
    for said in ranks(2).run(_refused, LikeMuon, FSDPStrategy):
        assert "FSDPStrategy does not recognize this class Muon" in said
        assert "lockstep.parameter_wise(whole=True)" in said


def test_two_optimizers_are_told_to_be_combined(ranks: RankPool) -> None:
    for said in ranks(1).run(_refused, Two, FSDPStrategy):
        assert "lockstep.CombinedOptimizer(a, b)" in said


class ByHand(Net):
    """Steps two optimizers itself, one of them only in every other window."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        muon, adamw = self.optimizers()
        muon.zero_grad()
        adamw.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(muon, 0.3)
        muon.step()
        if batch_idx % 2:
            adamw.step()

    def configure_optimizers(self) -> Any:
        return [self.made("exact"), torch.optim.AdamW([p for p in self.parameters() if p.ndim != 2], eps=1e-3)]


def test_two_optimizers_are_stepped_by_hand(ranks: RankPool) -> None:
    agree(ranks(2), ByHand, rows(24), FSDPStrategy, batch_size=3)


class Thaws(Net):
    """Its first layer is frozen, and comes to the optimizer in a group of its own."""

    optimizer = "exact"

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            self.trainer.strategy.set_requires_grad(self.net[0].weight, True)
            self.trainer.optimizers[0].add_param_group({"params": [self.net[0].weight], "lr": 0.05, "initial_lr": 0.05})

    def configure_optimizers(self) -> Any:
        return self.made("exact")


def test_a_matrix_that_comes_later_gets_an_owner(ranks: RankPool) -> None:
    agree(ranks(3), Thaws, rows(24), FSDPStrategy, batch_size=3)
