"""Models in parts on a device that is not the CPU: whole parameters beside parts, layers with states of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from benchmarks.gpu.modules import QUIET, Classifier, perceptron
from benchmarks.gpu.modules import rows as classes
from lockstep import Trainer
from lockstep.ground.numbers import floats
from lockstep.strategies import FSDPStrategy, ModelParallelStrategy
from lockstep.testing import check_equivalence
from tests.accelerator.madeup.queues import sleep
from tests.accelerator.on_device import on_device
from tests.engines.sharded import test_gathered_parameter as gathered
from tests.engines.sharded.test_gathered_parameter import ScalesData
from tests.equivalence.models import Blocks, rows

STRATEGIES: list[Any] = [FSDPStrategy, lambda: ModelParallelStrategy(1, 2), lambda: ModelParallelStrategy(2, 1)]


@on_device(2, group=True)
def test_whole_parameters_are_updated_beside_parts() -> None:
    """torch's optimizers gave both to one foreach function, as on all devices but the CPU, and it takes one kind."""
    for strategy in STRATEGIES:  # each of them has some whole ones
        report = check_equivalence(
            Blocks,
            rows(13),
            strategy=strategy(),
            devices=2,
            batch_size=2,
            steps=2,
            accelerator="madeup",
            gradient_clip_val=0.5,
        )
        assert report, report


@pytest.mark.extension("balancing")
@on_device()
def test_blocks_of_a_pipeline_draw_on_devices_without_a_torch_generator() -> None:
    """Their seeds came by way of torch.Generator(device), which torch makes for few kinds: no pipeline began."""
    from lockstep.extensions.balancing.pipeline.block_random import BlockRandom

    devices = {0: torch.device("madeup", 0), 1: torch.device("madeup", 1), 2: torch.device("madeup", 1)}

    def drawn(place: int) -> list[float]:
        with random.at(place):
            return torch.rand(3, device=devices[place]).tolist()

    torch.manual_seed(0)
    before = [torch.get_rng_state(), *torch.get_device_module("madeup").get_rng_state_all()]
    random = BlockRandom(devices)
    first = [drawn(place) for place in devices]
    saved = random.state_dict()
    second = [drawn(place) for place in devices]
    assert len({tuple(numbers) for numbers in first + second}) == 6
    random.load_state_dict(saved)
    assert [drawn(place) for place in devices] == second
    after = [torch.get_rng_state(), *torch.get_device_module("madeup").get_rng_state_all()]
    assert all(map(torch.equal, before, after))  # what the rest of the step draws


class WritesFirst(ScalesData):
    """It writes to shards while the device is still busy, before it calls the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sleep(0.05)
        return super().training_step(batch, batch_idx)


class WritesBetween(gathered.Blocks):
    """As MoCo does: a teacher follows its pupil between the calls of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(gathered.Block(), gathered.Block()).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.blocks(batch[0])
        sleep(0.05)
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                mine.lerp_(its, 0.5)
            aim = self.teacher(batch[0])
        loss: Tensor = (self.back(found) - self.back(aim)).square().mean()
        return loss


@on_device(2, group=True)
def test_blocks_are_gathered_after_the_steps_own_writes_to_their_shards() -> None:
    """torch gathers on other streams, which did not wait for them: the ranks trained with older weights, at times."""
    for module in (WritesFirst, WritesBetween):
        report = check_equivalence(
            module, rows(24), strategy=FSDPStrategy(), devices=2, batch_size=2, steps=2, accelerator="madeup"
        )
        assert report, report


@on_device(2, group=True)
def test_a_loss_that_is_a_dtensor_is_read_as_a_number() -> None:
    """The epoch of a loss over split classes ended in torch's error: `tolist` takes no DTensor."""
    mesh = dist.init_device_mesh("madeup", (dist.get_world_size(),))
    one = torch.tensor(1.5, device=torch.device("madeup", dist.get_rank()))
    whole, partial = (DTensor.from_local(one, mesh, [placed]) for placed in (Replicate(), Partial()))
    assert floats([whole, 2, one, partial]) == [1.5, 2.0, 1.5, 3.0]


@on_device(2, group=True)
def test_a_metric_of_a_model_in_parts_is_on_the_device() -> None:
    """Its states are neither parameters nor buffers: they stayed on the CPU, and the first update failed."""
    pytest.importorskip("torchmetrics")
    flags: dict[str, Any] = {**QUIET, "accelerator": "madeup", "devices": dist.get_world_size(), "max_epochs": 1}
    trainer = Trainer(**flags, strategy=FSDPStrategy())
    trainer.fit(Classifier(perceptron()), classes(16, 4), classes(8, 4))
    assert 0 <= trainer.callback_metrics["accuracy"] <= 1
