"""Communication hooks: how gradients travel, where the plain mean over all ranks is too much."""

from lockstep.parallel.hooks.check import check_hook as check_hook
from lockstep.parallel.hooks.check import prepare_state as prepare_state
from lockstep.parallel.hooks.local_steps import PostLocalSGDState as PostLocalSGDState
from lockstep.parallel.hooks.local_steps import marks_of as marks_of
from lockstep.parallel.hooks.local_steps import post_local_sgd as post_local_sgd
from lockstep.parallel.hooks.low_rank import PowerSGDState as PowerSGDState
from lockstep.parallel.hooks.low_rank import power_sgd as power_sgd
from lockstep.parallel.hooks.mean import allreduce as allreduce
from lockstep.parallel.hooks.mean import bf16 as bf16
from lockstep.parallel.hooks.mean import fp16 as fp16
from lockstep.parallel.hooks.quantized import Int8State as Int8State
from lockstep.parallel.hooks.quantized import int8 as int8
from lockstep.parallel.hooks.saved import load_state as load_state
from lockstep.parallel.hooks.saved import save_state as save_state
from lockstep.parallel.hooks.wrappers import bf16_wrapper as bf16_wrapper
from lockstep.parallel.hooks.wrappers import fp16_wrapper as fp16_wrapper
