"""In which order hooks of several messages run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.engines.ddp.transport import AllReduce
from lockstep.extensions.parallel.hooks.hook_transport import HookTransport
from lockstep.ground import comm

# -- transports, as far as they do not need a gpu to show what they would do on one --------------------------


@pytest.mark.parametrize(("device", "waits"), [("cuda", False), ("cpu", True)])
def test_a_hook_waits_for_the_last_one_on_gloo_only(monkeypatch: pytest.MonkeyPatch, device: str, waits: bool) -> None:
    """Beside gloo for CPU tensors ("cpu:gloo,cuda:nccl", torch's default) NCCL's waited, and overlapped no more."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(comm, "world_size", lambda group: 2)
    monkeypatch.setattr(AllReduce, "buffers", lambda self, sizes: [])
    hooked: Any = HookTransport(None, None, lambda state, bucket: torch.futures.Future(), list, lambda: None)
    hooked.buffers([(4, torch.float32, torch.device(device, 0))])
    hooked._last = torch.futures.Future()
    asked: list[bool] = []
    monkeypatch.setattr(torch.futures.Future, "wait", lambda self: asked.append(True))
    hooked.flush()
    assert asked == [True] * waits
