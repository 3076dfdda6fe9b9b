"""What `Trainer(strategy="...")` stands for."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.ground.errors import MisconfigurationException
from lockstep.strategies.ddp import DDPStrategy
from lockstep.strategies.names import NAMES, NOT_BUILT, make_strategy
from lockstep.strategies.single import SingleDeviceStrategy


def test_auto_is_plain_on_one_process_and_ddp_on_several() -> None:
    assert type(make_strategy("auto", 1)) is SingleDeviceStrategy
    assert type(make_strategy("auto", 2)) is DDPStrategy


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_its_strategy(name: str) -> None:
    strategy = make_strategy(name, 2)
    assert isinstance(strategy, DDPStrategy)
    assert strategy.launcher == ("spawn" if "spawn" in name else "script")


def test_an_object_is_taken_as_it_is() -> None:
    strategy = DDPStrategy()
    assert make_strategy(strategy, 1) is strategy


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_name_that_is_to_come_says_what_to_use_today(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf'strategy="{name}".*not have.*use "{NOT_BUILT[name]}"'):
        make_strategy(name, 2)


@pytest.mark.parametrize(("asked", "said"), [("ddp_spam", 'Did you mean "ddp_spawn'), (7, "strategy=7.*'ddp'")])
def test_another_name_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        make_strategy(asked, 2)


def test_a_start_method_that_is_none() -> None:
    with pytest.raises(MisconfigurationException, match=r"DDPStrategy\(start_method='fork'\)"):
        DDPStrategy(start_method="fork")
