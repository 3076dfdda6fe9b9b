"""What some tests need on ranks, seconds in each: the nursery that forks all ranks of a run imports it once."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from lockstep.ground.extensions import is_there

NAMES = (
    "lockstep.engines.sharded.model_parallel",
    "lockstep.testing.equivalence",
    "lockstep.tuner",
    "hypothesis",
    "peft",
    "tests.equivalence.models",
    "tests.loop.pieces",
    "torch._inductor.compile_fx",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.utils.flop_counter",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.tokenization_utils_fast",
)

for name in NAMES:
    if find_spec(name.partition(".")[0]) and (name != "lockstep.tuner" or is_there("extras")):
        import_module(name)
if is_there("deepspeed"):
    package = import_module("lockstep.extensions.deepspeed.package")
    import_module("lockstep.extensions.deepspeed.strategy")
    if package.is_installed():
        package.import_quietly()
