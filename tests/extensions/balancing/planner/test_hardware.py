"""What devices can do: as people say it, as it is measured, and as it is kept."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.extensions.balancing.planner import hardware
from lockstep.extensions.balancing.planner.cost import Candidate, predict
from lockstep.extensions.balancing.planner.engines import EngineCost
from lockstep.extensions.balancing.planner.hardware import (
    Hardware,
    described,
    hardware_of,
    measure_links,
    parse_bytes,
    usable_memory,
)
from lockstep.extensions.balancing.plans.planning import profile_module
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.formats import make_precision
from tests.extensions.balancing.planner.models import made
from tests.loop.pieces import quiet

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("24 GiB", 24 * 2**30), ("25GB/s", 25e9), ("1.5tb", 1.5e12), ("1000", 1000.0), ("7B", 7.0)],
)
def test_bytes_as_people_write_them(text: str, value: float) -> None:
    assert parse_bytes("--memory", text) == value


@pytest.mark.parametrize("text", ["", "GB", "80XB", "-1GB", "0", "1.2.3GB", "80 GB each"])
def test_what_are_no_bytes_names_the_flag(text: str) -> None:
    with pytest.raises(MisconfigurationException, match=r"--memory .*80GB"):
        parse_bytes("--memory", text)


def test_devices_elsewhere() -> None:
    made = described(8, 2, 80e9, 25e9, "H100")
    assert made.world == 16
    assert made.memory < 80e9
    assert made.slowest_link()[0] == 25e9
    assert made.speed("bf16-mixed") > made.speed("32-true") > made.speed("64-true")
    assert described(4, 1, link=10e9).slowest_link()[0] == 10e9
    with pytest.raises(MisconfigurationException, match="--chip abacus: unknown"):
        described(1, chip="abacus")


def test_a_measurement_is_kept_with_the_hosts_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hardware_of(CPU, folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert first.host == platform.node()
    assert first.host in json.loads(kept.read_text())["host"]
    assert min(first.speed("32-true"), first.moved, first.call, first.memory) > 0

    def again(device: torch.device) -> Hardware:
        raise AssertionError("it was measured already")

    monkeypatch.setattr(hardware, "measure_device", again)
    assert hardware_of(CPU, folder=tmp_path).products == first.products


def test_a_damaged_file_is_measured_anew(tmp_path: Path) -> None:
    hardware_of(CPU, folder=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_text('{"devices": 1')
    assert hardware_of(CPU, folder=tmp_path).moved > 0
    kept.write_text('{"wheels": 4}')
    assert hardware_of(CPU, folder=tmp_path).moved > 0


def test_ranks_of_a_cpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "measure_links", lambda: {"link": 1e9, "latency": 1e-4, "shared": 2e9})
    one, two = hardware_of(CPU, 1, folder=tmp_path), hardware_of(CPU, 2, folder=tmp_path)
    assert two.memory == pytest.approx(one.memory / 2, rel=0.2)
    assert (two.link, two.shared) == (1e9, 2e9)


@pytest.mark.slow
def test_links_are_measured_by_two_processes() -> None:
    found = measure_links()
    engines = dict(found.pop("engines"))
    assert set(found) == {"link", "latency", "shared", "shared_latency", "contention"}
    assert min(found.values()) > 0
    assert {"sharded", "fsdp", "fsdp_grads"} <= set(engines)
    for cost in engines.values():
        assert cost.seconds(groups=4, parameters=50, size=4e6, ranks=2) > 0


def test_a_measured_engine_takes_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = (("fsdp", EngineCost(step=0.5)), ("deepspeed 2", EngineCost(parameter=0.25)))
    monkeypatch.setattr(hardware, "measure_links", lambda: {"link": 1e9, "engines": costs})
    measured = hardware_of(CPU, 2, folder=tmp_path)
    assert hardware_of(CPU, 2, folder=tmp_path).engines == costs  # as they were kept
    module, _, batch = made("wide")
    profile = profile_module(module, batch, make_precision("32-true"), trainer=quiet())
    assert predict(profile, Candidate("fsdp"), measured).sent == 0.5
    sent = predict(profile, Candidate("deepspeed", stage=2), measured).sent
    assert sent == 0.25 * len(profile.parameters)
    assert predict(profile, Candidate("fsdp"), replace(measured, nodes=2)).sent != 0.5


def test_what_torchs_allocator_keeps_is_there_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 75 GiB to have counted as 9.5 after an earlier fit, and a plan sharded for nothing."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 66 * gib)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 1 * gib)
    assert usable_memory(torch.device("cuda", 0)) == pytest.approx(0.95 * 75 * gib)
