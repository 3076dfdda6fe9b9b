"""Cluster environments: what they say of a process, and that the Trainer takes them."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch

from lockstep.cluster.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    describes_ranks,
    environment_named,
)
from lockstep.config.devices import device_of, node_devices
from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.ground.errors import MisconfigurationException
from tests.cluster.variables import TASK, TORCHRUN
from tests.loop.pieces import Slope, numbers, quiet


def facts(environment: ClusterEnvironment) -> tuple[Any, ...]:
    place = (environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank())
    return (*place, environment.main_address, environment.main_port, environment.creates_processes_externally)


def put(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_torchruns_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TORCHRUN)
    environment = TorchElasticEnvironment()
    assert TorchElasticEnvironment.detect()
    assert facts(environment) == (4, 3, 1, 1, "head", 29500, True)
    environment.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(MisconfigurationException, match=r"devices=3, num_nodes=1 make 3 rank\(s\), but .*is 4"):
        environment.validate_settings(num_devices=3, num_nodes=1)


def test_a_class_derived_from_it_describes_ranks_that_somebody_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """So Ray's does: it was refused, as lockstep starts ranks by its own means."""

    class Workers(LightningEnvironment):
        def world_size(self) -> int:
            return 1

    assert not Workers().creates_processes_externally
    assert quiet(plugins=Workers()).world_size == 1
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Workers().creates_processes_externally
    assert not LightningEnvironment().creates_processes_externally
    assert quiet(plugins=Workers()).world_size == 1


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


# -- those that lockstep knows --------------------------------------------------------------------------------


def test_sruns_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TASK)
    environment = SLURMEnvironment()
    assert SLURMEnvironment.detect()
    assert facts(environment) == (4, 3, 1, 1, "node1", 15007, True)
    assert (environment.job_id(), environment.job_name()) == (7, "train.sh")
    assert (environment.auto_requeue, environment.requeue_signal) == (True, signal.SIGUSR1)
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    assert environment.job_id() is None


@pytest.mark.parametrize(
    "kind", [TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment, KubeflowEnvironment]
)
def test_out_of_their_place_they_say_so(kind: type[ClusterEnvironment]) -> None:
    assert not kind.detect()
    with pytest.raises(MisconfigurationException, match="did not start this process"):
        kind().world_size()


def test_settings_of_a_slurm_job_are_no_wish_for_one() -> None:
    """A script that turns requeueing off was refused at the desk, by a flag that nobody had set."""
    trainer = quiet(plugins=[SLURMEnvironment(auto_requeue=False)], devices=1)
    assert (trainer.world_size, trainer.num_nodes) == (1, 1)


def test_a_strategy_takes_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match=r"cluster_environment='slrum'.*choose 'TorchElastic', 'SLURM'"):
        quiet(strategy=DDPStrategy(cluster_environment="slrum"))
    with pytest.raises(MisconfigurationException, match="'slurm', but srun did not start this process"):
        quiet(strategy=DDPStrategy(cluster_environment="SLURM"))
    put(monkeypatch, TASK)
    trainer = quiet(strategy=DDPStrategy(cluster_environment="SLURM"))
    assert (trainer.global_rank, trainer.world_size, trainer.num_nodes) == (3, 4, 2)


def test_one_that_is_named_wins_over_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {**TASK, **TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"})
    assert quiet().global_rank == 2
    assert quiet(plugins=SLURMEnvironment()).global_rank == 3
    assert quiet(strategy=DDPStrategy(cluster_environment="slurm")).global_rank == 3


def test_lightnings_own_lets_no_cluster_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch script of a job that has more tasks, say."""
    put(monkeypatch, TASK)
    for plugin in (LightningEnvironment(), environment_named("Local")):
        assert quiet(plugins=plugin).world_size == 1


def test_several_nodes_without_a_strategy_mean_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TASK)
    for flags in ({}, {"num_nodes": 2}, {"devices": 2, "num_nodes": 2}):
        assert type(quiet(**flags).strategy) is DDPStrategy


# -- devices --------------------------------------------------------------------------------------------------


class Gpus:
    """An accelerator with so many devices that torch sees."""

    device_type = "cuda"
    process_group_backend = "nccl"

    def __init__(self, count: int) -> None:
        self.count = count

    def get_parallel_devices(self, devices: Any) -> list[torch.device]:
        wanted = self.count if devices in ("auto", -1) else devices
        if wanted > self.count:
            raise MisconfigurationException(f"there are {self.count}")
        return [torch.device("cuda", index) for index in range(wanted)]


def test_a_task_that_sees_one_device_does_not_index_it() -> None:
    """SLURM's --gpus-per-task=1 shows each task its own device, which is number 0 in all of them."""
    devices, asked = node_devices(Gpus(1), 8, assigned_by_cluster=True)
    assert asked == 8
    assert [device_of(devices, rank, 8).index for rank in range(8)] == [0] * 8


def test_a_task_that_sees_all_devices_indexes_them() -> None:
    devices, asked = node_devices(Gpus(8), "auto", assigned_by_cluster=True)
    assert asked is None  # as many as there are tasks, not devices
    assert [device_of(devices, rank, 8).index for rank in range(8)] == list(range(8))


def test_ones_own_machine_has_the_devices_that_were_asked_for() -> None:
    assert node_devices(Gpus(4), 2, assigned_by_cluster=False)[1] == 2
    assert node_devices(Gpus(4), "auto", assigned_by_cluster=False)[1] == 4
    with pytest.raises(MisconfigurationException, match="there are 4"):
        node_devices(Gpus(4), 5, assigned_by_cluster=False)
