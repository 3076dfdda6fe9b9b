"""Throughput: rates over a window of updates, against sums by hand and Lightning's."""

from __future__ import annotations

import pytest

from lockstep.extensions.extras.throughput import Throughput


def fed(throughput: object, *, flops: bool = True, lengths: bool = True, updates: int = 6) -> list[dict[str, float]]:
    computed = []
    for i in range(1, updates + 1):
        throughput.update(  # type: ignore[attr-defined]
            time=0.5 * i * i,
            batches=i,
            samples=3 * i,
            lengths=12 * i if lengths else None,
            flops=100 + i if flops else None,
        )
        computed.append(throughput.compute())  # type: ignore[attr-defined]
    return computed


def test_rates_by_hand() -> None:
    *before, last = fed(Throughput(window_size=4, world_size=2, available_flops=1000))
    assert before[0] == {"time": 0.5, "batches": 1, "samples": 3, "lengths": 12}
    seconds = 18.0 - 4.5  # updates 3 to 6
    rates = {"batches_per_sec": 3, "samples_per_sec": 9, "items_per_sec": 36, "flops_per_sec": 104 + 105 + 106}
    expected = {"time": 18.0, "batches": 6, "samples": 18, "lengths": 72}
    for name, amount in rates.items():
        expected[f"device/{name}"] = amount / seconds
        expected[name] = 2 * amount / seconds
    expected["device/mfu"] = 315 / seconds / 1000
    assert last == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("flops", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_lightnings_numbers(world_size: int, flops: bool, lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    other = pytest.importorskip("lightning.fabric.utilities.throughput")
    settings = {"world_size": world_size, "window_size": 3, "available_flops": 77.0, "separator": "|"}
    ours, theirs = Throughput(**settings), other.Throughput(**settings)  # type: ignore[arg-type]
    for mine, its in zip(
        fed(ours, flops=flops, lengths=lengths), fed(theirs, flops=flops, lengths=lengths), strict=True
    ):
        assert mine == pytest.approx(its)
