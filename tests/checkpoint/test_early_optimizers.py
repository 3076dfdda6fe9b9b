"""Optimizers that cannot take what they are given are refused before the weights of a folder are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lockstep.checkpoint.pretrained import WeightFiles
from lockstep.loop import call
from lockstep.testing import RankPool
from tests.checkpoint.tuned import Tuned, needs_transformers, texts, write_folder
from tests.loop.pieces import quiet

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(autouse=True)
def transformers() -> None:
    needs_transformers()


class Vectors(Tuned):
    """Gives Muon all that it has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon(self.parameters())


class Matrices(Tuned):
    """Gives Muon matrices, and trains nothing else."""

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.Muon([p for p in self.parameters() if p.ndim == 2])}


class Muon(torch.optim.SGD):
    """Of the name of torch's, and not known."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Unknown(Tuned):
    def configure_optimizers(self) -> Any:
        return Muon(self.parameters(), 0.1)


def refused(kind: type[Tuned], folder: str, strategies: list[str]) -> list[str]:
    """What is said under each strategy, on this rank, with nothing read."""
    found: list[str] = []
    devices = dist.get_world_size() if dist.is_initialized() else 1
    for strategy in strategies:
        with patch.object(WeightFiles, "read", side_effect=AssertionError), pytest.raises(Exception) as raised:
            quiet(strategy=strategy, devices=devices, max_steps=1).fit(kind(folder, "llama"), texts())
        found.append(str(raised.value))
    return found


def test_muon_with_vectors_is_refused_on_every_rank_before_weights_are_read(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    strategies = ["ddp", "fsdp", "deepspeed_stage_3", "balanced"]
    for found in (refused(Vectors, folder, ["auto"]), *ranks(2).run(refused, Vectors, folder, strategies, timeout=60)):
        for said in found:
            assert (
                "Vectors.configure_optimizers: Muon updates matrices, and was given a parameter of shape (16)" in said
            )
            assert "'model.model.layers.0.input_layernorm.weight'" in said
            assert "CombinedOptimizer(Muon(" in said


def test_an_engine_that_cannot_do_an_update_says_so_before_weights_are_read(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path, "llama"))
    for found in ranks(2).run(refused, Matrices, folder, ["deepspeed_stage_3", "deepspeed_stage_1"], timeout=60):
        assert all("DeepSpeedStrategy with Muon: it needs whole matrices" in said for said in found)
    for found in ranks(2).run(refused, Unknown, folder, ["fsdp"], timeout=60):
        assert "FSDPStrategy with Muon: an optimizer of this name mixes" in found[0]


class Notes(Tuned):
    """Keeps what its hook has seen in an attribute, and the order of calls in a list."""

    order: list[str]
    early = False

    def __init__(self, folder: str, kind: str) -> None:
        super().__init__(folder, kind)
        self.calls, self.order = 0, []
        self.drawn = torch.zeros(0)

    def train_dataloader(self) -> Any:
        self.order.append("loader")
        return texts()

    def configure_optimizers(self) -> Any:
        if self.early:
            assert self.trainer.estimated_stepping_batches == 2
        self.order.append("optimizers")
        self.calls += 1
        self.drawn = torch.rand(3)
        print("made")
        return super().configure_optimizers()


def test_the_call_that_looks_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, found = str(write_folder(tmp_path, "llama")), []
    for looks in (True, False):
        module = Notes(folder, "llama")
        torch.manual_seed(3)
        with patch.object(call, "check_early", call.check_early if looks else lambda session: None):
            quiet(max_epochs=1).fit(module)
        assert (module.calls, capfd.readouterr().out) == (1, "made\n")
        assert module.order == ["optimizers"] * (1 + looks) + ["loader"]
        found.append(module)
    assert torch.equal(found[0].drawn, found[1].drawn)
    assert all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in found), strict=True))


class Hooked(Tuned):
    """Hangs a hook on each parameter, also on those of a layer that has its values from the beginning."""

    def __init__(self, folder: str, kind: str) -> None:
        super().__init__(folder, kind)
        self.head = torch.nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        return super().configure_optimizers()


def test_a_hook_that_is_hung_on_a_parameter_is_there_once(tmp_path: Path) -> None:
    module = Hooked(str(write_folder(tmp_path, "llama")), "llama")
    quiet(max_epochs=1).fit(module, texts())
    assert {len(parameter._backward_hooks or ()) for parameter in module.parameters()} == {1}


def test_a_hook_that_asks_for_the_number_of_steps_is_called_when_there_are_loaders(tmp_path: Path) -> None:
    module = Notes(str(write_folder(tmp_path, "llama")), "llama")
    module.early = True
    quiet(max_epochs=1).fit(module)
    assert module.order == ["loader", "optimizers"]


class Fussy(torch.optim.SGD):
    """Takes no parameters without memory, as fused optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            if any(p.is_meta for p in group["params"]):
                raise ValueError("all parameters have to be on a device that it knows")


class OnDevice(Tuned):
    def configure_optimizers(self) -> Any:
        return Fussy(self.parameters(), 0.1)


def test_an_optimizer_that_does_not_know_the_meta_device_is_no_reason(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(OnDevice(str(write_folder(tmp_path, "llama")), "llama"), texts())
    assert trainer.global_step == 2
