"""Moving batches and choosing devices."""

from __future__ import annotations

import logging
from collections import UserList
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_sequence

from lockstep.config.devices import announce_device
from lockstep.ground.accelerators import carries, resolve_accelerator
from lockstep.ground.errors import MisconfigurationException
from lockstep.ground.memory_use import is_oom_error
from lockstep.ground.torch_support import untested_device_warning
from lockstep.ground.transfer import move_data_to_device

META = torch.device("meta")


@dataclass
class Batch:
    images: torch.Tensor
    names: list[str]


class Graph:
    def __init__(self) -> None:
        self.nodes = torch.ones(2)

    def to(self, device: torch.device) -> Graph:
        moved = Graph()
        moved.nodes = self.nodes.to(device)
        return moved


class InPlaceGraph(Graph):
    def to(self, device: torch.device) -> Any:
        self.nodes = self.nodes.to(device)


def test_moves_everything_that_has_a_method_to() -> None:
    batch: dict[str, Any] = {
        "batch": Batch(torch.ones(3), ["a"]),
        "pair": (torch.ones(2), 5),
        "graph": Graph(),
        "in place": InPlaceGraph(),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
    }
    moved = move_data_to_device(batch, "meta")
    assert moved["batch"].images.device == META
    assert moved["batch"].names == ["a"]
    assert moved["pair"][0].device == META
    assert moved["pair"][1] == 5
    assert moved["graph"].nodes.device == META
    assert moved["in place"] is batch["in place"]
    assert moved["in place"].nodes.device == META
    assert moved["packed"].data.device == META
    assert batch["batch"].images.device.type == "cpu"


def test_a_tensor_that_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert move_data_to_device([tensor], torch.device("cpu"))[0] is tensor


@pytest.mark.parametrize(("devices", "count"), [("auto", 1), (1, 1), (3, 3), ("2", 2)])
def test_processes_on_the_cpu(devices: Any, count: int) -> None:
    assert resolve_accelerator("cpu", devices) == ("cpu", [torch.device("cpu")] * count)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("accelerator", ["auto", "gpu", "cuda"])
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        ("auto", [0, 1]),
        (-1, [0, 1]),
        (1, [0]),
        ([1], [1]),
        ([1, 0], [1, 0]),
        (UserList([1, 0]), [1, 0]),  # as omegaconf's lists, which configs give: they were refused
        ("0, 1", [0, 1]),
    ],
)
def test_gpus(two_gpus: None, accelerator: str, devices: Any, indices: list[int]) -> None:
    assert resolve_accelerator(accelerator, devices) == ("cuda", [torch.device("cuda", i) for i in indices])


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (3, r"devices=3 was requested, but this machine has 2 cuda device.*devices=2 or less"),
        ([0, 2], r"devices=\[0, 2\] was requested, but this machine has 2"),
        ([1, 1], r"devices=\[1, 1\] contains a device twice"),
        (0, "devices=0 is not valid: pass a number"),
        (True, "devices=True is not valid: pass a number"),
        ("0,x", "devices='0,x' is not valid: pass a number"),
    ],
)
def test_impossible_gpus_are_refused_by_flag_value_and_way_out(two_gpus: None, devices: Any, says: str) -> None:
    with pytest.raises(MisconfigurationException, match=says):
        resolve_accelerator("gpu", devices)


def test_auto_without_a_gpu_is_the_cpu(no_gpu: None) -> None:
    assert resolve_accelerator() == ("cpu", [torch.device("cpu")])


@pytest.mark.parametrize("accelerator", ["hpu", "ipu", "tpu", "xla"])
def test_a_refused_accelerator_says_why(accelerator: str) -> None:
    why = rf"accelerator='{accelerator}' is unknown: .*a device that a package adds.*import it before you create"
    with pytest.raises(MisconfigurationException, match=why):
        resolve_accelerator(accelerator)


@pytest.mark.parametrize("accelerator", ["mps", "gpu", "auto"])
def test_apples_gpu(accelerator: str, no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was refused on every machine."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert resolve_accelerator(accelerator) == ("mps", [torch.device("mps", 0)])
    assert resolve_accelerator(accelerator, 1) == ("mps", [torch.device("mps", 0)])
    with pytest.raises(MisconfigurationException, match="this machine has 1 mps device"):
        resolve_accelerator(accelerator, 2)


class Backend(SimpleNamespace):
    """What a package adds to torch for its devices."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 4


@pytest.fixture
def forgetting_modules() -> Iterator[None]:
    """torch keeps the module of a kind of device."""
    yield
    torch.get_device_module.cache_clear()


@pytest.mark.usefixtures("no_gpu", "forgetting_modules")
def test_a_backend_out_of_torchs_tree_is_taken_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several devices one is taken, where no backend of process groups carries their tensors."""
    monkeypatch.setattr(torch, "privateuseone", Backend(), raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("privateuseone"))
    torch.get_device_module.cache_clear()
    for asked in ("privateuseone", "auto"):
        assert resolve_accelerator(asked) == ("privateuseone", [torch.device("privateuseone", 0)])
    assert resolve_accelerator("privateuseone", [2])[1] == [torch.device("privateuseone", 2)]
    capability = {**dist.Backend.backend_capability, "of-theirs": ["privateuseone"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", capability)
    kinds = {**dist.Backend.default_device_backend_map, "privateuseone": "of-theirs"}
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", kinds)
    assert len(resolve_accelerator("privateuseone")[1]) == 4


@pytest.mark.parametrize(
    ("backend", "kind", "carried"),
    [
        ("gloo", "cpu", True),
        ("nccl", "cpu", False),
        ("cpu:gloo,cuda:nccl", "cuda", True),
        ("cpu:gloo,cuda:nccl", "xpu", False),
        (None, "xpu", True),
        (None, "privateuseone", False),
    ],
)
def test_what_a_backend_carries(backend: str | None, kind: str, carried: bool) -> None:
    assert carries(backend, kind) is carried


def test_a_device_on_which_nothing_ran_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    announce_device.cache_clear()
    with caplog.at_level(logging.INFO, logger="lockstep"):
        for kind in ("cpu", "xpu", "xpu"):
            announce_device(kind)
    assert {untested_device_warning(*each) for each in (("cpu",), ("cpu", True), ("cuda",))} == {None}
    assert "has not run on several such devices yet" in str(untested_device_warning("cuda", several=True))
    assert "has not run on such a device yet" in str(untested_device_warning("xpu", several=True))
    assert [record.getMessage() for record in caplog.records] == [untested_device_warning("xpu")]
    announce_device.cache_clear()


@pytest.mark.parametrize(
    ("error", "is_oom"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_out_of_memory(error: Exception, is_oom: bool) -> None:
    assert is_oom_error(error) is is_oom
