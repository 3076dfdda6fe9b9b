"""Gathering under autocast: FSDP gathers in 16 bits what autocast would cast to them, and reduces in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lockstep.engines.sharded.fsdp_groups import groups_of

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATTENTION = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")

CAST: dict[Callable[..., Any], tuple[str, ...]] = {kind.forward: ("weight", "bias") for kind in _LAYERS}
CAST[nn.MultiheadAttention.forward] = _ATTENTION
"""Forward of a layer -> its parameters that only go into operators whose inputs autocast casts."""


def is_cast(layer: nn.Module, name: str) -> bool:
    """Return True if autocast casts a layer's own parameter wherever its forward uses it.

    Parameters of a norm, an embedding or a user's own layer do not qualify: autocast leaves them as they are, or
    casts them to float32.
    """
    return "forward" not in vars(layer) and name in CAST.get(type(layer).forward, ())


def gather_in(block: nn.Module, dtype: torch.dtype) -> None:
    """Gather a block's float32 parameters in ``dtype`` if autocast casts them; reduce all gradients in float32.

    On one process autocast makes the same tensors, once for each use. This halves the bytes sent and the memory. Other
    parameters are gathered in float32, in the same collective.

    Args:
        block: passed to ``fully_shard`` without a policy, and not used yet.
        dtype: the dtype of autocast.
    """
    assert isinstance(block, FSDPModule)
    for group in groups_of(block):
        if any(param.sharded_param.dtype != torch.float32 for param in group.fsdp_params):
            continue
        group.mp_policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for param in group.fsdp_params:
            param.__class__ = _Gathered  # torch constructs them, with the same dtype for all of a group


class _Gathered(FSDPParam):
    """A parameter of a group whose other parameters may be gathered in another dtype."""

    def init_dtype_attrs(self, mp_policy: MixedPrecisionPolicy) -> None:
        """Apply the policy, except that parameters which autocast does not cast keep their dtype."""
        super().init_dtype_attrs(mp_policy)
        if not all(is_cast(layer, name) for layer, name in _owners(self)):
            self.param_dtype = None

    # torch casts the gradients of a reduce-scatter while it copies them, from a single dtype

    @property
    def unsharded_grad_data(self) -> Tensor:
        return super().unsharded_grad_data.to(self.reduce_dtype)

    @property
    def unsharded_zero_grad_data(self) -> Tensor:
        return super().unsharded_zero_grad_data.to(self.reduce_dtype)


def _owners(param: FSDPParam) -> Iterator[tuple[nn.Module, str]]:
    info = param._module_info
    yield info.module, info.param_name
    yield from zip(info.shared_modules, info.shared_param_names, strict=True)
