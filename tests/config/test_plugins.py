"""`Trainer(plugins=...)`: what has a place, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.checkpoint.io import TorchCheckpointIO
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import Precision
from lockstep.precision.formats import TruePrecision
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.pool import RankPool


class Grid:
    """A cluster that this process knows all about."""

    creates_processes_externally = True
    main_address = "127.0.0.1"

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def main_port(self) -> int:
        return 29500

    def world_size(self) -> int:
        return self.size

    def global_rank(self) -> int:
        return self.rank

    def local_rank(self) -> int:
        return self.rank

    def node_rank(self) -> int:
        return 0


class LightningEnvironment(Grid):
    creates_processes_externally = False


class Starts(Grid):
    creates_processes_externally = False


class Files(TorchCheckpointIO):
    """Stands for a user's."""


def test_a_precision() -> None:
    class Seen(TruePrecision):
        pass

    trainer = quiet(plugins=[Seen("64-true")], max_epochs=1)
    assert type(trainer.precision_plugin) is Seen
    assert trainer.precision == "64-true"
    trainer.fit(Slope(), numbers(2))


def test_a_checkpoint_io_beside_other_plugins() -> None:
    io = Files()
    trainer = quiet(plugins=[TruePrecision("64-true"), io])
    assert trainer.strategy.checkpoint_io is io
    assert trainer.precision == "64-true"


def on_a_grid() -> tuple[int, int, list[float]]:
    rank = torch.distributed.get_rank()
    trainer, module = quiet(plugins=Grid(rank, 2), strategy="ddp", devices=2, max_epochs=1), Slope()
    trainer.fit(module, numbers(4))
    return trainer.global_rank, trainer.world_size, module.gradients


def test_a_cluster_tells_which_rank_this_is(ranks: RankPool) -> None:
    assert ranks(2).run(on_a_grid) == [(0, 2, [1.5, 3.5]), (1, 2, [1.5, 3.5])]


def test_the_environment_of_one_machine_is_what_lockstep_does_by_itself() -> None:
    assert quiet(plugins=LightningEnvironment(3, 8)).world_size == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"plugins": "ddp_sharded"}, "plugins='ddp_sharded'.*select everything else with `strategy=`"),
        (
            {"plugins": [Files(), TorchCheckpointIO()]},
            r"\[Files\(\), TorchCheckpointIO\(\)\]\): a run can have only one checkpoint_io",
        ),
        ({"plugins": [Precision]}, "pass instances of lockstep's Precision"),
        ({"plugins": Precision(), "precision": 64}, "precision=64, plugins=Precision.*remove one"),
        ({"plugins": Starts()}, r"Starts\(\)\): its creates_processes_externally is False"),
        (
            {"plugins": Grid(0, 3), "num_nodes": 2},
            r"num_nodes=2\): world_size\(\) is 3, which is not divisible",
        ),
        ({"plugins": Grid(0, 4), "devices": 2}, r"devices=2, num_nodes=1 make 2 rank.*world_size\(\) is 4"),
    ],
)
def test_what_has_no_place(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        quiet(**flags)


def test_lightnings_own_plugins_are_refused_by_name(lightning: Any) -> None:
    from lightning.pytorch.plugins import HalfPrecision, TorchSyncBatchNorm
    from lightning.pytorch.plugins import TorchCheckpointIO as LightningsIO

    for made in (HalfPrecision("bf16-true"), LightningsIO(), TorchSyncBatchNorm()):
        with pytest.raises(MisconfigurationException, match="pass instances of lockstep's"):
            quiet(plugins=made)
