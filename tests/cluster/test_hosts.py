"""Lists of hosts and tasks, as SLURM and LSF write them."""

from __future__ import annotations

import pytest

from lockstep.cluster.world import first_host, hostlist, slots, tasks_per_node
from lockstep.ground.errors import MisconfigurationException


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1,node2", ["node1", "node2"]),
        ("host0 host1 host3", ["host0", "host1", "host3"]),
        ("node[001-003,7],gpu-a", ["node001", "node002", "node003", "node7", "gpu-a"]),
        ("a[1-2]b[3,5],c", ["a1b3", "a1b5", "a2b3", "a2b5", "c"]),
        ("r[1-2]-n[01-02].site", ["r1-n01.site", "r1-n02.site", "r2-n01.site", "r2-n02.site"]),
        ("", []),
    ],
)  # fmt: skip
def test_slurms_short_form(text: str, hosts: list[str]) -> None:
    assert hostlist(text) == hosts
    if hosts:
        assert first_host(text) == hosts[0]


@pytest.mark.parametrize("text", ["node[1-3", "node[3-1]", "node[a-b]", "node[]", "node1]", "node[1[2]]"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"is not in SLURM's format.*set MASTER_ADDR"):
        hostlist(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("3,1", [3, 1]), ("8(x2)", [8, 8])]
)
def test_tasks_on_each_node(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_tasks_that_cannot_be_read() -> None:
    with pytest.raises(MisconfigurationException, match=r"'2\(y3\)' are not in SLURM's format"):
        tasks_per_node("2(y3)")


def test_lsfs_hosts_and_slots() -> None:
    assert slots("launch 1 node1 4 node2 4") == {"launch": 1, "node1": 4, "node2": 4}
    assert slots("node1 2 node1 2") == {"node1": 4}
    with pytest.raises(MisconfigurationException, match="LSB_MCPU_HOSTS='node1 node2' is not in LSF's format"):
        slots("node1 node2")
