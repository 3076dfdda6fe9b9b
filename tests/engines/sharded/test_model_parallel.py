"""Tensor parallel, data parallel and both: the numbers of one process, checkpoints that move, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lockstep import LightningModule
from lockstep.plugins.io import TorchCheckpointIO
from lockstep.strategies import FSDPStrategy, ModelParallelStrategy
from lockstep.utilities.exceptions import MisconfigurationException
from tests.equivalence.models import agree, refusal
from tests.loop.pieces import SaveAt, quiet
from tests.tools.pool import RankPool

WIDTH = 6


class Block(nn.Module):
    """Up and down, on sequences; with a norm that may be parallel over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


IN_WIDTH = {"up": ColwiseParallel(), "down": RowwiseParallel()}
ALONG_THE_SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


class Wide(LightningModule):
    """Two blocks between an embedding and a head that stays whole."""

    sequence = False
    shards = True

    def __init__(self) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        self.into = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def configure_model(self) -> None:
        if getattr(self.trainer.strategy, "device_mesh", None) is None:
            return  # one process, of which numbers are compared
        if isinstance(self.blocks[0].up.weight, DTensor):
            return  # an earlier call of the Trainer has split it
        row, rows = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if row.size() > 1:
            for block in self.blocks:
                parallelize_module(block, row, ALONG_THE_SEQUENCE if self.sequence else IN_WIDTH)
            if self.sequence:
                first = PrepareModuleInput(
                    input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
                )
                last = PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))
                parallelize_module(self.blocks[0], row, first)
                parallelize_module(self.blocks[1], row, last)
        if rows.size() > 1 and self.shards:
            for block in self.blocks:
                fully_shard(block, mesh=rows)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class AlongTheSequence(Wide):
    sequence = True


class AllSharded(Wide):
    """The module itself is given to ``fully_shard``, too."""

    def configure_model(self) -> None:
        super().configure_model()
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is not None and mesh["data_parallel"].size() > 1 and not isinstance(self.head.weight, DTensor):
            fully_shard(self, mesh=mesh["data_parallel"])


class Normed(Wide):
    """With statistics over the samples, of which each counts once."""

    def make(self) -> None:
        super().make()
        self.statistics = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.statistics(x))


class SometimesUnused(Wide):
    """The second block is used in some steps only, and nothing of a third."""

    def make(self) -> None:
        super().make()
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.into(x))
        if self.global_step % 2:
            x = self.blocks[1](x)
        found: Tensor = self.head(x)
        return found


def rows(length: int) -> Callable[[int], Any]:
    def make(batch_size: int) -> Any:
        x = torch.randn(length, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x, x.sum(2, keepdim=True)), batch_size)

    return make


CASES: dict[str, tuple[type[Wide], int, dict[str, Any]]] = {
    "plain": (Wide, 24, {}),
    "all sharded": (AllSharded, 24, {}),
    "along the sequence": (AlongTheSequence, 24, {"gradient_clip_val": 0.05}),
    "clipped by norm, accumulated": (Wide, 24, {"accumulate": 3, "gradient_clip_val": 0.05}),
    "along the sequence, clipped by value": (
        AlongTheSequence,
        24,
        {"accumulate": 2, "gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    ),
    "empty shares": (AllSharded, 9, {"accumulate": 2}),
    "synchronized norms": (Normed, 10, {"sync_batchnorm": True, "steps": 4}),
    "unused": (SometimesUnused, 24, {"steps": 4}),
}
MESHES = [(1, 2), (2, 1), (2, 2), (1, 4)]


@pytest.mark.everyday(4)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_a_mesh_trains_as_one_process(ranks: RankPool, case: str, mesh: tuple[int, int]) -> None:
    module, length, given = CASES[case]
    strategy = partial(ModelParallelStrategy, *mesh, save_distributed_checkpoint=False)
    given = {"batch_size": 2, "precision": "64-true", "steps": 3, **given}
    agree(ranks(mesh[0] * mesh[1]), module, rows(length), strategy, **given)


# -- a loss that is split over the classes, as in Lightning's example ------------------------------------------


class Words(LightningModule):
    """An embedding and a head that are split over the words, and so is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10, bias=False)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if getattr(self.trainer.strategy, "device_mesh", None) is not None:
            plan = {
                "words": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            }
            parallelize_module(self, self.device_mesh["tensor_parallel"], plan)
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with loss_parallel():
            loss: Tensor = nn.functional.cross_entropy(self.head(self.words(batch)).flatten(0, 1), batch.flatten())
        self.log("loss", loss)
        return loss

    def backward(self, *args: Any, **kwargs: Any) -> None:
        with loss_parallel():
            super().backward(*args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5)


def words(batch_size: int) -> Any:
    drawn = torch.randint(0, 10, (16, 4), generator=torch.Generator().manual_seed(0))
    return DataLoader(drawn, batch_size)  # type: ignore[arg-type]


def loss_over_words(batch_size: int, **flags: Any) -> float:
    torch.manual_seed(0)
    module = Words()
    quiet(max_epochs=1, precision="64-true", **flags).fit(module, words(batch_size))
    return module.losses[0]


def test_a_loss_that_is_split_over_the_classes_is_trained_and_logged(ranks: RankPool) -> None:
    """It is a DTensor, and was taken for a dict."""
    make = STRATEGIES["2 x 2"]
    agree(ranks(4), Words, words, make, batch_size=2, accumulate=2, steps=3, precision="64-true")
    of_ranks = ranks(4).run(lambda: loss_over_words(2, strategy=make(), devices=4, accumulate_grad_batches=2))
    assert of_ranks == pytest.approx([loss_over_words(4)] * 4, rel=1e-6)


# -- evaluation, logs and metrics ----------------------------------------------------------------------------


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4, 3), float(index)).double(), torch.full((4, 1), float(index)).double()


class Logs(Wide):
    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import SumMetric

        self.total = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.total.update(batch[1].sum())
        self.log("total", self.total)
        self.log("seen", float(len(batch[0])), reduce_fx="sum")
        self.log("mean", batch[1].mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1].flatten().tolist()


def logged(world: int) -> tuple[dict[str, float], list[float], list[float]]:
    strategy: Any = ModelParallelStrategy(2, 2, save_distributed_checkpoint=False) if world > 1 else "auto"
    torch.manual_seed(4)
    trainer = quiet(
        strategy=strategy, devices=world, max_epochs=2, num_sanity_val_steps=0, precision="64-true", log_every_n_steps=1
    )
    module = Logs()
    batch = 4 if world == 1 else 2
    trainer.fit(module, DataLoader(Numbers(10), batch), DataLoader(Numbers(7), batch))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = [number for each in trainer.predict(module, DataLoader(Numbers(5), 2)) for number in each]
    weights = [float(value.sum()) for _, value, _ in trainer.strategy.whole_parameters()]
    return found, predicted, weights


def test_each_sample_counts_once_in_logs_metrics_and_predictions(ranks: RankPool) -> None:
    """torchmetrics would add up the ranks of a row, which see the same samples."""
    pytest.importorskip("torchmetrics")
    metrics, predicted, weights = ranks(1).run(logged, 1, group=False)[0]
    found = ranks(4).run(logged, 4, timeout=60)
    for mine, numbers, values in found:
        assert mine == pytest.approx(metrics, rel=1e-9)
        assert values == pytest.approx(weights, rel=1e-9)
        assert numbers == found[0][1] or numbers == found[2][1]
    assert sorted(found[0][1] + found[2][1]) == sorted(predicted)


# -- checkpoints ---------------------------------------------------------------------------------------------


class Adam(AllSharded):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "single": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": FSDPStrategy,
    "2 x 2": partial(ModelParallelStrategy, 2, 2, save_distributed_checkpoint=False),
    "2 x 2 in parts": partial(ModelParallelStrategy, 2, 2),
    "1 x 2 in parts": partial(ModelParallelStrategy, 1, 2),
    "fsdp in parts": partial(FSDPStrategy, state_dict_type="sharded"),
    "1 x 2": partial(ModelParallelStrategy, 1, 2, save_distributed_checkpoint=False),
    "2 x 1": partial(ModelParallelStrategy, 2, 1, save_distributed_checkpoint=False),
}


def fit_to(steps: int, strategy: str, resume: str | None = None, save: str | None = None) -> dict[str, Tensor]:
    world = 1 if strategy == "single" else dist.get_world_size()
    made = STRATEGIES[strategy]()
    module = Adam() if isinstance(made, ModelParallelStrategy) else Whole()
    trainer = quiet(strategy=made, devices=world, max_steps=steps, precision="64-true", max_epochs=-1)
    trainer.seed = 5
    torch.manual_seed(1 if world == 1 or not dist.get_rank() else 77)
    module.make()
    replicas = 1 if strategy.startswith(("1 x", "single")) else 2
    trainer.fit(module, rows(24)(12 // replicas), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


class Whole(Adam):
    def configure_model(self) -> None:
        pass


MOVES = [
    ("2 x 2", 4, "single", 1),
    ("single", 1, "2 x 2", 4),
    ("2 x 2 in parts", 4, "1 x 2 in parts", 2),
    ("fsdp in parts", 2, "2 x 2 in parts", 4),
]
MESHES_OF_TWO = [("2 x 2", 4), ("2 x 2 in parts", 4), ("1 x 2", 2), ("1 x 2 in parts", 2), ("2 x 1", 2)]
OTHERS = [("ddp", 2), ("fsdp", 2), ("fsdp in parts", 2), ("single", 1)]
MORE = [(*a, *b) for a in MESHES_OF_TWO for b in OTHERS] + [(*b, *a) for a in MESHES_OF_TWO for b in OTHERS]


@pytest.mark.everyday(2)
@pytest.mark.parametrize(
    ("wrote", "many", "reads", "more"), [*MOVES, *(pytest.param(*move, marks=pytest.mark.slow) for move in MORE)]
)
def test_a_checkpoint_goes_from_and_to_a_mesh(
    ranks: RankPool, tmp_path: Path, wrote: str, many: int, reads: str, more: int
) -> None:
    path = str(tmp_path / "moved.ckpt")
    written = ranks(many).run(fit_to, 2, wrote, None, path, timeout=60)[0]
    saved = TorchCheckpointIO().load_checkpoint(path)
    assert Path(path).is_dir() is ("in parts" in wrote)
    for name, value in written.items():
        assert torch.equal(saved["state_dict"][name], value), name
    whole = ranks(1).run(fit_to, 4, "single", group=False)[0]
    for found in ranks(more).run(fit_to, 4, reads, path, timeout=60):
        torch.testing.assert_close(found, whole, rtol=1e-7, atol=1e-9)


def resumed_within_a_window(path: str, in_parts: bool) -> bool:
    def fit(resume: str | None = None) -> dict[str, Tensor]:
        trainer = quiet(
            strategy=ModelParallelStrategy(2, 2, in_parts),
            devices=4,
            max_epochs=2,
            accumulate_grad_batches=3,
            gradient_clip_val=0.5,
            precision="64-true",
            callbacks=[] if resume else [SaveAt(1, path, epoch=1)],
        )
        trainer.seed = 5
        torch.manual_seed(1 + dist.get_rank())
        trainer.fit(Dropped(), rows(24)(2), ckpt_path=resume)
        return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}

    whole, again = fit(), fit(path)
    return all(torch.equal(whole[name], value) for name, value in again.items())


class Dropped(Adam):
    """With a parallel block that ``fully_shard`` does not hold on its own, and random numbers in it."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.into(x), 0.2, self.training)
        return self.head(self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_parts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_resumes_to_the_same_bits_within_a_window(ranks: RankPool, tmp_path: Path, in_parts: bool) -> None:
    assert ranks(4).run(resumed_within_a_window, str(tmp_path / "at.ckpt"), in_parts, timeout=60) == [True] * 4


def fit_only_tensors() -> bool:
    """One row: nothing is reduced, and ranks draw the same random numbers, though they were seeded apart."""
    torch.manual_seed(1 + dist.get_rank())
    trainer = quiet(
        strategy=ModelParallelStrategy(1, 2, save_distributed_checkpoint=False),
        devices=2,
        max_steps=3,
        precision="64-true",
    )
    module = Dropped()
    trainer.fit(module, rows(8)(4))
    weight = module.head.weight.detach().clone()
    everywhere = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(everywhere, weight)
    return torch.equal(*everywhere)


def test_ranks_of_a_row_draw_the_same_random_numbers(ranks: RankPool) -> None:
    assert ranks(2).run(fit_only_tensors, timeout=60) == [True, True]


class ManyWords(LightningModule):
    """13 words: tensor parallelism cuts them into 7 and 6, and three ranks those into 3, 3, 1 and 2, 2, 2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(13, WIDTH), nn.Linear(WIDTH, 13)

    def configure_model(self) -> None:
        if getattr(self.trainer.strategy, "device_mesh", None) is None or isinstance(self.head.weight, DTensor):
            return
        out = ColwiseParallel(output_layouts=Replicate())
        plan = {"words": RowwiseParallel(input_layouts=Replicate()), "head": out}
        parallelize_module(self, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(batch)).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def fit_many_words(steps: int, strategy: Any, save: str = "", resume: str | None = None) -> dict[str, Tensor]:
    world = dist.get_world_size() if strategy != "auto" else 1
    torch.manual_seed(1)
    module = ManyWords()
    trainer = quiet(strategy=strategy, devices=world, max_steps=steps, precision="64-true", max_epochs=-1)
    batches = torch.randint(0, 13, (24, 4), generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(batches, 6 if world == 1 else 2), ckpt_path=resume)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [True, False])
def test_words_that_are_cut_unevenly_go_from_and_to_a_mesh(ranks: RankPool, tmp_path: Path, in_parts: bool) -> None:
    """In parts they could not be saved: torch said that two ranks have the same row."""
    path = str(tmp_path / "words.ckpt")
    strategy = ModelParallelStrategy(3, 2, in_parts)
    saved = ranks(6).run(fit_many_words, 2, strategy, path, timeout=60)[0]
    found = TorchCheckpointIO().load_checkpoint(path)["state_dict"]
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    whole = fit_many_words(4, "auto")
    resumed = [fit_many_words(4, "auto", resume=path), *ranks(6).run(fit_many_words, 4, strategy, "", path, timeout=60)]
    for read in resumed:
        torch.testing.assert_close(read, whole, rtol=1e-7, atol=1e-9)


# -- layers on the meta device -------------------------------------------------------------------------------


class OnMeta(Wide):
    def make(self) -> None:
        with torch.device("meta" if dist.is_initialized() else "cpu"):
            super().make()
            self.norm = nn.BatchNorm1d(4)
            self.tied = nn.Linear(3, WIDTH, bias=False)
            self.tied.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) + self.tied(x).sum()


def first_weights(strategy: str) -> dict[str, Tensor]:
    many = dist.get_world_size() if dist.is_initialized() else 1
    data = [(x.float(), y.float()) for x, y in rows(8)(4)]  # a loader draws a number
    torch.manual_seed(3 + (dist.get_rank() if many > 1 else 0))
    trainer = quiet(strategy=STRATEGIES[strategy](), devices=many, max_steps=1, precision="32-true")
    module = OnMeta()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)  # type: ignore[method-assign]
    trainer.fit(module, data)
    assert module.tied.weight is module.into.weight
    return {name: value.clone() for name, value, _ in trainer.strategy.whole_parameters()}


def test_layers_on_the_meta_device_get_the_values_of_one_process(ranks: RankPool) -> None:
    """Other strategies are in tests/engines/test_on_meta.py."""
    expected = ranks(1).run(first_weights, "single", group=False)[0]
    for found in ranks(4).run(first_weights, "2 x 2", timeout=60):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# -- what is refused -----------------------------------------------------------------------------------------


class NoPlan(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None

    def configure_optimizers(self) -> Any:
        return None


class SplitsNothing(Wide):
    def configure_model(self) -> None:
        pass


class NotReduced(Wide):
    shards = False


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        pass


class ResetsNothing(Wide):
    def make(self) -> None:
        super().make()
        with torch.device("meta"):
            self.own = Forgets()


class TooSmall(Wide):
    """Cuts one row for two ranks."""

    def configure_model(self) -> None:
        super().configure_model()
        parallelize_module(self.head, self.device_mesh["tensor_parallel"], ColwiseParallel())
        fully_shard(self.head, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize(
    ("module", "data", "tensor", "said"),
    [
        (Wide, 2, 2, "does not fit the run's 2 ranks"),
        (Wide, "two", 1, "must be a number of ranks above 0"),
        (NoPlan, 1, 2, "NoPlan has no `configure_model`"),
        (SplitsNothing, 1, 2, "still has all of SplitsNothing"),
        (TooSmall, 1, 2, "splits 'head.weight' along dimension 0, which has size 1, over 2 ranks"),
        (ResetsNothing, 1, 2, "`reset_parameters` of Forgets does not initialize 'weight'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ranks: RankPool, module: Any, data: Any, tensor: Any, said: str) -> None:
    make = partial(ModelParallelStrategy, data, tensor)
    for told in ranks(2).run(refusal, module, make, rows(8)(4), timeout=60):
        assert said in told


def test_a_split_parameter_that_nothing_reduces_is_named(ranks: RankPool) -> None:
    for told in ranks(4).run(refusal, NotReduced, STRATEGIES["2 x 2"], rows(8)(4), timeout=60):
        assert "'blocks.0.up.weight' is split" in told
        assert "fully_shard" in told


class SplitsTwice(Wide):
    def configure_model(self) -> None:
        parallelize_module(self.blocks[0], self.device_mesh["tensor_parallel"], IN_WIDTH)


def splits_twice() -> str:
    trainer = quiet(strategy=STRATEGIES["1 x 2"](), devices=2, max_steps=1, precision="64-true")
    module = SplitsTwice()
    trainer.fit(module, rows(8)(4))
    with pytest.raises(MisconfigurationException) as raised:
        trainer.fit(module, rows(8)(4))
    return str(raised.value)


def test_configure_model_that_splits_again_is_told_what_to_ask(ranks: RankPool) -> None:
    for told in ranks(2).run(splits_twice, timeout=60):
        assert "runs at the start of each call" in told
        assert "isinstance" in told
