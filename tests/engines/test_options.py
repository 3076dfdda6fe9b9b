"""The arguments of DDPStrategy: Lightning's strategy's and torch's DistributedDataParallel's, each by its name."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.checkpoint.io import TorchCheckpointIO
from lockstep.cluster.world import World
from lockstep.engines.ddp.bucket import Bucket
from lockstep.engines.ranks import NO_EFFECT, REFUSED
from lockstep.ground.errors import MisconfigurationException
from lockstep.precision.base import Precision
from lockstep.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from tests.loop.pieces import Slope, numbers, quiet
from tests.tools.pool import RankPool

NCCL = {"NSOCKS_PERTHREAD": 4, "SOCKET_NTHREADS": 2, "MIN_NCHANNELS": 8}


def arguments(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def test_every_argument_of_torchs_class_has_an_answer() -> None:
    theirs = set(arguments(DistributedDataParallel)) - {"module"}
    assert theirs <= {*arguments(DDPStrategy), *REFUSED, *NO_EFFECT}


def test_lightnings_arguments_come_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it, and leaves it
    lightning = pytest.importorskip("lightning.pytorch.strategies")
    theirs = arguments(lightning.DDPStrategy)
    assert arguments(DDPStrategy)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device_ids": [0]}, r"device_ids=\[0\]\) is not supported: .*Trainer\(accelerator=..., devices=...\)"),
        ({"process_group": "mine"}, "process_group='mine'.*all ranks"),
        ({"mixed_precision": True}, r"Trainer\(precision=...\)"),
        ({"offload_optimizer": True}, 'offload_optimizer=True.*strategy="fsdp_cpu_offload"'),
        ({"dim": 1}, "dim=1.*each rank loads its own batches"),
        ({"bucket_cap_mb_list": [1, -25]}, "bucket_cap_mb_list=-25"),
        ({"static_grpah": True}, "no argument 'static_grpah'. Did you mean static_graph?"),
        ({"find_unused_parameter": True}, "Did you mean find_unused_parameters?"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25'"),
        ({"bucket_cap_mb_list": 25}, r"bucket_cap_mb_list=25\) must be a list"),
        ({"gradient_as_bucket_view": "False"}, r"gradient_as_bucket_view='False'\) must be True or False"),
        ({"static_graph": None}, "static_graph=None"),
        ({"timeout": timedelta(0)}, r"timeout=datetime.timedelta\(0\)\) is not a positive duration"),
        ({"process_group_backend": "cpu:gloo,cuda:ncll"}, "cuda:ncll.*Did you mean 'nccl'"),
        ({"process_group_backend": 1}, "process_group_backend=1"),
        ({"checkpoint_io": "async"}, r"checkpoint_io='async'\) must not be a string: use a CheckpointIO object"),
        ({"precision_plugin": "16-mixed"}, r"Trainer\(precision=...\)"),
    ],
)
def test_what_has_no_place_is_refused_with_the_reason(given: dict[str, Any], said: str) -> None:
    with pytest.raises(MisconfigurationException, match=said):
        DDPStrategy(**given)


def test_one_device_has_no_offload_of_its_own() -> None:
    with pytest.raises(MisconfigurationException, match=r'^SingleDeviceStrategy\(offload_optimizer=True\).*"fsdp_cpu_'):
        SingleDeviceStrategy(offload_optimizer=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"timeout": 30}, {"process_group_backend": "glooo"}, {"checkpoint_io": "async"}])
@pytest.mark.parametrize("strategy", [DDPStrategy, FSDPStrategy, ModelParallelStrategy])
def test_a_refusal_named_ddp_for_every_strategy(strategy: Any, given: dict[str, Any]) -> None:
    if set(given) <= set(arguments(strategy)):
        with pytest.raises(MisconfigurationException, match=rf"^{strategy.__name__}\({next(iter(given))}="):
            strategy(**given)


def test_what_says_nothing_new_is_taken() -> None:
    DDPStrategy(
        dim=0,
        device_ids=None,
        output_device=None,
        process_group=None,
        bucket_cap_mb=None,
        timeout=None,
        offload_optimizer=False,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        batched_grad_copy=True,
        lazy_bucket_allocation=True,
        broadcast_buffers=None,
        static_graph=0,
        process_group_backend="cpu:gloo,cuda:NCCL",
    )


def test_plugins_of_the_strategy_are_the_trainers() -> None:
    io, precision = TorchCheckpointIO(), Precision()
    trainer = quiet(strategy=DDPStrategy(checkpoint_io=io, precision_plugin=precision), devices=1)
    assert trainer.strategy.checkpoint_io is io
    assert trainer.precision_plugin is trainer.strategy.precision_plugin is precision
    with pytest.raises(MisconfigurationException, match="a run can have only one checkpoint_io"):
        quiet(strategy=DDPStrategy(checkpoint_io=io), plugins=[TorchCheckpointIO()], devices=1)


# -- options that steps feel


def gradients(**options: Any) -> tuple[list[float], list[float]]:
    module = Slope(lr=1.0)
    with torch.no_grad():
        module.w.fill_(dist.get_rank())
    quiet(strategy=DDPStrategy(**options), devices=2, max_epochs=1).fit(module, numbers(8))
    return module.gradients, [module.w.item()]


@pytest.mark.parametrize(
    "options",
    [
        {"shared_memory": False},
        {"static_graph": True},
        {"bucket_cap_mb": None, "timeout": timedelta(seconds=30)},
        {"gradient_as_bucket_view": False, "broadcast_buffers": False},
        {"forward_sync_buffers": True, "bucket_cap_mb_list": [1e-4, 1]},
        {"check_reduction": True},
    ],
)
def test_options_do_not_change_numbers(ranks: RankPool, options: dict[str, Any]) -> None:
    for found, weight in ranks(2).run(lambda: gradients(**options)):
        assert found == [1.5, 3.5, 5.5, 7.5]
        assert weight == [-18.0]


def reductions() -> dict[str, float]:
    from torch.distributed import ReduceOp

    class Reduces(Slope):
        def on_train_start(self) -> None:
            strategy: Any = self.trainer.strategy
            mine = torch.tensor(self.global_rank + 1.0)
            names = ("mean", "avg", "SUM", ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, "min", None)
            self.found = {str(name): strategy.reduce(mine, reduce_op=name).item() for name in names}
            with pytest.raises(ValueError, match="'product'"):
                strategy.reduce(mine, reduce_op="product")

    module = Reduces()
    quiet(strategy="ddp", devices=2, max_steps=1).fit(module, numbers(4))
    return module.found


def test_a_reduction_is_named_as_in_lightning(ranks: RankPool) -> None:
    """Only "mean", "sum", "min" and "max" were known; as there, None is the sum."""
    for found in ranks(2).run(reductions):
        assert list(found.values()) == [1.5, 1.5, 3.0, 3.0, 1.5, 2.0, 1.0, 3.0]


def test_without_init_sync_ranks_keep_what_they_have(ranks: RankPool) -> None:
    assert [weight for _, weight in ranks(2).run(lambda: gradients(init_sync=False))] == [[-18.0], [-17.0]]


def tampered(check: bool) -> str:
    """A fit whose gradients are not the same on every rank."""
    give_back = Bucket.give_back

    def differently(bucket: Bucket, *given: Any) -> None:
        give_back(bucket, *given)
        for parameter in bucket.parameters:
            assert parameter.grad is not None
            parameter.grad += dist.get_rank()

    trainer = quiet(strategy=DDPStrategy(check_reduction=check), devices=2, max_epochs=1)
    with patch.object(Bucket, "give_back", differently):
        if not check:
            trainer.fit(Slope(), numbers(4))
            return ""
        with pytest.raises(RuntimeError, match="check_reduction") as error:
            trainer.fit(Slope(), numbers(4))
    return str(error.value)


def test_check_reduction_names_the_parameter_in_which_ranks_differ(ranks: RankPool) -> None:
    for said in ranks(2).run(tampered, True):
        assert "rank 1 had a gradient of parameter 'w' that differs" in said
    assert ranks(2).run(tampered, False) == ["", ""]


class Words(Slope):
    """Its gradient of the table is sparse."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.table = nn.Embedding(10, 1, sparse=True).double()
        nn.init.zeros_(self.table.weight)
        self.is_sparse: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.table(batch.long()).sum()

    def on_after_backward(self) -> None:
        self.is_sparse.append(self.table.weight.grad is not None and self.table.weight.grad.is_sparse)


def sparse() -> list[float]:
    module = Words()
    quiet(strategy=DDPStrategy(), devices=2, max_epochs=1).fit(module, numbers(4))
    assert module.is_sparse == [True, True]
    return module.table.weight.flatten().tolist()


def test_sparse_gradients_are_averaged(ranks: RankPool) -> None:
    """The rows of both ranks, each with half of its gradient of 1."""
    for weights in ranks(2).run(sparse):
        assert weights == [0.0, -0.25, -0.25, -0.25, -0.25, 0, 0, 0, 0, 0]


# -- NCCL's variables


BEFORE = frozenset(os.environ)  # images with CUDA have NCCL_VERSION


def in_force() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_") and name not in BEFORE}


def test_nccls_variables_are_there_when_the_group_is_made_and_gone_after_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NCCL_MIN_NCHANNELS", "16")
    seen: list[dict[str, str]] = []
    strategy = DDPStrategy(nccl=NCCL, process_group_backend="nccl")
    strategy.connect(World.single(), torch.device("cpu"), Precision())

    def make() -> None:
        seen.append(in_force())

    monkeypatch.setattr(strategy, "_make_group", make)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for _ in range(2):
        strategy.setup_environment()
        strategy.teardown()
        assert in_force() == {"NCCL_MIN_NCHANNELS": "16"}
    assert seen == [{"NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "2", "NCCL_MIN_NCHANNELS": "16"}] * 2
    assert len(caplog.messages) == 1
    (told,) = caplog.messages
    assert "NCCL_MIN_NCHANNELS=16 (from the environment" in told


def with_gloo() -> tuple[dict[str, str], str]:
    import contextlib
    import io

    class Looks(Slope):
        def on_train_start(self) -> None:
            self.seen = in_force()

    module, said = Looks(), io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer = quiet(strategy=DDPStrategy(nccl=NCCL), devices=2, max_steps=1)
        for _ in range(2):
            trainer.fit(module, numbers(4))
    return module.seen, said.getvalue()


def test_on_gloo_they_are_told_to_have_no_effect_once_by_rank_0(ranks: RankPool) -> None:
    (seen, told), (_, silent) = ranks(2).run(with_gloo)
    assert seen == {}
    assert told.count("they have no effect, because the backend is gloo, not nccl") == 1
    assert "nccl" not in silent


def test_nccl_on_the_cpu_is_refused_for_one_rank_too() -> None:
    """It ended in torch's "device_id parameter must be an accelerator with an index"."""
    trainer = quiet(strategy=DDPStrategy(process_group_backend="NCCL"), devices=1, max_steps=1)
    with pytest.raises(MisconfigurationException, match="NCCL needs GPUs, but the devices of this run are cpu"):
        trainer.fit(Slope(), numbers(2))
