"""Peak operations per second of NVIDIA chips, by chip name and dtype, from the data sheets."""

from __future__ import annotations

from typing import Any

import torch

TERA = 1e12
TFLOAT32 = "tfloat32"
"""Table key, used like a dtype, for float32 matrices that tensor cores multiply."""

_float64, _float32, _bfloat16, _float16, _int8 = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
)


def _ampere(float64: float | None, float32: float, tfloat32: float, half: float, int8: float) -> dict[Any, float]:
    found = {_float32: float32, TFLOAT32: tfloat32, _bfloat16: half, _float16: half, _int8: int8}
    return found if float64 is None else {_float64: float64, **found}


# Pattern of the device's name -> operations per second, in 10^12, from the data sheets and architecture white papers
# of NVIDIA: of dense matrices, with float32 accumulation, at the boost clock. Data sheets since Ampere often print
# twice as much, which is for sparse matrices. The first pattern that fits counts.
CHIPS: tuple[tuple[str, dict[Any, float]], ...] = (
    (r"\bg?b200\b", _ampere(37, 75, 1125, 2250, 4500)),
    (r"\bg?h200\b.*\bnvl", _ampere(30, 60, 417.5, 835.5, 1670.5)),
    (r"\bg?h200\b", _ampere(33.5, 66.9, 494.7, 989.4, 1978.9)),
    (r"\bh100\b.*\bnvl", _ampere(30, 60, 417.5, 835.5, 1670.5)),
    (r"\bh100\b.*(pcie|hbm2e)", _ampere(25.6, 51.2, 378, 756, 1513)),
    (r"\bh100\b", _ampere(33.5, 66.9, 494.7, 989.4, 1978.9)),
    (r"\bl40s\b", _ampere(None, 91.6, 183, 362, 733)),
    (r"\bl40\b", _ampere(None, 90.5, 90.5, 181, 362)),
    (r"\bl4\b", _ampere(None, 30.3, 60, 121, 242)),
    (r"\ba100\b", _ampere(9.7, 19.5, 156, 312, 624)),
    (r"\ba6000\b", _ampere(None, 38.7, 77.4, 154.8, 309.7)),
    (r"\ba40\b", _ampere(None, 37.4, 74.8, 149.7, 299.3)),
    (r"\ba10\b", _ampere(None, 31.2, 62.5, 125, 250)),
    (r"\brtx 4090$", _ampere(None, 82.6, 82.6, 165.2, 660.6)),
    (r"\brtx 3090 ti$", _ampere(None, 40, 40, 80, 320)),
    (r"\brtx 3090$", _ampere(None, 35.6, 35.6, 71, 284)),
    (r"\bt4\b", {_float32: 8.1, _float16: 65, _int8: 130}),
    (r"\btitan rtx\b", {_float32: 16.3, _float16: 130.5, _int8: 261}),
    (r"\bv100s\b", {_float64: 8.2, _float32: 16.4, _float16: 130}),
    (r"\bv100-pcie", {_float64: 7, _float32: 14, _float16: 112}),
    (r"\bv100\b", {_float64: 7.8, _float32: 15.7, _float16: 125}),
)
