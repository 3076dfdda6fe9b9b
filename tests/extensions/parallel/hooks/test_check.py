"""Hooks that cannot work are refused before the first step, with what to take instead."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)

from lockstep.extensions.parallel import hooks
from lockstep.extensions.parallel.hooks import check_hook
from lockstep.ground.errors import MisconfigurationException
from tests.tools.pool import RankPool

TORCHS_POWER = powerSGD_hook.PowerSGDState(None, 1, 2)
TORCHS_LOCAL = post_localSGD_hook.PostLocalSGDState(None, None, 2)


def named(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    raise AssertionError("never called")


class Callable:
    def __call__(self, state: Any, bucket: Any) -> Any: ...

    def method(self, state: Any, bucket: Any) -> Any: ...


@pytest.mark.parametrize(
    ("state", "hook"),
    [
        (None, hooks.allreduce),
        (None, hooks.fp16),
        (None, hooks.bf16),
        (hooks.PowerSGDState(), hooks.power_sgd),
        (hooks.PowerSGDState(), hooks.bf16_wrapper(hooks.power_sgd)),
        (hooks.PostLocalSGDState(3), hooks.post_local_sgd),
        (None, default_hooks.allreduce_hook),
        (None, default_hooks.fp16_compress_hook),
        (None, default_hooks.bf16_compress_hook),
        (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        (TORCHS_POWER, powerSGD_hook.powerSGD_hook),
        (TORCHS_POWER, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
        (TORCHS_LOCAL, post_localSGD_hook.post_localSGD_hook),
        (None, debugging_hooks.noop_hook),
        (None, named),
        ({}, lambda state, bucket: None),
        (None, Callable()),
        (None, Callable().method),
        (None, functools.partial(named)),
    ],
)
def test_hooks_that_work_pass(state: Any, hook: Any) -> None:
    check_hook(state, hook, [nn.Parameter(torch.ones(2))])


def wrong_bucket(state: Any, bucket: int) -> Any: ...


def wrong_return(state: Any, bucket: Any) -> Tensor: ...


@pytest.mark.parametrize(
    ("hook", "error", "said"),
    [
        (3, TypeError, "must be callable.*3 is a int"),
        (None, TypeError, "must be callable"),
        (lambda bucket: None, TypeError, r"is called as hook\(state, bucket\)"),
        (lambda a, b, c: None, TypeError, "missing a required argument: 'c'"),
        (wrong_bucket, ValueError, "bucket annotation should be dist.GradBucket.*has int"),
        (wrong_return, ValueError, "return annotation should be torch.futures.Future.*has Tensor"),
    ],
)
def test_what_is_no_hook(hook: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        check_hook(None, hook)


@pytest.mark.parametrize(
    ("state", "hook", "wanted"),
    [
        (None, hooks.power_sgd, "PowerSGDState"),
        (TORCHS_POWER, hooks.power_sgd, "lockstep.engines.ddp.hooks.PowerSGDState"),
        (hooks.PowerSGDState(), powerSGD_hook.powerSGD_hook, "torch's PowerSGDState"),
        (None, hooks.fp16_wrapper(hooks.power_sgd), "PowerSGDState"),
        (None, hooks.post_local_sgd, "PostLocalSGDState"),
        (TORCHS_POWER, post_localSGD_hook.post_localSGD_hook, "torch's PostLocalSGDState"),
        (TORCHS_POWER, default_hooks.fp16_compress_hook, "process group"),
    ],
)
def test_a_state_of_another_hook_is_refused(state: Any, hook: Any, wanted: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"has the state .*Pass .*{wanted}"):
        check_hook(state, hook)


@pytest.mark.parametrize("hook", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_torchs_quantization_is_refused_on_the_cpu(hook: str) -> None:
    with pytest.raises(MisconfigurationException, match=rf"{hook} works with NCCL only.*hooks.power_sgd"):
        check_hook(None, getattr(quantization_hooks, hook), [torch.ones(1)])


def test_torchs_batched_power_sgd_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"batched_powerSGD_hook fails.*power_sgd"):
        check_hook(TORCHS_POWER, powerSGD_hook.batched_powerSGD_hook)


def test_complex_gradients_are_not_given_to_hooks_that_drop_half_of_them() -> None:
    parameters = [torch.ones(2, dtype=torch.complex64)]
    with pytest.raises(MisconfigurationException, match="fp16_compress_hook drops the imaginary part"):
        check_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.fp16_compress_hook), parameters)
    check_hook(None, hooks.fp16, parameters)


def _prepared() -> bool:
    part = dist.new_group([0, 1])
    states = [hooks.PowerSGDState(), powerSGD_hook.PowerSGDState(None, 1, 2)]
    for state in states:
        assert hooks.prepare_state(state, part) is state
        assert state.process_group is part
    assert hooks.prepare_state(None, part, hooks.fp16) is part
    assert hooks.prepare_state(None, part, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)) is part
    assert hooks.prepare_state(None, part, named) is None
    assert hooks.prepare_state(None, None, hooks.fp16) is None
    return True


def test_a_state_without_a_group_gets_the_reducers(ranks: RankPool) -> None:
    assert ranks(2).run(_prepared) == [True, True]
