"""Worlds, and how they are read from an environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.detect import Placement, detect, early_rank
from lockstep.cluster.local import local_world, rank_variables
from lockstep.cluster.world import World, read_number
from lockstep.ground.errors import MisconfigurationException
from tests.cluster.variables import TORCHRUN, without

BY_HAND = {"MASTER_ADDR": "first", "MASTER_PORT": "4000", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rank": 4}, "rank 4 is out of range for a world size of 4: expected 0 to 3"),
        ({"local_rank": 2}, "local rank 2 is out of range for a number of ranks on the node of 2"),
        ({"local_size": 5}, "world size of 4 is too small for 2 node"),
        ({"port": 70000}, "port 70000"),
    ],
)
def test_numbers_that_cannot_be_together(change: dict[str, Any], says: str) -> None:
    world = World(rank=3, size=4, local_rank=1, local_size=2, node_rank=1, num_nodes=2, address="a", port=1)
    with pytest.raises(MisconfigurationException, match=says):
        replace(world, **change)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_started_rank_finds_its_world_again(devices: int, nodes: int, data: st.DataObject) -> None:
    node, local = data.draw(st.integers(0, nodes - 1)), data.draw(st.integers(0, devices - 1))
    world = World(node * devices + local, devices * nodes, local, devices, node, nodes, "host", 4000)
    assert local_world(rank_variables(world), devices, nodes) == world
    assert detect(rank_variables(world), devices, nodes) == Placement(world, launched=True)
    assert detect(rank_variables(world), None, nodes) == Placement(world, launched=True)


@given(st.integers(1, 4), st.integers(1, 4))
def test_ranks_of_all_nodes_are_counted_through(devices: int, nodes: int) -> None:
    ranks = [
        detect({**BY_HAND, "NODE_RANK": str(node), "LOCAL_RANK": str(local)}, devices, nodes).world.rank
        for node in range(nodes)
        for local in range(devices)
    ]
    assert ranks == list(range(devices * nodes))


def test_torchrun() -> None:
    found = Placement(World(3, 4, 1, 2, 1, 2, "head", 29500), True, "torchelastic")
    by_agent = {**without(TORCHRUN, "GROUP_WORLD_SIZE"), "TORCHELASTIC_RUN_ID": "job"}
    assert detect(TORCHRUN, 2, 2) == detect(TORCHRUN) == detect(TORCHRUN, None, 2) == detect(by_agent, 2, 2) == found


def test_another_number_of_devices_than_was_started() -> None:
    environ = rank_variables(World(1, 2, 1, 2, 0, 1, "127.0.0.1", 4000))
    with pytest.raises(
        MisconfigurationException, match=r"devices=3, .*but 2 were started.*same devices and num_nodes.*ddp_spawn"
    ):
        detect(environ, 3)


def test_a_world_size_left_over_from_elsewhere_does_not_count() -> None:
    assert detect({"WORLD_SIZE": "16"}, 2).world.size == 2


def test_several_nodes_by_hand() -> None:
    world = World(2, 4, 0, 2, 1, 2, "first", 4000)
    assert detect(BY_HAND, 2, 2) == Placement(world, launched=False)
    assert detect({**without(BY_HAND, "NODE_RANK"), "GROUP_RANK": "1"}, 2, 2).world == world


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "NODE_RANK"])
def test_several_nodes_with_a_variable_missing(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"num_nodes=2, but {name} is not set: start the script"):
        detect(without(BY_HAND, name), 2, 2)


def test_a_variable_that_is_no_number() -> None:
    with pytest.raises(MisconfigurationException, match="variable NODE_RANK is 'two': set it to an integer"):
        detect({**BY_HAND, "NODE_RANK": "two"}, 2, 2)
    assert read_number({}, "NODE_RANK", default=3) == 3


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), ({"RANK": "3", "LOCAL_RANK": "0"}, 3), ({"LOCAL_RANK": "2"}, 2), ({"NODE_RANK": "1"}, 1)],
)
def test_rank_before_the_flags_are_known(environ: dict[str, str], rank: int) -> None:
    assert early_rank(environ) == rank
