"""``mixed_precision=`` of the container: forwards in low precision, parameters and their gradients in full."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from lockstep.engines.ddp.container import DistributedDataParallel
from lockstep.engines.ddp.mixed_precision import LowPrecision
from lockstep.testing.pool import RankPool

LOW = torch.bfloat16
FULL = torch.float32


class Net(nn.Module):
    """Has what there is: a table, a recurrent layer, shared, frozen and unused parameters, buffers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(7, 6)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.shift = nn.Parameter(torch.randn(7), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("factor", torch.tensor([1.1]))
        self.register_buffer("count", torch.tensor(0))
        self.checkpointed: bool | None = None  # re-entrant or not; None without
        self.seen: set[torch.dtype] = set()

    def forward(self, words: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
        self.seen = {p.dtype for p in self.parameters()} | {more["x"].dtype}
        x = self.recurrent(self.table(words))[0] + more["x"]
        if self.checkpointed is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.checkpointed)
        return {"out": self.head(x) * self.factor.to(x.dtype) + self.shift, "other": x}


def batch(step: int, rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(7, (3, 4), generator=generator)
    return words, {"x": torch.randn(3, 4, 6, generator=generator)}


def loss_of(outputs: dict[str, Tensor]) -> Tensor:
    return outputs["out"].float().square().mean()


def descend(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def alone(steps: int) -> list[dict[str, Tensor | None]]:
    """The gradients of each step of one process that goes through both ranks' batches, with casts made by hand."""
    net = Net()
    found = []
    for step in range(steps):
        net.zero_grad()
        for micro in range(2):
            for rank in range(2):
                words, more = batch(2 * step + micro, rank)
                casts = {name: p.to(LOW) for name, p in net.named_parameters()}
                outputs = functional_call(net, casts, (words, {"x": more["x"].to(LOW)}))
                (loss_of(outputs) / 2).backward()
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()})
        descend(net)
    return found


def trained(steps: int, settings: dict[str, Any], checkpointed: bool | None = None) -> list[dict[str, Tensor | None]]:
    net = Net()
    net.checkpointed = checkpointed
    config = _MixedPrecision(param_dtype=LOW, reduce_dtype=FULL)
    model = DistributedDataParallel(net, mixed_precision=config, **settings)
    own = dict(net.named_parameters())
    found = []
    for step in range(steps):
        model.zero_grad(set_to_none=False)
        with model.no_sync():
            loss_of(model(*batch(2 * step, dist.get_rank()))).backward()
        outputs = model(*batch(2 * step + 1, dist.get_rank()))
        assert net.seen == {LOW}
        assert outputs["other"].dtype is LOW
        assert all(p is own[name] and p.dtype is FULL for name, p in net.named_parameters())
        loss_of(outputs).backward()
        assert all(p is own[name] for name, p in net.named_parameters())
        assert all(p.grad is None or p.grad.dtype is FULL for p in own.values())
        found.append({name: None if p.grad is None else p.grad.clone() for name, p in own.items()})
        descend(net)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "without views": {"gradient_as_bucket_view": False},
    "static": {"static_graph": True},
    "checked": {"check_reduction": True, "bucket_cap_mb": 0.0002},
}


def all_settings() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        found[name] = trained(3, settings)
    found["checkpoint"] = trained(3, {}, checkpointed=False)
    found["re-entrant"] = trained(3, {}, checkpointed=True)
    return found


def test_gradients_are_those_of_one_process_parameter_by_parameter(ranks: RankPool) -> None:
    expected = alone(3)
    assert expected[0]["unused.weight"] is None
    for found in ranks(2).run(all_settings):
        for name, steps in found.items():
            for mine, theirs in zip(steps, expected, strict=True):
                for parameter, grad in theirs.items():
                    where = f"{name}: {parameter}"
                    assert (mine[parameter] is None) == (grad is None), where
                    if grad is not None:
                        # the order in which micro-batches and ranks are added up
                        torch.testing.assert_close(mine[parameter], grad, rtol=1e-5, atol=1e-6, msg=where)


def in_low_precision(dtype: torch.dtype | None) -> tuple[list[dict[str, Tensor | None]], str, int]:
    net = Net()
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(param_dtype=LOW, reduce_dtype=dtype))
    loss_of(model(*batch(0, dist.get_rank()))).backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
    hook = model._get_ddp_logging_data()["comm_hook"]
    return [grads], hook, len({p.grad.dtype for p in net.parameters() if p.grad is not None} | {FULL})


@pytest.mark.parametrize(("dtype", "hook", "error"), [(None, "bf16", 2**-7), (torch.float16, "fp16", 2**-10)])
def test_gradients_travel_in_the_dtype_that_is_asked_for(
    ranks: RankPool, dtype: torch.dtype | None, hook: str, error: float
) -> None:
    net = Net()
    for rank in range(2):
        words, more = batch(0, rank)
        casts = {name: p.to(LOW) for name, p in net.named_parameters()}
        (loss_of(functional_call(net, casts, (words, {"x": more["x"].to(LOW)}))) / 2).backward()
    for (grads,), name, kinds in ranks(2).run(in_low_precision, dtype):
        assert (name, kinds) == (hook, 1)
        rounded = False
        for parameter, p in net.named_parameters():
            if p.grad is None:
                assert grads[parameter] is None
                continue
            assert (grads[parameter] - p.grad).abs().max() <= 2 * error * p.grad.abs().max()
            rounded = rounded or not torch.equal(grads[parameter], p.grad)
        assert rounded


def with_two_devices() -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    config = _MixedPrecision(param_dtype=torch.float64, reduce_dtype=FULL)
    model = DistributedDataParallel(net, device_ids=["cpu", "cpu"], mixed_precision=config)
    x = torch.arange(12.0).view(4, 3) + dist.get_rank()
    out = model(x)
    assert out.dtype is torch.float64
    out.square().mean().backward()
    return [p.grad for p in net.parameters()]  # type: ignore[misc]


def test_several_devices_have_low_precision_on_each(ranks: RankPool) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    for rank in range(2):
        (net(torch.arange(12.0).view(4, 3) + rank).square().mean() / 2).backward()
    for grads in ranks(2).run(with_two_devices):
        for grad, parameter in zip(grads, net.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


class Stop(Exception):
    pass


def raise_stop(grad: Tensor) -> None:
    raise Stop


def wrapped(net: nn.Module) -> LowPrecision:
    return LowPrecision(_MixedPrecision(param_dtype=LOW), net)


def run(low: LowPrecision, net: nn.Module, *inputs: Any) -> Any:
    return low.run(lambda args, kwargs: net(*args, **kwargs), inputs, {})


def test_parameters_are_back_in_their_places_after_a_forward_or_a_backward_that_raises() -> None:
    net = Net()
    low = wrapped(net)
    own = dict(net.named_parameters())

    def in_place() -> bool:
        return all(p is own[name] for name, p in net.named_parameters())

    with pytest.raises(IndexError):
        run(low, net, torch.tensor([[9]]), {"x": torch.zeros(1)})
    assert in_place()
    outputs = run(low, net, *batch(0, 0))
    seen = []
    outputs["other"].register_hook(lambda grad: seen.append(in_place()))
    loss_of(outputs).backward(retain_graph=True)
    assert seen == [False]
    assert in_place()
    first = {name: p.grad.clone() for name, p in own.items() if p.grad is not None}
    loss_of(outputs).backward()  # a second one through the same outputs
    assert all(torch.allclose(own[name].grad, 2 * grad, rtol=1e-4) for name, grad in first.items())  # type: ignore
    net.zero_grad()
    net.checkpointed = False
    outputs = [run(low, net, *batch(0, 0)) for _ in range(2)]  # two forwards, one backward
    (loss_of(outputs[0]) + loss_of(outputs[1])).backward()
    assert in_place()
    assert all(torch.allclose(own[name].grad, 2 * grad, rtol=1e-4) for name, grad in first.items())  # type: ignore
    outputs = run(low, net, *batch(0, 0))
    outputs["other"].register_hook(raise_stop)
    with pytest.raises(Stop):
        loss_of(outputs).backward()
    assert in_place()
    with torch.no_grad():
        run(low, net, *batch(0, 0))
    assert in_place()


def test_casts_do_not_outlive_the_backward() -> None:
    net = nn.Linear(2, 2)
    outputs = run(wrapped(net), net, torch.ones(1, 2))
    held = [cell.cell_contents for cell in next(iter(outputs._backward_hooks.values())).__closure__]
    casts = next(part for part in held if isinstance(part, list))
    refs = [weakref.ref(cast) for _, _, cast in casts]
    assert len(refs) == 2
    loss = outputs.sum()
    loss.backward()
    assert casts == []
    assert [ref() for ref in refs] == [None, None]


def test_buffers_are_cast_for_good_and_ignored_names_left_alone() -> None:
    net = Net()
    config = _MixedPrecision(param_dtype=LOW, buffer_dtype=torch.float16)
    LowPrecision(config, net, {"shift", "inner.0.weight"}).set_up()
    assert net.get_buffer("factor").dtype is torch.float16
    assert net.get_buffer("count").dtype is torch.int64
    named = dict(net.named_parameters())
    assert not hasattr(named["shift"], "_mp_param")
    assert not hasattr(named["inner.0.weight"], "_fp_param")
    bias: Any = named["inner.0.bias"]
    assert bias._mp_param.dtype is LOW
    assert bias._fp_param.data_ptr() == bias.data_ptr()
    low = LowPrecision(config, net, {"shift"})
    run(low, net, *batch(0, 0))
    assert net.seen == {LOW, FULL}  # the ignored one as it is


def copied() -> list[bool]:
    found = []
    net = nn.Linear(3, 1)
    model = DistributedDataParallel(net, mixed_precision=_MixedPrecision(param_dtype=torch.float64, reduce_dtype=FULL))
    x = torch.ones(2, 3) * (1 + dist.get_rank())
    model(x).sum().backward()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        out = other(x)
        out.sum().backward()
        found.append(out.dtype is torch.float64)
        found.append(torch.equal(other.module.weight.grad, net.weight.grad))
        found.append(all(p.dtype is FULL for p in other.parameters()))
    model.double()  # nothing is left to cast
    found.append(model(x).dtype is torch.float64)
    return found


def test_copies_run_in_low_precision_too(ranks: RankPool) -> None:
    assert ranks(2).run(copied) == [[True] * 7] * 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("16-mixed", "mixed_precision='16-mixed': give torch.nn.parallel.distributed._MixedPrecision"),
        (_MixedPrecision(param_dtype=torch.int8), "param_dtype=torch.int8: give a floating point dtype"),
        (_MixedPrecision(reduce_dtype=torch.float64), "torch.float32 parameters cannot be sent as torch.float64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LowPrecision(config, nn.Linear(1, 1))


def test_batch_norm_whose_statistics_stay_in_full_precision_is_named() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\).*buffer_dtype=torch.bfloat16"):
        wrapped(net)
    assert (
        run(LowPrecision(_MixedPrecision(param_dtype=LOW), net, {"1.weight", "1.bias"}), net, torch.ones(2, 2))
        .isfinite()
        .all()
    )
    low = LowPrecision(_MixedPrecision(param_dtype=LOW, buffer_dtype=LOW), net)
    low.set_up()
    assert run(low, net, torch.ones(2, 2)).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(ValueError, match=r"TorchScript.*torch\.autocast"):
        wrapped(torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)))
