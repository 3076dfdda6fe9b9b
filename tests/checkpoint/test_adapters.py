"""Adapters: LoRA by `peft` and by hand trains under every strategy as on one process, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lockstep.testing.equivalence import EquivalenceReport, check_equivalence
from lockstep.testing.pool import RankPool
from tests.checkpoint.adapted import Adapted, ByHand, CutByHand, needs_peft
from tests.checkpoint.test_pretrained import strategy_of
from tests.checkpoint.tuned import WORDS, texts, write_folder
from tests.loop.pieces import quiet

pytestmark = pytest.mark.usefixtures("peft")


@pytest.fixture
def peft() -> None:
    needs_peft()


def data(batch_size: int) -> DataLoader[Any]:
    words = torch.randint(0, WORDS, (22, 6), generator=torch.Generator().manual_seed(0))
    return DataLoader(words, batch_size=batch_size)  # type: ignore[arg-type]


def equivalence(strategy: str, folder: str, kind: str) -> EquivalenceReport:
    """In a rank; DeepSpeed has no float64."""
    world = dist.get_world_size()
    flags = {"precision": "32-true", "tolerance": 1e-5} if strategy.startswith("deepspeed") else {}
    by_hand = CutByHand if strategy == "2-d" else ByHand

    def make() -> Any:
        return Adapted(folder, kind) if kind else by_hand()

    return check_equivalence(make, data, strategy=strategy_of(strategy, world), devices=world, batch_size=2, **flags)


STRATEGIES = ["ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "balanced"]


def all_equivalent(folders: dict[str, str], names: list[str]) -> list[EquivalenceReport]:
    kinds = {**folders, "": ""}
    return [equivalence(name, folder, kind) for name in names for kind, folder in kinds.items()]


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_adapters_train_as_on_one_process(ranks: RankPool, tmp_path: Path, world: int) -> None:
    folders = {"llama": str(write_folder(tmp_path / "llama", "llama"))}
    if world == 4:
        folders["bert"] = str(write_folder(tmp_path / "bert", "bert"))
    names = [name for name in STRATEGIES if world > 1 or name != "balanced"]
    names = [name for name in names if "bert" not in folders or name != "balanced"]  # two layers for four ranks
    for found in ranks(world).run(all_equivalent, folders, names, timeout=300):
        for report in found:
            assert report, report


def in_two_dimensions(strategies: list[str]) -> list[EquivalenceReport]:
    return [equivalence(name, "", "") for name in strategies]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_two_dimensions(ranks: RankPool, world: int) -> None:
    for (report,) in ranks(world).run(in_two_dimensions, ["2-d"], timeout=100):
        assert report, report


@pytest.mark.slow
def test_a_llama_on_four_stages(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    for report in ranks(4).run(equivalence, "balanced", folder, "llama", timeout=100):
        assert report, report


# -- what there is beside the adapter ---------------------------------------------------------------------------


class Watched(Adapted):
    """Notes what a rank holds, in bytes."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.held = {kind: size_of(tensors) for kind, tensors in self.trainer.strategy.held().items()}
        self.base = size_of([p for p in self.parameters() if not p.requires_grad])
        self.adapter = size_of([p for p in self.parameters() if p.requires_grad])
        self.grads = [name for name, p in self.named_parameters() if p.grad is not None and not p.requires_grad]
        self.dtypes = {str(p.dtype) for p in self.parameters() if not p.requires_grad}


def size_of(tensors: Any) -> int:
    """Bytes of this rank's parts."""
    parts: list[Tensor] = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def watched(folder: str, strategy: str, dtype: torch.dtype | None) -> dict[str, Any]:
    module = Watched(folder, "llama", dtype)
    quiet(strategy=strategy, devices=dist.get_world_size(), max_steps=2).fit(module, texts())
    return {name: getattr(module, name) for name in ("held", "base", "adapter", "grads", "dtypes")}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_gradients_and_states_are_those_of_the_adapter_alone(
    ranks: RankPool, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    folder = str(write_folder(tmp_path, "llama", dtype=torch.bfloat16))
    whole = ranks(1).run(watched, folder, "ddp", dtype, timeout=60)[0]
    assert whole["held"]["gradients"] == whole["adapter"]
    for strategy in ("ddp", "fsdp"):
        cut = 2 if strategy == "fsdp" else 1
        of_adapter = whole["adapter"] // (cut if dtype is None else 1)  # of another dtype than the base it stays whole
        for found in ranks(2).run(watched, folder, strategy, dtype, timeout=60):
            assert found["base"] == whole["base"] // cut
            assert found["dtypes"] == {str(dtype or torch.float32)}
            assert found["grads"] == []
            assert found["adapter"] == of_adapter
            assert found["held"]["gradients"] == of_adapter
            assert of_adapter * 2 <= found["held"]["optimizer_states"] < of_adapter * 2 + 8 * 24 * 4
