"""Communication hooks for DDP that replace the all-reduce of gradients, to send fewer bytes or to fewer ranks."""

from lockstep.extensions.parallel.hooks.check import check_hook as check_hook
from lockstep.extensions.parallel.hooks.check import prepare_state as prepare_state
from lockstep.extensions.parallel.hooks.compress import allreduce as allreduce
from lockstep.extensions.parallel.hooks.compress import bf16 as bf16
from lockstep.extensions.parallel.hooks.compress import bf16_wrapper as bf16_wrapper
from lockstep.extensions.parallel.hooks.compress import fp16 as fp16
from lockstep.extensions.parallel.hooks.compress import fp16_wrapper as fp16_wrapper
from lockstep.extensions.parallel.hooks.error_feedback import load_state as load_state
from lockstep.extensions.parallel.hooks.error_feedback import save_state as save_state
from lockstep.extensions.parallel.hooks.local_sgd import PostLocalSGDState as PostLocalSGDState
from lockstep.extensions.parallel.hooks.local_sgd import marks_of as marks_of
from lockstep.extensions.parallel.hooks.local_sgd import post_local_sgd as post_local_sgd
from lockstep.extensions.parallel.hooks.powersgd import PowerSGDState as PowerSGDState
from lockstep.extensions.parallel.hooks.powersgd import power_sgd as power_sgd
