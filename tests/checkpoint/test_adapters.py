"""Adapters: LoRA by `peft` and by hand trains under every strategy as on one process, and nothing else is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

import lockstep
from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.equivalence import EquivalenceReport, check_equivalence
from tests.accelerator.left_out import strategies
from tests.checkpoint.adapted import Adapted, ByHand, CutByHand
from tests.checkpoint.test_pretrained import strategy_of
from tests.checkpoint.tuned import CONFIGS, WORDS, class_of, texts, write_folder
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = pytest.mark.usefixtures("peft")


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


STRATEGIES = strategies("ddp", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "balanced")
PAIRS = {(name, kind) for name in STRATEGIES for kind in ("llama", "")}
"""With a model that peft adapts, and one that is adapted by hand."""
EVERYDAY = PAIRS & {
    ("ddp", ""),
    ("fsdp", "llama"),
    ("deepspeed_stage_2", "llama"),
    ("deepspeed_stage_3", ""),
    ("balanced", "llama"),
}
MANY = {(name, kind) for name in STRATEGIES if name != "balanced" for kind in ("llama", "bert", "")}


def all_equivalent(folders: dict[str, str], pairs: list[tuple[str, str]]) -> list[EquivalenceReport]:
    return [equivalence(name, folders.get(kind, ""), kind) for name, kind in pairs]


@pytest.mark.parametrize(
    ("world", "pairs"),
    [
        (2, EVERYDAY),
        pytest.param(1, {pair for pair in PAIRS if pair[0] != "balanced"}, marks=pytest.mark.slow),
        pytest.param(2, PAIRS - EVERYDAY, marks=pytest.mark.slow),
        pytest.param(4, MANY, marks=pytest.mark.slow),
    ],
    ids=["2", "1-all", "2-others", "4-all"],
)
def test_adapters_train_as_on_one_process(
    ranks: RankPool, tmp_path: Path, world: int, pairs: set[tuple[str, str]]
) -> None:
    folders = {kind: str(write_folder(tmp_path / kind, kind)) for kind in {kind for _, kind in pairs if kind}}
    for found in ranks(world).run(all_equivalent, folders, sorted(pairs), timeout=300):
        for report in found:
            assert report, report


def in_two_dimensions(strategies: list[str]) -> list[EquivalenceReport]:
    return [equivalence(name, "", "") for name in strategies]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_two_dimensions(ranks: RankPool, world: int) -> None:
    for (report,) in ranks(world).run(in_two_dimensions, ["2-d"], timeout=100):
        assert report, report


@pytest.mark.extension("balancing")
@pytest.mark.slow
def test_a_llama_on_four_stages(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "deep llama"))
    for report in ranks(4).run(equivalence, "balanced", folder, "deep llama", timeout=100):
        assert report, report


# -- what an adapter begins with -----------------------------------------------------------------------------------


class Begun(Adapted):
    """An adapter as peft makes it by default, which changes nothing at first; a head is trained, too."""

    way: Any = True
    dora = False

    def configure_model(self) -> None:
        if self.model is not None:
            return
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(7)
        with torch.device("meta"):
            base = class_of(self.class_name)(CONFIGS[self.kind]())
        lockstep.load_pretrained(base, self.folder)
        kinds = ["q_proj", "v_proj", "embed_tokens"]
        options = {"target_modules": kinds, "modules_to_save": ["lm_head"], "use_dora": self.dora}
        self.model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=self.way, **options))


class BegunOtherwise(Begun):
    def configure_model(self) -> None:
        super().configure_model()
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            assert self.model is not None
            for layer in self.model.base_model.model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])


def begins(folder: str, strategies: list[str]) -> list[tuple[str, str]]:
    """In a rank: adapters that begin otherwise than peft makes them, by strategy."""
    found: list[tuple[str, str]] = []
    world = dist.get_world_size()
    for strategy in strategies:
        module = (BegunOtherwise if strategy == "2-d" else Begun)(folder)
        module.on_train_batch_start = lambda *_: -1  # type: ignore[method-assign]
        quiet(strategy=strategy_of(strategy, world), devices=world, max_epochs=1).fit(module, texts())
        seen = module.seen
        heads = [value for name, value in seen.items() if "lm_head" in name]
        assert len(heads) == 2
        found += [(strategy, "lm_head")] * (not torch.equal(*heads))
        for name, value in seen.items():
            small = ".lora_B." in name or ".lora_embedding_A." in name
            if small and bool(value.any()):
                found.append((strategy, name))
            if ".lora_A." in name and not 0.1 < float(value.abs().max()) <= value.shape[1] ** -0.5:
                found.append((strategy, name))
            if ".lora_embedding_B." in name and not 0.5 < float(value.std()) < 1.5:
                found.append((strategy, name))
    return found


def test_an_adapter_begins_as_peft_makes_it(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    names = strategies("ddp", "fsdp", "2-d", "deepspeed_stage_3", "balanced")
    assert ranks(1).run(begins, folder, ["auto"], timeout=60) == [[]]
    assert ranks(2).run(begins, folder, names, timeout=60) == [[], []]


@pytest.mark.parametrize(
    ("way", "dora", "said"),
    [
        ("pissa", False, "incompatible tensor type"),
        (True, True, r"initial values of this adapter \(Embedding\) depend on"),
    ],
)
def test_an_adapter_that_follows_from_weights_that_are_not_read_is_refused(
    tmp_path: Path, way: Any, dora: bool, said: str
) -> None:
    module = Begun(str(write_folder(tmp_path, "llama")))
    module.way, module.dora = way, dora
    with pytest.raises((MisconfigurationException, RuntimeError), match=said):
        quiet(max_steps=1).fit(module, texts())


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
