"""Cluster environments: what they say of a process, and that the Trainer takes them."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.cluster.described import describes_ranks
from lockstep.cluster.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from lockstep.ground.errors import MisconfigurationException
from tests.loop.pieces import Slope, numbers, quiet

ELASTIC = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "1234",
}


def facts(environment: ClusterEnvironment) -> tuple[Any, ...]:
    place = (environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank())
    return (*place, environment.main_address, environment.main_port, environment.creates_processes_externally)


def test_torchruns_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ELASTIC.items():
        monkeypatch.setenv(name, value)
    environment = TorchElasticEnvironment()
    assert TorchElasticEnvironment.detect()
    assert facts(environment) == (4, 3, 1, 1, "head", 1234, True)
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(MisconfigurationException, match=r"devices=3, num_nodes=1 make 3 rank\(s\), but .*is 4"):
        environment.validate_settings(num_devices=3, num_nodes=1)


def test_without_torchrun_it_says_so() -> None:
    assert not TorchElasticEnvironment.detect()
    with pytest.raises(MisconfigurationException, match="torchrun did not start this process"):
        TorchElasticEnvironment().world_size()


def test_one_process_of_ones_own() -> None:
    assert facts(LightningEnvironment()) == (1, 0, 0, 0, "127.0.0.1", 0, False)


class Alone(ClusterEnvironment):
    creates_processes_externally = True  # type: ignore[assignment]
    main_address = "127.0.0.1"  # type: ignore[assignment]
    main_port = 0  # type: ignore[assignment]

    def world_size(self) -> int:
        return 1

    def global_rank(self) -> int:
        return 0

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


@pytest.mark.parametrize("environment", [Alone(), LightningEnvironment()])
def test_the_trainer_takes_it(environment: ClusterEnvironment) -> None:
    assert describes_ranks(environment)
    module = Slope()
    quiet(max_epochs=1, plugins=environment).fit(module, numbers(2))
    assert module.gradients == [1.0, 2.0]


def test_a_part_that_is_missing_is_told_by_python() -> None:
    class Half(ClusterEnvironment):
        def world_size(self) -> int:
            return 1

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
