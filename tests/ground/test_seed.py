"""Seeds and random states."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ground.seed import (
    current_seed,
    hand_down_seed,
    isolate_rng,
    random_states,
    random_states_of,
    seed_everything,
    set_random_states,
    set_random_states_of,
)


@pytest.fixture(autouse=True)
def seed_and_states_put_back() -> Iterator[None]:
    before = current_seed()
    with isolate_rng():
        yield
    hand_down_seed(before)


def draw() -> list[Any]:
    """Numbers of all kinds from all generators; gaussians come in pairs, of which one half is kept back."""
    return [
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        random.randint(0, 10**9),
        numpy.random.rand(2).tolist(),
        numpy.random.randn(),
    ]


def through_a_file(states: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def test_the_same_seed_gives_the_same_numbers_in_all_generators() -> None:
    assert seed_everything(7, verbose=False) == 7
    first = draw()
    seed_everything(7, workers=True, verbose=False)
    assert draw() == first
    assert current_seed() == 7
    seed_everything(8, verbose=False)
    assert all(one != other for one, other in zip(draw(), first, strict=True))


def test_numbers_are_those_of_the_plain_generators() -> None:
    seed_everything(11, verbose=False)
    assert random.random() == random.Random(11).random()
    assert numpy.random.rand() == numpy.random.RandomState(11).rand()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(11)))


@given(st.integers(0, 700), st.integers(0, 3), st.integers(0, 3))
def test_states_come_back_from_a_weights_only_file_bit_for_bit(skip: int, gauss: int, numpy_gauss: int) -> None:
    seed_everything(skip, verbose=False)
    for _ in range(skip):
        random.random()
        numpy.random.rand()
    for _ in range(gauss):
        random.gauss(0, 1)
    for _ in range(numpy_gauss):
        numpy.random.randn()
    python, numpys = random.getstate(), numpy.random.get_state(legacy=False)
    states = through_a_file(random_states())
    expected = draw()
    set_random_states(states)
    assert random.getstate() == python
    again: Any = numpy.random.get_state(legacy=False)
    assert repr(again) == repr(numpys)
    assert (again["state"]["key"] == numpys["state"]["key"]).all()
    assert draw() == expected


def test_isolate_rng_also_after_an_exception() -> None:
    seed_everything(1, verbose=False)
    expected = draw()
    seed_everything(1, verbose=False)

    def fail() -> None:
        draw()
        raise KeyError

    with pytest.raises(KeyError), isolate_rng():
        fail()
    assert draw() == expected


def test_without_a_seed_the_one_before_or_zero() -> None:
    hand_down_seed(None)
    with pytest.warns(UserWarning, match=r"without a seed.*the seed is 0") as seen:
        assert seed_everything(verbose=True) == 0
    assert seen[0].filename == __file__
    seed_everything(9, verbose=False)
    assert seed_everything() == 9


# -- devices that have other numbers elsewhere ---------------------------------------------------------------


class Process:
    """A process that sees some devices, whose generators torch.Generators stand for."""

    def __init__(self, visible: int) -> None:
        self.generators = [torch.Generator() for _ in range(visible)]
        for generator in self.generators:
            generator.seed()

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)

    def mask(self, number: int) -> torch.Tensor:
        return torch.rand(64, generator=self.generators[number]) < 0.5


def told(monkeypatch: pytest.MonkeyPatch, one: Process, numbers: list[int]) -> dict[str, Any]:
    """What a process says of its devices, through a file."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: one)
    return through_a_file(random_states_of([torch.device("cuda", number) for number in numbers]))


def heard(monkeypatch: pytest.MonkeyPatch, other: Process, states: dict[str, Any], numbers: list[int]) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: other)
    set_random_states_of(states, [torch.device("cuda", number) for number in numbers])


@pytest.mark.parametrize(("visible", "own"), [(2, 1), (1, 0), (8, 5)])
def test_ranks_of_a_row_draw_alike_on_devices_of_other_numbers(
    visible: int, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallel: the second rank took the first one's unused generator, and dropout masks differed."""
    first, second = Process(visible), Process(visible)
    first.mask(0)  # weights were drawn on the device
    heard(monkeypatch, second, told(monkeypatch, first, [0]), [own])
    assert torch.equal(first.mask(0), second.mask(own))


def test_a_process_with_several_devices_puts_each_state_into_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Process(4), Process(6)
    heard(monkeypatch, after, told(monkeypatch, before, [2, 0]), [5, 1])
    assert torch.equal(before.mask(2), after.mask(5))
    assert torch.equal(before.mask(0), after.mask(1))


def test_states_of_earlier_checkpoints_go_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Process(2), Process(2)
    states = {**random_states(), "cuda": [generator.get_state() for generator in before.generators]}
    heard(monkeypatch, after, states, [1])
    assert torch.equal(before.mask(1), after.mask(1))


def test_states_of_an_accelerator_that_is_not_cuda_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume with dropout went on with other numbers, and said nothing."""
    one = Process(2)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    for name, answer in (("is_initialized", True), ("is_available", True), ("device_count", 2)):
        monkeypatch.setattr(torch.xpu, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.xpu, "get_rng_state", one.get_rng_state)
    monkeypatch.setattr(torch.xpu, "set_rng_state", one.set_rng_state)
    with isolate_rng():
        drawn = [one.mask(0), one.mask(1)]
    assert torch.equal(one.mask(0), drawn[0])
    assert torch.equal(one.mask(1), drawn[1])
    with isolate_rng(include_cuda=False):
        drawn = [one.mask(1)]
    assert not torch.equal(one.mask(1), drawn[0])
