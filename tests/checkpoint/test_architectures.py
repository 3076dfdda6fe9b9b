"""Many architectures begin with a folder's weights under every strategy, train as one process does, and are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ground.errors import MisconfigurationException
from lockstep.testing.equivalence import check_equivalence
from tests.accelerator.left_out import strategies
from tests.checkpoint.architectures import ARCHITECTURES, Begun, write_folder
from tests.checkpoint.test_pretrained import strategy_of
from tests.checkpoint.tuned import WORDS, class_of, texts
from tests.loop.pieces import quiet
from tests.tools.pool import RankPool

pytestmark = [pytest.mark.usefixtures("transformers"), pytest.mark.slow, pytest.mark.timeout(400)]


def words(batch_size: int) -> Any:
    drawn = torch.randint(1, WORDS, (14, 6), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(drawn, batch_size=batch_size)  # type: ignore[arg-type]


def outcome(kind: str, folder: str, strategy: str, into: str) -> str:
    """In a rank: what is not as it has to be; "" where nothing is; what is refused begins with "refused"."""
    world = dist.get_world_size()
    flags = {"strategy": strategy_of(strategy, world), "devices": world, "max_steps": 1}
    module = Begun(folder, kind)
    trainer = quiet(**flags)
    try:
        trainer.fit(module, texts())
    except MisconfigurationException as error:
        return f"refused: {error}"
    found = [f"begins otherwise: {name}" for name in others(module.seen, expected(kind, folder))]
    trained = {name: value.detach().clone().cpu() for name, value, _ in trainer.strategy.whole_parameters()}
    trainer.save_pretrained(into, max_shard_size="12KB")
    read = {f"model.{name}": each.detach() for name, each in model_of(kind).from_pretrained(into).named_parameters()}
    found += [f"read otherwise: {name}" for name in others(trained, read)]
    return "; ".join(found) or trains(kind, folder, strategy)


def trains(kind: str, folder: str, strategy: str) -> str:
    """What is not as on one process."""
    world = dist.get_world_size()
    given: dict[str, Any] = {"tolerance": 1e-6} if kind in IN_FLOAT32 else {}
    if strategy.startswith("deepspeed"):
        given = {"precision": "32-true", "tolerance": 2e-5}
    report = check_equivalence(
        lambda: Begun(folder, kind), words, strategy=strategy_of(strategy, world), devices=world, batch_size=2, **given
    )
    return "" if report else str(report)


def model_of(kind: str) -> Any:
    return class_of(ARCHITECTURES[kind].model)


def expected(kind: str, folder: str, **options: Any) -> dict[str, Tensor]:
    model = model_of(kind).from_pretrained(folder, **options)
    return {f"model.{name}": each.detach() for name, each in (*model.named_parameters(), *model.named_buffers())}


def others(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    names = sorted(found.keys() ^ wanted.keys())
    same = found.keys() & wanted.keys()
    return names + [n for n in same if found[n].dtype != wanted[n].dtype or not torch.equal(found[n], wanted[n])]


def kept(folder: str, strategies: list[str]) -> list[list[str]]:
    """In a rank: what differs from a model of `from_pretrained` in bfloat16."""
    found: list[list[str]] = []
    for strategy in strategies:
        module = Begun(folder, "deepseek_v3")
        devices = dist.get_world_size()
        quiet(strategy=strategy, devices=devices, max_steps=1, precision="bf16-true").fit(module, texts())
        found.append(others(module.seen, expected("deepseek_v3", folder, dtype=torch.bfloat16)))
    return found


def test_what_transformers_keeps_in_float32_stays_so(ranks: RankPool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "deepseek_v3")
    wanted = expected("deepseek_v3", folder, dtype=torch.bfloat16)
    assert wanted["model.model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    for found in ranks(2).run(kept, folder, ["ddp", "fsdp"], timeout=60):
        assert found == [[], []]


STRATEGIES = strategies("ddp", "fsdp", "2-d", "deepspeed_stage_3", "balanced")


IN_FLOAT32 = {"gemma", "gemma3", "deepseek_v3"}
"""Models that compute some of their gradients in float32, whatever their dtype is."""
TWO_CHAINS = {"t5", "whisper"}
"""Models with an encoder and a decoder, of which a pipeline has to be told which one it cuts."""


def outcomes(folders: dict[str, str], strategy: str, into: str) -> dict[str, str]:
    """In a rank: by architecture."""
    return {kind: outcome(kind, folder, strategy, f"{into}/{kind}") for kind, folder in folders.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_architecture_begins_trains_and_is_written_as_on_one_process(
    ranks: RankPool, tmp_path: Path, strategy: str
) -> None:
    folders = {kind: write_folder(tmp_path / "in" / kind, kind) for kind in ARCHITECTURES}
    for found in ranks(2).run(outcomes, folders, strategy, str(tmp_path / "out"), timeout=380):
        refused = TWO_CHAINS if strategy == "balanced" else set()
        for kind in refused:
            assert found.pop(kind).startswith("refused: BalancedStrategy(chain=None): the module has several chains")
        assert found == dict.fromkeys(ARCHITECTURES.keys() - refused, "")
