"""`deterministic` and `benchmark`, which torch keeps for the whole process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch

from lockstep.config.devices import apply_to_process
from lockstep.launch.environment import VARIABLE, fix_cublas_workspaces
from tests.loop.pieces import Slope, numbers, quiet


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark, settings()
    yield
    torch.backends.cudnn.benchmark = before[0]
    torch.use_deterministic_algorithms(before[1][1], warn_only=before[1][2])


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, (True, False, False)),
        ({"deterministic": True}, (False, True, False)),
        ({"deterministic": "warn"}, (False, True, True)),
        ({"deterministic": False}, (True, False, False)),
        ({"benchmark": False}, (False, False, False)),
        ({"deterministic": True, "benchmark": False}, (False, True, False)),
    ],
)
def test_what_the_flags_set(flags: dict[str, Any], found: tuple[bool, bool, bool]) -> None:
    torch.backends.cudnn.benchmark = True
    quiet(**flags)
    assert settings() == found
    quiet()
    assert settings() == found  # a Trainer that asks for nothing leaves it


def test_both_contradict_and_the_user_decides() -> None:
    quiet(deterministic=True, benchmark=True)
    assert settings() == (True, True, False)


def test_a_spawned_rank_has_the_settings_of_its_trainer() -> None:
    trainer = quiet(deterministic="warn")
    torch.use_deterministic_algorithms(False)
    pickle.loads(cloudpickle.dumps(trainer.session))  # what a fresh process does first
    assert settings()[1:] == (True, True)


def test_matrix_products_on_cuda_need_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    trainer = quiet(deterministic=True)
    assert VARIABLE not in os.environ
    apply_to_process(trainer.config, "cuda")
    assert os.environ[VARIABLE] == ":4096:8"
    monkeypatch.setenv(VARIABLE, ":16:8")
    fix_cublas_workspaces()
    assert os.environ[VARIABLE] == ":16:8"


class Squares(Slope):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.w * 0).sqrt() * 0  # its gradient is inf x 0


@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward0")
def test_detect_anomaly_names_the_operation_that_made_a_nan() -> None:
    quiet(max_epochs=1, non_finite="ignore").fit(Squares(), numbers(1))
    trainer = quiet(max_epochs=1, detect_anomaly=True)
    with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
        trainer.fit(Squares(), numbers(1))
    assert not torch.is_anomaly_enabled()


def test_detect_anomaly_is_off_during_set_up_and_after_its_failure() -> None:
    class Fails(Slope):
        def setup(self, stage: str) -> None:
            raise ValueError(f"anomaly mode: {torch.is_anomaly_enabled()}")

    with pytest.raises(ValueError, match="anomaly mode: False"):
        quiet(max_epochs=1, detect_anomaly=True).fit(Fails(), numbers(1))
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(("flag", "inference"), [(True, True), (False, False)])
def test_inference_mode_of_calls_outside_a_fit(flag: bool, inference: bool) -> None:
    class Asks(Slope):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    seen: list[tuple[bool, bool]] = []
    quiet(inference_mode=flag).validate(Asks(), numbers(1))
    assert seen == [(inference, False)]
