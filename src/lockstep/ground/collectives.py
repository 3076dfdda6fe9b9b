"""torch's collectives as a table: by name, the argument whose shape tells what a call brings."""

from __future__ import annotations

COLLECTIVES = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "input",
    "gather": "tensor",
    "scatter": "tensor",
    "all_to_all": "",
    "all_to_all_single": "input",
    "barrier": "",
    "monitored_barrier": "",
    "all_gather_object": "",
    "broadcast_object_list": "",
    "gather_object": "",
    "scatter_object_list": "",
}
"""The functions of ``torch.distributed`` that all ranks of a group call; "": no tensor says it."""

RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
"""Functions that call others since torch 2.13, which its FSDP2 calls by their new names."""
