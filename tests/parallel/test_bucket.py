"""A bucket on a GPU, as far as it shows without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lockstep.parallel.bucket import Bucket


def test_marks_go_to_a_gpu_from_pinned_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read from memory that the next round writes, and that is not pinned: early or late, or after a wait."""
    copied: list[tuple[Tensor, bool]] = []
    copy = Tensor.copy_

    def watched(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied.append((source, non_blocking))
        return copy(self, source, non_blocking)

    bucket = Bucket(0, ["a", "b"], [Parameter(torch.ones(2)), Parameter(torch.ones(3))], True, 16)
    bucket.lay_out(torch.zeros(bucket.size[0]))
    bucket.arm(True, False)
    bucket.used[0] = 1
    bucket.device = torch.device("cuda", 0)
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(Tensor, "copy_", watched)
    bucket.collect(True, 0.5)
    (source, at_once) = copied[-1]
    bucket.used[:] = bytes(2)
    assert (source.tolist(), at_once) == ([1, 0], True)
