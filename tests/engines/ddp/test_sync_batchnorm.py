"""SyncBatchNorm on ranks against BatchNorm on the whole batch; what conversion there and back leaves as it was."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.engines.ddp.sync_batchnorm import (
    SyncBatchNorm,
    convert_sync_batchnorm,
    revert_sync_batchnorm,
    synchronized_layers,
)
from tests.engines.messages import counted
from tests.tools.pool import RankPool

PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@dataclass(frozen=True)
class Case:
    """A layer, and batches for two steps; the ranks' batches are as long as ``lengths`` says."""

    lengths: tuple[int, ...]
    inner: tuple[int, ...] = ()
    channels: int = 3
    dtype: torch.dtype = torch.float64
    affine: bool = True
    tracked: bool = True
    momentum: float | None = 0.1
    eps: float = 1e-5
    offset: float = 0.0
    """Distance of the inputs from 0, which naive variances do not survive."""

    def layer(self) -> Any:
        made = PLAIN[len(self.inner)](self.channels, self.eps, self.momentum, self.affine, self.tracked)
        if self.affine:
            with torch.no_grad():
                made.weight.copy_(torch.linspace(-1.5, 2, self.channels))
                made.bias.copy_(torch.linspace(3, -1, self.channels))
        return made.to(self.dtype)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs, and the gradients of the outputs."""
        source = torch.Generator("cpu").manual_seed(2)
        shape = (2, 2, sum(self.lengths), self.channels, *self.inner)
        drawn = torch.randn(shape, generator=source, dtype=torch.float64, device="cpu").to(torch.get_default_device())
        return [((x * 2 + self.offset).to(self.dtype), g.to(self.dtype)) for x, g in drawn]

    def play(self, layer: Any, rank: int | None) -> dict[str, Tensor]:
        """Two training steps and an evaluation, of one rank's samples or (None) of all."""
        found = {}
        stop = sum(self.lengths) if rank is None else sum(self.lengths[: rank + 1])
        start = 0 if rank is None else stop - self.lengths[rank]
        for step, (x, gradient) in enumerate(self.batches()):
            x = x[start:stop].clone().requires_grad_()
            y = layer(x)
            y.backward(gradient[start:stop])
            found.update({f"output {step}": y.detach(), f"gradient {step}": x.grad})
        for name, parameter in layer.named_parameters():
            found[f"gradient of {name}"] = parameter.grad
        found.update({f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()})
        layer.eval()
        found["evaluated"] = layer(self.batches()[0][0]).detach()
        return found


def play(cases: list[Case], device: str) -> list[dict[str, Tensor]]:
    torch.set_default_device(device)
    try:
        found = [case.play(convert_sync_batchnorm(case.layer()), dist.get_rank()) for case in cases]
    finally:
        torch.set_default_device(None)
    return [{name: tensor.cpu() for name, tensor in tensors.items()} for tensors in found]


def compare(pool: RankPool, cases: list[Case], tolerance: float = 1e-12, device: str = "cpu", play: Any = play) -> None:
    world = len(cases[0].lengths)
    every = pool.run(play, cases, device, world=world)
    for case, *ranks in zip(cases, *every, strict=True):
        whole = case.play(case.layer(), None)
        for name, expected in whole.items():
            parts = [rank[name] for rank in ranks]
            if name in ("output 0", "output 1", "gradient 0", "gradient 1"):
                found = torch.cat(parts)
            elif name.startswith("gradient of"):
                found = sum(parts)
            else:
                found = parts[0]
                assert all(torch.equal(part, found) for part in parts), f"{case}: {name} is not the same on all ranks"
            assert found.dtype == expected.dtype
            scale = max(1.0, expected.double().abs().max().item())
            assert found.shape == expected.shape
            difference = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
            assert difference <= tolerance * scale, f"{case}: {name} is {difference} off"


def cases_of(world: int) -> Any:
    lengths = st.tuples(*[st.integers(0, 5)] * world).filter(lambda lengths: sum(lengths) > 1)
    inner = st.lists(st.integers(1, 3), max_size=3).map(tuple)
    case = st.builds(
        Case,
        lengths,
        inner,
        channels=st.integers(1, 4),
        affine=st.booleans(),
        tracked=st.booleans(),
        momentum=st.sampled_from([0.1, 0.7, 1.0, None]),
        eps=st.sampled_from([1e-5, 0.1]),
    )
    return st.lists(case, min_size=1, max_size=8)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases=st.integers(1, 3).flatmap(cases_of))
def test_numbers_are_those_of_one_process_with_the_whole_batch(ranks: RankPool, cases: list[Case]) -> None:
    """Outputs, gradients and running statistics, with uneven and empty batches; evaluation, too."""
    compare(ranks, cases)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_narrow_types_keep_their_type(ranks: RankPool, dtype: torch.dtype, tolerance: float) -> None:
    compare(ranks, [Case((3, 5), inner, dtype=dtype) for inner in ((), (4,), (3, 2))], tolerance)


def test_statistics_survive_inputs_far_from_zero(ranks: RankPool) -> None:
    """Sums of squares would lose all digits of the variance here; the means lose eight of sixteen to rounding."""
    compare(ranks, [Case((4, 3, 2), (3,), offset=1e8)], tolerance=1e-7)


@pytest.mark.gpu
def test_numbers_on_a_gpu_are_those_on_the_cpu(ranks: RankPool) -> None:
    """Two ranks on one device, over gloo."""
    cases = [Case(lengths, inner, momentum=None) for lengths in ((3, 5), (4, 0)) for inner in ((), (4,), (3, 2))]
    compare(ranks, cases, device="cuda")
    compare(ranks, [Case((3, 5), (4,), dtype=torch.bfloat16)], 2e-2, "cuda")


def half_precision_beside_full() -> list[Any]:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(3))
    x = torch.arange(12.0).view(4, 3).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.sum().backward()
    return [y.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.running_var]  # type: ignore[union-attr]


def test_autocast_leaves_parameters_and_statistics_in_float32(ranks: RankPool) -> None:
    for *dtypes, variance in ranks(2).run(half_precision_beside_full):
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
        whole = torch.arange(12.0).view(4, 3).repeat(2, 1).var(0)
        torch.testing.assert_close(variance, 0.9 + 0.1 * whole)


# -- on ranks, other things than numbers


def count_messages() -> list[list[int]]:
    found = []
    with counted() as calls:
        for layer, wants in ((SyncBatchNorm(2), True), (SyncBatchNorm(2), False), (SyncBatchNorm(2).eval(), True)):
            x = torch.randn(3, 2, 4, requires_grad=wants)
            calls.clear()
            y = layer(x)
            forward = len(calls)
            y.sum().backward()
            found.append([forward, len(calls) - forward])
    return found


def test_one_message_forward_one_backward_none_in_evaluation(ranks: RankPool) -> None:
    for found in ranks(2).run(count_messages):
        assert found == [[1, 1], [1, 0], [0, 0]]


def muted_on_the_last(layer: Any, poison: float) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    layer = convert_sync_batchnorm(layer)
    x = torch.tensor([[1.0], [4.0], [2.0]]).double() + 10 * rank
    if rank == world - 1:
        layer.zero_weight = True
        x = torch.full((1, 1), poison).double()
    x.requires_grad_()
    y = layer(x)
    (y * torch.tensor([[1.0], [2.0], [5.0]])[: len(x)]).sum().backward()
    assert y.shape == x.shape
    return {"y": y.detach(), "gradient": x.grad, **layer.state_dict()}  # type: ignore[dict-item]


@pytest.mark.parametrize("poison", [7.0, float("nan")])
def test_a_muted_rank_changes_no_number(ranks: RankPool, poison: float) -> None:
    """Its statistics would else be in everybody's, and a NaN of its own too."""
    whole = nn.BatchNorm1d(1).double()
    x = torch.tensor([[1.0], [4.0], [2.0], [11.0], [14.0], [12.0]]).double().requires_grad_()
    y = whole(x)
    (y * torch.tensor([[1.0], [2.0], [5.0]]).repeat(2, 1)).sum().backward()
    assert x.grad is not None
    *others, zero_weight = ranks(3).run(muted_on_the_last, nn.BatchNorm1d(1).double(), poison)
    for rank, found in enumerate(others):
        rows = slice(3 * rank, 3 * rank + 3)
        torch.testing.assert_close(found["y"], y.detach()[rows], rtol=0, atol=1e-12)
        torch.testing.assert_close(found["gradient"], x.grad[rows], rtol=0, atol=1e-12)
    for name, value in whole.state_dict().items():
        if name.startswith("running"):
            torch.testing.assert_close(zero_weight[name], value, rtol=0, atol=1e-12)


def one_value(lengths: tuple[int, int]) -> str:
    try:
        SyncBatchNorm(2)(torch.zeros(lengths[dist.get_rank()], 2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("lengths", "refused"), [((1, 0), True), ((0, 0), True), ((1, 1), False), ((0, 2), False)])
def test_one_value_on_all_ranks_together_is_refused_on_each(
    ranks: RankPool, lengths: tuple[int, int], refused: bool
) -> None:
    for said in ranks(2).run(one_value, lengths):
        assert ("drop_last" in said and f"together have {sum(lengths)}" in said) == refused


def wrong_inputs() -> list[str]:
    said = []
    for layer, shape in (
        (SyncBatchNorm(2), (4,)),
        (SyncBatchNorm(2), (4, 3)),
        (convert_sync_batchnorm(nn.BatchNorm2d(2)), (4, 2)),
    ):
        with pytest.raises(ValueError) as error:
            layer(torch.zeros(shape))
        said.append(str(error.value))
    return said


def test_a_wrong_input_is_refused_before_anything_is_sent(ranks: RankPool) -> None:
    for few, channels, dimensions in ranks(2).run(wrong_inputs):
        assert "at least 2 dimensions, but got 1" in few
        assert "3 channels, but this layer has num_features=2" in channels
        assert "4D input" in dimensions, "a converted BatchNorm2d checks as it did"


def copies() -> bool:
    group = dist.new_group()
    layer: Any = convert_sync_batchnorm(nn.BatchNorm1d(2), group)
    copied: Any = copy.deepcopy(layer)
    assert copied.sync_group is group
    assert copied.weight is not layer.weight
    sent: Any = pickle.loads(pickle.dumps(layer))
    assert sent.sync_group is None
    assert type(sent) is type(layer)
    x = torch.randn(3, 2) + dist.get_rank()
    return bool(torch.equal(layer(x), copied(x)) and torch.equal(copied.running_mean, layer.running_mean))


def test_a_copy_shares_the_group_and_a_pickle_has_the_default(ranks: RankPool) -> None:
    assert ranks(2).run(copies) == [True, True]


# -- there and back, on one process


class Named(nn.BatchNorm2d):
    """One's own class, which leaves ``forward`` to torch."""

    def double_eps(self) -> float:
        return 2 * self.eps


class Activated(nn.BatchNorm2d):
    """One's own class, whose ``forward`` a conversion must not lose."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def _zoo() -> nn.ModuleDict:
    shared = nn.BatchNorm1d(3)
    return nn.ModuleDict(
        {
            "bn1": nn.BatchNorm1d(3, momentum=None),
            "nest": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm2d(3, affine=False), nn.InstanceNorm2d(3)),
            "bn3": nn.BatchNorm3d(3, track_running_stats=False).double().eval(),
            "torch's": nn.SyncBatchNorm(3),
            "shared": shared,
            "again": shared,
            "named": Named(3),
        }
    )


def test_conversion_changes_classes_and_nothing_else() -> None:
    """A user's references, optimizers, hooks and `isinstance` go on working; torch's conversion makes new layers."""
    net = _zoo()
    net["shared"].register_forward_hook(lambda *_: None)
    net["bn1"].weight.requires_grad_(False)
    objects = dict(net.named_modules(remove_duplicate=False))
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    kinds = {name: type(module) for name, module in objects.items()}
    states = {name: dict(vars(module)) for name, module in objects.items()}
    keys = list(net.state_dict())

    assert convert_sync_batchnorm(net) is net
    names = {name for name, module in net.named_modules(remove_duplicate=False) if isinstance(module, SyncBatchNorm)}
    assert names == {"bn1", "nest.1", "bn3", "torch's", "shared", "again", "named"}
    assert len(list(synchronized_layers(net))) == 6
    for name, module in net.named_modules(remove_duplicate=False):
        assert module is objects[name]
        assert isinstance(module, kinds[name])
    assert net["named"].double_eps() == 2e-5
    assert list(net.state_dict()) == keys
    assert not net["bn3"].training
    assert repr(net["nest"][1]).startswith("SyncBatchNorm2d(3, eps=1e-05, momentum=0.1, affine=False")
    convert_sync_batchnorm(net)

    assert revert_sync_batchnorm(net) is net
    assert {name: type(module) for name, module in net.named_modules(remove_duplicate=False)} == kinds
    assert {name: vars(module) for name, module in net.named_modules(remove_duplicate=False)} == states
    now = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert all(now[name] is tensor for name, tensor in tensors.items())


def test_a_forward_of_ones_own_is_left_alone_with_a_warning() -> None:
    """torch's conversion loses the activation of such a layer without a word."""
    patched = nn.BatchNorm1d(3)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    net = nn.Sequential(Activated(3), nn.LazyBatchNorm1d(), nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match="convert_sync_batchnorm") as told:
        convert_sync_batchnorm(net)
    assert [str(warning.message).partition(" overrides")[0] for warning in told] == [
        "convert_sync_batchnorm does not convert '0', because its class Activated",
        "convert_sync_batchnorm does not convert '1', because its class LazyBatchNorm1d",
    ]
    assert [isinstance(layer, SyncBatchNorm) for layer in net] == [False, False, True]
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        convert_sync_batchnorm(patched)
    assert not isinstance(patched, SyncBatchNorm)


@pytest.mark.parametrize("training", [True, False])
def test_without_a_group_it_is_plain_batch_norm_to_the_bit(training: bool) -> None:
    x = torch.randn(5, 3, 4)
    plain, own = nn.BatchNorm1d(3).train(training), SyncBatchNorm(3).train(training)
    assert torch.equal(plain(x), own(x))
    assert torch.equal(plain.running_var, own.running_var)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        own.train()(torch.zeros(1, 3))
