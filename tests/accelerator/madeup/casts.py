"""Autocast of the made-up device: which operators run in the lower precision, and which in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep.testing.host_group import mapped
from tests.accelerator.madeup.kernels import mapped_values
from tests.accelerator.madeup.memory import on_it
from tests.accelerator.madeup.settings import NAME

LOWER = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "linear",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "mm",
    "mv",
    "bmm",
    "baddbmm",
    "addbmm",
    "chain_matmul",
    "scaled_dot_product_attention",
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
]
WIDER = [
    "exp",
    "expm1",
    "log",
    "log1p",
    "log2",
    "log10",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "softmax.int",
    "log_softmax.int",
    "softplus",
    "layer_norm",
    "group_norm",
    "nll_loss",
    "nll_loss2d",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "cross_entropy_loss",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "cosine_similarity",
    "sum",
    "sum.dim_IntList",
    "prod",
    "cumsum",
    "cumprod",
    "cdist",
]

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def casts() -> dict[str, Callable[..., Any]]:
    """The kernels, by the operators' names."""
    return {name: _cast(_operator(name), wider) for wider, names in ((False, LOWER), (True, WIDER)) for name in names}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _cast(op: Any, wider: bool) -> Callable[..., Any]:
    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.float32 if wider else torch.get_autocast_dtype(NAME)

        def change(tensor: Tensor) -> Tensor:
            fits = tensor.is_floating_point() and on_it(tensor) and tensor.dtype != torch.float64
            return tensor.to(dtype) if fits else tensor

        with torch._C._ExcludeDispatchKeyGuard(_KEY):
            return op(*mapped(args, change), **mapped_values(kwargs, change))

    return cast
