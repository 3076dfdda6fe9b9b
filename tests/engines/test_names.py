"""What `Trainer(strategy="...")` stands for."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.engines.ddp.strategy import DDPStrategy
from lockstep.engines.strategy import SingleDeviceStrategy
from lockstep.engines.table import NAMES, REFUSED, make_strategy
from lockstep.ground.errors import MisconfigurationException


def test_auto_is_plain_on_one_process_and_ddp_on_several() -> None:
    assert type(make_strategy("auto", 1)) is SingleDeviceStrategy
    assert make_strategy("auto", 2).launcher == "script"


def test_auto_starts_no_script_where_there_is_none() -> None:
    assert make_strategy("auto", 2, interactive=True).launcher == "spawn"
    assert type(make_strategy("auto", 1, interactive=True)) is SingleDeviceStrategy


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("ddp")])
def test_every_name_of_ddp_makes_it(name: str) -> None:
    strategy = make_strategy(name, 2)
    assert isinstance(strategy, DDPStrategy)
    fresh = any(word in name for word in ("spawn", "notebook"))
    assert strategy.launcher == ("spawn" if fresh else "fork" if "fork" in name else "script")
    assert type(make_strategy(name.upper(), 2)) is DDPStrategy


def test_a_strategy_for_one_rank_is_refused_for_several() -> None:
    assert type(make_strategy("single_device", 1)) is SingleDeviceStrategy
    for asked in ("single_device", SingleDeviceStrategy()):
        with pytest.raises(MisconfigurationException, match=r'strategy=.*one rank.*request 2. Use devices=1.*"ddp"'):
            make_strategy(asked, 2)


def test_an_object_is_taken_as_it_is() -> None:
    strategy = DDPStrategy()
    assert make_strategy(strategy, 1) is strategy


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - NAMES.keys()))
def test_a_refused_name_says_why_and_what_to_use(name: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf'strategy="{name}"\) is not supported: .*use ') as raised:
        make_strategy(name, 2)
    assert "\n" not in str(raised.value)


def test_a_row_takes_a_name_out_of_the_refused_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisconfigurationException, match="xla"):
        make_strategy("xla", 1)
    monkeypatch.setitem(NAMES, "xla", ("strategy.SingleDeviceStrategy", {}))
    assert type(make_strategy("xla", 1)) is SingleDeviceStrategy


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("ddp_spam", 'Did you mean "ddp_spawn'),
        (7, 'strategy=7.*"ddp"'),
        (DDPStrategy, r"is a class, but must be an object: use DDPStrategy\(\)"),
    ],
)
def test_another_name_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        make_strategy(asked, 2)


def test_a_start_method_that_is_none() -> None:
    with pytest.raises(MisconfigurationException, match=r"DDPStrategy\(start_method='forkserver'\)"):
        DDPStrategy(start_method="forkserver")
