"""strategy="dp" trains the model of one device, in float64, by parameter; faults in it are found."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from lockstep.extensions.parallel.dp import strategy as dp
from lockstep.testing import check_equivalence
from tests.equivalence.models import Plain, rows
from tests.equivalence.test_engines import CASES
from tests.equivalence.test_planted_faults import EVERY, names

pytestmark = pytest.mark.timeout(60)


# Statistics of a part are its own, and a weight is the sum of the parts': test_strategy.py holds it.
@pytest.mark.everyday
@pytest.mark.parametrize("case", [case for case in CASES if "BatchNorm" not in case and "weights" not in case])
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_one_process_with_several_devices_is_one_with_one(devices: int, case: str) -> None:
    make, length, given = CASES[case]
    given = {"batch_size": 8, **given}
    report = check_equivalence(make, rows(length), strategy="dp", devices=devices, **given)
    assert report, report


def test_a_mean_of_the_devices_means() -> None:
    """Of one process with several devices. The harness once let it use one of them, and so had nothing to say."""
    with patch.object(dp, "_mean", lambda values, weights: torch.stack(values).mean()):
        report = check_equivalence(Plain, rows(23), strategy="dp", devices=2, batch_size=8)
    assert (report.first[0].step, report.first[0].what) == (2, "gradient")  # 7 samples: 4 and 3
    assert names(report) == EVERY
