"""Flags of 2019 that mean strategy="dp"."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.extensions.parallel.dp.strategy import DataParallelStrategy
from tests.config.test_old_flags import check_line

PAGE: list[tuple[dict[str, Any], list[int], str]] = [
    ({"gpus": 4, "distributed_backend": "dp"}, [0, 1, 2, 3], "devices=4, strategy='dp'"),
    ({"gpus": 8}, list(range(8)), "devices=8, strategy='dp'"),
    ({"gpus": [0, 1]}, [0, 1], "devices=[0, 1], strategy='dp'"),
    ({"gpus": "0, 1"}, [0, 1], "devices=[0, 1], strategy='dp'"),
    ({"gpus": 2, "use_amp": True}, [0, 1], "devices=2, strategy='dp', precision='16-mixed'"),
    ({"gpus": -1}, list(range(8)), "devices=-1, strategy='dp'"),
]


@pytest.mark.parametrize(("flags", "devices", "today"), PAGE, ids=str)
def test_lines_of_2019_with_gpus(eight_gpus: None, flags: dict[str, Any], devices: list[int], today: str) -> None:
    check_line(flags, DataParallelStrategy, devices, 1, today)
